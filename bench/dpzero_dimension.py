r"""What the dimension costs: Figures 1 and 2 of the DPZero paper.

.. math:: F(x) = \frac1{2n}\sum_i (x - x_i)^\top A (x - x_i), \qquad x_i \sim N(1, I)

with n = 10000 records to train and as many to test, and three Hessians A: the identity,
diag(j^-1/2) and diag(j^-1), whose effective ranks at d = 2000 are 2000, 88 and 8.2. DP-GD,
DPZero and DPGD-0th run at (2, 1e-6) under replace-one with exactly calibrated noise,
sphere directions, x_0 = 0, and give their last iterate. What is shown is the best of a
grid of step sizes, clips and numbers of steps, chosen for each seed on the training
records. As in the paper that choice is not charged: this compares algorithms and is no
private procedure. A mean over seeds, of data, directions and noise, has the 95% interval
of Student's t.

The slope of a record is :math:`u^\top A x - x_i^\top A u` for every smoothing radius (so
the paper's, 1e-4, drops out), and its second term does not depend on x: it is computed
once a step for the whole grid. So all runs of a seed share their directions; each has
noise of its own. ``tests/bench/test_dimension.py`` compares runs with the library's
transforms.

On a CPU there are three numbers of steps and DP-GD stops at d = 500; on a GPU there are
the paper's ten, and all dimensions. With ``--out DIR`` it draws both figures.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench import _harness
from bench._harness import Mean, mean
from jaxdp import Keys, models, plans, sampling
from jaxdp.cli import plots
from jaxdp.core import keys as keys_lib
from jaxdp.data.datasets import quadratic_data
from jaxdp.data.problems import HESSIANS, hessian_diagonal
from jaxdp.kernels import sphere, threefry

NUM_EXAMPLES = 10_000
EPSILON, DELTA = 2.0, 1e-6
NAMES = ("DP-GD", "DPZero", "DPGD-0th")
#: What is measured, and the metric by which the shown grid point is chosen.
METRICS = {
    "train gradient norm": "train gradient norm",
    "test gradient norm": "train gradient norm",
    "train loss": "train loss",
    "test loss": "train loss",
}


class Grid(NamedTuple):
    """What is run."""

    dims: tuple[int, ...]
    first_order_dims: tuple[int, ...]  # where DP-GD runs too
    num_steps: tuple[int, ...]
    rates: tuple[float, ...]
    clips: tuple[float, ...]
    seeds: int
    first_order_seeds: int


FULL = Grid(
    dims=(20, 50, 100, 200, 500, 1000, 2000),
    first_order_dims=(20, 50, 100, 200, 500),
    num_steps=(80, 640, 2560),
    rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0),
    clips=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
    seeds=5,
    first_order_seeds=3,
)
GPU = FULL._replace(
    first_order_dims=FULL.dims,
    num_steps=tuple(10 * 2**k for k in range(10)),
    first_order_seeds=5,
)
QUICK = FULL._replace(
    dims=(20, 200),
    first_order_dims=(20, 200),
    num_steps=(80, 640),
    rates=(0.03, 0.1, 0.3, 1.0),
    clips=(0.1, 0.3, 1.0, 3.0),
    seeds=3,
)


# --- runs --------------------------------------------------------------------------


def _noise_key(seed: int, context: int) -> jax.Array:
    """A public key of float normals: these runs are of no secret data.

    The one that the kept results were drawn from.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    for data in (*(0,) * 6, 2, 2, context):
        key = threefry.fold_in(key, data)
    return key


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_directions(keys: Keys, num_steps: int, dim: int) -> jax.Array:
    """The directions of every step, shape=(T, d): the bits of the library's runs.

    Drawn before the loop, in which XLA would draw them again for every grid point.
    """
    root = keys_lib.stream(keys.direction, "direction")

    def direction(step: jax.Array) -> jax.Array:
        return sphere.flat(keys_lib.at_step(root, step), dim, law="sphere")[0]

    return jax.lax.map(direction, jnp.arange(num_steps))


@functools.cache
def noise_multiplier(num_steps: int, num_examples: int = NUM_EXAMPLES) -> float:
    """Exactly calibrated; over twice the clip, on which it does not depend."""
    plan = plans.DPZero(
        num_examples=num_examples,
        num_steps=num_steps,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-4,
    )
    found = plan.calibrate(epsilon=EPSILON, delta=DELTA).noise_multiplier
    assert found is not None
    return found


