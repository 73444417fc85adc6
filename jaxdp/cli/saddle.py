"""Games against groups of records, and the mean loss: ``jaxdp train saddle``."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import models, plans, sampling
from jaxdp.cli import options, plots, recipes, record
from jaxdp.cli import prepare as prepare_lib
from jaxdp.cli.parsing import UsageError, refuse, usage
from jaxdp.cli.steps import given, recipe_name
from jaxdp.cli.task import Chosen, Task, of_network
from jaxdp.core import validate
from jaxdp.core.keys import Keys
from jaxdp.models.groups import convex_model
from jaxdp.planner import problems
from jaxdp.saddle.descent_ascent import descent_ascent
from jaxdp.saddle.oracles.problem import Problem

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


#: Numbers of the other methods, for any budget; steps read all records.
_STEPS = {"descent_ascent": 64, "frank_wolfe": 16}
#: Step size of descent and ascent over that of theory, which is for the worst case.
_LONGER = 10.0
#: Options that one method alone has, and those that another lacks.
_OWN = {
    "mirror_descent": ("num_draws", "step_ratio"),
    "descent_ascent": ("l2_clip_norm", "learning_rate"),
}
_CLIPPED = ("mirror_descent", "frank_wolfe")
#: Options that held-out records decide if they are not given.
_DECIDED = ("clip_x", "l2_clip_norm", "learning_rate")


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
    method = command.method
    if command.group is None and method != "frank_wolfe":
        raise UsageError(
            "--group must be given with --algorithm saddle: class, or a column; got nothing"
        )
    for owner, names in _OWN.items():
        refuse(command, names, f"--method {owner}", method == owner)
    where = f"--method {' or '.join(_CLIPPED)}"
    refuse(command, ("clip_x",), where, method in _CLIPPED)
    refuse(command, ("one_pass",), "the other methods", method != "mirror_descent")
    refuse(command, ("group_probabilities",), "a --group", command.group is not None)
    task = of_network(command, probabilities=command.group_probabilities)
    num_examples = task.dataset.num_examples
    if command.num_steps is not None:
        once = command.one_pass or method == "mirror_descent"
        most = num_examples if once else 2**31 - 1
        with usage(command):  # In one pass, a record for each step.
            validate.integer(num_steps=command.num_steps, at_least=2, at_most=most)
    if command.resume:  # Also a new attempt on other records has the run's numbers.
        then = record.read(prepare_lib.out_of(command), "--out").header["note"][
            "recipe"
        ]
        decided = {name: then[name] for name in _DECIDED if name in then}
        command = dataclasses.replace(command, **decided)
    shapes = jax.eval_shape(task.init, keys.direction)
    return _METHODS[method](command, task, shapes)


def _mirror_descent(command: options.Saddle, task: Task, shapes: Any) -> Chosen:
    found = find(recipe_name(task, command.dataset))
    recipe = found | given(command, found)
    task, players = against_groups(task, recipe["radius"], shapes)
    with usage(command, "--epsilon"):
        plan = make_plan(
            recipe,
            players,
            num_examples=task.dataset.num_examples,
            relation=command.relation,
            epsilon=command.epsilon,
            delta=command.delta,
        )
    return Chosen(task, recipe, plan)


def _descent_ascent(command: options.Saddle, task: Task, shapes: Any) -> Chosen:
    radius = radius_of(command, task)
    task, of = points_of_game(task, radius, shapes, command)
    fields = _sampled(command, task)
    with usage(command, "--dataset"):
        clip = command.l2_clip_norm or of.gradient_clip()
    with usage(command, "--epsilon"):
        plan = plans.DPGD(l2_clip_norm=clip, **of.shared, **fields)
        plan = plan.calibrate(**of.budget)
    rate = command.learning_rate or _LONGER * problems.usual_step(of, plan)
    x, y = of.game.domains
    optimizer = descent_ascent(rate, rate, domain_x=x, domain_y=y)
    recipe = {
        "method": command.method,
        "num_steps": plan.num_steps,
        "one_pass": command.one_pass,
        "radius": radius,
        "l2_clip_norm": clip,
        "learning_rate": rate,
    }
    return Chosen(task, recipe, plan, optimizer, averaged=True)


def _frank_wolfe(command: options.Saddle, task: Task, shapes: Any) -> Chosen:
    radius = radius_of(command, task)
    network, dataset = models.network_for(task.dataset, task.model), task.dataset
    with usage(command, "--dataset"):
        model = convex_model(network, shapes, radius, dataset.feature_bounds)
    ball = model.ball
    start = _even(ball.num_vertices)
    problem = Problem(model.loss_fn, ball)
    of = _players(command, problem, ball.point(start), dataset.test, dataset)
    share = command.clip_x
    if share is None:
        with usage(command, "--dataset"):
            share = of.half_ranges[0] / model.linf_bound
    with usage(command, "--epsilon"):
        plan = plans.FrankWolfe(
            dim=ball.num_vertices,
            linf_clip_norm=share * model.linf_bound,
            center_gradients=True,
            **of.shared,
            **_sampled(command, task),
        ).calibrate(**of.budget)
    metric_fn, errors_fn = task.metric_fn, task.errors_fn

    def params_fn(weights: Any) -> Any:
        return model.params_at(ball.point(weights))

    task = task._replace(
        init=lambda key: start,
        value_fn=problem,
        metric_fn=jax.jit(lambda weights: metric_fn(params_fn(weights))),
        errors_fn=errors_fn and jax.jit(lambda weights: errors_fn(params_fn(weights))),
        data=_shuffled(dataset) if task.groups is None else task.groups.records,
        saved_fn=params_fn,
        draw=_draw_vertices,
    )
    recipe = {
        "method": command.method,
        "num_steps": plan.num_steps,
        "one_pass": command.one_pass,
        "radius": radius,
        "clip_x": share,
    }
    return Chosen(task, recipe, plan)


_METHODS = {
    "mirror_descent": _mirror_descent,
    "descent_ascent": _descent_ascent,
    "frank_wolfe": _frank_wolfe,
}


def radius_of(command: Any, task: Task) -> float:
    """Returns the radius of the l1 ball: that of the recipe if none is given."""
    recipe = find(recipe_name(task, command.dataset))
    return getattr(command, "radius", None) or recipe["radius"]


def _sampled(command: options.Saddle, task: Task) -> dict[str, Any]:
    steps = command.num_steps or _STEPS[command.method]
    sampler: Any = sampling.FullBatch()
    if command.one_pass:
        steps = min(steps, task.dataset.num_examples)
        sampler = sampling.SinglePass(task.dataset.num_examples // steps)
    return {"num_steps": steps, "sampling": sampler}


def _shuffled(dataset: models.Dataset) -> Any:
    """Returns the records in a random order that is a function of their number alone."""
    order = np.random.default_rng(0).permutation(dataset.num_examples)
    return tuple(array[order] for array in dataset.train)


def _players(
    command: Any, problem: Any, points: Any, public: Any, dataset: models.Dataset
) -> problems.Players:
    """Returns a problem with the held-out records and the budget of a command."""
    budget = {"epsilon": command.epsilon, "delta": command.delta}
    shared = {"num_examples": dataset.num_examples, "relation": command.relation}
    passes = getattr(command, "num_passes", None)
    public = jax.tree.map(jnp.asarray, public)
    with usage(command):
        return problems.players(problem, points, public, budget, shared, passes)


def _game(task: Task, radius: float, params: Any) -> Any:
    """Returns the task's game against groups. Only the shapes of ``params`` count."""
    assert task.groups is not None
    network = models.network_for(task.dataset, task.model)
    shares, bounds = task.groups.probabilities, task.groups.dataset.feature_bounds
    return models.worst_group(network, params, shares, radius, bounds)


