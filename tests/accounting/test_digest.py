"""Numbers that were printed for the DPZero paper, computed again.

m is there the standard deviation of the noise on the sum over the clip C.
"""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp, ndtr

from jaxdp import accounting, sampling

DELTA = 1e-5

# --- What the authors' runs can claim ------------------------------------------------

# n, B, T; the claimed epsilon and opacus' multiplier for it, of which the code takes
# twice as std over C, so the same over 2C; then epsilon if every record is read once a
# pass (replace-one and zero-out), if batches were fresh subsets (by RDP, as it was printed;
# by PLD it is half of that), and if they were Poisson.
RUNS = [
    ((1024, 64, 10_000), 13.516, 9.08, 4.00, 4.36, 1.83),
    ((1024, 64, 10_000), 5.156, 31.7, 12.7, 13.8, 5.48),
    ((1536, 64, 10_000), 9.023, 11.65, 5.05, 4.36, 1.82),
    ((1536, 64, 10_000), 3.481, 41.5, 16.2, 13.8, 5.39),
    ((2560, 64, 10_000), 5.449, 15.97, 6.78, 4.36, 1.81),
    ((2560, 64, 10_000), 2.168, 56.9, 21.5, 13.8, 5.16),
    ((1000, 8, 20_000), 2.549, 32.8, 13.1, 4.35, 1.75),
    ((1000, 8, 20_000), 1.146, 107.0, 38.0, 13.1, 4.32),
]


@pytest.mark.parametrize(("run", "m", "swap", "zero", "subsets", "poisson"), RUNS)
def test_claims_of_the_authors_runs(run, m, swap, zero, subsets, poisson):
    """To the printed digits; m itself was printed with four."""
    n, size, steps = run
    passes = sampling.ShuffledEpochs(size).max_participations(n, steps)
    assert passes == math.ceil(steps * size / n)
    guarantees = (
        (accounting.full_batch_gaussian(m, passes, "replace_one"), swap),
        (accounting.full_batch_gaussian(2 * m, passes, "zero_out"), zero),
        (
            accounting.poisson_gaussian(
                m, steps, sampling_prob=size / n, relation="replace_one"
            ),
            poisson,
        ),
    )
    for guarantee, printed in guarantees:
        got = accounting.epsilon(*guarantee, DELTA)
        assert got == pytest.approx(printed, rel=4e-3)
    fresh = accounting.fixed_size_gaussian(
        m, steps, num_examples=n, batch_size=size, relation="replace_one"
    )
    by_rdp = RdpAccountant(neighboring_relation=fresh.event_relation)
    by_rdp = by_rdp.compose(fresh.event).get_epsilon(DELTA)
    assert by_rdp == pytest.approx(subsets, rel=4e-3)
    assert poisson < accounting.epsilon(*fresh, DELTA) < 0.56 * subsets


# --- Laplace --------------------------------------------------------------------------


def noise_of(make, epsilon: float, delta: float) -> float:
    return accounting.calibrate_noise_multiplier(make, epsilon, delta)


def test_laplace_on_full_batches():
    """11 times the Gaussian, in units of the sensitivity."""
    pure = noise_of(
        lambda m: accounting.full_batch_laplace(m, 1000, "replace_one"), 2.0, 0
    )
    assert pure == pytest.approx(707.1, abs=0.05)
    gaussian = noise_of(
        lambda m: accounting.full_batch_gaussian(m, 1000, "replace_one"), 2.0, DELTA
    )
    assert gaussian == pytest.approx(63.05, abs=5e-3)


@pytest.mark.slow  # A table of the literature.
@pytest.mark.parametrize(
    ("epsilon", "pure", "approximate", "gaussian"),
    [(2.0, 442.6, 17.46, 12.5), (6.0, 148.0, 6.55, 4.84)],
)
def test_laplace_on_poisson_samples(epsilon, pure, approximate, gaussian):
    """In units of C. PLD's grid is finer here than for the printed 17.46: 17.40."""

    def laplace(m: float) -> accounting.Guarantee:
        return accounting.poisson_laplace(
            m, 10_000, sampling_prob=1 / 16, relation="zero_out"
        )

    assert noise_of(laplace, epsilon, 0) == pytest.approx(pure, abs=0.06)
    scale = 1 / math.log1p(16 * math.expm1(epsilon / 10_000))
    assert noise_of(laplace, epsilon, 0) == pytest.approx(
        math.sqrt(2) * scale, rel=1e-9
    )
    got = noise_of(laplace, epsilon, DELTA)
    assert approximate * (1 - 5e-3) < got < approximate * (1 + 1e-3)
    assert 1.33 < got / gaussian < math.sqrt(2)


