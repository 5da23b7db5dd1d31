"""Checkpoints of one stage on disk: complete or absent, hashed, the newest few kept.

A checkpoint is a file `<run>-stage-<s>-version-<v>.safetensors` (`checkpoint_file`). It is written tensor by
tensor, so that a stage's state is never held twice, to a temporary file that takes its name only when
everything is on the disk. A file that fails its hash is set aside as `.corrupt`, said aloud and counted, and
the one before it is taken. Beside the newest few of the versions at which all replicas keep one, a single other
one is kept: what a peer saved when it left, or when it began anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from peers.checkpoint_file import (
    BLANK,
    FORMAT,
    Checkpoint,
    CheckpointError,
    CheckpointInfo,
    lineage_of,
    read_checkpoint,
    read_info,
    write_file,
)
from peers.partial_file import NO_ROOM, fsync_folder

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointStore",
    "lineage_of",
    "read_checkpoint",
    "read_info",
]

logger = logging.getLogger("swarm_peer.checkpoint")
R = TypeVar("R")

RUN_CHARACTERS = 16
"""Characters of the run id in a file name; the whole id stands in the file."""
SWEEP_AGE_S = 60.0
PARTIAL_AGE_S = 24 * 3600.0
"""A half fetched snapshot that nobody has gone on with for so long is removed."""
_ABANDONED = ".abandoned"
_NAME = re.compile(
    r"^(?P<run>[0-9A-Za-z]{1,16})-stage-(?P<stage>\d{1,6})-version-(?P<version>\d{1,12})\.safetensors$"
)


class CheckpointStore:
    """The checkpoints in one folder. corrupt: how many were set aside since this object was made; damaged: what to
    tell the user of those, until somebody has.

    keep: checkpoints kept per run and stage. Raises CheckpointError if the folder cannot be made.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"keep {keep}: at least one checkpoint must be kept")
        self.directory = directory
        self.keep = keep
        self.corrupt = 0
        self.damaged: deque[str] = deque(maxlen=8)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise CheckpointError(
                f"cannot use {directory} for checkpoints: {error.strerror}; choose another --checkpoint-dir"
            ) from error

    def path(self, version: int, stage: int, run_id: str) -> Path:
        """Where this checkpoint is, or would be."""
        return self.directory / f"{run_id[:RUN_CHARACTERS]}-stage-{stage}-version-{version:08d}.safetensors"

    def versions(self, stage: int | None = None, run_id: str | None = None) -> list[int]:
        """Versions on disk, the oldest first; of one stage, of one run, or of all. Names only: not verified."""
        return sorted({version for version, _ in self._found(stage, run_id)})

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        is_snapshot: Callable[[int], bool] = lambda version: True,
    ) -> Path:
        """Write a checkpoint durably and drop those beyond `keep`; the tensors must not change meanwhile.

        meta: must hold `run_id` (str) and `stage` (int); the rest is anything that JSON can hold. is_snapshot: at
        which versions all replicas keep one; of others only the newest is kept, while it is of use.
        Raises CheckpointError if it cannot be written: the earlier ones and nothing else are left. Raises
        ValueError for a meta without run and stage, or a tensor that safetensors cannot hold.
        """
        more = dict(meta)
        run_id, stage = more.pop("run_id", None), more.pop("stage", None)
        if not isinstance(run_id, str) or not isinstance(stage, int):
            raise ValueError(f"meta needs run_id (str) and stage (int), got {run_id!r} and {stage!r}")
        info = CheckpointInfo(
            format=FORMAT, run_id=run_id, stage=stage, version=version, meta=more, sha256=BLANK.decode()
        )
        path = self.path(version, stage, run_id)
        if path.parent != self.directory or _NAME.match(path.name) is None:
            raise ValueError(f"run {run_id!r}, stage {stage}, version {version} make no file name")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells a sweep that somebody writes it
                write_file(file, info, tensors)
            temporary.replace(path)
            fsync_folder(self.directory)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._cannot_save(version, tensors, error) from error
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        found = sorted(self._found(stage, run_id))
        snapshots = [item for item in found if is_snapshot(item[0])]
        kept = snapshots[-self.keep :]
        kept += [item for item in found if item not in snapshots and item[0] > min(kept, default=(-1,))[0]][
            -1:
        ]
        for item in found:
            if item not in kept and item[1] != path:
                item[1].unlink(missing_ok=True)
        return path

    def load(self, stage: int, run_id: str, version: int) -> Checkpoint | None:
        """This very checkpoint, if it is there and whole. Otherwise as `load_newest`."""
        for found, path in self._found(stage, run_id):
            if found == version and (checkpoint := self._load(path, stage, run_id, version)) is not None:
                return checkpoint
        return None

    def verify(self, stage: int, run_id: str, version: int) -> CheckpointInfo | None:
        """What a checkpoint says of itself, once its hash has proved right; None if it is gone or is none.

        Its tensors are not kept in memory. Sets aside and raises as `load_newest` does.
        """
        path = self.path(version, stage, run_id)
        return self._checked(path, stage, run_id, version, lambda: read_info(path), lambda info: info)

    def set_aside_all(self, stage: int, run_id: str, but: int) -> None:
        """Rename all versions but one to `.abandoned`: they are of a lineage that the stage gave up.

        Those set aside the last time are removed. Raises nothing: what cannot be renamed stays.
        """
        for path in self.directory.glob(f"{run_id[:RUN_CHARACTERS]}-stage-{stage}-version-*{_ABANDONED}"):
            with suppress(OSError):
                path.unlink()
        for version, path in self._found(stage, run_id):
            if version != but:
                with suppress(OSError):
                    path.replace(path.with_name(path.name + _ABANDONED))

    def load_newest(self, stage: int, run_id: str) -> Checkpoint | None:
        """The newest checkpoint of this stage and run that is whole; None if there is none.

        One that is not whole is set aside, logged and counted. Raises CheckpointError if a file cannot be
        read at all (permissions, a failing disk): that says nothing about what it holds.
        """
        for version, path in sorted(self._found(stage, run_id), reverse=True):
            if (checkpoint := self._load(path, stage, run_id, version)) is not None:
                return checkpoint
        return None

    def _load(self, path: Path, stage: int, run_id: str, version: int) -> Checkpoint | None:
        return self._checked(
            path, stage, run_id, version, lambda: read_checkpoint(path), lambda checkpoint: checkpoint.info
        )

    def _checked(
        self,
        path: Path,
        stage: int,
        run_id: str,
        version: int,
        read: Callable[[], R],
        info_of: Callable[[R], CheckpointInfo],
    ) -> R | None:
        """What `read` gives, if it is this run's stage at this version; None if it is not, or is no more."""
        try:
            found = read()
        except FileNotFoundError:
            return None  # another peer that shares the folder has dropped it
        except ValueError as error:
            self._set_aside(path, str(error))
            return None
        except OSError as error:
            raise CheckpointError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
        info = info_of(found)
        if info.run_id == run_id and (info.stage, info.version) == (stage, version):
            return found
        logger.error(
            "%s holds run %s stage %d version %d: skipped", path, info.run_id, info.stage, info.version
        )
        return None

    def _found(self, stage: int | None, run_id: str | None) -> list[tuple[int, Path]]:
        found = []
        for path in self.directory.glob("*.safetensors"):
            match = _NAME.match(path.name)
            if match is None or (stage is not None and int(match["stage"]) != stage):
                continue
            if run_id is None or match["run"] == run_id[:RUN_CHARACTERS]:
                found.append((int(match["version"]), path))
        return found

    def _set_aside(self, path: Path, why: str) -> None:
        self.corrupt += 1
        aside = path.with_name(path.name + ".corrupt")
        text = f"checkpoint {path} is damaged ({why}): set aside as {aside.name}, an older one is tried"
        logger.error("%s", text)
        self.damaged.append(text)
        with suppress(OSError):
            path.replace(aside)

    def _cannot_save(self, version: int, tensors: Mapping[str, Tensor], error: OSError) -> CheckpointError:
        kept = len(self._found(None, None))
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        is_full = error.errno in NO_ROOM
        advice = "free some space or choose another --checkpoint-dir" if is_full else "see to the folder"
        return CheckpointError(
            f"cannot write the checkpoint of version {version} ({size:.0f} MB) to {self.directory}: "
            f"{error.strerror or error}; {advice} ({kept} earlier ones are kept)"
        )

    def _sweep(self) -> None:
        """Remove what killed writers and forgotten fetches left; what is being written is locked."""
        old = [(path, SWEEP_AGE_S) for path in self.directory.glob(".*.safetensors.*.tmp")]
        old += [(path, PARTIAL_AGE_S) for path in self.directory.glob("*-version-*.partial")]
        for path, age_s in old:
            with suppress(OSError), path.open("rb") as file:
                if time.time() - path.stat().st_mtime < age_s:
                    continue  # perhaps just opened, and not locked yet
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
