"""Peers behind slow lines, real ones between network namespaces: who can keep up does, who cannot holds nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Host as Line
from benchmarks.testbed import TestbedError, is_possible
from tests.kit import lines
from tests.kit.swarm import Host

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root, ip and tc"),
]


def expect(case: Any, host: Host, folder: Path, *arguments: Any, **more: Any) -> None:
    try:
        result = case(host, folder, *arguments, **more)
    except TestbedError as error:
        pytest.skip(str(error))
    print({name: value for name, value in result.items() if name != "report"})
    assert not result["problems"], "\n".join([*result["problems"], result["report"]])


def test_a_joiner_with_a_usual_line_votes_and_one_that_is_too_slow_is_told_so(
    host: Host, tmp_path: Path
) -> None:
    expect(lines.slow_joiners, host, tmp_path, Line(20, 20, 50), Line(1, 1, 50))


def test_a_round_is_finished_without_a_replica_whose_line_collapses(host: Host, tmp_path: Path) -> None:
    expect(lines.collapsing_line, host, tmp_path, steps=1)


def test_a_replica_whose_cable_was_pulled_catches_up_and_nothing_is_trained_twice(
    host: Host, tmp_path: Path
) -> None:
    expect(lines.pulled_cable, host, tmp_path)
