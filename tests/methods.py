"""Registry of methods: a line in METHODS puts a method through the conformance suite.

A method is run here in one way, whatever it is: a step reads a state, a point, the data and
the number of the step, and gives a state and the updates, if there are any. Steps are
compiled once a method, and read all that they need of the keys from the state.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import Keys, plans, sampling

KEYS = Keys.insecure(3)
N, D = 24, 4

BATCH = (
    jax.random.normal(jax.random.key(1), (N, 3)),
    jax.random.normal(jax.random.key(2), (N,)),
)
PARAMS = {
    "w": jnp.asarray([0.3, -0.2, 0.1]),
    "layers": {"b": jnp.asarray([[0.5, 0.1], [0.2, -0.4]])},
}


def value_fn(params: Any, batch: Any) -> jax.Array:
    """A smooth loss (B,) that moves every leaf of PARAMS and is elementwise in it."""
    x, y = batch
    residual = x @ params["w"] + jnp.sum(params["layers"]["b"]) - y
    return jnp.sqrt(1 + residual**2)


def curved(x: jax.Array, batch: jax.Array) -> jax.Array:
    """A loss (B,) that a record turns round with its sign, of gradients that change."""
    return batch @ x + batch[:, 0] * jnp.sum(x**2)


def _whole(updates: Any, state: Any) -> Any:
    del state
    return updates


def _release(updates: Any, state: Any) -> Any:
    del updates
    return state.release


SGD = optax.sgd(0.1)


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A method: its plan, its constructor, a small problem, and its bound.

    Attributes:
      name: of the case.
      plan: with noise, of few steps.
      make: ``make(plan, keys)``: the public constructor.
      data: records, with a leading axis of N.
      silent: data of which releases say nothing: they are noise alone.
      value_fn: losses, a problem or queries.
      params: where a run starts.
      bounds: by place in the data, how far the record there moves any release, in the
        Euclidean norm (in the sum of absolute values under Laplace noise). None where
        releases are draws, whose laws are tested with their methods.
      seen: what the bounds are about, given updates and state.
      reads: ``rows`` (raw rows and a mask), ``batch`` (of ``jaxdp.sampling``) or ``data``.
      fits: whether ``jaxdp.fit`` runs it.
      gradients: whether its updates are gradients, which an optimizer follows.
      follows: that optimizer; what it keeps does not change its steps.
      non_private: gradient of the method without noise and clip.
      bare: the plan before its noise was chosen, where no field says that there is none.
      points: releases, of the first steps, that no direction root decides. None: all.
    """

    name: str
    plan: Any
    make: Callable[..., Any]
    data: Any = BATCH
    silent: Any = None
    value_fn: Any = value_fn
    params: Any = dataclasses.field(default_factory=lambda: PARAMS)
    bounds: dict[int, float] | None = None
    seen: Callable[[Any, Any], Any] = _release
    reads: str = "batch"
    fits: bool = True
    gradients: bool = False
    follows: optax.GradientTransformation = SGD
    non_private: Callable[[Any, Any, Any], Any] | None = None
    bare: Any = None
    points: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def phases(self) -> list[str]:
        """Names of the phases of all steps, and of one more."""
        names = [p.name for p in self.plan.phases for _ in range(p.num_steps)]
        return [names[t % len(names)] for t in range(self.plan.num_steps + 1)]

    @property
    def optimizer(self) -> optax.GradientTransformation | None:
        """Optimizer that ``fit`` is given."""
        return self.follows if self.gradients else None

    def neighbours(self, place: int) -> tuple[Any, Any]:
        """Data sets that differ in one record, which is as steep as can be in both.

        Where the relation is of removal, one of them has a record that counts nothing.
        """

        def steep(x: jax.Array, sign: float) -> jax.Array:
            return jnp.asarray(x).at[place].set(sign)

        def both(sign: float) -> Any:
            if isinstance(self.data, tuple):  # The target's sign is that of the slope.
                x, y = self.data
                return steep(x, 1e3), steep(y, sign * 1e6)
            return steep(self.data, sign * 1e4)

        replaced = self.plan.relation == "replace_one"
        return both(1.0), both(-1.0 if replaced else math.nan)


