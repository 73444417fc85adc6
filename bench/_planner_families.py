"""The planner's choice among families: games, problems over a simplex, tables.

The planner sees the budget, the sizes and 256 records of another seed. All its candidates
then run on records of five seeds. Beside them stand methods whose numbers were tuned by the
error itself, with the best numbers that ``bench saddle`` found, on the same records: the
saddle plan and DP-SGDA of one pass, and Frank-Wolfe. All at (1, 1e-6), replace-one.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from bench import _harness, problems
from bench import _saddle_games as games
from bench import _saddle_simplex as simplex
from bench._saddle_games import BUDGET, DELTA, EPSILON

RELATION = "replace_one"
SEEDS = 5
_PUBLIC_SEED, _PUBLIC = 12345, 256
#: The planner's candidates, and the errors of one of them, by seed.
Planned = tuple[Any, Callable[[Any], list[float]]]
_PLAYERS = {"epsilon": EPSILON, "delta": DELTA, "relation": RELATION}
#: (d, n) of games -> steps and clip of the saddle plan, and of DP-SGDA steps, step factor
#: and clip factor, that ``bench saddle`` found best.
TUNED: dict[tuple[int, int], Any] = {
    (1000, 100_000): ((512, 0.6), (16, 30.0, 0.1)),
    (1000, 10_000): ((64, 0.6), (4, 30.0, 0.1)),
}


def run(quick: bool) -> list[_harness.Row]:
    """Rows of every case."""
    if quick:
        return table(10_000, seeds=2)
    rows = []
    for d, n in TUNED:
        rows += game(d, n, SEEDS)
    rows += regression(100, 100_000, SEEDS)
    return rows + table(10_000, SEEDS) + table(100_000, SEEDS)


def _judged(
    case: str,
    found: Any,
    metric: str,
    errors_of: Callable[[Any], list[float]],
    tuned: dict[str, tuple[float, ...]],
) -> list[_harness.Row]:
    """Rows of all candidates, the planner's choice, and what was tuned."""
    rows, means = [], {}
    for one in found.candidates:
        errors = errors_of(one)
        mean = _harness.mean(errors)
        name = name_of(one)
        if one is found.best:
            rows.append(_harness.averaged(case, "planner", mean, len(errors)))
            rows.append(_harness.Row(case, "planner's method", None, name))
        row = _harness.averaged(case, f"planner, {name}", mean, len(errors), metric)
        rows.append(row)
        if one.error is not None:
            said = f"predicted, {name}"
            rows.append(_harness.Row(case, said, one.error, ""))
        means[name] = mean.value
    for name, errors in tuned.items():
        mean = _harness.mean(errors)
        rows.append(_harness.averaged(case, name, mean, len(errors), metric))
        means[name] = mean.value
    chosen = {"": found.best}
    once = [x for x in found.candidates if getattr(x, "num_passes", math.inf) <= 3]
    if once:
        chosen[", one pass"] = once[0]
    for end, one in chosen.items():
        value = means[name_of(one)]
        for said, names in {"the best": means, "the best tuned": tuned}.items():
            if names:
                least = min(names, key=lambda name: means[name])
                ratio = value / means[least]
                metric = f"planner{end} over {said}"
                rows.append(_harness.Row(case, metric, ratio, "", least, ratio))
    return rows


def name_of(one: Any) -> str:
    """Of a candidate: its family and how it reads records, or its method."""
    return one.name if hasattr(one, "name") else one.method


def _fitted(one: Any, problem: Any, data: Any, seed: int) -> Any:
    """The points of a run of a candidate."""
    whole = isinstance(one.plan.sampling, jaxdp.sampling.FullBatch)
    result = jaxdp.fit(
        one.plan,
        jaxdp.Keys.insecure(seed),
        one.start,
        data,
        value_fn=problem,
        optimizer=one.optimizer,
        microbatch_size=2000 if whole and one.optimizer is not None else None,
        check_isolation=False,
    )
    return one.output(result)


