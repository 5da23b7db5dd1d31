"""How old priors may grow before it is said. Pure.

A swarm with a living anchor renews its priors every snapshot, one interval late at most. When all anchors have gone
the priors in force stay (an old basis is better than none; a corrector's fades out by itself), and people are told.
"""

from __future__ import annotations

from collections.abc import Iterable

SNAPSHOTS = 3
"""Intervals between snapshots after which a prior is old: one it lasts, one for the next to be made, one to spare."""


class PriorAge:
    """Says once when priors have grown old, and once when they are renewed. snapshot_every: steps.

    Where priors come again and again but late, by an anchor that is slower than the snapshots, it is said again only
    when they are twice as old as they have been when they were renewed.
    """

    def __init__(self, snapshot_every: int) -> None:
        self.limit = SNAPSHOTS * snapshot_every
        self.is_old = False
        self._said_from = self.limit
        self._oldest, self._has_said = 0, False

    def look(self, ages: Iterable[int | None], *, has_anchors: bool) -> str | None:
        """What to say now, if anything. ages: steps since the weights that each prior in force was fitted at, None
        where that is not known. has_anchors: whether the run has anchors that could renew them.
        """
        oldest = max((age for age in ages if age is not None), default=0)
        self.is_old = has_anchors and oldest > self.limit
        self._oldest = max(self._oldest, oldest) if self.is_old else self._oldest
        if self.is_old and not self._has_said and oldest > self._said_from:
            self._has_said = True
            return (
                f"warning: the priors in force are {oldest} steps old and no newer ones come: no anchor seems to be "
                f"there; training goes on with them, at a growing loss of precision"
            )
        if self._has_said and not self.is_old:
            self._has_said, self._said_from = False, 2 * self._oldest
            return "the priors in force are renewed"
        return None
