"""Tables (a) to (c) of the saddle study: algorithms 1 and 3 on a game, and DP-SGDA.

Each function runs one part and gives its cells. All runs but the baseline's are the
library's own (``jaxdp.fit``), at (1, 1e-6)-DP under replace-one. The game is weighted
rock-paper-scissors among d - 3 dominated strategies with independent signs as records; the
clips, where no other is named, are 1.5, which no record reaches.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdp
from bench import _saddle_baselines as baselines
from bench import _saddle_cells as cells
from bench._saddle_cells import Cell, Prototype
from jaxdp import Keys, models, plans, sampling
from jaxdp.models.games import Game

EPSILON, DELTA = 1.0, 1e-6
BUDGET: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA}
GAME = BUDGET | {
    "relation": "replace_one",
    "lipschitz": 1.5,
    "smoothness": 1.0,
    "second_order_smoothness": 0.0,
}
#: n -> the steps that algorithm 1 is tuned over: those of 32, 64, .., 1024 around the best.
NUM_STEPS = {10_000: (32, 64, 128, 256), 100_000: (128, 256, 512, 1024)}
#: Clips that it is tuned over: the one that clips nothing, and just above a sign's half.
CLIPS = (1.5, 0.6)

Seeds = Sequence[int]


def run(
    plan: Any, problem: Any, data: Callable[[int], Any], seeds: Seeds
) -> list[tuple[int, jaxdp.FitResult]]:
    """A run of the plan for each seed, of data and draws; compiled once."""
    return [(seed, fit(plan, problem, data(seed), seed)) for seed in seeds]


def fit(plan: Any, problem: Any, data: Any, seed: int) -> jaxdp.FitResult:
    keys = Keys.insecure(seed)
    return jaxdp.fit(plan, keys, plan.uniform(), data, value_fn=problem)


def quietly(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A theorem's plan, without the warning that it rounds to nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make(*args, **kwargs)


@functools.cache
def game(d: int) -> tuple[Game, jaxdp.MatrixGame]:
    """The game, and the same for ``fit``; one object each, so that programs are kept."""
    found = models.rock_paper_scissors(d)
    return found, jaxdp.MatrixGame(found.matrix, scale=found.sign_scale)


def by_steps(n: int, d: int, num_steps: int, clip: float = 1.5) -> plans.Saddle:
    """Algorithm 1 with all the step size that the budget admits, K = 1."""
    return plans.Saddle(
        num_examples=n,
        num_steps=num_steps,
        sampling=sampling.SinglePass(n // num_steps),
        relation="replace_one",
        dim_x=d,
        dim_y=d,
        linf_clip_norm_x=clip,
        linf_clip_norm_y=clip,
    ).calibrate(**BUDGET)


def gap_cell(
    plan: Any, d: int, seeds: Seeds, table: str, method: str, **more: Any
) -> Cell:
    """The population gap of a plan's runs on the game."""
    g, problem = game(d)
    n = plan.num_examples
    found = run(plan, problem, lambda seed: g.make_data(n, seed), seeds)
    gaps = tuple(g.gap_fn(*result.params) for _, result in found)
    size = cells.size(n, d)
    return Cell(table, size, method, "gap", gaps, n, d, note=steps_note(plan), **more)


def steps_note(plan: Any) -> str:
    step = getattr(plan, "step_size", None) or plan.step_size_x
    return f"T = {plan.num_steps}, step {step:.3g}"


# --- (a) and the paper's parameters: algorithm 1 by its bound --------------------------

EXPLICIT = {
    (10, 1000): (0.676, 20),
    (100, 1000): (0.950, 20),
    (1000, 1000): (1.000, 20),
    (10, 10_000): (0.305, 20),
    (100, 10_000): (0.568, 20),
    (1000, 10_000): (0.773, 20),
    (10, 100_000): (0.0986, 20, 4),
    (100, 100_000): (0.199, 20),
    (1000, 100_000): (0.255, 20),
    (10, 1_000_000): (0.0276, 4, 4),
    (100, 1_000_000): (0.0502, 4, 4),
}


#: The prototype's T, where its grid of T made it differ from ours by a twentieth or more;
#: there batches and step sizes do too, and runs with its T are what is compared with it.
SAME_STEPS = {
    (100, 10_000): 663,
    (10, 100_000): 8262,
    (100, 100_000): 7092,
    (1000, 1000): 55,
    (10, 1_000_000): 99_166,
    (100, 1_000_000): 49_886,
}


def explicit(d: int, n: int, seeds: Seeds, num_steps: int | None = None) -> list[Cell]:
    """Table (a): T (or a given one) and the step size of the least proven bound."""
    plan = plans.Saddle.certified(
        num_examples=n, dim_x=d, dim_y=d, num_steps=num_steps, **GAME
    )
    assert plan.theorem is not None
    more: dict[str, Any] = {"bound": float(plan.theorem.promise.bound)}
    if (d, n) in EXPLICIT and num_steps == SAME_STEPS.get((d, n)):
        more["prototype"] = Prototype(*EXPLICIT[d, n])
    method = "algorithm 1, certified"
    if num_steps is not None:
        method += ", the prototype's T"
    return [gap_cell(plan, d, seeds, "a", method, **more)]


