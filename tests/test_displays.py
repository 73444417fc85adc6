"""Displays of results: one screen, escaped HTML, no arrays, no secrets, no other change."""

import copy
import dataclasses
import html
import json
import pickle
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, auditing, models, plans, sampling
from jaxdp.core import display, validate
from jaxdp.core import keys as keys_lib
from jaxdp.mechanism import plan as plan_lib
from jaxdp.mechanism.design import Design
from jaxdp.training import reporting
from tests import golden

N = 40
STORED = {n: x["plan"] for n, x in json.loads(golden.FILE.read_text()).items()}
PLAN = plans.DPZero(
    num_examples=N,
    num_steps=6,
    sampling=sampling.FullBatch(),
    relation="replace_one",
    l2_clip_norm=1.0,
    smoothing_radius=1e-3,
).calibrate(epsilon=2.0, delta=1e-3)
RNG = np.random.default_rng(0)
#: A number that no display may show: of data, of parameters.
TELLTALE = 0.123456
DATA = RNG.normal(size=(N, 3)).astype(np.float32), np.ones(N, np.float32)
PARAMS = {"w": jnp.full(3, TELLTALE), "b": jnp.zeros(())}


def loss(params: Any, batch: Any) -> Any:
    return (batch[0] @ params["w"] + params["b"] - batch[1]) ** 2


def fitted(keys: Keys, params: Any = None, **more: Any) -> Any:
    given: dict[str, Any] = {"value_fn": loss, "optimizer": optax.adam(1e-6)} | more
    return jaxdp.fit(PLAN, keys, PARAMS if params is None else params, DATA, **given)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run = fitted(Keys.insecure(0), ledger=folder)
    optimizer = optax.adam(1e-6)
    grid = {"learning_rate": [0.01 * i for i in range(1, 61)]}
    dataset = models.load("wine")
    bound: dict[str, Any] = {"dim": 1000, "epsilon": 2.0, "delta": 1e-6}
    bound |= {"relation": "replace_one", "lipschitz": 1.0, "initial_gap": 1.0}
    return {
        "FitResult": run,
        "FitInfo": run.info,
        "Report": run.report,
        "Replay": jaxdp.replay(folder, PARAMS, optimizer=optimizer),
        "TuneResult": jaxdp.tune(
            [(PLAN, optimizer)],
            Keys.insecure(1),
            PARAMS,
            DATA,
            value_fn=loss,
            score_fn=lambda result: 0.0,
            mean_trials=1.5,
        ),
        "StudyResult": jaxdp.study(
            PLAN,
            PARAMS,
            DATA,
            value_fn=loss,
            score_fn=lambda result: result.params["b"],
            optimizer=optax.sgd,
            grid=grid,
            seeds=2,
        ),
        "Diagnosis": jaxdp.diagnose(PLAN, PARAMS, DATA, loss, optimizer=optimizer),
        "Recommendation": plans.O2NC.recommend(
            num_examples=10**6, smoothing_radius=0.05, gradient_cost=3.0, **bound
        ),
        "AuditResult": auditing.audit(PLAN, num_runs=1000),
        "LatticeResult": auditing.lattice(PLAN, num_runs=100),
        "Dataset": dataset,
        "Grouped": models.grouped(dataset, "class"),
    }


RESULTS = (
    *("FitResult", "FitInfo", "Report", "Replay", "TuneResult", "StudyResult"),
    *(
        "Diagnosis",
        "Recommendation",
        "AuditResult",
        "LatticeResult",
        "Dataset",
        "Grouped",
    ),
)


