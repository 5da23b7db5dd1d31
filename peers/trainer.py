"""One stage peer at work: binds links, plans, the stage worker, the rounds and the start of the run.

Everything here runs in the communication loop. Frames come in through `on_frame`, losses through `on_lost`,
time through `tick`; what is decided stands in the pure cores (`work`, `rounds`, `start`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers import start
from peers.answers import Answers
from peers.assignments import Assignments
from peers.averaging import Averaging
from peers.compute import Boundaries, StageCompute
from peers.engine import Engine
from peers.frames import Frame, FrameError, Kind, need, need_count
from peers.limits import LIMITS
from peers.link import Link
from peers.links import Links, short
from peers.payloads import BatchFormat
from peers.planning import KEPT_PLANS, PlanBook, make_plan
from peers.progress import Progress
from peers.questions import Questions
from peers.round_messages import Arrival, Commit, compact
from peers.rounds import RoundCore
from peers.run_files import RunFiles
from peers.stage import StageWorker, parse_key
from peers.starting import Starter
from swarm.manifest import RunManifest
from swarm.plan import MAX_SLOTS, MicrobatchKey, Plan

logger = logging.getLogger("swarm_peer.trainer")


OPEN_KINDS = (Kind.START, Kind.PROPOSE, Kind.ACKNOWLEDGE, Kind.QUERY, Kind.ANSWER)
"""Frames of peers that are not, or not yet, in a roster."""


class NotInRunError(Exception):
    """The run started, or goes on, without this peer."""


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
        on_snapshot: Callable[[int], None],
        note: Callable[[str], None],
        trace_ledger: Path | None = None,
    ) -> None:
        self.manifest, self.stage, self.stages = manifest, stage, manifest.model.stages
        self.me = links.me
        self.progress = Progress()
        self.finished = asyncio.Event()
        self.started = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._links, self._files, self._tasks = links, files, tasks
        self._questions = Questions()
        self._plans = PlanBook(manifest)
        self._step_ends: defaultdict[str, set[int]] = defaultdict(set)
        self._stash: list[tuple[Link, Frame]] = []
        self._on_snapshot, self._trace, self._note = on_snapshot, trace_ledger, note
        self._moved_at, self._has_warned = time.monotonic(), False
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
            on_ledger=self._check_ready,
            on_slot_done=self._on_slot_done,
            on_give_up=self._on_give_up,
        )
        self._assignments = Assignments(self.me, links, self._run_slot)
        core = RoundCore(
            run_id=manifest.run_id, run_seed=manifest.seed, stage=stage, me=self.me, make_plan=self._next_plan
        )
        self.averaging = Averaging(
            core=core,
            compute=compute,
            values=manifest.averaging.values,
            engine=engine,
            links=links,
            questions=self._questions,
            tasks=tasks,
            owner=self,
        )
        self._answers = Answers(links, self._plans, self.worker.core, tasks)
        self.starter = Starter(
            manifest=manifest,
            stage=stage,
            links=links,
            plans=self._plans,
            version=lambda: self.version,
            on_begin=self._begin,
        )

    @property
    def version(self) -> int:
        """Steps applied to this peer's weights."""
        return self.worker.core.version

    # -- the world -----------------------------------------------------------------------------------------

    def on_frame(self, link: Link, frame: Frame) -> None:
        """A frame of a neighbour. Raises FrameError for one the protocol does not allow."""
        if frame.kind not in OPEN_KINDS and self._is_stranger(link):
            raise FrameError(
                "stranger", f"{short(link.peer)} is not in the roster of stage {link.hello.stage}"
            )
        match frame.kind:
            case Kind.FORWARD:
                self._on_forward(link, frame)
            case Kind.GRADIENT:
                self.worker.on_gradient(link, frame)
            case Kind.ACCEPTED | Kind.BUSY | Kind.REFUSED:
                self.worker.on_reply(link, frame)
            case Kind.PLAN:
                self._on_plan_frame(link, frame)
            case Kind.STEP_END:
                self._on_step_end(
                    need(frame.header, "plan", str)[:64], need_count(frame.header, "slot", MAX_SLOTS)
                )
            case Kind.ASSIGN:
                if self.stage != 0 or link.hello.stage != 0:
                    raise FrameError("assign", "ASSIGN goes from source to source")
                self._assignments.on_frame(frame, self._plans, self.worker.core.plan)
            case Kind.QUERY:
                self._answers.on_query(link, frame)
            case Kind.ANSWER:
                self._questions.on_answer(link.peer, frame)
            case Kind.PROPOSE | Kind.ACKNOWLEDGE | Kind.START:
                self.starter.on_frame(link, frame)
            case _:
                if link.hello.stage != self.stage:
                    raise FrameError("stage", f"{frame.kind} from stage {link.hello.stage}")
                self.averaging.on_frame(link.peer, frame)

    def on_up(self, link: Link) -> None:
        """A link is up: what its peer may have missed is repeated."""
        if self.starter.core.started is not None:
            link.post(Kind.START, self.starter.core.started.header())
            if self._is_stranger(link):
                return
        # The step before too: a neighbour may still need the end of a slot that this peer has committed.
        for step in (self.version - 1, self.version):
            if (plan := self._plans.of_step(step)) is not None:
                link.post(Kind.PLAN, {"plan": plan.to_bytes()})
                for slot in self._step_ends[plan.digest()]:
                    link.post(Kind.STEP_END, {"plan": plan.digest(), "slot": slot})
        if self.stage == 0 and link.hello.stage == 0:
            self._assignments.repeat(link)
        if link.hello.stage == self.stage + 1:
            self.worker.run(self.worker.core.on_peer_up(link.peer, time.monotonic()))
        elif link.hello.stage == self.stage:
            self.averaging.on_peer_up(link.peer)

    def on_lost(self, peer: str, stage: int) -> None:
        """A neighbour is lost."""
        self._questions.on_peer_lost(peer)
        if stage == self.stage + 1:
            self.worker.run(self.worker.core.on_peer_lost(peer, time.monotonic()))
        elif stage == self.stage:
            self.averaging.on_peer_lost(peer)
            self._reassign()

    def tick(self, online: Sequence[Sequence[str]]) -> None:
        """Time passes. online: peers ready to start, per stage."""
        now = time.monotonic()
        self.starter.tick(now, online)
        self.worker.run(self.worker.core.route(now))
        self.averaging.tick()
        if self.started.is_set() and not self.finished.is_set():
            self._watch(now)

    # -- RoundsOwner -----------------------------------------------------------------------------------------

    def freeze(self, is_frozen: bool) -> None:
        """See RoundsOwner."""
        self.worker.run(self.worker.core.freeze(is_frozen, time.monotonic()))

    def seal(self, step: int) -> None:
        """See RoundsOwner."""
        self.worker.run(self.worker.core.seal(step))

    def check_commit(self, commit: Commit) -> None:
        """See RoundsOwner."""
        if self.stage == 0 and commit.step + 1 < self.manifest.total_steps:
            plan = self._plans.parse(commit.plan, commit.step + 1)
            if plan.step != commit.step + 1 or len(commit.sources) != len(plan.slots):
                raise FrameError(
                    "plan", f"the COMMIT of step {commit.step} needs a plan of the next, with sources"
                )

    def on_applied(self, commit: Commit, norm: float | None) -> None:
        """See RoundsOwner."""
        now, plan, core = time.monotonic(), self.worker.core.plan, self.worker.core
        self._write_trace(commit)
        loss_sum, loss_tokens = core.loss
        if loss_tokens:
            self.progress.loss = loss_sum / loss_tokens
        self.progress.gradient_norm = norm
        samples = sum(len(slot.samples) for slot in plan.slots) if plan is not None else 0
        self.progress.finished_step(now, samples * self.manifest.data.sequence_length)
        self._moved_at, self._has_warned = now, False
        if plan is not None and (before := self._plans.of_step(plan.step - 1)) is not None:
            self._step_ends.pop(before.digest(), None)
        self.worker.run(core.on_commit(commit.step, now))
        if plan is not None and (plan.keep_snapshot or plan.is_last):
            self._on_snapshot(core.version)
        if plan is not None and plan.is_last:
            self.finished.set()
            return
        if self.stage == 0:
            self._take_plan(self._plans.parse(commit.plan, core.version), list(commit.sources))
        elif (known := self._plans.of_step(core.version)) is not None:
            self._adopt(known)

    def on_out_of_step(self, commit: Commit) -> None:
        """See RoundsOwner."""
        self._fail(
            f"the replicas of stage {self.stage} committed step {commit.step} without this peer; catching up with a "
            f"running swarm is not supported yet"
        )

    # -- start ---------------------------------------------------------------------------------------------

    def _begin(self, message: start.Start, plan: Plan) -> None:
        """START is in force."""
        if self.me not in message.rosters[self.stage]:
            self._fail("the run has started without this peer; joining a running swarm is not supported yet")
            return
        if message.version != self.version:
            self._fail(f"the run starts at version {message.version}, this peer holds {self.version}")
            return
        self.averaging.core.begin(message.version, message.rosters[self.stage])
        self._tasks.create_task(self._expect(message.rosters[self.stage]))
        self.started.set()
        self._moved_at = time.monotonic()
        self.progress.step_times.append(time.monotonic())
        self._take_plan(plan, list(message.sources))

    async def _expect(self, roster: tuple[str, ...]) -> None:
        """A replica that died just before the start is in the roster, and its loss was reported before."""
        await asyncio.sleep(LIMITS.dial_s + LIMITS.reconnect_s)
        for peer in roster:
            if peer != self.me and self._links.get(peer) is None:
                self.on_lost(peer, self.stage)

    def _is_stranger(self, link: Link) -> bool:
        """Whether the run has started and this neighbour is not in the roster of the stage it names."""
        started, stage = self.starter.core.started, link.hello.stage
        if started is None:
            return False
        return not 0 <= stage < self.stages or link.peer not in started.rosters[stage]

    def _on_give_up(self, key: MicrobatchKey) -> None:
        self._fail(
            f"microbatch {key} has values that are not finite, whoever computes it: the run has diverged; start it "
            f"again with a lower learning rate"
        )

    # -- plans -----------------------------------------------------------------------------------------------

    def _next_plan(
        self, step: int, attempt: int, group: str, roster: tuple[str, ...]
    ) -> tuple[bytes, tuple[str, ...]]:
        """The plan that a COMMIT of stage 0 carries."""
        if self.stage != 0 or step >= self.manifest.total_steps:
            return b"", ()
        plan, sources = make_plan(self.manifest, step, attempt, group, roster)
        return plan.to_bytes(), sources

    def _take_plan(self, plan: Plan, sources: list[str]) -> None:
        """A plan with its assignment, at stage 0 by COMMIT or START, elsewhere by START."""
        self._plans.add(plan)
        self._assignments.begin(plan, sources)
        self._links.gossip(Kind.PLAN, {"plan": plan.to_bytes()})
        self._adopt(plan)
        self._assignments.take_early(plan)

    def _on_plan_frame(self, link: Link, frame: Frame) -> None:
        if self.stage == 0:
            return  # sources have their plans from COMMIT and START
        plan = self._plans.parse(need(frame.header, "plan", bytes), self.version)
        if self._plans.add(plan):
            self._links.gossip(Kind.PLAN, {"plan": plan.to_bytes()})
            self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        if plan.step == self.version:
            now = time.monotonic()
            digest = plan.digest()
            self.worker.run(self.worker.core.on_plan(plan, now))
            if self.worker.core.plan is not plan and self.worker.core.plan is not None:
                return  # an earlier attempt than the one in force
            keys = frozenset(compact(plan.keys()))
            self.averaging.run(self.averaging.core.on_plan(digest, keys, now))
            if self.stage == 0:
                self._assignments.run_own(plan)
                self._reassign()
        self._unstash()
        self._check_ready()

    def _run_slot(self, plan: Plan, slot: int, is_replay: bool) -> None:
        self._tasks.create_task(self._fetch_and_run(plan, slot, is_replay))

    async def _fetch_and_run(self, plan: Plan, slot: int, is_replay: bool) -> None:
        await self._files.ensure_samples(plan.slots[slot].samples)
        if self.worker.core.plan is plan:
            self.worker.assign(plan, slot, is_replay)

    def _reassign(self) -> None:
        """The lead source gives the slots of lost sources to living ones."""
        plan, rounds = self.worker.core.plan, self.averaging.core
        if self.stage == 0 and plan is not None and rounds.leader == self.me:
            self._assignments.reassign(plan, rounds.present)

    def _on_slot_done(self, slot: int) -> None:
        plan = self.worker.core.plan
        if plan is not None:
            self._on_step_end(plan.digest(), slot)

    def _on_step_end(self, digest: str, slot: int) -> None:
        """A slot has ended. Passed on to all neighbours the first time it is heard."""
        plan = self._plans.get(digest)
        if plan is None and self.stage != 0:
            return  # whoever says so has said the plan before, or says both again when the link is up
        # A source may hear of the end before its own COMMIT brings the plan; what is invented stays bounded.
        unknown = [d for d in self._step_ends if self._plans.get(d) is None]
        for invented in unknown[: max(0, len(unknown) - KEPT_PLANS)]:
            del self._step_ends[invented]
        known = self._step_ends[digest]
        if (plan is not None and slot >= len(plan.slots)) or slot in known:
            return
        known.add(slot)
        self._links.gossip(Kind.STEP_END, {"plan": digest, "slot": slot})
        self._check_ready()

    def _check_ready(self) -> None:
        """Report to the round once all slots have ended and what came here is in the ledger."""
        core = self.worker.core
        plan = core.plan
        if plan is None or not core.is_settled:
            return
        digest = plan.digest()
        if len(self._step_ends[digest]) < len(plan.slots):
            return
        ledger = core.ledger
        self.averaging.on_ready(Arrival(plan.step, digest, compact(ledger), sum(ledger.values())))

    # -- work that is ahead of its plan --------------------------------------------------------------------

    def _on_forward(self, link: Link, frame: Frame) -> None:
        key = parse_key(frame)
        if key.step > self.version + 1:
            raise FrameError("step", f"a FORWARD of step {key.step} while step {self.version} is worked on")
        plan = self._plans.get(key.plan)
        if plan is not None or key.step < self.version:
            if plan is None:
                link.post(Kind.REFUSED, {"key": key.pack(), "reason": "committed"})
                return
            self.worker.on_forward(link, frame, plan)
            return
        if link.hello.stage != self.stage - 1:
            raise FrameError("stage", f"stage {self.stage} takes no FORWARD from stage {link.hello.stage}")
        of_link = sum(1 for other, _ in self._stash if other is link)
        if len(self._stash) >= LIMITS.early_frames or of_link >= LIMITS.in_flight:
            link.post(Kind.BUSY, {"key": key.pack(), "reason": ""})
            return
        self._stash.append((link, frame))
        link.post(Kind.QUERY, {"id": 0, "what": "plan", "about": key.plan})

    def _unstash(self) -> None:
        stash, self._stash = self._stash, []
        for link, frame in stash:
            try:
                self._on_forward(link, frame)
            except FrameError as error:
                link.offend(error)

    # -- watching --------------------------------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        if now - self._moved_at < LIMITS.stall_warning_s or self._has_warned:
            return
        self._has_warned = True
        core, rounds = self.worker.core, self.averaging.core
        beside = [s for s in (self.stage - 1, self.stage + 1) if 0 <= s < self.stages]
        empty = [str(s) for s in beside if not self._links.open_links(s)]
        why = f"stage {' and '.join(empty)} has no peer left" if empty else "waiting for the other peers"
        self._note(f"step {self.version} has not moved for {now - self._moved_at:.0f} s: {why}")
        logger.info(
            "step %d has not moved for %.0f s: %d microbatches in flight, %d in the ledger, slots ended %d, round %s, "
            "present %s",
            self.version,
            now - self._moved_at,
            core.in_flight,
            len(core.ledger),
            len(self._step_ends[core.plan.digest()]) if core.plan else 0,
            rounds.phase.value,
            [short(peer) for peer in rounds.present],
        )

    def _write_trace(self, commit: Commit) -> None:
        if self._trace is None:
            return
        core = self.worker.core
        line: dict[str, Any] = {
            "step": commit.step,
            "stage": self.stage,
            "peer": self.me,
            "group": commit.group,
            "plan": core.plan.digest() if core.plan else "",
            "keys": [list(key) for key in compact(core.ledger)],
            "all_keys": [list(key) for key in compact(core.plan.keys())] if core.plan else [],
            "roster": list(commit.roster),
        }
        with self._trace.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _fail(self, why: str) -> None:
        if not self.failure.done():
            self.failure.set_exception(NotInRunError(why))
