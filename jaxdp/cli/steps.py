"""Plans of ``jaxdp train`` whose gradients go to an optimizer: ``dpzero`` and others."""

import dataclasses
import functools
from typing import Any

import jax

from jaxdp import planner
from jaxdp.cli import budget, options, recipes, record
from jaxdp.cli import prepare as prepare_lib
from jaxdp.cli import task as tasks
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.core.keys import Keys
from jaxdp.kernels import sphere


def prepare(command: Any, keys: Keys) -> tasks.Chosen:
    """Returns task, recipe, plan and optimizer of a command, all of it checked."""
    task = tasks.of_network(command)
    num_examples = task.dataset.num_examples
    name = recipe_name(task, command.dataset)
    epsilon = getattr(command, "epsilon", options.DEFAULT_EPSILON)
    found = recipes.find(name, command.model, command.algorithm, epsilon)
    if command.resume:
        found = (
            record.recipe_of(record.read(prepare_lib.out_of(command), "--out")) or found
        )
    recipe = dataclasses.replace(found, **given(command, dataclasses.asdict(found)))
    sampler = budget.sampler(command, num_examples)
    with usage(command, "--epsilon"):  # What else is wrong with them together.
        plan = recipes.make_plan(
            recipe,
            command.algorithm,
            num_examples=num_examples,
            sampling=sampler,
            relation=command.relation,
            epsilon=epsilon,
            delta=getattr(command, "delta", options.DEFAULT_DELTA),
        )
    if plan.draws_directions:
        check_directions(command, task, keys, recipe.direction, recipe.num_directions)
    if recipe.l2_clip_norm is None or recipe.learning_rate is None:
        recipe, plan = _planned(task, recipe, plan)
    optimizer = recipes.make_optimizer(recipe)
    values = dataclasses.asdict(recipe)
    return tasks.Chosen(task, values, plan, optimizer, recipe.average > 0)


def _planned(
    task: tasks.Task, recipe: recipes.Recipe, plan: Any
) -> tuple[recipes.Recipe, Any]:
    """Returns recipe and plan with clip and step size where they have none.

    By the budget, the number of records, and the held-out ones, which are public.
    """
    start = prepare_lib.initial(task, Keys.insecure(0))
    clip = recipe.l2_clip_norm
    try:
        found = planner.planned(
            plan, task.value_fn, start, task.dataset.test, l2_clip_norm=clip
        )
    except ValueError as error:
        raise UsageError(
            "--l2-clip-norm and --learning-rate must be given where the held-out records, "
            f"which are public, do not tell them: {error}"
        ) from error
    rate = recipe.learning_rate or found.learning_rate
    recipe = dataclasses.replace(
        recipe, l2_clip_norm=found.plan.l2_clip_norm, learning_rate=rate
    )
    return recipe, found.plan


def recipe_name(task: tasks.Task, dataset: str) -> str:
    """Returns the name of a data set in the tables of recipes."""
    if tasks.is_file(dataset):
        return "*"
    if dataset == "diabetes" and task.dataset.task == "classification":
        return recipes.DIABETES_CLASSES
    return task.dataset.name


def given(command: Any, names: Any) -> dict[str, Any]:
    """Returns the options among ``names`` that are not None."""
    values = {name: getattr(command, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_directions(
    command: Any, task: tasks.Task, keys: Keys, law: str, num: int
) -> None:
    """Refuses more directions than the law has for the task's parameters."""
    shapes = jax.eval_shape(task.init, keys.direction)
    draw = functools.partial(sphere.directions, law=law, num=num)
    with usage(command):
        jax.eval_shape(draw, keys.direction, shapes)