def paper(d: int, n: int, seeds: Seeds) -> list[Cell]:
    """Theorem 4.1's parameters; the exact budget's step at its T; fewer steps."""
    theirs = quietly(
        plans.Saddle.from_theorem, "4.1", num_examples=n, dim_x=d, dim_y=d, **GAME
    )
    ours = theirs.calibrate(**BUDGET)
    return [
        gap_cell(theirs, d, seeds, "paper", "theorem 4.1", facts=facts(theirs, theirs)),
        gap_cell(
            ours,
            d,
            seeds,
            "paper",
            "theorem 4.1's T, all of epsilon",
            facts=facts(ours, theirs),
        ),
    ]


def facts(plan: Any, paper: Any) -> dict[str, float]:
    """What it spends, and its step size over the paper's."""
    (name, *_) = [
        s for s in plan.step_size_fields if s != "step_size_x"
    ] or plan.step_size_fields
    ratio = getattr(plan, name) / getattr(paper, name)
    return {
        "epsilon": float(plan.epsilon(delta=DELTA)),
        "step size over the paper's": ratio,
    }


# --- (b): tuned, beside Euclidean descent and ascent -----------------------------------

TUNED = {
    (10, 10_000): (0.197, 128),
    (100, 10_000): (0.273, 32),
    (1000, 10_000): (0.358, 32),
    (10, 100_000): (0.063, 512),
    (100, 100_000): (0.095, 512),
    (1000, 100_000): (0.132, 256),
}
SGDA = {
    (10, 10_000): (0.176, 6),
    (100, 10_000): (0.450, 6),
    (1000, 10_000): (0.785, 2),
    (10, 100_000): (0.039, 6),
    (100, 100_000): (0.076, 6),
    (1000, 100_000): (0.184, 2),
}
PLAIN, ALIKE = "algorithm 1, T tuned", "algorithm 1, T, clip and mean tuned"
SGDA_PLAIN, SGDA_ALIKE = "DP-SGDA, T and step tuned", "DP-SGDA, clip and mean tuned too"


def tuned(
    d: int,
    n: int,
    seeds: Seeds,
    *,
    num_steps: Sequence[int] | None = None,
    clips: Sequence[float] = CLIPS,
) -> list[Cell]:
    """Table (b), algorithm 1: the best mean, with the prototype's choices and with more.

    As for the baseline, the clip may cut into records and the output may be the mean of
    all vertices that were drawn, which are published anyway.
    """
    g, problem = game(d)
    steps = NUM_STEPS[n] if num_steps is None else num_steps
    table = [by_steps(n, d, t, clip) for t in steps for clip in clips]
    found: dict[tuple[int, float, str], list[float]] = {}
    for seed in seeds:  # Outside: the data take longer to make than a run.
        data = tuple(map(jnp.asarray, g.make_data(n, seed)))
        for plan in table:
            result = fit(plan, problem, data, seed)
            points = {"fresh": result.params, "all": all_vertices(result, d)}
            for name, point in points.items():
                entry = (plan.num_steps, plan.linf_clip_norm_x, name)
                found.setdefault(entry, []).append(g.gap_fn(*point))

    def best(method: str, entries: list[Any], **more: Any) -> Cell:
        entry = min(entries, key=lambda e: float(np.mean(found[e])))
        t, clip, name = entry
        note = f"T = {t}, clip {clip:g}, mean of {name} vertices"
        gaps = tuple(found[entry])
        return Cell("b", cells.size(n, d), method, "gap", gaps, n, d, note=note, **more)

    plain = [e for e in found if e[1] == 1.5 and e[2] == "fresh"]
    prototype = Prototype(TUNED[d, n][0], 6) if (d, n) in TUNED else None
    # The bound is about these clips alone.
    return [
        best(PLAIN, plain, prototype=prototype),
        best(ALIKE, list(found)),
    ]


def all_vertices(result: jaxdp.FitResult, d: int) -> list[np.ndarray]:
    """The mean of all vertices drawn, of x and of y, from what each step released."""
    drawn = np.asarray(result.info.releases).astype(int)
    half = drawn.shape[1] // 2
    return [
        np.bincount(part.ravel(), minlength=d) / part.size
        for part in (drawn[:, :half], drawn[:, half:])
    ]


