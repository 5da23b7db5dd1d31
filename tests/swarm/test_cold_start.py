"""The whole swarm is stopped and started again: it goes on from the newest state that all stages have."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.kit.evaluation import snapshot
from tests.kit.faults import LOSS_TOLERANCE, FaultBench
from tests.kit.ledger import audit, read_lines
from tests.kit.swarm import Host, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STAGES, REPLICAS, STEPS = 3, 2, 60


def test_a_stopped_swarm_goes_on_with_the_same_loss(host: Host, tmp_path: Path) -> None:
    bench = FaultBench(host, tmp_path)
    bench.make_run(stages=STAGES, replicas=REPLICAS, steps=STEPS, layers=6, snapshot_every=4)
    swarm = bench.start("stopped")
    names = bench.crew.everybody
    wait_for(lambda: all(len(swarm.members[n].ledger()) >= 10 for n in names), 90.0, "ten steps", swarm)
    for name in names:
        swarm.signal(name, signal.SIGTERM)
    codes = swarm.wait_exits(names, 30.0)
    # 130: all at once on a loaded machine, some goodbyes take longer than a peer waits for them.
    assert set(codes.values()) <= {0, 130}, swarm.report()
    swarm.kill("seed")

    common = max(
        version
        for version in range(STEPS)
        if all(
            any(snapshot(swarm.folder / f"{s}-{r}", s, version) for r in range(REPLICAS))
            for s in range(STAGES)
        )
    )
    assert common >= 4, "there was a snapshot to go on from"
    for name in ("seed", *names):
        (swarm.folder / name / "status.jsonl").rename(swarm.folder / name / "status-before.jsonl")
    swarm.seed()
    for name in names:
        bench.join(swarm, name, trace_ledger=swarm.folder / name / "ledger-after.jsonl")
    try:
        swarm.wait_finished(names, 240.0)
        outcome = bench.collect(swarm, 0.0)
    finally:
        swarm.kill_all()
    ledgers = {name: read_lines(swarm.folder / name / "ledger-after.jsonl") for name in names}
    found = audit(ledgers, stages=STAGES)
    assert found.is_exact, found.problems()
    assert min(step for step, _ in found.committed_at) == common, "it went on from the newest common version"
    assert outcome.finished == set(names), swarm.report()
    assert not outcome.unequal

    reference = bench.reference
    assert abs(outcome.loss - reference.loss) < LOSS_TOLERANCE
    gaps = [abs(loss - reference.audit.losses[step]) for step, loss in found.losses.items()]
    assert max(gaps) < LOSS_TOLERANCE, gaps
