"""Oracles of O2NC: each releases an estimate of a gradient, or of its change.

What is released at a step is the increment of a running estimate: the mean of clipped
per-record vectors (GRAD where a period begins, DIFF elsewhere; of values, or of gradients),
plus noise. One record moves the sum of a step that reads it by at most the phase's
``l2_clip_norm`` in L2 (twice that if replaced), enforced on integers; what the noise's
correlation and further steps make of it is in the plan's ``sensitivity``.

==================  ==============================  =================================
oracle              one record's contribution       reads
==================  ==============================  =================================
``"zeroth_order"``  slopes times directions         values, at points of the sphere
``"first_order"``   mean gradient                   gradients, at points of the ball
``"scalar"``        slopes, released as such        values; directions are common
==================  ==============================  =================================

A row of :data:`ORACLES` is everything that the library need know of an oracle but two
things: its errors, in :mod:`jaxdp.o2nc.theory.estimators`, and the command's recipes.

The sum that the noise is added to holds this step's records alone: no un-noised running
estimate exists anywhere.

Plans that tune their clips also release at restarts how many records lie within the clip,
each of them counted as a half for or against. Both clips move by one factor, from one
restart to the next, and their noise with them: over its clip, a step's noise stays.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import release
from jaxdp.core.correlated_noise import CorrelatedNumbers
from jaxdp.core.types import Grid, PathPredicate, ValueFn
from jaxdp.kernels import finite_difference, parts, smoothed_gradient, sphere
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.kernels.fixed_point import Fixed
from jaxdp.mechanism.clip_tuning import ClipTuning

Name = Literal["zeroth_order", "first_order", "scalar"]
Direction = Literal["orthonormal", "sphere", "ball"]
Difference = Literal["antithetic", "one_sided", "independent", "common"]


class IncrementNumbers(NamedTuple):
    """Frozen numbers of a plan that the oracles read."""

    noise: CorrelatedNumbers
    count_grid: Grid | None  # of clip tuning's counts
    clip_tuning: ClipTuning | None
    oracle: Name
    max_step: float
    scale_with_movement: bool
    smoothing_radius: float
    num_directions: int
    direction: str
    difference: str
    share_directions: bool

    def grid(self, phase: str, restart_clip: jax.Array | None) -> Grid:
        """Returns the grid of a phase, of the plan or of another clip at restarts.

        Its noise is in units of the clip, so that both are multiplied by one factor.
        """
        grid = self.noise.grids[phase]
        if restart_clip is None:
            return grid
        factor = restart_clip / np.float32(self.noise.grids["restart"].l2_clip_norm)
        # With scale_with_movement the bound is a share of the clip: a higher floor.
        least = 1e-22 if self.scale_with_movement else 1e-30
        bound = jnp.clip(
            grid.l2_clip_norm * factor, np.float32(least), np.float32(1e30)
        )
        return grid._replace(l2_clip_norm=bound)


class Question(NamedTuple):
    """Query of a batch: GRAD at one point, or DIFF of two."""

    numbers: IncrementNumbers
    value_fn: ValueFn
    points: tuple[Any, ...]
    place: tuple[Any, jax.Array, jax.Array]  # records, their places, and the key
    draw: Callable[..., sphere.Direction]  # the directions of a key
    moves: PathPredicate
    apart: parts.Apart  # leaves that stay apart

    def vectors(
        self, grad: Callable[..., Any], diff: Callable[..., Any], **options: Any
    ) -> Any:
        """Computes vectors (B, d) by the kernel for one point, or by that for two.

        They are ``kernels.parts.Parts`` where leaves stay apart.
        """
        options["smoothing_radius"], kernel = self.numbers.smoothing_radius, grad
        if len(self.points) > 1:
            options["kind"], kernel = self.numbers.difference, diff
        found = kernel(self.value_fn, *self.points, *self.place, self.draw, **options)
        return parts.split(found, self.moves, self.apart)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle:
    """Question that an oracle asks of a record, and form of its release.

    Attributes:
      asks: the question, in words.
      rows: computes the estimate of every record, a row each; not bounded.
      directions: laws of the directions; the first is the default.
      differences: ways to estimate a change; the first is the default.
      proportional: those whose proven bound is proportional to the distance of the points.
      shares: whether the records of a batch share their directions; None leaves it open.
      gradients: whether losses are differentiated, which a restart does once.
      slopes: whether numbers along shared directions are released, not vectors: then
        every step is a restart, for numbers of other directions do not add up.
    """

    asks: str
    rows: Callable[[Question], Any]
    directions: tuple[Direction, ...] = ("orthonormal", "sphere")
    differences: tuple[Difference, ...] = ("antithetic", "one_sided", "independent")
    proportional: tuple[Difference, ...] = ()
    shares: bool | None = None
    gradients: bool = False
    slopes: bool = False

    def check_shares(self, name: Name, share_directions: bool) -> None:
        """Checks that records share their directions if they must, and not if not."""
        if self.shares in (None, share_directions):
            return
        batch = "slopes are added over the records of a batch"
        raise ValueError(
            f"share_directions must be {self.shares} with oracle={name!r}, got "
            f"{share_directions}: "
            + (batch if self.shares else "every record has points of its own")
        )


def release_size(
    numbers: IncrementNumbers, params: Any, moves: PathPredicate, apart: parts.Apart
) -> Any:
    """Returns the number of values that a step releases, or their sections, of vectors."""
    if ORACLES[numbers.oracle].slopes:
        return numbers.num_directions
    return parts.sections(params, moves, apart)


def release_increment(
    numbers: IncrementNumbers,
    value_fn: ValueFn,
    params: Any,
    previous: Any,
    records: Any,
    places: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    noise: Any,
    *,
    phase: str,
    moves: PathPredicate,
    apart: parts.Apart = parts.NONE,
    stacked: PathPredicate | None = None,
    restart_clip: jax.Array | None = None,
    count_noise: Fixed | None = None,
    microbatch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> tuple[Any, jax.Array]:
    """Releases (sum of clipped vectors + noise) / normalizer, and a count.

    Args:
      numbers: estimators, and the grid of each phase.
      value_fn: per-record losses.
      params: where the gradient is wanted.
      previous: where it was released last; read in differences, of which bound and noise
        may be proportional to the distance of the two.
      records: pytree with leading axis B.
      places: uint32 (B,), names of the records' own directions: what a record's are must
        not depend on which others are in the batch.
      mask: bool (B,); a False row contributes zero.
      key: of the step's directions; public.
      noise: ``Fixed`` (:func:`release_size`,), in units of the phase's noise, or a tree
        like the vectors; secret.
      phase: ``"restart"`` (GRAD) or ``"difference"`` (DIFF); static.
      moves: which leaves move; they have d elements.
      apart: leaves that stay apart, as in ``kernels.parts``.
      stacked: leaves whose first axis counts layers.
      restart_clip: shape=(), public; None where the plan does not tune it.
      count_noise: (1,), of the count of records within the clip; secret. None where it is
        not released.
      microbatch_size: records evaluated at once. Changes neither bound nor noise.
      axis_name: mesh axis whose devices share the records, as in
        :func:`jaxdp.dpzero.oracle.release_slopes`.

    Returns:
      float32 (d,), or ``kernels.parts.Parts``: released; or, of slopes, a function of
      what is. And float32 (1,), the noised count over the normalizer, or (0,) without one.
    """
    grid, oracle = numbers.grid(phase, restart_clip), ORACLES[numbers.oracle]
    count_grid = None if count_noise is None else numbers.count_grid
    if numbers.scale_with_movement and phase == "difference":
        moved = jax.tree.map(
            lambda x, y: jnp.asarray(x, jnp.float32) - jnp.asarray(y, jnp.float32),
            params,
            previous,
        )
        distance = optax.tree.norm(_vector(moved, moves, apart))
        share = distance / (2 * numbers.max_step)
        # All of the bound at most, and never nothing, which has no grid.
        share = jnp.clip(share, 2.0**-20, 1)
        grid = grid._replace(l2_clip_norm=grid.l2_clip_norm * share)
    params, previous, places = (
        finite_difference.on_each(tree, axis_name)
        for tree in (params, previous, places)
    )

    points = (params,) if phase == "restart" else (params, previous)
    draw = _drawer(numbers, params, moves, stacked)

    def total(part: tuple[Any, jax.Array]) -> Any:
        (some, places), kept = part
        place = (some, places, key)
        asked = Question(numbers, value_fn, points, place, draw, moves, apart)
        rows = oracle.rows(asked)
        if count_grid is not None:
            return release.counted_sum(grid, count_grid, rows, kept)
        return release.bounded_sum(grid, rows, kept)

    summed = finite_difference.sum_microbatches(
        total, ((records, places), mask), microbatch_size, axis_name
    )
    count = jnp.zeros((0,), jnp.float32)
    if count_grid is not None:
        summed, counted = summed
        count = release.noised_mean(count_grid, counted, count_noise)
    released = release.noised_mean(grid, summed, noise)
    if not oracle.slopes:
        return released, count
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), params
    )
    combined = finite_difference.combine(released, draw(key), like)
    return _vector(combined, moves, apart), count


def _drawer(
    numbers: IncrementNumbers,
    params: Any,
    moves: PathPredicate,
    stacked: PathPredicate | None,
) -> Callable[..., sphere.Direction]:
    def draw(key: jax.Array, num: int = numbers.num_directions) -> sphere.Direction:
        return sphere.directions(
            key,
            params,
            law=numbers.direction,
            num=num,
            trainable=moves,
            stacked=stacked,
        )

    return draw


def estimates(
    numbers: IncrementNumbers,
    value_fn: ValueFn,
    params: Any,
    records: Any,
    key: jax.Array,
    moves: PathPredicate,
    stacked: PathPredicate | None = None,
) -> jax.Array:
    """Computes the estimate of every record at one point: neither bounded nor private.

    Arguments are as of :func:`release_increment`. Returns (B, d), or (B, m) slopes.
    """
    places = jnp.arange(finite_difference.num_rows(records), dtype=jnp.uint32)
    draw = _drawer(numbers, params, moves, stacked)
    place = (records, places, key)
    asked = Question(numbers, value_fn, (params,), place, draw, moves, parts.NONE)
    return ORACLES[numbers.oracle].rows(asked)


def _vector(tree: Any, moves: PathPredicate, apart: parts.Apart) -> Any:
    rows = parts.split(jax.tree.map(lambda x: x[None], tree), moves, apart)
    return jax.tree.map(lambda x: x[0], rows)


# --- estimates of every record, and the oracles that release them ----------------------


def _of_values(asked: Question) -> jax.Array:
    return asked.vectors(
        smoothed_gradient.gradients,
        smoothed_gradient.differences,
        share=asked.numbers.share_directions,
    )


def _of_gradients(asked: Question) -> jax.Array:
    if len(asked.points) == 1:  # One gradient of each record.
        asked = asked._replace(draw=functools.partial(asked.draw, num=1))
    return asked.vectors(
        smoothed_gradient.ball_gradients,
        smoothed_gradient.ball_differences,
        moves=asked.moves,
    )


def _slopes(asked: Question) -> jax.Array:
    """Computes slopes (B, m) along the step's directions."""
    records, _, key = asked.place
    along = asked.draw(key)
    radius = smoothed_gradient.scale(asked.numbers.smoothing_radius, along.dim)
    return finite_difference.slopes(
        asked.value_fn, asked.points[0], records, along, smoothing_radius=radius
    )


ORACLES: dict[Name, Oracle] = {
    "zeroth_order": Oracle(
        asks="values, released as vectors",
        rows=_of_values,
        proportional=("antithetic", "one_sided"),
    ),
    "first_order": Oracle(
        asks="gradients",
        rows=_of_gradients,
        directions=("ball",),
        differences=("common", "independent"),
        shares=False,
        gradients=True,
    ),
    "scalar": Oracle(
        asks="values, as shared slopes", rows=_slopes, shares=True, slopes=True
    ),
}
DEFAULT: Name = "zeroth_order"
