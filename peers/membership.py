"""How a peer comes into a running stage, and back into it after it fell out of step.

A joiner takes the newest snapshot it can get, applies the updates since then one by one, asks to follow,
enters one round without a vote, and votes from then on. A stage that has no voting peer left is refilled: one
of those who wait takes the newest state there is and goes on at the step its neighbours are at; nobody else
rolls back. Lives in the communication loop; decisions from figures alone stand in `joining`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from peers.catchup import CatchUp, LineageError, RestoreError, UpdateMissing
from peers.config import UserError
from peers.frames import FrameError, Kind
from peers.joining import (
    Outlook,
    Standing,
    Status,
    StepClock,
    current_status,
    may_follow,
    parse_status,
    refiller,
    updates_before_a_look,
)
from peers.limits import LIMITS
from peers.links import Links, Liveness, short
from peers.questions import Questions
from peers.round_messages import Commit, next_lineage

logger = logging.getLogger("swarm_peer.membership")

FINISHED = "the run is finished: collect its weights with `swarm-peer export`"
LOOKS_IN_VAIN = 3
"""Looks at a stage whose round is over, or that nobody votes in, before a follower gives up waiting to be counted."""

Donors = Mapping[str, tuple[int, ...]]
"""Peer id -> versions whose snapshots it can serve."""


class View(Protocol):
    """What the noticeboard says of this peer's stage."""

    def donors(self) -> Donors:
        """Peers that may serve this stage's snapshots and updates."""

    def claimants(self) -> list[str]:
        """Other peers whose records say that they train this stage."""

    def waiting(self) -> list[str]:
        """Other peers of this stage that are online and do not train."""

    def knows(self, peer: str, stage: int) -> bool:
        """Whether a live record says that this peer holds this stage."""


class MembershipOwner(Protocol):
    """Who holds the state machines of the stage."""

    @property
    def is_applying(self) -> bool:
        """Whether a step is decided, and its average being applied."""

    def suspend(self) -> None:
        """Take no more part in work and rounds: what was accumulated is void."""

    def enter(
        self,
        step: int,
        roster: tuple[str, ...],
        lineage: str,
        followers: tuple[str, ...] = (),
        commit: Commit | None = None,
    ) -> None:
        """Take part from this step on, as a voting member of the roster or as one of the followers.

        commit: the one that lists this peer as a follower; at stage 0 it brings the plan.
        """

    def vote(self) -> None:
        """This peer is a voting member now: tell the neighbours."""


