"""The asking side of a fetch: one raw stream to one holder, and what its answers and failures mean.

The requests and answers are described in `peers.fileserver`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError

from peers.fileserver import CHUNK_DEADLINE_FACTOR, HANDLER, NO_STAGE
from peers.frames import Frame, FrameError, Kind, Priority, need, need_count
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.refusals import Refused
from peers.streams import PatientValve, read_frame, write_frame
from peers.traffic import Traffic

_TRANSIENT_REFUSALS = {Refused.BUSY, Refused.MISSING}
_STREAM_ERRORS = (
    ControlFailure,
    P2PDaemonError,
    OSError,
    asyncio.IncompleteReadError,
    RuntimeError,  # uvloop raises it on a transport that is closing
)


class HolderError(Exception):
    """One holder failed. is_final: asking it again is useless. is_busy: it lives, and asks for patience."""

    def __init__(self, cause: str, *, is_final: bool = False, is_busy: bool = False) -> None:
        super().__init__(cause)
        self.is_final, self.is_busy = is_final, is_busy


class _IdleReader:
    """A stream reader on which every read has a deadline: bytes must keep moving."""

    def __init__(self, reader: asyncio.StreamReader, idle_s: float) -> None:
        self._reader, self._idle_s = reader, idle_s

    async def readexactly(self, count: int) -> bytes:
        """As StreamReader's. Raises TimeoutError too."""
        async with asyncio.timeout(self._idle_s):
            return await self._reader.readexactly(count)

    async def read(self, count: int) -> bytes:
        """As StreamReader's. Raises TimeoutError too."""
        async with asyncio.timeout(self._idle_s):
            return await self._reader.read(count)


class FetchStream:
    """A stream to one holder: requests, one after another."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        idle_s: float,
        traffic: Traffic | None,
        *,
        is_urgent: Callable[[], bool] = bool,
    ) -> None:
        self._reader = cast("asyncio.StreamReader", _IdleReader(reader, idle_s))
        self._writer, self._idle_s = writer, idle_s
        traffic = traffic or Traffic()
        self._download = traffic.download
        self._requests = traffic.lane("up", NO_STAGE, is_bulk=False)
        self._lane, self._is_urgent = traffic.lane("down", NO_STAGE, is_bulk=True), is_urgent
        self._answers = PatientValve(self._lane)

    async def ask(self, want: str, run_id: str, **more: Any) -> None:
        """Send a request. Under a download cap the holder is asked to be no faster than this stream's part of it:
        libp2p's own flow control would stop it and let it go in steps of half a second and more."""
        if self._download.is_limited:
            more["pace"] = int(self._download.rate_bytes_per_s / LIMITS.bulk_streams)
        frame = Frame(Kind.FETCH, {"protocol": PROTOCOL_VERSION, "want": want, "run": run_id, **more})
        async with asyncio.timeout(self._idle_s):
            await write_frame(self._writer, frame, valve=self._requests)

    async def chunk(self, index: int) -> Frame:
        """The next CHUNK. Raises HolderError if the holder refuses, FrameError for anything unexpected."""
        self._lane.priority = Priority.CONTROL if self._is_urgent() else None
        async with self._answers.deadline(CHUNK_DEADLINE_FACTOR * self._idle_s):
            frame, _ = await read_frame(self._reader, LIMITS.transfer_chunk_bytes, valve=self._answers)
        if frame.kind is Kind.REFUSED:
            raise _refusal(frame)
        if frame.kind is not Kind.CHUNK or need(frame.header, "index", int) != index:
            raise FrameError(
                "kind", f"chunk {index} was expected, got {frame.kind} {frame.header.get('index')}"
            )
        return frame

    async def document(self, limit: int) -> bytes:
        """A document that comes in chunks. Raises HolderError, FrameError."""
        parts: list[memoryview] = []
        received, total = 0, 1
        while received < total:
            frame = await self.chunk(len(parts))
            if not parts:
                spoken = need_count(frame.header, "protocol", 2**31)
                if spoken != PROTOCOL_VERSION:
                    raise _other_protocol(spoken)
                total = need_count(frame.header, "nbytes", limit)
            parts.append(frame.data())
            received += frame.payload_bytes
            if received > total or frame.payload_bytes == 0:
                raise FrameError("size", f"{received} bytes of a document of {total}")
        return b"".join(parts)


@asynccontextmanager
async def open_fetch_stream(
    p2p: P2P, peer: str, idle_s: float, traffic: Traffic | None, *, is_urgent: Callable[[], bool] = bool
) -> AsyncIterator[FetchStream]:
    """Open a stream to a holder; whatever goes wrong on it is a HolderError with the cause.

    is_urgent: whether what comes passes this peer's download cap before all other bulk, asked for each chunk.
    """
    try:
        peer_id = PeerID.from_base58(peer)
    except ValueError as error:
        raise HolderError(f"{peer!r} is no peer id", is_final=True) from error
    writer: asyncio.StreamWriter | None = None
    stage = "dialling"
    try:
        async with asyncio.timeout(LIMITS.dial_s):
            _, reader, writer = await p2p.call_binary_stream_handler(peer_id, HANDLER)
        stage = "transferring"
        yield FetchStream(reader, writer, idle_s, traffic, is_urgent=is_urgent)
    except TimeoutError as error:
        raise HolderError(f"no answer while {stage}") from error
    except FrameError as error:
        raise HolderError(f"sent a malformed answer ({error})", is_final=True) from error
    except _STREAM_ERRORS as error:
        raise HolderError(f"{stage} failed: {str(error).strip()[:160] or type(error).__name__}") from error
    finally:
        if writer is not None:
            writer.close()


def _refusal(frame: Frame) -> HolderError:
    """What a REFUSED frame means."""
    reason, detail = _printable(frame.header.get("reason"), 40), _printable(frame.header.get("detail"), 400)
    if reason == Refused.PROTOCOL:
        spoken = frame.header.get("protocol")
        return _other_protocol(spoken if isinstance(spoken, int) else -1)
    runs = frame.header.get("runs")
    if isinstance(runs, list):
        known = [run for run in runs[:32] if isinstance(run, dict)]
        listed = [f"{_printable(run.get('run'), 40)} ({_printable(run.get('name'), 64)})" for run in known]
        detail += f"; it serves: {', '.join(listed) or 'none'}"
    if reason == Refused.SEVERAL_RUNS:
        detail += "; choose one with --run"
    is_final = reason not in _TRANSIENT_REFUSALS
    return HolderError(f"refused ({reason}): {detail}", is_final=is_final, is_busy=reason == Refused.BUSY)


def _other_protocol(spoken: int) -> HolderError:
    return HolderError(
        f"it speaks protocol version {spoken}, this program speaks {PROTOCOL_VERSION}: install the "
        f"version of swarm-peer that the run uses",
        is_final=True,
    )


def _printable(value: object, length: int) -> str:
    """What another peer wrote, fit for a terminal: no control characters, and no longer than that."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:length])
