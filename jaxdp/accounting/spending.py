"""The (epsilon, delta) of an event, and which accountant computes it."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from jaxdp.accounting import lattice, subsets
from jaxdp.accounting.basics import Epsilon
from jaxdp.accounting.events import PureZCDpEvent
from jaxdp.accounting.gaussian import gaussian_delta, gaussian_epsilon
from jaxdp.accounting.subsets import PLDAccountant
from jaxdp.core import validate

#: Basic events, and how often each occurs.
Leaves = tuple[tuple[dp.DpEvent, int], ...]

#: Orders for zCDP, whose Renyi divergences cost nothing to compute: those of
#: dp-accounting, which jump from 63 to 128 and so on, and many between and beyond them.
ZCDP_ORDERS = np.unique(
    np.concatenate(
        [
            RdpAccountant().orders,
            1 + np.logspace(-3, 0, 60),
            np.linspace(2.05, 64, 400),
            np.geomspace(65, 1e6, 350),
        ]
    )
).tolist()

#: Deltas below which RDP is asked, too: PLD cuts tails of about 1e-15 off its tables.
_TAILS = 1e-12
#: Largest pure epsilon of a step of Laplace noise that PLD's tables have: exp of it, too.
_MOST_LAPLACE = 700


class SelectionAccountant(RdpAccountant):
    """RDP accountant that takes one run's exact delta where a Poisson number is made.

    Theorem 6 of Papernot and Steinke adds to the Renyi divergence of one run that is
    (epsilon, delta)-private, at order a and epsilon = log(1 + 1 / (a - 1)),

        mean * delta + log(mean) / (a - 1).

    dp-accounting has delta from the run's Renyi divergences, which is larger.
    """

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        poisson = isinstance(event, RepeatAndSelectDpEvent) and event.shape == math.inf
        if not (poisson and do_compose) or not is_hashable(event):
            return super()._maybe_compose(event, count, do_compose)
        relation, orders = self.neighboring_relation, np.asarray(self.orders)
        _, mu, exact = account(event.event, relation)
        if exact is None and mu == math.inf:
            return super()._maybe_compose(event, count, do_compose)
        curve = exact.get_delta if exact else functools.partial(gaussian_delta, mu)
        above = orders > 1
        more = np.full(len(orders), math.inf)
        each = 1 / (orders[above] - 1)
        deltas = np.array([float(curve(x)) for x in np.log1p(each)])
        more[above] = event.mean * deltas + math.log(event.mean) * each
        one, theirs = (
            RdpAccountant(orders.tolist(), relation).compose(composed).rdp
            for composed in (event.event, event)
        )
        self._rdp = self._rdp + count * np.minimum(one + more, theirs)
        return None


#: What :class:`Epsilon` calls the accountants.
NAMES = {PLDAccountant: "PLD", RdpAccountant: "RDP", SelectionAccountant: "RDP"}


def epsilon(
    event: dp.DpEvent, event_relation: dp.NeighboringRelation, delta: float
) -> Epsilon:
    """Returns the least epsilon known to hold at ``delta``: ``epsilon(*guarantee, delta)``.

    Args:
      event: any dp-accounting event.
      event_relation: the relation that it is stated under.
      delta: in (0, 1), or 0 where all noise is Laplace or all releases are draws. PLD's
        tables stop at tails of about 1e-15 and answer infinity where ``delta`` is below
        them; RDP is asked, too, where it supports the event.

    Returns:
      An :class:`Epsilon`; infinite without noise.

    Raises:
      ValueError: no accountant supports the event under that relation, or ``delta`` is 0
        and some noise has no pure guarantee.
    """
    leaves = leaves_of(event, event_relation)
    sampler, missed = lattice.sampler_error(event)
    if missed:
        if delta <= missed:
            validate.probability(delta=delta)
            return Epsilon(math.inf, account(event, event_relation)[0])
        left = (delta - missed) * math.exp(-sampler)
        spent = epsilon(lattice.ideal(event), event_relation, left)
        return Epsilon(spent + sampler, spent.accountant)
    pure = Epsilon(pure_epsilon(leaves, event_relation), "pure composition")
    no_noise = any(isinstance(leaf, dp.NonPrivateDpEvent) for leaf, _ in leaves)
    if delta == 0 and pure < math.inf:
        return pure
    if not (delta == 0 and no_noise):
        validate.probability(delta=delta)
    name, mu, accountant = account(event, event_relation)
    if accountant is None:
        spent = math.inf if mu == math.inf else gaussian_epsilon(mu, delta)
        return min(Epsilon(spent, name), pure)
    spent = min(Epsilon(accountant.get_epsilon(delta), name), pure)
    if delta < _TAILS and (other := _far_out(leaves, event_relation)):
        spent = min(spent, Epsilon(other.get_epsilon(delta), NAMES[type(other)]))
    return spent


def delta(
    event: dp.DpEvent, event_relation: dp.NeighboringRelation, epsilon: float
) -> float:
    """Returns the least delta known to hold at ``epsilon``: the reverse of :func:`epsilon`.

    ``epsilon`` is >= 0, finite.
    """
    validate.non_negative(epsilon=epsilon)
    sampler, missed = lattice.sampler_error(event)
    if missed:
        if epsilon < sampler:
            return 1.0
        ideal = lattice.ideal(event)
        left = delta(ideal, event_relation, epsilon - sampler)
        return min(left * math.exp(sampler) + missed, 1.0)
    leaves = leaves_of(event, event_relation)
    if pure_epsilon(leaves, event_relation) <= epsilon:
        return 0.0
    _, mu, accountant = account(event, event_relation)
    if accountant is None:
        return gaussian_delta(mu, epsilon)
    missing = min(float(accountant.get_delta(epsilon)), 1.0)
    if missing < _TAILS and (other := _far_out(leaves, event_relation)):
        missing = min(missing, float(other.get_delta(epsilon)))
    return missing


def estimated_epsilon(
    event: dp.DpEvent,
    event_relation: dp.NeighboringRelation,
    delta: float,
    coarser: Sequence[int],
) -> float:
    """Estimates what PLD's :func:`epsilon` will be, in much less time; no bound on it.

    PLD's answer is even in the interval of its grid. So answers at some multiples of the
    interval tell the answer at the interval itself, by the polynomial through them.

    Args:
      event: as of :func:`epsilon`, and so are relation and delta.
      event_relation: see there.
      delta: see there.
      coarser: multiples of the interval, different and above 1.

    Returns:
      NaN where PLD does not account the event, or nothing can be told.
    """
    sampler, missed = lattice.sampler_error(event)
    left = (delta - missed) * math.exp(-sampler)
    if left <= 0:
        return math.inf if missed else math.nan
    leaves = leaves_of(lattice.ideal(event), event_relation)
    plain = all(isinstance(leaf, dp.GaussianDpEvent) for leaf, _ in leaves)
    if plain or any(isinstance(leaf, dp.NonPrivateDpEvent) for leaf, _ in leaves):
        return math.nan
    found = 0.0
    for each in coarser:
        accountant = choose_accountant(leaves, event_relation, each)
        if not isinstance(accountant, PLDAccountant):
            return math.nan
        for leaf, count in leaves:
            accountant.compose(leaf, count)
        others = [other for other in coarser if other != each]
        weight = math.prod((1 - x**2) / (each**2 - x**2) for x in others)
        found += weight * accountant.get_epsilon(left)
    return found + sampler


def pure_epsilon(leaves: Leaves, relation: dp.NeighboringRelation) -> float:
    """Adds up the epsilon at delta = 0; infinite if a step has none that is known."""
    return math.fsum(count * _pure_step(leaf, relation) for leaf, count in leaves)


def _pure_step(leaf: dp.DpEvent, relation: dp.NeighboringRelation) -> float:
    if isinstance(leaf, PureZCDpEvent):
        return leaf.pure_epsilon
    q, scale = as_laplace(leaf) or (1.0, 0.0)
    if scale == 0 or distance(relation) == 2:  # No bound is claimed for 2C.
        return math.inf
    # log(1 + q (exp(1 / scale) - 1)), which must not overflow.
    return 1 / scale + math.log1p((1 - q) * math.expm1(-1 / scale))


def account(
    event: dp.DpEvent, relation: dp.NeighboringRelation
) -> tuple[str, float, dp.PrivacyAccountant | None]:
    """Returns the accountant's name, the mu of a closed form, and the composed accountant.

    The mu is NaN with an accountant; without one the accountant is None. An infinite mu
    says that no more is known than what :func:`pure_epsilon` says.
    """
    leaves = leaves_of(event, relation)
    if any(isinstance(leaf, dp.NonPrivateDpEvent) for leaf, _ in leaves):
        return "no noise", math.inf, None
    if all(isinstance(leaf, dp.GaussianDpEvent) for leaf, _ in leaves):
        return "Gaussian closed form", total_mu(leaves, relation), None
    compose = _composed if is_hashable(leaves) else _composed.__wrapped__
    # Of next to no noise: PLD's table has exp(loss) of a step.
    laplace = [of for leaf, _ in leaves if (of := as_laplace(leaf))]
    if any(_MOST_LAPLACE * scale < 1 for _, scale in laplace):
        return NAMES[PLDAccountant], math.inf, None
    try:
        accountant = compose(leaves, relation)
    except OverflowError:
        return NAMES[PLDAccountant], math.inf, None
    return NAMES[type(accountant)], math.nan, accountant


def leaves_of(event: Any, relation: Any) -> Leaves:
    """Returns the basic events of nested compositions, equal ones counted together.

    An accountant composes a count much faster than a list.
    """
    validate.instance(dp.DpEvent, event=event)
    validate.instance(dp.NeighboringRelation, event_relation=relation)
    found: dict[str, tuple[dp.DpEvent, int]] = {}

    def walk(event: dp.DpEvent, count: int) -> None:
        if isinstance(event, dp.SelfComposedDpEvent):
            walk(event.event, count * event.count)
        elif isinstance(event, dp.ComposedDpEvent):
            for part in event.events:
                walk(part, count)
        elif count > 0 and not isinstance(event, dp.NoOpDpEvent):
            _, before = found.get(repr(event), (event, 0))
            found[repr(event)] = (event, before + count)

    walk(event, 1)
    return tuple(found.values())


def is_hashable(value: Any) -> bool:
    """Returns True if results about an event can be cached; some events hold lists."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=8)
