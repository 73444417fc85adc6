"""The study of predicted memory: it reads what the command prints."""

from typing import Any

import pytest

from jaxdp.cli import finetune_method

pytestmark = pytest.mark.slow

BENCH = "auto_memory"  # For the fixture `bench`.


@pytest.mark.parametrize("limit", [10**7, 10**10, None])
def test_numbers_of_the_printed_line(bench: Any, limit: int | None) -> None:
    made = finetune_method.choice(2_370_000_000, 113_000_000, limit, "this machine")
    line = f"jaxdp: --method auto is {made.method}: {made.reason}"
    assert bench.parse_prediction(line) == pytest.approx(
        {"dp-lora": 2370, "dpzero": 113}, rel=0.01
    )