def points_of_game(
    task: Task, radius: float, params: Any, command: Any
) -> tuple[Task, problems.Players]:
    """Returns the task as a game of points, not of weights of vertices, and its players.

    What moves are a point of the l1 ball and the weights of the groups.
    """
    with usage(command, "--dataset"):
        game = _game(task, radius, params)
    groups, metric_fn, errors_fn = task.groups, task.metric_fn, task.errors_fn
    assert groups is not None and errors_fn is not None
    start = jnp.zeros(game.problem.domain_x.dim), _even(len(groups.names))
    held_out = (*task.dataset.test, groups.test)
    of = _players(command, game.problem, start, held_out, task.dataset)
    task = task._replace(
        init=lambda key: start,
        value_fn=game.problem,
        metric_fn=jax.jit(lambda at: metric_fn(game.params_at(at[0]))),
        errors_fn=jax.jit(lambda at: errors_fn(game.params_at(at[0]))),
        data=groups.records,
        held_out=held_out,
        saved_fn=lambda at: {**game.params_at(at[0]), "group_weights": at[1]},
    )
    return task, of


def _even(count: int) -> jax.Array:
    # Of a dtype, as those are that a resumed run reads.
    return jnp.full(count, 1 / count, jnp.float32)


def against_groups(task: Task, radius: float, params: Any) -> tuple[Task, Players]:
    """Returns the task as a game against groups, and the players' sizes and bounds.

    The game's variables are weights of vertices and weights of groups. Of the ``params``
    of the linear model, in an l1 ball of the ``radius``, only shapes count.
    """
    groups, metric_fn, errors_fn = task.groups, task.metric_fn, task.errors_fn
    assert groups is not None and errors_fn is not None
    game = _game(task, radius, params)
    num_x, num_y = game.num_vertices, len(groups.names)
    task = task._replace(
        init=lambda key: (_even(num_x), _even(num_y)),
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


def _draw_vertices(path: Any, title: str, plan: Any, outcome: Any) -> None:
    """Plots the released vertices of one player, step by step."""
    fig, axis = plots.figure(figsize=(7, 3.6))
    fig.suptitle(title)
    drawn = outcome.releases[:, 0]
    axis.plot(np.arange(1, len(drawn) + 1), drawn, ".", color=plots.BLUE)
    axis.set_xlabel("step")
    axis.set_ylabel("number of the vertex")
    plots.titled(axis, "parameters: one draw a step")
    plots.save(fig, path)


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
