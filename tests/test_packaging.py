"""The same package from a wheel, an sdist, an editable install and a bare checkout.

Everything is built from a copy of the source tree, without network and without
isolation, and imported in a fresh interpreter (``-I -S``: no current directory, no
``.pth`` files) in which only the copy under test can be found.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "jaxdp-optim"
SITE = sysconfig.get_paths()["purelib"]

# Printed by a fresh interpreter: where things were found. Nothing called `kernels`
# may be (the environment is not expected to hold the package of that name).
PROBE = """
import importlib.util, json, pathlib, jaxdp
import jaxdp.kernels as kernels
top_level = importlib.util.find_spec("kernels")
print(json.dumps({
    "jaxdp": str(pathlib.Path(jaxdp.__file__).resolve()),
    "kernels": str(pathlib.Path(kernels.__file__).resolve()),
    "name": kernels.__name__,
    "version": jaxdp.__version__,
    "top_level": top_level and top_level.origin,
}))
"""


def run(*command: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with output as text."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def checked(*command: object, cwd: Path, **env: str) -> str:
    """Runs a command that must succeed; returns what it printed."""
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def probe(paths: list[Path], cwd: Path) -> dict[str, str | None]:
    """Imports ``jaxdp.kernels`` where only ``paths`` and the dependencies are seen.

    ``site.addsitedir`` runs the ``.pth`` files of ``paths`` (an editable install is
    one); those of the environment's own site-packages are left out, since this
    project may be installed there.
    """
    setup = "import site, sys; sys.dont_write_bytecode = True\n" + "".join(
        f"site.addsitedir({str(path)!r})\n" for path in paths
    )
    code = f"{setup}sys.path.append({SITE!r})\n{PROBE}"
    out = checked(sys.executable, "-I", "-S", "-c", code, cwd=cwd, JAX_PLATFORMS="cpu")
    return json.loads(out.splitlines()[-1])


def ignored(_: str, names: list[str]) -> set[str]:
    """Leaves out what is no source: build products, caches, what is hidden."""
    products = {"__pycache__", "build", "dist", "runs", "jaxdp_optim.egg-info"}
    return {n for n in names if n in products or (n[0] == "." and n != ".ci")}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree: builds leave files, and stale ones mislead."""
    target = tmp_path_factory.mktemp("copy") / "source"
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)
    return target


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from the source tree."""
    out = tmp_path_factory.mktemp("wheel")
    checked(
        *(sys.executable, "-m", "pip", "--isolated", "wheel", "--quiet", "--no-deps"),
        *("--no-index", "--no-build-isolation", "--wheel-dir", out, "."),
        cwd=copy,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def built(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    checked(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, "."),
        cwd=copy,
    )
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def modules_in(tree: Path) -> set[str]:
    """Where every module of a source tree belongs inside a wheel."""
    # Asked of the two folders apart: whether rglob follows links depends on Python.
    own = {path.relative_to(tree).as_posix() for path in (tree / "jaxdp").rglob("*.py")}
    own = {name for name in own if not name.startswith("jaxdp/kernels/")}
    kernels = (tree / "kernels").rglob("*.py")
    return own | {"jaxdp/" + path.relative_to(tree).as_posix() for path in kernels}


#: What is shipped beside the modules: the type marker and two tables.
DATA = {
    "jaxdp/py.typed",
    *("jaxdp/cli/finetune_recipes.toml", "jaxdp/models/language/families.toml"),
}


def check_wheel(path: Path, tree: Path) -> None:
    """A wheel holds every module once, the data beside them, and nothing else."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    content = {name for name in names if ".dist-info/" not in name}
    assert content == modules_in(tree) | DATA
    assert {name.split("/")[0] for name in content} == {"jaxdp"}
    assert "jaxdp/kernels/__init__.py" in content
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_package_is_listed() -> None:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = tables["tool"]["setuptools"]
    # Every folder that holds a module, so that one without __init__.py, which would
    # import here and be missing in a wheel, is seen as well.
    modules = modules_in(ROOT)
    folders = {Path(name).parent for name in modules}
    assert sorted(setuptools["packages"]) == sorted(
        ".".join(folder.parts) for folder in folders
    )
    assert {(folder / "__init__.py").as_posix() for folder in folders} <= modules
    assert setuptools["package-dir"]["jaxdp.kernels"] == "kernels"


def test_link_is_relative() -> None:
    link = ROOT / "jaxdp" / "kernels"
    if not link.is_symlink():
        pytest.skip("this checkout has no symbolic links")
    assert os.readlink(link) == os.path.join("..", "kernels")


def test_wheel_holds_every_module_once(wheel: Path, copy: Path) -> None:
    assert re.fullmatch(r"jaxdp_optim-[0-9.]+-py3-none-any\.whl", wheel.name)
    check_wheel(wheel, copy)


