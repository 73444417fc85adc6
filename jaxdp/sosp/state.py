"""State of a search for second-order stationary points."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.core import run_state
from jaxdp.core.types import SOSPPlan
from jaxdp.kernels import stretch
from jaxdp.sosp import gradients
from jaxdp.sosp import spider as spiders

#: What is known of the best point: nothing; it was seen; it is an anchor that was not
#: tested; its escape failed.
NOTHING, SEEN, UNTESTED, CERTIFIED = -1, 0, 1, 2
#: Why a run ended.
RUNNING, CERTIFICATE, DATA, STEPS = 0, 1, 2, 3


class Hessian(NamedTuple):
    """Running sum of Hessians and its copy at the anchor, if they are kept. Secret."""

    total: Any  # stretch.Wide, shape=(d * d,): running sum; () where none is kept
    frozen: Any  # shape=(d, d), dtype=float32: that of the anchor; ()

    SECRET = ("total", "frozen")
    KEPT = ("total", "frozen")
    __repr__ = run_state.hiding_repr


class Escape(NamedTuple):
    """State of the current or last escape. Public but for the key and the Hessian."""

    active: jax.Array  # shape=(), dtype=bool
    left: jax.Array  # shape=(), dtype=int32; steps of it that are left
    cool: jax.Array  # shape=(), dtype=int32; plain steps before another may begin
    anchor: jax.Array  # shape=(d,), dtype=float32
    gradient: jax.Array  # shape=(d,), dtype=float32; the estimate at the anchor
    first: jax.Array  # shape=(), dtype=int32; first record of its Hessians' batch
    spent: jax.Array  # shape=(), dtype=float32; of the filter's budget for that batch
    since: jax.Array  # shape=(), dtype=int32; escapes since the last refresh
    reach: jax.Array  # shape=(), dtype=float32; bound on the running sum, in clips
    hessian: Hessian  # secret
    root: jax.Array  # shape=(), key; steps are folded into it; secret

    SECRET = ("root",)
    __repr__ = run_state.hiding_repr


class Best(NamedTuple):
    """Point that the run would return. Public."""

    point: Any  # like params
    norm: jax.Array  # shape=(), dtype=float32; of the released gradient there
    rank: jax.Array  # shape=(), dtype=int32; NOTHING, SEEN, UNTESTED or CERTIFIED


class SOSPState(NamedTuple):
    """State of :func:`sosp`."""

    horizon: run_state.Horizon
    point: Any  # like params; the iterate, public
    spider: spiders.Spider
    escape: Escape
    best: Best
    escapes: jax.Array  # shape=(), dtype=int32; begun so far
    records: jax.Array  # shape=(), dtype=int32; of Hessians, read so far
    ended: jax.Array  # shape=(), dtype=int32; RUNNING, CERTIFICATE, DATA or STEPS
    release: jax.Array  # shape=(6,), dtype=float32; as SOSPInfo


class SOSPInfo(NamedTuple):
    """Logged numbers of a step: norms of its releases, and functions of releases.

    ``release`` holds: the kind of gradient query (0 none, 1 refresh, 2 difference), the
    records that were spent by it, the norm of the gradient estimate, the escape steps that
    are left (-1 outside of an escape), the length of the step, the rank of the best point.
    """

    release: jax.Array  # shape=(6,), dtype=float32


class Run(NamedTuple):
    """Constants of a run: plan, loss, data and slice size."""

    plan: SOSPPlan
    loss: gradients.Loss
    data: Any
    size: int

    def records(self, first: jax.Array, count: Any) -> gradients.Records:
        count = jnp.asarray(count, jnp.int32)
        return gradients.Records(self.data, None, first, count, self.size)


def tracks(plan: SOSPPlan) -> bool:
    """Returns True if the plan keeps a running Hessian."""
    return plan.hessian == "tracked" and plan.escape_steps is not None


def no_escape(plan: SOSPPlan, flat: jax.Array, root: jax.Array) -> Escape:
    """Returns the escape state before the first escape.

    Raises:
      ValueError: parameters of another size than the plan's, or too many for its grids.
    """
    dim = flat.size
    if plan.dim not in (None, dim):
        raise ValueError(
            f"params must have plan.dim = {plan.dim} elements in all, got {dim}"
        )
    if plan.escape_steps is not None and plan.hessian == "on_demand":
        spiders.check_dim(dim, plan.product_grid(dim).bits)
    elif plan.escape_steps is not None and plan.hessian == "released":
        spiders.check_dim(dim * (dim + 1) // 2, plan.matrix_grid.bits)
    kept = Hessian((), ())
    if tracks(plan):
        kept = Hessian(stretch.zero((dim * dim,)), jnp.zeros((dim, dim), jnp.float32))
    zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    none = jnp.zeros(())
    return Escape(no, zero, zero, flat, flat * 0, zero, none, zero, none, kept, root)
