"""What a round computes at one member: what it contributes, and what a commit does to its weights.

`RoundWork` knows which average a round settles and how it came about; what members contribute, and what a commit does
with their own work, is that of the run's outer loop (`peers.round_modes`). Jobs run on the compute thread.

With an overlap (`swarm.gradient.outer_config.Overlap`) what a member has at its commit of a step is kept as *owed*, and
travels in an exchange of the committed group while later steps run. The round that settles it takes the outcome over
if all its members have the same; otherwise they exchange what they owe once more, in the open.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from peers.compute import Correct, StageCompute, bytes_per_step, take_step
from peers.corrections import Corrections
from peers.engine import Engine, JobPriority
from peers.exchange import Exchange, ExchangeError, alone_digest
from peers.frames import FrameError
from peers.round_messages import Arrival, Commit, Group
from peers.updates import Update, alone_update, exchanged_update, local_update
from swarm.gradient.compressor import Compression, Phase
from swarm.sketch import slice_span

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Average:
    """What this member would apply with the commit of a group.

    digest: what it votes for. average: fp32 [numel]; empty where the round settles none. tokens: loss tokens of its own
    ledger. compression: what moves the compressor's state on; None where nothing was exchanged. own: fp32 [numel], this
    member's gradient by its ledger of this attempt, where it will owe it to a later average or steps along it itself.
    """

    group: Group
    digest: str
    average: Tensor
    update: Update
    tokens: int
    compression: Compression | None
    own: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What one exchange moves. group: who takes part, with the weights of what is averaged. slice_span: (offset, count)
    of the leader's weights that go along, or None.
    """

    group: Group
    phases: tuple[Phase, ...]
    slice_span: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Most tokens of a microbatch, and of a step."""

    microbatch: int
    step: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an exchange: the average (fp32 [numel]), its digest, and what commits the compressor's state."""

    exchange: Exchange
    average: Tensor
    digest: str
    compression: Compression


@dataclass(slots=True)
class Owed:
    """What a member had at its commit of `step`: fp32 [numel], and its weight. outcome: of its exchange, once it has
    ended.
    """

    step: int
    vector: Tensor
    weight: int
    outcome: Outcome | None = None


