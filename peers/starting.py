"""The shell around the start of a run: carries out what `StartCore` decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from peers import start
from peers.frames import Frame, FrameError, Kind, need
from peers.joining import common_version, stages_without_state
from peers.limits import LIMITS
from peers.link import Link
from peers.links import Links
from peers.planning import PlanBook, make_plan
from swarm.manifest import RunManifest
from swarm.plan import Plan

Held = Sequence[Mapping[str, Sequence[int]]]
"""Peers that are ready to start, per stage, each with the versions it can serve."""


class Starter:
    """Proposes, acknowledges and passes on the start. `on_begin(start, first plan)` is called once.

    A run starts from the newest version that somebody in every stage holds: 0 the first time, a snapshot after
    the whole swarm was stopped. `on_finished` is called if every stage holds the run's last version.
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        links: Links,
        plans: PlanBook,
        note: Callable[[str], None],
        on_begin: Callable[[start.Start, Plan], None],
        on_finished: Callable[[], None],
    ) -> None:
        self._manifest, self._links, self._plans = manifest, links, plans
        self._note, self._on_begin, self._on_finished = note, on_begin, on_finished
        self._held: Held = ()
        self._incomplete_since: float | None = None
        self.core = start.StartCore(
            me=links.me,
            stage=stage,
            stages=manifest.model.stages,
            run_seed=manifest.seed,
            min_replicas=manifest.min_replicas,
            make_start=self._make_start,
        )

    def tick(self, now: float, held: Held) -> None:
        """Time passes. held: peers ready to start, per stage, with what they can serve."""
        self._held = held
        if self.core.started is None and self._waits_for_state(now, held):
            return
        if self.core.started is None and common_version(held) >= self._manifest.total_steps:
            self._on_finished()
            return
        self._run(self.core.tick(now, [list(stage) for stage in held]))

    def _waits_for_state(self, now: float, held: Held) -> bool:
        """After a stop, those who hold a stage's newest state may only be on their way."""
        without = stages_without_state(held)
        if not without:
            self._incomplete_since = None
            return False
        if self._incomplete_since is None:
            self._incomplete_since = now
            self._note(
                f"a newer state than the initial one is held in some stages, in stage "
                f"{', '.join(map(str, without))} not: waiting {LIMITS.cold_start_s:.0f} s for its holders"
            )
        return now - self._incomplete_since < LIMITS.cold_start_s

    def on_frame(self, link: Link, frame: Frame) -> None:
        """PROPOSE, ACKNOWLEDGE or START. Raises FrameError."""
        if frame.kind is Kind.ACKNOWLEDGE:
            self._run(self.core.on_acknowledge(link.peer, need(frame.header, "start", str), time.monotonic()))
            return
        message = start.parse_start(frame.header)
        if len(message.rosters) != self._manifest.model.stages:
            raise FrameError("start", f"{len(message.rosters)} rosters")
        if self.core.started is not None:
            return
        plan = self._plans.parse(message.plan, message.version)
        if plan.step != message.version:
            raise FrameError("start", f"a plan of step {plan.step} for a start at {message.version}")
        if len(message.sources) != len(plan.slots) or not set(message.sources) <= set(message.rosters[0]):
            raise FrameError("start", "every slot needs a source of the roster")
        if frame.kind is Kind.PROPOSE:
            self._run(self.core.on_propose(link.peer, message, time.monotonic()))
        else:
            self._run(self.core.on_start(message, time.monotonic()))

    def repeat(self, link: Link, version: int) -> None:
        """Tell a neighbour of the start, until its first step is committed here (version: steps applied).

        After that a peer that it names and that did not hear of it, or started anew, has to join.
        """
        if self.core.started is not None and version <= self.core.started.version:
            link.post(Kind.START, self.core.started.header())

    def _make_start(self, rosters: tuple[tuple[str, ...], ...]) -> start.Start:
        version = common_version(self._held)
        plan, sources = make_plan(self._manifest, version, 0, "", rosters[0])
        return start.Start(version, rosters, plan.to_bytes(), sources)

    def _run(self, actions: Iterable[start.Action]) -> None:
        for action in actions:
            match action:
                case start.Tell(peer, kind, header):
                    link = self._links.get(peer)
                    if link is not None:
                        link.post(kind, header)
                case start.Begin(message):
                    self._links.gossip(Kind.START, message.header())
                    self._on_begin(message, self._plans.parse(message.plan, message.version))
