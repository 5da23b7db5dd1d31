"""A swarm without anchors whose peers make the boundaries' priors themselves."""

from __future__ import annotations

import pytest

from tests.kit.ledger import audit
from tests.kit.swarm import Swarm, wait_for
from tests.swarm.test_anchor import version_in_force

pytestmark = pytest.mark.e2e
STAGES, REPLICAS = 3, 2
NAMES = [f"{stage}-{replica}" for stage in range(STAGES) for replica in range(REPLICAS)]


def test_peers_of_the_stages_renew_the_priors_of_their_boundaries(swarm: Swarm) -> None:
    swarm.make_run(
        stages=STAGES,
        replicas=REPLICAS,
        steps=5000,
        codec="basis",
        mask_ratio=50.0,
        priors="leaders",
        prior_every=10,
        learning_rate=1e-3,
    )
    swarm.seed()
    for name in NAMES:
        swarm.join(int(name[0]), name)

    def all_use(version: int) -> bool:
        return all(
            version_in_force(swarm, name, boundary) >= version
            for boundary in range(STAGES - 1)
            for name in NAMES
            if int(name[0]) in (boundary, boundary + 1)
        )

    wait_for(lambda: all_use(1), 120.0, "the first priors", swarm)
    wait_for(lambda: all_use(2), 90.0, "the second ones", swarm)
    # Steps are fast here: priors may be many of them old, and a sender's rows gone before they are fetched.
    noted = [note for name in NAMES for note in swarm.members[name].notes if "warning" in note]
    assert not [note for note in noted if "steps old" not in note and "no prior of boundary" not in note], (
        noted
    )
    audited = audit({name: swarm.members[name].ledger() for name in NAMES}, stages=STAGES)
    assert not audited.doubled and not audited.lost, audited.problems()
    assert all(swarm.code(name) is None for name in NAMES), swarm.report()
