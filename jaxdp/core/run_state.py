"""Helpers of the gradient transformations: moving leaves, horizon, noise, secrets."""

import enum
import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.core.types import PathPredicate, Run
from jaxdp.kernels import (
    finite_difference,
    lattice_gaussian,
    node_noise,
    parts,
    threefry,
)
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.kernels.sphere import path_str

#: A pytree of bools like the params, a predicate on the path, or None for all leaves.
Trainable = Any | PathPredicate | None


class Horizon(NamedTuple):
    """Progress of a run through its plan. Public."""

    count: jax.Array  # shape=(), dtype=int32; releases made
    exhausted: jax.Array  # shape=(), dtype=bool; the plan allows no further release
    digest: jax.Array  # shape=(2,), dtype=uint32; of the plan
    private: jax.Array  # shape=(), dtype=bool; keys from entropy, noise above zero


def _of_horizon(name: str) -> Any:
    return property(lambda self: getattr(self.horizon, name))


#: Properties of every state that has a ``horizon``.
count, exhausted = _of_horizon("count"), _of_horizon("exhausted")


def check_family(plan: Any, family: str) -> None:
    """Requires a plan of this family; ValueError for another."""
    if getattr(plan, "family", None) != family:
        raise ValueError(
            f"plan must be one of the family {family!r}, got {type(plan).__name__}"
        )


def check_plan(plan: Any, family: str) -> None:
    """Requires a plan of this family, with noise (which may be zero); else ValueError."""
    check_family(plan, family)
    validate.has_noise(plan.noise_multiplier)


def begin_run(params: Any, keys: keys_lib.Keys, family: str) -> None:
    """Spends the keys at the start of a run, in ``init``: :func:`jaxdp.core.keys.spend`."""
    keys_lib.spend(keys, family, params)


def _placeholder_type() -> type:
    """Returns the type of what ``optax.tree.map_params`` gives an ``init`` for params."""
    given: list[Any] = []

    def init(params: Any) -> Any:
        given.append(params)
        return params

    optax.tree.map_params(init, lambda x: x, 0.0)
    return type(given[0])


_PLACEHOLDER = _placeholder_type()
_WITHOUT_NUMBERS = (jax.ShapeDtypeStruct, _PLACEHOLDER)


def is_placeholder(params: Any) -> bool:
    """Returns True for what ``optax.tree.map_params`` gives an ``init`` for params."""
    return isinstance(params, _PLACEHOLDER)


