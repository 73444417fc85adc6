r"""Private online-to-non-convex conversion: what each choice does to noise and outcome.

The loss is :math:`\|x\|_1/\sqrt d + \langle z, x\rangle` with d = 8 and ||z|| = 1/2, read
once: 51200 records, (8, 1e-5) under replace-one, windows and restarts of T = 64 queries,
K = 400 of them, a batch of T + 1 where the oracle restarts and 1 elsewhere, 8 directions,
smoothing radius 1/2, x_1 = (1, ..., 1), with reset. The learner's step is
:math:`D/(G\sqrt T)`, D = 1/2/T and G = L + the noise's root mean square at its worst.

The paper's noise is that of Corollary 4.4 with the paper's conversion of epsilon, which
spends less than it may (row "epsilon"); "exact" noise is calibrated by the plan. "BLT-3"
is the library's kernel of least worst variance. "naive" restarts at every query, with a
batch of 2 and one direction a record: the paper's appendix E. "certified" is the library's
own choice, ``plans.O2NC.certified``. Orthonormal directions go with antithetic
differences, the others with one-sided ones.

"stationarity" is the mean over blocks of T queries, the same in all rows, of the norm of
the mean of :math:`\nabla\hat F` over the block, in closed form; "own windows" takes the
plan's windows as blocks, as the bound does (longer ones average more); "sampling error" is
:math:`E\|g-\nabla\hat F\|^2` of the estimate without its noise. The noise of a run is what
the same keys release of losses that are all zero; "noise energy" is the mean of its square.
The Goldstein norm of the returned point is an upper bound, for the expected loss: at twice
the smoothing radius, which the guarantee is about and where nearly all reach zero, and at
half of it, where they differ. All are means over seeds, of data, directions and noise, with
the 95% interval of Student's t.

Source: Zhang, Tran, Cutkosky, 2024. With ``--out DIR`` it draws stationarity and noise.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from bench import _harness, problems
from jaxdp import Keys, metrics, models, plans, sampling
from jaxdp.cli import plots
from jaxdp.core.types import Phase
from jaxdp.o2nc.theory import estimators

DIM, WINDOW, WINDOWS = 8, 64, 400
RADIUS = 0.5
EPSILON, DELTA = 8.0, 1e-5
PROBLEM = problems.l1_linear(DIM)
#: E z = 0 and z enters linearly: one record that stands for the expected loss.
EXPECTED = (np.zeros((1, DIM), np.float32),)
PAPER, BEST = "paper's noise, tree", "exact, BLT-3, orthonormal"
PNG = "o2nc.png"


# --- variants ----------------------------------------------------------------------


def variants(num_windows: int = WINDOWS) -> dict[str, plans.O2NC]:
    """The plans that are compared, on ``2 WINDOW num_windows`` records."""
    plain = _plan(num_windows, "sphere", "one_sided")
    ours = _plan(num_windows, "orthonormal", "antithetic")
    blt = _plan(num_windows, "orthonormal", "antithetic", prefix_noise="blt_3")
    naive = _plan(num_windows, "sphere", "one_sided", period=1)
    certified = plans.O2NC.certified(
        num_examples=plain.num_examples,
        dim=DIM,
        epsilon=EPSILON,
        delta=DELTA,
        relation=plain.relation,
        lipschitz=PROBLEM.lipschitz,
        initial_gap=PROBLEM.initial_gap,
        smoothing_radius=RADIUS,
    )
    # Corollary 4.4, and its epsilon of rho; 2 C2 is how far a record moves a difference.
    rho = EPSILON / (2 * math.sqrt(math.log(1 / DELTA)))
    paper = math.sqrt(2 * math.log(WINDOW)) * 2 * plain.l2_clip_norm / rho

    def exact(plan: plans.O2NC) -> plans.O2NC:
        return _tuned(plan.calibrate(epsilon=EPSILON, delta=DELTA))

    return {
        "not private": _tuned(plain.with_noise(noise_multiplier=0.0)),
        "not private, orthonormal": _tuned(ours.with_noise(noise_multiplier=0.0)),
        "naive": exact(naive),
        PAPER: _tuned(plain.with_noise(noise_multiplier=paper / plain.sensitivity)),
        "exact, tree": exact(plain),
        "exact, tree, orthonormal": exact(ours),
        BEST: exact(blt),
        "certified": certified,
    }


def _plan(
    num_windows: int,
    direction: estimators.Direction,
    difference: estimators.Difference,
    *,
    period: int = WINDOW,
    prefix_noise: str = "tree",
) -> plans.O2NC:
    """A plan without noise, with clips that no record of the problem reaches."""
    naive = period == 1
    max_step = RADIUS / WINDOW
    m = 1 if naive else DIM
    clips = estimators.Estimator(m, direction, difference).clips(
        DIM, 2 * max_step / RADIUS
    )
    restart, rest = (PROBLEM.lipschitz * float(clip) for clip in clips)
    return plans.O2NC(
        num_examples=2 * WINDOW * num_windows,
        num_steps=WINDOW * num_windows,
        sampling=sampling.SinglePassRestarts(
            period=period, restart_batch_size=2 if naive else WINDOW + 1
        ),
        relation="replace_one",
        restart_l2_clip_norm=restart,
        l2_clip_norm=rest,
        smoothing_radius=RADIUS,
        max_step=max_step,
        window=WINDOW,
        num_directions=m,
        direction=direction,
        difference=difference,
        prefix_noise=prefix_noise,
    )


def _tuned(plan: plans.O2NC) -> plans.O2NC:
    """The plan with the step size D / (G sqrt(T)) for its noise."""
    largest = PROBLEM.lipschitz + math.sqrt(DIM) * plan.noise_std
    rate = plan.max_step / (largest * math.sqrt(plan.window))
    return dataclasses.replace(plan, learning_rate=rate)


def predicted_energy(plan: plans.O2NC) -> float:
    """Of a run's noise: the mean over a period of E ||N_t||^2."""
    return DIM * plan.node_std**2 * float(np.mean(plan.correlation.prefix_norms() ** 2))


