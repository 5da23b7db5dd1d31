"""Links over real p2pd: frames, hostile bytes, breaks and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from hivemind.p2p import P2P, PeerID

from dht.dial import connect_peer
from dht.host import host_died, start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.revive import revive_host
from peers.frames import PREFIX, Frame, FrameError, Kind
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.link import Hello, Link, Stream, read_frame, write_frame
from peers.links import HANDLER, Links, Liveness
from peers.traffic import Traffic
from tests.kit.processes import own_children

pytestmark = pytest.mark.e2e
RUN = "a" * 40


class Node:
    """One peer's links and what it has seen."""

    def __init__(self, p2p: P2P, addresses: tuple[str, ...], stage: int) -> None:
        self.p2p, self.addresses, self.stage = p2p, addresses, stage
        self.traffic = Traffic()
        self.frames: list[tuple[str, Frame]] = []
        self.ups: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.losses: list[tuple[str, str]] = []
        self.links = Links(
            p2p,
            Hello(RUN, stage, 1),
            self.traffic,
            on_frame=self._on_frame,
            on_up=self._on_up,
            on_lost=self._on_lost,
        )

    def _on_up(self, link: Link) -> None:
        self.ups.append(link.peer)
        self.events.append(("up", link.peer))

    def _on_lost(self, peer: str, reason: str) -> None:
        self.losses.append((peer, reason))
        self.events.append(("lost", peer))

    @classmethod
    async def start(cls, stage: int) -> Node:
        p2p = await start_host(None)
        node = cls(p2p, await visible_addresses(p2p), stage)
        await node.links.start()
        return node

    def _on_frame(self, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.QUERY:
            raise FrameError("stage", "nobody asks here")
        if frame.kind is Kind.ANSWER:
            raise RuntimeError("a fault of our own")
        self.frames.append((link.peer, frame))

    def want(self, other: Node) -> None:
        self.links.want(other.links.me, other.stage, other.addresses)

    def got(self, kind: Kind) -> list[Frame]:
        return [frame for _, frame in self.frames if frame.kind is kind]

    def link(self, other: Node) -> Link:
        link = self.links.get(other.links.me)
        assert link is not None
        return link

    async def close(self) -> None:
        await self.links.close()
        await stop_host(self.p2p)


class World:
    """A victim (stage 0) linked with a friend (stage 1), and a stranger that speaks raw bytes."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.victim, self.friend = runner.run(self._pair())
        self.stranger: P2P = runner.run(start_host(None))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.runner.run(asyncio.wait_for(coroutine, 30))

    async def _pair(self) -> tuple[Node, Node]:
        victim, friend = await Node.start(0), await Node.start(1)
        friend.want(victim)
        victim.want(friend)
        await until(lambda: victim.links.get(friend.links.me) and friend.links.get(victim.links.me))
        return victim, friend

    async def open(self) -> Stream:
        """A raw stream to the victim."""
        await connect_peer(self.stranger, self.victim.links.me, self.victim.addresses, 5)
        peer = PeerID.from_base58(self.victim.links.me)
        _, reader, writer = await self.stranger.call_binary_stream_handler(peer, HANDLER)
        return Stream(reader, writer)

    async def hello(self, stream: Stream, **changes: Any) -> Frame:
        """Say HELLO on a raw stream; returns the answer."""
        header = Hello(RUN, 1, 1).header(link="x", index=0, total=3)
        await write_frame(stream.writer, Frame(Kind.HELLO, {**header, **changes}))
        return (await read_frame(stream.reader, 0))[0]

    async def link(self) -> list[Stream]:
        """A whole link of the stranger with the victim."""
        name, streams = secrets.token_hex(4), [await self.open() for _ in range(3)]
        for index, stream in enumerate(streams):
            assert (await self.hello(stream, link=name, index=index)).kind is Kind.HELLO
        await until(lambda: self.victim.links.get(self.stranger.peer_id.to_base58()))
        return streams

    async def close(self) -> None:
        await self.friend.close()
        await self.victim.close()
        await stop_host(self.stranger)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    tmp_path_factory.getbasetemp()  # made before the folder for temporary files is another
    patch = pytest.MonkeyPatch()
    with (
        tempfile.TemporaryDirectory(prefix="sp-") as directory,  # short: it will hold sockets
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        patch.setattr("tempfile.tempdir", directory)
        world = World(runner)
        yield world
        runner.run(world.close())
        patch.undo()
        children = own_children()
        assert [child for child in children if child.status() != psutil.STATUS_ZOMBIE] == []
        assert list(Path(directory).iterdir()) == []


@pytest.fixture(autouse=True)
def forgiven(world: World) -> Iterator[None]:
    """The stranger of every test is the same peer: what it did in one is no matter of the next."""
    yield
    world.victim.links._banned.clear()
    world.victim.links._offences._times.clear()


def fresh_peer_id() -> str:
    identity = Identity.load_or_create(None)
    identity.close()
    return identity.peer_id


async def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is watched knows no events
            await asyncio.sleep(0.01)


async def ended(stream: Stream, deadline_s: float = 5.0) -> bool:
    """Whether the other side ends the stream; what it still says is read."""
    try:
        async with asyncio.timeout(deadline_s):
            while await stream.reader.read(4096):
                pass
    except (TimeoutError, ConnectionError) as error:
        return isinstance(error, ConnectionError)
    return True


def test_one_link_carries_small_and_large_frames_both_ways(world: World) -> None:
    async def scenario() -> None:
        victim, friend = world.victim, world.friend
        assert victim.ups == [friend.links.me] and friend.ups == [victim.links.me]
        assert victim.link(friend).hello.stage == 1 and friend.link(victim).hello.stage == 0
        payload = os.urandom(3 << 20)
        victim.link(friend).post(Kind.FORWARD, {"n": 1}, [memoryview(payload)])
        victim.link(friend).post(Kind.COMMIT, {"n": 2})
        await friend.link(victim).send(Kind.GRADIENT, {"n": 3}, [memoryview(payload)])
        await until(lambda: friend.got(Kind.FORWARD) and victim.got(Kind.GRADIENT))
        assert bytes(friend.got(Kind.FORWARD)[0].data()) == payload
        assert bytes(victim.got(Kind.GRADIENT)[0].data()) == payload
        assert friend.frames[0][1].kind is Kind.COMMIT, "control never waits behind bulk"
        assert (
            victim.traffic.total("up", Kind.FORWARD) == friend.traffic.total("down", Kind.FORWARD) > 3 << 20
        )
        await until(lambda: victim.link(friend).rtt_s is not None, 3)

    world.run(scenario())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "b" * 40}, "run bbbb"),
        ({"protocol": PROTOCOL_VERSION + 1}, "matching version"),
    ],
)
def test_stream_of_another_run_or_protocol_is_refused_with_the_reason_and_counted(
    world: World, changes: dict[str, Any], said: str
) -> None:
    async def scenario() -> None:
        before = sum(world.victim.traffic.refused.values())
        stream = await world.open()
        answer = await world.hello(stream, **changes)
        assert answer.kind is Kind.REFUSED and said in answer.header["reason"]
        assert await ended(stream)
        assert world.stranger.peer_id.to_base58() not in world.victim.links.neighbours
        assert sum(world.victim.traffic.refused.values()) == before + 1

    world.run(scenario())


def header_bytes(header: bytes) -> bytes:
    return PREFIX.pack(len(header), 0) + header


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "oversize"),
        (PREFIX.pack(2**32 - 1, 0), "oversize"),
        (PREFIX.pack(10, 2**32 - 1), "oversize"),
        (header_bytes(b"\xc1garbage"), "header"),
        (header_bytes(b"\x81\xa4kind\xa5alien"), "kind"),
        (Frame(Kind.COMMIT).encode_head(), "hello"),
        (Frame(Kind.HELLO, {"run": 5}).encode_head(), "header"),
    ],
    ids=[
        "http",
        "header of 4 GiB",
        "payload of 4 GiB",
        "no msgpack",
        "unknown kind",
        "no hello",
        "bad hello",
    ],
)
def test_stream_that_begins_with_anything_but_hello_is_refused_and_counted(
    world: World, data: bytes, reason: str
) -> None:
    async def scenario() -> None:
        before = world.victim.traffic.refused[reason]
        stream = await world.open()
        stream.writer.write(data)
        assert await ended(stream)
        assert world.victim.traffic.refused[reason] == before + 1
        assert world.victim.link(world.friend).is_open

    world.run(scenario())


@pytest.mark.parametrize("number", [0, 1], ids=["control stream", "bulk stream"])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (PREFIX.pack(2**32 - 1, 0), "oversize"),
        (PREFIX.pack(10, 2**32 - 1), "oversize"),
        (header_bytes(b"\x81\xa4kind\xa5alien"), "kind"),
    ],
    ids=["header of 4 GiB", "payload of 4 GiB", "unknown kind"],
)
def test_malformed_frame_ends_its_link_and_no_other(
    world: World, number: int, data: bytes, reason: str
) -> None:
    async def scenario() -> None:
        before = world.victim.traffic.refused[reason]
        streams = await world.link()
        streams[number].writer.write(data)
        assert all([await ended(stream) for stream in streams])
        assert world.victim.traffic.refused[reason] == before + 1
        assert world.victim.link(world.friend).is_open
        with pytest.raises(AssertionError):
            await world.link()  # it is avoided for a while

    world.run(scenario())


def test_repeated_offences_drop_the_link(world: World) -> None:
    async def scenario() -> None:
        streams = await world.link()
        answers: list[Frame] = []
        for _ in range(LIMITS.offences - 1):
            await write_frame(streams[0].writer, Frame(Kind.QUERY))
        while len(answers) < LIMITS.offences - 1:
            frame, _ = await read_frame(streams[0].reader, 0)
            answers += [frame] if frame.kind is Kind.REFUSED else []
        assert answers[0].header["reason"] == "stage" and "nobody asks here" in answers[0].header["detail"]
        link = world.victim.links.get(world.stranger.peer_id.to_base58())
        assert link is not None
        await write_frame(streams[0].writer, Frame(Kind.QUERY))
        assert all([await ended(stream) for stream in streams])
        assert "frames the protocol does not allow" in link.closed.result()
        with pytest.raises(AssertionError):
            await world.link()  # it is avoided for a while

    world.run(scenario())


def test_peer_that_opens_streams_without_completing_a_link_is_bounded(world: World) -> None:
    async def scenario() -> None:
        answers = []
        for number in range(LIMITS.links_per_peer_bundles + 3):
            answers.append((await world.hello(await world.open(), link=f"half-{number}")).kind)
        assert answers[0] is Kind.HELLO and answers[-1] is Kind.REFUSED
        world.victim.links._bundles.clear()

    world.run(scenario())


def test_fault_in_a_handler_never_leaves_a_link_half_alive(world: World) -> None:
    """Either the next frame is handled, or the link is closed: it never stands and is deaf."""

    async def scenario() -> None:
        streams = await world.link()
        link = world.victim.links.get(world.stranger.peer_id.to_base58())
        assert link is not None
        seen = len(world.victim.got(Kind.STEP_END))
        await write_frame(streams[0].writer, Frame(Kind.ANSWER))
        await asyncio.sleep(0.1)
        with contextlib.suppress(ConnectionError):  # it may be closed by now
            await write_frame(streams[0].writer, Frame(Kind.STEP_END))
        await until(lambda: len(world.victim.got(Kind.STEP_END)) > seen or not link.is_open, 3)

    world.run(scenario())


def test_link_that_breaks_while_the_peer_lives_comes_back_without_a_loss(world: World) -> None:
    async def scenario() -> None:
        victim, friend = world.victim, world.friend
        for breaker, other in ((victim, friend), (friend, victim)):
            ups, losses = len(victim.ups) + len(friend.ups), len(victim.losses) + len(friend.losses)
            breaker.link(other).close("a test breaks it")
            await until(lambda n=ups: len(victim.ups) + len(friend.ups) == n + 2, LIMITS.reconnect_s)
            assert len(victim.losses) + len(friend.losses) == losses
            breaker.link(other).post(Kind.ACCEPTED, {"after": "break"})
            await until(lambda o=other: o.got(Kind.ACCEPTED))

    world.run(scenario())


async def start_anew(node: Node, incarnation: int, stage: int | None = None) -> Node:
    """What another start of the same identity does, with the daemon of the first."""
    again = Node(node.p2p, node.addresses, node.stage if stage is None else stage)
    again.links.hello = Hello(RUN, again.stage, incarnation)
    await node.p2p.remove_binary_stream_handler(HANDLER)
    await again.links.start()
    return again


@pytest.mark.parametrize("side", ["that dials us", "that we dial"])
def test_neighbour_that_started_anew_is_lost_first_and_then_up(world: World, side: str) -> None:
    async def scenario() -> None:
        watcher = world.friend if side == "that dials us" else world.victim
        first = await Node.start(1 - watcher.stage)
        me = first.links.me
        for node, other in ((first, watcher), (watcher, first)):
            node.want(other)
        await until(lambda: first.ups and me in watcher.ups)
        events = len(watcher.events)
        again = await start_anew(first, 2)
        if side == "that dials us":
            again.want(watcher)
        else:  # what its record says is enough to know that the link's other end is dead
            watcher.links.want(me, again.stage, again.addresses, 2)
            await until(lambda: (me, "started anew") in watcher.losses)
            watcher.links.want(me, again.stage, again.addresses, 2)
        await until(lambda: again.ups)
        await until(lambda: len(watcher.events) >= events + 2)
        assert [e for e in watcher.events[events:] if e[1] == me] == [("lost", me), ("up", me)]
        assert watcher.link(again).hello.incarnation == 2

        # The earlier start is refused from now on, and its record does not bring it back.
        await first.links.close()
        late = await start_anew(first, 1)
        late.want(watcher)
        watcher.links.want(me, late.stage, late.addresses, 1)
        await asyncio.sleep(1.0)
        assert watcher.link(again).hello.incarnation == 2 and not late.ups
        if side == "that dials us":
            assert [reason for peer, reason in late.losses] == ["superseded"]
        watcher.links.neighbours[me].heard -= LIMITS.incarnation_kept_s
        assert not watcher.links.neighbours[me].is_superseded(1)  # its counter may have been lost
        for node in (late, again):
            await node.links.close()
        await first.close()

    world.run(scenario())


def test_neighbour_that_started_anew_may_hold_another_stage(world: World) -> None:
    async def scenario() -> None:
        first = await Node.start(0)
        me = first.links.me
        first.want(world.friend)
        await until(lambda: first.ups)
        again = await start_anew(first, 2, stage=2)
        again.links.want(world.friend.links.me, 1, world.friend.addresses)
        world.friend.links.want(me, 2, again.addresses, 2)
        await until(lambda: (me, "started anew") in world.friend.losses)
        world.friend.links.want(me, 2, again.addresses, 2)
        await until(lambda: again.ups)
        assert world.friend.link(again).hello.stage == 2
        await again.links.close()
        await first.close()

    world.run(scenario())


@pytest.mark.parametrize(
    ("side", "outage_s"), [("that dials", 0.0), ("that is dialled", LIMITS.reconnect_s + 1)]
)
def test_links_come_back_when_the_own_daemon_was_killed_and_revived(
    world: World, side: str, outage_s: float
) -> None:
    """A neighbour may report a loss, and then an up; the peer whose daemon died has lost nobody."""

    async def scenario() -> None:
        victim, friend = world.victim, world.friend
        dying, other = (victim, friend) if side == "that dials" else (friend, victim)
        ups, seen = len(dying.ups), len(other.events)
        losses = [peer for peer, _ in dying.losses].count(other.links.me)
        os.kill(dying.p2p._child.pid, signal.SIGKILL)
        await host_died(dying.p2p)
        await asyncio.sleep(outage_s)  # the second one longer than a neighbour's would be borne
        await revive_host(dying.p2p)
        await until(lambda: len(dying.ups) > ups and dying.links.get(other.links.me))
        assert [peer for peer, _ in dying.losses].count(other.links.me) == losses
        await until(lambda: other.links.get(dying.links.me))
        me = dying.links.me
        assert [e for e in other.events[seen:] if e[1] == me] in ([("up", me)], [("lost", me), ("up", me)])
        dying.link(other).post(Kind.BUSY, {"after": "revival"})
        await until(lambda: other.got(Kind.BUSY))

    world.run(scenario())


def test_peer_that_does_not_answer_is_dialled_less_and_less_until_it_calls(world: World) -> None:
    async def scenario() -> None:
        absent = await Node.start(1)
        me = absent.links.me
        absent.want(world.victim)
        world.victim.want(absent)
        await until(lambda: absent.ups)
        os.kill(absent.p2p._child.pid, signal.SIGKILL)
        await host_died(absent.p2p)
        breaker = world.victim.links.neighbours[me].breaker
        lost = sum(peer == me for peer, _ in world.victim.losses)
        for failures in (1, 2, 3):
            await until(lambda n=failures: breaker.failures == n)
            for _ in range(5):
                world.victim.want(absent)  # on every tick of the session
            assert world.victim.links.neighbours[me].is_idle
            breaker.until = 0.0
            world.victim.want(absent)
        await until(lambda: world.victim.links.neighbours[me].is_idle)
        assert sum(peer == me for peer, _ in world.victim.losses) == lost + 4
        await revive_host(absent.p2p)
        await absent.links.probe(world.victim.links.me)
        await until(lambda: len(absent.ups) == 2 and breaker.failures == 0)
        await absent.close()

    world.run(scenario())


def test_address_that_does_not_answer_is_no_proof_that_its_peer_has_ended(world: World) -> None:
    """An unplugged machine, or a firewall: one of its addresses refuses, another is silent."""

    async def scenario() -> None:
        refusing = "/ip4/127.0.0.1/tcp/1"
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            callers = [socket.socket() for _ in range(4)]  # its queue is full: it does not answer any more
            for caller in callers:
                caller.setblocking(False)
                caller.connect_ex(silent.getsockname())
            mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
            for addresses, liveness in (
                ([refusing], Liveness.GONE),
                ([refusing, mute], Liveness.UNKNOWN),
                ([], Liveness.UNKNOWN),
            ):
                peer = fresh_peer_id()
                world.friend.links.want(peer, 0, addresses)  # not our part to dial
                assert await world.friend.links.probe(peer) is liveness, addresses
            for caller in callers:
                caller.close()

    world.run(scenario())


async def kill_a_neighbour(watcher: Node) -> Node:
    """Start a neighbour, link with it, kill its daemon as kill -9 of the peer would, wait for the loss."""
    doomed = await Node.start(1 - watcher.stage)
    try:
        doomed.want(watcher)
        watcher.want(doomed)
        await until(lambda: doomed.links.me in watcher.ups)
        os.kill(doomed.p2p._child.pid, signal.SIGKILL)
        await until(lambda: any(peer == doomed.links.me for peer, _ in watcher.losses), 6)
    finally:
        await doomed.close()
    return doomed


@pytest.mark.parametrize("side", ["that we dial", "that dials us"])
def test_killed_peer_is_reported_lost_once_within_seconds(world: World, side: str) -> None:
    async def scenario() -> None:
        watcher = world.victim if side == "that we dial" else world.friend
        doomed = await kill_a_neighbour(watcher)
        await asyncio.sleep(0.3)
        assert sum(peer == doomed.links.me for peer, _ in watcher.losses) == 1

    world.run(scenario())


def test_probe_of_a_killed_peer_says_that_it_is_gone(world: World) -> None:
    """Its replica may go on alone only when a neighbour of another stage confirms this."""

    async def scenario() -> None:
        doomed = await kill_a_neighbour(world.victim)
        answers = [await world.victim.links.probe(doomed.links.me) for _ in range(3)]
        assert answers == [Liveness.GONE] * 3

    world.run(scenario())


def test_peer_that_leaves_is_lost_at_once_and_says_so(world: World) -> None:
    async def scenario() -> None:
        leaver = await Node.start(1)
        world.victim.want(leaver)
        await until(lambda: leaver.ups)
        await leaver.links.close()
        await until(lambda: (leaver.links.me, "left") in world.victim.losses, 2)
        await leaver.close()

    world.run(scenario())


def test_peer_that_was_lost_is_linked_again_when_it_is_wanted_again(world: World) -> None:
    async def scenario() -> None:
        leaver = await Node.start(1)
        world.victim.want(leaver)
        await until(lambda: leaver.ups)
        me = leaver.links.me
        await leaver.links.close()
        await until(lambda: (me, "left") in world.victim.losses, 2)
        again = Node(leaver.p2p, leaver.addresses, 1)
        leaver.links._on_frame = again._on_frame
        leaver.links._closing = False  # the process starts anew
        leaver.ups.clear()
        world.victim.want(leaver)
        await until(lambda: leaver.ups, 5)
        await leaver.close()

    world.run(scenario())


def test_probe_tells_a_living_peer_from_one_nobody_knows(world: World) -> None:
    async def scenario() -> None:
        assert await world.victim.links.probe(world.friend.links.me) is Liveness.ALIVE
        nobody = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
        assert await world.victim.links.probe(nobody) is not Liveness.ALIVE

    world.run(scenario())
