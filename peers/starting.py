"""The shell around the start of a run: carries out what `StartCore` decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from peers import start
from peers.frames import Frame, FrameError, Kind, need
from peers.link import Link
from peers.links import Links
from peers.planning import PlanBook, make_plan
from swarm.manifest import RunManifest
from swarm.plan import Plan


class Starter:
    """Proposes, acknowledges and passes on the start. `on_begin(start, first plan)` is called once."""

    def __init__(
        self,
        *,
        manifest: RunManifest,
        stage: int,
        links: Links,
        plans: PlanBook,
        version: Callable[[], int],
        on_begin: Callable[[start.Start, Plan], None],
    ) -> None:
        self._manifest, self._links, self._plans = manifest, links, plans
        self._version, self._on_begin = version, on_begin
        self.core = start.StartCore(
            me=links.me,
            stage=stage,
            stages=manifest.model.stages,
            run_seed=manifest.seed,
            min_replicas=manifest.min_replicas,
            make_start=self._make_start,
        )

    def tick(self, now: float, online: Sequence[Sequence[str]]) -> None:
        """Time passes. online: peers ready to start, per stage."""
        self._run(self.core.tick(now, online))

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
        if len(message.sources) != len(plan.slots) or not set(message.sources) <= set(message.rosters[0]):
            raise FrameError("start", "every slot needs a source of the roster")
        if frame.kind is Kind.PROPOSE:
            self._run(self.core.on_propose(link.peer, message, time.monotonic()))
        else:
            self._run(self.core.on_start(message))

    def _make_start(self, rosters: tuple[tuple[str, ...], ...]) -> start.Start:
        plan, sources = make_plan(self._manifest, self._version(), 0, "", rosters[0])
        return start.Start(self._version(), rosters, plan.to_bytes(), sources)

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
