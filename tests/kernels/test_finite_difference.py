"""Slopes: central, one per record and direction, untouched by other records."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.kernels import finite_difference as fd
from jaxdp.kernels import perturb, sphere

KEY = jax.random.key(5)


def slopes(
    value_fn: fd.ValueFn, params: Any, batch: Any, rows: sphere.Direction, **kwargs: Any
) -> np.ndarray:
    """Compiled, with the arrays as arguments: nothing is folded into constants."""
    run = jax.jit(lambda p, b, r: fd.slopes(value_fn, p, b, r, **kwargs))
    return np.asarray(run(params, batch, rows))


def rows_of(law: str, like: Any, num: int = 1, **kwargs: Any) -> sphere.Direction:
    draw = functools.partial(sphere.directions, law=law, num=num, **kwargs)
    return jax.jit(lambda key: draw(key, like))(KEY)


def as_arrays(rows: sphere.Direction, like: Any) -> Any:
    """NumPy float64 tree with leading axis K."""
    whole = jax.vmap(lambda one: sphere.materialise(one, like))(rows)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), whole)


# --- central, against closed forms ---


@pytest.mark.parametrize("radius", [0.125, 64.0])
def test_exact_on_quadratics(radius: float) -> None:
    """Small integers and signs: every float32 operation is exact, and so the slope."""
    a = jnp.array([1.0, 2.0, 3.0, 4.0])

    def loss(x: jax.Array, centres: jax.Array) -> jax.Array:
        return jnp.sum(0.5 * a[None, :] * jnp.square(x[None, :] - centres), axis=1)

    x, centres = jnp.array([1.0, -2.0, 0.0, 5.0]), jnp.arange(-6.0, 6.0).reshape(3, 4)
    rows = rows_of("rademacher", x, num=2)
    got = slopes(loss, x, centres, rows, smoothing_radius=radius)
    u = as_arrays(rows, x)
    expected = (np.asarray(a) * (np.asarray(x) - np.asarray(centres))) @ u.T
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.float32


@pytest.mark.parametrize("radius", [1e-2, 10.0])
def test_third_order_error_is_that_of_a_central_difference(radius: float) -> None:
    """f = sum x^3 / 6: the slope is u.grad f + radius^2 sum(u^3) / 6, in float64."""
    # Kernels name the wider dtype by promotion, which the strict mode refuses.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = jnp.array([0.3, -1.2, 2.0, 0.7], jnp.float64)
        weights = jnp.array([1.0, -2.0, 0.5], jnp.float64)
        rows = rows_of("gaussian", x, num=2)
        got = slopes(
            lambda p, w: w * jnp.sum(p**3) / 6,
            x,
            weights,
            rows,
            smoothing_radius=radius,
        )
        u = as_arrays(rows, x)
        per_direction = u @ (np.asarray(x) ** 2 / 2) + radius**2 * np.sum(u**3, 1) / 6
        expected = np.asarray(weights)[:, None] * per_direction
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-11)


# --- many directions, many records ---

PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(3, 2), "v": jnp.array([0.7, -1.1])}
BATCH = (
    jax.random.normal(jax.random.key(1), (7, 3)),
    jax.random.normal(jax.random.key(2), (7,)),
)


def network(params: Any, batch: Any, at: perturb.At) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ at("w", params["w"], after=x))
    return jnp.square(hidden @ at("v", params["v"], after=hidden) - y)


LAZY = perturb.LazyLoss(network)


def plain(params: Any, batch: Any) -> jax.Array:
    return network(params, batch, perturb.identity)


def elementwise(params: jax.Array, batch: jax.Array) -> jax.Array:
    """A loss with no reduction, so that its bits do not depend on the batch's shape."""
    z = params[0] * batch + params[1]
    return jnp.sqrt(1 + z * z) + params[2] * batch


