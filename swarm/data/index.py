"""What a run's packed data consists of: the list of its chunks, as the signed manifest carries it."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

Part = Literal["train", "heldout"]
"""The two sides of the split: rows that are trained on, and rows that are only evaluated."""

TOKENS_NAME = "token_ids"
STARTS_NAME = "document_starts"


class ChunkInfo(BaseModel):
    """One file of packed rows: its name (never a path), SHA-256 (hex), size in bytes and number of rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^(train|heldout)-[0-9]{5,9}\.safetensors$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    nbytes: int = Field(ge=1, le=1 << 31)
    samples: int = Field(ge=1)


class DataIndex(BaseModel):
    """Everything a peer needs to know to fetch, verify and read the packed data.

    A chunk is a safetensors file of `token_ids` ([rows, sequence_length], `token_dtype`) and
    `document_starts` (uint8 [rows, ceil(sequence_length / 8)], bits in little order: bit i of byte j is
    position 8 j + i). Sample ids count the rows of a part through its chunks in list order. `*_tokens` leave
    out the filling of the part's last row. `skipped_files` are files that are no UTF-8 text,
    `empty_documents` those without text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence_length: int = Field(ge=2, le=1 << 20)
    vocabulary_size: int = Field(ge=1, lt=1 << 31)
    token_dtype: Literal["uint16", "int32"]
    train: tuple[ChunkInfo, ...] = Field(min_length=1)
    heldout: tuple[ChunkInfo, ...]
    train_samples: int = Field(ge=1)
    heldout_samples: int = Field(ge=0)
    train_tokens: int = Field(ge=1)
    heldout_tokens: int = Field(ge=0)
    train_documents: int = Field(ge=1)
    heldout_documents: int = Field(ge=0)
    skipped_files: int = Field(default=0, ge=0)
    empty_documents: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check_totals(self) -> Self:
        """Names are unique and of their part, and the totals are the sums of the chunks."""
        for part in ("train", "heldout"):
            chunks: tuple[ChunkInfo, ...] = getattr(self, part)
            names = {chunk.name for chunk in chunks}
            if len(names) != len(chunks) or not all(name.startswith(f"{part}-") for name in names):
                raise ValueError(f"{part}: chunk names must be different and begin with '{part}-'")
            samples = sum(chunk.samples for chunk in chunks)
            if samples != getattr(self, f"{part}_samples"):
                raise ValueError(
                    f"{part}_samples is {getattr(self, f'{part}_samples')}, but the chunks hold {samples}"
                )
        return self

    def chunks(self, part: Part) -> tuple[ChunkInfo, ...]:
        """The part's chunks in the order of their samples."""
        return self.train if part == "train" else self.heldout

    def samples(self, part: Part) -> int:
        """The part's rows."""
        return self.train_samples if part == "train" else self.heldout_samples


def token_dtype(vocabulary_size: int) -> Literal["uint16", "int32"]:
    """The smallest dtype that holds every id of the vocabulary."""
    return "uint16" if vocabulary_size <= 1 << 16 else "int32"


def numpy_dtype(name: Literal["uint16", "int32"]) -> np.dtype[np.uint16] | np.dtype[np.int32]:
    """The numpy dtype of that name."""
    return np.dtype(np.uint16) if name == "uint16" else np.dtype(np.int32)


def row_bytes(sequence_length: int, dtype: Literal["uint16", "int32"]) -> int:
    """Bytes of one packed row in a chunk: its token ids and its document starts."""
    return sequence_length * numpy_dtype(dtype).itemsize + -(-sequence_length // 8)


def pack_bits(starts: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """bool [rows, tokens] to uint8 [rows, ceil(tokens / 8)], little bit order."""
    return np.packbits(starts, axis=1, bitorder="little")


def unpack_bits(packed: npt.NDArray[np.uint8], sequence_length: int) -> npt.NDArray[np.bool_]:
    """Inverse of `pack_bits`: uint8 [rows, ceil(tokens / 8)] to bool [rows, tokens]."""
    return np.unpackbits(packed, axis=1, count=sequence_length, bitorder="little").astype(bool)
