"""One averaging attempt on the wire: a butterfly over the group's links.

The gradient vector is cut into chunks and every member reduces a contiguous share of them. Members send
their chunks to the reducer (PART); the reducer takes the weighted mean, encodes it once and sends those
bytes to all (AVERAGE); everybody, the reducer included, decodes the same bytes. So all members hold the
same average bit for bit, which the digest over the bytes proves. The leader also sends a small slice of its
own fp32 weights (SLICE), which everybody takes over before the step is applied; the digest covers it too. Any
missing piece fails the attempt: there are no partial results.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peers import injector
from peers.engine import Engine, JobPriority
from peers.frames import Frame, FrameError, Kind, need, need_count, tensor_bytes
from peers.limits import LIMITS
from peers.link import Link
from peers.round_messages import Group
from swarm.gradient.values import ValueFormat, decode_values, encode_values, encoded_bytes

BATCH_CHUNKS = 8
"""Chunks encoded in one job: enough to hide the hop between threads, little enough to keep links busy."""


class ExchangeError(Exception):
    """The attempt failed. reason: a short bounded label. suspects: members that this one waited for in vain."""

    def __init__(self, reason: str, detail: str, suspects: tuple[str, ...] = ()) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.suspects = suspects


@dataclass(frozen=True, slots=True)
class Split:
    """How a vector of `elements` is cut for a group of `members`: chunks, and the reducer of each."""

    elements: int
    members: int

    @property
    def chunk_elements(self) -> int:
        """Elements of every chunk but the last."""
        even = -(-self.elements // self.members)
        return max(1, min(LIMITS.averaging_chunk_elements, even))

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)

    def span(self, chunk: int) -> slice:
        """Elements of a chunk."""
        start = chunk * self.chunk_elements
        return slice(start, min(start + self.chunk_elements, self.elements))

    def size(self, chunk: int) -> int:
        """Number of elements of a chunk."""
        span = self.span(chunk)
        return int(span.stop - span.start)

    def reducer(self, chunk: int) -> int:
        """Member (by position in the group) that reduces a chunk: contiguous, even shares."""
        return chunk * self.members // self.chunks


class Exchange:
    """Averages one vector of `elements` within one group. Give it PART, AVERAGE and SLICE frames; await `run`.

    deadline_s: of the whole attempt; None is LIMITS.round_s. slice_span: (offset, count) of the leader's weights
    that all members take over; None for none. After `run`, `encoded` holds the coded average chunk by chunk
    (uint8), and `slice` the offset and the leader's fp32 weights.
    """

    def __init__(
        self,
        group: Group,
        me: str,
        elements: int,
        values: ValueFormat,
        engine: Engine,
        link_of: Callable[[str], Link | None],
        *,
        deadline_s: float | None = None,
        slice_span: tuple[int, int] | None = None,
    ) -> None:
        self.group = group
        self.values = values
        self.elements = elements
        self.slice: tuple[int, Tensor] | None = None
        self._deadline_s = deadline_s
        self._me = group.members.index(me)
        self._contribution = torch.empty(0)
        self._engine = engine
        self._link_of = link_of
        self._split = Split(elements, len(group.members))
        self._contributors = [i for i, weight in enumerate(group.weights) if weight > 0]
        self._average = torch.empty(0)
        self._hashes: dict[int, bytes] = {}
        self._coded: dict[int, Tensor] = {}
        self._parts: dict[int, dict[int, Tensor]] = {}
        self._pieces = slice_pieces(slice_span)
        self._slices: dict[int, Tensor] = {}
        self._sending: dict[int, int] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs: asyncio.TaskGroup | None = None
        self._early: dict[tuple[str, Kind, int], Frame] = {}

    @property
    def chunk_elements(self) -> int:
        """Elements of every chunk but the last."""
        return self._split.chunk_elements

    @property
    def encoded(self) -> list[Tensor]:
        """The coded average, chunk by chunk, as every member decoded it. Complete after `run`."""
        return [self._coded[chunk] for chunk in range(self._split.chunks)]

    async def run(self, contribution: Tensor, own_slice: Tensor | None = None) -> tuple[Tensor, str]:
        """Average fp32 [elements]; returns (fp32 [elements], digest).

        own_slice: the leader's weights of the slice's span, fp32; nobody else gives any. Raises ExchangeError;
        nothing is changed then.
        """
        self._contribution, self._average = contribution, torch.empty_like(contribution)
        deadline_s = LIMITS.round_s if self._deadline_s is None else self._deadline_s
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as jobs:
                self._jobs = jobs
                if self._pieces and self.group.leader == self.group.members[self._me]:
                    jobs.create_task(self._send_slice(own_slice))
                if self._me in self._contributors:
                    for member in self._others():
                        jobs.create_task(self._send_parts(member))
                for chunk in range(self._split.chunks):
                    if self._split.reducer(chunk) == self._me and not self._missing(chunk):
                        jobs.create_task(self._reduce(chunk))
                for (peer, _, _), frame in self._early.items():
                    self.on_frame(peer, frame)
                await self._done
        except TimeoutError as error:
            raise ExchangeError("late", f"no result after {deadline_s:.0f} s", self._suspects()) from error
        except ExceptionGroup as group:
            # Several jobs may fail at once and each in its own way: it is one failed attempt.
            known, rest = group.split((ExchangeError, ConnectionError, ValueError))
            if rest is not None or known is None:
                raise
            first = _first_of(known)
            reason = "schema" if isinstance(first, ValueError) else "disconnected"
            suspects = first.suspects if isinstance(first, ExchangeError) else ()
            raise ExchangeError(reason, str(first), suspects) from group
        finally:
            self._jobs = None
        if self._pieces:
            values = torch.cat([self._slices[offset] for offset, _ in self._pieces])
            self.slice = (self._pieces[0][0], values)
        hashes = [self._hashes[chunk] for chunk in range(self._split.chunks)]
        return self._average, exchange_digest(hashes, self.slice, self.group.corrector)

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A PART, AVERAGE or SLICE of this group. Raises FrameError for one that does not belong."""
        sender = self.group.members.index(peer) if peer in self.group.members else -1
        if frame.kind is Kind.SLICE:
            self._on_slice(peer, frame)
            return
        chunk = need_count(frame.header, "chunk", self._split.chunks - 1)
        expected = encoded_bytes(self.values, self._split.size(chunk))
        if sender < 0 or frame.payload_bytes != expected:
            raise FrameError("size", f"{frame.payload_bytes} bytes for a chunk of {expected}")
        if self._jobs is None or self._done.done():
            # `run` has not begun (or has ended, and nothing matters); a chunk is kept once from each member.
            self._early.setdefault((peer, frame.kind, chunk), frame)
            return
        data = torch.frombuffer(frame.data(), dtype=torch.uint8)
        if frame.kind is Kind.PART:
            if self._split.reducer(chunk) != self._me or sender not in self._contributors:
                raise FrameError("range", f"chunk {chunk} is not reduced here")
            if not self._missing(chunk):
                return  # a repeat
            self._parts.setdefault(chunk, {})[sender] = data
            if not self._missing(chunk):
                self._spawn(self._reduce(chunk))
            return
        if self._split.reducer(chunk) != sender or chunk in self._hashes:
            raise FrameError("range", f"chunk {chunk} is not this member's, or came twice")
        self._spawn(self._take(chunk, data))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        """Start a job for a frame that came. An attempt that is failing takes none, and frames may still come."""
        try:
            if self._jobs is not None:
                self._jobs.create_task(job)
                return
        except RuntimeError:
            pass  # the group of jobs is shutting down
        job.close()

    def _on_slice(self, peer: str, frame: Frame) -> None:
        """A piece of the leader's slice; kept once, a repeat is dropped."""
        offset = need_count(frame.header, "offset", self.elements)
        size = dict(self._pieces).get(offset)
        if size is None or peer != self.group.leader or frame.payload_bytes != 4 * size:
            raise FrameError("range", f"a slice of {frame.payload_bytes} bytes at {offset} does not belong")
        if offset not in self._slices:
            self._slices[offset] = torch.frombuffer(frame.data(), dtype=torch.float32)
            self._check_done()

    async def _send_slice(self, own: Tensor | None) -> None:
        expected = sum(count for _, count in self._pieces)
        if own is None or own.numel() != expected:
            raise ExchangeError("other", f"the leader has no slice of {expected} weights")
        start = self._pieces[0][0]
        for offset, count in self._pieces:
            self._slices[offset] = own[offset - start : offset - start + count].contiguous()
        self._check_done()
        if self._jobs is not None:
            for member in self._others():
                self._jobs.create_task(self._send_pieces(member))

    async def _send_pieces(self, member: int) -> None:
        for offset, _ in self._pieces:
            header = {"group": self.group.id, "offset": offset}
            await self._send(Kind.SLICE, member, header, self._slices[offset])

    def _check_done(self) -> None:
        is_complete = len(self._hashes) == self._split.chunks and len(self._slices) == len(self._pieces)
        if is_complete and not self._done.done():
            self._done.set_result(None)

    def _suspects(self) -> tuple[str, ...]:
        """Members whose parts did not come; if none, whose averages or slice; last those that took nothing more.

        A reducer without parts has no averages to send, and is not to blame for it: who waits for parts is.
        """
        late: dict[int, None] = {}
        for chunk in range(self._split.chunks):
            reducer = self._split.reducer(chunk)
            if reducer == self._me and chunk not in self._hashes:
                have = self._parts.get(chunk, {})
                late |= {i: None for i in self._contributors if i != self._me and i not in have}
        if not late:
            for chunk in range(self._split.chunks):
                if (reducer := self._split.reducer(chunk)) != self._me and chunk not in self._hashes:
                    late[reducer] = None
            if len(self._slices) < len(self._pieces):
                late[self.group.members.index(self.group.leader)] = None
        late |= {member: None for member, count in self._sending.items() if count > 0}
        late.pop(self._me, None)
        return tuple(self.group.members[member] for member in late)

    def _missing(self, chunk: int) -> bool:
        have = self._parts.get(chunk, {})
        return any(i not in have for i in self._contributors if i != self._me)

    def _others(self) -> list[int]:
        """The other members, from the next one on, so that not all begin with the same."""
        count = len(self.group.members)
        return [(self._me + distance) % count for distance in range(1, count)]

    async def _send_parts(self, member: int) -> None:
        """Send a reducer its chunks. Every member has its own task: a slow one must keep only itself waiting."""
        chunks = [chunk for chunk in range(self._split.chunks) if self._split.reducer(chunk) == member]
        for first in range(0, len(chunks), BATCH_CHUNKS):
            batch = chunks[first : first + BATCH_CHUNKS]
            encoded = await self._engine.submit(JobPriority.ROUND, self._encode, batch)
            for chunk, data in zip(batch, encoded, strict=True):
                await self._send(Kind.PART, member, {"group": self.group.id, "chunk": chunk}, data)

    def _encode(self, chunks: list[int]) -> list[Tensor]:
        return [encode_values(self._contribution[self._split.span(chunk)], self.values) for chunk in chunks]

    async def _reduce(self, chunk: int) -> None:
        parts = self._parts.get(chunk, {})
        encoded = await self._engine.submit(JobPriority.ROUND, self._mean, chunk, parts)
        parts.update(dict.fromkeys(parts, torch.empty(0)))  # the memory goes, the senders stay known
        if self._jobs is not None:
            for member in self._others():
                header = {"group": self.group.id, "chunk": chunk}
                self._jobs.create_task(self._send(Kind.AVERAGE, member, header, encoded))
        await self._take(chunk, encoded)

    def _mean(self, chunk: int, parts: dict[int, Tensor]) -> Tensor:
        """Weighted mean in the group's order, encoded: sum_i w_i g_i / sum_i w_i."""
        size = self._split.size(chunk)
        weights = self.group.weights
        total = float(sum(weights))
        mean = torch.zeros(size, dtype=torch.float32)
        for member in self._contributors:
            part = (
                self._contribution[self._split.span(chunk)]
                if member == self._me
                else decode_values(parts[member], self.values, size)
            )
            mean.add_(part, alpha=weights[member] / total)
        return encode_values(mean, self.values)

    async def _take(self, chunk: int, encoded: Tensor) -> None:
        digest = await self._engine.submit(JobPriority.ROUND, self._decode, chunk, encoded)
        self._hashes[chunk], self._coded[chunk] = digest, encoded
        if len(self._hashes) == max(1, self._split.chunks // 2):
            injector.hit("mid_exchange", self.group.step)
        self._check_done()

    def _decode(self, chunk: int, encoded: Tensor) -> bytes:
        size = self._split.size(chunk)
        self._average[self._split.span(chunk)] = decode_values(encoded, self.values, size)
        return hashlib.sha256(tensor_bytes(encoded)).digest()

    async def _send(self, kind: Kind, member: int, header: dict[str, object], data: Tensor) -> None:
        peer = self.group.members[member]
        link = self._link_of(peer)
        if link is None:
            raise ExchangeError("disconnected", f"no link to {peer}", (peer,))
        self._sending[member] = self._sending.get(member, 0) + 1
        try:
            await link.send(kind, header, [tensor_bytes(data)])
        except ConnectionError as error:
            raise ExchangeError("disconnected", str(error), (peer,)) from error
        # Not when it is cancelled: at the deadline this shows who took nothing more.
        self._sending[member] -= 1


def _first_of(group: ExceptionGroup[Exception]) -> Exception:
    first: Exception = group
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first


def slice_pieces(span: tuple[int, int] | None) -> list[tuple[int, int]]:
    """A slice (offset, count) as frames of bounded size: (offset, count) of each."""
    if span is None:
        return []
    offset, end = span[0], span[0] + span[1]
    most = LIMITS.averaging_chunk_elements
    return [(start, min(most, end - start)) for start in range(offset, end, most)]


def exchange_digest(hashes: Sequence[bytes], taken: tuple[int, Tensor] | None, corrector: str = "") -> str:
    """Names what all members apply: sha256 over the chunks' sha256, the slice if there is one, and the hash of the
    corrector's prior if there is one.
    """
    digest = hashlib.sha256(b"".join(hashes) + corrector.encode())
    if taken is not None:
        digest.update(taken[0].to_bytes(8, "little") + hashlib.sha256(tensor_bytes(taken[1])).digest())
    return digest.hexdigest()


def alone_digest(group_id: str, corrector: str = "") -> str:
    """The digest of a group that exchanges nothing: a member alone, or no weight at all."""
    return hashlib.sha256(f"{group_id}/alone{corrector}".encode()).hexdigest()


def group_of(frame: Frame) -> str:
    """The group a PART, AVERAGE or SLICE belongs to. Raises FrameError."""
    return need(frame.header, "group", str)[:64]
