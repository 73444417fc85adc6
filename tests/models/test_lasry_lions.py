"""Moreau envelopes and Lasry-Lions smoothings against closed forms and grids."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.metrics import componentwise_goldstein_norm, goldstein_norm
from jaxdp.metrics.goldstein import least_on_simplex
from jaxdp.models import envelopes, nonsmooth
from jaxdp.models.envelopes import lasry_lions, lasry_lions_mean, moreau_envelope

# Closed forms of public problems: no method reads them.
pytestmark = pytest.mark.slow

# Functions are defined once, for they are compiled once. L and w beside them.


def absolute(y):  # L = sqrt(d), w = 0
    return jnp.sum(jnp.abs(y))


def steep(y):  # L = 10
    return 10 * jnp.sum(jnp.abs(y))


def bowl(y):  # w = 0
    return jnp.sum(jnp.arange(1, len(y) + 1) * y**2) / 2


def two_basins(y):  # L = 1, not weakly convex
    return jnp.minimum(jnp.abs(y[0] - 1), jnp.abs(y[0] + 1))


def tilted_basins(y):  # L = 1, and a jump of the slope by -2 between the basins
    return jnp.minimum(jnp.linalg.norm(y - 1), jnp.linalg.norm(y + 0.8) + 0.3)


DIRECTIONS = np.array([[1.0, 0.3, -0.4], [-0.5, 0.9, 0.2]])


def wave(y):  # w = sum ||a||^2, L = sum ||a||: periodic phase retrieval
    return jnp.sum(jnp.abs(jnp.cos(DIRECTIONS[:, : len(y)] @ y) - 0.4))


def wave_constants(dim):
    squares = np.sum(DIRECTIONS[:, :dim] ** 2, axis=1)
    return {"weak_convexity": squares.sum(), "lipschitz": np.sqrt(squares).sum()}


def phase(y):  # |<a, y>^2 - 1|: w = 2 ||a||^2, Lipschitz nowhere in particular
    return jnp.sum(jnp.abs((DIRECTIONS[:, : len(y)] @ y) ** 2 - 1))


def on(fn, points):
    with jax.enable_x64(True):
        return np.asarray(jax.vmap(fn)(jnp.asarray(points, jnp.float64)))


def grid(center, reach, num):
    axis = np.linspace(-reach, reach, num)
    axes = np.meshgrid(*[axis + c for c in center], indexing="ij")
    return np.stack([a.ravel() for a in axes], axis=1)


def quadratic(points, others):
    return np.sum((points[:, None] - others[None]) ** 2, axis=2)


def searched_moreau(fn, x, smoothing, reach, num):
    y = grid(x, reach, num)
    return np.min(on(fn, y) + np.sum((y - x) ** 2, axis=1) / (2 * smoothing))


def searched_lasry_lions(fn, x, smoothing, slope, num):
    """The formula itself on grids, off by at most slope x (half a cell's diagonal)."""
    y = grid(x, 3 * smoothing * slope, 3 * num)
    z = grid(x, smoothing * slope, num)
    values = on(fn, y)
    inner = np.array(
        [
            np.min(values + q[0] / (4 * smoothing))
            for q in (quadratic(p[None], y) for p in z)
        ]
    )
    return np.max(inner - np.sum((z - x) ** 2, axis=1) / (2 * smoothing))


# --- closed forms ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "constants",
    [
        {"weak_convexity": 0.0},
        pytest.param({"lipschitz": 10.0}, marks=pytest.mark.slow),
    ],
)
def test_absolute_value(constants):
    smoothing, slope = 0.1, 10.0
    for x in (-4.0, -1.2, -0.9, -0.3, 0.0, 0.5, 0.999, 1.001, 2.5):
        if abs(x) <= smoothing * slope:
            value, gradient = x**2 / (2 * smoothing), x / smoothing
        else:
            value = slope * abs(x) - smoothing * slope**2 / 2
            gradient = slope * np.sign(x)
        for smooth in (lasry_lions, moreau_envelope):
            found = smooth(steep, [x], smoothing, tolerance=1e-6, **constants)
            assert found.lower - 1e-12 <= value <= found.upper + 1e-12
            assert found.gap <= 1e-6
            error = abs(found.gradient[0] - gradient)
            assert error <= found.gradient_error + 1e-9
            # Values alone may leave the envelope's minimiser open where h is linear.
            if smooth is lasry_lions or "weak_convexity" in constants:
                assert found.gradient_error <= 0.05
        # What the paper prints for h - smoothed(h), L lambda = 1, is exceeded: it is 5 in
        # the tails. Its smoothness L / lambda = 100 is 10 times what the slope shows.
        assert 0 <= slope * abs(x) - value <= slope**2 * smoothing
    far = lasry_lions(steep, [4.0], smoothing, tolerance=1e-6, **constants)
    assert 40 - far.value == pytest.approx(smoothing * slope**2 / 2, abs=1e-5)
    assert 40 - far.value > slope * smoothing
    a, b = (
        lasry_lions(steep, [x], smoothing, tolerance=1e-9, **constants).gradient[0]
        for x in (0.0, 0.5)
    )
    assert (b - a) / 0.5 == pytest.approx(1 / smoothing, abs=0.01)


