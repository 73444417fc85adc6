r"""Recommendation of a plan for a game, or for a convex problem over a simplex.

Errors are predicted by rehearsal on public records (:mod:`jaxdp.planner.rehearsals`): a
candidate runs on them with the noise that it will have on the private ones, several times,
and what it gets is judged on the same records. The duality gap is the error of two players,
the loss above the least one that of a single player.

* Numbers are those of a grid, whose best point is found by moves along one axis at a time,
  the coarse ones first: of steps, clips, and of draws or step sizes.
* Clips are multiples of the median of what public records contribute at the start.
* Step sizes of draws are the longest that the budget admits, which are the shorter the more
  is drawn; those of DP-SGDA are multiples of
  :math:`\sqrt{2/T}/\sqrt{c^2+d\sigma^2}`, of theory, with c the clip and :math:`\sigma` the
  noise on a coordinate.

A draw from the softmax of scores :math:`-\tau g` is the least of :math:`g_v` plus Gumbel
noise of scale :math:`1/\tau`, whose deviation is :math:`\pi/(\sqrt6\,\tau)`: so the noise
of draws and of sums can be compared.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import plans, sampling
from jaxdp.core.keys import Keys
from jaxdp.kernels.polytope import Polytope, Simplex
from jaxdp.planner import claims, gradients, rehearsals
from jaxdp.planner.results import PlannedGame, spread
from jaxdp.saddle.descent_ascent import descent_ascent
from jaxdp.saddle.oracles.matrix_game import MatrixGame
from jaxdp.saddle.oracles.sums import VertexGradients, middle, vertex_rows
from jaxdp.saddle.theory import levels

#: Rehearsals of a candidate, and records that stand for all.
_SEEDS, _RECORDS = 8, 256
#: Candidates of a method that other seeds decide among.
_FINAL = 8
#: Clips over the median of what records contribute.
_CLIPS = (gradients.CLIP, 1.0, 3.0, 10.0, 30.0)
#: Draws of each player in a step.
_DRAWS = (1, 4, 16, 64, rehearsals.MOST_DRAWS)
#: Step sizes of DP-SGDA over those of theory.
_RATES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
#: The most steps of one pass, and the largest budget of vertices.
_MOST_STEPS, _MOST_VERTICES = 4096, 8192
#: The most gradients of each record.
_MOST_GRADIENTS = 80
#: What candidates are ranked by.
ERROR = "predicted error"
#: Deviation of Gumbel noise over its scale.
_GUMBEL = math.pi / math.sqrt(6)
#: Whose mean stands for a point of a run.
_VERTICES = 8
#: Width and steps of the search for a best answer.
_TOLERANCE, _ANSWER_STEPS = 1e-3, 500
#: Student's quantile of a mean of the rehearsals.
_STUDENT = 2.36


class _Trial(NamedTuple):
    """A plan with all its numbers, and the errors of its rehearsals."""

    plan: Any
    errors: np.ndarray  # (seeds,)
    again: Callable[[int], np.ndarray]  # errors of other seeds
    num_gradients: float
    optimizer: Any = None
    learning_rate: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Players:
    """A problem with public records, and the budget of a run on n private ones."""

    game: rehearsals.Game
    budget: dict[str, Any]
    shared: dict[str, Any]  # num_examples and relation
    most: float  # gradients of each record

    @property
    def num_examples(self) -> int:
        return self.shared["num_examples"]

    def gradients(self, points: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Computes the finite gradients of records by each of the points, (B, p) each."""
        rows, ok = rehearsals.gradients(self.game.problem, points, self.game.records)
        return [part[ok] for part in rows]

    @functools.cached_property
    def half_ranges(self) -> list[float]:
        """The median half range of the vertex gradients, of each player.

        At the start; where nothing varies there, at the mean of a few vertices.
        """
        start = self.game.start
        at_start = [_half_ranges(self, i, start) for i in range(len(start))]
        if all(at_start):
            return at_start
        rng = np.random.default_rng(0)
        some = [
            np.bincount(rng.integers(m, size=_VERTICES), minlength=m) / _VERTICES
            for m in self.game.dims
        ]
        points = self.game.at([jnp.asarray(one, jnp.float32) for one in some])
        found = [
            size or _half_ranges(self, i, points) for i, size in enumerate(at_start)
        ]
        return [_positive(size) for size in found]

    def gradient_clip(self) -> float:
        """Computes a third of the median norm of the gradients by all points."""
        rows = jnp.concatenate(self.gradients(self.game.start), axis=1)
        return gradients.CLIP * gradients.median_norm(rows)

    def mean_loss(self, *points: jax.Array) -> jax.Array:
        """Computes the mean loss of the records; one that is not finite counts zero."""
        losses = self.game.problem(*points, self.game.records)
        ok = jnp.isfinite(losses)
        return jnp.sum(jnp.where(ok, losses, 0)) / jnp.maximum(jnp.sum(ok), 1)

    def error(self, *points: jax.Array) -> jax.Array:
        """Computes the gap on the records, or the loss of one player."""
        if len(points) == 1:
            return self.mean_loss(*points)
        from jaxdp.metrics.duality_gap import ends  # Brings scipy.

        (x, y), (over_x, over_y) = points, self.game.domains
        limits = _TOLERANCE, _ANSWER_STEPS
        low, high, below, above, *_ = ends(
            self.mean_loss, x, y, over_x, over_y, *limits
        )
        return (-below - low + jnp.maximum(-above - high, 0)) / 2

    @functools.cached_property
    def judged(self) -> Callable[..., jax.Array]:
        """Errors of several runs, (seeds,), compiled."""
        return jax.jit(jax.vmap(self.error))

    def least(self) -> float:
        """Computes the least loss of a single player; 0 of two, whose gap has it."""
        if len(self.game.start) == 2:
            return 0.0
        from jaxdp.metrics.duality_gap import duality_gap  # Brings scipy.

        found = duality_gap(
            lambda x, y: self.mean_loss(x) * y[0],
            self.game.start[0],
            jnp.ones(1),
            domain_x=self.game.domains[0],
            tolerance=_TOLERANCE,
        )
        return float(self.mean_loss(*self.game.start)) - found.value


