"""The pieces of a transfer that need no network: ranges, the partial file, what an answer means."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers.fetch_stream import FetchStream, HolderError
from peers.fileserver import CHUNKS_PER_REQUEST
from peers.frames import Frame, FrameError, Kind
from peers.limits import PROTOCOL_VERSION
from peers.partial_file import PartialFile, chunk_bytes, is_complete
from peers.transfer import TransferError, _ranges
from swarm.manifest import ARTIFACT_CHUNK_BYTES, Artifact

MIB = ARTIFACT_CHUNK_BYTES


def content_of(nbytes: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(nbytes)


def described(content: bytes, name: str = "a.bin") -> Artifact:
    pieces = [content[offset : offset + MIB] for offset in range(0, len(content), MIB)]
    chunks = tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
    return Artifact(name=name, nbytes=len(content), sha256=hashlib.sha256(content).hexdigest(), chunks=chunks)


def put(file: PartialFile, artifact: Artifact, content: bytes, indices: list[int]) -> None:
    for index in indices:
        start = index * MIB
        data = memoryview(content)[start : start + chunk_bytes(artifact, index)]
        assert file.write(artifact, index, data)
        file.mark(index)


@given(st.sets(st.integers(0, 3000)))
def test_ranges_hold_every_missing_chunk_once_and_neighbours_only(missing: set[int]) -> None:
    queue = _ranges(sorted(missing))
    assert sorted(index for chunks in queue for index in chunks) == sorted(missing)
    for chunks in queue:
        assert chunks == list(range(chunks[0], chunks[0] + len(chunks)))
        assert len(chunks) <= CHUNKS_PER_REQUEST


def test_a_partial_file_resumes_with_what_matches_and_nothing_else(tmp_path: Path) -> None:
    content = content_of(3 * MIB + 5)
    artifact = described(content)
    target = tmp_path / "folder" / "a.bin"
    file = PartialFile.open(target)
    file.expect(artifact)
    assert file.missing == {0, 1, 2, 3}
    put(file, artifact, content, [3, 1])
    file.close()
    path = target.with_name("a.bin.partial")
    damaged = bytearray(path.read_bytes())
    damaged[MIB + 7] ^= 1
    path.write_bytes(damaged)
    again = PartialFile.open(target)
    again.expect(artifact)
    assert again.missing == {0, 1, 2}
    assert again.done_bytes == 5
    put(again, artifact, content, [0, 1, 2])
    again.finish()
    again.close()
    assert target.read_bytes() == content
    assert [entry.name for entry in target.parent.iterdir()] == ["a.bin"]


def test_a_wrong_chunk_is_not_written(tmp_path: Path) -> None:
    artifact = described(content_of(2 * MIB))
    file = PartialFile.open(tmp_path / "a.bin")
    file.expect(artifact)
    assert not file.write(artifact, 0, memoryview(content_of(MIB, seed=1)))
    assert file.path.stat().st_size == 0
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(artifact, 1, memoryview(content_of(2 * MIB))[MIB:])


def test_two_fetches_of_one_file_do_not_share_a_partial_file(tmp_path: Path) -> None:
    content = content_of(2 * MIB)
    artifact = described(content)
    first, second = PartialFile.open(tmp_path / "a.bin"), PartialFile.open(tmp_path / "a.bin")
    assert first.path != second.path
    for file in (first, second):
        file.expect(artifact)
        put(file, artifact, content, [0, 1])
    second.finish()
    second.close()
    first.finish()
    first.close()
    assert is_complete(tmp_path / "a.bin", artifact)
    abandoned = PartialFile.open(tmp_path / "a.bin"), PartialFile.open(tmp_path / "a.bin")
    for file in abandoned:
        file.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.bin", "a.bin.partial"]


def test_what_has_no_room_is_refused_before_a_byte_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = described(content_of(2 * MIB))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": MIB})())
    file = PartialFile.open(tmp_path / "a.bin")
    with pytest.raises(OSError, match="2097152 more bytes are needed, 1048576 are free") as error:
        file.expect(artifact)
    assert error.value.errno == errno.ENOSPC
    file.close()


def test_an_empty_file_is_complete_at_once(tmp_path: Path) -> None:
    artifact = described(b"")
    file = PartialFile.open(tmp_path / "empty")
    file.expect(artifact)
    assert file.missing == set()
    file.finish()
    file.close()
    assert is_complete(tmp_path / "empty", artifact)
    assert not is_complete(tmp_path / "absent", artifact)


def answered(frames: list[Frame] | bytes) -> FetchStream:
    """A stream on which these answers have come."""
    reader = asyncio.StreamReader()
    if isinstance(frames, bytes):
        reader.feed_data(frames)
    else:
        for frame in frames:
            reader.feed_data(frame.encode_head() + b"".join(frame.payload))
    reader.feed_eof()
    return FetchStream(reader, None, 1.0, None)  # type: ignore[arg-type]


def chunk(index: int, data: bytes, **more: object) -> Frame:
    return Frame(Kind.CHUNK, {"index": index, **more}, [memoryview(data)])


def test_a_document_comes_back_whole() -> None:
    async def scenario() -> None:
        common = {"nbytes": 7, "protocol": PROTOCOL_VERSION}
        assert (
            await answered([chunk(0, b"abcd", **common), chunk(1, b"efg", **common)]).document(7)
            == b"abcdefg"
        )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "frames",
    [
        [chunk(0, b"abcd", nbytes=8, protocol=PROTOCOL_VERSION)],  # over the limit of 7
        [chunk(0, b"abcd", nbytes=3, protocol=PROTOCOL_VERSION)],  # more than announced
        [chunk(0, b"", nbytes=3, protocol=PROTOCOL_VERSION)],  # nothing, for ever
        [chunk(1, b"abc", nbytes=3, protocol=PROTOCOL_VERSION)],  # out of order
        [chunk(0, b"abc")],
        [Frame(Kind.COMMIT, {})],
        b"\x05\x00\x00\x00\x00\x00\x00\x00hello",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x00\x00\x20\x00\x80",
    ],
)
def test_a_malformed_document_is_a_frame_error(frames: list[Frame] | bytes) -> None:
    async def scenario() -> None:
        with pytest.raises(FrameError):
            await answered(frames).document(7)

    asyncio.run(scenario())


def test_a_holders_words_are_bounded_and_printable() -> None:
    async def scenario() -> None:
        runs = [{"run": "\x1b[2J" + "r" * 500, "name": 3}, "no map", None] * 100
        header = {"reason": "several_runs", "detail": "x\x1b]0;evil\x07" * 1000, "runs": runs}
        with pytest.raises(HolderError) as error:
            await answered([Frame(Kind.REFUSED, header)]).chunk(0)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 3000
        assert error.value.is_final

    asyncio.run(scenario())


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=64), st.integers(0, 200), st.integers(0, 200))
def test_rubbish_never_raises_anything_unexpected(data: bytes, header: int, payload: int) -> None:
    async def scenario() -> None:
        stream = answered(header.to_bytes(4, "little") + payload.to_bytes(4, "little") + data)
        with pytest.raises((FrameError, HolderError, asyncio.IncompleteReadError)):
            await stream.document(100)

    asyncio.run(scenario())


def test_an_error_lists_the_cause_of_every_holder() -> None:
    error = TransferError("no holder gave a.bin", {"peer1": "busy", "peer2": "gone"})
    assert str(error) == "no holder gave a.bin:\n  peer1: busy\n  peer2: gone"
    assert error.causes == {"peer1": "busy", "peer2": "gone"}
