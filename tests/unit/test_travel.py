"""An exchange beside the rounds: reports wait for it, and whoever gives it up tells the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peers.exchange import ExchangeError
from peers.frames import Kind
from peers.round_messages import Arrival, Failure
from peers.travel import Travel

ME, OTHER, THIRD = "member-0", "member-1", "member-2"
ARRIVAL = Arrival(4, "p", ((0, 0),), 7)
MEMBERS = (ME, OTHER, THIRD)
EXCHANGE: Any = SimpleNamespace(group=SimpleNamespace(id="g", step=3, members=MEMBERS), me=ME)


class World:
    """A member whose exchange ends when `end` says so, and what it told others."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.told: list[tuple[str, Kind, Failure]] = []
        self.ended: list[tuple[float | None, Arrival | None]] = []
        work: Any = SimpleNamespace(
            travel=self._travel, with_owed=lambda arrival: arrival, settled={4: 3}.get
        )
        self.travel = Travel(
            work,
            tasks,
            lambda *message: self.told.append(message),
            lambda exchange, seconds, waiting: self.ended.append((seconds, waiting)),
        )

    async def _travel(self, exchange: object) -> None:
        await self.end


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            await scenario(World(tasks))

    asyncio.run(asyncio.wait_for(main(), 10.0))


def test_a_report_waits_for_the_exchange_and_no_longer() -> None:
    async def scenario(world: World) -> None:
        assert world.travel.admit(ARRIVAL) is ARRIVAL
        world.travel.begin(EXCHANGE, MEMBERS)
        assert world.travel.holds("g") and not world.travel.holds("h")
        assert world.travel.admit(ARRIVAL) is None
        world.end.set_result(None)
        await asyncio.sleep(0.01)
        assert [(seconds is not None, waiting) for seconds, waiting in world.ended] == [(True, ARRIVAL)]
        assert world.travel.admit(ARRIVAL) is ARRIVAL and not world.told

    run(scenario)


def test_a_report_that_is_withdrawn_is_not_made_later() -> None:
    async def scenario(world: World) -> None:
        world.travel.begin(EXCHANGE, MEMBERS)
        assert world.travel.admit(ARRIVAL) is None
        world.travel.withdraw()
        world.end.set_result(None)
        await asyncio.sleep(0.01)
        assert world.ended[0][1] is None

    run(scenario)


def test_an_exchange_that_fails_is_told_and_lets_the_report_go() -> None:
    async def scenario(world: World) -> None:
        world.travel.begin(EXCHANGE, MEMBERS)
        assert world.travel.admit(ARRIVAL) is None
        world.end.set_exception(ExchangeError("late", "no result", (OTHER,)))
        await asyncio.sleep(0.01)
        assert world.told == [(peer, Kind.FAILED, Failure("g", "late")) for peer in (OTHER, THIRD)]
        assert world.ended == [(None, ARRIVAL)]

    run(scenario)


@pytest.mark.parametrize("how", ["lost", "failed"])
def test_a_member_that_is_gone_or_gives_up_ends_it(how: str) -> None:
    async def scenario(world: World) -> None:
        world.travel.begin(EXCHANGE, MEMBERS)
        world.travel.on_broken("stranger")
        assert not world.travel.on_failed("stranger", Failure("g", "late"))
        assert not world.travel.on_failed(OTHER, Failure("another", "late"))
        assert not world.ended
        if how == "lost":
            world.travel.on_broken(OTHER)
        else:
            assert world.travel.on_failed(OTHER, Failure("g", "late"))
        assert [peer for peer, _, _ in world.told] == [THIRD] and len(world.ended) == 1
        await asyncio.sleep(0.01)
        assert len(world.ended) == 1 and not world.travel.holds("g")

    run(scenario)


def test_a_leader_that_waits_for_the_report_gets_it() -> None:
    """It would leave this member out, although it may be another one that is slow."""

    async def scenario(world: World) -> None:
        world.travel.begin(EXCHANGE, MEMBERS)
        world.travel.on_inquiry(OTHER)
        assert world.travel.holds("g") and not world.ended
        assert world.travel.admit(ARRIVAL) is None
        world.travel.on_inquiry(OTHER)
        assert world.ended == [(None, ARRIVAL)] and [peer for peer, _, _ in world.told] == [OTHER, THIRD]

    run(scenario)


def test_only_the_round_that_settles_it_waits() -> None:
    """An average may travel for several steps."""

    async def scenario(world: World) -> None:
        world.travel.begin(EXCHANGE, MEMBERS)
        before = replace(ARRIVAL, step=3)
        assert world.travel.admit(before) is before and world.travel.admit(ARRIVAL) is None
        world.end.set_result(None)

    run(scenario)


def test_a_member_that_takes_no_part_any_more_tells_those_who_would_wait_for_it() -> None:
    async def scenario(world: World) -> None:
        world.travel.begin(EXCHANGE, MEMBERS)
        world.travel.cancel()
        await asyncio.sleep(0.01)
        assert world.told == [(peer, Kind.FAILED, Failure("g", "disconnected")) for peer in (OTHER, THIRD)]
        assert not world.ended and world.travel.admit(ARRIVAL) is ARRIVAL and world.travel.is_over("g")

    run(scenario)


@pytest.mark.parametrize("how", ["failed before", "takes no part"])
def test_nothing_is_waited_for_that_will_not_come(how: str) -> None:
    """Who commits first may give up before others have begun."""

    async def scenario(world: World) -> None:
        if how == "failed before":
            assert not world.travel.on_failed("stranger", Failure("g", "late"))
            assert not world.travel.on_failed(OTHER, Failure("g", "disconnected"))
        world.travel.begin(EXCHANGE, MEMBERS if how == "failed before" else (ME, THIRD))
        assert [peer for peer, _, _ in world.told] == [OTHER, THIRD] and world.ended == [(None, None)]
        assert world.travel.admit(ARRIVAL) is ARRIVAL

    run(scenario)


def test_after_two_that_were_late_none_begins_for_a_while_and_deadlines_grow() -> None:
    """Somebody who sends nothing there costs everybody a deadline each time, and nobody can say who it is."""

    async def scenario(world: World) -> None:
        first_s = world.travel.pace.exchange_deadline_s
        begun = []
        for number in range(12):
            world.travel.begin(EXCHANGE, MEMBERS)
            if world.travel.holds("g"):
                begun.append(number)
                world.travel.on_failed(OTHER, Failure("g", "late"))
        assert begun == [0, 1, 4, 11] and world.travel.pace.exchange_deadline_s > first_s

    run(scenario)
