r"""Public records: a subspace or a scale of private steps, and gradients to mix with them.

Nothing here reads a private record. A basis and a scale are public parameters of the
loss; mixing is post-processing of a released gradient. So plans and their guarantee stay
what they are, whatever the public records are.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxdp.core import run_state, validate
from jaxdp.core.types import ValueFn
from jaxdp.kernels import clip, finite_difference
from jaxdp.kernels.sphere import path_str, wide

#: Singular values below this share of the largest are rounding errors of float32.
_TINY = 1e-6


def public_basis(
    value_fn: ValueFn,
    params: Any,
    public_records: Any,
    *,
    num_directions: int,
    trainable: run_state.Trainable = None,
) -> Any:
    r"""Computes an orthonormal basis of the leading directions of public gradients.

    The rows are the first m right singular vectors of the matrix of the gradients of
    single public records at ``params``: the subspace of dimension m that holds most of
    their squared lengths. :func:`in_subspace` moves parameters within it.

    Args:
      value_fn: losses (B,) of a batch, as for :func:`jaxdp.fit`; differentiated.
      params: pytree of arrays, at which gradients are taken. They must be public: initial
        ones, or parameters that were trained on public records.
      public_records: pytree of arrays with a leading axis of n records. **Public**: the
        basis shows them, and no plan pays for a private one among them.
      num_directions: m, at most n and at most the rank of the gradients.
      trainable: which leaves move, as for :func:`jaxdp.fit`.

    Returns:
      A pytree like ``params`` with leaves of shape (m, \*shape), float32 or wider; None in
      place of a leaf that does not move. Over all leaves together its m rows are
      orthonormal. It takes m d numbers for d moving elements, and n d numbers of 64 bits
      while it is made.

    Raises:
      TypeError, ValueError: a ``value_fn`` that is not callable; a ``trainable`` that is
        not as for :func:`jaxdp.fit`; ``num_directions`` is no integer, below 1, or larger
        than the rank; a gradient of a public record is not finite; losses of another shape
        than (B,); a moving leaf that is not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> losses = lambda w, x: (x @ w - 1) ** 2
      >>> records = jnp.array([[3.0, 4.0, 0.0], [6.0, 8.0, 0.0], [0.0, 0.0, 1.0]])
      >>> basis = jaxdp.public_basis(losses, jnp.zeros(3), records, num_directions=1)
      >>> [round(abs(x), 3) for x in basis[0].tolist()]
      [0.6, 0.8, 0.0]

    References:
      Zhou, Wu & Banerjee, `Bypassing the Ambient Dimension: Private SGD with Gradient
      Subspace Identification <https://arxiv.org/abs/2007.03813>`_, 2021.
    """
    validate.is_callable(value_fn=value_fn)
    num = finite_difference.num_rows(public_records, "public_records")
    validate.integer(at_most=num, num_directions=num_directions)
    moving, gradients, restore = _gradients(value_fn, params, public_records, trainable)

    @jax.jit
    def every(moving: list[jax.Array], records: Any) -> jax.Array:
        return jax.lax.map(lambda record: gradients(moving, record), records)

    rows = np.asarray(every(moving, public_records), np.float64)
    _check_finite(np.isfinite(rows).all(axis=1))
    _, lengths, directions = np.linalg.svd(rows, full_matrices=False)
    rank = int(np.sum(lengths > _TINY * lengths[0]))
    if num_directions > rank:
        raise ValueError(
            f"num_directions must be at most {rank}, the rank of the public gradients, "
            f"got {num_directions}"
        )
    return restore(directions[:num_directions])


class Subspace(NamedTuple):
    """A loss in other coordinates, and the way back.

    Returned by :func:`in_subspace` and :func:`in_scale`.

    Attributes:
      value_fn: ``value_fn(point, batch) -> losses (B,)``, for :func:`jaxdp.fit`.
      params: the initial point, all zeros: ``{"z": (m,)}``, and with a full scale
        ``"w"``, a tree like the moving parameters, which :func:`in_scale` has alone;
        float32 or wider.
      restore: ``restore(point) -> params`` of the model, in their own dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> losses = lambda w, x: (x @ w) ** 2
      >>> basis = jnp.array([[0.6, 0.8]])
      >>> subspace = jaxdp.in_subspace(losses, jnp.array([1.0, 2.0]), basis)
      >>> subspace.params["z"].shape, subspace.restore({"z": jnp.array([5.0])}).tolist()
      ((1,), [4.0, 6.0])
    """

    value_fn: ValueFn
    params: dict[str, Any]
    restore: Callable[[Any], Any]


def in_subspace(
    value_fn: ValueFn, params: Any, basis: Any, *, full_scale: float = 0.0
) -> Subspace:
    r"""Writes a loss in the coordinates of a public subspace around given parameters.

    .. math:: \theta = \theta_0 + G^\top z + a\,w,
       \qquad z\in\mathbb R^m,\quad w\in\mathbb R^d

    The rows of G are the basis. What is trained is z, or z and w together: any plan and
    any optimizer run on them as on other parameters. With orthonormal rows the noise of a
    released gradient has m coordinates in place of d.

    With ``full_scale`` a > 0 one direction u moves both parts, and nothing is out of
    reach where public records mislead. Steps are those of the metric
    :math:`P=G^\top G+a^2I`: a step of size :math:`\eta` along a gradient moves
    :math:`\theta` by :math:`-\eta P\nabla f`. A zeroth-order estimate is unbiased for the
    gradient in (z, w) of the smoothed loss

    .. math:: \mathbb E_v\,f(\theta+\lambda[G^\top\;aI]\,v)

    where v is uniform in the ball of radius :math:`\sqrt{m+d}` for directions on the
    sphere, and standard normal for Gaussian ones, so that :math:`\theta` is then
    smoothed by a Gaussian of covariance :math:`\lambda^2P`. (Clips bias it as elsewhere.)
    Without w the same holds of G alone, and :math:`\sqrt m`.

    Args:
      value_fn: losses (B,) of a batch, as for :func:`jaxdp.fit`. A :class:`jaxdp.LazyLoss`
        is evaluated at whole parameters.
      params: :math:`\theta_0`, pytree of arrays. They must be public.
      basis: of :func:`public_basis`, or any pytree like ``params`` with leaves of shape
        (m, \*shape) and None for leaves that do not move. It must be public. Rows need not
        be orthonormal: longer rows are taken in longer steps.
      full_scale: a, >= 0; 0 leaves out w.

    Returns:
      A :class:`Subspace`. Both ``params`` and ``basis`` are constants of its loss.

    Privacy:
      A change of public parameters of the loss. One record is in one loss as before, and
      is bounded as the plan says; the clip now bounds gradients in (z, w), or slopes.

    Raises:
      TypeError, ValueError: a ``value_fn`` that is not callable; a basis of another
        structure or of other shapes than ``params``, with a number that is not finite, or
        that moves nothing, or a leaf that is not floating point; a negative or infinite
        ``full_scale``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> losses = lambda w, x: ((w - x) ** 2).sum(axis=-1)
      >>> private, public = jnp.ones((8, 3)), jnp.array([[1.0, 1.0, 0.9]])
      >>> basis = jaxdp.public_basis(losses, jnp.zeros(3), public, num_directions=1)
      >>> subspace = jaxdp.in_subspace(losses, jnp.zeros(3), basis)
      >>> plan = jaxdp.plans.DPGD(
      ...     num_examples=8, num_steps=5, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=4.0,
      ... ).with_noise(noise_multiplier=0.0)
      >>> result = jaxdp.fit(
      ...     plan, jaxdp.Keys.insecure(0), subspace.params, private,
      ...     value_fn=subspace.value_fn, optimizer=optax.sgd(0.5),
      ... )
      >>> [round(x, 2) for x in subspace.restore(result.params).tolist()]
      [1.03, 1.03, 0.93]

    References:
      Gong & Li, `Private Zeroth-Order Optimization with Public Data
      <https://arxiv.org/abs/2511.10859>`_, 2025, restrict directions to a subspace; here
      the parameters are restricted, so that gradients and O2NC have it, too.
    """
    validate.is_callable(value_fn=value_fn)
    validate.non_negative(full_scale=full_scale)
    moving = _matched("basis", basis, params, directions=True)
    dtypes = moving.dtypes

    def moves(point: Any) -> Iterator[jax.Array]:
        others = jax.tree.leaves(point["w"]) if full_scale else dtypes
        for row, dtype, other in zip(moving.rows, dtypes, others, strict=True):
            z = jnp.asarray(point["z"], dtype)
            row = jnp.asarray(row, dtype)
            move = jnp.tensordot(z, row, axes=1, precision="highest")
            yield move + full_scale * jnp.asarray(other, dtype) if full_scale else move

    start: dict[str, Any] = {"z": jnp.zeros(moving.rows[0].shape[:1], wide(*dtypes))}
    if full_scale:
        start["w"] = moving.zeros()
    return moving.subspace(value_fn, start, moves)


def public_scale(
    value_fn: ValueFn,
    params: Any,
    public_records: Any,
    *,
    floor: float = 0.1,
    trainable: run_state.Trainable = None,
) -> Any:
    r"""Computes a scale of every parameter from the second moments of public gradients.

    .. math:: a_i\propto\Big(\frac{\sqrt{v_i}}{\bar v}+c\Big)^{-1/2},\qquad
       v=\frac1n\sum_j\nabla f(\theta;x_j^\text{public})^2

    with c the floor and :math:`\bar v` the root of the mean of v over parameters. With
    :func:`in_scale` steps are those of the diagonal metric :math:`a^2\approx1/\sqrt v` of
    Adam. Gradients are scaled *before* they are clipped and noised, so that noise is
    multiplied by a. Gradients that are divided by :math:`\sqrt v` afterwards have their
    noise multiplied by :math:`a^2`.

    The constant is such that the root mean square length of the public gradients stays
    what it was, and a clip means what it meant.

    Args:
      value_fn: losses (B,) of a batch, as for :func:`jaxdp.fit`; differentiated.
      params: pytree of arrays, at which gradients are taken; public.
      public_records: pytree of arrays with a leading axis of n records. **Public.**
      floor: c > 0, relative: no scale exceeds :math:`\sqrt{1+1/c}` times that of a
        parameter with :math:`\sqrt{v_i}=\bar v`. Small ones trust the public records more.
      trainable: which leaves move, as for :func:`jaxdp.fit`.

    Returns:
      A pytree like ``params``, float32 or wider; None for a leaf that does not move.

    Raises:
      TypeError, ValueError: as for :func:`public_basis`; a floor that is no positive
        number; gradients that are all zero.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> losses = lambda w, x: x @ w
      >>> records = jnp.array([[4.0, 1.0], [-4.0, 1.0]])
      >>> scale = jaxdp.public_scale(losses, jnp.zeros(2), records)
      >>> [round(x, 3) for x in scale.tolist()]
      [0.938, 1.71]

    References:
      Li et al., `Private Adaptive Optimization with Side Information
      <https://arxiv.org/abs/2202.05963>`_, 2022.
    """
    validate.is_callable(value_fn=value_fn)
    num = finite_difference.num_rows(public_records, "public_records")
    validate.positive(floor=floor)
    moving, gradients, restore = _gradients(value_fn, params, public_records, trainable)

    @jax.jit
    def moments(moving: list[jax.Array], records: Any) -> tuple[jax.Array, jax.Array]:
        def add(total: jax.Array, record: Any) -> tuple[jax.Array, jax.Array]:
            row = gradients(moving, record)
            return total + jnp.square(row), jnp.isfinite(row).all()

        return jax.lax.scan(add, jnp.zeros_like(_flat(moving)), records)

    total, finite = moments(moving, public_records)
    _check_finite(np.asarray(finite))
    mean = np.asarray(total, np.float64) / num
    if not (mean.any() and np.isfinite(mean).all()):
        raise ValueError(
            "value_fn must have a gradient at params on public_records that is not zero, "
            f"and whose squares {total.dtype} holds"
        )
    scale = (np.sqrt(mean / mean.mean()) + floor) ** -0.5
    scale *= math.sqrt(mean.sum() / (scale**2 @ mean))
    return restore(scale)


def in_scale(value_fn: ValueFn, params: Any, scale: Any) -> Subspace:
    r"""Writes a loss in scaled coordinates around given parameters.

    .. math:: \theta=\theta_0+a\odot w,\qquad w\in\mathbb R^d

    What is trained is w, by any plan and optimizer. A step of size :math:`\eta` along a
    gradient moves :math:`\theta` by :math:`-\eta\,a^2\odot\nabla f`, and noise of a
    released gradient by as much as a in each parameter.

    Args:
      value_fn: losses (B,) of a batch, as for :func:`jaxdp.fit`.
      params: :math:`\theta_0`, pytree of arrays. They must be public.
      scale: a, of :func:`public_scale`, or any pytree like ``params`` with leaves of the
        same shapes, and None for leaves that do not move. It must be public.

    Returns:
      A :class:`Subspace`, whose point is ``{"w": tree}``.

    Privacy:
      A change of public parameters of the loss, as :func:`in_subspace` is.

    Raises:
      TypeError, ValueError: as for :func:`in_subspace`; numbers below 0 in the scale.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> losses = lambda w, x: x @ w
      >>> scaled = jaxdp.in_scale(losses, jnp.ones(2), jnp.array([2.0, 0.5]))
      >>> scaled.restore({"w": jnp.array([1.0, 2.0])}).tolist()
      [3.0, 2.0]
    """
    validate.is_callable(value_fn=value_fn)
    moving = _matched("scale", scale, params)

    def moves(point: Any) -> Iterator[jax.Array]:
        others = jax.tree.leaves(point["w"])
        for each, dtype, other in zip(moving.rows, moving.dtypes, others, strict=True):
            yield jnp.asarray(each, dtype) * jnp.asarray(other, dtype)

    return moving.subspace(value_fn, {"w": moving.zeros()}, moves)


class MixState(NamedTuple):
    """State of :func:`mix_public`. Public."""

    count: jax.Array  # shape=(), dtype=int32; updates seen


def mix_public(
    value_fn: ValueFn,
    public_records: Any,
    weight: float | Callable[[jax.Array], Any],
    *,
    l2_clip_norm: float | None = None,
    trainable: run_state.Trainable = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Mixes each released gradient with the gradient of public records.

    .. math:: g \leftarrow (1-\alpha_t)\,g_\text{private}
      + \alpha_t\,\frac1n\sum_i\nabla f(\theta_t;x_i^\text{public})

    Stands behind what makes the gradients and before the optimizer, as in
    ``optax.chain(jaxdp.mix_public(...), optax.sgd(0.1))``; in :func:`jaxdp.fit` that
    chain is the ``optimizer``. :func:`mixing_weight` says which weight has the least error.

    Args:
      value_fn: losses (B,) of a batch, differentiated: that of the run, or the one of its
        :class:`Subspace`.
      public_records: pytree of arrays with a leading axis of n records, all of which are
        read at every step. They must be public.
      weight: :math:`\alpha` in [0, 1], or a schedule of Optax: step -> such a number.
      l2_clip_norm: bound on the L2 norm of a public record's gradient, None for none. With
        the plan's own, public gradients are biased as those of ``DPGD`` are. It holds n d
        numbers.
      trainable: as for :func:`jaxdp.fit`: other leaves keep their updates.

    Returns:
      A transformation that needs ``params`` in ``update``.

    Privacy:
      Post-processing: it reads releases and public records alone.

    Raises:
      TypeError, ValueError: a weight outside of [0, 1], a clip that is no positive number,
        records without one leading axis; ``update`` without params. A step at which the
        public gradient is not finite takes the private one alone.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> losses = lambda w, x: ((w - x) ** 2).sum(axis=-1) / 2
      >>> tx = jaxdp.mix_public(losses, jnp.ones((5, 2)), weight=0.25)
      >>> params = jnp.zeros(2)
      >>> updates, _ = tx.update(jnp.array([1.0, 3.0]), tx.init(params), params)
      >>> updates.tolist()
      [0.5, 2.0]

    References:
      Amid et al., `Public Data-Assisted Mirror Descent for Private Model Training
      <https://arxiv.org/abs/2112.00193>`_, 2022; Gong & Li, `Private Zeroth-Order
      Optimization with Public Data <https://arxiv.org/abs/2511.10859>`_, 2025.
    """
    num = finite_difference.num_rows(public_records, "public_records")
    if not callable(weight):
        validate.non_negative(weight=weight)
        if weight > 1:
            raise ValueError(f"weight must be a number in [0, 1], got {weight!r}")
    if l2_clip_norm is not None:
        validate.positive(l2_clip_norm=l2_clip_norm)
    records = jax.tree.map(jnp.asarray, public_records)

    def init_fn(params: Any) -> MixState:
        run_state.moving(params, trainable)
        return MixState(jnp.zeros((), jnp.int32))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MixState]:
        del extra_args
        if params is None:
            raise ValueError(
                "params must be passed to update: public gradients need them"
            )
        leaves, structure, moved = _split(params, run_state.moving(params, trainable))
        moving = [jnp.asarray(leaves[i]) for i in moved]
        whole = lambda part: _joined(leaves, structure, moved, part)  # noqa: E731

        def mean(part: list[jax.Array]) -> jax.Array:
            losses = value_fn(whole(part), records)
            finite_difference.check_losses(losses, num)
            return jnp.mean(losses)

        if l2_clip_norm is None:
            gradient = _flat(jax.grad(mean)(moving))
        else:
            one = _gradient_of_one(value_fn, whole)
            rows = jax.vmap(lambda record: _flat(one(moving, record)))(records)
            gradient = jnp.mean(clip.clip_vector(rows, l2_clip_norm), axis=0)
        share: Any = weight(state.count) if callable(weight) else weight
        share = jnp.asarray(share, gradient.dtype)
        finite = jnp.all(jnp.isfinite(gradient))
        share = jnp.where(finite, share, 0)
        gradient = jnp.where(finite, gradient, 0)
        out = structure.flatten_up_to(updates)
        begin = 0
        for i in moved:
            private = jnp.asarray(out[i])
            part = gradient[begin : begin + private.size].reshape(private.shape)
            begin += private.size
            mixed = (1 - share) * private.astype(part.dtype) + share * part
            out[i] = mixed.astype(private.dtype)
        return jax.tree.unflatten(structure, out), MixState(state.count + 1)

    return run_state.transformation(init_fn, update_fn)


