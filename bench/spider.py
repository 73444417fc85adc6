"""Queries over stretches of records whose length is known only at run time.

*Time.* "adaptive" is a query as it runs: a loop over masked slices of about 1e6 / d
records, each record clipped and put on the integer grid, noise added. Three queries:
gradients at one point (a refresh), gradients at two (a difference), products with a Hessian
(a step of an escape). "static" is what there would be if the size were known: the same
vectors of the same records in one piece of static shape, clipped in floating point, summed
and divided, with ``jax.random.normal`` for noise. Their clips, noise and loss are the same.

*Memory.* Temporaries of a whole step of the search (gradient query, trigger, product) in
units of a slice of d numbers per record: linear in d, with no d x d matrix.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from bench import _harness
from jaxdp.kernels import clip, fixed_point, lattice_gaussian, threefry
from jaxdp.sosp import gradients as grad_diff
from jaxdp.sosp import hessian

D = 1000


def _logistic(w: jax.Array, batch: Any) -> jax.Array:
    x, y = batch
    return jax.nn.softplus(-y * (x @ w))


def _cosine(w: jax.Array, batch: Any) -> jax.Array:
    return jnp.cos(w + batch[0]).sum(axis=-1)


LOSSES = {"logistic": _logistic, "cosine": _cosine}


def run(quick: bool) -> list[_harness.Row]:
    """Rows for each query over batch sizes, and the memory of a step over d."""
    sizes = (1024, 5120) if quick else (1024, 5120, 16384)
    rounds = 5 if quick else 15
    rows: list[_harness.Row] = []
    for loss in ("cosine",) if quick else ("cosine", "logistic"):
        for size in sizes:
            for query in ("gradient", "difference", "product"):
                sides = _sides(loss, size, query)
                seconds = _harness.alternate(sides, rounds, warmup=2)
                case = f"{loss}, d = {D}, {size} records"
                row = _harness.paired(case, query, seconds, "adaptive", "static")
                rows.append(row)
    return rows + [_memory(dim) for dim in (1000, 10_000, 100_000)]


def make_plan(num_examples: int, size: int, dim: int) -> jaxdp.plans.SOSP:
    """A plan whose queries all read ``size`` records."""
    return jaxdp.plans.SOSP(
        num_examples=num_examples,
        num_steps=10,
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothness=1.0,
        refresh_batch_size=size,
        difference_batch_rate=10.0 * size,
        drift_limit=1.0,
        max_differences=15,
        trigger_norm=1e6,
        escape_steps=10,
        escape_radius=0.1,
        escape_noise_std=1e-4,
        hessian_batch_size=size,
        hessian_clip_norm=1.0,
        dim=dim,
    ).calibrate(epsilon=2.0, delta=1e-6)


def _sides(loss: str, size: int, query: str) -> dict[str, Callable[[], jax.Array]]:
    rng = np.random.default_rng(0)
    n = 2 * 16384
    data = (
        jnp.asarray(rng.normal(size=(n, D)), jnp.float32),
        jnp.asarray(rng.choice([-1.0, 1.0], n), jnp.float32),
    )
    points = jnp.asarray(rng.normal(size=(2, D)) / 10, jnp.float32)
    plan = make_plan(n, size, D)
    one = grad_diff.record_loss(LOSSES[loss], lambda w: w)
    adaptive = jax.jit(functools.partial(_adaptive, plan, one, query))
    static = jax.jit(functools.partial(_static, plan, one, query, size))
    count, first = jnp.int32(size), jnp.int32(777)
    key = threefry.fold_in(jaxdp.Keys.insecure(0).noise, 1)
    return {
        "adaptive": lambda: adaptive(points, data, first, count, key),
        "static": lambda: static(points, data, first, jax.random.key(1)),
    }


def _adaptive(
    plan: Any,
    loss: grad_diff.Loss,
    query: str,
    points: jax.Array,
    data: Any,
    first: jax.Array,
    count: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """The library's query, on a stretch of traced place and length."""
    records = grad_diff.Records(data, None, first, count, 2**20 // D)

    def noise(grid: Any) -> fixed_point.Fixed:
        law = lattice_gaussian.law(grid.noise_std)
        return fixed_point.Fixed(lattice_gaussian.draw(key, (D,), law))

    if query == "gradient":
        grid = plan.roles.refresh.grid
        return grad_diff.release_gradient(grid, loss, points[0], records, noise(grid))
    if query == "difference":
        grid = plan.roles.difference.grid
        return grad_diff.release_difference(
            grid, loss, points[0], points[1], records, noise(grid)
        )
    grid, v = plan.roles.hessian.grid(D), points[1]
    times = hessian.halvings(grid, plan.escape_radius * jnp.cos(points[0, 0]))
    return hessian.release_product(
        grid, loss, points[0], v, times, records, noise(grid)
    )


def _static(
    plan: Any,
    loss: grad_diff.Loss,
    query: str,
    size: int,
    points: jax.Array,
    data: Any,
    first: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """The clipped mean of the same records in one piece, plus noise."""
    some = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), data)
    gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))

    def rows_of(some: Any) -> jax.Array:
        if query == "gradient":
            return gradients(points[0], some)
        if query == "difference":
            return gradients(points[0], some) - gradients(points[1], some)

        def product(record: Any) -> jax.Array:
            gradient = lambda at: jax.grad(loss)(at, record)  # noqa: E731
            return jax.jvp(gradient, (points[0],), (points[1],))[1]

        return jax.vmap(product)(some)

    # As the library does: where XLA would compute the rows again for every pass over them,
    # the baseline would be slower than it needs to be.
    rows = jax.lax.cond(first >= 0, rows_of, lambda _: jnp.zeros((size, D)), some)
    bound, std = {
        "gradient": (plan.l2_clip_norm, plan.refresh_noise_std),
        "difference": (size / plan.difference_batch_rate, plan.node_std),
        "product": (plan.hessian_clip_norm * plan.escape_radius, plan.escape_std),
    }[query]
    mean = clip.clip_vector(rows, bound).sum(axis=0) / size
    return mean + std * jax.random.normal(key, (D,))


def _memory(dim: int) -> _harness.Row:
    """Temporaries of a step, over the numbers of one slice of records."""
    n, size = 64, 8
    plan = make_plan(n, size, dim)
    algorithm = jaxdp.sosp(plan, jaxdp.Keys.insecure(0), microbatch_size=size)
    data = (
        jax.ShapeDtypeStruct((n, dim), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.float32),
    )
    state = jax.eval_shape(algorithm.init, jax.ShapeDtypeStruct((dim,), jnp.float32))
    step = jax.jit(
        functools.partial(algorithm.step, value_fn=_logistic), donate_argnums=0
    )
    temp = _harness.temp_bytes(step.lower(state, data).compile())
    case = f"d = {dim}, slices of {size} records"
    return _harness.Row(case, "temp of a step", temp / (4 * dim * size), "slices")
