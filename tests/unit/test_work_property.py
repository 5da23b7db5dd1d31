"""Thousands of random event orders through the work of a whole pipeline: every key exactly once, every wait ends.

Peers are real `WorkCore`s in a shell that does what `peers.stage` and `peers.trainer` do; time, network, compute
and rounds are simulated. Links lose nothing between the living (a flap repeats what was on its way), bulk frames
overtake each other, room is short (BUSY), and kill -9 takes a peer with its accumulator.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator

import pytest

import peers.work
from peers import work
from peers.limits import LIMITS
from peers.routing import Router
from peers.work import Entry, Phase, WorkCore
from swarm.plan import MicrobatchKey, Plan, Slot
from tests.kit.simulation import Network, Simulation

STEPS = 3
MICROBATCHES = 5
QUERY_S = 2.0


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So little that BUSY is common."""
    monkeypatch.setattr(peers.work, "LIMITS", dataclasses.replace(LIMITS, in_flight=3, early_frames=3))
    yield


def plan_of(step: int, slots: int) -> Plan:
    samples = [tuple(range(slot * MICROBATCHES, (slot + 1) * MICROBATCHES)) for slot in range(slots)]
    return Plan(
        step=step,
        attempt=0,
        group="",
        rows_per_microbatch=1,
        slots=tuple(Slot(number=number, samples=ids) for number, ids in enumerate(samples)),
        prior_versions=(),
    )


