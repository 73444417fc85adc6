"""The lattice adversary: what it flags, what it lets pass, and every family's digits."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench._lattice_plans import LATTICE_PLANS
from jaxdp import Keys, auditing, metrics, plans, sampling
from jaxdp.auditing import _lattice, grid_releases, residues, units
from jaxdp.cli import main
from jaxdp.core import noise
from jaxdp.saddle.oracles import Problem

#: One of each kind of draw, and of each way to read it.
FAMILIES = (
    "DPZero, several directions",
    "DPZero, clip tuning",
    "DPGDZerothOrder",
    "DPGD",
    "PrefixSum, buffers",
    "PrefixSum, tree",
    "PrefixSum, optimised bands",
    "O2NC, several passes, gradients",
    "O2NC, slopes",
    "SOSP",
)


def rounded_floats(std: float, num: int, seed: int = 0) -> np.ndarray:
    """The fault: a float32 normal times its standard deviation, rounded to the grid."""
    drawn = jax.random.normal(jax.random.key(seed), (num,))
    return np.asarray(jnp.round(drawn * jnp.float32(std)), np.float64)


def exact(std: int, num: int, seed: int = 0) -> np.ndarray:
    secret = np.random.default_rng(seed).bytes(32)
    coins = noise.Coins(secret, "test of lattices")
    return noise.discrete_gaussian(coins, std, num).astype(np.float64)


# Digits.


@pytest.mark.parametrize("std", [2.0**18, 2.0**20, 815_000.0, 2.0**22, 2.0**26])
def test_rounded_floats_do_not_fit(std: float) -> None:
    found = residues.fit(rounded_floats(std, 2**19), std)
    assert found.p_value < 1e-9
    assert found.even > 0.501


def test_rounded_floats_are_even_as_often_as_the_spacing_of_floats_says() -> None:
    found = residues.fit(rounded_floats(2.0**20, 2**20), 2.0**20)
    # Beyond 2**21 units five in eight, between 2**20 and 2**21 nine in sixteen.
    assert found.even_tails == pytest.approx(5 / 8, abs=0.01)
    assert found.even == pytest.approx(0.535, abs=0.005)
    assert found.num_numbers == pytest.approx(2**20, rel=1e-3)


@pytest.mark.parametrize("std", [64, 1000, 2**14, 2**20, 815_000, 2**23])
def test_exact_noise_fits(std: int) -> None:
    assert residues.fit(exact(std, 20_000), std).p_value > 1e-6


@pytest.mark.parametrize(("std", "num"), [(126, 2**20), (254, 2**22)])
def test_tails_are_whole_blocks_of_residues(std: int, num: int) -> None:
    """By chance, an honest law's p-value is below 1e-6 with probability 1e-6."""
    support = np.arange(-10 * std, 10 * std + 1)
    law = np.exp(-((support / std) ** 2) / 2)
    drawn = np.random.default_rng(0).multinomial(num, law / law.sum())
    made = np.repeat(support.astype(float), drawn)
    # Two deviations are just below a multiple of 256.
    assert residues.fit(made, std).p_value > 1e-6
    far = np.abs(made) > 2 * std
    found = residues.fit(np.where(far, 2 * np.rint(made / 2), made), std)
    assert found.p_value < 1e-9
    assert found.even_tails > 0.99


@pytest.mark.parametrize("factor", [2.0**-20, 0.7 / 3 / 2**16])
def test_what_float32_makes_of_exact_noise_fits(factor: float) -> None:
    made = exact(2**20, 20_000)
    released = made.astype(np.float32) * np.float32(factor)
    units = released.astype(np.float64) / float(np.float32(factor))
    kept = np.abs(made) < residues.LIMIT - 2
    assert np.array_equal(residues.integers(units)[kept], made[kept])
    assert residues.fit(units, 2.0**20).p_value > 1e-6


@pytest.mark.parametrize("factor", [2.0**-20, 0.7 / 3 / 2**16])
def test_noise_that_is_finer_than_the_grid_fits(factor: float) -> None:
    made = np.random.default_rng(0).normal(0, 2.0**20, 2**19)
    released = made.astype(np.float32) * np.float32(factor)
    units = released.astype(np.float64) / float(np.float32(factor))
    assert residues.fit(units, 2.0**20).p_value > 1e-6


def test_numbers_without_their_digits_are_left_out() -> None:
    units = np.array([0.4, -0.5, 2.5, 2.0**22, -(2.0**30), np.nan, np.inf])
    lost = residues.LIMIT
    assert residues.integers(units).tolist() == [0, 0, 3, lost, lost, lost, lost]
    assert residues.fit(np.full(9, np.nan), 2.0**20).num_numbers == 0


def test_noise_of_a_few_units_is_refused() -> None:
    with pytest.raises(ValueError, match="noise_std must be at least 64 units"):
        residues.fit(np.zeros(9), 63.0)


# The adversary.


