"""Clean weight gradients of an anchor's pass, and coded ones, against the uncut model and the reference."""

from __future__ import annotations

import copy

import pytest
import torch

from swarm.activation.config import DenseConfig, MaskConfig
from swarm.activation.registry import build_codec
from swarm.anchor.config import SpectralConfig
from swarm.anchor.factor import exact_factors
from swarm.anchor.gradients import (
    WeightGradients,
    coded_gradients,
    coding_figures,
    corrector_gain,
    dense_gradients,
    without,
)
from swarm.anchor.prior import SpectralPrior
from swarm.anchor.registry import build_corrector
from swarm.optim import OptimizerConfig
from swarm.reference import ReferenceTrainer
from tests.unit.test_anchor_passes import CUTS, batches, model_and_anchor


def codecs(config: DenseConfig | MaskConfig):  # type: ignore[no-untyped-def]
    return [
        build_codec(
            config,
            hidden_size=32,
            boundary=boundary,
            run_seed=5,
            prior=None,
            device="cpu",
            dtype=torch.float32,
        )
        for boundary in range(len(CUTS))
    ]


def reference_gradients(model, config, step: int):  # type: ignore[no-untyped-def]
    """The step's gradient of the mean token loss by the oracle."""
    coded = [None] * len(CUTS) if config is None else codecs(config)
    trainer = ReferenceTrainer(copy.deepcopy(model), CUTS, coded, OptimizerConfig(name="sgd"), 10)
    trainer.step(batches(), step)
    return trainer.gradients


@pytest.mark.parametrize(
    "config", [None, DenseConfig(values="fp32"), MaskConfig(mask_ratio=50.0, values="fp32")]
)
def test_gradients_are_the_references(config: DenseConfig | MaskConfig | None) -> None:
    model, anchor, _ = model_and_anchor()
    if config is None:
        found, errors = dense_gradients(anchor.models, batches()), []
    else:
        found, errors = coded_gradients(anchor.models, batches(), codecs(config), 3)
    expected = reference_gradients(model, config, 3)
    names = [name for stage in found for name in stage]
    assert len(names) == len(set(names)) == 7 * 4
    for stage in found:
        for name, gradient in stage.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4, msg=name)
    if isinstance(config, DenseConfig):
        assert errors == [(0.0, 0.0)] * len(CUTS)
    elif config is not None:
        assert all(0.2 < forward < 0.8 and 0.2 < gradient < 0.8 for forward, gradient in errors)
    assert all(not p.requires_grad for stage in anchor.models for p in stage.causal.parameters())


def test_the_pass_that_samples_boundaries_yields_them_too() -> None:
    _, anchor, _ = model_and_anchor()
    plain = anchor.boundary_samples(batches(), 60)
    with WeightGradients(anchor.models) as gradients:
        sampled = anchor.boundary_samples(batches(), 60, gradients=gradients)
    for one, other in zip(plain, sampled, strict=True):
        assert torch.equal(one.hidden, other.hidden)
        torch.testing.assert_close(one.gradient, other.gradient)
    for found, expected in zip(gradients.sums, dense_gradients(anchor.models, batches()), strict=True):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-7, rtol=1e-4)


def test_collected_elements_are_bounded() -> None:
    _, anchor, _ = model_and_anchor()
    every = dense_gradients(anchor.models, batches(1))
    elements = sum(gradient.numel() for stage in every for gradient in stage.values())
    some = dense_gradients(anchor.models, batches(1), limit=elements // 3)
    assert 0 < sum(gradient.numel() for stage in some for gradient in stage.values()) < elements / 2
    for whole, part in zip(every, some, strict=True):
        assert all(torch.equal(part[name], whole[name]) for name in part)


def test_figures_of_a_batch() -> None:
    _, anchor, _ = model_and_anchor()
    dense = dense_gradients(anchor.models, batches())
    same, errors = coded_gradients(anchor.models, batches(), codecs(DenseConfig(values="fp32")), 0)
    assert coding_figures(dense, same, errors).cosine == pytest.approx(1.0, abs=1e-6)
    coded, errors = coded_gradients(anchor.models, batches(), codecs(MaskConfig(mask_ratio=90.0)), 0)
    figures = coding_figures(dense, coded, errors)
    assert figures.cosine < 0.9 and min(figures.forward_errors) > 0.5

    first, rest = batches()[:1], batches()[1:]
    tokens = [sum(batch.loss_tokens for batch in part) for part in (first, rest)]
    left = without(dense, dense_gradients(anchor.models, first), tokens[0] / sum(tokens))
    for found, expected in zip(left, dense_gradients(anchor.models, rest), strict=True):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-3)


def test_a_corrector_that_knows_the_clean_gradient_brings_a_coded_one_nearer_to_it() -> None:
    _, anchor, _ = model_and_anchor()
    clean = dense_gradients(anchor.models, batches())
    coded, _ = coded_gradients(anchor.models, batches(), codecs(MaskConfig(mask_ratio=50.0)), 0)
    before = [{name: gradient.clone() for name, gradient in stage.items()} for stage in coded]
    correctors = [
        build_corrector(
            SpectralConfig(alpha=0.0, rank=2, tau=0.0),
            prior=SpectralPrior(number, 0, 0, {n: exact_factors(g, 2).factors for n, g in stage.items()}),
            shapes={name: tuple(gradient.shape) for name, gradient in stage.items()},
        )
        for number, stage in enumerate(clean)
    ]
    raw, corrected = corrector_gain(correctors, coded, clean, 0)
    assert 0 < raw < corrected < 1
    for stage, kept in zip(coded, before, strict=True):
        assert all(torch.equal(stage[name], kept[name]) for name in kept)
