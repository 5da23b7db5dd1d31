"""Updates: each committed step's coded average on disk, for peers that catch up.

An update file holds what every member of the round decoded, byte for byte, so whoever applies the updates of all
steps since a snapshot gets the members' weights, and their compressor's common state, bit for bit. Members of one
round write identical files: a joiner may take half of one from each of two.

    magic | u32 head bytes | head (msgpack map) | coded chunks, phase by phase | slice (fp32) | sha256 of all before

The digest in the head is the one the round committed, and it is checked against the content; the lineages of
consecutive updates form a chain that ends in the lineage of the stage's next COMMIT.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgpack
import torch
from torch import Tensor

from peers.compute import Correct, StageCompute, take_step
from peers.exchange import Exchange, alone_digest, exchange_digest
from peers.frames import FrameError, need, need_count, tensor_bytes
from peers.limits import LIMITS
from peers.round_fields import hash_of
from peers.round_messages import HASH_LENGTH, MAX_STEP, MAX_WEIGHT, Group, next_lineage
from swarm.gradient.chunk import FloatChunk
from swarm.gradient.compressor import Phase
from swarm.gradient.split import Split

MAGIC = b"swarm-peer update 2\n"
HEAD_BYTES = 64 * 1024
MAX_ELEMENTS = 2**40
_LENGTH = struct.Struct("<I")
_HASH_BYTES = 32
_READ_BYTES = 4 * 1024 * 1024

Way = Literal["exchanged", "alone", "local", "none"]
"""How the average came about: by an exchange, by one member alone (raw fp32), or not at all: every member took a step
of its own (local), or there was nothing to take (no weight).
"""
_WAYS: dict[str, Way] = {"exchanged": "exchanged", "alone": "alone", "local": "local", "none": "none"}
MAX_PHASES = 512
_RAW = FloatChunk("fp32")


class UpdateError(ValueError):
    """A file that is no whole update, or not the one it should be."""


@dataclass(frozen=True, slots=True)
class Part:
    """How the coded average of one phase lies in an update: `elements` in chunks of `chunk_elements`, of which the
    last may have fewer, of `chunk_bytes` and `last_bytes`.
    """

    elements: int
    chunk_elements: int
    chunk_bytes: int
    last_bytes: int

    @classmethod
    def of(cls, phase: Phase, split: Split) -> Part:
        """Of a phase cut like this."""
        last = phase.codec.nbytes(split.size(split.chunks - 1))
        return cls(phase.elements, split.chunk_elements, phase.codec.nbytes(split.chunk_elements), last)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)

    @property
    def nbytes(self) -> int:
        """Of all chunks."""
        return (self.chunks - 1) * self.chunk_bytes + self.last_bytes

    @property
    def sizes(self) -> list[int]:
        """Bytes of each chunk."""
        return [self.chunk_bytes] * (self.chunks - 1) + [self.last_bytes]


@dataclass(frozen=True, slots=True)
class Update:
    """One committed step of one stage.

    lineage: of the weights before it. digest: as committed. elements: of the stage's weights. parts: of what lies in
    `chunks` (uint8), phase by phase; of the raw average if `way` is "alone"; none if it is "local" or "none".
    slice: offset and fp32 weights of the leader that are written before the average is applied.
    corrector: hash of the prior by which the average is corrected, or "".
    """

    run: str
    stage: int
    step: int
    lineage: str
    group: str
    digest: str
    way: Way
    elements: int
    parts: tuple[Part, ...]
    total_weight: int
    chunks: tuple[Tensor, ...] = ()
    slice: tuple[int, Tensor] | None = None
    corrector: str = ""

    @property
    def next_lineage(self) -> str:
        """Lineage of the weights after it."""
        return next_lineage(self.lineage, self.group, self.digest)

    def check_content(self) -> None:
        """Raise UpdateError unless the digest is that of the content."""
        if self.way == "exchanged":
            hashes = [hashlib.sha256(tensor_bytes(chunk)).digest() for chunk in self.chunks]
            digest = exchange_digest(hashes, self.slice, self.corrector)
        else:
            digest = alone_digest(self.group, self.corrector)
        if digest != self.digest:
            raise UpdateError(f"the update of step {self.step} is not what its round committed")


def update_name(step: int, stage: int) -> str:
    """Name under which a peer serves a step's update of a stage."""
    return f"update/{step}/stage-{stage}"


