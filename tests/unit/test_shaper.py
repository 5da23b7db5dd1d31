"""The shaper in a loop whose time is not real: rates, turns, cancellation, lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.frames import Kind, Priority
from peers.shaper import BURST_S, PAYLOAD_SHARE, Shaper
from peers.shaping import Flow
from peers.traffic import Traffic
from tests.kit.fake_time import run_in_fake_time

MBPS = 8.0
RATE = MBPS * 1e6 / 8 * PAYLOAD_SHARE


def now() -> float:
    return asyncio.get_running_loop().time()


def with_shaper(scenario: Callable[[Shaper], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await scenario(Shaper(MBPS, clock=asyncio.get_running_loop().time))

    run_in_fake_time(run())


async def send(shaper: Shaper, priority: int, total: int) -> float:
    """Take `total` bytes in pieces; returns when it was done."""
    flow, left = Flow(), total
    while left > 0:
        nbytes = min(left, shaper.piece_bytes)
        await shaper.take(flow, priority, nbytes)
        left -= nbytes
    return now()


@pytest.mark.parametrize("flows", [1, 8])
def test_bulk_takes_the_time_that_the_rate_says(flows: int) -> None:
    async def scenario(shaper: Shaper) -> None:
        total = int(RATE * 10)
        await asyncio.gather(*(send(shaper, Priority.ACTIVATION, total // flows) for _ in range(flows)))
        assert 10 - BURST_S - 0.1 <= now() <= 10.1
        assert shaper.waited_s[Priority.ACTIVATION] == pytest.approx(10 * flows, rel=0.1)
        assert sum(shaper.waited_s) == shaper.waited_s[Priority.ACTIVATION]

    with_shaper(scenario)


def test_without_a_cap_nothing_waits() -> None:
    async def scenario() -> None:
        shaper = Shaper(None)
        assert not await shaper.take(Flow(), Priority.STATE, 1 << 40)
        shaper.charge(1 << 40)
        shaper.charge_answers(1 << 40)
        assert not await shaper.take(Flow(), Priority.STATE, 1 << 40)
        assert (shaper.is_limited, shaper.window_bytes, shaper.widen(9)) == (False, None, 0)
        assert now() == 0

    run_in_fake_time(scenario())


def test_gradients_are_done_before_state_has_got_a_fifth_of_theirs() -> None:
    async def scenario(shaper: Shaper) -> None:
        state = asyncio.create_task(send(shaper, Priority.STATE, int(RATE)))
        gradient = asyncio.create_task(send(shaper, Priority.GRADIENT, int(RATE)))
        assert await gradient <= 1.2
        assert await state >= 1.9

    with_shaper(scenario)


def test_control_is_charged_and_never_waits() -> None:
    async def scenario(shaper: Shaper) -> None:
        shaper.charge(RATE)
        assert now() == 0
        await send(shaper, Priority.GRADIENT, 1000)
        assert now() == pytest.approx(1 - BURST_S, abs=0.01)

    with_shaper(scenario)


def test_acknowledgements_of_a_fast_download_leave_half_of_the_upload() -> None:
    async def scenario(shaper: Shaper) -> None:
        async def receive() -> None:
            while True:
                shaper.charge_answers(int(RATE))  # every 5 ms: 200 times the upload's rate
                await asyncio.sleep(0.005)

        receiving = asyncio.create_task(receive())
        assert 1.8 <= await send(shaper, Priority.ACTIVATION, int(RATE)) <= 3.2
        receiving.cancel()

    with_shaper(scenario)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5), st.integers(1, 4)), max_size=12))
def test_cancelled_at_any_moment_grants_go_back(plan: list[tuple[float, float, int]]) -> None:
    async def scenario(shaper: Shaper) -> None:
        taken = 0

        async def take(start_s: float, patience_s: float, priority: int) -> None:
            nonlocal taken
            await asyncio.sleep(start_s)
            try:
                async with asyncio.timeout(patience_s):
                    await shaper.take(Flow(), priority, 60_000)
                    taken += 60_000
            except TimeoutError:
                pass

        await asyncio.gather(*(take(*entry) for entry in plan))
        taken += int(RATE)
        finished = await send(shaper, Priority.STATE, int(RATE))
        # All that was taken, and nothing else, has passed the bucket.
        assert finished >= (taken - 60_000) / RATE - BURST_S - 0.1
        assert finished <= max(1.0, taken / RATE + 1.0) + 0.1

    with_shaper(scenario)


def test_cancelled_after_its_grant_and_before_it_ran_gives_the_bytes_back() -> None:
    async def scenario() -> None:
        clock = [0.0]
        shaper = Shaper(MBPS, clock=lambda: clock[0])
        shaper.charge(RATE)
        task = asyncio.create_task(shaper.take(Flow(), Priority.GRADIENT, int(RATE)))
        await asyncio.sleep(0)
        clock[0] = 2.0
        shaper._serve()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() and not shaper._granted
        assert not await shaper.take(Flow(), Priority.STATE, 1000)  # nothing is owed

    run_in_fake_time(scenario())


def test_what_is_promoted_goes_first() -> None:
    async def scenario(shaper: Shaper) -> None:
        shaper.charge(RATE)
        order: list[str] = []

        async def take(name: str, flow: Flow, priority: int) -> None:
            await shaper.take(flow, priority, 1000)
            order.append(name)

        slow = Flow()
        tasks = [asyncio.create_task(take("state", slow, Priority.STATE))]
        tasks.append(asyncio.create_task(take("activation", Flow(), Priority.ACTIVATION)))
        await asyncio.sleep(0.01)
        shaper.promote(slow, Priority.GRADIENT)
        await asyncio.gather(*tasks)
        assert order == ["state", "activation"]

    with_shaper(scenario)


def test_lanes_count_pieces_and_frames_once_and_share_one_shaper() -> None:
    async def scenario() -> None:
        traffic = Traffic(MBPS, None, asyncio.get_running_loop().time)
        lanes = [traffic.lane("up", stage, is_bulk=True) for stage in (1, 2)]
        control = traffic.lane("up", 1, is_bulk=False)

        async def frames(lane: Any) -> None:
            for _ in range(100):
                await lane.passes(Kind.FORWARD, 10_000)
            lane.has_passed(Kind.FORWARD)

        bulk = asyncio.gather(*(frames(lane) for lane in lanes))
        await asyncio.sleep(0.1)
        assert not await control.passes(Kind.QUERY, 50)
        control.has_passed(Kind.QUERY)
        await bulk
        assert traffic.bytes["up", "forward", 1] == traffic.bytes["up", "forward", 2] == 1_000_000
        assert traffic.total("up") == 2_000_050 and traffic.total("down") == 0
        assert dict(traffic.frames)["up", "forward"] == 2 and dict(traffic.frames)["up", "query"] == 1

    run_in_fake_time(scenario())


def test_urgent_chunks_go_before_gradients_and_keep_to_the_cap() -> None:
    async def scenario() -> None:
        traffic = Traffic(None, MBPS, asyncio.get_running_loop().time)
        traffic.download.charge(RATE)
        order: list[str] = []

        async def pass_through(name: str, lane: Any, kind: Kind) -> None:
            await lane.passes(kind, 10_000)
            order.append(name)

        first, gradient, urgent = (traffic.lane("down", 1, is_bulk=True) for _ in range(3))
        urgent.priority = Priority.CONTROL
        await asyncio.gather(
            pass_through("first", first, Kind.CHUNK),
            pass_through("gradient", gradient, Kind.GRADIENT),
            pass_through("urgent", urgent, Kind.CHUNK),
        )
        assert order == ["urgent", "gradient", "first"]
        assert traffic.download.waited_s[Priority.CONTROL] > 0.9

    run_in_fake_time(scenario())


def test_a_control_kind_on_a_bulk_stream_does_not_get_past_the_cap() -> None:
    async def scenario() -> None:
        traffic = Traffic(None, MBPS, asyncio.get_running_loop().time)
        lane = traffic.lane("down", 1, is_bulk=True)
        for _ in range(100):
            await lane.passes(Kind.PLAN, 10_000)
        assert traffic.download.waited_s[Priority.STATE] > 0.9

    run_in_fake_time(scenario())
