"""``jaxdp epsilon`` and ``jaxdp calibrate``: accounting of plans, without data."""

import json
import math
import pathlib
from typing import Any

from jaxdp import plans, sampling
from jaxdp.cli import options
from jaxdp.cli.parsing import UsageError, flag, usage
from jaxdp.cli.printing import show
from jaxdp.core import validate
from jaxdp.mechanism.plan import Plan
from jaxdp.mechanism.sum_plan import SumPlan

_NOISE = "noise_multiplier"

Command = options.Epsilon | options.Calibrate


def run(command: Command) -> None:
    """Prints epsilon and the plan's numbers, as a table or as one JSON object."""
    if isinstance(command, options.Epsilon):
        plan, delta = _given(command)
    else:
        plan, delta = _calibrated(command), command.delta
    with usage(command):
        spent = plan.epsilon(delta=delta)
    answer: dict[str, Any] = {
        "epsilon": float(spent) if math.isfinite(spent) else None,
        "delta": delta,
        "relation": plan.relation,
        "accountant": spent.accountant,
        _NOISE: getattr(plan, _NOISE, None),  # Vertices are drawn without any.
        "num_steps": plan.num_steps,
        "sampling": repr(plan.sampling),
    }
    if command.json:
        print(json.dumps(answer))
        return
    missing = {"epsilon": "infinite", _NOISE: "none"}
    show({n: missing.get(n, "none") if x is None else x for n, x in answer.items()})


def sampler(command: Any, num_examples: int | None) -> sampling.AnySampler:
    """Returns the sampler that ``--sampling-prob`` or ``--batch-size`` asks for."""
    prob, size = command.sampling_prob, command.batch_size
    if prob is not None and size is not None:
        raise UsageError(
            f"--batch-size must be left out with --sampling-prob, got {size}"
        )
    if size is None and prob in (None, 1):
        return sampling.FullBatch()
    if num_examples is None:
        raise UsageError(
            "--num-examples must be an integer >= 1 with sampling, got none"
        )
    if size is not None:
        if not 1 <= size <= num_examples:
            raise UsageError(
                f"--batch-size must be an integer from 1 to {num_examples}, the "
                f"records, got {size}"
            )
        if size == num_examples:
            return sampling.FullBatch()
        prob = size / num_examples
    assert prob is not None
    with usage(command):
        validate.probability(allow_one=True, sampling_prob=prob)
        return sampling.TruncatedPoisson(sampling_prob=prob)


def _given(command: options.Epsilon) -> tuple[Plan, float]:
    """Returns the plan whose epsilon is asked for, and the delta."""
    delta = options.DEFAULT_DELTA if command.delta is None else command.delta
    if command.plan is None:
        for name in ("noise_multiplier", "num_steps"):
            if getattr(command, name) is None:
                raise UsageError(f"{flag(name)} or --plan must be given, got neither")
        return _plan(command), delta
    numbers = ("noise_multiplier", "num_steps", "relation", "num_examples")
    for name in (*numbers, "sampling_prob", "batch_size"):
        if getattr(command, name) is not None:
            raise UsageError(
                f"{flag(name)} must be left out with --plan, whose number counts; got "
                f"{getattr(command, name)}"
            )
    plan = read_plan(command, command.plan, "--plan")
    needed = plan.calibrated
    if getattr(plan, needed) is None:
        raise UsageError(
            f"--plan must have a {needed}, got {str(command.plan)!r} without"
        )
    return plan, delta if command.delta is not None else plan.delta or delta


def read_plan(command: Any, path: pathlib.Path, option: str) -> Any:
    """Reads a plan.json of any kind; errors name ``option``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UsageError(
            f"{option} must be a readable plan.json, got {str(path)!r}"
        ) from None
    with usage(command, option):
        return plans.from_json(text)


def _calibrated(command: options.Calibrate) -> SumPlan:
    if (command.num_steps is None) == (command.noise_multiplier is None):
        got = "neither" if command.num_steps is None else "both"
        raise UsageError(
            f"--num-steps or --noise-multiplier must be given, and not both; got {got}"
        )
    asked = "noise_multiplier" if command.noise_multiplier is None else "num_steps"
    with usage(command):
        return _plan(command).calibrate(
            epsilon=command.epsilon, delta=command.delta, vary=asked
        )


def _plan(command: Command) -> SumPlan:
    """Returns a plan of these numbers; clip and radius do not affect the answers.

    It is a DPZero, whose exact noise fits its grid for every multiplier that makes sense.
    """
    chosen = sampler(command, command.num_examples)
    with usage(command):
        return plans.DPZero(
            num_examples=1 if command.num_examples is None else command.num_examples,
            num_steps=1 if command.num_steps is None else command.num_steps,
            sampling=chosen,
            relation=command.relation or "replace_one",  # pyright: ignore
            l2_clip_norm=1.0,
            smoothing_radius=0.0,
            noise_multiplier=command.noise_multiplier,
        )
