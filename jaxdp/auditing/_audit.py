"""The audit of a plan: data sets, attacks and bounds put together."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxdp import _validate
from jaxdp.accounting import Epsilon
from jaxdp.auditing import attacks, bounds, simulation
from jaxdp.plans._base import SumPlan
from jaxdp.plans._correlated import CorrelatedPlan
from jaxdp.plans.o2nc import O2NC

# How the runs are divided: some to learn the attacks, some to choose one, the rest to
# test it.
_LEARN = _CHOOSE = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What an audit found.

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
        """Whether the bound is at most what is accounted."""
        return self.epsilon_lower <= self.epsilon


def audit(
    plan: SumPlan,
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

    Of ``plans.O2NC``, whose records are read once, the whole sequence of releases is
    attacked; the canary of the result says in which leaf of a period it was read.

    Exact noise is drawn on the host: 15 to 30 microseconds for each of the ``num_runs *
    num_steps * num_directions`` numbers. So audit few steps (:func:`shortened`). Where
    records are sampled, a run takes time for each record of the data set too.

    Args:
      plan: any plan that builds a transformation, with noise.
      num_runs: simulated runs on each data set, >= 1000.
      delta: default the plan's own; 0 for a pure guarantee.
      failure_prob: in (0, 1): of the bound being above the true epsilon.
      seed: in [0, 2**32); an audit is a function of it.

    Raises:
      TypeError, ValueError: an argument is out of range, or a plan without noise.
      RuntimeError: what is simulated is not what the plan's transformation does.
    """
    _validate.integer(at_least=1000, at_most=2**31, num_runs=num_runs)
    _validate.probability(failure_prob=failure_prob)
    _validate.integer(at_least=0, at_most=2**32 - 1, seed=seed)
    delta, accounted = _accounted(plan, delta)
    # Where who is read when is known, each run is a sequence of Gaussians.
    gaussian = (
        accounted.accountant == "Gaussian closed form" and not plan.sampling.amplifies
    )
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
    """One attack on one canary, decided on but not tested."""

    canary: str
    attack: str
    threshold: float
    promise: float  # the bound that it gives on the runs it was chosen on
    first: np.ndarray  # scores of the runs that are to test it, on the first data set
    second: np.ndarray  # and on the second one


def _attempts(
    plan: SumPlan, num_runs: int, seed: int, rule: bounds.Rule
) -> Iterator[_Attempt]:
    learn, choose = int(_LEARN * num_runs), int(_CHOOSE * num_runs)
    canaries = simulation.canaries(plan)
    data = list(dict.fromkeys(d for c in canaries for d in (c.first, c.second)))
    made = simulation.transcripts(plan, data, num_runs, seed)
    transcripts = dict(zip(data, made, strict=True))
    for canary in canaries:
        first, second = transcripts[canary.first], transcripts[canary.second]
        learned = attacks.attacks(plan, canary, first[:learn], second[:learn])
        for name, score in learned.items():
            one, other = score(first[learn:]), score(second[learn:])
            threshold, promise = bounds.best_threshold(
                one[:choose], other[:choose], rule
            )
            yield _Attempt(
                canary.name, name, threshold, promise, one[choose:], other[choose:]
            )


def shortened(plan: SumPlan, num_steps: int, *, delta: float | None = None) -> SumPlan:
    """The plan with fewer steps, and so much less noise that its epsilon is the same.

    What one step of a long run shows of a record is too little to be measured. The
    shortened plan has the same bound, sampling, directions and code, and spends in few
    steps what the plan spends in all. One of ``plans.O2NC`` gets shorter periods, so that
    there are two, and no more records than they read.

    Args:
      plan: with noise.
      num_steps: >= 1; a plan with no more steps than this is returned as it is.
      delta: at which the epsilons are equal; default the plan's own.

    Raises:
      TypeError, ValueError: an argument is out of range, or a plan without noise.
    """
    _validate.integer(num_steps=num_steps)
    delta, accounted = _accounted(plan, delta)
    if plan.num_steps <= num_steps:
        return plan
    changes: dict[str, Any] = {"num_steps": num_steps, "noise_multiplier": None}
    if isinstance(plan, O2NC):
        period = min(plan.sampling.period, max(num_steps // 2, 1))
        sampler = dataclasses.replace(plan.sampling, period=period)
        changes["sampling"] = sampler
        changes["num_examples"] = sampler.records_per_period * -(-num_steps // period)
    fewer = dataclasses.replace(plan, **changes)
    return fewer.calibrate(epsilon=accounted, delta=delta)


def _accounted(plan: SumPlan, delta: float | None) -> tuple[float, Epsilon]:
    """Delta and epsilon of a plan that can be audited; checks both arguments."""
    _validate.instance(SumPlan, plan=plan)
    if not plan.noise_multiplier:
        raise ValueError(
            "plan must have noise to be audited, got noise_multiplier = "
            f"{plan.noise_multiplier!r}"
        )
    if isinstance(plan, CorrelatedPlan) and not isinstance(plan, O2NC):
        raise ValueError(
            "plan must make its own releases to be audited, got "
            f"{type(plan).__name__}, whose updates come from elsewhere"
        )
    epsilon = plan.epsilon(delta=delta)
    chosen = plan.delta if delta is None else delta
    assert chosen is not None  # Or there were no epsilon.
    return chosen, epsilon
