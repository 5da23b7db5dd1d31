"""Fetching a run's files: manifest, artifacts, snapshots; verified as they come, resumable, from any holder.

A file grows in `<target>.partial`, chunk by chunk, each checked against its hash before it is written. When
one holder fails the next goes on from there; the finished file takes its name by rename. A holder whose bytes
do not match, or that does not know the file, is not asked again; one that is busy or away is.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NoReturn

from hivemind.p2p import P2P
from pydantic import ValidationError

from peers.config import UserError
from peers.fetch_stream import FetchStream, HolderError, open_fetch_stream
from peers.fileserver import CHUNKS_PER_REQUEST, HASHING_PATIENCE_S, FileServer, snapshot_name
from peers.limits import LIMITS, MIB
from peers.partial_file import NO_ROOM, PartialFile, is_complete
from peers.traffic import Traffic
from swarm.manifest import Artifact

__all__ = [
    "FileServer",
    "TransferError",
    "fetch_artifact",
    "fetch_by_hash",
    "fetch_copy",
    "fetch_manifest",
    "fetch_snapshot",
    "snapshot_name",
]

MANIFEST_BYTES = 64 * MIB
HASH_LIST_BYTES = 64 * MIB
BUSY_PATIENCE_S = 900.0
"""How long holders that answer "busy" are asked again while nothing moves."""
RETRY_FIRST_S = 0.25
REQUESTS_AHEAD = 2
"""Requests under way on a stream: the next one's round trip hides behind this one's chunks."""
CHANGES_OF_COPY = 16
"""A snapshot whose holder had to be changed this often, each with a copy of its own, is given up."""

Holders = Sequence[str] | Callable[[], Awaitable[Sequence[str]]]
"""Peer ids (base58) that may have the file, in the order to ask; or a way to look them up again."""
Progress = Callable[[int, int], None]
"""Called in the loop with (verified bytes, bytes of the file), first with what was there already."""


class TransferError(UserError):
    """Nobody gave the file, or it could not be kept. causes: what each holder (peer id) failed with."""

    def __init__(self, message: str, causes: dict[str, str] | None = None) -> None:
        self.causes = dict(causes or {})
        listed = "".join(f"\n  {peer}: {cause}" for peer, cause in self.causes.items())
        super().__init__(message + (":" + listed if listed else ""))


async def fetch_manifest(
    p2p: P2P, peer_id: str, run_id: str | None, deadline_s: float, traffic: Traffic | None = None
) -> bytes:
    """The manifest of a run (None: of the only run the peer serves), in wire form, not yet verified.

    Raises TransferError with the cause: not reachable, another protocol version (both are named), an unknown
    run, several runs (all are listed), or nothing complete within `deadline_s`.
    """
    cause = f"nothing complete within {deadline_s:g} s"
    try:
        async with (
            asyncio.timeout(deadline_s),
            open_fetch_stream(p2p, peer_id, deadline_s, traffic) as stream,
        ):
            await stream.ask("manifest", run_id or "")
            return await stream.document(MANIFEST_BYTES)
    except HolderError as error:
        cause = str(error)
    except TimeoutError:
        pass
    which = "a manifest" if run_id is None else f"the manifest of run {run_id}"
    raise TransferError(f"could not get {which}", {peer_id: cause})


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
    try:
        is_there = await asyncio.to_thread(is_complete, target, artifact)
    except OSError as error:
        raise TransferError(f"cannot read {target}: {error.strerror}") from error
    if not is_there:
        await transfer.run(holders)
    elif progress is not None:
        progress(artifact.nbytes, artifact.nbytes)
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

    Replicas' snapshots may differ by rounding: see `fetch_copy`.
    """
    return await fetch_copy(
        p2p,
        holders,
        run_id,
        snapshot_name(version, stage),
        target,
        progress=progress,
        deadline_idle_s=deadline_idle_s,
        traffic=traffic,
        limit_bytes=limit_bytes,
    )


async def fetch_copy(
    p2p: P2P,
    holders: Holders,
    run_id: str,
    name: str,
    target: Path,
    *,
    progress: Progress | None = None,
    deadline_idle_s: float = LIMITS.fetch_idle_s,
    traffic: Traffic | None = None,
    limit_bytes: int = LIMITS.artifact_bytes,
) -> str:
    """Fetch a file of which every holder has a copy of its own, wholly from one; returns that holder's peer id.

    Each holder's own hash list is asked for first: on a change of holder only chunks that match the new one's list
    are kept. Raises TransferError as `fetch_artifact` does; a file of over `limit_bytes` is refused.
    """
    transfer = _Transfer(p2p, run_id, name, target, deadline_idle_s, traffic, progress, limit_bytes)
    return await transfer.run(holders)


