"""Plans of mirror descent over vertices: saddle points, convex problems, synthetic data."""

from jaxdp.saddle.plans.bias_reduced import SaddleBiasReduced as SaddleBiasReduced
from jaxdp.saddle.plans.convex import ConvexSimplex as ConvexSimplex
from jaxdp.saddle.plans.frank_wolfe import FrankWolfe as FrankWolfe
from jaxdp.saddle.plans.mirror_descent import Saddle as Saddle
from jaxdp.saddle.plans.mwem import MWEM as MWEM
from jaxdp.saddle.plans.synthetic import SyntheticData as SyntheticData
