"""Checkpoints of one stage on disk: complete or absent, hashed, the newest few kept.

A checkpoint is a safetensors file `<run>-stage-<s>-version-<v>.safetensors`. Its metadata holds one JSON
object, `checkpoint`: format, run id, stage, version, the caller's own `meta`, and a sha256 over the whole file
with the digits of the hash itself written as zeros. It is written tensor by tensor, so that a stage's state is
never held twice, to a temporary file that takes its name only when everything is on the disk. A file that
fails its hash is set aside as `.corrupt`, said aloud and counted, and the one before it is taken.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peers.config import UserError
from peers.frames import tensor_bytes
from peers.partial_file import NO_ROOM, fsync_folder

logger = logging.getLogger("swarm_peer.checkpoint")

FORMAT = 1
HEADER_BYTES = 100_000_000
"""Largest header that safetensors reads."""
RUN_CHARACTERS = 16
"""Characters of the run id in a file name; the whole id stands in the file."""
SWEEP_AGE_S = 60.0
_READ_BYTES = 4 * 1024 * 1024
_KEY = "checkpoint"
_LENGTH = struct.Struct("<Q")
_BLANK = b"0" * 64
_HASH_FIELD = b'\\"sha256\\": \\"'
_NAME = re.compile(
    r"^(?P<run>[0-9A-Za-z]{1,16})-stage-(?P<stage>\d{1,6})-version-(?P<version>\d{1,12})\.safetensors$"
)
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; the message says why and what to do."""


class CheckpointInfo(BaseModel):
    """What a checkpoint says about itself. meta: the caller's own entries (step, tokens, seeds...)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = Field(ge=FORMAT, le=FORMAT)
    run_id: str = Field(min_length=1, max_length=128)
    stage: int = Field(ge=0)
    version: int = Field(ge=0)
    meta: dict[str, Any]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory: its tensors on the CPU, by name."""

    path: Path
    info: CheckpointInfo
    tensors: dict[str, Tensor]

    @property
    def version(self) -> int:
        """Steps that have been applied to these weights."""
        return self.info.version

    @property
    def meta(self) -> dict[str, Any]:
        """What the caller of `save` gave."""
        return self.info.meta


