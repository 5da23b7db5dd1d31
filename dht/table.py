"""The local picture of the noticeboard: what was read, merged, until it expires. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from dht.records import GrantRecord, ManifestPointer, PeerRecord, PriorRecord

RecordType = TypeVar("RecordType", PeerRecord, ManifestPointer, PriorRecord, GrantRecord)


class RecordTable(Generic[RecordType]):
    """Newest record of each subkey. A read that misses a record does not remove it: only its expiry does.

    version: grows whenever `live` changes in more than expiry times.
    """

    def __init__(self) -> None:
        self._records: dict[str, RecordType] = {}
        self.version = 0

    def merge(self, records: Iterable[tuple[str, RecordType]], now: float) -> None:
        """Take in (subkey, record) pairs at swarm time `now`; older ones than known are ignored."""
        for subkey, record in records:
            known = self._records.get(subkey)
            if record.expires_at <= now or (known is not None and record.order <= known.order):
                continue
            if known is None or _content(known) != _content(record):
                self.version += 1
            self._records[subkey] = record
        self.expire(now)

    def expire(self, now: float) -> None:
        """Remove what has expired at swarm time `now`."""
        for subkey in [subkey for subkey, record in self._records.items() if record.expires_at <= now]:
            del self._records[subkey]
            self.version += 1

    def live(self, now: float) -> dict[str, RecordType]:
        """What has not expired at swarm time `now`, by subkey."""
        return {subkey: record for subkey, record in self._records.items() if record.expires_at > now}

    def expires_at(self, subkey: str) -> float:
        """Swarm time at which a record expires, or has expired without having been removed yet; 0 if unknown."""
        record = self._records.get(subkey)
        return record.expires_at if record is not None else 0.0

    def next_expiry(self) -> float | None:
        """Swarm time at which the next record expires, None if there is none."""
        return min((record.expires_at for record in self._records.values()), default=None)


def _content(record: RecordType) -> RecordType:
    """The record without its expiry, for comparison."""
    return record.model_copy(update={"expires_at": 0.0})
