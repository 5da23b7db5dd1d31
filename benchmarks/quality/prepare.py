"""The model and the data of a row, with the vocabulary cut to the tokens that the domain has.

Only embedding and head are touched, and both are frozen: the rows that no text uses would take a third of a step's
time for nothing. Losses are over the smaller softmax.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.quality.config import RowConfig
from benchmarks.quality.domains import domain_source
from swarm.batch import Batch, default_loss_positions
from swarm.data.config import DataConfig
from swarm.data.dataset import PackedDataset
from swarm.data.order import samples_from_far_end, samples_of_step
from swarm.data.pack import pack
from swarm.model.source import load_pretrained

HELDOUT_PERCENT = 10


class Rows:
    """Packed rows in memory. tokens: int64 [n, T], of the small vocabulary; starts: bool [n, T]."""

    def __init__(self, tokens: Tensor, starts: Tensor) -> None:
        self.tokens, self.starts = tokens, starts

    def __len__(self) -> int:
        """Rows."""
        return int(self.tokens.shape[0])

    def batches(self, samples: Sequence[int], rows: int) -> list[Batch]:
        """The samples as microbatches of `rows` rows."""
        parts = [torch.tensor(samples[i : i + rows]) for i in range(0, len(samples), rows)]
        return [
            Batch(
                token_ids=self.tokens[part],
                document_starts=self.starts[part],
                loss_positions=default_loss_positions(self.starts[part]),
                sample_ids=part,
            )
            for part in parts
        ]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A pristine uncut model (fp32, small vocabulary) and the two parts of its data."""

    model: Any
    train: Rows
    heldout: Rows
    vocabulary: int

    def fresh_model(self) -> Any:
        """A copy to train."""
        return copy.deepcopy(self.model)

    def step_batches(self, config: RowConfig, step: int) -> list[Batch]:
        """Microbatches of a step, equal for all rows of a seed."""
        samples = samples_of_step(config.seed, len(self.train), config.samples_per_step, step)
        return self.train.batches(samples, config.rows_per_microbatch)

    def far_batches(self, config: RowConfig, microbatches: int, skip: int) -> list[Batch]:
        """Microbatches that training reaches last, after `skip` others of them."""
        rows = config.rows_per_microbatch
        samples = samples_from_far_end(config.seed, len(self.train), microbatches * rows, skip=skip * rows)
        return self.train.batches(samples, rows)

    def heldout_batches(self, config: RowConfig) -> list[Batch]:
        """The held-out rows that every evaluation takes, spread over the whole part."""
        count = min(config.eval_rows, len(self.heldout))
        samples = samples_of_step(0, len(self.heldout), count, 0)
        return self.heldout.batches(samples, 8)

    def token_counts(self) -> Tensor:
        """How often each token occurs in the training data: int64 [vocabulary]."""
        return torch.bincount(self.train.tokens.flatten(), minlength=self.vocabulary)


def prepare(config: RowConfig, cache: Path) -> Prepared:
    """Model and data of a row, from the cache if they are there. Raises DomainError, DataError, ModelSourceError."""
    wanted = {
        "format": 1,
        "model": config.model,
        "domain": config.domain,
        "max_tokens": config.max_tokens,
        "sequence_length": config.sequence_length,
        "heldout_percent": HELDOUT_PERCENT,
    }
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache / "prepared" / f"{Path(config.domain).name}-{name}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:  # two processes may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "rows.safetensors").is_file():
            _make(config, cache, folder)
    arrays = load_file(folder / "rows.safetensors")
    model, _ = load_pretrained(folder / "model")
    return Prepared(
        model=model,
        train=Rows(arrays["train"].long(), arrays["train_starts"].bool()),
        heldout=Rows(arrays["heldout"].long(), arrays["heldout_starts"].bool()),
        vocabulary=int(model.config.vocab_size),
    )


def _make(config: RowConfig, cache: Path, folder: Path) -> None:
    """Pack the domain, cut the vocabulary, and write both."""
    model, tokenizer = load_pretrained(config.model, torch.float32)
    if tokenizer is None:
        raise ValueError(f"model {config.model!r} has no tokenizer")
    shutil.rmtree(folder, ignore_errors=True)
    index = pack(
        DataConfig(
            source=domain_source(config.domain, cache),
            heldout_percent=HELDOUT_PERCENT,
            max_tokens=config.max_tokens,
            sequence_length=config.sequence_length,
        ),
        tokenizer,
        folder / "packed",
    )
    arrays: dict[str, Tensor] = {}
    for part in ("train", "heldout"):
        dataset = PackedDataset(folder / "packed", index, part)
        batch = dataset.batch(range(len(dataset)))
        arrays[part], arrays[f"{part}_starts"] = batch.token_ids, batch.document_starts.to(torch.uint8)
    kept = torch.unique(torch.cat([arrays[part].flatten() for part in ("train", "heldout")]))
    for part in ("train", "heldout"):
        arrays[part] = torch.searchsorted(kept, arrays[part]).to(torch.int32).contiguous()
    restrict_vocabulary_(model, kept)
    # The weights are plain, whatever they were read from: a model that calls itself quantized is not written.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder / "model")
    save_file(arrays, folder / "rows.safetensors")
    shutil.rmtree(folder / "packed")


@torch.no_grad()
def restrict_vocabulary_(model: Any, kept: Tensor) -> None:
    """Keep only the rows `kept` (int64 [n], increasing) of embedding and head; token i is then what kept[i] was.

    Embedding and head are untied. Raises ValueError for a head with a bias.
    """
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise ValueError("a head with a bias cannot be cut to a vocabulary")
    tables = [module.weight.detach()[kept].clone() for module in (model.get_input_embeddings(), head)]
    width = int(tables[0].shape[1])
    embedding = nn.Embedding(len(kept), width, dtype=tables[0].dtype)
    embedding.weight.copy_(tables[0])
    small_head = nn.Linear(int(tables[1].shape[1]), len(kept), bias=False, dtype=tables[1].dtype)
    small_head.weight.copy_(tables[1])
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(small_head)
    config = model.config
    config.vocab_size, config.tie_word_embeddings = len(kept), False
    for each in (config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if each is not None and hasattr(each, name):
                setattr(each, name, None)
