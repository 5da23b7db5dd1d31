"""Fetching a run's files: manifest, artifacts, snapshots; verified as they come, resumable, from any holder.

A file grows in `<target>.partial`, chunk by chunk, each checked against its hash before it is written. What
is already there is simply hashed again after a restart: a chunk that matches is kept, wherever it came from.
When one holder fails the next goes on from there; the finished file takes its name by rename. A holder whose
bytes do not match, or who has not got the file, is not asked again; one that is busy or away is.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import random
import secrets
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlFailure, P2PDaemonError
from pydantic import ValidationError

from peers.config import UserError
from peers.fileserver import (
    CHUNK_DEADLINE_FACTOR,
    CHUNKS_PER_REQUEST,
    HANDLER,
    HASHING_PATIENCE_S,
    NO_STAGE,
    FileServer,
    Refused,
    snapshot_name,
)
from peers.frames import Frame, FrameError, Kind, need, need_count
from peers.limits import LIMITS, MIB, PROTOCOL_VERSION
from peers.link import read_frame, write_frame
from peers.traffic import Traffic
from swarm.manifest import ARTIFACT_CHUNK_BYTES, Artifact

__all__ = [
    "FileServer",
    "TransferError",
    "fetch_artifact",
    "fetch_manifest",
    "fetch_snapshot",
    "snapshot_name",
]

MANIFEST_BYTES = 64 * MIB
HASH_LIST_BYTES = 64 * MIB
BUSY_PATIENCE_S = 900.0
"""How long holders that answer "busy" are asked again while nothing moves."""
RETRY_FIRST_S = 0.25

Holders = Sequence[str] | Callable[[], Awaitable[Sequence[str]]]
"""Peer ids (base58) that may have the file, in the order to ask; or a way to look them up again."""
Progress = Callable[[int, int], None]
"""Called in the loop with (verified bytes, bytes of the file), first with what was there already."""

_FINAL_REFUSALS = {Refused.PROTOCOL, Refused.UNKNOWN_RUN, Refused.SEVERAL_RUNS, Refused.MALFORMED}
_STREAM_ERRORS = (
    ControlFailure,
    P2PDaemonError,
    OSError,
    asyncio.IncompleteReadError,
    FrameError,
    TimeoutError,
    RuntimeError,  # uvloop raises it on a transport that is closing
)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class TransferError(UserError):
    """Nobody gave the file, or it could not be kept. causes: what each holder (peer id) failed with."""

    def __init__(self, message: str, causes: dict[str, str] | None = None) -> None:
        self.causes = dict(causes or {})
        listed = "".join(f"\n  {peer}: {cause}" for peer, cause in self.causes.items())
        super().__init__(message + listed)


class _HolderError(Exception):
    """One holder failed. is_final: asking it again is useless. is_busy: it lives, and asks for patience."""

    def __init__(self, cause: str, *, is_final: bool = False, is_busy: bool = False) -> None:
        super().__init__(cause)
        self.is_final, self.is_busy = is_final, is_busy


class _IdleReader:
    """A stream reader on which every read has a deadline: bytes must keep moving."""

    def __init__(self, reader: asyncio.StreamReader, idle_s: float) -> None:
        self._reader, self._idle_s = reader, idle_s

    async def readexactly(self, count: int) -> bytes:
        async with asyncio.timeout(self._idle_s):
            return await self._reader.readexactly(count)

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(self._idle_s):
            return await self._reader.read(count)


class _Session:
    """A stream to one holder: requests, one after another."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        idle_s: float,
        traffic: Traffic | None,
    ) -> None:
        self._reader = cast("asyncio.StreamReader", _IdleReader(reader, idle_s))
        self._writer, self._idle_s, self._traffic = writer, idle_s, traffic

    async def ask(self, want: str, run_id: str, **more: Any) -> None:
        """Send a request."""
        frame = Frame(Kind.FETCH, {"protocol": PROTOCOL_VERSION, "want": want, "run": run_id, **more})
        async with asyncio.timeout(self._idle_s):
            size = await write_frame(self._writer, frame)
        if self._traffic is not None:
            self._traffic.count("up", frame.kind, NO_STAGE, size)

    async def chunk(self, index: int) -> Frame:
        """The next CHUNK. Raises _HolderError if the holder refuses, FrameError for anything unexpected."""
        async with asyncio.timeout(CHUNK_DEADLINE_FACTOR * self._idle_s):
            frame, size = await read_frame(self._reader, LIMITS.transfer_chunk_bytes)
        if self._traffic is not None:
            self._traffic.count("down", frame.kind, NO_STAGE, size)
        if frame.kind is Kind.REFUSED:
            raise _refusal(frame)
        if frame.kind is not Kind.CHUNK or need(frame.header, "index", int) != index:
            raise FrameError(
                "kind", f"chunk {index} was expected, got {frame.kind} {frame.header.get('index')}"
            )
        return frame

    async def document(self, limit: int) -> bytes:
        """A document that comes in chunks. Raises _HolderError, FrameError."""
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
async def _session(p2p: P2P, peer: str, idle_s: float, traffic: Traffic | None) -> AsyncIterator[_Session]:
    """Open a stream to a holder; whatever goes wrong on it is a _HolderError with the cause."""
    try:
        peer_id = PeerID.from_base58(peer)
    except ValueError as error:
        raise _HolderError(f"{peer!r} is no peer id", is_final=True) from error
    writer: asyncio.StreamWriter | None = None
    stage = "dialling"
    try:
        async with asyncio.timeout(LIMITS.dial_s):
            _, reader, writer = await p2p.call_binary_stream_handler(peer_id, HANDLER)
        stage = "transferring"
        yield _Session(reader, writer, idle_s, traffic)
    except TimeoutError as error:
        raise _HolderError(f"no answer while {stage}") from error
    except FrameError as error:
        raise _HolderError(f"sent a malformed answer ({error})", is_final=True) from error
    except _STREAM_ERRORS as error:
        raise _HolderError(f"{stage} failed: {str(error).strip()[:160] or type(error).__name__}") from error
    finally:
        if writer is not None:
            writer.close()


