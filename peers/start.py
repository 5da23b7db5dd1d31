"""How a run starts: the first source proposes the first plan, all sources acknowledge, it is in force.

Pure. When every stage has `min_replicas` peers online, the first source in a seeded order proposes the
rosters of all stages and the first plan. A source acknowledges one proposal at a time, its own included,
and is bound by that for longer than any proposal is valid, so of two proposals with a source in common at
most one is acknowledged by all. The proposer then declares START, which every peer passes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from peers.frames import FrameError, Kind, need, need_count, need_texts
from peers.limits import LIMITS
from swarm.plan import MAX_ROSTER, MAX_SLOTS, seeded_order

MAX_STAGES = 4096
BOUND_FACTOR = 1.5
"""A source is bound by its acknowledgement so much longer than the proposal is valid."""
START_STEP = -1
"""The step that seeds the order of proposers."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first plan and who takes part. rosters: peer ids per stage. sources: who runs each slot."""

    version: int
    rosters: tuple[tuple[str, ...], ...]
    plan: bytes
    sources: tuple[str, ...]

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "version": self.version,
            "rosters": [list(roster) for roster in self.rosters],
            "plan": self.plan,
            "sources": list(self.sources),
        }

    def digest(self) -> str:
        """Names this exact start."""
        return hashlib.sha256(msgpack.packb(self.header())).hexdigest()


def parse_start(header: dict[str, Any]) -> Start:
    """A PROPOSE or START frame's header. Raises FrameError."""
    raw = need(header, "rosters", list)
    if not 1 <= len(raw) <= MAX_STAGES:
        raise FrameError("range", f"{len(raw)} rosters")
    rosters = tuple(tuple(need_texts({"roster": roster}, "roster", MAX_ROSTER)) for roster in raw)
    return Start(
        version=need_count(header, "version", 2**40),
        rosters=rosters,
        plan=need(header, "plan", bytes),
        sources=tuple(need_texts(header, "sources", MAX_SLOTS)),
    )


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message of the start to a source."""

    peer: str
    kind: Kind
    header: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Begin:
    """The start is in force: take it, pass it on."""

    start: Start


Action = Tell | Begin


class StartCore:
    """The start as one peer sees it."""

    def __init__(
        self,
        *,
        me: str,
        stage: int,
        stages: int,
        run_seed: int,
        min_replicas: int,
        make_start: Callable[[tuple[tuple[str, ...], ...]], Start],
    ) -> None:
        self._me, self._stage, self._stages = me, stage, stages
        self._run_seed, self._min_replicas = run_seed, min_replicas
        self._make_start = make_start
        self._proposed: Start | None = None
        self._proposed_at = float("-inf")
        self._waiting_for: set[str] = set()
        self._acknowledged: tuple[str, float] | None = None
        self._left_out_until = float("-inf")
        self.started: Start | None = None

    def tick(self, now: float, online: Sequence[Sequence[str]]) -> list[Action]:
        """Propose if it is this peer's turn. online: peers ready to start, per stage, this one included."""
        if self.started is not None or self._stage != 0:
            return []
        if any(len(peers) < self._min_replicas for peers in online):
            self._proposed = None
            return []
        if self._order(online[0])[0] != self._me:
            return []
        if self._proposed is not None and now - self._proposed_at < LIMITS.start_s:
            return []
        if self._is_bound_to_another(self._me, now) or now < self._left_out_until:
            return []
        self._proposed = self._make_start(tuple(tuple(sorted(peers)) for peers in online))
        self._proposed_at = now
        self._acknowledged = (self._me, now)
        others = [peer for peer in self._proposed.rosters[0] if peer != self._me]
        self._waiting_for = set(others)
        if not others:
            return self.on_start(self._proposed, now)
        return [Tell(peer, Kind.PROPOSE, self._proposed.header()) for peer in others]

    def on_propose(self, peer: str, start: Start, now: float) -> list[Action]:
        """A source proposes. Raises FrameError if the proposal does not name both of us as sources."""
        if self.started is not None or self._stage != 0:
            return []
        sources = start.rosters[0]
        if self._me not in sources or peer not in sources or len(start.rosters) != self._stages:
            raise FrameError("start", "a proposal names proposer, receiver and all stages")
        if self._is_bound_to_another(peer, now):
            return []
        self._acknowledged = (peer, now)
        return [Tell(peer, Kind.ACKNOWLEDGE, {"start": start.digest()})]

    def on_acknowledge(self, peer: str, digest: str, now: float) -> list[Action]:
        """A source acknowledges our proposal. Too late is as good as never: the source may be free again."""
        if self.started is not None or self._proposed is None or digest != self._proposed.digest():
            return []
        if now - self._proposed_at > LIMITS.start_s:
            return []
        self._waiting_for.discard(peer)
        return [] if self._waiting_for else self.on_start(self._proposed, now)

    def on_start(self, start: Start, now: float) -> list[Action]:
        """START: by our own declaration or a neighbour's word. The first one that names this peer counts.

        One that does not is no proof of a running swarm (its peers are asked where they are), but this peer
        proposes none of its own for a while.
        """
        if self.started is not None:
            return []
        if self._me not in start.rosters[self._stage]:
            self._left_out_until = now + LIMITS.left_out_s
            return []
        self.started = start
        return [Begin(start)]

    def _is_bound_to_another(self, peer: str, now: float) -> bool:
        if self._acknowledged is None or self._acknowledged[0] == peer:
            return False
        return now - self._acknowledged[1] < BOUND_FACTOR * LIMITS.start_s

    def _order(self, peers: Sequence[str]) -> list[str]:
        return seeded_order(peers, self._run_seed, 0, START_STEP)