def mixing_weight(
    *,
    private_variance: float,
    public_variance: float,
    num_public: int,
    bias: float = 0.0,
) -> float:
    r"""Computes the weight of public gradients that has the least mean squared error.

    A private gradient that is unbiased with variance V, and the mean of n public gradients
    with variance s of one and distance b between the means of the two distributions, give

    .. math:: \mathrm{mse}(\alpha)=(1-\alpha)^2V+\alpha^2\Big(b^2+\frac sn\Big),
      \qquad \alpha^*=\frac V{V+b^2+s/n} .

    This is the error of one step. The public records are the same at every step, so that
    their error stays while noise averages out: over T small steps give V / T. With full
    batches V is about in proportion to T at one epsilon, and then the number of steps
    does not matter.

    Args:
      private_variance: V, summed over coordinates: for ``DPGD`` at least d times
        ``plan.noise_std ** 2``, and for K directions of ``DPZero`` d / K times that, and
        the variance of the directions.
      public_variance: s, of one public record's gradient, summed over coordinates.
      num_public: n.
      bias: b, L2 distance between the mean gradients of the two distributions, >= 0. It
        is not known from public records alone: a judgement, or a guess.

    Returns:
      The weight in [0, 1]; 0 where neither has an error.

    Raises:
      TypeError, ValueError: negative or infinite numbers; no integer ``num_public`` >= 1.

    Example:
      >>> import jaxdp
      >>> jaxdp.mixing_weight(private_variance=3.0, public_variance=100.0, num_public=100)
      0.75
      >>> jaxdp.mixing_weight(
      ...     private_variance=3.0, public_variance=100.0, num_public=100, bias=2.0
      ... )
      0.375
    """
    validate.non_negative(
        private_variance=private_variance, public_variance=public_variance, bias=bias
    )
    validate.integer(num_public=num_public)
    public = math.hypot(bias, math.sqrt(public_variance / num_public)) ** 2
    total = private_variance + public
    return private_variance / total if total else 0.0


