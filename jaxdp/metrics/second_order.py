r"""Second-order stationarity of a point, and the effective rank of its Hessian.

A point is an alpha-second-order stationary point (SOSP) of F, whose Hessian is
rho-Lipschitz, if

.. math:: \|\nabla F(x)\| \le \alpha \quad\text{and}\quad
  \nabla^2F(x) \succeq -\sqrt{\rho\alpha}\,I,

so that the least alpha for which it is one is

.. math:: \hat\alpha(x) = \max\Big\{\|\nabla F(x)\|,\
  \frac{\max(0,-\lambda_{\min}(\nabla^2F(x)))^2}{\rho}\Big\}.

Measure the expected F, where it is known (:func:`sosp_alpha_of`), or the mean over public
records that no run has read (:func:`sosp_alpha`). It is an exact statistic of the records:
not private. The promise of a private run is the alpha of its certificate.

The *effective rank* of a Hessian A (:func:`effective_rank`) is
:math:`\operatorname{tr}|A|/\|A\|`: the least r for which some H has
:math:`-H\preceq A\preceq H` and trace at most :math:`r\|A\|`.

References:
  Liu and Talwar, Adaptive batch size for privately finding second-order stationary
  points, 2025: the measure. Van Dorsselaer, Hochstenbach and van der Vorst, Computing
  probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos
  method, 2000: the other side of a Ritz value. Hutchinson, A stochastic estimator of the
  trace of the influence matrix, 1990; Ubaru, Chen and Saad, Fast estimation of tr(f(A))
  via stochastic Lanczos quadrature, 2017.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.special
from jax.flatten_util import ravel_pytree

from jaxdp.core import validate
from jaxdp.core.types import ValueFn
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.metrics.parts import Detailed, as_vector

#: How probable it is that the random start of Lanczos misleads a bound.
_FAILURE = 1e-6
#: Columns of a dense Hessian that are formed at once.
_COLUMNS = 32
#: Beside a matrix's own size: a norm that is rounding.
_NOTHING = 1e-13


class SospAlpha(Detailed):
    """Least alpha of a point: a float with details of its computation.

    The number is at least the true one. It is the true one, but for rounding, where the
    Hessian was dense, and :attr:`lower` says how much smaller it may be where it was not.

    Attributes:
      gradient_norm: of F.
      min_eigenvalue: of the Hessian. From Lanczos it is a Ritz value: at least the least
        eigenvalue, never below it.
      min_eigenvalue_lower: at most the least eigenvalue. From Lanczos it is so with
        probability at least 1 - 1e-6 over the random start, for any spectrum.
      lower: the least alpha if ``min_eigenvalue`` were exact: at most the true one.
      num_products: Hessian-vector products that it took.
    """

    gradient_norm: float
    min_eigenvalue: float
    min_eigenvalue_lower: float
    lower: float
    num_products: int

    @property
    def alpha(self) -> float:
        """Value of alpha as a plain float."""
        return float(self)


def sosp_alpha(
    value_fn: ValueFn,
    x: Any,
    data: Any,
    hess_lip: float,
    *,
    batch_size: int = 512,
    max_dense_dim: int = 500,
    num_steps: int = 128,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> SospAlpha:
    """Computes the least alpha for which x is an alpha-SOSP of the mean loss over records.

    Everything is computed in float64, whatever the dtype of x and of the records (what
    ``value_fn`` itself casts to a smaller one stays that imprecise). Up to
    ``max_dense_dim`` parameters the Hessian is formed, and its eigenvalues are exact.
    Beyond, Lanczos runs on Hessian-vector products with full reorthogonalisation, on the
    host, in memory of ``num_steps`` vectors like x.

    Args:
      value_fn: ``(params, batch) -> losses (B,)``, twice differentiable, hashable; the
        same object is compiled once.
      x: pytree of floating arrays, d elements in all.
      data: pytree of arrays with one leading axis, n >= 1 records.
      hess_lip: rho > 0, a Lipschitz constant of the mean loss's Hessian.
      batch_size: records read at once; bounds the memory.
      max_dense_dim: the largest d for which the Hessian is formed.
      num_steps: of Lanczos, at most.
      tolerance: Lanczos ends where the interval for the least eigenvalue is narrower than
        this times the largest absolute Ritz value.
      seed: of the start of Lanczos; public.

    Returns:
      A :class:`SospAlpha`, which is a float. It is a statistic of the records, and not
      private.

    Raises:
      TypeError: a leaf of x that is not floating.
      ValueError: a number out of its range, records without a common leading axis, losses
        of another shape, or derivatives that are not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def losses(x, batch):
      ...     return (x[0] ** 2 - x[1] ** 2) / 2 + 0 * batch
      >>> x, data = jnp.zeros(2), jnp.zeros(3)
      >>> alpha = jaxdp.metrics.sosp_alpha(losses, x, data, hess_lip=1.0)
      >>> round(alpha, 4)  # A saddle: the gradient is 0, the least eigenvalue -1.
      1.0
    """
    validate.positive(hess_lip=hess_lip, tolerance=tolerance)
    validate.integer(batch_size=batch_size, num_steps=num_steps)
    validate.integer(at_least=0, max_dense_dim=max_dense_dim, seed=seed)
    # User code may mix its own float32 constants with the float64 parameters.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        point, data, flat = _checked(value_fn, x, data)
        of = value_fn, min(batch_size, num_rows(data)), point, data
        gradient_norm = float(np.linalg.norm(_finite("gradient", _gradient(*of))))

        def products(vectors: Any) -> np.ndarray:
            return _finite("Hessian", _products(*of, jnp.asarray(vectors)))

        if flat.size <= max_dense_dim:
            hessian = products(np.eye(flat.size))
            least = float(np.linalg.eigvalsh((hessian + hessian.T) / 2)[0])
            found = _LeastEigenvalue(least, least, flat.size)
        else:
            start = np.random.default_rng(seed).standard_normal(flat.size)
            found = _lanczos(
                lambda vector: products(vector[None])[0], start, num_steps, tolerance
            )

    def alpha(min_eigenvalue: float) -> float:
        return max(gradient_norm, max(0.0, -min_eigenvalue) ** 2 / hess_lip)

    return SospAlpha(
        alpha(found.lower),
        gradient_norm,
        found.value,
        found.lower,
        alpha(found.value),
        found.num_products,
    )


def sosp_alpha_of(
    function: Callable[[Any], Any],
    x: Any,
    hess_lip: float,
    *,
    max_dense_dim: int = 500,
    num_steps: int = 128,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> SospAlpha:
    """Computes the least alpha for which x is an alpha-SOSP of a function without records.

    Args:
      function: x -> F, shape=(): an expected loss in closed form. Hashable.
      x: pytree of floating arrays.
      hess_lip: rho > 0.
      max_dense_dim: as in :func:`sosp_alpha`, like all that follow.
      num_steps: of Lanczos, at most.
      tolerance: of Lanczos.
      seed: of the start of Lanczos; public.

    Returns:
      A :class:`SospAlpha`.

    Raises:
      TypeError, ValueError: as :func:`sosp_alpha`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def function(x):
      ...     return jnp.sum(x**2) / 2
      >>> x = jnp.array([0.3, 0.4])
      >>> round(jaxdp.metrics.sosp_alpha_of(function, x, hess_lip=1.0), 4)
      0.5
    """
    return sosp_alpha(
        _OneRecord(function),
        x,
        np.zeros(1),
        hess_lip,
        max_dense_dim=max_dense_dim,
        num_steps=num_steps,
        tolerance=tolerance,
        seed=seed,
    )


class EffectiveRank(Detailed):
    """Effective rank of a Hessian: a float with details of its computation.

    Attributes:
      lower: of a 95% interval by Student's t over the probes: for many of them it holds the
        number with that probability. The number itself where the Hessian was dense.
      upper: of that interval.
      absolute_trace: of the Hessian: the sum of the absolute eigenvalues.
      trace: of the Hessian. Far below ``absolute_trace`` where curvature is of both signs.
      norm: the largest absolute eigenvalue. From Lanczos it is that of a Ritz value, never
        above it, so the rank is rather too large.
      num_products: Hessian-vector products that it took.
    """

    lower: float
    upper: float
    absolute_trace: float
    trace: float
    norm: float
    num_products: int


def effective_rank(
    value_fn: ValueFn,
    x: Any,
    data: Any,
    *,
    batch_size: int = 512,
    max_dense_dim: int = 500,
    num_probes: int = 16,
    num_steps: int = 32,
    seed: int = 0,
) -> EffectiveRank:
    r"""Estimates the effective rank of the mean loss's Hessian over records, at a point.

    The theorems of :class:`jaxdp.plans.DPZero` ask for an r that bounds it wherever the run
    goes: take the largest of several points, and a margin. Needs no matrix: each of
    ``num_probes`` random sign vectors starts Lanczos, which gives a product with
    :math:`|A|` (Gauss quadrature; exact for ``num_steps`` distinct eigenvalues) and the
    largest absolute eigenvalue. Up to ``max_dense_dim`` parameters the Hessian is formed,
    and nothing is random.

    Args:
      value_fn: ``(params, batch) -> losses (B,)``, twice differentiable, hashable.
      x: pytree of floating arrays, d elements in all.
      data: pytree of arrays with one leading axis, n >= 1 public records.
      batch_size: records read at once; bounds the memory.
      max_dense_dim: the largest d for which the Hessian is formed.
      num_probes: m >= 2; the interval's width falls as 1 / sqrt(m).
      num_steps: of Lanczos, at most, for each probe; vectors like x that are held.
      seed: of the probes; public.

    Returns:
      An :class:`EffectiveRank`, which is a float in [1, d]. It is a statistic of the
      records, and not private.

    Raises:
      TypeError: a leaf of x that is not floating.
      ValueError: a number out of its range, records without a common leading axis, losses
        of another shape, derivatives that are not finite, or a Hessian of zero.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def losses(x, batch):
      ...     return (2 * x[0] ** 2 - x[1] ** 2 + x[2] ** 2) / 2 + 0 * batch
      >>> rank = jaxdp.metrics.effective_rank(losses, jnp.zeros(3), jnp.zeros(4))
      >>> round(rank, 4), round(rank.trace, 4), round(rank.norm, 4)
      (2.0, 2.0, 2.0)
    """
    validate.integer(batch_size=batch_size, num_steps=num_steps)
    validate.integer(at_least=2, num_probes=num_probes)
    validate.integer(at_least=0, max_dense_dim=max_dense_dim, seed=seed)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        point, data, flat = _checked(value_fn, x, data)
        of = value_fn, min(batch_size, num_rows(data)), point, data

        def products(vectors: Any) -> np.ndarray:
            return _finite("Hessian", _products(*of, jnp.asarray(vectors)))

        if flat.size <= max_dense_dim:
            hessian = products(np.eye(flat.size))
            values = np.linalg.eigvalsh((hessian + hessian.T) / 2)
            sums, norm = np.array([np.abs(values).sum()]), np.abs(values).max()
            trace, num_products = values.sum(), flat.size
        else:
            signs = np.random.default_rng(seed).choice(
                [-1.0, 1.0], (num_probes, flat.size)
            )
            found = [
                _quadrature(lambda v: products(v[None])[0], start, num_steps)
                for start in signs
            ]
            sums = np.array([q.absolute for q in found])
            trace = float(np.mean([q.plain for q in found]))
            norm = max(q.norm for q in found)
            num_products = sum(q.num_products for q in found)
    if not norm > 0:
        raise ValueError("value_fn must have a Hessian that is not zero at x; it is")
    half = 0.0
    if len(sums) > 1:
        far = scipy.special.stdtrit(len(sums) - 1, 0.975)
        half = far * np.std(sums, ddof=1) / math.sqrt(len(sums))
    mean = sums.mean()
    rank, lower, upper = (
        min(max(float(value / norm), 1.0), float(flat.size))
        for value in (mean, mean - half, mean + half)
    )
    parts = float(mean), float(trace), float(norm), num_products
    return EffectiveRank(rank, lower, upper, *parts)


class _Quadrature(NamedTuple):
    absolute: float  # a product with the absolute value of the matrix, from both sides
    plain: float  # with the matrix
    norm: float  # the largest absolute Ritz value
    num_products: int


def _quadrature(
    product: Callable[[np.ndarray], np.ndarray], start: np.ndarray, num_steps: int
) -> _Quadrature:
    """Computes products of a start vector with a matrix and its absolute value."""
    *_, (diagonal, norms) = _krylov(product, start, num_steps)
    ritz, vectors = scipy.linalg.eigh_tridiagonal(diagonal, norms[:-1])
    weights = float(start @ start) * vectors[0] ** 2
    return _Quadrature(
        float(weights @ np.abs(ritz)),
        float(weights @ ritz),
        float(np.abs(ritz).max()),
        len(diagonal),
    )


@dataclasses.dataclass(frozen=True)
class _OneRecord:
    """A function as the loss of a single record; equal where the functions are."""

    function: Callable[[Any], Any]

    def __call__(self, params: Any, batch: Any) -> jax.Array:
        return jnp.reshape(self.function(params), jnp.shape(batch))


class _LeastEigenvalue(NamedTuple):
    value: float  # at least the least eigenvalue
    lower: float  # at most
    num_products: int


def _lanczos(
    product: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    num_steps: int,
    tolerance: float,
) -> _LeastEigenvalue:
    r"""Bounds the least eigenvalue by an interval, from a start of standard normals (d,).

    k steps from the unit vector v end with Ritz values :math:`\theta_i` and norms
    :math:`\beta_j` of what was orthogonalised, and
    :math:`\|\prod_i(H-\theta_i)v\|=\prod_j\beta_j`. So for the least eigenvalue, with
    unit vector w, either :math:`\lambda=\theta_1` or

    .. math:: |\langle w,v\rangle|\,\prod_{i\le k}(\theta_i-\lambda)\le
      \prod_{j\le k}\beta_j.

    A uniform v has :math:`|\langle w,v\rangle|\ge c` but for a probability of
    :math:`c\sqrt{2(d-1)/\pi}`. That one event bounds the eigenvalue from below at every
    k, so that one may stop where the bound is close.
    """
    dim = len(start)
    overlap = _FAILURE * math.sqrt(math.pi / (2 * max(dim - 1, 1)))
    ritz, below, used = np.zeros(1), 0.0, 0
    for diagonal, norms in _krylov(product, start, num_steps):
        used = len(diagonal)
        ritz = np.asarray(scipy.linalg.eigvalsh_tridiagonal(diagonal, norms[:-1]))
        below = _distance_below(ritz, norms, overlap) if used < dim else 0.0
        if below <= tolerance * np.abs(ritz).max():
            break
    return _LeastEigenvalue(float(ritz[0]), float(ritz[0] - below), used)


def _krylov(
    product: Callable[[np.ndarray], np.ndarray], start: np.ndarray, num_steps: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs Lanczos; yields its diagonal and the norms of what was orthogonalised.

    It ends after as many steps as there are dimensions, or in an invariant subspace, to
    rounding.
    """
    dim = len(start)
    num_steps = min(num_steps, dim)
    basis = np.empty((num_steps, dim))
    diagonal, norms = np.empty(num_steps), np.empty(num_steps)
    vector = start / np.linalg.norm(start)
    for k in range(num_steps):
        basis[k] = vector
        vector = product(vector)
        diagonal[k] = vector @ basis[k]
        for _ in range(2):  # once loses orthogonality to rounding
            vector = vector - (basis[: k + 1] @ vector) @ basis[: k + 1]
        norms[k] = np.linalg.norm(vector)
        yield diagonal[: k + 1], norms[: k + 1]
        # What rounding leaves of nothing has no direction.
        if norms[k] <= _NOTHING * max(np.abs(diagonal[: k + 1]).max(), norms[0]):
            return
        vector = vector / norms[k]


