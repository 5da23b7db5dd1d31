"""One row: replicas that train in turn on one model's data, and average as a stage's peers do, bit for bit."""

from __future__ import annotations

import time
from collections import deque
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
from swarm.gradient.gossip import Gossip, pair_of
from swarm.gradient.outer_config import Overlap
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


@dataclass(frozen=True, slots=True)
class Owed:
    """What the replicas had after a step: fp32 [elements] each, and their weights."""

    step: int
    vectors: list[Tensor]
    weights: list[int]


class Replicas:
    """The whole model as one stage, and its members."""

    def __init__(self, config: AveragingRow, prepared: Prepared) -> None:
        self.config, self._prepared, self._averaging = config, prepared, config.averaging_config()
        loop = self._averaging.outer
        self._is_local = loop.name != "every_step"
        # Replicas that average every step have the same weights: one model stands for all.
        self._trainers = [self._trainer() for _ in range(config.replicas if self._is_local else 1)]
        masters = self._trainers[0].masters
        self.layout = TrainableSet.of({name: master.detach() for name, master in masters.items()})
        self.compressors: list[Compressor] = [
            build_averaging(self._averaging, self.layout, config.steps, config.seed)
            for _ in range(config.replicas)
        ]
        start = self._weights(self._trainers[0])
        self._outers = [
            outer
            for _ in self._trainers
            if (outer := build_outer(self._averaging, self.layout, config.steps, start, config.seed))
        ]
        self._overlap, self._owed = Overlap(loop.overlap, config.steps), list[Owed]()
        self._recent: deque[list[int]] = deque(maxlen=loop.every - 1 if loop.name != "every_step" else 0)
        self._data = config.data_config()

    def step(self, step: int, course: Course) -> None:
        """Train a step at every replica, and average what is due, as the rounds of a stage do."""
        batches = self._prepared.step_batches(self._data, step)
        tokens = [batch.loss_tokens for batch in batches]
        began = time.monotonic()
        gradients = self._train(batches, step)
        course.training_s += time.monotonic() - began
        course.sent[step + 1] = course.sent.get(step, 0)
        if self._is_late(step):
            self._settle(
                [owed for owed in self._owed if owed.step == self._overlap.settled(step)], step, course
            )
        if self._outers and self._outers[0].due(step):
            self._owed.append(Owed(step, self._differences(), self._weights_of_steps(tokens)))
        elif not self._outers:
            self._owed.append(Owed(step, gradients, tokens))
        if not self._is_late(step):
            self._settle(self._owed, step, course)
        self._recent.append(tokens)

    def _weights_of_steps(self, tokens: list[int]) -> list[int]:
        """What replicas count in an average of local steps: by the tokens of the last H; where pairs meet, the same."""
        if isinstance(self._outers[0], Gossip):
            return [1] * len(tokens)
        return [sum(each) for each in zip(tokens, *self._recent, strict=True)]

    def evaluate(self) -> float:
        """Held-out loss of the first replica's weights."""
        return self._trainers[0].evaluate(self._prepared.heldout_batches(self._data))

    def _is_late(self, step: int) -> bool:
        """Whether what replicas have after this step is averaged later."""
        return self._overlap.travels(step) or self._overlap.waits(step)

    def _settle(self, owed: list[Owed], step: int, course: Course) -> None:
        """Average and apply with a step's commit; several only of gradients, at the end."""
        if not owed:
            return
        began, last = time.monotonic(), owed[-1]
        vectors, weights = last.vectors, last.weights
        if len(owed) > 1 and not self._outers:
            weights = [sum(each) for each in zip(*(one.weights for one in owed), strict=True)]
            vectors = [
                sum(
                    (one.vectors[i] * one.weights[i] for one in owed[:-1]),
                    last.vectors[i] * last.weights[i],
                )
                / weights[i]
                for i in range(len(weights))
            ]
        for group in self._groups(last.step):
            self._average(group, vectors, weights, last, step, course)
        self._owed = [one for one in self._owed if one not in owed]
        course.averaging_s += time.monotonic() - began

    def _groups(self, step: int) -> list[list[int]]:
        """Who averages with whom."""
        everybody, outer = list(range(self.config.replicas)), self._outers[0] if self._outers else None
        if not isinstance(outer, Gossip) or outer.is_consensus(step):
            return [everybody]
        names = [str(number) for number in everybody]
        pairs = {pair_of(name, names, self.config.seed, 0, step) for name in names}
        return [[int(name) for name in pair] for pair in pairs]

    def _average(
        self,
        group: list[int],
        vectors: list[Tensor],
        weights: list[int],
        owed: Owed,
        step: int,
        course: Course,
    ) -> None:
        phases, most = self.compressors[0].phases(owed.step), LIMITS.averaging_chunk_elements
        if 0 in group:
            course.sent[step + 1] += round_bytes(phases, len(group), most) if len(group) > 1 else 0
        average = vectors[group[0]]
        if len(group) > 1:
            average = average_group(
                [self.compressors[number] for number in group],
                [vectors[number] for number in group],
                [weights[number] for number in group],
                run_seed=self.config.seed,
                step=owed.step,
                most=most,
                robust=self._averaging.robust,
            )[0]
        with torch.no_grad():
            if not self._outers:
                self._trainers[0].gradients = dict(self.layout.views(average))
                with torch.enable_grad():
                    self._trainers[0].apply(step)
                return
            for number in group:
                local = self._weights(self._trainers[number])
                self._outers[number].apply(average, owed.step, local, owed.vectors[number])
                for name, values in self.layout.views(local).items():
                    self._trainers[number].masters[name].copy_(values)

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

    def _train(self, batches: list[Any], step: int) -> list[Tensor]:
        """A step of every replica's own, or its gradient: fp32 [elements] each."""
        if self._outers:
            for trainer, batch in zip(self._trainers, batches, strict=True):
                trainer.step([batch], step)
                trainer.gradients = {}  # of every replica's, hundreds of MB
            return []
        vectors = []
        for batch in batches:
            self._trainers[0].accumulate([batch], None)
            vectors.append(self.layout.flatten(self._trainers[0].gradients))
        return vectors

    def _differences(self) -> list[Tensor]:
        return [
            outer.difference(self._weights(trainer))
            for outer, trainer in zip(self._outers, self._trainers, strict=True)
        ]


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
