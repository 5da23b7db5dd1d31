"""A checkpoint file: an ordinary safetensors file that says what it is and carries its own hash.

Its metadata holds one JSON object, `checkpoint`: format, run id, stage, version, the writer's own `meta`, and a
sha256 over the whole file with the digits of the hash itself written as zeros.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Mapping
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

FORMAT = 1
HEADER_BYTES = 100_000_000
"""Largest header that safetensors reads."""
LINEAGE_CHARACTERS = 64
BLANK = b"0" * 64
"""Stands where the hash will be."""
_READ_BYTES = 4 * 1024 * 1024
_KEY = "checkpoint"
_LENGTH = struct.Struct("<Q")
_HASH_FIELD = b'\\"sha256\\": \\"'
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

    @property
    def lineage(self) -> str:
        """Lineage of the weights, "" if it names none."""
        return lineage_of(self.info)


def lineage_of(info: CheckpointInfo) -> str:
    """Lineage of a checkpoint's weights, "" if it names none."""
    lineage = info.meta.get("lineage", "")
    return lineage[:LINEAGE_CHARACTERS] if isinstance(lineage, str) else ""


def read_info(path: Path) -> CheckpointInfo:
    """Verify a checkpoint file without its tensors in memory. Raises as `read_checkpoint` does."""
    with path.open("rb") as file:
        return _read_info(file, path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint file, wherever it came from.

    Raises ValueError saying what is wrong with it (truncated, changed, not a checkpoint), OSError if it cannot
    be read.
    """
    info = read_info(path)
    size = path.stat().st_size
    try:
        tensors = load_file(path, device="cpu")
    except SafetensorError as error:
        raise ValueError(f"no safetensors file of {size} bytes: {error}") from error
    return Checkpoint(path, info, tensors)


def write_file(file: BinaryIO, info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> None:
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
    digest = hashlib.sha256(head[:place] + BLANK + head[place + len(BLANK) :])
    while data := file.read(_READ_BYTES):
        digest.update(data)
    try:
        info = CheckpointInfo.model_validate_json(json.loads(head[_LENGTH.size :])["__metadata__"][_KEY])
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no checkpoint of a stage: {str(error)[:200]}") from error
    if digest.hexdigest() != info.sha256:
        raise ValueError("its bytes do not match its hash: truncated or changed")
    return info
