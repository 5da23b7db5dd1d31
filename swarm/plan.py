"""The plan of a step: which samples are trained, in which slots, and by whom.

The plan is data, computed by the lead source and committed with the stage-0 round of the step before.
Its hash covers what is computed (step, samples, prior versions, flags, the group that committed it), not
who runs a slot: that is an assignment, changed later without changing any key.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

MAX_SLOTS = 256
"""Slots of one step: one per source, so this bounds the sources of a run."""
MAX_SAMPLES_PER_STEP = 65_536
MAX_ROSTER = 256
MAX_PRIOR_VERSION = 2**31

PeerId = str
Hash = str

_PRIOR_HASH = re.compile(r"(?:[0-9a-f]{64})?")


class MicrobatchKey(BaseModel):
    """Names one unit of work within a run: a plan, a slot of it, and a microbatch of the slot."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    step: int = Field(ge=0)
    plan: Hash = Field(min_length=64, max_length=64)
    slot: int = Field(ge=0, lt=MAX_SLOTS)
    microbatch: int = Field(ge=0, lt=MAX_SAMPLES_PER_STEP)

    def __hash__(self) -> int:
        """Hash of the fields: keys are looked up far more often than they are made."""
        return hash((self.plan, self.slot, self.microbatch))

    def pack(self) -> list[int | str]:
        """Wire form."""
        return [self.step, self.plan, self.slot, self.microbatch]

    @classmethod
    def unpack(cls, value: object) -> Self:
        """Parse the wire form. Raises ValueError."""
        if not isinstance(value, list) or len(value) != 4:
            raise ValueError(
                f"a microbatch key is [step, plan, slot, microbatch], got {reprlib.repr(value):.80}"
            )
        return cls(step=value[0], plan=value[1], slot=value[2], microbatch=value[3])

    def __str__(self) -> str:
        """Short form for logs."""
        return f"{self.step}/{self.plan[:6]}/{self.slot}.{self.microbatch}"


