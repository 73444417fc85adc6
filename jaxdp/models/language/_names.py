"""Hugging Face's names of the tensors of checkpoints."""

import dataclasses
import re
from collections.abc import Mapping

from jaxdp.models.language import config


@dataclasses.dataclass(frozen=True)
class Family:
    """Hugging Face's names of the parts of one family.

    Attributes:
      modules: our modules (or leaves that are a module there) -> theirs.
      prefix: before every name but those of heads; a checkpoint of the base model has it
        not.
      base: what names without the prefix begin with.
      useless: names, with the prefix, of tensors that no task here reads.
      tied: names of further copies of tensors -> theirs.
    """

    modules: Mapping[str, str]
    prefix: str
    base: tuple[str, ...]
    useless: re.Pattern[str]
    tied: Mapping[str, str]
    architectures: tuple[str, str]  # language model, classification

    def name(self, path: str) -> str:
        """Returns Hugging Face's name of a leaf, with ``{}`` for the layer's number."""
        module, _, leaf = path.rpartition("/")
        if leaf in ("kernel", "scale"):
            return f"{self.modules[module]}.weight"
        if leaf == "bias":
            return f"{self.modules[module]}.bias"
        return f"{self.modules[path]}.weight"

    def full_name(self, name: str) -> str:
        """Adds the prefix that a checkpoint of the base model leaves out of a name."""
        return self.prefix + name if name.startswith(self.base) else name


#: model_type -> names.
FAMILIES = {
    "roberta": Family(
        modules={
            "embedding/tokens": "roberta.embeddings.word_embeddings",
            "embedding/positions": "roberta.embeddings.position_embeddings",
            "embedding/types": "roberta.embeddings.token_type_embeddings",
            "embedding/norm": "roberta.embeddings.LayerNorm",
            "layers/attention/query": "roberta.encoder.layer.{}.attention.self.query",
            "layers/attention/key": "roberta.encoder.layer.{}.attention.self.key",
            "layers/attention/value": "roberta.encoder.layer.{}.attention.self.value",
            "layers/attention/output": "roberta.encoder.layer.{}.attention.output.dense",
            "layers/attention_norm": "roberta.encoder.layer.{}.attention.output.LayerNorm",
            "layers/mlp/up": "roberta.encoder.layer.{}.intermediate.dense",
            "layers/mlp/down": "roberta.encoder.layer.{}.output.dense",
            "layers/mlp_norm": "roberta.encoder.layer.{}.output.LayerNorm",
            "head": "lm_head",
            "head/dense": "lm_head.dense",
            "head/norm": "lm_head.layer_norm",
            "head/decoder": "lm_head.decoder",
            "classifier/dense": "classifier.dense",
            "classifier/output": "classifier.out_proj",
        },
        prefix="roberta.",
        base=("embeddings.", "encoder.", "pooler."),
        useless=re.compile(r"roberta\.(embeddings\.position_ids|pooler\..*)"),
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        architectures=("RobertaForMaskedLM", "RobertaForSequenceClassification"),
    ),
    "modernbert": Family(
        modules={
            "embedding/tokens": "model.embeddings.tok_embeddings",
            "embedding/norm": "model.embeddings.norm",
            "layers/attention/qkv": "model.layers.{}.attn.Wqkv",
            "layers/attention/output": "model.layers.{}.attn.Wo",
            "layers/attention_norm": "model.layers.{}.attn_norm",
            "layers/mlp/gate_up": "model.layers.{}.mlp.Wi",
            "layers/mlp/down": "model.layers.{}.mlp.Wo",
            "layers/mlp_norm": "model.layers.{}.mlp_norm",
            "final_norm": "model.final_norm",
            "head": "decoder",
            "head/dense": "head.dense",
            "head/norm": "head.norm",
            "head/decoder": "decoder",
            "classifier/output": "classifier",
        },
        prefix="model.",
        base=("embeddings.", "layers.", "final_norm."),
        useless=re.compile(r"(?!)"),  # none
        tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        architectures=("ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    ),
    "opt": Family(
        modules={
            "embedding/tokens": "model.decoder.embed_tokens",
            "embedding/positions": "model.decoder.embed_positions",
            "embedding/projection": "model.decoder.project_in",
            "layers/attention/query": "model.decoder.layers.{}.self_attn.q_proj",
            "layers/attention/key": "model.decoder.layers.{}.self_attn.k_proj",
            "layers/attention/value": "model.decoder.layers.{}.self_attn.v_proj",
            "layers/attention/output": "model.decoder.layers.{}.self_attn.out_proj",
            "layers/attention_norm": "model.decoder.layers.{}.self_attn_layer_norm",
            "layers/mlp/up": "model.decoder.layers.{}.fc1",
            "layers/mlp/down": "model.decoder.layers.{}.fc2",
            "layers/mlp_norm": "model.decoder.layers.{}.final_layer_norm",
            "final_norm": "model.decoder.final_layer_norm",
            "head/projection": "model.decoder.project_out",
            "head/decoder": "lm_head",
            "classifier/output": "score",
        },
        prefix="model.",
        base=("decoder.",),
        useless=re.compile(r"model\.decoder\.version"),
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        architectures=("OPTForCausalLM", "OPTForSequenceClassification"),
    ),
}
_LAYER = "model.layers.{}."
_DECODER = {
    "embedding/tokens": "model.embed_tokens",
    "layers/attention/query": _LAYER + "self_attn.q_proj",
    "layers/attention/key": _LAYER + "self_attn.k_proj",
    "layers/attention/value": _LAYER + "self_attn.v_proj",
    "layers/attention/qkv": _LAYER + "self_attn.qkv_proj",
    "layers/attention/query_norm": _LAYER + "self_attn.q_norm",
    "layers/attention/key_norm": _LAYER + "self_attn.k_norm",
    "layers/attention/output": _LAYER + "self_attn.o_proj",
    "layers/attention_norm": _LAYER + "input_layernorm",
    "layers/mlp/gate": _LAYER + "mlp.gate_proj",
    "layers/mlp/up": _LAYER + "mlp.up_proj",
    "layers/mlp/gate_up": _LAYER + "mlp.gate_up_proj",
    "layers/mlp/down": _LAYER + "mlp.down_proj",
    "layers/mlp_norm": _LAYER + "post_attention_layernorm",
    "final_norm": "model.norm",
    "head/decoder": "lm_head",
    "classifier/output": "score",
}
#: Where there are norms after each part, too.
_NORMS_AFTER = {
    "layers/attention_norm_after": _LAYER + "post_attention_layernorm",
    "layers/mlp_norm": _LAYER + "pre_feedforward_layernorm",
    "layers/mlp_norm_after": _LAYER + "post_feedforward_layernorm",
}
FAMILIES |= {
    kind: Family(
        modules=_DECODER | (_NORMS_AFTER if "norm_after" in about["parts"] else {}),
        prefix="model.",
        base=("embed_tokens.", "layers.", "norm."),
        useless=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        architectures=tuple(about["classes"]),
    )
    for kind, about in config.FAMILIES.items()
    if kind not in FAMILIES
}


def is_language_head(name: str) -> bool:
    """Returns True if a tensor belongs to the head of the language model alone."""
    return name.startswith(("lm_head.", "decoder."))
