"""Random search: the law of its length, what it costs, and that nothing else leaves."""

import dataclasses
import json
import math
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

import jaxdp
from jaxdp import Keys, accounting, plans, sampling, tuning
from jaxdp.accounting import lattice
from jaxdp.core import keys as keys_lib
from jaxdp.core import noise

N, D = 64, 3
TRUTH = np.array([1.0, -2.0, 0.5], np.float32)
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
DATA = (X, X @ TRUTH)
LAWS = [(3.0, 1.0), (4.0, 0.0), (2.5, 0.5)]

value_fn = jaxdp.per_record(lambda p, r: jnp.sqrt(1 + (r[0] @ p - r[1]) ** 2))


def make_plan(**changes: Any) -> plans.DPZero:
    plan = plans.DPZero(
        num_examples=N,
        num_steps=40,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=3.0,
        smoothing_radius=0.01,
        num_directions=2,
        noise_multiplier=6.0,
        delta=1e-5,
    )
    return dataclasses.replace(plan, **changes)


PLAN = make_plan()
SGD = optax.sgd(0.1)
# Too small a step, a good one, one that diverges.
CANDIDATES = [(PLAN, optax.sgd(s)) for s in (1e-5, 0.2, 100.0)]


def score(result: Any) -> float:
    """Public: how far the parameters are from what made the data."""
    return -float(jnp.sum((result.params - TRUTH) ** 2))


def search(keys: Keys, **changes: Any) -> tuning.TuneResult:
    options: dict[str, Any] = {
        "value_fn": value_fn,
        "score_fn": score,
        "mean_trials": 5.0,
    }
    options |= changes
    candidates = options.pop("candidates", CANDIDATES)
    params = options.pop("params", jnp.zeros(D))
    return jaxdp.tune(candidates, keys, params, options.pop("data", DATA), **options)


# The law of the number of trials.


def weights(mean: float, shape: float, size: int) -> np.ndarray:
    """P[1..size], from Definition 1 of Papernot & Steinke and its mean, by bisection."""

    def of(gamma: float, terms: int) -> np.ndarray:
        k = np.arange(1, terms)
        logs = np.log1p(-gamma) + np.log(k + shape) - np.log(k + 1)
        p = np.exp(np.concatenate([[0.0], np.cumsum(logs)]))
        return p / p.sum()

    low, high = 1e-3, 1 - 1e-9
    for _ in range(60):
        gamma = (low + high) / 2
        p = of(gamma, 20_000)
        low, high = (gamma, high) if p @ np.arange(1, 20_001) > mean else (low, gamma)
    return of(low, 20_000)[:size]


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_number_of_trials_follows_the_law_that_is_accounted(
    mean: float, shape: float
) -> None:
    """Chi-square at 1e-6; the law of another mean or shape is rejected at 1e-6."""
    coins = noise.Coins(b"law", f"{mean} {shape}")
    draws = np.array([tuning._num_trials(coins, mean, shape) for _ in range(6000)])
    assert draws.min() == 1

    def p_value(mean: float, shape: float) -> float:
        want = weights(mean, shape, 8) * len(draws)
        seen = np.array([np.sum(draws == k) for k in range(1, 9)])
        rest = [len(draws) - want.sum(), len(draws) - seen.sum()]
        return scipy.stats.chisquare([*seen, rest[1]], [*want, rest[0]]).pvalue

    assert p_value(mean, shape) > 1e-6
    assert p_value(mean * 1.25, shape) < 1e-6
    assert p_value(mean, 1 - shape if shape != 0.5 else 0.0) < 1e-6


@pytest.mark.parametrize("shape", [0.0, 1e-9, 0.3, 1.0])
@pytest.mark.parametrize("mean", [1.0001, 2.0, 37.0, 1e6])
def test_gamma_gives_the_mean_and_never_a_larger_one(mean: float, shape: float) -> None:
    gamma = tuning._gamma(mean, shape)
    if shape == 0:
        got = (1 / gamma - 1) / math.log(1 / gamma)
    else:
        got = shape * (1 / gamma - 1) / -math.expm1(shape * math.log(gamma))
    assert got == pytest.approx(mean, rel=1e-9)
    if shape == 1:
        assert gamma == pytest.approx(1 / mean, rel=1e-13)


