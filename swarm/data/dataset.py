"""Packed rows as batches, from chunks that may still be on their way."""

from __future__ import annotations

import bisect
import hashlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load
from torch import Tensor

from swarm.batch import Batch, default_loss_positions
from swarm.data.config import DataError
from swarm.data.index import STARTS_NAME, TOKENS_NAME, ChunkInfo, DataIndex, Part, numpy_dtype, unpack_bits

_CACHED_CHUNKS = 32  # as stored: about 32 MiB

_StoredRows = tuple[npt.NDArray[np.uint16] | npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""A chunk's token ids [rows, T] and document starts as bits [rows, ceil(T / 8)]."""


class ChunkMissing(LookupError):  # noqa: N818 - named after the state: fetch the chunks and ask again
    """Chunks that a batch needs are not on this disk, or are damaged there. `names` lists them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"chunks not on this disk (fetch them first): {', '.join(names)}")
        self.names = tuple(names)


class PackedDataset:
    """One part of a run's packed data, read from `directory`.

    Chunks are verified against the index when they arrive and when they are loaded; up to 32 loaded ones
    are kept. `batch` is for one thread; the rest may be called from another.
    """

    def __init__(self, directory: Path, index: DataIndex, part: Part = "train") -> None:
        self.index = index
        self.part: Part = part
        self._directory = directory
        self._chunks = index.chunks(part)
        self._by_name = {chunk.name: chunk for chunk in self._chunks}
        self._first_samples: list[int] = []  # of each chunk
        total = 0
        for chunk in self._chunks:
            self._first_samples.append(total)
            total += chunk.samples
        self._samples = total
        self._damaged: set[str] = set()
        self._loaded: OrderedDict[str, _StoredRows] = OrderedDict()  # the oldest use first

    def __len__(self) -> int:
        """Rows of this part."""
        return self._samples

    def chunks_for(self, sample_ids: Sequence[int]) -> list[ChunkInfo]:
        """The chunks that hold these samples, in chunk order, each once.

        Raises IndexError on an unknown sample.
        """
        return [self._chunks[number] for number in sorted({self._locate(sample)[0] for sample in sample_ids})]

    def has(self, name: str) -> bool:
        """Whether this disk holds a chunk of that name and size that was not found damaged."""
        path = self._directory / self._info(name).name
        return name not in self._damaged and path.is_file() and path.stat().st_size == self._info(name).nbytes

    def missing(self, sample_ids: Sequence[int]) -> list[ChunkInfo]:
        """The chunks to fetch before `batch(sample_ids)` can succeed."""
        return [chunk for chunk in self.chunks_for(sample_ids) if not self.has(chunk.name)]

    def add_chunk(self, name: str, data: bytes | memoryview) -> None:
        """Store a fetched chunk, atomically.

        Raises DataError if the index has no such chunk or `data` differs from what it says.
        """
        chunk = self._info(name)
        if problem := _difference(chunk, data):
            raise DataError(f"chunk {name}: {problem}; fetch it from another peer")
        self._directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=self._directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).replace(self._directory / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._damaged.discard(name)

    def chunk_bytes(self, name: str) -> bytes:
        """A verified chunk as it is stored, to serve to another peer.

        Raises ChunkMissing if it is not here or damaged, DataError if the index has no such chunk.
        """
        chunk = self._info(name)
        if not self.has(name):
            raise ChunkMissing([name])
        data = (self._directory / name).read_bytes()
        if _difference(chunk, data):
            self._damaged.add(name)  # `missing` lists it from now on; add_chunk replaces it
            raise ChunkMissing([name])
        return data

    def batch(self, sample_ids: Sequence[int]) -> Batch:
        """The rows of these samples, in this order (repeats allowed); a loss wherever the document goes on.

        Raises ChunkMissing naming every chunk to fetch, IndexError on an unknown sample, ValueError on none,
        DataError when a chunk with the right hash does not have the form that the index states.
        """
        if not sample_ids:
            raise ValueError("a batch needs at least one sample")
        if missing := self.missing(sample_ids):
            raise ChunkMissing([chunk.name for chunk in missing])
        shape = (len(sample_ids), self.index.sequence_length)
        tokens = np.empty(shape, dtype=np.int64)
        starts = np.empty(shape, dtype=np.bool_)
        places = [self._locate(sample) for sample in sample_ids]
        for number in sorted({number for number, _ in places}):  # chunk by chunk: each is loaded once
            chunk_tokens, chunk_bits = self._load(self._chunks[number])
            for output, (place, row) in enumerate(places):
                if place == number:
                    tokens[output] = chunk_tokens[row]
                    starts[output] = unpack_bits(chunk_bits[row : row + 1], shape[1])[0]
        document_starts = torch.from_numpy(starts)
        return Batch(
            token_ids=torch.from_numpy(tokens),
            document_starts=document_starts,
            loss_positions=default_loss_positions(document_starts),
            sample_ids=torch.tensor(list(sample_ids), dtype=torch.int64),
        )

    def token_counts(self) -> Tensor:
        """How often each token id occurs, filling included: int64 [vocabulary]. Raises ChunkMissing, DataError."""
        counts = np.zeros(self.index.vocabulary_size, dtype=np.int64)
        for chunk in self._chunks:
            ids, _ = _decode(chunk, self.chunk_bytes(chunk.name), self.index)
            counts += np.bincount(ids.reshape(-1), minlength=counts.size)
        return torch.from_numpy(counts)

    def _info(self, name: str) -> ChunkInfo:
        """The index's entry of that name. Raises DataError if there is none."""
        if name not in self._by_name:
            raise DataError(f"the run's {self.part} data has no chunk named {name!r}")
        return self._by_name[name]

    def _locate(self, sample: int) -> tuple[int, int]:
        """(number of the chunk, row in it) of a sample. Raises IndexError if there is no such sample."""
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} is not among the {self._samples} of the {self.part} data")
        number = bisect.bisect_right(self._first_samples, sample) - 1
        return number, sample - self._first_samples[number]

    def _load(self, chunk: ChunkInfo) -> _StoredRows:
        """The chunk's rows, from memory or verified from disk. Raises ChunkMissing if damaged there."""
        if chunk.name in self._loaded:
            self._loaded.move_to_end(chunk.name)
            return self._loaded[chunk.name]
        rows = _decode(chunk, self.chunk_bytes(chunk.name), self.index)
        self._loaded[chunk.name] = rows
        if len(self._loaded) > _CACHED_CHUNKS:
            self._loaded.popitem(last=False)
        return rows


