"""Public records: bases, losses in a subspace, mixed gradients and their weight."""

import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.kernels import finite_difference, sphere

PARAMS = {"b": jnp.asarray([0.5, -1.0]), "w": jnp.arange(6.0).reshape(3, 2) / 6}
RNG = np.random.default_rng(0)
PUBLIC = (
    RNG.normal(size=(7, 3)).astype(np.float32),
    RNG.normal(size=(7, 2)).astype(np.float32),
)
PRIVATE = tuple(np.tile(x, (2, 1)) + 0.25 for x in PUBLIC)
SHARED: dict[str, Any] = {
    "num_examples": 14,
    "num_steps": 3,
    "sampling": sampling.FullBatch(),
    "relation": "replace_one",
    "l2_clip_norm": 1.0,
}


def value_fn(params: Any, batch: Any) -> jax.Array:
    """Smooth losses (B,) of pairs, without closed forms."""
    x, y = batch
    outputs = jnp.tanh(x @ params["w"].astype(jnp.float32) + params["b"])
    return jnp.sum((outputs - y) ** 2, axis=-1)


def flat(tree: Any, rows: int | None = None) -> np.ndarray:
    """All leaves as one vector, or as rows where they have a leading axis."""
    shape = (-1,) if rows is None else (rows, -1)
    leaves = [np.asarray(x, np.float64).reshape(shape) for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=-1)


def gradients(fn: Any, params: Any, records: Any) -> np.ndarray:
    """Gradients of single records, (B, d), by forward differentiation."""
    return flat(jax.jacfwd(fn)(params, records), len(records[0]))


def basis_of(num: int, **options: Any) -> Any:
    return jaxdp.public_basis(value_fn, PARAMS, PUBLIC, num_directions=num, **options)


# --- the basis ---------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 4])
def test_rows_are_orthonormal_and_hold_the_most(num: int) -> None:
    """What m rows leave of the gradients is what no m others can hold, either."""
    basis = basis_of(num)
    chex.assert_trees_all_equal_shapes(
        basis, jax.tree.map(lambda x: jnp.zeros((num, *x.shape)), PARAMS)
    )
    rows = flat(basis, num)
    np.testing.assert_allclose(rows @ rows.T, np.eye(num), atol=1e-6)
    found = gradients(value_fn, PARAMS, PUBLIC)
    rest = found - found @ rows.T @ rows
    least = np.sum(np.linalg.svd(found, compute_uv=False)[num:] ** 2)
    np.testing.assert_allclose(np.sum(rest**2), least, rtol=1e-4)


def test_leaves_that_do_not_move_have_no_part() -> None:
    basis = basis_of(2, trainable=lambda path: path == "w")
    assert basis["b"] is None
    rows = flat(basis["w"], 2)
    np.testing.assert_allclose(rows @ rows.T, np.eye(2), atol=1e-6)
    subspace = jaxdp.in_subspace(value_fn, PARAMS, basis, full_scale=0.5)
    assert subspace.params["w"]["b"] is None
    moved = subspace.restore(jax.tree.map(jnp.ones_like, subspace.params))
    chex.assert_trees_all_equal(moved["b"], PARAMS["b"])
    want = np.ones(2) @ rows + 0.5 + flat(PARAMS["w"])
    np.testing.assert_allclose(flat(moved["w"]), want, rtol=1e-6)


def test_a_basis_of_what_is_not_finite_or_too_large_is_refused() -> None:
    x = PUBLIC[0].copy()
    x[[2, 5]] = np.nan
    with pytest.raises(ValueError, match="others on 2 of 7: the first is record 2"):
        jaxdp.public_basis(value_fn, PARAMS, (x, PUBLIC[1]), num_directions=1)
    same = tuple(np.tile(part[:1], (7, 1)) for part in PUBLIC)
    with pytest.raises(ValueError, match="num_directions must be at most 1, the rank"):
        jaxdp.public_basis(value_fn, PARAMS, same, num_directions=2)
    with pytest.raises(
        ValueError, match="num_directions must be an integer >= 1 and <= 7"
    ):
        basis_of(8)
    with pytest.raises(ValueError, match="one loss per record"):
        jaxdp.public_basis(
            lambda p, batch: jnp.sum(value_fn(p, batch)),
            PARAMS,
            PUBLIC,
            num_directions=1,
        )
    whole = {**PARAMS, "n": jnp.arange(2)}
    with pytest.raises(ValueError, match="the leaf 'n' of params"):
        jaxdp.public_basis(value_fn, whole, PUBLIC, num_directions=1)


