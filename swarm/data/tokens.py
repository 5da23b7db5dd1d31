"""Documents to token ids: batched for fast tokenizers, with the special tokens the tokenizer demands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swarm.data.config import Document

# Long texts are tokenised in pieces: an encoding takes some hundred bytes a token while it lasts.
_PIECE_CHARACTERS = 1 << 19
_BATCH_CHARACTERS = 1 << 21
_BATCH_TEXTS = 512


class Tokenizer(Protocol):
    """What packing needs of a transformers tokenizer."""

    eos_token_id: int | None
    pad_token_id: int | None

    def __call__(self, text: list[str], **options: Any) -> Any:
        """Encoding of a batch of texts; item "input_ids" is a list of lists of ids."""

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens counted."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Ids put before and after every document."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def _encode(tokenizer: Tokenizer, texts: list[str], *, with_special_tokens: bool) -> list[list[int]]:
    """Ids of each text."""
    encoding = tokenizer(
        texts,
        add_special_tokens=with_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        padding=False,
        truncation=False,
        verbose=False,  # no warning about texts longer than the model's context: rows are cut here
    )
    ids: list[list[int]] = encoding["input_ids"]
    return ids


def document_frame(tokenizer: Tokenizer) -> Frame:
    """The tokenizer's own template, found by encoding a probe with and without it, and one EOS at the end."""
    [bare] = _encode(tokenizer, ["a"], with_special_tokens=False)
    [framed] = _encode(tokenizer, ["a"], with_special_tokens=True)
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            prefix, suffix = tuple(framed[:start]), tuple(framed[start + len(bare) :])
            break
    eos = tokenizer.eos_token_id
    if eos is not None and (not suffix or suffix[-1] != eos):
        suffix = (*suffix, eos)
    return Frame(prefix, suffix)


def pieces(text: str, limit: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """The text in consecutive pieces of at most `limit` characters, cut after a line's end if it can."""
    start = 0
    while len(text) - start > limit:
        newline = text.rfind("\n", start, start + limit)
        end = start + limit if newline < 0 else newline + 1
        yield text[start:end]
        start = end
    yield text[start:]


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """Token ids (int64 [n]) of a document or of a piece of one, with the frame's ids at its ends.

    `text_bytes` is the size of the text in UTF-8; `is_first` and `is_last` say whether the document begins
    and ends here.
    """

    ids: npt.NDArray[np.int64]
    text_bytes: int
    is_first: bool
    is_last: bool


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[EncodedPiece]:
    """Every document's pieces in order, tokenised in batches of about 2 MiB of text.

    A text over half a million characters is tokenised in pieces cut at line ends, so memory stays bounded.
    Special tokens spelled out in a text (chat templates) become those tokens, as is the tokenizer's default.
    """
    frame = document_frame(tokenizer)
    for batch in _batches(documents):
        encoded = _encode(tokenizer, [text for text, _, _ in batch], with_special_tokens=False)
        for (text, is_first, is_last), ids in zip(batch, encoded, strict=True):
            whole = [*(frame.prefix if is_first else ()), *ids, *(frame.suffix if is_last else ())]
            yield EncodedPiece(np.asarray(whole, dtype=np.int64), len(text.encode()), is_first, is_last)


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[str, bool, bool]]]:
    """(text, is first piece, is last piece) of all documents, in lists for one call of the tokenizer each."""
    batch: list[tuple[str, bool, bool]] = []
    characters = 0
    for document in documents:
        texts = list(pieces(document.text))
        for number, text in enumerate(texts):
            batch.append((text, number == 0, number == len(texts) - 1))
            characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
