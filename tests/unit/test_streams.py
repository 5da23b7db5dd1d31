"""Frames cut into pieces, and whose time is counted while they wait."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.frames import Frame, Kind
from peers.streams import PatientValve, pieces, read_frame, write_frame
from tests.kit.fake_time import run_in_fake_time


class SlowValve:
    """Lets every piece wait a second, and notes what passed."""

    piece_bytes, is_free = 100, False

    def __init__(self) -> None:
        self.passed: list[int] = []
        self.frames = 0

    async def passes(self, _: Kind, nbytes: int) -> None:
        self.passed.append(nbytes)
        await asyncio.sleep(1)

    def has_passed(self, _: Kind) -> None:
        self.frames += 1


class Wire:
    """What a stream writer would have sent."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self.data += data

    async def drain(self) -> None:
        """Nothing is ever full."""


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(1, 200))
def test_pieces_are_the_frame_and_no_larger_than_asked_for(buffers: list[bytes], piece_bytes: int) -> None:
    frame = Frame(Kind.FORWARD, {"n": 1}, [memoryview(buffer) for buffer in buffers])
    head = frame.encode_head()
    cut = list(pieces(frame, piece_bytes))
    assert b"".join(bytes(part) for _, parts in cut for part in parts) == head + b"".join(buffers)
    for nbytes, parts in cut:
        assert nbytes == sum(len(part) for part in parts)
        assert nbytes <= max(piece_bytes, len(head))


def test_every_byte_passes_the_valve_both_ways_and_the_frame_is_counted_once() -> None:
    async def scenario() -> None:
        wire, out, back = Wire(), SlowValve(), SlowValve()
        frame = Frame(Kind.FORWARD, {"n": 1}, [memoryview(bytes(950))])
        size = await write_frame(wire, frame, valve=out)  # type: ignore[arg-type]
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(wire.data))
        got, _ = await read_frame(reader, 1000, valve=back)
        assert got.data() == bytes(950)
        assert sum(out.passed) == sum(back.passed) == size == len(wire.data)
        assert max(out.passed) <= 100 and max(back.passed) <= 100
        assert out.frames == back.frames == 1

    run_in_fake_time(scenario())


def test_a_deadline_counts_the_others_time_and_not_our_own_line() -> None:
    async def scenario() -> None:
        valve = PatientValve(SlowValve())
        async with valve.deadline(3):
            for _ in range(10):
                await valve.passes(Kind.CHUNK, 1)
                await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError):
            async with valve.deadline(3):
                await valve.passes(Kind.CHUNK, 1)
                await asyncio.sleep(4)

    run_in_fake_time(scenario())
