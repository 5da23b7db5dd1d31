"""The figures of `benchmarks.round_overhead`."""

from __future__ import annotations

import json

import pytest

from benchmarks.round_overhead.report import Case, Spread, quantile, stages_of, table, took

EARLY = {"ready": 10.0, "grouped": 10.3, "exchanged": 11.0, "committed": 11.3, "applied": 11.4}
LATE = {"ready": 10.2, "grouped": 10.25, "exchanged": 11.1, "committed": 11.2, "applied": 11.5}


def case(rtt_ms: float = 0.0) -> Case:
    return Case(
        rtt_ms,
        0.0,
        1_000_000,
        2,
        rounds=[0.5, 0.4, 0.9],
        moves=[0.1, 0.3, 0.2],
        exchanges=[0.25],
        stages=[stages_of([EARLY, LATE])],
    )


def test_a_round_lasts_from_the_last_to_be_ready_to_the_last_to_be_done() -> None:
    assert took([EARLY, LATE]) == pytest.approx(1.3)
    found = stages_of([EARLY, LATE])
    assert found == pytest.approx({"grouped": 0.1, "exchanged": 0.8, "committed": 0.2, "applied": 0.2})
    assert sum(found.values()) == pytest.approx(took([EARLY, LATE]))


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.91, 10), (1.0, 10)])
def test_a_quantile_is_one_of_the_values(share: float, value: int) -> None:
    assert quantile([7, 10, 1, 4, 2, 3, 5, 6, 8, 9], share) == value


def test_nothing_measured_has_no_figures() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
    with pytest.raises(ValueError):
        Spread.of([])


def test_the_overhead_is_what_rounds_take_beyond_the_median_of_moving() -> None:
    overhead = case().overhead()
    assert (overhead.median, overhead.p90, overhead.count) == (pytest.approx(300), pytest.approx(700), 3)
    assert not case().is_within  # 150 ms at loopback
    assert not case(50.0).is_within  # 250
    assert case(70.0).is_within  # 310


def test_ratios_compare_medians_and_are_absent_without_hivemind() -> None:
    alone = case()
    assert alone.ratio() is None and alone.ahead_ratio() is None
    assert table([alone]).splitlines()[-1].endswith("| 250 (250) | - | - | - | - |")
    compared = case()
    compared.hivemind, compared.ahead = [1.0, 3.0, 2.0], [0.5]
    assert (compared.ratio(), compared.ahead_ratio()) == (pytest.approx(4.0), pytest.approx(2.0))
    figures = json.loads(json.dumps(compared.figures()))
    assert figures["hivemind_over_round"] == 4.0 and figures["hivemind"]["count"] == 3
    assert figures["overhead"] == {"median_ms": 300.0, "p90_ms": 700.0}
    header, _, row = table([compared]).splitlines()
    assert header.count("|") == row.count("|") and "4.0x" in row and "2.0x" in row
