"""Tests of released integers: under integer noise their low digits are uniform.

A released number over its grid's unit is the un-noised integer sum plus noise. Noise that
is drawn on the integers, of dozens of units and more, makes every residue modulo 16 or 256
equally likely, whatever the sum was: of all numbers, and also of those that are far out.
Noise that is a rounded float32 does not. Multiples of a float's spacing that lie half-way
between two integers are rounded to the even one, so that of numbers around 2**21 five in
eight are even, and the parity of the sum shows through.

Only numbers below 2**22 units are looked at. Of larger ones float32 has rounded the low
digits of the sum and the noise together, which is post-processing and tells nothing of how
the noise was drawn.
"""

import dataclasses
import math

import numpy as np
import scipy.stats

from jaxdp.core import validate

#: Numbers of so many units and more have lost digits to the rounding of a release.
LIMIT = 2**22
#: Below so many units of noise residues are not uniform, not even of exact noise.
LEAST_STD = 64.0
#: Modulo what residues are looked at, and the least noise for each.
MODULI = {2: 2.0, 16: LEAST_STD, 256: 1024.0}
_TAILS = 2.0  # standard deviations; what is further out has the coarsest floats
_EXPECTED = 20  # the least expected count of a residue
_BINADES = 23  # of |k| < LIMIT, and one for zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatticeSite:
    """Test of the low digits of one kind of release, where no record contributes.

    Attributes:
      name: of the release.
      noise_std: standard deviation of its noise, in units of its grid.
      num_numbers: that had all of their digits.
      even: the share of even ones; 1/2 if nothing is wrong.
      even_tails: the same beyond two standard deviations; NaN where there are few.
      p_value: of the statistic that fits worst, times how many were computed.
      statistic: its name.

    Example:
      >>> from jaxdp.auditing import LatticeSite
      >>> site = LatticeSite(
      ...     name="slope", noise_std=1e6, num_numbers=4000,
      ...     even=0.51, even_tails=0.5, p_value=0.2, statistic="parity",
      ... )
      >>> site.name, site.even
      ('slope', 0.51)
    """

    name: str
    noise_std: float
    num_numbers: int
    even: float
    even_tails: float
    p_value: float
    statistic: str


def integers(units: np.ndarray) -> np.ndarray:
    """Returns released numbers as integers, int32; ``LIMIT`` where digits were lost.

    Half a unit goes up and not to the even neighbour: where noise is finer than the grid
    the rounding of this function must not look like the one that is searched for.
    ``units``: released numbers over the unit of their grid, real, of any shape.
    """
    units = np.asarray(units, np.float64)
    # Not (units >= LIMIT), which keeps what is no number.
    kept = np.abs(units) < LIMIT - 1
    return np.where(kept, np.floor(np.where(kept, units, 0) + 0.5), LIMIT).astype("i4")


def cells(found: np.ndarray, modulus: int) -> np.ndarray:
    """Returns number of digits and residue of each of :func:`integers`, as one int32."""
    digits = np.frexp(np.abs(found).astype(np.float32))[1].astype(np.int32)
    return digits * modulus + (found & (modulus - 1))


def num_cells(modulus: int) -> int:
    """Returns the number of values that :func:`cells` can have."""
    return (_BINADES + 1) * modulus


def fit(units: np.ndarray, noise_std: float, name: str = "") -> LatticeSite:
    """Tests digits of releases whose sum was zero, or a multiple of 256.

    Parity, residues modulo 16 and 256, each of all numbers and of those beyond two standard
    deviations, and the parity in each binade, in which it is the spacing of a float that
    decides. Each gives a p-value, from the exact binomial law or from that of chi-squared;
    the smallest counts, times how many there are.

    Args:
      units: released numbers over the unit of their grid, independent, of any shape.
      noise_std: standard deviation of their noise, in units; less than 64 is refused.
      name: of the release.
    """
    validate.positive(noise_std=noise_std)
    if noise_std < LEAST_STD:
        raise ValueError(
            f"noise_std must be at least {LEAST_STD:g} units of the grid, got "
            f"{noise_std:.4g}: so little noise has residues of its own"
        )
    found = integers(units).ravel()
    found = found[found != LIMIT]
    # Whole blocks of residues on both sides, so that the law's slope cancels.
    edge = math.ceil(_TAILS * noise_std / 256) * 256
    tails = found[(found >= edge) | (found < -edge)]
    p_values = {}
    for where, numbers in (("", found), (" beyond 2 std", tails)):
        for modulus, least in MODULI.items():
            if noise_std >= least and len(numbers) >= _EXPECTED * modulus:
                digits = "parity" if modulus == 2 else f"residues mod {modulus}"
                p_values[digits + where] = _uniform(numbers, modulus)
    parities = np.bincount(cells(found, 2), minlength=num_cells(2)).reshape(-1, 2)
    # Binades of a few integers have more of one parity, for a law that is not flat.
    parities = parities[12:][parities[12:].sum(axis=1) >= 2 * _EXPECTED]
    if len(parities):
        total = parities.sum(axis=1)
        squares = (parities[:, 0] - parities[:, 1]) ** 2 / total
        p_values["parity in each binade"] = scipy.stats.chi2.sf(
            squares.sum(), len(parities)
        )
    statistic = min(p_values, key=p_values.__getitem__, default="none")
    worst = p_values.get(statistic, 1.0) * max(len(p_values), 1)
    return LatticeSite(
        name=name,
        noise_std=float(noise_std),
        num_numbers=len(found),
        even=_even(found),
        even_tails=_even(tails),
        p_value=min(1.0, float(worst)),
        statistic=statistic,
    )


def _even(found: np.ndarray) -> float:
    return float(np.mean(found & 1 == 0)) if len(found) >= 100 else math.nan


def _uniform(found: np.ndarray, modulus: int) -> float:
    """Returns the p-value of the hypothesis that all residues are equally likely."""
    counts = np.bincount(found & (modulus - 1), minlength=modulus)
    if modulus == 2:
        return float(scipy.stats.binomtest(int(counts[0]), len(found)).pvalue)
    expected = len(found) / modulus
    square = float(((counts - expected) ** 2).sum() / expected)
    return float(scipy.stats.chi2.sf(square, modulus - 1))
