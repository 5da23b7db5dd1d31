"""Real p2pd processes: ports, death, clean-up."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from dht.addresses import AddressError
from dht.host import (
    HostError,
    PortTaken,
    host_died,
    start_host,
    stop_host,
    sweep_runtime_directories,
    visible_addresses,
)
from dht.identity import Identity
from tests.kit.processes import own_children

pytestmark = pytest.mark.e2e


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, 50))


def is_running(pid: int) -> bool:
    """False also for a zombie: in a container process 1 may not reap orphans."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def own_daemons() -> list[int]:
    return [p.pid for p in own_children() if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def nothing_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # made before the folder for temporary files is another
    with tempfile.TemporaryDirectory(prefix="sp-") as directory:  # short: it will hold sockets
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield
        assert own_daemons() == []
        assert list(Path(directory).iterdir()) == []


def test_stopped_host_leaves_no_process_and_no_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        identity = Identity.load_or_create(tmp_path / "peer.key")
        host = await start_host(identity.path)
        pid, runtime = host._child.pid, host.runtime.path
        assert str(host.peer_id) == identity.peer_id
        assert os.getsid(pid) != os.getsid(0)  # out of reach of the terminal's Ctrl+C
        addresses = await visible_addresses(host)
        assert addresses and all(address.endswith(f"/p2p/{identity.peer_id}") for address in addresses)
        assert any(path.suffix == ".sock" for path in runtime.iterdir())
        death = asyncio.create_task(host_died(host))
        await stop_host(host)
        await stop_host(host)
        assert (await death).returncode in (0, -signal.SIGTERM)
        assert not psutil.pid_exists(pid) and not runtime.exists()

    run(scenario())


def test_taken_port_is_refused_with_port_and_holder() -> None:
    async def scenario() -> None:
        first = await start_host(None)
        port = int((await visible_addresses(first))[0].split("/")[4])
        try:  # libp2p alone would share the port silently
            with pytest.raises(PortTaken, match=f"port {port} .* process {first._child.pid}"):
                await start_host(None, [f"/ip4/127.0.0.1/tcp/{port}"])
            with pytest.raises(PortTaken, match=f"port {port} "):
                await start_host(None, [f"/ip4/0.0.0.0/tcp/{port}"])
        finally:
            await stop_host(first)
        again = await start_host(None, [f"/ip4/127.0.0.1/tcp/{port}"])  # at once after the stop
        await stop_host(again)
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(PortTaken, match=f"port {port} .* process {os.getpid()}"):
                await start_host(None, [f"/ip4/127.0.0.1/tcp/{port}"])

    run(scenario())


def test_two_starts_on_one_port_at_once_never_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dht.host.check_port_free", lambda address: None
    )  # both looked before either listened

    async def scenario() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        listen = [f"/ip4/127.0.0.1/tcp/{port}"]
        results = await asyncio.gather(
            start_host(None, listen), start_host(None, listen), return_exceptions=True
        )
        hosts = [result for result in results if not isinstance(result, BaseException)]
        assert len(hosts) <= 1
        assert any(isinstance(result, PortTaken) for result in results)
        for host in hosts:
            await stop_host(host)

    run(scenario())


def test_unusable_listen_and_announce_addresses_say_why() -> None:
    async def scenario() -> None:
        for listen, announce, complaint in (
            (["/ip4/203.0.113.7/tcp/0"], None, "not an address of this machine"),
            (["/ip4/127.0.0.1/udp/0/quic-v1"], None, "only TCP"),
            (["/dns4/localhost/tcp/0"], None, "expected an own IP address"),
            (["/ip4/127.0.0.1/tcp/0"], ["/ip4/198.51.100.1/tcp/0"], "port 0"),
        ):
            with pytest.raises((AddressError, HostError), match=complaint):
                await start_host(None, listen, announce)
        host = await start_host(None, announce=["/ip4/198.51.100.1/tcp/4001"])
        assert await visible_addresses(host) == (f"/ip4/198.51.100.1/tcp/4001/p2p/{host.peer_id}",)
        await stop_host(host)

    run(scenario())


def test_failed_or_cancelled_start_leaves_nothing() -> None:
    async def scenario() -> None:
        with pytest.raises(HostError, match="did not start within"):
            await start_host(None, startup_timeout_s=0.01)
        for delay in (0.0, 0.02, 0.1):
            task = asyncio.create_task(start_host(None))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.sleep(0.2)
        assert own_daemons() == []

    run(scenario())


def test_killed_daemon_is_noticed_and_a_new_host_takes_identity_and_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        identity = Identity.load_or_create(tmp_path / "peer.key")
        host = await start_host(identity.path)
        listen = [(await visible_addresses(host))[0].split("/p2p/")[0]]
        os.kill(host._child.pid, signal.SIGKILL)
        death = await asyncio.wait_for(host_died(host), 2)
        assert death.returncode == -signal.SIGKILL and death.last_output
        await stop_host(host)
        host = await start_host(identity.path, listen)
        assert str(host.peer_id) == identity.peer_id
        await stop_host(host)

    run(scenario())


def test_daemon_dies_with_its_killed_parent_and_its_socket_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import asyncio; from dht.host import start_host\n"
        "async def main():\n"
        "    host = await start_host(None)\n"
        "    print(host._child.pid, host.runtime.path, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid_text, runtime = parent.stdout.readline().split()
        assert psutil.pid_exists(int(pid_text))
        base = Path(runtime).parent
        monkeypatch.setattr("dht.host._SWEEP_AGE_S", -1.0)
        assert sweep_runtime_directories(base) == 0  # its owner lives
    finally:
        parent.kill()
        parent.communicate()
    until = time.monotonic() + 10
    while is_running(int(pid_text)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(int(pid_text))
    assert Path(runtime).exists()
    assert sweep_runtime_directories(base) == 1
    assert not Path(runtime).exists()
