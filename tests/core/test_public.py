"""What a state shows: printed, and after ``jaxdp.public``."""

import collections
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jaxdp
from jaxdp import Keys, sampling
from jaxdp.core import keys as keys_lib
from jaxdp.core import run_state
from tests.methods import GRADIENT_MAKERS, KEYS, PARAMS, Method

CASES = pytest.mark.parametrize("case", GRADIENT_MAKERS, ids=str)


def secrets(tree: Any) -> Iterator[np.ndarray]:
    """All that is secret in a state, as numbers."""
    secret: list[Any] = []

    def is_secret(node: Any) -> bool:
        if hasattr(type(node), "SECRET"):
            secret.extend(getattr(node, name) for name in node.SECRET)
        return False

    jax.tree.flatten(tree, is_leaf=is_secret)
    for leaf in jax.tree.leaves(secret):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        # Words behind the four of a root are the role and the plan's digest: public.
        yield np.asarray(jax.random.key_data(leaf)[..., :4] if key else leaf)


def roots(keys: Keys) -> list[bytes]:
    text = keys_lib.to_hex(keys)
    return [bytes.fromhex(text[k]) for k in ("noise", "sampling", "noise_words")]


@dataclasses.dataclass(frozen=True)
class Holder:
    """A node that holds a transformation beside its state."""

    state: Any
    static: Any


jax.tree_util.register_dataclass(Holder, ("state",), ("static",))


def train_state(tx: Any, keys: Keys) -> TrainState:
    state: Any = TrainState
    return state.create(apply_fn=lambda _: keys, params=PARAMS, tx=tx)


def nnx_optimizer(tx: Any, keys: Keys) -> nnx.Optimizer:
    del keys
    return nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)


#: What holds a transformation, and so its keys and its noise.
HOLDERS: dict[str, Callable[[Any, Keys], Any]] = {
    "TrainState": train_state,
    "TrainState in a dict": lambda tx, keys: {"a": [train_state(tx, keys)], "k": keys},
    "nnx.Optimizer": nnx_optimizer,
    "tx": lambda tx, keys: Holder(tx.init(PARAMS), tx),
    "function": lambda tx, keys: Holder(tx.init(PARAMS), lambda: keys),
    "bound method": lambda tx, keys: Holder(tx.init(PARAMS), keys.broadcast),
    "keys": lambda tx, keys: Holder(tx.init(PARAMS), keys),
    "in a container": lambda tx, keys: Holder(tx.init(PARAMS), ({"f": [tx]}, keys)),
    "table": lambda tx, keys: Holder(
        tx.init(PARAMS), tuple(secrets(nnx_optimizer(tx, keys).opt_state))
    ),
    "class": lambda tx, keys: Holder(tx.init(PARAMS), local_class(keys)),
    "default": lambda tx, keys: collections.defaultdict(
        lambda: keys, {"state": tx.init(PARAMS)}
    ),
}


def local_class(keys: Keys) -> type:
    class Local:
        def keys(self) -> Keys:
            return keys

    return Local


@pytest.mark.parametrize("holder", HOLDERS)
@CASES
def test_public_leaves_no_secret_in_the_bytes(case: Method, holder: str) -> None:
    tx = optax.chain(case.make(case.plan, KEYS), optax.sgd(0.1))
    held = HOLDERS[holder](tx, KEYS)
    needles = [*roots(KEYS), *(x.tobytes() for x in secrets(tx.init(PARAMS)))]
    assert len(needles) > 3 and all(len(needle) >= 8 for needle in needles)
    before = cloudpickle.dumps(held)
    assert any(needle in before for needle in needles)
    shown = cloudpickle.dumps(jaxdp.public(held))
    assert not any(needle in shown for needle in needles)


