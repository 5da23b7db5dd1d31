"""Which slots of which plans have ended: said by their sources, passed on once by everybody."""

from __future__ import annotations

from collections import defaultdict

from peers.frames import Kind
from peers.link import Link
from peers.links import Links
from peers.planning import KEPT_PLANS, PlanBook
from swarm.plan import Plan


class StepEnds:
    """STEP_END as one peer has heard it."""

    def __init__(self, plans: PlanBook, links: Links) -> None:
        self._plans, self._links = plans, links
        self._ended: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, digest: str, slot: int) -> bool:
        """A slot has ended; True if that is news. Passed on once its plan is known: nothing invented travels."""
        plan = self._plans.get(digest)
        if plan is None:
            # A source may hear of the end before its own COMMIT brings the plan; what is invented stays bounded.
            unknown = [known for known in self._ended if self._plans.get(known) is None]
            for invented in unknown[: max(0, len(unknown) - KEPT_PLANS)]:
                del self._ended[invented]
        elif slot >= len(plan.slots):
            return False
        if slot in self._ended[digest]:
            return False
        self._ended[digest].add(slot)
        if plan is not None:
            self._links.gossip(Kind.STEP_END, {"plan": digest, "slot": slot})
        return True

    def learned(self, plan: Plan) -> None:
        """The plan is known now: ends heard before it are passed on."""
        digest = plan.digest()
        if digest not in self._ended:
            return
        self._ended[digest] = {slot for slot in self._ended[digest] if slot < len(plan.slots)}
        for slot in self._ended[digest]:
            self._links.gossip(Kind.STEP_END, {"plan": digest, "slot": slot})

    def are_complete(self, plan: Plan) -> bool:
        """Whether every slot of the plan has ended."""
        return len(self._ended.get(plan.digest(), ())) >= len(plan.slots)

    def count(self, plan: Plan | None) -> int:
        """Slots of a plan that have ended."""
        return len(self._ended.get(plan.digest(), ())) if plan is not None else 0

    def repeat(self, link: Link, plan: Plan) -> None:
        """Tell one neighbour all that has ended of a plan."""
        for slot in sorted(self._ended.get(plan.digest(), ())):
            link.post(Kind.STEP_END, {"plan": plan.digest(), "slot": slot})

    def forget(self, step: int) -> None:
        """Nothing of the plans up to this step is asked for any more."""
        for digest in list(self._ended):
            plan = self._plans.get(digest)
            if plan is not None and plan.step <= step:
                del self._ended[digest]
