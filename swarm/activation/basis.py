"""The basis codec: hidden states and gradients in bases fitted beforehand, at a few bits per coordinate.

A token's hidden state, less the mean, is written in a Fisher-weighted principal basis (whose leading directions
are those in which an error costs loss), its gradient in the principal directions of the gradients. `quantise`
says how coordinates become bits. Document starts and other positions with massive activations are sent in full
in bfloat16: a handful of channels there exceed everything else a hundredfold, and one lost value ruins the
document.

Widths, positions and sizes follow from integers in the prior and the key; no float decides a layout. The
backward direction is straight-through: the sender takes the decoded gradient for dL/dh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from swarm.activation.config import BasisConfig, code_budget_bytes
from swarm.activation.quantise import WidthTable, dequantise, quantise


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


@dataclass(frozen=True, slots=True)
class _Coder:
    """One direction: analysis [H, R] and synthesis [R, H] in the compute dtype, scale fp32 [R], widths."""

    analysis: Tensor
    synthesis: Tensor
    scale: Tensor
    table: WidthTable

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and token scales of rows [n, H] in the compute dtype."""
        return quantise((rows @ self.analysis).float(), self.scale, self.table)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows [n, H] in the compute dtype."""
        coordinates = dequantise(codes, scales, self.scale, self.table)
        return coordinates.to(self.synthesis.dtype) @ self.synthesis


class BasisCodec(BoundaryCodec):
    """See the module. `prior` is what `fit_basis_prior` returns:

    mean: fp32 [H]; encode, decode: [H, R]; scale: fp32 [R]; widths: integer [C, 4]; gradient_basis: [H, R'];
    gradient_scale: fp32 [R']; gradient_widths: integer [C, 4]; dense_offsets: integer [n]. Raises ValueError
    for missing arrays, wrong shapes, or widths that exceed the budget of mask_ratio.
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
        budget = code_budget_bytes(config.mask_ratio, hidden_size)
        try:
            check_basis_prior(prior, hidden_size=hidden_size, budget_bytes=budget)
        except ValueError as error:
            raise ValueError(f"prior of boundary {boundary}: {error}") from error
        self._mean = prior["mean"].to(device=device, dtype=torch.float32)
        self._offsets = prior["dense_offsets"].to(device=device, dtype=torch.int64)

        def coder(encode: str, decode: str, scale: str, widths: str) -> _Coder:
            return _Coder(
                analysis=prior[encode].to(device=device, dtype=dtype).contiguous(),
                synthesis=prior[decode].T.to(device=device, dtype=dtype).contiguous(),
                scale=prior[scale].to(device=device, dtype=torch.float32),
                table=WidthTable(prior[widths].tolist()),
            )

        self._forward = coder("encode", "decode", "scale", "widths")
        self._backward = coder("gradient_basis", "gradient_basis", "gradient_scale", "gradient_widths")

    def layout(self, key: CodecKey) -> Layout:
        """`codes` uint8, `scales` bfloat16 [n], `dense` bfloat16 [m, H]; n + m = B * T."""
        return self._layout(key, self._forward.table)

    def gradient_layout(self, key: CodecKey) -> Layout:
        """As forward, with as many codes as the gradient's widths ask for."""
        return self._layout(key, self._backward.table)

    def byte_count(self, key: CodecKey) -> ByteCount:
        """Codes and scales are coded bytes; full tokens are dense positions. The backward codes may be fewer."""
        layout = self.layout(key)
        return ByteCount(
            coded=layout["codes"].nbytes + layout["scales"].nbytes, dense_positions=layout["dense"].nbytes
        )

    def encode(self, hidden: Tensor, key: CodecKey) -> Payload:
        """Code ordinary tokens in the Fisher basis, copy the others. hidden: float [B, T, H]."""
        flat = hidden.reshape(-1, self.hidden_size)
        ordinary, dense = self._split(key)
        # The mean is subtracted in fp32: outlier channels would lose their small variations in bf16.
        centred = (flat.index_select(0, ordinary).float() - self._mean).to(self.dtype)
        codes, scales = self._forward.encode(centred)
        return {"codes": codes, "scales": scales, "dense": flat.index_select(0, dense).to(torch.bfloat16)}

    def decode(self, payload: Payload, key: CodecKey) -> Tensor:
        """Hidden states [B, T, H] in the compute dtype. Raises PayloadError."""
        _check(payload, self.layout(key))
        restored = self._forward.decode(payload["codes"], payload["scales"]).float() + self._mean
        return self._merge(restored.to(self.dtype), payload["dense"], key)

    def encode_gradient(self, gradient: Tensor, key: CodecKey) -> Payload:
        """Code ordinary tokens in the gradient basis, copy the others. gradient: float [B, T, H]."""
        flat = gradient.reshape(-1, self.hidden_size)
        ordinary, dense = self._split(key)
        codes, scales = self._backward.encode(flat.index_select(0, ordinary).to(self.dtype))
        return {"codes": codes, "scales": scales, "dense": flat.index_select(0, dense).to(torch.bfloat16)}

    def decode_gradient(self, payload: Payload, key: CodecKey) -> Tensor:
        """Gradient [B, T, H] in the compute dtype, straight-through. Raises PayloadError."""
        _check(payload, self.gradient_layout(key))
        return self._merge(self._backward.decode(payload["codes"], payload["scales"]), payload["dense"], key)

    def _layout(self, key: CodecKey, table: WidthTable) -> Layout:
        """Layout with a table's codes."""
        offsets = self._offsets.to(key.document_starts.device)
        dense = int(dense_positions(key.document_starts, offsets).sum())
        rows, tokens = key.shape
        ordinary = rows * tokens - dense
        return {
            "codes": TensorSpec(torch.uint8, (table.nbytes(ordinary),)),
            "scales": TensorSpec(torch.bfloat16, (ordinary,)),
            "dense": TensorSpec(torch.bfloat16, (dense, self.hidden_size)),
        }

    def _split(self, key: CodecKey) -> tuple[Tensor, Tensor]:
        """Flat token indices, int64, of the ordinary and of the dense positions."""
        dense = dense_positions(key.document_starts.to(self._mean.device), self._offsets).reshape(-1)
        return (~dense).nonzero().squeeze(1), dense.nonzero().squeeze(1)

    def _merge(self, restored: Tensor, dense: Tensor, key: CodecKey) -> Tensor:
        """Put ordinary [n, H] and dense [m, H] tokens at their positions: [B, T, H]."""
        ordinary_index, dense_index = self._split(key)
        rows, tokens = key.shape
        output = torch.empty((rows * tokens, self.hidden_size), dtype=self.dtype, device=restored.device)
        output.index_copy_(0, ordinary_index, restored)
        output.index_copy_(0, dense_index, dense.to(self.dtype))
        return output.view(rows, tokens, self.hidden_size)


def _check(payload: Payload, layout: Layout) -> None:
    """Layout and finiteness. Raises PayloadError."""
    check_payload(payload, layout)
    check_finite(payload, ("scales", "dense"))


def check_basis_prior(prior: Mapping[str, Tensor], *, hidden_size: int, budget_bytes: int) -> None:
    """Raise ValueError unless arrays fit each other and the hidden size, and codes fit the budget per token."""
    for basis, scale, widths in (
        ("encode", "scale", "widths"),
        ("decode", "scale", "widths"),
        ("gradient_basis", "gradient_scale", "gradient_widths"),
    ):
        missing = {basis, scale, widths, "mean", "dense_offsets"} - set(prior)
        if missing:
            raise ValueError(f"lacks {sorted(missing)}; fit it with fit_basis_prior")
        rank = int(prior[scale].numel())
        wanted = {basis: (hidden_size, rank), scale: (rank,), "mean": (hidden_size,)}
        for name, shape in wanted.items():
            if tuple(prior[name].shape) != shape or not prior[name].is_floating_point():
                raise ValueError(
                    f"{name!r} is {prior[name].dtype} {tuple(prior[name].shape)} where float {shape} was "
                    "expected; it was fitted for another model"
                )
        if not bool((prior[scale] > 0).all()):
            raise ValueError(f"{scale!r} must be positive")
        table = WidthTable(prior[widths].tolist())
        if table.coordinates > rank:
            raise ValueError(f"{widths!r} codes {table.coordinates} coordinates, but there are {rank}")
        if sum(table.token_bytes) > table.classes * budget_bytes:
            raise ValueError(
                f"{widths!r} spends {sum(table.token_bytes) / table.classes:.1f} bytes per token where {budget_bytes} "
                "are allowed; it was fitted for a lower mask_ratio"
            )
    if prior["dense_offsets"].ndim != 1 or prior["dense_offsets"].is_floating_point():
        raise ValueError("'dense_offsets' must be a vector of integers")
