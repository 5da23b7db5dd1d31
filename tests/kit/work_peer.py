"""One peer of a simulated pipeline: a real `WorkCore` in a shell that does what `peers.stage` and `peers.trainer` do.

Network and compute are simulated; the stages around it are `tests.kit.pipeline.Pipeline`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from peers import work_items as items
from peers.routing import Router
from peers.work import WorkCore
from peers.work_items import Entry
from swarm.plan import MicrobatchKey, Plan, Slot

if TYPE_CHECKING:
    from tests.kit.pipeline import Pipeline

STEPS = 3
MICROBATCHES = 5
QUERY_S = 2.0


@lru_cache(maxsize=64)
def plan_of(step: int, slots: int) -> Plan:
    samples = [tuple(range(slot * MICROBATCHES, (slot + 1) * MICROBATCHES)) for slot in range(slots)]
    return Plan(
        step=step,
        attempt=0,
        group="",
        rows_per_microbatch=1,
        slots=tuple(Slot(number=number, samples=ids) for number, ids in enumerate(samples)),
        prior_versions=(),
        prior_hashes=(),
    )


@lru_cache(maxsize=64)
def keys_of(step: int, slots: int) -> tuple[MicrobatchKey, ...]:
    return tuple(plan_of(step, slots).keys())


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
        self.ready: set[str] = set()
        """Peers of the next stage that have said READY on the link that stands."""
        self.computing = 0
        self.is_member = True
        """Whether it votes and works; not while it re-synchronises."""
        self.is_expected = False
        """Whether a commit says that it votes and works from the next step on."""

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
        others = [
            p.name for p in self.pipeline.of_stage(stage) if p is not self and p.name not in network.dead
        ]
        return [name for name in others if frozenset((self.name, name)) not in network.broken]

    def gossip(self, what: str, *body: object) -> None:
        for stage in (self.stage - 1, self.stage, self.stage + 1):
            for name in self.linked(stage):
                self.send(name, what, *body)

    # -- the shell ---------------------------------------------------------------------------------------

    def run(self, actions: list[items.Action]) -> None:
        for action in actions:
            if self.pipeline.dies_before(self, action):
                self.pipeline.kill(self.name)
            if self.is_dead:
                return
            match action:
                case items.Forward(entry):
                    self._compute(self._forward_done, entry)
                case items.Backward(entry):
                    self._compute(self._backward_done, entry)
                case items.SendForward(peer, entry) if peer in self.ready:
                    self.send(peer, "forward", entry.key, entry.is_replay)
                case items.SendForward():
                    pass  # READY on the new link repeats it
                case items.SendGradient(peer, entry):
                    assert entry.gradient is not None or self.stage == 0
                    self.send(peer, "gradient", entry.key, entry.loss_sum, entry.loss_tokens)
                case items.Reply(peer, kind, key, reason):
                    self.send(peer, kind, key, reason)
                case items.AskHolders(entry):
                    self._ask(entry)
                case items.SlotDone(slot):
                    if self.core.plan is not None:
                        self.on_step_end(self.core.plan.digest(), slot)
                case items.LedgerGrew() | items.KeyLost():
                    self.pipeline.look_at_round(self.stage)
                case items.ClearAccumulator():
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
            case "accepted", (MicrobatchKey() as key, _):
                self.core.on_accepted(source, key)
            case "ready", ():
                if source in self.ready and source in self.core.router.peers:
                    self.core.router.lift_fences_of(source)
                    return
                self.ready.add(source)
                self.run(self.core.on_peer_up(source, self.now))
            case "fence", (str() as digest, str() as peer):
                self.on_fence(digest, peer)
            case "missing", (tuple() as keys,):
                self.run(self.core.on_missing(keys, self.now))
            case "plan", (Plan() as plan,):
                self.on_plan(plan)
            case "step_end", (str() as digest, int() as slot):
                self.on_step_end(digest, slot)
            case "assign", (str() as digest, int() as counter, tuple() as sources):
                self.take_assignment(digest, counter, sources)
            case "query", (int() as number, MicrobatchKey() as key):
                is_stashed = any(stashed == key for _, stashed, _ in self.stash)
                self.send(source, "answer", number, self.core.holds(key) or is_stashed)
            case "answer", (int() as number, bool() as answer):
                self._on_answer(source, number, answer)
            case _:
                raise AssertionError(f"{what} {body!r}")

    def on_forward(self, source: str, key: MicrobatchKey, is_replay: bool) -> None:
        assert key.step <= self.core.version + 1 or not self.is_member
        if key.plan in self.plans or not self.is_member:
            self.run(self.core.on_forward(source, key, "work", "payload", is_replay, self.now))
        elif key.step < self.core.version:
            self.send(source, "refused", key, "committed")
        else:
            self.stash.append((source, key, is_replay))

    def on_fence(self, digest: str, peer: str) -> None:
        if peer == self.name:
            self.run(self.core.fence(digest, self.now))
            for name in self.linked(self.stage - 1):
                self.send(name, "fence", digest, peer)
            self.pipeline.look_at_round(self.stage)
        elif self.pipeline.peers[peer].stage == self.stage + 1:
            self.run(self.core.on_fenced(peer, digest, self.now))
        else:
            self.reassign()

    def on_plan(self, plan: Plan) -> None:
        if plan.digest() in self.plans:
            return
        self.plans[plan.digest()] = plan
        self.gossip("plan", plan)
        self.adopt(plan)

    def adopt(self, plan: Plan, is_replay: bool = False) -> None:
        if plan.step == self.core.version:
            self.run(self.core.on_plan(plan, self.now))
            if self.stage == 0:
                digest, _, sources = self.assignment
                for slot, source in enumerate(sources):
                    if source == self.name and digest == plan.digest():
                        self._assign(plan, slot, is_replay)
                self.reassign()
        stash, self.stash = self.stash, []
        for source, key, is_again in stash:
            self.on_forward(source, key, is_again)
        self.pipeline.look_at_round(self.stage)

    def on_step_end(self, digest: str, slot: int) -> None:
        if slot in self.ended[digest]:
            return
        self.ended[digest].add(slot)
        self.gossip("step_end", digest, slot)
        self.pipeline.look_at_round(self.stage)

    def on_lost(self, peer: Peer) -> None:
        self.lost.add(peer.name)
        self.on_link_lost(peer)

    def expect_ready(self, other: Peer) -> None:
        """A link has stood for a while: whoever did not say READY on it has stopped working."""
        network = self.pipeline.network
        is_broken = frozenset((self.name, other.name)) in network.broken
        if not self.is_dead and not is_broken and other.name not in self.ready:
            self.on_link_lost(other)

    def on_link_lost(self, peer: Peer) -> None:
        """As far as this peer can tell it is gone; it may live all the same."""
        for number, (entry, waiting) in list(self.questions.items()):
            waiting.discard(peer.name)
            if not waiting:
                self._answered(number, entry, None)
        if peer.stage == self.stage + 1:
            self.run(self.core.on_peer_lost(peer.name, self.now))
        elif peer.stage == self.stage:
            self.reassign()

    def suspend(self) -> None:
        """It fell out of step: it takes no more part until it has caught up."""
        self.is_member = False
        stash, self.stash = self.stash, []
        for source, key, _ in stash:
            self.send(source, "refused", key, "resync")
        self.run(self.core.suspend())
        self.accumulated.clear()

    def enter(self, version: int) -> None:
        """It has caught up: it votes and works from this step on."""
        if self.is_dead:
            return
        self.is_member, self.is_expected, self.pipeline.has_moved = True, False, True
        self.run(self.core.begin(version))
        self._take_step(is_new=True)
        for name in self.linked(self.stage - 1):
            self.send(name, "ready")

    def unfence(self) -> None:
        self.core.unfence()
        for name in self.linked(self.stage - 1):
            self.send(name, "ready")
        self.reassign()

    def seal(self, step: int) -> None:
        if not self.is_dead and self.is_member:
            self.run(self.core.seal(step))

    def commit(self, step: int) -> None:
        if self.is_dead or not self.is_member:
            return
        self.pipeline.has_moved = True
        self.run(self.core.on_commit(step, self.now))
        self._take_step(is_new=False)

    def _take_step(self, *, is_new: bool) -> None:
        if self.stage == 0 and self.core.version < STEPS:
            plan = plan_of(self.core.version, self.pipeline.slots)
            self.assignment = (plan.digest(), 0, self.pipeline.sources(self.core.version))
            self.plans[plan.digest()] = plan
            self.gossip("plan", plan)
            self.adopt(plan, is_new)  # whoever begins in the middle of a step may have run its slots before
        else:
            for plan in list(self.plans.values()):
                if plan.step == self.core.version:
                    self.adopt(plan)

    def tick(self) -> None:
        if not self.is_dead:
            self.run(self.core.route(self.now))
            self.pipeline.sim.after(0.25, self.tick)

    # -- slots of lost sources -----------------------------------------------------------------------------

    def reassign(self, is_forced: bool = False) -> None:
        digest, counter, sources = self.assignment
        able = [p.name for p in self.pipeline.of_stage(0) if p.name not in self.lost and p.is_member]
        plan = self.core.plan
        if self.stage != 0 or plan is None or plan.digest() != digest or able[:1] != [self.name]:
            return
        able = [name for name in able if name not in self.pipeline.fences[0, plan.step]]
        orphaned = [slot for slot, source in enumerate(sources) if source not in able]
        if able and (orphaned or is_forced):
            changed = list(sources)
            for number, slot in enumerate(orphaned):
                changed[slot] = able[number % len(able)]
            for name in self.linked(0):
                self.send(name, "assign", digest, counter + 1, tuple(changed))
            self.take_assignment(digest, counter + 1, tuple(changed))

    def take_assignment(self, digest: str, counter: int, sources: tuple[str, ...]) -> None:
        plan = self.core.plan
        _, known_counter, _ = self.assignment
        if plan is None or plan.digest() != digest or counter <= known_counter:
            return
        self.assignment = (digest, counter, sources)
        for slot, source in enumerate(sources):
            if source == self.name:
                self._assign(plan, slot, True)

    def _assign(self, plan: Plan, slot: int, is_replay: bool) -> None:
        works = [(key, "work") for key in keys_of(plan.step, self.pipeline.slots) if key.slot == slot]
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
        is_fenced = self.core.router.is_fenced
        asked = {n for n in self.linked(self.stage + 1) if not is_fenced(n, entry.key.plan)}
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
        denied = self.denied.pop(number, set())
        if holder is None and not (denied and self.core.askable(entry) <= denied):
            self.run(self.core.on_holder_unknown(entry, self.now))
        else:
            self.run(self.core.on_holder(entry, holder, self.now))
