"""Questions to neighbours with an answer that may not come: each has an id, a deadline and expected peers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from peers.frames import Frame, Kind, need
from peers.limits import LIMITS
from peers.link import Link


class Questions:
    """QUERY frames sent and the ANSWERs they wait for."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[set[str], dict[str, Any], asyncio.Event, Callable[[Any], bool]]] = {}

    async def ask(
        self,
        links: Sequence[Link],
        what: str,
        about: Any,
        is_enough: Callable[[Any], bool] = lambda answer: False,
        deadline_s: float = LIMITS.query_s,
    ) -> dict[str, Any]:
        """Ask these neighbours; returns peer -> answer once all have answered, one is enough, or time is up."""
        if not links:
            return {}
        number = next(self._ids)
        done = asyncio.Event()
        answers: dict[str, Any] = {}
        self._open[number] = ({link.peer for link in links}, answers, done, is_enough)
        try:
            for link in links:
                link.post(Kind.QUERY, {"id": number, "what": what, "about": about})
            async with asyncio.timeout(deadline_s):
                await done.wait()
        except TimeoutError:
            pass  # whoever has not answered by now has no say
        finally:
            del self._open[number]
        return answers

    def on_answer(self, peer: str, frame: Frame) -> None:
        """An ANSWER; late and unasked ones are dropped. Raises FrameError for a malformed one."""
        entry = self._open.get(need(frame.header, "id", int))
        if entry is None or peer not in entry[0]:
            return
        waiting, answers, done, is_enough = entry
        waiting.discard(peer)
        answers[peer] = frame.header.get("answer")
        if not waiting or is_enough(answers[peer]):
            done.set()

    def on_peer_lost(self, peer: str) -> None:
        """A peer that was asked is gone."""
        for waiting, _, done, _ in self._open.values():
            waiting.discard(peer)
            if not waiting:
                done.set()