@pytest.mark.parametrize(
    ("law", "radius"),
    [
        ("gaussian", 1e-2),
        pytest.param("rademacher", 0.0, marks=pytest.mark.slow),
        pytest.param("orthonormal", 1e-2, marks=pytest.mark.slow),
    ],
)
def test_many_directions_are_a_loop_over_them(law: str, radius: float) -> None:
    rows = rows_of(law, PARAMS, num=3)
    loss = plain if law == "orthonormal" else LAZY
    got = slopes(loss, PARAMS, BATCH, rows, smoothing_radius=radius)
    assert got.shape == (7, 3)
    one = jax.jit(lambda r: fd.slopes(plain, PARAMS, BATCH, r, smoothing_radius=radius))
    for k in range(3):
        alone = one(jax.tree.map(lambda a, k=k: a[k : k + 1], rows))
        np.testing.assert_allclose(got[:, k], alone[:, 0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("value_fn", [plain, LAZY], ids=["plain", "lazy"])
def test_one_record_does_not_touch_the_others(value_fn: Any) -> None:
    """Nor does it where its activations order the layers (record 0)."""
    rows = rows_of("gaussian", PARAMS)
    run = jax.jit(lambda b: fd.slopes(value_fn, PARAMS, b, rows, smoothing_radius=1e-2))
    x, y = BATCH
    clean = run(BATCH)
    for bad in (np.nan, np.inf, 3e38):
        dirty = run((x.at[0].set(bad), y.at[0].set(-bad)))
        assert not np.isfinite(dirty[0])
        np.testing.assert_array_equal(clean[1:], dirty[1:])
    other = run((x.at[3].add(1), y))
    assert clean[3] != other[3]
    np.testing.assert_array_equal(np.delete(clean, 3), np.delete(other, 3))


# --- the limit ---


@pytest.mark.parametrize("value_fn", [plain, LAZY], ids=["plain", "lazy"])
def test_radius_zero_is_the_directional_derivative(value_fn: Any) -> None:
    """Also through ``after=``, whose tie must let the tangent through."""
    rows = rows_of("gaussian", PARAMS, num=2)
    got = slopes(value_fn, PARAMS, BATCH, rows, smoothing_radius=0.0)
    gradients = jax.jit(jax.jacrev(plain))(PARAMS, BATCH)
    u = as_arrays(rows, PARAMS)
    expected = sum(
        np.asarray(gradients[name], np.float64).reshape(7, -1)
        @ u[name].reshape(2, -1).T
        for name in PARAMS
    )
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_small_radius_tends_to_radius_zero() -> None:
    """ReLU stack in float64: kinks crossed, 4 % at 1e-3 and 0.4 % at 1e-5."""
    width, depth, records = 64, 4, 2000
    generator = np.random.default_rng(0)
    shape = (depth, width, width)
    weights = generator.normal(scale=(2 / width) ** 0.5, size=shape)

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        for layer in range(depth):
            x = jax.nn.relu(x @ params[layer])
        return jnp.mean(jnp.square(x), axis=1)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = jnp.asarray(weights)
        batch = jnp.asarray(generator.normal(size=(records, width)))
        run = functools.partial(
            slopes, loss, params, batch, rows_of("rademacher", params)
        )
        limit = run(smoothing_radius=0.0)

        def error(radius: float) -> float:
            square = np.mean((run(smoothing_radius=radius) - limit) ** 2)
            return float(np.sqrt(square / np.mean(limit**2)))

        assert error(1e-3) == pytest.approx(0.04, rel=0.25)
        assert error(1e-5) < 0.005


# --- putting directions together ---


@pytest.mark.parametrize(
    ("law", "num"), [("gaussian", 1), ("rademacher", 3), ("orthonormal", 3)]
)
def test_combine_is_the_weighted_mean(law: str, num: int) -> None:
    like = {**PARAMS, "frozen": jnp.ones(2)}
    moves = {k: v for k, v in like.items() if k != "frozen"}
    rows = rows_of(law, like, num=num, trainable=lambda p: p != "frozen")
    weights = jnp.array([0.5, -2.0, 3.0])[:num]
    got = jax.jit(lambda w, r: fd.combine(w, r, like))(weights, rows)
    u = as_arrays(rows, moves)
    for name in moves:
        expected = np.tensordot(np.asarray(weights, np.float64), u[name], 1) / num
        np.testing.assert_allclose(got[name], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got["frozen"], np.zeros(2), strict=False)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, like)


def test_combine_gives_the_dtypes_of_like() -> None:
    like = {"x": jnp.zeros(4, jnp.bfloat16), "y": jnp.zeros(2)}
    got = fd.combine(jnp.ones(2), rows_of("gaussian", like, num=2), like)
    assert [got[k].dtype for k in "xy"] == [jnp.bfloat16, jnp.float32]


def estimates(value_fn: Any, params: Any, batch: Any, rows: Any, radius: float) -> Any:
    """Each record's own vector: the mean of its slopes times the directions."""
    table = fd.slopes(value_fn, params, batch, rows, smoothing_radius=radius)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
    return jax.vmap(lambda w: fd.combine(w, rows, like))(table.astype(jnp.float32))


def test_estimates_are_slopes_times_directions() -> None:
    rows = rows_of("sphere", PARAMS, num=2)
    got = jax.jit(lambda p, r: estimates(plain, p, BATCH, r, 1e-2))(PARAMS, rows)
    table = slopes(plain, PARAMS, BATCH, rows, smoothing_radius=1e-2)
    u = as_arrays(rows, PARAMS)
    for name in PARAMS:
        expected = np.tensordot(table.astype(np.float64), u[name], 1) / 2
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5)
        assert got[name].dtype == jnp.float32


