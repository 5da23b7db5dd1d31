"""Filling a meta skeleton: only the tensors of one stage ever exist in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from swarm.model.plan import NoPipelinePlan

TensorSource = Mapping[str, Tensor] | str | Path
"""A stage's tensors: by name, or the path of a safetensors file."""


def load_tensors(causal: Any, source: TensorSource, device: torch.device, label: str) -> None:
    """Give the meta skeleton its tensors from a mapping or a file, one at a time.

    Raises ValueError listing missing and unexpected names and wrong shapes.
    """
    if isinstance(source, Mapping):
        _assign(causal, set(source), source.__getitem__, device, label)
        return
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"{label}: no file {path}")
    with safe_open(str(path), framework="pt", device="cpu") as opened:
        _assign(causal, set(opened.keys()), opened.get_tensor, device, f"{label} ({path.name})")


def _assign(
    causal: Any, names: set[str], read: Callable[[str], Tensor], device: torch.device, label: str
) -> None:
    """Replace every meta tensor: saved ones by what `read` gives, computed buffers by the family's rule."""
    expected = causal.state_dict()
    missing, unexpected = sorted(set(expected) - names), sorted(names - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{label}: tensors do not fit: {len(missing)} missing {missing[:8]}, "
            f"{len(unexpected)} unexpected {unexpected[:8]}"
        )
    for module_name, module in causal.named_modules():
        prefix = f"{module_name}." if module_name else ""
        saved: list[tuple[dict[str, Any], str]] = [(module._parameters, name) for name in module._parameters]
        saved += [(module._buffers, name) for name in module._buffers if prefix + name in expected]
        for store, name in saved:
            old = store[name]
            if old is None:
                continue
            tensor = read(prefix + name)
            if tensor.shape != old.shape:
                raise ValueError(
                    f"{label}: {prefix + name} must be {tuple(old.shape)}, got {tuple(tensor.shape)}"
                )
            # Always a copy: the caller's tensors may be a memory map, or masters training must not touch.
            copied = tensor.detach().to(device=device, dtype=old.dtype, copy=True).contiguous()
            store[name] = nn.Parameter(copied) if store is module._parameters else copied
            store[name]._is_hf_initialized = True
    _compute_buffers(causal, set(expected), device)


def _compute_buffers(causal: Any, saved: set[str], device: torch.device) -> None:
    """Fill buffers that no checkpoint holds (rotary frequencies, embedding scales) by the family's own rule.

    transformers does the same when it loads a model from the meta device: `_init_weights` of the module.
    Raises NoPipelinePlan if the family leaves such a buffer unfilled.
    """
    for module_name, module in causal.named_modules():
        prefix = f"{module_name}." if module_name else ""
        computed = [
            name
            for name, value in module._buffers.items()
            if value is not None and prefix + name not in saved
        ]
        if not computed:
            continue
        for name in computed:
            old = module._buffers[name]
            mark = float("nan") if old.is_floating_point() else 0
            module._buffers[name] = torch.full_like(old, mark, device=device)
        with torch.no_grad():
            causal._init_weights(module)
        for name in computed:
            value = module._buffers[name]
            if value.is_floating_point() and bool(value.isnan().any()):
                raise NoPipelinePlan(f"{type(causal).__name__} cannot compute {prefix}{name} after loading")
