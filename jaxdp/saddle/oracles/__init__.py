"""The vertex-gradient query: exact integer sums of clipped per-record vertex gradients.

What saddle-point and simplex algorithms ask of the data: the derivative of the loss by
the weight of every vertex of each player's polytope, at a public point. A record's part
is centred (if asked), clipped coordinate by coordinate, rounded to a grid and summed in
integers. Nothing but the sums leaves this folder; what hides them is the draw of a vertex
from the scores that they move.

A record moves a coordinate of a sum by at most ``2**bits`` units if it is added, removed
or zeroed, and by at most ``2 * 2**bits`` if it is replaced: to the bit.
"""

from jaxdp.saddle.oracles.linear_model import LinearModel as LinearModel
from jaxdp.saddle.oracles.matrix_game import MatrixGame as MatrixGame
from jaxdp.saddle.oracles.max_of_losses import MaxOfLosses as MaxOfLosses
from jaxdp.saddle.oracles.problem import Problem as Problem
from jaxdp.saddle.oracles.problem import as_problem as as_problem
from jaxdp.saddle.oracles.sums import Bound as Bound
from jaxdp.saddle.oracles.sums import VertexGradients as VertexGradients