def test_estimates_average_to_the_smoothed_gradient_over_all_signs() -> None:
    """Cubic loss, all 2^5 sign vectors: x^2 / 2 + radius^2 / 6, up to rounding."""
    x, radius = jnp.array([1.0, -2.0, 0.5, 3.0, 0.0]), 0.5
    one = sphere.select(rows_of("rademacher", x), 0)
    words = jnp.arange(32, dtype=jnp.uint32)[:, None, None] << jnp.uint32(27)

    def estimate(words: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda a: a[None], dataclasses.replace(one, stored={}))
        rows = dataclasses.replace(rows, stored={"words": words})
        loss = lambda p, b: b * jnp.sum(p**3) / 6  # noqa: E731
        return estimates(loss, x, jnp.ones(1), rows, radius)[0]

    draws = jax.jit(jax.vmap(estimate))(words)
    mean = np.asarray(draws, np.float64).mean(axis=0)
    np.testing.assert_allclose(
        mean, np.asarray(x) ** 2 / 2 + radius**2 / 6, rtol=1e-6, atol=2e-6
    )


@pytest.mark.parametrize("law", ["sphere", "gaussian"])
def test_estimates_are_unbiased_for_the_smoothed_loss(law: str) -> None:
    """Cubic loss at x, smoothed by the ball (sphere) or the Gaussian, d = 3."""
    x, radius, count = jnp.array([1.0, -0.5, 0.0]), 0.7, 40_000

    def estimate(key: jax.Array) -> jax.Array:
        rows = sphere.directions(key, x, law=law)
        loss = lambda p, b: b * jnp.sum(p**3) / 6  # noqa: E731
        return estimates(loss, x, jnp.ones(1), rows, radius)[0]

    draws = jax.jit(jax.vmap(estimate))(jax.random.split(KEY, count))
    draws = np.asarray(draws, np.float64)
    second = 3 / 5 if law == "sphere" else 1  # of one coordinate of the smoothing law
    expected = np.asarray(x) ** 2 / 2 + radius**2 * second / 2
    error = draws.std(axis=0) / np.sqrt(count)
    # Six standard errors on three coordinates: failure probability 6e-9.
    assert np.all(abs(draws.mean(axis=0) - expected) < 6 * error)
    assert np.all(radius**2 * second / 2 > 6 * error)  # smoothing is resolved


# --- masked sums ---


