r"""Steps of mirror descent on the simplex, with vertices drawn from its softmax.

*Steps.* A step moves a vector of d numbers and draws K = 1024 vertices from its softmax:
with the float sampler it is ``entropic_step`` and ``sample_float``, with the certified one
it is ``moved`` by an int32 increment and ``sample``. The "pass" is what a softmax takes:
one exp, one sum and one scaling of a vector of the same length. All run in a scan of many
steps. "cost" is the time of a step over that of one with a tenth of the vertices: at most
10 if the cost is linear.

*Errors.* The range, max - min over the vertices, of log(realised probability) -
log(softmax), for Gaussian scores of some standard deviation in octaves. For the certified
sampler that is what enters the accounting, exact from its integer weights; for the float
one it is infinite where a vertex has probability zero, and so is a row's count of these.
Float probabilities are exact too: of the 2**24 uniforms of every level, how many choose a
child.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import _harness
from jaxdp.kernels import simplex, threefry

NUM = 1024
UNIT = math.log(2) * 2**-simplex.BITS
Body = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def run(quick: bool) -> list[_harness.Row]:
    """Rows for steps over d and for errors over d and the spread of the scores."""
    exponents = (4, 5, 6) if quick else (4, 5, 6, 7)
    rows, before = [], {}
    for exponent in exponents:
        case = f"d = 1e{exponent}, K = {NUM}"
        steps = {4: 400, 5: 200, 6: 50, 7: 5}[exponent]
        sides, temps = _programs(10**exponent, steps)
        seconds = _harness.alternate(sides, 7 if quick else 21)
        rows.append(_milliseconds(case, "pass", seconds, steps))
        for name in ("float", "certified"):
            rows.append(
                _harness.paired(case, f"{name} step", seconds, name, "pass", per=steps)
            )
            least = min(seconds[name]) / steps
            ratio = min(seconds[name]) / min(seconds["pass"])
            rows.append(
                _harness.Row(
                    case, f"{name} step, least", 1e3 * least, "ms", "pass", ratio
                )
            )
            if name in before:
                cost = least / before[name]
                rows.append(_harness.Row(case, f"{name} cost", cost, "ratio"))
            before[name] = least
            temp = temps[name] / (4 * 10**exponent)
            rows.append(_harness.Row(case, f"{name} temp over scores", temp, "ratio"))
    for dim, octaves in ((1000, 1), (1000, 7), (4096, 3), (4096, 9)):
        rows += _errors(dim, octaves)
    for exponent in exponents[1:]:
        rows.append(_certified_error(f"d = 1e{exponent}", 10**exponent, 5))
    return rows


# --- steps ---


def _pass(x: jax.Array, change: jax.Array, key: jax.Array, i: jax.Array) -> Any:
    del change, key, i
    weights = jnp.exp(x)
    return weights * (1 / jnp.sum(weights)), None


def _float(carry: Any, change: jax.Array, key: jax.Array, i: jax.Array) -> Any:
    # The step size depends on the step: the product is not taken out of the loop.
    step_size = jnp.float32(1e-3) / (i + 1).astype(jnp.float32)
    x, top = simplex.entropic_step(carry[0], change, step_size, carry[1])
    return (x, top), simplex.sample_float(threefry.fold_in(key, i), x, NUM, top)


def _certified(x: jax.Array, change: jax.Array, key: jax.Array, i: jax.Array) -> Any:
    x = simplex.moved(x, change)
    return x, simplex.sample(threefry.fold_in(key, i), x, NUM)


def _programs(
    dim: int, steps: int
) -> tuple[dict[str, Callable[[], jax.Array]], dict[str, int]]:
    """Scans of each side on a donated vector, as thunks, and their temp bytes."""
    normal = np.random.default_rng(0).normal(size=(2, dim))
    scores = simplex.normalized(_integers(normal[0] * 2**simplex.BITS))
    logits = scores.astype(jnp.float32) * jnp.float32(UNIT)
    gradient = jnp.asarray(normal[1], jnp.float32)
    sides: dict[str, Callable[[], jax.Array]] = {}
    temps = {}
    for name, body, start, change in (
        ("pass", _pass, logits, gradient),
        ("float", _float, (logits, jnp.float32(0)), gradient),
        ("certified", _certified, scores, _integers(normal[1] * 2**10)),
    ):
        sides[name], temps[name] = _scan(body, start, change, steps)
    return sides, temps


def _integers(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x.astype(np.int32))


def _scan(
    body: Body, start: Any, change: jax.Array, steps: int
) -> tuple[Callable[[], jax.Array], int]:
    def loop(x: jax.Array, change: jax.Array, key: jax.Array) -> Any:
        return jax.lax.scan(lambda x, i: body(x, change, key, i), x, jnp.arange(steps))

    args = (change, jax.random.key(0))
    program = jax.jit(loop, donate_argnums=0).lower(start, *args).compile()
    cell = [jax.tree.map(jnp.array, start)]

    def call() -> jax.Array:
        cell[0], _ = program(cell[0], *args)
        return jax.tree.leaves(cell[0])[0]

    return call, _harness.temp_bytes(program)


def _milliseconds(
    case: str, name: str, seconds: _harness.Seconds, steps: int
) -> _harness.Row:
    value = 1e3 * statistics.median(seconds[name]) / steps
    return _harness.Row(case, name, value, "ms")


# --- errors ---


def _scores(dim: int, octaves: float) -> jax.Array:
    normal = np.random.default_rng(1).normal(size=dim)
    return simplex.normalized(_integers(normal * octaves * 2**simplex.BITS))


def _certified_error(case: str, dim: int, octaves: float) -> _harness.Row:
    scores = _scores(dim, octaves)
    upper, lower = map(np.asarray, jax.jit(simplex._weights)(scores))
    weights = upper * 2.0**32 + lower
    floored = np.maximum(np.asarray(scores), -(simplex.OCTAVES << simplex.BITS))
    error = float(np.ptp(np.log(weights) - UNIT * floored))
    label = f"{case}, spread {octaves} octaves"
    return _harness.Row(label, "certified, log error", error, "nats")


def _errors(dim: int, octaves: float) -> list[_harness.Row]:
    """Both samplers; the float one's probabilities by counting uniforms."""
    logits = _scores(dim, octaves).astype(jnp.float32) * jnp.float32(UNIT)
    realised = _float_probabilities(logits)
    zero = int((realised == 0).sum())
    exact = np.asarray(logits, np.float64)
    error = math.inf
    if zero == 0:
        error = float(np.ptp(np.log(realised) - exact))
    certified = _certified_error(f"d = {dim}", dim, octaves)
    case = certified.case
    return [
        certified,
        _harness.Row(case, "float, vertices of probability 0", zero, "vertices"),
        _harness.Row(case, "float, log error", error, "nats")
        if zero == 0
        else _harness.Row(case, "float, log error", None, "skipped: infinite"),
    ]


def _float_probabilities(logits: jax.Array) -> np.ndarray:
    top = jnp.max(logits)
    leaves = jnp.exp(logits - top)
    levels = simplex._levels(leaves, simplex._grouped)
    probabilities = np.ones(1)
    for level in [*levels[-2::-1], leaves]:
        x = np.asarray(level)
        groups = np.pad(x, (0, -len(x) % 16)).reshape(-1, 16)
        prefixes = np.cumsum(groups, axis=1, dtype=np.float32)
        share = np.diff(_below(prefixes), axis=1, prepend=0) / 2**24
        probabilities = (probabilities[:, None] * share).reshape(-1)[: len(x)]
    return probabilities


def _below(prefixes: np.ndarray) -> np.ndarray:
    """Counts the uniforms, of 2**24, that give a position below each prefix."""
    low = np.zeros(prefixes.shape, np.int64)
    for bit in reversed(range(25)):
        middle = low + 2**bit
        u = (middle - 1).astype(np.float32) * np.float32(2**-24)
        inside = (middle <= 2**24) & (u * prefixes[:, -1:] < prefixes)
        low = np.where(inside, middle, low)
    return low
