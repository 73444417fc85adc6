"""Privacy statement of a run: its guarantee, the evidence, and what is not covered.

The headings follow NIST SP 800-226, "Guidelines for Evaluating Differential Privacy
Guarantees": unit of privacy, neighbouring data sets, epsilon and delta, mechanism, and the
hazards that no epsilon covers. Every number is computed again from the public files of the
run's folder (``plan.json`` and ``ledger.jsonl``); ``secret/`` is never read.
"""

import dataclasses
import hashlib
import html
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp import plans
from jaxdp.core import display
from jaxdp.core.types import Relation
from jaxdp.mechanism.plan import Plan
from jaxdp.training import ledger as ledger_lib
from jaxdp.training import reporting

#: Number of the format of statements as JSON.
FORMAT = 1
#: What a report must have.
_SAID = {"delta", "epsilon", "private", "relation"}
#: At which epsilon is stated, beside the plan's own delta.
_DELTAS = (1e-4, 1e-5, 1e-6, 1e-8)

_NEIGHBOURS: dict[Relation, str] = {
    "replace_one": (
        "two data sets of the same size that differ in one record, which may be replaced "
        "by any other"
    ),
    "zero_out": (
        "two data sets of the same size that differ in one record, which one of them has "
        "and the other has blank: it contributes zero"
    ),
    "add_or_remove": (
        "two data sets of which one lacks a record that the other has: an absent record is "
        "a blank row. The number of rows is a public constant, which is not hidden"
    ),
}
_UNITS = {
    "record": (
        "one record, a row of the training data. A person with k records is protected "
        "less: epsilon is about k times as large, and delta grows too"
    ),
    "user": "one user, with all of the user's records",
}
_TRUST = (
    "central: whoever runs the training sees the records; everybody else sees what is "
    "published"
)
_PUBLIC = (
    "the plan: every number of the mechanism",
    "the number of records",
    "all released quantities, as the ledger has them, and the root of the directions",
    "the trained parameters, and whatever else is computed from releases alone",
    "the held-out records and metrics on them, where the run had any",
)
_NOT_COVERED = (
    "other runs on the same records: their epsilons add up, also those of runs that were "
    "thrown away",
    "choices made by looking at results on private records: step size, clip, model, seed",
    "preprocessing that reads private records: scaling by their mean or range, a "
    "vocabulary, columns or classes chosen from them",
    "time, power and memory of the run, and what else the machine shows while it runs",
    "the folder secret/, logs, crash dumps and copies of the data: whoever reads them "
    "needs no attack",
    "records that depend on each other, or a loss that mixes records",
    "what a model tells about the population: that is what it is for",
)
_NOTHING = ("nothing that the run released, since it is not private",)


