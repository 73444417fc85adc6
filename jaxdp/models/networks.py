r"""Linear models and multilayer perceptrons with one loss per record.

A *loss* here is ``value_fn(params, batch) -> (B,)`` with ``batch = (x, y)``: one
float32 number for each record, computed from that record and the parameters alone (no
batch statistics, no dropout), which is what a clip on each record's slope needs.

Each network has its loss in a second, *lazy* form ``fn(params, batch, at) -> (B,)``
that asks ``at(path, leaf, layer=None, after=None)`` for every leaf where it uses it:

- path: the leaf's key path in ``params``, ``jax.tree_util.keystr(path, simple=True,
  separator="/")``, e.g. ``"Dense_0/kernel"``;
- leaf: that leaf, or (in a layer scan) its slice ``leaf[layer]``;
- layer: the index of the slice of a stacked leaf, which may be traced;
- after: an array the returned leaf must wait for, here (for kernels) the layer's
  input. It puts the layers in order, so that a compiler does not form all perturbed
  layers at once.

``at`` returns the leaf, perturbed or not, so a deep network never holds a second copy
of its parameters. With ``identity_at`` the lazy form is the plain loss.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import _validate
from jaxdp.kernels import perturb
from jaxdp.kernels.perturb import At
from jaxdp.models.datasets import Dataset

Array = jax.Array
Params = dict[str, Any]
Rows = jax.Array | np.ndarray  # with a leading axis of records
Batch = tuple[Rows, Rows]
NetworkTask = Literal["classification", "regression"]
TASKS: tuple[NetworkTask, ...] = ("classification", "regression")

identity_at: At = perturb.identity
"""The view of an unperturbed evaluation."""


# --- modules -----------------------------------------------------------------------


class MLP(nn.Module):
    """Dense layers with ReLU between them; no hidden layer is the linear model.

    Attributes:
      num_outputs: classes, or 1 for regression.
      hidden: widths of the hidden layers.
      output_scale: standard deviation of the last kernel at initialisation; 0 starts
        at the same loss for every class. Biases start at 0, hidden kernels with
        variance 2 / fan-in.
    """

    num_outputs: int
    hidden: tuple[int, ...] = ()
    output_scale: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:  # (B, d) -> (B, num_outputs)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, kernel_init=nn.initializers.he_normal())(x))
        last = nn.initializers.normal(self.output_scale)
        return nn.Dense(self.num_outputs, kernel_init=last)(x)


class ResidualStack(nn.Module):
    """x -> embed; then ``num_layers`` blocks h + relu(h W_l + b_l); then a head.

    The blocks are one leaf each for W and b, of shape (num_layers, ...), applied by
    ``lax.scan``: the shape of a deep network whose layers compile once.

    Attributes:
      num_outputs: classes, or 1 for regression. width: of h. num_layers: blocks.
      output_scale: as for ``MLP``.
    """

    num_outputs: int
    width: int = 32
    num_layers: int = 4
    output_scale: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:  # (B, d) -> (B, num_outputs)
        x = nn.Dense(self.width, kernel_init=nn.initializers.he_normal(), name="in")(x)
        x = _Blocks(self.width, self.num_layers, name="blocks")(x)
        last = nn.initializers.normal(self.output_scale)
        return nn.Dense(self.num_outputs, kernel_init=last, name="out")(x)


class _Blocks(nn.Module):
    width: int
    num_layers: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # Small blocks: the stack starts close to the identity at any depth.
        scale = (self.width * self.num_layers) ** -0.5
        shape = (self.num_layers, self.width, self.width)
        kernel = self.param("kernel", nn.initializers.normal(scale), shape)
        bias = self.param("bias", nn.initializers.zeros, shape[:2])

        def block(h: Array, layer: tuple[Array, Array]) -> tuple[Array, None]:
            return h + nn.relu(h @ layer[0] + layer[1]), None

        return jax.lax.scan(block, x, (kernel, bias))[0]


# --- lazy forward passes -----------------------------------------------------------


def mlp_outputs(params: Params, x: Rows, at: At) -> Array:
    """``MLP`` with every leaf taken through ``at``; (B, d) -> (B, num_outputs)."""
    h, depth = jnp.asarray(x), len(params)
    for i in range(depth):
        h = _dense(params, f"Dense_{i}", h, at)
        h = nn.relu(h) if i < depth - 1 else h
    return h


def residual_stack_outputs(params: Params, x: Rows, at: At) -> Array:
    """``ResidualStack`` with every leaf, and slice of a leaf, taken through ``at``."""

    def block(h: Array, scanned: tuple[Array, Params]) -> tuple[Array, None]:
        layer, slices = scanned
        kernel = at("blocks/kernel", slices["kernel"], layer=layer, after=h)
        bias = at("blocks/bias", slices["bias"], layer=layer)
        return h + nn.relu(h @ kernel + bias), None

    num_layers = params["blocks"]["kernel"].shape[0]
    h = _dense(params, "in", jnp.asarray(x), at)
    h, _ = jax.lax.scan(block, h, (jnp.arange(num_layers), params["blocks"]))
    return _dense(params, "out", h, at)


def is_stacked(path: str) -> bool:
    """Whether a leaf of ``ResidualStack`` is stacked: the ``stacked=`` predicate."""
    return path.startswith("blocks/")


def _dense(params: Params, name: str, x: Array, at: At) -> Array:
    # Only the large leaf waits. A bias that waited too would make each layer's order
    # depend on all the layers before it, and keep their activations alive.
    kernel = at(f"{name}/kernel", params[name]["kernel"], after=x)
    return x @ kernel + at(f"{name}/bias", params[name]["bias"])


# --- losses and metrics ------------------------------------------------------------


def softmax_cross_entropy(logits: Array, y: Rows) -> Array:
    """-log softmax(logits)[y]: (B, k), (B,) integers -> (B,) float32."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), y
    )


