"""A killed p2pd comes back under the same P2P object: handlers, records, links; nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2

from dht import revive
from dht.dial import connect_peer
from dht.host import HostDeath, HostError, host_died, start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PeerRecord
from dht.revive import revive_host, supervise_host
from tests.kit.processes import own_children

pytestmark = pytest.mark.e2e


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, 200))


@pytest.fixture(autouse=True)
def nothing_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # made before the folder for temporary files is another
    with tempfile.TemporaryDirectory(prefix="sp-") as directory:  # short: it will hold sockets
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield
        assert [p for p in own_children() if p.status() != psutil.STATUS_ZOMBIE] == []
        assert list(Path(directory).iterdir()) == []


async def until(condition: Callable[[], object], deadline_s: float = 45.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def kill(host: P2P) -> None:
    os.kill(host._child.pid, signal.SIGKILL)
    await host_died(host)


async def echo(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readexactly(4))
    writer.close()


async def ping(request: dht_pb2.PingRequest, context: Any) -> dht_pb2.PingResponse:
    if request.validate:  # this one never answers
        await asyncio.sleep(60)
    return dht_pb2.PingResponse(dht_time=42.0)


async def call(caller: P2P, host: P2P, **request: Any) -> float:
    answer = await caller.call_protobuf_handler(
        host.peer_id, "ping", dht_pb2.PingRequest(**request), dht_pb2.PingResponse
    )
    return float(answer.dht_time)


async def stream(caller: P2P, host: P2P) -> bytes:
    _, reader, writer = await caller.call_binary_stream_handler(host.peer_id, "echo")
    writer.write(b"abcd")
    data = await reader.read()
    writer.close()
    return data


def test_killed_daemon_comes_back_with_identity_port_and_handlers_and_no_call_hangs() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            hosts = [await start_host(None), await start_host(None)]
            for host in hosts:
                stack.push_async_callback(stop_host, host)
                await host.add_protobuf_handler("ping", ping, dht_pb2.PingRequest)
                await host.add_binary_stream_handler("echo", echo)
            victim, friend = hosts
            addresses, peer_id = await visible_addresses(victim), str(victim.peer_id)
            await connect_peer(friend, peer_id, addresses, 5)
            assert await call(friend, victim) == 42.0 and await stream(friend, victim) == b"abcd"

            for _ in range(2):
                pending = asyncio.create_task(call(victim, friend, validate=True))
                _, reader, _ = await victim.call_binary_stream_handler(friend.peer_id, "echo")
                await asyncio.sleep(0.1)
                dead = victim._client  # as a call or a traceback somewhere may
                await kill(victim)
                async with asyncio.timeout(1):
                    assert await reader.read() == b""
                revive.forget_daemon(victim)
                async with asyncio.timeout(1):  # neither what waits nor what comes now hangs
                    for waiting in (pending, call(victim, friend)):
                        with pytest.raises(P2PDaemonError, match="p2pd"):
                            await waiting
                    with pytest.raises(OSError):
                        await stream(victim, friend)
                began = time.monotonic()
                await revive_host(victim)
                assert time.monotonic() - began < 15
                del dead, pending, waiting  # the last references to the dead client: its end is its own alone
                gc.collect()
                await asyncio.sleep(0.1)
                assert await visible_addresses(victim) == addresses and str(victim.peer_id) == peer_id
                await connect_peer(friend, peer_id, addresses, 5)
                assert await call(friend, victim) == 42.0 and await stream(friend, victim) == b"abcd"
                assert await call(victim, friend) == 42.0 and await stream(victim, friend) == b"abcd"
                sockets = [path.name for path in victim.runtime.path.iterdir() if path.suffix == ".sock"]
                assert len(sockets) == 2, "one of the daemon, one of ours"

    run(scenario())


def test_supervised_daemon_is_revived_and_given_up_when_it_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(revive, "BACKOFF_S", (0.0,))
    monkeypatch.setattr(revive, "RESTARTS", 2)
    deaths: list[HostDeath] = []
    revivals: list[float] = []

    async def on_revived() -> None:
        revivals.append(time.monotonic())

    async def scenario() -> None:
        host = await start_host(None)
        try:
            task = asyncio.create_task(supervise_host(host, on_death=deaths.append, on_revived=on_revived))
            for number in (1, 2):
                os.kill(host._child.pid, signal.SIGKILL)
                await until(lambda n=number: len(revivals) == n)
            os.kill(host._child.pid, signal.SIGKILL)
            with pytest.raises(HostError, match="3 times within 5 minutes"):
                await asyncio.wait_for(task, 5)
            assert [death.returncode for death in deaths] == [-signal.SIGKILL] * 3
        finally:
            await stop_host(host)
        host = await start_host(None)
        task = asyncio.create_task(supervise_host(host, on_death=deaths.append, on_revived=on_revived))
        await asyncio.sleep(0)
        await stop_host(host)  # an orderly end is no death
        await asyncio.wait_for(task, 5)
        assert len(deaths) == 3

    run(scenario())


def test_daemon_whose_port_was_taken_meanwhile_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revive, "BACKOFF_S", (0.2,))

    async def scenario() -> None:
        host = await start_host(None)
        try:
            port = host.listening[0].port
            assert port
            await kill(host)
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                thief.bind(("127.0.0.1", port))
                thief.listen()
                with pytest.raises(HostError, match=f"port {port} is already taken by process {os.getpid()}"):
                    await revive_host(host)
            await revive_host(host)
            assert host.listening[0].port == port
            with pytest.raises(ValueError, match="that has ended"):
                await revive_host(host)
            await kill(host)
            task = asyncio.create_task(revive_host(host))  # cancelled half-way, it leaves nothing
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            await stop_host(host)

    run(scenario())


def test_records_of_a_revived_seed_and_of_a_revived_peer_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"REFRESH_S": 0.2, "PUBLISH_S": 0.5, "RECORD_LIFE_S": 5.0, "HEAL_S": 1.0}.items():
        monkeypatch.setattr(f"dht.noticeboard.{name}", seconds)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
            boards: list[Noticeboard] = []
            hosts: list[P2P] = []
            initial: list[str] = []
            for _ in range(3):
                identity = Identity.load_or_create(None)
                stack.callback(identity.close)
                stack.enter_context(identity.lock())
                host = await start_host(identity.path)
                stack.push_async_callback(stop_host, host)
                for address in initial:
                    await connect_peer(host, address.rpartition("/")[2], [address], 5)
                board = await Noticeboard.create(host, identity, initial, "run-1")
                stack.push_async_callback(board.close)
                addresses = await visible_addresses(host)
                initial = initial or [addresses[0]]
                record = PeerRecord(
                    run_id="run-1",
                    peer_id=identity.peer_id,
                    public_key=identity.public_key,
                    incarnation=identity.incarnation,
                    role="stage",
                    stage=0,
                    state="online",
                    addresses=addresses,
                )
                assert await board.publish(record)
                task = board.start(group)
                stack.callback(task.cancel)
                hosts.append(host)
                boards.append(board)
            everyone = {str(host.peer_id) for host in hosts}
            await until(lambda: all(set(board.view()) == everyone for board in boards))
            for number in (0, 1):  # the seed, then a peer
                await kill(hosts[number])
                await revive_host(hosts[number])
                await boards[number].reconnect()
                await asyncio.sleep(5.5)  # longer than a record lives
                await until(lambda: all(set(board.view()) == everyone for board in boards))
            # With the seed gone for good, a daemon that knows nobody is helped by what its board remembers.
            await kill(hosts[0])
            await kill(hosts[1])
            await revive_host(hosts[1])
            await boards[1].reconnect()
            rest = everyone - {str(hosts[0].peer_id)}
            await until(lambda: all(set(board.view()) == rest for board in boards[1:]))
            await asyncio.sleep(3.5)
            await until(lambda: all(set(board.view()) == rest for board in boards[1:]))

    run(scenario())
