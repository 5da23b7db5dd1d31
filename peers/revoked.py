"""What a revoked anchor leaves behind, and how long it counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

GRACE_S = 60.0
"""Plans that are adopted so long after a revocation may have been made by peers that had not heard of it."""
_EXCUSED = 256


class Revocations:
    """anchors: peer ids whose priors count now, the first most.

    A prior of a revoked anchor stays usable where a plan names it, because the others work with it until another
    replaces it, but only if it was known before: offered when the revocation came, or named by the first plan that
    this peer was told of, or by one soon after the revocation. So a revoked anchor's newer priors are worth nothing,
    whoever names them.
    """

    def __init__(self, anchors: tuple[str, ...]) -> None:
        self.anchors = anchors
        self._former: tuple[str, ...] = ()
        self._excused: dict[str, None] = {}
        self._changed_at = float("-inf")
        self._has_plan = False

    def change(
        self, anchors: tuple[str, ...], former: tuple[str, ...], offered: Iterable[str], now: float
    ) -> None:
        """Go by these from now on. former: revoked anchors. offered: hashes of what anchors had offered so far."""
        if (anchors, former) == (self.anchors, self._former):
            return
        self.anchors, self._former, self._changed_at = anchors, former, now
        self._excuse(offered)

    def named(self, hashes: Iterable[str], now: float) -> None:
        """A plan that is adopted names priors with these hashes."""
        if not self._has_plan or now - self._changed_at <= GRACE_S:
            self._excuse(hashes)
        self._has_plan = True

    def accepts(self, publisher: str, sha256: str, *, is_named: bool) -> bool:
        """Whether a prior that this peer made is used. is_named: by a plan, or by an update of the run."""
        if publisher in self.anchors:
            return True
        return is_named and publisher in self._former and (sha256 in self._excused or not self._has_plan)

    def _excuse(self, hashes: Iterable[str]) -> None:
        self._excused.update(dict.fromkeys(hashes))
        while len(self._excused) > _EXCUSED:
            self._excused.pop(next(iter(self._excused)))
