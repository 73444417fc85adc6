"""Configuration of a RoBERTa or OPT checkpoint: its ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxdp.core import validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """Fields that both families have, named as Hugging Face names them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    pad_token_id: int = 1
    bos_token_id: int
    eos_token_id: int = 2
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    model_type: ClassVar[str]
    #: Options that this library has in one form only: name -> that form.
    _only: ClassVar[Mapping[str, Any]]
    #: Fields without which Hugging Face would assume other numbers than we do.
    _stated: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        validate.integer(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
        )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                "num_attention_heads must divide hidden_size = "
                f"{self.hidden_size}, got {self.num_attention_heads}"
            )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Reads the configuration of a ``config.json``; irrelevant fields are dropped.

        Raises:
          ValueError: another family, an option in a form that is not supported, or a
            field that is missing.
        """
        if fields.get("model_type") != cls.model_type:
            raise ValueError(
                f"model_type must be {cls.model_type!r}, got {fields.get('model_type')!r}"
            )
        for name, form in cls._only.items():
            if fields.get(name, form) != form:
                raise ValueError(f"{name} must be {form!r}, got {fields[name]!r}")
        known = {f.name: f for f in dataclasses.fields(cls)}
        required = [n for n, f in known.items() if f.default is dataclasses.MISSING]
        required += cls._stated
        missing = [name for name in required if fields.get(name) is None]
        if missing:
            raise ValueError(f"config must have {', '.join(missing)}, got {[*fields]}")
        given = {n: fields[n] for n in known if fields.get(n) is not None}
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Returns fields of a ``config.json`` that Hugging Face reads as the same model."""
        return {
            "model_type": self.model_type,
            "architectures": [self._architecture],
            **dataclasses.asdict(self),
            **self._only,
        }

    _architecture: ClassVar[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaConfig(_Config):
    """A RoBERTa encoder (Liu et al., 2019); the fields of its ``config.json``.

    Example:
      >>> from jaxdp.models.language import RobertaConfig
      >>> config = RobertaConfig(
      ...     vocab_size=50, hidden_size=16, num_hidden_layers=2,
      ...     num_attention_heads=2, max_position_embeddings=20, intermediate_size=32,
      ... )
      >>> config.position_rows, config.max_length
      (20, 18)
    """

    intermediate_size: int
    layer_norm_eps: float = 1e-5
    type_vocab_size: int = 1
    bos_token_id: int = 0

    model_type = "roberta"
    _architecture = "RobertaForMaskedLM"
    _stated = ("layer_norm_eps", "type_vocab_size")
    _only: ClassVar = {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
    }

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions, those before the first position included."""
        return self.max_position_embeddings

    @property
    def max_length(self) -> int:
        """Tokens that a record may have."""
        return self.max_position_embeddings - self.pad_token_id - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(_Config):
    """An OPT decoder (Zhang et al., 2022); the fields of its ``config.json``.

    Example:
      >>> from jaxdp.models.language import OPTConfig
      >>> config = OPTConfig(
      ...     vocab_size=50, hidden_size=16, num_hidden_layers=2,
      ...     num_attention_heads=2, max_position_embeddings=20, ffn_dim=32,
      ... )
      >>> config.embedding_size, config.position_rows, config.max_length
      (16, 22, 20)
    """

    ffn_dim: int
    word_embed_proj_dim: int | None = None  # None: hidden_size
    do_layer_norm_before: bool = True
    bos_token_id: int = 2

    model_type = "opt"
    _architecture = "OPTForCausalLM"
    _only: ClassVar = {
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.word_embed_proj_dim is None:
            object.__setattr__(self, "word_embed_proj_dim", self.hidden_size)

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward layers, ``ffn_dim``."""
        return self.ffn_dim

    @property
    def layer_norm_eps(self) -> float:
        """Number that layer normalisation adds to the variance, 1e-5 for OPT."""
        return 1e-5

    @property
    def embedding_size(self) -> int:
        """Width e of the table of tokens."""
        return self.word_embed_proj_dim or self.hidden_size

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions. OPT leaves two before the first."""
        return self.max_position_embeddings + 2

    @property
    def max_length(self) -> int:
        """Tokens that a record may have."""
        return self.max_position_embeddings


Config = RobertaConfig | OPTConfig

#: model_type -> configuration.
FAMILIES: Mapping[str, type[RobertaConfig] | type[OPTConfig]] = {
    "roberta": RobertaConfig,
    "opt": OPTConfig,
}


def from_json(fields: Mapping[str, Any]) -> Config:
    """Reads the configuration that a ``config.json`` holds.

    Raises:
      ValueError: neither of the families, or what they do not support.
    """
    family = str(fields.get("model_type"))
    if family not in FAMILIES:
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}"
        )
    return FAMILIES[family].from_json(fields)
