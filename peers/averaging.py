"""The shell around a stage's rounds: carries out what `RoundCore` decides.

Exchanges run as tasks; the average of an attempt is held until its COMMIT, and only then applied on the
compute thread. A failed attempt leaves accumulator and weights as they were.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from peers import rounds
from peers.compute import StageCompute
from peers.engine import Engine, JobPriority
from peers.exchange import Exchange, ExchangeError, group_of
from peers.frames import Frame, FrameError, Kind, need
from peers.links import Links, Liveness, short
from peers.questions import Questions
from peers.round_messages import Arrival, Commit, Group, parse_arrival, parse_commit, parse_group
from swarm.gradient.values import ValueFormat

logger = logging.getLogger("swarm_peer.rounds")
EARLY_GROUPS = 4
EARLY_BYTES = 256 * 1024 * 1024


class RoundsOwner(Protocol):
    """Who is told what the rounds decide."""

    def freeze(self, is_frozen: bool) -> None:
        """Hold the step's ledger still, or release it."""

    def seal(self, step: int) -> None:
        """The step is decided: nothing may reach its accumulator any more."""

    def check_commit(self, commit: Commit) -> None:
        """Raise FrameError for a COMMIT whose next plan this run cannot have."""

    def on_applied(self, commit: Commit, norm: float | None) -> None:
        """A step is committed and applied. norm: of the averaged gradient; None if nothing was applied."""

    def on_out_of_step(self, commit: Commit) -> None:
        """The others committed a step whose average this peer does not hold."""