async def fetch_by_hash(
    p2p: P2P,
    holders: Holders,
    run_id: str,
    name: str,
    sha256: str,
    target: Path,
    *,
    deadline_idle_s: float = LIMITS.fetch_idle_s,
    traffic: Traffic | None = None,
    limit_bytes: int = LIMITS.artifact_bytes,
    is_urgent: Callable[[], bool] = bool,
) -> Path:
    """Fetch a file of which only name and hash (hex) are known to `target`; returns `target`.

    is_urgent: whether it passes this peer's cap before all other bulk, asked for each chunk; what the holder's cap
    does, the holder decides.
    Holders whose own hash list is of another file, or lies about the whole file's hash, are not asked again: what
    came under such a list is deleted, and the next holder is asked. Raises TransferError as `fetch_artifact` does.
    """
    liars: dict[str, str] = {}
    try:
        while not await asyncio.to_thread(_is_file_of, target, sha256):
            await asyncio.to_thread(target.unlink, missing_ok=True)
            transfer = _Transfer(p2p, run_id, name, target, deadline_idle_s, traffic, None, limit_bytes)
            transfer.expected, transfer.is_urgent, transfer.refused = sha256, is_urgent, liars
            holder = await transfer.run(holders)
            liars = {**liars, holder: "its hash list lies"}
    except OSError as error:
        raise TransferError(f"cannot read {target}: {error.strerror or error}") from error
    return target


