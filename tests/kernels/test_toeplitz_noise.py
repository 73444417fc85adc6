"""Toeplitz kernels: coefficients, the shipped numbers, and bad ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxdp.kernels import prefix_noise, threefry, toeplitz_noise

# Squared length of the first column and worst variance at equal sensitivity, as the digest
# prints them for the numbers that ship.
PRINTED = {
    2: {
        16: (1.9426, 3.779),
        64: (2.3812, 5.718),
        256: (2.8013, 8.111),
        1024: (3.1963, 11.088),
        4096: (3.5514, 14.833),
    },
    3: {
        16: (1.9438, 3.779),
        64: (2.3883, 5.707),
        256: (2.8290, 8.019),
        1024: (3.2638, 10.743),
        4096: (3.6868, 13.931),
    },
}


@pytest.mark.parametrize("num_buffers", PRINTED)
def test_printed_norms_of_the_shipped_numbers(num_buffers: int) -> None:
    for period, (first, worst) in PRINTED[num_buffers].items():
        kernel = toeplitz_noise.blt(period, num_buffers)
        columns = kernel.column_norms() ** 2
        assert columns[0] == columns.max() == pytest.approx(first, abs=2e-4)
        variance = kernel.prefix_norms() ** 2 * columns[0]
        assert variance.max() == pytest.approx(worst, abs=6e-4)


def test_one_buffer_is_at_its_optimum() -> None:
    """No small change of decay or scale lowers the worst variance."""

    def worst(kernel: toeplitz_noise.Buffered) -> float:
        return float(np.max(kernel.prefix_norms()) * np.max(kernel.column_norms()))

    for period, (decay, scale) in toeplitz_noise.BLT_NUMBERS[1].items():
        best = worst(toeplitz_noise.blt(period, 1))
        for factor in (0.99, 1.01):
            nearer_one = (1 - (1 - decay[0]) * factor,)
            for other in ((nearer_one, scale), (decay, (scale[0] * factor,))):
                assert worst(toeplitz_noise.Buffered(period, *other)) > best


def test_more_buffers_are_better_and_the_square_root_is_near() -> None:
    for period in (16, 256, 4096):
        worst = [
            float(np.max(kernel.prefix_norms()) * np.max(kernel.column_norms()))
            for kernel in (
                prefix_noise.make(name, period)
                for name in ("sqrt_toeplitz", "blt_3", "blt_2", "blt_1")
            )
        ]
        assert worst == sorted(worst)
        assert worst[1] < 1.006 * worst[0]


@pytest.mark.parametrize(
    ("period", "numbers_of"), [(1, 16), (16, 16), (17, 64), (1024, 1024), (5000, 4096)]
)
def test_numbers_for_other_periods(period: int, numbers_of: int) -> None:
    for num_buffers, table in toeplitz_noise.BLT_NUMBERS.items():
        kernel = toeplitz_noise.blt(period, num_buffers)
        assert (kernel.buf_decay, kernel.output_scale) == table[numbers_of]
        assert kernel == prefix_noise.make(f"blt_{num_buffers}", period)


@pytest.mark.parametrize("name", ["sqrt_toeplitz", "blt_1", "blt_3", "independent"])
def test_inverse_coefficients(name: str) -> None:
    """Against a dense triangular solve."""
    kernel = prefix_noise.make(name, 50)
    assert isinstance(
        kernel,
        toeplitz_noise.SquareRoot
        | toeplitz_noise.Buffered
        | toeplitz_noise.Independent,
    )
    c = scipy.linalg.toeplitz(kernel.coefficients(), np.eye(1, 50)[0])
    np.testing.assert_allclose(kernel.strategy(), c)
    inverse = scipy.linalg.solve_triangular(c, np.eye(50)[0], lower=True)
    np.testing.assert_allclose(kernel.inverse_coefficients(), inverse, atol=1e-14)


def test_square_root() -> None:
    kernel = toeplitz_noise.SquareRoot(60)
    np.testing.assert_allclose(kernel.coefficients()[:4], [1, 1 / 2, 3 / 8, 5 / 16])
    c = kernel.strategy()
    np.testing.assert_allclose(c @ c, np.tri(60), atol=60 * 2.0**-32)
    # Sums of squares as the digest prints them.
    for period, printed in ((16, 1.9439), (256, 2.8310), (4096, 3.7139)):
        first = toeplitz_noise.SquareRoot(period).column_norms()[0]
        assert first**2 == pytest.approx(printed, abs=6e-5)


@pytest.mark.parametrize("bands", [1, 2, 7, 59, 60, 100])
def test_bands(bands: int) -> None:
    """C is that of all bands, cut off; and its inverse is a dense solve."""
    kernel, whole = toeplitz_noise.SquareRoot(60, bands), toeplitz_noise.SquareRoot(60)
    lag = np.subtract.outer(np.arange(60), np.arange(60))
    cut = np.where(lag < bands, whole.strategy(), 0)
    np.testing.assert_array_equal(kernel.strategy(), cut)
    inverse = scipy.linalg.solve_triangular(cut, np.eye(60)[0], lower=True)
    np.testing.assert_allclose(kernel.inverse_coefficients(), inverse, atol=1e-14)
    assert kernel.init(jnp.zeros(3)).high.shape == (max(min(bands, 60) - 1, 1), 3)
    assert kernel.rounding() == (min(bands, 60) - 1) * 2.0**-32
    # The smallest sensitivity of all, and noise that grows with the square root of steps.
    norms = toeplitz_noise.SquareRoot(5000, bands).prefix_norms()
    assert norms[-1] <= np.sqrt(5000 / bands) * 1.2 + 2


@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_bad_bands_are_refused(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="bands must be"):
        toeplitz_noise.SquareRoot(60, bad)


@pytest.mark.parametrize("period", [1, 2, 3, 60])
def test_a_column_of_its_own(period: int) -> None:
    """The numbers in their places, cut to the period; the inverse is a dense solve."""
    column = (1.0, 0.75, 0.625, 0.0)
    kernel = toeplitz_noise.Banded(period, column)
    c = np.zeros(max(period, 4))
    c[:4] = column
    matrix = scipy.linalg.toeplitz(c[:period], np.eye(1, period)[0])
    np.testing.assert_array_equal(kernel.strategy(), matrix)
    inverse = scipy.linalg.solve_triangular(matrix, np.eye(period)[0], lower=True)
    np.testing.assert_allclose(kernel.inverse_coefficients(), inverse, atol=1e-14)
    assert kernel.bands == min(period, 4)
    assert kernel.init(jnp.zeros(3)).high.shape == (max(kernel.bands - 1, 1), 3)
    assert kernel.rounding() == (kernel.bands - 1) * 2.0**-32


def test_the_square_root_as_a_column_of_its_own() -> None:
    """The same integers under the same key."""
    root, like = toeplitz_noise.SquareRoot(6, bands=4), jnp.zeros(5)
    own = toeplitz_noise.Banded(6, tuple(root.coefficients()[:4]))
    key = threefry.secret_key(np.arange(4, dtype=np.uint32))

    def noises(kernel: Any) -> Any:
        state, found = kernel.init(like), []
        for step in range(6):
            noise, state = kernel.increment(key, state, step, like, kernel.laws(2**20))
            found.append(jax.tree.map(np.asarray, noise))
        return found

    jax.tree.map(np.testing.assert_array_equal, noises(own), noises(root))


def test_a_column_that_does_not_fall_is_refused() -> None:
    """A negative number would make of a record's worst steps others than are charged."""
    for column in (
        *((), (0.5,), (1.0, 1.5), (1.0, 0.5, 0.75), (1.0, -0.5), (1.0, 0.5, -1e-9)),
        *((float("inf"), 1.0), (1.0, float("nan")), (float("nan"), 0.5)),
    ):
        with pytest.raises(ValueError, match="column must fall from 1, with no number"):
            toeplitz_noise.Banded(8, column)