def _distance_below(ritz: np.ndarray, norms: np.ndarray, overlap: float) -> float:
    r"""Solves :math:`\prod_i(\theta_i-\theta_1+\delta)=\prod_j\beta_j/c` for delta."""
    if not norms.all():
        return 0.0  # an invariant subspace, which the start does not leave
    target = np.log(norms).sum() - math.log(overlap)
    high = target / len(ritz)  # of log delta: no factor is below delta
    low = high - 100.0
    gaps = ritz - ritz[0]
    for _ in range(60):
        middle = (low + high) / 2
        if np.log(gaps + math.exp(middle)).sum() > target:
            high = middle
        else:
            low = middle
    return math.exp(high)


def _checked(value_fn: ValueFn, x: Any, data: Any) -> tuple[Any, Any, np.ndarray]:
    """Checks a point and its records; returns the former in float64, as a vector too."""
    flat = as_vector(x)
    point = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), x)
    data = jax.tree.map(jnp.asarray, data)
    num = num_rows(data, "data")
    if not num:
        raise ValueError("data must have records, got none")
    losses = jax.eval_shape(value_fn, point, _rows(data, jnp.arange(num)))
    if getattr(losses, "shape", None) != (num,):
        raise ValueError(f"value_fn must return losses of shape {(num,)}, got {losses}")
    return point, data, flat


