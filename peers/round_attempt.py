"""One attempt at an average, as every member of it lives through it: entered, agreed to, left."""

from __future__ import annotations

from dataclasses import replace

from peers.frames import Kind
from peers.round_actions import Action, Apply, CancelExchange, Exchange, Freeze, Phase, Send
from peers.round_messages import Commit, Digest, Failure, Group, Held
from peers.round_state import RETRY_CEILING_S, RoundState


class RoundAttempt(RoundState):
    """Going into an attempt and out of it."""

    def _enter(self, group: Group, now: float) -> list[Action]:
        if self._ready_at is not None:
            if self.attempt == 0 and not self._excluded:
                self.pace.note_arrival(now - self._ready_at)
            self._ready_at = None
        self.group, self.attempt = group, group.attempt
        self._entered_at = self._reported_at = now
        self._digests.clear()
        self._blames.clear()
        self._fail_at = None
        # What reports from now on, reports after this attempt.
        self._arrivals.clear()
        if group.held is not None:
            held = self._held
            has_average = held is not None and held.group == group.held.group and held.has_average
            return [Freeze(True), *self._agree(group, replace(group.held, has_average=has_average))]
        self.phase = Phase.EXCHANGING
        if self._held is not None:
            # The word stands until another is given; the average itself makes room for the next.
            self._held = replace(self._held, has_average=False)
        return [Freeze(True), Exchange(group, self.pace.exchange_deadline_s)]

    def _agree(self, group: Group, held: Held) -> list[Action]:
        """Give this peer's word for an average, under this attempt. The leader's own is `_digests`."""
        self.phase = Phase.DIGESTED
        self._held = replace(held, attempt=group.attempt, ballot=group.id, voters=group.members)
        if group.leader == self.me:
            self._digests[self.me] = held.digest
            return []
        return [Send(group.leader, Kind.DIGEST, Digest(group.id, held.digest, self.step))]

    def _take_back(self, ballot: str) -> None:
        """The leader of the attempt that made the average says it failed: nobody can have committed it."""
        if self._held is not None and self._held.ballot == ballot and self._held.is_first:
            self._held = None

    def _leave_for(self, leader: str) -> list[Action]:
        """Leave the attempt under way for one of another leader, and say so to those who wait for this peer."""
        group = self.group
        if group is None or self.phase is Phase.GATHERING:
            return []
        actions: list[Action] = []
        failure = Failure(group.id, "late")
        if group.leader == self.me:
            self._failed.add(group.id)
            self._take_back(group.id)
            actions = [Send(peer, Kind.FAILED, failure) for peer in group.members if peer != self.me]
        elif group.leader != leader:
            actions = [Send(group.leader, Kind.FAILED, failure)]
        if self.phase is Phase.EXCHANGING:
            actions.append(CancelExchange())
        self.phase, self.group = Phase.GATHERING, None
        return [*actions, Freeze(False)]

    def _abandon(self, reason: str, now: float) -> list[Action]:
        self.failures[reason] += 1
        self._not_before = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_CEILING_S)
        self._retried_at, self._fail_at = now, None
        actions: list[Action] = [CancelExchange()] if self.phase is Phase.EXCHANGING else []
        self.phase, self.group = Phase.GATHERING, None
        return [*actions, Freeze(False)]

    def _decide(self, commit: Commit) -> list[Action]:
        self.phase, self._decided = Phase.APPLYING, commit
        return [Apply(commit)]
