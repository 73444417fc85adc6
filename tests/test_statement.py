"""Privacy statements: what they say, on which files they rest, what they refuse."""

import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.cli import main
from jaxdp.training import statements
from tests import golden

N = 40
PLAN = plans.DPZero(
    num_examples=N,
    num_steps=4,
    sampling=sampling.FullBatch(),
    relation="replace_one",
    l2_clip_norm=1.0,
    smoothing_radius=1e-3,
).calibrate(epsilon=2.0, delta=1e-5)
STEPS = {"planned": 4, "released": 4, "charged": 4, "attempts": 1, "over": True}
PUBLIC = ("plan.json", "ledger.jsonl", "report.json")


#: A stored plan of each kind.
ONE_EACH = {
    json.loads(x["plan"])["plan"]: x["plan"]
    for x in json.loads(golden.FILE.read_text()).values()
}


def loss(params: Any, batch: Any) -> Any:
    return (batch[0] @ params["w"] - batch[1]) ** 2


def fitted(folder: Path, keys: Keys, plan: Any = PLAN) -> Any:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(N, 3)).astype(np.float32), np.ones(N, np.float32)
    given: dict[str, Any] = {"value_fn": loss, "optimizer": optax.sgd(0.1)}
    return jaxdp.fit(plan, keys, {"w": jnp.ones(3)}, data, ledger=folder, **given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("runs")
    fitted(home / "entropy", Keys.from_entropy())
    fitted(home / "insecure", Keys.insecure(0))
    return {path.name: path for path in home.iterdir()}


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a run's public files; there is no secret/."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in PUBLIC:
        shutil.copy(runs["entropy"] / name, folder)
    return folder


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "ledger.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def rewritten(folder: Path, entries: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / "ledger.jsonl").write_text(text)


# --- what it says ------------------------------------------------------------------


def test_numbers_are_the_plan_s(runs: dict[str, Path]) -> None:
    said = statements.statement(runs["entropy"]).fields
    guarantee = said["guarantee"]
    assert (guarantee["epsilon"], guarantee["delta"]) == (float(PLAN.epsilon()), 1e-5)
    for pair in guarantee["epsilons"]:
        assert pair["epsilon"] == float(PLAN.epsilon(delta=pair["delta"]))
    deltas = [pair["delta"] for pair in guarantee["epsilons"]]
    assert deltas == sorted({1e-4, 1e-5, 1e-6, 1e-8}, reverse=True)
    assert guarantee["accountant"] == PLAN.epsilon().accountant
    assert said["mechanism"]["noise_multiplier"] == PLAN.noise_multiplier
    assert said["steps"] == STEPS
    assert said["randomness"] == {"seed_source": "entropy", "private": True}
    assert said["checked"] is True
    for name in PUBLIC:
        content = (runs["entropy"] / name).read_bytes()
        assert said["files"][name] == hashlib.sha256(content).hexdigest()


def test_the_sentences_are_there(runs: dict[str, Path]) -> None:
    found = statements.statement(runs["entropy"])
    text = " ".join(
        f"{x}" for part in found.sections() for x in (*part.rows, *part.items)
    )
    for word in (
        *(
            "every result is at most 7.39 times as likely",
            "one record",
            "same size",
            "replaced by any other",
            "central",
        ),
        *(
            "other runs",
            "preprocessing",
            "time, power",
            "secret/",
            "trained parameters",
        ),
    ):
        assert word in text
    assert found.verdict.startswith(
        "differentially private with epsilon 2 at delta 1e-05"
    )
    assert "not private" not in text.lower()


@pytest.mark.parametrize("relation", ["replace_one", "zero_out", "add_or_remove"])
def test_every_relation_is_in_words(relation: Any, run: Path) -> None:
    plan = PLAN.with_noise(noise_multiplier=1.0, delta=1e-5)
    fields = json.loads(plan.to_json()) | {"relation": relation}
    said = statements.statement(planned(run, fields)).fields["guarantee"]
    assert said["relation"] == relation
    assert len(said["neighbours"]) > 40


def planned(run: Path, fields: dict[str, Any]) -> Path:
    """The folder with another plan, in the file and in the ledger, and no report."""
    (run / "plan.json").write_text(json.dumps(fields))
    header, *rest = lines(run)
    rewritten(run, [header | {"plan": fields}, *rest])
    (run / "report.json").unlink()
    return run


def test_a_run_from_a_seed_is_not_private(runs: dict[str, Path]) -> None:
    found = statements.statement(runs["insecure"])
    assert found.verdict.startswith("NOT PRIVATE")
    assert found.fields["randomness"]["private"] is False
    assert found.fields["public"] == [
        "nothing that the run released, since it is not private"
    ]


def test_a_run_without_noise_is_not_private(run: Path) -> None:
    plan = PLAN.with_noise(noise_multiplier=0.0, delta=1e-5)
    found = statements.statement(planned(run, json.loads(plan.to_json())))
    assert found.verdict.startswith("NOT PRIVATE. No epsilon")
    assert {pair["epsilon"] for pair in found.fields["guarantee"]["epsilons"]} == {None}
    json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))


