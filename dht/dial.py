"""Dial initial peers and other peers, and say exactly what is wrong with each address.

The host is created without initial peers and dials afterwards, so that one good address suffices and every
bad one is named with its cause. Causes come from trying each step ourselves (parse, resolve, TCP connect)
before libp2p's handshake, which would report all addresses of a peer in one text, or only "dial backoff".
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from dht.addresses import Address, AddressError, parse_address, parse_peer_id
from dht.knock import KNOCK_S, Knock, knock, reachable_addresses

Cause = Literal[
    "malformed",  # not a usable multiaddr
    "self",  # our own peer id
    "unresolvable",  # the host name has no address
    "refused",  # nothing listens on that port
    "unreachable",  # no route to that address
    "timeout",  # no answer before the deadline (firewall, address of a machine that is off)
    "wrong_peer_id",  # another peer answered
    "backoff",  # failed a moment ago; libp2p does not try again for some seconds
    "handshake",  # something answered that is no libp2p peer, or broke off
    "unknown_address",  # only a peer id was given, and nobody knows an address of it
    "host_down",  # our own daemon does not answer
]

_ADDRESS_LINE = re.compile(r"\* \[([^\]]+)\] (.*)")
_MISMATCH = re.compile(r"peer id mismatch: expected (\w+), but remote key matches (\w+)")


@dataclass(frozen=True, slots=True)
class DialResult:
    """What became of one address.

    ok: connected. cause and detail: why not (None and "" when ok). expected_peer_id: the one in the
    address; actual_peer_id: the one that answered (None if nobody did). corrected_address: the multiaddr to
    use instead, where a wrong peer id is the only thing wrong.
    """

    address: str
    ok: bool
    cause: Cause | None = None
    detail: str = ""
    expected_peer_id: str | None = None
    actual_peer_id: str | None = None
    corrected_address: str | None = None

    def __str__(self) -> str:
        """One line for a person."""
        if self.ok:
            return f"{self.address}: connected"
        return f"{self.address}: {self.cause}: {self.detail}"


class DialError(ConnectionError):
    """A peer could not be reached; `cause` says why, in the words of `Cause`."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


async def dial_all(p2p: P2P, addresses: Sequence[str], deadline_s: float) -> list[DialResult]:
    """Dial every address at once; one result per address, in their order, within `deadline_s` seconds.

    Addresses need the peer's id (.../tcp/PORT/p2p/ID). Never raises for what is wrong with an address.
    An address of a peer that is already connected, or that connects through another of these addresses,
    counts as good when its port answers.
    """
    return list(await asyncio.gather(*(_dial(p2p, text.strip(), deadline_s) for text in addresses)))


async def connect_peer(p2p: P2P, peer_id: str, addresses: Sequence[str], deadline_s: float) -> None:
    """Connect to a peer by its id, with the addresses of its record (with or without /p2p/...).

    Addresses that cannot be used are skipped. With none left, the peer is looked up through the peers
    we are connected to. Returns at once if connected already. Raises DialError; its cause is "refused" only if
    every address refuses at this moment, and then libp2p was not asked, so that its back-off does not stand in
    the way when the peer comes back.
    """
    try:
        target = parse_peer_id(peer_id)
    except AddressError as error:
        raise DialError(str(error), "malformed") from error
    transports: list[bytes] = []
    for text in addresses:
        try:
            transports.append(Multiaddr(parse_address(text).transport).to_bytes())
        except AddressError:
            continue
    try:
        async with asyncio.timeout(deadline_s):
            is_known = await _is_connected(p2p, target)
            if not is_known and await knock(addresses, min(KNOCK_S, deadline_s)) is Knock.REFUSED:
                raise DialError(f"nothing listens at the addresses of peer {peer_id}", "refused")
            await _connect(p2p, target, transports, deadline_s)
    except TimeoutError as error:
        raise DialError(f"peer {peer_id} did not answer within {deadline_s:.1f} s", "timeout") from error
    except DialError:
        raise
    except ControlFailure as error:
        cause, detail, _ = _explain(str(error))
        raise DialError(f"peer {peer_id} cannot be reached: {detail}", cause) from error
    except (OSError, EOFError) as error:
        raise DialError("the own libp2p daemon does not answer", "host_down") from error


def describe_results(results: Sequence[DialResult]) -> str:
    """All results as lines of text, for the error when no address is good."""
    return "\n".join(f"  {'ok  ' if result.ok else 'FAIL'} {result}" for result in results)


