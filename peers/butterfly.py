"""One vector averaged by a group: a butterfly over its links.

The vector is cut into chunks and every member reduces a contiguous share of them. Members send their chunks, coded, to
the reducer (PART); the reducer takes the weighted mean, encodes it once and sends those bytes to all (AVERAGE);
everybody, the reducer included, decodes the same bytes. So all members hold the same average bit for bit, which the
digest over the bytes proves. Any missing piece fails the attempt: there are no partial results. A part that cannot
count (no chunk's bytes, not finite, far larger than the group's) is left out by its reducer, which says so in the
AVERAGE: its sender keeps it for its next contribution.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor

from peers import injector
from peers.engine import Engine, JobPriority
from peers.frames import Frame, FrameError, Kind, need, tensor_bytes
from peers.limits import LIMITS
from peers.round_messages import Group
from swarm.gradient.compressor import Averaged, Phase
from swarm.gradient.robust import Refusal, RobustConfig, aggregate, screen
from swarm.gradient.split import Split, chunk_seed

logger = logging.getLogger("swarm_peer.averaging")

BATCH_CHUNKS = 8
"""Chunks encoded in one job: enough to hide the hop between threads, little enough to keep links busy."""

SMALL_CHUNKS = 2
"""A vector of at most so many whole chunks is encoded in one job: hops would take longer than the work."""

Send = Callable[[Kind, int, dict[str, object], Tensor], Coroutine[Any, Any, None]]
"""send(kind, member, header, payload): to a member of the group, by position."""


class ExchangeError(Exception):
    """The attempt failed. reason: a short bounded label. suspects: members that this one waited for in vain."""

    def __init__(self, reason: str, detail: str, suspects: tuple[str, ...] = ()) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.suspects = suspects


class Butterfly:
    """Averages one phase's vector. Give it PART and AVERAGE frames from the start; await `run`.

    number: of the phase. run_seed: of stochastic rounding. After `run`, `coded` holds the coded average chunk by chunk
    (uint8) and `hashes` their sha256. refused: parts that this member, as reducer, left out, by sender and reason.
    refused_own: parts of its own that others left out.
    """

    def __init__(
        self,
        group: Group,
        me: int,
        number: int,
        phase: Phase,
        run_seed: int,
        robust: RobustConfig,
        engine: Engine,
        send: Send,
    ) -> None:
        self.refused: Counter[tuple[int, Refusal]] = Counter()
        self.refused_own = 0
        self._robust = robust
        self._useless: dict[int, dict[int, Refusal]] = {}
        self.phase = phase
        self.split = Split(phase.elements, len(group.members), LIMITS.averaging_chunk_elements)
        self._group, self._me, self._number, self._run_seed = group, me, number, run_seed
        self._engine, self._send = engine, send
        self._contributors = [i for i, weight in enumerate(group.weights) if weight > 0]
        self._vector = self._average = self._counted = self._owed = torch.empty(0)
        self._hashes: dict[int, bytes] = {}
        self._coded: dict[int, Tensor] = {}
        self._parts: dict[int, dict[int, Tensor]] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs: asyncio.TaskGroup | None = None
        self._small: asyncio.Future[list[Tensor]] | None = None
        self._averaged: set[int] = set()
        self._untaken: list[tuple[int, Tensor, bool]] = []
        self._is_taking = False
        self._early: dict[tuple[str, Kind, int], tuple[int, Frame]] = {}

    @property
    def coded(self) -> list[Tensor]:
        """See the class."""
        return [self._coded[chunk] for chunk in range(self.split.chunks)]

    @property
    def hashes(self) -> list[bytes]:
        """See the class."""
        return [self._hashes[chunk] for chunk in range(self.split.chunks)]

    async def run(self, vector: Tensor, jobs: asyncio.TaskGroup) -> Averaged:
        """Average fp32 [elements]. jobs: where what it starts runs, and fails: with ExchangeError, ConnectionError or
        ValueError.
        """
        if vector.numel() != self.phase.elements:
            raise ExchangeError(
                "schema", f"a vector of {vector.numel()} where {self.phase.elements} are averaged"
            )
        self._vector, self._average = vector, torch.empty_like(vector)
        if self.phase.needs_residual:
            self._counted, self._owed = torch.zeros_like(vector), torch.zeros_like(vector)
        self._jobs = jobs
        try:
            if self._me in self._contributors:
                if self.phase.elements <= SMALL_CHUNKS * LIMITS.averaging_chunk_elements:
                    self._small = self._engine.submit(JobPriority.ROUND, self._encode, self._of_others())
                for distance in range(1, len(self._group.members)):  # not all begin with the same member
                    jobs.create_task(self._send_parts((self._me + distance) % len(self._group.members)))
            for chunk in range(self.split.chunks):
                if self.split.reducer(chunk) == self._me and not self._missing(chunk):
                    jobs.create_task(self._reduce(chunk))
            early, self._early = self._early, {}
            for (_, _, chunk), (sender, frame) in early.items():
                try:
                    self._on_chunk(sender, chunk, frame)
                except FrameError as error:  # without it the attempt fails by itself, if it was needed
                    logger.warning(
                        "%s of %s does not fit: %s", frame.kind, self._group.members[sender], error
                    )
            await self._done
        finally:
            self._jobs = None
        return Averaged(self._average, self._counted, self._owed)

    def on_frame(self, peer: str, sender: int, chunk: int, frame: Frame) -> None:
        """A PART or AVERAGE of this phase. sender: the peer's position. Raises FrameError for what does not belong."""
        expected = self.phase.codec.nbytes(self.split.size(chunk))
        if frame.payload_bytes != expected:
            if frame.kind is Kind.PART and self._expects(sender, chunk):
                self._useless.setdefault(chunk, {}).setdefault(sender, "size")
                if self._jobs is not None and not self._missing(chunk):
                    self._spawn(self._reduce(chunk))
            raise FrameError("size", f"{frame.payload_bytes} bytes for a chunk of {expected}")
        if frame.kind is Kind.PART:
            if self.split.reducer(chunk) != self._me or sender not in self._contributors:
                raise FrameError("range", f"chunk {chunk} is not reduced here")
        elif self.split.reducer(chunk) != sender:
            raise FrameError("range", f"chunk {chunk} is not this member's")
        if self._jobs is None or self._done.done():
            # `run` has not begun (or has ended, and nothing matters); a chunk is kept once from each member.
            if not self._done.done():
                self._early.setdefault((peer, frame.kind, chunk), (sender, frame))
            return
        self._on_chunk(sender, chunk, frame)

    def late(self) -> dict[int, None]:
        """Members whose parts did not come; if none, whose averages. A reducer without parts has no averages to send,
        and is not to blame for it: who waits for parts is.
        """
        late: dict[int, None] = {}
        for chunk in range(self.split.chunks):
            if self.split.reducer(chunk) == self._me and chunk not in self._hashes:
                have = self._parts.get(chunk, {})
                late |= {i: None for i in self._contributors if i != self._me and i not in have}
        if not late:
            for chunk in range(self.split.chunks):
                if (reducer := self.split.reducer(chunk)) != self._me and chunk not in self._hashes:
                    late[reducer] = None
        return late

    def _on_chunk(self, sender: int, chunk: int, frame: Frame) -> None:
        data = torch.frombuffer(frame.data(), dtype=torch.uint8)
        if frame.kind is Kind.PART:
            if not self._expects(sender, chunk):
                return  # a repeat
            self._parts.setdefault(chunk, {})[sender] = data
            if not self._missing(chunk):
                self._spawn(self._reduce(chunk))
            return
        if chunk in self._averaged:
            raise FrameError("range", f"the average of chunk {chunk} came twice")
        self._take(chunk, data, self._refused_in(frame))

    def _expects(self, sender: int, chunk: int) -> bool:
        """Whether a part of this member is still to come, and is to be reduced here."""
        is_here = (
            self.split.reducer(chunk) == self._me and sender in self._contributors and sender != self._me
        )
        return (
            is_here
            and sender not in self._parts.get(chunk, {})
            and sender not in self._useless.get(chunk, {})
        )

    def _refused_in(self, frame: Frame) -> bool:
        """Whether a reducer says that it left this member's part out. Raises FrameError."""
        refused = need(frame.header, "refused", list)
        if len(refused) > len(self._group.members):
            raise FrameError("size", f"{len(refused)} refused of {len(self._group.members)} members")
        return self._me in self._contributors and any(
            type(each) is int and each == self._me for each in refused
        )

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        """Start a job for a frame that came. An attempt that is failing takes none, and frames may still come."""
        try:
            if self._jobs is not None:
                self._jobs.create_task(job)
                return
        except RuntimeError:
            pass  # the group of jobs is shutting down
        job.close()

    def _missing(self, chunk: int) -> bool:
        return any(self._expects(member, chunk) for member in self._contributors)

    def _header(self, chunk: int) -> dict[str, object]:
        return {"group": self._group.id, "phase": self._number, "chunk": chunk}

    def _seed(self, chunk: int, member: int) -> int:
        return chunk_seed(self._run_seed, self._group.step, self._number, chunk, member)

    async def _send_parts(self, member: int) -> None:
        """Send a reducer its chunks. Every member has its own task: a slow one must keep only itself waiting."""
        chunks = [chunk for chunk in self._of_others() if self.split.reducer(chunk) == member]
        if self._small is not None:
            coded = dict(zip(self._of_others(), await self._small, strict=True))
            for chunk in chunks:
                await self._send(Kind.PART, member, self._header(chunk), coded[chunk])
            return
        for first in range(0, len(chunks), BATCH_CHUNKS):
            batch = chunks[first : first + BATCH_CHUNKS]
            encoded = await self._engine.submit(JobPriority.ROUND, self._encode, batch)
            for chunk, data in zip(batch, encoded, strict=True):
                await self._send(Kind.PART, member, self._header(chunk), data)

    def _of_others(self) -> list[int]:
        """Chunks that other members reduce."""
        return [chunk for chunk in range(self.split.chunks) if self.split.reducer(chunk) != self._me]

    def _encode(self, chunks: list[int]) -> list[Tensor]:
        codec, coded = self.phase.codec, []
        for chunk in chunks:
            span = self.split.span(chunk)
            coded.append(codec.encode(self._vector[span], self._seed(chunk, self._me)))
            if self.phase.needs_residual:
                try:
                    self._counted[span] = codec.decode(coded[-1], self.split.size(chunk))
                except ValueError:
                    # The reducer finds the same, and leaves it out.
                    self._counted[span] = 0.0
        return coded

    async def _reduce(self, chunk: int) -> None:
        parts = self._parts.get(chunk, {})
        encoded, refused = await self._engine.submit(JobPriority.ROUND, self._mean, chunk, parts)
        parts.update(dict.fromkeys(parts, torch.empty(0)))  # the memory goes, the senders stay known
        self.refused.update((member, reason) for member, reason in refused.items() if member != self._me)
        if self._jobs is not None:
            header = {**self._header(chunk), "refused": sorted(refused)}
            for distance in range(1, len(self._group.members)):
                member = (self._me + distance) % len(self._group.members)
                self._jobs.create_task(self._send(Kind.AVERAGE, member, header, encoded))
        self._take(chunk, encoded, self._me in refused)

    def _mean(self, chunk: int, parts: dict[int, Tensor]) -> tuple[Tensor, dict[int, Refusal]]:
        """The average of the parts that count, encoded, and whose do not."""
        codec, span, size = self.phase.codec, self.split.span(chunk), self.split.size(chunk)
        refused: dict[int, Refusal] = dict(self._useless.get(chunk, {}))
        decoded: dict[int, Tensor] = {}
        contributes = self._me in self._contributors
        if contributes and self.phase.needs_residual:
            # Coded like the others' (see Averaged).
            parts = {**parts, self._me: codec.encode(self._vector[span], self._seed(chunk, self._me))}
        for member, data in parts.items():
            try:
                decoded[member] = codec.decode(data, size)
            except ValueError:
                refused[member] = "codec"
        if contributes and not self.phase.needs_residual:
            decoded[self._me] = self._vector[span]
        if not decoded:
            suspects = tuple(self._group.members[member] for member in refused)
            raise ExchangeError("schema", f"no part of chunk {chunk} can be decoded", suspects)
        refused |= screen(decoded, self._group.weights, self._robust)
        weights = [0 if member in refused else weight for member, weight in enumerate(self._group.weights)]
        counted = {member: part for member, part in decoded.items() if member not in refused}
        mean = aggregate(counted, weights, self._robust)
        encoded = codec.encode(mean, self._seed(chunk, -1))
        if self.phase.needs_residual:
            if weights[self._me] > 0:
                self._counted[span] = decoded[self._me]
            lost = mean - codec.decode(encoded, size)
            self._owed[span] = lost * (sum(weights) / max(1, self._group.weights[self._me]))
        return encoded, refused

    def _take(self, chunk: int, encoded: Tensor, is_refused: bool) -> None:
        """An average is here. What comes while others are decoded is decoded together: every job costs two hops."""
        self._averaged.add(chunk)
        self._untaken.append((chunk, encoded, is_refused))
        if not self._is_taking:
            self._is_taking = True
            self._spawn(self._take_all())

    async def _take_all(self) -> None:
        while self._untaken:
            batch, self._untaken = self._untaken[:BATCH_CHUNKS], self._untaken[BATCH_CHUNKS:]
            digests = await self._engine.submit(JobPriority.ROUND, self._decode_all, batch)
            for (chunk, encoded, _), digest in zip(batch, digests, strict=True):
                self._hashes[chunk], self._coded[chunk] = digest, encoded
                if len(self._hashes) == max(1, self.split.chunks // 2):
                    injector.hit("mid_exchange", self._group.step)
        self._is_taking = False
        if len(self._hashes) == self.split.chunks and not self._done.done():
            self._done.set_result(None)

    def _decode_all(self, averages: list[tuple[int, Tensor, bool]]) -> list[bytes]:
        return [self._decode(*each) for each in averages]

    def _decode(self, chunk: int, encoded: Tensor, is_refused: bool) -> bytes:
        span, size = self.split.span(chunk), self.split.size(chunk)
        try:
            self._average[span] = self.phase.codec.decode(encoded, size)
        except ValueError as error:
            reducer = self._group.members[self.split.reducer(chunk)]
            raise ExchangeError(
                "schema", f"an average that cannot be decoded: {error}", (reducer,)
            ) from error
        if is_refused:
            self.refused_own += 1
            if self.phase.needs_residual:
                self._counted[span] = 0.0
        return hashlib.sha256(tensor_bytes(encoded)).digest()
