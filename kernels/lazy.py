"""Lazy losses of any model: each leaf is perturbed where the program of the loss reads it.

:class:`~jaxdp.kernels.perturb.LazyLoss` asks a model to take its leaves through a view.
Here the program that JAX traces of a plain loss is evaluated anew, equation by equation,
and the leaves are put in as they are reached: it does not matter which library wrote it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdp.kernels import perturb
from jaxdp.kernels.perturb import At, LazyLoss
from jaxdp.kernels.sphere import path_str

#: Programs within programs, which are evaluated in their place.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")
#: What is done to a leaf when it is used, and not before; to a slice as to the whole.
_ELEMENTWISE = ("convert_element_type", "copy", "copy_p")
_DEFERRED = (*_ELEMENTWISE, "reshape", "transpose", "squeeze", "broadcast_in_dim")


def lazy(value_fn: Callable[[Any, Any], jax.Array]) -> LazyLoss:
    """Makes a lazy loss of a plain one, which perturbs each leaf where the model uses it.

    Leaves that ``stacked=`` of the run names, and over which the model scans
    (``jax.lax.scan``, ``flax.linen.scan``, ``nnx.scan``), are perturbed in the loop, one
    layer at a time. Of a table that is indexed, the rows that are read are. All others are
    whole, each after what is computed before it. So a step needs the memory of a forward
    pass and of a layer, or of the largest leaf outside the loop. What is perturbed before
    it is used: leaves that a loop reads in every turn, those under ``jax.lax.cond`` and
    ``while_loop``, and layers that are sliced by hand.

    Gradients are those of ``value_fn``: for ``DPGD`` nothing changes.

    Args:
      value_fn: ``value_fn(params, batch) -> losses (B,)``, of any library.

    Returns:
      The same loss, to the bit where XLA adds up the same way: an operation that reduces
      what has just been perturbed may differ by a rounding.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> def value_fn(params, batch):
      ...     layer = lambda x, w: (jnp.tanh(x @ w), None)
      ...     return jax.lax.scan(layer, batch, params["layers"])[0].sum(axis=1)
      >>> loss = jaxdp.lazy(value_fn)  # with stacked=lambda path: path == "layers"
      >>> loss({"layers": jnp.ones((3, 2, 2))}, jnp.zeros((4, 2))).shape
      (4,)
    """

    def fn(params: Any, batch: Any, at: At) -> jax.Array:
        if at is perturb.identity:
            return value_fn(params, batch)
        params = _as_perturbed(params, at)
        # Traced anew, as the program of a plain loss is: JAX would remember a function's
        # first program, and what it closes over or is a part of may have changed.
        program = jax.make_jaxpr(lambda *given: value_fn(*given))(params, batch)
        leaves = [
            _Leaf(path_str(path), leaf)
            for path, leaf in jax.tree.leaves_with_path(params)
        ]
        (losses,) = _evaluate(program, [*leaves, *jax.tree.leaves(batch)], at)
        return _used(losses, at, None)

    return LazyLoss(fn)


def _as_perturbed(params: Any, at: At) -> Any:
    """Returns parameters whose leaves that move have the dtypes of perturbed ones.

    Those have no weak types. A leaf that stays keeps its own, as in a plain loss.
    """
    moving = at.direction.paths if isinstance(at, perturb.View) else None

    def strengthened(path: Any, leaf: Any) -> Any:
        stays = moving is not None and path_str(path) not in moving
        return leaf if stays else jnp.asarray(leaf, jnp.asarray(leaf).dtype)

    return jax.tree.map_with_path(strengthened, params)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf that nothing has used yet, or a layer of it, and what is done to it then."""

    path: str
    value: jax.Array
    layer: jax.Array | None = None
    then: tuple[Callable[[jax.Array], list[jax.Array]], ...] = ()
    elementwise: bool = True  # what is done


def _used(x: Any, at: At, after: jax.Array | None) -> Any:
    """Returns a leaf as the view shows it, and other values as they are."""
    if not isinstance(x, _Leaf):
        return x
    # Only large leaves wait: a bias that did would keep activations alive.
    after = after if x.value.ndim > 1 else None
    value = at(x.path, x.value, layer=x.layer, after=after)
    for function in x.then:
        (value,) = function(value)
    return value


