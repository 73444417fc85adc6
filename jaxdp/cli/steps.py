"""Plans of ``jaxdp train`` whose gradients go to an optimizer: ``dpzero`` and others."""

import dataclasses
import functools
from typing import Any

import jax

from jaxdp.cli import budget, options, recipes
from jaxdp.cli import task as tasks
from jaxdp.cli.parsing import usage
from jaxdp.core.keys import Keys
from jaxdp.kernels import sphere


def prepare(command: Any, keys: Keys) -> tasks.Chosen:
    """Returns task, recipe, plan and optimizer of a command, all of it checked."""
    task = tasks.of_network(command)
    num_examples = task.dataset.num_examples
    name = recipe_name(task, command.dataset)
    epsilon = getattr(command, "epsilon", options.DEFAULT_EPSILON)
    found = recipes.find(name, command.model, command.algorithm, epsilon, num_examples)
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
    optimizer = recipes.make_optimizer(recipe)
    values = dataclasses.asdict(recipe)
    return tasks.Chosen(task, values, plan, optimizer, recipe.average > 0)


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