def released(
    units: np.ndarray, moved: np.ndarray, monkeypatch: Any, least: int = 1
) -> Any:
    """The result for a plan that releases these numbers, moved by a record.

    By a multiple of ``least`` units, whatever the record.
    """
    both = np.stack([units, units + moved])
    site = grid_releases.Site("numbers", 2.0**20, both, least)
    monkeypatch.setattr(grid_releases, "releases", lambda *_: (site,))
    return auditing.lattice(LATTICE_PLANS["DPGD"], num_runs=200)


def test_a_record_is_seen_under_rounded_floats(monkeypatch: Any) -> None:
    units = rounded_floats(2.0**20, 200 * 2000).reshape(200, 2000)
    found = released(units, np.ones(2000), monkeypatch)
    assert found.flagged and not found.passed
    assert found.epsilon_lower > 5 > found.epsilon
    assert found.worst.p_value < 1e-9
    assert found.num_tested == 100


def test_a_record_that_moves_few_numbers_is_seen_there(monkeypatch: Any) -> None:
    units = rounded_floats(2.0**20, 200 * 4000).reshape(200, 4000)
    moved = 1.0 * (np.arange(4000) < 1000)
    assert released(units, moved, monkeypatch).epsilon_lower > 2


def test_a_record_that_moves_nothing_odd_is_not_attacked(monkeypatch: Any) -> None:
    units = rounded_floats(2.0**20, 200 * 2000).reshape(200, 2000)
    found = released(units, 2 * np.ones(2000), monkeypatch)
    assert found.epsilon_lower == 0
    assert found.flagged  # Its digits do not fit.


def test_a_record_is_not_seen_under_noise_of_integers(monkeypatch: Any) -> None:
    made = np.random.default_rng(1).normal(0, 2.0**20, (200, 2000))
    found = released(np.rint(made), np.ones(2000), monkeypatch)
    assert found.passed
    assert found.epsilon_lower < found.epsilon


def test_the_parity_of_counts_is_seen_below_all_of_their_units(
    monkeypatch: Any,
) -> None:
    """Noise whose low digits fit, if a record moves numbers by 2**16 units."""
    made = np.rint(np.random.default_rng(2).normal(0, 2.0**20, (1000, 500)))
    moved = 2.0**16 * (np.arange(500) == 0)
    even = 2.0**17 * np.rint(made / 2**17) + made % 2**16 - 2.0**15
    found = released(even, moved, monkeypatch, 2**16)
    assert found.worst.p_value > 1e-6
    assert found.flagged
    assert found.method.startswith("parity")
    assert released(made, moved, monkeypatch, 2**16).passed


# Plans.


@pytest.mark.parametrize(("steps", "sites"), [(1, 1), (4, 2)])
def test_a_drawn_marginal_is_a_site_of_its_own(steps: int, sites: int) -> None:
    plan = plans.MWEM(
        num_examples=20,
        num_steps=steps,
        relation="replace_one",
        sizes=(2, 2),
        attributes=((0,), (1,)),
        num_start=1,
    ).with_noise(noise_multiplier=8.0, delta=1e-5)
    made = grid_releases.of_marginals(plan, Keys.insecure(0), units.RECORD)
    assert len(made.readings) == sites
    assert {r.moved for r in made.readings.values()} == {2**plan.grid.shift}


#: Whose noise is added by the step that adds it for the others.
LATER = (
    "DPZero, clip tuning",
    "PrefixSum, buffers",
    "PrefixSum, optimised bands",
    "O2NC, several passes, gradients",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LATER else n for n in FAMILIES],
)
def test_no_family_shows_the_digits_of_its_sums(name: str) -> None:
    found = auditing.lattice(LATTICE_PLANS[name], num_runs=150)
    assert found.applicable
    assert min(site.num_numbers for site in found.sites) > 500
    assert not found.flagged, (found.method, found.epsilon_lower, found.worst)


def test_all_releases_of_a_search_are_looked_at() -> None:
    public = Keys.insecure(0)
    names = [
        set(grid_releases.of_search(LATTICE_PLANS[name], public, units.RECORD).readings)
        for name in ("SOSP", "SOSP, no escapes")
    ]
    assert names[1] == {"refresh", "difference"}
    assert names[0] == names[1] | {"product with a Hessian"}


def test_a_released_hessian_is_left_out_with_a_reason() -> None:
    left_out: list[str] = []
    plan: Any = LATTICE_PLANS["SOSP"].with_noise(noise_multiplier=2.0)
    object.__setattr__(plan, "hessian", "released")
    public = Keys.insecure(0)
    assert grid_releases._escape(plan, public, units.RECORD, left_out) is None
    assert "eigenvalue" in left_out[0]


def test_the_private_gap_has_digits_of_noise() -> None:
    half, none = np.full(2, 0.5), jnp.zeros((2, 2))

    def linear(x: Any, y: Any, batch: Any) -> Any:
        return batch[0] @ x + batch[1] @ y

    problem = Problem(linear)
    values = [
        metrics.private_gap(
            problem,
            half,
            half,
            (none, none),
            Keys.insecure(seed),
            noise_multiplier=1.0,
            relation="zero_out",
            linf_clip_norm_x=1.0,
            linf_clip_norm_y=0.5,
            num_examples=2,
        )
        for seed in range(150)
    ]
    std = 2**20 + 1  # of noise_multiplier 1, in units of the noise's grid
    units = np.array([v.value / v.std * std for v in values])
    assert np.abs(units - np.rint(units)).max() < 1e-3
    assert residues.fit(units, std).p_value > 1e-6


