"""What the search for second-order points keeps to as an algorithm: keys, ends, memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, plans

D, N = 2, 1500
DATA = np.random.default_rng(0).uniform(-0.5, 0.5, (N, D)).astype(np.float32)
NUMBERS: dict[str, Any] = {
    "num_examples": N,
    "num_steps": 40,
    "relation": "replace_one",
    "l2_clip_norm": 1.5,
    "smoothness": 1.0,
    "refresh_batch_size": 300,
    "difference_batch_rate": 200.0,
    "drift_limit": 1.0,
    "max_differences": 15,
    "trigger_norm": 0.5,
    "escape_steps": 5,
    "escape_radius": 0.3,
    "escape_noise_std": 0.1,
    "hessian_batch_size": 100,
    "hessian_clip_norm": 1.0,
    "dim": D,
}
DENSE = {"hessian_lipschitz": 1.0}
MODES: dict[str, dict[str, Any]] = {
    "on_demand": {},
    "filter": {"hessian_filter": True},
    "operator": {"hessian": "tracked", **DENSE},
    "frobenius": {"hessian": "tracked", "hessian_norm": "frobenius", **DENSE},
    "released": {
        "hessian": "released",
        "escape_steps": 1,
        "curvature_threshold": 0.3,
        **DENSE,
    },
    "no escapes": {"escape_steps": None},
    "no escapes, tracked": {"hessian": "tracked", "escape_steps": None, **DENSE},
}
#: Each way to read a Hessian, and none; the others differ in a norm or a filter.
OFTEN = ("on_demand", "operator", "released", "no escapes")
EACH = pytest.mark.parametrize(
    "mode",
    [m if m in OFTEN else pytest.param(m, marks=pytest.mark.slow) for m in MODES],
)
START = jnp.zeros(D)


def loss(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.cos(x + batch).sum(axis=-1)


@functools.cache
def make(mode: str) -> plans.SOSP:
    return plans.SOSP(**NUMBERS | MODES[mode]).calibrate(epsilon=8.0, delta=1e-5)


@functools.cache
def compiled(mode: str) -> Any:
    """One program for every seed: the state holds all that it needs of the keys."""
    algorithm = jaxdp.sosp(make(mode), Keys.insecure(0))
    return jax.jit(functools.partial(algorithm.step, value_fn=loss))


@functools.cache
def ran(mode: str, seed: int = 1) -> list[Any]:
    state = jaxdp.sosp(make(mode), Keys.insecure(seed)).init(START)
    states = [state]
    for _ in range(make(mode).num_steps + 1):
        states.append(compiled(mode)(states[-1], DATA)[0])
    return states


def numbers(state: Any) -> list[np.ndarray]:
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, keys) else x)
        for x in jax.tree.leaves(state)
    ]


@EACH
def test_it_ends_and_nothing_changes_after(mode: str) -> None:
    states = ran(mode)
    last = next(i for i, s in enumerate(states) if bool(s.horizon.exhausted))
    assert last < len(states) - 1
    # What finds no records and releases nothing is no step.
    assert int(states[last].horizon.count) == last - (not np.any(states[last].release))
    assert int(states[last].ended) != 0
    assert not np.any(states[last + 1].release)
    assert int(states[-1].spider.cursor) <= N
    one, two = (
        s._replace(release=states[0].release) for s in (states[last], states[-1])
    )
    for before, after in zip(numbers(one), numbers(two), strict=True):
        np.testing.assert_array_equal(before, after)


@EACH
def test_what_is_public_is_all_but_noise_and_sums(mode: str) -> None:
    shown = jaxdp.public(ran(mode)[3])
    assert all(field is None for field in shown.spider.noise)
    assert shown.escape.root is None
    assert shown.escape.hessian.total is None and shown.escape.hessian.frozen is None
    np.testing.assert_array_equal(shown.spider.estimate, ran(mode)[3].spider.estimate)


@EACH
def test_records_that_are_no_numbers_count_nothing(mode: str) -> None:
    """Whatever they are: every number of the state is the same."""
    algorithm = jaxdp.sosp(make(mode), Keys.insecure(2))
    found = []
    for value in (np.nan, np.inf):
        state = algorithm.init(START)
        for _ in range(4):
            state, _ = compiled(mode)(state, np.full((N, D), value, np.float32))
        found.append(numbers(state))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all() or a.shape == ()  # the norm of no point yet


def test_keys_decide_the_run() -> None:
    again = compiled("on_demand")(ran("on_demand")[0], DATA)[0]
    for a, b in zip(numbers(again), numbers(ran("on_demand")[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    other = ran("on_demand", 3)[1].spider.estimate
    assert np.all(np.asarray(other) != np.asarray(again.spider.estimate))


def test_keys_serve_one_run_and_are_needed() -> None:
    algorithm = jaxdp.sosp(make("on_demand"), Keys.from_entropy())
    assert bool(algorithm.init(START).horizon.private)
    with pytest.raises(ValueError, match="already served"):
        algorithm.init(START)
    with pytest.raises(TypeError, match="keys"):
        jaxdp.sosp(make("on_demand"), jax.random.key(0))  # pyright: ignore[reportArgumentType]
    plain = make("on_demand").with_noise(noise_multiplier=0.0)
    algorithm = jaxdp.sosp(plain, Keys.from_entropy())
    assert not bool(algorithm.init(START).horizon.private)


def test_what_does_not_fit_is_refused() -> None:
    algorithm = jaxdp.sosp(make("on_demand"), Keys.insecure(0))
    with pytest.raises(ValueError, match=r"plan\.dim = 2 elements in all, got 3"):
        algorithm.init(jnp.zeros(3))
    with pytest.raises(ValueError, match="num_examples"):
        algorithm.step(algorithm.init(START), DATA[1:], value_fn=loss)
    with pytest.raises(ValueError, match="float32"):
        algorithm.init(jnp.zeros(D, jnp.float16))


@pytest.mark.slow  # A study: 20 searches. Units of products are in test_hessian.py.
def test_a_saddle_of_little_curvature_is_left() -> None:
    """0.028 along one axis, where smoothness is 1: grids must not swallow it.

    By the law of the noise an escape fails with probability 0.01 here; more than 5 of 20
    fail by chance less than 1e-7.
    """
    dim, curvature = 10, 0.028
    plan = plans.SOSP(
        num_examples=32,
        num_steps=500,
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothness=1.0,
        refresh_batch_size=16,
        difference_batch_rate=1.0,
        drift_limit=1.0,
        max_differences=3,
        trigger_norm=0.1,
        escape_steps=439,
        escape_radius=2**0.5,
        escape_noise_std=2.5e-3,
        hessian_batch_size=16,
        hessian_clip_norm=1.0,
        noise_multiplier=0.0,
    )
    diagonal = jnp.ones(dim).at[3].set(-curvature)
    data = jnp.zeros((32, 1))

    def value_fn(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sum(diagonal * x**2) / 2 + batch[:, 0]

    def run(seed: jax.Array) -> jax.Array:
        algorithm = jaxdp.sosp(plan, Keys.insecure(seed))
        step = lambda s: algorithm.step(s, data, value_fn=value_fn)[0]  # noqa: E731
        more = lambda s: ~s.horizon.exhausted  # noqa: E731
        return jax.lax.while_loop(more, step, algorithm.init(jnp.zeros(dim))).ended

    # One that leaves finds no records for another refresh.
    ended = np.asarray(jax.jit(lambda s: jax.lax.map(run, s))(jnp.arange(20)))
    assert set(ended) <= {1, 2} and (ended == 1).sum() <= 5


@pytest.mark.parametrize("spoilt", ["start", "far"])
def test_points_that_are_no_numbers_are_never_certified(spoilt: str) -> None:
    algorithm = jaxdp.sosp(make("on_demand"), Keys.insecure(0))
    if spoilt == "start":
        with pytest.raises(ValueError, match="finite"):
            algorithm.init(jnp.full(D, jnp.nan))
        return
    far = jnp.full(D, jnp.inf, jnp.float32)
    state = algorithm.init(START)._replace(point=far)
    for _ in range(6):
        state, _ = compiled("on_demand")(state, DATA)
    assert int(state.best.rank) <= 0


@pytest.mark.slow  # Of speed: it compiles a search in two sizes.
def test_memory_is_linear_in_many_dimensions() -> None:
    """Products with Hessians on demand: no matrix. And it runs."""
    temps = {}
    for dim in (1000, 100_000):
        few = NUMBERS | {"num_examples": 24, "refresh_batch_size": 8, "dim": dim}
        few |= {"hessian_batch_size": 8, "trigger_norm": 1e6, "num_steps": 3}
        # Little noise, which would leave the ball at once in so many dimensions.
        few |= {"noise_multiplier": 2e-3, "escape_noise_std": 1e-5}
        few |= {"escape_radius": 2.0}
        algorithm = jaxdp.sosp(plans.SOSP(**few), Keys.insecure(0), microbatch_size=4)
        state = algorithm.init(jnp.zeros(dim))
        data = jnp.ones((24, dim)) / dim**0.5
        step = jax.jit(functools.partial(algorithm.step, value_fn=linear))
        program = step.lower(state, data).compile()
        memory = program.memory_analysis()
        assert memory is not None
        temps[dim] = memory.temp_size_in_bytes / dim
        for _ in range(2):
            state, _ = program(state, data)
        assert bool(state.escape.active) and int(state.spider.cursor) == 16
        assert np.isfinite(state.point).all()
    assert temps[100_000] < 1.2 * temps[1000] + 8
    assert temps[100_000] < 4 * 60  # numbers of float32 for each parameter


def linear(x: jax.Array, batch: jax.Array) -> jax.Array:
    return jax.nn.softplus(batch @ x)
