"""Options of each command: types, help and allowed values."""

import dataclasses
import pathlib
import typing
from typing import Annotated, Any

import tyro

from jaxdp import accounting
from jaxdp.cli import kinds, recipes
from jaxdp.cli.kinds import (
    Flag,
    IntegerOfRecipe,
    MaybeInteger,
    MaybeNumber,
    NumberOfRecipe,
    Relation,
    SamplingProb,
)
from jaxdp.dpzero.plan import DirectionLaw
from jaxdp.kernels.prefix_noise import NAMES as PREFIX_NOISES
from jaxdp.sosp.hessian import HESSIANS
from jaxdp.o2nc.theory.estimators import ORACLES

DIRECTIONS: tuple[str, ...] = typing.get_args(DirectionLaw)
MODELS = ("linear", "mlp")
#: Of ``jaxdp.models.losses``, whose package brings flax.
LOSSES = ("cross_entropy", "hinge", "squared_error")
SCHEDULES = ("constant", "cosine")
TASKS = ("classification", "regression")
LANGUAGE_TASKS = ("prompt", "head", "choice", "generation")
TRAINABLE = ("all", "lora", "prefix", "head")
#: Of ``jaxdp.models.language.network.ComputeDtype``, whose module brings flax.
COMPUTE_DTYPES = ("float32", "bfloat16")
#: Those that a language model draws where it needs them.
LAZY_DIRECTIONS = ("rademacher", "gaussian", "sphere")
SAMPLING = ("poisson", "fixed-size", "full")
TIMINGS = ("public", "secret")
DEFAULT_EPSILON = 2.0
DEFAULT_DELTA = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train on a data set under a plan; a report and plots go to a folder.

    "recipe" stands for a default that is fixed for each data set (jaxdp/cli/recipes.py).
    Metrics are computed on the held-out records only, which count as public.
    """

    dataset: Annotated[str, *kinds.kind("NAME|PATH", "a data set", str)] = "digits"
    """digits, digits_4x4, breast_cancer, wine, diabetes, quadratic_*, or a .csv or .npz
    file."""
    model: Annotated[str, *kinds.choice(*MODELS)] = "linear"
    """Of what is trained; the quadratics are their own model."""
    hidden: Annotated[
        tuple[int, ...] | None,
        *kinds.kind("WIDTH,...", "integers >= 1, as in 64,32", kinds.widths, "32 or 8"),
    ] = None
    """Widths of mlp's hidden layers; by default 32, and 8 for o2nc."""
    loss: Annotated[
        str | None, *kinds.choice(*LOSSES, missing="the first of the task")
    ] = None
    """cross_entropy and hinge are for classification, squared_error for regression."""
    algorithm: Annotated[str, *kinds.choice(*recipes.ALGORITHMS)] = "dpzero"
    """mezo and gd are dpzero and dpgd without clip and noise: not private. o2nc is for
    losses with kinks: online-to-non-convex conversion, in one pass unless --multi-pass.
    saddle makes the loss of the worst --group small: one pass, mirror descent against
    weights of the groups. sosp factors second moments of the features, from a saddle: one
    pass, to a second-order stationary point with a certificate."""
    group: Annotated[str | None, *kinds.kind("NAME", "a name", str)] = None
    """Groups of records, for errors by group: class, or a column (diabetes: sex, and the
    target becomes whether it is above 150)."""
    group_values: Annotated[
        tuple[float, ...] | None,
        *kinds.kind("V,V,...", "numbers V,V,...", kinds.numbers),
    ] = None
    """File: public values of --group's column, one for each group."""
    group_probabilities: Annotated[
        tuple[float, ...] | None,
        *kinds.kind("P,P,...", "numbers P,P,...", kinds.numbers, "all alike"),
    ] = None
    """saddle: public shares of the groups; not those of the private records."""

    epsilon: Annotated[float | None, *kinds.number(f"{DEFAULT_EPSILON:g}")] = None
    """Budget of the whole run."""
    delta: Annotated[float | None, *kinds.number(f"{DEFAULT_DELTA:g}")] = None
    """Budget of the whole run."""
    relation: Relation = "replace_one"
    """Which data sets count as neighbours."""

    num_steps: IntegerOfRecipe = None
    """Steps; each releases one quantity. o2nc: by default all that one pass allows, unless
    --multi-pass. sosp: at most."""
    sampling_prob: SamplingProb = None
    """Probability that a record joins a step."""
    batch_size: MaybeInteger = None
    """Expected records of a step, instead of --sampling-prob; o2nc: records of a step
    between two restarts."""
    l2_clip_norm: NumberOfRecipe = None
    """Bound on one record's contribution; o2nc: to a step between two restarts."""
    smoothing_radius: NumberOfRecipe = None
    """Length of the difference, over that of the direction, which is sqrt(d) for d
    parameters; o2nc: the distance itself by which a point is moved."""
    num_directions: IntegerOfRecipe = None
    """Directions of a step; together they cost what one costs. o2nc with first_order:
    points of a change, for each record."""
    direction: Annotated[str | None, *kinds.choice(*DIRECTIONS, missing="recipe")] = (
        None
    )
    """Law of the directions."""

    oracle: Annotated[str | None, *kinds.choice(*ORACLES, missing="recipe")] = None
    """o2nc: what is asked of a record: values, released as vectors; gradients; or values,
    released as slopes along directions that all records share."""
    multi_pass: Flag = False
    """o2nc: every step reads all records, or a share of them by --sampling-prob."""
    period: IntegerOfRecipe = None
    """o2nc: steps from one restart of the gradient estimate to the next."""
    restart_sampling_prob: SamplingProb = None
    """o2nc with --multi-pass: probability that a record joins a step with a restart; then
    --sampling-prob is that of the other steps."""
    restart_batch_size: IntegerOfRecipe = None
    """o2nc: records of a step with a restart."""
    restart_l2_clip_norm: NumberOfRecipe = None
    """o2nc: bound on one record's contribution to a step with a restart."""
    prefix_noise: Annotated[
        str | None, *kinds.choice(*PREFIX_NOISES, missing="recipe")
    ] = None
    """o2nc: how the noise of a period is correlated; sosp: between two refreshes."""
    window: IntegerOfRecipe = None
    """o2nc: steps of a window; the mean of a random window's points is returned."""
    max_step: NumberOfRecipe = None
    """o2nc: the longest step."""

    radius: NumberOfRecipe = None
    """saddle: of the l1 ball that all parameters are in."""
    num_draws: IntegerOfRecipe = None
    """saddle: drawn vertices that the point of a gradient is the mean of."""
    clip_x: NumberOfRecipe = None
    """saddle: bound on a coordinate of one record's gradient by the parameters, as a share
    of the bound that --radius implies."""
    step_ratio: NumberOfRecipe = None
    """saddle: how far scores of groups move beside those of parameters; the budget says
    how far both do."""

    rank: IntegerOfRecipe = None
    """sosp: principal directions that are looked for."""
    accuracy: Annotated[float | None, *kinds.number("from records and budget")] = None
    """sosp: error of estimated gradients; smaller ones take more records."""
    failure_probability: NumberOfRecipe = None
    """sosp: how likely a certificate may be wrong."""
    hessian: Annotated[str | None, *kinds.choice(*HESSIANS, missing="recipe")] = None
    """sosp: noisy Hessians, products with them, or a running one."""

    learning_rate: NumberOfRecipe = None
    """Step size; o2nc's recipes adapt it."""
    schedule: Annotated[str | None, *kinds.choice(*SCHEDULES, missing="recipe")] = None
    """Step size over time; cosine ends at 0."""
    momentum: NumberOfRecipe = None
    """In [0, 1): decay of a moving average of the releases."""
    average: NumberOfRecipe = None
    """In [0, 1]: share of the last iterates that is averaged."""
    microbatch_size: MaybeInteger = None
    """Records evaluated at once."""

    seed: Annotated[int | None, *kinds.integer("entropy")] = None
    """Makes the run reproducible, and not private."""

    label: Annotated[str | None, *kinds.kind("NAME", "a name", str)] = None
    """File: the label's column or array."""
    bounds: Annotated[
        Any,
        *kinds.kind(
            "LOW,HIGH|FILE",
            "numbers LOW,HIGH or a JSON file with [low, high] of every column",
            kinds.bounds,
        ),
    ] = None
    """File: public bounds that scale features to [0, 1]."""
    task: Annotated[str | None, *kinds.choice(*TASKS, missing=TASKS[0])] = None
    """File: what the label is."""
    classes: Annotated[
        Any,
        *kinds.kind(
            "K|NAME,...", "a number or names of classes", kinds.classes, "read"
        ),
    ] = None
    """File: the public set of classes."""
    label_bounds: Annotated[
        tuple[float, float] | None,
        *kinds.kind("LOW,HIGH", "numbers LOW,HIGH", kinds.pair),
    ] = None
    """File: public bounds that scale a regression target."""
    test_fraction: Annotated[float | None, *kinds.number("0.2")] = None
    """Share of the records that is held out and public; a file needs it given."""

    out: Annotated[pathlib.Path | None, *kinds.path("runs/DATASET")] = None
    """Folder for plan.json, report.json, params.npz and the plots."""
    overwrite: Flag = False
    """Also write into a folder with other files, or in place of an earlier run."""
    resume: Flag = False
    """Go on with the run in --out; other options stay as they were."""
    new_attempt: Flag = False
    """With --resume: other data or devices; lost steps are charged twice."""
    keep_noise_roots: Flag = False
    """When the run ends, leave in secret/ what its noise was drawn from, for an audit:
    whoever reads it subtracts all noise."""
    timings: Annotated[
        str | None, *kinds.choice(*TIMINGS, missing="public, secret for a file")
    ] = None
    """Where the run's seconds and steps per second go: into the public report.json, or into
    secret/ alone.
    Epsilon does not cover time, which may depend on records."""
    progress: bool = True
    """Draw a progress bar, on a terminal."""
    quiet: Flag = False
    """Print nothing but errors."""
    show_values: Flag = False
    """Let error messages quote what is in the files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tune a RoBERTa or OPT checkpoint without backpropagation, under a plan.

    The model, the records of --eval, templates, labels and all numbers are public; only
    the records of --train are private. Metrics are computed on --eval, before and while
    training. "recipe" stands for what --recipe says, and without one for 1000 steps (the
    paper takes 10000 and more) of 64 records, and by --trainable:
    all: step size 1e-6, clip 200, radius 1e-3, the paper's for RoBERTa-large;
    lora: 5e-5, 30, 1e-2; prefix: 1e-3, 30, 1e-1; head: 1e-3, 10, 1e-3.
    Smaller models take larger steps: choose on public records.
    """

    model: Annotated[Any, *kinds.kind("FOLDER", "a folder", str)] = None
    """Checkpoint as Hugging Face writes it: config.json, safetensors, a tokenizer."""
    train: Annotated[Any, *kinds.kind("FILE", "a file", str)] = None
    """Private records: .jsonl, .csv or .tsv."""
    eval: Annotated[Any, *kinds.kind("FILE", "a file", str)] = None
    """Public records of the same fields, on which the run is judged."""
    task: Annotated[Any, *kinds.choice(*LANGUAGE_TASKS, missing="recipe")] = None
    """Label words in a prompt, a classification head, choice by likelihood, or text."""

    template: Annotated[Any, *kinds.kind("TEXT", "a text", str, "recipe or {text}")] = (
        None
    )
    """Fields in braces, as in "{text} It was {mask}."; {sep} ends a text."""
    labels: Annotated[
        Any, *kinds.kind("K|NAME,...", "a number or names", kinds.classes, "0,1,...")
    ] = None
    """Classes in order, as the label field has them. Never read from the records."""
    label_words: Annotated[Any, *kinds.kind("WORD,...", "words", kinds.words)] = None
    """The word of each class, for the tasks prompt and choice."""
    label_field: Annotated[Any, *kinds.kind("NAME", "a name", str, "label")] = None
    """Field of the class; choice: of the right choice."""
    choices_field: Annotated[Any, *kinds.kind("NAME", "a name", str)] = None
    """Choice: field with a record's list of choices, instead of --label-words."""
    num_choices: MaybeInteger = None
    """Choice: the most choices that a record has."""
    answer_field: Annotated[Any, *kinds.kind("NAME", "a name", str, "answer")] = None
    """Generation: field of the answer, or of a list of them."""
    max_length: Annotated[Any, *kinds.integer("recipe or 128")] = None
    """Tokens of a record; of longer ones, fields are cut and the template is not."""
    span_length: Annotated[Any, *kinds.integer("recipe or 32")] = None
    """Tokens of a choice or an answer, within --max-length."""
    truncate: Annotated[str, *kinds.choice("right", "left")] = "right"
    """Which end of a field is lost."""

    trainable: Annotated[str, *kinds.choice(*TRAINABLE)] = "all"
    """All parameters; an adapter (and a head); a head alone."""
    lora_rank: Annotated[int | None, *kinds.integer("8")] = None
    """Of --trainable lora."""
    lora_alpha: Annotated[float | None, *kinds.number("16")] = None
    """Of --trainable lora: over the rank, scales what it adds."""
    prefix_length: Annotated[int | None, *kinds.integer("5")] = None
    """Of --trainable prefix."""
    compute_dtype: Annotated[
        Any, *kinds.choice(*COMPUTE_DTYPES, missing="recipe or float32")
    ] = None
    """Of activations; parameters, perturbations and losses are float32."""

    epsilon: Annotated[float, *kinds.number()] = DEFAULT_EPSILON
    """Budget of the whole run."""
    delta: Annotated[Any, *kinds.number(f"recipe or {DEFAULT_DELTA:g}")] = None
    """Budget of the whole run."""
    relation: Relation = "replace_one"
    """Which data sets count as neighbours."""

    num_steps: IntegerOfRecipe = None
    """Steps; each releases one number for each direction."""
    sampling: Annotated[str, *kinds.choice(*SAMPLING)] = "poisson"
    """Each record by its own coin, a random subset of one size, or all records."""
    batch_size: IntegerOfRecipe = None
    """Records of a step; expected ones with --sampling poisson."""
    l2_clip_norm: NumberOfRecipe = None
    """Bound on one record's slopes."""
    smoothing_radius: NumberOfRecipe = None
    """Length of the difference, over that of the direction."""
    learning_rate: NumberOfRecipe = None
    """Step size."""
    num_directions: Annotated[int, *kinds.integer()] = 1
    """Directions of a step; together they cost what one costs."""
    direction: Annotated[
        Any, *kinds.choice(*LAZY_DIRECTIONS, missing="recipe or rademacher")
    ] = None
    """Law of the directions."""
    microbatch_size: MaybeInteger = None
    """Records evaluated at once."""
    eval_every: Annotated[Any, *kinds.integer("num_steps/20")] = None
    """Steps between evaluations, and between records of the run."""
    recipe: Annotated[Any, *kinds.kind("NAME", "a name", str)] = None
    """Settings of the DPZero paper, as in roberta-large/sst-2 or opt-1.3b/squad.
    Other options come before it."""

    seed: Annotated[int | None, *kinds.integer("entropy")] = None
    """Makes the run reproducible, and not private."""
    out: Annotated[pathlib.Path | None, *kinds.path("runs/TRAIN")] = None
    """Folder for plan.json, report.json, model/ and the plots."""
    overwrite: Flag = False
    """Also write into a folder with other files, or in place of an earlier run."""
    resume: Flag = False
    """Go on with the run in --out; other options stay as they were."""
    new_attempt: Flag = False
    """With --resume: other data or devices; lost steps are charged twice."""
    keep_noise_roots: Flag = False
    """When the run ends, leave in secret/ what its noise was drawn from, for an audit:
    whoever reads it subtracts all noise."""
    timings: Annotated[str | None, *kinds.choice(*TIMINGS, missing="secret")] = None
    """Where the run's seconds and steps per second go: into the public report.json, or into
    secret/ alone.
    Epsilon does not cover time, which may depend on records."""
    progress: bool = True
    """Draw a progress bar, on a terminal."""
    quiet: Flag = False
    """Print nothing but errors and warnings."""
    show_values: Flag = False
    """Let error messages quote what is in the files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthesize:
    """Synthetic records that answer queries as the records of a table do, under a plan.

    A query is the share of records that have one combination of bins in some columns: all
    combinations in all sets of --degree columns. Bins are public and given, never learned
    from the records: columns without bins are left out, numbers beyond the edges belong to
    the first and the last bin, and a record that the bins do not describe counts zero.
    """

    input: Annotated[pathlib.Path, *kinds.path()]
    """Private records: a .csv file with a header."""
    output: Annotated[pathlib.Path, *kinds.path()]
    """Where the synthetic records go: a .csv file of the columns that have bins."""
    bins: Annotated[pathlib.Path, *kinds.path()]
    """JSON of every column: {"age": {"edges": [0, 18, 65, 120]}, "sex": {"values": ["f",
    "m", "x"], "other": "x"}}; "other", if given, is for all unknown values."""
    degree: Annotated[int, *kinds.integer()] = 2
    """Columns of a query."""

    epsilon: Annotated[float, *kinds.number()] = DEFAULT_EPSILON
    """Budget of the whole run."""
    delta: Annotated[float, *kinds.number()] = DEFAULT_DELTA
    """Budget of the whole run."""
    relation: Relation = "replace_one"
    """Which data sets count as neighbours. Their number of records is public."""
    num_steps: Annotated[int | None, *kinds.integer("from the bound")] = None
    """Steps; each releases the number of one query."""
    num_records: Annotated[int | None, *kinds.integer("as many as private ones")] = None
    """Synthetic records."""

    public: Annotated[pathlib.Path | None, *kinds.path()] = None
    """Public records of the same columns, on which the answers are judged."""
    test_fraction: Annotated[float | None, *kinds.number()] = None
    """Share of the records that is held out and public, instead of --public."""
    unsafe_metrics: Flag = False
    """Also judge the answers on the private records: report and plot are not private."""

    seed: Annotated[int | None, *kinds.integer("entropy")] = None
    """Makes the run reproducible, and not private."""
    report: Annotated[pathlib.Path | None, *kinds.path("runs/OUTPUT")] = None
    """Folder for plan.json, report.json, histogram.npz and the plot."""
    overwrite: Flag = False
    """Also write in place of the files of an earlier run."""
    timings: Annotated[str | None, *kinds.choice(*TIMINGS, missing="secret")] = None
    """Where the run's seconds and steps per second go: into the public report.json, or
    nowhere.
    Epsilon does not cover time, which may depend on records."""
    quiet: Flag = False
    """Print nothing but errors and warnings."""
    show_values: Flag = False
    """Let error messages quote what is in the files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epsilon:
    """The epsilon of a plan, given by its numbers or by a plan.json."""

    plan: Annotated[pathlib.Path | None, *kinds.path()] = None
    """A plan.json; stands for all numbers but --delta."""
    noise_multiplier: MaybeNumber = None
    """Standard deviation of the noise on a released sum, over the sensitivity."""
    num_steps: MaybeInteger = None
    """Released sums."""
    delta: Annotated[float | None, *kinds.number(f"{DEFAULT_DELTA:g}")] = None
    """At which delta; a plan.json may have its own."""
    relation: Annotated[
        str | None, *kinds.choice(*accounting.RELATIONS, missing="replace_one")
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

    epsilon: Annotated[float, *kinds.number()]
    """Budget of the whole run."""
    delta: Annotated[float, *kinds.number()] = DEFAULT_DELTA
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
        pathlib.Path,
        *kinds.path(),
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FOLDER"),
    ]
    """Folder that jaxdp train or finetune wrote, or its ledger.jsonl."""
    initial: Annotated[pathlib.Path | None, *kinds.path("as recorded")] = None
    """Initial parameters of the run: a file, or the folder of the model."""
    out: Annotated[pathlib.Path | None, *kinds.path("FOLDER/replayed...")] = None
    """Where the parameters go: a file, or a folder for a model."""
    json: Flag = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Attack a plan's code: a lower bound on its epsilon; exit code 1 if it is too high.

    A plan of many steps is audited with few of them, with less noise and the same epsilon.
    """

    plan: Annotated[
        pathlib.Path, *kinds.path(), tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")
    ]
    """A plan.json."""
    num_runs: Annotated[int, *kinds.integer()] = 100_000
    """Simulated runs on each of two neighbouring data sets."""
    num_steps: Annotated[int, *kinds.integer()] = 4
    """The most steps of a simulated run."""
    delta: Annotated[float | None, *kinds.number("plan")] = None
    """At which delta."""
    lattice_runs: Annotated[int, *kinds.integer()] = 1000
    """Runs in which the low digits of releases are attacked, of the plan as it is; or 0."""
    seed: Annotated[int, *kinds.integer()] = 0
    """An audit is a function of it."""
    json: Flag = False
    """Print one JSON object."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Finetune, tyro.conf.subcommand("finetune")]
    | Annotated[Synthesize, tyro.conf.subcommand("synthesize")]
    | Annotated[Epsilon, tyro.conf.subcommand("epsilon")]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate")]
    | Annotated[Audit, tyro.conf.subcommand("audit")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
)
COMMANDS: dict[str, type] = {
    "train": Train,
    "finetune": Finetune,
    "synthesize": Synthesize,
    "epsilon": Epsilon,
    "calibrate": Calibrate,
    "audit": Audit,
    "replay": Replay,
}
