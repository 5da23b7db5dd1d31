"""Which matrices have a prior, and what the anchors remember of their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from swarm.activation.calibrate import decoder_layers
from swarm.anchor.config import (
    AdditiveConfig,
    BiasConfig,
    CorrectorConfig,
    NoCorrectorConfig,
    SignedConfig,
    SpectralConfig,
)
from swarm.anchor.memory import GradientMemory, coding_bias, target_matrices
from swarm.model.families import SUPPORTED_FAMILIES
from swarm.model.skeleton import build_skeleton
from tests.kit.families import tiny_config

LAYER = "model.layers.0."
SHAPES = {f"{LAYER}mlp.up_proj.weight": (6, 4), f"{LAYER}self_attn.q_proj.weight": (4, 4)}
UP, QUERY = SHAPES


def clean(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def named_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", sorted(SUPPORTED_FAMILIES))
def test_targets_of_every_family_are_the_linear_maps_of_its_layers_but_routers(family: str) -> None:
    model = build_skeleton(tiny_config(family), torch.float32)
    linear = set()
    layers = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    for name, module in model.named_modules():
        # A router has an output per expert, of which the tiny models have 4, or a single one.
        if isinstance(module, nn.Linear) and id(module) in layers and module.out_features not in (1, 4):
            linear.add(f"{name}.weight")
    assert linear
    targets = target_matrices(named_shapes(model))
    assert set(targets) == linear
    assert all(targets[name] == tuple(model.get_parameter(name).shape) for name in targets)


def test_llama_has_q_k_v_o_gate_up_down_and_nothing_else() -> None:
    shapes = named_shapes(build_skeleton(tiny_config("llama"), torch.float32))
    first = [name for name in target_matrices(shapes) if name.startswith(LAYER)]
    assert {name.removeprefix(LAYER).split(".")[1] for name in first} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert len(first) == 7
    assert not [name for name in target_matrices(shapes) if "embed" in name or "lm_head" in name]


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.router.gate.weight",
        "model.layers.3.mlp.shared_expert_gate.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.3.self_attn.q_proj.bias",
        "model.layers.3.mlp.experts.gate_up_proj_bias",
    ],
)
def test_two_dimensions_alone_make_no_target(name: str) -> None:
    assert target_matrices({name: (8, 8)}) == {}


def test_memory_is_the_papers_average_from_zero_on() -> None:
    memory = GradientMemory(SHAPES, beta=0.95, max_staleness=30)
    oracle = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    assert memory.matrices == {}
    assert memory.source_step is None
    for number in range(5):
        gradients = clean(number)
        result = memory.ingest(gradients, source_step=20 * number, step=20 * number + 25)
        assert (result.taken, result.refused) == (2, {})
        for name, gradient in gradients.items():
            oracle[name] = 0.95 * oracle[name] + (1 - 0.95) * gradient.double().numpy()
    assert memory.source_step == 80
    for name, matrix in memory.matrices.items():
        assert matrix.dtype == torch.float32
        np.testing.assert_allclose(matrix.numpy(), oracle[name], rtol=1e-5, atol=1e-7)


def test_what_is_being_factored_does_not_change_under_the_next_gradient() -> None:
    memory = GradientMemory(SHAPES, beta=0.5, max_staleness=30)
    gradients = clean(0)
    memory.ingest(gradients, source_step=0, step=0)
    held = memory.matrices
    copies = {name: matrix.clone() for name, matrix in held.items()}
    gradients[UP].zero_()
    memory.ingest(clean(1), source_step=1, step=1)
    assert all(torch.equal(held[name], copies[name]) for name in held)
    assert not torch.equal(memory.matrices[UP], held[UP])


def test_gradients_of_bf16_are_remembered_in_fp32() -> None:
    memory = GradientMemory(SHAPES, beta=0.5, max_staleness=30)
    gradients = {name: gradient.bfloat16() for name, gradient in clean(0).items()}
    memory.ingest(gradients, source_step=0, step=0)
    assert torch.equal(memory.matrices[UP], 0.5 * gradients[UP].float())


def poisoned(value: float) -> dict[str, Tensor]:
    gradients = clean(7)
    gradients[UP][2, 1] = value
    return gradients


@pytest.mark.parametrize(
    ("gradients", "source_step", "reason"),
    [
        (poisoned(float("nan")), 40, "non_finite"),
        (poisoned(float("inf")), 40, "non_finite"),
        (poisoned(float("-inf")), 40, "non_finite"),
        ({**clean(7), UP: torch.ones(4, 6)}, 40, "misshapen"),
        ({**clean(7), UP: torch.ones(24)}, 40, "misshapen"),
        ({**clean(7), UP: torch.ones(6, 4, dtype=torch.int64)}, 40, "misshapen"),
        ({**clean(7), "lm_head.weight": torch.ones(2, 2)}, 40, "unknown"),
    ],
)
def test_bad_matrices_are_refused_by_reason_and_the_others_taken(
    gradients: dict[str, Tensor], source_step: int, reason: str
) -> None:
    memory = GradientMemory(SHAPES, beta=0.5, max_staleness=30)
    memory.ingest(clean(0), source_step=0, step=0)
    before = memory.matrices
    result = memory.ingest(gradients, source_step=source_step, step=50)
    assert result.refused == {reason: 1}
    assert result.taken == len(gradients) - 1
    assert memory.refused == {reason: 1}
    assert torch.equal(memory.matrices[UP], before[UP]) == (reason != "unknown")
    assert not torch.equal(memory.matrices[QUERY], before[QUERY])


def test_old_early_and_repeated_gradients_are_refused() -> None:
    memory = GradientMemory(SHAPES, beta=0.5, max_staleness=30)
    assert memory.ingest(clean(0), source_step=10, step=41).refused == {"too_old": 2}
    assert memory.ingest(clean(0), source_step=42, step=41).refused == {"early": 2}
    assert memory.matrices == {}
    assert memory.ingest(clean(0), source_step=11, step=41).taken == 2
    before = memory.matrices
    assert memory.ingest(clean(0), source_step=11, step=41).refused == {"repeated": 2}
    assert memory.ingest(clean(0), source_step=10, step=40).refused == {"repeated": 2}
    assert all(torch.equal(memory.matrices[name], before[name]) for name in before)
    assert memory.refused == {"too_old": 2, "early": 2, "repeated": 4}


def test_coding_bias_is_dense_less_coded() -> None:
    dense, coded = clean(0), clean(1)
    for name, bias in coding_bias(dense, coded).items():
        assert torch.equal(bias, dense[name] - coded[name])
    with pytest.raises(ValueError, match="up_proj"):
        coding_bias(dense, {QUERY: coded[QUERY]})
    with pytest.raises(ValueError, match=r"dense gradient \(6, 4\), coded one \(4, 6\)"):
        coding_bias(dense, {**coded, UP: coded[UP].T})


def test_configurations_have_the_papers_defaults_and_only_fields_that_mean_something() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(CorrectorConfig)
    spectral = adapter.validate_python({"name": "spectral"})
    assert isinstance(spectral, SpectralConfig)
    assert (spectral.alpha, spectral.tau, spectral.tau_is_relative) == (0.3, 1e-3, False)
    assert (spectral.rank, spectral.ema_beta, spectral.max_staleness) == (64, 0.95, 30)
    assert isinstance(adapter.validate_python({"name": "none"}), NoCorrectorConfig)
    for settings in (
        {"name": "none", "alpha": 0.5},
        {"name": "spectral", "side": "left"},
        {"name": "signed", "tau": 1e-3},
        {"name": "one_sided", "side": "middle"},
        {"name": "spectral", "alpha": 1.1},
        {"name": "spectral", "ema_beta": 1.0},
        {"name": "spectral", "rank": 0},
        {"name": "spectral", "max_staleness": 0},
        {"name": "other"},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(settings)
    assert SignedConfig().alpha == BiasConfig().alpha == 0.3
    assert AdditiveConfig().alpha == 0.95
