"""Deep Gradient Compression: top-k with momentum correction (arXiv 1712.01887)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
from swarm.gradient.topk import TopKCodec

_WARMUP_BASE = 4


def warmup_ratios(ratio: float) -> tuple[float, ...]:
    """Shares that are sent before `ratio` is: 1/4, 1/16, ... as long as they are larger (the paper's sparsities of 75,
    93.75, 98.4, 99.6 %). Powers of two, so that all machines agree on them.
    """
    found: list[float] = []
    while (share := 1.0 / _WARMUP_BASE ** (len(found) + 1)) > ratio:
        found.append(share)
    return tuple(found)


class DGCCompressor(StatefulCompressor):
    """g is clipped to the norm `local_clip`, if there is one; u = mu u + w g;  v = v + u  (momentum correction, in
    sums over the w tokens of g);  g_hat = butterfly(v / w) with top-k;  u = 0 where sent (momentum factor masking);
    v = w (v / w - counted + owed), which is zero where it was sent but for rounding.

    What was sent but not chosen again out of the mean comes back in the reducer's v. The average already holds the
    momentum: apply it by SGD without any.

    Local state: u and v, fp32 [numel] each; no common state. warmup_steps: steps over which the share that is sent
    falls to `ratio`, spread evenly over `warmup_ratios`. Raises ValueError for a ratio outside (0, 1].
    """

    def __init__(
        self, numel: int, *, ratio: float, momentum: float, local_clip: float | None, warmup_steps: int
    ) -> None:
        self._numel = numel
        self._momentum = momentum
        self._clip = local_clip
        self._warmup_steps = warmup_steps
        shares = (*warmup_ratios(ratio), ratio)
        self._choices = tuple((Phase(numel, TopKCodec(share)),) for share in shares)
        self._state = CompressorState({}, {"momentum": numel, "accumulated": numel})

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor."""
        if step >= self._warmup_steps:
            return self._choices[-1]
        return self._choices[step * (len(self._choices) - 1) // self._warmup_steps]

    def begin(self, gradient: Tensor, step: int, weight: int) -> SinglePhase:
        """See Compressor."""
        momentum = contribution(gradient, self._numel, weight)
        if self._clip is not None:
            norm = float(torch.linalg.vector_norm(momentum))
            if norm > self._clip:
                momentum *= self._clip / norm
        momentum *= weight
        momentum += self._state.local("momentum") * self._momentum
        total = self._state.local("accumulated") + momentum
        vector = mean_of(total, weight)
        version = self._state.version

        def settle(averaged: Averaged, result: Tensor) -> None:
            local = {
                "momentum": torch.where(averaged.counted != 0, 0.0, momentum),
                "accumulated": left_over(total, vector, averaged, weight),
            }
            self._state.move(version, local=local)

        return SinglePhase(vector, torch.clone, settle)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        average = only_average(averages, self.phases(step))
        if is_finite(average):
            self._state.move(self._state.version)
        return average.clone()
