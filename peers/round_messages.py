"""What the members of a round tell each other, as checked values.

Everything here arrives from remote peers: `parse_*` raise FrameError and nothing else.
"""

from __future__ import annotations

import hashlib
import reprlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack

from peers.frames import FrameError, need, need_count, need_texts
from swarm.plan import MAX_ROSTER, MAX_SAMPLES_PER_STEP, MAX_SLOTS, MicrobatchKey

MAX_STEP = 2**40
MAX_WEIGHT = 2**40
MAX_SUSPECTS = 16
HASH_LENGTH = 64
PEER_LENGTH = 128
SKETCH_LENGTH = 2048

CompactKey = tuple[int, int]
"""A key within a known plan: (slot, microbatch)."""

REASONS = (
    "late",
    "alone",
    "schema",
    "key",
    "weight",
    "digest",
    "disconnected",
    "not_finite",
    "sketch",
    "stranger",
)
"""Why an attempt fails or a round waits; anything else is "other"."""


def known_reason(reason: str) -> str:
    """A remote peer's reason as one of our own labels: metrics never take text from the wire."""
    return reason if reason in REASONS else "other"


@dataclass(frozen=True, slots=True)
class Held:
    """An average that a member has agreed to and has seen no COMMIT of. Its leader may have committed it.

    group, digest, leader, members, weight, lost: of the group that made the average. attempt, ballot, voters:
    number, id and members of the last attempt in which this member agreed to it; ballot differs from group
    where a later leader tries to finish what an earlier one began. has_average: this member has the average
    itself, and could apply it.
    """

    group: str
    digest: str
    attempt: int
    ballot: str
    voters: tuple[str, ...]
    leader: str
    members: tuple[str, ...]
    weight: int
    lost: tuple[CompactKey, ...] = ()
    has_average: bool = True

    @property
    def is_first(self) -> bool:
        """Agreed to in the attempt that made it: then its leader alone decides what becomes of it."""
        return self.ballot == self.group

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "group": self.group,
            "digest": self.digest,
            "attempt": self.attempt,
            "ballot": self.ballot,
            "voters": list(self.voters),
            "leader": self.leader,
            "members": list(self.members),
            "weight": self.weight,
            "lost": [list(key) for key in self.lost],
            "has_average": self.has_average,
        }


