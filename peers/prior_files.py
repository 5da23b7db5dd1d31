"""Priors as files: under which names they are kept and served."""

from __future__ import annotations

import hashlib
from pathlib import Path

from peers.prior_parts import PriorPart


def prior_file_name(part: PriorPart, sha256: str) -> str:
    """Name under which peers serve a prior."""
    return f"prior/{part.name}/{sha256}"


def prior_path(directory: Path, part: PriorPart, sha256: str) -> Path:
    """Where a prior is kept."""
    return directory / f"{part.name}-{sha256}.safetensors"


def write_prior(directory: Path, part: PriorPart, data: bytes) -> tuple[str, Path]:
    """Keep a prior that was made here, whole or not at all; returns its hash and file. Raises OSError."""
    sha256 = hashlib.sha256(data).hexdigest()
    path = prior_path(directory, part, sha256)
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_bytes(data)
    partial.replace(path)
    return sha256, path
