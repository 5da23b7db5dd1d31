from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from peers.engine import Engine, JobPriority


@contextmanager
def running(engine: Engine) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        yield thread
    finally:
        engine.stop()
        thread.join(5)
        assert not thread.is_alive()


def run(scenario: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    engine = Engine()
    asyncio.run(asyncio.wait_for(scenario(engine), 10))


def test_result_and_error_of_a_job_come_to_whoever_awaits_it() -> None:
    async def scenario(engine: Engine) -> None:
        with running(engine):
            assert await engine.submit(JobPriority.FORWARD, lambda a, b: a + b, 2, 3) == 5
            with pytest.raises(ZeroDivisionError):
                await engine.submit(JobPriority.FORWARD, lambda: 1 // 0)
            assert await engine.submit(JobPriority.FORWARD, threading.get_ident) != threading.get_ident()

    run(scenario)


def test_rounds_go_before_backwards_before_forwards_each_in_order() -> None:
    async def scenario(engine: Engine) -> None:
        ran: list[str] = []
        jobs = [
            engine.submit(priority, ran.append, f"{name}{number}")
            for number in range(2)
            for name, priority in (
                ("forward", JobPriority.FORWARD),
                ("backward", JobPriority.BACKWARD),
                ("round", JobPriority.ROUND),
            )
        ]
        assert engine.depth == 6
        with running(engine):
            await asyncio.gather(*jobs)
        names = ("round", "backward", "forward")
        assert ran == [f"{name}{number}" for name in names for number in range(2)]

    run(scenario)


def test_jobs_run_one_at_a_time() -> None:
    async def scenario(engine: Engine) -> None:
        inside, overlaps = [0], [0]

        def job() -> None:
            inside[0] += 1
            overlaps[0] = max(overlaps[0], inside[0])
            inside[0] -= 1

        with running(engine):
            await asyncio.gather(*(engine.submit(JobPriority.FORWARD, job) for _ in range(200)))
        assert overlaps == [1]

    run(scenario)


def test_cancelled_job_never_runs() -> None:
    async def scenario(engine: Engine) -> None:
        ran: list[int] = []
        doomed = engine.submit(JobPriority.FORWARD, ran.append, 1)
        kept = engine.submit(JobPriority.FORWARD, ran.append, 2)
        doomed.cancel()
        await asyncio.sleep(0)  # the loop passes it on in its next turn
        with running(engine):
            await kept
        assert ran == [2]

    run(scenario)


def test_stop_ends_the_engine_after_the_job_at_hand_and_cancels_the_rest() -> None:
    async def scenario(engine: Engine) -> None:
        begun, release = threading.Event(), threading.Event()

        def long() -> str:
            begun.set()
            release.wait(5)
            return "done"

        at_hand = engine.submit(JobPriority.FORWARD, long)
        waiting = engine.submit(JobPriority.FORWARD, lambda: "never")
        with running(engine):
            await asyncio.to_thread(begun.wait, 5)
            engine.stop()
            release.set()
            assert await at_hand == "done"
            with pytest.raises(asyncio.CancelledError):
                await waiting

    run(scenario)


def test_busy_and_idle_time_add_up() -> None:
    async def scenario(engine: Engine) -> None:
        with running(engine):
            await asyncio.sleep(0.05)
            await engine.submit(JobPriority.FORWARD, lambda: threading.Event().wait(0.05))
        assert engine.busy_s >= 0.045 and engine.idle_s >= 0.03
        assert engine.worked_s[JobPriority.FORWARD] == engine.busy_s

    run(scenario)
