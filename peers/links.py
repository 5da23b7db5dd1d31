"""The links of a peer: dialled, accepted, watched, reported lost.

Between two peers one side dials: the lower stage, within a stage the smaller id. A broken link is first
tried again at once: a live neighbour is back within a round trip and nothing was lost but frames in
transit, which their senders repeat; a dead one refuses the dial, and only then is it reported lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError

from dht.dial import DialError, connect_peer
from peers.frames import Frame, FrameError, Kind, need, need_count
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.link import Hello, Link, OnFrame, Stream, read_frame, write_frame
from peers.traffic import Traffic

logger = logging.getLogger("swarm_peer.links")
HANDLER = "swarm-peer/link"
PROBE_INDEX = -1

DIAL_ERRORS = (ControlFailure, P2PDaemonError, OSError, asyncio.IncompleteReadError, FrameError, TimeoutError)


class Liveness(Enum):
    """What a fresh dial says about a peer."""

    ALIVE = "alive"
    GONE = "gone"
    """Its address refuses connections: the process has ended."""
    UNKNOWN = "unknown"


class LinkRefusedError(ConnectionError):
    """The other side answered our HELLO with REFUSED."""


@dataclass(slots=True)
class Neighbour:
    """A peer we want a link with."""

    peer: str
    stage: int
    addresses: tuple[str, ...]
    is_dialler: bool
    link: Link | None = None
    task: asyncio.Task[None] | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Bundle:
    """Streams of a link that is being accepted."""

    hello: Hello
    total: int
    streams: dict[int, Stream] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)


class Links:
    """All links of one peer.

    Callbacks run in the communication loop: on_frame(link, frame); on_up(link); on_lost(peer, reason), once
    per loss, after which the peer is wanted again only by `want`.
    """

    def __init__(
        self,
        p2p: P2P,
        hello: Hello,
        traffic: Traffic,
        *,
        on_frame: OnFrame,
        on_up: Callable[[Link], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._p2p = p2p
        self.hello = hello
        self._traffic = traffic
        self._on_frame, self._on_up, self._on_lost = on_frame, on_up, on_lost
        self.me = p2p.peer_id.to_base58()
        self.neighbours: dict[str, Neighbour] = {}
        self._bundles: dict[tuple[str, str], _Bundle] = {}
        self._banned: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.payload_limit = LIMITS.payload_bytes

    async def start(self) -> None:
        """Accept streams from now on."""
        await self._p2p.add_binary_stream_handler(HANDLER, self._accept)

    def want(self, peer: str, stage: int, addresses: Sequence[str]) -> None:
        """Ask for a link with this peer and keep it up until it is lost or dropped."""
        neighbour = self.neighbours.get(peer)
        if peer == self.me or self._closing or self._is_banned(peer):
            return
        if neighbour is not None and neighbour.task is not None:
            return
        is_dialler = self.hello.stage < stage or (self.hello.stage == stage and self.me < peer)
        if neighbour is None:
            neighbour = self.neighbours[peer] = Neighbour(peer, stage, tuple(addresses), is_dialler)
        neighbour.addresses = tuple(addresses)
        if is_dialler:
            neighbour.task = asyncio.create_task(self._keep(neighbour))

    def get(self, peer: str) -> Link | None:
        """The open link with a peer, if there is one."""
        neighbour = self.neighbours.get(peer)
        return neighbour.link if neighbour is not None and neighbour.link and neighbour.link.is_open else None

    def open_links(self, stage: int | None = None) -> list[Link]:
        """Open links, of one neighbour stage or of all."""
        found = (self.get(peer) for peer in list(self.neighbours))
        return [link for link in found if link is not None and (stage is None or link.hello.stage == stage)]

    def gossip(self, kind: Kind, header: dict[str, Any]) -> None:
        """Post a control frame to every open link."""
        for link in self.open_links():
            link.post(kind, header)

    async def close(self) -> None:
        """Say BYE, close every link and end every task."""
        self._closing = True
        self.gossip(Kind.BYE, {})
        await asyncio.sleep(0.1)  # BYE is one small control frame: the writers only need a turn
        tasks = [n.task for n in self.neighbours.values() if n.task is not None] + list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self.open_links():
            link.close("closing")
        for bundle in self._bundles.values():
            for stream in bundle.streams.values():
                stream.writer.close()

    async def probe(self, peer: str) -> Liveness:
        """Dial a peer afresh and wait for its HELLO: tells a dead process from a broken link."""
        try:
            async with asyncio.timeout(LIMITS.dial_s):
                stream, _ = await self._open(peer, "probe", PROBE_INDEX, 0)
                stream.writer.close()
                return Liveness.ALIVE
        except LinkRefusedError:
            return Liveness.ALIVE
        except DIAL_ERRORS as error:
            return Liveness.GONE if is_refusal(error) else Liveness.UNKNOWN

    # -- keeping a link up ---------------------------------------------------------------------------

    async def _keep(self, neighbour: Neighbour) -> None:
        """Bring the link up, run it, bring it up again, until the peer counts as lost."""
        try:
            reason = await self._bring_up(neighbour, LIMITS.reconnect_s)
            while reason is None and neighbour.link is not None:
                link = neighbour.link
                await link.run()
                why = link.closed.result()
                if link.has_offended:
                    self._banned[neighbour.peer] = time.monotonic() + LIMITS.offence_backoff_s
                if why == "left" or link.has_offended:
                    reason = why
                    break
                logger.info("link to %s (stage %d) broke: %s", short(neighbour.peer), neighbour.stage, why)
                again = await self._bring_up(neighbour, LIMITS.reconnect_s)
                reason = None if again is None else f"{why}; {again}"
            neighbour.task = None
            if not self._closing:
                self._on_lost(neighbour.peer, reason or "closed")
        except asyncio.CancelledError:
            if neighbour.link is not None:
                neighbour.link.close("cancelled")
            raise
        except Exception:
            logger.exception("keeping the link to %s failed", short(neighbour.peer))
            neighbour.task = None
            if neighbour.link is not None:
                neighbour.link.close("fault")
            self._on_lost(neighbour.peer, "fault")

    async def _bring_up(self, neighbour: Neighbour, patience_s: float) -> str | None:
        """Wait for an open link, dialling if that is our part. None when up, else why not."""
        deadline = time.monotonic() + patience_s
        pause, refusals, why = LIMITS.redial_first_s, 0, "no answer"
        while True:
            if neighbour.link is not None and neighbour.link.is_open:
                return None
            try:
                if neighbour.is_dialler:
                    async with asyncio.timeout(LIMITS.dial_s):
                        await self._dial(neighbour)
                    return None
                liveness = await self.probe(neighbour.peer)
                why = "it does not come back" if liveness is Liveness.ALIVE else liveness.value
                refusals += liveness is Liveness.GONE
            except DIAL_ERRORS as error:
                why = str(error).strip()[:160] or type(error).__name__
                refusals += is_refusal(error)
            if refusals >= 2 or time.monotonic() > deadline:
                return why
            neighbour.wanted.clear()
            try:
                async with asyncio.timeout(pause):
                    await neighbour.wanted.wait()
            except TimeoutError:
                pause = min(2 * pause, 1.0)

    async def _dial(self, neighbour: Neighbour) -> None:
        name = secrets.token_hex(8)
        total = 1 + LIMITS.bulk_streams
        streams: list[Stream] = []
        try:
            for index in range(total):
                stream, hello = await self._open(neighbour.peer, name, index, total)
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.writer.close()
            raise
        self._install(neighbour.peer, hello, streams)

    async def _open(self, peer: str, name: str, index: int, total: int) -> tuple[Stream, Hello]:
        neighbour = self.neighbours.get(peer)
        await connect_peer(self._p2p, peer, neighbour.addresses if neighbour else (), LIMITS.dial_s)
        _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(peer), HANDLER)
        try:
            header = self.hello.header(link=name, index=index, total=total)
            await write_frame(writer, Frame(Kind.HELLO, header))
            frame, _ = await read_frame(reader, 0)
            if frame.kind is Kind.REFUSED:
                raise LinkRefusedError(str(frame.header.get("reason", ""))[:200])
            return Stream(reader, writer), parse_hello(frame)
        except BaseException:
            writer.close()
            raise

    def _install(self, peer: str, hello: Hello, streams: list[Stream]) -> None:
        """Make the bundle the peer's link; an older one is closed (the newest bundle wins)."""
        neighbour = self.neighbours.get(peer)
        if neighbour is None:
            neighbour = self.neighbours[peer] = Neighbour(peer, hello.stage, (), is_dialler=False)
        old = neighbour.link
        if old is not None and old.is_open and neighbour.stage != hello.stage:
            for stream in streams:
                stream.writer.close()
            return
        link = Link(peer, hello, streams, self._frame, self._traffic)
        link.payload_limit = self.payload_limit
        neighbour.link = link
        neighbour.stage = hello.stage
        if old is not None:
            old.close("replaced")
        neighbour.wanted.set()
        if neighbour.task is None:
            neighbour.task = asyncio.create_task(self._keep(neighbour))
        logger.info("link to %s (stage %d) is up", short(peer), hello.stage)
        self._on_up(link)

    def _frame(self, link: Link, frame: Frame) -> Any:
        if frame.kind is Kind.BYE:
            link.close("left")
            return None
        return self._on_frame(link, frame)

    # -- accepting -----------------------------------------------------------------------------------

    async def _accept(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: str = info.peer_id.to_base58()
        try:
            async with asyncio.timeout(LIMITS.hello_s):
                frame, _ = await read_frame(reader, 0)
                hello = parse_hello(frame)
                index, total = need(frame.header, "index", int), need_count(frame.header, "total", 16)
                name = need(frame.header, "link", str)[:32]
                if refusal := self._refusal(peer, hello, index):
                    self._traffic.refuse("hello")
                    await write_frame(writer, Frame(Kind.REFUSED, {"reason": refusal}))
                    writer.close()
                    return
                await write_frame(writer, Frame(Kind.HELLO, self.hello.header()))
        except FrameError as error:
            self._traffic.refuse(error.reason)
            logger.warning("refused a stream of %s: %s", short(peer), error)
            writer.close()
            return
        except (TimeoutError, OSError, asyncio.IncompleteReadError, RuntimeError):
            writer.close()
            return
        if index == PROBE_INDEX:
            writer.close()
            return
        self._expire_bundles()
        bundle = self._bundles.setdefault((peer, name), _Bundle(hello, total))
        if not 0 <= index < bundle.total or index in bundle.streams or bundle.total < 2:
            self._traffic.refuse("header")
            writer.close()
            return
        bundle.streams[index] = Stream(reader, writer)
        if len(bundle.streams) == bundle.total:
            del self._bundles[peer, name]
            self._install(peer, bundle.hello, [bundle.streams[i] for i in range(bundle.total)])

    def _refusal(self, peer: str, hello: Hello, index: int) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol {hello.protocol} where {PROTOCOL_VERSION} is spoken: install a matching version"
        if hello.run != self.hello.run:
            return f"run {hello.run[:16]} where this peer trains {self.hello.run[:16]}"
        if index == PROBE_INDEX:
            return None
        if self._is_banned(peer):
            return "it sent frames the protocol does not allow, and is avoided for a while"
        if self._closing:
            return "leaving"
        half_open = sum(1 for owner, _ in self._bundles if owner == peer)
        if len(self.open_links()) >= LIMITS.links or half_open > LIMITS.links_per_peer_bundles:
            return "too many links"
        return None

    def _is_banned(self, peer: str) -> bool:
        until = self._banned.get(peer)
        if until is not None and time.monotonic() > until:
            del self._banned[peer]
            return False
        return until is not None

    def _expire_bundles(self) -> None:
        now = time.monotonic()
        for key, bundle in list(self._bundles.items()):
            if now - bundle.since > LIMITS.dial_s:
                del self._bundles[key]
                for stream in bundle.streams.values():
                    stream.writer.close()


def parse_hello(frame: Frame) -> Hello:
    """The HELLO in a frame. Raises FrameError."""
    if frame.kind is not Kind.HELLO:
        raise FrameError("hello", f"a stream begins with HELLO, got {frame.kind}")
    return Hello(
        run=need(frame.header, "run", str)[:128],
        stage=need(frame.header, "stage", int),
        incarnation=need(frame.header, "incarnation", int),
        protocol=need(frame.header, "protocol", int),
    )


def is_refusal(error: BaseException) -> bool:
    """Whether a dial failed because nobody listens at the address any more.

    libp2p backs off for a few seconds after a failed dial and then reports the back-off instead of the cause.
    """
    if isinstance(error, DialError):
        return error.cause in ("refused", "backoff")
    text = str(error).lower()
    return "refused" in text or "backoff" in text


def short(peer: str) -> str:
    """The distinctive end of a peer id, for people."""
    return peer[-6:]
