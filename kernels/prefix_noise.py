"""Noise for prefix sums: one interface, by name.

A period releases the prefix sums ``S_t + N_t`` of bounded contributions x_t, or, which says
the same, their increments ``r_t = x_t + n_t``. The noise follows ``C n = xi`` with
independent draws xi and a lower triangular C; with ``B C = A``, the lower triangle of ones,
N is B xi. One record that appears at step i alone moves C x by at most ``s_i ||C e_i||``,
with s_i the step's sensitivity.

A kernel hands out the increments n_t, so that a user adds step t's contribution and n_t to
what was released before and holds nothing else.

All is exact. The x_t are integers (contributions on a grid, whose spacing is the unit
here), and the xi_t are integers of a known law (``integral`` kernels, whose C and inverse
are integers) or come from the grid of ``2**-32``
(:func:`jaxdp.kernels.node_noise.fine`). On that grid n_t is xi_t plus a function of
the earlier xi, with every product rounded down to it.
So whoever knows x and sees r finds xi step by step: C n is xi + delta(xi), where delta_t
depends on earlier draws only and lies in an interval of the length that
:meth:`PrefixNoise.rounding` gives. For the same r another x' needs

    xi' = xi + C (x - x') + delta(xi) - delta(xi'),

which lies on the grid of xi, as r, x' and the rounded products do. The privacy of a period
is then that of one mechanism, which adds xi to something that a record moves by at most
``sensitivity(...) + rounding_shift(...)`` in L2: adaptively, because what moves xi_t is
decided by what was released before. What is made of r, and be it rounded to float32, is
post-processing. So is the modulo of ``2**32`` in the integers of integral kernels. The
others multiply, and a wrap before a product is no wrap of the product: choose the std so
that numbers of ``largest_norm()`` stds stay below ``2**31`` in all but negligible cases.

References:
  C. Dwork, M. Naor, T. Pitassi, G. Rothblum, 2010 (tree); S. Denisov, H. B. McMahan,
  J. Rush, A. Smith, A. Thakurta, 2022 (factorisations, adaptivity).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from jaxdp.kernels import toeplitz_noise, tree_noise
from jaxdp.kernels.lattice_gaussian import Law
from jaxdp.kernels.node_noise import Step


class PrefixNoise(Protocol):
    """Interface of a prefix-noise kernel, which is a frozen, hashable dataclass.

    Example:
      >>> from jaxdp.kernels import prefix_noise
      >>> kernel = prefix_noise.make("tree", period=8)
      >>> kernel.period, kernel.integral
      (8, True)
      >>> (kernel.prefix_norms() ** 2).round(3).tolist()
      [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 1.0]
    """

    @property
    def period(self) -> int:
        """Steps of one period."""
        ...

    #: Whether the noise is integers; otherwise multiples of ``2**-32``.
    integral: ClassVar[bool]

    def laws(self, std: int) -> Law:
        """Returns the laws of the draws for nodes of this std: host arrays.

        Args:
          std: in units of the contributions, from 1 to ``2**28``; of kernels that are not
            ``integral`` at least 75.

        Example:
          >>> from jaxdp.kernels import prefix_noise
          >>> prefix_noise.make("tree", period=8).laws(std=1000).alias.shape
          (2048,)
        """
        ...

    def init(self, like: Any) -> Any:
        """Returns the state before the first step: 32-bit integers, or no leaves.

        Of ``like``, arrays or ``jax.ShapeDtypeStruct``, only paths and shapes are read.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxdp.kernels import prefix_noise
          >>> kernel = prefix_noise.make("tree", period=8)
          >>> kernel.init({"w": jnp.zeros(3)})["w"].shape  # A row for each level.
          (4, 3)
        """
        ...

    def increment(
        self, key: jax.Array, state: Any, step: Step, like: Any, laws: Law
    ) -> tuple[Any, Any]:
        """Returns the noise to add at one step of a period, and the next state.

        Args:
          key: typed threefry key, shape=(): fresh for every period, secret, the same at
            all steps of the period.
          state: what the step before returned; secret. Step 0 ignores it: that is the
            whole of a restart.
          step: int32, shape=(), from 0 to ``period - 1``, in this order; may be traced.
          like: as in :meth:`init`.
          laws: of :meth:`laws`, the same at all steps of the period.

        Returns:
          Row ``step`` of C^-1 xi, a tree like ``like`` of
          :class:`jaxdp.kernels.fixed_point.Fixed` in units of the contributions,
          with xi independent for every step and element; and the next state.
          Fractions are None where the kernel is ``integral``.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> from jaxdp.kernels import prefix_noise, threefry
          >>> kernel, like = prefix_noise.make("tree", period=8), {"w": jnp.zeros(3)}
          >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
          >>> state, laws = kernel.init(like), kernel.laws(1000)
          >>> noise, state = kernel.increment(key, state, 0, like, laws)
          >>> noise["w"].high.shape, noise["w"].low is None
          ((3,), True)
        """
        ...

    def rounding(self) -> float:
        """Bounds the difference of xi between two data sets by rounding, at any number.

        The length of the interval of ``C n - xi``: in units of the contributions, over the
        std of xi there in stds of a node. 0 where the kernel is ``integral``.

        Example:
          >>> from jaxdp.kernels import prefix_noise
          >>> prefix_noise.make("tree", period=8).rounding()
          0.0
          >>> prefix_noise.make("sqrt_toeplitz", period=8).rounding() < 1e-8
          True
        """
        ...

    def largest_norm(self) -> float:
        """Returns the largest std of an increment or a number of the state, in nodes'.

        Example:
          >>> from jaxdp.kernels import prefix_noise
          >>> round(prefix_noise.make("tree", period=8).largest_norm() ** 2, 6)
          4.0
        """
        ...

    def column_norms(self) -> np.ndarray:
        """Returns ``||C e_i||`` of every step, float64 (period,).

        Example:
          >>> from jaxdp.kernels import prefix_noise
          >>> kernel = prefix_noise.make("tree", period=4)
          >>> (kernel.column_norms() ** 2).round(3).tolist()
          [3.0, 2.0, 2.0, 1.0]
        """
        ...

    def prefix_norms(self) -> np.ndarray:
        """Returns ``||B_t||``, float64 (period,): stds of the noise on the prefix sums.

        In stds of a node. Roundings to ``2**-32`` come on top.

        Example:
          >>> from jaxdp.kernels import prefix_noise
          >>> kernel = prefix_noise.make("tree", period=4)
          >>> (kernel.prefix_norms() ** 2).round(3).tolist()
          [1.0, 1.0, 2.0, 1.0]
        """
        ...

    def increment_norms(self) -> np.ndarray:
        """Returns the stds of the increments, in stds of a node, float64 (period,).

        Example:
          >>> from jaxdp.kernels import prefix_noise
          >>> kernel = prefix_noise.make("tree", period=4)
          >>> (kernel.increment_norms() ** 2).round(3).tolist()
          [1.0, 2.0, 1.0, 3.0]
        """
        ...

    def strategy(self) -> np.ndarray:
        """Returns C, float64 (period, period), each row over the std of xi there in nodes'.

        For tests and audits, not for long periods.

        Example:
          >>> from jaxdp.kernels import prefix_noise
          >>> prefix_noise.make("tree", period=4).strategy()
          array([[1., 0., 0., 0.],
                 [1., 1., 0., 0.],
                 [0., 0., 1., 0.],
                 [1., 1., 1., 1.]])
        """
        ...


#: Kernels by name; ``blt_2`` has two buffers.
_KERNELS: dict[str, Callable[[int], PrefixNoise]] = {
    "tree": tree_noise.Stored,
    "tree_incremental": tree_noise.Incremental,
    "honaker": tree_noise.Honaker,
    "sqrt_toeplitz": toeplitz_noise.SquareRoot,
    "blt_1": functools.partial(toeplitz_noise.blt, num_buffers=1),
    "blt_2": functools.partial(toeplitz_noise.blt, num_buffers=2),
    "blt_3": functools.partial(toeplitz_noise.blt, num_buffers=3),
    "independent": toeplitz_noise.Independent,
}
NAMES = tuple(_KERNELS)
#: Those of which a period may read a record again.
REPEATABLE = ("sqrt_toeplitz", "blt_1", "blt_2", "blt_3", "independent")


def make(name: str, period: int) -> PrefixNoise:
    """Makes the kernel of one of :data:`NAMES` for periods of so many steps.

    Raises:
      ValueError: an unknown name, or a period below 1 or above 2**30.
      TypeError: a period that is no integer.

    Example:
      >>> from jaxdp.kernels import prefix_noise
      >>> prefix_noise.make("honaker", period=100)
      Honaker(period=100)
      >>> prefix_noise.make("blt_2", period=100).buf_decay
      (0.994583, 0.844668)
    """
    if name not in _KERNELS:
        raise ValueError(f"name must be one of {', '.join(NAMES)}; got {name!r}")
    return _KERNELS[name](period)


def sensitivity(
    kernel: PrefixNoise, leaf_sensitivities: np.ndarray, separation: int | None = None
) -> float:
    r"""Returns the L2 sensitivity ``max_i leaf_sensitivities[i] * ||C e_i||`` of ``C x``.

    The record appears at one step of the period, whichever is the worst. Divided into the
    std of one node this is the noise multiplier of the one Gaussian event that a whole
    period is.

    With ``separation`` b it appears at the steps i, i + b, i + 2b, ... of some i < b, and
    may move each as it likes: by vectors :math:`s u_k` with :math:`\|u_k\| \le 1`. Then
    :math:`\|Cx\|^2 = s^2 \sum_{k,l} (C^TC)_{i+kb,i+lb} u_k \cdot u_l`, at most what equal
    unit vectors make of it, for C has no negative entry; and i = 0 has the most of them.

    Args:
      kernel: for its period and the lengths of the columns of C. With ``separation`` one
        of :mod:`jaxdp.kernels.toeplitz_noise`.
      leaf_sensitivities: (period,), at least 0: how far one record moves the contribution
        of each step, under the relation in use. With ``separation`` the largest counts.
      separation: steps between two that read the same record; None where the period reads
        it once.

    Raises:
      ValueError: another shape, a number that is negative or not finite, or a kernel
        without a bound for records that are read again.

    Example:
      >>> import numpy as np
      >>> from jaxdp.kernels import prefix_noise
      >>> kernel = prefix_noise.make("tree", period=8)
      >>> round(prefix_noise.sensitivity(kernel, np.ones(8)) ** 2, 6)
      4.0
      >>> kernel = prefix_noise.make("independent", period=8)
      >>> round(prefix_noise.sensitivity(kernel, np.ones(8), separation=2) ** 2, 6)
      4.0
    """
    leaf = np.asarray(leaf_sensitivities, np.float64)
    if leaf.shape != (kernel.period,):
        raise ValueError(
            f"leaf_sensitivities must have shape ({kernel.period},), one for each step "
            f"of the period, got {leaf.shape}"
        )
    if not (np.isfinite(leaf).all() and (leaf >= 0).all()):
        raise ValueError("leaf_sensitivities must be finite and at least 0")
    if separation is None:
        return float(np.max(leaf * kernel.column_norms()))
    kinds = (toeplitz_noise.SquareRoot, toeplitz_noise.Banded, toeplitz_noise.Buffered)
    if not isinstance(kernel, (*kinds, toeplitz_noise.Independent)):
        raise ValueError(
            f"prefix_noise must be one of {', '.join(REPEATABLE)} where a period reads a "
            f"record again, got {type(kernel).__name__}"
        )
    return float(np.max(leaf) * kernel.repeated_norm(separation))


def rounding_shift(kernel: PrefixNoise, size: int) -> float:
    """Returns what rounding adds to :func:`sensitivity`, in units of the contributions.

    An L2 length over a whole period, whose releases have ``size`` numbers each.

    Example:
      >>> from jaxdp.kernels import prefix_noise
      >>> tree, blt = (prefix_noise.make(name, period=8) for name in ("tree", "blt_2"))
      >>> prefix_noise.rounding_shift(tree, size=10)
      0.0
      >>> prefix_noise.rounding_shift(blt, size=10) < 1e-7
      True
    """
    return kernel.rounding() * math.sqrt(size * kernel.period)
