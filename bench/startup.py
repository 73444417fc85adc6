"""What a program waits for before its first step: an import, and a calibration.

The import of jaxdp in a process of its own, over that of the libraries that it is built on.
A calibration over one account of the event that it ends at: by dp-accounting's PLD, with
whose answers the least noise is found. CPU seconds of the process: one account is Python
code, which other processes slow down.
"""

import subprocess
import sys
import time
from collections.abc import Callable

from bench import _harness
from jaxdp import plans, sampling
from jaxdp.accounting import spending

#: Sampling probability, number of steps, epsilon; delta is 1e-6.
PLANS = ((0.01, 1000, 1.0), (256 / 60_000, 4680, 3.0), (1e-3, 10_000, 1.0))
PLANS += ((1e-3, 10_000, 8.0), (1e-4, 100_000, 1.0))
DELTA = 1e-6
#: Each in a process of its own, which says how long it took.
IMPORTS = {"jaxdp": "jaxdp", "jax and optax": "jax, optax"}
TIMED = (
    "import time; b = time.process_time(); import {}; print(time.process_time() - b)"
)


def run(quick: bool) -> list[_harness.Row]:
    """Rows of the import, and of calibrations of sampled Gaussians."""
    rounds = 1 if quick else 5
    return [
        _imported(rounds),
        *(_calibrated(*p, rounds) for p in PLANS[: 1 if quick else None]),
    ]


def _imported(rounds: int) -> _harness.Row:
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for i in range(rounds + 1):
        for name, modules in IMPORTS.items():
            command = [sys.executable, "-c", TIMED.format(modules)]
            took = float(subprocess.check_output(command, text=True))
            if i:  # The first reads files that the others find in memory.
                seconds[name].append(took)
    return _harness.paired("import", "CPU time", seconds, "jaxdp", "jax and optax")


def _calibrated(q: float, steps: int, epsilon: float, rounds: int) -> _harness.Row:
    plan = plans.DPZero(
        num_examples=round(100 / q),
        num_steps=steps,
        sampling=sampling.TruncatedPoisson(sampling_prob=q),
        relation="add_or_remove",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
    )
    found = plan.calibrate(epsilon=epsilon, delta=DELTA)
    sides = {
        "calibration": lambda: plan.calibrate(epsilon=epsilon, delta=DELTA),
        "one account": lambda: found.epsilon(delta=DELTA),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(_seconds(side))
    case = f"q = {q:.3g}, {steps} steps, epsilon {epsilon:g}"
    return _harness.paired(case, "CPU time", seconds, "calibration", "one account")


def _seconds(side: Callable[[], object]) -> float:
    spending._composed.cache_clear()
    begin = time.process_time()
    side()
    return time.process_time() - begin
