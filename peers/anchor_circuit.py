"""The anchor circuit: a pass through anchors that hold some of the stages each.

Every anchor of the row (`anchor_cover`) talks with the one behind it over a stream of its own, at the priority of
files. What travels:

    PASS  do "open"    version, run, legs, microbatches     towards the last stage
    PASS  do "ready"                                        back, once the weights are loaded here and behind
    DENSE index        hidden states [B, T, H] in bf16      forward; the same of their gradients back
    PASS  do "end"                                          forward, once all has come back: fit and publish

One microbatch is under way at a time: nobody waits for an anchor. Token ids do not travel, since every anchor reads
the pass's samples itself. Whatever goes wrong before the end ends the pass at every anchor of it, and nobody publishes
anything then; after it each anchor fits and publishes by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError
from torch import Tensor

from dht.dial import DialError, connect_peer
from peers.anchor_cover import Leg, Span, place_of, unpack_legs
from peers.config import UserError
from peers.fileserver import NO_STAGE
from peers.frames import Frame, FrameError, Kind, aligned, need, need_count, pack_tensors, unpack_tensors
from peers.limits import LIMITS
from peers.streams import read_frame, write_frame
from peers.traffic import Traffic

logger = logging.getLogger("swarm_peer.anchor")
HANDLER = "swarm-peer/anchor"
LOAD_S = 1800.0
"""From opening a pass to its weights being loaded everywhere; an anchor that dies is found by its stream's end."""
FRAME_S = 300.0
"""From a microbatch's forward to its gradient, through all anchors behind."""
FINISH_S = 600.0
"""For a pass that has come back whole to be fitted and published, once its lead opens the next."""
STREAMS, STRANGERS, STREAMS_PER_PEER = 64, 8, 4
"""On which passes may be opened here at the same time: by all anchors, by all others (who are told why not), by one
peer."""
MAX_VERSION = 2**53
_STREAM_ERRORS = (
    ControlFailure,
    P2PDaemonError,
    DialError,
    OSError,
    TimeoutError,
    asyncio.IncompleteReadError,
    RuntimeError,  # uvloop raises it on a transport that is closing, torch if it cannot
)


class PassError(Exception):
    """A pass that cannot be made, or made to its end; what it had found is dropped."""


class PassWork(Protocol):
    """What an anchor does in a pass. Every method raises ValueError, OSError, RuntimeError or UserError (weights that
    nobody gives, a disk that is full) if it cannot.
    """

    microbatches: int
    """Of every pass."""

    async def load(self, version: int, first: int, last: int) -> None:
        """Be ready to pass microbatches through the weights of a version, stages `first` to `last`."""

    def shape(self, index: int) -> tuple[int, int, int]:
        """Shape [B, T, H] of a microbatch's states."""

    async def forward(self, index: int, incoming: Tensor | None) -> Tensor | None:
        """See `SpanPass.forward`."""

    async def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """See `SpanPass.backward`."""

    async def finish(self) -> None:
        """Every microbatch has come back: fit the priors and publish them."""


@dataclass(slots=True)
class _Pass:
    """The pass under way. opener: who opened it. is_back: every gradient has been returned; what is left is to hear of
    the end, to fit and to publish.
    """

    opener: str
    task: asyncio.Task[None] | None = None
    is_back: bool = False


