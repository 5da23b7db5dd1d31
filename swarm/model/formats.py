"""The number format in which a device computes a stage."""

from __future__ import annotations

from typing import Literal

import torch

ComputeFormat = Literal["bf16", "fp32"]
"""Of a run's manifest."""


def has_bf16(device: str | torch.device) -> bool:
    """Whether a device multiplies bf16 matrices by instructions of its own, or at least not slower than fp32 ones.

    CPUs with AVX2 alone take about eight times as long for a bf16 product as for an fp32 one.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu":
        # oneDNN's own condition, without which torch takes a plain loop.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return True


def compute_dtype(compute: ComputeFormat, device: str | torch.device) -> torch.dtype:
    """What stages of a run with this format compute in on a device: fp32 where bf16 would be slower.

    Master weights, averaging and wire formats do not depend on it, so peers may differ; they differ by rounding, as
    devices do anyway.
    """
    return torch.bfloat16 if compute == "bf16" and has_bf16(device) else torch.float32
