"""Anchors that the owner names after the run was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from dht.grants import MAX_GRANT_BYTES, MAX_GRANTED, AnchorGrant, GrantError, decode_grant
from dht.identity import Identity
from dht.records import MAX_RECORD_BYTES, GrantRecord, RecordError, decode_record, encode_record, place_of
from dht.table import RecordTable
from peers.commands.grant import grant_anchors
from peers.commands.init import InitOptions
from peers.commands.init import run as run_init
from peers.config import UserError
from peers.grants import FILE, read_grant, write_grant
from swarm.activation.config import BasisConfig, DenseConfig
from swarm.manifest import AnchorSection, RunManifest, create_owner_key, run_id_of
from tests.unit.test_manifest import manifest

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def run_of(key: Ed25519PrivateKey) -> str:
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return run_id_of(raw.hex())


def peer(number: int) -> str:
    return "Qm" + "".join("123456789A"[int(digit)] for digit in f"{number:044d}")


def grant(number: int = 1, key: Ed25519PrivateKey = KEY, **fields: Any) -> AnchorGrant:
    return AnchorGrant(run_id=run_of(key), number=number, **fields).signed(key)


@given(
    st.integers(1, 2**53),
    st.lists(st.integers(0, 99), unique=True, max_size=40),
    st.integers(0, 40),
)
def test_what_the_owner_signed_is_read_back(number: int, ids: list[int], cut: int) -> None:
    peers, revoked = ids[:cut][:MAX_GRANTED], ids[cut:][:MAX_GRANTED]
    one = grant(number, peers=tuple(map(peer, peers)), revoked=tuple(map(peer, revoked)))
    assert decode_grant(one.encode()) == one


def test_largest_grant_fits_a_record(identity: Identity) -> None:
    one = grant(
        2**53,
        peers=tuple("Q" * 60 + peer(n)[-4:] for n in range(MAX_GRANTED)),
        revoked=tuple("R" * 60 + peer(n)[-4:] for n in range(MAX_GRANTED)),
    )
    assert len(one.encode()) <= MAX_GRANT_BYTES
    assert len(encode_record(record(identity, one), identity)) < MAX_RECORD_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"peers": [peer(8)]},
        {"revoked": [peer(1)]},
        {"run_id": run_of(OTHER)},
        {"owner_public_key": "1" * 64},
        {"signature": "0" * 128},
        {"signature": ""},
        {"more": 1},
    ],
)
def test_grant_that_was_changed_is_refused(change: dict[str, Any]) -> None:
    import json

    fields = {**json.loads(grant(peers=(peer(7),)).encode()), **change}
    with pytest.raises(GrantError):
        decode_grant(json.dumps(fields).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"[" * 5000, b" " * (MAX_GRANT_BYTES + 1)])
def test_garbage_is_no_grant(data: bytes) -> None:
    with pytest.raises(GrantError):
        decode_grant(data)


def test_only_the_owner_can_sign_for_a_run() -> None:
    with pytest.raises(GrantError, match="owner's of run"):
        AnchorGrant(run_id=run_of(KEY), number=1).signed(OTHER)


def test_order_is_the_manifests_then_the_grants_without_the_revoked() -> None:
    one = grant(peers=(peer(5), peer(2), peer(4)), revoked=(peer(1),))
    assert one.order((peer(1), peer(2), peer(3))) == (peer(2), peer(3), peer(5), peer(4))


@pytest.fixture(scope="module")
def identity() -> Iterator[Identity]:
    one = Identity.load_or_create(None)
    one.lock()
    yield one
    one.close()


def record(by: Identity, one: AnchorGrant, **changes: Any) -> GrantRecord:
    fields: dict[str, Any] = {
        "run_id": one.run_id,
        "peer_id": by.peer_id,
        "public_key": by.public_key,
        "incarnation": 3,
        "grant": one.encode(),
        "expires_at": 100.0,
    }
    return GrantRecord(**(fields | changes))


def test_record_counts_by_the_owners_signature_whoever_puts_it_up(identity: Identity) -> None:
    one = record(identity, grant(peers=(peer(1),)))
    found = decode_record(encode_record(one, identity))
    assert isinstance(found, GrantRecord) and found.content.peers == (peer(1),)
    for bad in (
        record(identity, grant(key=OTHER), run_id=run_of(KEY)),
        record(identity, grant(), grant=grant().encode().replace(b'"number":1', b'"number":2')),
    ):
        with pytest.raises(RecordError) as refused:
            decode_record(encode_record(bad, identity))
        assert refused.value.reason == "owner"


def test_later_grant_replaces_an_earlier_one_and_never_the_other_way(identity: Identity) -> None:
    table: RecordTable[GrantRecord] = RecordTable()
    first = record(identity, grant(1), incarnation=9, expires_at=140.0)
    second = record(identity, grant(2), expires_at=110.0)
    for one in (first, second, first):
        table.merge([(place_of(one)[1], one)], 100.0)
    (found,) = table.live(100.0).values()
    assert found.content.number == 2


# -- the owner's command ----------------------------------------------------------------------------------


def make_run(folder: Path, codec: Any = None) -> RunManifest:
    folder.mkdir()
    key = create_owner_key(folder / "owner.key")
    made = manifest(
        codec=codec or BasisConfig(mask_ratio=90), anchors=AnchorSection(peers=(peer(1), peer(2)))
    ).signed(key)
    made.save(folder / "manifest.yaml")
    return made


def test_grants_add_up_and_can_be_revoked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    folder = tmp_path / "run"
    assert grant_anchors(folder, [peer(3)], []) == (peer(1), peer(2), peer(3))
    assert grant_anchors(folder, [peer(4), peer(3)], [peer(1)]) == (peer(2), peer(3), peer(4))
    assert grant_anchors(folder, [peer(1)], [peer(3)]) == (peer(1), peer(2), peer(4))
    found = read_grant(folder, run.run_id)
    assert found is not None and found.number == 3
    assert found.revoked == (peer(3),), (
        "former anchors are remembered: priors of theirs may still be in force"
    )
    for number in range(100, 100 + MAX_GRANTED + 3):
        grant_anchors(folder, [peer(number)], [])
        grant_anchors(folder, [], [peer(number), *([peer(2)] if number == 100 else [])])
    found = read_grant(folder, run.run_id)
    assert found is not None and len(found.revoked) == MAX_GRANTED and peer(2) in found.revoked


@pytest.mark.parametrize(
    ("granted", "revoked", "said"),
    [
        (["nonsense"], [], "no peer id"),
        ([], [peer(9)], "nothing to revoke"),
        ([peer(5)], [peer(5)], "at once"),
        ([peer(number) for number in range(10, 10 + MAX_GRANTED + 1)], [], "at most"),
    ],
)
def test_grant_that_makes_no_sense_is_refused_with_the_cause(
    tmp_path: Path, granted: list[str], revoked: list[str], said: str
) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(UserError, match=said):
        grant_anchors(tmp_path / "run", granted, revoked)
    assert not (tmp_path / "run" / FILE).exists()


def test_who_has_no_owner_key_or_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.yaml"):
        grant_anchors(tmp_path, [peer(3)], [])
    make_run(tmp_path / "run")
    (tmp_path / "run" / "owner.key").unlink()
    with pytest.raises(UserError, match=r"owner\.key"):
        grant_anchors(tmp_path / "run", [peer(3)], [])
    create_owner_key(tmp_path / "run" / "owner.key")
    with pytest.raises(UserError, match="owner's of run"):
        grant_anchors(tmp_path / "run", [peer(3)], [])
    make_run(tmp_path / "plain", DenseConfig())
    with pytest.raises(UserError, match="no anchor is needed"):
        grant_anchors(tmp_path / "plain", [peer(3)], [])


def test_init_grants_without_touching_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    before = (tmp_path / "run" / "manifest.yaml").read_bytes()
    assert run_init(InitOptions(run_dir=tmp_path / "run", grant_anchor=(peer(3),))) == 0
    assert peer(3) in capsys.readouterr().out
    assert (tmp_path / "run" / "manifest.yaml").read_bytes() == before
    with pytest.raises(UserError, match="--stages is fixed"):
        run_init(InitOptions(run_dir=tmp_path / "run", grant_anchor=(peer(3),), stages=2))


def test_grant_of_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    write_grant(tmp_path, grant(key=OTHER))
    with pytest.raises(GrantError, match="not of run"):
        read_grant(tmp_path, run_of(KEY))
