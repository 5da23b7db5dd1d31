"""A microbatch on a stage peer, and what the work core asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from swarm.plan import MicrobatchKey


class Phase(Enum):
    """How far a microbatch has come on this peer."""

    QUEUED = "queued"
    """Its forward is with the compute thread, or waits for it."""
    OUT = "out"
    """Forward done; it is at the next stage, or looks for a peer there."""
    RETURNED = "returned"
    """Its gradient is here; the backward is with the compute thread, or waits for it."""
    DONE = "done"
    """In the ledger."""
    LOST = "lost"
    """Nobody can give its gradient any more: the next stage has committed the step, and its holder is gone."""


@dataclass(slots=True)
class Entry:
    """One microbatch on this peer. Payloads are opaque here; the shell fills and reads them.

    upstream: the peer of the previous stage that sent it, None at its source. also: others that sent it too: each
    of them waits for its gradient.
    """

    key: MicrobatchKey
    upstream: str | None
    work: Any
    incoming: Any = None
    outgoing: Any = None
    returned: Any = None
    gradient: Any = None
    loss_sum: float = 0.0
    loss_tokens: int = 0
    phase: Phase = Phase.QUEUED
    downstream: str | None = None
    is_replay: bool = False
    needs_route: bool = False
    holders: Literal["unknown", "asked", "denied", "found"] = "unknown"
    """A replay first asks the next stage who holds the key; whatever the answer, it stays a replay below."""
    ask_after: float = 0.0
    """Not asked again before this time."""
    is_doomed: bool = False
    """The next stage takes it from nobody any more: it is lost unless somebody there holds it."""
    is_on_way: bool = False
    """Sent, and neither accepted nor refused so far."""
    tries: int = 0
    """How often what came for it, or what it sent, could not be decoded."""
    is_dropped: bool = False
    """It is void: a job that still waits for the compute thread must not touch the accumulator."""
    also: list[str] = field(default_factory=list)

    @property
    def upstreams(self) -> list[str]:
        """Everybody of the previous stage who sent it."""
        return [self.upstream, *self.also] if self.upstream is not None else []

    def add_upstream(self, peer: str) -> None:
        """Another peer of the previous stage sent it, or the same one again."""
        if self.upstream is not None and peer not in self.upstreams:
            self.also.append(peer)


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a forward (the last stage: forward, loss and backward)."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute a backward and add it to the accumulator of the step."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class SendForward:
    """Send the coded forward output to a peer of the next stage."""

    peer: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send the coded input gradient to the peer it came from."""

    peer: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer ACCEPTED, BUSY or REFUSED."""

    peer: str
    kind: str
    key: MicrobatchKey
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AskHolders:
    """Ask all peers of the next stage who holds this key, before a replay chooses one."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class SlotDone:
    """All gradients of a slot of this source have come back."""

    slot: int


@dataclass(frozen=True, slots=True)
class LedgerGrew:
    """A key was added to the ledger of the current step."""

    key: MicrobatchKey


@dataclass(frozen=True, slots=True)
class KeyLost:
    """Nobody can give the gradient of this key of the current step: the round commits without it."""

    key: MicrobatchKey


@dataclass(frozen=True, slots=True)
class ClearAccumulator:
    """What was accumulated is void: another plan, a fence, or a new beginning."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A microbatch cannot be coded whoever computes it: the run has diverged."""

    key: MicrobatchKey


Action = (
    Forward
    | Backward
    | SendForward
    | SendGradient
    | Reply
    | AskHolders
    | SlotDone
    | LedgerGrew
    | KeyLost
    | ClearAccumulator
    | GiveUp
)
