"""Problems with known answers that tests and benchmarks share; not shipped."""

from bench.problems.closed_forms import cubic as cubic
from bench.problems.closed_forms import linear_adversarial as linear_adversarial
from bench.problems.closed_forms import pseudo_huber as pseudo_huber
from bench.problems.closed_forms import quadratic as quadratic
from bench.problems.games import diagonal_game as diagonal_game
from bench.problems.games import max_loss as max_loss
from bench.problems.games import quadratic_game as quadratic_game
from bench.problems.games import two_by_two as two_by_two
from bench.problems.nonsmooth import l1_linear as l1_linear
from bench.problems.nonsmooth import relu_network as relu_network
from bench.problems.nonsmooth import robust_regression as robust_regression
from bench.problems.nonsmooth import smoothed_sign as smoothed_sign
from bench.problems.simplex import BinaryDomain as BinaryDomain
from bench.problems.simplex import ConvexProblem as ConvexProblem
from bench.problems.simplex import binary_domain as binary_domain
from bench.problems.simplex import sparse_regression as sparse_regression
from bench.problems.strict_saddles import (
    low_rank_factorization as low_rank_factorization,
)
from bench.problems.strict_saddles import phase_retrieval as phase_retrieval
from bench.problems.strict_saddles import quartic_saddle as quartic_saddle
