"""Bilinear games: the gradients are written down, nothing is differentiated."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.saddle.oracles.sums import Domain, Query, VertexGradients

Records = Literal["vectors", "matrices"]


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixGame(VertexGradients):
    r"""A game :math:`f(x,y;z)=x^\top Ay+s\,(\ldots)` that is linear in each player.

    ==============  =====================================  =========================
    ``records``     a batch                                :math:`(\ldots)`
    ==============  =====================================  =========================
    ``"vectors"``   a ``(B, p_x)`` and b ``(B, p_y)``      :math:`\langle a_z,x
                                                           \rangle+\langle b_z,y\rangle`
    ``"matrices"``  ``(B, p_x, p_y)``                      :math:`x^\top A_zy`
    ==============  =====================================  =========================

    Compared and hashed by identity, as it holds an array.

    Attributes:
      matrix: A, ``(p_x, p_y)``, finite and public: the part that all records share; None
        is zero.
      records: what a record is.
      scale: s, of the records' part.
      domain_x: polytope of x; None is the simplex.
      domain_y: polytope of y; None is the simplex.

    Raises:
      TypeError, ValueError: another kind of records, a matrix or a scale that is none.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> game = jaxdp.MatrixGame(jnp.array([[0.0, 1.0], [-1.0, 0.0]]), scale=0.5)
      >>> records = jnp.array([[1.0, 3.0]]), jnp.array([[0.0, -1.0]])  # a and b.
      >>> game(jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]), records).tolist()
      [1.0]
    """

    matrix: Any = None
    records: Records = "vectors"
    scale: float = 1.0
    domain_x: Domain | None = None
    domain_y: Domain | None = None

    def __post_init__(self) -> None:
        validate.one_of(get_args(Records), records=self.records)
        validate.positive(scale=self.scale)
        if self.matrix is None:
            return
        matrix = np.array(self.matrix, np.float32)
        if matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise ValueError(
                "matrix must be None or finite numbers of shape (p_x, p_y), got shape "
                f"{matrix.shape}"
            )
        matrix.setflags(write=False)
        object.__setattr__(self, "matrix", matrix)

    def _values(self, x: jax.Array, y: jax.Array, batch: Any) -> jax.Array:
        values = jnp.sum(self._gradients(x, y, batch)[0] * x, axis=-1)
        if self.records == "vectors":  # <b, y>: A y is in the gradient of x already.
            values = values + self.scale * jnp.sum(_float32(batch[1]) * y, axis=-1)
        return values

    def _sums(
        self, query: Query, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        if query.y is None:
            raise ValueError("y must be a point: a matrix game has two players")
        self._check(query.x.size, query.y.size, records)
        return self._row_sums(query, *self._gradients(query.x, query.y, records), mask)

    def _check(self, p_x: int, p_y: int, records: Any) -> None:
        wanted = [(p_x,), (p_y,)] if self.records == "vectors" else [(p_x, p_y)]
        shapes = [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(records)]
        if self.matrix is not None and self.matrix.shape != (p_x, p_y):
            raise ValueError(
                f"matrix must have shape {(p_x, p_y)}, that of the players' points, got "
                f"{self.matrix.shape}"
            )
        if shapes != wanted:
            raise ValueError(
                f"batch must have rows of shapes {wanted}, those of the players' points, "
                f"got {shapes}"
            )

    def _gradients(
        self, x: jax.Array, y: jax.Array, batch: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the gradients (B, p_x) and (B, p_y) of the records."""
        if self.records == "vectors":
            a, b = map(_float32, batch)
        else:
            # Summed record by record: how a matrix product rounds a row depends on
            # how many there are.
            of_records = _float32(batch)
            a = jnp.sum(of_records * y, axis=-1)
            b = jnp.sum(of_records * x[:, None], axis=-2)
        a, b = self.scale * a, self.scale * b
        if self.matrix is None:
            return a, b
        full = jax.lax.Precision.HIGHEST
        return (
            jnp.matmul(self.matrix, y, precision=full) + a,
            jnp.matmul(x, self.matrix, precision=full) + b,
        )


def _float32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)
