"""Base of the vertex-gradient problems: bounds, grid, checks and microbatches."""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.core import validate
from jaxdp.kernels import clip, finite_difference
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.polytope import L1Ball, Polytope, Simplex

Domain = Simplex | L1Ball | Polytope

_FOLDS = 16


@dataclasses.dataclass(frozen=True)
class Bound:
    """Clip and grid of one record's contribution to a coordinate of a sum.

    Attributes:
      clip: C: a coordinate is clipped to ``[-C, C]``; in units of the gradient, between
        1e-30 and 1e30.
      bits: k in 1..16: one unit of the sum is ``C * 2**-k``.

    Raises:
      TypeError, ValueError: another clip or number of bits.
    """

    clip: float
    bits: int

    def __post_init__(self) -> None:
        validate.positive(clip=self.clip)
        if not 1e-30 <= self.clip <= 1e30:  # Beyond, float32 has no room for 2**k / C.
            raise ValueError(f"clip must lie in [1e-30, 1e30], got {self.clip!r}")
        validate.integer(at_least=1, at_most=16, bits=self.bits)


class Query(NamedTuple):
    """Query to the data, with all its public inputs."""

    x: jax.Array  # (p_x,) float32
    y: jax.Array | None  # (p_y,) float32; None: minimise over x alone
    bound_x: Bound
    bound_y: Bound | None
    center: bool


