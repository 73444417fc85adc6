"""Checkpoints that are loaded onto eight devices; run by ``test_shards.py``."""

import dataclasses
import pathlib
import tracemalloc
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.models.language import (
    DecoderConfig,
    LanguageModel,
    LoRA,
    OPTConfig,
    RobertaConfig,
    _files,
    _names,
    checkpoint,
    quantised,
    shardings,
)

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "roberta": RobertaConfig(**SIZE, intermediate_size=64),
    "opt": OPTConfig(**SIZE, ffn_dim=64),
    **{
        kind: DecoderConfig(
            model_type=kind,
            **SIZE,
            num_key_value_heads=8,
            head_dim=8,
            intermediate_size=64,
            tie_word_embeddings=False,
        )
        for kind in ("llama", "qwen3", "phi3")
    },
}


def mesh(shape: tuple[int, int] = (2, 4)) -> Any:
    return jax.make_mesh(shape, ("data", "model"))


def saved(folder: Any, kind: str, **parts: Any) -> None:
    model = LanguageModel(config=CONFIGS[kind], **parts)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), shapes)
    adapter = parts.get("adapter")
    checkpoint.save(
        folder, model.config, params, adapter=adapter, max_shard_bytes=20_000
    )


def check(got: Any, want: Any) -> None:
    """Same bits, and the same parts on the same devices."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert (x.device, x.index) == (y.device, y.index)
            np.testing.assert_array_equal(np.asarray(x.data), np.asarray(y.data))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_those_of_device_put(
    kind: str, dtype: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, kind)
    config, plain = checkpoint.load(tmp_path, dtype=dtype)
    want = jax.device_put(plain, shardings(plain, mesh()))
    read, part = [], _files.Tensor.part
    stored = _files.tensors(tmp_path, _names.FAMILIES[config.model_type])
    names = {tensor: name for name, tensor in stored.items()}

    def never(*args: Any) -> Any:
        raise AssertionError("a whole tensor was read")

    def watched(tensor: Any, index: Any) -> Any:
        found = part(tensor, index)
        read.append((names[tensor], found.size, tensor.shape))
        return found

    monkeypatch.setattr(_files.Tensor, "array", never)
    monkeypatch.setattr(_files.Tensor, "part", watched)
    again, got = checkpoint.load(tmp_path, dtype=dtype, sharding=mesh())
    assert again == config
    check(got, want)
    # Each number once, in parts as large as a device's.
    sizes = {name: np.prod(shape) for name, _, shape in read}
    for name, size in sizes.items():
        parts = [count for other, count, _ in read if other == name]
        assert sum(parts) == size and len(parts) in (1, 4)
    split = [name for name, count, shape in read if 4 * count == np.prod(shape)]
    assert any(
        "mlp" in name or "fc1" in name or "intermediate" in name for name in split
    )


def test_adapters_heads_and_rules_of_the_user(tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "lora", "llama", adapter=LoRA(rank=2))
    _, plain = checkpoint.load(tmp_path / "lora")
    _, got = checkpoint.load(tmp_path / "lora", sharding=mesh())
    check(got, jax.device_put(plain, shardings(plain, mesh())))
    assert "lora" in got["layers"]
    _, small = checkpoint.load(tmp_path / "lora", quantised="int8")
    jax.tree.map(np.testing.assert_array_equal, small, quantised(plain))
    _, got = checkpoint.load(tmp_path / "lora", quantised="int8", sharding=mesh())
    check(got, jax.device_put(small, shardings(small, mesh())))

    saved(tmp_path / "plain", "opt")
    given: dict[str, Any] = {"num_labels": 3, "new_heads": jax.random.key(1)}
    asked = []

    def rules(shapes: Any) -> Any:
        """Splits last axes."""
        asked.append(shapes)

        def place(leaf: Any) -> NamedSharding:
            spec: list[Any] = [None] * len(leaf.shape)
            spec[-1] = None if leaf.shape[-1] % 8 else "model"
            return NamedSharding(of, PartitionSpec(*spec))

        return jax.tree.map(place, shapes)

    of = jax.make_mesh((8,), ("model",))
    _, plain = checkpoint.load(tmp_path / "plain", **given)
    _, got = checkpoint.load(tmp_path / "plain", **given, sharding=rules)
    outline = jax.tree.map(lambda x: (x.shape, x.dtype), plain)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), asked[0]) == outline
    check(got, jax.device_put(plain, rules(plain)))


def test_layers_on_different_devices(tmp_path: pathlib.Path) -> None:
    saved(tmp_path, "opt")
    of = jax.make_mesh((3,), ("x",), devices=jax.devices()[:3])

    def rules(shapes: Any) -> Any:
        split = lambda x: PartitionSpec("x" if x.shape[0] == 3 else None)  # noqa: E731
        return jax.tree.map(lambda x: NamedSharding(of, split(x)), shapes)

    _, plain = checkpoint.load(tmp_path)
    check(
        checkpoint.load(tmp_path, sharding=rules)[1],
        jax.device_put(plain, rules(plain)),
    )


def test_the_host_holds_a_tensor_alone(tmp_path: pathlib.Path) -> None:
    wide = dataclasses.replace(
        CONFIGS["llama"],
        hidden_size=256,
        head_dim=32,
        intermediate_size=1024,
        num_hidden_layers=12,
    )
    model = LanguageModel(config=wide)
    params = jax.jit(model.init)(jax.random.key(0))
    checkpoint.save(tmp_path, wide, params)
    tensor = 4 * 256 * 1024
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    checkpoint.load(tmp_path, sharding=mesh())  # Its programs are kept.
    tracemalloc.start()
    try:
        checkpoint.load(tmp_path, sharding=mesh())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Of two layers: JAX lets go of the one before when the next is put.
    assert tensor / 8 < peak < 3 * tensor < whole / 10


@pytest.mark.parametrize(
    ("sharding", "error", "part"),
    [
        (3, TypeError, "sharding must be a jax.sharding.Mesh, a function of"),
        (lambda shapes: {}, TypeError, "sharding must return a tree like its argument"),
        (lambda shapes: shapes, TypeError, "must return a jax.sharding.NamedSharding"),
        (jax.make_mesh((8,), ("data",)), ValueError, "axis must be of the mesh"),
    ],
    ids=["number", "another tree", "shapes", "axis"],
)
def test_other_shardings_are_refused(
    sharding: Any,
    error: Any,
    part: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved(tmp_path, "opt")
    monkeypatch.setattr(_files.Tensor, "part", None)
    with pytest.raises(error, match=part):
        checkpoint.load(tmp_path, sharding=sharding)
