"""A killed run goes on: the same bits, every step once, nothing spent twice or shown."""

import base64
import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, keys, ledger, plans, sampling, training
from jaxdp.training import recording
from tests.training import victim
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
ARGUMENTS: dict[str, Any] = {"value_fn": value_fn, "optimizer": OPTIMIZER}
POISSON = sampling.TruncatedPoisson(sampling_prob=0.4)
#: Lines of a ledger of 23 steps in chunks of 5: a header and two lines a chunk.
LINES = 1 + 2 * 5


def fit(folder: Path, plan: Any = None, seed: int = 1, **kwargs: Any) -> Any:
    plan = make_plan(sampling=POISSON) if plan is None else plan
    args = ARGUMENTS | {"ledger": folder, "chunk": 5} | kwargs
    return jaxdp.fit(plan, Keys.insecure(seed), PARAMS, DATA, **args)


def resume(folder: Path, params: Any = PARAMS, data: Any = DATA, **kwargs: Any) -> Any:
    return jaxdp.resume(folder, params, data, **(ARGUMENTS | kwargs))


def cut(folder: Path, lines: int, *, checkpoint: bool = False) -> None:
    """What is left of a finished run that was killed after so many lines."""
    path = folder / ledger.LEDGER
    kept = path.read_bytes().splitlines(keepends=True)[:lines]
    path.write_bytes(b"".join(kept))
    (folder / ledger.REPORT).unlink()
    if not checkpoint:
        (folder / ledger.SECRET / "checkpoint.npz").unlink()


# --- the same bits -----------------------------------------------------------------


@pytest.mark.parametrize("lines", range(1, LINES + 1))
def test_killed_after_any_line(lines: int, tmp_path: Path) -> None:
    whole = fit(tmp_path / "run")
    before = (tmp_path / "run" / ledger.LEDGER).read_bytes()
    cut(tmp_path / "run", lines)
    again = resume(tmp_path / "run")
    chex.assert_trees_all_equal(again.params, whole.params)
    chex.assert_trees_all_equal(again.info, whole.info)
    assert (tmp_path / "run" / ledger.LEDGER).read_bytes() == before
    timing = {"compile_seconds", "train_seconds", "steps_per_second"}
    assert whole.report["steps_charged"] == 23
    for name in whole.report.keys() - timing:
        assert again.report[name] == whole.report[name], name
    report = json.loads((tmp_path / "run" / ledger.REPORT).read_text())
    assert report == again.report


def test_killed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    whole = fit(tmp_path / "run")
    path = tmp_path / "run" / ledger.LEDGER
    before = path.read_bytes()
    cut(tmp_path / "run", 5)
    path.write_bytes(path.read_bytes()[:-7])
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole.params)
    assert path.read_bytes() == before


class Killed(Exception):
    """Stands for the end of the process."""


def killed_at(folder: Path, step: int, **kwargs: Any) -> None:
    """A run that ends after ``step``, with its checkpoint."""

    def callback(done: int, params: Any, info: Any) -> None:
        if done >= step:
            raise Killed

    with pytest.raises(Killed):
        fit(folder, callback=callback, **kwargs)


@pytest.mark.parametrize("family", ["dpzero", "dpgd", "random"])
def test_checkpoint_and_recomputation(family: str, tmp_path: Path) -> None:
    """DP-GD's releases are not in the ledger: it goes on from its checkpoint alone."""
    plan: Any = make_plan(sampling=POISSON)
    if family == "dpgd":
        names = {field.name for field in dataclasses.fields(plans.DPGD)}
        plan = plans.DPGD(**{name: getattr(plan, name) for name in names})
    if family == "random":
        plan = dataclasses.replace(plan, output="random")
    whole = fit(tmp_path / "whole", plan)
    killed_at(tmp_path / "run", 10, plan=plan)
    stale = tmp_path / "stale"
    shutil.copytree(tmp_path / "run", stale)
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole.params)
    # Two more chunks on record, the checkpoint older than they.
    shutil.copy(tmp_path / "run" / ledger.LEDGER, stale / ledger.LEDGER)
    lines = (stale / ledger.LEDGER).read_bytes().splitlines(keepends=True)
    (stale / ledger.LEDGER).write_bytes(b"".join(lines[:10]))
    chex.assert_trees_all_equal(resume(stale).params, whole.params)


