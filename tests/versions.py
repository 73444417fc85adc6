"""Tests of the wheel with the newest and the lowest dependencies: ``make versions``.

Sdist and wheel are built once. Each environment gets the wheel and what it needs from the
package index, and runs a command, a short training, the example of the README and fast
tests from the sdist; a folder ``jaxdp`` to import by mistake is not there. The versions of
``constraints.txt`` are those of ``make test``.

Environments stay in ``.venv-versions``, and are used again while what they are made from
is the same; the newest versions are looked up once a day.
"""

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv-versions"
#: In a checkout, and made there.
NO_SOURCES = (
    ".venv*",
    ".git",
    "*cache*",
    "*.egg-info",
    "build",
    "_build",
    "dist",
    "runs",
    "log.txt",
)
LOWEST = ROOT / "tests" / "lowest.txt"
CASES = ("3.11-lowest", "3.12-newest", "3.13-newest")
TOOLS = ("pytest>=8.4", "hypothesis>=6.110", "cloudpickle>=3", "shtab>=1.7")
#: About a minute of one core.
TESTS = (
    "tests/accounting/test_events.py",
    "tests/accounting/test_gaussian.py",
    "tests/core/test_keys.py",
    "tests/core/test_noise.py",
    "tests/data/test_datasets.py",
    "tests/kernels/test_fixed_point.py",
    "tests/kernels/test_lazy.py",
    "tests/kernels/test_sphere_ball.py",
    "tests/kernels/test_threefry.py",
    "tests/models/test_networks.py",
    "tests/test_cli.py::test_command_as_a_process",
    "tests/test_cli.py::test_train_writes_everything",
    "tests/test_golden.py",
    "tests/training/test_fit.py",
    "tests/training/test_resume.py::test_checkpoint_and_recomputation",
    "tests/training/test_resume.py::test_killed_after_any_line",
)
#: Where pyenv and uv have theirs: a variable, and the interpreters of a version below it.
PLACES = {
    "PYENV_ROOT": "versions/{}.*/bin/python",
    "UV_PYTHON_INSTALL_DIR": "cpython-{0}.*/bin/python{0}",
}
#: Printed by each environment: what was installed, and from where jaxdp comes.
FOUND = """
import importlib.metadata as m, json, jaxdp
names = ("jax", "numpy", "scipy", "flax")
print(json.dumps({"file": jaxdp.__file__, **{n: m.version(n) for n in names}}))
"""
EPSILON = "epsilon --noise-multiplier 1 --num-steps 1000 --num-examples 60000"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Built(NamedTuple):
    """What is tested: a wheel, and the sources of the sdist without the library."""

    wheel: Path
    sources: Path


