"""What the benchmark of a round's overhead has its replicas do, here all in one process."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.round_overhead.crew import Place
from benchmarks.round_overhead.member import Member
from benchmarks.round_overhead.report import STAGES, stages_of, took
from tests.kit.members import running_engine
from tests.kit.processes import loop_that_leaves_nothing

pytestmark = pytest.mark.e2e
REPLICAS, ELEMENTS = 3, 1000


async def measure(members: list[Member]) -> None:
    async def all_do(what: str, number: int) -> list[dict[str, float]]:
        await asyncio.gather(*(member.prepare(what, number) for member in members))
        at = time.monotonic() + 0.01
        return list(await asyncio.gather(*(member.go(at) for member in members)))

    peers = [await member.open() for member in members]
    await asyncio.gather(*(member.meet(peers) for member in members))
    await asyncio.gather(*(member.begin("fp32", ELEMENTS) for member in members))
    before = await members[0].weights()
    for number in range(2):
        whole = await all_do("round", number)
        assert sum(stages_of(whole).values()) == pytest.approx(took(whole))
        assert all(marks.keys() == {"ready", *STAGES} for marks in whole)
        for part in ("move", "exchange"):
            assert took(await all_do(part, number)) > 0
    assert {await member.weights() for member in members} != {before}
    assert len({await member.weights() for member in members}) == 1


def test_rounds_and_their_parts_run_over_real_links(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            members = [
                Member(Place(position, "127.0.0.1", "", str(tmp_path)), engine, tasks)
                for position, engine in enumerate(engines)
            ]
            await measure(members)
            for member in members:
                await member.close()

    with ExitStack() as stack:
        engines = [stack.enter_context(running_engine()) for _ in range(REPLICAS)]
        runner = stack.enter_context(loop_that_leaves_nothing(tmp_path_factory))
        runner.run(asyncio.wait_for(scenario(), 120))
