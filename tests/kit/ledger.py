"""Was every microbatch trained exactly once? Read from the ledgers that peers write in test mode."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[int, int, int, int]
"""(step, stage, slot, microbatch)."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a ledger; a peer that was killed may have begun another."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


class LedgerTail:
    """A ledger that is being written, read line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[dict[str, Any]] = []
        self._offset = 0

    def fresh(self) -> list[dict[str, Any]]:
        """Whole lines written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        lines = [json.loads(line) for line in data.splitlines()]
        self._lines += lines
        return lines

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        self.fresh()
        return self._lines


@dataclass(slots=True)
class Audit:
    """What the ledgers of a swarm say together.

    doubled: keys in more than one ledger. missing: keys of committed plans that are in none, nor lost.
    lost: keys that a COMMIT lists as lost. split: (step, stage) committed by more than one group. losses: mean
    token loss of every step, over the whole last stage. committed_at: seconds, first commit of every (step,
    stage). steps: (step, stage) that were committed.
    """

    doubled: dict[Key, int] = field(default_factory=dict)
    missing: set[Key] = field(default_factory=set)
    lost: set[Key] = field(default_factory=set)
    split: set[tuple[int, int]] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    committed_at: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether every key of every committed plan was trained once, or is lost."""
        return not (self.doubled or self.missing or self.split)

    def problems(self) -> list[str]:
        """What is wrong, for people; empty if nothing is."""
        found = []
        if self.doubled:
            found.append(f"trained twice: {sorted(self.doubled)[:8]} ({len(self.doubled)} keys)")
        if self.missing:
            found.append(f"trained never: {sorted(self.missing)[:8]} ({len(self.missing)} keys)")
        if self.split:
            found.append(f"two groups committed (step, stage) {sorted(self.split)[:8]}")
        return found


def audit(
    ledgers: Mapping[str, Iterable[dict[str, Any]]],
    last_words: Mapping[str, dict[str, Any]] | None = None,
    stages: int | None = None,
    killed: Collection[str] = (),
) -> Audit:
    """Join the ledgers of all peers of a run.

    ledgers: by peer name. last_words: what killed peers said when they died: a peer whose average was committed
    and that died before its own commit has written no line, but its ledger counted, and stands there. killed: names
    of peers that were killed from outside, without last words: of the step after its last line, what no other member
    has is such a peer's, if that step was committed with it.
    """
    found = Audit()
    counts: Counter[Key] = Counter()
    wanted: set[Key] = set()
    groups: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    rosters: dict[tuple[int, int], set[str]] = {}
    loss: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for lines in ledgers.values():
        for line in lines:
            step, stage = line["step"], line["stage"]
            groups[step, stage].add(line["group"])
            rosters.setdefault((step, stage), set()).update(line.get("roster", ()))
            counts.update((step, stage, slot, number) for slot, number in line["keys"])
            wanted |= {(step, stage, slot, number) for slot, number in line["all_keys"]}
            found.lost |= {(step, stage, slot, number) for slot, number in line.get("lost", [])}
            if "at" in line:
                before = found.committed_at.get((step, stage), line["at"])
                found.committed_at[step, stage] = min(before, line["at"])
            if stages is not None and stage == stages - 1 and "loss" in line:
                loss[step][0] += line["loss"][0]
                loss[step][1] += line["loss"][1]
    found.missing = wanted - set(counts) - found.lost
    for name, words in (last_words or {}).items():
        step, stage = words["step"], words["stage"]
        has_committed = any(line["step"] == step for line in ledgers.get(name, ()))
        held = {(step, stage, slot, number) for slot, number in words.get("ledger", [])}
        missing = {key for key in found.missing if key[:2] == (step, stage)}
        # All of it or nothing: the group that committed had its whole ledger, or did without the peer.
        if not has_committed and held and missing == held:
            found.missing -= held
    for name in killed:
        own = list(ledgers.get(name, ()))
        if own:
            step, stage, peer = own[-1]["step"] + 1, own[-1]["stage"], own[-1]["peer"]
            if peer in rosters.get((step, stage), ()):
                found.missing = {key for key in found.missing if key[:2] != (step, stage)}
    found.doubled = {key: count for key, count in counts.items() if count > 1}
    found.doubled |= {key: counts[key] + 1 for key in found.lost if counts[key]}
    found.split = {place for place, ids in groups.items() if len(ids) > 1}
    found.losses = {step: total / tokens for step, (total, tokens) in sorted(loss.items()) if tokens}
    return found


def last_words(log: str) -> dict[str, Any] | None:
    """What a peer that the injector killed wrote at the end of its log."""
    for line in reversed(log.splitlines()):
        if line.startswith('{"killed_at"'):
            words: dict[str, Any] = json.loads(line)
            return words
    return None


def skipped_steps(ledgers: dict[str, list[dict[str, Any]]], every: int) -> int:
    """Local steps not taken by members that had microbatches in other steps before the same average, one every so many
    steps: what they moved counts in the average, and is that much shorter. 0 where every step's gradient is averaged.
    """
    if every == 1:
        return 0
    skipped = 0
    for lines in ledgers.values():
        had_work = {line["step"]: bool(line["keys"]) for line in lines}
        for first in range(0, max(had_work, default=-1) + 1, every):
            taken = [had_work[step] for step in range(first, first + every) if step in had_work]
            skipped += taken.count(False) if any(taken) else 0
    return skipped