def _refusal(frame: Frame) -> _HolderError:
    """What a REFUSED frame means."""
    reason, detail = str(frame.header.get("reason"))[:40], str(frame.header.get("detail", ""))[:400]
    if reason == Refused.PROTOCOL:
        spoken = frame.header.get("protocol")
        return _other_protocol(spoken if isinstance(spoken, int) else -1)
    runs = frame.header.get("runs")
    if isinstance(runs, list):
        listed = [f"{r.get('run')!s:.40} ({r.get('name')!s:.64})" for r in runs[:32] if isinstance(r, dict)]
        detail += f"; it serves: {', '.join(listed) or 'none'}"
    if reason == Refused.SEVERAL_RUNS:
        detail += "; choose one with --run"
    return _HolderError(
        f"refused ({reason}): {detail}", is_final=reason in _FINAL_REFUSALS, is_busy=reason == Refused.BUSY
    )


def _other_protocol(spoken: int) -> _HolderError:
    return _HolderError(
        f"it speaks protocol version {spoken}, this program speaks {PROTOCOL_VERSION}: install the version of "
        f"swarm-peer that the run uses",
        is_final=True,
    )


async def fetch_manifest(
    p2p: P2P, peer_id: str, run_id: str | None, deadline_s: float, traffic: Traffic | None = None
) -> bytes:
    """The manifest of a run (None: of the only run the peer serves), in wire form, not yet verified.

    Raises TransferError with the cause: not reachable, another protocol version (both are named), an unknown
    run, several runs (all are listed), or nothing complete within `deadline_s`.
    """
    cause = f"nothing complete within {deadline_s:g} s"
    try:
        async with asyncio.timeout(deadline_s), _session(p2p, peer_id, deadline_s, traffic) as session:
            await session.ask("manifest", run_id or "")
            return await session.document(MANIFEST_BYTES)
    except _HolderError as error:
        cause = str(error)
    except TimeoutError:
        pass
    which = "a manifest" if run_id is None else f"the manifest of run {run_id}"
    raise TransferError(f"could not get {which}:", {peer_id: cause})


async def fetch_artifact(
    p2p: P2P,
    holders: Holders,
    artifact: Artifact,
    run_id: str,
    target: Path,
    *,
    progress: Progress | None = None,
    deadline_idle_s: float = LIMITS.fetch_idle_s,
    traffic: Traffic | None = None,
) -> Path:
    """Fetch an artifact of the manifest to `target`, whose folder is made; returns `target`.

    A complete file that is already there is only verified. Raises TransferError, leaving what was verified in
    `<target>.partial` for the next try, when no holder is left or nothing moved for `deadline_idle_s`.
    """
    transfer = _Transfer(
        p2p, run_id, artifact.name, target, deadline_idle_s, traffic, progress, artifact.nbytes
    )
    transfer.fixed = artifact
    if await asyncio.to_thread(_is_complete, target, artifact):
        transfer.report(artifact.nbytes, artifact.nbytes)
        return target
    await transfer.run(holders)
    return target


