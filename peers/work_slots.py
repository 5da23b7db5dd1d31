"""The slots of the plan that a source runs: what is still to be started and what has not come back. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from peers.work_items import Entry, SlotDone
from peers.work_store import SETTLED, Store
from swarm.plan import MicrobatchKey


class Slots:
    """This source's slots of the current plan."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: OrderedDict[MicrobatchKey, tuple[Any, bool]] = OrderedDict()
        self._unsettled: dict[int, set[MicrobatchKey]] = {}

    @property
    def has_pending(self) -> bool:
        """Whether microbatches wait to be started."""
        return bool(self._pending)

    def clear(self) -> None:
        """Another plan, or none."""
        self._pending.clear()
        self._unsettled.clear()

    def stop(self) -> None:
        """Start nothing more."""
        self._pending.clear()

    def assign(
        self, slot: int, works: Iterable[tuple[MicrobatchKey, Any]], is_replay: bool
    ) -> list[SlotDone]:
        """Run a slot. Whatever of it has been started before goes on."""
        unsettled: set[MicrobatchKey] = set()
        for key, work in works:
            entry = self._store.entries.get(key)
            if entry is None:
                self._pending.setdefault(key, (work, is_replay))
            if entry is None or entry.phase not in SETTLED:
                unsettled.add(key)
        self._unsettled[slot] = unsettled
        return self._ended(slot)

    def start_next(self) -> Entry:
        """The next microbatch that waits, as an entry. Raises KeyError if none does."""
        key, (work, is_replay) = self._pending.popitem(last=False)
        return Entry(key, None, work, is_replay=is_replay)

    def settle(self, key: MicrobatchKey) -> list[SlotDone]:
        """A key is in the ledger, or lost."""
        if (unsettled := self._unsettled.get(key.slot)) is None:
            return []
        unsettled.discard(key)
        return self._ended(key.slot)

    def _ended(self, slot: int) -> list[SlotDone]:
        if self._unsettled[slot]:
            return []
        del self._unsettled[slot]
        return [SlotDone(slot)]
