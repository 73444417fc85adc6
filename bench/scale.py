"""How the cost of a step grows: with n, d, K, T and the number of devices.

DPZero with Rademacher directions, and with Gaussian ones where d grows. Each axis is a row
of compiled programs that differ in one number. Their times are medians of rounds in which
all of them are run, one after another. Without a run there is only what the compiler says
of its program: memory to a billion parameters, of abstract shapes; and operations, bytes
and collectives of one of up to eight virtual devices, in a process of its own.

The slope is that of the logarithm of the cost by that of the size, over the three largest
sizes: what a step costs however small it is has faded there. Where it is not 1 to within
:data:`EXACT`, its note says why.
"""

import collections
import functools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness
from jaxdp import plans, sampling, training

Row = _harness.Row
EXACT = 0.05
BATCH = 64
MANY = 10**7
#: Why a slope is not 1.
DRAWN = (
    "a step draws and reads its batch, of one expected size whatever n is: 0 is the goal; "
    "below 2**17 records each has a word, so that 1e5 of them cost more than 1e7"
)
SMALL = (
    "smaller sizes stay in the caches, and every step costs something whatever its size"
)
BESIDE = "a fixed part beside what grows with d"
TOGETHER = (
    "the directions' forward passes are one product, which reads the records once"
)
STEPS = "beside its steps a run begins and ends, which fades"
SHARED = (
    "records are shared among the devices, so that one has 1/P of them: -1 is the goal; "
    "directions, and the parameters' update, are every device's own"
)
REDUCED = (
    "one sum of K integers over all devices, whatever their number is: 0 is the goal"
)


