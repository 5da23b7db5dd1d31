"""How old priors may grow before it is said. Pure.

A swarm with a living anchor renews its priors every snapshot, one interval late at most. When all anchors have gone
the priors in force stay (an old basis is better than none; a corrector's fades out by itself), and people are told.
"""

from __future__ import annotations

from collections.abc import Iterable

SNAPSHOTS = 3
"""Intervals between snapshots after which a prior is old: one it lasts, one for the next to be made, one to spare."""


class PriorAge:
    """Says once when priors have grown old, and once when they are renewed. snapshot_every: steps."""

    def __init__(self, snapshot_every: int) -> None:
        self.limit = SNAPSHOTS * snapshot_every
        self.is_old = False

    def look(self, ages: Iterable[int | None], *, has_anchors: bool) -> str | None:
        """What to say now, if anything. ages: steps since the weights that each prior in force was fitted at, None
        where that is not known. has_anchors: whether the run has anchors that could renew them.
        """
        oldest = max((age for age in ages if age is not None), default=0)
        was_old, self.is_old = self.is_old, has_anchors and oldest > self.limit
        if self.is_old and not was_old:
            return (
                f"warning: the priors in force are {oldest} steps old and no newer ones come: no anchor seems to be "
                f"there; training goes on with them, at a growing loss of precision"
            )
        if was_old and not self.is_old:
            return "the priors in force are renewed"
        return None
