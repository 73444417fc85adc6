"""Defaults and consistency checks of the options of ``jaxdp finetune``."""

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from jaxdp.cli import options, parsing
from jaxdp.cli.parsing import UsageError, flag, usage
from jaxdp.core import validate

WITH_WORDS, WRITTEN = ("prompt", "choice"), ("generation", "instruction")
DECODERS = ("choice", *WRITTEN, "preference")
CLASSES = ("prompt", "head", "choice")

#: Options of one method alone.
OF_SLOPES = ("smoothing_radius", "num_directions", "direction")
OF_GRADIENTS = ("optimizer",)
#: Where neither the options nor a recipe say otherwise. Of dpzero, for all parameters: the
#: DPZero paper's numbers for RoBERTa-large and the released script's clip, but a tenth of
#: the paper's steps. For adapters: step sizes and radii of MeZO (Malladi et al., 2023).
#: Clips of adapters, whose slopes are smaller, and the numbers of heads were not tuned;
#: leaves by a pattern have those of all. Of
#: dp-lora, clip and step size follow from public records.
_NUMBERS = {"delta": options.DEFAULT_DELTA, "compute_dtype": "float32"}
_OF_METHOD: dict[str, dict[str, Any]] = {
    "dpzero": {
        "direction": "rademacher",
        "num_directions": 1,
        "num_steps": 1000,
        "l2_clip_norm": {"all": 200.0, "lora": 30.0, "prefix": 30.0, "head": 10.0},
        "learning_rate": {"all": 1e-6, "lora": 5e-5, "prefix": 1e-3, "head": 1e-3},
        "smoothing_radius": {"all": 1e-3, "lora": 1e-2, "prefix": 1e-1, "head": 1e-3},
    },
    "dp-lora": {"num_steps": 300, "microbatch_size": 16, "optimizer": "sgd"},
}
MAX_LENGTH, SPAN_LENGTH = 128, 32
BETA = 0.1  # Rafailov et al., 2023.
_BATCH_SIZE = 64


def _recipes() -> Iterable[tuple[str, dict[str, Any]]]:
    path = pathlib.Path(__file__).with_name("finetune_recipes.toml")
    for family in tomllib.loads(path.read_text(encoding="utf-8")).values():
        for model, of_model in family["models"].items():
            for task, of_task in family["tasks"].items():
                said = (family["shared"] | of_model | of_task).items()
                frozen = {n: tuple(x) if isinstance(x, list) else x for n, x in said}
                yield f"{model}/{task}", frozen


#: Options that ``--recipe`` sets, by its name: ``RECIPES["roberta-large/sst-2"]``.
RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(dict(_recipes()))


def check_auto(command: options.Finetune) -> None:
    """Refuses options with ``--method auto`` that one of its methods has no use for."""
    parsing.refuse(command, OF_SLOPES, "--method dpzero", there=False)
    parsing.refuse(command, OF_GRADIENTS, "--method dp-lora", there=False)
    for name in ("learning_rate", "l2_clip_norm"):
        if getattr(command, name) is not None:
            raise UsageError(
                f"{flag(name)} must be left out with --method auto, got "
                f"{getattr(command, name)}: losses and gradients have other scales"
            )
    if command.distributed:
        raise UsageError(
            "--method must be dpzero or dp-lora with --distributed, got auto: processes "
            "may differ in what fits"
        )


