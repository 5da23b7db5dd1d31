"""What a reducer makes of its members' parts when some of them may be hostile or broken. Pure.

Each reducer decides for its own chunks alone: whatever it sends as the average is what counts anyway, so a decision
of its own gives it no new power, costs no round trip and fails no attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from swarm.gradient.split import weighted_mean
from swarm.gradient.state import is_finite

Refusal = Literal["not_finite", "norm", "size", "codec"]
"""Why a member's part of a chunk does not count; size and codec: its bytes are no chunk's."""

CLIP_ITERATIONS = 5


class RobustConfig(BaseModel):
    """How a run's reducers treat parts that stand out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    norm_bound: float | None = Field(
        default=10.0,
        gt=1,
        description="a part is refused whose norm is over so many times the median of the group's; none: any is taken",
    )
    centered_clip: float | None = Field(
        default=None,
        gt=0,
        description="CenteredClip: parts count up to this many times their median distance from the centre; none: mean",
    )


def screen(parts: Mapping[int, Tensor], weights: Sequence[int], config: RobustConfig) -> dict[int, Refusal]:
    """Members whose parts (fp32 [n], by position) do not count, and why.

    A part with a value that is not finite is refused, unless all have one: then the mean has one, and every member
    refuses to apply it. The norm bound needs three parts: between two nobody can tell which one is wrong. Norms are of
    parts as if all members had the largest weight, since noise falls with the root of the tokens behind it:
    ||x_i|| sqrt(w_i / max w) <= bound * (lower) median.
    """
    finite = {member: is_finite(part) for member, part in parts.items()}
    if not any(finite.values()):
        return {}
    refused: dict[int, Refusal] = {
        member: "not_finite" for member, is_sound in finite.items() if not is_sound
    }
    left = [member for member in parts if member not in refused]
    if config.norm_bound is None or len(left) < 3:
        return refused
    largest = max(weights[member] for member in left)
    norms = {
        member: float(torch.linalg.vector_norm(parts[member].double())) * (weights[member] / largest) ** 0.5
        for member in left
    }
    median = sorted(norms.values())[(len(norms) - 1) // 2]
    if median > 0:
        refused |= {member: "norm" for member, norm in norms.items() if norm > config.norm_bound * median}
    return refused


def aggregate(parts: Mapping[int, Tensor], weights: Sequence[int], config: RobustConfig) -> Tensor:
    """The average of the parts that count: fp32 [n]. weights: of all members, zero for those without a part here."""
    if config.centered_clip is None or len(parts) < 3:
        return weighted_mean(parts, weights)
    return centered_clip(parts, weights, config.centered_clip)


def centered_clip(parts: Mapping[int, Tensor], weights: Sequence[int], radius: float) -> Tensor:
    """CenteredClip (Karimireddy, He, Jaggi, arXiv 2012.10333), weighted: from the coordinates' median on,

        v <- v + sum_i w_i (x_i - v) min(1, tau / ||x_i - v||) / sum_i w_i

    tau: `radius` times the median of the first distances. parts: fp32 [n] by position; at least one of positive weight.
    """
    members = [member for member, weight in enumerate(weights) if weight > 0 and member in parts]
    stacked = torch.stack([parts[member].double() for member in members])
    share = torch.tensor([float(weights[member]) for member in members], dtype=torch.float64)
    share /= share.sum()
    centre = stacked.median(dim=0).values
    tau: float | None = None
    for _ in range(CLIP_ITERATIONS):
        distances = torch.linalg.vector_norm(stacked - centre, dim=1)
        if tau is None:
            tau = radius * float(distances.median())
        if tau == 0:  # most parts are equal: they are the centre
            break
        factors = share * (tau / distances.clamp(min=1e-300)).clamp(max=1.0)
        centre = centre + factors @ (stacked - centre)
    return centre.float()
