"""Samplers and batches: the records that a step reads.

A sampler's fields are public; which records it picks is secret where privacy is
amplified by it. Batches are drawn inside the compiled loop at a fixed shape, and carry
their sampler: a transform refuses, when it is traced, a batch that the plan's sampler
did not make.

======================  ==============================  ==============================
sampler                 one record is in a step         what that earns
======================  ==============================  ==============================
``FullBatch``           always                          nothing: every step is charged
``TruncatedPoisson``    by its own coin                 amplification, every relation
``FixedSize``           in a random subset of one size  amplification, replace-one only
``SinglePass``          in one step of the run          all steps cost what one costs
``SinglePassRestarts``  the same, batches of two sizes  the same
``MultiPassRestarts``   always, or by its own coin      as the step's kind of sample
``ShuffledEpochs``      in one step of an epoch         an epoch costs what a step costs
``CyclicEpochs``        the same step of every epoch    the same; less: ``PrefixSum``
``CyclicPoisson``       every b-th, by its own coin     amplification, every relation
``AdaptiveCursor``      in one query of a pass          a pass costs what a query costs
``External``            as somebody else decides        nothing: every step is charged
======================  ==============================  ==============================

No sum is ever divided by the number of records that a step happened to read. Where batches
are stretches of an order, or groups of one, a record that is absent (``"add_or_remove"``)
leaves its row, masked: the others keep their places.
"""

from jaxdp.core import names as _names
from jaxdp.sampling.batches import Batch as Batch
from jaxdp.sampling.batches import batch as batch
from jaxdp.sampling.batches import draw as draw
from jaxdp.sampling.batches import shuffled as shuffled
from jaxdp.sampling.samplers import AdaptiveCursor as AdaptiveCursor
from jaxdp.sampling.samplers import AnySampler as AnySampler
from jaxdp.sampling.samplers import CyclicEpochs as CyclicEpochs
from jaxdp.sampling.samplers import CyclicPoisson as CyclicPoisson
from jaxdp.sampling.samplers import External as External
from jaxdp.sampling.samplers import FixedSize as FixedSize
from jaxdp.sampling.samplers import FullBatch as FullBatch
from jaxdp.sampling.samplers import MultiPassRestarts as MultiPassRestarts
from jaxdp.sampling.samplers import Sampler as Sampler
from jaxdp.sampling.samplers import ShuffledEpochs as ShuffledEpochs
from jaxdp.sampling.samplers import SinglePass as SinglePass
from jaxdp.sampling.samplers import SinglePassRestarts as SinglePassRestarts
from jaxdp.sampling.samplers import TruncatedPoisson as TruncatedPoisson


def __dir__() -> list[str]:
    """Lists the public names."""
    return _names.offered(globals())
