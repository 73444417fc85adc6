"""Checkpoints that are loaded into the parts that devices hold."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]


def environment() -> dict[str, str]:
    flag = "--xla_force_host_platform_device_count=8"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "8"}


def test_eight_devices() -> None:
    """All of ``eight_devices.py``, whose failures are shown."""
    file = "tests/models/language/eight_devices.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", file],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
