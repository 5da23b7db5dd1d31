"""Outer loops: replicas take steps of their own, and average how far they have come every so many.

Every replica keeps two sets of weights: local ones, which its own steps change, and global ones, which change only by
averages and are therefore the same bits at all replicas. What is averaged is global minus local, so the outer optimizer
descends along it like along a gradient. A snapshot holds the global weights; a local step leaves nothing that a joiner
would need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from swarm.gradient.compressor import Averaged, Compression, Compressor, Phase
from swarm.gradient.config import CompressorConfig
from swarm.gradient.registry import build_compressor
from swarm.model.trainable import TrainableSet


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EveryStepConfig(_Config):
    """Gradients are averaged at every step."""

    name: Literal["every_step"] = "every_step"


class LocalStepsConfig(_Config):
    """Local steps with the run's optimizer, then an outer step on the average of old minus new.

    With outer learning rate 1 and momentum 0 this is local SGD: the replicas' weights are averaged (Stich 2019,
    arXiv 1805.09767). With momentum it is DiLoCo (arXiv 2311.08105), with fragments Streaming DiLoCo (arXiv 2501.18512)
    without its overlap.
    """

    name: Literal["local_sgd", "diloco", "streaming_diloco"]
    every: int = Field(ge=1, description="H: steps from one average of a weight to the next")
    learning_rate: float = Field(default=1.0, gt=0, le=2, description="of the outer optimizer")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="of the outer optimizer (Nesterov)")
    fragments: int = Field(
        default=1, ge=1, le=64, description="F: parts of a stage that are averaged in turn"
    )
    keep_local: float = Field(
        default=0.0, ge=0, lt=1, description="share of the local weights that stays when global ones come"
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_name(cls, data: object) -> object:
        """DiLoCo's own values where none are given: outer learning rate 0.7, momentum 0.9; four fragments."""
        if not isinstance(data, dict) or data.get("name") not in ("diloco", "streaming_diloco"):
            return data
        fragments = {"fragments": min(4, data.get("every", 4))} if data["name"] == "streaming_diloco" else {}
        return {"learning_rate": 0.7, "momentum": 0.9, **fragments, **data}

    @model_validator(mode="after")
    def _makes_sense(self) -> LocalStepsConfig:
        if self.name == "local_sgd" and (self.momentum or self.learning_rate != 1.0):
            raise ValueError("local_sgd averages weights: an outer momentum or learning rate makes it diloco")
        if self.name != "streaming_diloco" and self.fragments > 1:
            raise ValueError(
                f"{self.name} averages all weights at once: fragments belong to streaming_diloco"
            )
        if self.fragments > self.every:
            raise ValueError(
                f"{self.fragments} fragments every {self.every} steps: at most one can be averaged after a step"
            )
        return self


OuterConfig = Annotated[EveryStepConfig | LocalStepsConfig, Field(discriminator="name")]
"""When replicas average, and what becomes of the average."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tensors that are averaged together: their layout, and their places in the stage's flat vector."""

    trainable: TrainableSet
    spans: tuple[slice, ...]

    def gather(self, flat: Tensor) -> Tensor:
        """fp32 [numel of the stage] -> fp32 [numel of the fragment]."""
        return torch.cat([flat[span] for span in self.spans]) if self.spans else flat.new_empty(0)

    def scatter(self, part: Tensor, flat: Tensor) -> None:
        """Write fp32 [numel of the fragment] to its places in fp32 [numel of the stage]."""
        start = 0
        for span in self.spans:
            count = span.stop - span.start
            flat[span] = part[start : start + count]
            start += count


