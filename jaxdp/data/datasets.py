"""Small real data sets, synthetic quadratics and files, as plain NumPy arrays.

Features are used as they are or scaled by *given* bounds: constants of the domain,
written below or handed in by the caller, never a minimum, mean or deviation of the
records. A statistic of private records is a release that nobody charged; with public
bounds one record's features are a function of that record alone.

What is read from the data nevertheless, and therefore public by assumption, is said
in ``Dataset.note``: the number of records. The held-out ``test`` records are public:
metrics may be shown on them, and (for a file without ``classes=``) they decide the set of
labels.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from jaxdp.core import display, validate
from jaxdp.data import problems
from jaxdp.data.scaling import (
    Bounds,
    bound_arrays,
    center_by_bounds,
    scale_by_bounds,
)

Task = Literal["classification", "regression", "quadratic"]
Records = tuple[np.ndarray, ...]

PUBLIC_NOTE = "The number of records is public; the test records are public."


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Records to train on and public records to judge with.

    Attributes:
      name: what it is called.
      train: private records: a tuple of arrays with the same leading axis. ``(x, y)``
        with x of shape (n, d), float32, and y of shape (n,), int32 classes or float32
        targets; for the task ``"quadratic"`` ``(xi,)``, shape (n, d), float32.
      test: public records, the same structure.
      task: ``"classification"``, ``"regression"`` or ``"quadratic"``.
      num_classes: number of classes; None unless the task is classification.
      feature_names: one name per column of x.
      class_names: one name per class, where the source has names.
      target_bounds: for a regression target scaled to [0, 1], the bounds it was
        scaled by, so that errors can be given in the target's own unit.
      feature_bounds: the range that features were scaled to, if they were.
      note: how features were scaled, and what is taken to be public.

    Raises:
      ValueError: arrays whose lengths, ranks, types or labels do not fit.

    Example:
      >>> import jaxdp
      >>> dataset = jaxdp.models.load("wine")
      >>> dataset.num_examples, dataset.num_features, dataset.num_classes
      (142, 13, 3)
      >>> x, y = dataset.train
      >>> x.shape, y.dtype
      ((142, 13), dtype('int32'))
    """

    name: str
    train: Records
    test: Records
    task: Task
    num_classes: int | None = None
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    target_bounds: tuple[float, float] | None = None
    feature_bounds: tuple[float, float] = (-1.0, 1.0)
    note: str = ""

    def __post_init__(self):
        validate.one_of(("classification", "regression", "quadratic"), task=self.task)
        if (self.task == "classification") != (self.num_classes is not None):
            raise ValueError(
                "num_classes must be given for classification and only there, got "
                f"{self.num_classes!r} for {self.task}"
            )
        for split in ("train", "test"):
            records = getattr(self, split)
            _check_records(split, records, self)
            for array in records:
                array.setflags(write=False)  # frozen means frozen

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        """Returns names and shapes; records are not shown."""
        arrays = ("name", "train", "test")
        rows = [r for r in display.fields(self).rows if r[0] not in arrays]
        for name in arrays[1:]:
            said = "private" if name == "train" else "public"
            shown = ", ".join(map(display.shape, getattr(self, name)))
            rows.append((f"{name}, {said}", shown))
        return display.Table(f"Dataset {self.name}", rows)

    @property
    def num_examples(self) -> int:
        """Number of training records, the plan's ``num_examples``."""
        return len(self.train[0])

    @property
    def num_features(self) -> int:
        """Number of columns of x."""
        return self.train[0].shape[1]


