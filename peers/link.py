"""One link: the bundle of long-lived raw streams to one neighbour.

A link has one control stream and a few bulk streams, used in both directions. Control frames never wait
behind bulk; bulk frames leave by priority, each whole on one stream, so several interleave. Under a cap every
piece of bulk waits for its turn among all the peer's streams (`peers.shaper`), and goes only as far as the
neighbour's own cap gives credit (`peers.credit`). Whatever breaks any of the streams breaks the link: `closed`
is set with the reason and nothing is ever half alive.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peers.credit import GivenCredit, SendCredit
from peers.frames import BULK_PRIORITY, Frame, FrameError, Kind, need_count
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.offences import Offences
from peers.streams import Stream, Valve, read_frame, write_frame
from peers.traffic import Lane, Traffic

__all__ = ["Hello", "Link", "OnFrame", "Stream", "read_frame", "write_frame"]

logger = logging.getLogger("swarm_peer.link")
OnFrame = Callable[["Link", Frame], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Hello:
    """What the two ends of a stream tell each other first."""

    run: str
    stage: int
    incarnation: int
    protocol: int = PROTOCOL_VERSION
    window: int | None = None
    """Bytes of bulk that may be sent to this end before it gives CREDIT; None: no bound, its line has no cap."""

    def header(self, **more: Any) -> dict[str, Any]:
        """Header of a HELLO frame."""
        return {
            "protocol": self.protocol,
            "run": self.run,
            "stage": self.stage,
            "incarnation": self.incarnation,
            **({} if self.window is None else {"window": self.window}),
            **more,
        }


class _SendValve:
    """What pieces of bulk pass on their way out: the neighbour's credit, then the peer's own line.

    waiting_since: since when the neighbour has taken nothing that was ready for it, None while that is not so.
    """

    def __init__(self, lane: Lane, credit: SendCredit) -> None:
        self._lane, self._credit = lane, credit
        self.waiting_since: float | None = None
        self.is_free = False

    @property
    def piece_bytes(self) -> int:
        """See `peers.streams.Valve`."""
        return min(self._lane.piece_bytes, self._credit.piece_bytes)

    async def passes(self, kind: Kind, nbytes: int) -> None:
        """See `peers.streams.Valve`."""
        if not self._credit.is_unbounded:
            self.waiting_since = time.monotonic()
            await self._credit.wait()
            self._credit.spend(nbytes)
        self.waiting_since = None  # what our own line takes is not the neighbour's doing
        await self._lane.passes(kind, nbytes)
        self.waiting_since = time.monotonic()  # for the transport to take it

    def has_passed(self, kind: Kind) -> None:
        """See `peers.streams.Valve`."""
        self.waiting_since = None
        self._lane.has_passed(kind)

    def promote(self, priority: int) -> None:
        """A frame of this priority waits for a stream."""
        self._lane.promote(priority)


class _ReceiveValve:
    """What pieces of bulk pass on their way in: the peer's own line, which gives the neighbour new credit."""

    def __init__(self, lane: Lane, read_piece_bytes: int, gives: Callable[[int, bool], None]) -> None:
        self._lane, self._gives = lane, gives
        self.piece_bytes = read_piece_bytes
        self.is_free = lane.is_free

    async def passes(self, kind: Kind, nbytes: int) -> None:
        """See `peers.streams.Valve`."""
        has_waited = await self._lane.passes(kind, nbytes)
        self._gives(nbytes, has_waited)

    def has_passed(self, kind: Kind) -> None:
        """See `peers.streams.Valve`."""
        self._lane.has_passed(kind)


