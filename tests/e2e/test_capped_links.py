"""Caps on real links over real p2pd: rates, control under load, neighbours that do not keep to their credit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hivemind.p2p import PeerID

import peers.link
from benchmarks.testbed import is_possible
from dht.dial import connect_peer
from dht.host import start_host, stop_host, visible_addresses
from peers.fileserver import FileServer
from peers.frames import Frame, Kind, Priority
from peers.limits import Limits
from peers.link import Hello, Link, Stream, read_frame, write_frame
from peers.links import HANDLER, Links
from peers.traffic import Traffic
from peers.transfer import fetch_artifact
from tests.e2e.transfer_swarm import content_of, make_run

pytestmark = pytest.mark.e2e
RUN = "a" * 40
ROOT = Path(__file__).resolve().parents[2]
CAP_MBPS = 8.0
CAP_BYTES_PER_S = CAP_MBPS * 1e6 / 8
FRAME_BYTES = 256 * 1024


class Node:
    """One peer's links under its caps, and the frames it got."""

    def __init__(self, p2p: Any, addresses: tuple[str, ...], stage: int, traffic: Traffic) -> None:
        self.p2p, self.addresses, self.stage, self.traffic = p2p, addresses, stage, traffic
        self.got: list[Kind] = []
        self.links = Links(
            p2p,
            Hello(RUN, stage, 1),
            traffic,
            on_frame=lambda _, frame: self.got.append(frame.kind),
            on_up=lambda _: None,
            on_lost=lambda *_: None,
        )

    def link(self, other: Node) -> Link:
        link = self.links.get(other.links.me)
        assert link is not None
        return link


@asynccontextmanager
async def nodes(*plan: tuple[int, float | None, float | None]) -> AsyncIterator[list[Node]]:
    """Peers of (stage, upload cap, download cap), the first linked with each of the others."""
    made: list[Node] = []
    try:
        for stage, up, down in plan:
            p2p = await start_host(None)
            made.append(Node(p2p, await visible_addresses(p2p), stage, Traffic(up, down)))
            await made[-1].links.start()
        first = made[0]
        for other in made[1:]:
            first.links.want(other.links.me, other.stage, other.addresses)
            other.links.want(first.links.me, first.stage, first.addresses)
        await until(lambda: all(first.links.get(other.links.me) for other in made[1:]))
        await until(lambda: all(other.links.get(first.links.me) for other in made[1:]))
        yield made
    finally:
        for node in made:
            await node.links.close()
            await stop_host(node.p2p)


async def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is watched knows no events
            await asyncio.sleep(0.01)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario, 120))


async def flood(link: Link, kind: Kind = Kind.FORWARD) -> None:
    payload = [memoryview(bytes(FRAME_BYTES))]
    while True:
        await link.send(kind, {}, payload)


async def rate_of(measured: Callable[[], int], seconds: float = 3.0) -> float:
    """Bytes per second."""
    before, began = measured(), time.monotonic()
    await asyncio.sleep(seconds)
    return (measured() - before) / (time.monotonic() - began)


def test_a_slow_peer_keeps_to_its_upload_cap_and_its_control_frames_overtake() -> None:
    async def scenario() -> None:
        async with nodes((0, CAP_MBPS, None), (1, None, None), (1, None, None)) as (slow, one, other):
            floods = [asyncio.create_task(flood(slow.link(peer))) for peer in (one, other) for _ in range(3)]
            await asyncio.sleep(0.5)
            assert await rate_of(lambda: slow.traffic.total("up")) <= 1.05 * CAP_BYTES_PER_S
            before = one.got.count(Kind.FORWARD)
            for _ in range(20):
                slow.link(one).post(Kind.FORWARD, {}, [memoryview(bytes(FRAME_BYTES))])
            slow.link(one).post(Kind.QUERY)
            await until(lambda: Kind.QUERY in one.got)
            assert one.got.count(Kind.FORWARD) - before < 20
            assert slow.traffic.upload.waited_s[Priority.ACTIVATION] > 1
            for task in floods:
                task.cancel()

    run(scenario())


def test_neighbours_of_a_peer_with_a_download_cap_send_no_faster_and_not_far_ahead() -> None:
    async def scenario() -> None:
        async with nodes((1, None, CAP_MBPS), (0, None, None), (2, None, None)) as (slow, one, other):
            floods = [asyncio.create_task(flood(peer.link(slow))) for peer in (one, other) for _ in range(3)]
            await asyncio.sleep(1.0)

            def sent() -> int:
                return one.traffic.total("up") + other.traffic.total("up")

            assert await rate_of(sent) <= 1.05 * CAP_BYTES_PER_S
            assert 0 <= sent() - slow.traffic.total("down") <= 2 * (1 << 20)
            assert slow.traffic.total("up", Kind.CREDIT) > 0
            for task in floods:
                task.cancel()

    run(scenario())


def test_peers_without_caps_speak_of_no_windows() -> None:
    async def scenario() -> None:
        async with nodes((0, None, None), (1, None, None)) as (one, other):
            assert one.link(other).hello.window is None
            await one.link(other).send(Kind.FORWARD, {}, [memoryview(bytes(4 << 20))])
            await until(lambda: other.got)
            assert one.traffic.total("down", Kind.CREDIT) == 0

    run(scenario())


