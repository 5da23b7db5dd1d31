"""The basis codec: 4-bit coordinates of hidden states and gradients in bases fitted beforehand.

A token's hidden state, less the mean, is written in the r leading directions of a Fisher-weighted principal
basis (directions in which an error costs loss), its gradient in the r leading principal directions of the
gradients. Coordinates cost 4 bits and share one bfloat16 scale per token. Document starts and other positions
with massive activations are sent in full in bfloat16: a handful of channels there exceed everything else a
hundredfold, and one lost value ruins the document.

Rank, positions and sizes follow from integers in the configuration, the prior and the key; no float decides a
layout. The backward direction is straight-through: the sender takes the decoded gradient for dL/dh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from swarm.activation.base import (
    BoundaryCodec,
    ByteCount,
    CodecKey,
    Layout,
    Payload,
    TensorSpec,
    check_finite,
    check_payload,
)
from swarm.activation.config import BF16_BYTES, SCALE_BYTES, BasisConfig, basis_rank
from swarm.activation.quantise import dequantise_int4, quantise_int4


def document_positions(document_starts: Tensor) -> Tensor:
    """Offset of every token from its document's start: int64 [B, T] from bool [B, T]."""
    index = torch.arange(document_starts.shape[1], device=document_starts.device).expand(
        document_starts.shape
    )
    starts = torch.where(document_starts, index, torch.zeros_like(index))
    return index - starts.cummax(dim=1).values


def dense_positions(document_starts: Tensor, offsets: Tensor) -> Tensor:
    """Where tokens are sent in full: bool [B, T].

    document_starts: bool [B, T]. offsets: int64 [n], offsets from the document start. A document shorter than
    an offset has no such position.
    """
    return torch.isin(document_positions(document_starts), offsets)


