"""What the members of a round tell each other, as checked values.

Everything here arrives from remote peers: `parse_*` raise FrameError and nothing else.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack

from peers.frames import FrameError, need, need_count, need_texts
from swarm.plan import MAX_ROSTER, MAX_SAMPLES_PER_STEP, MAX_SLOTS, MicrobatchKey

MAX_STEP = 2**40
MAX_WEIGHT = 2**40
HASH_LENGTH = 64

CompactKey = tuple[int, int]
"""A key within a known plan: (slot, microbatch)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A member is done with a step: its settled ledger.

    weight: loss tokens of the ledger. held: (group id, digest) of an average it holds without a COMMIT.
    """

    step: int
    plan: str
    keys: tuple[CompactKey, ...]
    weight: int
    held: tuple[str, str] | None = None

    @property
    def ledger_hash(self) -> str:
        """Names this exact ledger."""
        return ledger_hash(self.plan, self.keys)

    def header(self) -> dict[str, Any]:
        """Wire form."""
        return {
            "step": self.step,
            "plan": self.plan,
            "keys": [list(key) for key in self.keys],
            "weight": self.weight,
            "held": list(self.held) if self.held else [],
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Members of one averaging attempt, in the order that gives each its part of the vector."""

    id: str
    step: int
    attempt: int
    leader: str
    members: tuple[str, ...]
    weights: tuple[int, ...]
    ledgers: tuple[str, ...]
    plan: str

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
        }


@dataclass(frozen=True, slots=True)
class Commit:
    """The decision that lets anybody apply, and what comes next.

    roster: who votes in the next round. plan, sources: at stage 0 the next plan (canonical bytes) and who
    runs its slots; empty at other stages and after the last step.
    """

    group: str
    step: int
    attempt: int
    digest: str
    leader: str
    roster: tuple[str, ...]
    plan: bytes = b""
    sources: tuple[str, ...] = ()

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
        }


def ledger_hash(plan: str, keys: Iterable[CompactKey]) -> str:
    """sha256 over the plan's hash and the sorted keys."""
    return hashlib.sha256(msgpack.packb([plan, sorted(keys)])).hexdigest()


def compact(keys: Iterable[MicrobatchKey]) -> tuple[CompactKey, ...]:
    """Keys of one plan without what they share, sorted."""
    return tuple(sorted((key.slot, key.microbatch) for key in keys))


def parse_arrival(header: dict[str, Any]) -> Arrival:
    """An ARRIVE frame's header."""
    raw = need(header, "keys", list)
    if len(raw) > MAX_SAMPLES_PER_STEP:
        raise FrameError("range", f"a ledger of {len(raw)} keys")
    keys: list[CompactKey] = []
    for item in raw:
        if not isinstance(item, list) or len(item) != 2 or any(type(part) is not int for part in item):
            raise FrameError("header", f"a ledger key is [slot, microbatch], got {reprlib.repr(item):.40}")
        if not (0 <= item[0] < MAX_SLOTS and 0 <= item[1] < MAX_SAMPLES_PER_STEP):
            raise FrameError("range", f"ledger key {item} is out of range")
        keys.append((item[0], item[1]))
    if len(set(keys)) != len(keys):
        raise FrameError("header", "a ledger names a key twice")
    held = need_texts(header, "held", 2, HASH_LENGTH)
    if len(held) == 1:
        raise FrameError("header", "held is [group, digest] or empty")
    return Arrival(
        step=need_count(header, "step", MAX_STEP),
        plan=need(header, "plan", str)[:HASH_LENGTH],
        keys=tuple(sorted(keys)),
        weight=need_count(header, "weight", MAX_WEIGHT),
        held=(held[0], held[1]) if held else None,
    )


def parse_group(header: dict[str, Any], leader: str) -> Group:
    """A GROUP frame's header."""
    members = need_texts(header, "members", MAX_ROSTER)
    weights = need(header, "weights", list)
    ledgers = need_texts(header, "ledgers", MAX_ROSTER, HASH_LENGTH)
    if not (len(members) == len(weights) == len(ledgers)) or len(set(members)) != len(members):
        raise FrameError("header", "a group needs one weight and one ledger for each of its members")
    if any(type(weight) is not int or not 0 <= weight <= MAX_WEIGHT for weight in weights):
        raise FrameError("range", "a weight is a count of loss tokens")
    if leader not in members:
        raise FrameError("header", "a leader belongs to its own group")
    return Group(
        id=need(header, "id", str)[:HASH_LENGTH],
        step=need_count(header, "step", MAX_STEP),
        attempt=need_count(header, "attempt", MAX_STEP),
        leader=leader,
        members=tuple(members),
        weights=tuple(weights),
        ledgers=tuple(ledgers),
        plan=need(header, "plan", str)[:HASH_LENGTH],
    )


def parse_commit(header: dict[str, Any]) -> Commit:
    """A COMMIT frame's header."""
    return Commit(
        group=need(header, "group", str)[:HASH_LENGTH],
        step=need_count(header, "step", MAX_STEP),
        attempt=need_count(header, "attempt", MAX_STEP),
        digest=need(header, "digest", str)[:HASH_LENGTH],
        leader=need(header, "leader", str)[:128],
        roster=tuple(need_texts(header, "roster", MAX_ROSTER)),
        plan=need(header, "plan", bytes),
        sources=tuple(need_texts(header, "sources", MAX_SLOTS)),
    )
