"""What a few public records bring: private training on digits with 100 of them.

A linear softmax model, full batches, delta = 1e-5, replace-one. Of 1437 training records
100 are public and the other 1337 private; accuracy on 360 held-out records. A draw chooses
the public records and seeds directions and noise: figures are means over draws with the 95%
interval of Student's t. Every method has the same grid of step sizes, in units of its
algorithm; the best is chosen by two draws on a validation split of the training records,
without noise: that is what epsilon does not contain. The weight of mixing is
``jaxdp.mixing_weight``'s, without a bias. Where the start is chosen, the private records
choose between it, with mixing, and neither; the run has what that leaves of epsilon.

Public records of another distribution than the private ones: labels moved by one class,
images inverted, or images with noise.

With ``--out DIR`` it draws accuracy by method.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import jaxdp
from bench import _harness
from jaxdp import models, training
from jaxdp.cli import plots
from jaxdp.kernels import clip
from jaxdp.models import losses

DELTA, EPSILONS, CLIP = 1e-5, (0.5, 2.0), 1.0
NUM_PUBLIC, FULL_SCALE = 100, 0.3
#: What a choice costs, and the largest difference of losses that it counts.
CHOICE, CHOICE_CLIP = 0.02, 1.0
METRIC, GAIN, PNG = "test accuracy", "gain in accuracy", "frontier.png"
#: Step sizes of every method, in units of its algorithm's.
GRID = (0.25, 0.75, 2.0, 6.0)
ALONE, ALONE_STEPS = "public records alone", 300
UNITS = {"DPGD": 2.0, "DPZero": 0.1, ALONE: 2.0}


@dataclasses.dataclass(frozen=True)
class Method:
    """What is made of the public records."""

    warm: bool = False  # start from training on them alone
    num_directions: int = 0  # of a subspace; 0 for none
    full_scale: float = 0.0
    mixed: bool = False
    scaled: bool = False  # parameters, by second moments of public gradients
    divided: bool = False  # noised gradients, by roots of averages of such moments
    chosen: bool = False  # whether the start and mixing are used at all
    centred: bool = False  # features, by the mean of the public ones


METHODS = {
    "private records alone": Method(),
    "warm start": Method(warm=True),
    "subspace": Method(num_directions=40),
    "mixing": Method(mixed=True),
    "warm start, subspace": Method(warm=True, num_directions=40),
    "warm start, mixing": Method(warm=True, mixed=True),
    "all three": Method(warm=True, num_directions=40, mixed=True),
    "scale": Method(scaled=True),
    "warm start, mixing, scale": Method(warm=True, mixed=True, scaled=True),
}
#: What is looked at for DPGD alone.
MORE = {
    "subspace of 10": Method(num_directions=10),
    "subspace of 90": Method(num_directions=90),
    "centred features": Method(centred=True),
    "warm start, mixing, centred features": Method(warm=True, mixed=True, centred=True),
    "divided": Method(divided=True),
    "warm start, mixing, divided": Method(warm=True, mixed=True, divided=True),
}
FULL = "subspace and full space"
SHIFTED = {
    "warm start": METHODS["warm start"],
    "subspace": METHODS["subspace"],
    FULL: Method(num_directions=40, full_scale=FULL_SCALE),
    "mixing": METHODS["mixing"],
    "warm start, mixing": METHODS["warm start, mixing"],
    "warm start, mixing, chosen": Method(warm=True, mixed=True, chosen=True),
}
SHIFTS = ("labels moved by one", "inverted images", "images with noise")


# --- the task ----------------------------------------------------------------------


class Draw(NamedTuple):
    """The records of one draw: pairs of features and labels."""

    private: Any
    public: Any
    test: Any


def draw(dataset: models.Dataset, seed: int, shift: str | None = None) -> Draw:
    """Takes ``NUM_PUBLIC`` of the training records as public ones."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(dataset.num_examples)
    chosen, rest = order[:NUM_PUBLIC], order[NUM_PUBLIC:]
    x, y = dataset.train
    public_x, public_y = x[chosen], y[chosen]
    if shift == SHIFTS[0]:
        public_y = (public_y + 1) % 10
    elif shift == SHIFTS[1]:
        public_x = 1 - public_x
    elif shift == SHIFTS[2]:
        noisy = public_x + 0.5 * rng.standard_normal(public_x.shape)
        public_x = np.clip(noisy, 0, 1).astype(np.float32)
    return Draw((x[rest], y[rest]), (public_x, public_y), dataset.test)


