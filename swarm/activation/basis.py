"""The basis codec: hidden states and gradients in bases fitted beforehand, at a few bits per coordinate.

A token's hidden state, less the mean and what the token ids predict (`prediction`), is written in a
Fisher-weighted principal basis (whose leading directions are those in which an error costs loss), its gradient in
the principal directions of the gradients. `quantise` says how coordinates become bits.

Massive activations (a handful of channels a hundred times larger than everything else) are sent in bfloat16, for
one lost value ruins the document: whole tokens at document starts and other positions that calibration found, and
elsewhere single values (`outliers`).

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
from swarm.activation.codebook import Codebook, normal_codebook
from swarm.activation.compact import check_matrix, matrix_of
from swarm.activation.config import BasisConfig, code_budget_bits
from swarm.activation.outliers import Outliers
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
    widths, and how outliers are sent (None: they are not).
    """

    centre: Tensor
    analysis: Tensor
    synthesis: Tensor
    scale: Tensor
    table: WidthTable
    codebook: Codebook
    outliers: Outliers | None

    def layout(self, tokens: int) -> Layout:
        """Payload of `tokens` ordinary tokens."""
        return {
            "codes": TensorSpec(torch.uint8, (self.table.nbytes(tokens),)),
            "gains": TensorSpec(torch.uint8, (tokens,)),
            "gain_offset": TensorSpec(torch.int16, (1,)),
            **(self.outliers.layout(tokens) if self.outliers is not None else {}),
        }

    def encode(self, rows: Tensor, predicted: Tensor | None) -> Payload:
        """Payload of rows [n, H], any float dtype. predicted: [n, H], None for 0."""
        # The mean is subtracted in fp32: outlier channels would lose their small variations in bf16.
        centred = rows.float() - self.centre
        if predicted is not None:
            centred -= predicted
        apart = self.outliers.take_(centred, rows) if self.outliers is not None else {}
        coordinates = (centred.to(self.analysis.dtype) @ self.analysis).float()
        gains, offset = token_gains(coordinates, self.scale)
        order = rank_tokens(gains)
        values = gain_values(gains[order], offset)
        codes = quantise(coordinates.index_select(0, order), values, self.scale, self.table, self.codebook)
        return {"codes": codes, "gains": gains, "gain_offset": offset, **apart}

    def decode(self, payload: Payload, predicted: Tensor | None) -> Tensor:
        """Rows [n, H] in the compute dtype from a checked payload. predicted: as `encode` had it, up to rounding.

        Raises PayloadError for outliers that are nowhere.
        """
        gains, dtype = payload["gains"], self.synthesis.dtype
        order = rank_tokens(gains)
        values = gain_values(gains[order], payload["gain_offset"])
        ranked = dequantise(payload["codes"], values, self.scale, self.table, self.codebook)
        coordinates = torch.empty_like(ranked).index_copy_(0, order, ranked).to(dtype)
        rows = (coordinates @ self.synthesis).float() + self.centre
        if predicted is not None:
            rows += predicted
        rows = rows.to(dtype)
        if self.outliers is not None:
            self.outliers.put_(payload, rows)
        return rows


class BasisCodec(BoundaryCodec):
    """See the module. `prior` is what `fit_basis_prior` returns:

    mean: fp32 [H]; encode, decode: [H, R]; scale: fp32 [R]; widths: integer [C, W]; gradient_basis: [H, R'],
    gradient_scale and gradient_widths alike; dense_offsets: integer [n]; with prediction also predict_in [c F, r] and
    predict_out [r, H], and `tokens`, the run's table. Raises ValueError for missing arrays, wrong shapes, or widths
    that exceed the budget of mask_ratio.
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
        try:
            check_basis_prior(prior, config, hidden_size)
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

        def coder(centre: Tensor, encode: str, decode: str, prefix: str, outliers: Outliers | None) -> _Coder:
            return _Coder(
                centre=centre,
                analysis=matrix_of(prior, encode).to(device=device, dtype=dtype).contiguous(),
                synthesis=matrix_of(prior, decode).T.to(device=device, dtype=dtype).contiguous(),
                scale=prior[f"{prefix}scale"].to(device=device, dtype=torch.float32),
                table=WidthTable(prior[f"{prefix}widths"].tolist()),
                codebook=normal_codebook(device),
                outliers=outliers,
            )

        mean = prior["mean"].to(device=device, dtype=torch.float32)
        zero = torch.zeros_like(mean)
        self._forward = coder(mean, "encode", "decode", "", Outliers(hidden_size, config.outlier_interval))
        self._backward = coder(zero, "gradient_basis", "gradient_basis", "gradient_", None)

    def layout(self, key: CodecKey) -> Layout:
        """`codes` uint8, `gains` uint8 [n], `gain_offset` int16 [1], those of `Outliers`, `dense` bfloat16 [m, H].

        m positions are dense, n = B * T - m are ordinary.
        """
        return self._layout(key, self._forward)

    def gradient_layout(self, key: CodecKey) -> Layout:
        """As forward, without outliers, and with as many codes as the gradient's widths ask for."""
        return self._layout(key, self._backward)

    def byte_count(self, key: CodecKey) -> ByteCount:
        """Forward bytes; the backward direction may differ by a few codes. Outliers count as coded."""
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
        check_finite(payload, ("dense",))
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


def check_basis_prior(prior: Mapping[str, Tensor], config: BasisConfig, hidden_size: int) -> None:
    """Raise ValueError unless arrays fit each other and the hidden size, and codes fit the budget per token."""
    for basis, prefix, interval in (
        ("encode", "", config.outlier_interval),
        ("decode", "", config.outlier_interval),
        ("gradient_basis", "gradient_", None),
    ):
        scale, widths = f"{prefix}scale", f"{prefix}widths"
        missing = {basis, scale, widths, "mean", "dense_offsets"} - set(prior)
        if missing:
            raise ValueError(f"lacks {sorted(missing)}; fit it with fit_basis_prior")
        rank = int(prior[scale].numel())
        check_matrix(prior, basis, (hidden_size, rank), "it was fitted for another model")
        wanted = {scale: (rank,), "mean": (hidden_size,)}
        for name, shape in wanted.items():
            if tuple(prior[name].shape) != shape or not prior[name].is_floating_point():
                raise ValueError(
                    f"{name!r} is {prior[name].dtype} {tuple(prior[name].shape)} where float {shape} was "
                    "expected; it was fitted for another model"
                )
        if not bool(((prior[scale] > 0) & torch.isfinite(prior[scale])).all()):
            raise ValueError(f"{scale!r} must be positive and finite")
        table = WidthTable(prior[widths].tolist())
        if table.coordinates > rank:
            raise ValueError(f"{widths!r} codes {table.coordinates} coordinates, but there are {rank}")
        budget_bits = code_budget_bits(config.mask_ratio, hidden_size, interval)
        if sum(table.token_bits) > table.classes * budget_bits:
            raise ValueError(
                f"{widths!r} spends {sum(table.token_bits) / table.classes:.1f} bits per token where {budget_bits} "
                "are allowed; it was fitted for a lower mask_ratio"
            )
    if prior["dense_offsets"].ndim != 1 or prior["dense_offsets"].is_floating_point():
        raise ValueError("'dense_offsets' must be a vector of integers")
