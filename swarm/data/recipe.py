"""From a `DataConfig` to documents: how the source is read, in which order, within which bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from swarm.data.config import DataConfig, DataError, Document, SourceCounts
from swarm.data.hub import HUB_FILE_FORMATS, hub_documents
from swarm.data.sources import is_json, jsonl_documents, stdlib_documents, text_documents, walk_files

__all__ = ["DataConfig", "DataError", "Document", "SourceCounts", "documents", "is_heldout", "resolve_kind"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_READERS = {
    "stdlib": stdlib_documents,
    "text": text_documents,
    "jsonl": jsonl_documents,
    "hub": hub_documents,
}


def resolve_kind(config: DataConfig) -> Literal["stdlib", "text", "jsonl", "hub"]:
    """How the source is read, by `kind` or, when that is "auto", by what the source is.

    A file is hub or jsonl by its suffix, else text; a folder is hub if it holds Parquet or Arrow files, jsonl
    if all its files are JSON, else text; a name that is not on this disk is a hub data set. Raises DataError
    for a name that is neither.
    """
    if config.kind != "auto":
        return config.kind
    if config.source == "stdlib":
        return "stdlib"
    path = Path(config.source).expanduser()
    if path.is_file():
        if path.suffix.lower() in HUB_FILE_FORMATS:
            return "hub"
        return "jsonl" if is_json(path) else "text"
    if path.is_dir():
        files = walk_files(path, lambda _: True, frozenset())
        if any(file.suffix.lower() in HUB_FILE_FORMATS for file in files):
            return "hub"
        return "jsonl" if files and all(map(is_json, files)) else "text"
    if _HUB_NAME.fullmatch(config.source) and not is_json(path) and path.suffix.lower() != ".txt":
        return "hub"
    raise DataError(
        f"source {config.source!r}: no such file or folder, and not the name of a Hugging Face data set; "
        "correct the path, or use 'stdlib'"
    )


def documents(config: DataConfig, counts: SourceCounts | None = None) -> Iterator[Document]:
    """The run's documents in their seeded order, within `max_documents` and `max_bytes` (not `max_tokens`).

    Documents without text are passed over; `counts` is filled in on the way. Raises DataError when the source
    is missing or malformed, or holds no text at all.
    """
    counts = SourceCounts() if counts is None else counts
    taken = 0
    taken_bytes = 0
    for document in _READERS[resolve_kind(config)](config, counts):
        if not document.text.strip():
            counts.empty_documents += 1
            continue
        yield document
        taken += 1
        taken_bytes += len(document.text.encode())
        if config.max_documents is not None and taken >= config.max_documents:
            return
        if config.max_bytes is not None and taken_bytes >= config.max_bytes:
            return
    if not taken:
        raise DataError(
            f"source {config.source!r} holds no text ({counts.empty_documents} empty documents, "
            f"{counts.undecodable_files} files that are not UTF-8); name one that does"
        )


def is_heldout(position: int, heldout_percent: int) -> bool:
    """Whether the document at `position` of the seeded order is held out.

    Spreads ceil(n * percent / 100) of the first n documents evenly, for every n: a bound that is raised later
    moves no document from one side to the other, and a small data set still has its share.
    """
    share_before = -(-position * heldout_percent // 100)
    return -(-(position + 1) * heldout_percent // 100) > share_before