def of_outlines_too(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes an ``init`` that takes an outline of params as well, of which no run begins.

    An outline lacks numbers: leaves, some or all, are ``jax.ShapeDtypeStruct``, or it is
    the placeholder of ``optax.tree.map_params``. It spends no keys. What it gives is the
    outline of a state: it holds no noise, and nothing can be released from it.
    """

    def without_numbers(x: Any) -> bool:
        return isinstance(x, _WITHOUT_NUMBERS)

    @functools.wraps(init)
    def outline_or_state(params: Any) -> Any:
        leaves = jax.tree.leaves(params, is_leaf=without_numbers)
        if not any(map(without_numbers, leaves)):
            return init(params)
        with keys_lib.shapes_only():
            return jax.eval_shape(init, params)

    return outline_or_state


def transformation(
    init: Callable[[Any], Any], update: Callable[..., tuple[Any, Any]]
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation of Optax, whose ``init`` is :func:`of_outlines_too`."""
    asked = inspect.signature(update).parameters.values()
    needed = [
        p.name for p in asked if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]

    @functools.wraps(update)
    def of_a_run(updates: Any, state: Any, *given: Any, **named: Any) -> Any:
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
            raise ValueError(
                "state must be of a run that has begun, got shapes alone: init was given "
                "jax.ShapeDtypeStruct leaves; call it with arrays"
            )
        if missing := [name for name in needed if name not in named]:
            words = " and ".join(map(repr, missing))
            raise TypeError(
                f"update must be given {words} by name, which what is released is made of"
            )
        return update(updates, state, *given, **named)

    begins: Any = of_outlines_too(init)
    return optax.GradientTransformationExtraArgs(begins, of_a_run)


def new_horizon(run: Run, *, private: bool) -> Horizon:
    """Returns the horizon of a run, ``private`` if its noise is from entropy."""
    words = [int(run.digest[i : i + 8], 16) for i in (0, 8)]
    return Horizon(
        jnp.zeros((), jnp.int32),
        jnp.zeros((), bool),
        jnp.asarray(np.array(words, np.uint32)),
        jnp.asarray(private),
    )


def advance(run: Run, state: Any) -> tuple[jax.Array, Horizon]:
    """Returns True if the next step may release, and the horizon after it.

    ValueError for a state that :func:`check_state_given` refuses.
    """
    check_state_given(state)
    at = state.horizon
    active = at.count < run.num_steps
    count = at.count + active.astype(jnp.int32)
    return active, at._replace(count=count, exhausted=count >= run.num_steps)


def check_state_given(state: Any) -> None:
    """Refuses a state whose secret noise a traced function closes over."""
    private = state.horizon.private
    shown = set(map(id, jax.tree.leaves(_without(state, lambda node: node.SECRET))))
    secret = [x for x in jax.tree.leaves(state) if id(x) not in shown]
    if not any(map(keys_lib.is_closed_over, [private, *secret])):
        return
    if isinstance(private, Tracer) or private:
        raise ValueError(
            "state must be an argument of the function that is traced, got one of a run "
            "with keys from entropy that it closes over: the secret root of its noise "
            "would be a constant of the program, which compilation caches and dumps keep "
            "in files. Give it to the function, step(keys, params, state, ...), once for "
            "each update: under jax.vmap every row needs a state of an init of its own. "
            "If a wrapper such as optax.apply_if_finite traces the update, jit the whole "
            "step"
        )


def only(kind: type, state: Any, makers: str) -> Any:
    """Returns the one state of a kind in a tree; ValueError if there are none or more."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    found = [x for x in leaves if isinstance(x, kind)]
    if len(found) != 1:
        raise ValueError(
            f"state must hold the state of one {makers}, got {len(found) or 'none'}"
        )
    return found[0]


def refuse_misplaced(params: Any, name: str, run: Run | None) -> None:
    """Raises where Optax calls a maker of gradients from a place in which it cannot work.

    ``name`` is the maker's. ``optax.masked`` and ``optax.partition`` take leaves away, and
    it evaluates the loss at all; what precedes it in a chain is lost, for it makes new
    updates; ``optax.MultiSteps`` keeps one of the k batches that it is shown, which is not
    the one drawn for its step. ``run`` is None for an algorithm, which moves all leaves and
    is shown all records every time.
    """
    given = "algorithm" if run is None else "plan, keys"
    instead = (
        "" if run is None else ", name the leaves that move with trainable= instead"
    )
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in leaves):
        raise ValueError(
            f"{name} evaluates the loss and needs the whole params, but some leaves are "
            f"masked; do not wrap it in optax.masked or optax.partition{instead}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and any(jax.typeof(leaf).sharding.spec):
            raise ValueError(
                f"params must be split over axes of the type Auto, got {path_str(path)!r} "
                f"of the type {jax.typeof(leaf)}, over Explicit ones: make the mesh by "
                "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * "
                f"{len(jax.typeof(leaf).sharding.mesh.axis_names)}); jaxdp.fit takes both"
            )
    # Optax tells a transformation nothing of its place: the calls under way do.
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code in _MULTI_STEPS and run is not None and not run.sampling.whole:
            raise ValueError(
                f"{name} must not be within optax.MultiSteps with {run.sampling!r}: one of "
                "k batches would count, and it would be another step's. Accumulate what it "
                f"makes: optax.chain(jaxdp.{name}(plan, keys), "
                "optax.MultiSteps(optax.sgd(0.1), k).gradient_transformation())"
            )
        if frame.f_code is _CHAIN and frame.f_locals["new_state"]:
            raise ValueError(
                f"{name} must be first in optax.chain, got it after another "
                "transformation, which would have no effect: "
                f"optax.chain(jaxdp.{name}({given}), ...)"
            )


_MULTI_STEPS = (optax.MultiSteps.init.__code__, optax.MultiSteps.update.__code__)
_CHAIN = optax.chain(optax.identity()).update.__code__  # pyright: ignore


def size(params: Any, moves: PathPredicate) -> int:
    """Returns d, the number of elements that move."""
    named = jax.tree_util.tree_leaves_with_path(params)
    return sum(math.prod(jnp.shape(x)) for path, x in named if moves(path_str(path)))


def moving(params: Any, trainable: Trainable) -> PathPredicate:
    """Returns the predicate on paths that ``trainable`` stands for, checked against params.

    Raises:
      ValueError: no leaf moves, a tree of another structure, or a moving leaf that is
        not real floating point (named by its path). TypeError: leaves that are no arrays
        of numbers, or flags that are no bools.
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    paths = {path_str(path): leaf for path, leaf in named}
    for path, leaf in paths.items():
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise TypeError(
                f"params must be arrays, got a {type(leaf).__name__} at {path!r}: of a "
                "module take its arrays, as eqx.partition(module, eqx.is_inexact_array) or "
                "nnx.split(module, nnx.Param, ...) does, and put it together in value_fn"
            )
        if not validate.is_numeric(leaf):  # What JAX says of others quotes them.
            found = validate.dtype_name(getattr(leaf, "dtype", None))
            raise TypeError(
                f"params must be arrays of numbers, got dtype {found} at {path!r}"
            )
    if len(paths) < len(named):
        raise ValueError(
            "params must have leaves of different paths, got "
            f"{sorted(path_str(path) for path, _ in named)}"
        )
    if trainable is None:
        chosen = frozenset(paths)
    elif callable(trainable):
        chosen = frozenset(p for p in paths if trainable(p))
    else:
        flags, structure = jax.tree.flatten(trainable)
        if structure != jax.tree.structure(params):
            raise ValueError(
                "trainable must be None, a predicate on the path, or a pytree of bools "
                f"like the params {jax.tree.structure(params)}; got {structure}"
            )
        for path, flag in zip(paths, flags, strict=True):
            if np.shape(flag) or np.asarray(flag).dtype.kind != "b":
                raise TypeError(
                    "trainable must be None, a predicate on the path, or a pytree of "
                    f"bools, got {validate.shown(flag)} at {path!r}"
                )
        chosen = frozenset(p for p, flag in zip(paths, flags, strict=True) if flag)
    if not paths and not is_placeholder(params):
        raise ValueError("params must have at least one leaf, got none")
    if not chosen and not is_placeholder(params):
        raise ValueError(f"trainable selects none of the leaves {sorted(paths)}")
    for path in sorted(chosen):
        dtype = jnp.result_type(paths[path])
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"the leaf {path!r} of params has dtype {dtype}, which cannot move; "
                "exclude it with trainable="
            )
    return chosen.__contains__


