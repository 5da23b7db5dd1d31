"""Members die and are replaced all the time: the swarm goes on training as if they did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.churn import MAX_STALL_S, Churn, compare, replacements
from tests.kit.swarm import Host

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(420)]

CALM_S, CHURN_S, KILL_EVERY_S, LEAST_REPLACED = 20.0, 60.0, 8.0, 3


def test_a_swarm_whose_members_die_and_are_replaced_trains_on(host: Host, tmp_path: Path) -> None:
    churn = Churn(host, tmp_path, stages=3, replicas=3)
    churn.make_run()
    calm = churn.soak("calm", CALM_S)
    churned = churn.soak("churn", CHURN_S, KILL_EVERY_S, least_replaced=LEAST_REPLACED)
    # On a machine that others use too the calm run stands still as well.
    most_stall_s = max(2 * MAX_STALL_S, 5 * max(calm.stalls.values()))
    result = compare(churned, calm, most_stall_s=most_stall_s)
    print(json.dumps(result, indent=2))
    assert not result["problems"], "\n".join([*result["problems"], churned.report])
    came = [name for name in replacements(churned) if name is not None]
    assert len(came) >= LEAST_REPLACED, f"{came} of {churned.kills}\n{churned.report}"
