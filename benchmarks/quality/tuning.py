"""The learning rate of every family of rows: the notes' own, or the best of those that `--group tune` tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from benchmarks.quality.rows import GROUPS, LEARNING_RATES, TUNE, Family, entry

DEFAULT_RATE = LEARNING_RATES[1]


def learning_rates(
    records: Mapping[str, Mapping[str, Any]], *, is_tuned: bool, compute: str = "fp32"
) -> dict[Family, float]:
    """Learning rate by family. records: of the journal. compute: number format of the rows that are looked at. Raises
    ValueError if tuned ones are wanted and not there.
    """
    rates: dict[Family, float] = dict.fromkeys(get_args(Family), DEFAULT_RATE)
    if not is_tuned:
        return rates
    group = GROUPS["tune"]
    best: dict[Family, tuple[float, float]] = {}
    for row in TUNE:
        key = entry(
            "tune", row, group.domains[0], group.seeds[0], group.steps, rates, compute=compute
        ).config.key
        if key not in records:
            raise ValueError(
                f"row {row.name} of group tune is not done: run --group tune --compute {compute} first"
            )
        assert row.learning_rate is not None
        found = (float(records[key]["curve"][-1][1]), row.learning_rate)
        best[row.family] = min(best.get(row.family, found), found)
    return {family: rate for family, (_, rate) in best.items()}