class Peer:
    """One stage peer: its core and the shell around it."""

    def __init__(self, pipeline: Pipeline, stage: int, name: str) -> None:
        self.pipeline, self.stage, self.name = pipeline, stage, name
        self.core = WorkCore(
            is_last=stage == pipeline.stages - 1, router=Router(window=2), source_window=pipeline.stages * 2
        )
        self.accumulated: defaultdict[int, Counter[MicrobatchKey]] = defaultdict(Counter)
        self.plans: dict[str, Plan] = {}
        self.ended: defaultdict[str, set[int]] = defaultdict(set)
        self.assignment: tuple[str, int, tuple[str, ...]] = ("", 0, ())
        self.stash: list[tuple[str, MicrobatchKey, bool]] = []
        self.questions: dict[int, tuple[Entry, set[str]]] = {}
        self.denied: defaultdict[int, set[str]] = defaultdict(set)
        self.lost: set[str] = set()
        self.computing = 0

    @property
    def is_dead(self) -> bool:
        return self.name in self.pipeline.network.dead

    @property
    def now(self) -> float:
        return self.pipeline.sim.now

    def send(self, target: str, what: str, *body: object) -> None:
        bulk = what in ("forward", "gradient")
        peer = self.pipeline.peers[target]
        copies = 1 + (bulk and self.pipeline.sim.random.random() < self.pipeline.duplicates)

        def deliver() -> None:
            for _ in range(copies):
                peer.on_message(self.name, what, *body)

        self.pipeline.network.send(self.name, target, deliver, is_bulk=bulk)

    def linked(self, stage: int) -> list[str]:
        network = self.pipeline.network
        others = [p.name for p in self.pipeline.of_stage(stage) if p is not self and p.name not in network.dead]
        return [name for name in others if frozenset((self.name, name)) not in network.broken]

    def gossip(self, what: str, *body: object) -> None:
        for stage in (self.stage - 1, self.stage, self.stage + 1):
            for name in self.linked(stage):
                self.send(name, what, *body)

    # -- the shell ---------------------------------------------------------------------------------------

    def run(self, actions: list[work.Action]) -> None:
        for action in actions:
            if self.pipeline.dies_before(self, action):
                self.pipeline.kill(self.name)
            if self.is_dead:
                return
            match action:
                case work.Forward(entry):
                    self._compute(self._forward_done, entry)
                case work.Backward(entry):
                    self._compute(self._backward_done, entry)
                case work.SendForward(peer, entry):
                    self.send(peer, "forward", entry.key, entry.is_replay)
                case work.SendGradient(peer, entry):
                    assert entry.gradient is not None or self.stage == 0
                    self.send(peer, "gradient", entry.key, entry.loss_sum, entry.loss_tokens)
                case work.Reply(peer, kind, key, reason):
                    self.send(peer, kind, key, reason)
                case work.AskHolders(entry):
                    self._ask(entry)
                case work.SlotDone(slot):
                    if self.core.plan is not None:
                        self.on_step_end(self.core.plan.digest(), slot)
                case work.LedgerGrew():
                    self.pipeline.look_at_round(self.stage)
                case work.ClearAccumulator():
                    self.accumulated[self.core.version].clear()

    def on_message(self, source: str, what: str, *body: object) -> None:
        match what, body:
            case "forward", (MicrobatchKey() as key, bool() as is_replay):
                self.on_forward(source, key, is_replay)
            case "gradient", (MicrobatchKey() as key, float() as loss_sum, int() as tokens):
                self.run(self.core.on_gradient(source, key, "gradient", loss_sum, tokens, self.now))
            case "busy", (MicrobatchKey() as key, _):
                self.run(self.core.on_busy(source, key, self.now))
            case "refused", (MicrobatchKey() as key, str() as reason):
                self.run(self.core.on_refused(source, key, reason, self.now))
            case "accepted", _:
                pass
            case "plan", (Plan() as plan,):
                self.on_plan(plan)
            case "step_end", (str() as digest, int() as slot):
                self.on_step_end(digest, slot)
            case "assign", (str() as digest, int() as counter, tuple() as sources):
                self.take_assignment(digest, counter, sources)
            case "query", (int() as number, MicrobatchKey() as key):
                self.send(source, "answer", number, self.core.holds(key))
            case "answer", (int() as number, bool() as answer):
                self._on_answer(source, number, answer)
            case _:
                raise AssertionError(f"{what} {body!r}")

    def on_forward(self, source: str, key: MicrobatchKey, is_replay: bool) -> None:
        assert key.step <= self.core.version + 1
        if key.plan in self.plans:
            self.run(self.core.on_forward(source, key, "work", "payload", is_replay, self.now))
        elif key.step < self.core.version:
            self.send(source, "refused", key, "committed")
        else:
            self.stash.append((source, key, is_replay))

    def on_plan(self, plan: Plan) -> None:
        if plan.digest() in self.plans:
            return
        self.plans[plan.digest()] = plan
        self.gossip("plan", plan)
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        if plan.step == self.core.version:
            self.run(self.core.on_plan(plan, self.now))
            if self.stage == 0:
                self.reassign()
                for slot, source in enumerate(self.assignment[2]):
                    if source == self.name:
                        self._assign(plan, slot, False)
        stash, self.stash = self.stash, []
        for source, key, is_replay in stash:
            self.on_forward(source, key, is_replay)
        self.pipeline.look_at_round(self.stage)

    def on_step_end(self, digest: str, slot: int) -> None:
        if slot in self.ended[digest]:
            return
        self.ended[digest].add(slot)
        self.gossip("step_end", digest, slot)
        self.pipeline.look_at_round(self.stage)

    def on_lost(self, peer: Peer) -> None:
        self.lost.add(peer.name)
        for number, (entry, waiting) in list(self.questions.items()):
            waiting.discard(peer.name)
            if not waiting:
                self._answered(number, entry, None)
        if peer.stage == self.stage + 1:
            self.run(self.core.on_peer_lost(peer.name, self.now))
        elif peer.stage == self.stage:
            self.reassign()

    def commit(self, step: int) -> None:
        if self.is_dead:
            return
        self.run(self.core.on_commit(step, self.now))
        if self.stage == 0 and self.core.version < STEPS:
            plan = plan_of(self.core.version, self.pipeline.slots)
            self.assignment = (plan.digest(), 0, self.pipeline.sources(self.core.version))
            self.plans[plan.digest()] = plan
            self.gossip("plan", plan)
            self.adopt(plan)
        else:
            for plan in list(self.plans.values()):
                if plan.step == self.core.version:
                    self.adopt(plan)

    def tick(self) -> None:
        if not self.is_dead:
            self.run(self.core.route(self.now))
            self.pipeline.sim.after(0.25, self.tick)

    # -- slots of lost sources -----------------------------------------------------------------------------

    def reassign(self) -> None:
        digest, counter, sources = self.assignment
        living = [p.name for p in self.pipeline.of_stage(0) if p.name not in self.lost]
        plan = self.core.plan
        if self.stage != 0 or plan is None or plan.digest() != digest or living[0] != self.name:
            return
        orphaned = [slot for slot, source in enumerate(sources) if source not in living]
        if orphaned:
            changed = list(sources)
            for number, slot in enumerate(orphaned):
                changed[slot] = living[number % len(living)]
            for name in self.linked(0):
                self.send(name, "assign", digest, counter + 1, tuple(changed))
            self.take_assignment(digest, counter + 1, tuple(changed))

    def take_assignment(self, digest: str, counter: int, sources: tuple[str, ...]) -> None:
        plan = self.core.plan
        _, known_counter, known = self.assignment
        if plan is None or plan.digest() != digest or counter <= known_counter:
            return
        self.assignment = (digest, counter, sources)
        for slot, (before, after) in enumerate(zip(known, sources, strict=True)):
            if after == self.name and before != self.name:
                self._assign(plan, slot, True)

    def _assign(self, plan: Plan, slot: int, is_replay: bool) -> None:
        works = [(key, "work") for key in plan.keys() if key.slot == slot]
        self.run(self.core.assign(slot, works, is_replay, self.now))

    # -- compute and questions -----------------------------------------------------------------------------

    def _compute(self, done: object, entry: Entry) -> None:
        assert callable(done)
        self.computing += 1
        delay = self.pipeline.sim.random.choice([0.01, 0.05, 0.3])
        self.pipeline.sim.after(delay, self._computed, done, entry)

    def _computed(self, done: object, entry: Entry) -> None:
        self.computing -= 1
        if self.is_dead or entry.is_dropped:
            return
        assert callable(done)
        done(entry)

    def _forward_done(self, entry: Entry) -> None:
        if self.stage < self.pipeline.stages - 1:
            self.run(self.core.on_forward_done(entry, "outgoing", self.now))
            return
        self.accumulated[entry.key.step][entry.key] += 1
        self.run(self.core.on_backward_done(entry, "gradient", (2.0, 7), self.now))

    def _backward_done(self, entry: Entry) -> None:
        self.accumulated[entry.key.step][entry.key] += 1
        self.run(self.core.on_backward_done(entry, "gradient", None, self.now))

    def _ask(self, entry: Entry) -> None:
        asked = set(self.linked(self.stage + 1))
        number = next(self.pipeline.numbers)
        self.questions[number] = (entry, asked)
        for name in sorted(asked):
            self.send(name, "query", number, entry.key)
        self.pipeline.sim.after(QUERY_S if asked else 0.1, self._answered, number, entry, None)

    def _on_answer(self, source: str, number: int, answer: bool) -> None:
        if number in self.questions:
            entry, waiting = self.questions[number]
            waiting.discard(source)
            if not answer:
                self.denied[number].add(source)
            if answer or not waiting:
                self._answered(number, entry, source if answer else None)

    def _answered(self, number: int, entry: Entry, holder: str | None) -> None:
        if self.questions.pop(number, None) is None or self.is_dead:
            return
        if holder is None and not set(self.core.router.peers) <= self.denied[number]:
            entry.holders = "unknown"  # somebody who may hold it has not answered: asked again on the timer
        else:
            self.run(self.core.on_holder(entry, holder, self.now))


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
        neighbours = [p.name for p in self.peers.values() if abs(p.stage - victim.stage) <= 1 and p is not victim]
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
            assert peer.accumulated[version] == ledger, self.story(f"{peer.name} accumulated beyond its ledger")
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
            open_ = {str(k): e.phase.value for k, e in peer.core._entries.items() if e.phase is not Phase.DONE}
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


