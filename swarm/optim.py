"""Optimizer of one stage: torch's AdamW or SGD, or AdamS, over fp32 master weights, schedule, per-stage clipping.

Every replica of a stage applies the same averaged gradient with the same optimizer state, so replicas stay
equal. Clipping needs no message across stages: each of the P stages clips its own gradient to
`clip_norm / sqrt(P)`, which bounds the norm of the whole model's gradient by `clip_norm`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from swarm.adams import AdamS

if TYPE_CHECKING:
    from collections.abc import Sequence

Schedule = Literal["constant", "linear", "cosine"]

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adams": ("exp_avg",), "sgd": ("momentum_buffer",)}


class OptimizerConfig(BaseModel):
    """What the run fixes about the optimizer step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["adamw", "adams", "sgd"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0, description="peak learning rate")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW, AdamS: decay of the first moment")
    beta2: float = Field(default=0.98, ge=0, lt=1, description="AdamW, AdamS: decay of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="AdamW, AdamS: added to the root of the second moment")
    weight_decay: float = Field(
        default=0.0, ge=0, description="decoupled decay of tensors with 2 or more dimensions"
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="SGD: momentum")
    skip_zeros: bool = Field(
        default=False,
        description="AdamS: a coordinate whose gradient is exactly zero keeps weight and moment",
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up")
    schedule: Schedule = Field(default="cosine", description="shape after the warm-up")
    final_ratio: float = Field(
        default=0.1, ge=0, le=1, description="last learning rate as a share of the peak"
    )
    clip_norm: float | None = Field(default=1.0, gt=0, description="bound of the model's gradient norm")

    @model_validator(mode="after")
    def _fields_belong_to_the_optimizer(self) -> OptimizerConfig:
        if self.name != "sgd" and self.momentum:
            raise ValueError(
                f"momentum {self.momentum} has no meaning for {self.name}: set beta1, or choose sgd"
            )
        if self.name != "adams" and self.skip_zeros:
            raise ValueError(f"skip_zeros has no meaning for {self.name}: choose adams")
        return self


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (0-based) in a run of `total_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_ratio + (1.0 - config.final_ratio) * shape)


def make_optimizer(
    config: OptimizerConfig, parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer for these fp32 parameters; the learning rate is set before every step."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    if config.name == "adams":
        return AdamS(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            skip_zeros=config.skip_zeros,
        )
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


class StageOptimizer:
    """fp32 master weights of one stage as a single flat vector, and the optimizer over its views.

    master: fp32 [numel], owned by this object. shapes: the trainable tensors in TrainableSet order.
    """

    def __init__(
        self, config: OptimizerConfig, master: Tensor, shapes: Sequence[torch.Size], stages: int
    ) -> None:
        self._config = config
        self._stages = stages
        self.master = master
        self._gradient = torch.zeros_like(master)
        self._parameters: list[torch.nn.Parameter] = []
        offset = 0
        for shape in shapes:
            count = shape.numel()
            parameter = torch.nn.Parameter(master[offset : offset + count].view(shape), requires_grad=True)
            parameter.grad = self._gradient[offset : offset + count].view(shape)
            self._parameters.append(parameter)
            offset += count
        if offset != master.numel():
            raise ValueError(f"shapes hold {offset} elements, the master vector {master.numel()}")
        self._optimizer = make_optimizer(config, self._parameters) if self._parameters else None

    def apply(self, gradient: Tensor, step: int, total_steps: int) -> float:
        """Clip and take one optimizer step on `gradient` (fp32 [numel]).

        Returns the gradient's norm before clipping. Raises ValueError, leaving weights and moments as they
        were, if the gradient is not finite.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            raise ValueError(f"the averaged gradient of step {step} is not finite (norm {norm})")
        if self._optimizer is None:
            return norm
        self._gradient.copy_(gradient)
        if self._config.clip_norm is not None:
            limit = self._config.clip_norm / math.sqrt(self._stages)
            if norm > limit:
                self._gradient.mul_(limit / norm)
        rate = learning_rate(self._config, step, total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and step counts as named tensors, for safetensors."""
        state: dict[str, Tensor] = {}
        if self._optimizer is None:
            return state
        for index, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"{index}.{name}"] = value
        return state

    def state_layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of `state_dict` after a step; before the first one it is empty."""
        moments = _MOMENTS[self._config.name]
        if self._optimizer is None or (self._config.name == "sgd" and not self._config.momentum):
            return {}
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for index, parameter in enumerate(self._parameters):
            if self._config.name == "adamw":
                layout[f"{index}.step"] = ((), torch.float32)
            layout |= {f"{index}.{name}": (tuple(parameter.shape), torch.float32) for name in moments}
        return layout

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned; an empty one is that of an optimizer before its first step.

        Raises ValueError for a tensor that belongs to no parameter; nothing is changed then.
        """
        if self._optimizer is None:
            return
        restored: dict[int, dict[str, Any]] = {}
        for key, value in state.items():
            index, _, name = key.partition(".")
            if not index.isdigit() or int(index) >= len(self._parameters):
                raise ValueError(
                    f"optimizer state {key!r} belongs to none of {len(self._parameters)} parameters"
                )
            parameter = self._parameters[int(index)]
            restored.setdefault(int(index), {})[name] = value.to(parameter.device, copy=True)
        self._optimizer.state.clear()
        for number, values in restored.items():
            self._optimizer.state[self._parameters[number]] = values
