"""Certified settings: the digest's rows, what the promise needs, units, refusals."""

import dataclasses
import json
import math
import statistics
from typing import Any

import numpy as np
import pytest

from jaxdp import accounting, plans
from jaxdp.kernels import clip, prefix_noise, stretch
from jaxdp.mechanism.design import Design, ideal_factor
from jaxdp.sosp.hessian import HESSIANS
from jaxdp.sosp.theory import bounds, design
from tests.sosp.cases import escape_failure

SMOOTHNESS = 1 / math.sqrt(10)
#: The cosine problem of the digest.
COMMON: dict[str, Any] = {
    "num_examples": 200_000,
    "dim": 10,
    "epsilon": 2.0,
    "delta": 1e-6,
    "relation": "replace_one",
    "lipschitz": 1.0,
    "smoothness": SMOOTHNESS,
    "hessian_lipschitz": SMOOTHNESS,
}
TYPICAL: dict[str, Any] = {
    "gradient_std": 1.0,
    "difference_std": SMOOTHNESS,
    "hessian_std": SMOOTHNESS,
}


def make(**changes: Any) -> Design:
    return design.certified(**(COMMON | changes))


# --- the digest's rows ---------------------------------------------------------------

#: Its prototype's: D for 2 T / iota.
RADIUS = bounds.noise_radius(10, 0.1 / 4000)


def batches(
    mu: float,
    gamma: float,
    typical: tuple[float, float],
    constants: tuple[float, float, float] = (1.0, SMOOTHNESS, SMOOTHNESS),
    escapes: int = 1,
) -> tuple[int, int, int]:
    """b, b_H and Gamma of the prototype, by the library's formulas."""
    lipschitz, smoothness, rho = constants
    std = bounds.gradient_noise_std(gamma, RADIUS)
    b = bounds.private_batch_size(2 * lipschitz, mu, std)
    b = max(b, bounds.rounded_up(8 * (typical[0] / gamma) ** 2))
    reach, noise = bounds.escape_radius(gamma, rho), gamma / RADIUS
    steps = 1 + bounds.escape_steps(
        curvature=math.sqrt(4 * rho * gamma) / 2,
        smoothness=smoothness,
        noise_std=noise,
        radius=reach,
        failure=0.1,
    )
    moved = 2 * smoothness * reach * math.sqrt(escapes * (steps - 1))
    b_h = bounds.private_batch_size(moved, mu, noise)
    return b, max(b_h, bounds.rounded_up(8 * typical[1] ** 2 / (rho * gamma))), steps


@pytest.mark.parametrize(
    ("epsilon", "gamma", "want"),
    [
        (math.inf, 0.03, (8889, 85, 21)),
        (1, 0.05, (3712, 661, 17)),
        (1, 0.03, (8889, 953, 21)),
        (2, 0.10, (980, 205, 12)),
        (2, 0.06, (2223, 298, 15)),
        (2, 0.03, (8889, 504, 21)),
    ],
)
def test_rows_of_the_cosine_problem(
    epsilon: float, gamma: float, want: tuple[int, int, int]
) -> None:
    """Digest test 15."""
    mu = math.inf if epsilon == math.inf else accounting.gaussian_mu(epsilon, 1e-6)
    assert batches(mu, gamma, (1.0, SMOOTHNESS)) == want


def test_the_full_plan_of_a_row() -> None:
    """Digest test 15: epsilon 2, gamma 0.03, and the tracked Hessian's batch."""
    mu = accounting.gaussian_mu(2, 1e-6)
    assert mu == pytest.approx(0.448335, abs=1e-6)
    std = bounds.gradient_noise_std(0.03, RADIUS)
    assert std / math.sqrt(10) == pytest.approx(4.319e-4, rel=2e-4)  # of a node
    assert 2 / (8889 * mu) == pytest.approx(5.0185e-4, rel=1e-4)
    tree = prefix_noise.make("tree", 1023)
    norms = max(tree.column_norms()) * max(tree.prefix_norms())
    assert bounds.private_rate(2, mu, std, norms) == pytest.approx(32662, rel=1e-4)
    assert bounds.escape_radius(0.03, SMOOTHNESS) == pytest.approx(0.308007, rel=1e-5)
    assert pytest.approx(3.86305e-3, rel=1e-5) == 0.03 / RADIUS
    assert batches(mu, 0.03, (1.0, SMOOTHNESS), escapes=5)[1] == 1125


