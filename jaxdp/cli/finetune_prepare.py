"""Preparation of ``jaxdp finetune``: checks every option and builds the run."""

import dataclasses
import fnmatch
import functools
import hashlib
import json
import math
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import sampling
from jaxdp.cli import (
    budget,
    cluster,
    finetune_method,
    finetune_options,
    language,
    options,
    overlap,
    recipes,
    record,
)
from jaxdp.cli.language import MODEL
from jaxdp.cli.parsing import UsageError, flag, usage
from jaxdp.cli.prepare import check_folder, initial_key, keys_of
from jaxdp.cli.printing import has_bar
from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.core.types import Perturbation
from jaxdp.data import values
from jaxdp.mechanism.sum_plan import SumPlan
from jaxdp.models.language import (
    LanguageModel,
    adapter_only,
    chats,
    generation,
    tasks,
    text,
)
from jaxdp.planner import gradients
from jaxdp.training import parallel, replaying, resolution
from jaxdp.training.ledger import LEDGER, PLAN

Batch = dict[str, np.ndarray]
Record = dict[str, Any]
#: The most public records whose gradients say the scale; and the step size, of the longest
#: that noise allows: a part, for gradients of LoRA, which starts at zero, grow on the way.
#: Where there is little noise, one step may move a loss by 1, if all records agree. AdamW
#: divides steps by the size of noised gradients, so it takes this step times that size.
_SCALE_RECORDS, _STEP = 64, 0.2
#: Pairs whose likelihoods are computed at once, before the run and where it is judged.
_PAIRS = 16


class Judge(NamedTuple):
    """Evaluation of a model on public records."""

    fn: Callable[[Any], dict[str, float]]  # params -> metrics, the main one first
    num_examples: int


class Job(NamedTuple):
    """Checked inputs of a run: options, plan, keys, parameters and data."""

    command: options.Finetune  # with all that recipe and defaults say
    recipe: recipes.Recipe
    plan: SumPlan
    keys: keys_lib.Keys
    out: pathlib.Path
    task: tasks.Task
    params: Any  # initial ones, on the host, or split over a mesh
    train: Batch
    judge: Judge
    shown: str  # digest of the public records
    warnings: list[str]

    @property
    def model(self) -> LanguageModel:
        return self.task.model

    @property
    def numbers(self) -> dict[str, Any]:
        """The recipe's numbers that the method uses, by name."""
        names = () if self.plan.draws_directions else finetune_options.OF_SLOPES
        given = dataclasses.asdict(self.recipe)
        return {name: value for name, value in given.items() if name not in names}

    @property
    def trainable(self) -> Callable[[str], bool] | None:
        return trainable(self.command)


def prepare(command: options.Finetune, keys: keys_lib.Keys | None = None) -> Job:
    """Checks the options and makes all that they name, from cheap to costly.

    ``keys`` are those of :func:`keys_of`, for which several processes wait. All of them
    call this, and where one refuses, all do.
    """
    keys = keys_of(command) if keys is None else keys
    job, judged = cluster.agreed(command, lambda: _loaded(command, keys))
    leaves = str(replaying.describe_leaves(job.params))
    given = {"model": leaves, "train": job.train, "eval": judged}
    cluster.check_alike(job.command, keys, **given)
    # They compute together with a model that is split between them: all are here.
    return cluster.agreed(command, lambda: _computed(job, judged))