async def raw_link(stranger: Any, victim: Node, **hello: Any) -> list[Stream]:
    """A link made by hand: what comes over it is nobody's but the test's."""
    await connect_peer(stranger, victim.links.me, victim.addresses, 5)
    streams: list[Stream] = []
    for index in range(3):
        victim_id = PeerID.from_base58(victim.links.me)
        _, reader, writer = await stranger.call_binary_stream_handler(victim_id, HANDLER)
        header = Hello(RUN, 1, 1).header(link="raw", index=index, total=3, **hello)
        await write_frame(writer, Frame(Kind.HELLO, header))
        assert (await read_frame(reader, 0))[0].kind is Kind.HELLO
        streams.append(Stream(reader, writer))
    await until(lambda: victim.links.get(stranger.peer_id.to_base58()))
    return streams


def test_a_neighbour_that_ignores_its_credit_is_read_no_faster() -> None:
    async def scenario() -> None:
        stranger = await start_host(None)
        async with nodes((0, None, CAP_MBPS)) as (victim,):
            streams = await raw_link(stranger, victim)

            async def push(stream: Stream) -> None:
                while True:
                    await write_frame(
                        stream.writer, Frame(Kind.FORWARD, {}, [memoryview(bytes(FRAME_BYTES))])
                    )

            pushing = [asyncio.create_task(push(stream)) for stream in streams[1:]]
            await asyncio.sleep(0.5)
            assert await rate_of(lambda: victim.traffic.total("down")) <= 1.05 * CAP_BYTES_PER_S
            await write_frame(streams[0].writer, Frame(Kind.QUERY, {}))
            await until(lambda: Kind.QUERY in victim.got)
            for task in pushing:
                task.cancel()
        await stop_host(stranger)

    run(scenario())


def test_a_neighbour_that_never_gives_credit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.link, "LIMITS", Limits(bulk_stall_s=0.5, heartbeat_s=0.1))

    async def scenario() -> None:
        stranger = await start_host(None)
        async with nodes((0, None, None)) as (victim,):
            streams = await raw_link(stranger, victim, window=1000)
            link = victim.links.get(stranger.peer_id.to_base58())
            assert link is not None
            with pytest.raises(ConnectionError, match="takes no bulk"):
                await link.send(Kind.FORWARD, {}, [memoryview(bytes(FRAME_BYTES))])
            del streams  # until now the streams stood
        await stop_host(stranger)

    run(scenario())


def test_a_transfer_gets_through_while_training_takes_all_it_can(tmp_path: Path) -> None:
    content = content_of(1 << 18)
    manifest = make_run(tmp_path / "served", content)

    async def scenario() -> None:
        async with nodes((0, 8.0, None), (1, None, None)) as (donor, joiner):
            server = FileServer(donor.p2p, donor.traffic)
            await server.start()
            server.add_run(manifest, tmp_path / "served")
            floods = [asyncio.create_task(flood(donor.link(joiner))) for _ in range(3)]
            await asyncio.sleep(0.2)
            before = donor.traffic.total("up", Kind.FORWARD)
            target = tmp_path / "mine"
            artifact = manifest.artifacts[0]
            await fetch_artifact(joiner.p2p, [donor.links.me], artifact, manifest.run_id, target)
            assert target.read_bytes() == content
            assert donor.traffic.total("up", Kind.FORWARD) - before > 4 * len(content), "training went first"
            for task in floods:
                task.cancel()
            await server.close()

    run(scenario())


def test_a_fetch_under_a_download_cap_comes_at_that_rate_and_no_faster(tmp_path: Path) -> None:
    content = content_of(4 << 20)
    manifest = make_run(tmp_path / "served", content)

    async def scenario() -> None:
        async with nodes((0, None, None), (1, None, CAP_MBPS)) as (donor, joiner):
            server = FileServer(donor.p2p, donor.traffic)
            await server.start()
            server.add_run(manifest, tmp_path / "served")
            target = tmp_path / "mine"
            arguments = (joiner.p2p, [donor.links.me], manifest.artifacts[0], manifest.run_id, target)
            fetch = asyncio.create_task(fetch_artifact(*arguments, traffic=joiner.traffic))
            await until(lambda: donor.traffic.total("up", Kind.CHUNK) > 1 << 19)
            assert await rate_of(lambda: donor.traffic.total("up", Kind.CHUNK), 2.0) <= 1.05 * CAP_BYTES_PER_S
            await fetch
            assert target.read_bytes() == content
            await server.close()

    run(scenario())


@pytest.mark.skipif(not is_possible(), reason="needs root, ip and tc to make network namespaces")
def test_the_interface_sees_no_more_than_the_cap() -> None:
    command = [sys.executable, "-m", "benchmarks.shaper", "--rates", "20", "--neighbours", "4"]
    process = subprocess.Popen(
        [*command, "--seconds", "3", "--no-ping"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    try:
        output, errors = process.communicate(timeout=250)
    finally:
        process.terminate()
        process.wait(30)
    assert output, errors[-2000:]
    cases = json.loads(output)["cases"]
    assert len(cases) == 3
    for case in cases:
        assert all(percent <= 105 for percent in case["most_percent"].values()), case
        assert all(percent >= 50 for percent in case["least_percent"].values()), case
        assert case["start_burst_bytes_per_neighbour"] <= 1 << 20, case
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(line.startswith(f"swarm-peer-bed-{process.pid}-") for line in namespaces.splitlines())