class Cells(HTMLParser):
    """Texts of a table's cells, and the tags of all."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.texts = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)
        assert all(
            dict([pair]) == {"style": "text-align: left"}
            for pair in attrs
            if pair[0] != "scope"
        )

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += data


def check(found: Any) -> str:
    """Checks the displays of an object; returns the one of a terminal."""
    text = repr(found)
    lines = text.splitlines()
    assert len(lines) <= display.HEIGHT == 40
    assert max(map(len, lines)) <= display.WIDTH == 100
    shown = Cells(found._repr_html_())
    assert shown.tags <= {
        *("table", "caption", "thead", "tbody", "tr", "th", "td"),
        "p",
    }
    assert lines[0].split(":")[0] in shown.texts
    assert not re.search(r'="[^"]*(color|background|#)', found._repr_html_())
    return text


# --- results -----------------------------------------------------------------------


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_fits_a_screen(name: str, results: dict[str, Any]) -> None:
    text = check(results[name])
    assert text.startswith(name)
    every = text + results[name]._repr_html_()
    assert "array(" not in every
    assert "0.123" not in every
    assert not any(f"{x:.4f}" in every for x in DATA[0][:, 0])


@pytest.mark.parametrize("name", RESULTS[:5])
def test_a_run_says_its_guarantee_and_no_time(
    name: str, results: dict[str, Any]
) -> None:
    text = check(results[name])
    assert not any(word in text for word in ("seconds", "steps_per_second"))
    if name not in ("FitInfo", "Replay"):
        assert "epsilon" in text and "at delta 0.001, replace_one" in text
        assert "not private: seeded keys" in " ".join(text.split())


def test_shapes_stand_for_arrays(results: dict[str, Any]) -> None:
    text = repr(results["FitResult"])
    for shown in ("4 numbers in 2 leaves", "float32[3]", "float32[6, 1]"):
        assert shown in text
    assert "float32[142, 13]" in repr(results["Dataset"])
    assert "train, private" in repr(results["Dataset"])
    assert "int32[142]" in repr(results["Grouped"])


def test_audits_say_whether_they_passed(results: dict[str, Any]) -> None:
    for name in ("AuditResult", "LatticeResult"):
        assert f"{name}: passed, lower bound" in repr(results[name])
    broken = dataclasses.replace(results["AuditResult"], epsilon_lower=9.0)
    assert "FAILED, lower bound 9 of" in repr(broken)


def test_a_study_shows_the_best_settings_first(results: dict[str, Any]) -> None:
    found = results["StudyResult"]
    lines = repr(found).splitlines()
    assert "60 settings, 2 seeds, the best first; not private" in lines[0]
    assert lines[2].split()[0] == f"{found.best['learning_rate']:.4g}"
    assert lines[-1] == "  ... and 23 more lines"
    assert found._repr_html_().count("<tr>") == 61


def test_a_recommendation_marks_its_choice(results: dict[str, Any]) -> None:
    found = results["Recommendation"]
    assert f"* {found.design.oracle}" in repr(found)
    assert found.reason.split(":")[0] in repr(found)


# --- reports -----------------------------------------------------------------------


def test_a_report_is_a_dictionary(results: dict[str, Any]) -> None:
    report = results["Report"]
    assert isinstance(report, dict)
    plain = dict(report)
    assert report == plain and plain == report
    assert json.loads(json.dumps(report)) == plain
    assert report["format"] == reporting.FORMAT == 1
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again == report and type(again) is reporting.Report
    assert jax.tree.leaves(report) == jax.tree.leaves(plain)
    assert type(jax.tree.map(lambda x: x, report)) is reporting.Report
    assert {**report} == plain and (report | {"a": 1})["a"] == 1


def test_reports_of_several_kinds() -> None:
    said = reporting.Report(relation="zero_out", private=True, delta=None)
    assert "epsilon is not stated" in repr(said)
    said = reporting.Report(
        epsilon=None, relation="zero_out", private=False, delta=1e-5
    )
    assert "epsilon is infinite; not private" in repr(said)
    assert repr(reporting.Report()).startswith("Report: epsilon is not stated")


def test_results_are_what_they_were(results: dict[str, Any]) -> None:
    run = results["FitResult"]
    params, info, report = run
    assert (params, info, report) == (run.params, run.info, run.report)
    again = pickle.loads(pickle.dumps(run))
    assert repr(again) == repr(run)
    assert len(jax.tree.leaves(run.info)) == len(jax.tree.leaves(tuple(run.info)))


def test_a_run_under_tracing_shows_itself() -> None:
    def score(result: Any) -> Any:
        assert "FitResult" in check(result)
        return result.params["b"]

    jaxdp.study(
        PLAN,
        PARAMS,
        DATA,
        value_fn=loss,
        score_fn=score,
        optimizer=optax.sgd,
        grid={"learning_rate": [0.1]},
        seeds=1,
    )


# --- plans -------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_a_plan_fits_a_screen(name: str) -> None:
    plan = plans.from_json(STORED[name])
    text = check(plan)
    assert text.startswith(f"{type(plan).__name__}: epsilon ")
    assert plan.relation in text.splitlines()[0]
    assert all(field.name in text for field in dataclasses.fields(plan))
    assert plan.to_json() == STORED[name]
    again = pickle.loads(pickle.dumps(plan))
    assert (again, hash(again)) == (plan, hash(plan))


def test_every_kind_of_plan_has_it() -> None:
    for kind in plan_lib._PLANS.values():
        assert kind.__repr__ is display.as_text
        assert vars(kind).get("__str__") is None


BARE: dict[str, Callable[[], Any]] = {
    "before calibration": lambda: dataclasses.replace(PLAN, noise_multiplier=None),
    "without delta": lambda: dataclasses.replace(PLAN, delta=None),
    "without noise": lambda: PLAN.with_noise(noise_multiplier=0.0),
}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "before calibration",
            "no noise yet, so no guarantee; plan.calibrate(epsilon=...",
        ),
        ("without delta", "no delta yet, replace_one; plan.epsilon(delta=...)"),
        ("without noise", "not private, epsilon is infinite"),
    ],
)
def test_a_plan_without_a_guarantee_says_so(name: str, said: str) -> None:
    assert said in check(BARE[name]()).splitlines()[0]


def test_str_of_a_plan_is_its_whole_table() -> None:
    lines = str(PLAN).splitlines()
    assert len(lines) == len(PLAN.rows())
    assert lines[-1].startswith("epsilon")


@pytest.mark.parametrize("name", [n for n in STORED if '"theorem": {' in STORED[n]])
def test_designs_and_promises_show_themselves(name: str) -> None:
    plan: Any = plans.from_json(STORED[name])
    if isinstance(plan.theorem, Design):
        assert check(plan.theorem).startswith("Design ")
    promise = getattr(plan.theorem, "promise", None)
    if promise is not None:
        assert check(promise).startswith(type(promise).__name__)


# --- secrets -----------------------------------------------------------------------


def roots(keys: Keys) -> list[str]:
    """Words of the secret roots, in hexadecimal and in the decimal of arrays."""
    words = keys_lib.to_hex(keys)
    hidden = [x for n, x in words.items() if n not in ("direction", "private")]
    parts = [x[i : i + 8] for x in hidden for i in range(0, len(x), 8)]
    return [*hidden, *parts, *(str(int(part, 16)) for part in parts)]


def test_no_display_shows_a_secret() -> None:
    keys = Keys.from_entropy()
    words = roots(keys)
    assert len(words) > 8
    result = fitted(keys)
    state = PLAN.transform(Keys.insecure(3)).init(PARAMS)
    shown = [repr(keys), str(keys), str(result), *map(repr, result), repr(result)]
    shown += [x._repr_html_() for x in (result, result.info, result.report)]
    assert not any(word in text for word in words for text in shown)
    assert "<secret>" in repr(state)
    inner = display.Table("", display.shapes("state", state))
    assert not any(word in inner.text() for word in roots(Keys.insecure(3)))


# --- tables ------------------------------------------------------------------------


def test_html_is_escaped() -> None:
    bad = "<script>alert('&')</script>"
    table = display.Table(bad, [(bad, bad + "\nnext")], note=bad)
    shown = Cells(table.html())
    assert "script" not in shown.tags
    assert shown.texts.count(bad) == 4
    assert html.escape(bad) in table.html()
    named = fitted(
        Keys.insecure(0), {"w": jnp.zeros(3), "b": {"<i>": jnp.zeros(())}["<i>"]}
    )
    assert "<i>" not in named._repr_html_()
    assert "&lt;b&gt;" in reporting.Report(note="<b>")._repr_html_()


def test_long_tables_are_cut() -> None:
    rows = [(f"name {i}" * (i % 9), "word " * i) for i in range(90)]
    for head in ((), ("one", "two")):
        text = display.Table("title " * 60, rows, head, "note " * 200).text()
        assert len(text.splitlines()) <= 40
        assert max(map(len, text.splitlines())) <= 100
        assert re.search(r"\.\.\. and \d+ more lines", text)
    assert display.Table("title", []).text() == "title"


def test_no_line_of_a_note_is_dropped_without_a_mark() -> None:
    rows = [("name", "value")] * 90
    few = [f"line {i}" for i in range(30)]
    text = display.Table("title", rows, note="\n".join(few)).text()
    assert text.splitlines()[-30:] == few
    many = display.Table("title", rows, note="\n".join([*few, "last"])).text()
    assert many.splitlines()[-30:] == [*few[:29], "..."]
    assert len(text.splitlines()) == len(many.splitlines()) == 40


def test_many_leaves_are_counted() -> None:
    tree = {f"leaf{i}": np.zeros(2) for i in range(30)}
    rows = display.shapes("params", tree)
    assert rows[0] == ("params", "60 numbers in 30 leaves")
    assert rows[-1] == ("  ...", "and 22 more leaves")
    assert display.shapes("params", np.zeros(2)) == [("params", "float64[2]")]
    assert display.shapes("state", ())[0] == ("state", "0 numbers in 0 leaves")
    keyed = display.shapes("keys", [jax.random.key(1)])
    assert "key<fry>[]" in keyed[-1][1]


def test_numbers_are_short() -> None:
    assert display.number(list(range(40))).endswith("11, ...]")
    assert display.number(np.zeros((3, 2))) == "float64[3, 2]"
    assert display.number(True) == "True"


def test_messages_name_a_plan_by_its_class() -> None:
    assert validate.shown(PLAN) == "a DPZero"


def test_messages_quote_no_arrays() -> None:
    """They may be data."""
    x = np.array([40006.3, 39993.4])
    assert validate.shown(x) == "an array of shape (2,)"
    assert validate.shown({"x": x, "y": x[0]}) == "a dict with arrays"
    assert validate.shown((1, [{"x": x}])) == "a tuple with arrays"
    assert validate.shown({x[0]}) == "a set with arrays"
    assert validate.shown({x[0]: 1}) == "a dict with arrays"

    @dataclasses.dataclass(slots=True)
    class Held:
        x: Any

    assert validate.shown(Held(x)) == "a Held with arrays"
    itself: list[Any] = [1]
    itself.append(itself)
    assert validate.shown(itself) == "[1, [...]]"
    assert validate.shown([1, "a"]) == "[1, 'a']"
