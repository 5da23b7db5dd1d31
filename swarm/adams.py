"""AdamS: Adam without a second moment (arXiv 2505.16363)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamS(torch.optim.Optimizer):
    """m_t = b1 m_{t-1} + (1 - b1) g;  v = b2 m_{t-1}^2 + (1 - b2) g^2;
    theta = (1 - lr wd) theta - lr m_t / (sqrt(v) + eps).

    m starts at zero and is the only state ("exp_avg", shaped like its parameter); there is no bias correction. For
    g = 0 this is a step of b1 / sqrt(b2) lr along the sign of m, however small m is (until eps): with skip_zeros
    coordinates whose gradient is exactly zero keep m and theta instead, which averages of few coordinates want.
    Groups as torch's AdamW has them: "params", and "weight_decay" if it is not 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        skip_zeros: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "skip_zeros": skip_zeros,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step along the gradients; a parameter without one is left alone. closure: not supported, None."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        moment = state["exp_avg"]
        root = (moment.square() * beta2 + gradient.square() * (1 - beta2)).sqrt_().add_(group["eps"])
        moved = moment * beta1 + gradient * (1 - beta1)
        theta = parameter * (1 - group["lr"] * group["weight_decay"]) - moved / root * group["lr"]
        if group["skip_zeros"]:
            is_zero = gradient == 0
            moved = torch.where(is_zero, moment, moved)
            theta = torch.where(is_zero, parameter, theta)
        moment.copy_(moved)
        parameter.copy_(theta)
