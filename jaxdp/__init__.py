"""Differentially private optimisation in JAX.

A private optimiser is a released sequence: at each step something that depends
on the data is bounded, noised and let out; all else is post-processing. A *plan*
fixes the numbers and states the guarantee, an *oracle* bounds and noises one
query, a *transform* or an *algorithm* uses what was released.
"""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from jaxdp import kernels as kernels
from jaxdp import plans as plans
from jaxdp import sampling as sampling
from jaxdp import tuning as tuning
from jaxdp.core import names as _names
from jaxdp.core.algorithm import Algorithm as Algorithm
from jaxdp.core.algorithm import as_transform as as_transform
from jaxdp.core.averaging import polyak_average as polyak_average
from jaxdp.core.averaging import polyak_output as polyak_output
from jaxdp.core.keys import Keys as Keys
from jaxdp.core.precision import apply_updates as apply_updates
from jaxdp.core.precision import widened as widened
from jaxdp.core.public_data import Subspace as Subspace
from jaxdp.core.public_data import in_scale as in_scale
from jaxdp.core.public_data import in_subspace as in_subspace
from jaxdp.core.public_data import mix_public as mix_public
from jaxdp.core.public_data import mixing_weight as mixing_weight
from jaxdp.core.public_data import public_basis as public_basis
from jaxdp.core.public_data import public_scale as public_scale
from jaxdp.core.run_state import public as public
from jaxdp.data.users import by_user as by_user
from jaxdp.data.users import per_user as per_user
from jaxdp.dpgd.transform import dpgd as dpgd
from jaxdp.dpzero.transform import dpgd_zeroth_order as dpgd_zeroth_order
from jaxdp.dpzero.transform import dpzero as dpzero
from jaxdp.dpzero.transform import dpzero_output as dpzero_output
from jaxdp.kernels.finite_difference import per_record as per_record
from jaxdp.kernels.lazy import lazy as lazy
from jaxdp.kernels.perturb import LazyLoss as LazyLoss
from jaxdp.kernels.polytope import L1Ball as L1Ball
from jaxdp.kernels.polytope import Polytope as Polytope
from jaxdp.kernels.polytope import Simplex as Simplex
from jaxdp.o2nc.conversion import o2nc as o2nc
from jaxdp.o2nc.conversion import o2nc_output as o2nc_output
from jaxdp.o2nc.gradient import private_oracle as private_oracle
from jaxdp.o2nc.prefix_sum import private_prefix_sum as private_prefix_sum
from jaxdp.planner import recommend as recommend
from jaxdp.saddle.algorithms.bias_reduced import (
    saddle_bias_reduced as saddle_bias_reduced,
)
from jaxdp.saddle.algorithms.convex import simplex_convex as simplex_convex
from jaxdp.saddle.algorithms.frank_wolfe import frank_wolfe as frank_wolfe
from jaxdp.saddle.algorithms.mirror_descent import (
    saddle_mirror_descent as saddle_mirror_descent,
)
from jaxdp.saddle.algorithms.mwem import mwem as mwem
from jaxdp.saddle.algorithms.synthetic import synthetic_data as synthetic_data
from jaxdp.saddle.algorithms.synthetic import synthetic_records as synthetic_records
from jaxdp.saddle.descent_ascent import descent_ascent as descent_ascent
from jaxdp.saddle.entropic import entropic_descent as entropic_descent
from jaxdp.saddle.oracles import LinearModel as LinearModel
from jaxdp.saddle.oracles import MatrixGame as MatrixGame
from jaxdp.saddle.oracles import MaxOfLosses as MaxOfLosses
from jaxdp.saddle.oracles import Problem as Problem
from jaxdp.saddle.oracles.queries import Marginals as Marginals
from jaxdp.saddle.oracles.queries import QueryMatrix as QueryMatrix
from jaxdp.sosp.algorithm import sosp as sosp
from jaxdp.sosp.spider import private_spider as private_spider
from jaxdp.training import Budget as Budget
from jaxdp.training import FitInfo as FitInfo
from jaxdp.training import FitResult as FitResult
from jaxdp.training import Stopped as Stopped
from jaxdp.training import diagnose as diagnose
from jaxdp.training import fit as fit
from jaxdp.training import ledger as ledger
from jaxdp.training import replay as replay
from jaxdp.training import report as report
from jaxdp.training import resume as resume
from jaxdp.training import stop_on_signal as stop_on_signal
from jaxdp.training import study as study
from jaxdp.training.isolation import check_isolation as check_isolation
from jaxdp.training.train_state import apply_gradients as apply_gradients
from jaxdp.tuning import tune as tune

if _TYPE_CHECKING:  # A running program loads them on first access: see below.
    from jaxdp import auditing as auditing
    from jaxdp import data as data
    from jaxdp import metrics as metrics
    from jaxdp import models as models

try:
    __version__ = _metadata.version("jaxdp-optim")
except _metadata.PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+uninstalled"


#: Modules that are loaded on first access: ``jaxdp.models`` and ``jaxdp.auditing`` bring
#: flax, and much of scipy.
_LAZY = ("auditing", "data", "metrics", "models")
_MODULES = (*_LAZY, "kernels", "ledger", "plans", "sampling", "tuning")


def __getattr__(name: str) -> _ModuleType:
    """Loads ``auditing``, ``data``, ``metrics`` and ``models`` on first access."""
    if name in _LAZY:
        return _import_module(f"jaxdp.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, those of lazy modules too."""
    return _names.offered(globals(), _MODULES)