def test_the_printed_formula_is_unbounded():
    # max_z min_y [h(z) + |z - y|^2 / (4 lambda) - |y - x|^2 / (2 lambda)], x = 0, z = 1.
    smoothing = 0.1
    least = []
    for reach in (1e1, 1e2, 1e3):
        y = np.linspace(-reach, reach, 2001)
        least.append(
            np.min(1 + (1 - y) ** 2 / (4 * smoothing) - y**2 / (2 * smoothing))
        )
    assert least[0] < -100 and least[1] < 80 * least[0] and least[2] < 80 * least[1]


def test_both_basins_are_seen():
    # With lambda = 1, near 0 half the weight of the best measure is on either minimum:
    # 1 / (4 lambda) - x^2 / (2 lambda). A local inner search from x gives (x - 1)^2 / 2.
    for x in (-0.3, 0.0, 0.2, 0.45):
        found = lasry_lions(two_basins, [x], 1.0, lipschitz=1.0, tolerance=1e-7)
        exact = 0.25 - x**2 / 2
        assert found.gap <= 1e-7
        assert found.lower - 1e-12 <= exact <= found.upper + 1e-12
        assert abs(found.gradient[0] + x) <= found.gradient_error <= 1e-3
        assert (abs(x) - 1) ** 2 / 2 - exact > 1e-3
    found = moreau_envelope(two_basins, [0.2], 1.0, lipschitz=1.0, tolerance=1e-7)
    assert found.lower - 1e-12 <= 0.32 <= found.upper + 1e-12
    assert abs(found.gradient[0] + 0.8) <= found.gradient_error <= 1e-3
    # At 0 the envelope has no gradient, which the error says.
    tie = moreau_envelope(two_basins, [0.0], 1.0, lipschitz=1.0, tolerance=1e-7)
    assert tie.upper == pytest.approx(0.5)
    assert tie.gradient_error >= 1.99


@pytest.mark.parametrize("dim", [1, 3, 10])
def test_convex_losses(dim):
    # Separable: each coordinate of the envelope of ||y||_1 is that of |y|.
    x = np.random.default_rng(dim).uniform(-1, 1, dim)
    smoothing = 0.4
    parts = np.where(np.abs(x) < 0.4, x**2 / 0.8, np.abs(x) - 0.2)
    found = lasry_lions(absolute, x, smoothing, weak_convexity=0.0)
    assert found.gap <= 1e-8
    assert found.lower - 1e-12 <= parts.sum() <= found.upper + 1e-12
    error = np.linalg.norm(found.gradient - np.clip(x / 0.4, -1, 1))
    assert error <= found.gradient_error + 1e-9 <= 1e-3
    assert found.num_values <= 100