def run(quick: bool) -> list[Row]:
    """Rows of each axis: its points, and their slope."""
    rounds = 3 if quick else 9
    top = 6 if quick else 7
    powers = [10**i for i in range(top - 3, top + 1)]
    dims = [10**i for i in ((4, 6, 8) if quick else range(4, 10))]
    rows = [
        *timed("n, Poisson", powers, poisson, rounds, DRAWN),
        *timed("n, full batch", [x * 8 // 10 for x in powers], full, rounds, SMALL),
        too_many(),
    ]
    for law in ("rademacher", "gaussian"):
        build = functools.partial(vector, law)
        rows += timed(f"d, {law}", powers, build, rounds, SMALL)
        rows += abstract(law, dims)
    directions = [1, 4, 16, 64]
    rows += timed("K", directions, several, rounds, TOGETHER)
    lengths = [100, 300, 1000] if quick else [100, 300, 1000, 3000]
    rows += timed("T", lengths, whole, rounds, STEPS)
    return [*rows, *devices(quick)]


def slope(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Slope of log cost by log size, by least squares over the three largest sizes."""
    x, y = np.log(sizes[-3:]), np.log(costs[-3:])
    return float(np.polyfit(x, y, 1)[0])


def fitted(
    axis: str, metric: str, sizes: Sequence[int], costs: Sequence[float], why: str
) -> Row:
    """Row of a slope, with the reason where it is not 1."""
    if min(costs) <= 0:
        return Row(axis, f"slope of {metric}", None, "", note="skipped: costs of 0")
    value = slope(sizes, costs)
    note = "" if abs(value - 1) <= EXACT else why
    return Row(axis, f"slope of {metric}", value, "", note=note)


def timed(
    axis: str, sizes: Sequence[int], build: Callable[[int], Any], rounds: int, why: str
) -> list[Row]:
    """Rows of the times of one program for each size, and of their slope."""
    sides = {str(size): build(size) for size in sizes}
    seconds = _harness.alternate(sides, rounds)
    times = [1e3 * statistics.median(seconds[str(size)]) for size in sizes]
    letter = axis.split(",")[0]
    rows = [
        Row(f"{axis}, {letter} = {size:g}", "time", value, "ms")
        for size, value in zip(sizes, times, strict=True)
    ]
    return [*rows, fitted(axis, "time", sizes, times, why)]


# --- programs ---------------------------------------------------------------------------


def plan_of(
    n: int, sampler: Any, law: Any = "rademacher", num: int = 1
) -> plans.DPZero:
    """A plan of 1000 steps, whose noise does not matter."""
    return plans.DPZero(
        num_examples=n,
        num_steps=1000,
        sampling=sampler,
        relation="zero_out",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
        num_directions=num,
        direction=law,
        noise_multiplier=1.0,
    )


def linear(params: jax.Array, batch: jax.Array) -> jax.Array:
    """Losses (B,) that read every number of the records once."""
    return jnp.square(batch @ params - 1)


def norm(params: jax.Array, batch: jax.Array) -> jax.Array:
    """Losses (B,) that read every parameter once."""
    return batch * jnp.mean(jnp.square(params))


def one_step(plan: Any, value_fn: Any, params: Any, data: Any, **options: Any) -> Any:
    """The function of a step, and its arguments: state, params and data."""
    keys = jaxdp.Keys.insecure(0)
    tx: Any = jaxdp.dpzero(plan, keys, **options)

    def step(state: Any, params: Any, data: Any) -> Any:
        batch = sampling.batch(plan, keys, state.count, data)
        updates, state = tx.update(None, state, params, value_fn=value_fn, batch=batch)
        return state, jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)

    return step, (tx.init(params), params, data)


def called(step: Any, args: Any) -> Callable[[], Any]:
    """The compiled step as a thunk, its parameters donated."""
    state, params, data = args
    program = _harness.compiled(jax.jit(step, donate_argnums=1).lower(*args))
    cell = [params]

    def call() -> Any:
        _, cell[0] = program(state, cell[0], data)
        return cell[0]

    return call


def records(n: int, width: int = 8) -> jax.Array:
    return jnp.ones((n, width)) / width


def poisson(n: int) -> Callable[[], Any]:
    plan = plan_of(n, sampling.TruncatedPoisson(sampling_prob=BATCH / n))
    return called(*one_step(plan, linear, jnp.zeros(8), records(n)))


def full(n: int) -> Callable[[], Any]:
    plan = plan_of(n, sampling.FullBatch())
    return called(*one_step(plan, linear, jnp.zeros(8), records(n)))


def too_many() -> Row:
    """The full batch of so many records that no grid of 32 bits holds their sum."""
    try:
        plan_of(MANY, sampling.FullBatch())
        note = "skipped: not timed"
    except ValueError as error:
        note = f"skipped: {error}"
    return Row(f"n, full batch, n = {MANY:g}", "time", None, "", note=note)


def vector(law: str, dim: int) -> Callable[[], Any]:
    plan = plan_of(2, sampling.FullBatch(), law)
    return called(*one_step(plan, norm, jnp.zeros(dim), jnp.ones(2)))


def several(num: int) -> Callable[[], Any]:
    plan = plan_of(256, sampling.FullBatch(), num=num)
    return called(*one_step(plan, linear, jnp.zeros(1024), records(256, 1024)))


def whole(steps: int) -> Callable[[], Any]:
    """The loop of ``fit``, whose number of steps is an argument of one program."""
    plan = plan_of(256, sampling.FullBatch())
    keys = jaxdp.Keys.insecure(0)
    maker, sgd = jaxdp.dpzero(plan, keys), optax.sgd(0.1)
    program = training.make_program(plan, maker, sgd, linear)
    carry = training.start(plan, maker, sgd, jnp.zeros(1024))
    data = records(256, 1024)
    fn = jax.jit(lambda c, k, d: program(c, k, d, 0, steps))
    compiled = _harness.compiled(fn.lower(carry, keys, data))
    return lambda: compiled(carry, keys, data)


# --- what the compiler says -------------------------------------------------------------


def abstract(law: str, dims: Sequence[int]) -> list[Row]:
    """Rows of the memory of a step that is compiled and not run."""
    plan = plan_of(2, sampling.FullBatch(), law)
    found: dict[str, list[float]] = collections.defaultdict(list)
    for dim in dims:
        like = jax.ShapeDtypeStruct((dim,), jnp.float32)
        step, args = one_step(plan, norm, like, jax.ShapeDtypeStruct((2,), jnp.float32))
        compiled = _harness.compiled(jax.jit(step, donate_argnums=1).lower(*args))
        memory: Any = compiled.memory_analysis()
        found["memory of params"].append(memory.argument_size_in_bytes / 1e6)
        found["temp memory"].append(memory.temp_size_in_bytes / 1e6)
    axis, rows = f"d, {law}, not run", []
    for metric, values in found.items():
        rows += [
            Row(f"{axis}, d = {dim:g}", metric, value, "MB")
            for dim, value in zip(dims, values, strict=True)
        ]
        rows.append(fitted(axis, metric, dims, values, BESIDE))
    return rows


COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def on_mesh(count: int) -> dict[str, float]:
    """Operations, bytes and collectives of one of ``count`` devices, by the compiler."""
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = plan_of(8192, sampling.FullBatch())
    data = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    like = jax.ShapeDtypeStruct((1024,), jnp.float32)
    step, args = one_step(plan, linear, like, data, axis_name="data")
    everywhere = jax.sharding.PartitionSpec()
    shared = jax.shard_map(step, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    compiled = _harness.compiled(jax.jit(shared).lower(*args))
    cost: Mapping[str, float] = compiled.cost_analysis() or {}
    text = compiled.as_text() or ""
    return {
        "operations": cost.get("flops", 0.0) / 1e6,
        "bytes": cost.get("bytes accessed", 0.0) / 1e6,
        "collectives": len(COLLECTIVE.findall(text)),
    }


def devices(quick: bool) -> list[Row]:
    """Rows of one of several virtual devices, in a process that has them."""
    counts = [1, 2, 8] if quick else [1, 2, 4, 8]
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )
    child = subprocess.run(
        [sys.executable, "-m", "bench.scale", *map(str, counts)],
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:]
        return [Row("P", "operations", None, "", note=f"skipped: {last}")]
    found = json.loads(child.stdout.splitlines()[-1])
    rows = []
    units = {"operations": ("M", SHARED), "bytes": ("MB", SHARED)}
    units["collectives"] = ("", REDUCED)
    for metric, (unit, why) in units.items():
        values = [each[metric] for each in found]
        rows += [
            Row(f"P, P = {count}", f"{metric} of a device", value, unit)
            for count, value in zip(counts, values, strict=True)
        ]
        shown = values[1:] if metric == "collectives" else values
        rows.append(fitted("P", metric, counts[-len(shown) :], shown, why))
    return rows


if __name__ == "__main__":
    print(json.dumps([on_mesh(int(count)) for count in sys.argv[1:]]))
