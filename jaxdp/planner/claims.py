"""Claims on candidates, in words: proofs of the error, and results of kept benchmarks.

The benchmark is the most similar one. ``tests/test_planner_claims.py`` holds every
sentence against ``bench/results``. Privacy is proven of all.
"""

from typing import NamedTuple

#: Parameters from which a language model is more similar than a table's classifier.
_MANY = 100_000
#: Proof of a candidate without any.
NONE = "nothing of the error"
_CERTIFIED = f"{NONE} at these numbers; certified() has numbers with a bound"
_SLOPES = f"{NONE} at these numbers; from_theorem() has numbers with a bound"
_GAME = "bench planner, rock-paper-scissors among 1000 strategies"
_REGRESSION = "bench saddle, sparse regression over a simplex"
_FEW = "bench digits, a linear model"
_LANGUAGE = "bench docstrings, a small RoBERTa given instructions"


class Claim(NamedTuple):
    """Proof of a candidate's error, and its result in a benchmark, in words."""

    proven: str
    measured: str


LOSSES = {
    "DPGD": Claim(NONE, f"{_FEW}: as accurate as DPZero from epsilon 0.5 to 8"),
    "DPZero": Claim(_SLOPES, f"{_FEW}: as accurate as DPGD from epsilon 0.5 to 8"),
}
LANGUAGE = {
    "DPGD": Claim(NONE, f"{_LANGUAGE}: far more accurate than DPZero"),
    "DPZero": Claim(
        _SLOPES,
        f"{_LANGUAGE}: far less accurate than DPGD; as accurate where a head is tuned",
    ),
}
PLAYERS = {
    "Saddle": Claim(_CERTIFIED, f"{_GAME}: as good as DP-SGDA in one pass"),
    "SaddleBiasReduced": Claim(
        _CERTIFIED,
        "bench saddle, certified numbers, a bilinear game: behind Saddle; no game that is "
        "not bilinear was measured",
    ),
    "DP-SGDA, one pass": Claim(NONE, f"{_GAME}: as good as Saddle"),
    "DP-SGDA, full batches": Claim(NONE, f"{_GAME}: the smallest mean gap of three"),
    "ConvexSimplex": Claim(_CERTIFIED, f"{_REGRESSION}: far behind FrankWolfe"),
    "FrankWolfe, one pass": Claim(NONE, f"{_REGRESSION}: far ahead of ConvexSimplex"),
    "FrankWolfe, full batches": Claim(
        NONE,
        f"{_REGRESSION}: the least excess risk with 100000 records, that of one pass with "
        "10000",
    ),
}
TABLES = {
    "marginals": "bench tables: the least mean error of three where all columns depend on "
    "one another, with 300 to 100000 records",
    "mwem": "bench tables: the least mean total variation of three on ten columns of which "
    "few depend on one another, with 1000 records; else behind marginals",
    "mirror_descent": "bench tables: behind the better of the other two in every case",
}
PUBLIC = (
    "With {count} public records: train on them first, without noise, and start from "
    "there; where epsilon leaves something to learn, mix their gradient with the releases "
    "as well (jaxdp.mix_public). Measured: bench frontier, digits with 100 public records: "
    "the start is far ahead of none at epsilon 0.5, and ahead at 2, where the highest mean "
    "is of a run that mixes as well; a start from wrong labels is worse than none."
)


def of_loss(name: str, dim: int) -> Claim:
    """Returns the claim of a method for a loss of ``dim`` parameters that move."""
    return (LOSSES if dim < _MANY else LANGUAGE)[name]
