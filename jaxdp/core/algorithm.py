"""Interface of an algorithm: three pure functions."""

from collections.abc import Callable
from typing import Any, NamedTuple


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
