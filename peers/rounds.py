"""Who averages with whom, and when it counts: the pure core of a stage's rounds.

Members report their settled ledgers to a leader (ARRIVE). When the ledgers of all live members partition
the plan, the leader names a group (GROUP), the group averages, members say that they agree to what they got
(DIGEST), and only the leader's COMMIT lets anybody apply. The leader is the first live member in an order seeded
by the step, so its death needs no election: the next one finishes what may have been committed
(`round_ballots`). Nothing here talks, waits or computes: events in, actions out.
"""

from __future__ import annotations

from peers.frames import Kind
from peers.limits import LIMITS
from peers.round_actions import (
    Action,
    Apply,
    AskGone,
    AskMissing,
    Body,
    CancelExchange,
    Diverged,
    Dropped,
    Exchange,
    Fence,
    Freeze,
    OutOfStep,
    Phase,
    Replan,
    Send,
    Unfence,
)
from peers.round_meeting import RoundMeeting
from peers.round_messages import Arrival, Commit, CompactKey, Digest, Failure, Group, Held
from peers.round_state import REPORT_EVERY_S, PlanFactory

__all__ = [
    "Action",
    "Apply",
    "AskGone",
    "AskMissing",
    "Body",
    "CancelExchange",
    "Diverged",
    "Dropped",
    "Exchange",
    "Fence",
    "Freeze",
    "OutOfStep",
    "Phase",
    "PlanFactory",
    "Replan",
    "RoundCore",
    "Send",
    "Unfence",
]

BLAMED = ("late", "schema")
"""Reasons of failed exchanges for which members can name others: whose pieces did not come, or cannot be decoded."""
STEPPED_DOWN_S = 60.0
"""How long a leader that stepped down comes last in the order."""


