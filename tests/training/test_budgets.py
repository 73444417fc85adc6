"""Budgets above runs: sums against caps, kills, races, and what runs reserve."""

import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dp
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting.dp_event import DiscreteLaplaceDpEvent
from dp_accounting.rdp import RdpAccountant

import jaxdp
from jaxdp import accounting, plans, sampling, tuning
from jaxdp.accounting import RELATIONS, lattice, renyi
from jaxdp.accounting.gaussian import gaussian_mu
from jaxdp.core import keys as keys_lib
from jaxdp.training import budgets, ledger


def plan_of(epsilon: float = 1.0, delta: float = 1e-6, **changes: Any) -> Any:
    numbers: dict[str, Any] = {
        "num_examples": 8,
        "num_steps": 4,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 1.0,
        "smoothing_radius": 1e-2,
    }
    plan = plans.DPZero(**(numbers | changes))
    return plan.calibrate(epsilon=epsilon, delta=delta)


def made(folder: Path, **changes: Any) -> jaxdp.Budget:
    numbers: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5, "relation": "replace_one"}
    return jaxdp.Budget.create(folder, **(numbers | changes))


COMPOSITIONS = ["basic", "gaussian", "renyi"]


def test_a_budget_shows_what_is_left(tmp_path: Path) -> None:
    budget = made(tmp_path)
    left = ", ".join(f"{name}={x:.6g}" for name, x in budget.left().items())
    assert repr(budget) == f"Budget({str(tmp_path)!r}, left: {left})"


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_no_sequence_passes_the_total(tmp_path: Path, composition: Any) -> None:
    """Releases of random sizes until nothing fits: all together cost at most the total.

    The guarantee of what was admitted is computed anew, by the accountant of the whole.
    """
    budget = made(tmp_path, composition=composition)
    rng, admitted = np.random.default_rng(0), []
    for _ in range(200):
        one = accounting.full_batch_gaussian(
            float(rng.uniform(4, 40)), 1, "replace_one"
        )
        with contextlib.suppress(ValueError):
            budget.reserve(one, delta=1e-7, relation="replace_one")
            admitted.append(one)
    huge = accounting.full_batch_gaussian(0.3, 1, "replace_one")
    with pytest.raises(ValueError, match="must have room for the release"):
        budget.reserve(huge, delta=1e-7, relation="replace_one")
    assert 3 < len(admitted) < 200
    whole = accounting.epsilon(*accounting.composed(admitted), 1e-5)
    assert whole <= 3.0
    spent = budget.spent()
    assert whole <= spent["epsilon"] <= 3.0
    assert spent["delta"] <= 1e-5
    assert len(budget.reservations) == len(admitted)
    if composition != "basic":  # Tight: not the sum of epsilons.
        loss = {"gaussian": 2e-3, "renyi": 0.1}[composition]
        assert spent["epsilon"] == pytest.approx(whole, rel=loss)
        assert sum(x.epsilon for x in budget.reservations) > 4.0


def sampled(kind: str, relation: Any, noise_multiplier: float) -> Any:
    """A plan of a sampled run, whose batches are never, rarely or often truncated."""
    samplers = {
        "poisson": sampling.TruncatedPoisson(sampling_prob=0.1, max_batch_size=200),
        "truncated": sampling.TruncatedPoisson(sampling_prob=0.1),
        "full": sampling.TruncatedPoisson(sampling_prob=0.1, max_batch_size=24),
        "fixed": sampling.FixedSize(batch_size=20),
    }
    return plans.DPZero(
        num_examples=200,
        num_steps=40,
        sampling=samplers[kind],
        relation=relation,
        l2_clip_norm=1.0,
        smoothing_radius=1e-2,
    ).with_noise(noise_multiplier=noise_multiplier, delta=1e-6)


def fill(budget: jaxdp.Budget, plan: Any, most: int = 200) -> int:
    """Reserves a plan until it is refused; returns how often it was not."""
    for done in range(most):
        try:
            budget.reserve(plan)
        except ValueError:
            return done
    return most


KINDS = [
    *((kind, relation) for kind in ("poisson", "truncated") for relation in RELATIONS),
    ("full", "replace_one"),
    ("full", "add_or_remove"),
    ("fixed", "replace_one"),
]