def players(
    problem: VertexGradients,
    params: Any,
    records: Any,
    budget: dict[str, Any],
    shared: dict[str, Any],
    num_passes: float | None,
) -> Players:
    """Checks a problem with its points and returns it with 256 of the records."""
    points = tuple(params) if isinstance(params, tuple | list) else (params,)
    domains = (problem.domain_x, problem.domain_y)
    fits = len(points) in (1, 2) and all(
        jnp.ndim(at) == 1 and (domain is None or len(at) == domain.dim)
        for at, domain in zip(points, domains, strict=False)
    )
    if not fits:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
        raise ValueError(
            "params must be a point (p,) of the problem's domain, or a pair of the two "
            f"players' points, got shapes {shapes}"
        )
    if not _takes(problem, points, records):
        wanted = "one point, as the problem has one player"
        if len(points) == 1:
            wanted = "a pair of points, (x, y), as the problem has two players"
        raise ValueError(f"params must be {wanted}, got {len(points)} point(s)")
    most = _MOST_GRADIENTS if num_passes is None else num_passes / 3
    if most < 1:
        raise ValueError(
            "num_passes must be at least 3, which a gradient of each record takes, got "
            f"{num_passes!r}"
        )
    points = tuple(jnp.asarray(at, jnp.float32) for at in points)
    domains = tuple(
        Simplex(len(at)) if one is None else one
        for at, one in zip(points, domains, strict=False)
    )
    game = rehearsals.Game(problem, spread(records, _RECORDS), domains, points)
    return Players(game, budget, shared, most)


def _takes(problem: Any, points: tuple[Any, ...], records: Any) -> bool:
    """Returns True if the problem is one of so many players."""
    losses = inspect.signature(getattr(problem, "value_fn", problem._values))
    try:
        losses.bind(*points, records)
    except TypeError:
        return False
    return True


def _half_ranges(of: Players, i: int, points: tuple[jax.Array, ...]) -> float:
    """Computes the median half range of a player's vertex gradients."""
    domain, rows = of.game.domains[i], of.gradients(points)[i]
    rows, _ = vertex_rows(domain, rows, jnp.ones(len(rows), bool))
    return _median(jnp.max(jnp.abs(rows - middle(domain, rows)), axis=1))


