"""Thousands of random event orders through the rounds of one stage: what is promised holds in all of them.

Members are real `RoundCore`s in a shell that does what `peers.averaging` does; time, network, exchange, plan and
work are simulated. A member's work: keys that come in one by one, held back while its ledger is frozen; the keys
of a dead member go to the living, as the previous stage would send them.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict

import pytest

from peers import rounds
from peers.frames import Kind
from peers.round_messages import Arrival, Commit, CompactKey, Group
from peers.rounds import RoundCore
from tests.kit.simulation import Network, Simulation

STEPS = 4
KEYS = frozenset((slot, number) for slot in range(2) for number in range(3))
EXCHANGE_DEADLINE_S = 300.0


def plan_of(step: int) -> str:
    return hashlib.sha256(f"plan {step}".encode()).hexdigest()


class Member:
    """One replica: its core, its ledger, and the shell between them."""

    def __init__(self, world: Stage, name: str) -> None:
        self.world, self.name = world, name
        self.core = RoundCore(run_id="run", run_seed=world.seed, stage=1, me=name, make_plan=self._make_plan)
        self.applied: list[tuple[int, str, str]] = []
        self.out_of_step: list[Commit] = []
        self.ledger: set[CompactKey] = set()
        self.held_back: list[tuple[int, CompactKey]] = []
        self.early: list[tuple[int, CompactKey]] = []
        self.is_frozen = False
        self.average: tuple[str, str] | None = None
        self.group: Group | None = None
        self.exchange = ""
        self.applying = 0

    @property
    def is_dead(self) -> bool:
        return self.name in self.world.network.dead

    def _make_plan(
        self, step: int, attempt: int, group: str, roster: tuple[str, ...]
    ) -> tuple[bytes, tuple[str, ...]]:
        self.world.decided[step - 1].add(group)
        return b"", ()

    # -- the shell ---------------------------------------------------------------------------------------

    def run(self, actions: list[rounds.Action]) -> None:
        sim = self.world.sim
        for number, action in enumerate(actions):
            if self.is_dead:
                return
            if isinstance(action, rounds.Send) and self.world.dies_before_send(self, action.kind):
                sim.note(f"{self.name} dies before action {number} of {len(actions)}")
                self.world.kill(self.name)
                return
            match action:
                case rounds.Send(peer, kind, body):
                    sim.note(f"{self.name} -> {peer} {kind} (step {self.core.step})")
                    self.world.network.send(
                        self.name, peer, lambda p=peer, k=kind, b=body: self.world.deliver(self.name, p, k, b)
                    )
                case rounds.Freeze(is_frozen):
                    self.is_frozen = is_frozen
                    if not is_frozen:
                        back, self.held_back = self.held_back, []
                        for step, key in back:
                            self.receive(step, key)
                case rounds.Exchange(group):
                    self.average, self.group, self.exchange = None, group, group.id
                    sim.after(EXCHANGE_DEADLINE_S, self.exchange_failed, group.id, "late")
                    self.world.exchange(self, group)
                case rounds.CancelExchange():
                    self.exchange = ""
                case rounds.Apply(commit):
                    sim.note(f"{self.name} applies step {commit.step}")
                    self.applying += 1
                    sim.after(sim.random.choice([0.01, 0.1, 1.5]), self.apply, commit, self.average)
                case rounds.AskGone(peers):
                    for peer in peers:
                        sim.after(sim.random.uniform(0.1, 3.0), self.answer_gone, peer)
                case rounds.OutOfStep(commit):
                    self.out_of_step.append(commit)

    def on_message(self, peer: str, kind: Kind, body: object) -> None:
        now, core = self.world.sim.now, self.core
        match kind, body:
            case Kind.ARRIVE, Arrival() as arrival:
                self.run(core.on_arrive(peer, arrival, now))
            case Kind.GROUP, Group() as group:
                self.run(core.on_group(peer, group, now))
            case Kind.COMMIT, Commit() as commit:
                self.run(core.on_commit(peer, commit, now))
            case Kind.DIGEST, (group, digest):
                self.run(core.on_digest(peer, group, digest, now))
            case Kind.FAILED, (group, reason):
                self.run(core.on_failed(peer, group, reason, now))
            case _:
                raise AssertionError(f"{kind} with {body!r}")

    def on_lost(self, peer: str) -> None:
        self.world.sim.note(f"{self.name} learns that {peer} is lost")
        self.run(self.core.on_peer_lost(peer, self.world.sim.now))

    def answer_gone(self, peer: str) -> None:
        if not self.is_dead and peer in self.world.network.dead:
            self.run(self.core.on_gone(peer, self.world.sim.now))

    def tick(self) -> None:
        if self.is_dead:
            return
        self.run(self.core.tick(self.world.sim.now))
        self.world.sim.after(0.25, self.tick)

    # -- exchange and apply --------------------------------------------------------------------------------

    def exchanged(self, group: Group) -> None:
        if not self.is_dead and self.exchange == group.id:
            self.exchange = ""
            self.average = (group.id, hashlib.sha256(group.id.encode()).hexdigest())
            self.run(self.core.on_exchanged(*self.average, self.world.sim.now))

    def exchange_failed(self, group: str, reason: str) -> None:
        if not self.is_dead and self.exchange == group:
            self.exchange = ""
            self.run(self.core.on_exchange_failed(group, reason, self.world.sim.now))

    def apply(self, commit: Commit, held: tuple[str, str] | None) -> None:
        if self.is_dead:
            return
        self.applying -= 1
        if held is None or held[0] != commit.group:
            self.out_of_step.append(commit)
            return
        self.applied.append((commit.step, commit.group, commit.digest))
        self.average = None
        self.core.on_applied(commit)
        self.enter()

    # -- work ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The step's plan comes; then its keys."""
        self.ledger, self.held_back, self.is_frozen = set(), [], False
        if self.core.step < STEPS:
            step = self.core.step
            delay = self.world.sim.random.choice([0.0, 0.05, 0.5])
            self.world.sim.after(delay, self.take_plan, step)

    def take_plan(self, step: int) -> None:
        if self.is_dead or self.core.step != step:
            return
        self.run(self.core.on_plan(plan_of(step), KEYS, self.world.sim.now))
        self.world.hand_out(step)
        early, self.early = self.early, []
        for at, key in early:
            self.receive(at, key)
        self.report()

    def receive(self, step: int, key: CompactKey) -> None:
        if self.is_dead or step < self.core.step:
            return
        if step > self.core.step or self.core._plan != plan_of(step):
            self.early.append((step, key))
        elif self.is_frozen:
            self.held_back.append((step, key))
        else:
            self.ledger.add(key)
            self.world.on_done(step, key)
            self.report()

    def report(self) -> None:
        """The shell reports a settled ledger once all slots have ended: every key was done by somebody once."""
        step = self.core.step
        if self.core._plan == plan_of(step) and self.world.done[step] == KEYS:
            keys = tuple(sorted(self.ledger))
            arrival = Arrival(step, plan_of(step), keys, len(keys))
            self.run(self.core.on_ready(arrival, self.world.sim.now))


