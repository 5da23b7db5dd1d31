"""Who made a prior: seals that hold, and seals that do not."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from dht.identity import Identity
from peers.sealed_prior import UntrustedPriorError, publisher_of, seal_prior
from swarm.anchor.prior_file import (
    ArraySpec,
    PriorFileError,
    PriorInfo,
    decode_prior,
    encode_prior,
    prior_bytes_limit,
)
from swarm.anchor.seal import content_hash

RUN = "a" * 40
SPECS = {"mean": ArraySpec((torch.float32,), (5,)), "basis": ArraySpec((torch.bfloat16,), (5, (1, 5)))}
INFO = PriorInfo(kind="boundary", part=1, version=0, step=20)


@pytest.fixture(scope="module")
def identities() -> Iterator[list[Identity]]:
    made = [Identity.load_or_create(None) for _ in range(2)]
    yield made
    for identity in made:
        identity.close()


def plain() -> bytes:
    return encode_prior(INFO, {"mean": torch.arange(5.0), "basis": torch.ones(5, 3, dtype=torch.bfloat16)})


def header_of(data: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack_from("<Q", data)
    return data[8 : 8 + length], data[8 + length :]


def with_header(data: bytes, header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + header_of(data)[1]


def test_sealed_prior_is_read_as_the_plain_one_and_names_its_maker(identities: list[Identity]) -> None:
    sealed = seal_prior(plain(), RUN, identities[0])
    assert publisher_of(sealed, RUN) == identities[0].peer_id
    info, arrays = decode_prior(sealed, SPECS, kind="boundary")
    before, plain_arrays = decode_prior(plain(), SPECS, kind="boundary")
    assert info == before
    assert all(torch.equal(arrays[name], plain_arrays[name]) for name in SPECS)
    assert all(torch.equal(array, arrays[name]) for name, array in load(sealed).items())
    assert content_hash(sealed) == content_hash(plain())
    assert len(sealed) <= prior_bytes_limit(SPECS)


def test_sealing_again_replaces_the_seal(identities: list[Identity]) -> None:
    twice = seal_prior(seal_prior(plain(), RUN, identities[0]), RUN, identities[1])
    assert publisher_of(twice, RUN) == identities[1].peer_id


def test_seal_of_another_run_or_none_is_refused(identities: list[Identity]) -> None:
    with pytest.raises(UntrustedPriorError, match="not sealed this for run"):
        publisher_of(seal_prior(plain(), "b" * 40, identities[0]), RUN)
    with pytest.raises(UntrustedPriorError, match="no seal"):
        publisher_of(plain(), RUN)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_breaks_the_seal(identities: list[Identity], place: int, change: int) -> None:
    sealed = bytearray(seal_prior(plain(), RUN, identities[0]))
    sealed[place % len(sealed)] ^= change
    with pytest.raises((UntrustedPriorError, PriorFileError)):
        publisher_of(bytes(sealed), RUN)


def test_header_that_two_readers_could_read_differently_is_refused(identities: list[Identity]) -> None:
    sealed = seal_prior(plain(), RUN, identities[0])
    header, _ = header_of(sealed)
    twice = b'{"mean":{"dtype":"F32","shape":[5],"data_offsets":[0,20]},' + header[1:]
    spaced = json.dumps(json.loads(header)).encode()
    for changed in (twice, spaced, header + b"        "):
        with pytest.raises(UntrustedPriorError, match="not written as"):
            publisher_of(with_header(sealed, changed), RUN)


def test_seal_under_another_peers_name_is_refused(identities: list[Identity]) -> None:
    sealed = seal_prior(plain(), RUN, identities[0])
    header, _ = header_of(sealed)
    changed = header.replace(identities[0].peer_id.encode(), identities[1].peer_id.encode())
    with pytest.raises(UntrustedPriorError, match="another peer's key"):
        publisher_of(with_header(sealed, changed), RUN)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 7, b"\xff" * 40, struct.pack("<Q", 2) + b"[]", b"no prior at all"]
)
def test_garbage_is_refused(data: bytes, identities: list[Identity]) -> None:
    with pytest.raises((UntrustedPriorError, PriorFileError)):
        publisher_of(data, RUN)
    with pytest.raises(PriorFileError):
        seal_prior(data, RUN, identities[0])


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((UntrustedPriorError, PriorFileError)):
        publisher_of(data, RUN)


def test_seal_in_another_spelling_is_refused(identities: list[Identity]) -> None:
    sealed = seal_prior(plain(), RUN, identities[0])
    (length,) = struct.unpack_from("<Q", sealed)
    header = json.loads(sealed[8 : 8 + length])
    header["__metadata__"]["seal"] = json.dumps(json.loads(header["__metadata__"]["seal"]), indent=1)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(UntrustedPriorError, match="not written as seals are"):
        publisher_of(struct.pack("<Q", len(text)) + text + sealed[8 + length :], RUN)
