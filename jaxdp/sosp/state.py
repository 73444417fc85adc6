"""State of a search for second-order stationary points."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.core import run_state
from jaxdp.kernels import stretch
from jaxdp.kernels.finite_difference import AxisName
from jaxdp.sosp import gradients
from jaxdp.sosp import spider as spiders
from jaxdp.sosp.roles import SOSPNumbers

#: What is known of the best point: nothing; it was seen; it is an anchor that was not
#: tested; its escape failed.
NOTHING, SEEN, UNTESTED, CERTIFIED = -1, 0, 1, 2
#: Why a run ended.
RUNNING, CERTIFICATE, DATA, STEPS = 0, 1, 2, 3


class RunningHessian(NamedTuple):
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
    hessian: RunningHessian  # secret
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

    count, exhausted = run_state.count, run_state.exhausted


class SOSPInfo(NamedTuple):
    """Logged numbers of a step: norms of its releases, and functions of releases.

    ``release`` holds: the kind of gradient query (0 none, 1 refresh, 2 difference), the
    records that were spent by it, the norm of the gradient estimate, the escape steps that
    are left (-1 outside of an escape), the length of the step, the rank of the best point.
    """

    release: jax.Array  # shape=(6,), dtype=float32


class Search(NamedTuple):
    """Constants of a step: numbers, loss, data and their mask, slice size, shared axes."""

    numbers: SOSPNumbers
    loss: gradients.Loss
    data: Any
    mask: jax.Array | None
    size: int
    axis_name: AxisName | None = None

    def records(self, first: jax.Array, count: Any) -> gradients.Records:
        count = jnp.asarray(count, jnp.int32)
        how = self.size, self.axis_name
        return gradients.Records(self.data, self.mask, first, count, *how)


def no_escape(numbers: SOSPNumbers, flat: jax.Array, root: jax.Array) -> Escape:
    """Returns the escape state before the first escape.

    Raises:
      ValueError: parameters of another size than the plan's, or too many for its grids.
    """
    dim = flat.size
    if numbers.dim not in (None, dim):
        raise ValueError(
            f"params must have plan.dim = {numbers.dim} elements in all, got {dim}"
        )
    role = numbers.roles.hessian
    if role is not None and numbers.hessian == "on_demand":
        spiders.check_dim(dim, role.grid(dim).bits)
    elif role is not None and numbers.hessian == "released":
        spiders.check_dim(dim * (dim + 1) // 2, role.grid.bits)
    kept = RunningHessian((), ())
    if numbers.tracks:
        total = stretch.zero((dim * dim,))
        kept = RunningHessian(total, jnp.zeros((dim, dim), jnp.float32))
    zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    none = jnp.zeros(())
    return Escape(no, zero, zero, flat, flat * 0, zero, none, zero, none, kept, root)
