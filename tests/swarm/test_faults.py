"""kill -9 of one peer, wherever it hurts: nothing is trained twice or never, and the run ends as if undisturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.injector import ON_SIGNAL
from tests.kit.faults import Case, FaultBench
from tests.kit.swarm import Host

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(900)]


def slow(*values: str) -> Any:
    """One of the further cases."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def two_replicas(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    """4 stages of 2 replicas, and their undisturbed run."""
    yield bench(host, tmp_path_factory.mktemp("4x2"), stages=4, replicas=2)


@pytest.fixture(scope="module")
def three_replicas(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    """2 stages of 3 replicas: a round that loses its leader has a majority left."""
    yield bench(host, tmp_path_factory.mktemp("2x3"), stages=2, replicas=3)


def bench(host: Host, folder: Path, **shape: int) -> FaultBench:
    made = FaultBench(host, folder)
    made.make_run(**shape)
    return made


def expect_only_time_lost(bench: FaultBench, case: Case) -> None:
    result = bench.run_case(case)
    print(result)
    report = (Path(result["folder"]) / "report.txt").read_text() if "folder" in result else ""
    assert not result["problems"], "\n".join([*result["problems"], report])


# The whole matrix of points and victims is `benchmarks/faults.py`.
@pytest.mark.parametrize(
    ("point", "victim"),
    [
        slow("after_accepted", "stage-3"),
        ("after_forward_sent", "lead"),
        slow("after_backward", "stage-1"),
        ("after_gradient", "leader-2"),
        slow("after_step_end", "source"),
        ("before_group", "leader-1"),
        slow("mid_exchange", "stage-2"),
        slow("after_first_commit", "lead"),
        ("before_commit", "leader-3"),
        slow("outside", "seed"),
    ],
)
def test_death_at_a_point_costs_only_time(two_replicas: FaultBench, point: str, victim: str) -> None:
    expect_only_time_lost(two_replicas, Case(point, victim))


@pytest.mark.parametrize("victim", ["source", slow("stage-1"), slow("stage-2"), slow("stage-3")])
def test_death_at_any_time_costs_only_time(two_replicas: FaultBench, victim: str) -> None:
    expect_only_time_lost(two_replicas, Case(ON_SIGNAL, victim))


@pytest.mark.parametrize(
    ("point", "victim"), [("after_first_commit", "leader-1"), slow("before_commit", "lead")]
)
def test_a_round_of_three_survives_its_leader(three_replicas: FaultBench, point: str, victim: str) -> None:
    expect_only_time_lost(three_replicas, Case(point, victim))