def split_into_fragments(trainable: TrainableSet, count: int) -> tuple[Fragment, ...]:
    """Layers strided over fragments: layer l of the model is in fragment l mod count; what is in no layer in the
    first. So each fragment has layers of all depths (Streaming DiLoCo, section 2.2). Empty ones are left out.
    """
    members: list[list[int]] = [[] for _ in range(count)]
    for number, name in enumerate(trainable.names):
        layer = re.search(r"\.(\d+)\.", name)
        members[int(layer.group(1)) % count if layer else 0].append(number)
    fragments = []
    for chosen in members:
        if not chosen:
            continue
        numels = trainable.numels
        shapes = {trainable.names[i]: torch.empty(trainable.shapes[i], device="meta") for i in chosen}
        spans = tuple(slice(trainable.offsets[i], trainable.offsets[i] + numels[i]) for i in chosen)
        fragments.append(Fragment(TrainableSet.of(shapes), spans))
    return tuple(fragments)


def due(config: LocalStepsConfig, fragments: int, step: int, total_steps: int) -> tuple[int, ...]:
    """Fragments that are averaged after a step: number f when step + 1 = (f + 1) H / F, rounded down, modulo H; after
    the run's last step all of them, so that all replicas end with the same weights.
    """
    if step + 1 == total_steps:
        return tuple(range(fragments))
    place = (step + 1) % config.every
    return tuple(f for f in range(fragments) if (f + 1) * config.every // fragments % config.every == place)


class LocalSteps:
    """The outer loop of one stage at one replica.

    globals: fp32 [numel], the weights that all replicas share; momentum: fp32 [numel], of the outer optimizer. Both
    are common state: functions of the averages alone.
    """

    def __init__(
        self, config: LocalStepsConfig, trainable: TrainableSet, total_steps: int, start: Tensor
    ) -> None:
        self.config = config
        self.fragments = split_into_fragments(trainable, config.fragments)
        self.globals = start.detach().cpu().clone()
        self.momentum = torch.zeros_like(self.globals)
        self._total_steps = total_steps

    def due(self, step: int) -> tuple[int, ...]:
        """Fragments that are averaged after this step; none after a local one."""
        return due(self.config, len(self.fragments), step, self._total_steps)

    def difference(self, local: Tensor) -> Tensor:
        """Old minus new: fp32 [numel]."""
        return self.globals - local

    def apply(self, average: Tensor, step: int, local: Tensor) -> None:
        """Take the averaged difference D (fp32 [numel]; zero in fragments that are not due) in, for what is due:

            m <- mu m + D;   global <- global - lr (mu m + D);   local <- (1 - a) global + a local

        Changes `local` (fp32 [numel]) in place; after the last step a = 0. Raises ValueError, with nothing changed, if
        D is not finite.
        """
        if not bool(torch.isfinite(average).all()):
            raise ValueError(f"the averaged difference of step {step} is not finite")
        config = self.config
        keep = 0.0 if step + 1 == self._total_steps else config.keep_local
        for number in self.due(step):
            for span in self.fragments[number].spans:
                # One operation at a time: a fused one rounds differently on another machine.
                self.momentum[span] = self.momentum[span] * config.momentum + average[span]
                ahead = self.momentum[span] * config.momentum + average[span]
                self.globals[span] = self.globals[span] - ahead * config.learning_rate
                fresh = self.globals[span].to(local.device)
                local[span] = fresh if keep == 0.0 else fresh * (1.0 - keep) + local[span] * keep

    def state(self) -> dict[str, Tensor]:
        """What snapshots hold beside the global weights. A copy."""
        return {"momentum": self.momentum.clone()} if self.config.momentum else {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless this is what `state` gave, or nothing: the state before the first average."""
        if not state:
            return
        wanted = {"momentum"} if self.config.momentum else set()
        if set(state) != wanted:
            raise ValueError(f"outer state has {sorted(wanted)}, not {sorted(state)}")
        for name, value in state.items():
            if value.dtype != torch.float32 or value.shape != self.globals.shape:
                raise ValueError(
                    f"{name} must be float32 {tuple(self.globals.shape)}, got {value.dtype} {tuple(value.shape)}"
                )
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} is not finite")

    def load(self, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Begin from these global weights (fp32 [numel]) and this checked state."""
        self.globals.copy_(weights.detach().cpu())
        self.momentum.zero_()
        if "momentum" in state:
            self.momentum.copy_(state["momentum"])


class FragmentCompressor:
    """A compressor of each fragment, used when it is due: one compressor of the whole stage, which averages nothing
    after a local step. Its averages are zero in fragments that are not due.
    """

    def __init__(
        self,
        config: CompressorConfig,
        loop: LocalStepsConfig,
        trainable: TrainableSet,
        total_steps: int,
        run_seed: int,
    ) -> None:
        self._numel, self._loop, self._total_steps = trainable.numel, loop, total_steps
        self.fragments = split_into_fragments(trainable, loop.fragments)
        self._parts: list[Compressor] = [
            build_compressor(config, fragment.trainable, run_seed + number)
            for number, fragment in enumerate(self.fragments)
        ]

    def due(self, step: int) -> tuple[int, ...]:
        """Fragments that are averaged after a step."""
        return due(self._loop, len(self.fragments), step, self._total_steps)

    def phases(self, step: int) -> tuple[Phase, ...]:
        """See Compressor. None after a local step."""
        return tuple(phase for number in self.due(step) for phase in self._parts[number].phases(step))

    def begin(self, gradient: Tensor, step: int, weight: int) -> FragmentCompression:
        """See Compressor. gradient: old minus new, of the whole stage."""
        chosen = [
            (
                self.fragments[number],
                self._parts[number].begin(self.fragments[number].gather(gradient), step, weight),
            )
            for number in self.due(step)
        ]
        counts = [len(self._parts[number].phases(step)) for number in self.due(step)]
        return FragmentCompression(self._numel, chosen, counts)

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """See Compressor."""
        whole = torch.zeros(self._numel)
        wanted = [phase.elements for phase in self.phases(step)]
        if [average.numel() for average in averages] != wanted:
            raise ValueError(
                f"averages of {[a.numel() for a in averages]} elements where {wanted} were expected"
            )
        start = 0
        for number in self.due(step):
            count = len(self._parts[number].phases(step))
            part = self._parts[number].replay(averages[start : start + count], step)
            self.fragments[number].scatter(part, whole)
            start += count
        return whole

    def common_state(self) -> Mapping[str, Tensor]:
        """See Compressor."""
        return {
            f"{number}.{name}": tensor
            for number, part in enumerate(self._parts)
            for name, tensor in part.common_state().items()
        }

    def load_common_state(self, state: Mapping[str, Tensor]) -> None:
        """See Compressor."""
        parts: list[dict[str, Tensor]] = [{} for _ in self._parts]
        for name, tensor in state.items():
            number, dot, rest = name.partition(".")
            if not dot or not number.isascii() or not number.isdigit() or int(number) >= len(parts):
                raise ValueError(f"no fragment has state {name[:64]!r}; there are {len(parts)}")
            parts[int(number)][rest] = tensor
        before = [dict(part.common_state()) for part in self._parts]
        try:
            for part, its in zip(self._parts, parts, strict=True):
                part.load_common_state(its)
        except ValueError:
            for part, its in zip(self._parts, before, strict=True):
                part.load_common_state(its)
            raise

    def digest(self) -> str:
        """See Compressor."""
        return "/".join(part.digest() for part in self._parts)


class FragmentCompression:
    """See Compression: those of the due fragments, one after the other. counts: phases of each."""

    def __init__(
        self, numel: int, chosen: Sequence[tuple[Fragment, Compression]], counts: Sequence[int]
    ) -> None:
        self._numel, self._chosen = numel, list(chosen)
        self._order = [part for (_, part), count in zip(chosen, counts, strict=True) for _ in range(count)]
        self._next = 0

    def vector(self) -> Tensor:
        """See Compression."""
        return self._order[self._next].vector()

    def take(self, averaged: Averaged) -> None:
        """See Compression."""
        self._order[self._next].take(averaged)
        self._next += 1

    def result(self) -> Tensor:
        """See Compression. Zero in fragments that are not due."""
        whole = torch.zeros(self._numel)
        for fragment, part in self._chosen:
            fragment.scatter(part.result(), whole)
        return whole

    def commit(self) -> None:
        """See Compression."""
        for _, part in self._chosen:
            part.commit()
