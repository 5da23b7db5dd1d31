"""Garbage into the noticeboard of a real peer: its view, its memory and its loop stay as they are."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from dht.dial import connect_peer
from dht.host import start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PeerRecord, encode_record, peers_key
from tests.hostile.garbage import IS_LONG, Mutation, examples, junk, mutated, mutation_lists
from tests.hostile.world import rss

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]
RUN = "a" * 40
MIB = 2**20


class Board:
    """A peer with a noticeboard, and somebody hostile who speaks the DHT's protocol to it."""

    def __init__(self, identity: Identity, host: P2P, board: Noticeboard, hostile: P2P) -> None:
        self.identity, self.host, self.board, self.hostile = identity, host, board, hostile
        # The class's own get_stub is for those who hold a node.
        self.stub = ServicerBase.get_stub.__func__(DHTProtocol, hostile, PeerID.from_base58(identity.peer_id))  # type: ignore[attr-defined]

    def record(self, identity: Identity, **changes: Any) -> PeerRecord:
        fields: dict[str, Any] = {
            "run_id": RUN,
            "peer_id": identity.peer_id,
            "public_key": identity.public_key,
            "incarnation": self.identity.incarnation,
            "role": "stage",
            "stage": 0,
            "state": "online",
            "expires_at": self.board.clock.now() + 20.0,
        }
        return PeerRecord(**(fields | changes))

    async def store(self, entries: list[tuple[bytes, bytes, bytes, float]]) -> list[bool] | None:
        """(key, subkey, value, expiration) as anybody may send them; None if there is no answer."""
        request = dht_pb2.StoreRequest(
            keys=[entry[0] for entry in entries],
            subkeys=[entry[1] for entry in entries],
            values=[entry[2] for entry in entries],
            expiration_time=[entry[3] for entry in entries],
            in_cache=[False] * len(entries),
        )
        try:
            response = await self.stub.rpc_store(request, timeout=10)
        except Exception:  # hivemind raises many kinds
            return None
        return list(response.store_ok)

    async def ping(self) -> float:
        """Seconds until the board answers."""
        began = time.monotonic()
        await self.stub.rpc_ping(dht_pb2.PingRequest(validate=False), timeout=10)
        return time.monotonic() - began


@asynccontextmanager
async def board_under_attack(folder: Path) -> AsyncIterator[Board]:
    identity = Identity.load_or_create(folder / "peer.key")
    with identity.lock():
        host = await start_host(identity.path)
        hostile = await start_host(None)
        try:
            await connect_peer(hostile, identity.peer_id, await visible_addresses(host), 5)
            board = await Noticeboard.create(host, identity, run_id=RUN)
            try:
                setting = Board(identity, host, board, hostile)
                assert await board.publish(setting.record(identity))
                yield setting
                await board.refresh()
                assert list(board.view()) == [identity.peer_id]
            finally:
                await board.close()
        finally:
            await stop_host(hostile)
            await stop_host(host)


def run(coroutine: Coroutine[Any, Any, None], deadline_s: float = 60.0) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, deadline_s))


@pytest.fixture(autouse=True)
def short_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="sp-") as directory:  # short: it will hold sockets
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield


def test_garbled_forged_and_misplaced_records_never_stand_on_the_board(tmp_path: Path) -> None:
    drawn: list[tuple[list[Mutation], str, float, Any]] = []

    @examples(60, 3_000)
    @given(
        mutation_lists,
        st.sampled_from(["resign", "forge", "keep", "place", "bytes"]),
        st.sampled_from([20.0, 0.0, -100.0, 1e9, float("nan"), float("inf")]),
        junk,
    )
    def draw(changes: list[Mutation], how: str, life_s: float, value: Any) -> None:
        drawn.append((changes, how, life_s, value() if callable(value) else value))

    draw()
    thief = Identity.load_or_create(tmp_path / "thief.key")

    async def scenario() -> None:
        async with board_under_attack(tmp_path) as setting:
            key = DHTID.generate(source=peers_key(RUN)).to_bytes()
            before = rss()
            taken = 0
            for number in range(0, len(drawn), 10):
                entries = [
                    _entry(setting, thief, key, *arguments) for arguments in drawn[number : number + 10]
                ]
                taken += sum(await setting.store(entries) or [])
            assert taken == 0
            assert setting.board.validator.refused.total() >= len(drawn) // 2
            assert await setting.ping() < 5.0
            assert rss() - before < 64 * MIB

    run(scenario(), 300)


