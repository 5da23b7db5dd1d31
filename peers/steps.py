"""The step in progress at one peer: its plan taken and passed on, its slots run, ended and reported.

Binds the plan book, the ends of slots, the assignment of sources and what came ahead of its plan to the stage
worker and the rounds. Lives in the communication loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from peers import injector
from peers.assignments import Assignments
from peers.averaging import Averaging
from peers.frames import Frame, FrameError, Kind, need
from peers.limits import LIMITS
from peers.link import Link
from peers.links import Links
from peers.planning import PlanBook, PriorRef, StalePlanError, initial_refs, make_plan, prior_refs
from peers.priors import Priors
from peers.recovery import Recovery
from peers.round_messages import Arrival, Commit, CompactKey, compact
from peers.run_files import RunFiles
from peers.stage import StageWorker, parse_key
from peers.stash import Stash
from peers.step_ends import StepEnds
from peers.transfer import TransferError
from peers.watch import names
from peers.work_messages import MAX_WITHOUT, Ready
from swarm.manifest import RunManifest
from swarm.plan import Plan

logger = logging.getLogger("swarm_peer.trainer")
RECORDS_BEHIND_S = 15.0
"""What a peer has fetched may be known so much later elsewhere: records are made, and read, every 3 to 10 s."""


class Steps:
    """Plans and their ends, for the step a peer works on.

    is_in: whether it takes part in its stage. is_voting: whether it works and votes there (asked at each use).
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        links: Links,
        files: RunFiles,
        tasks: asyncio.TaskGroup,
        is_voting: Callable[[], bool],
        priors: Priors | None = None,
    ) -> None:
        self.manifest, self.stage = manifest, stage
        self.me = links.me
        self.plans = PlanBook(manifest)
        self.ends = StepEnds(self.plans, links)
        self.stash = Stash()
        self.is_in = False
        self._roster: tuple[str, ...] = ()
        self._alone_at: int | None = None
        self._nudged_at = self._adopted_at = 0.0
        self._links, self._files, self._tasks, self._is_voting = links, files, tasks, is_voting
        self._priors = priors
        if priors is not None:
            priors.on_came = self.check_ready  # a group corrects by what its members say that they hold
        self.assignments = Assignments(self.me, links, self._run_slot)
        self.worker: StageWorker
        self.averaging: Averaging
        self.recovery: Recovery

    @property
    def version(self) -> int:
        """Steps applied to this peer's weights."""
        return self.worker.core.version

    def enter(self, step: int, roster: tuple[str, ...], commit: Commit | None) -> None:
        """This peer takes part from here on. commit: the one that lists it as a follower."""
        self.is_in, self._alone_at = True, step if roster == (self.me,) else None
        self._roster, self._nudged_at = roster, time.monotonic()
        if self.stage == 0 and commit is not None:
            self.take_plan(self.plans.parse(commit.plan, step), list(commit.sources))
        elif self.stage == 0 and self._alone_at is not None:
            self._tasks.create_task(self._plan_alone(step))

    def tick(self, now: float) -> None:
        """Time passes. A step whose slots do not end: ask for what may have passed this peer by, its plan or ends.

        The lead source has all slots run, too, by whoever they are: two peers that took themselves for the lead
        source may have left a slot to nobody.
        """
        if self.stage == 0:
            self.reassign()  # a source that fell out of step takes part no more, and its link stands
        plan, rounds = self.worker.core.plan, self.averaging.core
        if plan is not None and self.ends.are_complete(plan):
            self._nudged_at = now
        elif now - self._nudged_at > LIMITS.nudge_s:
            self._nudged_at = now
            self._links.gossip(Kind.QUERY, {"id": 0, "what": "now", "about": None})
            if self.stage == 0 and plan is not None and rounds.leader == self.me:
                self.assignments.recover(plan, self._able_now(plan))

    def suspend(self) -> None:
        """This peer takes no more part: what waits here looks elsewhere."""
        self.is_in = False
        self.recovery.clear()
        for link, frame in self.stash.take():
            link.post(Kind.REFUSED, {"key": frame.header.get("key"), "reason": "resync"})

    def check_commit(self, commit: Commit) -> None:
        """Raise FrameError for a COMMIT whose next plan this run cannot have."""
        if self.stage == 0 and commit.step + 1 < self.manifest.total_steps:
            plan = self.plans.parse(commit.plan, commit.step + 1)
            if plan.step != commit.step + 1 or len(commit.sources) != len(plan.slots):
                raise FrameError(
                    "plan", f"the COMMIT of step {commit.step} needs a plan of the next, with sources"
                )

    def on_applied(self, commit: Commit, before: Plan | None) -> None:
        """A step is applied; `before` was its plan. The next step's plan is taken up."""
        self.recovery.clear()
        self._nudged_at = time.monotonic()
        if before is not None:
            self.ends.forget(before.step - 1)
        self._say_who_is_out(commit.roster)
        if self.version >= self.manifest.total_steps:
            return
        if self.stage == 0:
            self.take_plan(self.plans.parse(commit.plan, self.version), list(commit.sources))
        elif (known := self.plans.of_step(self.version)) is not None:
            self._adopt(known)

    def _say_who_is_out(self, roster: tuple[str, ...]) -> None:
        """The stage before must not wait for a replica that this one goes on without, and that may not know it."""
        out, self._roster = set(self._roster) - set(roster), roster
        if out and self.stage > 0:
            ready = Ready(self.version, tuple(sorted(out))[:MAX_WITHOUT])
            for link in self._links.open_links(self.stage - 1):
                link.post(Kind.READY, ready.header())

    def ask_missing(self, keys: tuple[CompactKey, ...]) -> None:
        """The ledgers of this stage's members leave keys out: whoever kept them sends them again."""
        plan = self.worker.core.plan
        if plan is not None and self.stage == 0:
            self.assignments.recover(plan, self._able_now(plan))
        else:
            self.recovery.ask(keys)

    # -- plans -----------------------------------------------------------------------------------------------

    def repeat(self, link: Link) -> None:
        """Plans and ends of slots; of the step before too: a neighbour may not have committed it yet."""
        for step in (self.version - 1, self.version) if self.is_in else ():
            if (plan := self.plans.of_step(step)) is not None:
                link.post(Kind.PLAN, {"plan": plan.to_bytes()})
                self.ends.repeat(link, plan)

    def next_plan(
        self, step: int, attempt: int, group: str, roster: tuple[str, ...]
    ) -> tuple[bytes, tuple[str, ...]]:
        """The plan that a COMMIT of stage 0 carries."""
        if self.stage != 0 or step >= self.manifest.total_steps:
            return b"", ()
        priors = self._refs(step - 1)
        if self._priors is not None:
            priors = self._priors.choose(priors)
        able = self._able(roster, [prior.sha256 for prior in priors])
        plan, sources = make_plan(self.manifest, step, attempt, group, able, priors)
        return plan.to_bytes(), sources

    def _refs(self, step: int) -> tuple[PriorRef, ...]:
        """The priors in force at a step, as far as this peer knows."""
        plan = self.plans.of_step(step)
        if plan is not None:
            return prior_refs(plan)
        return (self._priors.in_force if self._priors is not None else ()) or initial_refs(self.manifest)

    def take_plan(self, plan: Plan, sources: list[str], *, is_replay: bool = False) -> None:
        """A plan with its assignment, at stage 0 by COMMIT or START, elsewhere by START."""
        self.plans.add(plan)
        self.ends.learned(plan)
        self.assignments.begin(plan, sources)
        self._links.gossip(Kind.PLAN, {"plan": plan.to_bytes()})
        self._adopt(plan, is_replay=is_replay)
        self.assignments.take_early(plan)

    def on_plan_frame(self, frame: Frame) -> None:
        """A PLAN of a neighbour. Raises FrameError."""
        if not self.is_in or (self.stage == 0 and self._alone_at != self.version):
            return  # sources have their plans from COMMIT and START
        try:
            plan = self.plans.parse(need(frame.header, "plan", bytes), self.version)
        except StalePlanError:
            return  # of a neighbour that is behind, or well ahead: no offence
        if self.stage == 0:
            known = self.worker.core.plan  # perhaps one it made itself before it heard of this one
            if plan.step == self.version and (known is None or plan.attempt > known.attempt):
                self.take_plan(plan, [self.me] * len(plan.slots), is_replay=True)
        elif self.plans.add(plan):
            self.ends.learned(plan)
            self._links.gossip(Kind.PLAN, {"plan": plan.to_bytes()})
            self._adopt(plan)

    def _adopt(self, plan: Plan, *, is_replay: bool = False) -> None:
        if self._priors is not None:
            self._priors.adopt(plan)
        if plan.step == self.version:
            now, before = time.monotonic(), self.worker.core.plan
            self.worker.run(self.worker.core.on_plan(plan, now))
            if self.worker.core.plan is not before:
                self._adopted_at = now
                self.recovery.clear()  # fences and lost keys were those of another plan
            if self.worker.core.plan is not plan and self.worker.core.plan is not None:
                return  # an earlier attempt than the one in force
            keys = frozenset(compact(plan.keys()))
            self.averaging.run(self.averaging.core.on_plan(plan.digest(), keys, now))
            if self.stage == 0:
                self.assignments.run_own(plan, is_replay)
                self.reassign()
        self._unstash()
        self.check_ready()

    def _run_slot(self, plan: Plan, slot: int, is_replay: bool) -> None:
        self._tasks.create_task(self._fetch_and_run(plan, slot, is_replay))

    async def _fetch_and_run(self, plan: Plan, slot: int, is_replay: bool) -> None:
        while self.worker.core.plan is plan:
            if self._priors is not None and not await self._priors.wait(plan):
                continue
            try:
                await self._files.ensure_samples(plan.slots[slot].samples)
            except TransferError as error:
                if isinstance(error.__cause__, OSError):
                    raise  # this peer's own disk: nobody else could help
                logger.warning("the data of slot %d of step %d: %s", slot, plan.step, error)
                await asyncio.sleep(LIMITS.data_again_s)
                continue
            if self.worker.core.plan is plan and self.assignments.is_own(plan, slot):
                self.worker.assign(plan, slot, is_replay)
                self.check_ready()
            return

    def reassign(self) -> None:
        """A replica is lost or fenced: the lead source gives its slots to others."""
        self.recovery.look()
        plan, rounds = self.worker.core.plan, self.averaging.core
        if self.stage == 0 and plan is not None and rounds.leader == self.me:
            self.assignments.reassign(plan, self._able_now(plan))

    def _able(self, sources: Sequence[str], hashes: Sequence[str]) -> list[str]:
        """Who can run slots: a source that lacks the prior of its boundary takes no work until it has it."""
        return list(sources) if self._priors is None else self._priors.able_sources(sources, hashes)

    def _able_now(self, plan: Plan) -> list[str]:
        """Who of those present can run slots of the plan in force. Whoever made it saw to it that sources had its
        priors; records may be some seconds behind that, here.
        """
        present = [peer for peer in self.averaging.core.present if peer not in self.recovery.fenced]
        is_fresh = time.monotonic() - self._adopted_at < RECORDS_BEHIND_S
        return present if is_fresh else self._able(present, plan.prior_hashes)

    def on_slot_done(self, slot: int) -> None:
        """All gradients of a slot of this source have come back."""
        plan = self.worker.core.plan
        if plan is not None:
            self.on_step_end(plan.digest(), slot)

    def on_step_end(self, digest: str, slot: int) -> None:
        """A slot has ended, here or by a neighbour's word."""
        if not self.is_in or (self.stage != 0 and self.plans.get(digest) is None):
            return  # whoever says so has said the plan before, or says both again when asked
        if self.ends.add(digest, slot):
            injector.hit("after_step_end", self.version)
            self.check_ready()

    def check_ready(self) -> None:
        """Report to the round once all slots have ended and what came here is in the ledger.

        A report is taken back when more work of the step comes (a replay, a slot): a group that did not know of
        it would average a gradient that has it.
        """
        core = self.worker.core
        plan = core.plan
        if plan is None or not self.is_in:
            return
        if not core.is_settled:
            self.averaging.on_unready(plan.digest())
            return
        if not self.ends.are_complete(plan):
            return
        ledger = core.ledger
        keys = compact(ledger)
        self.averaging.on_ready(
            Arrival(
                plan.step,
                plan.digest(),
                keys,
                self.averaging.work.weight(plan.step, sum(ledger.values())),
                lineage=self.averaging.core.lineage,
                lost=tuple(sorted({*compact(core.lost), *self.recovery.lost} - set(keys))),
                sketch=self.averaging.sketch,
                corrector=self._priors.corrector_held(plan) if self._priors is not None else "",
            )
        )

    async def _plan_alone(self, step: int) -> None:
        """The only source left takes the plan its neighbours know, or makes the step's plan itself."""
        await asyncio.sleep(LIMITS.query_s)
        if self.worker.core.plan is None and self.version == step:
            lineage, priors = self.averaging.core.lineage, self._refs(step - 1)
            plan, sources = make_plan(self.manifest, step, 0, lineage, (self.me,), priors)
            self.take_plan(plan, list(sources))

    # -- work that is ahead of its plan --------------------------------------------------------------------

    def on_forward(self, link: Link, frame: Frame) -> None:
        """A FORWARD of the previous stage, perhaps ahead of its plan. Raises FrameError."""
        key = parse_key(frame)
        if not self._is_voting() or not self.is_in:
            link.post(Kind.REFUSED, {"key": key.pack(), "reason": "resync"})
            return
        if key.step > self.version + LIMITS.follow_behind:
            raise FrameError("step", f"a FORWARD of step {key.step} while step {self.version} is worked on")
        if key.step > self.version + 1:
            # It is this peer that is behind, and about to hear of it.
            link.post(Kind.BUSY, {"key": key.pack(), "reason": ""})
            return
        plan = self.plans.get(key.plan)
        if plan is not None and self._priors is not None and not self._priors.holds(plan):
            link.post(Kind.BUSY, {"key": key.pack(), "reason": ""})
        elif plan is not None:
            self.worker.on_forward(link, frame, plan)
            if not self.worker.core.is_settled:
                self.check_ready()
        elif key.step < self.version:
            link.post(Kind.REFUSED, {"key": key.pack(), "reason": "committed"})
        elif link.hello.stage != self.stage - 1:
            raise FrameError("stage", f"stage {self.stage} takes no FORWARD from stage {link.hello.stage}")
        elif self.stash.add(link, key, frame):
            link.post(Kind.QUERY, {"id": 0, "what": "plan", "about": key.plan})
        else:
            link.post(Kind.BUSY, {"key": key.pack(), "reason": ""})

    def _unstash(self) -> None:
        for link, frame in self.stash.take():
            try:
                self.on_forward(link, frame)
            except FrameError as error:
                link.offend(error)

    def stall_details(self) -> str:
        """Where the step stands, for the log."""
        core, rounds = self.worker.core, self.averaging.core
        return (
            f"{core.in_flight} microbatches in flight, {len(core.ledger)} in the ledger, slots ended "
            f"{self.ends.count(core.plan)}, round {rounds.phase.value}, present {names(rounds.present)}"
        )
