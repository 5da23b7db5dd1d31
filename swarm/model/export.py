"""From an uncut model to stage files, and from stages back to an ordinary transformers checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from swarm.model.cut import layer_count, stage_ranges
from swarm.model.skeleton import build_skeleton, head_name
from swarm.model.stage import stage_tensor_names

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What belongs to a checkpoint besides weights and configuration."""


def stage_file_name(stage: int) -> str:
    """Name of a stage's file in a split checkpoint."""
    return f"stage-{stage}.safetensors"


def untie_head(model: Any) -> None:
    """Give an uncut causal LM an output head of its own, in place (a copy of the embedding if it was tied).

    The stages of a run are untied (the embedding lives on the first, the head on the last), so an uncut model
    must be too to train like them. No effect on a model that is untied already.
    """
    head = getattr(model, head_name(model))
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = False


def split_checkpoint(
    model: Any, cuts: Sequence[int], directory: Path | str, dtype: torch.dtype
) -> tuple[Path, ...]:
    """Write an uncut causal LM's stages as `stage-0.safetensors` ... and return the files, in order.

    One stage is converted and written at a time. The last stage has a head of its own, tied or not.
    dtype: of floating-point tensors in the files.
    Raises ValueError for bad cuts, NoPipelinePlan if the family cannot be cut.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    files = []
    for stage in range(len(stage_ranges(cuts, layer_count(model.config)))):
        part = {}
        for name in stage_tensor_names(model.config, cuts, stage):
            if name not in state:
                raise ValueError(f"the model has no tensor {name}, which stage {stage} needs")
            tensor = state[name].detach()
            part[name] = tensor.to(
                device="cpu", dtype=dtype if tensor.is_floating_point() else tensor.dtype
            ).contiguous()
        files.append(target / stage_file_name(stage))
        save_file(part, str(files[-1]), metadata={"format": "pt"})
    return tuple(files)


def assemble(
    config: Any,
    stage_tensors: Iterable[Mapping[str, Tensor]],
    out_dir: Path | str,
    tokenizer_dir: Path | str | None,
) -> None:
    """Write an ordinary transformers checkpoint from all stages' tensors.

    It has `tie_word_embeddings: false` and loads with `AutoModelForCausalLM.from_pretrained`.
    stage_tensors: the stages' state tensors, one mapping each, in any order; memory-mapped ones stay so.
    tokenizer_dir: where to copy the tokenizer's files from, if anywhere.
    Raises ValueError listing names that are missing, unexpected, doubled or of a wrong shape.
    """
    tensors: dict[str, Tensor] = {}
    for stage in stage_tensors:
        doubled = sorted(set(stage) & set(tensors))
        if doubled:
            raise ValueError(f"tensors in more than one stage: {doubled[:8]}")
        tensors.update(stage)
    floating = next(
        (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32
    )
    causal = build_skeleton(config, floating)
    # Training switched these off for its own sake; a checkpoint keeps the model's own settings. Its weights are
    # plain, whatever they were read from: a model that calls itself quantized refuses to be cast.
    settings = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    causal.config = type(config).from_dict({**settings, "tie_word_embeddings": False})
    causal.config.dtype = floating
    expected = {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()}
    problems = [f"missing {name}" for name in sorted(set(expected) - set(tensors))]
    problems += [f"unexpected {name}" for name in sorted(set(tensors) - set(expected))]
    problems += [
        f"{name} must be {expected[name]}, got {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    if problems:
        raise ValueError(f"stages do not make a model: {len(problems)} problems: {'; '.join(problems[:8])}")
    causal.load_state_dict(tensors, strict=True, assign=True)
    target = Path(out_dir)
    causal.save_pretrained(str(target), state_dict=tensors)
    for weights in target.glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes 0600; a checkpoint is as readable as its config
    if tokenizer_dir is not None:
        for name in TOKENIZER_FILES:
            source = Path(tokenizer_dir) / name
            if source.is_file():
                shutil.copyfile(source, target / name)
