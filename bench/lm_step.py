"""A step of DPZero on a language model over two forward passes, and beside others.

RoBERTa of 20 M parameters (6 layers of 512, vocabulary 2048), batch 16, length 128,
through the library's lazy loss:

- step over two forward passes of the same compiled loss, temporary memory beyond that of
  a forward pass in layers (one layer: 12.6 MB), and the time of compilation;
- DPZero over MeZO (no clip, no noise), 30 rounds, with the 95% interval of the mean;
- the same step over two forward passes for a Llama of about as many parameters;
- one step of DP-SGD by jax_privacy, which needs the gradient of every record;
- the same step in torch as the paper's code takes it, in two processes that take turns;
  peak memory of a process that loads the model and steps, at 200 M parameters too.

On a GPU also RoBERTa-large at the paper's batch, OPT from 1.3 B to 13 B parameters and a
Llama of 8 B, random weights in bfloat16: ``python -m bench lm_step``.
"""

import functools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness
from jaxdp import plans, sampling
from jaxdp.models.language import (
    Config,
    DecoderConfig,
    LanguageModel,
    OPTConfig,
    RobertaConfig,
    checkpoint,
    num_parameters,
    tasks,
)

BATCH, LENGTH, WORDS = 16, 128, (7, 9)
LAWS = ("rademacher", "gaussian", "sphere")


def config(size: str) -> RobertaConfig:
    """RoBERTa of about 20 or 200 million parameters."""
    width, layers = {"20 M": (512, 6), "200 M": (1024, 16)}[size]
    return RobertaConfig(
        vocab_size=2048,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH + 2,
    )


def batch(rows: int = BATCH, length: int = LENGTH, vocabulary: int = 2048) -> Any:
    """Random records without padding, for a prompt."""
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(3, vocabulary, (rows, length)).astype(np.int32),
        "mask": np.ones((rows, length), bool),
        "position": rng.integers(0, length, rows).astype(np.int32),
        "label": rng.integers(0, 2, rows).astype(np.int32),
    }


def plan(rows: int, law: str, *, private: bool = True) -> plans.DPZero:
    """Full batches of these records; without clip and noise it is MeZO."""
    return plans.DPZero(
        num_examples=rows,
        num_steps=100_000,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1e3 if private else math.inf,
        smoothing_radius=1e-3,
        direction=law,  # pyright: ignore[reportArgumentType]
        noise_multiplier=1.0 if private else 0.0,
    )


def compiled(task: tasks.Task, of: plans.DPZero, params: Any, data: Any) -> Any:
    """The donated step ``(params, state), data -> (params, state)``, and a first state."""
    keys = jaxdp.Keys.insecure(0)
    maker = of.transform(keys, stacked=task.model.is_stacked)
    tx = optax.chain(maker, optax.scale(-1e-6))

    def step(carry: Any, data: Any) -> Any:
        params, state = carry
        update: Any = tx.update
        updates, state = update(None, state, params, value_fn=task.value_fn, batch=data)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    program = jax.jit(step, donate_argnums=0).lower((params, state), data).compile()
    return program, state


class Step:
    """One step as a thunk; takes the parameters over."""

    def __init__(self, task: tasks.Task, of: plans.DPZero, params: Any, data: Any):
        begin = time.perf_counter()
        self.program, state = compiled(task, of, params, data)
        self.compile_seconds = time.perf_counter() - begin
        self.data = data
        self.carry: Any = (params, state)

    def __call__(self) -> Any:
        self.carry = self.program(self.carry, self.data)
        return self.carry


def run(quick: bool) -> list[_harness.Row]:
    """Rows of every comparison; on a GPU those of the large models too."""
    rounds = 5 if quick else 15
    rows = [*_forwards(rounds), *_forwards(rounds, "Llama")]
    rows += _mezo(5 if quick else 30)
    rows += _torch("20 M", rounds)
    if not quick:
        rows += [*_torch("200 M", 2), *_dp_sgd(3)]
    return rows + _large(quick)


# --- against forward passes --------------------------------------------------------


@functools.cache
def _problem(family: str) -> tuple[tasks.Task, Any, Any]:
    of = config("20 M") if family == "RoBERTa" else llama(512, 6, 8, 4, 1536, 2048)
    model = LanguageModel(config=of)
    data = jax.tree.map(jnp.asarray, batch())
    return tasks.prompt(model, WORDS), model.init(jax.random.key(0)), data


