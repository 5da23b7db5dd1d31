"""Cost of the codec `basis` as a share of a stage's compute.

Times what a stage in the middle does for one microbatch, encoding and decoding hidden states and their gradients,
prediction from token ids included, against forward and backward of its decoder layers on the same tokens, in one
thread, and prints one JSON object with a case for each size: the 7 and 8 layers that quarters of SmolLM2-135M have,
and 4 layers of width 2048. Both sides of each share are measured in the same run, in turns. A few layers are timed
and scaled to the stage, since all layers cost the same. Weights, states and bases are random, token ids follow Zipf's
law; what is measured depends on none of the values but the number of distinct tokens.

    python benchmarks/basis_cost.py [--sizes 576 2048] [--prediction context] [--ratio 90] [--compute bf16]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from swarm.activation.base import CodecKey
from swarm.activation.basis import BasisCodec
from swarm.activation.config import BasisConfig, Prediction, prediction_rank
from swarm.activation.fit import fit_basis_prior
from swarm.activation.registry import payload_bytes
from swarm.activation.tokens import BLOCKS, TokenTable, feature_columns

VOCABULARY = 49_152
DOCUMENT_TOKENS = 400
TARGET_PERCENT = 6.0
STAGES = {576: ((7, 8), 1536), 2048: ((4,), 8192)}
"""Layers of a stage, and width of the MLP, by hidden size."""


def best_s(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Shortest of `repeats` runs of each function after one to warm up, in seconds; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: min(each) for name, each in times.items()}


def make_key(rows: int, tokens: int) -> CodecKey:
    """A microbatch of documents of `DOCUMENT_TOKENS` tokens, ids by Zipf's law."""
    starts = torch.zeros(rows, tokens, dtype=torch.bool)
    starts[:, ::DOCUMENT_TOKENS] = True
    frequency = 1.0 / (torch.arange(VOCABULARY) + 2.7)
    ids = torch.multinomial(frequency, rows * tokens, replacement=True).view(rows, tokens)
    return CodecKey(step=0, sample_ids=torch.arange(rows), document_starts=starts, token_ids=ids)


def make_codec(
    hidden_size: int, ratio: float, prediction: Prediction, dtype: torch.dtype, device: str
) -> tuple[BasisCodec, TokenTable | None, int]:
    """A codec of random bases and a random prediction of the sizes that a run has; its table and rank."""
    count = 4096
    spectrum = torch.logspace(0, -1.5, hidden_size)
    samples = [torch.randn(count, hidden_size) * spectrum for _ in range(2)]
    config = BasisConfig(mask_ratio=ratio, prediction="none")
    prior = fit_basis_prior(samples[0], samples[1], torch.arange(count) % DOCUMENT_TOKENS, config)
    table, rank = None, 0
    if prediction != "none":
        config = config.model_copy(update={"prediction": prediction})
        columns = feature_columns(hidden_size, VOCABULARY, prediction)
        rank = min(prediction_rank(config, hidden_size), BLOCKS[prediction] * columns)
        arrays = {
            "ids": torch.arange(VOCABULARY, dtype=torch.int32),
            "rows": torch.randint(-127, 128, (VOCABULARY, columns), dtype=torch.int8),
            "scales": torch.full((VOCABULARY,), 1 / 127),
        }
        table = TokenTable(arrays, device)
        prior["predict_in"] = torch.randn(BLOCKS[prediction] * columns, rank) / columns
        prior["predict_out"] = torch.randn(rank, hidden_size) / rank
    codec = BasisCodec(
        config,
        hidden_size=hidden_size,
        boundary=0,
        prior=prior,
        device=device,
        dtype=dtype,
        tokens=table,
    )
    return codec, table, rank