@pytest.mark.parametrize("dim", [3, 10])
def test_maximum_of_linear_functions(dim):
    # The dual of its envelope is a quadratic program over the simplex, solved exactly.
    problem = nonsmooth.max_of_linear(dim, num_pairs=2 * dim)
    z = np.zeros((1, dim))
    x = np.random.default_rng(dim).standard_normal(dim)
    half = nonsmooth.sphere(np.random.default_rng(0), 2 * dim, dim)
    pieces = np.concatenate([half, -half])
    for smoothing in (0.1, 1.0):
        weights = least_on_simplex(pieces, -(pieces @ x) / smoothing)
        v = weights @ pieces
        exact = v @ x - smoothing / 2 * v @ v
        kkt = pieces @ (x - smoothing * v)
        assert exact == pytest.approx(np.max(kkt) + smoothing / 2 * v @ v, abs=1e-9)
        found = lasry_lions_mean(
            problem.value_fn, x, (z,), smoothing, weak_convexity=0.0
        )
        assert found.gap <= 1e-8
        assert found.lower - 1e-12 <= exact <= found.upper + 1e-12
        assert np.linalg.norm(found.gradient - v) <= found.gradient_error + 1e-9
    same = moreau_envelope(
        lambda y: problem.value_fn(y, (z,))[0], x, 1.0, weak_convexity=0.0
    )
    assert same.value == pytest.approx(found.value, abs=1e-12)


# --- against grids ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "smoothing", "num", "tolerance"),
    [
        (1, 0.3, 801, 1e-8),  # 2 lambda w < 1: cutting planes
        (1, 0.6, 801, 1e-6),  # branch and bound
        pytest.param(1, 2.0, 801, 1e-6, marks=pytest.mark.slow),
        pytest.param(2, 0.15, 31, 1e-8, marks=pytest.mark.slow),
        (2, 1.0, 31, 0.02),
    ],
)
def test_weakly_convex_losses(dim, smoothing, num, tolerance):
    constants = wave_constants(dim)
    slope = constants["lipschitz"]
    easy = 2 * smoothing * constants["weak_convexity"] <= 1
    given = {"weak_convexity": constants["weak_convexity"]} if easy else constants
    error = slope * math.sqrt(dim) * smoothing * slope / (num - 1)
    for x in ([0.4, 0.1], [-1.2, 0.7], [2.0, -0.3]):
        x = np.asarray(x[:dim])
        found = lasry_lions(wave, x, smoothing, tolerance=tolerance, **given)
        assert found.gap <= tolerance
        assert np.linalg.norm(found.gradient) <= slope + found.gradient_error
        truth = searched_lasry_lions(wave, x, smoothing, slope, num)
        assert found.lower - error <= truth <= found.upper + error
        # L-Lipschitz, below h and not far below.
        assert -tolerance <= on(wave, x[None])[0] - found.value <= slope**2 * smoothing
        if dim == 2 and not easy:
            continue
        envelope = moreau_envelope(wave, x, smoothing, tolerance=tolerance, **constants)
        truth = searched_moreau(wave, x, smoothing, smoothing * slope, 3 * num)
        assert truth >= envelope.lower - 1e-12
        assert truth <= envelope.upper + error
        if easy:
            assert found.value == pytest.approx(envelope.value, abs=2 * tolerance)
        else:
            assert found.lower <= envelope.upper  # the envelope is no smaller


@pytest.mark.parametrize("dim", [2, 5, 10])
def test_phase_retrieval(dim):
    # Cutting planes need no Lipschitz constant. The minimiser's optimality is checked by
    # its own: a step of the gradient back from x must not be improved upon nearby.
    rng = np.random.default_rng(dim)
    a = rng.standard_normal((dim + 2, dim)) / math.sqrt(dim)

    def loss(y):
        return jnp.mean(jnp.abs((a @ y) ** 2 - 1))

    weak = 2 * np.linalg.norm(a.T @ a, 2) / len(a)
    smoothing = 0.4 / weak
    x = rng.standard_normal(dim)
    found = lasry_lions(loss, x, smoothing, weak_convexity=weak)
    assert found.gap <= 1e-8 and found.gradient_error <= 1e-3
    y = x - smoothing * found.gradient
    around = y + rng.standard_normal((4000, dim)) * rng.choice(
        [1e-4, 1e-2, 1], (4000, 1)
    )
    totals = on(loss, around) + np.sum((around - x) ** 2, axis=1) / (2 * smoothing)
    assert totals.min() >= found.lower
    assert found.num_values <= 60 * dim


def test_values_alone_in_two_dimensions():
    slope, smoothing = 1.0, 0.5
    for x in (np.array([0.1, 0.1]), np.array([0.5, -0.4])):
        found = lasry_lions(
            tilted_basins, x, smoothing, lipschitz=slope, tolerance=1e-3
        )
        assert found.gap <= 1e-3
        truth = searched_lasry_lions(tilted_basins, x, smoothing, slope, 31)
        error = slope * math.sqrt(2) * smoothing * slope / 30
        assert found.lower - error <= truth <= found.upper + error


