"""Anchors that hold some of the stages each, beside a swarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.ledger import audit
from tests.kit.swarm import Swarm, wait_for
from tests.swarm.test_anchor import passes, version_in_force
from tests.swarm.test_priors import key

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STAGES = 4
NAMES = [f"stage-{stage}" for stage in range(STAGES)]


def test_two_anchors_of_two_stages_each_make_all_priors_together_and_again_after_one_died(
    swarm: Swarm, tmp_path: Path
) -> None:
    first, first_id = key(tmp_path, "first")
    second, second_id = key(tmp_path, "second")
    swarm.make_run(
        stages=STAGES,
        replicas=1,
        steps=5000,
        codec="basis",
        mask_ratio=50.0,
        anchor_peers=(first_id, second_id),
        anchor_microbatches=3,
        snapshot_every=10,
        learning_rate=1e-3,
    )
    swarm.seed()
    for stage, name in enumerate(NAMES):
        swarm.join(stage, name)
    wait_for(lambda: all(swarm.members[name].step >= 2 for name in NAMES), 60.0, "two steps", swarm)
    lead = swarm.join(None, "lead", is_anchor=True, anchor_span=(0, 1), identity=first)
    wait_for(
        lambda: any("waiting for anchors of stages 2, 3" in note for note in lead.notes),
        60.0,
        "the lead to miss the other",
        swarm,
    )
    other = swarm.join(None, "other", is_anchor=True, anchor_span=(2, 3), identity=second)

    def all_use(version: int) -> bool:
        return all(
            version_in_force(swarm, NAMES[stage], boundary) >= version
            for boundary in range(STAGES - 1)
            for stage in (boundary, boundary + 1)
        )

    wait_for(lambda: all_use(1), 90.0, "priors of every boundary", swarm)
    assert passes(lead) >= 1 and passes(other) >= 1
    dense = [(member.last("status") or {})["bytes"]["up"].get("dense", 0) for member in (lead, other)]
    assert all(nbytes > 0 for nbytes in dense), "hidden states one way, gradients the other"

    swarm.kill("other")
    before = [version_in_force(swarm, NAMES[boundary], boundary) for boundary in range(STAGES - 1)]
    wait_for(
        lambda: (
            [note for note in lead.notes if "waiting for anchors of stages 2, 3" in note][1:] != []
            or any("is abandoned" in note for note in lead.notes)
        ),
        90.0,
        "the lead to notice",
        swarm,
    )
    goal = max(swarm.members[name].step for name in NAMES) + 5
    wait_for(lambda: all(swarm.members[name].step >= goal for name in NAMES), 60.0, "more steps", swarm)
    again = swarm.join(None, "again", is_anchor=True, anchor_span=(2, 3), identity=second)
    wait_for(lambda: passes(again) >= 1 and all_use(max(before) + 1), 90.0, "newer priors", swarm)
    audited = audit({name: swarm.members[name].ledger() for name in NAMES}, stages=STAGES)
    assert not audited.doubled and not audited.lost, audited.problems()
    assert all(swarm.code(name) is None for name in [*NAMES, "lead", "again"]), swarm.report()
