"""Updates on disk: offered, bounded, never in the way of training."""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

import peers.update_log
from peers.fileserver import FileServer
from peers.metrics import Metrics
from peers.traffic import Traffic
from peers.update_log import UpdateLog
from peers.updates import Update, read_update, update_name
from swarm.manifest import RunManifest
from tests.kit.members import STAGE, Members, running_engine, stage_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunManifest, Path, list[Update]]:
    folder = tmp_path_factory.mktemp("run")
    manifest = stage_run(folder)
    with running_engine() as engine:
        members = Members(manifest, folder, engine)

        async def scenario() -> list[Update]:
            return [await members.step() for _ in range(6)]

        return manifest, folder, asyncio.run(scenario())


class Peer:
    """A log, and what it told."""

    def __init__(self, run: tuple[RunManifest, Path, list[Update]], directory: Path, **more: Any) -> None:
        traffic = Traffic()
        self.server = FileServer(None, traffic)  # type: ignore[arg-type]  # nothing is sent in these tests
        self.server.add_run(run[0], run[1])
        self.metrics, self.notes = Metrics(traffic), list[str]()
        self.log = UpdateLog(
            directory=directory,
            run_id=run[0].run_id,
            stage=STAGE,
            server=self.server,
            metrics=self.metrics,
            note=self.notes.append,
            **more,
        )

    @property
    def offered(self) -> list[int]:
        names = self.server._runs[self.log._run_id].files
        steps = [step for step in range(10) if update_name(step, STAGE) in names]
        assert steps == sorted(self.log.steps)
        return steps

    def counted(self, result: str) -> int:
        for line in generate_latest(self.metrics.registry).decode().splitlines():
            if line.startswith(f'swarm_peer_updates_total{{result="{result}"}}'):
                return int(float(line.split()[-1]))
        raise AssertionError(result)

    async def settle(self) -> None:
        await self.log.settle(20)


def scenario_of(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(make(), 60))


def test_updates_are_offered_until_no_kept_snapshot_needs_them(run: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer(run, tmp_path / "updates")
        for update in run[2]:
            peer.log.record(update)
            await peer.settle()
        assert peer.offered == [0, 1, 2, 3, 4, 5]
        assert read_update(peer.log.path(3)).digest == run[2][3].digest
        peer.log.drop_before(2)
        peer.log.drop_from(5)
        await peer.settle()
        assert peer.offered == [2, 3, 4]
        assert len(list((tmp_path / "updates").iterdir())) == 3
        assert peer.counted("written") == 6
        assert peer.notes == []

    scenario_of(scenario)


def test_after_a_restart_whole_ones_are_offered_again_and_torn_ones_never(run: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        first = Peer(run, tmp_path)
        for update in run[2][:5]:
            first.log.record(update)
            await first.settle()
        torn, zeroed, stranger = (first.log.path(step) for step in (1, 2, 3))
        torn.write_bytes(torn.read_bytes()[:-100])
        zeroed.write_bytes(bytes(zeroed.stat().st_size))
        stranger.write_bytes(first.log.path(4).read_bytes())  # whole, but another step
        (tmp_path / ".x.update.77.tmp").write_bytes(b"")
        again = Peer(run, tmp_path)
        await again.log.start()
        await again.settle()
        assert again.offered == [0, 4]
        assert again.counted("corrupt") == 3
        other = Peer(run, tmp_path)
        other.log._stage = 7
        await other.log.start()
        await other.settle()
        assert other.log.steps == {}

    scenario_of(scenario)


@contextmanager
def full_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the kernel then refuses, as a full disk does
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


def test_a_full_disk_is_said_once_and_training_goes_on(run: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer(run, tmp_path)
        with full_disk():
            for update in run[2][:3]:
                peer.log.record(update)
                await peer.settle()
        assert peer.offered == []
        assert is_empty(tmp_path)
        assert peer.counted("failed") == 3
        assert len(peer.notes) == 1
        assert "free some space" in peer.notes[0]
        peer.log.record(run[2][3])
        await peer.settle()
        assert peer.offered == [3]

    scenario_of(scenario)


def test_a_folder_that_cannot_be_made_stops_nothing(run: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "file").write_text("")
        peer = Peer(run, tmp_path / "file" / "updates")
        await peer.log.start()
        peer.log.record(run[2][0])
        peer.log.drop_before(1)
        await peer.settle()
        assert peer.counted("failed") == 1
        assert len(peer.notes) == 1

    scenario_of(scenario)


def test_a_disk_that_is_slower_than_the_steps_holds_few_updates_in_memory(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), peers.update_log.write_update

    def slow(path: Path, update: Update) -> int:
        gate.wait(20)
        return write(path, update)

    monkeypatch.setattr(peers.update_log, "write_update", slow)

    async def scenario() -> None:
        peer = Peer(run, tmp_path)
        for update in run[2]:
            peer.log.record(update)
        gate.set()
        await peer.settle()
        assert peer.offered == [0, 1, 2]
        assert peer.counted("skipped") == 3
        assert len(peer.notes) == 1

    scenario_of(scenario)


def test_the_oldest_go_beyond_the_limit(run: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer(run, tmp_path)
        peer.log.record(run[2][0])
        await peer.settle()
        peer = Peer(run, tmp_path, limit_bytes=int(2.5 * sum(peer.log.steps.values())))
        for update in run[2]:
            peer.log.record(update)
            await peer.settle()
        assert peer.offered == [4, 5]
        assert len(peer.notes) == 1

    scenario_of(scenario)
