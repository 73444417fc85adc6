"""``jaxdp recommend``: a plan and its numbers for a data set, from public numbers."""

import json
import sys
from typing import Any

import jax

from jaxdp import models, planner
from jaxdp.cli import options, prepare, saddle
from jaxdp.cli import task as tasks
from jaxdp.cli.parsing import UsageError, flag, refuse, usage
from jaxdp.core.keys import Keys
from jaxdp.data import binning, synthesis


def run(command: options.Recommend) -> None:
    """Prints the candidates, and how the first one is run."""
    table, game = command.bins is not None, command.group is not None
    refuse(command, ("degree", "num_examples"), "--bins", table)
    losses = "a loss, without --group and --bins"
    of_losses = ("forward_only", "batch_size", "num_public")
    refuse(command, of_losses, losses, not (table or game))
    refuse(command, ("group", "num_passes"), "a data set, not --bins", not table)
    with models.show_values(command.show_values):
        made = _of_table if table else _of_game if game else _of_loss
        found, words = made(command)
    if command.json:
        answer = {
            "reason": found.reason,
            "public": found.public,
            "candidates": [_numbers(one) for one in found.candidates],
        }
        print(json.dumps(answer))
        return
    print(found)
    print(words)


def _budget(command: options.Recommend) -> dict[str, Any]:
    return {
        "epsilon": command.epsilon,
        "delta": command.delta,
        "relation": command.relation,
    }


def _of_loss(command: options.Recommend) -> tuple[planner.Recommendation, str]:
    task = tasks.of_network(command)
    start = prepare.initial(task, Keys.insecure(0))
    with usage(command):
        found = planner.recommend(
            task.value_fn,
            start,
            task.dataset.test,  # Held out: public.
            num_examples=task.dataset.num_examples,
            backpropagation=not command.forward_only,
            num_passes=command.num_passes,
            batch_size=command.batch_size,
            num_public=command.num_public,
            **_budget(command),
        )
    first = _numbers(found.best)
    names = ("num_steps", "num_directions", "l2_clip_norm", "learning_rate")
    said = {name: first[name] for name in names if name in first}
    if command.batch_size:
        said["batch_size"] = command.batch_size
    said |= {"average": planner.gradients.AVERAGED, "relation": command.relation}
    return found, _words(f"train {first['algorithm']}", said)


def _of_game(command: options.Recommend) -> tuple[planner.Recommendation, str]:
    if command.model != "linear" or command.hidden:
        raise UsageError(f"--model must be linear with --group, got {command.model}")
    task = tasks.of_network(command)
    shapes = jax.eval_shape(task.init, Keys.insecure(0).direction)
    radius = saddle.radius_of(command, task)
    task, of = saddle.points_of_game(task, radius, shapes, command)
    line = "jaxdp: methods are rehearsed on the held-out records, for a while"
    print(line, file=sys.stderr)
    with usage(command):
        found = planner.recommend(
            of.game.problem,
            of.game.start,
            of.game.records,
            num_examples=of.num_examples,
            num_passes=command.num_passes,
            **_budget(command),
        )
    first = found.best
    said: dict[str, Any] = {"num_steps": first.plan.num_steps, "radius": radius}
    if first.plan.family == "dpgd":
        said |= {"method": "descent_ascent", "l2_clip_norm": first.plan.l2_clip_norm}
        said |= {"learning_rate": first.learning_rate}
        said |= {"one_pass": ""} if first.num_passes <= 3 else {}
    said["relation"] = command.relation
    group = "" if command.group is None else f" --group {command.group}"
    return found, _words(f"train saddle{group}", said)


def _of_table(command: options.Recommend) -> tuple[planner.Recommendation, str]:
    if command.num_examples is None:
        raise UsageError(
            "--num-examples must be given with --bins: how many private records there "
            "are, which is public; got nothing"
        )
    degree, bins = command.degree or (2,), command.bins
    assert bins is not None
    with usage(command):
        queries = synthesis.marginals(binning.binning(bins).sizes, degree)
    with usage(command, "--epsilon"):
        found = planner.recommend(
            queries, num_examples=command.num_examples, **_budget(command)
        )
    said = {"method": found.best.method, "degree": ",".join(map(str, degree))}
    said |= {"bins": str(bins), "relation": command.relation}
    return found, _words("synthesize", said)


def _words(name: str, said: dict[str, Any]) -> str:
    """Returns the command that runs a candidate, with its options."""
    shown = {n: f"{x:.4g}" if isinstance(x, float) else f"{x}" for n, x in said.items()}
    words = [f"{flag(name)} {value}".rstrip() for name, value in shown.items()]
    return " ".join(
        ["jaxdp", name, *words, "and the options of data, model and budget."]
    )


def _numbers(one: Any) -> dict[str, Any]:
    """Returns the numbers of a candidate, as options of the commands call them."""
    plan, found = one.plan, {"algorithm": one.plan.family}
    of_plan = ("num_steps", "num_directions", "num_draws", "l2_clip_norm")
    of_plan = (*of_plan, *getattr(plan, "clip_fields", ()))
    of_plan = (*of_plan, *getattr(plan, "step_size_fields", ()), "noise_multiplier")
    of_run = ("name", "method", "learning_rate", "num_passes", "noise", "missed")
    of_run = (*of_run, "error", "half_width", "memory", "num_measured")
    of_run = (*of_run, "proven", "measured")
    found |= {name: getattr(plan, name) for name in of_plan if hasattr(plan, name)}
    return found | {name: getattr(one, name) for name in of_run if hasattr(one, name)}
