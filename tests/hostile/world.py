"""A real swarm in this process: sessions of real peers in one loop, each with its own p2pd, under attack.

In one process, so that the tests see what a peer counts, and may lift the limit of offences where thousands of
frames are to arrive.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from hivemind.p2p import P2P, PeerID

from dht.dial import connect_peer
from dht.host import start_host, stop_host
from peers.config import ComputeMode, PeerConfig
from peers.engine import Engine, JobPriority
from peers.frames import Frame, FrameError, Kind
from peers.gate import OPEN_KINDS
from peers.link import Hello, Link, Stream, read_frame, write_frame
from peers.links import HANDLER
from peers.session import Session
from tests.kit.processes import own_children
from tests.kit.tiny import make_run

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
NAMES = ("0", "1a", "1b", "2")
KEPT = 8
"""Frames of each kind that are remembered for mutation."""


@dataclass
class Notes:
    """A reporter that keeps what it is told."""

    notes: list[str] = field(default_factory=list)
    addresses: tuple[str, ...] = ()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ready(self, addresses: Sequence[str], stages: int) -> None:
        self.addresses = tuple(addresses)

    def status(self, status: Mapping[str, Any]) -> None: ...

    def summary(self, summary: Mapping[str, Any]) -> None: ...


class Peer:
    """One session with its compute thread."""

    def __init__(self, config: PeerConfig) -> None:
        self.config, self.notes, self.engine = config, Notes(), Engine()
        self.session = Session(config, self.engine, self.notes)
        self.task = asyncio.create_task(self.session.run())
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()
        self.heard: defaultdict[Kind, list[Frame]] = defaultdict(list)
        self.to_refuse: Counter[str] = Counter()
        """Frames by sender that were malformed, or no business of a stranger."""
        self.neighbours: set[str] = set()
        """Ids of the swarm's own peers."""

    @property
    def id(self) -> str:
        links = self.session._status.links
        assert links is not None
        return links.me

    @property
    def target(self) -> Target:
        return Target(self.id, self.notes.addresses, self.trainer.manifest.run_id)

    @property
    def trainer(self) -> Any:
        return self.session._status.trainer

    @property
    def step(self) -> int:
        return int(self.trainer.version) if self.trainer else 0

    @property
    def refused(self) -> Counter[str]:
        return Counter(self.session._traffic.refused)

    def record(self) -> None:
        """Remember what neighbours say, as material to mutate, and count what is refused."""
        deliver = self.trainer.on_frame

        def on_frame(link: Link, frame: Frame) -> Any:
            heard = self.heard[frame.kind] if link.peer in self.neighbours else []
            heard.append(Frame(frame.kind, dict(frame.header), (memoryview(bytearray(frame.data())),)))
            del heard[:-KEPT]
            is_strange = link.peer not in self.neighbours and frame.kind not in OPEN_KINDS
            self.to_refuse[link.peer] += is_strange
            try:
                return deliver(link, frame)
            except FrameError:
                self.to_refuse[link.peer] += not is_strange
                raise

        self.trainer.on_frame = on_frame

    async def is_alive(self, deadline_s: float = 20.0) -> bool:
        """Whether its session runs and its compute thread works."""
        if self.task.done():
            return False
        async with asyncio.timeout(deadline_s):
            return await self.engine.submit(JobPriority.ROUND, lambda: True)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.engine.stop()
        await asyncio.to_thread(self.thread.join, 10)


class World:
    """A seed, and a peer of every stage (two of stage 1), training slowly."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """options: of the run, see `tests.kit.tiny.make_run`."""
        self.folder = folder
        self.loop: asyncio.AbstractEventLoop
        self.seed: Peer
        self.peers: dict[str, Peer] = {}
        self._hostiles: list[P2P] = []
        self._microseconds_per_token = 0.0
        self._options = {"replicas": 1, "steps": 100_000, **options}

    def run(self, coroutine: Coroutine[Any, Any, Any], deadline_s: float = 60.0) -> Any:
        """Run a test's scenario in the swarm's loop, which goes on by itself between two of them."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, deadline_s), self.loop).result()

    async def start(
        self,
        names: Sequence[str] = NAMES,
        *,
        microseconds_per_token: float = 100.0,
        is_recording: bool = True,
    ) -> None:
        """Start seed and peers; the first character of a name is its stage."""
        stages = 1 + max(int(name[0]) for name in names)
        make_run(self.folder, {"stages": stages, **self._options})
        self._microseconds_per_token = microseconds_per_token
        self.seed = Peer(
            PeerConfig(
                stage=None, run_dir=self.folder / "run", listen=LOOPBACK, identity=self.folder / "seed.key"
            )
        )
        await until(lambda: self.seed.notes.addresses or self.seed.task.done(), 30)
        for name in names:
            self.peers[name] = Peer(self._config(name))
            await until(lambda n=name: self.peers[n].trainer or self.peers[n].task.done(), 30)
            if is_recording:
                self.peers[name].record()
        for peer in self.peers.values():
            peer.neighbours = {other.id for other in self.peers.values()}

    def _config(self, name: str) -> PeerConfig:
        return PeerConfig(
            stage=int(name[0]),
            initial_peers=(self.seed.notes.addresses[0],),
            data_dir=self.folder / name,
            listen=LOOPBACK,
            identity=self.folder / f"{name}.key",
            threads=1,
            compute=ComputeMode(self._microseconds_per_token),
            serve_after_s=1.0,
        )

    async def training(self, steps: int = 2) -> None:
        """Wait until every peer has moved on by some steps."""
        before = {name: peer.step for name, peer in self.peers.items()}
        await until(lambda: all(peer.step >= before[name] + steps for name, peer in self.peers.items()), 40)

    async def hostile(self) -> P2P:
        """A p2pd of somebody who has no part in the run."""
        p2p = await start_host(None)
        self._hostiles.append(p2p)
        return p2p

    async def close(self) -> None:
        for peer in (*self.peers.values(), self.seed):
            await peer.close()
        for p2p in self._hostiles:
            await stop_host(p2p)