class Link:
    """Frames to and from one neighbour. Made by `Links` once all streams of the bundle stand."""

    def __init__(
        self, peer: str, hello: Hello, streams: list[Stream], on_frame: OnFrame, traffic: Traffic
    ) -> None:
        self.peer = peer
        self.hello = hello
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.last_heard = time.monotonic()
        self.rtt_s: float | None = None
        self._streams = streams
        self._on_frame = on_frame
        self._traffic = traffic
        self._control: asyncio.Queue[Frame] = asyncio.Queue()
        self._bulk: asyncio.PriorityQueue[tuple[int, int, Frame, asyncio.Future[None] | None]] = (
            asyncio.PriorityQueue()
        )
        self._order = itertools.count()
        self._credit = SendCredit(hello.window)
        self._given = GivenCredit(traffic.download)
        self._control_out = traffic.lane("up", hello.stage, is_bulk=False)
        self._bulk_out = [
            _SendValve(traffic.lane("up", hello.stage, is_bulk=True), self._credit) for _ in streams[1:]
        ]
        self.offences = Offences()
        self.has_offended = False
        self.payload_limit = LIMITS.payload_bytes

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent."""
        return not self.closed.done()

    def post(
        self, kind: Kind, header: Mapping[str, Any] | None = None, payload: list[memoryview] | None = None
    ) -> None:
        """Queue a frame. On a closed link it is dropped: whoever waits for an answer learns of the loss."""
        if self.is_open:
            self._put(Frame(kind, dict(header or {}), payload or ()), None)

    async def send(self, kind: Kind, header: Mapping[str, Any], payload: list[memoryview]) -> None:
        """Queue a bulk frame and wait until it is written. Raises ConnectionError if the link closes."""
        if not self.is_open:
            raise ConnectionError(f"link to {self.peer} is closed: {self.closed.result()}")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(Frame(kind, dict(header), payload), written)
        waits: list[asyncio.Future[Any]] = [written, self.closed]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not written.done():
            raise ConnectionError(f"link to {self.peer} closed while sending: {self.closed.result()}")

    def close(self, reason: str) -> None:
        """Close all streams; the first reason stands."""
        if not self.closed.done():
            self.closed.set_result(reason)
            for stream in self._streams:
                stream.writer.close()

    async def run(self) -> None:
        """Move frames until the link closes; always returns, with every task it started ended."""
        tasks = [asyncio.create_task(self._write_control()), asyncio.create_task(self._heartbeat())]
        tasks += [
            asyncio.create_task(self._write_bulk(stream, valve))
            for stream, valve in zip(self._streams[1:], self._bulk_out, strict=True)
        ]
        tasks += [
            asyncio.create_task(self._read(stream, number)) for number, stream in enumerate(self._streams)
        ]
        try:
            await asyncio.shield(self.closed)
        finally:
            self.close("cancelled")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # A neighbour that is lost stays known for long: what waited for it must not take memory so long.
            self._control, self._bulk = asyncio.Queue(), asyncio.PriorityQueue()

    def _put(self, frame: Frame, written: asyncio.Future[None] | None) -> None:
        priority = BULK_PRIORITY.get(frame.kind)
        if priority is None:
            if self._control.qsize() > LIMITS.control_frames:
                self.close(f"does not read: {LIMITS.control_frames} control frames wait")
                return
            self._control.put_nowait(frame)
        else:
            self._bulk.put_nowait((priority, next(self._order), frame, written))
            for valve in self._bulk_out:
                valve.promote(priority)

    async def _write_control(self) -> None:
        while True:
            await self._write(self._streams[0], self._control_out, await self._control.get(), None)

    async def _write_bulk(self, stream: Stream, valve: _SendValve) -> None:
        while True:
            _, _, frame, written = await self._bulk.get()
            await self._write(stream, valve, frame, written)

    async def _write(
        self, stream: Stream, valve: Valve, frame: Frame, written: asyncio.Future[None] | None
    ) -> None:
        try:
            await write_frame(stream.writer, frame, valve=valve)
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError on a transport that is closing
            self.close(f"write failed: {error or type(error).__name__}")
            return
        if written is not None and not written.done():
            written.set_result(None)

    async def _read(self, stream: Stream, number: int) -> None:
        lane = self._traffic.lane("down", self.hello.stage, is_bulk=number > 0)
        valve: Valve = _ReceiveValve(lane, self._given.piece_bytes, self._give) if number > 0 else lane
        while self.is_open:
            limit = LIMITS.control_payload_bytes if number == 0 else self.payload_limit
            try:
                frame, _ = await read_frame(stream.reader, limit, valve=valve)
            except (asyncio.IncompleteReadError, OSError) as error:
                self.close(f"disconnected ({type(error).__name__})")
                return
            except FrameError as error:
                # After an oversized or undecodable frame the stream's framing cannot be trusted any more.
                self._traffic.refuse(error.reason)
                self.has_offended = self.offences.add(self.peer, LIMITS.offences)
                self.close(f"sent a malformed frame ({error})")
                return
            self.last_heard = time.monotonic()
            await self._deliver(frame)

    async def _deliver(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.HEARTBEAT:
                self._on_heartbeat(frame)
                return
            if frame.kind is Kind.CREDIT:
                self._credit.add(need_count(frame.header, "bytes", LIMITS.payload_bytes))
                return
            pending = self._on_frame(self, frame)
            if pending is not None:
                await pending
        except FrameError as error:
            self.offend(error)
        except Exception as error:
            # A fault of our own: without this the stream would stand and never be read again.
            logger.exception("a frame %s of %s could not be handled", frame.kind, self.peer)
            self.close(f"fault while handling {frame.kind}: {error!r:.80}")

    def refuse(self, reason: str) -> None:
        """Count a frame that was not taken, without holding it against the peer."""
        self._traffic.refuse(reason)

    def offend(self, error: FrameError) -> None:
        """Count a frame that was refused; after a few of them the link is dropped."""
        self._traffic.refuse(error.reason)
        is_enough = self.offences.add(self.peer)
        self.post(Kind.REFUSED, {"reason": error.reason, "detail": str(error)[:200]})
        if is_enough:
            self.has_offended = True
            self.close(f"sent {LIMITS.offences} frames the protocol does not allow, the last: {error}")

    def _give(self, nbytes: int, has_waited: bool) -> None:
        """Bytes of the neighbour's have passed our line."""
        if credit := self._given.passed(nbytes, self.rtt_s, has_waited=has_waited):
            self.post(Kind.CREDIT, {"bytes": credit})

    def _on_heartbeat(self, frame: Frame) -> None:
        sent, echo = frame.header.get("sent"), frame.header.get("echo")
        if isinstance(echo, float):
            # Our own clock's value, sent back: clocks of two machines are never compared.
            self.rtt_s = max(0.0, time.monotonic() - echo)
        elif isinstance(sent, float):
            self.post(Kind.HEARTBEAT, {"echo": sent})

    async def _heartbeat(self) -> None:
        while True:
            began = time.monotonic()
            self.post(Kind.HEARTBEAT, {"sent": began})
            await asyncio.sleep(LIMITS.heartbeat_s)
            now = time.monotonic()
            # While this process did not run (a loaded machine, a lid closed) it could hear nobody.
            self.last_heard += max(0.0, now - began - LIMITS.heartbeat_s)
            if (silence := now - self.last_heard) > LIMITS.heartbeat_missing_s:
                self.close(f"silent for {silence:.0f} s")
            since = [valve.waiting_since for valve in self._bulk_out if valve.waiting_since is not None]
            if since and (stalled := now - min(since)) > LIMITS.bulk_stall_s:
                self.close(f"takes no bulk for {stalled:.0f} s")
