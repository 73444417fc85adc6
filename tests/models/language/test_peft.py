"""LoRA in the format of `peft`: files that it wrote (golden/), and ours that it reads."""

import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdp.models.language import LanguageModel, LoRA, checkpoint, quantised

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("peft/*/adapter_config.json"))
TOLERANCE = 1e-4
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Of our `adapter_config.json`; all else is what peft takes by default.
FIELDS = ("peft_type", "r", "lora_alpha", "target_modules", "bias", "fan_in_fan_out")


def beside_its_model(case: str, folder: pathlib.Path) -> pathlib.Path:
    """A checkpoint folder with the adapter that peft wrote for it."""
    for source in (GOLDEN / case, GOLDEN / "peft" / case):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def logits(config: Any, adapter: Any, params: Any, batch: Any) -> np.ndarray:
    model = LanguageModel(config=config, adapter=adapter)

    def compute(params: Any, tokens: Any, mask: Any) -> jax.Array:
        out = model.logits(params, model.hidden(params, tokens, mask))
        return jnp.where(mask[..., None], out, 0)

    return np.asarray(jax.jit(compute)(params, batch["tokens"], batch["mask"]))


def test_all_cases_are_there() -> None:
    assert CASES == ["gemma3", "llama", "modernbert_mlm", "opt", "phi3", "roberta_mlm"]


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_peft_are_read_and_written_again(
    case: str, tmp_path: pathlib.Path
) -> None:
    """To the bit, under its names; what they compute is what it computed."""
    folder = beside_its_model(case, tmp_path / "theirs")
    adapter = checkpoint.read_adapter(folder)
    assert adapter == LoRA(rank=2, alpha=5.0)
    config, params = checkpoint.load(folder)
    with np.load(folder / "expected.npz") as expected:
        found = logits(config, adapter, params, expected)
        assert np.abs(found - expected["logits"]).max() < TOLERANCE
        without = logits(config, None, params, expected)
        assert np.abs(without - expected["logits"]).max() > 0.1

    checkpoint.save(tmp_path / "ours", config, params, adapter=adapter)
    ours, theirs = (load_file(x / WEIGHTS) for x in (tmp_path / "ours", folder))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        np.testing.assert_array_equal(ours[name], array)
    ours, theirs = (
        json.loads((x / CONFIG).read_text()) for x in (tmp_path / "ours", folder)
    )
    assert ours.keys() <= theirs.keys()
    theirs["target_modules"] = sorted(theirs["target_modules"])
    assert {n: ours[n] for n in FIELDS} == {n: theirs[n] for n in FIELDS}
    assert ours["task_type"] == ("CAUSAL_LM" if config.is_decoder else None)
    assert checkpoint.read_adapter(tmp_path / "ours") == adapter
    # A folder that is written again without an adapter has none.
    plain = {n: x for n, x in params["layers"].items() if n != "lora"}
    checkpoint.save(tmp_path / "ours", config, params | {"layers": plain})
    assert checkpoint.read_adapter(tmp_path / "ours") is None


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"use_rslora": True}, "use_rslora must be left out or empty"),
        ({"use_dora": True}, "use_dora must be left out or empty"),
        ({"bias": "all"}, "bias must be 'none', got 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be True or False"),
        (
            {"modules_to_save": ["lm_head"]},
            "modules_to_save must be of classifier, score",
        ),
        ({"rank_pattern": {"q_proj": 1}}, "rank_pattern must be left out or empty"),
        ({"some_new_way": 3}, "some_new_way must be left out or empty, for it is not"),
        ({"r": "two"}, "rank must be an integer"),
        ({"r": 3}, r"lora_A.weight has \(2, 16\), must have \(3, 16\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_other_adapters_are_refused(
    fields: dict[str, Any], part: str, tmp_path: pathlib.Path
) -> None:
    folder = beside_its_model("opt", tmp_path)
    said = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=part):
        checkpoint.load(folder)


