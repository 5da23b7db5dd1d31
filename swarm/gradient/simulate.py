"""A group's round in one process, with the exchange's own cuts, codings and order: the reference of real peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.gradient.compressor import Averaged, Compression, Compressor, Phase
from swarm.gradient.robust import RobustConfig, aggregate, screen
from swarm.gradient.split import Split, chunk_seed

DEFAULT_ROBUST = RobustConfig()


def average_phase(
    vectors: Sequence[Tensor],
    weights: Sequence[int],
    phase: Phase,
    *,
    seeds: tuple[int, int, int],
    most: int,
    robust: RobustConfig = DEFAULT_ROBUST,
) -> list[Averaged]:
    """Average one phase's vectors (fp32 [elements] of each member); what each member gets.

    seeds: run seed, step and number of the phase. most: elements of a chunk at most. robust: which parts count.
    """
    split = Split(phase.elements, len(vectors), most)
    average = torch.empty(phase.elements)
    kept = phase.elements if phase.needs_residual else 0
    counted, owed = ([torch.zeros(kept) for _ in vectors] for _ in range(2))
    for chunk in range(split.chunks):
        span, size, reducer = split.span(chunk), split.size(chunk), split.reducer(chunk)
        parts: dict[int, Tensor] = {}
        useless: set[int] = set()
        for member, weight in enumerate(weights):
            if weight > 0:
                part = vectors[member][span]
                if member != reducer or phase.needs_residual:
                    seed = chunk_seed(*seeds, chunk, member)
                    try:
                        part = phase.codec.decode(phase.codec.encode(part, seed), size)
                    except ValueError:
                        # As in an exchange: what cannot be decoded does not count.
                        useless.add(member)
                        continue
                parts[member] = part
                if phase.needs_residual:
                    counted[member][span] = part
        refused = useless | set(screen(parts, weights, robust))
        counting = [0 if member in refused else weight for member, weight in enumerate(weights)]
        for member in refused:
            if phase.needs_residual:
                counted[member][span] = 0.0
        mean = aggregate({i: part for i, part in parts.items() if i not in refused}, counting, robust)
        decoded = phase.codec.decode(phase.codec.encode(mean, chunk_seed(*seeds, chunk, -1)), size)
        average[span] = decoded
        if phase.needs_residual:
            owed[reducer][span] = (mean - decoded) * (sum(counting) / max(1, weights[reducer]))
    return [Averaged(average.clone(), counted[i], owed[i]) for i in range(len(vectors))]


def average_group(
    compressors: Sequence[Compressor],
    gradients: Sequence[Tensor],
    weights: Sequence[int],
    *,
    run_seed: int,
    step: int,
    most: int,
    commit: bool = True,
    robust: RobustConfig = DEFAULT_ROBUST,
) -> list[Tensor]:
    """A whole round of a group of at least two; returns every member's averaged gradient, fp32 [numel].

    commit: whether it commits; otherwise all state stays what it was. Raises ValueError as the compressors do.
    """
    rounds: list[Compression] = [
        compressor.begin(gradient, step, weight)
        for compressor, gradient, weight in zip(compressors, gradients, weights, strict=True)
    ]
    for number, phase in enumerate(compressors[0].phases(step)):
        vectors = [each.vector() for each in rounds]
        outcomes = average_phase(
            vectors, weights, phase, seeds=(run_seed, step, number), most=most, robust=robust
        )
        for each, outcome in zip(rounds, outcomes, strict=True):
            each.take(outcome)
    results = [each.result() for each in rounds]
    if commit:
        for each in rounds:
            each.commit()
    return results
