"""Packing loses nothing, and chunks are what the index says or are refused."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save

from swarm.data.config import Document
from swarm.data.dataset import ChunkMissing, PackedDataset
from swarm.data.index import DataIndex
from swarm.data.pack import PackProgress, pack
from swarm.data.recipe import DataConfig, DataError
from swarm.data.tokens import EncodedPiece, document_frame, encode_documents, pieces

EOS, BOS = 256, 257


class ByteTokenizer:
    """One id per byte; 256 is EOS, 257 BOS. `template` says which of them the tokenizer adds by itself."""

    def __init__(self, eos: int | None = EOS, template: str = "", vocabulary_size: int = 300) -> None:
        self.eos_token_id = eos
        self.pad_token_id = None
        self.template = template
        self.vocabulary_size = vocabulary_size

    def __len__(self) -> int:
        return self.vocabulary_size

    def __call__(self, text: list[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        front = [BOS] if add_special_tokens and "b" in self.template else []
        back = [EOS] if add_special_tokens and "e" in self.template else []
        return {"input_ids": [[*front, *one.encode(), *back] for one in text]}


def write_documents(folder: Path, texts: list[str]) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


def read_documents(directory: Path, index: DataIndex, part: Any) -> list[list[int]]:
    """Undo the packing: EOS-terminated documents in the order they were written, filling left out."""
    dataset = PackedDataset(directory, index, part)
    if not len(dataset):
        return []
    tokens = dataset.batch(range(len(dataset))).token_ids.flatten().tolist()
    total = index.train_tokens if part == "train" else index.heldout_tokens
    found: list[list[int]] = [[]]
    for token in tokens[:total]:
        found[-1].append(token)
        if token == EOS:
            found.append([])
    assert found.pop() == []
    return found


@settings(deadline=None, max_examples=40)
@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=60),
        min_size=2,
        max_size=30,
    ),
    sequence_length=st.integers(2, 40),
    percent=st.sampled_from([0, 5, 20, 50]),
    chunk_bytes=st.sampled_from([1, 200, 1 << 20]),
)
def test_packing_loses_no_token_and_splits_by_whole_documents(
    texts: list[str], sequence_length: int, percent: int, chunk_bytes: int
) -> None:
    texts = [f"{number}:{text}" for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as name:
        source = write_documents(Path(name), texts)
        config = DataConfig(
            source=source, sequence_length=sequence_length, heldout_percent=percent, seed=percent
        )
        index = pack(config, ByteTokenizer(), Path(name) / "out", chunk_bytes=chunk_bytes)
        train = read_documents(Path(name) / "out", index, "train")
        heldout = read_documents(Path(name) / "out", index, "heldout")
    assert sorted(train + heldout) == sorted([*text.encode(), EOS] for text in texts)
    assert len(heldout) == index.heldout_documents == -(-len(texts) * percent // 100)
    assert not {bytes(one[:-1]) for one in train} & {bytes(one[:-1]) for one in heldout}
    assert index.train_samples == -(-index.train_tokens // sequence_length)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    sequence_length=st.integers(2, 24),
    chunk_bytes=st.sampled_from([1, 60, 1 << 20]),
)
def test_starts_and_losses_follow_documents_and_rows(
    lengths: list[int], sequence_length: int, chunk_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = write_documents(Path(name), ["x" * length for length in lengths])
        config = DataConfig(source=source, sequence_length=sequence_length, heldout_percent=0)
        index = pack(config, ByteTokenizer(), Path(name) / "out", chunk_bytes=chunk_bytes)
        dataset = PackedDataset(Path(name) / "out", index)
        batch = dataset.batch(range(len(dataset)))
    starts, tokens = batch.document_starts.flatten(), batch.token_ids.flatten()
    for position in range(index.train_tokens):
        is_start = position % sequence_length == 0 or int(tokens[position - 1]) == EOS
        assert bool(starts[position]) == is_start
    assert bool(starts[index.train_tokens :].all())  # the filling carries no loss
    assert not bool(batch.loss_positions.flatten()[index.train_tokens - 1 :].any())
    loss = batch.loss_positions
    assert not bool((loss[:, :-1] & batch.document_starts[:, 1:]).any()) and not bool(loss[:, -1].any())
    assert batch.loss_tokens == tokens.numel() - int(starts.sum())


@pytest.mark.parametrize(
    ("tokenizer", "prefix", "suffix"),
    [
        (ByteTokenizer(), (), (EOS,)),
        (ByteTokenizer(eos=None), (), ()),
        (ByteTokenizer(template="b"), (BOS,), (EOS,)),
        (ByteTokenizer(template="be"), (BOS,), (EOS,)),
    ],
)
def test_documents_are_framed_as_the_tokenizer_demands(
    tokenizer: ByteTokenizer, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> None:
    frame = document_frame(tokenizer)
    assert (frame.prefix, frame.suffix) == (prefix, suffix)


@given(text=st.text("ab\n", max_size=80), limit=st.integers(1, 20))
def test_pieces_are_the_text(text: str, limit: int) -> None:
    found = list(pieces(text, limit))
    assert "".join(found) == text
    assert max(map(len, found)) <= limit


def test_long_documents_are_tokenised_in_pieces_of_one_document() -> None:
    long = Document("long", ("a" * 99 + "\n") * 12_000)  # 1.2 million characters
    encoded: list[EncodedPiece] = list(
        encode_documents(ByteTokenizer(template="b"), [long, Document("b", "b")])
    )
    assert [(piece.is_first, piece.is_last) for piece in encoded] == [
        (True, False),
        (False, False),
        (False, True),
        (True, True),
    ]
    ids = [int(token) for piece in encoded for token in piece.ids]
    assert ids == [BOS, *long.text.encode(), EOS, BOS, ord("b"), EOS]


def packed(tmp_path: Path, **options: Any) -> tuple[Path, DataIndex]:
    source = write_documents(tmp_path / "in", [f"document {number} " * 5 for number in range(40)])
    config = DataConfig(source=source, sequence_length=16, **options)
    return tmp_path / "out", pack(config, ByteTokenizer(), tmp_path / "out", chunk_bytes=400)


def test_packing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert packed(tmp_path / "a")[1] == packed(tmp_path / "b")[1]


def test_index_survives_json_and_rejects_tampering(tmp_path: Path) -> None:
    _, index = packed(tmp_path)
    assert DataIndex.model_validate_json(index.model_dump_json()) == index
    values = index.model_dump()
    with pytest.raises(ValidationError, match="train_samples is"):
        DataIndex.model_validate({**values, "train_samples": values["train_samples"] + 1})
    for name in ("../../etc/passwd", "train-0.safetensors", "heldout-00000.safetensors"):
        chunk = {**values["train"][0], "name": name}
        with pytest.raises(ValidationError):
            DataIndex.model_validate({**values, "train": [chunk, *values["train"][1:]]})


def test_large_vocabularies_take_four_bytes_a_token(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "in", ["one", "two", "three"])
    config = DataConfig(source=source, sequence_length=8)
    index = pack(config, ByteTokenizer(vocabulary_size=70_000), tmp_path / "out")
    assert index.token_dtype == "int32"
    assert sorted(
        read_documents(tmp_path / "out", index, "train") + read_documents(tmp_path / "out", index, "heldout")
    )
    assert packed(tmp_path / "in")[1].token_dtype == "uint16"


def test_batches_come_in_the_order_asked_for(tmp_path: Path) -> None:
    directory, index = packed(tmp_path)
    dataset = PackedDataset(directory, index)
    assert len(index.train) > 10  # more than are kept loaded
    everything = dataset.batch(range(len(dataset)))
    asked = [len(dataset) - 1, 0, 7, 7, 3]
    batch = dataset.batch(asked)
    assert batch.sample_ids.tolist() == asked
    assert torch.equal(batch.token_ids, everything.token_ids[asked])
    assert torch.equal(batch.document_starts, everything.document_starts[asked])
    assert batch.token_ids.dtype == torch.int64


def test_chunks_are_fetched_one_by_one_into_an_empty_directory(tmp_path: Path) -> None:
    directory, index = packed(tmp_path)
    donor = PackedDataset(directory, index)
    joiner = PackedDataset(tmp_path / "joiner", index)
    asked = [0, len(donor) - 1, 1]
    wanted = joiner.chunks_for(asked)
    assert [chunk.name for chunk in wanted] == [index.train[0].name, index.train[-1].name]
    with pytest.raises(ChunkMissing) as raised:
        joiner.batch(asked)
    assert raised.value.names == tuple(chunk.name for chunk in wanted)
    for chunk in wanted:
        joiner.add_chunk(chunk.name, donor.chunk_bytes(chunk.name))
    assert joiner.missing(asked) == []
    assert torch.equal(joiner.batch(asked).token_ids, donor.batch(asked).token_ids)
    assert sorted(path.name for path in (tmp_path / "joiner").iterdir()) == sorted(c.name for c in wanted)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_corrupt_chunks_are_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory, index = packed(Path(name))
        good = PackedDataset(directory, index).chunk_bytes(index.train[0].name)
        position = data.draw(st.integers(0, len(good) - 1))
        flipped = bytearray(good)
        flipped[position] ^= data.draw(st.integers(1, 255))
        joiner = PackedDataset(Path(name) / "joiner", index)
        for bad in (bytes(flipped), good[:-1], good + b"\0", b""):
            with pytest.raises(DataError, match="fetch it from another peer"):
                joiner.add_chunk(index.train[0].name, bad)
        assert not joiner.has(index.train[0].name)
    with pytest.raises(DataError, match="has no chunk named"):
        joiner.add_chunk("../escape", good)


def test_damage_on_disk_is_found_reported_missing_and_repaired(tmp_path: Path) -> None:
    directory, index = packed(tmp_path)
    name = index.train[0].name
    good = (directory / name).read_bytes()
    (directory / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    dataset = PackedDataset(directory, index)
    assert dataset.missing([0]) == []  # the size is right: only reading finds it
    with pytest.raises(ChunkMissing):
        dataset.batch([0])
    assert [chunk.name for chunk in dataset.missing([0])] == [name]
    dataset.add_chunk(name, good)
    assert dataset.batch([0]).rows == 1


def test_only_chunks_used_least_recently_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, index = packed(tmp_path)
    monkeypatch.setattr("swarm.data.dataset._CACHED_CHUNKS", 2)
    dataset = PackedDataset(directory, index)
    read: list[str] = []
    real = dataset.chunk_bytes
    monkeypatch.setattr(dataset, "chunk_bytes", lambda name: (read.append(name), real(name))[1])
    rows = index.train[0].samples
    for number in (0, 1, 0, 2, 0, 1):  # 2 displaces 1, which is read again
        dataset.batch([number * rows])
    assert read == [index.train[number].name for number in (0, 1, 2, 1)]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "no safetensors file"),
        ({"token_ids": np.zeros((1, 16), np.uint16)}, "instead of"),
        (
            {"token_ids": np.zeros((1, 16), np.uint16), "document_starts": np.zeros((1, 2), np.uint8)},
            "no document",
        ),
        (
            {"token_ids": np.full((1, 16), 300, np.uint16), "document_starts": np.ones((1, 2), np.uint8)},
            "outside",
        ),
        (
            {"token_ids": np.zeros((2, 16), np.uint16), "document_starts": np.ones((2, 2), np.uint8)},
            "instead of",
        ),
    ],
)
def test_chunks_of_another_form_are_refused_even_with_the_right_hash(
    tmp_path: Path, tensors: dict[str, Any] | None, message: str
) -> None:
    content = b"no safetensors at all" if tensors is None else save(tensors)
    _, index = packed(tmp_path)
    digest = hashlib.sha256(content).hexdigest()
    chunk = index.train[0].model_copy(update={"sha256": digest, "nbytes": len(content), "samples": 1})
    forged = index.model_copy(update={"train": (chunk,), "train_samples": 1})
    dataset = PackedDataset(tmp_path / "forged", forged)
    dataset.add_chunk(chunk.name, content)
    with pytest.raises(DataError, match=message):
        dataset.batch([0])


def test_unknown_samples_and_empty_batches_are_refused(tmp_path: Path) -> None:
    directory, index = packed(tmp_path)
    dataset = PackedDataset(directory, index, "heldout")
    assert len(dataset) == index.heldout_samples
    for sample in (-1, len(dataset)):
        with pytest.raises(IndexError, match="heldout"):
            dataset.batch([sample])
    with pytest.raises(ValueError, match="at least one"):
        dataset.batch([])


def test_max_tokens_bounds_and_progress_reports(tmp_path: Path) -> None:
    seen: list[PackProgress] = []
    source = write_documents(tmp_path / "in", ["x" * 99] * 40)
    config = DataConfig(source=source, sequence_length=16, max_tokens=1000)
    index = pack(config, ByteTokenizer(), tmp_path / "out", seen.append)
    assert index.train_tokens + index.heldout_tokens == 1000
    assert seen[-1] == PackProgress(documents=10, text_bytes=990, tokens=1000)


def test_too_little_data_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "in", ["only one"])
    with pytest.raises(DataError, match="too few to hold out 5%"):
        pack(DataConfig(source=source, sequence_length=2), ByteTokenizer(), tmp_path / "out", chunk_bytes=1)
    assert list((tmp_path / "out").iterdir()) == []
    index = pack(DataConfig(source=source, heldout_percent=0), ByteTokenizer(), tmp_path / "out")
    assert (index.train_documents, index.heldout, index.heldout_samples) == (1, (), 0)
    with pytest.raises(DataError, match="exists already"):
        pack(DataConfig(source=source, heldout_percent=0), ByteTokenizer(), tmp_path / "out")
    assert PackedDataset(tmp_path / "out", index).batch([0]).rows == 1


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "in", ["abc", "def"])
    with pytest.raises(DataError, match="outside its vocabulary of 120"):
        pack(DataConfig(source=source), ByteTokenizer(vocabulary_size=120), tmp_path / "out")
