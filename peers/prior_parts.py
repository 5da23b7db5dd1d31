"""The parts of a run that have a prior of their own, in the order in which plans name them: boundaries, then stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.anchor.registry import needs_prior
from swarm.manifest import RunManifest


@dataclass(frozen=True, slots=True)
class PriorPart:
    """What a prior is for: boundary `ordinal` (between stages ordinal and ordinal + 1), or the corrector of stage
    `ordinal`.
    """

    kind: Literal["boundary", "corrector"]
    ordinal: int

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages whose peers need it."""
        return (self.ordinal, self.ordinal + 1) if self.kind == "boundary" else (self.ordinal,)

    @property
    def name(self) -> str:
        """In the names of files: `boundary-0`, `corrector-2`."""
        return f"{self.kind}-{self.ordinal}"

    def __str__(self) -> str:
        """As messages name it."""
        return (
            f"boundary {self.ordinal}"
            if self.kind == "boundary"
            else f"the corrector of stage {self.ordinal}"
        )


def parts_of(manifest: RunManifest) -> tuple[PriorPart, ...]:
    """A run's parts: every boundary, and every stage if the run's corrector needs a prior."""
    stages = manifest.model.stages
    boundaries = tuple(PriorPart("boundary", boundary) for boundary in range(stages - 1))
    if not needs_prior(manifest.corrector):
        return boundaries
    return boundaries + tuple(PriorPart("corrector", stage) for stage in range(stages))