def test_an_exhausted_budget_says_so():
    exact = 0.25 - 0.2**2 / 2
    gaps = []
    for budget in (1, 2, 3, 10, 30, 60):
        found = lasry_lions(
            two_basins,
            [0.2],
            1.0,
            lipschitz=1.0,
            max_evaluations=budget,
            tolerance=1e-9,
        )
        assert found.num_values <= budget
        assert found.lower <= exact <= found.upper + 1e-12
        assert abs(found.gradient[0] + 0.2) <= found.gradient_error
        gaps.append(found.gap)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1 and 1e-9 < gaps[-1] < 0.01
    x = np.full(10, 0.3)
    few = lasry_lions(bowl, x, 0.4, weak_convexity=0.0, max_evaluations=6)
    shrunk = 1 + 0.4 * np.arange(1, 11)
    exact = np.sum(np.arange(1, 11) * 0.09 / shrunk) / 2
    assert few.num_values == 6 and few.gap > 1e-3
    assert few.lower <= exact <= few.upper
    error = np.linalg.norm(few.gradient - np.arange(1, 11) * 0.3 / shrunk)
    assert 1e-3 < error <= few.gradient_error
    # Ten dimensions and values alone: it ends, and pretends nothing.
    lost = lasry_lions(absolute, x, 0.4, lipschitz=math.sqrt(10), max_evaluations=2000)
    assert lost.num_values <= 2000 and lost.gap > 0.1
    assert lost.lower <= 10 * 0.09 / 0.8 <= lost.upper
    three = lasry_lions(
        absolute, x[:3], 0.4, lipschitz=math.sqrt(3), max_evaluations=20_000
    )
    assert three.lower <= 3 * 0.09 / 0.8 <= three.upper and three.gap < 0.1


# --- what the smoothing is for -----------------------------------------------------------


def test_the_smoothing_is_smooth_and_keeps_minimisers():
    smoothing = 0.5
    x = np.linspace(-2.2, 2.2, 45)
    found = [
        lasry_lions(two_basins, [t], smoothing, lipschitz=1.0, tolerance=1e-6)
        for t in x
    ]
    values = np.array([one.value for one in found])
    gradients = np.array([one.gradient[0] for one in found])
    errors = np.array([one.gradient_error for one in found])
    h = on(two_basins, x[:, None])
    assert np.all(values <= h + 1e-6) and np.all(h - values <= smoothing + 1e-6)
    assert values.min() == pytest.approx(0, abs=1e-6)  # at +-1, as h
    assert np.all(np.abs(np.abs(x[values < 1e-5]) - 1) < 1e-9)
    assert np.all(np.abs(gradients) <= 1 + errors)
    apart = np.abs(x[:, None] - x[None])
    bound = apart / smoothing + errors[:, None] + errors[None]
    assert np.all(np.abs(gradients[:, None] - gradients[None]) <= bound)
    # And no smoother: between the basins the slope falls at that rate.
    assert np.min(np.diff(gradients) / np.diff(x)) < -0.9 / smoothing
    # The gradient is that of the values.
    middle = (values[2:] - values[:-2]) / (x[2] - x[0])
    step = (x[2] - x[0]) / 2
    off = np.abs(middle - gradients[1:-1])
    assert np.all(off <= errors[1:-1] + 1e-6 / step + step / (2 * smoothing))


@pytest.mark.parametrize("dim", [1, 3])
def test_gradient_against_differences(dim):
    # In three dimensions 2 lambda w < 1: cutting planes.
    constants, smoothing = wave_constants(dim), 0.6 if dim < 3 else 0.2
    tolerance = 1e-7
    x, step = np.array([0.5, -0.2, 0.3])[:dim], 10 * tolerance**0.5
    options = {"tolerance": tolerance, **constants}
    found = lasry_lions(wave, x, smoothing, **options)
    assert found.gap <= tolerance and found.gradient_error <= 5 * tolerance**0.5
    for i, e in enumerate(step * np.eye(dim)):
        ends = [lasry_lions(wave, x + s * e, smoothing, **options) for s in (1, -1)]
        slope = (ends[0].value - ends[1].value) / (2 * step)
        slack = tolerance / step + step / (2 * smoothing)
        assert abs(slope - found.gradient[i]) <= found.gradient_error + slack


