"""Which processes a test is answerable for."""

from __future__ import annotations

import psutil


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
