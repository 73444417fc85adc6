"""A radius that rounding hides is warned of before the run; a sensible one never is."""

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import plans, sampling
from jaxdp.core.types import Perturbation
from jaxdp.training import resolution
from jaxdp.training.resolution import warn_if_unresolved
from tests.training.problem import DATA, PARAMS, N, make_plan, value_fn

WEIGHTS = np.random.default_rng(0).normal(scale=0.02, size=(40, 30))


def weights(dtype: str, scale: float = 1.0) -> dict[str, jax.Array]:
    return {"w": jnp.asarray(scale * WEIGHTS, dtype), "b": jnp.zeros(30, dtype)}


def warned(
    radius: float, params: Any, moved: dict[str, Any] | None = None, **kwargs: Any
) -> str | None:
    """The message of the warning, None if there is none."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_if_unresolved(Perturbation(radius, **moved or {}), params, **kwargs)
    assert len(found) <= 1
    return str(found[0].message) if found else None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_least_radius_of_each_dtype(dtype: str) -> None:
    least = resolution.LEAST_RADIUS[dtype]
    assert warned(least, weights(dtype)) is None
    message = warned(0.99 * least, weights(dtype))
    assert message is not None
    for part in (f"smoothing_radius={0.99 * least:g}", dtype, f"at least {least:.2g}"):
        assert part in message


def test_radius_zero_never_warns() -> None:
    assert warned(0.0, weights("float16", 1e4)) is None


def test_points_at_a_distance_move_each_parameter_by_a_share_of_it() -> None:
    """The radius that is named is the plan's."""
    params, share = weights("float32"), {"share": 0.1, "may_be_zero": False}
    assert warned(1.01e-5, params, share) is None
    message = warned(0.9e-5, params, share) or ""
    assert "smoothing_radius=9e-06 is below what float32" in message
    assert message.endswith("take at least 1e-05")


def test_gradients_lose_what_points_lose_when_they_are_rounded() -> None:
    """Nothing is subtracted: only parameters that stay where they are count."""
    given = {"differences": False, "may_be_zero": False}
    params = {"w": jnp.ones((30, 40), "bfloat16")}
    least = 2.0**-8  # Half the distance from 1 to the next number.
    assert warned(1.01 * least, params, given) is None
    message = warned(0.99 * least, params, given) or ""
    assert "most parameters will stay where they are" in message
    assert message.endswith("take at least 0.0039")
    small = {"w": 1e-3 * jnp.ones(3)}
    assert warned(1e-7, small, given) is None
    assert warned(1e-7, small) is not None  # Differences are lost before.


def test_a_narrower_compute_dtype_counts() -> None:
    params = weights("float32")
    assert warned(1e-4, params) is None
    assert "bfloat16" in (warned(1e-4, params, compute_dtype="bfloat16") or "")
    assert warned(3e-4, params, compute_dtype="bfloat16") is None
    large = {"w": jnp.ones(1000)}  # Half a spacing of bfloat16 at 1 is 2^-8.
    assert "at least 0.0039" in (warned(1e-3, large, compute_dtype="bfloat16") or "")
    assert warned(5e-3, large, compute_dtype="bfloat16") is None
    # A wider one does not help weights that are rounded to begin with.
    assert "bfloat16" in (
        warned(1e-4, weights("bfloat16"), compute_dtype="float32") or ""
    )


#: What products of float32 are rounded to, by backend and jax_default_matmul_precision.
PRODUCTS = {
    "cpu": dict.fromkeys((None, "default", "tensorfloat32", "highest"), "float32"),
    "gpu": {
        **dict.fromkeys((None, "default", "high", "tensorfloat32"), "tensorfloat32"),
        **dict.fromkeys(("TF32_TF32_F32", "F16_F16_F32"), "tensorfloat32"),
        **dict.fromkeys(("bfloat16", "BF16_BF16_F32"), "bfloat16"),
        **dict.fromkeys(("highest", "float32", "F32_F32_F32"), "float32"),
        **dict.fromkeys(("BF16_BF16_F32_X6", "TF32_TF32_F32_X3"), "float32"),
    },
    "tpu": {
        **dict.fromkeys((None, "default", "bfloat16", "BF16_BF16_F32"), "bfloat16"),
        **dict.fromkeys(("high", "highest", "float32", "tensorfloat32"), "float32"),
    },
}