def _composed(leaves: Leaves, relation: dp.NeighboringRelation) -> dp.PrivacyAccountant:
    accountant = choose_accountant(leaves, relation)
    for leaf, count in leaves:
        accountant.compose(leaf, count)
    return accountant


def _far_out(
    leaves: Leaves, relation: dp.NeighboringRelation
) -> dp.PrivacyAccountant | None:
    """Returns a composed RDP accountant for the tails that PLD cuts off, or None."""
    accountant = RdpAccountant(neighboring_relation=relation)
    if not all(supports(accountant, leaf) for leaf, _ in leaves):
        return None
    for leaf, count in leaves:
        accountant.compose(leaf, count)
    return accountant


def choose_accountant(
    leaves: Leaves, relation: dp.NeighboringRelation, coarser: float = 1
) -> dp.PrivacyAccountant:
    """Returns a fresh accountant that supports all of the leaves.

    PLD's grid is ``coarser`` than it chooses by this factor.

    Raises:
      ValueError: none does; the message names the events.
    """
    pld = PLDAccountant(relation, coarser * _interval(leaves, relation))
    only_zcdp = all(isinstance(leaf, dp.ZCDpEvent) for leaf, _ in leaves)
    orders = ZCDP_ORDERS if only_zcdp else None
    rdp = SelectionAccountant(orders, neighboring_relation=relation)
    for accountant in (pld, rdp):
        if all(supports(accountant, leaf) for leaf, _ in leaves):
            return accountant
    refused = ", ".join(repr(leaf) for leaf, _ in leaves if not supports(pld, leaf))
    raise ValueError(
        f"event must be one that an accountant supports under {relation.name}: PLD "
        f"refuses {refused}, and RDP the event as a whole. Supported under every "
        "relation are Gaussian, PoissonSampled(Gaussian), TruncatedSubsampledGaussian "
        "and, without these, ZCDp; under REPLACE_ONE SampledWithoutReplacement(Gaussian); "
        "RDP alone supports RepeatAndSelect, of what RDP supports"
    )


