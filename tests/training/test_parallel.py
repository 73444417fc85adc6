"""Devices and processes that share a batch: the bits of one device that does it all."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys
from jaxdp.cli import launch
from jaxdp.training import ledger
from tests.training import two_processes
from tests.training.problem import DATA, PARAMS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Processes must have met before any of them asks JAX for an array.
PROCESS = """
import json, os, sys, jax
from unittest import mock
from jax._src import compiler, distributed

address, index, count, function, *given = sys.argv[1:]
# Programs that were compiled are written by process 0 alone: here each one has a folder.
written = compiler._cache_write
def write(*given):
    with mock.patch.object(distributed.global_state, "process_id", 0):
        return written(*given)
if cache := jax.config.jax_compilation_cache_dir:
    cache = os.path.join(cache, "process" + index) if int(index) else cache
    jax.config.update("jax_compilation_cache_dir", cache)
    compiler._cache_write = write
jax.distributed.initialize(address, num_processes=int(count), process_id=int(index))
import jaxdp
from tests.training import two_processes
print(json.dumps(getattr(two_processes, function)(*given)))
"""


def processes(
    function: str, *given: object, count: int = 2, devices: int = 2
) -> list[subprocess.Popen[str]]:
    """Processes of so many devices each, that all call a function of two_processes."""
    words = str(count), function, *map(str, given)
    with launch.held_port() as (port, held):
        return [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    PROCESS,
                    f"localhost:{port}",
                    str(index),
                    *words,
                ],
                cwd=ROOT,
                env=environment(devices),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=held,
            )
            for index in range(count)
        ]


def results(function: str, *given: object, timeout: int = 600, **of: int) -> list[Any]:
    """What a function of two_processes returns in each of the processes."""
    jobs = processes(function, *given, **of)
    try:
        ends = [job.communicate(timeout=timeout) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert not any(job.returncode for job in jobs), ends
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


def environment(devices: int) -> dict[str, str]:
    flag = f"--xla_force_host_platform_device_count={devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    # XLA's threads are as many as NPROC says: on few cores, devices would wait for some.
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "8"}


@pytest.mark.parametrize("which", ["signs", "sharded", "not signs and not sharded"])
def test_eight_devices(which: str) -> None:
    """All of ``eight_devices.py``, whose failures are shown."""
    file = "tests/training/eight_devices.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", file, "-k", which],
        cwd=ROOT,
        env=environment(8),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_processes(tmp_path: Path) -> None:
    """Two devices each. Process 0 keeps the record, which anybody replays."""
    folder = tmp_path / "run"
    budget = jaxdp.Budget.create(
        tmp_path / "budget", epsilon=1e3, delta=1e-3, relation="replace_one"
    )
    first, second = results("main", folder)

    one = jaxdp.fit(
        two_processes.PLAN, Keys.insecure(1), PARAMS, DATA, **two_processes.ARGUMENTS
    )
    want = two_processes.digest((one.params, one.info))
    assert [first["digest"], second["digest"]] == [want, want]
    assert first["devices"] == 4
    assert first["steps"] == second["steps"] == 6
    assert (first["shown"], second["shown"]) == ([2, 4, 6], [])
    assert first["keys"] == second["keys"]
    assert first["private"] is second["private"] is True
    for found in (first, second):
        assert "keys must be the same in all 2 processes" in found["own keys"]
        assert "program must be the same in all 2 processes" in found["own slices"]
        assert "note must be what JSON can hold" in found["own note"]
        assert (
            "ledger must be given in process 0, which writes it" in found["own ledger"]
        )
        assert "arrays or a source as data must be the same" in found["source here"]
        assert "data must be the same in all 2 processes" in found["own records"]
        assert (
            "num_examples = 24 records, got a ArraySource of 3" in found["short source"]
        )
        for end in found["interrupted"].values():
            other, attempt, nowhere, shown = end["refused"]
            assert "the callback is broken" in shown
            assert end["stopped"] == 4
            assert end["renewed"][1] == 6
            assert "params must be the initial parameters of the run" in other
            assert "new_attempt must be the same in all processes" in attempt
            assert "is not there; a run that was killed before it wrote" in nowhere
            assert "has been deleted" in end["unread"]
        uncharged = found["interrupted"]["zeroth"]["renewed"][0]
        assert f"for a new attempt: {budget.id}; got none" in uncharged
        assert "keys that were broadcast must serve a run of all" in found["alone"]
        assert found["together"] is True
    whole = jaxdp.fit(
        two_processes.PLAN,
        *(Keys.insecure(1), two_processes.WIDE, DATA),
        **two_processes.ARGUMENTS,
    )
    trained = jaxdp.fit(
        two_processes.GRADIENTS,
        *(Keys.insecure(1), two_processes.WIDE, DATA),
        **two_processes.ARGUMENTS | two_processes.ADAPTER,
    )
    all_split = {
        "gradients": (two_processes.GRADIENTS, {}),
        "frozen": (
            two_processes.GRADIENTS,
            {"trainable": two_processes.ADAPTER["trainable"]},
        ),
        "carried": (two_processes.CARRIED, {"optimizer": None}),
    }
    alone = {
        name: jaxdp.fit(
            plan,
            *(Keys.insecure(1), two_processes.WIDE, DATA),
            **two_processes.ARGUMENTS | given,
        )
        for name, (plan, given) in all_split.items()
    }
    before = two_processes.WIDE["hidden"]["w"]
    for index, found in enumerate((first, second)):
        halves = found["halves"]
        # In another order of sums: to a few roundings of losses over the radius.
        np.testing.assert_allclose(halves["releases"], whole.info.releases, atol=1e-3)
        assert halves["columns"] == [3 * index] * 2
        for name, other in alone.items():
            once = halves[name]
            assert once["resumed"] == [once["digest"], 6] == once["ended"]
            assert [once["stopped"], once["renewed"]] == [4, ["", 6]]
            moved = np.asarray(once["params"]["hidden"]["w"])
            assert np.array_equal(moved, before) is (name == "frozen")
            found = moved, np.asarray(once["params"]["out"])
            for mine, its in zip(found, jax.tree.leaves(other.params), strict=True):
                np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5)
        for said in halves["gone"]:
            assert "got the leaf 'hidden/w', which has been deleted" in said
        for name in ("one whole", "one whole again"):
            assert "params must be split alike in all processes" in halves[name]
        assert len(halves["shown"]) == 6
        last, all_of_it = halves["digest"]
        assert halves["shown"][-1] == last == first["halves"]["digest"][0]
        assert halves["interrupted"]["resumed"] == [all_of_it, 6]
        adapted, hidden, out = halves["adapted"]
        assert halves["adapter"]["resumed"] == [adapted, 6]
        assert np.array_equal(hidden, before)
        np.testing.assert_allclose(out, trained.params["out"], atol=1e-5)
        for end in (halves["interrupted"], halves["adapter"]):
            assert [end["stopped"], end["renewed"]] == [4, ["", 6]]
            other, attempt, nowhere, shown = end["refused"]
            assert "params must be the initial parameters of the run" in other
            assert "new_attempt must be the same in all processes" in attempt
            assert "is not there; a run that was killed before it wrote" in nowhere
            assert "the callback is broken" in shown
            assert "has been deleted" in end["unread"]
    # Whoever has the parameters whole replays it, and sees other ones.
    where, optimizer = tmp_path / "halves", two_processes.ARGUMENTS["optimizer"]
    again = jaxdp.replay(where, two_processes.WIDE, optimizer=optimizer)
    assert two_processes.digest((again.params, again.info)) == all_of_it
    with pytest.raises(ValueError, match="initial parameters of the run, got others"):
        jaxdp.replay(where, jax.tree.map(lambda x: x + 1, two_processes.WIDE))
    assert not list((where / "secret").glob("checkpoint*"))
    gradients = jaxdp.fit(
        two_processes.GRADIENTS,
        *(Keys.insecure(1), PARAMS, DATA),
        **two_processes.ARGUMENTS,
    )
    resumed = {
        "zeroth": [want, 6],
        "first": [two_processes.digest((gradients.params, gradients.info)), 6],
    }
    for name, end in resumed.items():
        assert first["interrupted"][name]["resumed"] == end
        assert second["interrupted"][name]["resumed"] == end
        data = two_processes.source() if name == "zeroth" else DATA
        with pytest.raises(ValueError, match="was begun, but devices is 1 and was 4"):
            jaxdp.resume(
                tmp_path / f"{name}-stopped", PARAMS, data, **two_processes.ARGUMENTS
            )
    assert ledger.read(folder).charged == 6
    run, attempt = budget.reservations  # By one process.
    assert attempt.what == f"new attempt of {run.run}" and attempt.cost == run.cost
    optimizer = two_processes.ARGUMENTS["optimizer"]
    again = jaxdp.replay(folder, PARAMS, optimizer=optimizer)
    chex.assert_trees_all_equal(again.params, one.params)


def test_four_processes_that_share_parameters(tmp_path: Path) -> None:
    """Two devices each: the bits of one process of eight, and no weight is gathered."""
    four = results("quarters", tmp_path / "four", count=4)
    (one,) = results("quarters", tmp_path / "one", count=1, devices=8)
    assert [end["digest"] for end in four] == [one["digest"]] * 4
    assert [end["processes"] for end in four] == [4] * 4
    # Each device has two of eight columns.
    assert [end["shards"] for end in four] == [[[7, 2]] * 2 + [[2]] * 2] * 4
    # An integer a direction, and five records' sums over the columns, at both signs.
    for end in (one, *four):
        assert {*end["exchanged"]} == {"f32[2,2,5] all-reduce", "s32[2] all-reduce"}
    books = [ledger.read(tmp_path / name) for name in ("four", "one")]
    np.testing.assert_array_equal(*(book.releases for book in books))
    assert [book.charged for book in books] == [6, 6]


def test_one_process_that_refuses_ends_both(tmp_path: Path) -> None:
    """At once and with its words; nobody waits until JAX ends the process."""
    first, second = results("refusals", tmp_path, timeout=250)
    said = "process {} of the run refused: {}".format
    missing, full = "--dataset must be there", "[Errno 28] full"
    written = f"--out must be a folder that can be written: {full}"
    assert first["data"] == [2, f"jaxdp: {said(1, missing)}\n"]
    assert second["data"] == [2, f"jaxdp: {missing}\n"]
    assert first["Ctrl-C"] == [130, "jaxdp: interrupted\n"]
    assert second["Ctrl-C"] == [2, f"jaxdp: {said(0, 'KeyboardInterrupt()')}\n"]
    assert first["folder"] == [2, f"jaxdp: {written}\n"]
    assert second["folder"] == [2, f"jaxdp: {said(0, written)}\n"]
    assert first["ledger"][0] == f"OSError: {full}"
    assert second["ledger"][0] == f"Refused: {said(0, full)}"
    assert ledger.read(tmp_path / "ledger").charged == 1
    assert [end["killed"][0] for end in (first, second)] == [
        130,
        f"Refused: {said(0, 'KeyboardInterrupt()')}",
    ]
    assert [end["again"][0] for end in (first, second)] == [0, 0]
    (reserved,) = jaxdp.Budget(tmp_path / "budget").reservations
    assert ledger.read(tmp_path / "run").header["run"] == reserved.run


@pytest.mark.parametrize(
    ("name", "count", "kills"),
    [("whole", 2, 10), ("split", 2, 10), ("checkpoints", 2, 10), ("four", 4, 3)],
)
def test_kills(name: str, count: int, kills: int, tmp_path: Path) -> None:
    """At random lines, one of them by turns; others wait for it until they are killed.

    What they release and charge in the end is what one process does that nobody kills; of
    parameters that are split between them, up to the order of sums. Minutes: each moment
    starts all processes again.
    """
    folder, drawn = tmp_path / name, random.Random(1)
    plan = two_processes.VICTIMS[name]
    moments = sorted(drawn.sample(range(4, 4 * plan.num_steps - 8), kills))
    for kill, lines in enumerate([*moments, -1]):
        who = kill % count if lines > 0 else -1
        jobs = processes("victim", folder, who, lines, count=count)
        try:
            first = jobs[max(who, 0)].communicate(timeout=600)
            if who >= 0:
                assert jobs[who].returncode == -signal.SIGKILL, first
            else:
                ends = [first, *(job.communicate(timeout=600) for job in jobs[1:])]
                assert not any(job.returncode for job in jobs), ends
                last = [json.loads(out.splitlines()[-1]) for out, _ in ends]
        finally:
            for job in jobs:
                job.kill()
                job.communicate()
    begin = PARAMS if name == "whole" else two_processes.WIDE
    one = jaxdp.fit(plan, *(Keys.insecure(1), begin, DATA), **two_processes.ARGUMENTS)
    record = ledger.read(folder)
    off = 0 if name == "whole" else 1e-3
    np.testing.assert_allclose(record.releases, one.info.releases, rtol=0, atol=off)
    assert record.charged == len(record.intents) == plan.num_steps
    for end in last:
        assert end == last[0]
        for path, want in jax.tree_util.tree_leaves_with_path(one.params):
            got = functools.reduce(lambda x, key: x[key.key], path, end)
            np.testing.assert_allclose(np.float32(got), want, rtol=0, atol=off)
    if plan.replayable:
        optimizer = two_processes.ARGUMENTS["optimizer"]
        again = jaxdp.replay(folder, begin, optimizer=optimizer)
        chex.assert_trees_all_close(again.params, one.params, rtol=0, atol=off)


def test_what_is_no_mesh_is_refused() -> None:
    given = two_processes.ARGUMENTS | {"mesh": 8}
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh or None"):
        jaxdp.fit(two_processes.PLAN, Keys.insecure(1), PARAMS, DATA, **given)


def test_a_mesh_of_one_device() -> None:
    """Here too the loop is in a ``shard_map``."""
    mesh = jax.make_mesh((1,), ("data",))
    given = two_processes.ARGUMENTS
    one, same = (
        jaxdp.fit(two_processes.PLAN, Keys.insecure(1), PARAMS, DATA, mesh=m, **given)
        for m in (None, mesh)
    )
    chex.assert_trees_all_equal(one.params, same.params)
    chex.assert_trees_all_equal(one.info, same.info)


def test_keys_of_one_process_are_its_own() -> None:
    keys = Keys.from_entropy()
    again = keys.broadcast()
    assert again.private
    chex.assert_trees_all_equal(
        *(
            jax.tree.map(lambda x: jax.random.key_data(x) if x.ndim == 0 else x, k)
            for k in (keys, again)
        )
    )
