"""The tokenizer of a checkpoint folder, and the special tokens of its model."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from jaxdp.models.language import _chat_templates, _files, checkpoint
from jaxdp.models.language._files import Path
from jaxdp.models.language.config import Config, DecoderConfig

#: Texts that another may follow of which few tokens begin with them.
_BEFORE = ("\n", ".", "a", "0")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer of the package ``tokenizers`` and the special tokens of a model.

    Encoders' records begin with ``bos_token_id`` and end with ``eos_token_id``; OPT's begin
    with ``bos_token_id``, other decoders' with what their tokenizer begins with; chats are
    what their template says, and nothing more. Text of a record never becomes a special
    token: ``"<mask>"`` is six characters, in a message of a chat as well.

    Attributes:
      backend: a ``tokenizers.Tokenizer``; its settings of truncation, padding and special
        tokens in texts are reset.
      config: of the model, whose numbers of special tokens count.
      mask_token_id: of the mask token; None if there is none.
      chat_template: Jinja source; None if there is none.
      token_names: special tokens as the chat template calls them, such as
        ``{"bos_token": "<s>"}``; None for those of ``config``.

    Raises:
      ValueError: more tokens than the model has, or special tokens outside of them.
    """

    backend: Any
    config: Config
    mask_token_id: int | None = None
    chat_template: str | None = None
    token_names: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        # Special tokens may lie above: no text becomes one.
        added = self.backend.get_added_tokens_decoder().items()
        size = self.backend.get_vocab_size(with_added_tokens=False)
        size = max([size, *(token + 1 for token, x in added if not x.special)])
        limit = self.config.vocab_size
        if size > limit:
            raise ValueError(
                f"the tokenizer has {size} tokens, but vocab_size of the model is {limit}"
            )
        for name, tokens in self._special.items():
            for token in tokens:
                if not 0 <= token < limit:
                    raise ValueError(f"{name} must be below {limit}, got {token}")
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # as text, that is

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads the tokenizer of a checkpoint folder.

        That is ``tokenizer.json``, or byte-level BPE from ``vocab.json`` and
        ``merges.txt``. The mask token is named by ``special_tokens_map.json`` or
        ``tokenizer_config.json``, or is ``<mask>``. The chat template is
        ``chat_template.jinja``, or stands in ``tokenizer_config.json``.

        Raises:
          ValueError: no tokenizer, a file that cannot be read, or special tokens that
            are not those of the model's ``config.json``. Of a decoder with rotary
            positions one that begins or ends a text is enough, also of those that
            ``generation_config.json`` names: chats end with tokens of their own.
          ImportError: without the extra ``[lm]``.
        """
        root, config = pathlib.Path(folder), checkpoint.read_config(folder)
        settings = _settings(root)
        backend = _backend(root, bool(settings.get("add_prefix_space", False)))
        if isinstance(config, DecoderConfig):
            _check_kin(root, backend, settings, config)
        else:
            for kind in ("pad", "bos", "eos"):
                name, token = (
                    settings.get(f"{kind}_token"),
                    getattr(config, f"{kind}_token_id"),
                )
                found = backend.token_to_id(name) if isinstance(name, str) else token
                if found != token and token is not None:
                    raise ValueError(
                        f"{kind}_token {name!r} in {str(root)!r} is token {found}, but "
                        f"{kind}_token_id of the model is {token}: the tokenizer belongs "
                        "to another model"
                    )
        names = {n: x for n, x in settings.items() if n.endswith("_token")}
        return cls(
            backend,
            config,
            backend.token_to_id(settings["mask_token"]),
            _chat_templates.read(root),
            {name: x for name, x in names.items() if isinstance(x, str)},
        )

    def save(self, folder: Path) -> None:
        """Writes what :meth:`load` reads.

        That is ``tokenizer.json``, ``special_tokens_map.json`` and, if there is a chat
        template, ``chat_template.jinja``.
        """
        root = pathlib.Path(folder)
        self.backend.save(str(root / "tokenizer.json"))
        names = self._names | dict(self.token_names or {})
        _files.write_json(root / "special_tokens_map.json", names)
        if self.chat_template is not None:
            path = root / "chat_template.jinja"
            path.write_text(self.chat_template, encoding="utf-8")

    @property
    def is_decoder(self) -> bool:
        """True if the model is a decoder, which reads from left to right."""
        return self.config.is_decoder

    @property
    def start(self) -> list[int]:
        """The tokens before every record."""
        if not isinstance(self.config, DecoderConfig):
            return [*self._special["bos_token_id"]]
        added = self.backend.encode("", add_special_tokens=True).ids
        return [token for token in added if token not in self.config.ends]

    @property
    def end(self) -> list[int]:
        """The tokens after every record."""
        return [] if self.is_decoder else [*self.config.ends]

    def encode(self, text: str) -> list[int]:
        """Encodes a text as tokens, without special ones.

        A lone surrogate, which is no character, is read as U+FFFD: whether a text has one
        is as private as the text, and does not stop a run.
        """
        text = _chat_templates.characters(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_after(self, text: str) -> list[int]:
        """Encodes a text that follows another one, of whose tokens none is changed.

        Tokenizers of Llama 2, Mistral and Phi-3 put a space before every text. Here they do
        not: a text has the tokens that it has within a longer one.

        Example:
          >>> import tokenizers
          >>> from jaxdp.models.language import text, tiny_config
          >>> words = {"▁": 3, "a": 4, "▁a": 5, ".": 6}
          >>> backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("▁", "a")]))
          >>> backend.normalizer = tokenizers.normalizers.Sequence([
          ...     tokenizers.normalizers.Prepend("▁"),
          ...     tokenizers.normalizers.Replace(" ", "▁"),
          ... ])
          >>> tokenizer = text.Tokenizer(backend, tiny_config("llama"))
          >>> tokenizer.encode("a a."), tokenizer.encode(" a")
          ([5, 5, 6], [3, 5])
          >>> tokenizer.encode_after(" a"), tokenizer.encode_after(".")
          ([5], [6])
        """
        return self._behind(text) if self._begins_texts else self.encode(text)

    @functools.cached_property
    def _begins_texts(self) -> bool:
        """A flag: the tokenizer puts something before every text, as a space."""
        for x in ("a", "1", "."):
            with contextlib.suppress(Exception):  # There may be no token of it.
                if self.encode(x) != self._behind(x):
                    return True
        return False

    @functools.cached_property
    def _before(self) -> list[str]:
        """The texts of ``_BEFORE`` whose letters all have tokens."""
        found = []
        for x in _BEFORE:
            with contextlib.suppress(Exception):  # It may be refused, or left out.
                found += [x] if self.encode(x) != self.encode(2 * x) else []
        return found

    def _behind(self, text: str) -> list[int]:
        """Encodes a text behind another one, and cuts off what is of that."""
        text = _chat_templates.characters(text)
        for before in self._before:
            found = self.backend.encode(before + text, add_special_tokens=False)
            ends = [end <= len(before) for _, end in found.offsets]
            count = ends.index(False) if False in ends else len(ends)
            # No token may be of both.
            begins = [first >= len(before) for first, _ in found.offsets[count:]]
            if count and all(begins):
                return found.ids[count:]
        return self.encode(text)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> _chat_templates.Chat:
        """Returns one conversation, whose beginnings can be rendered and encoded.

        Special tokens of the template are special; one that a message spells is text, so
        that nobody ends a turn or begins another one by what they write. (``transformers``
        does so only if asked.)

        Raises:
          ValueError: no chat template, or one that is none.

        Example:
          >>> import tokenizers
          >>> from jaxdp.models.language import text, tiny_config
          >>> words = {"<unk>": 3, "</s>": 2, "user": 4, "good": 5, "/": 6, "<": 7, ">": 8}
          >>> backend = tokenizers.Tokenizer(
          ...     tokenizers.models.WordLevel(words | {"s": 9}, "<unk>")
          ... )
          >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
          ...     tokenizers.pre_tokenizers.Whitespace(),
          ...     tokenizers.pre_tokenizers.Punctuation(),
          ... ])
          >>> _ = backend.add_special_tokens(["</s>"])
          >>> template = (
          ...     "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
          ... )
          >>> tokenizer = text.Tokenizer(backend, tiny_config("opt"), None, template)
          >>> chat = tokenizer.chat([{"role": "user", "content": "good </s>"}])
          >>> chat.encode(chat.render())
          [4, 5, 7, 6, 9, 8, 2]
        """
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        names = self._names if self.token_names is None else self.token_names
        _chat_templates.compiled(self.chat_template)
        return _chat_templates.Chat(self.backend, self.chat_template, names, messages)

    def decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens to text; special ones are left out."""
        special = {token for tokens in self._special.values() for token in tokens}
        kept = [int(token) for token in tokens if int(token) not in special]
        return self.backend.decode(kept, skip_special_tokens=True)

    def label_words(self, words: Sequence[str]) -> list[int]:
        """Returns the token of each word, with a space before it.

        Raises:
          ValueError: a word of more than one token, or two words of one token.
        """
        tokens = []
        for word in words:
            pieces = self.encode_after(" " + word.strip())
            if len(pieces) != 1:
                shown = [self.backend.id_to_token(piece) for piece in pieces]
                raise ValueError(
                    f"label word {word!r} must be one token after a space, got {shown}"
                )
            tokens += pieces
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"label words must differ, got {[*words]}")
        return tokens

    @property
    def _names(self) -> dict[str, str]:
        return {
            kind.removesuffix("_id"): self.backend.id_to_token(tokens[0])
            for kind, tokens in self._special.items()
            if tokens
        }

    @property
    def _special(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        one = {"pad": config.pad_token_id, "bos": config.bos_token_id}
        one["mask"] = self.mask_token_id
        special: dict[str, tuple[int, ...]]
        special = {n: () if token is None else (token,) for n, token in one.items()}
        special["eos"] = config.ends
        return {f"{name}_token_id": tokens for name, tokens in special.items()}


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "texts need the package tokenizers: pip install 'jaxdp-optim[lm]'"
        ) from error
    return tokenizers