class BasisCodec(BoundaryCodec):
    """See the module. `prior` is what `fit_basis_prior` returns:

    mean: fp32 [H]; encode, decode: [H, R] with R >= r; scale: fp32 [R]; gradient_basis: [H, R];
    gradient_scale: fp32 [R]; dense_offsets: int64 [n]. Raises ValueError for missing arrays or wrong shapes.
    """

    name: ClassVar[str] = "basis"

    def __init__(
        self,
        config: BasisConfig,
        *,
        hidden_size: int,
        boundary: int,
        prior: Mapping[str, Tensor],
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.rank = basis_rank(config.mask_ratio, hidden_size)
        _check_prior(prior, boundary, hidden_size, self.rank)
        rank = self.rank
        self._mean = prior["mean"].to(device=device, dtype=torch.float32)
        self._offsets = prior["dense_offsets"].to(device)

        def matrix(name: str) -> Tensor:
            return prior[name][:, :rank].to(device=device, dtype=dtype).contiguous()

        self._encode = matrix("encode")
        self._decode = matrix("decode").T.contiguous()
        self._gradient_basis = matrix("gradient_basis")
        self._gradient_basis_transposed = self._gradient_basis.T.contiguous()
        self._scale = prior["scale"][:rank].to(device=device, dtype=torch.float32)
        self._gradient_scale = prior["gradient_scale"][:rank].to(device=device, dtype=torch.float32)

    def layout(self, key: CodecKey) -> Layout:
        """`codes` uint8 [n, r / 2], `scales` bfloat16 [n], `dense` bfloat16 [m, H]; n + m = B * T."""
        dense = int(dense_positions(key.document_starts, self._offsets.to(key.document_starts.device)).sum())
        rows, tokens = key.shape
        ordinary = rows * tokens - dense
        return {
            "codes": TensorSpec(torch.uint8, (ordinary, self.rank // 2)),
            "scales": TensorSpec(torch.bfloat16, (ordinary,)),
            "dense": TensorSpec(torch.bfloat16, (dense, self.hidden_size)),
        }

    def gradient_layout(self, key: CodecKey) -> Layout:
        """The same as forward: same rank, same dense positions."""
        return self.layout(key)

    def byte_count(self, key: CodecKey) -> ByteCount:
        """Codes and scales are coded bytes; full tokens are dense positions."""
        layout = self.layout(key)
        ordinary = layout["scales"].shape[0]
        return ByteCount(
            coded=ordinary * (self.rank // 2 + SCALE_BYTES),
            dense_positions=layout["dense"].shape[0] * BF16_BYTES * self.hidden_size,
        )

    def encode(self, hidden: Tensor, key: CodecKey) -> Payload:
        """Code ordinary tokens in the Fisher basis, copy the others. hidden: float [B, T, H]."""
        flat = hidden.reshape(-1, self.hidden_size)
        ordinary, dense = self._split(key)
        # The mean is subtracted in fp32: outlier channels would lose their small variations in bf16.
        centred = (flat.index_select(0, ordinary).float() - self._mean).to(self.dtype)
        codes, scales = quantise_int4((centred @ self._encode).float(), self._scale)
        return {"codes": codes, "scales": scales, "dense": flat.index_select(0, dense).to(torch.bfloat16)}

    def decode(self, payload: Payload, key: CodecKey) -> Tensor:
        """Hidden states [B, T, H] in the compute dtype. Raises PayloadError."""
        coordinates = self._coordinates(payload, self.layout(key), self._scale)
        restored = ((coordinates @ self._decode).float() + self._mean).to(self.dtype)
        return self._merge(restored, payload["dense"], key)

    def encode_gradient(self, gradient: Tensor, key: CodecKey) -> Payload:
        """Code ordinary tokens in the gradient basis, copy the others. gradient: float [B, T, H]."""
        flat = gradient.reshape(-1, self.hidden_size)
        ordinary, dense = self._split(key)
        rows = flat.index_select(0, ordinary).to(self.dtype)
        codes, scales = quantise_int4((rows @ self._gradient_basis).float(), self._gradient_scale)
        return {"codes": codes, "scales": scales, "dense": flat.index_select(0, dense).to(torch.bfloat16)}

    def decode_gradient(self, payload: Payload, key: CodecKey) -> Tensor:
        """Gradient [B, T, H] in the compute dtype, straight-through. Raises PayloadError."""
        coordinates = self._coordinates(payload, self.gradient_layout(key), self._gradient_scale)
        return self._merge(coordinates @ self._gradient_basis_transposed, payload["dense"], key)

    def _split(self, key: CodecKey) -> tuple[Tensor, Tensor]:
        """Flat token indices, int64, of the ordinary and of the dense positions."""
        device = self._mean.device
        dense = dense_positions(key.document_starts.to(device), self._offsets).reshape(-1)
        return (~dense).nonzero().squeeze(1), dense.nonzero().squeeze(1)

    def _coordinates(self, payload: Payload, layout: Layout, scale: Tensor) -> Tensor:
        """Checked payload to coordinates [n, r] in the compute dtype."""
        check_payload(payload, layout)
        check_finite(payload, ("scales", "dense"))
        return dequantise_int4(payload["codes"], payload["scales"], scale).to(self.dtype)

    def _merge(self, restored: Tensor, dense: Tensor, key: CodecKey) -> Tensor:
        """Put ordinary [n, H] and dense [m, H] tokens at their positions: [B, T, H]."""
        ordinary_index, dense_index = self._split(key)
        rows, tokens = key.shape
        output = torch.empty((rows * tokens, self.hidden_size), dtype=self.dtype, device=restored.device)
        output.index_copy_(0, ordinary_index, restored)
        output.index_copy_(0, dense_index, dense.to(self.dtype))
        return output.view(rows, tokens, self.hidden_size)


def _check_prior(prior: Mapping[str, Tensor], boundary: int, hidden_size: int, rank: int) -> None:
    """Raise ValueError unless the prior has every array, with at least `rank` columns."""
    for name in ("mean", "encode", "decode", "scale", "gradient_basis", "gradient_scale", "dense_offsets"):
        if name not in prior:
            raise ValueError(f"prior of boundary {boundary} lacks {name!r}; fit it with fit_basis_prior")
        shape = tuple(prior[name].shape)
        if name in ("encode", "decode", "gradient_basis"):
            fits = len(shape) == 2 and shape[0] == hidden_size and shape[1] >= rank
            wanted = f"[{hidden_size}, >= {rank}]"
        elif name == "mean":
            fits, wanted = shape == (hidden_size,), f"[{hidden_size}]"
        elif name == "dense_offsets":
            fits, wanted = len(shape) == 1 and not prior[name].is_floating_point(), "integer [n]"
        else:
            fits, wanted = len(shape) == 1 and shape[0] >= rank, f"[>= {rank}]"
        if not fits:
            raise ValueError(
                f"prior of boundary {boundary}: {name!r} is {list(shape)} where {wanted} was expected; it "
                "was fitted for another model or a higher mask_ratio"
            )
