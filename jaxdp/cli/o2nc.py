"""Recipes of ``jaxdp train o2nc`` for each oracle, and their plans.

A recipe is a plan's keywords, and those of its sampler.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxdp import plans, sampling
from jaxdp.cli import options
from jaxdp.cli import task as tasks
from jaxdp.cli.parsing import UsageError, flag, refuse, usage
from jaxdp.cli.recipes import for_budget
from jaxdp.cli.steps import check_directions, given
from jaxdp.core.keys import Keys
from jaxdp.o2nc.oracle import DEFAULT, ORACLES, Name

_OF_SAMPLER = (
    *("multi_pass", "period", "restart_batch_size", "batch_size"),
    *("restart_sampling_prob", "sampling_prob"),
)
# Of the steps between restarts.
_OF_PERIODS = ("batch_size", "sampling_prob", "l2_clip_norm", "prefix_noise")


def prepare(command: options.O2NC, keys: Keys) -> tasks.Chosen:
    """Returns task, recipe and plan of a command, all of it checked."""
    _refuse_pairs(command)
    # A small model, because the noise grows with the root of the parameters.
    task = tasks.of_network(command, hidden=8)
    found = find(command.epsilon, command.oracle, multi_pass=command.multi_pass)
    recipe = found | given(command, found)
    if recipe["direction"] != "ball" and command.num_directions is None:
        # Small models have fewer than the recipe asks for.
        shapes = jax.eval_shape(task.init, keys.direction)
        dim = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        recipe["num_directions"] = min(recipe["num_directions"], dim)
    with usage(command, "--epsilon"):  # What else is wrong with them together.
        plan = make_plan(recipe, task.dataset.num_examples, command.relation)
        plan = plan.calibrate(epsilon=command.epsilon, delta=command.delta)
    num: int = recipe["num_directions"]
    check_directions(command, task, keys, recipe["direction"], num)
    task = task._replace(returned="the mean of a window")
    return tasks.Chosen(task, recipe, plan)


def _refuse_pairs(command: options.O2NC) -> None:
    """Refuses options that an oracle, a period or ``--multi-pass`` fixes."""
    several, oracle = command.multi_pass, ORACLES[command.oracle]
    of_samples = ("restart_sampling_prob", "sampling_prob")
    refuse(command, of_samples, "--multi-pass", several)
    if several:
        for name in ("restart_batch_size", "batch_size"):
            if getattr(command, name) is not None:
                prob = flag(name.replace("batch_size", "sampling_prob"))
                raise UsageError(
                    f"{flag(name)} must be left out with --multi-pass, where steps read "
                    f"all records, or a share by {prob}; got {getattr(command, name)}"
                )
        if command.prefix_noise not in (None, "independent"):
            raise UsageError(
                "--prefix-noise must be independent with --multi-pass, where a record is "
                f"in every step; got {command.prefix_noise}"
            )
    if oracle.gradients and command.direction is not None:
        raise UsageError(
            f"--direction must be left out with --oracle {command.oracle}, whose points "
            f"are uniform in a ball; got {command.direction}"
        )
    if oracle.slopes and command.period != 1:
        raise UsageError(
            f"--period must be 1 with --oracle {command.oracle}, whose slopes are along "
            f"other directions in each step and do not add up; got {command.period}"
        )
    names = _OF_PERIODS
    if oracle.gradients:  # A restart takes one gradient of a record.
        names = (*names, "num_directions")
    for name in given(command, names) if command.period == 1 else ():
        raise UsageError(
            f"{flag(name)} is for --period 2 or more only, got 1, where every step is a "
            "restart"
        )


# --- the plan ----------------------------------------------------------------------


def make_plan(
    recipe: Mapping[str, Any], num_examples: int, relation: Any = "replace_one"
) -> plans.O2NC:
    """Returns the plan of a recipe, without noise."""
    several, oracle = recipe["multi_pass"], ORACLES[recipe["oracle"]]
    sampler = _sampler(recipe)
    most = None if several else sampler.max_steps(num_examples)
    steps, window = _steps_and_window(recipe, most, num_examples)
    fields: dict[str, Any] = {
        name: x for name, x in recipe.items() if name not in _OF_SAMPLER
    }
    fields |= {"num_steps": steps, "window": window}
    if fields["l2_clip_norm"] is None:
        fields["l2_clip_norm"] = fields["restart_l2_clip_norm"]
    return plans.O2NC(
        num_examples=num_examples,
        sampling=sampler,
        relation=relation,
        difference=oracle.differences[0],
        share_directions=bool(oracle.shares),
        # Gradients, which may jump, do not follow how far a step moved.
        scale_with_movement=several and oracle.differences[0] in oracle.proportional,
        **fields,
    )


def _sampler(
    recipe: Mapping[str, Any],
) -> sampling.SinglePassRestarts | sampling.MultiPassRestarts:
    if recipe["multi_pass"]:  # With a probability of 1 all records are read.
        first, rest = recipe["restart_sampling_prob"], recipe["sampling_prob"]
        return sampling.MultiPassRestarts(
            period=recipe["period"],
            restart_sampling_prob=None if first == 1 else first,
            sampling_prob=None if rest == 1 else rest,
        )
    size = recipe["restart_batch_size"]
    return sampling.SinglePassRestarts(
        period=recipe["period"],
        restart_batch_size=size,
        batch_size=recipe["batch_size"] or size,
    )


def _steps_and_window(
    recipe: Mapping[str, Any], most: int | None, num_examples: int
) -> tuple[int, int]:
    steps, window = recipe["num_steps"], recipe["window"]
    if most is not None:
        least = window or 2
        if most < least:
            raise ValueError(
                f"restart_batch_size must leave {least} steps, a window, of one pass over "
                f"{num_examples} records, got {recipe['restart_batch_size']}, which leaves "
                f"{most}"
            )
        steps = steps or (most // window * window if window else most)
    window = window or steps
    if window > steps:
        raise ValueError(
            f"window must be at most num_steps = {steps}, for one to be complete, got "
            f"{window}"
        )
    return steps, window


# --- the table ---------------------------------------------------------------------

#: None stands for all steps that one pass allows in whole windows, one window of all
#: steps, the clip of a restart, and an adapted step size.
_NONE = ("num_steps", "window", "l2_clip_norm", "learning_rate")
_DEFAULTS = {"period": 1} | dict.fromkeys((*_OF_SAMPLER[2:], *_NONE))
_BALL = {"direction": "ball", "num_directions": 1}
# One pass: small clips, for the noise is large.
_ONE_PASS = {
    "restart_batch_size": 16,
    "restart_l2_clip_norm": 0.3,
    "smoothing_radius": 0.5,
    "num_directions": 64,
    "direction": "orthonormal",
    "max_step": 1.0,
    "prefix_noise": "blt_3",
}
# Many passes: every step reads all records.
_GRADIENTS = {
    **_BALL,
    "num_steps": 200,
    "restart_l2_clip_norm": 3.0,
    "smoothing_radius": 0.2,
    "max_step": 0.2,
    "prefix_noise": "independent",
}
_MANY_SLOPES = _GRADIENTS | {
    "direction": "orthonormal",
    "num_directions": 16,
    "restart_l2_clip_norm": 2.6,
    "smoothing_radius": 0.15,
    "max_step": 0.16,
}
# Directions of every record's own take time: few of them, and so more noise.
_VECTORS = _MANY_SLOPES | {
    "num_directions": 8,
    "restart_l2_clip_norm": 8.0,
    "smoothing_radius": 0.2,
    "max_step": 0.2,
}
_NOISY_VECTORS = _VECTORS | {
    "num_steps": 50,
    "num_directions": 16,
    "restart_l2_clip_norm": 1.1,
    "smoothing_radius": 0.7,
    "max_step": 1.3,
}
_NOISY_GRADIENTS = _GRADIENTS | {"restart_l2_clip_norm": 0.8, "max_step": 0.27}
# The bound of one pass, of slopes along directions of length sqrt(d).
_SLOPES = _ONE_PASS | {"restart_l2_clip_norm": 2.4}

Rows = tuple[tuple[float, Mapping[str, Any]], ...]

#: (oracle, whether records are read in several passes) -> recipes in order of the budget
#: up to which each counts, for every data set and model. Tuned at epsilon 2 and 8 with the
#: hinge loss on breast_cancer, on splits of its 455 training records: for each row and
#: budget 64 random trials of clip, radius, longest step, batch size or number of steps,
#: with a linear model and a simulation; the best ones on other splits and with a ReLU
#: network too. (Vectors in many passes take long: 16 such trials, and 12 by hand. In one
#: pass slopes were best, and their numbers proved good for the others too.) Restarts at
#: every step were better than longer periods.
CONVERSIONS: dict[tuple[Name, bool], Rows] = {
    ("zeroth_order", False): ((math.inf, _ONE_PASS),),
    ("first_order", False): ((math.inf, _ONE_PASS | _BALL),),
    ("scalar", False): ((math.inf, _SLOPES),),
    ("zeroth_order", True): ((4.0, _NOISY_VECTORS), (math.inf, _VECTORS)),
    ("first_order", True): ((4.0, _NOISY_GRADIENTS), (math.inf, _GRADIENTS)),
    ("scalar", True): ((math.inf, _MANY_SLOPES),),
}


def find(
    epsilon: float, oracle: Name = DEFAULT, *, multi_pass: bool = False
) -> dict[str, Any]:
    """Returns the recipe of an oracle for a budget; data set and model do not matter."""
    row = for_budget(CONVERSIONS[oracle, multi_pass], epsilon)
    return {"oracle": oracle, "multi_pass": multi_pass, **_DEFAULTS, **row}
