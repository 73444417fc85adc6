r"""Groups of records: their errors, and the problem of making the worst loss small.

The groups, their shares :math:`p_i` and whatever tells them apart are public constants of
the problem, given by the caller and never learned from the records. Which group a record
belongs to is as private as the record.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.core import display, validate
from jaxdp.data.datasets import Dataset
from jaxdp.data.scaling import bound_arrays, center_by_bounds
from jaxdp.kernels.polytope import L1Ball
from jaxdp.models.losses import Rows
from jaxdp.models.networks import Network
from jaxdp.saddle.oracles import MaxOfLosses

Array = jax.Array

CLASS = "class"
"""The group that is a record's class."""

DIABETES_THRESHOLD = 150.0
"""A round number amid the published range of the disease progression score, 25 to 346.

No statistic of the 442 records, as their median would be: it must not depend on those that
are private. (The table is that of Efron, Hastie, Johnstone, Tibshirani, `Least Angle
Regression <https://doi.org/10.1214/009053604000000067>`_, 2004.)
"""

DIABETES_SEXES = (1.0, 2.0)
"""The two codes of the column ``sex`` in the same table."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped:
    """A classification data set whose records belong to groups.

    Attributes:
      dataset: the records.
      group: name of what tells the groups apart: a column, or ``"class"``.
      names: one for each group.
      probabilities: public shares of the groups, of sum 1.
      train: group of each training record, int32 (n,); -1: of none. Private.
      test: of each public record.

    Example:
      >>> import jaxdp
      >>> by_class = jaxdp.models.grouped(jaxdp.models.load("wine"), "class")
      >>> by_class.names, by_class.train.shape
      (('class_0', 'class_1', 'class_2'), (142,))
      >>> x, y, group = by_class.records
      >>> bool((y == group).all())
      True
    """

    dataset: Dataset
    group: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...]
    train: np.ndarray
    test: np.ndarray

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        """Returns names and shares; which record is in which group is not shown."""
        shares = zip(self.names, self.probabilities, strict=True)
        rows = [("group", self.group)]
        rows += [(f"  {name}", f"{share:.6g}") for name, share in shares]
        rows += [("train, private", display.shape(self.train))]
        rows += [("test, public", display.shape(self.test))]
        return display.Table(f"Grouped {self.dataset.name}", rows)

    @property
    def records(self) -> tuple[np.ndarray, ...]:
        """Training records (x, y, group) as :class:`WorstGroup` reads them.

        In a random order, which is a function of their number alone: batches of one pass
        are of records in a row, and files are often sorted.
        """
        order = np.random.default_rng(0).permutation(len(self.train))
        return tuple(array[order] for array in (*self.dataset.train, self.train))


def above(dataset: Dataset, threshold: float) -> Dataset:
    """Turns a regression into two classes: targets at most, and above, a threshold.

    Args:
      dataset: a regression; of a scaled target the bounds are known.
      threshold: in the target's own unit. A public constant.

    Raises:
      ValueError: not a regression.
    """
    validate.instance(Dataset, dataset=dataset)
    if dataset.task != "regression":
        raise ValueError(f"dataset must be a regression, got {dataset.task}")
    at = threshold
    if dataset.target_bounds is not None:
        low, high = dataset.target_bounds
        at = (threshold - low) / (high - low)
    # A target that is no number is of no class: its loss is NaN, and counts zero.
    splits = {
        split: (
            np.where(np.isnan(y)[:, None], np.float32(np.nan), x),
            (y > at).astype(np.int32),
        )
        for split, (x, y) in (("train", dataset.train), ("test", dataset.test))
    }
    return dataclasses.replace(
        dataset,
        **splits,
        task="classification",
        num_classes=2,
        class_names=(f"at most {threshold:g}", f"above {threshold:g}"),
        target_bounds=None,
        note=f"{dataset.note} Classes: whether the target is above {threshold:g}.",
    )


def grouped(
    dataset: Dataset,
    group: str,
    *,
    group_values: Sequence[float] | None = None,
    bounds: Any = None,
    group_probabilities: Sequence[float] | None = None,
) -> Grouped:
    """Assigns the records of a data set to groups.

    Args:
      dataset: a classification.
      group: a feature's name, or ``"class"``: every class is a group.
      group_values: of a feature: those that it has in each group, in its own unit. A
        record of another value belongs to no group.
      bounds: by which the features were scaled, as ``load_file`` takes them.
      group_probabilities: public shares of the groups; None: all alike.

    Raises:
      ValueError: an argument that does not fit, named.

    Example:
      >>> import jaxdp
      >>> by_class = jaxdp.models.grouped(jaxdp.models.load("wine"), "class")
      >>> len(by_class.names), [round(p, 3) for p in by_class.probabilities]
      (3, [0.333, 0.333, 0.333])
    """
    validate.instance(Dataset, dataset=dataset)
    if dataset.num_classes is None:
        raise ValueError(f"dataset must be a classification, got {dataset.task}")
    if group == CLASS:
        if group_values is not None:
            raise ValueError(
                f"group_values must be None for the group {CLASS!r}, got {group_values!r}"
            )
        names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
        train, test = dataset.train[1], dataset.test[1]
    else:
        wanted = _column(dataset, group, group_values, bounds)
        names = tuple(f"{group} {value:g}" for value in group_values or ())
        column = dataset.feature_names.index(group)
        features = dataset.train[0], dataset.test[0]
        train, test = (_match(x[:, column], wanted) for x in features)
    shares = _shares(group_probabilities, len(names))
    return Grouped(dataset, group, names, shares, train, test)


def _column(
    dataset: Dataset, group: str, values: Sequence[float] | None, bounds: Any
) -> np.ndarray:
    """Returns the groups' values of a feature on the feature's scale, float32 (groups,)."""
    if group not in dataset.feature_names:
        columns = ", ".join(repr(name) for name in (CLASS, *dataset.feature_names))
        raise ValueError(f"group must be one of {columns}; got {group!r}")
    if values is None or len(values) < 2 or not np.isfinite(values).all():
        raise ValueError(
            f"group_values must be two finite numbers or more, which {group!r} has in each "
            f"group; got {values!r}"
        )
    given = np.asarray(values, np.float64)
    if bounds is not None:
        low, high = bound_arrays(bounds, dataset.feature_names)
        column = dataset.feature_names.index(group)
        given = center_by_bounds(given, low[column], high[column])
    given = given.astype(np.float32)
    if len(np.unique(given)) < len(given):
        raise ValueError(
            f"group_values must be different ones within the bounds of {group!r}, got "
            f"{tuple(values)}"
        )
    return given


def _match(column: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the index of each record's value, int32 (n,); -1 for another value."""
    same = column[:, None] == values
    return np.where(same.any(axis=1), same.argmax(axis=1), -1).astype(np.int32)


