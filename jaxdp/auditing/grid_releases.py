"""Released numbers of a plan's mechanism, in the units of its grid.

On two data sets: nothing that contributes, and one record (or user) that contributes about
a unit to every coordinate of one step. The unit is that of the noise, in which releases
are integers (or, of noise with a fraction, as good as real). What runs is the plan's
transformation or algorithm, on prescribed public states: the running estimate of a step
that releases a change is set to zero before it, so that float32 holds all digits of the
change.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import sampling
from jaxdp.auditing import simulation
from jaxdp.auditing.canaries import num_records
from jaxdp.auditing.units import Unit
from jaxdp.core import keys as keys_lib
from jaxdp.core.keys import Keys
from jaxdp.kernels import finite_difference, sphere
from jaxdp.o2nc.gradient import private_oracle
from jaxdp.sosp.spider import private_spider

#: Coordinates of a release, where the plan does not say how many there are.
DIM, DIM_OF_VALUES = 4096, 1024
#: Steps of plans that release few numbers in one. Laplace noise is drawn on the host.
STEPS, STEPS_OF_HOST = 1024, 64
_ALIKE = sampling.FullBatch | sampling.External  # Samplers that read any record.
_CELLS = 2**24  # numbers that are simulated at once
_COUNT = "count of clip tuning"
_RECORDS = 2**22  # numbers of records' gradients at once
#: Of a record, in units: between one and two, which every rounding makes one; and, along a
#: random direction, so many that about half of the coordinates are odd.
_ONE, _SEVERAL = 1.25, 4.0


class Site(NamedTuple):
    """Released numbers of one kind of step, in grid units."""

    name: str  # for people
    noise_std: float  # of one number, in units
    #: float64 (2, num_runs, m): without the record and with it, under the same noise.
    units: np.ndarray
    moved: int = 1  # units, of which a record moves a number by a multiple


class Reading(NamedTuple):
    """Conversion of a site's released numbers to units of its grid."""

    noise_std: float  # in units
    unit: float  # of the released numbers
    #: float64 (S, m, d), from S released vectors to the numbers that are on the grid.
    inverse: np.ndarray | None = None
    moved: int = 1  # units, of which a record moves a number by a multiple


#: From a run's keys, its table of Laplace noise and how much the record is (0 or 1), to the
#: numbers of each site.
Run = Callable[[Keys, Any, jax.Array], dict[str, jax.Array]]


class Mechanism(NamedTuple):
    """Simulation of a plan's first steps, and what it releases."""

    run: Run
    readings: dict[str, Reading]
    numbers: int  # that one run holds at once
    plan: Any  # that the run is of
    left_out: tuple[str, ...] = ()  # releases that cannot be read, with reasons


def releases(made: Mechanism, num_runs: int, seed: int) -> tuple[Site, ...]:
    """Simulates runs of a mechanism, made with the roots of ``Keys.insecure(seed)``."""
    seeds = simulation.run_seeds(num_runs, seed)
    own = simulation.make_keys(seeds)
    tables = simulation.noise_tables(made.plan, seeds, own, Keys.insecure(seed))
    amounts = jnp.arange(2, dtype=jnp.float32)
    both = jax.vmap(made.run, in_axes=(None, None, 0))
    run = jax.jit(jax.vmap(both, in_axes=(0, 0, None), out_axes=1))
    at_once = _CELLS // (2 * made.numbers)
    seen = simulation.in_parts(
        lambda part: run(*part, amounts), (own, tables), num_runs, at_once
    )
    sites = []
    for name, reading in made.readings.items():
        units = seen[name].astype(np.float64) / reading.unit
        if reading.inverse is not None:
            units = np.einsum("skd,wnsd->wnsk", reading.inverse, units)
        units = units.reshape(*units.shape[:2], -1)
        sites.append(Site(name, reading.noise_std, units, reading.moved))
    return tuple(sites)


def _unit_of(grid: Any) -> float:
    """Returns one unit of a grid, whose bound may differ from 2**bits units."""
    limit = 2**grid.bits if grid.limit is None else grid.limit
    return grid.l2_clip_norm / limit


def _reading_of(grid: Any, norm: float = 1.0) -> Reading:
    """Returns the reading of releases whose noise has ``norm`` times a node's deviation."""
    return Reading(grid.noise_std * norm, float(np.float32(grid.noise_unit)))


def _records(plan: Any, index: int, amount: jax.Array, unit: Unit) -> simulation.Rows:
    """Returns rows that are all masked, except for one of the given amount."""
    there = np.arange(num_records(plan)) == index
    amounts = unit.data(jnp.where(there, amount, 0), index, "plus")
    return simulation.Rows(amounts, jnp.asarray(there))