async def fetch_snapshot(
    p2p: P2P,
    holders: Holders,
    run_id: str,
    version: int,
    stage: int,
    target: Path,
    *,
    progress: Progress | None = None,
    deadline_idle_s: float = LIMITS.fetch_idle_s,
    traffic: Traffic | None = None,
    limit_bytes: int = LIMITS.artifact_bytes,
) -> str:
    """Fetch a stage's snapshot to `target`; returns the peer id of the holder whose copy it is.

    Replicas' snapshots may differ by rounding, so each holder's own hash list is asked for first and the file
    is wholly one holder's: on a change of holder only chunks that match the new one's list are kept.
    Raises TransferError as `fetch_artifact` does; a snapshot of over `limit_bytes` is refused.
    """
    name = snapshot_name(version, stage)
    return await _Transfer(p2p, run_id, name, target, deadline_idle_s, traffic, progress, limit_bytes).run(
        holders
    )


@dataclass(slots=True)
class _Transfer:
    """One file on its way. fixed: its hashes if the manifest names them, else each holder's are asked for."""

    p2p: P2P
    run_id: str
    name: str
    target: Path
    idle_s: float
    traffic: Traffic | None
    progress: Progress | None
    limit_bytes: int
    fixed: Artifact | None = None
    partial: Path = field(init=False)
    descriptor: int = -1
    current: Artifact | None = None
    missing: set[int] = field(default_factory=set)
    verified_chunks: int = 0

    async def run(self, holders: Holders) -> str:
        """Fetch from whoever gives; returns the last holder's peer id. Raises TransferError."""
        await asyncio.to_thread(self._open_partial)
        try:
            donor = await self._from_any(holders)
            await asyncio.to_thread(self._finish)
            return donor
        except OSError as error:
            self._cannot_write(error)
        finally:
            os.close(self.descriptor)
            if self.partial.name != f"{self.target.name}.partial":
                self.partial.unlink(missing_ok=True)

    def report(self, done: int, total: int) -> None:
        """Tell the caller how far it is."""
        if self.progress is not None:
            self.progress(done, total)

    # -- holders -------------------------------------------------------------------------------------

    async def _from_any(self, holders: Holders) -> str:
        causes: dict[str, str] = {}
        banned: set[str] = set()
        moved_at = idle_since = time.monotonic()
        pause = RETRY_FIRST_S
        while True:
            found = list(await holders()) if callable(holders) else list(holders)
            before = self.verified_chunks
            is_busy = False
            for peer in found:
                if peer in banned or peer == self.p2p.peer_id.to_base58():
                    continue
                try:
                    await self._from_holder(peer)
                    return peer
                except _HolderError as error:
                    causes[peer] = str(error)
                    is_busy = is_busy or error.is_busy
                    if error.is_final:
                        banned.add(peer)
            now = time.monotonic()
            if self.verified_chunks > before:
                moved_at = idle_since = now
                pause = RETRY_FIRST_S
            elif is_busy and now - moved_at < BUSY_PATIENCE_S:
                idle_since = now
            is_hopeless = not callable(holders) and banned.issuperset(found)
            if is_hopeless or now - idle_since > self.idle_s:
                waited = "" if is_hopeless else f" for {now - moved_at:.0f} s"
                nobody = "" if causes else ": nobody offers it"
                raise TransferError(
                    f"no holder gave {self.name} of run {self.run_id}{waited}{nobody}"
                    f"{self._kept()}{':' if causes else ''}",
                    causes,
                )
            # Jitter, because a whole stage may wait for the same holder.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LIMITS.redial_ceiling_s)

    async def _from_holder(self, peer: str) -> None:
        """Get all that is missing from one holder. Raises _HolderError."""
        artifact = self.fixed or await self._ask_hashes(peer)
        if self.current is None or self.current.sha256 != artifact.sha256:
            self.current = artifact
            self.missing = await asyncio.to_thread(self._prepare, artifact)
            self._report_state(artifact)
        chunks = sorted(self.missing)
        queue: deque[list[int]] = deque()
        streams = LIMITS.bulk_streams if len(chunks) > LIMITS.bulk_streams else 1
        size = max(1, min(CHUNKS_PER_REQUEST, len(chunks) // (4 * streams)))
        for index in chunks:
            if queue and queue[-1][-1] == index - 1 and len(queue[-1]) < size:
                queue[-1].append(index)
            else:
                queue.append([index])
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(streams, len(queue))):
                    group.create_task(self._pull(peer, artifact, queue, is_extra=number > 0))
        except ExceptionGroup as errors:
            # Of several streams that failed together the first cause is as good as any.
            raise errors.exceptions[0] from errors
        if self.missing:
            raise _HolderError("refused (busy): it closed one of two streams", is_busy=True)

    async def _ask_hashes(self, peer: str) -> Artifact:
        idle_s = self.idle_s + HASHING_PATIENCE_S
        async with _session(self.p2p, peer, idle_s, self.traffic) as session:
            await session.ask("meta", self.run_id, name=self.name)
            document = await session.document(HASH_LIST_BYTES)
        try:
            artifact = await asyncio.to_thread(Artifact.model_validate_json, document)
        except ValidationError as error:
            raise _HolderError("sent a malformed hash list", is_final=True) from error
        if artifact.name != self.name or artifact.nbytes > self.limit_bytes:
            cause = f"offers {artifact.name} of {artifact.nbytes} bytes (limit {self.limit_bytes})"
            raise _HolderError(cause, is_final=True)
        return artifact

    async def _pull(self, peer: str, artifact: Artifact, queue: deque[list[int]], *, is_extra: bool) -> None:
        """Take ranges from the queue over one stream until it is empty."""
        try:
            async with _session(self.p2p, peer, self.idle_s, self.traffic) as session:
                while queue:
                    chunks = queue.popleft()
                    await session.ask(
                        "chunks", self.run_id, name=self.name, first=chunks[0], count=len(chunks)
                    )
                    for index in chunks:
                        frame = await session.chunk(index)
                        await self._keep(artifact, index, frame.data())
        except _HolderError as error:
            if not (is_extra and error.is_busy):
                raise

    async def _keep(self, artifact: Artifact, index: int, data: memoryview) -> None:
        try:
            is_right = await asyncio.to_thread(_check_and_write, self.descriptor, artifact, index, data)
        except OSError as error:
            self._cannot_write(error)
        if not is_right:
            raise _HolderError(f"chunk {index} does not match its hash: its copy is corrupt", is_final=True)
        self.missing.discard(index)
        self.verified_chunks += 1
        self._report_state(artifact)

    def _report_state(self, artifact: Artifact) -> None:
        absent = sum(_chunk_size(artifact, index) for index in self.missing) if self.progress else 0
        self.report(artifact.nbytes - absent, artifact.nbytes)

    # -- the disk, in a thread -----------------------------------------------------------------------

    def _open_partial(self) -> None:
        """Open and lock the partial file; another process that fetches the same keeps it to itself."""
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.partial = self.target.with_name(f"{self.target.name}.partial")
            while True:
                self.descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The other one may have renamed it between our open and our lock.
                    if self.partial.exists() and os.path.sameopenfile(self.descriptor, self.descriptor):
                        if self.partial.stat().st_ino == os.fstat(self.descriptor).st_ino:
                            return
                except BlockingIOError:
                    self.partial = self.target.with_name(f"{self.target.name}.{secrets.token_hex(4)}.partial")
                os.close(self.descriptor)
        except OSError as error:
            self._cannot_write(error)

    def _prepare(self, artifact: Artifact) -> set[int]:
        """Chunks that the partial file lacks; makes sure that the rest has room."""
        os.ftruncate(self.descriptor, min(artifact.nbytes, os.fstat(self.descriptor).st_size))
        missing = set()
        for index in range(len(artifact.chunks)):
            data = os.pread(self.descriptor, _chunk_size(artifact, index), index * ARTIFACT_CHUNK_BYTES)
            if hashlib.sha256(data).hexdigest() != artifact.chunks[index]:
                missing.add(index)
        wanted = artifact.nbytes - os.fstat(self.descriptor).st_size
        free = shutil.disk_usage(self.target.parent).free
        if wanted > free:
            raise OSError(errno.ENOSPC, f"{wanted} more bytes are needed, {free} are free")
        return missing

    def _finish(self) -> None:
        os.fsync(self.descriptor)
        os.replace(self.partial, self.target)
        folder = os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _kept(self) -> str:
        if self.current is None or len(self.missing) == len(self.current.chunks):
            return ""
        kept = len(self.current.chunks) - len(self.missing)
        return f" ({kept} of {len(self.current.chunks)} MiB are kept in {self.partial} for the next try)"

    def _cannot_write(self, error: OSError) -> NoReturn:
        advice = (
            "free some space, or choose a folder elsewhere"
            if error.errno in _NO_ROOM
            else "see to the folder"
        )
        raise TransferError(
            f"cannot write {self.target}: {error.strerror or error}; {advice}, then start again"
        ) from error


def _chunk_size(artifact: Artifact, index: int) -> int:
    return min(ARTIFACT_CHUNK_BYTES, artifact.nbytes - index * ARTIFACT_CHUNK_BYTES)


def _check_and_write(descriptor: int, artifact: Artifact, index: int, data: memoryview) -> bool:
    """Write a chunk at its place if it is the right one; says whether it was."""
    if hashlib.sha256(data).hexdigest() != artifact.chunks[index]:
        return False
    offset = index * ARTIFACT_CHUNK_BYTES
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
    return True


def _is_complete(path: Path, artifact: Artifact) -> bool:
    """Whether the file is there with the artifact's bytes."""
    try:
        return path.stat().st_size == artifact.nbytes and Artifact.of(path, artifact.name) == artifact
    except FileNotFoundError:
        return False
