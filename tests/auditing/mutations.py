"""Faults planted in a copy of the package, each of which an audit has to find, or a test.

Where the audit does not reach, a fault names the test that has to fail.

A fault is a piece of source text and what takes its place. To add one, add a line to
``MUTATIONS``; a piece that is not found exactly once is an error, so that a refactoring
cannot silently lose a fault. ``python -m tests.auditing.mutations [NAME ...]`` runs them.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.auditing.plans_of_faults import plan_named

ROOT = Path(__file__).resolve().parents[2]
#: Show most faults, and pass where there is none.
NUM_RUNS, MOST_RUNS = 5000, 20_000
#: Of the lattice adversary, where it is what shows a fault.
NUM_LATTICE_RUNS = 200

# What takes long to import, and holds no fault, is imported once. Each audit is a fork in
# its copy, whose package must be the one that is imported.
AUDITS = """
import json, os, signal, sys
import dp_accounting.pld, dp_accounting.rdp, jax, numpy, optax, rich.progress, scipy.stats
for line in sys.stdin:
    folder, words = json.loads(line)
    child = os.fork()
    if not child:
        try:
            signal.alarm(300)
            os.chdir(folder)
            sys.path.insert(0, folder)
            for number, name in (1, "out"), (2, "error"):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
            import jaxdp.cli
            assert jaxdp.cli.__file__.startswith(folder + os.sep), jaxdp.cli.__file__
            code = jaxdp.cli.main(["audit", *words])
            sys.stdout.flush()
            os._exit(code)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault: ``old`` in the file ``path`` becomes ``new``; ``plan`` shows it.

    Or, in place of a plan, ``test``: pytest's name of the test that fails.

    ``also`` holds further pieces, as (path, old, new). Where ``lattice``, the low digits
    of releases show it; ``unit`` is what the data sets of the audit differ in.
    """

    name: str
    path: str
    old: str
    new: str
    plan: str = ""
    test: str = ""
    also: tuple[tuple[str, str, str], ...] = ()
    num_runs: int = NUM_RUNS
    lattice: bool = False
    unit: str = "record"

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


DPZERO = "jaxdp/dpzero/transform.py"
COMMON = "jaxdp/core/run_state.py"
SCALAR = "jaxdp/dpzero/oracle.py"
STEP_OF_GRADIENTS = "jaxdp/dpgd/transform.py"
SAMPLING = "jaxdp/sampling/samplers.py"
SUMS_OF_PLANS = "jaxdp/mechanism/sums.py"

STEP = "jaxdp/core/release.py"
TOTAL = (
    "    return clip.grid_sum(rows, mask, bound, bits, order=grid.order, limit=limit)\n"
)
RELEASE = "return release.noised_mean(grid, total, Fixed(noise))"
SECRET = "secret = keys_lib.exact_noise_secret(keys)"
PUBLIC = "np.asarray(jax.random.key_data(keys.direction)).tobytes()"
#: The direction root as a key that noise can be drawn from: its two words, twice.
KNOWN = (
    "keys_lib.threefry.secret_key(keys_lib.jnp.tile("
    "keys_lib.jax.random.key_data(keys.direction), 2))"
)
ORACLE = "jaxdp/o2nc/gradient.py"
INCREMENT = "jaxdp/o2nc/oracle.py"
TOTAL_OF_PART = "    def total(part: tuple[Any, jax.Array]) -> Any:\n"
ADDED = """        estimate = increment
        if not restart:
            estimate = jax.tree.map(jnp.add, estimate, state.estimate)
"""
SCALED = "        grid = grid._replace(l2_clip_norm=grid.l2_clip_norm * share)\n"
SCALED_NOISE = (
    "        units = jnp.round(noise.high * share).astype(jnp.int32)\n"
    "        noise = noise._replace(high=units)\n"
)
#: What noise adds to the increment, from its integers.
ADDED_NOISE = "noise.high.astype(jnp.float32) * numbers.noise.grids[phase].noise_unit"
ROWS = "        rows = oracle.rows(asked)\n"
CLIPS = (INCREMENT, "jaxdp.kernels import finite", "jaxdp.kernels import clip, finite")
#: What is added on the grid without another look at the bound.
UNBOUNDED = """        most = grid.limit or 2**grid.bits
        units = jnp.round(rows * (most / grid.l2_clip_norm))
        return jnp.where(kept[:, None], units, 0).sum(axis=0).astype(jnp.int32)