@pytest.mark.parametrize(("kind", "relation"), KINDS)
def test_sampled_runs_that_fill_a_budget_cost_no_more_by_pld(
    tmp_path: Path, kind: str, relation: Any
) -> None:
    """All that were admitted, composed as if chosen beforehand, by another accountant."""
    budget = made(tmp_path, relation=relation, composition="renyi")
    few, many = (sampled(kind, relation, each) for each in (6.0, 8.0))
    admitted = [few] * fill(budget, few, 2)
    admitted += [many] * fill(budget, many)
    assert admitted.count(few) == 2 and admitted.count(many) >= 7
    event = dp.ComposedDpEvent([each.event for each in admitted])
    whole = accounting.epsilon(event, few.event_relation, 1e-5)
    assert whole.accountant == "PLD"
    spent = budget.spent()
    assert 2.0 < whole < spent["epsilon"] <= 3.0
    assert spent["delta"] == 1e-5
    # By adding epsilons fewer would have fitted.
    assert sum(each.epsilon for each in budget.reservations) > 4.0


def test_divergences_of_sampled_runs_add_up_at_one_order(tmp_path: Path) -> None:
    budget = made(tmp_path, relation="add_or_remove", composition="renyi")
    one, two = (sampled("poisson", "add_or_remove", each) for each in (3.0, 8.0))
    costs = [budget.reserve(plan).cost["renyi_divergence"] for plan in (one, two)]
    header = jaxdp.Budget(tmp_path).header
    accountant = RdpAccountant([header["order"]]).compose(
        dp.ComposedDpEvent([one.event, two.event])
    )
    assert sum(costs) == pytest.approx(accountant.rdp[0], rel=1e-9)
    # By the same conversion, and a thousandth of the total for the noise's samplers.
    theirs = accountant.get_epsilon(1e-5)
    assert budget.spent()["epsilon"] == pytest.approx(theirs, abs=1e-5)
    caps = header["caps"]
    accountant = RdpAccountant([header["order"]]).compose(
        dp.ZCDpEvent(caps["renyi_divergence"] / header["order"])
    )
    assert accountant.get_epsilon(1e-5) == pytest.approx(3.0, rel=2e-3)
    assert accountant.get_epsilon(1e-5) < 3.0
    assert header["order"] == max(
        range(2, 50), key=lambda order: renyi.total(3.0, 1e-5, order) / order
    )


def test_ten_sampled_runs_cost_less_than_ten_epsilons(tmp_path: Path) -> None:
    """By the exact number that dp-accounting has; and one that passes it is refused."""
    plan = sampled("poisson", "zero_out", 6.0)
    budget = made(tmp_path / "renyi", relation="zero_out", composition="renyi")
    basic = made(tmp_path / "basic", relation="zero_out")
    for _ in range(10):
        budget.reserve(plan)
    assert fill(basic, plan) == 6
    accountant = RdpAccountant([budget.header["order"]]).compose(plan.event, 10)
    want = accountant.get_epsilon(1e-5)
    assert budget.spent()["epsilon"] == pytest.approx(want, abs=1e-5)
    assert want < 2.7 < sum(each.epsilon for each in budget.reservations)
    left = budget.left()["renyi_divergence"]
    assert left == pytest.approx(3.0 - want, abs=5e-3)
    large = sampled("poisson", "zero_out", 1.0)
    with pytest.raises(ValueError, match="have room for the release: of renyi_diverg"):
        budget.reserve(large)
    assert len(budget.reservations) == 10


