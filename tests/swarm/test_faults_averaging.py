"""kill -9 of one peer where replicas average less than the gradient, or more seldom: their own state stands it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.injector import ON_SIGNAL
from tests.kit.faults import Case, FaultBench
from tests.kit.swarm import Host

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]

EVERY, DUE = 2, 3
"""DiLoCo's H, and a step after which averages are due, in the middle of the run."""
RUNS: dict[str, dict[str, Any]] = {
    "powersgd": {"averaging": "powersgd", "averaging_rank": 2},
    "diloco": {"averaging": "int8", "outer": "diloco", "outer_every": EVERY},
    "overlap": {"averaging": "powersgd", "averaging_rank": 2, "outer_overlap": 1},
}


TOLERANCES = {"powersgd": 0.02, "diloco": 0.05, "overlap": 0.04}
"""By how much a death may change the held-out loss, of what the run gains: 0.90 (powersgd), 1.57 (diloco).

It is no thousandth here as where gradients are averaged whole. Which replica a microbatch comes to follows from who is
free, and decides in which remainder, or in whose local step, its gradient is: undisturbed runs of the same seed were up
to 0.009 (powersgd) and, on a loaded machine, 0.027 (diloco) apart. And a dead member takes its remainder along, with
DiLoCo its steps since the last average, and with an overlap its gradient of one step more. A step that was lost
altogether would cost 0.05 (powersgd's last), an average 0.3 (DiLoCo's last).
"""
PER_SKIPPED_STEP = 0.08
"""And for each local step that a replica had no microbatch for, which the ledger tells: a run in which two of stage 1's
three replicas had one of the two steps before the first average ended 0.15 above those in which all had both.
"""


@pytest.fixture(scope="module", params=RUNS)
def bench(request: pytest.FixtureRequest, host: Host, tmp_path_factory: pytest.TempPathFactory) -> FaultBench:
    """2 stages of 3 replicas: those who are left still have something to average."""
    name = request.param
    made = FaultBench(
        host, tmp_path_factory.mktemp(name), tolerance=TOLERANCES[name], per_skipped_step=PER_SKIPPED_STEP
    )
    made.make_run(layers=2, stages=2, replicas=3, samples_per_step=12, **RUNS[name])
    return made


CASES = [
    ("powersgd", "before_group", "leader-1", DUE),
    ("powersgd", "mid_exchange", "stage-1", DUE),
    ("powersgd", "before_commit", "lead", DUE),
    ("powersgd", ON_SIGNAL, "source", DUE),
    ("diloco", "mid_exchange", "leader-1", DUE),
    ("diloco", "after_first_commit", "leader-1", DUE),
    ("diloco", "before_commit", "leader-1", DUE - 1),
    ("diloco", ON_SIGNAL, "stage-1", DUE),
    ("overlap", "before_commit", "leader-1", DUE),
    ("overlap", "mid_exchange", "stage-1", DUE),
    ("overlap", "after_first_commit", "leader-1", DUE),
]


@pytest.mark.parametrize(("bench", "point", "victim", "step"), CASES, indirect=["bench"])
def test_a_death_costs_time_and_what_the_member_alone_had(
    bench: FaultBench, point: str, victim: str, step: int
) -> None:
    """The ledger is exact, those who are left hold the same bits, and the run has learnt as much."""
    result = bench.run_case(Case(point, victim), step)
    print(result)
    report = (Path(result["folder"]) / "report.txt").read_text() if "folder" in result else ""
    assert not result["problems"], "\n".join([*result["problems"], report])
