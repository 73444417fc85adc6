"""Users as the unit of privacy: grouping, their loss, and how far one moves a sum."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import plans, sampling
from jaxdp.core.types import UserRecords
from jaxdp.data import users as users_lib
from jaxdp.kernels import perturb
from jaxdp.saddle import oracles
from jaxdp.saddle.algorithms import players
from jaxdp.sampling import batches
from jaxdp.sosp import state as states

ROOT = Path(__file__).parents[2]


def reference(data: np.ndarray, users: list[Any], m: int, every: list[Any]) -> Any:
    rows = []
    for user in every:
        own = [x for x, of in zip(data, users, strict=True) if of == user][:m]
        pad = own[0] if own else np.zeros_like(data[0])
        rows.append((own + [pad] * (m - len(own)), [True] * len(own)))
    mask = [kept + [False] * (m - len(kept)) for _, kept in rows]
    return np.array([row for row, _ in rows]), np.array(mask)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("named", [True, False])
def test_grouping_is_that_of_a_loop(seed: int, named: bool) -> None:
    rng = np.random.default_rng(seed)
    data = rng.normal(size=(40, 3)).astype(np.float32)
    of = rng.integers(0, 9, 40)
    users: Any = [f"u{x}" for x in of] if named else of.tolist()
    every = sorted(set(users))
    got = jaxdp.by_user({"x": data}, users, records_per_user=3)
    rows, mask = reference(data, users, 3, every)
    np.testing.assert_array_equal(got.records["x"], rows)
    np.testing.assert_array_equal(got.mask, mask)
    # In an order of one's own, with users who have no record.
    every = [*rng.permutation(every).tolist(), "nobody" if named else -5]
    got = jaxdp.by_user(data, users, records_per_user=3, user_ids=every)
    rows, mask = reference(data, users, 3, every)
    np.testing.assert_array_equal(got.records, rows)
    np.testing.assert_array_equal(got.mask, mask)


def test_what_one_user_has_moves_no_row_of_another() -> None:
    """More records, fewer or others: only the user's own row changes."""
    rng = np.random.default_rng(0)
    data, of = rng.normal(size=(30, 2)), rng.integers(0, 6, 30)
    every = list(range(6))
    before = jaxdp.by_user(data, of, records_per_user=4, user_ids=every)
    keep = of != 2
    more = np.concatenate([np.full((9, 2), 7.0), data[keep]])
    names = np.concatenate([np.full(9, 2), of[keep]])
    for changed, users in ((data[keep], of[keep]), (more, names)):
        after = jaxdp.by_user(changed, users, records_per_user=4, user_ids=every)
        others = np.arange(6) != 2
        np.testing.assert_array_equal(before.records[others], after.records[others])
        np.testing.assert_array_equal(before.mask[others], after.mask[others])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"users": [0, 1]}, ValueError, "each of the 3 records, got 2"),
        ({"users": [0.5, 1.0, 2.0]}, TypeError, "integers or strings"),
        (
            {"user_ids": [0, 1, 1, 2]},
            ValueError,
            "user once, and name one twice, got a value that is kept",
        ),
        (
            {"user_ids": [0, 1]},
            ValueError,
            "every user of a record, and lack some, got a",
        ),
        ({"user_ids": ["0", "1", "2"]}, TypeError, "user_ids must be of the kind"),
        ({"records_per_user": 0}, ValueError, "records_per_user"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], error: Any, message: str) -> None:
    given = {"users": [0, 1, 2], "records_per_user": 2} | changes
    with pytest.raises(error, match=message):
        jaxdp.by_user(np.zeros((3, 1)), **given)
    with pytest.raises(TypeError, match=r"jaxdp\.by_user makes"):
        jaxdp.per_user(lambda p, x: x)(0.0, jnp.zeros((2, 2)))  # pyright: ignore


def squared(w: jax.Array, batch: jax.Array) -> jax.Array:
    return ((batch - w) ** 2).sum(axis=-1)


def grouped(values: np.ndarray, mask: np.ndarray) -> UserRecords:
    return UserRecords(jnp.asarray(values, jnp.float32), jnp.asarray(mask))