#: Traces of each phase's step.
COUNTS: dict[Method, dict[str, int]] = {}


def stepped(method: Method, tx: Any) -> Callable[..., tuple[Any, Any]]:
    """``(state, params, keys, t, data, mask, phase) -> (updates, state)``."""

    def step(
        state: Any, params: Any, keys: Any, t: Any, data: Any, mask: Any, phase: str
    ) -> tuple[Any, Any]:
        if isinstance(tx, jaxdp.Algorithm):
            state, info = tx.step(state, data, value_fn=method.value_fn)
            return info.release, state
        given: dict[str, Any] = {"value_fn": method.value_fn}
        updates = None
        if method.reads == "batch":
            batch = sampling.batch(method.plan, keys, t, data, phase=phase)
            given |= {"batch": batch, "phase": phase}
            if method.plan.family == "prefix_sum":
                updates = batch.records
        else:
            given |= {"batch": data, "mask": mask}
        return tx.update(updates, state, params, **given)

    return step


@functools.cache
def made(method: Method) -> tuple[Any, Callable[..., tuple[Any, Any]]]:
    """What runs the method, and its step, compiled once and counted in COUNTS."""
    tx, traced = method.make(method.plan, KEYS), COUNTS.setdefault(method, {})
    step = stepped(method, tx)

    def counted(*given: Any) -> tuple[Any, Any]:
        data, phase = given[4], given[6]
        if len(jax.tree.leaves(data)[0]) == N:  # Longer batches are other programs.
            traced[phase] = traced.get(phase, 0) + 1
        return step(*given)

    return tx, jax.jit(counted, static_argnums=6, donate_argnums=0)


def own(tree: Any) -> Any:
    """Copies of all arrays: a step takes the buffers of its state."""
    return jax.tree.map(jnp.array, tree)


@dataclasses.dataclass
class Step:
    """A step as it was seen: its updates, the state after it and the next point."""

    updates: Any
    state: Any
    params: Any


def moved(method: Method, params: Any, updates: Any) -> Any:
    """The next point of a run by hand."""
    if method.plan.runs_algorithm and not method.gradients:
        return params
    if method.gradients:
        updates, _ = method.follows.update(updates, method.follows.init(params), params)
    return optax.apply_updates(params, updates)


def steps(
    method: Method,
    keys: Keys = KEYS,
    data: Any = None,
    count: int | None = None,
    points: list[Any] | None = None,
) -> Iterator[Step]:
    """A run by hand: at ``points``, if they are given, else where updates lead."""
    _, step = made(method)
    data = method.data if data is None else data
    mask = jnp.ones(N, bool) if method.reads == "rows" else None
    params = method.params
    state = own(method.make(method.plan, keys).init(params))
    for t, phase in enumerate(method.phases[:count]):
        at = params if points is None else points[t]
        updates, state = step(state, at, keys, jnp.int32(t), data, mask, phase)
        params = moved(method, params, updates)
        kept, state = state, own(state)
        yield Step(updates, kept, params)


@functools.cache
def ran(method: Method) -> tuple[Step, ...]:
    """The run of KEYS on the method's data: all its steps, and one beyond."""
    return tuple(steps(method))


def numbers(tree: Any) -> list[np.ndarray]:
    """All numbers of a tree, with the words of its keys."""

    def shown(x: Any) -> Any:
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if key else x

    return [np.asarray(shown(x)) for x in jax.tree.leaves(tree)]


# --- the methods ---------------------------------------------------------------------


