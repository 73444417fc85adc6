r"""The language-model experiments of the DPZero paper, as settings that can be run.

:data:`EXPERIMENTS` holds one :class:`Experiment` for each model and task of Tables 2, 4, 5,
7, 8 and 10 and of Figure 3; :data:`PRINTED` and :data:`COSTS` are the figures that the
paper printed, :data:`FIRST_ORDER` what its baselines ran with. Templates and label words
are our own.

The paper's runs shuffled the records and took batches of one size, for which no accountant
has a bound near what was claimed. An experiment's plan samples with ``TruncatedPoisson``
at the same expected batch size and is calibrated for the relation that one names.
:func:`noise_table` sets its noise beside the paper's formula and the released code's, and
:func:`claims_table` says what the runs of the paper can claim as they were run.

References:
  Zhang, Li, Thekumparampil, Oh, He, `DPZero: Private Fine-Tuning of Language Models
  without Backpropagation <https://arxiv.org/abs/2310.09639>`_, 2024, Sections 5.2, 5.3 and
  Appendix B, and its released code.
"""

from jaxdp.models.language.experiments.comparison import ClaimRow as ClaimRow
from jaxdp.models.language.experiments.comparison import NoiseRow as NoiseRow
from jaxdp.models.language.experiments.comparison import claims_table as claims_table
from jaxdp.models.language.experiments.comparison import noise_table as noise_table
from jaxdp.models.language.experiments.comparison import (
    opacus_noise_multiplier as opacus_noise_multiplier,
)
from jaxdp.models.language.experiments.printed import COSTS as COSTS
from jaxdp.models.language.experiments.printed import PRINTED as PRINTED
from jaxdp.models.language.experiments.printed import Cost as Cost
from jaxdp.models.language.experiments.printed import Printed as Printed
from jaxdp.models.language.experiments.settings import EPSILONS as EPSILONS
from jaxdp.models.language.experiments.settings import EXPERIMENTS as EXPERIMENTS
from jaxdp.models.language.experiments.settings import FIRST_ORDER as FIRST_ORDER
from jaxdp.models.language.experiments.settings import Experiment as Experiment
from jaxdp.models.language.experiments.settings import FirstOrder as FirstOrder