def test_the_loss_of_a_user_is_the_mean_over_their_own_records() -> None:
    rng = np.random.default_rng(1)
    values, mask = rng.normal(size=(4, 3, 2)), np.arange(3) < [[3], [1], [0], [2]]
    values[~mask] = np.nan  # What is masked counts nothing, whatever it is.
    values[3, 0] = np.inf
    w = jnp.ones(2)
    losses = jaxdp.per_user(squared)(w, grouped(values, mask))
    each = ((values - 1) ** 2).sum(axis=-1)
    assert losses[0] == pytest.approx(each[0].mean(), rel=1e-6)
    assert losses[1] == pytest.approx(each[1, 0], rel=1e-6)
    assert losses[2] == 0
    assert np.isinf(losses[3])
    lazy = jaxdp.LazyLoss(lambda p, batch, at: squared(at("", p), batch))
    made = jaxdp.per_user(lazy)
    assert isinstance(made, perturb.LazyLoss)
    np.testing.assert_array_equal(made(w, grouped(values, mask)), losses)


def plan_of(kind: Any, **more: Any) -> Any:
    return kind(
        num_examples=6,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=0.5,
        **more,
    ).with_noise(noise_multiplier=0.0)


@pytest.mark.parametrize("kind", [plans.DPZero, plans.DPGD])
def test_one_user_is_clipped_once_whatever_they_have(kind: Any) -> None:
    """A user of many extreme records moves the sum by the clip, and by no more.

    Without noise, so that the sum is seen: were records clipped, it would move by m clips.
    """
    more = {} if kind is plans.DPGD else {"smoothing_radius": 1e-2}
    plan = plan_of(kind, **more)
    m, w = 5, jnp.zeros(3)
    values = np.zeros((6, m, 3))
    values[2] = [100.0, -30.0, 7.0]  # All m records of one user point one way.
    nobody = np.ones((6, m), bool)
    nobody[2] = False
    tx = plan.transform(jaxdp.Keys.insecure(3))

    def sum_of(mask: np.ndarray) -> np.ndarray:
        state = tx.init(w)
        value_fn = jaxdp.per_user(squared)
        _, state = tx.update(
            None, state, w, value_fn=value_fn, batch=grouped(values, mask)
        )
        return np.asarray(state.release) * 6

    moved = np.linalg.norm(sum_of(np.ones((6, m), bool)) - sum_of(nobody))
    assert moved == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    "sampler", [sampling.FullBatch(), sampling.TruncatedPoisson(sampling_prob=0.9)]
)
@pytest.mark.parametrize("kind", [plans.DPZero, plans.DPGD])
def test_a_user_who_is_not_there_is_in_no_count(kind: Any, sampler: Any) -> None:
    """A count of clipped users moves by a half, as charged: not from clipped to within."""
    more = {} if kind is plans.DPGD else {"smoothing_radius": 1e-2}
    plan = kind(
        num_examples=6,
        num_steps=1,
        sampling=sampler,
        relation="add_or_remove",
        l2_clip_norm=0.5,
        clip_tuning=plans.ClipTuning(
            target_unclipped_quantile=0.5, learning_rate=0.1, count_noise_multiplier=2.0
        ),
        **more,
    ).with_noise(noise_multiplier=1.0, delta=1e-5)  # The same noise for both.
    data, ids = np.full((6, 3), 100.0), np.arange(6)
    keys = jaxdp.Keys.insecure(3)
    counts = []
    for there in (6, 5):
        users = jaxdp.by_user(
            data[:there], ids[:there], records_per_user=2, user_ids=ids
        )
        batch = sampling.batch(plan, keys, 0, users)
        assert 5 in np.asarray(batch.index)[np.asarray(batch.mask)]
        tx = plan.transform(keys)
        given = {"value_fn": jaxdp.per_user(squared), "batch": batch}
        _, state = tx.update(None, tx.init(jnp.zeros(3)), jnp.zeros(3), **given)
        counts.append(float(state.release[-1]) * plan.normalizer)
    assert abs(counts[1] - counts[0]) == pytest.approx(0.5, rel=1e-5)


def not_zero(w: jax.Array, users: UserRecords) -> jax.Array:
    """Makes something of a user without records, against the clip."""
    gone = ~jnp.any(jnp.asarray(users.mask), axis=1)
    return jaxdp.per_user(squared)(w, users) - 10 * w.sum() * gone  # pyright: ignore


