"""Bytes counted once, where they leave and enter, by direction, kind and neighbour stage."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Literal

Direction = Literal["up", "down"]
RATE_WINDOW_S = 10.0


class Traffic:
    """Counters every link writes into. One instance per peer; used from its communication loop only."""

    def __init__(self) -> None:
        self.bytes: defaultdict[tuple[Direction, str, int], int] = defaultdict(int)
        self.frames: defaultdict[tuple[Direction, str], int] = defaultdict(int)
        self.refused: defaultdict[str, int] = defaultdict(int)
        self._totals: dict[Direction, int] = {"up": 0, "down": 0}
        self._history: deque[tuple[float, int, int]] = deque()

    def count(self, direction: Direction, kind: str, stage: int, nbytes: int) -> None:
        """Count one frame (header and payload) exchanged with a neighbour of `stage`."""
        self.bytes[direction, kind, stage] += nbytes
        self.frames[direction, kind] += 1
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
