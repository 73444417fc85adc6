"""``jaxdp predict``: labels of a table, by a model that ``jaxdp train`` made."""

import csv
import json
import pathlib
from typing import Any

import numpy as np

from jaxdp import models
from jaxdp.cli import options, record
from jaxdp.cli.parsing import UsageError, usage
from jaxdp.cli.printing import show
from jaxdp.cli.train import PARAMS, SCHEMA
from jaxdp.data import schema as schema_lib
from jaxdp.data import tables

PREDICTIONS = "predictions.csv"


def run(command: options.Predict) -> None:
    """Predicts every row, writes a file, and says how well if the rows are public."""
    out = command.out or command.folder / PREDICTIONS
    if out.exists() and not command.overwrite:
        raise UsageError(f"--out must be a new file, or --overwrite given: {out}")
    known, outputs_of = _model(command.folder)
    with models.show_values(command.show_values), usage(command, "--data"):
        table = known.table(command.data, labelled=command.public)
        if command.public and known.classes:
            _refuse_blank(known, table)
    outputs = np.asarray(outputs_of(table.features))
    answer: dict[str, Any] = {"rows": len(outputs), "written": str(out)}
    if known.classes:
        said = [known.classes[k] for k in outputs.argmax(axis=1)]
        if command.public:
            right = np.mean([a == b for a, b in zip(said, table.labels, strict=True)])
            answer["accuracy"] = float(right)
    else:
        low, high = known.label_bounds or (0.0, 1.0)
        numbers = low + (high - low) * outputs[:, 0].astype(np.float64)
        said = [f"{x:.6g}" for x in numbers]
        if command.public:
            with usage(command, "--data"):
                wanted = table.labels.astype(np.float64)
            error = np.sqrt(np.mean((numbers - wanted) ** 2))
            answer["root mean squared error"] = float(error)
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[known.label], *([x] for x in said)])
    except OSError as error:
        raise UsageError(f"--out must be one that can be written: {error}") from error
    if command.json:
        print(json.dumps(answer))
    else:
        show(answer)


def _refuse_blank(known: schema_lib.Schema, table: tables.Table) -> None:
    """Refuses public rows without a label: their errors cannot be counted."""
    for i, text in enumerate(table.labels):
        if text in known.missing and text not in known.classes:
            raise ValueError(
                f"{table.place(i)}, column {known.label!r} must not be empty"
            )


def _model(folder: pathlib.Path) -> tuple[schema_lib.Schema, Any]:
    """Returns the schema of a run, and the outputs of its model as a function of rows."""
    given = record.said(record.read(folder, "FOLDER"), options.Train) or {}
    if not (folder / SCHEMA).is_file():
        raise UsageError(
            f"FOLDER must be of a run with --schema, got {str(folder)!r}, which has no "
            f"{SCHEMA}"
        )
    try:
        known = schema_lib.load(folder / SCHEMA)
        with np.load(folder / PARAMS) as file:
            arrays = {name: file[name] for name in file}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"FOLDER must hold a finished run's {PARAMS}: {error}"
        ) from error
    params: dict[str, Any] = {}
    for path, array in arrays.items():
        *above, last = path.split("/")
        inner = params
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = array
    widths = tuple(layer["bias"].shape[-1] for layer in params.values())[:-1]
    x = np.zeros((1, len(known.feature_names)), np.float32)
    one = x, np.zeros(1, np.int32 if known.classes else np.float32)
    dataset = models.Dataset(
        name="table",
        train=one,
        test=one,
        task=known.task,
        num_classes=len(known.classes) or None,
    )
    options_of = {"hidden": widths} if widths else {}
    model = given.get("model", "linear")
    network = models.network_for(dataset, model, loss=given.get("loss"), **options_of)
    return known, lambda rows: network.apply(params, rows)
