"""A simulated pipeline of several stages and the rounds that commit its steps.

Links lose nothing between the living for good (a flap repeats what was on its way), bulk frames overtake each
other, and kill -9 takes a peer with its accumulator. What else may befall it stands in `tests.kit.troubles`.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from peers import work_items as items
from peers.limits import LIMITS
from peers.work_items import Phase
from swarm.plan import MicrobatchKey
from tests.kit.simulation import Network, Simulation
from tests.kit.troubles import Trouble, trouble
from tests.kit.work_peer import STEPS, Peer, keys_of, plan_of

UNCOVERED_S = 2.0
LOOK_S = 0.5


class Pipeline:
    """All stages, and the rounds that commit their steps.

    troubles: kinds of `tests.kit.troubles` with the stage they befall. may_lose: whether keys may be lost.
    """

    def __init__(
        self,
        seed: int,
        replicas: tuple[int, ...],
        *,
        victims: tuple[int, ...] = (),
        duplicates: float = 0.0,
        flaps: int = 0,
        longest_break_s: float = 0.0,
        kill_at_action: bool = False,
        troubles: tuple[tuple[Trouble, int], ...] = (),
        may_lose: bool = False,
    ) -> None:
        self.sim = Simulation(seed)
        self.network = Network(self.sim, longest_s=0.1)
        self.stages, self.slots, self.duplicates = len(replicas), replicas[0], duplicates
        self.longest_break_s = longest_break_s
        self.numbers = iter(range(10**9))
        self.committed: dict[tuple[int, int], Counter[MicrobatchKey]] = {}
        self.lost: dict[tuple[int, int], frozenset[MicrobatchKey]] = {}
        self.fences: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        self.emptied: set[int] = set()
        self.may_lose = may_lose
        self.may_double = any(kind not in ("kill", "restart") for kind, _ in troubles)
        self.has_moved = True
        """Whether a peer has gone to another step, or out of the count, since somebody looked."""
        self._rounds: dict[int, tuple[int, frozenset[str]]] = {}
        self._sources: dict[int, tuple[str, ...]] = {}
        self._fenced_at: dict[str, float] = {}
        self._uncovered_since: dict[tuple[int, int], float] = {}
        self._victims = list(victims)
        self._kill_at_action = kill_at_action
        self.peers: dict[str, Peer] = {}
        for stage, count in enumerate(replicas):
            for number in range(count):
                self.peers[f"{stage}.{number}"] = Peer(self, stage, f"{stage}.{number}")
        for peer in self.peers.values():
            for name in peer.linked(peer.stage + 1):
                self.sim.after(self.sim.random.uniform(0, 0.3), self._up, peer, name)
            self.sim.after(self.sim.random.uniform(0, 0.3), peer.tick)
            peer.core.version = -1
            self.sim.after(self.sim.random.uniform(0, 0.3), peer.commit, -1)
        if not kill_at_action:
            for stage in victims:
                self.sim.after(self.sim.random.uniform(0.3, 6.0), self._kill_one_of, stage)
        for _ in range(flaps):
            self.sim.after(self.sim.random.uniform(0.3, 6.0), self._flap)
        for kind, stage in troubles:
            self.sim.after(self.sim.random.uniform(0.3, 6.0), trouble, self, kind, stage)
        self.sim.after(LOOK_S, self._look_at_rounds)

    def of_stage(self, stage: int) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage == stage]

    def living(self, stage: int) -> list[Peer]:
        return [peer for peer in self.of_stage(stage) if not peer.is_dead]

    def members(self, stage: int) -> list[Peer]:
        """Those who vote and work."""
        return [peer for peer in self.living(stage) if peer.is_member]

    def sources(self, step: int) -> tuple[str, ...]:
        """Decided once, with the plan: the members run the slots."""
        if step not in self._sources:
            members = [peer.name for peer in self.members(0)] or [peer.name for peer in self.living(0)]
            self._sources[step] = tuple(members[slot % len(members)] for slot in range(self.slots))
        return self._sources[step]

    def void(self, stage: int, step: int) -> None:
        """A stage that lost all its peers does a step again that it had committed."""
        self.committed.pop((stage, step), None)
        self._rounds.pop(stage, None)
        if stage == 0:
            self._sources.pop(step, None)

    # -- faults ------------------------------------------------------------------------------------------

    def dies_before(self, peer: Peer, action: items.Action) -> bool:
        if not self._kill_at_action or peer.stage not in self._victims or len(self.living(peer.stage)) == 1:
            return False
        rare = isinstance(action, items.SlotDone | items.AskHolders)
        return not peer.is_dead and self.sim.random.random() < (0.2 if rare else 0.02)

    def _kill_one_of(self, stage: int) -> None:
        living = self.living(stage)
        if len(living) > 1:
            self.kill(self.sim.random.choice(living).name)

    def kill(self, name: str) -> None:
        self.has_moved, victim = True, self.peers[name]
        if victim.stage in self._victims:
            self._victims.remove(victim.stage)
        neighbours = [
            p.name for p in self.peers.values() if abs(p.stage - victim.stage) <= 1 and p is not victim
        ]
        self.network.kill(name, neighbours, lambda other: self.peers[other].on_lost(victim))
        self.break_round_of(victim)

    def _flap(self) -> None:
        """A link breaks, and stands again at once or after a moment that is too short to count as a loss."""
        peer = self.sim.random.choice([p for s in range(self.stages - 1) for p in self.living(s)])
        names = peer.linked(peer.stage + 1)
        if not names:
            return
        other = self.peers[self.sim.random.choice(names)]
        self.break_link(peer, other)
        self.sim.after(self.sim.random.choice([0.0, self.longest_break_s]), self.mend, peer, other)

    def break_link(self, peer: Peer, other: Peer) -> None:
        """The link to a peer of the next stage is down until `mend`."""
        self.network.flap(peer.name, other.name)
        self.network.broken.add(frozenset((peer.name, other.name)))
        peer.ready.discard(other.name)

    def mend(self, peer: Peer, other: Peer) -> None:
        """A link to a peer of the next stage, or between replicas, is up (again)."""
        self.network.broken.discard(frozenset((peer.name, other.name)))
        if peer.is_dead or other.is_dead:
            return
        for one, two in ((peer, other), (other, peer)):  # both repeat what the other may have missed
            # The step before too: a neighbour may still need the end of a slot that this side has committed.
            for plan in [p for p in one.plans.values() if p.step >= one.core.version - 1]:
                one.send(two.name, "plan", plan)
                for slot in one.ended[plan.digest()]:
                    one.send(two.name, "step_end", plan.digest(), slot)
        self._up(peer, other.name)

    def _up(self, peer: Peer, name: str) -> None:
        other = self.peers[name]
        if other.stage == peer.stage + 1:
            if other.is_member:
                other.send(peer.name, "ready")
            self.sim.after(LIMITS.ready_s, peer.expect_ready, other)

    # -- rounds: a stage commits once its settled ledgers partition the plan -----------------------------

    def _look_at_rounds(self) -> None:
        for stage in range(self.stages):
            self.look_at_round(stage)
        self.sim.after(LOOK_S, self._look_at_rounds)

    def look_at_round(self, stage: int) -> None:
        """What the leader of a stage's round does when something has changed, and on a timer."""
        members = [] if stage in self._rounds else self.members(stage)
        if not members:
            return
        version = members[0].core.version
        if {peer.core.version for peer in members} != {version} or not 0 <= version < STEPS:
            return
        if (stage, version) in self.committed:
            return
        if {peer.name for peer in members} <= self.fences[stage, version]:
            self.fences[stage, version].discard(members[0].name)  # otherwise nobody is left to work
            members[0].unfence()
        leader, digest = members[0], plan_of(version, self.slots).digest()
        for peer in members:
            if peer.name in self.fences[stage, version] and not peer.core.is_fenced:
                # Its ledger counts no more, whether it knows or not.
                self._fence(leader, peer, digest)
                return
        for peer in members:
            plan = peer.core.plan
            if plan is None or not peer.core.is_settled or len(peer.ended[plan.digest()]) < self.slots:
                return
        held = Counter(key for peer in members for key in peer.core.ledger)
        for key, count in held.items():
            if count > 1:
                assert self.may_double, self.story(f"stage {stage} holds {key} twice")
                doubled = [peer for peer in members if key in peer.core.ledger]
                self.fences[stage, version].add(self.sim.random.choice(doubled).name)
                return
        uncovered = [key for key in keys_of(version, self.slots) if key not in held]
        lost = self._lost_of(stage, version, members, uncovered)
        if len(lost) < len(uncovered):
            self._seek(leader, stage, version, tuple(key for key in uncovered if key not in lost))
            return
        for peer in members:
            ledger = Counter(dict.fromkeys(peer.core.ledger, 1))
            assert peer.accumulated[version] == ledger, self.story(
                f"{peer.name} accumulated beyond its ledger"
            )
            peer.run(peer.core.freeze(True, self.sim.now))
        self._rounds[stage] = (version, frozenset(peer.name for peer in members))
        self.sim.after(
            self.sim.random.uniform(0.01, 0.5), self._decide, stage, version, held, frozenset(lost)
        )

    def _fence(self, leader: Peer, victim: Peer, digest: str) -> None:
        if self.sim.now - self._fenced_at.get(victim.name, -LOOK_S) < LOOK_S:
            return
        self._fenced_at[victim.name] = self.sim.now
        if leader is victim:
            self.sim.after(0.0, victim.on_fence, digest, victim.name)
        else:
            leader.send(victim.name, "fence", digest, victim.name)
        for name in leader.linked(leader.stage - 1):
            leader.send(name, "fence", digest, victim.name)
        leader.reassign()

    def _lost_of(
        self, stage: int, version: int, members: list[Peer], uncovered: list[MicrobatchKey]
    ) -> set[MicrobatchKey]:
        """Uncovered keys that a member knows nobody can give, or that nobody of the stage before can send."""
        lost = {key for peer in members for key in peer.core.lost if key in uncovered}
        before, linked = self.members(stage - 1), members[0].linked(stage - 1)
        # One whose link is down may keep the key, and send it as soon as the link is up again.
        if before and all(peer.core.version > version and peer.name in linked for peer in before):
            kept = {key for peer in before for key in peer.core.kept(uncovered)}
            lost |= set(uncovered) - kept
        return lost

    def _seek(self, leader: Peer, stage: int, version: int, keys: tuple[MicrobatchKey, ...]) -> None:
        since = self._uncovered_since.setdefault((stage, version), self.sim.now)
        if self.sim.now - since < UNCOVERED_S:
            return
        self._uncovered_since[stage, version] = self.sim.now
        if stage == 0:
            leader.reassign(is_forced=True)
        for name in leader.linked(stage - 1):
            leader.send(name, "missing", keys)

    def break_round_of(self, victim: Peer) -> None:
        """A round fails with any of its members."""
        if victim.stage in self._rounds and victim.name in self._rounds[victim.stage][1]:
            del self._rounds[victim.stage]
            for peer in self.living(victim.stage):
                delay = self.sim.random.uniform(0.0, 2.0)
                self.sim.after(delay, self._unfreeze, peer, peer.core.version)

    def _unfreeze(self, peer: Peer, version: int) -> None:
        if not peer.is_dead and peer.core.version == version and peer.stage not in self._rounds:
            peer.run(peer.core.freeze(False, self.sim.now))
            self.look_at_round(peer.stage)

    def _decide(
        self, stage: int, version: int, held: Counter[MicrobatchKey], lost: frozenset[MicrobatchKey]
    ) -> None:
        if self._rounds.get(stage, (-1, frozenset()))[0] != version or (stage, version) in self.committed:
            return
        for name in self._rounds[stage][1]:
            ledger = Counter(dict.fromkeys(self.peers[name].core.ledger, 1))
            frozen = self.peers[name].accumulated[version]
            assert frozen == ledger, self.story(f"{name} accumulated beyond its frozen ledger")
        del self._rounds[stage]
        self.committed[stage, version], self.lost[stage, version] = held, lost
        if stage == 0:
            self.sources(version + 1)
        for peer in self.living(stage):
            delay = self.sim.random.choice([0.001, 0.1, 0.6])
            if peer.is_member:
                self.sim.after(delay * self.sim.random.random(), peer.seal, version)
                self.sim.after(delay, peer.commit, version)
            else:
                peer.is_expected = True
                self.sim.after(delay, peer.enter, version + 1)

    # -- the claims --------------------------------------------------------------------------------------

    def story(self, claim: str) -> str:
        lines = [claim, *self.sim.log[-10:]]
        for peer in self.peers.values():
            open_ = {
                str(k): f"{e.phase.value}{'?' + e.holders if e.needs_route else ''}@{e.downstream}"
                for k, e in peer.core._store.entries.items()
                if e.phase is not Phase.DONE or e.needs_route
            }
            state = "dead" if peer.is_dead else "" if peer.is_member else "away"
            lines.append(
                f"{peer.name} {state} step {peer.core.version}, ledger {len(peer.core.ledger)}, "
                f"router {peer.core.router.peers}, open {open_}, {dict(peer.core.counters)}"
            )
        return "\n".join(lines)

    def run(self, deadline_s: float = 120.0) -> None:
        def is_over() -> bool:
            if not self.has_moved:
                return False
            self.has_moved = False
            stages = [self.members(stage) for stage in range(self.stages)]
            return all(stages) and all(p.core.version == STEPS for stage in stages for p in stage)

        ended = self.sim.run(is_over, deadline_s)
        for peer in self.peers.values():
            doubled = [str(k) for counts in peer.accumulated.values() for k, n in counts.items() if n > 1]
            assert not doubled, self.story(f"{peer.name} accumulated twice: {doubled}")
        assert ended, self.story("a wait did not end")
        for stage in range(self.stages):
            for step in range(STEPS):
                if stage in self.emptied and (stage, step) not in self.committed:
                    continue  # it went on where its neighbours were
                committed, lost = self.committed[stage, step], self.lost[stage, step]
                assert not lost or self.may_lose, self.story(f"stage {stage} lost {len(lost)} keys")
                keys = Counter(keys_of(step, self.slots))
                assert committed + Counter(lost) == keys, self.story("a key is missing")
