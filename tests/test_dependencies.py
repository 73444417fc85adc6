"""Imports are what pyproject.toml declares, and are loaded only where they are needed."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import versions

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: Import names that are not those of the distribution.
MODULES = {"attrs": "attr", "dp-accounting": "dp_accounting", "scikit-learn": "sklearn"}
#: Extras whose packages the library imports.
OPTIONAL = ("lm", "mf", "tables")
#: Declared, but no module of their own: jaxlib is jax's; `jax[cuda12]` is jax.
UNNAMED = {"jaxlib", "jax"}
#: Programs that the Makefile, tests or the site's settings call by name, and what JAX
#: imports for the tests.
PROGRAMS = {
    "build",
    "flatbuffers",
    "ipykernel",
    "pyright",
    "pytest-xdist",
    "ruff",
    "setuptools",
    "twine",
}


def names(requirements: list[str]) -> set[str]:
    """Names of requirements, without versions and extras."""
    found = (re.match(r"[A-Za-z0-9._-]+", text) for text in requirements)
    return {match.group() for match in found if match}


def module(name: str) -> str:
    """The name under which a distribution is imported."""
    return MODULES.get(name, name.replace("-", "_"))


def imported(*folders: str) -> dict[str, set[str]]:
    """Third-party modules, with the files that import them, in functions as well."""
    found: dict[str, set[str]] = {}
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        if ROOT / "jaxdp" / "kernels" in path.parents:  # The link.
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                whole = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                whole = [node.module or ""]
            else:
                continue
            for top in {name.partition(".")[0] for name in whole}:
                if top not in sys.stdlib_module_names | {"jaxdp", "bench", "tests"}:
                    found.setdefault(top, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_the_library_imports_what_it_declares() -> None:
    """Both ways: nothing that is not declared, nothing declared for no use."""
    core = {module(name) for name in names(PROJECT["dependencies"]) - UNNAMED} | {"jax"}
    optional = {module(n) for extra in OPTIONAL for n in names(EXTRAS[extra])}
    assert not core & optional
    assert set(imported("jaxdp", "kernels")) == core | optional


def test_what_is_optional_is_imported_inside_functions() -> None:
    optional = {module(n) for extra in OPTIONAL for n in names(EXTRAS[extra])}
    for name in optional:
        for file in imported("jaxdp", "kernels")[name]:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            imports = (
                n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)
            )
            words = "\n".join(map(ast.unparse, imports))
            assert not re.search(rf"\b{name}\b", words), (name, file)


def test_tools_are_declared_and_used() -> None:
    """Tests, benchmarks and pages; `parity` is what they compare with where it is there."""
    core = names(PROJECT["dependencies"])
    every = core.union(*(names(extra) for extra in EXTRAS.values()))
    used = imported("tests", "bench", "docs", "jaxdp", "kernels")
    from_others = {"docutils", "ml_dtypes", "packaging"}  # Of sphinx, jax, pytest.
    for_themselves = {"pandas", "polars", "datasets"}  # Only if they are there.
    known = {module(name) for name in every}
    assert set(used) <= known | from_others | for_themselves
    settings = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    settings += "".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    for name in every - UNNAMED - PROGRAMS:
        there = re.search(rf"\b{module(name)}\b", settings)
        skipped = name in names(EXTRAS["parity"])
        assert module(name) in used or there or skipped, name


@pytest.mark.skipif(os.name == "nt", reason="the made-up Python is a shell script")
@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("PYENV_ROOT", "versions/3.99.1/bin/python"),
        ("UV_PYTHON_INSTALL_DIR", "cpython-3.99.1-any/bin/python3.99"),
    ],
)
def test_interpreters_are_found_where_variables_say(
    variable: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / place
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.99\n")
    python.chmod(0o755)
    assert versions.find_python("3.99") is None
    monkeypatch.setenv(variable, str(tmp_path))
    assert versions.find_python("3.99") == str(python)


def test_the_lowest_versions_are_those_declared() -> None:
    """tests/lowest.txt pins each core requirement at its bound; constraints.txt above."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    def pins(path: str) -> dict[str, Version]:
        lines = (ROOT / path).read_text().splitlines()
        pairs = [line.split("==") for line in lines if "==" in line]
        return {name.lower().replace("_", "-"): Version(v) for name, v in pairs}

    lowest, tested = pins("tests/lowest.txt"), pins("constraints.txt")
    for text in PROJECT["dependencies"]:
        need = Requirement(text)
        (bound,) = (s.version for s in need.specifier if s.operator == ">=")
        assert lowest[need.name] == Version(bound), text
        assert need.specifier.contains(tested[need.name]), text
    for extra in EXTRAS.values():
        for need in map(Requirement, extra):
            if need.name in tested:
                assert need.specifier.contains(tested[need.name]), need


HEAVY = (
    "scipy",
    "dp_accounting",
    "flax",
    "sklearn",
    "matplotlib",
    "rich",
    "safetensors",
    "tokenizers",
    "pyarrow",
)
LOADED = f"""
import sys
{{code}}
print(*sorted(set({HEAVY!r}) & set(sys.modules)))
"""
CALL = """
from jaxdp.cli import main
sys.argv[1:] = {words!r}
try:
    main()
except SystemExit:
    pass
"""
#: A sampler without a plan, of which accountants ask nothing.
DRAW = """
sampler = jaxdp.sampling.TruncatedPoisson(sampling_prob=1e-4)
sampler.draw(jaxdp.Keys.insecure(0).sampling, 0, 10**6)
"""
ACCOUNTANTS = "scipy dp_accounting"
EPSILON = "epsilon --noise-multiplier 1 --num-steps 10"


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import jaxdp.kernels", ""),
        (f"import jaxdp\n{DRAW}", ""),
        ("import jaxdp, jaxdp.metrics, jaxdp.auditing", ACCOUNTANTS),
        (CALL.format(words=["--help"]), ""),
        (CALL.format(words=EPSILON.split()), f"rich {ACCOUNTANTS}"),
        (CALL.format(words=[*EPSILON.split(), "--json"]), ACCOUNTANTS),
    ],
    ids=["kernels", "jaxdp", "judges", "help", "epsilon", "json"],
)
def test_loaded_only_where_it_is_needed(code: str, allowed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(code=code)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.splitlines()[-1].split()) <= set(allowed.split())
