"""Plans, losses and noise for the tests of the search for second-order points."""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.sosp import reference as ref

Records = list[ref.Record]


def plan(**changes: Any) -> Any:
    """A plan in which nothing is ever out of reach."""
    fields: dict[str, Any] = {
        "num_examples": 400,
        "num_steps": 60,
        "sampling": types.SimpleNamespace(num_passes=1),
        "relation": "replace_one",
        "noise_multiplier": 0.0,
        "l2_clip_norm": 1e9,
        "smoothness": 1.0,
        "refresh_batch_size": 10,
        "difference_batch_rate": 5.0,
        "difference_batch_size": None,
        "drift_limit": 1e9,
        "max_differences": 31,
        "trigger_norm": 0.0,
        "escape_steps": None,
        "escape_radius": 0.5,
        "escape_noise_std": 0.01,
        "hessian": "on_demand",
        "hessian_batch_size": 7,
        "hessian_clip_norm": 1e9,
        "hessian_norm": "frobenius",
        "hessian_lipschitz": 1.0,
        "hessian_difference_rate": 4.0,
        "escapes_per_refresh": 2,
        "curvature_threshold": 0.1,
        "query_in_escape": False,
        "stop_at_certificate": True,
        "hessian_filter": False,
        "growth_limit": math.inf,
    }
    assert set(changes) <= set(fields) | {"num_passes"}
    fields["sampling"].num_passes = changes.pop("num_passes", 1)
    fields |= changes
    return types.SimpleNamespace(**fields)


class Streams(ref.Silence):
    """Normal noise of given stds on escapes and Hessians; every step has its own."""

    def __init__(
        self, seed: int, dim: int, *, escape: float, hessian: float = 0
    ) -> None:
        super().__init__(dim)
        self.seed, self.stds = seed, {"escape": escape, "hessian": hessian}

    def draw(self, role: str, *where: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, list(self.stds).index(role), *where))
        return self.stds[role] * rng.normal(size=self.dim)

    def escape(self, step: int) -> np.ndarray:
        return self.draw("escape", step)

    def hessian(self, step: int) -> np.ndarray:
        columns = [self.draw("hessian", step, j) for j in range(self.dim)]
        full = np.stack(columns, axis=1)
        return (full + full.T) / 2


def blocks(t: int) -> list[tuple[int, int]]:
    """NODE(t): the blocks (first, last) that the leaves 1..t are made of."""
    found, begin = [], 0
    for level in reversed(range(t.bit_length())):
        if t >> level & 1:
            found.append((begin + 1, begin + 2**level))
            begin += 2**level
    return found


def oracles(gradient: Callable[[np.ndarray, Any], np.ndarray], **more: Any) -> Any:
    """Of losses whose Hessians are not asked for, unless they are given."""

    def unasked(*_: Any) -> Any:
        raise AssertionError("no Hessian is wanted here")

    return {
        "gradient": gradient,
        "hessian_product": unasked,
        "hessian": unasked,
        **more,
    }


def branches(records: Records) -> str:
    """One letter an iteration: refresh, difference, none, or stopped (x)."""
    return "".join("x" if r.branch == "stopped" else r.branch[0] for r in records)


def constant(
    slope: Callable[[np.ndarray], np.ndarray], hess: np.ndarray
) -> dict[str, Any]:
    """A loss without data: its gradient, and its Hessian at every point."""
    return oracles(
        lambda x, z: slope(x),
        hessian_product=lambda x, z, v: hess @ v,
        hessian=lambda x, z: hess,
    )


class Scripted(ref.Silence):
    """Escapes get one push in the first step and no noise after it."""

    def __init__(self, push: np.ndarray, starts: tuple[int, ...] = (0,)) -> None:
        super().__init__(len(push))
        self.push, self.starts = push, starts

    def escape(self, step: int) -> np.ndarray:
        return self.push if step in self.starts else np.zeros(self.dim)


@dataclasses.dataclass(frozen=True)
class CosineGrid:
    """f(x; z) = sum_j a cos(x_j + z_j), a = 1 / sqrt(d): all clips can be no-ops.

    Its gradients are at most 1 long and its Hessians and their changes at most a; with z
    symmetric about 0 the corners of the grid {0, pi}^d are where it is stationary, and
    all but (pi, ..., pi) are saddles.
    """

    dim: int

    @property
    def a(self) -> float:
        return self.dim**-0.5

    def gradient(self, x: np.ndarray, z: Any) -> np.ndarray:
        return -self.a * np.sin(x + z)

    def hessian_product(self, x: np.ndarray, z: Any, v: np.ndarray) -> np.ndarray:
        return -self.a * np.cos(x + z) * v

    def hessian(self, x: np.ndarray, z: Any) -> np.ndarray:
        return np.diag(-self.a * np.cos(x + z))


def escape_deviation(
    num_steps: int, *, curvature: float, smoothness: float, noise_std: float
) -> float:
    """The std of a displacement along a direction of curvature ``-curvature``.

    After so many steps of an escape that its radius does not end.
    """
    log = math.log1p(curvature / smoothness)
    growth = math.expm1(2 * num_steps * log) / math.expm1(2 * log)
    return noise_std / smoothness * math.sqrt(growth)


def escape_failure(num_steps: int, *, radius: float, **numbers: float) -> float:
    """A bound on the probability that it stays within ``radius``, at that curvature."""
    return math.erf(radius / (math.sqrt(2) * escape_deviation(num_steps, **numbers)))
