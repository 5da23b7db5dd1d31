"""What a peer knows of one neighbour: where it is, which start of it, whether it counts as up, when to dial."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from enum import Enum

from peers.limits import LIMITS
from peers.link import Link


class Liveness(Enum):
    """What a fresh dial says about a peer."""

    ALIVE = "alive"
    GONE = "gone"
    """Its addresses refuse connections: the process has ended."""
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Breaker:
    """Keeps a peer that does not answer from being dialled again and again: each failure doubles the pause."""

    failures: int = 0
    until: float = 0.0

    def failed(self, now: float) -> None:
        """A dial, or a link, came to nothing."""
        pause = min(LIMITS.redial_lost_s * 2.0**self.failures, LIMITS.redial_lost_ceiling_s)
        self.failures = min(self.failures + 1, 16)
        self.until = now + pause * random.uniform(0.8, 1.2)  # not all neighbours at the same moment

    def reset(self) -> None:
        """There is a reason to dial at once: it was up, or it has started anew, or it has called itself."""
        self.failures, self.until = 0, 0.0


@dataclass(slots=True)
class Neighbour:
    """A peer we want, or have, a link with.

    incarnation: the start of this peer that counts, 0 while unknown; up_incarnation: the start that was last
    reported up, None while the peer is not up; has_met: whether it ever was. heard: when it, or its record, was last
    heard of; known_since: when for the first time.
    """

    peer: str
    stage: int
    addresses: tuple[str, ...]
    is_dialler: bool
    link: Link | None = None
    task: asyncio.Task[None] | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    incarnation: int = 0
    up_incarnation: int | None = None
    has_met: bool = False
    heard: float = 0.0
    known_since: float = field(default_factory=time.monotonic)
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def has_link(self) -> bool:
        """Whether a link is open."""
        return self.link is not None and self.link.is_open

    @property
    def is_idle(self) -> bool:
        """Whether nothing is going on with it."""
        return self.task is None and not self.has_link

    def is_expected(self, now: float) -> bool:
        """Whether it was heard of so lately that the first link with it may still be on its way."""
        return not self.has_met and now - self.known_since < LIMITS.meet_s

    def is_superseded(self, incarnation: int) -> bool:
        """Whether a start of this peer is an earlier one than is known.

        What was known is forgotten after `incarnation_kept_s`, like a record: a peer whose counter was lost and
        whose clock stepped back must be able to return.
        """
        is_known = time.monotonic() - self.heard < LIMITS.incarnation_kept_s
        return is_known and incarnation < self.incarnation

    def hear(self, incarnation: int) -> None:
        """Its HELLO, or its record, names this start. One that is later than known may be dialled at once."""
        if incarnation > self.incarnation:
            self.breaker.reset()
        self.heard = time.monotonic()
        self.incarnation = incarnation
