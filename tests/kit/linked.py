"""Two linked peers and a stranger over real p2pd, for tests of the links."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hivemind.p2p import P2P, PeerID

from dht.dial import connect_peer
from dht.host import start_host, stop_host, visible_addresses
from peers.frames import Frame, FrameError, Kind
from peers.link import Hello, Link, Stream, read_frame, write_frame
from peers.links import HANDLER, Links
from peers.traffic import Traffic
from tests.kit.processes import loop_that_leaves_nothing

RUN = "a" * 40


async def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is watched knows no events
            await asyncio.sleep(0.01)


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


def linked_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with loop_that_leaves_nothing(tmp_path_factory) as runner:
        world = World(runner)
        yield world
        runner.run(world.close())
