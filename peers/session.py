"""What a peer does from start to end: find the run, fetch its files, hold its stage, say goodbye.

Runs in the communication loop. Whatever is opened here is closed here, in reverse order, whether the run
ends, the user leaves or something fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from pathlib import Path

from hivemind.p2p import P2P

from dht.host import start_host, stop_host, visible_addresses
from dht.identity import Identity
from dht.noticeboard import Noticeboard
from dht.records import Role
from peers.anchor import AnchorPeer
from peers.announcer import Announcer
from peers.config import PeerConfig, UserError
from peers.engine import Engine
from peers.fileserver import FileServer
from peers.grants import Grants
from peers.heap import settle
from peers.initial import dial_initial_peers
from peers.joining import thinnest_stage
from peers.lifecycle import Lifecycle
from peers.limits import LIMITS, PROTOCOL_VERSION
from peers.metrics import Metrics
from peers.metrics_server import MetricsServer
from peers.reporting import Reporter
from peers.run_files import RunFiles
from peers.stage_peer import StagePeer
from peers.status import StatusBoard
from peers.supervision import Supervision
from peers.traffic import Traffic
from peers.transfer import fetch_manifest
from swarm.manifest import ManifestError, RunManifest
from swarm.model.formats import has_bf16

logger = logging.getLogger("swarm_peer.session")
STATUS_S = 1.0
AUTO_JITTER_S = 3.0


class Session:
    """One run of one peer."""

    def __init__(self, config: PeerConfig, engine: Engine, reporter: Reporter) -> None:
        self._config, self._engine, self._reporter = config, engine, reporter
        self.exit_reason = "done"
        self._lifecycle = Lifecycle()
        self._traffic = Traffic(config.max_upload_mbps, config.max_download_mbps)
        self._metrics = Metrics(self._traffic)
        self._board: Noticeboard | None = None
        self._addresses: tuple[str, ...] = ()
        self._status = StatusBoard(self._lifecycle, self._traffic, self._metrics, engine)

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
            stage = await self._choose_stage(board, manifest)
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
            role: Role = "anchor" if self._config.is_anchor else "seed" if stage is None else "stage"
            self._status.identify(identity.peer_id, role, stage, manifest, server.url)
            holders = [address.rpartition("/")[2] for address in good]
            announcer = Announcer(
                board, identity, manifest, role, stage, self._addresses, self._lifecycle, self._status
            )
            files = RunFiles(manifest, directory, p2p, lambda: self._holders(holders), self._traffic)
            grants = Grants(
                manifest=manifest,
                directory=directory,
                identity=identity,
                board=board,
                is_seed=role == "seed",
                note=self._reporter.note,
            )
            await grants.look()
            stack.callback(lambda: self._reporter.summary(self._status.summary(self.exit_reason)))
            async with asyncio.TaskGroup() as tasks:
                stack_tasks = [
                    board.start(tasks),
                    tasks.create_task(self._metrics.watch_loop()),
                    tasks.create_task(self._report()),
                    tasks.create_task(grants.run()),
                    tasks.create_task(self._watch_host(p2p)),
                ]
                try:
                    if self._config.is_anchor:
                        await AnchorPeer(
                            config=self._config,
                            manifest=manifest,
                            identity=identity,
                            p2p=p2p,
                            board=board,
                            announcer=announcer,
                            files=files,
                            server=files_server,
                            engine=self._engine,
                            lifecycle=self._lifecycle,
                            traffic=self._traffic,
                            status=self._status,
                            reporter=self._reporter,
                            addresses=self._addresses,
                            grants=grants,
                        ).run()
                    elif stage is None:
                        await self._serve(announcer, manifest)
                    else:
                        await StagePeer(
                            config=self._config,
                            stage=stage,
                            manifest=manifest,
                            identity=identity,
                            p2p=p2p,
                            board=board,
                            announcer=announcer,
                            files=files,
                            server=files_server,
                            engine=self._engine,
                            lifecycle=self._lifecycle,
                            traffic=self._traffic,
                            metrics=self._metrics,
                            status=self._status,
                            reporter=self._reporter,
                            addresses=self._addresses,
                            grants=grants,
                        ).run(tasks)
                except asyncio.CancelledError:
                    if self.exit_reason == "done":  # nobody told it to leave: a task beside this one failed
                        self.exit_reason = "failed"
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
        config = self._config
        return await dial_initial_peers(
            p2p, config.initial_peers, config.join_deadline_s, self._reporter.note
        )

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
            self._say_format(manifest)
            return self._check_protocol(manifest), directory
        raise UserError("\n".join(errors))

    def _say_format(self, manifest: RunManifest) -> None:
        """Say so if stages are computed in another format here than the run's."""
        config, wanted = self._config, manifest.compute
        computes = config.is_anchor or (config.stage is not None and config.compute.is_real)
        if computes and wanted == "bf16" and not has_bf16(config.device):
            self._reporter.note(
                f"stages are computed in fp32 here: {config.device} has no instructions for the run's {wanted}, which "
                "would take many times as long"
            )

    def _check_protocol(self, manifest: RunManifest) -> RunManifest:
        if manifest.protocol != PROTOCOL_VERSION:
            raise UserError(
                f"run {manifest.name!r} speaks protocol version {manifest.protocol}, this program speaks "
                f"{PROTOCOL_VERSION}: install a version of swarm-peer that speaks {manifest.protocol}"
            )
        return manifest

    def _check_stage(self, manifest: RunManifest) -> None:
        stage, span = self._config.stage, self._config.anchor_span
        if span is not None and span[1] >= manifest.model.stages:
            raise UserError(
                f"--stage {span[0]}-{span[1]}: run {manifest.name!r} has stages 0 to {manifest.model.stages - 1}"
            )
        if isinstance(stage, int) and not 0 <= stage < manifest.model.stages:
            raise UserError(
                f"--stage {stage}: run {manifest.name!r} has stages 0 to {manifest.model.stages - 1}"
            )

    async def _choose_stage(self, board: Noticeboard, manifest: RunManifest) -> int | None:
        """The stage to hold: the chosen one, or with `auto` the one with the fewest peers.

        A second look after a random pause: of many who arrive at once, not all take the same stage.
        """
        if self._config.stage != "auto":
            return self._config.stage
        stage, held = 0, [0]
        for pause_s in (0.0, random.uniform(0.5, AUTO_JITTER_S)):
            await asyncio.sleep(pause_s)
            await board.refresh()
            held = [r.stage for r in board.view().values() if r.stage is not None and r.state != "offline"]
            stage = thinnest_stage(manifest.model.stages, held, random.random())
        self._reporter.note(f"--stage auto: stage {stage} has the fewest peers ({held.count(stage)})")
        return stage

    async def _holders(self, initial: list[str]) -> list[str]:
        """Who may have a file of the run: the initial peers, then everybody in view."""
        board = self._board
        seen = [peer for peer, record in board.view().items() if record.state != "offline"] if board else []
        return list(dict.fromkeys([*initial, *seen]))

    # -- the seed's role ----------------------------------------------------------------------------------------

    async def _serve(self, announcer: Announcer, manifest: RunManifest) -> None:
        """A seed: keep the noticeboard and the run's files until told to leave."""
        self._lifecycle.go("syncing")
        settle()
        self._lifecycle.go("online")
        await announcer.point_to_manifest()
        self._reporter.ready(self._addresses, manifest.model.stages)
        while True:
            await announcer.publish()
            await asyncio.sleep(5.0)

    async def _leave(self, announcer: Announcer) -> None:
        """Finish writing, and say goodbye on the noticeboard, within the drain's time."""
        self._lifecycle.go("draining")
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
        """The daemon is restarted when it dies; the peer ends when its identity is used elsewhere."""
        board = self._board
        if board is not None:
            config, note = self._config, self._reporter.note
            await Supervision(p2p, board, config.identity, self._metrics, note).run()