@pytest.mark.parametrize("backend", PRODUCTS)
def test_products_of_an_accelerator_count(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    params = weights("float32")
    for precision, dtype in PRODUCTS[backend].items():
        with jax.default_matmul_precision(precision):
            assert resolution.product_dtype() == dtype, precision
            least = resolution.LEAST_RADIUS[dtype]
            assert warned(1.1 * least, params) is None
            message = warned(0.9 * least, params) or ""
        if dtype == "float32":
            assert "below what float32 resolves here" in message
            continue
        assert f"below what products of float32 in {dtype} resolve here" in message
        said = 'jax.config.update("jax_default_matmul_precision", "highest")'
        assert f"{said}, for a {backend}" in message
        # Narrow parameters are what they are.
        assert "highest" not in (warned(1e-5, weights("bfloat16")) or "highest")
        large = {"w": jnp.ones(1000)}  # Half a spacing at 1.
        half = {"tensorfloat32": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        with jax.default_matmul_precision(precision):
            assert warned(0.99 * half, large) is not None
            assert warned(1.01 * half, large) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])
def test_what_is_warned_of_is_what_rounding_takes_away(
    dtype: str, scale: float
) -> None:
    x = np.asarray(weights(dtype, scale)["w"])
    half = resolution._half_spacing(x.astype(float), float(jnp.finfo(dtype).eps))
    normal = np.abs(x.astype(float)) >= float(jnp.finfo(dtype).smallest_normal)
    for share, back in ((0.99, True), (1.01, False)):  # Away from zero.
        moved = x.astype(float) + share * half * np.sign(x.astype(float))
        assert np.all((moved.astype(x.dtype) == x)[normal] == back)
    # Half of the elements would round back below the radius that is named.
    least = max(float(np.median(half)), resolution.LEAST_RADIUS[dtype])
    params = {"w": jnp.asarray(x)}
    assert warned(0.5 * least, params) is not None
    assert warned(1.01 * least, params) is None


def test_leaves_count_by_their_size_and_only_those_that_move() -> None:
    large = {"body": jnp.full((300, 300), 1e-3)}
    large |= {f"head{i}": jnp.full(1000, 1e5) for i in range(5)}
    assert warned(1e-4, large) is None
    head = lambda path: path.startswith("head")  # noqa: E731
    assert "float32" in (warned(1e-4, large, trainable=head) or "")
    # Frozen leaves may be of any dtype.
    frozen = {"w": jnp.ones(3), "table": jnp.arange(4), "old": jnp.ones(3, "float16")}
    only_w = lambda path: path == "w"  # noqa: E731
    assert warned(1e-5, frozen, trainable=only_w) is None
    assert warned(1e-5, frozen, trainable=lambda path: path != "table") is not None


@pytest.mark.parametrize(
    "params",
    [
        {"w": jnp.zeros((4, 3))},
        {"w": 0.3},
        {"w": np.ones(())},
        {"w": jnp.zeros((0, 3)), "v": jnp.ones(1)},
        {"w": jnp.zeros((0, 3))},
        {"w": jnp.asarray([1.0, jnp.nan, jnp.inf])},
    ],
)
def test_odd_parameters(params: Any) -> None:
    assert warned(1e-4, params) is None


