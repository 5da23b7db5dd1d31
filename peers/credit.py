"""Credit: how much bulk a neighbour may send to a peer whose download is capped.

Reading slowly is not enough. libp2p's own flow control tells the sender of free room in steps of half a window,
128 KiB to 8 MiB of each stream, so a slow line sees bursts of a second and more, and several neighbours add
theirs up. So a capped peer tells a window in its HELLO, and every byte that has passed its download shaper
is given back in CREDIT frames: neighbours send exactly as fast as the bucket lets bytes through, and what
arrives before the bucket has spoken is bounded by the window.

The window begins at 50 ms of the line (64 to 192 KiB: what a neighbour can send before it knows how busy the
line is), and grows towards what the link's round trip needs for as long as bytes find the bucket free. Reads are
paced all the same: a neighbour that does not keep to its credit fills its own streams' buffers.
"""

from __future__ import annotations

import asyncio

from peers.limits import KIB, LIMITS, MIB
from peers.shaper import Shaper

WINDOW_CEILING_BYTES = 8 * MIB
ROUND_TRIP_MARGIN_S = 0.05
"""What a window holds beyond the round trip: credit that is being collected, timers, busy loops."""
CREDITS_PER_WINDOW = 16
"""CREDIT frames in which a window is given back."""
PIECE_S = 0.005
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 8 * KIB, 64 * KIB
MOST_CREDIT_BYTES = 1 << 40
"""More is never useful, whatever the other side says."""


class SendCredit:
    """The sending side: bytes that may still be sent. window: what HELLO said; None is no bound."""

    def __init__(self, window: int | None) -> None:
        self._left = window
        self.piece_bytes = LIMITS.write_chunk_bytes
        """Largest piece that should be sent at once: a whole piece goes as soon as there is any credit."""
        if window is not None:
            self.piece_bytes = min(max(window // CREDITS_PER_WINDOW, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        self._has_more = asyncio.Event()

    @property
    def is_unbounded(self) -> bool:
        """Whether the other side has no cap."""
        return self._left is None

    def spend(self, nbytes: int) -> None:
        """Bytes are sent; a piece that is larger than what is left goes into debt."""
        if self._left is not None:
            self._left -= nbytes
            if self._left <= 0:
                self._has_more.clear()

    def add(self, nbytes: int) -> None:
        """The other side gave credit."""
        if self._left is not None:
            self._left = min(self._left + nbytes, MOST_CREDIT_BYTES)
            if self._left > 0:
                self._has_more.set()

    async def wait(self) -> None:
        """Wait until there is some. The link's own watch ends a link that gives none (`bulk_stall_s`)."""
        while self._left is not None and self._left <= 0:
            await self._has_more.wait()


class GivenCredit:
    """The receiving side. shaper: of this peer's download."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper
        self._window = shaper.window_bytes
        self.piece_bytes = shaper.piece_bytes
        """What should be read at once, and is given back at once."""
        if self._window is not None:
            piece = int(shaper.rate_bytes_per_s * PIECE_S)
            self.piece_bytes = min(max(piece, LEAST_PIECE_BYTES), shaper.piece_bytes)
        self._owed = 0
        self._least_rtt_s = float("inf")

    def passed(self, nbytes: int, rtt_s: float | None, *, has_waited: bool) -> int:
        """Bytes have passed the shaper; returns the bytes of a CREDIT to send now, or 0.

        rtt_s: the link's round trip, as last measured. has_waited: whether they found the shaper busy.
        """
        if self._window is None:
            return 0
        self._owed += nbytes
        if rtt_s is not None:
            self._least_rtt_s = min(self._least_rtt_s, rtt_s)  # a later one may hold the queue we make
            self._resize(nbytes, has_waited)
        if self._owed < self.piece_bytes:
            return 0
        given, self._owed = min(self._owed, LIMITS.payload_bytes), 0
        return given

    def _resize(self, nbytes: int, has_waited: bool) -> None:
        """Bring the window nearer to what the round trip needs, by giving more or less than has passed."""
        first, window = self._shaper.window_bytes, self._window
        if first is None or window is None:
            return
        needed = int(self._shaper.rate_bytes_per_s * (self._least_rtt_s + ROUND_TRIP_MARGIN_S))
        wanted = max(first, min(needed, WINDOW_CEILING_BYTES))
        change = 0
        if window > wanted:  # an earlier, longer round trip had a queue in it: that queue is ours
            change = -min(nbytes // 8, window - wanted)
        elif not has_waited:  # the line was free, so perhaps the window is what holds the neighbour back
            change = self._shaper.widen(min(nbytes // 4, wanted - window))
        self._window = window + change
        self._owed += change
