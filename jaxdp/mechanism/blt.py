"""Noise kernels by name, and buffered Toeplitz noise that is optimised for a period."""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdp.core import validate
from jaxdp.kernels import node_noise, prefix_noise, toeplitz_noise
from jaxdp.mechanism.sum_plan import SumPlan

P = TypeVar("P", bound=SumPlan)

#: More buffers gain nothing and make the optimisation ill-conditioned.
MAX_BUFFERS = 10


@dataclasses.dataclass(frozen=True)
class BLTNumbers:
    """Parameters of a buffered Toeplitz kernel.

    Attributes:
      buf_decay: in [0, 1], one for each buffer.
      output_scale: at least 0, one for each buffer.

    Example:
      >>> import jaxdp
      >>> numbers = jaxdp.plans.BLTNumbers(buf_decay=(0.9,), output_scale=(0.1,))
      >>> plan = jaxdp.plans.PrefixSum(
      ...     num_examples=1437, num_steps=22, sampling=jaxdp.sampling.SinglePass(64),
      ...     relation="replace_one", l2_clip_norm=1.0, prefix_noise="blt_1",
      ...     blt_numbers=numbers,
      ... )
      >>> plan.blt_numbers.buf_decay
      (0.9,)
    """

    buf_decay: tuple[float, ...]
    output_scale: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # JSON has lists.
            object.__setattr__(self, field.name, tuple(getattr(self, field.name)))


def check_names(
    name: str,
    numbers: BLTNumbers | None,
    names: tuple[str, ...] = prefix_noise.NAMES,
) -> None:
    """Checks a plan's ``prefix_noise`` and its ``blt_numbers`` against each other."""
    validate.one_of(names, prefix_noise=name)
    if numbers is None:
        return
    validate.instance(BLTNumbers, blt_numbers=numbers)
    buffers = len(numbers.buf_decay)
    if name != f"blt_{buffers}":
        raise ValueError(
            f"blt_numbers must have as many buffers as prefix_noise = {name!r} says, got "
            f"{buffers}"
        )


def kernel(
    name: str, numbers: BLTNumbers | None, period: int
) -> prefix_noise.PrefixNoise:
    """Returns the noise kernel of one period, with a plan's own numbers if it has any."""
    if numbers is None:
        return prefix_noise.make(name, period)
    return toeplitz_noise.Buffered(period, **dataclasses.asdict(numbers))


def with_optimised_noise(plan: P, num_buffers: int = 3) -> P:
    """Returns the same plan with a buffered Toeplitz C optimised for its period.

    Uses ``jax_privacy`` (the extra ``mf``), in up to half a minute the first time. The
    guarantee stays: the noise follows from C.

    Args:
      plan: one with ``prefix_noise``, of which this is a method.
      num_buffers: 1, 2 or 3.

    Raises:
      ImportError: ``jax_privacy`` is not installed.
      ValueError: a plan that takes no buffered noise, before anything is optimised.

    Example:
      >>> import jaxdp
      >>> plan = jaxdp.plans.PrefixSum(
      ...     num_examples=1437, num_steps=22, sampling=jaxdp.sampling.SinglePass(64),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-5)
      >>> plan = plan.with_optimised_noise(num_buffers=2)  # doctest: +SKIP
    """
    validate.integer(num_buffers=num_buffers, at_most=3)
    changes: dict[str, Any] = {
        "prefix_noise": f"blt_{num_buffers}",
        "blt_numbers": None,
    }
    plan = dataclasses.replace(plan, **changes)  # Refuses what has no such noise.
    found = optimise_blt(
        plan.noise_period, num_buffers, getattr(plan.sums, "separation", None)
    )
    changes["blt_numbers"] = BLTNumbers(found.buf_decay, found.output_scale)
    return dataclasses.replace(plan, **changes)


@functools.cache
def optimise_blt(
    period: int, num_buffers: int, separation: int | None = None
) -> toeplitz_noise.Buffered:
    """Returns the buffered Toeplitz kernel of least worst variance at equal sensitivity.

    Its parameters are found by ``jax_privacy``, once for each pair of arguments; its norms
    are exact for these parameters, however good they are. The numbers that ship
    (``toeplitz_noise.blt``) are those for 16, 64, 256, 1024 and 4096 steps. With
    ``separation``, a record is read every so many steps of the period.

    Raises:
      ImportError: ``jax_privacy`` is not installed (the extra ``mf``).
      ValueError: ``num_buffers``, so many vectors of memory, is not from 1 to 10.
    """
    node_noise.check_period(period)
    if not 1 <= num_buffers <= MAX_BUFFERS:
        raise ValueError(
            f"num_buffers must be from 1 to {MAX_BUFFERS}, got {num_buffers}"
        )
    try:
        # An extra: pyright may not find it.
        from jax_privacy.matrix_factorization import (  # pyright: ignore[reportMissingImports]
            buffered_toeplitz,
        )
    except ImportError as error:
        raise ImportError(
            "optimise_blt needs jax_privacy: pip install 'jaxdp-optim[mf]'. "
            "The kernels blt_1, blt_2 and blt_3 ship with numbers and need nothing."
        ) from error
    with jax.enable_x64(True):
        found = buffered_toeplitz.optimize(
            n=period,
            error="max",
            min_buffers=num_buffers,
            max_buffers=num_buffers,
            min_sep=separation or 1,
            max_participations=1 if separation is None else -(-period // separation),
        )
        decay, scale = (np.asarray(x) for x in (found.buf_decay, found.output_scale))
    return toeplitz_noise.Buffered(
        period, tuple(map(float, decay)), tuple(map(float, scale))
    )
