"""The largest coordinates of a chunk: top-k per block of 65,536 elements.

Through the butterfly a member sends k entries to the reducers, and the reducers choose k out of the mean again and
send these to all: 2 k b (D - 1) / D bytes per member, with b bytes per entry and D members. Everybody sending its
entries to everybody would take (D - 1) k b: the same for two members, more for three and above. What the second
choice leaves out is in `Averaged.owed` and comes back with the reducer's next contribution.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from swarm.gradient.blockwise import LARGEST
from swarm.gradient.select import kept, largest

BLOCK = 65_536
"""Elements that a 16-bit index reaches."""

_HEADER_BYTES = 2
_ENTRY_BYTES = 4
_TARGET_EXPONENT = 14
_LEAST_EXPONENT, _MOST_EXPONENT = -120, 97
_UNSOUND = 2**15 - 1


class TopKCodec:
    """The k = max(1, round(ratio * block)) entries of largest |x| per block (the last one may be shorter); ties go to
    the lowest index; all others become zero.

    A block on the wire: int16 exponent s, uint16 indices [k], ascending, fp16 values x 2^-s [k], with s such that the
    largest is about 2^14 (see swarm.gradient.values). A block with a value that is not finite, or beyond `LARGEST`,
    has an exponent that `decode` refuses. Biased, so it wants error feedback.

    ratio: in (0, 1]; anything else raises ValueError.
    """

    name = "topk"

    def __init__(self, ratio: float) -> None:
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"top-k keeps a share in (0, 1] of the elements, not {ratio}")
        self.ratio = ratio

    def nbytes(self, elements: int) -> int:
        """See ChunkCodec."""
        whole, rest = divmod(elements, BLOCK)
        return whole * self._block_bytes(BLOCK) + (self._block_bytes(rest) if rest else 0)

    def encode(self, chunk: Tensor, seed: int) -> Tensor:
        """See ChunkCodec."""
        parts = [self._encode_block(part) for part in _blocks(chunk)]
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8))

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """See ChunkCodec."""
        if encoded.dtype != torch.uint8 or encoded.numel() != self.nbytes(elements):
            raise ValueError(f"{encoded.numel()} bytes where {self.nbytes(elements)} were expected")
        decoded = torch.zeros(elements)
        position = 0
        for part in _blocks(decoded):
            end = position + self._block_bytes(part.numel())
            indices, values = self._decode_block(encoded[position:end], part.numel())
            part[indices] = values
            position = end
        return decoded

    def _block_bytes(self, size: int) -> int:
        return _HEADER_BYTES + _ENTRY_BYTES * kept(size, self.ratio)

    def _encode_block(self, block: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        count = kept(block.numel(), self.ratio)
        magnitudes = block.abs()
        peak = float(magnitudes.max())
        # NaN compares false with everything.
        if not peak <= LARGEST:
            encoded = np.zeros(self._block_bytes(block.numel()), dtype=np.uint8)
            encoded[:_HEADER_BYTES] = np.array([_UNSOUND], dtype="<i2").view(np.uint8)
            return encoded
        exponent = max(_LEAST_EXPONENT, math.frexp(peak)[1] - _TARGET_EXPONENT)
        indices = largest(magnitudes, count)
        values = (block[indices] * 2.0**-exponent).to(torch.float16)
        header = np.array([exponent], dtype="<i2").view(np.uint8)
        return np.concatenate(
            [header, indices.numpy().astype("<u2").view(np.uint8), values.numpy().view(np.uint8)]
        )

    def _decode_block(self, encoded: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Indices int64 [k] and values fp32 [k]. Raises ValueError for what no block has."""
        count = kept(size, self.ratio)
        data = encoded.numpy()
        exponent = int(np.frombuffer(data[:_HEADER_BYTES].tobytes(), dtype="<i2")[0])
        if not _LEAST_EXPONENT <= exponent <= _MOST_EXPONENT:
            raise ValueError(f"scale exponent {exponent} of a top-k block")
        entries = data[_HEADER_BYTES:].tobytes()
        indices = np.frombuffer(entries[: 2 * count], dtype="<u2").astype(np.int64)
        if indices[-1] >= size or bool((np.diff(indices) <= 0).any()):
            raise ValueError(f"indices of a top-k block must ascend and stay below {size}")
        values = torch.from_numpy(np.frombuffer(entries[2 * count :], dtype="<f2").copy())
        if not bool(torch.isfinite(values).all()):
            raise ValueError("a value of a top-k block is not finite")
        return torch.from_numpy(indices), values.float().mul_(2.0**exponent)


def _blocks(chunk: Tensor) -> list[Tensor]:
    """Views of a chunk's blocks."""
    return [chunk[start : start + BLOCK] for start in range(0, chunk.numel(), BLOCK)]
