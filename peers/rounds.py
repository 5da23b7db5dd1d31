"""Who averages with whom, and when it counts: the pure core of a stage's rounds.

Members report their settled ledgers to a leader (ARRIVE). When the ledgers of all live members partition
the plan, the leader names a group (GROUP), the group averages, members report what they got (DIGEST), and
only the leader's COMMIT lets anybody apply. The leader is the first live member in an order seeded by the
step, so its death needs no election. Nothing here talks, waits or computes: events in, actions out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from peers.frames import Kind
from peers.round_messages import Arrival, Commit, CompactKey, Group
from swarm.plan import group_id, seeded_order

RETRY_FIRST_S = 0.2
RETRY_CEILING_S = 5.0
WITNESS_EVERY_S = 1.0
REPORT_EVERY_S = 3.0

PlanFactory = Callable[[int, int, str, tuple[str, ...]], tuple[bytes, tuple[str, ...]]]
"""(next step, attempt, group id, roster) -> (plan bytes, sources); empty for stages other than 0."""


class Phase(Enum):
    """What a member of a round is doing."""

    GATHERING = "gathering"
    EXCHANGING = "exchanging"
    DIGESTED = "digested"
    """It holds an average and waits for the COMMIT."""
    APPLYING = "applying"
    """The COMMIT is decided or has come; the average is being applied."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message of the round to a replica."""

    peer: str
    kind: Kind
    body: Arrival | Group | Commit | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Average with this group; report `on_exchanged` or `on_exchange_failed`."""

    group: Group


@dataclass(frozen=True, slots=True)
class CancelExchange:
    """Stop the running exchange. The local gradient stays as it was."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Hold the ledger of the step still, or let it grow again."""

    is_frozen: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the average held for this commit's group; then call `on_applied`."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class AskGone:
    """Ask peers of other stages whether these replicas' processes have ended."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OutOfStep:
    """The others committed a step whose average this peer does not hold: it must re-synchronise."""

    commit: Commit


Action = Send | Exchange | CancelExchange | Freeze | Apply | AskGone | OutOfStep


class RoundCore:
    """The rounds of one stage as one member sees them."""

    def __init__(self, *, run_id: str, run_seed: int, stage: int, me: str, make_plan: PlanFactory) -> None:
        self.run_id, self.run_seed, self.stage, self.me = run_id, run_seed, stage, me
        self._make_plan = make_plan
        self.step = 0
        self.attempt = 0
        self.roster: tuple[str, ...] = ()
        self.phase = Phase.GATHERING
        self.failures: Counter[str] = Counter()
        self.last_commit: Commit | None = None
        self.group: Group | None = None
        self._alive: set[str] = set()
        self._gone: set[str] = set()
        self._plan: str = ""
        self._plan_keys: frozenset[CompactKey] = frozenset()
        self._mine: Arrival | None = None
        self._arrivals: dict[str, Arrival] = {}
        self._next_arrivals: dict[str, Arrival] = {}
        self._digests: dict[str, str] = {}
        self._held: tuple[str, str] | None = None
        self._decided: Commit | None = None
        self._not_before = 0.0
        self._retry_s = RETRY_FIRST_S
        self._asked_at = -WITNESS_EVERY_S
        self._reported_at = 0.0

    # -- what others may ask ---------------------------------------------------------------------------

    @property
    def leader(self) -> str:
        """First live member of the roster in the step's seeded order."""
        for peer in seeded_order(self.roster, self.run_seed, self.stage, self.step):
            if peer == self.me or peer in self._alive:
                return peer
        return self.me

    @property
    def present(self) -> list[str]:
        """Live members of the roster, this peer included, in roster order."""
        return [peer for peer in self.roster if peer == self.me or peer in self._alive]

    # -- events ------------------------------------------------------------------------------------------

    def begin(self, step: int, roster: tuple[str, ...]) -> None:
        """Start at a step with a roster (the start of the run).

        Members whose links are still on their way count as alive until they are reported lost.
        """
        self.step, self.roster = step, roster
        self._alive |= {peer for peer in roster if peer != self.me}

    def on_plan(self, plan: str, keys: frozenset[CompactKey], now: float) -> list[Action]:
        """The plan of the current step, or one that replaces it."""
        actions: list[Action] = []
        if plan != self._plan:
            if self.phase in (Phase.EXCHANGING, Phase.DIGESTED):
                actions = self._abandon("key", now)
            self._plan, self._plan_keys, self._mine, self._held = plan, keys, None, None
            # Others may have known this plan before: their reports stand, those under another are void.
            self._arrivals = {peer: a for peer, a in self._arrivals.items() if a.plan == plan}
        return actions + self._form(now)

    def on_ready(self, arrival: Arrival, now: float) -> list[Action]:
        """This peer's ledger is settled and every slot of the plan has ended (again, if it grew)."""
        if arrival.step != self.step or arrival.plan != self._plan:
            return []
        self._mine = Arrival(arrival.step, arrival.plan, arrival.keys, arrival.weight, self._held)
        return self._report(now)

    def on_arrive(self, peer: str, arrival: Arrival, now: float) -> list[Action]:
        """ARRIVE of a replica."""
        if peer not in self.roster:
            self.failures["stranger"] += 1
            return []
        if arrival.step < self.step:
            commit = self.last_commit
            if commit is not None and commit.step == arrival.step:
                return [Send(peer, Kind.COMMIT, commit)]
            return []
        if arrival.step > self.step:
            # The sender has committed this step; its answer to our own ARRIVE is that COMMIT.
            if arrival.step == self.step + 1:
                self._next_arrivals[peer] = arrival
            is_behind = self._mine is not None and self.phase is not Phase.APPLYING
            return [Send(peer, Kind.ARRIVE, self._mine)] if is_behind and self._mine else []
        if self._decided is not None:
            return [Send(peer, Kind.COMMIT, self._decided)] if peer in self._decided.roster else []
        self._arrivals[peer] = arrival
        return self._form(now)

    def on_group(self, peer: str, group: Group, now: float) -> list[Action]:
        """GROUP of a leader."""
        mine = self._mine
        if peer not in self.roster or self.me not in group.members or group.step < self.step:
            self.failures["stranger"] += 1
            return []
        if group.step > self.step:
            return [Send(peer, Kind.ARRIVE, mine)] if mine is not None else []
        is_decided = self.phase is Phase.APPLYING
        if (
            group.attempt <= self.attempt
            or is_decided
            or (self.phase is Phase.DIGESTED and peer != self.leader)
        ):
            self.failures["late"] += 1
            again = mine is not None and not is_decided
            report: list[Action] = [Send(peer, Kind.ARRIVE, mine)] if again and mine is not None else []
            return [Send(peer, Kind.FAILED, (group.id, "late")), *report]
        position = group.members.index(self.me)
        if mine is None or mine.plan != group.plan or mine.ledger_hash != group.ledgers[position]:
            self.failures["key"] += 1
            failed = Send(peer, Kind.FAILED, (group.id, "key"))
            return [failed, Send(peer, Kind.ARRIVE, mine)] if mine is not None else [failed]
        if mine.weight != group.weights[position]:
            self.failures["weight"] += 1
            return [Send(peer, Kind.FAILED, (group.id, "weight"))]
        return [*self._leave_exchange(), *self._enter(group)]

    def on_exchanged(self, group: str, digest: str, now: float) -> list[Action]:
        """The exchange ended: this peer holds the average, whose bytes have this digest."""
        if self.group is None or self.group.id != group or self.phase is not Phase.EXCHANGING:
            return []
        self.phase, self._held = Phase.DIGESTED, (group, digest)
        if self.group.leader != self.me:
            return [Send(self.group.leader, Kind.DIGEST, (group, digest))]
        return self.on_digest(self.me, group, digest, now)

    def on_exchange_failed(self, group: str, reason: str, now: float) -> list[Action]:
        """The exchange failed here."""
        if self.group is None or self.group.id != group or self.phase is not Phase.EXCHANGING:
            return []
        leader = self.group.leader
        if leader != self.me:
            return [
                *self._abandon(reason, now),
                Send(leader, Kind.FAILED, (group, reason)),
                *self._report(now),
            ]
        return self._fail_group(reason, now)

    def on_failed(self, peer: str, group: str, reason: str, now: float) -> list[Action]:
        """FAILED: of a member to the leader, or of the leader to its members."""
        if self.group is None or self.group.id != group or peer not in self.group.members:
            return []
        if self.group.leader == self.me:
            return self._fail_group(reason, now)
        if peer == self.group.leader:
            return [*self._abandon(reason, now), *self._report(now)]
        return []

    def on_digest(self, peer: str, group: str, digest: str, now: float) -> list[Action]:
        """DIGEST of a member, at the leader."""
        for known in (self._decided, self.last_commit):
            if known is not None and known.group == group and peer != self.me:
                return [Send(peer, Kind.COMMIT, known)]  # it said so again: our COMMIT was lost with a link
        current = self.group
        if current is None or current.id != group or current.leader != self.me:
            # That attempt has failed here, and the word of it was lost.
            return [Send(peer, Kind.FAILED, (group, "late"))] if peer in self.roster else []
        if peer not in current.members:
            return []
        self._digests[peer] = digest
        if len(self._digests) < len(current.members):
            return []
        if len(set(self._digests.values())) > 1:
            return self._fail_group("digest", now)
        return self._commit(current.id, current.attempt, digest, current.members)

    def on_commit(self, peer: str, commit: Commit, now: float) -> list[Action]:
        """COMMIT of a leader, or of a member that had it from one."""
        if commit.step != self.step or peer not in self.roster or self.phase is Phase.APPLYING:
            return []
        if self.me not in commit.roster or self._held != (commit.group, commit.digest):
            return [OutOfStep(commit)]
        # Who reported here took this peer for the leader; the real one may have died before it told them.
        waiting = [other for other in self._arrivals if other in commit.roster and other != peer]
        return [*(Send(other, Kind.COMMIT, commit) for other in waiting), *self._decide(commit)]

    def on_applied(self, commit: Commit) -> None:
        """The average of the commit is applied: the next step begins with its roster."""
        self.last_commit = commit
        self.step, self.attempt, self.roster = commit.step + 1, 0, commit.roster
        self.phase, self.group, self._held, self._mine = Phase.GATHERING, None, None, None
        self._decided = None
        self._plan, self._plan_keys = "", frozenset()
        self._arrivals, self._next_arrivals = self._next_arrivals, {}
        self._digests.clear()
        self._not_before, self._retry_s = 0.0, RETRY_FIRST_S

    def on_peer_up(self, peer: str, now: float) -> list[Action]:
        """A replica's link is up (again): what was under way on the old one may be lost, and is repeated."""
        self._alive.add(peer)
        self._gone.discard(peer)
        group = self.group
        if self._decided is not None:
            is_due = self._decided.leader == self.me and peer in self._decided.roster
            return [Send(peer, Kind.COMMIT, self._decided)] if is_due else []
        if group is None or peer not in group.members:
            return self._report(now)
        if group.leader == self.me:
            return [] if peer in self._digests else self._fail_group("disconnected", now)
        if self.phase is Phase.DIGESTED:
            is_leader = peer == group.leader and self._held is not None
            return [Send(peer, Kind.DIGEST, self._held)] if is_leader and self._held else []
        return self._withdraw(group, now)

    def on_peer_lost(self, peer: str, now: float) -> list[Action]:
        """A replica is lost."""
        self._alive.discard(peer)
        self._arrivals.pop(peer, None)
        self._next_arrivals.pop(peer, None)
        if self.phase is Phase.APPLYING:
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
                    return self._withdraw(group, now)
                actions = self._abandon("disconnected", now)
        return actions + (self._report(now) if self.phase is Phase.GATHERING else [])

    def on_gone(self, peer: str, now: float) -> list[Action]:
        """A peer of another stage confirms that this replica's process has ended."""
        if peer not in self._alive:
            self._gone.add(peer)
        return self._form(now)

    def tick(self, now: float) -> list[Action]:
        """Time passes: a failed attempt is tried again, a missing witness asked, an old report repeated."""
        if self.leader != self.me and now - self._reported_at >= REPORT_EVERY_S:
            return self._report(now)
        return self._form(now)

    # -- inside ------------------------------------------------------------------------------------------

    def _report(self, now: float) -> list[Action]:
        if self._mine is None or self.phase is not Phase.GATHERING:
            return []
        self._mine = Arrival(self._mine.step, self._mine.plan, self._mine.keys, self._mine.weight, self._held)
        if self.leader != self.me:
            self._reported_at = now
            return [Send(self.leader, Kind.ARRIVE, self._mine)]
        return self._form(now)

    def _form(self, now: float) -> list[Action]:
        """Name a group if this peer leads, everybody alive has arrived and the ledgers partition the plan."""
        mine = self._mine
        if (
            mine is None
            or self.leader != self.me
            or self.phase is not Phase.GATHERING
            or now < self._not_before
        ):
            return []
        present = self.present
        arrivals = {peer: self._arrivals[peer] for peer in present if peer in self._arrivals} | {
            self.me: mine
        }
        if len(arrivals) < len(present):
            return self._inquire([peer for peer in present if peer not in arrivals], mine, now)
        if not self._has_quorum(present):
            if now - self._asked_at < WITNESS_EVERY_S:
                return []
            self._asked_at = now
            return [AskGone(tuple(p for p in self.roster if p not in present and p not in self._gone))]
        held = {arrival.held for arrival in arrivals.values()}
        if len(held) == 1 and self._held is not None:
            # Everybody who is left holds the same average of a group whose leader died: it is finished.
            return self._commit(self._held[0], self.attempt + 1, self._held[1], tuple(present))
        if any(arrival.plan != self._plan for arrival in arrivals.values()):
            return []
        counts = Counter(key for arrival in arrivals.values() for key in arrival.keys)
        if set(counts) != self._plan_keys or max(counts.values()) > 1:
            return []
        attempt = self.attempt + 1
        members = tuple(present)
        group = Group(
            id=group_id(self.run_id, self.stage, self.step, attempt, self.me, members),
            step=self.step,
            attempt=attempt,
            leader=self.me,
            members=members,
            weights=tuple(arrivals[peer].weight for peer in members),
            ledgers=tuple(arrivals[peer].ledger_hash for peer in members),
            plan=self._plan,
        )
        sends: list[Action] = [Send(peer, Kind.GROUP, group) for peer in members if peer != self.me]
        return [*sends, *self._enter(group)]

    def _inquire(self, missing: list[str], mine: Arrival, now: float) -> list[Action]:
        """In doubt about a group whose leader died: one of the others may have had its COMMIT."""
        if self._held is None or now - self._asked_at < WITNESS_EVERY_S:
            return []
        self._asked_at = now
        return [Send(peer, Kind.ARRIVE, mine) for peer in missing]

    def _has_quorum(self, members: list[str]) -> bool:
        voters = [peer for peer in self.roster if peer not in self._gone]
        present = sum(1 for peer in members if peer in voters)
        if 2 * present > len(voters):
            return True
        return (
            2 * present == len(voters) and self.last_commit is not None and self.last_commit.leader in members
        )

    def _enter(self, group: Group) -> list[Action]:
        self.group, self.attempt, self.phase = group, group.attempt, Phase.EXCHANGING
        self._held = None
        self._digests.clear()
        return [Freeze(True), Exchange(group)]

    def _leave_exchange(self) -> list[Action]:
        if self.phase is Phase.GATHERING:
            return []
        self.phase = Phase.GATHERING
        return [CancelExchange(), Freeze(False)]

    def _withdraw(self, group: Group, now: float, reason: str = "disconnected") -> list[Action]:
        """A member leaves the attempt, tells its leader, and reports for the next one."""
        told = Send(group.leader, Kind.FAILED, (group.id, reason))
        return [*self._abandon(reason, now), told, *self._report(now)]

    def _abandon(self, reason: str, now: float) -> list[Action]:
        self.failures[reason] += 1
        self._not_before = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_CEILING_S)
        actions: list[Action] = [CancelExchange()] if self.phase is Phase.EXCHANGING else []
        self.phase, self.group = Phase.GATHERING, None
        return [*actions, Freeze(False)]

    def _fail_group(self, reason: str, now: float) -> list[Action]:
        group = self.group
        if group is None:
            return []
        told: list[Action] = [Send(p, Kind.FAILED, (group.id, reason)) for p in group.members if p != self.me]
        self._held = None
        self._arrivals.clear()  # members report again, with what they have by then
        return [*self._abandon(reason, now), *told, *self._report(now)]

    def _commit(self, group: str, attempt: int, digest: str, members: tuple[str, ...]) -> list[Action]:
        roster = tuple(peer for peer in members if peer == self.me or peer in self._alive)
        plan, sources = self._make_plan(self.step + 1, attempt, group, roster)
        commit = Commit(group, self.step, attempt, digest, self.me, roster, plan, sources)
        sends: list[Action] = [Send(peer, Kind.COMMIT, commit) for peer in roster if peer != self.me]
        return [*sends, *self._decide(commit)]

    def _decide(self, commit: Commit) -> list[Action]:
        self.phase, self._decided = Phase.APPLYING, commit
        return [Apply(commit)]
