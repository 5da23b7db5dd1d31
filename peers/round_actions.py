"""What the core of the rounds asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from peers.frames import Kind
from peers.round_messages import Arrival, Commit, CompactKey, Digest, Failure, Group

Body = Arrival | Group | Commit | Digest | Failure


class Phase(Enum):
    """What a member of a round is doing."""

    GATHERING = "gathering"
    EXCHANGING = "exchanging"
    DIGESTED = "digested"
    """It has agreed to an average and waits for the COMMIT."""
    APPLYING = "applying"
    """The COMMIT is decided or has come; the average is being applied."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message of the round to a replica."""

    peer: str
    kind: Kind
    body: Body


@dataclass(frozen=True, slots=True)
class Exchange:
    """Average with this group within the deadline; report `on_exchanged` or `on_exchange_failed`."""

    group: Group
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CancelExchange:
    """Stop the running exchange. The local gradient stays as it was."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Hold the ledger of the step still, or let it grow again."""

    is_frozen: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the average held for this commit's group; then call `on_applied`."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class AskGone:
    """Ask peers of other stages whether these replicas' processes have ended."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell a replica, and the stage before, that its ledger of this step does not count. reason: key or late."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unfence:
    """This peer leads, and nobody takes the keys that are missing: if it was fenced, it works on the step again."""


@dataclass(frozen=True, slots=True)
class AskMissing:
    """Ask the stage before for these keys: no ledger has them."""

    keys: tuple[CompactKey, ...]


@dataclass(frozen=True, slots=True)
class OutOfStep:
    """This peer is in the commit's roster and does not have its average: it must catch up. The core is out."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Dropped:
    """The commit goes on without this peer: it must catch up and follow. The core is out."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Diverged:
    """This replica is ahead, or its weights have the lineage that wins: re-synchronise. The core is out."""

    peer: str
    step: int
    lineage: str


@dataclass(frozen=True, slots=True)
class Replan:
    """The step before was committed again by a later leader: its plan replaces the one in force."""

    commit: Commit


Action = (
    Send
    | Exchange
    | CancelExchange
    | Freeze
    | Apply
    | AskGone
    | Fence
    | Unfence
    | AskMissing
    | OutOfStep
    | Dropped
    | Diverged
    | Replan
)