def shared_leaves(shardings: Any) -> parts.Apart:
    """Returns the leaves that devices share, by path, and how they do, from shardings.

    Raises:
      TypeError: a leaf is no ``jax.sharding.Sharding``.
    """
    named = jax.tree_util.tree_leaves_with_path(shardings)
    for path, place in named:
        if not isinstance(place, jax.sharding.Sharding):
            raise TypeError(
                "shardings must be None or a tree of jax.sharding.Sharding like the "
                f"params, got a {type(place).__name__} at {path_str(path)!r}"
            )
    return {
        path_str(path): place for path, place in named if not place.is_fully_replicated
    }


def check_whole_parts(shared: parts.Apart, moves: PathPredicate) -> None:
    """Raises ValueError where a ``shard_map`` splits a leaf that moves, by its sharding.

    There a part would be clipped alone, and drawn the noise of another.
    """
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    for path, place in shared.items():
        if not moves(path):
            continue
        for axes in getattr(place, "spec", ()):
            names = (axes,) if isinstance(axes, str) else axes or ()
            if both := manual & set(names):
                raise ValueError(
                    f"shardings must not split the leaf {path!r} along {min(both)!r}, an "
                    "axis of the jax.shard_map in which update is called: leave it out of "
                    "its axis_names, for XLA to partition"
                )


