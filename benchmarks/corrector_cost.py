"""Cost of the corrector as a share of a step's compute.

Times the correction of all target matrices of a SmolLM2-like model, once per step, against forward and backward of
the step's tokens, in one thread, and prints one JSON object. A few layers and one microbatch are timed and scaled to
the whole: all layers cost the same, and so do all microbatches. Embedding and head are left out of the compute, which
makes the shares a little larger than they are. Both sides of each ratio are measured in the same run.

Each of a stage's replicas corrects the same average but computes only its share of the tokens: at R replicas the
shares below are R times as large. What happens once per prior (checking it, factoring the memory that it is made of)
is off the hot path and reported in seconds.

    python benchmarks/corrector_cost.py [--hidden-size 576] [--layers 30] [--step-tokens 16384] [--rank 64]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from swarm.anchor.config import AdditiveConfig, OneSidedConfig, SignedConfig, SpectralConfig
from swarm.anchor.factor import Factors, factorise
from swarm.anchor.memory import target_matrices
from swarm.anchor.prior import SpectralPrior, encode_spectral_prior
from swarm.anchor.registry import build_corrector


def best_s(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Shortest of `repeats` runs of each function after one to warm up, in seconds.

    They take turns, so that what other processes take from this one falls on all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            spent = once_s(function)
            if repeat:
                times[name].append(spent)
    return {name: min(each) for name, each in times.items()}


def once_s(function: Callable[[], object]) -> float:
    """One run, in seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def model_config(options: argparse.Namespace) -> LlamaConfig:
    """SmolLM2-135M's proportions at the wanted sizes: heads of 64, three queries for each key."""
    return LlamaConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.ffn_size,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=max(1, options.hidden_size // 192),
        num_hidden_layers=options.layers,
        max_position_embeddings=max(2048, options.tokens),
        attn_implementation="sdpa",
    )


def matrix_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """The target matrices of all layers."""
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0)
    shapes = {
        f"model.layers.{index}.{name}": tuple(parameter.shape)
        for index in range(config.num_hidden_layers)
        for name, parameter in layer.named_parameters()
    }
    return target_matrices(shapes)


def random_prior(shapes: dict[str, tuple[int, int]], rank: int) -> SpectralPrior:
    """Random orthonormal factors with a falling spectrum."""
    factors = {}
    for name, (rows, columns) in shapes.items():
        kept = min(rank, rows, columns)
        left, right = (torch.linalg.qr(torch.randn(size, kept)).Q for size in (rows, columns))
        factors[name] = Factors(left.contiguous(), torch.logspace(0, -4, kept), right.contiguous())
    return SpectralPrior(stage=0, version=0, step=0, factors=factors)


def corrections(prior: SpectralPrior, shapes: dict[str, tuple[int, int]]) -> dict[str, Callable[[], object]]:
    """One step's correction of all matrices by each corrector."""
    gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
    functions: dict[str, Callable[[], object]] = {}
    for config in (SpectralConfig(), OneSidedConfig(), SignedConfig(), AdditiveConfig()):
        corrector = build_corrector(config, prior=prior, shapes=shapes)
        report = corrector(gradients, 0)
        if report.corrected != len(shapes):
            raise RuntimeError(
                f"{config.name} corrected {report.corrected} of {len(shapes)}: {report.passed}"
            )
        functions[config.name] = partial(corrector, gradients, 0)
    return functions


