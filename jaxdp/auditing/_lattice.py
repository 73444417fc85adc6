"""Lattice adversary: tests whether low digits of releases reveal the un-noised sum."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jaxdp.auditing import bounds, cases, grid_releases, residues
from jaxdp.auditing._audit import Bound, title_of
from jaxdp.auditing.grid_releases import Site
from jaxdp.auditing.residues import LatticeSite
from jaxdp.core import display, validate
from jaxdp.core.keys import Keys
from jaxdp.mechanism.plan import Plan

#: Shares of the runs that learn an attack and that choose one; the rest test it.
_LEARN, _CHOOSE = 0.25, 0.25
#: What digits an attack looks at: modulo what, within each binade of the number.
_ATTACKS = {"parity": 2, "residues mod 16": 16, "residues mod 256": 256}
#: What is said of a plan that draws vertices.
_NO_LATTICE = "it draws vertices, and adds no noise to an integer sum"
#: And one whose noise is so small that digits are not uniform, whatever draws it.
_NO_DIGITS = f"its noise is less than {residues.LEAST_STD:g} units of its grid"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatticeResult(Bound):
    """Result of the lattice adversary: lower bound on epsilon, digit tests of each site.

    ``failure_prob`` is the probability with which a plan without fault is flagged, at most;
    ``method`` names the release that the attack reads, too.

    Attributes:
      sites: the digits of each kind of release.
      left_out: releases that are not looked at, with reasons.
      reason: why there was nothing to look at; empty if there was.

    Example:
      >>> import jaxdp
      >>> result = jaxdp.auditing.LatticeResult(
      ...     epsilon_lower=0.0, epsilon=2.0, delta=1e-5, failure_prob=1e-6,
      ...     method="none", num_runs=1000, num_tested=500, sites=(),
      ...     reason="releases are drawn vertices",
      ... )
      >>> result.applicable, result.worst, result.passed
      (False, None, True)
    """

    sites: tuple[LatticeSite, ...]
    left_out: tuple[str, ...] = ()
    reason: str = ""

    @property
    def applicable(self) -> bool:
        """True if some release has digits that can be tested."""
        return not self.reason

    @property
    def worst(self) -> LatticeSite | None:
        """Site with the smallest p-value; None if there is no site."""
        return min(self.sites, key=lambda site: site.p_value, default=None)

    @property
    def flagged(self) -> bool:
        """True if some digits do not fit, or the bound exceeds the accounted epsilon."""
        worst = self.worst
        limit = self.failure_prob / 2 / max(len(self.sites), 1)
        unfit = worst is not None and worst.p_value < limit
        return unfit or self.epsilon_lower > self.epsilon

    @property
    def passed(self) -> bool:
        """True if the result is not flagged."""
        return not self.flagged

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        title = title_of(self) if self.applicable else "LatticeResult: not applicable"
        rows = [
            r for r in display.fields(self).rows if r[0] not in ("sites", "left_out")
        ]
        rows += [(f"left out {i}", why) for i, why in enumerate(self.left_out, 1)]
        rows += [
            (
                f"site {site.name}",
                f"p-value {site.p_value:.3g} ({site.statistic}), {site.even:.4f} even of "
                f"{site.num_numbers} numbers, noise of {site.noise_std:.3g} units",
            )
            for site in self.sites
        ]
        return display.Table(title, rows)


def lattice(
    plan: Plan,
    *,
    num_runs: int = 1000,
    delta: float | None = None,
    failure_prob: float = 1e-6,
    seed: int = 0,
    unit: str = "record",
) -> LatticeResult:
    """Attacks the low digits of what a plan with noise releases.

    Sums of clipped contributions are integers, and so is their noise. Two data sets whose
    sums differ by one unit in thousands of coordinates are almost the same to a Gaussian
    mechanism; they are told apart at once if noise of float32 is rounded to the grid, for
    that is even more often than odd. The plan is run as it is, with all its noise: its
    first steps, with as many parameters as make the numbers many. Two things are asked:

    * Does an adversary who knows both data sets tell them apart? Ratios of counts, of each
      parity or residue modulo 16 or 256 in each binade, become a bound on epsilon, as the
      scores of :func:`audit` do. Of a count, whose grid is finer, digits are its own.
    * Where nothing contributes, are digits uniform (:mod:`jaxdp.auditing.residues`)? Of
      digits that are not, some data set's sum can be read, even where this one's is not.

    Args:
      plan: any. One that draws vertices has no lattice, and one of hardly any noise no
        digits that could be uniform; the result then says so.
      num_runs: simulated runs on each data set, at least 100; some thousands of numbers
        each.
      delta: default the plan's own; 0 for a pure guarantee.
      failure_prob: in (0, 1): of flagging a plan without fault.
      seed: in [0, 2**32); the result is a function of it.
      unit: ``"record"`` or ``"user"``, as in :func:`audit`.

    Raises:
      TypeError, ValueError: an argument is out of range, or a plan without noise.
      RuntimeError: what is simulated is not what the plan's transformation does.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=100, num_steps=2, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> jaxdp.auditing.lattice(plan, num_runs=100).passed
      True
    """
    validate.integer(at_least=100, at_most=2**31, num_runs=num_runs)
    validate.probability(failure_prob=failure_prob)
    validate.integer(at_least=0, at_most=2**32 - 1, seed=seed)
    mechanism, lifted = cases.case_of(plan).mechanism, cases.unit_named(plan, unit)
    chosen, accounted = cases.accounted(plan, delta)
    sites, left_out = (), []
    if mechanism is not None:
        made = mechanism(plan, Keys.insecure(seed), lifted)
        sites, left_out = grid_releases.releases(made, num_runs, seed), [*made.left_out]
    large = tuple(s for s in sites if s.noise_std >= residues.LEAST_STD)
    left_out += [
        f"{s.name}: noise of {s.noise_std:.4g} units"
        for s in sites
        if s.noise_std < residues.LEAST_STD
    ]
    reason, method, found = "", "none", None
    if large:
        rule = cases.rule_of(plan, chosen, accounted, failure_prob / 2)
        found = bounds.tested(_attempts(large, rule), rule)
        method = f"{found.attempt.attack}, {found.how}"
    else:
        reason = _NO_LATTICE if mechanism is None else _NO_DIGITS
    return LatticeResult(
        epsilon_lower=found.epsilon_lower if found else 0.0,
        epsilon=float(accounted),
        delta=chosen,
        failure_prob=failure_prob,
        method=method,
        num_runs=0 if mechanism is None else num_runs,
        num_tested=len(found.attempt.first) if found else 0,
        unit=unit,
        sites=tuple(residues.fit(s.units[0], s.noise_std, s.name) for s in large),
        left_out=tuple(left_out),
        reason=reason,
    )


def _attempts(sites: tuple[Site, ...], rule: bounds.Rule) -> Iterator[bounds.Attempt]:
    for site in sites:
        # In units of what a record moves: the low digits of a count are those of counts.
        first, second = (residues.integers(u / site.moved) for u in site.units)
        learn = math.ceil(_LEARN * len(first))
        choose = math.ceil(_CHOOSE * len(first))
        odd = _odd(first[:learn], second[:learn])
        if not odd.any():
            continue
        both = first[:, odd], second[:, odd]
        for name, modulus in _ATTACKS.items():
            if site.noise_std / site.moved < residues.MODULI[modulus]:
                continue
            cells = [residues.cells(found, modulus) for found in both]
            ratio = _log_ratio([c[:learn] for c in cells], residues.num_cells(modulus))
            one, other = (ratio[c[learn:]].sum(axis=1) for c in cells)
            attack = f"{name} of {site.name}"
            yield bounds.attempt(attack, "", (one, other), choose, rule)
    # So that there always is one: it tells nothing.
    none = np.zeros(1)
    yield bounds.Attempt("no attack", "", 0.0, -math.inf, none, none)


def _odd(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Selects the coordinates (m,) that the record moves by an odd number in some runs."""
    # The same noise is on both, so that sums alone differ, which an adversary knows.
    known = (first != residues.LIMIT) & (second != residues.LIMIT)
    return np.any(known & ((first - second) & 1 == 1), axis=0)


def _log_ratio(learned: list[np.ndarray], num_cells: int) -> np.ndarray:
    """Estimates the log likelihood ratio of each cell, without over with the record."""
    counts = [np.bincount(c.ravel(), minlength=num_cells) + 1.0 for c in learned]
    first, second = (np.log(c / c.sum()) for c in counts)
    return first - second
