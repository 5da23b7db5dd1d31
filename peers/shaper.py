"""The cap of one direction of a peer's line, at work in the communication loop.

All streams of a peer (its links, its file server, its fetches) share one shaper for what they send and one for
what they receive. Bulk asks before every piece; control frames are charged and never wait. What libp2p sends by
itself (the noticeboard's traffic, dials, acknowledgements of TCP) is inside the daemon and cannot be made to
wait: room is left for it, because the bucket runs at 94% of the volunteer's figure and the packets of
what it lets through take about 5%.

Without a cap nothing waits and nothing is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peers.limits import KIB, LIMITS
from peers.shaping import PRIORITIES, Flow, Request, Schedule, TokenBucket

PAYLOAD_SHARE = 0.94
"""Part of the volunteer's figure that frames may use. Headers of Ethernet, IP and TCP take 4.4% of the line, noise,
yamux and half-filled packets 0.3% to 0.6%; a hundredth is left for the noticeboard, and so that the queue of a line
that is no faster than the figure drains."""
ANSWER_SHARE = 0.01
"""Bytes of acknowledgements for every byte received, as measured: a small packet for every four or five full ones."""
BURST_S = 0.02
"""Saved up by an idle line: a timer that fires late loses nothing, and a ping waits no longer than this."""
TICK_S = 0.001
"""Timers are no finer; the burst makes up for it."""
PIECE_BYTES = 64 * KIB
WINDOW_S = 0.05
"""What a neighbour may have sent that has not passed the download shaper, in seconds of the whole line."""
WINDOW_LEAST_BYTES, WINDOW_MOST_BYTES = 64 * KIB, 192 * KIB
IDLE_LEVEL = 0.5
GROWTH_S, GROWTH_PER_S = 0.02, 0.005
"""All windows together may grow by 20 ms of a busy line, and by half a percent of it every second."""


class Shaper:
    """One direction. limit_mbps: the volunteer's figure in Mbit/s, None for no cap."""

    def __init__(self, limit_mbps: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_mbps = limit_mbps
        self.piece_bytes = LIMITS.write_chunk_bytes
        """What one request should ask for: 20 ms of the rate and at most 64 KiB, so that pings slip between."""
        self.window_bytes: int | None = None
        """First window of a neighbour that sends to this peer (see `peers.credit`); None without a cap."""
        self.waited_s = [0.0] * PRIORITIES
        """Seconds that requests waited until it was their turn, by the priority they then had."""
        self._clock = clock
        self._schedule: Schedule | None = None
        self._growth: TokenBucket | None = None
        self._answers: TokenBucket | None = None
        self._granted: dict[Request, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        if limit_mbps is not None:
            rate = self.rate_bytes_per_s
            self._schedule = Schedule(TokenBucket(rate, rate * BURST_S, clock()))
            self._growth = TokenBucket(rate * GROWTH_PER_S, rate * GROWTH_S, clock())
            self._answers = TokenBucket(rate / 2, rate / 2, clock())
            self.piece_bytes = max(1, min(PIECE_BYTES, int(rate * BURST_S)))
            self.window_bytes = min(max(int(rate * WINDOW_S), WINDOW_LEAST_BYTES), WINDOW_MOST_BYTES)

    @property
    def is_limited(self) -> bool:
        """Whether there is a cap."""
        return self._schedule is not None

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes of frames per second that may pass; infinite without a cap."""
        return float("inf") if self.limit_mbps is None else self.limit_mbps * 1e6 / 8 * PAYLOAD_SHARE

    def charge(self, nbytes: float) -> None:
        """Bytes that pass without waiting: the others wait for them."""
        if self._schedule is not None:
            self._schedule.bucket.take(nbytes, self._clock())

    def charge_answers(self, nbytes: int) -> None:
        """The other direction carried these bytes: their acknowledgements pass here, and take half the line at most."""
        if self._schedule is None or self._answers is None:
            return
        now = self._clock()
        cost = min(nbytes * ANSWER_SHARE, max(0.0, self._answers.level(now)))
        self._answers.take(cost, now)
        self._schedule.bucket.take(cost, now)

    async def take(self, flow: Flow, priority: int, nbytes: int) -> bool:
        """Wait until the flow's turn has come; returns whether it had to. Cancelled, it has taken nothing."""
        schedule = self._schedule
        if schedule is None:
            return False
        now = self._clock()
        if not schedule.waiting and schedule.bucket.level(now) > 0:
            schedule.bucket.take(nbytes, now)
            return False
        request = schedule.ask(flow, priority, nbytes, now)
        granted = self._granted[request] = asyncio.get_running_loop().create_future()
        self._serve()
        try:
            await granted
        except asyncio.CancelledError:
            if self._granted.pop(request, None) is None:  # granted, but not heard of it any more
                schedule.bucket.take(-nbytes, self._clock())
            schedule.cancel(request)
            self._serve()
            raise
        return True

    def promote(self, flow: Flow, priority: int) -> None:
        """Something urgent waits behind this flow: what it waits for now gets at least this priority."""
        if self._schedule is not None:
            self._schedule.promote(flow, priority)

    def widen(self, nbytes: int) -> int:
        """By how much of this a neighbour's window may grow now.

        On a busy line what windows gain comes on top of the rate, so all of them share little; one that has
        been idle for half of the burst has room.
        """
        if self._growth is None or self._schedule is None:
            return 0
        now = self._clock()
        bucket = self._schedule.bucket
        if bucket.level(now) > IDLE_LEVEL * bucket.burst_bytes:
            return nbytes
        granted = max(0, min(nbytes, int(self._growth.level(now))))
        self._growth.take(granted, now)
        return granted

    def _serve(self) -> None:
        """Wake up whoever's turn it is, and come back when the next one's is."""
        schedule = self._schedule
        if schedule is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        for request in schedule.serve(now):
            self.waited_s[request.priority] += now - request.asked_at
            granted = self._granted.pop(request)
            if granted.cancelled():  # its waiter is cancelled and has not run yet
                schedule.bucket.take(-request.nbytes, now)
                self._granted[request] = granted
            else:
                granted.set_result(None)
        if schedule.waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(schedule.bucket.seconds_until_ready(now), TICK_S), self._serve)
