"""What the gradient makers share: which leaves move, the horizon, integer noise."""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxdp import keys as keys_lib
from jaxdp._types import DataPlan, PathPredicate, PrivatePlan
from jaxdp.kernels import finite_difference, threefry
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.sphere import path_str

#: A pytree of bools like the params, a predicate on the path, or None for all leaves.
Trainable = Any | PathPredicate | None


class Horizon(NamedTuple):
    """How far a run has come. Public."""

    count: jax.Array  # shape=(), dtype=int32; releases made
    exhausted: jax.Array  # shape=(), dtype=bool; the plan allows no further release
    digest: jax.Array  # shape=(2,), dtype=uint32; of the plan
    private: jax.Array  # shape=(), dtype=bool; keys from entropy, noise above zero


def check_family(plan: Any, family: str) -> None:
    """Requires a plan of this family; ValueError for another."""
    if getattr(plan, "family", None) != family:
        raise ValueError(
            f"plan must be one of the family {family!r}, got {type(plan).__name__}"
        )


def check_plan(plan: PrivatePlan, family: str) -> None:
    """Requires a plan of this family, with noise (which may be zero).

    Raises:
      ValueError: a plan of another family, or one without a noise_multiplier.
    """
    check_family(plan, family)
    if plan.noise_multiplier is None:
        raise ValueError(
            "the plan has no noise_multiplier yet: call "
            ".calibrate(epsilon=..., delta=...) or .with_noise(noise_multiplier=...)"
        )


def begin_run(params: Any, keys: keys_lib.Keys, family: str) -> None:
    """Spends the keys where a run begins: in ``init``, unless it is only traced."""
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
        keys_lib.spend(keys, family)


def horizon(
    plan: PrivatePlan, keys: keys_lib.Keys | None, *, vouched: bool = True
) -> Horizon:
    """The start of a run; ``vouched``: its noise is drawn here, from ``keys``."""
    drawn_here = keys is not None and keys.private and vouched
    return begun(plan, private=plan.grid_noise_std > 0 and drawn_here)


def begun(plan: DataPlan, *, private: bool) -> Horizon:
    """The start of a run; ``private``: what it releases is randomised, from entropy."""
    words = [int(plan.digest[i : i + 8], 16) for i in (0, 8)]
    return Horizon(
        jnp.zeros((), jnp.int32),
        jnp.zeros((), bool),
        jnp.asarray(np.array(words, np.uint32)),
        jnp.asarray(private),
    )


def advance(plan: DataPlan, at: Horizon) -> tuple[jax.Array, Horizon]:
    """Whether this step may release, and the horizon after it."""
    active = at.count < plan.num_steps
    count = at.count + active.astype(jnp.int32)
    return active, at._replace(count=count, exhausted=count >= plan.num_steps)


def refuse_masked(params: Any, name: str) -> None:
    """Raises where optax.masked or partition has taken leaves away."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in leaves):
        raise ValueError(
            f"{name} evaluates the loss and needs the whole params, but some leaves are "
            "masked; do not wrap it in optax.masked or optax.partition, name the leaves "
            "that move with trainable= instead"
        )


def size(params: Any, moves: PathPredicate) -> int:
    """d: how many numbers move."""
    named = jax.tree_util.tree_leaves_with_path(params)
    return sum(math.prod(jnp.shape(x)) for path, x in named if moves(path_str(path)))


def moving(params: Any, trainable: Trainable) -> PathPredicate:
    """The predicate on paths that ``trainable`` stands for, checked against params.

    Raises:
      ValueError: no leaf moves, a tree of another structure, or a moving leaf that is
        not real floating point (named by its path).
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    paths = {path_str(path): leaf for path, leaf in named}
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
        chosen = frozenset(p for p, flag in zip(paths, flags, strict=True) if flag)
    if not chosen:
        raise ValueError(f"trainable selects none of the leaves {sorted(paths)}")
    for path in sorted(chosen):
        dtype = jnp.result_type(paths[path])
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"the leaf {path!r} of params has dtype {dtype}, which cannot move; "
                "exclude it with trainable="
            )
    return chosen.__contains__


def need_params(params: Any, name: str) -> Any:
    if params is None:
        raise ValueError(
            f"params must be passed to update: {name} evaluates the loss at them"
        )
    return params


def refuse_differing(axis_name: AxisName | None, **arguments: Any) -> None:
    """Raises where devices that share a batch are not given the same.

    Only a ``shard_map`` that checks replication can tell. Each device's part of a batch
    in place of the whole would be cut once more, and a record that two devices hold would
    count twice; other states would put other noise on one sum.

    Raises:
      ValueError: an argument is sharded over ``axis_name``; it is named. Or there is no
        such axis here.
    """
    if axis_name is None:
        return
    try:
        jax.lax.axis_index(axis_name)
    except NameError as error:
        raise ValueError(
            "axis_name must be of the mesh of a jax.shard_map in which update is called, "
            f"got {axis_name!r}"
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


def noise_root(plan: PrivatePlan, keys: keys_lib.Keys) -> jax.Array:
    """The key of this plan's float32 noise; secret."""
    return keys_lib.stream(keys.noise, "noise", context=int(plan.digest[:8], 16))


def rounded_normal(
    plan: PrivatePlan, root: jax.Array, step: jax.Array, size: int
) -> jax.Array:
    """int32 (size,): float32 Gaussian of the plan's std, rounded to the grid.

    With integer sums round(S + Z) = S + round(Z): the release is post-processing of the
    Gaussian mechanism. What remains is the tail of the float Gaussian (9.4 std).
    """
    z = threefry.wide_normal(keys_lib.at_step(root, step), (size,))
    return jnp.round(z * jnp.float32(plan.grid_noise_std)).astype(jnp.int32)


def zero_where_done(active: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(active, x, jnp.zeros_like(x)), tree)


def public(state: Any) -> Any:
    """A state without its secrets: what may be shown, logged or published.

    Works on any pytree: optimiser states, a Flax ``TrainState``, an ``nnx.Optimizer``'s
    state. Every node that declares ``SECRET`` has those fields replaced by None, and a
    ``jaxdp.Keys`` becomes None.

    Raises:
      TypeError: it holds an object that is no pytree, array, number or text, of which
        nobody knows what it hides.
    """
    return _without(state, lambda node: node.SECRET)


def rootless(node: Any) -> tuple[str, ...]:
    """The secret fields of a state that the roots give back; ``KEPT`` ones they do not."""
    return tuple(set(node.SECRET) - set(getattr(node, "KEPT", ())))


def without_roots(state: Any) -> Any:
    """What of a state a checkpoint has to hold: all that its roots do not give back.

    Secret, where a node declares secret fields to be ``KEPT``: they depend on data.
    """
    return _without(state, rootless)


def _without(state: Any, hidden: Callable[[Any], Collection[str]]) -> Any:
    """A state without the fields that ``hidden`` names of a node with secrets."""

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