@pytest.mark.slow  # A study: 1500 searches.
def test_trials_are_independent_draws_and_the_best_is_kept() -> None:
    """Thousands of searches over stand-ins for runs; each check fails at most at 1e-6."""
    lengths, picked, roots = [], [], set()
    for seed in range(1500):
        seen: list[tuple[int, bytes]] = []

        def run(index: int, keys: Keys, seen: list = seen) -> tuple[int, bytes]:
            secret = keys_lib.exact_noise_secret(keys)
            seen.append((index, secret))
            return seen[-1]

        keys = Keys.insecure(seed)
        given = (keys, tuning._coins(keys), 3, 2.0, 1.0)
        best = tuning._best(run, lambda r: r[1][0], *given)
        top = max(secret[0] for _, secret in seen)
        first = next(item for item in seen if item[1][0] == top)
        assert best == (first[0], first)
        lengths.append(len(seen))
        picked += [index for index, _ in seen]
        roots |= {secret for _, secret in seen}
    assert len(roots) == len(picked)  # No two trials share a root.
    assert scipy.stats.chisquare(np.bincount(picked, minlength=3)).pvalue > 1e-6
    # Lengths have standard deviation sqrt(2).
    assert abs(np.mean(lengths) - 2) < 4.9 * math.sqrt(2 / 1500)
    together = np.corrcoef(lengths, [p == 0 for p in _firsts(lengths, picked)])[0, 1]
    assert abs(together) < 4.9 / math.sqrt(1500)


def test_as_many_trials_are_made_as_the_keys_draw() -> None:
    """The first draw of the search's own stream; no chance in it."""
    made, drawn = [], []
    for seed in range(12):
        keys, runs = Keys.insecure(seed), []
        coins = noise.Coins(keys_lib.exact_noise_secret(keys), "tune")
        drawn.append(tuning._num_trials(coins, 3.0, 0.5))
        run = lambda index, _, runs=runs: runs.append(index)  # noqa: E731
        tuning._best(run, lambda _: 0.0, keys, tuning._coins(keys), 2, 3.0, 0.5)
        made.append(len(runs))
    assert made == drawn
    assert len(set(made)) > 3


def _firsts(lengths: list[int], picked: list[int]) -> list[int]:
    starts = np.cumsum([0, *lengths[:-1]])
    return [picked[i] for i in starts]


# What it costs.


@pytest.mark.parametrize(("mean", "shape"), [*LAWS, (10.0, 1.0)])
def test_charged_epsilon_is_that_of_repeat_and_select(
    mean: float, shape: float
) -> None:
    several = CANDIDATES if mean == 3 else CANDIDATES[1:2]  # Each is compiled.
    law: dict[str, Any] = {"mean_trials": mean, "shape": shape}
    got = search(Keys.insecure(0), candidates=several, **law).report
    event = RepeatAndSelectDpEvent(PLAN.event, mean, shape)
    extra, lost = lattice.sampler_error(event)
    assert 0 < extra < 1e-5 and lost < 1e-10
    left = (1e-5 - lost) * math.exp(-extra)
    want = RdpAccountant().compose(event).get_epsilon(left) + extra
    assert got["epsilon"] == pytest.approx(want, rel=1e-12)
    assert got["accountant"] == "RDP (repeat and select)"
    assert got["base_epsilon"] == pytest.approx(PLAN.epsilon(), rel=1e-12)
    assert got["base_epsilon"] < got["epsilon"]
    if mean >= 10:  # Where it pays: against charging the mean number of runs.
        naive = accounting.full_batch_gaussian(6.0, 40 * 10, "zero_out")
        assert got["epsilon"] < 0.7 * accounting.epsilon(*naive, 1e-5)
        assert got["epsilon"] < 3 * got["base_epsilon"]


@pytest.mark.parametrize("relation", accounting.RELATIONS)
@pytest.mark.parametrize(
    ("epsilon", "mean", "shape"), [(2.0, 10.0, 1.0), (0.3, 2.0, 0)]
)
def test_calibrated_search_spends_the_budget(
    relation: Any, epsilon: float, mean: float, shape: float
) -> None:
    plan = make_plan(relation=relation, noise_multiplier=None, delta=None)
    law = {"mean_trials": mean, "shape": shape}
    got = tuning.calibrate(plan, epsilon=epsilon, delta=1e-6, **law)
    assert (got.delta, got.l2_clip_norm) == (1e-6, plan.l2_clip_norm)
    event = RepeatAndSelectDpEvent(got.event, mean, shape)
    extra, lost = lattice.sampler_error(event)
    assert extra > 0
    left = (1e-6 - lost) * math.exp(-extra)
    spent = RdpAccountant().compose(event).get_epsilon(left) + extra
    assert epsilon * (1 - 1e-4) <= spent <= epsilon
    assert got.epsilon() < epsilon
    # Clips and radii do not enter: one noise multiplier serves all candidates.
    other = dataclasses.replace(plan, l2_clip_norm=0.5, num_directions=4)
    again = tuning.calibrate(other, epsilon=epsilon, delta=1e-6, **law)
    assert again.noise_multiplier == got.noise_multiplier
    assert again.event == got.event