def _split(
    params: Any, moves: Callable[[str], bool]
) -> tuple[list[Any], Any, list[int]]:
    """Returns leaves, structure, and the places of the leaves that move."""
    named, structure = jax.tree_util.tree_flatten_with_path(params)
    moved = [i for i, (path, _) in enumerate(named) if moves(path_str(path))]
    return [leaf for _, leaf in named], structure, moved


def _joined(
    leaves: list[Any], structure: Any, moved: list[int], part: list[Any]
) -> Any:
    """Returns the tree whose moving leaves are those of ``part``."""
    whole = list(leaves)
    for i, leaf in zip(moved, part, strict=True):
        whole[i] = leaf
    return jax.tree.unflatten(structure, whole)


def _flat(tree: list[jax.Array]) -> jax.Array:
    """Returns all elements as one vector, float32 or wider."""
    dtype = wide(*(leaf.dtype for leaf in tree))
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in tree])


def _gradient_of_one(
    value_fn: ValueFn, whole: Callable[[Any], Any]
) -> Callable[[Any, Any], Any]:
    """Returns the gradient function of one record's loss in the moving leaves."""

    def loss(part: Any, record: Any) -> jax.Array:
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], record)
        return value_fn(whole(part), one)[0]

    return jax.grad(loss)


def _gradients(
    value_fn: ValueFn, params: Any, records: Any, trainable: run_state.Trainable
) -> tuple[list[jax.Array], Callable[..., jax.Array], Callable[[np.ndarray], Any]]:
    """Returns the leaves that move, a record's gradient (d,) by them, and the way back.

    The way back is from numbers (..., d) to a tree like ``params``, None for other leaves.
    """
    leaves, structure, moved = _split(params, run_state.moving(params, trainable))
    num = finite_difference.num_rows(records)
    finite_difference.check_losses(jax.eval_shape(value_fn, params, records), num)
    moving = [jnp.asarray(leaves[i]) for i in moved]
    whole = lambda part: _joined(leaves, structure, moved, part)  # noqa: E731
    one = _gradient_of_one(value_fn, whole)

    def restore(numbers: np.ndarray) -> Any:
        parts: list[Any] = [None] * len(leaves)
        begin = 0
        for i, leaf in zip(moved, moving, strict=True):
            part = numbers[..., begin : begin + leaf.size]
            shape = (*numbers.shape[:-1], *leaf.shape)
            parts[i] = jnp.asarray(part.reshape(shape), wide(leaf.dtype))
            begin += leaf.size
        return jax.tree.unflatten(structure, parts)

    return moving, lambda moving, record: _flat(one(moving, record)), restore


