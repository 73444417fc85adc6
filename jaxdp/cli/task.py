"""Task of ``jaxdp train``: a model on a data set, with its metrics."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp import models
from jaxdp.cli import options
from jaxdp.cli.parsing import UsageError, refuse, usage
from jaxdp.data.datasets import DIABETES_BOUNDS
from jaxdp.models.groups import CLASS, DIABETES_SEXES, DIABETES_THRESHOLD, above

_OF_FILES = ("label", "bounds", "task", "classes", "label_bounds", "group_values")
#: Formats that a schema describes.
_TABLES = (".csv", ".tsv", ".parquet")
#: Columns of built-in data sets that may be groups: their public values and bounds.
_COLUMNS: dict[str, dict[str, Any]] = {
    "diabetes": {"sex": (DIABETES_SEXES, DIABETES_BOUNDS)}
}


class Task(NamedTuple):
    """Data set and model of a run: parameters, losses and metrics.

    What the loop moves (``params`` below) is the model's parameters; for ``saddle`` weights
    of vertices and of groups, or points; for ``sosp`` a factor of second moments.
    """

    dataset: models.Dataset
    model: str
    loss: str
    init: Callable[[jax.Array], Any]  # key -> params
    value_fn: Callable[..., jax.Array]  # (params, batch) -> losses (B,); or a problem
    metric: str  # its name in the report
    metric_fn: Callable[[Any], jax.Array]  # params -> () on the public records
    data: Any  # what the loop reads
    saved_fn: Callable[[Any], Any] = lambda params: params  # params -> what is written
    groups: models.Grouped | None = None
    held_out: Any = None  # public records as value_fn reads them; None: the data set's
    errors_fn: Callable[[Any], jax.Array] | None = None  # params -> (num_groups,)
    returned: str | None = None  # what is returned, if it is said in the plot
    draw: Callable[..., None] | None = None  # (path, title, plan, outcome): releases
    # (plan, start, params, outcome of the run) -> fields of the report
    report_fn: Callable[..., Mapping[str, Any]] | None = None
    # report -> rows of the table
    rows_fn: Callable[..., list[tuple[str, str]]] | None = None

    @property
    def public(self) -> Any:
        """Public records as ``value_fn`` reads them."""
        return self.dataset.test if self.held_out is None else self.held_out


class Chosen(NamedTuple):
    """Task of an algorithm, and the plan and optimizer of its recipe."""

    task: Task
    recipe: dict[str, Any]  # as it is recorded
    plan: Any
    optimizer: Any = None  # None where the plan makes the steps itself
    averaged: bool = False  # whether the optimizer averages iterates


def is_file(dataset: str) -> bool:
    """Returns True if the name of a data set is the path of a file."""
    return pathlib.Path(dataset).suffix.lower() in (*_TABLES, ".npz")


def dataset_of(command: options.Train) -> models.Dataset:
    """Loads the data set of a command."""
    name, fraction = command.dataset, command.test_fraction
    refuse(command, _OF_FILES, "a .csv or .npz --dataset", is_file(name))
    table = pathlib.Path(name).suffix.lower() in _TABLES
    refuse(command, ("schema",), f"a {', '.join(_TABLES)} --dataset", table)
    said = ("label", "bounds", "task", "classes", "label_bounds")
    refuse(command, said, "a run without --schema", command.schema is None)
    of_real = ("test_fraction", "loss", "group")
    there = not name.startswith("quadratic_")
    refuse(command, of_real, "a --dataset of real records", there)
    extra: dict[str, Any] = {} if fraction is None else {"test_fraction": fraction}
    with usage(command, "--dataset"):
        if not is_file(name):
            if name not in models.DATASETS:
                names = ", ".join(models.DATASETS)
                raise UsageError(
                    f"--dataset must be one of {names} or the path of a .csv or .npz "
                    f"file (with --schema also .tsv or .parquet), got {name!r}"
                )
            loaded = models.load(name, **extra)
            if getattr(command, "group", None) is None or name != "diabetes":
                return loaded
            return above(loaded, DIABETES_THRESHOLD)
        loaded = models.load_file(
            name,
            label=command.label,
            task=command.task or "classification",  # pyright: ignore
            classes=command.classes,
            bounds=command.bounds,
            label_bounds=command.label_bounds,
            schema=command.schema,
            **extra,
        )
    if fraction is None:
        raise UsageError(
            "--test-fraction must be given for a file, a number in (0, 1): that share "
            "of its records is held out and counts as public, so that metrics on it "
            "cost no privacy; got nothing"
        )
    return loaded


def of_network(
    command: Any, *, hidden: int = 32, probabilities: tuple[float, ...] | None = None
) -> Task:
    """Returns the task of a command that trains a model, linear if it has no ``model``.

    ``hidden`` is the width of an MLP where none is given, ``probabilities`` are public
    shares of the groups.
    """
    model, given = getattr(command, "model", "linear"), getattr(command, "hidden", None)
    refuse(command, ("hidden",), "--model mlp", model == "mlp")
    grouped = getattr(command, "group", None) is not None
    where = "a --group of a .csv or .npz --dataset"
    refuse(command, ("group_values",), where, grouped or not is_file(command.dataset))
    dataset = dataset_of(command)
    if dataset.task == "quadratic":
        if model != "linear":
            raise UsageError(
                f"--model must be linear with --dataset {command.dataset}, which is "
                f"its own model; got {model}"
            )
        return _quadratic(dataset)
    extra: dict[str, Any] = {"hidden": given or (hidden,)} if model == "mlp" else {}
    with usage(command):
        loss = getattr(command, "loss", None)
        network = models.network_for(dataset, model, loss=loss, **extra)
    x, y = dataset.test
    # In the target's own unit, where its scale is known.
    low, high = dataset.target_bounds or (0.0, 1.0)
    unit = (high - low) ** 2 if dataset.task == "regression" else 1.0
    task = Task(
        dataset=dataset,
        model=model,
        loss=network.loss,
        init=network.init,
        value_fn=network.value_fn,
        metric="test_accuracy" if dataset.task == "classification" else "test_mse",
        metric_fn=jax.jit(lambda params: unit * network.metric_fn(params, x, y)),
        data=dataset.train,
    )
    if not grouped:
        return task
    groups = _groups(command, dataset, probabilities)

    def errors_fn(params: Any) -> jax.Array:
        outputs = network.apply(params, x)
        return models.group_errors(outputs, y, groups.test, len(groups.names))

    return task._replace(groups=groups, errors_fn=jax.jit(errors_fn))


def _quadratic(dataset: models.Dataset) -> Task:
    hessian: Any = dataset.name.removeprefix("quadratic_")
    dim = dataset.num_features
    value_fn = models.centered_quadratic(hessian, dim=dim).value_fn
    return Task(
        dataset=dataset,
        model="quadratic",
        loss="quadratic",
        init=lambda key: jnp.zeros(dim),
        value_fn=value_fn,
        metric="test_loss",
        metric_fn=jax.jit(lambda params: jnp.mean(value_fn(params, dataset.test))),
        data=dataset.train,
    )


def _groups(
    command: Any, dataset: models.Dataset, probabilities: tuple[float, ...] | None
) -> models.Grouped:
    """Returns the groups that ``--group`` asks for."""
    values, bounds = command.group_values, command.bounds
    if not is_file(command.dataset):
        known = {CLASS: (None, None), **_COLUMNS.get(command.dataset, {})}
        if command.group not in known:
            raise UsageError(
                f"--group must be {' or '.join(known)} with --dataset {command.dataset}, "
                f"got {command.group!r}"
            )
        values, bounds = known[command.group]
    with usage(command):
        return models.grouped(
            dataset,
            command.group,
            group_values=values,
            bounds=bounds,
            group_probabilities=probabilities,
        )
