r"""Recommendation of a plan for a game, or for a convex problem over a simplex.

Errors are predicted by rehearsal on public records: a candidate runs on them with the
noise that it will have on the private ones, several times, and what it gets is judged on
the same records. The duality gap is the error of two players, the loss above the least one
that of a single player. Noise on a mean depends on the number of records by its size alone,
which is kept: so a few records stand for any number.

* Clips are shares of the median of what public records contribute at the start.
* Step sizes of draws are the longest that the budget admits; those of DP-SGDA are multiples
  of :math:`\sqrt{2/T}/\sqrt{c^2+d\sigma^2}`, of theory, with c the clip and
  :math:`\sigma` the noise on a coordinate.
* Steps double, or are halved, as long as the error falls.

A draw from the softmax of scores :math:`-\tau g` is the least of :math:`g_v` plus Gumbel
noise of scale :math:`1/\tau`, whose deviation is :math:`\pi/(\sqrt6\,\tau)`: so the noise
of draws and of sums can be compared.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import plans, sampling, training
from jaxdp.core.averaging import polyak_output
from jaxdp.core.keys import Keys
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.kernels.polytope import Polytope, Simplex
from jaxdp.planner import claims, gradients
from jaxdp.planner.results import PlannedGame, spread
from jaxdp.saddle.descent_ascent import descent_ascent
from jaxdp.saddle.oracles.linear_model import LinearModel
from jaxdp.saddle.oracles.matrix_game import MatrixGame
from jaxdp.saddle.oracles.sums import VertexGradients, middle, one_record, vertex_rows

#: Rehearsals of a candidate; records that stand for all; and records that one reads.
_SEEDS, _RECORDS, _ROWS = 8, 256, 2**15
#: Clips of draws over the median of what records contribute.
_CLIPS = (1.0, gradients.CLIP)
#: Step sizes of DP-SGDA over those of theory.
_RATES = (1.0, 3.0, 10.0, 30.0, 100.0)
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
    num_gradients: float
    noise: float
    optimizer: Any = None
    learning_rate: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Players:
    """A problem with public records, and the budget of a run on n private ones."""

    problem: VertexGradients
    points: tuple[jax.Array, ...]
    records: Any
    budget: dict[str, Any]
    shared: dict[str, Any]  # num_examples and relation
    most: float  # gradients of each record

    @property
    def num_examples(self) -> int:
        return self.shared["num_examples"]

    @property
    def domains(self) -> tuple[Any, ...]:
        """Polytopes of the players."""
        given = (self.problem.domain_x, self.problem.domain_y)
        pairs = zip(self.points, given, strict=False)
        return tuple(Simplex(len(at)) if one is None else one for at, one in pairs)

    @property
    def dims(self) -> list[int]:
        """Numbers of vertices."""
        return [domain.num_vertices for domain in self.domains]

    def gradients(self, points: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Computes the records' gradients by each of the points, (B, p) each."""

        def loss(points: Any, record: Any) -> jax.Array:
            return self.problem(*points, one_record(record))[0]

        rows = jax.vmap(jax.grad(loss), (None, 0))(points, self.records)
        ok = jnp.ones(num_rows(self.records), bool)
        for part in rows:
            ok = ok & jnp.isfinite(part).all(axis=1)
        return [part[ok] for part in rows]

    def half_ranges(self) -> list[float]:
        """Computes the median half range of the vertex gradients, of each player.

        At the start; where nothing varies there, at the mean of a few vertices.
        """
        at_start = [_half_ranges(self, i, self.points) for i in range(len(self.points))]
        if all(at_start):
            return at_start
        rng = np.random.default_rng(0)
        some = [
            np.bincount(rng.integers(m, size=_VERTICES), minlength=m) / _VERTICES
            for m in self.dims
        ]
        pairs = zip(self.domains, some, strict=True)
        points = tuple(
            domain.point(jnp.asarray(one, jnp.float32)) for domain, one in pairs
        )
        found = [
            size or _half_ranges(self, i, points) for i, size in enumerate(at_start)
        ]
        return [_positive(size) for size in found]

    def gradient_clip(self) -> float:
        """Computes a third of the median norm of the gradients by all points."""
        rows = jnp.concatenate(self.gradients(self.points), axis=1)
        return gradients.CLIP * gradients.median_norm(rows)

    def mean_loss(self, *points: jax.Array) -> jax.Array:
        """Computes the mean loss of the records; one that is not finite counts zero."""
        losses = self.problem(*points, self.records)
        ok = jnp.isfinite(losses)
        return jnp.sum(jnp.where(ok, losses, 0)) / jnp.maximum(jnp.sum(ok), 1)

    def error(self, *points: jax.Array) -> jax.Array:
        """Computes the gap on the records, or the loss of one player."""
        if len(points) == 1:
            return self.mean_loss(*points)
        from jaxdp.metrics.duality_gap import ends  # Brings scipy.

        (x, y), (over_x, over_y) = points, self.domains
        limits = _TOLERANCE, _ANSWER_STEPS
        low, high, below, above, *_ = ends(
            self.mean_loss, x, y, over_x, over_y, *limits
        )
        return (-below - low + jnp.maximum(-above - high, 0)) / 2

    @functools.cached_property
    def judged(self) -> Callable[..., jax.Array]:
        """The error, compiled."""
        return jax.jit(self.error)

    def least(self) -> float:
        """Computes the least loss of a single player; 0 of two, whose gap has it."""
        if len(self.points) == 2:
            return 0.0
        from jaxdp.metrics.duality_gap import duality_gap  # Brings scipy.

        found = duality_gap(
            lambda x, y: self.mean_loss(x) * y[0],
            self.points[0],
            jnp.ones(1),
            domain_x=self.domains[0],
            tolerance=_TOLERANCE,
        )
        return float(self.mean_loss(*self.points)) - found.value

    def at(self, weights: Any) -> tuple[jax.Array, ...]:
        """Returns points of weights of the vertices."""
        weights = (weights,) if len(self.points) == 1 else weights
        pairs = zip(self.domains, weights, strict=True)
        return tuple(domain.point(one) for domain, one in pairs)

    def rows(self, count: int) -> Any:
        """Returns the public records in turn, ``count`` of them."""
        where = np.arange(count) % num_rows(self.records)
        return jax.tree.map(lambda leaf: leaf[where], self.records)


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
    if len(points) == 2 and isinstance(problem, LinearModel):
        raise ValueError("params must be one point of a LinearModel, got a pair")
    few = spread(records, _RECORDS)
    points = tuple(jnp.asarray(at, jnp.float32) for at in points)
    most = _MOST_GRADIENTS if num_passes is None else num_passes / 3
    if most < 1:
        raise ValueError(
            "num_passes must be at least 3, which a gradient of each record takes, got "
            f"{num_passes!r}"
        )
    return Players(problem, points, few, budget, shared, most)


