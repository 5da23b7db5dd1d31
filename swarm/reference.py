"""The oracle: a whole swarm's training step in one process, on the uncut transformers model.

It shares with the swarm only the codecs, the microbatches and the learning-rate schedule. Stages exist as
hooks on the layers before the cuts, the optimizer is torch's own, and gradients come from the model's own
forward. A swarm with the same manifest must train to the same weights, up to rounding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from swarm.activation.base import BoundaryCodec, CodecKey
from swarm.activation.calibrate import cast_parameters_, decoder_layers, replace_hidden
from swarm.adams import AdamS
from swarm.batch import IGNORED_LABEL, Batch
from swarm.gradient.outer_config import Overlap
from swarm.model.packed import packed_kwargs
from swarm.optim import OptimizerConfig, learning_rate


class _Boundary(torch.autograd.Function):
    """A boundary inside the graph: the receiver's states forward, the sender's gradient backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, codec: BoundaryCodec, key: CodecKey) -> Tensor:
        """decode(encode(hidden)): [B, T, H]."""
        ctx.codec, ctx.key = codec, key
        return codec.decode(codec.encode(hidden.detach(), key), key).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """decode_gradient(encode_gradient(gradient)): [B, T, H]."""
        codec: BoundaryCodec = ctx.codec
        decoded = codec.decode_gradient(codec.encode_gradient(gradient, ctx.key), ctx.key)
        return decoded.to(gradient.dtype), None, None


