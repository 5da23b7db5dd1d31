"""Held-out loss against steps, bytes and predicted seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

from benchmarks.quality.prediction import CALIBRATED_S_PER_TOKEN, bytes_per_stage, step_seconds

if TYPE_CHECKING:
    from benchmarks.quality.report import Line

MOST_LINES = 12
"""More than these in one plot cannot be told apart."""


def _steps(_line: Line) -> list[float]:
    return [float(step) for step, _ in _line.records[0]["curve"]]


def _megabytes(line: Line) -> list[float]:
    return [nbytes / 1e6 for _, nbytes in line.records[0]["bytes_curve"]]


def _seconds(line: Line) -> list[float]:
    config = line.config
    sent = bytes_per_stage(line.records[0], len(config.cuts), config.steps)
    each = step_seconds(CALIBRATED_S_PER_TOKEN * config.tokens_per_step, sent)
    return [step * each for step in _steps(line)]


AXES: dict[str, tuple[str, str, Callable[[Line], list[float]]]] = {
    "steps": ("steps", "linear", _steps),
    "bytes": ("MB over all boundaries, priors counted", "log", _megabytes),
    "seconds": ("predicted seconds at 200 Mbit/s, 40 µs per token and stage", "log", _seconds),
}


def draw(group: str, lines: Sequence[Line], folder: Path) -> list[str]:
    """One plot per axis and domain of a group: the mean loss over seeds. Returns the names of the files."""
    names: list[str] = []
    for domain in dict.fromkeys(line.domain for line in lines):
        chosen = [line for line in lines if line.domain == domain][:MOST_LINES]
        if len(chosen) < 2:  # nothing to compare
            continue
        for axis, (label, scale, values) in AXES.items():
            figure, plot = pyplot.subplots(figsize=(7, 4.2))
            for line in chosen:
                losses = [
                    sum(point[1] for point in points) / len(points)
                    for points in zip(*(record["curve"] for record in line.records), strict=False)
                ]
                shown = list(zip(values(line), losses, strict=False))
                if scale == "log":
                    shown = [point for point in shown if point[0] > 0]
                seeds = f" ({len(line.seeds)} seeds)" if len(line.seeds) > 1 else ""
                plot.plot(*zip(*shown, strict=True), marker=".", label=f"{line.name}{seeds}")
            plot.set(
                xlabel=label, ylabel="held-out loss without codec", xscale=scale, title=Path(domain).name
            )
            plot.grid(alpha=0.3)
            plot.legend(fontsize=8)
            figure.tight_layout()
            folder.mkdir(parents=True, exist_ok=True)
            name = f"quality-{group}-{Path(domain).name}-{axis}.png"
            figure.savefig(folder / name, dpi=110, metadata={"Software": ""})
            pyplot.close(figure)
            names.append(name)
    return names
