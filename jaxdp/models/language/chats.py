"""Conversations and preferences as batches of tokens, by a model's chat template.

A record of a conversation is ``{"messages": [{"role": ..., "content": ...}, ...]}``, whose
last message is the assistant's. What counts are the tokens of the assistant's messages and
what ends its turns. A record of a preference is ``{"prompt": ..., "chosen": ...,
"rejected": ...}``: texts, or lists of messages. **One record is one pair.** Whoever wrote
several records is protected as each of them is, and not as a person: see
:mod:`jaxdp.data.users`.

Arrays have a fixed length, as those of :mod:`jaxdp.models.language.text`.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data import values
from jaxdp.models.language import text
from jaxdp.models.language._chat_templates import Chat, Message
from jaxdp.models.language._records import Record, text_of
from jaxdp.models.language._rows import Batch, Side, check, empty, empty_if_private, put
from jaxdp.models.language._tokenizers import Tokenizer

_ASSISTANT = "assistant"


def encode_instruction(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    *,
    max_length: int,
    span_length: int,
    truncate: Side = "left",
    private: bool = False,
) -> Batch:
    """Encodes conversations for the task ``instruction``.

    Where the assistant's tokens are is found by rendering the conversation up to each of
    its messages, as it is when the model is asked, and after it. They end with the special
    token that ends the turn; a new line after it does not count.

    Args:
      tokenizer: a decoder's, with a chat template.
      records: with ``messages``; what else a message has, such as ``name``, is the
        template's.
      max_length: L. A public constant, as is the next one.
      span_length: the assistant's tokens that count: of more the last ones, or with
        ``truncate="right"`` the first ones.
      truncate: the side on which a conversation that is too long loses tokens. On the left
        they are the oldest ones, with the system's message.
      private: records that are refused below are padding alone instead, without a span:
        their loss is 0 whatever the parameters are, and one person's may not decide
        whether a run begins.

    Returns:
      ``tokens`` int32 (n, L), ``mask`` bool (n, L), and ``span`` bool (n, L) over the
      tokens of the assistant that count, of several turns.

    Raises:
      ValueError: an encoder, no chat template, or a record by its number: messages that
        the template refuses, whose last is not the assistant's, of which no token of an
        answer is left, or which the template renders otherwise when more follow.

    Example:
      >>> import tokenizers
      >>> from jaxdp.models.language import chats, text, tiny_config
      >>> words = {"<unk>": 3, "user": 4, "assistant": 5, "film": 7, "good": 8, "</s>": 2}
      >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
      >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> _ = backend.add_special_tokens(["</s>"])
      >>> template = (
      ...     "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
      ...     "{% if add_generation_prompt %}assistant{% endif %}"
      ... )
      >>> tokenizer = text.Tokenizer(backend, tiny_config("opt"), None, template)
      >>> messages = [
      ...     {"role": "user", "content": "film"}, {"role": "assistant", "content": "good"},
      ... ]
      >>> batch = chats.encode_instruction(
      ...     tokenizer, [{"messages": messages}], max_length=8, span_length=4
      ... )
      >>> batch["tokens"].tolist()
      [[4, 7, 2, 5, 8, 2, 1, 1]]
      >>> batch["span"].astype(int).tolist()
      [[0, 0, 0, 0, 1, 1, 0, 0]]
    """
    _check(tokenizer, max_length, span_length, truncate)
    batch = empty((len(records),), max_length, tokenizer, span=True)
    for i, record in enumerate(records):
        with empty_if_private(private):
            messages = _messages(record, "messages", i)
            tokens, answers = _encoded(tokenizer, messages, i, record)
            left = truncate == "left"
            cut = slice(-max_length, None) if left else slice(max_length)
            count, tokens, answers = len(tokens), tokens[cut], answers[cut]
            answers[:1] = False  # There is nothing that it would be likely after.
            there = np.flatnonzero(answers)
            if len(there) == 0:
                raise ValueError(
                    f"{values.place_of(record, i)}: no token of an answer is left within "
                    f"max_length = {max_length} tokens, cut on the {truncate}"
                    + values.got(count)
                )
            put(batch, i, tokens)
            kept = there[-span_length:] if left else there[:span_length]
            batch["span"][i, kept] = True
    return batch


def encode_prompts(
    tokenizer: Tokenizer, records: Sequence[Record], *, max_length: int
) -> Batch:
    """Encodes conversations without their last message, for :func:`generation.generate`.

    They end with what the assistant's message begins with. One that is too long loses its
    beginning.

    Returns:
      ``tokens`` int32 (n, L) and ``mask`` bool (n, L).

    Raises:
      ValueError: as :func:`encode_instruction`.

    Example:
      >>> import tokenizers
      >>> from jaxdp.models.language import chats, text, tiny_config
      >>> words = {"<unk>": 3, "assistant": 5, "film": 7}
      >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
      >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> template = "{% for m in messages %}{{ m.content }} {% endfor %}assistant"
      >>> tokenizer = text.Tokenizer(backend, tiny_config("opt"), None, template)
      >>> messages = [
      ...     {"role": "user", "content": "film"}, {"role": "assistant", "content": "good"},
      ... ]
      >>> batch = chats.encode_prompts(tokenizer, [{"messages": messages}], max_length=4)
      >>> batch["tokens"].tolist()
      [[7, 5, 1, 1]]
    """
    _check(tokenizer, max_length, 1, "left")
    batch = empty((len(records),), max_length, tokenizer)
    for i, record in enumerate(records):
        messages = _messages(record, "messages", i)[:-1]
        with values.about(record, i):
            chat = tokenizer.chat(messages)
            tokens = chat.encode(chat.render(None, add_generation_prompt=True))
        put(batch, i, tokens[-max_length:])
    return batch


def answers(records: Sequence[Record]) -> list[str]:
    """Returns the text of each conversation's last message.

    Example:
      >>> from jaxdp.models.language import chats
      >>> chats.answers([{"messages": [{"role": "assistant", "content": "good"}]}])
      ['good']
    """
    return [
        str(_messages(record, "messages", i)[-1]["content"])
        for i, record in enumerate(records)
    ]


def decode_answer(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Decodes generated tokens up to the first special one, which ends a turn.

    Example:
      >>> import tokenizers
      >>> from jaxdp.models.language import chats, text, tiny_config
      >>> words = {"<unk>": 3, "good": 5, "film": 7}
      >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
      >>> _ = backend.add_special_tokens(["<end>"])
      >>> tokenizer = text.Tokenizer(backend, tiny_config("opt"))
      >>> chats.decode_answer(tokenizer, [5, 7, backend.token_to_id("<end>"), 7, 7])
      'good film'
    """
    added = tokenizer.backend.get_added_tokens_decoder().items()
    special = {token for token, x in added if x.special}
    kept = itertools.takewhile(lambda token: int(token) not in special, tokens)
    return tokenizer.decode(kept).strip()


