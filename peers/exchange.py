"""One averaging attempt on the wire: what a stage's compressor averages, phase after phase, over the group's links.

Each phase is a butterfly (`peers.butterfly`). The leader also sends a small slice of its own fp32 weights (SLICE),
which everybody takes over before the step is applied; the digest covers it too.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peers.butterfly import Butterfly, ExchangeError
from peers.engine import Engine, JobPriority
from peers.frames import Frame, FrameError, Kind, need, need_count, tensor_bytes
from peers.limits import LIMITS
from peers.link import Link
from peers.round_messages import Group
from swarm.gradient.compressor import Averaged, Compression, Phase
from swarm.gradient.robust import Refusal, RobustConfig

__all__ = ["Exchange", "ExchangeError", "alone_digest", "exchange_digest", "group_of", "slice_pieces"]


DEFAULT_ROBUST = RobustConfig()


class Exchange:
    """Averages what a compressor makes of one gradient within one group. Give it PART, AVERAGE and SLICE frames; await
    `run`.

    elements: of the stage's weights. phases: of the step, as all members' compressors have them. run_seed: of
    stochastic rounding. robust: which parts count. deadline_s: of the whole attempt; None is LIMITS.round_s.
    slice_span: (offset, count) of the leader's weights that all members take over; None for none. After `run`,
    `encoded` holds the coded averages of each phase, chunk by chunk (uint8), and `slice` the offset and the leader's
    fp32 weights.
    """

    def __init__(
        self,
        group: Group,
        me: str,
        elements: int,
        phases: Sequence[Phase],
        engine: Engine,
        link_of: Callable[[str], Link | None],
        *,
        run_seed: int = 0,
        robust: RobustConfig = DEFAULT_ROBUST,
        deadline_s: float | None = None,
        slice_span: tuple[int, int] | None = None,
    ) -> None:
        self.group, self.elements, self.me, self.slice_span = group, elements, me, slice_span
        self.slice: tuple[int, Tensor] | None = None
        self._deadline_s = deadline_s
        self._me = group.members.index(me)
        self._engine, self._link_of = engine, link_of
        self.butterflies = [
            Butterfly(group, self._me, number, phase, run_seed, robust, engine, self._send)
            for number, phase in enumerate(phases)
        ]
        self._pieces = slice_pieces(slice_span)
        self._slices: dict[int, Tensor] = {}
        self._has_slice: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sending: dict[int, int] = {}
        self._number = 0

    @property
    def refused(self) -> dict[tuple[str, Refusal], int]:
        """Chunks whose part this member, as reducer, left out: by sender and reason."""
        found: Counter[tuple[str, Refusal]] = Counter()
        for butterfly in self.butterflies:
            for (member, reason), count in butterfly.refused.items():
                found[self.group.members[member], reason] += count
        return dict(found)

    @property
    def refused_own(self) -> int:
        """Chunks for which others left this member's part out."""
        return sum(butterfly.refused_own for butterfly in self.butterflies)

    @property
    def encoded(self) -> list[list[Tensor]]:
        """See the class."""
        return [butterfly.coded for butterfly in self.butterflies]

    async def run(self, compression: Compression, own_slice: Tensor | None = None) -> tuple[Tensor, str]:
        """Average; returns (the averaged gradient: fp32 [elements], digest).

        own_slice: the leader's weights of the slice's span, fp32; nobody else gives any. Raises ExchangeError;
        nothing is changed then.
        """
        deadline_s = LIMITS.round_s if self._deadline_s is None else self._deadline_s
        submit = self._engine.submit
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as jobs:
                if self._pieces and self.group.leader == self.group.members[self._me]:
                    jobs.create_task(self._send_slice(own_slice, jobs))
                self._check_slice()
                begin = compression.vector if self.butterflies else compression.result
                vector = await submit(JobPriority.ROUND, begin)
                for number, butterfly in enumerate(self.butterflies):
                    self._number = number
                    averaged = await butterfly.run(vector, jobs)
                    is_last = number + 1 == len(self.butterflies)
                    vector = await submit(JobPriority.ROUND, _go_on, compression, averaged, is_last)
                await self._has_slice
        except TimeoutError as error:
            raise ExchangeError("late", f"no result after {deadline_s:.0f} s", self._suspects()) from error
        except ExceptionGroup as group:
            # Several jobs may fail at once and each in its own way: it is one failed attempt.
            known, rest = group.split((ExchangeError, ConnectionError, ValueError))
            if rest is not None or known is None:
                raise
            first = _first_of(known)
            if isinstance(first, ExchangeError):
                raise ExchangeError(first.reason, str(first), first.suspects) from group
            reason = "schema" if isinstance(first, ValueError) else "disconnected"
            raise ExchangeError(reason, str(first)) from group
        if self._pieces:
            values = torch.cat([self._slices[offset] for offset, _ in self._pieces])
            self.slice = (self._pieces[0][0], values)
        hashes = [digest for butterfly in self.butterflies for digest in butterfly.hashes]
        return vector, exchange_digest(hashes, self.slice, self.group.corrector)

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A PART, AVERAGE or SLICE of this group. Raises FrameError for one that does not belong."""
        if frame.kind is Kind.SLICE:
            self._on_slice(peer, frame)
            return
        butterfly = self.butterflies[need_count(frame.header, "phase", len(self.butterflies) - 1)]
        chunk = need_count(frame.header, "chunk", butterfly.split.chunks - 1)
        if peer not in self.group.members:
            raise FrameError("size", f"{frame.kind} of {peer}, who is not in the group")
        butterfly.on_frame(peer, self.group.members.index(peer), chunk, frame)

    def _on_slice(self, peer: str, frame: Frame) -> None:
        """A piece of the leader's slice; kept once, a repeat is dropped."""
        offset = need_count(frame.header, "offset", self.elements)
        size = dict(self._pieces).get(offset)
        if size is None or peer != self.group.leader or frame.payload_bytes != 4 * size:
            raise FrameError("range", f"a slice of {frame.payload_bytes} bytes at {offset} does not belong")
        if offset not in self._slices:
            self._slices[offset] = torch.frombuffer(frame.data(), dtype=torch.float32)
            self._check_slice()

    async def _send_slice(self, own: Tensor | None, jobs: asyncio.TaskGroup) -> None:
        expected = sum(count for _, count in self._pieces)
        if own is None or own.numel() != expected:
            raise ExchangeError("other", f"the leader has no slice of {expected} weights")
        start = self._pieces[0][0]
        for offset, count in self._pieces:
            self._slices[offset] = own[offset - start : offset - start + count].contiguous()
        self._check_slice()
        for member in range(len(self.group.members)):
            if member != self._me:
                jobs.create_task(self._send_pieces(member))

    async def _send_pieces(self, member: int) -> None:
        for offset, _ in self._pieces:
            header: dict[str, object] = {"group": self.group.id, "offset": offset}
            await self._send(Kind.SLICE, member, header, self._slices[offset])

    def _check_slice(self) -> None:
        if len(self._slices) == len(self._pieces) and not self._has_slice.done():
            self._has_slice.set_result(None)

    def _suspects(self) -> tuple[str, ...]:
        """Members that the phase under way waited for, and last those that took nothing more."""
        late = self.butterflies[self._number].late()
        if not late and len(self._slices) < len(self._pieces):
            late[self.group.members.index(self.group.leader)] = None
        late |= {member: None for member, count in self._sending.items() if count > 0}
        late.pop(self._me, None)
        return tuple(self.group.members[member] for member in late)

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


def _go_on(compression: Compression, averaged: Averaged, is_last: bool) -> Tensor:
    """Take a phase's average; returns the next phase's vector, after the last phase the averaged gradient."""
    compression.take(averaged)
    return compression.result() if is_last else compression.vector()


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
