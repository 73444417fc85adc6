"""What may flow where: all that is public follows from releases, which have noise.

Whatever adds noise is replaced by what gives a function of the noise alone (and the sum as
it is, where there is no noise). Then every run must go the same way on other data, to the
bit: batch sizes, triggers, restarts, clips, points, and whatever else its state shows.

Nothing but compiling takes time: about ten seconds for a search or a conversion. What is
replaced is a part of their programs, so no other test's can be shared.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling, training
from jaxdp.core import release

N, D = 240, 3
RNG = np.random.default_rng(0)
#: Two data sets on which gradients, losses and curvature differ in sign and size.
DATA = RNG.uniform(-0.5, 0.5, (N, D)).astype(np.float32)
OTHER = (3 + 2 * RNG.normal(size=(N, D))).astype(np.float32)


def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
    """Of both curvatures."""
    return jnp.cos(batch * w + batch).sum(axis=-1) + (batch[:, 0] * w[0]) ** 2


def without_data(released: Any) -> Any:
    """What adds noise, ``(grid, total, noise, ...)``: without the total, where it does."""

    def noise_alone(grid: Any, total: Any, noise: Any) -> Any:
        drawn = jax.tree.leaves(noise)
        hidden = jnp.any(jnp.stack([jnp.any(part != 0) for part in drawn]))
        hidden &= grid.noise_std != 0
        total = jax.tree.map(lambda x: jnp.where(hidden, 0, x), total)
        return released(grid, total, noise)

    return noise_alone


@pytest.fixture(autouse=True)
def noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "noised_mean", without_data(release.noised_mean))


def shown(plan: Any, start: Any, data: Any, program: Any, maker: Any) -> Any:
    """All that is public after a run, and its releases."""
    keys = Keys.insecure(1)
    carry = training.start(plan, maker(keys), optax.identity(), start)
    carry = program(carry, keys, data)
    return jaxdp.public(carry.opt_state), carry.params, carry.releases


def runs(plan: Any, start: Any) -> tuple[Any, Any]:
    """What two runs show that differ in their data alone."""
    maker = plan.algorithm if plan.runs_algorithm else plan.transform
    made, optimizer = maker(Keys.insecure(1)), optax.identity()
    whole = training.make_program(plan, made, optimizer, loss)
    program = jax.jit(lambda c, k, d: whole(c, k, d, 0, plan.num_steps))
    one, two = (shown(plan, start, x, program, maker) for x in (DATA, OTHER))
    return one, two


def assert_same(one: Any, two: Any) -> None:
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(one),
        jax.tree_util.tree_leaves_with_path(two),
        strict=True,
    ):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(a, b, err_msg=name)


SEARCH: dict[str, Any] = {
    "num_examples": N,
    "num_steps": 24,
    "relation": "replace_one",
    "l2_clip_norm": 1.5,
    "smoothness": 1.0,
    "refresh_batch_size": 20,
    "difference_batch_rate": 10.0,
    "drift_limit": 2.0,
    "max_differences": 5,
    "trigger_norm": 0.3,
    "stop_at_certificate": False,
    "escape_steps": 2,
    "escape_radius": 0.5,
    "escape_noise_std": 0.1,
    "hessian_batch_size": 8,
    "hessian_clip_norm": 1.0,
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "dim": D,
}
MODES: dict[str, dict[str, Any]] = {
    "on demand": {},
    "tracked": {"hessian": "tracked", "hessian_lipschitz": 1.0},
    "released": {
        "hessian": "released",
        "escape_steps": 1,
        "curvature_threshold": 0.3,
        "hessian_lipschitz": 1.0,
    },
}


@pytest.mark.parametrize(
    "mode",
    [
        "tracked",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("on demand", "released")),
    ],
)
def test_a_search_follows_from_its_releases(mode: str) -> None:
    plan = plans.SOSP(**SEARCH | MODES[mode])
    one, two = runs(plan, jnp.zeros(D))
    assert_same(one, two)
    # There was something to decide: both queries, batches of several sizes, escapes.
    state, releases = one[0][0], np.asarray(one[2])
    assert set(releases[:, 0]) >= {1, 2}
    assert len(set(releases[:, 1])) > 2
    assert 0 < int(state.escapes) < plan.num_steps


@pytest.mark.slow  # It is a part of the search.
def test_an_adaptive_gradient_follows_from_its_releases() -> None:
    plan = plans.SOSP(**SEARCH)
    tx = jaxdp.private_spider(plan, Keys.insecure(1))

    @jax.jit
    def step(state: Any, w: jax.Array, data: Any) -> Any:
        gradient, state = tx.update(None, state, w, value_fn=loss, batch=data)
        return state, w - gradient / 2

    sizes = []
    states = [tx.init(jnp.zeros(D))] * 2
    points = [jnp.zeros(D)] * 2
    for _ in range(8):
        for i, data in enumerate((DATA, OTHER)):
            states[i], points[i] = step(states[i], points[i], data)
        assert_same(
            *((jaxdp.public(s), w) for s, w in zip(states, points, strict=True))
        )
        sizes.append(int(states[0].release[1]))
    assert len(set(sizes)) > 2


def test_a_conversion_follows_from_its_releases() -> None:
    """Bound and noise of a difference are as long as the last step was."""
    plan = plans.O2NC(
        num_examples=N,
        num_steps=6,
        sampling=sampling.MultiPassRestarts(period=3),
        relation="replace_one",
        restart_l2_clip_norm=1.0,
        l2_clip_norm=0.5,
        smoothing_radius=0.1,
        max_step=0.1,
        window=3,
        noise_multiplier=1.0,
        delta=1e-5,
        prefix_noise="independent",
        oracle="first_order",
        direction="ball",
        difference="common",
        scale_with_movement=True,
    )
    one, two = runs(plan, jnp.zeros(D))
    assert_same(one, two)
    assert np.all(np.asarray(one[2]) > 0)


def test_a_clip_follows_from_releases() -> None:
    plan = plans.DPZero(
        num_examples=N,
        num_steps=6,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=0.1,
        noise_multiplier=1.0,
        delta=1e-5,
        clip_tuning=plans.ClipTuning(
            target_unclipped_quantile=0.7, learning_rate=0.2, count_noise_multiplier=3.0
        ),
    )
    one, two = runs(plan, jnp.zeros(D))
    assert_same(one, two)
    assert float(one[0][0].clip) != 1.0
