"""Peers in one process, each on a real p2pd, dialling and seeing each other's records."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import uvloop
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P

from dht.clock import ClockSkewError
from dht.dial import DialError, connect_peer, describe_results, dial_all
from dht.host import host_died, start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard, NoticeboardError
from dht.records import ManifestPointer, PeerRecord, encode_record, hivemind_peer_id, peers_key
from tests.kit.processes import own_children

pytestmark = pytest.mark.e2e


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, 100))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    left = [p for p in own_children() if p.status() != psutil.STATUS_ZOMBIE]
    assert left == []


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"REFRESH_S": 0.2, "PUBLISH_S": 0.7, "RECORD_LIFE_S": 2.0, "HEAL_S": 1.0}.items():
        monkeypatch.setattr(f"dht.noticeboard.{name}", seconds)


@dataclass
class Peer:
    """A host, its board and its identity."""

    identity: Identity
    host: P2P
    address: str
    board: Noticeboard = field(repr=False)

    def record(self, **changes: Any) -> PeerRecord:
        fields: dict[str, Any] = {
            "run_id": "run-1",
            "peer_id": self.identity.peer_id,
            "public_key": self.identity.public_key,
            "incarnation": self.identity.incarnation,
            "role": "stage",
            "stage": 0,
            "state": "online",
            "addresses": (self.address,),
        }
        return PeerRecord(**(fields | changes))


def fresh_peer_id() -> str:
    identity = Identity.load_or_create(None)
    identity.close()
    return identity.peer_id


class Swarm:
    """Starts peers and closes what it started."""

    def __init__(self, stack: AsyncExitStack, group: asyncio.TaskGroup) -> None:
        self.stack = stack
        self.group = group

    async def host(self) -> tuple[Identity, P2P, str]:
        identity = Identity.load_or_create(None)
        self.stack.callback(identity.close)
        self.stack.enter_context(identity.lock())
        host = await start_host(identity.path)
        self.stack.push_async_callback(stop_host, host)
        return identity, host, (await visible_addresses(host))[0]

    async def peer(self, *initial: str, run_id: str | None = "run-1", client_mode: bool = False) -> Peer:
        identity, host, address = await self.host()
        results = await dial_all(host, initial, 5)
        good = [result.address for result in results if result.ok]
        assert bool(good) == bool(initial), describe_results(results)
        board = await Noticeboard.create(host, identity, good, run_id, client_mode)
        self.stack.push_async_callback(board.close)
        task = board.start(self.group)
        self.stack.callback(task.cancel)
        return Peer(identity, host, address, board)


@asynccontextmanager
async def swarm() -> AsyncIterator[Swarm]:
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        yield Swarm(stack, group)


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_peers_that_dialled_only_the_seed_see_and_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.noticeboard.RECORD_LIFE_S", 30.0)

    async def scenario() -> None:
        async with swarm() as made:
            seed = await made.peer()
            peers = [seed, await made.peer(seed.address), await made.peer(seed.address, client_mode=True)]
            for peer in peers:
                assert await peer.board.publish(peer.record())
            everyone = {peer.identity.peer_id for peer in peers}
            await until(lambda: all(set(peer.board.view()) == everyone for peer in peers))

            async def echo(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(await reader.readexactly(4) + str(info.peer_id).encode())
                writer.close()

            await peers[1].host.add_binary_stream_handler("echo", echo)
            record = peers[2].board.view()[peers[1].identity.peer_id]
            async with asyncio.timeout(5):  # by peer id alone
                _, reader, writer = await peers[2].host.call_binary_stream_handler(
                    hivemind_peer_id(record), "echo"
                )
                writer.write(b"ping")
                assert await reader.read() == b"ping" + peers[2].identity.peer_id.encode()
                writer.close()
            await connect_peer(peers[2].host, record.peer_id, record.addresses, 5)

            seen = peers[2].board.view_version
            assert await peers[1].board.publish(peers[1].record(step=5))
            assert await peers[2].board.wait_changed(seen, 5)
            assert peers[2].board.view()[peers[1].identity.peer_id].step == 5
            seen = peers[2].board.view_version
            assert not await peers[2].board.wait_changed(seen, 1.5)  # re-published meanwhile, but the same

    run(scenario())


def test_killed_peer_expires_and_its_next_start_is_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.noticeboard.RECORD_LIFE_S", 6.0)

    async def scenario() -> None:
        async with swarm() as made:
            seed = await made.peer()
            identity = Identity.load_or_create(None)
            made.stack.callback(identity.close)
            steps = []
            for _ in range(2):
                with identity.lock():
                    host = await start_host(identity.path)
                    await dial_all(host, [seed.address], 5)
                    board = await Noticeboard.create(host, identity, [seed.address], "run-1")
                    assert identity.peer_id not in board.view()  # what an earlier start left is not shown
                    task = board.start(made.group)
                    peer = Peer(identity, host, (await visible_addresses(host))[0], board)
                    assert await board.publish(peer.record(step=identity.incarnation))
                    await until(
                        lambda: (
                            getattr(seed.board.view().get(identity.peer_id), "step", 0)
                            == identity.incarnation
                        )
                    )
                    steps.append(identity.incarnation)
                    if len(steps) == 1:
                        await asyncio.sleep(7)  # longer than a record lives: kept up by re-publishing
                    assert identity.peer_id in seed.board.view()
                    os.kill(host._child.pid, signal.SIGKILL)
                    killed = time.monotonic()
                    await host_died(host)
                    assert not await board.publish(peer.record(), deadline_s=0.5)  # fails, does not hang
                    task.cancel()
                    await board.close()
                    await stop_host(host)
                    assert time.monotonic() - killed < 10
            await until(lambda: identity.peer_id not in seed.board.view(), 20)
            assert steps[1] > steps[0]

    run(scenario())


def test_restarted_seed_is_found_again_by_the_peers_it_left() -> None:
    async def scenario() -> None:
        async with swarm() as made:
            seed = await made.peer()
            peer = await made.peer(seed.address)
            assert await peer.board.publish(peer.record())
            os.kill(seed.host._child.pid, signal.SIGKILL)
            await host_died(seed.host)
            await seed.board.close()
            await asyncio.sleep(1.5)  # the peer notices, and its daemon backs off
            host = await start_host(seed.identity.path, [seed.address.split("/p2p/")[0]])
            made.stack.push_async_callback(stop_host, host)
            board = await Noticeboard.create(host, seed.identity, run_id="run-1")  # knows nobody
            made.stack.push_async_callback(board.close)
            task = board.start(made.group)
            made.stack.callback(task.cancel)
            await until(lambda: peer.identity.peer_id in board.view(), 20)

    run(scenario())


def test_one_good_initial_peer_suffices_and_every_bad_one_is_named() -> None:
    async def scenario() -> None:
        async with swarm() as made:
            seed = await made.peer()
            stranger, _, _ = await made.host()
            silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
            silent_port = silent.sockets[0].getsockname()[1]
            prefix, peer_id = seed.address.rsplit("/p2p/", 1)
            port = prefix.rsplit("/", 1)[1]
            wrong_id = f"{prefix}/p2p/{stranger.peer_id}"
            cases = {
                seed.address: None,
                f"/dns4/localhost/tcp/{port}/p2p/{peer_id}": None,
                "seed.example.org:4001": "malformed",
                prefix: "malformed",
                f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}": "refused",
                f"/dns4/no-such-host.invalid/tcp/1/p2p/{peer_id}": "unresolvable",
                f"/ip4/127.0.0.1/tcp/{silent_port}/p2p/{fresh_peer_id()}": "timeout",
                wrong_id: "wrong_peer_id",
            }
            _, host, own = await made.host()
            started = time.monotonic()
            results = await dial_all(host, [*cases, own], 10.0)
            assert time.monotonic() - started < 30
            assert [result.cause for result in results] == [*cases.values(), "self"], describe_results(
                results
            )
            (wrong,) = [result for result in results if result.cause == "wrong_peer_id"]
            assert (wrong.expected_peer_id, wrong.actual_peer_id) == (stranger.peer_id, peer_id)
            assert wrong.corrected_address == seed.address
            assert stranger.peer_id in str(wrong) and seed.address in str(wrong)
            again = await dial_all(host, [wrong_id], 2.0)  # at once: libp2p is in its back-off
            assert again[0].cause == "backoff"
            silent.close()
            with pytest.raises(DialError, match="nobody we are connected to") as caught:
                await connect_peer(host, fresh_peer_id(), [], 5)
            assert caught.value.cause == "unknown_address"
            with pytest.raises(DialError) as caught:
                await connect_peer(host, fresh_peer_id(), ["/ip4/127.0.0.1/tcp/1", "rubbish"], 5)
            assert caught.value.cause == "refused"

    run(scenario())


def test_stranger_cannot_put_up_or_block_another_peers_record() -> None:
    async def scenario() -> None:
        async with swarm() as made:
            seed = await made.peer()
            victim = await made.peer(seed.address)
            hostile, host, _ = await made.host()
            await dial_all(host, [seed.address], 5)
            node = await DHTNode.create(
                p2p=host, initial_peers=[seed.address], ensure_bootstrap_success=False
            )
            forger = Peer(hostile, host, "/ip4/127.0.0.1/tcp/1", victim.board)
            key, expiry = peers_key("run-1"), victim.board.clock.now() + 20
            own = encode_record(forger.record(expires_at=expiry), hostile)
            far = encode_record(forger.record(expires_at=expiry + 1e6), hostile)
            attempts: list[tuple[str | None, Any, float]] = [
                (victim.identity.peer_id, own, expiry),
                (victim.identity.peer_id, b"rubbish", expiry),
                (victim.identity.peer_id, {"a": 1}, expiry),
                (hostile.peer_id, far, expiry + 1e6),
                (hostile.peer_id, own, expiry + 5),
                (None, own, expiry),
                (hostile.peer_id, b"x" * 50_000, expiry),
            ]
            for subkey, value, expires_at in attempts:
                assert not await node.store(key, value, expires_at, subkey=subkey, exclude_self=True)
            refused = seed.board.validator.refused
            for reason in ("place", "malformed", "expiry", "no_subkey", "too_large"):
                assert refused[reason] >= 1, (reason, refused)
            assert await victim.board.publish(victim.record())
            await until(lambda: victim.identity.peer_id in seed.board.view())
            assert hostile.peer_id not in seed.board.view()
            await node.shutdown()

    run(scenario())


def test_newcomer_finds_runs_by_their_manifests_then_watches_one() -> None:
    async def scenario() -> None:
        async with swarm() as made:
            seed = await made.peer()
            record = seed.record(role="seed", stage=None)
            pointer = ManifestPointer(
                **{
                    name: getattr(record, name) for name in ("run_id", "peer_id", "public_key", "incarnation")
                },
                manifest_sha256="ab" * 32,
                nbytes=1000,
                name="demo",
            )
            assert await seed.board.publish(record) and await seed.board.publish(pointer)
            newcomer = await made.peer(seed.address, run_id=None)
            (found,) = newcomer.board.manifests()  # read while joining
            assert (found.run_id, found.peer_id, found.name) == ("run-1", seed.identity.peer_id, "demo")
            assert newcomer.board.view() == {}
            newcomer.board.watch_run(found.run_id)
            await until(lambda: seed.identity.peer_id in newcomer.board.view())
            seed.board.withdraw(pointer)
            await until(lambda: newcomer.board.manifests() == [], 6)

    run(scenario())


def test_newer_start_of_a_copied_key_is_reported_to_the_older() -> None:
    async def scenario() -> None:
        async with swarm() as made:
            seed = await made.peer()
            first = await made.peer(seed.address)
            assert await first.board.publish(first.record())
            copied = first.record(
                incarnation=first.identity.incarnation + 1, expires_at=first.board.clock.now() + 40
            )
            data = encode_record(copied, first.identity)
            assert first.board.rival_incarnation is None
            assert await seed.board._live_node().store(
                peers_key("run-1"), data, copied.expires_at, subkey=copied.peer_id
            )
            await until(lambda: first.board.rival_incarnation == copied.incarnation, 30)
            assert first.identity.peer_id not in first.board.view()
            seen = seed.board.view
            await until(
                lambda: getattr(seen().get(copied.peer_id), "incarnation", 0) == copied.incarnation, 30
            )

    run(scenario())


def test_initial_peer_without_noticeboard_is_an_error() -> None:
    async def scenario() -> None:
        async with swarm() as made:
            _, _, address = await made.host()
            identity, host, _ = await made.host()
            assert (await dial_all(host, [address], 5))[0].ok
            with pytest.raises(NoticeboardError, match="no initial peer answers"):
                await Noticeboard.create(host, identity, [address], "run-1")
            other, _, _ = await made.host()
            with pytest.raises(ValueError, match="but the identity is"):
                await Noticeboard.create(host, other)

    run(scenario())


SKEWED_SEED = """
import asyncio, sys, time
from dht.clock import SwarmClock
from dht.host import start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from tests.kit.processes import own_children
async def main():
    identity = Identity.load_or_create(None)
    identity.lock()
    host = await start_host(identity.path)
    clock = SwarmClock(wall=lambda: time.time() + float(sys.argv[1]))
    board = await Noticeboard.create(host, identity, clock=clock)
    print((await visible_addresses(host))[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await board.close()
    await stop_host(host)
    identity.close()
asyncio.run(main())
"""


def test_clock_skew_is_measured_adopted_and_beyond_the_limit_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = subprocess.Popen(
        [sys.executable, "-c", SKEWED_SEED, "40"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert seed.stdout is not None
        address = seed.stdout.readline().strip()

        async def scenario() -> None:
            async with swarm() as made:
                first = await made.peer(address)
                assert first.board.clock.offset_s == pytest.approx(40, abs=1)
                assert await first.board.publish(first.record())
                second = await made.peer(address)
                await until(lambda: first.identity.peer_id in second.board.view())
                monkeypatch.setattr("dht.clock.MAX_CLOCK_OFFSET_S", 30.0)
                identity, host, _ = await made.host()
                await dial_all(host, [address], 5)
                with pytest.raises(ClockSkewError, match=r"clock is (39|40)\.\d s behind the swarm's"):
                    await Noticeboard.create(host, identity, [address], "run-1")

        run(scenario())
    finally:
        seed.communicate()
