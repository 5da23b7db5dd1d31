"""Before a replay chooses a peer, everybody who may hold its key has said no."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import peers.questions
from peers.compute import Boundaries
from peers.engine import Engine
from peers.frames import Frame, Kind
from peers.limits import LIMITS
from peers.payloads import BatchFormat
from peers.questions import Questions
from peers.stage import StageWorker
from peers.work import Entry, Phase
from swarm.plan import Plan, Slot

PLAN = Plan(
    step=0,
    attempt=0,
    group="",
    rows_per_microbatch=1,
    slots=(Slot(number=0, samples=(0,)),),
    prior_versions=(),
    prior_hashes=(),
)


class Neighbour:
    """A link to a peer of the next stage that answers every question in the same way."""

    def __init__(self, peer: str, answer: bool | None, questions: Questions) -> None:
        self.peer, self.answer, self.questions = peer, answer, questions
        self.forwards = 0

    def post(self, kind: Kind, header: dict[str, Any], payload: object = None) -> None:
        if kind is Kind.QUERY and self.answer is not None:
            self.questions.on_answer(
                self.peer, Frame(Kind.ANSWER, {"id": header["id"], "answer": self.answer})
            )
        self.forwards += kind is Kind.FORWARD


class OpenLinks:
    """The links that stand."""

    def __init__(self) -> None:
        self.open: dict[str, Neighbour] = {}
        self.is_expecting = False

    def expects(self, stage: int) -> bool:
        return self.is_expecting

    def get(self, peer: str) -> Neighbour | None:
        return self.open.get(peer)

    def open_links(self, stage: int) -> list[Neighbour]:
        return list(self.open.values())


class World:
    """A source with a replay, and two peers of the next stage: "near" and "far"."""

    def __init__(self, tasks: asyncio.TaskGroup, up: tuple[str, ...] = ("far", "near")) -> None:
        self.questions, self.links = Questions(), OpenLinks()
        self.sent: list[str] = []
        self.worker = StageWorker(
            stage=0,
            stages=2,
            compute=None,  # type: ignore[arg-type]
            boundaries=Boundaries(None, None),
            form=BatchFormat(8, 16),
            engine=Engine(),
            links=self.links,  # type: ignore[arg-type]
            questions=self.questions,
            source_window=4,
            dataset=None,
            tasks=tasks,
            on_ledger=lambda: None,
            on_slot_done=lambda slot: None,
            on_give_up=lambda key: None,
        )
        self.worker._send_forward = lambda peer, entry: self.sent.append(peer)  # type: ignore[method-assign]
        core = self.worker.core
        core.on_plan(PLAN, 0.0)
        for peer in up:
            core.on_peer_up(peer, 0.0)
        (key,) = PLAN.keys()
        self.entry = Entry(key, None, "work", outgoing={}, phase=Phase.OUT, is_replay=True, needs_route=True)
        core._store.add(self.entry)
        core._onward.want(self.entry)

    def link(self, peer: str, answer: bool | None) -> None:
        self.links.open[peer] = Neighbour(peer, answer, self.questions)

    async def route(self) -> list[str]:
        """What the timer does; returns where the replay went."""
        self.worker.run(self.worker.core.route(time.monotonic()))
        await asyncio.sleep(LIMITS.ask_again_s + 0.1)
        return self.sent


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Questions.ask

    async def quick(self: Questions, *arguments: Any, **more: Any) -> dict[str, Any]:
        return await ask(self, *arguments, **{**more, "deadline_s": 0.02})

    monkeypatch.setattr(peers.questions.Questions, "ask", quick)


def test_replay_goes_to_the_peer_that_holds_its_key() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks)
            world.link("near", False)
            world.link("far", True)
            assert await world.route() == ["far"]

    asyncio.run(scenario())


def test_replay_that_nobody_holds_goes_to_somebody() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks)
            world.link("near", False)
            world.link("far", False)
            assert len(await world.route()) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", ["its link is down", "it is slow"])
def test_replay_waits_for_a_peer_that_may_hold_its_key_and_has_not_answered(answer: str) -> None:
    """Another peer would train the key a second time, and no ledgers would partition the plan any more."""

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks)
            world.link("near", False)
            if answer == "it is slow":
                world.link("far", None)
            assert await world.route() == []
            world.link("far", True)
            assert await world.route() == ["far"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_doomed", [False, True])
def test_replay_waits_for_a_peer_that_has_never_been_linked_yet(is_doomed: bool) -> None:
    """Right after the start not all links stand: who holds the key may be the one that is missing."""

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks, up=("near",))
            world.entry.is_doomed = is_doomed  # "near" has refused it: it has committed the step
            world.link("near", False)
            world.links.is_expecting = True
            assert await world.route() == [] and world.entry.phase is Phase.OUT
            world.link("far", True)
            world.worker.run(world.worker.core.on_peer_up("far", time.monotonic()))
            assert await world.route() == ["far"]
            assert world.worker.core.counters["lost"] == 0

    asyncio.run(scenario())
