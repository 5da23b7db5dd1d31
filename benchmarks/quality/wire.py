"""Bytes on the wire, counted exactly as the frames carry them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.quality.config import RowConfig
from swarm.activation.base import BoundaryCodec, CodecKey
from swarm.activation.config import DenseConfig
from swarm.activation.registry import build_codec, payload_bytes
from swarm.batch import Batch

ID_BYTES = 2


@dataclass(slots=True)
class WireBytes:
    """Bytes of a run over all boundaries, one replica per stage.

    forward, gradient: payloads. ids: token ids, document starts and loss positions that go with FORWARD. priors: what
    fast peers receive of the anchors' priors; initial_priors: of those made before the first step.
    """

    forward: int = 0
    gradient: int = 0
    ids: int = 0
    priors: int = 0
    initial_priors: int = 0

    @property
    def total(self) -> int:
        """Everything that crosses boundaries or comes from anchors while the run trains."""
        return self.forward + self.gradient + self.ids + self.priors


def dense_codecs(config: RowConfig, hidden_size: int) -> list[BoundaryCodec]:
    """bf16 on the wire at every boundary."""
    from benchmarks.quality.anchors import DTYPES

    return [
        build_codec(
            DenseConfig(),
            hidden_size=hidden_size,
            boundary=boundary,
            run_seed=config.seed,
            prior=None,
            device="cpu",
            dtype=DTYPES[config.compute],
        )
        for boundary in range(len(config.cuts))
    ]


def step_bytes(
    wire: WireBytes, codecs: Sequence[BoundaryCodec | None], batches: Sequence[Batch], step: int
) -> None:
    """Add a step's bytes, from the layouts of its payloads."""
    for batch in batches:
        key = CodecKey.of(batch, step)
        rows, tokens = key.shape
        for codec in codecs:
            if codec is None:
                continue
            wire.forward += payload_bytes(codec.layout(key))
            wire.gradient += payload_bytes(codec.gradient_layout(key))
            wire.ids += batch.tokens * ID_BYTES + 2 * rows * -(-tokens // 8)