# --- the subspace ------------------------------------------------------------------


@pytest.mark.parametrize("full_scale", [0.0, 0.5])
def test_is_the_loss_at_the_point_it_stands_for(full_scale: float) -> None:
    basis = basis_of(3)
    subspace = jaxdp.in_subspace(value_fn, PARAMS, basis, full_scale=full_scale)
    chex.assert_trees_all_equal(subspace.restore(subspace.params), PARAMS)
    point: dict[str, Any] = {"z": jnp.asarray([1.0, -2.0, 0.5])}
    theta = flat(PARAMS) + np.asarray(point["z"]) @ flat(basis, 3)
    if full_scale:
        point["w"] = jax.tree.map(jnp.cos, PARAMS)
        theta = theta + full_scale * flat(point["w"])
    assert jax.tree.structure(point) == jax.tree.structure(subspace.params)
    restored = subspace.restore(point)
    np.testing.assert_allclose(flat(restored), theta, rtol=1e-5, atol=1e-6)
    losses = jax.jit(subspace.value_fn)(point, PRIVATE)
    np.testing.assert_allclose(losses, value_fn(restored, PRIVATE), rtol=1e-5)


def test_parameters_keep_their_dtypes() -> None:
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    basis = jaxdp.public_basis(value_fn, narrow, PUBLIC, num_directions=2)
    assert {x.dtype for x in jax.tree.leaves(basis)} == {jnp.dtype(jnp.float32)}
    subspace = jaxdp.in_subspace(value_fn, narrow, basis, full_scale=1.0)
    chex.assert_trees_all_equal_dtypes(subspace.restore(subspace.params), narrow)
    assert {x.dtype for x in jax.tree.leaves(subspace.params)} == {
        jnp.dtype(jnp.float32)
    }


def moved_by_a_step(located: Any, rate: float) -> np.ndarray:
    """Takes one step of exact gradients; returns how far it moves the params."""
    exact = plans.DPGD(**SHARED | {"num_steps": 1, "l2_clip_norm": np.inf})
    result = jaxdp.fit(
        exact.with_noise(noise_multiplier=0.0),
        Keys.insecure(0),
        located.params,
        PRIVATE,
        value_fn=located.value_fn,
        optimizer=optax.sgd(rate),
    )
    return flat(located.restore(result.params)) - flat(PARAMS)


def test_a_step_is_one_of_the_metric() -> None:
    """Of exact gradients: theta moves by -rate (G'G + a^2 I) times the mean gradient."""
    rate, full_scale = 0.1, 0.5
    basis = basis_of(3)
    subspace = jaxdp.in_subspace(value_fn, PARAMS, basis, full_scale=full_scale)
    rows, gradient = flat(basis, 3), gradients(value_fn, PARAMS, PRIVATE).mean(axis=0)
    metric = rows.T @ rows + full_scale**2 * np.eye(8)
    moved = moved_by_a_step(subspace, rate)
    np.testing.assert_allclose(moved, -rate * metric @ gradient, rtol=1e-4, atol=1e-6)


