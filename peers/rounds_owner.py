"""Who is told what a stage's rounds decide."""

from __future__ import annotations

from typing import Protocol

from peers.round_messages import Commit, CompactKey


class RoundsOwner(Protocol):
    """Who is told what the rounds decide."""

    def freeze(self, is_frozen: bool) -> None:
        """Hold the step's ledger still, or release it."""

    def on_attempt(self) -> None:
        """What this peer holds now goes into a new average. The ledger is frozen."""

    def own_tokens(self) -> int:
        """Loss tokens of what this peer holds now. The ledger is frozen."""

    def seal(self, step: int) -> None:
        """The step is decided: nothing may reach its accumulator any more."""

    def check_commit(self, commit: Commit) -> None:
        """Raise FrameError for a COMMIT whose next plan this run cannot have."""

    def on_applied(self, commit: Commit, norm: float | None) -> None:
        """A step is committed and applied. norm: of the averaged gradient; None if nothing was applied."""

    def on_out_of_step(self, commit: Commit) -> None:
        """The others committed a step whose average this peer does not hold."""

    def on_dropped(self, commit: Commit) -> None:
        """A step was committed without this peer."""

    def on_diverged(self, peer: str, step: int) -> None:
        """The stage went on from other weights than this peer's."""

    def on_drifted(self, distance: float) -> None:
        """This peer's weights are further from the leader's than rounding explains."""

    def on_replan(self, commit: Commit) -> None:
        """The step before was committed again, by a later leader, with another plan for this one."""

    def fence(self, peer: str, reason: str) -> None:
        """This peer, as leader, takes a member's ledger of the step away (perhaps its own)."""

    def unfence(self) -> None:
        """Nobody takes the keys that are missing: this peer works on the step again if it was fenced."""

    def ask_missing(self, keys: tuple[CompactKey, ...]) -> None:
        """No ledger holds these keys of the plan."""
