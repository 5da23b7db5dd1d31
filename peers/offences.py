"""Frames the protocol does not allow, counted for each peer over all its links.

Counted here and not at the link: whoever is cut off after a few would only have to come back.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque

from peers.limits import LIMITS


class Offences:
    """Who offended how often within the last `offence_backoff_s` seconds."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, peer: str, weight: int = 1) -> bool:
        """Note an offence; True once the peer has reached the limit, from which it starts anew.

        weight: as how many it counts; `LIMITS.offences` for one after which a stream cannot be read on.
        """
        now = time.monotonic()
        times = self._times.setdefault(peer, deque())
        self._times.move_to_end(peer)
        while times and now - times[0] > LIMITS.offence_backoff_s:
            times.popleft()
        times.extend([now] * weight)
        if len(times) >= LIMITS.offences:
            del self._times[peer]
            return True
        while len(self._times) > LIMITS.links:
            self._times.popitem(last=False)
        return False
