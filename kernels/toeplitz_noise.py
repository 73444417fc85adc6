"""Prefix-sum noise whose strategy is a Toeplitz matrix.

The first column of C (1, c_1, c_2, ...) says everything: step t's noise is its own draw
minus what the earlier noise carries over, ``n_t = xi_t - sum_l c_l n_{t-l}``. The
coefficients are made of multiples of ``2**-32``, and every product is rounded to that.

The interface is :class:`jaxdp.kernels.prefix_noise.PrefixNoise`.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import fixed_point, lattice_gaussian, node_noise
from jaxdp.kernels.fixed_point import ONE, ULP, tree_map
from jaxdp.kernels.lattice_gaussian import Law
from jaxdp.kernels.node_noise import Step


@dataclasses.dataclass(frozen=True)
class _Toeplitz:
    """Base of the Toeplitz kernels: methods that follow from the coefficients.

    Attributes:
      period: steps of one period.
    """

    integral: ClassVar[bool] = False

    period: int

    def __post_init__(self) -> None:
        node_noise.check_period(self.period)

    def laws(self, std: int) -> Law:
        """Returns the law of every draw, whose std is ``std`` units.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.Independent(period=4).laws(std=1000).alias.shape
          (2048,)
        """
        return lattice_gaussian.law(std, fine=not self.integral)

    def rounding(self) -> float:
        """Bounds the part of one draw that rounding makes, in stds of a node."""
        raise NotImplementedError

    def largest_norm(self) -> float:
        """Returns the std of the last increment, which is the longest.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.Independent(period=4).largest_norm()
          1.0
        """
        return float(self.increment_norms()[-1])

    def coefficients(self) -> np.ndarray:
        """Returns the first column of C, float64 (period,)."""
        raise NotImplementedError

    def inverse_coefficients(self) -> np.ndarray:
        """Returns the first column of the inverse of C, float64 (period,)."""
        raise NotImplementedError

    def column_norms(self) -> np.ndarray:
        """Returns the lengths of the columns of C: the first is the longest.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.SquareRoot(period=3).column_norms().round(4).tolist()
          [1.1792, 1.118, 1.0]
        """
        return _cumulative_norms(self.coefficients())[::-1]

    def repeated_norm(self, separation: int) -> float:
        """Returns the length of the sum of C's columns 0, ``separation``, and so on.

        No entry of C is negative. So of all columns that are so far apart these have the
        longest sum, and no other signs or directions of a record's contributions to their
        steps make ``C x`` longer.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> round(toeplitz_noise.Independent(period=6).repeated_norm(3) ** 2, 6)
          2.0
          >>> round(toeplitz_noise.SquareRoot(period=4).repeated_norm(2) ** 2, 6)
          3.800781
        """
        total, column = np.zeros(self.period), self.coefficients()
        for first in range(0, self.period, separation):
            total[first:] += column[: self.period - first]
        return float(np.linalg.norm(total))

    def prefix_norms(self) -> np.ndarray:
        """Returns the stds of the noise on the prefix sums: lengths of the rows of B.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.SquareRoot(period=3).prefix_norms().round(4).tolist()
          [1.0, 1.118, 1.1792]
        """
        return _cumulative_norms(np.cumsum(self.inverse_coefficients()))

    def increment_norms(self) -> np.ndarray:
        """Returns the stds of the increments: lengths of the rows of the inverse of C.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.SquareRoot(period=3).increment_norms().round(4).tolist()
          [1.0, 1.118, 1.125]
        """
        return _cumulative_norms(self.inverse_coefficients())

    def strategy(self) -> np.ndarray:
        """Returns C, lower triangular.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.SquareRoot(period=3).strategy().round(3).tolist()
          [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.375, 0.5, 1.0]]
        """
        lag = np.subtract.outer(np.arange(self.period), np.arange(self.period))
        return np.where(lag >= 0, self.coefficients()[np.maximum(lag, 0)], 0.0)


def _cumulative_norms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.cumsum(np.square(x)))


@dataclasses.dataclass(frozen=True)
class Independent(_Toeplitz):
    """Independent noise on every increment: C is the identity. No state.

    Example:
      >>> from jaxdp.kernels import toeplitz_noise
      >>> kernel = toeplitz_noise.Independent(period=4)
      >>> (kernel.prefix_norms() ** 2).round(3).tolist()
      [1.0, 2.0, 3.0, 4.0]
    """

    integral: ClassVar[bool] = True

    def init(self, like: Any) -> Any:
        """Returns the state before the first step, which is empty.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.Independent(period=4).init(jnp.zeros(3))
          ()
        """
        del like
        return ()

    def increment(
        self, key: jax.Array, state: Any, step: Step, like: Any, laws: Law
    ) -> tuple[Any, Any]:
        """Returns one step's noise and the next state, as every prefix-noise kernel does.

        See :meth:`jaxdp.kernels.prefix_noise.PrefixNoise.increment`.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> from jaxdp.kernels import threefry, toeplitz_noise
          >>> kernel, like = toeplitz_noise.Independent(period=4), jnp.zeros(3)
          >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
          >>> noise, state = kernel.increment(key, (), 0, like, kernel.laws(1000))
          >>> noise.high.shape, noise.low is None
          ((3,), True)
        """
        drawn = node_noise.draw(key, node_noise.as_step(step), like, laws)
        return jax.tree.map(fixed_point.Fixed, drawn), state

    def rounding(self) -> float:
        """Returns 0: nothing is multiplied.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.Independent(period=4).rounding()
          0.0
        """
        return 0.0  # Nothing is multiplied.

    def coefficients(self) -> np.ndarray:
        """Returns 1, 0, 0, ..., float64 (period,).

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.Independent(period=4).coefficients().tolist()
          [1.0, 0.0, 0.0, 0.0]
        """
        return np.eye(1, self.period)[0]

    def inverse_coefficients(self) -> np.ndarray:
        """Returns 1, 0, 0, ..., float64 (period,).

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.Independent(period=4).inverse_coefficients().tolist()
          [1.0, 0.0, 0.0, 0.0]
        """
        return self.coefficients()


@dataclasses.dataclass(frozen=True)
class _Stored(_Toeplitz):
    """Base of the kernels that keep the last increments, as many as C has bands below one.

    State: ``bands - 1`` rows (at least one) of two words for each leaf.
    """

    @property
    def _lags(self) -> int:
        """Number of earlier increments that a step reads."""
        raise NotImplementedError

    def _below_one(self) -> np.ndarray:
        """Returns c_1, c_2, ... before they are rounded, float64 (at least _lags,)."""
        raise NotImplementedError

    def init(self, like: Any) -> Any:
        """Returns zeros; no step reads a row before it was written in the same period.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.SquareRoot(period=4).init(jnp.zeros(3)).high.shape
          (3, 3)
        """
        return node_noise.fine_zeros(like, max(self._lags, 1))

    def increment(
        self, key: jax.Array, state: Any, step: Step, like: Any, laws: Law
    ) -> tuple[Any, Any]:
        """Returns one step's noise and the next state, as every prefix-noise kernel does.

        See :meth:`jaxdp.kernels.prefix_noise.PrefixNoise.increment`.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> from jaxdp.kernels import threefry, toeplitz_noise
          >>> kernel, like = toeplitz_noise.SquareRoot(period=4), jnp.zeros(3)
          >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
          >>> state, laws = kernel.init(like), kernel.laws(1000)
          >>> noise, state = kernel.increment(key, state, 0, like, laws)
          >>> noise.high.shape, noise.low.dtype
          ((3,), dtype('uint32'))
        """
        step, size = node_noise.as_step(step), np.int32(max(self._lags, 1))
        c = jnp.asarray(self._numerators())

        def carry_over(s: jax.Array, noise: Any) -> Any:
            c_lag = c[step - s]
            row = jax.tree.map(lambda rows: rows[s % size], state)
            part = tree_map(lambda x: fixed_point.scaled(x, c_lag), row)
            return tree_map(fixed_point.sub, noise, part)

        new = node_noise.fine(key, step, like, laws)
        first = jnp.maximum(step - np.int32(self._lags), 0)
        noise = jax.lax.fori_loop(first, step, carry_over, new)
        # In the place of the oldest, which nobody reads again.
        state = jax.tree.map(
            lambda rows, n: jax.lax.dynamic_update_index_in_dim(
                rows, n, step % size, axis=0
            ),
            state,
            noise,
        )
        return noise, state

    def rounding(self) -> float:
        """Returns one ulp for each earlier step that a step reads.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.SquareRoot(period=4).rounding() * 2**32
          3.0
        """
        return self._lags * ULP

    def coefficients(self) -> np.ndarray:
        """Returns the first column of C as it is used: multiples of ``2**-32``.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.SquareRoot(period=4).coefficients().round(6).tolist()
          [1.0, 0.5, 0.375, 0.3125]
        """
        return np.concatenate([np.ones(1), self._numerators()[1:] * ULP])

    def inverse_coefficients(self) -> np.ndarray:
        """Solves ``C d = e_0`` step by step.

        No error grows: coefficients that fall have zeros outside of the unit circle alone.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> kernel = toeplitz_noise.Banded(period=4, column=(1.0, 0.5))
          >>> kernel.inverse_coefficients().tolist()
          [1.0, -0.5, 0.25, -0.125]
        """
        c = self.coefficients()[1 : self._lags + 1][::-1]
        d = np.zeros(self._lags + self.period)  # Zeros before the first.
        d[self._lags] = 1.0
        for t in range(self._lags + 1, len(d)):
            d[t] = -c @ d[t - self._lags : t]
        return d[self._lags :]

    def _numerators(self) -> np.ndarray:
        """Returns the coefficients over ``2**-32``, uint32; 0 for the first, which is 1."""
        below_one = np.zeros(self.period)
        below_one[1 : self._lags + 1] = self._below_one()[: self._lags]
        # The largest below one in place of what rounds to it: 32 bits do not hold one.
        return np.minimum(np.rint(ONE * below_one), ONE - 1).astype(np.uint32)


@dataclasses.dataclass(frozen=True)
class SquareRoot(_Stored):
    """C is the square root of the matrix of ones: 1, 1/2, 3/8, 5/16, ...

    Close to the least possible worst variance, for the memory of a whole period. Of a
    banded C the coefficients beyond the bands are 0: steps that are ``bands`` or more apart
    have nothing in common, at the memory of so many increments.

    State: ``bands - 1`` rows (``period - 1`` without bands; at least one) of two words for
    each leaf, the last increments.

    Attributes:
      period: steps of one period.
      bands: how many coefficients are not 0; None for all.

    Example:
      >>> from jaxdp.kernels import toeplitz_noise
      >>> kernel = toeplitz_noise.SquareRoot(period=4)
      >>> kernel.coefficients().round(4).tolist()
      [1.0, 0.5, 0.375, 0.3125]
      >>> kernel.strategy().shape
      (4, 4)
      >>> toeplitz_noise.SquareRoot(period=4, bands=2).coefficients().tolist()
      [1.0, 0.5, 0.0, 0.0]

    References:
      H. Fichtenberger, M. Henzinger, J. Upadhyay, Constant matters, 2023; N. Kalinin,
      C. Lampert, Banded square root matrix factorization, 2024.
    """

    bands: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands is not None:
            node_noise.check_period(self.bands, "bands")

    @property
    def _lags(self) -> int:
        return min(self.bands or self.period, self.period) - 1

    def inverse_coefficients(self) -> np.ndarray:
        """Returns those of ``(1 - x)**0.5``, corrected for rounded coefficients of C.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> kernel = toeplitz_noise.SquareRoot(period=4)
          >>> kernel.inverse_coefficients().round(6).tolist()
          [1.0, -0.5, -0.125, -0.0625]
        """
        if self._lags < self.period - 1:
            return super().inverse_coefficients()
        lag = np.arange(1, self.period)
        exact = np.concatenate([np.ones(1), np.cumprod((2 * lag - 3) / (2 * lag))])
        # To first order in the error E: -C^-1 E C^-1, of which C^-2 is 1 - x. The second
        # order is below the precision of float64.
        error = self.coefficients()[1:] - self._below_one()
        return exact - np.diff(error, prepend=[0.0, 0.0])

    def _below_one(self) -> np.ndarray:
        """Solves ``c_l = c_{l-1} (2 l - 1) / (2 l)``."""
        lag = np.arange(1, self.period)
        return np.cumprod((2 * lag - 1) / (2 * lag))


@dataclasses.dataclass(frozen=True)
class Banded(_Stored):
    """C has a first column of its own, that falls from 1 to 0 over a few bands.

    No number is negative, so that one record that is read again moves ``C x`` by no more
    than :meth:`repeated_norm`, whatever the numbers are; and none is larger than the one
    before it, so that no draw grows as it is carried on. They are rounded to multiples of
    ``2**-32`` below 1, and the norms are those of the rounded numbers.

    State: a row of two words for each leaf and number after the first, at least one.

    Attributes:
      period: steps of one period.
      column: 1 and the numbers after it; those beyond the period are not used.

    Example:
      >>> from jaxdp.kernels import toeplitz_noise
      >>> kernel = toeplitz_noise.Banded(period=4, column=(1.0, 0.75, 0.5))
      >>> kernel.coefficients().tolist()
      [1.0, 0.75, 0.5, 0.0]
      >>> round(kernel.repeated_norm(3) ** 2, 6)
      2.8125

    References:
      C. Choquette-Choo, A. Ganesh, R. McKenna, H. B. McMahan, K. Rush, A. Thakurta,
      Z. Xu, (Amplified) Banded Matrix Factorization, 2023.
    """

    column: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "column", falling(self.column, "column"))

    @property
    def bands(self) -> int:
        """Number of coefficients that may not be 0."""
        return self._lags + 1

    @property
    def _lags(self) -> int:
        return min(len(self.column), self.period) - 1

    def _below_one(self) -> np.ndarray:
        return np.array(self.column[1:], np.float64)


def falling(column: Sequence[float], name: str) -> tuple[float, ...]:
    """Returns a first column of :class:`Banded`, checked.

    Raises:
      TypeError: it is no list, tuple or one-dimensional array of numbers.
      ValueError: it does not begin with 1, or a number is negative, or larger than the one
        before it.

    Example:
      >>> from jaxdp.kernels import toeplitz_noise
      >>> toeplitz_noise.falling([1, 0.5, 0.25], "column")
      (1.0, 0.5, 0.25)
      >>> toeplitz_noise.falling([1, 0.5, 0.75], "column")
      Traceback (most recent call last):
          ...
      ValueError: column must fall from 1, with no number below 0, got 0.75 at index 2
    """
    given = column.tolist() if isinstance(column, np.ndarray) else column
    if not (isinstance(given, list | tuple) and all(map(_is_real, given))):
        kind = type(column).__name__
        raise TypeError(f"{name} must be a list or tuple of numbers, got a {kind}")
    expected = f"{name} must fall from 1, with no number below 0, got"
    if not given:
        raise ValueError(f"{expected} none")
    for i, number in enumerate(given):
        if not 0 <= number <= (given[i - 1] if i else 1) or (i == 0 and number != 1):
            raise ValueError(f"{expected} {number!r} at index {i}")
    return tuple(float(number) + 0.0 for number in given)  # Of two zeros the positive.


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Buffered(_Toeplitz):
    """Buffered linear Toeplitz (BLT): c_l is a sum of few geometric sequences.

    ``c_l = sum_q output_scale[q] * buf_decay[q]**(l - 1)`` for l >= 1. Almost as good as
    the square root at one buffer of memory for each sequence and one draw a step. The
    numbers are rounded to multiples of ``2**-32``, and the norms are those of the rounded
    numbers.

    State: a tuple with one tree like the leaves, of two words a number, for each buffer.

    Attributes:
      period: steps of one period.
      buf_decay: in [0, 1], one for each buffer.
      output_scale: in [0, 1], one for each buffer.

    Example:
      >>> from jaxdp.kernels import toeplitz_noise
      >>> kernel = toeplitz_noise.Buffered(4, buf_decay=(0.5,), output_scale=(0.5,))
      >>> kernel.coefficients().tolist()
      [1.0, 0.5, 0.25, 0.125]

    References:
      K. Dvijotham, H. B. McMahan, K. Pillutla, T. Steinke, A. Thakurta, Efficient and
      near-optimal noise generation for streaming differential privacy, 2024.
    """

    buf_decay: tuple[float, ...]
    output_scale: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.buf_decay) == len(self.output_scale):
            raise ValueError(
                "buf_decay and output_scale must have one number for each buffer, got "
                f"{self.buf_decay} and {self.output_scale}"
            )
        for name in ("buf_decay", "output_scale"):
            numbers = tuple(float(x) for x in getattr(self, name))
            if not all(0 <= x <= 1 for x in numbers):
                raise ValueError(f"{name} must be in [0, 1], got {numbers}")
            object.__setattr__(self, name, numbers)

    def init(self, like: Any) -> Any:
        """Returns zeros, a tree a buffer: XLA updates separate arrays in one pass.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxdp.kernels import toeplitz_noise
          >>> len(toeplitz_noise.blt(period=100, num_buffers=2).init(jnp.zeros(3)))
          2
        """
        return tuple(node_noise.fine_zeros(like) for _ in self.buf_decay)

    def increment(
        self, key: jax.Array, state: Any, step: Step, like: Any, laws: Law
    ) -> tuple[Any, Any]:
        """Returns one step's noise and the next state, as every prefix-noise kernel does.

        See :meth:`jaxdp.kernels.prefix_noise.PrefixNoise.increment`.

        Example:
          >>> import jax.numpy as jnp
          >>> import numpy as np
          >>> from jaxdp.kernels import threefry, toeplitz_noise
          >>> kernel, like = toeplitz_noise.blt(period=4, num_buffers=1), jnp.zeros(3)
          >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
          >>> state, laws = kernel.init(like), kernel.laws(1000)
          >>> noise, state = kernel.increment(key, state, 0, like, laws)
          >>> noise.high.shape, len(state)
          ((3,), 1)
        """
        step = node_noise.as_step(step)
        noise = node_noise.fine(key, step, like, laws)

        # Not at step 0. On a CPU once in a loop, because XLA would otherwise draw again for
        # every buffer that the noise goes into; elsewhere such a loop asks the host, and
        # stores the noise. The buffers hold their scale: what it is multiplied with inside
        # the loop XLA would compute before, and store.
        def looped(noise: Any, state: Any) -> Any:
            once = jnp.minimum(step, 1)
            return jax.lax.fori_loop(0, once, lambda _, x: without(x, state), noise)

        def without(noise: Any, state: Any) -> Any:
            for buf in state:
                noise = tree_map(fixed_point.sub, noise, buf)
            return noise

        def at_once(noise: Any, state: Any) -> Any:
            none = lambda b: jnp.where(step == 0, jnp.zeros_like(b), b)  # noqa: E731
            return without(noise, jax.tree.map(none, state))

        noise = jax.lax.platform_dependent(noise, state, cpu=looped, default=at_once)

        def updated(buf: Any, theta: int, omega: int) -> Any:
            if theta == ONE:
                kept = jax.tree.map(
                    lambda b: jnp.where(step == 0, jnp.zeros_like(b), b), buf
                )
            else:
                k = jnp.where(step == 0, jnp.uint32(0), jnp.uint32(theta))
                kept = tree_map(lambda b: fixed_point.scaled(b, k), buf)
            new = tree_map(lambda n: fixed_point.scaled(n, omega), noise)
            return tree_map(fixed_point.add, kept, new)

        return noise, tuple(map(updated, state, *self._numerators()))

    def rounding(self) -> float:
        """Sums up to two ulps for each step and buffer, which decay with it.

        A product by 0 or by 1 has no rounding.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> toeplitz_noise.blt(period=100, num_buffers=2).rounding() < 1e-7
          True
        """
        total = 0.0
        for theta, omega in zip(*self._numerators(), strict=True):
            each = sum(k not in (0, ONE) for k in (theta, omega))
            powers = np.power(theta / ONE, np.arange(self.period - 1))
            total += each * float(powers.sum())
        return total * ULP

    def largest_norm(self) -> float:
        """Returns the std of the longest increment or buffer.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> kernel = toeplitz_noise.blt(period=100, num_buffers=2)
          >>> bool(kernel.largest_norm() >= kernel.increment_norms()[-1])
          True
        """
        inverse = self.inverse_coefficients()
        decay, scale = self._used()
        longest, buffers = np.zeros(len(decay)), np.zeros(len(decay))
        for impulse in inverse:
            buffers = decay * buffers + scale * impulse
            longest += buffers**2
        return float(np.sqrt(max(np.square(inverse).sum(), *longest)))

    def coefficients(self) -> np.ndarray:
        """Returns the first column of C, float64 (period,).

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> kernel = toeplitz_noise.Buffered(4, buf_decay=(0.5,), output_scale=(0.5,))
          >>> kernel.coefficients().tolist()
          [1.0, 0.5, 0.25, 0.125]
        """
        decay, scale = self._used()
        powers = decay[:, None] ** np.arange(self.period - 1)
        return np.concatenate([np.ones(1), scale @ powers])

    def inverse_coefficients(self) -> np.ndarray:
        """Runs the recursion of :meth:`increment` on one impulse.

        Example:
          >>> from jaxdp.kernels import toeplitz_noise
          >>> kernel = toeplitz_noise.Buffered(4, buf_decay=(0.5,), output_scale=(0.5,))
          >>> kernel.inverse_coefficients().tolist()
          [1.0, -0.5, 0.0, 0.0]
        """
        decay, scale = self._used()
        inverse, buffers = np.eye(1, self.period)[0], np.zeros(len(decay))
        for t in range(self.period):
            inverse[t] -= scale @ buffers
            buffers = decay * buffers + inverse[t]
        return inverse

    def _numerators(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the decays and the scales over ``2**-32``, as integers."""
        over = fixed_point.numerator
        return tuple(map(over, self.buf_decay)), tuple(map(over, self.output_scale))

    def _used(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the decays and the scales that :meth:`increment` uses, on its grid."""
        decay, scale = np.array(self._numerators(), np.float64) / ONE
        return decay, scale


# buf_decay and output_scale by number of buffers and period, for the least worst variance
# at equal sensitivity: max_t ||B_t||^2 max_i ||C e_i||^2. For two and three buffers from
# jax_privacy's buffered_toeplitz.optimize(error="max"); for one by Nelder-Mead (scipy) on
# the closed form of that product over (logit of the decay, log of the scale).
_Numbers = tuple[tuple[float, ...], tuple[float, ...]]
BLT_NUMBERS: dict[int, dict[int, _Numbers]] = {
    1: {
        16: ((0.901973,), (0.417591,)),
        64: ((0.958279,), (0.320734,)),
        256: ((0.983589,), (0.222320,)),
        1024: ((0.993611,), (0.146771,)),
        4096: ((0.997495,), (0.095001,)),
    },
    2: {
        16: ((0.954379, 0.531683), (0.270984, 0.227183)),
        64: ((0.984230, 0.727093), (0.170608, 0.310256)),
        256: ((0.994583, 0.844668), (0.105866, 0.333301)),
        1024: ((0.998112, 0.908825), (0.066638, 0.319272)),
        4096: ((0.999366, 0.947020), (0.041015, 0.286144)),
    },
    3: {
        16: ((0.970866, 0.735003, 0.291519), (0.214471, 0.188548, 0.096949)),
        64: ((0.989426, 0.875359, 0.467513), (0.134325, 0.182599, 0.182299)),
        256: ((0.996641, 0.947412, 0.622771), (0.078129, 0.154817, 0.260423)),
        1024: ((0.998973, 0.978560, 0.743283), (0.044441, 0.120545, 0.311390)),
        4096: ((0.999682, 0.991003, 0.826365), (0.025529, 0.090954, 0.331544)),
    },
}


def blt(period: int, num_buffers: int) -> Buffered:
    """Makes the kernel with the numbers of :data:`BLT_NUMBERS`.

    Those of the smallest period in the table that is not below ``period``, of the largest
    beyond it. They are valid for any period, whose norms are exact, and best for their own.

    Args:
      period: steps of one period.
      num_buffers: 1, 2 or 3.

    Raises:
      ValueError: no such number of buffers, or a bad period.

    Example:
      >>> from jaxdp.kernels import toeplitz_noise
      >>> toeplitz_noise.blt(period=100, num_buffers=1)
      Buffered(period=100, buf_decay=(0.983589,), output_scale=(0.22232,))
    """
    node_noise.check_period(period)
    if num_buffers not in BLT_NUMBERS:
        raise ValueError(f"num_buffers must be 1, 2 or 3, got {num_buffers}")
    table = BLT_NUMBERS[num_buffers]
    fits = min((t for t in table if t >= period), default=max(table))
    return Buffered(period, *table[fits])
