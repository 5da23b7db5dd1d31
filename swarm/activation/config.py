"""Configuration of the boundary codecs: one frozen model per codec, joined in a union on `name`.

Ratios are turned into counts of coordinates and bytes here, by integer arithmetic only, so that every
peer derives the same layout from the same manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

BF16_BYTES = 2
"""Bytes of one uncoded value: what a mask ratio is measured against."""

SCALE_BYTES = 2
"""Bytes of a per-token scale (bfloat16) of the int8 mask."""

GAIN_BYTES = 1
"""Bytes of a token's gain code of the basis codec."""


Prediction = Literal["none", "token", "context"]
"""What hidden states are predicted from, at both ends. token: E[t_i], the token's row of the embedding. context:
E[t_i], E[t_(i-1)] (0 at a document's start), and the mean of E[t_j] over the document so far, i included."""


class _CodecModel(BaseModel):
    """Base of all codec configurations: immutable, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DenseConfig(_CodecModel):
    """Everything crosses the boundary."""

    name: Literal["dense"] = "dense"
    values: Literal["bf16", "fp32"] = Field(default="bf16", description="number format on the wire")


def _check_tenths(value: float) -> float:
    """Refuse ratios finer than a tenth of a percent, which integer layouts cannot express."""
    if abs(value * 10 - round(value * 10)) > 1e-6:
        raise ValueError(f"mask_ratio {value} has more than one decimal; use steps of 0.1 percent")
    return value


class MaskConfig(_CodecModel):
    """A seeded random mask: the same support forward and backward, and no index travels."""

    name: Literal["mask"] = "mask"
    mask_ratio: float = Field(default=95.0, ge=0, lt=100, description="percent of the coordinates not sent")
    values: Literal["bf16", "int8", "fp32"] = Field(
        default="bf16", description="number format of kept coordinates; int8 adds a 2-byte scale per token"
    )
    fill: Literal["zero", "mean"] = Field(
        default="zero", description="what the receiver puts where nothing was sent; mean needs a prior"
    )
    rescale: Literal["none", "const", "rms"] = Field(
        default="none",
        description="factor on kept coordinates: none 1, const H/k (unbiased), rms sqrt(H/k) (keeps the rms)",
    )

    _tenths = field_validator("mask_ratio")(_check_tenths)


class BasisConfig(_CodecModel):
    """A few bits per coordinate in fitted bases: Fisher-weighted for hidden states, principal for gradients."""

    name: Literal["basis"] = "basis"
    mask_ratio: float = Field(
        default=90.0, ge=0, lt=100, description="percent of a dense token's bytes not sent"
    )
    calibration_microbatches: int = Field(
        default=32, ge=1, description="microbatches passed unmasked through the model to fit the prior"
    )
    calibration_tokens: int = Field(
        default=16384,
        ge=256,
        description="tokens kept per boundary for the fit, drawn from those microbatches",
    )
    token_classes: int = Field(
        default=16,
        ge=1,
        le=64,
        description="classes of tokens by magnitude, each with its own bits per coordinate",
    )
    outlier_interval: int = Field(
        default=128,
        ge=2,
        description="one ordinary token in this many, those with the largest values, sends its 8 largest in full",
    )
    fisher_ridge: float = Field(
        default=0.1, gt=0, description="share of the mean gradient variance added to the metric's diagonal"
    )
    dense_offset_limit: int = Field(
        default=8,
        ge=1,
        description="document offsets examined for massive activations (offset 0 is always dense)",
    )
    dense_norm_factor: float = Field(
        default=8.0, gt=1, description="an offset is dense when its mean norm exceeds this many median norms"
    )

    prediction: Prediction = Field(
        default="none",  # what a manifest without the field means; `init` sets it
        description="what hidden states are predicted from at both ends, so that only the rest is sent: none, the "
        "token, or the token, the one before and the mean of the document so far",
    )
    prediction_rank: int = Field(
        default=0, ge=0, description="rank of the prediction; 0 is half of the hidden size"
    )
    prediction_ridge: float = Field(
        default=0.02,
        gt=0,
        description="share of the mean feature variance added to the regression's diagonal",
    )

    _tenths = field_validator("mask_ratio")(_check_tenths)


CodecConfig = Annotated[DenseConfig | MaskConfig | BasisConfig, Field(discriminator="name")]
"""Any codec's configuration; `name` says which."""


def kept_permille(mask_ratio: float) -> int:
    """Thousandths of a boundary's bytes that are sent at a mask ratio in percent."""
    return 1000 - round(mask_ratio * 10)


def kept_coordinates(mask_ratio: float, hidden_size: int) -> int:
    """Coordinates k per token of the mask: (1 - p) H rounded half up, at least 1."""
    return max(1, (2 * kept_permille(mask_ratio) * hidden_size + 1000) // 2000)


def token_budget_bytes(mask_ratio: float, hidden_size: int) -> int:
    """Bytes an ordinary token may cost on average, scale included: floor((1 - p) * 2 H)."""
    return kept_permille(mask_ratio) * BF16_BYTES * hidden_size // 1000


def prediction_rank(config: BasisConfig, hidden_size: int) -> int:
    """Largest rank of the prediction at hidden size H."""
    return min(config.prediction_rank or max(1, hidden_size // 2), hidden_size)


def code_budget_bits(mask_ratio: float, hidden_size: int, outlier_interval: int | None) -> int:
    """Mean bits per ordinary token that `basis` may spend on codes, after gains and outliers (None: without).

    Codes of this mean keep n tokens within n budgets of (1 - p) * 2 H bytes, and 3 bytes for the gains' offset and
    the rest of a byte:  n / I * outliers + n * codes + n * gain <= n * budget. Raises ValueError when less than a
    byte is left.
    """
    budget = kept_permille(mask_ratio) * 8 * BF16_BYTES * hidden_size // 1000
    codes = budget - 8 * GAIN_BYTES
    if outlier_interval is not None:
        codes -= -(-8 * outlier_token_bytes(hidden_size) // outlier_interval)
    if codes < 8:
        raise ValueError(
            f"mask_ratio {mask_ratio} leaves {budget} bits per token at hidden size {hidden_size}, too few for a "
            "gain, outliers and coordinates; lower mask_ratio or raise outlier_interval"
        )
    return codes


def outlier_values(hidden_size: int) -> int:
    """Values that an outlier token sends in full."""
    return min(8, hidden_size)


def outlier_token_bytes(hidden_size: int) -> int:
    """Bytes of an outlier token besides its codes: its index, and channel and value of its largest values."""
    return 4 + outlier_values(hidden_size) * (2 + BF16_BYTES)