def _check_finite(finite: Any) -> None:
    """Raises ValueError if one of the public records has no finite gradient."""
    bad = np.flatnonzero(~finite)
    if len(bad):
        raise ValueError(
            "value_fn must have finite gradients at params on public_records, got others "
            f"on {len(bad)} of {len(finite)}: the first is record {bad[0]}"
        )


class _Moving(NamedTuple):
    """Params of which some leaves move, by rows of a basis or by a scale."""

    constants: list[jax.Array]
    structure: Any
    places: list[int]  # of the leaves that move; below, one entry for each of these
    rows: list[Any]
    dtypes: list[Any]  # in which a move is computed

    def zeros(self) -> Any:
        """Returns no move: a tree like the params, None for leaves that do not move."""
        parts: list[Any] = [None] * len(self.constants)
        for i, dtype in zip(self.places, self.dtypes, strict=True):
            parts[i] = jnp.zeros(self.constants[i].shape, dtype)
        return jax.tree.unflatten(self.structure, parts)

    def subspace(
        self,
        value_fn: ValueFn,
        start: dict[str, Any],
        moves: Callable[[Any], Iterator[jax.Array]],
    ) -> Subspace:
        """Returns the loss around the params."""

        def restore(point: Any) -> Any:
            parts = list(self.constants)
            for i, move in zip(self.places, moves(point), strict=True):
                parts[i] = (parts[i].astype(move.dtype) + move).astype(parts[i].dtype)
            return jax.tree.unflatten(self.structure, parts)

        return Subspace(
            lambda point, batch: value_fn(restore(point), batch), start, restore
        )


