"""The start of a run under random delays and views: exactly one start is in force, and it comes."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from peers import start
from peers.frames import FrameError, Kind
from peers.start import Begin, Start, StartCore, Tell, parse_start
from tests.kit.simulation import Network, Simulation

STAGES = 2
DEADLINE_S = 60.0


class Sources:
    """Stage-0 peers that see each other appear on a noticeboard, each at a time of its own."""

    def __init__(self, seed: int, count: int, *, spread_s: float, kills: int = 0) -> None:
        self.sim = Simulation(seed)
        self.network = Network(self.sim, longest_s=0.5)
        self.names = [f"source-{number}" for number in range(count)]
        self.seen: defaultdict[str, set[str]] = defaultdict(set)
        self.begun: dict[str, Start] = {}
        self.cores = {name: self._core(name, seed) for name in self.names}
        for name in self.names:
            self.seen[name].add(name)
            for other in self.names:
                if other != name:
                    self.sim.after(self.sim.random.uniform(0, spread_s), self.seen[name].add, other)
            self.sim.after(self.sim.random.uniform(0, 1), self._tick, name)
        for _ in range(kills):
            self.sim.after(self.sim.random.uniform(0, 6), self._kill)

    def _core(self, name: str, seed: int) -> StartCore:
        return StartCore(
            me=name,
            stage=0,
            stages=STAGES,
            run_seed=seed,
            min_replicas=len(self.names) // 2 + 1,  # any two rosters then share a source
            make_start=lambda rosters: Start(0, rosters, b"plan of " + name.encode(), rosters[0]),
        )

    @property
    def living(self) -> list[str]:
        return [name for name in self.names if name not in self.network.dead]

    def _tick(self, name: str) -> None:
        if name in self.network.dead:
            return
        online = (sorted(self.seen[name]), ["late-0", "late-1", "late-2"])
        self._run(name, self.cores[name].tick(self.sim.now, online))
        self.sim.after(0.25, self._tick, name)

    def _run(self, name: str, actions: list[start.Action]) -> None:
        for action in actions:
            match action:
                case Tell(peer, kind, header):
                    self._send(name, peer, kind, dict(header))
                case Begin(message):
                    assert name not in self.begun
                    self.begun[name] = message
                    self.sim.note(f"{name} begins {message.plan.decode()} with {message.rosters[0]}")
                    for other in self.names:
                        if other != name:
                            self._send(name, other, Kind.START, message.header())

    def _send(self, source: str, target: str, kind: Kind, header: dict[str, object]) -> None:
        self.sim.note(f"{source} -> {target} {kind}")
        self.network.send(source, target, lambda: self._deliver(source, target, kind, header))

    def _deliver(self, source: str, target: str, kind: Kind, header: dict[str, object]) -> None:
        core = self.cores[target]
        match kind:
            case Kind.PROPOSE:
                self._run(target, core.on_propose(source, parse_start(header), self.sim.now))
            case Kind.ACKNOWLEDGE:
                self._run(target, core.on_acknowledge(source, str(header["start"]), self.sim.now))
            case _:
                self._run(target, core.on_start(parse_start(header), self.sim.now))

    def _kill(self) -> None:
        if len(self.living) > len(self.names) // 2 + 1:
            victim = self.sim.random.choice(self.living)
            self.network.kill(victim, self.names, lambda other: self.seen[other].discard(victim))

    def _is_over(self) -> bool:
        """Everybody the start names has begun; whoever it leaves out joins the running swarm."""
        named = {name for message in self.begun.values() for name in message.rosters[0]}
        return bool(named) and all(name in self.begun for name in self.living if name in named)

    def run(self) -> None:
        ended = self.sim.run(self._is_over, DEADLINE_S)
        self.sim.run(lambda: False, DEADLINE_S / 2)  # nobody begins anything else later
        story = "\n".join(self.sim.log[-30:])
        assert len({message.digest() for message in self.begun.values()}) <= 1, (
            f"two starts in force\n{story}"
        )
        assert ended, f"the run never started\n{story}"


def check(seeds: range, count: int, spread_s: float, kills: int = 0) -> None:
    broken: dict[int, AssertionError] = {}
    for seed in seeds:
        try:
            Sources(seed, count, spread_s=spread_s, kills=kills).run()
        except AssertionError as error:
            broken[seed] = error
    if broken:
        kinds = Counter(str(error).split("\n", 1)[0] for error in broken.values())
        seed, first = next(iter(broken.items()))
        raise AssertionError(f"{len(broken)} of {len(seeds)} seeds: {dict(kinds)}\nseed {seed}: {first}")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_sources_that_see_the_same_peers_start_once(count: int) -> None:
    check(range(50), count, spread_s=0.0)


@pytest.mark.parametrize("count", [3, 5])
def test_sources_with_different_views_start_once(count: int) -> None:
    """Two may each take themselves for the first: only one of them may get its acknowledgements."""
    check(range(200), count, spread_s=3.0)


@pytest.mark.parametrize("count", [3, 4])
def test_start_survives_the_death_of_a_source(count: int) -> None:
    check(range(100), count, spread_s=0.0, kills=1)


def core(me: str, stage: int = 0, make: str = "plan") -> StartCore:
    def make_start(rosters: tuple[tuple[str, ...], ...]) -> Start:
        return Start(0, rosters, make.encode(), rosters[0])

    return StartCore(me=me, stage=stage, stages=2, run_seed=1, min_replicas=1, make_start=make_start)


def test_single_source_starts_without_asking() -> None:
    (action,) = core("a").tick(0.0, (["a"], ["b"]))
    assert isinstance(action, Begin) and action.start.rosters == (("a",), ("b",))


def test_nobody_starts_before_every_stage_has_its_replicas() -> None:
    assert core("a").tick(0.0, (["a"], [])) == []


def test_later_stage_never_proposes_and_takes_the_first_start_it_hears() -> None:
    late = core("b", stage=1)
    assert late.tick(0.0, (["a"], ["b"])) == []
    first, second = Start(0, (("a",), ("b",)), b"1", ("a",)), Start(0, (("c",), ("b",)), b"2", ("c",))
    assert late.on_start(first, 0.0) == [Begin(first)]
    assert late.on_start(second, 0.0) == [] and late.started == first


def test_proposal_that_leaves_the_receiver_out_is_refused() -> None:
    with pytest.raises(FrameError, match="start"):
        core("a").on_propose("b", Start(0, (("b", "c"), ("d",)), b"", ("b",)), 0.0)


def test_source_that_acknowledged_another_does_not_start_its_own() -> None:
    """Both would be in force: each has the acknowledgement of everybody it names."""
    names = core("")._order(["a", "b", "c"])
    first, second, third = names
    mine = core(second)
    (tell,) = [t for t in mine.tick(0.0, ([second, third], ["x"])) if isinstance(t, Tell)]
    proposal = parse_start(tell.header)
    displacing = Start(0, (tuple(sorted(names)), ("x",)), b"other", (first,))
    answers = mine.on_propose(first, displacing, 0.1)
    started = mine.on_acknowledge(third, proposal.digest(), 0.0)
    assert not (answers and started)


def test_acknowledgement_of_an_earlier_proposal_counts_for_nothing() -> None:
    order = core("")._order(["a", "b"])
    mine = core(order[0])
    mine.tick(0.0, (order, ["x"]))
    assert mine.on_acknowledge(order[1], "0" * 64, 0.0) == []


def test_start_survives_the_wire() -> None:
    message = Start(3, (("a", "b"), ("c",)), b"\x00plan", ("b", "a"))
    assert parse_start(message.header()) == message


@pytest.mark.parametrize(
    "change",
    [
        {"rosters": []},
        {"rosters": [["a", 1]]},
        {"rosters": "ab"},
        {"version": -1},
        {"plan": "text"},
        {"sources": None},
    ],
)
def test_malformed_start_is_refused(change: dict[str, object]) -> None:
    header = Start(3, (("a",), ("c",)), b"plan", ("a",)).header()
    with pytest.raises(FrameError):
        parse_start({**header, **change})
