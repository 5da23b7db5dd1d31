"""Start, watch and stop the libp2p daemon (p2pd) behind hivemind's P2P.

What hivemind's own start leaves open is closed here: libp2p shares a listen port silently with another
process (SO_REUSEPORT), so ports are checked before and after; the daemon is killed by the kernel when this
process dies and is out of reach of the terminal's Ctrl+C, which would take it away before the peer could
say goodbye; its sockets live in a private directory that goes with it; its death can be awaited, since
hivemind's wrapper goes on saying that it is alive while calls hang.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from dht.addresses import Address, AddressError, parse_address

logger = logging.getLogger(__name__)

DEFAULT_LISTEN = ("/ip4/127.0.0.1/tcp/0",)
STOP_GRACE_S = 3.0
"""How long the daemon may take to end after SIGTERM before it is killed."""

_DIRECTORY_PREFIX = "swarm-peer-host-"
_SWEEP_AGE_S = 60.0
_MAX_SOCKET_DIRECTORY_CHARACTERS = 60
_KEPT_OUTPUT_LINES = 20

# Runs in a fresh interpreter and becomes p2pd (same pid). PR_SET_PDEATHSIG = 1, SIGKILL = 9. The parent may
# have died before prctl took effect, hence the look at getppid. Not a preexec_fn: that is unsafe in a
# process with threads, and hivemind offers no place for one.
_LAUNCHER = """
import os, sys
os.setsid()
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class HostError(RuntimeError):
    """The daemon could not be started; the message says why and what to do."""


class PortTaken(HostError):  # noqa: N818
    """Another process listens on a port that was asked for."""


@dataclass(frozen=True, slots=True)
class HostDeath:
    """How the daemon ended: its exit status (negative: signal) and its last lines of output."""

    returncode: int
    last_output: tuple[str, ...]


class _Host(P2P):  # type: ignore[misc]  # hivemind has no types
    """hivemind's P2P with its daemon launched through `_LAUNCHER` and its output kept."""

    started: list[_Host]
    """Filled by the constructor, so that a start that is cancelled half-way can be cleaned up."""
    arguments: list[str]
    """The daemon's command line, for `dht.revive`. Every host has a class of its own, so this is the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.recent_output: deque[str] = deque(maxlen=_KEPT_OUTPUT_LINES)
        self.runtime: _RuntimeDirectory | None = None
        self.listening: tuple[Address, ...] = ()
        self.startup_timeout_s = 60.0
        self.started.append(self)

    @classmethod
    def _make_process_args(cls, *args: Any, **kwargs: Any) -> list[str]:
        arguments: list[str] = P2P._make_process_args(*args, **kwargs)
        if sys.executable:
            arguments = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *arguments]
        cls.arguments = arguments
        return arguments

    def _log_p2pd_message(self, line: str) -> None:
        self.recent_output.append(line)
        P2P._log_p2pd_message(line)


class LiveCalls(dict[Any, "asyncio.Future[bytes]"]):
    """The unary calls that wait for an answer, by call id; of those, only what can still be answered is found.

    In place of hivemind's dict of pending calls. An answer that comes in the instant in which its call is given
    up would be set on a cancelled future; hivemind's reader ends of that, and every later call hangs.
    """

    def __contains__(self, call_id: object) -> bool:
        """Whether a call by this id still waits."""
        future = self.get(call_id)
        return future is not None and not future.done()


class _RuntimeDirectory:
    """A private directory for the daemon's sockets, with a lock that tells the living from the dead."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > _MAX_SOCKET_DIRECTORY_CHARACTERS:
            base = "/tmp"  # a unix socket's path holds 107 bytes
        sweep_runtime_directories(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=base))
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete the directory; harmless when repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep_runtime_directories(base: Path) -> int:
    """Remove the socket directories that killed processes of this user left in `base`; returns how many."""
    removed = 0
    for path in base.glob(_DIRECTORY_PREFIX + "*"):
        with suppress(OSError):
            status = path.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _SWEEP_AGE_S:
                continue
            descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
            finally:
                os.close(descriptor)
    return removed


