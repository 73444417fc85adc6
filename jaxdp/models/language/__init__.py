"""Language models, fine-tuned without backpropagation in the memory of inference.

:mod:`~jaxdp.models.language.network` is the models, made of ``modules``; ``checkpoint``
reads and writes Hugging Face folders, ``text`` turns records into batches, ``tasks`` are
the losses, and ``generation`` writes texts.
"""

from jaxdp.models.language.config import Config as Config
from jaxdp.models.language.config import DecoderConfig as DecoderConfig
from jaxdp.models.language.config import ModernBertConfig as ModernBertConfig
from jaxdp.models.language.config import OPTConfig as OPTConfig
from jaxdp.models.language.config import RobertaConfig as RobertaConfig
from jaxdp.models.language.config import tiny_config as tiny_config
from jaxdp.models.language.modules import dequantised as dequantised
from jaxdp.models.language.modules import quantised as quantised
from jaxdp.models.language.network import LanguageModel as LanguageModel
from jaxdp.models.language.network import LoRA as LoRA
from jaxdp.models.language.network import Prefix as Prefix
from jaxdp.models.language.network import adapter_only as adapter_only
from jaxdp.models.language.network import num_parameters as num_parameters
from jaxdp.models.language.sharding import shardings as shardings
