"""A killed run goes on: the same bits, every step once, nothing spent twice or shown."""

import base64
import copy
import dataclasses
import functools
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling, training
from jaxdp.core import keys
from jaxdp.core.types import UserRecords
from jaxdp.dpzero import transform
from jaxdp.training import ledger, preparing, recording
from tests.training import victim
from tests.training.kills import Killed, killed
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

TIMING = {"compile_seconds", "train_seconds", "steps_per_second"}
ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
# Losses are called by runs alone here, and some change with every call.
ARGUMENTS: dict[str, Any] = {
    "value_fn": value_fn,
    "optimizer": OPTIMIZER,
    "check_isolation": False,
}
POISSON = sampling.TruncatedPoisson(sampling_prob=0.4)
#: Lines of a ledger of 23 steps in chunks of 5: a header and two lines a chunk.
LINES = 1 + 2 * 5


def fit(folder: Path, plan: Any = None, seed: int = 1, **kwargs: Any) -> Any:
    plan = make_plan(sampling=POISSON) if plan is None else plan
    args = ARGUMENTS | {"ledger": folder, "chunk": 5} | kwargs
    return jaxdp.fit(plan, Keys.insecure(seed), PARAMS, DATA, **args)


def resume(folder: Path, params: Any = PARAMS, data: Any = DATA, **kwargs: Any) -> Any:
    return jaxdp.resume(folder, params, data, **(ARGUMENTS | kwargs))


def killed_fit(
    folder: Path,
    lines: int,
    plan: Any = None,
    *,
    checkpoint: bool = False,
    ahead: bool = False,
    **kwargs: Any,
) -> None:
    """What is left of the run that was killed after so many lines."""
    with killed(lines, checkpoint=checkpoint, ahead=ahead):
        fit(folder, plan, **kwargs)


def killed_resume(folder: Path, lines: int, **kwargs: Any) -> None:
    with killed(lines):
        resume(folder, **kwargs)


def lines_of(folder: Path) -> list[bytes]:
    """Of a ledger but for its header, whose name of the run is drawn."""
    return (folder / ledger.LEDGER).read_bytes().splitlines()[1:]


# --- the same bits -----------------------------------------------------------------


# The header, an intent and releases, at the begin and at the end.
@pytest.mark.parametrize(
    "lines",
    [
        *(1, 2, 3, LINES - 1, LINES),
        *(pytest.param(lines, marks=pytest.mark.slow) for lines in range(4, LINES - 1)),
    ],
)
def test_killed_after_any_line(lines: int, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    killed_fit(tmp_path / "run", lines)
    again = resume(tmp_path / "run")
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")
    assert whole.report["steps_charged"] == 23
    for name in whole.report.keys() - TIMING:
        assert again.report[name] == whole.report[name], name
    report = json.loads((tmp_path / "run" / ledger.REPORT).read_text())
    assert report == {k: v for k, v in again.report.items() if k not in TIMING}


@pytest.mark.parametrize("lines", [2, 5, 6])
def test_killed_between_the_two_writes_of_a_line(lines: int, tmp_path: Path) -> None:
    """The line is in ``secret/`` only: it counts, be it an intent or releases."""
    whole = fit(tmp_path / "whole")
    killed_fit(tmp_path / "run", lines, ahead=True)
    path = tmp_path / "run" / ledger.LEDGER
    assert len(lines_of(tmp_path / "run")) == lines - 2
    torn = lines_of(tmp_path / "whole")[lines - 2][:-7]
    path.write_bytes(path.read_bytes() + torn)
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole.params)
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")


def killed_at(folder: Path, step: int, **kwargs: Any) -> None:
    """A run that ends after ``step``, with its checkpoint."""

    def callback(done: int, params: Any, info: Any) -> None:
        if done >= step:
            raise Killed

    with pytest.raises(Killed):
        fit(folder, callback=callback, **kwargs)


def dpgd() -> Any:
    plan = make_plan(sampling=POISSON)
    names = {field.name for field in dataclasses.fields(plans.DPGD)}
    return plans.DPGD(**{name: getattr(plan, name) for name in names})


@pytest.mark.parametrize(
    "family", ["dpzero", "dpgd", pytest.param("random", marks=pytest.mark.slow)]
)
def test_checkpoint_and_recomputation(family: str, tmp_path: Path) -> None:
    """DP-GD's releases are not in the ledger: it goes on from its checkpoint alone."""
    plan: Any = dpgd() if family == "dpgd" else make_plan(sampling=POISSON)
    if family == "random":
        plan = dataclasses.replace(plan, output="random")
    whole = fit(tmp_path / "whole", plan)
    for lines in (4, 5, 8):
        for checkpoint in (True, False):
            folder = tmp_path / f"{lines}{checkpoint}"
            killed_fit(folder, lines, plan, checkpoint=checkpoint)
            chex.assert_trees_all_equal(resume(folder).params, whole.params)
    # Checkpoints older than two chunks on record, and none at all.
    for keep in (True, False):
        folder = tmp_path / f"stale{keep}"
        killed_at(folder, 5, plan=plan)
        old = {p.name: p.read_bytes() for p in checkpoints(folder)}
        killed_resume(folder, 8)
        for path in checkpoints(folder):
            path.unlink()
        if keep:
            for name, content in old.items():
                (folder / ledger.SECRET / name).write_bytes(content)
        chex.assert_trees_all_equal(resume(folder).params, whole.params)


def checkpoints(folder: Path) -> list[Path]:
    return list((folder / ledger.SECRET).glob("checkpoint*"))


