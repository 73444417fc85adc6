"""Checks of the accountants against each other, and against exact results."""

import functools
import math
from typing import Any

import attr
import dp_accounting as dp
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.special import ndtr
from scipy.stats import binom

from jaxdp.accounting import spending, subsets
from jaxdp.accounting.events import Guarantee
from jaxdp.accounting.gaussian import gaussian_epsilon, root
from jaxdp.accounting.subsets import PLDAccountant

_REPEATS = 3
# Few, because each order costs a sum; the first has a simple formula.
_ORDERS = [2, 4, 8, 16, 32, 64]


def self_check(guarantee: Guarantee) -> None:
    """Checks that the installed dp-accounting agrees with itself on a guarantee.

    For each kind of event in it:

    * One occurrence of a Gaussian or a Laplace, sampled or not, against its exact
      trade-off: PLD agrees to 1e-6, RDP is an upper bound, and RDP's order 2 agrees to
      1e-6 (for random subsets of one size, with the theorem's formula).
    * Three occurrences by count against a list of three: to 1e-6, but 1e-2 for PLD,
      which rounds up once more for each entry of a list.
    * What is repeated and selected from, by itself. (The formula of the selection is
      checked in the tests alone; here, only that its count is counted.)

    For a sequence of unsampled Gaussians, also the closed form against dp-accounting's.
    Extreme multipliers are first brought into a range where this takes milliseconds.
    Results are remembered.

    Raises:
      ValueError: no accountant supports the event under its relation.
      RuntimeError: they disagree, so that no number of theirs can be trusted.
    """
    event, relation = guarantee
    leaves = spending.leaves_of(event, relation)
    if not leaves or any(isinstance(e, dp.NonPrivateDpEvent) for e, _ in leaves):
        return
    accountant = spending.choose_accountant(leaves, relation)
    for leaf, _ in leaves:
        if isinstance(leaf, RepeatAndSelectDpEvent):
            self_check(Guarantee(leaf.event, relation))
        check = _check_leaf if spending.is_hashable(leaf) else _check_leaf.__wrapped__
        check(leaf, type(accountant), relation)
    if all(isinstance(leaf, dp.GaussianDpEvent) for leaf, _ in leaves):
        # Below 1e-2, dp-accounting takes the logarithm of zero.
        mu = min(max(spending.total_mu(leaves, relation), 1e-2), 100.0)
        theirs = dp.get_epsilon_gaussian(1 / mu, 1e-5)
        _agree("two closed forms", event, gaussian_epsilon(mu, 1e-5), theirs, 1e-9)


@functools.lru_cache(maxsize=256)
def _check_leaf(leaf: dp.DpEvent, kind: type, relation: dp.NeighboringRelation) -> None:
    subset = subsets.sampled(leaf)
    known = spending.as_gaussian(leaf) or spending.as_laplace(leaf) or subset
    if known and 0 not in known:
        moderate = _moderate(leaf)
        _check_pld(moderate, relation)
        if spending.supports(RdpAccountant(_ORDERS, relation), leaf):
            _check_rdp(moderate, relation)
        return

    rdp = functools.partial(kind, _ORDERS)
    make = rdp if issubclass(kind, RdpAccountant) else kind
    once, counted, listed = (
        make(relation).compose(e).get_epsilon(1e-5) for e in _repeats(leaf)
    )
    _agree(f"{spending.NAMES[kind]}, a count and a list", leaf, counted, listed, 1e-2)
    _require(once <= counted, "a count ignored", leaf, once, counted)


def _check_pld(leaf: dp.DpEvent, relation: dp.NeighboringRelation) -> None:
    interval, at = _grid(leaf, relation)
    once, counted, listed = (
        PLDAccountant(relation, interval).compose(e).get_delta(at)
        for e in _repeats(leaf)
    )
    exact = _exact_delta(leaf, relation, at)
    _agree("PLD and the exact trade-off", leaf, once, exact)
    _agree("PLD, a count and a list", leaf, counted, listed, 1e-2)
    _require(once < counted, "PLD, a count ignored", leaf, once, counted)


def _check_rdp(leaf: dp.DpEvent, relation: dp.NeighboringRelation) -> None:
    first, counted, listed = (
        RdpAccountant(_ORDERS, relation).compose(e) for e in _repeats(leaf)
    )
    _agree("RDP and its exact order 2", leaf, first.rdp[0], _order_2(leaf))
    _agree("RDP, a count and a list", leaf, counted.rdp[0], listed.rdp[0])
    _agree("RDP, a count ignored", leaf, counted.rdp[0], _REPEATS * first.rdp[0])
    _, at = _grid(leaf, relation)
    exact, bound = _exact_delta(leaf, relation, at), first.get_delta(at)
    _require(bound >= exact * (1 - 1e-6), "RDP below the truth", leaf, bound, exact)


def _order_2(leaf: dp.DpEvent) -> float:
    """Computes the Renyi divergence of order 2 of a (sampled) Gaussian or Laplace.

    For random subsets, the bound of Theorem 27 of Wang et al.
    """
    if subset := subsets.sampled(leaf):
        q, loss = subset[0], subset[1] ** -2
        worst = min(4 * math.expm1(loss), 2 * math.exp(loss))
        return math.log1p(q**2 * worst) if q < 1 else loss
    if laplace := spending.as_laplace(leaf):
        loss = 1 / laplace[1]
        return loss + math.log1p(math.expm1(-3 * loss) / 3)
    q, m = spending.as_gaussian(leaf) or (0.0, 1.0)
    return math.log1p(q**2 * math.expm1(m**-2))


