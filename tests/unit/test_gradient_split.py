"""How a vector is cut for a group: covered once, bounded, even."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.gradient.split import Split

MOST = 131_072
members = st.integers(1, 40)
elements = st.integers(1, 300_000)
mosts = st.just(MOST) | st.integers(500, 5000)
cases = settings(deadline=None, max_examples=50)


@cases
@given(elements=elements, members=members, most=mosts)
@example(elements=1, members=7, most=16)
@example(elements=17, members=7, most=16)
@example(elements=24_800_001, members=4, most=MOST)
@example(elements=135_000_000, members=2, most=MOST)
def test_chunks_cover_everything_once_in_equal_bounded_sizes(elements: int, members: int, most: int) -> None:
    split = Split(elements, members, most)
    spans = [split.span(chunk) for chunk in range(split.chunks)]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == elements
    sizes = [split.size(chunk) for chunk in range(split.chunks)]
    assert all(size == split.chunk_elements <= most for size in sizes[:-1])
    assert 1 <= sizes[-1] <= split.chunk_elements


@cases
@given(elements=elements, members=members, most=mosts)
@example(elements=300_000, members=4, most=MOST)
@example(elements=24_800_001, members=4, most=MOST)
@example(elements=135_000_000, members=2, most=MOST)
def test_members_reduce_equally_much(elements: int, members: int, most: int) -> None:
    split = Split(elements, members, most)
    reducers = [split.reducer(chunk) for chunk in range(split.chunks)]
    assert reducers == sorted(reducers)
    shares = [0] * members
    for chunk, reducer in enumerate(reducers):
        shares[reducer] += split.size(chunk)
    assert max(shares) - min(shares) <= split.chunk_elements
    # A multiple of the members, unless rounding a chunk's size up makes the last ones superfluous.
    number = members * -(-elements // (members * most))
    if elements >= number**2:
        assert split.chunks == number
        assert max(shares) <= (elements / members + number) * (1 + 1 / 32)


def test_large_vectors_are_cut_between_blocks() -> None:
    for count in (1_000_000, 24_800_001, 135_000_000):
        for group in (2, 3, 4, 8):
            assert Split(count, group, MOST).chunk_elements % 256 == 0
