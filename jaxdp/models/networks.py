r"""Linear models and multilayer perceptrons with one loss per record.

A *loss* here is ``value_fn(params, batch) -> (B,)`` with ``batch = (x, y)``: one
float32 number for each record, computed from that record and the parameters alone (no
batch statistics, no dropout), which is what a clip on each record's slope needs.

Each network has its loss in a second, *lazy* form ``fn(params, batch, at) -> (B,)``, which
asks ``at(path, leaf, layer=None, after=None)`` for every leaf where it uses it:

- path: the leaf's key path in ``params``, ``jax.tree_util.keystr(path, simple=True,
  separator="/")``, e.g. ``"Dense_0/kernel"``;
- leaf: that leaf, or (in a layer scan) its slice ``leaf[layer]``;
- layer: the index of the slice of a stacked leaf, which may be traced;
- after: an array the returned leaf must wait for, here (for kernels) the layer's
  input. It puts the layers in order, so that a compiler does not form all perturbed
  layers at once.

``at`` returns the leaf, perturbed or not, so a deep network never holds a second copy
of its parameters. With ``perturb.identity`` the lazy form is the plain loss.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.core import validate
from jaxdp.data.datasets import Dataset
from jaxdp.kernels.perturb import At
from jaxdp.models.losses import (
    LOSSES,
    Loss,
    NetworkTask,
    Rows,
    accuracy,
    check_batch,
    loss_of,
)

Array = jax.Array
Params = dict[str, Any]
Batch = tuple[Rows, Rows]


# --- modules -----------------------------------------------------------------------


class MLP(nn.Module):
    """Dense layers with ReLU between them; no hidden layer is the linear model.

    Attributes:
      num_outputs: classes, or 1 for regression.
      hidden: widths of the hidden layers.
      output_scale: standard deviation of the last kernel at initialisation; 0 starts
        at the same loss for every class. Biases start at 0, hidden kernels with
        variance 2 / fan-in.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.networks import MLP
      >>> module = MLP(num_outputs=3, hidden=(8,))
      >>> variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 4)))
      >>> variables["params"]["Dense_0"]["kernel"].shape
      (4, 8)
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

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.models.networks import ResidualStack
      >>> module = ResidualStack(num_outputs=3, width=8, num_layers=5)
      >>> variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 4)))
      >>> variables["params"]["blocks"]["kernel"].shape
      (5, 8, 8)
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
    """Evaluates ``MLP`` with all leaves taken through ``at``: (B, num_outputs).

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb
      >>> from jaxdp.models import networks
      >>> params = networks.mlp(4, 3, hidden=(8,)).init(jax.random.key(0))
      >>> networks.mlp_outputs(params, jnp.ones((2, 4)), perturb.identity).shape
      (2, 3)
    """
    h, depth = jnp.asarray(x), len(params)
    for i in range(depth):
        h = _dense(params, f"Dense_{i}", h, at)
        h = nn.relu(h) if i < depth - 1 else h
    return h


def residual_stack_outputs(params: Params, x: Rows, at: At) -> Array:
    """Evaluates ``ResidualStack`` with all leaves, or slices, taken through ``at``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import perturb
      >>> from jaxdp.models import networks
      >>> params = networks.residual_stack(4, 3, width=8).init(jax.random.key(0))
      >>> networks.residual_stack_outputs(params, jnp.ones((2, 4)), perturb.identity).shape
      (2, 3)
    """

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
    """Returns True if a leaf of ``ResidualStack`` is stacked, for ``stacked=``.

    Example:
      >>> from jaxdp.models import networks
      >>> networks.is_stacked("blocks/kernel"), networks.is_stacked("out/kernel")
      (True, False)
    """
    return path.startswith("blocks/")


def _dense(params: Params, name: str, x: Array, at: At) -> Array:
    # Only the large leaf waits. A bias that waited too would make each layer's order
    # depend on all the layers before it, and keep their activations alive.
    kernel = at(f"{name}/kernel", params[name]["kernel"], after=x)
    return x @ kernel + at(f"{name}/bias", params[name]["bias"])


# --- networks ready to train -------------------------------------------------------


class Network(NamedTuple):
    """A module with the functions that training and judging need.

    ``init`` takes a typed JAX key: initial parameters are public, and their randomness
    has nothing to do with a run's ``Keys``. ``params`` is the module's ``"params"``
    collection itself, so paths begin with the layer's name.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> network = jaxdp.models.network_for(jaxdp.models.load("wine"), "linear")
      >>> params = network.init(jax.random.key(0))
      >>> batch = jnp.zeros((2, 13)), jnp.array([0, 1])
      >>> network.value_fn(params, batch).shape, network.metric_name
      ((2,), 'accuracy')
    """

    module: nn.Module
    task: NetworkTask
    loss: Loss
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
    loss: Loss | None = None,
    output_scale: float = 0.0,
) -> Network:
    """Builds a linear model for classification or for regression.

    Args:
      num_features: d.
      num_outputs: classes; 1 for regression.
      task: which metric, and which losses there are.
      loss: ``"cross_entropy"`` (default) or ``"hinge"`` for classification,
        ``"squared_error"`` for regression.
      output_scale: standard deviation of the initial last kernel, 0 or small.

    Raises:
      ValueError: sizes below 1, one class, regression with several outputs, or a loss of
        the other task.

    Example:
      >>> import jax
      >>> from jaxdp.models import networks
      >>> params = networks.linear(4, 3).init(jax.random.key(0))
      >>> params["Dense_0"]["kernel"].shape
      (4, 3)
    """
    return mlp(
        num_features,
        num_outputs,
        hidden=(),
        task=task,
        loss=loss,
        output_scale=output_scale,
    )


