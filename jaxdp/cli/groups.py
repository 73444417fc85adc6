"""Groups of records on the command line, and the game against them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp import models
from jaxdp.cli import options, recipes
from jaxdp.cli.errors import UsageError, usage
from jaxdp.cli.task import Task
from jaxdp.data.datasets import DIABETES_BOUNDS
from jaxdp.models.groups import CLASS, DIABETES_SEXES

#: Columns of built-in data sets that may be groups: their public values and bounds.
_COLUMNS: dict[str, dict[str, Any]] = {
    "diabetes": {"sex": (DIABETES_SEXES, DIABETES_BOUNDS)}
}


def of_command(
    command: options.Train, dataset: models.Dataset, *, is_file: bool
) -> models.Grouped:
    """Returns the groups that ``--group`` asks for.

    Raises:
      UsageError: no such groups, or values or probabilities that do not fit.
    """
    values, bounds = command.group_values, command.bounds
    if not is_file:
        known = {CLASS: (None, None), **_COLUMNS.get(command.dataset, {})}
        if command.group not in known:
            raise UsageError(
                f"--group must be {' or '.join(known)} with --dataset {command.dataset}, "
                f"got {command.group!r}"
            )
        values, bounds = known[str(command.group)]
    with usage(command):
        return models.grouped(
            dataset,
            str(command.group),
            group_values=values,
            bounds=bounds,
            group_probabilities=command.group_probabilities,
        )


def against_groups(
    task: Task, recipe: recipes.VertexSampling, params: Any
) -> tuple[Task, recipes.Players]:
    """Returns the task as a game for ``saddle``, and the players' sizes and bounds.

    The game's variables are weights of vertices and weights of groups.

    Args:
      task: of a linear model with groups.
      recipe: its radius counts.
      params: of the model; only shapes count.
    """
    groups, metric_fn, errors_fn = task.groups, task.metric_fn, task.errors_fn
    assert groups is not None and errors_fn is not None
    game = models.worst_group(
        models.network_for(task.dataset, task.model),
        params,
        groups.probabilities,
        recipe.radius,
    )
    num_x, num_y = game.num_vertices, len(groups.names)
    task = task._replace(
        init=lambda key: (jnp.full(num_x, 1 / num_x), jnp.full(num_y, 1 / num_y)),
        value_fn=game.problem,
        metric_fn=jax.jit(lambda weights: metric_fn(game.params_fn(weights[0]))),
        errors_fn=jax.jit(lambda weights: errors_fn(game.params_fn(weights[0]))),
        data=groups.records,
        saved_fn=lambda weights: {
            **game.params_fn(weights[0]),
            "group_weights": weights[1],
        },
    )
    return task, recipes.Players(num_x, num_y, game.linf_bound_x, game.linf_bound_y)
