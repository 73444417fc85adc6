"""What each command takes: types, help and how a wrong value is described."""

import dataclasses
import json
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import tyro

from jaxdp import accounting
from jaxdp.cli import recipes
from jaxdp.plans.dpzero import DirectionLaw

DIRECTIONS: tuple[str, ...] = typing.get_args(DirectionLaw)
MODELS = ("linear", "mlp")
SCHEDULES = ("constant", "cosine")
TASKS = ("classification", "regression")
DEFAULT_EPSILON = 2.0
DEFAULT_DELTA = 1e-5


# --- kinds of values ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Allowed:
    words: str


def _kind(
    metavar: str, allowed: str, parse: Callable[[str], Any], missing: str = "none"
) -> tuple[Any, _Allowed]:
    """What annotates an option of one value.

    Args:
      metavar: what help calls the value.
      allowed: what it may be, in words.
      parse: reads it; raises ValueError or OSError.
      missing: what help calls None.
    """

    def instance(words: list[str]) -> Any:
        try:
            return parse(words[0])
        except (ValueError, OSError):
            raise ValueError(f"must be {allowed}, got {words[0]!r}") from None

    spec = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=instance,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [missing if value is None else str(value)],
    )
    return spec, _Allowed(allowed)


def allowed(command: type, name: str) -> str:
    """What the value of a command's field may be, in words."""
    hint = typing.get_type_hints(command, include_extras=True)[name]
    words = [x.words for x in typing.get_args(hint) if isinstance(x, _Allowed)]
    return words[0] if words else "a value"


def _choice(*names: str, missing: str = "none") -> tuple[Any, _Allowed]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    shown = ", ".join(names)
    return _kind("|".join(names), f"one of {shown}", parse, missing)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _pair(text: str) -> tuple[float, float]:
    low, high = _numbers(text)
    return low, high


def _widths(text: str) -> tuple[int, ...]:
    widths = tuple(int(part) for part in text.split(","))
    if min(widths) < 1:
        raise ValueError
    return widths


def _bounds(text: str) -> tuple[float, float] | Mapping[str, Any]:
    if not text.endswith(".json"):
        return _pair(text)
    columns = json.loads(pathlib.Path(text).read_text(encoding="utf-8"))
    if not isinstance(columns, dict):
        raise ValueError
    return columns


def _classes(text: str) -> int | tuple[str, ...]:
    if text.isdecimal():
        return int(text)
    return tuple(part.strip() for part in text.split(","))


def _number(missing: str = "none") -> tuple[Any, _Allowed]:
    return _kind("NUMBER", "a number", float, missing)


def _integer(missing: str = "none") -> tuple[Any, _Allowed]:
    return _kind("INTEGER", "an integer", int, missing)


def _path(missing: str = "none") -> tuple[Any, _Allowed]:
    return _kind("PATH", "a path", pathlib.Path, missing)


