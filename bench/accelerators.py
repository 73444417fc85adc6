"""What accelerators would do with the library's programs, and what a real one does.

Where a compiler for an H100 or for TPUs is installed (``make accelerators``), all programs
of ``_accelerators_programs.py`` are compiled ahead of time, of abstract shapes: memory,
launches, loops, conditionals, copies, routines of libraries, collectives, bytes and
operations, and from them the time by the chip's data sheet. Nothing is run, so no row is a
measured time but those of compilation. The time by the data sheet is an estimate and no
bound: a compiler makes fewer instructions than the program has operations, and caches serve
some of the bytes.

On an accelerator a step of each law is timed on RoBERTa-large, and what passed through it
in a second stands beside what the data sheet allows. On a CPU the same is done with a small
model, for which there is no data sheet.

``python -m bench.accelerators "H100: noise, tree" ...`` prints rows of some cases as JSON,
``python -m bench.accelerators excerpts H100`` lines of compiled programs.
"""

import collections
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bench import _accelerators, _harness, _kept, lm_step
from bench import _accelerators_hlo as hlo
from bench import _accelerators_programs as programs
from jaxdp.kernels import prefix_noise
from jaxdp.models.language import LanguageModel, num_parameters, tasks

Row = _harness.Row
#: Chips whose compilers are asked for every program.
CHIPS = ("H100", "v5e")
#: Of chips that share the compiler, what else is compiled.
OTHERS = {
    "H100": {},
    "v5e": {
        "v5p": tuple(
            f"{model}, {what}"
            for model in ("OPT-13B", "Llama 8B")
            for what in ("forward", *programs.LAWS)
        ),
        "v6e": ("OPT-1.3B, forward", "OPT-1.3B, gaussian"),
    },
}
#: And for all chips of a board, which share the records.
SEVERAL, BOARD = "OPT-1.3B, rademacher", ", 2 x 2"
QUICK = ("words", "noise")
TWICE = "two forwards"
#: Of a program's bytes, products and other operations, at the rates of the data sheet.
BY_SHEET = "time by the data sheet"
#: What the documentation shows of compiled programs: launches that move at least such a
#: part of what the first of them moves, and so many of a fusion's last operations.
EXCERPTS = ("perturbed product, gaussian", "noise, independent", "vertex draws")
SHOWN, LAST = 0.4, 3
#: Where noise on prefix sums was timed, and of how many numbers.
TIMED, NUMBERS = "h100/prefix_noise", {"10 M": 10**7}
#: Counts that a test compares with the kept ones: more of them is a regression.
COUNTED = (
    "temp memory",
    "launches",
    "loops",
    "loop iterations",
    "loops of unknown length",
    "conditionals",
    "custom calls",
    "collectives",
)


def run(quick: bool) -> list[Row]:
    """Rows of every program and compiler that is here, or of the device."""
    here = [chip for chip in CHIPS if not _accelerators.missing(chip)]
    if jax.default_backend() != "cpu" or not here:
        skipped = [Row(c, "compilation", None, _accelerators.missing(c)) for c in CHIPS]
        return [*measured(quick), *(row for row in skipped if row.note)]
    return [row for chip in here for row in compiled_ahead(chip, quick)]


def device() -> str:
    """The chips that are compiled for, or the device."""
    here = [chip for chip in CHIPS if not _accelerators.missing(chip)]
    if jax.default_backend() != "cpu" or not here:
        return _harness.device()
    return ", ".join(f"{chip} (compiled ahead of time)" for chip in here)


# --- compiled ahead of time ---------------------------------------------------------


def cases(chip: str, quick: bool = False) -> list[str]:
    """What is compiled: a chip's programs, and some of those that share its compiler."""
    every = programs.programs()
    if quick:
        return [f"{chip}: {n}" for n, p in every.items() if p.group in QUICK]
    found = [f"{chip}: {name}" for name in every]
    if chip != "H100":  # One of them has no board.
        found.append(f"{chip}: {SEVERAL}{BOARD}")
    others = OTHERS[chip].items()
    return found + [f"{other}: {name}" for other, names in others for name in names]


