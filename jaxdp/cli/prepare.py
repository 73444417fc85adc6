"""Preparation of ``jaxdp train``: checks every option and builds the run."""

import dataclasses
import functools
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp import models, plans, sampling
from jaxdp.cli import (
    budget,
    conversions,
    curvature,
    groups,
    options,
    recipes,
    refusals,
    stationary,
)
from jaxdp.cli.errors import UsageError, usage
from jaxdp.cli.task import Task
from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.kernels import sphere, stretch
from jaxdp.mechanism.plan import Plan
from jaxdp.models.groups import DIABETES_THRESHOLD, above
from jaxdp.training.ledger import LEDGER, PLAN

_SIZES = ("restart_batch_size", "batch_size")  # Of a single pass.
_INITIAL = 0x696E6974  # Keeps initial parameters and directions apart.


class Job(NamedTuple):
    """Checked inputs of a run: task, recipe, plan, keys and folder."""

    task: Task
    algorithm: recipes.Algorithm
    recipe: recipes.AnyRecipe
    plan: Plan
    keys: keys_lib.Keys
    out: pathlib.Path


def prepare(command: options.Train) -> Job:
    """Checks the options and makes all that they name, from cheap to costly."""
    refusals.refuse_strangers(command)
    task = load_task(command)
    algorithm: Any = command.algorithm
    epsilon = _either(command.epsilon, options.DEFAULT_EPSILON)
    delta = _either(command.delta, options.DEFAULT_DELTA)
    with usage(command):
        validate.positive(epsilon=epsilon)
        validate.probability(delta=delta)
        if command.microbatch_size is not None:
            validate.integer(microbatch_size=command.microbatch_size)
    with usage(command):
        keys = (
            keys_lib.Keys.from_entropy()
            if command.seed is None
            else keys_lib.Keys.insecure(command.seed)
        )
    shapes = jax.eval_shape(lambda: initial(task, keys))
    recipe = _recipe(command, task, algorithm, epsilon, shapes)
    shared: dict[str, Any] = {
        "num_examples": task.dataset.num_examples,
        "relation": command.relation,
        "epsilon": epsilon,
        "delta": delta,
    }
    if isinstance(recipe, recipes.SecondOrder):
        task, problem = stationary.of_features(task, recipe.rank, recipe.hessian)
        if command.microbatch_size is not None:
            with usage(command, "--microbatch-size"):
                validate.integer(
                    at_most=stretch.MAX_SLICE, microbatch_size=command.microbatch_size
                )
        with usage(command, "--epsilon"):
            plan = curvature.make_plan(recipe, problem, **shared)
        stationary.check_start(task, plan, initial(task, keys))
    elif isinstance(recipe, recipes.VertexSampling):
        task, players = groups.against_groups(task, recipe, shapes)
        with usage(command, "--epsilon"):
            plan = recipes.make_vertex_plan(recipe, players, **shared)
    else:
        sampler = sampling.FullBatch()  # Conversions say themselves how they sample.
        if algorithm != "o2nc":
            sampler = budget.sampler(command, task.dataset.num_examples)
        with usage(command, "--epsilon"):  # What else is wrong with them together.
            plan = recipes.make_plan(recipe, algorithm, sampling=sampler, **shared)
        if algorithm in recipes.ZEROTH_ORDER:
            _check_directions(command, recipe, keys, shapes)
    out = command.out or pathlib.Path("runs", task.dataset.name)
    if not command.resume:
        check_folder(out, command.overwrite)
    return Job(task, algorithm, recipe, plan, keys, out)


def initial(task: Task, keys: keys_lib.Keys) -> Any:
    """Returns the initial parameters, which are public and no function of the data."""
    return task.init(initial_key(keys.direction))


def initial_key(direction: jax.Array) -> jax.Array:
    """Returns the key of the initial parameters, derived from a run's public root."""
    return keys_lib.stream(direction, "direction", context=_INITIAL)


def _check_directions(
    command: options.Train,
    recipe: recipes.Recipe | recipes.Conversion,
    keys: keys_lib.Keys,
    shapes: Any,
) -> None:
    """Refuses more directions than the law has for parameters of such shapes."""
    draw = functools.partial(
        sphere.directions, law=recipe.direction, num=recipe.num_directions
    )
    with usage(command):
        jax.eval_shape(draw, keys.direction, shapes)


def _either(value: Any, default: Any) -> Any:
    return default if value is None else value


def load_task(command: options.Train) -> Task:
    """Returns the task of a command: its data set and model."""
    dataset = _dataset(command)
    if dataset.task == "quadratic":
        if command.model != "linear":
            raise UsageError(
                f"--model must be linear with --dataset {command.dataset}, which is "
                f"its own model; got {command.model}"
            )
        return _quadratic(dataset)
    extra: dict[str, Any] = {}
    if command.model == "mlp":
        # A small one for o2nc, whose noise grows with the root of the parameters.
        usual = (8,) if command.algorithm == "o2nc" else (32,)
        extra["hidden"] = _either(command.hidden, usual)
    with usage(command):
        network = models.network_for(dataset, command.model, loss=command.loss, **extra)
    x, y = dataset.test
    # In the target's own unit, where its scale is known.
    low, high = dataset.target_bounds or (0.0, 1.0)
    unit = (high - low) ** 2 if dataset.task == "regression" else 1.0
    metric = "test_accuracy" if dataset.task == "classification" else "test_mse"
    task = Task(
        dataset=dataset,
        model=command.model,
        loss=network.loss,
        init=network.init,
        value_fn=network.value_fn,
        metric=metric,
        metric_fn=jax.jit(lambda params: unit * network.metric_fn(params, x, y)),
        data=dataset.train,
    )
    if command.group is None:
        return task
    found = groups.of_command(
        command, dataset, is_file=refusals.is_file(command.dataset)
    )
    names = found.names

    def errors_fn(params: Any) -> jax.Array:
        outputs = network.apply(params, x)
        return models.group_errors(outputs, y, found.test, len(names))

    return task._replace(groups=found, errors_fn=jax.jit(errors_fn))