async def start_host(
    identity_path: str | Path | None,
    listen: Sequence[str] = DEFAULT_LISTEN,
    announce: Sequence[str] | None = None,
    startup_timeout_s: float = 60.0,
    *,
    nat_port_map: bool = False,
    client_mode: bool = False,
) -> P2P:
    """Start p2pd in the running loop and connect to it; it dials nobody by itself.

    listen: TCP multiaddrs (port 0: any free port); announce: multiaddrs told to others instead of what
    p2pd finds out itself (behind port forwarding), each with its port. client_mode: takes no part in
    libp2p's own routing tables (behind NAT). The daemon dies with the thread that called this.

    Raises AddressError, PortTaken (naming port and holder) or HostError. Cancelled or failed, it leaves no
    process and no socket.
    """
    wanted = [_listen_address(text) for text in listen]
    for text in announce or ():
        if parse_address(text).port == 0:
            raise AddressError(f"announce address {text!r} has port 0: name the port that others can reach")
    for address in wanted:
        check_port_free(address)
    runtime = _RuntimeDirectory()
    started: list[_Host] = []
    # hivemind takes the socket prefix from the class, so every host is of a class of its own.
    kind = type("Host", (_Host,), {"_UNIX_SOCKET_PREFIX": f"/unix{runtime.path}/", "started": started})
    try:
        host: P2P = await kind.create(  # type: ignore[attr-defined]
            initial_peers=None,
            host_maddrs=[address.transport for address in wanted],
            announce_maddrs=[parse_address(text).transport for text in announce] if announce else None,
            # A key that only the daemon knows would make its successor (`dht.revive`) another peer.
            identity_path=str(identity_path or runtime.path / "identity.key"),
            dht_mode="client" if client_mode else "server",
            check_if_identity_free=False,
            nat_port_map=nat_port_map,
            startup_timeout=startup_timeout_s,
        )
        host._client.control._pending_calls = LiveCalls()
        host.runtime = runtime
        host.startup_timeout_s = startup_timeout_s
        host.listening = _listening(host, wanted)
        check_listening(host, wanted)
    except BaseException as error:
        for half_started in started:
            await end_process(half_started)
        runtime.remove()
        if isinstance(error, (P2PDaemonError, OSError, asyncio.IncompleteReadError)):
            output = [line for half_started in started for line in half_started.recent_output]
            raise start_error(error, output, wanted, startup_timeout_s) from error
        raise
    return host


async def stop_host(p2p: P2P) -> None:
    """End the daemon and remove its sockets; harmless when repeated or when it is already dead.

    Completes within `STOP_GRACE_S` and a little, also when cancelled meanwhile.
    """
    try:
        await end_process(p2p)
    finally:
        runtime = getattr(p2p, "runtime", None)
        if runtime is not None:
            runtime.remove()


async def host_died(p2p: P2P) -> HostDeath:
    """Wait until the daemon's process has ended, by whatever cause (`stop_host` included)."""
    returncode = await p2p._child.wait()
    return HostDeath(int(returncode), tuple(getattr(p2p, "recent_output", ())))


async def visible_addresses(p2p: P2P, deadline_s: float = 5.0) -> tuple[str, ...]:
    """TCP multiaddrs, with peer id, at which others may reach this host; TimeoutError after the deadline.

    Wildcard listen addresses are expanded by the daemon; announced ones stand instead where given.
    """
    async with asyncio.timeout(deadline_s):
        _, addresses = await p2p._client.identify()
    return tuple(f"{address}/p2p/{p2p.peer_id}" for address in map(str, addresses) if "/tcp/" in address)


