"""Links over real p2pd: frames and hostile bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from peers.frames import PREFIX, Frame, Kind
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.link import Stream, read_frame, write_frame
from tests.kit.linked import World, linked_world, until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from linked_world(tmp_path_factory)


@pytest.fixture(autouse=True)
def forgiven(world: World) -> Iterator[None]:
    """The stranger of every test is the same peer: what it did in one is no matter of the next."""
    yield
    world.victim.links._banned.clear()
    world.victim.links._offences._times.clear()


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
