"""What a run fixes about its gradient compressor, and which combinations make sense."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FloatCodecConfig(_Config):
    """Every value as a float."""

    name: Literal["fp32", "fp16", "bf16"]


class BlockCodecConfig(_Config):
    """Values as short codes under a scale per block."""

    name: Literal["int8", "fp8", "e3m0", "sign"]
    block: int | None = Field(
        default=None, ge=16, le=65_536, description="elements per scale: 256 if not given, 1024 for sign"
    )


class TopKCodecConfig(_Config):
    """The largest values only."""

    name: Literal["topk"] = "topk"
    ratio: float = Field(default=0.005, gt=0, le=1, description="share of the elements that is sent")


CodecConfig = Annotated[FloatCodecConfig | BlockCodecConfig | TopKCodecConfig, Field(discriminator="name")]
"""How chunks are coded."""

CODECS: TypeAdapter[CodecConfig] = TypeAdapter(CodecConfig)
