"""What a swarm has trained, read from the snapshots its peers left."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from peers.checkpoint import read_checkpoint
from peers.commands.assembly import assemble_checkpoint
from peers.commands.evaluate import heldout_loss, quiet_transformers, run_dataset
from swarm.manifest import RunManifest


def snapshot(folder: Path, stage: int, version: int) -> Path | None:
    """A peer's snapshot of a version, wherever below its folder; None if it has none."""
    pattern = f"*-stage-{stage}-version-{version:08d}.safetensors"
    return next(iter(sorted(folder.rglob(pattern))), None)


def unequal_tensors(files: Sequence[Path], *, shared_only: bool = False) -> list[str]:
    """Names of tensors in which snapshots of one version of one stage differ by a bit.

    shared_only: leave the optimizer's moments out, which are each replica's own where there is an outer loop.
    """
    first, *others = (read_checkpoint(path).tensors for path in files)
    return sorted(
        {
            name
            for other in others
            for name in first.keys() | other.keys()
            if not (shared_only and name.startswith("optimizer."))
            and (name not in first or name not in other or not torch.equal(first[name], other[name]))
        }
    )


def final_loss(run_dir: Path, files: Sequence[Path], max_samples: int = 64) -> float:
    """Held-out loss in fp32 of the model that one snapshot of every stage makes."""
    from swarm.model.source import load_pretrained

    quiet_transformers()
    manifest = RunManifest.load(run_dir / "manifest.yaml")
    with tempfile.TemporaryDirectory(prefix="sp-eval-") as folder:
        out = Path(folder) / "checkpoint"
        candidates = [[path] for path in files]
        assemble_checkpoint(manifest, run_dir / "artifacts", candidates, out, torch.float32)
        model, _ = load_pretrained(str(out))
        return heldout_loss(model.float(), run_dataset(run_dir), max_samples)