# --- runs --------------------------------------------------------------------------


class Path(NamedTuple):
    """What a run asked and was told, and where it went."""

    queries: jax.Array  # shape=(num_steps, d)
    estimates: jax.Array  # shape=(num_steps, d); released gradients at the queries
    last: jax.Array  # shape=(d,)
    returned: jax.Array  # shape=(d,)


def follow(plan: plans.O2NC, keys: Keys, data: Any, scale: float | jax.Array) -> Path:
    """A whole run of a plan, on ``scale`` times the losses, in one program.

    The steps are those of ``jaxdp.fit``; scans keep what is seen on the way.
    """
    tx = plan.transform(keys)

    def value_fn(x: jax.Array, batch: Any) -> jax.Array:
        return scale * PROBLEM.value_fn(x, batch)

    def step(phase: Phase, carry: Any, index: jax.Array) -> tuple[Any, Any]:
        x, state = carry
        batch = sampling.batch(plan, keys, index, data, phase=phase.name)
        update: Any = tx.update
        updates, state = update(
            None, state, x, value_fn=value_fn, batch=batch, phase=phase.name
        )
        seen = (x, state.oracle.estimate)
        return (optax.apply_updates(x, updates), state), seen

    def period(carry: Any, first: jax.Array) -> tuple[Any, Any]:
        parts = []
        for phase in plan.phases:
            steps = first + jnp.arange(phase.num_steps)
            carry, seen = jax.lax.scan(functools.partial(step, phase), carry, steps)
            first = first + phase.num_steps
            parts.append(seen)
        return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    x = jnp.asarray(PROBLEM.x0)
    # Steps beyond the plan's last do nothing.
    starts = jnp.arange(0, plan.num_steps, plan.sampling.period)
    (x, state), seen = jax.lax.scan(period, (x, tx.init(x)), starts)
    queries, estimates = (s.reshape(-1, DIM)[: plan.num_steps] for s in seen)
    return Path(queries, estimates, x, plan.returned(state.driver, x))


class Runs(NamedTuple):
    """A run, and beside it, step for step, its noise alone: the same without losses.

    Of several runs, each array with an axis of seeds in front.
    """

    path: Path
    noise: jax.Array  # shape=(num_steps, d)


def run_one(plan: plans.O2NC, keys: Keys, data: Any) -> Runs:
    follow_scaled = functools.partial(follow, plan, keys, data)
    both = jax.vmap(follow_scaled)(jnp.array([1.0, 0.0]))
    return Runs(jax.tree.map(lambda x: x[0], both), both.estimates[1])


def run_seeds(plan: plans.O2NC, seeds: Sequence[int]) -> Runs:
    """The runs of all seeds, which draw the data too, in one compiled program."""
    every = [PROBLEM.make_data(plan.num_examples, seed) for seed in seeds]
    data = jax.tree.map(lambda *x: jnp.stack(x), *every)
    program = jax.jit(_harness.over_seeds(functools.partial(run_one, plan)))
    return program(jax.vmap(Keys.insecure)(jnp.array(seeds)), data)


@jax.jit
def smoothed_gradients(queries: jax.Array) -> jax.Array:
    """Of the expected loss at any number of points; shape=(..., d)."""
    smoothed: Any = PROBLEM.smoothed_gradient_fn
    return jnp.vectorize(
        lambda w: smoothed(w, EXPECTED, RADIUS)[0], signature="(d)->(d)"
    )(queries)


expected_gradient = models.mean_gradient_fn(PROBLEM, EXPECTED)


