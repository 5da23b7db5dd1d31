"""How a capped line is shared out: a token bucket and the order in which waiting flows are served.

Pure: no clock, no loop; the caller says what time it is. `peers.shaper` puts it to work.

Between priorities the higher goes first. A lower one that has been passed over is nevertheless served once
the higher ones got nine times as much as it asks for: a tenth of the line is what a starving priority can rely
on, so that a round or a transfer slows down under load but its deadline finds it moving. Within a priority the
flows take turns by bytes. Nothing waits for ever, and nothing is served early: there is one bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

PRIORITIES = 5
"""0 (control, which is charged and never waits) to 4 (state); see `peers.frames.Priority`."""

LOWEST_SHARE = 0.1
"""Part of the line that a priority gets at least while it has something to send."""


class TokenBucket:
    """Bytes that may pass now. Debt is allowed: whoever finds the level above 0 takes all it asked for.

    So over any time t no more than rate * t + burst + one request passes, and a request may be larger than
    the burst. rate_bytes_per_s: the rate. burst_bytes: what an idle bucket saves up at most.
    """

    def __init__(self, rate_bytes_per_s: float, burst_bytes: float, now: float) -> None:
        if rate_bytes_per_s <= 0 or burst_bytes <= 0:
            raise ValueError(f"rate {rate_bytes_per_s} and burst {burst_bytes} must be above 0")
        self.rate_bytes_per_s, self.burst_bytes = rate_bytes_per_s, burst_bytes
        self._level, self._at = float(burst_bytes), now

    def level(self, now: float) -> float:
        """Bytes saved up; negative is debt. A clock that steps back adds nothing."""
        if now > self._at:
            self._level = min(self.burst_bytes, self._level + (now - self._at) * self.rate_bytes_per_s)
            self._at = now
        return self._level

    def take(self, nbytes: float, now: float) -> None:
        """Take bytes out, into debt if need be; a negative number gives bytes back."""
        self._level = min(self.burst_bytes, self.level(now) - nbytes)

    def seconds_until_ready(self, now: float) -> float:
        """How long until the level is above 0."""
        return max(0.0, -self.level(now) / self.rate_bytes_per_s)


@dataclass(eq=False, slots=True)
class Flow:
    """One stream that wants to pass; at most one of its requests waits at a time.

    finish: where the flow's last turn ended, in bytes of its priority's virtual time, by priority.
    """

    finish: dict[int, float] = field(default_factory=dict)
    waiting: Request | None = None


@dataclass(eq=False, slots=True)
class Request:
    """Bytes that wait for their turn. start: their place in the virtual time of their priority."""

    flow: Flow
    priority: int
    nbytes: int
    asked_at: float
    start: float


class Schedule:
    """The bucket and whoever waits for it."""

    def __init__(self, bucket: TokenBucket) -> None:
        self.bucket = bucket
        self._waiting: list[list[Request]] = [[] for _ in range(PRIORITIES)]
        self._virtual = [0.0] * PRIORITIES
        self._passed_over = [0.0] * PRIORITIES

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting))

    def waiting_bytes(self, priority: int) -> int:
        """Bytes that wait in a priority."""
        return sum(request.nbytes for request in self._waiting[priority])

    def ask(self, flow: Flow, priority: int, nbytes: int, now: float) -> Request:
        """Queue a request. Raises ValueError if one of the flow's is waiting already."""
        if flow.waiting is not None:
            raise ValueError("a flow asks for one thing at a time")
        request = Request(flow, priority, nbytes, now, 0.0)
        self._queue(request)
        flow.waiting = request
        return request

    def promote(self, flow: Flow, priority: int) -> None:
        """Give the flow's waiting request this priority if it is higher than its own."""
        request = flow.waiting
        if request is not None and priority < request.priority:
            self._unqueue(request)
            request.priority = priority
            self._queue(request)

    def cancel(self, request: Request) -> None:
        """Take a request out of the queue; harmless if it is not (or no longer) in it."""
        if request.flow.waiting is request:
            self._unqueue(request)
            request.flow.waiting = None

    def serve(self, now: float) -> Iterator[Request]:
        """The requests whose turn it is, in order; each is charged as it is taken from the iterator."""
        while self.bucket.level(now) > 0:
            request = self._next()
            if request is None:
                return
            self._account(request)
            self.bucket.take(request.nbytes, now)
            yield request

    # -- order -----------------------------------------------------------------------------------------------

    def _queue(self, request: Request) -> None:
        priority = request.priority
        # A flow that was idle starts now: it has saved up no turns.
        request.start = max(self._virtual[priority], request.flow.finish.get(priority, 0.0))
        request.flow.finish[priority] = request.start + request.nbytes
        self._waiting[priority].append(request)

    def _unqueue(self, request: Request) -> None:
        priority = request.priority
        self._waiting[priority].remove(request)
        request.flow.finish[priority] = request.start  # it did not have this turn
        if not self._waiting[priority]:
            self._passed_over[priority] = 0.0

    def _next(self) -> Request | None:
        heads = [min(queue, key=lambda request: request.start) for queue in self._waiting if queue]
        if not heads:
            return None
        for head in heads[1:]:
            if self._passed_over[head.priority] >= head.nbytes * (1 / LOWEST_SHARE - 1):
                return head
        return heads[0]

    def _account(self, request: Request) -> None:
        """Take the request out of the queue, and note whom it passed over."""
        priority = request.priority
        self._waiting[priority].remove(request)
        request.flow.waiting = None
        self._virtual[priority] = request.start
        self._passed_over[priority] = 0.0
        for lower in range(priority + 1, PRIORITIES):
            if self._waiting[lower]:
                self._passed_over[lower] += request.nbytes
