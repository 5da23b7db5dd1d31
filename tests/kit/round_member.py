"""One simulated replica: a real `RoundCore` in a shell that does what `peers.averaging` and its owner do."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from peers import rounds
from peers.frames import Kind
from peers.round_messages import Arrival, Commit, CompactKey, Digest, Failure, Group, next_lineage
from peers.rounds import RoundCore

if TYPE_CHECKING:
    from tests.kit.round_stage import Stage

Applied = tuple[int, str, str]
"""(step, group, digest) of a commit that is in the weights."""


def lineage_of(applied: list[Applied]) -> str:
    """Lineage of weights with these commits."""
    lineage = ""
    for _, group, digest in applied:
        lineage = next_lineage(lineage, group, digest)
    return lineage


def digest_of(group: Group) -> str:
    """What the exchange of a group gives."""
    return hashlib.sha256(f"{group.id}/{group.ledgers}/{group.corrector}".encode()).hexdigest()


class Member:
    """A replica. applied: the commits in its weights, from the first step on."""

    def __init__(self, world: Stage, name: str, incarnation: int = 0) -> None:
        self.world, self.name, self.incarnation = world, name, incarnation
        self.core = RoundCore(run_id="run", run_seed=world.seed, stage=1, me=name, make_plan=self._make_plan)
        self.applied: list[Applied] = []
        self.outs: list[rounds.Action] = []
        self.early: list[tuple[str, CompactKey]] = []
        self.catching_up = self.must_reach = 0
        self.clear()
        world.sim.after(world.sim.random.uniform(0, 0.25), self.tick)

    def clear(self) -> None:
        self.plan = ""
        self.ledger: set[CompactKey] = set()
        self.held_back: list[tuple[str, CompactKey]] = []
        self.is_frozen = self.is_fenced = False
        self.average: Group | None = None
        self.exchange: Group | None = None

    @property
    def corrector(self) -> str:
        """The corrector's prior of the step; most members hold it, in most steps."""
        drawn = hashlib.sha256(f"{self.name}/{self.core.step}".encode()).digest()[0]
        return "c" * 64 if drawn >= 64 else ""

    @property
    def is_dead(self) -> bool:
        return self.name in self.world.network.dead or self.world.members[self.name] is not self

    @property
    def is_voting(self) -> bool:
        core = self.core
        return (
            not self.is_dead
            and not core.is_out
            and self.name in core.roster
            and self.name not in core.followers
        )

    def _make_plan(
        self, step: int, attempt: int, group: str, roster: tuple[str, ...]
    ) -> tuple[bytes, tuple[str, ...]]:
        if not self.world.is_source:
            return b"", ()
        return f"plan {step} {group} {attempt} {self.name}".encode(), roster

    # -- the shell ---------------------------------------------------------------------------------------

    def run(self, actions: list[rounds.Action]) -> None:
        sim, world = self.world.sim, self.world
        for number, action in enumerate(actions):
            if self.is_dead:
                return
            if isinstance(action, rounds.Send) and world.dies_before_send(self, action.kind):
                sim.note(f"{self.name} dies before action {number} of {len(actions)}")
                world.kill(self.name)
                return
            match action:
                case rounds.Send(peer, kind, body):
                    sim.note(f"{self.name} -> {peer} {kind} (step {self.core.step}) {brief(body)}")
                    if isinstance(body, Commit):
                        world.on_decided(body)
                    world.network.send(
                        self.name, peer, lambda p=peer, k=kind, b=body: world.deliver(self.name, p, k, b)
                    )
                case rounds.Freeze(is_frozen):
                    self.is_frozen = is_frozen
                    if not is_frozen:
                        back, self.held_back = self.held_back, []
                        for plan, key in back:
                            self.receive(plan, key)
                case rounds.Exchange(group, deadline_s):
                    self.average, self.exchange = None, group
                    sim.after(deadline_s, self.exchange_late, group)
                    world.exchange(self, group)
                case rounds.CancelExchange():
                    self.exchange = None
                case rounds.Apply(commit):
                    sim.note(f"{self.name} applies step {commit.step}")
                    world.on_decided(commit)
                    sim.after(sim.random.choice([0.01, 0.1, 1.5]), self.apply, commit)
                case rounds.AskGone(peers):
                    for peer in peers:
                        sim.after(sim.random.uniform(0.1, 3.0), self.answer_gone, peer)
                case rounds.Fence(peer, reason):
                    sim.note(f"{self.name} fences {peer}: {reason}")
                    assert peer != self.name
                    world.fence(self, peer)
                case rounds.Unfence():
                    self.is_fenced = False
                    world.unfence(self)
                case rounds.AskMissing(keys):
                    sim.note(f"{self.name} misses {keys}")
                    world.replay_missing(self, keys)
                case rounds.Replan(commit):
                    self.take_plan(commit.plan.decode())
                case rounds.OutOfStep() | rounds.Dropped() | rounds.Diverged():
                    sim.note(f"{self.name} is out: {type(action).__name__}")
                    assert self.core.is_out
                    self.outs.append(action)
                    self.fall_out(action)

    def on_message(self, peer: str, kind: Kind, body: object) -> None:
        now, core = self.world.sim.now, self.core
        match kind, body:
            case Kind.ARRIVE, Arrival() as arrival:
                self.run(core.on_arrive(peer, arrival, now))
            case Kind.GROUP, Group() as group:
                self.run(core.on_group(peer, group, now))
            case Kind.COMMIT, Commit() as commit:
                if core.is_out and self.name in commit.followers:
                    self.come_along(commit)
                else:
                    self.run(core.on_commit(peer, commit, now))
            case Kind.DIGEST, Digest() as digest:
                self.run(core.on_digest(peer, digest, now))
            case Kind.FAILED, Failure() as failure:
                self.run(core.on_failed(peer, failure, now))
            case Kind.FOLLOW, (version, lineage):
                self.run(core.on_follow(peer, version, lineage, now))
            case Kind.FENCE, str() as plan:
                self.on_fence(plan)
            case _:
                raise AssertionError(f"{kind} with {body!r}")

    def answer_gone(self, peer: str) -> None:
        if not self.is_dead and self.world.is_gone(peer):
            self.run(self.core.on_gone(peer, self.world.sim.now))

    def tick(self) -> None:
        if self.is_dead:
            return
        self.run(self.core.tick(self.world.sim.now))
        self.world.sim.after(0.5, self.tick)

    # -- exchange and apply --------------------------------------------------------------------------------

    def exchanged(self, group: Group) -> None:
        if not self.is_dead and self.exchange is group:
            self.exchange, self.average = None, group
            self.run(self.core.on_exchanged(group.id, digest_of(group), self.world.sim.now))

    def exchange_failed(self, group: Group, reason: str, suspects: tuple[str, ...] = ()) -> None:
        if not self.is_dead and self.exchange is group:
            self.exchange = None
            self.run(self.core.on_exchange_failed(group.id, reason, suspects, self.world.sim.now))

    def exchange_late(self, group: Group) -> None:
        self.exchange_failed(group, "late", self.world.suspects(self, group))

    def apply(self, commit: Commit) -> None:
        if self.is_dead:
            return
        assert self.average is not None and self.average.id == commit.group, "applies what it does not have"
        assert self.average.corrector in ("", self.corrector), "corrects by what it does not hold"
        assert self.core.step == commit.step == len(self.applied), "a step is applied out of order"
        self.world.on_applied(self, commit, self.average)
        self.applied.append((commit.step, commit.group, commit.digest))
        self.clear()
        self.run(self.core.on_applied(commit, self.world.sim.now))
        assert self.core.lineage == lineage_of(self.applied)
        self.enter(commit)

    # -- work ------------------------------------------------------------------------------------------------

    def enter(self, commit: Commit | None) -> None:
        """The step's plan comes; then its keys."""
        sim, plan = self.world.sim, self.world.plan_after(commit, self.core)
        sim.after(sim.random.choice([0.0, 0.05, 0.5]), self.take_plan, plan)

    def take_plan(self, plan: str) -> None:
        core = self.core
        if self.is_dead or core.is_out or self.world.step_of(plan) != core.step or self.plan == plan:
            return
        self.plan, self.ledger, self.is_fenced = plan, set(), False
        self.run(core.on_plan(plan, self.world.keys, self.world.sim.now))
        self.world.hand_out(plan)
        early, self.early = self.early, []
        for of_plan, key in early:
            self.receive(of_plan, key)
        self.report()

    def receive(self, plan: str, key: CompactKey) -> None:
        if self.is_dead or self.core.is_out or not self.is_voting:
            return
        if plan != self.plan:
            self.early.append((plan, key))
        elif self.is_fenced:
            return
        elif self.is_frozen:
            self.held_back.append((plan, key))
        else:
            self.ledger.add(key)
            self.world.on_done(plan, key)
            self.report()

    def on_fence(self, plan: str) -> None:
        if plan == self.plan and not self.is_fenced and not self.core.is_out:
            self.is_fenced = True
            self.run(self.core.fence(plan, self.world.sim.now))
            if self.is_frozen:
                return
            self.ledger.clear()
            self.report()

    def report(self) -> None:
        """The shell reports a settled ledger once all slots have ended, unless it is slow to learn of it."""
        plan, world = self.plan, self.world
        if self.is_dead or self.core.is_out or not plan or not world.has_ended(plan):
            return
        delay_s = world.lateness(self.name, plan)
        if delay_s > world.sim.now:
            world.sim.after(delay_s - world.sim.now + 0.01, self.report)
            return
        if self.is_fenced and not self.is_frozen:
            self.ledger.clear()
        keys = tuple(sorted(self.ledger))
        lost = world.known_lost(self.name, plan)
        # Of every second step something is owed, whose average all have or only some.
        is_owed = self.core.step % 2 == 1 and self.name not in self.core.followers
        has_it = self.core.step % 4 == 1 or self.name.startswith("peer-1")
        arrival = Arrival(
            self.core.step,
            plan,
            keys,
            len(keys),
            lost=lost,
            corrector=self.corrector,
            owed=2 + len(self.name) if is_owed else 0,
            settled=hashlib.sha256(f"{self.core.step}".encode()).hexdigest() if is_owed and has_it else "",
        )
        self.run(self.core.on_ready(arrival, world.sim.now))

    # -- catching up -------------------------------------------------------------------------------------------

    def fall_out(self, action: rounds.OutOfStep | rounds.Dropped | rounds.Diverged) -> None:
        """Out of step: fetch what others have, then follow."""
        self.clear()
        self.must_reach = action.step if isinstance(action, rounds.Diverged) else action.commit.next_step
        sim = self.world.sim
        sim.after(sim.random.uniform(0.1, 1.0), self.world.replay, self.name)  # it refuses what it was sent
        sim.after(sim.random.choice([0.1, 1.0, 5.0]), self.catch_up, self.catching_up)
        if isinstance(action, rounds.Dropped) and self.name in action.commit.followers:
            self.come_along(action.commit)

    def catch_up(self, number: int) -> None:
        """Take the weights of whoever is furthest, and ask to follow, every two seconds."""
        if self.is_dead or not self.core.is_out or number != self.catching_up:
            return
        donors = [m for m in self.world.living if m is not self and m.is_voting and self.sees(m)]
        if donors:
            donor = max(donors, key=lambda m: (m.core.step, m.core.lineage))
            self.applied = list(donor.applied)
        if donors and len(self.applied) >= self.must_reach:
            for peer in self.world.members:
                if peer != self.name:
                    body = (len(self.applied), lineage_of(self.applied))
                    self.world.network.send(
                        self.name,
                        peer,
                        lambda p=peer, b=body: self.world.deliver(self.name, p, Kind.FOLLOW, b),
                    )
        self.world.sim.after(2.0, self.catch_up, number)

    def come_along(self, commit: Commit) -> None:
        """A COMMIT lists this peer as a follower: fetch what it leads to, and enter the next round."""
        sim = self.world.sim
        self.catching_up += 1
        number = self.catching_up
        sim.after(
            sim.random.choice([0.1, 0.5, 2.0, 9.0]), self.enter_as_follower, commit, number, sim.now + 20.0
        )

    def enter_as_follower(self, commit: Commit, number: int, until: float) -> None:
        if self.is_dead or not self.core.is_out or number != self.catching_up:
            return
        if self.world.sim.now > until:
            self.catch_up(number)
            return
        for donor in self.world.living:
            history = donor.applied[: commit.next_step]
            if (
                len(history) == commit.next_step
                and lineage_of(history) == commit.next_lineage
                and self.sees(donor)
            ):
                self.clear()
                self.applied = list(history)
                self.core.begin(commit.next_step, commit.roster, commit.next_lineage, commit.followers)
                self.world.sim.note(f"{self.name} follows from step {commit.next_step}")
                self.enter(commit)
                return
        self.world.sim.after(0.2, self.enter_as_follower, commit, number, until)

    def sees(self, other: Member) -> bool:
        return self.world.network.sees(self.name, other.name)


def brief(body: object) -> str:
    """A message in a few characters, for the story of a failing seed."""
    match body:
        case Arrival():
            held = f" held {body.held.ballot[:4]}@{body.held.attempt}" if body.held else ""
            return (
                f"step {body.step} {len(body.keys)} keys{held}" if body.plan else f"step {body.step} position"
            )
        case Group():
            return f"{body.id[:4]}@{body.attempt} {'finishes ' + body.held.group[:4] if body.held else ''}"
        case Commit():
            return f"step {body.step} {body.group[:4]} roster {body.roster} followers {body.followers}"
        case Digest() | Failure():
            return f"{body.group[:4]} {getattr(body, 'reason', '')} {getattr(body, 'suspects', '')}"
    return str(body)
