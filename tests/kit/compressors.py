"""A small group of compressors, and what it was given, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.gradient.compressor import Compressor
from swarm.gradient.config import compressor_config
from swarm.gradient.registry import build_compressor
from swarm.gradient.robust import RobustConfig
from swarm.gradient.simulate import average_group
from swarm.model.trainable import TrainableSet
from tests.kit.butterfly import Array, Exchanged

LAYOUT = TrainableSet.of(
    {"a": torch.zeros(24, 10), "norm": torch.zeros(7), "b": torch.zeros(12, 30), "c": torch.zeros(3, 4, 5)}
)
NUMEL = LAYOUT.numel
SEED, MOST, MEMBERS = 5, 90, 3
ALL_COUNT = RobustConfig(norm_bound=None)
WEIGHTS = [[5, 1, 3], [2, 2, 2], [0, 4, 7], [1, 9, 0], [3, 3, 1]]

ALL: list[dict[str, Any]] = [
    {"name": "fp32"},
    {"name": "bf16", "error_feedback": True},
    {"name": "int8", "block": 16},
    {"name": "int8", "block": 16, "error_feedback": False},
    {"name": "fp8", "block": 16},
    {"name": "e3m0", "block": 16},
    {"name": "sign", "block": 128},
    {"name": "topk", "ratio": 0.1},
    {"name": "dgc", "ratio": 0.05, "warmup_steps": 4, "local_clip": 20.0},
    {"name": "randomk", "ratio": 0.1},
    {"name": "randomk", "ratio": 0.1, "error_feedback": False},
    {"name": "powersgd", "rank": 2},
    {"name": "powersgd", "rank": 1, "error_feedback": False, "values": "fp32"},
    {"name": "scape", "ratio": 0.1, "dense_steps": 1, "exploration": 0.25},
    {"name": "scape", "ratio": 0.1, "dense_steps": 0, "error_feedback": False},
]


def make(fields: dict[str, Any]) -> Compressor:
    return build_compressor(compressor_config(**fields), LAYOUT, SEED)


def group(fields: dict[str, Any]) -> list[Compressor]:
    return [make(fields) for _ in range(MEMBERS)]


def drawn(seed: int, step: int, weights: Sequence[int]) -> list[Tensor]:
    """Gradients of all members; a member without weight has none."""
    generator = torch.Generator().manual_seed(seed * 100 + step)
    common = torch.randn(NUMEL, generator=generator)
    found = [common + torch.randn(NUMEL, generator=generator) for _ in weights]
    return [
        gradient if weight else torch.zeros(NUMEL) for gradient, weight in zip(found, weights, strict=True)
    ]


def play(
    members: list[Compressor], seed: int, step: int, weights: Sequence[int], commit: bool = True
) -> list[Tensor]:
    gradients = drawn(seed, step, weights)
    return average_group(
        members, gradients, weights, run_seed=SEED, step=step, most=MOST, commit=commit, robust=ALL_COUNT
    )


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def local(compressor: Any, name: str = "error") -> Array:
    found: Array = compressor._state.local(name).double().numpy()
    return found


def token_sums(errors: Array, seed: int, step: int, weights: Sequence[int]) -> Array:
    """e + w g of all members, [members, n]."""
    gradients = np.stack([gradient.double().numpy() for gradient in drawn(seed, step, weights)])
    found: Array = errors + np.array(weights)[:, None] * gradients
    return found


def means(sums: Array, weights: Sequence[int]) -> list[Array]:
    """What members contribute; zero without weight."""
    return [total / weight if weight else 0 * total for total, weight in zip(sums, weights, strict=True)]


def left(sums: Array, exchanged: Exchanged, weights: Sequence[int]) -> Array:
    """What of the sums is left: less what counted, and with what is owed, per token."""
    w = np.array(weights)[:, None]
    found: Array = sums - w * exchanged.counted + np.maximum(w, 1) * exchanged.owed
    return found
