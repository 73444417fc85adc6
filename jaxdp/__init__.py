"""Differentially private optimisation in JAX.

A private optimiser is a released sequence: at each step something that depends
on the data is bounded, noised and let out; all else is post-processing. A *plan*
fixes the numbers and states the guarantee, an *oracle* bounds and noises one
query, a *transform* or an *algorithm* uses what was released.
"""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from types import ModuleType as _ModuleType

from jaxdp import kernels as kernels
from jaxdp import plans as plans
from jaxdp import sampling as sampling
from jaxdp import tuning as tuning
from jaxdp.algorithms._algorithm import Algorithm as Algorithm
from jaxdp.algorithms.saddle.bias_reduced import (
    saddle_bias_reduced as saddle_bias_reduced,
)
from jaxdp.algorithms.saddle.convex import simplex_convex as simplex_convex
from jaxdp.algorithms.saddle.mirror_descent import (
    saddle_mirror_descent as saddle_mirror_descent,
)
from jaxdp.algorithms.saddle.synthetic import synthetic_data as synthetic_data
from jaxdp.algorithms.saddle.synthetic import synthetic_records as synthetic_records
from jaxdp.algorithms.sosp.search import sosp as sosp
from jaxdp.kernels.finite_difference import per_record as per_record
from jaxdp.kernels.perturb import LazyLoss as LazyLoss
from jaxdp.kernels.polytope import L1Ball as L1Ball
from jaxdp.kernels.polytope import Polytope as Polytope
from jaxdp.kernels.polytope import Simplex as Simplex
from jaxdp.keys import Keys as Keys
from jaxdp.oracles.isolation import check_isolation as check_isolation
from jaxdp.oracles.queries import Marginals as Marginals
from jaxdp.oracles.queries import QueryMatrix as QueryMatrix
from jaxdp.oracles.vertex_gradients import LinearModel as LinearModel
from jaxdp.oracles.vertex_gradients import MatrixGame as MatrixGame
from jaxdp.oracles.vertex_gradients import MaxOfLosses as MaxOfLosses
from jaxdp.oracles.vertex_gradients import Problem as Problem
from jaxdp.training import FitInfo as FitInfo
from jaxdp.training import FitResult as FitResult
from jaxdp.training import fit as fit
from jaxdp.training import replay as replay
from jaxdp.training import report as report
from jaxdp.training import resume as resume
from jaxdp.transforms._common import public as public
from jaxdp.transforms.averaging import polyak_average as polyak_average
from jaxdp.transforms.averaging import polyak_output as polyak_output
from jaxdp.transforms.dpgd import dpgd as dpgd
from jaxdp.transforms.dpzero import dpgd_zeroth_order as dpgd_zeroth_order
from jaxdp.transforms.dpzero import dpzero as dpzero
from jaxdp.transforms.dpzero import dpzero_output as dpzero_output
from jaxdp.transforms.entropic import entropic_descent as entropic_descent
from jaxdp.transforms.o2nc import o2nc as o2nc
from jaxdp.transforms.o2nc import o2nc_output as o2nc_output
from jaxdp.transforms.private_oracle import private_oracle as private_oracle
from jaxdp.transforms.private_prefix_sum import private_prefix_sum as private_prefix_sum
from jaxdp.transforms.private_spider import private_spider as private_spider
from jaxdp.tuning import tune as tune

try:
    __version__ = _metadata.version("jaxdp-optim")
except _metadata.PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+uninstalled"


#: What is loaded when it is first asked for: ``jaxdp.models`` and ``jaxdp.auditing`` bring
#: flax and sklearn, and much of scipy.
_LAZY = ("auditing", "metrics", "models")


def __getattr__(name: str) -> _ModuleType:
    """Loads ``auditing``, ``metrics`` and ``models`` on first access."""
    if name in _LAZY:
        return _import_module(f"jaxdp.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the names of this module, lazy ones too."""
    return sorted({*globals(), *_LAZY})