def _mezo(law: str, num: int) -> Callable[[Any, Any, Any], Any]:
    def gradient(params: Any, batch: Any, state: Any) -> Any:
        """MeZO, plainly: the difference of two mean losses times the direction."""
        from jaxdp.core import keys
        from jaxdp.kernels import sphere

        key = keys.at_step(state.direction, state.count)
        rows = sphere.directions(key, params, law=law, num=num)
        total = jax.tree.map(jnp.zeros_like, params)
        for k in range(num):
            u = sphere.materialise(sphere.select(rows, k), params)
            plus = jax.tree.map(lambda p, d: p + 1e-2 * d, params, u)
            minus = jax.tree.map(lambda p, d: p - 1e-2 * d, params, u)
            slope = value_fn(plus, batch).mean() - value_fn(minus, batch).mean()
            total = optax.tree.add_scale(total, slope / 2e-2 / num, u)
        return total

    return gradient


def _mean_gradient(params: Any, batch: Any, state: Any) -> Any:
    del state
    return jax.grad(lambda p: value_fn(p, batch).mean())(params)


COMMON: dict[str, Any] = {
    "num_examples": N,
    "num_steps": 5,
    "sampling": sampling.FullBatch(),
    "relation": "replace_one",
    "l2_clip_norm": 0.7,
    "noise_multiplier": 1.5,
    "delta": 1e-5,
}


def _maker(
    name: str,
    plan: Any,
    make: Any,
    non_private: Any,
    seen: Any,
    stretch: float = 1.0,
) -> Method:
    """A maker of gradients from the whole data set.

    Its clip is of what is released times ``stretch``.
    """
    moves = 2 if plan.relation == "replace_one" else 1
    return Method(
        name,
        plan,
        make,
        silent=jax.tree.map(lambda x: x + jnp.nan, BATCH),
        bounds={5: moves * plan.l2_clip_norm / N / stretch},
        seen=seen,
        reads="rows",
        gradients=True,
        non_private=non_private,
    )


def _zeroth_order(law: str, num: int, **changes: Any) -> Method:
    plan = plans.DPZero(
        smoothing_radius=1e-2, direction=law, num_directions=num, **COMMON | changes
    )
    words = [x for x in changes.values() if isinstance(x, str)]
    name = "-".join(["dpzero", law, str(num), *words])
    return _maker(name, plan, jaxdp.dpzero, _mezo(law, num), _release)


TUNING = plans.ClipTuning(
    target_unclipped_quantile=0.7, learning_rate=0.2, count_noise_multiplier=3.0
)

#: Every transform that makes gradients from rows.
GRADIENT_MAKERS = (
    _zeroth_order("sphere", 1),
    _zeroth_order("orthonormal", 3),
    _zeroth_order("gaussian", 2, noise="laplace", relation="zero_out"),
    _maker(
        "dpgd_zeroth_order",
        plans.DPGDZerothOrder(smoothing_radius=1e-2, **COMMON),
        jaxdp.dpgd_zeroth_order,
        _mezo("sphere", 1),
        _release,
        math.sqrt(7),  # A slope, of a gradient along a direction as long as this.
    ),
    _maker("dpgd", plans.DPGD(**COMMON), jaxdp.dpgd, _mean_gradient, _whole),
)
#: Whose clip moves with its releases: the bound is of the first step alone.
TUNED = dataclasses.replace(
    _zeroth_order("rademacher", 2, clip_tuning=TUNING), name="dpzero-tuned", bounds=None
)
TUNED_GRADIENTS = dataclasses.replace(
    _maker(
        "dpgd-tuned",
        plans.DPGD(clip_tuning=TUNING, **COMMON),
        jaxdp.dpgd,
        _mean_gradient,
        _whole,
    ),
    bounds=None,
)


