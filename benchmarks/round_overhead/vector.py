"""A stage that is nothing but a vector: what a round asks of it, without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.gradient.config import compressor_config
from swarm.gradient.outer_config import Overlap
from swarm.gradient.registry import build_compressor
from swarm.model.trainable import TrainableSet
from swarm.sketch import sketch

SEED, LEARNING_RATE = 7, 0.1


class VectorCompute:
    """The weights of a stage as one vector, whose gradient never changes: what a round asks of a stage's compute."""

    outer = None
    overlap = Overlap(0, 10**9)

    def __init__(self, averaging: str, elements: int, position: int) -> None:
        self.trainable = TrainableSet.of({"vector": torch.empty(elements, device="meta")})
        self.compressor = build_compressor(compressor_config(averaging), self.trainable, SEED)
        self.weights = torch.ones(elements)
        self.gradient = torch.randn(elements, generator=torch.Generator().manual_seed(position))

    def contribution(self, loss_tokens: int) -> Tensor:
        """See StageCompute."""
        return self.gradient.clone()

    def clear(self) -> None:
        """Nothing is accumulated."""

    def apply(self, average: Tensor, step: int, correct: object = None) -> float:
        """A plain step."""
        self.weights.add_(average, alpha=-LEARNING_RATE)
        return float(average.norm())

    def sketch(self) -> bytes:
        """See StageCompute."""
        return sketch(self.weights, SEED)

    def read_slice(self, offset: int, count: int) -> Tensor:
        """See StageCompute."""
        return self.weights[offset : offset + count].clone()

    def write_slice(self, offset: int, values: Tensor) -> None:
        """See StageCompute."""
        self.weights[offset : offset + values.numel()] = values


class Unwritten:
    """Keeps no updates: the disk is not what is measured."""

    def record(self, update: object) -> None:
        """See UpdateLog."""
