"""Keys that no ledger of a stage holds: members fenced, keepers asked, and at last the lost ones counted.

Asked by the leader of a round; heeded by fenced members and by keepers. Lives in the communication loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from peers.averaging import Averaging
from peers.frames import FrameError, Kind
from peers.link import Link
from peers.links import Links, short
from peers.planning import PlanBook
from peers.questions import Questions
from peers.round_messages import MAX_STEP, CompactKey
from peers.stage import StageWorker
from peers.work_messages import Fence, Missing, Ready, parse_missing
from swarm.plan import Plan

logger = logging.getLogger("swarm_peer.trainer")


class Recovery:
    """What one peer knows of fences and lost keys in the step in progress.

    fenced: peers of the own stage that are fenced under the plan in force. lost: keys that cannot reach this
    stage any more: every peer of the previous one has committed the step and keeps them no longer.
    """

    def __init__(
        self,
        *,
        stage: int,
        links: Links,
        questions: Questions,
        worker: StageWorker,
        averaging: Averaging,
        tasks: asyncio.TaskGroup,
        note: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.fenced: set[str] = set()
        self.lost: set[CompactKey] = set()
        self._stage, self._links, self._questions = stage, links, questions
        self._worker, self._averaging, self._tasks = worker, averaging, tasks
        self._note, self._on_change = note, on_change
        self._me = links.me

    def clear(self) -> None:
        """The step has ended, or this peer takes part no more."""
        self.fenced.clear()
        self.lost.clear()

    def fence(self, peer: str, reason: str) -> None:
        """As leader: take a member's ledger of the step away, so that others do its part again."""
        plan = self._worker.core.plan
        if plan is None:
            return
        fence = Fence(plan.digest(), peer, reason)
        logger.warning("%s is fenced in step %d: %s", short(peer), plan.step, reason)
        for link in self._links.open_links():
            # All sources hear of it: whoever leads next must give a fenced one no slots.
            if link.peer == peer or link.hello.stage == max(0, self._stage - 1):
                link.post(Kind.FENCE, fence.header())
        self.fenced.add(peer)
        if peer == self._me:
            self.on_fenced(fence)
        self.look()

    def on_fence(self, link: Link, fence: Fence, *, is_in: bool) -> bool:
        """FENCE of the next stage, or of a replica; True if slots may need another source. Raises FrameError.

        is_in: whether this peer takes part in its stage. A fence of another plan than the one worked on comes too
        late, and means nothing any more.
        """
        if link.hello.stage == self._stage + 1:
            self._worker.run(self._worker.core.on_fenced(fence.peer, fence.plan, time.monotonic()))
            return False
        if link.hello.stage != self._stage:
            raise FrameError("stage", f"FENCE from stage {link.hello.stage}")
        plan = self._worker.core.plan
        if not is_in or plan is None or plan.digest() != fence.plan:
            return False
        if link.peer not in self._averaging.core.roster:
            raise FrameError("stranger", f"FENCE of {short(link.peer)}, who is not in the roster")
        self.fenced.add(fence.peer)
        if fence.peer == self._me:
            self.on_fenced(fence)
        return True

    def on_fenced(self, fence: Fence) -> None:
        """This peer's ledger of the step is void: it arrives empty, and others do its part again."""
        now, plan = time.monotonic(), self._worker.core.plan
        if plan is None or plan.digest() != fence.plan:
            return
        self._averaging.run(self._averaging.core.fence(fence.plan, now))
        if not self._worker.core.is_fenced:
            self._note(f"fenced in step {plan.step} ({fence.reason[:20]}): others do this peer's part again")
            self._worker.run(self._worker.core.fence(fence.plan, now))
            for link in self._links.open_links(max(0, self._stage - 1)):
                link.post(Kind.FENCE, Fence(fence.plan, self._me, fence.reason).header())
        self._on_change()

    def look(self) -> None:
        """If all who are left are fenced, somebody has to work again: the leader does."""
        rounds = self._averaging.core
        if rounds.leader == self._me and set(rounds.present) <= self.fenced:
            self.unfence()

    def unfence(self) -> None:
        """As leader: work on the step again, whoever fenced this peer before."""
        self._worker.core.unfence()
        self.fenced.discard(self._me)
        self._links.gossip(Kind.READY, Ready(self._worker.core.version).header())

    def ask(self, keys: tuple[CompactKey, ...]) -> None:
        """As leader: keepers of the previous stage send these keys again; those nobody can send are lost."""
        plan = self._worker.core.plan
        if plan is None:
            return
        for link in self._links.open_links(self._stage - 1):
            link.post(Kind.MISSING, Missing(plan.digest(), keys).header())
        self._tasks.create_task(self._find_lost(plan, keys))

    def on_missing(self, link: Link, missing: Missing, plans: PlanBook) -> None:
        """MISSING of the next stage: what is kept here goes again. Raises FrameError."""
        if link.hello.stage != self._stage + 1:
            raise FrameError("stage", f"MISSING from stage {link.hello.stage}")
        plan = plans.get(missing.plan)
        if plan is not None:
            self._worker.run(self._worker.core.on_missing(missing.of(plan), time.monotonic()))

    async def _find_lost(self, plan: Plan, keys: tuple[CompactKey, ...]) -> None:
        """Whoever might keep a key must have answered: a link that is down for a moment loses nothing."""
        near = [n for n in self._links.neighbours.values() if n.stage == self._stage - 1 and not n.is_idle]
        links = self._links.open_links(self._stage - 1)
        about = [plan.digest(), [list(key) for key in keys]]
        answers = await self._questions.ask(links, "keeps", about)
        if not links or not {neighbour.peer for neighbour in near} <= set(answers):
            return
        left = set(keys)
        for peer, answer in answers.items():
            try:
                left -= kept_by(answer, plan)
            except FrameError as error:
                logger.warning("%s does not say what it keeps: %s", short(peer), error)
                return
        left -= {(key.slot, key.microbatch) for key in self._worker.core.ledger}
        if left and self._worker.core.plan is plan and not left <= self.lost:
            self.lost |= left
            self._note(
                f"{len(left)} microbatches of step {plan.step} are lost: nobody can give them any more"
            )
            self._on_change()


def kept_by(answer: object, plan: Plan) -> set[CompactKey]:
    """Keys that may still come by the word of one peer of the previous stage. Raises FrameError.

    One that does not know the plan keeps none of its keys; one that has not committed the step may get any of
    them from the stage before it.
    """
    if answer is None:
        return set()
    if not isinstance(answer, list) or len(answer) != 2 or type(answer[0]) is not int:
        raise FrameError("header", "keeps is answered by [version, keys]")
    if not 0 <= answer[0] <= MAX_STEP:
        raise FrameError("range", f"version {answer[0]}")
    if answer[0] <= plan.step:
        return {(key.slot, key.microbatch) for key in list(plan.keys())}
    if answer[1] == []:
        return set()
    return set(parse_missing({"plan": plan.digest(), "keys": answer[1]}).keys)
