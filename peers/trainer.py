"""One stage peer at work: binds links, plans, the stage worker, the rounds, the start and its membership.

Everything here runs in the communication loop. Frames come in through `on_frame`, losses through `on_lost`,
time through `tick`; what is decided stands in the pure cores (`work`, `rounds`, `start`, `joining`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from peers import start
from peers.answers import Answers
from peers.averaging import ROUND_KINDS, Averaging
from peers.catchup import CatchUp
from peers.compute import Boundaries, StageCompute
from peers.engine import Engine
from peers.frames import Frame, FrameError, Kind, need, need_count
from peers.gate import Gate
from peers.joining import Standing, Status
from peers.limits import LIMITS
from peers.link import Link
from peers.links import Links
from peers.membership import Membership, View
from peers.payloads import BatchFormat
from peers.priors import Priors
from peers.progress import Progress
from peers.questions import Questions
from peers.recovery import Recovery
from peers.round_messages import Commit, CompactKey, compact, parse_commit
from peers.round_work import StepSizes
from peers.rounds import Phase, RoundCore
from peers.run_files import RunFiles
from peers.stage import StageWorker
from peers.starting import Held, Starter
from peers.steps import Steps
from peers.update_log import UpdateLog
from peers.watch import LedgerTrace, StallWatch
from peers.work_messages import Ready, parse_fence, parse_missing
from swarm.manifest import RunManifest
from swarm.plan import MAX_SLOTS, MicrobatchKey, Plan

logger = logging.getLogger("swarm_peer.trainer")


class NotInRunError(Exception):
    """The run cannot go on with this peer."""


class Trainer:
    """The stage peer. `finished` is set once the last step is applied."""

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        compute: StageCompute,
        boundaries: Boundaries,
        engine: Engine,
        links: Links,
        files: RunFiles,
        tasks: asyncio.TaskGroup,
        catchup: CatchUp,
        updates: UpdateLog,
        view: View,
        on_snapshot: Callable[[int, str], None],
        note: Callable[[str], None],
        priors: Priors,
        trace_ledger: Path | None = None,
    ) -> None:
        self.manifest, self.stage, self.stages = manifest, stage, manifest.model.stages
        self.me, self.progress = links.me, Progress()
        self.finished, self.started = asyncio.Event(), asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._links, self._files, self._tasks, self._questions = links, files, tasks, Questions()
        self.steps = Steps(
            manifest=manifest,
            stage=stage,
            links=links,
            files=files,
            tasks=tasks,
            is_voting=lambda: self.is_voting,
            priors=priors,
        )
        self._on_snapshot, self._note = on_snapshot, note
        self._gate = Gate(
            lambda: self.starter.core.started,
            view.knows,
            lambda peer, its_stage: its_stage == stage and self.averaging.core.is_known(peer),
        )
        self._trace = LedgerTrace(trace_ledger, stage, self.me)
        self._stall = StallWatch(stage, self.stages, links, note)
        self._averaged: tuple[tuple[CompactKey, ...], tuple[float, int]] = (), (0.0, 0)
        self.worker = StageWorker(
            stage=stage,
            stages=self.stages,
            compute=compute,
            boundaries=boundaries,
            form=BatchFormat(manifest.data.sequence_length, manifest.data.vocabulary_size),
            engine=engine,
            links=links,
            questions=self._questions,
            source_window=4 * self.stages,
            dataset=files.dataset() if stage == 0 else None,
            tasks=tasks,
            on_ledger=self.steps.check_ready,
            on_slot_done=self.steps.on_slot_done,
            on_give_up=self._on_give_up,
        )
        core = RoundCore(
            run_id=manifest.run_id,
            run_seed=manifest.seed,
            stage=stage,
            me=self.me,
            make_plan=self.steps.next_plan,
        )
        self.averaging = Averaging(
            core=core,
            compute=compute,
            robust=manifest.averaging.robust,
            sizes=StepSizes(
                manifest.tokens_per_microbatch, manifest.samples_per_step * manifest.data.sequence_length
            ),
            engine=engine,
            links=links,
            questions=self._questions,
            tasks=tasks,
            updates=updates,
            run_id=manifest.run_id,
            owner=self,
            corrections=priors.corrections,
        )
        self.recovery = Recovery(
            stage=stage,
            links=links,
            questions=self._questions,
            worker=self.worker,
            averaging=self.averaging,
            tasks=tasks,
            note=note,
            on_change=self.steps.check_ready,
        )
        self.steps.worker, self.steps.averaging = self.worker, self.averaging
        self.steps.recovery = self.recovery
        self.membership = Membership(
            stage=stage,
            stages=self.stages,
            total_steps=manifest.total_steps,
            run_seed=manifest.seed,
            links=links,
            questions=self._questions,
            catchup=catchup,
            view=view,
            owner=self,
            tasks=tasks,
            on_failure=self._fail,
            on_refilled=on_snapshot,
            note=note,
        )
        self._answers = Answers(
            links,
            self.steps.plans,
            self.worker.core,
            tasks,
            is_stashed=self.steps.stash.holds,
            status=lambda: self.status.pack(),  # noqa: PLW0108  # asked at each use
        )
        self.starter = Starter(
            manifest=manifest,
            stage=stage,
            links=links,
            plans=self.steps.plans,
            note=note,
            on_begin=self._begin,
            on_finished=self.finished.set,
        )

    @property
    def version(self) -> int:
        """Steps applied to this peer's weights, as far as it takes part; else what it held last."""
        return self.worker.core.version

    @property
    def is_voting(self) -> bool:
        """Whether this peer works and votes in its stage."""
        return self.membership.standing is Standing.VOTING

    @property
    def status(self) -> Status:
        """What neighbours are told of this peer."""
        return Status(self.version, self.is_voting, self.averaging.core.lineage)

    # -- the world -----------------------------------------------------------------------------------------

    def on_frame(self, link: Link, frame: Frame) -> None:
        """A frame of a neighbour. Raises FrameError for one the protocol does not allow."""
        if not self._gate.admits(link, frame):
            return
        if frame.kind in ROUND_KINDS:
            self._on_round_frame(link, frame)
            return
        match frame.kind:
            case Kind.FORWARD:
                self.steps.on_forward(link, frame)
            case Kind.GRADIENT:
                self.worker.on_gradient(link, frame)
            case Kind.ACCEPTED | Kind.BUSY | Kind.REFUSED:
                self.worker.on_reply(link, frame)
            case Kind.PLAN:
                self.steps.on_plan_frame(frame)
            case Kind.STEP_END:
                plan, slot = need(frame.header, "plan", str)[:64], need_count(frame.header, "slot", MAX_SLOTS)
                self.steps.on_step_end(plan, slot)
            case Kind.ASSIGN:
                if self.stage != 0 or link.hello.stage != 0:
                    raise FrameError("assign", "ASSIGN goes from source to source")
                self.steps.assignments.on_frame(frame, self.steps.plans, self.worker.core.plan)
            case Kind.QUERY if frame.header.get("what") == "now":
                self.steps.repeat(link)
            case Kind.QUERY:
                self._answers.on_query(link, frame)
            case Kind.ANSWER:
                self._questions.on_answer(link.peer, frame)
            case Kind.PROPOSE | Kind.ACKNOWLEDGE | Kind.START:
                if self.membership.standing is Standing.WAITING:
                    self.starter.on_frame(link, frame)
            case Kind.READY:
                self.worker.on_ready_frame(link, frame)
            case Kind.FENCE:
                if self.recovery.on_fence(link, parse_fence(frame.header), is_in=self.steps.is_in):
                    self.steps.reassign()
            case Kind.MISSING:
                self.recovery.on_missing(link, parse_missing(frame.header), self.steps.plans)
            case _:
                raise FrameError("kind", f"{frame.kind} has no place on a link")

    def on_up(self, link: Link) -> None:
        """A link is up: what its peer may have missed is repeated."""
        self.starter.repeat(link, self.version)
        self.steps.repeat(link)
        if link.hello.stage == self.stage + 1:
            self.worker.on_link_up(link)
        if self.stage == 0 and link.hello.stage == 0:
            self.steps.assignments.repeat(link)
        if self.is_voting:
            link.post(Kind.READY, Ready(self.version).header())
        if link.hello.stage == self.stage and self.steps.is_in:
            self.averaging.on_peer_up(link.peer)

    def on_lost(self, peer: str, stage: int, *, has_resigned: bool = False) -> None:
        """A neighbour is lost. has_resigned: it said goodbye, or is another start of the same identity."""
        self._questions.on_peer_lost(peer)
        if stage == self.stage + 1:
            self.worker.on_lost(peer)
        elif stage == self.stage and self.steps.is_in:
            self.averaging.on_peer_lost(peer, has_resigned=has_resigned)
            self.steps.reassign()

    def tick(self, held: Held, *, may_start: bool = True) -> None:
        """Time passes. held: peers ready to start, per stage, with the versions they can serve.

        may_start: whether nobody's record says that the run is under way.
        """
        now = time.monotonic()
        if self.membership.standing is Standing.WAITING and not self.finished.is_set():
            if may_start:
                self.starter.tick(now, held)
            self.membership.look_around(now)
        for link in self._gate.newly_known():
            if link.hello.stage == self.stage + 1:
                self.worker.on_ready(link)
        if not self.steps.is_in:
            return
        self.worker.run(self.worker.core.route(now))
        self.averaging.tick()
        self.steps.tick(now)
        if not self.finished.is_set():
            self._stall.look(self.version, self.steps.stall_details)

    # -- RoundsOwner -----------------------------------------------------------------------------------------

    def freeze(self, is_frozen: bool) -> None:
        """See RoundsOwner."""
        self.worker.run(self.worker.core.freeze(is_frozen, time.monotonic()))
        if not is_frozen and not self.worker.core.is_settled:
            self.steps.check_ready()  # what was held back has been taken

    def on_attempt(self) -> None:
        """See RoundsOwner. Replays taken before a ballot on this average are not part of it."""
        self._averaged = compact(self.worker.core.ledger), self.worker.core.loss

    def own_tokens(self) -> int:
        """See RoundsOwner."""
        return sum(self.worker.core.ledger.values())

    def seal(self, step: int) -> None:
        """See RoundsOwner."""
        self.worker.run(self.worker.core.seal(step))

    def check_commit(self, commit: Commit) -> None:
        """See RoundsOwner."""
        self.steps.check_commit(commit)

    def on_applied(self, commit: Commit, norm: float | None) -> None:
        """See RoundsOwner."""
        plan, core = self.worker.core.plan, self.worker.core
        digest = plan.digest() if plan is not None else ""
        all_keys = compact(plan.keys()) if plan is not None else ()
        ledger, loss = self._averaged
        self._trace.write(commit, digest, ledger, all_keys, loss, self.averaging.corrected_by)
        samples = sum(len(slot.samples) for slot in plan.slots) if plan is not None else 0
        tokens = samples * self.manifest.data.sequence_length
        self.progress.finished_step(time.monotonic(), tokens, loss, norm, len(commit.lost))
        self._stall.moved()
        self.worker.run(core.on_commit(commit.step, time.monotonic()))
        if self.manifest.keeps_snapshot(commit.step) or core.version == self.manifest.total_steps:
            self._on_snapshot(core.version, self.averaging.core.lineage)
        if core.version == self.manifest.total_steps:
            self.finished.set()
        else:
            self.steps.on_applied(commit, plan)
        if self.me in commit.roster:
            self.membership.on_vote()

    def on_out_of_step(self, commit: Commit) -> None:
        """See RoundsOwner."""
        why = f"the replicas of stage {self.stage} committed step {commit.step} without this peer"
        self._rejoin(why, at_least=commit.step + 1)

    def on_dropped(self, commit: Commit) -> None:
        """See RoundsOwner."""
        if self.membership.standing is Standing.FOLLOWING:
            self.membership.on_dropped()
        else:
            self.on_out_of_step(commit)

    def on_diverged(self, peer: str, step: int) -> None:
        """See RoundsOwner."""
        why = f"stage {self.stage} went on from other weights at step {step}"
        # Further on is not elsewhere: updates may lead there from here.
        self._rejoin(why, is_ours=step > self.version, at_least=step)

    def on_drifted(self, distance: float) -> None:
        """See RoundsOwner."""
        self._rejoin(f"this peer's weights have drifted from its replicas' by {distance:.1e}", is_ours=False)

    def on_replan(self, commit: Commit) -> None:
        """See RoundsOwner."""
        self.steps.take_plan(self.steps.plans.parse(commit.plan, self.version), list(commit.sources))

    def fence(self, peer: str, reason: str) -> None:
        """See RoundsOwner."""
        self.recovery.fence(peer, reason)
        self.steps.reassign()

    def unfence(self) -> None:
        """See RoundsOwner."""
        self.recovery.unfence()
        self.steps.reassign()

    def ask_missing(self, keys: tuple[CompactKey, ...]) -> None:
        """See RoundsOwner."""
        self.steps.ask_missing(keys)

    # -- MembershipOwner -----------------------------------------------------------------------------------

    @property
    def is_applying(self) -> bool:
        """See MembershipOwner."""
        return self.averaging.core.phase is Phase.APPLYING

    def suspend(self) -> None:
        """See MembershipOwner."""
        self.steps.suspend()
        self.worker.run(self.worker.core.suspend())
        self.averaging.suspend()

    def enter(
        self,
        step: int,
        roster: tuple[str, ...],
        lineage: str,
        followers: tuple[str, ...] = (),
        commit: Commit | None = None,
    ) -> None:
        """See MembershipOwner."""
        self.worker.run(self.worker.core.begin(step))
        self.averaging.begin(step, roster, lineage, followers)
        self._stall.moved()
        self.started.set()
        self.progress.step_times.append(time.monotonic())
        for link in self._links.open_links():
            link.post(Kind.QUERY, {"id": 0, "what": "now", "about": None})
            if link.hello.stage == self.stage:
                self.averaging.on_peer_up(link.peer)
        self._tasks.create_task(self._expect(roster))
        self.steps.enter(step, roster, commit)

    def vote(self) -> None:
        """See MembershipOwner."""
        self._links.gossip(Kind.READY, Ready(self.version).header())

    # -- start and membership ------------------------------------------------------------------------------

    def _begin(self, message: start.Start, plan: Plan) -> None:
        """START is in force, and names this peer."""
        self.membership.standing = Standing.RESTORING
        self._tasks.create_task(self._restore_and_begin(message, plan))

    async def _restore_and_begin(self, message: start.Start, plan: Plan) -> None:
        try:
            lineage = await self.membership.restore(message.version)
        except Exception as error:
            self._fail(error)
            return
        if lineage is None:
            return
        self.membership.standing = Standing.VOTING
        self.enter(message.version, message.rosters[self.stage], lineage, ())
        self.vote()
        self.steps.take_plan(plan, list(message.sources))

    def _rejoin(self, why: str, *, is_ours: bool = True, at_least: int = 0) -> None:
        """Fall out of the rounds and come back. is_ours: whether the weights here are of the stage's lineage."""
        held = (self.version, self.averaging.core.lineage) if is_ours else None
        self.membership.rejoin(why, held, use_own=is_ours, at_least=at_least)

    async def _expect(self, roster: tuple[str, ...]) -> None:
        """A replica that died just before this peer entered is in the roster: its loss was reported before."""
        await asyncio.sleep(LIMITS.dial_s + LIMITS.reconnect_s)
        for peer in roster:
            if peer != self.me and self._links.get(peer) is None:
                self.on_lost(peer, self.stage)

    def _on_round_frame(self, link: Link, frame: Frame) -> None:
        if link.hello.stage != self.stage:
            raise FrameError("stage", f"{frame.kind} from stage {link.hello.stage}")
        if self.steps.is_in:
            self.averaging.on_frame(link.peer, frame)
        elif frame.kind is Kind.COMMIT:
            commit = parse_commit(frame.header)
            self.steps.check_commit(commit)
            self.membership.on_commit(link.peer, commit)

    def _on_give_up(self, key: MicrobatchKey) -> None:
        self._fail(
            NotInRunError(
                f"microbatch {key} has values that are not finite, whoever computes it: the run has diverged; "
                f"start it again with a lower learning rate"
            )
        )

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
