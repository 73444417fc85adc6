"""Records of text as batches of tokens: files, tokenizers, templates, fixed lengths.

A record is a mapping from names of fields to text. A *template* says how its fields make
one text: ``"{premise} ? {mask} , {hypothesis}"``. ``{mask}`` is where a model is to put a
word, ``{sep}`` the token that ends a text; all other names are fields. Literal text and
fields become tokens one by one, as they would where they stand in the text. Where a record
is too long its fields are cut, the longest first, and never the template: a mask token
always survives.

Every array is padded to ``max_length`` on the right. Padding to the longest record would
make the others' losses depend on it.
"""

import string
from collections.abc import Sequence

import numpy as np

from jaxdp.core import validate
from jaxdp.data import values
from jaxdp.models.language._records import Record, text_of
from jaxdp.models.language._records import labels as labels
from jaxdp.models.language._records import read_records as read_records
from jaxdp.models.language._rows import Batch, Side, check, empty, empty_if_private, put
from jaxdp.models.language._tokenizers import Tokenizer as Tokenizer

#: Names in a template that are no fields.
MARKS = ("mask", "sep")

# --- templates ---------------------------------------------------------------------


def template_fields(template: str) -> list[str]:
    """Returns the fields that a template names, in order.

    Raises:
      ValueError: braces that do not match, or an empty name.

    Example:
      >>> from jaxdp.models.language import text
      >>> text.template_fields("{premise} ? {mask} , {hypothesis}")
      ['premise', 'hypothesis']
    """
    return [name for _, name in _parse(template) if name and name not in MARKS]


def _parse(template: str) -> list[tuple[str, str | None]]:
    """Parses a template into pairs: literal text, and the name after it or None."""
    try:
        parsed = [*string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}") from None
    for _, name, form, conversion in parsed:
        if name is not None and (form or conversion or not name.isidentifier()):
            raise ValueError(
                f"template {template!r} must have names in braces, such as {{text}}; "
                "braces as text are doubled"
            )
    return [(literal, name) for literal, name, _, _ in parsed]


class _Template:
    """A template whose literal text is tokens, to be filled with one record's fields."""

    def __init__(self, tokenizer: Tokenizer, template: str):
        self._tokenizer = tokenizer
        #: Tokens, or a field: its name, what stands before it, and whether it is the first.
        self._parts: list[list[int] | tuple[str, str, bool]] = []
        self._mask: int | None = None  # the part that is the mask token
        first = True
        for literal, name in _parse(template):
            # A space belongs to the word after it: " It", not "It" after a space. The
            # mask stands for a word and its space.
            text = literal.rstrip(" ") if name else literal
            self._parts.append(_encode(tokenizer, text, first))
            first = first and not text
            if name == "mask":
                self._mask = len(self._parts)
                self._parts.append([_mask_token(tokenizer, template)])
            elif name == "sep":
                self._parts.append([*tokenizer.config.ends[:1]])
            elif name:
                self._parts.append((name, literal[len(text) :], first))
            first = False
        self._fixed = sum(len(part) for part in self._parts if isinstance(part, list))
        self._fields = [j for j, x in enumerate(self._parts) if isinstance(x, tuple)]

    def check(self, room: int) -> None:
        """Requires room for the template and a token of each field."""
        if self._fixed + len(self._fields) > room:
            raise ValueError(
                f"max_length leaves room for {room} tokens, but the template alone has "
                f"{self._fixed} and each of its {len(self._fields)} fields needs one"
            )

    def fill(
        self, record: Record, i: int, room: int, truncate: Side
    ) -> tuple[list[int], int | None]:
        """Returns the tokens of record i, at most ``room``, and the mask token's index."""
        parts = [
            part if isinstance(part, list) else self._field(part, record, i)
            for part in self._parts
        ]
        left = room - self._fixed
        # The shortest first: each may have an equal share of what is left.
        for n, j in enumerate(sorted(self._fields, key=lambda j: len(parts[j]))):
            keep = min(len(parts[j]), left // (len(self._fields) - n))
            start = 0 if truncate == "right" else len(parts[j]) - keep
            parts[j] = parts[j][start : start + keep]
            left -= keep
        mask = None if self._mask is None else sum(map(len, parts[: self._mask]))
        return [token for part in parts for token in part], mask

    def _field(self, part: tuple[str, str, bool], record: Record, i: int) -> list[int]:
        name, space, first = part
        text = text_of(record, name, i)
        return _encode(self._tokenizer, space + text, first) if text else []


def _encode(tokenizer: Tokenizer, text: str, first: bool) -> list[int]:
    """Encodes a part of a text, the first or one that follows."""
    return tokenizer.encode(text) if first else tokenizer.encode_after(text)


def _mask_token(tokenizer: Tokenizer, template: str) -> int:
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"template {template!r} has {{mask}}, but the tokenizer has no mask token"
        )
    return tokenizer.mask_token_id