def _finite(name: str, value: jax.Array) -> np.ndarray:
    found = np.asarray(value)
    if not np.isfinite(found).all():
        raise ValueError(f"value_fn must have a finite {name} at x; it has not")
    return found


def _rows(data: Any, rows: jax.Array) -> Any:
    """Returns records in float64; integers stay what they are."""

    def leaf_rows(leaf: jax.Array) -> jax.Array:
        found = leaf[rows]
        floating = jnp.issubdtype(found.dtype, jnp.floating)
        return found.astype(jnp.float64) if floating else found

    return jax.tree.map(leaf_rows, data)


def _mean(value_fn: ValueFn, x: Any, data: Any, rows: jax.Array) -> Any:
    """Returns the flat x, and a function: the part of the mean loss due to some rows."""
    flat, unravel = ravel_pytree(x)
    num = num_rows(data)
    # The last batch may be cut short: it repeats a record, which does not count.
    batch = _rows(data, jnp.minimum(rows, num - 1))

    def part(point: jax.Array) -> jax.Array:
        losses = value_fn(unravel(point), batch).astype(jnp.float64)
        return jnp.sum(jnp.where(rows < num, losses, 0)) / num

    return flat, part


def _sum_over_batches(
    fn: Callable[[jax.Array], jax.Array], data: Any, batch_size: int
) -> jax.Array:
    """Sums fn(rows) over batches that cover all records once."""
    num = num_rows(data)
    first = jnp.arange(batch_size)

    def body(total: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        return total + fn(start + first), None

    like = jax.eval_shape(fn, first)
    starts = jnp.arange(0, num, batch_size)
    return jax.lax.scan(body, jnp.zeros(like.shape, like.dtype), starts)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(value_fn: ValueFn, batch_size: int, x: Any, data: Any) -> jax.Array:
    def of_rows(rows: jax.Array) -> jax.Array:
        flat, part = _mean(value_fn, x, data, rows)
        return jax.grad(part)(flat)

    return _sum_over_batches(of_rows, data, batch_size)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _products(
    value_fn: ValueFn, batch_size: int, x: Any, data: Any, vectors: jax.Array
) -> jax.Array:
    """Computes the Hessian times each row of ``vectors``."""

    def of_rows(rows: jax.Array) -> jax.Array:
        flat, part = _mean(value_fn, x, data, rows)
        gradient = jax.grad(part)

        def product(vector: jax.Array) -> jax.Array:
            return jax.jvp(gradient, (flat,), (vector,))[1]

        return jax.lax.map(product, vectors, batch_size=min(_COLUMNS, len(vectors)))

    return _sum_over_batches(of_rows, data, batch_size)