def _difference(chunk: ChunkInfo, data: bytes | memoryview) -> str | None:
    """How `data` differs from what the index says, or None."""
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if size != chunk.nbytes:
        return f"has {size} bytes instead of {chunk.nbytes}"
    if hashlib.sha256(data).hexdigest() != chunk.sha256:
        return f"its SHA-256 is not {chunk.sha256}"
    return None


def _decode(chunk: ChunkInfo, data: bytes, index: DataIndex) -> _StoredRows:
    """A chunk's rows. Raises DataError when they are not what the index promises."""
    T = index.sequence_length
    expected = {
        TOKENS_NAME: (numpy_dtype(index.token_dtype), (chunk.samples, T)),
        STARTS_NAME: (np.dtype(np.uint8), (chunk.samples, -(-T // 8))),
    }
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise DataError(
            f"chunk {chunk.name} is no safetensors file ({error}); pack the data again"
        ) from error
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise DataError(f"chunk {chunk.name} holds {found} instead of {expected}; pack the data again")
    token_ids, start_bits = tensors[TOKENS_NAME], tensors[STARTS_NAME]
    first_starts = start_bits[:, 0] & 1
    if token_ids.min() < 0 or token_ids.max() >= index.vocabulary_size or not first_starts.all():
        raise DataError(
            f"chunk {chunk.name} holds ids outside the vocabulary of {index.vocabulary_size} or a row that "
            "starts no document; pack the data again"
        )
    return token_ids, start_bits
