"""Averages that travel while the next steps run: one exchange of a committed group, beside the stage's rounds.

It ends in an outcome that `RoundWork` keeps until the round that settles it, or it fails, and that round exchanges in
the open. Whoever gives up tells the others, so that nobody waits for its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from peers.exchange import Exchange, ExchangeError
from peers.frames import FrameError, Kind
from peers.links import short
from peers.round_messages import Arrival, Failure
from peers.round_work import RoundWork

logger = logging.getLogger("swarm_peer.rounds")


class Travel:
    """At most one exchange under way. Lives in the communication loop.

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

    def holds(self, group: str) -> bool:
        """Whether frames of this group belong to the exchange under way."""
        return self.exchange is not None and self.exchange.group.id == group

    def begin(self, exchange: Exchange) -> None:
        """Run the exchange of what this member owes."""
        self.cancel()
        self.exchange = exchange
        self._task = self._tasks.create_task(self._run(exchange))

    def cancel(self) -> None:
        """Nothing travels any more; nobody is told, and no ARRIVE waits."""
        if self._task is not None:
            self._task.cancel()
        self._task = self.exchange = self._waiting = None

    def admit(self, arrival: Arrival) -> Arrival | None:
        """A settled ledger, to be reported: with what the round is told of what is owed; None if it has to wait for the
        exchange to end.
        """
        if self.exchange is not None:
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
            self._end(exchange, time.monotonic() - began)

    def _failed(self, exchange: Exchange, why: str, failure: Failure, but: str) -> None:
        logger.warning("the average of step %d is exchanged again: %s", exchange.group.step, why)
        for member in exchange.group.members:
            if member not in (exchange.me, but):
                self._tell(member, Kind.FAILED, failure)
        self._end(exchange, None)

    def _end(self, exchange: Exchange, seconds: float | None) -> None:
        waiting, self._waiting = self._waiting, None
        self._task = self.exchange = None
        self._on_end(exchange, seconds, waiting)
