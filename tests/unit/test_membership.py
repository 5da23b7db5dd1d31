"""A peer that follows its stage: counted in, left out, or left alone; and a start whose version nobody gives."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

import peers.membership
from peers.catchup import RestoreError
from peers.config import UserError
from peers.joining import Standing
from peers.limits import LIMITS
from peers.membership import Membership
from peers.round_messages import Commit

ME, OTHER = "me", "other"
TOTAL = 10


class World:
    """A membership whose neighbours answer with `status`, and whose owner remembers what it was told."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.status: list[Any] | None = [4, True, "line"]
        self.said: list[str] = []
        self.done: list[str] = []
        self.is_applying = False
        self.failure: Exception | None = None
        self.membership = Membership(
            stage=1,
            stages=3,
            total_steps=TOTAL,
            run_seed=0,
            links=SimpleNamespace(me=ME, open_links=lambda stage: [SimpleNamespace(peer=OTHER)]),  # type: ignore[arg-type]
            questions=self,  # type: ignore[arg-type]
            catchup=self,  # type: ignore[arg-type]
            view=SimpleNamespace(donors=dict, claimants=list, waiting=list),
            owner=self,
            tasks=tasks,
            on_failure=self._fail,
            on_refilled=lambda version, lineage: None,
            note=self.said.append,
        )

    def _fail(self, error: Exception) -> None:
        self.failure = error

    async def ask(self, links: object, what: str, about: object) -> dict[str, Any]:
        """Questions: one neighbour, or nobody."""
        await asyncio.sleep(0)
        return {} if self.status is None else {OTHER: self.status}

    async def restore(self, version: int, donors: object) -> str:
        """CatchUp: nobody has it."""
        raise RestoreError(f"cannot get version {version}")

    def suspend(self) -> None:
        """Owner."""
        self.done.append("suspend")

    def enter(self, step: int, *_: object) -> None:
        """Owner."""
        self.done.append(f"enter {step}")

    def vote(self) -> None:
        """Owner."""
        self.done.append("vote")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peers.membership, "LIMITS", dataclasses.replace(LIMITS, follow_every_s=0.01, refill_look_s=0.01)
    )


def play(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> World:
    """Run a scenario in a world of its own; the tasks that are left over are cancelled."""
    worlds: list[World] = []

    async def main() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            before = asyncio.all_tasks()
            worlds.append(World(tasks))
            await scenario(worlds[0])
            for task in asyncio.all_tasks() - before:
                task.cancel()

    asyncio.run(main())
    return worlds[0]


def entered() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


def test_a_follower_whose_stage_is_gone_does_not_wait_for_ever() -> None:
    async def scenario(world: World) -> None:
        world.status = None
        assert await world.membership._is_counted_in(entered(), 4) is None

    play(scenario)


def test_a_follower_that_missed_the_commit_of_its_round_follows_again() -> None:
    async def scenario(world: World) -> None:
        world.status = [6, True, "line"]
        assert await world.membership._is_counted_in(entered(), 4) is False

    play(scenario)


def test_a_follower_waits_while_its_round_goes_on_or_is_being_applied() -> None:
    async def scenario(world: World) -> None:
        waiting = entered()
        task = asyncio.create_task(world.membership._is_counted_in(waiting, 4))
        await asyncio.sleep(0.2)
        assert not task.done()
        world.status, world.is_applying = [5, True, "line"], True
        await asyncio.sleep(0.2)
        assert not task.done()
        waiting.set_result(True)
        assert await task is True

    play(scenario)


def test_a_follower_votes_from_the_commit_on_that_counts_it_in() -> None:
    """Whatever follows in the same turn of the loop finds a voting member, which can fall out of step again."""

    async def scenario(world: World) -> None:
        member = world.membership
        member.standing, member._entered = Standing.FOLLOWING, entered()
        member.on_vote()
        assert str(member.standing) == "voting"
        assert world.done == ["vote"]
        member.rejoin("drifted", None, use_own=False)
        assert str(member.standing) == "catching_up"
        assert world.done == ["vote", "suspend"]

    play(scenario)


def test_a_follower_of_the_last_commit_is_told_that_the_run_is_finished() -> None:
    async def scenario(world: World) -> None:
        member = world.membership
        lineage = "line"
        commit = Commit("g", TOTAL - 1, 1, "d", OTHER, (OTHER,), lineage=lineage, followers=(ME,))

        async def be_listed() -> Commit:
            return commit

        async def apply_updates(*_: object, **__: object) -> tuple[int, str]:
            return TOTAL, commit.next_lineage

        member._held, member._be_listed = (TOTAL - 1, lineage), be_listed  # type: ignore[method-assign]
        world.apply_updates = apply_updates  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="finished"):
            await member._follow()
        assert world.done == []

    play(scenario)


def test_a_start_whose_version_nobody_gives_is_joined_not_failed() -> None:
    async def scenario(world: World) -> None:
        assert await world.membership.restore(3) is None
        assert world.membership.standing is Standing.CATCHING_UP
        assert world.done == ["suspend"]
        assert "cannot get version 3" in world.said[0]
        assert await world.membership.restore(0) == ""

    world = play(scenario)
    assert world.failure is None