def laplace_delta(scale: float, shift: int, epsilon: float) -> float:
    """The delta of discrete Laplace noise on an integer query that moves by ``shift``."""
    far = math.ceil(60 * scale) + shift
    z = np.arange(-far, far + 1)
    log_p, log_q = -np.abs(z - shift) / scale, -np.abs(z) / scale
    p, q = np.exp(log_p), np.exp(log_q)
    normaliser = 1 / math.tanh(0.5 / scale)
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() / normaliser)


@pytest.mark.parametrize("shift", [1, 4, 256])
@pytest.mark.parametrize("over", [0.3, 1.0, 20.0])
def test_one_unit_of_scale_pays_for_being_discrete(shift: int, over: float):
    """A discrete Laplace is worse than a continuous one, though not purely so."""
    scale = over * shift
    epsilons = np.linspace(0, 1 / over, 41)
    continuous = -np.expm1((epsilons - 1 / over) / 2)
    same = np.array([laplace_delta(scale, shift, e) for e in epsilons])
    wider = np.array([laplace_delta(scale + 1, shift, e) for e in epsilons])
    assert np.any(same > continuous + 1e-9)
    assert np.all(wider <= continuous + 1e-14)
    # What the docstring says: by how much epsilon is larger.
    larger = 1 / over + 2 * math.log(math.cosh(0.5 / scale))
    bound = -np.expm1((epsilons - larger) / 2)
    assert np.all(same <= bound + 1e-13)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1), (0.2, 0.3, 0.5)])
