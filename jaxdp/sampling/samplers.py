"""Samplers: the records that each step reads, and the amplification that this earns."""

import dataclasses
import math
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp

from jaxdp.core import keys as keys_lib
from jaxdp.core import validate
from jaxdp.core.types import Phase
from jaxdp.kernels import subset, threefry

#: Index of a step, shape=(); may be traced.
Step = int | jax.Array
#: Standard deviations above a sample's mean size for which batches have room by default.
_DEVIATIONS = 6.0
#: Key in a field's metadata: its value in stored plans that lack the field.
_BEFORE = "before"
#: A step's record indices (B,), None for all in order; and the mask (B,).
Drawn = tuple[jax.Array | None, jax.Array]


def _deviations() -> Any:
    return dataclasses.field(default=_DEVIATIONS, metadata={_BEFORE: 4.0})


class Sampler:
    """Base class of samplers: batch shapes, limits on steps, and draws.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.TruncatedPoisson(sampling_prob=0.1)
      >>> isinstance(sampler, jaxdp.sampling.Sampler), sampler.amplifies, sampler.whole
      (True, True, False)
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied sampler, also one of before there was some field."""
        fields: Any = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        before = {x.name: x.metadata[_BEFORE] for x in fields if _BEFORE in x.metadata}
        self.__dict__.update(before | state)
        if before.keys() - state.keys():
            self.__post_init__()  # pyright: ignore

    #: Whether privacy is amplified because nobody knows which records it picks.
    amplifies: ClassVar[bool] = False
    #: Whether the batches of all steps have one size.
    one_size: ClassVar[bool] = True
    #: Whether every step is given all records.
    whole: ClassVar[bool] = False
    #: Whether it draws its batches; else raw arrays are given to ``update``.
    draws: ClassVar[bool] = True
    #: Whether a step that was lost may be made again with the records of the run's end.
    repeatable: ClassVar[bool] = True

    def rows(self, num_examples: int) -> int:
        """Returns the rows of a batch: its static shape, and the most that a step reads.

        Example:
          >>> import jaxdp
          >>> jaxdp.sampling.TruncatedPoisson(sampling_prob=0.1).rows(1000)
          160
          >>> jaxdp.sampling.FixedSize(32).rows(1000)
          32
        """
        raise NotImplementedError

    def expected_batch_size(self, num_examples: int) -> float:
        """Returns the constant that sums are divided by, whatever a step reads.

        Example:
          >>> import jaxdp
          >>> sampler = jaxdp.sampling.TruncatedPoisson(sampling_prob=0.1)
          >>> sampler.expected_batch_size(1000)
          100.0
        """
        return float(self.rows(num_examples))

    def max_steps(self, num_examples: int) -> int:
        """Returns the largest number of steps that the records suffice for.

        Example:
          >>> import jaxdp
          >>> jaxdp.sampling.SinglePass(32).max_steps(1000)
          31
        """
        return 2**31 - 1  # The counter of steps is a 32-bit integer.

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        """Bounds the number of ``num_steps`` steps in which one record can be read.

        Example:
          >>> import jaxdp
          >>> jaxdp.sampling.SinglePass(100).max_participations(1000, num_steps=10)
          1
          >>> jaxdp.sampling.ShuffledEpochs(100).max_participations(1000, num_steps=25)
          3
        """
        return num_steps

    def within_group(self, num_examples: int) -> tuple["Sampler", int]:
        """Returns how a step samples the records that it can read, and their number.

        Example:
          >>> import jaxdp
          >>> sampler = jaxdp.sampling.CyclicPoisson(num_groups=10, sampling_prob=0.5)
          >>> sampler.within_group(1000)[1]
          100
          >>> jaxdp.sampling.FixedSize(32).within_group(1000)
          (FixedSize(batch_size=32), 1000)
        """
        return self, num_examples

    def inclusion(self, record: int, step: int, num_examples: int) -> float:
        """Bounds the probability that a step reads a record, where batches are sampled.

        Example:
          >>> import jaxdp
          >>> sampler = jaxdp.sampling.CyclicPoisson(num_groups=10, sampling_prob=0.5)
          >>> [sampler.inclusion(3, step, 1000) for step in (2, 3, 13)]
          [0.0, 0.5, 0.5]
        """
        most = min(self.expected_batch_size(num_examples), self.rows(num_examples))
        return most / num_examples

    def phases_of(self, num_examples: int) -> tuple[Phase, ...]:
        """Returns the phases of a period, by the shape of their batches.

        Example:
          >>> import jaxdp
          >>> sampler = jaxdp.sampling.SinglePassRestarts(period=4, restart_batch_size=10)
          >>> [phase.name for phase in sampler.phases_of(100)]
          ['restart', 'difference']
        """
        return (Phase("step", 1, self.rows(num_examples)),)

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        """Draws a step's records, by the run's sampling key, of which steps are folded.

        Example:
          >>> import jax
          >>> import jaxdp
          >>> index, mask = jaxdp.sampling.SinglePass(4).draw(jax.random.key(0), 2, 100)
          >>> index.tolist(), mask.tolist()
          ([8, 9, 10, 11], [True, True, True, True])
        """
        raise NotImplementedError

    def of_phase(self, name: str) -> "Sampler":
        """Returns the sampler of the steps of a phase: shapes are static in each.

        Example:
          >>> import jaxdp
          >>> sampler = jaxdp.sampling.MultiPassRestarts(period=4, sampling_prob=0.1)
          >>> sampler.of_phase("restart"), sampler.of_phase("difference").sampling_prob
          (FullBatch(), 0.1)
        """
        return self


