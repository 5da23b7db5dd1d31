"""What hivemind's DHT lets through: our signed records at their own place, and nothing else.

hivemind asks `validate` when a stranger wants something stored here and when one answers our search. The
rules are the same for both; what is refused is counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from dht.records import MAX_RECORD_BYTES, MAX_RECORD_LIFE_S, Record, RecordError, decode_record, place_of

MAX_BOARD_BYTES = 1_500_000
"""Bytes of records under one DHT key. A key's records must fit one unary answer (4 MiB, with room for the
signature envelope); more than this many bytes of strangers' records are refused ("full")."""

MAX_BYTES = 32_000_000
"""Bytes of records under all keys: runs cost a stranger nothing, and each has a key of its own."""

CLOCK_TOLERANCE_S = 3.0
"""Two machines' swarm times may differ by the error of the offset's measurement."""

_CACHED_RECORDS = 4096


@dataclass(slots=True)
class _Newest:
    """The newest record seen at one place: its order and its size in bytes."""

    order: tuple[int, float]
    nbytes: int


class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Lets through records that are well formed, signed by their peer, at their place, and not too late.

    now: swarm time. refused: counts by reason; the reasons are those of `records.Reason` and "no_subkey",
    "place" (wrong key or subkey), "expiry" (not the signed one, past, or too far ahead), "stale" (an older
    incarnation, or an older record than one seen; normal in small numbers), "full".

    A stale record is refused although hivemind would reject it too: its storage shortens the life of the
    newer record when an older one is offered.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._newest: dict[tuple[bytes, bytes], _Newest] = {}
        self._board_bytes: Counter[bytes] = Counter()
        self._bytes = 0
        self._decoded: OrderedDict[bytes, Record] = OrderedDict()
        self.refused: Counter[str] = Counter()

    def validate(self, record: DHTRecord) -> bool:
        """hivemind's question: may this stand in the DHT?"""
        reason = self._fault(record)
        if reason is not None:
            self.refused[reason] += 1
        return reason is None

    def decode(self, data: bytes) -> Record:
        """`decode_record`, remembering what was verified: the same bytes come from every replica.

        Raises RecordError.
        """
        known = self._decoded.get(data)
        if known is not None:
            self._decoded.move_to_end(data)
            return known
        record = decode_record(data)
        self._decoded[data] = record
        if len(self._decoded) > _CACHED_RECORDS:
            self._decoded.popitem(last=False)
        return record

    def _fault(self, entry: DHTRecord) -> str | None:
        """The reason to refuse an entry, or None."""
        if len(entry.value) > MAX_RECORD_BYTES + 8:
            return "too_large"
        try:
            subkey = MSGPackSerializer.loads(entry.subkey) if entry.subkey else None
            value = MSGPackSerializer.loads(entry.value)
        except Exception:  # a stranger's bytes: msgpack raises many kinds
            return "malformed"
        if subkey is None:
            return "no_subkey"
        if not isinstance(value, bytes) or not isinstance(subkey, str):
            return "malformed"
        try:
            record = self.decode(value)
        except RecordError as error:
            return error.reason
        key, own_subkey = place_of(record)
        if subkey != own_subkey or DHTID.generate(source=key).to_bytes() != entry.key:
            return "place"
        now = self._now()
        if not math.isclose(record.expires_at, entry.expiration_time, rel_tol=0, abs_tol=1e-6):
            return "expiry"
        if not now - CLOCK_TOLERANCE_S <= record.expires_at <= now + MAX_RECORD_LIFE_S + CLOCK_TOLERANCE_S:
            return "expiry"
        return self._remember(entry, record, now)

    def _remember(self, entry: DHTRecord, record: Record, now: float) -> str | None:
        """Compare with the newest record of this place and take its size into account."""
        place = (entry.key, entry.subkey)
        newest = self._newest.get(place)
        if newest is not None and record.order < newest.order:
            return "stale"
        if self._is_full(entry.key, len(entry.value)):
            self.forget_expired(now)
            newest = self._newest.get(place)
        growth = len(entry.value) - (newest.nbytes if newest is not None else 0)
        if growth > 0 and self._is_full(entry.key, growth):
            return "full"
        self._newest[place] = _Newest(record.order, len(entry.value))
        self._board_bytes[entry.key] += growth
        self._bytes += growth
        return None

    def _is_full(self, key: bytes, growth: int) -> bool:
        """Whether that many bytes more are too many, under this key or in all."""
        return self._board_bytes[key] + growth > MAX_BOARD_BYTES or self._bytes + growth > MAX_BYTES

    def forget_expired(self, now: float) -> None:
        """Drop what has expired, so that memory follows the number of living peers."""
        # The order is that of last use, and what has expired is used no more.
        while self._decoded and next(iter(self._decoded.values())).expires_at < now - CLOCK_TOLERANCE_S:
            self._decoded.popitem(last=False)
        for place, newest in list(self._newest.items()):
            if newest.order[1] < now - CLOCK_TOLERANCE_S:
                del self._newest[place]
                self._board_bytes[place[0]] -= newest.nbytes
                self._bytes -= newest.nbytes
                if self._board_bytes[place[0]] <= 0:
                    del self._board_bytes[place[0]]
