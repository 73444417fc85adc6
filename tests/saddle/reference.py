"""The games of these tests, and mirror descent written plainly, in whole numbers."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxdp.kernels import simplex
from jaxdp.saddle.grids import UNIT
from jaxdp.saddle.theory import levels as levels_lib

#: Weighted rock, paper, scissors, and strategies that are dominated: value 0.
WEIGHTS = (1.0, 0.6, 0.3)


def padded_game(dim: int) -> np.ndarray:
    """Payoffs (dim, dim); the uniform gap is .840 at dim 10."""
    a, b, c = WEIGHTS
    game = np.zeros((dim, dim))
    game[:3, :3] = [[0, a, -b], [-a, 0, c], [b, -c, 0]]
    game[3:, :3], game[:3, 3:] = 0.5, -0.5
    return game


def gap(game: np.ndarray, x: Any, y: Any) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float((game.T @ x).max() - (game @ y).min())


def on_grid(gradients: np.ndarray, clip: float, bits: int) -> np.ndarray:
    """Sum of the clipped rows (B, d) in units of 2**-bits of the clip; bad rows are 0."""
    good = np.isfinite(gradients).all(axis=1, keepdims=True)
    rows = np.clip(np.where(good, gradients, 0), -clip, clip)
    return np.rint(rows / clip * 2**bits).astype(np.int64).sum(axis=0)


def floored(total: np.ndarray, grid: Any) -> np.ndarray:
    """floor(total * multiplier / 2**shift), in Python's integers."""
    return np.array([(int(t) * grid.multiplier) >> grid.shift for t in total])


def moved(scores: np.ndarray, by: np.ndarray) -> np.ndarray:
    new = scores + by
    return np.maximum(new - new.max(), -(2**30))


def levels(seed: int, max_level: int, num: int) -> np.ndarray:
    """The first levels of a seed's sequence, of which the executed ones are some."""
    drawn = itertools.islice(levels_lib._levels(seed, max_level), num)
    return np.array(list(drawn), np.int64)


def law(scores: np.ndarray) -> np.ndarray:
    """The softmax that a vertex is drawn from."""
    weights = np.exp(np.asarray(scores, np.float64) * UNIT)
    return weights / weights.sum()


def renyi(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    return math.log(np.sum(p**alpha * q ** (1 - alpha))) / (alpha - 1)


def check_draw(one: np.ndarray, other: np.ndarray, delta: float) -> float:
    """Requires what a draw is charged for, of two neighbours' scores; the share reached."""
    p, q = law(one), law(other)
    ratio = np.log(p) - np.log(q)
    assert np.abs(ratio).max() <= 2 * delta * (1 + 1e-9) + 1e-12
    spread = ratio.max() - ratio.min()
    assert spread <= 2 * delta * (1 + 1e-9) + 1e-12
    for alpha in (1.5, 2.0, 8.0):
        assert renyi(p, q, alpha) <= alpha * delta**2 / 2 * (1 + 1e-6) + 1e-12
    return spread / (2 * delta) if delta else 0.0


Draw = Callable[[Any, Any, Any, int], Any]


def scripted(vertices: dict[str, list[np.ndarray]], seen: list[np.ndarray]) -> Draw:
    """In place of the sampler: given vertices, and a record of the scores."""
    import jax.numpy as jnp

    turn = iter(vertices["draws"])

    def draw(sampler: Any, key: Any, scores: Any, num: int) -> Any:
        seen.append(np.asarray(scores, np.int64))
        chosen = next(turn)
        assert len(chosen) >= num
        return jnp.asarray(chosen[:num], jnp.int32)

    return draw


class Script:
    """The same in a program that is compiled once for all runs."""

    def __init__(self) -> None:
        """Begins without a run."""
        self.turn: Iterator[np.ndarray] = iter(())
        self.seen: list[np.ndarray] = []

    def run(self, vertices: list[np.ndarray], program: Callable[[], Any]) -> Any:
        """The scores of all draws of a run of the program."""
        import jax

        self.turn, self.seen = iter(vertices), []
        jax.block_until_ready(program())
        jax.effects_barrier()
        return self.seen

    def draw(self, sampler: Any, key: Any, scores: Any, num: int) -> Any:
        """In place of the sampler."""
        import jax
        from jax.experimental import io_callback

        def given(scores: Any) -> np.ndarray:
            self.seen.append(np.asarray(scores, np.int64))
            chosen = next(self.turn)
            assert len(chosen) >= num
            return np.asarray(chosen[:num], np.int32)

        shape = jax.ShapeDtypeStruct((num,), np.int32)
        return io_callback(given, shape, scores, ordered=True)


assert simplex.BITS == 24