def test_a_budget_of_divergences_takes_what_it_knows(tmp_path: Path) -> None:
    """Draws, pure noise, searches and a release of dp-accounting; no other event."""
    budget = made(tmp_path, epsilon=60.0, relation="zero_out", composition="renyi")
    base = plan_of(1.0, relation="zero_out")
    laplace = plan_of(0.7, relation="zero_out", noise="laplace")
    one = accounting.Guarantee(base.event, base.event_relation)
    order = budget.header["order"]
    for release in (
        base,
        laplace,
        accounting.zcdp(0.1, 2.0),
        accounting.repeat_and_select(one, mean=2.0, shape=1.0),
        accounting.poisson_laplace(9.0, 2, sampling_prob=0.1, relation="zero_out"),
    ):
        given: dict[str, Any] = {"delta": 1e-7, "relation": "zero_out"}
        how = {"delta": 1e-7} if release in (base, laplace) else given
        cost = budget.reserve(release, **how).cost["renyi_divergence"]
        event = release.event if hasattr(release, "event") else release[0]
        stated = getattr(release, "event_relation", None)
        assert cost == renyi.divergence(lattice.ideal(event), stated, order) > 0
    before = budget.spent()
    unknown = accounting.Guarantee(
        DiscreteLaplaceDpEvent(0.1, 1), dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    with pytest.raises(ValueError, match=r"Renyi divergence is known .* 'basic'"):
        budget.reserve(unknown, delta=1e-7, relation="zero_out")
    none = accounting.full_batch_gaussian(0.0, 1, "zero_out")
    with pytest.raises(ValueError, match="without noise"):
        budget.reserve(none, delta=1e-7, relation="zero_out")
    assert jaxdp.Budget(tmp_path).spent() == before


def test_a_total_that_no_divergence_implies_is_refused(tmp_path: Path) -> None:
    message = r"epsilon must be larger .* at delta=1e-06, got 0.001, .* up to 1024"
    with pytest.raises(ValueError, match=message):
        made(tmp_path / "small", epsilon=1e-3, delta=1e-6, composition="renyi")
    assert not (tmp_path / "small" / budgets.FILE).exists()


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_total_that_is_too_large_is_refused(tmp_path: Path, composition: Any) -> None:
    """At the largest that is allowed every composition serves, whatever delta is."""
    with pytest.raises(ValueError, match="epsilon must be at most 1000, got 1000000"):
        made(tmp_path / "large", epsilon=1_000_000, composition=composition)
    for i, delta in enumerate((0.1, 1e-300)):
        given = {"epsilon": 1000.0, "delta": delta, "composition": composition}
        assert min(made(tmp_path / f"{i}", **given).left().values()) > 0


@pytest.mark.parametrize("composition", ["gaussian", "renyi"])
def test_caps_leave_room_for_the_samplers(composition: Any) -> None:
    rules = budgets._rules(2.0, 1e-6, composition)
    caps = rules["caps"]
    assert ("order" in rules) == (composition == "renyi")
    left = (1e-6 - caps["sampler_delta"]) * math.exp(-caps["sampler_epsilon"])
    if composition == "renyi":
        most = renyi.implied(caps["renyi_divergence"], left, rules["order"])
        mu_squared = 2 * caps["renyi_divergence"] / rules["order"]
    else:
        most = accounting.gaussian_epsilon(math.sqrt(caps["mu_squared"]), left)
        mu_squared = caps["mu_squared"]
    assert most + caps["sampler_epsilon"] <= 2.0 + 1e-12
    least = {"gaussian": 0.99, "renyi": 0.86}[composition]
    assert mu_squared >= least * gaussian_mu(2.0, 1e-6) ** 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"relation": "zero_out"}, "relation must be the budget's, 'replace_one'"),
        ({"unit": "user"}, "unit must be the budget's, 'record'"),
        ({"delta": None}, "delta must be given"),
    ],
)
def test_what_the_budget_is_not_about_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    budget = made(tmp_path)
    one = accounting.full_batch_gaussian(50.0, 1, "replace_one")
    how: dict[str, Any] = {"delta": 1e-7, "relation": "replace_one"} | given
    with pytest.raises(ValueError, match=message):
        budget.reserve(one, **how)
    none = accounting.full_batch_gaussian(0.0, 1, "replace_one")
    with pytest.raises(ValueError, match="without noise"):
        budget.reserve(none, delta=1e-7, relation="replace_one")
    with pytest.raises(ValueError, match="a new one"):
        made(tmp_path)
    with pytest.raises(TypeError, match=r"a plan or an accounting\.Guarantee"):
        budget.reserve(1.0)  # pyright: ignore[reportArgumentType]
    assert not budget.reservations


def test_sampled_plans_are_for_basic_composition(tmp_path: Path) -> None:
    sampled = accounting.poisson_gaussian(
        3.0, 4, sampling_prob=0.1, relation="add_or_remove"
    )
    how: Any = {"delta": 1e-7, "relation": "add_or_remove"}
    budget = made(tmp_path / "a", relation="add_or_remove")
    reserved = budget.reserve(sampled, **how)
    assert reserved.epsilon == accounting.epsilon(*sampled, 1e-7)
    strict = made(tmp_path / "b", relation="add_or_remove", composition="gaussian")
    with pytest.raises(ValueError, match="without sampling"):
        strict.reserve(sampled, **how)