def _backend(root: pathlib.Path, add_prefix_space: bool) -> Any:
    library = _library()
    whole, vocab, merges = (
        root / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    try:
        if whole.is_file():
            return library.Tokenizer.from_file(str(whole))
        if not (vocab.is_file() and merges.is_file()):
            raise ValueError(
                "it has neither tokenizer.json nor vocab.json and merges.txt"
            )
        model = library.models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # The library raises nothing more specific.
        raise ValueError(f"no tokenizer in {str(root)!r}: {error}") from None
    backend = library.Tokenizer(model)
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(
        add_prefix_space=add_prefix_space
    )
    backend.decoder = library.decoders.ByteLevel()
    return backend


def _check_kin(
    root: pathlib.Path, backend: Any, settings: Mapping[str, Any], config: DecoderConfig
) -> None:
    """Raises if a decoder's tokenizer belongs to another model, by its special tokens.

    Sizes say little: tables of tokens are padded, and chats add tokens.
    """
    path, more = root / "generation_config.json", None
    if path.is_file():
        more = _files.read_json(path).get("eos_token_id")
    given = *config.ends, *(more if isinstance(more, list) else [more])
    ends = {end for end in given if isinstance(end, int) and end >= 0}
    # A token that ended texts often pads where that of a chat took its place.
    allowed = {"bos": {config.bos_token_id} - {None}, "eos": ends, "pad": ends}
    named = {
        kind: backend.token_to_id(name)
        for kind in allowed
        if allowed[kind] and isinstance(name := settings.get(f"{kind}_token"), str)
    }
    alike = any(token in allowed[kind] for kind, token in named.items())
    # Or a chat's end was set in config.json alone: a special token without a name.
    special = {n for n, x in backend.get_added_tokens_decoder().items() if x.special}
    names = {backend.token_to_id(x) for x in settings.values() if isinstance(x, str)}
    alike = alike or bool(ends & special - names)
    strange = named.keys() - {"pad"} and not alike
    if strange or (ends and not any(map(backend.id_to_token, ends))):
        raise ValueError(
            f"the tokenizer in {str(root)!r} belongs to another model: of its "
            f"{backend.get_vocab_size()} tokens it names {named or 'none'}, but "
            f"bos_token_id of the model is {config.bos_token_id}, and eos_token_id "
            f"{', '.join(map(str, sorted(ends))) or None}"
        )


def _settings(root: pathlib.Path) -> dict[str, Any]:
    """Reads the settings of a tokenizer beside its vocabulary; token names become text."""
    settings: dict[str, Any] = {"mask_token": "<mask>"}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (root / name).is_file():
            for key, value in _files.read_json(root / name).items():
                text = value.get("content") if isinstance(value, dict) else value
                settings |= {key: text} if text is not None else {}
    return settings
