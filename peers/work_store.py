"""The microbatches a stage peer knows, and the sums of its ledger that are asked for at every event. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from peers.work_items import Entry, Phase
from swarm.plan import MicrobatchKey

SETTLED = (Phase.DONE, Phase.LOST)


class Store:
    """Entries by key, in order of arrival; the ledger is that of one plan at a time."""

    def __init__(self) -> None:
        self.entries: dict[MicrobatchKey, Entry] = {}
        self.loss_sum = 0.0
        self.loss_tokens = 0
        self.lost: set[MicrobatchKey] = set()
        self._plan = ""
        self._ledger: dict[MicrobatchKey, int] = {}
        self._open: set[MicrobatchKey] = set()

    @property
    def ledger(self) -> Mapping[MicrobatchKey, int]:
        """Keys of the plan in the accumulator, with their loss tokens: a view, not a copy."""
        return MappingProxyType(self._ledger)

    @property
    def in_flight(self) -> int:
        """Entries that are not settled, whatever their plan."""
        return len(self._open)

    def is_settled(self) -> bool:
        """Whether every entry of the plan is in the ledger or lost."""
        return not any(key.plan == self._plan for key in self._open)

    def turn(self, plan: str) -> None:
        """From now on the ledger is that of another plan, "" for none. Entries stay."""
        self._plan, self.loss_sum, self.loss_tokens = plan, 0.0, 0
        self._ledger.clear()
        self.lost.clear()

    def add(self, entry: Entry) -> None:
        """Take a new entry."""
        self.entries[entry.key] = entry
        self._open.add(entry.key)

    def is_known(self, entry: Entry) -> bool:
        """Whether this very entry still counts."""
        return self.entries.get(entry.key) is entry

    def finish(self, entry: Entry) -> None:
        """The entry is in the accumulator."""
        entry.phase = Phase.DONE
        self._open.discard(entry.key)
        if entry.key.plan == self._plan:
            self._ledger[entry.key] = entry.loss_tokens
            self.loss_sum += entry.loss_sum
            self.loss_tokens += entry.loss_tokens

    def lose(self, entry: Entry) -> None:
        """Nobody can give the entry's gradient: its payloads are let go."""
        entry.phase = Phase.LOST
        entry.incoming = entry.outgoing = entry.returned = None
        self._open.discard(entry.key)
        if entry.key.plan == self._plan:
            self.lost.add(entry.key)

    def drop(self, keys: Iterable[MicrobatchKey]) -> list[Entry]:
        """Forget these entries; a ledger that held one of them must be turned by the caller."""
        dropped = [self.entries.pop(key) for key in keys]
        for entry in dropped:
            entry.is_dropped = True
            self._open.discard(entry.key)
        return dropped

    def keys(self, *, of_plan: str | None = None, before_step: int | None = None) -> list[MicrobatchKey]:
        """Keys of all entries, of those of a plan, or of those before a step."""
        return [
            key
            for key in self.entries
            if (of_plan is None or key.plan == of_plan) and (before_step is None or key.step < before_step)
        ]

    def open_of_step(self, step: int) -> list[MicrobatchKey]:
        """Keys of a step that are not settled, in order of arrival."""
        return [key for key in self.entries if key in self._open and key.step == step]