def supports(accountant: dp.PrivacyAccountant, leaf: dp.DpEvent) -> bool:
    """Returns True if an accountant supports an event and reads it as this package does.

    Under REPLACE_ONE, RDP takes every multiplier relative to 2C, where PLD and the
    events' documentation say C. Sampling without replacement is the exception: there 2C
    is what dp-accounting documents, and what :mod:`jaxdp.accounting.subsets` takes.
    """
    relation = accountant.neighboring_relation
    if isinstance(leaf, RepeatAndSelectDpEvent):
        parts = leaves_of(leaf.event, relation)
        readable = all(supports(accountant, part) for part, _ in parts)
        return readable and accountant.supports(leaf)
    misread = (
        isinstance(accountant, RdpAccountant)
        and relation is dp.NeighboringRelation.REPLACE_ONE
        and not isinstance(leaf, dp.ZCDpEvent | dp.SampledWithoutReplacementDpEvent)
    )
    return not misread and accountant.supports(leaf)


def distance(relation: dp.NeighboringRelation) -> int:
    """Returns the sum's sensitivity in units of the event: 2 under REPLACE_ONE, else 1."""
    return 2 if relation is dp.NeighboringRelation.REPLACE_ONE else 1


def as_gaussian(leaf: dp.DpEvent) -> tuple[float, float] | None:
    """Returns sampling probability and multiplier of a (sampled) Gaussian, or None."""
    match leaf:
        case dp.GaussianDpEvent():
            return 1.0, leaf.noise_multiplier
        case dp.PoissonSampledDpEvent(event=dp.GaussianDpEvent(noise_multiplier=m)):
            return leaf.sampling_probability, m
        case dp.TruncatedSubsampledGaussianDpEvent():
            return leaf.sampling_probability, leaf.noise_multiplier
    return None


