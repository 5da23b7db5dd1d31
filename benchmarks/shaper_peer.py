"""The peers of `benchmarks/shaper.py` on one host: real p2pd and real links, driven by JSON lines on stdin.

    {"do": "open", "count": n, "address": a, "stage": s, "up": mbps, "down": mbps}   peers with these caps
    {"do": "meet", "peers": [[id, stage, [addresses]], ...]}    wait until every peer here has a link to each of them
    {"do": "flood", "kind": k, "frame_bytes": n}                keep every link's bulk streams busy from now on
    {"do": "ping", "seconds": s}                                control round trips in ms, ten a second
    {"do": "figures"}                                           bytes, waits, received frames by neighbour
    {"do": "close"}                                             end links and floods; daemons are kept

Each command is answered by one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop
from hivemind.p2p import P2P

from dht.host import start_host, stop_host, visible_addresses
from peers.frames import Frame, Kind
from peers.heap import settle
from peers.link import Hello, Link
from peers.links import HANDLER, Links
from peers.traffic import Traffic

FRAMES_WAITING = 3
"""Frames of a flood that each link has under way: its two bulk streams and one more are never idle."""


class Peer:
    """One peer: links that answer pings and swallow everything else."""

    def __init__(self, p2p: P2P, stage: int, up: float | None, down: float | None) -> None:
        self.p2p = p2p
        self.traffic = Traffic(up, down)
        self.received: dict[str, int] = {}
        self.pongs: dict[int, float] = {}
        self.links = Links(
            p2p,
            Hello("a" * 40, stage, 1),
            self.traffic,
            on_frame=self._on_frame,
            on_up=lambda _: None,
            on_lost=self._on_lost,
        )
        self.floods: list[asyncio.Task[None]] = []

    def _on_frame(self, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.QUERY:
            link.post(Kind.ANSWER, frame.header)
        elif frame.kind is Kind.ANSWER:
            self.pongs[frame.header["number"]] = time.monotonic()
        else:
            self.received[link.peer] = self.received.get(link.peer, 0) + 1

    def _on_lost(self, peer: str, reason: str) -> None:
        if reason != "left":
            print(f"lost {peer}: {reason}", file=sys.stderr)

    async def flood(self, link: Link, kind: Kind, frame_bytes: int) -> None:
        """Send frames over a link for ever."""
        payload = [memoryview(bytes(frame_bytes))]
        while True:
            await link.send(kind, {}, payload)

    async def ping(self, link: Link, seconds: float) -> list[float]:
        """Round trips of small control frames, in ms; one that is not answered counts as the time since."""
        sent: dict[int, float] = {}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            number = len(sent)
            sent[number] = time.monotonic()
            link.post(Kind.QUERY, {"number": number})
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        now = time.monotonic()
        return [1e3 * (self.pongs.get(number, now) - began) for number, began in sent.items()]

    async def close(self) -> None:
        """End the floods and the links; the daemon is kept."""
        for task in self.floods:
            task.cancel()
        await asyncio.gather(*self.floods, return_exceptions=True)
        await self.links.close()
        await self.p2p.remove_binary_stream_handler(HANDLER)


class Worker:
    """The peers here, and what may be asked of them."""

    def __init__(self) -> None:
        self.hosts: list[P2P] = []
        self.peers: list[Peer] = []

    async def open(self, count: int, address: str, stage: int, up: Any, down: Any) -> Any:
        """Peers with these caps; returns their id, stage and addresses."""
        while len(self.hosts) < count:
            self.hosts.append(await start_host(None, [f"/ip4/{address}/tcp/0"]))
        self.peers = [Peer(p2p, stage, up, down) for p2p in self.hosts[:count]]
        for peer in self.peers:
            await peer.links.start()
        return [[p.links.me, stage, list(await visible_addresses(p.p2p))] for p in self.peers]

    async def meet(self, peers: list[Any]) -> Any:
        """Links with all of these."""
        async with asyncio.timeout(60):
            for mine in self.peers:
                for peer, stage, addresses in peers:
                    mine.links.want(peer, stage, addresses)
                while len(mine.links.open_links()) < len(peers):  # noqa: ASYNC110 - links know no events
                    await asyncio.sleep(0.02)
        return True

    async def flood(self, kind: str, frame_bytes: int) -> Any:
        """Keep every link busy."""
        for peer in self.peers:
            for link in peer.links.open_links():
                for _ in range(FRAMES_WAITING):
                    peer.floods.append(asyncio.create_task(peer.flood(link, Kind(kind), frame_bytes)))
        return True

    async def ping(self, seconds: float) -> Any:
        """Round trips over the first link of the first peer."""
        peer = self.peers[0]
        return await peer.ping(peer.links.open_links()[0], seconds)

    async def figures(self) -> Any:
        """What the peers counted."""
        return [
            {
                "up_bytes": peer.traffic.total("up"),
                "down_bytes": peer.traffic.total("down"),
                "up_waited_s": peer.traffic.upload.waited_s,
                "received": peer.received,
            }
            for peer in self.peers
        ]

    async def close(self) -> Any:
        """End links and floods."""
        for peer in self.peers:
            await peer.close()
        self.peers = []
        return True


async def main() -> None:
    """Serve commands until stdin closes."""
    worker = Worker()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    settle()
    print(json.dumps("ready"), flush=True)
    try:
        while line := await reader.readline():
            command = json.loads(line)
            answer = await getattr(worker, command.pop("do"))(**command)
            print(json.dumps(answer), flush=True)
    finally:
        for p2p in worker.hosts:
            await stop_host(p2p)


if __name__ == "__main__":
    uvloop.run(main())
