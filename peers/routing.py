"""Which peer of the next stage gets a microbatch. Pure: observations in, a choice out.

Every neighbour has an estimate of the seconds it needs per microbatch (an exponential moving average of
the time between its answers while it is busy). A microbatch goes where it is expected to be finished
first: estimate * (what is outstanding there + 1). Neighbours without an estimate are tried first, and the
estimate of one that has nothing to do fades: what seemed slow, perhaps because everybody waited for a round, is
tried again. A neighbour that has no room is left alone for a while, and then gets as much as it could hold
before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from peers.limits import LIMITS

K = TypeVar("K")

EMA_WEIGHT = 0.2
BACKOFF_FIRST_S = 1.0
BACKOFF_CEILING_S = 30.0
FADE_S = 10.0
"""The estimate of a neighbour that has nothing to do halves in this time."""


@dataclass(slots=True)
class _Neighbour(Generic[K]):
    room: float
    """Microbatches of this peer it can hold, by experience; never more than the window."""
    outstanding: dict[K, float] = field(default_factory=dict)
    seconds: float | None = None
    last_answer: float = 0.0
    blocked_until: float = 0.0
    backoff_s: float = BACKOFF_FIRST_S
    busy_s: float = 0.0
    """Its rest after the last BUSY; 0 since it accepted something."""

    def expected_s(self, now: float) -> float:
        """Seconds for a microbatch; 0 if unknown."""
        if self.seconds is None or self.outstanding:
            return self.seconds or 0.0
        return self.seconds * math.exp2(-max(0.0, now - self.last_answer) / FADE_S)


class Router(Generic[K]):
    """Chooses among the live peers of the next stage, at most `window` microbatches outstanding at each."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._neighbours: dict[str, _Neighbour[K]] = {}
        self._fences: dict[str, set[str]] = {}

    @property
    def peers(self) -> list[str]:
        """Live peers of the next stage."""
        return list(self._neighbours)

    def add(self, peer: str) -> None:
        """A link to this peer is up."""
        self._neighbours.setdefault(peer, _Neighbour(self.window))

    def remove(self, peer: str) -> None:
        """The peer is lost."""
        self._neighbours.pop(peer, None)

    def reset(self) -> None:
        """Forget what was sent and who is fenced; the live peers and their speeds stay."""
        self._fences.clear()
        for neighbour in self._neighbours.values():
            neighbour.outstanding.clear()

    def fence(self, peer: str, plan: str) -> None:
        """The peer takes no more work of this plan."""
        self._fences.setdefault(plan, set()).add(peer)

    def lift_fences_of(self, peer: str) -> None:
        """The peer says that it works again."""
        for peers in self._fences.values():
            peers.discard(peer)

    def is_fenced(self, peer: str, plan: str) -> bool:
        """Whether the peer takes no work of this plan."""
        return peer in self._fences.get(plan, ())

    def lift_fences(self, keep: str) -> None:
        """Forget the fences of all plans but one: their steps are over."""
        self._fences = {plan: peers for plan, peers in self._fences.items() if plan == keep}

    def choose(self, now: float, *, is_urgent: bool = False, plan: str = "") -> str | None:
        """The peer expected to finish one more microbatch first; None if all are full, blocked or fenced.

        is_urgent: no window holds it back. A replay must never wait behind work of the next step, which in
        turn waits for the step that needs the replay.
        """
        best: tuple[float, int, str] | None = None
        for peer, neighbour in self._neighbours.items():
            load = len(neighbour.outstanding)
            if (load >= int(neighbour.room) and not is_urgent) or now < neighbour.blocked_until:
                continue
            if self.is_fenced(peer, plan):
                continue
            cost = (neighbour.expected_s(now) * (load + 1), load, peer)
            if best is None or cost < best:
                best = cost
        return best[2] if best is not None else None

    def sent(self, peer: str, key: K, now: float) -> None:
        """A microbatch went to this peer."""
        if (neighbour := self._neighbours.get(peer)) is not None:
            if neighbour.seconds is not None:
                neighbour.seconds = neighbour.expected_s(now)
            neighbour.outstanding[key] = now

    def returned(self, peer: str, key: K, now: float) -> None:
        """Its gradient came back."""
        neighbour = self._neighbours.get(peer)
        if neighbour is None or (sent := neighbour.outstanding.pop(key, None)) is None:
            return
        sample = now - max(sent, neighbour.last_answer)
        neighbour.last_answer = now
        old = neighbour.seconds
        neighbour.seconds = sample if old is None else old + EMA_WEIGHT * (sample - old)
        neighbour.backoff_s = BACKOFF_FIRST_S
        neighbour.room = min(self.window, neighbour.room + 1 / neighbour.room)

    def accepted(self, peer: str) -> None:
        """The peer had room."""
        if (neighbour := self._neighbours.get(peer)) is not None:
            neighbour.busy_s = 0.0

    def forget(self, peer: str, key: K) -> None:
        """The microbatch is no longer this peer's, for a reason that says nothing about its speed."""
        if (neighbour := self._neighbours.get(peer)) is not None:
            neighbour.outstanding.pop(key, None)

    def busy(self, peer: str, key: K, now: float, first_s: float = LIMITS.busy_retry_s) -> None:
        """The peer had no room: the microbatch goes elsewhere, the peer rests, twice as long every time.

        What it refuses of one burst counts once. first_s: its first rest.
        """
        self.forget(peer, key)
        if (neighbour := self._neighbours.get(peer)) is None:
            return
        neighbour.room = max(1, len(neighbour.outstanding))
        if now >= neighbour.blocked_until:
            neighbour.busy_s = min(2 * neighbour.busy_s or first_s, max(first_s, LIMITS.busy_ceiling_s))
            neighbour.blocked_until = now + neighbour.busy_s

    def failed(self, peer: str, key: K, now: float) -> None:
        """The peer refused work it should have taken: it rests for twice as long every time."""
        self.forget(peer, key)
        if (neighbour := self._neighbours.get(peer)) is not None:
            neighbour.blocked_until = now + neighbour.backoff_s
            neighbour.backoff_s = min(2 * neighbour.backoff_s, BACKOFF_CEILING_S)

    def owed_by(self, peer: str) -> frozenset[K]:
        """Keys this peer has not answered."""
        neighbour = self._neighbours.get(peer)
        return frozenset(neighbour.outstanding) if neighbour is not None else frozenset()

    def outstanding(self, peer: str) -> int:
        """Microbatches this peer has not returned."""
        neighbour = self._neighbours.get(peer)
        return len(neighbour.outstanding) if neighbour is not None else 0

    def sent_at(self, peer: str | None, key: K) -> float:
        """When a microbatch that is not answered went to this peer; long ago if it did not."""
        neighbour = self._neighbours.get(peer) if peer is not None else None
        return neighbour.outstanding.get(key, float("-inf")) if neighbour is not None else float("-inf")