def test_one_coordinate_is_the_worst_move_in_l1(shares: tuple[float, ...]):
    """Why a vector whose L1 norm is bounded costs what one number costs."""
    total, dx = 1.5, 1e-3
    epsilons = np.linspace(-total, total, 61)

    def losses(shift: float) -> np.ndarray:
        """The law of one coordinate's loss, on a grid from -total to total."""
        out = np.zeros(round(2 * total / dx) + 1)
        centre, last = len(out) // 2, round(shift / dx)
        out[centre + last] += 0.5
        out[centre - last] += 0.5 * math.exp(-shift)
        # Between, the loss is uniform in the place: density exp(-x) / 2 at 2x below.
        edges = np.linspace(-shift, shift, 2 * last + 1)
        mass = np.diff(np.exp((edges - shift) / 2)) / 2
        # Half of each cell to either end: losses spread, the curve can only rise.
        out[centre - last : centre + last] += mass / 2
        out[centre - last + 1 : centre + last + 1] += mass / 2
        return out

    def curve(law: np.ndarray) -> np.ndarray:
        at = (np.arange(len(law)) - len(law) // 2) * dx
        return np.array(
            [(law * -np.expm1(np.minimum(e - at, 0))).sum() for e in epsilons]
        )

    spread = losses(shares[0] * total)
    for share in shares[1:]:
        spread = np.convolve(spread, losses(share * total))
    one = curve(losses(total))
    assert one.max() > 0.5
    assert np.all(curve(spread) <= one + 1e-5)


# --- Clip tuning ----------------------------------------------------------------------


@pytest.mark.parametrize(("m1", "sigma"), [(12.5, 10.0), (3.0, 40.0)])
def test_a_sum_and_a_count_cost_one_gaussian(m1: float, sigma: float):
    """The count moves by a half where the sum moves by C: (m1^-2 + (2 sigma)^-2)^-1/2."""
    both = [dp.GaussianDpEvent(m1), dp.GaussianDpEvent(2 * sigma)]
    m = (m1**-2 + (2 * sigma) ** -2) ** -0.5
    relation = dp.NeighboringRelation.REPLACE_SPECIAL
    pair = dp.SelfComposedDpEvent(dp.ComposedDpEvent(both), 1000)
    one = dp.SelfComposedDpEvent(dp.GaussianDpEvent(m), 1000)
    got, want = (accounting.epsilon(e, relation, DELTA) for e in (pair, one))
    assert got == pytest.approx(want, rel=1e-12)
    # Sampled together; only RDP takes a sampled pair.
    sampled_pair = dp.PoissonSampledDpEvent(1 / 16, dp.ComposedDpEvent(both))
    sampled = dp.PoissonSampledDpEvent(1 / 16, dp.GaussianDpEvent(m))
    got, want = (
        RdpAccountant().compose(dp.SelfComposedDpEvent(e, 1000)).get_epsilon(DELTA)
        for e in (sampled_pair, sampled)
    )
    assert got == pytest.approx(want, rel=1e-9)


# --- Exact noise ----------------------------------------------------------------------


def log_mass(std: float, shift: int, far: int) -> np.ndarray:
    """Logarithms of a discrete Gaussian's mass on [-far, far], which holds it."""
    z = np.arange(-far, far + 1)
    log_normaliser = logsumexp(-(z**2) / (2 * std**2))
    return -((z - shift) ** 2) / (2 * std**2) - log_normaliser


@pytest.mark.parametrize("std", [0.5, 1.0, 3.0])
def test_normaliser_of_the_discrete_gaussian(std: float):
    z = np.arange(-200, 201)
    ratio = np.exp(-(z**2) / (2 * std**2)).sum() / (math.sqrt(2 * math.pi) * std)
    excess = 2 * math.exp(-2 * math.pi**2 * std**2)
    assert ratio - 1 == pytest.approx(excess, rel=0.01, abs=1e-14)


@pytest.mark.parametrize("std", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("q", [1.0, 1 / 16])
def test_renyi_divergence_is_at_most_the_continuous_one(std, shift, q):
    """Sampled too, at integer orders and in both directions."""
    orders, far = (2, 3, 8, 16), math.ceil(12 * std) + 17 * shift
    away, there = log_mass(std, 0, far), log_mass(std, shift, far)
    mixed = there
    if q < 1:
        mixed = np.logaddexp(math.log1p(-q) + away, math.log(q) + there)
    for order in orders:
        accountant = RdpAccountant([order])
        gaussian = dp.GaussianDpEvent(std / shift)
        accountant.compose(dp.PoissonSampledDpEvent(q, gaussian) if q < 1 else gaussian)
        for p, r in ((mixed, away), (away, mixed)):
            divergence = logsumexp(order * p - (order - 1) * r) / (order - 1)
            assert divergence <= accountant.rdp[0] * (1 + 1e-9) + 1e-12
    if q == 1:  # Where it is nearly attained.
        assert divergence == pytest.approx(16 * shift**2 / (2 * std**2), rel=1e-6)


@pytest.mark.parametrize("q", [1.0, 1 / 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_lattice_is_finer_than_any_accountant_sees(q: float, bits: int):
    """Exact delta of noise of 12.5 clips on a grid of 2**-bits, against the continuum.

    The losses of one step lie 1 / (12.5**2 * 2**bits) apart.
    """
    m, unit = 12.5, 2**bits
    far = 13 * math.ceil(m * unit)
    away, there = (np.exp(log_mass(m * unit, s, far)) for s in (0, unit))
    for epsilon in (0.0, 0.5 * q / m, 2 * q / m):
        p = (1 - q) * away + q * there
        exact = np.maximum(p - math.exp(epsilon) * away, 0).sum()
        # The continuous one: p exceeds beyond a point.
        root = m**2 * math.log1p(math.expm1(epsilon) / q) + 0.5
        upper = (1 - q) * ndtr(-root / m) + q * ndtr((1 - root) / m)
        continuous = upper - math.exp(epsilon) * ndtr(-root / m)
        spacing = 1 / (m**2 * unit)
        assert exact == pytest.approx(continuous, rel=20 * spacing**2 * m**2)