@pytest.mark.parametrize("x", [[0.0, 0.0], [0.4, -0.3], [-0.1, 0.2], [1.2, 0.8]])
def test_stationary_points_are_goldstein_stationary(x):
    # Lemma B.3: the gradient is a mean of subgradients within 3 lambda L.
    radius = 0.9
    smoothing = radius / 3
    found = lasry_lions(tilted_basins, x, smoothing, lipschitz=1.0, tolerance=1e-3)
    norm = goldstein_norm(jax.grad(tilted_basins), jnp.asarray(x), radius)
    assert norm <= np.linalg.norm(found.gradient) + found.gradient_error


# --- means over records ------------------------------------------------------------------


def distances(x, batch):
    slopes, centers = batch
    return slopes * jnp.sum(jnp.abs(x - centers[:, None]), axis=1)


@pytest.mark.parametrize("constants", [{"weak_convexity": 0.0}, {"lipschitz": 2.0}])
def test_minimisers_of_the_mean_move(constants):
    # 2 |x| and |x - 1|: 0 minimises their mean, 0.1 that of the smoothed ones.
    data = np.array([2.0, 1.0]), np.array([0.0, 1.0])
    options = {"tolerance": 1e-6, **constants}
    at_zero = lasry_lions_mean(distances, [0.0], data, 0.1, **options)
    assert at_zero.gradient[0] == pytest.approx(-0.5, abs=0.01)
    found = lasry_lions_mean(distances, [0.1], data, 0.1, **options)
    assert abs(found.gradient[0]) <= found.gradient_error <= 0.01
    exact = (0.05 + 0.9 - 0.05) / 2
    assert found.lower - 1e-12 <= exact <= found.upper + 1e-12
    assert found.gap <= 1e-6
    # Componentwise stationary at 3 lambda L, as it should be.
    gradients = jax.vmap(
        jax.grad(lambda x, r: distances(x, (r[0][None], r[1][None]))[0]),
        in_axes=(None, 0),
    )
    records = tuple(np.float32(d) for d in data)
    norm = componentwise_goldstein_norm(gradients, jnp.asarray([0.1]), records, 0.6)
    assert norm <= 1e-6


def test_records_side_by_side_are_records_one_by_one():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((12, 3))

    def value_fn(x, batch):
        (rows,) = batch
        return jnp.abs(jnp.cos(rows @ x) - 0.2)

    x, weak = np.array([0.3, 0.2, -0.5]), np.max(np.sum(a**2, axis=1))
    smoothing = 0.45 / weak
    mean = lasry_lions_mean(value_fn, x, (a,), smoothing, weak_convexity=weak)
    ones = [
        lasry_lions_mean(value_fn, x, (a[i : i + 1],), smoothing, weak_convexity=weak)
        for i in range(len(a))
    ]
    assert mean.value == pytest.approx(np.mean([o.value for o in ones]), abs=1e-9)
    np.testing.assert_allclose(
        mean.gradient, np.mean([o.gradient for o in ones], axis=0), atol=1e-6
    )
    assert mean.num_values == sum(o.num_values for o in ones)
    assert mean.gap <= 1e-8
    # The gradient is a mean of subgradients within 3 lambda L, each record's its own.
    records = jax.vmap(
        jax.grad(lambda y, row: value_fn(y, (row[None],))[0]), in_axes=(None, 0)
    )
    radius = 3 * smoothing * math.sqrt(weak)
    norm = componentwise_goldstein_norm(
        records, jnp.asarray(x), np.float32(a), radius, num_rounds=8
    )
    assert norm <= np.linalg.norm(mean.gradient) + mean.gradient_error


# --- the theorem's numbers ---------------------------------------------------------------