def test_users_who_are_not_there_are_read_by_nobody() -> None:
    """Whatever a loss makes of them: by a search, by players, and in a tree of arrays."""
    n = 200_000
    plan = plans.SOSP.certified(
        num_examples=n,
        dim=3,
        relation="zero_out",
        epsilon=2.0,
        delta=1e-6,
        lipschitz=1.0,
        smoothness=1.0,
        hessian_lipschitz=1.0,
    )
    size, w = plan.numbers.refresh_batch_size, jnp.zeros(3)
    mask = np.ones((n, 1), bool)
    mask[:size] = False
    users = grouped(np.zeros((n, 1, 3), np.float32), mask)
    found = []
    for loss in (jaxdp.per_user(squared), not_zero):
        search = jaxdp.sosp(plan, jaxdp.Keys.insecure(0))
        state, _ = search.step(search.init(w), users, value_fn=loss)
        found.append(np.asarray(state.spider.estimate))
    np.testing.assert_array_equal(*found)

    active = jnp.ones((), bool)
    _, here = players.batch(plan.run, users, jnp.int32(size - 2), 4, active)
    assert here.tolist() == [False, False, True, True]
    tree = {"of": users, "year": np.zeros(n)}
    assert batches.present(tree).sum() == n - size
    others = grouped(np.zeros((n, 1, 3), np.float32), ~mask)
    assert not batches.present((users, others)).any()
    assert batches.present(np.zeros(3)) is None
    # Hessians and escapes read these.
    there = batches.present(users)
    of_search: Any = states.Search(plan.numbers, None, users, there, 4)  # pyright: ignore
    assert of_search.records(jnp.int32(0), 3).mask is there


def test_a_gap_reads_no_user_who_is_not_there() -> None:
    """Whatever a problem makes of one."""
    rng = np.random.default_rng(0)
    mask = np.arange(12)[:, None] < 7
    users = grouped(rng.uniform(size=(12, 1, 3)).astype(np.float32), mask)
    half = np.full(2, 0.5)
    found = []
    for lost in (0.0, 5.0):

        def value_fn(x: Any, of: Any, lost: float = lost) -> Any:
            gone = ~of.mask[:, 0]
            return of.records[:, 0, :2] @ x + lost * gone * x[0]

        gap = jaxdp.metrics.private_gap(
            *(oracles.Problem(value_fn), half, None, users, jaxdp.Keys.insecure(0)),
            noise_multiplier=1.0,
            relation="zero_out",
            linf_clip_norm_x=1.0,
            num_examples=12,
        )
        found.append(gap.value)
    assert found[0] == found[1]


def few_steps(num_examples: int) -> plans.DPZero:
    return plans.DPZero(
        num_examples=num_examples,
        num_steps=3,
        sampling=sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=1.0,
        smoothing_radius=1e-2,
    )


def test_a_run_over_users_says_so_and_has_their_number(tmp_path: Any) -> None:
    rng = np.random.default_rng(2)
    data, of = rng.normal(size=(60, 2)).astype(np.float32), rng.integers(0, 12, 60)
    users = jaxdp.by_user(data, of, records_per_user=4, user_ids=np.arange(12))
    plan = few_steps(12).calibrate(epsilon=1.0, delta=1e-3)
    task: Any = {"value_fn": jaxdp.per_user(squared), "optimizer": optax.sgd(0.1)}
    keys, w = jaxdp.Keys.insecure(0), jnp.zeros(2)
    result = jaxdp.fit(plan, keys, w, users, ledger=tmp_path / "run", **task)
    assert result.report["unit"] == "user"
    assert jaxdp.ledger.read(tmp_path / "run").header["unit"] == "user"
    again = jaxdp.resume(tmp_path / "run", w, users, **task)
    np.testing.assert_array_equal(result.params, again.params)
    assert again.report["unit"] == "user"
    assert (
        jaxdp.fit(
            plan,
            jaxdp.Keys.insecure(0),
            w,
            data[:12],
            value_fn=squared,
            optimizer=optax.sgd(0.1),
        ).report["unit"]
        == "record"
    )


