"""When it is said that priors grow old."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peers.prior_age import SNAPSHOTS, PriorAge

ages = st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=4)


@given(st.integers(1, 20), st.lists(st.tuples(ages, st.booleans()), max_size=20))
def test_every_change_is_said_once(every: int, looks: list[tuple[list[int | None], bool]]) -> None:
    one = PriorAge(every)
    has_said, threshold, oldest = False, SNAPSHOTS * every, 0
    for found, has_anchors in looks:
        age = max((age for age in found if age is not None), default=0)
        is_old = has_anchors and age > SNAPSHOTS * every
        said = one.look(found, has_anchors=has_anchors)
        assert one.is_old == is_old
        if is_old:
            oldest = max(oldest, age)
        if is_old and not has_said and age > threshold:
            assert said is not None and str(age) in said
            has_said = True
        elif has_said and not is_old:
            assert said == "the priors in force are renewed"
            has_said, threshold = False, 2 * oldest
        else:
            assert said is None


def test_an_anchor_that_is_always_late_is_said_to_be_so_once() -> None:
    one = PriorAge(10)
    said = [one.look([age % 45], has_anchors=True) for age in range(1000)]
    assert [text for text in said if text is not None and "warning" in text] == [said[31]]
    assert len([text for text in said if text is not None]) == 2


def test_priors_that_a_living_anchor_renews_are_never_old() -> None:
    one = PriorAge(20)
    for step in range(500):
        newest = max(0, step // 20 * 20 - 20)  # in force one interval late
        assert one.look([step - newest], has_anchors=True) is None
