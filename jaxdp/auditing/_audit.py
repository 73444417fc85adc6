"""Audit of a plan: data sets, attacks and bounds put together."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import numpy as np

from jaxdp.accounting import Epsilon
from jaxdp.auditing import (
    attacks,
    bounds,
    draws,
    drill,
    second_order,
    simulation,
    vertex_attacks,
    vertices,
)
from jaxdp.core import validate
from jaxdp.mechanism.plan import Plan
from jaxdp.mechanism.sum_plan import SumPlan
from jaxdp.o2nc.plan import O2NC
from jaxdp.o2nc.prefix_sum_plan import PrefixSum
from jaxdp.saddle.plans import Saddle, SaddleBiasReduced, SyntheticData
from jaxdp.sampling import MultiPassRestarts
from jaxdp.sosp.plan import SOSP

# How the runs are divided: this share to learn the attacks, as many to choose one, the
# rest to test it. Fewer where the best attack has nothing to learn.
_LEARN = 0.2
_LEARN_DRAWS = 0.1
# Vertices of a shortened plan: what one record shows does not depend on their number.
_MOST_VERTICES = 16
# And its records, where all of them are in every step: longer steps make up for them.
_MOST_RECORDS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Result of an audit: lower bound on epsilon, accounted epsilon, attack, error rates.

    Attributes:
      epsilon_lower: lower bound on the epsilon that the code has at ``delta``.
      epsilon: what the plan accounts at ``delta``.
      delta: of both.
      failure_prob: with at most this probability the bound is above the truth.
      method: the attack, and the rule that makes an epsilon of its errors.
      canary: the record by which the two data sets differ.
      num_runs: simulated runs on each data set.
      num_tested: those of them that the bound counts: the others chose the attack.
      num_steps: T of every run.
      false_positive_rate: its upper limit, for the attack.
      false_negative_rate: its upper limit, for the attack.
    """

    epsilon_lower: float
    epsilon: float
    delta: float
    failure_prob: float
    method: str
    canary: str
    num_runs: int
    num_tested: int
    num_steps: int
    false_positive_rate: float
    false_negative_rate: float

    @property
    def passed(self) -> bool:
        """True if the lower bound is at most the accounted epsilon."""
        return self.epsilon_lower <= self.epsilon


def audit(
    plan: Plan,
    *,
    num_runs: int = 100_000,
    delta: float | None = None,
    failure_prob: float = 1e-6,
    seed: int = 0,
) -> AuditResult:
    """Bounds from below the epsilon of what a plan's transformation really does.

    Which canary, which attack and which threshold, is decided on some of the runs; the
    errors of that one attack on the others are bounded by Clopper and Pearson. Where the
    plan accounts for unsampled Gaussians, the errors become an epsilon through the
    trade-off of two Gaussians, which at epsilon 2 reaches 87% of the truth with the
    default number of runs and 93% with 250000; else by the definition of (epsilon, delta),
    which reaches about half, and never more than ``log(num_runs / 25)`` or so. So audit
    plans with an epsilon of 1 to 5.

    Of ``plans.O2NC`` the whole sequence of increments is attacked, with the norms that are
    logged. In a single pass the canary of the result says in which leaf of a period it was
    read; in several it is in every step. Where noise is scaled with the movement, queries
    follow a path of long and short moves, and of none.

    Of ``plans.Saddle``, ``ConvexSimplex`` and ``SyntheticData`` all vertices that a run
    releases are attacked, which are claimed to be zCDP: an epsilon follows from the least
    rho that allows the errors, and reaches about two thirds. Their sampler is also
    enumerated, in one draw of the worst case (:mod:`jaxdp.auditing.draws`): where that
    breaks what one draw claims, it is the result, of delta 0.

    Of ``plans.SOSP`` a short drill is attacked, whatever the plan's sizes
    (:mod:`jaxdp.auditing.drill`): its gradients and products with Hessians are
    released between prescribed points. The canary of the result says in which role a
    record was read.

    Laplace noise is drawn on the host: 15 to 30 microseconds for each of the ``num_runs *
    num_steps * num_directions`` numbers. Where records are sampled, a run takes time for
    each record of the data set. So audit few steps (:func:`shortened`).

    Args:
      plan: one that builds a transformation, with noise; or one that draws vertices and
        releases them all, with the certified sampler and step sizes.
      num_runs: simulated runs on each data set, >= 1000.
      delta: default the plan's own; 0 for a pure guarantee.
      failure_prob: in (0, 1): of the bound being above the true epsilon.
      seed: in [0, 2**32); an audit is a function of it.

    Raises:
      TypeError, ValueError: an argument is out of range, or a plan that says nothing of
        data, promises nothing, or whose releases are elsewhere.
      RuntimeError: what is simulated is not what the plan's transformation does.
    """
    validate.integer(at_least=1000, at_most=2**31, num_runs=num_runs)
    validate.probability(failure_prob=failure_prob)
    validate.integer(at_least=0, at_most=2**32 - 1, seed=seed)
    delta, accounted = _accounted(plan, delta)
    if isinstance(plan, SOSP):
        plan = drill.as_drill(plan)
    if isinstance(plan, vertices.VertexPlan):
        rule = bounds.Rule(delta, failure_prob, zcdp=True)
        enumerated = _enumerated(plan)
        if not enumerated.passed:
            return enumerated
    else:
        # Where who is read when is known, each run is a sequence of Gaussians.
        closed_form = accounted.accountant == "Gaussian closed form"
        gaussian = closed_form and not plan.sampling.amplifies
        rule = bounds.Rule(delta, failure_prob, gaussian)
    # max keeps the scores of one attempt at a time.
    best = max(_attempts(plan, num_runs, seed, rule), key=lambda a: a.promise)
    errors = bounds.error_rates(
        best.first, best.second, best.threshold, failure_prob=failure_prob
    )
    false_positive, false_negative = float(errors[0]), float(errors[1])
    epsilon_lower, how = bounds.epsilon_lower(false_positive, false_negative, rule)
    return AuditResult(
        epsilon_lower=epsilon_lower,
        epsilon=float(accounted),
        delta=delta,
        failure_prob=failure_prob,
        method=f"{best.attack}, {how}",
        canary=best.canary,
        num_runs=num_runs,
        num_tested=len(best.first),
        num_steps=plan.num_steps,
        false_positive_rate=false_positive,
        false_negative_rate=false_negative,
    )