def _step(law: str, family: str = "RoBERTa", *, private: bool = True) -> Step:
    task, params, data = _problem(family)
    own = jax.tree.map(jnp.array, params)
    return Step(task, plan(BATCH, law, private=private), own, data)


def layer_bytes(params: Any) -> int:
    """Bytes of one layer."""
    return sum(x.nbytes // len(x) for x in jax.tree.leaves(params["layers"]))


def _forwards(rounds: int, family: str = "RoBERTa") -> list[_harness.Row]:
    task, params, data = _problem(family)
    forward = jax.jit(task.value_fn).lower(params, data).compile()
    steps = {law: _step(law, family) for law in LAWS}
    twice = lambda: (forward(params, data), forward(params, data))  # noqa: E731
    seconds = _harness.alternate({"two forwards": twice, **steps}, rounds)
    rows, named = [], "" if family == "RoBERTa" else f"{family}, "
    for law, step in steps.items():
        case = f"{named}{num_parameters(params) / 1e6:.1f} M, {law}"
        rows.append(_harness.paired(case, "step", seconds, law, "two forwards"))
        beyond = _harness.temp_bytes(step.program) - _harness.temp_bytes(forward)
        layers = beyond / layer_bytes(params)
        rows += [
            _harness.Row(case, "temp beyond a forward", layers, "layers"),
            _harness.Row(case, "compilation", step.compile_seconds, "s"),
        ]
    return rows


def _mezo(rounds: int) -> list[_harness.Row]:
    sides = {
        "DPZero": _step("rademacher"),
        "MeZO": _step("rademacher", private=False),
    }
    seconds = _harness.alternate(sides, rounds)
    pairs = zip(seconds["DPZero"], seconds["MeZO"], strict=True)
    ratios = [a / b for a, b in pairs]
    over = _harness.mean(ratios)
    temp = {name: _harness.temp_bytes(step.program) for name, step in sides.items()}
    case = "20 M, rademacher"
    return [
        _harness.paired(case, "DPZero step", seconds, "DPZero", "MeZO"),
        _harness.Row(case, "DPZero over MeZO, mean", over.value, "ratio"),
        _harness.Row(case, "half of its 95% interval", over.half_width, "ratio"),
        _harness.Row(
            case,
            "DPZero temp",
            temp["DPZero"] / 1e6,
            "MB",
            "MeZO",
            temp["DPZero"] / temp["MeZO"],
        ),
    ]


def _dp_sgd(rounds: int) -> list[_harness.Row]:
    case, metric = "20 M, batch 16", "DP-SGD step (jax_privacy)"
    if said := _harness.missing("jax_privacy"):
        return [_harness.Row(case, metric, None, said)]
    import jax_privacy  # pyright: ignore[reportMissingImports]

    task, params, data = _problem("RoBERTa")

    def loss(params: Any, record: Any) -> jax.Array:
        return task.value_fn(params, jax.tree.map(lambda x: x[None], record))[0]

    clipped: Any = jax_privacy.clipped_grad(
        loss, l2_clip_norm=1.0, batch_argnums=1, keep_batch_dim=False
    )

    def step(params: Any, data: Any, key: jax.Array) -> Any:
        grads = clipped(params, data)
        noise = optax.tree.random_like(key, grads, jax.random.normal)
        return jax.tree.map(lambda p, g, z: p - 1e-6 * (g + z), params, grads, noise)

    key = jax.random.key(0)
    program = jax.jit(step, donate_argnums=0).lower(params, data, key).compile()
    cell = [jax.tree.map(jnp.array, params)]

    def sgd() -> Any:
        cell[0] = program(cell[0], data, key)
        return cell[0]

    ours = _step("rademacher")
    seconds = _harness.alternate({"DP-SGD": sgd, "DPZero": ours}, rounds)
    temp = _harness.temp_bytes(program)
    over = temp / _harness.temp_bytes(ours.program)
    return [
        _harness.paired(case, metric, seconds, "DP-SGD", "DPZero"),
        _harness.Row(case, "DP-SGD temp", temp / 1e6, "MB", "DPZero", over),
    ]


# --- against torch, in two processes -----------------------------------------------


def _torch(size: str, rounds: int) -> list[_harness.Row]:
    case = f"{size}, in processes of their own"
    for package in ("torch", "safetensors"):
        if said := _harness.missing(package):
            return [_harness.Row(case, "step over torch's", None, said)]
    with tempfile.TemporaryDirectory() as folder:
        model = LanguageModel(config=config(size))
        params = model.init(jax.random.key(0))
        checkpoint.save(
            pathlib.Path(folder), model.config, params, max_shard_bytes=10**11
        )
        del params
        sides = {name: _Process(name, folder) for name in ("jax", "torch")}
        losses = [side.ask("losses") for side in sides.values()]
        if not np.allclose(*losses, rtol=1e-3):
            raise AssertionError(f"the two models differ: {losses}")
        asks = [("jax", "two forwards"), ("jax", "rademacher"), ("jax", "gaussian")]
        asks += [("torch", "two forwards"), ("torch", "gaussian")]
        seconds: dict[str, list[float]] = {" ".join(ask): [] for ask in asks}
        for i in range(rounds + 1):
            for name, what in asks if i % 2 else reversed(asks):
                took = sides[name].ask(what)
                if i:
                    seconds[f"{name} {what}"].append(took)
        rows = [
            _harness.paired(
                case, "jax rademacher", seconds, "jax rademacher", "torch gaussian"
            ),
            _harness.paired(
                case, "jax gaussian", seconds, "jax gaussian", "torch gaussian"
            ),
            _harness.paired(
                case,
                "jax two forwards",
                seconds,
                "jax two forwards",
                "torch two forwards",
            ),
        ]
        for side in sides.values():
            side.close()
        return rows + _peaks(case, folder)


def _peaks(case: str, folder: str) -> list[_harness.Row]:
    """Peak memory after loading and after two steps; each step in a fresh process."""
    loaded, stepped = {}, {}
    for name, law in (
        ("torch", "gaussian"),
        ("jax", "gaussian"),
        ("jax", "rademacher"),
    ):
        side = _Process(name, folder)
        loaded[name] = side.ask("peak")
        for _ in range(2):
            side.ask(law)
        stepped[name, law] = side.close()
    torch = stepped.pop(("torch", "gaussian"))
    rows = [_harness.Row(case, "torch peak memory", torch, "MB")]
    for (_, law), peak in stepped.items():
        metric = "jax peak memory" + (", gaussian" if law == "gaussian" else "")
        rows.append(_harness.Row(case, metric, peak, "MB", "torch", peak / torch))
    over = loaded["jax"] / loaded["torch"]
    return [
        *rows,
        _harness.Row(
            case, "jax peak memory, loaded", loaded["jax"], "MB", "torch", over
        ),
        _harness.Row(case, "torch peak memory, loaded", loaded["torch"], "MB"),
    ]


class _Process:
    """One side in a process of its own: told what to do, answers with the seconds."""

    def __init__(self, name: str, folder: str):
        command = [sys.executable, "-m", "bench.lm_step", name, folder]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, **pipes)

    def ask(self, what: str) -> Any:
        assert self.process.stdin and self.process.stdout
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> float:
        """Ends the process; returns its peak memory in MB."""
        peak = self.ask("peak")
        self.process.communicate()
        return peak


