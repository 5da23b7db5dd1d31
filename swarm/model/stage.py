"""One stage of a causal LM: consecutive decoder layers, run exactly as the uncut model runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm.batch import Batch
from swarm.model.attention import documents_of
from swarm.model.cut import StageRange, layer_count, stage_ranges
from swarm.model.loading import TensorSource, load_tensors
from swarm.model.loss import token_loss_sum
from swarm.model.packed import packed_context
from swarm.model.plan import PipelinePlan, require_pipeline_plan
from swarm.model.skeleton import Capture, HeadOnly, Inject, build_skeleton, carve, head_name
from swarm.model.trainable import FrozenPart, TrainableSet, frozen_parts


class StageModel(nn.Module):
    """The layers of one stage, with the embedding on stage 0, the final norm and head on the last.

    Tensor names are the uncut model's. All dropout is off, so a stage is a function of batch, hidden states
    and weights alone. One forward at a time (it keeps what it injects and captures in the module while it
    runs); the graphs of any number of forwards may be alive.
    """

    def __init__(
        self,
        causal: Any,
        plan: PipelinePlan,
        stage: int,
        ranges: Sequence[StageRange],
        dtype: torch.dtype,
        frozen: frozenset[FrozenPart],
    ) -> None:
        super().__init__()
        self.causal = causal
        self.plan = plan
        self.stage = stage
        self.stages = len(ranges)
        self.range = ranges[stage]
        self.dtype = dtype
        self.hidden_size = int(causal.config.hidden_size)
        self._head_name = head_name(causal) if self.is_last else None
        self._head = HeadOnly(causal) if self.is_last else None
        layers = getattr(causal.base_model, plan.layers)
        self._entry: Inject | None = None if self.is_first else layers[0]
        self._exit: Capture | None = None if self.is_last else layers[self.range.last_layer_exclusive]
        frozen_names = set(self._names_of(frozen))
        for name, parameter in causal.named_parameters():
            parameter.requires_grad_(name not in frozen_names)
        self.trainable_set = TrainableSet.of(self.named_trainable())

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.stages - 1

    def train(self, mode: bool = True) -> StageModel:
        """Keep evaluation mode: dropout, router noise and the like must never make a replay differ."""
        super().train(False)
        return self

    def named_trainable(self) -> dict[str, Tensor]:
        """Parameters that training changes, by the uncut model's names, in the module's order."""
        return {name: tensor for name, tensor in self.causal.named_parameters() if tensor.requires_grad}

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the stage, frozen ones included: what a stage file holds. Shares memory."""
        return {name: tensor.detach() for name, tensor in self.causal.state_dict().items()}

    def forward(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Run the stage's layers.

        hidden: [B, T, H] received from the previous stage; None on stage 0.
        Returns [B, T, H] for the next stage; on the last stage the final hidden states after the final norm.
        Raises ValueError if hidden is missing, superfluous or of another shape.
        """
        context = packed_context(self.causal.config, batch, self.dtype, self.device)
        if self._entry is None:
            if hidden is not None:
                raise ValueError("stage 0 takes no hidden states")
            context["input_ids"] = batch.token_ids.to(self.device)
        else:
            expected = (*batch.token_ids.shape, self.hidden_size)
            if hidden is None or tuple(hidden.shape) != expected:
                shape = None if hidden is None else tuple(hidden.shape)
                raise ValueError(f"stage {self.stage} needs hidden states {expected}, got {shape}")
            self._entry.received = hidden
            context["inputs_embeds"] = hidden.detach()
        try:
            with documents_of(batch):
                output = self.causal.base_model(**context)
            result: Tensor | None = output.last_hidden_state if self._exit is None else self._exit.captured
        finally:
            if self._entry is not None:
                self._entry.received = None
            if self._exit is not None:
                self._exit.captured = None
        if result is None:
            raise RuntimeError(f"the trunk of {type(self.causal).__name__} did not run all of its layers")
        return result

    def loss_sum(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Sum of the token losses at the loss positions: fp32 scalar. Last stage only.

        hidden: as for `forward`: what the previous stage sent (None with a single stage). Layers, final norm,
        head, logit scale and softcap are all in it; logits exist for loss positions only, chunk by chunk.
        Raises RuntimeError on any other stage.
        """
        head = self._require_head()
        final = self.forward(batch, hidden)
        device = final.device
        chosen = batch.loss_positions.flatten().nonzero().squeeze(1)
        # The label of a loss position is the next token of the same row, which is the next one in memory.
        labels = batch.token_ids.flatten()[chosen + 1].to(device)
        states = final.flatten(0, 1).index_select(0, chosen.to(device))
        module = getattr(self.causal, str(self._head_name))
        parameters = tuple(module.parameters())
        return token_loss_sum(states, labels, head, parameters, int(self.causal.config.vocab_size))

    def logits(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Logits [B, T, V] in the model's dtype, for evaluation and tests. Last stage only.

        Raises RuntimeError on any other stage.
        """
        head = self._require_head()
        final = self.forward(batch, hidden)
        logits = head(final.flatten(0, 1))
        return logits.view(*final.shape[:2], logits.shape[-1])

    @property
    def device(self) -> torch.device:
        """Device of the stage's tensors."""
        device: torch.device = next(self.causal.parameters()).device
        return device

    def _require_head(self) -> Callable[[Tensor], Tensor]:
        """The head. Raises RuntimeError unless this is the last stage."""
        if self._head is None:
            raise RuntimeError(
                f"stage {self.stage} of {self.stages} has no head; only the last stage has logits and loss"
            )
        return self._head

    def _names_of(self, parts: frozenset[FrozenPart]) -> Iterator[str]:
        """Names of the parameters that belong to the parts."""
        embedding = f"{self.causal.base_model_prefix}.{self.plan.embedding}."
        for module_name, module in self.causal.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                full = f"{module_name}.{name}"
                if (
                    ("embedding" in parts and full.startswith(embedding))
                    or ("head" in parts and module_name == self._head_name)
                    or ("norms" in parts and "norm" in type(module).__name__.lower())
                ):
                    yield full


def build_stage(
    config: Any,
    cuts: Sequence[int],
    stage: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tensors: TensorSource,
    freeze: frozenset[str] = frozenset(),
) -> StageModel:
    """Build one stage without ever holding another stage's weights.

    config: the model's transformers configuration.
    cuts: first layers of stages 1..P-1.
    stage: 0..P-1.
    dtype: compute dtype of the parameters; the file's dtype may differ.
    tensors: exactly the stage's tensors, by the uncut model's names, or the safetensors file that has them.
    freeze: parts that training leaves alone ("embedding", "head", "norms").
    Raises ValueError for bad cuts, stage, freeze or tensors that do not fit (missing and unexpected names and
    wrong shapes are listed), NoPipelinePlan if the family cannot be cut.
    """
    parts = frozen_parts(freeze)
    causal, plan, ranges = _carved(config, cuts, stage, dtype)
    load_tensors(causal, tensors, torch.device(device), f"stage {stage}")
    model = StageModel(causal, plan, stage, ranges, dtype, parts)
    model.train(False)
    return model


def stage_tensor_names(config: Any, cuts: Sequence[int], stage: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a stage's tensors, without building it. Raises as `build_stage` does."""
    causal, _, _ = _carved(config, cuts, stage, torch.float32)
    return {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()}


def _carved(
    config: Any, cuts: Sequence[int], stage: int, dtype: torch.dtype
) -> tuple[Any, PipelinePlan, tuple[StageRange, ...]]:
    """The stage's part of the causal LM on the meta device, its plan, and all stages' ranges."""
    plan = require_pipeline_plan(config)
    ranges = stage_ranges(cuts, layer_count(config))
    if not 0 <= stage < len(ranges):
        raise ValueError(
            f"stage {stage} does not exist; the cuts {list(cuts)} make stages 0 to {len(ranges) - 1}"
        )
    causal = build_skeleton(config, dtype)
    carve(causal, plan, ranges[stage].first_layer, ranges[stage].last_layer_exclusive)
    return causal, plan, ranges
