"""Serving a run's files: the manifest, its artifacts, and the snapshots this peer keeps.

One raw stream carries requests one after another. A request is a FETCH frame; the answer is CHUNK frames of
at most 1 MiB, or one REFUSED frame with a reason (`Refused`) and a sentence for people:

    want "manifest"             the run's manifest                     CHUNK index, nbytes, protocol, run
    want "meta"   name          the file's `Artifact` as JSON          CHUNK index, nbytes, protocol, run
    want "chunks" name first count [pace]    1 MiB pieces first .. first+count-1, at so many bytes/s    CHUNK index

Under an upload cap files leave at the lowest priority: training goes first, a tenth of the line is theirs. Only what
a peer cannot work without (the prior in force) goes before everything else.
Only what was registered, or stands in a manifest that is held, has a name here: no name is ever turned into
a path. Files are read in a thread; every wait has a deadline; streams and transfers are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from peers.frames import Frame, FrameError, Kind, Priority, need, need_count
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.refusals import RefusalError, Refused
from peers.streams import PacedValve, PatientValve, read_frame, write_frame
from peers.traffic import Traffic
from swarm.manifest import ARTIFACT_CHUNK_BYTES, Artifact, RunManifest

logger = logging.getLogger("swarm_peer.fileserver")
HANDLER = "swarm-peer/fetch"

NO_STAGE = -1
"""Neighbour stage under which transfers are counted: any peer may fetch, whatever stage it holds."""

STREAMS = 64
STREAMS_PER_PEER = 8
TRANSFERS = 16
"""Requests for chunks answered at the same time; under an upload cap one for each Mbit/s of it, so that each
moves faster than the deadline asks for even while training takes what it can."""
CHUNKS_PER_REQUEST = 64
CHUNK_DEADLINE_FACTOR = 16
"""A chunk may take this many times `fetch_idle_s`, as long as bytes keep moving: 3.3 KB/s at the least."""
LEAST_PACE, MOST_PACE = 16 * 1024, 1 << 40
"""Bytes per second a request may ask for; below the least a stranger could hold a transfer for ever."""
HASHING_PATIENCE_S = 8.0
"""A file that is still being hashed after this long is refused as busy; the client asks again."""
LINGER_S = 2.0
"""How long a stream that was turned away may take to close."""
NAME_CHARACTERS = 128


@dataclass(slots=True)
class _File:
    """A file on offer. nbytes: what it must hold, if a manifest says so. artifact: its hashes, once known. is_urgent:
    whether a peer waits for it. make: makes it when it is first asked for.
    """

    path: Path
    nbytes: int | None = None
    artifact: Artifact | None = None
    hashing: asyncio.Task[Artifact] | None = None
    is_urgent: Callable[[str], bool] | None = None
    make: Callable[[], None] | None = None


@dataclass(slots=True)
class _Run:
    """A run on offer. files: by name."""

    name: str
    manifest: bytes
    files: dict[str, _File] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream that is being served."""

    peer: str
    writer: asyncio.StreamWriter


class _Answers:
    """The way out of a stream: frames pass the peer's upload shaper at the lowest priority, unless `hurry` is set."""

    def __init__(self, writer: asyncio.StreamWriter, traffic: Traffic) -> None:
        self._writer = writer
        self._lane = traffic.lane("up", NO_STAGE, is_bulk=True)
        self._paced = PacedValve(self._lane)
        self._valve = PatientValve(self._paced)

    def hurry(self, is_urgent: bool) -> None:
        """Answer before all other bulk from now on, or after it."""
        self._lane.priority = Priority.CONTROL if is_urgent else None

    def pace(self, header: dict[str, Any]) -> None:
        """Answer no faster than a request wants it. Raises FrameError."""
        pace = need_count(header, "pace", MOST_PACE) if "pace" in header else None
        self._paced.pace(None if pace is None else max(pace, LEAST_PACE))

    async def write(self, frame: Frame) -> None:
        """Write a frame. Raises TimeoutError if the other side does not take it."""
        async with self._valve.deadline(CHUNK_DEADLINE_FACTOR * LIMITS.fetch_idle_s):
            await write_frame(self._writer, frame, valve=self._valve)


