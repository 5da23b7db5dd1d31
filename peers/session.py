"""What a peer does from start to end: find the run, fetch its files, hold its stage, say goodbye.

Runs in the communication loop. Whatever is opened here is closed here, in reverse order, whether the run
ends, the user leaves or something fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P

from dht.dial import describe_results, dial_all
from dht.host import host_died, start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import PeerRecord
from peers.announcer import Announcer
from peers.checkpoint import CheckpointStore
from peers.config import PeerConfig, UserError
from peers.engine import Engine
from peers.fileserver import FileServer
from peers.frames import Frame
from peers.lifecycle import Lifecycle
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.link import Hello, Link
from peers.links import Links, short
from peers.metrics import Metrics
from peers.metrics_server import MetricsServer
from peers.payloads import largest_payload
from peers.prepare import prepare_stage
from peers.reporting import Reporter
from peers.run_files import RunFiles
from peers.snapshots import Snapshots
from peers.status import StatusBoard
from peers.traffic import Traffic
from peers.trainer import Trainer
from peers.transfer import fetch_manifest
from swarm.manifest import ManifestError, RunManifest

logger = logging.getLogger("swarm_peer.session")
TICK_S = 0.1
STATUS_S = 1.0
REDIAL_LOST_S = 10.0
"""A peer that was lost is dialled again this much later, while its record lives."""


class Session:
    """One run of one peer."""

    def __init__(self, config: PeerConfig, engine: Engine, reporter: Reporter) -> None:
        self._config, self._engine, self._reporter = config, engine, reporter
        self.exit_reason = "done"
        self._lifecycle = Lifecycle()
        self._traffic = Traffic()
        self._metrics = Metrics(self._traffic)
        self._trainer: Trainer | None = None
        self._links: Links | None = None
        self._board: Noticeboard | None = None
        self._addresses: tuple[str, ...] = ()
        self._snapshots: Snapshots | None = None
        self._linked: set[str] = set()
        self._lost: dict[str, float] = {}
        self._waiting_for = ""
        self._refreshing: asyncio.Task[bool] | None = None
        self._status = StatusBoard(config.stage, self._lifecycle, self._traffic, self._metrics, engine)

    async def run(self) -> None:
        """Until the run has ended and was served, or this task is cancelled. Raises what the user must know."""
        async with AsyncExitStack() as stack:
            identity = Identity.load_or_create(self._config.identity)
            stack.callback(identity.close)
            stack.enter_context(identity.lock())
            p2p = await start_host(identity.path, self._config.listen, self._config.announce or None)
            stack.push_async_callback(stop_host, p2p)
            self._addresses = (await visible_addresses(p2p))[:16]
            good = await self._dial(p2p)
            manifest, directory = await self._manifest(p2p, good)
            self._check_stage(manifest)
            board = await Noticeboard.create(p2p, identity, good, manifest.run_id)
            self._board = board
            stack.push_async_callback(board.close)
            self._refuse_late_join(board)
            server = await MetricsServer.start(
                self._config.metrics_host,
                self._config.metrics_port,
                self._metrics.registry,
                self._status.snapshot,
            )
            stack.push_async_callback(server.close)
            self._reporter.note(f"metrics and status are served at {server.url}")
            files_server = FileServer(p2p, self._traffic)
            files_server.add_run(manifest, directory / "artifacts")
            await files_server.start()
            stack.push_async_callback(files_server.close)
            self._status.identify(identity.peer_id, manifest, server.url)
            holders = [address.rpartition("/")[2] for address in good]
            announcer = Announcer(
                board, identity, manifest, self._config.stage, self._addresses, self._lifecycle, self._status
            )
            files = RunFiles(manifest, directory, p2p, lambda: self._holders(holders), self._traffic)
            stack.callback(lambda: self._reporter.summary(self._status.summary(self.exit_reason)))
            async with asyncio.TaskGroup() as tasks:
                stack_tasks = [
                    board.start(tasks),
                    tasks.create_task(self._metrics.watch_loop()),
                    tasks.create_task(self._report()),
                    tasks.create_task(self._watch_host(p2p)),
                ]
                try:
                    if self._config.stage is None:
                        await self._serve(announcer, manifest)
                    else:
                        await self._train(
                            p2p, board, announcer, identity, manifest, files, files_server, tasks
                        )
                except asyncio.CancelledError:
                    raise
                except BaseException:
                    self.exit_reason = "failed"
                    raise
                finally:
                    await self._leave(announcer)
                    for task in stack_tasks:
                        task.cancel()

    # -- finding the run -------------------------------------------------------------------------------------

    async def _dial(self, p2p: P2P) -> list[str]:
        """Addresses of initial peers that answer. Raises UserError with every address's cause if none does."""
        addresses = self._config.initial_peers
        if not addresses:
            return []
        self._reporter.note(f"dialling {len(addresses)} initial peer{'s' * (len(addresses) > 1)}")
        results = await dial_all(p2p, addresses, min(15.0, self._config.join_deadline_s))
        good = [result.address for result in results if result.ok]
        if not good:
            raise UserError(f"none of the initial peers can be reached:\n{describe_results(results)}")
        for result in results:
            if not result.ok:
                self._reporter.note(f"warning: {result}")
        return good

    async def _manifest(self, p2p: P2P, good: list[str]) -> tuple[RunManifest, Path]:
        """The run's verified manifest and the folder of its files here."""
        if self._config.run_dir is not None:
            path = self._config.run_dir / "manifest.yaml"
            try:
                manifest = await asyncio.to_thread(RunManifest.load, path)
            except FileNotFoundError as error:
                raise UserError(f"{path} does not exist: make a run with `swarm-peer init`") from error
            manifest.verify(self._config.run)
            return self._check_protocol(manifest), self._config.run_dir
        if not good:
            raise UserError(
                "--initial-peers is missing: without a run's folder, the run comes from its peers"
            )
        errors: list[str] = []
        for address in good:
            peer = address.rpartition("/")[2]
            try:
                data = await fetch_manifest(p2p, peer, self._config.run, LIMITS.fetch_idle_s, self._traffic)
                manifest = await asyncio.to_thread(RunManifest.from_bytes, data)
                manifest.verify(self._config.run)
            except (UserError, ManifestError) as error:
                errors.append(str(error))
                continue
            directory = self._config.data_dir.expanduser() / manifest.run_id
            directory.mkdir(parents=True, exist_ok=True)
            self._reporter.note(f"run {manifest.name!r} ({manifest.run_id}), {manifest.model.stages} stages")
            return self._check_protocol(manifest), directory
        raise UserError("\n".join(errors))

    def _check_protocol(self, manifest: RunManifest) -> RunManifest:
        if manifest.protocol != PROTOCOL_VERSION:
            raise UserError(
                f"run {manifest.name!r} speaks protocol version {manifest.protocol}, this program speaks "
                f"{PROTOCOL_VERSION}: install a version of swarm-peer that speaks {manifest.protocol}"
            )
        return manifest

    def _check_stage(self, manifest: RunManifest) -> None:
        stage = self._config.stage
        if stage is not None and not 0 <= stage < manifest.model.stages:
            raise UserError(
                f"--stage {stage}: run {manifest.name!r} has stages 0 to {manifest.model.stages - 1}"
            )

    def _refuse_late_join(self, board: Noticeboard) -> None:
        if self._config.stage is None:
            return
        training = [r for r in board.view().values() if r.training and r.state == "online"]
        if training:
            step = max(record.step for record in training)
            raise UserError(
                f"the run is at step {step} already: joining a running swarm is not supported yet; "
                f"join before its first step, or ask the owner when the next run starts (records of peers that were "
                f"killed expire within 30 s)"
            )

    async def _holders(self, initial: list[str]) -> list[str]:
        """Who may have a file of the run: the initial peers, then everybody in view."""
        board = self._board
        seen = [peer for peer, record in board.view().items() if record.state != "offline"] if board else []
        return list(dict.fromkeys([*initial, *seen]))

    # -- the two roles ----------------------------------------------------------------------------------------

    async def _serve(self, announcer: Announcer, manifest: RunManifest) -> None:
        """A seed: keep the noticeboard and the run's files until told to leave."""
        self._lifecycle.go("syncing")
        self._lifecycle.go("online")
        await announcer.point_to_manifest()
        self._reporter.ready(self._addresses, manifest.model.stages)
        while True:
            await announcer.publish()
            await asyncio.sleep(5.0)

    async def _train(
        self,
        p2p: P2P,
        board: Noticeboard,
        announcer: Announcer,
        identity: Identity,
        manifest: RunManifest,
        files: RunFiles,
        server: FileServer,
        tasks: asyncio.TaskGroup,
    ) -> None:
        stage = self._config.stage
        if stage is None:
            raise ValueError("a stage peer needs a stage")
        self._lifecycle.go("syncing")
        await announcer.publish()
        compute, boundaries = await prepare_stage(
            self._config, manifest, stage, files, self._engine, self._reporter.note
        )
        links = Links(
            p2p,
            Hello(run=manifest.run_id, stage=stage, incarnation=identity.incarnation),
            self._traffic,
            on_frame=self._on_frame,
            on_up=self._on_up,
            on_lost=self._on_lost,
        )
        links.payload_limit = largest_payload(manifest)
        self._links = links
        directory = self._config.checkpoint_dir or files.directory / "checkpoints" / identity.peer_id[-8:]
        snapshots = Snapshots(
            manifest=manifest,
            stage=stage,
            compute=compute,
            engine=self._engine,
            store=CheckpointStore(directory, self._config.keep_checkpoints),
            server=server,
            metrics=self._metrics,
            note=self._reporter.note,
        )
        trainer = Trainer(
            manifest=manifest,
            stage=stage,
            compute=compute,
            boundaries=boundaries,
            engine=self._engine,
            links=links,
            files=files,
            tasks=tasks,
            on_snapshot=snapshots.take,
            note=self._reporter.note,
            trace_ledger=self._config.trace_ledger,
        )
        self._trainer = announcer.trainer = trainer
        self._snapshots = announcer.snapshots = snapshots
        self._status.trainer, self._status.links = trainer, links
        self._metrics.links = _OpenLinks(links)
        try:
            await links.start()
            self._lifecycle.go("online")
            self._reporter.ready(self._addresses, manifest.model.stages)
            self._reporter.note(f"online as a replica of stage {stage}; waiting for the others")
            await self._work(trainer, links, board, announcer)
        finally:
            await links.close()

    async def _work(self, trainer: Trainer, links: Links, board: Noticeboard, announcer: Announcer) -> None:
        """Tick until the run has ended and its last state was served for a while."""
        published, refreshed, was_training = float("-inf"), float("-inf"), False
        served_until, snapshots = float("inf"), self._snapshots
        while time.monotonic() < served_until:
            if trainer.failure.done():
                trainer.failure.result()
            view = board.view()
            self._want(links, view, trainer)
            online = self._online(view, trainer)
            trainer.tick(online)
            if not trainer.started.is_set():
                self._say_who_is_missing(online, trainer.manifest.min_replicas)
            if trainer.started.is_set() and not was_training:
                self._reporter.note("the run has started")
            if not was_training and time.monotonic() - refreshed > LIMITS.start_refresh_s:
                refreshed = (
                    time.monotonic()
                )  # the start waits for the last peer to be seen by the first source
                self._refreshing = asyncio.create_task(board.refresh())
            is_news = trainer.started.is_set() != was_training
            was_training = trainer.started.is_set()
            if is_news or time.monotonic() - published > 5.0:
                published = time.monotonic()
                await announcer.publish()
            if (
                trainer.finished.is_set()
                and served_until == float("inf")
                and not (snapshots and snapshots.is_saving)
            ):
                served_until = time.monotonic() + self._config.serve_after_s
                self._status.is_finished = True
                self._reporter.note(
                    f"the run is finished; serving the final weights for {self._config.serve_after_s / 60:.0f} minutes"
                )
                await announcer.publish()
            await asyncio.sleep(TICK_S)

    def _want(self, links: Links, view: dict[str, PeerRecord], trainer: Trainer) -> None:
        """Ask for links with everybody in the own stage and the two beside it."""
        for peer, record in view.items():
            stage = record.stage
            was_lost = time.monotonic() - self._lost.get(peer, float("-inf")) < REDIAL_LOST_S
            is_near = stage is not None and abs(stage - trainer.stage) <= 1
            if record.state == "online" and stage is not None and is_near and not was_lost:
                links.want(peer, stage, record.addresses)

    def _say_who_is_missing(self, online: list[list[str]], wanted: int) -> None:
        missing = ", ".join(
            f"stage {stage} has {len(peers)} of {wanted}"
            for stage, peers in enumerate(online)
            if len(peers) < wanted
        )
        if missing != self._waiting_for:
            self._waiting_for = missing
            if missing:
                self._reporter.note(f"waiting for peers: {missing}")

    def _online(self, view: dict[str, PeerRecord], trainer: Trainer) -> list[list[str]]:
        online: list[list[str]] = [[] for _ in range(trainer.stages)]
        online[trainer.stage].append(trainer.me)
        for peer, record in view.items():
            stage = record.stage
            is_ready = record.state == "online" and not record.training and peer != trainer.me
            if is_ready and stage is not None and stage < trainer.stages:
                online[stage].append(peer)
        return online

    # -- frames and losses ----------------------------------------------------------------------------------

    def _on_frame(self, link: Link, frame: Frame) -> None:
        if self._trainer is not None:
            self._trainer.on_frame(link, frame)

    def _on_up(self, link: Link) -> None:
        self._linked.add(link.peer)
        self._lost.pop(link.peer, None)
        if self._trainer is not None:
            self._trainer.on_up(link)

    def _on_lost(self, peer: str, reason: str) -> None:
        links, trainer = self._links, self._trainer
        if links is None or trainer is None or trainer.finished.is_set():
            return
        stage = links.neighbours[peer].stage
        self._lost[peer] = time.monotonic()
        if peer in self._linked:
            self._linked.discard(peer)
            what = "left" if reason == "left" else f"is lost ({reason})"
            self._reporter.note(f"{short(peer)} of stage {stage} {what}")
        trainer.on_lost(peer, stage)

    async def _leave(self, announcer: Announcer) -> None:
        """Finish writing, and say goodbye on the noticeboard, within the drain's time."""
        self._lifecycle.go("draining")
        if self._snapshots is not None:
            await self._snapshots.settle(LIMITS.drain_s / 2)
        self._lifecycle.go("offline")
        try:
            async with asyncio.timeout(2.0):
                await announcer.publish()
        except (TimeoutError, RuntimeError) as error:
            logger.debug("could not announce the departure: %s", error)

    # -- telling ------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            self._reporter.status(self._status.snapshot())
            await asyncio.sleep(STATUS_S)

    async def _watch_host(self, p2p: P2P) -> None:
        death = await host_died(p2p)
        raise RuntimeError(
            f"the libp2p daemon (p2pd) ended with code {death.returncode}: {' '.join(death.last_output[-3:])}"
        )


class _OpenLinks:
    """The links that are open whenever somebody looks."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def __iter__(self) -> Any:
        return iter(self._links.open_links())