def test_a_column_is_rounded_and_the_norms_with_it() -> None:
    """To multiples of 2**-32, of which the largest below 1 takes the place of 1."""
    kernel = toeplitz_noise.Banded(5, (1.0, 1.0, 1 - 2.0**-40, 0.7))
    last = 1 - 2.0**-32
    expected = [1.0, last, last, round(0.7 * 2**32) / 2**32, 0.0]
    assert kernel.coefficients().tolist() == expected
    assert kernel._numerators().tolist()[1] == 2**32 - 1


def test_norms_are_those_of_the_rounded_numbers() -> None:
    """0.1 and 0.7 are no multiples of 2**-32; the kernel uses the nearest ones."""
    kernel = toeplitz_noise.Buffered(3, (0.7,), (0.1,))
    scale, decay = round(0.1 * 2**32) / 2**32, round(0.7 * 2**32) / 2**32
    assert kernel.coefficients()[1] == scale != 0.1
    assert kernel.coefficients()[2] == pytest.approx(scale * decay, rel=1e-15)
    assert kernel.inverse_coefficients()[1] == -scale
    root = toeplitz_noise.SquareRoot(50).coefficients()
    np.testing.assert_array_equal(root * 2**32, np.rint(root * 2**32))


def test_roundings_are_counted() -> None:
    """Of each product, as it decays; products with 0 and 1 are exact."""
    ulp = 2.0**-32
    for decay, scale, count in (
        ((0.5,), (0.25,), 2 * (1 + 0.5 + 0.25)),
        ((1.0,), (0.25,), 3),
        ((0.5,), (1.0,), 1 + 0.5 + 0.25),
        ((0.0,), (0.25,), 1),
        ((1.0, 0.0), (1.0, 0.0), 0),
    ):
        assert toeplitz_noise.Buffered(4, decay, scale).rounding() == count * ulp
    assert toeplitz_noise.SquareRoot(4).rounding() == 3 * ulp
    for name in prefix_noise.NAMES:
        assert prefix_noise.make(name, 1).rounding() == 0