@pytest.mark.parametrize("family", ["dpzero", "dpgd"])
def test_large_parameters_come_from_the_releases(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoints of them, unless there is no other way."""
    monkeypatch.setattr(recording, "_LARGE", 0)
    plan: Any = make_plan(sampling=POISSON)
    if family == "dpgd":
        names = {field.name for field in dataclasses.fields(plans.DPGD)}
        plan = plans.DPGD(**{name: getattr(plan, name) for name in names})
    whole = fit(tmp_path / "whole", plan)
    killed_at(tmp_path / "run", 10, plan=plan)
    there = (tmp_path / "run" / ledger.SECRET / "checkpoint.npz").exists()
    assert there == (family == "dpgd")
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole.params)


def test_a_replay_that_gives_other_bits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device might round otherwise: then the same noise would cover other sums."""
    monkeypatch.setattr(recording, "_LARGE", 0)
    killed_at(tmp_path / "run", 10)
    path = tmp_path / "run" / ledger.SECRET / recording._DIGEST
    content = json.loads(path.read_text())
    assert content["step"] == 10
    path.write_text(json.dumps(content | {"params": "0" * 64}))
    with pytest.raises(ValueError, match="gives the parameters of the run"):
        resume(tmp_path / "run")
    assert resume(tmp_path / "run", new_attempt=True).report["steps_done"] > 10


def test_callback_sees_the_whole_run(tmp_path: Path) -> None:
    first: list[Any] = []
    second: list[Any] = []
    fit(tmp_path / "run", callback=lambda *x: first.append(x))
    cut(tmp_path / "run", 6)
    resume(tmp_path / "run", callback=lambda *x: second.append(x))
    chex.assert_trees_all_equal(first, second)


def test_twenty_kills_of_a_real_process(tmp_path: Path) -> None:
    """SIGKILL at random moments: while it starts, computes, writes or synchronises.

    Over 30 s: twenty processes import JAX.
    """
    folder = tmp_path / "run"
    path = folder / ledger.LEDGER
    chance = random.Random(0)
    command = [sys.executable, "-m", "tests.training.victim", str(folder)]
    for kill in range(20):
        size = path.stat().st_size if path.exists() else 0
        process = subprocess.Popen(command, cwd=ROOT)
        if kill % 5 == 4:  # Before it comes to the run, or there.
            time.sleep(chance.uniform(0, 3))
        else:
            while (path.stat().st_size if path.exists() else 0) == size:
                assert process.poll() is None, "ended without a kill"
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    cut_short = ledger.read(folder)
    assert 0 < len(cut_short.releases) < victim.PLAN.num_steps
    subprocess.run(command, cwd=ROOT, check=True)
    # The same keys, undisturbed.
    book, record, secret = ledger.Ledger.open(folder)
    book.close()
    same = keys.from_hex(secret["keys"])
    whole = jaxdp.fit(
        victim.PLAN,
        dataclasses.replace(same, private=False),
        PARAMS,
        DATA,
        ledger=tmp_path / "whole",
        chunk=10,
        **victim.ARGUMENTS,
    )
    undisturbed = ledger.read(tmp_path / "whole")
    assert record.intents == undisturbed.intents  # Every step once.
    np.testing.assert_array_equal(record.releases, undisturbed.releases)
    again = jaxdp.replay(folder, PARAMS, optimizer=victim.ARGUMENTS["optimizer"])
    chex.assert_trees_all_equal(again.params, whole.params)
    report = json.loads((folder / ledger.REPORT).read_text())
    assert report["private"] is True
    assert report["steps_done"] == victim.PLAN.num_steps


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
    fit(tmp_path / "run")
    if lines < LINES:
        cut(tmp_path / "run", lines)
    before = (tmp_path / "run" / ledger.LEDGER).read_bytes()
    with pytest.raises(ValueError, match=message):
        resume(tmp_path / "run", **change)
    assert (tmp_path / "run" / ledger.LEDGER).read_bytes() == before
    resume(tmp_path / "run")  # Nothing is held or spoilt.


def test_other_version_or_device_refuses(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    cut(tmp_path / "run", 4)
    path = tmp_path / "run" / ledger.SECRET / ledger.RUN
    hidden = json.loads(path.read_text())
    for name, value in (("jax", "0.1"), ("jaxlib", "0.1"), ("device", "abacus")):
        same = hidden["attempts"][0]["same"] | {name: value}
        path.write_text(json.dumps(hidden | {"attempts": [{"salt": "", "same": same}]}))
        with pytest.raises(ValueError, match=f"{name} is .* and was '{value}'"):
            resume(tmp_path / "run")


def other_losses(params: Any, batch: Any) -> Any:
    return 2 * value_fn(params, batch)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": optax.sgd(0.2, momentum=0.9)},
        {"optimizer": None},
        {"optimizer": optax.adam(0.1)},
        {"value_fn": other_losses},
    ],
    ids=["rate", "none", "adam", "losses"],
)
def test_other_losses_or_optimizer_refuse(
    change: dict[str, Any], tmp_path: Path
) -> None:
    fit(tmp_path / "run")
    cut(tmp_path / "run", 6)
    with pytest.raises(ValueError, match="losses, optimizer are not those of the run"):
        resume(tmp_path / "run", **change)
    resume(tmp_path / "run")


