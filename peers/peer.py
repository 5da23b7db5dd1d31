"""One peer's process: the main thread computes, the communication thread does everything that talks.

main thread            Engine.run(): torch jobs
communication thread   one uvloop loop: libp2p, noticeboard, links, rounds, metrics
background threads     checkpoint writing (asyncio.to_thread)
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import uvloop

from peers import injector
from peers.config import PeerConfig, UserError
from peers.engine import Engine
from peers.limits import LIMITS
from peers.reporting import Reporter
from peers.session import Session
from peers.trainer import NotInRunError

logger = logging.getLogger("swarm_peer.peer")
EXIT_OK, EXIT_FAILED, EXIT_KILLED = 0, 1, 130


def run_peer(config: PeerConfig, reporter: Reporter) -> int:
    """Run a stage peer (or a seed, without a stage) until the run ends or a signal comes.

    Call in the main thread: it computes here. Returns the exit code. Raises UserError, and what `dht` and
    `swarm` raise for mistakes of the user (each with one clear message), after everything is closed.
    """
    check_device(config.device)
    if config.kill_at is not None:
        injector.arm(config.kill_at, config.stage if isinstance(config.stage, int) else None)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return _PeerProcess(config, reporter).run()


def check_device(name: str) -> None:
    """Raise UserError unless this torch can compute there."""
    try:
        torch.empty(1, device=torch.device(name))
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"--device {name}: torch {torch.__version__} cannot use it ({first}); use --device cpu"
        ) from error


class _PeerProcess:
    """The two threads of a peer and the signals between them."""

    def __init__(self, config: PeerConfig, reporter: Reporter) -> None:
        self._config, self._reporter = config, reporter
        self._engine = Engine()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._signals = 0

    def run(self) -> int:
        handlers: list[tuple[signal.Signals, Any]] = []
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.append((number, signal.signal(number, self._on_signal)))
        thread = threading.Thread(target=self._communicate, name="communication")
        thread.start()
        try:
            self._engine.run()
            thread.join()
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)
        return self._conclude()

    def _conclude(self) -> int:
        error = self._error
        if isinstance(error, NotInRunError):
            raise UserError(str(error)) from error
        if error is not None:
            raise error
        return EXIT_OK

    def _communicate(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._error = root_cause(error)
        finally:
            self._engine.stop()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._signals:
            self._stop.set()
        session = Session(self._config, self._engine, self._reporter)
        work = asyncio.create_task(session.run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not work.done():
                session.exit_reason = "interrupted"
                work.cancel()
            try:
                async with asyncio.timeout(LIMITS.drain_s):
                    await asyncio.wait([work])
            except TimeoutError:
                logger.error("the peer did not close within %.0f s", LIMITS.drain_s)
        if work.done() and not work.cancelled() and (error := work.exception()) is not None:
            raise error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread: the first signal asks for an orderly end, the second ends at once."""
        self._signals += 1
        if self._signals > 1:
            os._exit(EXIT_KILLED)
        again = " (again Ctrl+C to leave at once)" if number == signal.SIGINT else ""
        self._reporter.note(f"leaving: saying goodbye to the swarm{again}")
        loop, stop = self._loop, self._stop
        # Whatever a job or a disk is doing, the exit comes: p2pd dies with its thread.
        last = threading.Timer(LIMITS.drain_s + 1.5, os._exit, (EXIT_KILLED,))
        last.daemon = True
        last.start()
        if loop is not None and stop is not None and not loop.is_closed():
            call: Callable[[], None] = stop.set
            loop.call_soon_threadsafe(call)


def root_cause(error: BaseException) -> BaseException:
    """The first error inside nested exception groups: that is what the user needs to hear."""
    while isinstance(error, BaseExceptionGroup):
        real = [e for e in error.exceptions if not isinstance(e, asyncio.CancelledError)]
        error = real[0] if real else error.exceptions[0]
    return error
