"""Audit of a plan: data sets, attacks and bounds put together."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxdp.accounting import Epsilon
from jaxdp.auditing import bounds, cases, draws, vertices
from jaxdp.auditing.units import Unit
from jaxdp.core import display, validate
from jaxdp.mechanism.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """Lower bound on the epsilon that a plan's code has, beside the accounted one.

    Attributes:
      epsilon_lower: lower bound on the epsilon that the code has at ``delta``.
      epsilon: what the plan accounts at ``delta``.
      delta: of both.
      failure_prob: with at most this probability the bound is above the truth.
      method: the attack, and the rule that makes an epsilon of its errors.
      num_runs: simulated runs on each data set.
      num_tested: those of them that the bound counts: the others chose the attack.
      unit: what the two data sets differ in, ``"record"`` or ``"user"``.
    """

    epsilon_lower: float
    epsilon: float
    delta: float
    failure_prob: float
    method: str
    num_runs: int
    num_tested: int
    unit: str = "record"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult(Bound):
    """Result of an audit: lower bound on epsilon, accounted epsilon, attack, error rates.

    Attributes:
      canary: the record or user by which the two data sets differ.
      num_steps: T of every run.
      false_positive_rate: its upper limit, for the attack.
      false_negative_rate: its upper limit, for the attack.

    Example:
      >>> import jaxdp
      >>> result = jaxdp.auditing.AuditResult(
      ...     epsilon_lower=1.7, epsilon=2.0, delta=1e-5, failure_prob=1e-6,
      ...     method="made up", num_runs=1000, num_tested=500, canary="a large record",
      ...     num_steps=2, false_positive_rate=0.01, false_negative_rate=0.8,
      ... )
      >>> result.passed
      True
    """

    canary: str
    num_steps: int
    false_positive_rate: float
    false_negative_rate: float

    @property
    def passed(self) -> bool:
        """True if the lower bound is at most the accounted epsilon."""
        return self.epsilon_lower <= self.epsilon

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return display.fields(self, title_of(self))


def title_of(found: Any) -> str:
    """Returns the title of an audit's display: whether it passed, and both epsilons."""
    return (
        f"{type(found).__name__}: {'passed' if found.passed else 'FAILED'}, lower bound "
        f"{found.epsilon_lower:.4g} of an accounted epsilon {found.epsilon:.4g}"
    )


def audit(
    plan: Plan,
    *,
    num_runs: int = 100_000,
    delta: float | None = None,
    failure_prob: float = 1e-6,
    seed: int = 0,
    unit: str = "record",
) -> AuditResult:
    """Bounds from below the epsilon of what a plan's transformation really does.

    Which canary, which attack and which threshold, is decided on some of the runs; the
    errors of that one attack on the others are bounded by Clopper and Pearson. Where the
    plan accounts for unsampled Gaussians, the errors become an epsilon through the
    trade-off of two Gaussians, which at epsilon 2 reaches 87% of the truth with the
    default number of runs and 93% with 250000; else by the definition of (epsilon, delta),
    which reaches about half, and never more than ``log(num_runs / 25)`` or so. So audit
    plans with an epsilon of 1 to 5.

    Of ``plans.O2NC`` all increments are attacked, with the norms that are logged; the
    canary of the result says in which leaf of a period it was read, if not in every step.
    Of ``plans.Saddle``, ``ConvexSimplex``, ``FrankWolfe`` and ``SyntheticData`` all
    vertices that a run releases are, which are claimed to be zCDP: an epsilon follows from
    the least rho that allows the errors, and reaches about two thirds. Their sampler is
    also enumerated, in one draw of the worst case (:mod:`jaxdp.auditing.draws`): where that
    breaks what one draw claims, it is the result, of delta 0.

    Of ``plans.SOSP`` a short run is attacked,
    whatever the plan's sizes (:mod:`jaxdp.auditing.short_run`); the canary of the result
    says in which role a record was read.

    Laplace noise takes 15 to 30 microseconds of the host for each of the ``num_runs *
    num_steps * num_directions`` numbers; sampled records, time for each of the data set.
    So audit few steps (:func:`shortened`).

    Args:
      plan: one that builds a transformation, with noise; or one that draws vertices and
        releases them all, with the certified sampler and step sizes.
      num_runs: simulated runs on each data set, >= 1000.
      delta: default the plan's own; 0 for a pure guarantee.
      failure_prob: in (0, 1): of the bound being above the true epsilon.
      seed: in [0, 2**32); an audit is a function of it.
      unit: ``"record"``, or ``"user"``: rows are then users (:func:`jaxdp.by_user`), and
        the loss that of :func:`jaxdp.per_user`. The data sets differ in a user who has more
        records than are kept, all of which saturate the clip. In the other one the user
        has a single record, its negative, or by another relation none.

    Raises:
      TypeError, ValueError: an argument is out of range, or a plan that says nothing of
        data, promises nothing, or whose releases are elsewhere.
      RuntimeError: what is simulated is not what the plan's transformation does.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=100, num_steps=2, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> result = jaxdp.auditing.audit(plan, num_runs=2000)
      >>> 0 < result.epsilon_lower <= result.epsilon
      True
    """
    validate.integer(at_least=1000, at_most=2**31, num_runs=num_runs)
    validate.probability(failure_prob=failure_prob)
    validate.integer(at_least=0, at_most=2**32 - 1, seed=seed)
    delta, accounted = _accounted(plan, delta)
    case, lifted = cases.case_of(plan), cases.unit_named(plan, unit)
    if case.draws:
        most, num_draws = vertices.MOST_DRAWS, getattr(plan, "num_draws", 0)
        if plan.released == "vertices" and num_draws > most:
            raise ValueError(
                f"plan must have num_draws <= {most} to be audited, whose vertices are all "
                f"released, got {num_draws}; shorten it"
            )
        enumerated = _enumerated(plan)
        if not enumerated.passed:
            return enumerated
    rule = cases.rule_of(plan, delta, accounted, failure_prob)
    plan = case.prepared(plan)
    found = bounds.tested(_attempts(case, plan, lifted, num_runs, seed, rule), rule)
    return result_of(
        found, rule, accounted, delta, num_runs, num_steps=plan.num_steps, unit=unit
    )