class Averaging:
    """Rounds of one stage peer. Lives in the communication loop."""

    def __init__(
        self,
        *,
        core: rounds.RoundCore,
        compute: StageCompute,
        values: ValueFormat,
        engine: Engine,
        links: Links,
        questions: Questions,
        tasks: asyncio.TaskGroup,
        owner: RoundsOwner,
    ) -> None:
        self.core = core
        self._compute, self._values, self._engine = compute, values, engine
        self._links, self._questions, self._tasks, self._owner = links, questions, tasks, owner
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._average: tuple[str, Tensor] | None = None
        self._early: OrderedDict[str, list[tuple[str, Frame]]] = OrderedDict()
        self.seconds = 0.0
        self.outcomes: Counter[str] = Counter()
        self._began = 0.0

    # -- frames ------------------------------------------------------------------------------------------

    def on_frame(self, peer: str, frame: Frame) -> None:
        """A frame of a round. Raises FrameError."""
        now = time.monotonic()
        match frame.kind:
            case Kind.PART | Kind.AVERAGE:
                self._on_tensor(peer, frame)
            case Kind.ARRIVE:
                self.run(self.core.on_arrive(peer, parse_arrival(frame.header), now))
            case Kind.GROUP:
                self.run(self.core.on_group(peer, parse_group(frame.header, peer), now))
            case Kind.DIGEST:
                group, digest = need(frame.header, "group", str), need(frame.header, "digest", str)
                self.run(self.core.on_digest(peer, group, digest, now))
            case Kind.FAILED:
                group, reason = need(frame.header, "group", str), need(frame.header, "reason", str)
                self.run(self.core.on_failed(peer, group, known_reason(reason), now))
            case Kind.COMMIT:
                commit = parse_commit(frame.header)
                if commit.step == self.core.step:
                    self._owner.check_commit(commit)
                self.run(self.core.on_commit(peer, commit, now))
            case _:
                raise FrameError("kind", f"{frame.kind} is no frame of a round")

    def on_ready(self, arrival: Arrival) -> None:
        """This peer's ledger of the step is settled."""
        self.run(self.core.on_ready(arrival, time.monotonic()))

    def on_peer_up(self, peer: str) -> None:
        """A replica's link is up."""
        self.run(self.core.on_peer_up(peer, time.monotonic()))

    def on_peer_lost(self, peer: str) -> None:
        """A replica is lost."""
        self.run(self.core.on_peer_lost(peer, time.monotonic()))

    def tick(self) -> None:
        """Time passes."""
        self.run(self.core.tick(time.monotonic()))

    # -- actions -----------------------------------------------------------------------------------------

    def run(self, actions: Iterable[rounds.Action]) -> None:
        """Carry out what the core decided, in order."""
        for action in actions:
            match action:
                case rounds.Send(peer, kind, body):
                    self._send(peer, kind, body)
                case rounds.Freeze(is_frozen):
                    self._owner.freeze(is_frozen)
                case rounds.Exchange(group):
                    self._begin(group)
                case rounds.CancelExchange():
                    self._cancel()
                case rounds.Apply(commit):
                    self._owner.seal(commit.step)
                    self._tasks.create_task(self._apply(commit))
                case rounds.AskGone(peers):
                    for peer in peers:
                        self._tasks.create_task(self._ask_gone(peer))
                case rounds.OutOfStep(commit):
                    self._owner.on_out_of_step(commit)

    def _send(self, peer: str, kind: Kind, body: Arrival | Group | Commit | tuple[str, str]) -> None:
        link = self._links.get(peer)
        if link is None:
            return  # it reports again when its link is up
        if isinstance(body, tuple):
            link.post(kind, {"group": body[0], "digest" if kind is Kind.DIGEST else "reason": body[1]})
        else:
            link.post(kind, body.header())

    def _begin(self, group: Group) -> None:
        self._average = None
        self._began = time.monotonic()
        if len(group.members) > 1 and sum(group.weights) > 0:
            # Made before our own contribution is ready: others' parts may be here already.
            numel = self._compute.trainable.numel
            self._exchange = Exchange(group, self.core.me, numel, self._values, self._engine, self._links.get)
            for peer, frame in self._early.pop(group.id, []):
                self._exchange.on_frame(peer, frame)
        self._task = self._tasks.create_task(self._run_exchange(group, self._exchange))

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self._exchange = None, None

    async def _run_exchange(self, group: Group, exchange: Exchange | None) -> None:
        weight = group.weights[group.members.index(self.core.me)]
        contribution = await self._engine.submit(JobPriority.ROUND, self._compute.contribution, weight)
        try:
            if exchange is None:
                # Nothing to exchange: a group of one skips exchange and compressor.
                average, digest = contribution, hashlib.sha256(f"{group.id}/alone".encode()).hexdigest()
            else:
                average, digest = await exchange.run(contribution)
        except (ExchangeError, FrameError) as error:
            logger.warning("round of step %d, attempt %d failed: %s", group.step, group.attempt, error)
            self.outcomes[error.reason] += 1
            self._exchange = None
            self.run(self.core.on_exchange_failed(group.id, error.reason, time.monotonic()))
            return
        self._exchange = None
        self._average = (group.id, average)
        self.run(self.core.on_exchanged(group.id, digest, time.monotonic()))

    async def _apply(self, commit: Commit) -> None:
        norm: float | None = None
        held = self._average
        group = self.core.group
        try:
            if held is None or held[0] != commit.group:
                self._owner.on_out_of_step(commit)
                return
            if group is not None and sum(group.weights) == 0:
                await self._engine.submit(JobPriority.ROUND, self._compute.clear)
            else:
                norm = await self._engine.submit(JobPriority.ROUND, self._compute.apply, held[1], commit.step)
        except ValueError as error:
            # Every member holds the same bytes, so every member refuses them.
            logger.error("step %d applies nothing: %s", commit.step, error)
            self.outcomes["not_finite"] += 1
        self._average = None
        self._early.clear()
        self.outcomes["committed"] += 1
        self.seconds = time.monotonic() - self._began
        self.core.on_applied(commit)
        self._owner.on_applied(commit, norm)

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
        if self._exchange is not None and self._exchange.group.id == group:
            self._exchange.on_frame(peer, frame)
            return
        if peer not in self.core.roster:
            raise FrameError("stranger", f"{short(peer)} is not in the roster")
        # PART may overtake the GROUP that announces it: they travel on different streams.
        frames = self._early.setdefault(group, [])
        held = sum(f.payload_bytes for queue in self._early.values() for _, f in queue)
        if held + frame.payload_bytes > EARLY_BYTES:
            raise FrameError("early", "too much of groups that were never announced")
        frames.append((peer, frame))
        while len(self._early) > EARLY_GROUPS:
            self._early.popitem(last=False)


REASONS = ("late", "key", "weight", "digest", "disconnected", "not_finite", "alone", "schema")


def known_reason(reason: str) -> str:
    """A remote peer's reason as one of our own labels: metrics never take text from the wire."""
    return reason if reason in REASONS else "other"
