"""What a peer makes of priors: of a boundary's a codec (a corrector's: `corrections`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swarm.activation.base import BoundaryCodec
from swarm.activation.versions import VersionedCodec
from swarm.anchor.boundary_prior import boundary_specs, load_boundary_prior
from swarm.anchor.prior_file import PriorFileError, prior_bytes_limit
from swarm.manifest import RunManifest

CodecOf = Callable[[int, dict[str, Tensor]], BoundaryCodec]
"""Makes the codec of a boundary from a prior's arrays. Raises ValueError."""


class PriorUse(Protocol):
    """What is made of the priors of one part. limit_bytes: largest file that can be one."""

    limit_bytes: int

    def holds(self, sha256: str) -> bool:
        """Whether that of the prior with this hash is here; "" stands for the run's initial one."""

    def load(self, path: Path) -> Any:
        """Make it from a file, in any thread. Raises PriorFileError for a file that is no prior of this part,
        ValueError for values that it cannot have, OSError.
        """

    def add(self, sha256: str, made: Any) -> None:
        """Hold what `load` made."""

    def retain(self, wanted: Collection[str]) -> None:
        """Let go of all but these."""


class BoundaryUse:
    """The priors of a boundary are made into codecs."""

    def __init__(self, codec: VersionedCodec, codec_of: CodecOf, manifest: RunManifest) -> None:
        self._codec, self._codec_of, self._manifest = codec, codec_of, manifest
        self.holds, self.add, self.retain = codec.holds, codec.add, codec.retain
        self.limit_bytes = prior_bytes_limit(boundary_specs(manifest.codec, manifest.model.hidden_size))

    def load(self, path: Path) -> BoundaryCodec:
        """See PriorUse."""
        boundary, manifest = self._codec.boundary, self._manifest
        prior = load_boundary_prior(path, manifest.codec, manifest.model.hidden_size)
        if prior.boundary != boundary:
            raise PriorFileError(f"it is the prior of boundary {prior.boundary}")
        for name, array in prior.arrays.items():
            if array.is_floating_point() and not bool(torch.isfinite(array).all()):
                raise ValueError(f"{name!r} holds values that are not finite")
        return self._codec_of(boundary, dict(prior.arrays))
