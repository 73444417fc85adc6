"""Table (a): settings of a prototype of the method as plans, and the figures it had.

The prototype is another program for the same algorithm, with the tree's noise. Its figures
stand in rows whose baseline is "prototype" and nowhere else; ``_sosp_rules`` says when ours
agree. Plans are its practical settings, by its own formulas:
the library's (``plans.SOSP.certified``) are what tables (b) and (c) run.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench import _sosp_rules as rules
from bench import _sosp_runs as runs
from bench._sosp_cells import Cell
from jaxdp import accounting, plans
from jaxdp.models.strict_saddles import StrictSaddleProblem

DELTA, FAILURE, STEPS, LEVELS = 1e-6, 0.1, 2000, 10
#: The trigger is at 3 times the accuracy gamma; a certificate says 4.
TRIGGER, CERTIFIED = 3.0, 4.0
#: Escapes that share a tracked Hessian.
SHARED = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of the prototype.

    Attributes:
      name: for a person.
      problem: "cosine" or "factorization", in 10 dimensions.
      start: of a run.
      epsilon: infinity for no noise but that of escapes.
      n: records.
      accuracy: gamma.
      told: the prototype's figures: of a metric, or of its largest value.
      certified: how many of its runs were, and of how many.
      hessian: mode of the plan.
      query_in_escape: of the plan.
      escape_steps: where the prototype has others than by its formula.
    """

    name: str
    problem: str
    start: str
    epsilon: float
    n: int
    accuracy: float
    told: dict[str, rules.Told]
    certified: tuple[int, int] | None
    hessian: str = "on_demand"
    query_in_escape: bool = False
    escape_steps: int | None = None

    @property
    def promised(self) -> float:
        """What a certificate says alpha is at most."""
        return CERTIFIED * self.accuracy


def problem_of(case: Case) -> StrictSaddleProblem:
    return runs.cosine() if case.problem == "cosine" else runs.factorization()


def plan_of(case: Case) -> plans.SOSP:
    """The settings of the prototype: practical constants."""
    problem, gamma = problem_of(case), case.accuracy
    lipschitz, smoothness = problem.lipschitz, problem.smoothness
    # Deviations of one record's gradient, of its change and of its Hessian.
    deviations, drift = (lipschitz, smoothness, smoothness), 1.0
    if case.problem == "factorization":
        deviations, drift = (0.1, 0.3, 0.3), lipschitz
    private = math.isfinite(case.epsilon)
    mu = accounting.gaussian_mu(case.epsilon, DELTA) if private else math.inf
    radius = math.sqrt(problem.dim) + math.sqrt(2 * math.log(2 * STEPS / FAILURE))
    refresh_std, escape_std = gamma / (2 * math.sqrt(2) * radius), gamma / radius
    refresh = max(2 * lipschitz / (mu * refresh_std), 8 * (deviations[0] / gamma) ** 2)
    rate = max(
        2 * LEVELS / (mu * refresh_std),
        2 * drift * (deviations[1] / smoothness) ** 2 / gamma**2,
    )
    reach = math.sqrt(gamma / problem.hessian_lipschitz)
    steps = case.escape_steps or escape_steps(case, reach, escape_std)
    shared = SHARED if case.hessian == "tracked" else 1
    products = math.sqrt(shared * (steps - 1))
    batch = max(
        2 * smoothness * reach * products / (mu * escape_std),
        8 * deviations[2] ** 2 / (problem.hessian_lipschitz * gamma),
    )
    more: dict[str, Any] = {}
    if case.hessian == "tracked":
        more = {
            "hessian": "tracked",
            "dim": problem.dim,
            "hessian_lipschitz": problem.hessian_lipschitz,
            "escapes_per_refresh": shared,
            "query_in_escape": case.query_in_escape,
        }
    plan = plans.SOSP(
        num_examples=case.n,
        num_steps=STEPS,
        relation="replace_one",
        l2_clip_norm=lipschitz,
        smoothness=smoothness,
        refresh_batch_size=math.ceil(refresh),
        difference_batch_rate=rate,
        drift_limit=drift,
        max_differences=2**LEVELS - 1,
        prefix_noise="tree",
        trigger_norm=TRIGGER * gamma,
        escape_steps=steps,
        escape_radius=reach,
        escape_noise_std=escape_std,
        hessian_batch_size=math.ceil(batch),
        hessian_clip_norm=smoothness,
        **more,
    )
    if not private:
        return plan.with_noise(noise_multiplier=0.0)
    return plan.calibrate(epsilon=case.epsilon, delta=DELTA)


def escape_steps(case: Case, reach: float, noise_std: float) -> int:
    """The prototype's Gamma, and one more, for half of the curvature that alpha allows."""
    problem = problem_of(case)
    curvature = math.sqrt(problem.hessian_lipschitz * case.promised) / 2
    growth = 1 + curvature / problem.smoothness
    needed = 2 / math.pi * (reach * problem.smoothness / (FAILURE * noise_std)) ** 2
    steps = math.log1p((growth**2 - 1) * needed) / (2 * math.log(growth))
    return max(2, math.ceil(steps)) + 1


def start_of(case: Case) -> runs.Start:
    """A critical point, or a point of one's own for every seed."""
    if case.start != "uniform":
        return case.start
    dim = problem_of(case).dim
    return lambda seed: np.random.default_rng([seed, 1]).uniform(-3, 3, dim)


# --- what the prototype says --------------------------------------------------------------