def test_a_plan_without_delta_is_stated_at_several(run: Path) -> None:
    plan = PLAN.with_noise(noise_multiplier=5.0)
    plan = plans.from_json(json.dumps(json.loads(plan.to_json()) | {"delta": None}))
    found = statements.statement(planned(run, json.loads(plan.to_json())))
    assert "at the deltas below" in found.verdict
    assert found.fields["guarantee"]["epsilon"] is None
    assert len(found.fields["guarantee"]["epsilons"]) == 4


def test_pure_guarantees_are_stated_at_delta_0(run: Path) -> None:
    fields = json.loads(PLAN.to_json()) | {"noise": "laplace", "delta": 0.0}
    said = statements.statement(planned(run, fields)).fields["guarantee"]
    assert [pair["delta"] for pair in said["epsilons"]] == [0.0]
    assert math.isfinite(said["epsilon"])


@pytest.mark.parametrize("name", ONE_EACH)
def test_every_kind_of_plan_is_stated(name: str, tmp_path: Path) -> None:
    """Without a ledger: the plan and a report of what follows from it."""
    plan = plans.from_json(ONE_EACH[name])
    (tmp_path / "plan.json").write_text(plan.file_text())
    report = {"seed_source": "entropy", "private": True, "num_steps": plan.num_steps}
    report |= {"epsilon": float(plan.epsilon()), "delta": plan.delta}
    report |= {"relation": plan.relation}
    (tmp_path / "report.json").write_text(json.dumps(report))
    found = statements.statement(tmp_path, deltas=())
    assert found.verdict.startswith("differentially private with epsilon")
    assert found.fields["guarantee"]["epsilon"] == float(plan.epsilon())
    json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))


def test_infinite_epsilon_at_another_delta_is_no_verdict(run: Path) -> None:
    """What the sampler of small noise misses is more than the smallest deltas."""
    fields = json.loads(PLAN.to_json()) | {"noise_multiplier": 0.18, "num_steps": 4}
    found = statements.statement(planned(run, fields), deltas=(1e-5, 1e-300))
    assert found.fields["guarantee"]["epsilons"][-1]["epsilon"] is None
    assert found.verdict.startswith("differentially private")
    assert "infinite" in found.to_card()


def test_an_unfinished_run_is_stated(run: Path) -> None:
    (run / "report.json").unlink()
    rewritten(run, lines(run)[:4])  # Header, a chunk, an intent.
    found = statements.statement(run).fields
    assert found["steps"] == STEPS | {"released": 1, "charged": 2, "over": False}
    assert found["checked"] is False


def test_metrics_on_held_out_records_are_quoted(run: Path) -> None:
    more = {"dataset": "a|<b>\n", "test_accuracy": 0.9, "unsafe_worst_query_error": 0.1}
    edited(run / "report.json", **more, train_seconds=3.0)
    found = statements.statement(run)
    assert found.fields["reported"] == {"dataset": "a|<b>\n", "test_accuracy": 0.9}
    assert sum("unsafe" in x for x in found.fields["not_covered"]) == 1
    assert sum("times in report" in x for x in found.fields["not_covered"]) == 1
    assert "a\\|&lt;b&gt; " in found.to_card()
    assert "a|&lt;b&gt;" in found.to_html()
    assert "<b>" not in found.to_html() + found._repr_html_()


# --- on which files it rests ---------------------------------------------------------


def test_secrets_are_neither_read_nor_told(runs: dict[str, Path], run: Path) -> None:
    """The same statement comes out where there is no secret/ at all."""
    whole, bare = statements.statement(runs["entropy"]), statements.statement(run)
    assert whole == bare
    hidden = (runs["entropy"] / "secret" / "run.json").read_text()
    words = {x for x in re.findall(r"[0-9a-f]{16,}", hidden) if set(x) != {"0"}}
    header = lines(run)[0]
    words -= {header["run"], header["direction"]}
    assert len(words) >= 2
    shown = [whole.to_json(), whole.to_html(), whole.to_card(), repr(whole)]
    assert not any(word in text for word in words for text in shown)


