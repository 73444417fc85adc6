r"""Nonsmooth problems beside :func:`jaxdp.models.max_of_linear`, whose class they share.

Their Lipschitz constants and initial gaps are known without looking at any data. Losses
are computed in the parameters' dtype (float64 under x64).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import validate
from jaxdp.models.nonsmooth import NonsmoothProblem, linear_parts, sphere

Array = jax.Array
Batch = tuple[jax.Array | np.ndarray, ...]


def smoothed_sign(offset: Array, radius: float | Array, dim: int) -> Array:
    r"""Computes E sign(offset + radius w_1), w uniform in the unit ball of R^dim.

    :math:`\mathrm{sgn}(t) I_{\min(1,t^2/r^2)}(\frac12,\frac{d+1}2)`, I the regularised
    incomplete beta function. On the sphere the second parameter would be (d - 1)/2.
    """
    ratio = jnp.minimum(jnp.abs(offset) / radius, 1.0)
    return jnp.sign(offset) * jax.scipy.special.betainc(0.5, (dim + 1) / 2, ratio**2)


def l1_linear(dim: int = 8, linear_norm: float = 0.5) -> NonsmoothProblem:
    r"""f(x; z) = ||x||_1 / sqrt(d) + <z, x>, batch = (z,), z of shape (B, d).

    z is uniform on the sphere of radius ``linear_norm``, so its mean is 0 and the expected
    loss is the l1 part alone. x0 is all ones.

    Args:
      dim: d.
      linear_norm: norm of z, >= 0.
    """
    validate.integer(dim=dim)
    validate.non_negative(linear_norm=linear_norm)
    root = math.sqrt(dim)

    def value_fn(x: Array, batch: Batch) -> Array:
        (z,) = batch
        return jnp.asarray(z, x.dtype) @ x + jnp.sum(jnp.abs(x)) / root

    def gradient_fn(x: Array, batch: Batch) -> Array:
        (z,) = batch
        return jnp.asarray(z, x.dtype) + jnp.sign(x) / root

    def smoothed_gradient_fn(x: Array, batch: Batch, radius: float) -> Array:
        (z,) = batch
        return jnp.asarray(z, x.dtype) + smoothed_sign(x, radius, dim) / root

    return NonsmoothProblem(
        name="l1_linear",
        dim=dim,
        lipschitz=1.0 + linear_norm,
        initial_gap=root,
        x0=np.ones(dim, np.float32),
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        smoothed_gradient_fn=smoothed_gradient_fn,
        make_data=linear_parts(dim, linear_norm),
    )


OUTLIER_FRACTION, OUTLIER, TARGET_NOISE = 0.1, 10.0, 0.1


def robust_regression(dim: int = 8, cap: float = 1.0) -> NonsmoothProblem:
    r"""f(x; a, b) = min(|<a, x> - b|, cap), batch = (a, b), shapes (B, d) and (B,).

    With a finite cap it is nonconvex and a record far off has no say at all; with an
    infinite one it is median regression. a is uniform on the unit sphere and b is the sum
    of a, which a fit finds at x = (1, ..., 1), with noise uniform in [-0.1, 0.1]; a tenth
    of the targets lie 10 too high or too low. x0 is 0.

    Args:
      dim: d.
      cap: > 0, may be infinite.
    """
    validate.integer(dim=dim)
    validate.positive(allow_inf=True, cap=cap)

    def residual(x: Array, batch: Batch) -> tuple[Array, Array]:
        a, b = (jnp.asarray(array, x.dtype) for array in batch)
        return a @ x - b, a

    def value_fn(x: Array, batch: Batch) -> Array:
        r, _ = residual(x, batch)
        return jnp.minimum(jnp.abs(r), cap)

    def gradient_fn(x: Array, batch: Batch) -> Array:
        r, a = residual(x, batch)
        return jnp.where(jnp.abs(r) < cap, jnp.sign(r), 0)[:, None] * a

    def smoothed_gradient_fn(x: Array, batch: Batch, radius: float) -> Array:
        r, a = residual(x, batch)
        width = radius * jnp.linalg.norm(a, axis=1)
        slope = smoothed_sign(r, width, dim)
        if cap < math.inf:  # the slope is a sum of steps at 0 and at +-cap
            beyond = [smoothed_sign(r + s * cap, width, dim) for s in (1, -1)]
            slope = slope - (beyond[0] + beyond[1]) / 2
        return slope[:, None] * a

    def make_data(num_examples: int, seed: int) -> Batch:
        validate.integer(num_examples=num_examples)
        rng = np.random.default_rng(seed)
        a = sphere(rng, num_examples, dim)
        noise = rng.uniform(-TARGET_NOISE, TARGET_NOISE, num_examples)
        off = rng.uniform(size=num_examples) < OUTLIER_FRACTION
        outliers = off * rng.choice([-OUTLIER, OUTLIER], num_examples)
        b = a.sum(axis=1) + noise + outliers
        return a.astype(np.float32), b.astype(np.float32)

    # E|b| at x0 = 0: (E|sum a|)^2 <= E(sum a)^2 = 1.
    expected_target = 1.0 + TARGET_NOISE / 2 + OUTLIER_FRACTION * OUTLIER
    return NonsmoothProblem(
        name="robust_regression",
        dim=dim,
        lipschitz=1.0,
        initial_gap=min(cap, expected_target),
        x0=np.zeros(dim, np.float32),
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        smoothed_gradient_fn=smoothed_gradient_fn,
        make_data=make_data,
    )


def relu_network(
    num_features: int = 2, num_hidden: int = 16, seed: int = 0
) -> NonsmoothProblem:
    r"""Builds the hinge loss of a two-layer ReLU network, nonconvex: batch = (a, y).

    .. math:: f(W; a, y) = \max\Big(0, 1 - y \sum_{j\le m} \frac{\pm1}{\sqrt m}
      \max(0, \langle w_j, (a, 1)\rangle)\Big)

    a of shape (B, p), y of shape (B,) in {-1, 1}; x is the matrix W, shape (m, p + 1),
    ravelled. The signs of the output layer alternate and are not trained, so the loss is
    Lipschitz on all of R^d, with the constant sqrt(2) for ||a|| <= 1: no ball has to be
    named in which it holds.

    As drawn, a is uniform in the unit ball and y = sign(a_1 a_2), which no linear
    function of a predicts. At x0 neurons of opposite sign are equal: the network is 0
    and each loss is 1.

    Args:
      num_features: p >= 2.
      num_hidden: m, even.
      seed: of x0.
    """
    validate.integer(at_least=2, num_features=num_features, num_hidden=num_hidden)
    if num_hidden % 2:
        raise ValueError(f"num_hidden must be even, got {num_hidden}")
    shape = (num_hidden, num_features + 1)
    output = np.tile([1.0, -1.0], num_hidden // 2) / math.sqrt(num_hidden)

    def forward(x: Array, batch: Batch) -> tuple[Array, Array, Array, Array]:
        a, y = (jnp.asarray(array, x.dtype) for array in batch)
        inputs = jnp.concatenate([a, jnp.ones_like(a[:, :1])], axis=1)
        before = inputs @ x.reshape(shape).T
        margin = y * (jax.nn.relu(before) @ jnp.asarray(output, x.dtype))
        return inputs, y, before, margin

    def value_fn(x: Array, batch: Batch) -> Array:
        *_, margin = forward(x, batch)
        return jax.nn.relu(1 - margin)

    def gradient_fn(x: Array, batch: Batch) -> Array:
        inputs, y, before, margin = forward(x, batch)
        slope = jnp.where(margin < 1, -y, 0)
        active = jnp.where(before > 0, jnp.asarray(output, x.dtype), 0)
        rows = (slope[:, None] * active)[:, :, None] * inputs[:, None, :]
        return rows.reshape(len(rows), -1)

    def make_data(num_examples: int, seed: int) -> Batch:
        validate.integer(num_examples=num_examples)
        rng = np.random.default_rng(seed)
        a = sphere(rng, num_examples, num_features + 2)[:, :num_features]
        y = np.where(a[:, 0] * a[:, 1] >= 0, 1.0, -1.0)
        return a.astype(np.float32), y.astype(np.float32)

    rows = np.random.default_rng(seed).standard_normal((num_hidden // 2, shape[1]))
    return NonsmoothProblem(
        name="relu_network",
        dim=shape[0] * shape[1],
        lipschitz=math.sqrt(2.0),
        initial_gap=1.0,
        x0=np.repeat(rows, 2, axis=0).astype(np.float32).reshape(-1),
        value_fn=value_fn,
        gradient_fn=gradient_fn,
        smoothed_gradient_fn=None,
        make_data=make_data,
    )
