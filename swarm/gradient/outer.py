"""Outer loops: replicas take steps of their own, and average how far they have come every so many.

Every replica keeps two sets of weights: local ones, which its own steps change, and global ones, which change only by
averages and are therefore the same bits at all replicas. What is averaged is global minus local, so the outer optimizer
descends along it like along a gradient. A snapshot holds the global weights; a local step leaves nothing that a joiner
would need.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.gradient.fragments import build_fragments
from swarm.gradient.outer_config import LocalStepsConfig, due
from swarm.model.trainable import TrainableSet


class LocalSteps:
    """The outer loop of one stage at one replica.

    globals: fp32 [numel], the weights that all replicas share; momentum: fp32 [numel], of the outer optimizer. Both
    are common state: functions of the averages alone.
    """

    def __init__(
        self,
        config: LocalStepsConfig,
        trainable: TrainableSet,
        total_steps: int,
        start: Tensor,
        run_seed: int = 0,
    ) -> None:
        self.config = config
        self.fragments = build_fragments(config, trainable, run_seed)
        self.globals = start.detach().cpu().clone()
        self.momentum = torch.zeros_like(self.globals)
        self._total_steps = total_steps

    def due(self, step: int) -> tuple[int, ...]:
        """Fragments that are averaged after this step; none after a local one."""
        return due(self.config, len(self.fragments), step, self._total_steps)

    def difference(self, local: Tensor) -> Tensor:
        """Old minus new: fp32 [numel]."""
        return self.globals - local

    def apply(self, average: Tensor, step: int, local: Tensor, own: Tensor | None = None) -> None:
        """Take the averaged difference D of a step (fp32 [numel]; zero in fragments that were not due then) in, for
        what was due:

            m <- mu m + D;   global <- global - lr (mu m + D);   local <- (1 - a) global + a local

        For SPARTA with an overlap, the delta rule: local <- local + (global - (old global - own)). own: fp32 [numel],
        this replica's difference at that step; None for one that began from the global weights since.

        Changes `local` (fp32 [numel]) in place; after the last step a = 0. Raises ValueError, with nothing changed, if
        D is not finite.
        """
        if not bool(torch.isfinite(average).all()):
            raise ValueError(f"the averaged difference of step {step} is not finite")
        config, is_last = self.config, step + 1 == self._total_steps
        keep = 0.0 if is_last else config.keep_local
        adds = config.name == "sparta" and config.overlap > 0 and not is_last
        for number in self.due(step):
            fragment = self.fragments[number]
            part, old = fragment.gather(average), fragment.gather(self.globals)
            # One operation at a time: a fused one rounds differently on another machine.
            momentum = fragment.gather(self.momentum) * config.momentum + part
            ahead = momentum * config.momentum + part
            new = old - ahead * config.learning_rate
            fragment.scatter(momentum, self.momentum)
            fragment.scatter(new, self.globals)
            if adds:
                change = new - old if own is None else (new - old) + fragment.gather(own)
                merged = fragment.gather(local) + change.to(local.device)
            elif keep:
                merged = new.to(local.device) * (1.0 - keep) + fragment.gather(local) * keep
            else:
                merged = new.to(local.device)
            fragment.scatter(merged, local)

    def state(self) -> dict[str, Tensor]:
        """What snapshots hold beside the global weights. A copy."""
        return {"momentum": self.momentum.clone()} if self.config.momentum else {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless this is what `state` gave, or nothing: the state before the first average."""
        if not state:
            return
        wanted = {"momentum"} if self.config.momentum else set()
        if set(state) != wanted:
            raise ValueError(f"outer state has {sorted(wanted)}, not {sorted(state)}")
        for name, value in state.items():
            if value.dtype != torch.float32 or value.shape != self.globals.shape:
                raise ValueError(
                    f"{name} must be float32 {tuple(self.globals.shape)}, got {value.dtype} {tuple(value.shape)}"
                )
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} is not finite")

    def load(self, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Begin from these global weights (fp32 [numel]) and this checked state."""
        self.globals.copy_(weights.detach().cpu())
        self.momentum.zero_()
        if "momentum" in state:
            self.momentum.copy_(state["momentum"])