def factorisation_s(options: argparse.Namespace, shapes: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Seconds to factor one layer's memory: from nothing, from the previous factors, and by exact SVDs."""
    own = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.0.")}
    memory: dict[str, Tensor] = {}
    for name, (rows, columns) in own.items():
        side = min(rows, columns)
        bases = [torch.linalg.qr(torch.randn(size, side)).Q for size in (rows, columns)]
        memory[name] = bases[0] / torch.arange(1, side + 1) @ bases[1].T
    moved = {}
    for name, matrix in memory.items():
        fresh = torch.randn_like(matrix)
        moved[name] = 0.95 * matrix + 0.05 * fresh * matrix.norm() / fresh.norm()
    found: dict[str, Any] = {}
    cold = once_s(lambda: found.update(factorise(memory, options.rank, seed=0)))
    previous = {name: each.factors for name, each in found.items()}
    again: dict[str, Any] = {}
    warm = once_s(lambda: again.update(factorise(moved, options.rank, seed=0, previous=previous)))
    exact = once_s(lambda: list(factorise(moved, None, seed=0)))
    return {
        "cold_s": cold,
        "warm_s": warm,
        "exact_s": exact,
        "cold_iterations": sum(each.iterations for each in found.values()) / len(found),
        "warm_iterations": sum(each.iterations for each in again.values()) / len(again),
        "warm_residual": max(each.residual for each in again.values()),
    }


def layers(options: argparse.Namespace, config: LlamaConfig) -> Callable[[], object]:
    """Forward and backward of `timed_layers` random decoder layers on one microbatch."""
    dtype = torch.bfloat16 if options.compute == "bf16" else torch.float32
    blocks = [LlamaDecoderLayer(config, index).to(dtype) for index in range(options.timed_layers)]
    positions = torch.arange(options.tokens).expand(options.rows, options.tokens)
    received = torch.randn(options.rows, options.tokens, options.hidden_size).to(dtype)
    rotary = LlamaRotaryEmbedding(config)(received, positions)
    upstream = torch.randn_like(received)

    def forward_and_backward() -> None:
        hidden = received.clone().requires_grad_()
        for block in blocks:
            hidden = block(hidden, position_ids=positions, position_embeddings=rotary)
        hidden.backward(upstream)
        for block in blocks:
            block.zero_grad()

    return forward_and_backward


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=576, help="width of the hidden states")
    parser.add_argument("--ffn-size", type=int, default=1536, help="width of the MLP")
    parser.add_argument("--layers", type=int, default=30, help="decoder layers of the model")
    parser.add_argument("--step-tokens", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--rank", type=int, default=64, help="singular triplets per matrix")
    parser.add_argument("--compute", choices=("bf16", "fp32"), default="bf16", help="dtype of the layers")
    parser.add_argument("--timed-layers", type=int, default=2, help="layers that are timed and scaled")
    parser.add_argument("--rows", type=int, default=2, help="rows of the timed microbatch")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=5, help="runs of everything; the shortest counts")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = model_config(options)
    shapes = matrix_shapes(config)
    prior = random_prior(shapes, options.rank)
    take_up = once_s(lambda: build_corrector(SpectralConfig(), prior=prior, shapes=shapes))
    costs = best_s(corrections(prior, shapes) | {"layers": layers(options, config)}, options.repeats)
    timed = costs.pop("layers")
    compute = (
        timed * options.layers / options.timed_layers * options.step_tokens / (options.rows * options.tokens)
    )
    factoring = factorisation_s(options, shapes)
    report = {
        "hidden_size": options.hidden_size,
        "ffn_size": options.ffn_size,
        "layers": options.layers,
        "matrices": len(shapes),
        "parameters": sum(rows * columns for rows, columns in shapes.values()),
        "rank": options.rank,
        "step_tokens": options.step_tokens,
        "compute": options.compute,
        "timed_layers_forward_backward_s": round(timed, 3),
        "step_forward_backward_s": round(compute, 1),
        "correction_s": {name: round(costs[name], 3) for name in costs},
        "share_percent": {name: round(100 * costs[name] / compute, 3) for name in costs},
        "target_percent": 5.0,
        "met": costs["spectral"] <= 0.05 * compute,
        "replicas_within_target": int(0.05 * compute / costs["spectral"]),
        "once_per_prior": {
            "take_up_s": round(take_up, 3),
            "file_bytes": len(encode_spectral_prior(prior)),
            "factor_cold_s": round(factoring["cold_s"] * options.layers, 2),
            "factor_warm_s": round(factoring["warm_s"] * options.layers, 2),
            "factor_exact_s": round(factoring["exact_s"] * options.layers, 2),
            "cold_iterations": round(factoring["cold_iterations"], 2),
            "warm_iterations": round(factoring["warm_iterations"], 2),
            "warm_residual": round(factoring["warm_residual"], 4),
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
