"""``fit(donate_params=True)``: one set of parameters, the same bits, and refusals."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys
from jaxdp.training import isolation, loop, preparing
from tests.training.problem import DATA, PARAMS, make_plan, value_fn

PLAN = make_plan(num_steps=6)
TASK: dict[str, Any] = {"value_fn": value_fn, "optimizer": optax.sgd(0.1)}


def fresh() -> Any:
    return jax.tree.map(jnp.array, PARAMS)


def run(params: Any, **given: Any) -> jaxdp.FitResult:
    return jaxdp.fit(PLAN, Keys.insecure(0), params, DATA, **(TASK | given))


def deleted(params: Any) -> list[bool]:
    return [leaf.is_deleted() for leaf in jax.tree.leaves(params)]


def test_the_same_run_with_the_callers_buffers(tmp_path: Path) -> None:
    """In one program, in chunks, with a callback and a ledger that is resumed."""
    kept, given = fresh(), fresh()
    want = run(kept)
    assert deleted(kept) == [False, False]
    got = run(given, donate_params=True)
    assert deleted(given) == [True, True]
    chex.assert_trees_all_equal((got.params, got.info), (want.params, want.info))
    seen, given = [], fresh()
    got = run(
        given,
        donate_params=True,
        ledger=tmp_path,
        chunk=4,
        callback=lambda step, params, info: seen.append((step, params)),
    )
    assert deleted(given) == [True, True]
    assert [step for step, _ in seen] == [4, 6]
    chex.assert_trees_all_equal(seen[-1][1], want.params)
    chex.assert_trees_all_equal((got.params, got.info), (want.params, want.info))
    again = jaxdp.resume(tmp_path, fresh(), DATA, **TASK)
    chex.assert_trees_all_equal(again.params, want.params)


@pytest.mark.parametrize("chunk", [None, 4])
def test_one_set_of_parameters(chunk: int | None) -> None:
    """The program updates its carry in place, and no copy of the parameters is left."""
    size = 4099  # Of no other array.

    def losses(params: Any, batch: Any) -> jax.Array:
        return params[:7] @ batch[0].T + params.sum()

    for donate, sets in ((True, 1), (False, 2)):
        params, seen = jnp.ones(size), []

        def count(seen: list[int] = seen, *_: Any) -> None:
            found = [x for x in jax.live_arrays() if x.shape == (size,)]
            alive = [x for x in found if not x.is_deleted()]
            seen.append(len({x.unsafe_buffer_pointer() for x in alive}))

        given: dict[str, Any] = {"value_fn": losses, "donate_params": donate}
        if chunk is not None:  # What a callback is shown is a copy.
            given |= {"chunk": chunk, "callback": lambda *_, count=count: count()}
        result = run(params, **given)
        count()
        assert seen[-1] == sets, (donate, seen)
        assert seen[:-1] == [sets + 1] * (len(seen) - 1)
        *_, found = loop._programs.values()
        assert found.program.memory_analysis().alias_size_in_bytes >= params.nbytes
        del result, params


def test_a_warning_of_the_end_needs_no_donated_array() -> None:
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    with pytest.warns(UserWarning, match="100% of the parameters"):
        run(ones, donate_params=True, optimizer=optax.sgd(1e-12))


def test_refusals_leave_the_params() -> None:
    given = fresh()
    with pytest.raises(TypeError, match=r"donate_params must be .*'hidden/w' as a nda"):
        run(jax.tree.map(np.asarray, given), donate_params=True)
    with pytest.raises(ValueError, match="'out' in the buffer of another leaf"):
        run({"hidden": given["out"], "out": given["out"]}, donate_params=True)
    with pytest.raises(TypeError, match="donate_params"):
        run(given, donate_params=1)
    with pytest.raises(TypeError, match="callback"):
        run(given, donate_params=True, callback=3)
    assert deleted(given) == [False, False]
    run(given, donate_params=True)
    with pytest.raises(ValueError, match="'hidden/w', which is deleted"):
        run(given, donate_params=True)


def test_a_lazy_loss_is_tried_a_layer_at_a_time() -> None:
    """The check of isolation moves what the loss asks for, and finds what it found."""

    def losses(params: Any, batch: Any, at: Any) -> jax.Array:
        x = batch[0] - batch[0].mean(axis=0) if mixes else batch[0]
        return jnp.tanh(x @ at("hidden/w", params["hidden"]["w"])) @ at(
            "out", params["out"]
        )

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)  # There, a mean would go unseen.
    for mixes in (False, True):
        loss = jaxdp.LazyLoss(lambda *given: losses(*given))
        if not mixes:
            run(zeros, value_fn=loss)
            continue
        with pytest.raises(ValueError, match="value_fn is not per record"):
            run(zeros, value_fn=loss)


@pytest.mark.parametrize("where", ["in layers alone", "besides", "in both ways"])
def test_a_lazy_loss_is_moved_everywhere(where: str) -> None:
    """A mean is seen only where layers differ, or where what is read as it is moves."""
    params = {"layers": jnp.full((2, 2), 0.1), "gate": jnp.zeros(())}

    def losses(params: Any, batch: Any, at: Any) -> jax.Array:
        one, two = (at("layers", params["layers"][i], i) for i in (0, 1))
        out = batch[:, :2] @ one
        gate = (one - two).sum() if where == "in layers alone" else params["gate"]
        if where == "in both ways":
            out += 0 * at("gate", params["gate"])
        return jnp.tanh(out + gate * out.mean())

    loss, data = jaxdp.LazyLoss(losses), jnp.ones((8, 2))
    with pytest.raises(ValueError, match="not per record"):
        isolation.made_up_check(loss, params, data)(params)


def test_what_is_the_data_or_the_optimizers_is_not_given_away_twice() -> None:
    rows = jnp.ones((8, 2))
    with pytest.raises(
        ValueError, match="in the buffer of another leaf or of the data"
    ):
        preparing.check_donated({"w": rows}, {"x": rows}, None)
    kept = optax.GradientTransformation(
        lambda params: params,
        lambda updates, state, params=None: (updates, state),
    )
    result = run(fresh(), donate_params=True, optimizer=kept)
    chex.assert_trees_all_equal(result.info.state, PARAMS)


@pytest.mark.parametrize("donate", [False, True])
def test_a_state_that_holds_one_array_twice(donate: bool) -> None:
    result = run(fresh(), donate_params=donate, optimizer=optax.contrib.cocob())
    assert np.isfinite(result.params["out"]).all()


def test_leaves_that_are_read_through_the_view_alone_are_not_moved_twice() -> None:
    """Of a scan over layers too, whose slices the program takes before it asks."""
    params = {"layers": jnp.ones((3, 2, 2)), "raw": jnp.ones(2)}

    def losses(params: Any, batch: Any, at: Any) -> jax.Array:
        def layer(x: jax.Array, given: tuple) -> tuple[jax.Array, None]:
            w, i = given
            return x @ at("layers", w, i), None

        x, _ = jax.lax.scan(layer, batch, (params["layers"], jnp.arange(3)))
        return x @ (params["raw"] + at("raw", params["raw"]))

    batch = jnp.ones((4, 2))
    assert isolation._asked(jaxdp.LazyLoss(losses), params, batch) == {"layers"}
