"""The rows of the table, declared as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.quality.config import RowConfig
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import check_combination, compressor_config
from swarm.gradient.outer_config import OUTERS
from swarm.model.source import DEMO_MODEL
from swarm.optim import OptimizerConfig

LEARNING_RATES = {"adamw": 3e-4, "adams": 3e-4, "sgd": 0.3}


class AveragingRow(BaseModel):
    """Everything that decides a row's result.

    averaging: what AveragingConfig takes. replicas: each trains an equal share of a step's rows. revision: of the
    code, raised where equal options give something else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    averaging: dict[str, Any]
    optimizer: Literal["adamw", "adams", "sgd"] = "adamw"
    skip_zeros: bool = False
    learning_rate: float = 3e-4
    domain: str = "manpages-de"
    model: str = DEMO_MODEL
    seed: int = 0
    steps: int = Field(default=40, ge=1)
    replicas: int = Field(default=2, ge=2)
    rows_per_replica: int = 2
    sequence_length: int = 128
    max_tokens: int = 500_000
    eval_rows: int = 32
    eval_every: int = 20
    revision: int = 0

    @property
    def key(self) -> str:
        """Hash of the configuration, 16 hex digits."""
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def averaging_config(self) -> AveragingConfig:
        """Checked, also against the optimizer. Raises ValueError."""
        config = AveragingConfig.model_validate(self.averaging)
        check_combination(config.compressor, self.optimizer_config())
        return config

    def optimizer_config(self) -> OptimizerConfig:
        """That of the quality benchmark, with this row's optimizer and learning rate."""
        warmup = min(8, max(1, self.steps // 5))
        base = self.data_config().optimizer_config()
        return base.model_copy(
            update={"name": self.optimizer, "skip_zeros": self.skip_zeros, "warmup_steps": warmup}
        )

    def data_config(self) -> RowConfig:
        """The row of the quality benchmark with the same model, data and order; a microbatch is a replica's share."""
        return RowConfig(
            domain=self.domain,
            model=self.model,
            seed=self.seed,
            steps=self.steps,
            codec={"name": "dense"},
            learning_rate=self.learning_rate,
            max_tokens=self.max_tokens,
            sequence_length=self.sequence_length,
            samples_per_step=self.replicas * self.rows_per_replica,
            rows_per_microbatch=self.rows_per_replica,
            eval_rows=self.eval_rows,
            eval_every=self.eval_every,
            cuts=(),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its name, what it is, and its configuration but for the options of the command line."""

    name: str
    says: str
    averaging: Mapping[str, Any]
    optimizer: str = "adamw"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **options: Any) -> AveragingRow:
        """With the command line's options."""
        fields = {"learning_rate": LEARNING_RATES[self.optimizer], **self.changes, **options}
        return AveragingRow(averaging=dict(self.averaging), optimizer=self.optimizer, **fields)


def _row(
    name: str,
    says: str,
    compressor: str = "fp16",
    optimizer: str = "adamw",
    outer: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Row:
    loop = OUTERS.validate_python(outer if outer is not None else {"name": "every_step"})
    averaging = AveragingConfig(compressor=compressor_config(compressor, **fields), outer=loop)
    more = {"skip_zeros": True} if optimizer == "adams" else {}
    return Row(name, says, averaging.model_dump(mode="json"), optimizer, {**more, **(changes or {})})


ROWS = (
    _row("fp32", "gradients as they are", "fp32"),
    _row("bf16", "gradients as bf16", "bf16"),
    _row("int8", "8 bits, stochastic rounding, error feedback", "int8"),
    _row("fp8", "8 bits as E4M3, stochastic rounding, error feedback", "fp8"),
    _row("e3m0", "4 bits, error feedback", "e3m0"),
    _row("sign", "1 bit, error feedback", "sign"),
    _row("sign-no-feedback", "1 bit, what is lost is lost", "sign", error_feedback=False),
    _row("topk-0.5%", "the largest 0.5%, error feedback", "topk", ratio=0.005),
    _row("topk-0.25%", "the largest 0.25%, error feedback", "topk", ratio=0.0025),
    _row(
        "topk-0.5%-no-feedback", "the largest 0.5%, the rest lost", "topk", ratio=0.005, error_feedback=False
    ),
    _row("randomk-1%", "1% at random, error feedback", "randomk", ratio=0.01),
    _row("powersgd-4", "PowerSGD of rank 4, error feedback", "powersgd", rank=4),
    _row("powersgd-4-no-feedback", "PowerSGD of rank 4 without", "powersgd", rank=4, error_feedback=False),
    _row("powersgd-32", "PowerSGD of rank 32, error feedback", "powersgd", rank=32),
    _row("fp32-adams", "gradients as they are, AdamS", "fp32", "adams"),
    _row("scape-10%", "SCAPE, 10% of the coordinates, AdamS", "scape", "adams", ratio=0.1),
    _row("fp32-sgd", "gradients as they are, SGD", "fp32", "sgd"),
    _row("sign-sgd", "1 bit, error feedback, SGD", "sign", "sgd"),
    _row("sign-sgd-no-feedback", "1 bit, what is lost is lost, SGD", "sign", "sgd", error_feedback=False),
    _row("topk-0.5%-sgd", "the largest 0.5%, error feedback, SGD", "topk", "sgd", ratio=0.005),
    _row(
        "topk-0.5%-sgd-no-feedback",
        "the largest 0.5%, the rest lost, SGD",
        "topk",
        "sgd",
        ratio=0.005,
        error_feedback=False,
    ),
    _row("dgc-0.5%", "DGC, 0.5%, momentum 0.9, SGD", "dgc", "sgd", ratio=0.005),
    _row("local-sgd-10", "weights averaged every 10 steps", outer={"name": "local_sgd", "every": 10}),
    _row("diloco-10", "DiLoCo, every 10 steps", outer={"name": "diloco", "every": 10}),
    _row(
        "diloco-10-momentum-0.5",
        "DiLoCo, every 10 steps, outer momentum 0.5",
        outer={"name": "diloco", "every": 10, "momentum": 0.5},
    ),
    _row("diloco-20", "DiLoCo, every 20 steps", outer={"name": "diloco", "every": 20}),
    _row("diloco-10-int8", "DiLoCo, every 10 steps, 8 bits", "int8", outer={"name": "diloco", "every": 10}),
    _row("diloco-10-e3m0", "DiLoCo, every 10 steps, 4 bits", "e3m0", outer={"name": "diloco", "every": 10}),
    _row(
        "diloco-10-powersgd-4",
        "DiLoCo, every 10 steps, PowerSGD of rank 4",
        "powersgd",
        outer={"name": "diloco", "every": 10},
        rank=4,
    ),
    _row(
        "streaming-10",
        "Streaming DiLoCo without overlap, every 10 steps in 5 fragments",
        outer={"name": "streaming_diloco", "every": 10, "fragments": 5},
    ),
    _row(
        "streaming-10-e3m0-overlap-2",
        "Streaming DiLoCo, 4 bits, two steps of overlap",
        "e3m0",
        outer={"name": "streaming_diloco", "every": 10, "fragments": 5, "overlap": 2},
    ),
    _row(
        "sparta-10",
        "SPARTA, a tenth of the weights after every step, one step of overlap",
        outer={"name": "sparta", "every": 10, "fragments": 10, "overlap": 1},
    ),
    _row(
        "gasloc-5",
        "GASLoC of four replicas of one row, a pair every 5 steps, all every 20",
        outer={"name": "gasloc", "every": 5, "consensus": 4},
        changes={"replicas": 4, "rows_per_replica": 1},  # two would always meet each other
    ),
    _row(
        "fp16-overlap", "gradients as fp16, applied one step late", outer={"name": "every_step", "overlap": 1}
    ),
    _row(
        "powersgd-4-overlap",
        "PowerSGD of rank 4, applied one step late",
        "powersgd",
        rank=4,
        outer={"name": "every_step", "overlap": 1},
    ),
)
"""In the order of the table; the first is what the others are compared with, unless one of their optimizer is there."""


def dense_of(row: Row) -> Row:
    """The row that averages gradients as they are with the same optimizer."""
    name = "fp32" if row.optimizer == "adamw" else f"fp32-{row.optimizer}"
    return next(each for each in ROWS if each.name == name)
