"""One step of prefix-sum noise, over adding independent noise.

A step is ``x = x + (g + sigma * n)`` with the kernel's increment n, rounded to float32 from
exact noise of :data:`NODE_STD` units, in a compiled loop over a period of 64 steps with x
and the kernel's state in place; "step" is the mean of the 64.
The baseline is the same loop with ``jax.random.normal`` under a new key at every step.
"worst step" is the slower one of the last two steps alone, in the same program: the most
nodes to take in, the longest history. "temp" is what the program needs besides x and the
state, so a state that was not updated in place would show. "variance" is that of the last
prefix sum as it came out, over what the factorisation says.

jax_privacy adds noise of the same C, hence of the same variance, by its privatizers: as a
streaming matrix for a BLT, by rows of the dense inverse for the tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import _harness
from jaxdp.kernels import fixed_point, prefix_noise, threefry, toeplitz_noise

STEPS = 64
SIGMA = 0.1
#: Of the kernels' noise, in units, which are scaled to SIGMA.
NODE_STD = 2**20
PLAIN = "g + sigma * jax.random.normal"
#: The square root's state is 126 vectors: not for more numbers than this.
LARGEST_HISTORY = 10**6


class Side(NamedTuple):
    """One way to add noise.

    Attributes:
      step: ``(words, state, t, g) -> (g plus noise, state)``, with t the step in the period
        and four words of its key, of which a key of 64 bits takes the last two.
      state: before the first step.
      variance: of the noise on the last prefix sum.
    """

    step: Callable[[jax.Array, Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
    state: Any
    variance: float


def run(quick: bool) -> list[_harness.Row]:
    """Rows for every kernel and privatizer at 1 M and 10 M floats (quick: 0.1 M)."""
    rows: list[_harness.Row] = []
    for dim, rounds in ((10**5, 3),) if quick else ((10**6, 9), (10**7, 5)):
        rows += _compare(dim, rounds)
    return rows


def _compare(dim: int, rounds: int) -> list[_harness.Row]:
    size = f"{dim / 1e6:g} M"
    rows: list[_harness.Row] = []
    sides = {PLAIN: _plain(), **_ours(dim)}
    for name in set(prefix_noise.NAMES) - set(sides):
        said = f"skipped: a state of {2 * (STEPS - 1)} vectors"
        rows.append(_harness.Row(f"{name}, {size}", "step", None, said))
    if said := _harness.missing("jax_privacy"):
        rows.append(_harness.Row(f"jax_privacy, {size}", "step", None, said))
    else:
        sides |= _theirs(dim)

    g = jnp.ones(dim)
    runs = {name: Run(side, g) for name, side in sides.items()}
    variances = {name: run.first_variance() for name, run in runs.items()}

    def measure(begin: int, end: int) -> _harness.Seconds:
        thunks = {name: run.thunk(begin, end) for name, run in runs.items()}
        return _harness.alternate(thunks, rounds)

    period = measure(0, STEPS)
    last = [measure(t, t + 1) for t in (STEPS - 2, STEPS - 1)]
    for name, run in runs.items():
        case = f"{name}, {size}"
        mean = _harness.paired(case, "step", period, name, PLAIN, per=STEPS)
        worst = [_harness.paired(case, "worst step", s, name, PLAIN) for s in last]
        expected = SIGMA**2 * sides[name].variance
        rows += [
            mean,
            max(worst, key=lambda row: row.ratio or 0),
            *(
                _harness.Row(case, what, count / 1e6, "MB", "x", count / (4 * dim))
                for what, count in (
                    ("state", run.state_bytes),
                    ("temp", run.temp_bytes),
                )
            ),
            _harness.Row(
                case,
                "variance of the last sum",
                variances[name],
                "",
                "exact",
                variances[name] / expected,
            ),
        ]
    for theirs, ours in (("jax_privacy BLT-2", "blt_2"), ("jax_privacy tree", "tree")):
        if theirs in runs:
            case = f"{ours}, {size}"
            rows.append(_harness.paired(case, "step", period, ours, theirs, per=STEPS))
    return rows


class Run:
    """A compiled loop over steps of a period, with the arrays that it updates."""

    def __init__(self, side: Side, g: jax.Array) -> None:
        def loop(
            carry: Any, g: jax.Array, words: jax.Array, begin: jax.Array, end: jax.Array
        ) -> Any:
            def body(t: jax.Array, carry: Any) -> Any:
                x, state = carry
                noised, state = side.step(words, state, t, g)
                return x + noised, state

            return jax.lax.fori_loop(begin, end, body, carry)

        self._g = g
        # A copy: what is donated must not be shared.
        self._carry = jnp.zeros_like(g), jax.tree.map(jnp.copy, side.state)
        args = (self._g, jnp.zeros(4, jnp.uint32), jnp.int32(0), jnp.int32(STEPS))
        lowered = jax.jit(loop, donate_argnums=0).lower(self._carry, *args)
        self._program = lowered.compile()
        self._calls = 0
        self.temp_bytes = _harness.temp_bytes(self._program)
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(side.state))

    def thunk(self, begin: int, end: int) -> Callable[[], jax.Array]:
        """These steps, under a new key at every call."""
        ends = jnp.int32(begin), jnp.int32(end)

        def call() -> jax.Array:
            self._calls += 1
            words = jnp.array([0, 0, 0, self._calls], jnp.uint32)
            self._carry = self._program(self._carry, self._g, words, *ends)
            return self._carry[0]

        return call

    def first_variance(self) -> float:
        """Runs the first period; of the noise on the sum that it ends with."""
        return float(jnp.mean(jnp.square(self.thunk(0, STEPS)() - STEPS)))


def _plain() -> Side:
    def step(words: jax.Array, state: Any, t: jax.Array, g: jax.Array) -> Any:
        key = jax.random.wrap_key_data(words[2:], impl="threefry2x32")
        normal = jax.random.normal(threefry.fold_in(key, t), g.shape)
        return g + SIGMA * normal, state

    return Side(step, (), STEPS)


def _ours(dim: int) -> dict[str, Side]:
    like = jax.ShapeDtypeStruct((dim,), jnp.float32)

    def side(kernel: prefix_noise.PrefixNoise) -> Side:
        laws = kernel.laws(NODE_STD)

        def step(words: jax.Array, state: Any, t: jax.Array, g: jax.Array) -> Any:
            key = threefry.secret_key(words)
            noise, state = kernel.increment(key, state, t, like, laws)
            return g + (SIGMA / NODE_STD) * fixed_point.to_float(noise), state

        return Side(step, kernel.init(like), float(kernel.prefix_norms()[-1]) ** 2)

    return {
        name: side(prefix_noise.make(name, STEPS))
        for name in prefix_noise.NAMES
        if name != "sqrt_toeplitz" or dim <= LARGEST_HISTORY
    }


def _theirs(dim: int) -> dict[str, Side]:
    """jax_privacy's privatizers with the C of two of our kernels."""
    from jax_privacy import noise_addition  # pyright: ignore[reportMissingImports]
    from jax_privacy.matrix_factorization import (  # pyright: ignore[reportMissingImports]
        buffered_toeplitz,
    )

    def privatizer(matrix: Any) -> Any:
        return noise_addition.matrix_factorization_privatizer(
            matrix, stddev=SIGMA, prng_key=7
        )

    ours = toeplitz_noise.blt(STEPS, 2)
    blt = buffered_toeplitz.BufferedToeplitz.build(
        ours.buf_decay, ours.output_scale, dtype=jnp.float32
    )
    streaming = privatizer(blt.inverse_as_streaming_matrix())

    def stream(words: jax.Array, state: Any, t: jax.Array, g: jax.Array) -> Any:
        del words, t  # Both are in its state.
        return streaming.update(g, state)

    tree = prefix_noise.make("tree", STEPS)
    dense = privatizer(jnp.asarray(np.linalg.inv(tree.strategy()), jnp.float32))

    def row(words: jax.Array, state: Any, t: jax.Array, g: jax.Array) -> Any:
        del words  # A constant of the privatizer; its state is the step.
        return dense.update(g, t)[0], state

    return {
        "jax_privacy BLT-2": Side(
            stream,
            streaming.init(jnp.zeros(dim)),
            float(ours.prefix_norms()[-1]) ** 2,
        ),
        "jax_privacy tree": Side(row, (), float(tree.prefix_norms()[-1]) ** 2),
    }