def centred(of: Draw) -> Draw:
    """Moves all features by the mean of the public ones."""
    mean = of.public[0].mean(axis=0)
    return Draw(*((x - mean, y) for x, y in of))


def value_fn(params: Any, batch: Any) -> jax.Array:
    """Cross-entropy of each record, (B,)."""
    x, y = batch
    return losses.softmax_cross_entropy(x @ params["w"] + params["b"], y)


def accuracy(params: Any, batch: Any) -> jax.Array:
    """Share of records whose class has the largest logit, ()."""
    x, y = batch
    return losses.accuracy(x @ params["w"] + params["b"], y)


def zeros() -> Any:
    """Initial parameters."""
    return {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}


@jax.jit
def train_alone(public: Any, rate: jax.Array) -> Any:
    """Parameters after gradient descent on the public records."""

    def step(_: int, params: Any) -> Any:
        gradient = jax.grad(lambda p: jnp.mean(value_fn(p, public)))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient)

    return jax.lax.fori_loop(0, ALONE_STEPS, step, zeros())


def make_plan(algorithm: str, num_examples: int, epsilon: float) -> Any:
    """The plan of an algorithm, the same for all methods."""
    shared: dict[str, Any] = {
        "num_examples": num_examples,
        "sampling": jaxdp.sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": CLIP,
    }
    if algorithm == "DPGD":
        plan = jaxdp.plans.DPGD(num_steps=40, **shared)
    else:
        plan = jaxdp.plans.DPZero(
            num_steps=750, smoothing_radius=1e-3, num_directions=4, **shared
        )
    return plan.calibrate(epsilon=epsilon, delta=DELTA)


# --- runs --------------------------------------------------------------------------


class Start(NamedTuple):
    """What a method makes of the public records of a draw before it begins."""

    draw: Draw
    params: Any
    basis: Any  # of a subspace, or the scale; None without
    weight: jax.Array  # of the public gradients; 0 without mixing


def prepare(method: Method, plan: Any, of: Draw, alone_rate: float, seed: int) -> Start:
    """Trains, takes a basis and computes a weight, from the public records."""
    params = train_alone(of.public, alone_rate) if method.warm else zeros()
    if method.chosen:
        found = jaxdp.metrics.private_choice(
            *(value_fn, [zeros(), params], of.private, jaxdp.Keys.insecure(seed)),
            epsilon=CHOICE,
            relation=plan.relation,
            num_examples=plan.num_examples,
            linf_clip_norm=CHOICE_CLIP,
        )
        if found.index == 0:
            return Start(of, zeros(), None, jnp.float32(0))
    basis = None
    if method.scaled:
        basis = jaxdp.public_scale(value_fn, params, of.public)
    if method.num_directions:
        basis = jaxdp.public_basis(
            value_fn, params, of.public, num_directions=method.num_directions
        )
    weight = 0.0
    if method.mixed:
        # Not where they were trained on: gradients would look as if they were all alike.
        loss, start = located(method, zeros(), basis)
        rows = clip.clip_vector(gradients(loss, start, of.public), CLIP)
        spread = float(jnp.sum(jnp.var(rows, axis=0)))
        noise = rows.shape[1] * plan.noise_std**2 / getattr(plan, "num_directions", 1)
        weight = jaxdp.mixing_weight(
            private_variance=noise / plan.num_steps,
            public_variance=spread,
            num_public=NUM_PUBLIC,
        )
    return Start(of, params, basis, jnp.float32(weight))


def gradients(loss: Any, params: Any, records: Any) -> jax.Array:
    """Gradients of single records, (B, d)."""
    rows = jax.jacrev(loss)(params, records)
    leaves = jax.tree.leaves(rows)
    return jnp.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def located(method: Method, params: Any, basis: Any) -> tuple[Any, Any]:
    """The loss and its initial parameters, in other coordinates or not."""
    if basis is None:
        return value_fn, params
    subspace = coordinates(method, params, basis)
    return subspace.value_fn, subspace.params