def check(seeds: range, replicas: tuple[int, ...], **chances: object) -> None:
    """Run all seeds; report how many broke a promise, and the first in full."""
    broken: OrderedDict[int, AssertionError] = OrderedDict()
    for seed in seeds:
        try:
            Pipeline(seed, replicas, **chances).run()  # type: ignore[arg-type]
        except AssertionError as error:
            broken[seed] = error
    if broken:
        kinds = Counter(str(error).split("\n", 1)[0][:60] for error in broken.values())
        seed, first = next(iter(broken.items()))
        raise AssertionError(f"{len(broken)} of {len(seeds)} seeds: {dict(kinds)}\nseed {seed}: {first}")


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1, 2), (2, 3), (2, 2, 2, 2)])
def test_undisturbed_pipeline_trains_every_key_once(replicas: tuple[int, ...]) -> None:
    check(range(20), replicas)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2, 2)])
def test_repeated_frames_add_nothing_twice(replicas: tuple[int, ...]) -> None:
    check(range(20), replicas, duplicates=0.3)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2, 2)])
def test_flapping_links_lose_and_repeat_no_key(replicas: tuple[int, ...]) -> None:
    check(range(40), replicas, flaps=5, longest_break_s=1.0)


def test_holder_behind_a_broken_link_is_not_overlooked_by_a_replay() -> None:
    """A neighbour whose link is down for a moment may hold the key: choosing another would train it twice."""
    check(range(100), (2, 2, 2), victims=(0,), flaps=12, longest_break_s=1.5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_killed_peer_costs_no_key_and_ends_every_wait(stage: int) -> None:
    check(range(60), (2, 2, 2), victims=(stage,))
    check(range(60), (2, 2, 2), victims=(stage,), kill_at_action=True)


@pytest.mark.parametrize("stage", [0, 1])
def test_killed_peer_among_three_costs_no_key(stage: int) -> None:
    check(range(40), (3, 3), victims=(stage,), duplicates=0.1)


def test_two_killed_peers_of_one_stage_cost_no_key() -> None:
    for stage in range(3):
        check(range(25), (3, 3, 3), victims=(stage, stage))


def test_peers_killed_in_stages_that_are_no_neighbours_cost_no_key() -> None:
    check(range(40), (2, 1, 2, 2), victims=(0, 2), kill_at_action=True)
    check(range(40), (2, 1, 2, 2), victims=(0, 3))