#: (d, n) -> the grids of T, step factors and clip factors, and how many seeds try them.
SGDA_GRIDS = {
    (10, 10_000): ((8, 16, 32, 64), (1.0, 3.0, 10.0, 30.0), (1.0, 0.2, 0.1), 4),
    (100, 10_000): ((2, 4, 8, 16, 32), (3.0, 10.0, 30.0, 100.0), (1.0, 0.2, 0.1), 4),
    (1000, 10_000): ((2, 4, 8), (10.0, 30.0, 100.0), (1.0, 0.2, 0.1), 2),
    (10, 100_000): ((64, 128, 256, 512), (1.0, 3.0, 10.0, 30.0), (1.0, 0.2, 0.1), 3),
    (100, 100_000): ((32, 64, 128, 256), (3.0, 10.0, 30.0), (1.0, 0.2, 0.1), 2),
    (1000, 100_000): ((8, 16, 32), (30.0, 100.0), (1.0, 0.2, 0.1), 1),
}


def sgda(
    d: int,
    n: int,
    seeds: Seeds,
    *,
    num_steps: Sequence[int],
    step_factors: Sequence[float],
    clip_factors: Sequence[float],
    tuning_seeds: int,
) -> list[Cell]:
    """Table (b), the baseline: a grid on a few seeds, the best of it on all of them.

    At the zCDP that algorithm 1 spends, as the prototype did (its one Gaussian would cost a
    few per cent less by its exact curve).
    """
    g, _ = game(d)
    noise = 1 / math.sqrt(2 * baselines.zcdp_rho(EPSILON, DELTA))
    tune = functools.partial(baselines.tune_sgda, g, n, noise_multiplier=noise)
    grid = tune(
        range(1000, 1000 + tuning_seeds),
        num_steps=num_steps,
        step_factors=step_factors,
        clip_factors=clip_factors,
    ).table
    kinds = {
        SGDA_PLAIN: [e for e in grid if e[2] == 1 and e[3] == "before"],
        SGDA_ALIKE: list(grid),
    }
    found = []
    for method, entries in kinds.items():
        t, step, clip, output = min(entries, key=lambda e: grid[e])
        gaps = tune(
            seeds,
            num_steps=(t,),
            step_factors=(step,),
            clip_factors=(clip,),
            outputs=(output,),
        ).gaps
        note = f"T = {t}, step x {step:g}, clip x {clip:g}, mean {output} steps"
        prototype = None
        if method == SGDA_PLAIN and (d, n) in SGDA:
            prototype = Prototype(*SGDA[d, n])
        found.append(
            Cell(
                "b",
                cells.size(n, d),
                method,
                "gap",
                tuple(map(float, gaps)),
                n,
                d,
                note=note,
                prototype=prototype,
            )
        )
    return found


def uniform_gap(d: int) -> float:
    """Of the points that all runs start from."""
    return game(d)[0].gap_fn(np.full(d, 1 / d), np.full(d, 1 / d))


def without_privacy(d: int, num_steps: int = 3000) -> Cell:
    """Mirror prox on the expected game: what is left of the gap after so many steps."""
    g, _ = game(d)
    point = baselines.mirror_prox(
        g.population_fn,
        dim_x=d,
        dim_y=d,
        num_steps=num_steps,
        step_size=1 / g.smoothness,
    )
    gap = g.gap_fn(*map(np.asarray, point))
    note = f"not private, T = {num_steps}, expected gradients"
    return Cell("b", f"d = {d}", "mirror prox", "gap", (gap,), 0, d, note=note)


# --- (c): algorithm 3 -------------------------------------------------------------------

REDUCED = {
    ("paper", 100_000): 0.957,
    ("paper", 1_000_000): 0.687,
    ("certified", 100_000): 0.445,
    ("certified", 1_000_000): 0.197,
}


def bias_reduced(
    kind: str, n: int, level_seeds: Seeds, seeds: Seeds, d: int = 100
) -> list[Cell]:
    """Table (c): algorithm 3, each sequence of levels with some of the seeds.

    "certified" keeps Theorem 4.3's vertex budget, reads all records in batches in which
    each counts the same, and takes all the step that the budget admits.
    """
    gaps: list[float] = []
    plan = theirs = None
    for i, level_seed in enumerate(level_seeds):
        theirs = plans.SaddleBiasReduced.from_theorem(
            "4.3", num_examples=n, dim_x=d, dim_y=d, level_seed=level_seed, **GAME
        )
        plan = theirs
        if kind == "certified":
            plan = dataclasses.replace(
                theirs, batch_alpha=None, step_size_x=None, step_size_y=None
            ).calibrate(**BUDGET)
        share = seeds[i :: len(level_seeds)]
        gaps += gap_cell(plan, d, share, "c", "").values
    assert plan is not None and theirs is not None
    method = f"algorithm 3, {kind}"
    note = f"{len(level_seeds)} sequences of levels; {steps_note(plan)}"
    value = REDUCED.get((kind, n))
    return [
        Cell(
            "c",
            cells.size(n, d),
            method,
            "gap",
            tuple(gaps),
            n,
            d,
            note=note,
            facts=facts(plan, theirs),
            prototype=None if value is None else Prototype(value, 20),
        )
    ]