def compiled_ahead(chip: str, quick: bool) -> list[Row]:
    """Rows of a chip's programs, and of what else its compiler is asked for."""
    rows = [row for case in cases(chip, quick) for row in counted(case)]
    return [*rows, *over_forwards(rows), *over_measured(rows)]


def counted(case: str) -> list[Row]:
    """Rows of ``"CHIP: PROGRAM"``, on one chip, or on all chips of a board."""
    chip, _, name = case.partition(": ")
    on_board = name.endswith(BOARD)
    of = programs.programs()[name.removesuffix(BOARD)]
    mesh = _accelerators.mesh(chip) if on_board else None
    fn, args = of.build(axis_name="data") if on_board else of.build()
    if _bytes(args) > _accelerators.MEMORY[chip]:
        return [Row(case, "temp memory", None, "skipped: more than the chip's memory")]
    print(case, file=sys.stderr, flush=True)
    compiled = _accelerators.compile_for(chip, fn, args, donate=of.donate, on=mesh)
    rows = rows_of(case, compiled, compiled.on(chip))
    if of.group == "model":
        params = args[0] if of.name.endswith("forward") else args[0][0]
        layers = compiled.memory["temp"] / _bytes(params["layers"])
        layers *= len(jax.tree.leaves(params["layers"])[0])
        rows.append(Row(case, "temp memory in layers", layers, "layers"))
        if of.donate:
            share = min(compiled.memory["alias"] / _bytes(params), 1.0)
            rows.append(Row(case, "parameters updated in place", share, "share"))
    if of.group == "words":
        each = compiled.on(chip).counts.vector / programs.DIM
        rows.append(Row(case, "vector operations a word", each, "operations"))
    return rows