def _shares(given: Sequence[float] | None, num: int) -> tuple[float, ...]:
    if given is None:
        return (1 / num,) * num
    shares = tuple(map(float, given))
    fits = len(shares) == num and all(0 < p < 1 for p in shares)
    if not fits or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ValueError(
            f"group_probabilities must be {num} numbers > 0 that sum to 1, one for each "
            f"group; got {shares}"
        )
    return shares


# --- how groups fare ---------------------------------------------------------------


def group_errors(outputs: Rows, y: Rows, group: Rows, num_groups: int) -> Array:
    """Computes the share of wrong records in each group.

    Args:
      outputs: of a network, (B, k).
      y: classes, (B,).
      group: of each record, integers (B,); one outside [0, num_groups) counts nowhere.
      num_groups: how many there are.

    Returns:
      float32 (num_groups,); NaN for a group without records.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> outputs = jnp.array([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
      >>> y, group = jnp.array([0, 1, 1]), jnp.array([0, 0, 1])
      >>> jaxdp.models.group_errors(outputs, y, group, num_groups=2).tolist()
      [0.5, 0.0]
    """
    member = jnp.asarray(group)[:, None] == jnp.arange(num_groups)
    wrong = (jnp.argmax(outputs, axis=-1) != jnp.asarray(y))[:, None]
    return jnp.sum(wrong & member, axis=0) / jnp.sum(member, axis=0)


# --- the worst group's loss --------------------------------------------------------


class WorstGroup(NamedTuple):
    r"""Logistic regression on the worst group: :math:`\min_x\max_y\sum_iy_i\ell_i(x)`.

    y is on the simplex of the groups, and :math:`\ell_i=E[\mathbf 1[g=i]\,\ell]/p_i` is
    the mean loss of group i where :math:`p_i` is its share. x, in an l1 ball around zero,
    are the parameters of a linear model of features that are moved to [-1, 1]; losses count
    from that of zero parameters, log k. Both make one record's part smaller; the second
    shifts the losses of all groups alike.

    Attributes:
      problem: of batches (x, y, group).
      num_vertices: of the ball.
      linf_bound_x: largest derivative of a record by the weight of a vertex of the ball.
      linf_bound_y: by the weight of a group, from the middle of the record's range, as
        ``center_gradients`` takes it.
      params_at: point of the ball -> the network's parameters, for features as they are.
      params_fn: the same, of weights of the ball's vertices.
    """

    problem: MaxOfLosses
    num_vertices: int
    linf_bound_x: float
    linf_bound_y: float
    params_at: Callable[[Array], Any]
    params_fn: Callable[[Array], Any]