def test_the_row_of_the_factorization() -> None:
    """Digest test 15, and what the worst case would cost."""
    mu = accounting.gaussian_mu(8, 1e-6)
    constants = (1.2 * (1.2**2 + 1.3), 3 * 1.2**2 + 1.3, 6 * 1.2)
    b, b_h, steps = batches(mu, 0.005, (0.1, 0.3), constants)
    # The digest's run had 125 steps, where its formula gives 187.
    assert (b, steps) == (18863, 187)
    assert b_h * math.sqrt(124 / 186) == pytest.approx(3345, abs=1)
    worst = batches(mu, 0.005, (constants[0], 0.3), constants)[0]
    assert worst == 3_459_503 and worst / 18863 == pytest.approx(183, abs=0.5)


# --- what is promised ----------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "proven": {},
    "one accuracy": {"accuracy": 0.06},
    "zeroed": {"relation": "zero_out", "prefix_noise": "tree", "max_differences": 100},
    "steep": {"trigger_factor": 1.0, "drift_limit": 3.0, "accuracy": 0.15},
    "tracked": {"hessian": "tracked"},
    "frobenius": {"hessian": "tracked", "hessian_norm": "frobenius"},
    "released": {"hessian": "released", "accuracy": 0.1},
    "units": {"lipschitz": 30.0, "smoothness": 2.0, "hessian_lipschitz": 9.0},
    "few": {"num_examples": 20_000, "num_steps": 50},
    "typical": TYPICAL,
    "typical, tracked": TYPICAL | {"hessian": "tracked"},
    "typical, released": TYPICAL | {"hessian": "released"},
}


NORMAL = statistics.NormalDist()


def bits_under(noise: float) -> int:
    """Bits of a grid beside noise of so many clips."""
    return clip.grid_bits(stretch.MAX_SLICE, noise, deviations=32)


def off_by(size: float, bits: int) -> float:
    """What rounding and the clip's margin take off a row of so many numbers, in clips."""
    return math.sqrt(size) * 2.0**-bits + 2.0**-18


