"""An event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: what it would have waited is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and for no timer")
            self.now += max(0.0, timeout)
        return ready


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """`time` starts at 0 and passes only while everything waits for a timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_fake_time(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; timers fire in order and at once."""
    with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
        return runner.run(scenario)
