"""Configuration of the correctors: one frozen model per corrector, joined in a union on `name`.

In all of them `alpha` is the share of the raw gradient that always stays, 1 - alpha the weight of what the
anchors' prior says, and alpha = 1 leaves every bit of the gradient as it was (arXiv 2609.14339; the paper's
defaults are alpha 0.3, tau 1e-3, beta 0.95).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _CorrectorModel(BaseModel):
    """Base of all corrector configurations: immutable, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _PriorModel(_CorrectorModel):
    """What every corrector with a prior has: how the anchors make it, and how long it holds."""

    alpha: float = Field(
        default=0.3, ge=0, le=1, description="share of the raw gradient kept; 1 corrects nothing"
    )
    rank: int | None = Field(
        default=64, ge=1, description="singular triplets of a matrix's prior; None for all of them"
    )
    ema_beta: float = Field(
        default=0.95, ge=0, lt=1, description="decay of the anchors' memory at each clean gradient"
    )
    max_staleness: int = Field(
        default=30,
        ge=1,
        description="steps after which a clean gradient, and a prior, counts for nothing; a prior fades from half "
        "of it on",
    )


class _FilterModel(_PriorModel):
    """What the filters have: Tikhonov weights d_i = s_i / (s_i + tau)."""

    tau: float = Field(
        default=1e-3,
        ge=0,
        description="singular value at which a direction passes half; 0 passes all of them",
    )
    tau_is_relative: bool = Field(
        default=False, description="whether tau is a share of the matrix's largest singular value"
    )


class NoCorrectorConfig(_CorrectorModel):
    """Gradients are applied as they were averaged."""

    name: Literal["none"] = "none"


class SpectralConfig(_FilterModel):
    """The paper's filter: alpha G + (1 - alpha) U D (U' G V) D V'."""

    name: Literal["spectral"] = "spectral"


class OneSidedConfig(_FilterModel):
    """Filters one side only: alpha G + (1 - alpha) U D U' G, or with V from the right."""

    name: Literal["one_sided"] = "one_sided"
    side: Literal["shorter", "left", "right"] = Field(
        default="shorter",
        description="left filters the rows' space (outputs), right the columns' (inputs), shorter the smaller one",
    )


class SignedConfig(_PriorModel):
    """Sizes of the raw gradient with the prior's signs: alpha G + (1 - alpha) |G| sign(M). Can flip descent."""

    name: Literal["signed"] = "signed"


class BiasConfig(_PriorModel):
    """Adds what coding took away: G + (1 - alpha) B. Can flip descent.

    B is the memory of the anchors' dense less coded gradient on one batch.
    """

    name: Literal["bias"] = "bias"


class AdditiveConfig(_PriorModel):
    """Mixes the clean gradient in: alpha G + (1 - alpha) M. Can flip descent."""

    name: Literal["additive"] = "additive"
    # The same M is added at every step until the next one comes, so at one prior in K steps it should weigh about
    # 1 / K: with more, Adam walks K coherent steps along one batch's noise.
    alpha: float = Field(
        default=0.95, ge=0, le=1, description="share of the raw gradient kept; 1 corrects nothing"
    )


CorrectorConfig = Annotated[
    NoCorrectorConfig | SpectralConfig | OneSidedConfig | SignedConfig | BiasConfig | AdditiveConfig,
    Field(discriminator="name"),
]
"""Any corrector's configuration; `name` says which."""

PriorCorrectorConfig = SpectralConfig | OneSidedConfig | SignedConfig | BiasConfig | AdditiveConfig
"""Configuration of a corrector that uses a prior."""
