r"""Principal directions of records: a matrix factorisation that starts at a saddle.

The leading eigenvectors of the second moments :math:`S=E[zz^\top]` of unit vectors z are
the minimum of a smooth nonconvex loss that has strict saddles and no other local minima
(Ge, Jin and Zheng, No spurious local minima in nonconvex low rank problems, 2017). At U =
0 every record's gradient is exactly zero, and the Hessian's least eigenvalue is minus the
largest one of S: a method that only follows gradients stays there.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.models.losses import Rows

Array = jax.Array
Batch = tuple[Rows]

#: Columns of a factor that are so much shorter than the longest count as none.
_TINY = 1e-5


class SmoothConstants(NamedTuple):
    """Bounds on the derivatives of every record's loss.

    Attributes:
      lipschitz: G, of the gradient's norm.
      smoothness: M, of the Hessian's eigenvalues, in absolute value.
      hessian_lipschitz: rho, Lipschitz constant of the Hessian in operator norm.
      hessian_frobenius: of the Hessian's Frobenius norm.
    """

    lipschitz: float
    smoothness: float
    hessian_lipschitz: float
    hessian_frobenius: float


@dataclasses.dataclass(frozen=True)
class PrincipalDirections:
    r"""The factorisation loss of records z in the unit ball of :math:`\mathbb R^d`.

    .. math:: f(U; z) = \tfrac14\|UU^\top-zz^\top\|_F^2 - \tfrac14\|z\|^4
      = \tfrac14\|U^\top U\|_F^2 - \tfrac12\|U^\top z\|^2, \qquad
      U\in\mathbb R^{d\times r}

    Its expectation is least where the columns of U span r leading eigenvectors of S and
    :math:`UU^\top` has their eigenvalues: so :math:`\|U\|_F\le1` there, whatever the
    records. Exactly at U = 0 the gradient is zero and the Hessian is :math:`V\mapsto-SV`.

    Attributes:
      num_features: d.
      rank: r, from 1 to d.
      radius: R, of the ball :math:`\|U\|_F\le R` on which :attr:`constants` hold.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> problem = jaxdp.models.PrincipalDirections(num_features=3)
      >>> problem.dim, problem.start.shape, problem.constants.smoothness
      (3, (3, 1), 3.0)
    """

    num_features: int
    rank: int = 1
    radius: float = 1.0

    def __post_init__(self) -> None:
        validate.integer(num_features=self.num_features)
        validate.integer(at_most=self.num_features, rank=self.rank)
        validate.positive(radius=self.radius)

    @property
    def dim(self) -> int:
        """Number of parameters, d r."""
        return self.num_features * self.rank

    @property
    def start(self) -> Array:
        """Saddle at zero, of shape (d, r), float32. It depends on no record."""
        return jnp.zeros((self.num_features, self.rank), jnp.float32)

    def value_fn(self, params: Array, batch: Batch) -> Array:
        """Returns the losses of records.

        Args:
          params: U, (d, r), floating.
          batch: (z,), z of shape (B, d), as :func:`unit_rows` gives it.

        Returns:
          (B,), in the dtype of U.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> problem = jaxdp.models.PrincipalDirections(num_features=2)
          >>> z = jnp.array([[1.0, 0.0], [0.0, 1.0]])
          >>> problem.value_fn(jnp.array([[1.0], [0.0]]), (z,)).tolist()
          [-0.25, 0.25]
        """
        z = jnp.asarray(batch[0], params.dtype)
        gram = params.T @ params
        return jnp.sum(gram**2) / 4 - jnp.sum((z @ params) ** 2, axis=1) / 2

    @property
    def constants(self) -> SmoothConstants:
        r"""Bounds G, M and rho of every record in the unit ball, for :math:`\|U\|_F\le R`.

        The derivatives along V and W are

        .. math::
          \nabla f &= (UU^\top-zz^\top)U \\
          \nabla^2f[V] &= (UU^\top-zz^\top)V + (VU^\top+UV^\top)U \\
          \nabla^3f[V,W] &= (WU^\top+UW^\top)V + (VW^\top+WV^\top)U + (VU^\top+UV^\top)W .

        * A difference of positive semidefinite matrices is no longer than the longer one,
          so :math:`G\le R\max(R^2,1)`.
        * With A = V^T U, :math:`\langle V,\nabla^2f[V]\rangle=\|A\|^2+\mathrm{tr}A^2
          +\|VU^\top\|^2-\|z^\top V\|^2`. The first two are at least 0 together; the first
          three are at most :math:`R^2\|V\|^2` each. So eigenvalues are within
          :math:`[-1,3R^2]`, and :math:`M\le\max(3R^2,1)`.
        * The third derivative has six terms of at most :math:`R\|V\|\|W\|`:
          :math:`\rho\le6R`, attained by r = 1 along U.
        * Without the term in z the Hessian is positive semidefinite, and its Frobenius
          norm squared is :math:`(d+r+4)\|U^\top U\|_F^2+3\|U\|_F^4`. The term in z is
          another one of norm at most :math:`\sqrt r`. So the whole is at most
          :math:`\sqrt{(d+r+7)R^4+r}`.
        """
        d, r, square = self.num_features, self.rank, self.radius**2
        return SmoothConstants(
            lipschitz=self.radius * max(square, 1.0),
            smoothness=max(3 * square, 1.0),
            hessian_lipschitz=6 * self.radius,
            hessian_frobenius=math.sqrt((d + r + 7) * square**2 + r),
        )


def unit_rows(x: Rows) -> np.ndarray:
    """Scales records to unit length, each by itself.

    Args:
      x: (n, d).

    Returns:
      float32 (n, d), a little shorter than 1 for what is rounded; rows of zeros stay
      what they are, and one with a NaN is all NaN.

    Example:
      >>> import jaxdp
      >>> rows = jaxdp.models.unit_rows([[3.0, 4.0], [0.0, 0.0]])
      >>> [round(length, 4) for length in (rows**2).sum(axis=1).tolist()]
      [1.0, 0.0]
    """
    x = validate.real_array(x=x)
    with np.errstate(all="ignore"):  # A warning of NumPy's would tell of one record.
        length = np.linalg.norm(x, axis=1, keepdims=True)
        return (x / np.where(length == 0, 1, length) * (1 - 1e-7)).astype(np.float32)


def moment_deviation(x: Rows) -> float:
    r"""Returns the largest standard deviation of second moments along any direction.

    For unit vectors :math:`E\|(zz^\top-S)v\|^2=v^\top(S-S^2)v`. So every record's Hessian
    has this standard deviation along v at most, a difference of gradients it times the
    distance, and a gradient it times the norm of U. It is at most 1/2, whatever they are.

    Args:
      x: records (n, d), as :func:`unit_rows` gives them. A statistic of them: not private.

    Returns:
      The largest standard deviation over unit vectors v.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> z = np.array([[1.0, 0.0], [0.0, 1.0]])
      >>> jaxdp.models.moment_deviation(z)
      0.5
    """
    x = np.asarray(x, np.float64)
    values = np.linalg.eigvalsh(x.T @ x / len(x))
    return math.sqrt(max(float(np.max(values * (1 - values))), 0.0))


def captured_variance(params: Array, x: Rows) -> Array:
    r"""Computes the share of second moments that a factor's columns capture.

    Args:
      params: U, (d, r); only its span counts.
      x: records (n, d). A statistic of them: not private.

    Returns:
      float32 (): the share of what r orthogonal directions can hold at most, which those
      of these very records do; 0 for U = 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> z = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
      >>> best = jaxdp.models.captured_variance(jnp.array([[1.0], [0.0]]), z)
      >>> round(float(best), 3)
      1.0
    """
    x = jnp.asarray(x, jnp.float32)
    moments = jnp.matmul(x.T, x, precision="highest") / len(x)
    most = jnp.sum(jnp.linalg.eigvalsh(moments)[-params.shape[1] :])
    basis, lengths, _ = jnp.linalg.svd(params, full_matrices=False)
    spans = (lengths > _TINY * lengths[0]) & (lengths[0] > 0)
    held = jnp.sum(basis * jnp.matmul(moments, basis, precision="highest"), axis=0)
    return jnp.sum(jnp.where(spans, held, 0)) / most