def check_shared(shared: parts.Apart, params: Any) -> None:
    """Raises ValueError if a leaf of :func:`shared_leaves` is none of the params'."""
    named = jax.tree_util.tree_leaves_with_path(params)
    paths = [path_str(path) for path, _ in named]
    unknown = sorted(set(shared) - set(paths))
    if unknown and not is_placeholder(params):
        raise ValueError(
            "shardings must be a tree like the params, got a leaf "
            f"{unknown[0]!r}; the params have {', '.join(map(repr, paths))}"
        )


def whole_params(
    params: Any,
    name: str,
    run: Run,
    axis_name: AxisName | None,
    state: Any,
    **data: Any,
) -> Any:
    """Returns the params of an ``update`` that evaluates the loss at all of them.

    Raises as :func:`need_params` and :func:`refuse_differing`.
    """
    params = need_params(params, name, run)
    refuse_differing(axis_name, state=state, params=params, **data)
    return params


def need_params(params: Any, name: str, run: Run | None) -> Any:
    """Returns the params of an ``update``, as arrays.

    ValueError if it was given none; else raises as :func:`refuse_misplaced`.
    """
    if params is None:
        raise ValueError(
            f"params must be passed to update: {name} evaluates the loss at them"
        )
    if not jax.tree.leaves(params):
        raise ValueError(f"params must have at least one leaf, got {params!r}")
    refuse_misplaced(params, name, run)
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), params)


def refuse_differing(axis_name: AxisName | None, **arguments: Any) -> None:
    """Raises if devices that share a batch are given different arguments.

    Only a ``shard_map`` that checks replication can tell. Each device's part of a batch
    in place of the whole would be cut once more, and a record that two devices hold would
    count twice; other states would put other noise on one sum.
    """
    if axis_name is None:
        return
    try:
        jax.lax.axis_index(axis_name)
    except NameError as error:
        raise ValueError(
            "axis_name must be of the mesh of a jax.shard_map in which update or step is "
            f"called, got {axis_name!r}"
        ) from error
    for name, tree in arguments.items():
        try:
            finite_difference.on_each(tree, axis_name)
        except ValueError as error:
            raise ValueError(
                f"{name} must be the same on every device of axis_name={axis_name!r} "
                "(in_specs of jax.sharding.PartitionSpec()), got one that is sharded "
                "over it: the whole batch goes to every device, which takes its part"
            ) from error


def noise_root(run: Run, keys: keys_lib.Keys) -> jax.Array:
    """Returns the key of this plan's noise; secret."""
    return keys_lib.stream(keys.noise, "noise", context=run.context)


def gaussian(root: jax.Array, step: Any, like: Any, std: int) -> Any:
    """Draws the noise of one step from a secret stream's key: integers (d,) of ``std``.

    Discrete Gaussians in units; zeros where ``std`` is 0. ``like`` is d, or sections of a
    vector (``kernels.parts.sections``), which are drawn alone: a tree like them.
    """
    like = node_noise.sections_of(like)
    if std == 0:
        return jax.tree.map(Fixed, node_noise.zeros(like))
    law = lattice_gaussian.law(std)
    return jax.tree.map(Fixed, node_noise.draw(root, step, like, law))


def count_noise(root: jax.Array, step: Any, std: int) -> Fixed:
    """Draws the noise of one step's count, beside that of its sum: integers (1,)."""
    return gaussian(keys_lib.at_step(root, step), 1, 1, std)


def zero_where_done(active: jax.Array, tree: Any) -> Any:
    """Returns the tree, or zeros like it past the horizon."""
    return jax.tree.map(lambda x: jnp.where(active, x, jnp.zeros_like(x)), tree)


def hiding_repr(self: Any) -> str:
    """Returns the ``repr`` of a state without the fields that its ``SECRET`` names."""

    def shown(name: str) -> str:
        value = getattr(self, name)
        return "<secret>" if name in self.SECRET and value is not None else repr(value)

    fields = ", ".join(f"{name}={shown(name)}" for name in self._fields)
    return f"{type(self).__name__}({fields})"


