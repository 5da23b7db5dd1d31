"""The leader's side of a round: when a group is named, who is left out, when it has failed or is committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from peers.frames import Kind
from peers.limits import LIMITS
from peers.round_actions import Action, AskGone, AskMissing, Dropped, Fence, OutOfStep, Phase, Send, Unfence
from peers.round_attempt import RoundAttempt
from peers.round_ballots import is_available, unfinished
from peers.round_ledgers import cover
from peers.round_messages import Arrival, Commit, CompactKey, Failure, Group, Held
from peers.round_state import REPORT_EVERY_S, WITNESS_EVERY_S
from swarm.plan import MAX_ROSTER, group_id

MISSING_FIRST_S = 2.0
MISSING_AGAIN_S = 5.0
FENCE_AGAIN_S = 2.0
BLAME_WAIT_S = 2.0


class RoundLeader(RoundAttempt):
    """What the first live member does beyond the others."""

    def _report(self, now: float) -> list[Action]:
        """Tell the leader that this peer has arrived; at the leader, see whether all have."""
        if self.phase is not Phase.GATHERING:
            return []
        if self.is_leader:
            return self._form(now)
        if self._mine is None or not self.leader:
            return []
        self._reported_at = now
        return [Send(self.leader, Kind.ARRIVE, self._own())]

    def _form(self, now: float) -> list[Action]:
        """Name a group if this peer leads, a quorum has arrived, nobody else is due, and the ledgers fit the plan."""
        if not self.is_leader:
            self._lead_since = None
            return []
        if self._lead_since is None:
            self._lead_since = now
        if self._mine is None or self.phase is not Phase.GATHERING or now < self._not_before:
            return []
        arrived = self._arrived(self.present)
        missing = [p for p in self.present if p not in arrived and p not in self._excluded]
        is_late = now >= self._waited_since() + self.pace.arrival_deadline_s
        if not self._has_quorum(arrived):
            alone = self._wait_alone(now) if is_late or not missing else []
            return [*self._inquire(missing, now), *alone]
        if missing and not is_late:
            return self._inquire(missing, now)
        if missing:
            self._excluded |= set(missing)
            self.failures["late"] += len(missing)
        followers = self._arrived(self.followers)
        reports = {peer: arrival.held for peer, arrival in (arrived | followers).items()}
        held = unfinished(reports)
        if held is not None:
            if not is_available(held, reports) and self._is_anywhere(held):
                return self._wait_alone(now)
            if is_available(held, reports):
                return self._name(arrived | followers, (), held, now)
        coverage = cover(self._plan_keys, arrived, self.me)
        if coverage.doubled:
            return [action for peer in coverage.doubled for action in self._fence(peer, "key", now)]
        if coverage.uncovered:
            return self._seek(coverage.uncovered, now)
        self._missing_since = None
        if self._waits_for_followers(followers, now):
            return []
        return self._name(arrived | followers, coverage.lost, None, now)

    def _arrived(self, peers: list[str] | tuple[str, ...]) -> dict[str, Arrival]:
        """Who of these has arrived under the plan in force, this peer included."""
        known = self._arrivals | ({self.me: self._own()} if self._mine is not None else {})
        return {
            peer: known[peer]
            for peer in peers
            if peer in known and known[peer].plan == self._plan and peer not in self._excluded
        }

    def _waited_since(self) -> float:
        return max(self._ready_at or 0.0, self._lead_since or 0.0, self._retried_at)

    def _is_anywhere(self, held: Held) -> bool:
        """Whether a member that is not here may have the average that all who are here lack."""
        return any(self._votes(peer) and not self._is_present(peer) for peer in held.members) or any(
            peer in self._excluded for peer in held.members
        )

    def _waits_for_followers(self, arrived: dict[str, Arrival], now: float) -> bool:
        if self._gate_since is None:
            self._gate_since = now
        due = [p for p in self.followers if p in self._alive and p not in arrived and p not in self._excluded]
        return bool(due) and now < self._gate_since + LIMITS.gate_s

    def _inquire(self, missing: list[str], now: float) -> list[Action]:
        """Tell those who have not arrived that they are waited for: one may have seen a COMMIT of this step."""
        actions: list[Action] = []
        every_s = WITNESS_EVERY_S if self._held is not None else REPORT_EVERY_S
        for peer in missing:
            if now - self._inquired.setdefault(peer, now - WITNESS_EVERY_S if self._held else now) >= every_s:
                self._inquired[peer] = now
                actions.append(Send(peer, Kind.ARRIVE, self._own()))
        return actions

    def _wait_alone(self, now: float) -> list[Action]:
        """No quorum: ask whether those who are away have ended, and take back in whoever was left out."""
        if now - self._asked_at < WITNESS_EVERY_S:
            return []
        self._asked_at = now
        self.failures["alone"] += 1
        self._excluded.clear()
        away = tuple(p for p in self.roster if self._votes(p) and not self._is_present(p))
        return [AskGone(away)] if away else []

    def on_malformed(self, peer: str, now: float) -> list[Action]:
        """A replica reports, or names as a leader, what no member can. It is in no group of this step that this peer
        names, and whoever waits for its group waits for the next leader's; its keys are taken from others.
        """
        if self.is_out or not self.is_known(peer):
            return []
        self._arrivals.pop(peer, None)
        self._excluded.add(peer)
        self._stepped_down[peer] = now
        return self._report(now)

    # -- keys --------------------------------------------------------------------------------------------

    def _fence(self, peer: str, reason: str, now: float) -> list[Action]:
        """Set a member's ledger aside. It arrives again with an empty one."""
        before = self._fenced.get(peer)
        if before is not None and now - before[0] < FENCE_AGAIN_S:
            return []
        self._fenced[peer] = (now, reason)
        self._arrivals.pop(peer, None)
        self.failures[reason] += 1
        return [Fence(peer, reason)]

    def _seek(self, keys: tuple[CompactKey, ...], now: float) -> list[Action]:
        """Keys that no ledger has: of members that were left out they are replayed; others have to be asked for."""
        left_out = [p for p in self.roster if p in self._excluded and p != self.me and p not in self._fenced]
        if left_out:
            self._missing_since = None
            return [action for peer in left_out for action in self._fence(peer, "late", now)]
        if self._missing_since is None:
            self._missing_since, self._missing_asked = now, None
        if self._missing_asked is None:
            is_due = now - self._missing_since >= MISSING_FIRST_S
        else:
            is_due = now - self._missing_asked >= MISSING_AGAIN_S
        if not is_due:
            return []
        # Lost here, and perhaps not for the stage before, which then takes its keys for done.
        away = [p for p in self.roster if p not in self._fenced and not self._is_present(p)]
        actions = [action for peer in away for action in self._fence(peer, "disconnected", now)]
        if self._missing_asked is not None:
            # A leader that is gone may have set this peer aside (and only told the stage before), and all others.
            actions.append(Unfence())
        self._missing_asked = now
        return [*actions, AskMissing(keys)]

    # -- the attempt -------------------------------------------------------------------------------------------

    def _name(
        self, arrivals: dict[str, Arrival], lost: tuple[CompactKey, ...], held: Held | None, now: float
    ) -> list[Action]:
        members = tuple(arrivals)
        attempt = max(self.attempt, *(arrival.attempt for arrival in arrivals.values())) + 1
        owed = tuple(arrival.owed for arrival in arrivals.values())
        group = Group(
            id=group_id(self.run_id, self.stage, self.step, attempt, self.me, members),
            step=self.step,
            attempt=attempt,
            leader=self.me,
            members=members,
            weights=tuple(arrival.weight for arrival in arrivals.values()),
            ledgers=tuple(arrival.ledger_hash for arrival in arrivals.values()),
            plan=self._plan,
            lost=lost,
            sketch=arrivals[self.me].sketch,
            lineage=self.lineage,
            held=held,
            corrector=_common(arrival.corrector for arrival in arrivals.values()) if held is None else "",
            owed=owed if any(owed) else (),
            settled=_common(arrival.settled for arrival in arrivals.values()) if held is None else "",
        )
        sends: list[Action] = [Send(peer, Kind.GROUP, group) for peer in members if peer != self.me]
        return [*sends, *self._enter(group, now), *self._commit_if_agreed(now)]

    def _fail_group(self, reason: str, now: float, suspects: tuple[str, ...] = ()) -> list[Action]:
        group = self.group
        if group is None:
            return []
        self._failed.add(group.id)
        self._take_back(group.id)
        failure = Failure(group.id, reason, suspects)
        told: list[Action] = [Send(peer, Kind.FAILED, failure) for peer in group.members if peer != self.me]
        return [*self._abandon(reason, now), *told, *self._report(now)]

    def _on_blame(self, peer: str, suspects: tuple[str, ...], now: float) -> list[Action]:
        """A member's exchange did not end in time. What the others say is waited for: one of them is to blame."""
        group = self.group
        if group is None:
            return []
        self._blames[peer] = tuple(s for s in suspects if s in group.members and s != peer)
        if self._fail_at is None:
            self._fail_at = now + BLAME_WAIT_S
        if all(member in self._blames or member in self._digests for member in group.members):
            return self._fail_late(now)
        return []

    def _fail_late(self, now: float) -> list[Action]:
        """The exchange has failed for lateness: leave out whoever is blamed for it."""
        group = self.group
        if group is None:
            return []
        self._late_attempts += 1
        self.pace.note_late_exchange()
        culprit = self._culprit(group)
        if culprit == self.me:
            self._stepped_down[self.me] = now
            return self._fail_group("late", now, (self.me,))
        fences: list[Action] = []
        if culprit:
            self._excluded.add(culprit)
            if culprit in self.roster:
                fences = self._fence(culprit, "late", now)
        return [*self._fail_group("late", now), *fences]

    def _culprit(self, group: Group) -> str:
        """The member blamed by most of the others, or from the second failure on the most-blamed one; or "".

        Nobody is left out whom a quorum needs. The leader believes it of itself only if several say so, of another
        not on its own word alone, and of a group of two nobody at once.
        """
        counts = Counter(suspect for suspects in self._blames.values() for suspect in suspects)
        mine = self._blames.get(self.me, ()) if len(group.members) > 2 else ()
        for suspect, count in sorted(
            counts.items(), key=lambda item: (-item[1], group.members.index(item[0]))
        ):
            is_majority = count > 1 and 2 * count > len(group.members) - 1
            has_witness = count > (suspect in mine)
            is_enough = is_majority or (self._late_attempts > 1 and suspect != self.me and has_witness)
            others = [p for p in group.members if p != suspect and p not in self._excluded]
            if is_enough and self._has_quorum(others):
                return suspect
        return ""

    # -- the commit ----------------------------------------------------------------------------------------------

    def _commit_if_agreed(self, now: float) -> list[Action]:
        """Commit once every member has agreed; all have to agree to the same."""
        group, held = self.group, self._held
        if group is None or group.leader != self.me or self.phase is not Phase.DIGESTED or held is None:
            return []
        if len(self._digests) < len(group.members):
            return []
        if len(set(self._digests.values())) > 1:
            return self._fail_group("digest", now)
        return self._commit(group, held, now)

    def _commit(self, group: Group, held: Held, now: float) -> list[Action]:
        roster = held.members
        there = tuple(p for p in roster if p == self.me or (p in self._alive and p not in self._silent))
        plan, sources = self._make_plan(self.step + 1, group.attempt, held.group, there or roster)
        followers = self._due_followers(roster, now)
        commit = Commit(
            group=held.group,
            step=self.step,
            attempt=group.attempt,
            digest=held.digest,
            leader=held.leader,
            roster=roster,
            plan=plan,
            sources=sources,
            lineage=self.lineage,
            followers=followers,
            lost=held.lost,
            weight=held.weight,
        )
        told = dict.fromkeys((*roster, *followers, *self.roster, *self.followers))
        sends: list[Action] = [
            Send(peer, Kind.COMMIT, commit) for peer in told if peer != self.me and peer in self._alive
        ]
        if held.has_average and self.me in roster:
            return [*sends, *self._decide(commit)]
        # It only bore witness to an average of others, who apply it now.
        self.phase, self.group = Phase.GATHERING, None
        out = OutOfStep(commit) if self.me in roster else Dropped(commit)
        return [*sends, *self._halt(out)]

    def _due_followers(self, roster: tuple[str, ...], now: float) -> tuple[str, ...]:
        """Who asked to follow lately, is there, and close enough."""
        due = [
            peer
            for peer, (version, at) in self._follows.items()
            if peer in self._alive
            and now - at <= LIMITS.follow_fresh_s
            and 0 <= self.step - version <= LIMITS.follow_behind
            and (peer not in roster or peer in self._silent)
        ]
        return tuple(sorted(due)[: MAX_ROSTER - len(roster)])


def _common(hashes: Iterable[str]) -> str:
    """The hash that all name, else "": what only some hold is used by none."""
    found = set(hashes)
    return found.pop() if len(found) == 1 else ""
