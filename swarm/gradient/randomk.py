"""Random coordinates that all members draw from a shared seed: values travel, indices do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.gradient.chunk import ChunkCodec
from swarm.gradient.compressor import Averaged, Phase
from swarm.gradient.select import kept, strata
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


class RandomKCompressor(StatefulCompressor):
    """a = g + e / w;  S(step) = k random coordinates;  g_hat[S] = butterfly(a[S]), zero elsewhere;  e = w a, with
    e[S] = w (a[S] - counted + owed)  (random-k with memory, arXiv 1809.07599), with w tokens in g.

    S has one coordinate out of each of k = max(1, round(ratio * numel)) even strata: each is as likely as any other,
    and drawing takes O(k). Without error feedback g_hat[S] is multiplied by the size of its stratum (numel / k), which
    makes it unbiased; with it what is left out is kept, and nothing is scaled.

    Local state: e, fp32 [numel], if there is error feedback; no common state.
    """

    def __init__(
        self, numel: int, codec: ChunkCodec, *, ratio: float, error_feedback: bool, seed: int
    ) -> None:
        self._numel = numel
        self._count = kept(numel, ratio)
        self._phases = (Phase(self._count, codec, needs_residual=error_feedback),)
        self._feedback = error_feedback
        self._seed = seed
        self._state = CompressorState({}, {"error": numel} if error_feedback else {})

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor."""
        return self._phases

    def begin(self, gradient: Tensor, step: int, weight: int) -> SinglePhase:
        """See Compressor."""
        whole = contribution(gradient, self._numel, weight)
        if self._feedback:
            whole.mul_(weight).add_(self._state.local("error"))
        total = whole[self._drawn(step)[0]]
        vector = mean_of(total, weight) if self._feedback else total
        version = self._state.version

        def settle(averaged: Averaged, result: Tensor) -> None:
            if not self._feedback:
                self._state.move(version)
                return
            left = left_over(total, vector, averaged, weight)
            error = whole.index_copy(0, self._drawn(step)[0], left)
            self._state.move(version, local={"error": error})

        return SinglePhase(vector, lambda average: self._expanded(average, step), settle)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        result = self._expanded(only_average(averages, self._phases), step)
        if is_finite(result):
            self._state.move(self._state.version)
        return result

    def _drawn(self, step: int) -> tuple[Tensor, Tensor]:
        return strata(self._numel, self._count, "random-k", self._seed, step)

    def _expanded(self, average: Tensor, step: int) -> Tensor:
        indices, sizes = self._drawn(step)
        result = torch.zeros(self._numel)
        result[indices] = average if self._feedback else average * sizes.float()
        return result
