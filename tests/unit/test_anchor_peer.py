"""A pass that an anchor cannot make costs that pass only, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers.anchor import AnchorPeer
from peers.checkpoint import CheckpointError
from peers.config import PeerConfig
from peers.transfer import TransferError
from swarm.batch import Batch

STAGES = 2


def anchor(tmp_path: Path, notes: list[str]) -> AnchorPeer:
    """An anchor that is given nothing to talk with."""
    manifest: Any = SimpleNamespace(model=SimpleNamespace(stages=STAGES), run_id="r", total_steps=100)
    manifest.keeps_snapshot = lambda step: (step + 1) % 20 == 0
    nothing: Any = SimpleNamespace()
    return AnchorPeer(
        config=PeerConfig(stage=None, run_dir=tmp_path),
        manifest=manifest,
        identity=SimpleNamespace(peer_id="me"),  # type: ignore[arg-type]
        p2p=nothing,
        board=nothing,
        announcer=nothing,
        files=SimpleNamespace(directory=tmp_path),  # type: ignore[arg-type]
        server=nothing,
        engine=nothing,
        lifecycle=nothing,
        traffic=nothing,
        status=SimpleNamespace(),  # type: ignore[arg-type]
        reporter=SimpleNamespace(note=notes.append),  # type: ignore[arg-type]
        addresses=(),
        grants=nothing,
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.linalg.LinAlgError("the algorithm did not converge"),
        torch.cuda.OutOfMemoryError("out of memory"),
        MemoryError(),
        TransferError("nobody gave it", {"donor": "it has left"}),
        CheckpointError("the disk is full"),
    ],
)
def test_pass_that_fails_is_counted_said_and_tried_again_later(tmp_path: Path, error: BaseException) -> None:
    notes: list[str] = []
    one = anchor(tmp_path, notes)

    async def load(version: int, first: int, last: int) -> list[Batch]:
        raise error

    one._stages.load = load  # type: ignore[method-assign]
    asyncio.run(one._pass_alone(20))
    assert one.figures.failed == 1
    assert any("no priors of version 20: " in note and not note.endswith(": ") for note in notes)
    assert one._tries.choose({20: True}, 0, 0.0) is None


def test_what_came_of_other_versions_of_a_stage_is_removed_and_that_of_this_one_gone_on_with(
    tmp_path: Path,
) -> None:
    one = anchor(tmp_path, [])
    folder = one._directory
    folder.mkdir(parents=True)
    kept = [folder / f"{name}.partial" for name in ("r-stage-1-version-40", "r-stage-10-version-20", "other")]
    old = [folder / f"r-stage-1-version-{name}.partial" for name in ("20", "20.0123abcd", "400")]
    for path in (*kept, *old):
        path.write_bytes(b"x")
    one._stages._drop_partials(1, folder / "r-stage-1-version-40")
    assert sorted(folder.iterdir()) == sorted(kept)
