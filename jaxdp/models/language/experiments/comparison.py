"""Noise of the experiments, and epsilons that the paper's own runs can claim."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import dp_accounting as dp
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from jaxdp import accounting
from jaxdp import sampling as samplers
from jaxdp.accounting.gaussian import root
from jaxdp.core.types import Relation
from jaxdp.models.language.experiments.settings import (
    EPSILONS,
    EXPERIMENTS,
    Experiment,
)


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
      ours_add_or_remove: ``experiment.plan``'s, whose batches are truncated.
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
        plan = e.plan(
            epsilon=epsilon, relation=relation, l2_clip_norm=1.0, sampling=sampling
        )
        return plan.noise_std

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
        sampling_prob=e.batch_size / e.code_num_examples,
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
      subsets_replace_one: had each batch been a fresh random subset, by RDP.
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
