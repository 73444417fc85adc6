"""Warnings about radii and steps below the resolution of a run's arithmetic."""

import math
import re
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.core import run_state, validate
from jaxdp.core.types import Perturbation
from jaxdp.kernels.sphere import path_str
from jaxdp.kernels.stochastic_rounding import NARROW

#: The least radius that the rounding of losses and activations leaves visible: at 1e-6 in
#: float32 the error of a slope is 1.4 % (14 % at 1e-7), at 3e-4 in bfloat16 about a half
#: (as large as the slope at 1e-4); ``bench/slope_error.py``. In float64 only the spacing
#: of the parameters counts. Where products alone are rounded, to tensorfloat32: between
#: float32's and bfloat16's, for it has three bits more than the latter.
LEAST_RADIUS = {
    "float32": 1e-6,
    "tensorfloat32": 4e-5,
    "bfloat16": 3e-4,
    "float16": 3e-4,
}
#: Distance from 1 to the next number of what products of float32 are rounded to.
_EPS = {"tensorfloat32": 2.0**-10, "bfloat16": 2.0**-7}
#: Values of ``jax_default_matmul_precision`` at which an accelerator rounds less than that.
_EXACT = re.compile(r"highest|float32|F32_F32_F32|F64_F64_F64|.*_X[369]")

#: Elements that are looked at in each leaf.
_SAMPLE = 1024
#: From this size on, only those elements are fetched from the device.
_LARGE = 2**20


def warn_if_unresolved(
    perturbation: Perturbation,
    params: Any,
    *,
    trainable: run_state.Trainable = None,
    compute_dtype: Any = None,
    stacklevel: int = 1,
) -> None:
    """Warns if rounding hides most of a perturbation's effect on the losses.

    Slopes are then noise, and nothing is learned, or gradients are of a loss that is not
    smoothed; privacy is not touched. Reads a sample of the parameters on the host, and no
    data. The least recommended radius is the larger of two, for the coarsest dtype at hand:

    * what :data:`LEAST_RADIUS` gives for losses computed in that dtype, where they are
      subtracted;
    * half the distance of neighbouring numbers, at the median of the elements that move:
      below it, most parameters round back to where they were.

    On an accelerator the factors of float32 products are rounded further by default
    (:func:`product_dtype`), and that counts.

    Args:
      perturbation: its radius is in units of the parameters; 0 never warns.
      params: the initial parameters, public: a pytree of arrays of any shape and dtype.
      trainable: which leaves move, as in :func:`jaxdp.fit`.
      compute_dtype: what the losses cast the parameters to; None is their own dtype.
      stacklevel: whose line the warning names: 1 is the caller's, 2 its caller's.
    """
    radius, share, differences, may_be_zero = perturbation
    validate.non_negative(smoothing_radius=radius)
    if radius == 0:
        return
    floors = LEAST_RADIUS if differences else {}
    found = [
        (max(floors.get(dtype, 0.0), _median(sizes)), dtype)
        for dtype, sizes in _spacings(params, trainable, compute_dtype).items()
    ]
    least, dtype = max(found, default=(0.0, ""))
    if radius * share < least:
        products = dtype in _EPS and dtype not in _dtypes(params, compute_dtype)
        where = f"products of float32 in {dtype}" if products else dtype
        resolve = "resolve" if products else "resolves"
        lost = (
            "slopes will mostly be rounding errors"
            if differences
            else "most parameters will stay where they are, and losses are not smoothed"
        )
        other = ", or 0 for exact derivatives" if may_be_zero else ""
        if products:
            other += (
                ', or jax.config.update("jax_default_matmul_precision", "highest"), '
                f"for a {jax.default_backend()} rounds products unless it is told not to"
            )
        warnings.warn(
            f"smoothing_radius={radius:g} is below what {where} {resolve} here: {lost}; "
            f"take at least {least / share:.2g}{other}",
            stacklevel=stacklevel + 1,
        )


def warn_if_scattered(
    max_step: float,
    params: Any,
    *,
    trainable: run_state.Trainable = None,
    stacklevel: int = 1,
) -> None:
    """Warns if rounding moves parameters of 16 bits further than steps of a bounded length.

    A step's elements are about ``max_step`` over the root of their number. What is shorter
    than the distance of neighbouring numbers is rounded to all of it or nothing, and the
    point moves further than the step: right in mean, but differences of gradients between
    neighbouring points grow with it, and are clipped.

    Args:
      max_step: bound on the length of a step, in units of the parameters.
      params: the initial parameters, public: a pytree of arrays of any shape and dtype.
      trainable: which leaves move, as in :func:`jaxdp.fit`.
      stacklevel: as in :func:`warn_if_unresolved`.
    """
    sizes = _spacings(params, trainable, None)
    narrow = [sized for name in NARROW for sized in sizes.get(name, [])]
    if not narrow:
        return
    root = math.sqrt(sum(size for _, size in narrow))
    least = 2 * _median(narrow) * root
    if max_step < least:
        warnings.warn(
            f"max_step={max_step:g} is shorter than what rounding to 16 bits moves: "
            "differences of gradients will mostly be of it, and clipped; take at least "
            f"{least:.2g}, or float32 parameters, which the losses may cast",
            stacklevel=stacklevel + 1,
        )


