"""The wire format of a link: one frame is an 8-byte prefix, a msgpack header and a raw payload.

    u32 header bytes | u32 payload bytes | header (msgpack map) | payload (little-endian tensors, joined)

The receiver compares both sizes with its limits before it reads on, and checks the header against the
schema of its kind. Payloads go into a buffer of their own, so tensors are views of it (`torch.frombuffer`):
every tensor starts at a 16-byte boundary of the payload. No pickle, ever.
"""

from __future__ import annotations

import gc
import re
import reprlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgpack
import numpy as np
import torch
from torch import Tensor

from peers.limits import LIMITS

PREFIX = struct.Struct("<II")
ALIGNMENT = 16

T = TypeVar("T")


class Kind(StrEnum):
    """What a frame is. One name per thing, on the wire, in the metrics and in the documentation."""

    HELLO = "hello"
    HEARTBEAT = "heartbeat"
    BYE = "bye"
    CREDIT = "credit"
    FORWARD = "forward"
    GRADIENT = "gradient"
    ACCEPTED = "accepted"
    BUSY = "busy"
    REFUSED = "refused"
    PLAN = "plan"
    ASSIGN = "assign"
    STEP_END = "step_end"
    QUERY = "query"
    ANSWER = "answer"
    PROPOSE = "propose"
    ACKNOWLEDGE = "acknowledge"
    START = "start"
    READY = "ready"
    FOLLOW = "follow"
    FENCE = "fence"
    MISSING = "missing"
    ARRIVE = "arrive"
    GROUP = "group"
    PART = "part"
    AVERAGE = "average"
    SLICE = "slice"
    FAILED = "failed"
    DIGEST = "digest"
    COMMIT = "commit"
    FETCH = "fetch"
    CHUNK = "chunk"
    PASS = "pass"
    DENSE = "dense"


class Priority:
    """Order of bulk frames waiting for the same link: smaller goes first."""

    CONTROL = 0
    GRADIENT = 1
    ACTIVATION = 2
    AVERAGING = 3
    STATE = 4


BULK_PRIORITY: Mapping[Kind, int] = {
    Kind.GRADIENT: Priority.GRADIENT,
    Kind.FORWARD: Priority.ACTIVATION,
    Kind.PART: Priority.AVERAGING,
    Kind.AVERAGE: Priority.AVERAGING,
    Kind.SLICE: Priority.AVERAGING,
    Kind.CHUNK: Priority.STATE,
    Kind.DENSE: Priority.STATE,
}
"""Kinds that travel on bulk streams; every other kind is control."""


LONG_HEADERS = frozenset(
    {
        Kind.PLAN,
        Kind.PROPOSE,
        Kind.START,
        Kind.ASSIGN,
        Kind.ARRIVE,
        Kind.GROUP,
        Kind.COMMIT,
        Kind.MISSING,
        Kind.ANSWER,
        Kind.REFUSED,
    }
)
"""Kinds that carry a plan, a ledger, a roster or a text for people; every other header is short."""


class FrameError(ValueError):
    """A frame the protocol does not allow. `reason` is a short bounded label for the metrics."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(slots=True)
class Frame:
    """One message. header: map without the kind. payload: the received bytes, or buffers to send."""

    kind: Kind
    header: dict[str, Any] = field(default_factory=dict)
    payload: Sequence[memoryview] = ()

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(part.nbytes for part in self.payload)

    def data(self) -> memoryview:
        """The payload of a received frame."""
        return self.payload[0] if self.payload else memoryview(b"")

    def encode_head(self) -> bytes:
        """Prefix and header, ready to be followed by the payload's buffers."""
        header: bytes = msgpack.packb({"kind": self.kind.value, **self.header})
        return PREFIX.pack(len(header), self.payload_bytes) + header


def decode_header(data: bytes | memoryview) -> tuple[Kind, dict[str, Any]]:
    """Parse a header. Raises FrameError("header", "kind", or "oversize" where the kind's header is short)."""
    is_long = len(data) > LIMITS.short_header_bytes
    if is_long and _first_kind(data) not in LONG_HEADERS:
        raise FrameError("oversize", f"a header of {len(data)} bytes (limit {LIMITS.short_header_bytes})")
    try:
        # Lists and maps take their memory when their length is read: what they announce must be there.
        scan = msgpack.Unpacker(max_buffer_size=len(data))
        scan.feed(data)
        scan.skip()
        with _no_collection() if is_long else nullcontext():
            header = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise FrameError("header", f"not msgpack: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("header", f"a map was expected, got {type(header).__name__}")
    name = header.pop("kind", None)
    try:
        kind = Kind(name if isinstance(name, str) else "")
    except ValueError as error:
        raise FrameError("kind", f"{reprlib.repr(name):.60} is no kind of frame") from error
    return kind, header


_FIRST_KIND = re.compile(rb"(?:[\x80-\x8f]|\xde..|\xdf....)\xa4kind[\xa1-\xbf]([a-z_]{1,31})", re.DOTALL)


def _first_kind(data: bytes | memoryview) -> str:
    """The kind of a header that begins with it, as those of `encode_head` do; without parsing it."""
    match = _FIRST_KIND.match(bytes(data[:64]))
    return match[1].decode() if match is not None else ""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: for a million small lists it walks the whole program's objects many times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def need(header: Mapping[str, Any], name: str, type_: type[T]) -> T:
    """A header field of exactly this type (bool is no int). Raises FrameError("header")."""
    value = header.get(name)
    if type(value) is not type_:
        raise FrameError(
            "header", f"field {name!r}: {type_.__name__} expected, got {reprlib.repr(value):.60}"
        )
    return value


def need_count(header: Mapping[str, Any], name: str, limit: int) -> int:
    """A header field that is an int in [0, limit]. Raises FrameError."""
    value = need(header, name, int)
    if not 0 <= value <= limit:
        raise FrameError("range", f"field {name!r}: {value} is outside 0..{limit}")
    return value


def need_texts(header: Mapping[str, Any], name: str, count: int, length: int = 128) -> list[str]:
    """A header field that is a list of at most `count` strings. Raises FrameError."""
    values = need(header, name, list)
    if len(values) > count or any(type(value) is not str or len(value) > length for value in values):
        raise FrameError("header", f"field {name!r}: at most {count} strings expected")
    return values


def aligned(nbytes: int) -> int:
    """Bytes rounded up to the payload's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy: it must not change until they are sent."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)


_PADDING = memoryview(bytes(ALIGNMENT))


def pack_tensors(tensors: Iterable[Tensor]) -> list[memoryview]:
    """Buffers of a payload holding these tensors in order, each padded to the alignment."""
    buffers: list[memoryview] = []
    for tensor in tensors:
        data = tensor_bytes(tensor)
        if data.nbytes:
            buffers.append(data)
        if gap := aligned(data.nbytes) - data.nbytes:
            buffers.append(_PADDING[:gap])
    return buffers


def unpack_tensors(payload: memoryview, specs: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Views of the payload as tensors. Raises FrameError("size") unless it holds exactly these."""
    sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in specs]
    total = sum(aligned(size) for size in sizes)
    if payload.nbytes != total:
        raise FrameError("size", f"{payload.nbytes} payload bytes where {total} were expected")
    tensors: list[Tensor] = []
    offset = 0
    for (dtype, shape), size in zip(specs, sizes, strict=True):
        if size:
            count = size // dtype.itemsize
            tensors.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=offset).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
        offset += aligned(size)
    return tensors
