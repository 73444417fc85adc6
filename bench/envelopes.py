"""What Lasry-Lions smoothing costs: evaluations of the loss at one point, by search.

Medians over points, standard normal and seeded, with the range beside them; every search
ends by its tolerance. The losses are cheap: two cones (the lesser of two distances,
L = 1, smoothing 1/2), of which values alone are known, and the convex sum of i y_i^2 / 2,
smoothing 0.4, by cutting planes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import _harness
from jaxdp import models


def _cones(y: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.linalg.norm(y - 1), jnp.linalg.norm(y + 0.8) + 0.3)


def _bowl(y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.arange(1, len(y) + 1) * y**2) / 2


Setting = Callable[[int], dict[str, Any]]

#: name -> loss, setting of a dimension, and (dimension, tolerance).
CASES: dict[str, tuple[Any, Setting, tuple[tuple[int, float], ...]]] = {
    "two cones, values": (
        _cones,
        lambda dim: {"smoothing": 0.5, "lipschitz": 1.0},
        ((1, 1e-6), (2, 1e-3), (3, 1e-2)),
    ),
    "bowl, cutting planes": (
        _bowl,
        lambda dim: {"smoothing": 0.4, "weak_convexity": 0.0},
        ((2, 1e-6), (5, 1e-6), (10, 1e-6)),
    ),
}


def run(quick: bool) -> list[_harness.Row]:
    """A row for every loss and dimension."""
    rows = []
    for name, (loss, setting, sizes) in CASES.items():
        for dim, tolerance in sizes[: 2 if quick else None]:
            points = np.random.default_rng(0).normal(size=(2 if quick else 9, dim))
            found = [
                models.lasry_lions(
                    loss, x, tolerance=tolerance, max_evaluations=10**6, **setting(dim)
                )
                for x in points
            ]
            assert all(each.gap <= tolerance for each in found)
            counts = [each.num_values for each in found]
            case = f"{name}, d = {dim}, to {tolerance:.0e}"
            unit = f"median; {min(counts)} to {max(counts)} (n={len(counts)})"
            rows.append(
                _harness.Row(case, "evaluations", float(np.median(counts)), unit)
            )
    return rows
