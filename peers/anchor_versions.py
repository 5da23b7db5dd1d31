"""Which version an anchor passes through next, and whether the run has ended. Pure.

All that is known are peers' own records of what they serve, and anybody can publish those. So a version that cannot
be had only waits its turn again, later each time, and keeps no other one back; and the run has ended only when most
peers of every stage say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0
"""Before a version that failed is tried again; twice as long each time."""

Served = Sequence[Mapping[str, Collection[int]]]
"""Of each stage: its peers, and the versions that each says it serves."""


def common_versions(served: Served, is_snapshot: Callable[[int], bool]) -> dict[int, bool]:
    """The snapshots that somebody of every stage serves, each with whether most of every stage's peers do.

    is_snapshot: whether all replicas keep a snapshot of a version.
    """
    stages = [{version for versions in peers.values() for version in versions} for peers in served]
    common = set.intersection(*stages) if stages else set()
    return {version: has_most(served, version) for version in common if version > 0 and is_snapshot(version)}


def has_most(served: Served, version: int) -> bool:
    """Whether more than half of every stage's peers serve a version."""
    return all(2 * sum(version in versions for versions in peers.values()) > len(peers) for peers in served)


class VersionTries:
    """Passes that failed, by version."""

    def __init__(self) -> None:
        self._failed: dict[int, tuple[int, float]] = {}

    def failed(self, version: int, now: float) -> None:
        """A pass through a version could not be made. now: seconds, of any clock that does not go back."""
        times = self._failed.get(version, (0, 0.0))[0] + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(times - 1, 16), LONGEST_PAUSE_S)
        self._failed[version] = times, now + pause_s

    def choose(self, versions: Mapping[int, bool], done: int, now: float) -> int | None:
        """The version to pass through now, newer than `done`; None if there is none yet.

        versions: as `common_versions` gives them. Those that failed least come first, then those that most peers
        serve, then the newest.
        """
        self._failed = {version: entry for version, entry in self._failed.items() if version > done}
        due = [v for v in versions if v > done and now >= self._failed.get(v, (0, now))[1]]
        return max(due, key=lambda v: (-self._failed.get(v, (0, now))[0], versions[v], v), default=None)
