"""Programs that XLA is given have not grown: their operations, against those kept."""

import json
import pathlib

import jax
import pytest

from bench import operations

KEPT = json.loads(
    (
        pathlib.Path(__file__).parents[2] / "bench/results/cpu/operations.json"
    ).read_text()
)
#: What was long to compile, and a step of each other kind.
AGAIN = (
    "fit, o2nc",
    "fit, bias_reduced",
    "fit, sosp",
    "fit, dpzero-sphere-1",
    f"{operations.MODEL}, gaussian",
)
MORE = 1.02


def test_every_program_is_kept() -> None:
    assert [row["case"] for row in KEPT["rows"]] == operations.names()


@pytest.mark.parametrize("name", AGAIN)
def test_no_program_has_grown(name: str) -> None:
    if jax.__version__ != KEPT["versions"]["jax"]:
        pytest.skip("another JAX lowers to other operations")
    (kept,) = (row["value"] for row in KEPT["rows"] if row["case"] == name)
    now = operations.counted(name)
    assert now <= MORE * kept, f"{name}: from {kept} to {now} operations"
