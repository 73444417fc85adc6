"""From the options of ``jaxdp train`` to a run: everything is checked here."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp import _validate, models, plans
from jaxdp import keys as keys_lib
from jaxdp.cli import budget, options, recipes
from jaxdp.cli.errors import UsageError, flag, usage
from jaxdp.kernels import sphere
from jaxdp.ledger import LEDGER, PLAN
from jaxdp.plans._base import SumPlan

_OF_FILES = ("label", "bounds", "task", "classes", "label_bounds")
_OF_BUDGET = ("epsilon", "delta", "l2_clip_norm")
_OF_ZEROTH_ORDER = ("smoothing_radius", "num_directions", "direction")
_INITIAL = 0x696E6974  # Keeps initial parameters and directions apart.


class Task(NamedTuple):
    """A data set with a model: what is trained, and how it is judged."""

    dataset: models.Dataset
    model: str
    init: Callable[[jax.Array], Any]  # key -> params
    value_fn: Callable[[Any, Any], jax.Array]  # (params, batch) -> losses (B,)
    metric: str  # its name in the report
    metric_fn: Callable[[Any], jax.Array]  # params -> () on the public records


class Job(NamedTuple):
    """Everything that a run needs, checked."""

    task: Task
    algorithm: recipes.Algorithm
    recipe: recipes.Recipe
    plan: SumPlan
    keys: keys_lib.Keys
    out: pathlib.Path


def prepare(command: options.Train) -> Job:
    """Checks the options and makes all that they name, from cheap to costly."""
    _refuse_strangers(command)
    task = load_task(command)
    algorithm: Any = command.algorithm
    epsilon = _either(command.epsilon, options.DEFAULT_EPSILON)
    delta = _either(command.delta, options.DEFAULT_DELTA)
    with usage(command):
        _validate.positive(epsilon=epsilon)
        _validate.probability(delta=delta)
        if command.microbatch_size is not None:
            _validate.integer(microbatch_size=command.microbatch_size)
    recipe = _recipe(command, task, algorithm, epsilon)
    sampler = budget.sampler(command, task.dataset.num_examples)
    with usage(command, "--epsilon"):  # What else is wrong with the numbers together.
        plan = recipes.make_plan(
            recipe,
            algorithm,
            num_examples=task.dataset.num_examples,
            sampling=sampler,
            relation=command.relation,  # pyright: ignore[reportArgumentType]
            epsilon=epsilon,
            delta=delta,
        )
    with usage(command):
        keys = (
            keys_lib.Keys.from_entropy()
            if command.seed is None
            else keys_lib.Keys.insecure(command.seed)
        )
    if algorithm in recipes.ZEROTH_ORDER:
        _check_directions(command, task, recipe, keys)
    out = command.out or pathlib.Path("runs", task.dataset.name)
    if not command.resume:
        check_folder(out, command.overwrite)
    return Job(task, algorithm, recipe, plan, keys, out)


def initial(task: Task, keys: keys_lib.Keys) -> Any:
    """Initial parameters: public, as directions are, and no function of the data."""
    return task.init(initial_key(keys.direction))


def initial_key(direction: jax.Array) -> jax.Array:
    """What initial parameters are drawn from, of the public root of a run."""
    return keys_lib.stream(direction, "direction", context=_INITIAL)


def _check_directions(
    command: options.Train, task: Task, recipe: recipes.Recipe, keys: keys_lib.Keys
) -> None:
    """Refuses more directions than the law has, which shows with the parameters."""
    draw = functools.partial(
        sphere.directions, law=recipe.direction, num=recipe.num_directions
    )
    params = jax.eval_shape(lambda: initial(task, keys))
    with usage(command):
        jax.eval_shape(draw, keys.direction, params)


def _either(value: Any, default: Any) -> Any:
    return default if value is None else value


def _refuse_strangers(command: options.Train) -> None:
    """Refuses options that would be ignored: who gives one expects an effect."""

    def refuse(names: tuple[str, ...], where: str, there: bool) -> None:
        for name in names:
            value = getattr(command, name)
            if value is not None and not there:
                raise UsageError(f"{flag(name)} is for {where} only, got {value}")

    refuse(_OF_FILES, "a .csv or .npz --dataset", _is_file(command.dataset))
    real = not command.dataset.startswith("quadratic_")
    refuse(("test_fraction",), "a --dataset of real records", real)
    refuse(("hidden",), "--model mlp", command.model == "mlp")
    algorithm = command.algorithm
    refuse(_OF_BUDGET, "--algorithm dpzero or dpgd", algorithm in recipes.PRIVATE)
    zeroth = algorithm in recipes.ZEROTH_ORDER
    refuse(_OF_ZEROTH_ORDER, "--algorithm dpzero or mezo", zeroth)


def _is_file(dataset: str) -> bool:
    return pathlib.Path(dataset).suffix.lower() in (".csv", ".npz")


def load_task(command: options.Train) -> Task:
    """The data set and its model."""
    dataset = _dataset(command)
    if dataset.task == "quadratic":
        if command.model != "linear":
            raise UsageError(
                f"--model must be linear with --dataset {command.dataset}, which is "
                f"its own model; got {command.model}"
            )
        return _quadratic(dataset)
    extra = {"hidden": _either(command.hidden, (32,))} if command.model == "mlp" else {}
    with usage(command):
        network = models.network_for(dataset, command.model, **extra)
    x, y = dataset.test
    # In the target's own unit, where its scale is known.
    low, high = dataset.target_bounds or (0.0, 1.0)
    unit = (high - low) ** 2 if dataset.task == "regression" else 1.0
    metric = "test_accuracy" if dataset.task == "classification" else "test_mse"
    return Task(
        dataset=dataset,
        model=command.model,
        init=network.init,
        value_fn=network.value_fn,
        metric=metric,
        metric_fn=jax.jit(lambda params: unit * network.metric_fn(params, x, y)),
    )


def _quadratic(dataset: models.Dataset) -> Task:
    hessian: Any = dataset.name.removeprefix("quadratic_")
    dim = dataset.num_features
    value_fn = models.centered_quadratic(hessian, dim=dim).value_fn
    return Task(
        dataset=dataset,
        model="quadratic",
        init=lambda key: jnp.zeros(dim),
        value_fn=value_fn,
        metric="test_loss",
        metric_fn=jax.jit(lambda params: jnp.mean(value_fn(params, dataset.test))),
    )


def _dataset(command: options.Train) -> models.Dataset:
    fraction = command.test_fraction
    extra: dict[str, Any] = {} if fraction is None else {"test_fraction": fraction}
    with usage(command, "--dataset"):
        if not _is_file(command.dataset):
            if command.dataset not in models.DATASETS:
                names = ", ".join(models.DATASETS)
                raise UsageError(
                    f"--dataset must be one of {names} or the path of a .csv or .npz "
                    f"file, got {command.dataset!r}"
                )
            return models.load(command.dataset, **extra)
        loaded = models.load_file(
            command.dataset,
            label=command.label,
            task=_either(command.task, "classification"),
            classes=command.classes,
            bounds=command.bounds,
            label_bounds=command.label_bounds,
            **extra,
        )
    if fraction is None:
        raise UsageError(
            "--test-fraction must be given for a file, a number in (0, 1): that share "
            "of its records is held out and counts as public, so that metrics on it "
            "cost no privacy; got nothing"
        )
    return loaded


def _recipe(
    command: options.Train, task: Task, algorithm: recipes.Algorithm, epsilon: float
) -> recipes.Recipe:
    """The data set's recipe with what the options change; all of it checked."""
    name = "*" if _is_file(command.dataset) else task.dataset.name
    base = recipes.find(name, command.model, algorithm, epsilon)
    names = [field.name for field in dataclasses.fields(recipes.Recipe)]
    given = {name: getattr(command, name) for name in names}
    changes = {name: value for name, value in given.items() if value is not None}
    recipe = dataclasses.replace(base, **changes)
    with usage(command):
        _validate.positive(learning_rate=recipe.learning_rate)
        # The step counter is a 32-bit integer.
        _validate.integer(num_steps=recipe.num_steps, at_most=2**31 - 1)
        if algorithm in recipes.PRIVATE:
            _validate.positive(l2_clip_norm=recipe.l2_clip_norm)
    if not 0 <= recipe.momentum < 1:
        raise UsageError(
            f"--momentum must be a number in [0, 1), got {recipe.momentum}"
        )
    if not 0 <= recipe.average <= 1:
        raise UsageError(f"--average must be a number in [0, 1], got {recipe.average}")
    return recipe


def check_folder(out: pathlib.Path, overwrite: bool) -> None:
    """Refuses a folder that holds a person's other files, or cannot be written."""
    if out.is_dir():
        if (out / LEDGER).exists() and not overwrite:
            raise UsageError(
                "--out must be a folder without the record of a run, or --resume given to "
                f"go on with it, or --overwrite to lose it; got {str(out)!r}"
            )
        if any(out.iterdir()) and not overwrite and not _is_ours(out):
            raise UsageError(
                "--out must be a new or empty folder or that of an earlier run, or "
                f"--overwrite given; got {str(out)!r}, which holds other files"
            )
    elif out.exists() or out.is_symlink():
        raise UsageError(f"--out must be a folder, got {str(out)!r}, which is a file")
    nearest = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(
            f"--out must be a folder that can be written, got {str(out)!r}"
        )


def _is_ours(out: pathlib.Path) -> bool:
    """Whether a folder holds an earlier run: a plan that can be read."""
    try:
        plans.from_json((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
