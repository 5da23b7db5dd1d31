"""Cost of codec `mask` as a share of a stage's compute.

Times encode and decode in both directions (what the two ends of one boundary do together) against forward and
backward of randomly initialised Llama layers, in bf16 and one thread, and prints one JSON object.

    python benchmarks/mask_cost.py [--hidden-size 2048] [--layers 4] [--rows 2] [--tokens 1024] [--ratio 95]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from swarm.activation.base import CodecKey
from swarm.activation.config import MaskConfig
from swarm.activation.mask import MaskCodec
from swarm.activation.registry import payload_bytes


def best_ms(function: Callable[[], object], repeats: int) -> float:
    """Shortest of `repeats` runs after one to warm up, in milliseconds: the cost without other processes' share."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def codec_ms(hidden_size: int, rows: int, tokens: int, ratio: float, repeats: int) -> dict[str, float]:
    """Milliseconds of the index generation and of each of the four codec calls, and bytes per direction."""
    codec = MaskCodec(
        MaskConfig(mask_ratio=ratio),
        hidden_size=hidden_size,
        boundary=0,
        run_seed=1,
        device="cpu",
        dtype=torch.bfloat16,
    )
    starts = torch.zeros(rows, tokens, dtype=torch.bool)
    starts[:, 0] = True
    key = CodecKey(step=1, sample_ids=torch.arange(rows), document_starts=starts)
    hidden = torch.randn(rows, tokens, hidden_size).to(torch.bfloat16)
    payload = codec.encode(hidden, key)
    return {
        "indices_ms": best_ms(lambda: codec.indices(key), repeats),
        "encode_ms": best_ms(lambda: codec.encode(hidden, key), repeats),
        "decode_ms": best_ms(lambda: codec.decode(payload, key), repeats),
        "encode_gradient_ms": best_ms(lambda: codec.encode_gradient(hidden, key), repeats),
        "decode_gradient_ms": best_ms(lambda: codec.decode_gradient(payload, key), repeats),
        "payload_bytes": float(payload_bytes(codec.layout(key))),
        "dense_bytes": float(hidden.nbytes),
    }


def layers_ms(hidden_size: int, layers: int, rows: int, tokens: int, repeats: int) -> float:
    """Milliseconds of forward and backward of random decoder layers: as a middle stage runs them."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 256),
        num_hidden_layers=layers,
        max_position_embeddings=max(2048, tokens),
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    blocks = [LlamaDecoderLayer(config, index).to(torch.bfloat16) for index in range(layers)]
    positions = torch.arange(tokens).expand(rows, tokens)
    received = torch.randn(rows, tokens, hidden_size).to(torch.bfloat16)
    rotary = LlamaRotaryEmbedding(config)(received, positions)
    upstream = torch.randn_like(received)

    def forward_and_backward() -> None:
        hidden = leaf = received.clone().requires_grad_()
        for block in blocks:
            hidden = block(hidden, position_ids=positions, position_embeddings=rotary)
        hidden.backward(upstream)
        leaf.grad = None
        for block in blocks:
            block.zero_grad()

    return best_ms(forward_and_backward, repeats)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=2048, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers of the stage")
    parser.add_argument("--rows", type=int, default=2, help="rows of the microbatch")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per row")
    parser.add_argument("--ratio", type=float, default=95.0, help="mask ratio in percent")
    parser.add_argument("--repeats", type=int, default=20, help="runs per codec call; the shortest counts")
    parser.add_argument(
        "--layer-repeats", type=int, default=2, help="runs of the layers; the shortest counts"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = codec_ms(options.hidden_size, options.rows, options.tokens, options.ratio, options.repeats)
    compute = layers_ms(
        options.hidden_size, options.layers, options.rows, options.tokens, options.layer_repeats
    )
    total = sum(
        costs[name] for name in ("encode_ms", "decode_ms", "encode_gradient_ms", "decode_gradient_ms")
    )
    report = {
        "hidden_size": options.hidden_size,
        "layers": options.layers,
        "batch_tokens": options.rows * options.tokens,
        "mask_ratio": options.ratio,
        **{name: round(value, 3) for name, value in costs.items()},
        "codec_ms": round(total, 3),
        "layers_forward_backward_ms": round(compute, 1),
        "share_percent": round(100 * total / compute, 4),
        "target_percent": 3.0,
        "met": total <= 0.03 * compute,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
