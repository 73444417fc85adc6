"""Data sets from a user's CSV or NPZ file."""

import math
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np

from jaxdp.core import validate
from jaxdp.data import schema as schema_lib
from jaxdp.data import tables
from jaxdp.data import values as values_lib
from jaxdp.data.datasets import PUBLIC_NOTE, Dataset, split_rows
from jaxdp.data.scaling import (
    Bounds,
    bound_arrays,
    center_by_bounds,
    scale_by_bounds,
)

_NUMBERED = "; name the classes with classes=, or use task='regression'"
#: So many public records say nothing of the others.
_FEW = 10


def load_file(
    path: Any,
    *,
    label: str | None = None,
    task: Literal["classification", "regression"] = "classification",
    classes: int | Sequence[str] | None = None,
    bounds: Bounds | None = None,
    label_bounds: tuple[float, float] | None = None,
    schema: Any = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    r"""Reads a CSV or NPZ file, or with a schema a table of any columns.

    Without a schema all numbers must be finite. A CSV begins with a header line; every
    column but the label is a feature. An NPZ
    holds the features as array ``x`` (records first; further axes are flattened) and
    the labels as array ``label``.

    Args:
      path: a ``.csv`` or ``.npz`` file; with a schema a text or ``.parquet`` file, or a
        frame of pandas, polars, pyarrow or ``datasets``.
      label: CSV: the label column's name. NPZ: the label array's name, ``"y"`` if None.
      task: what the label is.
      classes: the public set of classes: their number K, for labels 0 to K - 1, or
        their names in order, for labels that are names. None takes those of the held-out
        public records, and the note says so. A private record of no class is not refused,
        for that would say something of it: its features are NaN, so it counts zero.
      bounds: public (low, high) of the features, each a number or one per column, or a
        mapping from every column's name to its (low, high). Features are scaled to
        [-1, 1], values outside are clipped. None leaves features as they are.
      label_bounds: the same for a regression target.
      schema: public description of the columns, a JSON file or a mapping
        (``jaxdp.data.schema``); it says label, task, classes and bounds, too.
      test_fraction: held-out public records, in (0, 1), rounded up.
      seed: of the permutation that chooses them.

    Returns:
      The data set; the split depends on the number of records and the seed alone.

    Raises:
      ValueError: naming the argument (missing file, column or array), or the row and
        column of a cell that is no finite number, or of a public one that is no class, or
        bounds that are not low < high, or too few rows to split, or public records of
        fewer than two classes without ``classes``. What a cell holds is said in
        ``with jaxdp.models.show_values():`` only.

    Example:
      >>> import pathlib, tempfile
      >>> import jaxdp
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.csv"
      >>> _ = path.write_text("age,sick\n" + "30,0\n60,1\n" * 10)
      >>> dataset = jaxdp.models.load_file(
      ...     path, label="sick", classes=2, bounds={"age": (0, 120)}, test_fraction=0.2
      ... )
      >>> dataset.train[0].shape, sorted(set(dataset.train[0][:, 0].tolist()))
      ((16, 1), [-0.5, 0.0])
    """
    validate.one_of(("classification", "regression"), task=task)
    if schema is not None:
        given = {"label": label, "classes": classes, "bounds": bounds}
        for name, value in (given | {"label_bounds": label_bounds}).items():
            if value is not None:
                raise ValueError(f"{name} must be None with a schema, which says it")
        known = schema_lib.load(schema)
        table, task = known.table(path), known.task
        classes, label_bounds = known.classes or None, known.label_bounds
    else:
        table = tables.read(path, label)
    num_records = len(table.features)
    if num_records < 2:
        raise ValueError(
            f"path {str(path)!r} must have at least 2 rows, one to train and one to "
            f"test, got {num_records}"
        )
    if schema is None:
        x, notes = _scaled_features(table, bounds)
    else:
        x, notes = table.features, ["Features by a public schema."]
    class_names, num_classes, target_bounds = (), None, None
    kept, held_out = split_rows(num_records, test_fraction, seed, "test_fraction")
    if task == "classification":
        if label_bounds is not None:
            raise ValueError("label_bounds is for task='regression' only")
        if classes is None:
            classes = _public_classes(table, held_out)
            notes.append("The set of labels is that of the test records.")
        y, class_names, num_classes = _class_labels(table, classes, held_out)
        # The loss of such a record is NaN, and counts zero.
        x = np.where(y[:, None] < 0, np.float32(np.nan), x)
        y = np.maximum(y, 0)
    else:
        if classes is not None:
            raise ValueError("classes is for task='classification' only")
        y, target_bounds = _targets(table, label_bounds, held_out)
    _warn_if_beyond(table, held_out, bounds, label_bounds)
    return Dataset(
        name=pathlib.Path(path).stem
        if isinstance(path, str | pathlib.Path)
        else "table",
        train=(x[kept], y[kept]),
        test=(x[held_out], y[held_out]),
        task=task,
        num_classes=num_classes,
        feature_names=table.feature_names,
        class_names=class_names,
        target_bounds=target_bounds,
        note=" ".join([*notes, PUBLIC_NOTE]),
    )


def _warn_if_beyond(
    table: tables.Table,
    public: np.ndarray,
    bounds: Bounds | None,
    label_bounds: tuple[float, float] | None,
) -> None:
    """Warns of columns whose public records are mostly outside the bounds."""
    beyond = []
    if len(public) < _FEW:
        return
    if bounds is not None:
        low, high = bound_arrays(bounds, table.feature_names)
        x = table.features[public]
        share = np.mean((x < low) | (x > high), axis=0)
        beyond += [table.feature_names[j] for j in np.flatnonzero(share > 0.5)]
    if label_bounds is not None:
        y = table.labels[public].astype(np.float64)
        if np.mean((y < label_bounds[0]) | (y > label_bounds[1])) > 0.5:
            beyond.append(table.label_name)
    if beyond:
        shown = ", ".join(map(repr, beyond[:8])) + (", ..." if len(beyond) > 8 else "")
        warnings.warn(
            f"bounds leave out more than half of the held-out public records' numbers in "
            f"the columns {shown}: numbers beyond the bounds are clipped",
            stacklevel=3,
        )


def _scaled_features(
    table: tables.Table, bounds: Bounds | None
) -> tuple[np.ndarray, list[str]]:
    if bounds is None:
        return _float32(table, table.features), ["Features as they are."]
    x = center_by_bounds(table.features, *bound_arrays(bounds, table.feature_names))
    return x, ["Features scaled by the given bounds."]


def _float32(table: tables.Table, values: np.ndarray) -> np.ndarray:
    """Casts features to float32; raises for numbers that it cannot hold."""
    bad = np.argwhere(np.abs(values) > np.finfo(np.float32).max)
    if bad.size:
        i, j = bad[0]
        raise ValueError(
            f"{table.place(i)}, column {table.feature_names[j]!r} must fit in float32"
            + values_lib.got(float(values[i, j]))
        )
    return values.astype(np.float32)


def _public_classes(table: tables.Table, public: np.ndarray) -> int | tuple[str, ...]:
    """Returns the classes of the public rows: names, or a number where labels are."""
    texts = [str(table.labels[i]) for i in public]
    for i, text in zip(public, texts, strict=True):
        if not text:
            _refuse_label(table, i, "a class, and not empty", _NUMBERED)
    numbers = [tables.number(text) for text in texts]
    if not any(value is not None for value in numbers):
        classes = tuple(sorted(set(texts)))
        count = found = len(classes)
    else:
        # One typing error among numbers must not quietly become a class of its own.
        for i, value in zip(public, numbers, strict=True):
            if value is None or not (value >= 0 and value % 1 == 0):
                _refuse_label(table, i, "an integer >= 0 (a class)", _NUMBERED)
        found = len(set(numbers))
        classes = count = 1 + int(max(value or 0 for value in numbers))
    if found < 2:
        raise ValueError(
            "classes must be given where the held-out public records are not of two or "
            f"more, got {len(texts)} records of {found}: the set of classes is public, and "
            "is not read from private records"
        )
    if count > max(10, len(texts) // 2):  # Numbers or identifiers, not classes.
        raise ValueError(
            f"label {table.label_name!r} would have {count} classes with only "
            f"{len(texts)} held-out public records; give classes=, or use "
            "task='regression'"
        )
    return classes


def _class_labels(
    table: tables.Table, classes: int | Sequence[str], public: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...], int]:
    """Returns labels as classes 0 to K - 1, -1 for none, the classes' names if any, and K.

    A public row of no class is refused. A private one is not: what a run does before it
    spends anything must not depend on one record's label.
    """
    names, texts, advice = (), [str(text) for text in table.labels], _NUMBERED
    if isinstance(classes, str | float):
        raise ValueError(
            f"classes must be a number >= 2 or a sequence of names, got {classes!r}"
        )
    if isinstance(classes, int):
        validate.integer(at_least=2, classes=classes)
        found: Any = map(tables.number, texts)
        index: dict[Any, int] = {float(k): k for k in range(classes)}
        allowed = f"an integer 0 to {classes - 1} (a class)"
    else:
        names, found, advice = tuple(map(str, classes)), texts, ""
        index = {name: k for k, name in enumerate(names)}
        if len(index) != len(names) or len(names) < 2:
            raise ValueError(
                "classes must be at least two different names"
                f"{values_lib.got(list(names))}"
            )
        allowed = f"one of {', '.join(map(repr, names))}"
    y = np.array([index.get(label, -1) for label in found], np.int32)
    for i in public[y[public] < 0]:
        _refuse_label(table, i, allowed, advice)
    return y, names, len(index)


def _refuse_label(table: tables.Table, i: int, allowed: str, advice: str) -> NoReturn:
    raise ValueError(
        f"{table.place(i)}, column {table.label_name!r} must be {allowed}"
        f"{values_lib.got(str(table.labels[i]))}{advice}"
    )


def _targets(
    table: tables.Table, label_bounds: tuple[float, float] | None, public: np.ndarray
) -> tuple[np.ndarray, tuple[float, float] | None]:
    """Returns targets as float32, and the bounds that they were scaled by.

    A public row whose target is no number is refused. A private one has NaN: its loss is
    NaN, too, and counts zero.
    """
    texts = (tables.number(str(text)) for text in table.labels)
    numbers = np.array([math.nan if x is None else x for x in texts], np.float64)
    held = np.isfinite(numbers)
    if label_bounds is None:
        held &= np.abs(numbers) <= np.finfo(np.float32).max
    if (bad := public[~held[public]]).size:
        allowed = "a finite number" if label_bounds else "a finite number of float32"
        _refuse_label(table, bad[0], allowed, "")
    numbers[~held] = math.nan
    if label_bounds is None:
        return numbers.astype(np.float32), None
    try:
        (low,), (high,) = bound_arrays(label_bounds, (table.label_name,))
    except ValueError as error:
        raise ValueError(f"label_{error}") from error
    return scale_by_bounds(numbers, low, high), (float(low), float(high))