"""
DRAWN = "carried, state.noise, where, size, phase"
STEP_KEY = "node_noise.draw(root, step, like, law))\n"
STEP_NOISE = "        integers = step_noise(numbers, state.noise, count)\n"

DESCENT = "jaxdp/saddle/algorithms/mirror_descent.py"
PLAYERS = "jaxdp/saddle/algorithms/players.py"
SUMS = "jaxdp/saddle/oracles/sums.py"
CHARGES = "jaxdp/saddle/theory/charges.py"
DRAWS_OF_ALL_STEPS = "return (num_steps - 1) * (num_draws + 1) * each"
CERTIFIED_DRAW = "        return simplex.sample(key, scores, num)\n"

SPIDER = "jaxdp/sosp/spider.py"
ESCAPES = "jaxdp/sosp/escapes.py"
SOSP_ROLES = "jaxdp/sosp/roles.py"

MWEM = "jaxdp/saddle/algorithms/mwem.py"
NOISE_OF_ROUND = (
    "    noise = run_state.gaussian(roots[0], count, widest, p.grid.noise_std)\n"
)
MWEM_PLAN = "jaxdp/saddle/plans/mwem.py"

USERS = "jaxdp/data/users.py"
SLOPES_OF_PART = "        some, kept = part\n"

GAP = "jaxdp/saddle/private_gap.py"
GOLDSTEIN = "jaxdp/metrics/private_goldstein.py"
AUDITS_OF_FUNCTIONS = "tests/auditing/test_functions.py"
PREFIX_SUM = "jaxdp/o2nc/prefix_sum_plan.py"
TESTS_OF_SUMS = "tests/o2nc/test_plan.py"
TUNING = "jaxdp/tuning.py"

SUBSET = "kernels/subset.py"
LATTICE = "kernels/lattice_gaussian.py"
#: What a draw was before it was one of integers: a float32 normal (from two words of its
#: own block) times the law's standard deviation, rounded to the grid.
ROUNDED_FLOAT = """    words = threefry.secret_block(key, index)
    stride = jnp.exp2(jnp.asarray(law.shift).astype(jnp.float32))
    kept = jnp.asarray(law.thresholds[0]).astype(jnp.float32) / 2.0**20
    other = jnp.asarray(law.alias).astype(jnp.float32)
    squares = kept * jnp.arange(kept.size) ** 2.0 + (1 - kept) * other**2
    std = jnp.sqrt(jnp.mean(squares) * stride**2 + (stride**2 - 1) / 2)
    one, two = ((w.astype(jnp.float32) + 0.5) / 2.0**32 for w in words[:2])
    normal = jnp.sqrt(-2 * jnp.log(one)) * jnp.cos(2 * math.pi * two)
    rounded = jnp.round(normal * std).astype(jnp.int32)