def test_a_guarantee_of_another_relation_is_refused(tmp_path: Path) -> None:
    budget = made(tmp_path, relation="zero_out")
    for other in ("replace_one", "add_or_remove"):
        sampled = accounting.poisson_gaussian(
            3.0,
            4,
            sampling_prob=0.1,
            relation=other,  # pyright: ignore
        )
        with pytest.raises(ValueError, match="must be the guarantee's"):
            budget.reserve(sampled, delta=1e-7, relation="zero_out")
    own = accounting.poisson_gaussian(3.0, 4, sampling_prob=0.1, relation="zero_out")
    budget.reserve(own, delta=1e-7, relation="zero_out")


def budget_caps(text: bytes) -> dict[str, float]:
    return json.loads(text[: text.index(b"\n")])["caps"]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_kill_at_any_byte_loses_nothing(tmp_path: Path, composition: Any) -> None:
    """The file cut after every byte: whole lines count, a torn one was never reserved."""
    budget = made(tmp_path, composition=composition)
    one = accounting.full_batch_gaussian(40.0, 1, "replace_one")
    how: Any = {"delta": 1e-7, "relation": "replace_one"}
    for name in "abc":
        budget.reserve(one, what=name, **how)
    file = tmp_path / budgets.FILE
    text = file.read_bytes()
    begin = text.index(b"\n") + 1
    for size in range(begin, len(text) + 1):
        file.write_bytes(text[:size])
        lines = text[:size].count(b"\n") - 1
        known = jaxdp.Budget(tmp_path)
        assert [x.what for x in known.reservations] == list("abc")[:lines]
        if size % 7 == 0:
            known.reserve(one, what="d", **how)
            assert [x.what for x in known.reservations] == [*list("abc")[:lines], "d"]
    file.write_bytes(text[: begin - 1])
    with pytest.raises(ValueError, match="as it was written"):
        jaxdp.Budget(tmp_path)
    name = next(iter(budget_caps(text))).encode()
    file.write_bytes(text.replace(b'{"%b": ' % name, b'{"%b": -' % name))
    with pytest.raises(ValueError, match="finite number >= 0"):
        jaxdp.Budget(tmp_path)


def _reserve(folder: str, begin: Any, results: Any) -> None:
    budget = jaxdp.Budget(folder)
    begin.wait()
    results.put(_fill(budget))


def _fill(budget: jaxdp.Budget) -> int:
    """Reserves until nothing fits; returns how often it did."""
    one = accounting.full_batch_gaussian(400.0, 1, "replace_one")
    for done in range(1000):
        try:
            budget.reserve(one, delta=1e-8, relation="replace_one")
        except ValueError:
            return done
    raise AssertionError("the budget has no end")


def test_processes_that_race_lose_nothing(tmp_path: Path) -> None:
    """Another process and this one fill one budget; together exactly what it holds."""
    how: Any = {"epsilon": 0.1, "composition": "renyi"}
    budget, alone = (made(tmp_path / name, **how) for name in ("race", "alone"))
    context = multiprocessing.get_context("spawn")
    results, begin = context.Queue(), context.Barrier(2)
    args = (str(tmp_path / "race"), begin, results)
    other = context.Process(target=_reserve, args=args)
    other.start()
    begin.wait()
    total = _fill(budget) + results.get(timeout=300)
    other.join()
    assert total == len(budget.reservations) == _fill(alone)


