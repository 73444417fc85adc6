"""Every sentence of the planner on what was measured, against the kept results."""

from collections.abc import Callable

import pytest

from bench import _kept
from jaxdp.planner import claims


def low_high(name: str, case: str, metric: str) -> tuple[float, float]:
    """A figure's 95% interval."""
    (row,) = _kept.rows(name)[case, metric]
    half = row["half_width"] or 0.0
    return row["value"] - half, row["value"] + half


def mean(name: str, case: str, metric: str) -> float:
    (row,) = _kept.rows(name)[case, metric]
    return row["value"]


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return max(one[0], other[0]) <= min(one[1], other[1])


def digits_are_alike() -> bool:
    return all(
        overlap(
            low_high("digits", f"DPZero, epsilon {x}", "test accuracy"),
            low_high("digits", f"DP-GD, epsilon {x}", "test accuracy"),
        )
        for x in (0.5, 1, 2, 4, 8)
    )


def gradients_are_far_ahead() -> bool:
    """By more than the intervals and a third, at both epsilons."""
    return all(
        low_high("docstrings", "instruction", f"DP-LoRA, epsilon {x}")[0]
        > 1.33 * low_high("docstrings", "instruction", f"DPZero, LoRA, epsilon {x}")[1]
        for x in (2, 6)
    )


def heads_are_alike() -> bool:
    return all(
        overlap(
            low_high("docstrings", "classification", f"DPZero, head, epsilon {x}"),
            low_high("docstrings", "classification", f"DP-LoRA, epsilon {x}"),
        )
        for x in (2, 6)
    )


GAMES = [f"rock-paper-scissors, d = 1000, n = {n}" for n in (10_000, 100_000)]
FULL, ONCE = "planner, DP-SGDA, full batches", "planner, DP-SGDA, one pass"
DRAWN = "planner, Saddle"


def one_pass_is_alike() -> bool:
    return all(
        overlap(low_high("planner", case, ONCE), low_high("planner", case, DRAWN))
        for case in GAMES
    )


def full_batches_lead() -> bool:
    return all(
        mean("planner", case, FULL) < mean("planner", case, other)
        for case in GAMES
        for other in (ONCE, DRAWN)
    )


def bias_reduced_is_behind() -> bool:
    games = "(a) {}, algorithm 1, certified", "(c) {}, algorithm 3, certified"
    sizes = "n = 100000, d = 100", "n = 1000000, d = 100"
    (better, worse) = (
        [low_high("saddle", game.format(size), "gap") for size in sizes]
        for game in games
    )
    # All of the bench's games are one: rock, paper, scissors.
    cases = {case for case, _ in _kept.rows("saddle") if "algorithm 3" in case}
    return all(case.startswith("(c) n = ") for case in cases) and all(
        one[1] < other[0] for one, other in zip(better, worse, strict=True)
    )


def risk(n: int, method: str) -> tuple[float, float]:
    return low_high("saddle", f"(d) n = {n}, d = 100, {method}", "excess risk")


WHOLE, PASS = "Frank-Wolfe, full batch, T tuned", "Frank-Wolfe, one pass, T tuned"


def frank_wolfe_is_far_ahead() -> bool:
    rows = _kept.rows("saddle")
    return all(
        4 * max(risk(n, PASS)[1], risk(n, WHOLE)[1]) < risk(n, method)[0]
        for n in (10_000, 100_000)
        for (case, metric) in rows
        for method in [case.partition("d = 100, ")[2]]
        if case.startswith(f"(d) n = {n},") and metric == "excess risk"
        if method.startswith("algorithm 4")
    )


def full_batches_of_frank_wolfe() -> bool:
    return risk(100_000, WHOLE)[1] < risk(100_000, PASS)[0] and overlap(
        risk(10_000, WHOLE), risk(10_000, PASS)
    )


MINE = "marginals", "MWEM", "algorithm 5"


def tables(prefix: str) -> list[tuple[float, ...]]:
    """Mean errors of the three methods, in every case of a kind of table."""
    rows = _kept.rows("tables")
    cases = {case for case, _ in rows if case[0] in prefix}
    kinds = "total variation", "largest error"
    found = [
        tuple(mean("tables", case, f"{kind}: {method}") for method in MINE)
        for case in cases
        for kind in kinds
        if (case, f"{kind}: marginals") in rows
    ]
    assert len(found) >= 4
    return found