def _jax_side(folder: pathlib.Path, arrays: Any) -> dict[str, Callable[[], Any]]:
    loaded, params = checkpoint.load(folder)
    task = tasks.prompt(LanguageModel(config=loaded), WORDS)
    data = jax.tree.map(jnp.asarray, arrays)
    forward = jax.jit(task.value_fn)
    programs: dict[str, Any] = {}
    cell = [params]  # One set of parameters: the steps take turns with it.
    del params

    def step(law: str) -> Any:
        if law not in programs:
            programs[law] = compiled(task, plan(BATCH, law), cell[0], data)
        program, state = programs[law]
        cell[0], state = program((cell[0], state), data)
        programs[law] = program, state
        return cell[0]

    return {
        "losses": lambda: np.asarray(forward(cell[0], data)),
        "two forwards": lambda: (forward(cell[0], data), forward(cell[0], data)),
        "rademacher": lambda: step("rademacher"),
        "gaussian": lambda: step("gaussian"),
    }


def _serve(name: str, folder: str) -> None:
    """A side's process: reads what to do, writes the seconds that it took."""
    arrays = batch()
    if name == "torch":
        from bench import _torch_mezo

        arrays["words"] = np.asarray(WORDS, np.int32)
        does = _torch_mezo.side(pathlib.Path(folder), arrays)
    else:
        does = _jax_side(pathlib.Path(folder), arrays)
    for line in sys.stdin:
        what = line.strip()
        if what == "peak":
            answer: Any = _harness.peak_mebibytes()
        elif what == "losses":
            answer = [float(x) for x in does[what]()]
        else:
            begin = time.perf_counter()
            jax.block_until_ready(does[what]())
            answer = time.perf_counter() - begin
        print(json.dumps(answer), flush=True)