@dataclass(frozen=True)
class Target:
    """A peer as anybody can find it. run: id of the run it trains."""

    peer: str
    addresses: tuple[str, ...]
    run: str


class Attacker:
    """Raw streams to one victim, from a p2pd that has no part in the run."""

    def __init__(self, p2p: P2P, target: Target, stage: int) -> None:
        self.p2p, self.target = p2p, target
        self.streams: list[Stream] = []
        self.hello = Hello(target.run, stage, secrets.randbits(40))

    @property
    def id(self) -> str:
        return str(self.p2p.peer_id.to_base58())

    async def open(self, handler: str = HANDLER) -> Stream:
        """A stream to the victim on which nothing has been said."""
        await connect_peer(self.p2p, self.target.peer, self.target.addresses, 5)
        _, reader, writer = await self.p2p.call_binary_stream_handler(
            PeerID.from_base58(self.target.peer), handler
        )
        return Stream(reader, writer)

    async def greet(self, stream: Stream, **changes: Any) -> Frame:
        """Say HELLO; returns the answer."""
        header = self.hello.header(link="x", index=0, total=3)
        await write_frame(stream.writer, Frame(Kind.HELLO, {**header, **changes}))
        async with asyncio.timeout(10):
            return (await read_frame(stream.reader, 0))[0]

    async def link(self) -> None:
        """A whole link, as a neighbour would make it. Raises ConnectionRefusedError with the victim's words."""
        for _ in range(3):  # on a busy machine the streams of a link may not come up in time
            self.close()
            name = secrets.token_hex(4)
            for index in range(3):
                stream = await self.open()
                answer = await self.greet(stream, link=name, index=index)
                if answer.kind is not Kind.HELLO:
                    stream.writer.close()
                    raise ConnectionRefusedError(answer.header.get("reason"))
                self.streams.append(stream)
            if await self.ping():
                return
        raise ConnectionRefusedError("the link was closed at once")

    async def ping(self, deadline_s: float = 10.0) -> bool:
        """Whether the victim answers a heartbeat on the control stream; False if it closed the link."""
        sent = time.monotonic()
        try:
            await write_frame(self.streams[0].writer, Frame(Kind.HEARTBEAT, {"sent": sent}))
            async with asyncio.timeout(deadline_s):
                while True:
                    frame, _ = await read_frame(self.streams[0].reader, 2**20)
                    if frame.kind is Kind.HEARTBEAT and frame.header.get("echo") == sent:
                        return True
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            return False

    def close(self) -> None:
        for stream in self.streams:
            stream.writer.close()
        self.streams = []


async def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is watched knows no events
            await asyncio.sleep(0.01)


def rss() -> int:
    """Bytes of this process in RAM."""
    return int(psutil.Process().memory_info().rss)


@contextmanager
def running_world(
    tmp_path_factory: pytest.TempPathFactory, run: dict[str, Any] | None = None, **options: Any
) -> Iterator[World]:
    """A world that trains; every process of it is gone afterwards."""
    run_folder = tmp_path_factory.mktemp("world")
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory(prefix="sp-") as directory:  # short: it will hold sockets
        patch.setattr("tempfile.tempdir", directory)
        world = World(run_folder, **(run or {}))
        world.loop = uvloop.new_event_loop()
        thread = threading.Thread(target=world.loop.run_forever)
        thread.start()
        try:
            world.run(world.start(**options), 120)
            yield world
        finally:
            world.run(world.close())
            world.loop.call_soon_threadsafe(world.loop.stop)
            thread.join()
            world.loop.close()
            patch.undo()
    children = own_children()
    assert [child for child in children if child.status() != psutil.STATUS_ZOMBIE] == []