"""

MUTATIONS = (
    Mutation(
        "noise halved",
        SUMS_OF_PLANS,
        "std = self.law.std(self.units(self.sum_noise))",
        "std = self.law.std(self.units(self.sum_noise) / 2)",
        "full",
    ),
    Mutation(
        "noise of a count halved",
        SUMS_OF_PLANS,
        "self.units(self.count_noise_multiplier)",
        "self.units(self.count_noise_multiplier / 2)",
        "tuned gradients",
    ),
    Mutation(
        "a count without noise",
        STEP_OF_GRADIENTS,
        "counted = run_state.count_noise(state.noise, count, count_grid.noise_std)",
        "counted = run_state.count_noise(state.noise, count, 0)",
        "tuned gradients",
    ),
    Mutation(
        "sensitivity of zero-out for replace-one",
        "jaxdp/accounting/basics.py",
        "(2.0 if relation == ",
        "(1.0 if relation == ",
        "full",
    ),
    Mutation(
        "noise from the direction root",
        COMMON,
        'keys_lib.stream(keys.noise, "noise"',
        f'keys_lib.stream({KNOWN}, "noise"',
        "full",
    ),
    Mutation(
        "Laplace noise from the direction root",
        DPZERO,
        SECRET,
        f"secret = {PUBLIC}",
        "laplace",
    ),
    Mutation(
        "correlated noise from the direction root",
        COMMON,
        'keys_lib.stream(keys.noise, "noise"',
        f'keys_lib.stream({KNOWN}, "noise"',
        "tree",
    ),
    Mutation(
        "three quarters of the noise from the direction root",
        DPZERO,
        STEP_NOISE,
        f"        known = {KNOWN}\n"
        "        stds = grid.noise_std // 2, round(grid.noise_std * 0.75**0.5)\n"
        "        roots = state.noise, known\n"
        "        integers = sum(\n"
        "            run_state.gaussian(root, count, numbers.num_directions, std).high\n"
        "            for root, std in zip(roots, stds)\n"
        "        )\n",
        "full",
    ),
    Mutation(
        "two steps share one noise",
        COMMON,
        STEP_KEY,
        STEP_KEY.replace("step,", "step // 2,"),
        "full",
    ),
    Mutation(
        "two steps share one Laplace noise",
        DPZERO,
        "jax.lax.dynamic_index_in_dim(noise, step, keepdims=False)",
        "jax.lax.dynamic_index_in_dim(noise, step // 2, keepdims=False)",
        "laplace",
    ),
    Mutation(
        "division by the realised batch size",
        SCALAR,
        RELEASE,
        f"{RELEASE} * grid.normalizer / jnp.maximum(mask.sum(), 1)",
        "absent",
    ),
    Mutation(
        "clip after the mean",
        STEP,
        TOTAL,
        "    mean = jnp.where(mask[:, None], rows, 0).sum(axis=0) / grid.normalizer\n"
        "    unit = grid.normalizer * 2**bits / bound\n"
        "    return jnp.round(clip.clip_vector(mean, bound) * unit).astype(jnp.int32)\n",
        "full",
    ),
    Mutation(
        "a record of NaN passes",
        STEP,
        TOTAL,
        "    kept = jnp.where(mask[:, None], jnp.clip(rows, -bound, bound), 0)\n"
        "    return kept.sum(axis=0) * (2**bits / bound)\n",
        "full",
        also=((STEP, "(total << grid.shift) + noise.high", "total + noise.high"),),
    ),
    Mutation(
        "fixed batches accounted as Poisson",
        SAMPLING,
        "return subset.smallest(key, words, rows, threshold)",
        "return jnp.arange(rows), jnp.ones(rows, bool)",
        "sampled",
    ),
    Mutation(
        "lowest indices kept on overflow",
        SUBSET,
        "np.uint32(below), score, -jnp.inf)",
        "np.uint32(below), -jnp.arange(1.0 * len(words)), -jnp.inf)",
        "truncated",
    ),
    Mutation(
        "one group sampled in every step",
        SAMPLING,
        "group = jnp.asarray(step, jnp.int32) % self.num_groups",
        "group = jnp.int32(0)",
        "groups",
        num_runs=MOST_RUNS,
    ),
    Mutation(
        "a group charged as a sample of all records",
        SAMPLING,
        "        return self.of_a_group, self.group_size(num_examples)\n",
        "        q = self.sampling_prob / self.num_groups\n"
        "        return TruncatedPoisson(sampling_prob=q), num_examples\n",
        "groups",
        num_runs=MOST_RUNS,
    ),
    Mutation(
        "batches of an epoch that overlap",
        SAMPLING,
        """        batch = jnp.asarray(step, jnp.int32) % (num_examples // size)
        places = batch * size + jnp.arange(size)
""",
        """        batch = jnp.asarray(step, jnp.int32) % (num_examples // size)
        places = batch + jnp.arange(size)
""",
        "epochs",
    ),
    Mutation(
        "places of a batch taken for records",
        "kernels/subset.py",
        "    return jnp.where(found, index, 0), found\n",
        "    return jnp.arange(num), found\n",
        "few of many",
        num_runs=2000,
    ),
    # The printed index of the tree is t mod Sigma, and no node at all where that is 0.
    Mutation(
        "no noise on the sum of a whole period",
        "kernels/tree_noise.py",
        "noise = _row(state, level)\n",
        "noise = _row(state, level)\n"
        "        noise = jax.tree.map(lambda x: x * (step + 1 < self.period), noise)\n",
        "tree",
    ),
    Mutation(
        "every period has the same noise",
        "jaxdp/core/correlated_noise.py",
        "keys_lib.at_step(noise.root, where.period)",
        "noise.root",
        "tree",
    ),
    Mutation(
        "correlated noise halved",
        SUMS_OF_PLANS,
        "accounting.integer_std(self.node_std / unit * _MORE)",
        "accounting.integer_std(self.node_std / unit / 2)",
        "tree",
    ),
    Mutation(
        "leaves of zero-out for replace-one",
        SUMS_OF_PLANS,
        "name: accounting.sensitivity(self.relation, bound) / size",
        "name: bound / size",
        "tree",
    ),
    Mutation(
        "a cursor that overlaps by one",
        SAMPLING,
        "first += every.restart_batch_size + (at - 1) * self.size",
        "first += every.restart_batch_size + (at - 1) * self.size - 1",
        "tree",
        num_runs=MOST_RUNS,
    ),
    # Directions in the ball do no harm while the vector itself is clipped, as it is here.
    # So the clip goes to the score, which is enough for a vector of length sqrt(d), and
    # the estimate gets the factor that makes it unbiased again.
    Mutation(
        "ball at the sensitivity of the sphere",
        INCREMENT,
        TOTAL_OF_PART,
        """    def bounded_sum(grid, rows, kept):
        v = jax.vmap(lambda one: sphere.materialise(one, params))(draw(key))
        v = parts.split(v, moves)
        scores = jnp.sum(rows * v, axis=1) / jnp.sum(v * v)
        bounded = clip.clip_scalar(scores, grid.l2_clip_norm / v.size**0.5)
        unbiased = jnp.where(kept, bounded, 0)[:, None] * v * (1 + 2 / v.size)
        most = grid.limit or 2**grid.bits
        units = jnp.round(unbiased * (most / grid.l2_clip_norm))
        return units.sum(axis=0).astype(jnp.int32)

"""
        + TOTAL_OF_PART,
        "one direction",
        num_runs=MOST_RUNS,
        also=(
            (INCREMENT, "law=numbers.direction", 'law="ball"'),
            (INCREMENT, "return release.bounded_sum(", "return bounded_sum("),
            CLIPS,
        ),
    ),
    # In float32 the estimate must be 2**24 times the noise: too many records to simulate.
    Mutation(
        "data rounded before the noise arrives",
        ORACLE,
        ADDED,
        f"""        estimate = increment
        if not restart:
            drawn = {ADDED_NOISE}
            data = jax.lax.reduce_precision(state.estimate + (increment - drawn), 8, 7)
            estimate = data + drawn
""",
        "large estimate",
        num_runs=MOST_RUNS,
    ),
    Mutation(
        "the running estimate has no noise",
        ORACLE,
        ADDED,
        ADDED.replace("increment", f"increment - {ADDED_NOISE}", 1),
        "tree",
    ),
    Mutation(
        "several passes charged as one",
        SUMS_OF_PLANS,
        "num_steps=counts[name],",
        "num_steps=1,",
        "several passes",
    ),
    Mutation(
        "full batches charged as samples",
        SUMS_OF_PLANS,
        "sampler.of_phase(name),",
        "type(sampler)(period=1, restart_sampling_prob=0.05).of_phase('restart'),",
        "several passes",
    ),
    Mutation(
        "all records read and a sample charged",
        "jaxdp/sampling/batches.py",
        "sampler.of_phase(phase).draw(key, step, n)",
        "None, jnp.ones(n, bool)",
        "samples",
    ),
    Mutation(
        "noise scaled with the movement squared",
        INCREMENT,
        SCALED,
        SCALED + SCALED_NOISE,
        "moved",
    ),
    Mutation(
        "noise scaled with the movement, and no clip",
        INCREMENT,
        SCALED,
        SCALED_NOISE,
        "moved",
    ),
    Mutation(
        "noise that moves twice where clips move once",
        INCREMENT,
        "    released = release.noised_mean(grid, summed, noise)\n",
        "    factor = grid.l2_clip_norm / numbers.noise.grids[phase].l2_clip_norm\n"
        "    units = jnp.round(noise.high * factor).astype(jnp.int32)\n"
        "    noise = noise._replace(high=units)\n"
        "    released = release.noised_mean(grid, summed, noise)\n",
        "tuned",
    ),
    Mutation(
        "noise of a restart's count halved",
        SUMS_OF_PLANS,
        "return Grid(0.5, bits, size, accounting.integer_std(units))",
        "return Grid(0.5, bits, size, accounting.integer_std(units / 2))",
        "tuned",
    ),
    Mutation(
        "counts of several passes charged as one",
        "jaxdp/o2nc/releases.py",
        "math.sqrt(counts) * share",
        "share",
        test="tests/o2nc/test_clip_tuning.py::test_sums_and_counts_are_charged_as_one",
    ),
    Mutation(
        "gradients clipped one by one",
        INCREMENT,
        ROWS,
        """        def clipped(at):
            rows = oracle.rows(asked._replace(points=(at,)))
            return clip.clip_vector(rows, grid.l2_clip_norm)

        rows = clipped(params)
        if phase != "restart":
            rows -= clipped(previous)
"""
        + UNBOUNDED,
        "gradients",
        also=(CLIPS,),
    ),
    Mutation(
        "slopes clipped one by one",
        INCREMENT,
        ROWS,
        ROWS + "        rows = clip.clip_scalar(rows, grid.l2_clip_norm)\n" + UNBOUNDED,
        "slopes",
        also=(CLIPS,),
    ),
    Mutation(
        "a restart and the next change share one noise",
        ORACLE,
        DRAWN,
        DRAWN.replace("where", "where._replace(at=jnp.maximum(where.at, 1))"),
        "gradients",
    ),
    Mutation(
        "2 k draws counted as k",
        CHARGES,
        DRAWS_OF_ALL_STEPS,
        f"{DRAWS_OF_ALL_STEPS} / 2",
        "saddle",
        num_runs=30_000,
    ),
    Mutation(
        "scores of zero-out for replace-one",
        "jaxdp/saddle/plans/scores.py",
        "return accounting.sensitivity(self.relation, 1.0)",
        "return 1.0",
        "saddle",
    ),
    Mutation(
        "coordinates not clipped",
        SUMS,
        "jnp.round(clip.clip_scalar(x, bound.clip) *",
        "jnp.round(jnp.where(jnp.isfinite(x), x, 0) *",
        "saddle",
        also=((SUMS, "jnp.where(ok, jnp.clip(units, -limit, limit), 0)", "units"),),
    ),
    Mutation(
        "a record in two batches",
        DESCENT,
        "players.batch(p.run, data, count * size, size, active)",
        "players.batch(p.run, data, count * (size - 1), size, active)",
        "saddle",
    ),
    # Flagged by the enumerated case: no number of runs would show it.
    Mutation(
        "float32 inverse CDF in certified mode",
        PLAYERS,
        CERTIFIED_DRAW,
        """        prefix = jnp.cumsum(jnp.exp(scores.astype(jnp.float32) * _LOGIT))
        uniform = jax.random.uniform(key, (num,)) * prefix[-1]
        return jnp.searchsorted(prefix, uniform, side="right").astype(jnp.int32)
""",
        "saddle",
    ),
    Mutation(
        "no least weight of a vertex",
        "kernels/simplex.py",
        "below = (-jnp.clip(scores, -(OCTAVES << BITS), 0))",
        "below = -scores",
        "saddle",
    ),
    Mutation(
        "two steps share one vertex key",
        DESCENT,
        "(keys_lib.at_step(root, count) for root in state.roots)",
        "(keys_lib.at_step(root, count // 2) for root in state.roots)",
        "saddle",
    ),
    Mutation(
        "both players share one vertex key",
        DESCENT,
        'ROLES = ("vertices_x", "vertices_y")',
        'ROLES = ("vertices_x", "vertices_x")',
        "saddle",
    ),
    Mutation(
        "vertices from the direction root",
        PLAYERS,
        "keys_lib.stream(keys.noise, role, context=context)",
        f"keys_lib.stream({KNOWN}, role, context=context)",
        "saddle",
    ),
    Mutation(
        "a full batch charged as one step",
        "jaxdp/saddle/plans/frank_wolfe.py",
        "draws = self.num_steps if self.full_batch else 1",
        "draws = 1",
        "frank_wolfe of all",
    ),
    Mutation(
        "a record in two batches of Frank-Wolfe",
        "jaxdp/saddle/algorithms/frank_wolfe.py",
        "if p.full_batch else count * size",
        "if p.full_batch else count * (size - 1)",
        "frank_wolfe",
    ),
    Mutation(
        "scores of Frank-Wolfe doubled",
        "jaxdp/saddle/algorithms/frank_wolfe.py",
        "normalized(-grid.change(above))",
        "normalized(-2 * grid.change(above))",
        "frank_wolfe",
    ),
    # The range of a draw is twice the sensitivity: up at one vertex and down at another.
    Mutation(
        "a choice charged for half of its range",
        CHARGES,
        "return 2 * moved if pure else",
        "return moved if pure else",
        "choice",
    ),
    Mutation(
        "a choice that knows no replacement",
        "jaxdp/saddle/plans/frank_wolfe.py",
        "record_bits(2 * size), size, self.kappa)",
        "record_bits(2 * size), size, 1.0)",
        "choice",
    ),
    Mutation(
        "no noise on a refresh",
        SPIDER,
        "point.size, grid.noise_std",
        "point.size, 0",
        "sosp",
    ),
    Mutation(
        "all refreshes have the same noise",
        SPIDER,
        "gaussian(noise.refresh, number, point.size",
        "gaussian(noise.refresh, 0, point.size",
        "sosp",
    ),
    Mutation(
        "all trees have the same noise",
        SPIDER,
        "keys_lib.at_step(noise.difference, spider.refreshes)",
        "noise.difference",
        "sosp",
    ),
    Mutation(
        "a tree that runs across a pass boundary",
        SPIDER,
        "kind = jnp.where(turn & ~last, REFRESH, kind)",
        "",
        "passes",
        also=(
            (
                SPIDER,
                "            differences=spider.differences + 1,\n",
                "            differences=spider.differences + 1,\n"
                "            passes=spider.passes + query.turn,\n",
            ),
        ),
    ),
    Mutation(
        "a clamped slice that reads spent records",
        "kernels/stretch.py",
        "place = start + places",
        "place = begin + places",
        "short data",
        num_runs=40_000,
    ),
    Mutation(
        "an escape's batch that is read again",
        ESCAPES,
        "jnp.where(start, first + size, spider.cursor)",
        "spider.cursor",
        "sosp",
        num_runs=40_000,
    ),
    Mutation(
        "an escape that does not end",
        ESCAPES,
        "~far & (left <= 0)",
        "~far & (left < -9)",
        "sosp",
    ),
    Mutation(
        "products of an escape charged as one",
        SOSP_ROLES,
        "move * self.radius * math.sqrt(",
        "move * self.radius * bool(",
        "sosp",
    ),
    Mutation(
        "steps of an escape share one noise",
        ESCAPES,
        "gaussian, escape.root, state.horizon.count, x.size",
        "gaussian, escape.root, 0, x.size",
        "sosp",
    ),
    Mutation(
        "noise of escapes from the direction root",
        "jaxdp/sosp/algorithm.py",
        'keys_lib.stream(keys.noise, "escape"',
        f'keys_lib.stream({KNOWN}, "escape"',
        "sosp",
    ),
    Mutation(
        "leaves without the length of their column",
        SOSP_ROLES,
        "noise_multiplier * moves * longest",
        "noise_multiplier * moves",
        "sosp",
    ),
    Mutation(
        "more escapes than a running Hessian may serve in",
        "jaxdp/sosp/algorithm.py",
        "escape.since >= numbers.escapes_per_refresh",
        "escape.since >= 9",
        "tracked",
        num_runs=MOST_RUNS,
    ),
    # What the running Hessian's first version did.
    Mutation(
        "matrices clipped at the bound of their grid",
        "jaxdp/sosp/hessian.py",
        ".reshape(-1, dim, dim), limit)",
        ".reshape(-1, dim, dim), limit * 2)",
        "tracked",
    ),
    Mutation(
        "each record of a user clipped in place of their mean",
        SCALAR,
        SLOPES_OF_PART,
        SLOPES_OF_PART
        + """        kept = (kept[:, None] & some.mask).reshape(-1)
        some = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), some.records)
