"""What is known of a neighbour: when it is dialled again, and which start of it counts."""

from __future__ import annotations

import asyncio

import pytest

from dht.dial import DialError
from peers.handshake import is_own_fault, is_refusal
from peers.limits import LIMITS
from peers.neighbour import Breaker, Neighbour


def test_pauses_between_dials_double_up_to_the_ceiling_with_jitter_and_end_when_there_is_a_reason() -> None:
    breaker = Breaker()
    pauses = []
    for _ in range(12):
        breaker.failed(100.0)
        pauses.append(breaker.until - 100.0)
    for number, pause in enumerate(pauses):
        wanted = min(LIMITS.redial_lost_s * 2**number, LIMITS.redial_lost_ceiling_s)
        assert 0.8 * wanted <= pause <= 1.2 * wanted
    breaker.reset()
    assert breaker.until == 0.0
    breaker.failed(100.0)
    assert breaker.until < 100.0 + 1.3 * LIMITS.redial_lost_s


def test_earlier_start_is_superseded_until_the_later_one_was_not_heard_of_for_a_while() -> None:
    async def scenario() -> None:
        neighbour = Neighbour("peer", 1, (), is_dialler=True)
        assert not neighbour.is_superseded(0)
        neighbour.hear(5)
        neighbour.breaker.failed(0.0)
        assert neighbour.is_superseded(4) and not neighbour.is_superseded(5)
        neighbour.hear(5)
        assert neighbour.breaker.failures == 1
        neighbour.hear(6)
        assert neighbour.breaker.failures == 0, "a new start may be dialled at once"
        neighbour.heard -= LIMITS.incarnation_kept_s
        assert not neighbour.is_superseded(4)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "refusal", "own_fault"),
    [
        (DialError("x", "refused"), True, False),
        (DialError("x", "backoff"), False, False),
        (DialError("x", "timeout"), False, False),
        (DialError("x", "host_down"), False, True),
        (ConnectionRefusedError("the own daemon's socket"), False, True),
        (FileNotFoundError(2, "no socket"), False, True),
        (ConnectionError("the own word refused in a text"), False, False),
        (TimeoutError(), False, False),
    ],
)
def test_only_a_fresh_refusal_counts_against_a_neighbour(
    error: BaseException, refusal: bool, own_fault: bool
) -> None:
    assert is_refusal(error) is refusal and is_own_fault(error) is own_fault


def test_neighbour_is_counted_on_for_a_while_until_it_was_met() -> None:
    neighbour = Neighbour("peer", 1, (), is_dialler=True)
    since = neighbour.known_since
    assert neighbour.is_expected(since + 1) and neighbour.is_expected(since + LIMITS.meet_s - 0.1)
    assert not neighbour.is_expected(since + LIMITS.meet_s)
    neighbour.has_met = True
    assert not neighbour.is_expected(since + 1), "one that is lost again is another matter"