Relation = Annotated[str, *_choice(*accounting.RELATIONS)]
SamplingProb = Annotated[float | None, *_number("1")]
MaybeNumber = Annotated[float | None, *_number()]
MaybeInteger = Annotated[int | None, *_integer()]
NumberOfRecipe = Annotated[float | None, *_number("recipe")]
IntegerOfRecipe = Annotated[int | None, *_integer("recipe")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


# --- commands ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train on a data set under a plan; a report and plots go to a folder.

    "recipe" stands for a default that is fixed for each data set (jaxdp/cli/recipes.py).
    Metrics are computed on the held-out records only, which count as public.
    """

    dataset: Annotated[str, *_kind("NAME|PATH", "a data set", str)] = "digits"
    """digits, breast_cancer, wine, diabetes, quadratic_*, or a .csv or .npz file."""
    model: Annotated[str, *_choice(*MODELS)] = "linear"
    """Of what is trained; the quadratics are their own model."""
    hidden: Annotated[
        tuple[int, ...] | None,
        *_kind("WIDTH,...", "integers >= 1, as in 64,32", _widths, "32"),
    ] = None
    """Widths of mlp's hidden layers."""
    algorithm: Annotated[str, *_choice(*recipes.ALGORITHMS)] = "dpzero"
    """mezo and gd are dpzero and dpgd without clip and noise: not private."""

    epsilon: Annotated[float | None, *_number(f"{DEFAULT_EPSILON:g}")] = None
    """Budget of the whole run."""
    delta: Annotated[float | None, *_number(f"{DEFAULT_DELTA:g}")] = None
    """Budget of the whole run."""
    relation: Relation = "replace_one"
    """Which data sets count as neighbours."""

    num_steps: IntegerOfRecipe = None
    """Steps; each releases one quantity."""
    sampling_prob: SamplingProb = None
    """Probability that a record joins a step."""
    batch_size: MaybeInteger = None
    """Expected records of a step, instead of --sampling-prob."""
    l2_clip_norm: NumberOfRecipe = None
    """Bound on one record's contribution."""
    smoothing_radius: NumberOfRecipe = None
    """Length of the difference, over that of the direction."""
    num_directions: IntegerOfRecipe = None
    """Directions of a step; together they cost what one costs."""
    direction: Annotated[str | None, *_choice(*DIRECTIONS, missing="recipe")] = None
    """Law of the directions."""

    learning_rate: NumberOfRecipe = None
    """Step size."""
    schedule: Annotated[str | None, *_choice(*SCHEDULES, missing="recipe")] = None
    """Step size over time; cosine ends at 0."""
    momentum: NumberOfRecipe = None
    """In [0, 1): decay of a moving average of the releases."""
    average: NumberOfRecipe = None
    """In [0, 1]: share of the last iterates that is averaged."""
    microbatch_size: MaybeInteger = None
    """Records evaluated at once."""

    seed: Annotated[int | None, *_integer("entropy")] = None
    """Makes the run reproducible, and not private."""

    label: Annotated[str | None, *_kind("NAME", "a name", str)] = None
    """File: the label's column or array."""
    bounds: Annotated[
        Any,
        *_kind(
            "LOW,HIGH|FILE",
            "numbers LOW,HIGH or a JSON file with [low, high] of every column",
            _bounds,
        ),
    ] = None
    """File: public bounds that scale features to [0, 1]."""
    task: Annotated[str | None, *_choice(*TASKS, missing=TASKS[0])] = None
    """File: what the label is."""
    classes: Annotated[
        Any, *_kind("K|NAME,...", "a number or names of classes", _classes, "read")
    ] = None
    """File: the public set of classes."""
    label_bounds: Annotated[
        tuple[float, float] | None, *_kind("LOW,HIGH", "numbers LOW,HIGH", _pair)
    ] = None
    """File: public bounds that scale a regression target."""
    test_fraction: Annotated[float | None, *_number("0.2")] = None
    """Share of the records that is held out and public; a file needs it given."""

    out: Annotated[pathlib.Path | None, *_path("runs/DATASET")] = None
    """Folder for plan.json, report.json, params.npz and the plots."""
    overwrite: Flag = False
    """Also write into a folder with other files, or in place of an earlier run."""
    resume: Flag = False
    """Go on with the run in --out; other options stay as they were."""
    new_attempt: Flag = False
    """With --resume: other data or devices; lost steps are charged twice."""
    progress: bool = True
    """Draw a progress bar, on a terminal."""
    quiet: Flag = False
    """Print nothing but errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epsilon:
    """The epsilon of a plan, given by its numbers or by a plan.json."""

    plan: Annotated[pathlib.Path | None, *_path()] = None
    """A plan.json; stands for all numbers but --delta."""
    noise_multiplier: MaybeNumber = None
    """Standard deviation of the noise on a released sum, over the sensitivity."""
    num_steps: MaybeInteger = None
    """Released sums."""
    delta: Annotated[float | None, *_number(f"{DEFAULT_DELTA:g}")] = None
    """At which delta; a plan.json may have its own."""
    relation: Annotated[
        str | None, *_choice(*accounting.RELATIONS, missing="replace_one")
    ] = None
    """Which data sets count as neighbours."""
    num_examples: MaybeInteger = None
    """Records of the data set; only sampling asks for it."""
    sampling_prob: SamplingProb = None
    """Probability that a record joins a step."""
    batch_size: MaybeInteger = None
    """Expected records of a step, instead of --sampling-prob."""
    json: Flag = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """The least noise for a number of steps, or the most steps for a noise."""

    epsilon: Annotated[float, *_number()]
    """Budget of the whole run."""
    delta: Annotated[float, *_number()] = DEFAULT_DELTA
    """Budget of the whole run."""
    num_steps: MaybeInteger = None
    """Released sums: asks for the noise."""
    noise_multiplier: MaybeNumber = None
    """Noise on a released sum, over the sensitivity: asks for the steps."""
    relation: Relation = "replace_one"
    """Which data sets count as neighbours."""
    num_examples: MaybeInteger = None
    """Records of the data set; only sampling asks for it."""
    sampling_prob: SamplingProb = None
    """Probability that a record joins a step."""
    batch_size: MaybeInteger = None
    """Expected records of a step, instead of --sampling-prob."""
    json: Flag = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Rebuild a run's parameters from its initial ones and its ledger, without data."""

    folder: Annotated[
        pathlib.Path, *_path(), tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")
    ]
    """Folder that jaxdp train wrote, or its ledger.jsonl."""
    initial: Annotated[pathlib.Path | None, *_path("FOLDER/initial.npz")] = None
    """Initial parameters of the run."""
    out: Annotated[pathlib.Path | None, *_path("FOLDER/replayed.npz")] = None
    """File for the parameters."""
    json: Flag = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Attack a plan's code: a lower bound on its epsilon; exit code 1 if it is too high.

    A plan of many steps is audited with few of them, with less noise and the same epsilon.
    """

    plan: Annotated[
        pathlib.Path, *_path(), tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")
    ]
    """A plan.json."""
    num_runs: Annotated[int, *_integer()] = 100_000
    """Simulated runs on each of two neighbouring data sets."""
    num_steps: Annotated[int, *_integer()] = 4
    """The most steps of a simulated run."""
    delta: Annotated[float | None, *_number("plan")] = None
    """At which delta."""
    seed: Annotated[int, *_integer()] = 0
    """An audit is a function of it."""
    json: Flag = False
    """Print one JSON object."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Epsilon, tyro.conf.subcommand("epsilon")]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate")]
    | Annotated[Audit, tyro.conf.subcommand("audit")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
)
COMMANDS: dict[str, type] = {
    "train": Train,
    "epsilon": Epsilon,
    "calibrate": Calibrate,
    "audit": Audit,
    "replay": Replay,
}
