"""Garbage into everything that reads a remote peer's bytes: only the documented refusal comes out."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from dht.grants import AnchorGrant
from dht.identity import Identity
from dht.records import (
    GrantRecord,
    ManifestPointer,
    PeerRecord,
    PriorRecord,
    RecordError,
    decode_record,
    encode_record,
)
from peers import round_messages
from peers.frames import LONG_HEADERS, Frame, FrameError, Kind, decode_header, unpack_tensors
from peers.limits import LIMITS
from peers.link import read_frame
from peers.links import parse_hello
from peers.payloads import BatchFormat, unpack_forward
from peers.round_messages import Arrival, Commit, Group, parse_arrival, parse_commit, parse_group
from peers.stage import parse_key
from peers.start import Start, parse_start
from swarm.activation.config import DenseConfig
from swarm.activation.registry import build_codec
from swarm.manifest import run_id_of
from swarm.plan import MicrobatchKey, Plan, Slot
from tests.hostile.garbage import (
    BOMBS,
    GENERIC,
    HUGE,
    Mutation,
    Spoiler,
    examples,
    generic,
    junk,
    mutated,
    mutation_lists,
    spoilers,
    wire_of,
)

# Without this pytest and hypothesis together keep something of every example: gigabytes in the long mode.
pytestmark = pytest.mark.filterwarnings("ignore")
OWNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OWNER_PUBLIC = OWNER.public_key().public_bytes_raw()
GRANT = AnchorGrant(run_id=run_id_of(OWNER_PUBLIC.hex()), number=2, peers=(f"Qm{'2' * 44}",)).signed(OWNER)
PEERS = tuple(f"Qm{number:044d}" for number in range(4))
PLAN = Plan(
    step=3,
    attempt=0,
    group="c" * 64,
    rows_per_microbatch=2,
    slots=(Slot(number=0, samples=(1, 2, 3, 4)), Slot(number=1, samples=(5, 6))),
    prior_versions=(0, 0),
    prior_hashes=("", ""),
)
KEY = MicrobatchKey(step=3, plan=PLAN.digest(), slot=0, microbatch=1)
FORM = BatchFormat(sequence_length=16, vocabulary_size=64)
CODEC = build_codec(
    DenseConfig(), hidden_size=8, boundary=0, run_seed=1, prior=None, device="cpu", dtype=torch.float32
)
HEADERS: dict[Kind, dict[str, Any]] = {
    Kind.HELLO: {
        "run": "a" * 40,
        "stage": 1,
        "incarnation": 7,
        "protocol": 1,
        "link": "x",
        "index": 0,
        "total": 3,
    },
    Kind.FORWARD: {"key": KEY.pack(), "replay": False},
    Kind.GRADIENT: {"key": KEY.pack(), "loss_sum": 3.5, "loss_tokens": 30},
    Kind.ARRIVE: Arrival(3, PLAN.digest(), ((0, 0), (1, 0)), 60).header(),
    Kind.GROUP: Group("g" * 64, 3, 1, PEERS[0], PEERS[:2], (30, 30), ("h" * 64,) * 2, PLAN.digest()).header(),
    Kind.COMMIT: Commit("g" * 64, 3, 1, "d" * 64, PEERS[0], PEERS[:2], PLAN.to_bytes(), PEERS[:2]).header(),
    Kind.START: Start(0, ((PEERS[0],), (PEERS[1],), PEERS[2:]), PLAN.to_bytes(), PEERS[:2]).header(),
}

PARSERS: dict[Kind, Callable[[Frame], object]] = {
    Kind.HELLO: parse_hello,
    Kind.FORWARD: parse_key,
    Kind.GRADIENT: parse_key,
    Kind.ARRIVE: lambda frame: parse_arrival(frame.header),
    Kind.GROUP: lambda frame: parse_group(frame.header, PEERS[0]),
    Kind.COMMIT: lambda frame: parse_commit(frame.header),
    Kind.START: lambda frame: parse_start(frame.header),
}
# Parsers of messages that are not listed above get the generic header.
OTHERS = [
    parser
    for name, parser in vars(round_messages).items()
    if name.startswith("parse_") and name not in ("parse_arrival", "parse_group", "parse_commit")
]


def as_received(frame: Frame) -> Frame:
    """A frame as the reader hands it on."""
    kind, header = decode_header(wire_of(frame)[8 : 8 + len(frame.encode_head()) - 8])
    return Frame(kind, header, frame.payload)


@pytest.mark.parametrize("kind", PARSERS)
def test_unharmed_headers_are_understood(kind: Kind) -> None:
    """What is mutated below is valid to begin with."""
    PARSERS[kind](as_received(Frame(kind, HEADERS[kind])))


@examples(350, 12_000)
@given(st.sampled_from(list(PARSERS)), mutation_lists)
def test_a_mutated_header_of_any_message_is_read_or_refused(kind: Kind, changes: list[Mutation]) -> None:
    try:
        frame = as_received(mutated(Frame(kind, HEADERS[kind]), changes))
        PARSERS[frame.kind](frame) if frame.kind in PARSERS else None
    except FrameError as error:
        assert len(error.reason) <= 20 and len(str(error)) < 1000


@examples(100, 6_000)
@given(st.integers(0, 100), mutation_lists)
def test_messages_without_a_template_are_read_or_refused(number: int, changes: list[Mutation]) -> None:
    if not OTHERS:
        return
    parser = OTHERS[number % len(OTHERS)]
    try:
        frame = as_received(mutated(generic(list(Kind)[number % len(Kind)]), changes))
        try:
            parser(frame.header)
        except TypeError as error:
            if "positional argument" not in str(error):
                raise
            parser(frame.header, PEERS[0])
    except FrameError:
        pass


@examples(250, 24_000)
@given(st.sampled_from(list(Kind)), spoilers)
def test_spoiled_bytes_end_in_a_refusal_or_the_end_of_the_stream(kind: Kind, spoiler: Spoiler) -> None:
    wire = spoiler.apply(wire_of(Frame(kind, HEADERS.get(kind, GENERIC), (memoryview(bytearray(64)),))))

    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(wire)
        reader.feed_eof()
        try:
            while True:
                await read_frame(reader, LIMITS.control_payload_bytes)
        except (FrameError, asyncio.IncompleteReadError):
            pass

    asyncio.run(scenario())


@pytest.mark.parametrize("bomb", range(len(BOMBS)))
def test_a_msgpack_bomb_costs_neither_time_nor_memory(bomb: int) -> None:
    started = time.process_time()
    try:
        kind, header = decode_header(BOMBS[bomb])
        if kind is Kind.ARRIVE:
            parse_arrival(header)
    except FrameError:
        pass
    assert time.process_time() - started < 2.0


@examples(150, 6_000)
@given(mutation_lists, st.binary(max_size=200))
def test_a_garbled_plan_is_no_plan(changes: list[Mutation], noise: bytes) -> None:
    fields = msgpack.unpackb(PLAN.to_bytes())
    frame = Frame(Kind.PLAN, {str(number): field for number, field in enumerate(fields)})
    for change in changes:
        change.apply(frame)
    packed = msgpack.packb([frame.header.get(str(number)) for number in range(len(fields))])
    for data in (packed, noise, PLAN.to_bytes()[: len(noise)], PLAN.to_bytes() + noise[:1]):
        try:
            Plan.from_bytes(data)
        except ValueError as error:
            assert len(str(error)) < 2000


@pytest.mark.parametrize("field", range(8))
@pytest.mark.parametrize("huge", range(len(HUGE)))
def test_a_huge_plan_is_refused_at_once(field: int, huge: int) -> None:
    fields = msgpack.unpackb(PLAN.to_bytes())
    fields[field] = HUGE[huge]()
    started = time.process_time()
    try:
        Plan.from_bytes(msgpack.packb(fields))
    except ValueError as error:
        assert len(str(error)) < 2000
    assert time.process_time() - started < 2.0


@examples(150, 16_000)
@given(st.integers(-64, 64), st.binary(max_size=64), st.integers(0, 4000))
def test_a_forward_of_other_bytes_is_refused(extra: int, noise: bytes, place: int) -> None:
    size = FORM.nbytes(2) + sum(spec.nbytes for spec in CODEC.layout(_codec_key()).values())
    data = bytearray(max(0, size + extra))
    data[place : place + len(noise)] = noise[: max(0, len(data) - place)]
    try:
        work, payload = unpack_forward(memoryview(data), KEY, PLAN, FORM, CODEC)
    except FrameError:
        return
    assert extra == 0 and work.batch.rows == 2 and payload


def _codec_key() -> Any:
    from swarm.activation.base import CodecKey

    return CodecKey(3, torch.tensor([3, 4]), torch.zeros(2, 16, dtype=torch.bool))


@pytest.mark.parametrize(
    "shape",
    [(2**40,), (2**31, 2**31), (2**62, 4), (0, 2**40), ()],
    ids=["2^40", "2^62", "2^64", "0", "scalar"],
)
def test_a_layout_of_impossible_size_takes_no_memory(shape: tuple[int, ...]) -> None:
    try:
        unpack_tensors(memoryview(bytearray(16)), [(torch.float32, shape)])
    except FrameError as error:
        assert error.reason == "size"


# -- records -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / f"{number}.key") for number in range(2)]


def records_of(identity: Identity, now: float = 0.0) -> list[Any]:
    common = {
        "run_id": "a" * 40,
        "peer_id": identity.peer_id,
        "public_key": identity.public_key,
        "incarnation": 5,
        "expires_at": now + 20.0,
    }
    return [
        PeerRecord(
            **common,
            role="stage",
            stage=1,
            state="online",
            step=7,
            addresses=("/ip4/1.2.3.4/tcp/5",),
            versions=(0, 5),
            priors=("0" * 16,),
        ),
        ManifestPointer(**common, manifest_sha256="0" * 64, nbytes=100, name="a run"),
        PriorRecord(**common, kind="corrector", part=1, step=20, sha256="0" * 64, nbytes=100),
        GrantRecord(**{**common, "run_id": GRANT.run_id}, grant=GRANT.encode()),
    ]


@examples(250, 8_000)
@given(
    st.integers(0, 3),
    mutation_lists,
    st.sampled_from(["resign", "keep", "other", "swap"]),
    st.binary(max_size=8),
)
def test_a_record_that_was_touched_is_refused_and_nothing_else(
    identities: list[Identity], which: int, changes: list[Mutation], signing: str, noise: bytes
) -> None:
    owner, thief = identities
    record = records_of(owner)[which]
    kind, payload, signature = msgpack.unpackb(encode_record(record, owner))
    frame = Frame(Kind.PLAN, msgpack.unpackb(payload, use_list=False))
    for change in changes:
        change.apply(frame)
    changed = msgpack.packb(frame.header)
    if signing != "keep":  # a forger signs with its own key; the owner may sign nonsense itself
        if signing == "swap":
            kind = {"peer": "manifest", "manifest": "prior", "prior": "grant", "grant": "peer"}[kind]
        by = thief if signing == "other" else owner
        signature = by.sign(b"record\0" + kind.encode() + b"\0" + changed)
    try:
        found = decode_record(msgpack.packb([kind, changed, signature]))
    except RecordError as error:
        assert len(error.reason) < 20 and len(str(error)) < 600
    else:
        assert found.peer_id == owner.peer_id and (signing == "resign" or changed == payload)
    for data in (noise, msgpack.packb([kind, changed, signature])[: len(noise) * 8] + noise):
        with pytest.raises(RecordError):
            decode_record(data)


@examples(80, 8_000)
@given(st.one_of(junk, st.tuples(junk, junk, junk)))
def test_any_value_in_place_of_a_record_is_refused(value: Any) -> None:
    made = value() if callable(value) else value
    if isinstance(made, tuple):
        made = [item() if callable(item) else item for item in made]
    with pytest.raises(RecordError):
        decode_record(msgpack.packb(made))


def test_a_frame_that_trickles_in_ends_at_its_deadline() -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        wire = wire_of(Frame(Kind.FORWARD, HEADERS[Kind.FORWARD], (memoryview(bytearray(1000)),)))
        reader.feed_data(wire[:200])
        limits = dataclasses.replace(LIMITS, frame_s=0.2, frame_floor_bytes_per_s=1e6)
        trickle = asyncio.create_task(_trickle(reader))
        with pytest.raises(FrameError) as caught:
            await asyncio.wait_for(read_frame(reader, 2000, limits), 10)
        assert caught.value.reason == "slow"
        trickle.cancel()

    asyncio.run(scenario())


async def _trickle(reader: asyncio.StreamReader) -> None:
    while True:
        reader.feed_data(b"\x00")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", list(Kind))
def test_only_kinds_that_need_it_have_long_headers(kind: Kind) -> None:
    """What waits in a queue is counted by its payload, and a parsed header takes up to 90 times its bytes."""
    header = Frame(kind, {"more": "x" * LIMITS.short_header_bytes}).encode_head()[8:]
    if kind in LONG_HEADERS:
        assert decode_header(header)[0] is kind
    else:
        with pytest.raises(FrameError, match="oversize"):
            decode_header(header)
    late = msgpack.packb({"more": "x" * LIMITS.short_header_bytes, "kind": kind.value})
    with pytest.raises(FrameError, match="oversize"):
        decode_header(late)  # its kind would be known only after all of it was read
