"""Options of each command: kinds of values, defaults, checks and help."""

import dataclasses
import functools
import pathlib
import typing
from typing import Any, ClassVar

from jaxdp import accounting
from jaxdp.cli import parsing as p
from jaxdp.cli.parsing import INTEGER, NUMBER, opt, switch
from jaxdp.core import validate
from jaxdp.data.synthesis import Method
from jaxdp.dpzero.plan import DirectionLaw
from jaxdp.kernels.prefix_noise import NAMES as PREFIX_NOISES
from jaxdp.o2nc import oracle as oracles
from jaxdp.sosp.hessian import HESSIANS

DIRECTIONS: tuple[str, ...] = typing.get_args(DirectionLaw)
MODELS = ("linear", "mlp")
#: Of ``jaxdp.models.losses``, whose package brings flax.
LOSSES = ("cross_entropy", "hinge", "squared_error")
SCHEDULES = ("constant", "cosine")
TASKS = ("classification", "regression")
METHODS: tuple[str, ...] = ("auto", *typing.get_args(Method))
LANGUAGE_METHODS = ("dpzero", "dp-lora")
#: Of ``jaxdp.cli.recipes``, whose module brings the plans.
OPTIMIZERS = ("sgd", "adamw")
LANGUAGE_TASKS = (
    *("prompt", "head", "choice", "generation"),
    *("instruction", "preference"),
)
TRAINABLE = ("all", "lora", "prefix", "head")
#: Of ``jaxdp.models.language.network.ComputeDtype``, whose module brings flax.
COMPUTE_DTYPES = ("float32", "bfloat16")
DTYPES = ("float32", "bfloat16", "float16")
INTEGERS = ("int8", "int4")
#: Those that a language model draws where it needs them.
LAZY_DIRECTIONS = ("rademacher", "gaussian", "sphere")
SAMPLING = ("poisson", "fixed-size", "full")
#: Of ``train saddle``.
GAME_METHODS = ("mirror_descent", "descent_ascent", "frank_wolfe")
DEFAULT_EPSILON = 2.0
DEFAULT_DELTA = 1e-5

Num = float | None
Int = int | None
Word = str | None
MaybePath = pathlib.Path | None