""",
        "full",
        also=(
            (
                USERS,
                "lambda params, users: mean(value_fn(params, flat(users)), users)",
                "value_fn",
            ),
        ),
        unit="user",
    ),
    Mutation(
        "records beyond the most of a user become another row",
        USERS,
        "    kept = np.flatnonzero(place < records_per_user)\n"
        "    where = row[kept], place[kept]\n",
        "    kept = np.arange(size)\n"
        "    another, at = np.divmod(place, records_per_user)\n"
        "    where = (row + another) % len(every), at\n",
        "full",
        unit="user",
    ),
    Mutation(
        "a user's row is what follows its first record in the data",
        USERS,
        "    index[where] = kept\n",
        "    index[where] = kept\n"
        "    following = index[:, :1] + np.arange(records_per_user)\n"
        "    index = np.minimum(following, max(size - 1, 0))\n",
        "full",
        also=((USERS, "    mask[where] = True\n", "    mask[:] = held[:, None]\n"),),
        unit="user",
    ),
    Mutation(
        "division by the realised number of records of users",
        SCALAR,
        RELEASE,
        f"{RELEASE} * grid.normalizer / (records.mask & mask[:, None]).sum()",
        "absent",
        unit="user",
    ),
    # Of 10 cells that are released, as if the noise were shared by them.
    Mutation(
        "noise on marginals divided by their cells",
        MWEM_PLAN,
        "accounting.integer_std(std * 2**bits)",
        "accounting.integer_std(std * 2**bits / len(self.attributes) ** 0.5)",
        "marginals",
    ),
    # It halves the sensitivity that the draws are charged for, not what one record moves.
    Mutation(
        "sensitivity of scores halved",
        MWEM_PLAN,
        "return int(accounting.sensitivity(self.relation, 1.0))",
        "return 1",
        "drawn marginals",
    ),
    Mutation(
        "scores of marginals doubled",
        MWEM,
        "grid.change(below << grid.bits))",
        "2 * grid.change(below << grid.bits))",
        "drawn marginals",
    ),
    Mutation(
        "one noise for all rounds of marginals",
        MWEM,
        NOISE_OF_ROUND,
        NOISE_OF_ROUND.replace("count", "0"),
        "drawn marginals",
    ),
    # Which is large enough, and of whole units; but it shows the parity of counts.
    Mutation(
        "an even number of counts as the noise of a drawn marginal",
        MWEM,
        NOISE_OF_ROUND,
        f"{NOISE_OF_ROUND}    two = p.grid.shift + 1\n"
        "    noise = noise._replace(high=(noise.high >> two) << two)\n",
        "drawn marginals",
        num_runs=1000,
        lattice=True,
    ),
    # What the library did, too: parities of un-noised sums showed.
    Mutation(
        "a float rounded to the grid",
        LATTICE,
        "    return (table << jnp.asarray(law.shift)) + (smooth - centre)\n",
        f"{ROUNDED_FLOAT}    return rounded\n",
        "DPGD",
        num_runs=1000,
        lattice=True,
    ),
    Mutation(
        "a float rounded to the grid in place of a fine number",
        LATTICE,
        "    return high, low\n",
        f"{ROUNDED_FLOAT}    return rounded, jnp.zeros_like(low)\n",
        "PrefixSum, buffers",
        num_runs=1000,
        lattice=True,
    ),
    # The std that is stated stays.
    Mutation(
        "noise of the private gap halved",
        GAP,
        "noise.discrete_gaussian(coins, std, 1)",
        "noise.discrete_gaussian(coins, std // 2, 1)",
        test=f"{AUDITS_OF_FUNCTIONS}::test_private_gap",
    ),
    Mutation(
        "sensitivity of add-or-remove for a private gap under replace-one",
        GAP,
        "kappa = accounting.sensitivity(relation, 1.0)",
        'kappa = accounting.sensitivity("add_or_remove", 1.0)',
        test=f"{AUDITS_OF_FUNCTIONS}::test_private_gap",
    ),
    Mutation(
        "noise of the private gap from the direction root",
        GAP,
        "noise.Coins(keys_lib.exact_noise_secret(keys), ",
        f"noise.Coins({PUBLIC}, ",
        test=f"{AUDITS_OF_FUNCTIONS}::test_private_gap",
    ),
    Mutation(
        "noise of a Goldstein bound from the direction root",
        GOLDSTEIN,
        "    tx: Any = plan.transform(keys, microbatch_size=microbatch_size)\n",
        "    root = jax.numpy.tile(jax.random.key_data(keys.direction), 2)\n"
        "    noise = keys_lib.threefry.secret_key(root)\n"
        "    keys = keys_lib.dataclasses.replace(keys, noise=noise)\n"
        "    tx: Any = plan.transform(keys, microbatch_size=microbatch_size)\n",
        test=f"{AUDITS_OF_FUNCTIONS}::test_private_goldstein",
    ),
    Mutation(
        "sensitivity of zero-out for a Goldstein bound under replace-one",
        GOLDSTEIN,
        "        relation=relation,\n",
        '        relation="zero_out",\n',
        test=f"{AUDITS_OF_FUNCTIONS}::test_private_goldstein",
    ),
    Mutation(
        "a record of several passes charged for one column",
        "kernels/prefix_noise.py",
        "kernel.repeated_norm(separation))",
        "kernel.column_norms().max())",
        test=f"{TESTS_OF_SUMS}::test_passes_of_one_order_are_one_release",
    ),
    # A row of C then holds two steps of a record, and the charge knows of one.
    Mutation(
        "a band more than the groups",
        PREFIX_SUM,
        "min(bands, period))",
        "min(bands + 1, period))",
        test=f"{TESTS_OF_SUMS}::test_bands_that_are_sampled_cost_"
        "what_independent_noise_costs",
    ),
    Mutation(
        "more numbers of a plan's own than groups",
        PREFIX_SUM,
        "if most and len(found) > most:",
        "if most and len(found) > most + 1:",
        test=f"{TESTS_OF_SUMS}::test_coefficients_refuse",
    ),
    # What carries noise over is then another matrix than the one that is charged.
    Mutation(
        "kept increments of a band less than are read",
        "kernels/toeplitz_noise.py",
        "np.int32(max(self._lags, 1))",
        "np.int32(max(self._lags - 1, 1))",
        test=f"{TESTS_OF_SUMS}::test_no_record_moves_the_prefix_sums_by_more_than_is_"
        "charged",
    ),
    # Negative ones would make of a record's worst signs others than are charged.
    Mutation(
        "numbers of a plan's own that may be negative",
        "kernels/toeplitz_noise.py",
        "if not 0 <= number <=",
        "if not -1 <= number <=",
        test=f"{TESTS_OF_SUMS}::test_coefficients_refuse",
    ),
    Mutation(
        "coefficients of a band more than asked for",
        "kernels/toeplitz_noise.py",
        "min(self.bands or self.period, self.period) - 1",
        "min(self.bands or self.period, self.period - 1)",
        test="tests/kernels/test_toeplitz_noise.py::test_bands",
    ),
    Mutation(
        "a number of trials that is not drawn",
        TUNING,
        "range(_num_trials(coins, mean_trials, shape))",
        "range(round(mean_trials))",
        test=f"{AUDITS_OF_FUNCTIONS}::test_tune",
    ),
    Mutation(
        "at least as many trials as candidates",
        TUNING,
        "range(_num_trials(coins, mean_trials, shape))",
        "range(max(_num_trials(coins, mean_trials, shape), num_candidates))",
        test=f"{AUDITS_OF_FUNCTIONS}::test_tune",
    ),
    Mutation(
        "a search charged as one trial",
        TUNING,
        "return accounting.repeat_and_select(one, mean=mean_trials, shape=shape)",
        "return one",
        test=f"{AUDITS_OF_FUNCTIONS}::test_tune",
    ),
    Mutation(
        "all trials with the keys of the first",
        TUNING,
        "keys_lib.trial(keys, trial)",
        "keys_lib.trial(keys, 0)",
        test="tests/test_tuning.py::test_trials_have_keys_of_their_own",
    ),
)


def faulty(mutation: Mutation) -> dict[str, str]:
    """The texts of the files that have the fault, by path.

    Raises:
      ValueError: a piece of text is not there, or more than once.
    """
    texts: dict[str, str] = {}
    for name, old, new in ((mutation.path, mutation.old, mutation.new), *mutation.also):
        text = texts.get(name) or (ROOT / name).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(
                f"{name} must hold the text of {mutation.name!r} once, but has it "
                f"{text.count(old)} times: {old!r}"
            )
        texts[name] = text.replace(old, new)
    return texts


def plant(mutation: Mutation | None, folder: Path) -> None:
    """A copy of the package in ``folder``, with the fault."""
    texts = {} if mutation is None else faulty(mutation)
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("kernels", "jaxdp"):  # jaxdp/kernels is a link to the former.
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leave)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


#: (fault, plan) -> exit code and answer of ``jaxdp audit`` in a copy with the fault.
Auditor = Callable[[Mutation | None, str], tuple[int, dict[str, Any]]]


@contextlib.contextmanager
def auditor() -> Iterator[Auditor]:
    """Starts the process of which each audit is a fork; RuntimeError if it gives none."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", AUDITS],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=tempfile.gettempdir(),  # Where no jaxdp is.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def audited(mutation: Mutation | None, plan: str) -> tuple[int, dict[str, Any]]:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name).resolve()
                plant(mutation, folder)
                text = plan_named(plan).to_json()
                (folder / "plan.json").write_text(text, encoding="utf-8")
                words = [folder / "plan.json", "--json", "--num-steps", 8]
                words += ["--num-runs", mutation.num_runs if mutation else MOST_RUNS]
                by_digits = mutation is not None and mutation.lattice
                words += ["--lattice-runs", NUM_LATTICE_RUNS if by_digits else 0]
                words += ["--unit", mutation.unit if mutation else "record"]
                with contextlib.suppress(BrokenPipeError):
                    print(json.dumps([str(folder), list(map(str, words))]), file=asked)
                    asked.flush()
                answer = answers.readline()
                if not answer:
                    raise RuntimeError(f"{mutation}: the process of audits has ended")
                code = int(answer)
                shown, error = ((folder / n).read_text() for n in ("out", "error"))
            if code not in (0, 1) or not shown:
                raise RuntimeError(f"{mutation}: {code}\n{shown}{error}")
            return code, json.loads(shown)

        yield audited