def test_a_large_leaf_is_sampled_all_over() -> None:
    size = resolution._LARGE
    x = np.ones((4, size // 4), np.float32)
    x[:2] = 1e6  # Half of it, and a little more.
    x[2, :10_000] = 1e6
    assert "float32" in (warned(1e-3, jnp.asarray(x)) or "")
    x[2] = x[1, -10_000:] = 1.0
    assert warned(1e-3, jnp.asarray(x)) is None


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="smoothing_radius must be"):
        warn_if_unresolved(Perturbation(-1.0), PARAMS)
    with pytest.raises(ValueError, match="trainable"):
        warn_if_unresolved(Perturbation(1e-3), PARAMS, trainable=lambda path: False)


def test_fit_and_resume_warn(tmp_path: Path) -> None:
    """In the line of the caller."""
    plan = make_plan(smoothing_radius=1e-8, num_steps=2)
    keys, run = jaxdp.Keys.insecure(0), tmp_path / "run"
    given: dict[str, Any] = {"value_fn": value_fn, "optimizer": optax.sgd(0.1)}
    with pytest.warns(UserWarning, match=r"smoothing_radius=1e-08 .* float32") as at:
        jaxdp.fit(plan, keys, PARAMS, DATA, ledger=run, **given)
    assert [w.filename for w in at] == [__file__]
    with pytest.warns(UserWarning, match="smoothing_radius") as at:
        jaxdp.resume(run, PARAMS, DATA, **given)
    assert [w.filename for w in at] == [__file__]


@pytest.mark.parametrize(
    ("oracle", "direction", "difference", "lost"),
    [
        ("zeroth_order", "orthonormal", "antithetic", "slopes will mostly be"),
        pytest.param(
            *("first_order", "ball", "common"),
            "most parameters will stay where they are",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plans_of_points_at_a_distance_warn(
    oracle: Any, direction: Any, difference: Any, lost: str
) -> None:
    """Of sixteen parameters each moves by a quarter of the radius."""
    plan = plans.O2NC(
        num_examples=N,
        num_steps=2,
        sampling=sampling.SinglePassRestarts(period=1, restart_batch_size=2),
        relation="replace_one",
        oracle=oracle,
        direction=direction,
        difference=difference,
        restart_l2_clip_norm=1.0,
        l2_clip_norm=1.0,
        smoothing_radius=0.01,
        max_step=0.1,
        window=2,
        noise_multiplier=1.0,
        delta=1e-5,
    )

    def values(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.abs(batch - params[0])

    def fit(dtype: str) -> None:
        x, data = jnp.ones(16, dtype), jnp.linspace(-1, 1, N)
        jaxdp.fit(plan, jaxdp.Keys.insecure(0), x, data, value_fn=values)

    # Half the distance from 1 to the next number is 2**-8; four times that is named.
    said = rf"smoothing_radius=0\.01 is .* bfloat16 .* {lost}.*; take at least 0\.016$"
    with pytest.warns(UserWarning, match=said):
        fit("bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("float32")


# --- steps -------------------------------------------------------------------------


def test_steps_that_move_nothing_are_warned_of(tmp_path: Path) -> None:
    """By ``fit`` and by ``resume``, in the line of the caller; sensible ones are silent."""
    plan, run = make_plan(num_steps=2), tmp_path / "run"
    given: dict[str, Any] = {"value_fn": value_fn, "optimizer": optax.sgd(1e-12)}
    moved = jax.tree.map(jnp.ones_like, PARAMS)
    said = r"100% of the parameters \(float32\) are where they were"
    with pytest.warns(UserWarning, match=said) as at:
        jaxdp.fit(plan, jaxdp.Keys.insecure(0), moved, DATA, ledger=run, **given)
    assert [w.filename for w in at] == [__file__]
    with pytest.warns(UserWarning, match=said) as at:
        jaxdp.resume(run, moved, DATA, **given)
    assert [w.filename for w in at] == [__file__]
    given["optimizer"] = optax.sgd(0.1)
    jaxdp.fit(plan, jaxdp.Keys.insecure(0), moved, DATA, **given)


def test_unmoved_parameters_count_by_their_size_and_where_they_should_move() -> None:
    before = {"a": np.zeros(10), "b": np.ones(29), "c": np.ones(100)}
    after = before | {"a": np.ones(10)}
    moves = {"a": True, "b": True, "c": False}
    samples = functools.partial(resolution.samples, trainable=moves)
    with pytest.warns(UserWarning, match=r"^74% of the parameters \(float32\)"):
        resolution.warn_if_unmoved(samples(before), samples(after))
    after["b"] = np.arange(29.0)  # One of them is where it was.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolution.warn_if_unmoved(samples(before), samples(after))
