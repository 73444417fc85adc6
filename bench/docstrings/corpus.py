"""Text that every Python installation has, and a task made of a part of it.

The files are those of the standard library of the Python that runs: every ``.py`` below
``sysconfig.get_path("stdlib")`` but tests, installed packages and build settings
(:data:`LEFT_OUT`). They are parsed and never imported.

The *task* is which family of modules a docstring comes from. Its records are docstrings
of four families, one record each, with the modules' names taken out of the text; each
family has the same number of them. A fifth of each is for evaluation. The *public text*
is the sources of all files, white space squeezed; those of the families' modules without
their docstrings. A record whose words stand anywhere in it, or in two families, is dropped.
"""

import ast
import hashlib
import pathlib
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Families = Mapping[str, tuple[str, ...]]
Words = tuple[str, ...]

#: The classes of the task: the word that stands for each, and its top-level modules. Some
#: modules are gone from later Pythons.
FAMILIES: Families = {
    "network": (
        *("asynchat", "asyncore", "cgi", "email", "ftplib", "http", "imaplib"),
        *("mailbox", "mimetypes", "netrc", "nntplib", "nturl2path", "poplib", "smtpd"),
        *("smtplib", "socket", "socketserver", "ssl", "telnetlib", "urllib"),
        *("webbrowser", "wsgiref", "xmlrpc"),
    ),
    "process": (
        *("_threading_local", "asyncio", "concurrent", "multiprocessing", "pty"),
        *("queue", "sched", "selectors", "signal", "subprocess", "threading"),
    ),
    "import": (
        *("ast", "bdb", "cProfile", "code", "codeop", "compileall", "dis", "importlib"),
        *("inspect", "linecache", "modulefinder", "pdb", "pickletools", "pkgutil"),
        *("profile", "pstats", "py_compile", "pyclbr", "pydoc", "rlcompleter", "runpy"),
        *("symtable", "timeit", "tokenize", "trace", "traceback", "tracemalloc"),
        *("typing", "zipimport"),
    ),
    "data": (
        *("_compression", "base64", "binhex", "bz2", "codecs", "configparser", "csv"),
        *("dbm", "encodings", "gzip", "html", "json", "lzma", "pickle", "plistlib"),
        *("quopri", "shelve", "sqlite3", "tarfile", "uu", "xml", "zipapp", "zipfile"),
    ),
}

#: Four other families, to try settings on: all of their records are public.
OTHER_FAMILIES: Families = {
    "window": ("idlelib", "tkinter", "turtle", "turtledemo"),
    "build": ("distutils", "ensurepip", "lib2to3", "venv"),
    "test": ("doctest", "logging", "unittest"),
    "number": (
        *("_pydecimal", "_strptime", "bisect", "calendar", "colorsys", "datetime"),
        *("fractions", "heapq", "ipaddress", "numbers", "random", "statistics"),
        "zoneinfo",
    ),
}

#: Folders that are not read, wherever they stand, and beginnings of their names.
LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "config-")

MIN_WORDS = 4  # of a record: shorter ones say little
EVAL_SHARE = 5  # one in five records of each class

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Source(NamedTuple):
    """One file of the library."""

    module: str  # top-level: "email" of email/message.py
    text: str
    without_docstrings: str
    docstrings: tuple[str, ...]


class Corpus(NamedTuple):
    """A task and the text that has nothing of it. Records are as in a ``.jsonl`` file."""

    classes: tuple[str, ...]
    train: list[dict[str, str]]  # {"text": ..., "label": ...}: the private records
    eval: list[dict[str, str]]  # public ones
    public: list[str]  # one text a file


def library() -> pathlib.Path:
    """The folder of the standard library."""
    return pathlib.Path(sysconfig.get_path("stdlib"))


def squeezed(text: str) -> str:
    """The text with single spaces for all white space."""
    return " ".join(text.split())


# --- files -------------------------------------------------------------------------


def files(root: pathlib.Path) -> list[pathlib.Path]:
    """The files that are read, sorted."""

    def kept(path: pathlib.Path) -> bool:
        folders = path.relative_to(root).parts[:-1]
        return not any(f in LEFT_OUT or (f.startswith(LEFT_OUT[-1])) for f in folders)

    return sorted(path for path in root.rglob("*.py") if kept(path))


