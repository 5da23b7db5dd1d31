"""Frames on a raw libp2p stream: read and written piece by piece, each piece passing the stream's lane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from peers.frames import PREFIX, Frame, FrameError, Kind, decode_header
from peers.limits import LIMITS, Limits
from peers.shaper import BURST_S
from peers.shaping import TokenBucket

LEAST_PIECE_BYTES = 4096


class Valve(Protocol):
    """What pieces of frames pass, one way: a `peers.traffic.Lane`, or a link's own around it."""

    @property
    def piece_bytes(self) -> int:
        """Largest piece that should pass at once."""

    @property
    def is_free(self) -> bool:
        """Whether nothing ever waits here: then a frame that was read may pass as one piece."""

    async def passes(self, kind: Kind, nbytes: int) -> object:
        """Called before a piece is written, and after one was read; returns when the stream may go on."""

    def has_passed(self, kind: Kind) -> None:
        """Called once a frame is complete."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A raw libp2p stream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def read_frame(
    reader: asyncio.StreamReader, payload_limit: int, limits: Limits = LIMITS, valve: Valve | None = None
) -> tuple[Frame, int]:
    """Read one frame; returns it and its size on the wire.

    Sizes are compared with the limits before memory is taken. Raises FrameError for a frame over a limit, with
    a bad header, or that takes longer than `frame_s` and its bytes at `frame_floor_bytes_per_s`;
    asyncio.IncompleteReadError and ConnectionError when the stream ends.
    """
    header_bytes, payload_bytes = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    if header_bytes > limits.header_bytes:
        raise FrameError("oversize", f"a header of {header_bytes} bytes (limit {limits.header_bytes})")
    if payload_bytes > payload_limit:
        raise FrameError("oversize", f"a payload of {payload_bytes} bytes (limit {payload_limit})")
    patience_s = limits.frame_s + (header_bytes + payload_bytes) / limits.frame_floor_bytes_per_s
    try:
        async with asyncio.timeout(patience_s):
            frame = await _read_rest(reader, header_bytes, payload_bytes, limits, valve)
    except TimeoutError as error:
        raise FrameError("slow", f"a frame took longer than {patience_s:.0f} s") from error
    return frame, PREFIX.size + header_bytes + payload_bytes


async def _read_rest(
    reader: asyncio.StreamReader, header_bytes: int, payload_bytes: int, limits: Limits, valve: Valve | None
) -> Frame:
    """What follows the prefix of a frame."""
    kind, header = decode_header(await reader.readexactly(header_bytes))
    frame = Frame(kind, header)
    head_bytes = PREFIX.size + header_bytes
    if valve is not None and not valve.is_free:
        await valve.passes(kind, head_bytes)
    piece_bytes = limits.read_chunk_bytes if valve is None else valve.piece_bytes
    if payload_bytes:
        buffer = bytearray(payload_bytes)
        view = memoryview(buffer)
        filled = 0
        while filled < payload_bytes:
            chunk = await reader.read(min(piece_bytes, payload_bytes - filled))
            if not chunk:
                raise asyncio.IncompleteReadError(b"", payload_bytes - filled)
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            if valve is not None and not valve.is_free:
                await valve.passes(kind, len(chunk))
        frame.payload = (view,)
    if valve is not None:
        if valve.is_free:
            await valve.passes(kind, head_bytes + payload_bytes)
        valve.has_passed(kind)
    return frame


async def write_frame(
    writer: asyncio.StreamWriter, frame: Frame, limits: Limits = LIMITS, valve: Valve | None = None
) -> int:
    """Write one frame in pieces, waiting for valve and transport between them; returns its size on the wire."""
    total = 0
    for nbytes, parts in pieces(frame, limits.write_chunk_bytes if valve is None else valve.piece_bytes):
        if valve is not None:
            await valve.passes(frame.kind, nbytes)
        for part in parts:
            writer.write(part)
        await writer.drain()
        total += nbytes
    if valve is not None:
        valve.has_passed(frame.kind)
    return total


def pieces(frame: Frame, piece_bytes: int) -> Iterator[tuple[int, list[bytes | memoryview]]]:
    """A frame's bytes, cut into pieces of at most `piece_bytes` (the head stays whole): size and buffers."""
    head = frame.encode_head()
    parts: list[bytes | memoryview] = [head]
    nbytes = len(head)
    for buffer in frame.payload:
        offset = 0
        while offset < buffer.nbytes:
            if nbytes >= piece_bytes:
                yield nbytes, parts
                nbytes, parts = 0, []
            part = buffer[offset : offset + piece_bytes - nbytes]
            parts.append(part)
            nbytes += part.nbytes
            offset += part.nbytes
    yield nbytes, parts


class PacedValve:
    """A valve that the other side may ask to be slower; at first it is only the lane."""

    def __init__(self, lane: Valve) -> None:
        self._lane = lane
        self._bucket: TokenBucket | None = None
        self.piece_bytes = lane.piece_bytes
        """See `Valve`."""
        self.is_free = False
        """See `Valve`."""

    def pace(self, bytes_per_s: float | None) -> None:
        """Let through no more than this from now on; None is no bound."""
        self._bucket, self.piece_bytes = None, self._lane.piece_bytes
        if bytes_per_s is not None:
            burst = max(1.0, bytes_per_s * BURST_S)
            self._bucket = TokenBucket(bytes_per_s, burst, time.monotonic())
            self.piece_bytes = min(self.piece_bytes, max(int(burst), LEAST_PIECE_BYTES))

    async def passes(self, kind: Kind, nbytes: int) -> None:
        """See `Valve`."""
        if self._bucket is not None:
            await asyncio.sleep(self._bucket.seconds_until_ready(time.monotonic()))
            self._bucket.take(nbytes, time.monotonic())
        await self._lane.passes(kind, nbytes)

    def has_passed(self, kind: Kind) -> None:
        """See `Valve`."""
        self._lane.has_passed(kind)


class PatientValve:
    """A valve for one request after another: what our own line makes us wait is not held against the other side.

    lane: the stream's lane. Waits outside of `deadline` are not timed.
    """

    def __init__(self, lane: Valve) -> None:
        self._lane = lane
        self._timeout: asyncio.Timeout | None = None

    @property
    def piece_bytes(self) -> int:
        """See `Valve`."""
        return self._lane.piece_bytes

    @property
    def is_free(self) -> bool:
        """See `Valve`."""
        return self._lane.is_free

    @asynccontextmanager
    async def deadline(self, seconds: float) -> AsyncIterator[None]:
        """What is done inside raises TimeoutError once the other side has used up this time."""
        async with asyncio.timeout(seconds) as timeout:
            self._timeout = timeout
            try:
                yield
            finally:
                self._timeout = None

    async def passes(self, kind: Kind, nbytes: int) -> None:
        """See `Valve`."""
        timeout, loop = self._timeout, asyncio.get_running_loop()
        if timeout is None or (due := timeout.when()) is None:
            await self._lane.passes(kind, nbytes)
            return
        left = due - loop.time()
        timeout.reschedule(None)
        await self._lane.passes(kind, nbytes)
        timeout.reschedule(loop.time() + left)

    def has_passed(self, kind: Kind) -> None:
        """See `Valve`."""
        self._lane.has_passed(kind)
