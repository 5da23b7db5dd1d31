"""A chunk as bf16."""

from __future__ import annotations

import torch
from torch import Tensor


class BFloat16Chunk:
    """Every value rounded to the nearest bf16 (ties to even): the range of fp32, eight significant bits."""

    name = "bf16"

    def nbytes(self, elements: int) -> int:
        """See ChunkCodec."""
        return 2 * elements

    def encode(self, chunk: Tensor, seed: int) -> Tensor:
        """See ChunkCodec."""
        return chunk.contiguous().to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """See ChunkCodec."""
        if encoded.dtype != torch.uint8 or encoded.numel() != self.nbytes(elements):
            raise ValueError(f"{encoded.numel()} bytes where {self.nbytes(elements)} were expected")
        return encoded.clone().view(torch.bfloat16).float()