class Section(NamedTuple):
    """Part of a statement: a heading, names with values, and sentences."""

    heading: str
    rows: list[tuple[str, str]]
    items: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Statement:
    """Privacy statement of a run, as :func:`statement` computes it.

    Attributes:
      fields: all that is stated, as JSON has it.
    """

    fields: dict[str, Any]

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        rows = [row for part in self.sections() for row in part.rows]
        return display.Table(f"Privacy statement: {self.verdict}", rows)

    @property
    def verdict(self) -> str:
        """The guarantee in one sentence."""
        said, how = self.fields["guarantee"], self.fields["randomness"]
        if how["seed_source"] == "insecure":
            return (
                "NOT PRIVATE. The noise comes from a seed, and whoever knows the seed "
                "subtracts it"
            )
        if not how["private"]:
            return "NOT PRIVATE. No epsilon bounds what the run released"
        epsilon, delta = said["epsilon"], said["delta"]
        if delta is None:
            return f"differentially private for {said['relation']}, at the deltas below"
        sentence = (
            f"differentially private with epsilon {_shown(epsilon)} at delta {delta:g} for "
            f"{said['relation']}"
        )
        if delta >= 1 / said["num_examples"]:
            sentence += (
                ", but a delta of one over the number of records promises nothing"
            )
        return sentence

    def sections(self) -> list[Section]:
        """Returns the parts of the statement, in the order in which they are read."""
        said, how = self.fields["guarantee"], self.fields["randomness"]
        steps, files = self.fields["steps"], self.fields["files"]
        epsilons = [
            (f"epsilon at delta {pair['delta']:g}", _shown(pair["epsilon"]))
            for pair in said["epsilons"]
        ]
        guarantee = [
            ("unit of privacy", said["unit"]),
            ("relation", said["relation"]),
            ("neighbours", said["neighbours"]),
            ("records", f"{said['num_examples']}"),
            ("trust model", said["trust"]),
            *epsilons,
            ("accountant", said["accountant"]),
            *_meaning(said["epsilon"], said["delta"]),
        ]
        named = {"noise_std": "noise, standard deviation", "law": "law of the noise"}
        mechanism = [
            (named[name] if name in named else _words(name), display.number(value))
            for name, value in self.fields["mechanism"].items()
        ]
        made = [("steps planned", f"{steps['planned']}")]
        if steps["charged"] is not None:
            made += [
                ("steps released", f"{steps['released']}"),
                ("steps charged", f"{steps['charged']}"),
                ("attempts", f"{steps['attempts']}"),
                ("run", "over" if steps["over"] else "not over, or without a report"),
            ]
        source = "a seed" if how["seed_source"] == "insecure" else "entropy"
        made += [("keys", f"from {source}")]
        made += [("private", "yes" if how["private"] else "NO")]
        reported = [
            (_words(name), display.number(value))
            for name, value in self.fields["reported"].items()
        ]
        digests = [(f"SHA-256 of {name}", digest) for name, digest in files.items()]
        versions = {n: f"{x}" for n, x in self.fields["versions"].items()}
        ledger = ledger_lib.LEDGER in files
        checked = (
            f"agrees with {'plan and ledger' if ledger else 'the plan; no ledger'}"
        )
        checked = checked if self.fields["checked"] else "none"
        parts = [
            Section("Guarantee", guarantee),
            Section("Mechanism", mechanism),
            Section("Run", made),
            Section("As report.json says, not verified", reported),
            Section("What is public", [], tuple(self.fields["public"])),
            Section("What is not covered", [], tuple(self.fields["not_covered"])),
            Section(
                "Evidence",
                [
                    *digests,
                    ("report.json", checked),
                    ("device", str(self.fields["device"])),
                    ("versions", display.number(versions)),
                ],
            ),
        ]
        # The files may be of anybody: names and values are shown, never obeyed.
        return [
            Section(
                part.heading,
                [(display.plain(n), display.plain(x)) for n, x in part.rows],
                tuple(map(display.plain, part.items)),
            )
            for part in parts
            if part.rows or part.items
        ]

    def to_json(self) -> str:
        """Returns the statement as JSON."""
        return json.dumps(self.fields, indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Returns the statement as a page of its own, which loads nothing."""
        verdict = html.escape(self.verdict[0].upper() + self.verdict[1:])
        body = [f"<h1>{_TITLE}</h1>", f"<p><strong>{verdict}.</strong></p>"]
        for part in self.sections():
            body.append(f"<h2>{html.escape(part.heading)}</h2>")
            if part.rows:
                body.append(display.Table("", part.rows).html())
            if part.items:
                items = "".join(f"<li>{html.escape(x)}</li>" for x in part.items)
                body.append(f"<ul>{items}</ul>")
        return _PAGE.replace("BODY", "\n".join(body))

    def to_card(self) -> str:
        """Returns the statement as a model card of Hugging Face: Markdown under YAML."""
        reported = self.fields["reported"]
        name = reported.get("dataset") or reported.get("input") or "private records"
        tags = ["differential-privacy", "jax", "jaxdp"]
        out = [
            "---",
            "library_name: jaxdp",
            "tags:",
            *(f"- {tag}" for tag in tags),
            "---",
        ]
        out += ["", f"# Result of jaxdp on {_cell(name)}", ""]
        out += [
            "<!-- Add the licence to the lines above, and below what the model is for, "
            "what it was trained on and where it fails. -->",
            "",
            f"**Privacy:** {_cell(self.verdict)}.",
        ]
        for part in self.sections():
            out += ["", f"## {part.heading}", ""]
            if part.rows:
                out += ["| | |", "|---|---|"]
                out += [f"| {_cell(n)} | {_cell(x)} |" for n, x in part.rows]
            out += [f"- {_cell(item)}" for item in part.items]
        return "\n".join([*out, ""])


_TITLE = "Privacy statement"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Privacy statement</title>
<style>
body { font-family: system-ui, sans-serif; line-height: 1.5; max-width: 52rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { padding: 0.2rem 1rem 0.2rem 0; vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; width: 14rem; }
@media (max-width: 40rem) { th { width: 9rem; } }
</style>
</head>
<body>
BODY
</body>
</html>
"""


def statement(
    folder: str | os.PathLike[str], *, deltas: tuple[float, ...] = _DELTAS
) -> Statement:
    """Computes the privacy statement of a run from the public files of its folder.

    Reads ``plan.json``, ``ledger.jsonl`` and ``report.json``, whichever are there; never
    ``secret/``. Epsilon is computed from the plan, not copied from the report.

    Example:
      >>> import tempfile, pathlib
      >>> from jaxdp import plans, sampling
      >>> plan = plans.DPGD(
      ...     num_examples=100, num_steps=5, sampling=sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> _ = (folder / "plan.json").write_text(plan.file_text())
      >>> report = {"seed_source": "entropy", "private": True, "relation": "replace_one"}
      >>> report |= {"epsilon": float(plan.epsilon()), "delta": 1e-5}
      >>> _ = (folder / "report.json").write_text(json.dumps(report))
      >>> statement(folder).verdict
      'differentially private with epsilon 2 at delta 1e-05 for replace_one'

    Args:
      folder: of ``jaxdp train``, ``finetune`` or ``synthesize``, or the ``ledger`` of
        :func:`jaxdp.fit`.
      deltas: at which epsilon is stated, beside the plan's own; those of 1/n and more,
        which promise nothing, are left out.

    Raises:
      ValueError: no run is there; files that cannot be read; a plan, a ledger and a report
        that disagree, which somebody edited or which are of different runs.
    """
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(f"the folder of a run must be given, got {str(path)!r}")
    there = {
        n: path / n for n in (ledger_lib.PLAN, ledger_lib.LEDGER, ledger_lib.REPORT)
    }
    there = {name: file for name, file in there.items() if file.is_file()}
    for name, file in there.items():
        if file.resolve().parent != path.resolve():
            raise ValueError(
                f"{name} must be a file of its folder, got a link out of it"
            )
    digests = _digests(there)
    report = _report(there[ledger_lib.REPORT]) if ledger_lib.REPORT in there else None
    record = ledger_lib.read(path) if ledger_lib.LEDGER in there else None
    if record is None and (report is None or ledger_lib.PLAN not in there):
        raise ValueError(
            f"the folder of a run must be given, got {str(path)!r} without "
            f"{ledger_lib.LEDGER}, or without {ledger_lib.PLAN} and {ledger_lib.REPORT}"
        )
    plan = _plan(there.get(ledger_lib.PLAN), record)
    if record is not None:
        _check_ledger(plan, record)
    known = _implied(plan, record, report)
    claimed = known.pop("claimed")
    if report is not None:
        _check_report(report, known, plan)
    header: dict[str, Any] = {} if record is None else _normal(record.header)
    said = report or {}
    spent = None if plan.delta is None else plan.epsilon()
    stated = [d for d in deltas if d < 1 / plan.num_examples and plan.delta != 0]
    stated = sorted(
        {*stated, *(() if plan.delta is None else (plan.delta,))}, reverse=True
    )
    pairs = [{"delta": d, "epsilon": _finite(plan.epsilon(delta=d))} for d in stated]
    accountant = plan.epsilon(delta=stated[0]).accountant if stated else "none"
    # At a delta below what the sampler of the noise misses, epsilon is infinite.
    finite = [pair["epsilon"] is not None for pair in pairs]
    bounded = any(finite) if spent is None else math.isfinite(spent)
    private = claimed and bounded
    about, how = plan.describe(), _normal(plan.mechanism())
    fields = {
        "format": FORMAT,
        "run": header.get("run"),
        "plan": type(plan).__name__,
        "guarantee": {
            "unit": _UNITS[header.get("unit", "record")],
            "trust": _TRUST,
            "relation": plan.relation,
            "neighbours": _NEIGHBOURS[plan.relation],
            "num_examples": plan.num_examples,
            "epsilon": None if spent is None else _finite(spent),
            "delta": plan.delta,
            "epsilons": pairs,
            "accountant": accountant,
        },
        "mechanism": {
            "algorithm": plan.family,
            "released": about.released,
            "noise": about.noise,
            **({"law": plan.noise} if how.get("noise_multiplier") else {}),
            "sampling": repr(plan.sampling),
            **how,
        },
        "steps": {
            "planned": plan.num_steps,
            "released": None if record is None else len(record.releases),
            "charged": None if record is None else record.charged,
            "attempts": None
            if record is None
            else len({x.attempt for x in record.intents}),
            "over": report is not None,
        },
        "randomness": {"seed_source": known["seed_source"], "private": private},
        "public": list(_PUBLIC if private else _NOTHING),
        "not_covered": [*_NOT_COVERED, *_of_header(header), *_of_report(said)],
        "reported": _reported(said),
        "checked": report is not None,
        "device": header.get("device") or said.get("device"),
        "versions": header.get("versions") or said.get("versions") or {},
        "files": digests,
    }
    if _digests(there) != digests:
        raise ValueError(
            f"the files of {str(path)!r} must not change while they are read: the run goes "
            "on"
        )
    return Statement(fields)


# --- reading -------------------------------------------------------------------------


def _digests(there: Mapping[str, pathlib.Path]) -> dict[str, str]:
    return {n: hashlib.sha256(x.read_bytes()).hexdigest() for n, x in there.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a JSON object, of which a reader sees each once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found


def _json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)


def _report(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = _json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path.name} must be JSON, got {str(path)!r}: {error}"
        ) from error
    if not isinstance(content, dict) or not set(content) >= _SAID:
        raise ValueError(
            f"{path.name} must be a report with {', '.join(sorted(_SAID))}, got "
            f"{str(path)!r}"
        )
    version = content.get("format", reporting.FORMAT)
    if type(version) is not int or not 1 <= version <= reporting.FORMAT:
        raise ValueError(
            f"{path.name} must have a format from 1 to {reporting.FORMAT}, got "
            f"{version!r}: it was written by a newer version of jaxdp"
        )
    return content