class VertexGradients(abc.ABC):
    """Saddle-point or convex problem whose vertex gradients can be summed.

    Attributes:
      domain_x: polytope of the minimising player; None is the simplex of x's length.
      domain_y: of the maximising player.
    """

    domain_x: Domain | None
    domain_y: Domain | None

    def __call__(self, *args: Any) -> jax.Array:
        """Returns the losses (B,): ``problem(x, y, batch)``, or ``problem(x, batch)``.

        The points may be a pair, ``problem((x, y), batch)``: parameters of which
        :class:`jaxdp.plans.DPGD` takes the gradient.
        """
        *points, batch = args
        if len(points) == 1 and isinstance(points[0], tuple | list):
            (points,) = points
        return self._values(*points, batch)

    def _values(self, *args: Any) -> jax.Array:
        """Returns the losses (B,) at the points of the players, of a batch."""
        raise NotImplementedError

    def gradient_sums(
        self,
        x: Any,
        y: Any,
        batch: Any,
        mask: jax.Array,
        bound_x: Bound,
        bound_y: Bound | None,
        *,
        center: bool = False,
        microbatch_size: int | None = None,
        axis_name: AxisName | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Sums the records' bounded vertex gradients, for both players.

        Raw partial derivatives: x descends along its own, y ascends along its own.

        Args:
          x: point ``(p_x,)`` of the minimising player, in the ambient space.
          y: point ``(p_y,)`` of the maximising player; None minimises over x alone.
          batch: pytree with leading axis B.
          mask: bool ``(B,)``; a False row contributes zero whatever it holds.
          bound_x: clip and grid of x's vertex gradients.
          bound_y: of y's; None exactly where y is.
          center: subtract from a record's vertex gradient the middle of its range (half
            the largest plus half the smallest) before it is clipped. A shift common to
            all vertices changes no iterate, and half the clip then suffices.
          microbatch_size: records differentiated at once; None is all. The sums are of
            integers, each of one record: the same to the bit where the loss of a record
            is.
          axis_name: mesh axis, or several, whose devices share the records, as in
            :func:`jaxdp.dpzero`; None is one device.

        Returns:
          int32 ``(m_x,)`` in units of ``bound_x.clip * 2**-bound_x.bits`` and int32
          ``(m_y,)``, or None without y. Not private: one record moves a coordinate by at
          most ``2**bits`` units (``2 * 2**bits`` if replaced), whatever it holds and
          whatever the losses are. A record with a NaN or an infinity in a loss or in the
          gradient of either player counts zero for both.

        Raises:
          TypeError, ValueError: shapes that do not fit, a bound without a player or a
            player without a bound, or so many records that a sum could leave int32.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxdp
          >>> from jaxdp.saddle.oracles import Bound
          >>> game = jaxdp.MatrixGame(jnp.array([[0.0, 1.0], [-1.0, 0.0]]))
          >>> records = jnp.zeros((3, 2)), jnp.zeros((3, 2))  # They add nothing.
          >>> x, bound = jnp.array([0.5, 0.5]), Bound(clip=1.0, bits=8)
          >>> mask = jnp.ones(3, bool)
          >>> sums = game.gradient_sums(x, x, records, mask, bound, bound)
          >>> [(total / 2**8 / 3).tolist() for total in sums]  # Means; not private.
          [[0.5, -0.5], [-0.5, 0.5]]
        """
        rows = finite_difference.num_rows(batch)
        if jnp.shape(mask) != (rows,) or jnp.result_type(mask) != jnp.bool_:
            raise ValueError(
                f"mask must be booleans of shape ({rows},), got "
                f"{jnp.result_type(mask)} of shape {jnp.shape(mask)}"
            )
        validate.instance(bool, center=center)
        if (y is None) != (bound_y is None):
            raise ValueError(
                "bound_y must be given exactly where y is, got "
                f"y={'None' if y is None else 'a point'} and bound_y={bound_y!r}"
            )
        point_x = _point("x", x, self.domain_x)
        _fits("bound_x", bound_x, rows)
        point_y = None if y is None else _point("y", y, self.domain_y)
        if bound_y is not None:
            _fits("bound_y", bound_y, rows)
        if microbatch_size is not None:
            validate.integer(at_least=1, microbatch_size=microbatch_size)
        points = finite_difference.on_each((point_x, point_y), axis_name)
        query = Query(points[0], points[1], bound_x, bound_y, center)

        def total(part: tuple[Any, jax.Array]) -> jax.Array:
            sums = self._sums(query, *part)
            return jnp.concatenate([s for s in sums if s is not None])

        totals = finite_difference.sum_microbatches(
            total, (batch, mask), microbatch_size, axis_name
        )
        m_x = query.x.shape[0] if self.domain_x is None else self.domain_x.num_vertices
        return totals[:m_x], None if y is None else totals[m_x:]

    @abc.abstractmethod
    def _sums(
        self, query: Query, records: Any, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes the two sums over a part of the batch: int32 (m_x,), (m_y,) or None."""

    def _row_sums(
        self, query: Query, rows_x: jax.Array, rows_y: jax.Array | None, ok: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes the two sums of gradients (B, p_x), (B, p_y) over records that count."""
        rows_x, ok = vertex_rows(self.domain_x, rows_x, ok)
        sum_y = None
        if rows_y is not None and query.bound_y is not None:
            rows_y, ok = vertex_rows(self.domain_y, rows_y, ok)
            sum_y = row_sums(self.domain_y, rows_y, ok, query.bound_y, query.center)
        return row_sums(self.domain_x, rows_x, ok, query.bound_x, query.center), sum_y


def _point(name: str, point: Any, domain: Domain | None) -> jax.Array:
    """Returns the point in float32, after checking its length against its domain."""
    shape = jnp.shape(point)
    if len(shape) != 1 or (domain is not None and shape != (domain.dim,)):
        wanted = "(p,)" if domain is None else f"({domain.dim},)"
        raise ValueError(f"{name} must be a vector of shape {wanted}, got {shape}")
    return jnp.asarray(point, jnp.float32)


def _fits(name: str, bound: Bound, rows: int) -> None:
    validate.instance(Bound, **{name: bound})
    if rows * 2**bound.bits >= 2**31:
        raise ValueError(
            f"{name} must have so few bits that the sum of {rows} records fits int32, "
            f"got {bound.bits}"
        )


def finite(rows: jax.Array) -> jax.Array:
    """Returns True for each of the rows (B, m) that is finite throughout: bool (B,).

    Not by a maximum, which passes over a NaN on CPU, nor by a product with zero, which
    XLA merges with a constant factor before it.
    """
    return jnp.isfinite(rows).all(axis=-1)


def vertex_rows(
    domain: Domain | None, gradient: jax.Array, ok: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the vertex gradients of the records, and which of them count.

    Args:
      domain: of the player.
      gradient: float ``(B, p)``, in the ambient space; may be anything.
      ok: bool ``(B,)``: which records count so far.

    Returns:
      float32 ``(B, m)``, for an l1 ball only its first half (the other is the negative),
      and bool ``(B,)``. Rows that do not count may be anything.
    """
    rows = gradient.astype(jnp.float32)
    ok = ok & finite(rows)
    if domain is None or isinstance(domain, Simplex):
        return rows, ok
    rows = jnp.where(ok[:, None], rows, 0)  # Before a product: 0 * NaN is NaN.
    if isinstance(domain, L1Ball):
        rows = rows * jnp.float32(domain.radius)
    else:
        rows = domain.vertex_gradient(rows)
    return rows, ok & finite(rows)


def to_grid(x: jax.Array, ok: jax.Array, bound: Bound) -> jax.Array:
    """Clips each number and rounds it to nearest: integers of size at most 2**bits."""
    limit = 2**bound.bits
    units = jnp.round(clip.clip_scalar(x, bound.clip) * jnp.float32(limit / bound.clip))
    return jnp.where(ok, jnp.clip(units, -limit, limit), 0).astype(jnp.int32)


def row_sums(
    domain: Domain | None, rows: jax.Array, ok: jax.Array, bound: Bound, center: bool
) -> jax.Array:
    """Sums the bounded rows that count: (m,); rows as :func:`vertex_rows` gives."""
    if center:
        rows = rows - middle(domain, rows)
    return mirrored(domain, sum_units(lambda x: x, rows, ok, bound))


def sum_units(
    rows_of: Callable[[Any], jax.Array], parts: Any, ok: jax.Array, bound: Bound
) -> jax.Array:
    """Sums ``to_grid(rows_of(parts))`` over records: int32 (m,).

    Args:
      rows_of: from some records' part of ``parts`` to their rows; elementwise.
      parts: pytree with leading axis B.
      ok: bool ``(B,)``: which records count.
      bound: of one coordinate of one record.
    """

    def units(some: slice) -> jax.Array:
        part, kept = jax.tree.map(lambda z: z[some], (parts, ok))
        return to_grid(rows_of(part), kept[:, None], bound)

    return _folded(units, len(ok))


def _folded(rows: Callable[[slice], jax.Array], count: int) -> jax.Array:
    """Sums ``count`` rows by additions written out, of a sixteenth of them each.

    XLA on CPU stores everything that a reduction over the first axis sums, and takes up
    to twelve times as long.
    """
    if count <= _FOLDS:
        return functools.reduce(operator.add, rows(slice(count)))
    size = count // _FOLDS
    blocks = [rows(slice(i * size, (i + 1) * size)) for i in range(_FOLDS)]
    left = jnp.concatenate(
        [functools.reduce(operator.add, blocks), rows(slice(_FOLDS * size, count))]
    )
    return _folded(lambda some: left[some], len(left))


def middle(domain: Domain | None, rows: jax.Array) -> jax.Array:
    """Returns the middle of each row's range, (B, 1); of an l1 ball's rows it is zero."""
    if isinstance(domain, L1Ball):
        return jnp.zeros_like(rows[:, :1])
    # Halved first: the sum of two large numbers may overflow where the middle does not.
    highest = rows.max(axis=-1, keepdims=True)
    return highest / 2 + rows.min(axis=-1, keepdims=True) / 2


def mirrored(domain: Domain | None, total: jax.Array) -> jax.Array:
    """Returns the sums of all vertices from those that :func:`vertex_rows` gave.

    Rounding to nearest is odd, so the negatives' sum is the negative sum.
    """
    if isinstance(domain, L1Ball):
        return jnp.concatenate([total, -total])
    return total


def check_losses(name: str, losses: Any, shape: tuple[int | None, ...]) -> jax.Array:
    """Checks the losses of a batch of one record and returns them in float32.

    Raises:
      ValueError: another shape (None is any length), or no floating dtype.
    """
    losses = jnp.asarray(losses)
    fits = len(losses.shape) == len(shape) and all(
        want is None or want == got
        for want, got in zip(shape, losses.shape, strict=True)
    )
    if not fits or not jnp.issubdtype(losses.dtype, jnp.floating):
        wanted = ("B", *("d_y" if want is None else str(want) for want in shape[1:]))
        raise ValueError(
            f"{name} must return floating losses of shape ({', '.join(wanted)}), got "
            f"{losses.dtype} of shape {losses.shape} for one record"
        )
    return losses.astype(jnp.float32)
