"""Sudden death at a named point: how tests and benchmarks kill a real peer exactly where it hurts.

Not for users: nothing here does anything unless `PeerConfig.kill_at` is set, and no command sets it. The end is
SIGKILL, so that neither cleanup nor goodbye softens it, as when a machine loses its power.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, get_args

from peers.config import UserError

Point = Literal[
    "after_accepted",
    "after_forward_sent",
    "after_backward",
    "after_gradient",
    "after_step_end",
    "before_group",
    "mid_exchange",
    "after_first_commit",
    "before_commit",
]
"""after_accepted: a microbatch of the previous stage is accepted. after_forward_sent: a forward output is handed
to the next stage. after_backward: a microbatch is in the accumulator, its GRADIENT is not sent. after_gradient: it
is. after_step_end: a slot's end is passed on. before_group: a leader has chosen its group and told nobody.
mid_exchange: about half of the average's chunks have come back. after_first_commit: a leader has sent COMMIT to
one member. before_commit: a leader has decided to commit and told nobody."""

POINTS: tuple[str, ...] = get_args(Point)
SENT: frozenset[str] = frozenset(
    {"after_forward_sent", "after_gradient", "after_step_end", "after_first_commit"}
)
"""Points just after something was queued on a link: the end waits until it has left."""
LEAVE_S = 0.05
ON_SIGNAL = "on_signal"


class Injector:
    """Where this process dies; nowhere until it is armed."""

    def __init__(self) -> None:
        self._point = ""
        self._steps = range(0)
        self._left = 0
        self._testimony: Callable[[], dict[str, Any]] = dict

    def testify(self, testimony: Callable[[], dict[str, Any]]) -> None:
        """Have the last words tell, as JSON, what the peer takes with it.

        At least `step`, the one it works on, and `ledger`, its keys of that step as [slot, microbatch].
        """
        self._testimony = testimony

    def arm(self, text: str, stage: int | None = None) -> None:
        """Die at a point: "POINT[:stage=N][:step=N][:from=N][:count=N]".

        step: only in this step. from: in this one or a later one. count: which hit kills (the first).
        `ON_SIGNAL` instead of a point: die at SIGUSR1, whatever is going on then (call in the main thread).
        stage: the one this process holds; a text that names another arms nothing. An empty text disarms. Raises
        UserError for a text that cannot be read.
        """
        if text == ON_SIGNAL:
            signal.signal(signal.SIGUSR1, lambda *_: self._die(ON_SIGNAL, -1))
            return
        point, *rest = text.split(":")
        values: dict[str, int] = {}
        for part in rest:
            name, is_given, number = part.partition("=")
            if not is_given or name not in ("stage", "step", "from", "count") or not number.isdecimal():
                raise UserError(f"kill_at {text!r}: {part!r} is none of stage=N, step=N, from=N, count=N")
            values[name] = int(number)
        if text and point not in POINTS:
            raise UserError(f"kill_at {text!r}: there is no point {point!r}; there are {', '.join(POINTS)}")
        if values.get("count", 1) < 1:
            raise UserError(f"kill_at {text!r}: count is 1 for the first hit")
        self._point = point if values.get("stage", stage) == stage else ""
        self._steps = range(values.get("from", 0), sys.maxsize)
        if "step" in values:
            self._steps = range(values["step"], values["step"] + 1)
        self._left = values.get("count", 1)

    def hit(self, point: Point, step: int) -> bool:
        """The peer is at a point of a step. Returns False at once unless this is where it is to die.

        At a point of `SENT` it returns True and the end comes `LEAVE_S` later, so that what was queued leaves;
        the caller then stops what it was about to do next. At any other point it does not return.
        """
        if self._point != point or step not in self._steps:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._point = ""
        if point in SENT:
            threading.Timer(LEAVE_S, self._die, (point, step)).start()
        else:
            self._die(point, step)
        return True

    def _die(self, point: str, step: int) -> None:
        testimony: dict[str, Any] | None = None
        while testimony is None:
            with suppress(RuntimeError):  # another thread changes what is read
                testimony = self._testimony()
        for handler in logging.getLogger().handlers:
            handler.flush()
        words = {"killed_at": point, "step": step, **testimony}
        os.write(2, (json.dumps(words) + "\n").encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)  # the signal is on its way: nothing more may happen here


_injector = Injector()
arm = _injector.arm
hit = _injector.hit
testify = _injector.testify
