"""Holders that lie, stall, talk rubbish or are gone, and clients that ask for too much."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from transfer_swarm import MIB, NAME, Holder, Swarm, content_of, make_run

from peers import fetch_stream, fileserver
from peers.fileserver import HANDLER
from peers.frames import Frame, Kind
from peers.limits import PROTOCOL_VERSION, Limits
from peers.link import read_frame, write_frame
from peers.transfer import TransferError, fetch_artifact, fetch_manifest

pytestmark = pytest.mark.e2e
pytest_plugins = ["transfer_swarm"]


def test_another_protocol_version_is_named_with_both_figures(swarm: Swarm, tmp_path: Path) -> None:
    manifest = make_run(tmp_path, b"x")

    async def scenario() -> None:
        holder = await swarm.holder(protocol=99)
        holder.server.add_run(manifest, tmp_path)
        wanted = rf"speaks protocol version 99, this program speaks {PROTOCOL_VERSION}"
        with pytest.raises(TransferError, match=wanted):
            await fetch_manifest(swarm.me, holder.id, None, 5)
        with pytest.raises(TransferError, match=wanted):
            await fetch_artifact(
                swarm.me, [holder.id], manifest.artifacts[0], manifest.run_id, tmp_path / "copy"
            )

    swarm.run(scenario())


def test_nobody_at_home_is_said_within_the_deadline(swarm: Swarm, tmp_path: Path) -> None:
    async def scenario() -> None:
        stranger = "QmZtLhqSdqAhnJfS6RkZkhvqN3L3PLGwdTQxgqZbUoC4Xj"
        started = time.monotonic()
        with pytest.raises(TransferError, match=f"{stranger}: (dialling failed|no answer while dialling)"):
            await fetch_manifest(swarm.me, stranger, None, 7)
        with pytest.raises(TransferError, match="is no peer id"):
            await fetch_manifest(swarm.me, "0OIl", None, 5)
        assert time.monotonic() - started < 15  # seven seconds, and what a busy machine adds

    swarm.run(scenario())


def test_a_corrupt_copy_is_refused_and_its_holder_not_asked_again(swarm: Swarm, tmp_path: Path) -> None:
    content = content_of(6 * MIB)
    good, bad = tmp_path / "good", tmp_path / "bad"
    manifest = make_run(good, content)
    damaged = bytearray(content)
    damaged[3 * MIB + 1] ^= 1
    bad.mkdir()
    (bad / NAME).write_bytes(damaged)
    artifact, target = manifest.artifacts[0], tmp_path / "mine" / NAME

    async def scenario() -> None:
        liar, honest = await swarm.holder(), await swarm.holder()
        liar.server.add_run(manifest, bad)
        with pytest.raises(TransferError, match=r"chunk 3 does not match its hash: its copy is corrupt"):
            await fetch_artifact(swarm.me, [liar.id], artifact, manifest.run_id, target)
        assert not target.exists()
        honest.server.add_run(manifest, good)
        await fetch_artifact(swarm.me, [liar.id, honest.id], artifact, manifest.run_id, target)
        assert target.read_bytes() == content

    swarm.run(scenario())


def test_only_names_on_offer_are_served_and_requests_are_bounded(swarm: Swarm, tmp_path: Path) -> None:
    manifest = make_run(tmp_path / "run" / "artifacts", content_of(3 * MIB))
    (tmp_path / "run" / "owner.key").write_text("secret")

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path / "run" / "artifacts")

        async def ask(kind: Kind = Kind.FETCH, **header: Any) -> tuple[str, str]:
            _, reader, writer = await swarm.me.call_binary_stream_handler(holder.p2p.peer_id, HANDLER)
            base = {"protocol": PROTOCOL_VERSION, "run": manifest.run_id, "want": "chunks", "name": NAME}
            await write_frame(writer, Frame(kind, {**base, "first": 0, "count": 1, **header}))
            frame, _ = await read_frame(reader, MIB)
            writer.close()
            return frame.kind.value, str(frame.header.get("reason"))

        assert await ask() == ("chunk", "None")
        for name in ("../owner.key", "/etc/passwd", "", "x" * 3000, "artifacts/" + NAME, "manifest.yaml"):
            assert await ask(name=name) == ("refused", "unknown_name")
        assert await ask(first=3) == ("refused", "range")
        assert await ask(first=0, count=4) == ("refused", "range")
        malformed: list[dict[str, Any]] = [
            {"first": -1},
            {"count": 10**9},
            {"count": True},
            {"name": 3},
            {"want": "everything"},
            {"run": None},
            {"kind": Kind.COMMIT},
        ]
        for header in malformed:
            assert await ask(**header) == ("refused", "malformed")
        assert sum(holder.traffic.refused.values()) == len(malformed)
        assert await ask() == ("chunk", "None")

    swarm.run(scenario())


def test_a_full_holder_says_busy_and_the_fetch_waits_for_room(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of(3 * MIB)
    manifest = make_run(tmp_path, content)
    monkeypatch.setattr(fileserver, "STREAMS_PER_PEER", 2)

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path)
        silent = [await swarm.me.call_binary_stream_handler(holder.p2p.peer_id, HANDLER) for _ in range(2)]
        while len(holder.server._streams) < 2:  # noqa: ASYNC110  opening is not waited for by the other side
            await asyncio.sleep(0.01)
        with pytest.raises(TransferError, match=r"refused \(busy\): too many streams"):
            await fetch_manifest(swarm.me, holder.id, None, 5)
        arguments = (manifest.artifacts[0], manifest.run_id, tmp_path / "mine")
        fetch = asyncio.create_task(fetch_artifact(swarm.me, [holder.id], *arguments, deadline_idle_s=1))
        await asyncio.sleep(2)  # longer than the idle deadline: busy is an answer, and answers are waited for
        assert not fetch.done()
        for _, _, writer in silent:
            writer.close()
        await fetch
        assert (tmp_path / "mine").read_bytes() == content

    swarm.run(scenario())


def test_a_client_that_asks_nothing_is_dropped(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fileserver, "LIMITS", Limits(fetch_idle_s=0.3))

    async def scenario() -> None:
        holder = await swarm.holder()
        _, reader, writer = await swarm.me.call_binary_stream_handler(holder.p2p.peer_id, HANDLER)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    swarm.run(scenario())


async def impostor(swarm: Swarm, answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> Holder:
    """A holder that answers every request in its own way."""
    holder = await swarm.holder()

    async def accept(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_frame(reader, 0)
                await answer(writer)
        except (asyncio.IncompleteReadError, OSError, RuntimeError):
            writer.close()

    await holder.p2p.remove_binary_stream_handler(HANDLER)
    await holder.p2p.add_binary_stream_handler(HANDLER, accept)
    return holder


def test_a_holder_that_falls_silent_or_talks_rubbish_does_not_hold_us_up(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_stream, "CHUNK_DEADLINE_FACTOR", 3)
    content = content_of(2 * MIB)
    manifest = make_run(tmp_path, content)

    async def silence(_: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0)

    async def rubbish(writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 64)
        await writer.drain()

    async def trickle(writer: asyncio.StreamWriter) -> None:
        frame = Frame(Kind.CHUNK, {"index": 0}, [memoryview(content)[:MIB]])
        writer.write(frame.encode_head())
        while not writer.is_closing():  # a byte now and then: each one in time, the chunk never
            writer.write(b"x")
            await asyncio.sleep(0.1)

    async def scenario() -> None:
        good = await swarm.holder()
        good.server.add_run(manifest, tmp_path)
        for number, behaviour in enumerate((silence, rubbish, trickle)):
            bad = await impostor(swarm, behaviour)
            arguments = (manifest.artifacts[0], manifest.run_id, tmp_path / f"mine-{number}")
            async with asyncio.timeout(40):
                await fetch_artifact(swarm.me, [bad.id, good.id], *arguments, deadline_idle_s=2.0)
            assert (tmp_path / f"mine-{number}").read_bytes() == content

    swarm.run(scenario())


def test_closing_the_server_ends_its_transfers_quietly(
    swarm: Swarm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = make_run(tmp_path, content_of(64 * MIB))

    async def scenario() -> None:
        holder = await swarm.holder()
        holder.server.add_run(manifest, tmp_path)
        under_way = asyncio.Event()
        arguments = (manifest.artifacts[0], manifest.run_id, tmp_path / "mine")
        task = asyncio.create_task(
            fetch_artifact(
                swarm.me,
                [holder.id],
                *arguments,
                progress=lambda done, _: under_way.set() if done else None,
                deadline_idle_s=2.0,
            )
        )
        await under_way.wait()
        await asyncio.wait_for(holder.server.close(), 2)
        with pytest.raises(TransferError, match=r"MiB are kept in .*partial for the next try"):
            await task

    with caplog.at_level(logging.ERROR):
        swarm.run(scenario())
    assert caplog.text == ""