def squared_error(predictions: Array, y: Rows) -> Array:
    """(prediction - y)^2: (B,), (B,) -> (B,) float32; not clipped, not halved."""
    return (predictions.astype(jnp.float32) - y.astype(jnp.float32)) ** 2


def accuracy(logits: Array, y: Rows) -> Array:
    """Share of records whose largest logit is their class; () float32."""
    return jnp.mean(jnp.argmax(logits, -1) == y, dtype=jnp.float32)


def mean_squared_error(predictions: Array, y: Rows) -> Array:
    """Mean of ``squared_error``; () float32."""
    return jnp.mean(squared_error(predictions, y))


def _check_batch(x: Rows, y: Rows) -> None:
    # (B, 1) targets would broadcast to a (B, B) table: losses of pairs of records.
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"batch must be (x, y) of shapes (B, d) and (B,), got {x.shape} and "
            f"{y.shape}"
        )


def _record_losses(outputs: Array, y: Rows, task: NetworkTask) -> Array:
    if task == "classification":
        return softmax_cross_entropy(outputs, y)
    return squared_error(outputs[:, 0], y)


def mlp_loss(params: Params, batch: Batch, at: At) -> Array:
    """Lazy cross-entropy of an ``MLP`` (or linear model): (B,) float32."""
    return _lazy(mlp_outputs, "classification")(params, batch, at)


def mlp_squared_error(params: Params, batch: Batch, at: At) -> Array:
    """Lazy squared error of an ``MLP`` with one output: (B,) float32."""
    return _lazy(mlp_outputs, "regression")(params, batch, at)


def residual_stack_loss(params: Params, batch: Batch, at: At) -> Array:
    """Lazy cross-entropy of a ``ResidualStack``: (B,) float32."""
    return _lazy(residual_stack_outputs, "classification")(params, batch, at)


def _lazy(outputs_fn: Callable[[Params, Rows, At], Array], task: NetworkTask):
    def lazy_fn(params: Params, batch: Batch, at: At) -> Array:
        x, y = batch
        _check_batch(x, y)
        return _record_losses(outputs_fn(params, x, at), y, task)

    return lazy_fn


# --- networks ready to train -------------------------------------------------------


class Network(NamedTuple):
    """A module with the functions that training and judging need.

    ``init`` takes a typed JAX key: initial parameters are public, and their randomness
    has nothing to do with a run's ``Keys``. ``params`` is the module's ``"params"``
    collection itself, so paths begin with the layer's name.
    """

    module: nn.Module
    task: NetworkTask
    init: Callable[[Array], Params]  # key -> params
    apply: Callable[[Params, Rows], Array]  # (params, x) -> (B, num_outputs)
    value_fn: Callable[[Params, Batch], Array]  # -> losses, shape=(B,), float32
    lazy_fn: Callable[[Params, Batch, At], Array]  # the same, through ``at``
    metric_name: str  # "accuracy" or "mean_squared_error"
    metric_fn: Callable[[Params, Rows, Rows], Array]  # (params, x, y) -> ()
    is_stacked: Callable[[str], bool]  # path -> whether the leaf is (layers, ...)


def linear(
    num_features: int,
    num_outputs: int = 1,
    *,
    task: NetworkTask = "classification",
    output_scale: float = 0.0,
) -> Network:
    """Softmax regression, or linear regression for one output.

    Args:
      num_features: d.
      num_outputs: classes; 1 for regression.
      task: which loss and metric.
      output_scale: standard deviation of the initial kernel, 0 or small.

    Raises:
      ValueError: sizes below 1, one class, or regression with several outputs.
    """
    return mlp(
        num_features, num_outputs, hidden=(), task=task, output_scale=output_scale
    )


