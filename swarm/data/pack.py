"""One pass from documents to hashed chunks of packed rows.

Documents follow each other without gaps; a row's end cuts a document, whose rest begins the next row as a
document of its own. Nothing is lost: the last row of each part is filled up with tokens that each start a
document and therefore carry no loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from swarm.data.index import (
    STARTS_NAME,
    TOKENS_NAME,
    ChunkInfo,
    DataIndex,
    Part,
    numpy_dtype,
    pack_bits,
    row_bytes,
    token_dtype,
)
from swarm.data.recipe import DataConfig, DataError, SourceCounts, documents, is_heldout
from swarm.data.tokens import Tokenizer, encode_documents

CHUNK_BYTES = 1 << 20
"""Size of a chunk: small enough to fetch from several peers at once, large enough to keep the index short."""


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far packing has come: documents, bytes of text and tokens so far, both parts together."""

    documents: int
    text_bytes: int
    tokens: int


class PartWriter:
    """Fills rows of one part and writes every full chunk; holds one chunk in memory."""

    def __init__(
        self,
        directory: Path,
        part: Part,
        *,
        sequence_length: int,
        vocabulary_size: int,
        fill_id: int,
        chunk_bytes: int,
    ) -> None:
        dtype = token_dtype(vocabulary_size)
        rows = max(1, chunk_bytes // row_bytes(sequence_length, dtype))
        self._directory = directory
        self._part: Part = part
        self._sequence_length = sequence_length
        self._vocabulary_size = vocabulary_size
        self._fill_id = fill_id
        # One flat buffer of `rows` rows, so that documents run across rows without special cases.
        self._tokens = np.zeros(rows * sequence_length, dtype=numpy_dtype(dtype))
        self._starts = np.zeros(rows * sequence_length, dtype=np.bool_)
        self._used = 0
        self.chunks: list[ChunkInfo] = []
        self.tokens = 0

    def add(self, ids: npt.NDArray[np.int64], *, starts_document: bool) -> None:
        """Append token ids (int64 [n]); the first is a document start if `starts_document`.

        Raises DataError when an id lies outside the vocabulary.
        """
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary_size:
            raise DataError(
                f"the tokenizer gave ids from {ids.min()} to {ids.max()}, outside its vocabulary of "
                f"{self._vocabulary_size}; use the tokenizer that belongs to the model"
            )
        if ids.size and starts_document:
            self._starts[self._used] = True
        self.tokens += int(ids.size)
        while ids.size:
            taken = ids[: self._tokens.size - self._used]
            self._tokens[self._used : self._used + taken.size] = taken
            self._used += taken.size
            ids = ids[taken.size :]
            if self._used == self._tokens.size:
                self._write()

    def finish(self) -> tuple[ChunkInfo, ...]:
        """Fill the row begun, write what is left, and return all chunks."""
        filled = -(-self._used // self._sequence_length) * self._sequence_length
        self._tokens[self._used : filled] = self._fill_id
        self._starts[self._used : filled] = True
        self._used = filled
        if self._used:
            self._write()
        return tuple(self.chunks)

    def _write(self) -> None:
        """Write the rows in the buffer as the next chunk."""
        tokens = self._tokens[: self._used].reshape(-1, self._sequence_length)
        starts = self._starts[: self._used].reshape(-1, self._sequence_length).copy()
        starts[:, 0] = True
        data = save({TOKENS_NAME: tokens, STARTS_NAME: pack_bits(starts)})
        name = f"{self._part}-{len(self.chunks):05d}.safetensors"
        (self._directory / name).write_bytes(data)
        self.chunks.append(
            ChunkInfo(
                name=name, sha256=hashlib.sha256(data).hexdigest(), nbytes=len(data), samples=tokens.shape[0]
            )
        )
        self._starts[:] = False
        self._used = 0


def pack(
    config: DataConfig,
    tokenizer: Tokenizer,
    directory: Path,
    progress: Callable[[PackProgress], None] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> DataIndex:
    """Tokenise the configured documents and write them to `directory` as chunks of packed rows.

    Each document gets the tokenizer's own prefix and suffix and ends in one EOS if the tokenizer has one.
    Held-out documents go to their own chunks. `progress` is called after every few documents. Memory is
    bounded by the longest document and two chunks of about `chunk_bytes`.

    Raises DataError when the source is missing, malformed or too small to train on (or to hold out
    `heldout_percent`), or when `directory` already holds packed data; OSError when it
    cannot be written. After an error no chunk is left there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for part in ("train", "heldout"):
        if existing := next(directory.glob(f"{part}-*.safetensors"), None):
            raise DataError(f"{existing} exists already; choose an empty directory or delete its chunks")
    vocabulary_size = len(tokenizer)
    fill_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    train, heldout = (
        PartWriter(
            directory,
            part,
            sequence_length=config.sequence_length,
            vocabulary_size=vocabulary_size,
            fill_id=fill_id,
            chunk_bytes=chunk_bytes,
        )
        for part in ("train", "heldout")
    )
    try:
        return _pack_into(config, tokenizer, train, heldout, progress, vocabulary_size)
    except BaseException:
        for part in ("train", "heldout"):  # there were none before
            for path in directory.glob(f"{part}-*.safetensors"):
                path.unlink(missing_ok=True)
        raise


def _pack_into(
    config: DataConfig,
    tokenizer: Tokenizer,
    train: PartWriter,
    heldout: PartWriter,
    progress: Callable[[PackProgress], None] | None,
    vocabulary_size: int,
) -> DataIndex:
    """Send every document to its writer and describe what was written."""
    counts = SourceCounts()
    done = {True: 0, False: 0}  # documents by "is held out"
    text_bytes = 0
    for piece in encode_documents(tokenizer, documents(config, counts)):
        to_heldout = is_heldout(done[True] + done[False], config.heldout_percent)
        writer = heldout if to_heldout else train
        writer.add(piece.ids, starts_document=piece.is_first)
        text_bytes += piece.text_bytes
        if not piece.is_last:
            continue
        done[to_heldout] += 1
        tokens = train.tokens + heldout.tokens
        if progress is not None:
            progress(PackProgress(done[True] + done[False], text_bytes, tokens))
        if config.max_tokens is not None and tokens >= config.max_tokens:
            break
    if not train.tokens or (config.heldout_percent and not heldout.tokens):
        raise DataError(
            f"source {config.source!r} gave {done[True] + done[False]} document(s), too few to hold out "
            f"{config.heldout_percent}% of them and train on the rest; give more documents, a larger bound, "
            "or set heldout_percent to 0"
        )
    train_chunks, heldout_chunks = train.finish(), heldout.finish()
    return DataIndex(
        sequence_length=config.sequence_length,
        vocabulary_size=vocabulary_size,
        token_dtype=token_dtype(vocabulary_size),
        train=train_chunks,
        heldout=heldout_chunks,
        train_samples=sum(chunk.samples for chunk in train_chunks),
        heldout_samples=sum(chunk.samples for chunk in heldout_chunks),
        train_tokens=train.tokens,
        heldout_tokens=heldout.tokens,
        train_documents=done[False],
        heldout_documents=done[True],
        skipped_files=counts.undecodable_files,
        empty_documents=counts.empty_documents,
    )
