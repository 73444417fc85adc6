"""Plans: frozen numbers that couple sampling, bound, noise and accounting.

A plan alone states the guarantee, and builds what runs under it.
"""

from jaxdp.plans._clip_tuning import ClipTuning as ClipTuning
from jaxdp.plans._correlated import BLTNumbers as BLTNumbers
from jaxdp.plans._plan import from_json as from_json
from jaxdp.plans.dpgd import DPGD as DPGD
from jaxdp.plans.dpzero import DPGDZerothOrder as DPGDZerothOrder
from jaxdp.plans.dpzero import DPZero as DPZero
from jaxdp.plans.o2nc import O2NC as O2NC
from jaxdp.plans.prefix_sum import PrefixSum as PrefixSum
from jaxdp.plans.saddle import ConvexSimplex as ConvexSimplex
from jaxdp.plans.saddle import Saddle as Saddle
from jaxdp.plans.saddle import SaddleBiasReduced as SaddleBiasReduced
from jaxdp.plans.saddle import SyntheticData as SyntheticData
from jaxdp.plans.sosp import SOSP as SOSP
from jaxdp.plans.theorems import Theorem as Theorem
