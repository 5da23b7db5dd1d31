"""One averaging attempt on the wire: a butterfly over the group's links.

The gradient vector is cut into chunks and every member reduces a contiguous share of them. Members send
their chunks to the reducer (PART); the reducer takes the weighted mean, encodes it once and sends those
bytes to all (AVERAGE); everybody, the reducer included, decodes the same bytes. So all members hold the
same average bit for bit, which the digest over the bytes proves. Any missing piece fails the attempt: there
are no partial results.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.engine import Engine, JobPriority
from peers.frames import Frame, FrameError, Kind, need, need_count, tensor_bytes
from peers.limits import LIMITS
from peers.link import Link
from peers.round_messages import Group
from swarm.gradient.values import ValueFormat, decode_values, encode_values, encoded_bytes

BATCH_CHUNKS = 8
"""Chunks encoded in one job: enough to hide the hop between threads, little enough to keep links busy."""


class ExchangeError(Exception):
    """The attempt failed. `reason` is a short bounded label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


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
    """Averages one vector of `elements` within one group. Give it PART and AVERAGE frames; await `run`."""

    def __init__(
        self,
        group: Group,
        me: str,
        elements: int,
        values: ValueFormat,
        engine: Engine,
        link_of: Callable[[str], Link | None],
    ) -> None:
        self.group = group
        self._me = group.members.index(me)
        self._contribution = torch.empty(0)
        self._values = values
        self._engine = engine
        self._link_of = link_of
        self._split = Split(elements, len(group.members))
        self._contributors = [i for i, weight in enumerate(group.weights) if weight > 0]
        self._average = torch.empty(0)
        self._hashes: dict[int, bytes] = {}
        self._parts: dict[int, dict[int, Tensor]] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs: asyncio.TaskGroup | None = None
        self._early: dict[tuple[str, Kind, int], Frame] = {}

    async def run(self, contribution: Tensor) -> tuple[Tensor, str]:
        """Average fp32 [elements]; returns (fp32 [elements], digest).

        Raises ExchangeError; nothing is changed then.
        """
        self._contribution, self._average = contribution, torch.empty_like(contribution)
        try:
            async with asyncio.timeout(LIMITS.round_s), asyncio.TaskGroup() as jobs:
                self._jobs = jobs
                if self._me in self._contributors:
                    jobs.create_task(self._send_parts())
                for chunk in range(self._split.chunks):
                    if self._split.reducer(chunk) == self._me and not self._missing(chunk):
                        jobs.create_task(self._reduce(chunk))
                for (peer, _, _), frame in self._early.items():
                    self.on_frame(peer, frame)
                await self._done
        except TimeoutError as error:
            raise ExchangeError("late", f"no result after {LIMITS.round_s:.0f} s") from error
        except ExceptionGroup as group:
            # Several jobs may fail at once and each in its own way: it is one failed attempt.
            known, rest = group.split((ExchangeError, ConnectionError, ValueError))
            if rest is not None or known is None:
                raise
            first = _first_of(known)
            reason = "schema" if isinstance(first, ValueError) else "disconnected"
            raise ExchangeError(reason, str(first)) from group
        finally:
            self._jobs = None
        digest = hashlib.sha256(b"".join(self._hashes[c] for c in range(self._split.chunks))).hexdigest()
        return self._average, digest

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A PART or AVERAGE of this group. Raises FrameError for one that does not belong."""
        sender = self.group.members.index(peer) if peer in self.group.members else -1
        chunk = need_count(frame.header, "chunk", self._split.chunks - 1)
        expected = encoded_bytes(self._values, self._split.size(chunk))
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
                self._jobs.create_task(self._reduce(chunk))
            return
        if self._split.reducer(chunk) != sender or chunk in self._hashes:
            raise FrameError("range", f"chunk {chunk} is not this member's, or came twice")
        self._jobs.create_task(self._take(chunk, data))

    def _missing(self, chunk: int) -> bool:
        have = self._parts.get(chunk, {})
        return any(i not in have for i in self._contributors if i != self._me)

    async def _send_parts(self) -> None:
        """Send our chunks to their reducers, starting after our own share so that reducers are fed evenly."""
        count = self._split.chunks
        others = [c for c in range(count) if self._split.reducer(c) != self._me]
        start = next((i for i, c in enumerate(others) if self._split.reducer(c) > self._me), 0)
        others = others[start:] + others[:start]
        for first in range(0, len(others), BATCH_CHUNKS):
            batch = others[first : first + BATCH_CHUNKS]
            encoded = await self._engine.submit(JobPriority.ROUND, self._encode, batch)
            for chunk, data in zip(batch, encoded, strict=True):
                await self._send(Kind.PART, self._split.reducer(chunk), chunk, data)

    def _encode(self, chunks: list[int]) -> list[Tensor]:
        return [encode_values(self._contribution[self._split.span(chunk)], self._values) for chunk in chunks]

    async def _reduce(self, chunk: int) -> None:
        parts = self._parts.get(chunk, {})
        encoded = await self._engine.submit(JobPriority.ROUND, self._mean, chunk, parts)
        parts.update(dict.fromkeys(parts, torch.empty(0)))  # the memory goes, the senders stay known
        for member in range(len(self.group.members)):
            if member != self._me:
                await self._send(Kind.AVERAGE, member, chunk, encoded)
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
                else decode_values(parts[member], self._values, size)
            )
            mean.add_(part, alpha=weights[member] / total)
        return encode_values(mean, self._values)

    async def _take(self, chunk: int, encoded: Tensor) -> None:
        digest = await self._engine.submit(JobPriority.ROUND, self._decode, chunk, encoded)
        self._hashes[chunk] = digest
        if len(self._hashes) == self._split.chunks and not self._done.done():
            self._done.set_result(None)

    def _decode(self, chunk: int, encoded: Tensor) -> bytes:
        size = self._split.size(chunk)
        self._average[self._split.span(chunk)] = decode_values(encoded, self._values, size)
        return hashlib.sha256(tensor_bytes(encoded)).digest()

    async def _send(self, kind: Kind, member: int, chunk: int, data: Tensor) -> None:
        link = self._link_of(self.group.members[member])
        if link is None:
            raise ExchangeError("disconnected", f"no link to {self.group.members[member]}")
        await link.send(kind, {"group": self.group.id, "chunk": chunk}, [tensor_bytes(data)])


def _first_of(group: ExceptionGroup[Exception]) -> Exception:
    first: Exception = group
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first


def group_of(frame: Frame) -> str:
    """The group a PART or AVERAGE belongs to. Raises FrameError."""
    return need(frame.header, "group", str)[:64]
