"""Checks for options of ``jaxdp train`` that are ignored or do not go together."""

import pathlib
from typing import Any

from jaxdp.cli import options, recipes
from jaxdp.cli.conversions import Conversion
from jaxdp.cli.errors import UsageError, flag

_OF_FILES = ("label", "bounds", "task", "classes", "label_bounds", "group_values")
_OF_BUDGET = ("epsilon", "delta")
_OF_ZEROTH_ORDER = ("smoothing_radius", "num_directions", "direction")
_OF_RESTARTS = ("period", "restart_batch_size", "restart_l2_clip_norm")
_OF_CONVERSION = (*_OF_RESTARTS, "window", "max_step", "oracle", "multi_pass")
_OF_SECOND_ORDER = ("rank", "accuracy", "failure_probability", "hessian")
_OF_PLAYERS = ("radius", "num_draws", "clip_x", "step_ratio")
_OF_OTHERS = ("schedule", "momentum", "average")
#: Algorithms that take whatever gradients an optimizer can use.
_OTHERS = ("dpzero", "dpgd", "mezo", "gd")
# Of the steps between restarts.
_OF_PERIODS = ("batch_size", "sampling_prob", "l2_clip_norm", "prefix_noise")


def refuse_strangers(command: options.Train) -> None:
    """Refuses options that would have no effect.

    Raises:
      UsageError: one sentence that names the option.
    """

    def refuse(names: tuple[str, ...], where: str, there: bool) -> None:
        for name in names:
            value = getattr(command, name)
            if value is not None and value is not False and not there:
                raise UsageError(f"{flag(name)} is for {where} only, got {value}")

    refuse(_OF_FILES, "a .csv or .npz --dataset", is_file(command.dataset))
    real = not command.dataset.startswith("quadratic_")
    refuse(("test_fraction", "loss"), "a --dataset of real records", real)
    refuse(("hidden",), "--model mlp", command.model == "mlp")
    algorithm = command.algorithm
    private = algorithm in recipes.PRIVATE
    refuse(_OF_BUDGET, "--algorithm dpzero, dpgd, o2nc, saddle or sosp", private)
    clipped = private and algorithm not in ("saddle", "sosp")
    refuse(("l2_clip_norm",), "--algorithm dpzero, dpgd or o2nc", clipped)
    zeroth = algorithm in recipes.ZEROTH_ORDER
    refuse(_OF_ZEROTH_ORDER, "--algorithm dpzero, mezo or o2nc", zeroth)
    conversion, others = algorithm == "o2nc", algorithm in _OTHERS
    refuse(_OF_CONVERSION, "--algorithm o2nc", conversion)
    correlated = algorithm in ("o2nc", "sosp")
    refuse(("prefix_noise",), "--algorithm o2nc or sosp", correlated)
    refuse(_OF_OTHERS, "--algorithm dpzero, dpgd, mezo or gd", others)
    several = conversion and command.multi_pass
    where = "--algorithm dpzero, dpgd, mezo or gd, or o2nc with --multi-pass,"
    refuse(("sampling_prob",), where, others or several)
    refuse(("restart_sampling_prob",), "--algorithm o2nc with --multi-pass", several)
    saddle, second_order = algorithm == "saddle", algorithm == "sosp"
    steps = ("batch_size", "learning_rate")
    given = not (saddle or second_order)
    refuse(steps, "--algorithm dpzero, dpgd, mezo, gd or o2nc", given)
    refuse(_OF_SECOND_ORDER, "--algorithm sosp", second_order)
    refuse((*_OF_PLAYERS, "group_probabilities"), "--algorithm saddle", saddle)
    grouped = command.group is not None
    refuse(("group_values",), "a --group of a .csv or .npz --dataset", grouped)
    refuse(("group",), "a --dataset of real records", real)
    if second_order:
        _refuse_models(command)
    if saddle:
        _refuse_other_games(command)
    _refuse_pairs(command)


def _refuse_models(command: options.Train) -> None:
    """Refuses a model, loss or group with ``sosp``, whose problem has features alone."""
    for name, usual in (("model", "linear"), ("loss", None), ("group", None)):
        value = getattr(command, name)
        if value != usual:
            raise UsageError(
                f"{flag(name)} must be left out with --algorithm sosp, which factors "
                f"second moments of the features; got {value}"
            )


def _refuse_other_games(command: options.Train) -> None:
    """Requires groups and a convex problem for ``saddle``."""
    if command.group is None:
        raise UsageError(
            "--group must be given with --algorithm saddle: class, or a column; got nothing"
        )
    if command.model != "linear":
        raise UsageError(
            "--model must be linear with --algorithm saddle, which needs a convex "
            f"problem; got {command.model}"
        )
    if command.loss not in (None, "cross_entropy"):
        raise UsageError(
            f"--loss must be cross_entropy with --algorithm saddle, got {command.loss}"
        )


def _refuse_pairs(command: options.Train) -> None:
    """Refuses options that an oracle or ``--multi-pass`` fixes."""
    if command.multi_pass:
        for name in ("restart_batch_size", "batch_size"):
            value: Any = getattr(command, name)
            if value is not None:
                prob = name.replace("batch_size", "sampling_prob")
                raise UsageError(
                    f"{flag(name)} must be left out with --multi-pass, where steps read "
                    f"all records, or a share by {flag(prob)}; got {value}"
                )
        if command.prefix_noise not in (None, "independent"):
            raise UsageError(
                "--prefix-noise must be independent with --multi-pass, where a record is "
                f"in every step; got {command.prefix_noise}"
            )
    if command.oracle == "first_order" and command.direction is not None:
        raise UsageError(
            "--direction must be left out with --oracle first_order, whose points are "
            f"uniform in a ball; got {command.direction}"
        )
    if command.oracle == "scalar" and command.period not in (None, 1):
        raise UsageError(
            "--period must be 1 with --oracle scalar, whose slopes are along other "
            f"directions in each step and do not add up; got {command.period}"
        )


def refuse_differences(command: options.Train, recipe: Conversion) -> None:
    """Refuses options of the steps between restarts, if every step is a restart.

    Raises:
      UsageError: one sentence that names the option.
    """
    names = _OF_PERIODS
    if recipe.oracle == "first_order":  # A restart takes one gradient of a record.
        names = (*names, "num_directions")
    for name in names:
        if getattr(command, name) is not None and recipe.period == 1:
            raise UsageError(
                f"{flag(name)} is for --period 2 or more only, got 1, where every step is "
                "a restart"
            )


def is_file(dataset: str) -> bool:
    """Returns True if the name of a data set is the path of a .csv or .npz file."""
    return pathlib.Path(dataset).suffix.lower() in (".csv", ".npz")