def test_report_of_a_calibrated_search_says_the_budget() -> None:
    plan = tuning.calibrate(
        make_plan(noise_multiplier=None), epsilon=3.0, delta=1e-5, mean_trials=2
    )
    got = search(Keys.insecure(0), candidates=[(plan, optax.sgd(0.1))], mean_trials=2)
    assert got.report["epsilon"] == pytest.approx(3.0, rel=1e-4)
    assert got.report["epsilon"] <= 3.0


# What it gives.


def test_search_finds_the_step_size_that_works() -> None:
    """Twelve trials on average; with this seed the good candidate is among them."""
    got = search(Keys.insecure(0), mean_trials=12.0)
    assert got.candidate == 1
    assert score(got) > -0.1
    assert got.info.releases.shape == (40, 2)
    text = json.loads(json.dumps(got.report))
    assert (text["mean_trials"], text["shape"], text["num_candidates"]) == (12, 1, 3)
    assert text["algorithm"] == "dpzero"


def test_insecure_searches_repeat_and_seeds_differ() -> None:
    one, two, other = (
        search(Keys.insecure(i), candidates=CANDIDATES[1:]) for i in (2, 2, 3)
    )
    chex.assert_trees_all_equal(one[:3], two[:3])
    assert one.report == two.report
    assert one.report["private"] is False
    assert not np.array_equal(one.info.releases, other.info.releases)


def test_nothing_tells_how_many_trials_there_were(monkeypatch: Any) -> None:
    """The same winner out of one trial and out of four gives the same, to the bit."""
    results = []
    for number in (1, 4):
        monkeypatch.setattr(tuning, "_num_trials", lambda *_, n=number: n)
        scores = iter([3.0, 1.0, 2.0, 3.0])
        results.append(search(Keys.insecure(4), score_fn=lambda r, s=scores: next(s)))
    one, four = results
    chex.assert_trees_all_equal(one[:3], four[:3])
    assert one.report == four.report
    assert not any("second" in name or name == "trials" for name in one.report)


def test_no_trial_warns(monkeypatch: Any) -> None:
    """Warnings would tell how many lost, what they gave, and which compiled a program."""
    fit = tuning.training.fit
    number = iter(range(4))

    def warned(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"trial {next(number)}", UserWarning, stacklevel=2)
        return fit(*args, **kwargs)

    monkeypatch.setattr(tuning.training, "fit", warned)
    monkeypatch.setattr(tuning, "_num_trials", lambda *_: 4)
    scores = iter([1.0, 0.0, 3.0, 2.0])

    def scored(_: Any) -> float:
        warnings.warn("score of a trial", UserWarning, stacklevel=2)
        return next(scores)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        search(Keys.insecure(4), score_fn=scored)
    assert not [str(one.message) for one in said if "trial" in str(one.message)]
    assert next(number, None) is None  # All four were made.


def test_a_score_that_is_no_number_is_named() -> None:
    """By its type: the score itself may be that of any trial."""
    for score in None, "loss 1.9", 10**400:
        wrong: Any = lambda result, score=score: score  # noqa: E731
        kind = type(score).__name__
        match = f"score_fn must return a number, got one of type {kind}$"
        with pytest.raises(TypeError, match=match) as raised:
            search(Keys.insecure(0), score_fn=wrong)
        assert raised.value.__suppress_context__


def test_trials_have_keys_of_their_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(tuning, "_num_trials", lambda *_: 4)
    releases: list[np.ndarray] = []

    def see(result: Any) -> float:
        releases.append(np.asarray(result.info.releases))
        return 0.0

    search(Keys.insecure(5), score_fn=see, candidates=CANDIDATES[:1])
    # The first step has the same losses in all; directions and noise differ.
    assert len({r[0, 0].tobytes() for r in releases}) == 4


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([math.nan, 1.0, math.nan, 2.0], 3),
        ([math.nan] * 4, 0),
        ([-math.inf, math.nan, -5.0, -6.0], 2),
        ([1.0, 1.0, 0.0, 1.0], 0),
        ([0.0, math.inf, math.nan, 1.0], 1),
    ],
)
def test_nan_is_worst_and_the_first_of_equals_wins(
    monkeypatch: Any, scores: list[float], best: int
) -> None:
    monkeypatch.setattr(tuning, "_num_trials", lambda *_: 4)
    order = iter(range(4))
    got = tuning._best(
        lambda index, keys: next(order),
        scores.__getitem__,
        Keys.insecure(0),
        tuning._coins(Keys.insecure(0)),
        2,
        3.0,
        1.0,
    )
    assert got[1] == best


