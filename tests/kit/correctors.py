"""Small gradients, priors and a float64 oracle for tests of the correctors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.anchor.config import (
    AdditiveConfig,
    BiasConfig,
    OneSidedConfig,
    SignedConfig,
    SpectralConfig,
)
from swarm.anchor.factor import exact_factors
from swarm.anchor.prior import SpectralPrior

LAYER = "model.layers.0."
TARGETS = {
    f"{LAYER}self_attn.q_proj.weight": (12, 12),
    f"{LAYER}self_attn.k_proj.weight": (4, 12),
    f"{LAYER}mlp.down_proj.weight": (12, 20),
    f"{LAYER}mlp.up_proj.weight": (20, 12),
}
QUERY, KEY, DOWN, UP = TARGETS
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (30, 12),
    **TARGETS,
    f"{LAYER}input_layernorm.weight": (12,),
    "lm_head.weight": (30, 12),
}
FILTERS: list[Any] = [
    SpectralConfig(),
    OneSidedConfig(side="left"),
    OneSidedConfig(side="right"),
    OneSidedConfig(side="shorter"),
]
ALL: list[Any] = [*FILTERS, SignedConfig(), BiasConfig(), AdditiveConfig()]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"alpha": 0.0, "rank": None},
    {"alpha": 0.7, "rank": 3, "tau": 0.5},
    {"tau": 0.1, "tau_is_relative": True},
]


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def make_prior(memory: dict[str, Tensor], rank: int | None, step: int = 10) -> SpectralPrior:
    factors = {name: exact_factors(matrix, rank).factors for name, matrix in memory.items()}
    return SpectralPrior(stage=0, version=1, step=step, factors=factors)


def with_settings(config: Any, changes: dict[str, Any]) -> Any:
    known = {name: value for name, value in changes.items() if name in type(config).model_fields}
    return type(config).model_validate({**config.model_dump(), **known})


def oracle(config: Any, gradient: Tensor, memory: Tensor, weight: float = 1.0) -> np.ndarray:
    """The corrected gradient in float64, from the memory itself."""
    g, m = gradient.double().numpy(), memory.double().numpy()
    left, values, right_t = np.linalg.svd(m, full_matrices=False)
    rank = len(values) if config.rank is None else min(config.rank, len(values))
    u, s, v = left[:, :rank], values[:rank], right_t[:rank].T
    share = weight * (1 - config.alpha)
    if config.name in ("spectral", "one_sided"):
        tau = config.tau * values[0] if config.tau_is_relative else config.tau
        d = np.diag(s / (s + tau))
    if config.name == "spectral":
        filtered = u @ d @ (u.T @ g @ v) @ d @ v.T
    elif config.name == "one_sided":
        side = config.side
        if side == "shorter":
            side = "right" if g.shape[1] < g.shape[0] else "left"
        filtered = u @ d @ u.T @ g if side == "left" else g @ v @ d @ v.T
    elif config.name == "signed":
        filtered = np.abs(g) * np.sign(u * s @ v.T)
    else:
        filtered = u * s @ v.T
    return (g if config.name == "bias" else (1 - share) * g) + share * filtered
