"""Documents: where they come from, in which order, and how each failure reads."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm.data.hub import hub_documents
from swarm.data.recipe import DataConfig, DataError, SourceCounts, documents, is_heldout, resolve_kind


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def parquet_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder as `datasets` saves and the hub stores it: two Parquet shards and a second split."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    rows = [{"text": f"row {number}", "other": number} for number in range(30)]
    for shard in range(2):
        part = datasets.Dataset.from_list(rows[shard * 15 : shard * 15 + 15])
        part.to_parquet(folder / "data" / f"train-0000{shard}-of-00002.parquet")
    datasets.Dataset.from_list([{"text": "judge", "other": 0}]).to_parquet(
        folder / "data" / "test-00000-of-00001.parquet"
    )
    return folder


def names_and_texts(config: DataConfig) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in documents(config)]


def test_stdlib_leaves_out_tables_tests_and_installed_packages() -> None:
    names = [document.name for document in documents(DataConfig())]
    assert len(names) > 300
    assert {"ast.py", "json/decoder.py"} <= set(names)
    left_out = ("encodings", "pydoc_data", "test", "tests", "idle_test", "site-packages", "__pycache__")
    assert not [name for name in names if set(name.split("/")[:-1]) & set(left_out)]
    assert names == [document.name for document in documents(DataConfig())]


def test_seed_decides_which_documents_a_bound_keeps() -> None:
    first = [document.name for document in documents(DataConfig(max_documents=12))]
    more = [document.name for document in documents(DataConfig(max_documents=24))]
    other = [document.name for document in documents(DataConfig(max_documents=12, seed=1))]
    assert len(first) == 12
    assert more[:12] == first  # a raised bound only adds
    assert set(other) != set(first)
    assert first != sorted(first)


def test_max_bytes_stops_after_the_document_that_reaches_it() -> None:
    taken = list(documents(DataConfig(max_bytes=100_000)))
    sizes = [len(document.text.encode()) for document in taken]
    assert sum(sizes) >= 100_000 > sum(sizes[:-1])


def test_text_folder_is_read_recursively_and_skips_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfeins\r\nzwei")
    (tmp_path / "deep" / "er" / "b.md").write_text("größe", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("größe".encode("latin-1"))
    (tmp_path / "image.bin").write_bytes(b"PNG\0\0")
    (tmp_path / ".git" / "config").write_text("hidden")
    counts = SourceCounts()
    found = {document.name: document.text for document in documents(DataConfig(source=str(tmp_path)), counts)}
    assert found == {"a.txt": "eins\r\nzwei", "deep/er/b.md": "größe"}
    assert (counts.undecodable_files, counts.empty_documents) == (2, 1)


def test_single_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("once upon a time")
    assert names_and_texts(DataConfig(source=str(path))) == [("book.txt", "once upon a time")]


def test_json_lines_arrays_and_folders_of_both(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "null comes next"}, {"text": None}, {"text": "ü", "more": 1}])
    (tmp_path / "b.json").write_text(json.dumps([{"text": "x"}, {"text": "y"}]))
    (tmp_path / "c.jsonl").write_text("")
    counts = SourceCounts()
    config = DataConfig(source=str(tmp_path))
    assert resolve_kind(config) == "jsonl"
    found = {document.name: document.text for document in documents(config, counts)}
    assert found == {"a.jsonl#1": "null comes next", "a.jsonl#3": "ü", "b.json#1": "x", "b.json#2": "y"}
    assert counts.empty_documents == 1
    one = names_and_texts(DataConfig(source=str(tmp_path / "b.json")))
    assert sorted(one) == [("b.json#1", "x"), ("b.json#2", "y")]


def test_lone_surrogates_of_json_become_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "bad \\ud800 half"}\n')
    assert names_and_texts(DataConfig(source=str(path)))[0][1] == "bad ? half"


def test_text_field_names_another_field(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": "here"}])
    assert names_and_texts(DataConfig(source=str(path), text_field="body")) == [("a.jsonl#1", "here")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"body": "x"}', r"record 1: no field 'text'; set text_field to one of: body"),
        ('{"text": 3}', r"holds int, not text"),
        ("[1]", r"expected an object"),
        ('{"text": "x"', r"record 1: not valid JSON"),
        ("\n", r"holds no text"),
    ],
)
def test_malformed_json_names_the_record_and_the_fix(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        list(documents(DataConfig(source=str(path))))


def test_missing_and_empty_sources_are_clear_errors(tmp_path: Path) -> None:
    for source in ("/no/such/folder", "./corpus", "notes.txt", "a b"):
        with pytest.raises(DataError, match="no such file or folder"):
            list(documents(DataConfig(source=source)))
    with pytest.raises(DataError, match="no text files there"):
        list(documents(DataConfig(source=str(tmp_path))))
    with pytest.raises(DataError, match=r"no .json or .jsonl file there"):
        list(documents(DataConfig(source=str(tmp_path), kind="jsonl")))
    (tmp_path / "blank.txt").write_text("\n")
    with pytest.raises(DataError, match="holds no text \\(1 empty documents"):
        list(documents(DataConfig(source=str(tmp_path))))


def test_stdlib_without_sources_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.data.sources.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="source 'stdlib': no Python sources"):
        list(documents(DataConfig()))


def test_hub_format_is_read_from_a_local_folder(parquet_folder: Path) -> None:
    config = DataConfig(source=str(parquet_folder))
    assert resolve_kind(config) == "hub"
    found = names_and_texts(config)
    assert sorted(text for _, text in found) == sorted(f"row {number}" for number in range(30))
    assert found != sorted(found, key=lambda pair: int(pair[0].split("#")[1]))  # seeded order
    assert names_and_texts(config.model_copy(update={"max_documents": 4})) == found[:4]
    assert [t for _, t in names_and_texts(config.model_copy(update={"split": "test"}))] == ["judge"]
    single = DataConfig(source=str(parquet_folder / "data" / "train-00001-of-00002.parquet"))
    assert len(names_and_texts(single)) == 15


def test_hub_data_can_be_streamed(parquet_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `datasets` waits five seconds for its prefetching threads after every stream.
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
    config = DataConfig(source=str(parquet_folder), seed=3)
    streamed = [document.text for document in hub_documents(config, SourceCounts(), is_streamed=True)]
    assert sorted(streamed) == sorted(f"row {number}" for number in range(30))
    assert streamed == [document.text for document in hub_documents(config, SourceCounts(), is_streamed=True)]


def test_hub_errors_name_split_and_column(parquet_folder: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'body'; set text_field to one of: text, other"):
        list(documents(DataConfig(source=str(parquet_folder), text_field="body")))
    with pytest.raises(DataError, match=r"cannot load data set .* \(split 'validation'\)"):
        list(documents(DataConfig(source=str(parquet_folder), split="validation")))


def test_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_datasets(name: str, *arguments: object, **options: object) -> object:
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(DataError, match=r"pip install 'swarm-peer\[data\]'"):
        list(documents(DataConfig(source="owner/name")))


def test_hub_names_and_explicit_kinds_are_recognised(tmp_path: Path) -> None:
    assert resolve_kind(DataConfig(source="wikitext")) == "hub"
    assert resolve_kind(DataConfig(source="owner/some.data-set")) == "hub"
    assert resolve_kind(DataConfig(source=str(tmp_path), kind="hub")) == "hub"


@given(percent=st.integers(0, 50), n=st.integers(0, 400))
def test_heldout_share_is_met_at_every_length(percent: int, n: int) -> None:
    assert sum(is_heldout(position, percent) for position in range(n)) == -(-n * percent // 100)


def test_unknown_fields_and_values_out_of_range_are_refused() -> None:
    bad: list[dict[str, object]] = [
        {"colour": 1},
        {"heldout_percent": 51},
        {"sequence_length": 1},
        {"max_bytes": 0},
    ]
    for values in bad:
        with pytest.raises(ValidationError):
            DataConfig(**values)  # type: ignore[arg-type]