def mlp(
    num_features: int,
    num_outputs: int = 1,
    *,
    hidden: Sequence[int] = (64,),
    task: NetworkTask = "classification",
    output_scale: float = 0.0,
) -> Network:
    """A multilayer perceptron with ReLU.

    Args:
      num_features: d.
      num_outputs: classes; 1 for regression.
      hidden: widths of the hidden layers.
      task: which loss and metric.
      output_scale: standard deviation of the initial last kernel, 0 or small.

    Raises:
      ValueError: as ``linear``.
    """
    hidden = tuple(hidden)
    for width in hidden:
        _validate.integer(hidden=width)
    _validate.non_negative(output_scale=output_scale)
    module = MLP(num_outputs, hidden, output_scale)
    return _network(module, mlp_outputs, lambda path: False, num_features, task)


def residual_stack(
    num_features: int,
    num_outputs: int = 1,
    *,
    width: int = 32,
    num_layers: int = 4,
    task: NetworkTask = "classification",
    output_scale: float = 0.0,
) -> Network:
    """A residual network whose blocks are stacked leaves under ``lax.scan``.

    Args:
      num_features: d.
      num_outputs: classes; 1 for regression.
      width: of the blocks.
      num_layers: number of blocks.
      task: which loss and metric.
      output_scale: standard deviation of the initial last kernel, 0 or small.

    Raises:
      ValueError: as ``linear``.
    """
    _validate.integer(width=width, num_layers=num_layers)
    _validate.non_negative(output_scale=output_scale)
    module = ResidualStack(num_outputs, width, num_layers, output_scale)
    return _network(module, residual_stack_outputs, is_stacked, num_features, task)


NETWORKS: Mapping[str, Callable[..., Network]] = MappingProxyType(
    {"linear": linear, "mlp": mlp, "residual_stack": residual_stack}
)
"""Name -> constructor. A new network is one line here."""


def network_for(dataset: Dataset, name: str = "linear", **options: Any) -> Network:
    """The named network, with the sizes and the task of a data set.

    Args:
      dataset: for classification or regression.
      name: a key of ``NETWORKS``.
      **options: of that network: ``output_scale``; ``hidden`` (mlp); ``width`` and
        ``num_layers`` (residual_stack).

    Raises:
      ValueError: an unknown name or option, a value out of range, or a quadratic data
        set, whose loss is ``centered_quadratic``.

    Example:
      >>> network = network_for(load("digits"), "mlp", hidden=(32,))
      >>> params = network.init(jax.random.key(0))
    """
    _validate.instance(Dataset, dataset=dataset)
    _validate.one_of(NETWORKS, name=name)
    allowed = set(inspect.signature(NETWORKS[name]).parameters) - {
        "num_features",
        "num_outputs",
        "task",
    }
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"network {name!r} has no option {option!r}; it has "
                f"{', '.join(sorted(allowed))}"
            )
    if dataset.task == "quadratic":
        raise ValueError(
            f"dataset {dataset.name!r} has no network: its loss is "
            "models.centered_quadratic"
        )
    return NETWORKS[name](
        dataset.num_features,
        dataset.num_classes or 1,
        task=dataset.task,
        **options,
    )


def _network(
    module: MLP | ResidualStack,
    outputs_fn: Callable[[Params, Rows, At], Array],
    stacked: Callable[[str], bool],
    num_features: int,
    task: NetworkTask,
) -> Network:
    _check_sizes(num_features, module.num_outputs, task)
    classify = task == "classification"

    @jax.jit  # one program instead of one for each operation of each layer
    def initial(key: Array) -> Params:
        variables: Any = module.init(key, jnp.zeros((1, num_features), jnp.float32))
        return variables["params"]

    def init(key: Array) -> Params:
        _check_key(key)
        return initial(key)

    def apply(params: Params, x: Rows) -> Array:
        return module.apply({"params": params}, x)  # pyright: ignore

    def value_fn(params: Params, batch: Batch) -> Array:
        x, y = batch
        _check_batch(x, y)
        return _record_losses(apply(params, x), y, task)

    def metric_fn(params: Params, x: Rows, y: Rows) -> Array:
        _check_batch(x, y)
        outputs = apply(params, x)
        if classify:
            return accuracy(outputs, y)
        return mean_squared_error(outputs[:, 0], y)

    return Network(
        module=module,
        task=task,
        init=init,
        apply=apply,
        value_fn=value_fn,
        lazy_fn=_lazy(outputs_fn, task),
        metric_name="accuracy" if classify else "mean_squared_error",
        metric_fn=metric_fn,
        is_stacked=stacked,
    )


def _check_key(key: Array) -> None:
    if not (
        isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    ):
        raise TypeError(f"key must be a typed key, jax.random.key(seed); got {key!r}")


def _check_sizes(num_features: int, num_outputs: int, task: NetworkTask) -> None:
    _validate.one_of(TASKS, task=task)
    _validate.integer(num_features=num_features, num_outputs=num_outputs)
    if (task == "classification") != (num_outputs > 1):
        raise ValueError(
            "num_outputs must be at least 2 (the classes) for classification and 1 "
            f"for regression, got {num_outputs} for {task}"
        )
