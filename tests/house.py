"""Measures the structure of the library and prints it: ``make house``.

Counts that a change of structure is judged by, from the syntax trees of ``jaxdp/`` and
``kernels/`` and, of plans, from their classes.
"""

import ast
import inspect
import pathlib
import sys
from collections.abc import Iterator

import rich
from rich.table import Table

from jaxdp import plans  # noqa: F401  registers every plan
from jaxdp.mechanism import plan as plan_lib

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Folders of one method each.
METHODS = tuple(f"jaxdp/{m}/" for m in ("dpzero", "dpgd", "o2nc", "sosp", "saddle"))
#: Modules whose names a user is offered: those that ``import jaxdp`` leads to.
OFFERED = (
    "jaxdp/__init__.py",
    "jaxdp/plans.py",
    *(
        f"jaxdp/{name}/__init__.py"
        for name in ("sampling", "data", "metrics", "auditing")
    ),
    *(f"jaxdp/models/{name}__init__.py" for name in ("", "language/")),
)
#: First words of docstrings that point at a thing in place of naming it.
POINTING = ("What", "How", "Of", "Whether", "By", "Where", "Which", "From")


def modules() -> dict[str, ast.Module]:
    """The library's modules by path; ``jaxdp/kernels`` is a link to ``kernels``."""
    found = [*ROOT.glob("kernels/*.py"), *ROOT.glob("jaxdp/**/*.py")]
    paths = [path for path in found if ROOT / "jaxdp/kernels" not in path.parents]
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in sorted(paths)
    }


def lines(path: str) -> int:
    """Lines of a file of the library."""
    return len((ROOT / path).read_text().splitlines())


def _is_language(path: str) -> bool:
    return "models/language" in path or "cli/finetune" in path


def _names(node: ast.AST) -> set[str]:
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def protocols(tree: ast.Module) -> list[str]:
    """Classes that mirror others: those with the base ``Protocol``."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("Protocol" in _names(base) for base in node.bases)
    ]


def plan_tests(tree: ast.Module) -> int:
    """``isinstance`` by a class of plans, and ``issubclass``."""
    kinds = set(plan_lib._PLANS)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(
        1
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in ("isinstance", "issubclass")
        and len(call.args) == 2
        and _names(call.args[1]) & kinds
    )


def private_imports(path: str, tree: ast.Module) -> Iterator[str]:
    """Imports of a ``_module`` that lies in another folder; ``_types`` is everybody's."""
    own = path.rsplit("/", 1)[0].replace("/", ".")
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        targets = [
            [*(node.module or "").split("."), alias.name] for alias in node.names
        ]
        if any(_is_hidden(parts, own) for parts in targets):
            yield f"{node.module}: {', '.join(alias.name for alias in node.names)}"


def _is_hidden(parts: list[str], own: str) -> bool:
    return any(
        part.startswith("_")
        and ".".join(parts[:i]) not in (own, "jaxdp")
        and _is_module(parts[: i + 1])
        for i, part in enumerate(parts)
    )


def _is_module(parts: list[str]) -> bool:
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def public_names(trees: dict[str, ast.Module]) -> set[str]:
    """Names that a user is offered, by their origin: each once, wherever it is offered.

    Offered is what the modules of :data:`OFFERED` import as itself.
    """
    found = set()
    for path in OFFERED:
        for node in ast.walk(trees[path]):
            for a in node.names if isinstance(node, ast.ImportFrom) else ():
                if a.asname == a.name:
                    found.add(_origin(trees, f"{node.module}.{a.name}"))
    return found


def _origin(trees: dict[str, ast.Module], name: str) -> str:
    """Follows a dotted name through the packages that pass it on."""
    module, _, last = name.rpartition(".")
    package = trees.get(f"{module.replace('.', '/')}/__init__.py")
    for node in ast.walk(package) if package else ():
        if not isinstance(node, ast.ImportFrom) or node.module in (None, module):
            continue
        if last in (a.name for a in node.names):
            return _origin(trees, f"{node.module}.{last}")
    return name


def pointing(tree: ast.Module) -> Iterator[str]:
    """Docstrings whose first word points at what it should name."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and text.split()[0].rstrip(",:") in POINTING:
            yield text.splitlines()[0]


def overrides() -> tuple[int, int]:
    """Most classes from a plan to ``object``; methods that replace implemented ones."""
    bases = [c for k in plan_lib._PLANS.values() for c in k.__mro__ if c is not object]
    found = set()
    for kind in set(bases):
        for name, value in vars(kind).items():
            above = [vars(b)[name] for b in kind.__mro__[1:-1] if name in vars(b)]
            if name.startswith("__") or not above or not _has_code(value):
                continue
            if _has_code(above[0]) and not _is_left_open(above[0]):
                found.add((kind.__name__, name))
    deepest = max(len(kind.__mro__) - 1 for kind in plan_lib._PLANS.values())
    return deepest, len(found)


def _function(value: object) -> object:
    for name in ("fget", "func", "__func__"):
        value = getattr(value, name, value)
    return value


def _has_code(value: object) -> bool:
    return inspect.isfunction(_function(value))


def _is_left_open(value: object) -> bool:
    return "NotImplementedError" in inspect.getsource(_function(value))  # type: ignore


def measured() -> list[tuple[str, object]]:
    """What is counted, in words, and the counts."""
    trees = modules()
    total = sum(map(lines, trees))
    language = sum(lines(path) for path in trees if _is_language(path))
    outside = [t for path, t in trees.items() if not path.startswith(METHODS)]
    deepest, replaced = overrides()
    private = [x for path, tree in trees.items() for x in private_imports(path, tree)]
    first = [text for tree in trees.values() for text in pointing(tree)]
    return [
        ("files", len(trees)),
        ("lines", total),
        ("lines without language models", total - language),
        ("longest file, lines", max(map(lines, trees))),
        ("Protocols", sum(len(protocols(tree)) for tree in trees.values())),
        (
            "isinstance by a plan's class, outside methods",
            sum(map(plan_tests, outside)),
        ),
        ("classes from a plan to object, at most", deepest),
        ("implemented methods of plans that are overridden", replaced),
        ("imports of another folder's _private module", len(private)),
        ("public names", len(public_names(trees))),
        ("docstrings that begin by pointing", len(first)),
    ]


def main() -> int:
    """Prints the table; with ``-v`` also what was counted of private imports and words."""
    table = Table("structure", "count")
    for name, count in measured():
        table.add_row(name, str(count))
    rich.print(table)
    if "-v" in sys.argv:
        for path, tree in modules().items():
            for text in [*private_imports(path, tree), *pointing(tree)]:
                rich.print(f"{path}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