def encode_preference(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    *,
    max_length: int,
    span_length: int,
    template: str | None = None,
    truncate: Side = "left",
    private: bool = False,
) -> Batch:
    """Encodes pairs of texts for the task ``preference``: the chosen one, the rejected one.

    Args:
      tokenizer: a decoder's.
      records: with ``chosen`` and ``rejected``, and with ``prompt``, or the fields that
        the template names. Without a template ``prompt`` is a text, the user's message, or
        a list of messages, and the others are texts, the assistant's message, or lists
        that follow it; they may begin with the prompt's messages.
      max_length: L. A public constant, as is the next one.
      span_length: what each of the two has room for; a longer one loses its end.
      template: of the prompt, as in :func:`text.encode_generation`, after which an end
        token follows each text; None for the tokenizer's chat template.
      truncate: the side on which a prompt, or with a template a field, that is too long
        loses tokens.
      private: pairs that are refused below are padding alone instead, without a span: as
        of equal texts, their loss is a constant, and one person's may not decide whether a
        run begins.

    Returns:
      ``tokens`` int32 (n, 2, L), ``mask`` bool (n, 2, L), and ``span`` bool (n, 2, L) over
      the tokens of the chosen text, first, and of the rejected one.

    Raises:
      ValueError: an encoder, no chat template, or a record by its number: without a field,
        with messages that the template refuses; or pairs of equal texts alone, if they are
        public.

    Example:
      >>> import tokenizers
      >>> from jaxdp.models.language import chats, text, tiny_config
      >>> words = {"<unk>": 3, "good": 4, "bad": 5, "film": 6}
      >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
      >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> tokenizer = text.Tokenizer(backend, tiny_config("opt"))
      >>> record = {"prompt": "film", "chosen": "good", "rejected": "bad"}
      >>> batch = chats.encode_preference(
      ...     tokenizer, [record], max_length=5, span_length=2, template="{prompt}"
      ... )
      >>> batch["tokens"].tolist()
      [[[2, 6, 4, 2, 1], [2, 6, 5, 2, 1]]]
    """
    if template is None:
        batch = _pairs(tokenizer, records, max_length, span_length, truncate, private)
    else:
        form: Any = {"max_length": max_length, "span_length": span_length}
        form |= {"template": template, "truncate": truncate, "private": private}
        one, other = (
            text.encode_generation(tokenizer, records, answer=name, **form)
            for name in ("chosen", "rejected")
        )
        batch = {name: np.stack([x, other[name]], axis=1) for name, x in one.items()}
        if private:  # Half a pair is none.
            there = np.all(batch["mask"].any(axis=2), axis=1)
            nothing = empty(batch["tokens"].shape[:2], max_length, tokenizer, span=True)
            for name, rows in nothing.items():
                batch[name][~there] = rows[~there]
    # The loss of a pair of equal texts is a constant: one record of many is not refused.
    if not private and np.all(batch["tokens"][:, 0] == batch["tokens"][:, 1]):
        raise ValueError(
            f"chosen and rejected must differ within span_length = {span_length} tokens, "
            "got pairs of equal texts alone"
        )
    return batch