def _evaluate(
    program: Any, args: Sequence[Any], at: At, after: jax.Array | None = None
) -> list[Any]:
    """Evaluates a program of which some arguments are leaves; ``after`` is there before."""
    closed = isinstance(program, core.ClosedJaxpr)
    jaxpr, consts = (program.jaxpr, program.consts) if closed else (program, ())
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else known[var]

    for eqn in jaxpr.eqns:
        values, name = [read(var) for var in eqn.invars], eqn.primitive.name
        leaves = [x for x in values if isinstance(x, _Leaf)]
        after = next(filter(_is_activation, values), after)
        names = [
            *{var: None for var in eqn.invars if not isinstance(var, core.Literal)}
        ]
        one = jaxpr.replace(constvars=[], invars=names, outvars=eqn.outvars, eqns=[eqn])
        function = core.jaxpr_as_fun(core.ClosedJaxpr(one, ()))
        if name in _DEFERRED and leaves and len(values) == 1:
            (leaf,) = leaves
            whole = leaf.elementwise and name in _ELEMENTWISE
            then = (*leaf.then, function)
            out = [dataclasses.replace(leaf, then=then, elementwise=whole)]
        elif name in _CALLS and leaves:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            out = _evaluate(inner, values, at, after)
        elif name == "scan" and leaves:
            out = _scan(eqn, values, at, after)
        elif name == "gather" and leaves and _reads_rows(eqn, values, at):
            out = [_rows(eqn, values, at)]
        else:
            out = function(*[_used(known[var], at, after) for var in names])
        known |= zip(eqn.outvars, out, strict=True)
    return [read(var) for var in jaxpr.outvars]


def _stacked(at: At) -> Any:
    """Returns the paths of leaves with layers in front; None if the view knows none."""
    return at.direction.stacked if isinstance(at, perturb.View) else None


def _is_activation(x: Any) -> bool:
    """Returns True for arrays of floats, which large leaves wait for."""
    return (
        not isinstance(x, _Leaf)
        and jnp.ndim(x) > 0
        and jnp.issubdtype(jnp.result_type(x), jnp.floating)
    )


def _scan(
    eqn: Any, values: Sequence[Any], at: At, after: jax.Array | None
) -> list[Any]:
    """Evaluates a loop, in which layers of stacked leaves are perturbed; not vectors."""
    params = eqn.params
    first, last = _parts(eqn)
    # Another view than that of a direction has the layers of all that is scanned.
    stacked = _stacked(at)

    def is_layered(x: Any) -> bool:
        return (
            isinstance(x, _Leaf)
            and (stacked is None or x.path in stacked)
            and x.layer is None
            and x.value.ndim > 2
            and x.elementwise
        )

    layered = [is_layered(x) for x in values[last:]]
    consts, carry = (
        [_used(x, at, after) for x in part]
        for part in (values[:first], values[first:last])
    )
    xs = [
        x.value if one else _used(x, at, after)
        for x, one in zip(values[last:], layered, strict=True)
    ]

    def step(carry: list[Any], scanned: Any) -> tuple[list[Any], list[Any]]:
        layer, slices = scanned
        slices = [
            dataclasses.replace(leaf, value=x, layer=layer) if one else x
            for leaf, x, one in zip(values[last:], slices, layered, strict=True)
        ]
        there = next(filter(_is_activation, carry), None)
        out = _evaluate(params["jaxpr"], [*consts, *carry, *slices], at, there)
        out = [_used(x, at, there) for x in out]
        return out[: len(carry)], out[len(carry) :]

    carry, ys = jax.lax.scan(
        step,
        carry,
        (jnp.arange(params["length"]), xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _parts(eqn: Any) -> tuple[int, int]:
    """Returns where a loop's carry begins and ends among its arguments.

    By ranks, for JAX names the numbers of each part otherwise from one version to another:
    what is scanned, and what is stacked, has a rank more outside of the loop than within.
    """
    inner = eqn.params["jaxpr"].jaxpr
    same_rank = lambda outer, own: sum(  # noqa: E731
        x.aval.ndim == y.aval.ndim for x, y in zip(outer, own, strict=True)
    )
    last = same_rank(eqn.invars, inner.invars)
    return last - same_rank(eqn.outvars, inner.outvars), last


def _reads_rows(eqn: Any, values: Sequence[Any], at: At) -> bool:
    """Returns True if rows of a leaf are read, fewer than it has."""
    leaf, index = values
    if not isinstance(leaf, _Leaf) or isinstance(index, _Leaf) or leaf.then:
        return False
    if leaf.path in (_stacked(at) or ()):
        return False
    shape, numbers = leaf.value.shape, eqn.params["dimension_numbers"]
    trailing = range(index.ndim - 1, index.ndim - 1 + len(shape) - 1)
    return (
        leaf.layer is None
        and index.size < shape[0]
        and eqn.params["slice_sizes"] == (1, *shape[1:])
        and numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        and numbers.offset_dims == tuple(trailing)
        and not numbers.operand_batching_dims
    )


def _rows(eqn: Any, values: Sequence[Any], at: At) -> jax.Array:
    """Reads rows of a leaf; those outside of it are what the program says."""
    leaf, index = values
    rows = index[..., 0]
    inside = (rows >= 0) & (rows < leaf.value.shape[0])
    found = at(leaf.path, leaf.value, rows=jnp.clip(rows, 0, leaf.value.shape[0] - 1))
    if eqn.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = eqn.params["fill_value"]
    fill = jnp.asarray(jnp.nan if fill is None else fill, found.dtype)
    inside = inside.reshape(*inside.shape, *[1] * (found.ndim - inside.ndim))
    return jnp.where(inside, found, fill)