class Runs(NamedTuple):
    """The runs of one seed: every Hessian, clip and step size at one number of steps.

    All of them are arguments of the programs below, so that one program serves every T.
    """

    records: jax.Array  # shape=(n, d); x_i
    hessians: jax.Array  # shape=(H, d); diagonals
    directions: jax.Array  # shape=(at least T, d)
    noise: jax.Array  # keys, shape=(3,): of NAMES in turn
    rates: jax.Array  # shape=(R,)
    clips: jax.Array  # shape=(C, 1, 1)
    noise_std: jax.Array  # shape=(C, 1, 1); on the mean that updates x
    num_steps: int

    def start(self) -> jax.Array:
        """x_0 = 0 of every run, shape=(H, C, R, d)."""
        size = (len(self.hessians), len(self.clips), len(self.rates))
        return jnp.zeros((*size, self.records.shape[1]))

    def normal(self, name: str, step: jax.Array, width: int) -> jax.Array:
        """Standard normals of one step, shape=(H, C, R, width)."""
        key = keys_lib.at_step(self.noise[NAMES.index(name)], step)
        return jax.random.normal(key, (*self.start().shape[:-1], width))


@jax.jit
def zeroth_order(runs: Runs) -> dict[str, jax.Array]:
    """Last iterates (H, C, R, d) of DPZero and DPGD-0th."""
    dim = runs.records.shape[1]
    rates = runs.rates[:, None]
    # Clipping the vector s u to C is clipping s to C / |u|, and |u| is sqrt(d).
    vector_clips = runs.clips / jnp.sqrt(jnp.float32(dim))

    def step(t: jax.Array, points: tuple[Any, Any]) -> tuple[Any, Any]:
        u = runs.directions[t]
        au = runs.hessians * u
        at_records = (runs.records @ au.T).T[
            :, None, None
        ]  # (H, 1, 1, n): for all runs

        def slope(x: jax.Array, clips: jax.Array) -> jax.Array:
            at_x = jnp.sum(x * au[:, None, None], -1, keepdims=True)
            return jnp.clip(at_x - at_records, -clips, clips).mean(-1, keepdims=True)

        x, v = points
        released = slope(x, runs.clips) + runs.noise_std * runs.normal("DPZero", t, 1)
        noise = runs.noise_std * runs.normal("DPGD-0th", t, dim)
        return x - rates * released * u, v - rates * (
            slope(v, vector_clips) * u + noise
        )

    both = (runs.start(), runs.start())
    x, v = jax.lax.fori_loop(0, runs.num_steps, step, both)
    return {"DPZero": x, "DPGD-0th": v}


@jax.jit
def first_order(runs: Runs) -> dict[str, jax.Array]:
    """Last iterates (H, C, R, d) of DP-GD."""
    num, dim = runs.records.shape
    a = runs.hessians[:, None, None]
    offsets = (jnp.square(runs.hessians) @ jnp.square(runs.records).T)[:, None, None]
    ones = jnp.ones((num, 1))

    def step(t: jax.Array, x: jax.Array) -> jax.Array:
        # |A(x - x_i)|^2 multiplied out: no record's gradient is ever formed.
        ax = a * x
        cross = jnp.einsum("hcrd,nd->hcrn", -2 * a * ax, runs.records)
        squares = cross + jnp.sum(ax * ax, -1, keepdims=True) + offsets
        norms = jnp.sqrt(jnp.maximum(squares, 1e-30))
        weights = jnp.minimum(1, runs.clips / norms)  # (H, C, R, n)
        pull = jnp.einsum("hcrn,nd->hcrd", weights, runs.records)
        # A product: XLA would compute the weights once more inside a sum, and slowly.
        total = weights @ ones
        gradient = (ax * total - a * pull) / num
        noise = runs.noise_std * runs.normal("DP-GD", t, dim)
        return x - runs.rates[:, None] * (gradient + noise)

    return {"DP-GD": jax.lax.fori_loop(0, runs.num_steps, step, runs.start())}


