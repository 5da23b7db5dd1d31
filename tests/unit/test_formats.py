"""The number format in which a device computes."""

from __future__ import annotations

import pytest
import torch

from swarm.model import formats
from swarm.model.formats import compute_dtype, has_bf16


def test_bf16_where_the_device_has_it_and_fp32_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "has_bf16", lambda device: device == "quick")
    assert compute_dtype("bf16", "quick") == torch.bfloat16
    assert compute_dtype("bf16", "slow") == torch.float32
    assert compute_dtype("fp32", "quick") == torch.float32


def test_what_this_cpu_says_is_what_torch_does() -> None:
    assert has_bf16("cpu") == has_bf16(torch.device("cpu"))
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        assert not has_bf16("cpu")