class _Attempt(NamedTuple):
    """Attack on one canary: its chosen threshold, and the scores that will test it."""

    canary: str
    attack: str
    threshold: float
    promise: float  # the bound that it gives on the runs it was chosen on
    first: np.ndarray  # scores of the runs that are to test it, on the first data set
    second: np.ndarray  # and on the second one


def _attempts(
    plan: Any, num_runs: int, seed: int, rule: bounds.Rule
) -> Iterator[_Attempt]:
    runs: Any = simulation
    attackers: Any = attacks
    share = _LEARN
    if isinstance(plan, vertices.VertexPlan):
        runs, attackers, share = vertices, vertex_attacks, _LEARN_DRAWS
    if isinstance(plan, SOSP):
        runs = attackers = second_order
    learn = choose = int(share * num_runs)
    canaries: Any = runs.canaries(plan)
    data = list(dict.fromkeys(d for c in canaries for d in (c.first, c.second)))
    made = runs.transcripts(plan, data, num_runs, seed)
    transcripts = dict(zip(data, made, strict=True))
    for canary in canaries:
        first, second = transcripts[canary.first], transcripts[canary.second]
        learned = attackers.attacks(plan, canary, first[:learn], second[:learn])
        for name, score in learned.items():
            one, other = score(first[learn:]), score(second[learn:])
            threshold, promise = bounds.best_threshold(
                one[:choose], other[:choose], rule
            )
            yield _Attempt(
                canary.name, name, threshold, promise, one[choose:], other[choose:]
            )


def _enumerated(plan: vertices.VertexPlan) -> AuditResult:
    """Returns the audit result of the sampler's enumerated law, in one worst-case draw."""
    found = draws.audited(plan)
    return AuditResult(
        epsilon_lower=found.bounded_range,
        epsilon=found.epsilon,
        delta=0.0,
        failure_prob=0.0,
        method="enumerated law of one draw, bounded range",
        canary=f"{draws.DIM} scores of standard deviation {draws.SPREAD} octaves",
        num_runs=0,
        num_tested=0,
        num_steps=1,
        false_positive_rate=0.0,
        false_negative_rate=0.0,
    )