def make_runs(grid: Grid, dim: int, seed: int, records: np.ndarray) -> list[Runs]:
    """The runs of each number of steps."""
    keys = Keys.insecure(seed)
    directions = draw_directions(keys, max(grid.num_steps), dim)
    hessians = np.stack([hessian_diagonal(h, dim) for h in HESSIANS])
    clips = np.array(grid.clips)[:, None, None]

    def runs(num_steps: int) -> Runs:
        contexts = [num_steps * len(NAMES) + i for i in range(len(NAMES))]
        streams = [_noise_key(seed, i) for i in contexts]
        multiplier = noise_multiplier(num_steps, len(records))
        std = multiplier * 2 * clips / len(records)
        numbers = (hessians, grid.rates, clips, std)
        hessian, rate, clip, noise_std = (jnp.asarray(v, jnp.float32) for v in numbers)
        return Runs(
            records=jnp.asarray(records),
            hessians=hessian,
            directions=directions,
            noise=jnp.stack(streams),
            rates=rate,
            clips=clip,
            noise_std=noise_std,
            num_steps=num_steps,
        )

    return [runs(num_steps) for num_steps in grid.num_steps]


def measure(x: np.ndarray, data: models.Dataset) -> np.ndarray:
    """The :data:`METRICS` of points (..., H, C, R, d), shape=(metrics, ..., H, C, R)."""
    hessians = [hessian_diagonal(h, x.shape[-1]) for h in HESSIANS]
    a = np.stack(hessians)[:, None, None]
    norms, losses = [], []
    for (records,) in (data.train, data.test):
        centre = records.mean(0, dtype=np.float64)
        spread = np.mean(np.square(records - centre), 0)
        offset = np.asarray(x, np.float64) - centre
        norms.append(np.linalg.norm(a * offset, axis=-1))
        losses.append((np.sum(a * offset**2, -1) + np.sum(a * spread, -1)) / 2)
    return np.stack([*norms, *losses])


def best(metrics: np.ndarray) -> np.ndarray:
    """From (metrics, T, H, C, R) the best of (T, C, R), shape=(metrics, H)."""
    points = np.moveaxis(metrics, 1, 2)
    points = points.reshape(*points.shape[:2], -1)
    points = np.where(np.isfinite(points), points, np.inf)
    names = list(METRICS)
    chosen = points[[names.index(by) for by in METRICS.values()]].argmin(-1)
    return np.take_along_axis(points, chosen[..., None], -1)[..., 0]


def run_seed(grid: Grid, dim: int, seed: int) -> dict[str, np.ndarray]:
    """What each algorithm reaches with one seed: name -> shape=(metrics, H).

    And ``"start"``, the metrics of x_0.
    """
    data = quadratic_data("identity", NUM_EXAMPLES, dim, seed)
    programs: list[Callable[[Runs], dict[str, jax.Array]]] = [zeroth_order]
    if dim in grid.first_order_dims and seed < grid.first_order_seeds:
        programs.append(first_order)
    found: dict[str, list[np.ndarray]] = {}
    for runs in make_runs(grid, dim, seed, data.train[0]):
        for program in programs:
            for name, x in program(runs).items():
                found.setdefault(name, []).append(measure(np.asarray(x), data))
    zero = measure(np.zeros((len(HESSIANS), 1, 1, dim)), data)
    return {"start": zero[..., 0, 0]} | {
        name: best(np.stack(of, 1)) for name, of in found.items()
    }


# --- the study ---------------------------------------------------------------------

