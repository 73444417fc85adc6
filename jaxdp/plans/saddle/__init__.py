"""Plans of mirror descent over vertices: saddle points, convex problems, synthetic data."""

from jaxdp.plans.saddle.bias_reduced import SaddleBiasReduced as SaddleBiasReduced
from jaxdp.plans.saddle.convex import ConvexSimplex as ConvexSimplex
from jaxdp.plans.saddle.mirror_descent import Saddle as Saddle
from jaxdp.plans.saddle.synthetic import SyntheticData as SyntheticData
