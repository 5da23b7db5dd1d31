"""A causal LM without weights, and what is left of it when only one stage's part is kept.

The trunk's own forward stays in charge: it computes masks, rotary embeddings and whatever else its family
does around the decoder layers. Layers of other stages are replaced by placeholders that pass the hidden
states through. The first one of a later stage ignores what it is given and injects the hidden states received
from the previous stage, so an embedding scale or multiplier is never applied twice; the one after the last
layer keeps the hidden states for the next stage, so nothing that follows can touch them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from swarm.model import attention
from swarm.model.families import DOCUMENT_ATTENTION, attention_implementation, training_config
from swarm.model.plan import NoPipelinePlan, PipelinePlan


class PassThrough(nn.Module):
    """Stands where a layer of another stage, or another stage's final norm, would be."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        # Trunks look at plain attributes of their layers (attention_type, layer_idx) to choose a mask.
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | bool) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states as they came."""
        return hidden_states


class Inject(PassThrough):
    """Stands for layer 0 in a later stage: answers with the hidden states set in `received`."""

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The received hidden states [B, T, H]; the argument is ignored."""
        if self.received is None:
            raise RuntimeError("a later stage's trunk ran without received hidden states")
        return self.received


class Capture(PassThrough):
    """Stands for the layer after the stage's last one: keeps its input in `captured`."""

    captured: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the hidden states [B, T, H] and pass them through."""
        self.captured = hidden_states
        # What the trunk does with its output from here on is thrown away: no graph for it.
        return hidden_states.detach()


class Absent(nn.Module):
    """Stands for a module that lives on another stage and must not run here."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Never called by a correct trunk. Raises RuntimeError."""
        raise RuntimeError("this module lives on another stage")


def build_skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The whole causal LM on the meta device: shapes and names, no memory.

    config: transformers configuration; the model gets `training_config(config)`.
    """
    from transformers import AutoModelForCausalLM

    trained = training_config(config)
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(
            trained, dtype=dtype, attn_implementation=attention_implementation(trained)
        )
    if trained.model_type in DOCUMENT_ATTENTION and causal.config._attn_implementation == "sdpa":
        attention.register()
        causal.config._attn_implementation = attention.NAME
    return causal.eval()


def head_name(causal: Any) -> str:
    """Attribute name of the output head in the causal LM (`lm_head`, `embed_out`).

    Raises NoPipelinePlan if the head is not a direct child.
    """
    head = causal.get_output_embeddings()
    for name, module in causal.named_children():
        if module is head:
            return str(name)
    raise NoPipelinePlan(f"the output head of {type(causal).__name__} is not a direct child of the model")


def carve(causal: Any, plan: PipelinePlan, first: int, last_exclusive: int) -> None:
    """Replace, in place, what does not belong to layers [first, last_exclusive) by placeholders.

    The first stage keeps the embedding, the last one the final norm and the head.
    Raises NoPipelinePlan if the trunk has parameters the plan does not mention.
    """
    trunk = causal.base_model
    layers = getattr(trunk, plan.layers)
    count = len(layers)
    known = {plan.embedding, plan.layers, plan.norm}
    for name, module in trunk.named_children():
        if name not in known and any(True for _ in module.parameters()):
            raise NoPipelinePlan(
                f"{type(trunk).__name__}.{name} has weights but no place in the pipeline plan"
            )
    if any(True for _ in trunk.parameters(recurse=False)):
        raise NoPipelinePlan(f"{type(trunk).__name__} has weights of its own outside the pipeline plan")
    for index in range(count):
        if not first <= index < last_exclusive:
            kind = Inject if index == 0 else Capture if index == last_exclusive else PassThrough
            layers[index] = kind(layers[index])
    if first > 0:
        setattr(trunk, plan.embedding, Absent())
    if last_exclusive < count:
        setattr(trunk, plan.norm, PassThrough(getattr(trunk, plan.norm)))
        for name, module in list(causal.named_children()):
            if module is not trunk:
                setattr(causal, name, Absent())


class _GivenTrunk(nn.Module):
    """Stands for the trunk when only the head runs: answers with the hidden states set in `hidden`."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> _TrunkOutput:
        """The given final hidden states, in the form a causal LM reads its trunk's output."""
        if self.hidden is None:
            raise RuntimeError("the head ran without hidden states")
        return _TrunkOutput(self.hidden)


class _TrunkOutput:
    """A trunk's output with nothing in it but the hidden states: every other field reads as None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


class HeadOnly:
    """The causal LM's own forward from the final hidden states on: head, logit scale, softcap.

    It shares the head with the causal LM, but is no submodule of anything, so names appear once.
    """

    def __init__(self, causal: Any) -> None:
        self._trunk = _GivenTrunk()
        shell = copy.copy(causal)
        shell.__dict__ = dict(causal.__dict__)
        shell._modules = dict(causal._modules)
        shell._modules[causal.base_model_prefix] = self._trunk
        self._shell = shell

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of final (normed) hidden states [N, H], in the model's dtype."""
        self._trunk.hidden = hidden.unsqueeze(0)
        try:
            # The trunk is a stand-in, so the input only has to exist.
            output = self._shell(inputs_embeds=self._trunk.hidden, use_cache=False)
        finally:
            self._trunk.hidden = None
        logits: Tensor = output.logits
        return logits[0]
