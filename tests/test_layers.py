"""What each module may know: the layers of the documentation, enforced on the source text.

The imports are read with ``ast``, so an import inside a function, under
``TYPE_CHECKING`` or in a branch that never runs counts like any other.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxdp.o2nc.oracle import ORACLES

ROOT = Path(__file__).resolve().parents[1]

# A part of the package may import the parts with a lower number. Two parts with one
# number are peers and do not import each other; modules inside one folder may.
LAYERS = {
    "kernels": 0,
    "core": 1,
    "accounting": 2,
    "sampling": 2,
    "mechanism": 3,
    "dpzero": 4,
    "dpgd": 4,
    "o2nc": 4,
    "sosp": 4,
    "saddle": 4,
    "plans": 5,
    "training": 6,
    "metrics": 7,
    "tuning": 7,
    "data": 7,
    "planner": 8,
    "models": 8,
    "auditing": 8,  # imports data.users
    "": 9,  # jaxdp/__init__.py, which names what is public
    "cli": 10,
}
METHODS = {"dpzero", "dpgd", "o2nc", "sosp", "saddle"}
# In a method, what states the guarantee and what chooses its numbers. What releases (its
# oracles, transforms and algorithms) is handed numbers and knows neither.
PLANNING = re.compile(
    rf"jaxdp\.({'|'.join(METHODS)})\.(plans?|\w+_plan|theory|theorems|releases)\b"
)
# What computes a release; what judges on raw data lies above it.
LAST_RELEASE_LAYER = 6

# Besides these, kernels import the standard library.
KERNEL_LIBRARIES = {"jax", "numpy"}

# Who may derive keys, and how. Everyone else is given the key that it uses.
DERIVING = {"key", "PRNGKey", "wrap_key_data", "split", "fold_in", "clone"}
MAY_DERIVE = {
    "jaxdp/core/keys.py": DERIVING,
    "kernels/smoothed_gradient.py": {"fold_in"},  # records, other point: public
    "kernels/sphere.py": {"fold_in"},  # leaf, layer, direction: all public
    "kernels/stochastic_rounding.py": {"fold_in"},  # rows of a huge leaf: public
    "kernels/simplex.py": {"fold_in"},  # a draw's next try: secret
    "kernels/node_noise.py": {"fold_in"},  # a period's key by step and leaf: secret
    "kernels/threefry.py": {"wrap_key_data"},  # defines fold_in, written out
    "kernels/perturb.py": {"wrap_key_data"},  # the same key, ordered after a layer
    "jaxdp/models/language/generation.py": {"fold_in"},  # a record's draws: public
    "jaxdp/models/language/network.py": {"split"},  # initial parameters: public
}
# Other generators, whose output would be no function of the keys.
GENERATORS = ("numpy.random", "random")


def module_name(path: str) -> str:
    """``kernels/clip.py`` -> ``jaxdp.kernels.clip``; a package is its folder's name."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "kernels":
        parts = ("jaxdp", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """The part of the package that a module belongs to; the package itself is ''."""
    return module.split(".")[1] if "." in module else ""


def bindings(tree: ast.AST, path: str) -> Iterator[tuple[int, str, str]]:
    """Line, local name and absolute dotted name of everything imported.

    ``from a import b`` gives ``a.b``, whether ``b`` is a module or a name in one.
    """
    package = module_name(path).split(".")
    if Path(path).name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{prefix}.{alias.name}"


def imports(tree: ast.AST, path: str) -> list[tuple[int, str]]:
    """Line and absolute dotted name of everything imported."""
    return [(line, full) for line, _, full in bindings(tree, path)]


def aliases(tree: ast.AST, path: str) -> dict[str, str]:
    """What each name that an import binds stands for, as a dotted name."""
    found = {}
    for _, bound, full in bindings(tree, path):
        top = bound.split(".")[0]  # `import a.b` binds a
        found[top] = full if bound == top else top
    return found


def uses(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every full attribute chain on an imported name."""
    names = aliases(tree, path)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or id(node) in inner:
            continue
        chain: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            chain.append(root.attr)
            root = root.value
        if isinstance(root, ast.Name) and root.id in names:
            yield node.lineno, ".".join([names[root.id], *reversed(chain)])


def layer_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Imports of a higher layer, of a peer, or of something that has no layer."""
    own = part(module_name(path))
    if own not in LAYERS:
        yield f"{path}: {own!r} has no layer; give it one in tests/test_layers.py"
        return
    reported = set()
    # Uses as well: after `import jaxdp.core.keys` one can write `jaxdp.plans`.
    for line, name in [*imports(tree, path), *uses(tree, path)]:
        where = f"{path}:{line}"
        top = name.split(".")[0]
        if top == "kernels":
            yield f"{where}: imports {name}; the name is jaxdp.kernels"
        if top in ("tests", "bench") and own != "cli":
            yield f"{where}: imports {name}, which is not shipped"
        if top != "jaxdp":
            continue
        other = part(name)
        if other not in LAYERS:  # a name such as `from jaxdp import Keys`
            other = ""
        allowed = other == own or LAYERS[other] < LAYERS[own]
        if not allowed and other not in reported:
            reported.add(other)
            yield (
                f"{where}: {own or 'jaxdp'} (layer {LAYERS[own]}) imports {name} "
                f"({other or 'the whole package'}, layer {LAYERS[other]})"
            )


def role_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Imports of a method's plan or theory by its oracles, transforms and algorithms."""
    module = module_name(path)
    if part(module) not in METHODS or PLANNING.match(module):
        return
    for line, name in imports(tree, path):
        if PLANNING.match(name):
            yield f"{path}:{line}: imports {name}; it is to be handed numbers"


def hidden_import_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Imports by a computed name, which the other checks cannot read."""
    if LAYERS.get(part(module_name(path)), 0) > LAST_RELEASE_LAYER:
        return
    for line, name in [*imports(tree, path), *uses(tree, path)]:
        if name in ("importlib.import_module", "builtins.__import__"):
            yield f"{path}:{line}: {name} hides what is imported"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            yield f"{path}:{node.lineno}: {node.id} hides what is imported"


def kernel_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Anything but jax, numpy, ``optax.tree`` and the standard library in kernels."""
    if not path.startswith("kernels/"):
        return
    for line, name in imports(tree, path):
        top = name.split(".")[0]
        if top in KERNEL_LIBRARIES | sys.stdlib_module_names:
            continue
        if name == "optax" or f"{name}.".startswith(("optax.tree.", "jaxdp.kernels.")):
            continue
        yield f"{path}:{line}: a kernel imports {name}"
    for line, name in uses(tree, path):
        if name.startswith("optax") and not f"{name}.".startswith("optax.tree."):
            yield f"{path}:{line}: a kernel uses {name}; only optax.tree"


def deriving(name: str) -> str:
    """The function that derives a key which a dotted name refers to, or ''."""
    first, _, last = name.rpartition(".")
    if first == "jax.random" and last in DERIVING:
        return last
    return last if first.startswith("jaxdp.kernels") and last == "fold_in" else ""


def key_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Keys made or derived, or randomness drawn, where that is not allowed.

    A mention counts, not only a call: ``jax.vmap(jax.random.fold_in)`` folds too.
    """
    allowed = MAY_DERIVE.get(path, set())
    named = [*uses(tree, path), *imports(tree, path)]
    for line, name in named:
        if name == "jax.random.*" or name.startswith("jax._src"):
            yield f"{path}:{line}: import {name} hides what is used"
        if deriving(name) and deriving(name) not in allowed:
            yield f"{path}:{line}: {name}; keys are derived in jaxdp/core/keys.py"
    for line, name in uses(tree, path):
        if name == "jax.random":
            yield f"{path}:{line}: jax.random is passed on or searched"
    layer = LAYERS.get(part(module_name(path)), 0)
    if layer <= LAST_RELEASE_LAYER:
        for line, name in named:
            if f"{name}.".startswith(tuple(f"{g}." for g in GENERATORS)):
                yield f"{path}:{line}: {name}; randomness comes from jaxdp.Keys"
    names = aliases(tree, path)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        target = ast.unparse(node.func)
        first, _, rest = target.partition(".")
        full = f"{names.get(first, first)}.{rest}".rstrip(".")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if full in ("jax.random.key", "jax.random.PRNGKey") and any(
            isinstance(a, ast.Constant) and isinstance(a.value, int) for a in arguments
        ):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}; a constant is no key"


CHECKS = (
    layer_violations,
    role_violations,
    hidden_import_violations,
    kernel_violations,
    key_violations,
)


def violations(path: str, source: str) -> list[str]:
    """Everything that one module, at ``path`` from the root, does and may not."""
    tree = ast.parse(source, filename=path)
    return [message for check in CHECKS for message in check(tree, path)]


def sources() -> list[str]:
    """Every module of the package, the link jaxdp/kernels not followed."""
    own = [p.relative_to(ROOT).as_posix() for p in (ROOT / "jaxdp").rglob("*.py")]
    kernels = [p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels").rglob("*.py")]
    own = [path for path in own if not path.startswith("jaxdp/kernels/")]
    return sorted(own + kernels)


# Where the oracles of O2NC are told apart. Elsewhere their rows are read.
ORACLE_FILES = {"jaxdp/o2nc/oracle.py"}


def named_oracles(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines on which an oracle's name is compared, a key or an index, or a class's own."""
    for node in ast.walk(tree):
        decided: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            decided = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            decided = [node.value]
        elif isinstance(node, ast.Dict):
            decided = list(node.keys)
        elif isinstance(node, ast.Subscript):
            if ast.unparse(node.value).split(".")[-1] != "Literal":
                decided = [node.slice]
        elif isinstance(node, ast.ClassDef):
            decided = [x.value for x in node.body if isinstance(x, ast.Assign)]
        for part in decided:
            for x in ast.walk(part) if part else ():
                if isinstance(x, ast.Constant) and x.value in ORACLES:
                    yield x.lineno, str(x.value)


def test_a_new_oracle_changes_three_files() -> None:
    """Its row, its errors and its recipes: nobody else asks which oracle it is."""
    found = {
        path
        for path in sources()
        if path.startswith("jaxdp/")
        and any(named_oracles(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    }
    assert found - ORACLE_FILES == {
        "jaxdp/o2nc/theory/estimators.py",
        "jaxdp/cli/o2nc.py",
    }


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("plan.oracle == 'scalar'", ["scalar"]),
        ("'first_order' != kind", ["first_order"]),
        ("kind in ('scalar', 'first_order')", ["scalar", "first_order"]),
        ("rows = {'zeroth_order': 1, ('scalar', True): 2}", ["zeroth_order", "scalar"]),
        ("ORACLES['scalar'].slopes", ["scalar"]),
        ("match kind:\n case 'scalar': pass", ["scalar"]),
        ("class A:\n oracle = 'scalar'", ["scalar"]),
        ("def f(oracle='scalar'): return make(oracle='first_order')", []),
        ("Name = Literal['scalar']", []),
    ],
)
def test_oracles_that_are_told_apart_are_found(source: str, names: list[str]) -> None:
    assert [name for _, name in named_oracles(ast.parse(source))] == names


@pytest.mark.parametrize("path", sources())
def test_module_keeps_to_its_layer(path: str) -> None:
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


def test_documentation_shows_these_layers() -> None:
    page = (ROOT / "docs/concepts/how_it_works.md").read_text(encoding="utf-8")
    shown = {
        "" if name == "jaxdp" else name: int(number)
        for number, cell in re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert shown == LAYERS


def test_every_layer_was_read() -> None:
    assert {
        "jaxdp/__init__.py",
        "jaxdp/core/validate.py",
        "kernels/__init__.py",
    } <= set(sources())
    assert part("jaxdp.kernels.clip") == "kernels"
    assert part("jaxdp") == ""


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        # upwards, however it is written
        ("jaxdp/dpzero/oracle.py", "import jaxdp.plans", "imports jaxdp.plans"),
        ("jaxdp/dpzero/oracle.py", "from jaxdp import plans", "layer 5"),
        ("jaxdp/dpzero/oracle.py", "from .. import o2nc", "layer 4"),
        ("jaxdp/dpzero/oracle.py", "from ..training import fit", "layer 6"),
        ("jaxdp/core/__init__.py", "from ..plans import DPZero", "layer 5"),
        ("jaxdp/dpzero/transform.py", "def f():\n import jaxdp.training.loop", ":2:"),
        ("jaxdp/mechanism/plan.py", "import jaxdp.o2nc.plan", "layer 4"),
        (
            "jaxdp/o2nc/gradient.py",
            "from jaxdp.o2nc.plan import O2NC",
            "handed numbers",
        ),
        ("jaxdp/sosp/spider.py", "from jaxdp.sosp.theory import design", "numbers"),
        (
            "jaxdp/dpzero/transform.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from jaxdp.plans import DPZero",
            "layer 5",
        ),
        ("jaxdp/core/keys.py", "from jaxdp.sampling import FullBatch", "layer 2"),
        # the whole package from inside it
        ("jaxdp/training.py", "import jaxdp", "the whole package"),
        ("jaxdp/training.py", "from jaxdp import Keys", "the whole package"),
        ("jaxdp/__init__.py", "from jaxdp.cli import main", "layer 10"),
        (
            "jaxdp/dpzero/oracle.py",
            "import jaxdp.core.keys\nx = jaxdp.plans.DPZero",
            "jaxdp.plans.DPZero",
        ),
        # peers
        ("jaxdp/sampling.py", "from jaxdp import accounting", "layer 2"),
        ("jaxdp/sosp/gradients.py", "from jaxdp.dpgd import oracle", "layer 4"),
        ("jaxdp/o2nc/plan.py", "from jaxdp.sosp.spider import begin", "layer 4"),
        ("jaxdp/metrics/goldstein.py", "from jaxdp import models", "layer 8"),
        # what computes a release does not see what judges it
        ("jaxdp/training.py", "from jaxdp.models import networks", "layer 8"),
        ("jaxdp/dpzero/plan.py", "from jaxdp import auditing", "layer 8"),
        ("jaxdp/sampling.py", "import jaxdp.metrics.goldstein", "layer 7"),
        ("jaxdp/dpzero/plan.py", "__import__('jaxdp.models')", "hides"),
        (
            "jaxdp/training.py",
            "from importlib import import_module as load\nload('jaxdp.models')",
            "hides",
        ),
        # names that do not exist for the package
        (
            "jaxdp/training.py",
            "from kernels import sphere",
            "the name is jaxdp.kernels",
        ),
        ("jaxdp/training.py", "import bench.loop", "not shipped"),
        ("jaxdp/helpers.py", "", "has no layer"),
        # kernels
        ("kernels/clip.py", "from jaxdp.core import validate", "a kernel imports"),
        ("kernels/clip.py", "from ..keys import Keys", "a kernel imports"),
        ("kernels/clip.py", "import optax\noptax.global_norm(x)", "only optax.tree"),
        ("kernels/clip.py", "from optax import tree_utils", "a kernel imports"),
        ("kernels/clip.py", "import scipy.special", "a kernel imports"),
        # keys
        ("jaxdp/core/noise.py", "import jax\njax.random.split(k)", "jax.random.split"),
        (
            "jaxdp/core/noise.py",
            "import jax\njax.vmap(jax.random.fold_in)(k)",
            "fold_in",
        ),
        ("jaxdp/core/noise.py", "import jax.random as jr\njr.fold_in(k, 1)", "fold_in"),
        ("jaxdp/core/noise.py", "from jax import random\nrandom.split(k)", "split"),
        (
            "jaxdp/core/noise.py",
            "from jax.random import key as k\nk(s)",
            "jax.random.key",
        ),
        ("jaxdp/core/noise.py", "from jax.random import *", "hides"),
        ("jaxdp/core/noise.py", "import jax\ngetattr(jax.random, f)(k)", "passed on"),
        ("jaxdp/training.py", "import jax\njax.random.PRNGKey(s)", "PRNGKey"),
        ("jaxdp/models/x.py", "import jax\njax.random.wrap_key_data(x)", "wrap"),
        ("kernels/clip.py", "import jax\njax.random.fold_in(k, 1)", "fold_in"),
        ("kernels/sphere.py", "import jax\njax.random.split(k)", "split"),
        ("kernels/threefry.py", "import jax\njax.random.fold_in(k, 1)", "fold_in"),
        ("kernels/clip.py", "from . import threefry as t\nt.fold_in(k, 1)", "fold_in"),
        (
            "jaxdp/core/noise.py",
            "from jaxdp.kernels.threefry import fold_in",
            "fold_in",
        ),
        ("jaxdp/core/keys.py", "import jax\njax.random.key(0)", "a constant is no key"),
        ("jaxdp/core/keys.py", "from jax.random import key\nkey(seed=1)", "constant"),
        ("jaxdp/core/noise.py", "import numpy as np\nnp.random.normal()", "jaxdp.Keys"),
        ("jaxdp/sampling.py", "from random import shuffle", "jaxdp.Keys"),
    ],
)
def test_planted_violation_is_found(path: str, source: str, message: str) -> None:
    found = violations(path, source)
    assert found
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/clip.py", "import math\nimport jax\nimport numpy as np\nnp.ones(3)"),
        ("kernels/clip.py", "import optax\noptax.tree.map(f, x)"),
        ("kernels/clip.py", "from optax import tree\nfrom jaxdp.kernels import sphere"),
        ("kernels/perturb.py", "from .sphere import sphere\nfrom . import clip"),
        ("kernels/sphere.py", "import jax\njax.vmap(jax.random.fold_in)(k, i)"),
        (
            "jaxdp/core/keys.py",
            "import jax\njax.random.wrap_key_data(x)\njax.random.key(s)",
        ),
        (
            "jaxdp/core/noise.py",
            "import jax\nfrom jaxdp.core import keys\njax.random.normal(k)",
        ),
        ("jaxdp/dpzero/oracle.py", "from jaxdp import core, kernels, sampling"),
        ("jaxdp/dpzero/oracle.py", "from .first_order import clipped"),
        ("jaxdp/dpzero/oracle.py", "import jaxdp.core.noise\njaxdp.core.noise.draw()"),
        ("jaxdp/dpzero/plan.py", "from jaxdp import accounting, mechanism, sampling"),
        ("jaxdp/models/networks.py", "from jaxdp.training import fit"),
        ("jaxdp/__init__.py", "from jaxdp import models\nfrom .core.keys import Keys"),
        ("jaxdp/__init__.py", "import importlib\nimportlib.import_module(name)"),
        ("jaxdp/cli.py", "import jaxdp\nimport bench\nfrom jaxdp import Keys"),
        ("jaxdp/auditing.py", "import numpy as np\nnp.random.default_rng(0)"),
    ],
)
def test_what_is_meant_is_allowed(path: str, source: str) -> None:
    assert violations(path, source) == []