# Keys.


def test_keys_of_trials_are_new_reproducible_and_hide_their_number() -> None:
    parent = Keys.insecure(9)
    words = [_all_words(keys_lib.trial(k, i)) for k in (parent, Keys.insecure(10))
             for i in range(3)]  # fmt: skip
    words.append(_all_words(parent))
    roots = [root for keys in words for root in keys]
    assert len(set(roots)) == len(roots)
    assert words[1] == _all_words(keys_lib.trial(Keys.insecure(9), 1))
    # Everything, the public root too, comes from the secret one: whoever knows the
    # parent's direction root cannot tell which trial a direction root belongs to.
    moved = dataclasses.replace(parent, direction=jax.random.key(0))
    assert _all_words(keys_lib.trial(moved, 1)) == words[1]
    secret = dataclasses.replace(parent, noise_words=Keys.insecure(8).noise_words)
    assert not set(_all_words(keys_lib.trial(secret, 1))) & set(words[1])
    assert keys_lib.trial(parent, 0).private is False
    assert keys_lib.trial(Keys.from_entropy(), 0).private is True


def _all_words(keys: Keys) -> list[bytes]:
    typed = (keys.direction, keys.noise, keys.sampling)
    words = [np.asarray(jax.random.key_data(k)).tobytes() for k in typed]
    return [*words, keys_lib.exact_noise_secret(keys)]


def test_keys_from_entropy_serve_one_search_and_mistakes_spend_nothing() -> None:
    keys = Keys.from_entropy()
    with pytest.raises(ValueError, match="one loss per record"):
        search(keys, value_fn=lambda p, b: jnp.zeros(()))
    with pytest.raises(ValueError, match="num_examples"):
        search(keys, data=(X[:-1], X[:-1, 0]))
    got = search(keys, mean_trials=1.5)
    assert got.report["private"] is True
    assert got.report["seed_source"] == "entropy"
    with pytest.raises(ValueError, match="already served"):
        search(keys)
    with pytest.raises(ValueError, match="already served"):
        jaxdp.fit(PLAN, keys, jnp.zeros(D), DATA, value_fn=value_fn, optimizer=SGD)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_steps": 41}, "event"),
        ({"noise_multiplier": 7.0}, "event"),
        ({"relation": "add_or_remove"}, "relation"),
        ({"delta": 1e-6}, "delta"),
        (
            {"sampling": sampling.TruncatedPoisson(sampling_prob=0.5)},
            "event",
        ),
    ],
)
def test_candidates_that_cost_differently_are_refused(changes: Any, name: str) -> None:
    other = (make_plan(**changes), optax.sgd(0.1))
    with pytest.raises(ValueError, match=rf"the {name} .*candidates\[1\] has"):
        search(Keys.insecure(0), candidates=[(PLAN, SGD), other])


def test_candidates_of_one_cost_may_differ_in_all_else() -> None:
    others = (
        {"l2_clip_norm": 0.5, "smoothing_radius": 0.1, "direction": "rademacher"},
        {"num_directions": 1, "noise": "gaussian"},
    )
    candidates = [(PLAN, optax.adam(0.1))]
    candidates += [(make_plan(**c), SGD) for c in others]
    candidates += [(plans.DPGD(**_common(PLAN)), optax.sgd(0.1, momentum=0.9))]
    got = search(Keys.insecure(6), candidates=candidates, mean_trials=6.0)
    assert got.report["l2_clip_norm"] == candidates[got.candidate][0].l2_clip_norm


def _common(plan: plans.DPZero) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(plans.DPGD)]
    return {name: getattr(plan, name) for name in names}


def test_samplers_that_rdp_does_not_account_are_refused_with_what_works() -> None:
    sampled = sampling.TruncatedPoisson(sampling_prob=0.25)
    plan = make_plan(sampling=sampled)
    with pytest.raises(ValueError, match=r"sampling must be .*RDP.* FullBatch, Single"):
        search(Keys.insecure(0), candidates=[(plan, SGD)])
    with pytest.raises(ValueError, match="sampling must be"):
        tuning.calibrate(plan, epsilon=1.0, delta=1e-5, mean_trials=2.0)


