"""The anchor role of a peer: pull a snapshot, pass microbatches through it unmasked, publish the priors.

Nobody waits for an anchor. It looks for the newest version that every stage serves, and when that is newer than
its last pass, fetches it at low priority, fits the prior of every boundary and offers the files. Lives in the
communication loop; torch works on the compute thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import P2P

from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PriorRecord
from peers.anchor_figures import AnchorFigures
from peers.anchor_memory import AnchorMemory
from peers.anchor_work import AnchorWork, PassResult
from peers.announcer import Announcer
from peers.checkpoint import CheckpointError, CheckpointStore
from peers.compute import compute_dtype, model_config
from peers.config import PeerConfig, UserError
from peers.engine import Engine, JobPriority
from peers.fileserver import FileServer
from peers.grants import Grants
from peers.heap import settle
from peers.lifecycle import Lifecycle
from peers.prior_parts import PriorPart
from peers.priors import prior_file_name, write_prior
from peers.reporting import Reporter
from peers.run_files import RunFiles, prior_name, stage_name
from peers.sealed_prior import seal_prior
from peers.status import StatusBoard
from peers.traffic import Traffic
from peers.transfer import TransferError, fetch_weights
from peers.weights_file import BYTES_PER_WEIGHT, HEAD_BYTES, read_weights
from swarm.activation.config import BasisConfig
from swarm.activation.registry import needs_prior as codec_needs_prior
from swarm.activation.registry import needs_tokens
from swarm.activation.tokens import TOKENS_FILE
from swarm.anchor.config import NoCorrectorConfig
from swarm.anchor.gradients import stage_targets
from swarm.anchor.passes import AnchorModel, pass_samples
from swarm.anchor.registry import needs_prior
from swarm.manifest import RunManifest
from swarm.model.stage import build_stage

logger = logging.getLogger("swarm_peer.anchor")
LOOK_S = 0.5
"""Between two looks at what the stages serve."""
PUBLISH_S = 5.0
KEPT_PASSES = 4
"""Passes whose priors stay on offer: of those that plans may still name."""


class AnchorPeer:
    """An anchor of one run, for all of its stages.

    Raises UserError from `run` if the run has no priors to make, or its owner has not named this peer.
    """

    def __init__(
        self,
        *,
        config: PeerConfig,
        manifest: RunManifest,
        identity: Identity,
        p2p: P2P,
        board: Noticeboard,
        announcer: Announcer,
        files: RunFiles,
        server: FileServer,
        engine: Engine,
        lifecycle: Lifecycle,
        traffic: Traffic,
        status: StatusBoard,
        reporter: Reporter,
        addresses: tuple[str, ...],
        grants: Grants,
    ) -> None:
        self._grants = grants
        self.figures = status.anchor = AnchorFigures()
        self._config, self._manifest, self._identity = config, manifest, identity
        self._p2p, self._board, self._announcer = p2p, board, announcer
        self._files, self._server, self._engine = files, server, engine
        self._lifecycle, self._traffic = lifecycle, traffic
        self._reporter, self._addresses = reporter, addresses
        self._note: Callable[[str], None] = reporter.note
        self._offered: dict[PriorPart, list[tuple[str, Path]]] = {}
        self._memory: AnchorMemory | None = None
        self._work: AnchorWork
        # A folder of its own: on one machine several peers may share the run's.
        self._directory = config.checkpoint_dir or files.directory / "checkpoints" / identity.peer_id[-8:]
        self._model: AnchorModel
        self._numels: list[int] = []

    async def run(self) -> None:
        """Until the run has ended, or this task is cancelled."""
        try:
            await self._run()
        finally:
            if self._memory is not None:
                self._memory.close()

    async def _run(self) -> None:
        codec = self._manifest.codec
        if not isinstance(codec, BasisConfig) and not needs_prior(self._manifest.corrector):
            raise UserError(
                f"run {self._manifest.name!r} uses codec {codec.name} and no corrector, which need no anchor: join a "
                f"stage"
            )
        self._check_named("has not named")
        self._lifecycle.go("syncing")
        await self._announcer.publish()
        await self._prepare()
        store = await asyncio.to_thread(CheckpointStore, self._directory, 1)
        settle()
        self._lifecycle.go("online")
        self._reporter.ready(self._addresses, self._manifest.model.stages)
        self._note("online as an anchor; waiting for a snapshot of every stage")
        published = float("-inf")
        while True:
            self._check_named("has revoked")
            if time.monotonic() - published > PUBLISH_S:
                published = time.monotonic()
                await self._announcer.publish()
            self._look_at_memory()
            version = self._newest()
            if version is not None and version >= self._manifest.total_steps:
                self._note("the run is finished: no priors are needed any more")
                return
            if version is not None and version > (self.figures.version or 0):
                try:
                    await self._pass(version, store)
                except (TransferError, CheckpointError, ValueError, OSError) as error:
                    self.figures.failed += 1
                    self._note(f"warning: no priors of version {version}: {error}")
                    await asyncio.sleep(PUBLISH_S)
                published = float("-inf")
            await asyncio.sleep(LOOK_S)

    def _check_named(self, what: str) -> None:
        """Raise UserError unless this peer is an anchor of the run."""
        if self._identity.peer_id not in self._grants.anchors:
            raise UserError(
                f"the owner of run {self._manifest.name!r} {what} {self._identity.peer_id} as an anchor: its priors "
                f"would be refused. The owner names anchors with `swarm-peer init RUN_DIR --grant-anchor PEER_ID`"
            )

    async def _prepare(self) -> None:
        """Fetch the initial state of every stage and build them on the compute thread."""
        manifest = self._manifest
        for stage in range(manifest.model.stages):
            artifact = manifest.artifact(stage_name(stage))
            self._note(f"getting {artifact.name} ({artifact.nbytes / 1e6:.1f} MB)")
            await self._files.ensure(artifact.name)
        if needs_tokens(manifest.codec):
            await self._files.ensure(TOKENS_FILE)
        for boundary in range(manifest.model.stages - 1) if codec_needs_prior(manifest.codec) else ():
            await self._files.ensure(prior_name(boundary))

        def build() -> AnchorModel:
            config = model_config(manifest)
            stages = [
                build_stage(
                    config,
                    manifest.model.cuts,
                    stage,
                    dtype=compute_dtype(manifest),
                    device=self._config.device,
                    tensors=self._files.artifacts / stage_name(stage),
                    freeze=frozenset(manifest.model.freeze),
                )
                for stage in range(manifest.model.stages)
            ]
            self._numels = [stage.trainable_set.numel for stage in stages]
            return AnchorModel(stages)

        self._note("loading all stages")
        self._model = await self._engine.submit(JobPriority.ROUND, build)
        self._work = AnchorWork(self._config, manifest, self._model, self._files)
        if not isinstance(manifest.corrector, NoCorrectorConfig) and needs_prior(manifest.corrector):
            self._memory = AnchorMemory(
                config=manifest.corrector,
                manifest=manifest,
                targets={stage: stage_targets(model) for stage, model in enumerate(self._model.models)},
                directory=self._directory,
                offer=self._offer,
                note=self._note,
            )
            await self._memory.start()

    def _donors(self, stage: int) -> dict[str, tuple[int, ...]]:
        return {
            peer: record.versions
            for peer, record in self._board.view().items()
            if record.stage == stage and record.state == "online"
        }

    def _newest(self) -> int | None:
        """The newest version that every stage says it serves."""
        common: set[int] | None = None
        for stage in range(self._manifest.model.stages):
            served = {version for versions in self._donors(stage).values() for version in versions}
            common = served if common is None else common & served
        return max((version for version in common or () if version > 0), default=None)

    # -- a pass ------------------------------------------------------------------------------------------

    async def _pass(self, version: int, store: CheckpointStore) -> None:
        """Priors of one version, from fetching it to offering them."""
        began = time.monotonic()
        for stage in range(self._manifest.model.stages):
            await self._load(version, stage, store)
        fetched = time.monotonic()
        samples = pass_samples(self._manifest, version)
        await self._files.ensure_samples(samples)
        rows = self._manifest.rows_per_microbatch
        dataset = self._files.dataset()

        def work() -> PassResult:
            batches = [dataset.batch(samples[i : i + rows]) for i in range(0, len(samples), rows)]
            return self._work.run(batches, version, memory.correctors() if memory is not None else None)

        memory = self._memory
        result = await self._engine.submit(JobPriority.ROUND, work)
        for boundary, data in enumerate(result.boundaries):
            await self._offer(version, PriorPart("boundary", boundary), data)
        if memory is not None and result.gradients is not None:
            await memory.ingest(version, dict(enumerate(result.gradients)))
        self._take_figures(result)
        figures = self.figures
        figures.passes, figures.version = figures.passes + 1, version
        figures.fetch_s, figures.fit_s = fetched - began, time.monotonic() - fetched
        figures.prior_bytes = sum(map(len, result.boundaries))
        self._note(
            f"priors of version {version}: {figures.prior_bytes / 1e6:.1f} MB, fetched in "
            f"{figures.fetch_s:.1f} s, fitted in {figures.fit_s:.1f} s"
        )

    async def _load(self, version: int, stage: int, store: CheckpointStore) -> None:
        """Fetch a stage's snapshot and take its weights. Raises TransferError, CheckpointError, ValueError."""
        run_id = self._manifest.run_id
        path = store.path(version, stage, run_id)
        donors = self._donors(stage)
        holders = sorted(donors, key=lambda peer: version not in donors[peer])
        limit = BYTES_PER_WEIGHT * self._numels[stage] + HEAD_BYTES
        await fetch_weights(
            self._p2p, holders, run_id, version, stage, path, traffic=self._traffic, limit_bytes=limit
        )
        try:
            weights = await asyncio.to_thread(read_weights, path, run_id, stage, version)
            await self._engine.submit(JobPriority.ROUND, self._model.load, stage, weights)
            self.figures.fetched_bytes += path.stat().st_size
        except ValueError as error:
            raise ValueError(f"version {version} of stage {stage} cannot be used: {error}") from error
        finally:
            with suppress(OSError):  # the weights are in memory: nobody else needs the file
                await asyncio.to_thread(path.unlink, missing_ok=True)

    def _take_figures(self, result: PassResult) -> None:
        figures, coding = self.figures, result.coding
        if coding is not None:
            figures.coded_cosine = coding.cosine
            figures.forward_errors, figures.gradient_errors = coding.forward_errors, coding.gradient_errors
        figures.raw_cosine, figures.corrected_cosine = result.gain or (None, None)

    def _look_at_memory(self) -> None:
        """What the memory's own thread has done since."""
        figures, memory = self.figures, self._memory
        if memory is not None:
            figures.corrector_version, figures.factor_s = memory.version, memory.factor_s
            figures.corrector_bytes, figures.corrector_skipped = memory.prior_bytes, memory.skipped
            figures.gradients_refused = memory.refused

    async def _offer(self, version: int, part: PriorPart, data: bytes) -> None:
        """Keep a prior's file, serve it and say so; let go of what no plan can name any more."""
        run_id = self._manifest.run_id
        data = seal_prior(data, run_id, self._identity)
        sha256, path = await asyncio.to_thread(write_prior, self._directory / "priors", part, data)
        name = prior_file_name(part, sha256)
        self._server.register(name, path, run_id)
        await self._board.publish(
            PriorRecord(
                run_id=run_id,
                peer_id=self._identity.peer_id,
                public_key=self._identity.public_key,
                incarnation=self._identity.incarnation,
                kind=part.kind,
                part=part.ordinal,
                step=version,
                sha256=sha256,
                nbytes=len(data),
            )
        )
        offered = self._offered.setdefault(part, [])
        if (name, path) not in offered:
            offered.append((name, path))
        while len(offered) > KEPT_PASSES:
            name, path = offered.pop(0)
            self._server.unregister(name, run_id)
            with suppress(OSError):
                await asyncio.to_thread(path.unlink)