def test_joint_directions_are_unbiased_for_the_smoothed_loss() -> None:
    r"""For cos(c' theta): its Gaussian smoothing of covariance radius^2 P is known.

    E cos(c'(theta + radius v)) = exp(-radius^2 c'Pc / 2) cos(c' theta). A coordinate of the
    mean of 8192 estimates is within 6 standard errors: by chance it fails with probability
    below 11 x 2e-9. The radius is so wide that the smoothing takes a third of the slope,
    some 20 standard errors.
    """
    radius, full_scale, num = 0.5, 0.5, 8192
    basis = basis_of(3)
    c = 3 * flat(basis, 3)[0] + 0.5 * np.arange(8) / 8
    tree = {"b": c[:2], "w": c[2:].reshape(3, 2)}

    def cosine(params: Any, batch: Any) -> jax.Array:
        parts = jax.tree.map(lambda p, k: jnp.sum(p * k), params, tree)
        return jnp.cos(sum(jax.tree.leaves(parts))) * jnp.ones(len(batch))

    subspace = jaxdp.in_subspace(cosine, PARAMS, basis, full_scale=full_scale)
    point = subspace.params
    rows = sphere.directions(jax.random.key(1), point, law="gaussian", num=num)

    @jax.jit
    def estimates(rows: Any) -> Any:
        slopes = finite_difference.slopes(
            subspace.value_fn,
            point,
            jnp.zeros((1, 1)),
            rows,
            smoothing_radius=radius,
        )[0]
        along = jax.vmap(lambda row: sphere.materialise(row, point))(rows)
        return jax.tree.map(
            lambda u: u * slopes.reshape(-1, *(1,) * (u.ndim - 1)), along
        )

    found = flat(estimates(rows), num)
    joint = np.concatenate([full_scale * c, flat(basis, 3) @ c])  # "w" before "z"
    shrunk = np.exp(-(radius**2) * joint @ joint / 2)
    assert 0.1 < shrunk < 0.8
    want = -joint * shrunk * np.sin(c @ flat(PARAMS))
    error = found.std(axis=0) / np.sqrt(num)
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - want), 6 * error)
    assert np.max(np.abs(want / shrunk - want) / error) > 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda basis: {"w": basis["w"]}, "basis must be a pytree like params"),
        (lambda basis: {**basis, "b": basis["b"][:1]}, "one leading axis"),
        (lambda basis: {**basis, "b": basis["b"][:, :1]}, r"shape \(2, 2\) at 'b'"),
        (lambda basis: jax.tree.map(lambda x: x[:0], basis), "at least one direction"),
        (lambda basis: dict.fromkeys(basis), "basis must have a leaf that is not None"),
        (
            lambda basis: jax.tree.map(lambda x: x * jnp.nan, basis),
            "basis must have fin",
        ),
        (
            lambda basis: jax.tree.map(jnp.zeros_like, basis),
            "basis must .* zeros alone",
        ),
    ],
    ids=["structure", "rows", "shape", "empty", "none", "nan", "zero"],
)
def test_a_basis_of_other_params_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxdp.in_subspace(value_fn, PARAMS, change(basis_of(2)))


def test_a_scale_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="full_scale must be a finite number >= 0"):
        jaxdp.in_subspace(value_fn, PARAMS, basis_of(1), full_scale=-1.0)


# --- the scale ---------------------------------------------------------------------


def scale_of(**options: Any) -> Any:
    return jaxdp.public_scale(value_fn, PARAMS, PUBLIC, **options)


@pytest.mark.parametrize("floor", [0.1, 2.0])
def test_the_scale_is_that_of_the_second_moments(floor: float) -> None:
    """In NumPy; public gradients keep their root mean square length."""
    rows = gradients(value_fn, PARAMS, PUBLIC)
    root = np.sqrt(np.mean(rows**2, axis=0))
    want = (root / np.sqrt(np.mean(rows**2)) + floor) ** -0.5
    want *= np.sqrt(np.sum(rows**2) / np.sum((rows * want) ** 2))
    scale = scale_of(floor=floor)
    np.testing.assert_allclose(flat(scale), want, rtol=1e-5)
    scaled = jaxdp.in_scale(value_fn, PARAMS, scale)
    found = gradients(scaled.value_fn, scaled.params, PUBLIC)
    np.testing.assert_allclose(np.sum(found**2), np.sum(rows**2), rtol=1e-5)
    np.testing.assert_allclose(found, rows * want, rtol=1e-4, atol=1e-6)


def test_the_floor_bounds_what_is_made_of_small_gradients() -> None:
    """A leaf without any gradient; without the floor its scale would be infinite."""
    losses = lambda p, batch: batch @ p["w"]  # noqa: E731
    params = {"w": jnp.zeros(3), "none": jnp.zeros(2)}
    scale = jaxdp.public_scale(losses, params, jnp.ones((4, 3)), floor=0.25)
    ratio = flat(scale["none"]) / flat(scale["w"])[:2]
    typical = np.sqrt(5 / 3)  # over the root mean square of all five
    np.testing.assert_allclose(ratio, np.sqrt((typical + 0.25) / 0.25), rtol=1e-5)


