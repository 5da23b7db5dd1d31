"""Reader of Hugging Face data sets, by hub name or from a local folder in the hub's format (Parquet...)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarm.data.config import DataConfig, DataError, Document, SourceCounts
from swarm.data.sources import seeded_order, text_of_record

HUB_FILE_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}
"""Suffixes of the files a hub data set may consist of, and the builder that reads a single one."""

_SHUFFLE_BUFFER_ROWS = 2000


def hub_documents(
    config: DataConfig, counts: SourceCounts, *, is_streamed: bool | None = None
) -> Iterator[Document]:
    """One document per row of a split, in a seeded order.

    A bounded configuration of a data set on the hub is streamed, so that only what is read is downloaded: the
    order then is a shuffle of the files and of a window of 2000 rows instead of an exact permutation.
    `is_streamed` overrides that choice.

    Raises DataError when the `datasets` package is missing, the data set, subset or split cannot be loaded,
    or it has no column `text_field`.
    """
    del counts
    is_local = Path(config.source).expanduser().exists()
    if is_streamed is None:
        is_streamed = config.is_bounded and not is_local
    rows = _load(config, is_streamed)
    columns = rows.column_names
    if columns is not None and config.text_field not in columns:
        raise DataError(
            f"data set {config.source!r} has no column {config.text_field!r}; set text_field to one of: "
            + ", ".join(columns[:20])
        )
    return _streamed(rows, config) if is_streamed else _indexed(rows, config)


def _load(config: DataConfig, is_streamed: bool) -> Any:
    """The split as a `datasets.Dataset`, or `IterableDataset` if streamed. Raises DataError."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"source {config.source!r} is a Hugging Face data set, which needs the package 'datasets': "
            "pip install 'swarm-peer[data]'"
        ) from error
    path = Path(config.source).expanduser()
    where: dict[str, Any] = {"path": str(path) if path.exists() else config.source}
    if path.is_file():
        where = {
            "path": HUB_FILE_FORMATS.get(path.suffix.lower(), "parquet"),
            "data_files": {config.split: str(path)},
        }
    try:
        return datasets.load_dataset(**where, name=config.subset, split=config.split, streaming=is_streamed)
    except Exception as error:  # the library and its HTTP client raise many unrelated types
        subset = "" if config.subset is None else f", subset {config.subset!r}"
        raise DataError(
            f"cannot load data set {config.source!r} (split {config.split!r}{subset}): {error}; check that "
            "it is a file or folder here or a data set on the Hugging Face hub, and its subset and split"
        ) from error


def _indexed(rows: Any, config: DataConfig) -> Iterator[Document]:
    """Rows of a memory-mapped data set in the seeded permutation."""
    for number in seeded_order(config.seed, len(rows)):
        place = f"{config.source}, row {number}"
        yield Document(f"{config.split}#{number}", text_of_record(rows[number], config, place))


def _streamed(rows: Any, config: DataConfig) -> Iterator[Document]:
    """Rows of a streamed data set, shuffled within a window; named by their place in that order."""
    shuffled = rows.shuffle(seed=config.seed % (1 << 32), buffer_size=_SHUFFLE_BUFFER_ROWS)
    for number, row in enumerate(shuffled):
        place = f"{config.source}, row {number} of the stream"
        yield Document(f"{config.split}~{number}", text_of_record(row, config, place))
