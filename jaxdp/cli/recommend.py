"""``jaxdp recommend``: a plan and its numbers for a data set, from public numbers."""

import json
from typing import Any

from jaxdp import models, planner
from jaxdp.cli import options, prepare
from jaxdp.cli import task as tasks
from jaxdp.cli.parsing import flag, usage
from jaxdp.core.keys import Keys


def run(command: options.Recommend) -> None:
    """Prints the candidates, and how the first one is trained."""
    with models.show_values(command.show_values):
        task = tasks.of_network(command)
    start = prepare.initial(task, Keys.insecure(0))
    with usage(command):
        found = planner.recommend(
            task.value_fn,
            start,
            task.dataset.test,  # Held out: public.
            num_examples=task.dataset.num_examples,
            epsilon=command.epsilon,
            delta=command.delta,
            relation=command.relation,  # pyright: ignore[reportArgumentType]
            backpropagation=not command.forward_only,
            num_passes=command.num_passes,
            batch_size=command.batch_size,
        )
    if command.json:
        answer = {
            "reason": found.reason,
            "candidates": [_numbers(one) for one in found.candidates],
        }
        print(json.dumps(answer))
        return
    print(found)
    first = _numbers(found.candidates[0])
    names = ("num_steps", "num_directions", "l2_clip_norm", "learning_rate")
    said = {name: f"{first[name]:.4g}" for name in names if name in first}
    if command.batch_size:
        said["batch_size"] = str(command.batch_size)
    said |= {"average": f"{planner.AVERAGED:g}", "relation": command.relation}
    words = [f"jaxdp train {first['algorithm']}"]
    words += [f"{flag(name)} {value}" for name, value in said.items()]
    print(" ".join(words), "and the options of data, model and budget.")


def _numbers(one: planner.PlannedRun) -> dict[str, Any]:
    """Returns the numbers of a candidate, as options of ``jaxdp train`` call them."""
    plan: Any = one.plan
    slopes = {n: getattr(plan, n) for n in ("num_directions",) if hasattr(plan, n)}
    return {
        "algorithm": plan.family,
        "num_steps": plan.num_steps,
        **slopes,
        "l2_clip_norm": plan.l2_clip_norm,
        "learning_rate": one.learning_rate,
        "noise_multiplier": plan.noise_multiplier,
        "num_passes": one.num_passes,
        "noise": one.noise,
        "missed": one.missed,
    }
