"""The correctors of a peer's stage: one for each prior that it holds, and what they did.

A step's averaged gradients are corrected by the prior that the step's group has named (`peers.rounds`): the one of
the plan if every member of the group holds it, none otherwise. So all members correct alike, nobody waits for a
prior, and whoever catches up finds the prior's hash in the step's update. Held and loaded in the communication
loop's threads, applied on the compute thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.compute import Correct
from swarm.anchor.config import NoCorrectorConfig, PriorCorrectorConfig
from swarm.anchor.corrector import CorrectionReport, Corrector, unusable
from swarm.anchor.diagnostics import singular_value_quantiles
from swarm.anchor.memory import target_matrices
from swarm.anchor.prior import load_spectral_prior, prior_specs
from swarm.anchor.prior_file import PriorFileError, prior_bytes_limit
from swarm.anchor.registry import build_corrector
from swarm.model.trainable import TrainableSet

WRONG = frozenset({"wrong_shape", "non_finite", "no_basis"})
"""What no honest anchor's factors are; a cold matrix is nothing wrong."""


class HeldCorrector:
    """A corrector, and what its prior is like. step: of the weights behind it. quantiles: of its singular values."""

    def __init__(self, corrector: Corrector, step: int, quantiles: tuple[float, ...]) -> None:
        self.corrector, self.step, self.quantiles = corrector, step, quantiles


class Corrections:
    """See the module.

    config: the run's corrector. trainable: the stage's tensors. device: where its gradients are.
    counters: matrices corrected, and passed by reason (`passed_...`); steps that went uncorrected because a member
    of the group lacked the prior (`withheld`). report, seconds: of the last corrected step. expected: the prior
    that the plan in force names. limit_bytes: largest file that can be a prior of this stage.
    """

    def __init__(
        self,
        config: NoCorrectorConfig | PriorCorrectorConfig,
        stage: int,
        trainable: TrainableSet,
        device: torch.device | str,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.report: CorrectionReport | None = None
        self.seconds = 0.0
        self.expected = ""
        self._config, self._stage, self._device = config, stage, device
        self._shapes = dict(zip(trainable.names, trainable.shapes, strict=True))
        rank = None if isinstance(config, NoCorrectorConfig) else config.rank
        self.limit_bytes = prior_bytes_limit(prior_specs(target_matrices(self._shapes), rank))
        self._held: dict[str, HeldCorrector] = {}
        self._last = ""

    def holds(self, sha256: str) -> bool:
        """Whether steps under this prior can be corrected here; "" is no prior, which nobody lacks."""
        return not sha256 or sha256 in self._held

    def load(self, path: Path) -> HeldCorrector:
        """Make a prior's corrector. Raises PriorFileError for a file that is no prior of this stage, ValueError for
        factors that no matrix of it can have, OSError. May run in any thread.
        """
        config = self._config
        if isinstance(config, NoCorrectorConfig):
            raise PriorFileError("this run corrects nothing")
        targets = target_matrices(self._shapes)
        prior = load_spectral_prior(path, targets, config.rank)
        if prior.stage != self._stage:
            raise PriorFileError(f"it is the corrector's prior of stage {prior.stage}")
        for name, factors in prior.factors.items():
            reason = unusable(factors, targets[name])
            if reason in WRONG:
                raise ValueError(f"the factors of {name!r} cannot be used: {reason}")
        corrector = build_corrector(config, prior=prior, shapes=self._shapes, device=self._device)
        return HeldCorrector(corrector, prior.step, singular_value_quantiles(prior.factors))

    def add(self, sha256: str, held: HeldCorrector) -> None:
        """Hold a corrector by its prior's hash."""
        self._held[sha256] = held

    def retain(self, wanted: Collection[str]) -> None:
        """Let go of all but these."""
        for sha256 in [sha256 for sha256 in self._held if sha256 not in wanted]:
            del self._held[sha256]

    def of(self, sha256: str) -> Correct | None:
        """What corrects a step under this prior; None for "". Raises KeyError if it is not held."""
        if not sha256:
            self.counters["withheld"] += bool(self.expected)
            return None
        held = self._held[sha256]

        def correct(gradients: Mapping[str, Tensor], step: int) -> None:
            began = time.perf_counter()
            report = held.corrector(gradients, step)
            self.seconds, self.report, self._last = time.perf_counter() - began, report, sha256
            self.counters["corrected"] += report.corrected
            for reason, count in report.passed.items():
                self.counters[f"passed_{reason}"] += count

        return correct

    def status(self) -> dict[str, Any]:
        """Figures of the last corrected step, and of the life so far, as plain JSON values."""
        report, last = self.report, self._held.get(self._last)
        figures: dict[str, Any] = {"counters": dict(self.counters)}
        if report is not None:
            figures |= {
                "step": report.step,
                "prior_step": report.prior_step,
                "weight": report.weight,
                "corrected": report.corrected,
                "passed": dict(report.passed),
                "mean_filter_weight": report.mean_filter_weight,
                "eta": report.eta,
                "cosine": report.cosine,
                "relative_change": report.relative_change,
                "seconds": round(self.seconds, 6),
                "singular_values": list(last.quantiles) if last is not None else [],
            }
        return figures