def test_no_owner_has_two_of_the_chosen_records() -> None:
    rng = np.random.default_rng(3)
    owners = [
        rng.choice(30, size=rng.integers(0, 4), replace=False) for _ in range(200)
    ]
    chosen = users_lib.one_per_owner([x.tolist() for x in owners])
    counts = np.bincount(np.concatenate([owners[i] for i in chosen]), minlength=30)
    assert counts.max() == 1
    # None could be added.
    have = {x for i in chosen for x in owners[i]}
    for i in set(range(200)) - set(chosen.tolist()):
        assert have & set(owners[i].tolist())
    once = [iter(x.tolist()) for x in owners]  # Owners that can be read once.
    assert users_lib.one_per_owner(once).tolist() == chosen.tolist()  # pyright: ignore
    for several in ([("a", "b"), ("c", "d")], [("a", "b"), ("c",)], [("a",), "b"]):
        with pytest.raises(TypeError, match=r"shape \(n,\).*users\.one_per_owner"):
            jaxdp.by_user(np.zeros((2, 1)), several, records_per_user=1)
    with pytest.raises(TypeError, match="for each record, at 1 too"):
        users_lib.one_per_owner([("ann",), "ann"])
    nan = float("nan")
    for one, other in (("ann", b"ann"), (7, "7"), (nan, nan), ("ann", None)):
        with pytest.raises(TypeError, match="owners must be integers, or all of them"):
            users_lib.one_per_owner([(one,), (other,)])
    assert users_lib.one_per_owner([(7, np.int64(8)), (np.int32(7),)]).tolist() == [0]


@pytest.mark.parametrize("relation", ["zero_out", "add_or_remove", "replace_one"])
@pytest.mark.parametrize("g", [1, 5])
def test_an_owner_of_copies_moves_what_the_guide_pays_for(
    relation: Any, g: int
) -> None:
    """Rows turn round: of g old co-owners, and by ``replace_one`` also of g new ones."""
    own = [(-1.0 if j <= g else 1.0, (j,)) for j in range(1, 2 * g + 1)]
    shared = [(100.0, (0, j)) for j in range(1, g + 1)]
    others = [(-100.0, (0, j)) for j in range(g + 1, 2 * g + 1)]
    plan = plans.DPGD(
        num_examples=2 * g + 1,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation=relation,
        l2_clip_norm=1.0,
        noise_multiplier=0.0,
    )
    loss: Any = jaxdp.per_user(lambda w, x: x @ w)
    sums = []
    for records in (own + shared, own + others * (relation == "replace_one")):
        copies = [(x, owner) for x, owners in records for owner in owners]
        x, owners = zip(*copies, strict=True)
        data = np.asarray(x, np.float32)[:, None]
        ids = range(2 * g + 1)
        grouped = jaxdp.by_user(data, owners, records_per_user=2 * g, user_ids=ids)
        tx = jaxdp.dpgd(plan, jaxdp.Keys.insecure(0))
        params = jnp.zeros(1)
        state = tx.init(params)
        mean, _ = tx.update(None, state, params, value_fn=loss, batch=grouped)
        sums.append(float(mean[0]) * plan.normalizer)
    moved = abs(sums[0] - sums[1]) / plan.sensitivity
    assert moved == pytest.approx(2 * g + 1)
    guide = (ROOT / "docs/guides/users_and_budgets.md").read_text()
    assert "noise_multiplier=(2 * g + 1) * plan.noise_multiplier" in guide


def test_a_display_has_shapes_alone() -> None:
    """Of users and of batches; within a transformation, and of what is no array, too."""
    data = {"x": np.full((4, 3), 0.123456), "age": np.full(4, 77)}
    users = jaxdp.by_user(data, ["a", "b", "a", "b"], records_per_user=2)
    want = (
        "UserRecords(records={age: int64[2, 2], x: float64[2, 2, 3]}, mask=bool[2, 2])"
    )
    assert repr(users) == str(users) == want
    assert repr(users._replace(records=(0.123456, None)))[:39] == (
        "UserRecords(records=(float, None), mask"
    )
    seen = []
    jax.jit(lambda at: seen.append(repr(at)))(users)
    assert "float32[2, 2, 3]" in seen[0]
    plan = few_steps(2).with_noise(noise_multiplier=2.0)
    rows = sampling.batch(plan, jaxdp.Keys.insecure(0), 0, np.full((2, 3), 0.123456))
    assert "records=float32[2, 3], mask=bool[2], index=int32[2]" in repr(rows)
    batch = sampling.batch(plan, jaxdp.Keys.insecure(0), 0, users)
    assert "records=UserRecords(records={age: int32[2, 2], x: float32" in repr(batch)
    assert "0.123456" not in repr(batch) and "77" not in repr(batch)
    assert "True" not in repr(batch) and "sampler=FullBatch()" in repr(batch)