def test_sdist_holds_every_source_once(built: tuple[Path, Path], copy: Path) -> None:
    with tarfile.open(built[0]) as archive:
        names = [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]
    assert len(names) == len(set(names))
    modules = {name.replace("jaxdp/kernels/", "kernels/") for name in modules_in(copy)}
    assert modules | DATA <= set(names)
    texts = {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "setup.py"}
    assert texts | {"pyproject.toml", "constraints.txt"} <= set(names)
    pages = {p.relative_to(copy).as_posix() for p in (copy / "docs").rglob("*.md")}
    assert {p for p in pages if not p.startswith("docs/_build/")} <= set(names)
    assert not [name for name in names if name.startswith("docs/_build/")]
    assert not [name for name in names if name.startswith("jaxdp/kernels")]
    tests = {p.relative_to(copy).as_posix() for p in (copy / "tests").rglob("*.py")}
    assert tests <= set(names)


def test_wheel_built_from_the_sdist_is_the_same(
    wheel: Path, built: tuple[Path, Path], copy: Path
) -> None:
    check_wheel(built[1], copy)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(built[1]) as two:
        for name in one.namelist():
            if not name.endswith("/RECORD"):
                assert one.read(name) == two.read(name), name


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def test_an_index_takes_both(built: tuple[Path, Path], tmp_path: Path) -> None:
    checked(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=tmp_path)
    text = metadata_of(built[1])
    for field in ("Author: The jaxdp authors", "License-Expression: Apache-2.0"):
        assert f"\n{field}\n" in text
    assert "\nDescription-Content-Type: text/markdown\n" in text
    assert "\nProject-URL: " in text


RELATIVE = re.compile(r"\]\((?!https?:|#)")


def test_links_of_the_readme_hold_on_an_index_page(
    wheel: Path, copy: Path, tmp_path: Path
) -> None:
    """Links to files become links to the source, if it has a URL, or text."""
    assert RELATIVE.search((copy / "README.md").read_text(encoding="utf-8"))
    assert not RELATIVE.search(metadata_of(wheel))
    for name in ("README.md", "setup.py"):
        shutil.copy(copy / name, tmp_path)
    settings = '[project]\nname = "x"\nversion = "1"\ndynamic = ["readme"]\n'
    settings += '[project.urls]\nSource = "https://example.org/jaxdp"\n'
    settings += "[tool.setuptools]\npackages = []\n"
    (tmp_path / "pyproject.toml").write_text(settings)
    code = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    checked(sys.executable, "-W", "ignore", "-c", code, cwd=tmp_path)
    (path,) = tmp_path.glob("*.dist-info/METADATA")
    text = path.read_text(encoding="utf-8")
    assert not RELATIVE.search(text)
    assert "](https://example.org/jaxdp/blob/main/LICENSE)" in text


def test_the_version_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall("^version: (.*)$", citation, re.MULTILINE) == [project["version"]]
    code = [*(ROOT / "jaxdp").rglob("*.py"), ROOT / "docs" / "conf.py"]
    assert not [path for path in code if project["version"] in path.read_text()]


