"""AdamS against its equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from swarm.optim import OptimizerConfig, StageOptimizer, learning_rate

SHAPES = [torch.Size((4, 3)), torch.Size((5,))]
NUMEL, TOTAL = 17, 12


def draw(seed: int, zeros: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(NUMEL, generator=generator)
    return values * (torch.rand(NUMEL, generator=generator) >= zeros)


def stage_of(**fields: Any) -> StageOptimizer:
    config = OptimizerConfig(name="adams", clip_norm=None, **fields)
    return StageOptimizer(config, draw(0), SHAPES, stages=1)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(1, 10**6),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.0, 0.95]),
    decay=st.sampled_from([0.0, 0.1]),
    skip=st.booleans(),
)
def test_steps_follow_the_equations(seed: int, beta1: float, beta2: float, decay: float, skip: bool) -> None:
    fields: dict[str, Any] = {"learning_rate": 0.02, "eps": 1e-6, "weight_decay": decay, "warmup_steps": 2}
    stage = stage_of(beta1=beta1, beta2=beta2, skip_zeros=skip, **fields)
    config = OptimizerConfig(name="adams", clip_norm=None, **fields)
    theta, m = draw(0).double().numpy(), np.zeros(NUMEL)
    # Weights of two dimensions decay, as with adamw.
    wd = np.array([decay] * 12 + [0.0] * 5)
    for step in range(6):
        gradient = draw(seed + step, zeros=0.4)
        g, rate = gradient.double().numpy(), learning_rate(config, step, TOTAL)
        v = beta2 * m**2 + (1 - beta2) * g**2
        new = beta1 * m + (1 - beta1) * g
        moved = (1 - rate * wd) * theta - rate * new / (np.sqrt(v) + 1e-6)
        theta = np.where((g == 0) & skip, theta, moved)
        m = np.where((g == 0) & skip, m, new)
        stage.apply(gradient, step, TOTAL)
        np.testing.assert_allclose(stage.master.double().numpy(), theta, rtol=1e-4, atol=1e-5)


def test_only_the_first_moment_is_kept_and_restored() -> None:
    stage = stage_of()
    assert stage.state_dict() == {}
    stage.apply(draw(1), 0, TOTAL)
    state = {name: value.clone() for name, value in stage.state_dict().items()}
    layout = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    assert (
        layout
        == stage.state_layout()
        == {
            "0.exp_avg": ((4, 3), torch.float32),
            "1.exp_avg": ((5,), torch.float32),
        }
    )
    other = StageOptimizer(OptimizerConfig(name="adams", clip_norm=None), stage.master.clone(), SHAPES, 1)
    other.load_state_dict(state)
    stage.apply(draw(2), 1, TOTAL)
    other.apply(draw(2), 1, TOTAL)
    assert torch.equal(stage.master, other.master)


def test_coordinate_without_gradient_goes_on_moving_unless_zeros_are_skipped() -> None:
    gone = {}
    for skip in (False, True):
        stage = stage_of(skip_zeros=skip, learning_rate=0.01, schedule="constant")
        stage.apply(torch.ones(NUMEL), 0, TOTAL)
        before = stage.master.clone()
        for step in range(1, 6):
            stage.apply(torch.zeros(NUMEL), step, TOTAL)
        gone[skip] = float((stage.master - before).abs().max())
    assert gone[True] == 0.0
    assert gone[False] == pytest.approx(5 * 0.01 * 0.9 / 0.98**0.5, rel=1e-3)


def test_fields_of_other_optimizers_are_refused() -> None:
    with pytest.raises(ValidationError, match="no meaning for adams"):
        OptimizerConfig(name="adams", momentum=0.9)
    for name in ("adamw", "sgd"):
        with pytest.raises(ValidationError, match="skip_zeros has no meaning"):
            OptimizerConfig(name=name, skip_zeros=True)