class Stage:
    """The members of one stage and the world around them."""

    def __init__(
        self, seed: int, size: int, *, kills: int, flaps: int = 0, kill_at_send: bool = False
    ) -> None:
        self.seed = seed
        self.sim = Simulation(seed)
        self.network = Network(self.sim)
        self.decided: defaultdict[int, set[str]] = defaultdict(set)
        self.groups: dict[str, Group] = {}
        self.done: defaultdict[int, set[CompactKey]] = defaultdict(set)
        self._started: defaultdict[str, set[str]] = defaultdict(set)
        self._places: dict[int, dict[CompactKey, str]] = {}
        self._known_dead: set[str] = set()
        self._kills_left = min(kills, size - 1)
        self._kill_at_send = kill_at_send
        names = [f"peer-{i}-{seed}" for i in range(size)]
        self.members = {name: Member(self, name) for name in names}
        for member in self.members.values():
            member.core.begin(0, tuple(names))
            member.enter()
            self.sim.after(self.sim.random.uniform(0, 0.25), member.tick)
        if not kill_at_send:
            for _ in range(self._kills_left):
                victim = self.sim.random.choice(names)
                self.sim.after(self.sim.random.uniform(0.0, 8.0), self.kill, victim)
        for _ in range(flaps):
            self.sim.after(self.sim.random.uniform(0.0, 6.0), self.flap)

    @property
    def living(self) -> list[Member]:
        return [member for member in self.members.values() if not member.is_dead]

    def deliver(self, source: str, target: str, kind: Kind, body: object) -> None:
        self.members[target].on_message(source, kind, body)

    def dies_before_send(self, member: Member, kind: Kind) -> bool:
        """Whether the member is killed at exactly this send: also between one COMMIT and the next."""
        if not self._kill_at_send or self._kills_left <= 0 or len(self.living) == 1:
            return False
        chance = {Kind.COMMIT: 0.25, Kind.GROUP: 0.15, Kind.DIGEST: 0.08, Kind.ARRIVE: 0.03}
        return self.sim.random.random() < chance.get(kind, 0.05)

    def kill(self, name: str) -> None:
        if name in self.network.dead or len(self.living) == 1:
            return
        self._kills_left -= 1
        others = [other for other in self.members if other != name]
        self.network.kill(name, others, lambda other: self.members[other].on_lost(name))
        self.sim.after(self.sim.random.uniform(0.2, 2.0), self.replay, name)
        for member in self.living:
            group = member.group
            if (
                member.exchange
                and group is not None
                and name in group.members
                and self.sim.random.random() < 0.5
            ):
                self.sim.after(
                    self.sim.random.uniform(0, 0.3), member.exchange_failed, group.id, "disconnected"
                )

    def flap(self) -> None:
        if len(self.living) < 2:
            return
        one, other = self.sim.random.sample(self.living, 2)
        self.network.flap(one.name, other.name)
        for member in (one, other):
            if member.exchange and self.sim.random.random() < 0.5:
                self._started[member.exchange].clear()  # a part was lost: nobody learns before the deadline
        one.run(one.core.on_peer_up(other.name, self.sim.now))
        other.run(other.core.on_peer_up(one.name, self.sim.now))

    def exchange(self, member: Member, group: Group) -> None:
        self.groups[group.id] = group
        started = self._started[group.id]
        started.add(member.name)
        if started == set(group.members):
            for name in group.members:
                delay = self.sim.random.choice([0.01, 0.2, 0.8])
                self.sim.after(delay, self._finish_exchange, self.members[name], group)

    def _finish_exchange(self, member: Member, group: Group) -> None:
        if not self._started[group.id]:
            return
        dead = self.network.dead & set(group.members)
        if not dead or self.sim.random.random() < 0.5:  # what the dead had sent may have sufficed
            member.exchanged(group)

    # -- the previous stage ------------------------------------------------------------------------------

    def hand_out(self, step: int) -> None:
        """The previous stage sends the step's keys to whom it takes for living."""
        if step in self._places:
            return
        self._places[step] = {}
        targets = [name for name in self.members if name not in self._known_dead]
        for key in sorted(KEYS):
            self._place(step, key, self.sim.random.choice(targets))

    def on_done(self, step: int, key: CompactKey) -> None:
        """A key's gradient is back at its source; with the last of them the slots end, and all hear of it."""
        self.done[step].add(key)
        if self.done[step] == KEYS:
            for member in self.living:
                self.sim.after(self.sim.random.uniform(0.0, 0.3), self._hear_end, member)

    def _hear_end(self, member: Member) -> None:
        if not member.is_dead:
            member.report()

    def replay(self, dead: str) -> None:
        """What went to a dead member goes to living ones; those that have committed the step refuse it."""
        self._known_dead.add(dead)
        for step, places in self._places.items():
            for key, place in list(places.items()):
                if place == dead:
                    able = [m.name for m in self.living if m.core.step <= step]
                    if able:
                        self._place(step, key, self.sim.random.choice(able))

    def _place(self, step: int, key: CompactKey, name: str) -> None:
        self._places[step][key] = name
        self.sim.after(self.sim.random.uniform(0.0, 0.6), self.members[name].receive, step, key)

    # -- the claims --------------------------------------------------------------------------------------

    def run(self, deadline_s: float) -> None:
        ended = self.sim.run(lambda: all(m.core.step == STEPS for m in self.living), deadline_s)
        story = f"seed {self.seed}\n" + "\n".join(self.sim.log[-40:])
        applied: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)
        for member in self.members.values():
            steps = [step for step, _, _ in member.applied]
            assert steps == list(range(len(steps))), f"{member.name} applied {steps}\n{story}"
            for step, group, digest in member.applied:
                applied[step].add((group, digest))
                assert group in self.decided[step], f"{member.name} applied without COMMIT\n{story}"
        for step, results in applied.items():
            assert len(results) == 1, f"step {step}: two different averages were applied\n{story}"
            group = self.groups[next(iter(results))[0]]
            assert sum(group.weights) == len(KEYS), f"step {step}: not every key is in the average\n{story}"
        assert not any(m.out_of_step for m in self.living), f"a survivor fell out of step\n{story}"
        assert ended, f"the round did not end: {[(m.name, m.core.step) for m in self.living]}\n{story}"


