"""One process per replica, forked from this one after its imports, perhaps each on a host of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANSWER_S, GRACE_S = 120.0, 20.0
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica runs. position: among the replicas. address: IPv4 it listens on. namespace: network namespace,
    "" for this one. folder: for sockets.
    """

    position: int
    address: str
    namespace: str
    folder: str


Serve = Callable[[Connection, Place], None]
"""What a replica's process runs: it answers each (command, arguments) until the pipe closes."""


class Crew:
    """The replicas' processes, inside a `with` block. Fork it before any thread is started."""

    def __init__(self, places: Sequence[Place], serve: Serve) -> None:
        gc.collect()
        gc.freeze()
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for place in places:
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, [*self._pipes, ours], place, serve))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE_S)
            with suppress(ProcessLookupError):  # and what it has started: hivemind's processes outlive theirs
                os.killpg(process.pid, signal.SIGKILL)
            process.join()

    def ask(self, position: int, command: str, *arguments: Any) -> Any:
        """Have one replica do something; returns its answer. Raises RuntimeError if there is none."""
        self._pipes[position].send((command, arguments))
        return self._answer(position)

    def ask_all(self, command: str, *arguments: Any) -> list[Any]:
        """Have all replicas do something at once."""
        for pipe in self._pipes:
            pipe.send((command, arguments))
        return [self._answer(position) for position in range(len(self._pipes))]

    def _answer(self, position: int) -> Any:
        pipe = self._pipes[position]
        if not pipe.poll(ANSWER_S):
            raise RuntimeError(f"replica {position} does not answer")
        try:
            is_fine, answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"replica {position} has ended") from None
        if not is_fine:
            raise RuntimeError(f"replica {position}: {answer}")
        return answer


def _run(pipe: Connection, of_others: list[Connection], place: Place, serve: Serve) -> None:
    for other in of_others:
        other.close()  # else nobody notices when this program's own ends close
    os.setsid()  # out of reach of the terminal's Ctrl+C, and a group that can be ended
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if place.namespace:
        descriptor = os.open(Path("/var/run/netns") / place.namespace, os.O_RDONLY)
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {place.namespace}")
        os.close(descriptor)
    code = 0
    try:
        serve(pipe, place)
    except BaseException as error:
        code = 1
        traceback.print_exc()
        pipe.send((False, repr(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_until(at: float) -> None:
    """Sleep to a moment of the monotonic clock, which all processes of a machine share."""
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)
