"""Networks: the lazy form is the module, records are isolated, paths are key paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import models
from jaxdp.kernels import perturb
from jaxdp.models import networks
from jaxdp.models.losses import hinge
from jaxdp.models.networks import NETWORKS, is_stacked, residual_stack

B, D, CLASSES = 7, 5, 4
RNG = np.random.default_rng(1)
X = RNG.uniform(size=(B, D)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=B).astype(np.int32)
TARGETS = RNG.standard_normal(B).astype(np.float32)

OPTIONS = {
    "linear": {},
    "mlp": {"hidden": (6, 3)},
    "residual_stack": {"width": 6, "num_layers": 3},
}
CASES = [
    ("linear", "classification"),
    ("linear", "regression"),
    ("mlp", "classification"),
    ("residual_stack", "classification"),
]


@functools.cache
def _make(name, task):
    outputs = CLASSES if task == "classification" else 1
    network = NETWORKS[name](D, outputs, task=task, output_scale=0.5, **OPTIONS[name])
    # Biases start at 0, where losing one would not show: move every leaf.
    params = jax.tree.map(
        lambda a: np.asarray(a) + 0.1, network.init(jax.random.key(0))
    )
    batch = (X, LABELS if task == "classification" else TARGETS)
    return network, params, batch, jax.jit(network.value_fn)


@pytest.mark.slow  # Every loss with every network.
@pytest.mark.parametrize(("name", "task"), CASES)
def test_losses_are_one_float32_per_record(name, task):
    network, params, batch, value_fn = _make(name, task)
    losses = value_fn(params, batch)
    assert losses.shape == (B,) and losses.dtype == jnp.float32
    outputs = np.asarray(jax.jit(network.apply)(params, X), np.float64)
    if task == "classification":
        want = np.log(np.exp(outputs).sum(1)) - outputs[np.arange(B), LABELS]
        metric = np.mean(outputs.argmax(1) == LABELS)
    else:
        want = (outputs[:, 0] - np.asarray(TARGETS)) ** 2
        metric = want.mean()
    np.testing.assert_allclose(losses, want, rtol=1e-5, atol=1e-6)
    got = jax.jit(network.metric_fn)(params, *batch)
    np.testing.assert_allclose(got, metric, rtol=1e-5)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert jax.eval_shape(network.value_fn, half, batch).dtype == jnp.float32


@pytest.mark.parametrize(("name", "task"), CASES)
def test_lazy_with_identity_is_the_module(name, task):
    network, params, batch, value_fn = _make(name, task)
    lazy = jax.jit(lambda p, b: network.lazy_fn(p, b, perturb.identity))
    np.testing.assert_array_equal(value_fn(params, batch), lazy(params, batch))


@pytest.mark.parametrize(("name", "task"), CASES)
def test_lazy_asks_for_every_leaf_by_its_key_path(name, task):
    """Adding to each leaf in ``at`` is adding to each leaf of the tree."""
    network, params, batch, value_fn = _make(name, task)
    amounts = {
        jax.tree_util.keystr(path, simple=True, separator="/"): 0.02 * (i + 1)
        for i, (path, _) in enumerate(jax.tree.leaves_with_path(params))
    }
    asked = set()

    def at(path, leaf, layer=None, after=None):
        asked.add(path)
        assert (layer is not None) == network.is_stacked(path)
        # The kernels wait for their layer's input, the small biases do not.
        assert (after is not None) == path.endswith("kernel")
        assert after is None or after.shape[0] == B
        return shifted(path, leaf, 0 if layer is None else layer)

    def shifted(path, leaf, layer):
        # Different along the last axis: a softmax does not see a common shift.
        return leaf + amounts[path] * (1 + layer) * np.arange(
            1, 1 + leaf.shape[-1], dtype=np.float32
        )

    def moved(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        if not network.is_stacked(path):
            return shifted(path, leaf, 0)
        return np.stack([shifted(path, part, i) for i, part in enumerate(leaf)])

    want = value_fn(jax.tree.map_with_path(moved, params), batch)
    got = jax.jit(lambda p, b: network.lazy_fn(p, b, at))(params, batch)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert asked == set(amounts)
    assert not np.allclose(value_fn(params, batch), want, rtol=1e-3)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_replacing_a_record_leaves_the_other_losses(name, task):
    _, params, (x, y), value_fn = _make(name, task)
    before = value_fn(params, (x, y))
    for i, row in ((0, 1e3), (3, np.nan), (B - 1, -np.inf)):
        changed_x, changed_y = np.array(x), np.array(y)
        changed_x[i], changed_y[i] = row, 1
        after = value_fn(params, (changed_x, changed_y))
        np.testing.assert_array_equal(np.delete(before, i), np.delete(after, i))


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("mlp", "residual_stack")),
    ],
)
def test_hinge_is_the_margin_s(name):
    network = NETWORKS[name](
        D, CLASSES, loss="hinge", output_scale=30.0, **OPTIONS[name]
    )
    params = network.init(jax.random.key(0))
    outputs = np.asarray(jax.jit(network.apply)(params, X), np.float64)
    labels = np.where(np.arange(B) < 2, outputs.argmax(1), LABELS).astype(np.int32)
    want = [
        max(0.0, 1 + max(np.delete(row, y)) - row[y])
        for row, y in zip(outputs, labels, strict=True)
    ]
    assert 0 < np.count_nonzero(want) < B  # On both sides of the kink.
    value_fn = jax.jit(network.value_fn)
    losses = value_fn(params, (X, labels))
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, want, rtol=1e-5, atol=1e-6)
    lazy = jax.jit(lambda p, b: network.lazy_fn(p, b, perturb.identity))
    np.testing.assert_array_equal(lazy(params, (X, labels)), losses)
    # A record's numbers, whatever they are, leave the other losses alone.
    for row in (1e30, np.nan, -np.inf):
        changed = np.array(X)
        changed[3] = row
        after = value_fn(params, (changed, labels))
        np.testing.assert_array_equal(np.delete(after, 3), np.delete(losses, 3))
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert jax.eval_shape(network.value_fn, half, (X, labels)).dtype == jnp.float32


def test_hinge_at_its_kink_and_its_ends():
    outputs = np.array([[2, 1], [1, 2], [0.5, 0], [0, 0], [np.inf, 0], [0, np.inf]])
    got = hinge(jnp.asarray(outputs, jnp.bfloat16), np.zeros(6, np.int32))
    np.testing.assert_array_equal(got, np.float32([0, 2, 0.5, 1, 0, np.inf]))
    three = hinge(jnp.array([[1.0, 5.0, 3.0]] * 3), jnp.arange(3))
    np.testing.assert_array_equal(three, [5.0, 0.0, 3.0])


def test_more_than_ten_layers_keep_their_order():
    widths = tuple(range(2, 13))  # all different: another order has no shapes
    network = networks.mlp(D, CLASSES, hidden=widths)
    params = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)))
    assert len(params) == 12
    losses = jax.eval_shape(
        lambda p: network.lazy_fn(p, (X, LABELS), perturb.identity), params
    )
    assert losses.shape == (B,)


def test_stacked_leaves_have_a_layer_axis():
    network, params, *_ = _make("residual_stack", "classification")
    assert params["blocks"]["kernel"].shape == (3, 6, 6)
    assert params["blocks"]["bias"].shape == (3, 6)
    assert is_stacked("blocks/kernel") and not is_stacked("in/kernel")
    assert network.is_stacked is is_stacked


@pytest.mark.slow  # Public starts of networks.
def test_initial_parameters():
    zero = networks.linear(D, CLASSES).init(jax.random.key(0))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(zero))
    network = networks.linear(200, 50, output_scale=0.1)
    kernels = [network.init(jax.random.key(s))["Dense_0"]["kernel"] for s in (0, 0, 1)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])
    # 10^4 draws: the deviation within 5.4 standard errors (failure below 1e-7).
    assert abs(np.std(kernels[0]) / 0.1 - 1) < 5.4 / (2 * 1e4) ** 0.5
    start = networks.mlp(D, CLASSES)
    losses = jax.jit(start.value_fn)(start.init(jax.random.key(0)), (X, LABELS))
    np.testing.assert_allclose(losses, np.log(CLASSES), rtol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_network_for_data(name):
    for source in ("wine", "diabetes"):
        data = models.load(source)
        network = models.network_for(data, name)
        expected = ("accuracy", "mean_squared_error")[source == "diabetes"]
        assert network.metric_name == expected
        params = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)))
        losses = jax.eval_shape(network.value_fn, params, data.train)
        assert losses.shape == (data.num_examples,)
        assert jax.eval_shape(network.metric_fn, params, *data.test).shape == ()


def test_refuses():
    digits = models.load("digits")
    quadratic = models.load("quadratic_identity", num_examples=2, dim=2)
    for call, message in [
        (lambda: networks.linear(0, 3), "num_features must be"),
        (lambda: networks.linear(4, 1), "num_outputs must be at least 2"),
        (lambda: networks.linear(4, 2, task="regression"), "and 1 for regression"),
        (lambda: networks.linear(4, 2, task="x"), "task must be one of"),  # pyright: ignore
        (lambda: networks.linear(4, 2, output_scale=-1.0), "output_scale must be"),
        (lambda: networks.linear(4, 2, loss="x"), "loss must be 'cross_entropy' or"),  # pyright: ignore
        (
            lambda: networks.mlp(4, loss="hinge", task="regression"),
            "'squared_error' for",
        ),
        (lambda: models.network_for(digits, loss="squared_error"), "loss must be"),
        (lambda: networks.mlp(4, 2, hidden=(0,)), "hidden must be"),
        (lambda: residual_stack(4, 2, num_layers=0), "num_layers must be"),
        (lambda: models.network_for(digits, "cnn"), "name must be one of 'linear'"),
        (lambda: models.network_for(digits, "linear", hidden=()), "no option 'hidden'"),
        (lambda: models.network_for(digits, "mlp", task="x"), "no option 'task'"),
        (lambda: models.network_for(quadratic), "models.centered_quadratic"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    network, params, (x, y), _ = _make("linear", "classification")
    for batch in ((x, y[:, None]), (x[0], y[0]), (x, y[:-1])):
        with pytest.raises(ValueError, match="batch must be"):
            network.value_fn(params, batch)
        with pytest.raises(ValueError, match="batch must be"):
            network.lazy_fn(params, batch, perturb.identity)
    for key in (0, np.zeros(2, np.uint32), jnp.zeros(2, jnp.uint32)):
        with pytest.raises(TypeError, match="typed key"):
            network.init(key)  # pyright: ignore