class RoundWork(ABC):
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
        self._overlap = compute.overlap
        self._owed: Owed | None = None
        self._committed: deque[Group] = deque(maxlen=max(self._overlap.steps, self._interval) + 1)
        moved = bytes_per_step(compute.compressor, self._interval)
        self.compression = 2 * compute.trainable.numel / moved if moved else 0.0
        """Bytes of the weights as bf16 over those of an average, in the mean over steps; 0 if nothing is averaged."""

    # -- what the outer loop says --------------------------------------------------------------------------

    @property
    @abstractmethod
    def _interval(self) -> int:
        """Steps after which the schedule of averages repeats."""

    @abstractmethod
    def weight(self, step: int, tokens: int) -> int:
        """A member's weight in the round of a step. tokens: loss tokens of its ledger of the step."""

    @abstractmethod
    def most_weight(self, step: int, microbatches: int, peer: str, pending: Group | None) -> int:
        """What a member with so many microbatches of a step can weigh at most: by the run's own sizes, and by what it
        weighed in the groups that were committed before; by the sizes alone if peer is "" (of another history).
        pending: the group whose commit may be under way here.
        """

    @abstractmethod
    def most_weight_of_all(self, step: int) -> int:
        """What all members of a step's group together can weigh at most."""

    @property
    @abstractmethod
    def most_owed(self) -> int:
        """What the weight of what a member owes can be at most."""

    @abstractmethod
    def _averages(self, step: int) -> bool:
        """Whether what members have after this step is averaged at all."""

    @abstractmethod
    async def _contribution(self, group: Group, weight: int, tokens: int) -> Tensor:
        """What this member contributes to an average in the open: fp32 [numel]. Raises ExchangeError."""

    @abstractmethod
    async def apply(self, held: Average, commit: Commit) -> float | None:
        """Do what a commit says; returns the norm of the gradient, or of the averaged difference.

        None if there was nothing to apply. Raises ValueError for what is not finite: that is not applied then.
        """

    # -- which average -------------------------------------------------------------------------------------

    def settled(self, step: int) -> int | None:
        """The step whose average is applied with the commit of `step`; None if it applies none."""
        start = self._overlap.settled(step)
        return start if start is not None and self._averages(start) else None

    def exchanged(self, group: Group) -> ExchangePlan | None:
        """The exchange that an attempt needs; None if it can do without."""
        start = self.settled(group.step)
        if start is None or group.settled:
            return None
        meeting = group if start == group.step else replace(group, weights=group.owed)
        return self._plan(meeting, start)

    def travelling(self, group: Group) -> ExchangePlan | None:
        """The exchange that begins with the commit of a group and runs while the next steps do; None if none does."""
        step = group.step
        if self._owed is None or self._owed.step != step or not self._overlap.travels(step):
            return None
        # An id of its own: the group may have had an exchange in the open.
        name = hashlib.sha256(f"{group.id}/travels".encode()).hexdigest()
        # An outer step corrects nothing: nobody has to hold its prior until it is settled.
        corrector = group.corrector if self._compute.outer is None else ""
        return self._plan(replace(group, id=name, corrector=corrector), step)

    def with_owed(self, arrival: Arrival) -> Arrival:
        """What this member reports at the end of a step, with what it owes the average that the round settles, and the
        digest of that average if it has it.
        """
        owed = self._due(arrival.step)
        if owed is None:
            return arrival
        digest = owed.outcome.digest if owed.outcome is not None else ""
        return replace(arrival, owed=owed.weight, settled=digest)

    def most_owed_by(self, peer: str, step: int, pending: Group | None) -> int:
        """What a member may say that it owes the average that the round of a step settles: its weight in the group that
        was committed then, if this member knows that group. peer, pending: as of `most_weight`.
        """
        start = self.settled(step)
        if start is None or start == step:
            return 0
        weighed = self._weighed(peer, start, pending)
        return self.most_owed if weighed is None else weighed

    def check_group(self, group: Group, pending: Group | None) -> None:
        """Raise FrameError for a leader's group in which members weigh, or owe, more than they can. Every member knows
        its own figures, and what all can weigh: so a leader cannot give its own part the weight of many. A group that
        only finishes what an earlier one has averaged is not looked at: its ledgers may have grown since, and overlap.
        """
        if group.held is not None:
            return
        most = self.most_weight_of_all(group.step)
        if sum(group.weights) > most:
            raise FrameError("weight", f"{sum(group.weights)} for a step of at most {most} tokens")
        for member, owed in zip(group.members, group.owed, strict=False):
            if owed > (most := self.most_owed_by(member, group.step, pending)):
                raise FrameError(
                    "weight", f"{member[-6:]} owes {owed} where it can owe at most {most} tokens"
                )

    def _weighed(self, peer: str, step: int, pending: Group | None) -> int | None:
        """A member's weight in the group that was committed in a step; None if that group is not known here."""
        for group in (*self._committed, pending) if peer else ():
            if group is not None and group.step == step:
                return group.weights[group.members.index(peer)] if peer in group.members else 0
        return None

    def note_committed(self, group: Group) -> None:
        """A group's commit has been applied here."""
        self._committed.append(group)

    def restart(self) -> None:
        """The weights are others now: what led to the ones before counts no more."""
        self._owed = None
        self._committed.clear()

    # -- the average ---------------------------------------------------------------------------------------

    async def average(self, group: Group, exchange: Exchange | None, lineage: str, tokens: int) -> Average:
        """Make the average of an attempt. exchange: None for a group that exchanges nothing. lineage: of the weights
        before. tokens: loss tokens of this member's frozen ledger.

        Raises ExchangeError, FrameError.
        """
        place: dict[str, Any] = {"run": self._run_id, "stage": self._stage, "lineage": lineage}
        start = self.settled(group.step)
        is_owed = start is not None and start < group.step
        if start is None or (is_owed and not group.settled and not sum(group.owed)):
            update = local_update(
                group, self._compute.trainable.numel, is_still=self._is_still(group), **place
            )
            return Average(group, update.digest, torch.empty(0), update, tokens, None)
        own = group.members.index(self._me)
        weight = group.owed[own] if is_owed else group.weights[own]
        if group.settled:
            owed = self._due(group.step)
            outcome = owed.outcome if owed is not None else None
            if outcome is None or outcome.digest != group.settled:
                raise ExchangeError("schema", f"the average {group.settled[:12]} is not here")
        else:
            contribution = (
                self._owed_vector(group.step) if is_owed else await self._contribution(group, weight, tokens)
            )
            if exchange is None:
                # A group of one skips exchange and compressor.
                weights = group.owed if is_owed else group.weights
                update = alone_update(group, contribution, total_weight=sum(weights), **place)
                digest = alone_digest(group.id, group.corrector)
                return Average(group, digest, contribution, update, tokens, None)
            outcome = await self._run(exchange, contribution, start)
        update = exchanged_update(outcome.exchange, group=group, digest=outcome.digest, **place)
        return Average(group, outcome.digest, outcome.average, update, tokens, outcome.compression)

    async def travel(self, exchange: Exchange) -> None:
        """Run the exchange of what is owed, and keep its outcome. Raises ExchangeError, FrameError."""
        owed = self._owed
        if owed is not None:
            owed.outcome = await self._run(exchange, owed.vector, owed.step)

    async def _run(self, exchange: Exchange, contribution: Tensor, start: int) -> Outcome:
        """start: the step that the contribution is of."""
        compute, own, group = self._compute, None, exchange.group
        weight = group.weights[group.members.index(self._me)]
        if exchange.slice_span is not None and group.leader == self._me:
            own = await self._submit(compute.read_slice, *self.slice_span(start))
        compression = await self._submit(compute.compressor.begin, contribution, start, weight)
        average, digest = await exchange.run(compression, own)
        return Outcome(exchange, average, digest, compression)

    async def _settle(self, held: Average) -> float | None:
        """Apply the average that a commit settles, if there is one; returns its norm. Raises ValueError for one that is
        not finite.
        """
        compute, update = self._compute, held.update
        if update.way not in ("exchanged", "alone"):
            return None
        if held.compression is not None:
            await self._submit(held.compression.commit)
        # An outer step corrects nothing: the gradients behind it were corrected one by one.
        correct = self._corrections.of(update.corrector) if compute.outer is None else None
        owed = self._due(update.step)
        own = owed.vector if owed is not None else None
        return await self._submit(take_step, compute, held.average, update.step, update.slice, correct, own)

    def slice_span(self, start: int) -> tuple[int, int]:
        """The leader's weights that go along: their share is of what the round moves, as values of two bytes."""
        numel = self._compute.trainable.numel
        moved = sum(phase.codec.nbytes(phase.elements) for phase in self._compute.compressor.phases(start))
        return slice_span(start, numel, min(numel, moved // 2))

    def _plan(self, group: Group, start: int) -> ExchangePlan | None:
        if len(group.members) < 2 or not sum(group.weights):
            return None
        span = self.slice_span(start) if group.leader in group.members else None
        return ExchangePlan(group, self._compute.compressor.phases(start), span)

    def _due(self, step: int) -> Owed | None:
        """What this member owes the average that the round of a step settles."""
        owed = self._owed
        return owed if owed is not None and owed.step == self._overlap.settled(step) != step else None

    def _owed_vector(self, step: int) -> Tensor:
        owed = self._due(step)
        return owed.vector if owed is not None else torch.zeros(self._compute.trainable.numel)

    def _is_still(self, group: Group) -> bool:
        """Whether no member's weights change with this commit."""
        return not sum(group.weights) or self._compute.outer is None

    def _correction(self, corrector: str) -> Correct | None:
        """Raises ExchangeError if the prior is not here any more."""
        if not self._corrections.holds(corrector):  # it was let go of since this member reported it
            raise ExchangeError("schema", f"the corrector's prior {corrector[:12]} is not here any more")
        return self._corrections.of(corrector)

    async def _submit(self, job: Callable[..., T], *arguments: Any) -> T:
        return await self._engine.submit(JobPriority.ROUND, job, *arguments)
