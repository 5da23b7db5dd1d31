"""Bytes counted once, where they leave and enter, by direction, kind and neighbour stage; and made to wait there.

A peer has one `Traffic`. Every stream gets a `Lane` of it for each direction, and each piece of a frame passes the
lane: it is counted, and waits for its turn in the direction's shaper.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Literal

from peers.frames import BULK_PRIORITY, Kind, Priority
from peers.shaper import Shaper
from peers.shaping import Flow

Direction = Literal["up", "down"]
RATE_WINDOW_S = 10.0

FRAME_OVERHEAD_BYTES = 110
"""What a control frame costs on the wire beside its bytes: a packet, noise and yamux."""


class Traffic:
    """Counters and shapers of one peer; used from its communication loop only.

    max_upload_mbps, max_download_mbps: the volunteer's caps in Mbit/s at the interface, None for no cap.
    """

    def __init__(
        self,
        max_upload_mbps: float | None = None,
        max_download_mbps: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upload, self.download = Shaper(max_upload_mbps, clock), Shaper(max_download_mbps, clock)
        self.bytes: defaultdict[tuple[Direction, str, int], int] = defaultdict(int)
        self.frames: defaultdict[tuple[Direction, str], int] = defaultdict(int)
        self.refused: defaultdict[str, int] = defaultdict(int)
        self._totals: dict[Direction, int] = {"up": 0, "down": 0}
        self._history: deque[tuple[float, int, int]] = deque()

    def lane(self, direction: Direction, stage: int, *, is_bulk: bool) -> Lane:
        """A stream's way in or out. stage: of the neighbour; is_bulk: whether its bytes wait for their turn."""
        return Lane(self, direction, stage, is_bulk=is_bulk)

    def shaper(self, direction: Direction) -> Shaper:
        """The direction's shaper."""
        return self.upload if direction == "up" else self.download

    def count(self, direction: Direction, kind: str, stage: int, nbytes: int, frames: int = 1) -> None:
        """Count bytes of frames (headers and payloads) exchanged with a neighbour of `stage`."""
        self.bytes[direction, kind, stage] += nbytes
        self.frames[direction, kind] += frames
        self._totals[direction] += nbytes

    def refuse(self, reason: str) -> None:
        """Count a frame that was refused. `reason` comes from our own bounded set of labels."""
        self.refused[reason] += 1

    def total(self, direction: Direction, kind: str | None = None) -> int:
        """Bytes so far in a direction, of one kind or of all."""
        if kind is None:
            return self._totals[direction]
        return sum(n for (way, name, _), n in self.bytes.items() if way == direction and name == kind)

    def rates_mbps(self) -> tuple[float, float]:
        """Upload and download over the last ten seconds, in Mbit/s. Call about once a second."""
        now = time.monotonic()
        self._history.append((now, self._totals["up"], self._totals["down"]))
        while len(self._history) > 2 and now - self._history[0][0] > RATE_WINDOW_S:
            self._history.popleft()
        then, up, down = self._history[0]
        span = max(now - then, 1e-3)
        return (self._totals["up"] - up) * 8e-6 / span, (self._totals["down"] - down) * 8e-6 / span


class Lane:
    """One stream's way through one direction's shaper. Made by `Traffic.lane`.

    A bulk lane waits with the priority of the frame's kind; a kind that is no bulk waits behind everything, so
    that nobody gets past the cap by what they call a frame. Any other lane is charged and never waits.

    priority: in place of the kind's own, for a bulk lane (`peers.frames.Priority`); CONTROL goes before all other bulk
    and waits for the bucket still.
    """

    def __init__(self, traffic: Traffic, direction: Direction, stage: int, *, is_bulk: bool) -> None:
        self._traffic, self._direction, self._stage = traffic, direction, stage
        self._shaper = traffic.shaper(direction)
        self._opposite = traffic.shaper("down" if direction == "up" else "up")
        self._flow = Flow() if is_bulk else None
        self.priority: int | None = None
        self.piece_bytes = self._shaper.piece_bytes
        """Largest piece that should pass at once."""
        self.is_free = not is_bulk or not self._shaper.is_limited
        """Whether nothing ever waits here."""

    async def passes(self, kind: Kind, nbytes: int) -> bool:
        """A piece of a frame passes: wait for its turn, and count it; returns whether it had to wait."""
        has_waited = False
        if self._flow is None:
            self._shaper.charge(nbytes)
        else:
            self._opposite.charge_answers(nbytes)
            priority = BULK_PRIORITY.get(kind, Priority.STATE) if self.priority is None else self.priority
            has_waited = await self._shaper.take(self._flow, priority, nbytes)
        self._traffic.count(self._direction, kind, self._stage, nbytes, frames=0)
        return has_waited

    def has_passed(self, kind: Kind) -> None:
        """The last piece of a frame has passed: count the frame."""
        self._traffic.count(self._direction, kind, self._stage, 0)
        self._shaper.charge(FRAME_OVERHEAD_BYTES if self._flow is None else 0)

    def promote(self, priority: int) -> None:
        """Something of this priority waits behind what passes here now: let that have it too."""
        if self._flow is not None:
            self._shaper.promote(self._flow, priority)
