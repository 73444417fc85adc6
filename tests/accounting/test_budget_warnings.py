"""Warnings of budgets that protect nobody, or leave nothing but noise."""

from typing import Any

import pytest

from jaxdp import accounting, plans, sampling
from jaxdp.cli import main


def make(num_examples: int) -> Any:
    return plans.DPZero(
        num_examples=num_examples,
        num_steps=4,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
    )


@pytest.mark.parametrize(
    ("num_examples", "epsilon", "delta", "said"),
    [
        (200, 1.0, 0.02, "delta=0.02 is above 1/num_examples = 0.005"),
        (10**6, 1e-5, 0.5, "epsilon=1e-05 and delta=0.5 look swapped"),
        (10**4, 1e6, 1e-5, "epsilon=1e[+]06 lets a release raise"),
        (3, 2.0, 1e-5, "num_examples=3 is too few for epsilon=2"),
        (40, 0.1, 1e-5, "num_examples=40 is too few for epsilon=0.1"),
    ],
)
def test_a_senseless_budget_is_named_where_it_is_asked_for(
    num_examples: int, epsilon: float, delta: float, said: str
) -> None:
    with pytest.warns(UserWarning, match=said) as at:
        make(num_examples).calibrate(epsilon=epsilon, delta=delta)
    assert [w.filename for w in at] == [__file__]


def test_a_sensible_one_is_not() -> None:
    for num_examples, epsilon, delta in ((24, 2.0, 1e-5), (64, 0.1, 1e-2), (1, 1, 0.5)):
        accounting.warn_of_budget(epsilon, delta, num_examples)


@pytest.mark.filterwarnings("always")
def test_commands_print_it_in_one_line(capsys: Any) -> None:
    words = ["calibrate", "--epsilon", "100", "--num-steps", "3"]
    assert main(words) == 0
    out = capsys.readouterr()
    assert out.err.startswith("jaxdp: warning: epsilon=100 lets ")
    assert out.err.count("\n") == 1
    assert "noise_multiplier" in out.out
