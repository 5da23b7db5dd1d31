"""Which processes a test is answerable for."""

from __future__ import annotations

import psutil


def own_children() -> list[psutil.Process]:
    """Descendants of this process, less the host of the test peers and its own, which outlive a single test."""
    found = []
    for child in psutil.Process().children():
        try:
            if "tests.kit.host" not in child.cmdline():
                found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found
