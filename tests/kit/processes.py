"""Which processes and files a test is answerable for."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import uvloop


@contextmanager
def loop_that_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[asyncio.Runner]:
    """A loop for a module's tests on real daemons; at its end no process and no temporary file may be left."""
    tmp_path_factory.getbasetemp()  # made before the folder for temporary files is another
    patch = pytest.MonkeyPatch()
    with (
        tempfile.TemporaryDirectory(prefix="sp-") as directory,  # short: it will hold sockets
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        patch.setattr("tempfile.tempdir", directory)
        yield runner
        patch.undo()
        assert [child for child in own_children() if child.status() != psutil.STATUS_ZOMBIE] == []
        assert list(Path(directory).iterdir()) == []


def own_children() -> list[psutil.Process]:
    """Descendants of this process, less those that outlive a single test by design.

    These are the host of the test peers with its own, and torch's manager of shared memory, which torch starts
    at the first shared tensor (a streamed hub data set makes one) and keeps until the process ends.
    """
    found = []
    for child in psutil.Process().children():
        try:
            if "tests.kit.host" not in child.cmdline() and child.name() != "torch_shm_manager":
                found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found
