"""What the record of a run costs: bytes, and time against the same chunks without it.

DPZero on digits, four directions, a hundred chunks. Replay reads the ledger alone.
Also what ``jaxdp.tune`` charges for a search, against composing its mean number of runs.
"""

import pathlib
import tempfile
from typing import Any

import jax
import optax

import jaxdp
from bench import _harness
from jaxdp import accounting, models, plans, sampling
from jaxdp.models import networks
from jaxdp.training import ledger

OPTIMIZER = optax.sgd(0.15)


def run(quick: bool) -> list[_harness.Row]:
    """Rows for the ledger's size and time, and for the price of searches."""
    steps, rounds = (600, 2) if quick else (3000, 5)
    return [*_recorded(steps, rounds), *_searched()]


def _recorded(steps: int, rounds: int) -> list[_harness.Row]:
    dataset = models.load("digits")
    net = networks.linear(64, 10)
    params = net.init(jax.random.key(0))
    plan = plans.DPZero(
        num_examples=dataset.num_examples,
        num_steps=steps,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
        num_directions=4,
        noise_multiplier=100.0,
    )

    def fit(**kwargs: Any) -> Any:
        keys = jaxdp.Keys.insecure(0)
        args = {"value_fn": net.value_fn, "optimizer": OPTIMIZER, "chunk": steps // 100}
        return jaxdp.fit(plan, keys, params, dataset.train, **args, **kwargs).params

    with tempfile.TemporaryDirectory() as folder:
        made: list[pathlib.Path] = []

        def recorded() -> Any:
            made.append(pathlib.Path(folder, str(len(made))))
            return fit(ledger=made[-1])

        def replayed() -> Any:
            return jaxdp.replay(made[0], params, optimizer=OPTIMIZER).params

        sides = {"recorded": recorded, "not recorded": fit, "replay": replayed}
        seconds = _harness.alternate(sides, rounds)
        size = (made[0] / ledger.LEDGER).stat().st_size
    case = f"digits, {steps} steps, K = 4"
    return [
        _harness.Row(case, "ledger", size / 1e3, "kB"),
        _harness.paired(case, "recorded run", seconds, "recorded", "not recorded"),
        _harness.paired(case, "replay", seconds, "replay", "not recorded"),
    ]


def _searched() -> list[_harness.Row]:
    """Epsilon at delta 1e-5 of searches over runs of epsilon 1, T = 1000."""
    rows = []
    noise = accounting.calibrate_noise_multiplier(
        lambda m: accounting.full_batch_gaussian(m, 1000, "replace_one"), 1.0, 1e-5
    )
    one = accounting.full_batch_gaussian(noise, 1000, "replace_one")
    for mean in (3, 10, 100):
        search = accounting.repeat_and_select(one, mean=mean, shape=1.0)
        runs = accounting.full_batch_gaussian(noise, 1000 * mean, "replace_one")
        charged, composed = (
            float(accounting.epsilon(*g, 1e-5)) for g in (search, runs)
        )
        rows.append(
            _harness.Row(
                f"search of {mean} trials on average",
                "epsilon",
                charged,
                "",
                f"composed {composed:.4g}",
                charged / composed,
            )
        )
    return rows
