from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from swarm.optim import OptimizerConfig, StageOptimizer, learning_rate

SHAPES = [torch.Size((4, 3)), torch.Size((5,)), torch.Size((2, 2, 2))]
NUMEL = sum(shape.numel() for shape in SHAPES)
TOTAL = 20


def gradients(steps: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(NUMEL, generator=generator) for _ in range(steps)]


def start() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


def views(flat: Tensor) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def torch_alone(config: OptimizerConfig, steps: list[Tensor], limit: float | None) -> Tensor:
    """The same steps by torch's optimizer over separate tensors."""
    parameters = [torch.nn.Parameter(view.clone()) for view in views(start())]
    decays = [config.weight_decay if p.ndim >= 2 else 0.0 for p in parameters]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(parameters, decays, strict=True)]
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(config.beta1, config.beta2), eps=config.eps)
    for step, gradient in enumerate(steps):
        for parameter, view in zip(parameters, views(gradient), strict=True):
            parameter.grad = view.clone()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, TOTAL)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in parameters])


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(name="adamw", clip_norm=None, weight_decay=0.1, warmup_steps=2),
        OptimizerConfig(name="adamw", clip_norm=1.0, learning_rate=0.01, schedule="linear"),
        OptimizerConfig(
            name="sgd", clip_norm=None, learning_rate=0.1, schedule="constant", weight_decay=0.01
        ),
        OptimizerConfig(name="sgd", clip_norm=0.5, learning_rate=0.1, momentum=0.9),
    ],
)
def test_stage_steps_are_torchs_steps(config: OptimizerConfig) -> None:
    stage = StageOptimizer(config, start(), SHAPES, stages=1)
    for step, gradient in enumerate(gradients(6)):
        stage.apply(gradient, step, TOTAL)
    expected = torch_alone(config, gradients(6), config.clip_norm)
    torch.testing.assert_close(stage.master, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stages", [1, 4, 9])
def test_each_of_p_stages_clips_to_its_share_of_the_norm(stages: int) -> None:
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", clip_norm=0.6)
    stage = StageOptimizer(config, start(), SHAPES, stages)
    norm = stage.apply(gradients(1)[0], 0, TOTAL)
    assert norm == pytest.approx(float(gradients(1)[0].norm()))
    moved = float((stage.master - start()).norm())
    assert moved == pytest.approx(0.6 / math.sqrt(stages), rel=1e-4)


def test_gradient_below_the_bound_is_not_scaled() -> None:
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", clip_norm=10.0)
    stage = StageOptimizer(config, start(), SHAPES, stages=4)
    small = gradients(1, scale=0.1)[0]
    stage.apply(small, 0, TOTAL)
    torch.testing.assert_close(stage.master, start() - small)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    stage = StageOptimizer(OptimizerConfig(), start(), SHAPES, stages=2)
    stage.apply(gradients(1)[0], 0, TOTAL)
    before, moments = stage.master.clone(), {k: v.clone() for k, v in stage.state_dict().items()}
    poisoned = gradients(1)[0]
    poisoned[:2] = bad
    with pytest.raises(ValueError, match="step 1 is not finite"):
        stage.apply(poisoned, 1, TOTAL)
    assert torch.equal(stage.master, before)
    assert all(torch.equal(v, moments[k]) for k, v in stage.state_dict().items())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_restored_optimizer_goes_on_as_if_never_interrupted(name: str) -> None:
    config = OptimizerConfig(name=name, momentum=0.9 if name == "sgd" else 0.0)  # type: ignore[arg-type]
    whole = StageOptimizer(config, start(), SHAPES, stages=2)
    for step, gradient in enumerate(gradients(6)):
        whole.apply(gradient, step, TOTAL)
        if step == 2:
            master, state = whole.master.clone(), {k: v.clone() for k, v in whole.state_dict().items()}
    again = StageOptimizer(config, master, SHAPES, stages=2)
    again.load_state_dict(state)
    for step, gradient in enumerate(gradients(6)[3:], start=3):
        again.apply(gradient, step, TOTAL)
    assert torch.equal(again.master, whole.master)


def test_state_of_another_model_is_refused() -> None:
    stage = StageOptimizer(OptimizerConfig(), start(), SHAPES, stages=1)
    for key in ("3.exp_avg", "x.exp_avg", "exp_avg", "-1.step"):
        with pytest.raises(ValueError, match="belongs to none of 3"):
            stage.load_state_dict({key: torch.zeros(1)})


def test_shapes_must_fill_the_master_vector() -> None:
    with pytest.raises(ValueError, match=f"{NUMEL} elements, the master vector {NUMEL + 1}"):
        StageOptimizer(OptimizerConfig(), torch.zeros(NUMEL + 1), SHAPES, stages=1)


def test_stage_without_trainable_tensors_applies_nothing() -> None:
    stage = StageOptimizer(OptimizerConfig(), torch.zeros(0), [], stages=3)
    assert stage.apply(torch.zeros(0), 0, TOTAL) == 0.0
    assert stage.state_dict() == {}


@given(
    st.integers(0, 50),
    st.integers(1, 300),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
)
def test_rate_rises_to_its_peak_and_ends_at_its_share(
    warmup: int, total: int, schedule: str, final: float
) -> None:
    config = OptimizerConfig(
        learning_rate=2.0,
        warmup_steps=warmup,
        schedule=schedule,
        final_ratio=final,  # type: ignore[arg-type]
    )
    rates = [learning_rate(config, step, total) for step in range(total + warmup + 2)]
    assert all(0.0 < rate <= 2.0 for rate in rates[:warmup])
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup] == pytest.approx(2.0)
    after = rates[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    expected = 2.0 if schedule == "constant" else 2.0 * final
    assert rates[-1] == pytest.approx(expected)


def test_unknown_or_senseless_settings_are_refused() -> None:
    for settings in (
        {"lr": 1e-3},
        {"learning_rate": 0},
        {"name": "adamw", "momentum": 0.9},
        {"clip_norm": 0},
    ):
        with pytest.raises(ValidationError):
            OptimizerConfig(**settings)  # type: ignore[arg-type]
