"""Records, the validator, the local table and the swarm clock, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.addresses import AddressError, parse_address, parse_peer_id
from dht.clock import ClockSkewError, SwarmClock
from dht.identity import Identity
from dht.node import _drop_bad_entries, _find_with_honest_expirations
from dht.records import (
    MAX_RECORD_BYTES,
    ManifestPointer,
    PeerRecord,
    PriorRecord,
    Record,
    RecordError,
    decode_record,
    encode_record,
    place_of,
)
from dht.table import RecordTable
from dht.validators import SignedRecordValidator

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def identities() -> Iterator[list[Identity]]:
    made = [Identity.load_or_create(None) for _ in range(2)]
    for identity in made:
        identity.lock()
    yield made
    for identity in made:
        identity.close()


def peer_record(identity: Identity, **changes: Any) -> PeerRecord:
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "peer_id": identity.peer_id,
        "public_key": identity.public_key,
        "incarnation": 7,
        "role": "stage",
        "stage": 1,
        "state": "online",
        "addresses": (f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}",),
        "loss": 2.5,
        "versions": (20, 40),
        "expires_at": NOW + 30,
    }
    return PeerRecord(**(fields | changes))


def dht_entry(record: Record, identity: Identity, **changes: Any) -> DHTRecord:
    key, subkey = place_of(record)
    fields: dict[str, Any] = {
        "key": DHTID.generate(source=key).to_bytes(),
        "subkey": MSGPackSerializer.dumps(subkey),
        "value": MSGPackSerializer.dumps(encode_record(record, identity)),
        "expiration_time": record.expires_at,
    }
    return DHTRecord(**(fields | changes))


def resigned(record: PeerRecord, identity: Identity, **changes: Any) -> bytes:
    """A record with arbitrary fields, properly signed: what a hostile peer can always make."""
    fields = record.model_dump(exclude_none=True) | changes
    payload = msgpack.packb(fields)
    return bytes(msgpack.packb(["peer", payload, identity.sign(b"record\0peer\0" + payload)]))


def reason_of(data: bytes) -> str:
    with pytest.raises(RecordError) as caught:
        decode_record(data)
    return caught.value.reason


def test_records_survive_the_wire(identities: list[Identity]) -> None:
    peer = peer_record(identities[0])
    pointer = ManifestPointer(
        run_id="run-1",
        peer_id=identities[0].peer_id,
        public_key=identities[0].public_key,
        incarnation=7,
        manifest_sha256="0" * 64,
        nbytes=10,
        name="demo",
    )
    prior = PriorRecord(
        run_id="run-1",
        peer_id=identities[0].peer_id,
        public_key=identities[0].public_key,
        incarnation=7,
        kind="boundary",
        part=2,
        step=20,
        sha256="0" * 64,
        nbytes=10,
    )
    other = prior.model_copy(update={"kind": "corrector"})
    assert len({place_of(record) for record in (peer, pointer, prior, other)}) == 4
    for record in (peer, pointer, prior, other):
        assert decode_record(encode_record(record, identities[0])) == record


def test_largest_record_fits(identities: list[Identity]) -> None:
    record = peer_record(
        identities[0], addresses=("/" * 256,) * 16, versions=(2**53,) * 32, priors=("f" * 16,) * 16
    )
    assert len(encode_record(record, identities[0])) < MAX_RECORD_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": float("nan")},
        {"tokens_per_s": float("inf")},
        {"tokens_per_s": -1.0},
        {"upload_mbps": 1e300},
        {"step": -1},
        {"step": 2**60},
        {"step": 1.0},
        {"step": True},
        {"training": 1},
        {"state": "sleeping"},
        {"role": "owner"},
        {"stage": 5000},
        {"run_id": "../run"},
        {"run_id": "x" * 65},
        {"addresses": ["a"] * 17},
        {"addresses": ["a" * 257]},
        {"addresses": "abc"},
        {"versions": list(range(33))},
        {"expires_at": float("inf")},
        {"public_key": b"x" * 2000},
        {"surprise": 1},
    ],
)
def test_out_of_range_fields_are_refused(identities: list[Identity], changes: dict[str, Any]) -> None:
    assert reason_of(resigned(peer_record(identities[0]), identities[0], **changes)) == "schema"


def test_each_kind_of_forgery_has_its_reason(identities: list[Identity]) -> None:
    honest, hostile = identities
    record = peer_record(honest)
    assert reason_of(resigned(record, hostile)) == "signature"
    assert reason_of(resigned(record, hostile, public_key=hostile.public_key)) == "peer_id"
    assert reason_of(resigned(record, hostile, public_key=b"no key")) == "public_key"
    assert reason_of(resigned(record, honest, protocol=2)) == "protocol"
    kind, payload, signature = msgpack.unpackb(encode_record(record, honest))
    assert reason_of(msgpack.packb([kind, payload[:-1] + b"\x00", signature])) in {
        "malformed",
        "schema",
        "signature",
    }
    assert reason_of(msgpack.packb(["manifest", payload, signature])) == "schema"
    assert reason_of(b"\xc1" * 10) == "malformed"
    assert reason_of(b"x" * (MAX_RECORD_BYTES + 1)) == "too_large"
    with pytest.raises(ValueError, match="cannot be signed"):
        encode_record(record, hostile)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_raise_only_record_errors(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(data)


@given(st.integers(min_value=0), st.integers(min_value=0, max_value=255))
@settings(max_examples=100, deadline=None)
def test_any_changed_byte_is_noticed(identities: list[Identity], position: int, value: int) -> None:
    data = bytearray(encode_record(peer_record(identities[0]), identities[0]))
    position %= len(data)
    if data[position] == value:
        return
    data[position] = value
    with pytest.raises(RecordError):
        decode_record(bytes(data))


def test_validator_lets_own_records_through_and_counts_refusals(identities: list[Identity]) -> None:
    validator = SignedRecordValidator(lambda: NOW)
    record = peer_record(identities[0])
    assert validator.validate(dht_entry(record, identities[0]))
    cases = {
        "no_subkey": {"subkey": MSGPackSerializer.dumps(None)},
        "place": {"subkey": MSGPackSerializer.dumps(identities[1].peer_id)},
        "expiry": {"expiration_time": NOW + 31},
        "malformed": {"value": b"\xc1"},
        "too_large": {"value": b"x" * 10_000},
        "signature": {"value": MSGPackSerializer.dumps(resigned(record, identities[1]))},
    }
    for reason, changes in cases.items():
        assert not validator.validate(dht_entry(record, identities[0], **changes)), reason
        assert validator.refused[reason] == 1
    assert not validator.validate(dht_entry(record, identities[0], key=DHTID.generate("other").to_bytes()))
    assert validator.refused["place"] == 2


@pytest.mark.parametrize("expires_in", [-10.0, 70.0, 1e9])
def test_expiry_is_bounded_both_ways(identities: list[Identity], expires_in: float) -> None:
    validator = SignedRecordValidator(lambda: NOW)
    record = peer_record(identities[0], expires_at=NOW + expires_in)
    assert not validator.validate(dht_entry(record, identities[0]))
    assert validator.refused == {"expiry": 1}


def test_lower_incarnation_is_refused_while_the_newer_one_lives(identities: list[Identity]) -> None:
    now = NOW
    validator = SignedRecordValidator(lambda: now)
    newer = peer_record(identities[0], incarnation=8, expires_at=NOW + 20)
    older = peer_record(identities[0], incarnation=7, expires_at=NOW + 50)
    assert validator.validate(dht_entry(newer, identities[0]))
    assert not validator.validate(dht_entry(older, identities[0]))
    assert validator.refused == {"stale": 1}
    now += 30
    validator.forget_expired(now)
    assert validator.validate(dht_entry(older, identities[0]))


def test_board_size_is_bounded_and_recovers(
    identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = NOW
    validator = SignedRecordValidator(lambda: now)
    first = dht_entry(peer_record(identities[0]), identities[0])
    monkeypatch.setattr("dht.validators.MAX_BOARD_BYTES", len(first.value) + 10)
    second = peer_record(identities[1])
    assert validator.validate(first)
    assert validator.validate(first)  # the same place does not count twice
    assert not validator.validate(dht_entry(second, identities[1]))
    assert validator.refused == {"full": 1}
    now += 40
    assert validator.validate(dht_entry(peer_record(identities[1], expires_at=now + 30), identities[1]))


def test_one_bad_entry_does_not_hide_the_others(identities: list[Identity]) -> None:
    class Protocol:
        record_validator = SignedRecordValidator(lambda: NOW)
        serializer = MSGPackSerializer

    good = dht_entry(peer_record(identities[0]), identities[0])
    with DictionaryDHTValue(maxsize=3).freeze() as dictionary:
        dictionary.store(identities[0].peer_id, good.value, good.expiration_time)
        dictionary.store("forged", good.value, good.expiration_time)
        dictionary.store(5, b"", NOW + 10)
        assert _drop_bad_entries(Protocol, good.key, dictionary)
        assert [subkey for subkey, _ in dictionary.items()] == [identities[0].peer_id]


def test_holder_cannot_end_a_search_by_claiming_an_endless_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    with DictionaryDHTValue().freeze() as full:
        full.store("a", b"x", NOW + 5)
        full.store("b", b"x", NOW + 9)

    async def hostile_answer(protocol: Any, peer: Any, keys: Any) -> Any:
        endless = float("inf")
        empty = ValueWithExpiration(DictionaryDHTValue(), endless)
        return {1: (ValueWithExpiration(full, endless), {}), 2: (empty, {}), 3: (None, {})}

    monkeypatch.setattr(DHTProtocol, "call_find", hostile_answer)
    answer = asyncio.run(_find_with_honest_expirations(None, None, [1, 2, 3]))
    assert answer[1][0].expiration_time == NOW + 9
    assert answer[2][0] is None and answer[3][0] is None

    async def no_answer(protocol: Any, peer: Any, keys: Any) -> None:
        return None

    monkeypatch.setattr(DHTProtocol, "call_find", no_answer)
    assert asyncio.run(_find_with_honest_expirations(None, None, [1])) is None


def test_table_keeps_the_newest_until_it_expires(identities: list[Identity]) -> None:
    table: RecordTable[PeerRecord] = RecordTable()
    record = peer_record(identities[0])
    table.merge([("a", record)], NOW)
    assert table.version == 1
    table.merge([("a", record.model_copy(update={"expires_at": NOW + 35}))], NOW)
    assert table.version == 1  # only the expiry moved
    table.merge([("a", record.model_copy(update={"incarnation": 6, "expires_at": NOW + 50, "step": 9}))], NOW)
    assert table.live(NOW)["a"].step == 0
    table.merge([("a", record.model_copy(update={"incarnation": 8, "expires_at": NOW + 31, "step": 9}))], NOW)
    assert table.live(NOW)["a"].step == 9 and table.version == 2
    table.merge([], NOW + 10)
    assert list(table.live(NOW + 10)) == ["a"]
    assert table.live(NOW + 31) == {}
    table.expire(NOW + 31)
    assert table.version == 3


def test_swarm_clock_ignores_a_wall_clock_that_steps_back() -> None:
    wall, steady = 1000.0, 50.0
    clock = SwarmClock(wall=lambda: wall, steady=lambda: steady)
    before = clock.now()
    wall, steady = 400.0, 51.0
    assert clock.now() == pytest.approx(before + 1)


def test_swarm_clock_adopts_the_median_and_refuses_a_large_offset_with_the_figure() -> None:
    clock = SwarmClock(wall=lambda: 1000.0, steady=lambda: 0.0)
    assert clock.correct([5.0, 5.2, -900.0]) == pytest.approx(5.0)
    assert clock.now() == pytest.approx(1005.0)
    assert clock.correct([]) == pytest.approx(5.0)
    with pytest.raises(ClockSkewError, match=r"105\.0 s behind"):
        clock.correct([100.0])
    with pytest.raises(ClockSkewError, match=r"95\.0 s ahead of"):
        clock.correct([-100.0])
    assert clock.offset_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a multiaddr"),
        ("127.0.0.1:80", "not a multiaddr"),
        ("/ip4/300.0.0.1/tcp/1", "not a multiaddr"),
        ("/ip4/127.0.0.1/udp/1/quic-v1", "only TCP"),
        ("/ip4/127.0.0.1", "not a TCP address"),
        ("/ip4/127.0.0.1/tcp/1", "lacks the peer's id"),
        ("/ip4/127.0.0.1/tcp/1/p2p/Qm123", "peer id"),
        ("/ip4/127.0.0.1/tcp/1/" + "x" * 300, "characters"),
    ],
)
def test_unusable_addresses_say_why(text: str, complaint: str) -> None:
    with pytest.raises(AddressError, match=complaint):
        parse_address(text, needs_peer_id=True)


def test_addresses_come_apart_and_together(identities: list[Identity]) -> None:
    for transport in ("/ip4/10.0.0.1/tcp/31330", "/ip6/::1/tcp/1", "/dns4/seed.example.org/tcp/31330"):
        address = parse_address(f"{transport}/p2p/{identities[0].peer_id}", needs_peer_id=True)
        assert (address.transport, address.peer_id) == (transport, identities[0].peer_id)
        assert parse_address(address.with_peer_id(identities[1].peer_id)).peer_id == identities[1].peer_id
    for text in ("", "0", "Qm", "QmZZ", "x" * 46):
        with pytest.raises(AddressError):
            parse_peer_id(text)
