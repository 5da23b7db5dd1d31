"""Snapshots: copy the state on the compute thread, write it in the background, serve it."""

from __future__ import annotations

import asyncio
import shutil
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from peers.checkpoint import CheckpointError, CheckpointInfo, CheckpointStore, lineage_of
from peers.compute import StageCompute
from peers.engine import Engine, JobPriority
from peers.fileserver import FileServer, snapshot_name
from peers.limits import PROTOCOL_VERSION
from peers.metrics import Metrics
from peers.update_log import UpdateLog
from peers.weights_file import weights_name, write_weights
from swarm.manifest import RunManifest

SAVING = 2
"""States that wait for the disk, each a whole copy in memory; the next one is then not kept."""
LOOKS = 5
"""How often a state that is being trained on is copied anew until its version is certain."""


class Snapshots:
    """The versions of its stage that a peer has on disk and serves. Lives in the communication loop.

    served: those versions, ascending. updates: told what nobody needs any more once older snapshots go.
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        compute: StageCompute,
        engine: Engine,
        store: CheckpointStore,
        server: FileServer,
        metrics: Metrics,
        note: Callable[[str], None],
        updates: UpdateLog | None = None,
    ) -> None:
        self.served: list[int] = []
        self._lineages: dict[int, str] = {}
        self._weights: dict[int, Path] = {}  # where each version's are, once somebody has asked for them
        self._made = 0
        self._manifest, self._stage, self._compute = manifest, stage, compute
        self._engine, self._store, self._server = engine, store, server
        self._metrics, self._note, self._updates = metrics, note, updates
        self._saving: set[asyncio.Task[None]] = set()
        self._checking: asyncio.Task[None] | None = None
        self._order = asyncio.Lock()

    @property
    def is_saving(self) -> bool:
        """Whether a state is still being written."""
        return bool(self._saving)

    def lineage(self, version: int) -> str | None:
        """Lineage of a version that is served; None for any other."""
        return self._lineages.get(version)

    async def start(self) -> None:
        """Offer what is on the disk from before, each once its hash has proved right; does not wait for that."""
        self._checking = asyncio.create_task(self._offer_found())

    async def checked(self) -> None:
        """Wait until all that was on the disk at the start is offered or refused. Await it before saying what this
        peer can serve: a swarm that starts again chooses its version by that.
        """
        if self._checking is not None:
            await asyncio.wait([self._checking])

    def take(self, version: int, lineage: str = "") -> None:
        """Keep the state as it is now, after `version` steps, without waiting for the disk."""
        if len(self._saving) >= SAVING:
            self._metrics.checkpoint("failed")
            self._note(f"warning: the disk is slower than the snapshots: version {version} is not kept")
            return
        state = self._engine.submit(JobPriority.ROUND, self._compute.state)
        self._save_soon(version, lineage, state)

    async def take_now(self, current: Callable[[], tuple[int, str]]) -> None:
        """Keep the state as it is on leaving, beside the snapshots that all replicas have, and wait for the disk.

        current: version and lineage of the weights, which a step may be changing while they are copied. Nothing
        happens if that version is on the disk already.
        """
        await self.settle(float("inf"))
        for _ in range(LOOKS):
            before = current()
            if before[0] == 0 or self._lineages.get(before[0]) == before[1]:
                return
            state = await self._engine.submit(JobPriority.ROUND, self._compute.state)
            if current() == before:
                await self._save(*before, state)
                return

    def adopt(self, path: Path, version: int, lineage: str) -> None:
        """Serve a verified checkpoint that was fetched into the store, in place of any other one of that version."""
        run_id = self._manifest.run_id
        self._drop_weights(version)
        self._made += 1
        # A name of its own each time: what is still being made of an earlier one does not become this one's.
        weights = path.parent / "weights" / f"{self._made}-{path.name}"
        self._weights[version] = weights

        def make() -> None:
            write_weights(path, weights)
            if (
                self._weights.get(version) != weights
            ):  # withdrawn meanwhile, perhaps before the file was there
                weights.unlink(missing_ok=True)

        self._server.register(snapshot_name(version, self._stage), path, run_id)
        self._server.register(weights_name(version, self._stage), weights, run_id, make=make)
        if version not in self.served:
            insort(self.served, version)
        self._lineages[version] = lineage

    async def abandon_all(self, but: int) -> None:
        """Set aside everything on the disk but one version: it is of a lineage that the stage gave up."""
        async with self._order:
            await asyncio.to_thread(self._store.set_aside_all, self._stage, self._manifest.run_id, but)
            self._withdraw(lambda version: version == but)

    async def settle(self, deadline_s: float) -> None:
        """Wait until what is being written is on the disk, at most so long."""
        if self._saving:
            await asyncio.wait(self._saving, timeout=None if deadline_s == float("inf") else deadline_s)

    def report_damaged(self) -> None:
        """Tell the user of checkpoints that the store has set aside, and count them."""
        while self._store.damaged:
            self._metrics.checkpoint("corrupt")
            self._note(f"warning: {self._store.damaged.popleft()}")

    def refuses(self, info: CheckpointInfo) -> str:
        """Why a checkpoint of this run and stage cannot be used by this program; "" if it can."""
        wanted = {"protocol": PROTOCOL_VERSION, "schema": self._compute.trainable.schema_hash}
        for name, value in wanted.items():
            if name in info.meta and info.meta[name] != value:
                return f"its {name} is {str(info.meta[name])[:64]!r}, not {value!r}"
        return ""

    # -- in the background -------------------------------------------------------------------------------

    def _save_soon(self, version: int, lineage: str, state: asyncio.Future[dict[str, Tensor]]) -> None:
        async def save() -> None:
            await self._save(version, lineage, await state)

        task = asyncio.create_task(save())
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, version: int, lineage: str, state: dict[str, Tensor]) -> None:
        run_id = self._manifest.run_id
        meta: dict[str, Any] = {
            "run_id": run_id,
            "stage": self._stage,
            "protocol": PROTOCOL_VERSION,
            "schema": self._compute.trainable.schema_hash,
            "lineage": lineage,
        }
        async with self._order:
            try:
                path = await asyncio.to_thread(self._store.save, version, state, meta, self._is_snapshot)
            except CheckpointError as error:
                self._metrics.checkpoint("failed")
                self._note(f"warning: {error}")
                return
            self._metrics.checkpoint("written")
            self.adopt(path, version, lineage)
            kept = await asyncio.to_thread(self._store.versions, self._stage, run_id)
            self._withdraw(lambda known: known in kept)
        if self._updates is not None and kept:
            self._updates.drop_before(kept[0])

    def _is_snapshot(self, version: int) -> bool:
        return self._manifest.keeps_snapshot(version - 1)

    def _withdraw(self, is_kept: Callable[[int], bool]) -> None:
        for version in [version for version in self.served if not is_kept(version)]:
            self.served.remove(version)
            self._lineages.pop(version, None)
            run_id = self._manifest.run_id
            self._server.unregister(snapshot_name(version, self._stage), run_id)
            self._server.unregister(weights_name(version, self._stage), run_id)
            self._drop_weights(version)

    def _drop_weights(self, version: int) -> None:
        """Forget the weights of a version, and remove their file if it was made."""
        weights = self._weights.pop(version, None)
        if weights is not None:
            with suppress(OSError):
                weights.unlink(missing_ok=True)

    async def _offer_found(self) -> None:
        run_id = self._manifest.run_id
        # Made again when somebody asks: what an earlier start left has not been looked at.
        await asyncio.to_thread(shutil.rmtree, self._store.directory / "weights", ignore_errors=True)
        versions = await asyncio.to_thread(self._store.versions, self._stage, run_id)
        for version in reversed(versions):
            async with self._order:
                try:
                    info = await asyncio.to_thread(self._store.verify, self._stage, run_id, version)
                except CheckpointError as error:
                    self._note(f"warning: {error}")
                    continue
                self.report_damaged()
                if info is None or version in self.served:
                    continue
                if why := self.refuses(info):
                    self._note(f"warning: the checkpoint of version {version} cannot be used: {why}")
                    continue
                self.adopt(self._store.path(version, self._stage, run_id), version, lineage_of(info))