def _check_records(split: str, records: Records, dataset: Dataset) -> None:
    wanted = 1 if dataset.task == "quadratic" else 2
    if not isinstance(records, tuple) or len(records) != wanted:
        raise ValueError(
            f"{split} must be a tuple of {wanted} arrays for task {dataset.task!r}"
        )
    x, *rest = records
    if x.ndim != 2 or x.dtype != np.float32 or 0 in x.shape:
        raise ValueError(
            f"{split}: x must be float32 of shape (n, d) with n, d >= 1, got "
            f"{x.shape} of {validate.dtype_name(x.dtype)}"
        )
    for y in rest:
        dtype = np.int32 if dataset.task == "classification" else np.float32
        if y.shape != x.shape[:1] or y.dtype != dtype:
            raise ValueError(
                f"{split}: y must be {np.dtype(dtype)} of shape {x.shape[:1]}, got "
                f"{y.shape} of {validate.dtype_name(y.dtype)}"
            )
        classes = dataset.num_classes
        if classes is not None and not (y.min() >= 0 and y.max() < classes):
            raise ValueError(f"{split}: y must be classes 0 to {classes - 1}")


# --- public bounds -----------------------------------------------------------------

DIGITS_BOUNDS = (0.0, 16.0)
"""A pixel counts the dark cells of a 4 x 4 block: 0 to 16 by construction."""

# Fine-needle images of cell nuclei. Lengths are in pixels, so that a nucleus fits in
# a disc of radius 40: perimeter up to 2 pi 40 = 250, area up to pi 40^2 = 5000. Texture
# is the deviation of a grey value. The rest are ratios.
_NUCLEUS_RANGES = MappingProxyType(
    {
        "radius": 40.0,
        "texture": 50.0,
        "perimeter": 250.0,
        "area": 5000.0,
        "smoothness": 0.25,
        "compactness": 1.0,
        "concavity": 1.0,
        "concave points": 0.3,
        "symmetry": 0.6,
        "fractal dimension": 0.2,
    }
)

BREAST_CANCER_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {f"mean {key}": (0.0, top) for key, top in _NUCLEUS_RANGES.items()}
    # A standard error of a mean over many nuclei: a tenth of the feature's range.
    | {f"{key} error": (0.0, top / 10) for key, top in _NUCLEUS_RANGES.items()}
    | {f"worst {key}": (0.0, top) for key, top in _NUCLEUS_RANGES.items()}
)
"""(low, high) of each of the 30 columns; see the ranges above."""

WINE_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "alcohol": (10.0, 16.0),  # percent by volume of a table wine
        "malic_acid": (0.0, 8.0),  # g/l
        "ash": (1.0, 4.0),  # g/l
        "alcalinity_of_ash": (10.0, 30.0),  # meq/l
        "magnesium": (50.0, 200.0),  # mg/l
        "total_phenols": (0.0, 5.0),  # g/l
        "flavanoids": (0.0, 5.0),  # g/l
        "nonflavanoid_phenols": (0.0, 1.0),  # g/l
        "proanthocyanins": (0.0, 5.0),  # g/l
        "color_intensity": (0.0, 15.0),  # absorbance
        "hue": (0.0, 2.0),  # ratio of absorbances
        "od280/od315_of_diluted_wines": (1.0, 4.0),  # ratio of absorbances
        "proline": (0.0, 2000.0),  # mg/l
    }
)
"""(low, high) of each column: usual ranges of a red table wine's analysis."""

DIABETES_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "age": (18.0, 90.0),  # years, adults
        "sex": (1.0, 2.0),  # two codes
        "bmi": (15.0, 45.0),  # kg/m^2
        "bp": (60.0, 140.0),  # mean arterial pressure, mmHg
        "s1": (100.0, 300.0),  # total cholesterol, mg/dl
        "s2": (40.0, 240.0),  # low-density lipoproteins, mg/dl
        "s3": (20.0, 100.0),  # high-density lipoproteins, mg/dl
        "s4": (1.0, 10.0),  # total over high-density cholesterol
        "s5": (3.0, 6.5),  # log of triglycerides in mg/dl: 20 to 665
        "s6": (50.0, 150.0),  # glucose, mg/dl
    }
)
"""(low, high) of each column: clinical reference ranges, rounded outwards."""

DIABETES_TARGET_BOUNDS = (0.0, 400.0)
"""Scale of the disease progression score."""


