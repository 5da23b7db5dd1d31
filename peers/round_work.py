"""What a round computes at one member: what it contributes, and what a commit does to its weights.

Without an outer loop the members average gradients, and every commit is an optimizer step on the average. With one
(`swarm.gradient.outer`) a commit after a local step is an optimizer step on the member's own gradient, and nothing is
exchanged; when averages are due the member takes its own step first, on trial, and contributes how far it has come
since the last ones; the commit takes the outer step. Jobs run on the compute thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from peers.compute import Correct, StageCompute, bytes_per_step, take_step
from peers.corrections import Corrections
from peers.engine import Engine, JobPriority
from peers.exchange import Exchange, ExchangeError, alone_digest
from peers.round_messages import Commit, Group
from peers.updates import Update, alone_update, exchanged_update, local_update
from swarm.gradient.compressor import Compression
from swarm.sketch import slice_span

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Average:
    """What this member would apply. average: fp32 [numel]; empty after a local step. tokens: loss tokens of its own
    ledger. compression: what moves the compressor's state on; None where nothing was exchanged.
    """

    group: str
    digest: str
    average: Tensor
    update: Update
    tokens: int
    compression: Compression | None


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Most tokens of a microbatch, and of a step."""

    microbatch: int
    step: int


class RoundWork:
    """See the module. sizes: what bounds a member's weight."""

    def __init__(
        self,
        compute: StageCompute,
        engine: Engine,
        corrections: Corrections,
        sizes: StepSizes,
        run_id: str,
        stage: int,
        me: str,
    ) -> None:
        self._compute, self._engine, self._corrections = compute, engine, corrections
        self._run_id, self._stage, self._me, self._sizes = run_id, stage, me, sizes
        outer = compute.outer
        moved = bytes_per_step(compute.compressor, outer.config.every if outer is not None else 1)
        self.compression = 2 * compute.trainable.numel / moved if moved else 0.0
        """Bytes of the weights as bf16 over those of an average, in the mean over steps; 0 if nothing is averaged."""
        self._recent: deque[int] = deque(maxlen=outer.config.every - 1 if outer is not None else 0)

    def is_local(self, step: int) -> bool:
        """Whether nothing is averaged after this step."""
        return self._compute.outer is not None and not self._compute.outer.due(step)

    def weight(self, step: int, tokens: int) -> int:
        """A member's weight in the round of a step. tokens: loss tokens of its ledger of the step.

        Where averages are due that come from several steps, it is the tokens of all of these.
        """
        if self._compute.outer is None or self.is_local(step):
            return tokens
        return tokens + sum(self._recent)

    def most_weight(self, step: int, microbatches: int) -> int:
        """What a member with so many microbatches of a step can weigh at most, by the run's own sizes."""
        own, outer = microbatches * self._sizes.microbatch, self._compute.outer
        if outer is None or self.is_local(step):
            return own
        return own + (outer.config.every - 1) * self._sizes.step

    def slice_span(self, step: int) -> tuple[int, int]:
        """The leader's weights that go along: their share is of what the round moves, as values of two bytes."""
        numel = self._compute.trainable.numel
        moved = sum(phase.codec.nbytes(phase.elements) for phase in self._compute.compressor.phases(step))
        return slice_span(step, numel, min(numel, moved // 2))

    def restart(self) -> None:
        """The weights are others now: what led to the ones before counts no more."""
        self._recent.clear()

    async def average(self, group: Group, exchange: Exchange | None, lineage: str, tokens: int) -> Average:
        """Make the average of an attempt. exchange: None for a group that exchanges nothing. lineage: of the weights
        before. tokens: loss tokens of this member's frozen ledger.

        Raises ExchangeError, FrameError.
        """
        compute, weight = self._compute, group.weights[group.members.index(self._me)]
        empty = torch.empty(0)
        if self.is_local(group.step):
            update = local_update(
                group, compute.trainable.numel, run=self._run_id, stage=self._stage, lineage=lineage
            )
            return Average(group.id, update.digest, empty, update, tokens, None)
        contribution = await self._contribution(group, weight, tokens)
        if exchange is None:
            # A group of one skips exchange and compressor.
            update = alone_update(group, contribution, run=self._run_id, stage=self._stage, lineage=lineage)
            digest = alone_digest(group.id, group.corrector)
            return Average(group.id, digest, contribution, update, tokens, None)
        own: Tensor | None = None
        if group.leader == self._me:
            own = await self._submit(compute.read_slice, *self.slice_span(group.step))
        compression = await self._submit(compute.compressor.begin, contribution, group.step, weight)
        average, digest = await exchange.run(compression, own)
        update = exchanged_update(
            exchange, run=self._run_id, stage=self._stage, lineage=lineage, digest=digest
        )
        return Average(group.id, digest, average, update, tokens, compression)

    async def apply(self, held: Average, commit: Commit) -> float | None:
        """Do what a commit says; returns the norm of the gradient, or of the averaged difference.

        None if there was nothing to apply. Raises ValueError for what is not finite: nothing is applied then.
        """
        compute, update = self._compute, held.update
        if commit.weight == 0:
            await self._submit(compute.clear)
            self._recent.append(0)
            return None
        self._recent.append(held.tokens)
        if self.is_local(commit.step):
            if not held.tokens:
                await self._submit(compute.clear)
                return None
            correct = self._corrections.of(update.corrector)
            return await self._submit(_take_local_step, compute, held.tokens, commit.step, correct)
        if held.compression is not None:
            await self._submit(held.compression.commit)
        # An outer step corrects nothing: the gradients behind it were corrected one by one.
        correct = self._corrections.of(update.corrector) if compute.outer is None else None
        return await self._submit(take_step, compute, held.average, commit.step, update.slice, correct)

    async def _contribution(self, group: Group, weight: int, tokens: int) -> Tensor:
        compute = self._compute
        if compute.outer is None:
            return await self._submit(compute.contribution, weight)
        if not self._corrections.holds(group.corrector):  # it was let go of since this member reported it
            raise ExchangeError(
                "schema", f"the corrector's prior {group.corrector[:12]} is not here any more"
            )
        correct = self._corrections.of(group.corrector) if tokens else None
        return await self._submit(compute.difference, tokens, group.step, correct)

    async def _submit(self, job: Callable[..., T], *arguments: Any) -> T:
        return await self._engine.submit(JobPriority.ROUND, job, *arguments)


def _take_local_step(compute: StageCompute, tokens: int, step: int, correct: Correct | None) -> float:
    """An optimizer step on the member's own gradient."""
    return compute.apply(compute.contribution(tokens), step, correct)
