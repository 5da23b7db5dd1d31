"""A simulated pipeline of several stages and the rounds that commit its steps.

Links lose nothing between the living for good (a flap repeats what was on its way), bulk frames overtake each
other, and kill -9 takes a peer with its accumulator.
"""

from __future__ import annotations

from collections import Counter

from peers import work
from peers.work import Phase
from swarm.plan import MicrobatchKey
from tests.kit.simulation import Network, Simulation
from tests.kit.work_peer import STEPS, Peer, plan_of


class Pipeline:
    """All stages, and the rounds that commit their steps."""

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
    ) -> None:
        self.sim = Simulation(seed)
        self.network = Network(self.sim, longest_s=0.1)
        self.stages, self.slots, self.duplicates = len(replicas), replicas[0], duplicates
        self.longest_break_s = longest_break_s
        self.numbers = iter(range(10**9))
        self.committed: dict[tuple[int, int], Counter[MicrobatchKey]] = {}
        self._rounds: dict[int, tuple[int, frozenset[str]]] = {}
        self._sources: dict[int, tuple[str, ...]] = {}
        self._victims = list(victims)
        self._kill_at_action = kill_at_action
        self.peers = {
            f"{stage}.{number}": Peer(self, stage, f"{stage}.{number}")
            for stage, count in enumerate(replicas)
            for number in range(count)
        }
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

    def of_stage(self, stage: int) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage == stage]

    def living(self, stage: int) -> list[Peer]:
        return [peer for peer in self.of_stage(stage) if not peer.is_dead]

    def sources(self, step: int) -> tuple[str, ...]:
        """Decided once, with the plan: the living run the slots."""
        if step not in self._sources:
            living = [peer.name for peer in self.living(0)]
            self._sources[step] = tuple(living[slot % len(living)] for slot in range(self.slots))
        return self._sources[step]

    # -- faults ------------------------------------------------------------------------------------------

    def dies_before(self, peer: Peer, action: work.Action) -> bool:
        if not self._kill_at_action or peer.stage not in self._victims or len(self.living(peer.stage)) == 1:
            return False
        rare = isinstance(action, work.SlotDone | work.AskHolders)
        return not peer.is_dead and self.sim.random.random() < (0.2 if rare else 0.02)

    def _kill_one_of(self, stage: int) -> None:
        living = self.living(stage)
        if len(living) > 1:
            self.kill(self.sim.random.choice(living).name)

    def kill(self, name: str) -> None:
        victim = self.peers[name]
        self._victims.remove(victim.stage)
        neighbours = [
            p.name for p in self.peers.values() if abs(p.stage - victim.stage) <= 1 and p is not victim
        ]
        self.network.kill(name, neighbours, lambda other: self.peers[other].on_lost(victim))
        self._round_broken_by(victim)

    def _flap(self) -> None:
        """A link breaks, and stands again at once or after a moment that is too short to count as a loss."""
        peer = self.sim.random.choice([p for s in range(self.stages - 1) for p in self.living(s)])
        names = peer.linked(peer.stage + 1)
        if not names:
            return
        other = self.peers[self.sim.random.choice(names)]
        self.network.flap(peer.name, other.name)
        self.network.broken.add(frozenset((peer.name, other.name)))
        self.sim.after(self.sim.random.choice([0.0, self.longest_break_s]), self._mend, peer, other)

    def _mend(self, peer: Peer, other: Peer) -> None:
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
        if not peer.is_dead and name not in self.network.dead:
            peer.run(peer.core.on_peer_up(name, self.sim.now))

    # -- rounds: a stage commits once its settled ledgers partition the plan -----------------------------

    def look_at_round(self, stage: int) -> None:
        if stage in self._rounds:
            return
        members = self.living(stage)
        versions = {peer.core.version for peer in members}
        version = members[0].core.version
        if len(versions) > 1 or version < 0 or version >= STEPS or (stage, version) in self.committed:
            return
        for peer in members:
            plan = peer.core.plan
            if plan is None or not peer.core.is_settled or len(peer.ended[plan.digest()]) < self.slots:
                return
        held = Counter(key for peer in members for key in peer.core.ledger)
        if set(held) != set(plan_of(version, self.slots).keys()):
            return
        assert max(held.values()) == 1, self.story(f"stage {stage} holds a key of step {version} twice")
        for peer in members:
            ledger = Counter(dict.fromkeys(peer.core.ledger, 1))
            assert peer.accumulated[version] == ledger, self.story(
                f"{peer.name} accumulated beyond its ledger"
            )
            peer.run(peer.core.freeze(True, self.sim.now))
        self._rounds[stage] = (version, frozenset(peer.name for peer in members))
        self.sim.after(self.sim.random.uniform(0.01, 0.5), self._decide, stage, version, held)

    def _round_broken_by(self, victim: Peer) -> None:
        if victim.stage in self._rounds and victim.name in self._rounds[victim.stage][1]:
            del self._rounds[victim.stage]
            for peer in self.living(victim.stage):
                delay = self.sim.random.uniform(0.0, 2.0)
                self.sim.after(delay, self._unfreeze, peer, peer.core.version)

    def _unfreeze(self, peer: Peer, version: int) -> None:
        if not peer.is_dead and peer.core.version == version:
            peer.run(peer.core.freeze(False, self.sim.now))
            self.look_at_round(peer.stage)

    def _decide(self, stage: int, version: int, held: Counter[MicrobatchKey]) -> None:
        if self._rounds.get(stage, (-1, frozenset()))[0] != version or (stage, version) in self.committed:
            return
        for name in self._rounds[stage][1]:
            ledger = Counter(dict.fromkeys(self.peers[name].core.ledger, 1))
            frozen = self.peers[name].accumulated[version]
            assert frozen == ledger, self.story(f"{name} accumulated beyond its frozen ledger")
        del self._rounds[stage]
        self.committed[stage, version] = held
        if stage == 0:
            self.sources(version + 1)
        for peer in self.living(stage):
            self.sim.after(self.sim.random.choice([0.001, 0.1, 0.6]), peer.commit, version)

    # -- the claims --------------------------------------------------------------------------------------

    def story(self, claim: str) -> str:
        lines = [claim, *self.sim.log[-10:]]
        for peer in self.peers.values():
            open_ = {
                str(k): e.phase.value for k, e in peer.core._entries.items() if e.phase is not Phase.DONE
            }
            lines.append(
                f"{peer.name}{' dead' if peer.is_dead else ''} step {peer.core.version}, ledger "
                f"{len(peer.core.ledger)}, open {open_}, {dict(peer.core.counters)}"
            )
        return "\n".join(lines)

    def run(self, deadline_s: float = 120.0) -> None:
        def is_over() -> bool:
            return all(peer.core.version == STEPS for peer in self.peers.values() if not peer.is_dead)

        ended = self.sim.run(is_over, deadline_s)
        for peer in self.peers.values():
            doubled = [str(k) for counts in peer.accumulated.values() for k, n in counts.items() if n > 1]
            assert not doubled, self.story(f"{peer.name} accumulated twice: {doubled}")
        assert ended, self.story("a wait did not end")
        for stage in range(self.stages):
            for step in range(STEPS):
                keys = Counter(plan_of(step, self.slots).keys())
                assert self.committed[stage, step] == keys, self.story("a key is missing")