class Membership:
    """One peer's standing in its stage."""

    def __init__(
        self,
        *,
        stage: int,
        stages: int,
        total_steps: int,
        run_seed: int,
        links: Links,
        questions: Questions,
        catchup: CatchUp,
        view: View,
        owner: MembershipOwner,
        tasks: asyncio.TaskGroup,
        on_failure: Callable[[Exception], None],
        on_refilled: Callable[[int, str], None],
        note: Callable[[str], None],
    ) -> None:
        self.standing = Standing.WAITING
        self.refills = 0
        self._stage, self._stages, self._total_steps = stage, stages, total_steps
        self._run_seed = run_seed
        self._links, self._questions, self._catchup, self._view = links, questions, catchup, view
        self._owner = owner
        self._clock = StepClock()
        self._tasks, self._on_failure = tasks, on_failure
        self._task: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        self._on_refilled, self._note = on_refilled, note
        self._held: tuple[int, str] | None = None
        self._failures = 0
        self._listed: asyncio.Future[Commit] | None = None
        self._entered: asyncio.Future[bool] | None = None
        self._use_own = True
        self._at_least = 0
        self._outlook = Outlook()

    # -- events --------------------------------------------------------------------------------------------

    async def restore(self, version: int) -> str | None:
        """Hold exactly the version the run starts from; returns its lineage. Raises UserError.

        None if nobody gives that version: this peer joins those of its stage who have it, then.
        """
        self.standing = Standing.RESTORING
        try:
            return await self._catchup.restore(version, self._view.donors()) if version else ""
        except RestoreError as error:
            self._note(f"warning: {error}\nit joins once others train")
            self._begin_to_join(None, use_own=True)
            return None

    def on_commit(self, peer: str, commit: Commit) -> None:
        """A COMMIT of a replica, while this peer catches up."""
        if self._listed is not None and not self._listed.done() and self._links.me in commit.followers:
            self._listed.set_result(commit)

    def on_vote(self) -> None:
        """A COMMIT that was applied names this peer in its roster."""
        if self._entered is not None and not self._entered.done():
            self._entered.set_result(True)
            self._voted()  # at once: whatever comes next concerns a voting member

    def on_dropped(self) -> None:
        """The round this peer followed was committed without it."""
        if self._entered is not None and not self._entered.done():
            self._entered.set_result(False)

    def look_around(self, now: float) -> None:
        """Before the start: somebody near who votes proves that the run is under way, and it is joined."""
        if now - self._looked_at >= LIMITS.refill_look_s and self._task is None:
            self._looked_at = now
            self._task = self._tasks.create_task(self._look())

    async def _look(self) -> None:
        beside = (self._stage - 1, self._stage, self._stage + 1)
        is_running = any([await self.is_working(stage) for stage in beside])
        self._task = None
        if is_running and self.standing is Standing.WAITING:
            self._note("the run is under way: joining it")
            self._begin_to_join(None, use_own=True)

    def rejoin(self, why: str, held: tuple[int, str] | None, *, use_own: bool, at_least: int = 0) -> None:
        """Fall out of the rounds and come back. See `join` for held and use_own.

        at_least: the version the others are known to have. A peer that followed from a lower one would vote as if
        it had never taken part in that commit.
        """
        self._at_least = at_least
        if self.standing is Standing.FOLLOWING:
            self.on_dropped()
        elif self.standing is Standing.VOTING:
            self._note(f"{why}: catching up")
            self._begin_to_join(held, use_own=use_own)

    def _begin_to_join(self, held: tuple[int, str] | None, *, use_own: bool) -> None:
        self.standing = Standing.CATCHING_UP
        self._owner.suspend()
        self._task = self._tasks.create_task(self._join_or_fail(held, use_own))

    async def _join_or_fail(self, held: tuple[int, str] | None, use_own: bool) -> None:
        try:
            await self.join(held, use_own=use_own)
        except Exception as error:
            self._on_failure(error)

    async def join(self, held: tuple[int, str] | None, *, use_own: bool = True) -> None:
        """Come to a vote. held: version and lineage of the weights in memory; None takes the newest snapshot.

        use_own: whether checkpoints of this peer may be of the stage's lineage. Raises UserError if the run is
        over or the peer cannot keep up.
        """
        self._held, self._use_own, self._failures = held, use_own, 0
        self._outlook = Outlook()
        while True:
            status = await self._stage_status()
            if status is None:
                if await self._is_mine_to_refill():
                    await self._refill()
                    return
                await asyncio.sleep(LIMITS.refill_look_s)
            elif status.version >= self._total_steps:
                raise UserError(FINISHED)
            elif await self._come_close(status) and await self._follow():
                return

    # -- joining a stage that works ------------------------------------------------------------------------

    async def _come_close(self, status: Status) -> bool:
        """Hold a version near enough to follow. False to look again."""
        try:
            if self._held is None:
                self._held = await self._catchup.newest(
                    status.version, self._view.donors(), use_own=self._use_own
                )
            few = updates_before_a_look(self._catchup.pace.seconds_per_update, LIMITS.gate_s)
            until = max(self._held[0], min(self._held[0] + few, status.version))
            self._held = await self._catchup.apply_updates(
                *self._held, until=until, newest=status.version, donors=self._donors()
            )
        except LineageError as error:
            # Weights of another lineage, perhaps this peer's own checkpoint of a half that lost.
            self._note(f"what this peer holds is not what stage {self._stage} went on from: {error}")
            self._held, self._use_own = None, False
            await asyncio.sleep(LIMITS.refill_look_s)
            return False
        except UpdateMissing as error:
            logger.info("%s: a newer snapshot is needed", error)
            self._held = None
            self._judge(None)
            await asyncio.sleep(LIMITS.refill_look_s)
            return False
        now = await self._stage_status()
        if now is None or now.version < self._held[0]:
            await asyncio.sleep(LIMITS.refill_look_s)
            return False
        behind = now.version - self._held[0]
        if self._held[0] < self._at_least:
            await asyncio.sleep(LIMITS.refill_look_s)
            return False
        if may_follow(behind, self._catchup.pace.seconds_per_update, self._room_s):
            return True
        if behind == 0:
            await asyncio.sleep(LIMITS.refill_look_s)  # its next update tells more than the last one did
        else:
            self._judge(behind)
        return False

    @property
    def _room_s(self) -> float:
        """Seconds that a follower has: about half a step after it is listed, and then the gate."""
        return LIMITS.gate_s + (self._clock.seconds_per_step or 0.0) / 2

    def _judge(self, behind: int | None) -> None:
        """Raise UserError if the stage will not be caught up with. See `Outlook.saw`."""
        update_s, step_s = self._catchup.pace.seconds_per_update, self._clock.seconds_per_step
        if why := self._outlook.saw(behind, update_s, step_s, self._room_s, time.monotonic()):
            raise UserError(self._too_slow(why))

    async def _follow(self) -> bool:
        """Ask to be listed, enter the round after the commit that lists this peer, and be counted in."""
        commit = await self._be_listed()
        if commit is None or self._held is None:
            return False
        self.standing = Standing.FOLLOWING
        try:
            self._held = await self._catchup.apply_updates(
                *self._held, until=commit.step + 1, donors=self._donors()
            )
        except (LineageError, UpdateMissing) as error:
            logger.info("could not follow step %d: %s", commit.step, error)
            self._held, self.standing = None, Standing.CATCHING_UP
            return False
        if self._held != (commit.step + 1, next_lineage(commit.lineage, commit.group, commit.digest)):
            self._held, self.standing = None, Standing.CATCHING_UP
            return False
        if commit.next_step >= self._total_steps:
            raise UserError(FINISHED)
        entered = self._entered = asyncio.get_running_loop().create_future()
        self._owner.enter(self._held[0], commit.roster, self._held[1], commit.followers, commit)
        has_voted = await self._is_counted_in(entered, self._held[0])
        if has_voted:
            return True
        self._failures += has_voted is False
        self._entered, self.standing = None, Standing.CATCHING_UP
        self._owner.suspend()
        if self._failures >= LIMITS.follow_tries:
            raise UserError(self._too_slow(f"{self._failures} rounds went on without it"))
        return False

    async def _is_counted_in(self, entered: asyncio.Future[bool], step: int) -> bool | None:
        """Whether the round of this step made this peer a member. None if nobody is left who could say so.

        The COMMIT may be lost with its sender, and all who vote may be: so the stage is looked at meanwhile.
        """
        looks_in_vain, is_empty = 0, False
        while looks_in_vain < LOOKS_IN_VAIN:
            await asyncio.wait([entered], timeout=LIMITS.follow_every_s)
            if entered.done():
                return entered.result()
            status = await self._stage_status()
            if entered.done():
                return entered.result()
            is_empty = status is None
            has_ended = status is None or status.version > step
            looks_in_vain = looks_in_vain + 1 if has_ended and not self._owner.is_applying else 0
        return None if is_empty else False

    async def _be_listed(self) -> Commit | None:
        """FOLLOW to all replicas until a COMMIT lists this peer; None if that takes too long."""
        if self._held is None:
            return None
        self._listed = asyncio.get_running_loop().create_future()
        version, lineage = self._held
        try:
            async with asyncio.timeout(LIMITS.follow_s):
                while not self._listed.done():
                    for link in self._links.open_links(self._stage):
                        link.post(Kind.FOLLOW, {"version": version, "lineage": lineage})
                    await asyncio.wait([self._listed], timeout=LIMITS.follow_every_s)
            return self._listed.result()
        except TimeoutError:
            return None
        finally:
            self._listed = None

    def _voted(self) -> None:
        self.standing, self._held, self._entered = Standing.VOTING, None, None
        self._note(f"caught up: this peer votes in stage {self._stage} now")
        self._owner.vote()

    def _too_slow(self, why: str) -> str:
        pace, step_s = self._catchup.pace, self._clock.seconds_per_step
        steps = f"; the swarm takes {step_s:.1f} s for a step" if step_s is not None else ""
        return (
            f"this peer cannot keep up with stage {self._stage}: {why}. An update has "
            f"{pace.bytes_per_update / 1e6:.1f} MB and takes {pace.seconds_per_update:.1f} s here "
            f"({pace.mbps:.1f} Mbit/s){steps}. A connection that is faster both ways, higher caps "
            f"(--max-download-mbps, --max-upload-mbps) or a stage with fewer parameters would do"
        )

    # -- an empty stage ----------------------------------------------------------------------------------

    async def _is_mine_to_refill(self) -> bool:
        """Whether nobody votes in this stage any more and this peer is the one to go on.

        Whoever claims to train the stage must be gone: by a neighbour's word or our own dial.
        """
        if await self._neighbour_step() is None:
            return False
        for peer in self._view.claimants():
            if not await self._is_gone(peer):
                return False
        candidates = [self._links.me, *self._view.waiting()]
        if refiller(candidates, self._run_seed, self._stage) != self._links.me:
            return False
        # A second look: a replica may just be on its way back.
        await asyncio.sleep(LIMITS.refill_look_s)
        return await self._stage_status() is None and all(
            [await self._is_gone(peer) for peer in self._view.claimants()]
        )

    async def _refill(self) -> None:
        step = await self._neighbour_step()
        if step is None:
            return
        gone = (
            self._view.claimants()
        )  # those who trained this stage are gone: nobody waits for their snapshots
        donors = {peer: versions for peer, versions in self._donors().items() if peer not in gone}
        version, lineage = self._held or await self._catchup.newest(step, donors)
        lineage = hashlib.sha256(f"{lineage}/refill/{step}/{self._links.me}".encode()).hexdigest()[:32]
        self.refills += 1
        lost = (
            f"; what stage {self._stage} learned in {step - version} steps is lost" if step > version else ""
        )
        self._note(
            f"stage {self._stage} had no peer left: going on at step {step} from version {version}{lost}"
        )
        self.standing = Standing.VOTING
        self._owner.enter(step, (self._links.me,), lineage)
        self._on_refilled(step, lineage)
        self._owner.vote()

    async def _is_gone(self, peer: str) -> bool:
        link = self._links.get(peer)
        if link is not None:
            return False  # it answered as one that does not vote, or will say what it is
        if await self._links.probe(peer) is Liveness.GONE:
            return True
        witnesses = [link for link in self._links.open_links() if link.hello.stage != self._stage]
        answers = await self._questions.ask(witnesses, "gone", peer, is_enough=lambda a: a is True)
        return any(answer is True for answer in answers.values())

    async def _neighbour_step(self) -> int | None:
        """The step at which this stage's work is due: the previous stage's, for stage 0 the next one's."""
        beside = [self._stage - 1, self._stage + 1] if self._stage > 0 else [1]
        for stage in beside:
            if 0 <= stage < self._stages and (status := await self._stage_status(stage)) is not None:
                return status.version
        return None

    # -- asking -------------------------------------------------------------------------------------------

    async def is_working(self, stage: int) -> bool:
        """Whether a peer of this stage says that it votes."""
        return 0 <= stage < self._stages and await self._stage_status(stage) is not None

    async def _stage_status(self, stage: int | None = None) -> Status | None:
        """Where the voting peers of a stage are (this peer's own by default); None if nobody votes there."""
        links = self._links.open_links(self._stage if stage is None else stage)
        answers = await self._questions.ask(links, "step", None)
        statuses: list[Status] = []
        for peer, answer in answers.items():
            try:
                statuses.append(parse_status(answer))
            except FrameError as error:
                logger.warning("%s does not say where it is: %s", short(peer), error)
        current = current_status(statuses)
        if current is not None and stage in (None, self._stage):
            self._clock.saw(current.version, time.monotonic())
        return current

    def _donors(self) -> Donors:
        """Whoever has a link to this peer in its stage may serve updates, whatever the noticeboard says yet."""
        donors = dict(self._view.donors())
        for link in self._links.open_links(self._stage):
            donors.setdefault(link.peer, ())
        return donors
