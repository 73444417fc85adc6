r"""Random search over hyper-parameters, with its privacy cost accounted.

The best of k private runs is not as private as one: that it is the best tells about the
others. If k is a constant, little better than charging all k runs is known. If k is
*random*, of a law whose tail falls geometrically and which is kept secret, the best run
costs about two to three times one run, whatever k turns out to be. This is what
:func:`tune` does: k from a truncated negative binomial law, each run an independent
trial, only the best one out.

.. math::
  P[k] \propto (1-\gamma)^k \prod_{l=1}^{k-1} \frac{l + \eta}{l + 1}, \qquad k \ge 1

with :math:`\eta` the ``shape``, and :math:`\gamma` such that the mean is ``mean_trials``.
(The Poisson law, which the paper also has, may run nothing at all and is not offered.)

References:
  Papernot & Steinke, `Hyperparameter Tuning with Renyi Differential Privacy
  <https://arxiv.org/abs/2110.03620>`_, 2022, Definition 1 and Theorem 2.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from jaxdp import accounting, training
from jaxdp.core import display, noise, validate
from jaxdp.core import keys as keys_lib
from jaxdp.core.types import PathPredicate, ValueFn
from jaxdp.mechanism.sum_plan import SumPlan
from jaxdp.sampling import batches
from jaxdp.training import loop, parallel, preparing, reporting
from jaxdp.training.budgets import Budget

__all__ = ["Candidate", "TuneResult", "calibrate", "tune"]

_Plan = TypeVar("_Plan", bound=SumPlan)

#: A plan with noise, and the optimizer that ``fit`` runs after it: None only of plans that
#: make the steps themselves.
Candidate = tuple[SumPlan, optax.GradientTransformation | None]


class TuneResult(NamedTuple):
    """Result of ``tune``, of the best trial alone. Public.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> base = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... )
      >>> plan = jaxdp.tuning.calibrate(base, epsilon=2.0, delta=1e-2, mean_trials=2.0)
      >>> found = jaxdp.tune(
      ...     [(plan, optax.sgd(0.01)), (plan, optax.sgd(0.1))], jaxdp.Keys.insecure(0),
      ...     jnp.zeros(2), jnp.ones((8, 2)), mean_trials=2.0,
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1),
      ...     score_fn=lambda result: float(-((result.params - 1) ** 2).sum()),
      ... )
      >>> found.params.shape, found.report["num_candidates"]
      ((2,), 2)
    """

    params: Any
    info: training.FitInfo
    candidate: int  # index of its candidate
    report: dict[str, Any]

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        result = self.params, self.info, self.report
        shown = loop.result_table("TuneResult", *result)
        return shown._replace(rows=[("candidate", f"{self.candidate}"), *shown.rows])


def tune(
    candidates: Sequence[Candidate],
    keys: keys_lib.Keys,
    params: Any,
    data: Any,
    *,
    value_fn: ValueFn,
    score_fn: Callable[[training.FitResult], float],
    mean_trials: float,
    shape: float = 1.0,
    delta: float | None = None,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    check_isolation: bool = True,
    budget: Budget | None = None,
) -> TuneResult:
    """Runs a random number of random candidates and returns the best run.

    Each trial takes one of the candidates, all equally likely, and runs ``fit`` with keys
    of its own. :func:`calibrate` makes plans whose search costs a given epsilon.

    Args:
      candidates: pairs (plan, optimizer). The plans have one event, relation and delta,
        so that every trial costs the same: they may differ in clip, smoothing radius and
        directions, the optimizers in anything.
      keys: a ``jaxdp.Keys``; keys from entropy serve one search, and no run beside it.
      params: initial parameters; they must not depend on the data.
      data: pytree of arrays with ``plan.num_examples`` rows.
      value_fn: ``value_fn(params, batch) -> losses (B,)`` or a ``jaxdp.LazyLoss``.
      score_fn: ``score_fn(result: FitResult) -> float``, higher is better; NaN is worst.
        It may read the result and *public* data, nothing else: no private record, for
        that would be a release which no plan charges, and no earlier trial. What it
        raises leaves the search.
      mean_trials: mean of the number of trials, > 1. The number itself is secret. At
        ``shape=1`` it passes 14 times the mean once in a million searches.
      shape: in [0, 1]. 1 is the geometric law; 0, the logarithmic one, costs less epsilon
        at the same mean, and makes a single trial likelier.
      delta: at which epsilon is charged; default is the plans'.
      trainable: which leaves move, as in ``fit``.
      stacked: as in ``fit``.
      microbatch_size: records evaluated at once.
      check_isolation: as in ``fit``; before the search too.
      budget: as in ``fit``: the whole search is reserved before its first trial.

    Returns:
      ``TuneResult(params, info, candidate, report)`` of the best trial, the first of equal
      ones. ``report`` is that run's, with ``epsilon`` the whole search's,
      ``base_epsilon`` one trial's, and without times.

    Privacy:
      The result is one draw of the repeat-and-select mechanism, accounted by RDP. The
      number of trials and what the others gave are in no report. But the running time
      grows with the number of trials: who can time the search, or sees the machine's
      load, memory or logs, learns what was not charged.

    Raises:
      TypeError, ValueError: wrong arguments, named, before anything is compiled or spent;
        plans that do not cost the same; a sampler whose event RDP cannot account.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> base = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... )
      >>> plan = jaxdp.tuning.calibrate(base, epsilon=2.0, delta=1e-2, mean_trials=2.0)
      >>> found = jaxdp.tune(
      ...     [(plan, optax.sgd(0.01)), (plan, optax.sgd(0.1))], jaxdp.Keys.insecure(0),
      ...     jnp.zeros(2), jnp.ones((8, 2)), mean_trials=2.0,
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1),
      ...     score_fn=lambda result: float(-((result.params - 1) ** 2).sum()),
      ... )
      >>> found.candidate in (0, 1), found.report["epsilon"] <= 2.0
      (True, True)
    """
    candidates = _checked_candidates(candidates)
    keys = keys_lib.check(keys)
    _check_law(mean_trials, shape)
    parallel.refuse_set_mesh()
    validate.instance(bool, check_isolation=check_isolation)
    validate.is_callable(value_fn=value_fn, score_fn=score_fn)
    if microbatch_size is not None:
        validate.integer(microbatch_size=microbatch_size)
    plan = candidates[0][0]
    delta = plan.delta if delta is None else delta
    if delta is None:
        raise ValueError("delta must be a number in (0, 1); the plans have none")
    every = [plan for plan, _ in candidates]
    # The plans are of one event, but for what the samplers of their noise cost.
    plan = max(every, key=lambda p: accounting.sampler_error(p.event))
    base = plan.epsilon(delta=delta)
    spent, search = base, accounting.Guarantee(plan.event, plan.event_relation)
    if math.isfinite(base):
        search = _search(plan, mean_trials, shape)(plan.noise_multiplier or 0.0)
        spent = accounting.epsilon(*search, delta)
    options = {"trainable": trainable, "microbatch_size": microbatch_size}
    options |= {} if stacked is None else {"stacked": stacked}
    keys_lib.check_unspent(keys, "tune")
    for candidate in candidates:
        _trace(candidate, params, data, value_fn, options)
    # All have the same loss.
    reading = [plan for plan, *_ in candidates if plan.evaluates_batches]
    for one in reading[:1]:
        preparing.check_losses(one, params, data, value_fn, check_isolation)
    if budget is not None:
        validate.instance(Budget, budget=budget)
        budget.reserve(
            search,
            what="tune",
            delta=delta,
            relation=plan.relation,
            unit=preparing.unit_of(data),
        )
    keys_lib.spend(keys, "tune")

    def run(index: int, own: keys_lib.Keys) -> training.FitResult:
        plan, optimizer = candidates[index]
        return training.fit(
            plan,
            own,
            params,
            data,
            value_fn=value_fn,
            optimizer=optimizer,
            check_isolation=check_isolation,  # Of each program that is compiled.
            **options,
        )

    num = len(candidates)
    index, result = _best(run, score_fn, keys, _coins(keys), num, mean_trials, shape)
    finite = math.isfinite(spent)
    report = result.report | {
        "epsilon": float(spent) if finite else None,
        "base_epsilon": float(base) if finite else None,
        "delta": delta,
        "accountant": f"{spent.accountant} (repeat and select)",
        "private": result.report["private"] and finite,
        "num_candidates": num,
        "mean_trials": float(mean_trials),
        "shape": float(shape),
    }
    # Whether a program was already compiled tells how often its candidate was tried.
    timeless = {k: v for k, v in report.items() if k not in reporting.TIMING}
    return TuneResult(result.params, result.info, index, timeless)


def calibrate(
    plan: _Plan, *, epsilon: float, delta: float, mean_trials: float, shape: float = 1.0
) -> _Plan:
    """Returns the plan of least noise whose *search* is (epsilon, delta)-private.

    One run of that plan alone is more private than this. Plans that differ only in clip,
    smoothing radius and directions get the same noise multiplier: calibrate one and
    ``dataclasses.replace`` the rest, or calibrate all.

    Args:
      plan: what a trial runs; its noise is ignored.
      epsilon: > 0, of :func:`tune` with this ``mean_trials`` and ``shape``.
      delta: in (0, 1).
      mean_trials: > 1.
      shape: in [0, 1].

    Raises:
      ValueError: an argument is out of range, or the plan's event is one that RDP cannot
        account.

    Example:
      >>> import jaxdp
      >>> base = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... )
      >>> plan = jaxdp.tuning.calibrate(base, epsilon=2.0, delta=1e-2, mean_trials=2.0)
      >>> bool(plan.epsilon() < 2.0)  # one trial alone
      True
    """
    validate.instance(SumPlan, plan=plan)
    validate.positive(epsilon=epsilon)
    validate.probability(delta=delta)
    accounting.warn_of_budget(epsilon, delta, plan.num_examples)
    _check_law(mean_trials, shape)
    if math.isinf(plan.l2_clip_norm):
        raise ValueError("l2_clip_norm must be finite to calibrate noise, got inf")
    search = _search(plan, mean_trials, shape)
    least = accounting.calibrate_noise_multiplier(search, epsilon, delta)
    return plan.with_noise(noise_multiplier=least, delta=delta)


def _checked_candidates(candidates: Any) -> list[Candidate]:
    """Returns the candidates as a list; raises unless every trial costs the same."""
    try:
        pairs = [(plan, optimizer) for plan, optimizer in candidates]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"candidates must be pairs (plan, optimizer), got {candidates!r}"
        ) from error
    if not pairs:
        raise ValueError("candidates must be at least one pair (plan, optimizer)")
    for plan, optimizer in pairs:
        validate.instance(SumPlan, plan=plan)
        preparing.check_optimizer(plan, optimizer)
    first = pairs[0][0]
    for name in ("event", "event_relation", "relation", "delta"):
        for i, (plan, _) in enumerate(pairs):
            mine, theirs = getattr(first, name), getattr(plan, name)
            if mine != theirs:
                raise ValueError(
                    "candidates must have plans that cost the same: candidates[0] has "
                    f"the {name} {mine!r}, candidates[{i}] has {theirs!r}"
                )
    return pairs


def _check_law(mean_trials: float, shape: float) -> None:
    validate.positive(mean_trials=mean_trials)
    validate.non_negative(shape=shape)
    if not 1 < mean_trials <= 1e6:
        raise ValueError(
            f"mean_trials must be a number > 1 and <= 1e6, got {mean_trials!r}"
        )
    if not shape <= 1:
        raise ValueError(f"shape must be a number in [0, 1], got {shape!r}")


def _search(
    plan: SumPlan, mean_trials: float, shape: float
) -> Callable[[float], accounting.Guarantee]:
    """Returns a function from a noise multiplier to the guarantee of a search over runs."""

    def guarantee(noise_multiplier: float) -> accounting.Guarantee:
        one = plan._guarantee_of(noise_multiplier, plan.num_steps)
        return accounting.repeat_and_select(one, mean=mean_trials, shape=shape)

    try:
        accounting.epsilon(*guarantee(1.0), 0.5)
    except ValueError as error:
        raise ValueError(
            "sampling must be one whose event RDP accounts, for nothing else accounts a "
            "search: FullBatch, SinglePass, ShuffledEpochs, FixedSize, or TruncatedPoisson "
            "with max_batch_size = num_examples and not under 'replace_one'; got "
            f"{plan.sampling!r} under {plan.relation!r} with {plan.noise} noise"
        ) from error
    return guarantee


def _trace(
    candidate: Candidate,
    params: Any,
    data: Any,
    value_fn: ValueFn,
    options: dict[str, Any],
) -> None:
    """Traces one step from shapes alone, to find mistakes before the search."""
    plan, optimizer = candidate
    batches.check_data(plan.run, data)
    plan = dataclasses.replace(plan, num_steps=1)
    optimizer = optax.identity() if optimizer is None else optimizer
    keys = keys_lib.Keys.insecure(0)
    preparing.check_reads_losses(plan)
    transform = plan.transform(keys, **options)
    program = training.make_program(plan, transform, optimizer, value_fn)

    def step(params: Any, data: Any) -> Any:
        carry = training.start(plan, transform, optimizer, params)
        return program(carry, keys, data, 0, 1)

    jax.eval_shape(step, params, data)


def _coins(keys: keys_lib.Keys) -> noise.Coins:
    """Returns the coins of a search: how many trials there are, and of which candidates."""
    return noise.Coins(keys_lib.exact_noise_secret(keys), "tune")


def _best(
    run: Callable[[int, keys_lib.Keys], Any],
    score_fn: Callable[[Any], float],
    keys: keys_lib.Keys,
    coins: noise.Coins,
    num_candidates: int,
    mean_trials: float,
    shape: float,
) -> tuple[int, Any]:
    """Runs a random number of trials; returns the best one's candidate and result.

    The trials are exchangeable, so that to take the first of equal scores is to take any.
    """
    best: list[tuple[float, int, Any]] = []
    for trial in range(_num_trials(coins, mean_trials, shape)):
        index = coins.below(num_candidates)
        # A trial that loses says nothing: neither that it was made, nor what it gave. Nor
        # does the winner: what its program warns of tells whether it was compiled before.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run(index, keys_lib.trial(keys, trial))
            score = _number(score_fn(result))
        score = -math.inf if math.isnan(score) else score
        if not best or score > best[0][0]:
            best = [(score, index, result)]
    return best[0][1:]


def _number(score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError, OverflowError):  # Which may quote it: of any trial.
        raise TypeError(
            f"score_fn must return a number, got one of type {type(score).__name__}"
        ) from None


def _num_trials(coins: noise.Coins, mean: float, shape: float) -> int:
    """Draws the number of trials from its law, exact for the rational gamma used.

    A walk that stops at each k with probability gamma would be geometric. Here it also
    starts anew, on the way from k to k + 1, unless a coin of (k + shape) / (k + 1) says
    to go on: so the weight of k is (1-gamma)**k times the product of these.
    """
    gamma, eta = Fraction(_gamma(mean, shape)), Fraction(shape)
    k = 1
    while not _coin(coins, gamma):
        k = k + 1 if _coin(coins, (k + eta) / (k + 1)) else 1
    return k


def _coin(coins: noise.Coins, probability: Fraction) -> bool:
    return coins.below(probability.denominator) < probability.numerator


def _gamma(mean: float, shape: float) -> float:
    """Computes the gamma of a mean, rounded so that the mean is never larger."""

    def mean_at(x: float) -> float:  # x = log(1 / gamma)
        if shape == 0:
            return math.expm1(x) / x
        return shape * math.expm1(x) / -math.expm1(-shape * x)

    low, high = 0.0, 2 * math.log(mean) + 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_at(middle) <= mean else (low, middle)
    return math.exp(-low)


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted(__all__)
