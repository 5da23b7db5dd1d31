"""Facts about a run that follow from its folder: stages, cost of a boundary per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from peers.commands.build import prior_name
from swarm.activation.base import BoundaryCodec, CodecKey
from swarm.activation.registry import build_codec, needs_prior, needs_tokens
from swarm.activation.tokens import TOKENS_FILE, TokenTable
from swarm.data.dataset import PackedDataset
from swarm.data.order import samples_of_step
from swarm.manifest import RunManifest
from swarm.model.cut import stage_ranges
from swarm.model.export import stage_file_name
from swarm.model.formats import compute_dtype
from swarm.model.stage import stage_tensor_names

_MEASURED_SAMPLES = 256
"""Rows over which bytes per token are averaged at most."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of a run. last_layer is inclusive; compute_share is its share of the matrix products."""

    stage: int
    first_layer: int
    last_layer: int
    parameters: int
    compute_share: float
    file_bytes: int


@dataclass(frozen=True, slots=True)
class BoundaryBytes:
    """Payload bytes per token at one boundary, averaged over rows of the run and over the boundaries.

    coded: ordinary tokens. dense_positions: tokens sent uncoded. ids: token ids, document starts and loss
    positions, which only the forward direction carries. uncoded: what bf16 hidden states would take.
    """

    coded: float
    dense_positions: float
    ids: float
    uncoded: int

    @property
    def forward(self) -> float:
        """All bytes per token, forward."""
        return self.coded + self.dense_positions + self.ids

    @property
    def backward(self) -> float:
        """All bytes per token, backward."""
        return self.coded + self.dense_positions

    @property
    def ratio(self) -> float:
        """Uncoded bytes over sent bytes, both directions together."""
        return 2 * self.uncoded / (self.forward + self.backward)


def model_config(manifest: RunManifest) -> Any:
    """The transformers configuration of the run's model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**dict(manifest.model.config))


def stage_rows(manifest: RunManifest) -> list[StageRow]:
    """The run's stages."""
    config = model_config(manifest)
    layers = int(config.num_hidden_layers)
    sizes, products = [], []
    for stage in range(manifest.model.stages):
        shapes = stage_tensor_names(config, manifest.model.cuts, stage)
        sizes.append(sum(torch.Size(shape).numel() for shape in shapes.values()))
        # A look-up in the embedding multiplies nothing; vectors cost next to nothing.
        products.append(
            sum(
                torch.Size(shape).numel()
                for name, shape in shapes.items()
                if len(shape) >= 2 and not (stage == 0 and "embed" in name)
            )
        )
    return [
        StageRow(
            stage=stage,
            first_layer=layer_range.first_layer,
            last_layer=layer_range.last_layer_exclusive - 1,
            parameters=sizes[stage],
            compute_share=products[stage] / max(1, sum(products)),
            file_bytes=manifest.artifact(stage_file_name(stage)).nbytes,
        )
        for stage, layer_range in enumerate(stage_ranges(manifest.model.cuts, layers))
    ]


def run_codecs(manifest: RunManifest, artifacts: Path) -> list[BoundaryCodec]:
    """The codec of every boundary of the run, on the CPU."""
    tokens = TokenTable(load_file(artifacts / TOKENS_FILE)) if needs_tokens(manifest.codec) else None
    return [
        build_codec(
            manifest.codec,
            hidden_size=manifest.model.hidden_size,
            boundary=boundary,
            run_seed=manifest.seed,
            prior=load_file(artifacts / prior_name(boundary)) if needs_prior(manifest.codec) else None,
            device="cpu",
            dtype=compute_dtype(manifest.compute, "cpu"),
            tokens=tokens,
        )
        for boundary in range(len(manifest.model.cuts))
    ]


def step_samples(manifest: RunManifest, step: int) -> list[int]:
    """Sample ids of a step."""
    return samples_of_step(manifest.seed, manifest.data.train_samples, manifest.samples_per_step, step)


def boundary_bytes(manifest: RunManifest, artifacts: Path) -> BoundaryBytes | None:
    """Bytes per token, over the first rows that the run trains on. None for a run of one stage."""
    codecs = run_codecs(manifest, artifacts)
    if not codecs:
        return None
    samples: list[int] = []
    for step in range(manifest.total_steps):
        samples += step_samples(manifest, step)
        if len(samples) >= _MEASURED_SAMPLES:
            break
    batch = PackedDataset(artifacts, manifest.data).batch(samples[:_MEASURED_SAMPLES])
    counts = [codec.byte_count(CodecKey.of(batch, 0)) for codec in codecs]
    tokens = batch.tokens * len(codecs)
    id_bytes = 2 if manifest.data.token_dtype == "uint16" else 4
    bit_set_bytes = 2 * -(-manifest.data.sequence_length // 8) / manifest.data.sequence_length
    return BoundaryBytes(
        coded=sum(count.coded for count in counts) / tokens,
        dense_positions=sum(count.dense_positions for count in counts) / tokens,
        ids=id_bytes + bit_set_bytes,
        uncoded=2 * manifest.model.hidden_size,
    )


def part_batches(dataset: PackedDataset, samples: Sequence[int], rows: int) -> list[Any]:
    """The samples as batches of `rows` rows."""
    return [dataset.batch(samples[start : start + rows]) for start in range(0, len(samples), rows)]
