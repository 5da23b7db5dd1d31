"""What members contribute to a round, by the run's outer loop: gradients at every step, or how far local steps came.

Without an outer loop the members average gradients, and every commit is an optimizer step on the average. With one
(`swarm.gradient.outer`) a commit after a local step is an optimizer step on the member's own gradient, and nothing is
exchanged; when averages are due in the open a member takes its own step first, on trial, and contributes how far it has
come since the last ones; the commit takes the outer step. With an overlap it takes its own step for good, and owes how
far it has come. Gossip (`swarm.gradient.gossip`) is an outer loop whose exchanges are of pairs, but for some.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from torch import Tensor

from peers.compute import StageCompute
from peers.exchange import Exchange
from peers.round_messages import Commit, Group
from peers.round_work import Average, ExchangePlan, Owed, RoundWork
from peers.updates import local_update
from swarm.gradient.gossip import Gossip, pair_of
from swarm.gradient.outer import LocalSteps
from swarm.gradient.outer_config import interval

__all__ = ["GossipWork", "GradientWork", "LocalStepsWork", "build_round_work"]


def build_round_work(compute: StageCompute, *rest: Any, run_seed: int = 0) -> RoundWork:
    """The work of a stage's rounds, by its outer loop. rest: as of RoundWork."""
    if compute.outer is None:
        return GradientWork(compute, *rest)
    if isinstance(compute.outer, Gossip):
        return GossipWork(compute, *rest, run_seed=run_seed)
    return LocalStepsWork(compute, *rest)


class GradientWork(RoundWork):
    """Gradients, averaged at every step; with an overlap each is applied one step later, and the last two together."""

    _interval = 1

    def weight(self, step: int, tokens: int) -> int:
        """See RoundWork."""
        return tokens + self._waiting(step)

    def most_weight(self, step: int, microbatches: int, peer: str, pending: Group | None) -> int:
        """See RoundWork."""
        own = microbatches * self._sizes.microbatch
        if not self._overlap.waits(step - 1):
            return own
        weighed = self._weighed(peer, step - 1, pending)
        return own + (self._sizes.step if weighed is None else weighed)

    def most_weight_of_all(self, step: int) -> int:
        """See RoundWork."""
        return self._sizes.step * (2 if self._overlap.waits(step - 1) else 1)

    @property
    def most_owed(self) -> int:
        """See RoundWork."""
        return self._sizes.step

    def _averages(self, step: int) -> bool:
        return True

    async def _contribution(self, group: Group, weight: int, tokens: int) -> Tensor:
        own = await self._submit(self._compute.contribution, tokens)
        waiting, owed = self._waiting(group.step), self._owed
        if owed is None or not waiting:
            return own
        return (own * tokens + owed.vector * waiting) / weight

    async def average(self, group: Group, exchange: Exchange | None, lineage: str, tokens: int) -> Average:
        """See RoundWork."""
        made = await super().average(group, exchange, lineage, tokens)
        if not self._overlap.travels(group.step) and not self._overlap.waits(group.step):
            return made
        # Now, while the ledger is frozen: the group may be committed after more was replayed here.
        return replace(made, own=await self._submit(self._compute.contribution, tokens))

    async def apply(self, held: Average, commit: Commit) -> float | None:
        """See RoundWork."""
        owed = Owed(commit.step, held.own, held.tokens) if held.own is not None else None
        try:
            norm = await self._settle(held)
            if norm is None:
                await self._submit(self._compute.clear)
            return norm
        finally:
            self._owed = owed

    def _waiting(self, step: int) -> int:
        """Loss tokens of the gradient of the step before that is averaged together with this one's."""
        owed = self._owed
        return (
            owed.weight
            if owed is not None and owed.step == step - 1 and self._overlap.waits(owed.step)
            else 0
        )


