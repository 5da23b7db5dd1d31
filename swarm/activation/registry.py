"""From a codec's configuration to the codec: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.activation.base import BoundaryCodec, Layout
from swarm.activation.basis import BasisCodec
from swarm.activation.config import BasisConfig, DenseConfig, MaskConfig
from swarm.activation.dense import DenseCodec
from swarm.activation.mask import MaskCodec
from swarm.activation.tokens import TokenTable


def build_codec(
    config: DenseConfig | MaskConfig | BasisConfig,
    *,
    hidden_size: int,
    boundary: int,
    run_seed: int,
    prior: Mapping[str, Tensor] | None,
    device: torch.device | str,
    dtype: torch.dtype,
    tokens: TokenTable | None = None,
) -> BoundaryCodec:
    """The codec of one boundary.

    boundary: ordinal of the boundary (b lies between stages b and b + 1). run_seed: the run's seed. prior:
    the boundary's fitted arrays, for codecs that need them (`needs_prior`). device: where tensors are
    encoded. dtype: compute dtype of decoded tensors. tokens: the run's token table on that device, for codecs that
    predict (`needs_tokens`). Raises ValueError when a prior or the table is missing or misshapen.
    """
    if isinstance(config, DenseConfig):
        return DenseCodec(config, hidden_size=hidden_size, dtype=dtype)
    if isinstance(config, MaskConfig):
        return MaskCodec(
            config,
            hidden_size=hidden_size,
            boundary=boundary,
            run_seed=run_seed,
            device=device,
            dtype=dtype,
            mean=None if prior is None else prior.get("mean"),
        )
    if prior is None:
        raise ValueError(
            f"codec basis needs a fitted prior for boundary {boundary}; create the run with calibration, or "
            "use codec mask or dense"
        )
    return BasisCodec(
        config,
        hidden_size=hidden_size,
        boundary=boundary,
        prior=prior,
        device=device,
        dtype=dtype,
        tokens=tokens,
    )


def needs_prior(config: DenseConfig | MaskConfig | BasisConfig) -> bool:
    """Whether `build_codec` needs a prior for this configuration."""
    return isinstance(config, BasisConfig) or (isinstance(config, MaskConfig) and config.fill == "mean")


def needs_tokens(config: DenseConfig | MaskConfig | BasisConfig) -> bool:
    """Whether `build_codec` needs the run's token table for this configuration."""
    return isinstance(config, BasisConfig) and config.prediction != "none"


def payload_bytes(layout: Layout) -> int:
    """Bytes of a payload with this layout, without framing."""
    return sum(spec.nbytes for spec in layout.values())