def test_data_of_another_precision_are_the_same(tmp_path: Path) -> None:
    """NumPy's float64 becomes JAX's float32, then and now."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), DATA)
    keys_of_run = Keys.insecure(1)
    args = ARGUMENTS | {"ledger": tmp_path / "run", "chunk": 5}
    whole = jaxdp.fit(make_plan(), keys_of_run, PARAMS, wide, **args)
    cut(tmp_path / "run", 4)
    chex.assert_trees_all_equal(
        resume(tmp_path / "run", data=wide).params, whole.params
    )


@pytest.mark.parametrize("family", ["dpzero", "dpgd"])
def test_checkpoints_that_are_not_the_ledger_s(family: str, tmp_path: Path) -> None:
    """Of a later step (a folder copied while it changed) or of another run."""
    plan: Any = make_plan(sampling=POISSON)
    if family == "dpgd":
        names = {field.name for field in dataclasses.fields(plans.DPGD)}
        plan = plans.DPGD(**{name: getattr(plan, name) for name in names})
    whole = fit(tmp_path / "run", plan)
    fit(tmp_path / "other", plan, seed=2)
    cut(tmp_path / "run", 5, checkpoint=True)  # Knows of step 23, the ledger of 5.
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole.params)
    cut(tmp_path / "run", 5)
    foreign = (tmp_path / "other" / ledger.SECRET / "checkpoint.npz").read_bytes()
    (tmp_path / "run" / ledger.SECRET / "checkpoint.npz").write_bytes(foreign)
    chex.assert_trees_all_equal(resume(tmp_path / "run").params, whole.params)


def test_resume_leaves_no_noise_in_compiled_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of programs, or a dump, would show what a program holds as a constant."""
    fit(tmp_path / "run")
    cut(tmp_path / "run", 6)
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
    plan = make_plan(sampling=POISSON)
    table = np.asarray(plan.transform(Keys.insecure(1)).init(PARAMS).noise)
    numbers = [str(int(x)) for x in table[:3, 0]]
    assert texts
    assert not any(number in text for number in numbers for text in texts)
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


def test_failed_compilation_leaves_no_folder(tmp_path: Path) -> None:
    def wrong(params: Any, batch: Any) -> Any:
        return value_fn(params, batch)[:3]

    with pytest.raises(ValueError, match="one loss per record"):
        fit(tmp_path / "run", value_fn=wrong)
    assert not (tmp_path / "run").exists()