@pytest.mark.parametrize("family", ["dpzero", "dpgd"])
def test_large_parameters_come_from_the_releases(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoints of them, unless there is no other way."""
    monkeypatch.setattr(recording, "_LARGE", 0)
    plan: Any = dpgd() if family == "dpgd" else make_plan(sampling=POISSON)
    whole = fit(tmp_path / "whole", plan)
    killed_at(tmp_path / "run", 10, plan=plan)
    there = (tmp_path / "run" / ledger.SECRET / "checkpoint.npz").exists()
    assert there == (family == "dpgd")
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole.params)


@pytest.mark.parametrize("family", ["dpzero", "dpgd"])
def test_frozen_leaves_stay_and_are_in_no_checkpoint(
    family: str, tmp_path: Path
) -> None:
    """Not even weight decay moves them; they come back from the initial parameters."""
    plan: Any = dpgd() if family == "dpgd" else make_plan(sampling=POISSON)
    moves: dict[str, Any] = {"trainable": lambda path: path == "out"}
    steps = optax.add_decayed_weights(0.5), optax.sgd(0.1)
    decays: dict[str, Any] = {"optimizer": optax.chain(*steps)}
    whole = fit(tmp_path / "whole", plan, **moves, **decays)
    frozen = PARAMS["hidden"]["w"]
    assert np.asarray(whole.params["hidden"]["w"]).tobytes() == frozen.tobytes()
    assert np.any(whole.params["out"] != PARAMS["out"])
    killed_fit(tmp_path / "run", 6, plan, **moves, **decays)
    # Of a run that is under way, and of one that is over.
    for folder in (tmp_path / "run", tmp_path / "whole"):
        assert checkpoints(folder)
        for path in checkpoints(folder):
            with np.load(path) as file:
                sizes = [x.nbytes for name, x in file.items() if name != "run"]
            assert max(sizes) < frozen.nbytes
        again = resume(folder, **decays)
        chex.assert_trees_all_equal(again.params, whole.params)
        chex.assert_trees_all_equal(again.info, whole.info)
    other = {"hidden": {"w": frozen.at[0, 0].add(1e-6)}, "out": PARAMS["out"]}
    with pytest.raises(ValueError, match=r"params must be .* shapes at 'hidden/w'$"):
        resume(tmp_path / "run", other, **decays)
    if family == "dpzero":
        again = jaxdp.replay(tmp_path / "run", PARAMS, **decays)
        chex.assert_trees_all_equal(again.params, whole.params)
    # As ledgers once said it: one digest of all.
    header = {"leaves": training.replaying.describe_leaves(other), "params": "0"}
    with pytest.raises(ValueError, match=r"shapes at 'hidden/w', 'out'$"):
        training.replaying.check_params(header, other)
    header["params"] = training.digests.sha256(other).hexdigest()
    training.replaying.check_params(header, other)
    for edited in ({}, 5, None):
        with pytest.raises(ValueError, match=r"shapes at 'hidden/w', 'out'$"):
            training.replaying.check_params(header | {"params": edited}, other)


def test_a_checkpoint_that_lacks_a_leaf_that_moves_is_refused(tmp_path: Path) -> None:
    """It is not taken for a frozen one, whose initial numbers would be the result."""
    moves: dict[str, Any] = {"trainable": lambda path: path == "out"}
    fit(tmp_path / "run", dpgd(), **moves)
    (path,) = checkpoints(tmp_path / "run")
    with np.load(path) as file:
        arrays = dict(file)
    del arrays["1"]  # "out", after the frozen "hidden/w".
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"whole checkpoints in secret/, .* array 1"):
        resume(tmp_path / "run")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["steps"], meta_fields=["rate"]
)
@dataclasses.dataclass
class State:
    """State of an optimizer whose rate is no array, but a part of its structure."""

    steps: jax.Array
    rate: float


def test_an_optimizer_that_has_changed_is_named(tmp_path: Path) -> None:
    """As one object, by which compiled programs are kept; and as one with more state."""
    rates = [0.1]

    def update(updates: Any, state: State, params: Any = None) -> Any:
        moved = jax.tree.map(lambda x: -state.rate * x, updates)
        return moved, dataclasses.replace(state, steps=state.steps + 1)

    optimizer = optax.GradientTransformation(
        lambda params: State(jnp.zeros(()), rates[-1]), update
    )
    killed_at(tmp_path / "run", 10, plan=dpgd(), optimizer=optimizer)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    rates.append(0.2)
    with pytest.raises(ValueError, match="losses, optimizer are not those of the run"):
        resume(tmp_path / "run", optimizer=optimizer)
    resume(tmp_path / "run", optimizer=optimizer, new_attempt=True)
    more: dict[str, Any] = {"optimizer": optax.adam(0.1), "new_attempt": True}
    with pytest.raises(ValueError, match="optimizer a state like that of the run, got"):
        resume(tmp_path / "copy", **more)


def test_a_replay_that_gives_other_bits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device might round otherwise: then the same noise would cover other sums."""
    monkeypatch.setattr(recording, "_LARGE", 0)
    killed_at(tmp_path / "run", 10)
    path = tmp_path / "run" / ledger.SECRET / ledger.DIGEST
    content = json.loads(path.read_text())
    assert content["step"] == 10
    for other in ("0" * 64, "checksum:" + "0" * 32):  # On a CPU; on an accelerator.
        path.write_text(json.dumps(content | {"params": other}))
        with pytest.raises(ValueError, match="gives the parameters of the run"):
            resume(tmp_path / "run")
    assert resume(tmp_path / "run", new_attempt=True).report["steps_done"] > 10


def test_callback_sees_the_whole_run(tmp_path: Path) -> None:
    first: list[Any] = []
    second: list[Any] = []
    fit(tmp_path / "whole", callback=lambda *x: first.append(x))
    killed_fit(tmp_path / "run", 6)
    resume(tmp_path / "run", callback=lambda *x: second.append(x))
    chex.assert_trees_all_equal(first, second)


def test_a_signal_ends_a_run_between_chunks(tmp_path: Path) -> None:
    """All is on record then, no steps under way; the handlers are as they were."""
    whole = fit(tmp_path / "whole")
    handlers = [signal.getsignal(x) for x in (signal.SIGTERM, signal.SIGUSR1)]

    def preempt(number: int, at: int) -> Any:
        def callback(step: int, params: Any, info: Any) -> None:
            if step == at:
                os.kill(os.getpid(), number)

        return callback

    for function, number, at in (
        (fit, signal.SIGTERM, 5),
        (resume, signal.SIGUSR1, 20),
    ):
        with jaxdp.stop_on_signal() as stop, pytest.raises(jaxdp.Stopped) as stopped:
            function(tmp_path / "run", stop=stop, callback=preempt(number, at))
        assert (stopped.value.step, stop.name) == (at, number.name)
        record = ledger.read(tmp_path / "run")
        assert (len(record.releases), record.outstanding) == (at, None)
    assert handlers == [signal.getsignal(x) for x in (signal.SIGTERM, signal.SIGUSR1)]
    # One that comes after the last chunk stops nothing.
    with jaxdp.stop_on_signal("SIGTERM") as stop:
        last = preempt(signal.SIGTERM, 23)
        again = resume(tmp_path / "run", stop=stop, callback=last)
    assert stop()
    chex.assert_trees_all_equal(again.params, whole.params)
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")


def test_what_can_stop_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop must be for a run with a ledger"):
        fit(tmp_path / "run", ledger=None, stop=lambda: False)
    with pytest.raises(TypeError, match="stop must be callable or None, got True"):
        fit(tmp_path / "run", stop=True)
    for wrong in ("SIGNONE", signal.SIGTERM):
        with (
            pytest.raises(ValueError, match="signals must be names of signals"),
            jaxdp.stop_on_signal(wrong),
        ):
            pass
    assert not (tmp_path / "run").exists()


def test_callbacks_know_what_was_spent(tmp_path: Path) -> None:
    """Chunks that a new attempt makes again count twice, from then on."""
    plan = make_plan()
    spent: list[tuple[int, int]] = []
    infos: list[Any] = []

    def callback(step: int, params: Any, info: Any) -> None:
        spent.append((step, info.charged))
        infos.append(info)

    fit(tmp_path / "whole", plan, callback=callback)
    assert spent == [(step, step) for step in (5, 10, 15, 20, 23)]
    assert [info.epsilon() for info in infos] == [plan.spent(t) for t, _ in spent]
    assert infos[-1].epsilon() == plan.epsilon()
    assert infos[-1].epsilon(delta=1e-7) == plan.epsilon(delta=1e-7)
    releases, state = jax.tree.map(jnp.negative, infos[0])
    np.testing.assert_array_equal(releases, -infos[0].releases)
    with pytest.raises(ValueError, match="delta must be given where the plan has none"):
        training.CallbackInfo(releases, state, make_plan(delta=None), 5).epsilon()

    killed_fit(tmp_path / "run", 4, plan)  # The steps 5 to 9 are under way.
    spent.clear()
    resume(tmp_path / "run", new_attempt=True, callback=callback)
    want = [(5, 5), (10, 15), (15, 20), (18, 23)]
    assert spent == want
    assert ledger.read(tmp_path / "run").charged == 23
    assert infos[-1].epsilon() == plan.epsilon()
    spent.clear()
    resume(tmp_path / "run", callback=callback)  # It is over: what it was each time.
    assert spent == want


def stop_with_an_open_intent(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Halts a run where its last intent has no releases, however fast the machine is."""
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        if ledger.read(folder).outstanding is not None:
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.0005)
        assert process.poll() is None, "ended without a kill"


@pytest.mark.slow
def test_twenty_kills_of_a_real_process(tmp_path: Path) -> None:
    """SIGKILL at random moments: while it starts, computes, writes or synchronises.

    Minutes: twenty-one processes import JAX, and most compute a chunk again.
    """
    folder = tmp_path / "run"
    path = folder / ledger.LEDGER
    chance = random.Random(0)
    command = [sys.executable, "-m", "tests.training.victim", str(folder)]
    open_intents = 0
    for kill in range(20):
        size = path.stat().st_size if path.exists() else 0
        process = subprocess.Popen([*command, victim.WAIT], cwd=ROOT)
        if kill % 5 == 4:  # Before it comes to the run, or there.
            time.sleep(chance.uniform(0, 3))
        else:
            while (path.stat().st_size if path.exists() else 0) == size:
                assert process.poll() is None, "ended without a kill"
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.06))
        if (
            kill % 5 == 2
        ):  # While a chunk is computed, or its releases are on their way.
            stop_with_an_open_intent(process, folder)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        open_intents += path.exists() and ledger.read(folder).outstanding is not None
    assert open_intents >= 4
    cut_short = ledger.read(folder)
    assert 0 < len(cut_short.releases) < victim.PLAN.num_steps
    subprocess.run(command, cwd=ROOT, check=True)
    check_undisturbed(folder, victim.PLAN)
    report = json.loads((folder / ledger.REPORT).read_text())
    assert report["private"] is True
    assert report["steps_done"] == victim.PLAN.num_steps


def check_undisturbed(folder: Path, plan: Any) -> None:
    """Compares a victim's run with one that nobody kills, of the same keys in memory."""
    book, record, secret = ledger.Ledger.open(folder)
    book.close()
    same = dataclasses.replace(keys.from_hex(secret["keys"]), private=False)
    other = folder.with_name("whole")
    whole = jaxdp.fit(
        plan, same, PARAMS, DATA, ledger=other, chunk=victim.CHUNK, **victim.ARGUMENTS
    )
    undisturbed = ledger.read(other)
    assert record.intents == undisturbed.intents  # Every step once.
    np.testing.assert_array_equal(record.releases, undisturbed.releases)
    again = jaxdp.replay(folder, PARAMS, optimizer=victim.ARGUMENTS["optimizer"])
    chex.assert_trees_all_equal(again.params, whole.params)


@pytest.mark.slow  # Three processes import JAX, and compile a chunk.
def test_kills_of_a_real_process_that_reads_files(tmp_path: Path) -> None:
    """SIGKILL while a chunk is computed, and at another moment; the next ones are read."""
    for name, array in zip("xy", DATA, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    folder = tmp_path / "run"
    path = folder / ledger.LEDGER
    words = ["-m", "tests.training.victim", str(folder), str(tmp_path)]
    command = [sys.executable, *words]
    for kill in range(2):
        size = path.stat().st_size if path.exists() else 0
        process = subprocess.Popen([*command, victim.WAIT], cwd=ROOT)
        while (path.stat().st_size if path.exists() else 0) <= size:
            assert process.poll() is None, "ended without a kill"
            time.sleep(0.001)
        if kill == 0:
            stop_with_an_open_intent(process, folder)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert ledger.read(folder).outstanding is not None or kill
    assert len(ledger.read(folder).releases) < victim.FEWER.num_steps
    subprocess.run(command, cwd=ROOT, check=True)
    check_undisturbed(folder, victim.FEWER)


# --- what refuses ------------------------------------------------------------------


def changed_data() -> Any:
    x, y = DATA
    return (x.at[3, 2].add(1e-6), y)


@pytest.mark.parametrize("lines", [4, 5, LINES])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": changed_data()}, "data are not those of the run"),
        ({"microbatch_size": 8}, "microbatch_size is 8 and was None"),
        ({"plan": make_plan(noise_multiplier=3.0)}, "plan must be the plan of the run"),
        (
            {"params": jax.tree.map(lambda x: x + 1, PARAMS)},
            "params must be the initial",
        ),
    ],
)
def test_changes_refuse(
    change: dict[str, Any], message: str, lines: int, tmp_path: Path
) -> None:
    if lines < LINES:
        killed_fit(tmp_path / "run", lines)
    else:
        fit(tmp_path / "run")
    before = (tmp_path / "run" / ledger.LEDGER).read_bytes()
    if lines == LINES and "data" in change:
        # No digest of them is kept: whoever has ``secret/`` could try data against it.
        assert resume(tmp_path / "run", **change).report["steps_done"] == 23
    else:
        with pytest.raises(ValueError, match=message):
            resume(tmp_path / "run", **change)
    assert (tmp_path / "run" / ledger.LEDGER).read_bytes() == before
    resume(tmp_path / "run")  # Nothing is held or spoilt.


def test_other_version_or_device_refuses(tmp_path: Path) -> None:
    killed_fit(tmp_path / "run", 4)
    path = tmp_path / "run" / ledger.SECRET / ledger.RUN
    hidden = json.loads(path.read_text())
    names = ("jax", "jaxlib", "device", "processor", "XLA_FLAGS", "jax_enable_x64")
    for name, value in ((name, "0.1") for name in names):
        same = hidden["attempts"][0]["same"] | {name: value}
        path.write_text(json.dumps(hidden | {"attempts": [{"salt": "", "same": same}]}))
        with pytest.raises(ValueError, match=f"{name} is .* and was '{value}'"):
            resume(tmp_path / "run")
    # Of a version that did not know a condition.
    same = dict(hidden["attempts"][0]["same"])
    same.pop("compiler_options")
    path.write_text(json.dumps(hidden | {"attempts": [{"salt": "", "same": same}]}))
    with pytest.raises(ValueError, match=r"compiler_options is .* and was None"):
        resume(tmp_path / "run")


def other_losses(params: Any, batch: Any) -> Any:
    return 2 * value_fn(params, batch)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": optax.sgd(0.2, momentum=0.9)},
        # Other programs than the run's, as that of the other losses is.
        pytest.param({"optimizer": optax.identity()}, marks=pytest.mark.slow),
        pytest.param({"optimizer": optax.adam(0.1)}, marks=pytest.mark.slow),
        {"value_fn": other_losses},
    ],
    ids=["rate", "none", "adam", "losses"],
)
def test_other_losses_or_optimizer_refuse(
    change: dict[str, Any], tmp_path: Path
) -> None:
    killed_fit(tmp_path / "run", 6)
    with pytest.raises(ValueError, match="losses, optimizer are not those of the run"):
        resume(tmp_path / "run", **change)
    resume(tmp_path / "run")


