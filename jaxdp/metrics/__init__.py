"""What a result is worth, measured on raw data with exact gradients: not private.

Nothing that computes a release imports this. A number measured here on private records
is a statistic of them that nobody charged: measure on public records, or publish nothing.
"""

from jaxdp.metrics.goldstein import GoldsteinNorm as GoldsteinNorm
from jaxdp.metrics.goldstein import MinimumNormPoint as MinimumNormPoint
from jaxdp.metrics.goldstein import SmoothedGradientNorm as SmoothedGradientNorm
from jaxdp.metrics.goldstein import goldstein_norm as goldstein_norm
from jaxdp.metrics.goldstein import minimum_norm_point as minimum_norm_point
from jaxdp.metrics.goldstein import minimum_norm_point_fista as minimum_norm_point_fista
from jaxdp.metrics.goldstein import smoothed_gradient_norm as smoothed_gradient_norm