class RoundCore(RoundMeeting):
    """The rounds of one stage as one member, or follower, sees them. Every event returns what is to be done."""

    # -- work --------------------------------------------------------------------------------------------

    def on_plan(self, plan: str, keys: frozenset[CompactKey], now: float) -> list[Action]:
        """The plan of the current step, or one that replaces it."""
        if self.is_out or self.phase is Phase.APPLYING:
            return []
        actions: list[Action] = []
        if plan != self._plan:
            if self.phase in (Phase.EXCHANGING, Phase.DIGESTED):
                actions = self._quit("key", now)
            # Others may have known this plan before: their reports stand, those under another are void.
            self._plan, self._plan_keys, self._mine, self._ready_at = plan, keys, None, None
            self._missing_since = None
        return actions + self._form(now)

    def on_ready(self, arrival: Arrival, now: float) -> list[Action]:
        """This peer's ledger is settled and every slot of the plan has ended (again, if it grew)."""
        if self.is_out or arrival.step != self.step or arrival.plan != self._plan:
            return []
        if self._mine is None:
            self._ready_at = now
        self._mine = arrival
        return self._report(now)

    def fence(self, plan: str, now: float) -> list[Action]:
        """This peer's ledger under the plan does not count: nothing is reported before the next `on_ready`."""
        if self.is_out or plan != self._plan or self.phase is Phase.APPLYING:
            return []
        self._mine = None
        return self._quit("key", now) if self.phase is Phase.EXCHANGING else []

    # -- messages ----------------------------------------------------------------------------------------

    def on_arrive(self, peer: str, arrival: Arrival, now: float) -> list[Action]:
        """ARRIVE of a replica, of this roster or not."""
        if self.is_out:
            return []
        if arrival.step > self.step:
            return self._on_ahead(peer, arrival, now)
        if arrival.step < self.step:
            commit = self.last_commit
            if commit is not None and commit.step == arrival.step:
                return [Send(peer, Kind.COMMIT, commit)]
            return self._answer(peer, now)
        if arrival.lineage != self.lineage:
            return self._meet(peer, arrival.step, arrival.lineage, now)
        if self._decided is not None:
            return [Send(peer, Kind.COMMIT, self._decided)]
        if not self.is_known(peer):
            self.failures["stranger"] += 1
            return self._remind(peer)
        if not arrival.plan:
            return []
        if peer in self.followers and (arrival.keys or arrival.weight or arrival.owed):
            self.failures["weight"] += 1
            return []
        self._arrivals[peer] = arrival
        differs = bool(self._plan) and arrival.plan != self._plan
        return [*(self._remind(peer) if differs else []), *self._form(now)]

    def on_group(self, peer: str, group: Group, now: float) -> list[Action]:
        """GROUP of a leader."""
        if self.is_out:
            return []
        if peer not in self.roster or self.me not in group.members or group.step < self.step:
            self.failures["stranger"] += 1
            return []
        if group.step > self.step:
            return self._answer(peer, now)
        if group.lineage != self.lineage:
            return self._meet(peer, group.step, group.lineage, now)
        is_decided = self.phase is Phase.APPLYING
        if (
            group.attempt <= self.attempt
            or is_decided
            or (self.phase is Phase.DIGESTED and peer != self.leader)
        ):
            again = self._mine is not None and not is_decided
            return self._refuse(peer, group, "late", is_again=again)
        mine = self._own()
        position = group.members.index(self.me)
        is_same = mine.plan == group.plan and mine.ledger_hash == group.ledgers[position]
        if self._mine is None or not is_same or not set(mine.keys).isdisjoint(group.lost):
            return self._refuse(peer, group, "key", is_again=self._mine is not None)
        if group.corrector not in ("", mine.corrector):
            return self._refuse(peer, group, "schema", is_again=True)
        if group.settled not in ("", mine.settled):
            return self._refuse(peer, group, "schema", is_again=True)
        if mine.weight != group.weights[position] or mine.owed != (group.owed[position] if group.owed else 0):
            return self._refuse(peer, group, "weight", is_again=False)
        return [*self._leave_for(peer), *self._enter(group, now)]

    def on_digest(self, peer: str, digest: Digest, now: float) -> list[Action]:
        """DIGEST of a member, at the leader."""
        if self.is_out or digest.step > self.step:
            return []
        for known in (self._decided, self.last_commit):
            if known is not None and known.step == digest.step:
                return [Send(peer, Kind.COMMIT, known)]  # it said so again: our COMMIT was lost with a link
        if digest.step < self.step:
            return self._answer(peer, now)
        current = self.group
        if current is None or current.id != digest.group or current.leader != self.me:
            # That attempt has failed here, and the word of it was lost.
            is_failed = digest.group in self._failed
            return [Send(peer, Kind.FAILED, Failure(digest.group, "late"))] if is_failed else []
        if peer not in current.members:
            return []
        self._digests[peer] = digest.digest
        return self._commit_if_agreed(now)

    def on_failed(self, peer: str, failure: Failure, now: float) -> list[Action]:
        """FAILED: of a member to the leader, or of the leader to its members."""
        if self.is_out:
            return []
        group, held = self.group, self._held
        if held is not None and held.leader == peer:
            self._take_back(failure.group)
        if peer in failure.suspects and self.is_known(peer):
            if failure.step:
                return self._on_silent(peer, failure.step, now)
            # A leader that is too slow for the others lets the next one lead.
            self._stepped_down[peer] = now
            self._excluded.add(peer)
        is_ours = group is not None and group.id == failure.group and peer in group.members
        if group is None or not is_ours or self.phase is Phase.APPLYING:
            return []
        if group.leader == self.me:
            if failure.suspects and failure.reason in BLAMED:
                return self._on_blame(peer, failure.suspects, now)
            return self._fail_group(failure.reason, now)
        if peer == group.leader:
            return [*self._abandon(failure.reason, now), *self._report(now)]
        return []

    def on_commit(self, peer: str, commit: Commit, now: float) -> list[Action]:
        """COMMIT of a leader, or of a member that had it from one."""
        if self.is_out or self.phase is Phase.APPLYING:
            return []
        if commit.next_step == self.step:
            return self._on_previous(peer, commit, now)
        if commit.step < self.step:
            return self._answer(peer, now)
        if commit.step > self.step or commit.lineage != self.lineage:
            return self._halt(Diverged(peer, commit.next_step, commit.next_lineage))
        if not self.is_known(peer):
            self.failures["stranger"] += 1
            return []
        held = self._held
        is_held = held is not None and (held.group, held.digest) == (commit.group, commit.digest)
        if self.me not in commit.roster:
            return self._halt(Dropped(commit))
        if held is None or not is_held or not held.has_average:
            return self._halt(OutOfStep(commit))
        # Who reported here took this peer for the leader; the real one may have died before it told them.
        waiting = [other for other in self._arrivals if self.is_known(other) and other != peer]
        return [*(Send(other, Kind.COMMIT, commit) for other in waiting), *self._decide(commit)]

    # -- the exchange ------------------------------------------------------------------------------------

    def on_exchanged(self, group: str, digest: str, now: float, *, has_moved: bool = True) -> list[Action]:
        """The exchange ended: this peer holds the average, whose bytes have this digest. has_moved: whether anything
        had to be exchanged for it.
        """
        current = self.group
        if self.is_out or current is None or current.id != group or self.phase is not Phase.EXCHANGING:
            return []
        if has_moved:
            self.pace.note_exchange(now - self._entered_at)
        held = Held(
            group=group,
            digest=digest,
            attempt=current.attempt,
            ballot=group,
            voters=current.members,
            leader=current.leader,
            members=current.members,
            weight=sum(current.weights),
            lost=current.lost,
        )
        self._reported_at = now
        return [*self._agree(current, held), *self._commit_if_agreed(now)]

    def on_exchange_failed(
        self, group: str, reason: str, suspects: tuple[str, ...], now: float
    ) -> list[Action]:
        """The exchange failed here. suspects: members that this one waited for in vain."""
        current = self.group
        if self.is_out or current is None or current.id != group or self.phase is not Phase.EXCHANGING:
            return []
        if current.leader == self.me:
            if reason in BLAMED and suspects:
                return self._on_blame(self.me, suspects, now)
            return self._fail_group(reason, now)
        if reason == "late":
            self.pace.note_late_exchange()
        if reason in BLAMED and current.leader in suspects and len(current.members) > 2:
            # A leader with a slow line hears too late that it is too slow: whoever waited for it passes it over.
            # Of two nobody can tell whose line it is: they try again, and wait longer.
            self._stepped_down[current.leader] = now
            self._excluded.add(current.leader)
        return self._withdraw(current, now, reason, suspects)

    # -- who is there --------------------------------------------------------------------------------------

    def on_peer_up(self, peer: str, now: float) -> list[Action]:
        """A replica's link is up (again): what was under way on the old one may be lost, and is repeated."""
        self._alive.add(peer)
        self._lost.discard(peer)
        self._gone.discard(peer)
        self._answered.pop(peer, None)
        if self.is_out:
            return [Send(peer, Kind.FAILED, self._farewell())] if self.is_known(peer) else []
        group = self.group
        if self._decided is not None:
            told = (*self._decided.roster, *self._decided.followers, *self.roster)
            return [Send(peer, Kind.COMMIT, self._decided)] if peer in told else []
        if not self.is_known(peer):
            return self._answer(peer, now)
        again: list[Action] = []
        if (fenced := self._fenced.get(peer)) is not None and self.is_leader:
            again.append(Fence(peer, fenced[1]))
        if self.last_commit is not None and self.last_commit.plan:
            # Two leaders may have committed the step before, each with a plan: all have to know the later one.
            again += self._remind(peer)
        if group is None or peer not in group.members:
            return [*again, *self._report(now)]
        if group.leader == self.me:
            has_all = peer in self._digests and self.phase is Phase.DIGESTED
            return again if has_all else [*again, *self._fail_group("disconnected", now)]
        if self.phase is Phase.DIGESTED:
            return self._repeat_digest() if peer == group.leader else []
        return self._withdraw(group, now, "disconnected")

    def on_peer_lost(self, peer: str, now: float) -> list[Action]:
        """A replica is lost."""
        self._alive.discard(peer)
        self._lost.add(peer)
        self._follows.pop(peer, None)
        return self._on_absent(peer, now)

    def on_gone(self, peer: str, now: float) -> list[Action]:
        """A peer of another stage confirms that this replica's process has ended."""
        if self.is_out:
            return []
        if peer not in self._alive:
            self._gone.add(peer)
        return self._form(now)

    def on_resigned(self, peer: str, now: float) -> list[Action]:
        """A replica started anew or says goodbye: it has no vote until a COMMIT gives it one."""
        if self.is_out or not self.is_known(peer):
            return []
        self._silent.pop(peer, None)
        return self._on_silent(peer, 0, now)

    def on_follow(self, peer: str, version: int, lineage: str, now: float) -> list[Action]:
        """FOLLOW: a replica with the weights of this version asks to come along in the next round."""
        if self.is_out:
            return []
        if version == self.step and lineage != self.lineage:
            return self._answer(peer, now)
        if peer in self._follows or len(self._follows) < LIMITS.links:
            self._follows[peer] = (version, now)
        if peer in self.followers or peer not in self.roster:
            return []
        # One that is ahead of this peer may have voted for a COMMIT of this step: then that vote counts.
        self._silent[peer] = min(version, self._silent.get(peer, version))
        return self._on_silent(peer, version, now)

    def tick(self, now: float) -> list[Action]:
        """Time passes: what failed is tried again, what may be lost is said again."""
        if self.is_out:
            return []
        # Not everybody heard of it, and who has not takes another peer for the leader.
        if self._stepped_down:
            self._stepped_down = {p: at for p, at in self._stepped_down.items() if now - at < STEPPED_DOWN_S}
        actions: list[Action] = []
        if self._fail_at is not None and now >= self._fail_at:
            actions = self._fail_late(now)
        elif self.phase is Phase.DIGESTED and now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            actions = self._repeat_digest()
        elif self.phase is Phase.GATHERING and (self.is_leader or now - self._reported_at >= REPORT_EVERY_S):
            actions = self._report(now)
        return [*actions, *self._meet_all(now)]

    # -- inside ------------------------------------------------------------------------------------------------

    def _quit(self, reason: str, now: float) -> list[Action]:
        """Leave the attempt under way for a reason of this peer's own."""
        group = self.group
        if group is None:
            return []
        if group.leader == self.me:
            return self._fail_group(reason, now)
        return self._withdraw(group, now, reason)

    def _withdraw(
        self, group: Group, now: float, reason: str, suspects: tuple[str, ...] = ()
    ) -> list[Action]:
        """A member leaves the attempt, tells its leader, and reports for the next one."""
        told = Send(group.leader, Kind.FAILED, Failure(group.id, reason, suspects))
        return [*self._abandon(reason, now), told, *self._report(now)]

    def _refuse(self, leader: str, group: Group, reason: str, *, is_again: bool) -> list[Action]:
        """Take no part in an attempt; report again if the leader knew too little."""
        self.failures[reason] += 1
        report: list[Action] = [Send(leader, Kind.ARRIVE, self._own())] if is_again else []
        return [Send(leader, Kind.FAILED, Failure(group.id, reason)), *report]

    def _repeat_digest(self) -> list[Action]:
        group, held = self.group, self._held
        if group is None or held is None or group.leader == self.me:
            return []
        return [Send(group.leader, Kind.DIGEST, Digest(group.id, held.digest, self.step))]

    def _on_silent(self, peer: str, step: int, now: float) -> list[Action]:
        """A replica is out, and its vote does not count from this step on."""
        self._silent.setdefault(peer, step)
        self.followers = tuple(p for p in self.followers if p != peer)
        return self._on_absent(peer, now)

    def _on_absent(self, peer: str, now: float) -> list[Action]:
        """A member is lost, or has no vote any more."""
        self._arrivals.pop(peer, None)
        self._next_arrivals.pop(peer, None)
        if self.is_out or self.phase is Phase.APPLYING:
            return []
        actions: list[Action] = []
        group = self.group
        if group is not None and peer in group.members:
            # The leader can still commit if the lost member's digest came before its loss.
            settled = self.phase is Phase.DIGESTED and (
                peer in self._digests if group.leader == self.me else peer != group.leader
            )
            if not settled:
                if group.leader == self.me:
                    return self._fail_group("disconnected", now)
                if peer != group.leader:
                    return self._withdraw(group, now, "disconnected")
                actions = self._abandon("disconnected", now)
        return actions + self._report(now)