def test_a_folder_without_a_ledger_is_stated_by_plan_and_report(run: Path) -> None:
    (run / "ledger.jsonl").unlink()
    found = statements.statement(run)
    assert found.fields["steps"]["charged"] is None
    assert found.fields["randomness"]["private"] is True
    assert "ledger.jsonl" not in found.fields["files"]


# --- what it refuses ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 1.0),
        ("epsilon", None),
        ("delta", 1e-6),
        ("relation", "zero_out"),
        ("num_examples", 41),
        ("num_steps", 3),
        ("steps_charged", 3),
        ("steps_done", 3),
        ("noise_multiplier", 100.0),
        ("l2_clip_norm", 0.5),
        ("private", False),
        ("seed_source", "insecure"),
        ("accountant", "PLD"),
        ("sampling", "SinglePass(batch_size=3)"),
    ],
)
def test_an_edited_report_is_refused(
    field: str, value: Any, run: Path, capsys: Any
) -> None:
    edited(run / "report.json", **{field: value})
    assert main(["report", str(run)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("jaxdp: RUN: report.json must agree with the plan and the")
    assert f"its {field} is {value!r}" in line


def overcharged(run: Path) -> None:
    extra = [{"intent": [4, 6], "attempt": 0}]
    rewritten(run, [*lines(run), *extra])


def charged_twice(run: Path) -> None:
    *most, last = lines(run)
    again = {"intent": most[-1]["intent"], "attempt": 1}
    rewritten(run, [*most, again, last])


BROKEN: dict[str, tuple[Any, str]] = {
    "more steps": (overcharged, "must charge at most the 4 steps of the plan, but it"),
    "a step twice": (charged_twice, "but it charges 5"),
    "another plan": (
        lambda run: edited(run / "plan.json", noise_multiplier=50.0),
        "plan.json must be the plan of ledger.jsonl",
    ),
    "no plan": (lambda run: (run / "plan.json").write_text("{}"), "must be a plan"),
    "a newer report": (
        lambda run: edited(run / "report.json", format=2),
        "newer version",
    ),
    "no report": (lambda run: (run / "report.json").write_text("["), "must be JSON"),
    "a list": (lambda run: (run / "report.json").write_text("[]"), "must be a report"),
    "an empty report": (
        lambda run: (run / "report.json").write_text("{}"),
        "must be a report with delta, epsilon, private, relation",
    ),
    "a deep report": (
        lambda run: (run / "report.json").write_text("[" * 100_000),
        "must be JSON",
    ),
    "a field twice": (
        lambda run: (run / "plan.json").write_text(
            (run / "plan.json").read_text().replace("{", '{"num_steps": 1, ', 1)
        ),
        "a field is there twice",
    ),
    "a header that is no answer": (
        lambda run: rewritten(run, [lines(run)[0] | {"private": "false"}]),
        "private true or false",
    ),
    "a seed that is called private": (
        lambda run: rewritten(
            run, [lines(run)[0] | {"note": {"command": {"seed": 7}}}, *lines(run)[1:]]
        ),
        "must not call a run private that had a seed",
    ),
    "a report of another plan": (
        lambda run: edited(
            run / "report.json",
            plan=json.loads(PLAN.with_noise(noise_multiplier=9.0).to_json()),
        ),
        "report.json must be of the plan",
    ),
    "a report of more steps, and no ledger": (
        lambda run: [
            (run / "ledger.jsonl").unlink(),
            edited(run / "report.json", steps_charged=600),
        ],
        "steps_charged of at most 4",
    ),
    "a link out of the folder": (
        lambda run: [
            (run / "report.json").rename(run.parent / "elsewhere.json"),
            (run / "report.json").symlink_to(run.parent / "elsewhere.json"),
        ],
        "must be a file of its folder",
    ),
    "a newer ledger": (
        lambda run: rewritten(run, [lines(run)[0] | {"ledger": 2}]),
        "newer version",
    ),
    "an empty folder": (
        lambda run: [(run / name).unlink() for name in PUBLIC],
        "without ledger.jsonl, or without plan.json and report.json",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_disagree_are_refused(name: str, run: Path, capsys: Any) -> None:
    change, said = BROKEN[name]
    change(run)
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxdp: RUN: ")
    assert said in line


def test_a_report_that_is_not_private_is_not_without_a_ledger(run: Path) -> None:
    (run / "ledger.jsonl").unlink()
    edited(run / "report.json", private=False, seed_source="insecure")
    found = statements.statement(run)
    assert found.verdict.startswith("NOT PRIVATE")
    assert found.fields["randomness"]["private"] is False


def test_files_that_change_meanwhile_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests are of what was read."""
    real = statements._implied

    def implied(*args: Any) -> Any:
        (run / "ledger.jsonl").write_text((run / "ledger.jsonl").read_text() + "\n")
        return real(*args)

    monkeypatch.setattr(statements, "_implied", implied)
    with pytest.raises(ValueError, match="must not change while they are read"):
        statements.statement(run)


def test_what_was_left_open_is_told(run: Path) -> None:
    header, *rest = lines(run)
    note = {"command": {"seed": None, "keep_noise_roots": True}}
    rewritten(run, [header | {"note": note}, *rest])
    assert "told to keep in secret/" in statements.statement(run).to_card()


def test_a_large_delta_promises_nothing(run: Path) -> None:
    plan = PLAN.with_noise(noise_multiplier=PLAN.noise_multiplier, delta=0.5)
    found = statements.statement(planned(run, json.loads(plan.to_json())))
    assert "promises nothing" in found.verdict


def test_names_are_shown_and_not_obeyed(run: Path, capsys: Any) -> None:
    """No control sequence, heading, image or cell comes from a file of somebody else."""
    name = "x\r\r# Statement\r**epsilon 0.01** ![a](http://evil/p.png) \\| \x1b[2J"
    edited(run / "report.json", dataset=name)
    for form in ("text", "card", "html"):
        assert main(["report", str(run), "--format", form]) == 0
        text = capsys.readouterr().out
        assert not {"\x1b", "\r"} & set(text)
        if form == "card":
            assert not re.search(r"(?<!\\)(\*\*epsilon|!\[)|^# Statement", text, re.M)


# --- the command -------------------------------------------------------------------


def test_json_is_the_statement(run: Path, capsys: Any) -> None:
    want = statements.statement(run).fields
    for words in (["--json"], ["--format", "json"]):
        assert main(["report", str(run), *words]) == 0
        assert json.loads(capsys.readouterr().out) == want
    assert want["format"] == statements.FORMAT == 1


def test_text_is_a_table(run: Path, capsys: Any, tmp_path: Path) -> None:
    edited(run / "report.json", dataset="[red]a[/red]")
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    for word in ("Privacy statement", "epsilon at delta 1e-05", "2", "not covered"):
        assert word in shown
    assert "[red]a[/red]" in shown
    out = tmp_path / "statement.txt"
    assert main(["report", str(run), "--output", str(out)]) == 0
    text = out.read_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "SHA-256 of ledger.jsonl" in text


class Page(HTMLParser):
    """Tags of a page, their attributes, and those that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_a_page_of_its_own(run: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "statement.html"
    words = ["report", str(run), "--format", "html", "--output", str(out)]
    assert main(words) == 0
    page, text = Page(), out.read_text()
    page.feed(text)
    assert (page.open, page.links) == ([], [])
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb|url\(", text)
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


def test_card_begins_with_yaml(run: Path, capsys: Any) -> None:
    assert main(["report", str(run), "--format", "card"]) == 0
    text = capsys.readouterr().out
    _, front, body = text.split("---\n", 2)
    assert front.splitlines()[:2] == ["library_name: jaxdp", "tags:"]
    assert all(re.fullmatch(r"[\w]+:( \w+)?|- [\w-]+", x) for x in front.splitlines())
    assert "**Privacy:** differentially private with epsilon 2" in body
    assert "## What is not covered" in body
    assert all(row.count("|") == 3 for row in body.splitlines() if row.startswith("|"))


@pytest.mark.parametrize("words", [[], ["nowhere"], ["x", "--format", "pdf"]])
def test_mistakes_are_one_line(words: list[str], capsys: Any) -> None:
    assert main(["report", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_statement_shows_itself(run: Path) -> None:
    found = statements.statement(run)
    assert len(repr(found).splitlines()) <= 40
    assert "epsilon at delta" in found._repr_html_()


# --- the page on formats -------------------------------------------------------------


def test_the_page_on_formats_lists_every_field(runs: dict[str, Path]) -> None:
    """Of plan, header, report and statement, and every file of the folder."""
    root = Path(__file__).resolve().parents[1]
    page = (root / "docs/concepts/file_formats.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([^`\n]+)`", page))
    folder = runs["entropy"]
    said = statements.statement(folder).fields
    parts = [
        said,
        said["guarantee"],
        said["steps"],
        said["randomness"],
        lines(folder)[0],
    ]
    parts += [json.loads((folder / "report.json").read_text())]
    for fields in parts:
        assert set(fields) <= listed, set(fields) - listed
    files = {x.name for x in folder.rglob("*") if x.is_file()}
    assert files <= listed
    for name in ("plan.json", "report.json"):
        assert json.loads((folder / name).read_text())["format"] == 1