def coordinates(method: Method, params: Any, basis: Any) -> jaxdp.Subspace:
    """The subspace, or the scaled coordinates."""
    if method.scaled:
        return jaxdp.in_scale(value_fn, params, basis)
    full_scale = method.full_scale
    return jaxdp.in_subspace(value_fn, params, basis, full_scale=full_scale)


def divide(public: Any) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by roots of averages of second moments of public gradients.

    As Adam divides by those of its own; relative to their root mean square.
    """
    decay, floor = 0.9, 0.1

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), optax.tree.zeros_like(params)

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        rows = jax.jacrev(value_fn)(params, public)
        squares = jax.tree.map(lambda row: jnp.mean(row**2, axis=0), rows)
        count, nu = state[0] + 1, optax.tree.update_moment(squares, state[1], decay, 1)
        mean = optax.tree.bias_correction(nu, decay, count)
        typical = jnp.sqrt(optax.tree.sum(mean) / optax.tree.size(mean))
        divided = lambda g, v: g / (jnp.sqrt(v) / typical + floor)  # noqa: E731
        return jax.tree.map(divided, updates, mean), (count, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def accuracies(
    method: Method, plan: Any, starts: Sequence[Start], rates: Sequence[float]
) -> np.ndarray:
    """Accuracies of every step size and draw, (rates, draws), by one program."""
    keys = [jaxdp.Keys.insecure(seed) for seed in range(len(starts))]
    makers = [plan.transform(k) for k in keys]
    _, point = located(method, starts[0].params, starts[0].basis)
    begun = [maker.init(point) for maker in makers]

    def run(start: Start, made: Any, keys: jaxdp.Keys, rate: jax.Array) -> jax.Array:
        loss, point = located(method, start.params, start.basis)
        parts = [optax.sgd(rate), jaxdp.polyak_average(plan.num_steps * 3 // 4)]
        if method.divided:
            parts.insert(0, divide(start.draw.public))
        if method.mixed:
            weight = lambda step: start.weight  # noqa: E731
            public = start.draw.public
            parts.insert(0, jaxdp.mix_public(loss, public, weight, l2_clip_norm=CLIP))
        optimizer = optax.chain(*parts)
        program = training.make_program(plan, makers[0], optimizer, loss)
        log = jnp.zeros((plan.num_steps, made.release.shape[0]), jnp.float32)
        carry = training.Carry(point, (made, optimizer.init(point)), log)
        carry = program(carry, keys, start.draw.private, 0, plan.num_steps)
        params = jaxdp.polyak_output(carry.opt_state[1])
        if start.basis is not None:
            params = coordinates(method, start.params, start.basis).restore(params)
        return accuracy(params, start.draw.test)

    lanes = [
        (start, made, key, jnp.float32(rate))
        for rate in rates
        for start, made, key in zip(starts, begun, keys, strict=True)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *lanes)
    found = jax.jit(_harness.over_seeds(run))(*stacked)
    return np.asarray(found).reshape(len(rates), len(starts))


class Study:
    """The data, and the sizes of the study."""

    def __init__(self, quick: bool) -> None:
        self.whole = models.load("digits")
        self.split = models.validation_split(self.whole)
        self.draws = range(3 if quick else 8)
        self.tuning = range(100, 101 if quick else 102)
        self.grid = GRID[1:3] if quick else GRID

    @functools.cached_property
    def alone_rate(self) -> float:
        """The step size of training on public records alone."""
        rates = [UNITS[ALONE] * factor for factor in self.grid]
        means = [np.mean(self.alone(self.split, self.tuning, rate)) for rate in rates]
        return rates[int(np.argmax(means))]

    def alone(
        self,
        dataset: models.Dataset,
        seeds: Sequence[int],
        rate: float,
        shift: str | None = None,
    ) -> np.ndarray:
        """Accuracies of training on the public records alone."""
        found = []
        for seed in seeds:
            of = draw(dataset, seed, shift)
            found.append(accuracy(train_alone(of.public, rate), of.test))
        return np.array(found)

    def private(
        self, algorithm: str, method: Method, epsilon: float, shift: str | None = None
    ) -> tuple[np.ndarray, float]:
        """Test accuracies of the draws, with the step size of the best validation."""

        def on(dataset: models.Dataset, seeds: Any, rates: Any) -> np.ndarray:
            left = epsilon - CHOICE * method.chosen
            plan = make_plan(algorithm, dataset.num_examples - NUM_PUBLIC, left)
            draws = [draw(dataset, seed, shift) for seed in seeds]
            if method.centred:
                draws = [centred(of) for of in draws]
            starts = [
                prepare(method, plan, of, self.alone_rate, seed)
                for of, seed in zip(draws, seeds, strict=True)
            ]
            return accuracies(method, plan, starts, rates)

        rates = [UNITS[algorithm] * factor for factor in self.grid]
        means = on(self.split, self.tuning, rates).mean(axis=1)
        rate = rates[int(np.argmax(means))]
        return on(self.whole, self.draws, [rate])[0], rate


def run(quick: bool, out: pathlib.Path | None = None) -> list[_harness.Row]:
    """Rows of every method and budget, and of public records that mislead."""
    rows = classification(Study(quick), quick)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plots.save(plot(rows), out / PNG)
    return rows


def classification(study: Study, quick: bool) -> list[_harness.Row]:
    """The rows of digits."""
    rows: list[_harness.Row] = []
    alone: dict[str | None, np.ndarray] = {}
    for shift in (None,) if quick else (None, *SHIFTS):
        rate = study.alone_rate
        values = alone[shift] = study.alone(study.whole, study.draws, rate, shift)
        case = f"{shift}: {ALONE}" if shift else ALONE
        mean = _harness.mean(values)
        note = f"step size {rate:g}"
        rows.append(_harness.averaged(case, METRIC, mean, len(values), note))
    cells = [
        (None, algorithm, name, method, epsilon)
        for epsilon in (EPSILONS[1:] if quick else EPSILONS)
        for algorithm in (("DPGD",) if quick else ("DPGD", "DPZero"))
        for name, method in METHODS.items()
        if not quick or name in ("private records alone", "all three")
    ]
    if not quick:
        cells += [
            (None, "DPGD", name, method, epsilon)
            for epsilon in EPSILONS
            for name, method in MORE.items()
        ]
        cells += [
            (shift, "DPGD", name, method, epsilon)
            for shift in (None, *SHIFTS)
            for epsilon in EPSILONS
            for name, method in SHIFTED.items()
            if shift or name not in METHODS
        ]
    for shift, algorithm, name, method, epsilon in cells:
        values, rate = study.private(algorithm, method, epsilon, shift)
        case = f"{algorithm}, {name}, epsilon {epsilon:g}"
        case = f"{shift}: {case}" if shift else case
        mean = _harness.mean(values)
        gain = _harness.mean(values - alone[shift])  # By the same public records.
        note, count = f"step size {rate:g}", len(values)
        rows.append(_harness.averaged(case, METRIC, mean, count, note))
        rows.append(_harness.averaged(case, GAIN, gain, count, "", ALONE))
    return rows


def plot(rows: list[_harness.Row]) -> Figure:
    """Accuracy by method, of rows that were just made or are kept."""
    found = {row.case: row for row in rows if row.metric == METRIC}
    fig, axes = plots.figure(1, len(EPSILONS), figsize=(10, 3.8))
    names = list(METHODS)[::-1]
    for axis, epsilon in zip(axes, EPSILONS, strict=True):
        for algorithm, color, shift in (
            ("DPGD", plots.ORANGE, -0.12),
            ("DPZero", plots.BLUE, 0.12),
        ):
            cases = {n: f"{algorithm}, {n}, epsilon {epsilon:g}" for n in names}
            there = [n for n in names if cases[n] in found]
            means = [found[cases[n]] for n in there]
            axis.errorbar(
                [m.value for m in means],
                [names.index(n) + shift for n in there],
                xerr=[m.half_width for m in means],
                fmt="o",
                ms=5,
                capsize=4,
                color=color,
                label=algorithm,
            )
        line: dict[str, Any] = {"color": plots.BLACK, "linestyle": ":"}
        axis.axvline(found[ALONE].value, **line, label=ALONE)
        axis.set_yticks(
            range(len(names)), names if axis is axes[0] else [""] * len(names)
        )
        axis.set_xlabel("accuracy on held-out records")
        axis.set_title(f"ε = {epsilon:g}", loc="left", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    fig.suptitle(
        f"Digits with {NUM_PUBLIC} public records, δ = {DELTA:g}: means and 95% intervals",
        fontsize="medium",
    )
    return fig