def _pairs(
    tokenizer: Tokenizer,
    records: Sequence[Record],
    max_length: int,
    span_length: int,
    truncate: Side,
    private: bool,
) -> Batch:
    """Encodes pairs by the chat template."""
    _check(tokenizer, max_length, span_length, truncate)
    room = max_length - span_length
    if room < 1:
        raise ValueError(
            f"max_length leaves room for {room} tokens of a prompt: it must be above "
            f"span_length = {span_length}, got {max_length}"
        )
    batch = empty((len(records), 2), max_length, tokenizer, span=True)
    for i, record in enumerate(records):
        with empty_if_private(private):  # Both before either is written.
            both = [_answered(tokenizer, record, x, i) for x in ("chosen", "rejected")]
            for k, (tokens, said) in enumerate(both):
                start = int(np.argmax(said))
                kept = slice(max(start - room, 0), start)
                if truncate == "right":
                    kept = slice(min(start, room))
                row = tokens[kept] + tokens[start : start + span_length]
                put(batch, (i, k), row)
                spans = said[start : start + span_length]
                first = kept.stop - (kept.start or 0)
                batch["span"][i, k, first : first + len(spans)] = spans
    return batch


def _answered(
    tokenizer: Tokenizer, record: Record, field: str, i: int
) -> tuple[list[int], np.ndarray]:
    """Returns the tokens of a prompt with an answer, and which are the answer's."""
    prompt = _said(record, "prompt", "user", i)
    answer = _said(record, field, _ASSISTANT, i)
    if answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]
    if not answer or answer[-1]["role"] != _ASSISTANT:
        raise ValueError(
            f"{values.place_of(record, i)}: the last of {field} must be the "
            "assistant's" + values.got(record[field])
        )
    tokens, said = _encoded(tokenizer, [*prompt, *answer], i, record, first=len(prompt))
    if not len(tokens):
        raise ValueError(f"{values.place_of(record, i)}: {field} has no tokens")
    return tokens, said