def check_port_free(address: Address) -> None:
    """Raise PortTaken if another socket listens on the address's port, HostError if it is not ours to bind.

    SO_REUSEADDR ignores connections in TIME_WAIT; without SO_REUSEPORT even a listener that would share
    its port makes the bind fail. Port 0 only checks that the address is this machine's.
    """
    family = socket.AF_INET6 if address.protocol == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _port_taken(address.port, _listeners(address.port)) from error
            reason = {
                errno.EADDRNOTAVAIL: "not an address of this machine; /ip4/0.0.0.0 stands for all of them",
                errno.EACCES: "ports below 1024 need root; choose a higher one",
            }.get(error.errno or 0, str(error))
            raise HostError(f"cannot listen on {address.transport}: {reason}") from error


def _listen_address(text: str) -> Address:
    """A listen multiaddr; AddressError unless /ip4 or /ip6 with TCP."""
    address = parse_address(text)
    if address.protocol not in {"ip4", "ip6"}:
        raise AddressError(
            f"cannot listen on {text!r}: expected an own IP address like /ip4/0.0.0.0/tcp/31330"
        )
    return address


def _listeners(port: int) -> set[int]:
    """Pids that listen on a TCP port; 0 stands for processes we may not see; empty where unknown."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return set()
    return {
        c.pid or 0 for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
    }


def _port_taken(port: int, pids: set[int]) -> PortTaken:
    known = sorted(pid for pid in pids if pid)
    holder = f" by process {', '.join(map(str, known))}" if known else ""
    return PortTaken(
        f"TCP port {port} is already taken{holder}: stop that process or choose another --listen port"
    )


def _listening(host: P2P, wanted: Sequence[Address]) -> tuple[Address, ...]:
    """The listen addresses with the ports that port 0 became; port 0 stays where this cannot be found out."""
    try:
        connections = psutil.Process(host._child.pid).net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return tuple(wanted)
    ports: defaultdict[str, list[int]] = defaultdict(list)
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr:
            ports[connection.laddr.ip].append(connection.laddr.port)
    fixed = {(address.host, address.port) for address in wanted}
    chosen = {ip: sorted(port for port in of_ip if (ip, port) not in fixed) for ip, of_ip in ports.items()}
    return tuple(
        address
        if address.port or not chosen.get(address.host)
        else replace(address, port=chosen[address.host].pop(0))
        for address in wanted
    )


def check_listening(host: P2P, wanted: Sequence[Address]) -> None:
    """After the start: every fixed port is ours, and ours alone (two starts at once could share it)."""
    for port in {address.port for address in wanted if address.port}:
        pids = _listeners(port)
        if not pids:
            continue
        if host._child.pid not in pids:
            raise HostError(
                f"p2pd does not listen on TCP port {port}; its output: {_tail(host.recent_output)}"
            )
        if others := pids - {host._child.pid}:
            raise _port_taken(port, others)


def start_error(
    error: BaseException, output: Sequence[str], wanted: Sequence[Address], startup_timeout_s: float
) -> HostError:
    """The clear form of what p2pd or hivemind said about a failed start."""
    text = f"{error} {_tail(output)}"
    if "address already in use" in text:
        for address in wanted:
            if f":{address.port}: bind: address already in use" in text:
                return _port_taken(address.port, _listeners(address.port))
    if "failed to start in" in text:
        return HostError(
            f"p2pd did not start within {startup_timeout_s:.0f} s (a busy or slow machine?): try again, or "
            f"raise the startup timeout; its output: {_tail(output)}"
        )
    return HostError(f"p2pd did not start: {error}; its output: {_tail(output)}")


def _tail(lines: Sequence[str] | deque[str]) -> str:
    return " | ".join(list(lines)[-3:]) or "none"


async def end_process(p2p: P2P) -> None:
    """Terminate p2pd, kill it after `STOP_GRACE_S`, and wait for hivemind's tasks on it to end."""
    control = p2p._client.control if p2p._client is not None else None
    tasks = [p2p._listen_task, p2p._reader_task]
    tasks += [control._read_task, control._write_task] if control is not None else []
    p2p._terminate()
    child = p2p._child
    if child is not None:
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await child.wait()
        except TimeoutError:
            logger.warning("p2pd (process %d) did not end in time and was killed", child.pid)
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
        await child.wait()
    # Also fetches the error with which hivemind's reader ends when p2pd was killed.
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
