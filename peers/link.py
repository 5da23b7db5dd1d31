"""One link: the bundle of long-lived raw streams to one neighbour.

A link has one control stream and a few bulk streams, used in both directions. Control frames never wait
behind bulk; bulk frames leave by priority, each whole on one stream, so several interleave. Whatever breaks
any of the streams breaks the link: `closed` is set with the reason and nothing is ever half alive.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peers.frames import BULK_PRIORITY, PREFIX, Frame, FrameError, Kind, decode_header
from peers.limits import LIMITS, PROTOCOL_VERSION, Limits
from peers.traffic import Traffic

logger = logging.getLogger("swarm_peer.link")
OnFrame = Callable[["Link", Frame], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Hello:
    """What the two ends of a stream tell each other first."""

    run: str
    stage: int
    incarnation: int
    protocol: int = PROTOCOL_VERSION

    def header(self, **more: Any) -> dict[str, Any]:
        """Header of a HELLO frame."""
        return {
            "protocol": self.protocol,
            "run": self.run,
            "stage": self.stage,
            "incarnation": self.incarnation,
            **more,
        }


@dataclass(frozen=True, slots=True)
class Stream:
    """A raw libp2p stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def read_frame(
    reader: asyncio.StreamReader, payload_limit: int, limits: Limits = LIMITS
) -> tuple[Frame, int]:
    """Read one frame; returns it and its size on the wire.

    Sizes are compared with the limits before memory is taken. Raises FrameError for a frame over a limit or
    with a bad header, asyncio.IncompleteReadError and ConnectionError when the stream ends.
    """
    header_bytes, payload_bytes = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    if header_bytes > limits.header_bytes:
        raise FrameError("oversize", f"a header of {header_bytes} bytes (limit {limits.header_bytes})")
    if payload_bytes > payload_limit:
        raise FrameError("oversize", f"a payload of {payload_bytes} bytes (limit {payload_limit})")
    kind, header = decode_header(await reader.readexactly(header_bytes))
    frame = Frame(kind, header)
    if payload_bytes:
        buffer = bytearray(payload_bytes)
        view = memoryview(buffer)
        filled = 0
        while filled < payload_bytes:
            chunk = await reader.read(min(limits.read_chunk_bytes, payload_bytes - filled))
            if not chunk:
                raise asyncio.IncompleteReadError(b"", payload_bytes - filled)
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        frame.payload = (view,)
    return frame, PREFIX.size + header_bytes + payload_bytes


async def write_frame(writer: asyncio.StreamWriter, frame: Frame, limits: Limits = LIMITS) -> int:
    """Write one frame in chunks, waiting for the transport between them; returns its size on the wire."""
    head = frame.encode_head()
    writer.write(head)
    total = len(head)
    for buffer in frame.payload:
        for offset in range(0, buffer.nbytes, limits.write_chunk_bytes):
            writer.write(buffer[offset : offset + limits.write_chunk_bytes])
            await writer.drain()
        total += buffer.nbytes
    await writer.drain()
    return total


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
        self._offences = 0
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
        tasks += [asyncio.create_task(self._write_bulk(stream)) for stream in self._streams[1:]]
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

    def _put(self, frame: Frame, written: asyncio.Future[None] | None) -> None:
        priority = BULK_PRIORITY.get(frame.kind)
        if priority is None:
            if self._control.qsize() > LIMITS.control_frames:
                self.close(f"does not read: {LIMITS.control_frames} control frames wait")
                return
            self._control.put_nowait(frame)
        else:
            self._bulk.put_nowait((priority, next(self._order), frame, written))

    async def _write_control(self) -> None:
        while True:
            await self._write(self._streams[0], await self._control.get(), None)

    async def _write_bulk(self, stream: Stream) -> None:
        while True:
            _, _, frame, written = await self._bulk.get()
            await self._write(stream, frame, written)

    async def _write(self, stream: Stream, frame: Frame, written: asyncio.Future[None] | None) -> None:
        try:
            size = await write_frame(stream.writer, frame)
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError on a transport that is closing
            self.close(f"write failed: {error or type(error).__name__}")
            return
        self._traffic.count("up", frame.kind, self.hello.stage, size)
        if written is not None and not written.done():
            written.set_result(None)

    async def _read(self, stream: Stream, number: int) -> None:
        while self.is_open:
            limit = LIMITS.control_payload_bytes if number == 0 else self.payload_limit
            try:
                frame, size = await read_frame(stream.reader, limit)
            except (asyncio.IncompleteReadError, OSError) as error:
                self.close(f"disconnected ({type(error).__name__})")
                return
            except FrameError as error:
                # After an oversized or undecodable frame the stream's framing cannot be trusted any more.
                self._traffic.refuse(error.reason)
                self.close(f"sent a malformed frame ({error})")
                return
            self.last_heard = time.monotonic()
            self._traffic.count("down", frame.kind, self.hello.stage, size)
            await self._deliver(frame)

    async def _deliver(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.HEARTBEAT:
                self._on_heartbeat(frame)
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

    def offend(self, error: FrameError) -> None:
        """Count a frame that was refused; after a few of them the link is dropped."""
        self._traffic.refuse(error.reason)
        self._offences += 1
        self.post(Kind.REFUSED, {"reason": error.reason, "detail": str(error)[:200]})
        if self._offences >= LIMITS.offences:
            self.has_offended = True
            self.close(f"sent {self._offences} frames the protocol does not allow, the last: {error}")

    def _on_heartbeat(self, frame: Frame) -> None:
        sent, echo = frame.header.get("sent"), frame.header.get("echo")
        if isinstance(echo, float):
            # Our own clock's value, sent back: clocks of two machines are never compared.
            self.rtt_s = max(0.0, time.monotonic() - echo)
        elif isinstance(sent, float):
            self.post(Kind.HEARTBEAT, {"echo": sent})

    async def _heartbeat(self) -> None:
        while True:
            self.post(Kind.HEARTBEAT, {"sent": time.monotonic()})
            await asyncio.sleep(LIMITS.heartbeat_s)
            silence = time.monotonic() - self.last_heard
            if silence > LIMITS.heartbeat_missing_s:
                self.close(f"silent for {silence:.0f} s")