@dataclass(frozen=True, slots=True)
class Arrival:
    """A member is done with a step: its settled ledger. Without a plan it only says where the member is.

    lineage: of the weights before the step. weight: loss tokens of the ledger. held: an average without a
    COMMIT. lost: keys of which it knows that nobody can give them. sketch: of its weights, hex text.
    attempt: the last one it was in.
    """

    step: int
    plan: str
    keys: tuple[CompactKey, ...]
    weight: int
    held: Held | None = None
    lost: tuple[CompactKey, ...] = ()
    sketch: str = ""
    lineage: str = ""
    attempt: int = 0

    @property
    def ledger_hash(self) -> str:
        """Names this exact ledger, and the average that the member has agreed to, if any."""
        return ledger_hash(self.plan, self.keys, self.held.ballot if self.held is not None else "")

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "step": self.step,
            "plan": self.plan,
            "keys": [list(key) for key in self.keys],
            "weight": self.weight,
            "held": self.held.header() if self.held is not None else {},
            "lost": [list(key) for key in self.lost],
            "sketch": self.sketch,
            "lineage": self.lineage,
            "attempt": self.attempt,
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Members of one averaging attempt, in the order that gives each its part of the vector.

    lost: keys of the plan that are in no ledger and that nobody can give. sketch: of the leader's weights.
    held: the average of an earlier attempt that is to be finished; then nothing is exchanged.
    """

    id: str
    step: int
    attempt: int
    leader: str
    members: tuple[str, ...]
    weights: tuple[int, ...]
    ledgers: tuple[str, ...]
    plan: str
    lost: tuple[CompactKey, ...] = ()
    sketch: str = ""
    lineage: str = ""
    held: Held | None = None

    def header(self) -> dict[str, Any]:
        """Wire form (the leader is the sender)."""
        return {
            "id": self.id,
            "step": self.step,
            "attempt": self.attempt,
            "members": list(self.members),
            "weights": list(self.weights),
            "ledgers": list(self.ledgers),
            "plan": self.plan,
            "lost": [list(key) for key in self.lost],
            "sketch": self.sketch,
            "lineage": self.lineage,
            "held": self.held.header() if self.held is not None else {},
        }


@dataclass(frozen=True, slots=True)
class Commit:
    """The decision that lets anybody apply, and what comes next.

    group, digest, leader, lost, weight (total loss tokens): of the group that made the average, whoever commits
    it. roster: its members, who vote in the next round. lineage: of the weights before the step. followers: who
    comes along in the next round without a vote. plan, sources: at stage 0 the next plan (canonical bytes) and
    who runs its slots; empty at other stages and after the last step.
    """

    group: str
    step: int
    attempt: int
    digest: str
    leader: str
    roster: tuple[str, ...]
    plan: bytes = b""
    sources: tuple[str, ...] = ()
    lineage: str = ""
    followers: tuple[str, ...] = ()
    lost: tuple[CompactKey, ...] = ()
    weight: int = 0

    @property
    def next_step(self) -> int:
        """The step that the commit leads to."""
        return self.step + 1

    @property
    def next_lineage(self) -> str:
        """Lineage of the weights after the step."""
        return next_lineage(self.lineage, self.group, self.digest)

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "group": self.group,
            "step": self.step,
            "attempt": self.attempt,
            "digest": self.digest,
            "leader": self.leader,
            "roster": list(self.roster),
            "plan": self.plan,
            "sources": list(self.sources),
            "lineage": self.lineage,
            "followers": list(self.followers),
            "lost": [list(key) for key in self.lost],
            "weight": self.weight,
        }


@dataclass(frozen=True, slots=True)
class Digest:
    """A member's word to its leader: it agrees to the average with this digest. group: id of the attempt."""

    group: str
    digest: str
    step: int

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {"group": self.group, "digest": self.digest, "step": self.step}


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt has failed. suspects: members that were waited for in vain.

    A leader that is too slow names itself: the next one leads. With a step, whoever sends this and names itself is
    out: it says nothing more, and its vote does not count from that step on.
    """

    group: str
    reason: str
    suspects: tuple[str, ...] = ()
    step: int = 0

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "group": self.group,
            "reason": self.reason,
            "suspects": list(self.suspects[:MAX_SUSPECTS]),
            "step": self.step,
        }


def next_lineage(lineage: str, group: str, digest: str) -> str:
    """Lineage of weights after an applied commit: equal version and lineage mean equal weights."""
    return hashlib.sha256(f"{lineage}/{group}/{digest}".encode()).hexdigest()[:32]


def ledger_hash(plan: str, keys: Iterable[CompactKey], ballot: str = "") -> str:
    """sha256 over the plan's hash, the sorted keys and the attempt in which an average was agreed to."""
    return hashlib.sha256(msgpack.packb([plan, sorted(keys), ballot])).hexdigest()


def compact(keys: Iterable[MicrobatchKey]) -> tuple[CompactKey, ...]:
    """Keys of one plan without what they share, sorted."""
    return tuple(sorted((key.slot, key.microbatch) for key in keys))


def parse_arrival(header: dict[str, Any]) -> Arrival:
    """An ARRIVE frame's header."""
    keys, lost = _keys(header, "keys"), _keys(header, "lost")
    if len(keys) + len(lost) > MAX_SAMPLES_PER_STEP or not set(keys).isdisjoint(lost):
        raise FrameError("header", "a member's lost keys are not in its ledger")
    weight = need_count(header, "weight", MAX_WEIGHT)
    if weight and not keys:
        raise FrameError("range", f"a weight of {weight} loss tokens without any key")
    return Arrival(
        step=need_count(header, "step", MAX_STEP),
        plan=_text(header, "plan"),
        keys=keys,
        weight=weight,
        held=_held(header),
        lost=lost,
        sketch=_sketch(header),
        lineage=_text(header, "lineage"),
        attempt=need_count(header, "attempt", MAX_STEP),
    )


