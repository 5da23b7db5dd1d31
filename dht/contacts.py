"""Whom a noticeboard keeps in touch with: its initial peers, whose clock it adopts, and peers it has seen.

A board that has split in two grows together again because each half dials whom it remembers of the other. The same
brings a peer back whose daemon was restarted and knows nobody.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P
from hivemind.proto import dht_pb2

from dht.acquaintances import Acquaintances
from dht.addresses import Address, AddressError, parse_peer_id
from dht.clock import WARN_CLOCK_OFFSET_S, SwarmClock
from dht.dial import DialError, connect_peer
from dht.node import CALL_TIMEOUT_S

logger = logging.getLogger("dht.noticeboard")

HEAL_BREADTH = 8
"""Peers that are dialled again beside the initial ones."""


class Contacts:
    """initial: addresses with peer id, which may be none (the first node). node: the live DHT node, when asked."""

    def __init__(
        self, p2p: P2P, initial: Sequence[Address], clock: SwarmClock, node: Callable[[], DHTNode]
    ) -> None:
        self.initial = list(initial)
        self.acquaintances = Acquaintances()
        self._p2p, self._clock, self._node = p2p, clock, node

    async def greet(self) -> int:
        """Ping the initial peers, adopt their clock; returns how many answered. Raises ClockSkewError."""
        answers = await asyncio.gather(*(self.ping(address.peer_id or "") for address in self.initial))
        differences = [difference for difference in answers if difference is not None]
        before = self._clock.offset_s
        offset = self._clock.correct(differences)
        if abs(offset) > WARN_CLOCK_OFFSET_S and abs(offset - before) > 0.5:
            behind = "behind" if offset > 0 else "ahead of"
            logger.warning(
                "this machine's clock is %.1f s %s the swarm's: taken into account", abs(offset), behind
            )
        return len(differences)

    async def heal(self) -> None:
        """Dial the initial peers and some that were seen lately; whoever answers is in the routing table again.

        Raises ClockSkewError.
        """
        initial = [(address.peer_id or "", (address.transport,)) for address in self.initial]
        known = {peer for peer, _ in initial}
        others = [entry for entry in self.acquaintances.sample(HEAL_BREADTH) if entry[0] not in known]
        await asyncio.gather(*(self._redial(*entry) for entry in initial + others))
        await asyncio.gather(self.greet(), *(self.ping(peer) for peer, _ in others))

    async def ping(self, peer_id: str) -> float | None:
        """One peer: its clock minus ours in seconds, or None if it does not answer."""
        if peer_id == str(self._p2p.peer_id):
            return None
        peer = parse_peer_id(peer_id)
        protocol = self._node().protocol
        request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
        asked = self._clock.now()
        try:
            response = await protocol.get_stub(peer).rpc_ping(request, timeout=CALL_TIMEOUT_S)
            answered = self._clock.now()
            node_id = DHTID.from_bytes(response.peer.node_id)
        except Exception as error:  # includes a peer that is no noticeboard, or a client
            logger.debug("peer %s does not answer: %r", peer_id, error)
            return None
        await protocol.update_routing_table(node_id, peer, responded=True)
        difference = float(response.dht_time) - (asked + answered) / 2
        return difference if math.isfinite(difference) else None

    async def _redial(self, peer: str, addresses: Sequence[str]) -> None:
        if peer != str(self._p2p.peer_id):
            with suppress(DialError, AddressError):
                await connect_peer(self._p2p, peer, addresses, CALL_TIMEOUT_S)