def test_other_names_of_a_budget_have_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to the file in another folder, and a folder whose file ``lock`` is gone."""
    budget = made(tmp_path / "budget")
    (tmp_path / "budget" / "lock").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "budget" / budgets.FILE)
    held, check = [], budgets._check_room

    def checked(*given: Any) -> None:
        with (tmp_path / "link").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        check(*given)

    monkeypatch.setattr(budgets, "_check_room", checked)
    one = accounting.full_batch_gaussian(400.0, 1, "replace_one")
    budget.reserve(one, delta=1e-8, relation="replace_one")
    assert held == [True]


def test_a_line_is_in_the_file_that_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An equal one is put in its place while a process waits for the lock, or writes."""
    budget, path = made(tmp_path / "budget"), tmp_path / "budget" / budgets.FILE
    one = accounting.full_batch_gaussian(400.0, 1, "replace_one")
    wait, times = budgets._locked, [1]

    def exchange() -> None:
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").rename(path)

    @contextlib.contextmanager
    def waited(file: Any) -> Any:
        if times.pop() if times else 0:
            exchange()
        with wait(file):
            yield

    monkeypatch.setattr(budgets, "_locked", waited)
    budget.reserve(one, delta=1e-8, relation="replace_one")
    assert len(budget.reservations) == 1
    check = budgets._check_room

    def checked(*given: Any) -> None:
        check(*given)
        exchange()

    monkeypatch.setattr(budgets, "_check_room", checked)
    with pytest.raises(ValueError, match="exchanged while a line was written"):
        budget.reserve(one, delta=1e-8, relation="replace_one")


def loss(w: Any, x: Any) -> Any:
    return ((w - x) ** 2).sum(axis=-1)


def test_runs_reserve_before_they_begin(tmp_path: Path) -> None:
    budget, plan = made(tmp_path / "budget"), plan_of(1.4)
    task: Any = {"value_fn": loss, "optimizer": optax.sgd(0.1)}
    w, data = jnp.zeros(2), jnp.ones((8, 2))
    for seed in range(2):
        keys = jaxdp.Keys.insecure(seed)
        jaxdp.fit(
            plan, keys, w, data, ledger=tmp_path / f"{seed}", budget=budget, **task
        )
        assert len(budget.reservations) == seed + 1
    assert budget.reservations[0].what.endswith("/0")
    assert budget.reservations[0].epsilon == plan.epsilon()
    header = ledger.read(tmp_path / "0").header
    assert header["run"] == budget.reservations[0].run
    assert header["budget"] == budget.id
    jaxdp.resume(tmp_path / "0", w, data, **task)
    assert len(budget.reservations) == 2
    keys = jaxdp.Keys.from_entropy()
    with pytest.raises(ValueError, match="have room for dpzero"):
        jaxdp.fit(plan, keys, w, data, ledger=tmp_path / "2", budget=budget, **task)
    assert not (tmp_path / "2" / "ledger.jsonl").exists()
    (tmp_path / "file").write_text("")
    free = made(tmp_path / "free")
    place = tmp_path / "file" / "run"
    with pytest.raises(ValueError, match="a folder that can be written"):
        jaxdp.fit(plan, keys, w, data, ledger=place, budget=free, **task)
    assert not free.reservations
    jaxdp.fit(plan, keys, w, data, **task)  # Its keys were not spent.
    other = plan_of(1.4, relation="zero_out")
    with pytest.raises(ValueError, match="relation must be the budget's"):
        jaxdp.fit(other, jaxdp.Keys.insecure(0), w, data, budget=budget, **task)
    with pytest.raises(TypeError, match="budget must be"):
        jaxdp.fit(plan, jaxdp.Keys.insecure(0), w, data, budget=3.0, **task)


def test_a_stop_that_was_not_entered_spends_nothing(tmp_path: Path) -> None:
    """A context manager made of a generator can be called: then it decorates."""
    budget, plan = made(tmp_path / "budget"), plan_of(1.4)
    task: Any = {"value_fn": loss, "optimizer": optax.sgd(0.1), "budget": budget}
    w, data, folder = jnp.zeros(2), jnp.ones((8, 2)), tmp_path / "run"
    keys, wrong = jaxdp.Keys.from_entropy(), jaxdp.stop_on_signal()
    part = "stop must be .* `with jaxdp.stop_on_signal\\(\\) as stop:`, got the manager"
    with pytest.raises(TypeError, match=part):
        jaxdp.fit(plan, keys, w, data, ledger=folder, stop=wrong, **task)
    assert not budget.reservations and not folder.exists()
    with pytest.raises(jaxdp.Stopped):  # Its keys were not spent.
        jaxdp.fit(plan, keys, w, data, ledger=folder, stop=lambda: True, **task)
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(TypeError, match=part):
        jaxdp.resume(folder, w, data, stop=wrong, new_attempt=True, **task)
    assert len(budget.reservations) == 1
    assert (folder / "ledger.jsonl").read_bytes() == before
    with jaxdp.stop_on_signal() as stop:
        jaxdp.resume(folder, w, data, stop=stop, **task)


