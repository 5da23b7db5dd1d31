"""The anchor role of a peer: pull a snapshot, pass microbatches through it unmasked, publish the priors.

Nobody waits for an anchor. It looks for the newest version that every stage serves, and when that is newer than
its last pass, fetches the weights at low priority, makes the pass and offers the priors. An anchor that holds all
stages passes alone, others together (`anchor_circuit`). Lives in the communication loop; torch works on the compute
thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from hivemind.p2p import P2P

from dht.identity import Identity
from dht.noticeboard import Noticeboard
from peers.anchor_circuit import AnchorCircuit, PassError
from peers.anchor_cover import Span, circuit, uncovered
from peers.anchor_figures import AnchorFigures
from peers.anchor_memory import AnchorMemory
from peers.anchor_offers import AnchorOffers
from peers.anchor_span import SpanWork
from peers.anchor_stages import AnchorStages
from peers.anchor_versions import VersionTries, common_versions, has_most
from peers.anchor_work import AnchorWork, PassResult
from peers.announcer import Announcer
from peers.config import PeerConfig, UserError
from peers.engine import Engine, JobPriority
from peers.fileserver import FileServer
from peers.grants import Grants
from peers.heap import settle
from peers.lifecycle import Lifecycle
from peers.prior_parts import PriorPart
from peers.prior_sweep import sweep_priors
from peers.reporting import Reporter
from peers.run_files import RunFiles
from peers.status import StatusBoard
from peers.traffic import Traffic
from swarm.activation.config import BasisConfig
from swarm.anchor.config import NoCorrectorConfig
from swarm.anchor.gradients import stage_targets
from swarm.anchor.registry import needs_prior, remembers_bias
from swarm.manifest import RunManifest

logger = logging.getLogger("swarm_peer.anchor")
LOOK_S = 0.5
"""Between two looks at what the stages serve."""
PUBLISH_S = 5.0


class AnchorPeer:
    """An anchor of one run, for all of its stages or, with other anchors, for some of them.

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
        self._files, self._engine = files, engine
        self._lifecycle, self._traffic = lifecycle, traffic
        self._reporter, self._addresses = reporter, addresses
        self._note: Callable[[str], None] = reporter.note
        # A folder of its own: on one machine several peers may share the run's.
        directory = config.checkpoint_dir or files.directory / "checkpoints" / identity.peer_id[-8:]
        self._directory = directory
        self._memory: AnchorMemory | None = None
        self._stages = AnchorStages(
            config=config,
            manifest=manifest,
            span=config.anchor_span or (0, manifest.model.stages - 1),
            p2p=p2p,
            board=board,
            files=files,
            engine=engine,
            traffic=traffic,
            directory=directory,
            note=self._note,
        )
        self._offers = AnchorOffers(
            run_id=manifest.run_id,
            identity=identity,
            board=board,
            server=server,
            directory=directory / "priors",
        )
        self._work: AnchorWork
        self._tries = VersionTries()
        self._said = ""

    async def run(self) -> None:
        """Until the run has ended, or this task is cancelled."""
        try:
            await self._run()
        finally:
            if self._memory is not None:
                self._memory.close()

    async def _run(self) -> None:
        self._check()
        self._lifecycle.go("syncing")
        self._announcer.span = self._stages.span
        await self._announcer.publish()
        await self._prepare()
        settle()
        if self._stages.is_whole:
            await self._serve(self._pass_alone)
            return
        work = SpanWork(
            manifest=self._manifest,
            stages=self._stages,
            engine=self._engine,
            files=self._files,
            offers=self._offers,
            memory=self._memory,
            figures=self.figures,
            note=self._note,
        )
        circuit_ = AnchorCircuit(
            p2p=self._p2p,
            run_id=self._manifest.run_id,
            stages=self._manifest.model.stages,
            span=self._stages.span,
            anchors=lambda: self._grants.anchors,
            addresses=self._addresses_of,
            traffic=self._traffic,
            work=work,
            on_abandoned=self._abandoned,
        )
        await circuit_.start()
        try:
            await self._serve(lambda version: self._pass_together(version, circuit_))
        finally:
            await circuit_.close()
            work.close()

    def _check(self) -> None:
        """Raise UserError if there is nothing for this anchor to do."""
        manifest = self._manifest
        is_coded = isinstance(manifest.codec, BasisConfig) and manifest.model.stages > 1
        if not is_coded and not needs_prior(manifest.corrector):
            codec = f"codec {manifest.codec.name}" if manifest.model.stages > 1 else "one stage"
            raise UserError(
                f"run {manifest.name!r} uses {codec} and no corrector, which need no anchor: join a stage"
            )
        if manifest.anchors.source == "leaders":
            raise UserError(f"the peers of run {manifest.name!r} make its priors themselves: join a stage")
        self._check_named("has not named")
        if not self._stages.is_whole and remembers_bias(manifest.corrector):
            raise UserError(
                f"the corrector of run {manifest.name!r} compares dense with coded passes, which only an anchor with "
                f"all stages makes: join with --anchor --stage all"
            )

    def _check_named(self, what: str) -> None:
        """Raise UserError unless this peer is an anchor of the run."""
        if self._identity.peer_id not in self._grants.anchors:
            raise UserError(
                f"the owner of run {self._manifest.name!r} {what} {self._identity.peer_id} as an anchor: its priors "
                f"would be refused. The owner names anchors with `swarm-peer init RUN_DIR --grant-anchor PEER_ID`"
            )

    async def _prepare(self) -> None:
        """Build the stages, and the memory that a corrector needs."""
        manifest, stages = self._manifest, self._stages
        await asyncio.to_thread(sweep_priors, self._directory / "priors")
        await stages.prepare()
        if stages.is_whole:
            self._work = AnchorWork(self._config, manifest, stages.model, self._files)
        if not isinstance(manifest.corrector, NoCorrectorConfig) and needs_prior(manifest.corrector):
            models = enumerate(stages.model.models, start=stages.span[0])
            self._memory = AnchorMemory(
                config=manifest.corrector,
                manifest=manifest,
                targets={stage: stage_targets(model) for stage, model in models},
                directory=self._directory,
                offer=self._offers.offer,
                note=self._note,
            )
            await self._memory.start()

    async def _serve(self, make_pass: Callable[[int], Awaitable[None]]) -> None:
        """Make a pass through every newer version that all stages serve, until the run has ended."""
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
            served, total = self._stages.served(), self._manifest.total_steps
            if has_most(served, total):
                self._note("the run is finished: no priors are needed any more")
                return
            common = common_versions(served, self._is_before_end)
            version = self._tries.choose(common, self.figures.version or 0, time.monotonic())
            if version is not None:
                await make_pass(version)
                published = float("-inf") if self.figures.version == version else published
            await asyncio.sleep(LOOK_S)

    def _is_before_end(self, version: int) -> bool:
        return version < self._manifest.total_steps and self._manifest.keeps_snapshot(version - 1)

    def _failed(self, version: int, why: str) -> None:
        self._tries.failed(version, time.monotonic())
        self._note(f"warning: {why}")

    # -- alone -------------------------------------------------------------------------------------------

    async def _pass_alone(self, version: int) -> None:
        """Priors of one version, from fetching it to offering them; a failure is said, and tried again later."""
        try:
            await self._make_priors(version)
        except (UserError, ValueError, OSError, RuntimeError, MemoryError) as error:
            # RuntimeError: what torch raises for a decomposition that does not converge, or a device that is full.
            self.figures.failed += 1
            self._failed(version, f"no priors of version {version}: {str(error) or type(error).__name__}")

    async def _make_priors(self, version: int) -> None:
        began = time.monotonic()
        batches = await self._stages.load(version, *self._stages.span)
        fetched = time.monotonic()
        memory = self._memory

        def work() -> PassResult:
            return self._work.run(batches, version, memory.correctors() if memory is not None else None)

        result = await self._engine.submit(JobPriority.ROUND, work)
        for boundary, data in enumerate(result.boundaries):
            await self._offers.offer(version, PriorPart("boundary", boundary), data)
        if memory is not None and result.gradients is not None:
            await memory.ingest(version, dict(enumerate(result.gradients)))
        self._take_figures(result)
        figures = self.figures
        figures.passes, figures.version = figures.passes + 1, version
        figures.fetch_s, figures.fit_s = fetched - began, time.monotonic() - fetched
        figures.prior_bytes = sum(map(len, result.boundaries))
        figures.fetched_bytes = self._stages.fetched_bytes
        self._note(
            f"priors of version {version}: {figures.prior_bytes / 1e6:.1f} MB, fetched in "
            f"{figures.fetch_s:.1f} s, fitted in {figures.fit_s:.1f} s"
        )

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

    # -- together ----------------------------------------------------------------------------------------

    async def _pass_together(self, version: int, circuit_: AnchorCircuit) -> None:
        """Lead a pass if it is this anchor's to lead; one that fails is tried again later."""
        spans, anchors, stages = self._spans(), self._grants.anchors, self._manifest.model.stages
        legs = circuit(spans, anchors, stages)
        if not legs:
            missing = uncovered(spans, anchors, stages)
            self._say(
                f"waiting for anchors of stages {', '.join(map(str, missing))}"
                if missing
                else "an anchor that holds all stages is there: it passes alone"
            )
            return
        self._say(f"{len(legs)} anchors hold all stages together; {legs[0].peer[-8:]} leads")
        if legs[0].peer != self._identity.peer_id:
            return
        try:
            await circuit_.lead(version, legs)
        except PassError as error:
            self._abandoned(version, str(error))

    def _abandoned(self, version: int, why: str) -> None:
        self.figures.abandoned += 1
        self._failed(version, f"the pass through version {version} is abandoned: {why}")

    def _spans(self) -> dict[str, Span]:
        """What the anchors that are there hold, this one included."""
        spans = {
            peer: record.stages
            for peer, record in self._board.view().items()
            if record.role == "anchor" and record.state == "online" and record.stages is not None
        }
        return {**spans, self._identity.peer_id: self._stages.span}

    def _addresses_of(self, peer: str) -> Sequence[str]:
        record = self._board.view().get(peer)
        return record.addresses if record is not None else ()

    def _say(self, text: str) -> None:
        """Say what has changed, once."""
        if text != self._said:
            self._said = text
            self._note(text)
