"""Where to cut: stages of about equal cost, and the ranges of layers that follow from the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from swarm.model.plan import require_pipeline_plan
from swarm.model.skeleton import build_skeleton, head_name

PARAMETER_WEIGHT = 0.25
"""Share of a stage's cost that goes by its parameters (memory, averaging, optimizer); the rest goes by its
FLOPs, since throughput is bound by the slowest stage's compute."""


@dataclass(frozen=True, slots=True)
class StageRange:
    """The decoder layers [first_layer, last_layer_exclusive) of one stage."""

    first_layer: int
    last_layer_exclusive: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.last_layer_exclusive - self.first_layer


def layer_count(config: Any) -> int:
    """Decoder layers of a configuration."""
    return int(config.num_hidden_layers)


def check_cuts(cuts: Sequence[int], layers: int) -> tuple[int, ...]:
    """The cuts as a tuple, if they are valid for a model of `layers` layers.

    cuts: index of the first layer of stages 1..P-1; strictly increasing, in [1, layers - 1].
    Raises ValueError naming the offending cuts.
    """
    checked = tuple(int(cut) for cut in cuts)
    outside = [cut for cut in checked if not 1 <= cut < layers]
    if outside:
        raise ValueError(f"cuts {outside} are outside 1..{layers - 1} for a model of {layers} layers")
    if any(second <= first for first, second in pairwise(checked)):
        raise ValueError(f"cuts must increase strictly, got {list(checked)}")
    return checked


def stage_ranges(cuts: Sequence[int], layers: int) -> tuple[StageRange, ...]:
    """The P = len(cuts) + 1 stages' layer ranges. Raises ValueError as `check_cuts` does."""
    edges = (0, *check_cuts(cuts, layers), layers)
    return tuple(StageRange(first, last) for first, last in pairwise(edges))


def equal_cost_cuts(config: Any, stages: int, sequence_length: int) -> tuple[int, ...]:
    """The P-1 cuts that make the most expensive stage as cheap as possible.

    Cost of a part = PARAMETER_WEIGHT x its share of all parameters + the rest x its share of all FLOPs, with
    embedding (parameters only) on stage 0 and final norm and head on the last stage.

    stages: P, at least 1.
    sequence_length: tokens per row; attention's share grows with it.
    Raises ValueError if there are more stages than layers, NoPipelinePlan if the family cannot be cut.
    """
    layers = layer_count(config)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{stages} stages do not fit a model of {layers} layers; choose 1 to {layers} stages"
        )
    embedding, layer_costs, head = _costs(config, sequence_length)
    layer_costs = [*layer_costs]
    layer_costs[0] += embedding
    layer_costs[-1] += head
    return _smallest_maximum(layer_costs, stages)


def _smallest_maximum(costs: list[float], stages: int) -> tuple[int, ...]:
    """Contiguous partition of `costs` into `stages` non-empty groups with the smallest maximum.

    Among equals, the one whose squared sums are smallest (so that the other stages are even too).
    Exact dynamic programme over (groups, end); a few thousand steps for a hundred layers.
    """
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    count = len(costs)
    best: list[tuple[float, float, tuple[int, ...]] | None]
    best = [None, *((prefix[end], prefix[end] ** 2, ()) for end in range(1, count + 1))]
    for group in range(2, stages + 1):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(group, count + 1):
            candidates = []
            for start in range(group - 1, end):
                before = best[start]
                if before is not None:
                    cost = prefix[end] - prefix[start]
                    candidates.append((max(before[0], cost), before[1] + cost**2, (*before[2], start)))
            following[end] = min(candidates)
        best = following
    result = best[count]
    if result is None:
        raise AssertionError("a partition exists whenever stages <= layers")
    return result[2]


def _costs(config: Any, sequence_length: int) -> tuple[float, list[float], float]:
    """Cost of embedding, of every layer, and of final norm and head; they sum to 1."""
    plan = require_pipeline_plan(config)
    causal = build_skeleton(config, torch.float32)
    trunk = causal.base_model
    embedding_parameters = sum(p.numel() for p in getattr(trunk, plan.embedding).parameters())
    head_parameters = sum(p.numel() for p in getattr(causal, head_name(causal)).parameters())
    layer_parameters, layer_flops = [], []
    for index, layer in enumerate(getattr(trunk, plan.layers)):
        layer_parameters.append(sum(parameter.numel() for parameter in layer.parameters()))
        layer_flops.append(
            2.0 * _active_parameters(config, layer) + _attention_flops(config, index, sequence_length)
        )
    head_flops = 2.0 * head_parameters
    parameters = embedding_parameters + sum(layer_parameters) + head_parameters
    flops = sum(layer_flops) + head_flops

    def cost(part_parameters: int, part_flops: float) -> float:
        by_size = PARAMETER_WEIGHT * part_parameters / parameters
        return float(by_size + (1.0 - PARAMETER_WEIGHT) * part_flops / flops)

    layer_costs = [cost(*layer) for layer in zip(layer_parameters, layer_flops, strict=True)]
    return cost(embedding_parameters, 0.0), layer_costs, cost(head_parameters, head_flops)


def _active_parameters(config: Any, layer: Any) -> float:
    """Matrix elements a token meets in a layer: of routed experts only the chosen ones."""
    experts = _first_of(config, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    chosen = _first_of(config, "num_experts_per_tok", "moe_k")
    share = min(1.0, chosen / experts) if experts and chosen else 1.0
    active = 0.0
    for name, parameter in layer.named_parameters():
        if parameter.ndim >= 2:
            active += float(parameter.numel()) * (share if ".experts." in f".{name}" else 1.0)
    return active


def _first_of(config: Any, *names: str) -> int | None:
    """The first of the configuration's fields that is set: families name the same thing differently."""
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if value), None)


def _attention_flops(config: Any, index: int, sequence_length: int) -> float:
    """FLOPs per token of scores and weighted values with the mean context of a causal (sliding) row."""
    layer_types = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    slides = layer_types is None or layer_types[index] == "sliding_attention"
    reach = min(window, sequence_length) if window is not None and slides else sequence_length
    context = reach - reach * (reach - 1) / (2.0 * sequence_length)
    head_dimension = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * int(config.num_attention_heads) * int(head_dimension) * context
