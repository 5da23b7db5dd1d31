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

from swarm.gradient.blockwise import LARGEST, Array
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
        values, magnitudes = chunk.numpy(), chunk.abs()
        encoded = np.zeros(self.nbytes(values.size), dtype=np.uint8)
        position = 0
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            end = position + self._block_bytes(block.size)
            self._encode_block(block, magnitudes[start : start + BLOCK], encoded[position:end])
            position = end
        return torch.from_numpy(encoded)

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """See ChunkCodec."""
        if encoded.dtype != torch.uint8 or encoded.numel() != self.nbytes(elements):
            raise ValueError(f"{encoded.numel()} bytes where {self.nbytes(elements)} were expected")
        decoded, data = np.zeros(elements, dtype=np.float32), encoded.numpy()
        position = 0
        for start in range(0, elements, BLOCK):
            block = decoded[start : start + BLOCK]
            end = position + self._block_bytes(block.size)
            self._decode_block(data[position:end], block)
            position = end
        return torch.from_numpy(decoded)

    def _block_bytes(self, size: int) -> int:
        return _HEADER_BYTES + _ENTRY_BYTES * kept(size, self.ratio)

    def _encode_block(self, block: Array, magnitudes: Tensor, encoded: Array) -> None:
        """Write a block fp32 [n] of these magnitudes to zeroed bytes."""
        peak = float(magnitudes.max())
        # NaN compares false with everything.
        if not peak <= LARGEST:
            encoded[:_HEADER_BYTES] = np.array([_UNSOUND], dtype="<i2").view(np.uint8)
            return
        count = kept(block.size, self.ratio)
        exponent = max(_LEAST_EXPONENT, math.frexp(peak)[1] - _TARGET_EXPONENT)
        indices = largest(magnitudes, count).numpy()
        values = block[indices] * np.float32(2.0**-exponent)
        encoded[:_HEADER_BYTES] = np.array([exponent], dtype="<i2").view(np.uint8)
        middle = _HEADER_BYTES + 2 * count
        encoded[_HEADER_BYTES:middle] = indices.astype("<u2").view(np.uint8)
        encoded[middle:] = values.astype("<f2").view(np.uint8)

    def _decode_block(self, encoded: Array, block: Array) -> None:
        """Write a block's entries to zeros fp32 [n]. Raises ValueError for what no block has."""
        exponent = int(encoded[:_HEADER_BYTES].copy().view("<i2")[0])
        if not _LEAST_EXPONENT <= exponent <= _MOST_EXPONENT:
            raise ValueError(f"scale exponent {exponent} of a top-k block")
        indices, halves = np.split(encoded[_HEADER_BYTES:].copy().view("<u2"), 2)
        if indices[-1] >= block.size or (indices[1:] <= indices[:-1]).any():
            raise ValueError(f"indices of a top-k block must ascend and stay below {block.size}")
        values = halves.view("<f2").astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError("a value of a top-k block is not finite")
        block[indices] = values * np.float32(2.0**exponent)
