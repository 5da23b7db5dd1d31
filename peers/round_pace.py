"""How long a round waits: deadlines that follow what was measured."""

from __future__ import annotations

from peers.limits import LIMITS

SMOOTHING = 0.3
"""Share of the newest measurement in the average."""


class Pace:
    """Moving averages of a stage's rounds, and the deadlines that come from them. Times in seconds."""

    def __init__(self) -> None:
        self.arrival_s: float | None = None
        """From this peer's own readiness to everybody's."""
        self.exchange_s: float | None = None
        self._stretch = 1.0

    @property
    def arrival_deadline_s(self) -> float:
        """How long a leader that is ready waits for the others."""
        if self.arrival_s is None:
            return LIMITS.arrive_first_s
        return min(max(4 * self.arrival_s + 1, LIMITS.arrive_floor_s), LIMITS.arrive_ceiling_s)

    @property
    def exchange_deadline_s(self) -> float:
        """How long one exchange may take; twice as long after every one that was late in a row."""
        if self.exchange_s is None:
            return min(LIMITS.exchange_first_s * self._stretch, LIMITS.exchange_ceiling_s)
        usual_s = (4 * self.exchange_s + 2) * self._stretch
        return min(max(usual_s, LIMITS.exchange_floor_s), LIMITS.exchange_ceiling_s)

    def note_arrival(self, seconds: float) -> None:
        """All members of a round have arrived."""
        self.arrival_s = _smoothed(self.arrival_s, seconds)

    def note_exchange(self, seconds: float) -> None:
        """An exchange has ended well."""
        self.exchange_s = _smoothed(self.exchange_s, seconds)
        self._stretch = 1.0

    def note_late_exchange(self) -> None:
        """An exchange did not end in time: perhaps the line is slower than it was for everybody."""
        self._stretch = min(2 * self._stretch, LIMITS.exchange_ceiling_s / LIMITS.exchange_floor_s)


def _smoothed(average: float | None, value: float) -> float:
    return value if average is None else average + SMOOTHING * (value - average)