def worst_group(
    network: Network,
    params: Any,
    probabilities: Sequence[float],
    radius: float,
    feature_bounds: tuple[float, float] = (-1.0, 1.0),
) -> WorstGroup:
    r"""Builds the worst group's problem for a linear network with cross-entropy.

    Two outputs differ by at most the radius R. So a loss is within
    :math:`\log(1+(k-1)e^R)-\log k` of that of zero parameters, and its derivative by a
    parameter at most :math:`1-1/(1+(k-1)e^R)`. For features beyond their bounds these are
    no bounds, but still clips.

    Args:
      network: linear, of k >= 2 outputs, with cross-entropy: convex in its parameters.
      params: of the network; only their shapes count.
      probabilities: public shares of the groups.
      radius: R, of the l1 norm of all parameters together.
      feature_bounds: range of the features, which is moved to [-1, 1].

    Raises:
      ValueError: a network that is not such a one, a radius out of range.

    Example:
      >>> import jax
      >>> import jaxdp
      >>> by_class = jaxdp.models.grouped(jaxdp.models.load("wine"), "class")
      >>> network = jaxdp.models.network_for(by_class.dataset, "linear")
      >>> params = network.init(jax.random.key(0))
      >>> shares = by_class.probabilities
      >>> problem = jaxdp.models.worst_group(network, params, shares, radius=2.0)
      >>> problem.problem.domain_x.radius
      2.0
    """
    of = convex_model(network, params, radius, feature_bounds)

    def group_fn(batch: Any) -> Array:
        return batch[2]

    weight = 1 / min(probabilities)
    width = np.logaddexp(0, of.odds) - math.log(network.module.num_outputs)
    return WorstGroup(
        problem=MaxOfLosses(
            of.loss_fn, group_fn, tuple(probabilities), domain_x=of.ball
        ),
        num_vertices=of.ball.num_vertices,
        linf_bound_x=of.linf_bound * weight,
        linf_bound_y=float(width) * weight / 2,
        params_at=of.params_at,
        params_fn=lambda weights: of.params_at(of.ball.point(weights)),
    )


class ConvexModel(NamedTuple):
    """Linear network with cross-entropy whose parameters are a point of an l1 ball.

    Attributes:
      loss_fn: (point, batch (x, y, ...)) -> losses, from that of zero parameters.
      ball: of the points.
      odds: logarithm of the odds against the least likely class that the ball has.
      linf_bound: largest derivative of a record's loss by the weight of a vertex.
      params_at: point -> the network's parameters, for features as they are.
    """

    loss_fn: Callable[[Array, Any], Array]
    ball: L1Ball
    odds: float
    linf_bound: float
    params_at: Callable[[Array], Any]


def convex_model(
    network: Network, params: Any, radius: float, feature_bounds: tuple[float, float]
) -> ConvexModel:
    """Builds the convex problem of a linear network; arguments of :func:`worst_group`."""
    validate.positive(radius=radius, allow_inf=False)
    if network.loss != "cross_entropy" or getattr(network.module, "hidden", None) != ():
        raise ValueError(
            "network must be linear with cross-entropy, for the problem to be convex; got "
            f"{network.module!r} with {network.loss!r}"
        )
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    flat, unravel = ravel_pytree(zero)
    outputs = network.module.num_outputs
    low, high = feature_bounds

    def params_at(x: Array) -> Any:
        ((name, layer),) = unravel(x).items()
        kernel = layer["kernel"] * (2 / (high - low))
        shift = jnp.sum(kernel, axis=0) * ((high + low) / 2)
        return {name: {"kernel": kernel, "bias": layer["bias"] - shift}}

    def loss_fn(x: Array, batch: Any) -> Array:
        return network.value_fn(params_at(x), batch[:2]) - math.log(outputs)

    odds = math.log(outputs - 1) + radius  # Of the least likely class, negated.
    return ConvexModel(
        loss_fn,
        L1Ball(flat.size, float(radius)),
        odds,
        radius / (1 + math.exp(-odds)),
        params_at,
    )
