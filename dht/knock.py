"""Knock: a plain TCP connection, closed at once, tells whether anybody listens at a peer's addresses.

libp2p answers a failed dial from memory for some seconds ("dial backoff"), and mixes what every address said
into one text. Whether a peer's process has ended must be known afresh and without doubt: each of its addresses
that could be reached from here refuses, now. An address without an answer (unplugged, firewall) proves nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from enum import Enum

from dht.addresses import Address, AddressError, parse_address

KNOCK_S = 2.0
"""How long an address may take to answer before it counts as silent."""
MAX_KNOCKS = 8


class Knock(Enum):
    """What a peer's addresses say."""

    OPEN = "open"
    """Somebody listens at one of them."""
    REFUSED = "refused"
    """Every one of them refuses connections."""
    UNKNOWN = "unknown"
    """No answer, no route, or no address to try."""


async def knock(addresses: Sequence[str], deadline_s: float = KNOCK_S) -> Knock:
    """Knock at a peer's addresses, all at once; the first that opens decides. Never raises for an address.

    A record's loopback addresses belong to the machine that wrote it, so they count only where it has no other
    (a swarm on one machine). At most `MAX_KNOCKS` addresses are tried.
    """
    usable = reachable_addresses(addresses)
    if not usable:
        return Knock.UNKNOWN
    waiting = {asyncio.create_task(_knock(address)) for address in usable}
    answers: list[Knock] = []
    try:
        async with asyncio.timeout(deadline_s):
            for next_answer in asyncio.as_completed(waiting):
                answers.append(await next_answer)
                if answers[-1] is Knock.OPEN:
                    return Knock.OPEN
    except TimeoutError:
        return Knock.UNKNOWN
    finally:
        for task in waiting:
            task.cancel()
    return Knock.REFUSED if all(answer is Knock.REFUSED for answer in answers) else Knock.UNKNOWN


def reachable_addresses(addresses: Sequence[str]) -> list[Address]:
    """Those of a record's addresses that may be this peer's, seen from here: see `knock`."""
    parsed: list[Address] = []
    for text in addresses:
        try:
            parsed.append(parse_address(text))
        except AddressError:
            continue
    outside = [address for address in parsed if not is_loopback(address.host)]
    return (outside or parsed)[:MAX_KNOCKS]


def is_loopback(host: str) -> bool:
    """Whether a host is the machine that says so."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _knock(address: Address) -> Knock:
    try:
        _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return Knock.REFUSED
    except OSError:
        return Knock.UNKNOWN
    writer.close()
    return Knock.OPEN
