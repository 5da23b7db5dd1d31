"""Files over real p2pd: verified, resumed, taken from whoever gives."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from transfer_swarm import MIB, NAME, Swarm, content_of, make_run

from peers.fileserver import snapshot_name
from peers.frames import Priority
from peers.traffic import Traffic
from peers.transfer import TransferError, fetch_artifact, fetch_by_hash, fetch_manifest, fetch_snapshot
from swarm.manifest import Artifact, RunManifest

pytestmark = pytest.mark.e2e
pytest_plugins = ["transfer_swarm"]


def test_a_manifest_comes_by_run_or_without_and_proves_itself(swarm: Swarm, tmp_path: Path) -> None:
    manifest = make_run(tmp_path, b"x")
    other = make_run(tmp_path, b"x", "another run")

    async def scenario() -> None:
        holder = await swarm.holder()
        with pytest.raises(TransferError, match=r"unknown_run.*it serves: none"):
            await fetch_manifest(swarm.me, holder.id, None, 5)
        holder.server.add_run(manifest, tmp_path)
        traffic, asked = Traffic(), holder.traffic.total("down", "fetch")
        received = RunManifest.from_bytes(await fetch_manifest(swarm.me, holder.id, None, 5, traffic))
        received.verify(manifest.run_id)
        assert received == manifest
        assert traffic.total("down", "chunk") == holder.traffic.total("up", "chunk") > 500
        assert traffic.total("up", "fetch") == holder.traffic.total("down", "fetch") - asked > 0
        holder.server.add_run(other, tmp_path)
        assert RunManifest.from_bytes(await fetch_manifest(swarm.me, holder.id, other.run_id, 5)) == other
        with pytest.raises(TransferError) as error:
            await fetch_manifest(swarm.me, holder.id, None, 5)
        for run in (manifest, other):
            assert f"{run.run_id} ({run.name})" in str(error.value)
        assert "choose one with --run" in str(error.value)
        with pytest.raises(TransferError, match=f"run {'f' * 40} is not served here; it serves: "):
            await fetch_manifest(swarm.me, holder.id, "f" * 40, 5)

    swarm.run(scenario())


def test_an_artifact_arrives_with_progress_and_is_only_verified_afterwards(
    swarm: Swarm, tmp_path: Path
) -> None:
    content = content_of(9 * MIB + 12_345)
    manifest = make_run(tmp_path, content)
    artifact = manifest.artifacts[0]

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path)
        target, seen, traffic = tmp_path / "mine" / NAME, list[tuple[int, int]](), Traffic()
        fetch = functools.partial(
            fetch_artifact,
            swarm.me,
            [holder.id],
            artifact,
            manifest.run_id,
            target,
            progress=lambda done, total: seen.append((done, total)),
            traffic=traffic,
        )
        assert await fetch() == target
        assert target.read_bytes() == content
        assert [entry.name for entry in target.parent.iterdir()] == [NAME]
        assert seen[0] == (0, len(content))
        assert seen[-1] == (len(content), len(content))
        assert seen == sorted(seen)
        received = traffic.total("down", "chunk")
        assert len(content) < received < 1.001 * len(content)
        assert holder.traffic.total("up", "chunk") == received
        await fetch()
        assert traffic.total("down", "chunk") == received

    swarm.run(scenario())


def test_a_killed_holder_costs_only_what_was_on_the_way(swarm: Swarm, tmp_path: Path) -> None:
    content = content_of(24 * MIB)
    manifest = make_run(tmp_path, content)

    async def scenario() -> None:
        first, second = await swarm.holder(), await swarm.holder()
        for holder in (first, second):
            holder.server.add_run(manifest, tmp_path)
        kept: list[int] = []

        def progress(done: int, _: int) -> None:
            if done >= 8 * MIB and not kept:
                kept.append(done)
                os.kill(first.p2p._child.pid, signal.SIGKILL)

        target = tmp_path / "mine" / NAME
        await fetch_artifact(
            swarm.me,
            [first.id, second.id],
            manifest.artifacts[0],
            manifest.run_id,
            target,
            progress=progress,
            deadline_idle_s=5,
        )
        assert target.read_bytes() == content
        assert kept
        assert second.traffic.total("up", "chunk") < 1.01 * (len(content) - kept[0])
        await first.p2p._child.wait()

    swarm.run(scenario())


def test_an_interrupted_fetch_is_resumed_by_the_next_process(swarm: Swarm, tmp_path: Path) -> None:
    content = content_of(12 * MIB)
    manifest = make_run(tmp_path, content)
    target = tmp_path / "mine" / NAME

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path)
        started = asyncio.Event()

        def progress(done: int, _: int) -> None:
            if done >= 4 * MIB:
                started.set()

        arguments = (swarm.me, [holder.id], manifest.artifacts[0], manifest.run_id, target)
        task = asyncio.create_task(fetch_artifact(*arguments, progress=progress))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not target.exists()
        seen: list[int] = []
        await fetch_artifact(*arguments, progress=lambda done, _: seen.append(done))
        assert seen[0] >= 4 * MIB
        assert target.read_bytes() == content

    swarm.run(scenario())


def test_a_full_disk_is_named_and_what_came_is_kept(swarm: Swarm, tmp_path: Path) -> None:
    content = content_of(6 * MIB)
    manifest = make_run(tmp_path, content)
    target = tmp_path / "mine" / NAME

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path)
        fetch = functools.partial(
            fetch_artifact, swarm.me, [holder.id], manifest.artifacts[0], manifest.run_id, target
        )
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (4 * MIB, hard)
        )  # the kernel then refuses, as a full disk does
        try:
            with pytest.raises(
                TransferError, match=f"cannot write {target}: File too large; free some space"
            ):
                await fetch()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        seen: list[int] = []
        await fetch(progress=lambda done, _: seen.append(done))
        assert seen[0] >= MIB
        assert target.read_bytes() == content

    swarm.run(scenario())


def test_a_holder_that_has_not_got_it_yet_is_asked_again(swarm: Swarm, tmp_path: Path) -> None:
    content = content_of(2 * MIB)
    manifest = make_run(tmp_path / "origin", content)
    artifact, folder = manifest.artifacts[0], tmp_path / "relay"

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, folder)
        arguments = (swarm.me, [holder.id], artifact, manifest.run_id, tmp_path / "mine")
        with pytest.raises(TransferError, match=rf"{NAME} of run .* for [1-9] s.*\n.*missing.*is not here"):
            await fetch_artifact(*arguments, deadline_idle_s=0.5)
        task = asyncio.create_task(fetch_artifact(*arguments, deadline_idle_s=5))
        await asyncio.sleep(0.3)
        folder.mkdir()
        (tmp_path / "origin" / NAME).rename(folder / NAME)
        await task
        assert (tmp_path / "mine").read_bytes() == content

    swarm.run(scenario())


def test_holders_can_be_looked_up_while_waiting(swarm: Swarm, tmp_path: Path) -> None:
    manifest = make_run(tmp_path, content_of(MIB))

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path)
        asked = 0

        async def holders() -> Sequence[str]:
            nonlocal asked
            asked += 1
            return [holder.id] if asked > 2 else []

        arguments = (manifest.artifacts[0], manifest.run_id, tmp_path / "mine")
        await fetch_artifact(swarm.me, holders, *arguments, deadline_idle_s=5)
        with pytest.raises(TransferError, match="nobody offers it"):
            await fetch_artifact(swarm.me, [], *arguments[:2], tmp_path / "other")

    swarm.run(scenario())


def test_a_snapshot_is_wholly_one_holders_copy(swarm: Swarm, tmp_path: Path) -> None:
    manifest = make_run(tmp_path / "artifacts", b"x")
    common, name = content_of(24 * MIB), snapshot_name(20, 1)
    copies = [common + content_of(2 * MIB, seed) + common[:77] for seed in (1, 2)]

    async def scenario() -> None:
        holders = [await swarm.holder(), await swarm.holder()]
        for number, holder in enumerate(holders):
            holder.server.add_run(manifest, tmp_path / "artifacts")
            path = tmp_path / f"copy-{number}"
            path.write_bytes(copies[number])
            holder.server.register(name, path)
        target, reached = tmp_path / "mine", list[int]()

        def progress(done: int, _: int) -> None:
            if done >= 8 * MIB and not reached:
                reached.append(done)
                os.kill(holders[0].p2p._child.pid, signal.SIGKILL)

        ids = [holder.id for holder in holders]
        arguments = (swarm.me, ids, manifest.run_id, 20, 1, target)
        donor = await fetch_snapshot(*arguments, progress=progress, deadline_idle_s=5)
        assert donor == ids[1]
        assert target.read_bytes() == copies[1]
        assert holders[1].traffic.total("up", "chunk") < 19 * MIB  # what both copies share came only once
        await holders[0].p2p._child.wait()
        with pytest.raises(TransferError, match="limit 1000"):
            await fetch_snapshot(swarm.me, ids[1:], manifest.run_id, 20, 1, tmp_path / "b", limit_bytes=1000)
        holders[1].server.unregister(name)
        with pytest.raises(TransferError, match=r"unknown_name.*snapshot/20/stage-1"):
            await fetch_snapshot(swarm.me, ids[1:], manifest.run_id, 20, 1, tmp_path / "b")

    swarm.run(scenario())


@pytest.mark.parametrize("is_waiting", [True, False])
def test_what_a_peer_waits_for_leaves_its_holder_before_all_other_bulk(
    swarm: Swarm, tmp_path: Path, is_waiting: bool
) -> None:
    manifest, content = make_run(tmp_path / "artifacts", b"x"), content_of(MIB)
    path = tmp_path / "served"
    path.write_bytes(content)
    name, sha256 = "prior/0", hashlib.sha256(content).hexdigest()

    async def scenario() -> None:
        holder = await swarm.holder(max_upload_mbps=30.0)
        holder.server.add_run(manifest, tmp_path / "artifacts")
        holder.server.register(
            name, path, is_urgent=lambda peer: is_waiting and peer == swarm.me.peer_id.to_base58()
        )
        await fetch_by_hash(
            swarm.me,
            [holder.id],
            manifest.run_id,
            name,
            sha256,
            tmp_path / "mine",
            is_urgent=lambda: is_waiting,
        )
        used, unused = Priority.CONTROL, Priority.STATE
        if not is_waiting:
            used, unused = unused, used
        waited_s = holder.traffic.upload.waited_s
        assert waited_s[used] > 0 and waited_s[unused] == 0

    swarm.run(scenario())


def test_holder_whose_hash_list_lies_keeps_nobody_from_an_honest_one(swarm: Swarm, tmp_path: Path) -> None:
    manifest = make_run(tmp_path / "artifacts", b"x")
    content, junk = content_of(3 * MIB), content_of(3 * MIB)[::-1]
    name, sha256 = "prior/boundary-0/x", hashlib.sha256(content).hexdigest()

    async def scenario() -> None:
        holders = [await swarm.holder() for _ in range(3)]
        for number, (holder, data) in enumerate(zip(holders, (junk, junk, content), strict=True)):
            path = tmp_path / f"copy-{number}"
            path.write_bytes(data)
            holder.server.add_run(manifest, tmp_path / "artifacts")
            holder.server.register(name, path, manifest.run_id)
            if data is junk:
                described = await holder.server._hashes(
                    name, holder.server._runs[manifest.run_id].files[name]
                )
                lie = described.model_copy(update={"sha256": sha256})
                holder.server._hashes = functools.partial(answer, lie)  # type: ignore[method-assign]
        target = tmp_path / "mine"
        ids = [holder.id for holder in holders]
        await fetch_by_hash(swarm.me, ids, manifest.run_id, name, sha256, target)
        assert target.read_bytes() == content
        target.unlink()
        with pytest.raises(TransferError, match="its hash list lies"):
            await fetch_by_hash(swarm.me, ids[:2], manifest.run_id, name, sha256, target)
        assert not target.exists()

    async def answer(lie: Artifact, *_: object) -> Artifact:
        return lie

    swarm.run(scenario())


def test_a_snapshot_dropped_while_it_is_fetched_still_arrives(swarm: Swarm, tmp_path: Path) -> None:
    manifest = make_run(tmp_path / "artifacts", b"x")
    content = content_of(2 * MIB)
    path = tmp_path / "copy"
    path.write_bytes(content)

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path / "artifacts")
        holder.server.register(snapshot_name(5, 0), path)
        arguments = (swarm.me, [holder.id], manifest.run_id, 5, 0)
        await asyncio.gather(*(fetch_snapshot(*arguments, tmp_path / f"mine-{i}") for i in range(3)))
        assert all((tmp_path / f"mine-{i}").read_bytes() == content for i in range(3))
        path.unlink()
        with pytest.raises(TransferError, match="is not here"):
            await fetch_snapshot(*arguments, tmp_path / "late", deadline_idle_s=0.5)

    swarm.run(scenario())
