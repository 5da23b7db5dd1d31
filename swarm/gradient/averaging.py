"""What a run fixes about its rounds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from swarm.gradient.compressor import Compressor
from swarm.gradient.config import CompressorConfig, compressor_config
from swarm.gradient.fragments import FragmentCompressor
from swarm.gradient.gossip import Gossip, OuterStepCompressor
from swarm.gradient.outer import LocalSteps
from swarm.gradient.outer_config import EveryStepConfig, GossipConfig, LocalStepsConfig, OuterConfig
from swarm.gradient.registry import build_compressor
from swarm.gradient.robust import RobustConfig
from swarm.model.trainable import TrainableSet


class AveragingConfig(BaseModel):
    """What the replicas of a stage average at the end of a step, and which members' parts count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compressor: CompressorConfig = Field(default=compressor_config("fp16"), description="what is averaged")
    outer: OuterConfig = Field(default=EveryStepConfig(), description="when, and what becomes of the average")
    robust: RobustConfig = Field(default=RobustConfig(), description="which members' parts count")

    @model_validator(mode="after")
    def _outer_suits_the_compressor(self) -> AveragingConfig:
        name, loop = self.compressor.name, self.outer.name
        if isinstance(self.outer, EveryStepConfig):
            return self
        if name in ("dgc", "scape"):
            raise ValueError(
                f"{name} accumulates gradients, and {loop} averages how far replicas have come: choose topk, or "
                "average every step"
            )
        if loop == "sparta" and name == "powersgd":
            raise ValueError(
                "powersgd factors matrices, and sparta's slices are none: choose int8, or diloco"
            )
        if loop == "gasloc" and name == "powersgd":
            raise ValueError(
                "powersgd's factors follow from averages that all replicas have, and gasloc's pairs have each their "
                "own: choose int8 or topk"
            )
        return self


def build_averaging(
    config: AveragingConfig, trainable: TrainableSet, total_steps: int, run_seed: int
) -> Compressor:
    """What a stage's replicas average: the compressor, of each fragment where there is an outer loop."""
    if isinstance(config.outer, LocalStepsConfig):
        return FragmentCompressor(config.compressor, config.outer, trainable, total_steps, run_seed)
    compressor = build_compressor(config.compressor, trainable, run_seed)
    if isinstance(config.outer, GossipConfig):
        return OuterStepCompressor(compressor, config.outer, total_steps)
    return compressor


def build_outer(
    config: AveragingConfig, trainable: TrainableSet, total_steps: int, weights: Tensor, run_seed: int
) -> LocalSteps | Gossip | None:
    """The outer loop of a stage that begins from these weights (fp32 [numel]); None if every step averages."""
    if isinstance(config.outer, LocalStepsConfig):
        return LocalSteps(config.outer, trainable, total_steps, weights, run_seed)
    if isinstance(config.outer, GossipConfig):
        return Gossip(config.outer, total_steps, weights)
    return None
