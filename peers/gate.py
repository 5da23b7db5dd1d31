"""Whose frames count: neighbours that the start, this peer's rounds, or a live signed record names.

A stranger with a libp2p daemon can say HELLO as any stage. Before its record is seen nothing is taken from it
that has to do with work. What it sends is counted, and held against it only when it is more than a joiner sends
whose record is on its way. Who was known once stays known while the link stands: a noticeboard that cannot be
read must not stop the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from peers.frames import Frame, FrameError, Kind
from peers.limits import LIMITS
from peers.link import Link
from peers.stage import parse_key
from peers.start import Start

OPEN_KINDS = frozenset({Kind.START, Kind.PROPOSE, Kind.ACKNOWLEDGE, Kind.QUERY, Kind.ANSWER, Kind.REFUSED})
"""Frames that are taken from everybody."""


class Gate:
    """Asked for every frame. has_record, is_of_round: whether they name a peer as one of a stage.

    A leader may have seen the record of a joiner that it lets into a round before the other members have: its
    COMMIT tells them, and what they then dropped would be missing until the round's deadline.
    """

    def __init__(
        self,
        started: Callable[[], Start | None],
        has_record: Callable[[str, int], bool],
        is_of_round: Callable[[str, int], bool],
    ) -> None:
        self._started, self._has_record, self._is_of_round = started, has_record, is_of_round
        self._ready: set[Link] = set()
        self._known: set[Link] = set()
        self._strange: Counter[Link] = Counter()

    def knows(self, link: Link) -> bool:
        """Whether this neighbour is who its HELLO says."""
        if link in self._known:
            return True
        started, stage = self._started(), link.hello.stage
        is_named = (
            started is not None and stage < len(started.rosters) and link.peer in started.rosters[stage]
        )
        if not (is_named or self._is_of_round(link.peer, stage) or self._has_record(link.peer, stage)):
            return False
        self._known = {other for other in self._known if other.is_open} | {link}
        self._strange.pop(link, None)
        return True

    def admits(self, link: Link, frame: Frame) -> bool:
        """Whether the frame is to be taken. Raises FrameError for a FORWARD without a key, or for too many."""
        if frame.kind in OPEN_KINDS or self.knows(link):
            return True
        if link not in self._strange:
            self._strange = Counter({other: n for other, n in self._strange.items() if other.is_open})
        self._strange[link] += 1
        if self._strange[link] > LIMITS.stranger_frames:
            raise FrameError("stranger", f"{self._strange[link]} frames of a peer that has no record")
        link.refuse("stranger")
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
