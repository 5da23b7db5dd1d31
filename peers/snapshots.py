"""Snapshots: copy the state on the compute thread, write it in the background, serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from peers.checkpoint import CheckpointError, CheckpointStore
from peers.compute import StageCompute
from peers.engine import Engine, JobPriority
from peers.fileserver import FileServer, snapshot_name
from peers.limits import PROTOCOL_VERSION
from peers.metrics import Metrics
from swarm.manifest import RunManifest


class Snapshots:
    """The versions of its stage that a peer has on disk and serves. Lives in the communication loop."""

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
    ) -> None:
        self.served: list[int] = []
        self._manifest, self._stage, self._compute = manifest, stage, compute
        self._engine, self._store, self._server = engine, store, server
        self._metrics, self._note = metrics, note
        self._saving: set[asyncio.Task[None]] = set()

    @property
    def is_saving(self) -> bool:
        """Whether a state is still being written."""
        return bool(self._saving)

    def take(self, version: int) -> None:
        """Keep the state as it is now, after `version` steps, without waiting for the disk."""
        task = asyncio.create_task(self._save(version))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def settle(self, deadline_s: float) -> None:
        """Wait until what is being written is on the disk, at most so long."""
        if self._saving:
            await asyncio.wait(self._saving, timeout=deadline_s)

    async def _save(self, version: int) -> None:
        state = await self._engine.submit(JobPriority.ROUND, self._compute.state)
        meta: dict[str, Any] = {
            "run_id": self._manifest.run_id,
            "stage": self._stage,
            "protocol": PROTOCOL_VERSION,
            "schema": self._compute.trainable.schema_hash,
        }
        try:
            path = await asyncio.to_thread(self._store.save, version, state, meta)
        except CheckpointError as error:
            self._metrics.checkpoint("failed")
            self._note(f"warning: {error}")
            return
        self._metrics.checkpoint("written")
        run_id = self._manifest.run_id
        self._server.register(snapshot_name(version, self._stage), path, run_id)
        kept = self._store.versions(self._stage, run_id)
        for old in set(self.served) - set(kept):
            self._server.unregister(snapshot_name(old, self._stage), run_id)
        self.served = [*(known for known in self.served if known in kept), version]
