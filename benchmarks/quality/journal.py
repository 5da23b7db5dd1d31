"""The journal of finished rows: JSON Lines, append-only, shared by processes and committed."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Journal:
    """Finished rows by the key of their configuration; of several lines with one key the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> dict[str, dict[str, Any]]:
        """All finished rows. Raises ValueError naming the line that is no record."""
        found: dict[str, dict[str, Any]] = {}
        if not self.path.is_file():
            return found
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                found[record["key"]] = record
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number} is no record: {error}") from error
        return found

    def append(self, record: dict[str, Any]) -> None:
        """Add a finished row, whole or not at all beside other processes that do the same."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(record, sort_keys=True) + "\n")
            file.flush()


@contextmanager
def claim(scratch: Path, key: str) -> Iterator[bool]:
    """Whether this process may run a row; False while another one runs it. The claim dies with its process."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / f"{key}.claim").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