class LocalStepsWork(RoundWork):
    """How far local steps came. A member weighs the tokens of all steps since the weights' last average."""

    def __init__(self, compute: StageCompute, *rest: Any) -> None:
        outer = compute.outer
        if outer is None:
            raise ValueError("this run averages every step")
        self._outer: LocalSteps | Gossip = outer
        super().__init__(compute, *rest)
        self._recent: deque[int] = deque(maxlen=outer.config.every - 1)

    @property
    def _interval(self) -> int:
        return interval(self._outer.config)

    def weight(self, step: int, tokens: int) -> int:
        """See RoundWork."""
        return tokens + sum(self._recent) if self._counts_all(step) else tokens

    def most_weight(self, step: int, microbatches: int, peer: str, pending: Group | None) -> int:
        """See RoundWork."""
        most = microbatches * self._sizes.microbatch
        if self._counts_all(step):
            for earlier in range(max(0, step + 1 - self._outer.config.every), step):
                weighed = self._weighed(peer, earlier, pending)
                # Where averages were due it counted more than that step's tokens.
                most += self._sizes.step if weighed is None else min(weighed, self._sizes.step)
        return most

    def most_weight_of_all(self, step: int) -> int:
        """See RoundWork."""
        return self._sizes.step * (self._outer.config.every if self._counts_all(step) else 1)

    @property
    def most_owed(self) -> int:
        """See RoundWork."""
        return self._outer.config.every * self._sizes.step

    def restart(self) -> None:
        """See RoundWork."""
        super().restart()
        self._recent.clear()

    def _counts_all(self, step: int) -> bool:
        return self._averages(step) and not self._overlap.waits(step)

    def _averages(self, step: int) -> bool:
        return bool(self._outer.due(step))

    def _is_on_trial(self, step: int) -> bool:
        """Whether the member's own step of a round is taken on trial, to be averaged in the open."""
        return self.settled(step) == step

    async def _contribution(self, group: Group, weight: int, tokens: int) -> Tensor:
        correct = self._correction(group.corrector) if tokens else None
        return await self._submit(self._compute.difference, tokens, group.step, correct)

    async def average(self, group: Group, exchange: Exchange | None, lineage: str, tokens: int) -> Average:
        """See RoundWork."""
        made = await super().average(group, exchange, lineage, tokens)
        if not tokens or self._is_on_trial(group.step):
            return made
        # Now, while the ledger is frozen: the group may be committed after more was replayed here.
        return replace(made, own=await self._submit(self._compute.contribution, tokens))

    async def apply(self, held: Average, commit: Commit) -> float | None:
        """See RoundWork."""
        compute, step = self._compute, commit.step
        recent = sum(self._recent)
        self._recent.append(held.tokens)
        if self._is_on_trial(step):
            norm = await self._settle(held)
            if norm is None:
                await self._submit(compute.clear)
            return norm
        norm, problem = None, None
        try:
            if held.own is not None:
                correct = self._corrections.of(held.group.corrector)
                norm = await self._submit(compute.apply, held.own, step, correct)
            else:
                await self._submit(compute.clear)
        except ValueError as error:  # its own gradient is a member's own affair; the average is everybody's
            problem = error
        try:
            settled = await self._settle(held)
        finally:
            self._owed = None if self.settled(step) is not None else self._owed
            if self._averages(step) and self._overlap.travels(step):
                vector = await self._submit(compute.difference, 0, step)
                self._owed = Owed(step, vector, held.tokens + recent)
        if problem is not None:
            raise problem
        return norm if settled is None else settled


class GossipWork(LocalStepsWork):
    """Local steps, after which pairs meet, and all of them now and then. Everybody who has a weight has the same.

    A pair's exchange is part of the round: one that fails, fails the attempt. But it changes nothing that all members
    share, so what they vote on is the group alone.
    """

    def __init__(self, compute: StageCompute, *rest: Any, run_seed: int) -> None:
        super().__init__(compute, *rest)
        if not isinstance(compute.outer, Gossip):
            raise ValueError("this run's replicas do not meet in pairs")
        self._gossip, self._run_seed = compute.outer, run_seed

    def exchanged(self, group: Group) -> ExchangePlan | None:
        """See RoundWork."""
        if not self._gossip.due(group.step):
            return None
        even = tuple(min(1, weight) for weight in group.weights)
        if self._gossip.is_consensus(group.step):
            return self._plan(replace(group, weights=even), group.step)
        able = [member for member, weight in zip(group.members, even, strict=True) if weight]
        if self._me not in able:
            return None
        pair = pair_of(self._me, able, self._run_seed, self._stage, group.step, group.attempt)
        plan = self._plan(replace(group, members=pair, weights=(1,) * len(pair)), group.step)
        return replace(plan, slice_span=None) if plan is not None else None

    def settled(self, step: int) -> int | None:
        """See RoundWork. What pairs make is no average of the stage."""
        return step if self._gossip.is_consensus(step) else None

    async def average(self, group: Group, exchange: Exchange | None, lineage: str, tokens: int) -> Average:
        """See RoundWork."""
        if not self._is_meeting(group.step):
            return await super().average(group, exchange, lineage, tokens)
        mine = await self._contribution(group, 1, tokens)
        update = local_update(
            group,
            self._compute.trainable.numel,
            is_still=self._is_still(group),
            run=self._run_id,
            stage=self._stage,
            lineage=lineage,
        )
        if exchange is None:  # the odd one out meets itself
            return Average(group, update.digest, mine, update, tokens, None)
        outcome = await self._run(exchange, mine, group.step)
        return Average(group, update.digest, outcome.average, update, tokens, outcome.compression)

    async def apply(self, held: Average, commit: Commit) -> float | None:
        """See RoundWork."""
        if not self._is_meeting(commit.step) or held.update.way == "none":
            return await super().apply(held, commit)
        self._recent.append(held.tokens)
        if held.compression is not None:
            await self._submit(held.compression.commit)
        return await self._submit(self._compute.apply_outer, held.average, commit.step)

    def _is_on_trial(self, step: int) -> bool:
        return self._gossip.due(step)

    def _is_meeting(self, step: int) -> bool:
        """Whether pairs meet after a step."""
        return self._gossip.due(step) and not self._gossip.is_consensus(step)
