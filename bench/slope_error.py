"""How far a slope is from the exact directional derivative, over radius and dtype.

Relative root mean square over records and directions, on an MLP of 7 layers and 1.45 M
parameters (256-512-512-512-512-512-512-10, ReLU). The reference is the forward-mode
derivative in float64 (radius 0) at the same weights, as their dtype rounded them.

A case is "weights / arithmetic": the dtype that parameters are kept in, and that of
activations and products. Parameters are perturbed in float32 or wider and then rounded;
losses are float32 or wider unless the case says otherwise. In float64 what is left is
truncation, the curvature within the radius: smoothing, not error. Where a case is well
above that, its dtype does not resolve the radius; ``jaxdp/training/resolution.py`` warns.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import _harness
from jaxdp.kernels import finite_difference, sphere

WIDTHS = (256, 512, 512, 512, 512, 512, 512, 10)
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
RADII = (1e-7, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


class Arithmetic(NamedTuple):
    """Dtypes of the weights, of products and activations, and of the losses."""

    weights: str
    compute: str
    loss: str = "float32"

    def __str__(self) -> str:
        loss = ", f16 loss" if self.loss == "float16" else ""
        return f"{SHORT[self.weights]} / {SHORT[self.compute]}{loss}"


CASES = (
    Arithmetic("float64", "float64", "float64"),
    Arithmetic("float32", "float32"),
    Arithmetic("float32", "bfloat16"),
    Arithmetic("bfloat16", "bfloat16"),
    Arithmetic("float16", "float16"),
    Arithmetic("float16", "float16", "float16"),
)


def run(quick: bool) -> list[_harness.Row]:
    """Rows for every dtype and radius."""
    radii = (1e-6, 1e-4, 1e-3) if quick else RADII
    records, num = (32, 1) if quick else (64, 8)
    # One context for all sides, so that all see the same directions.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return _rows(radii, records, num)


def _rows(radii: tuple[float, ...], records: int, num: int) -> list[_harness.Row]:
    weights, batch = _problem(records)
    rows = sphere.directions(jax.random.key(1), weights, law="rademacher", num=num)
    exact: dict[str, np.ndarray] = {}
    found: list[_harness.Row] = []
    for case in CASES:
        params = jax.tree.map(lambda w, dtype=case.weights: w.astype(dtype), weights)
        if case.weights not in exact:  # At these weights, but in float64.
            wide = jax.tree.map(lambda w: w.astype("float64"), params)
            exact[case.weights] = _slopes(CASES[0], wide, batch, rows, 0.0)
        limit = exact[case.weights]
        for radius in radii:
            got = _slopes(case, params, batch, rows, radius)
            error = np.sqrt(np.mean((got - limit) ** 2) / np.mean(limit**2))
            at = f"radius {radius:.0e}"
            found.append(_harness.Row(str(case), at, float(error), "relative error"))
    size = np.sqrt(np.mean(exact["float64"] ** 2))
    return [*found, _harness.Row("exact", "slope, rms", float(size), "")]


def _problem(records: int) -> tuple[Any, Any]:
    """Weights with variance 2 / fan-in, float32, and standard normal records."""
    rng = np.random.default_rng(0)
    weights = [
        {"w": rng.normal(scale=(2 / a) ** 0.5, size=(a, b)), "b": np.zeros(b)}
        for a, b in itertools.pairwise(WIDTHS)
    ]
    x = rng.normal(size=(records, WIDTHS[0]))
    batch = jnp.asarray(x), jnp.asarray(rng.integers(0, WIDTHS[-1], records))
    return jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights), batch


def _losses(case: Arithmetic) -> Callable[[Any, Any], jax.Array]:
    """The losses (B,) of the MLP in one arithmetic."""

    def value_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        h = x.astype(case.compute)
        for i, layer in enumerate(params):
            w, b = (layer[k].astype(case.compute) for k in ("w", "b"))
            h = h @ w + b
            h = jax.nn.relu(h) if i < len(params) - 1 else h
        logits = h.astype(case.loss)
        picked = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - picked

    return value_fn


def _slopes(
    case: Arithmetic, params: Any, batch: Any, rows: sphere.Direction, radius: float
) -> np.ndarray:
    """Slopes (B, K) in one arithmetic, as the library computes them; in float64."""
    run = jax.jit(
        lambda p, b, r: finite_difference.slopes(
            _losses(case), p, b, r, smoothing_radius=radius
        )
    )
    return np.asarray(run(params, batch, rows), np.float64)