async def _dial(p2p: P2P, text: str, deadline_s: float) -> DialResult:
    """Parse, knock, shake hands; stop at the first step that fails."""
    try:
        address = parse_address(text, needs_peer_id=True)
    except AddressError as error:
        return DialResult(text, False, "malformed", str(error))
    assert address.peer_id is not None
    expected = address.peer_id
    if expected == str(p2p.peer_id):
        return DialResult(text, False, "self", "this is the own address", expected, expected)
    transport_text = address.transport
    try:
        async with asyncio.timeout(deadline_s):
            numeric = await _knock(text, address)
            if isinstance(numeric, DialResult):
                return numeric
            transport_text = numeric.transport
            transport = Multiaddr(transport_text).to_bytes()
            await _connect(p2p, parse_peer_id(expected), [transport], deadline_s)
    except TimeoutError:
        return DialResult(text, False, "timeout", f"no answer within {deadline_s:.1f} s", expected)
    except ControlFailure as error:
        cause, detail, actual = _explain(str(error), transport_text)
        corrected = address.with_peer_id(actual) if actual is not None else None
        if actual is not None:
            detail = f"expected peer {expected}, but {actual} answered; its address is {corrected}"
        return DialResult(text, False, cause, detail, expected, actual, corrected)
    except (OSError, EOFError) as error:
        return DialResult(
            text, False, "host_down", f"the own libp2p daemon does not answer: {error!r}", expected
        )
    return DialResult(text, True, expected_peer_id=expected, actual_peer_id=expected)


async def _knock(text: str, address: Address) -> Address | DialResult:
    """A plain TCP connection, closed at once: the numeric address that answered, or what is wrong.

    A host name is resolved here, and every address it has is tried.
    """
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(address.protocol, socket.AF_UNSPEC)
    try:
        _, writer = await asyncio.open_connection(address.host, address.port, family=family)
    except socket.gaierror as error:
        detail = f"the name {address.host!r} cannot be resolved: {error.strerror or error}"
        return DialResult(text, False, "unresolvable", detail, address.peer_id)
    except ConnectionRefusedError:
        detail = f"nothing listens on {address.host} port {address.port}: is the peer up, is the port right?"
        return DialResult(text, False, "refused", detail, address.peer_id)
    except OSError as error:
        return DialResult(text, False, "unreachable", error.strerror or str(error), address.peer_id)
    host = str(writer.get_extra_info("peername")[0])
    writer.close()
    return Address("ip6" if ":" in host else "ip4", host, address.port, address.peer_id)


async def _is_connected(p2p: P2P, peer_id: PeerID) -> bool:
    """Whether p2pd holds a connection with a peer. Raises OSError or EOFError if p2pd is gone."""
    connector = p2p._client.control.daemon_connector
    reader, writer = await connector.open_connection()
    try:
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
    finally:
        writer.close()
    wanted = peer_id.to_bytes()
    return any(peer.id == wanted for peer in response.peers)


async def _connect(p2p: P2P, peer_id: PeerID, transports: Sequence[bytes], deadline_s: float) -> None:
    """p2pd's CONNECT; unlike hivemind's own it closes its socket when cancelled, and p2pd gives up too.

    Raises ControlFailure with p2pd's text, OSError or EOFError if p2pd is gone.
    """
    connector = p2p._client.control.daemon_connector
    reader, writer = await connector.open_connection()
    try:
        request = p2pd_pb2.ConnectRequest(
            peer=peer_id.to_bytes(), addrs=list(transports), timeout=math.ceil(deadline_s)
        )
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
    finally:
        writer.close()
    if response.type == p2pd_pb2.Response.ERROR:
        raise ControlFailure(response.error.msg)


def _all_refuse(lines: Sequence[str]) -> bool:
    """Whether p2pd says of every address that could be this peer's that it refuses; see `dht.knock`."""
    matches = [match for line in lines if (match := _ADDRESS_LINE.match(line))]
    said = {match[1]: match[2] for match in matches}
    usable = {address.transport for address in reachable_addresses(list(said))}
    return bool(usable) and all("connection refused" in said.get(transport, "") for transport in usable)


def _explain(message: str, transport: str | None = None) -> tuple[Cause, str, str | None]:
    """Cause, text and the peer id that answered, from p2pd's error.

    p2pd appends one line per address it knows of the peer ("  * [ADDRESS] reason"); only the line of
    `transport` counts where it is there.
    """
    lines = [line.strip() for line in message.splitlines()]
    own = [line for line in lines if transport is not None and line.startswith(f"* [{transport}]")]
    text = own[0].split("] ", 1)[-1] if own else message.replace("\n", " ")
    if match := _MISMATCH.search(text):
        return "wrong_peer_id", f"expected peer {match[1]}, but {match[2]} answered", match[2]
    if "dial backoff" in text:
        return "backoff", "failed a moment ago; wait some seconds before the next try", None
    if "connection refused" in text:
        if own or _all_refuse(lines):
            return "refused", "nothing listens on that port", None
        return "unreachable", "some addresses refuse, others do not answer", None
    if "no route to host" in text or "network is unreachable" in text:
        return "unreachable", "no route to that address", None
    if "timeout" in text or "deadline exceeded" in text:
        return "timeout", "no answer", None
    if "no addresses" in text or "routing: not found" in text or "failed to find any peer" in text:
        return "unknown_address", "nobody we are connected to knows an address of it", None
    return "handshake", text[:300], None
