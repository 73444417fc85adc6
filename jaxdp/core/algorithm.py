"""Interface of an algorithm: three pure functions; and the same as a transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxdp.core import run_state, validate


class Algorithm(NamedTuple):
    """Private method that is no transformation of gradients: three pure functions.

    Attributes:
      init: ``init(params) -> state``. ``params`` is where the run starts, public. Begins a
        run: keys from entropy serve one, which no tracing may begin (``jax.jit(init)``). Of
        ``jax.ShapeDtypeStruct`` leaves it gives a state's shapes, and begins none.
      step: ``step(state, data, value_fn=...) -> (state, info)``. ``data`` is the whole data
        set; a step reads its own records of it. ``info`` is what it released: of at most 64
        numbers, else their norm. Beyond the plan's steps nothing is read or released.
      output: ``output(state) -> params``, the point that the method returns; public.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.Saddle(
      ...     num_examples=1000, num_steps=50, sampling=jaxdp.sampling.SinglePass(20),
      ...     relation="replace_one", dim_x=20, dim_y=10,
      ...     linf_clip_norm_x=1.0, linf_clip_norm_y=1.0,
      ... ).with_step_size(0.1)
      >>> init, step, output = plan.algorithm(jaxdp.Keys.insecure(0))
      >>> state = init(plan.uniform())
      >>> [point.shape for point in output(state)]
      [(20,), (10,)]
    """

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]
    output: Callable[[Any], Any]


def as_transform(algorithm: Algorithm) -> optax.GradientTransformationExtraArgs:
    r"""Makes an algorithm a transformation of Optax, with the output as the params.

    ``update`` makes one step of the algorithm. It returns what the output is now, minus the
    params, so that ``optax.apply_updates`` gives the output: up to a rounding, which does
    not add up, for the next update starts from the params that it is given.

    .. math:: u_t = \mathrm{output}(s_t) - w_t,
              \qquad s_t = \mathrm{step}(s_{t-1}, \text{data})

    The state is the algorithm's own. It alone decides where the algorithm asks: ``params``
    are read for this difference and nothing else. So what follows in the chain, a weight
    decay or a factor, or whoever sets params anew, changes the params and no release.
    ``algorithm.output(state)`` is the output whatever follows.

    ``init`` takes the params of ``algorithm.init``. ``update`` takes ``value_fn`` and
    ``batch``, which is the *whole* data set every time: a step reads its own records of it.
    Incoming updates are ignored and may be None, and so are unknown keywords. Past the
    plan's horizon updates are zero and ``state.exhausted`` is true.

    Args:
      algorithm: one that this library made, such as ``jaxdp.sosp(plan, keys)``.

    Privacy:
      What is released, and its guarantee, are those of the algorithm and its plan
      (``jaxdp.report(plan, state)``). Updates are a function of the output and the params.

    Raises:
      TypeError: no :class:`Algorithm`. ValueError: not first in ``optax.chain``, or within
        ``optax.masked`` or ``optax.partition``; ``update`` without params, with a mask, or
        with params of other paths or shapes than those of ``init``; and what the algorithm
        raises.

    Example:
      >>> import jax
      >>> import optax
      >>> import jaxdp
      >>> game = jaxdp.models.rock_paper_scissors(dim=4)
      >>> plan = jaxdp.plans.Saddle(
      ...     num_examples=256, num_steps=4, sampling=jaxdp.sampling.SinglePass(64),
      ...     relation="replace_one", dim_x=4, dim_y=4,
      ...     linf_clip_norm_x=1.5, linf_clip_norm_y=1.5,
      ... ).calibrate(epsilon=1.0, delta=1e-6)
      >>> algorithm = jaxdp.saddle_mirror_descent(plan, jaxdp.Keys.insecure(0))
      >>> tx = optax.chain(jaxdp.as_transform(algorithm), jaxdp.polyak_average())
      >>> params, data = plan.uniform(), game.make_data(256, seed=0)
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state, data):
      ...     updates, state = tx.update(
      ...         None, state, params, value_fn=game.value_fn, batch=data
      ...     )
      ...     return optax.apply_updates(params, updates), state
      >>> for _ in range(plan.num_steps):
      ...     params, state = step(params, state, data)
      >>> [weights.shape for weights in params], bool(state[0].exhausted)
      ([(4,), (4,)], True)
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            "algorithm must be a jaxdp.Algorithm, such as plan.algorithm(keys) makes, got "
            f"{validate.shown(algorithm)} of type {type(algorithm).__name__}"
        )

    def init_fn(params: Any) -> Any:
        run_state.refuse_misplaced(params, "as_transform", None)
        return algorithm.init(params)

    def update_fn(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value_fn: Any,
        batch: Any,
        mask: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        del updates, extra_args
        if mask is not None:
            raise ValueError(
                "mask must be None for as_transform, whose batch is the whole data set, "
                f"got {validate.shown(mask)}"
            )
        params = run_state.need_params(params, "as_transform", None)
        active = ~state.horizon.exhausted
        state, _ = algorithm.step(state, batch, value_fn=value_fn)
        # By paths, for of a list, or a tuple with names, the output makes a tuple.
        leaves, point = _by_path(params), _by_path(algorithm.output(state))
        try:
            chex.assert_trees_all_equal_shapes(point, leaves)
        except AssertionError as error:
            raise ValueError(f"params must be like those of init: {error}") from None
        moved = [
            # Cast before subtracting: near the output the difference is then exact.
            jnp.where(active, point[path].astype(x.dtype) - x, jnp.zeros_like(x))
            for path, x in leaves.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(params), moved), state

    return run_state.transformation(init_fn, update_fn)


def _by_path(tree: Any) -> dict[str, Any]:
    tree = tuple(tree) if isinstance(tree, tuple | list) else tree
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