@pytest.mark.parametrize("lines", [2, 3, 4])
@pytest.mark.parametrize(
    "made",
    [
        lambda x: optax.inject_hyperparams(optax.sgd)(learning_rate=x),
        lambda x: optax.adagrad(0.1, initial_accumulator_value=x),
        lambda x: optax.chain(optax.add_noise(1e-3, 0.5, key=int(10 * x)), OPTIMIZER),
    ],
    ids=["rate", "accumulator", "seed"],
)
def test_other_numbers_of_the_optimizer_refuse(
    made: Any, lines: int, tmp_path: Path
) -> None:
    """They are in its state, and not in its program: also where no checkpoint has them."""
    killed_fit(tmp_path / "run", lines, optimizer=made(0.1))
    with pytest.raises(ValueError, match="numbers of the optimizer are not those of"):
        resume(tmp_path / "run", optimizer=made(0.2))
    resume(tmp_path / "run", optimizer=made(0.1))


def test_records_without_digests_of_an_optimizer(tmp_path: Path) -> None:
    """Of before: a run that is over gives its result, another a new attempt alone."""
    whole = fit(tmp_path / "whole")
    killed_fit(tmp_path / "killed", 4)
    for name in ("whole", "killed"):
        path = tmp_path / name / "secret" / "run.json"
        hidden = json.loads(path.read_text())
        del hidden["attempts"][0]["same"]["numbers of the optimizer"]
        path.write_text(json.dumps(hidden))
    chex.assert_trees_all_equal(resume(tmp_path / "whole").params, whole.params)
    with pytest.raises(
        ValueError, match=r"numbers of the optimizer are not .* attempt"
    ):
        resume(tmp_path / "killed")


