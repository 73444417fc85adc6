"""Families of language models: what is read, written and computed of each.

Against the golden files of the tests, tiny checkpoints of every family with the logits that
`transformers` computed. ``lazy`` compares the bits of a lazily perturbed loss with those of
perturbed parameters; ``memory beside a forward`` is what a step's two losses need more than
one unperturbed forward, over the bytes of a layer. ``step`` is the time of a step of DPZero
over that of two forwards of the same compiled loss, the least of several rounds in which
all take turns, of random weights of some millions of parameters. Rows of ``sharded`` and of
the memory of large models are of ``_families_devices.py``.

``python -m bench.families FILE sharded`` (or ``peft``, ``memory``, ``step``) makes only
those rows again and leaves the others in the file as they are.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import _families_devices, _harness, lm_step
from jaxdp.kernels import perturb, sphere
from jaxdp.models.language import (
    Config,
    LanguageModel,
    LoRA,
    checkpoint,
    num_parameters,
    tasks,
)
from jaxdp.models.language import config as configs
from jaxdp.models.losses import softmax_cross_entropy

Row = _harness.Row
GOLDEN = pathlib.Path(__file__).parents[1] / "tests/models/language/golden"
CASES = {
    "RoBERTa": ("roberta_mlm", "roberta_mlm_untied"),
    "ModernBERT": ("modernbert_mlm", "modernbert_mlm_untied"),
    "OPT": ("opt", "opt_untied", "opt_post_norm"),
    "Llama 2, SmolLM, SmolLM2": ("llama", "llama_linear"),
    "Llama 3": ("llama_scaled",),
    "Mistral": ("mistral",),
    "Qwen 2": ("qwen2", "qwen2_yarn"),
    "Qwen 3": ("qwen3",),
    "Gemma": ("gemma",),
    "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3",),
    "Phi-3": ("phi3", "phi3_long"),
    "SmolLM3": ("smollm3",),
}
QUICK = ("OPT", "Llama 3")
LAYERS, WIDTH = 9, 128
#: Of ``step``, on the batch of ``bench lm_step``; the last law is the default of a plan.
DEEP, WIDE, VOCABULARY = 6, 256, 2048
LAWS = ("rademacher", "sphere")


def run(quick: bool) -> list[Row]:
    """Rows of every family, or of two, and of large models, or of a small one."""
    names = QUICK if quick else tuple(CASES)
    rows = [row for name in names for row in rows_of(name)]
    return [*rows, *(row for part in PARTS.values() for row in part(names, quick))]


def rows_of(name: str) -> list[Row]:
    """Rows of one family."""
    folders = [GOLDEN / case for case in CASES[name]]
    model, params = load(folders[0])
    kind = model.config.model_type
    said = {
        "loads": (True, kind),
        "saves": (all(map(saves, folders)), "to the bit"),
        "lazy": (is_lazy(model, params), "to the bit"),
    }
    rows = [
        Row(name, x, float(ok), "", note=yes if ok else "no")
        for x, (ok, yes) in said.items()
    ]
    rows.append(Row(name, "parity error", max(map(parity, folders)), ""))
    return [*rows, Row(name, "memory beside a forward", memory(model.config), "layers")]


def with_peft(name: str) -> Row:
    """Whether LoRA that is saved as peft writes it comes back, and the weights with it."""
    config, params = checkpoint.load(GOLDEN / CASES[name][0])
    model = LanguageModel(config=config, adapter=LoRA(rank=2))
    params = model.with_new_parts(params, jax.random.key(0))
    lora = params["layers"]["lora"]  # Whose second matrices are zero so far.
    lora = jax.tree.map(
        lambda x: x + jnp.arange(x.size).reshape(x.shape) / x.size, lora
    )
    params["layers"]["lora"] = lora
    with tempfile.TemporaryDirectory() as home:
        checkpoint.save(home, config, params, adapter=model.adapter)
        there = {path.name for path in pathlib.Path(home).iterdir()}
        same = checkpoint.read_adapter(home) == model.adapter
        _, loaded = checkpoint.load(home)
    same &= {"adapter_config.json", "adapter_model.safetensors"} <= there
    same &= jax.tree.structure(params) == jax.tree.structure(loaded)
    equal = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), params, loaded)
    ok = same and all(jax.tree.leaves(equal))
    return Row(name, "peft", float(ok), "", note="to the bit" if ok else "no")


def of_steps(name: str) -> LanguageModel:
    """Returns a model of a family that is large enough for its steps to be timed."""
    tiny, _ = load(GOLDEN / CASES[name][0])
    config = widened(
        tiny.config,
        WIDE,
        DEEP,
        head_dim=WIDE // 4,
        max_position_embeddings=lm_step.LENGTH + 2,
        vocab_size=VOCABULARY,
    )
    return LanguageModel(config=config)


def with_steps(name: str, rounds: int) -> list[Row]:
    """The least time of a step of each law, over that of two forwards."""
    print(name, file=sys.stderr, flush=True)
    model = of_steps(name)
    task, params = tasks.prompt(model, lm_step.WORDS), model.init(jax.random.key(0))
    data = jax.tree.map(jnp.asarray, lm_step.batch(vocabulary=VOCABULARY))
    forward = jax.jit(task.value_fn).lower(params, data).compile()
    sides: dict[str, Any] = {
        "two forwards": lambda: (forward(params, data), forward(params, data))
    }
    for law in LAWS:
        own = jax.tree.map(jnp.array, params)
        sides[law] = lm_step.Step(task, lm_step.plan(lm_step.BATCH, law), own, data)
    least = {n: min(x) for n, x in _harness.alternate(sides, rounds).items()}
    note = f"{num_parameters(params) / 1e6:.1f} M parameters"
    twice = least.pop("two forwards")
    return [
        Row(name, f"step, {law}", 1e3 * x, "ms", "two forwards", x / twice, note=note)
        for law, x in least.items()
    ]


#: Rows that are made for all families together: ``part(names, quick)``.
PARTS: dict[str, Any] = {
    "peft": lambda names, quick: [with_peft(name) for name in names],
    "sharded": lambda names, quick: _families_devices.from_process("sharded", *names),
    "memory": lambda names, quick: _families_devices.from_process(
        "memory", *(["tiny"] if quick else [])
    ),
    "step": lambda names, quick: [
        row for name in names for row in with_steps(name, 2 if quick else 12)
    ],
}


def splice(path: pathlib.Path, rows: list[Row]) -> None:
    """Puts rows in the place of those of the same case and metric, or behind the others.

    The file's commit is that of the others: new rows have a field of their own for it.
    """
    written = json.loads(path.read_text(encoding="utf-8"))
    own = {"commit": _harness.commit()}
    new = {(row.case, row.metric): dataclasses.asdict(row) | own for row in rows}
    old = written["rows"]
    written["rows"] = [new.pop((x["case"], x["metric"]), x) for x in old] + [
        *new.values()
    ]
    _harness.write_json(path, written)


def load(folder: pathlib.Path) -> tuple[LanguageModel, Any]:
    """Returns a golden model, and its parameters in float32."""
    config, params = checkpoint.load(folder)
    return LanguageModel(config=config), params


def parity(folder: pathlib.Path) -> float:
    """Returns the largest difference from the logits of transformers."""
    model, params = load(folder)
    logits = jax.jit(lambda p, t, m: model.logits(p, model.hidden(p, t, m)))
    with np.load(folder / "expected.npz") as file:
        stored = dict(file)
    whole = stored["whole_tokens"]
    padded = logits(params, stored["tokens"], stored["mask"])
    errors = (
        jnp.where(stored["mask"][..., None], padded - stored["logits"], 0),
        logits(params, whole, np.ones(whole.shape, bool)) - stored["whole_logits"],
    )
    return float(max(jnp.max(jnp.abs(error)) for error in errors))


def saves(folder: pathlib.Path) -> bool:
    """Returns True if what is saved is what was stored, in the dtype of the files."""
    dtype = "float32" if folder.name.startswith(("roberta", "opt")) else "bfloat16"
    config, params = checkpoint.load(folder, dtype=dtype)
    with tempfile.TemporaryDirectory() as home:
        checkpoint.save(home, config, params, max_shard_bytes=4000)
        again, loaded = checkpoint.load(home, dtype=dtype)
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), params, loaded)
    return again == config and all(jax.tree.leaves(same))


def loss_of(model: LanguageModel) -> Any:
    """Returns the lazy loss of the token at a position, for encoders too."""
    if model.config.is_decoder:
        return tasks.generation(model, span_length=2).value_fn

    def loss(params: Any, batch: Any, at: perturb.At) -> jax.Array:
        x = model.hidden(params, batch["tokens"], batch["mask"], at)[:, 1]
        return softmax_cross_entropy(model.logits(params, x, at), batch["tokens"][:, 1])

    return perturb.LazyLoss(loss)


def batch() -> dict[str, jax.Array]:
    """Returns records of three lengths, of which the last two tokens are an answer."""
    lengths = jnp.asarray([12, 7, 4])[:, None]
    mask = jnp.arange(12) < lengths
    tokens = jax.random.randint(jax.random.key(0), mask.shape, 5, 40)
    return {
        "tokens": tokens,
        "mask": mask,
        "span": mask & (jnp.arange(12) >= lengths - 2),
    }


def one_direction(params: Any) -> sphere.Direction:
    """Returns one Rademacher direction."""
    law, stacked = "rademacher", LanguageModel.is_stacked
    rows = sphere.directions(jax.random.key(1), params, law=law, stacked=stacked)
    return sphere.select(rows, 0)


def is_lazy(model: LanguageModel, params: Any) -> bool:
    """Returns True if lazy losses have the bits of those of perturbed parameters."""
    loss, data, scale = loss_of(model), batch(), jnp.float32(0.05)
    one = one_direction(params)
    got = jax.jit(lambda p, s: perturb.losses_at(loss, p, data, one, s))(params, scale)
    moved = jax.jit(lambda p, s: perturb.perturb(p, one, s))(params, scale)
    return bool(jnp.all(got == jax.jit(loss)(moved, data)))


def memory(tiny: Config) -> float:
    """Returns the layers that a step's two losses need beside a forward."""
    wide = widened(tiny)
    model = LanguageModel(config=wide)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    loss, data = loss_of(model), batch()

    def slopes(params: Any) -> jax.Array:
        one, radius = one_direction(params), jnp.float32(0.01)
        ahead = perturb.losses_at(loss, params, data, one, radius)
        return ahead - perturb.losses_at(loss, params, data, one, -radius, after=ahead)

    step, forward = (
        _harness.temp_bytes(jax.jit(fn).lower(shapes).compile())
        for fn in (slopes, lambda params: loss(params, data))
    )
    layer = sum(4 * x.size // LAYERS for x in jax.tree.leaves(shapes["layers"]))
    return (step - forward) / layer


def widened(
    tiny: Config, width: int = WIDTH, layers: int = LAYERS, **more: int
) -> Config:
    """Returns a configuration of the same family with layers that are worth counting."""
    fields = tiny.to_json()
    wider = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": 64}
    wider |= dict.fromkeys(("intermediate_size", "ffn_dim"), 2 * width)
    wider |= {"word_embed_proj_dim": width, "num_attention_heads": 4} | more
    fields |= {name: value for name, value in wider.items() if name in fields}
    for name in ("layer_types", "no_rope_layers"):
        if fields.get(name):
            fields[name] = fields[name] * (layers // tiny.num_hidden_layers)
    return configs.from_json(fields)


if __name__ == "__main__":
    for part in sys.argv[2:]:
        splice(pathlib.Path(sys.argv[1]), PARTS[part](tuple(CASES), False))
