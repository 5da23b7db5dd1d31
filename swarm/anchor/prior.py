"""The spectral prior of a stage: factors of the anchors' memory, by the name of the weight matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from swarm.anchor.factor import Factors, factor_rank
from swarm.anchor.prior_file import (
    ArraySpec,
    PriorFileError,
    PriorInfo,
    decode_prior,
    encode_prior,
    prior_bytes_limit,
    read_bounded,
    write_atomically,
)

_PARTS = ("left", "values", "right")
BASIS_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes in which U and V are stored."""


@dataclass(frozen=True, slots=True)
class SpectralPrior:
    """What a corrector knows: factors of each matrix that the anchors have a memory of.

    stage: whose matrices they are. version: of the prior. step: that of the weights whose clean gradient is the
    newest in it.
    """

    stage: int
    version: int
    step: int
    factors: Mapping[str, Factors]


def prior_specs(shapes: Mapping[str, tuple[int, int]], rank: int | None) -> dict[str, ArraySpec]:
    """The arrays of a complete spectral prior: `<matrix>/left` [m, r], `/values` fp32 [r], `/right` [n, r].

    shapes: the matrices (`target_matrices`). r is min(rank, m, n).
    """
    specs: dict[str, ArraySpec] = {}
    for name, (rows, columns) in shapes.items():
        kept = factor_rank((rows, columns), rank)
        specs[f"{name}/left"] = ArraySpec(BASIS_DTYPES, (rows, kept))
        specs[f"{name}/values"] = ArraySpec((torch.float32,), (kept,))
        specs[f"{name}/right"] = ArraySpec(BASIS_DTYPES, (columns, kept))
    return specs


def encode_spectral_prior(prior: SpectralPrior, basis: Literal["bf16", "fp32"] = "bf16") -> bytes:
    """The prior as a file. basis: number format of U and V; singular values stay fp32."""
    dtype = torch.bfloat16 if basis == "bf16" else torch.float32
    arrays: dict[str, Tensor] = {}
    for name, factors in prior.factors.items():
        arrays[f"{name}/left"] = factors.left.to(dtype)
        arrays[f"{name}/values"] = factors.values
        arrays[f"{name}/right"] = factors.right.to(dtype)
    info = PriorInfo(kind="corrector", part=prior.stage, version=prior.version, step=prior.step)
    return encode_prior(info, arrays)


def decode_spectral_prior(
    data: bytes, shapes: Mapping[str, tuple[int, int]], rank: int | None
) -> SpectralPrior:
    """The prior in a file's bytes; U and V keep the dtype they were stored in.

    shapes, rank: what the stage and the run expect. Cold matrices may be absent, but with all three of their
    arrays. Raises PriorFileError naming array, expected and actual. Whether the numbers make sense is the
    corrector's to check.
    """
    info, arrays = decode_prior(data, prior_specs(shapes, rank), kind="corrector", is_complete=False)
    factors: dict[str, Factors] = {}
    for name in shapes:
        present = [part for part in _PARTS if f"{name}/{part}" in arrays]
        if not present:
            continue
        if len(present) < len(_PARTS):
            lacking = sorted(set(_PARTS) - set(present))
            raise PriorFileError(f"prior file: {name!r} has arrays {present} and lacks {lacking}")
        factors[name] = Factors(*(arrays[f"{name}/{part}"] for part in _PARTS))
    return SpectralPrior(stage=info.part, version=info.version, step=info.step, factors=factors)


def save_spectral_prior(prior: SpectralPrior, path: Path, basis: Literal["bf16", "fp32"] = "bf16") -> None:
    """Write the prior, atomically. Raises OSError."""
    write_atomically(path, encode_spectral_prior(prior, basis))


def load_spectral_prior(path: Path, shapes: Mapping[str, tuple[int, int]], rank: int | None) -> SpectralPrior:
    """Read a prior. Raises PriorFileError as `decode_spectral_prior` does, OSError if it cannot be read."""
    limit = prior_bytes_limit(prior_specs(shapes, rank))
    return decode_spectral_prior(read_bounded(path, limit), shapes, rank)
