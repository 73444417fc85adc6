"""Keys: roots, roles, entropy, and that nothing secret shows."""

import copy
import dataclasses
import functools
import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import Keys, dpgd, plans, sampling
from jaxdp.core import keys, run_state
from jaxdp.dpzero.transform import laplace_noise, step_noise
from jaxdp.kernels import lattice_gaussian

PLAIN: dict[str, Any] = {
    "num_examples": 10,
    "num_steps": 3,
    "sampling": sampling.FullBatch(),
    "relation": "zero_out",
    "l2_clip_norm": 1.0,
    "noise_multiplier": 2.0,
}


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


def test_keys_from_entropy_serve_one_run_whatever_its_family() -> None:
    entropy = Keys.from_entropy()
    keys.spend(entropy, "dpzero")
    for use in ("dpzero", "dpgd", "tune", "run", "what nobody has heard of"):
        with pytest.raises(ValueError, match=r"served a run: .*metrics.private_choice"):
            keys.spend(entropy, use)
        with pytest.raises(ValueError, match="from_entropy"):
            keys.check_unspent(entropy, use)
    insecure = Keys.insecure(0)
    keys.spend(insecure, "dpzero")
    keys.spend(insecure, "dpgd")


@pytest.mark.parametrize("run", ["dpgd", "tune"])
@pytest.mark.parametrize("first", [True, False])
def test_a_private_gap_belongs_beside_a_run(run: str, first: bool) -> None:
    entropy = Keys.from_entropy()
    uses = [run, "private_gap"] if first else ["private_gap", run]
    for use in uses:
        keys.spend(entropy, use)
    for use in uses:
        with pytest.raises(ValueError, match="already served"):
            keys.spend(entropy, use)


def test_a_search_has_trials_of_its_own_and_takes_the_place_of_a_run() -> None:
    entropy = Keys.from_entropy()
    keys.spend(entropy, "tune")
    for index in range(2):
        trial = keys.trial(entropy, index)
        keys.spend(trial, "dpzero")
        with pytest.raises(ValueError, match="already served"):
            keys.spend(keys.trial(entropy, index), "dpgd")
    with pytest.raises(ValueError, match="already served"):
        keys.spend(entropy, "dpzero")


def rebuilt(k: Keys) -> Keys:
    return jax.tree.map(lambda x: x, k)


@pytest.mark.parametrize("field", ["", "direction", "noise", "sampling", "noise_words"])
def test_keys_that_are_rebuilt_are_as_spent(field: str) -> None:
    """A mark is of what the roots are, and of each secret one."""
    entropy, other = Keys.from_entropy(), Keys.from_entropy()
    keys.spend(entropy, "dpzero")
    again = rebuilt(entropy)
    if field:
        again = dataclasses.replace(again, **{field: getattr(other, field)})
    with pytest.raises(ValueError, match="already served"):
        keys.spend(again, "dpgd")
    keys.spend(rebuilt(other), "dpgd")
    with pytest.raises(ValueError, match="already served"):
        keys.spend(other, "dpgd")


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, pickle.dumps, cloudpickle.dumps],
    ids=["copy", "deepcopy", "pickle", "cloudpickle"],
)
def test_private_keys_are_neither_copied_nor_pickled(duplicate: Any) -> None:
    with pytest.raises(TypeError, match=r"^keys .*broadcast"):
        duplicate(Keys.from_entropy())
    made = duplicate(Keys.insecure(3))
    made = pickle.loads(made) if isinstance(made, bytes) else made
    assert all_words(made) == all_words(Keys.insecure(3))
    assert made.private is False


def test_nothing_that_holds_private_keys_is_pickled() -> None:
    tx = dpgd(plans.DPGD(**PLAIN), Keys.from_entropy())
    with pytest.raises(TypeError, match="keys"):
        cloudpickle.dumps(tx)


