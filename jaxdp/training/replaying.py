"""Replay of a run: its parameters from the initial ones and the ledger."""

import functools
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdp import plans
from jaxdp.core import display
from jaxdp.core import keys as keys_lib
from jaxdp.core.run_state import moving, public
from jaxdp.kernels import sphere
from jaxdp.mechanism.plan import Plan
from jaxdp.training import digests, loop, parallel
from jaxdp.training import ledger as ledger_lib


class Replay(NamedTuple):
    """Result of :func:`replay`. Public."""

    params: Any  # what the run returned, or would have returned after these steps
    info: loop.FitInfo

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return loop.result_table("Replay", self.params, self.info, {})


def replay(
    ledger: str | os.PathLike[str] | ledger_lib.Record,
    params: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> Replay:
    """Rebuilds a run from its initial parameters and its ledger; reads no data.

    To the bit, for every law of directions, on the kind of device that the run had and
    with its version of JAX; elsewhere up to rounding.

    Args:
      ledger: the run's folder, its ``ledger.jsonl``, or what ``jaxdp.ledger.read``
        gave.
      params: the initial parameters of the run.
      optimizer: the optimizer of the run. The record does not hold it: another one gives
        other parameters, and no error.

    Returns:
      ``Replay(params, info)``: parameters, releases and optimizer state after the steps
      that the ledger holds. Post-processing of releases, so public.

    Raises:
      ValueError: no ledger; a ledger of an algorithm whose releases are too large to be
        logged, or of another version of the directions; ``params`` of other shapes or
        values than the run's initial ones.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> task = dict(
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1), optimizer=optax.sgd(0.1)
      ... )
      >>> params, data, keys = jnp.zeros(2), jnp.ones((8, 2)), jaxdp.Keys.insecure(0)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     result = jaxdp.fit(plan, keys, params, data, ledger=folder, **task)
      ...     replayed = jaxdp.replay(folder, params, optimizer=task["optimizer"])
      >>> bool((replayed.params == result.params).all())
      True
    """
    parallel.refuse_set_mesh()
    if not isinstance(ledger, ledger_lib.Record):
        ledger = ledger_lib.read(ledger)
    plan = plan_of(ledger)
    optimizer = optax.identity() if optimizer is None else optimizer
    mesh = parallel.mesh_of(params)
    check_params(ledger.header, params, mesh)
    if mesh is not None:
        _, params = parallel.check_mesh(mesh, params)
    direction = keys_lib.root_from_hex(ledger.header["direction"])
    leaves = leaves_of(ledger.header)
    transform = plan.replay(direction, **leaves)
    carry = loop.start(plan, transform, optimizer, params)
    program = compiled(plan, optimizer, direction, carry, **leaves)
    done = len(ledger.releases)
    bounds = (jnp.asarray(x, jnp.int32) for x in (0, done))
    known = filled(plan, ledger.releases, carry.releases.shape[1])
    carry = program(carry, jnp.asarray(known), *bounds)
    info = loop.FitInfo(carry.releases[:done], public(carry.opt_state[1]))
    return Replay(plan.returned(carry.opt_state[0], carry.params), info)


def compiled(
    plan: Plan,
    optimizer: optax.GradientTransformation,
    direction: jax.Array,
    carry: loop.Carry,
    *,
    trainable: Any,
    stacked: Any,
) -> Callable[..., loop.Carry]:
    """Returns ``program(carry, releases (T, K), first, last) -> carry``, compiled.

    The state of ``carry`` is that of ``plan.replay`` or of the run. What is compiled takes
    the direction root, and so serves all.
    """
    transform = plan.replay(direction, trainable=trainable, stacked=stacked)

    def one(
        root: jax.Array, releases: jax.Array, step: jax.Array, carry: loop.Carry
    ) -> loop.Carry:
        row = jax.lax.dynamic_index_in_dim(releases, step, keepdims=False)
        update: Any = transform.update
        _, made = update(None, carry.opt_state[0], carry.params, release=row)
        of_step = optimizer, carry, made, step, root
        return loop.applied(*of_step, trainable=trainable, replay=transform)

    def program(
        carry: loop.Carry,
        root: jax.Array,
        releases: jax.Array,
        first: jax.Array,
        last: jax.Array,
    ) -> loop.Carry:
        body = functools.partial(one, root, releases)
        return jax.lax.fori_loop(first, last, body, carry)

    leaves = chosen_leaves(carry.params, trainable, stacked)
    key = ("replay", plan.digest, optimizer, *leaves, loop.signature(carry))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    mesh = parallel.mesh_of(carry.params)
    given = parallel.placed(mesh, carry, direction, carry.releases)
    device = parallel.device_of(mesh, carry, direction)
    options = loop.compiler_options(device.platform)
    build = lambda: parallel.lowered(mesh, program, *given, step, step).compile(  # noqa: E731
        compiler_options=options
    )
    run = loop.compiled(key, build)[0]
    return lambda carry, *given: run(*parallel.placed(mesh, carry, direction, *given))


def chosen_leaves(
    params: Any, trainable: Any, stacked: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns paths of leaves that move, and of those whose first axis counts layers."""
    moves = moving(params, trainable)
    paths = list(describe_leaves(params))
    layered = [path for path in paths if stacked is not None and stacked(path)]
    return tuple(path for path in paths if moves(path)), tuple(layered)


def frozen(params: Any, trainable: Any) -> frozenset[str]:
    """Returns the paths of the leaves that do not move."""
    moves = moving(params, trainable)
    return frozenset(path for path in describe_leaves(params) if not moves(path))


def filled(plan: Plan, releases: np.ndarray, width: int) -> np.ndarray:
    """Pads releases (steps, R) with zeros to the plan's steps: (num_steps, R)."""
    missing = plan.num_steps - len(releases)
    if missing < 0 or (len(releases) and releases.shape[1] != width):
        raise ValueError(
            f"ledger must hold at most the plan's {plan.num_steps} steps of {width} "
            f"numbers, got releases of shape {releases.shape}"
        )
    return np.pad(releases.reshape(-1, width), ((0, missing), (0, 0)))


# --- the header --------------------------------------------------------------------


def plan_of(record: ledger_lib.Record) -> Plan:
    """Returns the plan of a ledger; ValueError for directions of another version."""
    header = record.header
    want = {"version": sphere.VERSION, "prng": prng()}
    try:
        got = {"version": header["direction_version"], "prng": header["prng"]}
        plan = plans.from_json(json.dumps(header["plan"]))
    except KeyError as error:
        raise ValueError(f"ledger must say its {error} in the header") from error
    if want != got:
        raise ValueError(f"ledger must be of directions {want}, got {got}")
    return plan


def prng() -> dict[str, Any]:
    """Returns the PRNG settings that decide random bits besides a key."""
    config: Any = jax.config  # Its flags are made while JAX is imported.
    partitionable = bool(config.jax_threefry_partitionable)
    return {"impl": "threefry2x32", "threefry_partitionable": partitionable}


def leaves_of(header: dict[str, Any]) -> dict[str, Any]:
    """Returns ``trainable`` and ``stacked`` of a header, as predicates on paths."""
    moving, stacked = (frozenset(header[name]) for name in ("trainable", "stacked"))
    return {"trainable": moving.__contains__, "stacked": stacked.__contains__}


def describe_leaves(params: Any) -> dict[str, list[Any]]:
    """Returns path -> [identity, dtype, shape] of every leaf; public."""
    named = jax.tree_util.tree_leaves_with_path(params)
    return {
        path: [sphere.leaf_id(path), str(jnp.result_type(leaf)), list(np.shape(leaf))]
        for path, leaf in ((sphere.path_str(path), leaf) for path, leaf in named)
    }


def check_params(header: dict[str, Any], params: Any, mesh: Mesh | None = None) -> None:
    """Requires the initial parameters of the run; ValueError for others.

    Of several processes, which ``mesh`` has, all call this, and all raise where one does.
    """
    known = header["params"]
    was = known if isinstance(known, dict) else {}

    def check_whole() -> dict[str, str]:
        leaves = describe_leaves(params)
        if leaves != header["leaves"]:
            raise ValueError(
                f"params must have the leaves {header['leaves']} of the run, got {leaves}"
            )
        found = digests.of_leaves(params, like=was, split=False)
        if isinstance(known, dict) or len(found) < len(leaves):
            return found
        # An older record has one digest for all leaves.
        return {} if digests.sha256(params).hexdigest() == known else found

    got = parallel.together(mesh, check_whole)
    parallel.check_layout(mesh, params)
    # All processes compute these together, and none has refused.
    got = got | digests.of_leaves(params, like=was, split=True)

    def check_same() -> None:
        others = [x for x, digest in got.items() if digest != was.get(x)]
        if not others:
            return
        kinds = ((got[x], was.get(x)) for x in others)
        hint = ""
        if any(digests.is_checksum(a) != digests.is_checksum(b) for a, b in kinds):
            hint = " (split between processes here or in the run, not in both)"
        raise ValueError(
            "params must be the initial parameters of the run, got others of the same "
            f"shapes at {', '.join(map(repr, others))}{hint}"
        )

    parallel.together(mesh, check_same)


def frozen_of(header: dict[str, Any]) -> frozenset[str]:
    """Returns :func:`frozen` of the run of a header."""
    return frozenset(header["leaves"]) - frozenset(header["trainable"])
