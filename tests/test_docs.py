"""What the README and the pages of docs/ must keep: length, figures, names, cells."""

import importlib
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import jaxdp
from bench import _kept

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts),
]
#: Where names of the package are public.
PUBLIC = ("", "plans", "sampling", "tuning", "metrics", "models", "auditing", "data")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without code, comments, mathematics, and figures that are rendered."""
    text = re.sub(r"<!-- kept .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}|:{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\{\w+\}`[^`]*`|`+[^`]*`+|\$[^$]*\$", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


#: A result: an interval, a share of three digits, a percentage, a factor.
FIGURE = re.compile(r"±|\b\d\.\d{3,}|\b\d+(\.\d+)?\s?%|\b\d+(\.\d+)? times\b")
#: Levels of confidence are no results.
PARAMETERS = {"95%", "95 %"}


def figures(text: str) -> list[str]:
    return [m.group() for m in FIGURE.finditer(text) if m.group() not in PARAMETERS]


def test_a_typed_figure_is_found() -> None:
    assert figures("It reaches 0.894 ± 0.013, 3.5 times as much, and 12% more.")
    page = "of {kept}`digits: a | b` with 95% `0.123`\n```{kept} x\n0.894\n```\n"
    assert not figures(prose(page))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_figure_is_typed(page: Path) -> None:
    """Results stand in tables made from the kept ones, or are computed on the page."""
    assert not figures(prose(page.read_text(encoding="utf-8")))


def test_tables_of_the_readme_are_the_kept_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert "<!-- kept " in text
    assert _kept.refreshed(text) == text, "python -m bench._kept README.md"


def test_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        assert len(block.splitlines()) <= 25


@pytest.mark.parametrize("page", PAGES[1:], ids=name)
def test_code_is_executed_or_says_that_it_is_not(page: Path) -> None:
    """A cell runs, a `code-block` is only shown; a plain fence would rot unseen."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^```(python|py)$", text, re.MULTILINE)
    if "{code-cell}" in text:
        assert text.startswith("---\nfile_format: mystnb\n")


def public_names() -> set[str]:
    """Names that `dir` shows of the package and of its public modules."""
    found = set()
    for part in PUBLIC:
        path = f"jaxdp.{part}".rstrip(".")
        module = importlib.import_module(path)
        own = {n for n in dir(module) if not n.startswith("_")}
        found |= {
            f"{path}.{n}" for n in own if not inspect.ismodule(getattr(module, n))
        }
    return found


def found(path: str) -> object:
    """The object that a dotted path names."""
    return pkgutil.resolve_name(path)


def test_every_public_name_is_in_the_reference() -> None:
    texts = [p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md")]
    said = set(re.findall(r"^\.\. auto\w+:: (\S+)", "\n".join(texts), re.MULTILINE))
    # `jaxdp.tune` is `jaxdp.tuning.tune` too: one of both names is enough.
    objects = [found(path) for path in said]
    missing = {n for n in public_names() - said if found(n) not in objects}
    assert not missing
    modules = {m.name for m in pkgutil.iter_modules(jaxdp.kernels.__path__)}
    assert {f"jaxdp.kernels.{m}" for m in modules} <= said


def test_corrections_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "concepts" / "corrections.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z0-9_/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for path, test in named:
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not test or re.search(rf"^ *def {test}\(", text, re.MULTILINE), test


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows = {}", "rows and columns"),
        ("shade = 1\n[rows]\n[columns]", "unknown keys"),
        ("[rows]\na = 'b'\n[columns]\nc = {case = 'x', metric = 'y'}", "no value"),
    ],
)
def test_wrong_tables_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _kept.table("digits", text)


def test_a_row_may_be_of_another_file_and_a_cell_of_words() -> None:
    row = '{file = "loop", case = "full batch", said = "not met"}'
    columns = '"a" = {metric = "compile time"}\n"b" = {text = "{said}"}\n'
    table = _kept.table("digits", f"[columns]\n{columns}[rows]\n'it' = {row}")
    want = _kept.figure("loop", "full batch", "compile time")
    assert table.splitlines()[-1] == f"| it | {want} | not met |"


def test_a_column_of_which_nothing_is_kept_is_left_out() -> None:
    columns = '"a" = {metric = "loads", field = "note"}\n"b" = {metric = "none"}\n'
    text = f'case = "{{row}}"\nmissing = ""\n[columns]\n{columns}[rows]\n"it" = "OPT"'
    table = _kept.table("families", text)
    assert table.splitlines() == ["|  | a |", "|---|---|", "| it | opt |"]


def test_numbers_have_their_digits() -> None:
    values = (0.9, 0.8939, 1146.2, 24.35, -0.352, 7.1e-7, 48e6, 0.0)
    texts = [_kept.number(v, 3) for v in values]
    wanted = "0.900 0.894 1,150 24.4 -0.352 7.10e-7 48,000,000 0"
    assert texts == wanted.split()


def test_verdicts_are_those_of_the_kept_figures() -> None:
    """Of the table of asked figures, which were rounded by up to half a percent."""
    text = (ROOT / "docs/results/speed.md").read_text()
    _, _, block = text.partition("## What was asked")
    spec = tomllib.loads(block.split("```{kept} dpzero_step\n")[1].split("```")[0])
    rates = ("slopes per second", "steps per second")  # The more, the better.
    for name, row in spec["rows"].items():
        bound = float(row["asked"].replace(",", ""))
        found = {"baseline": None} | row
        (kept,) = (
            each[row["field"]]
            for each in _kept.rows(row["file"])[row["case"], row["metric"]]
            if found["baseline"] in (None, each["baseline"])
        )
        over = bound / kept if row["metric"] in rates else kept / bound
        assert row["said"].startswith("met") == (over <= 1.005), (name, kept)
