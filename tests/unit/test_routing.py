from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.limits import LIMITS
from peers.routing import BACKOFF_CEILING_S, BACKOFF_FIRST_S, Router


def router(*peers: str, window: int = 4) -> Router[int]:
    made: Router[int] = Router(window)
    for peer in peers:
        made.add(peer)
    return made


def measured(**seconds: float) -> Router[int]:
    made = router(*seconds)
    for peer, value in seconds.items():
        made.sent(peer, 0, 100.0)
        made.returned(peer, 0, 100.0 + value)
    return made


def test_nobody_is_chosen_from_nobody() -> None:
    assert router().choose(0.0) is None


def test_unmeasured_neighbour_is_tried_before_a_measured_one() -> None:
    made = measured(fast=0.1)
    made.add("new")
    assert made.choose(200.0) == "new"


def test_microbatch_goes_where_it_is_finished_first() -> None:
    made = measured(fast=1.0, slow=2.5)
    assert made.choose(200.0) == "fast"
    made.sent("fast", 1, 200.0)
    assert made.choose(200.0) == "fast"  # 2 x 1.0 < 1 x 2.5
    made.sent("fast", 2, 200.0)
    assert made.choose(200.0) == "slow"  # 3 x 1.0 > 1 x 2.5


def test_neighbour_that_seemed_slow_once_is_tried_again() -> None:
    """Both waited for a round that stalled; only one of them had a microbatch meanwhile."""
    made, now, key = measured(usual=0.5, unlucky=30.0), 130.0, 1
    while (peer := made.choose(now)) == "usual":
        made.sent(peer, key, now)
        now, key = now + 0.5, key + 1
        made.returned(peer, key - 1, now)
        assert now < 300.0
    for _ in range(20):
        made.sent("unlucky", key, now)
        made.returned("unlucky", key, now + 0.5)
        now, key = now + 0.5, key + 1
    assert made.choose(now) in ("usual", "unlucky")
    made.sent("usual", key, now)
    assert made.choose(now) == "unlucky"


def test_work_is_shared_in_proportion_to_speed() -> None:
    """Three times as fast gets three times as much, whatever the order of answers."""
    made, pace = router("fast", "slow"), {"fast": 1.0, "slow": 3.0}
    free, queue, done, now = dict.fromkeys(pace, 0.0), [], dict.fromkeys(pace, 0), 0.0
    for key in range(200):
        while (peer := made.choose(now)) is None:
            queue.sort()
            now, peer, finished = queue.pop(0)
            made.returned(peer, finished, now)
            done[peer] += 1
        made.sent(peer, key, now)
        free[peer] = max(free[peer], now) + pace[peer]
        queue.append((free[peer], peer, key))
    assert done["fast"] / done["slow"] == pytest.approx(3.0, rel=0.2)


def test_window_bounds_what_is_outstanding() -> None:
    made = router("a", window=2)
    made.sent("a", 1, 0.0)
    made.sent("a", 2, 0.0)
    assert made.choose(0.0) is None and made.outstanding("a") == 2
    made.returned("a", 1, 1.0)
    assert made.choose(1.0) == "a"


def test_busy_neighbour_rests_for_a_moment_and_keeps_its_estimate() -> None:
    made = measured(a=1.0)
    made.sent("a", 1, 200.0)
    made.busy("a", 1, 200.0, 0.5)
    assert made.choose(200.4) is None and made.outstanding("a") == 0
    assert made.choose(200.6) == "a"


def test_failing_neighbour_rests_twice_as_long_every_time_up_to_a_ceiling() -> None:
    made, now, rest = router("a"), 0.0, BACKOFF_FIRST_S
    for key in range(8):
        made.failed("a", key, now)
        assert made.choose(now + rest * 0.99) is None
        assert made.choose(now + rest * 1.01) == "a"
        now, rest = now + rest, min(2 * rest, BACKOFF_CEILING_S)
    made.sent("a", 99, now)
    made.returned("a", 99, now)
    made.failed("a", 100, now)
    assert made.choose(now + BACKOFF_FIRST_S * 1.01) == "a", "success resets the back-off"