class CheckpointStore:
    """The checkpoints in one folder. corrupt: how many were set aside since this object was made.

    keep: checkpoints kept per run and stage. Raises CheckpointError if the folder cannot be made.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"keep {keep}: at least one checkpoint must be kept")
        self.directory = directory
        self.keep = keep
        self.corrupt = 0
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

    def save(self, version: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write a checkpoint durably and drop those beyond `keep`; the tensors must not change meanwhile.

        meta: must hold `run_id` (str) and `stage` (int); the rest is anything that JSON can hold.
        Raises CheckpointError if it cannot be written: the earlier ones and nothing else are left. Raises
        ValueError for a meta without run and stage, or a tensor that safetensors cannot hold.
        """
        more = dict(meta)
        run_id, stage = more.pop("run_id", None), more.pop("stage", None)
        if not isinstance(run_id, str) or not isinstance(stage, int):
            raise ValueError(f"meta needs run_id (str) and stage (int), got {run_id!r} and {stage!r}")
        info = CheckpointInfo(
            format=FORMAT, run_id=run_id, stage=stage, version=version, meta=more, sha256=_BLANK.decode()
        )
        path = self.path(version, stage, run_id)
        if path.parent != self.directory or _NAME.match(path.name) is None:
            raise ValueError(f"run {run_id!r}, stage {stage}, version {version} make no file name")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells a sweep that somebody writes it
                _write(file, info, tensors)
            temporary.replace(path)
            fsync_folder(self.directory)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._cannot_save(version, tensors, error) from error
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        for _, old in sorted(self._found(stage, run_id))[: -self.keep]:
            if old != path:
                old.unlink(missing_ok=True)
        return path

    def load_newest(self, stage: int, run_id: str) -> Checkpoint | None:
        """The newest checkpoint of this stage and run that is whole; None if there is none.

        One that is not whole is set aside, logged and counted. Raises CheckpointError if a file cannot be
        read at all (permissions, a failing disk): that says nothing about what it holds.
        """
        for version, path in sorted(self._found(stage, run_id), reverse=True):
            try:
                checkpoint = read_checkpoint(path)
            except FileNotFoundError:
                continue  # another peer that shares the folder has dropped it
            except ValueError as error:
                self._set_aside(path, str(error))
                continue
            except OSError as error:
                raise CheckpointError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
            info = checkpoint.info
            if info.run_id == run_id and (info.stage, info.version) == (stage, version):
                return checkpoint
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
        logger.error(
            "checkpoint %s is damaged (%s): set aside as %s, an older one is tried", path, why, aside.name
        )
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
        """Remove temporary files whose writers were killed; those being written are locked."""
        for path in self.directory.glob(".*.safetensors.*.tmp"):
            with suppress(OSError), path.open("rb") as file:
                if time.time() - path.stat().st_mtime < SWEEP_AGE_S:
                    continue  # perhaps just opened, and not locked yet
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint file, wherever it came from.

    Raises ValueError saying what is wrong with it (truncated, changed, not a checkpoint), OSError if it cannot
    be read.
    """
    with path.open("rb") as file:
        info = _read_info(file, path)
        size = path.stat().st_size
    try:
        tensors = load_file(path, device="cpu")
    except SafetensorError as error:
        raise ValueError(f"no safetensors file of {size} bytes: {error}") from error
    return Checkpoint(path, info, tensors)


def _write(file: BinaryIO, info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and put the hash of what was written into its place. Raises OSError."""
    # Wide types first, as safetensors orders them: every tensor then starts at a multiple of its item size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r}: {tensor.dtype} has no place in a checkpoint")
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header["__metadata__"] = {_KEY: json.dumps(info.model_dump(), allow_nan=False)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes: safetensors reads {HEADER_BYTES}")
    head = _LENGTH.pack(len(text)) + text
    _reserve(file.fileno(), len(head) + offset)
    digest = hashlib.sha256(head)
    file.write(head)
    for name in order:
        data = tensor_bytes(tensors[name].detach().cpu().contiguous())
        digest.update(data)
        file.write(data)
    file.seek(_hash_offset(head))
    file.write(digest.hexdigest().encode())
    file.flush()
    os.fsync(file.fileno())


def _reserve(descriptor: int, nbytes: int) -> None:
    """Take the room now: a full disk shows before gigabytes have been written. Raises OSError."""
    if not hasattr(os, "posix_fallocate"):
        return  # macOS
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:  # a file system that cannot reserve
            raise


def _hash_offset(head: bytes) -> int:
    """Where the digits of the hash stand in the file. Raises ValueError if they do not."""
    # Tensor names and the caller's meta come before it and could hold such a field too: the last one is ours.
    start = head.rfind(_HASH_FIELD)
    if start < 0:
        raise ValueError("no checkpoint of a stage: its header holds no hash")
    return start + len(_HASH_FIELD)


def _read_info(file: BinaryIO, path: Path) -> CheckpointInfo:
    """What the file says about itself, once its hash has proved right. Raises ValueError."""
    size = path.stat().st_size
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size or (length := _LENGTH.unpack(head)[0]) > min(
        HEADER_BYTES, size - _LENGTH.size
    ):
        raise ValueError(f"truncated or no safetensors file ({size} bytes)")
    head += file.read(length)
    place = _hash_offset(head)
    digest = hashlib.sha256(head[:place] + _BLANK + head[place + len(_BLANK) :])
    while data := file.read(_READ_BYTES):
        digest.update(data)
    try:
        info = CheckpointInfo.model_validate_json(json.loads(head[_LENGTH.size :])["__metadata__"][_KEY])
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no checkpoint of a stage: {str(error)[:200]}") from error
    if digest.hexdigest() != info.sha256:
        raise ValueError("its bytes do not match its hash: truncated or changed")
    return info
