"""How long a round waits follows what was measured."""

from __future__ import annotations

from peers.round_pace import Pace


def test_deadlines_follow_what_was_measured_within_their_bounds() -> None:
    pace = Pace()
    assert (pace.arrival_deadline_s, pace.exchange_deadline_s) == (30.0, 60.0)
    pace.note_arrival(0.1)
    pace.note_exchange(0.1)
    assert (pace.arrival_deadline_s, pace.exchange_deadline_s) == (5.0, 10.0)
    pace.note_arrival(100.0)
    pace.note_exchange(200.0)
    assert (pace.arrival_deadline_s, pace.exchange_deadline_s) == (60.0, 120.0)


def test_a_line_that_became_slow_gets_longer_deadlines_until_an_exchange_ends_well() -> None:
    pace = Pace()
    pace.note_exchange(1.0)
    pace.note_late_exchange()
    assert pace.exchange_deadline_s == 12.0
    pace.note_late_exchange()
    assert pace.exchange_deadline_s == 24.0
    pace.note_exchange(1.0)
    assert pace.exchange_deadline_s == 10.0
