"""Whose frames count: neighbours that the start names, or that a live signed record names.

A stranger with a libp2p daemon can say HELLO as any stage. Before its record is seen nothing is taken from it
that has to do with work, and nothing is held against it: the record of a joiner may be on its way.
"""

from __future__ import annotations

from collections.abc import Callable

from peers.frames import Frame, Kind
from peers.link import Link
from peers.stage import parse_key
from peers.start import Start

OPEN_KINDS = frozenset({Kind.START, Kind.PROPOSE, Kind.ACKNOWLEDGE, Kind.QUERY, Kind.ANSWER, Kind.REFUSED})
"""Frames that are taken from everybody."""


class Gate:
    """refused: frames of unknown peers that were not taken."""

    def __init__(self, started: Callable[[], Start | None], has_record: Callable[[str, int], bool]) -> None:
        self.refused = 0
        self._started, self._has_record = started, has_record
        self._ready: set[Link] = set()

    def knows(self, link: Link) -> bool:
        """Whether this neighbour is who its HELLO says."""
        started, stage = self._started(), link.hello.stage
        if started is not None and 0 <= stage < len(started.rosters) and link.peer in started.rosters[stage]:
            return True
        return self._has_record(link.peer, stage)

    def admits(self, link: Link, frame: Frame) -> bool:
        """Whether the frame is to be taken. Raises FrameError for a FORWARD without a key."""
        if frame.kind in OPEN_KINDS or self.knows(link):
            return True
        self.refused += 1
        if frame.kind is Kind.FORWARD:
            link.post(Kind.BUSY, {"key": parse_key(frame).pack(), "reason": ""})
        elif frame.kind is Kind.READY:
            self._ready.add(link)
        return False

    def newly_known(self) -> list[Link]:
        """Links whose READY came before their record, which is here now."""
        known = [link for link in self._ready if link.is_open and self.knows(link)]
        self._ready = {link for link in self._ready if link.is_open and link not in known}
        return known