def test_a_scaled_step_is_one_of_the_metric() -> None:
    """Of exact gradients: theta moves by -rate a^2 times the mean gradient."""
    scale = scale_of()
    scaled = jaxdp.in_scale(value_fn, PARAMS, scale)
    chex.assert_trees_all_equal(scaled.restore(scaled.params), PARAMS)
    gradient = gradients(value_fn, PARAMS, PRIVATE).mean(axis=0)
    moved = moved_by_a_step(scaled, 0.1)
    want = -0.1 * flat(scale) ** 2 * gradient
    np.testing.assert_allclose(moved, want, rtol=1e-4, atol=1e-6)


def test_scaled_parameters_keep_dtypes_and_others_their_places() -> None:
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    scale = jaxdp.public_scale(
        value_fn, narrow, PUBLIC, trainable=lambda path: path == "w"
    )
    assert scale["b"] is None and scale["w"].dtype == jnp.float32
    scaled = jaxdp.in_scale(value_fn, narrow, scale)
    assert scaled.params["w"]["b"] is None
    restored = scaled.restore(jax.tree.map(jnp.ones_like, scaled.params))
    chex.assert_trees_all_equal_dtypes(restored, narrow)
    chex.assert_trees_all_equal(restored["b"], narrow["b"])
    want = flat(narrow["w"].astype(jnp.float32)) + flat(scale["w"])
    np.testing.assert_allclose(flat(restored["w"].astype(jnp.float32)), want, rtol=1e-2)


