"""Rows of families that are made again leave the others as they are."""

import json
from pathlib import Path

import jax
import pytest

from bench import _harness, families, lm_step
from jaxdp.models.language import num_parameters, tasks


def test_rows_are_put_in_place_of_those_of_their_name(tmp_path: Path) -> None:
    path, row = tmp_path / "kept.json", _harness.Row
    old = [row("a", "x", 1.0, ""), row("b", "x", 2.0, ""), row("b", "y", 3.0, "")]
    begun = {"commit": "then", "load_average": 0.5}
    _harness.write_json(path, _harness.document("families", old, begun))
    before, now = json.loads(path.read_text()), _harness.commit()
    families.splice(path, [row("b", "x", 5.0, ""), row("c", "x", 6.0, "GB")])
    after = json.loads(path.read_text())
    assert [x.get("commit") for x in after["rows"]] == [None, now, None, now]
    values = [(x["case"], x["metric"], x["value"]) for x in after.pop("rows")]
    assert values == [("a", "x", 1), ("b", "x", 5), ("b", "y", 3), ("c", "x", 6)]
    before.pop("rows")
    assert after == before


@pytest.mark.parametrize("name", ["OPT", "Phi-3"])
def test_lora_comes_back_from_peft_s_files(name: str) -> None:
    row = families.with_peft(name)
    assert (row.case, row.metric, row.value) == (name, "peft", 1.0)


@pytest.mark.parametrize("name", families.CASES)
def test_steps_are_timed_of_models_of_the_family_and_of_one_size(name: str) -> None:
    tiny, _ = families.load(families.GOLDEN / families.CASES[name][0])
    model = families.of_steps(name)
    assert model.config.model_type == tiny.config.model_type
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert 3.5e6 < num_parameters(params) < 5e6
    loss = tasks.prompt(model, lm_step.WORDS).value_fn
    assert jax.eval_shape(loss, params, lm_step.batch()).shape == (lm_step.BATCH,)


def test_kept_rows_are_those_of_every_family_and_large_model() -> None:
    from bench import _families_devices as devices

    kept = json.loads(Path("bench/results/cpu/families.json").read_text())["rows"]
    found = {(row["case"], row["metric"]): row["value"] for row in kept}
    for name in families.CASES:
        for metric in ("loads", "saves", "lazy", "peft"):
            assert found[name, metric] == 1.0
        assert found[name, "parity error"] < 1e-4
        assert found[name, "memory beside a forward"] < 1  # Layers of the model.
        assert found[name, "sharded"] < 1e-5
        assert (name, "step, rademacher") in found and (name, "step, sphere") in found
    for name in devices.MODELS:
        for method in devices.METHODS:
            sizes = [
                found[f"{name}, {method}", metric]
                for metric in ("parameters", "temporaries", "device memory")
            ]
            assert sizes[0] + sizes[1] <= sizes[2] < 1.01 * (sizes[0] + sizes[1])
