"""The first words on a stream of a link, from the side that dials: HELLO, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError

from dht.dial import DialError, connect_peer
from peers.credit import MOST_CREDIT_BYTES
from peers.frames import Frame, FrameError, Kind, need, need_count
from peers.limits import LIMITS
from peers.link import Hello, Stream, read_frame, write_frame

HANDLER = "swarm-peer/link"
PROBE_INDEX = -1
SUPERSEDED = "superseded"
"""Why a peer refuses an earlier start of a neighbour than the one it knows."""
MAX_STAGE = 4095
MAX_INCARNATION = 2**53

DIAL_ERRORS = (ControlFailure, P2PDaemonError, OSError, asyncio.IncompleteReadError, FrameError, TimeoutError)


class LinkRefusedError(ConnectionError):
    """The other side answered our HELLO with REFUSED."""


async def open_stream(
    p2p: P2P, peer: str, addresses: Sequence[str], hello: Hello, link: tuple[str, int, int]
) -> tuple[Stream, Hello]:
    """Connect if need be, open one stream and greet. link: its name, this stream's index, streams in all.

    Raises one of DIAL_ERRORS (LinkRefusedError and DialError among them) and leaves nothing open.
    """
    await connect_peer(p2p, peer, addresses, LIMITS.dial_s)
    _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer), HANDLER)
    try:
        name, index, total = link
        await write_frame(writer, Frame(Kind.HELLO, hello.header(link=name, index=index, total=total)))
        frame, _ = await read_frame(reader, 0)
        if frame.kind is Kind.REFUSED:
            raise LinkRefusedError(str(frame.header.get("reason", ""))[:200])
        return Stream(reader, writer), parse_hello(frame)
    except BaseException:
        writer.close()
        raise


def parse_hello(frame: Frame) -> Hello:
    """The HELLO in a frame. Raises FrameError."""
    if frame.kind is not Kind.HELLO:
        raise FrameError("hello", f"a stream begins with HELLO, got {frame.kind}")
    has_window = "window" in frame.header
    return Hello(
        run=need(frame.header, "run", str)[:128],
        stage=need_count(frame.header, "stage", MAX_STAGE),
        incarnation=need_count(frame.header, "incarnation", MAX_INCARNATION),
        protocol=need(frame.header, "protocol", int),
        window=need_count(frame.header, "window", MOST_CREDIT_BYTES) if has_window else None,
    )


def is_refusal(error: BaseException) -> bool:
    """Whether a dial failed because nobody listens at the peer's addresses, seen just now.

    Not libp2p's back-off, which only says that some dial failed before; not the own daemon that is down.
    """
    return isinstance(error, DialError) and error.cause == "refused"


def is_own_fault(error: BaseException) -> bool:
    """Whether a dial failed because our own libp2p daemon is down: it says nothing about the peer."""
    if isinstance(error, DialError):
        return error.cause == "host_down"
    # With a connection of its own: the daemon's socket is not there. On the shared one: see dht.revive.
    return isinstance(error, ConnectionRefusedError | FileNotFoundError) or (
        isinstance(error, P2PDaemonError) and "is being started again" in str(error)
    )