# --- batches -----------------------------------------------------------------------


def encode_classification(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    *,
    max_length: int,
    template: str = "{text}",
    truncate: Side = "right",
    private: bool = False,
) -> Batch:
    """Encodes records for the tasks ``prompt`` and ``head``.

    Args:
      tokenizer: of the model.
      records: with the fields that the template names.
      max_length: L. A public constant.
      template: an encoder's has ``{mask}`` once for a prompt; a decoder's has it at the end
        or not at all.
      truncate: the side on which a field that is too long loses tokens.
      private: records that are refused below are padding alone instead: one person's may
        not decide whether a run begins. The batch then has ``valid`` bool (n,), False of
        them: give them the label -1, with which a record counts zero.

    Returns:
      ``tokens`` int32 (n, L) and ``mask`` bool (n, L); ``position`` int32 (n,), of the
      mask token or of a decoder's last token, whose output names the next one. Without
      ``{mask}`` in an encoder's template there is no ``position``.

    Raises:
      ValueError: a template that does not fit the model or ``max_length``, or a record
        without a field, by its number.

    Example:
      >>> import tokenizers
      >>> from jaxdp.models.language import text, tiny_config
      >>> config = tiny_config("opt")
      >>> words = {"<unk>": 3, "good": 4, "bad": 5, "It": 6, "was": 7, "film": 8}
      >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
      >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> tokenizer = text.Tokenizer(backend, config)
      >>> batch = text.encode_classification(
      ...     tokenizer, [{"text": "good film"}], max_length=8,
      ...     template="{text} It was {mask}",
      ... )
      >>> batch["tokens"].tolist(), batch["position"].tolist()
      ([[2, 4, 8, 6, 7, 1, 1, 1]], [4])
    """
    check(tokenizer, max_length, truncate)
    marks = [name for _, name in _parse(template)].count("mask")
    if marks > 1:
        raise ValueError(f"template {template!r} must have {{mask}} at most once")
    if tokenizer.is_decoder and marks:
        before, after = template.split("{mask}")
        if after.strip():
            raise ValueError(
                f"template {template!r} must end with {{mask}}: the model reads from left "
                "to right"
            )
        template, marks = before.rstrip(" "), 0
    form = _Template(tokenizer, template)
    batch = empty((len(records),), max_length, tokenizer)
    position, valid = np.zeros(len(records), np.int32), np.zeros(len(records), bool)
    room = max_length - len(tokenizer.start) - len(tokenizer.end)
    form.check(room)
    for i, record in enumerate(records):
        with empty_if_private(private):
            filled, where = form.fill(record, i, room, truncate)
            tokens = [*tokenizer.start, *filled, *tokenizer.end]
            put(batch, i, tokens)
            # Without a mask the next word is asked of a decoder's last token.
            last = max(len(tokens) - 1, 0)
            position[i] = last if where is None else len(tokenizer.start) + where
            valid[i] = True
    more = {"position": position} if marks or tokenizer.is_decoder else {}
    return batch | more | ({"valid": valid} if private else {})