def test_numbers_of_python_in_an_optimizer_s_state(tmp_path: Path) -> None:
    """A flag, a count and a rate: arrays, as in the state that a step returns."""

    def init(params: Any) -> Any:
        del params
        return {"on": True, "count": 3, "rate": 0.1, "scale": np.float64(2)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        factor = -state["rate"] * state["scale"] * state["on"] / state["count"]
        state = state | {"count": state["count"] + 1}
        return jax.tree.map(lambda u: factor * u, updates), state

    given = {"optimizer": optax.GradientTransformation(init, update)}
    whole = fit(tmp_path / "whole", dpgd(), **given)
    killed_fit(tmp_path / "run", 6, dpgd(), **given)
    again = resume(tmp_path / "run", **given)
    chex.assert_trees_all_equal(again.params, whole.params)


@pytest.mark.slow  # One more program of a run.
def test_data_of_another_precision_are_the_same(tmp_path: Path) -> None:
    """NumPy's float64 becomes JAX's float32, then and now."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), DATA)
    whole = jaxdp.fit(make_plan(), Keys.insecure(1), PARAMS, wide, chunk=5, **ARGUMENTS)
    args = ARGUMENTS | {"ledger": tmp_path / "run", "chunk": 5}
    with killed(4):
        jaxdp.fit(make_plan(), Keys.insecure(1), PARAMS, wide, **args)
    chex.assert_trees_all_equal(
        resume(tmp_path / "run", data=wide).params, whole.params
    )


@pytest.mark.parametrize("family", ["dpzero", "dpgd"])
def test_checkpoints_that_are_not_the_ledger_s(family: str, tmp_path: Path) -> None:
    """Of a later step (a folder copied while it changed) or of another run."""
    plan: Any = dpgd() if family == "dpgd" else make_plan(sampling=POISSON)
    whole = fit(tmp_path / "whole", plan)
    later, run = tmp_path / "later", tmp_path / "run"
    killed_fit(later, 9, plan, checkpoint=True)
    killed_fit(tmp_path / "other", 5, plan, seed=2, checkpoint=True)
    for of in (later, tmp_path / "other"):
        shutil.rmtree(run, ignore_errors=True)
        killed_fit(run, 5, plan)
        for path in checkpoints(of):
            content = path.read_bytes()
            if of is later:  # The same run by name, of a step that it has not come to.
                content = renamed(content, run)
            (run / ledger.SECRET / path.name).write_bytes(content)
        chex.assert_trees_all_equal(resume(run).params, whole.params)


def renamed(content: bytes, folder: Path) -> bytes:
    """A checkpoint with the name of another folder's run."""
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file) | {"run": np.asarray(ledger.read(folder).header["run"])}
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