def of_game(d: int, n: int, seeds: int) -> Planned:
    """Rock-paper-scissors among d - 3 dominated strategies: the population's gap."""
    g, problem = games.game(d)
    uniform = jnp.full(d, 1 / d)
    public = g.make_data(_PUBLIC, _PUBLIC_SEED)
    found = jaxdp.recommend(
        problem, (uniform, uniform), public, num_examples=n, **_PLAYERS
    )

    def errors_of(one: Any) -> list[float]:
        errors = []
        for seed in range(seeds):
            data = tuple(map(jnp.asarray, g.make_data(n, seed)))
            errors.append(g.gap_fn(*_fitted(one, problem, data, seed)))
        return errors

    return found, errors_of


def game(d: int, n: int, seeds: int) -> list[_harness.Row]:
    """The game, beside methods that are tuned."""
    found, errors_of = of_game(d, n, seeds)
    (steps, clip), (t, rate, factor) = TUNED[d, n]
    of_saddle = games.tuned(d, n, range(seeds), num_steps=(steps,), clips=(1.5, clip))
    of_sgda = games.sgda(
        d,
        n,
        range(seeds),
        num_steps=(t,),
        step_factors=(rate,),
        clip_factors=(1.0, factor),
        tuning_seeds=1,
    )
    tuned = {
        "tuned, Saddle": of_saddle[-1].values,
        "tuned, DP-SGDA, one pass": of_sgda[-1].values,
    }
    case = f"rock-paper-scissors, d = {d}, n = {n}"
    return _judged(case, found, "gap", errors_of, tuned)


def of_regression(d: int, n: int, seeds: int) -> Planned:
    """Sparse least squares over the simplex: the population's excess risk."""
    of, problem = simplex.regression(d)
    public = of.make_data(_PUBLIC, _PUBLIC_SEED)
    found = jaxdp.recommend(
        problem, jnp.full(d, 1 / d), public, num_examples=n, **_PLAYERS
    )

    def errors_of(one: Any) -> list[float]:
        points = (
            _fitted(one, problem, jax.tree.map(jnp.asarray, of.make_data(n, s)), s)
            for s in range(seeds)
        )
        return [of.excess_fn(point) for point in points]

    return found, errors_of


def regression(d: int, n: int, seeds: int) -> list[_harness.Row]:
    """The regression, beside methods that are tuned."""
    found, errors_of = of_regression(d, n, seeds)
    cells = simplex.frank_wolfe(n, range(seeds), d)
    named = {"one pass, T tuned": "one pass", "full batch, T tuned": "full batches"}
    tuned = {
        f"tuned, FrankWolfe, {said}": cell.values
        for end, said in named.items()
        for cell in cells
        if cell.method == f"Frank-Wolfe, {end}"
    }
    case = f"sparse regression, d = {d}, n = {n}"
    return _judged(case, found, "excess risk", errors_of, tuned)


def of_table(columns: int, n: int, seeds: int) -> Planned:
    """All three-way marginals of binary columns: the largest error of a query."""
    from jaxdp.data import synthesis

    queries = jaxdp.Marginals((2,) * columns, degree=3)
    found = jaxdp.recommend(queries, num_examples=n, **_PLAYERS)

    def errors_of(one: Any) -> list[float]:
        errors = []
        for seed in range(seeds):
            domain = problems.binary_domain(columns, seed=seed)
            codes = np.asarray(domain.make_data(n, seed))
            choice = synthesis.planned(
                queries,
                num_examples=n,
                relation=RELATION,
                method=one.method,
                **BUDGET,
            )
            keys = jaxdp.Keys.insecure(seed)
            result = synthesis.release(choice, keys, codes, queries)
            shares = domain.frequencies(codes)
            errors.append(domain.max_error(result.histogram, shares))
        return errors

    return found, errors_of


def table(n: int, seeds: int) -> list[_harness.Row]:
    """The 448 marginals of eight columns."""
    found, errors_of = of_table(8, n, seeds)
    case = f"448 marginals of 256 cells, n = {n}"
    return _judged(case, found, "largest error", errors_of, {})