def _matched(name: str, tree: Any, params: Any, *, directions: bool = False) -> _Moving:
    """Matches ``params`` with a basis or a scale, None for leaves that do not move.

    Raises:
      TypeError, ValueError: the tree is not like ``params``, moves nothing or what cannot
        move, or has other numbers than finite ones; of a scale, negative ones.
    """
    is_none = lambda x: x is None  # noqa: E731
    named, structure = jax.tree_util.tree_flatten_with_path(params)
    found = jax.tree.structure(tree, is_leaf=is_none)
    if found != jax.tree.structure(params, is_leaf=is_none):
        raise ValueError(
            f"{name} must be a pytree like params, with None for leaves that do not move: "
            f"{structure}, got {found}"
        )
    try:
        rows = structure.flatten_up_to(tree)
    except ValueError:  # JAX's own words show the array.
        raise ValueError(f"{name} must be None wherever params is None") from None
    places = [i for i, row in enumerate(rows) if row is not None]
    if not places:
        raise ValueError(f"{name} must have a leaf that is not None, got None for all")
    counts: set[Any] = {np.shape(rows[i])[:1] for i in places} if directions else {()}
    if directions and (len(counts) != 1 or counts <= {(), (0,)}):
        raise ValueError(
            f"{name} must have leaves with one leading axis of at least one direction, got "
            f"{[None if row is None else np.shape(row) for row in rows]}"
        )
    (leading,) = counts
    moves = False
    for i in places:
        path, leaf, row = path_str(named[i][0]), named[i][1], rows[i]
        wanted = (*leading, *np.shape(leaf))
        if np.shape(row) != wanted:
            raise ValueError(
                f"{name} must have shape {wanted} at {path!r}, got {np.shape(row)}"
            )
        if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"{name} must be None at {path!r}, where params has dtype {dtype}, which "
                "cannot move"
            )
        allowed = "finite real numbers" + ("" if directions else " >= 0")
        if not validate.is_numeric(row) or np.iscomplexobj(row):
            kind = getattr(row, "dtype", type(row).__name__)
            raise TypeError(f"{name} must have {allowed} at {path!r}, got {kind}")
        if isinstance(row, Tracer):  # Its numbers are not known.
            moves = True
            continue
        with jax.ensure_compile_time_eval():
            x = jnp.asarray(row)
            if not jnp.isfinite(x).all() or (not directions and (x < 0).any()):
                raise ValueError(f"{name} must have {allowed} at {path!r}, got others")
            moves = moves or bool(x.any())
    if not moves:
        raise ValueError(f"{name} must have a number that is not zero, got zeros alone")
    constants = [jnp.asarray(leaf) for _, leaf in named]
    moving = [rows[i] for i in places]
    dtypes = [wide(constants[i].dtype, jnp.result_type(rows[i])) for i in places]
    return _Moving(constants, structure, places, moving, dtypes)