ROWS = np.asarray(jax.random.normal(jax.random.key(3), (N, D)))
NAN = np.full((N, D), np.nan, np.float32)
SHARED: dict[str, Any] = COMMON | {"l2_clip_norm": 1.0, "noise_multiplier": 1.0}
ORACLE: dict[str, Any] = SHARED | {
    "num_steps": 5,
    "sampling": sampling.SinglePassRestarts(
        period=2, restart_batch_size=5, batch_size=2
    ),
    "restart_l2_clip_norm": 1.0,
    "smoothing_radius": 0.1,
    "max_step": 0.1,
    "window": 2,
    "num_directions": 2,
    "learning_rate": 0.1,
}
SEVERAL = ORACLE | {
    "sampling": sampling.MultiPassRestarts(period=1),
    "prefix_noise": "independent",
}


def _o2nc(name: str, bounds: dict[int, float] | None, **fields: Any) -> Method:
    def estimate(updates: Any, state: Any) -> Any:
        del updates
        return state.oracle.estimate

    return Method(
        name,
        plans.O2NC(**fields),
        lambda plan, keys: plan.transform(keys),
        ROWS,
        NAN,
        curved,
        jnp.ones(D),
        bounds,
        estimate,
    )


PASS: dict[str, Any] = {"sampling": sampling.SinglePass(3), "num_steps": 4}
SEARCH: dict[str, Any] = SHARED | {
    "num_steps": 4,
    "sampling": sampling.AdaptiveCursor(),
    "smoothness": 1.0,
    "refresh_batch_size": 4,
    "difference_batch_rate": 2.0,
    "drift_limit": 3.0,
    "max_differences": 4,
    # Every step is small: after a refresh there is an escape.
    "trigger_norm": 1e6,
    "escape_steps": 3,
    "escape_radius": 1e3,
    "escape_noise_std": 0.1,
    "hessian_batch_size": 2,
    "hessian_clip_norm": 1.0,
}
DESCENT = SEARCH | {"escape_steps": None, "trigger_norm": 1e-6}
RELEASED: dict[str, Any] = SEARCH | {
    "hessian": "released",
    "hessian_lipschitz": 1.0,
    "dim": D,
    "escape_steps": 1,
    "curvature_threshold": 0.3,
}


def _estimate(updates: Any, state: Any) -> Any:
    del updates
    return state.spider.estimate


def _search(name: str, **fields: Any) -> Method:
    return Method(
        name,
        plans.SOSP(**fields),
        jaxdp.sosp,
        ROWS,
        NAN,
        curved,
        jnp.ones(D),
        # The first refresh; where later queries are depends on it.
        {0: 2 * 1.0 / 4},
        _estimate,
    )


VERTICES: dict[str, Any] = {"num_examples": N, "relation": "replace_one"}
PLAYERS: dict[str, Any] = VERTICES | {
    "dim_x": D,
    "dim_y": D,
    "linf_clip_norm_x": 1.0,
    "linf_clip_norm_y": 1.0,
}
GAME = jaxdp.MatrixGame(np.random.default_rng(0).uniform(-1, 1, (D, D)))
QUERIES = jaxdp.Marginals((2, 2), 1)
UNIT = np.asarray(jax.random.uniform(jax.random.key(4), (N, D), minval=-1))


def _draws(
    name: str, bare: Any, make: Any, data: Any, silent: Any, problem: Any
) -> Method:
    plan = bare.calibrate(epsilon=5.0, delta=1e-5)
    start = plan.uniform()
    return Method(name, plan, make, data, silent, problem, start, bare=bare)


