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
    """

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]
    output: Callable[[Any], Any]
