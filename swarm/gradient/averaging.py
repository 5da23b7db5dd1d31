"""What a run fixes about its rounds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from swarm.gradient.config import CompressorConfig, compressor_config
from swarm.gradient.robust import RobustConfig


class AveragingConfig(BaseModel):
    """What the replicas of a stage average at the end of a step, and which members' parts count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compressor: CompressorConfig = Field(default=compressor_config("fp16"), description="what is averaged")
    robust: RobustConfig = Field(default=RobustConfig(), description="which members' parts count")