class _Whole(Sampler):
    """Base of samplers whose every step is given all records."""

    whole: ClassVar[bool] = True

    def rows(self, num_examples: int) -> int:
        return num_examples

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        return None, jnp.ones((num_examples,), bool)


@dataclasses.dataclass(frozen=True)
class FullBatch(_Whole):
    """Full batches: every step reads every record; no amplification, no sampling noise.

    Example:
      >>> import jaxdp
      >>> jaxdp.sampling.FullBatch().rows(1437)
      1437
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Sampler):
    """Poisson sampling: each record joins a step independently, up to ``max_batch_size``.

    The shape is fixed: absent rows are masked. On overflow a uniformly random subset of
    the sampled records is kept (not the lowest indices), which is what the accountant's
    event describes.

    Few rows of many records (fewer than a 32nd, of more than 2**17) are drawn at a cost
    that grows with the rows alone, from the same law: the size of the sample, then its
    records (:mod:`jaxdp.kernels.subset`).

    Attributes:
      sampling_prob: probability in [2**-32, 1) that a record joins a step.
      max_batch_size: rows of a batch; None takes ``q n + max_deviations sqrt(q n)``,
        rounded up to a multiple of 8. The number of records never truncates: plain Poisson
        sampling, at the cost of full batches.
      max_deviations: standard deviations of a sample's size that fit above its mean; None
        where ``max_batch_size`` says how many rows there are. With 6, truncation costs
        nothing that counts. With 4, batches have fewer rows and ask for more noise where q
        n is small or the noise near the clip: ``docs/guides/pitfalls.md``, "Truncated
        batches".

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.TruncatedPoisson(sampling_prob=0.1)
      >>> sampler.expected_batch_size(1000), sampler.rows(1000)
      (100.0, 160)
    """

    amplifies: ClassVar[bool] = True

    sampling_prob: float
    max_batch_size: int | None = None
    max_deviations: float | None = _deviations()

    def __post_init__(self) -> None:
        _settle(self, float, "sampling_prob")
        if self.sampling_prob < 2**-32:
            raise ValueError(
                "sampling_prob must be at least 2**-32, with which a word of 32 bits draws "
                f"a record, got {self.sampling_prob!r}"
            )
        if self.max_batch_size is None:
            _settle_deviations(self)
        else:
            _settle(self, int, "max_batch_size")
            object.__setattr__(self, "max_deviations", None)

    def rows(self, num_examples: int) -> int:
        if self.max_batch_size is not None:
            return min(self.max_batch_size, num_examples)
        assert self.max_deviations is not None
        mean = self.expected_batch_size(num_examples)
        size = min(num_examples, mean + self.max_deviations * math.sqrt(mean))
        return min(num_examples, 8 * math.ceil(size / 8))

    def expected_batch_size(self, num_examples: int) -> float:
        return self.sampling_prob * num_examples

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        key, rows = keys_lib.at_step(key, step), self.rows(num_examples)
        # Rounded down: the probability is at most the one accounted for, by under 2**-32.
        threshold = math.floor(self.sampling_prob * 2**32)
        if few(rows, num_examples):
            index, found = subset.distinct(key, num_examples, rows)
            size = subset.drawn_size(key, subset.sizes(num_examples, threshold, rows))
            return index, found & (jnp.arange(rows, dtype=jnp.int32) < size)
        words = keys_lib.words(key, num_examples)
        # Given the sampled ones, the order of their words is uniform, so the smallest are
        # a uniform subset.
        return subset.smallest(key, words, rows, threshold)


@dataclasses.dataclass(frozen=True)
class _Sized(Sampler):
    """Batches of one size, which is what their sums are divided by."""

    batch_size: int

    def __post_init__(self) -> None:
        _settle(self, int, "batch_size")

    def rows(self, num_examples: int) -> int:
        return _at_most(self.batch_size, num_examples)


@dataclasses.dataclass(frozen=True)
class FixedSize(_Sized):
    """A uniformly random subset of one size, drawn anew at each step.

    (Few rows of many records are drawn as those of :class:`TruncatedPoisson` are.)
    Accounted under ``"replace_one"`` only. There :class:`TruncatedPoisson` costs little
    less where the noise on a batch's sum is well above the clip, and much less where it is
    below.

    Attributes:
      batch_size: records of a step, without repetition; at most ``num_examples``.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.FixedSize(batch_size=4)
      >>> index, mask = sampler.draw(jaxdp.Keys.insecure(0).sampling, 0, 100)
      >>> len(set(index.tolist())), bool(mask.all())
      (4, True)
    """

    amplifies: ClassVar[bool] = True

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        key, rows = keys_lib.at_step(key, step), self.rows(num_examples)
        if few(rows, num_examples):
            return subset.distinct(key, num_examples, rows)
        words = keys_lib.words(key, num_examples)
        return subset.smallest(key, words, rows)[0], jnp.ones((rows,), bool)


@dataclasses.dataclass(frozen=True)
class SinglePass(_Sized):
    """One pass in the order of the data: step t reads the records tB to (t+1)B - 1.

    No record is read twice, so all steps together cost what one costs, under every
    relation.

    Attributes:
      batch_size: B; ``num_steps * B`` must be at most ``num_examples``.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.SinglePass(batch_size=32)
      >>> sampler.max_steps(1437), sampler.max_participations(1437, num_steps=44)
      (44, 1)
    """

    def max_steps(self, num_examples: int) -> int:
        return num_examples // self.rows(num_examples)

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return 1

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        size = self.rows(num_examples)
        first = jnp.asarray(step, jnp.int32) * size
        return first + jnp.arange(size), jnp.ones((size,), bool)


class _Restarts(Sampler):
    """Base of samplers with another batch where each ``period`` of steps begins."""

    one_size: ClassVar[bool] = False

    period: int

    def phases_of(self, num_examples: int) -> tuple[Phase, ...]:
        restart, difference = (
            Phase(name, steps, self.of_phase(name).rows(num_examples))
            for name, steps in (("restart", 1), ("difference", self.period - 1))
        )
        return (restart,) if self.period == 1 else (restart, difference)

    def rows(self, num_examples: int) -> int:
        sizes = [phase.batch_size for phase in self.phases_of(num_examples)]
        return _at_most(max(sizes), num_examples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinglePassRestarts(_Restarts):
    """One pass in the order of the data, with another batch size where a period begins.

    Of every ``period`` steps the first reads ``restart_batch_size`` fresh records and each
    other one ``batch_size``. No record is read twice.

    Attributes:
      period: steps from one restart to the next; with 1 every step is a restart.
      restart_batch_size: records of the first step of a period.
      batch_size: records of its other steps.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.SinglePassRestarts(
      ...     period=4, restart_batch_size=10, batch_size=2
      ... )
      >>> sampler.records_per_period, sampler.max_steps(100)
      (16, 24)
    """

    period: int
    restart_batch_size: int
    batch_size: int = 1

    def __post_init__(self) -> None:
        _settle(self, int, "period", "restart_batch_size", "batch_size")

    @property
    def records_per_period(self) -> int:
        return self.restart_batch_size + (self.period - 1) * self.batch_size

    def max_steps(self, num_examples: int) -> int:
        periods, left = divmod(num_examples, self.records_per_period)
        steps = periods * self.period
        if left >= self.restart_batch_size:
            steps += 1 + (left - self.restart_batch_size) // self.batch_size
        return steps

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return 1

    def of_phase(self, name: str) -> "_OfPhase":
        restart = name == "restart"
        size = self.restart_batch_size if restart else self.batch_size
        return _OfPhase(self, size, restart=restart)


class _OfPhase(Sampler):
    """Sampler of the steps of one phase of a :class:`SinglePassRestarts`."""

    def __init__(self, sampler: SinglePassRestarts, size: int, *, restart: bool):
        self.sampler, self.size, self.restart = sampler, size, restart

    def rows(self, num_examples: int) -> int:
        return self.size

    def expected_batch_size(self, num_examples: int) -> int:
        return self.size

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        every = self.sampler
        period, at = jnp.divmod(jnp.asarray(step, jnp.int32), every.period)
        first = period * every.records_per_period
        if not self.restart:
            first += every.restart_batch_size + (at - 1) * self.size
        here = (at == 0) == self.restart  # A step of the other phase has none.
        index = first + jnp.arange(self.size)
        mask = jnp.full((self.size,), here) & (index < num_examples)
        # A masked row holds some record, which contributes zero. Steps of a plan mask no
        # row in their own phase, so none of their rows is moved.
        return jnp.clip(index, 0, num_examples - 1), mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiPassRestarts(_Restarts):
    """Periods of steps that read all records, or a sample of their own.

    The first of every ``period`` steps and the others each read all records, or a truncated
    Poisson sample of them (:class:`TruncatedPoisson`) with a probability of their own.

    Attributes:
      period: steps from one restart to the next; with 1 every step is a restart.
      restart_sampling_prob: probability in (0, 1) that a record joins the first step of a
        period; None for all records.
      sampling_prob: the same of its other steps.
      max_deviations: as in :class:`TruncatedPoisson`, for both samples; None where there is
        none.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.MultiPassRestarts(period=4, sampling_prob=0.1)
      >>> [(phase.name, phase.batch_size) for phase in sampler.phases_of(1000)]
      [('restart', 1000), ('difference', 160)]
    """

    period: int
    restart_sampling_prob: float | None = None
    sampling_prob: float | None = None
    max_deviations: float | None = _deviations()

    def __post_init__(self) -> None:
        _settle(self, int, "period")
        for name in ("restart_sampling_prob", "sampling_prob"):
            if getattr(self, name) is not None:
                _settle(self, float, name)
        if self.period == 1 and self.sampling_prob is not None:
            raise ValueError(
                "sampling_prob must be None with period=1, where every step is a restart, "
                f"got {self.sampling_prob!r}"
            )
        if self.amplifies:
            _settle_deviations(self)
        else:
            object.__setattr__(self, "max_deviations", None)

    @property
    def amplifies(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.restart_sampling_prob is not None or self.sampling_prob is not None

    def of_phase(self, name: str) -> FullBatch | TruncatedPoisson:
        q = self.restart_sampling_prob if name == "restart" else self.sampling_prob
        if q is None:
            return FullBatch()
        return TruncatedPoisson(sampling_prob=q, max_deviations=self.max_deviations)


@dataclasses.dataclass(frozen=True)
class ShuffledEpochs(_Sized):
    """Epochs that each read the records in a new random order, in full batches.

    What is left over at the end of an epoch is not read in it. No amplification is
    claimed: one record is read once an epoch, and that is what an epoch costs. (Shuffled
    batches can cost much more than Poisson samples: https://arxiv.org/abs/2403.17673.) The
    orders need not be secret.

    Attributes:
      batch_size: B; an epoch has ``num_examples // B`` steps.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.ShuffledEpochs(batch_size=100)
      >>> sampler.max_participations(1000, num_steps=25)
      3
    """

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return -(-num_steps // (num_examples // self.rows(num_examples)))

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        size = self.rows(num_examples)
        step = jnp.asarray(step, jnp.int32)
        epoch, batch = jnp.divmod(step, num_examples // size)
        places = batch * size + jnp.arange(size)
        index = threefry.permuted(keys_lib.at_step(key, epoch), places, num_examples)
        return index, jnp.ones((size,), bool)


class CyclicEpochs(_Sized):
    """Epochs that all read the records in one random order, in full batches.

    What is left over at the end of an epoch is never read. Two steps that read the same
    record are whole epochs apart, so that noise may be correlated over all of a run
    (``jaxdp.plans.PrefixSum``). No amplification is claimed; the order need not be secret.

    Attributes:
      batch_size: B; an epoch has ``num_examples // B`` steps.

    Example:
      >>> import jax
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.CyclicEpochs(batch_size=100)
      >>> sampler.max_participations(1000, num_steps=25)
      3
      >>> first, again = (sampler.draw(jax.random.key(0), t, 1000)[0] for t in (3, 13))
      >>> bool((first == again).all())
      True
    """

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return -(-num_steps // (num_examples // self.rows(num_examples)))

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        size = self.rows(num_examples)
        batch = jnp.asarray(step, jnp.int32) % (num_examples // size)
        places = batch * size + jnp.arange(size)
        index = threefry.permuted(keys_lib.at_step(key, 0), places, num_examples)
        return index, jnp.ones((size,), bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoisson(Sampler):
    """Poisson samples of one group of the records after another.

    The records are divided into ``num_groups`` groups of one size: those that many places
    apart in the data, so that data in some order are spread over all. Step t samples from
    group ``t % num_groups`` as :class:`TruncatedPoisson` does. What is left over is never
    read.

    A record can be in every ``num_groups``-th step alone, each time by its own coin. So
    noise that is correlated over fewer steps (``jaxdp.plans.PrefixSum`` with ``bands``) is
    amplified as independent noise is: by the sampling of a group, which is
    ``num_groups`` times denser than that of all records for the same batch.

    Attributes:
      num_groups: b; steps from one that can read a record to the next.
      sampling_prob: probability in (0, 1) that a record of the group joins the step.
      max_batch_size: rows of a batch; None as in :class:`TruncatedPoisson`.
      max_deviations: likewise.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.CyclicPoisson(num_groups=10, sampling_prob=0.5)
      >>> sampler.expected_batch_size(1000), sampler.rows(1000)
      (50.0, 96)
      >>> index, mask = sampler.draw(jaxdp.Keys.insecure(0).sampling, 13, 1000)
      >>> set((index % 10).tolist())
      {3}

    References:
      C. Choquette-Choo et al., `(Amplified) Banded Matrix Factorization
      <https://arxiv.org/abs/2306.08153>`_, 2023, Algorithm 2.
    """

    amplifies: ClassVar[bool] = True

    num_groups: int
    sampling_prob: float
    max_batch_size: int | None = None
    max_deviations: float | None = _deviations()

    def __post_init__(self) -> None:
        _settle(self, int, "num_groups")
        of_a_group = self.of_a_group
        for field in dataclasses.fields(of_a_group):
            object.__setattr__(self, field.name, getattr(of_a_group, field.name))

    @property
    def of_a_group(self) -> TruncatedPoisson:
        """Sampler of the records of one group."""
        return TruncatedPoisson(
            sampling_prob=self.sampling_prob,
            max_batch_size=self.max_batch_size,
            max_deviations=self.max_deviations,
        )

    def group_size(self, num_examples: int) -> int:
        """Returns the number of records of each group.

        Example:
          >>> import jaxdp
          >>> jaxdp.sampling.CyclicPoisson(
          ...     num_groups=10, sampling_prob=0.5
          ... ).group_size(1005)
          100
        """
        if self.num_groups > num_examples:
            raise ValueError(
                f"num_groups must be at most num_examples = {num_examples}, got "
                f"{self.num_groups}"
            )
        return num_examples // self.num_groups

    def rows(self, num_examples: int) -> int:
        return self.of_a_group.rows(self.group_size(num_examples))

    def expected_batch_size(self, num_examples: int) -> float:
        return self.of_a_group.expected_batch_size(self.group_size(num_examples))

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return -(-num_steps // self.num_groups)

    def within_group(self, num_examples: int) -> tuple[Sampler, int]:
        return self.of_a_group, self.group_size(num_examples)

    def inclusion(self, record: int, step: int, num_examples: int) -> float:
        place, group = divmod(record, self.num_groups)
        sampler, size = self.within_group(num_examples)
        if place >= size or group != step % self.num_groups:
            return 0.0
        return sampler.inclusion(place, step // self.num_groups, size)

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        size = self.group_size(num_examples)
        index, mask = self.of_a_group.draw(key, step, size)
        assert index is not None
        group = jnp.asarray(step, jnp.int32) % self.num_groups
        return group + self.num_groups * index, mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveCursor(_Whole):
    """Cursor over the records, in the order of the data; each query moves it on.

    How many records a query reads follows from what was released before, so a batch is the
    whole data set, of which the method reads a stretch. Each record is in one query of a
    pass. Under ``"add_or_remove"`` an absent record leaves its row, masked: one that is
    taken out would shift all later batches. Data that came in some order (by class, by
    time) should be given in a random one: :func:`jaxdp.sampling.shuffled`.

    Attributes:
      num_passes: how often the cursor may begin again.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.AdaptiveCursor(num_passes=2)
      >>> sampler.max_participations(1000, num_steps=50)
      2
    """

    one_size: ClassVar[bool] = False
    repeatable: ClassVar[bool] = False  # Several queries may be one step.

    num_passes: int = 1

    def __post_init__(self) -> None:
        _settle(self, int, "num_passes")

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return self.num_passes


@dataclasses.dataclass(frozen=True)
class External(Sampler):
    """Batches that somebody else makes, given to ``update`` as arrays with a mask.

    Whoever makes them must put no record twice into one batch, and choose them such that
    replacing or removing a record leaves all other rows as they are. Every step is
    charged as if it read every record: what is not drawn here is not known to be random.

    Attributes:
      batch_size: the most records of a batch, and the constant that sums are divided by;
        None is all records.

    Example:
      >>> import jaxdp
      >>> sampler = jaxdp.sampling.External(batch_size=64)
      >>> sampler.rows(1000), sampler.amplifies
      (64, False)
    """

    draws: ClassVar[bool] = False

    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            _settle(self, int, "batch_size")

    def rows(self, num_examples: int) -> int:
        size = num_examples if self.batch_size is None else self.batch_size
        return _at_most(size, num_examples)

    def draw(self, key: jax.Array, step: Step, num_examples: int) -> Drawn:
        raise ValueError(
            f"plan.sampling must be a sampler that draws its batches, got {self!r}, whose "
            "batches somebody else makes; write the loop by hand and give them to update "
            "as arrays, with mask="
        )


AnySampler = (
    FullBatch
    | TruncatedPoisson
    | FixedSize
    | SinglePass
    | SinglePassRestarts
    | MultiPassRestarts
    | ShuffledEpochs
    | CyclicEpochs
    | CyclicPoisson
    | AdaptiveCursor
    | External
)
_KINDS = {kind.__name__: kind for kind in get_args(AnySampler)}


def _settle(sampler: Sampler, kind: type[int] | type[float], *names: str) -> None:
    """Checks fields, counts (int) or probabilities (float), and makes them that type."""
    check = validate.integer if kind is int else validate.probability
    for name in names:
        check(**{name: getattr(sampler, name)})
        object.__setattr__(sampler, name, kind(getattr(sampler, name)))


def _settle_deviations(sampler: Any) -> None:
    """Checks ``max_deviations``, makes it a float, and takes the default for None."""
    found = sampler.max_deviations
    found = _DEVIATIONS if found is None else found
    validate.positive(max_deviations=found)
    object.__setattr__(sampler, "max_deviations", float(found))


def _at_most(batch_size: int, num_examples: int) -> int:
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size must be at most num_examples = {num_examples}, got {batch_size}"
        )
    return batch_size


def few(rows: int, num_examples: int) -> bool:
    """Returns True where a batch is so small a part that not every record needs a word.

    Below either number a word for each costs less, and an old run keeps its batches.
    """
    return num_examples > 2**17 and 32 * rows < num_examples


def as_dict(sampler: Sampler) -> dict[str, Any]:
    """Returns name and fields of a sampler, for JSON.

    Fields that have the value of a stored plan without them are left out: digests stay.
    """
    said: dict[str, Any] = {"sampler": type(sampler).__name__}
    for field in dataclasses.fields(sampler):  # pyright: ignore[reportArgumentType]
        value, before = getattr(sampler, field.name), field.metadata.get(_BEFORE)
        if before is None or value not in (None, before):
            said[field.name] = value
    return said


def from_dict(said: dict[str, Any]) -> Sampler:
    """Returns the sampler of which :func:`as_dict` made a dictionary."""
    given = dict(said)
    kind: Any = _KINDS[given.pop("sampler")]
    fields = [x for x in dataclasses.fields(kind) if _BEFORE in x.metadata]
    return kind(**{x.name: x.metadata[_BEFORE] for x in fields} | given)
