"""Rows of tokens of one fixed length, and the checks of what they are made by."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from jaxdp.core import validate
from jaxdp.models.language._tokenizers import Tokenizer

Batch = dict[str, np.ndarray]
Side = Literal["left", "right"]


def check(
    tokenizer: Tokenizer,
    max_length: int,
    truncate: Side,
    span_length: int | None = None,
) -> None:
    """Requires a length that the model reads, and a side; for a span also a decoder."""
    limit = tokenizer.config.max_length
    validate.integer(at_least=2, at_most=limit, max_length=max_length)
    validate.one_of(("left", "right"), truncate=truncate)
    if span_length is None:
        return
    validate.integer(span_length=span_length)
    if not tokenizer.is_decoder:
        raise ValueError(
            "tokenizer must be a decoder's, for what follows a text has no likelihood in "
            f"an encoder, got {tokenizer.config.model_type!r}"
        )


def empty(
    shape: tuple[int, ...], max_length: int, tokenizer: Tokenizer, span: bool = False
) -> Batch:
    """Returns rows of padding."""
    shape = (*shape, max_length)
    tokens = np.full(shape, tokenizer.config.padding, np.int32)
    batch = {"tokens": tokens, "mask": np.zeros(shape, bool)}
    return batch | ({"span": np.zeros(shape, bool)} if span else {})


@contextlib.contextmanager
def empty_if_private(private: bool) -> Iterator[None]:
    """Leaves the row of a refused private record empty, in place of the error.

    Nothing of it counts, and it does not decide whether a run begins.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException:
        # Packages raise what they like: panics of Rust are no Exception.
        if not private:
            raise


def put(batch: Batch, index: Any, tokens: list[int], span: int | None = None) -> None:
    """Writes one row; ``span`` is where the tokens that count begin."""
    batch["tokens"][index][: len(tokens)] = tokens
    batch["mask"][index][: len(tokens)] = True
    if span is not None:
        batch["span"][index][span : len(tokens)] = True