def encode_choices(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    *,
    max_length: int,
    template: str,
    choices: Sequence[str] | str,
    span_length: int,
    num_choices: int | None = None,
    truncate: Side = "right",
    private: bool = False,
) -> Batch:
    """Encodes records for the task ``choice``: a prompt with each of its choices after it.

    Args:
      tokenizer: a decoder's.
      records: with the fields that the template names.
      max_length: L. A public constant, as are the next ones.
      template: of the prompt. A choice follows it after a space, or after a new line if
        that is what the template ends with.
      choices: the same texts for every record, or the name of a field with a list of
        texts.
      span_length: what a choice has room for; the end of a longer one is lost if
        choices are a field, and refused if they are the same for every record.
      num_choices: C where choices are a field: the most that a record has.
      truncate: the side on which a field that is too long loses tokens.
      private: records that are refused below have no choices instead, all False in
        ``valid``: those of one person may not decide whether a run begins.

    Returns:
      ``tokens`` int32 (n, C, L), ``mask`` and ``span`` bool (n, C, L), ``span`` over the
      tokens of the choice; ``valid`` bool (n, C), False where a record has fewer choices.

    Raises:
      ValueError: an encoder, a template that does not fit ``max_length``, choices that
        :func:`check_choices` refuses, or a record without a field, without choices, with
        too many or with two of the same tokens, by its number.

    Example:
      >>> import tokenizers
      >>> from jaxdp.models.language import text, tiny_config
      >>> config = tiny_config("opt")
      >>> words = {"<unk>": 3, "good": 4, "bad": 5, "It": 6, "was": 7, "film": 8}
      >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
      >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> tokenizer = text.Tokenizer(backend, config)
      >>> batch = text.encode_choices(
      ...     tokenizer, [{"text": "film"}], max_length=8, template="{text} It was",
      ...     choices=("good", "bad"), span_length=1,
      ... )
      >>> batch["tokens"].tolist()
      [[[2, 8, 6, 7, 4, 1, 1, 1], [2, 8, 6, 7, 5, 1, 1, 1]]]
    """
    room = _room(tokenizer, max_length, span_length, truncate)
    if isinstance(choices, str):
        validate.integer(at_least=2, num_choices=num_choices)
        assert num_choices is not None
    else:
        if len(choices) < 2 or num_choices is not None:
            raise ValueError(
                "choices must be two texts or more, without num_choices, got "
                f"{[*choices]} and {num_choices}"
            )
        check_choices(tokenizer, template, choices, span_length)
        num_choices = len(choices)
    form = _Template(tokenizer, template.rstrip(" "))
    batch = empty((len(records), num_choices), max_length, tokenizer, span=True)
    valid = np.zeros((len(records), num_choices), bool)
    form.check(room)
    for i, record in enumerate(records):
        with empty_if_private(private):
            prompt = tokenizer.start + form.fill(record, i, room, truncate)[0]
            texts = choices
            if isinstance(choices, str):
                texts = _list(record, choices, i)
            if not 0 < len(texts) <= num_choices:
                raise ValueError(
                    f"{values.place_of(record, i)} must have 1 to {num_choices} choices, "
                    f"got {len(texts)}"
                )
            spans = _spans(tokenizer, template, texts, span_length, record, i)
            for c, span in enumerate(spans):
                put(batch, (i, c), prompt + span, len(prompt))
                valid[i, c] = True
    return batch | {"valid": valid}


