"""Directions, slopes and noise per second.

*Directions.* Each side adds one direction after another to a vector of d numbers, in
place, in a loop: drawing it is part of the work. "copy" is the same loop adding a
constant, so one read and one write of the vector: what the memory allows. "NumPy" draws
the same law in float32 into buffers that are made once; its generator has one thread.
K directions in one step are added as their weighted mean.

*Slopes.* B records times K directions over a 784-256-10 network, against two forward
passes for each direction, unperturbed and in a loop, and against NumPy. The directions are
kept, as a step of DPZero keeps them. "whole step" adds the update. "directions alone" is
what is left without forward passes: each is drawn, and added twice to the parameters.

*Noise.* Discrete Gaussians of :data:`NOISE_STD` units, as integers and with 32 bits more
behind the point, against ``jax.random.normal`` of the same shape: programs that write what
they draw, and nothing else. Asked of both: at most twice its time.

All programs are compiled with the options of ``fit``: on a CPU, vectors of 512 bits. What
those gain is shown there for normals, random words and noise, over XLA's own options.

On an accelerator arrays are larger and loops longer, for a call to take milliseconds, and
nothing is compared with NumPy, which would run on another processor.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import _harness
from jaxdp.kernels import (
    finite_difference,
    lattice_gaussian,
    perturb,
    sphere,
    threefry,
)
from jaxdp.models import networks

SCALE = np.float32(1e-3)
#: Rows of a frame are orthogonalised at a cost of K^2 d and d K numbers of memory.
FRAME = 4
LARGEST_FRAME = 10**6
NOISE_STD = 2**20


def run(quick: bool) -> list[_harness.Row]:
    """Rows for noise, for every law over d and K, and for slopes over K and B."""
    if not _on_cpu():
        return _on_accelerator(quick)
    exponents = (3, 6) if quick else (3, 4, 5, 6, 7, 8)
    batches = [(10**4, 16)] if quick else [(10**4, 16), (10**4, 64), (10**6, 16)]
    tables = [(256, 1), (64, 8)]
    if not quick:
        tables += [(b, k) for b in (16, 1024) for k in (1, 4, 16)]
        tables += [(256, 4), (256, 16)]
    rounds = 5 if quick else 11
    few = 3 if quick else rounds
    rows = _noise(10**7, few) + _options(10**7, few)
    for exponent in exponents:
        rows += _directions(10**exponent, 1, rounds if exponent < 8 else 3)
    for dim, num in batches:
        rows += _directions(dim, num, rounds)
    for records, num in tables:
        rows += _slopes(records, num, rounds)
    return rows


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _on_accelerator(quick: bool) -> list[_harness.Row]:
    rounds = 3 if quick else 7
    rows = _noise(10**8, rounds)
    for exponent in (8,) if quick else (6, 7, 8, 9):
        rows += _directions(10**exponent, 1, rounds)
    for records, num in [(1024, 16)] if quick else [(256, 1), (64, 8), (1024, 16)]:
        rows += _slopes(records, num, rounds)
    return rows


# --- directions ---


def _directions(dim: int, num: int, rounds: int) -> list[_harness.Row]:
    """Every law at one d, next to the copy and to NumPy."""
    rows: list[_harness.Row] = []
    for law in sphere.LAWS:
        several = max(num, FRAME) if law == "orthonormal" else num
        case = f"{law}, d = 1e{round(math.log10(dim))}, K = {several}"
        if law == "orthonormal" and dim > LARGEST_FRAME:
            reason = f"skipped: frames only up to d = {LARGEST_FRAME:.0e}"
            rows.append(_harness.Row(case, "directions per second", None, reason))
            continue
        # So many steps that a call takes milliseconds, whatever d is.
        work = 10**6 if _on_cpu() else 10**10
        steps = max(1, work // (dim * several))
        program, temp = _in_place(functools.partial(_add, law, several), dim, steps)
        copy, _ = _in_place(lambda _, x, s: x + s, dim, steps * several)
        sides: dict[str, Callable[[], Any]] = {law: program, "copy": copy}
        if _on_cpu():
            sides["NumPy"] = _numpy(law, dim, several, steps)
        seconds = _harness.alternate(sides, rounds)
        count, slowest = steps * several, list(sides)[-1]
        rows += [
            _harness.speed(case, "directions per second", seconds, law, slowest, count),
            _harness.paired(case, "one direction", seconds, law, "copy", per=count),
            _harness.Row(case, "temp over parameters", temp / (4 * dim), "ratio"),
        ]
        if law == sphere.LAWS[0]:
            gigabytes = 8e-9 * dim * count / statistics.median(seconds["copy"])
            label = case.replace(law, "copy")
            rows.append(_harness.Row(label, "bandwidth", gigabytes, "GB/s"))
    return rows


def _add(law: str, num: int, key: jax.Array, x: jax.Array, scale: jax.Array) -> Any:
    """``x`` plus the scaled mean of ``num`` new directions."""
    rows = sphere.directions(key, x, law=law, num=num)
    if num == 1:
        return perturb.perturb(x, sphere.select(rows, 0), scale)
    weights = jnp.full(num, scale)
    return x + finite_difference.combine(weights, rows, x)


def _in_place(
    step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], dim: int, steps: int
) -> tuple[Callable[[], jax.Array], int]:
    """``steps`` compiled steps on a donated vector, as a thunk, and the temp bytes."""

    def loop(x: jax.Array, key: jax.Array, scale: jax.Array) -> jax.Array:
        def body(i: jax.Array, x: jax.Array) -> jax.Array:
            return step(threefry.fold_in(key, i), x, scale)

        return jax.lax.fori_loop(0, steps, body, x)

    args = (jax.random.key(0), jnp.float32(SCALE))
    cell = [jnp.zeros(dim)]
    program = _harness.compiled(jax.jit(loop, donate_argnums=0).lower(cell[0], *args))

    def call() -> jax.Array:
        cell[0] = program(cell[0], *args)
        return cell[0]

    return call, _harness.temp_bytes(program)


def _numpy_signs(rng: np.random.Generator, out: np.ndarray, scale: np.float32) -> None:
    """Fills ``out`` (size,) with scale times random signs, from packed words."""
    words = rng.integers(0, 2**32, size=-(-out.size // 32), dtype=np.uint32)
    bits = np.unpackbits(words.view(np.uint8), count=out.size)
    as_words = out.view(np.uint32)
    np.left_shift(bits, np.uint32(31), out=as_words, dtype=np.uint32)
    np.bitwise_xor(as_words, scale.view(np.uint32), out=as_words)


def _numpy(law: str, dim: int, num: int, steps: int) -> Callable[[], np.ndarray]:
    """The same steps in NumPy, in place, as a thunk."""
    rng = np.random.Generator(np.random.SFC64(0))
    x, u = np.zeros(dim, np.float32), np.empty(dim, np.float32)
    scale = SCALE / np.float32(num)

    def frame() -> None:
        q, r = np.linalg.qr(rng.standard_normal((dim, num), dtype=np.float32))
        x[:] += q @ (np.sign(np.diagonal(r)) * np.float32(math.sqrt(dim)) * scale)

    def signs() -> None:
        _numpy_signs(rng, u, scale)
        np.add(x, u, out=x)

    def normals() -> None:
        rng.standard_normal(out=u, dtype=np.float32)
        factor = scale
        if law != "gaussian":
            factor *= np.float32(math.sqrt(dim / float(np.dot(u, u))))
        if law == "ball":
            factor *= np.float32(rng.random() ** (1 / dim))
        np.multiply(u, factor, out=u)
        np.add(x, u, out=x)

    def call() -> np.ndarray:
        if law == "orthonormal":
            for _ in range(steps):
                frame()
        else:
            step = signs if law == "rademacher" else normals
            for _ in range(steps * num):
                step()
        return x

    return call


# --- noise ---


def _noise(size: int, rounds: int) -> list[_harness.Row]:
    """Both samplers beside ``jax.random.normal``, each under a new key at every call."""
    law = lattice_gaussian.law(NOISE_STD)
    fine = lattice_gaussian.law(NOISE_STD, fine=True)

    def normal(words: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
        return jax.random.normal(key, (size,))

    draws: dict[str, Callable[[jax.Array], Any]] = {
        "normal": normal,
        "draw": lambda words: lattice_gaussian.draw(
            threefry.secret_key(words), (size,), law
        ),
        "draw_fine": lambda words: lattice_gaussian.draw_fine(
            threefry.secret_key(words), (size,), fine
        ),
    }
    numbers = itertools.count()
    # As a plan's steps have them: a role, a context and a step are folded in.
    shape = jax.ShapeDtypeStruct((7,), jnp.uint32)
    programs = {
        name: _harness.compiled(jax.jit(f).lower(shape)) for name, f in draws.items()
    }

    def side(program: Callable[[jax.Array], Any]) -> Callable[[], Any]:
        return lambda: program(jnp.full(7, next(numbers), jnp.uint32))

    sides = {name: side(program) for name, program in programs.items()}
    seconds = _harness.alternate(sides, rounds)
    case = f"{{}}, {size / 1e6:g} M numbers, std 2**{NOISE_STD.bit_length() - 1}"
    rows = []
    for name in ("draw", "draw_fine"):
        of_name = case.format(f"lattice_gaussian.{name}")
        rows += [
            _harness.paired(of_name, "one array", seconds, name, "normal"),
            _harness.Row(
                of_name,
                "temp over its results",
                _harness.temp_bytes(programs[name])
                / (4 * size * (2 if name == "draw_fine" else 1)),
                "ratio",
            ),
        ]
    return rows


def _options(size: int, rounds: int) -> list[_harness.Row]:
    """Draws compiled with the options of ``fit`` beside the same without them."""
    law = lattice_gaussian.law(NOISE_STD)
    public = jax.random.key(0)
    secret = threefry.secret_key(np.zeros(4, np.uint32))  # Not a secret.
    draws: dict[str, tuple[Callable[[Any], jax.Array], jax.Array]] = {
        "normal": (lambda key: threefry.normal(key, (size,)), public),
        "threefry": (lambda key: threefry.bits(key, (size,)), public),
        "secret noise": (lambda key: lattice_gaussian.draw(key, (size,), law), secret),
    }
    rows = []
    for name, (draw, key) in draws.items():
        lowered = jax.jit(draw).lower(key)
        sides = {
            "options of fit": functools.partial(_harness.compiled(lowered), key),
            "XLA's options": functools.partial(lowered.compile(), key),
        }
        seconds = _harness.alternate(sides, rounds)
        case = f"{name}, {size / 1e6:g} M numbers"
        rows.append(_harness.paired(case, "one array", seconds, *sides))
    return rows


# --- slopes ---


def added(law: str, num: int, times: int, params: Any) -> Callable[[], Any]:
    """K directions, drawn and then added ``times`` times to a tree, as a thunk.

    It is what a step costs besides its forward passes. Directions are kept where a step
    keeps them, and drawn again each time where it does so.
    """

    def draw(params: Any, key: jax.Array) -> sphere.Direction:
        return sphere.kept(sphere.directions(key, params, law=law, num=num))

    def add(params: Any, rows: sphere.Direction) -> Any:
        def one(params: Any, row: sphere.Direction) -> tuple[Any, None]:
            return perturb.perturb(params, row, jnp.float32(SCALE)), None

        if num == 1:
            return one(params, sphere.select(rows, 0))[0]
        return jax.lax.scan(one, params, rows)[0]

    key, cell = jax.random.key(2), [jax.tree.map(jnp.array, params)]
    drawn = _harness.compiled(jax.jit(draw).lower(params, key))
    rows = drawn(params, key)
    more = _harness.compiled(jax.jit(add, donate_argnums=0).lower(cell[0], rows))

    def call() -> Any:
        rows = drawn(params, key)
        for _ in range(times):
            cell[0] = more(cell[0], rows)
        return cell[0]

    return call


def _slopes(records: int, num: int, rounds: int) -> list[_harness.Row]:
    """A table of slopes of two laws, next to forward passes and to NumPy."""
    net = networks.mlp(784, 10, hidden=(256,))
    params = net.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(records, 784)).astype(np.float32)
    labels = rng.integers(0, 10, records)
    batch = (jnp.asarray(inputs), jnp.asarray(labels))
    loss = perturb.LazyLoss(net.lazy_fn)

    def forwards(params: Any, batch: Any) -> jax.Array:
        def body(i: jax.Array, total: jax.Array) -> jax.Array:
            x = batch[0] + 0 * total[0]  # Depends on the round before: not hoisted.
            return total + loss(params, (x, batch[1])) * (i + 1)

        return jax.lax.fori_loop(0, 2 * num, body, jnp.zeros(records))

    def slopes(law: str, params: Any, batch: Any, key: jax.Array) -> Any:
        rows = sphere.kept(sphere.directions(key, params, law=law, num=num))
        found = finite_difference.slopes(
            loss, params, batch, rows, smoothing_radius=float(SCALE)
        )
        return found, rows

    def step(law: str, params: Any, batch: Any, key: jax.Array) -> Any:
        found, rows = slopes(law, params, batch, key)
        change = finite_difference.combine(jnp.mean(found, axis=0), rows, params)
        return jax.tree.map(lambda p, u: p - SCALE * u, params, change)

    plain = _harness.compiled(jax.jit(forwards).lower(params, batch))
    sides: dict[str, Callable[[], Any]] = {"forwards": lambda: plain(params, batch)}
    if _on_cpu():
        sides["NumPy"] = lambda: _numpy_slopes(params, inputs, labels, num)
    baselines = list(sides)
    laws = ("rademacher", "gaussian")
    key = jax.random.key(1)
    for law in laws:
        table = jax.jit(lambda *args, law=law: slopes(law, *args)[0])
        whole = jax.jit(functools.partial(step, law))
        for name, fn in ((law, table), (f"{law} step", whole)):
            program = _harness.compiled(fn.lower(params, batch, key))
            sides[name] = functools.partial(program, params, batch, key)
        sides[f"{law} alone"] = added(law, num, 2, params)
    seconds = _harness.alternate(sides, rounds)
    rows = []
    for law in laws:
        case, count = f"{law}, B = {records}, K = {num}", records * num
        metric = "slopes per second"
        rows += [
            _harness.speed(case, metric, seconds, law, baseline, count)
            for baseline in baselines
        ]
        rows += [
            _harness.paired(case, said, seconds, f"{law} {side}", "forwards")
            for said, side in (("whole step", "step"), ("directions alone", "alone"))
        ]
    return rows


def _numpy_slopes(
    params: Any, x: np.ndarray, labels: np.ndarray, num: int
) -> np.ndarray:
    """The table (B, K) along signs, as one would write it in NumPy."""
    rng = np.random.Generator(np.random.SFC64(0))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    records = np.arange(len(x))

    def losses(leaves: list[np.ndarray]) -> np.ndarray:
        b0, w0, b1, w1 = leaves
        hidden = x @ w0
        hidden += b0
        logits = np.maximum(hidden, 0, out=hidden) @ w1 + b1
        top = logits.max(axis=1)
        total = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
        return total - logits[records, labels]

    out = np.empty((len(x), num), np.float32)
    steps = [np.empty(leaf.size, np.float32) for leaf in leaves]
    for k in range(num):
        plus, minus = [], []
        for leaf, step in zip(leaves, steps, strict=True):
            _numpy_signs(rng, step, SCALE)
            plus.append(leaf + step.reshape(leaf.shape))
            minus.append(leaf - step.reshape(leaf.shape))
        out[:, k] = (losses(plus) - losses(minus)) / (2 * SCALE)
    return out
