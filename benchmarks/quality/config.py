"""Everything that decides a row's result, as one value with one spelling.

Codec and corrector are plain dicts, checked by their own models when the row runs: a new option of theirs needs no
change here, and does not make finished rows unfinished.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from swarm.activation.config import BasisConfig, CodecConfig, DenseConfig, MaskConfig
from swarm.anchor.config import CorrectorConfig, NoCorrectorConfig, PriorCorrectorConfig
from swarm.model.source import DEMO_MODEL
from swarm.optim import OptimizerConfig


class AnchorPlan(BaseModel):
    """When priors are made, of what, and how late they are in force.

    lateness: steps after the snapshot; None is one interval, the next scheduled snapshot. source: anchors' passes
    through the snapshot, or what the stages' own peers saw of the newest `window` tokens until then (boundaries only).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    microbatches: int = Field(default=8, ge=1)
    snapshot_every: int = Field(default=20, ge=1)
    early_snapshots: tuple[int, ...] = (5, 10)
    lateness: int | None = Field(default=None, ge=0)
    source: Literal["anchors", "leaders"] = "anchors"
    window: int = Field(default=8192, ge=1)

    def versions(self, steps: int) -> list[int]:
        """Versions that are snapshots, in a run of `steps` steps; version v are the weights after step v - 1."""
        return [
            version
            for version in range(1, steps + 1)
            if version % self.snapshot_every == 0 or version in self.early_snapshots
        ]

    def passes(self, steps: int) -> dict[int, int]:
        """Version of each snapshot that is worth a pass, with the step from which its priors are in force."""
        versions = self.versions(steps)
        following = dict(pairwise(versions))
        found = {
            version: following.get(version, steps) if self.lateness is None else version + self.lateness
            for version in versions
        }
        return {version: used for version, used in found.items() if used < steps}


class RowConfig(BaseModel):
    """One row of the table under one seed.

    domain: a name of `domains.DOMAINS`, or a folder of text files. max_tokens: of the packed data, both parts.
    dense_every: every so many steps all boundaries are uncoded; 0 for none. anchors: None leaves the initial priors
    in force for the whole run. revision: of the codec's implementation, where equal options code otherwise now.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    domain: str
    seed: int
    steps: int = Field(ge=1)
    codec: dict[str, Any]
    corrector: dict[str, Any] = Field(default={"name": "none"})
    anchors: AnchorPlan | None = None
    dense_every: int = Field(default=0, ge=0)
    revision: int = 0
    learning_rate: float = 3e-4
    warmup_steps: int = 8
    compute: Literal["fp32", "bf16"] = "fp32"
    model: str = DEMO_MODEL
    cuts: tuple[int, ...] = (8, 15, 22)
    max_tokens: int = 500_000
    sequence_length: int = 128
    samples_per_step: int = 8
    rows_per_microbatch: int = 8
    eval_rows: int = 32
    eval_every: int = 10

    def canonical(self) -> str:
        """The one spelling of this configuration; fields at their default are left out."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)

    @property
    def key(self) -> str:
        """Hash of the configuration, 16 hex digits."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.samples_per_step * self.sequence_length

    def codec_config(self) -> DenseConfig | MaskConfig | BasisConfig:
        """The codec's own configuration. Raises ValidationError."""
        return TypeAdapter[DenseConfig | MaskConfig | BasisConfig](CodecConfig).validate_python(self.codec)

    def corrector_config(self) -> NoCorrectorConfig | PriorCorrectorConfig:
        """The corrector's own configuration. Raises ValidationError."""
        adapter = TypeAdapter[NoCorrectorConfig | PriorCorrectorConfig](CorrectorConfig)
        return adapter.validate_python(self.corrector)

    def optimizer_config(self) -> OptimizerConfig:
        """AdamW as in docs/method.md: cosine to a tenth, clipped to 1."""
        return OptimizerConfig(
            name="adamw",
            learning_rate=self.learning_rate,
            beta1=0.9,
            beta2=0.98,
            eps=1e-10,
            weight_decay=0.0,
            warmup_steps=self.warmup_steps,
            schedule="cosine",
            final_ratio=0.1,
            clip_norm=1.0,
        )
