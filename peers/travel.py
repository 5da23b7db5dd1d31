"""Averages that travel while the next steps run: one exchange of a committed group, beside the stage's rounds.

It ends in an outcome that `RoundWork` keeps until the round that settles it, or it fails, and that round exchanges in
the open. Whoever gives up tells the others, also those who have not begun yet, so that nobody waits for its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection

from peers.exchange import Exchange, ExchangeError
from peers.frames import FrameError, Kind
from peers.links import short
from peers.round_messages import Arrival, Failure
from peers.round_pace import Pace
from peers.round_work import RoundWork

logger = logging.getLogger("swarm_peer.rounds")
HEARD = 64
"""Failures of exchanges that may be still to begin here: whoever is first may give up first."""
MOST_PASSED = 62
"""Averages in a row that are not let travel, since those before were late again and again."""


class Travel:
    """At most one exchange under way. Lives in the communication loop.

    pace: of these exchanges; they share lines with the work, and are slower than those of a round.
    tell: sends a FAILED to a peer. on_end: told of each one that has ended: its exchange, its seconds (None if it
    failed), and the ARRIVE that waited for it.
    """

    def __init__(
        self,
        work: RoundWork,
        tasks: asyncio.TaskGroup,
        tell: Callable[[str, Kind, Failure], None],
        on_end: Callable[[Exchange, float | None, Arrival | None], None],
    ) -> None:
        self._work, self._tasks, self._tell, self._on_end = work, tasks, tell, on_end
        self.exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: Arrival | None = None
        self.pace = Pace()
        self._heard: deque[tuple[str, str]] = deque(maxlen=HEARD)
        self._over: deque[str] = deque(maxlen=HEARD)
        self._late_ones = self._passed = 0

    def holds(self, group: str) -> bool:
        """Whether frames of this group belong to the exchange under way."""
        return self.exchange is not None and self.exchange.group.id == group

    def is_over(self, group: str) -> bool:
        """Whether frames of this group come too late: its exchange has ended here."""
        return group in self._over

    def begin(self, exchange: Exchange, present: Collection[str]) -> None:
        """Run the exchange of what this member owes. present: who takes part in its stage's rounds: of a member that
        does not, or has given up already, nothing would come. After two that were late none is begun for a while.
        """
        self.cancel()
        self.exchange = exchange
        is_passed = self._passed > 0
        self._passed -= is_passed
        members, group = exchange.group.members, exchange.group.id
        gone = [peer for peer in members if peer not in present or (peer, group) in self._heard]
        if gone:
            self._failed(exchange, f"{short(gone[0])} takes no part", Failure(group, "disconnected"), "")
        elif is_passed:
            self._failed(exchange, "those before were late", Failure(group, "other"), "")
        else:
            self._task = self._tasks.create_task(self._run(exchange))

    def cancel(self) -> None:
        """Nothing travels any more, and no ARRIVE waits. The others are told: they would wait for this member."""
        exchange = self.exchange
        if self._task is not None:
            self._task.cancel()
        self._task = self.exchange = self._waiting = None
        if exchange is not None:
            self._over.append(exchange.group.id)
            self._say(exchange, Failure(exchange.group.id, "disconnected"), "")

    def admit(self, arrival: Arrival) -> Arrival | None:
        """A settled ledger, to be reported: with what the round is told of what is owed; None if its round settles what
        is under way, and it has to wait for the exchange to end.
        """
        if self.exchange is not None and self._work.settled(arrival.step) == self.exchange.group.step:
            self._waiting = arrival
            return None
        return self._work.with_owed(arrival)

    def withdraw(self) -> None:
        """The ledger that waits to be reported grows again."""
        self._waiting = None

    def on_failed(self, peer: str, failure: Failure) -> bool:
        """FAILED of a member; whether it was about the exchange under way."""
        exchange = self.exchange
        if exchange is None or exchange.group.id != failure.group or peer not in exchange.group.members:
            self._heard.append((peer, failure.group))
            return False
        self._give_up(
            exchange, f"{short(peer)}: {failure.reason}", Failure(failure.group, failure.reason), peer
        )
        return True

    def on_broken(self, peer: str) -> None:
        """A replica's link was lost, or is another one: what was under way on it may be lost."""
        exchange = self.exchange
        if exchange is not None and peer in exchange.group.members:
            failure = Failure(exchange.group.id, "disconnected")
            self._give_up(exchange, f"the link to {short(peer)} is gone", failure, peer)

    def on_inquiry(self, leader: str) -> None:
        """The leader has ended its exchange, and says that it waits for this member. Soon it will leave it out."""
        if self.exchange is not None and self._waiting is not None:
            failure = Failure(self.exchange.group.id, "late")
            self._give_up(self.exchange, f"{short(leader)} waits for the round", failure, "")

    def _give_up(self, exchange: Exchange, why: str, failure: Failure, but: str) -> None:
        if self._task is not None:
            self._task.cancel()
        self._failed(exchange, why, failure, but)

    async def _run(self, exchange: Exchange) -> None:
        began = time.monotonic()
        try:
            await self._work.travel(exchange)
        except (ExchangeError, FrameError) as error:
            reason = error.reason if isinstance(error, ExchangeError) else "schema"
            if self.exchange is exchange:
                self._failed(exchange, str(error), Failure(exchange.group.id, reason), "")
            return
        if self.exchange is exchange:
            seconds = time.monotonic() - began
            self.pace.note_exchange(seconds)
            self._late_ones = 0
            self._end(exchange, seconds)

    def _failed(self, exchange: Exchange, why: str, failure: Failure, but: str) -> None:
        logger.warning("the average of step %d is exchanged again: %s", exchange.group.step, why)
        if failure.reason == "late":
            self.pace.note_late_exchange()
            self._late_ones += 1
            self._passed = min(2**self._late_ones - 2, MOST_PASSED)
        self._say(exchange, failure, but)
        self._end(exchange, None)

    def _say(self, exchange: Exchange, failure: Failure, but: str) -> None:
        for member in exchange.group.members:
            if member not in (exchange.me, but):
                self._tell(member, Kind.FAILED, failure)

    def _end(self, exchange: Exchange, seconds: float | None) -> None:
        waiting, self._waiting = self._waiting, None
        self._task = self.exchange = None
        self._over.append(exchange.group.id)
        self._on_end(exchange, seconds, waiting)
