"""What every benchmark shares: paired timing, memory, tables, JSON.

Both sides of a ratio run in one process, in turn, with the order reversed every round;
the ratio is the median of the rounds' ratios, so that a machine whose speed drifts
slows both sides. Compile time is never inside. An absolute time means little on a shared
CPU: read the ratios there.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console
import rich.table
import scipy.stats

from jaxdp.training import loop

Seconds = Mapping[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure: ``value`` in ``unit``, and its ``ratio`` to a named ``baseline``.

    A row that could not be had has no value and says why in ``note``: "skipped: ...".
    ``half_width`` is of the value's 95% interval, over ``count`` seeds. A unit is one word;
    what is said in more words is about the figure, and becomes its note.
    """

    case: str
    metric: str
    value: float | None
    unit: str
    baseline: str | None = None
    ratio: float | None = None
    half_width: float | None = None
    count: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if " " in self.unit:
            said = "; ".join(filter(None, (self.unit, self.note)))
            object.__setattr__(self, "unit", "")
            object.__setattr__(self, "note", said)


class Mean(NamedTuple):
    """A mean over seeds, with the half width of its 95% interval."""

    value: float
    half_width: float


def mean(samples: Sequence[float] | np.ndarray) -> Mean:
    """Mean and Student's 95% interval; no width for a single sample."""
    n = len(samples)
    if n < 2:
        return Mean(float(np.mean(samples)), 0.0)
    error = float(np.std(samples, ddof=1)) / n**0.5
    return Mean(float(np.mean(samples)), float(scipy.stats.t.ppf(0.975, n - 1)) * error)


def averaged(
    case: str,
    metric: str,
    found: Mean,
    count: int,
    unit: str = "",
    baseline: str | None = None,
    ratio: float | None = None,
) -> Row:
    """Row of a mean over ``count`` seeds; one seed has no interval."""
    width = found.half_width if count > 1 else None
    return Row(case, metric, found.value, unit, baseline, ratio, width, count)


def over_seeds(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` of one seed's arguments, for those of all seeds, stacked: for jit.

    One after the other on a CPU, whose cores one run can fill; all at once elsewhere.
    """

    def every(*stacked: Any) -> Any:
        if jax.default_backend() == "cpu":
            return jax.lax.map(lambda args: fn(*args), stacked)
        return jax.vmap(fn)(*stacked)

    return every


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program as ``fit`` does: on a CPU, with vectors of 512 bits."""
    options = loop.compiler_options(jax.default_backend())
    return lowered.compile(compiler_options=options)


def alternate(
    sides: Mapping[str, Callable[[], Any]], rounds: int, *, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side, round by round; each call is waited for."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warmup + rounds):
        for name in names if i % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            jax.block_until_ready(sides[name]())
            if i >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: Seconds, name: str, baseline: str) -> float:
    """Median over rounds of this side's time over the baseline's."""
    pairs = zip(seconds[name], seconds[baseline], strict=True)
    return statistics.median(a / b for a, b in pairs)


def paired(
    case: str, metric: str, seconds: Seconds, name: str, baseline: str, *, per: int = 1
) -> Row:
    """Milliseconds of a side (of each of ``per`` steps) and the ratio to a baseline."""
    value = 1e3 * statistics.median(seconds[name]) / per
    return Row(case, metric, value, "ms", baseline, ratio(seconds, name, baseline))


def speed(
    case: str, metric: str, seconds: Seconds, name: str, baseline: str, count: int
) -> Row:
    """``count`` per second of a side, and how many times faster it is than a baseline."""
    value = count / statistics.median(seconds[name])
    return Row(case, metric, value, "1/s", baseline, 1 / ratio(seconds, name, baseline))


def temp_bytes(compiled: Any) -> int:
    """Temporary memory of a compiled program, from XLA's own analysis."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def peak_mebibytes() -> float:
    """Returns the peak of this process; ``ru_maxrss`` begins with that of its parent."""
    status = pathlib.Path("/proc/self/status")
    if status.is_file():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_bytes() -> int | None:
    """The device's peak memory so far, where it counts it (a GPU)."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def missing(package: str) -> str:
    """``"skipped: ..."`` where an optional package is not installed, else ``""``."""
    if importlib.util.find_spec(package) is None:
        return f"skipped: {package} is not installed"
    return ""


def device() -> str:
    """The kind of device: a GPU's name, or the kind of processor."""
    found = jax.devices()[0]
    return (
        found.device_kind if found.platform != "cpu" else f"cpu ({platform.machine()})"
    )


def versions() -> dict[str, str]:
    """Versions that decide a figure."""
    names = ("jax", "jaxlib", "optax", "numpy", "torch", "jax_cuda12_plugin", "libtpu")
    found = {"python": platform.python_version()}
    for name in names:
        if not missing(name):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """The commit that is measured, with a plus sign if the files differ from it."""

    def git(*words: str) -> str:
        place = pathlib.Path(__file__).parent
        return subprocess.check_output(
            ["git", *words], cwd=place, text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def circumstances(quick: bool) -> dict[str, Any]:
    """What a reader must know of a run, taken before it begins.

    The load average is of the minute before, without the benchmark's own work: times mean
    little where it is near the number of cores.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"quick": quick, "commit": commit(), "load_average": load}


def document(
    name: str, rows: list[Row], begun: Mapping[str, Any], on: str | None = None
) -> dict[str, Any]:
    """The JSON document of one benchmark; ``on`` another device than this machine's."""
    return {
        "name": name,
        "device": on or device(),
        "versions": versions(),
        **begun,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def write_json(path: pathlib.Path, written: Mapping[str, Any]) -> None:
    """Writes a :func:`document`; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")


def print_table(name: str, rows: list[Row]) -> None:
    """Prints the rows for a person."""
    table = rich.table.Table(title=f"bench {name} on {device()}", title_justify="left")
    for column in ("case", "metric", "value", "± 95%", "seeds", "unit", "ratio", "to"):
        right = column in ("value", "± 95%", "seeds", "ratio")
        table.add_column(column, justify="right" if right else "left")

    def number(x: float | None, digits: int) -> str:
        return "" if x is None else f"{x:.{digits}g}"

    for row in rows:
        table.add_row(
            row.case,
            row.metric,
            number(row.value, 4),
            number(row.half_width, 2),
            number(row.count, 6),
            "; ".join(filter(None, (row.unit, row.note))),
            number(row.ratio, 3),
            row.baseline,
        )
    rich.console.Console(width=None).print(table)
