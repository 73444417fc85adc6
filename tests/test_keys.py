"""Keys: roots, roles, entropy, and that nothing secret shows."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import Keys, keys, plans, sampling
from jaxdp.transforms.dpzero import exact_noise


def data(key: jax.Array) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def all_words(k: Keys) -> tuple[int, ...]:
    typed = (k.direction, k.noise, k.sampling)
    return sum((data(x) for x in typed), ()) + tuple(np.asarray(k.noise_words).tolist())


def test_insecure_is_reproducible_and_separates_seeds_and_roots() -> None:
    assert all_words(Keys.insecure(7)) == all_words(Keys.insecure(7))
    seeds = [0, 1, 7, 2**32 + 7, 2**40 + 7, 2**200 + 7]
    words = [all_words(Keys.insecure(s)) for s in seeds]
    assert len(set(words)) == len(seeds)  # More than 32 bits of the seed count.
    roots = [data(k) for s in seeds for k in typed_roots(Keys.insecure(s))]
    assert len(set(roots)) == len(roots)


def typed_roots(k: Keys) -> tuple[jax.Array, ...]:
    return k.direction, k.noise, k.sampling


def test_insecure_takes_traced_seeds_and_agrees_with_python_integers() -> None:
    many = jax.vmap(Keys.insecure)(jnp.arange(4))
    for i in range(4):
        one = jax.tree.map(lambda x, i=i: x[i], many)
        assert all_words(one) == all_words(Keys.insecure(i))
        assert one.private is False


@pytest.mark.parametrize("bad", [True, 1.5, "1", None, jnp.ones(())])
def test_seeds_that_are_no_integers_raise(bad: object) -> None:
    with pytest.raises(TypeError, match="seed"):
        Keys.insecure(bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bad", [-1, 2**256, jnp.arange(3)])
def test_seeds_out_of_range_raise(bad: object) -> None:
    with pytest.raises(ValueError, match="seed"):
        Keys.insecure(bad)  # pyright: ignore[reportArgumentType]


def test_entropy_never_repeats_and_is_private() -> None:
    first, second = Keys.from_entropy(), Keys.from_entropy()
    assert first.private
    assert first.seed_source == "entropy"
    assert not set(all_words(first)) & set(all_words(second))
    roots = typed_roots(first)
    assert len({data(k) for k in roots}) == 3


def test_keys_from_entropy_are_spent_once_and_insecure_ones_never() -> None:
    entropy = Keys.from_entropy()
    keys.spend(entropy, "dpzero")
    keys.spend(entropy, "another use")
    with pytest.raises(ValueError, match="already served"):
        keys.spend(entropy, "dpzero")
    insecure = Keys.insecure(0)
    keys.spend(insecure, "dpzero")
    keys.spend(insecure, "dpzero")


def test_entropy_is_not_drawn_while_tracing() -> None:
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(Keys.from_entropy)()


def test_array_seeds_count_in_full_and_refuse_negatives() -> None:
    big = np.array(2**33 + 1)
    assert all_words(Keys.insecure(big)) == all_words(Keys.insecure(2**33 + 1))
    with pytest.raises(ValueError, match="seed"):
        Keys.insecure(np.array(-1))


def test_repr_shows_no_secret() -> None:
    k = Keys.from_entropy()
    assert repr(k) == "Keys(seed_source='entropy', private=True)"
    assert not re.search(r"\d{3}", repr(k))


def test_streams_differ_by_root_role_step_and_context() -> None:
    k = Keys.insecure(1)
    streams = [
        keys.stream(root, role, step, context)
        for root in typed_roots(k)
        for role in keys.ROLES
        for step in (0, 1, 2**31)
        for context in (0, 5)
    ]
    assert len({data(s) for s in streams}) == len(streams)
    assert data(keys.stream(k.noise, "noise", 3)) == data(
        keys.at_step(keys.stream(k.noise, "noise"), 3)
    )
    assert len(set(keys.ROLES.values())) == len(keys.ROLES)


def _plan(**changes: object) -> plans.DPZero:
    plan = plans.DPZero(
        num_examples=10,
        num_steps=20,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
        smoothing_radius=0.1,
        noise_multiplier=2.0,
    )
    return dataclasses.replace(plan, **changes)


def test_exact_noise_depends_on_noise_root_and_plan_alone() -> None:
    """Two builds with the same keys share noise; the direction root is not in it."""
    k, other = Keys.insecure(5), Keys.insecure(6)
    table = exact_noise(_plan(), k, "dpzero")
    np.testing.assert_array_equal(table, exact_noise(_plan(), k, "dpzero"))
    moved = dataclasses.replace(k, direction=other.direction, sampling=other.sampling)
    np.testing.assert_array_equal(table, exact_noise(_plan(), moved, "dpzero"))
    changed = dataclasses.replace(k, noise_words=other.noise_words)
    assert not np.any(table == exact_noise(_plan(), changed, "dpzero"))
    for plan in (_plan(num_steps=21), _plan(l2_clip_norm=1.5)):
        assert not np.any(table == exact_noise(plan, k, "dpzero")[:20])
    entropy = [exact_noise(_plan(), Keys.from_entropy(), "dpzero") for _ in range(2)]
    assert not np.array_equal(*entropy)


def test_exact_noise_of_traced_keys_names_the_way_out() -> None:
    with pytest.raises(ValueError, match='noise="gaussian"'):
        jax.vmap(lambda s: jnp.asarray(exact_noise(_plan(), Keys.insecure(s), "x")))(
            jnp.arange(2)
        )


def test_keys_pass_through_jit_and_keep_their_static_part() -> None:
    k = Keys.insecure(2)
    out = jax.jit(lambda x: x)(k)
    assert out.private is False
    chex.assert_trees_all_equal(
        jax.random.key_data(out.direction), jax.random.key_data(k.direction)
    )