# --- large models on a GPU ---------------------------------------------------------


def _opt(width: int, layers: int, heads: int) -> OPTConfig:
    return OPTConfig(
        vocab_size=50272,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        max_position_embeddings=2048,
    )


def llama(
    width: int = 4096,
    layers: int = 32,
    heads: int = 32,
    key_heads: int = 8,
    inner: int = 14336,
    vocabulary: int = 128256,
) -> DecoderConfig:
    """A Llama 3; that of 8 B parameters, if no widths are given."""
    return DecoderConfig(
        model_type="llama",
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=8192,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )


#: name -> (model, batch, length): the paper's shapes.
LARGE: dict[str, tuple[Config, int, int]] = {
    "RoBERTa-large": (
        RobertaConfig(
            vocab_size=50265,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=514,
        ),
        64,
        128,
    ),
    "OPT-1.3B": (_opt(2048, 24, 32), 8, 256),
    "OPT-2.7B": (_opt(2560, 32, 32), 8, 256),
    "OPT-6.7B": (_opt(4096, 32, 32), 8, 256),
    "OPT-13B": (_opt(5120, 40, 40), 8, 256),
    "Llama 8B": (llama(), 8, 256),
}


def _large(quick: bool) -> list[_harness.Row]:
    if jax.default_backend() != "gpu":
        said = "skipped: needs a GPU"
        return [_harness.Row(f"{name}, bfloat16", "step", None, said) for name in LARGE]
    names = ["RoBERTa-large"] if quick else list(LARGE)
    return [row for name in names for row in large(name, *LARGE[name])]


def large(name: str, of: Config, rows: int, length: int) -> list[_harness.Row]:
    """Rows of one large model with random weights in bfloat16."""
    case = f"{name}, bfloat16, {rows} x {length}"
    model = LanguageModel(config=of, compute_dtype="bfloat16")
    narrow = jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), model._init(key))
    )
    try:
        params = narrow(jax.random.key(0))
        task = tasks.prompt(model, WORDS)
        data = jax.tree.map(jnp.asarray, batch(rows, length, of.vocab_size))
        forward = jax.jit(task.value_fn).lower(params, data).compile()
        found = []
        for law in LAWS:
            step = Step(task, plan(rows, law), params, data)
            del params  # The step has them, and nobody else.
            twice = lambda: [forward(step.carry[0], data) for _ in range(2)]  # noqa: B023, E731
            seconds = _harness.alternate({"step": step, "two forwards": twice}, 7)
            params = step.carry[0]
            tokens = 2 * rows * length / statistics.median(seconds["step"])
            found += [
                _harness.paired(
                    f"{case}, {law}", "step", seconds, "step", "two forwards"
                ),
                _harness.Row(f"{case}, {law}", "tokens", tokens, "tokens/s"),
                *_needed(f"{case}, {law}", step, params),
            ]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return [_harness.Row(case, "step", None, "skipped: out of memory")]
    return found


def _needed(case: str, step: Step, params: Any) -> list[_harness.Row]:
    """Returns the memory of a step's program, and how long it took to compile.

    The process's own peak would be that of all it did before.
    """
    memory = step.program.memory_analysis()
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    temp = memory.temp_size_in_bytes
    needed = memory.argument_size_in_bytes + temp + memory.output_size_in_bytes
    needed -= memory.alias_size_in_bytes
    return [
        _harness.Row(case, "temp over weights", temp / weights, "ratio"),
        _harness.Row(case, "memory over weights", needed / weights, "ratio"),
        _harness.Row(case, "memory", needed / 2**20, "MiB"),
        _harness.Row(case, "compilation", step.compile_seconds, "s"),
    ]


if __name__ == "__main__":
    _serve(*sys.argv[1:])