def snapshot_name(version: int, stage: int) -> str:
    """Name under which a peer serves its snapshot of a stage's state at a version."""
    return f"snapshot/{version}/stage-{stage}"


class FileServer:
    """Answers fetches on one P2P. Lives in the communication loop; `start` and `close` are called there.

    protocol: the version spoken; a request of another version is refused with ours in the answer.
    """

    def __init__(self, p2p: P2P, traffic: Traffic, protocol: int = PROTOCOL_VERSION) -> None:
        self._p2p = p2p
        self._traffic = traffic
        self._protocol = protocol
        self._runs: dict[str, _Run] = {}
        self._streams: dict[asyncio.Task[Any], _Stream] = {}
        self._leaving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._transfers = 0
        cap_mbps = traffic.upload.limit_mbps
        self._most_transfers = TRANSFERS if cap_mbps is None else min(max(1, int(cap_mbps)), TRANSFERS)
        self._closing = False

    async def start(self) -> None:
        """Accept requests from now on."""
        await self._p2p.add_binary_stream_handler(HANDLER, self._accept)

    def add_run(self, manifest: RunManifest, artifacts: Path) -> None:
        """Serve a run's manifest, and those of its artifacts that stand complete in the folder `artifacts`.

        An artifact that arrives there later (by rename) is served from then on.
        """
        run = _Run(manifest.name, manifest.to_bytes())
        for artifact in manifest.artifacts:
            run.files[artifact.name] = _File(artifacts / artifact.name, artifact.nbytes, artifact)
        if (earlier := self._runs.get(manifest.run_id)) is not None:
            run.files = {**earlier.files, **run.files}
        self._runs[manifest.run_id] = run

    def register(
        self,
        name: str,
        path: Path,
        run_id: str | None = None,
        *,
        is_urgent: Callable[[str], bool] | None = None,
        make: Callable[[], None] | None = None,
    ) -> None:
        """Serve a file that no manifest names (a snapshot) under this name; it must not change any more.

        run_id: the run it belongs to; None is the only run held. is_urgent: asked with each request's peer id
        (base58) whether that peer cannot work without the file; then it is sent before all other bulk. make: called
        in a thread when somebody first asks for the file's hashes, if it is not there; raises OSError or ValueError.
        Raises ValueError if the run is ambiguous.
        """
        self._run(run_id).files[name] = _File(path, is_urgent=is_urgent, make=make)

    def unregister(self, name: str, run_id: str | None = None) -> None:
        """Serve the file no longer; transfers under way go on. Harmless if it is not registered."""
        file = self._run(run_id).files.pop(name, None)
        if file is not None and file.hashing is not None:
            file.hashing.cancel()

    async def close(self) -> None:
        """Refuse new streams and end those that are open. Works also when p2pd has died."""
        self._closing = True
        with suppress(ControlFailure, OSError, asyncio.IncompleteReadError, KeyError):
            async with asyncio.timeout(LIMITS.dial_s):
                await self._p2p.remove_binary_stream_handler(HANDLER)
        hashing = [file.hashing for run in self._runs.values() for file in run.files.values() if file.hashing]
        for task in hashing:
            task.cancel()
        # Not by cancelling: in Python 3.11 a stream's callback complains aloud about a cancelled handler.
        for writer in (*(stream.writer for stream in self._streams.values()), *self._leaving.values()):
            writer.transport.abort()
        await asyncio.gather(*self._streams, *self._leaving, *hashing, return_exceptions=True)

    def _run(self, run_id: str | None) -> _Run:
        if run_id is None and len(self._runs) == 1:
            return next(iter(self._runs.values()))
        if run_id is None or run_id not in self._runs:
            raise ValueError(
                f"run {run_id} is not among the {len(self._runs)} runs held: {sorted(self._runs)}"
            )
        return self._runs[run_id]

    # -- one stream ----------------------------------------------------------------------------------

    async def _accept(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: str = info.peer_id.to_base58()
        task = asyncio.current_task()
        assert task is not None
        held = sum(1 for stream in self._streams.values() if stream.peer == peer)
        is_full = self._closing or len(self._streams) >= STREAMS or held >= STREAMS_PER_PEER
        answers = _Answers(writer, self._traffic)
        requests = self._traffic.lane("down", NO_STAGE, is_bulk=False)
        if not is_full:
            self._streams[task] = _Stream(peer, writer)
        try:
            if is_full:
                await self._turn_away(reader, writer, answers, Refused.BUSY, "too many streams are open")
            while not is_full:
                async with asyncio.timeout(LIMITS.fetch_idle_s):
                    frame, _ = await read_frame(reader, 0, valve=requests)
                try:
                    await self._answer(frame, answers, peer)
                except RefusalError as refusal:
                    await self._refuse(answers, refusal)
        except FrameError as error:
            self._traffic.refuse(error.reason)
            logger.warning("refused a request of %s: %s", peer[-6:], error)
            await self._turn_away(reader, writer, answers, Refused.MALFORMED, str(error))
        except (TimeoutError, OSError, asyncio.IncompleteReadError, RuntimeError):
            pass  # the other side went away or does not read; uvloop: RuntimeError on a closing transport
        finally:
            self._streams.pop(task, None)
            writer.close()

    async def _turn_away(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: _Answers,
        reason: Refused,
        detail: str,
    ) -> None:
        """Refuse the whole stream, and wait a little until the other side has closed it.

        A socket that is closed with unread requests in it is reset, and the refusal would be lost.
        """
        task = asyncio.current_task()
        assert task is not None
        self._streams.pop(task, None)
        if len(self._leaving) >= STREAMS:
            return
        self._leaving[task] = writer
        try:
            async with asyncio.timeout(LINGER_S):
                await self._refuse(answers, RefusalError(reason, detail))
                while await reader.read(LIMITS.read_chunk_bytes):
                    pass
        except (TimeoutError, OSError, RuntimeError):
            pass
        finally:
            del self._leaving[task]

    async def _refuse(self, answers: _Answers, refusal: RefusalError) -> None:
        await answers.write(Frame(Kind.REFUSED, {"protocol": self._protocol, **refusal.header}))

    async def _answer(self, frame: Frame, answers: _Answers, peer: str) -> None:
        """Answer one request. Raises RefusalError, FrameError, or what the stream raises."""
        if frame.kind is not Kind.FETCH:
            raise FrameError("kind", f"a fetch was expected, got {frame.kind}")
        header = frame.header
        # Compared before anything else is looked at: another version may have other fields.
        if (protocol := need_count(header, "protocol", 2**31)) != self._protocol:
            raise RefusalError(Refused.PROTOCOL, f"version {self._protocol} is spoken here, not {protocol}")
        run_id, run = self._find_run(need(header, "run", str))
        want = need(header, "want", str)
        if want == "manifest":
            await self._send_document(answers, run_id, run.manifest)
            return
        name = need(header, "name", str)
        file = run.files.get(name) if len(name) <= NAME_CHARACTERS else None
        if file is None:
            raise RefusalError(Refused.UNKNOWN_NAME, f"no file {name[:NAME_CHARACTERS]!r} is served here")
        is_urgent = file.is_urgent is not None and file.is_urgent(peer)
        answers.hurry(is_urgent)
        if want == "meta":
            document = (await self._hashes(name, file)).model_dump_json().encode()
            await self._send_document(answers, run_id, document)
        elif want == "chunks":
            first = need_count(header, "first", LIMITS.artifact_bytes // ARTIFACT_CHUNK_BYTES)
            count = need_count(header, "count", CHUNKS_PER_REQUEST)
            answers.pace(header)
            most = TRANSFERS if is_urgent else self._most_transfers
            await self._send_chunks(answers, name, file, first, count, most)
        else:
            raise FrameError("header", f"field 'want': {want[:40]!r} is none of manifest, meta, chunks")

    def _find_run(self, run_id: str) -> tuple[str, _Run]:
        if run_id in self._runs:
            return run_id, self._runs[run_id]
        if not run_id and len(self._runs) == 1:
            return next(iter(self._runs.items()))
        runs = [{"run": key, "name": run.name} for key, run in list(self._runs.items())[:32]]
        if not run_id and runs:
            raise RefusalError(Refused.SEVERAL_RUNS, f"{len(self._runs)} runs are served here", runs=runs)
        raise RefusalError(Refused.UNKNOWN_RUN, f"run {run_id[:40] or '(any)'} is not served here", runs=runs)

    # -- what is sent --------------------------------------------------------------------------------

    async def _send_document(self, answers: _Answers, run_id: str, data: bytes) -> None:
        common = {"nbytes": len(data), "protocol": self._protocol, "run": run_id}
        view = memoryview(data)
        for index, offset in enumerate(range(0, len(data), LIMITS.transfer_chunk_bytes)):
            piece = view[offset : offset + LIMITS.transfer_chunk_bytes]
            await answers.write(Frame(Kind.CHUNK, {"index": index, **common}, [piece]))

    async def _send_chunks(
        self, answers: _Answers, name: str, file: _File, first: int, count: int, most: int
    ) -> None:
        if self._transfers >= most:
            raise RefusalError(Refused.BUSY, f"{self._transfers} transfers are under way")
        self._transfers += 1
        descriptor = -1
        try:
            try:
                descriptor, nbytes = await asyncio.to_thread(_open, file.path)
            except OSError as error:
                raise _unreadable(name, file.path, error) from error
            if file.nbytes is not None and nbytes != file.nbytes:
                raise RefusalError(Refused.MISSING, f"{name} is here with {nbytes} of {file.nbytes} bytes")
            chunks = -(-nbytes // ARTIFACT_CHUNK_BYTES)
            if first + count > chunks:
                raise RefusalError(Refused.RANGE, f"{name} has {chunks} chunks, asked for {first}+{count}")
            for index in range(first, first + count):
                offset = index * ARTIFACT_CHUNK_BYTES
                size = min(ARTIFACT_CHUNK_BYTES, nbytes - offset)
                try:
                    data = await asyncio.to_thread(os.pread, descriptor, size, offset)
                except OSError as error:
                    raise _unreadable(name, file.path, error) from error
                if len(data) != size:
                    raise RefusalError(Refused.FAILED, f"{name} became shorter while it was read")
                await answers.write(Frame(Kind.CHUNK, {"index": index}, [memoryview(data)]))
        finally:
            self._transfers -= 1
            if descriptor >= 0:
                os.close(descriptor)

    async def _hashes(self, name: str, file: _File) -> Artifact:
        """The file's size and hashes: those of the manifest, or computed once, in a thread."""
        if file.artifact is not None:
            return file.artifact
        if file.hashing is None:
            file.hashing = asyncio.create_task(asyncio.to_thread(_describe, file, name))
        task = file.hashing  # several requests may wait for the same one
        done, _ = await asyncio.wait([task], timeout=HASHING_PATIENCE_S)
        if not done:
            raise RefusalError(Refused.BUSY, f"the hash list of {name} is being computed")
        if task.cancelled():
            raise RefusalError(Refused.UNKNOWN_NAME, f"{name} is not served any more")
        file.hashing = None
        try:
            file.artifact = task.result()
        except OSError as error:
            raise _unreadable(name, file.path, error) from error
        except ValueError as error:
            logger.error("cannot make %s, which this peer serves: %s", file.path, error)
            raise RefusalError(Refused.FAILED, f"{name} cannot be made") from error
        return file.artifact


def _describe(file: _File, name: str) -> Artifact:
    """Make a file if need be, and hash it. Raises OSError, ValueError."""
    if file.make is not None and not file.path.exists():
        file.make()
    return Artifact.of(file.path, name)


def _open(path: Path) -> tuple[int, int]:
    """Open a file for reading; returns the descriptor and the file's size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return descriptor, os.fstat(descriptor).st_size


def _unreadable(name: str, path: Path, error: OSError) -> RefusalError:
    """The refusal for a file that cannot be read: gone is normal, anything else is said aloud."""
    if isinstance(error, FileNotFoundError):
        return RefusalError(Refused.MISSING, f"{name} is not here")
    logger.error("cannot read %s, which this peer serves: %s", path, error)
    return RefusalError(Refused.FAILED, f"{name} cannot be read: {error.strerror}")