def _grid(leaf: dp.DpEvent, relation: dp.NeighboringRelation) -> tuple[float, float]:
    """Returns a coarse interval for the loss grid, and an epsilon near one step's loss.

    On the grid PLD's discretisation is exact, so coarseness loses nothing.
    """
    interval = spending.loss_width(leaf, relation) / 500
    largest = spending.pure_epsilon(((leaf, 1),), relation)
    loss = min(spending.step_mu(leaf, relation), largest / 2)
    return interval, interval * math.ceil(loss / interval)


def _moderate(leaf: Any, most: float = 1e4) -> Any:
    """Clips an event's multiplier to [0.5, 1e4]: small tables, and losses not tiny.

    Nor do samples of less than a millionth make them so small that exp rounds to 1, or
    deltas as small as the tails that PLD cuts off.
    """
    if isinstance(leaf, dp.SampledWithoutReplacementDpEvent):
        size = min(leaf.source_dataset_size, 10**6 * leaf.sample_size)
        leaf = attr.evolve(leaf, source_dataset_size=size)
    if hasattr(leaf, "sampling_probability"):
        prob = max(leaf.sampling_probability, 1e-6)
        leaf = attr.evolve(leaf, sampling_probability=prob)
        most = min(most, 1e8 * prob)
    if hasattr(leaf, "event"):
        return attr.evolve(leaf, event=_moderate(leaf.event, most))
    multiplier = min(max(leaf.noise_multiplier, 0.5), most)
    return attr.evolve(leaf, noise_multiplier=multiplier)


def _repeats(leaf: dp.DpEvent) -> tuple[dp.DpEvent, dp.DpEvent, dp.DpEvent]:
    counted = dp.SelfComposedDpEvent(leaf, _REPEATS)
    return leaf, counted, dp.ComposedDpEvent([leaf] * _REPEATS)


def _agree(what: str, on: Any, a: float, b: float, tolerance: float = 1e-6) -> None:
    holds = a == b or abs(a - b) <= tolerance * max(a, b) + 1e-13
    _require(holds, what, on, a, b)


def _require(holds: bool, what: str, on: Any, a: float, b: float) -> None:
    if not holds:
        raise RuntimeError(
            f"the installed dp-accounting contradicts itself ({what}) on {on!r}: "
            f"{float(a)!r} against {float(b)!r}. Nothing that it accounts can be "
            "trusted; install the version that constraints.txt names"
        )


def _exact_delta(
    leaf: dp.DpEvent, relation: dp.NeighboringRelation, epsilon: float
) -> float:
    """Computes the exact delta of one occurrence, from its worst pairs of mixtures."""
    if laplace := spending.as_laplace(leaf):
        return _laplace_delta(*laplace, epsilon)
    if subset := subsets.sampled(leaf):
        return _mixture_delta(subset[0], 1 / subset[1], 0.0, epsilon)
    q, m = spending.as_gaussian(leaf) or (0.0, 1.0)
    # Where the record takes the sum in either data set, when it is drawn.
    pairs = [(1, 0), (0, -1)] if spending.distance(relation) == 1 else [(1, -1)]
    deltas = [_mixture_delta(q, a / m, b / m, epsilon) for a, b in pairs]
    if not isinstance(leaf, dp.TruncatedSubsampledGaussianDpEvent):
        return max(deltas)
    # With probability ``full`` the others fill the batch; then a record that is drawn
    # and ``kept`` pushes another one out.
    size, n = leaf.truncated_batch_size, leaf.dataset_size
    full = float(binom.sf(size - 1, n - 1, q))
    if full == 0:
        return max(deltas)
    kept = float(binom.sf(size, n, q)) * size / n / full
    pushed = _mixture_delta(kept, 2 / m, -2 / m, epsilon)
    return (1 - full) * max(deltas) + full * pushed


def _mixture_delta(q: float, a: float, b: float, epsilon: float) -> float:
    """Computes the delta of (1-q) N(0, 1) + q N(a, 1) against the same with b < a."""
    log_stay = math.log1p(-q) if q < 1 else -math.inf

    def log_density(x: float, shift: float) -> float:
        """Returns the log density of a mixture relative to N(0, 1)."""
        return float(np.logaddexp(log_stay, math.log(q) + shift * (x - shift / 2)))

    def excess_loss(x: float) -> float:
        return log_density(x, a) - log_density(x, b) - epsilon

    # The loss increases with x: where it exceeds epsilon is a half-line.
    far = 40 + a - b
    if excess_loss(far) <= 0:
        return 0.0
    x = root(excess_loss, -far, far) if excess_loss(-far) < 0 else -far
    upper, lower = ((1 - q) * ndtr(-x) + q * ndtr(shift - x) for shift in (a, b))
    return max(float(upper - math.exp(epsilon) * lower), 0.0)


def _laplace_delta(q: float, scale: float, epsilon: float) -> float:
    """Computes the delta of a Laplace at distance 1, sampled with probability q."""
    # P' - e**epsilon P with P' = (1-q) P + q Q is q (Q - e**a P).
    a = math.log1p(math.expm1(epsilon) / q)
    if abs(a) >= 1 / scale:
        return q * max(-math.expm1(a), 0.0)
    return -q * math.expm1((a - 1 / scale) / 2)
