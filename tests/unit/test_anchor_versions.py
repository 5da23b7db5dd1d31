"""Which version an anchor passes through next, whatever peers say, and when it takes the run as ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peers.anchor_versions import LONGEST_PAUSE_S, VersionTries, common_versions, has_most

HONEST = [{"a": (20, 40), "b": (40,), "c": (40,)}, {"d": (20, 40), "e": (20, 40)}]


def lied(version: int) -> list[dict[str, tuple[int, ...]]]:
    """One more peer in each stage, which names a version that nobody has."""
    return [{**peers, f"liar-{stage}": (version,)} for stage, peers in enumerate(HONEST)]


def test_one_liar_in_each_stage_does_not_end_the_run() -> None:
    assert not has_most(lied(100), 100)
    assert has_most([{**peers, "late": ()} for peers in HONEST], 40)
    assert not has_most([{"a": (100,)}, {}], 100), "a stage without peers says nothing"


def test_versions_that_every_stage_serves_and_replicas_keep_count() -> None:
    assert common_versions(HONEST, lambda version: True) == {20: False, 40: True}
    assert common_versions(HONEST, lambda version: version < 40) == {20: False}
    assert common_versions([], lambda version: True) == {}


def test_faked_version_keeps_no_real_one_back_and_is_tried_when_it_may_have_become_real() -> None:
    tries = VersionTries()
    versions = common_versions(lied(80), lambda version: True)
    assert tries.choose(versions, 0, 0.0) == 40, "most serve it"
    assert tries.choose(versions, 40, 0.0) == 80
    tries.failed(80, 0.0)
    assert tries.choose(versions, 40, 1.0) is None
    assert tries.choose({**versions, 60: False}, 40, 1.0) == 60, "older than the faked one"
    assert tries.choose({80: True}, 60, 6.0) == 80
    tries.failed(80, 6.0)
    assert tries.choose({80: True}, 60, 11.0) is None, "every time later"
    assert tries.choose({80: True, 70: False}, 60, 17.0) == 70, "those that failed least come first"


@given(
    st.dictionaries(st.integers(1, 9), st.booleans(), min_size=1), st.lists(st.integers(1, 9), max_size=40)
)
def test_every_newer_version_is_tried_again_in_the_end(
    versions: dict[int, bool], failures: list[int]
) -> None:
    tries, now, done = VersionTries(), 0.0, 4
    for version in failures:
        tries.failed(version, now)
    waiting = {version for version in versions if version > done}
    for _ in range(len(waiting) * (len(failures) + 2)):
        now += LONGEST_PAUSE_S
        chosen = tries.choose(versions, done, now)
        assert (chosen is None) == (not any(version > done for version in versions))
        if chosen is None:
            return
        waiting.discard(chosen)
        tries.failed(chosen, now)
    assert not waiting
