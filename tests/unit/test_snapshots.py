"""What a peer keeps of its state: the newest whole one is used, whatever happened to the disk (T6)."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from peers.checkpoint import CheckpointStore
from peers.compute import StageCompute
from peers.engine import Engine, JobPriority
from peers.fileserver import FileServer, snapshot_name
from peers.metrics import Metrics
from peers.snapshots import Snapshots
from peers.traffic import Traffic
from peers.update_log import UpdateLog
from peers.weights_file import weights_name, write_weights
from swarm.manifest import RunManifest
from tests.kit.members import STAGE, running_engine, stage_compute, stage_run


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


class Peer:
    """Snapshots of one peer, and what it told."""

    def __init__(
        self, engine: Engine, folder: Path, directory: Path, manifest: RunManifest | None = None
    ) -> None:
        self.manifest = manifest or stage_run(folder, snapshot_every=2, early_snapshots=())
        self.engine, traffic = engine, Traffic()
        self.compute: StageCompute = stage_compute(self.manifest, folder)
        self.server = FileServer(None, traffic)  # type: ignore[arg-type]  # nothing is sent in these tests
        self.server.add_run(self.manifest, folder)
        self.metrics, self.notes = Metrics(traffic), list[str]()
        self.store = CheckpointStore(directory, keep=2)
        self.updates = UpdateLog(
            directory=directory / "updates",
            run_id=self.manifest.run_id,
            stage=STAGE,
            server=self.server,
            metrics=self.metrics,
            note=self.notes.append,
        )
        self.snapshots = Snapshots(
            manifest=self.manifest,
            stage=STAGE,
            compute=self.compute,
            engine=engine,
            store=self.store,
            server=self.server,
            metrics=self.metrics,
            note=self.notes.append,
            updates=self.updates,
        )
        self.version = 0

    @property
    def offered(self) -> list[int]:
        names = self.server._runs[self.manifest.run_id].files
        versions = [version for version in range(20) if snapshot_name(version, STAGE) in names]
        assert versions == self.snapshots.served
        return versions

    def counted(self, result: str) -> int:
        for line in generate_latest(self.metrics.registry).decode().splitlines():
            if line.startswith(f'swarm_peer_checkpoints_total{{result="{result}"}}'):
                return int(float(line.split()[-1]))
        raise AssertionError(result)

    @property
    def held(self) -> tuple[int, str]:
        return self.version, f"lineage-{self.version}"

    async def step(self) -> None:
        average = torch.full((self.compute.trainable.numel,), 1e-3 * (self.version + 1))
        await self.engine.submit(JobPriority.ROUND, self.compute.apply, average, self.version)
        self.version += 1

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            await self.step()
            if self.manifest.keeps_snapshot(self.version - 1):
                self.snapshots.take(*self.held)
                await self.snapshots.settle(20)

    def again(self, folder: Path) -> Peer:
        """The same peer after a restart."""
        return Peer(self.engine, folder, self.store.directory, self.manifest)

    async def start(self) -> None:
        await self.snapshots.start()
        await self.snapshots.checked()


def scenario_of(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(make(), 60))


def test_a_snapshot_says_its_lineage_and_is_offered_again_after_a_restart(
    engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.train(7)
        assert peer.offered == [4, 6]
        again = peer.again(tmp_path)
        assert again.offered == []
        await again.start()
        assert again.offered == [4, 6]
        assert [again.snapshots.lineage(version) for version in (4, 6, 2)] == ["lineage-4", "lineage-6", None]
        loaded = again.store.load(STAGE, peer.manifest.run_id, 4)
        assert loaded is not None
        assert loaded.lineage == "lineage-4"

    scenario_of(scenario)


def has_temporary_files(folder: Path) -> bool:
    return any(path.name.startswith(".") for path in folder.iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip, zero, empty])
def test_a_damaged_checkpoint_is_never_offered_and_the_one_before_it_is_used(
    engine: Engine, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.train(4)
        damage(peer.store.path(4, STAGE, peer.manifest.run_id))
        again = peer.again(tmp_path)
        await again.start()
        assert again.offered == [2]
        assert again.counted("corrupt") == 1
        assert len(again.notes) == 1
        assert "damaged" in again.notes[0]
        loaded = again.store.load_newest(STAGE, peer.manifest.run_id)
        assert loaded is not None
        again.compute.load_state(loaded.tensors)
        assert loaded.version == 2

    scenario_of(scenario)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_the_snapshot_and_nothing_else(
    engine: Engine, tmp_path: Path, small_disk: Path
) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, small_disk)
        await peer.train(2)
        size = peer.store.path(2, STAGE, peer.manifest.run_id).stat().st_size
        (small_disk / "other").write_bytes(bytes(700 * 1024 - size - size // 2 - 8192))
        await peer.train(3)
        assert peer.version == 5
        assert peer.offered == [2]
        assert peer.counted("failed") == 1
        assert "No space left" in peer.notes[0]
        assert "free some space" in peer.notes[0]
        assert not has_temporary_files(small_disk)
        (small_disk / "other").unlink()
        await peer.train(1)
        assert peer.offered == [2, 6]
        again = peer.again(tmp_path)
        await again.start()
        assert again.offered == [2, 6]

    scenario_of(scenario)


def test_what_a_leaving_peer_saves_evicts_no_snapshot_that_all_replicas_have(
    engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.train(5)
        await peer.snapshots.take_now(lambda: peer.held)
        assert peer.offered == [2, 4, 5]
        await peer.train(1)
        assert peer.offered == [4, 5, 6]
        await peer.snapshots.take_now(lambda: peer.held)  # on the disk already
        assert peer.counted("written") == 4
        await peer.train(1)
        await peer.snapshots.take_now(lambda: peer.held)
        assert peer.offered == [4, 6, 7]
        await peer.train(3)
        assert peer.offered == [8, 10]

    scenario_of(scenario)


def test_a_peer_that_leaves_in_the_middle_of_a_step_saves_what_it_says(
    engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.train(1)
        step = asyncio.create_task(peer.step())
        await peer.snapshots.take_now(lambda: peer.held)
        await step
        loaded = peer.store.load_newest(STAGE, peer.manifest.run_id)
        assert loaded is not None
        clean = Peer(engine, tmp_path, tmp_path / "clean", peer.manifest)
        for _ in range(loaded.version):
            await clean.step()
        assert all(
            torch.equal(tensor, loaded.tensors[name]) for name, tensor in clean.compute.state().items()
        )

    scenario_of(scenario)


def test_a_peer_that_has_learned_nothing_saves_nothing(engine: Engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.snapshots.take_now(lambda: peer.held)
        assert peer.offered == []

    scenario_of(scenario)


def test_checkpoints_of_another_lineage_are_set_aside(engine: Engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.train(5)
        await peer.snapshots.take_now(lambda: peer.held)
        await peer.snapshots.abandon_all(but=4)
        assert peer.offered == [4]
        assert peer.store.versions(STAGE) == [4]
        assert len(list((tmp_path / "kept").glob("*.abandoned"))) == 2
        await peer.snapshots.abandon_all(but=0)
        assert peer.offered == []
        assert len(list((tmp_path / "kept").glob("*.abandoned"))) == 1

    scenario_of(scenario)


def test_a_checkpoint_of_another_schema_is_not_offered(engine: Engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        meta = {"run_id": peer.manifest.run_id, "stage": STAGE, "schema": "another"}
        peer.store.save(2, peer.compute.state(), meta)
        await peer.start()
        assert peer.offered == []
        assert peer.store.versions() == [2]

    scenario_of(scenario)


def test_snapshots_that_the_disk_cannot_follow_do_not_pile_up_in_memory(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, save = threading.Event(), CheckpointStore.save

    def slow(*arguments: Any) -> Path:
        gate.wait(20)
        return save(*arguments)

    monkeypatch.setattr(CheckpointStore, "save", slow)

    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        for _ in range(4):
            await peer.step()
            peer.snapshots.take(*peer.held)
        gate.set()
        await peer.snapshots.settle(20)
        assert (peer.counted("written"), peer.counted("failed")) == (2, 2)
        assert any("slower than the snapshots" in note for note in peer.notes)

    scenario_of(scenario)


def weights_of(peer: Peer, version: int) -> Any:
    """What is on offer as the weights of a version."""
    return peer.server._runs[peer.manifest.run_id].files[weights_name(version, STAGE)]


def test_weights_of_another_lineage_take_the_place_of_those_before(engine: Engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.train(2)
        before = weights_of(peer, 2)
        before.make()
        old = before.path.read_bytes()
        await peer.step()
        path = peer.store.save(2, await engine.submit(JobPriority.ROUND, peer.compute.state), meta_of(peer))
        peer.snapshots.adopt(path, 2, "another")
        after = weights_of(peer, 2)
        assert not before.path.exists() and not after.path.exists()
        after.make()
        assert after.path.read_bytes() != old

    scenario_of(scenario)


def meta_of(peer: Peer) -> dict[str, Any]:
    return {"run_id": peer.manifest.run_id, "stage": STAGE, "lineage": "another"}


def test_weights_that_are_withdrawn_while_they_are_made_leave_no_file(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        peer = Peer(engine, tmp_path, tmp_path / "kept")
        await peer.train(2)
        offered = weights_of(peer, 2)

        def late(checkpoint: Path, target: Path) -> None:
            peer.snapshots._withdraw(lambda version: False)
            write_weights(checkpoint, target)

        monkeypatch.setattr("peers.snapshots.write_weights", late)
        offered.make()
        assert list(offered.path.parent.iterdir()) == []
        assert peer.offered == []

    scenario_of(scenario)
