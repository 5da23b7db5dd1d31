"""Which peer of the next stage gets a microbatch. Pure: observations in, a choice out.

Every neighbour has an estimate of the seconds it needs per microbatch (an exponential moving average of
the time between its answers while it is busy). A microbatch goes where it is expected to be finished
first: estimate * (what is outstanding there + 1). Neighbours without an estimate are tried first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")

EMA_WEIGHT = 0.2
BACKOFF_FIRST_S = 1.0
BACKOFF_CEILING_S = 30.0


@dataclass(slots=True)
class _Neighbour(Generic[K]):
    outstanding: dict[K, float] = field(default_factory=dict)
    seconds: float | None = None
    last_answer: float = 0.0
    blocked_until: float = 0.0
    backoff_s: float = BACKOFF_FIRST_S


class Router(Generic[K]):
    """Chooses among the live peers of the next stage, at most `window` microbatches outstanding at each."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._neighbours: dict[str, _Neighbour[K]] = {}

    @property
    def peers(self) -> list[str]:
        """Live peers of the next stage."""
        return list(self._neighbours)

    def add(self, peer: str) -> None:
        """A link to this peer is up."""
        self._neighbours.setdefault(peer, _Neighbour())

    def remove(self, peer: str) -> None:
        """The peer is lost."""
        self._neighbours.pop(peer, None)

    def choose(self, now: float, *, is_urgent: bool = False) -> str | None:
        """The peer expected to finish one more microbatch first; None if all are full or blocked.

        is_urgent: no window holds it back. A replay must never wait behind work of the next step, which in
        turn waits for the step that needs the replay.
        """
        best: tuple[float, int, str] | None = None
        for peer, neighbour in self._neighbours.items():
            load = len(neighbour.outstanding)
            if (load >= self.window and not is_urgent) or now < neighbour.blocked_until:
                continue
            cost = ((neighbour.seconds or 0.0) * (load + 1), load, peer)
            if best is None or cost < best:
                best = cost
        return best[2] if best is not None else None

    def sent(self, peer: str, key: K, now: float) -> None:
        """A microbatch went to this peer."""
        if (neighbour := self._neighbours.get(peer)) is not None:
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

    def forget(self, peer: str, key: K) -> None:
        """The microbatch is no longer this peer's, for a reason that says nothing about its speed."""
        if (neighbour := self._neighbours.get(peer)) is not None:
            neighbour.outstanding.pop(key, None)

    def busy(self, peer: str, key: K, now: float, pause_s: float) -> None:
        """The peer had no room: its microbatch goes elsewhere, the peer rests for a moment."""
        self.forget(peer, key)
        if (neighbour := self._neighbours.get(peer)) is not None:
            neighbour.blocked_until = max(neighbour.blocked_until, now + pause_s)

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