def _half_ranges(of: Players, i: int, points: tuple[jax.Array, ...]) -> float:
    """Computes the median half range of a player's vertex gradients."""
    domain, rows = of.domains[i], of.gradients(points)[i]
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


def _alone(of: Players, plan: Any) -> Any:
    """Returns the plan for a few public records, with the noise that it has for n.

    Step sizes of draws are of a mean, and so is the deviation of a sum over its batch.
    """
    public = num_rows(of.records)
    if plan.family == "dpgd":
        return dataclasses.replace(
            plan,
            num_examples=public,
            sampling=sampling.FullBatch(),
            noise_multiplier=plan.noise_multiplier * public / plan.normalizer,
            delta=None,
        )
    if "sampling" not in {field.name for field in dataclasses.fields(plan)}:
        count = min(of.num_examples, _ROWS)  # Batches of many sizes share them.
        return dataclasses.replace(plan, num_examples=count)
    if isinstance(plan.sampling, sampling.FullBatch):
        return dataclasses.replace(plan, num_examples=public)
    size = max(1, min(plan.batch_size, _ROWS // plan.num_steps))
    once = sampling.SinglePass(size)
    return dataclasses.replace(plan, num_examples=size * plan.num_steps, sampling=once)


def _drawn(of: Players, plan: Any, num_gradients: float) -> _Trial:
    """Rehearses a plan that draws vertices."""
    alone = _alone(of, plan)
    start, data = alone.uniform(), of.rows(alone.num_examples)
    errors = []
    for seed in range(_SEEDS):
        keys = Keys.insecure(seed)
        run = training.fit(
            alone, keys, start, data, value_fn=of.problem, check_isolation=False
        )
        errors.append(float(of.judged(*of.at(run.params))))
    # Scores are sums over the steps, but for a draw that sees one mean alone.
    sums = 1 if plan.family == "frank_wolfe" else plan.num_steps
    noise = _GUMBEL / (min(plan.step_sizes) * sums)
    return _Trial(plan, np.array(errors), num_gradients, noise)


def usual_step(of: Players, plan: Any) -> float:
    """Returns the step size of theory for a ``DPGD`` of both players."""
    dim = sum(map(len, of.points))
    longest = math.hypot(plan.l2_clip_norm, math.sqrt(dim) * plan.noise_std)
    return math.sqrt(2 / plan.num_steps) / longest


def _descended(of: Players, plan: Any, num_gradients: float) -> _Trial:
    """Rehearses DP-SGDA with several step sizes, and returns the best."""
    usual = usual_step(of, plan)

    def optimizer(rate: Any) -> Any:
        x, y = of.domains
        return descent_ascent(rate, rate, domain_x=x, domain_y=y)

    found = training.study(
        _alone(of, plan),
        of.points,
        of.records,
        value_fn=of.problem,
        score_fn=lambda run: -of.error(*polyak_output(run.info.state)),
        optimizer=optimizer,
        grid={"rate": [usual * factor for factor in _RATES]},
        seeds=_SEEDS,
        check_isolation=False,
    )
    i = int(np.argmax(np.nan_to_num(found.means, nan=-np.inf)))
    rate = found.settings[i]["rate"]
    noise = plan.noise_std / math.sqrt(plan.num_steps)
    return _Trial(plan, -found.scores[i], num_gradients, noise, optimizer(rate), rate)


def _climbed(trial: Callable[[int], _Trial], start: int, most: int) -> _Trial:
    """Doubles or halves a number of steps as long as the mean error falls."""
    start = max(1, min(start, most))
    best, found = start, trial(start)
    for factor in (2.0, 0.5):
        while (count := min(most, max(1, round(best * factor)))) != best:
            other = trial(count)
            if not other.errors.mean() < found.errors.mean():
                break
            best, found = count, other
        if best != start:
            break
    return found


# --- candidates --------------------------------------------------------------------


def candidates(of: Players) -> Iterator[PlannedGame]:
    """Plans of every family that the problem admits, each at its best rehearsal."""
    single = len(of.points) == 1
    kinds = (_CONVEX if single else _GAMES).items()
    for kind, make in kinds:
        found = make(of)
        if found is not None:
            yield _planned(of, found, kind)


def _memory(of: Players, plan: Any) -> int:
    """Counts the bytes of a step's gradients, and of scores where vertices are drawn."""
    count = plan.sampling.rows(plan.num_examples)
    if plan.family == "dpgd":
        return 4 * count * sum(map(len, of.points))
    return 4 * (count + 1) * sum(of.dims)


def _planned(of: Players, found: _Trial, name: str) -> PlannedGame:
    errors = found.errors - of.least()
    spread = float(np.std(errors, ddof=1)) / math.sqrt(len(errors))
    start = of.points if found.optimizer is not None else found.plan.uniform()
    return PlannedGame(
        name=name,
        plan=found.plan,
        optimizer=found.optimizer,
        learning_rate=found.learning_rate,
        start=start,
        num_passes=3 * found.num_gradients,
        noise=found.noise,
        error=max(float(errors.mean()), 0.0),
        half_width=_STUDENT * spread,
        points=lambda weights: _of_one(of.at(weights)),
        memory=_memory(of, found.plan),
        **claims.PLAYERS[name]._asdict(),
    )


def _of_one(points: tuple[jax.Array, ...]) -> Any:
    (first, *more) = points
    return points if more else first


def _once(of: Players, num_steps: int) -> dict[str, Any]:
    """Returns the fields of a plan that reads each record once."""
    sampler = sampling.SinglePass(of.num_examples // num_steps)
    return {"num_steps": num_steps, "sampling": sampler, **of.shared}


def _over_clips(trial: Callable[[float, int], _Trial], start: int, most: int) -> _Trial:
    """Climbs with the first clip, and from there with the next one if it is better."""
    found = _climbed(lambda count: trial(_CLIPS[0], count), start, most)
    if trial(_CLIPS[1], found.plan.num_steps).errors.mean() > found.errors.mean():
        return found
    return _climbed(lambda count: trial(_CLIPS[1], count), found.plan.num_steps, most)


def _root(of: Players) -> int:
    """Returns the power of two next to the root of the number of records."""
    return 2 ** round(math.log2(of.num_examples) / 2)


def _game(of: Players, kind: Any, clip: float, **fields: Any) -> Any:
    sizes = [clip * size for size in of.half_ranges()]
    plan = kind(
        dim_x=of.dims[0],
        dim_y=of.dims[1],
        linf_clip_norm_x=sizes[0],
        linf_clip_norm_y=sizes[1],
        center_gradients=True,
        **fields,
    )
    return plan.calibrate(**of.budget)


def _saddle(of: Players) -> _Trial | None:
    def trial(clip: float, count: int) -> _Trial:
        once = _once(of, count)
        return _drawn(of, _game(of, plans.Saddle, clip, output="mean", **once), 1)

    return _over_clips(trial, _root(of), of.num_examples)


def _bias_reduced(of: Players) -> _Trial | None:
    if isinstance(of.problem, MatrixGame):
        return None  # Its gradients have no bias.

    def trial(budget: int) -> _Trial:
        plan = _game(
            of,
            plans.SaddleBiasReduced,
            _CLIPS[0],
            vertex_budget=budget,
            level_seed=0,
            **of.shared,
        )
        return _drawn(of, plan, 3)

    return _climbed(trial, _root(of), of.num_examples // 4)


def _sgda(of: Players, sampler: Callable[[int], Any], most: int) -> _Trial | None:
    if any(isinstance(domain, Polytope) for domain in of.domains):
        return None  # Nothing projects on one.
    clip = of.gradient_clip()

    def trial(count: int) -> _Trial:
        plan = plans.DPGD(
            num_steps=count, sampling=sampler(count), l2_clip_norm=clip, **of.shared
        ).calibrate(**of.budget)
        whole = isinstance(plan.sampling, sampling.FullBatch)
        return _descended(of, plan, count if whole else 1)

    return _climbed(trial, 32, most)


def _sgda_once(of: Players) -> _Trial | None:
    def sampler(count: int) -> Any:
        return sampling.SinglePass(of.num_examples // count)

    return _sgda(of, sampler, of.num_examples)


def _sgda_whole(of: Players) -> _Trial | None:
    most = math.floor(of.most)
    return None if most < 2 else _sgda(of, lambda count: sampling.FullBatch(), most)


def _convex(of: Players) -> _Trial | None:
    log = math.log(of.dims[0])

    def trial(clip: float, count: int) -> _Trial:
        plan = plans.ConvexSimplex(
            dim=of.dims[0],
            linf_clip_norm=clip * of.half_ranges()[0],
            num_draws=max(1, round(math.sqrt(count * log))),
            refresh_every=max(1, round(math.sqrt(count / log))),
            center_gradients=True,
            **_once(of, count),
        ).calibrate(**of.budget)
        return _drawn(of, plan, 1)

    return _over_clips(trial, _root(of), of.num_examples)


def _frank_wolfe(of: Players, whole: bool) -> _Trial | None:
    most = math.floor(of.most) if whole else of.num_examples
    if most < 2:
        return None

    def trial(clip: float, count: int) -> _Trial:
        fields = _once(of, count)
        if whole:
            fields["sampling"] = sampling.FullBatch()
        plan = plans.FrankWolfe(
            dim=of.dims[0],
            linf_clip_norm=clip * of.half_ranges()[0],
            center_gradients=True,
            **fields,
        ).calibrate(**of.budget)
        return _drawn(of, plan, count if whole else 1)

    return _over_clips(trial, 64 if whole else 16, most)


_GAMES: dict[str, Callable[[Players], _Trial | None]] = {
    "Saddle": _saddle,
    "SaddleBiasReduced": _bias_reduced,
    "DP-SGDA, one pass": _sgda_once,
    "DP-SGDA, full batches": _sgda_whole,
}
_CONVEX: dict[str, Callable[[Players], _Trial | None]] = {
    "ConvexSimplex": _convex,
    "FrankWolfe, one pass": lambda of: _frank_wolfe(of, False),
    "FrankWolfe, full batches": lambda of: _frank_wolfe(of, True),
}