class AnchorCircuit:
    """This anchor's place in circuits. Lives in the communication loop; `start` and `close` are called there.

    span: the stages held here. anchors: those whose priors count, now. addresses: where a peer can be dialled.
    on_abandoned: told of passes of others that ended early here, with the version and the cause.
    """

    def __init__(
        self,
        *,
        p2p: P2P,
        run_id: str,
        stages: int,
        span: Span,
        anchors: Callable[[], tuple[str, ...]],
        addresses: Callable[[str], Sequence[str]],
        traffic: Traffic,
        work: PassWork,
        on_abandoned: Callable[[int, str], None],
    ) -> None:
        self._p2p, self._run_id, self._stages, self._span = p2p, run_id, stages, span
        self._anchors, self._addresses = anchors, addresses
        self._traffic, self._work, self._on_abandoned = traffic, work, on_abandoned
        self._me = p2p.peer_id.to_base58()
        self._streams: Counter[str] = Counter()
        self._strangers: Counter[str] = Counter()
        self._current: _Pass | None = None

    async def start(self) -> None:
        """Take part in passes from now on."""
        await self._p2p.add_binary_stream_handler(HANDLER, self._accept)

    async def close(self) -> None:
        """Take part in no more passes; one under way is abandoned. Works also when p2pd has died."""
        with suppress(ControlFailure, OSError, asyncio.IncompleteReadError, KeyError, TimeoutError):
            async with asyncio.timeout(LIMITS.dial_s):
                await self._p2p.remove_binary_stream_handler(HANDLER)
        await self._drop()

    async def lead(self, version: int, legs: Sequence[Leg]) -> None:
        """Make a pass with the anchors of this row, of which this peer is the first. Raises PassError."""
        await self._run(self._me, version, tuple(legs), 0, None)

    # -- as one of the others --------------------------------------------------------------------------------

    async def _accept(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A pass that the anchor before this one opens."""
        sender: str = info.peer_id.to_base58()
        before = _Neighbour(reader, writer, self._traffic)
        is_anchor = sender in self._anchors()  # before anything is counted: strangers take no anchor's place
        streams, most = (self._streams, STREAMS) if is_anchor else (self._strangers, STRANGERS)
        streams[sender] += 1
        try:
            async with _errors():
                if streams[sender] > STREAMS_PER_PEER or streams.total() > most:
                    raise PassError("too many passes are opened at once")
                header = (await before.expect("open", LIMITS.hello_s)).header
                if not is_anchor:
                    raise PassError(f"{sender[-8:]} is no anchor of this run")
                version = need_count(header, "version", MAX_VERSION)
                legs, place = self._place(header, sender)
                if self._current is not None and self._current.opener == sender:
                    await self._end_before(self._current)
            try:
                await self._run(sender, version, legs, place, before)
            except PassError as error:
                self._on_abandoned(version, str(error))
                raise
        except PassError as error:
            logger.warning("no pass with %s: %s", sender[-8:], error)
            await before.refuse(str(error))
        finally:
            streams[sender] -= 1
            if not streams[sender]:
                del streams[sender]
            before.close()

    def _place(self, header: dict[str, Any], sender: str) -> tuple[tuple[Leg, ...], int]:
        """The row of a pass and this anchor's place in it. Raises FrameError, PassError."""
        if need(header, "run", str) != self._run_id:
            raise PassError("this is an anchor of another run")
        if need(header, "microbatches", int) != self._work.microbatches:
            raise PassError(f"a pass of this run has {self._work.microbatches} microbatches")
        legs = unpack_legs(header.get("legs"), self._stages)
        return legs, place_of(legs, self._me, sender, self._span, self._anchors(), self._stages)

    # -- a pass ----------------------------------------------------------------------------------------------

    async def _run(
        self, opener: str, version: int, legs: tuple[Leg, ...], place: int, before: _Neighbour | None
    ) -> None:
        """One pass at a time. Raises PassError."""
        if self._current is not None:
            raise PassError("another pass is under way here")
        current = self._current = _Pass(opener)
        # In a task of its own: a stream's handler that is cancelled complains aloud in Python 3.11.
        task = current.task = asyncio.create_task(self._pass(current, version, legs, place, before))
        try:
            async with _errors():
                await asyncio.wait([task])
                if task.cancelled():
                    raise PassError("it was given up here")
                task.result()
        finally:
            task.cancel()
            if self._current is current:
                self._current = None

    async def _end_before(self, current: _Pass) -> None:
        """Its lead opens another pass: one that has come back whole may end first, any other has been given up there.

        The lead does not wait for those behind it to fit and publish, nor does the new stream for the old one's last
        frame.
        """
        if current.is_back and current.task is not None:
            await asyncio.wait([current.task], timeout=FINISH_S)
        if self._current is current:
            await self._drop()

    async def _drop(self) -> None:
        """Give up the pass under way."""
        current, self._current = self._current, None
        if current is not None and current.task is not None:
            current.task.cancel()
            await asyncio.wait([current.task])

    async def _pass(
        self,
        current: _Pass,
        version: int,
        legs: tuple[Leg, ...],
        place: int,
        before: _Neighbour | None,
    ) -> None:
        """This anchor's part in a pass, from loading the weights to publishing the priors."""
        behind: _Neighbour | None = None
        leg = legs[place]
        try:
            async with asyncio.timeout(LOAD_S), asyncio.TaskGroup() as group:
                loading = group.create_task(self._work.load(version, leg.first, leg.last))
                watching = group.create_task(before.stays_silent()) if before is not None else None
                if place + 1 < len(legs):
                    behind = await self._open(version, legs, place + 1)
                    await behind.expect("ready", LOAD_S)
                await loading
                if watching is not None:
                    watching.cancel()
            if before is not None:
                await before.say("ready")
            await self._microbatches(before, behind)
            current.is_back = True
            if before is not None:
                await before.expect("end", FRAME_S)
            if behind is not None:
                await behind.say("end")
        finally:
            if behind is not None:
                behind.close()
        await self._work.finish()

    async def _microbatches(self, before: _Neighbour | None, behind: _Neighbour | None) -> None:
        work = self._work
        for index in range(work.microbatches):
            shape = work.shape(index)
            incoming = None
            if before is not None:  # those before this one may still be loading
                incoming = await before.tensor(index, shape, FRAME_S if index else LOAD_S)
            outgoing = await work.forward(index, incoming)
            gradient = None
            if behind is not None and outgoing is not None:
                await behind.send(index, outgoing)
                gradient = await behind.tensor(index, shape, FRAME_S)
            returned = await work.backward(index, gradient)
            if before is not None:
                if returned is None:
                    raise PassError("the stages here give no gradient")
                await before.send(index, returned)

    async def _open(self, version: int, legs: tuple[Leg, ...], place: int) -> _Neighbour:
        """A stream to the anchor behind this one, with the pass opened on it."""
        peer = legs[place].peer
        await connect_peer(self._p2p, peer, self._addresses(peer), LIMITS.dial_s)
        async with asyncio.timeout(LIMITS.dial_s):
            _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(peer), HANDLER)
        behind = _Neighbour(reader, writer, self._traffic)
        try:
            await behind.say(
                "open",
                version=version,
                run=self._run_id,
                legs=[leg.pack() for leg in legs],
                microbatches=self._work.microbatches,
            )
        except BaseException:
            behind.close()
            raise
        return behind


