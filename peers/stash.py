"""FORWARDs that came before the plan they belong to: they wait, bounded in number and per link."""

from __future__ import annotations

from collections.abc import Iterator

from peers.frames import Frame
from peers.limits import LIMITS
from peers.link import Link
from swarm.plan import MicrobatchKey


class Stash:
    """Frames whose plan is not known here yet, in order of arrival."""

    def __init__(self) -> None:
        self._frames: list[tuple[Link, MicrobatchKey, Frame]] = []

    def add(self, link: Link, key: MicrobatchKey, frame: Frame) -> bool:
        """Keep a frame; False if there is no room for it. A repeat of the same peer replaces what it repeats."""
        self._frames = [entry for entry in self._frames if (entry[0].peer, entry[1]) != (link.peer, key)]
        of_link = sum(1 for other, _, _ in self._frames if other is link)
        if len(self._frames) >= LIMITS.early_frames or of_link >= LIMITS.in_flight:
            return False
        self._frames.append((link, key, frame))
        return True

    def holds(self, key: MicrobatchKey) -> bool:
        """Whether a FORWARD of this key waits here."""
        return any(known == key for _, known, _ in self._frames)

    def take(self) -> Iterator[tuple[Link, Frame]]:
        """Everything that waits, once."""
        frames, self._frames = self._frames, []
        for link, _, frame in frames:
            yield link, frame