def _quadratic(dataset: models.Dataset) -> Task:
    hessian: Any = dataset.name.removeprefix("quadratic_")
    dim = dataset.num_features
    value_fn = models.centered_quadratic(hessian, dim=dim).value_fn
    return Task(
        dataset=dataset,
        model="quadratic",
        loss="quadratic",
        init=lambda key: jnp.zeros(dim),
        value_fn=value_fn,
        metric="test_loss",
        metric_fn=jax.jit(lambda params: jnp.mean(value_fn(params, dataset.test))),
        data=dataset.train,
    )


def _dataset(command: options.Train) -> models.Dataset:
    fraction = command.test_fraction
    extra: dict[str, Any] = {} if fraction is None else {"test_fraction": fraction}
    with usage(command, "--dataset"):
        if not refusals.is_file(command.dataset):
            if command.dataset not in models.DATASETS:
                names = ", ".join(models.DATASETS)
                raise UsageError(
                    f"--dataset must be one of {names} or the path of a .csv or .npz "
                    f"file, got {command.dataset!r}"
                )
            loaded = models.load(command.dataset, **extra)
            if command.group is None or command.dataset != "diabetes":
                return loaded
            return above(loaded, DIABETES_THRESHOLD)
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
    command: options.Train,
    task: Task,
    algorithm: recipes.Algorithm,
    epsilon: float,
    shapes: Any,
) -> recipes.AnyRecipe:
    """Returns the data set's recipe with the changes by options, all of it checked."""
    name = "*" if refusals.is_file(command.dataset) else task.dataset.name
    if name == "diabetes" and task.dataset.task == "classification":
        name = recipes.DIABETES_CLASSES
    base: recipes.AnyRecipe
    if algorithm == "o2nc":
        oracle: Any = _either(command.oracle, "zeroth_order")
        base = conversions.find(epsilon, oracle, multi_pass=command.multi_pass)
    else:
        base = recipes.find(name, command.model, algorithm, epsilon)
    names = [field.name for field in dataclasses.fields(base)]
    given = {name: getattr(command, name) for name in names}
    changes = {name: value for name, value in given.items() if value is not None}
    recipe = dataclasses.replace(base, **changes)
    if (
        isinstance(recipe, recipes.Conversion)
        and recipe.direction != "ball"
        and command.num_directions is None
    ):
        # Small models have fewer than the recipe asks for.
        dim = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        most = min(recipe.num_directions, dim)
        recipe = dataclasses.replace(recipe, num_directions=most)
    with usage(command):
        if isinstance(recipe, recipes.VertexSampling):
            validate.positive(
                radius=recipe.radius, clip_x=recipe.clip_x, step_ratio=recipe.step_ratio
            )
            validate.integer(num_draws=recipe.num_draws, at_most=2**20)
            if recipe.num_steps is not None:
                most = task.dataset.num_examples  # One for each step.
                validate.integer(num_steps=recipe.num_steps, at_least=2, at_most=most)
            return recipe
        if isinstance(recipe, recipes.SecondOrder):
            _check_second_order(recipe, task.dataset.num_features)
            return recipe
        if recipe.learning_rate is not None:
            validate.positive(learning_rate=recipe.learning_rate)
        if recipe.num_steps is not None:
            # The step counter is a 32-bit integer.
            validate.integer(num_steps=recipe.num_steps, at_most=2**31 - 1)
        if algorithm in recipes.PRIVATE and recipe.l2_clip_norm is not None:
            validate.positive(l2_clip_norm=recipe.l2_clip_norm)
    if isinstance(recipe, recipes.Conversion):
        _check_conversion(command, recipe)
    else:
        _check_steps(recipe)
    return recipe


def _check_second_order(recipe: recipes.SecondOrder, num_features: int) -> None:
    validate.integer(rank=recipe.rank, at_most=num_features)
    if recipe.num_steps is not None:
        validate.integer(num_steps=recipe.num_steps, at_most=2**31 - 1)
    validate.probability(failure_probability=recipe.failure_probability)
    if recipe.accuracy is not None:
        validate.positive(accuracy=recipe.accuracy)


def _check_conversion(command: options.Train, recipe: recipes.Conversion) -> None:
    with usage(command):
        sizes = {name: getattr(recipe, name) for name in ("period", *_SIZES)}
        validate.integer(**{name: x for name, x in sizes.items() if x is not None})
        if recipe.window is not None:
            validate.integer(window=recipe.window, at_least=2)
        validate.positive(restart_l2_clip_norm=recipe.restart_l2_clip_norm)
    refusals.refuse_differences(command, recipe)


def _check_steps(recipe: recipes.Recipe) -> None:
    if not 0 <= recipe.momentum < 1:
        raise UsageError(
            f"--momentum must be a number in [0, 1), got {recipe.momentum}"
        )
    if not 0 <= recipe.average <= 1:
        raise UsageError(f"--average must be a number in [0, 1], got {recipe.average}")


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
    """Returns True if a folder holds an earlier run: a plan that can be read."""
    try:
        plans.from_json((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
