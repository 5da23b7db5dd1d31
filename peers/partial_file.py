"""A file that is being fetched: it grows in `<target>.partial`, verified chunk by chunk, and is then renamed.

There is no list of what is there: the hashes say it. After a restart the file is hashed once, and every
chunk that matches is kept. All methods touch the disk and are called in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from pathlib import Path
from typing import Self

from swarm.manifest import ARTIFACT_CHUNK_BYTES, Artifact

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk, an exhausted quota, and a file size limit."""


class PartialFile:
    """The chunks of a file that have come so far. missing: indices of those that have not, after `expect`."""

    def __init__(self, target: Path, path: Path, descriptor: int, *, is_private: bool) -> None:
        self.target = target
        self.path = path
        self.artifact: Artifact | None = None
        self.missing: set[int] = set()
        self._missing_bytes = 0
        self._descriptor = descriptor
        self._is_private = is_private
        # A cancelled fetch closes the file while its last write may still run in a thread; a descriptor
        # closed under a write could by then be another file's.
        self._lock = threading.Lock()

    @classmethod
    def open(cls, target: Path) -> Self:
        """Open and lock the partial file of `target`, and make its folder. Raises OSError.

        While another process fetches the same file, a private partial file is used instead.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        path = target.with_name(f"{target.name}.partial")
        is_private = False
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The other process may have renamed it between our open and our lock.
                if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return cls(target, path, descriptor, is_private=is_private)
                os.close(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                path = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
                is_private = True
            except BaseException:
                os.close(descriptor)
                raise

    @property
    def done_bytes(self) -> int:
        """Verified bytes of the file that is expected."""
        return 0 if self.artifact is None else self.artifact.nbytes - self._missing_bytes

    def expect(self, artifact: Artifact) -> None:
        """Take this as the file to come: find out which of its chunks are there.

        Raises OSError, with ENOSPC also when the rest would not fit on the disk.
        """
        os.ftruncate(self._descriptor, min(artifact.nbytes, os.fstat(self._descriptor).st_size))
        missing = set()
        for index in range(len(artifact.chunks)):
            data = os.pread(self._descriptor, chunk_bytes(artifact, index), index * ARTIFACT_CHUNK_BYTES)
            if hashlib.sha256(data).hexdigest() != artifact.chunks[index]:
                missing.add(index)
        self.artifact, self.missing = artifact, missing
        self._missing_bytes = sum(chunk_bytes(artifact, index) for index in missing)
        free = shutil.disk_usage(self.target.parent).free
        if self._missing_bytes > free:
            raise OSError(errno.ENOSPC, f"{self._missing_bytes} more bytes are needed, {free} are free")

    def write(self, artifact: Artifact, index: int, data: memoryview) -> bool:
        """Write a chunk of the expected file at its place if its hash is right; says whether it was.

        Raises OSError, and ValueError once the file is closed.
        """
        if hashlib.sha256(data).hexdigest() != artifact.chunks[index]:
            return False
        offset = index * ARTIFACT_CHUNK_BYTES
        with self._lock:
            if self._descriptor < 0:
                raise ValueError(f"{self.path} is closed")
            while data.nbytes:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
        return True

    def mark(self, index: int) -> None:
        """Note that a chunk has been written. Called in the loop, unlike the rest."""
        assert self.artifact is not None
        if index in self.missing:
            self.missing.discard(index)
            self._missing_bytes -= chunk_bytes(self.artifact, index)

    def finish(self) -> None:
        """Give the complete file its name, durably. Raises OSError."""
        os.fsync(self._descriptor)
        self.path.replace(self.target)
        fsync_folder(self.target.parent)

    def close(self) -> None:
        """Let go of the file; what is in it stays for the next try. Harmless when repeated."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        if self._is_private:
            self.path.unlink(missing_ok=True)


def chunk_bytes(artifact: Artifact, index: int) -> int:
    """Bytes of a chunk of the file."""
    return min(ARTIFACT_CHUNK_BYTES, artifact.nbytes - index * ARTIFACT_CHUNK_BYTES)


def is_complete(path: Path, artifact: Artifact) -> bool:
    """Whether the file is there with the artifact's bytes. Raises OSError other than its absence."""
    try:
        return path.stat().st_size == artifact.nbytes and Artifact.of(path, artifact.name) == artifact
    except FileNotFoundError:
        return False


def fsync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
