"""A stage whose members keep and serve what catching up needs, and one peer that is not there yet.

PYTEST_DONT_REWRITE: as in `transfer_swarm`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from prometheus_client import generate_latest
from transfer_swarm import Holder, Swarm

from peers.catchup import CatchUp
from peers.checkpoint import CheckpointStore
from peers.engine import Engine
from peers.fileserver import FileServer
from peers.metrics import Metrics
from peers.run_files import RunFiles
from peers.snapshots import Snapshots
from peers.traffic import Traffic
from peers.update_log import UpdateLog
from swarm.manifest import RunManifest
from tests.kit.members import STAGE, Members, stage_compute, stage_run


class Disk:
    """What one peer keeps and serves."""

    def __init__(self, run: Run, server: FileServer, directory: Path, compute: Any, notes: list[str]) -> None:
        self.directory, self.metrics = directory, Metrics(Traffic())
        self.store = CheckpointStore(directory)
        common: dict[str, Any] = {"server": server, "metrics": self.metrics, "note": notes.append}
        self.updates = UpdateLog(
            directory=directory / "updates", run_id=run.manifest.run_id, stage=STAGE, **common
        )
        self.snapshots = Snapshots(
            manifest=run.manifest,
            stage=STAGE,
            compute=compute,
            engine=run.engine,
            store=self.store,
            updates=self.updates,
            **common,
        )

    def counted(self, what: str) -> int:
        for line in generate_latest(self.metrics.registry).decode().splitlines():
            if line.startswith(f"swarm_peer_{what}"):
                return int(float(line.split()[-1]))
        raise AssertionError(what)


class Run:
    """Two members with their disks, and one peer that is not there yet."""

    def __init__(self, swarm: Swarm, engine: Engine, folder: Path, **options: Any) -> None:
        self.swarm, self.engine, self.folder = swarm, engine, folder
        options = {"snapshot_every": 3, "early_snapshots": (), **options}
        self.manifest: RunManifest = stage_run(folder / "artifacts", **options)
        self.members = Members(self.manifest, folder / "artifacts", engine)
        self.holders: list[Holder] = []
        self.disks: list[Disk] = []
        self.notes: list[str] = []
        self.compute = stage_compute(self.manifest, folder / "artifacts")
        self.catchup, self.disk = self.joiner("mine")

    def joiner(self, name: str) -> tuple[CatchUp, Disk]:
        traffic = Traffic()
        server = FileServer(self.swarm.me, traffic)
        server.add_run(self.manifest, self.folder / "artifacts")
        disk = Disk(self, server, self.folder / name, self.compute, self.notes)

        async def holders() -> list[str]:
            return self.ids

        files = RunFiles(self.manifest, self.folder, self.swarm.me, holders, traffic)
        catchup = CatchUp(
            manifest=self.manifest,
            stage=STAGE,
            compute=self.compute,
            engine=self.engine,
            p2p=self.swarm.me,
            files=files,
            store=disk.store,
            updates=disk.updates,
            snapshots=disk.snapshots,
            traffic=traffic,
            metrics=disk.metrics,
            note=self.notes.append,
        )
        return catchup, disk

    @property
    def ids(self) -> list[str]:
        return [holder.id for holder in self.holders]

    @property
    def donors(self) -> dict[str, list[int]]:
        return {h.id: d.snapshots.served for h, d in zip(self.holders, self.disks, strict=True)}

    async def start(self) -> None:
        for number, name in enumerate(self.members.names):
            holder = await self.swarm.holder()
            holder.server.add_run(self.manifest, self.folder / "artifacts")
            compute = self.members.computes[name]
            disk = Disk(self, holder.server, self.folder / f"member-{number}", compute, self.notes)
            self.holders.append(holder)
            self.disks.append(disk)

    async def train(self, *steps: tuple[int, ...] | None) -> None:
        """Steps by the weights of the members, recorded and kept as members do it."""
        for weights in steps:
            update = await self.members.step(weights)
            for disk in self.disks:
                disk.updates.record(update)
                if self.manifest.keeps_snapshot(update.step):
                    disk.snapshots.take(self.members.version, self.members.lineage)
                await disk.snapshots.settle(20)
                await disk.updates.settle(20)

    def check(self, held: tuple[int, str]) -> None:
        """What is held is what every member holds."""
        assert held == (self.members.version, self.members.lineage) == self.catchup.held
        expected, state = self.members.state, self.compute.state()
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())

    async def kill(self, number: int) -> None:
        child = self.holders[number].p2p._child
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