@pytest.mark.parametrize("name", CASES)
def test_the_promise_follows_from_the_settings(name: str) -> None:
    """Failures of each kind, counted again from the plan's numbers alone."""
    problem = COMMON | CASES[name]
    s, p = make(**CASES[name]), make(**CASES[name]).promise
    n, gamma, total = problem["num_examples"], p.accuracy, 0.1
    g, m, rho = (problem[k] for k in ("lipschitz", "smoothness", "hessian_lipschitz"))
    slack = 1 + 1e-6
    # As many refreshes and escapes as the records allow.
    tracked = s.hessian == "tracked"
    epoch = s.refresh_batch_size + (s.hessian_batch_size if tracked else 0)
    assert p.max_refreshes >= min(s.num_steps, n // epoch)
    escapes = (n - s.refresh_batch_size) // s.hessian_batch_size
    if tracked:
        escapes = s.escapes_per_refresh * p.max_refreshes
    assert p.max_escapes >= min(s.num_steps, escapes)
    # Noise: every sum that an epoch may release.
    moved = accounting.sensitivity(s.relation, 1.0)
    kernel = prefix_noise.make(s.prefix_noise, s.max_differences)
    norms = max(kernel.column_norms()) * max(kernel.prefix_norms())
    assert p.noise_multiplier == pytest.approx(1 / accounting.gaussian_mu(2, 1e-6))
    parts = (g / s.refresh_batch_size, norms / s.difference_batch_rate)
    noise = p.noise_multiplier * moved * math.hypot(*parts)
    sums = p.max_refreshes * (s.max_differences + 1)
    radius = bounds.noise_radius(s.dim, total / 4 / sums)
    assert noise * radius <= gamma / 2 * slack
    # Sampling of gradients, by Bernstein's inequality.
    kappa, rate = s.drift_limit, s.difference_batch_rate
    if p.basis == "constants":
        variance = g**2 / s.refresh_batch_size + kappa / rate
        step = 2 * max(g / s.refresh_batch_size, 1 / rate)
        exponent = (gamma / 2) ** 2 / (2 * (variance + step * gamma / 6))
        assert 2 * math.exp(-exponent) * p.max_refreshes <= total / 4 * slack
    # Curvature, that without rounding is found.
    found, error = s.trigger_norm + gamma, math.sqrt(rho * gamma) / 2
    bad, rows = math.sqrt(rho * found), s.hessian_batch_size
    if tracked:
        assert s.hessian_difference_rate is not None
        # The clip of a change over its operator norm is at least that of a Hessian.
        assert s.hessian_difference_rate * min(m, s.hessian_clip_norm) >= rows / slack
    if p.basis == "deviations" and s.hessian != "released":
        error *= 2
    if p.basis == "deviations":
        assert rows >= 8 * (m / error) ** 2 / slack
    elif tracked:
        h_rate = s.hessian_difference_rate or 0
        variance = m**2 / rows + rho * kappa / m / h_rate
        step = 2 * max(m / rows, 1 / h_rate)
        exponent = error**2 / (2 * (variance + step * error / 3))
        assert s.dim * math.exp(-exponent) * p.max_refreshes <= total / 4 * slack
    else:
        fails = math.exp(-rows * error**2 / (2 * m**2))
        assert fails * p.max_escapes <= total / 4 * slack
    move = p.noise_multiplier * moved * s.hessian_clip_norm / rows
    if s.hessian == "released":
        assert s.curvature_threshold is not None and s.escape_steps == 1
        far = (bad - error - s.curvature_threshold) / move
        assert math.exp(-(far**2) / 2) <= p.escape_failure_probability * slack
        # Noise and sampling alone do not forbid a certificate.
        assert move * (math.sqrt(2 * s.dim) + far) + error <= (
            s.curvature_threshold * slack
        )
    else:
        fails = escape_failure(
            s.escape_steps,
            curvature=bad - error,
            smoothness=m,
            noise_std=s.escape_noise_std,
            radius=s.escape_radius,
        )
        # Of rounding: the records' 16 bits, and the grid of the sum.
        if not tracked:
            longest = s.hessian_clip_norm * s.escape_radius
            bits = bits_under(s.escape_noise_std * rows / longest)
            off = (off_by(s.dim, 16) + math.sqrt(s.dim) * 2.0**-bits / rows) * longest
            off *= math.sqrt(s.escape_steps - 1) / s.escape_noise_std
            fails = NORMAL.cdf(NORMAL.inv_cdf(fails) + off)
        assert fails <= p.escape_failure_probability * slack
        products = math.sqrt(s.escapes_per_refresh * (s.escape_steps - 1))
        assert move * s.escape_radius * products <= s.escape_noise_std * slack
    assert p.failure_probability == pytest.approx(total)
    assert p.escape_failure_probability * p.max_escapes <= total / 4 * slack
    # And so: where an escape begins, gradients are at most alpha, rounded as they are.
    noise, longest = p.noise_multiplier * moved, max(kernel.column_norms())
    bits = bits_under(noise), bits_under(noise * longest * kernel.largest_norm())
    off = off_by(s.dim, bits[0]) * g
    off += off_by(s.dim, bits[1]) * (kappa + s.max_differences / rate)
    assert p.alpha >= (found + off) / slack
    # So are matrices.
    off = 0.0
    if s.hessian == "released":
        off = off_by(s.dim * (s.dim + 1) / 2, bits[0]) * s.hessian_clip_norm
    if tracked:
        changes = (s.hessian_difference_rate or 0) * rho * kappa / m + s.max_differences
        off = off_by(s.dim**2, 16) * s.hessian_clip_norm * min(4, 1 + changes / rows)
        off *= (
            4 if s.hessian_norm == "operator" else 1
        )  # The least power of 2 over root d.
    assert math.sqrt(rho * p.alpha) >= min(bad + off, max(m, bad)) / slack
    # Which is little in ten dimensions.
    assert p.alpha <= 1.03 * found
    assert s.l2_clip_norm == g and s.hessian_clip_norm >= m
    fields = json.loads(json.dumps(s.as_dict(), allow_nan=False))
    assert Design.read({"promise": bounds.CertifiedPoint}, **fields) == s


#: In which each number of a record's gradient can be below a unit, and the norm large.
MANY: dict[str, Any] = {
    "num_examples": 400_000,
    "dim": 4096,
    "epsilon": 50.0,
    "delta": 1e-6,
    "relation": "zero_out",
    "lipschitz": 1.0,
    "smoothness": 1.0,
    "hessian_lipschitz": 400.0,
    "accuracy": 3e-4,
    "trigger_factor": 1.0,
    "gradient_std": 0.0,
    "difference_std": 0.0,
    "hessian_std": 0.0,
}


@pytest.mark.parametrize("coarse", [False, True])
def test_alpha_covers_gradients_that_are_rounded_to_zero(coarse: bool) -> None:
    """Of all records, in a refresh and in its differences; also beside large noise."""
    given = {"epsilon": 0.004, "accuracy": 0.003, "num_examples": 2**29, "delta": 1e-10}
    plan = plans.SOSP.certified(**MANY | (given if coarse else {}))
    assert plan.theorem is not None
    lost, d = 0.0, MANY["dim"]
    clips = {
        "refresh": 1.0,
        "difference": plan.drift_limit
        + plan.max_differences / plan.difference_batch_rate,
    }
    for name, bound in clips.items():
        bits = getattr(plan.roles, name).grid.bits
        row = np.full((1, d), 0.999 * bound * 2.0**-bits, np.float32)
        assert not clip.to_grid(row, np.ones(1, bool), bound, bits).any()
        lost += float(np.linalg.norm(row))
    # An estimate of zero, up to noise and sampling, may be of a gradient of that norm.
    promise = plan.theorem.promise
    assert promise.alpha >= plan.trigger_norm + promise.accuracy + lost
    assert coarse == (plan.roles.refresh.grid.bits < 16)


def test_alpha_covers_hessians_that_are_rounded_to_zero() -> None:
    """A released one: a multiple of ones, the least eigenvalue of which is the norm."""
    plan = plans.SOSP.certified(**COMMON, hessian="released", accuracy=0.06)
    assert plan.theorem is not None
    alpha, gamma, grid = plan.theorem.promise.alpha, 0.06, plan.roles.hessian.grid
    # Of the coordinates, those off the diagonal are times the root of 2.
    entry = 0.999 * grid.l2_clip_norm * 2.0**-grid.bits / math.sqrt(2)
    hessian = np.full((10, 10), -entry)
    flat = np.where(np.eye(10), 1, math.sqrt(2)) * hessian
    rows = flat[np.triu_indices(10)][None].astype(np.float32)
    kept = clip.to_grid(rows, np.ones(1, bool), grid.l2_clip_norm, grid.bits)
    assert not kept.any()
    least = math.sqrt(SMOOTHNESS * 4 * gamma) - np.linalg.eigvalsh(hessian)[0]
    assert math.sqrt(SMOOTHNESS * alpha) >= least


@pytest.mark.parametrize("accuracy", [0.0065, None])
def test_so_many_dimensions_that_curvature_is_rounded_away(accuracy: Any) -> None:
    """Their products are below a unit wherever curvature has not grown far."""
    large = {"num_examples": 2**28, "epsilon": 8.0, "delta": 1e-9, "dim": 2**20}
    with pytest.raises(ValueError, match=r"^dim must be such that .* got 1048576"):
        make(**large, accuracy=accuracy, trigger_factor=1.0)
    # No accuracy is given: the least at which it shows.
    found = make(**large | {"dim": 4096}, trigger_factor=1.0)
    with pytest.raises(ValueError, match=r"^dim must be such that .* got 4096"):
        make(**large | {"dim": 4096}, accuracy=found.promise.accuracy / 3)


def test_the_least_accuracy_leaves_records_for_more_anchors() -> None:
    for changes in (TYPICAL, TYPICAL | {"hessian": "tracked"}, {}):
        found = make(**changes)
        used = found.promise.expected_records
        assert used is not None and 0.998 * 200_000 < 4 * used <= 200_000
        assert found.trigger_norm == found.promise.accuracy
        assert found.num_steps == 2000 + 8 * found.escape_steps
        given = {"trigger_factor": 1.0, "num_steps": found.num_steps}
        assert make(**changes, accuracy=found.promise.accuracy, **given) == found
        # With the trigger of a given accuracy, alpha would be larger.
        assert make(**changes, trigger_factor=3.0).promise.alpha > found.promise.alpha
        more = make(**changes, num_examples=400_000)
        assert more.promise.alpha < found.promise.alpha


def test_an_escapes_own_failure() -> None:
    found = make(accuracy=0.06, escape_failure_probability=1e-9).promise
    assert found.escape_failure_probability == 1e-9
    assert found.failure_probability == pytest.approx(0.075, abs=1e-6)
    many = make(accuracy=0.06, escape_failure_probability=0.1).promise
    assert many.failure_probability == 1.0
    short = make(accuracy=0.06, escape_failure_probability=0.1)
    assert short.escape_steps < make(accuracy=0.06).escape_steps


@pytest.mark.parametrize("hessian", HESSIANS)
@pytest.mark.parametrize("deviations", [False, True])
def test_units_of_length_change_no_integer(hessian: str, deviations: bool) -> None:
    """Digest test 13."""
    scales = {
        "lipschitz": 1,
        "smoothness": 2,
        "hessian_lipschitz": 3,
        "accuracy": 1,
        "gradient_std": 1,
        "difference_std": 2,
        "hessian_std": 2,
    }
    problem = COMMON | {"accuracy": 0.06, "hessian": hessian}
    problem |= TYPICAL if deviations else {}
    one = design.certified(**problem)
    for unit in (3.0, 1 / 7):
        scaled = {
            k: v * unit ** scales.get(k, 0) for k, v in problem.items() if k in scales
        }
        other = design.certified(**(problem | scaled))
        for name, was in one.items():
            if isinstance(was, int):
                assert other[name] == was, name
        promised = ("max_refreshes", "max_escapes", "expected_records")
        for name in promised:
            was = getattr(one.promise, name)
            assert getattr(other.promise, name) == pytest.approx(was, rel=1e-4), name
        a, b = one.smoothness * one.difference_batch_rate, 0.1
        other_step = 0.1 / unit * other.smoothness * other.difference_batch_rate
        assert other_step == pytest.approx(a * b)
        assert other.promise.alpha == pytest.approx(unit * one.promise.alpha)


def test_privacy_of_the_roles() -> None:
    """Digest test 11: each role's event before rounding is the whole; after, no more."""
    mu, std = accounting.gaussian_mu(2, 1e-6), 1e-3
    exact = 2 / (mu * std)
    assert accounting.gaussian_epsilon(2 / (exact * std), 1e-6) == pytest.approx(2)
    rows = bounds.private_batch_size(2, mu, std)
    assert accounting.gaussian_epsilon(2 / (rows * std), 1e-6) <= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 3}, "num_examples must be an integer >= 4"),
        ({"epsilon": 0.0}, "epsilon must be a number > 0"),
        ({"relation": "both"}, "relation must be one of"),
        ({"hessian": "dense"}, "hessian must be one of"),
        ({"hessian_norm": "trace"}, "hessian_norm must be one of"),
        ({"prefix_noise": "none"}, "prefix_noise must be one of"),
        ({"max_differences": 0}, "max_differences must be an integer >= 1"),
        ({"accuracy": -1.0}, "accuracy must be a number > 0"),
        ({"gradient_std": -1.0}, "gradient_std must be a finite number >= 0"),
        ({"escape_failure_probability": 1.0}, "escape_failure_probability must be"),
        ({"trigger_factor": 0.0}, "trigger_factor must be a number > 0"),
        ({"accuracy": 1e-3}, "accuracy must be such that a refresh and a Hessian fit"),
        ({"num_examples": 50}, "num_examples must be such that some accuracy"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make(**changes)


def test_constants_are_named_and_plain() -> None:
    """Missing or unknown ones by name; those of NumPy are Python's, as digests need."""
    some = {name: value for name, value in COMMON.items() if name != "lipschitz"}
    with pytest.raises(TypeError, match="lipschitz"):
        design.certified(**some)
    with pytest.raises(TypeError, match="steepness"):
        make(steepness=1.0)
    found = make(dim=np.int64(10), accuracy=np.float64(0.06), lipschitz=1)
    assert found == make(accuracy=0.06)
    assert type(found.dim) is int and type(found.l2_clip_norm) is float


def test_a_plan_keeps_a_design_that_it_fulfils() -> None:
    """Its noise exceeds the promise's by what the integer sampler costs, and no more."""
    budget = {"epsilon": 2.0, "delta": 1e-6}
    plan = plans.SOSP.certified(**COMMON, accuracy=0.06)
    assert plan.theorem is not None
    assert plan.noise_multiplier is not None
    promised = plan.theorem.promise.noise_multiplier
    assert (
        promised < plan.noise_multiplier <= promised * ideal_factor(plan) * (1 + 1e-6)
    )
    assert plan.calibrate(**budget).theorem == plan.theorem
    for changes in (
        {"noise_multiplier": 1.001 * promised},
        {"refresh_batch_size": 9000},
    ):
        assert dataclasses.replace(plan, **changes).theorem is None
    assert ideal_factor(dataclasses.replace(plan, delta=None)) == 1
