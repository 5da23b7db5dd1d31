"""The only peer of a stage dies; later a stranger takes its place, and training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.refill import refill
from tests.kit.swarm import Host

pytestmark = [pytest.mark.e2e, pytest.mark.fault]


def test_an_empty_stage_parks_the_run_until_a_joiner_refills_it(host: Host, tmp_path: Path) -> None:
    result = refill(host, tmp_path, empty_s=10.0)
    print(result)
    assert not result["problems"], "\n".join(result["problems"])
    assert result["lost"] == 0, "only one stage lost a peer"
