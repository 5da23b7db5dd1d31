"""Priors that an earlier life of a peer has left on the disk: nobody names or serves them any more."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

SWEEP_AGE_S = 24 * 3600.0
"""Younger ones may be held by another peer that shares the folder."""
_NAME = re.compile(
    r"^(boundary|corrector)-\d{1,6}-[0-9a-f]{64}\.(safetensors(\.([0-9a-f]{8}\.)?partial)?|new)$"
)


def sweep_priors(directory: Path, now: float | None = None) -> int:
    """Remove old priors, and what was half fetched or written of them, from a folder; returns how many.

    Other files stay. now: Unix time; None is that of the clock. Raises nothing: what cannot be removed stays.
    """
    removed = 0
    now = time.time() if now is None else now
    with suppress(OSError):
        for path in list(directory.iterdir()):
            with suppress(OSError):
                if _NAME.match(path.name) and now - path.stat().st_mtime > SWEEP_AGE_S:
                    path.unlink()
                    removed += 1
    return removed
