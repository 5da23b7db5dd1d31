"""How fast state comes in: measured for decisions, and told to people."""

from __future__ import annotations

import time
from collections.abc import Callable

SAY_EVERY_S = 5.0
_WEIGHT = 0.5
"""Weight of the newest measurement in a running mean."""


class Pace:
    """Running means of updates. bytes_per_update, seconds_per_update: 0 until one was measured or expected.

    mbps: Mbit/s while bytes were moving. updates: how many were measured.
    """

    def __init__(self) -> None:
        self.bytes_per_update = 0.0
        self.seconds_per_update = 0.0
        self.mbps = 0.0
        self.updates = 0

    def expect(self, update_bytes: int, mbps: float) -> None:
        """What an update will take at a rate that something else has, or has had; what was measured counts more."""
        if self.updates == 0 and mbps > 0:
            self.bytes_per_update, self.mbps = update_bytes, mbps
            self.seconds_per_update = update_bytes * 8e-6 / mbps

    def measured(self, nbytes: int, transfer_s: float, apply_s: float) -> None:
        """An update was fetched and applied."""
        weight = 1.0 if self.updates == 0 else _WEIGHT
        self.updates += 1
        rate = nbytes * 8e-6 / max(transfer_s, 1e-6)
        self.bytes_per_update += weight * (nbytes - self.bytes_per_update)
        self.seconds_per_update += weight * (transfer_s + apply_s - self.seconds_per_update)
        self.mbps += weight * (rate - self.mbps)


class TransferNotes:
    """Tells people about one long transfer, now and then: MB, percent, seconds left.

    Called as progress: verified bytes, bytes of the file.
    """

    def __init__(
        self, note: Callable[[str], None], what: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._note, self._what, self._now = note, what, now
        self._began: tuple[float, int] | None = None
        self._said_at = 0.0
        self.mbps = 0.0
        """Mbit/s since the first call; 0 before anything came."""

    def __call__(self, done: int, total: int) -> None:
        """So much is here."""
        now = self._now()
        if self._began is None:
            self._began, self._said_at = (now, done), now
            self._note(f"getting {self._what} ({total / 1e6:.1f} MB)")
        since, before = self._began
        rate = (done - before) / max(now - since, 1e-6)
        self.mbps = rate * 8e-6
        if now - self._said_at < SAY_EVERY_S:
            return
        self._said_at = now
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
        self._note(
            f"getting {self._what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB "
            f"({100 * done / max(1, total):.0f}%){left}"
        )
