"""Noise for prefix sums: one interface, by name.

A period releases the prefix sums ``S_t + N_t`` of bounded contributions. The noise is
``N = B xi`` with standard normals xi, where ``B C = A``, the lower triangle of ones: adding
N to the prefix sums A x is the post-processing ``B (C x + xi)`` of one Gaussian mechanism
on ``C x``, adaptive because C is lower triangular. One record that appears at step i alone
moves C x by at most ``s_i ||C e_i||``, with s_i the step's sensitivity.

A kernel hands out the increments ``n_t = N_t - N_{t-1} = (C^-1 xi)_t``, so that a user adds
step t's contribution and n_t to what was released before and holds nothing else.

| name | kernel |
|---|---|
| ``tree`` | :class:`tree_noise.Stored` |
| ``tree_regenerated`` | :class:`tree_noise.Regenerated` |
| ``tree_incremental`` | :class:`tree_noise.Incremental` |
| ``honaker`` | :class:`tree_noise.Honaker` |
| ``sqrt_toeplitz`` | :class:`toeplitz_noise.SquareRoot` |
| ``blt_1``, ``blt_2``, ``blt_3`` | :func:`toeplitz_noise.blt` with so many buffers |
| ``independent`` | :class:`toeplitz_noise.Independent` |

References:
  C. Dwork, M. Naor, T. Pitassi, G. Rothblum, 2010 (tree); S. Denisov, H. B. McMahan,
  J. Rush, A. Smith, A. Thakurta, 2022 (factorisations, adaptivity).
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxdp.kernels import toeplitz_noise, tree_noise


class PrefixNoise(Protocol):
    """A kernel: a frozen, hashable dataclass."""

    @property
    def period(self) -> int:
        """Steps of one period."""
        ...

    def init(self, like: Any) -> Any:
        """State before the first step: a pytree of float32 arrays, maybe without leaves.

        Args:
          like: pytree of arrays or ``jax.ShapeDtypeStruct``; only paths and shapes are
            read here and in :meth:`increment`.
        """
        ...

    def increment(
        self, key: jax.Array, state: Any, step: int | jax.Array, like: Any
    ) -> tuple[Any, Any]:
        """The noise to add at one step of a period, in stds of one node.

        Args:
          key: typed threefry key, shape=(): fresh for every period, secret, the same at
            all steps of the period.
          state: what the step before returned; secret. Step 0 ignores it: that is the
            whole of a restart.
          step: int32, shape=(), from 0 to ``period - 1``, in this order; may be traced.
          like: pytree.

        Returns:
          Row ``step`` of C^-1 xi, a tree like ``like`` in float32, with xi independent
          standard normals for every step and element; and the next state.
        """
        ...

    def column_norms(self) -> np.ndarray:
        """``||C e_i||`` of every step, float64 (period,)."""
        ...

    def prefix_norms(self) -> np.ndarray:
        """``||B_t||``: stds of the noise on the prefix sums, float64 (period,)."""
        ...

    def increment_norms(self) -> np.ndarray:
        """Stds of the increments, float64 (period,)."""
        ...

    def strategy(self) -> np.ndarray:
        """C, float64 (period, period): for tests and audits, not for long periods."""
        ...


_KERNELS: dict[str, Callable[[int], PrefixNoise]] = {
    "tree": tree_noise.Stored,
    "tree_regenerated": tree_noise.Regenerated,
    "tree_incremental": tree_noise.Incremental,
    "honaker": tree_noise.Honaker,
    "sqrt_toeplitz": toeplitz_noise.SquareRoot,
    "blt_1": functools.partial(toeplitz_noise.blt, num_buffers=1),
    "blt_2": functools.partial(toeplitz_noise.blt, num_buffers=2),
    "blt_3": functools.partial(toeplitz_noise.blt, num_buffers=3),
    "independent": toeplitz_noise.Independent,
}
NAMES = tuple(_KERNELS)


def make(name: str, period: int) -> PrefixNoise:
    """The kernel of one of :data:`NAMES` for periods of so many steps.

    Raises:
      ValueError: an unknown name, or a period below 1 or above 2**30.
      TypeError: a period that is no integer.
    """
    if name not in _KERNELS:
        raise ValueError(f"name must be one of {', '.join(NAMES)}; got {name!r}")
    return _KERNELS[name](period)


def sensitivity(kernel: PrefixNoise, leaf_sensitivities: np.ndarray) -> float:
    """How far one record moves what the noise of one period is added to.

    The record appears at one step of the period, whichever is the worst. Divided into the
    std of one node this is the noise multiplier of the one Gaussian event that a whole
    period is.

    Args:
      kernel: for its period and the lengths of the columns of C.
      leaf_sensitivities: (period,), at least 0: how far one record moves the contribution
        of each step, under the relation in use.

    Returns:
      ``max_i leaf_sensitivities[i] * ||C e_i||``.

    Raises:
      ValueError: another shape, or a number that is negative or not finite.
    """
    leaf = np.asarray(leaf_sensitivities, np.float64)
    if leaf.shape != (kernel.period,):
        raise ValueError(
            f"leaf_sensitivities must have shape ({kernel.period},), one for each step "
            f"of the period, got {leaf.shape}"
        )
    if not (np.isfinite(leaf).all() and (leaf >= 0).all()):
        raise ValueError("leaf_sensitivities must be finite and at least 0")
    return float(np.max(leaf * kernel.column_norms()))
