"""Catching up over real p2pd: the members' weights bit for bit, from whoever still gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from catchup_run import Run
from transfer_swarm import Swarm

import peers.update_fetch
from peers.catchup import LineageError, RestoreError, UpdateMissing
from peers.engine import Engine, JobPriority
from peers.limits import LIMITS
from peers.updates import read_update
from tests.kit.members import FILE, STAGE, Members, running_engine, stage_compute

pytestmark = pytest.mark.e2e
pytest_plugins = ["transfer_swarm"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


@pytest.mark.parametrize(("values", "compute"), [("fp16", "bf16"), ("fp32", "fp32")])
def test_a_joiner_holds_the_members_weights_bit_for_bit(
    swarm: Swarm, engine: Engine, tmp_path: Path, values: str, compute: str
) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path, values=values, compute=compute)
        await run.start()
        await run.train(None, None, None, (4, 0), (9,), (0, 0), None, None)
        version, lineage = await run.catchup.newest(5, run.donors)
        assert version == 3
        assert run.disk.snapshots.served == [3]
        seen: list[tuple[int, int]] = []
        held = await run.catchup.apply_updates(
            version,
            lineage,
            until=8,
            donors=run.donors,
            on_progress=lambda version, until, seconds_left: seen.append((version, until)),
        )
        run.check(held)
        assert seen == [(version, 8) for version in range(4, 9)]
        pace = run.catchup.pace
        assert pace.bytes_per_update > 1000
        assert pace.seconds_per_update > 0
        assert pace.mbps > 0
        # What came is kept, and offered to those who join next.
        assert sorted(run.disk.updates.steps) == [3, 4, 5, 6, 7]
        assert run.disk.counted('updates_total{result="applied"}') == 5
        # And the next steps are taken with everybody.
        await run.train(None)
        update = run.members.updates[8]
        run.disk.updates.record(update)
        await run.disk.updates.settle(20)
        run.check(await run.catchup.apply_updates(*held, until=9, donors=[]))

    swarm.run(scenario())


def test_a_joiner_goes_through_all_updates_from_the_initial_state(
    swarm: Swarm, engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path, snapshot_every=50)
        await run.start()
        await run.train(None, None, (3,), None)
        assert await run.catchup.newest(4, run.donors) == (0, "")
        run.check(await run.catchup.apply_updates(0, "", until=4, donors=run.donors))

    swarm.run(scenario())


def test_a_donor_that_dies_midway_costs_nothing_but_time(
    swarm: Swarm, engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(*[None] * 8)
        version, lineage = await run.catchup.newest(8, run.donors)
        assert version == 6
        killed: list[asyncio.Task[None]] = []

        def kill_one(version: int, until: int, seconds_left: float) -> None:
            if not killed:
                killed.append(asyncio.create_task(run.kill(0)))

        held = await run.catchup.apply_updates(
            version, lineage, until=8, donors=run.donors, on_progress=kill_one
        )
        run.check(held)
        # The snapshot too: the one who is asked first is gone.
        run.disk.store.path(6, STAGE, run.manifest.run_id).unlink()
        await run.catchup.restore(6, dict(sorted(run.donors.items(), key=lambda item: item[0] != run.ids[0])))
        assert run.catchup.held == (6, lineage)

    swarm.run(scenario(), 90)


def test_a_corrupt_update_is_taken_from_another_donor(
    swarm: Swarm, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.shuffle", lambda donors: None)  # the first one is asked first

    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(*[None] * 5)
        path = run.disks[0].updates.path(3)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        # A liar's file is whole: only its content is not what the round committed.
        lie = run.disks[0].updates
        wrong = run.members.updates[4]
        changed = wrong.chunks[0].clone()
        changed[9] ^= 1
        lie.record(_with_chunks(wrong, (changed, *wrong.chunks[1:])))
        await lie.settle(20)
        version, lineage = await run.catchup.newest(5, run.donors)
        held = await run.catchup.apply_updates(version, lineage, until=4, donors=run.donors)
        run.catchup._fetcher._failed_at.clear()  # whoever failed is asked last: here once more first
        run.check(await run.catchup.apply_updates(*held, until=5, donors=run.donors))
        assert run.disk.counted('updates_total{result="corrupt"}') == 2
        assert sum("bad update" in note for note in run.notes) == 2
        with pytest.raises(UpdateMissing, match="torn or changed"):
            run.disk.updates.path(3).unlink()
            await run.catchup.restore(3, run.donors)
            await run.catchup.apply_updates(version, lineage, until=5, donors=run.ids[:1])
        assert run.catchup.held == (3, lineage)
        assert not run.disk.updates.path(3).exists()

    swarm.run(scenario())


def _with_chunks(update: Any, chunks: tuple[torch.Tensor, ...]) -> Any:
    import dataclasses

    return dataclasses.replace(update, chunks=chunks)


def test_weights_of_another_lineage_are_found_and_replaced(
    swarm: Swarm, engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        # This peer went another way since step 2: a half that lost.
        mine = Members(run.manifest, tmp_path / "artifacts", engine, 1)
        mine.computes = {"member-0": run.compute}
        run.disk.updates.record(await mine.step((5,)))
        run.disk.snapshots.take(mine.version, mine.lineage)
        await run.disk.snapshots.settle(20)
        await run.train(*[None] * 2)
        held = await run.catchup.newest(2, {})
        assert held == (1, mine.lineage)
        before = run.compute.sketch()
        with pytest.raises(LineageError, match="begins from other weights"):
            await run.catchup.apply_updates(*held, until=2, donors=run.donors)
        assert run.catchup.held == held
        assert run.compute.sketch() == before
        await run.train(*[None] * 2)
        held = await run.catchup.newest(4, run.donors, use_own=False)
        assert held[0] == 3
        assert run.disk.store.versions() == [3]
        run.check(await run.catchup.apply_updates(*held, until=4, donors=run.donors))

    swarm.run(scenario())


def test_updates_that_nobody_has_are_said_at_once_and_recent_ones_waited_for(
    swarm: Swarm, engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(*[None] * 6)
        for disk in run.disks:
            disk.updates.drop_before(2)
            await disk.updates.settle(20)
        await run.catchup.newest(0, {})
        with pytest.raises(UpdateMissing, match="step 0 of stage 0"):
            await asyncio.wait_for(run.catchup.apply_updates(0, "", until=6, donors=run.donors), 5)
        held = await run.catchup.newest(6, run.donors)
        assert held[0] == 6
        waiting = asyncio.create_task(run.catchup.apply_updates(*held, until=7, donors=run.donors))
        await asyncio.sleep(0.5)
        await run.train(None)
        run.check(await waiting)

    swarm.run(scenario())


def test_nobody_to_ask_is_an_answer(
    swarm: Swarm, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = type(LIMITS)(update_wait_s=0.5)
    monkeypatch.setattr(peers.update_fetch, "LIMITS", limits)

    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(*[None] * 3)
        with pytest.raises(
            RestoreError, match=r"version 2 of stage 0:\n.*no whole checkpoint.*\n.*nobody offers it"
        ):
            await run.catchup.restore(2, {})
        with pytest.raises(RestoreError, match=r"(?s)unknown_name.*snapshot/2/stage-0"):
            await run.catchup.restore(2, run.donors)
        assert run.catchup.held is None
        with pytest.raises(UpdateMissing, match="there is no donor"):
            await run.catchup.apply_updates(0, "", until=1, donors=[])
        with pytest.raises(UpdateMissing, match="step 3"):
            await run.catchup.apply_updates(3, run.members.lineage, until=4, donors=lambda: run.ids)

    swarm.run(scenario())


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_replaced_by_a_donors(swarm: Swarm, engine: Engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(*[None] * 3)
        lineage = await run.catchup.restore(3, run.donors)
        given = [holder.traffic.total("up", "chunk") for holder in run.holders]
        assert await run.catchup.restore(3, run.donors) == lineage  # its own now
        assert [holder.traffic.total("up", "chunk") for holder in run.holders] == given
        damage(run.disk.store.path(3, STAGE, run.manifest.run_id))
        assert await run.catchup.restore(3, run.donors) == lineage
        run.check((3, lineage))
        assert run.disk.counted('checkpoints_total{result="corrupt"}') == 1
        assert sum("damaged" in note for note in run.notes) == 1
        # Both donors' copies are damaged: the next older state is taken, and it is said.
        run.disk.store.path(3, STAGE, run.manifest.run_id).unlink()
        for disk in run.disks:
            damage(disk.store.path(3, STAGE, run.manifest.run_id))
        assert await run.catchup.newest(3, run.donors) == (0, "")
        assert sum("what it gave cannot be used" in note for note in run.notes) == 1
        assert not run.disk.store.path(3, STAGE, run.manifest.run_id).exists()

    swarm.run(scenario())


def test_the_initial_state_is_fetched_where_it_is_missing(
    swarm: Swarm, engine: Engine, tmp_path: Path
) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(None)
        origin = (tmp_path / "artifacts").rename(tmp_path / "origin")
        with pytest.raises(RestoreError, match="initial state"):
            await asyncio.wait_for(_with_patience(run, 0.5), 20)
        (origin / FILE).rename(_folder(tmp_path / "artifacts") / FILE)
        assert await run.catchup.restore(0, run.donors) == ""
        fresh = stage_compute(run.manifest, tmp_path / "artifacts")
        assert run.compute.sketch() == fresh.sketch()

    swarm.run(scenario())


async def _with_patience(run: Run, seconds: float) -> None:
    async def nobody() -> list[str]:
        return []

    run.catchup._files._holders = nobody
    run.catchup._files.ensure = _never  # type: ignore[method-assign]
    try:
        await run.catchup.restore(0, run.donors)
    finally:
        del run.catchup._files.ensure


async def _never(name: str, progress: Callable[[int, int], None] | None = None) -> Path:
    raise FileNotFoundError(name)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("moment", range(4))
def test_a_cancelled_catch_up_says_what_it_holds(
    swarm: Swarm, engine: Engine, tmp_path: Path, moment: int
) -> None:
    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(*[None] * 3)
        states = [run.members.state]
        lineages = [run.members.lineage]
        for _ in range(2):
            await run.train(None)
            states.append(run.members.state)
            lineages.append(run.members.lineage)
        held = await run.catchup.newest(3, run.donors)
        task = asyncio.create_task(run.catchup.apply_updates(*held, until=5, donors=run.donors))
        await asyncio.sleep(0.03 * moment)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # A job that had begun is not cancelled: behind it, weights and what is said of them agree.
        state = await engine.submit(JobPriority.ROUND, run.compute.state)
        assert run.catchup.held is not None
        version, lineage = run.catchup.held
        assert lineage == lineages[version - 3]
        assert all(torch.equal(tensor, states[version - 3][name]) for name, tensor in state.items())
        run.check(await run.catchup.apply_updates(version, lineage, until=5, donors=run.donors))

    swarm.run(scenario())


def test_three_joiners_at_once_serve_each_other(swarm: Swarm, engine: Engine, tmp_path: Path) -> None:
    """What one has fetched, another could take: the members' files and the joiner's are the same bytes."""

    async def scenario() -> None:
        run = Run(swarm, engine, tmp_path)
        await run.start()
        await run.train(*[None] * 5)
        held = await run.catchup.newest(5, run.donors)
        run.check(await run.catchup.apply_updates(*held, until=5, donors=run.donors))
        for step in (3, 4):
            paths = [disk.updates.path(step) for disk in (*run.disks, run.disk)]
            assert len({path.read_bytes() for path in paths}) == 1
            read_update(paths[-1]).check_content()

    swarm.run(scenario())
