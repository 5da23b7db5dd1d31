from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.frames import (
    ALIGNMENT,
    BULK_PRIORITY,
    PREFIX,
    Frame,
    FrameError,
    Kind,
    aligned,
    decode_header,
    need,
    need_count,
    need_texts,
    pack_tensors,
    unpack_tensors,
)
from peers.limits import LIMITS
from peers.link import read_frame, write_frame

T = TypeVar("T")
DTYPES = [torch.uint8, torch.int8, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32]
LIMIT = 4096

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
headers = st.dictionaries(st.text(max_size=8).filter(lambda name: name != "kind"), values, max_size=5)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


class Wire:
    """A writer that keeps what is written."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self.data += data

    async def drain(self) -> None:
        """Nothing is ever full."""


async def read(data: bytes, limit: int = LIMIT) -> tuple[Frame, int]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_frame(reader, limit)


@given(st.sampled_from(Kind), headers, st.binary(max_size=200), st.integers(0, 200))
def test_frame_arrives_as_it_was_sent(kind: Kind, header: dict[str, Any], payload: bytes, cut: int) -> None:
    async def scenario() -> None:
        wire = Wire()
        view = memoryview(payload)
        sent = Frame(kind, header, (view[:cut], view[cut:]))
        size = await write_frame(wire, sent)  # type: ignore[arg-type]
        frame, received = await read(bytes(wire.data))
        assert (frame.kind, frame.header, bytes(frame.data())) == (kind, header, payload)
        assert size == received == len(wire.data)

    run(scenario())


@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_or_a_frame_error_or_the_end_of_the_stream(data: bytes) -> None:
    with contextlib.suppress(FrameError, asyncio.IncompleteReadError):
        run(read(data))


@given(st.binary(max_size=120))
def test_any_bytes_are_a_header_or_a_frame_error(data: bytes) -> None:
    try:
        kind, header = decode_header(data)
    except FrameError:
        return
    assert kind in Kind and isinstance(header, dict)


@given(headers, st.data())
@settings(max_examples=50)
def test_frame_cut_off_anywhere_never_comes_out(header: dict[str, Any], data: st.DataObject) -> None:
    whole = Frame(Kind.CHUNK, header, (memoryview(b"x" * 40),)).encode_head() + b"x" * 40
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises((FrameError, asyncio.IncompleteReadError)):
        run(read(whole[:cut]))


@pytest.mark.parametrize(
    "sizes", [(2**32 - 1, 0), (LIMITS.header_bytes + 1, 0), (10, 2**32 - 1), (10, LIMIT + 1)]
)
def test_announced_size_over_the_limit_is_refused_before_anything_is_read(sizes: tuple[int, int]) -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(PREFIX.pack(*sizes))  # and nothing more ever comes
        with pytest.raises(FrameError, match="oversize"):
            await asyncio.wait_for(read_frame(reader, LIMIT), 1)

    run(scenario())


@pytest.mark.parametrize("kind", [None, 5, "nonsense", ["hello"], {"hello": 1}, "HELLO", b"hello"])
def test_unknown_kind_is_refused_as_such(kind: object) -> None:
    with pytest.raises(FrameError) as caught:
        decode_header(msgpack.packb({"kind": kind}))
    assert caught.value.reason == "kind"


@pytest.mark.parametrize(
    "header", [b"", b"\xc1", b"\xc0", b"\x90", b"\x81\x01\x02", b"\x81\x91\x01\x02", b"\xdf\xff\xff\xff\xff"]
)
def test_header_that_is_no_map_of_names_is_refused(header: bytes) -> None:
    with pytest.raises(FrameError) as caught:
        decode_header(header)
    assert caught.value.reason in ("header", "kind")


@pytest.mark.parametrize("depth", [100, 500, 900, 1010, 5000])
def test_deeply_nested_header_is_refused_like_any_other(depth: int) -> None:
    """Its representation must not exhaust the stack: that would end the task that reads the stream."""
    nested = b"\x91" * depth + b"\x00"
    data = b"\x82" + msgpack.packb("kind") + msgpack.packb("hello") + msgpack.packb("run") + nested
    with pytest.raises(FrameError):
        _, header = decode_header(data)
        need(header, "run", str)


@given(values)
def test_checked_fields_have_their_type_or_raise_frame_error(value: Any) -> None:
    header = {"field": value}
    for check in (
        lambda: need(header, "field", int),
        lambda: need(header, "field", list),
        lambda: need(header, "missing", str),
        lambda: need_count(header, "field", 10),
        lambda: need_texts(header, "field", 2, 4),
    ):
        try:
            check()
        except FrameError as error:
            assert error.reason in ("header", "range")


def test_bool_is_no_count_and_bounds_are_inclusive() -> None:
    assert need_count({"n": 0}, "n", 3) == 0 and need_count({"n": 3}, "n", 3) == 3
    for value in (True, -1, 4, 1.0, None):
        with pytest.raises(FrameError):
            need_count({"n": value}, "n", 3)
    assert need_texts({"t": ["a", "b"]}, "t", 2) == ["a", "b"]
    for value in (["a"] * 3, ["a" * 129], [b"a"], "ab", None):
        with pytest.raises(FrameError):
            need_texts({"t": value}, "t", 2)


tensors = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3))


@given(st.lists(tensors, max_size=5), st.integers(0, 2**31))
def test_tensors_come_back_bit_for_bit_each_at_a_16_byte_boundary(
    specs: list[tuple[torch.dtype, list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent, shapes = [], [(dtype, tuple(shape)) for dtype, shape in specs]
    for dtype, shape in shapes:
        count = int(torch.tensor(shape).prod()) if shape else 1
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        sent.append(raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype))
    payload = bytearray(b"".join(pack_tensors(sent)))
    assert len(payload) == sum(aligned(tensor.nbytes) for tensor in sent)
    received = unpack_tensors(memoryview(payload), shapes)
    base = torch.frombuffer(payload, dtype=torch.uint8).data_ptr() if payload else 0
    for one, other, (dtype, shape) in zip(sent, received, shapes, strict=True):
        assert other.dtype == dtype and tuple(other.shape) == shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        if other.numel():
            assert (other.data_ptr() - base) % ALIGNMENT == 0


def test_tensors_are_views_of_the_payload_and_payloads_of_the_tensors() -> None:
    payload = bytearray(16)
    (view,) = unpack_tensors(memoryview(payload), [(torch.float32, (4,))])
    payload[3] = 0x40
    assert view[0] == 2.0
    tensor = torch.zeros(4)
    (buffer,) = pack_tensors([tensor])
    tensor[0] = 2.0
    assert buffer[3] == 0x40


@given(st.integers(0, 200))
def test_payload_of_any_other_size_is_refused(nbytes: int) -> None:
    specs = [(torch.float32, (3,)), (torch.uint8, (17,))]
    payload = memoryview(bytearray(nbytes))
    if nbytes == 16 + 32:
        assert len(unpack_tensors(payload, specs)) == 2
        return
    with pytest.raises(FrameError, match="size"):
        unpack_tensors(payload, specs)


def test_gradients_leave_before_activations_and_state_last() -> None:
    order = [Kind.GRADIENT, Kind.FORWARD, Kind.PART, Kind.CHUNK]
    assert sorted(order, key=lambda kind: BULK_PRIORITY[kind]) == order
    assert not {Kind.HEARTBEAT, Kind.COMMIT, Kind.ACCEPTED, Kind.BYE} & set(BULK_PRIORITY)
