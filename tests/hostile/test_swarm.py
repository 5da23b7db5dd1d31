"""A swarm of real processes under attack: every peer answers all the time, and the run ends with an exact ledger."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uvloop
from hivemind.p2p import P2P

from dht.host import start_host, stop_host
from peers import fileserver
from peers.frames import PREFIX, Frame, Kind
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.link import write_frame
from peers.metrics import REFUSAL_REASONS
from tests.hostile.garbage import BOMBS, EXTREMES, IS_LONG, generic, wire_of
from tests.hostile.world import Attacker, Target
from tests.kit.ledger import audit
from tests.kit.swarm import Host, Member, Swarm, children_of, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STAGES, STEPS = 2, 400 if IS_LONG else 60
ROOM = 192 * 2**20
ANSWER_S = 10.0


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def swarm(host: Host, tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(host, tmp_path)
    yield swarm
    swarm.close()


def answer(member: Member, path: str) -> str:
    """What the peer's HTTP server says within the deadline."""
    url = (member.last("status") or {})["metrics_url"]
    with urllib.request.urlopen(url + path, timeout=ANSWER_S) as response:
        return str(response.read().decode())


def refused(member: Member) -> int:
    """Frames that the peer has refused, by its metrics."""
    lines = answer(member, "/metrics").splitlines()
    return sum(
        int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith("swarm_peer_frames_refused_total{")
    )


def memory(member: Member) -> int:
    """Bytes in RAM of the peer and its p2pd."""
    return sum(psutil.Process(pid).memory_info().rss for pid in (member.pid, *children_of(member.pid)))


class Attack:
    """Hostile p2pds against one member. sent: malformed frames that must have been counted."""

    def __init__(self, hosts: list[P2P], target: Target, stage: int) -> None:
        self.hosts, self.target, self.stage = hosts, target, stage
        self.sent = 0
        self.silent: list[Attacker] = []

    async def wave(self, number: int) -> None:
        """Everything once."""
        await asyncio.gather(self._garbage_first(number), self._offences(number), self._fetches(number))

    def _attacker(self, number: int, stage: int) -> Attacker:
        return Attacker(self.hosts[number % len(self.hosts)], self.target, stage)

    async def _garbage_first(self, number: int) -> None:
        """Streams that begin with anything but a HELLO of the run."""
        attacker = self._attacker(0, self.stage)
        wires = [PREFIX.pack(len(bomb), 0) + bomb for bomb in BOMBS]
        wires += [PREFIX.pack(size, 0) for size in EXTREMES if size > LIMITS.header_bytes]
        wires += [PREFIX.pack(10, size) for size in EXTREMES if size > 0]
        wires += [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 5000]
        wires += [wire_of(generic(kind)) for kind in Kind]
        hello = attacker.hello.header(link="x", index=0, total=3)
        for name in hello:
            for junk in (None, -1, 2**64 - 1, "x" * 5000, [[]], b"", float("nan")):
                if (name, junk) != ("index", -1):  # a probe, which anybody may make
                    wires.append(wire_of(Frame(Kind.HELLO, {**hello, name: junk})))
        for wire in wires[number % 5 :: 1 if IS_LONG else 5]:
            stream = await attacker.open()
            stream.writer.write(wire)
            stream.writer.write(b"\x00" * 16)
            try:
                async with asyncio.timeout(20):
                    while await stream.reader.read(4096):  # until the peer ends it: then it is counted
                        pass
            except (ConnectionError, RuntimeError):
                pass
            self.sent += 1
            stream.writer.close()

    async def _offences(self, number: int) -> None:
        """Links as a neighbour would make them, and what a hundred megabytes would look like on one."""
        announcements = [
            PREFIX.pack(2**32 - 1, 2**32 - 1),
            PREFIX.pack(100, 100 * 2**20),  # an activation of 100 MB
            PREFIX.pack(2**20 + 1, 0),
            wire_of(Frame(Kind.QUERY)) * LIMITS.offences,
        ]
        attacker = self._attacker(1 + number, self.stage + number % 2)
        try:
            await attacker.link()
        except ConnectionRefusedError as error:
            assert "avoided for a while" in str(error)
            return
        attacker.streams[number % 2].writer.write(announcements[number % len(announcements)])
        self.sent += 1
        for _ in range(50):
            if not await attacker.ping():
                break
        else:
            raise AssertionError("an offender keeps its link")
        with pytest.raises(ConnectionRefusedError, match="avoided for a while"):
            await attacker.link()

    async def _fetches(self, number: int) -> None:
        """Requests for files that cannot be, and streams that never ask."""
        attacker = self._attacker(0, self.stage)
        for header in ({"protocol": -1}, {"protocol": PROTOCOL_VERSION, "run": 5}, {}):
            stream = await attacker.open(fileserver.HANDLER)
            await write_frame(stream.writer, Frame(Kind.FETCH, header))
            async with asyncio.timeout(20):
                assert await stream.reader.read(4096), "it is told why"
            self.sent += 1
            stream.writer.close()
        loris = self._attacker(0, self.stage)
        loris.streams = [await loris.open(fileserver.HANDLER)]
        loris.streams[0].writer.write(PREFIX.pack(1000, 0)[: 1 + number % 8])
        self.silent.append(loris)


