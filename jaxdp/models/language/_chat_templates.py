"""Chat templates: conversations as text, rendered as ``transformers`` renders them."""

import datetime
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from jaxdp.models.language import _files

Message = Mapping[str, Any]
Offset = tuple[int, int]

#: Today, for all templates that ask: records must be the same tokens when a run goes on.
#: Templates of Llama 3 say this day where they know none.
_TODAY = datetime.datetime(2024, 7, 26)


_SURROGATES = re.compile("[\ud800-\udfff]")


def characters(text: str) -> str:
    """Returns a text with U+FFFD for each lone surrogate, which no tokenizer takes."""
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)


def read(root: pathlib.Path) -> str | None:
    """Returns the template of a checkpoint folder; None if it has none.

    That is ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json``: a
    text, or the one of several that is called ``default``.
    """
    path = root / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    path = root / "tokenizer_config.json"
    found = _files.read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(found, list):
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    if not isinstance(found, str | None):
        raise ValueError(
            f"chat_template in {str(path)!r} must be a text or a list of named ones, got "
            f"{type(found).__name__}"
        )
    return found


def render(
    source: str,
    messages: Sequence[Message],
    names: Mapping[str, str],
    add_generation_prompt: bool = False,
) -> str:
    """Renders messages; ``names`` are those of special tokens, as ``bos_token``.

    Raises:
      ValueError: the template is none, or refuses the messages. What it says is quoted
        if it stands in the template, and not if it has words of the messages.
      ImportError: without the extra ``[lm]``.
    """
    template = compiled(source)
    try:
        return template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **names,
        )
    except Exception as error:  # Templates are programs: they may raise anything.
        said = str(error)
        known = type(error).__name__ == "TemplateError" and said in source
        raise ValueError(
            "the chat template refuses its messages" + (f": {said}" if known else "")
        ) from None


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> Any:
    """Returns a template of the package ``jinja2``, in a sandbox.

    Raises:
      ValueError: it is no template.
      ImportError: without the extra ``[lm]``.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise ImportError(
            "chat templates need the package jinja2: pip install 'jaxdp-optim[lm]'"
        ) from error

    class Generation(jinja2.ext.Extension):
        """Extension for ``{% generation %}`` blocks, which stand for what is in them."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    # Jinja's own writes for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat_template is no template: {error}") from None


# --- conversations -----------------------------------------------------------------


class Chat:
    """A conversation: beginnings of it as text, and their tokens.

    Special tokens in its messages stay text: in rendered texts each is one character that
    no message has, and :meth:`encode` puts its letters back, encoded without it.
    """

    def __init__(
        self,
        backend: Any,
        source: str,
        names: Mapping[str, str],
        messages: Sequence[Message],
    ):
        self._backend, self._source, self._names = backend, source, names
        added = backend.get_added_tokens_decoder().items()
        self._special = {token: x.content for token, x in added if x.special}
        # As ``transformers``: to many templates "no text" would be the text None.
        given = [{n: x for n, x in m.items() if x is not None} for m in messages]
        self._messages, self._letters = _guarded(given, [*self._special.values()])

    def render(
        self, count: int | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Renders the first ``count`` messages, or all."""
        chosen = self._messages[:count]
        return render(self._source, chosen, self._names, add_generation_prompt)

    def turn(self, text: str) -> str:
        """Returns a text without the space after its last special token, if it ends so."""
        kept = text.rstrip()
        return kept if kept.endswith(tuple(self._special.values())) else text

    def is_special(self, token: int) -> bool:
        """Returns whether a token is a special one."""
        return token in self._special

    def is_bare(self, tokens: Sequence[int]) -> bool:
        """Returns whether there are no tokens but special ones and space."""
        return not self._backend.decode([*tokens], skip_special_tokens=True).strip()

    def encode(self, text: str) -> list[int]:
        """Encodes what :meth:`render` returned; special tokens of the template count."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Offset]]:
        """Encodes a text, with where each token begins and ends in it."""
        text = characters(text)
        backend = self._backend
        backend.encode_special_tokens = False
        try:
            whole = backend.encode(text, add_special_tokens=False)
        finally:
            backend.encode_special_tokens = True
        if not any(chr(code) in text for code in self._letters):
            return whole.ids, whole.offsets
        pairs = [*zip(whole.ids, whole.offsets, strict=True)]
        pairs.append((-1, (len(text), len(text))))
        found: list[tuple[int, Offset]] = []
        run: list[tuple[int, Offset]] = []  # Since the last special token, which ended:
        start = 0
        for token, (first, last) in pairs:
            if token == -1 or token in self._special:
                found += self._plain(text[start:first], start) or run
                found.append((token, (first, last)))
                run, start = [], last
            else:
                run.append((token, (first, last)))
        tokens, offsets = zip(*found[:-1], strict=True)
        return [*tokens], [*offsets]

    def _plain(self, text: str, start: int) -> list[tuple[int, Offset]]:
        """Encodes a text between special tokens, if letters are to be put back."""
        letters = [self._letters.get(ord(x), x) for x in text]
        whole = "".join(letters)
        if whole == text:
            return []
        place = [start + j for j, x in enumerate(letters) for _ in x]
        place.append(start + len(text))
        found = self._backend.encode(whole, add_special_tokens=False)
        ends = [
            (place[first], place[last - 1] + 1 if last > first else place[last])
            for first, last in found.offsets
        ]
        return [*zip(found.ids, ends, strict=True)]


def _guarded(
    messages: Sequence[Message], special: Sequence[str]
) -> tuple[list[Message], dict[int, str]]:
    """Puts a character that no message has in place of each special token in messages.

    Returns:
      The messages, and what each character stands for, as ``str.translate`` takes it.
    """
    texts = [*_texts(messages)]
    if not special or not texts:
        return [*messages], {}
    longest = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest)))
    found = sorted({name for text in texts for name in pattern.findall(text)})
    if not found:
        return [*messages], {}
    there = set().union(*texts)
    # Noncharacters, and characters for private use.
    pool = itertools.chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))
    free = (code for code in pool if chr(code) not in there)
    codes = dict(zip(found, free, strict=False))
    if len(codes) < len(found):
        raise ValueError(
            "content must leave a character for private use to stand for a special token"
        )

    def put(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: chr(codes[match[0]]), value)
        if isinstance(value, Mapping):
            return {put(name): put(x) for name, x in value.items()}
        return [put(x) for x in value] if isinstance(value, list) else value

    return put([*messages]), {code: name for name, code in codes.items()}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, Sequence):
        for x in value:
            yield from _texts(x)