def _said(record: Record, field: str, role: str, i: int) -> list[Message]:
    """Returns a field's messages; a text is one message of ``role``."""
    if isinstance(record.get(field), list):
        return _list(record, field, i)
    return [{"role": role, "content": text_of(record, field, i)}]


def _check(
    tokenizer: Tokenizer, max_length: int, span_length: int, truncate: Side
) -> None:
    check(tokenizer, max_length, truncate, span_length)
    tokenizer.chat([])  # Names a template that is missing or wrong, before any record.


def _messages(record: Record, field: str, i: int) -> list[Message]:
    """Returns a record's messages, of which the last is the assistant's."""
    found = _list(record, field, i)
    if found[-1]["role"] != _ASSISTANT:
        raise ValueError(
            f"{values.place_of(record, i)}: the last of {field} must be the assistant's"
            + values.got(found[-1]["role"])
        )
    return found


def _list(record: Record, field: str, i: int) -> list[Message]:
    place = values.place_of(record, i)
    if field not in record:
        raise ValueError(f"{place} has no field {field!r}{values.only(record)}")
    found = record[field]
    if not isinstance(found, list) or not found:
        raise ValueError(
            f"{place}: {field} must be a list of one message or more"
            + values.got(found)
        )
    for message in found:
        for name in ("role", "content"):
            there = message.get(name) if isinstance(message, Mapping) else None
            if not isinstance(there, str):
                raise ValueError(
                    f"{place}: each of {field} must have a text as its {name}"
                    + values.got(message)
                )
    return found


def _encoded(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    i: int,
    record: Record,
    first: int = 0,
) -> tuple[list[int], np.ndarray]:
    """Returns the tokens of a conversation, and which of them the assistant says.

    Messages before ``first`` are not counted.
    """
    with values.about(record, i):
        chat = tokenizer.chat(messages)
        whole = chat.render()
        tokens, offsets = chat.encode_with_offsets(whole)
        begins, ends = np.array(offsets, int).reshape(-1, 2).T
        special = np.array([chat.is_special(token) for token in tokens], bool)
        said = np.zeros(len(tokens), bool)
        for j in range(first, len(messages)):
            if messages[j]["role"] == _ASSISTANT:
                start, end = _turn(chat, j, len(messages), whole, tokens)
                # A token of both, such as two new lines, is the answer's; a special one
                # that takes the space after it is not.
                after = np.where(special, begins >= start, ends > start)
                said |= after & (begins < end)
    return tokens, said


def _turn(
    chat: Chat, j: int, count: int, whole: str, tokens: list[int]
) -> tuple[int, int]:
    """Returns where message j, and what ends its turn, lies in a rendered conversation."""
    before = chat.render(j, add_generation_prompt=True)
    after = chat.turn(whole if j == count - 1 else chat.render(j + 1))
    if whole.startswith(before) and after.startswith(before):
        if whole.startswith(after):
            return len(before), len(after)
        # What a template ends a conversation with may be missing where a turn follows.
        ends, offsets = chat.encode_with_offsets(after)
        shared = _common(ends, tokens)
        if shared and chat.is_bare(ends[shared:]):
            return len(before), len(chat.turn(after[: offsets[shared - 1][1]]))
    raise ValueError(
        f"the chat template renders what comes before the end of message {j + 1} "
        "otherwise when it is rendered alone: where its tokens are cannot be told. "
        "Records of one answer each, the last message, may do"
    )


def _common(one: list[int], other: list[int]) -> int:
    """Returns the number of tokens with which both begin."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