class Killed(BaseException):
    pass


def killed_at(moment: int, calls: list[str], monkeypatch: Any) -> Any:
    """A context in which the process ends before its write number ``moment``."""

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            if len(calls) == moment:
                raise Killed
            calls.append(function.__name__)
            return function(*args)

        return call

    patch = monkeypatch.context()
    with_patch = contextlib.ExitStack()
    patched = with_patch.enter_context(patch)
    for name in ("fsync", "replace"):
        patched.setattr(os, name, counted(getattr(os, name)))
    return with_patch


def start(budget: jaxdp.Budget, folder: Path) -> str:
    """What ``fit`` writes up to a run's ledger, without the run."""
    plan = plan_of()
    ledger.check_new(folder)
    run = budgets.reserve_run(budget, plan, folder, unit="record")
    budgets.begin(budget, run)
    header, secret = {"run": run}, {"key": "00" * 32}
    ledger.Ledger.create(folder, plan="{}", header=header, secret=secret).close()
    return run


@pytest.mark.parametrize("composition", ["basic", "renyi"])
def test_a_run_that_is_killed_before_it_began_is_charged_once(
    tmp_path: Path, monkeypatch: Any, composition: Any
) -> None:
    """Killed before every write, in its folder and in a copy of it as it is then.

    No reservation is that of two ledgers. A run that is started again is charged again
    only where it was killed between the use of its reservation and its ledger.
    """
    charged, moment = [], 0
    while True:
        place, calls = tmp_path / str(moment), []
        budget = made(place / "budget", epsilon=50.0, composition=composition)
        run, copy = place / "run", place / "copy"
        with killed_at(moment, calls, monkeypatch), contextlib.suppress(Killed):
            start(budget, run)
        if len(calls) < moment:
            break
        if run.exists():
            shutil.copytree(run, copy)
        used, there = budget._read().begun, (run / ledger.LEDGER).exists()
        for folder in (run, copy):
            if not (folder / ledger.LEDGER).exists():
                start(budget, folder)
            if folder == run:
                charged.append(len(budget.reservations))
                assert charged[-1] == (2 if used and not there else 1), moment
        reserved = [each.run for each in budget.reservations]
        ran = {ledger.read(folder).header["run"] for folder in (run, copy)}
        assert len(reserved) == len({*reserved}) and ran <= {*reserved}
        # A copy of the folder of a run that had begun is that run.
        assert len(ran) == 2 or ran == {reserved[0]}, moment
        moment += 1
    assert charged[:4] == [1] * 4 and 2 in charged and charged[-1] == 1


def test_two_processes_do_not_use_one_reservation(tmp_path: Path) -> None:
    budget, plan = made(tmp_path / "budget"), plan_of()
    folder = tmp_path / "run"
    first, second = (
        budgets.reserve_run(budget, plan, folder, unit="record") for _ in range(2)
    )
    assert first == second == ledger.reserved(folder)
    assert len(budget.reservations) == 1
    budgets.begin(budget, first)
    with pytest.raises(ValueError, match="another process began"):
        budgets.begin(jaxdp.Budget(budget.folder), second)
    with pytest.raises(ValueError, match="must have a reservation of the run none"):
        budgets.begin(budget, "none")
    # Its reservation is used up; nor does one of another cost stand.
    third = budgets.reserve_run(budget, plan, folder, unit="record")
    assert third != first
    budgets.reserve_run(budget, plan_of(0.8), folder, unit="record")
    assert [round(x.epsilon, 2) for x in budget.reservations] == [1.0, 1.0, 0.8]


