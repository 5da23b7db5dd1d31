"""What an anchor reports of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AnchorFigures:
    """What an anchor has done. version: of its last pass; seconds: of its last fetch, pass and fit."""

    passes: int = 0
    failed: int = 0
    version: int | None = None
    fetch_s: float = 0.0
    fit_s: float = 0.0
    prior_bytes: int = 0