def completed(command: options.Finetune) -> options.Finetune:
    """Fills in options that are not given, from the command's recipe and the defaults."""
    gradients = command.method == "dp-lora"
    if command.trainable is None:
        moving = "lora" if gradients or command.quantised else "all"
        command = dataclasses.replace(command, trainable=moving)
    refuse = functools.partial(parsing.refuse, command)
    refuse(OF_SLOPES, "--method dpzero", not gradients)
    refuse(OF_GRADIENTS, "--method dp-lora", gradients)
    if gradients and command.trainable == "all":
        raise UsageError(
            "--trainable must be lora, prefix, head or a pattern with --method dp-lora, "
            "got all: a gradient of all parameters for each record (jaxdp.plans.DPGD takes "
            "them)"
        )
    command = _with_recipe(command)
    for name in ("model", "train", "eval", "task"):
        if getattr(command, name) is None:
            what = "one of " + ", ".join(options.LANGUAGE_TASKS)
            what = what if name == "task" else "a path"
            raise UsageError(f"{flag(name)} must be {what}, got nothing")
    _refuse_strangers(command)
    task = command.task
    if task in WITH_WORDS and command.choices_field is None:
        words = command.label_words or ()
        if len(words) < 2:
            other = " or --choices-field" if task == "choice" else ""
            raise UsageError(
                f"--label-words{other} must be given with --task {task}, two or more "
                f"words as in yes,no; got {','.join(words) or 'nothing'}"
            )
    if task == "head" and command.labels is None:
        raise UsageError(
            "--labels must be a number or names with --task head, got nothing: the set of "
            "classes is public, and is not read from private records"
        )
    if task in ("prompt", "choice", "generation") and command.template is None:
        raise UsageError(f"--template must be a text with --task {task}, got nothing")
    defaults: dict[str, Any] = {
        name: value.get(command.trainable, value["all"])
        if isinstance(value, dict)
        else value
        for name, value in (_NUMBERS | _OF_METHOD[command.method]).items()
    }
    if task == "head":
        defaults["template"] = "{text}"
    chat = command.template is None and task in ("instruction", "preference")
    defaults["truncate"] = "left" if chat else "right"
    if task == "preference":
        defaults["beta"] = BETA
    if task in CLASSES:
        defaults["label_field"] = "label"
        number = command.num_choices if command.choices_field else None
        defaults["labels"] = number or len(command.label_words or ())
    if task == "generation":
        defaults["answer_field"] = "answer"
    chosen = {n: x for n, x in defaults.items() if getattr(command, n) is None}
    command = dataclasses.replace(command, **chosen)
    names = parsing.class_names(command.labels)
    command = dataclasses.replace(command, labels=names)
    _check_classes(command)
    if command.eval_every is None:
        every = max(1, (command.num_steps or 0) // 20)
        command = dataclasses.replace(command, eval_every=every)
    return command


def _with_recipe(command: options.Finetune) -> options.Finetune:
    """Fills in options that are not given, from ``--recipe``."""
    if command.recipe is None:
        return command
    if command.recipe not in RECIPES:
        raise UsageError(
            f"--recipe must be one of {', '.join(RECIPES)}; got {command.recipe!r}"
        )
    said = {**RECIPES[command.recipe]}
    if command.task not in (None, said["task"]):
        raise UsageError(
            f"--task must be left out with --recipe {command.recipe} or be "
            f"{said['task']}, got {command.task}"
        )
    del said["batch_size"]  # Cut to the records where that is known.
    if command.trainable != "all":  # The paper tuned no adapters.
        for name in ("l2_clip_norm", "smoothing_radius", "learning_rate"):
            del said[name]
    if command.method == "dp-lora":  # Nor did it take gradients.
        del said["num_steps"], said["direction"]
    if command.choices_field is not None:
        for name in ("labels", "label_words", "span_length"):  # Of the words' choices.
            said.pop(name, None)
    chosen = {name: x for name, x in said.items() if getattr(command, name) is None}
    return dataclasses.replace(command, **chosen)


def _refuse_strangers(command: options.Finetune) -> None:
    """Refuses options that would have no effect."""
    refuse = functools.partial(parsing.refuse, command)
    task, moving = command.task, command.trainable
    refuse(("label_words",), "--task prompt or choice", task in WITH_WORDS)
    of_classes = ("labels", "label_field")
    refuse(of_classes, "--task prompt, head or choice", task in CLASSES)
    refuse(("choices_field", "num_choices"), "--task choice", task == "choice")
    refuse(("answer_field",), "--task generation", task == "generation")
    several = "--task choice, generation, instruction or preference"
    refuse(("span_length",), several, task in DECODERS)
    refuse(("beta", "reference_free"), "--task preference", task == "preference")
    if task == "instruction" and command.template is not None:
        raise UsageError(
            "--template must be left out with --task instruction, whose messages are "
            f"rendered by the chat template of --model; got {command.template!r}"
        )
    refuse(("lora_rank", "lora_alpha"), "--trainable lora", moving == "lora")
    refuse(("prefix_length",), "--trainable prefix", moving == "prefix")
    few = [name for name in options.TRAINABLE if name != "all"]
    refuse(
        ("quantised",), f"--trainable {', '.join(few[:-1])} or {few[-1]}", moving in few
    )
    sampled = command.sampling != "full"
    refuse(("batch_size",), "--sampling poisson or fixed-size", sampled)
    if moving == "head" and task != "head":
        raise UsageError(f"--trainable head is for --task head only, got --task {task}")
    if command.choices_field is None:
        refuse(("num_choices",), "--choices-field", there=False)
    elif command.label_words is not None:
        raise UsageError(
            "--label-words must be left out with --choices-field, got "
            f"{','.join(command.label_words)}"
        )
    elif command.num_choices is None:
        raise UsageError(
            "--num-choices must be an integer >= 2 with --choices-field, got nothing: how "
            "many choices there are is public, and is not read from private records"
        )


def _check_classes(command: options.Finetune) -> None:
    names = command.labels
    if command.task not in CLASSES:
        return
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(
            "--labels must be two or more different names, or how many numbers there are, "
            f"got {','.join(names) or 'none'}"
        )
    words = command.label_words or names
    if len(words) != len(names):
        raise UsageError(
            f"--label-words must be one for each of the labels {','.join(names)}, got "
            f"{','.join(words)}"
        )
    if len(names) != (command.num_choices or len(names)):
        raise UsageError(
            f"--labels must be one for each of {command.num_choices} choices, got "
            f"{','.join(names)}"
        )


def check_numbers(command: options.Finetune) -> None:
    """Refuses numbers out of range."""
    with usage(command):
        validate.positive(epsilon=command.epsilon)
        validate.probability(delta=command.delta)
        # The step counter is a 32-bit integer.
        validate.integer(num_steps=command.num_steps, at_most=2**31 - 1)
        validate.integer(eval_every=command.eval_every)
        some = {
            name: getattr(command, name)
            for name in ("microbatch_size", "lora_rank", "prefix_length", "span_length")
            if getattr(command, name) is not None
        }
        validate.integer(**some)
        for name in ("l2_clip_norm", "learning_rate", "lora_alpha", "beta"):
            if getattr(command, name) is not None:
                validate.positive(**{name: getattr(command, name)})


def with_batch_size(command: options.Finetune, num_examples: int) -> options.Finetune:
    """Returns the command with a batch size, at most the number of records."""
    size = command.batch_size
    if command.sampling == "full":
        return command
    if size is None:
        recipe = RECIPES.get(command.recipe or "", {})
        size = min(recipe.get("batch_size", _BATCH_SIZE), num_examples)
    if not 1 <= size <= num_examples:
        raise UsageError(
            f"--batch-size must be an integer from 1 to {num_examples}, the records of "
            f"--train, got {size}"
        )
    return dataclasses.replace(command, batch_size=size)
