"""The compute thread: jobs in, results out.

The main thread runs torch and nothing else; the communication loop submits jobs and awaits them. Jobs run
one at a time, by priority and then in order, so the accumulator and the weights need no locks. Backwards go
before forwards: the order "one forward, one backward" falls out, and memory is given back early.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from typing import Any, TypeVar

R = TypeVar("R")


class JobPriority(IntEnum):
    """Order of jobs; smaller runs first."""

    ROUND = 0
    BACKWARD = 1
    FORWARD = 2


class Engine:
    """Runs jobs in the thread that calls `run`. Submit from any thread.

    worked_s: seconds at work, by the jobs' priority; idle_s: without a job.
    """

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], Any] | None, Future[Any]]] = (
            queue.PriorityQueue()
        )
        self._order = itertools.count()
        self._stopped = threading.Event()
        self.worked_s = dict.fromkeys(JobPriority, 0.0)
        self.idle_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds at work."""
        return sum(self.worked_s.values())

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return self._jobs.qsize()

    def submit(self, priority: JobPriority, job: Callable[..., R], *arguments: Any) -> asyncio.Future[R]:
        """Queue a job and await its result in the running loop. Its exception is raised at the await.

        After `stop` the job is cancelled at once.
        """
        future: Future[R] = Future()
        if self._stopped.is_set():
            future.cancel()
            return asyncio.wrap_future(future)
        self._jobs.put((priority, next(self._order), lambda: job(*arguments), future))
        return asyncio.wrap_future(future)

    def stop(self) -> None:
        """Let `run` return after the job at hand. Jobs that still wait are cancelled."""
        self._stopped.set()
        self._jobs.put((-1, next(self._order), None, Future()))

    def run(self) -> None:
        """Run jobs until `stop`. Call in the main thread."""
        while not self._stopped.is_set():
            waited = time.perf_counter()
            priority, _, job, future = self._jobs.get()
            started = time.perf_counter()
            self.idle_s += started - waited
            if job is not None and future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)
                self.worked_s[JobPriority(priority)] += time.perf_counter() - started
        while not self._jobs.empty():
            self._jobs.get_nowait()[3].cancel()
