"""Cost of what replicas average with, in processor time of one thread.

Codecs: encode and decode of one chunk (131,072 values), in ns per value, and how often that is the cost of a copy of
the same chunk and of `fp16`. Compressors: what a member does around the exchange (begin, vectors, take, result, commit)
for 30 layers' worth of small matrices, without coding. All take turns in one process, so that the ratios hold where
other processes take a part of the machine; the least of the repeats counts.

    python -m benchmarks.compressor_cost [--repeats 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch

from peers.limits import LIMITS
from swarm.gradient.compressor import Averaged, Compressor
from swarm.gradient.config import CODECS, compressor_config
from swarm.gradient.registry import build_compressor, chunk_codec
from swarm.model.trainable import TrainableSet

CODEC_NAMES = ("fp32", "fp16", "bf16", "int8", "fp8", "e3m0", "sign", "topk")
COMPRESSOR_NAMES = ("fp16", "int8", "topk", "dgc", "randomk", "powersgd", "scape")


def least_ns(functions: dict[str, Callable[[], object]], repeats: int, values: int) -> dict[str, float]:
    """Processor time of each per value, in ns: the least of `repeats` turns after two to warm up."""
    found = dict.fromkeys(functions, float("inf"))
    for turn in range(repeats + 2):
        for name, function in functions.items():
            start = time.thread_time_ns()
            function()
            if turn > 1:
                found[name] = min(found[name], (time.thread_time_ns() - start) / values)
    return found


def codec_costs(repeats: int) -> dict[str, dict[str, float]]:
    """By codec: ns per value to encode and decode a chunk of normally distributed values; "copy": of a plain copy."""
    elements = LIMITS.averaging_chunk_elements
    chunk = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(chunk)
    functions: dict[str, Callable[[], object]] = {"copy": partial(target.copy_, chunk)}
    for name in CODEC_NAMES:
        codec = chunk_codec(CODECS.validate_python({"name": name}))
        functions[f"{name} encode"] = partial(codec.encode, chunk, 1)
        functions[f"{name} decode"] = partial(codec.decode, codec.encode(chunk, 1), elements)
    found = least_ns(functions, repeats, elements)
    costs = {"copy": {"total": found["copy"]}}
    for name in CODEC_NAMES:
        encode, decode = found[f"{name} encode"], found[f"{name} decode"]
        costs[name] = {"encode": encode, "decode": decode, "total": encode + decode}
    return costs


def compressor_costs(repeats: int) -> dict[str, dict[str, float]]:
    """By compressor: ns per value of a member's round without coding, its own vectors for the averages."""
    layout = TrainableSet.of({f"{i}.weight": torch.zeros(576, 576) for i in range(8)})
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))

    def play(compressor: Compressor) -> None:
        compression = compressor.begin(gradient, 10**6, 3)
        for phase in compressor.phases(10**6):
            vector = compression.vector()
            kept = vector if phase.needs_residual else torch.empty(0)
            compression.take(Averaged(vector, kept, torch.zeros_like(kept)))
        compression.result()
        compression.commit()

    functions: dict[str, Callable[[], object]] = {
        name: partial(play, build_compressor(compressor_config(name), layout, 1)) for name in COMPRESSOR_NAMES
    }
    found = least_ns(functions, max(1, repeats // 6), layout.numel)
    return {name: {"total": ns} for name, ns in found.items()}


def with_ratios(costs: dict[str, dict[str, float]], copy: float) -> dict[str, dict[str, float]]:
    """The same, and totals against a copy and against fp16."""
    against = costs["fp16"]["total"]
    return {
        name: {**cost, "copies": cost["total"] / copy, "fp16s": cost["total"] / against}
        for name, cost in costs.items()
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30, help="turns of each codec; the least counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    codecs = codec_costs(options.repeats)
    copy = codecs["copy"]["total"]
    report = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "codecs": with_ratios(codecs, copy),
        "compressors": with_ratios(compressor_costs(options.repeats), copy),
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"one thread, {report['cpu']}; ns per value")
    for kind in ("codecs", "compressors"):
        print(f"{kind:12}  encode  decode   total  copies   fp16s")
        for name, cost in report[kind].items():
            cells = [
                f"{cost[key]:8.2f}" if key in cost else 8 * " "
                for key in ("encode", "decode", "total", "copies", "fp16s")
            ]
            print(f"{name:12}{''.join(cells)}")


if __name__ == "__main__":
    main()