class _Neighbour:
    """A stream to the anchor before or behind: frames one after another, every wait with a deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: Traffic) -> None:
        self._reader, self._writer = reader, writer
        self._up = traffic.lane("up", NO_STAGE, is_bulk=True)
        self._down = traffic.lane("down", NO_STAGE, is_bulk=True)

    def close(self) -> None:
        """End the stream: the other side sees it at once."""
        self._writer.close()

    async def say(self, what: str, **header: Any) -> None:
        """Send a PASS frame."""
        await self._write(Frame(Kind.PASS, {"do": what, **header}))

    async def refuse(self, why: str) -> None:
        """Say why the pass ends here, if the other side still listens."""
        with suppress(*_STREAM_ERRORS):
            async with asyncio.timeout(LIMITS.hello_s):
                await write_frame(self._writer, Frame(Kind.REFUSED, {"reason": why[:200]}), valve=self._up)

    async def expect(self, what: str, deadline_s: float) -> Frame:
        """The PASS frame that is due. Raises FrameError for any other, PassError for a refusal."""
        frame = await self._read(0, deadline_s)
        if frame.kind is not Kind.PASS or need(frame.header, "do", str) != what:
            raise FrameError("kind", f"{what} of a pass was expected, got {frame.kind}")
        return frame

    async def stays_silent(self) -> None:
        """Read until cancelled, while nothing is due. Raises FrameError for a frame, PassError for a refusal, or what
        the stream's end raises.
        """
        frame = await self._read(0, LOAD_S)
        raise FrameError("kind", f"nothing of a pass is due yet, got {frame.kind}")

    async def send(self, index: int, states: Tensor) -> None:
        """Send hidden states or gradients."""
        payload = await asyncio.to_thread(_packed, states)
        await self._write(Frame(Kind.DENSE, {"index": index}, payload))

    async def tensor(self, index: int, shape: tuple[int, int, int], deadline_s: float) -> Tensor:
        """The states or gradients that are due: bf16 of this shape. Raises FrameError, PassError."""
        nbytes = aligned(shape[0] * shape[1] * shape[2] * torch.bfloat16.itemsize)
        frame = await self._read(nbytes, deadline_s)
        if frame.kind is not Kind.DENSE or need(frame.header, "index", int) != index:
            raise FrameError("kind", f"microbatch {index} was expected, got {frame.kind}")
        return await asyncio.to_thread(_unpacked, frame, index, shape)

    async def _write(self, frame: Frame) -> None:
        async with asyncio.timeout(FRAME_S):
            await write_frame(self._writer, frame, valve=self._up)

    async def _read(self, payload_limit: int, deadline_s: float) -> Frame:
        async with asyncio.timeout(deadline_s):
            frame, _ = await read_frame(self._reader, payload_limit, valve=self._down)
        if frame.kind is Kind.REFUSED:
            reason = str(frame.header.get("reason", ""))[:200]
            raise PassError("".join(c if c.isprintable() else "?" for c in reason))
        return frame


def _packed(states: Tensor) -> list[memoryview]:
    """In a thread: a whole microbatch is converted, and fetched from the device."""
    return pack_tensors([states.detach().to("cpu", torch.bfloat16).contiguous()])


def _unpacked(frame: Frame, index: int, shape: tuple[int, int, int]) -> Tensor:
    """In a thread, as `_packed`. Raises FrameError."""
    (states,) = unpack_tensors(frame.data(), [(torch.bfloat16, shape)])
    if not bool(torch.isfinite(states).all()):
        raise FrameError("not_finite", f"microbatch {index} holds values that are not finite")
    return states


@asynccontextmanager
async def _errors() -> Any:
    """Whatever ends a pass early is a PassError with the cause."""
    try:
        yield
    except PassError:
        raise
    except BaseExceptionGroup as group:
        wanted, rest = group.split(
            lambda error: isinstance(error, (PassError, FrameError, ValueError, UserError, *_STREAM_ERRORS))
        )
        if rest is not None or wanted is None:
            raise
        raise PassError(_cause(wanted.exceptions[0])) from group
    except (FrameError, ValueError, UserError, *_STREAM_ERRORS) as error:
        raise PassError(_cause(error)) from error


def _cause(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "an anchor of the pass has gone"
    if isinstance(error, TimeoutError):
        return "an anchor of the pass did not answer in time"
    return " ".join(str(error).split())[:300] or type(error).__name__
