"""Answers to the questions of neighbours: who holds a key, is a peer gone, which plan is this."""

from __future__ import annotations

import asyncio

from peers.frames import Frame, Kind, need
from peers.link import Link
from peers.links import Links, Liveness
from peers.planning import PlanBook
from peers.stage import parse_key
from peers.work import WorkCore

MAX_PEER_ID = 128


class Answers:
    """Answers QUERY frames. At most one dial at a time for each neighbour that asks."""

    def __init__(self, links: Links, plans: PlanBook, core: WorkCore, tasks: asyncio.TaskGroup) -> None:
        self._links, self._plans, self._core, self._tasks = links, plans, core, tasks
        self._probing: set[str] = set()

    def on_query(self, link: Link, frame: Frame) -> None:
        """A QUERY of a neighbour. Raises FrameError."""
        number = need(frame.header, "id", int)
        about = frame.header.get("about")
        match frame.header.get("what"):
            case "holder":
                key = parse_key(Frame(Kind.QUERY, {"key": about}))
                link.post(Kind.ANSWER, {"id": number, "answer": self._core.holds(key)})
            case "gone" if (
                isinstance(about, str) and len(about) <= MAX_PEER_ID and link.peer not in self._probing
            ):
                self._tasks.create_task(self._answer_gone(link, number, about))
            case "plan":
                plan = self._plans.get(about) if isinstance(about, str) else None
                if plan is not None:
                    link.post(Kind.PLAN, {"plan": plan.to_bytes()})
            case _:
                link.post(Kind.ANSWER, {"id": number, "answer": None})

    async def _answer_gone(self, link: Link, number: int, peer: str) -> None:
        self._probing.add(link.peer)
        try:
            is_gone = self._links.get(peer) is None and await self._links.probe(peer) is Liveness.GONE
        except ValueError:
            is_gone = False  # no peer id at all
        finally:
            self._probing.discard(link.peer)
        link.post(Kind.ANSWER, {"id": number, "answer": is_gone})