def test_installed_wheel_imports_its_own_kernels(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    checked(
        *(sys.executable, "-m", "pip", "--isolated", "install", "--quiet"),
        *("--no-deps", "--no-index", "--no-compile", "--target", target, wheel),
        cwd=tmp_path,
    )
    found = probe([target], tmp_path)
    assert found == {
        "jaxdp": str(target / "jaxdp" / "__init__.py"),
        "kernels": str(target / "jaxdp" / "kernels" / "__init__.py"),
        "name": "jaxdp.kernels",
        "version": wheel.name.split("-")[1],
        "top_level": None,
    }


@pytest.mark.parametrize("link", [True, False], ids=["link", "no link"])
def test_editable_install_uses_the_folder(
    copy: Path, tmp_path: Path, link: bool
) -> None:
    tree = tmp_path / "source"
    shutil.copytree(copy, tree, symlinks=True, ignore=ignored)
    if not link:
        (tree / "jaxdp" / "kernels").unlink(missing_ok=True)
    # Where modules are found is the question here; importing them all costs seconds.
    (tree / "jaxdp" / "__init__.py").write_text("__version__ = None\n")
    build = "from setuptools import build_meta as b; b.build_editable('editable')"
    checked(sys.executable, "-W", "ignore", "-c", build, cwd=tree)
    (path,) = (tree / "editable").glob("*.whl")
    target = tmp_path / "installed"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(target)
    found = probe([target], tmp_path)
    assert found["jaxdp"] == str(tree / "jaxdp" / "__init__.py")
    assert found["kernels"] == str(tree / "kernels" / "__init__.py")
    assert found["name"] == "jaxdp.kernels"
    assert found["top_level"] is None


def test_checkout_that_was_never_installed(copy: Path, tmp_path: Path) -> None:
    if not (copy / "jaxdp" / "kernels").is_symlink():
        pytest.skip("this checkout has no symbolic links")
    code = f"import sys; sys.path[:0] = [{str(copy)!r}, {str(tmp_path)!r}]\n"
    hidden = (
        "import importlib.metadata as m\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
    )
    code += f"import jaxdp.kernels, jaxdp\n{hidden}"
    code += "import importlib; print(importlib.reload(jaxdp).__version__)\n"
    code += "import pathlib; print(pathlib.Path(jaxdp.kernels.__file__).resolve())"
    out = checked(sys.executable, "-c", code, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert out.split() == ["0+uninstalled", str(copy / "kernels" / "__init__.py")]


def test_this_install_is_the_checkout() -> None:
    # Looked for in site-packages alone: a build leaves an egg-info in the checkout,
    # which is on sys.path under `python -m pytest`.
    found = importlib.metadata.distributions(name=DISTRIBUTION, path=[SITE])
    installed = next(iter(found), None)
    if installed is None:
        pytest.skip(f"{DISTRIBUTION} is not installed")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    assert origin.get("dir_info", {}).get("editable") is True, "run `make install`"
    assert origin["url"] == ROOT.as_uri(), "run `make install` in this checkout"
    import jaxdp
    import jaxdp.kernels

    assert Path(jaxdp.__file__).resolve() == ROOT / "jaxdp" / "__init__.py"
    kernels = Path(jaxdp.kernels.__file__).resolve()
    assert kernels == ROOT / "kernels" / "__init__.py"
    assert jaxdp.__version__ == installed.version


# As transformers asks whether the package `kernels`, which is not ours, is there.
OF_ANOTHER_LIBRARY = """
import importlib, importlib.metadata, importlib.util
assert importlib.util.find_spec("kernels") is not None
try:
    importlib.metadata.version("kernels")
except importlib.metadata.PackageNotFoundError:
    module = importlib.import_module("kernels")
    assert getattr(module, "__version__", "N/A") == "N/A"
import jaxdp.kernels
assert jaxdp.kernels.sphere.__name__ == "jaxdp.kernels.sphere"
"""


def test_top_level_kernels_is_empty_in_the_checkout() -> None:
    checked(sys.executable, "-B", "-c", OF_ANOTHER_LIBRARY, cwd=ROOT)
    for words in ("import kernels.sphere", "from kernels import sphere"):
        done = run(sys.executable, "-B", "-c", words, cwd=ROOT)
        assert done.returncode == 1
        assert re.match(
            "(ImportError|ModuleNotFoundError): ", done.stderr.splitlines()[-1]
        )
    for words in ("kernels.sphere", "kernels.Kernel", "from kernels import sphere"):
        words = f"import kernels; {words}"
        last = run(sys.executable, "-B", "-c", words, cwd=ROOT).stderr.splitlines()[-1]
        assert "write `import jaxdp.kernels`" in last


def test_beside_a_clone_of_the_same_name(tmp_path: Path) -> None:
    """Python finds the installed package, and no empty one in the clone's folder."""
    if not (Path(SITE) / "jaxdp_checkout.pth").exists():
        pytest.skip("not installed by `make install`")
    (tmp_path / "jaxdp").mkdir()
    code = "import pathlib, jaxdp; print(pathlib.Path(jaxdp.__file__).resolve())"
    out = checked(sys.executable, "-c", code, cwd=tmp_path)
    assert out.split() == [str(ROOT / "jaxdp" / "__init__.py")]


SEEN = {
    "jaxdp.fit": r"\(plan: Plan, keys: Keys, params: Any, .* -> FitResult",
    "jaxdp.plans.DPZero": r"type\[DPZero\]",
    "jaxdp.kernels.sphere.directions": r".* -> Direction",
    "jaxdp.models.load": r".* -> Dataset",
    "jaxdp.metrics": r"Module\(\"jaxdp.metrics\"\)",
    "jaxdp.auditing": r"Module\(\"jaxdp.auditing\"\)",
}


def test_an_editor_sees_the_types(tmp_path: Path) -> None:
    """From another folder, with the Python that `make install` made."""
    if not (Path(SITE) / "jaxdp_checkout.pth").exists():
        pytest.skip("not installed by `make install`")
    lines = [
        "import jaxdp",
        "import jaxdp.kernels",
        *(f"reveal_type({x})" for x in SEEN),
    ]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    command = ("pyright", "--outputjson", "--pythonpath", sys.executable, "user.py")
    found = json.loads(checked(sys.executable, "-m", *command, cwd=tmp_path))
    assert found["summary"]["errorCount"] == 0
    said = [d["message"] for d in found["generalDiagnostics"]]
    for (name, kind), message in zip(SEEN.items(), said, strict=True):
        assert re.fullmatch(f'Type of "{re.escape(name)}" is "{kind}.*"', message), (
            message
        )