POSITIVE = NUMBER._replace(check=validate.positive)
PROBABILITY = NUMBER._replace(check=validate.probability)
COUNT = INTEGER._replace(check=validate.integer)
#: The step counter is a 32-bit integer.
STEPS = INTEGER._replace(check=functools.partial(validate.integer, at_most=2**31 - 1))
_RUN = p.FOLDER._replace(parse=pathlib.Path, positional=True)
_PLAN = p.PATH._replace(metavar="PLAN", positional=True)
_RELATION = p.choice(*accounting.RELATIONS)
_NEIGHBOURS = "Which data sets count as neighbours."
_UNIT = p.choice("record", "user")
_DIFFERENCE = "What neighbours differ in."
_EXPECTED = "Expected records of a step, instead of --sampling-prob."
_RADIUS = (
    "Length of the difference, over that of the direction: sqrt(d) for d parameters."
)
_DIRECTIONS = "Directions of a step; together they cost what one costs."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Options of the budget."""

    epsilon: float = opt(POSITIVE, "Of the whole run.", default=DEFAULT_EPSILON)
    delta: Any = opt(PROBABILITY, "Of the whole run.", default=DEFAULT_DELTA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Options of the output."""

    seed: Int = opt(INTEGER, "Makes the run reproducible, and not private.", "entropy")
    budget: MaybePath = opt(
        p.PATH,
        "Folder of a budget, in which the run is reserved: jaxdp budget.",
        "none",
    )
    overwrite: bool = switch("Write in place of an earlier run, or among other files.")
    timings: Word = opt(
        p.choice("public", "secret"),
        "Whether report and table have times, which may depend on records, uncharged.",
        "secret, but for the named data sets of train",
    )
    quiet: bool = switch("Print nothing but errors and warnings.")
    json: bool = switch("Print report.json in one line, in place of a table.")
    show_values: bool = switch("Let error messages quote what is in the files.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Output):
    """Options of the run."""

    #: Name of the command, and of the algorithm that it runs.
    command: ClassVar[str]
    algorithm: ClassVar[str]
    #: Options that may differ when a run is taken up again; and those whose effect the
    #: loop compares with the record, and may be told to go on all the same. (Files may
    #: have moved.)
    free: ClassVar[tuple[str, ...]] = (
        *("out", "overwrite", "resume", "new_attempt"),
        *("progress", "quiet", "json", "show_values", "distributed", "budget"),
    )
    compared: ClassVar[tuple[str, ...]] = ("microbatch_size", "mesh")
    #: Names of the options that were in the words; None for one that is made otherwise.
    given: ClassVar[frozenset[str] | None] = None

    relation: str = opt(_RELATION, _NEIGHBOURS, default="replace_one")
    microbatch_size: Int = opt(COUNT, "Records evaluated at once.")
    out: MaybePath = opt(
        p.PATH, "Folder for plan, report, parameters and plots.", "runs/NAME"
    )
    resume: bool | str = opt(
        p.choice("auto")._replace(alone=True, allowed="auto or given alone"),
        "Go on with the run in --out; other options stay. auto: begin where there is none.",
        default=False,
    )
    new_attempt: bool = switch(
        "With --resume: other data or devices; lost steps are charged twice, and the plan "
        "once more in its --budget."
    )
    mesh: Any = opt(
        p.AXES,
        "Devices that share records, and of finetune the model: data=4,model=2.",
        "one device",
    )
    distributed: Any = opt(
        p.PLACE,
        "This is one of several processes: as the cluster says, or as given.",
        default=False,
    )
    keep_noise_roots: bool = switch(
        "Leave in secret/ what noise was drawn from: whoever reads it subtracts all noise."
    )
    progress: bool = switch("Draw a progress bar, on a terminal.", default=True)


# --- train -------------------------------------------------------------------------


def _share(end: str = "]", **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1 or (end == ")" and value == 1):
            raise ValueError(f"{name} must be a number in [0, 1{end}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Options of the data."""

    dataset: str = opt(
        p.DATASET,
        "digits, digits_4x4, breast_cancer, wine, diabetes, quadratic_*, a .csv or .npz; "
        "with --schema also a .tsv or .parquet.",
        default="digits",
    )
    test_fraction: Num = opt(
        NUMBER, "Share that is held out and public; a file needs it given.", "0.2"
    )
    label: Word = opt(p.NAME, "File: the label's column or array.")
    bounds: Any = opt(p.BOUNDS, "File: public bounds that scale features to [-1, 1].")
    task: Word = opt(p.choice(*TASKS), "File: what the label is.", TASKS[0])
    classes: Any = opt(p.CLASSES, "File: the public set of classes.", "those held out")
    label_bounds: tuple[float, float] | None = opt(
        p.PAIR, "File: public bounds that scale a regression target."
    )
    schema: Word = opt(
        p.FILE, "File: a public JSON file that says what its columns are."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Data, Run):
    """Options of a run on a data set."""

    command: ClassVar[str] = "train"
    #: Of ``jaxdp.cli``: its ``prepare`` makes task, plan and optimizer.
    module: ClassVar[str] = "steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Options of the model."""

    model: str = opt(
        p.choice(*MODELS),
        "Of what is trained; the quadratics are their own model.",
        default="linear",
    )
    hidden: tuple[int, ...] | None = opt(
        p.WIDTHS, "Widths of mlp's hidden layers.", "32, and 8 for o2nc"
    )
    loss: Word = opt(
        p.choice(*LOSSES), "The last is for regression.", "the first of the task"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """Options of groups."""

    group: Word = opt(
        p.NAME,
        "For errors by group: class, or a column (diabetes: sex, of targets > 150).",
    )
    group_values: Any = opt(
        p.VALUES, "File: public values of --group's column, one for each group."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Steps(Groups, Model, Train):
    """Options of the steps."""

    num_steps: Int = opt(STEPS, "Each releases one quantity.", "recipe")
    sampling_prob: Num = opt(NUMBER, "Probability that a record joins a step.", "1")
    batch_size: Int = opt(INTEGER, _EXPECTED)
    learning_rate: Num = opt(POSITIVE, "Step size.", "recipe")
    schedule: Word = opt(
        p.choice(*SCHEDULES), "Step size over time; cosine ends at 0.", "recipe"
    )
    momentum: Num = opt(
        NUMBER._replace(check=functools.partial(_share, ")")),
        "In [0, 1): decay of a moving average of the releases.",
        "recipe",
    )
    average: Num = opt(
        NUMBER._replace(check=_share),
        "In [0, 1]: share of the last iterates that is averaged.",
        "recipe",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Clip(Budget):
    """Options of the bound."""

    l2_clip_norm: Num = opt(POSITIVE, "Bound on one record's contribution.", "recipe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Directions:
    """Options of the directions."""

    smoothing_radius: Num = opt(NUMBER, _RADIUS, "recipe")
    num_directions: Int = opt(INTEGER, _DIRECTIONS, "recipe")
    direction: Word = opt(p.choice(*DIRECTIONS), "Law of the directions.", "recipe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPZero(_Directions, _Clip, _Steps):
    """Train by clipped, noised slopes along random directions."""

    algorithm: ClassVar[str] = "dpzero"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPGD(_Clip, _Steps):
    """Train by clipped, noised gradients."""

    algorithm: ClassVar[str] = "dpgd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeZO(_Directions, _Steps):
    """Train as dpzero does, without clip and noise: not private."""

    algorithm: ClassVar[str] = "mezo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GD(_Steps):
    """Train as dpgd does, without clip and noise: not private."""

    algorithm: ClassVar[str] = "gd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class O2NC(Budget, Groups, Model, Train):
    """Train by online-to-non-convex conversion, for losses with kinks.

    In one pass over the records, unless --multi-pass.
    """

    algorithm: ClassVar[str] = "o2nc"
    module: ClassVar[str] = "o2nc"

    oracle: oracles.Name = opt(
        p.choice(*oracles.ORACLES),
        f"Asks for {'; or '.join(row.asks for row in oracles.ORACLES.values())}.",
        default=oracles.DEFAULT,
    )
    multi_pass: bool = switch("Every step reads all records, or by --sampling-prob.")
    num_steps: Int = opt(
        STEPS, "Each releases one quantity.", "of one pass; recipe with --multi-pass"
    )
    period: int = opt(COUNT, "Steps from one restart to the next.", default=1)
    restart_batch_size: Int = opt(COUNT, "Records of a step with a restart.", "recipe")
    batch_size: Int = opt(COUNT, "Records of the other steps.")
    restart_sampling_prob: Num = opt(
        NUMBER, "With --multi-pass: of a record, in a step with a restart.", "1"
    )
    sampling_prob: Num = opt(NUMBER, "With --multi-pass: of the other steps.", "1")
    window: Int = opt(
        INTEGER._replace(check=functools.partial(validate.integer, at_least=2)),
        "Steps of a window; the mean of a random window's points is returned.",
        "all steps",
    )
    restart_l2_clip_norm: Num = opt(
        POSITIVE, "Bound on one record's part of a step with a restart.", "recipe"
    )
    l2_clip_norm: Num = opt(
        POSITIVE, "Bound on one record's part of another step.", "as of a restart"
    )
    smoothing_radius: Num = opt(NUMBER, "Distance by which a point is moved.", "recipe")
    num_directions: Int = opt(
        INTEGER, "Of a step; of gradients, points of a record's change.", "recipe"
    )
    direction: Word = opt(p.choice(*DIRECTIONS), "Law of the directions.", "recipe")
    max_step: Num = opt(NUMBER, "The longest step.", "recipe")
    learning_rate: Num = opt(POSITIVE, "Step size.", "adapted")
    prefix_noise: Word = opt(
        p.choice(*PREFIX_NOISES), "How the noise of a period is correlated.", "recipe"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saddle(Budget, Groups, Train):
    """Train a linear model so that the loss of the worst --group is small.

    By mirror descent against weights of the groups, in one pass. Descent and ascent
    (DP-SGDA) plays the same game by noised gradients; frank_wolfe minimises the mean loss
    of all records in the same l1 ball. These two read all records in every step.
    """

    algorithm: ClassVar[str] = "saddle"
    module: ClassVar[str] = "saddle"

    method: str = opt(
        p.choice(*GAME_METHODS), "How the problem is solved.", default=GAME_METHODS[0]
    )
    group_probabilities: Any = opt(
        p.SHARES, "Public shares of the groups; not of private records.", "all alike"
    )
    num_steps: Int = opt(
        INTEGER, "Of a method, in its order.", "root of the records; 64; 16"
    )
    one_pass: bool = switch(
        "Of the two methods that read all records: each record in one step alone."
    )
    num_draws: Int = opt(
        INTEGER._replace(check=functools.partial(validate.integer, at_most=2**20)),
        "mirror_descent: drawn vertices that the point of a gradient is the mean of.",
        "recipe",
    )
    radius: Num = opt(POSITIVE, "Of the l1 ball that all parameters are in.", "recipe")
    clip_x: Num = opt(
        POSITIVE,
        "Bound on a record's gradient by the parameters, over that which --radius implies.",
        "recipe; of frank_wolfe by the held-out records",
    )
    step_ratio: Num = opt(
        POSITIVE,
        "mirror_descent: how far scores of groups move beside those of parameters.",
        "recipe",
    )
    l2_clip_norm: Num = opt(
        POSITIVE,
        "descent_ascent: bound on a record's gradient by parameters and groups.",
        "by the held-out records",
    )
    learning_rate: Num = opt(
        POSITIVE, "descent_ascent: step size.", "by noise and clip"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SOSP(Budget, Train):
    """Factor second moments of the features, from a saddle.

    In one pass, to a second-order stationary point with a certificate.
    """

    algorithm: ClassVar[str] = "sosp"
    module: ClassVar[str] = "sosp"

    num_steps: Int = opt(STEPS, "At most.", "more than the records allow")
    rank: int = opt(INTEGER, "Principal directions that are looked for.", default=1)
    accuracy: Num = opt(
        POSITIVE, "Error of estimated gradients.", "from records and budget"
    )
    failure_probability: float = opt(
        PROBABILITY, "How likely a certificate may be wrong.", default=0.1
    )
    hessian: str = opt(
        p.choice(*HESSIANS),
        "Noisy Hessians, products, or running.",
        default="released",
    )
    prefix_noise: str = opt(
        p.choice(*PREFIX_NOISES), "How noise is correlated.", default="sqrt_toeplitz"
    )


#: Options of ``jaxdp train``, by the name of the algorithm.
ALGORITHMS: dict[str, type[Train]] = {
    kind.algorithm: kind for kind in (DPZero, DPGD, MeZO, GD, O2NC, Saddle, SOSP)
}
DEFAULT_ALGORITHM = "dpzero"


def train(algorithm: str = DEFAULT_ALGORITHM, **given: Any) -> Train:
    """Returns the options of an algorithm."""
    return ALGORITHMS[algorithm](**given)


# --- the other commands ------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune(Budget, Run):
    """Fine-tune a language model, with or without backpropagation.

    The model, the records of --eval, templates, labels and all numbers are public; only
    the records of --train are private. Metrics are computed on --eval, before and while
    training. --method dpzero evaluates losses alone. --method dp-lora takes the gradients
    of each record by an adapter or a head, where backpropagation fits into memory: it
    learns as much in fewer steps, and its runs are not replayed. --method auto compiles
    both for the device: dp-lora where it fits, else dpzero. The run records which.
    "recipe" stands for what --recipe says, and without one for batches of 64 records.
    For dpzero: 1000 steps (the paper takes 10000 and more), and by --trainable:
    all: step size 1e-6, clip 200, radius 1e-3, the paper's for RoBERTa-large;
    lora: 5e-5, 30, 1e-2; prefix: 1e-3, 30, 1e-1; head: 1e-3, 10, 1e-3.
    Smaller models take larger steps: choose on public records.
    For dp-lora: 300 steps, 16 records evaluated at once; the clip is a third of the median
    norm of gradients of public records, and the step size follows from it and the noise;
    for --optimizer adamw, which divides by the noised gradients' size, times that.
    """

    command: ClassVar[str] = "finetune"
    algorithm: ClassVar[str] = "dpzero"
    compared: ClassVar[tuple[str, ...]] = (*Run.compared, "model", "train", "eval")

    model: Any = opt(p.FOLDER, "Checkpoint as Hugging Face writes it, with tokenizer.")
    train: Any = opt(p.FILE, "Private records: .jsonl, .csv or .tsv.")
    eval: Any = opt(p.FILE, "Public records, on which the run is judged.")
    task: Any = opt(
        p.choice(*LANGUAGE_TASKS),
        "Label words in a prompt, a classification head, choice by likelihood, text, "
        "answers in chats, or pairs of a chosen and a rejected text.",
        "recipe",
    )

    template: Any = opt(
        p.TEXT,
        'As in "{text} It was {mask}."; {sep} ends a text.',
        "recipe, {text}, or the chat template of --model for preference",
    )
    labels: Any = opt(
        p.CLASSES, "Classes in order. Never read from the records.", "0,1,..."
    )
    label_words: Any = opt(p.WORDS, "Word of each class; tasks prompt and choice.")
    label_field: Any = opt(p.NAME, "Of the class, or the right choice.", "label")
    choices_field: Any = opt(
        p.NAME, "Choice: of a record's list of choices, instead of --label-words."
    )
    num_choices: Int = opt(INTEGER, "Choice: the most choices that a record has.")
    answer_field: Any = opt(p.NAME, "Generation: of the answers.", "answer")
    max_length: Any = opt(
        INTEGER, "Tokens of a record; longer fields are cut.", "recipe or 128"
    )
    beta: Num = opt(POSITIVE, "Preference: how much a log-likelihood counts.", "0.1")
    reference_free: bool = switch(
        "Preference: do not compare with the likelihoods of the model before the run."
    )
    span_length: Any = opt(
        INTEGER,
        "Tokens of a choice or answer, or of a chat's answers.",
        "recipe or 32, of chats half of --max-length",
    )
    truncate: Any = opt(
        p.choice("right", "left"),
        "Which end of a field, or of a chat, is lost.",
        "right, of chats left",
    )

    method: str = opt(
        p.choice(*LANGUAGE_METHODS, "auto"),
        "By losses along random directions, or by gradients; auto: these if they fit.",
        default=LANGUAGE_METHODS[0],
    )
    trainable: Any = opt(
        p.choice_or_pattern(*TRAINABLE),
        "All; an adapter (and a head); a head; leaves by their paths.",
        "all, or lora with --method dp-lora or --quantised",
    )
    lora_rank: Int = opt(INTEGER, "Of --trainable lora.", "8")
    lora_alpha: Num = opt(
        NUMBER, "Of --trainable lora: over the rank, scales what it adds.", "16"
    )
    prefix_length: Int = opt(INTEGER, "Of --trainable prefix.", "5")
    compute_dtype: Any = opt(
        p.choice(*COMPUTE_DTYPES), "Of activations alone.", "recipe or float32"
    )
    dtype: str = opt(
        p.choice(*DTYPES),
        "Of parameters, but for adapters and heads.",
        default="float32",
    )
    quantised: Word = opt(
        p.choice(*INTEGERS),
        "Rounds the layers' kernels, which stay frozen; model/ then holds the adapter or "
        "head alone.",
    )

    delta: Any = opt(NUMBER, "Of the whole run.", f"recipe or {DEFAULT_DELTA:g}")
    num_steps: Int = opt(
        INTEGER, "Each releases a number a direction, or a gradient.", "recipe"
    )
    sampling: str = opt(
        p.choice(*SAMPLING), "By coins, of one size, or all.", default="poisson"
    )
    batch_size: Int = opt(
        INTEGER, "Records of a step; expected ones with --sampling poisson.", "recipe"
    )
    l2_clip_norm: Num = opt(
        NUMBER, "Bound on one record's slopes or gradient.", "recipe"
    )
    smoothing_radius: Num = opt(NUMBER, _RADIUS, "recipe")
    learning_rate: Num = opt(NUMBER, "Step size.", "recipe")
    optimizer: Any = opt(
        p.choice(*OPTIMIZERS), "dp-lora: what steps by the noised gradients.", "sgd"
    )
    num_directions: Int = opt(INTEGER, _DIRECTIONS, "1")
    direction: Any = opt(
        p.choice(*LAZY_DIRECTIONS), "Law of the directions.", "recipe or rademacher"
    )
    eval_every: Any = opt(INTEGER, "Steps between evaluations.", "num_steps/20")
    recipe: Any = opt(
        p.NAME, "Of the DPZero paper, as opt-1.3b/squad; other options come before it."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthesize(Budget, Output):
    """Make synthetic records that are distributed as those of a table.

    A query is the share of records that have one combination of bins in some columns: all
    combinations in all sets of --degree columns. Bins are public and given, never learned
    from the records: columns without bins are left out, numbers beyond the edges belong to
    the first and the last bin, and a record that the bins do not describe lies in none.
    Numbers are drawn within their bins, integers where all edges are integers.
    """

    input: pathlib.Path = opt(p.PATH, "Private records: a .csv file.", default=...)
    output: pathlib.Path = opt(p.PATH, "Synthetic records: a .csv file.", default=...)
    bins: pathlib.Path = opt(
        p.PATH,
        'JSON of every column: {"age": {"edges": [0, 18, 65, 120]}, "sex": {"values":'
        ' ["f", "m", "x"], "other": "x"}}; "other" is for all unknown values; and '
        '"missing": "mark" makes blanks of a column one more cell.',
        default=...,
    )
    degree: tuple[int, ...] = opt(
        p.DEGREES,
        "Columns of a query; 1,2 for single columns and pairs; 1 for a table of one.",
        default=(2,),
    )
    method: str = opt(
        p.choice(*METHODS),
        "How queries are answered: all counts with noise; single columns, then the counts "
        "that are known worst; one query a step; or what noise says is best.",
        default=METHODS[0],
    )
    relation: str = opt(
        _RELATION,
        f"{_NEIGHBOURS} Their number of records is public.",
        default="replace_one",
    )
    num_steps: Int = opt(
        STEPS,
        "Of mwem: marginals that are drawn; of mirror_descent: queries.",
        "as many as columns; from the bound",
    )
    num_records: Int = opt(STEPS, "Synthetic records.", "as many as private ones")
    public: MaybePath = opt(p.PATH, "Public records, on which answers are judged.")
    test_fraction: Num = opt(NUMBER, "Share that is held out, instead of --public.")
    unsafe_metrics: bool = switch(
        "Also judge the answers on the private records: report and plot are not private."
    )
    report: MaybePath = opt(
        p.PATH, "Folder for plan, report, histogram and plot.", "runs/OUTPUT"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sums:
    """Options of the sums."""

    num_steps: Int = opt(INTEGER, "Released sums.")
    noise_multiplier: Num = opt(NUMBER, "Deviation of the noise over the sensitivity.")
    num_examples: Int = opt(INTEGER, "Records; only sampling asks for it.")
    sampling_prob: Num = opt(NUMBER, "Probability that a record joins a step.", "1")
    batch_size: Int = opt(INTEGER, _EXPECTED)
    json: bool = switch("Print one JSON object.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epsilon(_Sums):
    """Print the epsilon of a plan, given by its numbers or by a plan.json."""

    plan: MaybePath = opt(p.PATH, "A plan.json; stands for all numbers but --delta.")
    delta: Num = opt(NUMBER, "At which delta.", f"the plan's or {DEFAULT_DELTA:g}")
    relation: Word = opt(_RELATION, _NEIGHBOURS, "replace_one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(_Sums):
    """Find the least noise for a budget, or the most steps."""

    epsilon: float = opt(NUMBER, "Budget of the whole run.", default=...)
    delta: float = opt(NUMBER, "Budget of the whole run.", default=DEFAULT_DELTA)
    relation: str = opt(_RELATION, _NEIGHBOURS, default="replace_one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Rebuild a run's parameters from its ledger, without data.

    Exit code 1 if the run's own are there and not the same to the bit. They may differ by
    rounding on another kind of device or with another version of JAX.
    """

    folder: pathlib.Path = opt(
        _RUN,
        "Folder that jaxdp train or finetune wrote, or its ledger.jsonl.",
        default=...,
    )
    initial: MaybePath = opt(
        p.PATH, "Initial parameters: a file, or the model's folder.", "as recorded"
    )
    out: MaybePath = opt(
        p.PATH, "A file, or a folder for a model.", "FOLDER/replayed..."
    )
    json: bool = switch("Print one JSON object.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Attack a plan's code, for a lower bound on its epsilon.

    Exit code 1 if it is above the accounted one.

    A plan of many steps is audited with few of them, with less noise and the same epsilon.
    """

    plan: pathlib.Path = opt(_PLAN, "A plan.json.", default=...)
    num_runs: int = opt(INTEGER, "Simulated runs on each data set.", default=100000)
    num_steps: int = opt(INTEGER, "The most steps of a simulated run.", default=4)
    delta: Num = opt(NUMBER, "At which delta.", "plan")
    lattice_runs: int = opt(
        INTEGER, "Runs whose releases' low digits are attacked; or 0.", default=1000
    )
    unit: str = opt(_UNIT, _DIFFERENCE, default="record")
    seed: int = opt(INTEGER, "An audit is a function of it.", default=0)
    json: bool = switch("Print one JSON object.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommend(Budget, Groups, Model, Data):
    """Choose method, clip, step size and steps for a data set.

    They follow from the budget, the number of records, and the scale of the loss on the
    held-out records, which count as public. No private record is read, nothing is spent.
    With --group it is the game of jaxdp train saddle; with --bins, the table of jaxdp
    synthesize, of which bins and number of records say all.
    """

    relation: str = opt(_RELATION, _NEIGHBOURS, default="replace_one")
    forward_only: bool = switch("Gradients of single records do not fit into memory.")
    num_passes: Num = opt(
        POSITIVE,
        "The most evaluations of each record's loss in the run; a gradient counts 3.",
        "240 for gradients, 8000 for slopes",
    )
    batch_size: Int = opt(COUNT, "Expected records of a step.", "all")
    num_public: Int = opt(COUNT, "Public records at hand: says what they would do.")
    bins: MaybePath = opt(p.PATH, "Bins of a table, as jaxdp synthesize reads them.")
    degree: tuple[int, ...] | None = opt(p.DEGREES, "With --bins: of a query.", "2")
    num_examples: Int = opt(COUNT, "With --bins: private records.")
    show_values: bool = switch("Let error messages quote what is in the files.")
    json: bool = switch("Print one JSON object.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeSchema:
    """Write a first schema of a table, from public rows."""

    public: pathlib.Path = opt(
        p.PATH, "A .csv, .tsv or .parquet file whose rows are public.", default=...
    )
    label: str = opt(p.NAME, "The label's column.", default=...)
    out: pathlib.Path = opt(p.PATH, "Where to.", default=pathlib.Path("schema.json"))
    overwrite: bool = switch("Write in place of another file.")
    json: bool = switch("Print one JSON object.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict the labels of a table by a trained model."""

    folder: pathlib.Path = opt(
        _RUN, "Folder that jaxdp train wrote, of a run with --schema.", default=...
    )
    data: pathlib.Path = opt(
        p.PATH, "A table with the schema's columns; it needs no label.", default=...
    )
    out: MaybePath = opt(p.PATH, "A .csv file.", "FOLDER/predictions.csv")
    public: bool = switch("The rows are public: print how well labels are predicted.")
    overwrite: bool = switch("Write in place of another file.")
    json: bool = switch("Print one JSON object.")
    show_values: bool = switch("Let error messages quote what is in the files.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """State what a run guarantees, from its plan and ledger.

    The statement is computed again from the public files of the folder; secret/ is not
    read. A report.json that says otherwise, or a ledger that charges more steps than the
    plan has, is an error.
    """

    folder: pathlib.Path = opt(
        _RUN._replace(metavar="RUN"),
        "Folder of a run: of a command, or the ledger of jaxdp.fit.",
        default=...,
    )
    format: str = opt(
        p.choice("text", "html", "card", "json"),
        "A table, a page, a model card of Hugging Face, or JSON.",
        default="text",
    )
    output: MaybePath = opt(p.PATH, "A file to write.", "printed")
    overwrite: bool = switch("Write in place of another file.")
    json: bool = switch("Print one JSON object; as --format json.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Start processes here that run one command together.

    jaxdp launch --processes N -- train [OPTIONS]: the command comes after "--".
    """

    processes: int = opt(COUNT, "How many.", default=...)
    json: bool = switch("Print the exit codes as one JSON object, in the last line.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBudget:
    """Make or show a budget that all runs on one data set share.

    With --epsilon it makes the folder's budget; without, it shows what is spent.
    """

    folder: pathlib.Path = opt(
        p.FOLDER._replace(parse=pathlib.Path, positional=True),
        "Folder of the budget.",
        default=...,
    )
    epsilon: Num = opt(POSITIVE, "Of all releases together.", "show it")
    delta: float = opt(PROBABILITY, "Of all releases together.", default=1e-6)
    relation: str = opt(_RELATION, _NEIGHBOURS, default="replace_one")
    unit: str = opt(_UNIT, _DIFFERENCE, default="record")
    composition: str = opt(
        p.choice("basic", "gaussian", "renyi"),
        "basic: epsilons add up. renyi: tighter for many runs, sampled or not. gaussian: "
        "without sampling alone, and the tightest.",
        default="basic",
    )
    json: bool = switch("Print one JSON object.")


#: Options of the commands other than ``train``, by name; the docstring is the help.
COMMANDS: dict[str, type] = {
    "finetune": Finetune,
    "synthesize": Synthesize,
    "epsilon": Epsilon,
    "calibrate": Calibrate,
    "recommend": Recommend,
    "budget": SharedBudget,
    "audit": Audit,
    "replay": Replay,
    "report": Report,
    "schema": MakeSchema,
    "predict": Predict,
    "launch": Launch,
}
