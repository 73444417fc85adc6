"""Data sets, small networks and problems with closed forms.

Nothing that computes a release imports this: it is what a run is given and judged
with, not what makes it private.
"""

from jaxdp.kernels.perturb import At as At
from jaxdp.models._scaling import scale_by_bounds as scale_by_bounds
from jaxdp.models.datasets import BREAST_CANCER_BOUNDS as BREAST_CANCER_BOUNDS
from jaxdp.models.datasets import DATASETS as DATASETS
from jaxdp.models.datasets import DIABETES_BOUNDS as DIABETES_BOUNDS
from jaxdp.models.datasets import DIABETES_TARGET_BOUNDS as DIABETES_TARGET_BOUNDS
from jaxdp.models.datasets import DIGITS_BOUNDS as DIGITS_BOUNDS
from jaxdp.models.datasets import WINE_BOUNDS as WINE_BOUNDS
from jaxdp.models.datasets import Dataset as Dataset
from jaxdp.models.datasets import load as load
from jaxdp.models.datasets import quadratic_data as quadratic_data
from jaxdp.models.datasets import validation_split as validation_split
from jaxdp.models.files import load_file as load_file
from jaxdp.models.games import Game as Game
from jaxdp.models.games import diagonal_game as diagonal_game
from jaxdp.models.games import max_loss as max_loss
from jaxdp.models.games import quadratic_game as quadratic_game
from jaxdp.models.games import rock_paper_scissors as rock_paper_scissors
from jaxdp.models.games import two_by_two as two_by_two
from jaxdp.models.groups import CLASS as CLASS
from jaxdp.models.groups import DIABETES_MEDIAN as DIABETES_MEDIAN
from jaxdp.models.groups import DIABETES_SEXES as DIABETES_SEXES
from jaxdp.models.groups import Grouped as Grouped
from jaxdp.models.groups import WorstGroup as WorstGroup
from jaxdp.models.groups import above as above
from jaxdp.models.groups import group_errors as group_errors
from jaxdp.models.groups import grouped as grouped
from jaxdp.models.groups import worst_group as worst_group
from jaxdp.models.losses import LOSSES as LOSSES
from jaxdp.models.losses import accuracy as accuracy
from jaxdp.models.losses import hinge as hinge
from jaxdp.models.losses import mean_squared_error as mean_squared_error
from jaxdp.models.losses import softmax_cross_entropy as softmax_cross_entropy
from jaxdp.models.losses import squared_error as squared_error
from jaxdp.models.modules import MLP as MLP
from jaxdp.models.modules import ResidualStack as ResidualStack
from jaxdp.models.modules import identity_at as identity_at
from jaxdp.models.modules import is_stacked as is_stacked
from jaxdp.models.modules import mlp_outputs as mlp_outputs
from jaxdp.models.modules import residual_stack_outputs as residual_stack_outputs
from jaxdp.models.networks import NETWORKS as NETWORKS
from jaxdp.models.networks import Network as Network
from jaxdp.models.networks import linear as linear
from jaxdp.models.networks import mlp as mlp
from jaxdp.models.networks import mlp_loss as mlp_loss
from jaxdp.models.networks import mlp_squared_error as mlp_squared_error
from jaxdp.models.networks import network_for as network_for
from jaxdp.models.networks import residual_stack as residual_stack
from jaxdp.models.networks import residual_stack_loss as residual_stack_loss
from jaxdp.models.nonsmooth import NonsmoothProblem as NonsmoothProblem
from jaxdp.models.nonsmooth import l1_linear as l1_linear
from jaxdp.models.nonsmooth import max_of_linear as max_of_linear
from jaxdp.models.nonsmooth import mean_gradient_fn as mean_gradient_fn
from jaxdp.models.nonsmooth import relu_network as relu_network
from jaxdp.models.nonsmooth import robust_regression as robust_regression
from jaxdp.models.nonsmooth import smoothed_sign as smoothed_sign
from jaxdp.models.principal import PrincipalDirections as PrincipalDirections
from jaxdp.models.principal import SmoothConstants as SmoothConstants
from jaxdp.models.principal import captured_variance as captured_variance
from jaxdp.models.principal import moment_deviation as moment_deviation
from jaxdp.models.principal import unit_rows as unit_rows
from jaxdp.models.problems import HESSIANS as HESSIANS
from jaxdp.models.problems import Problem as Problem
from jaxdp.models.problems import centered_quadratic as centered_quadratic
from jaxdp.models.problems import cubic as cubic
from jaxdp.models.problems import effective_rank as effective_rank
from jaxdp.models.problems import hessian_diagonal as hessian_diagonal
from jaxdp.models.problems import linear_adversarial as linear_adversarial
from jaxdp.models.problems import pseudo_huber as pseudo_huber
from jaxdp.models.problems import quadratic as quadratic
from jaxdp.models.simplex_problems import BinaryDomain as BinaryDomain
from jaxdp.models.simplex_problems import ConvexProblem as ConvexProblem
from jaxdp.models.simplex_problems import binary_domain as binary_domain
from jaxdp.models.simplex_problems import sparse_regression as sparse_regression
from jaxdp.models.strict_saddles import CriticalPoint as CriticalPoint
from jaxdp.models.strict_saddles import StrictSaddleProblem as StrictSaddleProblem
from jaxdp.models.strict_saddles import cosine_grid as cosine_grid
from jaxdp.models.strict_saddles import (
    low_rank_factorization as low_rank_factorization,
)
from jaxdp.models.strict_saddles import phase_retrieval as phase_retrieval
from jaxdp.models.strict_saddles import quartic_saddle as quartic_saddle
