"""Where peers were last seen, remembered for a while after their records are gone. Pure.

A board that splits in two loses sight of the other half within a record's life; only who remembers addresses can
knock there again. The initial peers alone do not suffice: they may be the ones that are gone.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable

from dht.records import PeerRecord

KEPT_S = 600.0
MAX_KEPT = 512


class Acquaintances:
    """Addresses by peer id, the most recently seen last; at most `MAX_KEPT`, for at most `KEPT_S` seconds."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()

    def remember(self, records: Iterable[PeerRecord], now: float) -> None:
        """Peers seen at `now`; those that said goodbye are forgotten."""
        for record in records:
            self._seen.pop(record.peer_id, None)
            if record.addresses and record.state != "offline":
                self._seen[record.peer_id] = (now, record.addresses)
        while self._seen and (
            len(self._seen) > MAX_KEPT or next(iter(self._seen.values()))[0] < now - KEPT_S
        ):
            self._seen.popitem(last=False)

    def sample(self, count: int) -> list[tuple[str, tuple[str, ...]]]:
        """Some of them at random, with their addresses."""
        chosen = random.sample(sorted(self._seen), min(count, len(self._seen)))
        return [(peer, self._seen[peer][1]) for peer in chosen]
