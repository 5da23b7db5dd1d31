"""The links of a peer: dialled, accepted, watched, reported lost.

Between two peers one side dials: the lower stage, within a stage the smaller id. A broken link is first
tried again at once: a live neighbour is back within a round trip and nothing was lost but frames in
transit, which their senders repeat; a dead one refuses the dial, and only then is it reported lost. One that
is silent is lost at once, and one that has started anew is lost first, then up. While the own libp2p daemon is
down nobody is lost for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hivemind.p2p import P2P

from peers.frames import Frame, FrameError, Kind, need, need_count
from peers.handshake import (
    DIAL_ERRORS,
    HANDLER,
    PROBE_INDEX,
    SUPERSEDED,
    LinkRefusedError,
    is_own_fault,
    is_refusal,
    open_stream,
    parse_hello,
)
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.link import Hello, Link, OnFrame, Stream, read_frame, write_frame
from peers.neighbour import Liveness, Neighbour
from peers.offences import Offences
from peers.traffic import Traffic

__all__ = ["HANDLER", "PROBE_INDEX", "Links", "Liveness", "Neighbour", "short"]

logger = logging.getLogger("swarm_peer.links")
LEFT, ANEW = "left", "started anew"


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
    per loss, after which the peer is wanted again only by `want`, or because it calls itself. Two `on_up` of a
    peer without a loss between them are the same start of it.
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
        self.hello = replace(hello, window=traffic.download.window_bytes)
        self._traffic = traffic
        self._on_frame, self._on_up, self._on_lost = on_frame, on_up, on_lost
        self.me = p2p.peer_id.to_base58()
        self.neighbours: dict[str, Neighbour] = {}
        self._bundles: dict[tuple[str, str], _Bundle] = {}
        self._banned: dict[str, float] = {}
        self._offences = Offences()
        self._greeting: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.payload_limit = LIMITS.payload_bytes

    async def start(self) -> None:
        """Accept streams from now on."""
        await self._p2p.add_binary_stream_handler(HANDLER, self._accept)

    def want(self, peer: str, stage: int, addresses: Sequence[str], incarnation: int = 0) -> None:
        """Ask for a link with this peer and keep it up until it is lost or dropped. Repeat it as you like.

        incarnation: that of its record, 0 if unknown. A later one than the link's means that the process at the
        link's other end is dead or superseded: the link is closed. An earlier one is ignored. A peer that could
        not be reached lately is not dialled (see `Breaker`).
        """
        if peer == self.me or self._closing or self._is_banned(peer):
            return
        neighbour = self._neighbour(peer, stage)
        if incarnation:
            if neighbour.is_superseded(incarnation):
                return
            link = neighbour.link
            if link is not None and link.is_open and link.hello.incarnation < incarnation:
                link.close(ANEW)
            neighbour.hear(incarnation)
        if not neighbour.has_link and neighbour.stage != stage:
            neighbour.stage, neighbour.is_dialler = stage, self._dials(peer, stage)
        neighbour.addresses = tuple(addresses)
        if neighbour.task is None and neighbour.is_dialler and time.monotonic() >= neighbour.breaker.until:
            neighbour.task = asyncio.create_task(self._keep(neighbour))

    def get(self, peer: str) -> Link | None:
        """The open link with a peer, if there is one."""
        neighbour = self.neighbours.get(peer)
        return neighbour.link if neighbour is not None and neighbour.link and neighbour.link.is_open else None

    def open_links(self, stage: int | None = None) -> list[Link]:
        """Open links, of one neighbour stage or of all."""
        found = (self.get(peer) for peer in list(self.neighbours))
        return [link for link in found if link is not None and (stage is None or link.hello.stage == stage)]

    def expects(self, stage: int) -> bool:
        """Whether somebody of a neighbour stage, heard of lately, has no link with this peer yet."""
        now = time.monotonic()
        return any(n.stage == stage and n.is_expected(now) for n in self.neighbours.values())

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
            await self._probe(peer)
            return Liveness.ALIVE
        except DIAL_ERRORS as error:
            return Liveness.GONE if is_refusal(error) else Liveness.UNKNOWN
        except ValueError:  # a name that others gave, and no peer id at all
            return Liveness.UNKNOWN

    async def _probe(self, peer: str) -> None:
        """Raises one of DIAL_ERRORS unless the peer answers."""
        with suppress(LinkRefusedError):  # an answer, too
            async with asyncio.timeout(LIMITS.dial_s):
                stream, _ = await self._open(peer, "probe", PROBE_INDEX, 0)
                stream.writer.close()

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
                    self._ban(neighbour.peer)
                if neighbour.has_link:
                    continue  # replaced by a newer link
                # A silent neighbour is frozen or unplugged: its work must not wait for a dial to time out too.
                if why in (LEFT, ANEW) or link.has_offended or why.startswith("silent"):
                    reason = why
                    break
                logger.info("link to %s (stage %d) broke: %s", short(neighbour.peer), neighbour.stage, why)
                again = await self._bring_up(neighbour, LIMITS.reconnect_s)
                reason = None if again is None else f"{why}; {again}"
            neighbour.task = None
            self._lose(neighbour, reason or "closed")
        except asyncio.CancelledError:
            if neighbour.link is not None:
                neighbour.link.close("cancelled")
            raise
        except Exception:
            logger.exception("keeping the link to %s failed", short(neighbour.peer))
            neighbour.task = None
            if neighbour.link is not None:
                neighbour.link.close("fault")
            self._lose(neighbour, "fault")

    def _lose(self, neighbour: Neighbour, reason: str) -> None:
        """The peer counts as lost from now on."""
        was_up, neighbour.up_incarnation = neighbour.up_incarnation is not None, None
        if neighbour.breaker.failures == 0 or was_up:
            logger.info("%s (stage %d) is lost: %s", short(neighbour.peer), neighbour.stage, reason)
        if reason != ANEW:
            neighbour.breaker.failed(time.monotonic())
        if not self._closing:
            self._on_lost(neighbour.peer, reason)

    async def _bring_up(self, neighbour: Neighbour, patience_s: float) -> str | None:
        """Wait for an open link, dialling if that is our part. None when up, else why not."""
        began = time.monotonic()
        deadline = began + patience_s
        pause, refusals, why = LIMITS.redial_first_s, 0, "no answer"
        while True:
            if neighbour.has_link:
                return None
            try:
                if neighbour.is_dialler:
                    async with asyncio.timeout(LIMITS.dial_s):
                        await self._dial(neighbour)
                    if neighbour.has_link:
                        return None
                    why = "its answer does not fit"
                else:
                    # It dials, we only ask: that also tells it that we are there, should it believe us lost.
                    await self._probe(neighbour.peer)
                    why = "it does not come back"
                refusals = 0
            except LinkRefusedError as error:
                why = str(error)
                if why == SUPERSEDED:
                    return why
            except DIAL_ERRORS as error:
                why = str(error).strip()[:160] or type(error).__name__
                if is_refusal(error):
                    why, refusals = "its addresses refuse connections", refusals + 1
                if is_own_fault(error):
                    deadline = min(began + LIMITS.host_down_s, time.monotonic()) + patience_s
            if neighbour.has_link:
                continue  # it came while we were asking
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
        addresses = neighbour.addresses if neighbour is not None else ()
        stream, hello = await open_stream(self._p2p, peer, addresses, self.hello, (name, index, total))
        if neighbour is not None and neighbour.is_superseded(hello.incarnation):
            stream.writer.close()
            raise ConnectionError("an earlier start of it answered")
        return stream, hello

    def _install(self, peer: str, hello: Hello, streams: list[Stream]) -> None:
        """Make the bundle the peer's link; an older one is closed (the newest bundle wins)."""
        neighbour = self._neighbour(peer, hello.stage)
        old = neighbour.link
        is_anew = neighbour.up_incarnation not in (None, hello.incarnation)
        is_other_stage = neighbour.has_link and neighbour.stage != hello.stage and not is_anew
        if neighbour.is_superseded(hello.incarnation) or is_other_stage or self._closing:
            for stream in streams:
                stream.writer.close()
            return
        if is_anew:  # what it held died with its earlier start
            self._lose(neighbour, ANEW)
        link = Link(peer, hello, streams, self._frame, self._traffic)
        link.payload_limit, link.offences = self.payload_limit, self._offences
        neighbour.link = link
        neighbour.stage, neighbour.is_dialler = hello.stage, self._dials(peer, hello.stage)
        neighbour.hear(hello.incarnation)
        neighbour.up_incarnation, neighbour.has_met = hello.incarnation, True
        neighbour.breaker.reset()
        if old is not None:
            old.close("replaced")
        neighbour.wanted.set()
        if neighbour.task is None:
            neighbour.task = asyncio.create_task(self._keep(neighbour))
        logger.info("link to %s (stage %d) is up", short(peer), hello.stage)
        self._on_up(link)

    def _dials(self, peer: str, stage: int) -> bool:
        """Whether it is we who dial this peer."""
        return self.hello.stage < stage or (self.hello.stage == stage and self.me < peer)

    def _neighbour(self, peer: str, stage: int) -> Neighbour:
        """What is known of a peer; of too many those with which nothing goes on are forgotten."""
        known = self.neighbours.get(peer)
        if known is None:
            known = self.neighbours[peer] = Neighbour(peer, stage, (), self._dials(peer, stage))
            if len(self.neighbours) > 4 * LIMITS.links:
                for other in [n for n in self.neighbours.values() if n.is_idle and n is not known]:
                    del self.neighbours[other.peer]
        return known

    def _called_by(self, peer: str, hello: Hello) -> None:
        """A peer asks whether we live: so does it. If it counts as lost and we are to dial, we do."""
        neighbour = self.neighbours.get(peer)
        if neighbour is None or neighbour.stage != hello.stage or self._is_banned(peer) or self._closing:
            return
        neighbour.wanted.set()
        if neighbour.task is None and neighbour.is_dialler and neighbour.addresses:
            neighbour.task = asyncio.create_task(self._keep(neighbour))

    def _frame(self, link: Link, frame: Frame) -> Any:
        if frame.kind is Kind.BYE:
            link.close(LEFT)
            return None
        return self._on_frame(link, frame)

    # -- accepting -----------------------------------------------------------------------------------

    async def _accept(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: str = info.peer_id.to_base58()
        if self._greeting[peer] >= LIMITS.greeting_streams_per_peer or self._greeting.total() >= LIMITS.links:
            self._traffic.refuse("hello")
            writer.close()
            return
        self._greeting[peer] += 1
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
            if self._offences.add(peer):
                self._ban(peer)
            writer.close()
            return
        except (TimeoutError, OSError, asyncio.IncompleteReadError, RuntimeError):
            writer.close()
            return
        finally:
            self._greeting[peer] -= 1
            if not self._greeting[peer]:
                del self._greeting[peer]
        if index == PROBE_INDEX:
            writer.close()
            self._called_by(peer, hello)
            return
        self._expire_bundles()
        bundle = self._bundles.setdefault((peer, name), _Bundle(hello, total))
        asyncio.get_running_loop().call_later(2 * LIMITS.dial_s, self._expire_bundles)
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
        if peer in self.neighbours and self.neighbours[peer].is_superseded(hello.incarnation):
            return SUPERSEDED
        if index == PROBE_INDEX:
            return None
        if self._is_banned(peer):
            return "it sent frames the protocol does not allow, and is avoided for a while"
        if self._closing:
            return "leaving"
        half_open = sum(1 for owner, _ in self._bundles if owner == peer)
        held = len(self.open_links()) + len(self._bundles)
        if held >= LIMITS.links or half_open > LIMITS.links_per_peer_bundles:
            return "too many links"
        return None

    def _ban(self, peer: str) -> None:
        """Avoid a peer for a while; of too many the one that was banned first is let off."""
        self._banned.pop(peer, None)
        self._banned[peer] = time.monotonic() + LIMITS.offence_backoff_s
        while len(self._banned) > 8 * LIMITS.links:
            self._banned.pop(next(iter(self._banned)))

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


def short(peer: str) -> str:
    """The distinctive end of a peer id, for people."""
    return peer[-6:]