# --- a new attempt -----------------------------------------------------------------


def test_new_attempt_draws_new_noise_and_ends_early(tmp_path: Path) -> None:
    """Steps 5 to 9 were under way: lost, charged twice, so 5 of 23 are missing."""
    whole = fit(tmp_path / "run")
    cut(tmp_path / "run", 4)
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
        cut(tmp_path / "run", lines)
        with pytest.raises(ValueError, match="data are not those"):
            resume(tmp_path / "run")
        once_more = resume(tmp_path / "run", data=changed_data())
        chex.assert_trees_all_equal(once_more.info, again.info)
        assert once_more.report["steps_charged"] == 23
    replayed = jaxdp.replay(tmp_path / "run", PARAMS, optimizer=OPTIMIZER)
    chex.assert_trees_all_equal(replayed.params, again.params)


def test_attempts_from_entropy_never_share_noise(tmp_path: Path) -> None:
    """Two copies of a folder, each with a new attempt on other data."""
    plan = make_plan(sampling=POISSON)
    args = ARGUMENTS | {"ledger": tmp_path / "run", "chunk": 5}
    jaxdp.fit(plan, Keys.from_entropy(), PARAMS, DATA, **args)
    cut(tmp_path / "run", 4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    one, other = (
        resume(tmp_path / name, new_attempt=True).info.releases
        for name in ("run", "copy")
    )
    assert np.all(one[5:18] != other[5:18])
    assert np.array_equal(one[:5], other[:5])


def test_an_attempt_that_released_nothing_is_forgotten(tmp_path: Path) -> None:
    whole = fit(tmp_path / "run")
    cut(tmp_path / "run", 4)
    before = (tmp_path / "run" / ledger.LEDGER).read_bytes()
    resume(tmp_path / "run", data=changed_data(), new_attempt=True)
    (tmp_path / "run" / ledger.LEDGER).write_bytes(before)  # Killed before its intent.
    (tmp_path / "run" / ledger.SECRET / "checkpoint.npz").unlink()
    with pytest.raises(ValueError, match="data are not those"):
        resume(tmp_path / "run", data=changed_data())
    chex.assert_trees_all_equal(resume(tmp_path / "run").info, whole.info)


def test_new_attempt_beyond_the_budget_refuses(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    cut(tmp_path / "run", LINES - 1)  # The last chunk was under way.
    with pytest.raises(ValueError, match="new_attempt must stay within"):
        resume(tmp_path / "run", new_attempt=True)
    assert resume(tmp_path / "run").report["steps_done"] == 23


@pytest.mark.parametrize("lines", [4, 5])
@pytest.mark.parametrize(
    "sampler", [sampling.SinglePass(1), sampling.ShuffledEpochs(8)], ids=repr
)
def test_new_attempt_of_passes_refuses(
    sampler: Any, lines: int, tmp_path: Path
) -> None:
    """It would read records once more than a pass is charged for."""
    fit(tmp_path / "run", make_plan(sampling=sampler))
    cut(tmp_path / "run", lines)
    with pytest.raises(ValueError, match="records that were read cannot be read again"):
        resume(tmp_path / "run", new_attempt=True)
    assert resume(tmp_path / "run").report["steps_done"] == 23


def test_new_attempt_of_exact_and_float_noise(tmp_path: Path) -> None:
    for noise in ("discrete", "gaussian"):
        plan = make_plan(noise=noise)
        old = fit(tmp_path / noise, plan).info.releases
        cut(tmp_path / noise, 2)
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
    jaxdp.fit(plan, own, PARAMS, DATA, **args)
    hidden = tmp_path / "run" / ledger.SECRET
    needles = list(roots(own).values())
    state = training.start(
        plan, plan.transform(dataclasses.replace(own, private=False)), OPTIMIZER, PARAMS
    ).opt_state[0]
    needles.append(np.asarray(state.noise).tobytes())
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