def _is_file_of(path: Path, sha256: str) -> bool:
    """Whether there is a file with this hash. Raises OSError if there is one that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


class _Transfer:
    """One file on its way. fixed: its hashes if the manifest names them, else each holder's are asked for.

    expected: hash of the whole file, where that is known. refused: peers that are not asked, and why.
    """

    def __init__(
        self,
        p2p: P2P,
        run_id: str,
        name: str,
        target: Path,
        idle_s: float,
        traffic: Traffic | None,
        progress: Progress | None,
        limit_bytes: int,
    ) -> None:
        self.fixed: Artifact | None = None
        self.expected: str | None = None
        self.is_urgent: Callable[[], bool] = bool
        self.refused: Mapping[str, str] = {}
        self._p2p, self._run_id, self._name, self._target = p2p, run_id, name, target
        self._idle_s, self._traffic, self._progress = idle_s, traffic, progress
        self._limit_bytes = limit_bytes
        self._file: PartialFile
        self._verified = 0
        self._copies = 0

    async def run(self, holders: Holders) -> str:
        """Fetch from whoever gives; returns the last holder's peer id. Raises TransferError."""
        try:
            self._file = await asyncio.to_thread(PartialFile.open, self._target)
        except OSError as error:
            self._cannot_write(error)
        try:
            holder = await self._from_any(holders)
            await asyncio.to_thread(self._file.finish)
            return holder
        except OSError as error:
            self._cannot_write(error)
        finally:
            self._file.close()

    # -- whom to ask ---------------------------------------------------------------------------------

    async def _from_any(self, holders: Holders) -> str:
        """Ask one holder after another, again and again, until the file is whole. Raises TransferError."""
        causes: dict[str, str] = dict(self.refused)
        hopeless = {self._p2p.peer_id.to_base58(), *self.refused}
        moved_at = idle_since = time.monotonic()
        pause = RETRY_FIRST_S
        idle_rounds = 0
        while True:
            found = list(await holders()) if callable(holders) else list(holders)
            before = self._verified
            is_busy = False
            for peer in found:
                if peer in hopeless:
                    continue
                try:
                    await self._from_holder(peer)
                    return peer
                except HolderError as error:
                    causes[peer] = str(error)
                    is_busy = is_busy or error.is_busy
                    if error.is_final:
                        hopeless.add(peer)
            now = time.monotonic()
            idle_rounds += 1
            if self._verified > before:
                moved_at = idle_since = now
                pause = RETRY_FIRST_S
                idle_rounds = 0
            elif is_busy and now - moved_at < BUSY_PATIENCE_S:
                idle_since = now
            nobody_left = not callable(holders) and hopeless.issuperset(found)
            # Twice round at least: the first holder alone can use up the time by saying nothing.
            if nobody_left or (now - idle_since > self._idle_s and idle_rounds > 1):
                self._give_up(causes, 0.0 if nobody_left else now - moved_at)
            # Jitter, because a whole stage may wait for the same holder.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LIMITS.redial_ceiling_s)

    def _give_up(self, causes: dict[str, str], waited_s: float) -> NoReturn:
        artifact = self._file.artifact
        text = f"no holder gave {self._name} of run {self._run_id}"
        if waited_s:
            text += f" for {waited_s:.0f} s"
        if not causes:
            text += ": nobody offers it"
        if artifact is not None and (kept := len(artifact.chunks) - len(self._file.missing)):
            text += f" ({kept} of {len(artifact.chunks)} MiB are kept in {self._file.path} for the next try)"
        raise TransferError(text, causes)

    # -- one holder ----------------------------------------------------------------------------------

    async def _from_holder(self, peer: str) -> None:
        """Get all that is missing from one holder. Raises HolderError, TransferError, OSError (disk)."""
        artifact = self.fixed or await self._ask_hashes(peer)
        # The whole list is compared: one that lies about chunks must not outlive its holder.
        if self._file.artifact != artifact:
            self._copies += 1
            if self._copies > CHANGES_OF_COPY:
                raise TransferError(f"the holders of {self._name} fail one after another: try again later")
            await asyncio.to_thread(self._file.expect, artifact)
        self._report(artifact)
        queue = _ranges(sorted(self._file.missing))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(LIMITS.bulk_streams, len(queue))):
                    group.create_task(self._pull(peer, artifact, queue, is_extra=number > 0))
        except ExceptionGroup as errors:
            # Of several streams that failed together the first cause is as good as any.
            raise errors.exceptions[0] from errors
        if self._file.missing:
            raise HolderError("it was too busy for a second stream", is_busy=True)

    def _open(self, peer: str, idle_s: float) -> AbstractAsyncContextManager[FetchStream]:
        return open_fetch_stream(self._p2p, peer, idle_s, self._traffic, is_urgent=self.is_urgent)

    async def _ask_hashes(self, peer: str) -> Artifact:
        idle_s = self._idle_s + HASHING_PATIENCE_S
        async with self._open(peer, idle_s) as stream:
            await stream.ask("meta", self._run_id, name=self._name)
            document = await stream.document(HASH_LIST_BYTES)
        try:
            artifact = await asyncio.to_thread(Artifact.model_validate_json, document)
        except ValidationError as error:
            raise HolderError("it sent a malformed hash list", is_final=True) from error
        if artifact.name != self._name or artifact.nbytes > self._limit_bytes:
            cause = f"it offers {artifact.name} of {artifact.nbytes} bytes (limit {self._limit_bytes})"
            raise HolderError(cause, is_final=True)
        if self.expected not in (None, artifact.sha256):
            raise HolderError(f"its copy has another hash: {artifact.sha256[:12]}", is_final=True)
        return artifact

    async def _pull(self, peer: str, artifact: Artifact, queue: deque[list[int]], *, is_extra: bool) -> None:
        """Take ranges from the queue, over one stream, until it is empty."""
        asked: deque[list[int]] = deque()
        try:
            async with self._open(peer, self._idle_s) as stream:
                while queue or asked:
                    while queue and len(asked) < REQUESTS_AHEAD:
                        chunks = queue.popleft()
                        asked.append(chunks)
                        where = {"name": self._name, "first": chunks[0], "count": len(chunks)}
                        await stream.ask("chunks", self._run_id, **where)
                    for index in asked.popleft():
                        frame = await stream.chunk(index)
                        await self._keep(artifact, index, frame.data())
        except HolderError as error:
            if not (is_extra and error.is_busy):
                raise

    async def _keep(self, artifact: Artifact, index: int, data: memoryview) -> None:
        try:
            is_right = await asyncio.to_thread(self._file.write, artifact, index, data)
        except OSError as error:
            self._cannot_write(error)  # not left to the stream, which would take it for its own error
        if not is_right:
            raise HolderError(f"chunk {index} does not match its hash: its copy is corrupt", is_final=True)
        self._file.mark(index)
        self._verified += 1
        self._report(artifact)

    def _report(self, artifact: Artifact) -> None:
        if self._progress is not None:
            self._progress(self._file.done_bytes, artifact.nbytes)

    def _cannot_write(self, error: OSError) -> NoReturn:
        advice = "free some space or choose another folder" if error.errno in NO_ROOM else "see to the folder"
        text = f"cannot write {self._target}: {error.strerror or error}; {advice}, then start again"
        raise TransferError(text) from error


def _ranges(chunks: Sequence[int]) -> deque[list[int]]:
    """Cut sorted chunk indices into requests: neighbours together, and several requests for each stream."""
    size = max(1, min(CHUNKS_PER_REQUEST, len(chunks) // (4 * LIMITS.bulk_streams)))
    queue: deque[list[int]] = deque()
    for index in chunks:
        if queue and queue[-1][-1] == index - 1 and len(queue[-1]) < size:
            queue[-1].append(index)
        else:
            queue.append([index])
    return queue
