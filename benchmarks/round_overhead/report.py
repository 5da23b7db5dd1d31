"""What was measured, as figures, a table and a verdict. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STAGES = ("grouped", "exchanged", "committed", "applied")
"""How far a round comes, in order: the group is named, the average is there, the commit, the weights."""

Marks = Mapping[str, float]
"""When a replica was how far, in seconds of a clock that all share; "ready" is the beginning."""


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1e9) * len(ordered) // 10**9) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 90th percentile, in ms, of so many measurements."""

    median: float
    p90: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of figures in seconds. Raises ValueError without any."""
        return cls(1e3 * statistics.median(seconds), 1e3 * quantile(seconds, 0.9), len(seconds))

    def __str__(self) -> str:
        """Milliseconds."""
        return f"{self.median:.0f} ({self.p90:.0f})"


def took(replicas: Sequence[Marks]) -> float:
    """Seconds from the moment the last replica was ready to that at which the last one was done."""
    return max(marks["applied"] for marks in replicas) - max(marks["ready"] for marks in replicas)


def stages_of(replicas: Sequence[Marks]) -> dict[str, float]:
    """Seconds of one round from one stage to the next, each when the last replica came there."""
    passed = max(marks["ready"] for marks in replicas)
    found: dict[str, float] = {}
    for stage in STAGES:
        reached = max(marks[stage] for marks in replicas)
        found[stage] = reached - passed
        passed = reached
    return found


@dataclass
class Case:
    """One payload over one kind of links. All in seconds. rounds: ready to applied. moves: the same frames, nothing
    computed. exchanges: the average alone, without a leader. stages: of the rounds. hivemind: its step(); ahead: its
    all-reduce alone, the group found before. partial: hivemind's groups that were smaller; their times do not count.
    """

    rtt_ms: float
    mbps: float
    payload_bytes: int
    replicas: int
    rounds: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)
    exchanges: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    hivemind: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    partial: int = 0

    @property
    def limit_ms(self) -> float:
        """Most that a round may take beyond moving its payload: three round trips and 100 ms, at least 150 ms."""
        return max(150.0, 3 * self.rtt_ms + 100)

    def overhead(self) -> Spread:
        """What rounds take beyond the median of moving the payload alone."""
        moving = statistics.median(self.moves)
        return Spread.of([seconds - moving for seconds in self.rounds])

    def ratio(self) -> float | None:
        """Median of hivemind's step over that of a round, or None."""
        return statistics.median(self.hivemind) / statistics.median(self.rounds) if self.hivemind else None

    def ahead_ratio(self) -> float | None:
        """Median of hivemind's all-reduce alone over that of an exchange, or None."""
        return statistics.median(self.ahead) / statistics.median(self.exchanges) if self.ahead else None

    @property
    def is_within(self) -> bool:
        """Whether the median overhead is below the limit."""
        return self.overhead().median < self.limit_ms

    def figures(self) -> dict[str, Any]:
        """For JSON: medians and 90th percentiles in ms, ratios."""

        def spread(seconds: list[float]) -> dict[str, float] | None:
            if not seconds:
                return None
            found = Spread.of(seconds)
            return {"median_ms": round(found.median, 1), "p90_ms": round(found.p90, 1), "count": found.count}

        overhead, ratio, ahead = self.overhead(), self.ratio(), self.ahead_ratio()
        return {
            "rtt_ms": self.rtt_ms,
            "mbps": self.mbps,
            "payload_bytes": self.payload_bytes,
            "replicas": self.replicas,
            "round": spread(self.rounds),
            "move": spread(self.moves),
            "exchange": spread(self.exchanges),
            "overhead": {"median_ms": round(overhead.median, 1), "p90_ms": round(overhead.p90, 1)},
            "limit_ms": self.limit_ms,
            "is_within": self.is_within,
            "stages_ms": self.stage_medians(),
            "hivemind": spread(self.hivemind),
            "hivemind_ahead": spread(self.ahead),
            "hivemind_partial": self.partial,
            "hivemind_over_round": None if ratio is None else round(ratio, 2),
            "hivemind_ahead_over_exchange": None if ahead is None else round(ahead, 2),
        }

    def stage_medians(self) -> dict[str, float]:
        """Median ms of each stage of the rounds."""
        return {
            stage: round(1e3 * statistics.median(found[stage] for found in self.stages), 1)
            for stage in STAGES
            if self.stages
        }


def table(cases: Sequence[Case]) -> str:
    """All cases, as Markdown: ms as median (90th percentile)."""
    lines = [
        "| RTT | line | payload | round | moving it | overhead | limit | exchange | hivemind's step | ratio | "
        "its all-reduce | ratio |",
        "| --- " * 12 + "|",
    ]
    for case in cases:
        line = f"{case.mbps:g} Mbit/s" if case.mbps else "unshaped"
        cells = [
            f"{case.rtt_ms:g} ms",
            line if case.rtt_ms else "loopback",
            f"{case.payload_bytes / 1e6:.3g} MB",
            Spread.of(case.rounds),
            Spread.of(case.moves),
            case.overhead(),
            f"{case.limit_ms:.0f}",
            Spread.of(case.exchanges),
            Spread.of(case.hivemind) if case.hivemind else "-",
            _times(case.ratio()),
            Spread.of(case.ahead) if case.ahead else "-",
            _times(case.ahead_ratio()),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}x"
