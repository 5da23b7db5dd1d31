"""The basis codec: hidden states and gradients in bases fitted beforehand, at a few bits per coordinate.

A token's hidden state, less the mean and what the token ids predict (`prediction`), is written in a
Fisher-weighted principal basis (whose leading directions are those in which an error costs loss), its gradient in
the principal directions of the gradients. `quantise` says how coordinates become bits.

Massive activations (a handful of channels a hundred times larger than everything else) are sent in full in
bfloat16, for one lost value ruins the document: at document starts and other positions that calibration found,
and wherever else they turn up, by sending one ordinary token in `escape_interval` in full, the largest ones of
the microbatch.

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
from swarm.activation.prediction import TokenPredictor
from swarm.activation.quantise import WidthTable, dequantise, quantise, rank_tokens, token_scales
from swarm.activation.tokens import TokenTable


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
    """One direction: centre fp32 [H], analysis [H, R] and synthesis [R, H] in the compute dtype, scale fp32 [R],
    widths, and of how many tokens the largest one escapes.
    """

    centre: Tensor
    analysis: Tensor
    synthesis: Tensor
    scale: Tensor
    table: WidthTable
    escape_interval: int

    def layout(self, tokens: int) -> Layout:
        """Payload of `tokens` ordinary tokens."""
        escaped = tokens // self.escape_interval
        return {
            "codes": TensorSpec(torch.uint8, (self.table.nbytes(tokens - escaped),)),
            "scales": TensorSpec(torch.bfloat16, (tokens,)),
            "escaped": TensorSpec(torch.bfloat16, (escaped, self.centre.shape[0])),
        }

    def encode(self, rows: Tensor, predicted: Tensor | None) -> Payload:
        """Payload of rows [n, H], any float dtype. predicted: [n, H], None for 0."""
        # The mean is subtracted in fp32: outlier channels would lose their small variations in bf16.
        centred = rows.float() - self.centre
        if predicted is not None:
            centred -= predicted
        centred = centred.to(self.analysis.dtype)
        coordinates = (centred @ self.analysis).float()
        scales = token_scales(coordinates, self.scale)
        order = rank_tokens(scales)
        escaped = rows.shape[0] // self.escape_interval
        coded = order[escaped:]
        return {
            "codes": quantise(coordinates[coded], scales[coded], self.scale, self.table),
            "scales": scales,
            "escaped": rows[order[:escaped]].to(torch.bfloat16),
        }

    def decode(self, payload: Payload, predicted: Tensor | None) -> Tensor:
        """Rows [n, H] in the compute dtype from a checked payload. predicted: as `encode` had it, up to rounding."""
        scales, dtype = payload["scales"], self.synthesis.dtype
        order = rank_tokens(scales)
        escaped = scales.shape[0] // self.escape_interval
        coordinates = dequantise(payload["codes"], scales[order[escaped:]], self.scale, self.table)
        restored = (coordinates.to(dtype) @ self.synthesis).float() + self.centre
        if predicted is not None:
            restored += predicted.index_select(0, order[escaped:])
        rows = torch.empty((scales.shape[0], self.centre.shape[0]), dtype=dtype, device=scales.device)
        rows.index_copy_(0, order[escaped:], restored.to(dtype))
        return rows.index_copy_(0, order[:escaped], payload["escaped"].to(dtype))


class BasisCodec(BoundaryCodec):
    """See the module. `prior` is what `fit_basis_prior` returns:

    mean: fp32 [H]; encode, decode: [H, R]; scale: fp32 [R]; widths: integer [C, 4]; gradient_basis: [H, R'];
    gradient_scale: fp32 [R']; gradient_widths: integer [C, 4]; dense_offsets: integer [n]; with prediction also
    predict_in [c F, r] and predict_out [r, H], and `tokens`, the run's table. Raises ValueError for missing arrays,
    wrong shapes, or widths that exceed the budget of mask_ratio.
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
        tokens: TokenTable | None = None,
    ) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype
        budget = code_budget_bytes(config.mask_ratio, hidden_size, config.escape_interval)
        try:
            check_basis_prior(prior, hidden_size=hidden_size, budget_bytes=budget)
            self._predictor: TokenPredictor | None = None
            if config.prediction != "none":
                if tokens is None:
                    raise ValueError(f"prediction {config.prediction!r} needs the run's token table")
                self._predictor = TokenPredictor(
                    config.prediction, tokens, prior, hidden_size=hidden_size, device=device, dtype=dtype
                )
        except ValueError as error:
            raise ValueError(f"prior of boundary {boundary}: {error}") from error
        self._offsets = prior["dense_offsets"].to(device=device, dtype=torch.int64)

        def coder(centre: Tensor, encode: str, decode: str, scale: str, widths: str) -> _Coder:
            return _Coder(
                centre=centre,
                analysis=prior[encode].to(device=device, dtype=dtype).contiguous(),
                synthesis=prior[decode].T.to(device=device, dtype=dtype).contiguous(),
                scale=prior[scale].to(device=device, dtype=torch.float32),
                table=WidthTable(prior[widths].tolist()),
                escape_interval=config.escape_interval,
            )

        mean = prior["mean"].to(device=device, dtype=torch.float32)
        zero = torch.zeros_like(mean)
        self._forward = coder(mean, "encode", "decode", "scale", "widths")
        self._backward = coder(zero, "gradient_basis", "gradient_basis", "gradient_scale", "gradient_widths")

    def layout(self, key: CodecKey) -> Layout:
        """`codes` uint8, `scales` bfloat16 [n], `escaped` bfloat16 [n // interval, H], `dense` bfloat16 [m, H].

        m positions are dense, n = B * T - m are ordinary.
        """
        return self._layout(key, self._forward)

    def gradient_layout(self, key: CodecKey) -> Layout:
        """As forward, with as many codes as the gradient's widths ask for."""
        return self._layout(key, self._backward)

    def byte_count(self, key: CodecKey) -> ByteCount:
        """Forward bytes; the backward direction may have a few codes fewer. Escaped tokens count as coded."""
        layout = self.layout(key)
        dense = layout.pop("dense").nbytes
        return ByteCount(coded=sum(spec.nbytes for spec in layout.values()), dense_positions=dense)

    def encode(self, hidden: Tensor, key: CodecKey) -> Payload:
        """Code ordinary tokens in the Fisher basis, copy the others. hidden: float [B, T, H]."""
        return self._code(self._forward, hidden, key)

    def decode(self, payload: Payload, key: CodecKey) -> Tensor:
        """Hidden states [B, T, H] in the compute dtype. Raises PayloadError."""
        return self._restore(self._forward, payload, key)

    def encode_gradient(self, gradient: Tensor, key: CodecKey) -> Payload:
        """Code ordinary tokens in the gradient basis, copy the others. gradient: float [B, T, H]."""
        return self._code(self._backward, gradient, key)

    def decode_gradient(self, payload: Payload, key: CodecKey) -> Tensor:
        """Gradient [B, T, H] in the compute dtype, straight-through. Raises PayloadError."""
        return self._restore(self._backward, payload, key)

    def _layout(self, key: CodecKey, coder: _Coder) -> Layout:
        """Layout of one direction."""
        offsets = self._offsets.to(key.document_starts.device)
        dense = int(dense_positions(key.document_starts, offsets).sum())
        rows, tokens = key.shape
        return {
            **coder.layout(rows * tokens - dense),
            "dense": TensorSpec(torch.bfloat16, (dense, self.hidden_size)),
        }

    def _code(self, coder: _Coder, tensor: Tensor, key: CodecKey) -> Payload:
        """Payload of [B, T, H] in one direction."""
        flat = tensor.reshape(-1, self.hidden_size)
        ordinary, dense = self._split(key)
        payload = coder.encode(flat.index_select(0, ordinary), self._predicted(coder, key, ordinary))
        return {**payload, "dense": flat.index_select(0, dense).to(torch.bfloat16)}

    def _restore(self, coder: _Coder, payload: Payload, key: CodecKey) -> Tensor:
        """[B, T, H] from a payload in one direction. Raises PayloadError."""
        check_payload(payload, self._layout(key, coder))
        check_finite(payload, ("scales", "escaped", "dense"))
        ordinary, dense = self._split(key)
        rows, tokens = key.shape
        output = torch.empty((rows * tokens, self.hidden_size), dtype=self.dtype, device=self._offsets.device)
        output.index_copy_(0, ordinary, coder.decode(payload, self._predicted(coder, key, ordinary)))
        output.index_copy_(0, dense, payload["dense"].to(self.dtype))
        return output.view(rows, tokens, self.hidden_size)

    def _predicted(self, coder: _Coder, key: CodecKey, ordinary: Tensor) -> Tensor | None:
        """What the token ids say of the ordinary tokens' states, [n, H]; nothing of gradients."""
        is_forward = coder is self._forward
        return self._predictor(key, ordinary) if is_forward and self._predictor is not None else None

    def _split(self, key: CodecKey) -> tuple[Tensor, Tensor]:
        """Flat token indices, int64, of the ordinary and of the dense positions."""
        dense = dense_positions(key.document_starts.to(self._offsets.device), self._offsets).reshape(-1)
        return (~dense).nonzero().squeeze(1), dense.nonzero().squeeze(1)


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
