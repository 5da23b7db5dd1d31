"""What the machine that runs the tests is good at."""

from __future__ import annotations

import torch


def compute_format() -> str:
    """bf16 where the CPU has instructions for it; elsewhere it is many times slower than fp32."""
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