# --- splits ------------------------------------------------------------------------


def split_rows(
    num_records: int, fraction: float, seed: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows into (kept, held out), by the number of records and the seed alone.

    Args:
      num_records: n.
      fraction: held out, in (0, 1), rounded up.
      seed: of the permutation.
      name: what the caller's user calls the fraction.
    """
    checked: dict[str, Any] = {name: fraction}
    validate.probability(**checked)
    validate.integer(at_least=0, seed=seed)
    # 1e-9: 0.1 * 30 is 3.0000000000000004, which holds out 3 records, not 4.
    held_out = math.ceil(fraction * num_records - 1e-9)
    if not 0 < held_out < num_records:
        raise ValueError(
            f"{name} = {fraction} of {num_records} records holds out {held_out}: each "
            "side must have at least one; there are too few records"
        )
    order = np.random.default_rng(seed).permutation(num_records)
    # Sorted: the records keep their order, which has no influence on a full batch.
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _split(
    records: Records, fraction: float, seed: int, name: str = "test_fraction"
) -> dict[str, Any]:
    """Returns the fields ``train`` and ``test`` of a :class:`Dataset`."""
    rows = split_rows(len(records[0]), fraction, seed, name)
    splits = (tuple(array[some] for array in records) for some in rows)
    return dict(zip(("train", "test"), splits, strict=True))


def validation_split(dataset: Dataset, fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Splits the *training* records once more, to choose hyper-parameters.

    The test records of ``dataset`` are dropped, so that a choice cannot have seen
    them. Choosing on private records is itself a release that a run's epsilon does
    not contain; do it on public records, or say that you did it.

    Args:
      dataset: any data set.
      fraction: of the training records, in (0, 1), rounded up.
      seed: of the permutation; different seeds give different splits.

    Returns:
      A data set whose ``train`` and ``test`` are both training records of ``dataset``.

    Raises:
      ValueError: a fraction that leaves one side empty.

    Example:
      >>> import jaxdp
      >>> dataset = jaxdp.models.load("wine")
      >>> split = jaxdp.models.validation_split(dataset, fraction=0.25)
      >>> dataset.num_examples, split.num_examples, len(split.test[0])
      (142, 106, 36)
    """
    validate.instance(Dataset, dataset=dataset)
    return dataclasses.replace(
        dataset,
        name=f"{dataset.name}/validation-{seed}",
        **_split(dataset.train, fraction, seed, "fraction"),
        note=f"{dataset.note} Here `test` is a part of the training records.".strip(),
    )


# --- built-in data -----------------------------------------------------------------


def _sklearn(name: str, **options: Any) -> Any:
    # Imported late: scikit-learn takes longer to import than most runs of ours.
    import sklearn.datasets

    return getattr(sklearn.datasets, f"load_{name}")(**options)


def _classification(
    name: str, bounds: Bounds, note: str, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """Loads a data set of scikit-learn with its features scaled by public bounds."""
    bunch = _sklearn(name.removesuffix("_4x4"))
    x = np.asarray(bunch.data)
    names = tuple(str(feature) for feature in bunch.feature_names)
    if name == "digits_4x4":  # the digits at half the resolution
        x = x.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16)
        names = tuple(f"block_{i}_{j}" for i in range(4) for j in range(4))
    # Empty paper is 0, and most pixels are: there is nothing to center.
    pixels = bounds is DIGITS_BOUNDS
    scale = scale_by_bounds if pixels else center_by_bounds
    x = scale(x, *bound_arrays(bounds, names))
    records = x, np.asarray(bunch.target, np.int32)
    classes = tuple(str(c) for c in bunch.target_names)
    return Dataset(
        name=name,
        **_split(records, test_fraction, seed),
        task="classification",
        num_classes=len(classes),
        feature_names=names,
        class_names=classes,
        feature_bounds=(0.0 if pixels else -1.0, 1.0),
        note=f"{note} {PUBLIC_NOTE}",
    )


def diabetes(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Loads diabetes progression, 442 records of 10 features; target scaled to [0, 1].

    scikit-learn's own default is centred and scaled by statistics of all records;
    this takes the raw columns (``scaled=False``) and public bounds instead.
    """
    bunch = _sklearn("diabetes", scaled=False)
    names = tuple(str(feature) for feature in bunch.feature_names)
    records = (
        center_by_bounds(bunch.data, *bound_arrays(DIABETES_BOUNDS, names)),
        scale_by_bounds(bunch.target, *DIABETES_TARGET_BOUNDS),
    )
    return Dataset(
        name="diabetes",
        **_split(records, test_fraction, seed),
        task="regression",
        feature_names=names,
        target_bounds=DIABETES_TARGET_BOUNDS,
        note="Features scaled by DIABETES_BOUNDS, the target by "
        f"DIABETES_TARGET_BOUNDS. {PUBLIC_NOTE}",
    )


def quadratic_data(
    hessian: problems.Hessian = "identity",
    num_examples: int = 10_000,
    dim: int = 20,
    seed: int = 0,
) -> Dataset:
    """Draws records xi ~ N(1, I) of the paper's synthetic quadratics; as many to test.

    The loss of a record is ``problems.centered_quadratic(hessian, dim).value_fn``.

    Args:
      hessian: see ``problems.hessian_diagonal``; only the name depends on it.
      num_examples: training records, and test records.
      dim: coordinates.
      seed: of the NumPy generator.
    """
    validate.one_of(problems.HESSIANS, hessian=hessian)
    validate.integer(at_least=1, num_examples=num_examples, dim=dim)
    validate.integer(at_least=0, seed=seed)
    rng = np.random.default_rng(seed)
    draws = (1 + rng.standard_normal((2, num_examples, dim))).astype(np.float32)
    return Dataset(
        name=f"quadratic_{hessian}",
        train=(draws[0],),
        test=(draws[1],),
        task="quadratic",
        feature_names=tuple(f"x{j}" for j in range(dim)),
        note="Synthetic.",
    )


# Digits: 1797 images of 8 x 8 pixels. Breast cancer: 569 records of 30 features, two
# classes. Wine: 178 records of 13 features, three classes.
_CLASSIFICATION: dict[str, tuple[Bounds, str]] = {
    "digits": (DIGITS_BOUNDS, "Pixels divided by 16."),
    "digits_4x4": (DIGITS_BOUNDS, "Means of 2 x 2 pixels, divided by 16."),
    "breast_cancer": (BREAST_CANCER_BOUNDS, "Features scaled by BREAST_CANCER_BOUNDS."),
    "wine": (WINE_BOUNDS, "Features scaled by WINE_BOUNDS."),
}
DATASETS: Mapping[str, Callable[..., Dataset]] = MappingProxyType(
    {n: functools.partial(_classification, n, *x) for n, x in _CLASSIFICATION.items()}
    | {"diabetes": diabetes}
    | {
        f"quadratic_{h}": functools.partial(quadratic_data, h)
        for h in problems.HESSIANS
    }
)
"""Name -> loader. A new data set is one line here."""


def load(name: str, **options: Any) -> Dataset:
    """Loads a data set by name.

    Args:
      name: a key of ``DATASETS``. A file is read by ``load_file``.
      **options: of that data set: ``test_fraction`` and ``seed`` for the real ones;
        ``num_examples``, ``dim`` and ``seed`` for the quadratics.

    Raises:
      ValueError: an unknown name, an option that the data set does not have, or a
        value out of range.

    Example:
      >>> import jaxdp
      >>> jaxdp.models.load("digits").train[0].shape
      (1437, 64)
    """
    validate.one_of(DATASETS, name=name)
    allowed = inspect.signature(DATASETS[name]).parameters
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"data set {name!r} has no option {option!r}; it has {', '.join(allowed)}"
            )
    return DATASETS[name](**options)
