"""Which anchors make a pass together, and who leads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.anchor_cover import Leg, Span, circuit, place_of, unpack_legs
from peers.frames import FrameError

spans_of = st.integers(2, 8).flatmap(
    lambda stages: st.tuples(
        st.just(stages),
        st.dictionaries(
            st.sampled_from("abcdefgh"),
            st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)).map(
                lambda ends: (min(ends), max(ends))
            ),
        ),
    )
)


def can_cover(spans: list[Span], stages: int) -> bool:
    """By trying out, stage by stage, which stages the anchors together hold."""
    return all(any(first <= stage <= last for first, last in spans) for stage in range(stages))


@given(spans_of, st.randoms(use_true_random=False))
def test_anchors_that_hold_all_stages_together_form_one_row(
    drawn: tuple[int, dict[str, Span]], random_: random.Random
) -> None:
    stages, spans = drawn
    anchors = sorted(spans)
    legs = circuit(spans, anchors, stages)
    shuffled = list(spans.items())
    random_.shuffle(shuffled)
    assert circuit(dict(shuffled), anchors, stages) == legs, "whatever order the records come in"
    is_whole = any(span == (0, stages - 1) for span in spans.values())
    assert bool(legs) == (can_cover(list(spans.values()), stages) and not is_whole)
    if legs:
        assert [leg.first for leg in legs] == [0] + [leg.last + 1 for leg in legs[:-1]]
        assert legs[-1].last == stages - 1
        assert len({leg.peer for leg in legs}) == len(legs)
        for place, leg in enumerate(legs):
            assert spans[leg.peer][0] <= leg.first <= leg.last <= spans[leg.peer][1]
            if place:
                assert unpack_legs([one.pack() for one in legs], stages) == legs
                before = legs[place - 1].peer
                assert place_of(legs, leg.peer, before, spans[leg.peer], anchors, stages) == place


def test_who_is_no_anchor_takes_no_part_and_the_first_of_equal_ones_leads() -> None:
    spans = {"x": (0, 1), "a": (0, 1), "b": (2, 3), "c": (2, 3)}
    assert circuit(spans, ["a", "b"], 4) == (Leg("a", 0, 1), Leg("b", 2, 3))
    assert circuit(spans, ["c", "a", "b"], 4) == (Leg("a", 0, 1), Leg("c", 2, 3))
    assert circuit(spans, ["a"], 4) == ()


GOOD = (Leg("a", 0, 1), Leg("b", 2, 2), Leg("c", 3, 3))


@pytest.mark.parametrize(
    ("legs", "sender", "span", "reason"),
    [
        (GOOD, "c", (2, 2), "stranger"),
        (GOOD, "b", (2, 2), "stranger"),
        (GOOD, "a", (3, 3), "range"),
        ((Leg("b", 0, 1), Leg("a", 2, 3)), "a", (0, 3), "stranger"),
        ((Leg("a", 0, 1), Leg("b", 2, 2)), "a", (2, 2), "range"),
        ((Leg("a", 0, 1), Leg("b", 1, 3)), "a", (1, 3), "range"),
        ((Leg("a", 0, 1), Leg("b", 3, 3)), "a", (3, 3), "range"),
        ((Leg("a", 0, 1), Leg("b", 2, 9)), "a", (2, 9), "range"),
        ((Leg("a", 0, 1), Leg("b", 2, 1), Leg("c", 2, 3)), "a", (2, 3), "range"),
        ((Leg("a", 0, 1), Leg("b", 2, 2), Leg("x", 3, 3)), "a", (2, 2), "stranger"),
        ((Leg("a", 0, 1), Leg("b", 2, 2), Leg("a", 3, 3)), "a", (2, 2), "range"),
    ],
)
def test_row_in_which_this_anchor_has_no_place_is_refused(
    legs: tuple[Leg, ...], sender: str, span: Span, reason: str
) -> None:
    assert place_of(GOOD, "b", "a", (2, 3), "abc", 4) == 1
    with pytest.raises(FrameError) as refused:
        place_of(legs, "b", sender, span, "abc", 4)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "value", [None, [], [["a", 0, 3]], [["a", 0], ["b", 1]], [["a", 0, 1], ["b" * 99, 2, 3]], [1, 2], "ab"]
)
def test_malformed_row_is_refused(value: object) -> None:
    with pytest.raises(FrameError):
        unpack_legs(value, 4)
