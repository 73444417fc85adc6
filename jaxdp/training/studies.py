"""Studies: one plan under many settings and seeds, as one program. They are not private."""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import display, validate
from jaxdp.core.keys import Keys
from jaxdp.core.run_state import public
from jaxdp.core.types import PathPredicate
from jaxdp.kernels.perturb import LazyLoss
from jaxdp.mechanism.plan import Plan
from jaxdp.training import loop, parallel, preparing

#: The setting that is the plan's, not the optimizer's.
_CLIP = "l2_clip_norm"


@dataclasses.dataclass(frozen=True, eq=False)
class StudyResult:
    """Scores of every setting and seed. They are **not private**: see :func:`study`.

    Attributes:
      settings: S settings, each by name.
      scores: float64 (S, seeds).
    """

    settings: tuple[dict[str, float], ...]
    scores: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean over the seeds, float64 (S,); NaN where a run's is."""
        return self.scores.mean(axis=1)

    @property
    def best(self) -> dict[str, float]:
        """The setting of the highest mean; one of NaN is the worst."""
        return self.settings[int(np.argmax(np.nan_to_num(self.means, nan=-math.inf)))]

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        """Returns the table of all settings, the best first."""
        means = np.nan_to_num(self.means, nan=-math.inf)
        order = np.argsort(-means, kind="stable")
        number = lambda x: f"{x:.4g}"  # noqa: E731
        rows = [
            (
                *map(number, self.settings[i].values()),
                *map(number, (self.means[i], *_ends(self.scores[i]))),
            )
            for i in order
        ]
        count, seeds = self.scores.shape
        title = (
            f"StudyResult: {count} settings, {seeds} seeds, the best first; not private"
        )
        head = (*self.settings[0], "mean", "lowest", "highest")
        return display.Table(title, rows, head)

    def __str__(self) -> str:
        names = [*self.settings[0], "mean", "lowest", "highest"]
        low, high = self.scores.min(axis=1), self.scores.max(axis=1)
        rows = zip(self.settings, self.means, low, high, strict=True)
        figures = [(*setting.values(), *rest) for setting, *rest in rows]
        lines = [names, *([f"{x:.4g}" for x in row] for row in figures)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(map(str.rjust, line, widths)).rstrip() for line in lines
        )


def _ends(scores: np.ndarray) -> tuple[float, float]:
    return float(scores.min()), float(scores.max())


