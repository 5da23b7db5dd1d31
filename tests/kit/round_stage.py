"""The members of one simulated stage, the stage before them, and everything that can happen to them.

The stage before hands out the keys of a step, sends again what went to the dead and the fenced, and what a leader
misses. What is promised is checked while it happens (`on_decided`, `on_applied`) and at the end (`run`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from peers.frames import Kind
from peers.round_messages import Commit, CompactKey, Group
from peers.rounds import RoundCore
from tests.kit.round_member import Member, digest_of, lineage_of
from tests.kit.round_network import RoundNetwork
from tests.kit.simulation import Simulation

KEYS = frozenset((slot, number) for slot in range(2) for number in range(3))


@dataclass(frozen=True)
class World:
    """What happens. Counts, and chances of a thing in a step or an exchange.

    false_gone: witnesses take peers beyond a partition for ended. revives: every killed one comes back.
    """

    kills: int = 0
    kill_at_send: bool = False
    flaps: int = 0
    partitions: int = 0
    false_gone: bool = False
    revives: bool = False
    late: float = 0.0
    doubled: float = 0.0
    lost: float = 0.0
    slow_exchange: float = 0.0
    failing_exchange: float = 0.0
    is_source: bool = False
    steps: int = 4
    deadline_s: float = 600.0
    may_split: bool = False
    """Whether one step may be committed in two lineages (they have to meet and become one)."""
    may_fall_out: bool = True
    """Whether a living member may be left behind by the others."""


class Stage:
    """One run of a world. Everything random comes from the seed."""

    def __init__(self, seed: int, size: int, world: World) -> None:
        self.seed, self.world = seed, world
        self.sim = Simulation(seed)
        self.network = RoundNetwork(self.sim)
        self.network.bind(on_lost=self._on_lost, on_up=self._on_up, on_restarted=self._on_restarted)
        self.keys, self.is_source = KEYS, world.is_source
        self.decided: defaultdict[tuple[int, str], set[tuple[str, str]]] = defaultdict(set)
        self.rosters: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
        self.done: defaultdict[str, set[CompactKey]] = defaultdict(set)
        self.lost: defaultdict[str, set[CompactKey]] = defaultdict(set)
        self._knows_lost: set[tuple[str, str]] = set()
        self._late: dict[tuple[str, str], float] = {}
        self._fenced: set[tuple[str, str]] = set()
        self._places: dict[str, dict[CompactKey, str]] = {}
        self._started: defaultdict[str, dict[str, frozenset[CompactKey]]] = defaultdict(dict)
        self._contributions: dict[str, dict[str, frozenset[CompactKey]]] = {}
        self._slow: dict[str, str] = {}
        self._known_dead: set[str] = set()
        self._replaced: Counter[str] = Counter()
        self._kills_left = min(world.kills, size - 1) if not world.revives else world.kills
        self.seen: Counter[str] = Counter()
        self.quiet_at = 0.0
        names = [f"peer-{i}-{seed}" for i in range(size)]
        self.members: dict[str, Member] = {}
        for name in names:
            self.members[name] = Member(self, name)
        for member in self.members.values():
            member.core.begin(0, tuple(names))
            member.enter(None)
        self._schedule(names)

    def _schedule(self, names: list[str]) -> None:
        world, random = self.world, self.sim.random
        if not world.kill_at_send:
            for _ in range(self._kills_left):
                at = random.uniform(0.0, 8.0 if not world.revives else 30.0)
                self.quiet_at = max(self.quiet_at, at)
                self.sim.after(at, self.kill, random.choice(names))
        for _ in range(world.flaps):
            self.sim.after(random.uniform(0.0, 6.0), self.flap)
        at = 0.0
        for _ in range(world.partitions):
            at += random.uniform(0.0, 6.0)
            self.sim.after(at, self.part)
            at += random.choice([0.5, 3.0, 10.0, 40.0])
            self.sim.after(at, self.heal)
            self.quiet_at = max(self.quiet_at, at)

    @property
    def living(self) -> list[Member]:
        return [member for member in self.members.values() if not member.is_dead]

    # -- links -------------------------------------------------------------------------------------------

    def deliver(self, source: str, target: str, kind: Kind, body: object) -> None:
        self.members[target].on_message(source, kind, body)

    def _on_lost(self, who: str, whom: str) -> None:
        self.sim.note(f"{who} learns that {whom} is lost")
        member = self.members[who]
        member.run(member.core.on_peer_lost(whom, self.sim.now))

    def _on_up(self, who: str, whom: str) -> None:
        self.sim.note(f"{who} sees {whom} again")
        member = self.members[who]
        member.run(member.core.on_peer_up(whom, self.sim.now))

    def _on_restarted(self, who: str, whom: str) -> None:
        member = self.members[who]
        member.run(member.core.on_resigned(whom, self.sim.now))

    def is_gone(self, peer: str) -> bool:
        parted = self.network._partition and self.network.simulation.random.random() < 0.5
        return peer in self.network.dead or (self.world.false_gone and bool(parted))

    # -- what happens to members ---------------------------------------------------------------------------

    def dies_before_send(self, member: Member, kind: Kind) -> bool:
        """Whether the member is killed at exactly this send: also between one COMMIT and the next."""
        if not self.world.kill_at_send or self._kills_left <= 0:
            return False
        chance = {Kind.COMMIT: 0.25, Kind.GROUP: 0.15, Kind.DIGEST: 0.08, Kind.ARRIVE: 0.03}
        return self.sim.random.random() < chance.get(kind, 0.05) and self._may_die(member.name)

    def _may_die(self, name: str) -> bool:
        """A stage that loses the last one with its newest weights needs a refill, which is nothing of the rounds."""
        newest = self.members[name].core.step
        return any(m.is_voting and m.core.step >= newest for m in self.living if m.name != name)

    def kill(self, name: str) -> None:
        if name in self.network.dead or not self._may_die(name):
            return
        self._kills_left -= 1
        self.seen["kills"] += 1
        self.network.die(name, [other for other in self.members if other != name])
        self.sim.after(self.sim.random.uniform(0.2, 2.0), self.replay, name)
        for member in self.living:
            group = member.exchange
            if group is not None and name in group.members and self.sim.random.random() < 0.5:
                self.sim.after(self.sim.random.uniform(0, 0.3), member.exchange_failed, group, "disconnected")
        if self.world.revives:
            self.sim.after(self.sim.random.choice([0.3, 3.0, 15.0]), self.revive, name)

    def revive(self, name: str) -> None:
        self.sim.note(f"{name} comes back")
        self._known_dead.discard(name)
        self.network.revive(name, [other for other in self.members if other != name])
        member = Member(self, name, self.members[name].incarnation + 1)
        self.members[name] = member
        self.sim.after(self.sim.random.choice([1.0, 4.0]), member.catch_up, 0)

    def flap(self) -> None:
        if len(self.living) < 2:
            return
        one, other = self.sim.random.sample(self.living, 2)
        self.network.flap(one.name, other.name)
        self._lose_parts(one, other)
        one.run(one.core.on_peer_up(other.name, self.sim.now))
        other.run(other.core.on_peer_up(one.name, self.sim.now))

    def part(self) -> None:
        random = self.sim.random
        side = {name: random.randint(0, 1) for name in self.members}
        self.sim.note(f"parted: {side}")
        self.seen["partitions"] += 1
        self.network.cut(list(self.members), side)
        self._lose_parts(*self.living)

    def heal(self) -> None:
        self.sim.note("healed")
        self.network.heal(list(self.members))

    def _lose_parts(self, *members: Member) -> None:
        for member in members:
            if member.exchange and self.sim.random.random() < 0.5:
                self._started[
                    member.exchange.id
                ].clear()  # a part was lost: nobody learns before the deadline

    # -- exchanges -----------------------------------------------------------------------------------------

    def exchange(self, member: Member, group: Group) -> None:
        started, random = self._started[group.id], self.sim.random
        if not started and random.random() < self.world.slow_exchange and len(group.members) > 1:
            self._slow[group.id] = random.choice(group.members)
        if not started and random.random() < self.world.failing_exchange:
            self.sim.after(random.uniform(0, 1.0), member.exchange_failed, group, "schema")
        started[member.name] = frozenset(member.ledger)
        if set(started) == set(group.members) and group.id not in self._slow:
            self._contributions[group.id] = dict(started)
            for name in group.members:
                self.sim.after(random.choice([0.01, 0.2, 0.8]), self._finish_exchange, name, group)

    def _finish_exchange(self, name: str, group: Group) -> None:
        member = self.members[name]
        others = set(group.members)
        parted = any(not self.network.sees(name, other) for other in others)
        # What the others had sent may have sufficed, though they are dead or away.
        if self._started[group.id] and (not parted or self.sim.random.random() < 0.5):
            member.exchanged(group)

    def suspects(self, member: Member, group: Group) -> tuple[str, ...]:
        """Whom a member blames for an exchange that was late."""
        slow = self._slow.get(group.id)
        if slow == member.name:
            return tuple(name for name in group.members if name != member.name)
        return (slow,) if slow else tuple(n for n in group.members if n not in self._started[group.id])

    # -- the previous stage ------------------------------------------------------------------------------

    def plan_after(self, commit: Commit | None, core: RoundCore) -> str:
        if commit is not None and commit.plan:
            return commit.plan.decode()
        return f"plan {core.step} {core.lineage}"

    @staticmethod
    def step_of(plan: str) -> int:
        return int(plan.split()[1])

    def hand_out(self, plan: str) -> None:
        """The previous stage sends the step's keys to whom it takes for living."""
        if plan in self._places:
            return
        self._places[plan] = {}
        world, random = self.world, self.sim.random
        if random.random() < world.lost:
            self.lost[plan].add(random.choice(sorted(KEYS)))
            self._knows_lost |= {(n, plan) for n in self.members if random.random() < 0.5}
        if random.random() < world.late:
            self._late[random.choice(list(self.members)), plan] = self.sim.now + random.uniform(10, 120)
        targets = [m.name for m in self.members.values() if m.name not in self._known_dead]
        able = self._able(plan)
        voting = [name for name in targets if name in able or name in self.network.dead] or targets
        for key in sorted(KEYS - self.lost[plan]):
            self._place(plan, key, random.choice(voting))
            if random.random() < world.doubled:
                self._place(plan, key, random.choice(voting))
        if self.lost[plan] == KEYS - self.done[plan]:
            self._all_hear(plan)

    def _able(self, plan: str) -> list[str]:
        step = self.step_of(plan)
        return [
            m.name
            for m in self.living
            if m.is_voting and m.core.step <= step and (m.name, plan) not in self._fenced
        ]

    def on_done(self, plan: str, key: CompactKey) -> None:
        """A key's gradient is back at its source; with the last of them the slots end, and all hear of it."""
        self.done[plan].add(key)
        if self.has_ended(plan):
            self._all_hear(plan)

    def has_ended(self, plan: str) -> bool:
        return self.done[plan] | self.lost[plan] == KEYS

    def _all_hear(self, plan: str) -> None:
        for member in self.living:
            self.sim.after(self.sim.random.uniform(0.0, 0.3), member.report)

    def lateness(self, name: str, plan: str) -> float:
        return self._late.get((name, plan), 0.0)

    def known_lost(self, name: str, plan: str) -> tuple[CompactKey, ...]:
        return tuple(sorted(self.lost[plan])) if (name, plan) in self._knows_lost else ()

    def replay(self, dead: str) -> None:
        """What went to a dead member goes to living ones; those that have committed the step refuse it."""
        if dead in self.network.dead:
            self._known_dead.add(dead)
        for plan in list(self._places):
            self._move(plan, dead)

    def _move(self, plan: str, away_from: str) -> None:
        for key, place in list(self._places[plan].items()):
            able = [name for name in self._able(plan) if name != away_from]
            if place == away_from and able:
                self._place(plan, key, self.sim.random.choice(able))

    def fence(self, leader: Member, peer: str) -> None:
        plan = leader.plan
        self.seen["fences"] += 1
        self._fenced.add((peer, plan))
        self.network.send(leader.name, peer, lambda: self.deliver(leader.name, peer, Kind.FENCE, plan))
        self.sim.after(self.sim.random.uniform(0.1, 1.0), self._move, plan, peer)

    def unfence(self, member: Member) -> None:
        self.seen["unfenced"] += 1
        self._fenced.discard((member.name, member.plan))

    def replay_missing(self, leader: Member, keys: tuple[CompactKey, ...]) -> None:
        """What no ledger has is sent again, or all hear that it cannot be."""
        self.seen["missing"] += 1
        plan = leader.plan
        if not self.lost[plan].isdisjoint(keys):
            self._knows_lost |= {(name, plan) for name in self.members}
            self._all_hear(plan)
        for key in set(keys) - self.lost[plan]:
            able = self._able(plan)
            seen = [name for name in able if self.network.sees(leader.name, name)]
            if seen and self.sim.random.random() < 0.85:
                able = seen
            if able:
                self._place(plan, key, self.sim.random.choice(able))

    def _place(self, plan: str, key: CompactKey, name: str) -> None:
        self._places[plan][key] = name
        self.sim.after(self.sim.random.uniform(0.0, 0.6), self.members[name].receive, plan, key)

    # -- the claims --------------------------------------------------------------------------------------

    def on_decided(self, commit: Commit) -> None:
        """Whoever commits an average, it is one average, with one roster."""
        self.decided[commit.step, commit.lineage].add((commit.group, commit.digest))
        self.rosters[commit.next_lineage].add(commit.roster)
        if commit.followers:
            self.seen["followers"] += 1

    def on_applied(self, member: Member, commit: Commit, average: Group) -> None:
        """What is applied is the average of every key that exists, each of them once."""
        plan = average.plan
        assert commit.lineage == lineage_of(member.applied), "applied in another lineage"
        assert member.name in commit.roster, "applied by somebody who is not in the roster"
        assert commit.digest == digest_of(average), "applied another average"
        ledgers = list(self._contributions[average.id].values())
        keys = [key for ledger in ledgers for key in ledger]
        assert len(keys) == len(set(keys)), "a key is in the average twice"
        assert set(keys) == KEYS - set(commit.lost), "a key is missing in the average"
        assert set(commit.lost) <= self.lost[plan], "a key that is not lost was given up"
        assert commit.weight == sum(average.weights) == len(keys), "weights that are not those of the ledgers"

    def _is_settled(self) -> bool:
        if self.sim.now < self.quiet_at:
            return False
        living = self.living
        if not all(m.is_voting and m.core.step >= self.world.steps for m in living):
            return False
        return self._are_one(living)

    @staticmethod
    def _are_one(members: list[Member]) -> bool:
        longest = max((m.applied for m in members), key=len)
        return all(m.applied == longest[: len(m.applied)] for m in members)

    def run(self) -> None:
        try:
            has_settled = self.sim.run(self._is_settled, self.world.deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from error
        where = [(m.name, m.core.step, m.core.lineage[:6], m.core.is_out) for m in self.living]
        for rosters in self.rosters.values():
            assert len(rosters) == 1, f"one average, two rosters: {rosters}\n{self.story()}"
        if not self.world.may_split:
            results = Counter(step for (step, _), averages in self.decided.items() for _ in averages)
            assert max(results.values(), default=1) == 1, f"one step, two averages\n{self.story()}"
        if not self.world.may_fall_out:
            assert not any(m.outs for m in self.living), f"a survivor fell out of step\n{self.story()}"
        assert has_settled, f"it did not end: {where}\n{self.story()}"

    def story(self) -> str:
        return f"seed {self.seed}, now {self.sim.now:.1f}\n" + "\n".join(self.sim.log[-70:])


def check(seeds: range, size: int, world: World) -> Counter[str]:
    """Run all seeds; report how many broke a promise, and the first in full. Returns what happened in them."""
    broken: dict[int, AssertionError] = {}
    seen: Counter[str] = Counter()
    for seed in seeds:
        stage = Stage(seed, size, world)
        try:
            stage.run()
        except AssertionError as error:
            broken[seed] = error
        seen += stage.seen
        for member in stage.members.values():
            seen.update(type(action).__name__ for action in member.outs)
    if broken:
        kinds = Counter(str(error).split("\n", 1)[0].split(": [")[0] for error in broken.values())
        first = next(iter(broken.values()))
        raise AssertionError(f"{len(broken)} of {len(seeds)} seeds: {dict(kinds)}\n{first}")
    return seen
