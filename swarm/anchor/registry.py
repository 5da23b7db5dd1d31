"""From a corrector's configuration to the corrector: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from swarm.anchor.config import (
    AdditiveConfig,
    BiasConfig,
    NoCorrectorConfig,
    OneSidedConfig,
    PriorCorrectorConfig,
    SignedConfig,
    SpectralConfig,
)
from swarm.anchor.corrector import Corrector, NoCorrector
from swarm.anchor.merge import AdditiveCorrector, BiasCorrector, SignedCorrector
from swarm.anchor.prior import SpectralPrior
from swarm.anchor.spectral import OneSidedCorrector, SpectralCorrector


def build_corrector(
    config: NoCorrectorConfig | PriorCorrectorConfig,
    *,
    prior: SpectralPrior | None,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device | str = "cpu",
) -> Corrector:
    """The corrector of a stage under one prior; a new prior gets a new one.

    prior: factors by matrix; None (not here yet) corrects nothing. Whatever in it is unusable corrects nothing either
    and is counted. shapes: the stage's trainable tensors by name (a TrainableSet's names and shapes). device: where
    the averaged gradients are.
    """
    match config:
        case NoCorrectorConfig():
            return NoCorrector()
        case SpectralConfig():
            return SpectralCorrector(config, prior=prior, shapes=shapes, device=device)
        case OneSidedConfig():
            return OneSidedCorrector(config, prior=prior, shapes=shapes, device=device)
        case SignedConfig():
            return SignedCorrector(config, prior=prior, shapes=shapes, device=device)
        case BiasConfig():
            return BiasCorrector(config, prior=prior, shapes=shapes, device=device)
        case AdditiveConfig():
            return AdditiveCorrector(config, prior=prior, shapes=shapes, device=device)


def needs_prior(config: NoCorrectorConfig | PriorCorrectorConfig) -> bool:
    """Whether a corrector of this configuration uses a prior at all."""
    return not isinstance(config, NoCorrectorConfig) and config.alpha < 1.0


def remembers_bias(config: NoCorrectorConfig | PriorCorrectorConfig) -> bool:
    """Whether the anchors remember dense less coded gradients instead of dense ones."""
    return isinstance(config, BiasConfig)
