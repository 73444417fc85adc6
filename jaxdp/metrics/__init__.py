"""Measures of a result's quality, on raw data with exact gradients: not private.

Nothing that computes a release imports this. A number measured here on private records
is a statistic of them that nobody charged: measure on public records, or publish nothing.
The exceptions are :func:`jaxdp.metrics.private_gap` and
:func:`jaxdp.metrics.private_goldstein`, which add noise, and
:func:`jaxdp.metrics.private_choice`, which draws: they state their guarantee.
"""

from jaxdp.core import names as _names
from jaxdp.metrics.duality_gap import duality_gap as duality_gap
from jaxdp.metrics.goldstein import (
    componentwise_goldstein_norm as componentwise_goldstein_norm,
)
from jaxdp.metrics.goldstein import goldstein_norm as goldstein_norm
from jaxdp.metrics.private_choice import private_choice as private_choice
from jaxdp.metrics.private_goldstein import private_goldstein as private_goldstein
from jaxdp.metrics.second_order import effective_rank as effective_rank
from jaxdp.metrics.second_order import sosp_alpha as sosp_alpha
from jaxdp.metrics.second_order import sosp_alpha_of as sosp_alpha_of
from jaxdp.saddle.private_gap import private_gap as private_gap


def __dir__() -> list[str]:
    """Lists the public names."""
    return _names.offered(globals())