def run(words: list[object], cwd: Path, **env: str) -> str:
    """Runs a command that must succeed; returns what it printed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}\n{done.stdout[-6000:]}")
    return done.stdout


def find_python(version: str) -> str | None:
    """Returns a Python of that version: on the path, in ``PLACES``, or beside this one."""
    found: list[Any] = [shutil.which(f"python{version}")]
    for variable, pattern in PLACES.items():
        if place := os.environ.get(variable):
            found += sorted(Path(place).glob(pattern.format(version)))
    # Both have the folders of all versions in one.
    beside = Path(sys.base_prefix).parent
    found += sorted(beside.glob(f"*{version}.*/bin/python{version}"))
    ask = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    for python in filter(None, found):
        done = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.strip() == version:
            return str(python)
    return None


def build() -> Built:
    """Builds the sdist, and the wheel from it, in a copy: the checkout may be in use."""
    copy, out, sources = HOME / "copy", HOME / "dist", HOME / "sources"
    for folder in copy, out, sources:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NO_SOURCES)
    )
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, "."], copy)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(sources, filter="data")
    (tree,) = sources.iterdir()
    for name in ("jaxdp", "kernels"):
        shutil.rmtree(tree / name)
    return Built(wheel, tree)


def install(case: str, python: str, wheel: Path) -> Path:
    """Returns the Python of an environment that has the wheel and what it needs."""
    lowest = case.endswith("-lowest")
    folder = HOME / case
    own, stamp = folder / "bin" / "python", folder / "stamp"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        needs = re.findall("^Requires-Dist: .*$", archive.read(name).decode(), re.M)
    made_from = [*needs, *TOOLS, run([python, "--version"], ROOT)]
    made_from.append(LOWEST.read_text() if lowest else str(datetime.date.today()))
    digest = hashlib.sha256("\n".join(made_from).encode()).hexdigest()
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if not (stamp.exists() and stamp.read_text() == digest):
        run([python, "-m", "venv", "--clear", folder], ROOT)
        run([*pip, *(["-c", LOWEST] if lowest else []), wheel, *TOOLS], ROOT)
        stamp.write_text(digest)
    run([*pip, "--no-deps", "--force-reinstall", wheel], ROOT)
    return own


def check(case: str, python: str, built: Built) -> dict[str, str]:
    """Makes one environment and runs what must work there; returns a row of the table."""
    begin = time.monotonic()
    row = {"environment": case}
    try:
        own = install(case, python, built.wheel)
        work = HOME / case / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        cache = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            # jaxlib 0.10.0 logs errors, which are none, about programs of its cache.
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        row["python"] = run([own, "--version"], work).split()[1]
        found = json.loads(run([own, "-W", "error", "-c", FOUND], work, **cache))
        assert Path(found.pop("file")).is_relative_to(HOME / case), found
        row |= found
        jaxdp = own.with_name("jaxdp")
        said = run([jaxdp, "--version"], work, **cache)
        assert built.wheel.name.split("-")[1] in said, said
        words = [*EPSILON.split(), "--batch-size", "256", "--json"]
        answer = json.loads(run([jaxdp, *words], work, **cache))
        row["epsilon"] = f"{answer['epsilon']:.6f}"
        words = "train --dataset digits --epsilon 2 --num-steps 300 --out demo --quiet"
        run([jaxdp, *words.split()], work, **cache)
        report = json.loads((work / "demo" / "report.json").read_text())
        row["demo"] = f"accuracy {report['test_accuracy']:.2f}"
        readme = (built.sources / "README.md").read_text(encoding="utf-8")
        blocks = BLOCK.findall(readme)
        for block in blocks:
            (work / "example.py").write_text(block, encoding="utf-8")
            run([own, "example.py"], work, **cache)
        row["README"] = f"{len(blocks)} of {len(blocks)}"
        words = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
        out = run([own, "-m", "pytest", *words], built.sources, **cache)
        row["tests"] = re.findall(r"\d+ passed", out)[-1]
    except Exception as error:
        print(f"\n{case}: {error}", file=sys.stderr)
        row["tests"] = "FAILED"
    row["seconds"] = f"{time.monotonic() - begin:.0f}"
    return row


def show(rows: list[dict[str, str]]) -> None:
    """Prints rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([row.get(name, "-") for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def main() -> int:
    """Tests each environment whose Python is found; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Test the wheel in other environments."
    )
    parser.add_argument("cases", nargs="*", default=CASES, metavar="PYTHON-KIND")
    cases = parser.parse_args().cases
    for case in cases:
        if not re.fullmatch(r"3\.\d+-(lowest|newest)", case):
            parser.error(f"{case!r} is not like {' or '.join(CASES)}")
    pythons = {case: find_python(case.split("-")[0]) for case in cases}
    for case, python in pythons.items():
        if python is None:
            print(
                f"{case}: skipped, no Python {case.split('-')[0]} was found on PATH, "
                f"where {' and '.join(PLACES)} say, or beside {sys.base_prefix}"
            )
    built = build()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(check, case, python, built)
            for case, python in pythons.items()
            if python is not None
        ]
        rows = [future.result() for future in futures]
    if rows:
        show(rows)
    return int(any(row["tests"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
