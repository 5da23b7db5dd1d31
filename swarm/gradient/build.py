"""From a run's manifest to its compressor."""

from __future__ import annotations

from swarm.gradient.chunk import FloatChunk
from swarm.gradient.compressor import Compressor
from swarm.gradient.dense import DenseCompressor
from swarm.gradient.values import AveragingConfig
from swarm.model.trainable import TrainableSet


def build_averaging(config: AveragingConfig, trainable: TrainableSet, run_seed: int) -> Compressor:
    """The compressor of a stage with these tensors."""
    return DenseCompressor(trainable.numel, FloatChunk(config.values))