def _plan(path: pathlib.Path | None, record: ledger_lib.Record | None) -> Plan:
    """Returns the plan of a folder; its file and its ledger must have the same."""
    if record is not None:
        _check_header(record.header)
    if path is None:
        assert record is not None
        return plans.from_json(json.dumps(record.header["plan"]))
    try:
        _json(path)
        plan = plans.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be a plan: {error}") from error
    if record is None:
        return plan
    if plans.from_json(json.dumps(record.header["plan"])).digest != plan.digest:
        raise ValueError(
            f"{path.name} must be the plan of {ledger_lib.LEDGER}, but they differ: one of "
            "them was edited, or is of another run"
        )
    return plan


def _check_header(header: Mapping[str, Any]) -> None:
    name = ledger_lib.LEDGER
    if type(header.get("private")) is not bool or not isinstance(
        header.get("plan"), Mapping
    ):
        raise ValueError(f"{name} must begin with a plan, and private true or false")
    if header["private"] and _command(header).get("seed") is not None:
        raise ValueError(
            f"{name} must not call a run private that had a seed: it was edited"
        )


def _command(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of the command that began a run, as its header has them."""
    note = header.get("note")
    command = note.get("command") if isinstance(note, Mapping) else None
    return command if isinstance(command, Mapping) else {}


def _check_ledger(plan: Plan, record: ledger_lib.Record) -> None:
    most = plan.num_steps
    if record.charged > most or any(x.last > most for x in record.intents):
        raise ValueError(
            f"{ledger_lib.LEDGER} must charge at most the {most} steps of the plan, but it "
            f"charges {record.charged}: the plan's epsilon does not cover them"
        )


def _implied(
    plan: Plan, record: ledger_lib.Record | None, report: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns what a report must say, by plan and ledger; without a ledger, by itself."""
    known: dict[str, Any] = {
        "num_examples": plan.num_examples,
        "num_steps": plan.num_steps,
        "relation": plan.relation,
        "sampling": repr(plan.sampling),
        **plan.mechanism(),
        "delta": plan.delta,
    }
    finite = plan.delta is not None and math.isfinite(plan.epsilon())
    if plan.delta is not None:
        spent = plan.epsilon()
        known |= {"epsilon": _finite(spent), "accountant": spent.accountant}
    if record is None:
        assert report is not None
        private, source = report["private"] is True, report.get("seed_source")
        private = private and source == "entropy"
        known["private"] = private and finite
    else:
        private = record.header["private"]
        source = "entropy" if private else "insecure"
        known["private"] = private and finite
        known["steps_charged"] = record.charged
        if not plan.may_stop:
            known["steps_done"] = len(record.releases)
    known["seed_source"] = source if source == "entropy" else "insecure"
    known["claimed"] = private
    return known


def _check_report(report: dict[str, Any], known: dict[str, Any], plan: Plan) -> None:
    """Requires that a report says what follows from plan and ledger."""
    own = report.get("plan")
    if (
        isinstance(own, Mapping)
        and plans.from_json(json.dumps(own)).digest != plan.digest
    ):
        raise ValueError(
            f"{ledger_lib.REPORT} must be of the plan, but it has another: a file was "
            "edited, or is of another run"
        )
    for name in ("steps_charged", "steps_done"):
        steps = report.get(name, 0)
        if not isinstance(steps, int) or steps > plan.num_steps:
            raise ValueError(
                f"{ledger_lib.REPORT} must have {name} of at most {plan.num_steps}, as the "
                f"plan, got {steps!r}"
            )
    for name, value in known.items():
        if name in report and not _same(report[name], _normal(value)):
            raise ValueError(
                f"{ledger_lib.REPORT} must agree with the plan and the ledger, but its "
                f"{name} is {report[name]!r} and theirs is {_normal(value)!r}: a file was "
                "edited, or is of another run"
            )


def _same(one: Any, other: Any) -> bool:
    numbers = (int, float)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, numbers) and isinstance(other, numbers):
        return math.isclose(one, other, rel_tol=1e-6)
    return _normal(one) == other


