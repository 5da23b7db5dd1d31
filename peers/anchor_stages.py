"""The stages that an anchor holds: built once, and loaded with the weights of one snapshot after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import P2P

from dht.noticeboard import Noticeboard
from peers.anchor_cover import Span
from peers.checkpoint import RUN_CHARACTERS, CheckpointStore
from peers.compute import model_config
from peers.config import PeerConfig
from peers.engine import Engine, JobPriority
from peers.run_files import RunFiles, prior_name, stage_name
from peers.traffic import Traffic
from peers.transfer import fetch_copy
from peers.weights_file import BYTES_PER_WEIGHT, HEAD_BYTES, read_weights, weights_name
from swarm.activation.registry import needs_prior, needs_tokens
from swarm.activation.tokens import TOKENS_FILE
from swarm.anchor.passes import AnchorModel, pass_samples
from swarm.batch import Batch
from swarm.manifest import RunManifest
from swarm.model.formats import compute_dtype
from swarm.model.stage import StageModel, build_stage


class AnchorStages:
    """Stages `span` of a run. model: they, once `prepare` is done. fetched_bytes: of snapshots, in all."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        manifest: RunManifest,
        span: Span,
        p2p: P2P,
        board: Noticeboard,
        files: RunFiles,
        engine: Engine,
        traffic: Traffic,
        directory: Path,
        note: Callable[[str], None],
    ) -> None:
        self.span = span
        self.model: AnchorModel
        self.fetched_bytes = 0
        self._config, self._manifest, self._p2p, self._board = config, manifest, p2p, board
        self._files, self._engine, self._traffic = files, engine, traffic
        self._directory, self._note = directory, note
        self._store: CheckpointStore
        self._numels: list[int] = []

    @property
    def is_whole(self) -> bool:
        """Whether these are all stages of the run."""
        return self.span == (0, self._manifest.model.stages - 1)

    async def prepare(self) -> None:
        """Fetch the initial state of the stages and build them on the compute thread."""
        manifest, (first, last) = self._manifest, self.span
        for stage in range(first, last + 1):
            artifact = manifest.artifact(stage_name(stage))
            self._note(f"getting {artifact.name} ({artifact.nbytes / 1e6:.1f} MB)")
            await self._files.ensure(artifact.name)
        if needs_tokens(manifest.codec):
            await self._files.ensure(TOKENS_FILE)
        if self.is_whole and needs_prior(manifest.codec):  # what coding does is measured with them
            for boundary in range(last):
                await self._files.ensure(prior_name(boundary))

        def build() -> AnchorModel:
            config = model_config(manifest)
            stages = [
                build_stage(
                    config,
                    manifest.model.cuts,
                    stage,
                    dtype=compute_dtype(manifest.compute, self._config.device),
                    device=self._config.device,
                    tensors=self._files.artifacts / stage_name(stage),
                    freeze=frozenset(manifest.model.freeze),
                )
                for stage in range(first, last + 1)
            ]
            self._numels = [stage.trainable_set.numel for stage in stages]
            return AnchorModel(stages)

        self._note("loading all stages" if self.is_whole else f"loading stages {first} to {last}")
        self.model = await self._engine.submit(JobPriority.ROUND, build)
        self._store = await asyncio.to_thread(CheckpointStore, self._directory, 1)

    def models(self, first: int, last: int) -> tuple[StageModel, ...]:
        """Stages `first` to `last`, of those held."""
        return self.model.models[first - self.span[0] : last + 1 - self.span[0]]

    def served(self) -> list[dict[str, tuple[int, ...]]]:
        """Of each of the run's stages: its peers, and the versions that each says it serves."""
        return [self._donors(stage) for stage in range(self._manifest.model.stages)]

    async def load(self, version: int, first: int, last: int) -> list[Batch]:
        """Fetch weights and take them, and the pass's microbatches, of stages `first` to `last` of those held.

        Raises TransferError, CheckpointError, ValueError, OSError.
        """
        for stage in range(first, last + 1):
            await self._load(version, stage)
        samples = pass_samples(self._manifest, version)
        await self._files.ensure_samples(samples)
        rows, dataset = self._manifest.rows_per_microbatch, self._files.dataset()

        def read() -> list[Batch]:
            return [dataset.batch(samples[i : i + rows]) for i in range(0, len(samples), rows)]

        return await asyncio.to_thread(read)

    async def _load(self, version: int, stage: int) -> None:
        run_id = self._manifest.run_id
        path = self._store.path(version, stage, run_id)
        await asyncio.to_thread(self._drop_partials, stage, path)
        donors = self._donors(stage)
        holders = sorted(donors, key=lambda peer: version not in donors[peer])
        place = stage - self.span[0]
        limit = BYTES_PER_WEIGHT * self._numels[place] + HEAD_BYTES
        name = weights_name(version, stage)
        await fetch_copy(self._p2p, holders, run_id, name, path, traffic=self._traffic, limit_bytes=limit)
        try:
            weights = await asyncio.to_thread(read_weights, path, run_id, stage, version)
            await self._engine.submit(JobPriority.ROUND, self.model.load, place, weights)
            self.fetched_bytes += path.stat().st_size
        except ValueError as error:
            raise ValueError(f"version {version} of stage {stage} cannot be used: {error}") from error
        finally:
            with suppress(OSError):  # the weights are in memory: nobody else needs the file
                await asyncio.to_thread(path.unlink, missing_ok=True)

    def _drop_partials(self, stage: int, kept: Path) -> None:
        """Remove what came of versions that could not be had whole; that of `kept` is gone on with."""
        for path in self._directory.glob(
            f"{self._manifest.run_id[:RUN_CHARACTERS]}-stage-{stage}-version-*.partial"
        ):
            if not path.name.startswith(f"{kept.name}."):
                with suppress(OSError):
                    path.unlink()

    def _donors(self, stage: int) -> dict[str, tuple[int, ...]]:
        return {
            peer: record.versions
            for peer, record in self._board.view().items()
            if record.stage == stage and record.state == "online"
        }
