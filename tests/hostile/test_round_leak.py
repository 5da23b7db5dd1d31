"""Rounds that time out leave nothing: no task, no exchange, no tensor, no early frame."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.round_leak import Report, run, verdict
from tests.hostile.garbage import IS_LONG

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_rounds_of_which_half_time_out_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory's slope needs more rounds than there is time for here: see benchmarks/round_leak.py."""
    monkeypatch.setattr("peers.round_state.RETRY_FIRST_S", 0.02)
    monkeypatch.setattr("peers.stage_peer.TICK_S", 0.02)
    # pytest keeps every log record, and with it the error whose traceback holds the exchange.
    monkeypatch.setattr("peers.averaging.logger.disabled", True)
    report = run(rounds=800 if IS_LONG else 60, warm_up=20, deadline_s=0.05, folder=tmp_path)
    assert verdict(report, warm_up=20, limit_mib=1e9) == []


def test_a_leak_would_be_seen() -> None:
    leaking = Report(rounds=2000, failed=1000, memory=[(n, 10**8 + 2_000 * n) for n in range(0, 2000, 20)])
    assert leaking.slope_mib_per_1000(200) == pytest.approx(2_000_000 / 2**20)
    assert verdict(leaking, warm_up=200, limit_mib=1.0)
    flat = Report(rounds=2000, failed=1000, memory=[(n, 10**8) for n in range(0, 2000, 20)])
    assert verdict(flat, warm_up=200, limit_mib=1.0) == []
    assert verdict(Report(rounds=2000, failed=1000, left={"tasks": 900}), 200, 1.0)