@pytest.mark.parametrize(
    ("sampler", "relation", "num_steps"),
    [
        (sampling.SinglePass(batch_size=16), "replace_one", 4),
        (sampling.ShuffledEpochs(batch_size=16), "add_or_remove", 40),
        pytest.param(
            *(sampling.FixedSize(batch_size=16), "replace_one", 40),
            marks=pytest.mark.slow,  # Its RDP takes long; tests/accounting has it too.
        ),
        (
            sampling.TruncatedPoisson(sampling_prob=0.25, max_batch_size=N),
            "zero_out",
            40,
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_samplers_that_rdp_accounts(
    sampler: Any, relation: Any, num_steps: int
) -> None:
    plan = make_plan(
        sampling=sampler, relation=relation, num_steps=num_steps, noise_multiplier=None
    )
    plan = tuning.calibrate(plan, epsilon=2.0, delta=1e-5, mean_trials=3.0)
    event = RepeatAndSelectDpEvent(plan.event, 3.0, 1.0)
    accountant = RdpAccountant(neighboring_relation=plan.event_relation)
    spent = accountant.compose(event).get_epsilon(1e-5)
    assert plan.epsilon() < 2 * (1 - 1e-4) <= spent <= 2


def test_without_noise_nothing_is_claimed() -> None:
    silent = PLAN.with_noise(noise_multiplier=0)
    got = search(Keys.from_entropy(), candidates=[(silent, SGD)], mean_trials=1.5)
    assert got.report["epsilon"] is got.report["base_epsilon"] is None
    assert got.report["private"] is False


def test_programs_of_all_candidates_are_checked() -> None:
    """A loss that changes within the search is one of another program."""
    mode = {"train": False}

    def loss(p: jax.Array, batch: Any) -> jax.Array:
        mean = batch[0].mean(axis=0) if mode["train"] else 0.0
        return jnp.tanh((batch[0] - mean) @ p)

    def switching(result: Any) -> float:
        mode["train"] = True
        return 0.0

    with pytest.raises(ValueError, match="not per record"):
        search(Keys.insecure(0), value_fn=loss, score_fn=switching, mean_trials=20.0)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"candidates": []}, ValueError, "candidates"),
        ({"candidates": [PLAN]}, TypeError, "candidates"),
        ({"candidates": PLAN}, TypeError, "candidates"),
        ({"candidates": [("x", SGD)]}, TypeError, "plan"),
        ({"candidates": [(PLAN, 0.1)]}, TypeError, "optimizer"),
        (
            {"candidates": [(make_plan(noise_multiplier=None), SGD)]},
            ValueError,
            "noise_multiplier",
        ),
        ({"candidates": [(make_plan(delta=None), SGD)]}, ValueError, "delta"),
        ({"candidates": [(PLAN, None)]}, ValueError, "optimizer must be given"),
        ({"check_isolation": 1}, TypeError, "check_isolation"),
        ({"keys": 0}, TypeError, "keys"),
        ({"value_fn": None}, TypeError, "value_fn"),
        ({"score_fn": None}, TypeError, "score_fn"),
        ({"mean_trials": 1.0}, ValueError, "mean_trials"),
        ({"mean_trials": math.nan}, ValueError, "mean_trials"),
        ({"mean_trials": 1e300}, ValueError, "mean_trials"),
        ({"mean_trials": "3"}, TypeError, "mean_trials"),
        ({"shape": -0.5}, ValueError, "shape"),
        ({"shape": 2.0}, ValueError, "shape"),
        ({"shape": math.inf}, ValueError, "shape"),
        ({"shape": None}, TypeError, "shape"),
        ({"delta": 0.0}, ValueError, "delta"),
        ({"trainable": lambda path: False}, ValueError, "trainable"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_wrong_arguments_are_named(changes: dict, error: type, match: str) -> None:
    keys = changes.pop("keys", Keys.insecure(0))
    with pytest.raises(error, match=match):
        search(keys, **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"mean_trials": 0.5}, "mean_trials"),
        ({"shape": 1.5}, "shape"),
        (
            {"plan": make_plan(l2_clip_norm=math.inf, noise_multiplier=0)},
            "l2_clip_norm",
        ),
    ],
)
def test_wrong_arguments_of_calibrate_are_named(changes: dict, match: str) -> None:
    given: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "mean_trials": 3.0}
    given |= changes
    with pytest.raises(ValueError, match=match):
        tuning.calibrate(given.pop("plan", PLAN), **given)
