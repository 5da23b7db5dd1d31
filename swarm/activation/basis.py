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
    PayloadError,
    TensorSpec,
    check_finite,
    check_payload,
)
from swarm.activation.codebook import LEVEL_VALUES, Codebook
from swarm.activation.config import BasisConfig, code_budget_bits
from swarm.activation.prediction import TokenPredictor
from swarm.activation.quantise import (
    LARGEST_OFFSET,
    WidthTable,
    dequantise,
    gain_values,
    quantise,
    rank_tokens,
    token_gains,
)
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
    codebook: Codebook
    escape_interval: int

    def layout(self, tokens: int) -> Layout:
        """Payload of `tokens` ordinary tokens."""
        escaped = tokens // self.escape_interval
        return {
            "codes": TensorSpec(torch.uint8, (self.table.nbytes(tokens - escaped),)),
            "gains": TensorSpec(torch.uint8, (tokens,)),
            "gain_offset": TensorSpec(torch.int16, (1,)),
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
        gains, offset = token_gains(coordinates, self.scale)
        order = rank_tokens(gains)
        escaped = rows.shape[0] // self.escape_interval
        coded = order[escaped:]
        return {
            "codes": quantise(
                coordinates[coded], gain_values(gains[coded], offset), self.scale, self.table, self.codebook
            ),
            "gains": gains,
            "gain_offset": offset,
            "escaped": rows[order[:escaped]].to(torch.bfloat16),
        }

    def decode(self, payload: Payload, predicted: Tensor | None) -> Tensor:
        """Rows [n, H] in the compute dtype from a checked payload. predicted: as `encode` had it, up to rounding."""
        gains, dtype = payload["gains"], self.synthesis.dtype
        order = rank_tokens(gains)
        escaped = gains.shape[0] // self.escape_interval
        coded = gain_values(gains[order[escaped:]], payload["gain_offset"])
        coordinates = dequantise(payload["codes"], coded, self.scale, self.table, self.codebook)
        restored = (coordinates.to(dtype) @ self.synthesis).float() + self.centre
        if predicted is not None:
            restored += predicted.index_select(0, order[escaped:])
        rows = torch.empty((gains.shape[0], self.centre.shape[0]), dtype=dtype, device=gains.device)
        rows.index_copy_(0, order[escaped:], restored.to(dtype))
        return rows.index_copy_(0, order[:escaped], payload["escaped"].to(dtype))


class BasisCodec(BoundaryCodec):
    """See the module. `prior` is what `fit_basis_prior` returns:

    mean: fp32 [H]; encode, decode: [H, R]; scale: fp32 [R]; widths: integer [C, W]; levels: fp32 [LEVEL_VALUES];
    gradient_basis: [H, R']; gradient_scale, gradient_widths, gradient_levels alike; dense_offsets: integer [n]; with
    prediction also predict_in [c F, r] and predict_out [r, H], and `tokens`, the run's table. Raises ValueError for
    missing arrays, wrong shapes, or widths that exceed the budget of mask_ratio.
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
        budget = code_budget_bits(config.mask_ratio, hidden_size, config.escape_interval)
        try:
            check_basis_prior(prior, hidden_size=hidden_size, budget_bits=budget)
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

        def coder(centre: Tensor, encode: str, decode: str, prefix: str) -> _Coder:
            return _Coder(
                centre=centre,
                analysis=prior[encode].to(device=device, dtype=dtype).contiguous(),
                synthesis=prior[decode].T.to(device=device, dtype=dtype).contiguous(),
                scale=prior[f"{prefix}scale"].to(device=device, dtype=torch.float32),
                table=WidthTable(prior[f"{prefix}widths"].tolist()),
                codebook=Codebook(prior[f"{prefix}levels"].to(device=device, dtype=torch.float32)),
                escape_interval=config.escape_interval,
            )

        mean = prior["mean"].to(device=device, dtype=torch.float32)
        zero = torch.zeros_like(mean)
        self._forward = coder(mean, "encode", "decode", "")
        self._backward = coder(zero, "gradient_basis", "gradient_basis", "gradient_")

    def layout(self, key: CodecKey) -> Layout:
        """`codes` uint8, `gains` uint8 [n], `gain_offset` int16 [1], `escaped` bfloat16 [n // interval, H], `dense`
        bfloat16 [m, H].

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
        check_finite(payload, ("escaped", "dense"))
        if int(payload["gain_offset"]) > LARGEST_OFFSET:
            raise PayloadError("payload tensor 'gain_offset' is beyond any finite gain")
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


def check_basis_prior(prior: Mapping[str, Tensor], *, hidden_size: int, budget_bits: int) -> None:
    """Raise ValueError unless arrays fit each other and the hidden size, and codes fit the budget per token."""
    for basis, prefix in (("encode", ""), ("decode", ""), ("gradient_basis", "gradient_")):
        scale, widths, levels = f"{prefix}scale", f"{prefix}widths", f"{prefix}levels"
        missing = {basis, scale, widths, levels, "mean", "dense_offsets"} - set(prior)
        if missing:
            raise ValueError(f"lacks {sorted(missing)}; fit it with fit_basis_prior")
        rank = int(prior[scale].numel())
        wanted = {basis: (hidden_size, rank), scale: (rank,), "mean": (hidden_size,), levels: (LEVEL_VALUES,)}
        for name, shape in wanted.items():
            if tuple(prior[name].shape) != shape or not prior[name].is_floating_point():
                raise ValueError(
                    f"{name!r} is {prior[name].dtype} {tuple(prior[name].shape)} where float {shape} was "
                    "expected; it was fitted for another model"
                )
        if not bool((prior[scale] > 0).all()):
            raise ValueError(f"{scale!r} must be positive")
        if not bool(torch.isfinite(prior[levels]).all()):
            raise ValueError(f"{levels!r} holds values that are not finite")
        table = WidthTable(prior[widths].tolist())
        if table.coordinates > rank:
            raise ValueError(f"{widths!r} codes {table.coordinates} coordinates, but there are {rank}")
        if sum(table.token_bits) > table.classes * budget_bits:
            raise ValueError(
                f"{widths!r} spends {sum(table.token_bits) / table.classes:.1f} bits per token where {budget_bits} "
                "are allowed; it was fitted for a lower mask_ratio"
            )
    if prior["dense_offsets"].ndim != 1 or prior["dense_offsets"].is_floating_point():
        raise ValueError("'dense_offsets' must be a vector of integers")
