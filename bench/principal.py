"""A leading direction with a certificate: ``jaxdp train sosp`` on real data.

digits_4x4 (means of 2x2 pixels, 16 features, 1437 records), delta = 1e-5, one pass, from
the strict saddle at 0, by the command line's recipe; only budget and relation change.
"alpha" is what a certificate is about; "start" and "found" are the least alpha of the two
points on the 360 public records. A certificate is informative where its alpha is below the
start's. The captured variance is that of the public records, over the best direction's;
"one direction for all" is the share of a constant vector. "no escapes" is the same plan
without them. Means over seeds with the 95% interval of Student's t.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

import jaxdp
from bench import _harness
from jaxdp.cli import options, prepare, sosp

DATASET, DELTA = "digits_4x4", 1e-5
CASES: tuple[tuple[str, float], ...] = (
    ("replace_one", 10.0),
    ("replace_one", 16.0),
    ("replace_one", 32.0),
    ("zero_out", 8.0),
    ("zero_out", 12.0),
)


def job_of(relation: str, epsilon: float) -> prepare.Job:
    """What the command line runs."""
    return prepare.prepare(
        options.SOSP(
            dataset=DATASET,
            epsilon=epsilon,
            delta=DELTA,
            relation=relation,
            seed=0,
        )
    )


def run(quick: bool) -> list[_harness.Row]:
    """The table; quick: three seeds and one budget."""
    rows: list[_harness.Row] = []
    for relation, epsilon in CASES[2:3] if quick else CASES:
        job = job_of(relation, epsilon)
        plan = job.plan
        assert isinstance(plan, jaxdp.plans.SOSP)
        case = f"{relation}, epsilon {epsilon:g}"
        rows += _rows(case, job, plan, 3 if quick else 20)
        if (relation, epsilon) == CASES[2]:
            plain = dataclasses.replace(plan, escape_steps=None)
            rows += _rows(f"{case}, no escapes", job, plain, 3 if quick else 20)
    return rows


def _rows(
    case: str, job: prepare.Job, plan: jaxdp.plans.SOSP, num_seeds: int
) -> list[_harness.Row]:
    task = job.task
    alpha_fn = functools.partial(sosp.alpha_of, task.dataset, job.recipe["rank"])
    start = prepare.initial(task, job.keys)
    before = float(alpha_fn(start))
    reports, alphas, captured, steps = [], [], [], []
    for seed in range(num_seeds):
        keys = jaxdp.Keys.insecure(seed)
        result = jaxdp.fit(plan, keys, start, task.data, value_fn=task.value_fn)
        reports.append(result.report["outcome"])
        steps.append(result.report["steps_done"])
        alphas.append(float(alpha_fn(result.params)))
        captured.append(float(task.metric_fn(result.params)))
    certified = np.array([outcome["certified"] for outcome in reports])
    rows = [_harness.Row(case, "start", before, "alpha, public records")]
    if plan.theorem is not None:
        alpha = plan.theorem.promise.alpha
        rows.append(
            _harness.Row(
                case, "alpha", alpha, "", "start", alpha / before, note="certified"
            )
        )
        below = float(np.mean(np.array(alphas)[certified] <= alpha))
        rows.append(_harness.Row(case, "found below alpha", below, "of the certified"))
    share = f"of {num_seeds} runs"
    rows.append(_harness.Row(case, "certified", float(certified.mean()), share))
    used = [outcome["records_used"] for outcome in reports]
    for name, values, unit in (
        ("found", alphas, "alpha, public records"),
        ("captured variance", captured, "of the best"),
        ("steps", steps, "steps"),
        ("records", used, "records"),
    ):
        m = _harness.mean(np.array(values, float))
        rows.append(_harness.averaged(case, name, m, len(values), unit))
    flat = jnp.ones_like(start) / jnp.sqrt(start.size)
    rows.append(
        _harness.Row(case, "one direction for all", float(task.metric_fn(flat)), "")
    )
    return rows
