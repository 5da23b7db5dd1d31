"""One row: replicas that train in turn on one model's data, and average as a stage's peers do, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.averaging.rows import AveragingRow
from benchmarks.quality.prepare import Prepared
from peers.limits import LIMITS
from swarm.gradient.averaging import build_averaging, build_outer
from swarm.gradient.compressor import Compressor, round_bytes
from swarm.gradient.simulate import average_group
from swarm.model.trainable import TrainableSet
from swarm.reference import ReferenceTrainer

Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Course:
    """curve: held-out loss by version, of weights that all replicas share. sent: payload bytes of the member that sends
    most, by version. elements: trained. training_s, averaging_s: wall seconds of all replicas' steps and rounds.
    """

    curve: dict[int, float] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    elements: int = 0
    training_s: float = 0.0
    averaging_s: float = 0.0


class Replicas:
    """The whole model as one stage, and its members."""

    def __init__(self, config: AveragingRow, prepared: Prepared) -> None:
        self.config, self._prepared, self._averaging = config, prepared, config.averaging_config()
        self._is_local = self._averaging.outer.name != "every_step"
        # Replicas that average every step have the same weights: one model stands for all.
        self._trainers = [self._trainer() for _ in range(config.replicas if self._is_local else 1)]
        masters = self._trainers[0].masters
        self.layout = TrainableSet.of({name: master.detach() for name, master in masters.items()})
        self.compressors: list[Compressor] = [
            build_averaging(self._averaging, self.layout, config.steps, config.seed)
            for _ in range(config.replicas)
        ]
        self.outer = build_outer(
            self._averaging, self.layout, config.steps, self._weights(self._trainers[0]), config.seed
        )
        self._data = config.data_config()

    def step(self, step: int, course: Course) -> None:
        """Train a step at every replica, and average if it is time."""
        batches = self._prepared.step_batches(self._data, step)
        tokens = [batch.loss_tokens for batch in batches]
        began = time.monotonic()
        vectors = self._local_steps(batches, step) if self._is_local else self._gradients(batches)
        course.training_s += time.monotonic() - began
        course.sent[step + 1] = course.sent.get(step, 0)
        phases = self.compressors[0].phases(step)
        if not phases:
            return
        course.sent[step + 1] += round_bytes(phases, self.config.replicas, LIMITS.averaging_chunk_elements)
        began = time.monotonic()
        averages = average_group(
            self.compressors,
            vectors,
            tokens,
            run_seed=self.config.seed,
            step=step,
            most=LIMITS.averaging_chunk_elements,
            robust=self._averaging.robust,
        )
        self._apply(averages[0], step)
        course.averaging_s += time.monotonic() - began

    def evaluate(self) -> float:
        """Held-out loss of the first replica's weights."""
        return self._trainers[0].evaluate(self._prepared.heldout_batches(self._data))

    def _trainer(self) -> ReferenceTrainer:
        return ReferenceTrainer(
            self._prepared.fresh_model(),
            (),
            (),
            self.config.optimizer_config(),
            self.config.steps,
            freeze=frozenset({"embedding", "head"}),
        )

    def _weights(self, trainer: ReferenceTrainer) -> Tensor:
        return self.layout.flatten({name: master.detach() for name, master in trainer.masters.items()})

    def _gradients(self, batches: list[Any]) -> list[Tensor]:
        vectors = []
        for batch in batches:
            self._trainers[0].accumulate([batch], None)
            vectors.append(self.layout.flatten(self._trainers[0].gradients))
        return vectors

    def _local_steps(self, batches: list[Any], step: int) -> list[Tensor]:
        for trainer, batch in zip(self._trainers, batches, strict=True):
            trainer.step([batch], step)
        if self.outer is None or not self.outer.due(step):
            return []
        return [self.outer.difference(self._weights(trainer)) for trainer in self._trainers]

    @torch.no_grad()
    def _apply(self, average: Tensor, step: int) -> None:
        if self.outer is None:
            self._trainers[0].gradients = dict(self.layout.views(average))
            with torch.enable_grad():
                self._trainers[0].apply(step)
            return
        for number, trainer in enumerate(self._trainers):
            local = self._weights(trainer)
            if number == 0:
                self.outer.apply(average, step, local)
            else:
                for due in self.outer.due(step):
                    for span in self.outer.fragments[due].spans:
                        local[span] = self.outer.globals[span]
            for name, values in self.layout.views(local).items():
                trainer.masters[name].copy_(values)


def simulate(config: AveragingRow, prepared: Prepared, progress: Progress) -> Course:
    """Run a row. Raises ValueError for a configuration that makes no sense."""
    replicas = Replicas(config, prepared)
    course = Course(elements=replicas.layout.numel)
    for step in range(config.steps + 1):
        if step % config.eval_every == 0 or step == config.steps:
            progress(step, config.steps, "evaluating")
            course.curve[step] = replicas.evaluate()
        if step < config.steps:
            replicas.step(step, course)
            progress(step + 1, config.steps, "")
    return course