def mlp(
    num_features: int,
    num_outputs: int = 1,
    *,
    hidden: Sequence[int] = (64,),
    task: NetworkTask = "classification",
    loss: Loss | None = None,
    output_scale: float = 0.0,
) -> Network:
    """Builds a multilayer perceptron with ReLU.

    ``hidden`` are the widths of the hidden layers; else as :func:`linear`.

    Example:
      >>> import jax
      >>> from jaxdp.models import networks
      >>> params = networks.mlp(4, 3, hidden=(8,)).init(jax.random.key(0))
      >>> params["Dense_0"]["kernel"].shape, params["Dense_1"]["kernel"].shape
      ((4, 8), (8, 3))
    """
    hidden = tuple(hidden)
    for width in hidden:
        validate.integer(hidden=width)
    validate.non_negative(output_scale=output_scale)
    module = MLP(num_outputs, hidden, output_scale)
    return _network(module, mlp_outputs, lambda path: False, num_features, task, loss)


def residual_stack(
    num_features: int,
    num_outputs: int = 1,
    *,
    width: int = 32,
    num_layers: int = 4,
    task: NetworkTask = "classification",
    loss: Loss | None = None,
    output_scale: float = 0.0,
) -> Network:
    """Builds a residual network whose blocks are stacked leaves under ``lax.scan``.

    ``num_layers`` blocks of ``width``; else as :func:`linear`.

    Example:
      >>> import jax
      >>> from jaxdp.models import networks
      >>> network = networks.residual_stack(4, 3, width=8, num_layers=5)
      >>> params = jax.eval_shape(network.init, jax.random.key(0))
      >>> params["blocks"]["kernel"].shape
      (5, 8, 8)
    """
    validate.integer(width=width, num_layers=num_layers)
    validate.non_negative(output_scale=output_scale)
    module = ResidualStack(num_outputs, width, num_layers, output_scale)
    functions = residual_stack_outputs, is_stacked
    return _network(module, *functions, num_features, task, loss)


NETWORKS: Mapping[str, Callable[..., Network]] = MappingProxyType(
    {"linear": linear, "mlp": mlp, "residual_stack": residual_stack}
)
"""Name -> constructor. A new network is one line here."""


def network_for(dataset: Dataset, name: str = "linear", **options: Any) -> Network:
    """Builds the named network, with the sizes and the task of a data set.

    Args:
      dataset: for classification or regression.
      name: a key of ``NETWORKS``.
      **options: of that network: ``loss`` and ``output_scale``; ``hidden`` (mlp); ``width``
        and ``num_layers`` (residual_stack).

    Raises:
      ValueError: an unknown name or option, a value out of range, or a quadratic data
        set, whose loss is ``centered_quadratic``.

    Example:
      >>> import jax
      >>> import jaxdp
      >>> dataset = jaxdp.models.load("digits")
      >>> network = jaxdp.models.network_for(dataset, "mlp", hidden=(32,))
      >>> params = network.init(jax.random.key(0))
      >>> params["Dense_1"]["kernel"].shape
      (32, 10)
    """
    validate.instance(Dataset, dataset=dataset)
    validate.one_of(NETWORKS, name=name)
    allowed = set(inspect.signature(NETWORKS[name]).parameters)
    allowed -= {"num_features", "num_outputs", "task"}
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
    sizes = dataset.num_features, dataset.num_classes or 1
    return NETWORKS[name](*sizes, task=dataset.task, **options)


def _network(
    module: MLP | ResidualStack,
    outputs_fn: Callable[[Params, Rows, At], Array],
    stacked: Callable[[str], bool],
    num_features: int,
    task: NetworkTask,
    loss: Loss | None,
) -> Network:
    loss = loss_of(task, loss)
    num_outputs = module.num_outputs
    validate.integer(num_features=num_features, num_outputs=num_outputs)
    if (task == "classification") != (num_outputs > 1):
        raise ValueError(
            "num_outputs must be at least 2 (the classes) for classification and 1 "
            f"for regression, got {num_outputs} for {task}"
        )
    loss_fn = LOSSES[loss]
    classify = task == "classification"

    @jax.jit  # one program instead of one for each operation of each layer
    def initial(key: Array) -> Params:
        variables: Any = module.init(key, jnp.zeros((1, num_features), jnp.float32))
        return variables["params"]

    def init(key: Array) -> Params:
        dtype = getattr(key, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"key must be a typed key, jax.random.key(seed); got {key!r}"
            )
        return initial(key)

    def apply(params: Params, x: Rows) -> Array:
        return module.apply({"params": params}, x)  # pyright: ignore

    def value_fn(params: Params, batch: Batch) -> Array:
        x, y = batch
        check_batch(x, y)
        return loss_fn(apply(params, x), y)

    def lazy_fn(params: Params, batch: Batch, at: At) -> Array:
        x, y = batch
        check_batch(x, y)
        return loss_fn(outputs_fn(params, x, at), y)

    def metric_fn(params: Params, x: Rows, y: Rows) -> Array:
        check_batch(x, y)
        outputs = apply(params, x)
        return accuracy(outputs, y) if classify else jnp.mean(loss_fn(outputs, y))

    return Network(
        module=module,
        task=task,
        loss=loss,
        init=init,
        apply=apply,
        value_fn=value_fn,
        lazy_fn=lazy_fn,
        metric_name="accuracy" if classify else "mean_squared_error",
        metric_fn=metric_fn,
        is_stacked=stacked,
    )
