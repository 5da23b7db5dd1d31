"""What the members of a round tell each other, as checked values.

Everything here arrives from remote peers: `parse_*` raise FrameError and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack

from peers import round_fields
from peers.frames import FrameError, need, need_count, need_texts
from peers.round_fields import PEER_LENGTH, hash_of, keys_of, peers_of, sketch_of, text_of
from swarm.plan import MAX_ROSTER, MAX_SAMPLES_PER_STEP, MAX_SLOTS, MicrobatchKey

HASH_LENGTH = round_fields.HASH_LENGTH
MAX_STEP = 2**40
MAX_WEIGHT = 2**40
MAX_SUSPECTS = 16

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
    attempt: the last one it was in. corrector: hash of the corrector's prior that the plan names, "" if it does
    not hold it (or there is none). owed: weight of what it owes the average that this round settles, where averages
    travel while steps run. settled: digest of that average, "" if it does not have it.
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
    corrector: str = ""
    owed: int = 0
    settled: str = ""

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
            "corrector": self.corrector,
            "owed": self.owed,
            "settled": self.settled,
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Members of one averaging attempt, in the order that gives each its part of the vector.

    lost: keys of the plan that are in no ledger and that nobody can give. sketch: of the leader's weights.
    held: the average of an earlier attempt that is to be finished; then nothing is exchanged. corrector: hash of
    the prior by which all members correct the average: that of the plan if every one of them holds it, else "".
    owed: weights of what the members owe the average that this round settles; empty for none. settled: digest of that
    average if all of them have the same; then nothing is exchanged.
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
    corrector: str = ""
    owed: tuple[int, ...] = ()
    settled: str = ""

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
            "corrector": self.corrector,
            "owed": list(self.owed),
            "settled": self.settled,
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
    keys, lost = keys_of(header, "keys"), keys_of(header, "lost")
    if len(keys) + len(lost) > MAX_SAMPLES_PER_STEP or not set(keys).isdisjoint(lost):
        raise FrameError("header", "a member's lost keys are not in its ledger")
    return Arrival(
        step=need_count(header, "step", MAX_STEP),
        plan=text_of(header, "plan"),
        keys=keys,
        weight=need_count(header, "weight", MAX_WEIGHT),
        held=_held(header),
        lost=lost,
        sketch=sketch_of(header),
        lineage=text_of(header, "lineage"),
        attempt=need_count(header, "attempt", MAX_STEP),
        corrector=hash_of(header, "corrector"),
        owed=need_count(header, "owed", MAX_WEIGHT),
        settled=hash_of(header, "settled"),
    )


def parse_group(header: dict[str, Any], leader: str) -> Group:
    """A GROUP frame's header."""
    members = peers_of(header, "members")
    weights, owed = need(header, "weights", list), need(header, "owed", list)
    ledgers = need_texts(header, "ledgers", MAX_ROSTER, HASH_LENGTH)
    if not len(members) == len(weights) == len(ledgers):
        raise FrameError("header", "a group needs one weight and one ledger for each of its members")
    if owed and len(owed) != len(members):
        raise FrameError("header", "each member of a group owes something, or none does")
    if any(type(weight) is not int or not 0 <= weight <= MAX_WEIGHT for weight in [*weights, *owed]):
        raise FrameError("range", "a weight is a count of loss tokens")
    if leader not in members:
        raise FrameError("header", "a leader belongs to its own group")
    return Group(
        id=text_of(header, "id"),
        step=need_count(header, "step", MAX_STEP),
        attempt=need_count(header, "attempt", MAX_STEP),
        leader=leader,
        members=members,
        weights=tuple(weights),
        ledgers=tuple(ledgers),
        plan=text_of(header, "plan"),
        lost=keys_of(header, "lost"),
        sketch=sketch_of(header),
        lineage=text_of(header, "lineage"),
        held=_held(header),
        corrector=hash_of(header, "corrector"),
        owed=tuple(owed),
        settled=hash_of(header, "settled"),
    )


def parse_commit(header: dict[str, Any]) -> Commit:
    """A COMMIT frame's header."""
    return Commit(
        group=text_of(header, "group"),
        step=need_count(header, "step", MAX_STEP),
        attempt=need_count(header, "attempt", MAX_STEP),
        digest=text_of(header, "digest"),
        leader=text_of(header, "leader", PEER_LENGTH),
        roster=peers_of(header, "roster"),
        plan=need(header, "plan", bytes),
        sources=tuple(need_texts(header, "sources", MAX_SLOTS)),
        lineage=text_of(header, "lineage"),
        followers=peers_of(header, "followers"),
        lost=keys_of(header, "lost"),
        weight=need_count(header, "weight", MAX_WEIGHT),
    )


def parse_digest(header: dict[str, Any]) -> Digest:
    """A DIGEST frame's header."""
    return Digest(text_of(header, "group"), text_of(header, "digest"), need_count(header, "step", MAX_STEP))


def parse_failure(header: dict[str, Any]) -> Failure:
    """A FAILED frame's header; an unknown reason becomes "other"."""
    suspects = peers_of(header, "suspects", MAX_SUSPECTS)
    step = need_count(header, "step", MAX_STEP)
    return Failure(text_of(header, "group"), known_reason(text_of(header, "reason")), suspects, step)


def _held(header: dict[str, Any]) -> Held | None:
    raw = need(header, "held", dict)
    if not raw:
        return None
    voters, members = peers_of(raw, "voters"), peers_of(raw, "members")
    if not voters or not members:
        raise FrameError("header", "an average that is held has members")
    return Held(
        group=text_of(raw, "group"),
        digest=text_of(raw, "digest"),
        attempt=need_count(raw, "attempt", MAX_STEP),
        ballot=text_of(raw, "ballot"),
        voters=voters,
        leader=text_of(raw, "leader", PEER_LENGTH),
        members=members,
        weight=need_count(raw, "weight", MAX_WEIGHT),
        lost=keys_of(raw, "lost"),
        has_average=need(raw, "has_average", bool),
    )