def make_layers(
    hidden_size: int, ffn_size: int, layers: int, received: Tensor, dtype: torch.dtype
) -> Callable[[], object]:
    """Forward and backward of random decoder layers."""
    heads = hidden_size // 64
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_attention_heads=heads,
        num_key_value_heads=next(count for count in (heads // 3, heads // 4, heads) if heads % count == 0),
        num_hidden_layers=layers,
        max_position_embeddings=max(2048, received.shape[1]),
        attn_implementation="sdpa",
    )
    blocks = [LlamaDecoderLayer(config, index).to(received.device, dtype) for index in range(layers)]
    positions = torch.arange(received.shape[1], device=received.device).expand(received.shape[:2])
    rotary = LlamaRotaryEmbedding(config).to(received.device)(received, positions)
    upstream = torch.randn_like(received)

    def forward_and_backward() -> None:
        hidden = received.clone().requires_grad_()
        for block in blocks:
            hidden = block(hidden, position_ids=positions, position_embeddings=rotary)
        hidden.backward(upstream)
        for block in blocks:
            block.zero_grad()

    return forward_and_backward


def case(hidden_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one size."""
    dtype = torch.bfloat16 if options.compute == "bf16" else torch.float32
    stage_layers, ffn_size = STAGES.get(hidden_size, ((4,), 4 * hidden_size))
    codec, table, rank = make_codec(hidden_size, options.ratio, options.prediction, dtype, options.device)
    key = make_key(options.rows, options.tokens)
    hidden = torch.randn(*key.shape, hidden_size, device=options.device).to(dtype)
    forward, backward = codec.encode(hidden, key), codec.encode_gradient(hidden, key)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None

    def timed(function: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            function()
            wait()

        return run

    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(hidden, key),
        "decode": lambda: codec.decode(forward, key),
        "encode_gradient": lambda: codec.encode_gradient(hidden, key),
        "decode_gradient": lambda: codec.decode_gradient(backward, key),
        "layers": make_layers(hidden_size, ffn_size, options.timed_layers, hidden, dtype),
    }
    spent = best_s({name: timed(call) for name, call in calls.items()}, options.repeats)
    layer = spent.pop("layers") / options.timed_layers
    total = sum(spent.values())
    shares = {layers: 100 * total / (layers * layer) for layers in stage_layers}
    assert key.token_ids is not None
    return {
        "hidden_size": hidden_size,
        "batch_tokens": options.rows * options.tokens,
        "distinct_tokens": int(key.token_ids.unique().numel()),
        "feature_columns": table.features if table is not None else 0,
        "prediction_rank": rank,
        "payload_bytes": {
            "forward": payload_bytes(codec.layout(key)),
            "backward": payload_bytes(codec.gradient_layout(key)),
        },
        "codec_ms": {name: round(1e3 * value, 2) for name, value in spent.items()},
        "codec_total_ms": round(1e3 * total, 2),
        "layer_forward_backward_ms": round(1e3 * layer, 1),
        "share_percent": {f"{layers} layers": round(share, 2) for layers, share in shares.items()},
        "met": max(shares.values()) <= TARGET_PERCENT,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[576, 2048], help="hidden sizes")
    parser.add_argument("--rows", type=int, default=2, help="rows of the microbatch")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per row")
    parser.add_argument("--ratio", type=float, default=90.0, help="mask ratio in percent")
    parser.add_argument(
        "--prediction", choices=tuple(BLOCKS), default=BasisConfig().prediction, help="of hidden states"
    )
    parser.add_argument(
        "--compute",
        choices=("bf16", "fp32"),
        default="bf16",
        help="dtype of layers and codec; bf16 is emulated by CPUs without instructions for it",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--timed-layers", type=int, default=1, help="layers that are timed and scaled")
    parser.add_argument("--repeats", type=int, default=5, help="runs of everything; the shortest counts")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = {
        "prediction": options.prediction,
        "mask_ratio": options.ratio,
        "compute": options.compute,
        "device": options.device,
        "target_percent": TARGET_PERCENT,
        "cases": [case(size, options) for size in options.sizes],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
