"""Which records a step reads.

A sampler's fields are public; which records it picks is secret where privacy is
amplified by it. Batches are drawn inside the compiled loop at a fixed shape, and carry
their sampler: a transform refuses, when it is traced, a batch that the plan's sampler
did not make.

====================  ==============================  ================================
sampler               one record is in a step         what that earns
====================  ==============================  ================================
``FullBatch``         always                          nothing: every step is charged
``TruncatedPoisson``  by its own coin                 amplification, every relation
``FixedSize``         in a random subset of one size  amplification, replace-one only
``SinglePass``        in one step of the run          all steps cost what one costs
``ShuffledEpochs``    in one step of an epoch         an epoch costs what a step costs
``External``          as somebody else decides        nothing: every step is charged
====================  ==============================  ================================

No sum is ever divided by the number of records that a step happened to read.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _validate
from jaxdp import keys as keys_lib
from jaxdp._types import PrivatePlan
from jaxdp.kernels import threefry


class Sampler:
    """What every sampler says of itself."""

    #: Whether privacy is amplified because nobody knows which records it picks.
    amplifies: ClassVar[bool] = False

    def rows(self, num_examples: int) -> int:
        """Rows of a batch: its static shape, and the most records that a step reads."""
        raise NotImplementedError

    def expected_batch_size(self, num_examples: int) -> float:
        """What sums are divided by: a constant, whatever a step reads."""
        return float(self.rows(num_examples))

    def max_steps(self, num_examples: int) -> int:
        """How many batches there are."""
        return 2**31 - 1  # The counter of steps is a 32-bit integer.

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        """In how many of ``num_steps`` steps one record can be read."""
        return num_steps

    def draw(
        self, key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> tuple[jax.Array | None, jax.Array]:
        """Indices (B,) of the records of a step, None for all in order; and mask (B,).

        Args:
          key: the run's sampling key, of which steps are folded.
          step: shape=(); may be traced.
          num_examples: records to draw from.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FullBatch(Sampler):
    """Every step reads every record: no amplification, no sampling noise."""

    def rows(self, num_examples: int) -> int:
        return num_examples

    def draw(
        self, key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> tuple[None, jax.Array]:
        return None, jnp.ones((num_examples,), bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Sampler):
    """Each record joins each step independently; at most ``max_batch_size`` of them.

    The shape is fixed: absent rows are masked. On overflow a uniformly random subset of
    the sampled records is kept (not the lowest indices; ties of 30 random bits aside),
    which is what the accountant's event describes.

    Attributes:
      sampling_prob: probability in (0, 1) that a record joins a step.
      max_batch_size: rows of a batch; None takes ``q n + 4 sqrt(q n)``, rounded up to a
        multiple of 8, at which truncation costs next to nothing. The number of records
        never truncates: plain Poisson sampling, at the cost of full batches.
    """

    amplifies: ClassVar[bool] = True

    sampling_prob: float
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        _validate.probability(sampling_prob=self.sampling_prob)
        object.__setattr__(self, "sampling_prob", float(self.sampling_prob))
        if self.max_batch_size is not None:
            _validate.integer(max_batch_size=self.max_batch_size)
            object.__setattr__(self, "max_batch_size", int(self.max_batch_size))

    def rows(self, num_examples: int) -> int:
        if self.max_batch_size is not None:
            return min(self.max_batch_size, num_examples)
        mean = self.expected_batch_size(num_examples)
        return min(num_examples, 8 * math.ceil((mean + 4 * math.sqrt(mean)) / 8))

    def expected_batch_size(self, num_examples: int) -> float:
        return self.sampling_prob * num_examples

    def draw(
        self, key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> tuple[jax.Array, jax.Array]:
        words = keys_lib.words(keys_lib.at_step(key, step), num_examples)
        # Rounded down: the probability is at most the one accounted for, by under 2**-32.
        threshold = np.uint32(math.floor(self.sampling_prob * 2**32))
        # Given the sampled ones, the order of their words is uniform, so the smallest are
        # a uniform subset.
        score = jnp.where(words < threshold, _score(words), -jnp.inf)
        best, index = jax.lax.top_k(score, self.rows(num_examples))
        return index, best > -jnp.inf


@dataclasses.dataclass(frozen=True)
class _Sized(Sampler):
    """Batches of one size, which is what their sums are divided by."""

    batch_size: int

    def __post_init__(self) -> None:
        _validate.integer(batch_size=self.batch_size)
        object.__setattr__(self, "batch_size", int(self.batch_size))

    def rows(self, num_examples: int) -> int:
        return _at_most(self.batch_size, num_examples)


@dataclasses.dataclass(frozen=True)
class FixedSize(_Sized):
    """A uniformly random subset of one size, drawn anew at each step.

    (Uniform up to ties of 30 random bits.) Accounted under ``"replace_one"`` only, and
    loosely: :class:`TruncatedPoisson` costs about half as much.

    Attributes:
      batch_size: records of a step, without repetition; at most ``num_examples``.
    """

    amplifies: ClassVar[bool] = True

    def draw(
        self, key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> tuple[jax.Array, jax.Array]:
        words = keys_lib.words(keys_lib.at_step(key, step), num_examples)
        _, index = jax.lax.top_k(_score(words), self.rows(num_examples))
        return index, jnp.ones((self.batch_size,), bool)


@dataclasses.dataclass(frozen=True)
class SinglePass(_Sized):
    """Step t reads the records tB to (t+1)B - 1: one pass, in the order of the data.

    No record is read twice, so all steps together cost what one costs, under every
    relation. (Under ``"add_or_remove"`` an absent record leaves its row, masked: the
    others keep their places.)

    Attributes:
      batch_size: B; ``num_steps * B`` must be at most ``num_examples``.
    """

    def max_steps(self, num_examples: int) -> int:
        return num_examples // self.rows(num_examples)

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return 1

    def draw(
        self, key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> tuple[jax.Array, jax.Array]:
        size = self.rows(num_examples)
        first = jnp.asarray(step, jnp.int32) * size
        return first + jnp.arange(size), jnp.ones((size,), bool)


@dataclasses.dataclass(frozen=True)
class ShuffledEpochs(_Sized):
    """Every epoch reads the records in a new random order, in full batches.

    What is left over at the end of an epoch is not read in it. No amplification is
    claimed, for none near that of Poisson sampling is proved: one record is read once an
    epoch, and that is what an epoch costs. The orders need not be
    secret. (Under ``"add_or_remove"`` an absent record leaves its row, masked.)

    Attributes:
      batch_size: B; an epoch has ``num_examples // B`` steps.
    """

    def max_participations(self, num_examples: int, num_steps: int) -> int:
        return -(-num_steps // (num_examples // self.rows(num_examples)))

    def draw(
        self, key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> tuple[jax.Array, jax.Array]:
        size = self.rows(num_examples)
        step = jnp.asarray(step, jnp.int32)
        epoch, batch = jnp.divmod(step, num_examples // size)
        places = batch * size + jnp.arange(size)
        index = threefry.permuted(keys_lib.at_step(key, epoch), places, num_examples)
        return index, jnp.ones((size,), bool)


@dataclasses.dataclass(frozen=True)
class External(Sampler):
    """Batches that somebody else makes, given to ``update`` as arrays with a mask.

    Whoever makes them must put no record twice into one batch, and choose them such that
    replacing or removing a record leaves all other rows as they are. Every step is
    charged as if it read every record: what is not drawn here is not known to be random.

    Attributes:
      batch_size: the most records of a batch, and the constant that sums are divided by;
        None is all records.
    """

    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            _validate.integer(batch_size=self.batch_size)
            object.__setattr__(self, "batch_size", int(self.batch_size))

    def rows(self, num_examples: int) -> int:
        size = num_examples if self.batch_size is None else self.batch_size
        return _at_most(size, num_examples)

    def draw(
        self, key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> tuple[jax.Array, jax.Array]:
        raise ValueError(
            f"plan.sampling must be a sampler that draws its batches, got {self!r}, whose "
            "batches somebody else makes; write the loop by hand and give them to update "
            "as arrays, with mask="
        )


AnySampler = (
    FullBatch | TruncatedPoisson | FixedSize | SinglePass | ShuffledEpochs | External
)


def _at_most(batch_size: int, num_examples: int) -> int:
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size must be at most num_examples = {num_examples}, got {batch_size}"
        )
    return batch_size


def _score(words: jax.Array) -> jax.Array:
    """Largest for the smallest words: 30 bits as negative floats, for top_k.

    (It is fast on floats alone. A tie, of probability 2**-30 a pair, goes to the lower
    index.)
    """
    return -jax.lax.bitcast_convert_type((words >> 2) + np.uint32(2**23), jnp.float32)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("records", "mask"),
    meta_fields=("sampler", "num_examples", "private"),
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """The records of one step. Secret, like the data.

    Attributes:
      records: pytree with leading axis B; masked rows hold some record and count nothing.
      mask: bool (B,).
      sampler: what drew it; static.
      num_examples: of how many records; static.
      private: whether secret keys from entropy drew it; static.
    """

    records: Any
    mask: jax.Array
    sampler: AnySampler
    num_examples: int
    private: bool


def check_data(plan: PrivatePlan, data: Any, name: str = "data") -> None:
    """Requires every leaf of ``data`` to have ``plan.num_examples`` rows.

    Raises:
      ValueError: no leaves, or another number of rows.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data)]
    if not shapes or any(not s or s[0] != plan.num_examples for s in shapes):
        raise ValueError(
            f"{name} must be arrays whose first axis has the plan's num_examples = "
            f"{plan.num_examples} records, got shapes {shapes}"
        )


def batch(
    plan: PrivatePlan, keys: keys_lib.Keys, step: int | jax.Array, data: Any
) -> Batch:
    """The batch of one step, as the plan's sampler draws it.

    Args:
      plan: any plan; its ``sampling`` and ``num_examples`` are read.
      keys: their sampling root is read.
      step: index of the step, shape=(); may be traced.
      data: pytree of arrays with ``plan.num_examples`` rows.

    Returns:
      A :class:`Batch` of static shape. Nothing of it may be released.

    Raises:
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: wrong number of rows, or a
        sampler that draws no batches.
    """
    keys = keys_lib.check(keys)
    _validate.instance(Sampler, **{"plan.sampling": plan.sampling})
    check_data(plan, data)
    sampler: Any = plan.sampling
    context = int(plan.digest[:8], 16)
    key = keys_lib.stream(keys.sampling, "sampling", context=context)
    index, mask = sampler.draw(key, step, plan.num_examples)
    records = data
    if index is not None:
        records = jax.tree.map(lambda x: jnp.asarray(x)[index], data)
    return Batch(records, mask, sampler, plan.num_examples, keys.private)


def resolve(
    plan: PrivatePlan, batch: Any, mask: jax.Array | None, *, private: bool
) -> tuple[Any, jax.Array]:
    """Records and mask of what a transform was given, if the plan allows it.

    Args:
      plan: the transform's plan.
      batch: a :class:`Batch` of the plan's sampler; or raw arrays, with full batches and
        external ones.
      mask: bool (B,), for raw arrays with padded rows only. At most as many rows count as
        the sampler has (all records, or its ``batch_size``): those beyond are masked too.
      private: whether the transform's keys come from entropy.

    Raises:
      ValueError: a batch of another sampler, number of records or kind of keys; raw
        arrays where the plan samples; another number of rows. Raised when traced. (A step
        index that stands still cannot be seen: pass the step's own.)
    """
    if isinstance(batch, Batch):
        if batch.sampler != plan.sampling:
            raise ValueError(
                f"batch was drawn by {batch.sampler!r}, but the plan accounts for "
                f"{plan.sampling!r}; draw it with jaxdp.sampling.batch(plan, ...)"
            )
        if batch.num_examples != plan.num_examples:
            raise ValueError(
                f"batch was drawn from {batch.num_examples} records, but the plan has "
                f"num_examples = {plan.num_examples}"
            )
        if private and not batch.private and batch.sampler.amplifies:
            raise ValueError(
                "batch was drawn with insecure keys, but amplification needs a secret "
                "sample: draw it with the keys of the transform"
            )
        if mask is not None:
            raise ValueError("mask must be None with a Batch, which carries its own")
        return batch.records, batch.mask
    if not isinstance(plan.sampling, FullBatch | External):
        raise ValueError(
            f"batch must be a jaxdp.sampling.Batch drawn by {plan.sampling!r}, got raw "
            "arrays, for which no amplification can be accounted; draw it with "
            "jaxdp.sampling.batch(plan, keys, step, data)"
        )
    most = plan.sampling.rows(plan.num_examples)
    rows = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.shape(leaf)}
    if mask is None and isinstance(plan.sampling, FullBatch):
        check_data(plan, batch, "batch")
        return batch, jnp.ones((most,), bool)
    if mask is None:
        if len(rows) != 1 or max(rows) > most:
            raise ValueError(
                f"batch must be arrays with at most {most} rows, the plan's batch_size, "
                f"or come with a mask; got {sorted(rows)} rows"
            )
        return batch, jnp.ones((max(rows),), bool)
    mask = jnp.asarray(mask)
    if rows != set(mask.shape) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be bool of shape (B,) with B the rows of batch {sorted(rows)}, "
            f"got {mask.dtype} of shape {mask.shape}"
        )
    return batch, mask & (jnp.cumsum(mask) <= most)
