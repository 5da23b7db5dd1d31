"""Identities: private from the first byte, one process at a time, strictly growing incarnations."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from dht.identity import Identity, IdentityError, IdentityInUse, peer_id_of, verify


def test_new_key_is_private_even_under_a_permissive_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        identity = Identity.load_or_create(tmp_path / "keys" / "peer.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE(identity.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(identity.path.parent.stat().st_mode) == 0o700
    assert [path.name for path in identity.path.parent.iterdir()] == ["peer.key"]


def test_key_readable_by_others_is_tightened(tmp_path: Path) -> None:
    path = Identity.load_or_create(tmp_path / "peer.key").path
    path.chmod(0o644)
    Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_peer_id_is_the_one_hivemind_derives_from_the_file(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "peer.key")
    assert identity.peer_id == PeerID.from_identity(identity.path.read_bytes()).to_base58()
    assert identity.peer_id == peer_id_of(identity.public_key)
    assert Identity.load_or_create(tmp_path / "peer.key").peer_id == identity.peer_id


def test_concurrent_creation_yields_one_identity(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(Identity.load_or_create(tmp_path / "peer.key").peer_id))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x00\x12\x03abc"])
def test_damaged_key_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=r"peer\.key is not a libp2p identity"):
        Identity.load_or_create(path)


def test_signature_holds_for_the_signed_bytes_only(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "a.key")
    other = Identity.load_or_create(tmp_path / "b.key")
    signature = identity.sign(b"words")
    assert verify(identity.public_key, b"words", signature)
    assert not verify(identity.public_key, b"word", signature)
    assert not verify(other.public_key, b"words", signature)
    assert not verify(b"no key", b"words", signature)
    assert not verify(identity.public_key, b"words", b"")


def test_incarnation_grows_at_every_start_and_survives_a_lost_or_damaged_counter(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    numbers = []
    for damage in (None, None, b"nonsense", None):
        identity = Identity.load_or_create(path)
        with identity.lock():
            numbers.append(identity.incarnation)
        if damage is not None:
            (tmp_path / "peer.key.incarnation").write_bytes(damage)
    assert numbers[:3] == sorted(set(numbers[:3]))
    assert numbers[3] >= numbers[0]  # from the clock: not lower than the first, for want of the counter


def test_incarnation_is_unknown_before_the_lock(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="lock the identity first"):
        _ = Identity.load_or_create(tmp_path / "peer.key").incarnation


def test_second_start_in_this_process_is_refused_until_release(tmp_path: Path) -> None:
    first = Identity.load_or_create(tmp_path / "peer.key")
    second = Identity.load_or_create(tmp_path / "peer.key")
    lock = first.lock()
    with pytest.raises(IdentityInUse, match=f"process {os.getpid()}"):
        second.lock()
    lock.release()
    second.lock().release()


def test_second_start_in_another_process_names_path_and_pid_and_a_killed_holder_does_not_block(
    tmp_path: Path,
) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path)
    code = (
        "import sys, time; from dht.identity import Identity\n"
        "identity = Identity.load_or_create(sys.argv[1]); lock = identity.lock()\n"
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(IdentityInUse) as caught:
            Identity.load_or_create(path).lock()
        assert str(path) in str(caught.value) and str(holder.pid) in str(caught.value)
    finally:
        holder.kill()
        holder.communicate()
    Identity.load_or_create(path).lock().release()


def test_ephemeral_identity_leaves_nothing() -> None:
    identity = Identity.load_or_create(None)
    with identity.lock():
        assert identity.incarnation > 0
    directory = identity.path.parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    identity.close()
    assert not directory.exists()
