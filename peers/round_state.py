"""What a member knows of its stage's rounds: who is there, who votes, what has arrived and been agreed to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from peers.frames import Kind
from peers.limits import LIMITS
from peers.round_actions import Action, CancelExchange, Diverged, Dropped, Freeze, OutOfStep, Phase, Send
from peers.round_messages import Arrival, Commit, CompactKey, Failure, Group, Held
from peers.round_pace import Pace
from swarm.plan import seeded_order

RETRY_FIRST_S = 0.2
RETRY_CEILING_S = 5.0
WITNESS_EVERY_S = 1.0
REPORT_EVERY_S = 3.0
ANSWER_EVERY_S = 1.0

PlanFactory = Callable[[int, int, str, tuple[str, ...]], tuple[bytes, tuple[str, ...]]]
"""(next step, attempt, group id, members that are there) -> (plan bytes, sources); empty at stages other than 0."""


class RoundState:
    """State of the rounds of one stage at one member, and the questions about it."""

    def __init__(self, *, run_id: str, run_seed: int, stage: int, me: str, make_plan: PlanFactory) -> None:
        self.run_id, self.run_seed, self.stage, self.me = run_id, run_seed, stage, me
        self._make_plan = make_plan
        self.step = 0
        self.lineage = ""
        self.roster: tuple[str, ...] = ()
        self.followers: tuple[str, ...] = ()
        self.attempt = 0
        self.phase = Phase.GATHERING
        self.group: Group | None = None
        self.last_commit: Commit | None = None
        self.is_out = True
        """Not begun, or out of step: nothing happens until `begin`."""
        self.failures: Counter[str] = Counter()
        self.pace = Pace()
        self._alive: set[str] = set()
        self._lost: set[str] = set()
        self._gone: set[str] = set()
        self._silent: dict[str, int] = {}
        """Who says nothing before a COMMIT has it in the roster, and from which step on its vote does not count."""
        self._follows: dict[str, tuple[int, float]] = {}
        self._next_arrivals: dict[str, Arrival] = {}
        self._answered: dict[str, float] = {}
        self._asked_ahead: Counter[str] = Counter()
        self._met_at = 0.0
        self._clear_step()

    def _clear_step(self) -> None:
        """Forget what belongs to one step."""
        self._order = seeded_order(self.roster, self.run_seed, self.stage, self.step)
        self.attempt, self.phase, self.group = 0, Phase.GATHERING, None
        self._plan: str = ""
        self._plan_keys: frozenset[CompactKey] = frozenset()
        self._mine: Arrival | None = None
        self._held: Held | None = None
        self._decided: Commit | None = None
        self._arrivals: dict[str, Arrival] = {}
        self._digests: dict[str, str] = {}
        self._blames: dict[str, tuple[str, ...]] = {}
        self._fail_at: float | None = None
        self._late_attempts = 0
        self._failed: set[str] = set()
        self._excluded: set[str] = set()
        self._stepped_down: dict[str, float] = {}
        self._fenced: dict[str, tuple[float, str]] = {}
        self._ready_at: float | None = None
        self._lead_since: float | None = None
        self._entered_at = 0.0
        self._not_before, self._retry_s = 0.0, RETRY_FIRST_S
        self._retried_at = 0.0
        self._gate_since: float | None = None
        self._missing_since: float | None = None
        self._missing_asked: float | None = None
        self._asked_at = -WITNESS_EVERY_S
        self._inquired: dict[str, float] = {}
        self._reported_at = 0.0

    # -- who is there ------------------------------------------------------------------------------------

    @property
    def leader(self) -> str:
        """First live voter in the step's seeded order; "" for a follower that sees none."""
        for ranks in (
            (p for p in self._order if p not in self._stepped_down),
            (p for p in self._order if p in self._stepped_down),
        ):
            for peer in ranks:
                if self._is_present(peer):
                    return peer
        return self.me if self.me in self.roster and self.me not in self.followers else ""

    @property
    def is_leader(self) -> bool:
        """Whether this peer leads, as far as it can see."""
        return self.leader == self.me

    @property
    def present(self) -> list[str]:
        """Live voters of the roster, this peer included, in roster order."""
        return [peer for peer in self.roster if self._is_present(peer)]

    @property
    def position(self) -> tuple[int, str]:
        """(step, lineage) that this peer's weights have, or are about to have."""
        if self._decided is not None:
            return self._decided.next_step, self._decided.next_lineage
        return self.step, self.lineage

    def _votes(self, peer: str) -> bool:
        """Whether a member of the roster has a vote that it could still use."""
        is_out = self._silent.get(peer, self.step + 1) <= self.step
        return not is_out and peer not in self._gone and peer not in self.followers

    def _is_present(self, peer: str) -> bool:
        is_here = peer == self.me or peer in self._alive
        return is_here and peer not in self._silent and self._votes(peer)

    def is_known(self, peer: str) -> bool:
        """Whether the last commit names the peer, as a member or as a follower."""
        return peer in self.roster or peer in self.followers

    def _has_quorum(self, members: Collection[str]) -> bool:
        """More than half of those who could vote, or exactly half with the leader of the last commit."""
        voters = [peer for peer in self.roster if self._votes(peer)]
        there = sum(1 for peer in voters if peer in members)
        if 2 * there > len(voters):
            return True
        last = self.last_commit
        return 2 * there == len(voters) and last is not None and last.leader in members

    # -- beginning and ending --------------------------------------------------------------------------------

    def begin(
        self, step: int, roster: tuple[str, ...], lineage: str = "", followers: tuple[str, ...] = ()
    ) -> None:
        """Take part from this step on: at the start of the run, and after every re-synchronisation.

        Members that were never reported up or lost count as alive until they are reported lost: their links are
        on their way.
        """
        self.step, self.roster, self.lineage, self.followers = step, roster, lineage, followers
        self._alive |= {peer for peer in (*roster, *followers) if peer != self.me} - self._lost
        self._gone.clear()
        self._silent.clear()
        self._next_arrivals.clear()
        self._answered.clear()
        self._asked_ahead.clear()
        self.last_commit = None
        self.is_out = False
        self._clear_step()

    def on_applied(self, commit: Commit, now: float) -> list[Action]:
        """The average of the commit is applied: the next step begins with its roster."""
        # Whoever came along as a follower and is in the roster now has a vote; who restarted meanwhile has none.
        for peer in self.followers:
            if peer in commit.roster:
                self._silent.pop(peer, None)
        for peer in commit.followers:
            self._silent.setdefault(peer, commit.next_step)
        self.last_commit = commit
        self.step, self.roster, self.followers = commit.next_step, commit.roster, commit.followers
        self.lineage = commit.next_lineage
        for peer in (*commit.roster, *commit.followers):
            self._follows.pop(peer, None)
        arrivals, self._next_arrivals = self._next_arrivals, {}
        self._asked_ahead.clear()
        self._clear_step()
        self._arrivals = {
            peer: arrival
            for peer, arrival in arrivals.items()
            if arrival.step == self.step and arrival.lineage == self.lineage and arrival.plan
        }
        self._reported_at = now
        return []

    def _halt(self, action: OutOfStep | Dropped | Diverged) -> list[Action]:
        """Others went on without this peer: it says so to whoever counts on it, and is silent from then on."""
        farewell = self._farewell()
        actions: list[Action] = [
            Send(peer, Kind.FAILED, farewell)
            for peer in dict.fromkeys((*self.roster, *self.followers))
            if peer in self._alive
        ]
        if self.phase is Phase.EXCHANGING:
            actions.append(CancelExchange())
        if self.phase in (Phase.EXCHANGING, Phase.DIGESTED):
            actions.append(Freeze(False))
        self.phase, self.group, self.is_out = Phase.GATHERING, None, True
        return [*actions, action]

    def _farewell(self) -> Failure:
        """This peer is out. It may have voted in its step, and votes in no later one."""
        return Failure(self.group.id if self.group is not None else "", "other", (self.me,), self.step + 1)

    # -- what is said ----------------------------------------------------------------------------------------

    def _own(self) -> Arrival:
        """This peer's ARRIVE as it stands now; without a plan while it is not ready."""
        if self._mine is None:
            return Arrival(self.step, "", (), 0, lineage=self.lineage, attempt=self.attempt)
        return replace(self._mine, held=self._held, lineage=self.lineage, attempt=self.attempt)

    def _answer(self, peer: str, now: float) -> list[Action]:
        """Say where this peer is, not too often."""
        if now - self._answered.get(peer, -ANSWER_EVERY_S) < ANSWER_EVERY_S:
            return []
        if len(self._answered) >= LIMITS.links:
            self._answered.clear()
        self._answered[peer] = now
        return [Send(peer, Kind.ARRIVE, self._own())]