def _median(sizes: jax.Array) -> float:
    return float(jnp.median(sizes)) if sizes.size else 0.0


def _positive(size: float) -> float:
    if not size > 0:
        raise ValueError(
            "records must have finite gradients that are not all equal at params; the "
            f"median of what they contribute is {size:.3g}"
        )
    return size


# --- rehearsals --------------------------------------------------------------------


def _rehearsals(of: Players, run: Callable[..., Any]) -> Callable[..., _Trial]:
    """Returns the function that rehearses plans of a method, by one program."""
    points = jax.jit(jax.vmap(functools.partial(run, of.game), (None, 0)))

    def trial(plan: Any, numbers: Any, num_gradients: float, **made: Any) -> _Trial:
        def errors(seed: int) -> np.ndarray:
            seeds = range(seed * _SEEDS, (seed + 1) * _SEEDS)
            keys = jnp.stack([Keys.insecure(i).direction for i in seeds])
            found = np.asarray(of.judged(*points(numbers, keys)), np.float64)
            return np.nan_to_num(found, nan=np.inf)

        return _Trial(plan, errors(0), errors, num_gradients, **made)

    return trial


def _noise(plan: Any) -> float:
    """Returns the deviation of what privacy adds to a coordinate of the mean gradient."""
    if plan.family == "dpgd":
        return plan.noise_std / math.sqrt(plan.num_steps)
    # Scores are sums over the steps, but for a draw that sees one mean alone.
    sums = 1 if plan.family == "frank_wolfe" else plan.num_steps
    return _GUMBEL / (min(plan.step_sizes) * sums)


def usual_step(of: Players, plan: Any) -> float:
    """Returns the step size of theory for a ``DPGD`` of both players."""
    dim = sum(map(len, of.game.start))
    longest = math.hypot(plan.l2_clip_norm, math.sqrt(dim) * plan.noise_std)
    return math.sqrt(2 / plan.num_steps) / longest


def _searched(trial: Callable[..., _Trial], *axes: Sequence[Any]) -> _Trial:
    """Finds the best point of a grid whose first axis is the number of steps.

    By moves along an axis, or the first one and back along the last, as long as the mean
    error falls: from the best point of a coarser grid, and of another number of steps.
    """
    tried: dict[tuple[int, ...], _Trial] = {}
    last = [len(axis) - 1 for axis in axes]

    def error(place: tuple[int, ...]) -> float:
        if place not in tried:
            tried[place] = trial(
                *(axis[i] for axis, i in zip(axes, place, strict=True))
            )
        return float(tried[place].errors.mean())

    # The more steps, the shorter they are best, and the fewer draws the budget admits.
    ways = [*np.eye(len(axes), dtype=int), np.eye(len(axes), dtype=int)[0]]
    ways[-1][-1] = -1

    def improved(best: tuple[int, ...]) -> None:
        for stride in (2, 1):
            left = moves = [by * way for way in ways for by in (stride, -stride)]
            while left:
                move, *left = left
                other = tuple(np.clip(np.add(best, move), 0, last).tolist())
                if error(other) < error(best):
                    best, left = other, [move, *moves]

    steps = sorted({min(i, last[0]) for i in (0, 2, 4, 6)})
    coarse = itertools.product(steps, *(range(0, end + 1, 2) for end in last[1:]))
    starts = sorted(coarse, key=error)
    first = {place[0]: place for place in reversed(starts)}  # The best of each.
    for place in sorted(first.values(), key=error)[:2]:
        improved(place)
    # The least of many means is low by chance: other seeds decide among the best few.
    few = sorted(tried.values(), key=lambda one: one.errors.mean())[:_FINAL]
    return min(few, key=lambda one: one.errors.mean() + one.again(1).mean())


def _halved(most: int) -> list[int]:
    """Returns ``most``, its half and so on, down to 1, the least first."""
    return [most >> i for i in reversed(range(most.bit_length()))]


# --- candidates --------------------------------------------------------------------


def candidates(of: Players) -> Iterator[PlannedGame]:
    """Plans of every family that the problem admits, each at its best rehearsal."""
    single = len(of.game.start) == 1
    kinds = (_CONVEX if single else _GAMES).items()
    for kind, make in kinds:
        found = make(of)
        if found is not None:
            yield _planned(of, found, kind)