def with_tests(mutation: Mutation | None, *tests: str) -> tuple[int, str]:
    """Runs tests in a copy with the fault: pytest's exit code, and what it said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        plant(mutation, folder)
        leave = shutil.ignore_patterns("__pycache__")
        for part in ("tests", "bench"):
            shutil.copytree(ROOT / part, folder / part, ignore=leave)
        shutil.copy(ROOT / "pyproject.toml", folder)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *tests],
            cwd=folder,
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
        )
    # Another code is of no test that failed, and neither is an error around one.
    if done.returncode not in (0, 1) or " error" in done.stdout.splitlines()[-1]:
        raise RuntimeError(f"{mutation}: {done.stdout}{done.stderr}")
    return done.returncode, done.stdout


def main(names: list[str]) -> int:
    """Runs the named mutations, or all; 1 if one was not flagged."""
    named = [m for m in MUTATIONS if not names or str(m) in names]
    by_tests = [(m, with_tests(m, m.test)[0]) for m in named if m.test]
    for mutation, code in by_tests:
        print(f"{_verdict(code)}  {mutation.name}  ({mutation.test})")  # noqa: T201
    chosen = [m for m in named if not m.test]
    with auditor() as audited:
        found = [audited(m, m.plan) for m in chosen]
    for mutation, (code, answer) in zip(chosen, found, strict=True):
        if mutation.lattice:
            answer = answer["lattice"]
        bounds = f"{answer['epsilon_lower']:7.3f} against {answer['epsilon']:.3f}"
        said = f"{_verdict(code)}  {bounds}  {mutation.name}  ({answer['method']})"
        print(said)  # noqa: T201
    codes = [code for code, _ in found] + [code for _, code in by_tests]
    return int(any(code != 1 for code in codes))


def _verdict(code: int) -> str:
    return "flagged" if code == 1 else "MISSED "


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
