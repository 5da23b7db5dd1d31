"""The gradient itself, coded by a chunk codec, with error feedback if wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.gradient.chunk import ChunkCodec
from swarm.gradient.compressor import Averaged, Phase
from swarm.gradient.state import (
    CompressorState,
    SinglePhase,
    StatefulCompressor,
    contribution,
    is_finite,
    left_over,
    mean_of,
    only_average,
)


class PlainCompressor(StatefulCompressor):
    """a = g + e / w;  g_hat = butterfly(a);  e = w (a - counted + owed)  (error feedback, arXiv 1901.09847, over both
    codings), with w tokens in g.

    Dense averages (fp32, fp16, bf16, INT8, FP8), EF-signSGD and top-k with error feedback are this with their codec.
    Local state: e, fp32 [numel], if there is error feedback; no common state. Without it e stays zero.
    """

    def __init__(self, numel: int, codec: ChunkCodec, error_feedback: bool) -> None:
        self._numel = numel
        self._phases = (Phase(numel, codec, needs_residual=error_feedback),)
        self._feedback = error_feedback
        self._state = CompressorState({}, {"error": numel} if error_feedback else {})

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor."""
        return self._phases

    def begin(self, gradient: Tensor, step: int, weight: int) -> SinglePhase:
        """See Compressor."""
        total = vector = contribution(gradient, self._numel, weight)
        if self._feedback:
            total = vector.mul_(weight).add_(self._state.local("error"))
            vector = mean_of(total, weight)
        version = self._state.version

        def settle(averaged: Averaged, result: Tensor) -> None:
            local = {"error": left_over(total, vector, averaged, weight)} if self._feedback else {}
            self._state.move(version, local=local)

        return SinglePhase(vector, torch.clone, settle)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        average = only_average(averages, self._phases)
        if is_finite(average):
            self._state.move(self._state.version)
        return average.clone()
