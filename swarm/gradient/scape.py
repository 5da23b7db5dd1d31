"""SCAPE: a sparse average whose coordinates the first moment chooses a step ahead (arXiv 2607.01678).

The paper's ranks hold a shard of the moment each and gather the mask. Here every member keeps the moment of the
averages themselves, which are the same bits everywhere, by elementwise fp32 operations, which are the same too: the
mask needs no traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.gradient.chunk import ChunkCodec
from swarm.gradient.compressor import Averaged, Phase
from swarm.gradient.select import kept, largest, strata
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

_SMALLEST = 1e-30
"""Moments below it become zero, before they reach fp32's subnormals, which some machines flush."""


class ScapeCompressor(StatefulCompressor):
    """a = g + e / w;  g_hat[S_t] = butterfly(a[S_t]), zero elsewhere;  e = w a, with
    e[S_t] = w (a[S_t] - counted + owed), with w tokens in g;
    m_t = beta m_{t-1} + (1 - beta) g_hat;  S_{t+1} = coordinates of largest |m_t| (ties to the lowest index).

    The paper's text at hand leaves open what becomes of the rest; our choices. The first `dense_steps` steps average
    everything: a moment made of few coordinates would choose these again. A share `exploration` of the k
    coordinates is drawn at random each step (one per stratum, from run seed and step), the largest moments fill the
    rest: what was left out is seen again, and m of what is no longer chosen decays. If m is zero all k are drawn. With
    error feedback e is kept; without it what is not in S_t is lost.

    Common state: m, fp32 [numel] ("moment"). Local state: e, fp32 [numel], if there is error feedback.
    """

    def __init__(
        self,
        numel: int,
        codec: ChunkCodec,
        *,
        ratio: float,
        beta: float,
        exploration: float,
        dense_steps: int,
        error_feedback: bool,
        seed: int,
    ) -> None:
        self._numel = numel
        self._count = kept(numel, ratio)
        self._explored = int(exploration * self._count)
        self._sparse = (Phase(self._count, codec, needs_residual=error_feedback),)
        self._dense = (Phase(numel, codec, needs_residual=error_feedback),)
        self._dense_steps = dense_steps
        self._beta = beta
        self._feedback = error_feedback
        self._seed = seed
        self._state = CompressorState({"moment": numel}, {"error": numel} if error_feedback else {})
        self._found: tuple[int, int, Tensor] | None = None

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor."""
        return self._dense if step < self._dense_steps else self._sparse

    def begin(self, gradient: Tensor, step: int, weight: int) -> SinglePhase:
        """See Compressor."""
        whole = contribution(gradient, self._numel, weight)
        if self._feedback:
            whole.mul_(weight).add_(self._state.local("error"))
        support = self.support(step)
        total = whole if support is None else whole[support]
        vector = mean_of(total, weight) if self._feedback else total
        version = self._state.version

        def settle(averaged: Averaged, result: Tensor) -> None:
            local = {}
            if self._feedback:
                left = left_over(total, vector, averaged, weight)
                local["error"] = left if support is None else whole.index_copy(0, support, left)
            self._state.move(version, {"moment": self._moved(result)}, local)

        return SinglePhase(vector, lambda average: self._expanded(average, support), settle)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        result = self._expanded(only_average(averages, self.phases(step)), self.support(step))
        if is_finite(result):
            self._state.move(self._state.version, {"moment": self._moved(result)})
        return result

    def support(self, step: int) -> Tensor | None:
        """Coordinates of a step's average: int64 [k], ascending; None for all. Computed once per step and state."""
        if step < self._dense_steps:
            return None
        if self._found is None or self._found[:2] != (self._state.version, step):
            self._found = (self._state.version, step, self._chosen(step))
        return self._found[2]

    def _chosen(self, step: int) -> Tensor:
        moment = self._state.common("moment")
        if moment is None or not bool(moment.any()):
            return strata(self._numel, self._count, "scape", self._seed, step)[0]
        explored = strata(self._numel, self._explored, "scape", self._seed, step)[0]
        magnitudes = moment.abs()
        magnitudes[explored] = -1.0
        top = largest(magnitudes, self._count - self._explored)
        return torch.cat([explored, top]).sort().values

    def _expanded(self, average: Tensor, support: Tensor | None) -> Tensor:
        if support is None:
            return average.clone()
        result = torch.zeros(self._numel)
        result[support] = average
        return result

    def _moved(self, result: Tensor) -> Tensor:
        """The next moment. Products and sum are separate operations: a fused one rounds differently."""
        moved = result * (1.0 - self._beta)
        before = self._state.common("moment")
        if before is not None:
            moved += before * self._beta
        return torch.where(moved.abs() < _SMALLEST, 0.0, moved)
