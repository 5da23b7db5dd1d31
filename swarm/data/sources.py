"""Readers of local files: the standard library, folders of text, JSON and JSON Lines.

Each takes its documents in a seeded permutation of all there are and reads them one at a time, so memory is
bounded by the longest document (and, for JSON Lines, eight bytes a line).
"""

from __future__ import annotations

import json
import os
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swarm.data.config import DataConfig, DataError, Document, SourceCounts
from swarm.data.order import permuted_index

_STDLIB_LEFT_OUT = frozenset(
    # Tables (encodings, pydoc_data) and tests teach little; the rest is not the standard library.
    {"encodings", "pydoc_data", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
_JSON_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
_SNIFFED_BYTES = 8192
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def seeded_order(seed: int, size: int) -> Iterator[int]:
    """range(size) in the run's document order."""
    return (permuted_index(position, size, seed=seed, purpose="documents") for position in range(size))


def walk_files(root: Path, is_wanted: Callable[[Path], bool], left_out: frozenset[str]) -> list[Path]:
    """Wanted files under `root` (or `root` itself if it is a file), sorted by path.

    Hidden files and folders, folders in `left_out` and links to folders are not entered.
    """
    if root.is_file():
        return [root]
    found = []
    for folder, folders, files in os.walk(root, followlinks=False):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        found += [path for path in paths if path.is_file() and is_wanted(path)]
    return sorted(found, key=lambda path: path.as_posix())


def read_text(path: Path) -> str | None:
    """The file's text, unchanged but for a byte order mark; None if it is not UTF-8 or holds NUL bytes.

    Raises DataError when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
            if b"\0" in head:  # binary: spare reading the rest
                return None
            content = head + file.read()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; fix its permissions or move it away"
        ) from error
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _documents_of_files(
    files: list[Path], root: Path, config: DataConfig, counts: SourceCounts
) -> Iterator[Document]:
    """One document per readable file, named by its path under `root`."""
    for number in seeded_order(config.seed, len(files)):
        path = files[number]
        text = read_text(path)
        if text is None:
            counts.undecodable_files += 1
            continue
        yield Document(path.name if path == root else path.relative_to(root).as_posix(), text)


def stdlib_documents(config: DataConfig, counts: SourceCounts) -> Iterator[Document]:
    """The source files of the running Python's standard library, without tests and tables.

    Raises DataError if this Python ships without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = walk_files(root, lambda path: path.suffix == ".py", _STDLIB_LEFT_OUT)
    if not files:
        raise DataError(
            f"source 'stdlib': no Python sources under {root}; use a Python that ships them or another source"
        )
    return _documents_of_files(files, root, config, counts)


def text_documents(config: DataConfig, counts: SourceCounts) -> Iterator[Document]:
    """One document per UTF-8 file of a folder (recursively), or the one file named.

    Raises DataError if there is no file.
    """
    root = Path(config.source).expanduser()
    files = walk_files(root, lambda _: True, frozenset({"__pycache__"})) if root.exists() else []
    if not files:
        raise DataError(
            f"source {config.source!r}: no text files there; name a file or a folder that holds some"
        )
    return _documents_of_files(files, root, config, counts)


def is_json(path: Path) -> bool:
    """Whether the name says JSON or JSON Lines."""
    return path.suffix.lower() in _JSON_SUFFIXES


def text_of_record(record: Any, config: DataConfig, place: str) -> str:
    """The text of one JSON object or data set row; null counts as empty.

    Raises DataError when `record` is no object, lacks the field or holds something else than text in it.
    Lone surrogates become question marks.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{place}: expected an object with a field {config.text_field!r}, got {type(record).__name__}"
        )
    if config.text_field not in record:
        fields = ", ".join(sorted(map(str, record))[:20]) or "none"
        raise DataError(f"{place}: no field {config.text_field!r}; set text_field to one of: {fields}")
    text = record[config.text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{place}: field {config.text_field!r} holds {type(text).__name__}, not text; "
            "set text_field to another"
        )
    # JSON can spell half a surrogate pair, which is no character and which tokenizers refuse.
    return text.encode("utf-8", "replace").decode()


def _is_json_array(path: Path) -> bool:
    """Whether the file's first character besides white space opens an array (else it is JSON Lines)."""
    with path.open("rb") as file:
        if file.read(3) != _BYTE_ORDER_MARK:
            file.seek(0)
        while block := file.read(_SNIFFED_BYTES):
            if stripped := block.lstrip():
                return stripped.startswith(b"[")
    return False


def _parse(content: bytes, place: str) -> Any:
    """Parsed JSON. Raises DataError naming the place."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both ValueErrors
        raise DataError(f"{place}: not valid JSON in UTF-8 ({error}); fix or remove it") from error


def _line_offsets(path: Path) -> array[int]:
    """Byte offsets of the lines that are not blank."""
    offsets = array("Q")
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                offsets.append(offset)
            offset += len(line)
    return offsets


def jsonl_documents(config: DataConfig, counts: SourceCounts) -> Iterator[Document]:
    """One document per JSON object: of a JSON Lines file, a file with one JSON array, or a folder of either.

    A file with one array is read whole. Raises DataError if there is none, and while reading at the first
    malformed record, naming file and record (counted from 1).
    """
    del counts  # malformed records are errors, not skipped
    root = Path(config.source).expanduser()
    files = walk_files(root, is_json, frozenset()) if root.exists() else []
    if not files:
        raise DataError(
            f"source {config.source!r}: no .json or .jsonl file there; name such a file or a folder of them"
        )
    return _documents_of_records(files, config)


def _documents_of_records(files: list[Path], config: DataConfig) -> Iterator[Document]:
    """The records of all files in one seeded order."""
    records: list[array[int] | list[Any]] = []
    for path in files:
        if _is_json_array(path):
            records.append(_parse(path.read_bytes(), str(path)))
        else:
            records.append(_line_offsets(path))
    ends: list[int] = []
    for content in records:
        ends.append((ends[-1] if ends else 0) + len(content))
    for position in seeded_order(config.seed, ends[-1]):
        number = next(index for index, end in enumerate(ends) if position < end)
        path, content = files[number], records[number]
        ordinal = position - (ends[number] - len(content))
        place = f"{path}, record {ordinal + 1}"
        if isinstance(content, array):
            with path.open("rb") as file:
                file.seek(content[ordinal])
                record = _parse(file.readline(), place)
        else:
            record = content[ordinal]
        yield Document(f"{path.name}#{ordinal + 1}", text_of_record(record, config, place))
