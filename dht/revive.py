"""Bring a dead libp2p daemon back under the same P2P object: same peer id, same addresses, same handlers.

Everything holds a reference to the P2P (the noticeboard, the file server, the links), so its successor must be
the same object. What hivemind leaves hanging is ended here: unary calls that wait for an answer of the dead
daemon fail at once, and so do those that are made while there is none.

    await supervise_host(host, on_death=..., on_revived=...)    # for as long as the peer lives
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import loglevel, python_level_to_golog

from dht.addresses import AddressError
from dht.host import HostDeath, HostError, check_listening, check_port_free, host_died, start_error

logger = logging.getLogger(__name__)

RESTARTS = 5
RESTART_WINDOW_S = 300.0
"""A daemon that dies more often than `RESTARTS` times within this time is given up."""
BACKOFF_S = (0.0, 0.5, 2.0, 5.0, 10.0)
"""Before the first, second, ... restart within the window."""
HANDLER_DEADLINE_S = 10.0
"""From the daemon's start to its knowing every handler."""
DOWN = "the libp2p daemon (p2pd) has ended; it is being started again"


class _NoDaemon(Client):  # type: ignore[misc]  # hivemind has no types
    """Stands in for the client of a dead daemon: calls that hivemind would let hang fail at once.

    Calls with a connection of their own (streams, connect, identify) fail by themselves: nobody listens.
    """

    def __init__(self, dead: Client) -> None:
        super().__init__(_initialized_with_create=True)
        self.control = dead.control

    def close(self) -> None:
        """Nothing: the control client goes on with the next daemon."""

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool = False) -> None:
        """See Client. Raises P2PDaemonError."""
        raise P2PDaemonError(DOWN)

    async def remove_unary_handler(self, proto: str) -> None:
        """See Client. Raises P2PDaemonError."""
        raise P2PDaemonError(DOWN)

    async def call_unary_handler(self, peer_id: Any, proto: str, data: bytes) -> bytes:
        """See Client. Raises P2PDaemonError."""
        raise P2PDaemonError(DOWN)


async def supervise_host(
    p2p: P2P,
    *,
    on_death: Callable[[HostDeath], None],
    on_revived: Callable[[], Awaitable[None]],
) -> None:
    """Restart the daemon whenever it ends, until `stop_host` or until cancelled.

    on_death is told of every death; on_revived is awaited after every restart (connections are gone with the
    dead daemon, and so is its address book: dial whoever is needed). Raises HostError when the daemon cannot
    be kept alive: `RESTARTS` restarts within `RESTART_WINDOW_S`, failed ones included.
    """
    restarts: deque[float] = deque()
    while True:
        death = await host_died(p2p)
        if not p2p.is_alive:
            return  # stopped: hivemind says so only then, never after a death
        forget_daemon(p2p)
        on_death(death)
        problem = " | ".join(death.last_output[-3:]) or f"exit code {death.returncode}"
        while True:
            while restarts and time.monotonic() - restarts[0] > RESTART_WINDOW_S:
                restarts.popleft()
            if len(restarts) >= RESTARTS:
                raise HostError(
                    f"the libp2p daemon (p2pd) ended {len(restarts) + 1} times within "
                    f"{RESTART_WINDOW_S / 60:.0f} minutes and is given up; the last problem: {problem}. Is the "
                    f"machine out of memory or of open files (`dmesg`, `ulimit -n`)?"
                )
            await asyncio.sleep(BACKOFF_S[min(len(restarts), len(BACKOFF_S) - 1)])
            restarts.append(time.monotonic())
            try:
                await revive_host(p2p)
                break
            except HostError as error:
                problem = str(error)
                logger.warning("the libp2p daemon did not start again: %s", error)
        await on_revived()


def forget_daemon(p2p: P2P) -> None:
    """The daemon is dead: fail the calls that wait for it, and those that come until it is revived. At once."""
    if isinstance(p2p._client, _NoDaemon):
        return
    dead = p2p._client
    control = dead.control
    p2p._client = _NoDaemon(dead)
    # Collected at last, the dead client closes its control client, which would be the successor's by then: p2pd
    # ends when its last persistent connection does.
    dead.control = None
    for task in (control._read_task, control._write_task, *control._handler_tasks.values()):
        if task is not None:
            task.cancel()
    control._handler_tasks.clear()
    for call in control._pending_calls.values():
        if not call.done():
            call.set_exception(P2PDaemonError(DOWN))
    control._pending_calls.clear()
    control._pending_messages = asyncio.Queue()