def marginals_lead() -> bool:
    return all(found[0] == min(found) for found in tables("abd"))


def rounds_lead() -> bool:
    rows = [
        [
            mean(
                "tables",
                f"c: {kind} of ten columns, n = 1000",
                f"total variation: {method}",
            )
            for method in MINE
        ]
        for kind in ("pairs", "triples")
    ]
    return all(found[1] == min(found) for found in rows)


def rounds_are_behind_with_more_records() -> bool:
    case, kinds = (
        "c: pairs of ten columns, n = 10000",
        ("total variation", "largest error"),
    )
    return all(
        mean("tables", case, f"{kind}: marginals")
        < mean("tables", case, f"{kind}: MWEM")
        for kind in kinds
    )


def mirror_descent_is_behind() -> bool:
    return all(min(found) < found[2] for found in tables("abcd"))


def accuracy(case: str) -> tuple[float, float]:
    return low_high("frontier", case, "test accuracy")


def public_records_help() -> bool:
    alone = {x: accuracy(f"DPGD, private records alone, epsilon {x}") for x in (0.5, 2)}
    start = {x: accuracy(f"DPGD, warm start, epsilon {x}") for x in (0.5, 2)}
    means = {
        case: mean("frontier", case, metric)
        for case, metric in _kept.rows("frontier")
        if case.startswith("DPGD") and case.endswith(" 2") and metric == "test accuracy"
    }
    best = max(means, key=lambda case: means[case])
    return (
        start[0.5][0] > alone[0.5][1] + 0.1
        and start[2][0] > alone[2][1]
        and "warm start, mixing" in best
        and all(
            accuracy(f"labels moved by one: DPGD, {way}, epsilon {x}")[1] < alone[x][0]
            for way in ("warm start", "warm start, mixing")
            for x in alone
        )
    )


#: What each sentence says, after the name of the benchmark.
CHECKS: dict[str, tuple[Callable[[], bool], ...]] = {
    "as accurate as DPZero from epsilon 0.5 to 8": (digits_are_alike,),
    "as accurate as DPGD from epsilon 0.5 to 8": (digits_are_alike,),
    "far more accurate than DPZero": (gradients_are_far_ahead,),
    "far less accurate than DPGD; as accurate where a head is tuned": (
        gradients_are_far_ahead,
        heads_are_alike,
    ),
    "as good as DP-SGDA in one pass": (one_pass_is_alike,),
    "as good as Saddle": (one_pass_is_alike,),
    "the smallest mean gap of three": (full_batches_lead,),
    "behind Saddle; no game that is not bilinear was measured": (
        bias_reduced_is_behind,
    ),
    "far behind FrankWolfe": (frank_wolfe_is_far_ahead,),
    "far ahead of ConvexSimplex": (frank_wolfe_is_far_ahead,),
    "the least excess risk with 100000 records, that of one pass with 10000": (
        full_batches_of_frank_wolfe,
    ),
    "the least mean error of three where all columns depend on one another, with 300 to "
    "100000 records": (marginals_lead,),
    "the least mean total variation of three on ten columns of which few depend on one "
    "another, with 1000 records; else behind marginals": (
        rounds_lead,
        rounds_are_behind_with_more_records,
        marginals_lead,
    ),
    "behind the better of the other two in every case": (mirror_descent_is_behind,),
}
SENTENCES = [
    *claims.TABLES.values(),
    *(
        claim.measured
        for part in (claims.LOSSES, claims.LANGUAGE, claims.PLAYERS)
        for claim in part.values()
    ),
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_what_is_said_was_measured(sentence: str) -> None:
    benchmark, _, said = sentence.partition(": ")
    assert _kept.path_of(benchmark.split(",")[0].removeprefix("bench ")).exists()
    assert all(check() for check in CHECKS[said])


def test_what_is_said_of_public_records_was_measured() -> None:
    assert "bench frontier, digits with 100 public records" in claims.PUBLIC
    assert public_records_help()


def test_every_check_belongs_to_a_sentence() -> None:
    assert {x.partition(": ")[2] for x in SENTENCES} == set(CHECKS)
