"""Answers to the questions of neighbours: who holds a key, who keeps keys, how far, is a peer gone, which plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from peers.frames import Frame, FrameError, Kind, need
from peers.link import Link
from peers.links import Links, Liveness
from peers.planning import PlanBook
from peers.round_messages import compact
from peers.stage import parse_key
from peers.work import WorkCore
from peers.work_messages import parse_missing
from swarm.plan import MicrobatchKey

MAX_PEER_ID = 128


class Answers:
    """Answers QUERY frames. At most one dial at a time for each neighbour that asks.

    is_stashed(key): whether a FORWARD of this key waits for its plan. status(): version, whether this peer votes,
    lineage. A question that cannot be answered is answered with None.
    """

    def __init__(
        self,
        links: Links,
        plans: PlanBook,
        core: WorkCore,
        tasks: asyncio.TaskGroup,
        *,
        is_stashed: Callable[[MicrobatchKey], bool] | None = None,
        status: Callable[[], list[Any]] | None = None,
    ) -> None:
        self._links, self._plans, self._core, self._tasks = links, plans, core, tasks
        self._is_stashed, self._status = is_stashed, status
        self._probing: set[str] = set()

    def on_query(self, link: Link, frame: Frame) -> None:
        """A QUERY of a neighbour. Raises FrameError."""
        number = need(frame.header, "id", int)
        about = frame.header.get("about")
        answer: Any = None
        match frame.header.get("what"):
            case "holder":
                answer = self._holds(parse_key(Frame(Kind.QUERY, {"key": about})))
            case "keeps":
                answer = self._keeps(about)
            case "step":
                answer = self._status() if self._status is not None else None
            case "gone" if (
                isinstance(about, str) and len(about) <= MAX_PEER_ID and link.peer not in self._probing
            ):
                self._tasks.create_task(self._answer_gone(link, number, about))
                return
            case "plan":
                plan = self._plans.get(about) if isinstance(about, str) else None
                if plan is not None:
                    link.post(Kind.PLAN, {"plan": plan.to_bytes()})
                return
        link.post(Kind.ANSWER, {"id": number, "answer": answer})

    def _holds(self, key: MicrobatchKey) -> bool:
        return self._core.holds(key) or (self._is_stashed is not None and self._is_stashed(key))

    def _keeps(self, about: object) -> list[Any] | None:
        """Version, and which of these keys this peer can still send on. None: it does not know the plan."""
        if not isinstance(about, list) or len(about) != 2:
            raise FrameError("header", "keeps is about [plan, keys]")
        missing = parse_missing({"plan": about[0], "keys": about[1]})
        plan = self._plans.get(missing.plan)
        if plan is None:
            return None
        kept = self._core.kept(missing.of(plan))
        return [self._core.version, [list(key) for key in compact(kept)]]

    async def _answer_gone(self, link: Link, number: int, peer: str) -> None:
        self._probing.add(link.peer)
        try:
            is_gone = self._links.get(peer) is None and await self._links.probe(peer) is Liveness.GONE
        except ValueError:
            is_gone = False  # no peer id at all
        finally:
            self._probing.discard(link.peer)
        link.post(Kind.ANSWER, {"id": number, "answer": is_gone})