def public(state: Any) -> Any:
    """Removes the secrets of a state, so that it may be shown, logged or published.

    Works on any pytree: optimiser states, a Flax ``TrainState``, an ``nnx.Optimizer`` or
    its ``opt_state``. Every node that declares ``SECRET`` has those fields replaced by
    None, and a ``jaxdp.Keys`` becomes None. So does whatever is static in a node and no
    number, text, dtype or class of a module, or a container of these: the functions of a
    ``TrainState``'s ``tx`` hold keys and noise. What is left serves to be read, not to go
    on with a run.

    Raises:
      TypeError: it holds an object that is no pytree, array, number or text, of which
        nobody knows what it hides. Or a state of this library taken apart: as a dictionary,
        such as ``nnx.state``, ``_asdict`` and Flax's serialisation make, a tuple or a list.
        Such a thing does not say what is secret.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> state = plan.transform(jaxdp.Keys.insecure(0)).init(jnp.zeros(2))
      >>> state.noise is None, jaxdp.public(state).noise is None
      (False, True)
    """
    return _without_static(_without(state, lambda node: node.SECRET))


def rootless(node: Any) -> tuple[str, ...]:
    """Returns the secret fields of a state that its roots give back: not ``KEPT`` ones."""
    return tuple(set(node.SECRET) - set(getattr(node, "KEPT", ())))


def without_roots(state: Any) -> Any:
    """Returns the part of a state for a checkpoint: all that its roots do not give back.

    Secret, where a node declares secret fields to be ``KEPT``: they depend on data.
    """
    return _without(state, rootless)


def _without(state: Any, hidden: Callable[[Any], Collection[str]]) -> Any:
    """Returns a state without the fields that ``hidden`` names of a node with secrets."""

    def is_leaf(node: Any) -> bool:
        return hasattr(type(node), "SECRET") or isinstance(node, keys_lib.Keys)

    def shown(node: Any) -> Any:
        if isinstance(node, keys_lib.Keys):
            return None
        if hasattr(type(node), "SECRET"):
            gone = hidden(node)
            fields = {
                f: None if f in gone else _without(getattr(node, f), hidden)
                for f in node._fields
            }
            return type(node)(**fields)
        if isinstance(node, jax.Array | np.ndarray | np.generic | int | float | str):
            return node
        raise TypeError(
            "state must be a pytree of arrays; nobody knows what an object of type "
            f"{type(node).__name__} hides"
        )

    return jax.tree.map(shown, state, is_leaf=is_leaf)


_LEAF = jax.tree.structure(0)
_PLAIN = bool | int | float | complex | str | bytes | np.dtype | enum.Enum | None
#: By these a state of this library is known that has become a dictionary.
_HORIZON = frozenset(Horizon._fields)


def _is_horizon(node: Any) -> bool:
    taken_apart = isinstance(node, Mapping) and set(node) >= _HORIZON
    return taken_apart or isinstance(node, Horizon)


def _without_static(node: Any) -> Any:
    """Returns a tree in whose nodes nothing is static but plain values."""
    parts = node.values() if isinstance(node, Mapping) else ()
    if type(node) in (tuple, list):
        parts = node
    secret = isinstance(node, jax.Array) and threefry.is_secret(node)
    if secret or any(map(_is_horizon, parts)):
        found = "the key of its noise" if secret else f"one as a {type(node).__name__}"
        raise TypeError(
            f"state must be a state as its transformation made it, got {found}, which "
            "does not say what is secret; show the original, such as the opt_state of an "
            "nnx.Optimizer"
        )
    children, structure = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    if structure == _LEAF:
        return node
    below = [_without_static(child) for child in children]
    kind, static = structure.node_data()
    if kind in (tuple, list, dict, type(None)) or hasattr(kind, "_fields"):
        return jax.tree.unflatten(structure, below)
    outline = jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, (kind, _plain(static)), [_LEAF] * len(below)
    )
    try:
        return jax.tree.unflatten(outline, below)
    except Exception as error:
        raise TypeError(
            "state must be a pytree of arrays; nobody knows what the static part of an "
            f"object of type {type(node).__name__} hides, which is nothing without it"
        ) from error


def _plain(value: Any) -> Any:
    """Returns the plain part of a static value, with None in the place of all else."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, type):  # One that is made in a function has its variables.
        return None if "<locals>" in value.__qualname__ else value
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        kept = map(_plain, value)
        return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)
    return None
