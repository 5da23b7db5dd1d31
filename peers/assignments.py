"""Who runs the slots of a plan at stage 0, and what happens to slots that outlive their source.

An assignment is a counter and one source per slot; the highest counter wins. It changes no key: whoever
runs a slot runs the same samples under the same keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from peers.frames import Frame, FrameError, Kind, need, need_count, need_texts
from peers.link import Link
from peers.links import Links
from peers.planning import KEPT_PLANS, PlanBook
from swarm.plan import MAX_SLOTS, Plan

logger = logging.getLogger("swarm_peer.assignments")


class Assignments:
    """The assignment in force at one source. `run_slot(plan, slot, is_replay)` starts a slot of this peer."""

    def __init__(self, me: str, links: Links, run_slot: Callable[[Plan, int, bool], None]) -> None:
        self._me, self._links, self._run_slot = me, links, run_slot
        self._plan = ""
        self._counter = 0
        self._sources: list[str] = []
        self._early: dict[str, tuple[int, list[str]]] = {}

    def begin(self, plan: Plan, sources: list[str]) -> None:
        """The assignment that came with a plan."""
        self._plan, self._counter, self._sources = plan.digest(), 0, sources

    def run_own(self, plan: Plan, is_replay: bool = False) -> None:
        """Start the slots that are this peer's from the beginning.

        is_replay: this peer may have run them before (it began anew in the middle of the step).
        """
        if plan.digest() == self._plan and self._counter == 0:
            for slot, source in enumerate(self._sources):
                if source == self._me:
                    self._run_slot(plan, slot, is_replay)

    def is_own(self, plan: Plan, slot: int) -> bool:
        """Whether a slot is this peer's to run, as far as it knows."""
        return plan.digest() != self._plan or self._sources[slot] == self._me

    def take_early(self, plan: Plan) -> None:
        """Take an ASSIGN that came before the plan it is about."""
        if (early := self._early.pop(plan.digest(), None)) is not None:
            self._take(plan, *early)

    def reassign(self, plan: Plan, able: Sequence[str]) -> None:
        """As lead source, give the slots of sources that are not able (lost, fenced) to those that are, and say so."""
        if any(source not in able for source in self._sources):
            self._give(plan, able)

    def recover(self, plan: Plan, able: Sequence[str]) -> None:
        """As lead source, have every slot run by those able to, whoever believes that it is done or somebody else's.

        For keys that nobody's ledger holds although their source lives: it began anew in the middle of the step,
        or two peers took themselves for the lead source. What a source has run before it does not run again.
        """
        self._give(plan, able)

    def _give(self, plan: Plan, able: Sequence[str]) -> None:
        if plan.digest() != self._plan or not able:
            return
        orphaned = [slot for slot, source in enumerate(self._sources) if source not in able]
        changed = list(self._sources)
        for number, slot in enumerate(orphaned):
            changed[slot] = able[number % len(able)]
        logger.info("slots %s of step %d go to other sources", orphaned, plan.step)
        for link in self._links.open_links(0):
            self._post(link, self._counter + 1, changed)
        self._take(plan, self._counter + 1, changed)

    def repeat(self, link: Link) -> None:
        """Tell a source whose link is up (again) what it may have missed."""
        if self._counter > 0:
            self._post(link, self._counter, self._sources)

    def on_frame(self, frame: Frame, plans: PlanBook, current: Plan | None) -> None:
        """An ASSIGN of another source. Raises FrameError."""
        digest = need(frame.header, "plan", str)[:64]
        counter = need_count(frame.header, "counter", 2**31)
        sources = need_texts(frame.header, "sources", MAX_SLOTS)
        plan = plans.get(digest)
        if plan is None:
            # The lead source has applied the COMMIT that brings this plan; this peer has not yet.
            self._early[digest] = (counter, sources)
            while len(self._early) > KEPT_PLANS:
                self._early.pop(next(iter(self._early)))
        elif len(sources) != len(plan.slots):
            raise FrameError("assign", f"{len(sources)} sources for {len(plan.slots)} slots")
        elif plan is current:
            self._take(plan, counter, sources)

    def _take(self, plan: Plan, counter: int, sources: list[str]) -> None:
        if counter <= self._counter or len(sources) != len(plan.slots) or plan.digest() != self._plan:
            return
        self._counter, self._sources = counter, sources
        for slot, source in enumerate(sources):
            if source == self._me:
                self._run_slot(plan, slot, True)  # of a slot it runs already, only what it lacks

    def _post(self, link: Link, counter: int, sources: list[str]) -> None:
        link.post(Kind.ASSIGN, {"plan": self._plan, "counter": counter, "sources": sources})