def _memory(of: Players, plan: Any) -> int:
    """Counts the bytes of a step's gradients, and of scores where vertices are drawn."""
    count = _rows(plan)
    if plan.family == "dpgd":
        return 4 * count * sum(map(len, of.game.start))
    return 4 * (count + 1) * sum(of.game.dims)


def _planned(of: Players, found: _Trial, name: str) -> PlannedGame:
    errors = found.again(2) - of.least()
    spread = float(np.std(errors, ddof=1)) / math.sqrt(len(errors))
    pair = len(of.game.start) == 2
    start = of.game.start if found.optimizer is not None else found.plan.uniform()
    return PlannedGame(
        name=name,
        plan=found.plan,
        optimizer=found.optimizer,
        learning_rate=found.learning_rate,
        start=start,
        num_passes=3 * found.num_gradients,
        noise=_noise(found.plan),
        error=max(float(errors.mean()), 0.0),
        half_width=_STUDENT * spread,
        points=lambda weights: _of_one(of.game.at(weights if pair else (weights,))),
        memory=_memory(of, found.plan),
        **claims.PLAYERS[name]._asdict(),
    )


def _of_one(points: tuple[jax.Array, ...]) -> Any:
    (first, *more) = points
    return points if more else first


def _steps(of: Players, num_steps: int, whole: bool = False) -> dict[str, Any]:
    """Returns fields of a plan of full batches, or that reads each record once."""
    once = sampling.SinglePass(of.num_examples // num_steps)
    sampler = sampling.FullBatch() if whole else once
    return {"num_steps": num_steps, "sampling": sampler, **of.shared}


def _counts(of: Players, whole: bool = False) -> list[int]:
    """Returns the numbers of steps that are tried, the least first."""
    most = math.floor(of.most) if whole else min(of.num_examples, _MOST_STEPS)
    return _halved(most)


def _game(of: Players, kind: Any, clip: float, **fields: Any) -> Any:
    sizes = [clip * size for size in of.half_ranges]
    plan = kind(
        dim_x=of.game.dims[0],
        dim_y=of.game.dims[1],
        linf_clip_norm_x=sizes[0],
        linf_clip_norm_y=sizes[1],
        center_gradients=True,
        **fields,
    )
    return plan.calibrate(**of.budget)


def _saddle(of: Players) -> _Trial | None:
    rehearsed = _rehearsals(of, rehearsals.mirror)

    def trial(count: int, clip: float, draws: int) -> _Trial:
        fields = {"num_draws": draws, "output": "mean", **_steps(of, count)}
        plan = _game(of, plans.Saddle, clip, **fields)
        numbers = rehearsals.Mirror(
            count,
            plan.step_sizes,
            plan.clips,
            levels=np.zeros(1, int),
            batch_sizes=np.array([plan.batch_size]),
            num_draws=np.array([[draws]]),
            factors=np.array([[1.0]]),
            outputs=np.array([[0, draws]]),
        )
        return rehearsed(plan, numbers, 1)

    return _searched(trial, _counts(of), _CLIPS, _DRAWS)


def _bias_reduced(of: Players) -> _Trial | None:
    if isinstance(of.game.problem, MatrixGame):
        return None  # Its gradients have no bias.
    rehearsed = _rehearsals(of, rehearsals.mirror)
    most = min(max(1, of.num_examples // 4), _MOST_VERTICES)
    highest = levels.largest_level(most)

    def padded(rows: Any, size: int = highest + 1) -> np.ndarray:
        rows = np.array(rows)
        return np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])

    def trial(budget: int, clip: float) -> _Trial:
        fields = {"vertex_budget": budget, "level_seed": 0, **of.shared}
        plan = _game(of, plans.SaddleBiasReduced, clip, **fields)
        drawn = 2 ** np.arange(1, len(plan.batch_sizes) + 1)
        ones = np.ones_like(drawn)
        factor = levels.normalizer(len(drawn) - 1) * drawn / 2
        numbers = rehearsals.Mirror(
            plan.num_steps,
            plan.step_sizes,
            plan.clips,
            levels=padded(plan.levels, most),
            batch_sizes=padded(plan.batch_sizes),
            num_draws=padded(np.stack([drawn, drawn // 2, ones], axis=1)),
            factors=padded(np.stack([factor, -factor, ones], axis=1)),
            outputs=padded(np.stack([drawn, drawn], axis=1)),
        )
        return rehearsed(plan, numbers, 3)

    return _searched(trial, _halved(most), _CLIPS)


def _sgda(of: Players, whole: bool) -> _Trial | None:
    if any(isinstance(domain, Polytope) for domain in of.game.domains):
        return None  # Nothing projects on one.
    if whole and of.most < 2:
        return None
    x, y = of.game.domains

    def optimizer(rate: Any) -> Any:
        return descent_ascent(rate, rate, domain_x=x, domain_y=y)

    def run(game: Any, numbers: Any, key: Any) -> Any:
        return rehearsals.descent_ascent(game, optimizer, numbers, key)

    rehearsed, usual = _rehearsals(of, run), of.gradient_clip() / gradients.CLIP

    def trial(count: int, clip: float, factor: float) -> _Trial:
        fields = _steps(of, count, whole)
        plan = plans.DPGD(l2_clip_norm=clip * usual, **fields).calibrate(**of.budget)
        rate = factor * usual_step(of, plan)
        numbers = rehearsals.Descent(
            count, rate, plan.l2_clip_norm, _rows(plan), plan.noise_std
        )
        made = {"optimizer": optimizer(rate), "learning_rate": rate}
        return rehearsed(plan, numbers, _readings(plan), **made)

    return _searched(trial, _counts(of, whole), _CLIPS, _RATES)


def _rows(plan: Any) -> int:
    """Returns the records of a step."""
    return plan.sampling.rows(plan.num_examples)


def _readings(plan: Any) -> int:
    """Returns how often a plan reads each record."""
    return plan.num_steps if isinstance(plan.sampling, sampling.FullBatch) else 1


def _convex(of: Players) -> _Trial | None:
    log, rehearsed = math.log(of.game.dims[0]), _rehearsals(of, rehearsals.convex)

    def trial(count: int, clip: float) -> _Trial:
        draws = max(1, round(math.sqrt(count * log)))
        plan = plans.ConvexSimplex(
            dim=of.game.dims[0],
            linf_clip_norm=clip * of.half_ranges[0],
            num_draws=min(draws, rehearsals.MOST_DRAWS),
            refresh_every=max(1, round(math.sqrt(count / log))),
            center_gradients=True,
            **_steps(of, count),
        ).calibrate(**of.budget)
        numbers = rehearsals.Convex(
            count,
            plan.step_size,
            plan.linf_clip_norm,
            plan.batch_size,
            plan.num_draws,
            plan.refresh_every,
        )
        return rehearsed(plan, numbers, 1)

    return _searched(trial, _counts(of), _CLIPS)


def _frank_wolfe(of: Players, whole: bool) -> _Trial | None:
    if whole and of.most < 2:
        return None
    rehearsed = _rehearsals(of, rehearsals.frank_wolfe)

    def trial(count: int, clip: float) -> _Trial:
        plan = plans.FrankWolfe(
            dim=of.game.dims[0],
            linf_clip_norm=clip * of.half_ranges[0],
            center_gradients=True,
            **_steps(of, count, whole),
        ).calibrate(**of.budget)
        numbers = rehearsals.FrankWolfe(
            count, plan.inverse_temperature, plan.linf_clip_norm, _rows(plan)
        )
        return rehearsed(plan, numbers, _readings(plan))

    return _searched(trial, _counts(of, whole), _CLIPS)


_GAMES: dict[str, Callable[[Players], _Trial | None]] = {
    "Saddle": _saddle,
    "SaddleBiasReduced": _bias_reduced,
    "DP-SGDA, one pass": lambda of: _sgda(of, False),
    "DP-SGDA, full batches": lambda of: _sgda(of, True),
}
_CONVEX: dict[str, Callable[[Players], _Trial | None]] = {
    "ConvexSimplex": _convex,
    "FrankWolfe, one pass": lambda of: _frank_wolfe(of, False),
    "FrankWolfe, full batches": lambda of: _frank_wolfe(of, True),
}
