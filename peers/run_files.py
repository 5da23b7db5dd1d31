"""A run's files on this peer: the manifest, and those artifacts it needs, fetched from any holder.

Layout of the folder (the owner's, made by `init`, or a volunteer's copy):

    manifest.yaml
    artifacts/<artifact name>
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch
from hivemind.p2p import P2P
from safetensors.torch import load_file
from torch import Tensor

from peers.traffic import Traffic
from peers.transfer import fetch_artifact
from swarm.activation.tokens import TOKENS_FILE, TokenTable
from swarm.data.dataset import PackedDataset
from swarm.manifest import RunManifest

Progress = Callable[[int, int], None]
Holders = Callable[[], Awaitable[Sequence[str]]]


class RunFiles:
    """Files of one run in one folder. `holders` says who may have what is missing."""

    def __init__(
        self, manifest: RunManifest, directory: Path, p2p: P2P | None, holders: Holders, traffic: Traffic
    ) -> None:
        self.manifest = manifest
        self.directory = directory
        self.artifacts = directory / "artifacts"
        self._p2p, self._holders, self._traffic = p2p, holders, traffic
        self._dataset: PackedDataset | None = None
        self._tokens: tuple[str, TokenTable] | None = None
        self._lock = asyncio.Lock()

    async def ensure(self, name: str, progress: Progress | None = None) -> Path:
        """An artifact on this disk, fetched if missing. Raises TransferError, KeyError."""
        artifact = self.manifest.artifact(name)
        target = self.artifacts / name
        if self._p2p is None:
            return target
        return await fetch_artifact(
            self._p2p,
            self._holders,
            artifact,
            self.manifest.run_id,
            target,
            progress=progress,
            traffic=self._traffic,
        )

    async def ensure_samples(self, samples: Sequence[int]) -> None:
        """Fetch the chunks of the packed data that hold these samples, if they are missing."""
        dataset = self.dataset()
        if not dataset.missing(samples):
            return
        async with self._lock:
            for chunk in dataset.missing(samples):
                await self.ensure(chunk.name)

    def dataset(self) -> PackedDataset:
        """The run's training rows, as far as they are on this disk."""
        if self._dataset is None:
            self._dataset = PackedDataset(self.artifacts, self.manifest.data, "train")
        return self._dataset

    def prior(self, boundary: int) -> dict[str, Tensor]:
        """The fitted arrays of a boundary; its file must be here (`ensure`)."""
        prior: dict[str, Tensor] = load_file(self.artifacts / prior_name(boundary))
        return prior

    def tokens(self, device: torch.device | str) -> TokenTable:
        """The run's token table on a device, one for all codecs; its file must be here. Raises ValueError."""
        if self._tokens is None or self._tokens[0] != str(device):
            self._tokens = (str(device), TokenTable(load_file(self.artifacts / TOKENS_FILE), device))
        return self._tokens[1]


def stage_name(stage: int) -> str:
    """Artifact name of a stage's initial tensors."""
    return f"stage-{stage}.safetensors"


def prior_name(boundary: int) -> str:
    """Artifact name of a boundary's initial prior."""
    return f"prior-{boundary}.safetensors"