def encode_generation(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    *,
    max_length: int,
    template: str,
    answer: str = "answer",
    span_length: int,
    truncate: Side = "right",
    private: bool = False,
) -> Batch:
    """Encodes records for the task ``generation``: a prompt, its answer and the end token.

    Args:
      tokenizer: a decoder's.
      records: with the fields that the template names, and the answer's: a text, or a
        list of texts, whose first is taken.
      max_length: L. A public constant, as is the next one.
      template: of the prompt; the answer follows as in :func:`encode_choices`.
      answer: name of the answer's field.
      span_length: what answer and end token have room for; a longer answer loses its end.
      truncate: the side on which a field that is too long loses tokens.
      private: records that are refused below are padding alone instead, without a span:
        their loss is 0 whatever the parameters are, and one person's may not decide
        whether a run begins.

    Returns:
      ``tokens`` int32 (n, L), ``mask`` bool (n, L), ``span`` bool (n, L) over the tokens
      of the answer and the end token.

    Raises:
      ValueError: an encoder, a template that does not fit ``max_length``, or a record
        without a field, by its number.

    Example:
      >>> import tokenizers
      >>> from jaxdp.models.language import text, tiny_config
      >>> config = tiny_config("opt")
      >>> words = {"<unk>": 3, "good": 4, "bad": 5, "It": 6, "was": 7, "film": 8}
      >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
      >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> tokenizer = text.Tokenizer(backend, config)
      >>> batch = text.encode_generation(
      ...     tokenizer, [{"text": "film", "answer": "good"}], max_length=8,
      ...     template="{text} It was", span_length=2,
      ... )
      >>> batch["tokens"].tolist(), batch["span"].sum().item()
      ([[2, 8, 6, 7, 4, 2, 1, 1]], 2)
    """
    room = _room(tokenizer, max_length, span_length, truncate)
    form = _Template(tokenizer, template.rstrip(" "))
    batch = empty((len(records),), max_length, tokenizer, span=True)
    form.check(room)
    for i, record in enumerate(records):
        with empty_if_private(private):
            many = isinstance(record.get(answer), list)
            text = (
                _list(record, answer, i, at_least=1)[0]
                if many
                else text_of(record, answer, i)
            )
            prompt = tokenizer.start + form.fill(record, i, room, truncate)[0]
            span = continuation(tokenizer, template, text)[: span_length - 1]
            span = [*span, *tokenizer.config.ends[:1]]
            put(batch, i, prompt + span, len(prompt))
    return batch


def _spans(
    tokenizer: Tokenizer,
    template: str,
    texts: Sequence[str],
    span_length: int,
    record: Record,
    i: int,
) -> list[list[int]]:
    """Returns the tokens of a record's choices, which must be told apart by them."""
    spans: list[list[int]] = []
    for c, text in enumerate(texts):
        span = continuation(tokenizer, template, text)[:span_length]
        if not span:
            raise ValueError(f"{values.place_of(record, i)}: choice {c + 1} is empty")
        if span in spans:
            raise ValueError(
                f"{values.place_of(record, i)}: choices {spans.index(span) + 1} and "
                f"{c + 1} must differ within span_length = {span_length} tokens"
                + values.got(text)
            )
        spans.append(span)
    return spans


def _list(record: Record, field: str, i: int, at_least: int = 0) -> list[str]:
    value = record.get(field)
    if not (isinstance(value, list) and all(isinstance(x, str) for x in value)):
        raise ValueError(
            f"{values.place_of(record, i)}: {field} must be a list of texts"
            + values.got(value)
        )
    if len(value) < at_least:
        raise ValueError(
            f"{values.place_of(record, i)}: {field} must have a text"
            + values.got(value)
        )
    return value


def check_choices(
    tokenizer: Tokenizer, template: str, choices: Sequence[str], span_length: int
) -> None:
    """Raises if a model could not tell choices of every record apart.

    Raises:
      ValueError: a choice that is empty or of more than ``span_length`` tokens, or two
        of the same tokens.
    """
    spans = [continuation(tokenizer, template, text) for text in choices]
    for c, span in enumerate(spans):
        if not span:
            raise ValueError(f"choices must not be empty, got {[*choices]}")
        if len(span) > span_length:
            raise ValueError(
                f"span_length must be an integer >= {len(span)}, the tokens of choice "
                f"{choices[c]!r}, got {span_length}"
            )
        if span in spans[:c]:
            raise ValueError(
                f"choices must differ in their tokens, got {choices[c]!r} as well as "
                f"{choices[spans.index(span)]!r}"
            )


def continuation(tokenizer: Tokenizer, template: str, text: str) -> list[int]:
    """Returns the tokens of a text that follows a prompt: after a space or a new line."""
    space = "" if template.endswith("\n") else " "
    return tokenizer.encode_after(space + text.strip()) if text.strip() else []


def _room(
    tokenizer: Tokenizer, max_length: int, span_length: int, truncate: Side
) -> int:
    """Returns the number of tokens for a prompt, the same for all choices after it."""
    check(tokenizer, max_length, truncate, span_length)
    return max_length - len(tokenizer.start) - span_length
