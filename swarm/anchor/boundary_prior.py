"""Priors of the codecs as files: which arrays a boundary's prior has (see `swarm.activation.fit`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.activation.codebook import WIDTHS
from swarm.activation.config import BasisConfig, DenseConfig, MaskConfig, prediction_rank
from swarm.activation.tokens import BLOCKS
from swarm.anchor.prior_file import (
    ArraySpec,
    Extent,
    PriorInfo,
    decode_prior,
    encode_prior,
    prior_bytes_limit,
    read_bounded,
    write_atomically,
)

_FP32 = (torch.float32,)


@dataclass(frozen=True, slots=True)
class BoundaryPrior:
    """What a codec knows of its boundary: arrays by name, as `build_codec` takes them.

    boundary: ordinal (b lies between stages b and b + 1). version: of the prior. step: that of the weights whose
    states and gradients were fitted.
    """

    boundary: int
    version: int
    step: int
    arrays: Mapping[str, Tensor]


def boundary_specs(codec: DenseConfig | MaskConfig | BasisConfig, hidden_size: int) -> dict[str, ArraySpec]:
    """The arrays of a boundary's prior under a codec, at hidden size H; none if the codec has no prior.

    Columns R of a basis may be cut anywhere from 1 to H. That arrays fit each other is the codec's to check.
    """
    if isinstance(codec, MaskConfig):
        return {"mean": ArraySpec(_FP32, (hidden_size,))} if codec.fill == "mean" else {}
    if isinstance(codec, DenseConfig):
        return {}
    columns = (1, hidden_size)
    widths = ArraySpec((torch.int32,), (codec.token_classes, len(WIDTHS)))
    prediction: dict[str, ArraySpec] = {}
    if blocks := BLOCKS[codec.prediction]:
        rank = (1, prediction_rank(codec, hidden_size))
        prediction = {
            **_matrix("predict_in", (blocks, blocks * hidden_size), rank),
            **_matrix("predict_out", rank, hidden_size),
        }
    return {
        "mean": ArraySpec(_FP32, (hidden_size,)),
        **_matrix("encode", hidden_size, columns),
        **_matrix("decode", hidden_size, columns),
        "scale": ArraySpec(_FP32, (columns,)),
        "widths": widths,
        **_matrix("gradient_basis", hidden_size, columns),
        "gradient_scale": ArraySpec(_FP32, (columns,)),
        "gradient_widths": widths,
        "dense_offsets": ArraySpec((torch.int64,), ((1, codec.dense_offset_limit),)),
        **prediction,
    }


def _matrix(name: str, rows: Extent, columns: Extent) -> dict[str, ArraySpec]:
    """A matrix as `swarm.activation.compact.to_int8` has it."""
    return {name: ArraySpec((torch.int8,), (rows, columns)), f"{name}_steps": ArraySpec(_FP32, (columns,))}


def encode_boundary_prior(prior: BoundaryPrior) -> bytes:
    """The prior as a file. Raises ValueError for an array of a dtype that a prior does not have."""
    info = PriorInfo(kind="boundary", part=prior.boundary, version=prior.version, step=prior.step)
    return encode_prior(info, prior.arrays)


def decode_boundary_prior(
    data: bytes, codec: DenseConfig | MaskConfig | BasisConfig, hidden_size: int
) -> BoundaryPrior:
    """The prior in a file's bytes. Raises PriorFileError naming array, expected and actual."""
    info, arrays = decode_prior(data, boundary_specs(codec, hidden_size), kind="boundary")
    return BoundaryPrior(boundary=info.part, version=info.version, step=info.step, arrays=arrays)


def save_boundary_prior(prior: BoundaryPrior, path: Path) -> None:
    """Write the prior, atomically. Raises ValueError as `encode_boundary_prior` does, OSError."""
    write_atomically(path, encode_boundary_prior(prior))


def load_boundary_prior(
    path: Path, codec: DenseConfig | MaskConfig | BasisConfig, hidden_size: int
) -> BoundaryPrior:
    """Read a prior. Raises PriorFileError as `decode_boundary_prior` does, OSError if it cannot be read."""
    limit = prior_bytes_limit(boundary_specs(codec, hidden_size))
    return decode_boundary_prior(read_bounded(path, limit), codec, hidden_size)
