"""The shell around a stage's rounds: carries out what `RoundCore` decides.

Exchanges run as tasks; the average of an attempt is held until its COMMIT, and only then applied on the
compute thread. A failed attempt leaves accumulator and weights as they were.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable

from peers import injector, rounds
from peers.compute import StageCompute
from peers.corrections import Corrections
from peers.engine import Engine, JobPriority
from peers.exchange import Exchange, ExchangeError, group_of
from peers.frames import Frame, FrameError, Kind, need, need_count
from peers.joining import LINEAGE_CHARACTERS
from peers.links import Links, Liveness, short
from peers.questions import Questions
from peers.round_messages import (
    MAX_STEP,
    Arrival,
    Commit,
    Group,
    parse_arrival,
    parse_commit,
    parse_digest,
    parse_failure,
    parse_group,
)
from peers.round_modes import build_round_work
from peers.round_work import Average, ExchangePlan, StepSizes
from peers.rounds_owner import RoundsOwner
from peers.travel import Travel
from peers.update_log import UpdateLog
from swarm.gradient.robust import RobustConfig
from swarm.plan import seeded_order
from swarm.sketch import SKETCH_TOLERANCE, sketch_distance

logger = logging.getLogger("swarm_peer.rounds")
ROUND_KINDS = frozenset(
    {
        Kind.ARRIVE,
        Kind.GROUP,
        Kind.PART,
        Kind.AVERAGE,
        Kind.SLICE,
        Kind.DIGEST,
        Kind.FAILED,
        Kind.COMMIT,
        Kind.FOLLOW,
    }
)
UPDATE_WRITERS = 2
"""Members of a round that keep its update on disk: the files are identical, and large."""
EARLY_GROUPS = 4
EARLY_BYTES = 256 * 1024 * 1024
EARLY_FRAMES = 4096


class Averaging:
    """Rounds of one stage peer. Lives in the communication loop."""

    def __init__(
        self,
        *,
        core: rounds.RoundCore,
        compute: StageCompute,
        engine: Engine,
        links: Links,
        questions: Questions,
        tasks: asyncio.TaskGroup,
        updates: UpdateLog,
        run_id: str,
        robust: RobustConfig,
        sizes: StepSizes,
        owner: RoundsOwner,
        corrections: Corrections,
    ) -> None:
        self.core = core
        self.sketch = self.corrected_by = ""
        self._updates, self._corrections = updates, corrections
        self.work = build_round_work(
            compute, engine, corrections, sizes, run_id, core.stage, core.me, run_seed=core.run_seed
        )
        self._travel = Travel(self.work, tasks, self._send, self._on_travelled)
        self._compute, self._engine, self._robust = compute, engine, robust
        self._links, self._questions, self._tasks, self._owner = links, questions, tasks, owner
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._average: Average | None = None
        self._drift = 0.0
        self._early: OrderedDict[str, list[tuple[str, Frame]]] = OrderedDict()
        self.seconds = 0.0
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        """not_finite: averages that every member refused. sketch: times this peer's weights had drifted."""
        self.parts_refused: Counter[str] = Counter()
        """Chunks of others' contributions that this peer, as reducer, left out, by reason."""
        self.own_parts_refused = 0
        self.overlapped: Counter[str] = Counter()
        """Averages of an earlier step: "arrived" while steps ran, or exchanged "again" in the open."""
        self._blamed: set[str] = set()
        self._began = 0.0

    # -- frames ------------------------------------------------------------------------------------------

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A frame of a round. Raises FrameError."""
        try:
            self._take(peer, frame, time.monotonic())
        except FrameError as error:
            if frame.kind in (Kind.ARRIVE, Kind.GROUP):  # nobody should have to wait for a right one
                logger.warning("step %d goes on without %s: %s", self.core.step, short(peer), error)
                self.run(self.core.on_malformed(peer, time.monotonic()))
            raise

    def _take(self, peer: str, frame: Frame, now: float) -> None:
        match frame.kind:
            case Kind.PART | Kind.AVERAGE | Kind.SLICE:
                self._on_tensor(peer, frame)
            case Kind.ARRIVE:
                arrival = parse_arrival(frame.header)
                who = peer if self._is_ours(arrival.step, arrival.lineage) else ""
                most = self.work.most_weight(arrival.step, len(arrival.keys), who, self._pending)
                most_owed = self.work.most_owed_by(who, arrival.step, self._pending)
                if arrival.weight > most or arrival.owed > most_owed:
                    weights = f"{arrival.weight} and {arrival.owed}"
                    raise FrameError("weight", f"{weights} for work of at most {most} and {most_owed} tokens")
                self.run(self.core.on_arrive(peer, arrival, now))
                if peer == self.core.leader and arrival.step == self.core.step and arrival.plan:
                    self._travel.on_inquiry(peer)
            case Kind.GROUP:
                group = parse_group(frame.header, peer)
                if self._is_ours(group.step, group.lineage):
                    self.work.check_group(group, self._pending)
                self.run(self.core.on_group(peer, group, now))
            case Kind.DIGEST:
                self.run(self.core.on_digest(peer, parse_digest(frame.header), now))
            case Kind.FAILED:
                failure = parse_failure(frame.header)
                if failure.step and peer in failure.suspects:  # it is out
                    self._travel.on_broken(peer)
                if not self._travel.on_failed(peer, failure):
                    self.run(self.core.on_failed(peer, failure, now))
            case Kind.COMMIT:
                commit = parse_commit(frame.header)
                if commit.step in (self.core.step - 1, self.core.step):  # the step before may be planned anew
                    self._owner.check_commit(commit)
                self.run(self.core.on_commit(peer, commit, now))
            case Kind.FOLLOW:
                version = need_count(frame.header, "version", MAX_STEP)
                lineage = need(frame.header, "lineage", str)[:LINEAGE_CHARACTERS]
                self.run(self.core.on_follow(peer, version, lineage, now))
            case _:
                raise FrameError("kind", f"{frame.kind} is no frame of a round")

    def _is_ours(self, step: int, lineage: str) -> bool:
        """Whether what is said is about the step at hand here, and came of the same commits."""
        return (step, lineage) == (self.core.step, self.core.lineage)

    @property
    def _pending(self) -> Group | None:
        """The group whose average is held here, and whose commit may be under way."""
        return self._average.group if self._average is not None else None

    def on_ready(self, arrival: Arrival) -> None:
        """This peer's ledger of the step is settled."""
        admitted = self._travel.admit(arrival)
        if admitted is not None:
            self.run(self.core.on_ready(admitted, time.monotonic()))

    def on_unready(self, plan: str) -> None:
        """The ledger that was reported grows again: no group may count on it, nor on this peer's accumulator.

        Of a group under way it is part already: from its GROUP on nothing new is taken (`Freeze`).
        """
        self._travel.withdraw()
        if self.core.phase is rounds.Phase.GATHERING:
            self.run(self.core.fence(plan, time.monotonic()))

    def on_peer_up(self, peer: str) -> None:
        """A replica's link is up."""
        self._travel.on_broken(peer)
        self.run(self.core.on_peer_up(peer, time.monotonic()))

    def on_peer_lost(self, peer: str, *, has_resigned: bool) -> None:
        """A replica is lost. has_resigned: whoever comes back under its name has no vote."""
        self._travel.on_broken(peer)
        self.run(self.core.on_peer_lost(peer, time.monotonic()))
        if has_resigned:
            self.run(self.core.on_resigned(peer, time.monotonic()))

    def tick(self) -> None:
        """Time passes."""
        self.run(self.core.tick(time.monotonic()))

    def begin(self, step: int, roster: tuple[str, ...], lineage: str, followers: tuple[str, ...]) -> None:
        """Take part from this step on."""
        self.suspend()
        self.work.restart()
        self.sketch = ""  # that of the weights before says nothing about these
        self.core.begin(step, roster, lineage, followers)
        self._tasks.create_task(self._take_sketch())

    def suspend(self) -> None:
        """Take no more part; a running exchange ends. The core may not know: an answer on its way must not wake it."""
        self.core.is_out = True
        self._cancel()
        self._travel.cancel()
        self._average = None
        self._early.clear()

    # -- actions -----------------------------------------------------------------------------------------

    def run(self, actions: Iterable[rounds.Action]) -> None:
        """Carry out what the core decided, in order."""
        decided = list(actions)
        for number, action in enumerate(decided):
            match action:
                case rounds.Send(peer, kind, body):
                    if kind is Kind.GROUP:
                        injector.hit("before_group", self.core.step)
                    elif isinstance(body, Commit) and body.leader == self.core.me:
                        injector.hit("before_commit", body.step)
                    self._send(peer, kind, body)
                    if isinstance(body, Commit) and injector.hit("after_first_commit", body.step):
                        return
                case rounds.Freeze(is_frozen):
                    # From one attempt straight into the next nothing may slip into the accumulator in between.
                    if is_frozen or rounds.Freeze(True) not in decided[number:]:
                        self._owner.freeze(is_frozen)
                case rounds.Exchange(group, deadline_s):
                    self._begin(group, deadline_s)
                case rounds.CancelExchange():
                    self._cancel()
                case rounds.Apply(commit):
                    self._owner.seal(commit.step)
                    self._tasks.create_task(self._apply(commit))
                case rounds.AskGone(peers):
                    for peer in peers:
                        self._tasks.create_task(self._ask_gone(peer))
                case rounds.Fence(peer, reason):
                    self._owner.fence(peer, reason)
                case rounds.Unfence():
                    self._owner.unfence()
                case rounds.AskMissing(keys):
                    self._owner.ask_missing(keys)
                case rounds.OutOfStep(commit):
                    self._owner.on_out_of_step(commit)
                case rounds.Dropped(commit):
                    self._owner.on_dropped(commit)
                case rounds.Diverged(peer, step, _):
                    self._owner.on_diverged(peer, step)
                case rounds.Replan(commit):
                    self._owner.on_replan(commit)

    def _send(self, peer: str, kind: Kind, body: rounds.Body) -> None:
        link = self._links.get(peer)
        if link is not None:  # without a link it reports again when there is one
            link.post(kind, body.header())

    def _begin(self, group: Group, deadline_s: float) -> None:
        self._owner.on_attempt()
        self._average, self._drift = None, 0.0
        self._began = time.monotonic()
        plan = self.work.exchanged(group)
        # Made before our own contribution is ready: others' parts may be here already.
        exchange = self._exchange_of(plan, deadline_s) if plan is not None else None
        if exchange is not None or group.settled:
            self._drift = drift(self.sketch, group.sketch)
        self._exchange = exchange
        self._task = self._tasks.create_task(self._run_exchange(group, exchange))

    def _exchange_of(self, plan: ExchangePlan, deadline_s: float) -> Exchange:
        exchange = Exchange(
            plan.group,
            self.core.me,
            self._compute.trainable.numel,
            plan.phases,
            self._engine,
            self._links.get,
            run_seed=self.core.run_seed,
            robust=self._robust,
            deadline_s=deadline_s,
            slice_span=plan.slice_span,
        )
        for peer, frame in self._early.pop(plan.group.id, []):
            try:
                exchange.on_frame(peer, frame)
            except FrameError as error:  # its sender's fault; without its part the exchange is late
                logger.warning("%s from %s does not fit its group: %s", frame.kind, short(peer), error)
        return exchange

    def _on_travelled(self, exchange: Exchange, seconds: float | None, waiting: Arrival | None) -> None:
        self._note_refused(exchange)
        if waiting is not None:
            self.on_ready(waiting)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self._exchange = None, None

    async def _run_exchange(self, group: Group, exchange: Exchange | None) -> None:
        try:
            made = await self.work.average(group, exchange, self.core.lineage, self._owner.own_tokens())
        except (ExchangeError, FrameError) as error:
            logger.warning("round of step %d, attempt %d failed: %s", group.step, group.attempt, error)
            self._note_refused(exchange)
            self._exchange = None
            suspects = error.suspects if isinstance(error, ExchangeError) else ()
            self.run(self.core.on_exchange_failed(group.id, error.reason, suspects, time.monotonic()))
            return
        self._note_refused(exchange)
        self._exchange = None
        self._average = made
        has_moved = exchange is not None
        self.run(self.core.on_exchanged(group.id, made.digest, time.monotonic(), has_moved=has_moved))

    def _note_refused(self, exchange: Exchange | None) -> None:
        """Count contributions that did not count; say once whose."""
        if exchange is None:
            return
        for (peer, reason), count in exchange.refused.items():
            self.parts_refused[reason] += count
            if peer not in self._blamed:
                self._blamed.add(peer)
                logger.warning(
                    "contributions of %s are left out (%s; more of this is only counted)", short(peer), reason
                )
        if exchange.refused_own:
            if not self.own_parts_refused:
                logger.warning(
                    "other members leave parts of this peer's contribution out: does it compute rightly? "
                    "(more of this is only counted)"
                )
            self.own_parts_refused += exchange.refused_own

    async def _apply(self, commit: Commit) -> None:
        norm: float | None = None
        held, corrections = self._average, self._corrections
        update = held.update if held is not None else None
        if (
            held is None
            or update is None
            or held.group.id != commit.group
            or not corrections.holds(update.corrector)
            or not corrections.holds(held.group.corrector)  # own steps that are taken now are corrected by it
        ):
            self._owner.on_out_of_step(commit)
            return
        named = update.corrector if self._compute.outer is None else held.group.corrector
        self.corrected_by = named if commit.weight and update.way != "none" else ""
        try:
            norm = await self.work.apply(held, commit)
        except ValueError as error:
            # Every member holds the same bytes, so every member refuses them; a gradient of its own is its own affair.
            logger.error("step %d applies nothing: %s", commit.step, error)
            self.refusals["not_finite"] += 1
        if update.way in ("exchanged", "alone"):  # what the sketch is of has changed
            await self._take_sketch()
            settled = self.work.settled(commit.step)
            if settled is not None and settled < commit.step:
                self.overlapped["arrived" if held.group.settled else "again"] += 1
        self.work.note_committed(held.group)
        self._average = None
        self.outcomes["committed"] += 1
        self.seconds = time.monotonic() - self._began
        writers = seeded_order(commit.roster, self.core.run_seed, self.core.stage, commit.step)
        if self.core.me in writers[:UPDATE_WRITERS]:
            self._updates.record(update)
        actions = self.core.on_applied(commit, time.monotonic())
        if not self.core.is_out and (plan := self.work.travelling(held.group)) is not None:
            exchange = self._exchange_of(plan, self._travel.pace.exchange_deadline_s)
            self._travel.begin(exchange, self.core.present)
        self._early.clear()
        self._owner.on_applied(commit, norm)
        self.run(actions)
        if self._drift > SKETCH_TOLERANCE:
            self.refusals["sketch"] += 1
            self._owner.on_drifted(self._drift)

    async def _take_sketch(self) -> None:
        self.sketch = (await self._engine.submit(JobPriority.ROUND, self._compute.sketch)).hex()

    async def _ask_gone(self, peer: str) -> None:
        """Ask neighbours of other stages; without any, our own dial has to do."""
        stage = self.core.stage
        witnesses = [
            link for link in self._links.open_links() if link.hello.stage != stage and link.hello.stage >= 0
        ]
        if witnesses:
            answers = await self._questions.ask(
                witnesses, "gone", peer, is_enough=lambda answer: answer is True
            )
            is_gone = any(answer is True for answer in answers.values())
        else:
            is_gone = await self._links.probe(peer) is Liveness.GONE
        if is_gone:
            logger.info("replica %s is confirmed gone", short(peer))
            self.run(self.core.on_gone(peer, time.monotonic()))

    def _on_tensor(self, peer: str, frame: Frame) -> None:
        group = group_of(frame)
        for exchange in (self._exchange, self._travel.exchange):
            if exchange is not None and exchange.group.id == group:
                exchange.on_frame(peer, frame)
                return
        if self._travel.is_over(group):
            return
        if peer not in self.core.roster and peer not in self.core.followers:
            raise FrameError("stranger", f"{short(peer)} is not in the roster")
        if not frame.payload_bytes:
            raise FrameError("size", f"{frame.kind} without a payload")
        # PART may overtake the GROUP that announces it: they travel on different streams.
        frames = self._early.setdefault(group, [])
        held = sum(f.payload_bytes for queue in self._early.values() for _, f in queue)
        if held + frame.payload_bytes > EARLY_BYTES or len(frames) >= EARLY_FRAMES:
            raise FrameError("early", "too much of groups that were never announced")
        frames.append((peer, frame))
        while len(self._early) > EARLY_GROUPS:
            self._early.popitem(last=False)


def drift(mine: str, leaders: str) -> float:
    """Relative distance of two sketches (hex); 0 if one of the two is not given."""
    if not mine or not leaders:
        return 0.0
    try:
        return sketch_distance(bytes.fromhex(mine), bytes.fromhex(leaders))
    except ValueError:
        return 0.0  # a leader that sends no sketch says nothing about our weights