def _bytes(shapes: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def rows_of(
    case: str, compiled: _accelerators.Compiled, seen: hlo.Program
) -> list[Row]:
    """Rows of a compiled program: counts, and the time by the data sheet."""
    known = [loop.runs * loop.trips for loop in seen.loops if loop.trips is not None]
    counts = seen.counts
    values: dict[str, tuple[float | None, str]] = {
        **{f"{k} memory": (v / 1e6, "MB") for k, v in compiled.memory.items()},
        "launches": (counts.launches, "launches"),
        "fusions": (seen.fusions, "lines"),
        "copies": (seen.copies, "lines"),
        "loops": (len(seen.loops), "lines"),
        "loop iterations": (sum(known), "iterations"),
        "loops of unknown length": (len(seen.loops) - len(known), "lines"),
        "conditionals": (len(seen.conditionals), "lines"),
        "custom calls": (sum(seen.custom_calls.values()), "lines"),
        "collectives": (sum(seen.collectives.values()), "lines"),
        "bytes moved": (counts.bytes / 1e6, "MB"),
        "matrix operations": (counts.matrix / 1e9, "GFLOP"),
        "vector operations": (counts.vector / 1e9, "Gop"),
        "integer operations of generators": (counts.random / 1e9, "Gop"),
        "cycles by the compiler": (counts.cycles / 1e6 or None, "Mcycle"),
        "cycles of generators": (counts.random_cycles / 1e6 or None, "Mcycle"),
        "operations by the compiler": (scaled(compiled.flops, 1e9), "Gop"),
        "bytes by the compiler": (scaled(compiled.bytes, 1e6), "MB"),
        "compilation": (compiled.seconds, "s"),
        "compilation, all cores": (compiled.cpu, "s"),
    }
    rows = [Row(case, k, v, unit) for k, (v, unit) in values.items() if v is not None]
    if seen.rates:
        times = seen.rates.times(counts) | {"launches": counts.seconds}
        rows += [by_sheet(case, k, v) for k, v in times.items()]
    named = {
        "custom call": seen.custom_calls,
        "collective": seen.collectives,
        "conditional": collections.Counter(map(_file, seen.conditionals)),
        "loop of unknown length": collections.Counter(
            _file(loop.source) for loop in seen.loops if loop.trips is None
        ),
    }
    for what, lines in named.items():
        rows += [
            Row(case, f"{what}: {k}", n, "lines") for k, n in sorted(lines.items())
        ]
    return rows


def scaled(value: float | None, unit: float) -> float | None:
    """A number that a compiler may not give, in a larger unit."""
    return None if value is None else value / unit


def by_sheet(case: str, unit: str, seconds: float) -> Row:
    """The time of a program on one of a chip's units, by the data sheet."""
    return Row(case, f"{BY_SHEET}, {unit}", 1e3 * seconds, "ms")


def _file(source: str) -> str:
    """A line's file: its number moves with every edit."""
    return source.rpartition(":")[0] or source


def over_forwards(rows: list[Row]) -> list[Row]:
    """What a step takes over two forward passes of the same chip and model."""
    values = {(row.case, row.metric): row.value for row in rows}
    found = []
    metrics = (
        "bytes moved",
        "matrix operations",
        "vector operations",
        "cycles by the compiler",
        *(f"{BY_SHEET}, {k}" for k in ("memory", "matrix", "vector", "launches")),
    )
    for (case, metric), value in values.items():
        model = case.rpartition(", ")[0]
        once = values.get((f"{model}, forward", metric))
        if metric in metrics and value and once and not case.endswith("forward"):
            row = Row(case, f"step, {metric}", value, "", TWICE, value / (2 * once))
            found.append(row)
    for (case, metric), value in values.items():
        # The chip with more memory bandwidth runs what is compiled for the other one.
        if metric == "bytes moved" and case.startswith("H100: ") and value:
            counts = hlo.Counts(
                bytes=1e6 * value,
                matrix=1e9 * (values[case, "matrix operations"] or 0),
                vector=1e9 * (values[case, "vector operations"] or 0),
                random=1e9 * (values[case, "integer operations of generators"] or 0),
            )
            times = _accelerators.RATES["H200"].times(counts)
            name = case.replace("H100", "H200")
            found += [by_sheet(name, k, v) for k, v in times.items()]
    return found


def over_measured(rows: list[Row]) -> list[Row]:
    """The measured times of noise on an H100, over those by the data sheet.

    And the time by the data sheet of what one kernel stores for the next, over the
    measured: about what a single kernel would save.
    """
    values = {(row.case, row.metric): row.value or 0.0 for row in rows}
    found = []
    for (kind, size), name in itertools.product(NUMBERS.items(), prefix_noise.NAMES):
        case = f"H100: noise, {name}"
        timed = _kept.rows(TIMED).get((f"{name}, {kind}", "step"))  # Of those that fit.
        if not timed or not timed[0]["value"] or (case, "temp memory") not in values:
            continue
        measured, scale = timed[0]["value"], size / programs.DIM
        for unit in ("vector", "memory"):
            other = scale * values[case, f"{BY_SHEET}, {unit}"]
            over = Row(
                case, f"measured, {kind}", measured, "ms", unit, measured / other
            )
            found.append(over)
        stored = 2 * scale * 1e6 * values[case, "temp memory"]  # Written and read.
        saved = 1e3 * stored / _accelerators.RATES["H100"].memory
        metric = f"stored between kernels, {kind}"
        found.append(Row(case, metric, saved, "ms", "measured", saved / measured))
    return found


# --- what is fused ------------------------------------------------------------------


def excerpt(case: str) -> str:
    """The launches of ``"CHIP: PROGRAM"`` that move most of its bytes, in a few lines.

    Of a fusion, how many operations of each kind are in it, and its last ones.
    """
    chip, _, name = case.partition(": ")
    of = programs.programs()[name]
    compiled = _accelerators.compile_for(chip, *of.build(), donate=of.donate)
    return "\n".join([f"{case}", *compiled.on(chip).excerpt(SHOWN, LAST)])


# --- on a device --------------------------------------------------------------------


def measured(quick: bool) -> list[Row]:
    """Throughput of steps on the device, beside what its data sheet allows."""
    large = jax.default_backend() != "cpu"
    name = "RoBERTa-large" if large else "20 M"
    config, rows, length = (
        lm_step.LARGE[name] if large else (lm_step.config("20 M"), 4, 32)
    )
    dtype = "bfloat16" if large else "float32"
    model = LanguageModel(config=config, compute_dtype=dtype)
    narrow = lambda key: jax.tree.map(lambda x: x.astype(dtype), model._init(key))  # noqa: E731
    params = jax.jit(narrow)(jax.random.key(0))
    task = tasks.prompt(model, lm_step.WORDS)
    data = lm_step.batch(rows, length, config.vocab_size)
    data = jax.tree.map(jnp.asarray, data)
    case = f"{name}, {rows} x {length}"
    found = [Row(case, "parameters", num_parameters(params), "numbers")]
    forward = jax.jit(task.value_fn).lower(params, data).compile()
    sides: dict[str, Any] = {"forward": lambda: forward(params, data)}
    compiled = {"forward": forward}
    for law in programs.LAWS[:1] if quick else programs.LAWS:
        own = jax.tree.map(jnp.array, params)
        sides[law] = step = lm_step.Step(task, lm_step.plan(rows, law), own, data)
        compiled[law] = step.program
    seconds = _harness.alternate(sides, 3 if quick else 9)
    chip = _accelerators.KINDS.get(jax.devices()[0].device_kind)
    passes = {"forward": 1} | dict.fromkeys(programs.LAWS, 2)
    for side, took in seconds.items():
        each = statistics.median(took)
        seen = _accelerators.described(compiled[side]).on(chip)
        found += throughput(f"{case}, {side}", each, seen, chip)
        amounts = {"records": rows, "tokens": rows * length * passes[side]}
        if side != "forward":
            amounts["directions"] = 1
        found += [
            Row(f"{case}, {side}", what, count / each, f"{what}/s")
            for what, count in amounts.items()
        ]
        if side != "forward":
            ratio = _harness.ratio(seconds, side, "forward") / 2
            found.append(Row(f"{case}, {side}", "step", 1e3 * each, "ms", TWICE, ratio))
    return found


def throughput(
    case: str, seconds: float, seen: hlo.Program, chip: str | None
) -> list[Row]:
    """Rows of one program that took ``seconds``: rates, and shares of the chip's."""
    counts = seen.counts
    rates: Mapping[str, tuple[float, str]] = {
        "memory": (counts.bytes / seconds / 1e9, "GB/s"),
        "matrix": (counts.matrix / seconds / 1e12, "TFLOP/s"),
        "vector": (counts.vector / seconds / 1e12, "TOP/s"),
    }
    rows = [Row(case, f"rate, {k}", v, unit) for k, (v, unit) in rates.items()]
    if chip is None:
        said = "skipped: no data sheet of this device"
        return [*rows, Row(case, BY_SHEET, None, said)]
    times = _accelerators.RATES[chip].times(counts)
    most = max(times, key=lambda name: times[name])
    rows += [
        dataclasses.replace(
            by_sheet(case, k, v), baseline="measured", ratio=v / seconds
        )
        for k, v in times.items()
    ]
    share = times[most] / seconds
    return [*rows, Row(case, f"largest share: {most}", share, "share")]


def main(*names: str) -> None:
    """Prints rows of some cases as JSON, or ``excerpts`` of a chip's programs."""
    if names[0] == "excerpts":
        chip = {c.lower(): c for c in CHIPS}[names[1].lower()]
        print("\n\n".join(excerpt(f"{chip}: {name}") for name in EXCERPTS))
        return
    rows = [row for name in names for row in counted(name)]
    print(json.dumps([dataclasses.asdict(row) for row in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
