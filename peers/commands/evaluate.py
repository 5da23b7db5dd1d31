"""`swarm-peer eval`: held-out loss and a greedy sample of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from peers.commands.options import CommandOptions, check_exists
from peers.config import UserError

if TYPE_CHECKING:
    from swarm.data.dataset import PackedDataset

DESCRIPTION = """\
Held-out loss per token and perplexity of an ordinary transformers checkpoint, and what it writes after a
prompt. The rows are a run's held-out rows (--run-dir), or any other data, packed the same way (--data); with
neither, only --prompt is answered. Nothing is masked or coded in evaluation.

Examples:
  swarm-peer eval my-run/checkpoint --run-dir my-run
  swarm-peer eval ./model --data ./texts --sequence-length 512 --max-samples 200 --json loss.json
  swarm-peer eval my-run/checkpoint --run-dir my-run --prompt "import os" "def main("
  swarm-peer eval ./my-model --prompt "import os"                    (no loss)
"""

TOKENS_PER_FORWARD = 2048
"""Tokens evaluated at once: bounds the logits (400 MB in fp32 for 49,152 words)."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CommandOptions):
    """Evaluate a checkpoint."""

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Folder of the checkpoint (or any model that init takes, such as smollm2-135m)."""

    run_dir: Path | None = None
    """A run's folder: its held-out rows are used."""

    data: str | None = None
    """Other data: a text file or folder, JSON Lines, a Hugging Face data set, or stdlib; all of it is used."""

    data_kind: Literal["auto", "stdlib", "text", "jsonl", "hub"] = "auto"
    """How --data is read."""

    text_field: str = "text"
    """Field or column of the text."""

    split: str = "train"
    """Split of a Hugging Face data set."""

    subset: str | None = None
    """Subset of a Hugging Face data set."""

    sequence_length: int = 1024
    """Tokens per row of --data."""

    max_samples: int = 64
    """Rows evaluated at most, spread evenly over all."""

    prompt: tuple[str, ...] = ()
    """Texts to continue greedily."""

    new_tokens: int = 40
    """Tokens written after each prompt."""

    json: Path | None = None
    """File for the result."""

    threads: int | None = None
    """Torch threads; without it, one per core."""


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` indices spread evenly over range(count)."""
    chosen = min(count, limit)
    return [index * count // chosen for index in range(chosen)]


def heldout_loss(
    model: Any,
    dataset: PackedDataset,
    max_samples: int,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Mean token loss in nats of an uncut transformers causal LM over rows of `dataset`.

    The model is used in its own dtype, on its own device. progress(rows done, rows). Raises UserError when
    there is no row, or none with a loss.
    """
    import torch
    from torch.nn import functional

    from swarm.batch import IGNORED_LABEL
    from swarm.model.packed import packed_kwargs

    samples = spread(len(dataset), max_samples)
    if not samples:
        raise UserError(
            "there are no held-out rows to evaluate on: make the run with --heldout-percent above 0"
        )
    rows = max(1, TOKENS_PER_FORWARD // dataset.index.sequence_length)
    parameter = next(model.parameters())
    total, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(samples), rows):
            batch = dataset.batch(samples[start : start + rows]).to(parameter.device)
            logits = model(**packed_kwargs(model.config, batch, parameter.dtype, parameter.device)).logits
            for row, labels in zip(logits, batch.labels(), strict=True):  # fp32 logits of one row at a time
                total += float(
                    functional.cross_entropy(row.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
                )
            tokens += batch.loss_tokens
            if progress is not None:
                progress(min(start + rows, len(samples)), len(samples))
    model.train(was_training)
    if tokens == 0:
        raise UserError("the rows have no token to predict: every document is one token long")
    return total / tokens


def greedy(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """What the model writes after `prompt`, without the prompt."""
    import torch

    encoded = tokenizer(prompt, return_tensors="pt").to(next(model.parameters()).device)
    with torch.inference_mode():
        ids = model.generate(
            **encoded,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


def run_dataset(run_dir: Path) -> PackedDataset:
    """A run's held-out rows. Raises UserError, ManifestError."""
    from swarm.data.dataset import PackedDataset
    from swarm.manifest import RunManifest

    if not (run_dir / "manifest.yaml").is_file():
        raise UserError(f"--run-dir {run_dir} is no run: it has no manifest.yaml")
    dataset = PackedDataset(
        run_dir / "artifacts", RunManifest.load(run_dir / "manifest.yaml").data, "heldout"
    )
    if missing := dataset.missing(range(len(dataset))):
        raise UserError(
            f"{run_dir} lacks the held-out chunk {missing[0].name}: evaluate in the owner's folder, or use --data"
        )
    return dataset


def check_options(options: EvaluateOptions) -> None:
    """Raise UserError for what can be seen before anything slow is done."""
    if options.run_dir is not None and options.data is not None:
        raise UserError("give either --run-dir RUN (its held-out rows) or --data SOURCE, not both")
    if options.run_dir is None and options.data is None and not options.prompt:
        raise UserError(
            "give either --run-dir RUN (its held-out rows) or --data SOURCE, or --prompt TEXT without a loss"
        )
    if options.max_samples < 1:
        raise UserError(f"--max-samples {options.max_samples}: at least 1 is needed")
    check_exists("CHECKPOINT", options.checkpoint)
    if options.data is not None and options.data_kind != "hub":
        check_exists("--data", options.data)


def run(options: EvaluateOptions) -> int:
    """Evaluate and print."""
    check_options(options)
    import json
    import math
    import tempfile
    import time

    import torch
    from rich.console import Console

    from peers.commands.progress import phases
    from swarm.data.config import DataConfig
    from swarm.data.dataset import PackedDataset
    from swarm.data.pack import pack
    from swarm.model.source import load_pretrained

    console = Console(highlight=False, soft_wrap=True)
    if options.threads is not None:
        torch.set_num_threads(max(1, options.threads))
    quiet_transformers()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swarm-peer-eval-") as folder, phases(console) as progress:
        progress("load model", 0, 1)
        model, tokenizer = load_pretrained(options.checkpoint)
        dataset: PackedDataset | None = None
        if options.run_dir is not None:
            dataset = run_dataset(options.run_dir.expanduser())
        elif options.data is not None:
            if tokenizer is None:
                raise UserError(f"{options.checkpoint} has no tokenizer, which --data needs; use --run-dir")
            recipe = DataConfig(
                source=options.data,
                kind=options.data_kind,
                text_field=options.text_field,
                split=options.split,
                subset=options.subset,
                heldout_percent=0,
                max_tokens=4 * options.max_samples * options.sequence_length,
                sequence_length=options.sequence_length,
            )
            index = pack(
                recipe, tokenizer, Path(folder), lambda state: progress("pack data", state.tokens, None)
            )
            dataset = PackedDataset(Path(folder), index, "train")
        result: dict[str, Any] = {"checkpoint": options.checkpoint}
        if dataset is not None:
            loss = heldout_loss(
                model, dataset, options.max_samples, lambda done, total: progress("evaluate", done, total)
            )
            result |= {
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "samples": min(options.max_samples, len(dataset)),
                "sequence_length": dataset.index.sequence_length,
            }
        result["seconds"] = time.monotonic() - started
    if dataset is not None:
        console.print(
            f"loss {result['loss']:.4f} nats per token, perplexity {result['perplexity']:.2f}, "
            f"over {result['samples']} rows of {result['sequence_length']} tokens",
            markup=False,
        )
    if options.prompt:
        if tokenizer is None:
            raise UserError(f"{options.checkpoint} has no tokenizer, which --prompt needs")
        result["texts"] = {
            prompt: greedy(model, tokenizer, prompt, options.new_tokens) for prompt in options.prompt
        }
        for prompt, text in result["texts"].items():
            console.print(f"{prompt!r} -> {text!r}", markup=False)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def quiet_transformers() -> None:
    """No progress bars or advice of transformers among our lines."""
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
