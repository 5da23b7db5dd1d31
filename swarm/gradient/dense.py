"""No compression: the gradient itself is averaged, in some number format."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.gradient.chunk import ChunkCodec
from swarm.gradient.compressor import Averaged, Phase


class DenseCompressor:
    """mean_i w_i g_i / sum w_i, coded by `codec` on its way and back; has no state. numel: elements of the gradient."""

    def __init__(self, numel: int, codec: ChunkCodec) -> None:
        self._phase = Phase(numel, codec, needs_residual=False)

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor."""
        return (self._phase,)

    def begin(self, gradient: Tensor, step: int, weight: int) -> DenseCompression:
        """See Compressor."""
        return DenseCompression(gradient)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        sizes = [average.numel() for average in averages]
        if sizes != [self._phase.elements]:
            raise ValueError(f"averages of {sizes} elements where {self._phase.elements} were expected")
        return averages[0]

    def common_state(self) -> Mapping[str, Tensor]:
        """See Compressor. None."""
        return {}

    def load_common_state(self, state: Mapping[str, Tensor]) -> None:
        """See Compressor."""
        if state:
            raise ValueError(f"dense averaging has no state, and no {sorted(state)[:4]}")

    def digest(self) -> str:
        """See Compressor. Constant."""
        return hashlib.sha256(b"").hexdigest()


class DenseCompression:
    """See Compression."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient, self._average = gradient, torch.empty(0)

    def vector(self) -> Tensor:
        """See Compression."""
        return self._gradient

    def take(self, averaged: Averaged) -> None:
        """See Compression."""
        self._average = averaged.average

    def result(self) -> Tensor:
        """See Compression."""
        return self._average

    def commit(self) -> None:
        """See Compression."""
