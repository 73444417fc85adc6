"""Data sets: shapes, public scaling, determinism, and splits."""

import dataclasses
import traceback
import types
from typing import Any

import numpy as np
import pytest
import sklearn.datasets

from jaxdp import models
from jaxdp.data import datasets
from jaxdp.data.datasets import BREAST_CANCER_BOUNDS, DIABETES_BOUNDS, WINE_BOUNDS
from jaxdp.data.scaling import center_by_bounds, scale_by_bounds

REAL = ("digits", "digits_4x4", "breast_cancer", "wine", "diabetes")
QUADRATICS = ("quadratic_identity", "quadratic_inverse_sqrt", "quadratic_inverse")
SHAPES = {
    "digits": (1437, 360, 64, 10),
    "digits_4x4": (1437, 360, 16, 10),
    "breast_cancer": (455, 114, 30, 2),
    "wine": (142, 36, 13, 3),
    "diabetes": (353, 89, 10, None),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data(name):
    data = models.load(name)
    num_train, num_test, num_features, num_classes = SHAPES[name]
    assert data.num_examples == num_train
    assert data.num_features == num_features == len(data.feature_names)
    assert data.num_classes == num_classes
    for (x, y), n in ((data.train, num_train), (data.test, num_test)):
        assert x.shape == (n, num_features) and x.dtype == np.float32
        assert y.shape == (n,)
        assert y.dtype == (np.float32 if data.task == "regression" else np.int32)
        low = 0 if name.startswith("digits") else -1
        assert low <= x.min() < low + 0.25 and x.max() <= 1
    if num_classes is not None:
        assert len(data.class_names) == num_classes
        assert set(np.unique(data.train[1])) == set(range(num_classes))
    assert "public" in data.note


def test_registry_is_complete():
    assert set(models.DATASETS) == {*REAL, *QUADRATICS}


def test_digits_are_pixels_over_sixteen():
    x = np.concatenate([models.load("digits").train[0], models.load("digits").test[0]])
    assert np.all(x * 16 == np.round(x * 16))
    assert x.max() == 1


def test_pooled_digits_are_means_of_the_same_records():
    whole, pooled = models.load("digits"), models.load("digits_4x4")
    for (x, y), (means, same) in (
        (whole.train, pooled.train),
        (whole.test, pooled.test),
    ):
        np.testing.assert_array_equal(y, same)
        corner = x.reshape(-1, 8, 8)[:, 2:4, 6:8].mean(axis=(1, 2))
        np.testing.assert_allclose(means[:, 7], corner, atol=1e-6)


@pytest.mark.parametrize("name", REAL)
def test_split_partitions_the_records_and_is_fixed(name):
    first, again, other = (models.load(name, seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.train[0], again.train[0])
    assert not np.array_equal(first.train[0], other.train[0])
    rows = [np.concatenate([d.train[0], d.test[0]]) for d in (first, other)]
    np.testing.assert_array_equal(np.sort(rows[0], axis=0), np.sort(rows[1], axis=0))
    few = models.load(name, test_fraction=0.5)
    assert few.num_examples == len(rows[0]) // 2


@pytest.mark.parametrize("name", REAL)
def test_no_statistics_of_the_data(name, monkeypatch):
    """Changing one record to extreme values changes that record's features only."""
    options = {"scaled": False} if name == "diabetes" else {}
    loader = f"load_{name.removesuffix('_4x4')}"
    bunch = getattr(sklearn.datasets, loader)(**options)
    changed = np.array(bunch.data, np.float64)
    changed[7], changed[8] = 1e9, -1e9  # beyond every minimum and maximum
    before = _all_rows(models.load(name))
    monkeypatch.setattr(
        sklearn.datasets,
        loader,
        lambda **_: types.SimpleNamespace(**{**bunch, "data": changed}),
    )
    after = _all_rows(models.load(name))
    differ = np.flatnonzero((before != after).any(axis=1))
    low = 0 if name.startswith("digits") else -1
    assert len(differ) == 2
    np.testing.assert_array_equal(
        np.sort(after[differ].sum(1)), [low * after.shape[1], after.shape[1]]
    )


def _all_rows(data):
    return np.concatenate([data.train[0], data.test[0]])


@pytest.mark.parametrize(
    ("name", "bounds", "options"),
    [
        ("breast_cancer", BREAST_CANCER_BOUNDS, {}),
        ("wine", WINE_BOUNDS, {}),
        ("diabetes", DIABETES_BOUNDS, {"scaled": False}),
    ],
)
def test_bounds_are_domain_ranges_not_extremes_of_the_sample(name, bounds, options):
    bunch = getattr(sklearn.datasets, f"load_{name}")(**options)
    assert list(bounds) == [str(f) for f in bunch.feature_names]
    for (low, high), column in zip(bounds.values(), bunch.data.T, strict=True):
        if len(np.unique(column)) > 2:  # a code has its two values as its domain
            assert (low, high) != (column.min(), column.max())
        # They would be useless if they clipped or squeezed most records.
        assert np.mean((column >= low) & (column <= high)) > 0.97
        assert np.ptp(column) > 0.2 * (high - low)
        # Round: at most two significant digits.
        assert all(float(f"{end:.1e}") == end for end in (low, high))


def test_diabetes_target_can_be_given_in_its_own_unit():
    data = models.load("diabetes")
    assert data.target_bounds is not None
    low, high = data.target_bounds
    y = np.concatenate([data.train[1], data.test[1]]).astype(np.float64)
    bunch: Any = sklearn.datasets.load_diabetes(scaled=False)
    np.testing.assert_allclose(
        np.sort(low + y * (high - low)), np.sort(bunch.target), atol=1e-4
    )


@pytest.mark.parametrize("name", QUADRATICS)
def test_quadratic_records_have_the_papers_law(name):
    data = models.load(name, num_examples=20_000, dim=5, seed=3)
    (train,), (test,) = data.train, data.test
    assert train.shape == test.shape == (20_000, 5)
    assert not np.array_equal(train, test)
    # 10^5 draws of N(1, 1): mean and variance within 5.4 standard errors (1e-7 each).
    for x in (train, test):
        assert abs(x.mean() - 1) < 5.4 / 1e5**0.5
        assert abs(x.var() - 1) < 5.4 * (2 / 1e5) ** 0.5
    again = models.load(name, num_examples=20_000, dim=5, seed=3)
    np.testing.assert_array_equal(train, again.train[0])


def test_validation_split_uses_training_records_only():
    data = models.load("digits")
    split = models.validation_split(data, 0.2, seed=1)
    assert (len(split.train[0]), len(split.test[0])) == (1149, 288)
    rows = {row.tobytes() for row in data.train[0]}
    assert {row.tobytes() for row in (*split.train[0], *split.test[0])} == rows
    other = models.validation_split(data, 0.2, seed=2)
    assert not np.array_equal(split.test[0], other.test[0])
    assert "training records" in split.note
    # x and y stay together.
    lookup = {x.tobytes(): y for x, y in zip(*data.train, strict=True)}
    assert all(lookup[x.tobytes()] == y for x, y in zip(*split.test, strict=True))


def test_validation_split_of_quadratics_keeps_one_array():
    data = models.load("quadratic_inverse", num_examples=30, dim=2)
    split = models.validation_split(data, 0.1)
    assert [a.shape for a in (*split.train, *split.test)] == [(27, 2), (3, 2)]


def test_arrays_are_read_only():
    x, _ = models.load("wine").train
    with pytest.raises(ValueError, match="read-only"):
        x[0, 0] = 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnist", {}, "name must be one of 'digits', .* got 'mnist'"),
        ("digits", {"dim": 3}, "no option 'dim'; it has test_fraction, seed"),
        ("digits", {"test_fraction": 0.0}, r"test_fraction must be .*\(0, 1\)"),
        ("digits", {"test_fraction": 1.0}, r"test_fraction must be .*\(0, 1\)"),
        ("digits", {"test_fraction": 0.9999}, "too few records"),
        ("digits", {"seed": -1}, "seed must be"),
        ("quadratic_identity", {"dim": 0}, "dim must be"),
        ("quadratic_identity", {"num_examples": 0}, "num_examples must be"),
        ("quadratic_identity", {"test_fraction": 0.1}, "it has num_examples, dim, see"),
    ],
)
def test_load_refuses(name, options, message):
    with pytest.raises(ValueError, match=message):
        models.load(name, **options)