class Sample(NamedTuple):
    """Sample of a leaf that moves."""

    values: np.ndarray  # float64
    size: int  # of the leaf
    dtype: str


def samples(params: Any, trainable: run_state.Trainable = None) -> list[Sample]:
    """Returns a sample of each leaf that moves, on the host."""
    moves = run_state.moving(params, trainable)
    return [
        Sample(_sample(leaf), int(np.size(leaf)), jnp.result_type(leaf).name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if moves(path_str(path)) and np.size(leaf) > 0
    ]


def warn_if_unmoved(
    before: list[Sample], after: list[Sample], *, stacklevel: int = 1
) -> None:
    """Warns if most parameters are, after a run with noise, where they were before it.

    Every release has noise in all its coordinates, so that a parameter which never moved
    had steps below half the distance to the next number of its dtype, or none. Parameters
    of 16 bits do not count: their steps are rounded at random, and none is too small.

    Args:
      before: the initial parameters, as :func:`samples` gave them. Public.
      after: those of the end.
      stacklevel: as in :func:`warn_if_unresolved`.
    """
    pairs = list(zip(before, after, strict=True))
    pairs = [(old, new) for old, new in pairs if old.dtype not in NARROW]
    size = sum(old.size for old, _ in pairs)
    still = sum(float((a.values == b.values).mean()) * a.size for a, b in pairs)
    share = still / max(1, size)
    if share > 0.5:
        dtypes = ", ".join(sorted({old.dtype for old, _ in pairs}))
        warnings.warn(
            f"{share:.0%} of the parameters ({dtypes}) are where they "
            "were: the optimizer's steps are zero or below the distance of neighbouring "
            "numbers; take larger steps",
            stacklevel=stacklevel + 1,
        )


def product_dtype() -> str:
    """Returns what the present backend rounds the factors of float32 products to.

    GPUs take TF32 (NVIDIA's since Ampere) and TPUs one pass in bfloat16, unless
    ``jax_default_matmul_precision`` or the product itself says otherwise.
    """
    backend = jax.default_backend()
    precision = str(getattr(jax.config, "jax_default_matmul_precision", None))
    if backend == "cpu" or _EXACT.fullmatch(precision):
        return "float32"
    if precision.lower().startswith(("bf", "any_f8")):
        return "bfloat16"
    if backend != "tpu":
        return "tensorfloat32"
    # Three passes of a TPU resolve nearly what float32 does.
    return "float32" if precision in ("high", "tensorfloat32") else "bfloat16"


def _dtypes(params: Any, compute_dtype: Any) -> set[str]:
    """Returns the dtypes of parameters and of what the losses cast them to."""
    own = {jnp.result_type(leaf).name for leaf in jax.tree.leaves(params)}
    return own if compute_dtype is None else own | {jnp.dtype(compute_dtype).name}


#: For each leaf: half the distances to the next numbers, and how many elements it has.
_Sizes = list[tuple[np.ndarray, int]]


def _spacings(
    params: Any, trainable: run_state.Trainable, compute_dtype: Any
) -> dict[str, _Sizes]:
    """Returns half spacings and sizes of leaves that move, by the dtype of their use."""
    moves = run_state.moving(params, trainable)
    products = product_dtype()
    found: dict[str, _Sizes] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not moves(path_str(path)) or np.size(leaf) == 0:
            continue
        dtype = jnp.result_type(leaf)
        dtypes = dtype, jnp.dtype(dtype if compute_dtype is None else compute_dtype)
        used = max(dtypes, key=lambda x: jnp.finfo(x).eps)
        name = products if used.name == "float32" else used.name
        eps = _EPS[name] if name in _EPS else float(jnp.finfo(used).eps)
        half = _half_spacing(_sample(leaf), eps)
        found.setdefault(name, []).append((half, int(np.size(leaf))))
    return found


def _sample(leaf: Any) -> np.ndarray:
    """Returns some elements of a leaf, float64, evenly spread over it.

    Of a leaf that is split over devices, over the part of it that is on one of them.
    """
    if isinstance(leaf, jax.Array):
        leaf = leaf.addressable_data(0)
    size = np.size(leaf)
    places = np.linspace(0, size - 1, min(size, _SAMPLE)).astype(np.int64)
    if size < _LARGE:
        taken = np.ravel(np.asarray(leaf))[places]
    else:
        taken = leaf[np.unravel_index(places, leaf.shape)]
    return np.asarray(taken, np.float64)


def _half_spacing(values: np.ndarray, eps: float) -> np.ndarray:
    """Returns half the distance from each value to the next larger number of its dtype."""
    _, exponent = np.frexp(values)
    return np.where(values == 0, 0.0, np.ldexp(eps / 4, exponent))


def _median(sizes: _Sizes) -> float:
    """Returns the median over all elements of all leaves; a sample stands for each leaf."""
    values = np.concatenate([half for half, _ in sizes])
    weights = np.concatenate([np.full(len(h), n / len(h)) for h, n in sizes])
    return float(np.quantile(values, 0.5, weights=weights, method="inverted_cdf"))
