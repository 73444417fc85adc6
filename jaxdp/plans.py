"""Plans: frozen numbers that couple sampling, bound, noise and accounting.

A plan alone states the guarantee, and builds what runs under it.
"""

from jaxdp.core import names as _names
from jaxdp.dpgd.plan import DPGD as DPGD
from jaxdp.dpzero.plan import DPGDZerothOrder as DPGDZerothOrder
from jaxdp.dpzero.plan import DPZero as DPZero
from jaxdp.dpzero.theorems import Theorem as Theorem
from jaxdp.mechanism.blt import BLTNumbers as BLTNumbers
from jaxdp.mechanism.clip_tuning import ClipTuning as ClipTuning
from jaxdp.mechanism.plan import from_json as from_json
from jaxdp.o2nc.plan import O2NC as O2NC
from jaxdp.o2nc.prefix_sum_plan import PrefixSum as PrefixSum
from jaxdp.saddle.plans import MWEM as MWEM
from jaxdp.saddle.plans import ConvexSimplex as ConvexSimplex
from jaxdp.saddle.plans import FrankWolfe as FrankWolfe
from jaxdp.saddle.plans import Saddle as Saddle
from jaxdp.saddle.plans import SaddleBiasReduced as SaddleBiasReduced
from jaxdp.saddle.plans import SyntheticData as SyntheticData
from jaxdp.sosp.plan import SOSP as SOSP


def __dir__() -> list[str]:
    """Lists the public names."""
    return _names.offered(globals())
