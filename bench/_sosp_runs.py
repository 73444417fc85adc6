"""Runs of a plan from a point, and what is measured of what they return.

Every seed has its own records and its own noise. The measure is the expected loss's, in
closed form (``jaxdp.metrics.sosp_alpha_of``): no run has seen it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import problems
from jaxdp import Keys, metrics, plans
from jaxdp.models import strict_saddles
from jaxdp.models.strict_saddles import StrictSaddleProblem

#: The first of the seeds that parameters are tuned on: no figure is of them.
TUNING = 10_000

cosine = functools.cache(strict_saddles.cosine_grid)
factorization = functools.cache(
    functools.partial(problems.low_rank_factorization, radius=1.2)
)

#: A critical point by name, or a seed's own point.
Start = str | Callable[[int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Runs:
    """What came out of some runs: arrays with one entry a seed.

    Attributes:
      promised: the alpha of a certificate; what ``reached`` is about.
      alpha: the least alpha of the returned point, of the expected loss.
      last: the same of the last iterate.
      certified: whether the point comes with a certificate.
      saddle: whether the expected Hessian has an eigenvalue below 0 there.
      records: that were used, of gradients and Hessians.
      hessian_records: of them, those of Hessians.
      refreshes: gradient queries of a whole batch.
      differences: gradient queries of a change.
      escapes: that were begun.
      steps: of the run.
      reached: records that were used when first an iterate had an alpha of at most
        ``promised``: what a method would need that were told when to stop.
    """

    promised: float
    alpha: np.ndarray
    last: np.ndarray
    certified: np.ndarray
    saddle: np.ndarray
    records: np.ndarray
    hessian_records: np.ndarray
    refreshes: np.ndarray
    differences: np.ndarray
    escapes: np.ndarray
    steps: np.ndarray
    reached: np.ndarray

    def __len__(self) -> int:
        return len(self.alpha)

    @property
    def good(self) -> np.ndarray:
        """Whether the returned point is as good as a certificate would say."""
        return self.alpha <= self.promised

    @property
    def needed(self) -> np.ndarray:
        """Records up to a certificate: infinite without one."""
        return np.where(self.certified, self.records, np.inf)


class Path(NamedTuple):
    """A whole run."""

    state: Any  # of the algorithm, at its end
    points: jax.Array  # shape=(num_steps, d); after each step
    used: jax.Array  # shape=(num_steps,), int32; records so far


@functools.lru_cache(maxsize=32)
def _program(plan: plans.SOSP, value_fn: Callable[..., Any]) -> Callable[..., Path]:
    """A whole run in one program: the steps of ``jaxdp.fit``, and where they led."""

    @jax.jit
    def run(keys: Keys, start: jax.Array, data: Any) -> Path:
        algorithm = plan.algorithm(keys)

        def more(path: Path) -> jax.Array:
            horizon = path.state.horizon
            return ~horizon.exhausted & (horizon.count < plan.num_steps)

        def step(path: Path) -> Path:
            old = path.state
            state, _ = algorithm.step(old, data, value_fn=value_fn)
            at = old.horizon.count
            return Path(
                state,
                path.points.at[at].set(state.point.ravel()),
                path.used.at[at].set(state.spider.cursor),
            )

        points = jnp.zeros((plan.num_steps, start.size), start.dtype)
        used = jnp.zeros((plan.num_steps,), jnp.int32)
        begun = Path(algorithm.init(start), points, used)
        return jax.lax.while_loop(more, step, begun)

    return run


class Entry(NamedTuple):
    """What is run: a plan from a start, and what ``reached`` is about."""

    plan: plans.SOSP
    start: Start
    promised: float


def follow(entry: Entry, problem: StrictSaddleProblem, seed: int, data: Any) -> Path:
    """A run of one seed."""
    start = entry.start
    point = problem.points[start].x if isinstance(start, str) else start(seed)
    run = _program(entry.plan, problem.value_fn)
    return run(Keys.insecure(seed), jnp.asarray(point, jnp.float32), data)


def collect(
    problem: StrictSaddleProblem,
    num_examples: int,
    entries: Mapping[str, Entry],
    seeds: Sequence[int],
) -> dict[str, Runs]:
    """Runs of all entries, seed after seed: those of a seed have the same records."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in entries}
    for seed in seeds:
        data = jax.device_put(problem.make_data(num_examples, seed))
        for name, entry in entries.items():
            path = follow(entry, problem, seed, data)
            found[name].append(measured(entry, problem, path))

    def stacked(name: str) -> Runs:
        every = found[name]
        columns = {key: np.array([one[key] for one in every]) for key in every[0]}
        return Runs(promised=entries[name].promised, **columns)

    return {name: stacked(name) for name in entries}


def measured(entry: Entry, problem: StrictSaddleProblem, path: Path) -> dict[str, Any]:
    """What is kept of a run: the fields of :class:`Runs`."""
    told, steps = entry.plan.outcome(path.state), int(path.state.horizon.count)
    alpha, last = (
        metrics.sosp_alpha_of(problem.population_fn, x, problem.hessian_lipschitz)
        for x in (path.state.best.point, path.state.point)
    )
    names = ("refreshes", "differences", "escapes", "hessian_records", "certified")
    return {name: told[name] for name in names} | {
        "alpha": float(alpha),
        "last": float(last),
        "saddle": alpha.min_eigenvalue < 0,
        "records": told["records_used"],
        "steps": steps,
        "reached": _reached(problem, path, steps, entry.promised),
    }


def _reached(
    problem: StrictSaddleProblem, path: Path, steps: int, promised: float
) -> float:
    found = alphas(problem, np.asarray(path.points)[:steps]) <= promised
    return float(path.used[int(np.argmax(found))]) if found.any() else np.inf


def alphas(problem: StrictSaddleProblem, points: np.ndarray) -> np.ndarray:
    """The least alpha of many points (k, d), of the expected loss; float32."""
    # Of few lengths, so that few programs are compiled.
    length = 2 ** max(6, int(np.ceil(np.log2(max(len(points), 1)))))
    padded = np.zeros((length, points.shape[1]), points.dtype)
    padded[: len(points)] = points
    gradients, hessians = _derivatives(problem)(padded)
    lowest = np.linalg.eigvalsh(np.asarray(hessians)[: len(points)])[:, 0]
    norms = np.linalg.norm(np.asarray(gradients)[: len(points)], axis=1)
    return np.maximum(norms, np.maximum(0, -lowest) ** 2 / problem.hessian_lipschitz)


@functools.cache
def _derivatives(problem: StrictSaddleProblem) -> Callable[[Any], Any]:
    def function(x: jax.Array) -> jax.Array:
        return problem.population_fn(x.reshape(problem.shape))

    return jax.jit(
        jax.vmap(lambda x: (jax.grad(function)(x), jax.hessian(function)(x)))
    )
