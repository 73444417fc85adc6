"""``jaxdp schema``, ``train --schema`` and ``predict`` on a table as people have them."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdp.cli import main
from tests.test_cli import reported


def run(*words: object) -> int:
    return main([str(word) for word in words])


def made(path: Path, num: int, seed: int) -> Path:
    """Strings, blanks, dates, separated by semicolons; about four in five are plain."""
    rng = np.random.default_rng(seed)
    cities = rng.choice(["Lyon", "Nice", "Paris"], num)
    ages = rng.integers(18, 90, num)
    days = np.datetime64("2020-01-01") + rng.integers(0, 1000, num)
    score = 2.0 * (cities == "Paris") + 0.06 * (ages - 50) + rng.logistic(0, 0.5, num)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["city", "age", "since", "spent", "outcome"])
        for city, age, day, x in zip(cities, ages, days, score, strict=True):
            cells = [x if rng.random() > 0.05 else "" for x in (city, age, day)]
            writer.writerow(
                [*cells, f"{100 + 20 * x:.2f}", "buys" if x > 0.7 else "leaves"]
            )
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    made(tmp_path / "sample.csv", 150, 1)
    made(tmp_path / "new.csv", 100, 2)
    return made(tmp_path / "mine.csv", 600, 0)


# Over 10 s on a busy machine: a rehearsal of the step size and a run, each compiled.
def test_from_public_rows_to_predictions(table: Path, capsys: Any) -> None:
    home = table.parent
    schema, out = home / "schema.json", home / "run"
    words = ("schema", "--public", home / "sample.csv", "--label", "outcome")
    assert run(*words, "--out", schema) == 0
    assert "city" in capsys.readouterr().out
    assert run(*words, "--out", schema) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(*words, "--out", schema, "--overwrite", "--json") == 0
    written = json.loads(schema.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == written
    train = ("train", "--dataset", table, "--schema", schema, "--test-fraction", 0.2)
    some = ("--epsilon", 8, "--num-steps", 400, "--seed", 0, "--quiet", "--out", out)
    assert run(*train, *some) == 0
    assert (out / "schema.json").read_bytes() == schema.read_bytes()
    report = reported(out)
    assert report["num_examples"] == 480 and report["test_accuracy"] > 0.7

    assert run("predict", out, "--data", home / "new.csv", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"rows": 100, "written": str(out / "predictions.csv")}
    public = ("--public", "--json", "--overwrite")
    assert run("predict", out, "--data", home / "new.csv", *public) == 0
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    with (out / "predictions.csv").open(encoding="utf-8", newline="") as file:
        (name, *said) = (row[0] for row in csv.reader(file))
    with (home / "new.csv").open(encoding="utf-8", newline="") as file:
        wanted = [row["outcome"] for row in csv.DictReader(file, delimiter=";")]
    right = np.mean([a == b for a, b in zip(said, wanted, strict=True)])
    assert (name, accuracy) == ("outcome", pytest.approx(right))
    assert accuracy > 0.7
    with (home / "new.csv").open("a", encoding="utf-8") as file:
        file.write("Lyon;40;2020-01-01;1;\n")
    assert run("predict", out, "--data", home / "new.csv", *public) == 2
    assert "row 101 (line 102)" in capsys.readouterr().err


@pytest.mark.slow  # A second run, of another task and model.
def test_regression_in_its_own_unit(table: Path, capsys: Any) -> None:
    home = table.parent
    schema, out = home / "schema.json", home / "run"
    words = (
        "schema",
        "--public",
        home / "sample.csv",
        "--label",
        "spent",
        "--out",
        schema,
    )
    assert run(*words) == 0
    found = json.loads(schema.read_text(encoding="utf-8"))
    assert found["label"]["bounds"][1] > 150
    train = ("train", "dpgd", "--dataset", table, "--schema", schema, "--model", "mlp")
    some = (
        "--test-fraction",
        0.2,
        "--epsilon",
        8,
        "--seed",
        0,
        "--quiet",
        "--out",
        out,
    )
    assert run(*train, *some) == 0
    report = reported(out)
    made(home / "labelled.csv", 300, 5)
    capsys.readouterr()
    assert (
        run("predict", out, "--data", home / "labelled.csv", "--public", "--json") == 0
    )
    error = json.loads(capsys.readouterr().out)["root mean squared error"]
    assert error == pytest.approx(report["test_mse"] ** 0.5, rel=0.3)
    assert 5 < error < 45  # The column's deviation is about 40.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--label", "outcome"), "--label is for a run without --schema only"),
        (("--bounds", "0,1"), "--bounds is for a run without --schema only"),
        (("--classes", "2"), "--classes is for a run without --schema only"),
        (("--schema", "nowhere.json"), "--schema must be a JSON file"),
        (
            ("--dataset", "wine"),
            "--schema is for a .csv, .tsv, .parquet --dataset only",
        ),
    ],
)
def test_mistakes_of_train(words: Any, message: str, table: Path, capsys: Any) -> None:
    schema = table.parent / "schema.json"
    public = ("--public", table.parent / "sample.csv", "--label", "outcome")
    assert run("schema", *public, "--out", schema) == 0
    given = ["--dataset", table, "--schema", schema, "--test-fraction", 0.2]
    out = table.parent / "run"
    capsys.readouterr()
    assert run("train", *given, *words, "--out", out) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("jaxdp: " + message) and "\n" not in said
    assert not out.exists()


def test_a_private_cell_is_named_by_its_place(table: Path, capsys: Any) -> None:
    schema = table.parent / "schema.json"
    public = ("--public", table.parent / "sample.csv", "--label", "outcome")
    assert run("schema", *public, "--out", schema) == 0
    with table.open("a", encoding="utf-8") as file:
        file.write("Lyon;fourty;2020-01-01;1;buys\n")
    given = ("train", "--dataset", table, "--schema", schema, "--test-fraction", 0.2)
    capsys.readouterr()
    assert run(*given) == 2
    said = capsys.readouterr().err
    assert "row 601 (line 602)" in said and "'age' must be of type integer" in said
    assert "fourty" not in said
    assert run(*given, "--show-values") == 2
    assert "fourty" in capsys.readouterr().err


def test_mistakes_of_predict(tmp_path: Path, capsys: Any) -> None:
    assert run("predict", tmp_path, "--data", "x.csv") == 2
    assert capsys.readouterr().err.startswith("jaxdp: FOLDER")
    assert run("schema", "--public", tmp_path / "no.csv", "--label", "y") == 2
    assert "--public" in capsys.readouterr().err