def exchanged_update(
    exchange: Exchange, *, group: Group, run: str, stage: int, lineage: str, digest: str
) -> Update:
    """The update of an exchange that has ended. group: whose commit applies it. lineage: of the weights before."""
    return Update(
        run=run,
        stage=stage,
        step=group.step,
        lineage=lineage,
        group=group.id,
        digest=digest,
        way="exchanged",
        elements=exchange.elements,
        parts=tuple(Part.of(butterfly.phase, butterfly.split) for butterfly in exchange.butterflies),
        total_weight=sum(exchange.group.weights),
        chunks=tuple(chunk for coded in exchange.encoded for chunk in coded),
        slice=exchange.slice,
        corrector=exchange.group.corrector,
    )


def alone_update(
    group: Group, contribution: Tensor, *, total_weight: int, run: str, stage: int, lineage: str
) -> Update:
    """The update of a group that exchanged nothing: a member alone, or no weight at all.

    contribution: fp32 [elements], which must not change any more: it is kept raw, not copied.
    """
    is_empty = total_weight == 0
    split = Split(contribution.numel(), 1, LIMITS.averaging_chunk_elements)
    pieces = () if is_empty else torch.split(contribution.detach().contiguous(), split.chunk_elements)
    return Update(
        run=run,
        stage=stage,
        step=group.step,
        lineage=lineage,
        group=group.id,
        digest=alone_digest(group.id, group.corrector),
        way="none" if is_empty else "alone",
        elements=contribution.numel(),
        parts=() if is_empty else (Part.of(Phase(contribution.numel(), _RAW), split),),
        total_weight=total_weight,
        chunks=tuple(piece.view(torch.uint8) for piece in pieces),
        corrector=group.corrector,
    )


def local_update(
    group: Group, elements: int, *, is_still: bool, run: str, stage: int, lineage: str
) -> Update:
    """The update of a commit that settles no average: no more than that it was committed. elements: of the stage's
    weights. is_still: whether the members took no step of their own either.
    """
    return Update(
        run=run,
        stage=stage,
        step=group.step,
        lineage=lineage,
        group=group.id,
        digest=alone_digest(group.id, group.corrector),
        way="none" if is_still else "local",
        elements=elements,
        parts=(),
        total_weight=sum(group.weights),
        corrector=group.corrector,
    )


def averages_of(update: Update, phases: Sequence[Phase]) -> list[Tensor]:
    """What the members decoded, phase by phase: fp32 [elements] each. phases: of the step, by the stage's compressor;
    ignored for the raw average of a member alone.

    Raises UpdateError for other phases' sizes, or bytes that their codecs do not have.
    """
    if update.way == "alone":
        phases = [Phase(update.elements, _RAW)]
    expected = [(phase.elements, phase.codec.nbytes) for phase in phases]
    found = [
        (part.elements, nbytes)
        for part, (_, nbytes) in zip(update.parts, expected, strict=False)
        if part.chunk_bytes == nbytes(part.chunk_elements)
    ]
    if found != expected or len(update.parts) != len(expected):
        sizes = [(part.elements, part.chunk_elements, part.chunk_bytes) for part in update.parts]
        raise UpdateError(f"the update of step {update.step} holds {sizes}, not what this stage averages")
    averages, chunks = [], iter(update.chunks)
    try:
        for part, phase in zip(update.parts, phases, strict=True):
            average = torch.empty(part.elements, dtype=torch.float32)
            for number in range(part.chunks):
                place = average[number * part.chunk_elements : (number + 1) * part.chunk_elements]
                place.copy_(phase.codec.decode(next(chunks), place.numel()))
            averages.append(average)
    except ValueError as error:
        raise UpdateError(f"the update of step {update.step}: {error}") from error
    return averages


