"""What a run fixes about its gradient compressor, and which combinations make sense."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from swarm.gradient.values import ValueFormat
from swarm.optim import OptimizerConfig


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


class PlainConfig(_Config):
    """The gradient itself, chunk by chunk."""

    name: Literal["plain"] = "plain"
    codec: CodecConfig = FloatCodecConfig(name="fp16")
    error_feedback: bool = Field(
        default=True,
        description="keep what coding lost for the next step: biased codecs (sign, e3m0, topk) need it",
    )


class DGCConfig(_Config):
    """Deep Gradient Compression: top-k with momentum correction."""

    name: Literal["dgc"] = "dgc"
    ratio: float = Field(default=0.001, gt=0, le=0.25, description="share of the elements that is sent")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="decay of the local momentum")
    local_clip: float | None = Field(
        default=None,
        gt=0,
        description="norm to which a member's gradient is clipped before it is accumulated",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="steps over which the share falls from 1/4 to the ratio"
    )


class RandomKConfig(_Config):
    """Random coordinates from a shared seed."""

    name: Literal["randomk"] = "randomk"
    ratio: float = Field(default=0.01, gt=0, le=1, description="share of the elements that is sent")
    values: ValueFormat = Field(default="fp16", description="number format on the wire")
    error_feedback: bool = Field(
        default=True, description="keep what is left out; otherwise scale to be unbiased"
    )


class PowerSGDConfig(_Config):
    """Matrices as averaged low-rank factors. Either a rank or a ratio."""

    name: Literal["powersgd"] = "powersgd"
    rank: int | None = Field(
        default=None, ge=1, le=256, description="of every matrix; 4 if no ratio is given"
    )
    ratio: float | None = Field(
        default=None, ge=1, description="elements of a stage over those sent: the largest such rank is taken"
    )
    min_compression: float = Field(
        default=2.0, ge=1, description="a matrix that does not become so much smaller is averaged as it is"
    )
    values: ValueFormat = Field(default="fp16", description="number format on the wire")
    error_feedback: bool = Field(default=True, description="keep what the factors lost for the next step")

    @model_validator(mode="after")
    def _rank_or_ratio(self) -> PowerSGDConfig:
        if self.rank is not None and self.ratio is not None:
            raise ValueError("a ratio chooses the rank: give one of them")
        return self


class ScapeConfig(_Config):
    """Coordinates that the first moment chooses a step ahead."""

    name: Literal["scape"] = "scape"
    ratio: float = Field(default=0.1, gt=0, le=1, description="share of the elements that is sent")
    beta: float = Field(default=0.9, ge=0, lt=1, description="decay of the moment that chooses")
    exploration: float = Field(default=0.1, ge=0, le=1, description="share of these that is drawn at random")
    dense_steps: int = Field(default=8, ge=0, description="first steps that average everything")
    values: ValueFormat = Field(default="fp16", description="number format on the wire")
    error_feedback: bool = Field(default=True, description="keep what is left out for the next steps")


CompressorConfig = Annotated[
    PlainConfig | DGCConfig | RandomKConfig | PowerSGDConfig | ScapeConfig, Field(discriminator="name")
]
"""What replicas average."""

CODECS: TypeAdapter[CodecConfig] = TypeAdapter(CodecConfig)
COMPRESSORS: TypeAdapter[CompressorConfig] = TypeAdapter(CompressorConfig)

CODEC_NAMES = ("fp32", "fp16", "bf16", "int8", "fp8", "e3m0", "sign", "topk")
SPARSE_NAMES = ("topk", "dgc", "randomk", "scape")
"""Short names of those whose averages are zero at most coordinates."""
COMPRESSOR_NAMES = ("plain", "dgc", "randomk", "powersgd", "scape")


def compressor_config(name: str, **fields: Any) -> CompressorConfig:
    """A configuration by its short name: a compressor's with its fields, or a codec's (then `plain` with it; `block`
    and `ratio` go to the codec, `error_feedback` to the compressor).

    Floats are without error feedback unless it is asked for: what their rounding loses is not worth the memory. Raises
    ValueError naming the known names, or what is wrong with a field.
    """
    if name in CODEC_NAMES:
        default = name not in {"fp32", "fp16", "bf16"}
        feedback = fields.pop("error_feedback", default)
        return PlainConfig(codec=CODECS.validate_python({"name": name, **fields}), error_feedback=feedback)
    if name not in COMPRESSOR_NAMES:
        raise ValueError(f"no compressor {name!r}; choose from {[*CODEC_NAMES, *COMPRESSOR_NAMES]}")
    return COMPRESSORS.validate_python({"name": name, **fields})


def check_combination(compressor: CompressorConfig, optimizer: OptimizerConfig) -> None:
    """Raise ValueError, with the reason, if an optimizer should not apply what a compressor averages."""
    if compressor.name == "dgc":
        if optimizer.name != "sgd":
            raise ValueError(
                f"dgc accumulates momentum before it compresses, which {optimizer.name} would normalise away: "
                "choose sgd, or topk for plain error feedback"
            )
        if optimizer.momentum:
            raise ValueError(
                f"dgc has momentum of its own: momentum {optimizer.momentum} of sgd would count it twice; set it to 0"
            )
    if compressor.name == "scape" and optimizer.name != "adams":
        raise ValueError(
            f"scape chooses coordinates by the first moment, the only state of adams; {optimizer.name} would keep "
            "a second one of values that were not averaged"
        )
    if optimizer.name == "adams" and _is_sparse(compressor) and not optimizer.skip_zeros:
        raise ValueError(
            f"adams moves a coordinate of zero gradient by the sign of its old moment, at full rate, and "
            f"{compressor.name} leaves most at zero: set skip_zeros"
        )


def _is_sparse(compressor: CompressorConfig) -> bool:
    """Whether most coordinates of its averages are exactly zero."""
    return (compressor.codec.name if compressor.name == "plain" else compressor.name) in SPARSE_NAMES
