"""The theorems' constants: the printed table, the digest's numbers, the corrections."""

import json
import math
from typing import Any

import pytest

from bench import problems
from jaxdp import accounting, plans, sampling
from jaxdp.dpzero import theorems

FAMILY = {str(t): name for name, ts in theorems.FAMILIES.items() for t in ts}
COMMON: dict[str, Any] = {
    "num_examples": 1024,
    "dim": 355_000_000,
    "epsilon": 2.0,
    "delta": 1e-5,
    "relation": "replace_one",
    "lipschitz": 1.0,
    "smoothness": 1.0,
    "effective_rank": 200.0,
    "initial_gap": 1.0,
    "value_bound": 1.0,
    "pl_constant": 0.1,
}


def make(name: str, **changes: Any) -> theorems.Prescription:
    return theorems.prescribed(name, family=FAMILY[name], **(COMMON | changes))


# --- the printed table -------------------------------------------------------------

# So many records that rounding T down changes no digit that is compared.
MANY: dict[str, Any] = {
    "num_examples": 10**9,
    "dim": 30,
    "epsilon": 1.5,
    "delta": 1e-7,
    "lipschitz": 3.0,
    "smoothness": 0.4,
    "effective_rank": 7.0,
    "initial_gap": 1.9,
    "value_bound": 2.5,
    "pl_constant": 0.05,
}
LAMBDA = math.log(math.e + 1.5e7)
NE = 1.5e9
R1 = math.sqrt(30 * LAMBDA) / NE
R = math.sqrt(7 * LAMBDA) / NE
TAIL = 2 * math.sqrt(2 * math.pi) * 1e9 * NE**2 * 9 / (7 * LAMBDA)
WIDE = 3 * math.sqrt(math.log(TAIL * (30 + 8 * 0.4 * 2.5 * 9 / 9)))
TAIL_PL = 32 * math.sqrt(2 * math.pi) * 8 * 1e9 * NE**2 * 9 / (7 * LAMBDA)
WIDE_PL = 24 * math.sqrt(
    math.log(TAIL_PL * (30 + (8 * 0.4 * 9 + 0.05) * 2.5 / 9)),
)
# name -> step size, T, C, radius, guarantee
PRINTED = {
    "1": (
        1 / (4 * 0.4 * 30),
        1 / R1,
        90.0,
        4 * 3 / (0.4 * 30) * math.sqrt(R1),
        16 * (0.4 * 1.9 + 2 * 9) * 30 * R1,
    ),
    "2": (
        1 / (4 * 0.4 * 9),
        9 / (30 * R),
        90.0,
        4 * 3 / (0.4 * 30) * math.sqrt(R),
        16 * (0.4 * 1.9 + 2 * 9) * 30 * R,
    ),
    "3": (
        1 / (4 * 0.4 * 9),
        9 / (4 * R),
        4 * WIDE,
        3 / (0.4 * 30**1.5) * math.sqrt(R),
        (64 * (0.4 * 1.9 + WIDE**2) + 2 * 9) * R,
    ),
    "F.2": (
        1 / (4 * 0.4 * 30),
        8 * 8 * 30 * math.log(NE**2 / (8 * 30**3 * LAMBDA)),
        90.0,
        2 * 3 / 0.4 * math.sqrt(LAMBDA) / NE,
        None,
    ),
    "F.3": (
        1 / (4 * 0.4 * 9),
        8 * 8 * 9 * math.log(NE**2 / (8 * 7 * 30**2 * LAMBDA)),
        90.0,
        2 * 3 / (0.4 * math.sqrt(30)) * math.sqrt(7 * LAMBDA) / NE,
        None,
    ),
    "F.4": (
        1 / (4 * 0.4 * 9),
        8 * 8 * 9 * math.log(NE**2 / (8 * 7 * LAMBDA)),
        WIDE_PL / 2,
        4 * 3 / (2 * 0.4 * 30**1.5) * math.sqrt(7 * LAMBDA) / NE,
        None,
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_formulas_of_the_paper(name: str) -> None:
    rate, steps, clip, radius, bound = PRINTED[name]
    found = make(name, **MANY)
    assert found.theorem == name
    assert found.num_steps == math.floor(steps)
    assert found.learning_rate == pytest.approx(rate, rel=1e-12)
    assert found.l2_clip_norm == pytest.approx(clip, rel=1e-12)
    assert found.smoothing_radius == pytest.approx(radius, rel=1e-12)
    assert found.bound == (bound and pytest.approx(bound, rel=1e-4))
    assert found.output == ("random" if bound else "last")
    noise = 4 * clip * math.sqrt(2 * found.num_steps * LAMBDA) / NE
    assert found.paper_noise_std == pytest.approx(noise, rel=1e-12)


def test_radius_of_theorem_3_where_the_clip_decides() -> None:
    """The other arm of the minimum: few records, so that sqrt(R / d) is large."""
    found = make("3", **MANY | {"num_examples": 30, "dim": 1, "effective_rank": 1.0})
    wide = found.l2_clip_norm / 4
    big_r = math.sqrt(LAMBDA) / 45
    assert 4 * (2 - math.sqrt(2)) * wide > 3 * math.sqrt(big_r)
    few = make("3", **MANY | {"num_examples": 1, "dim": 1, "effective_rank": 1.0})
    big_r, wide = math.sqrt(LAMBDA) / 1.5, few.l2_clip_norm / 4
    expected = min(4 * (2 - math.sqrt(2)) * wide, 3 * math.sqrt(big_r)) / 0.4
    assert few.smoothing_radius == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rank", [True, False])
def test_formulas_of_theorem_3_prime(rank: bool) -> None:
    found = make("3'", **MANY, per_record_rank=rank)
    mu = accounting.gaussian_mu(1.5, 1e-7)
    big_r = math.sqrt(7) / (2 * math.sqrt(2) * 1e9 * mu)
    assert found.num_steps == math.floor(9 / (4 * big_r))
    assert found.learning_rate == pytest.approx(1 / (4 * 0.4 * 9), rel=1e-12)
    radius = 2 * 3 / 0.4 * math.sqrt(big_r / (7 * (21 + 8)))
    assert found.smoothing_radius == pytest.approx(radius, rel=1e-12)
    bound = (64 * 0.4 * 1.9 + 4 * found.l2_clip_norm**2 + 1.35 * 9) * big_r
    assert found.bound == pytest.approx(bound, rel=1e-6)
    assert found.output == "random"


# --- the digest's numbers ----------------------------------------------------------


def test_scope_warning() -> None:
    """At the paper's own experiments theorem 3 says nothing; where it begins to."""
    found = make("3")
    assert found.bound == pytest.approx(64.9, abs=0.05)
    assert found.l2_clip_norm == pytest.approx(25.6, abs=0.05)
    assert found.smoothing_radius == pytest.approx(2.3e-14, rel=0.02)
    bites = make("3", num_examples=10**6, delta=1e-6, effective_rank=100.0, dim=10**6)
    assert bites.bound == pytest.approx(0.069, abs=5e-4)
    assert bites.num_steps == pytest.approx(1.34e6, rel=2e-3)


def test_theorem_3_prime_at_the_same_numbers() -> None:
    """Clip 10.2 L against 25.6 L, a radius that float32 resolves, a bound 13 times less."""
    found = make("3'", per_record_rank=True)
    assert found.l2_clip_norm == pytest.approx(10.2, rel=0.02)
    # 8.9e-4 with the paper's R, and R' is R / 2.48.
    radius = 8.9e-4 / math.sqrt(2.478)
    assert found.smoothing_radius == pytest.approx(radius, rel=2e-3)
    assert found.bound == pytest.approx(4.82, abs=0.01)


@pytest.mark.parametrize(
    ("epsilon", "delta", "ratio"),
    [
        (1.0, 1e-5, 2.5725),
        (2.0, 1e-6, 2.4151),
        (2.0, 1e-5, 2.4781),
        (6.0, 1e-5, 2.2517),
        (8.0, 1e-5, 2.1716),
    ],
)
def test_exact_composition(epsilon: float, delta: float, ratio: float) -> None:
    """T is inverse to R, and R' / R is the exact noise over the paper's."""
    budget = {"epsilon": epsilon, "delta": delta, "num_examples": 10**8}
    old, new = make("3", **budget), make("3'", **budget)
    assert new.num_steps / old.num_steps == pytest.approx(ratio, rel=1e-4)
    plan = plans.DPZero(
        num_examples=10**8,
        num_steps=new.num_steps,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=new.l2_clip_norm,
        smoothing_radius=new.smoothing_radius,
    )
    multiplier = accounting.calibrate_noise_multiplier(
        lambda m: accounting.full_batch_gaussian(m, plan.num_steps, plan.relation),
        epsilon,
        delta,
    )
    noise = multiplier * plan.sensitivity / plan.normalizer
    assert new.paper_noise_std / noise == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("num", "steps", "radius", "guarantee"),
    [
        (500, 500, 0.0139, 4.07),
        (1000, 1000, 0.0098, 2.05),
        (2000, 2000, 0.0069, 1.04),
        (4000, 4001, 0.0049, 0.528),
    ],
)
def test_settings_of_the_simulated_rate(
    num: int, steps: int, radius: float, guarantee: float
) -> None:
    problem = problems.pseudo_huber(100)
    found = make(
        "3'",
        num_examples=num,
        dim=100,
        delta=1e-6,
        lipschitz=problem.lipschitz,
        effective_rank=problem.effective_rank,
        # From x_0 = 3: the mean over xi of the losses there, above that at 0.
        initial_gap=9.95,
        direction="rademacher",
        per_record_rank=True,
    )
    assert found.num_steps == steps
    assert found.smoothing_radius == pytest.approx(radius, abs=5e-5)
    assert found.bound == pytest.approx(guarantee, rel=0.04)


# --- the corrections ---------------------------------------------------------------


@pytest.mark.parametrize("rank", [True, False])
@pytest.mark.parametrize("law", ["sphere", "rademacher", "gaussian"])
@pytest.mark.parametrize("num", [500, 10**6])
def test_the_clip_of_3_prime_is_rarely_active(num: int, law: Any, rank: bool) -> None:
    """What the bound allots to active clips, 0.35 L^2 R', covers them."""
    d, r, lip = 100, 5.0, 2.0
    found = make(
        "3'",
        num_examples=num,
        dim=d,
        lipschitz=lip,
        smoothness=0.5,
        effective_rank=r,
        direction=law,
        per_record_rank=rank,
    )
    mu = accounting.gaussian_mu(2.0, 1e-5)
    big_r = math.sqrt(r) / (2 * math.sqrt(2) * num * mu)
    clip, steps, radius = found.l2_clip_norm, found.num_steps, found.smoothing_radius
    beta = big_r * r * lip**2 / (1152 * (r + 2) * d * clip**2)
    if law == "gaussian":
        beta = (d * beta) ** 2 / (d * (d + 2))
    s = math.log(2 * num * ((r + 2) / (4 * big_r)) / beta)
    size = r if rank else d
    form = size + 2 * math.sqrt(size * s) + 2 * s
    if not rank and law != "gaussian":
        form = d
    curvature = 0.5 * radius / 2 * form
    assert clip == pytest.approx(lip * math.sqrt(2 * s) + curvature, rel=1e-4)
    if not rank:
        assert radius <= lip / (0.5 * d) and (law == "gaussian" or curvature <= lip / 2)
    # The chance that one of n slopes, or of their curvatures, is too large at a step.
    fail = 2 * num * math.exp(-((clip - curvature) ** 2) / (2 * lip**2))
    fail += num * math.exp(-s)
    assert fail * steps <= 1.51 * beta
    # Then a step is off by at most alpha L |u|^2, and the descent by L times that.
    size = math.sqrt(d * (d + 2) * fail) if law == "gaussian" else d * fail
    assert 4 * lip**2 * size <= 0.35 * lip**2 * big_r


def test_the_bound_counts_the_noise_that_is_added() -> None:
    """The paper's formula is not private at (200, 1e-5), where exact noise is larger."""
    found = make("3", epsilon=200.0, num_examples=10**6, dim=100, effective_rank=2.0)
    mu = accounting.gaussian_mu(200.0, 1e-5)
    exact = 2 * found.l2_clip_norm * math.sqrt(found.num_steps) / (10**6 * mu)
    assert exact > found.paper_noise_std
    assert found.bound is not None
    start = 16 * 4 / found.num_steps
    smoothing_and_clip = found.bound - start - 2 / (2 * 4) * exact**2
    assert 0 < smoothing_and_clip < 1e-5


def test_3_prime_needs_half_the_noise_where_no_record_is_replaced() -> None:
    pair = [
        make("3'", num_examples=10**7, relation=r) for r in ("replace_one", "zero_out")
    ]
    assert pair[1].num_steps / pair[0].num_steps == pytest.approx(2, rel=1e-4)
    bounds = [s.bound for s in pair]
    assert bounds[1] / bounds[0] == pytest.approx(0.5, rel=0.03)
    assert pair[1] == make("3'", num_examples=10**7, relation="add_or_remove")


def test_the_dimension_enters_3_prime_by_a_logarithm() -> None:
    small, large = (make("3'", dim=d, per_record_rank=True) for d in (10**3, 10**9))
    same = ("learning_rate", "num_steps", "smoothing_radius")
    assert all(getattr(small, f) == getattr(large, f) for f in same)
    # Half the logarithm of a million, in units of L.
    grown = large.l2_clip_norm**2 - small.l2_clip_norm**2
    assert grown == pytest.approx(2 * math.log(10**6), rel=0.1)


@pytest.mark.parametrize("name", ["1", "2", "3", "3'"])
@pytest.mark.parametrize(
    ("argument", "low", "high"),
    [("num_examples", 10**6, 10**7), ("epsilon", 1.0, 2.0), ("delta", 1e-8, 1e-5)],
)
def test_more_records_or_budget_allow_more_steps_and_bound_more(
    name: str, argument: str, low: float, high: float
) -> None:
    base = {"num_examples": 10**6, "dim": 50, "effective_rank": 3.0}
    a, b = (make(name, **base | {argument: value}) for value in (low, high))
    assert a.num_steps < b.num_steps
    assert a.bound is not None and b.bound is not None and a.bound > b.bound
    assert a.paper_noise_std > b.paper_noise_std or argument == "delta"


@pytest.mark.parametrize("name", ["2", "3", "3'"])
def test_a_larger_rank_bounds_less(name: str) -> None:
    base = {"num_examples": 10**7, "dim": 50}
    a, b = (make(name, **base, effective_rank=r) for r in (3.0, 30.0))
    assert a.bound is not None and b.bound is not None and a.bound < b.bound
    assert a.learning_rate > b.learning_rate


# --- less than one step ------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_with_too_few_records_the_output_is_where_it_starts(name: str) -> None:
    """Remark F.5, and Psi < 1 for the corollaries. One record: logarithms stay real."""
    few: dict[str, Any] = {"lipschitz": 3.0, "effective_rank": 1.0, "epsilon": 0.1}
    for num in (1, 5):
        found = make(name, num_examples=num, initial_gap=None, **few)
        assert (found.num_steps, found.output) == (1, "random")
        assert found.bound == (None if name.startswith("F") else 9.0)
        numbers = list(found.values())[1:5]
        assert all(math.isfinite(x) and x > 0 for x in numbers)


def test_one_step_is_the_least_that_moves() -> None:
    """T = 1 / R of theorem 1 on either side of 1."""
    root = math.sqrt(30 * math.log(math.e + 2e5))
    at = math.ceil(root / 2)
    base = {"dim": 30, "effective_rank": None}
    below, above = (make("1", num_examples=n, **base) for n in (at - 1, at))
    assert (below.num_steps, above.num_steps) == (1, 1)
    assert below.bound == 1.0  # L^2
    assert above.bound is not None and above.bound > 16
    # Psi of F.2: its logarithm is negative, then positive.
    at = math.ceil(math.sqrt(10 * 30**3 * math.log(math.e + 2e5)) / 2)
    below, above = (make("F.2", num_examples=n, **base) for n in (at - 1, at))
    assert (below.num_steps, below.output) == (1, "random")
    assert (above.num_steps >= 1, above.output) == (True, "last")


# --- arguments ---------------------------------------------------------------------


def test_settings_are_plain_numbers() -> None:
    for name in FAMILY:
        fields = make(name).as_dict()
        assert json.loads(json.dumps(fields, allow_nan=False)) == fields
        assert isinstance(fields["num_steps"], int)


@pytest.mark.parametrize(
    ("family", "theorem", "choices"),
    [
        ("dpzero", "1", "'3', \"3'\", 'F.4'; got '1'"),
        ("dpzero", 3, "'3', \"3'\", 'F.4'; got 3"),
        ("dpgd_zeroth_order", "3'", "'1', '2', 'F.2', 'F.3'; got \"3'\""),
    ],
)
def test_the_error_lists_the_theorems(family: Any, theorem: Any, choices: str) -> None:
    with pytest.raises(ValueError) as raised:
        theorems.prescribed(theorem, family=family, **COMMON)
    assert str(raised.value) == f"theorem must be one of {choices}"


def test_an_entry_of_the_enum_is_a_name() -> None:
    assert [str(t) for t in theorems.Theorem] == [
        "1",
        "2",
        "3",
        "3'",
        "F.2",
        "F.3",
        "F.4",
    ]
    assert set(FAMILY) == set(theorems.Theorem)
    found = theorems.prescribed(theorems.Theorem.THREE_PRIME, family="dpzero", **COMMON)
    assert found == make("3'") and type(found.theorem) is str


@pytest.mark.parametrize(
    ("name", "absent", "message"),
    [
        (
            "3",
            ("effective_rank", "value_bound"),
            "effective_rank, value_bound must be given for theorem '3', got None; it "
            "needs lipschitz, smoothness, effective_rank, value_bound, and initial_gap "
            "for its bound",
        ),
        ("F.2", ("pl_constant",), "pl_constant must be given for theorem 'F.2'"),
        ("3'", ("effective_rank",), 'effective_rank must be given for theorem "3\'"'),
    ],
)
def test_missing_constants_are_named(
    name: str, absent: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        make(name, **dict.fromkeys(absent))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", FAMILY)
def test_a_theorem_takes_what_it_needs_and_no_more(name: str) -> None:
    needed = theorems.NEEDS[theorems.Theorem(name)]
    spare = ("effective_rank", "value_bound", "pl_constant")
    without = {k: None for k in spare if k not in needed}
    assert make(name, **without) == make(name)
    assert make(name, num_examples=10**12, initial_gap=None).bound is None


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("3", {"num_examples": 0}, ValueError, "num_examples must be an integer >= 1"),
        ("3", {"dim": 2.0}, TypeError, "dim must be an integer >= 1"),
        ("3", {"epsilon": 0}, ValueError, "epsilon must be a number > 0"),
        ("3", {"delta": 1.0}, ValueError, "delta must be a number in"),
        ("3", {"lipschitz": math.inf}, ValueError, "lipschitz must be a number > 0"),
        ("3", {"smoothness": -1}, ValueError, "smoothness must be a number > 0"),
        (
            "3",
            {"effective_rank": 0.5},
            ValueError,
            "effective_rank must be a number in",
        ),
        ("3", {"effective_rank": 1e9}, ValueError, r"\[1, dim\] = \[1, 355000000\]"),
        ("3", {"value_bound": -1.0}, ValueError, "value_bound must be a finite number"),
        ("3", {"initial_gap": math.nan}, ValueError, "initial_gap must be a finite"),
        ("F.4", {"pl_constant": 2.0}, ValueError, r"\(0, smoothness\] = \(0, 1.0\]"),
        (
            "3",
            {"relation": "zero_out"},
            ValueError,
            "relation must be 'replace_one' for",
        ),
        ("3'", {"relation": "swap"}, ValueError, "relation must be one of"),
        (
            "3",
            {"direction": "gaussian"},
            ValueError,
            "direction must be one of 'sphere'",
        ),
        ("3'", {"direction": "orthonormal"}, ValueError, "direction must be one of"),
        ("3'", {"per_record_rank": 5.0}, TypeError, "per_record_rank must be a bool"),
    ],
)
def test_bad_arguments_are_named(
    name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(name, **changes)


# --- plans -------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "dpzero": plans.DPZero,
    "dpgd_zeroth_order": plans.DPGDZerothOrder,
}
#: Of which every theorem takes at least one step.
SMALL: dict[str, Any] = COMMON | {
    "num_examples": 20_000,
    "dim": 40,
    "effective_rank": 4.0,
}