def test_time_in_the_queue_behind_others_does_not_count_as_slowness() -> None:
    made = router("a", "b")
    for key in range(4):
        made.sent("a", key, 0.0)
    for key in range(4):
        made.returned("a", key, 1.0 + key)  # one a second, all sent at once
    made.sent("b", 9, 10.0)
    made.returned("b", 9, 11.5)
    assert made.choose(20.0) == "a"


def test_answers_of_lost_and_unknown_peers_change_nothing() -> None:
    made = router("a")
    made.sent("gone", 1, 0.0)
    for event in (made.returned, made.failed):
        event("gone", 1, 1.0)
    made.busy("gone", 1, 1.0, 1.0)
    made.forget("gone", 1)
    made.returned("a", 1, 1.0)
    made.remove("gone")
    assert made.peers == ["a"] and made.outstanding("gone") == 0


def test_peer_that_comes_back_starts_without_what_it_owed() -> None:
    made = router("a")
    made.sent("a", 1, 0.0)
    made.remove("a")
    made.add("a")
    assert made.outstanding("a") == 0
    made.sent("a", 2, 0.0)
    made.add("a")
    assert made.outstanding("a") == 1, "a link that stands again is no new peer"


@given(st.integers(0, 2**32))
def test_outstanding_never_exceeds_the_window_nor_forgets_a_key(seed: int) -> None:
    chance, made = random.Random(seed), router("a", "b", "c", window=3)
    held: dict[int, str] = {}
    for key in range(60):
        now = float(key)
        if (peer := made.choose(now)) is not None and chance.random() < 0.7:
            made.sent(peer, key, now)
            held[key] = peer
        if held and chance.random() < 0.5:
            done = chance.choice(list(held))
            match chance.randrange(4):
                case 0:
                    made.returned(held[done], done, now)
                case 1:
                    made.busy(held[done], done, now, 0.5)
                case 2:
                    made.failed(held[done], done, now)
                case _:
                    made.forget(held[done], done)
            del held[done]
        for peer in "abc":
            assert made.outstanding(peer) == sum(1 for owner in held.values() if owner == peer) <= 3


def test_neighbour_without_room_rests_twice_as_long_every_time_and_one_burst_counts_once() -> None:
    made, now, rest = router("a"), 10.0, LIMITS.busy_retry_s
    for _ in range(6):
        for key in range(4):
            made.sent("a", key, now)
        for key in range(4):
            made.busy("a", key, now)
        assert made.choose(now + rest * 0.99) is None and made.choose(now + rest * 1.01) == "a"
        now, rest = now + rest * 1.01, min(2 * rest, LIMITS.busy_ceiling_s)
    made.accepted("a")
    made.busy("a", 9, now)
    assert made.choose(now + LIMITS.busy_retry_s * 1.01) == "a", "accepting resets the rest"


def test_neighbour_gets_as_much_as_it_had_room_for_and_slowly_more() -> None:
    made = router("a", window=8)
    for key in range(8):
        made.sent("a", key, 0.0)
    for key in range(5):
        made.busy("a", key, 0.0)
    assert made.choose(1.0) is None and made.outstanding("a") == 3
    made.returned("a", 7, 1.0)
    assert made.choose(1.0) == "a"
    made.sent("a", 0, 1.0)
    assert made.choose(1.0) is None


def test_other_neighbour_is_preferred_while_one_has_no_room() -> None:
    made = measured(fast=0.1, slow=5.0)
    made.busy("fast", 1, 200.0)
    assert made.choose(200.0) == "slow"


def test_fenced_neighbour_gets_no_work_of_that_plan_until_fences_are_lifted() -> None:
    made = router("a")
    made.fence("a", "plan")
    assert made.choose(0.0, plan="plan") is None and made.choose(0.0, plan="next") == "a"
    made.remove("a")
    made.add("a")
    assert made.is_fenced("a", "plan"), "a link that breaks changes nothing"
    made.lift_fences(keep="plan")
    assert made.choose(0.0, plan="plan", is_urgent=True) is None
    made.lift_fences_of("a")
    assert made.choose(0.0, plan="plan") == "a"