def saddle() -> plans.Saddle:
    return plans.Saddle(
        num_examples=8,
        num_steps=4,
        sampling=sampling.SinglePass(2),
        relation="replace_one",
        dim_x=6,
        dim_y=6,
        linf_clip_norm_x=1.0,
        linf_clip_norm_y=0.5,
        num_draws=1,
    ).calibrate(epsilon=2.0, delta=1e-5)


def test_a_plan_that_draws_vertices_is_not_applicable() -> None:
    found = auditing.lattice(saddle())
    assert not found.applicable and found.passed
    assert "draws vertices" in found.reason
    assert found.sites == () and found.worst is None
    assert found.epsilon == pytest.approx(2.0, rel=1e-3)


def test_a_plan_of_hardly_any_noise_is_not_applicable(monkeypatch: Any) -> None:
    sites = (grid_releases.Site("gradient", 63.0, np.zeros((2, 100, 9))),)
    monkeypatch.setattr(grid_releases, "releases", lambda *_: sites)
    found = auditing.lattice(LATTICE_PLANS["DPGD"], num_runs=100)
    assert not found.applicable
    assert found.reason == "its noise is less than 64 units of its grid"
    assert found.left_out == ("gradient: noise of 63 units",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_runs": 99}, "num_runs must be an integer >= 100"),
        ({"failure_prob": 0.0}, "failure_prob"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"delta": 2.0}, "delta"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        auditing.lattice(LATTICE_PLANS["DPGD"], **changes)


def test_a_plan_without_noise_is_refused() -> None:
    plan = LATTICE_PLANS["DPGD"].with_noise(noise_multiplier=0)
    with pytest.raises(ValueError, match="plan must have noise to be audited"):
        auditing.lattice(plan)
    with pytest.raises(TypeError, match="plan must be"):
        auditing.lattice("plan")  # pyright: ignore[reportArgumentType]


# The command.


def site(p_value: float) -> auditing.LatticeSite:
    return auditing.LatticeSite(
        name="step 0",
        noise_std=1e6,
        num_numbers=4000,
        even=0.53,
        even_tails=math.nan,
        p_value=p_value,
        statistic="parity",
    )


def result(p_value: float, epsilon_lower: float = 0.0) -> auditing.LatticeResult:
    return auditing.LatticeResult(
        epsilon_lower=epsilon_lower,
        epsilon=1.0,
        delta=1e-5,
        failure_prob=1e-6,
        method="parity of step 0, Gaussian trade-off",
        num_runs=200,
        num_tested=100,
        sites=(site(0.3), site(p_value)),
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [(result(0.3), 0), (result(1e-9), 1), (result(0.3, 1.5), 1), (result(3e-7), 0)],
)
def test_the_command_says_what_was_found(
    found: Any, code: int, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    asked = {}

    def lattice(plan: Any, **kwargs: Any) -> auditing.LatticeResult:
        asked.update(kwargs, steps=plan.num_steps)
        return found

    monkeypatch.setattr(auditing, "lattice", lattice)
    path = tmp_path / "plan.json"
    path.write_text(LATTICE_PLANS["PrefixSum, tree"].to_json(), encoding="utf-8")
    words = ["audit", str(path), "--lattice-runs", "300", "--seed", "3"]
    assert main([*words, "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    # Of the plan as it is.
    wanted = {"num_runs": 300, "delta": None, "seed": 3, "steps": 400}
    assert asked == wanted | {"unit": "record"}
    assert answer["passed"] is (code == 0)
    assert answer["lattice"]["flagged"] is (code == 1)
    assert answer["lattice"]["sites"][1]["even_tails"] is None
    assert "epsilon_lower" not in answer  # The updates come from elsewhere.
    assert main(words) == code
    assert "parity of step 0" in capsys.readouterr().out


def test_the_command_says_that_it_is_not_applicable(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    passed = auditing.AuditResult(
        epsilon_lower=1.0,
        epsilon=2.0,
        delta=1e-5,
        failure_prob=1e-6,
        method="histogram, zCDP",
        canary="saturating record",
        num_runs=1000,
        num_tested=800,
        num_steps=4,
        false_positive_rate=0.1,
        false_negative_rate=0.2,
    )
    monkeypatch.setattr(auditing, "audit", lambda plan, **_: passed)
    path = tmp_path / "plan.json"
    path.write_text(saddle().to_json(), encoding="utf-8")
    assert main(["audit", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"not applicable: {_lattice._NO_LATTICE}" in shown


@pytest.mark.parametrize("number", ["99", "-1"])
def test_a_wrong_number_of_runs_is_one_line(
    number: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(LATTICE_PLANS["DPGD"].to_json(), encoding="utf-8")
    assert main(["audit", str(path), "--lattice-runs", number]) == 2
    assert "--lattice-runs must be 0 or an integer >= 100" in capsys.readouterr().err
