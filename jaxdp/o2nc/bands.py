r"""Banded Toeplitz matrices of the least noise in prefix sums.

The noise of a plan is as large as the sensitivity asks for, so what counts of a matrix C is
:math:`\|C(e_0 + e_b + \dots)\| \max_t \|B_t\|`, with :math:`B_t` the rows of
:math:`B = AC^{-1}`, A the lower triangle of ones and b the steps between two that read one
record. With c the polynomial of C's first column and :math:`p = 1/((1 - x)c(x))`, the rows
are the first numbers of p, and the last row, of all T, is the longest. Both factors have
short gradients: of :math:`\|p\|^2` after :math:`c_l` it is
:math:`-2\langle p, x^l p/c\rangle`.

References:
  Choquette-Choo et al., `(Amplified) Banded Matrix Factorization
  <https://arxiv.org/abs/2306.08153>`_, 2023, which take the mean over t, not the largest.
  Kalinin, Lampert, `Banded Square Root Matrix Factorization
  <https://arxiv.org/abs/2405.13763>`_, 2024, from which the search begins.
"""

import numpy as np

from jaxdp.kernels import toeplitz_noise

#: Decimal places of a coefficient. At an optimum so small a change costs next to nothing.
_PLACES = 6


def optimised_bands(
    period: int, bands: int, separation: int | None = None
) -> tuple[float, ...]:
    """Returns the first column of a banded C of least worst noise at equal sensitivity.

    A function of its arguments alone: no data, no randomness.

    Args:
      period: T, steps of one period.
      bands: how many numbers may differ from 0; those beyond the period are left out.
      separation: steps between two of a period that read the same record, at least
        ``bands``; None where a period reads it once.

    Returns:
      Numbers that fall from 1 and are at least 0, of six decimal places.
    """
    import scipy.optimize  # Half as long to import as jax is.
    from scipy.signal import lfilter

    first = toeplitz_noise.SquareRoot(period, bands).coefficients()[:bands]
    if len(first) == 1:
        return (1.0,)
    read = np.zeros(period)
    read[:: separation or period] = 1.0
    steps = np.flatnonzero(read)

    def product(later: np.ndarray) -> tuple[float, np.ndarray]:
        """Computes twice the logarithm of the product, and its gradient."""
        c = np.concatenate([np.ones(1), later])
        moved = np.convolve(read, c)[:period]
        p = np.asarray(lfilter([1.0], c, np.ones(period)))
        q = np.asarray(lfilter([1.0], c, p))
        lags = range(1, len(c))
        of_moved = [moved[steps[steps < period - lag] + lag].sum() for lag in lags]
        of_p = [p[lag:] @ q[: period - lag] for lag in lags]
        longest, noise = moved @ moved, p @ p
        gradient = 2 * (np.array(of_moved) / longest - np.array(of_p) / noise)
        return float(np.log(longest * noise)), gradient

    found = scipy.optimize.minimize(
        product,
        first[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * (len(first) - 1),
        options={"ftol": 1e-14, "gtol": 1e-8},
    ).x
    # The best ones fall, but for what the search leaves. (They would not, where bands reach
    # over two steps of a record.)
    column = np.minimum.accumulate(np.concatenate([np.ones(1), found]))
    return tuple(column.round(_PLACES).tolist())