def result_of(
    found: bounds.Tested,
    rule: bounds.Rule,
    accounted: float,
    delta: float,
    num_runs: int,
    *,
    num_steps: int = 1,
    unit: str = "record",
) -> AuditResult:
    """Returns the result of an attack that was tested, beside what is accounted."""
    return AuditResult(
        epsilon_lower=found.epsilon_lower,
        epsilon=float(accounted),
        delta=delta,
        failure_prob=rule.failure_prob,
        method=f"{found.attempt.attack}, {found.how}",
        canary=found.attempt.canary,
        num_runs=num_runs,
        num_tested=len(found.attempt.first),
        unit=unit,
        num_steps=num_steps,
        false_positive_rate=found.false_positive,
        false_negative_rate=found.false_negative,
    )


def _attempts(
    case: cases.AuditCase,
    plan: Any,
    unit: Unit,
    num_runs: int,
    seed: int,
    rule: bounds.Rule,
) -> Iterator[bounds.Attempt]:
    learn = choose = int(case.learn * num_runs)
    canaries = [canary.of(unit) for canary in case.canaries(plan)]
    data = list(dict.fromkeys(d for c in canaries for d in (c.first, c.second)))
    made = case.transcripts(plan, data, num_runs, seed)
    transcripts = dict(zip(data, made, strict=True))
    for canary in canaries:
        first, second = transcripts[canary.first], transcripts[canary.second]
        learned = case.attacks(plan, canary, first[:learn], second[:learn])
        for name, score in learned.items():
            scores = score(first[learn:]), score(second[learn:])
            yield bounds.attempt(name, canary.name, scores, choose, rule)


def _enumerated(plan: Any) -> AuditResult:
    """Returns the audit result of the sampler's enumerated law, in one worst-case draw."""
    found, claimed = draws.audited(plan)
    return AuditResult(
        epsilon_lower=found,
        epsilon=claimed,
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
    steps what the plan spends in all.

    * One of ``plans.O2NC`` gets shorter periods, so that there are two, and no more
      records than they read, or than are simulated quickly.
    * One that draws vertices gets longer steps, two at least, and where it has more than
      are simulated quickly, fewer vertices, draws a step and records in a full batch.
    * One of ``plans.SOSP`` gets periods and escapes of at most so many steps, and keeps
      its noise: its epsilon does not depend on how long a run is.

    Args:
      plan: as in :func:`audit`.
      num_steps: >= 1; a plan that has no more steps, vertices and so on than it would
        get is returned as it is.
      delta: at which the epsilons are equal; default the plan's own.

    Raises:
      TypeError, ValueError: as :func:`audit`.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=100, num_steps=1000, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> short = jaxdp.auditing.shortened(plan, num_steps=4)
      >>> short.num_steps, short.noise_multiplier < plan.noise_multiplier
      (4, True)
      >>> round(short.epsilon(delta=1e-5), 2)
      2.0
    """
    validate.integer(num_steps=num_steps)
    delta, accounted = _accounted(plan, delta)
    case = cases.case_of(plan)
    fewer = case.shortened(plan, num_steps)
    if fewer is plan or case.keeps_noise:
        return fewer
    return fewer.calibrate(epsilon=accounted, delta=delta)


def _accounted(plan: Any, delta: float | None) -> tuple[float, Epsilon]:
    """Returns delta and epsilon of a plan whose runs can be audited; checks both."""
    refused = cases.case_of(plan).refused(plan)
    if refused:
        raise ValueError(f"plan must {refused}")
    return cases.accounted(plan, delta)