def apply_update(compute: StageCompute, update: Update, correct: Correct | None = None) -> float | None:
    """Take the step as the members took it; returns the gradient's norm. Runs on the compute thread.

    correct: by the prior that the update names; None if it names none. With an outer loop the replica's own weights are
    those that all share afterwards.

    None if nothing was applied: no weight, or an average that is not finite, which every member refused alike.
    Raises UpdateError, with nothing changed, for an update of another size.
    """
    if update.elements != compute.trainable.numel:
        raise UpdateError(f"{update.elements} elements where this stage has {compute.trainable.numel}")
    if update.way in ("local", "none"):  # the weights that replicas share stay what they are
        compute.clear()
        return None
    compressor, start = compute.compressor, compute.overlap.settled(update.step)
    if start is None:
        raise UpdateError(f"the update of step {update.step} holds an average before there was one")
    averages = averages_of(update, compressor.phases(start))
    try:
        average = averages[0] if update.way == "alone" else compressor.replay(averages, start)
    except ValueError as error:
        raise UpdateError(f"the update of step {update.step}: {error}") from error
    try:
        return take_step(
            compute, average, update.step, update.slice, correct if compute.outer is None else None
        )
    except ValueError:
        return None
    finally:
        # Members merge the average with steps of their own. Here there are none.
        compute.begin_from_shared()


def write_update(path: Path, update: Update) -> int:
    """Write an update; returns the file's bytes. It has its name only once it is whole; not fsynced: the hash
    at its end tells a torn one.

    Raises OSError; no file is left then.
    """
    head: bytes = msgpack.packb(_head(update))
    digest = hashlib.sha256()
    nbytes = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            parts: list[bytes | memoryview] = [MAGIC, _LENGTH.pack(len(head)), head]
            parts += [tensor_bytes(chunk) for chunk in update.chunks]
            if update.slice is not None:
                parts.append(tensor_bytes(update.slice[1].contiguous()))
            for data in parts:
                digest.update(data)
                file.write(data)
                nbytes += len(data)
            file.write(digest.digest())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return nbytes + _HASH_BYTES


def read_update(path: Path) -> Update:
    """Read a whole update into memory. Raises UpdateError for anything else, OSError if it cannot be read."""
    with path.open("rb") as file:
        update, place = _read_head(file)
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        data = bytearray(size)
        if file.readinto(data) != size:
            raise UpdateError("it became shorter while it was read")
    view = memoryview(data)
    if hashlib.sha256(view[:-_HASH_BYTES]).digest() != view[-_HASH_BYTES:]:
        raise UpdateError("its bytes do not match its hash: torn or changed")
    whole = torch.frombuffer(data, dtype=torch.uint8)
    chunks: list[Tensor] = []
    for nbytes in [nbytes for part in update.parts for nbytes in part.sizes]:
        chunks.append(whole[place : place + nbytes])
        place += nbytes
    taken = update.slice
    if taken is not None:
        taken = (taken[0], whole[place : place + taken[1].nbytes].clone().view(torch.float32))
    return _with_body(update, tuple(chunks), taken)


def check_update(path: Path) -> Update:
    """Verify a file without holding it in memory; returns its head (no chunks). Raises as `read_update` does."""
    with path.open("rb") as file:
        update, _ = _read_head(file)
        left = os.fstat(file.fileno()).st_size - _HASH_BYTES
        file.seek(0)
        digest = hashlib.sha256()
        while left > 0 and (data := file.read(min(_READ_BYTES, left))):
            digest.update(data)
            left -= len(data)
        if digest.digest() != file.read(_HASH_BYTES):
            raise UpdateError("its bytes do not match its hash: torn or changed")
    return _with_body(update, (), None)


def update_bytes(elements: int) -> int:
    """Most bytes that an update of a stage of so many elements may have: as raw fp32, slice and head included; no
    compressor sends more.
    """
    return 8 * elements + 2 * HEAD_BYTES


