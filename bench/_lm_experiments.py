"""Plans, noise and claims of the DPZero paper's experiments, and its printed figures.

The paper's runs shuffled the records and took batches of one size, for which no accountant
has a bound near what was claimed. The plan of an experiment samples with
``TruncatedPoisson`` at the same expected batch size and is calibrated for the relation that
one names. :func:`noise_table` sets its noise beside the paper's formula and the released
code's, and :func:`claims_table` says what the runs of the paper can claim as they were run.
"""

import dataclasses
import math
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import dp_accounting as dp
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from jaxdp import accounting, plans
from jaxdp import sampling as samplers
from jaxdp.accounting.gaussian import root
from jaxdp.cli.finetune_options import RECIPES
from jaxdp.core.types import Relation
from jaxdp.dpzero.plan import DirectionLaw

TABLES: Mapping[str, Any] = tomllib.loads(
    pathlib.Path(__file__).with_name("lm_experiments.toml").read_text(encoding="utf-8")
)
#: The budgets of all tables.
EPSILONS = tuple(TABLES["epsilons"])
#: What a recipe says of an experiment's plan.
_NUMBERS = ("num_steps", "batch_size", "l2_clip_norm", "smoothing_radius", "delta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One model on one task, with the paper's numbers.

    Attributes:
      name: of the recipe in ``jaxdp finetune``, as ``"roberta-large/sst-2"``.
      num_steps: T.
      batch_size: B, expected records of a step.
      l2_clip_norm: a clip to begin with; the paper chose one for each task and run.
      smoothing_radius: lambda.
      delta: of the guarantee.
      num_examples: n, records for training, as the paper drew them.
      code_num_examples: the n that the released code calibrates for; None is that.
      data_seeds: with which the paper drew the records.
      metric: the function of ``jaxdp.models.language.tasks`` that judges.
      learning_rates: those that the paper tried.
      l2_clip_norms: those that the paper tried.
      directions: laws of directions; the first is the paper's main one.
    """

    name: str
    num_steps: int
    batch_size: int
    l2_clip_norm: float
    smoothing_radius: float
    delta: float
    num_examples: int
    code_num_examples: int | None = None
    data_seeds: tuple[int, ...]
    metric: Literal["accuracy", "token_f1"] = "accuracy"
    learning_rates: tuple[float, ...]
    l2_clip_norms: tuple[float, ...]
    directions: tuple[DirectionLaw, ...] = ("gaussian",)


def _experiments() -> Iterable[Experiment]:
    for family in (TABLES["roberta"], TABLES["opt"]):
        for model, of_model in family["models"].items():
            for task, of_task in family["tasks"].items():
                name, said = f"{model}/{task}", family["shared"] | of_model | of_task
                said |= {number: RECIPES[name][number] for number in _NUMBERS}
                frozen: dict[str, Any] = {
                    n: tuple(x) if isinstance(x, list) else x for n, x in said.items()
                }
                yield Experiment(name=name, **frozen)


#: By name. The paper has no table for ``roberta-base``, and Figure 3 for SNLI alone.
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {e.name: e for e in _experiments()}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """One figure of the paper: an accuracy or an F1 score.

    Attributes:
      table: the paper's number of the table, or ``"text"``.
      model: as in the names of the experiments.
      task: as in the names of the experiments.
      method: ``"DPZero"``, ``"MeZO"``, ``"DP-AdamW"`` and so on.
      epsilon: of the run, at delta 1e-5; infinity where nothing is private, 0 where
        nothing is learned.
      percent: the mean over three data seeds.
      standard_error: of that mean, in points; None where none was printed.
    """

    table: str
    model: str
    task: str
    method: str
    epsilon: float
    percent: float
    standard_error: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and memory of one step as the paper printed them, on one card of 24 GiB.

    Attributes:
      table: the paper's number of the table. Table 3 repeats some rows of Table 9.
      model: as in the names of the experiments.
      task: as in the names of the experiments.
      batch_size: of the step.
      method: as in :class:`Printed`; first-order methods name their implementation.
      seconds: of an iteration; None where not printed.
      mebibytes: of the card; None is out of memory.
      percent: accuracy, private runs at epsilon 2; None where not printed.
    """

    table: str
    model: str
    task: str
    batch_size: int
    method: str
    seconds: float | None = None
    mebibytes: int | None = None
    percent: float | None = None


def _printed() -> Iterable[Printed]:
    for table, of in TABLES["printed"].items():
        for method, epsilon, *cells in of["rows"]:
            for column, cell in zip(of["columns"], cells, strict=True):
                model, task = column.split("/")
                mean, _, error = cell.partition("±")
                error = float(error) if error else None
                yield Printed(
                    table=table,
                    model=model,
                    task=task,
                    method=method,
                    epsilon=epsilon,
                    percent=float(mean),
                    standard_error=error,
                )


def _costs() -> Iterable[Cost]:
    for table, of in TABLES["costs"].items():
        for row in of["rows"]:
            known = dict(zip(of["columns"], row, strict=False))
            yield Cost(table=table, **of["shared"], **known)


#: Every accuracy and F1 score of language models that the paper printed.
PRINTED: tuple[Printed, ...] = tuple(_printed())

#: Seconds and memory of a step, as printed.
COSTS: tuple[Cost, ...] = tuple(_costs())


def plan(
    e: Experiment,
    *,
    epsilon: float,
    relation: Relation,
    l2_clip_norm: float | None = None,
    num_examples: int | None = None,
    sampling: samplers.AnySampler | None = None,
    direction: DirectionLaw | None = None,
    delta: float | None = None,
) -> plans.DPZero:
    """Returns the calibrated plan of a run, without noise if epsilon is infinite.

    Args:
      e: the experiment.
      epsilon: > 0; infinity is MeZO, whose clip is infinite unless one is given.
      relation: which data sets are neighbours.
      l2_clip_norm: C; None is the one to begin with.
      num_examples: n of the file at hand; None is the paper's.
      sampling: None is ``TruncatedPoisson`` of the paper's batch size in expectation
        (``FullBatch`` where that is all records).
      direction: law of the directions; None is the first of ``directions``.
      delta: None is the paper's.

    Raises:
      TypeError, ValueError: as :class:`jaxdp.plans.DPZero`.
    """
    private = not math.isinf(epsilon)
    if l2_clip_norm is None:
        l2_clip_norm = e.l2_clip_norm if private else math.inf
    n = e.num_examples if num_examples is None else num_examples
    plan = plans.DPZero(
        num_examples=n,
        num_steps=e.num_steps,
        sampling=_sampler(e, n) if sampling is None else sampling,
        relation=relation,
        l2_clip_norm=l2_clip_norm,
        smoothing_radius=e.smoothing_radius,
        direction=direction or e.directions[0],
    )
    if not private:
        return plan.with_noise(noise_multiplier=0.0)
    return plan.calibrate(epsilon=epsilon, delta=e.delta if delta is None else delta)


def _sampler(e: Experiment, num_examples: int) -> samplers.AnySampler:
    if num_examples <= e.batch_size:
        return samplers.FullBatch()
    q = e.batch_size / num_examples
    return samplers.TruncatedPoisson(sampling_prob=q)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseRow:
    """Standard deviations of the noise on a step's mean slope, in units of the clip.

    Attributes:
      experiments: names of those that share n, B and T.
      num_examples: n.
      batch_size: B.
      num_steps: T.
      epsilon: the budget, at the experiments' delta.
      paper: the formula of the paper's theorems: full batches, replace-one.
      full_batch: what full batches need under replace-one, exactly.
      code: what the released code adds, twice ``opacus`` over the batch size.
      opacus: the multiplier that opacus gives the code.
      poisson_add_or_remove: what Poisson batches need, by PLD.
      poisson_replace_one: the same under replace-one.
      ours_add_or_remove: those of :func:`plan`, whose batches are truncated.
      ours_replace_one: the same under replace-one.
    """

    experiments: tuple[str, ...]
    num_examples: int
    batch_size: int
    num_steps: int
    epsilon: float
    paper: float
    full_batch: float
    code: float
    opacus: float
    poisson_add_or_remove: float
    poisson_replace_one: float
    ours_add_or_remove: float
    ours_replace_one: float


def noise_table(
    experiments: Iterable[Experiment] = tuple(EXPERIMENTS.values()),
    epsilons: Iterable[float] = EPSILONS,
) -> list[NoiseRow]:
    """Computes the noise of each setting by the paper, by its code and by our accounting.

    Experiments that share their numbers share a row. A row takes seconds.
    """
    return [
        _noise_row(names, experiment, epsilon)
        for names, experiment in _settings(experiments)
        for epsilon in epsilons
    ]


def _settings(
    experiments: Iterable[Experiment],
) -> list[tuple[tuple[str, ...], Experiment]]:
    """Groups experiments of equal accounting: their names, and one of them."""
    groups: dict[Any, list[Experiment]] = {}
    for e in experiments:
        numbers = (
            e.num_examples,
            e.code_num_examples,
            e.batch_size,
            e.num_steps,
            e.delta,
        )
        groups.setdefault(numbers, []).append(e)
    return [(tuple(e.name for e in group), group[0]) for group in groups.values()]


def _noise_row(names: tuple[str, ...], e: Experiment, epsilon: float) -> NoiseRow:
    def std(relation: Relation, sampling: samplers.AnySampler | None = None) -> float:
        found = plan(
            e, epsilon=epsilon, relation=relation, l2_clip_norm=1.0, sampling=sampling
        )
        return found.noise_std

    # Never truncated.
    poisson = samplers.TruncatedPoisson(
        sampling_prob=e.batch_size / e.num_examples, max_batch_size=e.num_examples
    )
    # 4 C sqrt(2 T log(e + epsilon / delta)) / (n epsilon).
    log = math.log(math.e + epsilon / e.delta)
    opacus = _opacus_of(e, epsilon)
    return NoiseRow(
        experiments=names,
        num_examples=e.num_examples,
        batch_size=e.batch_size,
        num_steps=e.num_steps,
        epsilon=epsilon,
        paper=4 * math.sqrt(2 * e.num_steps * log) / (e.num_examples * epsilon),
        full_batch=std("replace_one", samplers.FullBatch()),
        code=2 * opacus / e.batch_size,
        opacus=opacus,
        poisson_add_or_remove=std("add_or_remove", poisson),
        poisson_replace_one=std("replace_one", poisson),
        ours_add_or_remove=std("add_or_remove"),
        ours_replace_one=std("replace_one"),
    )


def opacus_noise_multiplier(
    *, epsilon: float, delta: float, sampling_prob: float, num_steps: int
) -> float:
    """Computes the noise multiplier (std over clip) that opacus 1.4 gives.

    RDP of Poisson sampling under add-or-remove at opacus's default orders, bisected until
    epsilon is met to 0.01. The released code doubles it.

    Args:
      epsilon: > 0.
      delta: in (0, 1).
      sampling_prob: in (0, 1]; the code's is B / n.
      num_steps: T.
    """
    orders = [1 + x / 10 for x in range(1, 100)] + [*range(12, 64)]

    def spent(noise: float) -> float:
        gaussian = dp.PoissonSampledDpEvent(sampling_prob, dp.GaussianDpEvent(noise))
        event = dp.SelfComposedDpEvent(gaussian, num_steps)
        return RdpAccountant(orders).compose(event).get_epsilon(delta)

    low, high, at_high = 0.0, 20.0, spent(20.0)
    while at_high > epsilon:
        high *= 2
        at_high = spent(high)
    while epsilon - at_high > 0.01:
        middle = (low + high) / 2
        at_middle = spent(middle)
        if at_middle < epsilon:
            high, at_high = middle, at_middle
        else:
            low = middle
    return high


def _opacus_of(e: Experiment, epsilon: float) -> float:
    return opacus_noise_multiplier(
        epsilon=epsilon,
        delta=e.delta,
        sampling_prob=e.batch_size / (e.code_num_examples or e.num_examples),
        num_steps=e.num_steps,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """Least epsilon that is proved of the paper's runs, had their noise been secret.

    (The released code draws the noise from the seed of the direction.)

    Attributes:
      experiments: names of those that share n, B and T.
      claimed: epsilon.
      opacus: the multiplier that opacus gave the code for that.
      shuffled_replace_one: as run, in shuffled batches: an epoch costs what a step costs.
      shuffled_zero_out: the same where neighbours zero a record.
      subsets_replace_one: had each batch been a fresh random subset, by PLD.
      poisson_replace_one: had batches been Poisson samples, by PLD.
      poisson_add_or_remove: the same under add-or-remove, which needs half of that noise.
    """

    experiments: tuple[str, ...]
    claimed: float
    opacus: float
    shuffled_replace_one: float
    shuffled_zero_out: float
    subsets_replace_one: float
    poisson_replace_one: float
    poisson_add_or_remove: float


def claims_table(
    experiments: Iterable[Experiment] = tuple(EXPERIMENTS.values()),
    epsilons: Iterable[float] = EPSILONS,
) -> list[ClaimRow]:
    """Computes the epsilons that the paper's runs can claim. Upper bounds, not attacks.

    That the code ends an epoch with a smaller batch, where B does not divide n, is in the
    figures of shuffled batches alone; the others take all batches as B records.
    """
    return [
        _claim_row(names, experiment, epsilon)
        for names, experiment in _settings(experiments)
        for epsilon in epsilons
    ]


def _claim_row(names: tuple[str, ...], e: Experiment, claimed: float) -> ClaimRow:
    # The code's noise is 2 m clips on a sum: m sensitivities under replace-one.
    m = _opacus_of(e, claimed)
    q = e.batch_size / e.num_examples
    subsets = accounting.fixed_size_gaussian(
        m,
        e.num_steps,
        num_examples=e.num_examples,
        batch_size=e.batch_size,
        relation="replace_one",
    )
    replace = accounting.poisson_gaussian(
        m, e.num_steps, sampling_prob=q, relation="replace_one"
    )
    add = accounting.poisson_gaussian(
        2 * m, e.num_steps, sampling_prob=q, relation="add_or_remove"
    )
    return ClaimRow(
        experiments=names,
        claimed=claimed,
        opacus=m,
        shuffled_replace_one=_shuffled_epsilon(e, m),
        shuffled_zero_out=_shuffled_epsilon(e, 2 * m),
        subsets_replace_one=accounting.epsilon(*subsets, e.delta),
        poisson_replace_one=accounting.epsilon(*replace, e.delta),
        poisson_add_or_remove=accounting.epsilon(*add, e.delta),
    )


def _shuffled_epsilon(e: Experiment, noise_multiplier: float) -> float:
    """Computes the epsilon of batches cut from a new order of the records in every epoch.

    A record is read once an epoch. In an epoch's last batch, which may be smaller, the
    same noise is on the *mean*, so less is on the sum. Orders are independent of the data
    and may be known, so delta is the mean over how often the record is in such a batch.
    """
    batches = math.ceil(e.num_examples / e.batch_size)
    last = e.num_examples - (batches - 1) * e.batch_size
    epochs = math.ceil(e.num_steps / batches)
    share = last / e.num_examples if last < e.batch_size else 0.0
    weights = stats.binom.pmf(range(epochs + 1), epochs, share)

    def mu(short: int) -> float:
        squares = epochs - short + short * (e.batch_size / last) ** 2
        return math.sqrt(squares) / noise_multiplier

    def excess(epsilon: float) -> float:
        deltas = (
            weight * accounting.gaussian_delta(mu(short), epsilon)
            for short, weight in enumerate(weights)
            if weight > 0
        )
        return math.fsum(deltas) / e.delta - 1

    return root(excess, 0.0, 1e4)