def _told(
    count: int,
    records: tuple[float, float],
    queries: tuple[int, int, int] | None,
    alpha: tuple[float, float] | None,
) -> dict[str, rules.Told]:
    """Records and their last digit; refreshes, differences, escapes; median, largest."""
    found = {"records": rules.Told(records[0], count, records[1])}
    if queries is not None:
        names = ("refreshes", "differences", "escapes")
        for name, value in zip(names, queries, strict=True):
            found[name] = rules.Told(value, count, 1.0)
    if alpha is not None:
        found["alpha"] = rules.Told(alpha[0], count, 1e-3)
        found["largest alpha"] = rules.Told(alpha[1], count, 1e-3)
    return found


def _cosine(
    start: str,
    epsilon: float,
    n: int,
    gamma: float,
    records: tuple[float, float],
    queries: tuple[int, int, int],
    alpha: tuple[float, float],
    certified: tuple[int, int],
) -> Case:
    name = f"cosine, {start}, epsilon {epsilon:g}, n = {n}, gamma {gamma:g}"
    told = _told(certified[1], records, queries, alpha)
    return Case(name, "cosine", start, epsilon, n, gamma, told, certified)


INF = math.inf
_ALL, _MOST = (20, 20), (30, 30)
# fmt: off
CASES = [
    _cosine("saddle", INF, 200_000, .03, (2.07e4, 100), (2, 6, 2), (.017, .086), _ALL),
    _cosine("saddle", 1, 100_000, .05, (5.2e4, 1e3), (2, 5, 2), (.037, .106), _ALL),
    _cosine("saddle", 1, 400_000, .03, (8.9e4, 1e3), (2, 5, 2), (.028, .075), _ALL),
    _cosine("saddle", 2, 20_000, .10, (1.4e4, 1e3), (2, 4, 4), (.061, .123), (27, 30)),
    _cosine("saddle", 2, 50_000, .06, (2.4e4, 1e3), (2, 5, 3), (.034, .106), _MOST),
    _cosine("saddle", 2, 200_000, .03, (6.0e4, 1e3), (2, 6, 2), (.021, .066), _MOST),
    _cosine("maximum", 2, 200_000, .03, (1.17e5, 1e3), (4, 7, 2), (.022, .077), _MOST),
    _cosine("maximum", 2, 50_000, .06, (4.8e4, 1e3), (4, 6, 2), (.224, .314), (10, 30)),
    _cosine("uniform", 2, 200_000, .03, (7.7e4, 1e3), (3, 4, 1), (.017, .083), _MOST),
]
# fmt: on


def _tracked(
    in_escape: bool, differences: int, records: float, alpha: tuple[float, float]
) -> Case:
    """All of the prototype's runs were certified; how many there were is not said: 20.

    It used fewer records than without queries in escapes, where no running Hessian has to
    follow: it seems not to have counted those of Hessians.
    """
    name = "cosine, saddle, epsilon 2, n = 200000, gamma 0.03, tracked Hessian, "
    name += "queries in escapes" if in_escape else "no queries in escapes"
    told = _told(20, (records, 100), None, alpha)
    told["differences"] = rules.Told(differences, 20, 1.0)
    # Which records were counted is not said: without those of Hessians they are fewer.
    told["gradient records"] = told["records"]
    return Case(
        name, "cosine", "saddle", 2, 200_000, 0.03, told, _ALL, "tracked", in_escape
    )


CASES += [
    _tracked(True, 30, 6.04e4, (0.017, 0.073)),
    _tracked(False, 6, 5.42e4, (0.035, 0.062)),
]


def _factorization(
    start: str, epsilon: float, n: int, told: dict[str, rules.Told]
) -> Case:
    """Escapes of 125 steps, as the prototype says of one of them; its formula gives 187."""
    name = f"factorization, {start}, epsilon {epsilon:g}, n = {n}, gamma 0.005"
    return Case(
        name, "factorization", start, epsilon, n, 0.005, told, None, escape_steps=125
    )


# One run of each is described.
CASES += [
    _factorization(
        "saddle",
        8,
        1_000_000,
        {
            "records": rules.Told(5.0e5, 1, 1e4),
            "steps": rules.Told(310, 1, 1.0),
            "differences": rules.Told(84, 1, 1.0),
            "escapes": rules.Told(4, 1, 1.0),
            "alpha": rules.Told(0.0045, 1, 1e-4),
        },
    ),
    _factorization("zero", 8, 1_000_000, {"alpha": rules.Told(0.011, 1, 1e-3)}),
    _factorization("saddle", 2, 2_000_000, {"alpha": rules.Told(0.0038, 1, 1e-4)}),
    _factorization("zero", 2, 2_000_000, {"alpha": rules.Told(0.010, 1, 1e-3)}),
]


# --- runs ------------------------------------------------------------------------------


def groups() -> dict[str, list[Case]]:
    """The cases, those of one plan together."""
    found: dict[str, list[Case]] = {}
    for case in CASES:
        name = f"{case.problem}_{case.epsilon:g}_{case.n}_{case.hessian}"
        name += "_queries" if case.query_in_escape else ""
        found.setdefault(name, []).append(case)
    return found


def cells(cases: Sequence[Case], seeds: Sequence[int]) -> list[Cell]:
    """Runs of cases, those of one plan on the same records."""
    found = []
    by_plan: dict[plans.SOSP, list[Case]] = {}
    for case in cases:
        by_plan.setdefault(plan_of(case), []).append(case)
    for plan, same in by_plan.items():
        entries = {
            case.name: runs.Entry(plan, start_of(case), case.promised) for case in same
        }
        note = (
            f"b = {plan.refresh_batch_size}, b_H = {plan.hessian_batch_size}, "
            f"{plan.escape_steps} steps of an escape"
        )
        n = plan.num_examples
        of = runs.collect(problem_of(same[0]), n, entries, seeds)
        found += [
            Cell(
                "a",
                case.name,
                "the prototype's plan",
                of[case.name],
                n,
                note,
                case.told,
                case.certified,
            )
            for case in same
        ]
    return found
