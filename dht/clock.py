"""Swarm time: one clock that never steps, shared by records and by hivemind's storage.

Records expire in *swarm time* = this machine's steady clock plus the offset measured against the initial
peers. The wall clock is read once, at the start: if it steps later (NTP after boot, a user's hand), swarm
time does not, and announcements go on being accepted. hivemind compares expirations with `time.time()` and
silently rejects a value that does not expire later than the stored one, so it is given the same clock.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

MAX_CLOCK_OFFSET_S = 60.0
"""A machine whose clock differs from the swarm's by more than this is refused, with the figure."""


WARN_CLOCK_OFFSET_S = 3.0
"""From here on the user is told: the machine's clock is wrong for other programs, too."""


class ClockSkewError(RuntimeError):
    """The local clock is further from the swarm's than `MAX_CLOCK_OFFSET_S`."""


def steady_seconds() -> float:
    """Seconds of a clock that only moves forward and keeps counting while the machine sleeps (Linux)."""
    clock_id = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock_id is None else time.clock_gettime(clock_id)


class SwarmClock:
    """Seconds since 1970 in swarm time.

    `wall` and `steady` are the two clocks underneath (arguments for tests). `offset_s` is swarm time minus
    the local clock; 0 until measured.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady_seconds
    ) -> None:
        self._steady = steady
        self._base = wall() - steady()
        self.offset_s = 0.0

    def now(self) -> float:
        """Swarm time in seconds; never steps back unless `correct` says so."""
        return self._base + self._steady() + self.offset_s

    def correct(self, differences: Sequence[float]) -> float:
        """Adopt the median of measured differences (peer's clock minus `now()`, seconds); returns the offset.

        The median, so that a minority of initial peers with bad clocks moves nobody. An empty sequence
        changes nothing. Raises ClockSkewError (and changes nothing) if the local clock would be further
        than `MAX_CLOCK_OFFSET_S` from the swarm's.
        """
        if not differences:
            return self.offset_s
        offset = self.offset_s + statistics.median(differences)
        if abs(offset) > MAX_CLOCK_OFFSET_S:
            behind = "behind" if offset > 0 else "ahead of"
            raise ClockSkewError(
                f"this machine's clock is {abs(offset):.1f} s {behind} the swarm's "
                f"(at most {MAX_CLOCK_OFFSET_S:.0f} s are tolerated): set the clock, for example with NTP"
            )
        self.offset_s = offset
        return offset

    def install(self) -> None:
        """Make hivemind in this process use this clock (its modules each hold the function by name)."""
        for name, module in list(sys.modules.items()):
            if name.startswith("hivemind.") and "get_dht_time" in vars(module):
                module.get_dht_time = self.now  # type: ignore[attr-defined]