def _loaded(command: options.Finetune, keys: keys_lib.Keys) -> tuple[Job, Batch]:
    """Returns a job that nothing was computed for yet, and the encoded public records."""
    command, tokenizer, task = _begun(_with_method(command))
    shown = _read(command, "eval")
    digest = _digest(shown)
    if command.resume:
        _check_shown(command, digest)
    judged = _encoded(command, tokenizer, shown)
    records = _read(command, "train")
    train = _encoded(command, tokenizer, records, private=True)
    overlap.refuse(_rows(train), _rows(judged), "--eval", "--train", command.eval)

    command = finetune_options.with_batch_size(command, len(records))
    recipe = recipe_of(command)
    out = out_of(command)
    if command.resume:  # The plan that was calibrated then, to the last digit.
        plan = budget.read_plan(command, out / PLAN, "--out")
    else:
        plan = plan_of(command, recipe, len(records))
        _check_out(command, out)
    cluster.check_plan(command, plan)
    key = initial_key(keys.direction)
    # Whole gradients are clipped, and a process writes what they move.
    placing = cluster.placing(command, None if plan.replayable else trainable(command))
    params = language.initial(command, task.model, command.model, key, placing=placing)
    if command.resume:
        header = record.read(out, "--out").header
        params = language.recorded(params, out, header)
    judge = _judge(command, task, tokenizer, judged, shown)
    job = Job(command, recipe, plan, keys, out, task, params, train, judge, digest, [])
    return job, judged


