"""Coming to hold the weights that the others hold: a snapshot, then the updates since, one by one.

Weights that were restored from a snapshot and brought forward by the updates of its lineage are those of the
members bit for bit. Everything fetched is verified before it is used: a snapshot by its own hash and the
stage's layout, an update by the digest that its round committed and by its place in the chain of lineages.
Lives in the communication loop; weights are touched on the compute thread only, and wholly or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from hivemind.p2p import P2P

from peers.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from peers.compute import Correct, StageCompute, bytes_per_step
from peers.config import UserError
from peers.engine import Engine, JobPriority
from peers.limits import LIMITS
from peers.metrics import Metrics
from peers.pace import SAY_EVERY_S, Pace, TransferNotes
from peers.priors import Priors
from peers.run_files import RunFiles, stage_name
from peers.snapshots import Snapshots
from peers.traffic import Traffic
from peers.transfer import TransferError, fetch_snapshot
from peers.update_fetch import (
    CatchUpError,
    Donors,
    Fetched,
    LineageError,
    UpdateFetcher,
    UpdateMissing,
)
from peers.update_log import UpdateLog
from peers.updates import Update, UpdateError, apply_update
from swarm.gradient.outer_config import interval
from swarm.manifest import RunManifest

__all__ = ["CatchUp", "CatchUpError", "LineageError", "RestoreError", "UpdateMissing"]

logger = logging.getLogger("swarm_peer.catchup")
STATE_BYTES_PER_WEIGHT = 16
"""Most bytes of a snapshot per weight: fp32 weight and two moments are 12."""
VERSIONS_TRIED = 4
"""Versions of donors that are tried, from the newest on, before the initial state is taken."""
STATE_HEAD_BYTES = 64 * 1024 * 1024


class RestoreError(CatchUpError):
    """A version that nobody could give; the message lists everything that was tried."""


class Progress(Protocol):
    """Told after every update that was applied."""

    def __call__(self, version: int, until: int, seconds_left: float) -> None:
        """`version` is held now, `until` is wanted."""


class CatchUp:
    """Brings one peer's stage to a version. held: version and lineage in memory by its doing, None before.

    `held` is right also after an error or a cancellation midway. pace: of the updates that were fetched; before
    the first one what a snapshot's transfer, or else this peer's own cap, lets expect.
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        compute: StageCompute,
        engine: Engine,
        p2p: P2P,
        files: RunFiles,
        store: CheckpointStore,
        updates: UpdateLog,
        snapshots: Snapshots,
        traffic: Traffic,
        metrics: Metrics,
        note: Callable[[str], None],
        priors: Priors | None = None,
    ) -> None:
        self.held: tuple[int, str] | None = None
        self.pace = Pace()
        self._said_at: float | None = None
        self._priors = priors
        self._manifest, self._stage, self._compute, self._engine = manifest, stage, compute, engine
        self._p2p, self._files, self._store, self._snapshots = p2p, files, store, snapshots
        self._updates, self._traffic, self._metrics, self._note = updates, traffic, metrics, note
        self._update_bytes = bytes_per_step(
            compute.compressor, interval(compute.outer.config) if compute.outer is not None else 1
        )
        if traffic.download.limit_mbps is not None:
            self.pace.expect(self._update_bytes, traffic.download.limit_mbps)
        self._fetcher = UpdateFetcher(
            p2p=p2p,
            run_id=manifest.run_id,
            stage=stage,
            elements=compute.trainable.numel,
            updates=updates,
            traffic=traffic,
            metrics=metrics,
            note=note,
        )

    # -- a snapshot --------------------------------------------------------------------------------------

    async def restore(
        self, version: int, donors: Mapping[str, Iterable[int]], *, use_own: bool = True
    ) -> str:
        """Make the compute hold exactly this version; returns its lineage.

        donors: peer -> versions it says it serves; those that name this one are asked first. use_own: whether
        this peer's own checkpoint may be taken. Raises RestoreError listing what was tried, TransferError if the
        disk cannot take it; the weights are as before then.
        """
        if version == 0:
            return await self._initial()
        tried: list[str] = []
        if use_own:
            try:
                own = await asyncio.to_thread(self._store.load, self._stage, self._manifest.run_id, version)
            except CheckpointError as error:
                own = None
                tried.append(str(error))
            self._snapshots.report_damaged()
            if own is None:
                tried.append(f"no whole checkpoint of it in {self._store.directory}")
            elif not (why := await self._load(own)):
                self._note(f"loaded version {version} of stage {self._stage} from this peer's checkpoint")
                return own.lineage
            else:
                tried.append(f"{own.path}: {why}")
        return await self._from_donors(version, donors, tried)

    async def newest(
        self, limit_version: int, donors: Mapping[str, Iterable[int]], *, use_own: bool = True
    ) -> tuple[int, str]:
        """Hold the newest state that can be had anywhere up to this version: own, a donor's, the initial one.

        use_own: False if this peer's own checkpoints are of a lineage that the stage gave up; they are set aside
        then. Returns version and lineage. Raises as `restore` does, for the initial state.
        """
        run_id = self._manifest.run_id
        own = await asyncio.to_thread(self._store.versions, self._stage, run_id) if use_own else []
        offered = sorted({v for versions in donors.values() for v in versions if v <= limit_version})
        own = [version for version in own if version <= limit_version]
        # Not all that donors name: each may cost a minute of waiting, and they may name what they like.
        for version in sorted({*own, *offered[-VERSIONS_TRIED:], 0}, reverse=True):
            try:
                lineage = await self.restore(version, donors, use_own=use_own)
            except RestoreError as error:
                self._note(f"warning: {error}")
                continue
            if not use_own:
                await self._snapshots.abandon_all(but=version)
                self._updates.drop_from(0)
            return version, lineage
        return 0, await self._initial()

    async def _from_donors(self, version: int, donors: Mapping[str, Iterable[int]], tried: list[str]) -> str:
        known = {peer: set(versions) for peer, versions in donors.items()}
        candidates = sorted(known, key=lambda peer: version not in known[peer])
        run_id = self._manifest.run_id
        path = self._store.path(version, self._stage, run_id)
        limit = STATE_BYTES_PER_WEIGHT * self._compute.trainable.numel + STATE_HEAD_BYTES
        while candidates:
            notes = TransferNotes(self._note, f"version {version} of stage {self._stage}")
            try:
                donor = await fetch_snapshot(
                    self._p2p,
                    candidates,
                    run_id,
                    version,
                    self._stage,
                    path,
                    progress=notes,
                    traffic=self._traffic,
                    limit_bytes=limit,
                )
            except TransferError as error:
                if isinstance(error.__cause__, OSError):
                    raise  # this peer's own disk: nobody else could help
                tried.append(str(error))
                break
            candidates.remove(donor)
            self.pace.expect(self._update_bytes, notes.mbps)
            checkpoint = await asyncio.to_thread(self._store.load, self._stage, run_id, version)
            self._snapshots.report_damaged()
            why = "it is damaged" if checkpoint is None else await self._load(checkpoint)
            if checkpoint is not None and not why:
                self._snapshots.adopt(path, version, checkpoint.lineage)
                return checkpoint.lineage
            tried.append(f"{donor}: what it gave cannot be used: {why}")
            logger.error("version %d from %s cannot be used: %s", version, donor, why)
            with suppress(OSError):
                await asyncio.to_thread(path.unlink, missing_ok=True)
        raise self._nobody(version, tried if candidates or donors else [*tried, "nobody offers it"])

    def _nobody(self, version: int, tried: list[str]) -> RestoreError:
        listed = "".join(f"\n  {line}" for line in tried)
        return RestoreError(f"cannot get version {version} of stage {self._stage}:{listed}")

    async def _initial(self) -> str:
        path = self._files.artifacts / stage_name(self._stage)
        try:
            try:
                state = await asyncio.to_thread(self._compute.initial_state, path)
            except OSError:
                await self._files.ensure(stage_name(self._stage), TransferNotes(self._note, path.name))
                state = await asyncio.to_thread(self._compute.initial_state, path)
            await self._engine.submit(JobPriority.ROUND, self._take, state, 0, "")
        except (ValueError, OSError, KeyError, UserError) as error:
            raise self._nobody(0, [f"the run's initial state: {error}"]) from error
        return ""

    async def _load(self, checkpoint: Checkpoint) -> str:
        """Take over a checkpoint; "" or why it cannot be."""
        if why := self._snapshots.refuses(checkpoint.info):
            return why
        try:
            await self._engine.submit(
                JobPriority.ROUND, self._take, checkpoint.tensors, checkpoint.version, checkpoint.lineage
            )
        except ValueError as error:
            return str(error)
        return ""

    def _take(self, tensors: Mapping[str, object], version: int, lineage: str) -> None:
        """On the compute thread, so that `held` changes with the weights whoever cancels whom."""
        self._compute.load_state(tensors)  # type: ignore[arg-type]
        self.held = (version, lineage)

    # -- the updates since -------------------------------------------------------------------------------

    async def apply_updates(
        self,
        version: int,
        lineage: str,
        *,
        until: int,
        donors: Donors,
        newest: int = 0,
        on_progress: Progress | None = None,
    ) -> tuple[int, str]:
        """From (version, lineage), which the compute holds, to version `until`; returns what is held then.

        newest: the version that others are at, if that is more. donors: peer ids (or a mapping by them, or a
        function that says who there is now). The next update comes while one is applied. Raises LineageError if
        the stage went on from other weights, UpdateMissing if nobody has the next update, TransferError if the
        disk cannot take it; `held` says how far it came.
        """
        self.held = (version, lineage)
        newest = max(newest, until)
        if newest > version and self._said_at is None:
            self._said_at = time.monotonic()
        ahead: asyncio.Task[Fetched] | None = None
        try:
            while version < until:
                if ahead is None:
                    ahead = asyncio.create_task(self._fetcher.fetch(version, lineage, newest, donors))
                fetched, ahead = await ahead, None
                if version + 1 < until:
                    after = fetched.update.next_lineage
                    ahead = asyncio.create_task(self._fetcher.fetch(version + 1, after, newest, donors))
                began = time.monotonic()
                version, lineage = await self._apply(fetched)
                now = time.monotonic()
                if fetched.nbytes:
                    self.pace.measured(fetched.nbytes, fetched.seconds, now - began)
                if on_progress is not None:
                    on_progress(version, until, (until - version) * self.pace.seconds_per_update)
                self._say(version, newest, now)
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
        return version, lineage

    def _say(self, version: int, newest: int, now: float) -> None:
        if version >= newest:
            self._said_at = None
        elif self._said_at is not None and now - self._said_at > SAY_EVERY_S:
            self._said_at = now
            left_s = (newest - version) * self.pace.seconds_per_update
            self._note(
                f"catching up: version {version} of {newest}, updates of {self.pace.bytes_per_update / 1e6:.1f} MB "
                f"at {self.pace.mbps:.1f} Mbit/s, {left_s:.0f} s left"
            )

    async def _apply(self, fetched: Fetched) -> tuple[int, str]:
        update = fetched.update
        after = (update.step + 1, update.next_lineage)

        correct = await self._correct_by(update)

        def apply() -> None:
            apply_update(self._compute, update, correct)
            self.held = after

        try:
            await self._engine.submit(JobPriority.ROUND, apply)
        except UpdateError as error:
            raise UpdateMissing(f"the update of step {update.step} cannot be applied: {error}") from error
        self._metrics.update("applied")
        return after

    async def _correct_by(self, update: Update) -> Correct | None:
        """How the members corrected this update. Raises UpdateMissing if nobody gives the prior they did it by."""
        if not update.corrector:
            return None
        try:
            if self._priors is None:
                raise TransferError("this peer takes no priors")
            return await self._priors.correct_by(update.corrector, LIMITS.update_wait_s)
        except TransferError as error:
            raise UpdateMissing(f"the update of step {update.step} cannot be corrected: {error}") from error
