from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.swarm import Host, Swarm


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """The process that forks this worker's peers; started by the first test that needs one."""
    host = Host()
    yield host
    host.close()


@pytest.fixture
def swarm(host: Host, tmp_path: Path) -> Iterator[Swarm]:
    """An empty swarm; whatever a test starts in it is ended."""
    swarm = Swarm(host, tmp_path)
    yield swarm
    swarm.close()