def measured(plan: plans.O2NC, runs: Runs) -> dict[str, np.ndarray]:
    """The metrics of a variant, each a number a seed."""
    path = jax.tree.map(np.asarray, runs.path)
    noise = np.asarray(runs.noise)
    gradients = np.asarray(smoothed_gradients(path.queries))

    def stationarity(size: int) -> np.ndarray:
        whole = gradients[:, : plan.num_steps // size * size]
        blocks = whole.reshape(len(whole), -1, size, DIM).mean(axis=2)
        return np.linalg.norm(blocks, axis=-1).mean(axis=1)

    errors = path.estimates - noise - gradients
    goldstein = {
        f"Goldstein norm returned, radius {radius:g}": np.array(
            [
                metrics.goldstein_norm(expected_gradient, x, radius)
                for x in path.returned
            ]
        )
        for radius in (2 * RADIUS, RADIUS / 2)
    }
    return {
        "stationarity": stationarity(WINDOW),
        "stationarity, own windows": stationarity(plan.window),
        "sampling error": np.sum(errors**2, axis=-1).mean(axis=1),
        "noise energy": np.sum(noise**2, axis=-1).mean(axis=1),
        "||x|| at the end": np.linalg.norm(path.last, axis=-1),
        "||x|| returned": np.linalg.norm(path.returned, axis=-1),
        **goldstein,
    }


# --- the study ---------------------------------------------------------------------


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """The study's rows; with ``out`` its plot."""
    seeds, table = range(3 if quick else 20), variants()

    def one(plan: plans.O2NC) -> dict[str, np.ndarray]:
        return measured(plan, run_seeds(plan, seeds))

    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(table, pool.map(one, table.values()), strict=True))
    return report(table, found, out)


def report(
    table: dict[str, plans.O2NC],
    found: dict[str, dict[str, np.ndarray]],
    out: pathlib.Path | None,
) -> list[_harness.Row]:
    """The rows of some of the variants, the paper's and the best among them."""
    rows: list[_harness.Row] = []
    for name, plan in table.items():
        rows += _rows(name, plan, found[name])
    paper, best = (_harness.mean(found[n]["noise energy"]).value for n in (PAPER, BEST))
    rows.append(_harness.Row(PAPER, "noise energy", paper, "", BEST, paper / best))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plots.save(_draw(table, found), out / PNG)
    return rows


def _rows(
    name: str, plan: plans.O2NC, found: dict[str, np.ndarray]
) -> list[_harness.Row]:
    rows: list[_harness.Row] = []
    for metric, values in found.items():
        m = _harness.mean(values)
        against: tuple[Any, ...] = ()
        if metric == "noise energy" and plan.node_std:
            against = ("prediction", m.value / predicted_energy(plan))
        row = _harness.averaged(name, metric, m, len(values), "", *against)
        rows.append(row)
    if plan.noise_multiplier:
        spent = float(plan.epsilon(delta=DELTA))
        rows.append(_harness.Row(name, "epsilon", spent, f"at delta {DELTA:g}"))
    if plan.theorem is not None:
        chosen = (
            f"at radius {2 * RADIUS:g}; restart every {plan.sampling.period}, window "
            f"{plan.window}, {plan.theorem.restart_batch_size} records at a restart"
        )
        bound = plan.theorem.promise.bound
        rows.append(_harness.Row(name, "Goldstein norm proven", bound, chosen))
    return rows


# --- plot --------------------------------------------------------------------------


def _draw(
    table: dict[str, plans.O2NC], found: dict[str, dict[str, np.ndarray]]
) -> Figure:
    num_seeds = len(next(iter(found.values()))["stationarity"])
    fig, (left, right) = plots.figure(1, 2, figsize=(10, 4.2))
    places = dict(zip(table, range(len(table))[::-1], strict=True))
    for name, place in places.items():
        private = bool(table[name].node_std)
        color = plots.BLUE if private else plots.GREEN
        for axis, metric in ((left, "stationarity"), (right, "noise energy")):
            values = found[name][metric]
            if axis is right and not private:
                continue
            m = _harness.mean(values)
            axis.scatter(values, np.full(len(values), place), s=9, color=plots.SKY)
            axis.errorbar(
                m.value, place, xerr=m.half_width, fmt="o", ms=3, capsize=5, color=color
            )
            label = f"{m.value:#.3g}".rstrip(".")
            offset = {"xytext": (0, 10), "textcoords": "offset points"}
            axis.annotate(label, (m.value, place), ha="center", **offset)
    private = {name: place for name, place in places.items() if table[name].node_std}
    right.scatter(
        [predicted_energy(table[name]) for name in private],
        list(private.values()),
        marker="|",
        s=260,
        color=plots.ORANGE,
        label="predicted",
    )
    right.legend(loc="lower right", frameon=False)
    for axis, labels in ((left, list(places)), (right, [""] * len(places))):
        axis.set_yticks(list(places.values()), labels)
        axis.set_ylim(-0.6, len(table) - 0.3)
    left.set_xlim(left=0)
    left.set_xlabel("stationarity: mean over blocks of ‖mean of $\\nabla\\hat F$‖")
    right.set_xscale("log")
    right.margins(x=0.12)
    right.set_xlabel("noise energy: mean of ‖$N_t$‖² (log scale)")
    fig.suptitle(
        f"O2NC on ‖x‖₁/√d + ⟨z, x⟩, d = {DIM}, ε = {EPSILON:g}: "
        f"{num_seeds} seeds, their mean and its 95% interval",
        fontsize="medium",
    )
    return fig
