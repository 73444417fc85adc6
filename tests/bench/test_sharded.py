"""What is counted of programs whose parameters are split over devices."""

from typing import Any

import pytest

from bench import _accelerators_hlo as hlo

BENCH = "sharded"
PROGRAM = """HloModule test

%scattered (x: bf16[8,64]) -> bf16[8,8] {
  %x = bf16[8,64]{1,0} parameter(0)
  %sum = bf16[8,64]{1,0} all-reduce(%x), to_apply=%add
  ROOT %part = bf16[8,8]{1,0} slice(%sum), slice={[0:8], [0:8]}
}

%body (p: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %p = (s32[], bf16[8,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %y = bf16[8,8]{1,0} get-tuple-element(%p), index=1
  %g = bf16[8,64]{0:S(1)} all-gather(%y), metadata={op_name="/closed_call/Block/mlp/up/dot"}
  %z = bf16[8,8]{1,0} fusion(%g), kind=kLoop, calls=%scattered
  %to = (bf16[8,8]{1,0}, bf16[8,8]{1,0}, u32[]) collective-permute-start(%z)
  %there = bf16[8,8]{1,0} collective-permute-done(%to)
  %two = s32[] constant(2)
  %next = s32[] add(%n, %two)
  ROOT %t = (s32[], bf16[8,8]{1,0}) tuple(%next, %there)
}

ENTRY %main (p: (s32[], bf16[8,8])) -> s32[1] {
  %zero = s32[] constant(0)
  %start = bf16[8,8]{1,0} parameter(0)
  %p = (s32[], bf16[8,8]{1,0}) tuple(%zero, %start)
  %w = (s32[], bf16[8,8]) while(%p), condition=%c, body=%body
  %s = s32[1]{0} parameter(1)
  ROOT %slopes = s32[1]{0} all-reduce(%s), to_apply=%add
}

%c (p: (s32[], bf16[8,8])) -> pred[] {
  %p = (s32[], bf16[8,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %end = s32[] constant(6)
  ROOT %more = pred[] compare(%n, %end), direction=LT
}
"""


def test_results_of_collectives_are_counted(bench: Any) -> None:
    """In loops, of two turns at a time too, and fusions, and without what is sent."""
    moved, largest = bench.exchanged(hlo.Program(PROGRAM))
    whole, part = 2 * 8 * 64, 2 * 8 * 8
    want = {"all-gather": 3 * whole, "all-reduce": 3 * whole, "integers": 4}
    assert moved == want | {"collective-permute": 3 * part}
    assert largest["all-gather"] == (whole, "mlp/up")


@pytest.mark.slow  # A process with 32 devices, and six compilations.
def test_a_device_holds_and_receives_less_of_a_split_model(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {(row.case, row.metric): row for row in bench.run(quick=True)}

    def value(devices: int, metric: str, method: str = "") -> float:
        return rows[f"tiny{method}, {devices} devices", metric].value

    # All but vectors is split.
    assert value(8, "parameters") < value(1, "parameters") / 7
    assert value(32, "parameters") == value(8, "parameters")
    # Activations, of a quarter of the records; no weight is gathered.
    for metric in ("all-gather", "largest all-gather over a layer's kernel"):
        assert value(32, metric) < value(8, metric) / 3
    assert value(8, "collective-permute") == value(1, "all-gather") == 0
    assert value(32, "integers") == 4e-6
    # Of gradients, too: a group adds the integers of its own part of the parameters.
    gradients = ", DP-GD"
    assert value(8, "temp memory", gradients) < value(1, "temp memory", gradients) / 7
    assert value(32, "largest all-gather over a layer's kernel", gradients) < 0.5
    of_bytes = value(32, "integers", gradients) * 1e6
    of_shares = value(32, "parameters", gradients) * 1e9
    assert of_bytes == pytest.approx(
        4 / 2 * of_shares, rel=0.02
    )  # Parameters have 16 bits.
