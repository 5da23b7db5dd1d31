"""What training gained: held-out loss before and after, and of plain training on the same samples."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.commands.assembly import assemble_initial
from peers.commands.evaluate import greedy, heldout_loss, run_dataset
from peers.commands.inspect import part_batches, step_samples
from swarm.activation.calibrate import cast_parameters_
from swarm.activation.config import DenseConfig
from swarm.activation.registry import build_codec
from swarm.data.dataset import PackedDataset
from swarm.model.formats import compute_dtype
from swarm.model.source import load_pretrained
from swarm.reference import ReferenceTrainer

if TYPE_CHECKING:
    from peers.commands.init import Progress
    from swarm.manifest import RunManifest


def share_of_gain(before: float, after: float, dense: float) -> float | None:
    """Share of plain training's loss reduction that the swarm reached; None where plain training gained none."""
    gain = before - dense
    return None if gain <= 0 else (before - after) / gain


def dense_trainer(manifest: RunManifest, model: Any) -> ReferenceTrainer:
    """Plain training of the uncut model as the manifest says, everything crossing the boundaries as bf16."""
    dtype = compute_dtype(manifest.compute, "cpu")
    wire = DenseConfig(values="bf16" if manifest.compute == "bf16" else "fp32")
    codecs = [
        build_codec(
            wire,
            hidden_size=manifest.model.hidden_size,
            boundary=boundary,
            run_seed=manifest.seed,
            prior=None,
            device="cpu",
            dtype=dtype,
        )
        for boundary in range(len(manifest.model.cuts))
    ]
    return ReferenceTrainer(
        model,
        manifest.model.cuts,
        codecs,
        manifest.optimizer,
        manifest.total_steps,
        freeze=frozenset(manifest.model.freeze),
        compute_dtype=dtype,
        reference_loss_tokens=manifest.reference_loss_tokens,
    )


def evaluate_run(
    manifest: RunManifest,
    run_dir: Path,
    checkpoint: Path,
    *,
    max_samples: int,
    compare_dense: bool,
    prompts: Sequence[str],
    seconds: dict[str, float],
    progress: Progress,
) -> dict[str, Any]:
    """Losses (nats per token, in the run's compute dtype) and texts, for the summary.

    seconds: filled with what each part took. The trained model is evaluated first, then the initial one,
    which plain training then goes on from: one uncut model in memory at a time.
    """
    dtype = compute_dtype(manifest.compute, "cpu")
    heldout = run_dataset(run_dir)
    result: dict[str, Any] = {"eval_samples": min(max_samples, len(heldout))}
    started = time.monotonic()
    model, tokenizer = load_pretrained(checkpoint)
    cast_parameters_(model, dtype)
    result["loss_after"] = heldout_loss(
        model, heldout, max_samples, lambda done, total: progress("evaluate after", done, total)
    )
    if prompts and tokenizer is not None:
        result["texts"] = {prompt: greedy(model, tokenizer, prompt, 40) for prompt in prompts}
    del model

    with tempfile.TemporaryDirectory(prefix="swarm-peer-initial-", dir=run_dir) as folder:
        assemble_initial(manifest, run_dir / "artifacts", Path(folder))
        model, _ = load_pretrained(folder)
    trainer = dense_trainer(manifest, model) if compare_dense else None
    cast_parameters_(model, dtype)
    result["loss_before"] = heldout_loss(
        model, heldout, max_samples, lambda done, total: progress("evaluate before", done, total)
    )
    seconds["evaluate"] = round(time.monotonic() - started, 2)
    if trainer is None:
        return result

    started = time.monotonic()
    rows = PackedDataset(run_dir / "artifacts", manifest.data)
    for step in range(manifest.total_steps):
        progress("train dense", step, manifest.total_steps)
        trainer.step(part_batches(rows, step_samples(manifest, step), manifest.rows_per_microbatch), step)
    result["dense_loss_after"] = heldout_loss(
        trainer.model, heldout, max_samples, lambda done, total: progress("evaluate dense", done, total)
    )
    result["share_of_dense_gain"] = share_of_gain(
        result["loss_before"], result["loss_after"], result["dense_loss_after"]
    )
    seconds["dense"] = round(time.monotonic() - started, 2)
    return result