def test_settings():
    given = {
        "dim": 8,
        "epsilon": 0.5,
        "goldstein_radius": 0.125,
        "goldstein_norm": 0.1,
        "distance": 1.0,
    }
    found = envelopes.lasry_lions_settings(lipschitz=8.0, **given)
    assert found.smoothing == pytest.approx(0.125 / 24)
    assert found.smoothness == pytest.approx(192)
    # R^(1/3) L d^(2/3) / (eps alpha^(1/3) beta) = 8 x 4 x 2 / 0.05, and L sqrt(d) / 0.05.
    assert found.num_examples == pytest.approx(1280 + 160 * math.sqrt(8))
    # In other units of the loss the same records suffice.
    given["goldstein_norm"] = 0.8
    other = envelopes.lasry_lions_settings(lipschitz=64.0, **given)
    assert other.num_examples == pytest.approx(found.num_examples)
    for name in ("epsilon", "goldstein_radius", "goldstein_norm", "distance", "dim"):
        with pytest.raises(ValueError, match=name):
            envelopes.lasry_lions_settings(lipschitz=1.0, **{**given, name: 0})


# --- bounds on boxes ---------------------------------------------------------------------


def test_bounds_on_boxes_hold_for_the_steepest_cone():
    # h - h(c) >= -L ||t|| is attained by a cone: the bound lies below it, and meets it
    # where a corner is the worst point.
    rng = np.random.default_rng(1)
    offsets, halves = rng.standard_normal((50, 2)), rng.uniform(0.1, 1, (50, 2))
    offsets[:5] = 0
    for width, slope in ((0.1, 1.0), (2.0, 1.0), (0.5, 3.0)):
        found = envelopes._least_on_boxes(offsets, halves, width, slope)
        t = grid(np.zeros(2), 1, 101)[None] * halves[:, None]
        cone = -slope * np.linalg.norm(t, axis=2)
        totals = cone + np.sum((offsets[:, None] + t) ** 2, axis=2) / (2 * width)
        assert np.all(found <= totals.min(axis=1) + 1e-12)
        assert np.any(found >= totals.min(axis=1) - 1e-9)


# --- refusals ----------------------------------------------------------------------------

X = np.zeros(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lasry_lions(absolute, X, 0.0, lipschitz=2), "smoothing"),
        (lambda: lasry_lions(absolute, X, 0.1), "lipschitz must be given"),
        (lambda: lasry_lions(absolute, X, 1.0, weak_convexity=0.6), "lipschitz must"),
        (lambda: moreau_envelope(absolute, X, 1.0, weak_convexity=1.0), "lipschitz"),
        (lambda: lasry_lions(absolute, X, 0.1, weak_convexity=-1.0), "weak_convexity"),
        (lambda: lasry_lions(absolute, X, 0.1, lipschitz=0.0), "lipschitz"),
        (
            lambda: lasry_lions(absolute, X, 0.1, lipschitz=2, tolerance=0.0),
            "tolerance",
        ),
        (
            lambda: lasry_lions(absolute, X, 0.1, lipschitz=2, max_evaluations=0),
            "max_evaluations",
        ),
        (
            lambda: lasry_lions(absolute, np.zeros(11), 0.1, weak_convexity=0.0),
            "x must",
        ),
        (lambda: lasry_lions(absolute, 0.0, 0.1, weak_convexity=0.0), "x must be"),
        (lambda: lasry_lions(absolute, [np.nan], 0.1, weak_convexity=0.0), "x must be"),
        (lambda: lasry_lions(jnp.abs, X, 0.1, lipschitz=2), "value_fn must give one"),
        (
            lambda: lasry_lions(
                lambda y: absolute(y).astype(jnp.float32), X, 0.1, lipschitz=2
            ),
            "float64",
        ),
        (lambda: lasry_lions(lambda y: y[0] / 0, X, 0.1, lipschitz=2), "finite values"),
        (
            lambda: lasry_lions_mean(
                distances, [0.0], (np.ones(201), np.ones(201)), 0.1, weak_convexity=0.0
            ),
            "1 to 200 records",
        ),
        (
            lambda: lasry_lions_mean(
                distances, [0.0], (np.ones(2), np.ones(3)), 0.1, weak_convexity=0.0
            ),
            "data must be arrays",
        ),
        # Constants that the losses contradict.
        (
            lambda: lasry_lions(steep, X + 0.1, 0.1, lipschitz=1.0),
            "lipschitz must be that",
        ),
        (
            lambda: lasry_lions(phase, X + 0.1, 0.1, weak_convexity=0.1),
            "weak_convexity",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
