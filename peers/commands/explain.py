"""What a run moves: stage by stage, bytes of a step, and the share of a line that they take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers.compute import stage_trainable
from peers.limits import LIMITS
from swarm.gradient.averaging import build_averaging
from swarm.gradient.compressor import round_bytes
from swarm.gradient.outer_config import GossipConfig, interval
from swarm.manifest import RunManifest

if TYPE_CHECKING:
    from rich.console import Console

REPLICAS = 2
"""Of every stage, in what is told: the fewest that average."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What one of `REPLICAS` replicas of a stage sends in a step, in the mean over steps. forward, backward: of the
    boundaries after and before it. averages: of rounds; most: of the largest round. trained: weights.
    """

    stage: int
    trained: int
    forward: float
    backward: float
    averages: float
    most: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.averages


def averaging_bytes(manifest: RunManifest, stage: int) -> tuple[int, int, int]:
    """Trained weights of a stage, and what a round sends from each of two replicas: in the mean over steps, and at
    most. Of steps well after the first ones, which of some compressors are larger.
    """
    averaging, trainable = manifest.averaging, stage_trainable(manifest, stage)
    period = interval(averaging.outer)
    # A schedule that has no end within these steps: after its last step everything is averaged.
    compressor = build_averaging(averaging, trainable, 2000 * period, manifest.seed)
    rounds = [
        round_bytes(compressor.phases(step), REPLICAS, LIMITS.averaging_chunk_elements)
        for step in range(1000 * period, 1001 * period)
    ]
    return trainable.numel, sum(rounds) // period, max(rounds)


def stage_bytes(manifest: RunManifest, artifacts: Path) -> list[StageBytes]:
    """What each stage sends. artifacts: of the run, for what its codec has calibrated."""
    from peers.commands.inspect import boundary_bytes

    cost, last = boundary_bytes(manifest, artifacts), manifest.model.stages - 1
    tokens = manifest.samples_per_step * manifest.data.sequence_length / REPLICAS
    found = []
    for stage in range(manifest.model.stages):
        trained, mean, most = averaging_bytes(manifest, stage)
        forward = tokens * cost.forward if cost is not None and stage < last else 0.0
        backward = tokens * cost.backward if cost is not None and stage > 0 else 0.0
        found.append(StageBytes(stage, trained, forward, backward, mean, most))
    return found


def explain(
    console: Console, manifest: RunManifest, artifacts: Path, link_mbps: float, us_per_token: float | None
) -> None:
    """Print the table, and what its columns mean. us_per_token: a stage's compute, if it is known."""
    from rich.table import Table

    table = Table(
        "stage", "trained", "hidden states", "gradients", "averages", "a step", f"at {link_mbps:g} Mbit/s"
    )
    if us_per_token is not None:
        table.add_column("share of the line")
    for column in table.columns[1:]:
        column.justify = "right"
    tokens = manifest.samples_per_step * manifest.data.sequence_length / REPLICAS
    rows = stage_bytes(manifest, artifacts)
    for row in rows:
        seconds = 8 * row.total / (link_mbps * 1e6)
        cells = [
            str(row.stage),
            f"{row.trained / 1e6:,.1f} M",
            *(_size(each) for each in (row.forward, row.backward, row.averages, row.total)),
            f"{seconds:.2f} s",
        ]
        if us_per_token is not None:
            cells.append(f"{seconds / (tokens * us_per_token * 1e-6):.0%}")
        table.add_row(*cells)
    console.print(table)
    averaging = manifest.averaging
    averages = f"averages are {_named(manifest)}"
    if interval(averaging.outer) > 1:
        most = max(row.most for row in rows)
        averages += f", in the mean over {interval(averaging.outer)} steps (at most {_size(most)} at once)"
    if isinstance(averaging.outer, GossipConfig):
        averages += ", from each of a pair"
    notes = [
        f"What one of {REPLICAS} replicas of a stage sends in a step of {manifest.samples_per_step} rows of "
        f"{manifest.data.sequence_length} tokens, half of which are its own; {averages}.",
    ]
    if us_per_token is not None:
        notes.append(
            f"The share is of the seconds that a replica computes in a step, {tokens * us_per_token * 1e-6:.2f}; "
            "over 100% the line decides how long a step takes."
        )
    else:
        notes.append("With --stage-us-per-token the table says which share of the line that is.")
    for note in notes:
        console.print(note, markup=False)


def _named(manifest: RunManifest) -> str:
    compressor, outer = manifest.averaging.compressor, manifest.averaging.outer
    codec = getattr(compressor, "codec", None)
    name = compressor.name if codec is None else codec.name
    return name if outer.name == "every_step" else f"{name}, {outer.name}"


def _size(nbytes: float) -> str:
    if not nbytes:
        return "-"
    return f"{nbytes / 1e6:,.2f} MB" if nbytes >= 1e4 else f"{nbytes / 1e3:,.2f} kB"