def test_wrong_scales_are_refused() -> None:
    x = PUBLIC[0].copy()
    x[[2, 5]] = np.nan
    with pytest.raises(ValueError, match="others on 2 of 7: the first is record 2"):
        jaxdp.public_scale(value_fn, PARAMS, (x, PUBLIC[1]))
    with pytest.raises(ValueError, match="floor must be a number > 0"):
        scale_of(floor=0.0)
    with pytest.raises(ValueError, match="that is not zero"):
        jaxdp.public_scale(lambda p, batch: jnp.zeros(len(batch[0])), PARAMS, PUBLIC)
    with pytest.raises(ValueError, match="whose squares float32 holds"):
        jaxdp.public_scale(lambda p, b: 1e25 * value_fn(p, b), PARAMS, PUBLIC)
    for change, message in (
        ({"w": PARAMS["w"]}, "scale must be a pytree like params"),
        ({**PARAMS, "b": jnp.ones(3)}, r"shape \(2,\) at 'b'"),
        (dict.fromkeys(PARAMS), "scale must have a leaf that is not None"),
        ({"b": jnp.array([1, jnp.nan]), "w": None}, "finite real numbers >= 0 at 'b'"),
        ({"b": jnp.array([1, -1]), "w": None}, "finite real numbers >= 0 at 'b'"),
        (jax.tree.map(jnp.zeros_like, PARAMS), "scale must .* zeros alone"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxdp.in_scale(value_fn, PARAMS, change)
    with pytest.raises(ValueError, match="scale must be None wherever params is"):
        jaxdp.in_scale(value_fn, {**PARAMS, "n": None}, {**PARAMS, "n": jnp.ones(2)})
    with pytest.raises(TypeError, match="numbers >= 0 at 'b', got complex64"):
        jaxdp.in_scale(value_fn, PARAMS, {"b": jnp.array([1j, 1]), "w": None})


def test_a_scale_may_be_of_a_trace() -> None:
    """Then its numbers are not known; those of a constant are."""
    scale = scale_of()
    whole = lambda point, scale: jaxdp.in_scale(value_fn, PARAMS, scale).restore(point)  # noqa: E731
    point = {"w": UPDATES}
    want = whole(point, scale)
    chex.assert_trees_all_close(jax.jit(whole)(point, scale), want, rtol=1e-6)
    of_constant = jax.jit(lambda point: whole(point, scale))
    chex.assert_trees_all_close(of_constant(point), want, rtol=1e-6)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    with pytest.raises(ValueError, match="zeros alone"):
        jax.jit(lambda point: whole(point, zeros))(point)


def test_functions_and_leaves_that_cannot_serve_are_named() -> None:
    """In all four; a step of an integer would be cast away."""
    whole = {"n": jnp.arange(2)}
    for wrong in (
        lambda fn, **_: jaxdp.in_scale(fn, PARAMS, scale_of()),
        lambda fn, **_: jaxdp.in_subspace(fn, PARAMS, basis_of(1)),
        lambda fn, **more: jaxdp.public_scale(fn, jnp.zeros(2), PUBLIC, **more),
        lambda fn, **more: jaxdp.public_basis(
            fn, jnp.zeros(2), PUBLIC, num_directions=1, **more
        ),
    ):
        with pytest.raises(TypeError, match="value_fn must be callable, got 5"):
            wrong(5)
    for public in (
        wrong,
        lambda fn, **more: jaxdp.public_scale(fn, jnp.zeros(2), PUBLIC, **more),
    ):
        with pytest.raises(TypeError, match=r"trainable must be .* bools, got 3"):
            public(value_fn, trainable=3)
    with pytest.raises(ValueError, match=r"scale must be None at 'n', .* dtype int32"):
        jaxdp.in_scale(value_fn, whole, {"n": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"basis must be None at 'n', .* dtype int32"):
        jaxdp.in_subspace(value_fn, whole, {"n": jnp.ones((1, 2))})


# --- mixing ------------------------------------------------------------------------

UPDATES = jax.tree.map(jnp.sin, PARAMS)


def mixed(weight: Any, steps: int = 1, **options: Any) -> Any:
    """The updates of the last step, compiled."""
    tx = jaxdp.mix_public(value_fn, PUBLIC, weight, **options)
    state, updates = tx.init(PARAMS), None
    for _ in range(steps):
        updates, state = jax.jit(tx.update)(UPDATES, state, PARAMS)
    return updates


def test_is_the_weighted_mean_of_both_gradients() -> None:
    public = gradients(value_fn, PARAMS, PUBLIC).mean(axis=0)
    want = 0.75 * flat(UPDATES) + 0.25 * public
    np.testing.assert_allclose(flat(mixed(0.25)), want, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(mixed(0.0), UPDATES)


def test_a_schedule_is_of_the_steps_seen() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, transition_steps=4)
    chex.assert_trees_all_close(mixed(schedule, steps=4), mixed(0.25), rtol=1e-5)


def test_clips_each_public_record() -> None:
    rows = gradients(value_fn, PARAMS, PUBLIC)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    bound = float(np.median(lengths))
    public = (rows * np.minimum(1, bound / lengths)).mean(axis=0)
    want = 0.5 * flat(UPDATES) + 0.5 * public
    found = flat(mixed(0.5, l2_clip_norm=bound))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_mixing_leaves_others_as_they_are() -> None:
    found = mixed(0.5, trainable=lambda path: path == "w")
    chex.assert_trees_all_equal(found["b"], UPDATES["b"])
    chex.assert_trees_all_close(found["w"], mixed(0.5)["w"], rtol=1e-6)


@pytest.mark.parametrize("l2_clip_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_public_gradients_that_are_not_finite_do_not_spread(
    l2_clip_norm: float | None,
) -> None:
    """Without a clip the step is the private one; with it the record counts as zero."""
    x = PUBLIC[0].copy()
    x[0] = np.nan
    tx = jaxdp.mix_public(value_fn, (x, PUBLIC[1]), 0.5, l2_clip_norm=l2_clip_norm)
    found, _ = tx.update(UPDATES, tx.init(PARAMS), PARAMS)
    want = flat(UPDATES)
    if l2_clip_norm is not None:
        rest = tuple(part[1:] for part in PUBLIC)
        rows = gradients(value_fn, PARAMS, rest)
        rows *= np.minimum(1, 1 / np.linalg.norm(rows, axis=1, keepdims=True))
        want = 0.5 * want + 0.5 * rows.sum(axis=0) / 7
    np.testing.assert_allclose(flat(found), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [plans.DPGD, plans.DPZero], ids=["dpgd", "dpzero"])
def test_in_fit_it_ends_between_private_and_public(method: Any) -> None:
    """Quadratics around 1 and 3, without noise: the mixed gradient is zero at 1.5."""
    losses = lambda w, x: jnp.sum((w - x) ** 2, axis=-1) / 2  # noqa: E731
    mix = jaxdp.mix_public(losses, jnp.full((5, 2), 3.0), 0.25)
    more = {"smoothing_radius": 1e-2} if method is plans.DPZero else {}
    plan = method(**SHARED | {"num_steps": 200, "l2_clip_norm": np.inf}, **more)
    result = jaxdp.fit(
        plan.with_noise(noise_multiplier=0.0),
        Keys.insecure(0),
        jnp.zeros(2),
        jnp.ones((14, 2)),
        value_fn=losses,
        optimizer=optax.chain(mix, optax.sgd(0.2)),
    )
    # With one random direction a step the noise-free DPZero wanders about.
    spread = 0.4 if method is plans.DPZero else 1e-4
    np.testing.assert_allclose(result.params, [1.5, 1.5], atol=spread)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"weight must be a number in \[0, 1\], got 1.5"
    ):
        jaxdp.mix_public(value_fn, PUBLIC, 1.5)
    with pytest.raises(ValueError, match="weight must be a finite number >= 0"):
        jaxdp.mix_public(value_fn, PUBLIC, -0.5)
    with pytest.raises(ValueError, match="l2_clip_norm must be a number > 0"):
        jaxdp.mix_public(value_fn, PUBLIC, 0.5, l2_clip_norm=0.0)
    with pytest.raises(ValueError, match="public_records must be arrays"):
        jaxdp.mix_public(value_fn, (PUBLIC[0], PUBLIC[1][:2]), 0.5)
    tx = jaxdp.mix_public(value_fn, PUBLIC, 0.5)
    with pytest.raises(ValueError, match="params must be passed to update"):
        tx.update(UPDATES, tx.init(PARAMS))


# --- all of it ---------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["subspace", "scale"])
def test_a_recorded_run_is_replayed(tmp_path: pathlib.Path, scaled: bool) -> None:
    """In a subspace with the full space, or scaled, mixed: from the releases, to the bit.

    And resumed, with what is made of the public records made again.
    """

    def made() -> tuple[jaxdp.Subspace, Any]:
        subspace = jaxdp.in_subspace(value_fn, PARAMS, basis_of(2), full_scale=0.5)
        if scaled:
            subspace = jaxdp.in_scale(value_fn, PARAMS, scale_of())
        mix = jaxdp.mix_public(subspace.value_fn, PUBLIC, 0.25, l2_clip_norm=1.0)
        return subspace, optax.chain(mix, optax.sgd(0.1))

    subspace, optimizer = made()
    plan = plans.DPZero(**SHARED, smoothing_radius=1e-3, num_directions=2)
    result = jaxdp.fit(
        plan.with_noise(noise_multiplier=1.0),
        Keys.insecure(0),
        subspace.params,
        PRIVATE,
        value_fn=subspace.value_fn,
        optimizer=optimizer,
        ledger=tmp_path,
    )
    replayed = jaxdp.replay(tmp_path, subspace.params, optimizer=optimizer)
    chex.assert_trees_all_equal(replayed.params, result.params)
    assert all(float(jnp.max(jnp.abs(x))) > 0 for x in jax.tree.leaves(result.params))
    subspace, optimizer = made()
    resumed = jaxdp.resume(
        *(tmp_path, subspace.params, PRIVATE),
        value_fn=subspace.value_fn,
        optimizer=optimizer,
    )
    chex.assert_trees_all_equal(resumed.params, result.params)


@pytest.mark.parametrize(
    ("private", "spread", "num", "bias"),
    [(2.0, 30.0, 10, 0.0), (0.5, 30.0, 10, 1.5), (1e-3, 0.0, 3, 0.1)],
)
def test_the_weight_has_the_least_error(
    private: float, spread: float, num: int, bias: float
) -> None:
    """Of all weights on a fine grid, by the error of their estimates."""
    alpha = np.linspace(0, 1, 100_001)
    error = (1 - alpha) ** 2 * private + alpha**2 * (spread / num + bias**2)
    found = jaxdp.mixing_weight(
        private_variance=private, public_variance=spread, num_public=num, bias=bias
    )
    np.testing.assert_allclose(found, alpha[np.argmin(error)], atol=1e-5)


def test_weights_at_the_ends() -> None:
    exact = {"public_variance": 0.0, "num_public": 1}
    assert jaxdp.mixing_weight(private_variance=0.0, **exact) == 0
    assert jaxdp.mixing_weight(private_variance=1.0, **exact) == 1
    with pytest.raises(ValueError, match="bias must be a finite number >= 0"):
        jaxdp.mixing_weight(private_variance=1.0, bias=-1.0, **exact)
    with pytest.raises(ValueError, match="num_public must be an integer >= 1"):
        jaxdp.mixing_weight(private_variance=1.0, public_variance=1.0, num_public=0)
