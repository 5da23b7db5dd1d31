"""What codes one chunk of a vector that is averaged."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from swarm.gradient.values import ValueFormat, decode_values, encode_values, encoded_bytes


class ChunkCodec(Protocol):
    """Codes a chunk into a number of bytes that follows from its size. The same bytes decode to the same bits at every
    member, whatever its device.
    """

    @property
    def name(self) -> str:
        """As manifest, update files and metrics call it."""

    def nbytes(self, elements: int) -> int:
        """Bytes of a coded chunk of so many elements."""

    def encode(self, chunk: Tensor, seed: int) -> Tensor:
        """fp32 [n] on the CPU, any strides -> uint8 [nbytes(n)]. seed: of stochastic rounding; a codec without any
        ignores it. A chunk with a value that is not finite decodes to one with such a value, or raises ValueError
        in `decode`: it never becomes finite.
        """

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """uint8 -> fp32 [elements], new memory. Raises ValueError, never anything else, for bytes that no chunk has."""


class FloatChunk:
    """Every value as a float of its own: fp32, or fp16 with a power-of-two scale per chunk."""

    def __init__(self, values: ValueFormat) -> None:
        self.name: str = values
        self._values = values

    def nbytes(self, elements: int) -> int:
        """See ChunkCodec."""
        return encoded_bytes(self._values, elements)

    def encode(self, chunk: Tensor, seed: int) -> Tensor:
        """See ChunkCodec."""
        return encode_values(chunk, self._values)

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """See ChunkCodec."""
        return decode_values(encoded, self._values, elements)