def test_tensors_that_are_not_the_adapter_s_are_named(tmp_path: pathlib.Path) -> None:
    folder = beside_its_model("llama", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    name = next(n for n in tensors if "v_proj.lora_A" in n)
    other = {n: x for n, x in tensors.items() if n != name}
    key = name.replace("v_proj", "k_proj")
    save_file(other | {key: tensors[name]}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        checkpoint.load(folder)
    for said in (f"{name} has no value", f"{key} has", "must have none"):
        assert said in str(caught.value)
    save_file(tensors | {name: tensors[name].astype(np.int32)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"must have tensors of F64 or F32.*I32"):
        checkpoint.load(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"{WEIGHTS} does not exist"):
        checkpoint.load(folder)


def test_a_fused_kernel_s_adapter_acts_on_queries_and_values(
    tmp_path: pathlib.Path,
) -> None:
    folder = beside_its_model("phi3", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    for name in tensors:
        if "lora_B" in name:
            tensors[name] = tensors[name] + np.float32(1)  # on keys too
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match="must act on queries by the first half"):
        checkpoint.load(folder)
    said = json.loads((folder / CONFIG).read_text()) | {"r": 3}
    (folder / CONFIG).write_text(json.dumps(said))
    with pytest.raises(ValueError, match="r must be even"):
        checkpoint.load(folder)


def moved_head(params: Any) -> Any:
    """A classification head that no base has."""
    return params | {"classifier": jax.tree.map(lambda x: x + 1, params["classifier"])}


@pytest.mark.parametrize("case", ["llama", "llama_classifier", "roberta_classifier"])
def test_an_adapter_alone_is_that_on_its_base(
    case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_labels = 3 if "classifier" in case else None
    config, params = checkpoint.load(GOLDEN / case, num_labels=num_labels)
    adapter = LoRA(rank=3)
    model = LanguageModel(config=config, adapter=adapter, num_labels=num_labels)
    params = model.with_new_parts(params, jax.random.key(0))
    params = params if num_labels is None else moved_head(params)
    small, folder = quantised(params), tmp_path / "alone"
    with pytest.raises(ValueError, match="base= writes an adapter without them"):
        checkpoint.save(folder, config, small, adapter=adapter)
    checkpoint.save(folder, config, params, adapter=adapter)
    base = str(GOLDEN / case)
    with pytest.raises(
        ValueError, match=r"base must be a folder with config\.json, got"
    ):
        checkpoint.save(folder, config, small, adapter=adapter, base=tmp_path)
    monkeypatch.chdir(GOLDEN)  # It is found from other working directories, too.
    checkpoint.save(folder, config, small, adapter=adapter, base=case)
    monkeypatch.undo()
    assert {path.name for path in folder.iterdir()} == {CONFIG, WEIGHTS}
    said = json.loads((folder / CONFIG).read_text())
    assert said["base_model_name_or_path"] == base
    head = "classifier" if "roberta" in case else "score"
    assert said["modules_to_save"] == (None if num_labels is None else [head])
    assert checkpoint.base_of(folder) == base
    assert checkpoint.read_adapter(folder) == adapter
    for kind, want in ((None, params), ("int8", small)):
        found, loaded = checkpoint.load(folder, num_labels=num_labels, quantised=kind)
        assert found == config
        jax.tree.map(np.testing.assert_array_equal, loaded, want)
    if num_labels is not None and not config.is_decoder:
        with pytest.raises(ValueError, match="missing: lm_head"):
            checkpoint.load(folder)  # The base has no head of a language model.
    if num_labels is not None:
        tensors = load_file(folder / WEIGHTS)
        name = next(n for n in tensors if f".{head}." in n)
        wrong = tensors | {name: tensors[name][:1]}
        save_file(wrong, folder / WEIGHTS)
        with pytest.raises(ValueError, match=rf"{name} has \(1,"):
            checkpoint.load(folder, num_labels=num_labels)

    (folder / CONFIG).write_text(
        json.dumps(said | {"base_model_name_or_path": "owner/name"})
    )
    for read in (checkpoint.load, checkpoint.read_config):
        with pytest.raises(ValueError, match="must name the folder of its base model"):
            read(folder)


def test_what_is_no_adapter_is_not_saved_alone(tmp_path: pathlib.Path) -> None:
    config, params = checkpoint.load(GOLDEN / "llama")
    with pytest.raises(ValueError, match="must have an adapter or a classification"):
        checkpoint.save(tmp_path, config, params, base="llama")


# --- with peft at hand (the extra [parity]) ----------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other people's libraries
@pytest.mark.parametrize(
    "case",
    sorted({path.parent.name for path in GOLDEN.glob("*/config.json")}),
)
def test_peft_loads_what_we_save(case: str, tmp_path: pathlib.Path) -> None:
    """Onto the weights that are beside it, by peft and by transformers alone."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    num_labels = 3 if "classifier" in case else None
    config, params = checkpoint.load(GOLDEN / case, num_labels=num_labels)
    adapter = LoRA(rank=3, alpha=6.0)
    model = LanguageModel(config=config, adapter=adapter, num_labels=num_labels)
    params = model.with_new_parts(params, jax.random.key(0))
    rng, lora = np.random.default_rng(0), params["layers"]["lora"]
    for part in ("query", "value"):
        b = lora[part]["b"]
        lora[part]["b"] = jnp.asarray(rng.normal(0, 0.3, b.shape), b.dtype)
    checkpoint.save(tmp_path, config, params, adapter=adapter)
    with np.load(GOLDEN / case / "expected.npz") as expected:
        tokens, mask = expected["tokens"], expected["mask"]
    if num_labels is not None:
        ours = model.classify(params, tokens, mask)
    else:
        ours = logits(config, adapter, params, {"tokens": tokens, "mask": mask})
    name = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    kind, eager = getattr(transformers, name), {"attn_implementation": "eager"}
    base = kind.from_pretrained(GOLDEN / case, dtype="float32", **eager)
    for theirs in (
        peft.PeftModel.from_pretrained(base, tmp_path),
        kind.from_pretrained(tmp_path, dtype="float32", **eager),
    ):
        import torch  # pyright: ignore[reportMissingImports]

        given = {"input_ids": torch.from_numpy(tokens).long()}
        given["attention_mask"] = torch.from_numpy(mask).long()
        with torch.no_grad():
            out = theirs.eval()(**given).logits.float().numpy()
        out = out if num_labels else np.where(mask[..., None], out, 0)
        assert np.abs(np.asarray(ours) - out).max() < TOLERANCE

    # Without weights beside it, but with the head.
    folder = tmp_path / "alone"
    if num_labels is not None:
        params = moved_head(params)
        ours = model.classify(params, tokens, mask)
    checkpoint.save(folder, config, params, adapter=adapter, base=str(GOLDEN / case))
    base = kind.from_pretrained(GOLDEN / case, dtype="float32", **eager)
    theirs = peft.PeftModel.from_pretrained(base, folder)
    with torch.no_grad():
        out = theirs.eval()(**given).logits.float().numpy()
    out = out if num_labels else np.where(mask[..., None], out, 0)
    assert np.abs(np.asarray(ours) - out).max() < TOLERANCE
