"""Escapes from saddle points: their start, steps and end, and the anchor's certificate."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import run_state
from jaxdp.sosp import hessian
from jaxdp.sosp import spider as spiders
from jaxdp.sosp.roles import SOSPNumbers
from jaxdp.sosp.state import CERTIFIED, NOTHING, Best, Escape, Search, SOSPState


def offer(
    best: Best, given: jax.Array, x: jax.Array, norm: jax.Array, rank: Any
) -> Best:
    """Keeps the point of highest rank, and among equal ranks of smallest gradient norm."""
    better = (rank > best.rank) | ((rank == best.rank) & (norm < best.norm))
    better &= given
    return Best(
        jnp.where(better, x, best.point),
        jnp.where(better, norm, best.norm),
        jnp.where(better, rank, best.rank).astype(jnp.int32),
    )


def begin(
    numbers: SOSPNumbers,
    spider: spiders.Spider,
    escape: Escape,
    small: jax.Array,
    x: jax.Array,
) -> tuple[spiders.Spider, Escape, jax.Array, jax.Array]:
    """Begins an escape at an anchor if ``small`` and enough records are left.

    Also returns whether it began, and whether the data ran out.
    """
    size = numbers.own_batch
    over = spider.cursor + size > numbers.run.num_examples
    turn = over & (spider.passes + 1 < numbers.num_passes)
    start = small & (~over | turn)
    first = jnp.where(turn, 0, spider.cursor)
    turn &= start
    spider = spider._replace(
        cursor=jnp.where(start, first + size, spider.cursor),
        passes=spider.passes + turn,
        # In a new pass the next query is a refresh: see private_spider.
        since=jnp.where(turn, -1, spider.since),
    )
    kept = escape.hessian
    if numbers.tracks:
        now = hessian.frozen(numbers.roles.hessian.grid, kept.total, x.size)
        kept = kept._replace(frozen=jnp.where(start, now, kept.frozen))
    begun = escape._replace(
        active=start | escape.active,
        left=jnp.where(start, numbers.escape_steps or 0, escape.left),
        anchor=jnp.where(start, x, escape.anchor),
        gradient=jnp.where(start, spider.estimate, escape.gradient),
        first=jnp.where(start, first, escape.first),
        spent=jnp.where(start, 0, escape.spent),
        since=escape.since + start,
        hessian=kept,
    )
    return spider, begun, start, small & ~start


def walk(
    search: Search,
    state: SOSPState,
    spider: spiders.Spider,
    escape: Escape,
    best: Best,
    within: jax.Array,
    x: jax.Array,
) -> tuple[jax.Array, Escape, Best]:
    """Takes an escape step or a plain one; returns the new point, escape and best point."""
    numbers = search.numbers
    v = x - escape.anchor
    length = jnp.linalg.norm(v)
    # At the anchor itself the product is zero, whatever the data.
    touch = within & (length > 0)
    spent, broke = escape.spent, jnp.zeros((), bool)
    draw = functools.partial(
        run_state.gaussian, escape.root, state.horizon.count, x.size
    )
    if numbers.hessian == "tracked":
        shown = jnp.where(touch, v, 0)
        grid = numbers.roles.hessian.grid
        frozen = escape.hessian.frozen
        product = hessian.release_tracked(grid, frozen, shown, draw(grid.noise_std))
    else:
        grid = numbers.roles.hessian.grid(x.size)
        times = hessian.halvings(grid, length)
        cost = (hessian.reach(grid, times) + grid.rounding) ** 2
        spent = escape.spent + jnp.where(touch, cost, 0)
        broke = touch & ~(spent <= numbers.roles.hessian.budget)
        touch &= ~broke
        records = search.records(
            escape.first, jnp.where(touch, numbers.hessian_batch_size, 0)
        )
        product = hessian.release_product(
            grid,
            search.loss,
            escape.anchor,
            v,
            times,
            records,
            draw(grid.noise_std),
        )
    gradient = jnp.where(within, product + escape.gradient, spider.estimate)
    y = x - gradient * numbers.step_size
    left = escape.left - within
    far = jnp.linalg.norm(y - escape.anchor) >= numbers.escape_radius
    escaped = within & ~broke & far
    stayed = within & ~broke & ~far & (left <= 0)
    back = stayed | broke
    best = _forget(best, escaped, y)
    norm = jnp.linalg.norm(escape.gradient)
    best = offer(best, stayed, escape.anchor, norm, jnp.int32(CERTIFIED))
    escape = escape._replace(
        active=jnp.where(within, ~escaped & ~back, escape.active),
        left=left,
        spent=spent,
        # One plain step before this anchor may be tried again.
        cool=jnp.where(escaped, 0, jnp.where(back, 1, escape.cool)),
    )
    return jnp.where(back, escape.anchor, y), escape, best


def jump(
    search: Search,
    state: SOSPState,
    spider: spiders.Spider,
    escape: Escape,
    best: Best,
    start: jax.Array,
    x: jax.Array,
) -> tuple[jax.Array, Escape, Best]:
    """Releases the anchor's Hessian and leaves along its lowest eigenvector, if low."""
    numbers = search.numbers
    assert numbers.curvature_threshold is not None
    assert numbers.hessian_lipschitz is not None
    records = search.records(
        escape.first, jnp.where(start, numbers.hessian_batch_size, 0)
    )
    dim = x.size

    def look() -> tuple[jax.Array, jax.Array]:
        grid, size = numbers.roles.hessian.grid, dim * (dim + 1) // 2
        count = state.horizon.count
        noise = run_state.gaussian(escape.root, count, size, grid.noise_std)
        matrix = hessian.release_matrix(grid, search.loss, x, records, noise)
        values, vectors = jnp.linalg.eigh(matrix)
        return values[0], vectors[:, 0]

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(()), jnp.zeros_like(x)

    lowest, lower = jax.lax.cond(start, look, skip)
    down = jnp.where(jnp.vdot(spider.estimate, lower) > 0, -lower, lower)
    leave = start & (lowest < -numbers.curvature_threshold)
    stay = start & ~leave
    away = x - down * (lowest * np.float32(1 / numbers.hessian_lipschitz))
    plain = x - spider.estimate * numbers.step_size
    y = jnp.where(start, jnp.where(leave, away, x), plain)
    best = _forget(best, leave, y)
    norm = jnp.linalg.norm(spider.estimate)
    best = offer(best, stay, x, norm, jnp.int32(CERTIFIED))
    cool = jnp.where(start, stay.astype(jnp.int32), escape.cool)
    return y, escape._replace(active=jnp.zeros_like(start), cool=cool), best


def _forget(best: Best, refuted: jax.Array, x: jax.Array) -> Best:
    """Resets the best point if an anchor was refuted and it has no certificate."""
    refuted &= best.rank < CERTIFIED
    return Best(
        jnp.where(refuted, x, best.point),
        jnp.where(refuted, jnp.inf, best.norm),
        jnp.where(refuted, NOTHING, best.rank).astype(jnp.int32),
    )