@pytest.mark.parametrize("name", FAMILY)
def test_plan_of_a_theorem(name: str) -> None:
    """The theorem's numbers, exact noise, and both read back from JSON."""
    kind = KINDS[FAMILY[name]]
    plan = kind.from_theorem(name, **SMALL)
    want = theorems.prescribed(name, family=FAMILY[name], **SMALL)
    assert plan.theorem == want
    for field in ("num_steps", "l2_clip_norm", "smoothing_radius", "output"):
        assert getattr(plan, field) == getattr(want, field)
    assert plan.sampling == sampling.FullBatch()
    assert plan.epsilon(delta=1e-5) == pytest.approx(2.0, rel=1e-9)
    assert plan.noise_std < want.paper_noise_std / 2.4
    again = plans.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert f"theorem           {name} (learning_rate" in str(plan)


def test_theorem_names_are_an_enum_that_the_error_prints() -> None:
    assert [str(t) for t in plans.Theorem] == ["1", "2", "3", "3'", "F.2", "F.3", "F.4"]
    with pytest.raises(ValueError, match=r"theorem must be one of '3', \"3'\", 'F.4'"):
        plans.DPZero.from_theorem("4", **SMALL)
    with pytest.raises(ValueError, match=r"theorem must be one of '1', '2', 'F.2'"):
        plans.DPGDZerothOrder.from_theorem("3'", **SMALL)
    assert plans.DPZero.from_theorem(plans.Theorem.THREE_PRIME, **SMALL).theorem