def test_systems_without_locks_charge_every_start(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(ledger, "fcntl", None)
    budget, plan = made(tmp_path / "budget"), plan_of()
    for _ in range(2):
        budgets.reserve_run(budget, plan, tmp_path / "run", unit="record")
    assert len(budget.reservations) == 2


def test_a_budget_of_before_ids_is_read(tmp_path: Path) -> None:
    budget = made(tmp_path)
    assert len(budget.id) == 32 != made(tmp_path / "other").id
    header = {"budget": 1} | {k: x for k, x in budget.header.items() if k != "id"}
    header["budget"] = 1
    line = {"what": "a", "cost": {"epsilon": 1.0, "delta": 0.0}, "epsilon": 1.0}
    lines = (json.dumps(x) + "\n" for x in (header, line | {"delta": 0.0}))
    (tmp_path / budgets.FILE).write_text("".join(lines))
    assert budget.id == "" and budget.spent()["epsilon"] == 1.0
    assert start(budget, tmp_path / "run") == budget.reservations[1].run
    (tmp_path / budgets.FILE).write_text(json.dumps(header | {"budget": 3}) + "\n")
    with pytest.raises(ValueError, match="has format 3, not 2"):
        jaxdp.Budget(tmp_path)


def test_an_attempt_with_new_noise_is_charged_as_a_run(tmp_path: Path) -> None:
    """In every copy of the folder: nothing there tells what another copy released."""
    budget, other = made(tmp_path / "b"), made(tmp_path / "c")
    run: dict[str, Any] = {"value_fn": loss, "optimizer": optax.sgd(0.1)}
    plan, w, x = plan_of(), jnp.zeros(2), jnp.ones((8, 2))
    asked = iter([False, False, True])
    with pytest.raises(jaxdp.Stopped):
        jaxdp.fit(
            *(plan, jaxdp.Keys.insecure(0), w, x),
            **(run | {"budget": budget, "ledger": tmp_path / "run", "chunk": 1}),
            stop=lambda: next(asked),
        )
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for found, got in ((None, "none"), (other, other.id)):
        words = f"run was reserved, for a new attempt: {budget.id}; got {got}"
        with pytest.raises(ValueError, match=words):
            jaxdp.resume(tmp_path / "run", w, x, new_attempt=True, budget=found, **run)
    for name in ("run", "copy"):
        jaxdp.resume(tmp_path / name, w, x, new_attempt=True, budget=budget, **run)
    first, *again = budget.reservations
    assert [x.what for x in again] == [f"new attempt of {first.run}"] * 2
    assert [x.cost for x in again] == [first.cost] * 2
    assert not other.reservations


def test_a_search_reserves_all_its_trials(tmp_path: Path) -> None:
    """Before the first one: of a search that is refused none is run, and no keys spent."""
    base = plan_of(1.0).with_noise(noise_multiplier=1.0)
    plan = tuning.calibrate(base, epsilon=2.0, delta=1e-6, mean_trials=2.0)
    budget, seen = made(tmp_path), []

    def search(keys: jaxdp.Keys) -> tuning.TuneResult:
        return jaxdp.tune(
            [(plan, optax.sgd(0.1))],
            keys,
            jnp.zeros(2),
            jnp.ones((8, 2)),
            value_fn=loss,
            score_fn=lambda result: float(seen.append(len(budget.reservations)) or 0),
            mean_trials=2.0,
            budget=budget,
        )

    found = search(jaxdp.Keys.insecure(0))
    (reserved,) = budget.reservations
    assert reserved.epsilon == found.report["epsilon"] > plan.epsilon()
    assert json.loads((tmp_path / budgets.FILE).read_text().split("\n")[1])["cost"] == {
        "epsilon": reserved.epsilon,
        "delta": 1e-6,
    }
    trials, keys = len(seen), jaxdp.Keys.from_entropy()
    with pytest.raises(ValueError, match="budget must have room for tune"):
        search(keys)
    assert seen == [1] * trials and budget.reservations == (reserved,)
    keys_lib.check_unspent(keys, "tune")


@pytest.mark.parametrize("composition", ["gaussian", "renyi"])
def test_the_samplers_of_the_noise_are_paid(tmp_path: Path, composition: Any) -> None:
    """The other sums are of ideal noise."""
    plan = plan_of()
    cost = made(tmp_path, composition=composition).reserve(plan).cost
    want = accounting.sampler_error(plan.event)
    assert (cost["sampler_epsilon"], cost["sampler_delta"]) == want
    assert min(want) > 0


def test_a_negative_count_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """Else every later reading would call the file broken."""
    budget = made(tmp_path, relation="zero_out", composition="renyi")
    plan = plan_of(relation="zero_out")
    event = dp.SelfComposedDpEvent(plan.event, -5)
    wrong = accounting.Guarantee(event, plan.event_relation)
    with pytest.raises(ValueError, match=r"finite epsilon >= 0, got one without noise"):
        budget.reserve(wrong, delta=1e-6, relation="zero_out")
    assert budget.reservations == ()