def study(
    plan: Plan,
    params: Any,
    data: Any,
    *,
    value_fn: Callable[..., Any],
    score_fn: Callable[[loop.FitResult], Any],
    optimizer: Callable[..., optax.GradientTransformation] | None = None,
    grid: Mapping[str, Sequence[float]] | None = None,
    seeds: int = 3,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    microbatch_size: int | None = None,
    check_isolation: bool = True,
) -> StudyResult:
    """Runs a plan under every setting of a grid with several seeds, in one program.

    For choosing settings on public or made-up records, and for experiments. Keys are
    ``Keys.insecure(0)`` and so on, the same ones for every setting. **Nothing here is
    private**: no epsilon covers what is chosen by looking at a study of private records;
    :func:`jaxdp.tune` chooses among private runs, and charges for the choice.

    Args:
      plan: a plan with noise.
      params: initial parameters.
      data: pytree of arrays with ``plan.num_examples`` rows.
      value_fn: as in :func:`jaxdp.fit`.
      score_fn: ``score_fn(result: FitResult) -> ()``, higher is better, as in
        :func:`jaxdp.tune`; traced by JAX, and of a result whose report is empty.
      optimizer: function of the grid's other names, by keyword, such as ``optax.sgd``;
        None for plans that make the steps themselves.
      grid: values of each name; every combination is a setting. ``l2_clip_norm`` is the
        plan's clip, for plans whose updates are gradients: the losses are scaled by the
        inverse and the gradients back, which is the same mechanism with another clip.
      seeds: number of runs of each setting.
      trainable: as in :func:`jaxdp.fit`.
      stacked: as in :func:`jaxdp.fit`.
      microbatch_size: as in :func:`jaxdp.fit`.
      check_isolation: as in :func:`jaxdp.fit`.

    Returns:
      A :class:`StudyResult`; ``str`` of it is a table.

    Raises:
      TypeError, ValueError: wrong arguments, named, before anything is compiled.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0)
      >>> found = jaxdp.study(
      ...     plan, jnp.zeros(2), jnp.ones((8, 2)),
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1),
      ...     score_fn=lambda result: -((result.params - 1) ** 2).sum(),
      ...     optimizer=optax.sgd, grid={"learning_rate": [0.01, 0.1]}, seeds=2,
      ... )
      >>> found.settings, found.scores.shape
      (({'learning_rate': 0.01}, {'learning_rate': 0.1}), (2, 2))
    """
    parallel.refuse_set_mesh()
    validate.instance(Plan, plan=plan)
    validate.integer(seeds=seeds)
    grid = _checked_grid(plan, {} if grid is None else grid)
    validate.is_callable(score_fn=score_fn, value_fn=value_fn)
    settings = tuple(
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    )
    first = _made(optimizer, settings[0])
    how = first, microbatch_size, None, trainable, stacked
    task = preparing.Task(plan, params, data, value_fn, *how)
    task = preparing.checked(task, None, streams=False)
    keys = [Keys.insecure(seed) for seed in range(seeds)]
    transform = preparing.make_transform(task, keys[0])
    preparing.check_losses(plan, task.params, task.data, value_fn, check_isolation)

    def run(
        values: dict[str, jax.Array], made: Any, keys: Keys, data: Any
    ) -> jax.Array:
        ratio = values.get(_CLIP, 1.0) / getattr(plan, _CLIP, 1.0)
        rest = task.optimizer if optimizer is None else _made(optimizer, values)
        if _CLIP in values:
            rest = optax.chain(optax.scale(ratio), rest)
        loss = _scaled(value_fn, 1 / ratio) if _CLIP in values else value_fn
        program = loop.make_program(plan, transform, rest, loss, trainable=trainable)
        start = jax.tree.map(jnp.asarray, task.params)
        log = jnp.zeros((plan.num_steps, made.release.shape[0]), jnp.float32)
        carry = loop.Carry(start, (made, rest.init(start)), log)
        carry = program(carry, keys, data, 0, plan.num_steps)
        made, state = carry.opt_state
        info = loop.FitInfo(carry.releases, public(state))
        result = loop.FitResult(plan.returned(made, carry.params), info, {})
        return jnp.asarray(score_fn(result), jnp.float32).reshape(())

    begun = [preparing.make_transform(task, key).init(task.params) for key in keys]
    stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
    made, roots = jax.tree.map(stack, *begun), jax.tree.map(stack, *keys)
    columns = {n: jnp.asarray([s[n] for s in settings], jnp.float32) for n in grid}
    per_seed = jax.vmap(run, in_axes=(None, 0, 0, None))
    every = jax.vmap(per_seed, in_axes=(0, None, None, None)) if grid else per_seed
    scores = jax.jit(every)(columns, made, roots, task.data)
    shape = (len(settings), seeds)
    return StudyResult(settings, np.asarray(scores, np.float64).reshape(shape))


def _checked_grid(plan: Plan, grid: Any) -> dict[str, tuple[float, ...]]:
    """Returns the grid with tuples of values; each name must have some."""
    validate.instance(Mapping, grid=grid)
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise TypeError(
                f"grid[{name!r}] must be a sequence of at least one number, got {values!r}"
            )
        if not all(isinstance(x, numbers.Real) and math.isfinite(x) for x in values):
            raise ValueError(f"grid[{name!r}] must be finite numbers, got {values!r}")
    if _CLIP in grid:
        if plan.makes_steps or plan.runs_algorithm or not hasattr(plan, _CLIP):
            raise ValueError(
                f"grid must not have {_CLIP} for {plan.family}, whose updates are no "
                "gradients of one clip: make a study of each plan"
            )
        validate.positive(**{_CLIP: min(grid[_CLIP])})
    return {name: tuple(map(float, values)) for name, values in grid.items()}


def _made(optimizer: Any, setting: Mapping[str, Any]) -> Any:
    """Returns the optimizer of a setting, or None where the plan makes the steps."""
    values = {name: value for name, value in setting.items() if name != _CLIP}
    if optimizer is None:
        if values:
            raise ValueError(
                f"optimizer must be a function of {', '.join(values)}, got None"
            )
        return None
    if isinstance(optimizer, optax.GradientTransformation) or not callable(optimizer):
        raise TypeError(
            "optimizer must be a function that makes one, such as optax.sgd or "
            f"lambda: optax.sgd(0.1), got {type(optimizer).__name__}"
        )
    try:
        return optimizer(**values)
    except TypeError as error:
        raise TypeError(
            f"optimizer must take {list(values)} by name: {error}"
        ) from error


def _scaled(value_fn: Any, factor: Any) -> Any:
    """Returns the losses times a public factor."""
    if isinstance(value_fn, LazyLoss):
        return LazyLoss(
            lambda params, batch, at: factor * value_fn.fn(params, batch, at)
        )
    return lambda params, batch: factor * value_fn(params, batch)
