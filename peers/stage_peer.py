"""The stage role of a peer: prepare the stage, keep links, train, serve the last state, leave.

Whatever is opened here is closed here. Runs in the communication loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from hivemind.p2p import P2P

from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PeerRecord
from peers.anchor_offers import AnchorOffers
from peers.announcer import Announcer
from peers.catchup import CatchUp
from peers.checkpoint import CheckpointStore
from peers.config import PeerConfig
from peers.corrections import Corrections
from peers.engine import Engine
from peers.fileserver import FileServer
from peers.frames import Frame
from peers.grants import Grants
from peers.heap import settle
from peers.joining import Standing
from peers.leader_priors import LeaderPriors
from peers.lifecycle import Lifecycle
from peers.limits import LIMITS
from peers.link import Hello, Link
from peers.links import ANEW, LEFT, Links, short
from peers.metrics import Metrics
from peers.payloads import largest_payload
from peers.prepare import codec_of, prepare_stage
from peers.prior_sweep import sweep_priors
from peers.prior_trust import PriorTrust
from peers.priors import Priors
from peers.reporting import Reporter
from peers.run_files import RunFiles
from peers.snapshots import Snapshots
from peers.stage_view import StageView
from peers.starting import Held
from peers.status import StatusBoard
from peers.traffic import Traffic
from peers.trainer import Trainer
from peers.update_log import UpdateLog
from swarm.activation.config import BasisConfig
from swarm.activation.versions import VersionedCodec
from swarm.manifest import RunManifest

logger = logging.getLogger("swarm_peer.session")
TICK_S = 0.1
PUBLISH_S = 5.0


class StagePeer:
    """One stage of one run, held by this process."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        stage: int,
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
        metrics: Metrics,
        status: StatusBoard,
        reporter: Reporter,
        addresses: tuple[str, ...],
        grants: Grants,
    ) -> None:
        self._grants = grants
        self._config, self._stage, self._manifest, self._identity = config, stage, manifest, identity
        self._p2p, self._board, self._announcer = p2p, board, announcer
        self._files, self._server, self._engine = files, server, engine
        self._lifecycle, self._traffic, self._metrics = lifecycle, traffic, metrics
        self._status, self._reporter, self._addresses = status, reporter, addresses
        self._linked: set[str] = set()
        self._waiting_for = ""
        self._refreshing: asyncio.Task[bool] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._links: Links
        self._trainer: Trainer
        self._priors: Priors
        self._leader_priors: LeaderPriors | None = None
        self._snapshots: Snapshots
        self._updates: UpdateLog

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Until the run has ended and its last state was served for a while. Raises what the user must know."""
        self._lifecycle.go("syncing")
        await self._announcer.publish()
        note = self._reporter.note
        compute, boundaries = await prepare_stage(
            self._config, self._manifest, self._stage, self._files, self._engine, note
        )
        self._links = links = Links(
            self._p2p,
            Hello(run=self._manifest.run_id, stage=self._stage, incarnation=self._identity.incarnation),
            self._traffic,
            on_frame=self._on_frame,
            on_up=self._on_up,
            on_lost=self._on_lost,
        )
        links.payload_limit = largest_payload(self._manifest)
        directory = self._config.checkpoint_dir or (
            self._files.directory / "checkpoints" / self._identity.peer_id[-8:]
        )
        store = CheckpointStore(directory, self._config.keep_checkpoints)
        self._updates = UpdateLog(
            directory=directory / "updates",
            run_id=self._manifest.run_id,
            stage=self._stage,
            server=self._server,
            metrics=self._metrics,
            note=note,
        )
        self._snapshots = Snapshots(
            manifest=self._manifest,
            stage=self._stage,
            compute=compute,
            engine=self._engine,
            store=store,
            server=self._server,
            metrics=self._metrics,
            note=note,
            updates=self._updates,
        )
        await asyncio.to_thread(sweep_priors, directory / "priors")
        await self._updates.start()
        await self._snapshots.start()
        await self._snapshots.checked()
        codecs = {
            codec.boundary: codec
            for codec in (boundaries.incoming, boundaries.outgoing)
            if isinstance(codec, VersionedCodec)
        }
        self._priors = self._announcer.priors = self._status.priors = Priors(
            manifest=self._manifest,
            stage=self._stage,
            codecs=codecs,
            codec_of=lambda boundary, prior: codec_of(self._config, self._files, boundary, prior),
            corrections=Corrections(
                self._manifest.corrector, self._stage, compute.trainable, self._config.device
            ),
            board=self._board,
            p2p=self._p2p,
            server=self._server,
            directory=directory / "priors",
            traffic=self._traffic,
            tasks=tasks,
            note=note,
            trust=PriorTrust(
                self._manifest,
                self._board,
                lambda: self._grants.anchors,
                lambda: self._grants.former,
                stage=self._stage,
                is_linked=lambda peer: peer == links.me or links.get(peer) is not None,
            ),
            is_linked=lambda peer: links.get(peer) is not None,
        )
        catchup = CatchUp(
            manifest=self._manifest,
            stage=self._stage,
            compute=compute,
            engine=self._engine,
            p2p=self._p2p,
            files=self._files,
            store=store,
            updates=self._updates,
            snapshots=self._snapshots,
            traffic=self._traffic,
            metrics=self._metrics,
            note=note,
            priors=self._priors,
        )
        self._trainer = Trainer(
            manifest=self._manifest,
            stage=self._stage,
            compute=compute,
            boundaries=boundaries,
            engine=self._engine,
            links=links,
            files=self._files,
            tasks=tasks,
            catchup=catchup,
            updates=self._updates,
            view=StageView(self._board, self._stage, links.me),
            on_snapshot=self._snapshots.take,
            note=note,
            priors=self._priors,
            trace_ledger=self._config.trace_ledger,
        )
        codec = self._manifest.codec
        if self._manifest.anchors.source == "leaders" and isinstance(codec, BasisConfig):
            self._leader_priors = LeaderPriors(
                manifest=self._manifest,
                codec=codec,
                stage=self._stage,
                codecs=codecs,
                board=self._board,
                p2p=self._p2p,
                files=self._files,
                server=self._server,
                offers=AnchorOffers(
                    run_id=self._manifest.run_id,
                    identity=self._identity,
                    board=self._board,
                    server=self._server,
                    directory=directory / "priors",
                ),
                directory=directory / "rows",
                traffic=self._traffic,
                tasks=tasks,
                note=note,
                is_linked=lambda peer: links.get(peer) is not None,
                count=self._priors.count,
            )
        self._announcer.trainer, self._announcer.snapshots = self._trainer, self._snapshots
        self._status.trainer, self._status.links = self._trainer, links
        self._metrics.links = _OpenLinks(links)
        settle()
        try:
            await links.start()
            self._lifecycle.go("online")
            self._reporter.ready(self._addresses, self._manifest.model.stages)
            note(f"online as a replica of stage {self._stage}; waiting for the others")
            await self._work()
        finally:
            for task in (self._refreshing, self._publishing):
                if task is not None:
                    task.cancel()
            await self._keep_state()
            await links.close()

    async def _keep_state(self) -> None:
        """Write what is not written yet, within half of the drain's time: the swarm may be restarted from it."""
        trainer = self._trainer
        try:
            async with asyncio.timeout(LIMITS.drain_s / 2):
                if trainer.is_voting:
                    await self._snapshots.take_now(lambda: (trainer.version, trainer.averaging.core.lineage))
                await self._snapshots.settle(LIMITS.drain_s / 2)
                await self._updates.settle(LIMITS.drain_s / 2)
        except TimeoutError:
            self._reporter.note("warning: the disk is too slow: the last state is not kept")

    async def _work(self) -> None:
        """Tick until the run has ended and its last state was served for a while."""
        trainer, board = self._trainer, self._board
        published, refreshed, said = float("-inf"), float("-inf"), Standing.WAITING
        served_until, has_started, priors = float("inf"), False, self._priors.names
        while time.monotonic() < served_until:
            if trainer.failure.done():
                trainer.failure.result()
            view = board.view()
            self._want(view)
            self._priors.tick()
            if self._leader_priors is not None:
                self._leader_priors.tick(trainer.version, is_voting=trainer.is_voting)
            held = self._held(view)
            is_waiting = trainer.membership.standing is Standing.WAITING
            # Records of peers that train may be those of a swarm that was killed: they expire.
            is_under_way = any(record.training for record in view.values() if record.state == "online")
            trainer.tick(held, may_start=not is_under_way)
            if is_waiting:
                self._say_who_is_missing([] if is_under_way else held, trainer.manifest.min_replicas)
                is_refreshed = self._refreshing is None or self._refreshing.done()
                if time.monotonic() - refreshed > LIMITS.start_refresh_s and is_refreshed:
                    # The start waits for the last peer to be seen by the first source.
                    refreshed = time.monotonic()
                    self._refreshing = asyncio.create_task(board.refresh())
            is_news = trainer.membership.standing is not said or self._priors.names != priors
            priors = self._priors.names
            if is_news and trainer.membership.standing is Standing.VOTING and not has_started:
                has_started = True
                self._reporter.note("the run has started")
            said = trainer.membership.standing
            if is_news:
                published = float("-inf")
            if time.monotonic() - published > PUBLISH_S and self._may_publish():
                published = time.monotonic()
                # Beside the ticks: a noticeboard that does not answer must not hold up the rounds.
                self._publishing = asyncio.create_task(self._announcer.publish())
            is_over = trainer.finished.is_set() and served_until == float("inf")
            if is_over and not self._snapshots.is_saving:
                served_until = time.monotonic() + self._config.serve_after_s
                self._status.is_finished = True
                self._reporter.note(
                    f"the run is finished; serving the final weights for {self._config.serve_after_s / 60:.0f} minutes"
                )
                await self._announcer.publish()
            await asyncio.sleep(TICK_S)

    def _may_publish(self) -> bool:
        """Whether the last record is published. Raises what was wrong with it."""
        if self._publishing is None:
            return True
        if self._publishing.done():
            self._publishing.result()
        return self._publishing.done()

    def _want(self, view: dict[str, PeerRecord]) -> None:
        """Ask for links with everybody in the own stage and the two beside it."""
        for peer, record in view.items():
            stage = record.stage
            is_near = stage is not None and abs(stage - self._stage) <= 1
            if record.state == "online" and stage is not None and is_near:
                self._links.want(peer, stage, record.addresses, record.incarnation)

    def _say_who_is_missing(self, held: Held, wanted: int) -> None:
        missing = ", ".join(
            f"stage {stage} has {len(peers)} of {wanted}"
            for stage, peers in enumerate(held)
            if len(peers) < wanted
        )
        if missing != self._waiting_for:
            self._waiting_for = missing
            if missing:
                self._reporter.note(f"waiting for peers: {missing}")

    def _held(self, view: dict[str, PeerRecord]) -> list[dict[str, tuple[int, ...]]]:
        """Peers that are ready to start, per stage, with the versions they can serve."""
        held: list[dict[str, tuple[int, ...]]] = [{} for _ in range(self._manifest.model.stages)]
        held[self._stage][self._links.me] = tuple(self._snapshots.served)
        for peer, record in view.items():
            stage = record.stage
            is_ready = record.state == "online" and not record.training and peer != self._links.me
            if is_ready and stage is not None and stage < len(held):
                held[stage][peer] = record.versions
        return held

    # -- frames and losses ----------------------------------------------------------------------------------

    def _on_frame(self, link: Link, frame: Frame) -> None:
        self._trainer.on_frame(link, frame)

    def _on_up(self, link: Link) -> None:
        self._linked.add(link.peer)
        self._trainer.on_up(link)

    def _on_lost(self, peer: str, reason: str) -> None:
        trainer = self._trainer
        stage = self._links.neighbours[peer].stage
        is_news = peer in self._linked and not trainer.finished.is_set()
        self._linked.discard(peer)
        if is_news:
            what = "left" if reason == LEFT else f"is lost ({reason})"
            self._reporter.note(f"{short(peer)} of stage {stage} {what}")
        trainer.on_lost(peer, stage, has_resigned=reason in (LEFT, ANEW))


class _OpenLinks:
    """The links that are open whenever somebody looks."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.open_links())
