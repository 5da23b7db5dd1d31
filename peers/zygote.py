"""A process that forks peers on request, so that `local` starts each of them in milliseconds.

The zygote is forked after the heavy imports and before any thread or torch operation: forking a process that
has threads is not safe, and its children share the imported pages (a peer costs its own state instead of
another copy of torch). It has a session of its own, so that the terminal's Ctrl+C reaches only the process
that started it, which then ends the children in order. When that process dies, however it dies, the socket
between them closes, and the zygote ends its children and itself.

Requests and answers are JSON messages on a SOCK_SEQPACKET socket pair:

    {"request": {...}, "log": path} + one descriptor    -> {"started": pid} or {"failed": text}
    {"signal": number, "pid": pid}                      -> nothing
                                                        <- {"exited": pid, "code": code}
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.heap import settle

Entry = Callable[[dict[str, Any], int], int]
"""What a child runs: entry(request, descriptor of its status pipe) -> exit code, in its main thread."""

START_DEADLINE_S = 10.0
GRACE_S = 8.0
"""From the first signal to SIGKILL, when the zygote ends its children by itself."""
_POLL_S = 0.1
_MESSAGE_BYTES = 64 * 1024
_EXIT_CRASHED = 70
_PR_SET_PDEATHSIG = 1


class ZygoteError(RuntimeError):
    """The zygote could not be started, or has died."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A child that has ended. code: its exit code, or minus the signal that ended it."""

    pid: int
    code: int


class Zygote:
    """The parent's side. Use `start`, and `close` at the end whatever happens."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._socket = connection
        self._exits: deque[Exit] = deque()
        self._is_closed = False

    @classmethod
    def start(cls, entry: Entry) -> Zygote:
        """Fork the zygote; its children run `entry`. Raises ZygoteError if this process has other threads."""
        threads = _thread_count()
        if threads != 1:
            raise ZygoteError(
                f"{threads} threads run already: the zygote must be forked before any is started"
            )
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ZygoteError(
                f"this system has no SOCK_SEQPACKET sockets ({error}): local needs Linux"
            ) from error
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = _EXIT_CRASHED
            try:
                ours.close()
                os.setsid()
                _Server(theirs, entry).run()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        return cls(pid, ours)

    def fileno(self) -> int:
        """For select: readable when a child has ended (then call `exits`) or the zygote has died."""
        return self._socket.fileno()

    def spawn(self, request: dict[str, Any], log: Path) -> tuple[int, int]:
        """Fork a child that runs the entry on `request`, its output in `log` (appended).

        Returns its pid and the reading end of its status pipe, non-blocking, which the caller closes. Raises
        ZygoteError if the child cannot be forked or the zygote has died.
        """
        reading, writing = os.pipe()
        try:
            message = json.dumps({"request": request, "log": str(log)}).encode()
            if len(message) > _MESSAGE_BYTES:
                raise ZygoteError(f"a request of {len(message)} bytes: at most {_MESSAGE_BYTES} are possible")
            socket.send_fds(self._socket, [message], [writing])
            answer = self._answer()
            if "started" not in answer:
                raise ZygoteError(str(answer.get("failed", answer)))
        except OSError as error:
            os.close(reading)
            raise ZygoteError(f"the zygote (process {self.pid}) has died: {error}") from error
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        os.set_blocking(reading, False)
        return int(answer["started"]), reading

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a child; nothing if it has ended."""
        with suppress(OSError):
            self._socket.send(json.dumps({"signal": int(number), "pid": pid}).encode())

    def exits(self) -> list[Exit]:
        """Children that have ended since the last call; at once. Raises ZygoteError if the zygote has died."""
        while select.select([self._socket], [], [], 0)[0]:
            self._receive()
        found = list(self._exits)
        self._exits.clear()
        return found

    def close(self) -> None:
        """End the zygote and every child still there, within `GRACE_S` and a little."""
        if self._is_closed:
            return
        self._is_closed = True
        self._socket.close()
        deadline = time.monotonic() + GRACE_S + 3.0
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                    time.sleep(0.02)
                    continue
            return
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def kill(self) -> None:
        """End the zygote at once; the kernel signals its children (see `_end_with_parent`)."""
        self._is_closed = True
        self._socket.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _answer(self) -> dict[str, Any]:
        """The answer to a spawn; exit notices that come before it are kept."""
        deadline = time.monotonic() + START_DEADLINE_S
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0] and (answer := self._receive()) is not None:
                return answer
        raise ZygoteError(f"the zygote (process {self.pid}) did not fork a child in {START_DEADLINE_S:.0f} s")

    def _receive(self) -> dict[str, Any] | None:
        """One message; None if it was an exit notice. Raises ZygoteError at the end of the stream."""
        try:
            data = self._socket.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise ZygoteError(f"the zygote (process {self.pid}) has died: {error}") from error
        if not data:
            raise ZygoteError(f"the zygote (process {self.pid}) has died")
        message: dict[str, Any] = json.loads(data)
        if "exited" in message:
            self._exits.append(Exit(int(message["exited"]), int(message["code"])))
            return None
        return message


class _Server:
    """The zygote's side: one loop, no threads, no handlers."""

    def __init__(self, connection: socket.socket, entry: Entry) -> None:
        self._socket = connection
        self._entry = entry
        self._children: set[int] = set()

    def run(self) -> None:
        """Serve until the parent closes its end or dies; then end the children."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        settle()
        try:
            while True:
                if select.select([self._socket], [], [], _POLL_S)[0] and not self._serve():
                    return
                self._reap()
        finally:
            self._end_children()

    def _serve(self) -> bool:
        """One message. False at the end of the stream."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        except ConnectionError:  # the parent died with exit notices unread
            return False
        if not data:
            return False
        message = json.loads(data)
        if "signal" in message:
            # Only children not reaped yet: their numbers cannot have passed to other processes.
            if message["pid"] in self._children:
                os.kill(message["pid"], message["signal"])
            return True
        try:
            answer: dict[str, Any] = {
                "started": self._fork(message["request"], Path(message["log"]), descriptors[0])
            }
        except OSError as error:
            answer = {"failed": f"cannot fork: {error}"}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._say(answer)
        return True

    def _fork(self, request: dict[str, Any], log: Path, descriptor: int) -> int:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = _EXIT_CRASHED
            try:
                self._socket.close()
                _end_with_parent(zygote)
                _redirect(log)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                code = self._entry(request, descriptor)
            except KeyboardInterrupt:
                code = 130
            except BaseException:
                traceback.print_exc()
                code = 1
            finally:
                with suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self._children.add(pid)
        return pid

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            self._say({"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _end_children(self) -> None:
        """SIGTERM, then SIGKILL after `GRACE_S`."""
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self._children:
            self._reap()
            if time.monotonic() > deadline:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)

    def _say(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # if the parent is gone, the next read ends the loop
            self._socket.send(json.dumps(message).encode())


def _end_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies (Linux); leave at once if it is dead already."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(_EXIT_CRASHED)


def _redirect(log: Path) -> None:
    """stdin from nothing, stdout and stderr to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)


def _thread_count() -> int:
    """Threads of this process, native ones included where the system tells."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir():
        return len(list(tasks.iterdir()))
    import threading

    return threading.active_count()