def test_what_is_public_of_a_train_state_is_all_there() -> None:
    tx = jaxdp.dpgd(PLAN, KEYS)
    shown = jaxdp.public(train_state(tx, KEYS))
    assert isinstance(shown, TrainState)
    assert shown.apply_fn is None and shown.tx.init is None and shown.tx.update is None
    assert shown.params is PARAMS or jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), shown.params, PARAMS)
    )
    assert int(shown.opt_state.count) == 0 and shown.opt_state.noise is None
    named: Any = jaxdp.public(Holder(PARAMS, ("a", 1, 2.5, None, np.dtype(int), int)))
    assert named.static == ("a", 1, 2.5, None, np.dtype(int), int)
    boxed = nn.Partitioned(jnp.ones(2), names=("x", None))
    assert jaxdp.public(boxed).names == ("x", None)


@pytest.mark.parametrize(
    "taken_apart",
    [
        nnx.state,
        nnx.split,
        lambda o: nnx.to_pure_dict(nnx.state(o)),
        lambda o: serialization.to_state_dict(o.opt_state),
    ],
    ids=["state", "split", "dict", "serialised"],
)
@CASES
def test_states_without_their_names_are_refused(
    case: Method, taken_apart: Callable[[Any], Any]
) -> None:
    """They are dictionaries: nothing says which of their entries are secret."""
    optimizer = nnx_optimizer(optax.chain(case.make(case.plan, KEYS)), KEYS)
    with pytest.raises(TypeError, match="opt_state"):
        jaxdp.public(taken_apart(optimizer))


@pytest.mark.parametrize(
    "taken_apart",
    [lambda s: s._asdict(), tuple, list, lambda s: {"state": list(s)}],
    ids=["dictionary", "tuple", "list", "nested"],
)
@CASES
def test_parts_of_a_state_are_refused(
    case: Method, taken_apart: Callable[[Any], Any]
) -> None:
    state = case.make(case.plan, KEYS).init(PARAMS)
    with pytest.raises(TypeError, match="as its transformation made it"):
        jaxdp.public(taken_apart(state))


def test_a_key_of_noise_is_refused() -> None:
    with pytest.raises(TypeError, match="got the key of its noise"):
        jaxdp.public([KEYS.noise])


def test_nodes_that_are_nothing_without_their_function_are_refused() -> None:
    with pytest.raises(TypeError, match="Partial"):
        jaxdp.public(jax.tree_util.Partial(lambda x: KEYS, jnp.zeros(2)))


# What printing shows.

PLAN = jaxdp.plans.DPGD(
    num_examples=6,
    num_steps=3,
    sampling=sampling.FullBatch(),
    relation="zero_out",
    l2_clip_norm=1.0,
    noise_multiplier=2.0,
)


def printed(value: Any) -> list[str]:
    return [repr(value), str(value), f"{value}", f"{value!r:>9}", "%s" % (value,)]  # noqa: UP031


@CASES
def test_no_state_prints_its_secrets(case: Method) -> None:
    tx = optax.chain(case.make(case.plan, KEYS), optax.adam(0.1))
    state = tx.init(PARAMS)
    needles = [str(n) for x in secrets(state) for n in x.ravel() if abs(int(n)) > 999]
    assert needles
    for shown in (state, state[0], train_state(tx, KEYS), {"a": (state, [KEYS])}):
        for text in printed(shown):
            assert "noise=<secret>" in text and "release=Array(" in text
            assert not any(needle in text for needle in needles)
    # What is gone is no secret.
    assert "noise=None" in repr(jaxdp.public(state))


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(jaxdp.__path__, "jaxdp."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def test_every_class_with_secrets_hides_them() -> None:
    classes = {
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, type) and hasattr(value, "SECRET")
    }
    names = {cls.__name__ for cls in classes}
    assert names >= {
        "DPZeroState",
        "Correlated",
        "Running",
        "SaddleState",
        "RunningHessian",
    }
    assert len(names) >= 11
    for cls in classes:
        assert cls.__repr__ is run_state.hiding_repr, cls
        values: list[Any] = [f"value of {name}" for name in cls._fields]
        text = repr(cls(*values))
        for name in cls._fields:
            assert (f"value of {name}" in text) == (name not in cls.SECRET)
            assert (f"{name}=<secret>" in text) == (name in cls.SECRET)
