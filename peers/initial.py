"""The first dials of a peer: one initial peer that answers suffices, and every one that does not is named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from dht.addresses import parse_peer_id
from dht.dial import DialResult, describe_results, dial_all
from peers.config import UserError
from peers.fileserver import HANDLER
from peers.limits import LIMITS

logger = logging.getLogger("swarm_peer.initial")

DIAL_S = 15.0
"""One try of all addresses."""
GRACE_S = 3.0
"""Once one address is good, the others have this long to show what they are."""
RETRY_S = 2.0
SERVING_S = 10.0
"""From a peer's first answer to its serving the run's files."""
HOPELESS = ("malformed", "self", "wrong_peer_id")
"""Causes that no waiting mends."""


async def dial_initial_peers(
    p2p: P2P, addresses: Sequence[str], deadline_s: float | None, note: Callable[[str], None]
) -> list[str]:
    """The addresses that answer, at least one; `note` warns of each of the others.

    deadline_s: while none answers, those that may come up (a seed that is still starting) are dialled again for this
    long, with a note whenever what is wrong with one changes; None: each is dialled once. Raises UserError with every
    address's cause if none answers, at once if no waiting would mend it.
    """
    if not addresses:
        return []
    note(f"dialling {len(addresses)} initial peer{'s' * (len(addresses) > 1)}")
    began = time.monotonic()
    known: dict[str, DialResult] = {}
    waiting = list(dict.fromkeys(address.strip() for address in addresses))
    while True:
        left = DIAL_S if deadline_s is None else deadline_s - (time.monotonic() - began)
        results = await _dial_once(p2p, waiting, min(DIAL_S, max(left, 1.0)))
        good = [result.address for result in results if result.ok]
        for result in results:
            before = known.get(result.address)
            # What libp2p remembers of the try before is not what is wrong with the address.
            if result.cause == "backoff" and before is not None:
                continue
            is_news = deadline_s is not None and (before is None or before.cause != result.cause)
            if not result.ok and (good or is_news):
                note(f"warning: {result}")
            known[result.address] = result
        if good:
            return good
        waiting = [address for address in waiting if known[address].cause not in HOPELESS]
        is_over = deadline_s is None or time.monotonic() + RETRY_S > began + deadline_s
        if is_over or not waiting:
            tried = "" if deadline_s is None else f" within {time.monotonic() - began:.0f} s"
            table = describe_results([known[address.strip()] for address in dict.fromkeys(addresses)])
            raise UserError(f"none of the initial peers can be reached{tried}:\n{table}")
        await asyncio.sleep(RETRY_S)


async def _dial_once(p2p: P2P, addresses: Sequence[str], deadline_s: float) -> list[DialResult]:
    """One result per address. The slow ones are not waited for once one is good."""
    tasks = [asyncio.create_task(_dial(p2p, address, deadline_s)) for address in addresses]
    pending = set(tasks)
    stop_at: float | None = None
    try:
        while pending and (stop_at is None or time.monotonic() < stop_at):
            timeout = None if stop_at is None else stop_at - time.monotonic()
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if stop_at is None and any(task.result().ok for task in done):
                stop_at = time.monotonic() + GRACE_S
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    silent = DialResult("", False, "timeout", f"no answer within {GRACE_S:.0f} s of the first good one")
    return [
        replace(silent, address=address) if task.cancelled() else task.result()
        for address, task in zip(addresses, tasks, strict=True)
    ]


async def _dial(p2p: P2P, address: str, deadline_s: float) -> DialResult:
    """One address. A peer that answers may be starting: its daemon listens a moment before it serves anything."""
    (result,) = await dial_all(p2p, [address], deadline_s)
    give_up = time.monotonic() + SERVING_S
    while result.ok and not await _serves(p2p, address.rpartition("/")[2]):
        if time.monotonic() > give_up:
            detail = "a libp2p peer answers, but it serves no run: is this the address of a peer of the run?"
            return replace(result, ok=False, cause="handshake", detail=detail)
        await asyncio.sleep(SERVING_S / 20)
    return result


async def _serves(p2p: P2P, peer: str) -> bool:
    try:
        async with asyncio.timeout(LIMITS.dial_s):
            _, _, writer = await p2p.call_binary_stream_handler(parse_peer_id(peer), HANDLER)
    except (P2PDaemonError, OSError, EOFError, TimeoutError):
        return False
    writer.close()
    return True
