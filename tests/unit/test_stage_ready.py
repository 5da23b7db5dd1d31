"""A peer of the next stage gets FORWARDs on a link from its READY on, each once per link."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

import peers.stage
from peers.compute import Boundaries, Work
from peers.engine import Engine
from peers.frames import Frame, Kind
from peers.limits import LIMITS
from peers.link import Hello
from peers.payloads import BatchFormat
from peers.questions import Questions
from peers.stage import StageWorker
from peers.work_items import Entry, Phase
from swarm.activation.base import CodecKey
from swarm.activation.dense import DenseCodec, DenseConfig
from swarm.batch import Batch
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
(KEY,) = PLAN.keys()


class NextLink:
    """A link to "next" that remembers what was sent on it."""

    def __init__(self, peer: str = "next", incarnation: int = 1) -> None:
        self.peer, self.sent = peer, []  # type: ignore[var-annotated]
        self.hello = Hello(run="run", stage=1, incarnation=incarnation)

    async def send(self, kind: Kind, header: dict[str, Any], payload: list[memoryview]) -> None:
        self.sent.append(kind)


class OneLink:
    """The links of a peer with one neighbour."""

    def __init__(self) -> None:
        self.link: NextLink | None = None

    def get(self, peer: str) -> NextLink | None:
        return self.link

    def open_links(self, stage: int) -> list[NextLink]:
        return []

    def expects(self, stage: int) -> bool:
        return False


class World:
    """A source with a microbatch that is ready to be sent."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.links = OneLink()
        codec = DenseCodec(DenseConfig(values="fp32"), hidden_size=4, dtype=torch.float32)
        self.worker = StageWorker(
            stage=0,
            stages=2,
            compute=None,  # type: ignore[arg-type]
            boundaries=Boundaries(None, codec),
            form=BatchFormat(8, 16),
            engine=Engine(),
            links=self.links,  # type: ignore[arg-type]
            questions=Questions(),
            source_window=4,
            dataset=None,
            tasks=tasks,
            on_ledger=lambda: None,
            on_slot_done=lambda slot: None,
            on_give_up=lambda key: None,
        )
        self.worker.core.on_plan(PLAN, 0.0)
        ids = torch.zeros(1, 8, dtype=torch.int64)
        starts = torch.zeros(1, 8, dtype=torch.bool)
        starts[0, 0] = True
        batch = Batch(ids, starts, torch.zeros(1, 8, dtype=torch.bool), torch.tensor([0]))
        key = CodecKey.of(batch, 0)
        entry = Entry(KEY, None, Work(KEY, batch, key), outgoing=codec.encode(torch.zeros(1, 8, 4), key))
        entry.phase = Phase.OUT
        self.worker.core._store.add(entry)
        self.worker.core._onward.want(entry)

    def connect(self) -> NextLink:
        self.links.link = NextLink()
        return self.links.link

    async def ready(self, link: NextLink) -> list[Kind]:
        """The peer says READY on a link; returns all that was sent on it."""
        self.worker.on_ready(link)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return link.sent


def test_what_a_peer_owes_is_repeated_once_on_every_link_and_not_before_ready() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks)
            assert await world.ready(world.connect()) == [Kind.FORWARD]
            again = world.connect()
            world.worker.run(world.worker.core.on_busy("next", KEY, 0.0))
            world.worker.run(world.worker.core.route(10.0))  # it is chosen again, and has not said READY
            await asyncio.sleep(0)
            assert again.sent == []
            assert await world.ready(again) == [Kind.FORWARD]
            assert await world.ready(again) == [Kind.FORWARD], (
                "a second READY on the same link repeats nothing"
            )

    asyncio.run(scenario())


def test_peer_that_says_no_ready_on_its_new_link_has_stopped_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.stage, "LIMITS", dataclasses.replace(LIMITS, ready_s=0.05))

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks)
            await world.ready(world.connect())
            again = world.connect()
            world.worker.on_link_up(again)  # type: ignore[arg-type]
            assert world.worker.core.router.peers == ["next"]
            await asyncio.sleep(0.2)
            assert world.worker.core.router.peers == []
            await world.ready(again)
            assert world.worker.core.router.peers == ["next"]

    asyncio.run(scenario())


def test_a_peer_its_stage_goes_on_without_gets_nothing_until_it_works_again() -> None:
    """It may not know: its links to the other replicas are down, or its line is slow."""

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks)
            router = world.worker.core.router
            link, other = world.connect(), NextLink("other")

            def says(link: NextLink, step: int, *without: str) -> list[str]:
                header = {"step": step, "without": list(without)}
                world.worker.on_ready_frame(link, Frame(Kind.READY, header, ()))  # type: ignore[arg-type]
                return sorted(router.peers)

            assert says(link, 3) == ["next"]
            assert says(other, 6, "next", "a stranger") == ["other"]
            assert says(link, 3) == ["other"], "its link came back, and it still does not know"
            assert says(link, 9) == ["next", "other"]
            assert says(other, 6, "next") == ["next", "other"], "word of what is over"
            assert says(other, 10, "next") == ["other"]
            assert says(NextLink(incarnation=2), 0) == ["next", "other"], "it has started anew"
            world.worker.on_lost("next")
            world.worker.on_lost("other")

    asyncio.run(scenario())
