"""When it is said that priors grow old."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peers.prior_age import SNAPSHOTS, PriorAge

ages = st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=4)


@given(st.integers(1, 20), st.lists(st.tuples(ages, st.booleans()), max_size=20))
def test_every_change_is_said_once(every: int, looks: list[tuple[list[int | None], bool]]) -> None:
    one = PriorAge(every)
    is_old = False
    for found, has_anchors in looks:
        now = has_anchors and any(age is not None and age > SNAPSHOTS * every for age in found)
        said = one.look(found, has_anchors=has_anchors)
        assert one.is_old == now
        assert (said is not None) == (now != is_old)
        if now and said is not None:
            assert str(max(age for age in found if age is not None)) in said
        is_old = now


def test_priors_that_a_living_anchor_renews_are_never_old() -> None:
    one = PriorAge(20)
    for step in range(500):
        newest = max(0, step // 20 * 20 - 20)  # in force one interval late
        assert one.look([step - newest], has_anchors=True) is None