@pytest.mark.parametrize("size", [None, 3, 7, 8])
def test_sum_microbatches(size: int | None) -> None:
    """Masked and padded rows count nothing, whatever they hold."""
    records = {"x": jnp.arange(14, dtype=jnp.int32).reshape(7, 2)}
    mask = jnp.array([True, False, True, True, True, False, True])

    def total(part: tuple[Any, jax.Array]) -> jax.Array:
        x, keep = part
        return jnp.sum(jnp.where(keep[:, None], x["x"] + 1, 0), axis=0)

    run = jax.jit(lambda mask: fd.sum_microbatches(total, (records, mask), size))
    expected = (np.asarray(records["x"]) + 1)[np.asarray(mask)].sum(axis=0)
    np.testing.assert_array_equal(run(mask), expected)
    np.testing.assert_array_equal(run(jnp.zeros(7, bool)), [0, 0])


def test_every_record_counts_once_on_more_devices_than_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the slices of the last devices would begin beyond the integers, too."""
    size, devices = 2_100_000, 1024
    assert (devices - 1) * size >= 2**31
    monkeypatch.setattr(jax.lax, "axis_size", lambda name: devices)
    monkeypatch.setattr(jax.lax, "psum", lambda x, name: x)
    monkeypatch.setattr(jax.lax, "pcast", lambda x, name, to: x)

    def counted(device: int, rows: int) -> int:
        monkeypatch.setattr(jax.lax, "axis_index", lambda name: jnp.int32(device))
        batch = jnp.zeros(rows, jnp.int8), jnp.ones(rows, bool)
        total = lambda part: jnp.sum(part[1].astype(jnp.int32))  # noqa: E731
        return int(fd.sum_microbatches(total, batch, size, "data"))

    found = [counted(device, 2 * size - 1) for device in (0, 1, 2, 511, 1022, 1023)]
    assert found == [size, size - 1, 0, 0, 0, 0]


# --- losses ---


def test_per_record_lifts_a_loss_of_one_record() -> None:
    def loss(params: Any, record: Any) -> jax.Array:
        x, y = record
        return jnp.square(jnp.tanh(x @ params["w"]) @ params["v"] - y)

    lifted = fd.per_record(loss)(PARAMS, BATCH)
    np.testing.assert_allclose(lifted, plain(PARAMS, BATCH), rtol=1e-5)


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all", "sequential"])
@pytest.mark.parametrize("where", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_python_is_called_for_one_record_at_a_time(method: Any, where: Any) -> None:
    """Else it would be given the batch that vmap makes, and could mix its records."""
    seen = []

    def centred(x: Any) -> np.ndarray:
        seen.append(np.shape(x))
        return np.asarray(x - np.mean(x))

    def called(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(centred, shape, x, vmap_method=method)

    alone = fd.over_records(lambda x: fd.on_one_record(where(called), x)[0])
    if method == "sequential":
        np.testing.assert_array_equal(alone(jnp.arange(3.0)), np.zeros(3))
        assert seen == [(1,)] * 3
    else:
        with pytest.raises(ValueError, match=f"'sequential', got '{method}'"):
            alone(jnp.arange(3.0))
        assert not seen


def test_per_record_lifts_no_callback_of_the_whole_batch() -> None:
    def centred(params: jax.Array, x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        minus_mean = lambda x: np.asarray(x - np.mean(x))  # noqa: E731
        return params * jax.pure_callback(
            minus_mean, shape, x, vmap_method="expand_dims"
        )

    with pytest.raises(ValueError, match="record by record"):
        fd.per_record(centred)(jnp.ones(()), jnp.arange(3.0))


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
def test_python_of_a_derivative_is_called_for_one_record_at_a_time(rule: str) -> None:
    """Of the loss alone nothing would be seen."""

    def slope(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        centred = lambda x: np.asarray(x - np.mean(x))  # noqa: E731
        return jax.pure_callback(centred, shape, x, vmap_method="expand_dims")

    loss: Any
    if rule == "jvp":
        loss = jax.custom_jvp(lambda x: 2 * x)
        loss.defjvp(lambda x, dx: (2 * x[0], slope(x[0]) * dx[0]))
    else:
        loss = jax.custom_vjp(lambda x: 2 * x)
        loss.defvjp(lambda x: (2 * x, x), lambda x, up: (slope(x) * up,))
    one = lambda x: fd.on_one_record(loss, x)[0]  # noqa: E731
    assert fd.over_records(one)(jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="got 'expand_dims'"):
        fd.over_records(jax.grad(one))(jnp.ones(3))


def test_losses_of_a_record_are_lifted_by_what_looks_at_them() -> None:
    """Nowhere in the library by ``jax.vmap`` alone."""
    root = Path(fd.__file__).resolve().parents[1]
    derivative = r"(functools\.partial\()?jax\.(grad|value_and_grad|hessian)"
    alone = re.compile(rf"(?<!`)jax\.vmap\(\s*{derivative}")
    modules = [*(root / "jaxdp").rglob("*.py"), *(root / "kernels").rglob("*.py")]
    assert len(modules) > 150
    for module in modules:
        text = module.read_text()
        assert not alone.search(text), module
        lifted = "oracles" in module.parts and "on_one_record(" in text
        assert not (lifted and "jax.vmap(" in text), module


def test_a_loss_that_has_changed_is_looked_at_again() -> None:
    """Of the same function JAX remembers the trace."""
    method = "sequential"

    def called(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.asarray, shape, x, vmap_method=method)

    lifted = fd.over_records(called)
    assert lifted(jnp.ones(3)).tolist() == [1, 1, 1]
    method = "expand_dims"
    with pytest.raises(ValueError, match="got 'expand_dims'"):
        lifted(jnp.ones(3))


def test_what_is_looked_at_is_what_runs() -> None:
    """A function that Python traces once, in and out of another trace."""
    times = 0

    def counted(x: jax.Array) -> dict[str, jax.Array]:
        nonlocal times
        times += 1
        return {"sum": x.sum(), "first": x[0]}

    for transformed in (lambda f: f, jax.jit):
        times = 0
        got = transformed(fd.over_records(counted))(jnp.arange(6.0).reshape(3, 2))
        assert times == 1
        assert got["sum"].tolist() == [1, 5, 9]
        assert got["first"].tolist() == [0, 2, 4]


def test_rules_for_derivatives_stay_where_a_lifted_loss_is_differentiated() -> None:
    @jax.custom_vjp
    def own(x: jax.Array) -> jax.Array:
        return x

    own.defvjp(lambda x: (x, None), lambda _, g: (7 * g,))

    @jax.custom_jvp
    def other(x: jax.Array) -> jax.Array:
        return x

    other.defjvp(lambda x, t: (x[0], 5 * t[0]))
    for rule, factor in ((own, 7.0), (other, 5.0)):
        lifted = fd.over_records(lambda x, rule=rule: rule(x) * x)
        got = jax.grad(lambda x, lifted=lifted: lifted(x).sum())(jnp.array([1.0, 2.0]))
        assert got.tolist() == [1 + factor, 2 + 2 * factor]


def test_the_difference_of_half_precision_losses_is_taken_in_float32() -> None:
    """2 * 1e-5 is 2e-5: subnormal in float16, zero where such numbers are flushed."""
    x = jnp.array([1.0, 2.0])

    def loss(p: jax.Array, b: jax.Array) -> jax.Array:
        return (b * (p @ p)).astype(jnp.float16)

    with jax.numpy_dtype_promotion("standard"):  # float16 with float32, on purpose
        got = slopes(loss, x, jnp.ones(3), rows_of("sphere", x), smoothing_radius=1e-5)
    assert got.dtype == np.float32
    assert np.isfinite(got).all()


WRONG_LOSSES: dict[str, tuple[Callable[[Any, Any], jax.Array], str]] = {
    "mean": (lambda p, b: jnp.mean(b) * p[0], r"shape \(4,\).*got \(\)"),
    "column": (lambda p, b: b[:, None] * p[0], r"shape \(4,\).*got \(4, 1\)"),
    "shorter": (lambda p, b: b[1:] * p[0], r"shape \(4,\).*got \(3,\)"),
    "integers": (lambda p, b: jnp.arange(4), "floating losses, got int32"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_loss_that_is_not_one_per_record_is_refused(name: str) -> None:
    loss, message = WRONG_LOSSES[name]
    x = jnp.ones(2)

    def run(radius: float) -> jax.Array:
        rows = sphere.directions(KEY, x, law="gaussian")
        return fd.slopes(loss, x, jnp.ones(4), rows, smoothing_radius=radius)

    for radius in (0.0, 0.1):
        with pytest.raises(ValueError, match=f"value_fn must return .*{message}"):
            jax.eval_shape(lambda radius=radius: run(radius))


@pytest.mark.parametrize(
    "batch",
    [(), jnp.float32(3), {"a": jnp.ones(3), "b": jnp.ones((4, 2))}],
    ids=["empty", "scalar", "ragged"],
)
def test_a_batch_without_a_common_axis_is_refused(batch: Any) -> None:
    with pytest.raises(
        ValueError, match="batch must be arrays with one common leading"
    ):
        fd.num_rows(batch)
    assert fd.num_rows({"a": np.ones((3, 2)), "b": jnp.ones(3)}) == 3


@pytest.mark.parametrize("law", ["sphere", "rademacher"])
def test_both_signs_together_are_both_signs_in_turn(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two ways to evaluate differ in speed, not in a bit of an elementwise loss."""
    params = {"w": jnp.linspace(-1, 1, 6)}
    rows = sphere.directions(jax.random.key(3), params, law=law, num=2)
    batch = jnp.linspace(-2, 2, 40)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.sin(params["w"][0] + params["w"][5] * batch)

    def slopes() -> jax.Array:
        return jax.jit(
            lambda r: fd.slopes(loss, params, batch, r, smoothing_radius=1e-3)
        )(rows)

    together = slopes()
    monkeypatch.setattr(fd, "_SMALL", 0)
    np.testing.assert_array_equal(together, slopes())