SADDLES = (
    _draws(
        "saddle",
        plans.Saddle(**PLAYERS, **PASS),
        jaxdp.saddle_mirror_descent,
        (UNIT, -UNIT),
        (NAN, NAN),
        GAME,
    ),
    _draws(
        "bias_reduced",
        plans.SaddleBiasReduced(**PLAYERS, vertex_budget=5, level_seed=1),
        jaxdp.saddle_bias_reduced,
        (UNIT, -UNIT),
        (NAN, NAN),
        GAME,
    ),
    dataclasses.replace(
        _draws(
            "convex",
            plans.ConvexSimplex(
                **VERTICES,
                **PASS,
                dim=D,
                linf_clip_norm=1.0,
                num_draws=2,
                refresh_every=2,
            ),
            jaxdp.simplex_convex,
            UNIT,
            NAN,
            jaxdp.Problem(lambda x, batch: (batch @ x) ** 2),
        ),
        points=1,  # Later ones are of iterates that the public root chooses.
    ),
    _draws(
        "frank_wolfe",
        plans.FrankWolfe(
            **VERTICES,
            num_steps=4,
            sampling=sampling.FullBatch(),
            dim=D,
            linf_clip_norm=1.0,
        ),
        jaxdp.frank_wolfe,
        UNIT,
        NAN,
        # Dear at vertex 0: the last draw of a run is another.
        jaxdp.Problem(lambda x, batch: (batch @ x) ** 2 + 9 * x[0]),
    ),
    _draws(
        "synthetic",
        plans.SyntheticData(
            **VERTICES,
            num_steps=5,
            domain_size=4,
            num_queries=2 * QUERIES.num_queries,
        ),
        jaxdp.synthetic_data,
        np.random.default_rng(0).integers(0, 4, N).astype(np.int32),
        np.arange(N, dtype=np.int32) % 4,
        QUERIES,
    ),
)

TABLE = plans.MWEM(
    **VERTICES,
    num_steps=4,
    sizes=(2, 2),
    attributes=((0,), (1,), (0, 1)),
    num_start=2,
).calibrate(epsilon=5.0, delta=1e-5)

#: Gradients of both players of a game, clipped together.
SGDA = dataclasses.replace(
    GRADIENT_MAKERS[-1],
    name="dp_sgda",
    data=(UNIT, -UNIT),
    silent=(NAN, NAN),
    value_fn=GAME,
    params=(jnp.ones(D) / D, jnp.ones(D) / D),
    follows=jaxdp.descent_ascent(0.1, 0.1),
    non_private=None,
)

METHODS = (
    *GRADIENT_MAKERS,
    TUNED,
    TUNED_GRADIENTS,
    SGDA,
    Method(
        "mwem",
        TABLE,
        jaxdp.mwem,
        np.random.default_rng(0).integers(0, 4, N).astype(np.int32),
        np.full(N, -1, np.int32),
        TABLE.queries,
        TABLE.uniform(),
    ),
    _o2nc("o2nc", {0: 2 / 5, 5: 2 / 2}, **ORACLE),
    # Whose clips move with its releases: the bound is of the first period alone.
    _o2nc("o2nc-tuned", None, **ORACLE, clip_tuning=TUNING),
    _o2nc(
        "o2nc-gradients",
        {0: 2 / N},
        **SEVERAL,
        oracle="first_order",
        direction="ball",
        difference="common",
    ),
    _o2nc(
        "o2nc-slopes",
        # Two slopes of four: the estimate may be longer by sqrt(4) / 2.
        {0: 2 / N},
        **SEVERAL,
        oracle="scalar",
        difference="antithetic",
        share_directions=True,
    ),
    Method(
        "prefix_sum",
        plans.PrefixSum(**SHARED | PASS),
        jaxdp.private_prefix_sum,
        ROWS,
        NAN,
        params=jnp.zeros(D),
        bounds={0: 2 / 3, 5: 2 / 3},
        seen=_whole,
        fits=False,
        gradients=True,
    ),
    Method(
        "spider",
        plans.SOSP(**DESCENT),
        jaxdp.private_spider,
        ROWS,
        NAN,
        curved,
        jnp.ones(D),
        {0: 2 / 4, 4: 2 / 2},
        _whole,
        "data",
        fits=False,
        gradients=True,
    ),
    _search("spiderboost", **DESCENT),
    _search("sosp", **SEARCH),
    _search("sosp-released", **RELEASED),
    *SADDLES,
)
