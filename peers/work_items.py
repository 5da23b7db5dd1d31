"""A microbatch on a stage peer, and what the work core asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(slots=True)
class Entry:
    """One microbatch on this peer. Payloads are opaque here; the shell fills and reads them."""

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
    holders: Literal["unknown", "asked", "answered"] = "unknown"
    """A replay first asks the next stage who holds the key; whatever the answer, it stays a replay below."""
    tries: int = 0
    """How often what came for it, or what it sent, could not be decoded."""
    is_dropped: bool = False
    """Its plan was replaced: a job that still waits for the compute thread must not touch the accumulator."""


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
class ClearAccumulator:
    """The plan was replaced by one of a later attempt: what was accumulated under it is void."""


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
    | ClearAccumulator
    | GiveUp
)