def test_bad_numbers_are_refused() -> None:
    for bad in (0, 4, -1):
        with pytest.raises(ValueError, match="num_buffers must be 1, 2 or 3"):
            toeplitz_noise.blt(8, bad)
    for decay, scale in (((), ()), ((0.5,), (0.1, 0.2))):
        with pytest.raises(ValueError, match="one number for each buffer"):
            toeplitz_noise.Buffered(8, decay, scale)
    for decay in (-0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match="buf_decay must be in"):
            toeplitz_noise.Buffered(8, (decay,), (0.1,))
    for scale in (-0.1, 1.01, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"output_scale must be in \[0, 1\]"):
            toeplitz_noise.Buffered(8, (0.5,), (scale,))


def test_accelerators_subtract_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same integers, and no loop whose end a device must ask the host for."""
    kernel, like = toeplitz_noise.blt(period=5, num_buffers=2), jnp.zeros(7)
    key = threefry.secret_key(np.arange(4, dtype=np.uint32))
    laws = kernel.laws(2**20)

    def noises() -> list[Any]:
        state = jax.tree.map(lambda s: jnp.full_like(s, 12345), kernel.init(like))
        found = []
        for step in range(5):
            noise, state = kernel.increment(key, state, step, like, laws)
            found.append((noise, state))
        return jax.tree.map(np.asarray, found)

    want = noises()
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, default, **_: default(*args)
    )
    got = noises()
    jax.tree.map(np.testing.assert_array_equal, got, want)

    def one(step: jax.Array, state: Any) -> Any:
        return kernel.increment(key, state, step, like, laws)

    text = jax.jit(one).lower(jnp.int32(0), kernel.init(like)).as_text()
    assert "stablehlo.while" not in text
