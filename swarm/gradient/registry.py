"""Codecs and compressors by their configuration."""

from __future__ import annotations

from collections.abc import Callable

from swarm.gradient.blockwise import E3M0Codec, Fp8Codec, Int8Codec, SignCodec
from swarm.gradient.chunk import ChunkCodec, FloatChunk
from swarm.gradient.compressor import Compressor
from swarm.gradient.config import (
    BlockCodecConfig,
    CodecConfig,
    CompressorConfig,
    DGCConfig,
    FloatCodecConfig,
    PlainConfig,
    PowerSGDConfig,
    RandomKConfig,
)
from swarm.gradient.dgc import DGCCompressor
from swarm.gradient.floats import BFloat16Chunk
from swarm.gradient.plain import PlainCompressor
from swarm.gradient.powersgd import LowRankLayout, PowerSGDCompressor, rank_for_ratio
from swarm.gradient.randomk import RandomKCompressor
from swarm.gradient.scape import ScapeCompressor
from swarm.gradient.topk import TopKCodec
from swarm.model.trainable import TrainableSet

_BLOCK_CODECS: dict[str, Callable[[int], ChunkCodec]] = {
    "int8": Int8Codec,
    "fp8": Fp8Codec,
    "e3m0": E3M0Codec,
    "sign": SignCodec,
}
_BLOCK = 256
_SIGN_BLOCK = 1024
"""Elements per scale: an overhead of 1/64 for one byte per element, and of 1/32 for one bit."""

_RANK = 4


def chunk_codec(config: CodecConfig) -> ChunkCodec:
    """The codec that a configuration describes."""
    if isinstance(config, FloatCodecConfig):
        return BFloat16Chunk() if config.name == "bf16" else FloatChunk(config.name)
    if isinstance(config, BlockCodecConfig):
        block = config.block or (_SIGN_BLOCK if config.name == "sign" else _BLOCK)
        return _BLOCK_CODECS[config.name](block)
    return TopKCodec(config.ratio)


def build_compressor(config: CompressorConfig, trainable: TrainableSet, run_seed: int) -> Compressor:
    """The compressor of a stage at one member, before its first step.

    All members of a stage give the same arguments. Raises ValueError for a ratio that the stage does not allow.
    """
    numel = trainable.numel
    if isinstance(config, PlainConfig):
        return PlainCompressor(numel, chunk_codec(config.codec), config.error_feedback)
    if isinstance(config, DGCConfig):
        return DGCCompressor(
            numel,
            ratio=config.ratio,
            momentum=config.momentum,
            local_clip=config.local_clip,
            warmup_steps=config.warmup_steps,
        )
    codec = FloatChunk(config.values)
    if isinstance(config, RandomKConfig):
        return RandomKCompressor(
            numel, codec, ratio=config.ratio, error_feedback=config.error_feedback, seed=run_seed
        )
    if isinstance(config, PowerSGDConfig):
        layout = LowRankLayout.of(trainable, _rank(config, trainable), config.min_compression)
        return PowerSGDCompressor(numel, layout, codec, error_feedback=config.error_feedback, seed=run_seed)
    return ScapeCompressor(
        numel,
        codec,
        ratio=config.ratio,
        beta=config.beta,
        exploration=config.exploration,
        dense_steps=config.dense_steps,
        error_feedback=config.error_feedback,
        seed=run_seed,
    )


def _rank(config: PowerSGDConfig, trainable: TrainableSet) -> int:
    if config.ratio is not None:
        return rank_for_ratio(trainable, config.ratio, config.min_compression)
    return _RANK if config.rank is None else config.rank