def _digest(records: list[Record]) -> str:
    """Returns the SHA-256 of public records, whatever the file's format and name."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def _check_shown(command: options.Finetune, digest: str) -> None:
    """Refuses to judge a run on other public records than it began with.

    Its report and its privacy card would not belong together; and private records could be
    given, beside others as those of a run that is over.
    """
    header = record.read(out_of(command), "--out").header
    if header["note"].get("eval", digest) != digest:  # Runs of before have none.
        raise UsageError(
            "--eval must be left out with --resume or hold the records that it held when "
            f"the run began, got others in {str(command.eval)!r}"
        )


def _computed(job: Job, judged: Batch) -> Job:
    """Computes what a job takes from its initial model, on records that it is given."""
    command, plan, task, params = job.command, job.plan, job.task, job.params
    if command.task == "preference" and not command.reference_free:
        initial = jax.tree.map(jnp.asarray, params)
        pairs: list[Any] = [judged, job.train]
        for batch in pairs:
            batch["reference"] = tasks.log_likelihoods(
                task, initial, batch, batch_size=command.microbatch_size or _PAIRS
            )
    if not command.resume:
        command, plan = _scaled(command, plan, task, params, judged)
    said, recipe = _unresolved(command, params), recipe_of(command)
    return job._replace(command=command, plan=plan, recipe=recipe, warnings=said)


def _begun(
    command: options.Finetune,
) -> tuple[options.Finetune, text.Tokenizer, tasks.Task]:
    """Returns a completed command, its tokenizer and task; reads no records."""
    command = finetune_options.completed(command)
    finetune_options.check_numbers(command)
    _check_files(command)
    model = _model(command)
    with usage(command, "--model"):
        tokenizer = text.Tokenizer.load(command.model)
    command, task = _task(command, model, tokenizer)
    _check_trainable(command, model)
    return command, tokenizer, task


def _check_trainable(command: options.Finetune, model: LanguageModel) -> None:
    """Refuses a pattern that no leaf of the model matches."""
    moves = trainable(command)
    any_key = keys_lib.from_words(np.zeros(2, np.uint32))  # Only paths are read.
    paths = [*language.flat(jax.eval_shape(model.init, any_key))]
    if moves is not None and not any(map(moves, paths)):
        raise UsageError(
            f"--trainable must match a leaf of the model, such as {paths[-1]}, got "
            f"{command.trainable}"
        )


def _with_method(command: options.Finetune) -> options.Finetune:
    """Returns the command with a method in place of ``--method auto``, and says why."""
    if command.method != "auto":
        return command
    finetune_options.check_auto(command)
    if not command.resume:  # Before both are compiled.
        check_folder(out_of(command), command.overwrite)
    if command.trainable == "all":
        chosen = finetune_method.Choice(
            "dpzero", "--trainable all, of which dp-lora takes no gradients"
        )
    else:
        limit = finetune_method.limit()  # Before the private records are read.
        first, zeroth = (_needed(command, name) for name in ("dp-lora", "dpzero"))
        chosen = finetune_method.choice(first, zeroth, *limit)
    if not command.quiet:
        line = f"jaxdp: --method auto is {chosen.method}: {chosen.reason}"
        print(line, file=sys.stderr)
    return dataclasses.replace(command, method=chosen.method)


def _needed(command: options.Finetune, method: str) -> int:
    """Returns the bytes that the command needs with a method, from public shapes."""
    command = dataclasses.replace(command, method=method)
    command, tokenizer, task = _begun(command)
    shown = _read(command, "eval")[:1]
    record = _encoded(command, tokenizer, shown)
    if command.task == "preference" and not command.reference_free:
        record["reference"] = np.zeros((1, 2), np.float32)
    count = len(_read(command, "train"))
    rows = finetune_options.with_batch_size(command, count).batch_size or count
    return finetune_method.needed(command, task, record, trainable(command), rows)


def out_of(command: options.Finetune) -> pathlib.Path:
    """Returns the folder of a run."""
    if command.out is not None:
        return command.out
    if command.train is None:
        if command.resume:
            raise UsageError("--out or --train must be given, got neither")
        raise UsageError("--train must be a path, got nothing")
    return pathlib.Path("runs", pathlib.Path(command.train).stem)


def trainable(command: options.Finetune) -> Callable[[str], bool] | None:
    """Returns a predicate on the paths of leaves that move; None if all move."""
    return _matching(command.trainable)


@functools.cache  # One object each: an optimizer of it is one object too.
def _matching(moving: str) -> Callable[[str], bool] | None:
    if moving == "all":
        return None
    if moving == "head":
        return lambda path: path.startswith("classifier/")
    if moving in options.TRAINABLE:
        return adapter_only
    return lambda path: fnmatch.fnmatchcase(path, moving)


def recipe_of(command: options.Finetune) -> recipes.Recipe:
    """Returns the hyper-parameters of a completed command as a :class:`recipes.Recipe`.

    1 stands for a clip and a step size that are not known yet.
    """
    names = [field.name for field in dataclasses.fields(recipes.Recipe)]
    given = {name: getattr(command, name, None) for name in names}
    unknown: dict[str, Any] = {"l2_clip_norm": 1.0, "learning_rate": 1.0}
    return recipes.Recipe(**unknown | {n: x for n, x in given.items() if x is not None})


def plan_of(
    command: options.Finetune, recipe: recipes.Recipe, num_examples: int
) -> SumPlan:
    """Returns the calibrated plan of a completed command."""
    size = command.batch_size or num_examples
    chosen: sampling.AnySampler = sampling.FullBatch()
    with usage(command, "--epsilon"):  # What else is wrong with the numbers together.
        if size < num_examples and command.sampling == "poisson":
            chosen = sampling.TruncatedPoisson(sampling_prob=size / num_examples)
        elif size < num_examples:
            chosen = sampling.FixedSize(size)
        return recipes.make_plan(
            recipe,
            "dpgd" if command.method == "dp-lora" else "dpzero",
            num_examples=num_examples,
            sampling=chosen,
            relation=command.relation,  # pyright: ignore[reportArgumentType]
            epsilon=command.epsilon,
            delta=command.delta,
        )


def _scaled(
    command: options.Finetune,
    plan: SumPlan,
    task: tasks.Task,
    params: Any,
    public: Batch,
) -> tuple[options.Finetune, SumPlan]:
    """Fills in clip and step size of gradients, from those of a few public records.

    By the rule of ``jaxdp.recommend``, in place of its rehearsals a part of the step. Both
    have three digits.
    """
    if None not in (command.l2_clip_norm, command.learning_rate):
        return command, plan

    @jax.jit
    def rows(params: Any, records: Batch) -> jax.Array:
        found = plan.contributions(
            task.value_fn, params, records, None, trainable=trainable(command)
        )
        return found.rows

    count = len(next(iter(public.values())))
    chosen = np.linspace(0, count - 1, min(count, _SCALE_RECORDS)).astype(int)
    size = command.microbatch_size or len(chosen)
    params = jax.tree.map(jnp.asarray, params)  # Read from a file: once.
    found = [
        parallel.on_host(
            rows(params, {n: x[chosen[i : i + size]] for n, x in public.items()})
        )
        for i in range(0, len(chosen), size)
    ]
    with usage(command, "--eval"):
        median = gradients.median_norm(np.concatenate(found))
    clip = command.l2_clip_norm or gradients.rounded(gradients.CLIP * median)
    plan = dataclasses.replace(plan, l2_clip_norm=clip)
    longest = gradients.longest_step(median, plan.num_steps, float(plan.noise_std))
    rate = min(_STEP * longest, 1 / (clip * median))
    if command.optimizer == "adamw":  # Root mean square of a coordinate.
        rate *= math.hypot(float(plan.noise_std), clip / math.sqrt(found[0].shape[1]))
    rate = command.learning_rate or gradients.rounded(rate)
    command = dataclasses.replace(command, l2_clip_norm=clip, learning_rate=rate)
    return command, plan


def _check_files(command: options.Finetune) -> None:
    """Refuses a file of public records that is the file of the private ones."""
    shown, train = pathlib.Path(command.eval), pathlib.Path(command.train)
    with usage(command, "--eval"):  # A folder on the way that may not be read.
        same = overlap.same_file(train, shown)
    if same:
        raise UsageError(
            "--eval must be public records, not those of --train, got "
            f"{str(command.eval)!r}: metrics are published without noise"
        )


def _rows(batch: Batch) -> list[bytes]:
    """Returns the arrays of each record as bytes, for comparison with other records."""
    return [
        b"".join(x[i].tobytes() for x in batch.values())
        for i in range(len(next(iter(batch.values()))))
    ]


def _check_out(command: options.Finetune, out: pathlib.Path) -> None:
    """Refuses a folder that cannot hold a run, or whose model would be lost."""
    check_folder(out, command.overwrite)
    kept = out / MODEL
    if kept.resolve() == pathlib.Path(command.model).resolve():
        raise UsageError(
            f"--out must be another folder than that of --model, got {str(out)!r}, whose "
            f"{MODEL}/ it is"
        )
    tuned = (out / LEDGER).exists() and record.said(
        record.read(out, "--out"), options.Finetune
    )
    if kept.exists() and not tuned:
        raise UsageError(
            f"--out must be a folder without {MODEL}/, got {str(out)!r}, where it is of no "
            "run"
        )


# --- model and records -------------------------------------------------------------


def _model(command: options.Finetune) -> LanguageModel:
    model = language.model_of(command, command.model)
    if command.task in finetune_options.DECODERS and not model.config.is_decoder:
        raise UsageError(
            "--task must be prompt or head with a model that is no decoder, "
            f"{model.config.model_type}; got {command.task}"
        )
    return model


def _task(
    command: options.Finetune, model: LanguageModel, tokenizer: text.Tokenizer
) -> tuple[options.Finetune, tasks.Task]:
    """Returns the task, and the command with text lengths, which the model limits."""
    limit = model.config.max_length
    length = command.max_length
    if length is None:
        command = dataclasses.replace(
            command, max_length=min(finetune_options.MAX_LENGTH, limit)
        )
    with usage(command):
        validate.integer(at_least=2, at_most=limit, max_length=command.max_length)
    words = command.label_words or ()
    if command.task in finetune_options.DECODERS and command.span_length is None:
        follows = functools.partial(text.continuation, tokenizer, command.template)
        longest = max((len(follows(word)) for word in words), default=0)
        span = command.max_length // 2
        if command.template is not None:  # No chat, where all answers count.
            span = longest or min(finetune_options.SPAN_LENGTH, span)
        command = dataclasses.replace(command, span_length=span)
    if command.task == "choice" and words:
        with usage(command, "--label-words"):
            text.check_choices(tokenizer, command.template, words, command.span_length)
    if command.task == "prompt":
        with usage(command, "--label-words"):
            return command, tasks.prompt(model, tokenizer.label_words(words))
    if command.task == "head":
        return command, tasks.head(model)
    more: dict[str, Any] = {}
    if command.task == "preference":
        more = {"beta": command.beta, "reference_free": command.reference_free}
    if command.template is None:
        try:
            with usage(command, "--model"):
                tokenizer.chat([])
        except ImportError as error:
            raise UsageError(str(error)) from error
    maker = getattr(tasks, command.task)
    return command, maker(model, span_length=command.span_length, **more)


def _read(command: options.Finetune, name: str) -> list[Record]:
    with usage(command, flag(name)):
        more = [command.choices_field, command.answer_field, command.label_field]
        fields = ["messages"] if command.task == "instruction" else ["prompt"]
        if command.template is not None:
            fields = text.template_fields(command.template)
            if not fields:
                raise UsageError(
                    "--template must name a field of the records, as in {text}, got "
                    f"{command.template!r}"
                )
        if command.task == "preference":
            more = ["chosen", "rejected"]
        fields += [field for field in more if field is not None]
        path = getattr(command, name)
        # A private record without a field counts zero, and so does a line that is none.
        private = name == "train"
        records = text.read_records(path, () if private else fields, private=private)
        for field in fields:
            if not any(field in record for record in records):
                raise ValueError(
                    f"{path}: no record has a field {field!r}{values.only(records[0])}"
                )
        return records


def _encoded(
    command: options.Finetune,
    tokenizer: text.Tokenizer,
    records: list[Record],
    *,
    private: bool = False,
) -> Batch:
    """Encodes records for a task, all in one shape.

    A private record that cannot be encoded counts zero, and is not named.
    """
    about = "--train" if private else "--eval"
    form: dict[str, Any] = {
        "max_length": command.max_length,
        "template": command.template,
        "truncate": command.truncate,
        "private": private,
    }
    with usage(command, about):
        if command.task in ("instruction", "preference"):
            form["span_length"] = command.span_length
        if command.task == "instruction":
            del form["template"]
            return _counting(chats.encode_instruction(tokenizer, records, **form))
        if command.task == "preference":
            return _counting(chats.encode_preference(tokenizer, records, **form))
        if command.task == "generation":
            form |= {"answer": command.answer_field, "span_length": command.span_length}
            return _counting(text.encode_generation(tokenizer, records, **form))
        label = text.labels(
            records, command.label_field, command.labels, private=private
        )
        if command.task == "choice":
            batch = text.encode_choices(
                tokenizer,
                records,
                choices=command.choices_field or command.label_words,
                num_choices=command.num_choices,
                span_length=command.span_length,
                **form,
            )
            there = batch["valid"][np.arange(len(label)), label]
            if not private:
                _check_right_choice(command, records, there, label)
            label = np.where(there, label, -1).astype(np.int32)
        else:
            batch = text.encode_classification(tokenizer, records, **form)
            label = np.where(batch.pop("valid", True), label, -1).astype(np.int32)
        if private and (label < 0).all():
            raise ValueError(
                "one record or more must have a text and the label of a class, got none"
            )
    if command.task == "prompt" and "position" not in batch:
        raise UsageError(
            "--template must have {mask} where the label word is to stand, got "
            f"{command.template!r}"
        )
    if command.task == "head":
        batch.pop("position", None)
    return batch | {"label": label}


def _counting(batch: Batch) -> Batch:
    """Returns a batch; refuses one without an answer that the task can learn from."""
    tokens = batch["tokens"]
    equal = tokens.ndim == 3 and (tokens[:, 0] == tokens[:, 1]).all()  # Pairs.
    if equal or not batch["span"].any():
        raise ValueError(
            "one record or more must have an answer that the task can learn from, got none"
        )
    return batch


def _check_right_choice(
    command: options.Finetune,
    records: list[Record],
    there: np.ndarray,
    label: np.ndarray,
) -> None:
    if not there.all():
        i = int(np.argmin(there))
        raise ValueError(
            f"{values.place_of(records[i], i)}: {command.label_field} must be that of "
            "one of its choices" + values.got(command.labels[label[i]])
        )


# --- judging -----------------------------------------------------------------------


def _judge(
    command: options.Finetune,
    task: tasks.Task,
    tokenizer: text.Tokenizer,
    data: Batch,
    records: list[Record],
) -> Judge:
    """Builds the evaluation of a model on the public records."""
    label: Any = data.get("label")
    given: Any = data

    def of_classes(params: Any) -> dict[str, float]:
        found = tasks.predict(task, params, given)
        metrics = {"test_accuracy": tasks.accuracy(found, label)}
        if command.choices_field is None:  # Else a class is no more than a place.
            metrics["test_macro_f1"] = tasks.macro_f1(found, label)
        return metrics

    def of_pairs(params: Any) -> dict[str, float]:
        size = command.microbatch_size or _PAIRS  # As of the reference: the same bits.
        gain = tasks.log_likelihoods(task, params, given, batch_size=size)
        margin = np.diff(gain - data.get("reference", 0), axis=1)
        # Before the run all gain nothing: a tie is one half.
        return {"test_accuracy": float(np.mean(margin < 0) + np.mean(margin == 0) / 2)}

    if command.task == "preference":
        return Judge(of_pairs, len(records))
    if label is not None:
        return Judge(of_classes, len(records))
    if command.task == "instruction":
        prompts = _prompts(command, task, tokenizer, records)
        answers = [[answer] for answer in chats.answers(records)]
        decode = functools.partial(chats.decode_answer, tokenizer)
        return _judge_of_texts(command, task, given, prompts, answers, decode)

    def line(tokens: np.ndarray) -> str:
        # An answer is one line: a model that is not tuned goes on writing.
        return tokenizer.decode(tokens).strip().partition("\n")[0]

    found = [record[command.answer_field] for record in records]
    answers = [x if isinstance(x, list) else [str(x)] for x in found]
    room = command.max_length - command.span_length  # No prompt is longer.
    prompts = {name: x[:, :room] for name, x in data.items()}
    return _judge_of_texts(command, task, given, prompts, answers, line)


def _judge_of_texts(
    command: options.Finetune,
    task: tasks.Task,
    data: Any,
    prompts: Any,
    answers: list[list[str]],
    decode: Callable[[np.ndarray], str],
) -> Judge:
    """Builds the evaluation of what a model writes after prompts."""
    bar = command.progress and has_bar(command)

    def of_texts(params: Any) -> dict[str, float]:
        perplexity = tasks.perplexity(task, params, data, progress=bar)
        found = generation.generate(
            task.model,
            params,
            prompts,
            max_new_tokens=command.span_length,
            progress=bar,
        )
        pairs = [*zip(map(decode, found), answers, strict=True)]
        return {
            "test_token_f1": float(np.mean([tasks.token_f1(*x) for x in pairs])),
            "test_exact_match": float(np.mean([tasks.exact_match(*x) for x in pairs])),
            "test_perplexity": perplexity,
        }

    return Judge(of_texts, len(answers))


def _prompts(
    command: options.Finetune,
    task: tasks.Task,
    tokenizer: text.Tokenizer,
    records: list[Record],
) -> Batch:
    """Encodes what the public records ask, with room for an answer after it."""
    limit = task.model.config.max_length
    room = limit - command.span_length
    if room < 2:
        raise UsageError(
            f"--span-length must be an integer >= 1 and <= {limit - 2}, for a prompt and "
            f"an answer within {limit} tokens, got {command.span_length}"
        )
    with usage(command, "--eval"):
        length = min(command.max_length, room)
        return chats.encode_prompts(tokenizer, records, max_length=length)


def _unresolved(command: options.Finetune, params: Any) -> list[str]:
    """Returns warnings about a smoothing radius that the arithmetic cannot resolve."""
    if command.smoothing_radius is None:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolution.warn_if_unresolved(
            Perturbation(command.smoothing_radius),
            params,
            trainable=trainable(command),
            compute_dtype=command.compute_dtype,
        )
    flagged = flag("smoothing_radius") + " "
    return [str(x.message).replace("smoothing_radius=", flagged, 1) for x in caught]
