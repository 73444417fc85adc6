"""Games against groups of records: ``jaxdp train saddle``."""

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import models, plans, sampling
from jaxdp.cli import options, plots, recipes
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.cli.steps import given, recipe_name
from jaxdp.cli.task import Chosen, Task, of_network
from jaxdp.core import validate
from jaxdp.core.keys import Keys

#: Step sizes of which only the ratio counts, before they are calibrated.
_TINY = 1e-6

# Such clips leave little but the signs of a record's gradient, and so large a radius only
# makes the bound of the losses loose: at these sizes weights of groups that move more cost
# the parameters more budget than they bring the worst group.
_FEW_DRAWS = {"num_draws": 8, "radius": 30.0, "clip_x": 0.01, "step_ratio": 0.1}
_MANY_DRAWS = {"num_draws": 1024, "radius": 300.0, "clip_x": 0.005, "step_ratio": 0.1}

#: Recipes for every budget. ``num_steps`` None is the square root of the records, rounded
#: down; each is read once. ``clip_x`` is a share of the bound that the problem has by
#: itself; 1 clips nothing. Step sizes are the longest that the budget admits:
#: ``step_ratio`` is how far scores of groups move beside those of parameters, over what is
#: best without privacy. Tuned at epsilon 2 and 8, by average error plus that of the worst
#: group, on eight splits of diabetes by sex and four of digits by class, by random search
#: with a simulation in NumPy. "*" was not tuned.
RECIPES: dict[str, dict[str, Any]] = {
    recipes.DIABETES_CLASSES: _FEW_DRAWS,
    "digits": _MANY_DRAWS,
    "*": _FEW_DRAWS | {"num_draws": 32},
}


class Players(NamedTuple):
    """Sizes and gradient bounds of a two-player problem, for a ``plans.Saddle``."""

    dim_x: int
    dim_y: int
    linf_bound_x: float
    linf_bound_y: float


def find(dataset: str) -> dict[str, Any]:
    """Returns the recipe for a data set, which may be one without a row of its own."""
    return {"num_steps": None} | (RECIPES.get(dataset) or RECIPES["*"])


def prepare(command: options.Saddle, keys: Keys) -> Chosen:
    """Returns task, recipe and plan of a command, all of it checked."""
    if command.group is None:
        raise UsageError(
            "--group must be given with --algorithm saddle: class, or a column; got nothing"
        )
    task = of_network(command, probabilities=command.group_probabilities)
    num_examples = task.dataset.num_examples
    found = find(recipe_name(task, command.dataset))
    recipe = found | given(command, found)
    if command.num_steps is not None:
        with usage(command):  # One record for each step.
            validate.integer(
                num_steps=command.num_steps, at_least=2, at_most=num_examples
            )
    shapes = jax.eval_shape(task.init, keys.direction)
    task, players = against_groups(task, recipe["radius"], shapes)
    with usage(command, "--epsilon"):
        plan = make_plan(
            recipe,
            players,
            num_examples=num_examples,
            relation=command.relation,
            epsilon=command.epsilon,
            delta=command.delta,
        )
    return Chosen(task, recipe, plan)


def against_groups(task: Task, radius: float, params: Any) -> tuple[Task, Players]:
    """Returns the task as a game against groups, and the players' sizes and bounds.

    The game's variables are weights of vertices and weights of groups. Of the ``params``
    of the linear model, in an l1 ball of the ``radius``, only shapes count.
    """
    groups, metric_fn, errors_fn = task.groups, task.metric_fn, task.errors_fn
    assert groups is not None and errors_fn is not None
    network = models.network_for(task.dataset, task.model)
    game = models.worst_group(
        network, params, groups.probabilities, radius, groups.dataset.feature_bounds
    )
    num_x, num_y = game.num_vertices, len(groups.names)
    task = task._replace(
        init=lambda key: (jnp.full(num_x, 1 / num_x), jnp.full(num_y, 1 / num_y)),
        value_fn=game.problem,
        metric_fn=jax.jit(lambda weights: metric_fn(game.params_fn(weights[0]))),
        errors_fn=jax.jit(lambda weights: errors_fn(game.params_fn(weights[0]))),
        data=groups.records,
        saved_fn=lambda x: {**game.params_fn(x[0]), "group_weights": x[1]},
        draw=functools.partial(_draw, groups.names),
    )
    return task, Players(num_x, num_y, game.linf_bound_x, game.linf_bound_y)


def draws(
    path: pathlib.Path,
    *,
    title: str,
    releases: np.ndarray,
    groups: Sequence[str],
    weights: np.ndarray,
) -> None:
    """Plots the released vertices of groups and of parameters, step by step.

    ``releases``, shape=(num_steps, 2 k), are the logged draws: of k vertices of the
    parameters' polytope (the first half of them are +, the others -), then of k groups,
    whose shares of the result are ``weights``.
    """
    num_steps, width = releases.shape
    steps = np.repeat(np.arange(1, num_steps + 1), width // 2)
    fig, (top, bottom) = plots.figure(2, figsize=(7, 6))
    fig.suptitle(title)
    dots = plots.dot_style(releases, 2.0, 16.0, 8e3)
    half = width // 2
    at = steps + np.resize(0.5 * (np.arange(half) + 0.5) / half - 0.25, len(steps))
    top.scatter(at, releases[:, half:].ravel(), color=plots.ORANGE, **dots)
    bottom.scatter(at, releases[:, :half].ravel(), color=plots.BLUE, **dots)
    labels = [f"{name} ({w:.0%})" for name, w in zip(groups, weights, strict=True)]
    top.set_yticks(range(len(groups)), labels)
    top.set_ylim(-0.5, len(groups) - 0.5)
    said = "one draw a step" if width == 2 else "all draws"
    plots.titled(top, f"groups: {said}, and their shares of the result")
    plots.titled(bottom, f"parameters: {said}")
    bottom.set_ylabel("number of the vertex")
    bottom.set_xlabel("step")
    bottom.set_xlim(0.5, num_steps + 0.5)
    plots.save(fig, path)


def _draw(names: Any, path: Any, title: str, plan: Any, outcome: Any) -> None:
    weights = np.asarray(outcome.params[1])
    releases = outcome.releases
    draws(path, title=title, releases=releases, groups=names, weights=weights)


def make_plan(
    recipe: Mapping[str, Any],
    players: Players,
    *,
    num_examples: int,
    relation: Any = "replace_one",
    epsilon: float,
    delta: float,
) -> plans.Saddle:
    """Returns the calibrated plan of vertex sampling for a problem of two players."""
    steps = recipe["num_steps"] or max(2, math.isqrt(num_examples))
    clip_x, clip_y = recipe["clip_x"] * players.linf_bound_x, players.linf_bound_y
    step_x = _TINY * math.sqrt(math.log(players.dim_x)) / clip_x
    step_y = _TINY * recipe["step_ratio"] * math.sqrt(math.log(players.dim_y)) / clip_y
    plan = plans.Saddle(
        num_examples=num_examples,
        num_steps=steps,
        sampling=sampling.SinglePass(num_examples // steps),
        relation=relation,
        dim_x=players.dim_x,
        dim_y=players.dim_y,
        linf_clip_norm_x=clip_x,
        linf_clip_norm_y=clip_y,
        num_draws=recipe["num_draws"],
        step_size_x=step_x,
        step_size_y=step_y,
        center_gradients=True,
        output="mean",
    )
    return plan.calibrate(epsilon=epsilon, delta=delta)