class ReferenceTrainer:
    """Trains the uncut model as a swarm of P stages would.

    model: uncut transformers causal LM; the trainer owns it from here on (its embedding and head are untied,
        its parameters cast to the compute dtype).
    cuts: index of the first layer of stages 1 .. P - 1.
    codecs: one per boundary, or None where nothing is coded; `codecs` may be replaced between steps.
    total_steps: length of the learning-rate schedule.
    freeze: subset of {"embedding", "head", "norms"}.
    compute_dtype: of forward and backward; master weights, accumulation and optimizer are fp32.
    reference_loss_tokens: N_ref, the loss tokens by which a microbatch's loss is divided before its backward
        (it scales what the codecs see); None divides by the loss tokens of the step.
    corrector: corrects a step's averaged gradients (fp32, by parameter name) in place, before they are clipped;
        called with them and the step. None leaves them alone. `corrector` may be replaced between steps.
    overlap: 1 applies every step's gradients with the step after it, and the last two steps' together, as a swarm does
        whose averages travel while the next step runs (`swarm.gradient.outer_config.Overlap`).

    Raises ValueError when cuts and codecs differ in number or a frozen part is unknown.
    """

    def __init__(
        self,
        model: Any,
        cuts: Sequence[int],
        codecs: Sequence[BoundaryCodec | None],
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        freeze: frozenset[str] = frozenset(),
        compute_dtype: torch.dtype = torch.float32,
        reference_loss_tokens: int | None = None,
        corrector: Callable[[dict[str, Tensor], int], object] | None = None,
        overlap: int = 0,
    ) -> None:
        if len(cuts) != len(codecs):
            raise ValueError(f"{len(cuts)} boundaries need as many codecs (or None), got {len(codecs)}")
        self.model = model
        self.codecs = list(codecs)
        self.corrector = corrector
        self.gradients: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._config = optimizer
        self._total_steps = total_steps
        self._overlap = Overlap(overlap, total_steps)
        self._owed: tuple[dict[str, Tensor], int] | None = None
        self._dtype = compute_dtype
        self._reference_loss_tokens = reference_loss_tokens
        self._stages = len(cuts) + 1
        self._key: CodecKey | None = None
        untie_head_(model)
        model.eval()
        self._stage_of = parameter_stages(model, cuts)
        frozen = frozen_names(model, freeze)
        # Before the cast, or the masters would start from rounded weights.
        self.masters: dict[str, nn.Parameter] = {
            name: nn.Parameter(parameter.detach().float())
            for name, parameter in model.named_parameters()
            if name not in frozen
        }
        cast_parameters_(model, compute_dtype)
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.masters)
            if name in self.masters:
                self._parameters[name] = parameter
                parameter.register_post_accumulate_grad_hook(self._accumulator(name))
        layers = decoder_layers(model)
        for boundary, cut in enumerate(cuts):
            layers[cut - 1].register_forward_hook(self._boundary_hook(boundary))
        self._optimizer = _torch_optimizer(optimizer, list(self.masters.values()))

    def step(self, batches: Sequence[Batch], step: int) -> float:
        """One training step on the microbatches. Returns sum of token losses / loss tokens.

        A step without loss tokens changes nothing and returns 0. Raises ValueError, leaving the weights as
        they were, for a gradient that is not finite.
        """
        loss = self.accumulate(batches, step)
        taken = self._exchange_for_owed(self.gradients, sum(batch.loss_tokens for batch in batches), step)
        if taken is not None and taken[1]:
            self.gradients = taken[0]
            if self.corrector is not None:
                self.corrector(self.gradients, step)
            self.apply(step)
        return loss

    def _exchange_for_owed(
        self, gradients: dict[str, Tensor], tokens: int, step: int
    ) -> tuple[dict[str, Tensor], int] | None:
        """What is applied with a step, and its tokens: the gradients just made, if nothing overlaps."""
        earlier, self._owed = self._owed, None
        if self._overlap.travels(step) or self._overlap.waits(step):
            self._owed = gradients, tokens
            return earlier
        if earlier is None or not earlier[1]:
            return gradients, tokens
        total = tokens + earlier[1]
        both = {
            name: (gradient * tokens + earlier[0][name] * earlier[1]) / total
            for name, gradient in gradients.items()
        }
        return both, total

    def accumulate(self, batches: Sequence[Batch], step: int | None) -> float:
        """Set `gradients` to those of the mean token loss (fp32, by name); the weights stay as they are.

        step: whose codec keys apply; None leaves the boundaries uncoded, as an anchor's passes do. Returns the mean
        token loss. Without loss tokens it is 0, and so are the gradients.
        """
        loss_tokens = sum(batch.loss_tokens for batch in batches)
        self._sums = {}
        total = 0.0
        divisor = self._reference_loss_tokens or max(1, loss_tokens)
        for batch in batches if loss_tokens else ():
            self._key = None if step is None else CodecKey.of(batch, step)
            try:
                loss = self._loss_sum(batch)
                if loss.requires_grad:
                    (loss / divisor).backward()  # type: ignore[no-untyped-call]
            finally:
                self._key = None
            total += float(loss.detach())
        sums, self._sums = self._sums, {}
        self.gradients = {
            name: sums[name] if name in sums else torch.zeros_like(master)
            for name, master in self.masters.items()
        }
        if loss_tokens and divisor != loss_tokens:
            for gradient in self.gradients.values():
                gradient.mul_(divisor / loss_tokens)
        return total / max(1, loss_tokens)

    def state(self) -> dict[str, Any]:
        """Master weights and the optimizer's state, to go on from later; tensors are shared, not copied."""
        return {"masters": dict(self.masters), "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned. Raises KeyError or ValueError for another model's or optimizer's."""
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
            if self._parameters[name].data_ptr() != master.data_ptr():
                self._parameters[name].copy_(master)
        self._optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean token loss with uncoded boundaries. Raises ValueError without loss tokens."""
        loss_tokens = sum(batch.loss_tokens for batch in batches)
        if loss_tokens == 0:
            raise ValueError("the evaluation batches have no loss tokens")
        return sum(float(self._loss_sum(batch)) for batch in batches) / loss_tokens

    def _loss_sum(self, batch: Batch) -> Tensor:
        """Sum of token losses of one microbatch: fp32 scalar."""
        device = next(self.model.parameters()).device
        batch = batch.to(device)
        logits = self.model(**packed_kwargs(self.model.config, batch, self._dtype, device)).logits
        return functional.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.labels().flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )

    def apply(self, step: int) -> None:
        """Take the optimizer step on `gradients`: clip every stage's to clip / sqrt(P), step, refresh the weights used.

        Raises ValueError, leaving the weights as they were, for a gradient that is not finite.
        """
        norms: list[Tensor] = []
        for stage in range(self._stages):
            own = [gradient for name, gradient in self.gradients.items() if self._stage_of[name] == stage]
            norms.append(torch.stack([g.norm() for g in own]).norm() if own else torch.zeros(()))
        if not all(math.isfinite(float(norm)) for norm in norms):
            raise ValueError(
                f"the gradient of step {step} is not finite: stage norms {[float(n) for n in norms]}"
            )
        for name, master in self.masters.items():
            factor = 1.0
            if self._config.clip_norm is not None:
                limit = self._config.clip_norm / math.sqrt(self._stages)
                factor = min(
                    1.0, limit / max(float(norms[self._stage_of[name]]), torch.finfo(torch.float32).tiny)
                )
            master.grad = self.gradients[name] if factor == 1.0 else self.gradients[name] * factor
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step, self._total_steps)
        self._optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                master.grad = None
                # In fp32 both are one tensor.
                if self._parameters[name].data_ptr() != master.data_ptr():
                    self._parameters[name].copy_(master)

    def _accumulator(self, name: str) -> Any:
        """A hook that moves a microbatch's gradient into the step's fp32 sum."""

        def accumulate(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if name in self._sums:
                self._sums[name].add_(parameter.grad)
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

        return accumulate

    def _boundary_hook(self, boundary: int) -> Any:
        """A forward hook that passes a layer's output through the boundary's codec during training steps."""

        def through(hidden: Tensor) -> Tensor:
            codec, key = self.codecs[boundary], self._key
            if codec is None or key is None:
                return hidden
            decoded: Tensor = _Boundary.apply(hidden, codec, key)  # type: ignore[no-untyped-call]
            return decoded

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            return replace_hidden(output, through)

        return hook


def untie_head_(model: Any) -> None:
    """Give the output head its own copy of a tied embedding, since they live on different stages."""
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def parameter_stages(model: Any, cuts: Sequence[int]) -> dict[str, int]:
    """Stage of every parameter by name: embedding on the first, final norm and head on the last."""
    stages = dict.fromkeys((name for name, _ in model.named_parameters()), len(cuts))
    owner: dict[int, int] = {id(parameter): 0 for parameter in model.get_input_embeddings().parameters()}
    for index, layer in enumerate(decoder_layers(model)):
        for parameter in layer.parameters():
            owner[id(parameter)] = bisect_right(list(cuts), index)
    for name, parameter in model.named_parameters():
        stages[name] = owner.get(id(parameter), len(cuts))
    return stages


def frozen_names(model: Any, freeze: frozenset[str]) -> set[str]:
    """Names of the parameters that do not train.

    freeze: subset of {"embedding", "head", "norms"}; norms are all normalisation modules.
    Raises ValueError for anything else.
    """
    unknown = freeze - {"embedding", "head", "norms"}
    if unknown:
        raise ValueError(f"cannot freeze {sorted(unknown)}; choose from embedding, head, norms")
    modules: list[nn.Module] = []
    if "embedding" in freeze:
        modules.append(model.get_input_embeddings())
    if "head" in freeze:
        modules.append(model.get_output_embeddings())
    if "norms" in freeze:
        modules.extend(module for module in model.modules() if "Norm" in type(module).__name__)
    chosen = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def _torch_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer; decay applies to tensors of two or more dimensions only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    if config.name == "adams":  # torch has none
        betas = (config.beta1, config.beta2)
        return AdamS(
            groups, lr=config.learning_rate, betas=betas, eps=config.eps, skip_zeros=config.skip_zeros
        )
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps
    )