def as_laplace(leaf: dp.DpEvent) -> tuple[float, float] | None:
    """Returns sampling probability and scale of a (sampled) Laplace, or None."""
    match leaf:
        case dp.LaplaceDpEvent():
            return 1.0, leaf.noise_multiplier
        case dp.PoissonSampledDpEvent(event=dp.LaplaceDpEvent(noise_multiplier=b)):
            return leaf.sampling_probability, b
    return None


def step_mu(leaf: dp.DpEvent, relation: dp.NeighboringRelation) -> float:
    """Returns the mu of one occurrence of an event.

    Exact for Gaussians. For other events what the central limit theorem makes of many:
    good for guesses, never for a guarantee. 0 where nothing is known.
    """
    match leaf:
        case RepeatAndSelectDpEvent():
            return total_mu(leaves_of(leaf.event, relation), relation)
    if laplace := as_laplace(leaf):
        q, scale = laplace
        return distance(relation) * q / scale if scale else math.inf
    subset = subsets.sampled(leaf)  # Relative to 2C, so of distance 1.
    q, m = as_gaussian(leaf) or subset or (0.0, 1.0)
    if m == 0:
        return math.inf
    mu = 1 / m
    if not isinstance(leaf, dp.GaussianDpEvent):
        # No more than without sampling, which matters where there is next to no noise.
        mu = min(mu, q * math.sqrt(math.expm1(min(1 / m**2, 100.0))))
    return mu if subset else distance(relation) * mu


def total_mu(leaves: Leaves, relation: dp.NeighboringRelation) -> float:
    """Returns the mu of all occurrences together; see :func:`step_mu`."""
    return math.sqrt(math.fsum(k * step_mu(leaf, relation) ** 2 for leaf, k in leaves))


def loss_width(
    leaf: dp.DpEvent, relation: dp.NeighboringRelation, count: int = 1
) -> float:
    """Estimates the range of privacy losses that PLD tabulates for an event."""
    far = distance(relation)
    if laplace := as_laplace(leaf):
        return 2 * far / laplace[1] if laplace[1] else 0.0
    subset = subsets.sampled(leaf)
    if subset:
        far = 1
    _, m = as_gaussian(leaf) or subset or (0.0, 0.0)
    if m == 0:
        return 0.0
    if isinstance(leaf, dp.GaussianDpEvent):
        m /= math.sqrt(count)  # PLD composes these before it tabulates.
    elif isinstance(leaf, dp.TruncatedSubsampledGaussianDpEvent):
        far = 4
    return far * (20 + far / m) / m


def _interval(leaves: Leaves, relation: dp.NeighboringRelation) -> float:
    """Chooses the interval of PLD's loss grid; each choice gives a valid bound.

    1e-4, dp-accounting's default, but finer where the losses of one step are of that
    size, which rounding up would inflate, and coarser where the table would have several
    1e5 entries, or several 1e6 for all steps, and take minutes.
    """
    interval = 1e-4
    # The losses of all steps together are about those of a Gaussian.
    mu = total_mu(leaves, relation)
    coarsest = mu * (20 + mu) / 5e6 if mu < math.inf else 0.0
    for leaf, count in leaves:
        width = loss_width(leaf, relation, count)
        coarsest = max(coarsest, width / 3e5)
        loss = step_mu(leaf, relation)
        if width and loss and not isinstance(leaf, dp.GaussianDpEvent):
            interval = min(interval, max(loss / 5, width / 1e5))
    return max(interval, coarsest)