def check(seeds: range, size: int, deadline_s: float = 250.0, **chances: int | bool) -> None:
    """Run all seeds; report how many broke a promise, and the first in full."""
    broken: dict[int, AssertionError] = {}
    for seed in seeds:
        try:
            Stage(seed, size, **chances).run(deadline_s)  # type: ignore[arg-type]
        except AssertionError as error:
            broken[seed] = error
    if broken:
        kinds = Counter(str(error).split("\n", 1)[0].split(": [")[0] for error in broken.values())
        first = next(iter(broken.values()))
        raise AssertionError(f"{len(broken)} of {len(seeds)} seeds: {dict(kinds)}\n{first}")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_undisturbed_members_apply_the_same_averages_of_every_key(size: int) -> None:
    check(range(150), size, kills=0)


@pytest.mark.parametrize("size", [2, 3])
def test_member_or_leader_killed_at_any_moment_stalls_and_splits_nobody(size: int) -> None:
    check(range(300), size, kills=1)


@pytest.mark.parametrize("size", [2, 3])
def test_member_killed_between_one_send_and_the_next_stalls_and_splits_nobody(size: int) -> None:
    check(range(500), size, kills=1, kill_at_send=True)


@pytest.mark.parametrize("size", [3, 4])
def test_two_killed_members_stall_and_split_nobody(size: int) -> None:
    check(range(300), size, kills=2)
    check(range(300), size, kills=2, kill_at_send=True)


@pytest.mark.parametrize("size", [2, 3])
def test_link_that_flaps_delays_a_round_and_never_stalls_it(size: int) -> None:
    check(range(300), size, kills=0, flaps=3, deadline_s=1200.0)