def test_attacked_swarm_goes_on_to_an_exact_ledger(swarm: Swarm) -> None:
    swarm.make_run(stages=STAGES, replicas=2, steps=STEPS)
    swarm.seed()
    for stage in range(STAGES):
        for replica in "ab":
            swarm.join(stage, f"{replica}{stage}", serve_after_s=600.0)  # the attack may outlast the run
    names = [name for name in swarm.members if name != "seed"]
    victims = [swarm.members["a0"], swarm.members["b1"]]
    wait_for(lambda: all(swarm.members[n].step >= 3 for n in names), 120.0, "three steps", swarm)
    before = {member.name: (memory(member), refused(member)) for member in victims}
    run = json.loads(answer(victims[0], "/status"))["run_id"]

    async def attack() -> dict[str, Attack]:
        hosts = [await start_host(None) for _ in range(5)]
        attacks = {
            member.name: Attack(
                hosts,
                Target(
                    json.loads(answer(member, "/status"))["peer_id"],
                    tuple(member.last("ready")["addresses"]),
                    run,
                ),
                member.stage or 0,
            )
            for member in victims
        }
        try:
            for number in range(6 if IS_LONG else 1):
                for place, member in enumerate(victims):
                    await attacks[member.name].wave(2 * number + place)
                    for name in names:
                        assert await asyncio.to_thread(answer, swarm.members[name], "/status")
        finally:
            for p2p in hosts:
                await stop_host(p2p)
        return attacks

    with tempfile.TemporaryDirectory(prefix="sp-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", directory)  # short: it will hold sockets
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            attacks = runner.run(asyncio.wait_for(attack(), 300))
    for member in victims:
        nbytes, count = before[member.name]
        assert memory(member) - nbytes < ROOM
        assert refused(member) - count >= attacks[member.name].sent > 0
    swarm.wait_finished(names, 240.0)
    assert all(swarm.members[name].is_finished for name in names), swarm.report()
    assert all(swarm.members[name].step == STEPS for name in names)
    verdict = audit({name: swarm.members[name].ledger() for name in names})
    assert verdict.is_exact and not verdict.lost, verdict.problems()


def test_counting_is_by_bounded_reasons() -> None:
    """Every reason that the code gives has a label of its own."""
    folder = Path(fileserver.__file__).parent
    reasons: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        reasons.update(re.findall(r'FrameError\(\s*"([a-z_]+)"', path.read_text(encoding="utf-8")))
    assert sorted(set(reasons) - set(REFUSAL_REASONS)) == []
