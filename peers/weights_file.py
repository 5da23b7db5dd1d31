"""The weights of a snapshot alone, in bf16: what an anchor needs of it, a sixth of its bytes.

A file as checkpoints are (`checkpoint_file`), with the trained weights only, each rounded to the nearest bf16. It is
made from a verified checkpoint when somebody first asks for it, so a swarm without anchors has none. Replicas that
hold equal weights make equal files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peers.checkpoint import CheckpointInfo, read_checkpoint, read_info
from peers.checkpoint_file import BLANK, FORMAT, write_file
from peers.torch_compute import WEIGHT

BYTES_PER_WEIGHT = 2
HEAD_BYTES = 16 * 1024 * 1024
"""Most that names and shapes of a stage's tensors take."""


def weights_name(version: int, stage: int) -> str:
    """Name under which a peer serves the weights of its snapshot of a stage at a version."""
    return f"weights/{version}/stage-{stage}"


def write_weights(checkpoint: Path, target: Path) -> None:
    """Make the file from a checkpoint, whole or not at all.

    Tensors are rounded one at a time. Raises ValueError if the checkpoint is damaged, OSError.
    """
    source = read_info(checkpoint)
    info = CheckpointInfo(
        format=FORMAT,
        run_id=source.run_id,
        stage=source.stage,
        version=source.version,
        meta=source.meta,
        sha256=BLANK.decode(),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with (
            safe_open(str(checkpoint), framework="pt", device="cpu") as opened,
            temporary.open("w+b") as file,
        ):
            write_file(file, info, _Rounded(opened))
        temporary.replace(target)
    except SafetensorError as error:
        raise ValueError(f"no safetensors file: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_weights(path: Path, run_id: str, stage: int, version: int) -> dict[str, Tensor]:
    """The weights in such a file, by the uncut model's names, in bf16.

    Raises ValueError if it is damaged, of another run, stage or version, or holds anything else; OSError.
    """
    found = read_checkpoint(path)
    info = found.info
    if (info.run_id, info.stage, info.version) != (run_id, stage, version):
        raise ValueError(f"it holds run {info.run_id} stage {info.stage} version {info.version}")
    for name, tensor in found.tensors.items():
        if not name.startswith(WEIGHT) or tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name!r:.100} ({tensor.dtype}) is no weight in bf16")
    return {name.removeprefix(WEIGHT): tensor for name, tensor in found.tensors.items()}


class _Rounded(Mapping[str, Tensor]):
    """The weights of an open checkpoint, rounded as they are looked at: a stage is never held twice."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self._names = [name for name in opened.keys() if name.startswith(WEIGHT)]  # noqa: SIM118 (no mapping)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._opened.get_tensor(name)
        return tensor.to(torch.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
