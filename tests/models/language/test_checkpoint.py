import json
import pathlib
import pickle
import shutil
import sys
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxdp.models.language import _files, _names, checkpoint
from jaxdp.models.language.config import OPTConfig
from jaxdp.models.language.network import LanguageModel, Prefix

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
KEY = jax.random.key(3)


def labels_of(case: str) -> int | None:
    return 3 if "classifier" in case else None


def load(folder: pathlib.Path) -> Any:
    return checkpoint.load(folder, num_labels=labels_of(folder.name))


def folder_with(
    tmp_path: pathlib.Path, case: str, tensors: dict[str, np.ndarray], **config: Any
) -> pathlib.Path:
    """A copy of a golden folder with other tensors and fields of ``config.json``."""
    folder = tmp_path / case
    folder.mkdir()
    fields = json.loads((GOLDEN / case / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")
    return folder


def tensors_of(case: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / case / "model.safetensors")


def assert_equal(one: Any, other: Any) -> None:
    """The same tree to the bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


# --- round trips -------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_what_was_loaded(case: str, tmp_path: pathlib.Path) -> None:
    config, params = load(GOLDEN / case)
    folder = tmp_path / case
    checkpoint.save(folder, config, params)
    assert sorted(f.name for f in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    again_config, again = load(folder)
    assert again_config == config
    assert_equal(again, params)

    ours, theirs = load_file(folder / "model.safetensors"), tensors_of(case)
    if case == "roberta_mlm_untied":  # transformers adds the decoder's bias alone
        theirs["lm_head.bias"] = theirs["lm_head.decoder.bias"]
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    want = json.loads((GOLDEN / case / "config.json").read_text())["architectures"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == want


@pytest.mark.parametrize("case", ["roberta_mlm_untied", "opt_classifier"])
def test_shards(case: str, tmp_path: pathlib.Path) -> None:
    config, params = load(GOLDEN / case)
    folder, limit = tmp_path / case, 2000
    checkpoint.save(folder, config, params, max_shard_bytes=limit)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 5
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    total = 0
    for shard in shards:
        arrays = load_file(shard)
        size = sum(x.nbytes for x in arrays.values())
        assert size <= limit or len(arrays) == 1
        assert all(index["weight_map"][name] == shard.name for name in arrays)
        total += size
    assert index["metadata"]["total_size"] == total
    assert_equal(load(folder)[1], params)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_become_float32(dtype: Any, tmp_path: pathlib.Path) -> None:
    tensors = {name: x.astype(dtype) for name, x in tensors_of("opt").items()}
    _, params = load(folder_with(tmp_path, "opt", tensors))
    _, full = load(GOLDEN / "opt")
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype), full)
    assert_equal(params, jax.tree.map(lambda x: x.astype(np.float32), rounded))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_16_bits_are_read_and_written_as_they_are(
    dtype: str, tmp_path: pathlib.Path
) -> None:
    """Of a checkpoint of 16 bits to the bit; one of float32 is rounded to nearest."""
    _, full = load(GOLDEN / "opt")
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), full)
    config, params = checkpoint.load(GOLDEN / "opt", dtype=dtype)
    assert_equal(params, rounded)
    checkpoint.save(tmp_path, config, params)
    stored = load_file(tmp_path / "model.safetensors")
    assert {x.dtype.name for x in stored.values()} == {dtype}
    assert_equal(checkpoint.load(tmp_path, dtype=jnp.dtype(dtype))[1], params)
    wide = jax.tree.map(lambda x: x.astype(np.float32), rounded)
    assert_equal(checkpoint.load(tmp_path)[1], wide)


def test_a_checkpoint_of_the_base_model_has_no_prefix(tmp_path: pathlib.Path) -> None:
    tensors = {n.removeprefix("model."): x for n, x in tensors_of("opt").items()}
    assert "decoder.embed_tokens.weight" in tensors
    _, params = load(folder_with(tmp_path, "opt", tensors))
    assert_equal(params, load(GOLDEN / "opt")[1])

    case = "roberta_classifier"
    tensors = {n.removeprefix("roberta."): x for n, x in tensors_of(case).items()}
    assert "embeddings.LayerNorm.bias" in tensors
    _, params = load(folder_with(tmp_path, case, tensors))
    assert_equal(params, load(GOLDEN / case)[1])


def test_loading_holds_no_second_copy(tmp_path: pathlib.Path) -> None:
    config = OPTConfig(
        vocab_size=50,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=30,
        ffn_dim=256,
    )
    shapes = jax.eval_shape(LanguageModel(config=config).init, KEY)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    checkpoint.save(tmp_path, config, params)
    leaf = 8 * 256 * 256 * 4  # the largest; there are six
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert size > 6 * leaf
    tracemalloc.start()  # NumPy's memory: arrays of JAX are not counted
    try:
        checkpoint.load(tmp_path)
        checkpoint.save(tmp_path / "again", config, params, max_shard_bytes=leaf)
        peak = tracemalloc.get_traced_memory()[1]
        checkpoint.load(tmp_path, dtype="bfloat16")  # Its programs are kept.
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        checkpoint.load(tmp_path, dtype="bfloat16")
        half = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert leaf < peak < 3 * leaf
    assert leaf / 8 < half < leaf / 2  # A few layers; less than one leaf of 16 bits.


# --- tensors that do not fit -------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_that_does_not_fit_is_named(
    case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "_SHOWN", 1000)
    tensors = tensors_of(case)
    names = sorted(tensors.keys() - {"lm_head.bias"})  # untied: the decoder's counts
    gone, misshapen = names[::2], names[1::2]
    tensors = {name: tensors[name][None] for name in misshapen}
    tensors |= {f"{name}_": np.zeros(2, np.float32) for name in gone}
    with pytest.raises(ValueError) as caught:
        load(folder_with(tmp_path, case, tensors))
    missing, wrong, unexpected = str(caught.value).split("; ")[1:]
    assert missing.startswith("missing: ") and unexpected.startswith("unexpected: ")
    assert set(names) & set(missing[9:].split(", ")) == set(gone)
    for name in misshapen:
        shape = tensors[name].shape
        assert f"{name} has {shape}, must have {shape[1:]}" in wrong
    assert sorted(unexpected[12:].split(", ")) == [f"{name}_" for name in gone]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("roberta_mlm", "lm_head.bias"),
        ("roberta_mlm", "roberta.encoder.layer.1.attention.self.value.weight"),
        ("opt_untied", "lm_head.weight"),
        ("opt_post_norm", "model.decoder.project_out.weight"),
    ],
)
def test_one_tensor_is_missing(case: str, name: str, tmp_path: pathlib.Path) -> None:
    tensors = tensors_of(case)
    del tensors[name]
    with pytest.raises(ValueError, match=f"missing: {name}$"):
        load(folder_with(tmp_path, case, tensors))


def test_a_long_list_is_cut(tmp_path: pathlib.Path) -> None:
    folder = folder_with(tmp_path, "opt", {"x": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="and 30 more; unexpected: x"):
        load(folder)


def test_a_transposed_kernel_and_an_integer_one_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    tensors, layer = tensors_of("opt"), "model.decoder.layers.0"
    tensors[f"{layer}.fc1.weight"] = tensors[f"{layer}.fc1.weight"].T
    tensors[f"{layer}.fc2.weight"] = tensors[f"{layer}.fc2.weight"].astype(np.int8)
    with pytest.raises(ValueError) as caught:
        load(folder_with(tmp_path, "opt", tensors))
    assert f"{layer}.fc1.weight has (16, 24), must have (24, 16)" in str(caught.value)
    assert f"{layer}.fc2.weight is I8" in str(caught.value)


def test_a_model_with_more_layers_than_its_config_says(tmp_path: pathlib.Path) -> None:
    folder = folder_with(tmp_path, "opt", tensors_of("opt"), num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"unexpected: model\.decoder\.layers\.1"):
        load(folder)


def test_what_no_task_reads_is_dropped(tmp_path: pathlib.Path) -> None:
    tensors = tensors_of("roberta_mlm")
    tensors |= {
        "roberta.embeddings.position_ids": np.arange(16)[None],
        "roberta.pooler.dense.weight": np.zeros((16, 16), np.float32),
        "roberta.pooler.dense.bias": np.zeros(16, np.float32),
        "lm_head.decoder.weight": tensors["roberta.embeddings.word_embeddings.weight"],
        "lm_head.decoder.bias": tensors["lm_head.bias"],
    }
    _, params = load(folder_with(tmp_path, "roberta_mlm", tensors))
    assert_equal(params, load(GOLDEN / "roberta_mlm")[1])

    tensors = tensors_of("opt")
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"]
    _, params = load(folder_with(tmp_path, "opt", tensors))
    assert_equal(params, load(GOLDEN / "opt")[1])


@pytest.mark.parametrize(
    ("case", "copy"),
    [("opt", "lm_head.weight"), ("roberta_mlm", "lm_head.decoder.bias")],
)
def test_a_tied_copy_that_differs_is_refused(
    case: str, copy: str, tmp_path: pathlib.Path
) -> None:
    tensors = tensors_of(case)
    tensors[copy] = np.zeros((40, 16)[: 2 - copy.endswith("bias")], np.float32)
    with pytest.raises(ValueError, match=f"{copy} is not .*tie_word_embeddings"):
        load(folder_with(tmp_path, case, tensors))


# --- heads -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "first"),
    [
        ("roberta_mlm_untied", "classifier.dense.bias"),
        ("opt_untied", "score.weight"),
    ],
)
def test_a_classification_head_is_new_only_on_request(case: str, first: str) -> None:
    folder = GOLDEN / case
    with pytest.raises(ValueError, match=f"missing: {first}.*new_heads"):
        checkpoint.load(folder, num_labels=4)
    _, params = checkpoint.load(folder, num_labels=4, new_heads=KEY)
    kernel = params["classifier"]["output"]["kernel"]
    assert kernel.shape == (16, 4) and float(jnp.std(kernel)) > 1e-3
    assert "head" not in params  # which classification does not read
    _, other = checkpoint.load(folder, num_labels=4, new_heads=jax.random.key(4))
    assert not np.array_equal(other["classifier"]["output"]["kernel"], kernel)
    _, old = checkpoint.load(folder)
    del old["head"], params["classifier"]
    assert_equal(params, old)


def test_new_heads_replace_nothing(tmp_path: pathlib.Path) -> None:
    case = "roberta_classifier"
    _, params = checkpoint.load(GOLDEN / case, num_labels=3, new_heads=KEY)
    assert_equal(params, load(GOLDEN / case)[1])
    with pytest.raises(
        ValueError, match=r"out_proj\.bias has \(3,\), must have \(5,\)"
    ):
        checkpoint.load(GOLDEN / case, num_labels=5, new_heads=KEY)
    with pytest.raises(ValueError, match=r"missing: lm_head.*unexpected: classifier"):
        checkpoint.load(GOLDEN / case, new_heads=KEY)
    tensors = tensors_of(case)
    del tensors["classifier.dense.bias"]
    folder = folder_with(tmp_path, case, tensors)
    with pytest.raises(ValueError, match=r"missing: classifier\.dense\.bias"):
        checkpoint.load(folder, num_labels=3, new_heads=KEY)


# --- adapters ----------------------------------------------------------------------


def test_a_prefix_has_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    """LoRA is in test_peft.py."""
    adapter = Prefix(length=3)
    config, params = load(GOLDEN / "opt")
    model = LanguageModel(config=config, adapter=adapter)
    params = model.with_new_parts(params, KEY)
    with pytest.raises(ValueError, match=r"layers/prefix.* is unexpected"):
        checkpoint.save(tmp_path, config, params)
    assert not [*tmp_path.iterdir()]
    checkpoint.save(tmp_path, config, params, adapter=adapter)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors_of("opt").keys()
    adapters = load_file(tmp_path / "adapters.safetensors")
    assert set(adapters) == {"layers/prefix/key", "layers/prefix/value"}
    assert checkpoint.read_adapter(tmp_path) == adapter
    assert_equal(checkpoint.load(tmp_path)[1], params)

    name = min(adapters)
    with safe_open(tmp_path / "adapters.safetensors", "numpy") as file:
        metadata = file.metadata()
    adapters[name] = adapters[name][:, :1]
    save_file(adapters, tmp_path / "adapters.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=f"{name} has .*, must have"):
        checkpoint.load(tmp_path)
    save_file(adapters, tmp_path / "adapters.safetensors")
    with pytest.raises(ValueError, match="must hold a prefix or a head"):
        checkpoint.load(tmp_path)


def test_no_adapter() -> None:
    assert checkpoint.read_adapter(GOLDEN / "opt") is None


# --- saving ------------------------------------------------------------------------


def test_parameters_that_are_not_the_model_s_are_named(tmp_path: pathlib.Path) -> None:
    config, params = load(GOLDEN / "opt")
    del params["embedding"]["positions"]
    params["embedding"]["types"] = jnp.zeros((1, 16))
    params["final_norm"]["bias"] = jnp.zeros(3)
    params["final_norm"]["scale"] = jnp.ones(16, jnp.int8)
    with pytest.raises(ValueError) as caught:
        checkpoint.save(tmp_path / "new", config, params)
    for part in (
        "embedding/positions is missing",
        "embedding/types is unexpected",
        "final_norm/bias has (3,) of float32, must have (16,) of float32 or bfloat16",
        "final_norm/scale has (16,) of int8",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_new_checkpoint_replaces_all_of_the_old_one(tmp_path: pathlib.Path) -> None:
    config, params = load(GOLDEN / "opt")
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.save(tmp_path, config, params, max_shard_bytes=8000)
    assert (tmp_path / "model-00001-of-00003.safetensors").is_file()
    doubled = jax.tree.map(lambda x: 2 * x, params)
    checkpoint.save(tmp_path, config, doubled)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert_equal(checkpoint.load(tmp_path)[1], doubled)
    checkpoint.save(tmp_path, config, params, max_shard_bytes=8000)
    assert not (tmp_path / "model.safetensors").exists()  # it would be read first
    assert_equal(checkpoint.load(tmp_path)[1], params)


def test_a_save_that_fails_leaves_the_old_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, params = load(GOLDEN / "opt")
    checkpoint.save(tmp_path, config, params)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    calls = []

    def full_disk(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError("no space left on device")
        save_file(*args, **options)

    monkeypatch.setattr("safetensors.numpy.save_file", full_disk)
    doubled = jax.tree.map(lambda x: 2 * x, params)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, config, doubled, max_shard_bytes=8000)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


# --- folders -----------------------------------------------------------------------


def test_pickled_weights_are_not_read(tmp_path: pathlib.Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return pathlib.Path.touch, (tmp_path / "sprung",)

    shutil.copy(GOLDEN / "opt" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="convert them to safetensors"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt2"),
        ("activation_function", "gelu"),
        ("enable_bias", False),
        ("num_attention_heads", 3),
        ("num_attention_heads", "2"),
    ],
)
def test_a_configuration_that_is_not_supported(
    field: str, value: Any, tmp_path: pathlib.Path
) -> None:
    folder = folder_with(tmp_path, "opt", tensors_of("opt"), **{field: value})
    with pytest.raises(ValueError, match=rf"config\.json: {field}"):
        load(folder)


def test_relative_positions_are_refused(tmp_path: pathlib.Path) -> None:
    folder = folder_with(
        tmp_path, "roberta_mlm", {}, position_embedding_type="relative_key"
    )
    with pytest.raises(ValueError, match="position_embedding_type"):
        load(folder)


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        checkpoint.load(tmp_path)
    shutil.copy(GOLDEN / "opt" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        checkpoint.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="no safetensors file"):
        checkpoint.load(tmp_path)


def test_an_index_that_does_not_fit_its_shards(tmp_path: pathlib.Path) -> None:
    config, params = load(GOLDEN / "opt")
    checkpoint.save(tmp_path, config, params, max_shard_bytes=8000)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file({n: x for n, x in tensors.items() if n != name}, shard)
    with pytest.raises(ValueError, match=f"00002.*lacks tensors.*{name}"):
        checkpoint.load(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002.*does not exist"):
        checkpoint.load(tmp_path)


def test_an_index_reaches_no_files_outside_its_folder(tmp_path: pathlib.Path) -> None:
    shutil.copy(GOLDEN / "opt" / "model.safetensors", tmp_path / "m.safetensors")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(GOLDEN / "opt" / "config.json", folder)
    index = {"weight_map": dict.fromkeys(tensors_of("opt"), "../m.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint.load(folder)


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    config, params = load(GOLDEN / "opt")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxdp-optim\[lm\]'"):
        checkpoint.load(GOLDEN / "opt")
    with pytest.raises(ImportError, match=r"pip install 'jaxdp-optim\[lm\]'"):
        checkpoint.save(tmp_path, config, params)


def test_arguments(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="num_labels"):
        checkpoint.load(GOLDEN / "opt", num_labels=1)
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bf"):
        checkpoint.load(GOLDEN / "opt", dtype="int8")
    with pytest.raises(ValueError, match="max_shard_bytes"):
        checkpoint.save(tmp_path, *load(GOLDEN / "opt"), max_shard_bytes=0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_tensors_are_read_without_mapping_their_file(
    dtype: str, tmp_path: pathlib.Path
) -> None:
    """Mapped pages stay in memory beside what is made of them."""
    values = np.linspace(-2, 2, 2**22).reshape(2, -1).astype(jnp.dtype(dtype))
    save_file({"first": values[0], "w": values}, tmp_path / "model.safetensors")
    family = _names.FAMILIES["opt"]
    stored = _files.tensors(tmp_path, family)[family.full_name("w")]
    before = mapped_bytes()
    read = stored.array()
    assert mapped_bytes() - before < values.nbytes / 4
    assert read.dtype == values.dtype
    assert read.tobytes() == values.tobytes()


def mapped_bytes() -> int:
    """Bytes in memory that are pages of mapped files; 0 where nothing tells."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    found = [x for x in lines if x.startswith("RssFile")]
    return 1024 * int(found[0].split()[1]) if found else 0
