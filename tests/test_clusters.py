"""Scripts of ``docs/guides/clusters.md``, run as processes of this machine.

They are read from the page; only its sizes and paths are other ones here. What a cluster
adds is a stand-in: an ``srun`` or ``gcloud`` that starts tasks with the variables that JAX
reads, or the index that Kubernetes gives to a pod.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxdp.cli import main
from tests.training import kills

pytestmark = pytest.mark.slow  # Twelve processes import JAX.

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "guides" / "clusters.md").read_text(encoding="utf-8")
STEPS = 5
CONFIG = f"""
algorithm = "dpgd"
dataset = "quadratic_identity"
num-steps = {STEPS}
seed = 1
json = true
"""


def together(task: str) -> str:
    """A program of tasks 0 and 1 that ends with the larger of their exit codes."""
    return f"""
        tasks= worst=0
        for i in 0 1; do
            {task} &
            tasks="$tasks $!"
        done
        for task in $tasks; do
            wait "$task"
            code=$?
            [ "$code" -le "$worst" ] || worst=$code
        done
        exit "$worst"
    """


#: What the commands of a cluster are here.
PROGRAMS = {
    "jaxdp": f'''
        echo $$ >> "$HOME/tasks"
        exec "{sys.executable}" -m jaxdp.cli "$@"
    ''',
    "srun": f"""
        export SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1
        {together('SLURM_PROCID=$i SLURM_LOCALID=$i "$@"')}
    """,
    "scontrol": 'echo "$@" >> "$HOME/asked"',
    # Names of a slice of several are empty: JAX would ask Google's servers for them.
    "gcloud": f"""
        export JAX_FORCE_TPU_INIT=1 TPU_WORKER_HOSTNAMES=localhost,localhost
        export MEGASCALE_COORDINATOR_ADDRESS= MEGASCALE_NUM_SLICES= MEGASCALE_SLICE_ID=
        for command; do :; done
        {together('TPU_WORKER_ID=$i sh -c "${command#--command=}"')}
    """,
}


def block(caption: str) -> str:
    """A block of code of the page."""
    found = re.search(rf":caption: {re.escape(caption)}\n(.*?)^```", PAGE, re.M | re.S)
    assert found, caption
    return found.group(1)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else takes: of those that JAX takes by the number of a job."""
    for number in range(61440, 65500):
        with socket.socket() as held:
            try:
                held.bind(("localhost", number))
            except OSError:
                continue
            # From here on JAX can listen at it, and no socket without this option.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            yield number
            return
    raise AssertionError("no port is free")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the options of the run, and the commands of a cluster in the path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "run.toml").write_text(CONFIG)
    for name, value in {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "NPROC": "2",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def check_stops_and_goes_on(
    home: Path,
    start: Callable[[], Sequence[subprocess.Popen[str]]],
    send: Callable[[Sequence[subprocess.Popen[str]]], None],
) -> None:
    """Two processes end with 75 where they are told to stop; the same command goes on.

    They end with the parameters of one process that computes as large slices.
    """
    out = home / "runs" / "mine"

    def ended(signalled: bool) -> tuple[list[int], str]:
        with mock.patch.dict(os.environ, kills.WAITING if signalled else {}):
            jobs = start()
        try:
            while signalled and kills.count_lines(out) < 3:
                assert not any(job.poll() for job in jobs)
                time.sleep(0.01)
            if signalled:
                send(jobs)
            said = [job.communicate(timeout=600) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        return [job.returncode for job in jobs], "".join(a + b for a, b in said)

    codes, said = ended(True)
    assert {*codes} == {75}, said
    stopped = rf"jaxdp: stopped by SIG\w+ after step 1 of {STEPS}, "
    assert len(re.findall(stopped, said)) == said.count("waits for its signal") == 2
    assert not (out / "report.json").exists()
    codes, said = ended(False)
    assert {*codes} == {0}, said
    report = json.loads((out / "report.json").read_text())
    assert report["steps_charged"] == report["steps_done"] == STEPS
    whole = home / "whole"
    options = ("--config", home / "run.toml", "--out", whole, "--microbatch-size", 5000)
    assert main(["train", *map(str, options)]) == 0
    with np.load(out / "params.npz") as got, np.load(whole / "params.npz") as want:
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])


def check_script(home: Path, script: str, number: int) -> None:
    """The same for a script whose command starts two tasks: they get the signal."""
    (home / "script").write_text(script)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def start() -> list[subprocess.Popen[str]]:
        return [subprocess.Popen(["bash", "script"], cwd=home, text=True, **pipes)]

    def send(jobs: Any) -> None:
        del jobs
        for task in (home / "tasks").read_text().split():
            os.kill(int(task), number)

    check_stops_and_goes_on(home, start, send)


def test_the_slurm_script(
    cluster: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX finds the tasks by SLURM's variables; a job that is stopped is queued again.

    ``--signal`` sends to the tasks, not to the script.
    """
    # JAX takes the port from the number of the job.
    job = str(port - 61440)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    check_script(cluster, block("train.sbatch"), signal.SIGUSR1)
    assert (cluster / "asked").read_text() == f"requeue {job}\n"


def test_the_script_of_tpu_slices(
    cluster: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX finds the workers by the variables of a slice; SIGTERM comes to them."""
    monkeypatch.setenv("JAX_COORDINATOR_PORT", str(port))
    script = block("train.sh")
    assert "--worker=all" in script
    check_script(cluster, script.replace("/mnt/disk", str(cluster)), signal.SIGTERM)


def test_the_job_of_kubernetes(cluster: Path, port: int) -> None:
    """Each pod has its index in the environment; SIGTERM comes to the pods."""
    text = block("train.yaml")
    found = re.search(r"- (exec jaxdp .*?)\n *resources:", text, re.S)
    assert found and "command: [sh, -c]" in text
    command = " ".join(found.group(1).split())  # As YAML folds lines.
    pods = re.findall(r"(?:completions|parallelism): (\d+)", text)
    address = re.search(r'"(run-0\.run:\d+),\$JOB_COMPLETION_INDEX,(\d+)"', command)
    assert address and pods == [address[2]] * 2
    # Pod i of the job is run-i, in the domain of the service.
    assert text.count("metadata: {name: run}") == 2 and "subdomain: run\n" in text
    here = f"localhost:{port}"
    command = command.replace(f",{address[2]}", ",2").replace(address[1], here)
    command = command.replace("/data", str(cluster))

    def start() -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                ["sh", "-c", command],
                env=os.environ | {"JOB_COMPLETION_INDEX": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]

    def send(jobs: Sequence[subprocess.Popen[str]]) -> None:
        for job in jobs:  # ``exec``: the shell's process is the command's.
            job.send_signal(signal.SIGTERM)

    check_stops_and_goes_on(cluster, start, send)
