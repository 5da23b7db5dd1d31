"""Where a transformers causal LM can be cut: its own pipeline plan, read and checked.

A family publishes `base_model_pp_plan`: the modules its trunk runs through, in order, with their inputs and
outputs. A run cuts between decoder layers only, so the plan must read embedding, (dropout), layers, final
norm. Families whose layers carry more than the hidden state from one to the next (recurrent state, shared
keys, several residual streams) also publish such a plan, but a stage that starts in the middle would be wrong
without that extra state, or packed documents would leak into each other. Silent errors of this kind are the
worst a swarm can have, hence the list of families that are known to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm.model.families import SUPPORTED_FAMILIES, unsupported_layer_types


class NoPipelinePlan(ValueError):  # noqa: N818  (a name of the public interface)
    """The model's family cannot be cut into stages; the message names the families that can."""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Attribute names inside a causal LM's trunk (`model.base_model`).

    embedding: the token embedding (input_ids -> inputs_embeds).
    layers: the list of decoder layers (hidden_states -> hidden_states).
    norm: the final norm.
    """

    embedding: str
    layers: str
    norm: str


def require_pipeline_plan(config: Any) -> PipelinePlan:
    """The pipeline plan of a causal LM's configuration.

    config: a transformers `PreTrainedConfig`.
    Raises NoPipelinePlan when the family publishes no plan, or one that stages cannot follow.
    """
    family = str(getattr(config, "model_type", type(config).__name__))
    published = getattr(config, "base_model_pp_plan", None)
    if not published:
        inner = getattr(config, "text_config", None)
        hint = f" Its text part, {inner.model_type!r}, may work alone." if inner is not None else ""
        raise NoPipelinePlan(
            f"model family {family!r} publishes no pipeline plan (base_model_pp_plan), so it cannot be cut "
            f"into stages.{hint} {_families_that_work()}"
        )
    plan = _read(published)
    if plan is None:
        raise NoPipelinePlan(
            f"the pipeline plan of model family {family!r} is not embedding, layers, norm: "
            f"{list(published)}. {_families_that_work()}"
        )
    if family not in SUPPORTED_FAMILIES:
        raise NoPipelinePlan(
            f"model family {family!r} has a pipeline plan, but its stages are not known to equal the uncut "
            f"model on packed documents. {_families_that_work()}"
        )
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise NoPipelinePlan(
            f"this {family!r} configuration lets tokens see later ones (use_bidirectional_attention or "
            "is_causal: false), so it is no language model to train; use a causal one"
        )
    refused = unsupported_layer_types(config)
    if refused:
        raise NoPipelinePlan(
            f"model family {family!r} with layer types {sorted(refused)} cannot keep packed documents apart; "
            "use a configuration with full or sliding attention only"
        )
    return plan


def _families_that_work() -> str:
    """A sentence naming the supported families."""
    return f"Families that work: {', '.join(sorted(SUPPORTED_FAMILIES))}."


def _read(published: dict[str, tuple[list[str], list[str]]]) -> PipelinePlan | None:
    """Names of embedding, layers and norm, or None if the plan has another form."""
    embedding = [name for name, (inputs, _) in published.items() if inputs == ["input_ids"]]
    layers = [
        name for name, (inputs, _) in published.items() if inputs == ["hidden_states", "attention_mask"]
    ]
    norm = [name for name, (inputs, _) in published.items() if inputs == ["hidden_states"]]
    if len(embedding) != 1 or len(layers) != 1 or len(norm) != 1:
        return None
    return PipelinePlan(embedding=embedding[0], layers=layers[0], norm=norm[0])