def _read(plan: Any, public: Keys, step: int, phase: str) -> int:
    """Returns the last record of a step; 0 for sampled, full and external batches."""
    if plan.sampling.amplifies or isinstance(plan.sampling, _ALIKE):
        return 0

    @jax.jit
    def drawn() -> tuple[jax.Array, jax.Array]:
        all_of_them = jnp.arange(plan.num_examples)
        made = sampling.batch(plan, public, step, all_of_them, phase=phase)
        return made.records, made.mask

    records, mask = map(np.asarray, drawn())
    return int(records[np.flatnonzero(mask)[-1]])


def _slice(plan: Any, dim: int) -> int:
    """Returns the number of rows that are differentiated at once."""
    return max(1, min(_RECORDS // dim, num_records(plan)))


def _rows(plan: Any) -> int:
    """Returns the number of rows of a batch of one run."""
    return min(plan.sampling.rows(plan.num_examples), num_records(plan))


def _held(plan: Any, dim: int) -> int:
    """Returns the number of values that one run holds at once."""
    if not plan.sampling.amplifies:
        return dim
    return dim * min(_rows(plan), _slice(plan, dim))


def _scanned(
    plan: Any,
    public: Keys,
    unit: Unit,
    start: Any,
    steps: int,
    value_fn: Callable[[Any, Any], jax.Array],
    build: Callable[[Keys, Any], Any],
    seen: Callable[[Any, Any], Any],
    clip: jax.Array | None = None,
) -> Callable[[Keys, Any, jax.Array], Any]:
    """Returns the simulation of some steps of one phase, all from the parameters ``start``.

    ``build`` makes the transformation of keys and a noise table; ``seen``, the released
    numbers of an update and the state after it. ``clip`` is in place of a tuned one.
    """
    (phase,) = plan.phases
    index = _read(plan, public, 0, phase.name)

    def run(own: Keys, table: Any, amount: jax.Array) -> Any:
        keys = simulation.run_keys(plan, own, public)
        tx, rows = build(keys, table), _records(plan, index, amount, unit)
        loss = unit.loss(value_fn)

        def step(state: Any, t: jax.Array) -> tuple[Any, Any]:
            if clip is not None:
                state = state._replace(clip=clip)
            given = simulation.batch_of(plan, keys, t, rows, phase.name)
            update, after = tx.update(None, state, start, value_fn=loss, **given)
            return after, seen(update, after)

        return jax.lax.scan(step, tx.init(start), jnp.arange(steps))[1]

    return run


def of_gradients(plan: Any, public: Keys, unit: Unit) -> Mechanism:
    """Returns the simulation of one gradient of ``plans.DPGD``, and of its count."""
    grid, size = plan.grid("step"), _slice(plan, DIM)
    slope = _ONE * _unit_of(grid)
    readings, clip = {"gradient": _reading_of(grid)}, None
    if plan.clip_tuning is not None:
        clip = jnp.float32(plan.l2_clip_norm)
        readings[_COUNT] = _reading_of(plan.numbers.count_grid)

    def seen(update: Any, after: Any) -> dict[str, jax.Array]:
        found = {"gradient": update["x"], _COUNT: after.release[-1]}
        return {name: found[name] for name in readings}

    run = _scanned(
        plan,
        public,
        unit,
        {"x": jnp.zeros(DIM)},
        1,
        lambda params, amounts: amounts * (slope * jnp.sum(params["x"])),
        lambda keys, _: plan.transform(keys, microbatch_size=size),
        seen,
        clip,
    )
    return Mechanism(run, readings, _held(plan, DIM), plan)


def of_marginals(plan: Any, public: Keys, unit: Unit) -> Mechanism:
    """Returns the simulation of a first and a drawn step of ``plans.MWEM``, on a column."""
    del unit  # Of a record; cases says so.
    names = ("first shares", "shares of a drawn marginal")[: plan.num_steps]
    reading = _reading_of(plan.grid)._replace(moved=2**plan.grid.shift)
    # A third step, which is not run, is the one that fits longest.
    plan = dataclasses.replace(
        plan, num_steps=3, sizes=(DIM_OF_VALUES,), attributes=((0,),), num_start=1
    )

    def run(own: Keys, _: Any, amount: jax.Array) -> dict[str, jax.Array]:
        algorithm = plan.algorithm(simulation.run_keys(plan, own, public))
        none = jnp.full(plan.num_examples, -1, jnp.int32)
        records = none.at[0].set(jnp.where(amount > 0, 0, -1))
        state, seen = algorithm.init(plan.uniform()), {}
        for name in names:
            # As if nothing were measured yet, so that shares are no means.
            state = state._replace(fit=plan.uniform())
            state, _ = algorithm.step(state, records, value_fn=plan.queries)
            seen[name] = state.fit.shares
        return seen

    held = len(names) * DIM_OF_VALUES
    return Mechanism(run, dict.fromkeys(names, reading), held, plan)


def of_slopes(plan: Any, public: Keys, unit: Unit) -> Mechanism:
    """Returns the simulation of the slopes and counts of the first steps."""
    most = STEPS_OF_HOST if plan.noise == "laplace" else STEPS
    width = plan.num_directions
    steps = min(plan.num_steps, max(most // width, 1))
    # Its noise is that of the plan, and a table of it as long as the run.
    plan = dataclasses.replace(plan, num_steps=steps)
    dim = max(2, width)
    bound = plan.l2_clip_norm / (math.sqrt(dim) if plan.isotropic else 1.0)
    grid = plan.grid("step")._replace(l2_clip_norm=bound)
    readings, clip = {"slopes": _reading_of(grid)}, None
    if plan.clip_tuning is not None:
        clip = jnp.float32(bound)
        readings[_COUNT] = _reading_of(plan.numbers.count_grid)

    def build(keys: Keys, table: Any) -> Any:
        return plan.transform(keys, **{} if table is None else {"noise_table": table})

    def seen(_: Any, after: Any) -> dict[str, jax.Array]:
        slopes, count = after.release[:width], after.release[-1]
        found = {"slopes": slopes, _COUNT: count}
        return {name: found[name] for name in readings}

    value_fn = _along(_ONE * _unit_of(grid), plan.smoothing_radius)
    start = {"x": jnp.zeros(dim)}
    run = _scanned(plan, public, unit, start, steps, value_fn, build, seen, clip)
    return Mechanism(run, readings, max(steps * width, _held(plan, dim)), plan)


def _along(slope: float, radius: float) -> Callable[[Any, Any], jax.Array]:
    """Returns a loss whose slope along any direction is plus or minus ``slope``."""

    def value_fn(params: Any, amounts: Any) -> jax.Array:
        x = params["x"][0]
        # Without a radius a derivative is taken, which a sign does not have.
        return amounts * (slope * (radius * jnp.sign(x) if radius else x))

    return value_fn


def of_increments(plan: Any, public: Keys, unit: Unit) -> Mechanism:
    """Returns the simulation of the first estimates of ``plans.O2NC``."""
    if plan.describe().slopes:
        return _of_estimated_slopes(plan, public, unit)
    gradients = not plan.perturbation(DIM).differences
    dim = DIM if gradients else DIM_OF_VALUES
    names = [p.name for p in plan.phases for _ in range(p.num_steps)]
    # The first steps of a period: of correlated noise, of one node and of several.
    steps = min(2, len(names), plan.num_steps)
    norms = plan.correlation.increment_norms()
    index = [_read(plan, public, t, names[t]) for t in range(steps)]
    radius = plan.smoothing_radius / math.sqrt(dim)
    size = _slice(plan, 2 * dim)

    def query(t: int) -> dict[str, jax.Array]:
        # As far apart as they may be: all of the bound is a record's.
        x = jnp.zeros(dim).at[0].set(1.5 * 2 * plan.max_step * (t % 2))
        return {"x": x, "query": x, "step": jnp.float32(t)}

    def value_fn_of(t: int) -> Callable[[Any, Any], jax.Array]:
        grid_unit = _unit_of(plan.grid(names[t]))
        several = _SEVERAL * grid_unit * math.sqrt(plan.num_directions)

        def value_fn(params: Any, amounts: Any) -> jax.Array:
            away = params["x"] - params["query"]
            if gradients:
                loss = _ONE * grid_unit * jnp.sum(away)
            else:
                loss = several * radius * jnp.sign(away[0])
            # At the query before it is zero, and so is its slope.
            return amounts * jnp.where(params["step"] == t, loss, 0)

        return unit.loss(value_fn)

    def run(own: Keys, _: Any, amount: jax.Array) -> dict[str, jax.Array]:
        keys = simulation.run_keys(plan, own, public)
        tx: Any = private_oracle(
            plan, keys, trainable=simulation.moves, microbatch_size=size
        )
        state, seen = tx.init(query(0)), {}
        for t in range(steps):
            rows = _records(plan, index[t], amount, unit)
            given = simulation.batch_of(plan, keys, jnp.int32(t), rows, names[t])
            given["value_fn"] = value_fn_of(t)
            state = state._replace(estimate=jnp.zeros(dim))
            _, state = tx.update(None, state, query(t), **given)
            seen[f"{names[t]}, step {t}"] = state.estimate
            if t == 0 and plan.clip_tuning is not None:
                seen[_COUNT] = state.release[-1]
        return seen

    readings = {
        f"{names[t]}, step {t}": _reading_of(plan.grid(names[t]), norms[t])
        for t in range(steps)
    }
    if plan.clip_tuning is not None:
        readings[_COUNT] = _reading_of(plan.numbers.count_grid)
    return Mechanism(run, readings, 2 * _held(plan, dim), plan)


def _of_estimated_slopes(plan: Any, public: Keys, unit: Unit) -> Mechanism:
    width = plan.num_directions
    dim, steps = max(16, 4 * width), min(plan.num_steps, max(STEPS // width, 1))
    (phase,) = plan.phases
    grid, start, clip = plan.grid(phase.name), {"x": jnp.zeros(dim)}, None
    tuned = plan.clip_tuning is not None
    if tuned:
        clip = jnp.full(2, grid.l2_clip_norm, jnp.float32)

    def seen(_: Any, after: Any) -> dict[str, jax.Array]:
        count = {_COUNT: after.release[-1]} if tuned else {}
        return {"slopes": after.estimate} | count

    run = _scanned(
        plan,
        public,
        unit,
        start,
        steps,
        _along(_ONE * _unit_of(grid), plan.smoothing_radius / math.sqrt(dim)),
        lambda keys, _: private_oracle(plan, keys),
        seen,
        clip,
    )

    # What the estimate of a step is of the slopes that were released.
    @jax.jit
    def bases() -> jax.Array:
        state: Any = private_oracle(plan, public).init(start)

        def basis(t: jax.Array) -> jax.Array:
            key = keys_lib.at_step(state.direction, t)
            rows = sphere.directions(key, start, law=plan.direction, num=width)
            one = lambda w: finite_difference.combine(w, rows, start)["x"]  # noqa: E731
            return jax.vmap(one)(jnp.eye(width)).T

        return jax.vmap(basis)(jnp.arange(steps))

    inverse = np.linalg.pinv(np.asarray(bases(), np.float64))
    reading = _reading_of(grid, plan.correlation.increment_norms()[0])
    readings = {"slopes": reading._replace(inverse=inverse)}
    if tuned:
        readings[_COUNT] = _reading_of(plan.numbers.count_grid)
    return Mechanism(run, readings, steps * max(dim, _held(plan, width)), plan)


def of_prefix_sums(plan: Any, public: Keys, unit: Unit) -> Mechanism:
    """Returns the simulation of the first noised updates of ``plans.PrefixSum``."""
    (phase,) = plan.phases
    grid = plan.grid(phase.name)
    dim = max(256, min(DIM, 2**26 // _rows(plan)))
    steps = min(2, plan.noise_period, plan.num_steps)
    norms, params = plan.correlation.increment_norms(), jnp.zeros(dim)
    index = [_read(plan, public, t, phase.name) for t in range(steps)]
    one = _ONE * _unit_of(grid)

    def run(own: Keys, _: Any, amount: jax.Array) -> dict[str, jax.Array]:
        keys = simulation.run_keys(plan, own, public)
        tx: Any = plan.transform(keys)
        state, seen = tx.init(params), {}
        for t in range(steps):
            rows = _records(plan, index[t], amount, unit)
            given = simulation.batch_of(plan, keys, jnp.int32(t), rows, phase.name)
            amounts = given["batch"].records
            updates = jnp.broadcast_to(one * amounts[:, None], (len(amounts), dim))
            update, state = tx.update(updates, state, params, batch=given["batch"])
            seen[f"step {t}"] = update
        return seen

    readings = {f"step {t}": _reading_of(grid, norms[t]) for t in range(steps)}
    return Mechanism(run, readings, dim * steps, plan)


def of_search(plan: Any, public: Keys, unit: Unit) -> Mechanism:
    """Returns the simulation of a refresh, a difference and the products of an escape."""
    dim, left_out = DIM_OF_VALUES, list[str]()
    refresh = plan.roles.refresh.grid
    one = _ONE * _unit_of(refresh)
    readings = {"refresh": _reading_of(refresh)}
    differs = plan.max_differences > 0 and plan.num_steps > 1
    # So far that a difference takes one record, where it takes as many as it must.
    away = 0.9 / (plan.difference_batch_rate * plan.smoothness * math.sqrt(dim))
    bend = 0.0
    if differs:
        grid, norms = plan.roles.difference.grid, plan.correlation.increment_norms()
        readings["difference"] = _reading_of(grid, norms[0])
        bend = _ONE * (plan.difference_batch_size or 1) * _unit_of(grid) / away
    size = min(plan.num_examples, max(plan.refresh_batch_size, 1), 2**12)
    records = np.arange(plan.num_examples)
    escape = _escape(plan, public, unit, left_out)
    if escape is not None:
        readings |= escape.readings

    @unit.loss
    def linear(x: jax.Array, amounts: jax.Array) -> jax.Array:
        return amounts * (one * jnp.sum(x))

    @unit.loss
    def quadratic(x: jax.Array, amounts: jax.Array) -> jax.Array:
        return amounts * (bend / 2 * jnp.sum(x**2))

    def data(index: int, amount: jax.Array) -> Any:
        return unit.data(jnp.where(records == index, amount, 0), index, "plus")

    def run(own: Keys, table: Any, amount: jax.Array) -> dict[str, Any]:
        keys = simulation.run_keys(plan, own, public)
        tx: Any = private_spider(plan, keys, microbatch_size=size)
        here, there = jnp.zeros(dim), jnp.full(dim, away)
        state, seen = tx.init(here), {}
        seen["refresh"], state = tx.update(
            None, state, here, value_fn=linear, batch=data(0, amount)
        )
        if differs:
            later = data(plan.refresh_batch_size, amount)
            state = state._replace(spider=state.spider._replace(estimate=here))
            seen["difference"], _ = tx.update(
                None, state, there, value_fn=quadratic, batch=later
            )
        return seen | ({} if escape is None else escape.run(own, table, amount))

    held = max(2 * dim, 0 if escape is None else escape.numbers)
    return Mechanism(run, readings, held, plan, tuple(left_out))


def _escape(
    plan: Any, public: Keys, unit: Unit, left_out: list[str]
) -> Mechanism | None:
    """Returns the simulation of an escape's first products; None if none can be read."""
    if plan.escape_steps is None:
        return None
    if plan.hessian == "released":
        left_out.append("Hessian: its lowest eigenvalue alone is seen")
        return None
    dim = plan.dim or DIM_OF_VALUES
    tracked = plan.hessian == "tracked"
    # Where there are few coordinates, in so many steps.
    counts = jnp.arange(max(1, min(DIM_OF_VALUES // dim, plan.num_steps)))
    length = plan.escape_radius * (1 - 1e-3)
    vector = np.full(dim, length / math.sqrt(dim), np.float32)
    if tracked:
        grid = plan.roles.hessian.grid
        grid_unit = one = float(np.float32(grid.product_unit))
    else:
        grid = plan.roles.hessian.grid(dim)
        if (plan.escape_radius + grid.rounding) ** 2 > plan.roles.hessian.budget:
            left_out.append("product with a Hessian: its budget is less than one step")
            return None
        one = grid.l2_clip_norm * plan.escape_radius * 2.0**-grid.bits
        grid_unit = float(np.float32(one / grid.normalizer))
    bend = float(_ONE * one / vector[0])

    @unit.loss
    def value_fn(x: jax.Array, amounts: jax.Array) -> jax.Array:
        return amounts * (bend / 2 * jnp.sum(x**2))

    def run(own: Keys, _: Any, amount: jax.Array) -> dict[str, jax.Array]:
        keys = simulation.run_keys(plan, own, public)
        algorithm = plan.algorithm(keys, microbatch_size=1)
        zero = jnp.zeros(dim)
        state: Any = algorithm.init(zero)
        amounts = jnp.zeros(plan.num_examples).at[0].set(0 if tracked else amount)
        data = unit.data(amounts, 0, "plus")
        hessian = state.escape.hessian
        if tracked:
            # The running sum of the records before, one of which is that of this amount.
            hessian = hessian._replace(frozen=jnp.eye(dim) * (amount * bend))
        escape = state.escape._replace(
            active=jnp.bool_(True),
            left=jnp.int32(9),
            anchor=-jnp.asarray(vector),
            gradient=zero,
            hessian=hessian,
        )
        # At zero, so that the next point is the product and nothing else.
        state = state._replace(escape=escape, point=zero)

        def product(count: jax.Array) -> jax.Array:
            horizon = state.horizon._replace(count=count)
            before = state._replace(horizon=horizon)
            after, _ = algorithm.step(before, data, value_fn=value_fn)
            return -after.point

        return {"product with a Hessian": jax.lax.map(product, counts)}

    reading = Reading(grid.noise_std, grid_unit / float(np.float32(plan.smoothness)))
    readings = {"product with a Hessian": reading}
    return Mechanism(run, readings, dim * len(counts), plan)
