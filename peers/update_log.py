"""The updates a peer keeps on disk and serves. Lives in the communication loop; the disk is written in a thread."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path

from peers.checkpoint import RUN_CHARACTERS, SWEEP_AGE_S
from peers.fileserver import FileServer
from peers.limits import LIMITS
from peers.metrics import Metrics
from peers.partial_file import NO_ROOM
from peers.updates import Update, UpdateError, check_update, update_name, write_update

logger = logging.getLogger("swarm_peer.updates")
PARTIAL_AGE_S = 3600.0
"""A half fetched update that nobody has touched for so long is removed."""
_NAME = re.compile(r"^(?P<run>[0-9A-Za-z]{1,16})-stage-(?P<stage>\d{1,6})-step-(?P<step>\d{1,12})\.update$")


class UpdateLog:
    """The updates of one run's stage in one folder. steps: those on offer, with their bytes.

    Nothing here ever stops the training: what cannot be kept is said once and counted, and those who catch up
    ask somebody else or take a newer snapshot.
    """

    def __init__(
        self,
        *,
        directory: Path,
        run_id: str,
        stage: int,
        server: FileServer,
        metrics: Metrics,
        note: Callable[[str], None],
        limit_bytes: int = LIMITS.updates_bytes,
    ) -> None:
        self.steps: dict[int, int] = {}
        self._directory, self._run_id, self._stage = directory, run_id, stage
        self._server, self._metrics, self._note = server, metrics, note
        self._limit_bytes = limit_bytes
        self._order = asyncio.Lock()  # fair: what is asked first is done first
        self._tasks: set[asyncio.Task[None]] = set()
        self._recording = 0
        self._said: set[str] = set()

    def path(self, step: int) -> Path:
        """Where the update of this step is, or would be."""
        return self._directory / f"{self._run_id[:RUN_CHARACTERS]}-stage-{self._stage}-step-{step:08d}.update"

    async def start(self) -> None:
        """Offer again what is there from before, once it has been verified; does not wait for that."""
        self._spawn(self._offer_found())  # beside what is recorded meanwhile: it may take a while

    def record(self, update: Update) -> None:
        """Keep a step's update, in the background. Its tensors must not change any more."""
        if self._recording >= LIMITS.updates_pending:
            self._metrics.update("skipped")
            self._say_once(
                "skipped", "the disk is slower than the steps: updates for peers that join are left out"
            )
            return
        self._recording += 1
        self._queue(lambda: self._record(update))

    def adopt(self, step: int) -> None:
        """Offer an update that somebody put at its path, whole and verified."""
        with suppress(OSError):
            self._offer(step, self.path(step).stat().st_size)

    def drop_before(self, version: int) -> None:
        """Remove the updates of steps before this version: every snapshot that is kept has them in it."""
        self._queue(lambda: self._drop(lambda step: step < version))

    def drop_from(self, version: int) -> None:
        """Remove the updates of this step and later ones: they belong to a lineage that was given up."""
        self._queue(lambda: self._drop(lambda step: step >= version))

    async def settle(self, deadline_s: float) -> None:
        """Wait until everything asked for is done, at most so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)

    # -- in the background, one after another ----------------------------------------------------------

    def _queue(self, job: Callable[[], Awaitable[None]]) -> None:
        self._spawn(self._in_order(job))

    def _spawn(self, job: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_order(self, job: Callable[[], Awaitable[None]]) -> None:
        async with self._order:
            await job()

    async def _record(self, update: Update) -> None:
        try:
            nbytes = await asyncio.to_thread(write_update, self.path(update.step), update)
        except OSError as error:
            self._metrics.update("failed")
            advice = "free some space" if error.errno in NO_ROOM else "see to the folder"
            self._say_once(
                "failed",
                f"cannot keep updates in {self._directory}: {error.strerror or error}; {advice} (training goes "
                f"on, peers that join are served by others)",
            )
            return
        finally:
            self._recording -= 1
        self._said.discard("failed")
        self._metrics.update("written")
        self._offer(update.step, nbytes)
        while sum(self.steps.values()) > self._limit_bytes and len(self.steps) > 1:
            oldest = min(self.steps)
            self._say_once(
                "limit",
                f"updates of this stage take over {self._limit_bytes / 1e9:.0f} GB between two snapshots: the "
                f"oldest are removed",
            )
            await self._drop(lambda step, last=oldest: step <= last)  # type: ignore[misc]

    def _offer(self, step: int, nbytes: int) -> None:
        self.steps[step] = nbytes
        # Registered anew also when it is there: the hashes of an overwritten file are void.
        self._server.register(update_name(step, self._stage), self.path(step), self._run_id)

    async def _drop(self, is_dropped: Callable[[int], bool]) -> None:
        found = await asyncio.to_thread(self._found)
        for step in [step for step in self.steps if is_dropped(step)]:
            del self.steps[step]
            self._server.unregister(update_name(step, self._stage), self._run_id)
        paths = [path for step, path in found.items() if is_dropped(step)]
        await asyncio.to_thread(_unlink, paths)

    async def _offer_found(self) -> None:
        found = await asyncio.to_thread(self._found)
        await asyncio.to_thread(self._sweep)
        for step, path in sorted(found.items(), reverse=True):
            try:
                update = await asyncio.to_thread(check_update, path)
                if (update.run, update.stage, update.step) != (self._run_id, self._stage, step):
                    raise UpdateError(f"it is of run {update.run} stage {update.stage} step {update.step}")
            except FileNotFoundError:
                continue  # another peer that shares the folder has dropped it
            except (UpdateError, OSError) as error:
                self._metrics.update("corrupt")
                logger.error("update %s is damaged (%s): removed", path, error)
                await asyncio.to_thread(_unlink, [path])
                continue
            if step not in self.steps:
                self.adopt(step)

    def _found(self) -> dict[int, Path]:
        found: dict[int, Path] = {}
        with suppress(OSError):
            for path in self._directory.iterdir():
                match = _NAME.match(path.name)
                if match is None or int(match["stage"]) != self._stage:
                    continue
                if match["run"] == self._run_id[:RUN_CHARACTERS]:
                    found[int(match["step"])] = path
        return found

    def _sweep(self) -> None:
        """Remove what writers and fetches left behind that were killed."""
        old = [(path, SWEEP_AGE_S) for path in self._directory.glob(".*.update.*.tmp")]
        old += [(path, PARTIAL_AGE_S) for path in self._directory.glob("*.update*.partial")]
        for path, age_s in old:
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > age_s:
                    path.unlink()

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._note(f"warning: {text}")


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()
