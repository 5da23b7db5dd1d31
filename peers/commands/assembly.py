"""From stages' checkpoints to one ordinary transformers checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from peers.checkpoint import read_checkpoint
from peers.commands.inspect import model_config, stage_rows
from peers.config import UserError
from swarm.model.export import assemble, stage_file_name
from swarm.model.stage import stage_tensor_names

if TYPE_CHECKING:
    from swarm.manifest import RunManifest

WEIGHT_PREFIX = "weight."
"""Names of weights in a stage's checkpoint; everything else there is optimizer state."""

Found = dict[int, dict[int, list[Path]]]
"""Checkpoint files by version and stage; replicas of a stage are equals."""


def check_out_dir(out_dir: Path) -> None:
    """Raise UserError if a checkpoint cannot be put there."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists already: give another folder, or move it away first")


def find_checkpoints(directories: Iterable[Path], manifest: RunManifest) -> Found:
    """The run's checkpoints below these folders, by their file names."""
    from peers.checkpoint import CheckpointStore

    found: Found = {}
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"{directory} is no folder of checkpoints")
        for folder in sorted({path.parent for path in directory.rglob("*-version-*.safetensors")}):
            store = CheckpointStore(folder)
            for stage in range(manifest.model.stages):
                for version in store.versions(stage, manifest.run_id):
                    path = store.path(version, stage, manifest.run_id)
                    found.setdefault(version, {}).setdefault(stage, []).append(path)
    return found


def choose_version(available: Mapping[int, Iterable[int]], stages: int, step: str) -> int:
    """The version to export: the newest that every stage has, or the one asked for.

    available: stages by version. step: "latest" or a number. Raises UserError saying what is missing.
    """
    complete = [version for version, have in available.items() if set(have) >= set(range(stages))]
    if step == "latest":
        if complete:
            return max(complete)
        listed = "; ".join(f"step {v}: stages {sorted(set(have))}" for v, have in sorted(available.items()))
        raise UserError(
            f"no step has a snapshot of all {stages} stages yet ({listed or 'there is none at all'}): "
            f"try again after the run's next snapshot"
        )
    if not step.isdigit():
        raise UserError(f"--step {step!r}: give a number of steps, or 'latest'")
    if int(step) in complete:
        return int(step)
    raise UserError(
        f"--step {step}: not all {stages} stages have a snapshot of it; complete ones: "
        f"{', '.join(map(str, sorted(complete))) or 'none'}"
    )


def needs_stage_file(manifest: RunManifest) -> bool:
    """Whether checkpoints lack tensors (frozen ones), which the initial stage files have."""
    return bool(manifest.model.freeze)


def initial_dtype(manifest: RunManifest) -> torch.dtype:
    """Number format of the run's initial weights, told by the size of their file."""
    row = stage_rows(manifest)[0]
    return torch.bfloat16 if row.file_bytes < 3 * row.parameters else torch.float32


def stage_weights(
    path: Path, stage_file: Path, names: Iterable[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of a stage: trained ones from its checkpoint, frozen ones from its initial file.

    dtype: of floating-point tensors. Raises ValueError for a damaged checkpoint, UserError for a tensor that
    neither has.
    """
    trained = {
        name.removeprefix(WEIGHT_PREFIX): tensor
        for name, tensor in read_checkpoint(path).tensors.items()
        if name.startswith(WEIGHT_PREFIX)
    }
    names = list(names)
    if missing := [name for name in names if name not in trained]:
        if not stage_file.is_file():
            raise UserError(f"{path} lacks {missing[0]}, which is frozen, and {stage_file} is not there")
        with safe_open(str(stage_file), framework="pt", device="cpu") as initial:
            trained |= {name: initial.get_tensor(name) for name in missing}
    return {
        name: trained[name].to(dtype) if trained[name].is_floating_point() else trained[name]
        for name in names
    }


def assemble_checkpoint(
    manifest: RunManifest,
    artifacts: Path,
    files: Sequence[Sequence[Path]],
    out_dir: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a transformers checkpoint with tokenizer to `out_dir`, which appears when it is complete.

    files: for every stage the checkpoint files to try, best first. dtype: of the weights; None keeps the initial
    one. Raises UserError when none of a stage's is
    whole.
    """
    check_out_dir(out_dir)
    config = model_config(manifest)
    dtype = initial_dtype(manifest) if dtype is None else dtype
    partial = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)

    def stages() -> Iterator[Mapping[str, Tensor]]:
        for stage, candidates in enumerate(files):
            names = stage_tensor_names(config, manifest.model.cuts, stage)
            yield _first_whole(candidates, artifacts / stage_file_name(stage), names, dtype, stage)

    tokenizer = artifacts / "tokenizer"
    try:
        assemble(config, stages(), partial, tokenizer if tokenizer.is_dir() else None)
        if out_dir.exists():
            out_dir.rmdir()
        partial.rename(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def assemble_initial(manifest: RunManifest, artifacts: Path, out_dir: Path) -> None:
    """The same from the run's initial stage files."""
    from safetensors.torch import load_file

    stages: list[dict[str, Any]] = [
        load_file(artifacts / stage_file_name(stage)) for stage in range(manifest.model.stages)
    ]
    assemble(model_config(manifest), stages, out_dir, None)


def _first_whole(
    candidates: Sequence[Path], stage_file: Path, names: Iterable[str], dtype: torch.dtype, stage: int
) -> dict[str, Tensor]:
    problems = []
    for path in candidates:
        try:
            return stage_weights(path, stage_file, names, dtype)
        except (ValueError, OSError) as error:
            problems.append(f"{path}: {error}")
    raise UserError(f"stage {stage} has no whole checkpoint: {'; '.join(problems) or 'none was found'}")