#: name -> d -> shape=(seeds, metrics, H)
Samples = dict[str, dict[int, np.ndarray]]


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """The study's rows; with ``out`` its plots."""
    large = GPU if jax.default_backend() == "gpu" else FULL
    grid = QUICK if quick else large
    lists: dict[str, dict[int, list[np.ndarray]]] = {}
    with jax.default_matmul_precision("highest"):  # A GPU would take fewer bits.
        for dim in grid.dims:
            for seed in range(grid.seeds):
                for name, values in run_seed(grid, dim, seed).items():
                    lists.setdefault(name, {}).setdefault(dim, []).append(values)
    samples = {
        name: {dim: np.stack(found) for dim, found in by_dim.items()}
        for name, by_dim in lists.items()
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for quantity in ("gradient norm", "loss"):
            stem = f"dpzero_dimension_{quantity.replace(' ', '_')}"
            plots.save(_draw(samples, quantity), out / f"{stem}.png")
    return _figures(samples) + _claims(samples)


def _row(
    case: str, metric: str, m: Mean, num: int, baseline: str, ratio: float
) -> _harness.Row:
    return _harness.averaged(case, metric, m, num, "", baseline, ratio)


def _figures(samples: Samples) -> list[_harness.Row]:
    rows = []
    for i, metric in enumerate(METRICS):
        for h, hessian in enumerate(HESSIANS):
            for dim, start in samples["start"].items():
                first = start[:, i, h].mean()
                for name in NAMES:
                    if dim not in samples[name]:
                        continue
                    values = samples[name][dim][:, i, h]
                    m = mean(values)
                    case = f"{hessian}, d = {dim}, {name}"
                    ratio = float(m.value / first)
                    rows.append(_row(case, metric, m, len(values), "start", ratio))
    return rows


def _claims(samples: Samples) -> list[_harness.Row]:
    """How the train gradient norm grows with d, and how far DPGD-0th is behind."""
    norms = {
        name: {dim: values[:, 0] for dim, values in samples[name].items()}
        for name in NAMES
    }
    rows = []
    for name, by_dim in norms.items():
        low, high = min(by_dim), max(by_dim)
        growth = [mean(values) for values in (by_dim[high] / by_dim[low]).T]
        for hessian, m in zip(HESSIANS, growth, strict=True):
            metric = f"growth, d = {low} to {high}"
            ratio = m.value / growth[0].value
            num = len(by_dim[low])
            row = _row(f"{hessian}, {name}", metric, m, num, "identity", ratio)
            rows.append(row)
    for other in ("DPZero", "DP-GD"):
        least = min(
            float(
                np.min(norms["DPGD-0th"][dim][: len(values)].mean(0) / values.mean(0))
            )
            for dim, values in norms[other].items()
        )
        case = f"DPGD-0th over {other}, everywhere"
        metric = "train gradient norm, at least"
        rows.append(_harness.Row(case, metric, least, "ratio", other, least))
    return rows


# --- plots -------------------------------------------------------------------------

_TITLES = {
    "identity": "A = I",
    "inverse_sqrt": "A = diag$(j^{-1/2})$",
    "inverse": "A = diag$(j^{-1})$",
}
_STYLES = {
    "DP-GD": (plots.ORANGE, "^"),
    "DPZero": (plots.BLUE, "o"),
    "DPGD-0th": (plots.GREEN, "s"),
}


def _draw(samples: Samples, quantity: str) -> Figure:
    fig, axes = plots.figure(1, len(HESSIANS), figsize=(11, 4))
    names = list(METRICS)
    train, test = (names.index(f"{split} {quantity}") for split in ("train", "test"))
    for h, (axis, hessian) in enumerate(zip(axes, HESSIANS, strict=True)):
        for name, (color, marker) in _STYLES.items():
            by_dim = samples[name]
            means = [mean(values[:, train, h]) for values in by_dim.values()]
            axis.errorbar(
                list(by_dim),
                [m.value for m in means],
                yerr=[m.half_width for m in means],
                color=color,
                marker=marker,
                markersize=4,
                capsize=3,
                label=name if h == 0 else None,
            )
            axis.plot(
                list(by_dim),
                [values[:, test, h].mean() for values in by_dim.values()],
                color=color,
                linestyle="--",
                linewidth=1,
                label=f"{name}, test records" if h == 0 else None,
            )
        start = samples["start"]
        axis.plot(
            list(start),
            [values[:, train, h].mean() for values in start.values()],
            color=plots.BLACK,
            linestyle=":",
            label="where runs start" if h == 0 else None,
        )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(list(start), [f"{dim}" for dim in start])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel("dimension d")
        axis.set_title(_TITLES[hessian], fontsize="medium")
    axes[0].set_ylabel(f"{quantity} at the last iterate")
    num = len(next(iter(samples["DPZero"].values())))
    few = len(next(iter(samples["DP-GD"].values())))
    seeds = f"{num} seeds" if num == few else f"{num} seeds, DP-GD {few}"
    fig.suptitle(
        f"Quadratics of n = {NUM_EXAMPLES} records at ε = {EPSILON:g}, δ = $10^{{-6}}$, "
        f"best of the grid: mean of {seeds}; bars: its 95% interval",
        fontsize="medium",
    )
    fig.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return fig
