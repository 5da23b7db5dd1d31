"""Values of a dense average on the wire: fp32, or fp16 with a power-of-two scale per chunk.

A chunk's absolute maximum is brought to about 2^14 before the cast: gradients of 1e-8 keep fp16's eleven
significant bits, where an unscaled cast would round them to zero. The scale is a power of two, so scaling
itself never rounds. Encoding is a function of the chunk alone: who decodes the same bytes gets the same bits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ValueFormat = Literal["fp16", "fp32"]
_SCALE_BYTES = 4
_TARGET_EXPONENT = 14
_EXPONENT_RANGE = 120


def encoded_bytes(values: ValueFormat, elements: int) -> int:
    """Bytes of an encoded chunk of this many elements."""
    return 4 * elements if values == "fp32" else _SCALE_BYTES + 2 * elements


def encode_values(chunk: Tensor, values: ValueFormat) -> Tensor:
    """fp32 [n] -> uint8 [encoded_bytes]. A non-finite chunk never becomes finite."""
    if values == "fp32":
        return chunk.contiguous().view(torch.uint8).clone()
    encoded = torch.empty(encoded_bytes(values, chunk.numel()), dtype=torch.uint8)
    peak = _peak(chunk)
    exponent = 0
    if 0.0 < peak < float("inf"):
        exponent = int(torch.frexp(torch.tensor(peak)).exponent) - _TARGET_EXPONENT
        exponent = max(-_EXPONENT_RANGE, min(_EXPONENT_RANGE, exponent))
    encoded[:_SCALE_BYTES] = torch.tensor([exponent], dtype=torch.int32).view(torch.uint8)
    encoded[_SCALE_BYTES:] = (chunk * 2.0**-exponent).to(torch.float16).view(torch.uint8)
    return encoded


def _peak(chunk: Tensor) -> float:
    """Largest |x|: NaN if there is one, 0 of nothing."""
    if not chunk.numel():
        return 0.0
    lowest, highest = torch.aminmax(chunk)
    return float(torch.maximum(highest, -lowest))


def decode_values(encoded: Tensor, values: ValueFormat, elements: int) -> Tensor:
    """uint8 -> fp32 [elements]. Raises ValueError for a wrong size or an exponent outside the format."""
    if encoded.dtype != torch.uint8 or encoded.numel() != encoded_bytes(values, elements):
        raise ValueError(f"{encoded.numel()} bytes where {encoded_bytes(values, elements)} were expected")
    if values == "fp32":
        return encoded.clone().view(torch.float32)
    exponent = int(encoded[:_SCALE_BYTES].clone().view(torch.int32))
    if abs(exponent) > _EXPONENT_RANGE:
        raise ValueError(f"scale exponent {exponent} is outside +-{_EXPONENT_RANGE}")
    return encoded[_SCALE_BYTES:].clone().view(torch.float16).float().mul_(2.0**exponent)
