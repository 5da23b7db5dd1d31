"""An anchor's memory on disk, and the priors that are made of it beside everything else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from torch import Tensor

from peers.anchor_memory import AnchorMemory
from peers.prior_parts import PriorPart
from swarm.anchor.config import SpectralConfig
from swarm.anchor.prior import decode_spectral_prior
from swarm.manifest import RunManifest
from tests.kit.members import stage_run

CONFIG = SpectralConfig(rank=4, ema_beta=0.5)
TARGETS = {0: {"model.layers.0.a.weight": (12, 8)}, 1: {"model.layers.1.a.weight": (8, 16)}}


class Anchor:
    """A memory, and what it said and offered."""

    def __init__(self, manifest: RunManifest, folder: Path) -> None:
        self.offered: list[tuple[int, PriorPart, bytes]] = []
        self.notes: list[str] = []
        self.refuses: Exception | None = None
        self.memory = AnchorMemory(
            config=CONFIG,
            manifest=manifest,
            targets=TARGETS,
            directory=folder,
            offer=self.offer,
            note=self.notes.append,
        )

    async def offer(self, version: int, part: PriorPart, data: bytes) -> None:
        if self.refuses is not None and part.ordinal == 0:
            raise self.refuses
        self.offered.append((version, part, data))


def gradients(seed: int) -> dict[int, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        stage: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for stage, shapes in TARGETS.items()
    }


def test_priors_are_those_of_the_average_and_a_restarted_anchor_goes_on(tmp_path: Path) -> None:
    manifest = stage_run(tmp_path)

    async def scenario() -> None:
        first = Anchor(manifest, tmp_path / "anchor")
        await first.memory.start()
        assert first.notes == [] and first.memory.version is None and first.memory.correctors() is None
        await first.memory.ingest(5, gradients(1))
        await first.memory.settle()
        assert [(v, part) for v, part, _ in first.offered] == [(5, PriorPart("corrector", s)) for s in (0, 1)]
        assert first.memory.version == 5 and len(first.memory.correctors() or []) == 2
        first.memory.close()

        again = Anchor(manifest, tmp_path / "anchor")
        await again.memory.start()
        assert again.memory.version == 5
        assert [note.startswith("going on with the memory") for note in again.notes] == [True, True]
        await again.memory.ingest(10, gradients(2))
        await again.memory.settle()
        for version, part, data in again.offered:
            stage = part.ordinal
            prior = decode_spectral_prior(data, TARGETS[stage], CONFIG.rank)
            assert (version, prior.step, prior.stage) == (10, 10, stage)
            for name, factors in prior.factors.items():
                average = 0.25 * gradients(1)[stage][name] + 0.5 * gradients(2)[stage][name]
                exact = torch.linalg.svdvals(average)[:4]
                torch.testing.assert_close(factors.values, exact, rtol=1e-3, atol=1e-4)
        await again.memory.ingest(10, gradients(3))
        assert again.memory.refused == 2, "a version counts once"
        await again.memory.settle()

    asyncio.run(scenario())


def test_a_damaged_memory_starts_cold_and_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    manifest = stage_run(tmp_path)

    async def scenario() -> None:
        folder = tmp_path / "anchor"
        one = Anchor(manifest, folder)
        await one.memory.ingest(5, gradients(1))
        await one.memory.settle()
        files = sorted(folder.glob("memory-*"))
        assert len(files) == 2
        files[0].write_bytes(files[0].read_bytes()[:-3])
        again = Anchor(manifest, folder)
        await again.memory.start()
        assert sum("starts cold" in note for note in again.notes) == 1

        nowhere = Anchor(manifest, tmp_path / "manifest.yaml" / "no-folder")
        (tmp_path / "manifest.yaml").touch()
        for version in (5, 10):
            await nowhere.memory.ingest(version, gradients(version))
            await nowhere.memory.settle()
        assert sum("cannot be kept" in note for note in nowhere.notes) == 1
        assert len(nowhere.offered) == 4

    asyncio.run(scenario())


def test_stage_whose_prior_cannot_be_offered_is_said_once_and_keeps_no_other_back(tmp_path: Path) -> None:
    manifest = stage_run(tmp_path)

    async def scenario() -> None:
        one = Anchor(manifest, tmp_path / "anchor")
        for version, error in (
            (5, ValueError("nbytes: too large")),
            (10, RuntimeError("no room")),
            (15, None),
        ):
            one.refuses = error
            await one.memory.ingest(version, gradients(version))
            await one.memory.settle()
        assert [(version, part.ordinal) for version, part, _ in one.offered] == [
            (5, 1),
            (10, 1),
            (15, 0),
            (15, 1),
        ]
        assert [note for note in one.notes if note.startswith("warning")] == [
            "warning: no corrector's prior of stage 0: nbytes: too large (more of this is only logged)"
        ]

    asyncio.run(scenario())


def test_what_a_later_pass_brought_meanwhile_is_offered_and_kept_as_that_passs(tmp_path: Path) -> None:
    manifest = stage_run(tmp_path)

    async def scenario() -> None:
        one = Anchor(manifest, tmp_path / "anchor")
        await one.memory.ingest(5, gradients(1))
        await one.memory.ingest(10, gradients(2))  # before the first one's work has come to its first stage
        await one.memory.settle()
        assert (
            one.memory.prior_bytes == sum(len(data) for _, _, data in one.offered) and one.memory.factor_s > 0
        )
        assert [(version, part.ordinal) for version, part, _ in one.offered] == [(10, 0), (10, 1)]
        again = Anchor(manifest, tmp_path / "anchor")
        await again.memory.start()
        assert again.memory.version == 10
        await again.memory.ingest(10, gradients(2))
        assert again.memory.refused == 2, "it is in the average already"
        await again.memory.settle()

    asyncio.run(scenario())