class Slot(BaseModel):
    """One line of the plan: samples that one source runs, cut into microbatches in order."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: int = Field(ge=0, lt=MAX_SLOTS)
    samples: tuple[int, ...] = Field(min_length=1, max_length=MAX_SAMPLES_PER_STEP)


class Plan(BaseModel):
    """Everything that decides what step `step` computes.

    attempt counts the rounds of stage 0 that tried to commit a plan for this step: a peer that is shown a
    later attempt drops what it accumulated under an earlier one. group is the id of the stage-0 group that
    committed the plan (the proposal's own id for the first plan of a start).

    prior_versions, prior_hashes: the prior in force at every boundary and, if the run has a corrector with a prior,
    then of every stage: how often it has changed, and the sha256 (hex) of its file; version 0 with hash "" is the
    run's initial prior (for a corrector: none). A version never stands for two hashes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    group: Hash = Field(max_length=64)
    rows_per_microbatch: int = Field(ge=1, le=4096)
    slots: tuple[Slot, ...] = Field(min_length=1, max_length=MAX_SLOTS)
    prior_versions: tuple[int, ...] = Field(max_length=MAX_SLOTS)
    prior_hashes: tuple[str, ...] = Field(max_length=MAX_SLOTS)
    is_last: bool = False
    keep_snapshot: bool = False
    _digest: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _slots_are_numbered(self) -> Self:
        if [slot.number for slot in self.slots] != list(range(len(self.slots))):
            raise ValueError("slots must be numbered 0, 1, 2, ... in order")
        if sum(len(slot.samples) for slot in self.slots) > MAX_SAMPLES_PER_STEP:
            raise ValueError(f"a step has at most {MAX_SAMPLES_PER_STEP} samples")
        if len(self.prior_hashes) != len(self.prior_versions):
            raise ValueError(f"{len(self.prior_versions)} prior versions, {len(self.prior_hashes)} hashes")
        for version, name in zip(self.prior_versions, self.prior_hashes, strict=True):
            if not 0 <= version <= MAX_PRIOR_VERSION or not _PRIOR_HASH.fullmatch(name):
                raise ValueError(f"prior version {version} with hash {name[:70]!r}")
            if (version == 0) != (name == ""):
                raise ValueError(f"prior version {version} with hash {name!r}: version 0 is the initial one")
        return self

    def digest(self) -> Hash:
        """Plan hash: sha256 (hex) of the canonical bytes."""
        if not self._digest:
            self._digest = hashlib.sha256(self.to_bytes()).hexdigest()
        return self._digest

    def to_bytes(self) -> bytes:
        """Canonical msgpack form."""
        data = self.model_dump()
        return bytes(
            msgpack.packb(
                [
                    data["step"],
                    data["attempt"],
                    data["group"],
                    data["rows_per_microbatch"],
                    [list(slot["samples"]) for slot in data["slots"]],
                    list(data["prior_versions"]),
                    list(data["prior_hashes"]),
                    data["is_last"],
                    data["keep_snapshot"],
                ]
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse `to_bytes`. Raises ValueError on anything else."""
        try:
            step, attempt, group, rows, slots, versions, hashes, is_last, keep = msgpack.unpackb(data)
            # Before pydantic looks: it would describe each of a million bad samples in its message.
            if max(len(slots), len(versions), len(hashes)) > MAX_SLOTS:
                raise ValueError(
                    f"{len(slots)} slots, {len(versions)} prior versions and {len(hashes)} hashes, "
                    f"at most {MAX_SLOTS}"
                )
            if sum(len(samples) for samples in slots) > MAX_SAMPLES_PER_STEP:
                raise ValueError(f"a step has at most {MAX_SAMPLES_PER_STEP} samples")
            return cls(
                step=step,
                attempt=attempt,
                group=group,
                rows_per_microbatch=rows,
                slots=tuple(Slot(number=i, samples=tuple(samples)) for i, samples in enumerate(slots)),
                prior_versions=tuple(versions),
                prior_hashes=tuple(hashes),
                is_last=is_last,
                keep_snapshot=keep,
            )
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(f"not a plan: {error!s:.300}") from error

    def microbatches(self, slot: int) -> list[tuple[int, ...]]:
        """Sample ids of every microbatch of a slot."""
        samples = self.slots[slot].samples
        rows = self.rows_per_microbatch
        return [samples[start : start + rows] for start in range(0, len(samples), rows)]

    def keys(self) -> Iterator[MicrobatchKey]:
        """Every unit of work of the step."""
        digest = self.digest()
        for slot in self.slots:
            for number in range(len(self.microbatches(slot.number))):
                yield MicrobatchKey(step=self.step, plan=digest, slot=slot.number, microbatch=number)


class Assignment(BaseModel):
    """Who runs each slot of a plan. The highest counter wins."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    plan: Hash = Field(min_length=64, max_length=64)
    counter: int = Field(ge=0)
    sources: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_SLOTS)


def seeded_order(peers: Sequence[PeerId], run_seed: int, stage: int, step: int) -> list[PeerId]:
    """The order in which the members of a round may lead it: equal everywhere, different every step."""

    def rank(peer: PeerId) -> bytes:
        return hashlib.sha256(f"{run_seed}/{stage}/{step}/{peer}".encode()).digest()

    return sorted(peers, key=rank)


def group_id(
    run_id: str, stage: int, step: int, attempt: int, leader: PeerId, members: Sequence[PeerId]
) -> Hash:
    """Id of an averaging group (design section 7, point 4)."""
    packed = msgpack.packb([run_id, stage, step, attempt, leader, sorted(members)])
    return hashlib.sha256(packed).hexdigest()


def split_samples(
    samples: Sequence[int], rows_per_microbatch: int, shares: Mapping[PeerId, float]
) -> list[tuple[int, ...]]:
    """Cut a step's samples into one slot per source, in whole microbatches, by the sources' shares.

    Returns one tuple of sample ids per source with at least one microbatch, in the order of `shares`
    (largest remainder, ties by order). Raises ValueError without samples or sources.
    """
    if not samples or not shares:
        raise ValueError(f"cannot split {len(samples)} samples over {len(shares)} sources")
    groups = [
        tuple(samples[i : i + rows_per_microbatch]) for i in range(0, len(samples), rows_per_microbatch)
    ]
    total = sum(shares.values())
    exact = [len(groups) * share / total for share in shares.values()]
    counts = [int(value) for value in exact]
    order = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    for index in order[: len(groups) - sum(counts)]:
        counts[index] += 1
    slots: list[tuple[int, ...]] = []
    start = 0
    for count in counts:
        if count:
            slots.append(tuple(sample for group in groups[start : start + count] for sample in group))
        start += count
    return slots
