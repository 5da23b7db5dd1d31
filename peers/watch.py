"""What a stage peer tells about its steps: a stall once, and in tests every committed ledger."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers.limits import LIMITS
from peers.links import Links, short
from peers.round_messages import Commit, CompactKey

logger = logging.getLogger("swarm_peer.trainer")


class StallWatch:
    """Says once that a step does not move, and why as far as this peer can see."""

    def __init__(self, stage: int, stages: int, links: Links, note: Callable[[str], None]) -> None:
        self._stage, self._stages, self._links, self._note = stage, stages, links, note
        self._moved_at = time.monotonic()
        self._has_warned = False

    def moved(self) -> None:
        """A step began."""
        if self._has_warned:
            self._note(f"going on after {time.monotonic() - self._moved_at:.0f} s")
        self._moved_at, self._has_warned = time.monotonic(), False

    def look(self, step: int, details: Callable[[], str]) -> None:
        """Call on a timer. details: figures for the log."""
        waited = time.monotonic() - self._moved_at
        if waited < LIMITS.stall_warning_s or self._has_warned:
            return
        self._has_warned = True
        beside = [s for s in (self._stage - 1, self._stage + 1) if 0 <= s < self._stages]
        empty = [str(s) for s in beside if not self._links.open_links(s)]
        why = (
            f"stage {' and '.join(empty)} has no peer left: its work waits for a new one "
            f"(`swarm-peer join --stage {empty[0]}`)"
            if empty
            else "waiting for the other peers"
        )
        self._note(f"step {step} has not moved for {waited:.0f} s: {why}")
        logger.info("step %d has not moved for %.0f s: %s", step, waited, details())


class LedgerTrace:
    """One JSON line for each committed step of this peer (tests and benchmarks)."""

    def __init__(self, path: Path | None, stage: int, me: str) -> None:
        self._path, self._stage, self._me = path, stage, me

    def write(
        self,
        commit: Commit,
        plan: str,
        ledger: Sequence[CompactKey],
        all_keys: Sequence[CompactKey],
        loss: tuple[float, int],
        corrector: str,
    ) -> None:
        """A step was applied with this ledger of its own. loss: sum of token losses and loss tokens. corrector: hash
        of the prior by which it was corrected, or "".
        """
        if self._path is None:
            return
        line: dict[str, Any] = {
            "step": commit.step,
            "stage": self._stage,
            "peer": self._me,
            "group": commit.group,
            "plan": plan,
            "keys": [list(key) for key in ledger],
            "all_keys": [list(key) for key in all_keys],
            "lost": [list(key) for key in commit.lost],
            "roster": list(commit.roster),
            "at": time.time(),
            "loss": list(loss),
            "corrector": corrector,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def names(peers: Sequence[str]) -> list[str]:
    """Short forms, for the log."""
    return [short(peer) for peer in peers]
