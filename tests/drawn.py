"""The integers that a run must draw, from its plan's public numbers and its keys.

Written apart from the transformations: standard deviations come from the noise multiplier,
the clip and the relation, keys from :mod:`jaxdp.core.keys`, and integers from the
sampler. What a run releases on data without signal is compared with these, number by
number, so that noise of another key, step, law or scale is seen, however close it is.
"""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import Keys, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.kernels import lattice_gaussian, threefry
from jaxdp.kernels.fixed_point import Fixed

#: What correlated noise and a search's noise have more than their multiplier asks for.
MORE = 1 + 5e-6


def moves(plan: Any) -> int:
    """By how many clips one record moves a sum."""
    return 2 if plan.relation == "replace_one" else 1


def noise_of_sum(plan: Any) -> float:
    """Standard deviation of a sum's noise over what a record moves the sum by.

    Sum and count of clip tuning share a step's budget: ``m**-2`` is the sum of theirs.
    """
    tuning = getattr(plan, "clip_tuning", None)
    if tuning is None:
        return plan.noise_multiplier
    return (plan.noise_multiplier**-2 - tuning.count_noise_multiplier**-2) ** -0.5


def bits_of_sum(plan: Any) -> int:
    """The finest grid on which all records and eight deviations stay below 2**31."""
    largest = noise_of_sum(plan)
    if getattr(plan, "clip_tuning", None) is not None:
        largest = max(largest, plan.clip_tuning.count_noise_multiplier)
    most = plan.sampling.rows(plan.num_examples) + 8 * largest * moves(plan)
    return min(16, math.floor(math.log2((2**31 - 1) / most)))


def std_of_sum(plan: Any) -> int:
    """In units of the grid: of plans of one noised sum a step."""
    return whole(noise_of_sum(plan) * moves(plan) * 2 ** bits_of_sum(plan))


def whole(units: float) -> int:
    """The least deviation of integers that hides as much as normal noise of so many."""
    least = math.ceil(units)
    return least + (least**2 < Fraction(units) ** 2 + 4)


def unit_of_sum(plan: Any) -> float:
    """What one unit of the grid is in a release of :class:`SumPlan`\\ s."""
    bits, sampler = bits_of_sum(plan), plan.sampling
    mean = sampler.expected_batch_size(plan.num_examples)
    return plan.l2_clip_norm / (2**bits * mean)


def root(plan: Any, keys: Keys, role: str = "noise") -> jax.Array:
    """The key of a role's noise under this plan."""
    return keys_lib.stream(keys.noise, role, context=int(plan.digest[:8], 16))


def correlated_root(plan: Any, keys: Keys) -> jax.Array:
    """The key of correlated noise, into which periods are folded: four words again."""
    return threefry.settled(root(plan, keys))


def integers(key: jax.Array, std: int, size: int) -> np.ndarray:
    """What a key gives, int64 (size,)."""
    drawn = lattice_gaussian.draw(key, (size,), lattice_gaussian.law(std))
    return np.asarray(drawn, np.int64)


def sums(plan: Any, keys: Keys, size: int, steps: int | None = None) -> np.ndarray:
    """The noise of every step's sum, int64 (T, size)."""
    key, law = root(plan, keys), lattice_gaussian.law(std_of_sum(plan))
    each = jax.vmap(
        lambda t: lattice_gaussian.draw(keys_lib.at_step(key, t), (size,), law)
    )
    steps = plan.num_steps if steps is None else steps
    return np.asarray(jax.jit(each)(jnp.arange(steps)), np.int64)


def counts(plan: Any, keys: Keys) -> np.ndarray:
    """The noise of clip tuning's counts, int64 (T,): units are 2**-bits of a half."""
    noise = plan.clip_tuning.count_noise_multiplier * moves(plan)
    law = lattice_gaussian.law(whole(noise * 2 ** bits_of_sum(plan)))
    key = root(plan, keys)

    def one(t: jax.Array) -> jax.Array:
        own = keys_lib.at_step(keys_lib.at_step(key, t), 1)
        return lattice_gaussian.draw(own, (1,), law)[0]

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(plan.num_steps)), np.int64)


def unit_of_means(plan: Any) -> float:
    """The unit of correlated noise, which all phases share, in what is released.

    The finest for which the largest step's records and its noise stay below 2**31: eight
    deviations of it, or sixteen where the noise is multiplied.
    """
    each = {name: bound / size for name, (bound, size) in plan.clips.items()}
    deviations = 8 if plan.correlation.integral else 16
    noise = deviations * node_std(plan) * plan.correlation.largest_norm()
    rows = {phase.name: phase.batch_size for phase in plan.phases}
    most = max(rows[name] * move + noise for name, move in each.items())
    least = min(each.values())
    bits = min(16, math.floor(math.log2((2**31 - 1) / (most / least))))
    return least * 2.0**-bits


def node_std(plan: Any) -> float:
    """Of a node of a period's noise, in what is released: one record in one step.

    The multiplier times the longest column of C, each times what a record moves the mean
    of its step by. Where a period has several passes, of the longest sum of a record's
    columns.
    """
    phases = [phase.name for phase in plan.phases for _ in range(phase.num_steps)]
    period = plan.correlation.period
    leaves = [
        moves(plan) * plan.clips[phases[t % len(phases)]][0] / _size(plan, phases, t)
        for t in range(period)
    ]
    matrix = plan.correlation.strategy()
    if isinstance(plan.sampling, sampling.CyclicEpochs):
        apart = plan.num_examples // plan.sampling.batch_size
        matrix = sum(
            np.roll(matrix, -k, axis=1) * (np.arange(period) + k < period)
            for k in range(0, period, apart)
        )
    columns = np.linalg.norm(matrix, axis=0)
    return noise_of_sum(plan) * float(np.max(np.array(leaves) * columns))


def _size(plan: Any, phases: list[str], t: int) -> float:
    return plan.clips[phases[t % len(phases)]][1]


def std_of_node(plan: Any) -> int:
    """In units of the noise. Independent noise is not rounded, and has no more for it."""
    more = 1.0 if plan.prefix_noise == "independent" else MORE
    return whole(node_std(plan) / unit_of_means(plan) * more)


def increments(
    kernel: Any, key: jax.Array, std: int, size: int, steps: int
) -> np.ndarray:
    """The correlated noise of the first steps of a period, float64 (steps, size).

    Args:
      kernel: of the plan: what it makes of its draws is tested beside it.
      key: of the period.
      std: of a node, in units.
      size: numbers of a step.
      steps: how many.
    """
    like, laws = jax.ShapeDtypeStruct((size,), jnp.float32), kernel.laws(std)

    def one(state: Any, t: jax.Array) -> tuple[Any, Fixed]:
        noise, state = kernel.increment(key, state, t, like, laws)
        return state, noise

    scan = jax.jit(lambda: jax.lax.scan(one, kernel.init(like), jnp.arange(steps))[1])
    drawn = scan()
    whole = np.asarray(drawn.high, np.float64)
    return whole if drawn.low is None else whole + np.asarray(drawn.low) * 2.0**-32


def in_units(released: Any, unit: float) -> np.ndarray:
    """Releases as the integers that they are, int64: nothing lies beside the grid."""
    found = np.asarray(released, np.float64) / unit
    # A float32 holds every integer below 2**24; the unit's rounding moves it by less.
    assert np.abs(found).max() < 2**22
    np.testing.assert_allclose(found, np.rint(found), rtol=0, atol=0.4)
    return np.rint(found).astype(np.int64)