def parse_group(header: dict[str, Any], leader: str) -> Group:
    """A GROUP frame's header."""
    members = _peers(header, "members")
    weights = need(header, "weights", list)
    ledgers = need_texts(header, "ledgers", MAX_ROSTER, HASH_LENGTH)
    if not len(members) == len(weights) == len(ledgers):
        raise FrameError("header", "a group needs one weight and one ledger for each of its members")
    if any(type(weight) is not int or not 0 <= weight <= MAX_WEIGHT for weight in weights):
        raise FrameError("range", "a weight is a count of loss tokens")
    if leader not in members:
        raise FrameError("header", "a leader belongs to its own group")
    return Group(
        id=_text(header, "id"),
        step=need_count(header, "step", MAX_STEP),
        attempt=need_count(header, "attempt", MAX_STEP),
        leader=leader,
        members=members,
        weights=tuple(weights),
        ledgers=tuple(ledgers),
        plan=_text(header, "plan"),
        lost=_keys(header, "lost"),
        sketch=_sketch(header),
        lineage=_text(header, "lineage"),
        held=_held(header),
    )


def parse_commit(header: dict[str, Any]) -> Commit:
    """A COMMIT frame's header."""
    return Commit(
        group=_text(header, "group"),
        step=need_count(header, "step", MAX_STEP),
        attempt=need_count(header, "attempt", MAX_STEP),
        digest=_text(header, "digest"),
        leader=_text(header, "leader", PEER_LENGTH),
        roster=_peers(header, "roster"),
        plan=need(header, "plan", bytes),
        sources=tuple(need_texts(header, "sources", MAX_SLOTS)),
        lineage=_text(header, "lineage"),
        followers=_peers(header, "followers"),
        lost=_keys(header, "lost"),
        weight=need_count(header, "weight", MAX_WEIGHT),
    )


def parse_digest(header: dict[str, Any]) -> Digest:
    """A DIGEST frame's header."""
    return Digest(_text(header, "group"), _text(header, "digest"), need_count(header, "step", MAX_STEP))


def parse_failure(header: dict[str, Any]) -> Failure:
    """A FAILED frame's header; an unknown reason becomes "other"."""
    suspects = _peers(header, "suspects", MAX_SUSPECTS)
    step = need_count(header, "step", MAX_STEP)
    return Failure(_text(header, "group"), known_reason(_text(header, "reason")), suspects, step)


def _text(header: dict[str, Any], name: str, length: int = HASH_LENGTH) -> str:
    text = need(header, name, str)
    if len(text) > length:
        raise FrameError("header", f"field {name!r}: at most {length} characters expected")
    return text


def _sketch(header: dict[str, Any]) -> str:
    sketch = _text(header, "sketch", SKETCH_LENGTH)
    if not set(sketch) <= set(string.hexdigits):
        raise FrameError("header", "a sketch is hex text")
    return sketch


def _peers(header: dict[str, Any], name: str, count: int = MAX_ROSTER) -> tuple[str, ...]:
    peers = need_texts(header, name, count, PEER_LENGTH)
    if len(set(peers)) != len(peers):
        raise FrameError("header", f"field {name!r} names a peer twice")
    return tuple(peers)


def _keys(header: dict[str, Any], name: str) -> tuple[CompactKey, ...]:
    raw = need(header, name, list)
    if len(raw) > MAX_SAMPLES_PER_STEP:
        raise FrameError("range", f"field {name!r}: {len(raw)} keys")
    keys: list[CompactKey] = []
    for item in raw:
        if not isinstance(item, list) or len(item) != 2 or any(type(part) is not int for part in item):
            raise FrameError("header", f"a ledger key is [slot, microbatch], got {reprlib.repr(item):.40}")
        if not (0 <= item[0] < MAX_SLOTS and 0 <= item[1] < MAX_SAMPLES_PER_STEP):
            raise FrameError("range", f"ledger key {reprlib.repr(item):.40} is out of range")
        keys.append((item[0], item[1]))
    if len(set(keys)) != len(keys):
        raise FrameError("header", f"field {name!r} names a key twice")
    return tuple(sorted(keys))


def _held(header: dict[str, Any]) -> Held | None:
    raw = need(header, "held", dict)
    if not raw:
        return None
    voters, members = _peers(raw, "voters"), _peers(raw, "members")
    if not voters or not members:
        raise FrameError("header", "an average that is held has members")
    return Held(
        group=_text(raw, "group"),
        digest=_text(raw, "digest"),
        attempt=need_count(raw, "attempt", MAX_STEP),
        ballot=_text(raw, "ballot"),
        voters=voters,
        leader=_text(raw, "leader", PEER_LENGTH),
        members=members,
        weight=need_count(raw, "weight", MAX_WEIGHT),
        lost=_keys(raw, "lost"),
        has_average=need(raw, "has_average", bool),
    )