def sources(root: pathlib.Path) -> Iterator[Source]:
    """Reads and parses every file; what is no UTF-8 or no Python is left out."""
    for path in files(root):
        module = path.relative_to(root).parts[0].removesuffix(".py")
        try:
            text = path.read_text(encoding="utf-8")
            with warnings.catch_warnings(action="ignore"):  # of escapes in literals
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        yield Source(module, text, *_docstrings(text, tree))


def _docstrings(text: str, tree: ast.Module) -> tuple[str, tuple[str, ...]]:
    """The text without the lines of docstrings, and the docstrings."""
    lines, found = text.splitlines(), []
    for node in ast.walk(tree):
        if not isinstance(node, _DOCUMENTED):
            continue
        docstring = ast.get_docstring(node)
        if docstring is not None:
            found.append(docstring)
            first: Any = node.body[0]
            for i in range(first.lineno - 1, first.end_lineno):
                lines[i] = ""
    return "\n".join(lines), tuple(found)


# --- the task ----------------------------------------------------------------------


def load(families: Families = FAMILIES, root: pathlib.Path | None = None) -> Corpus:
    """Reads the library and makes the task of some families.

    Args:
      families: class -> top-level modules.
      root: of the library; that of this Python by default.

    Raises:
      ValueError: a class without records.
    """
    of_module = {m: label for label, modules in families.items() for m in modules}
    found = [*sources(library() if root is None else root)]
    public = [
        squeezed(s.without_docstrings if s.module in of_module else s.text)
        for s in found
    ]
    docstrings = (
        (docstring, of_module[s.module])
        for s in found
        if s.module in of_module
        for docstring in s.docstrings
    )
    labels = _records(docstrings, names_of(of_module), public)
    of_class = {c: [t for t, label in labels.items() if label == c] for c in families}
    size = min(map(len, of_class.values()))
    if size < EVAL_SHARE:
        raise ValueError(f"every class must have records, got {_sizes(of_class)}")
    train, held_out = [], []
    for label, texts in of_class.items():
        # In the order of their hashes: at random, but the same everywhere.
        texts = sorted(texts, key=_digest)[:size]
        rows = [{"text": text, "label": label} for text in texts]
        held_out += rows[: size // EVAL_SHARE]
        train += rows[size // EVAL_SHARE :]
    return Corpus(tuple(families), train, held_out, [text for text in public if text])


def names_of(modules: Iterable[str]) -> re.Pattern[str]:
    """Finds the modules' names in a text, as whole words."""
    return re.compile(rf"\b({'|'.join(map(re.escape, sorted(modules)))})\b", re.I)


def _records(
    docstrings: Iterable[tuple[str, str]], names: re.Pattern[str], public: list[str]
) -> dict[str, str]:
    """Text -> class of every record that is of one class and not in the public text.

    Texts are compared by their words, without case, punctuation and modules' names.
    """
    records: dict[Words, tuple[str, set[str]]] = {}
    for docstring, label in docstrings:
        text = squeezed(names.sub("", docstring))
        if len(_words(text)) >= MIN_WORDS:
            records.setdefault(_words(text), (text, set()))[1].add(label)
    for words in _contained(records, (_words(names.sub("", text)) for text in public)):
        del records[words]
    return {text: label for text, (label, *others) in records.values() if not others}


def _words(text: str) -> Words:
    return tuple(re.findall(r"\w+", text.lower()))


def _contained(records: Iterable[Words], texts: Iterable[Words]) -> set[Words]:
    """The records whose words stand, one after the other, in one of the texts."""
    of_start: dict[Words, list[Words]] = {}
    for words in records:
        of_start.setdefault(words[:MIN_WORDS], []).append(words)
    return {
        words
        for text in texts
        for i in range(len(text))
        for words in of_start.get(text[i : i + MIN_WORDS], ())
        if text[i : i + len(words)] == words
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sizes(of_class: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{label}: {len(texts)}" for label, texts in of_class.items())
