r"""Recommendation of a plan, from public numbers alone, for every family.

Of a loss (:mod:`jaxdp.planner.gradients`), a game or a problem over a simplex
(:mod:`jaxdp.planner.problems`), and the marginals of a table (:mod:`jaxdp.planner.tables`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.core import validate
from jaxdp.core.types import PathPredicate, Relation, ValueFn
from jaxdp.planner import claims, gradients, problems, tables
from jaxdp.planner.gradients import planned as planned
from jaxdp.planner.results import PlannedGame as PlannedGame
from jaxdp.planner.results import PlannedRun as PlannedRun
from jaxdp.planner.results import PlannedTable as PlannedTable
from jaxdp.planner.results import Recommendation as Recommendation
from jaxdp.saddle.oracles.queries import Marginals
from jaxdp.saddle.oracles.sums import VertexGradients

#: Errors as near as this count as equal, of a loss and of players: then the cost decides.
_NEAR, _NEAR_PLAYERS = 1.1, 1.02


def recommend(
    value_fn: ValueFn | VertexGradients | Marginals,
    params: Any = None,
    records: Any = None,
    *,
    num_examples: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    backpropagation: bool = True,
    num_passes: float | None = None,
    batch_size: int | None = None,
    smoothing_radius: float = 1e-3,
    num_public: int | None = None,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    seed: int = 0,
) -> Recommendation:
    """Chooses method, clip, step size and steps of a problem, without private data.

    The numbers follow from the budget, the sizes and the scale of the loss on ``records``,
    which must be **public or made up**. Nothing private is read and nothing is charged.

    ======================================  ==============================================
    ``value_fn``                            methods that are compared
    ======================================  ==============================================
    a loss                                  ``DPGD``, ``DPZero``
    a problem of two players                ``Saddle``, ``SaddleBiasReduced`` (unless it is
                                            a ``MatrixGame``), DP-SGDA: ``DPGD`` with
                                            :func:`jaxdp.descent_ascent`
    a problem of one, over a simplex        ``ConvexSimplex``, ``FrankWolfe``
    ``jaxdp.Marginals``, of a table         ``MWEM`` (all marginals at once, or by rounds),
                                            ``SyntheticData``
    ======================================  ==============================================

    Methods for problems of players are rehearsed on the public records, with the noise of
    the private run: that takes seconds to minutes, the longer the more vertices there are.
    Tables are decided by noise alone, and need no records.

    Args:
      value_fn: as in :func:`jaxdp.fit`: a loss, a problem, or the marginals of a table.
      params: where the run starts; of a problem, one point or a pair of points. DP-SGDA
        moves such points; ``Saddle`` starts from weights of vertices, ``plan.uniform()``.
      records: public records, or made-up ones of the same kind, whose labels may be made
        up, too; pytree with leading axis B. Fifty are enough.
      num_examples: n, private records of the run; public.
      epsilon: > 0; the budget.
      delta: in (0, 1); the budget.
      relation: which data sets are neighbours.
      backpropagation: whether gradients of single records fit into memory. ``False`` plans
        for forward passes alone.
      num_passes: the most evaluations of each record's loss, on average, in the whole
        run; a gradient counts as three. None: 240 for gradients, 8000 for slopes. Less
        than that of two full batches leaves a problem of players one pass.
      batch_size: expected records of a step, drawn by Poisson sampling; None: all. Like the
        next five, and ``backpropagation``, of losses alone.
      smoothing_radius: of ``DPZero``: wider for a loss that is no smooth function.
      num_public: public records at hand to train on, of the same kind as the private ones:
        the answer says what they would do. ``records`` may be some of them.
      trainable: as in :func:`jaxdp.fit`.
      stacked: as in :func:`jaxdp.fit`.
      seed: of the directions that measure the scale.

    Returns:
      Plans with their optimizers, the one to take first::

        found = jaxdp.recommend(loss, params, public, num_examples=n, ...)
        jaxdp.fit(found.plan, keys, params, data, value_fn=loss, optimizer=found.optimizer)

      A problem of players starts from ``found.best.start``, and its points are
      ``found.best.output(result)``.

    Raises:
      ValueError: records whose gradients are zero or not finite, too few passes for a
        step, an option that is for losses alone, or numbers out of range.
      TypeError: of the wrong kind, or missing.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> loss = lambda w, x: jnp.sum((w - x) ** 2, axis=-1)
      >>> made_up = jax.random.uniform(jax.random.key(0), (50, 2))
      >>> found = jaxdp.recommend(
      ...     loss, jnp.zeros(2), made_up, num_examples=1000, epsilon=2.0, delta=1e-5,
      ...     relation="replace_one",
      ... )
      >>> type(found.plan).__name__, found.plan.num_steps
      ('DPGD', 80)
      >>> keys = jaxdp.Keys.insecure(0)
      >>> data = jax.random.uniform(jax.random.key(1), (1000, 2))
      >>> fitted = jaxdp.fit(
      ...     found.plan, keys, jnp.zeros(2), data, value_fn=loss,
      ...     optimizer=found.optimizer,
      ... )
      >>> bool(jnp.all(jnp.abs(fitted.params - 0.5) < 0.05))  # The mean is near 0.5.
      True
      >>> table = jaxdp.Marginals(sizes=(4, 3, 5), degree=2)
      >>> found = jaxdp.recommend(
      ...     table, num_examples=10_000, epsilon=1.0, delta=1e-6, relation="replace_one",
      ... )
      >>> found.best.method, found.best.noise < 0.1
      ('marginals', True)
    """
    validate.is_callable(value_fn=value_fn)
    validate.integer(num_examples=num_examples)
    validate.positive(epsilon=epsilon)
    validate.probability(delta=delta)
    validate.instance(bool, backpropagation=backpropagation)
    if num_passes is not None:
        validate.positive(num_passes=num_passes)
    if batch_size is not None:
        validate.integer(at_most=num_examples, batch_size=batch_size)
    if num_public is not None:
        validate.integer(num_public=num_public)
    budget = {"epsilon": epsilon, "delta": delta}
    shared: dict[str, Any] = {"num_examples": num_examples, "relation": relation}
    of_losses = {
        "backpropagation": backpropagation,
        "batch_size": batch_size,
        "trainable": trainable,
        "stacked": stacked,
    }
    if isinstance(value_fn, Marginals | VertexGradients):
        for name, given in {**of_losses, "num_public": num_public}.items():
            if given is not (True if name == "backpropagation" else None):
                raise ValueError(
                    f"{name} must be left out for a {type(value_fn).__name__}, got "
                    f"{given!r}: it is for losses alone"
                )
    if isinstance(value_fn, Marginals):
        found, reason = tables.candidates(value_fn, budget, shared)
        return Recommendation(found, f"{type(found[0].plan).__name__}: {reason}.")
    if params is None or records is None:
        raise TypeError(
            "params and records must be given, but for the marginals of a table; got "
            f"params={params!r}, records={'None' if records is None else 'records'}"
        )
    params, records = jax.tree.map(jnp.asarray, (params, records))
    if isinstance(value_fn, VertexGradients):
        of = problems.players(value_fn, params, records, budget, shared, num_passes)
        best = list(problems.candidates(of))
        return Recommendation(*_ranked(best, problems.ERROR, _NEAR_PLAYERS))
    best = gradients.candidates(
        value_fn,
        params,
        records,
        budget,
        shared,
        num_passes=num_passes,
        smoothing_radius=smoothing_radius,
        seed=seed,
        **of_losses,
    )
    ranked, reason = _ranked(list(best), gradients.ERROR, _NEAR)
    public = "" if num_public is None else claims.PUBLIC.format(count=num_public)
    return Recommendation(ranked, reason, gradients.OTHERS, public)


def _ranked(found: list[Any], error: str, near: float) -> tuple[tuple[Any, ...], str]:
    """Returns candidates with the one to take first, and why it is taken."""
    found = sorted(found, key=lambda one: one.error)
    alike = [one for one in found if one.error <= near * found[0].error]
    first = min(alike, key=lambda one: one.num_passes)
    name = first.name
    if len(found) == 1:
        reason = f"{name} is the one that fits."
    elif len(alike) == 1:
        reason = f"{name} has the least {error}."
    else:
        reason = f"The errors are alike, and {name} needs fewer passes."
    return (first, *(one for one in found if one is not first)), reason