def _normal(value: Any) -> Any:
    """Returns a value as strict JSON gives it back: None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(name): _normal(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(part) for part in value]
    if isinstance(value, float):
        return _finite(value)
    return value


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _reported(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what a report says of data, model and metrics on held-out records."""
    names = ("dataset", "model", "loss", "task", "input", "num_test_examples")
    return {
        name: _normal(value)
        for name, value in report.items()
        if (name in names or name.startswith("test_"))
        and isinstance(value, int | float | str)
    }


def _of_header(header: Mapping[str, Any]) -> list[str]:
    """Returns what the command of a run left open."""
    if _command(header).get("keep_noise_roots"):
        return [
            "the roots of the noise, which the run was told to keep in secret/: whoever "
            "has them subtracts the noise"
        ]
    return []


def _of_report(report: dict[str, Any]) -> list[str]:
    """Returns what a report holds that is not public."""
    out = []
    if any(name in report for name in reporting.TIMING):
        out.append("the times in report.json, which may depend on records")
    if any(name.startswith("unsafe_") for name in report):
        out.append(
            "the numbers in report.json and quality.json that are called unsafe, and the "
            "plots of them: they are computed from private records without noise"
        )
    return out


def _meaning(epsilon: float | None, delta: float | None) -> list[tuple[str, str]]:
    """Returns the row that says in words what epsilon and delta bound."""
    if epsilon is None or delta is None:
        return []
    factor = f"{math.exp(epsilon):.3g}" if epsilon < 500 else "exp(epsilon)"
    said = (
        f"every result is at most {factor} times as likely on one data set as on its "
        f"neighbour, plus a probability of {delta:g}"
    )
    return [("in words", said)]


def _shown(epsilon: float | None) -> str:
    return "infinite" if epsilon is None else f"{epsilon:.6g}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(text: Any) -> str:
    """Returns a text as a cell of a Markdown table, in which no character is Markdown."""
    line = html.escape(display.plain(text), quote=False)
    return re.sub(r"([\\`*_\[\]#!|~])", r"\\\1", line)