@pytest.mark.parametrize("law", ["rademacher", "gaussian"])
def test_a_network_is_perturbed_one_leaf_at_a_time(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary memory of slopes without stacked leaves: 1.4 leaves of 8, and the signs.

    A loop over the signs would hold a copy of all of them.
    """
    monkeypatch.setattr(fd, "_SMALL", 0)
    width, depth = 128, 8
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    like = {f"w{i}": weight for i in range(depth)}

    def loss(params: Any, x: jax.Array, at: perturb.At) -> jax.Array:
        for name, w in params.items():
            x = jnp.tanh(x @ at(name, w, after=x))
        return x.sum(axis=1)

    def released(key: jax.Array, params: Any, x: jax.Array) -> jax.Array:
        rows = sphere.directions(key, params, law=law)
        lazy = perturb.LazyLoss(loss)
        return fd.slopes(lazy, params, x, rows, smoothing_radius=0.1).sum()

    x = jax.ShapeDtypeStruct((2, width), jnp.float32)
    program = jax.jit(released).lower(jax.random.key(0), like, x).compile()
    stats = program.memory_analysis()
    assert stats is not None
    leaf = 4 * width**2
    signs = depth * leaf / 32 if law == "rademacher" else 0
    assert stats.temp_size_in_bytes < 1.4 * leaf + signs


@pytest.mark.parametrize("bodies", [1, 2])
@pytest.mark.parametrize("num", [1, 3])
def test_a_large_lazy_loss_takes_signs_and_directions_in_turn(
    num: int, bodies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiled body for both signs of stacked layers, and the plain loss's slopes."""
    layered = (lambda path: path == "w") if bodies == 1 else None
    rows = sphere.directions(
        jax.random.key(3), PARAMS, law="gaussian", num=num, stacked=layered
    )
    expected = slopes(plain, PARAMS, BATCH, rows, smoothing_radius=1e-2)
    monkeypatch.setattr(fd, "_SMALL", 0)
    program = jax.jit(
        lambda r: fd.slopes(LAZY, PARAMS, BATCH, r, smoothing_radius=1e-2)
    ).lower(rows)
    assert program.as_text().count("tanh") == bodies
    got = program.compile()(rows)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
