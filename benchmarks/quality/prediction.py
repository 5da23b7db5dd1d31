"""How long a run would take over slow lines, from what a step computes and sends.

A middle stage computes 1 / P of a step and receives, per step, the FORWARD of one boundary, the GRADIENT of the other,
and its share of the priors; it sends as much. Lines carry both directions at once, and computing and sending overlap,
so with the pipeline full a step takes

    max(compute seconds of the step / P,  8 * bytes per stage and direction / line)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LINE_BITS_PER_S = 200e6
CALIBRATED_S_PER_TOKEN = 40e-6
"""Compute of a stage per token on a usual consumer GPU, as `--compute calibrated:40` of the swarm's benchmarks."""


def step_seconds(
    stage_compute_s: float, bytes_per_stage: float, line_bits_per_s: float = LINE_BITS_PER_S
) -> float:
    """Predicted seconds of a step. stage_compute_s: of one stage; bytes_per_stage: in one direction, per step."""
    return max(stage_compute_s, 8.0 * bytes_per_stage / line_bits_per_s)


def bytes_per_stage(record: Mapping[str, Any], boundaries: int, steps: int) -> float:
    """Bytes of a finished row that a middle stage receives per step, priors and ids counted."""
    wire = record["bytes"]
    total = sum(int(wire[name]) for name in ("forward", "gradient", "ids", "priors"))
    return total / boundaries / steps


def measured_stage_s(record: Mapping[str, Any], stages: int, steps: int) -> float:
    """Compute seconds of one stage per step, from the CPU seconds of a finished row."""
    return float(record["seconds"]["steps_cpu"]) / steps / stages