def _head(update: Update) -> dict[str, Any]:
    offset, count = (update.slice[0], update.slice[1].numel()) if update.slice is not None else (0, 0)
    return {
        "run": update.run,
        "stage": update.stage,
        "step": update.step,
        "lineage": update.lineage,
        "group": update.group,
        "digest": update.digest,
        "way": update.way,
        "elements": update.elements,
        "parts": [
            [part.elements, part.chunk_elements, part.chunk_bytes, part.last_bytes] for part in update.parts
        ],
        "total_weight": update.total_weight,
        "slice_offset": offset,
        "slice_elements": count,
        "corrector": update.corrector,
    }


def _read_head(file: BinaryIO) -> tuple[Update, int]:
    """The head, with a slice of the right size but no content, and where the body begins.

    Raises UpdateError unless the file has exactly the size that its head announces.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(len(MAGIC) + _LENGTH.size)
    if len(start) < len(MAGIC) + _LENGTH.size or not start.startswith(MAGIC):
        raise UpdateError(f"no update file ({size} bytes)")
    length = _LENGTH.unpack(start[len(MAGIC) :])[0]
    if length > HEAD_BYTES:
        raise UpdateError(f"a head of {length} bytes")
    try:
        head = msgpack.unpackb(file.read(length))
        if not isinstance(head, dict):
            raise UpdateError("its head is no map")
        update = _parse_head(head)
    except (FrameError, ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise UpdateError(f"its head cannot be read: {str(error)[:200]}") from error
    place = len(start) + length
    taken = update.slice[1].nbytes if update.slice is not None else 0
    # The sizes of all chunks are only listed once their number is known to be plausible.
    if place + sum(part.nbytes for part in update.parts) + taken + _HASH_BYTES != size:
        raise UpdateError(f"{size} bytes do not hold {update.elements} elements: truncated or changed")
    return update, place


def _parse_head(head: dict[str, Any]) -> Update:
    count = need_count(head, "slice_elements", MAX_ELEMENTS)
    elements = need_count(head, "elements", MAX_ELEMENTS)
    offset = need_count(head, "slice_offset", elements)
    way, parts = _WAYS[need(head, "way", str)], _parse_parts(need(head, "parts", list))
    if (way in ("local", "none")) == bool(parts):
        raise UpdateError(f"{len(parts)} parts of an update that came about as {way!r}")
    if offset + count > elements:
        raise UpdateError(f"a slice of {count} from {offset} on, of {elements} elements")
    return Update(
        run=need(head, "run", str)[:128],
        stage=need_count(head, "stage", MAX_STEP),
        step=need_count(head, "step", MAX_STEP),
        lineage=need(head, "lineage", str)[:HASH_LENGTH],
        group=need(head, "group", str)[:HASH_LENGTH],
        digest=need(head, "digest", str)[:HASH_LENGTH],
        way=way,
        elements=elements,
        parts=parts,
        total_weight=need_count(head, "total_weight", MAX_WEIGHT * LIMITS.links),
        # Memory for a slice is taken once the file's size has proved that it is there.
        slice=(offset, torch.empty(1, dtype=torch.float32).expand(count)) if count else None,
        corrector=hash_of(head, "corrector"),
    )


def _parse_parts(listed: list[Any]) -> tuple[Part, ...]:
    """Parts of a head. Every chunk has a byte at least, so a file's size bounds their number."""
    if len(listed) > MAX_PHASES:
        raise UpdateError(f"{len(listed)} parts")
    parts = []
    for each in listed:
        if not isinstance(each, list) or len(each) != 4:
            raise UpdateError("a part is no list of four sizes")
        if not all(type(value) is int and 1 <= value <= MAX_ELEMENTS for value in each):
            raise UpdateError(f"a part of {each}")
        parts.append(Part(*each))
    return tuple(parts)


def _with_body(update: Update, chunks: tuple[Tensor, ...], taken: tuple[int, Tensor] | None) -> Update:
    return replace(update, chunks=chunks, slice=taken)