def shortened(plan: Any, num_steps: int, *, delta: float | None = None) -> Any:
    """Returns the plan with fewer steps, and less noise so that its epsilon is the same.

    What one step of a long run shows of a record is too little to be measured. The
    shortened plan has the same bound, sampling, directions and code, and spends in few
    steps what the plan spends in all. One of ``plans.O2NC`` gets shorter periods, so that
    there are two, and no more records than they read; or, in several passes, than are
    simulated quickly.

    A plan that draws vertices gets longer steps, two of them at least, for in the first
    one nothing depends on data; also fewer vertices to draw from, fewer draws a step and
    fewer records in a full batch, where it has more than are simulated quickly.

    One of ``plans.SOSP`` gets periods and escapes of at most so many steps, and keeps its
    noise: its epsilon does not depend on how long a run is.

    Args:
      plan: as in :func:`audit`.
      num_steps: >= 1; a plan that has no more steps, vertices and so on than it would
        get is returned as it is.
      delta: at which the epsilons are equal; default the plan's own.

    Raises:
      TypeError, ValueError: as :func:`audit`.
    """
    validate.integer(num_steps=num_steps)
    delta, accounted = _accounted(plan, delta, whole=False)
    if isinstance(plan, SOSP):
        return drill.drilled(plan, num_steps)
    changes = _shorter(plan, num_steps)
    if not changes:
        return plan
    fewer = dataclasses.replace(plan, **changes)
    return fewer.calibrate(epsilon=accounted, delta=delta)


def _shorter(plan: Any, num_steps: int) -> dict[str, Any]:
    """Returns the changed fields of a shortened plan; empty if it is short enough."""
    if isinstance(plan, vertices.VertexPlan):
        num_steps = max(num_steps, 2)
        most = {"dim": _MOST_VERTICES, "dim_x": _MOST_VERTICES, "dim_y": _MOST_VERTICES}
        most |= {"domain_size": _MOST_VERTICES, "num_queries": _MOST_VERTICES}
        most |= {"num_draws": vertices.MOST_DRAWS, "num_steps": num_steps}
        if isinstance(plan, SyntheticData):
            most["num_examples"] = _MOST_RECORDS
        changes = {k: limit for k, limit in most.items() if getattr(plan, k, 0) > limit}
        if "num_steps" in changes and not isinstance(plan, SyntheticData):
            changes["num_examples"] = num_steps * plan.sampling.batch_size
        return changes
    if plan.num_steps <= num_steps:
        return {}
    changes: dict[str, Any] = {"num_steps": num_steps, "noise_multiplier": None}
    if isinstance(plan, O2NC):
        period = min(plan.sampling.period, max(num_steps // 2, 1))
        sampler = dataclasses.replace(plan.sampling, period=period)
        changes["sampling"] = sampler
        if isinstance(sampler, MultiPassRestarts):
            records = min(plan.num_examples, _MOST_RECORDS)
        else:
            records = sampler.records_per_period * -(-num_steps // period)
        changes["num_examples"] = records
    return changes


def _accounted(
    plan: Any, delta: float | None, *, whole: bool = True
) -> tuple[float, Epsilon]:
    """Returns delta and epsilon of a plan that can be audited; checks both arguments.

    With ``whole``, all that a run draws must be small enough to be looked at.
    """
    if isinstance(plan, SaddleBiasReduced):
        raise ValueError(
            "plan must release every vertex that it draws to be audited, got "
            "SaddleBiasReduced, which releases those of its output alone; plans.Saddle "
            "draws and moves scores by the same code"
        )
    validate.instance((SumPlan, SOSP, *get_args(vertices.VertexPlan)), plan=plan)
    if isinstance(plan, vertices.VertexPlan):
        _check_draws(plan, whole)
    elif not plan.noise_multiplier:
        raise ValueError(
            "plan must have noise to be audited, got noise_multiplier = "
            f"{plan.noise_multiplier!r}"
        )
    if isinstance(plan, PrefixSum):
        raise ValueError(
            "plan must make its own releases to be audited, got "
            f"{type(plan).__name__}, whose updates come from elsewhere"
        )
    epsilon = plan.epsilon(delta=delta)
    chosen = plan.delta if delta is None else delta
    assert chosen is not None  # Or there were no epsilon.
    return chosen, epsilon


def _check_draws(plan: vertices.VertexPlan, whole: bool) -> None:
    plan.check_ready()
    if plan.sampler != "integer":
        raise ValueError(
            'plan must have sampler="integer" to be audited, got '
            f"{plan.sampler!r}, which promises nothing"
        )
    if plan.rho == 0:
        raise ValueError(
            "plan must have steps that depend on data to be audited, got num_steps = "
            f"{plan.num_steps} and rho = 0"
        )
    most = vertices.MOST_DRAWS
    if whole and isinstance(plan, Saddle) and plan.num_draws > most:
        raise ValueError(
            f"plan must have num_draws <= {most} to be audited, whose vertices are all "
            f"released, got {plan.num_draws}; shorten it"
        )
