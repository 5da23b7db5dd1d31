"""Weights that meet: who is behind, who is ahead, and whose lineage wins."""

from __future__ import annotations

from peers.frames import Kind
from peers.limits import LIMITS
from peers.round_actions import Action, Diverged, Dropped, Phase, Replan, Send
from peers.round_leader import RoundLeader
from peers.round_messages import Arrival, Commit

ASKS_AHEAD = 5
"""Answers of a member one step ahead without the COMMIT that led there, after which it counts as unreachable."""


MEET_EVERY_S = 10.0


class RoundMeeting(RoundLeader):
    """What this peer does about replicas whose weights are not its own."""

    def _on_ahead(self, peer: str, arrival: Arrival, now: float) -> list[Action]:
        """A member of a later step. One step ahead it has a COMMIT that this peer lacks, and answers with it."""
        is_next = arrival.step == self.step + 1
        if is_next and (peer in self._next_arrivals or len(self._next_arrivals) < LIMITS.links):
            self._next_arrivals[peer] = arrival
        if self.phase is Phase.APPLYING:
            return []
        if is_next and self._asked_ahead[peer] < ASKS_AHEAD:
            asked = self._answer(peer, now)
            self._asked_ahead[peer] += len(asked)
            return asked
        return self._halt(Diverged(peer, arrival.step, arrival.lineage))

    def _meet(self, peer: str, step: int, lineage: str, now: float) -> list[Action]:
        """Weights of another lineage: the higher (step, lineage) wins, and the other one hears of it."""
        if (step, lineage) > self.position and self.phase is not Phase.APPLYING:
            return self._halt(Diverged(peer, step, lineage))
        return self._answer(peer, now)

    def _remind(self, peer: str) -> list[Action]:
        """Tell a replica at the same step how it came about: who is in the roster, and which plan is in force."""
        return [Send(peer, Kind.COMMIT, self.last_commit)] if self.last_commit is not None else []

    def _on_previous(self, peer: str, commit: Commit, now: float) -> list[Action]:
        """A COMMIT of the step that this peer has behind it."""
        if commit.next_lineage != self.lineage:
            return self._meet(peer, commit.next_step, commit.next_lineage, now)
        last = self.last_commit
        if self.me not in commit.roster and self.me not in commit.followers:
            return self._halt(Dropped(commit))
        if last is not None and (commit.attempt, commit.plan) <= (last.attempt, last.plan):
            return self._remind(peer) if (commit.attempt, commit.plan) < (last.attempt, last.plan) else []
        self.last_commit = commit
        return [Replan(commit)] if commit.plan else []

    def _meet_all(self, now: float) -> list[Action]:
        """Now and then: tell strangers where this peer is, and as the leader the others which plan is in force."""
        if now - self._met_at < MEET_EVERY_S:
            return []
        self._met_at = now
        actions: list[Action] = []
        if self.is_leader and self.last_commit is not None and self.last_commit.plan:
            actions = [action for peer in self.present if peer != self.me for action in self._remind(peer)]
        strangers = sorted(p for p in self._alive if not self.is_known(p) and p not in self._follows)
        return actions + [action for peer in strangers for action in self._answer(peer, now)]
