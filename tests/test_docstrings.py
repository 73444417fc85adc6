"""Examples of public names run as they are printed, and signatures hide no argument."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import jaxdp
from jaxdp import (
    auditing,
    data,
    kernels,
    ledger,
    metrics,
    models,
    plans,
    sampling,
    tuning,
)
from jaxdp.dpzero import theorems as dpzero_theorems
from jaxdp.o2nc.theory import bounds as o2nc_bounds
from jaxdp.o2nc.theory import design as o2nc_design
from jaxdp.o2nc.theory import recommend as o2nc_recommend
from jaxdp.o2nc.theory import theorems as o2nc_theorems
from jaxdp.saddle.theory import constants as saddle_constants
from jaxdp.saddle.theory import design as saddle_design
from jaxdp.saddle.theory import theorems as saddle_theorems
from jaxdp.sosp.theory import design as sosp_design
from jaxdp.sosp.theory import theorems as sosp_theorems

#: Callables with ``**`` in their signatures, and why.
FORWARDING = {
    "jaxdp.apply_gradients": "keywords of whatever tx.update takes",
    "jaxdp.models.load": "options of one of several data sets",
    "jaxdp.models.network_for": "options of one of several networks",
}

OFFERING = (jaxdp, plans, sampling, tuning, ledger, metrics, models, auditing, data)


#: Modules whose public names are what they define.
DEFINING = (
    *(
        f"jaxdp.kernels.{found.name}"
        for found in pkgutil.iter_modules(kernels.__path__)
    ),
    *("jaxdp.models.losses", "jaxdp.models.networks"),
    *("jaxdp.models.language.checkpoint", "jaxdp.models.language.tasks"),
    *("jaxdp.models.language.generation", "jaxdp.models.language.network"),
    "jaxdp.models.language.chats",
)


def _offered() -> Iterator[tuple[str, Any]]:
    """Public functions and classes by the names that users write, each once."""
    seen = set()
    names = [(m, dir(m), m.__name__) for m in OFFERING]
    names = [(m, n, x.replace("training.", "")) for m, n, x in names]
    for module in map(importlib.import_module, DEFINING):
        own = [n for n, x in vars(module).items() if _origin(x) == module.__name__]
        names.append((module, own, module.__name__))
    for module, members, path in names:
        for name in members:
            value = getattr(module, name)
            usable = inspect.isclass(value) or inspect.isroutine(value)
            if name.startswith("_") or not usable or id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{path}.{name}", value


def _origin(value: object) -> str:
    return str(getattr(value, "__module__", ""))


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods of a class that this library defines, inherited ones too."""
    for name in dir(kind):
        raw = inspect.getattr_static(kind, name)
        if name.startswith("_") or isinstance(raw, property):
            continue
        function = getattr(raw, "__func__", raw)
        if inspect.isfunction(function) and _origin(function).startswith("jaxdp"):
            yield name, getattr(kind, name)


def _documented() -> dict[str, Any]:
    """Public names, and one of all methods that share a docstring."""
    found: dict[str, Any] = dict(_offered())
    seen = {inspect.getdoc(value) for value in found.values()}
    for path, value in list(found.items()):
        if not inspect.isclass(value):
            continue
        for name, method in _methods(value):
            text = inspect.getdoc(method)
            if text is None or text not in seen:
                seen.add(text)
                found[f"{path}.{name}"] = method
    return found


NAMES = _documented()


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str) -> None:
    """It has a summary and an example, which prints what it says, pasted anywhere."""
    text = inspect.getdoc(NAMES[name]) or ""
    summary, *rest = text.splitlines()
    assert summary.endswith((".", ":")) and (not rest or not rest[0]), summary
    assert "Example:" in text or "Examples:" in text
    parsed = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert parsed.examples
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(verbose=False, optionflags=flags)
    said: list[str] = []
    runner.run(parsed, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("module", OFFERING, ids=lambda m: m.__name__)
def test_completion_shows_public_names_alone(module: ModuleType) -> None:
    """No typing, no libraries, no modules of the inside."""
    for name in dir(module):
        value = getattr(module, name)
        if inspect.ismodule(value):
            assert module is jaxdp and value in (*OFFERING, kernels), name
        elif inspect.isclass(value) or inspect.isroutine(value):
            assert _origin(value).startswith("jaxdp"), name


# --- signatures ---


def _callables() -> Iterator[tuple[str, Any]]:
    for path, value in _offered():
        yield path, value
        if inspect.isclass(value):
            for name, method in _methods(value):
                yield f"{path}.{name}", method


def test_signatures_name_every_argument() -> None:
    """An editor completes them, and pyright checks them."""
    hidden = set()
    for name, value in _callables():
        if getattr(value, "_is_protocol", False):  # Nobody calls it.
            continue
        parameters = inspect.signature(value).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            hidden.add(name)
    assert hidden == set(FORWARDING)


def _arguments(value: Any) -> dict[str, Any]:
    """Named arguments and their defaults, of a function or a frozen dataclass."""
    if dataclasses.is_dataclass(value):
        return {f.name: f.default for f in dataclasses.fields(value)}
    parameters = inspect.signature(value).parameters.values()
    named = (p for p in parameters if p.kind is not p.VAR_KEYWORD)
    missing = dataclasses.MISSING
    return {
        p.name: missing if p.default is p.empty else p.default
        for p in named
        if p.name not in ("cls", "theorem", "family", "last_draw")
    }


_GAMES, _ONE = saddle_constants.GameConstants, saddle_constants.SimplexConstants
#: What a method of a plan passes its arguments to: names and defaults agree.
FORWARDED: dict[Callable[..., Any], tuple[Any, ...]] = {
    plans.DPZero.from_theorem: (dpzero_theorems.prescribed,),
    plans.DPGDZerothOrder.from_theorem: (dpzero_theorems.prescribed,),
    plans.O2NC.certified: (o2nc_bounds.Constants, o2nc_design.certified),
    plans.O2NC.from_theorem: (o2nc_bounds.Constants, o2nc_theorems.prescribed),
    plans.O2NC.recommend: (o2nc_bounds.Constants, o2nc_recommend.recommend),
    plans.SOSP.certified: (sosp_design.Choices,),
    plans.SOSP.from_theorem: (sosp_theorems.TheoremConstants,),
    plans.Saddle.certified: (_GAMES, saddle_design.saddle),
    plans.Saddle.from_theorem: (_GAMES, saddle_theorems.saddle),
    plans.ConvexSimplex.certified: (_ONE, saddle_design.convex_simplex),
    plans.ConvexSimplex.from_theorem: (_ONE, saddle_theorems.convex_simplex),
}


@pytest.mark.parametrize("method", FORWARDED, ids=lambda m: m.__qualname__)
def test_explicit_arguments_agree_with_those_that_they_stand_for(method: Any) -> None:
    want: dict[str, Any] = {}
    for source in FORWARDED[method]:
        want |= _arguments(source)
    assert _arguments(method) == want
