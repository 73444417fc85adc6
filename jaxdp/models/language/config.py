"""Configuration of a checkpoint, its ``config.json``, and the parts that it asks for."""

import dataclasses
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxdp.core import validate
from jaxdp.models.language import rotary
from jaxdp.models.language.rotary import Rotation

#: What a layer sees: so many tokens or None for all, and the rotation of their places.
Look = tuple[int | None, Rotation | None]
_TABLE = pathlib.Path(__file__).with_name("families.toml").read_text(encoding="utf-8")
_ELSE = {"own": [], "assumed": {}, "parts": {}, "only": {"hidden_act": ["silu"]}}
#: What configurations of each model_type do not say; the file tells what is in it.
FAMILIES: Mapping[str, Any] = {
    name: _ELSE | family for name, family in tomllib.loads(_TABLE).items()
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
#: Fields that not every family has.
_OWN = {field for family in FAMILIES.values() for field in family["own"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """Fields that all families have, named as Hugging Face names them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    pad_token_id: int | None = 1
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None = 2
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    model_type: ClassVar[str]

    # What the modules are made of, where a family does not say otherwise.
    is_decoder = norm_first = qkv_bias = output_bias = mlp_bias = norm_bias = True
    rms = False  # norms without mean
    norm_embedding = False  # before the first layer
    first_norm = True  # also before attention in the first layer
    norm_heads = False  # of queries and keys
    norm_after = False  # also after each part, before it is added
    unit_offset = False  # norms times 1 + scale, embeddings times sqrt(hidden_size)
    gated = False  # activation(gate) * up
    fused = False  # query, key and value are one kernel, gate and up another
    head_classifies = False  # what the masked-LM head is made of, the classifier too
    classifier_pooling: ClassVar[str] = "last"  # token; "cls": first, "mean": all
    query_pre_attn_scalar: ClassVar[float | None] = None  # None: head_dim
    attn_logit_softcapping: ClassVar[float | None] = None
    final_logit_softcapping: ClassVar[float | None] = None

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
        given = str(fields.get("model_type"))
        kind = getattr(cls, "model_type", given)
        allowed = (kind,) if kind in FAMILIES else tuple(FAMILIES)
        validate.one_of(allowed, model_type=given)
        family = FAMILIES[given]
        for name, forms in (family["only"] | {"quantization_config": [None]}).items():
            if fields.get(name, forms[0]) not in (None, *forms):
                raise ValueError(f"{name} must be {forms[0]!r}, got {fields[name]!r}")
        foreign = _OWN - {*family["own"]}
        fields = {**family["assumed"], **cls._given(fields)}
        known = {f.name: f for f in dataclasses.fields(cls) if f.name not in foreign}
        required = [n for n, f in known.items() if f.default is dataclasses.MISSING]
        required += family.get("stated", [])
        missing = [name for name in required if fields.get(name) is None]
        if missing:
            raise ValueError(f"config must have {', '.join(missing)}, got {[*fields]}")
        return cls(**{n: fields[n] for n in known if fields.get(n) is not None})

    @classmethod
    def _given(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        return _before_five(fields)

    def to_json(self) -> dict[str, Any]:
        """Returns fields of a ``config.json`` that Hugging Face reads as the same model."""
        family = FAMILIES[self.model_type]
        fields = {"model_type": self.model_type, **dataclasses.asdict(self)}
        if "rope_scaling" in fields:
            fields["rope_scaling"] = dict(fields["rope_scaling"] or ()) or None
        fields |= {name: forms[0] for name, forms in family["only"].items()}
        foreign = _OWN - {*family["own"]}
        return {name: x for name, x in fields.items() if name not in foreign}

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_size(self) -> int:
        """Width of the table of tokens."""
        return self.hidden_size

    @property
    def max_length(self) -> int:
        """Tokens that a record may have."""
        return self.max_position_embeddings

    @property
    def looks(self) -> tuple[Look, ...]:
        """Windows and rotations of the layers."""
        return ((None, None),) * self.num_hidden_layers

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        end = self.eos_token_id
        return end if isinstance(end, tuple) else () if end is None else (end,)

    @property
    def padding(self) -> int:
        """Token that fills up records, which is not read."""
        return next(t for t in (self.pad_token_id, *self.ends, 0) if t is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaConfig(_Config):
    """A RoBERTa encoder (Liu et al., 2019); the fields of its ``config.json``.

    Example:
      >>> from jaxdp.models.language import tiny_config
      >>> config = tiny_config("roberta")
      >>> config.position_rows, config.max_length
      (20, 18)
    """

    intermediate_size: int
    layer_norm_eps: float = 1e-5
    type_vocab_size: int = 1
    bos_token_id: int = 0

    model_type, activation, classifier_pooling = "roberta", "gelu", "cls"
    is_decoder = norm_first = False
    norm_embedding = True

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions, those before the first position included."""
        return self.max_position_embeddings

    @property
    def max_length(self) -> int:
        """Tokens that a record may have."""
        return self.max_position_embeddings - self.padding - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertConfig(_Config):
    """A ModernBERT encoder (Warner et al., 2024); the fields of its ``config.json``.

    A token of a layer with a window sees ``local_attention // 2`` tokens to either side.

    Example:
      >>> from jaxdp.models.language import tiny_config
      >>> config = tiny_config("modernbert", num_hidden_layers=4)
      >>> [window for window, _ in config.looks]
      [None, 65, 65, None]
    """

    intermediate_size: int
    norm_eps: float = 1e-5
    bos_token_id: int = 0
    layer_types: tuple[str, ...] | None = None  # None: the rule of the next field
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    classifier_pooling: str = "cls"

    model_type, activation = "modernbert", "gelu"
    gated = fused = norm_embedding = head_classifies = True
    is_decoder = qkv_bias = output_bias = mlp_bias = norm_bias = first_norm = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layer_types", _frozen(self.layer_types))
        validate.integer(at_least=2, num_hidden_layers=self.num_hidden_layers)
        validate.integer(
            intermediate_size=self.intermediate_size,
            global_attn_every_n_layers=self.global_attn_every_n_layers,
            local_attention=self.local_attention,
        )
        validate.positive(norm_eps=self.norm_eps)
        validate.one_of(("cls", "mean"), classifier_pooling=self.classifier_pooling)
        _check_layers(self, "layer_types", _LAYER_TYPES)
        _ = self.looks  # Its rotations check what they are given.

    @classmethod
    def _given(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        given = _before_five(fields)
        if given.get("rope_scaling") is not None:
            raise ValueError(
                "rope_scaling must be left out for modernbert, got "
                f"{given['rope_scaling']!r}"
            )
        names = {"rope_theta": "global", "rope_local_base_freq": "local"}
        for name, kind in names.items():  # of transformers 5
            if given.get(name) is not None:
                given[f"{kind}_rope_theta"] = given[name]
        return given

    @property
    def layer_norm_eps(self) -> float:
        """Number that layer normalisation adds to the variance, ``norm_eps``."""
        return self.norm_eps

    @property
    def looks(self) -> tuple[Look, ...]:
        """Windows and rotations of the layers."""
        full, near = (
            Rotation(
                size=self.head_dim, base=base, longest=self.max_position_embeddings
            )
            for base in (self.global_rope_theta, self.local_rope_theta)
        )
        every = self.global_attn_every_n_layers
        kinds = self.layer_types or [
            _LAYER_TYPES[layer % every > 0] for layer in range(self.num_hidden_layers)
        ]
        window = self.local_attention // 2 + 1  # with the token itself
        return tuple(
            (None, full) if kind == "full_attention" else (window, near)
            for kind in kinds
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(_Config):
    """An OPT decoder (Zhang et al., 2022); the fields of its ``config.json``.

    Example:
      >>> from jaxdp.models.language import tiny_config
      >>> config = tiny_config("opt")
      >>> config.embedding_size, config.position_rows, config.max_length
      (16, 22, 20)
    """

    ffn_dim: int
    word_embed_proj_dim: int | None = None  # None: hidden_size
    do_layer_norm_before: bool = True
    bos_token_id: int = 2

    model_type, activation = "opt", "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.word_embed_proj_dim is None:
            object.__setattr__(self, "word_embed_proj_dim", self.hidden_size)

    @property
    def norm_first(self) -> bool:
        """True if norms stand before each part, as in all sizes but one."""
        return self.do_layer_norm_before

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(_Config):
    """A decoder with rotary positions; the fields of its ``config.json``.

    ``model_type`` is its family: ``llama`` (SmolLM too), ``mistral``, ``qwen2``, ``qwen3``,
    ``gemma``, ``gemma2``, ``gemma3_text``, ``phi3`` or ``smollm3``. A field that the family
    does not have stays as it is.

    Example:
      >>> from jaxdp.models.language import DecoderConfig
      >>> config = DecoderConfig(
      ...     model_type="llama", vocab_size=50, hidden_size=16, num_hidden_layers=2,
      ...     num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
      ...     max_position_embeddings=20,
      ... )
      >>> config.head_dim, config.max_length
      (4, 20)
    """

    rms = gated = norm_first = True
    norm_bias = False
    activation = "silu"

    model_type: str
    intermediate_size: int
    num_key_value_heads: int = 0  # 0: num_attention_heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Any = None  # as config.json has it; kept as a tuple of items
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    layer_types: tuple[str, ...] | None = None  # None: the family's rule
    max_window_layers: int = 28
    sliding_window_pattern: int = 6
    rope_local_base_freq: float | None = None  # where there is a window
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    no_rope_layers: tuple[int, ...] | None = None  # 0 where positions are not seen
    no_rope_layer_interval: int = 0

    def __post_init__(self) -> None:
        validate.one_of(_DECODERS, model_type=self.model_type)
        family, keys = FAMILIES[self.model_type], self.num_key_value_heads
        parts: dict[str, Any] = {
            "num_key_value_heads": keys or self.num_attention_heads
        }
        if not self.head_dim:
            super().__post_init__()
            parts["head_dim"] = self.hidden_size // self.num_attention_heads
        parts |= dict.fromkeys(("qkv_bias", "output_bias"), self.attention_bias)
        for field in dataclasses.fields(self):
            name, value = field.name, _frozen(getattr(self, field.name))
            if name in _OWN - {*family["own"]} and value != field.default:
                raise ValueError(
                    f"{name} must be left out for {self.model_type}, got {value!r}"
                )
            parts.setdefault(name, value)
        for name, value in (parts | family["parts"]).items():
            object.__setattr__(self, name, value)
        for name in ("head_dim", "num_key_value_heads", "intermediate_size"):
            validate.integer(**{name: parts[name]})
        capped = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
        for name in ("rms_norm_eps", "query_pre_attn_scalar", *capped):
            if parts[name] is not None:
                validate.positive(**{name: parts[name]})
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_key_value_heads must divide num_attention_heads = "
                f"{self.num_attention_heads}, got {self.num_key_value_heads}"
            )
        _check_layers(self, "layer_types", _LAYER_TYPES)
        _check_layers(self, "no_rope_layers", (0, 1))
        _ = self.looks  # Its rotations check what they are given.

    @property
    def layer_norm_eps(self) -> float:
        """Number that norms add to the mean square."""
        return self.rms_norm_eps

    @property
    def looks(self) -> tuple[Look, ...]:
        """Windows and rotations of the layers."""
        scaling = dict(self.rope_scaling or ())
        if self.original_max_position_embeddings is not None:
            scaling[rotary.ORIGINAL] = self.original_max_position_embeddings
        full = Rotation(
            size=int(self.head_dim * self.partial_rotary_factor),
            base=self.rope_theta,
            longest=self.max_position_embeddings,
            scaling=_frozen(scaling),
        )
        near = full
        if self.rope_local_base_freq is not None:
            base = self.rope_local_base_freq
            near = dataclasses.replace(full, base=base, scaling=())
        looks: list[Look] = []
        for layer in range(self.num_hidden_layers):
            slides = self._slides(layer)
            rotation = (near if slides else full) if self._rotates(layer) else None
            looks.append((self.sliding_window if slides else None, rotation))
        return tuple(looks)

    def _rotates(self, layer: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        every = self.no_rope_layer_interval
        return every == 0 or (layer + 1) % every != 0

    def _slides(self, layer: int) -> bool:
        """Returns True if a layer's tokens see a window, by ``layer_types`` or its rule."""
        family = FAMILIES[self.model_type]
        switched = "use_sliding_window" in family["own"] and not self.use_sliding_window
        if self.sliding_window is None or switched:
            return False
        if self.layer_types is not None:
            return self.layer_types[layer] == "sliding_attention"
        return {
            "all": True,
            "even": layer % 2 == 0,
            "late": layer >= self.max_window_layers,
            "pattern": (layer + 1) % self.sliding_window_pattern != 0,
            "unrotated": not self._rotates(layer),
        }[family["windows"]]


def check_decoder(config: _Config) -> None:
    """Refuses an encoder."""
    if not config.is_decoder:
        raise ValueError(
            "model must be a decoder, whose tokens have a likelihood, got "
            f"{config.model_type!r}"
        )


def _check_layers(config: _Config, name: str, allowed: tuple[Any, ...]) -> None:
    """Raises unless a field, where it is given, has one of some values for each layer."""
    given, count = getattr(config, name), config.num_hidden_layers
    if given is not None and (len(given) != count or not set(given) <= set(allowed)):
        raise ValueError(f"{name} must be {count} of {allowed}, got {given}")


def _frozen(value: Any) -> Any:
    """Returns tuples in place of lists and mappings, which cannot be hashed."""
    if isinstance(value, Mapping):
        value = sorted(value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _before_five(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with transformers 5's ``rope_parameters`` as those of before."""
    out = dict(fields)
    scaling = dict(out.pop("rope_parameters", None) or {})
    if "full_attention" in scaling:
        near = scaling.get("sliding_attention") or {}
        if near.get("rope_type", "default") != "default":
            raise ValueError(
                "rope_parameters of sliding_attention must be of the type 'default', got "
                f"{near['rope_type']!r}"
            )
        out["rope_local_base_freq"] = near.get("rope_theta")
        scaling = dict(scaling["full_attention"])
    for name in ("rope_theta", "partial_rotary_factor"):
        if scaling.get(name) is not None:
            out[name] = scaling.pop(name)
    if scaling and scaling.get("rope_type") != "default":
        out["rope_scaling"] = {n: x for n, x in scaling.items() if x is not None}
    return out


Config = RobertaConfig | ModernBertConfig | OPTConfig | DecoderConfig
_ONE = {kind.model_type: kind for kind in (RobertaConfig, ModernBertConfig, OPTConfig)}
_DECODERS = tuple(FAMILIES)[len(_ONE) :]


def from_json(fields: Mapping[str, Any]) -> Config:
    """Reads the configuration that a ``config.json`` holds.

    Raises:
      ValueError: none of the families, or what they do not support.
    """
    return _class_of(fields.get("model_type")).from_json(fields)


def _class_of(model_type: Any) -> Any:
    return _ONE.get(str(model_type), DecoderConfig)


def tiny_config(model_type: str, **changes: Any) -> Config:
    """Returns a configuration of a few thousand parameters, for tests and examples.

    Args:
      model_type: the family.
      changes: fields in place of the tiny ones.

    Example:
      >>> from jaxdp.models.language import tiny_config
      >>> tiny_config("llama", num_key_value_heads=1).num_hidden_layers
      2
    """
    validate.one_of(tuple(FAMILIES), model_type=model_type)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 20}
    sizes["ffn_dim" if model_type == "opt" else "intermediate_size"] = 32
    named = {"model_type": model_type} if model_type in _DECODERS else {}
    return _class_of(model_type)(**named | sizes | changes)