def in_a_fork(function: Callable[[], object]) -> str:
    """What a child of this process says."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_has_no_use_for_the_keys_of_its_parent() -> None:
    k = Keys.from_entropy()
    same = rebuilt(k)
    for use in (
        lambda: keys.spend(k, "dpzero"),
        lambda: keys.spend(same, "dpzero"),
        lambda: keys.check_unspent(k, "private_gap"),
        lambda: k.broadcast(),
        lambda: keys.spend(dataclasses.replace(k, sampling=k.noise), "dpzero"),
    ):
        said = in_a_fork(use)
        assert said.startswith("ValueError: keys must be of this process"), said
    insecure = Keys.insecure(0)
    assert in_a_fork(lambda: keys.spend(insecure, "dpzero")) == "nothing"
    keys.spend(k, "dpzero")


def test_keys_of_another_process_stay_its_own() -> None:
    theirs = dataclasses.replace(Keys.from_entropy(), process=os.getpid() + 1)
    for k in (theirs, rebuilt(theirs), keys.trial(theirs, 0)):
        with pytest.raises(ValueError, match="of this process"):
            keys.spend(k, "dpzero")
    # Insecure ones are of no process: their trees are alike everywhere.
    assert Keys.insecure(0).process == keys.trial(Keys.insecure(0), 0).process == 0


def begin(entropy: Keys) -> Any:
    return dpgd(plans.DPGD(**PLAIN), entropy).init


#: Ways to trace an init, with params passed in, closed over, and with traced keys.
TRACED: dict[str, Callable[[Keys], Any]] = {
    "jit": lambda k: jax.jit(begin(k))(jnp.zeros(3)),
    "jit, closed over": lambda k: jax.jit(lambda: begin(k)(jnp.zeros(3)))(),
    "jit, numpy": lambda k: jax.jit(lambda: begin(k)(np.zeros(3, np.float32)))(),
    "jit of keys": lambda k: jax.jit(lambda k: begin(k)(jnp.zeros(3)))(k),
    "vmap": lambda k: jax.vmap(begin(k))(jnp.zeros((2, 3))),
    "vmap, closed over": lambda k: jax.vmap(
        lambda _: begin(k)(np.zeros(3, np.float32))
    )(jnp.arange(2)),
    "scan": lambda k: jax.lax.scan(
        lambda c, _: (c, begin(k)(jnp.zeros(3)).count), 0, None, length=2
    ),
    "grad": lambda k: jax.grad(lambda x: begin(k)(x).release.sum())(jnp.zeros(3)),
    "eval_shape": lambda k: jax.eval_shape(begin(k), jnp.zeros(3)),
    "compile-time": lambda k: jax.jit(lambda: compile_time(begin(k)))(),
}


def compile_time(init: Any) -> Any:
    with jax.ensure_compile_time_eval():
        return init(np.zeros(3, np.float32))


@pytest.mark.parametrize("how", TRACED)
def test_private_keys_begin_no_traced_run(how: str) -> None:
    """Its program could be called again, on other data, with the same noise."""
    k = Keys.from_entropy()
    with pytest.raises(
        ValueError, match=r"^keys .*jax.jit\(tx.init\).*ShapeDtypeStruct"
    ):
        TRACED[how](k)
    begin(k)(jnp.zeros(3))  # Nothing was spent.


@pytest.mark.parametrize("how", TRACED)
def test_insecure_keys_are_traced_as_one_likes(how: str) -> None:
    TRACED[how](Keys.insecure(0))
    TRACED[how](Keys.insecure(0))


def test_a_tracer_that_escaped_begins_no_run() -> None:
    k, leaked = Keys.from_entropy(), []
    jax.jit(lambda x: leaked.append(x))(jnp.zeros(3))
    with pytest.raises(ValueError, match="traced"):
        keys.spend(k, "dpzero", leaked)
    keys.spend(k, "dpzero")


def test_shapes_come_from_insecure_keys() -> None:
    shapes = jax.eval_shape(begin(Keys.insecure(0)), jnp.zeros(3))
    state = begin(Keys.from_entropy())(jnp.zeros(3))
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)


def test_the_library_traces_for_shapes_alone_and_spends_nothing() -> None:
    k = Keys.from_entropy()
    with keys.shapes_only():
        jax.eval_shape(begin(k), jnp.zeros(3))
        jax.eval_shape(begin(k), jnp.zeros(3))
        begin(k)(jnp.zeros(3))  # Not traced: this is the run.
        with pytest.raises(ValueError, match="already served"):
            begin(k)(jnp.zeros(3))
    with pytest.raises(ValueError, match="traced"):
        jax.eval_shape(begin(k), jnp.zeros(3))


def test_a_run_that_goes_on_may_use_its_own_keys_alone() -> None:
    own, other = Keys.from_entropy(), Keys.from_entropy()
    keys.spend(own, "dpzero")
    keys.spend(own, "private_gap")
    keys.spend(other, "dpzero")
    with keys.resuming(own):
        keys.check_unspent(own, "dpzero")
        keys.spend(own, "dpzero")
        with pytest.raises(ValueError, match="already served"):
            keys.spend(other, "dpzero")
        with pytest.raises(ValueError, match="already served"):
            keys.spend(own, "private_gap")
    with pytest.raises(ValueError, match="already served"):
        keys.spend(own, "dpzero")


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


def test_laplace_noise_depends_on_noise_words_and_plan_alone() -> None:
    """Two builds with the same keys share noise; no other root is in it."""
    k, other = Keys.insecure(5), Keys.insecure(6)

    def table(keys: Keys = k, **changes: object) -> np.ndarray:
        return laplace_noise(_plan(noise="laplace", **changes).numbers, keys, "dpzero")

    np.testing.assert_array_equal(table(), table())
    for root in ("direction", "noise", "sampling"):
        moved = dataclasses.replace(k, **{root: getattr(other, root)})
        np.testing.assert_array_equal(table(), table(moved))
    changed = dataclasses.replace(k, noise_words=other.noise_words)
    assert not np.any(table() == table(changed))
    for others in (table(num_steps=21), table(l2_clip_norm=1.5)):
        assert not np.any(table() == others[:20])
    entropy = [table(Keys.from_entropy()) for _ in range(2)]
    assert not np.array_equal(*entropy)


def test_laplace_noise_of_traced_keys_names_the_way_out() -> None:
    plan = _plan(noise="laplace")
    with pytest.raises(ValueError, match='noise="discrete"'):
        jax.vmap(
            lambda s: jnp.asarray(laplace_noise(plan.numbers, Keys.insecure(s), "x"))
        )(jnp.arange(2))


def test_gaussian_noise_depends_on_the_noise_root_and_the_plan_alone() -> None:
    """What is drawn on the device: step by step, under traced keys too."""
    k, other = Keys.insecure(5), Keys.insecure(6)

    @functools.partial(jax.jit, static_argnums=1)
    def table(keys: Keys, plan: plans.DPZero) -> jax.Array:
        root = run_state.noise_root(plan.run, keys)
        return jax.vmap(lambda t: step_noise(plan.numbers, root, t))(jnp.arange(20))

    base = np.asarray(table(k, _plan()))
    assert base.shape == (20, 1)
    assert len(set(base.ravel().tolist())) == 20
    for root in ("direction", "noise_words", "sampling"):
        moved = dataclasses.replace(k, **{root: getattr(other, root)})
        np.testing.assert_array_equal(base, table(moved, _plan()))
    changed = dataclasses.replace(k, noise=other.noise)
    assert not np.any(base == table(changed, _plan()))
    for plan in (_plan(num_steps=21), _plan(l2_clip_norm=1.5)):
        assert not np.any(base == table(k, plan))


def test_roots_of_secrets_have_128_bits_and_the_public_one_64() -> None:
    """All of them count: noise of roots that differ in one word is other noise."""
    for k in (Keys.insecure(1), Keys.from_entropy()):
        assert [len(data(root)) for root in typed_roots(k)] == [2, 4, 4]
        assert k.noise_words.shape == (8,)
    words = np.array(data(Keys.insecure(1).noise), np.uint32)
    law, drawn = lattice_gaussian.law(1000), set()
    for place in range(4):
        root = keys.from_words(words ^ (np.arange(4) == place))
        key = keys.stream(root, "noise", 0, context=7)
        drawn.add(tuple(np.asarray(lattice_gaussian.draw(key, (8,), law)).tolist()))
    assert len(drawn) == 4


def test_keys_pass_through_jit_and_keep_their_static_part() -> None:
    k = Keys.insecure(2)
    out = jax.jit(lambda x: x)(k)
    assert out.private is False
    chex.assert_trees_all_equal(
        jax.random.key_data(out.direction), jax.random.key_data(k.direction)
    )