def _entry(
    setting: Board, thief: Identity, key: bytes, changes: list[Mutation], how: str, life_s: float, value: Any
) -> tuple[bytes, bytes, bytes, float]:
    """One entry of a STORE that must not be taken."""
    import msgpack

    from peers.frames import Frame, Kind

    honest = setting.record(setting.identity, incarnation=2**52)
    kind, payload, signature = msgpack.unpackb(encode_record(honest, setting.identity))
    subkey, expiry = honest.peer_id, honest.expires_at
    if how == "place":
        record = setting.record(thief)
        return (
            key,
            MSGPackSerializer.dumps(subkey),
            MSGPackSerializer.dumps(encode_record(record, thief)),
            expiry,
        )
    if how == "bytes":
        packed = msgpack.packb(value)[: 2 * MIB]
        return key, packed[:200_000], packed, life_s
    frame = mutated(Frame(Kind.PLAN, msgpack.unpackb(payload)), changes)
    changed = msgpack.packb(frame.header)
    if changed == payload:
        changed += b"\x00"
    if how in ("resign", "forge"):
        signature = thief.sign(b"record\0" + kind.encode() + b"\0" + changed)
    data = MSGPackSerializer.dumps(msgpack.packb([kind, changed, signature]))
    return key, MSGPackSerializer.dumps(subkey), data, setting.board.clock.now() + life_s


def test_replayed_records_do_not_bring_back_the_past(tmp_path: Path) -> None:
    """A signed record that was superseded, offered again by somebody who kept it."""
    from dht.records import place_of

    async def scenario() -> None:
        async with board_under_attack(tmp_path) as setting:
            now = setting.board.clock.now()  # the board's own record expires in 30 s
            old = setting.record(setting.identity, step=1, expires_at=now + 40.0)
            new = setting.record(setting.identity, step=2, expires_at=now + 50.0)
            place, subkey = place_of(old)
            key = DHTID.generate(source=place).to_bytes()
            for record, is_taken in ((old, True), (new, True), (old, False)):
                value = MSGPackSerializer.dumps(encode_record(record, setting.identity))
                answer = await setting.store(
                    [(key, MSGPackSerializer.dumps(subkey), value, record.expires_at)]
                )
                assert answer == [is_taken]
            assert setting.board.validator.refused["stale"] >= 1

    run(scenario())


def test_a_value_of_a_mebibyte_is_refused_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with board_under_attack(tmp_path) as setting:
            key = DHTID.generate(source=peers_key(RUN)).to_bytes()
            before = rss()
            for _ in range(20 if IS_LONG else 5):
                big = MSGPackSerializer.dumps(b"\x00" * MIB)
                answer = await setting.store(
                    [(key, MSGPackSerializer.dumps("x"), big, setting.board.clock.now() + 20)]
                )
                assert answer == [False]
                await setting.store([(key, b"\x91" * MIB, b"", setting.board.clock.now() + 20)])
            assert setting.board.validator.refused["too_large"] >= 5
            assert await setting.ping() < 5.0
            assert rss() - before < 64 * MIB

    run(scenario())


def test_a_request_for_a_hundred_thousand_keys_does_not_stop_the_loop(tmp_path: Path) -> None:
    """Each key would be answered with the whole board."""

    async def scenario() -> None:
        async with board_under_attack(tmp_path) as setting:
            key = DHTID.generate(source=peers_key(RUN)).to_bytes()
            before, peer = rss(), dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes())
            asked = asyncio.create_task(
                setting.stub.rpc_find(dht_pb2.FindRequest(keys=[key] * 100_000, peer=peer), timeout=20)
            )
            await asyncio.sleep(0.3)
            lag = time.monotonic()
            await asyncio.sleep(0)
            assert await setting.ping() < 5.0
            assert time.monotonic() - lag < 5.0
            with pytest.raises(Exception):  # noqa: B017 - hivemind raises many kinds
                await asked
            assert rss() - before < 64 * MIB
            answer = await setting.stub.rpc_find(dht_pb2.FindRequest(keys=[key], peer=peer), timeout=10)
            assert len(answer.results) == 1

    run(scenario())
