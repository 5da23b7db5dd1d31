"""Codecs and compressors by their configuration."""

from __future__ import annotations

from collections.abc import Callable

from swarm.gradient.blockwise import E3M0Codec, Fp8Codec, Int8Codec, SignCodec
from swarm.gradient.chunk import ChunkCodec, FloatChunk
from swarm.gradient.config import BlockCodecConfig, CodecConfig, FloatCodecConfig
from swarm.gradient.floats import BFloat16Chunk
from swarm.gradient.topk import TopKCodec

_BLOCK_CODECS: dict[str, Callable[[int], ChunkCodec]] = {
    "int8": Int8Codec,
    "fp8": Fp8Codec,
    "e3m0": E3M0Codec,
    "sign": SignCodec,
}
_BLOCK = 256
_SIGN_BLOCK = 1024
"""Elements per scale: an overhead of 1/64 for one byte per element, and of 1/32 for one bit."""


def chunk_codec(config: CodecConfig) -> ChunkCodec:
    """The codec that a configuration describes."""
    if isinstance(config, FloatCodecConfig):
        return BFloat16Chunk() if config.name == "bf16" else FloatChunk(config.name)
    if isinstance(config, BlockCodecConfig):
        block = config.block or (_SIGN_BLOCK if config.name == "sign" else _BLOCK)
        return _BLOCK_CODECS[config.name](block)
    return TopKCodec(config.ratio)