async def revive_host(p2p: P2P) -> None:
    """Start a new daemon in place of one that has ended; the same P2P object goes on working.

    Peer id, listen ports (those that port 0 became, too) and every unary and stream handler are as before.
    Connections and the address book are not: dial afterwards. Raises HostError (nothing is left running, and it may be
    tried again), ValueError if the daemon still runs or was not started by `start_host`.
    """
    listening = getattr(p2p, "listening", ())
    if p2p._child is None or p2p._child.returncode is None or not listening:
        raise ValueError("only a daemon of start_host that has ended can be revived")
    forget_daemon(p2p)
    with suppress(Exception):  # it has read the end of the dead daemon's output, or failed doing so
        await p2p._reader_task
    try:
        for address in listening:
            check_port_free(address)
        await _launch(p2p)
        await _reconnect(p2p)
        check_listening(p2p, listening)
    except BaseException as error:
        await _end_child(p2p)
        if isinstance(error, (P2PDaemonError, OSError, EOFError, TimeoutError, AddressError)):
            raise start_error(error, list(p2p.recent_output), listening, p2p.startup_timeout_s) from error
        raise


async def _launch(p2p: P2P) -> None:
    """The dead daemon's command line again, with the ports it had. Returns when it says that it is up."""
    hosts = ",".join(address.transport for address in p2p.listening)
    arguments = [f"-hostAddrs={hosts}" if a.startswith("-hostAddrs=") else a for a in p2p.arguments]
    environment = {**os.environ, "GOLOG_LOG_FMT": "json"}
    environment.setdefault("GOLOG_LOG_LEVEL", python_level_to_golog(loglevel))
    # A killed daemon leaves its socket behind, and its successor would find the path taken.
    with suppress(FileNotFoundError):
        os.remove(p2p._daemon_listen_maddr["unix"])  # noqa: PTH107 - hivemind's own, as text
    p2p.recent_output.clear()
    p2p._child = await asyncio.subprocess.create_subprocess_exec(
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
    )
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    p2p._reader_task = asyncio.create_task(p2p._read_outputs(ready))
    try:
        async with asyncio.timeout(p2p.startup_timeout_s):
            await ready
    except TimeoutError as error:
        raise P2PDaemonError(f"Daemon failed to start in {p2p.startup_timeout_s:.1f} seconds") from error


async def _reconnect(p2p: P2P) -> None:
    """Connect the old control client to the new daemon and make every handler known to it."""
    dead: _NoDaemon = p2p._client
    control = dead.control
    expected = p2p.peer_id
    async with asyncio.timeout(HANDLER_DEADLINE_S):
        await control._ensure_persistent_conn()
        actual, p2p._visible_maddrs = await control.identify()
        if actual != expected:
            raise HostError(
                f"p2pd came back as peer {actual}, it was {expected}: was the identity file replaced?"
            )
        for name, stream_handler in list(control.handlers.items()):
            await control.stream_handler(name, stream_handler)
        for name in list(control.unary_handlers):
            await _register_unary(control, name)
        client = Client(_initialized_with_create=True)
        client.control = control
        p2p._client = client


async def _register_unary(control: Any, name: str) -> None:
    """ControlClient.add_unary_handler for a handler that Python knows already and the daemon does not."""
    call_id = uuid4()
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    control._pending_calls[call_id] = answer
    try:
        await control._pending_messages.put(
            p2pd_pb2.PersistentConnectionRequest(
                callId=call_id.bytes,
                addUnaryHandler=p2pd_pb2.AddUnaryHandlerRequest(proto=name, balanced=False),
            )
        )
        await answer
    finally:
        control._pending_calls.pop(call_id, None)


async def _end_child(p2p: P2P) -> None:
    """Kill a half-started daemon and wait for it."""
    if not isinstance(p2p._client, _NoDaemon):
        forget_daemon(p2p)
    control = p2p._client.control
    for task in (control._read_task, control._write_task):
        if task is not None:
            task.cancel()
    if p2p._child.returncode is None:
        with suppress(ProcessLookupError):
            p2p._child.kill()
    await p2p._child.wait()