def test_dataset_checks_its_arrays():
    data = models.load("wine")
    x, y = data.train
    for train, message in [
        ((x,), "tuple of 2 arrays"),
        ((x.astype(np.float64), y), "float32"),
        ((x, y[:-1]), "shape"),
        ((x, y.astype(np.float32)), "int32"),
        ((x, y + 1), "classes 0 to 2"),
        ((x[:0], y[:0]), "n, d >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(data, train=train)
    with pytest.raises(ValueError, match="num_classes"):
        dataclasses.replace(data, num_classes=None)
    with pytest.raises(ValueError, match="task"):
        dataclasses.replace(data, task="ranking")


def test_scale_by_bounds_clips():
    x = np.array([[-1.0, 0.0, 2.0, 9.0]])
    got = scale_by_bounds(x, 0.0, 4.0)
    np.testing.assert_array_equal(got, [[0, 0, 0.5, 1]])
    assert got.dtype == np.float32
    per_column = scale_by_bounds(x[:, :2], [-2, -1], [0, 1])
    np.testing.assert_array_equal(per_column, [[0.5, 0.5]])
    np.testing.assert_array_equal(center_by_bounds(x, 0.0, 4.0), [[-1, -1, 0, 1]])


@pytest.mark.parametrize(
    "scale",
    [
        lambda x: scale_by_bounds(x, 0.0, 1.0),
        lambda x: center_by_bounds(x, 0.0, 1.0),
        models.unit_rows,
    ],
    ids=["scale", "center", "unit"],
)
@pytest.mark.parametrize(
    "x", [[[0.5, "her name"]], np.array([[1, "her name"]], object)]
)
def test_scaling_quotes_no_text(scale: Any, x: Any) -> None:
    with pytest.raises(TypeError, match="x must be an array of numbers") as error:
        scale(x)
    assert "her name" not in "".join(traceback.format_exception(error.value))


def test_fraction_is_not_rounded_up_by_floating_point():
    kept, held_out = datasets.split_rows(30, 0.1, 0, "fraction")  # 0.1 * 30 > 3
    assert (len(kept), len(held_out)) == (27, 3)