@pytest.mark.parametrize(
    "noise", ["discrete", pytest.param("laplace", marks=pytest.mark.slow)]
)
def test_resume_leaves_no_noise_in_compiled_programs(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of programs, or a dump, would show what a program holds as a constant."""
    plan = make_plan(noise=noise, sampling=sampling.FullBatch())
    if noise == "discrete":
        plan = make_plan(sampling=POISSON)  # With samples, whose root is secret too.
    killed_fit(tmp_path / "run", 6, plan)
    texts: list[str] = []
    lower = jax.stages.Lowered.compile

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        texts.append(self.as_text())
        return lower(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    jits: list[Any] = []
    monkeypatch.setattr(training.fitting.jax, "jit", spied_jit(jax.jit, jits))
    training.loop._programs.clear()
    resume(tmp_path / "run")
    own = Keys.insecure(1)
    state = plan.transform(own).init(PARAMS)
    steps = jnp.arange(3)
    drawn = jax.vmap(lambda t: transform.step_noise(plan.numbers, state.noise, t))(
        steps
    )
    secret = [np.asarray(drawn).ravel(), np.asarray(own.noise_words)]
    # (A state's key is the root's words and public ones: what it is for.)
    secret += [np.asarray(jax.random.key_data(k)) for k in (own.noise, own.sampling)]
    assert texts
    # Constants are printed as numbers, or as bytes if there are many.
    shown = "|".join(rf"(?<![\d-]){int(x)}\b" for words in secret for x in words)
    shown += "|" + "|".join(words.tobytes().hex() for words in secret)
    assert not set(re.findall(shown, "\n".join(texts), re.IGNORECASE))
    assert len(jits) <= 2  # The run's program and its replay, both in the texts.


def spied_jit(jit: Any, calls: list[Any]) -> Any:
    def spied(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return jit(*args, **kwargs)

    return spied


def test_a_folder_serves_one_run(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    with pytest.raises(ValueError, match="ledger must be a folder without a run"):
        fit(tmp_path / "run", seed=2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "secret").symlink_to(tmp_path / "run" / "secret")
    with pytest.raises(ValueError, match="a link to that of another run"):
        fit(tmp_path / "b", seed=2)


def test_a_run_whose_lock_is_gone_writes_no_more(tmp_path: Path) -> None:
    """Another run may have the folder; this one's steps would be charged in neither."""
    whole = fit(tmp_path / "whole")

    def remove(step: int, *_: Any) -> None:
        if step == 10:
            (tmp_path / "run" / "secret" / "lock").unlink()

    with pytest.raises(ValueError, match="lock was removed or exchanged"):
        fit(tmp_path / "run", callback=remove)
    assert ledger.read(tmp_path / "run").charged == 10

    def rename(step: int, *_: Any) -> None:
        if step == 23:  # The last chunk is on record; roots and report are not written.
            (tmp_path / "end").rename(tmp_path / "away")
            killed_fit(tmp_path / "end", 4)

    with pytest.raises(ValueError, match="lock was removed or exchanged"):
        fit(tmp_path / "end", callback=rename)
    for name in ("end", "away"):
        ended = resume(tmp_path / name)
        chex.assert_trees_all_equal(ended.params, whole.params)
    again = resume(tmp_path / "run")
    chex.assert_trees_all_equal(again.params, whole.params)


#: What a run writes, where a folder has its name.
FOLDERS = (
    "plan.json",
    "secret/checkpoint.npz",
    "secret/params.json",
    "secret/timing.json",
)


@pytest.mark.parametrize(
    "place",
    ["x" * 300, "/proc/nope", "file/run", "link/run", "new/../../x", "other", *FOLDERS],
)
def test_a_folder_that_cannot_be_made_costs_no_keys(place: str, tmp_path: Path) -> None:
    """Whoever asks: what a system refuses, permissions alone do not tell."""
    if place.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("")
    if place in FOLDERS:
        (tmp_path / "full" / place).mkdir(parents=True)
        place = "full"
    before = sorted(tmp_path.rglob("*"))
    keys = Keys.from_entropy()
    run = {"value_fn": value_fn, "optimizer": OPTIMIZER}
    with pytest.raises(ValueError, match=r"a folder that can be written, got .*: \w+"):
        jaxdp.fit(make_plan(), keys, PARAMS, DATA, ledger=tmp_path / place, **run)
    assert sorted(tmp_path.rglob("*")) == before
    jaxdp.fit(make_plan(), keys, PARAMS, DATA, ledger=tmp_path / "a" / "run", **run)


def test_options_of_a_resumed_run_are_bools(tmp_path: Path) -> None:
    for name in "new_attempt", "progress", "keep_noise_roots", "check_isolation":
        options: dict[str, Any] = {name: "no"}
        with pytest.raises(TypeError, match=f"{name} must be a bool"):
            jaxdp.resume(tmp_path, PARAMS, DATA, value_fn=value_fn, **options)


def test_failed_compilation_leaves_no_folder(tmp_path: Path) -> None:
    def wrong(params: Any, batch: Any) -> Any:
        return value_fn(params, batch)[:3]

    with pytest.raises(ValueError, match="one loss per record"):
        fit(tmp_path / "run", value_fn=wrong)
    assert not (tmp_path / "run").exists()


# --- the record is of what is computed ---------------------------------------------


class Host:
    """A loss that NumPy computes: nothing of it but its shape is in a program.

    Attributes:
      scale: of the losses.
      seen: what ``look`` gave in every call.
    """

    def __init__(self, look: Any = None):
        self.scale, self.seen, self._look = 1.0, [], look

    def value_fn(self, params: Any, batch: Any) -> jax.Array:
        x, _ = batch
        out = jax.ShapeDtypeStruct(x.shape[:1], np.float32)
        return jax.pure_callback(
            self._losses, out, params["out"], x, vmap_method="sequential"
        )

    def _losses(self, weights: Any, x: Any) -> Any:
        if self._look is not None:
            self.seen.append(self._look())
        slopes = np.asarray(x)[:, :5] @ np.asarray(weights)
        return np.float32(self.scale) * slopes.astype(np.float32)


def test_an_intent_is_on_disk_before_its_chunk_is_computed(tmp_path: Path) -> None:
    """Seen from within the losses: from then on the steps count, whatever becomes of it.

    Over 10 s: the ledger is read for every record of every step, and three programs
    compile.
    """
    host = Host(lambda: ledger.read(tmp_path / "run"))
    # What is asked about made-up records comes before there is a ledger.
    unchecked = {"check_isolation": False}
    fit(tmp_path / "run", value_fn=host.value_fn, **unchecked)
    chunks = [(0, 5), (5, 10), (10, 15), (15, 20), (20, 23)]
    seen = {(record.outstanding, len(record.releases)) for record in host.seen}
    assert seen == {((a, b, 0), a) for a, b in chunks}
    # And by the process that takes it up: for lost steps, and for those that follow.
    killed_fit(tmp_path / "again", 3)
    folder = tmp_path / "again"
    looks: list[Any] = []

    def look(params: Any, batch: Any) -> Any:
        jax.debug.callback(lambda: looks.append(ledger.read(folder).outstanding))
        return value_fn(params, batch)

    resume(folder, value_fn=look, new_attempt=True, **unchecked)
    jax.effects_barrier()
    assert set(looks) == {(a, b, 1) for a, b in chunks[1:]}
    assert ledger.read(folder).charged == 23


def test_a_chunk_that_was_computed_and_lost_is_charged(tmp_path: Path) -> None:
    """The losses end the process in the second chunk, when their answers are in use."""
    calls = iter(range(10_000))

    def look() -> None:
        if len(ledger.read(tmp_path / "run").releases) and next(calls) == 3:
            raise Killed

    host = Host(look)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Killed"):
        fit(tmp_path / "run", value_fn=host.value_fn)
    record = ledger.read(tmp_path / "run")
    assert (record.charged, len(record.releases)) == (10, 5)
    again = resume(tmp_path / "run", value_fn=value_fn, new_attempt=True)
    assert again.report["steps_charged"] == 23
    assert again.report["steps_done"] == 18


def test_lost_steps_that_call_python_are_not_computed_again(tmp_path: Path) -> None:
    """Even by the same function: nobody can see that it is, before it has answered."""
    host = Host()
    killed_fit(tmp_path / "run", 4, value_fn=host.value_fn)
    asked = Host(lambda: "asked")
    for again in (host, asked):
        with pytest.raises(
            ValueError, match=r"steps 5 to 9 were lost.*new_attempt=True"
        ):
            resume(tmp_path / "run", value_fn=again.value_fn)
    assert asked.seen == []
    result = resume(tmp_path / "run", value_fn=asked.value_fn, new_attempt=True)
    assert result.report["steps_done"] == 18


@pytest.mark.parametrize("kind", ["pure", "io", "ordered", "debug", "print", "none"])
def test_which_programs_call_python(kind: str, tmp_path: Path) -> None:
    def losses(params: Any, batch: Any) -> Any:
        out = value_fn(params, batch)
        like = jax.ShapeDtypeStruct((), np.float32)
        mean = out.mean()
        if kind == "pure":
            mean = jax.pure_callback(np.asarray, like, mean, vmap_method="sequential")
        if kind in ("io", "ordered"):
            mean = jax.experimental.io_callback(
                np.asarray, like, mean, ordered=kind == "ordered"
            )
        if kind == "debug":
            jax.debug.callback(lambda x: None, mean)
        if kind == "print":
            jax.debug.print("callback {}", mean)
        return out + 0 * mean + jax.numpy.linalg.qr(batch[0][:3, :3])[1].sum() * 0

    run = jax.jit(losses).lower(PARAMS, DATA).as_text()
    found = recording.calls_python(run)
    assert found == (kind != "none")


@pytest.mark.parametrize(
    ("checkpoint", "family"),
    [
        *((True, "dpgd"), (False, "dpzero")),
        pytest.param(True, "dpzero", marks=pytest.mark.slow),
        pytest.param(False, "dpgd", marks=pytest.mark.slow),
    ],
)
def test_a_chunk_that_comes_out_otherwise_is_refused(
    checkpoint: bool, family: str, tmp_path: Path
) -> None:
    """What no digest sees: another processor, or another function behind a callback."""
    plan: Any = dpgd() if family == "dpgd" else make_plan(sampling=POISSON)
    folder, scale = tmp_path / "run", [np.float32(1)]

    def losses(params: Any, batch: Any) -> jax.Array:
        out = jax.ShapeDtypeStruct((), np.float32)
        return value_fn(params, batch) * jax.pure_callback(lambda: scale[0], out)

    killed_fit(folder, 5, plan, value_fn=losses, checkpoint=checkpoint)
    before = lines_of(folder)
    scale[0] = np.float32(1.01)
    with pytest.raises(ValueError, match="steps 5 to 9 give other numbers") as refused:
        resume(folder, value_fn=losses)
    assert not any(str(x) in str(refused.value) for x in np.ravel(releases_of(folder)))
    assert lines_of(folder) == before
    scale[0] = np.float32(1)
    whole = fit(tmp_path / "whole", plan, value_fn=losses)
    shutil.copytree(folder, tmp_path / "copy")
    chex.assert_trees_all_equal(resume(folder, value_fn=losses).info, whole.info)
    # A new attempt asks for nothing that it would compare; DP-GD's needs the checkpoint.
    if family == "dpzero" or checkpoint:
        scale[0] = np.float32(0.5)
        again = resume(tmp_path / "copy", value_fn=losses, new_attempt=True)
        assert again.report["steps_done"] == 23


def releases_of(folder: Path) -> np.ndarray:
    return ledger.read(folder).releases


def test_losses_that_are_not_deterministic_are_refused(tmp_path: Path) -> None:
    """Of a run that was killed between two chunks: nothing of it is lost."""
    host = Host()
    host._look = lambda: setattr(host, "scale", host.scale * 1.01)
    killed_fit(tmp_path / "run", 5, value_fn=host.value_fn, checkpoint=True)
    with pytest.raises(ValueError, match="steps 5 to 9 give other numbers"):
        resume(tmp_path / "run", value_fn=host.value_fn)


def test_one_chunk_is_computed_again_and_no_more(tmp_path: Path) -> None:
    """The last on record, after which the lost one and the rest are computed once.

    Over 10 s on a busy machine: two plans compile.
    """
    for plan in (make_plan(), dpgd()):
        folder = tmp_path / plan.family
        steps: list[int] = []

        def losses(params: Any, batch: Any, steps: Any = steps) -> Any:
            jax.debug.callback(lambda: steps.append(1))
            return value_fn(params, batch)

        # Not counted: what is asked about made-up records.
        own: Any = {"value_fn": losses, "check_isolation": False}
        killed_fit(folder / "run", 7, plan, checkpoint=True, **own)
        jax.effects_barrier()
        calls = len(steps) // 15  # For each step.
        assert len(steps) == 15 * calls > 0
        steps.clear()
        resume(folder / "run", **own)
        jax.effects_barrier()
        assert len(steps) == (5 + 8) * calls


def test_a_ledger_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Cut back, edited, of another run, an attempt turned back: of a run that is over."""
    fit(tmp_path / "run")
    killed_fit(tmp_path / "two", 4)
    killed_resume(tmp_path / "two", 7, new_attempt=True)
    for folder in (tmp_path / "run", tmp_path / "two"):
        path = folder / ledger.LEDGER
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        back = [line.replace(b'"attempt":1', b'"attempt":0') for line in lines]
        if folder.name == "run":
            back[2] = lines[4].replace(b"[5,10]", b"[0,5]")
        for content, why in (
            (lines[:4], "was cut back: 4 lines are left"),
            (back, "was edited or exchanged"),
        ):
            path.write_bytes(b"".join(content))
            for new in (False, True):
                with pytest.raises(ValueError, match=why):
                    resume(folder, new_attempt=new)
        path.write_bytes(whole)
        # A plan with less noise, in both of its places: with a new attempt too.
        plan = folder / ledger.PLAN
        known = plan.read_bytes()
        noise = b'"noise_multiplier": 2.0', b'"noise_multiplier": 0.1'
        assert known.count(noise[0]) == lines[0].count(noise[0]) == 1
        plan.write_bytes(known.replace(*noise))
        path.write_bytes(whole.replace(*noise))
        for new in (False, True):
            with pytest.raises(ValueError, match="is another than that of the run"):
                resume(folder, new_attempt=new)
        plan.write_bytes(known)
        with pytest.raises(ValueError, match="was edited or exchanged"):
            resume(folder, new_attempt=True)
        path.write_bytes(whole)
        resume(folder)


def test_programs_whose_text_lacks_their_constants_are_refused(tmp_path: Path) -> None:
    """Other labels that a loss closes over would be the same program."""
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    try:
        with pytest.raises(ValueError, match="jaxpr_constants must be off"):
            fit(tmp_path / "run")
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", False)
    assert not (tmp_path / "run").exists()


# --- what stays when a run is over ---------------------------------------------------


def everything(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("family", ["dpzero", "dpgd", "resumed"])
def test_noise_roots_go_when_a_run_ends(family: str, tmp_path: Path) -> None:
    plan: Any = dpgd() if family == "dpgd" else make_plan(sampling=POISSON)
    own, folder = Keys.from_entropy(), tmp_path / "run"
    args = ARGUMENTS | {"ledger": folder, "chunk": 5}
    with killed(6):
        jaxdp.fit(plan, own, PARAMS, DATA, **args)
    words = list(roots(own).values())
    for word in words:  # The search finds what is there.
        assert word.hex().encode() in everything(folder)
    whole = resume(folder)
    for word in words:
        assert word.hex().encode() not in everything(folder)
        assert word not in everything(folder)
    hidden = json.loads((folder / "secret" / "run.json").read_text())
    # Nor can data be tried against a digest whose key is there.
    assert "data" not in hidden["attempts"][0]["same"]
    assert len(checkpoints(folder)) == 1
    before = everything(folder)
    again = resume(folder)
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    for name in whole.report.keys() - TIMING:
        assert again.report[name] == whole.report[name], name
    assert again.report["private"] is True
    new = resume(folder, data=changed_data(), new_attempt=True)
    chex.assert_trees_all_equal(new.params, whole.params)
    assert len(everything(folder)) > 0 and before.count(b"intent") == everything(
        folder
    ).count(b"intent")


def test_noise_roots_are_kept_for_an_audit(tmp_path: Path) -> None:
    own = Keys.from_entropy()
    args = ARGUMENTS | {"ledger": tmp_path / "run", "chunk": 5}
    whole = jaxdp.fit(
        make_plan(), own, PARAMS, DATA, keep_noise_roots=True, **args
    ).params
    secret = json.loads((tmp_path / "run" / "secret" / "run.json").read_text())
    assert secret["keys"] == keys.to_hex(own)
    resume(tmp_path / "run", keep_noise_roots=True)
    assert secret == json.loads((tmp_path / "run" / "secret" / "run.json").read_text())
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole)
    assert roots(own)["noise_words"].hex().encode() not in everything(tmp_path / "run")


def test_timings_are_not_public(tmp_path: Path) -> None:
    report = fit(tmp_path / "run").report
    shown = json.loads((tmp_path / "run" / ledger.REPORT).read_text())
    hidden = json.loads((tmp_path / "run" / "secret" / "timing.json").read_text())
    assert hidden == {name: report[name] for name in TIMING}
    assert shown == {k: v for k, v in report.items() if k not in TIMING}


# --- a new attempt -----------------------------------------------------------------


def test_new_attempt_draws_new_noise_and_ends_early(tmp_path: Path) -> None:
    """Steps 5 to 9 were under way: lost, charged twice, so 5 of 23 are missing."""
    whole = fit(tmp_path / "whole")
    killed_fit(tmp_path / "run", 4)
    for lines in (4, 5, 6, 7):
        shutil.copytree(tmp_path / "run", tmp_path / str(lines))
    again = resume(tmp_path / "run", data=changed_data(), new_attempt=True)
    record = ledger.read(tmp_path / "run")
    assert record.charged == 23
    assert len(record.releases) == 18 == again.report["steps_done"]
    assert [i.attempt for i in record.intents] == [0, 0, 1, 1, 1]
    assert record.intents[2][:2] == (5, 10)
    old, new = whole.info.releases, again.info.releases
    np.testing.assert_array_equal(old[:5], new[:5])
    assert np.all(old[5:18] != new[5:18])
    np.testing.assert_array_equal(new[18:], 0)
    # Taken up once more after kills of the new attempt: as that was begun, not the first.
    for lines in (5, 6, 7):
        folder = tmp_path / str(lines)
        killed_resume(folder, lines, data=changed_data(), new_attempt=True)
        with pytest.raises(ValueError, match="data are not those"):
            resume(folder)
        once_more = resume(folder, data=changed_data())
        chex.assert_trees_all_equal(once_more.info, again.info)
        assert once_more.report["steps_charged"] == 23
    replayed = jaxdp.replay(tmp_path / "run", PARAMS, optimizer=OPTIMIZER)
    chex.assert_trees_all_equal(replayed.params, again.params)


def test_a_callback_cannot_use_the_keys_of_the_run_again(tmp_path: Path) -> None:
    """Not of ``resume`` either, which begins the same run once more."""
    plan, own, other = make_plan(), Keys.from_entropy(), changed_data()
    args = ARGUMENTS | {"ledger": tmp_path / "run", "chunk": 5}
    with killed(4):
        jaxdp.fit(plan, own, PARAMS, DATA, **args)
    refused = []

    def again(*given: Any) -> None:
        with pytest.raises(ValueError, match=r"already served|outside every") as error:
            jaxdp.fit(plan, own, PARAMS, other, **ARGUMENTS)
        refused.append((given, "already" in str(error.value)))  # Else for shapes alone.

    # Its state is made within the run's begin.
    first = ARGUMENTS["optimizer"]
    optimizer = first._replace(
        init=lambda params: (again("init"), first.init(params))[1]
    )
    resume(tmp_path / "run", callback=again, optimizer=optimizer)
    assert (("init",), True) in refused and refused[-1][1]


def test_attempts_from_entropy_never_share_noise(tmp_path: Path) -> None:
    """Two copies of a folder, each with a new attempt on other data."""
    plan = make_plan(sampling=POISSON)
    args = ARGUMENTS | {"ledger": tmp_path / "run", "chunk": 5}
    with killed(4):
        jaxdp.fit(plan, Keys.from_entropy(), PARAMS, DATA, **args)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    one, other = (
        resume(tmp_path / name, new_attempt=True).info.releases
        for name in ("run", "copy")
    )
    assert np.all(one[5:18] != other[5:18])
    assert np.array_equal(one[:5], other[:5])


def test_an_attempt_that_released_nothing_is_forgotten(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    killed_fit(tmp_path / "run", 4)
    before = lines_of(tmp_path / "run")
    killed_resume(tmp_path / "run", 4, data=changed_data(), new_attempt=True)
    assert lines_of(tmp_path / "run") == before  # Killed before its intent.
    with pytest.raises(ValueError, match="data are not those"):
        resume(tmp_path / "run", data=changed_data())
    chex.assert_trees_all_equal(resume(tmp_path / "run").info, whole.info)


def test_new_attempt_beyond_the_budget_refuses(tmp_path: Path) -> None:
    killed_fit(tmp_path / "run", LINES - 1)  # The last chunk was under way.
    with pytest.raises(ValueError, match="new_attempt must stay within"):
        resume(tmp_path / "run", new_attempt=True)
    assert resume(tmp_path / "run").report["steps_done"] == 23


@pytest.mark.parametrize(
    ("sampler", "lines"),
    [
        pytest.param(sampling.SinglePass(1), 4, marks=pytest.mark.slow),
        (sampling.ShuffledEpochs(8), 5),
    ],
    ids=repr,
)
def test_new_attempt_of_passes_refuses(
    sampler: Any, lines: int, tmp_path: Path
) -> None:
    """It would read records once more than a pass is charged for."""
    killed_fit(tmp_path / "run", lines, make_plan(sampling=sampler))
    with pytest.raises(ValueError, match="records that were read cannot be read again"):
        resume(tmp_path / "run", new_attempt=True)
    assert resume(tmp_path / "run").report["steps_done"] == 23


def test_new_attempt_of_gaussian_and_laplace_noise(tmp_path: Path) -> None:
    """Of noise drawn in the loop, and of a table that is drawn on the host."""
    for noise in ("discrete", "laplace"):
        plan = make_plan(noise=noise)
        old = fit(tmp_path / "whole" / noise, plan).info.releases
        killed_fit(tmp_path / noise, 2, plan)
        new = resume(tmp_path / noise, new_attempt=True).info.releases
        assert np.all(old[:18] != new[:18])


# --- what is public ----------------------------------------------------------------


def roots(of: Keys) -> dict[str, bytes]:
    words = keys.to_hex(of)
    secret = ("noise", "sampling", "noise_words")
    return {name: bytes.fromhex(words[name]) for name in secret}


def test_no_public_file_holds_a_secret(tmp_path: Path) -> None:
    """Neither the roots nor the noise, in bytes, hexadecimal or base64."""
    own = Keys.from_entropy()
    plan = make_plan(sampling=POISSON)
    args = ARGUMENTS | {"ledger": tmp_path / "run", "chunk": 5}
    jaxdp.fit(plan, own, PARAMS, DATA, keep_noise_roots=True, **args)
    hidden = tmp_path / "run" / ledger.SECRET
    needles = list(roots(own).values())
    state = training.start(
        plan, plan.transform(dataclasses.replace(own, private=False)), OPTIMIZER, PARAMS
    ).opt_state[0]
    needles.append(np.asarray(jax.random.key_data(state.noise)).tobytes())
    drawn = jax.vmap(lambda t: transform.step_noise(plan.numbers, state.noise, t))(
        jnp.arange(23)
    )
    assert np.all(drawn[:5] != 0)
    needles += [np.asarray(x).tobytes() for x in (drawn, drawn[:5])]
    secret = json.loads((hidden / "run.json").read_text())
    same = secret["attempts"][0]["same"]
    needles += [bytes.fromhex(same["data"]), bytes.fromhex(same["losses, optimizer"])]
    needles.append(bytes.fromhex(secret["key"]))
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    public = [p for p in files if hidden not in p.parents]
    assert {p.name for p in public} == {"plan.json", "ledger.jsonl", "report.json"}
    for needle in needles:
        shown = (needle, needle.hex().encode(), base64.b64encode(needle).rstrip(b"="))
        for path in public:
            content = path.read_bytes()
            for text in shown:
                assert text not in content, path
    # The search finds what is there.
    assert roots(own)["noise"].hex().encode() in (hidden / "run.json").read_bytes()
    assert keys.to_hex(own)["direction"].encode() in public[0].read_bytes() + b"".join(
        p.read_bytes() for p in public
    )


def test_state_of_a_run_is_resumed_with_keys_as_text() -> None:
    own = Keys.insecure(5)
    again = keys.from_hex(json.loads(json.dumps(keys.to_hex(own))))
    for name in ("direction", "noise", "sampling"):
        a, b = (jax.random.key_data(getattr(k, name)) for k in (own, again))
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(own.noise_words, again.noise_words)
    assert again.private is False


def test_attempts_renew_what_is_secret_and_keep_directions() -> None:
    own = Keys.insecure(5)
    assert keys.renewed(own, 0) is own
    first, second = (keys.renewed(own, i) for i in (1, 2))
    seen = [tuple(roots(k).values()) for k in (own, first, second)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not set(seen[a]) & set(seen[b])
    salted = keys.renewed(own, 1, b"salt")
    assert not set(roots(salted).values()) & set(seen[1])
    for k in (first, second, salted):
        assert keys.to_hex(k)["direction"] == keys.to_hex(own)["direction"]
        assert k.private is False


def test_what_is_edited_after_it_was_verified_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were released would be released again, at what an editor chose."""
    killed_fit(tmp_path, 5)
    opened = ledger.Ledger.open

    def edited(folder: Any) -> Any:
        found = opened(folder)
        path = tmp_path / ledger.LEDGER
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        return found

    monkeypatch.setattr(ledger.Ledger, "open", edited)
    at = recording.take_up(tmp_path, None, PARAMS, new_attempt=False)
    assert at.ledger is not None
    at.ledger.close()
    assert (at.done, at.record.charged) == (10, 10)


def test_handlers_are_as_they_were_whatever_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with jaxdp.stop_on_signal("SIGTERM", "SIGTERM"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with (
        pytest.raises(ValueError, match="such as a process can take, got 'SIGKILL'"),
        jaxdp.stop_on_signal("SIGTERM", "SIGKILL"),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_callbacks_get_can_be_copied() -> None:
    info = training.CallbackInfo(jnp.zeros((2, 1)), None, make_plan(), 3)
    for other in (copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert (other.charged, other.plan) == (3, info.plan)
    assert info._replace(state=1).charged == 3


def test_a_run_of_users_that_was_charged_as_one_of_records_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of before took users within a tree for records."""
    users = UserRecords(np.ones((8, 1, 2), np.float32), np.ones((8, 1), bool))
    plan = make_plan(num_examples=8, num_steps=4, relation="zero_out")
    task: Any = {
        "value_fn": lambda w, b: ((b["u"].records[:, 0] - w) ** 2).sum(axis=-1),
        "optimizer": optax.sgd(0.1),
    }
    given: Any = (jnp.zeros(2), {"u": users})
    asked = iter([False, True])
    with monkeypatch.context() as before:
        before.setattr(preparing, "unit_of", lambda data: "record")
        with pytest.raises(jaxdp.Stopped):
            jaxdp.fit(
                *(plan, Keys.insecure(0), *given),
                ledger=tmp_path,
                chunk=2,
                stop=lambda: next(asked),
                **task,
            )
    for new_attempt in (False, True):
        with pytest.raises(ValueError, match="with, 'record', got 'user'"):
            jaxdp.resume(tmp_path, *given, new_attempt=new_attempt, **task)
