"""Which records a step reads.

A sampler's fields are public; which records it picks is secret where privacy is
amplified by it. Batches are drawn inside the compiled loop at a fixed shape, and carry
their sampler: a transform refuses, when it is traced, a batch that the plan's sampler
did not make.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import _validate
from jaxdp import keys as keys_lib
from jaxdp._types import PrivatePlan


@dataclasses.dataclass(frozen=True)
class FullBatch:
    """Every step reads every record: no amplification, no sampling noise."""

    def batch_size(self, num_examples: int) -> int:
        return num_examples

    def expected_batch_size(self, num_examples: int) -> float:
        return float(num_examples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedPoisson:
    """Each record joins each step independently; at most ``max_batch_size`` of them.

    The shape is fixed: absent rows are masked. On overflow a uniformly random subset of
    the sampled records is kept (not the lowest indices; ties of 30 random bits aside),
    which is what the accountant's event describes.

    Attributes:
      sampling_prob: probability in (0, 1) that a record joins a step.
      max_batch_size: rows of a batch; None takes ``q n + 4 sqrt(q n)``, rounded up to a
        multiple of 8, at which truncation costs next to nothing.
    """

    sampling_prob: float
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        _validate.probability(sampling_prob=self.sampling_prob)
        object.__setattr__(self, "sampling_prob", float(self.sampling_prob))
        if self.max_batch_size is not None:
            _validate.integer(max_batch_size=self.max_batch_size)
            object.__setattr__(self, "max_batch_size", int(self.max_batch_size))

    def batch_size(self, num_examples: int) -> int:
        if self.max_batch_size is not None:
            return min(self.max_batch_size, num_examples)
        mean = self.expected_batch_size(num_examples)
        return min(num_examples, 8 * math.ceil((mean + 4 * math.sqrt(mean)) / 8))

    def expected_batch_size(self, num_examples: int) -> float:
        return self.sampling_prob * num_examples


AnySampler = FullBatch | TruncatedPoisson


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
      TypeError: ``keys`` is no ``jaxdp.Keys``. ValueError: wrong number of rows.
    """
    keys = keys_lib.check(keys)
    check_data(plan, data)
    sampler = plan.sampling
    if isinstance(sampler, FullBatch):
        mask = jnp.ones((plan.num_examples,), bool)
        return Batch(data, mask, sampler, plan.num_examples, keys.private)
    if isinstance(sampler, TruncatedPoisson):
        context = int(plan.digest[:8], 16)
        key = keys_lib.stream(keys.sampling, "sampling", step, context)
        size = sampler.batch_size(plan.num_examples)
        index, mask = _poisson(key, plan.num_examples, sampler.sampling_prob, size)
        records = jax.tree.map(lambda x: jnp.asarray(x)[index], data)
        return Batch(records, mask, sampler, plan.num_examples, keys.private)
    raise TypeError(f"plan.sampling must be a sampler, got {sampler!r}")


def _poisson(
    key: jax.Array, num_examples: int, sampling_prob: float, size: int
) -> tuple[jax.Array, jax.Array]:
    """Indices (size,) and mask (size,) of a truncated Poisson sample.

    Record i is sampled where its random word is below the threshold. Given that, the
    order of the sampled words is uniform, so the ``size`` smallest are a uniform subset.
    """
    words = keys_lib.words(key, num_examples)
    # Rounded down: the probability is at most the one accounted for, by under 2**-32.
    threshold = np.uint32(math.floor(sampling_prob * 2**32))
    # Order-preserving map of 30 bits to positive normal floats, for top_k is fast on
    # floats alone; a tie (probability 2**-30 a pair) goes to the lower index.
    order = jax.lax.bitcast_convert_type((words >> 2) + np.uint32(2**23), jnp.float32)
    score = jnp.where(words < threshold, -order, -jnp.inf)
    best, index = jax.lax.top_k(score, size)
    return index, best > -jnp.inf


def resolve(
    plan: PrivatePlan, batch: Any, mask: jax.Array | None, *, private: bool
) -> tuple[Any, jax.Array]:
    """Records and mask of what a transform was given, if the plan allows it.

    Args:
      plan: the transform's plan.
      batch: a :class:`Batch` of the plan's sampler; or, with full batches, raw arrays.
      mask: bool (B,), for raw arrays with padded rows only. At most
        ``plan.num_examples`` rows count: those beyond are masked too.
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
        if private and not batch.private and plan.sampling != FullBatch():
            raise ValueError(
                "batch was drawn with insecure keys, but amplification needs a secret "
                "sample: draw it with the keys of the transform"
            )
        if mask is not None:
            raise ValueError("mask must be None with a Batch, which carries its own")
        return batch.records, batch.mask
    if not isinstance(plan.sampling, FullBatch):
        raise ValueError(
            f"batch must be a jaxdp.sampling.Batch drawn by {plan.sampling!r}, got raw "
            "arrays, for which no amplification can be accounted; draw it with "
            "jaxdp.sampling.batch(plan, keys, step, data)"
        )
    rows = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.shape(leaf)}
    if mask is None:
        check_data(plan, batch, "batch")
        return batch, jnp.ones((plan.num_examples,), bool)
    mask = jnp.asarray(mask)
    if rows != set(mask.shape) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be bool of shape (B,) with B the rows of batch {sorted(rows)}, "
            f"got {mask.dtype} of shape {mask.shape}"
        )
    return batch, mask & (jnp.cumsum(mask) <= plan.num_examples)
