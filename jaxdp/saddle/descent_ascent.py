"""Descent ascent: gradients of a game become projected steps of both players."""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.core import run_state, validate
from jaxdp.core.averaging import polyak_average
from jaxdp.kernels.polytope import L1Ball, Simplex


class DescentAscentState(NamedTuple):
    """State of the steps of :func:`descent_ascent`. Public."""

    count: jax.Array  # shape=(), dtype=int32; updates made


def descent_ascent(
    step_size_x: optax.ScalarOrSchedule,
    step_size_y: optax.ScalarOrSchedule,
    *,
    domain_x: Simplex | L1Ball | None = None,
    domain_y: Simplex | L1Ball | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns gradients of a game into projected steps, x down and y up, and averages.

    After :func:`jaxdp.dpgd` it is DP-SGDA. There ``l2_clip_norm`` bounds a record's
    gradient by x and y together, and ``value_fn`` is a problem of ``jaxdp``
    (``MatrixGame``, ``MaxOfLosses``, ``Problem``), which takes both points as a pair.

    .. math:: x_{t+1} = \Pi_X(x_t - \eta_x g^x_t), \quad
              y_{t+1} = \Pi_Y(y_t + \eta_y g^y_t)

    Players' points are projected in the Euclidean norm. In a game they may go round for
    ever; their mean after the steps is what theory and practice use:
    ``jaxdp.polyak_output(state)``, of the ``FitInfo.state`` of a run.

    Args:
      step_size_x: :math:`\eta_x`, >= 0, in units of one over the gradient; or a schedule of
        it, ``step -> size``.
      step_size_y: :math:`\eta_y`.
      domain_x: where x lies, a ``jaxdp.Simplex`` or ``jaxdp.L1Ball``; None is the simplex.
      domain_y: where y lies.

    Privacy:
      None of its own: a function of the gradients that it is given. Private gradients
      make it post-processing.

    Raises:
      TypeError, ValueError: a step size that is no such number, another domain, params that
        are no pair of points of these domains; ``update`` without params.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> game = jaxdp.models.rock_paper_scissors(dim=4)
      >>> plan = jaxdp.plans.DPGD(
      ...     num_examples=256, num_steps=4, sampling=jaxdp.sampling.SinglePass(64),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> uniform = jnp.full(4, 1 / 4)
      >>> result = jaxdp.fit(
      ...     plan, jaxdp.Keys.insecure(0), (uniform, uniform), game.make_data(256, seed=0),
      ...     value_fn=jaxdp.Problem(game.value_fn),
      ...     optimizer=jaxdp.descent_ascent(step_size_x=0.1, step_size_y=0.1),
      ... )
      >>> x, y = jaxdp.polyak_output(result.info.state)
      >>> round(float(x.sum()), 4), round(float(y.sum()), 4)
      (1.0, 1.0)

    References:
      Nedic and Ozdaglar, Subgradient Methods for Saddle-Point Problems, 2009; with noise,
      Yang, Hu, Lei, Varshney and Ying, `Differentially Private SGDA for Minimax Problems
      <https://arxiv.org/abs/2201.09046>`_, 2022.
    """
    for name, size in {"step_size_x": step_size_x, "step_size_y": step_size_y}.items():
        if isinstance(size, numbers.Number):  # else a schedule, or a traced value
            validate.non_negative(**{name: size})
    for name, domain in {"domain_x": domain_x, "domain_y": domain_y}.items():
        if domain is not None and not isinstance(domain, Simplex | L1Ball):
            raise TypeError(
                f"{name} must be a jaxdp.Simplex, a jaxdp.L1Ball or None, onto which "
                f"points are projected, got a {type(domain).__name__}; of a polytope let "
                "points be weights of its vertices, on a simplex"
            )

    def init_fn(params: Any) -> DescentAscentState:
        if not run_state.is_placeholder(params):
            _check(params, domain_x, domain_y)
        return DescentAscentState(jnp.zeros((), jnp.int32))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, DescentAscentState]:
        del extra_args
        if params is None:
            raise ValueError("params must be passed to update: the steps start there")

        def step(
            point: jax.Array, gradient: jax.Array, size: Any, sign: int, domain: Any
        ) -> jax.Array:
            size = size(state.count) if callable(size) else size
            moved = point + jnp.asarray(sign * size, point.dtype) * gradient
            return _projected(moved, domain) - point

        (x, y), (g_x, g_y) = params, updates
        steps = (
            step(x, g_x, step_size_x, -1, domain_x),
            step(y, g_y, step_size_y, 1, domain_y),
        )
        structure = jax.tree.structure(params)
        return structure.unflatten(steps), DescentAscentState(state.count + 1)

    steps = run_state.transformation(init_fn, update_fn)
    return optax.chain(steps, polyak_average())


def _projected(point: jax.Array, domain: Simplex | L1Ball | None) -> jax.Array:
    """Returns the nearest point of the domain in the Euclidean norm."""
    if isinstance(domain, L1Ball):
        return optax.projections.projection_l1_ball(point, domain.radius)
    return optax.projections.projection_simplex(point)


def _check(params: Any, *domains: Simplex | L1Ball | None) -> None:
    """Raises ValueError unless params are a pair of vectors of the domains' lengths."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    wanted = ["(p,)" if d is None else f"({d.dim},)" for d in domains]
    fits = [
        len(shape) == 1 and (domain is None or shape == (domain.dim,))
        for shape, domain in zip(shapes, domains, strict=False)
    ]
    if not isinstance(params, tuple | list) or len(shapes) != 2 or not all(fits):
        raise ValueError(
            f"params must be a pair of points of shapes {' and '.join(wanted)}, got a "
            f"{type(params).__name__} of shapes {shapes}"
        )
