"""kill -9 of one of two replicas of each stage: the survivor replays, goes on alone, and the run completes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kit.swarm import Swarm, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.fault]
STAGES, STEPS = 3, 40


@pytest.mark.parametrize("victim_stage", range(STAGES))
@pytest.mark.parametrize("victim", ["first", "second"])
def test_killed_stage_peer_loses_no_microbatch(swarm: Swarm, victim_stage: int, victim: str) -> None:
    """Whichever of the two it is, it is sometimes the round's leader and, at stage 0, the lead source."""
    swarm.make_run(stages=STAGES, replicas=2, steps=STEPS)
    swarm.seed()
    for stage in range(STAGES):
        for replica in ("first", "second"):
            swarm.join(stage, f"{replica}-{stage}")
    doomed = f"{victim}-{victim_stage}"
    others = [name for name in swarm.members if name not in (doomed, "seed")]
    wait_for(lambda: swarm.members[doomed].step >= 3, 90.0, "three steps", swarm)
    swarm.kill(doomed)
    codes = swarm.wait_exits(others, 120.0)
    assert codes == dict.fromkeys(others, 0), swarm.report()
    assert all(swarm.members[name].step == STEPS for name in others)
    assert_ledger_is_exact(swarm)


def assert_ledger_is_exact(swarm: Swarm) -> None:
    """Every (step, stage, key) of the committed plans is in exactly one committed ledger.

    A peer that was killed between its commit and its trace has written nothing: its keys are those that the
    others' do not have, which then must be missing at one peer only.
    """
    ledgers: Counter[tuple[int, int, int, int]] = Counter()
    wanted: set[tuple[int, int, int, int]] = set()
    for member in swarm.members.values():
        for line in member.ledger():
            ledgers.update((line["step"], line["stage"], slot, number) for slot, number in line["keys"])
            wanted |= {(line["step"], line["stage"], slot, number) for slot, number in line["all_keys"]}
    doubled = {key: count for key, count in ledgers.items() if count > 1}
    assert not doubled, doubled
    missing = wanted - set(ledgers)
    assert len({(step, stage) for step, stage, _, _ in missing}) <= 1, sorted(missing)
