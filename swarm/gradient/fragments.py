"""Parts of a stage that are averaged in turn, each with a compressor of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm.gradient.compressor import Averaged, Compression, Compressor, Phase
from swarm.gradient.config import CompressorConfig
from swarm.gradient.outer_config import LocalStepsConfig, due
from swarm.gradient.registry import build_compressor
from swarm.gradient.select import random_words
from swarm.model.trainable import TrainableSet

_STRATA = 2**16


@dataclass(frozen=True, slots=True)
class Fragment:
    """What is averaged together: its layout, and its places in the stage's flat vector (spans, or int32 [numel of the
    fragment]).
    """

    trainable: TrainableSet
    places: tuple[slice, ...] | Tensor

    def gather(self, flat: Tensor) -> Tensor:
        """[numel of the stage] -> [numel of the fragment], on the same device."""
        if isinstance(self.places, Tensor):
            return flat[self.places.to(flat.device)]
        return torch.cat([flat[span] for span in self.places]) if self.places else flat.new_empty(0)

    def scatter(self, part: Tensor, flat: Tensor) -> None:
        """Write [numel of the fragment] to its places in [numel of the stage]."""
        if isinstance(self.places, Tensor):
            flat[self.places.to(flat.device)] = part
            return
        start = 0
        for span in self.places:
            count = span.stop - span.start
            flat[span] = part[start : start + count]
            start += count


def build_fragments(config: LocalStepsConfig, trainable: TrainableSet, run_seed: int) -> tuple[Fragment, ...]:
    """The fragments of an outer loop."""
    if config.name == "sparta":
        return random_slices(trainable.numel, config.fragments, run_seed)
    return split_into_fragments(trainable, config.fragments)


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


def random_slices(elements: int, count: int, run_seed: int) -> tuple[Fragment, ...]:
    """Disjoint random slices that cover a vector: every `count` consecutive elements are dealt to the slices in an
    order that follows from the run's seed. (SPARTA permutes whole tensors; this is as random, in less memory.) Empty
    slices are left out.
    """
    places: list[list[np.ndarray[tuple[int], np.dtype[np.int32]]]] = [[] for _ in range(count)]
    for block, first in enumerate(range(0, elements, _STRATA * count)):
        strata = min(_STRATA, -(-(elements - first) // count))
        words = random_words(strata * count, "sparta", run_seed, block).reshape(strata, count)
        dealt = np.argsort(words, axis=1, kind="stable") + count * np.arange(strata)[:, None] + first
        for number in range(count):
            chosen = dealt[:, number]
            places[number].append(chosen[chosen < elements].astype(np.int32))
    slices = []
    for parts in places:
        index = torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.int32)
        if index.numel():
            layout = TrainableSet.of({"slice": torch.empty(index.numel(), device="meta")})
            slices.append(Fragment(layout, index))
    return tuple(slices)


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
        self.fragments = build_fragments(loop, trainable, run_seed)
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
