"""How well a boundary codec carries states and gradients: minutes for an idea, instead of hours for a training run.

SmolLM2-135M is cut at layers 8, 15 and 22. Priors are fitted on some microbatches of a domain, then measured on
held-out ones:

  error      squared error over the tokens that are coded, relative to their energy (states: less their mean);
             `fisher` weights it by what an error costs in loss, with the second moment of the held-out gradients
  bytes      of an ordinary token, gains and outliers included, as they travel
  cosine     of the weight gradients with coded boundaries and those without, same microbatches, all matrices together
             (needs --gradients: one forward and backward per case, some ten seconds per microbatch)

--steps says how many dense steps (learning rate 3e-4, 1,024 tokens each) the weights are away from the pretrained
ones, and --ages by how many steps the priors are older. Weights and boundary tensors are made once and kept in the
cache folder, so that another variant costs seconds. A variant is a name and options of codec `basis`:

    python -m benchmarks.fidelity                                         # pretrained weights, as runs code by default
    python -m benchmarks.fidelity --variant a: --variant b:token_classes=32 --ratios 95 98
    python -m benchmarks.fidelity --steps 20 --ages 0 20 --gradients      # what stale priors cost

Compute is fp32: on CPUs without bf16 units everything else is slower.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.fidelity_states import CUTS, Captured, States, batch_loss, boundary_hooks
from swarm.activation.base import CodecKey
from swarm.activation.basis import BasisCodec, dense_positions, document_positions
from swarm.activation.config import BasisConfig
from swarm.activation.fit import fit_basis_prior
from swarm.activation.tokens import SampledTokens, TokenTable, make_token_table
from swarm.batch import Batch


class Coded(torch.autograd.Function):
    """A boundary: states through the codec forward, gradients through it backward."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, codec: BasisCodec, key: CodecKey) -> Tensor:
        context.codec, context.key = codec, key
        return codec.decode(codec.encode(hidden, key), key)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        codec, key = context.codec, context.key
        return codec.decode_gradient(codec.encode_gradient(gradients[0], key), key), None, None


def fit_codecs(captured: Captured, config: BasisConfig, table: TokenTable | None) -> list[BasisCodec]:
    """A codec for every boundary, fitted on captured microbatches."""
    offsets = torch.cat([document_positions(b.document_starts).reshape(-1) for b in captured.batches])
    features = None
    if table is not None:
        every = tuple((b.token_ids, b.document_starts, torch.arange(b.tokens)) for b in captured.batches)
        features = SampledTokens(every).features(table, config.prediction)
    codecs = []
    for boundary, (hidden, gradient) in enumerate(zip(captured.hidden, captured.gradient, strict=True)):
        size = hidden.shape[-1]
        prior = fit_basis_prior(hidden.view(-1, size), gradient.view(-1, size), offsets, config, features)
        codecs.append(
            BasisCodec(
                config,
                hidden_size=size,
                boundary=boundary,
                prior=prior,
                device="cpu",
                dtype=torch.float32,
                tokens=table,
            )
        )
    return codecs


def measure(codec: BasisCodec, hidden: Tensor, gradient: Tensor, batches: list[Batch]) -> dict[str, float]:
    """Errors, bytes per ordinary token and milliseconds of one boundary: hidden, gradient [M, B, T, H]."""
    keys = [CodecKey.of(batch, 0) for batch in batches]
    times = {"encode": 0.0, "decode": 0.0, "encode_gradient": 0.0, "decode_gradient": 0.0}

    def timed(name: str, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = getattr(codec, name)(*arguments)
        times[name] += (time.perf_counter() - start) * 1e3 / len(batches)
        return result

    states, grads, coded = [], [], 0
    for key, one, other in zip(keys, hidden, gradient, strict=True):
        states.append(timed("decode", timed("encode", one, key), key))
        grads.append(timed("decode_gradient", timed("encode_gradient", other, key), key))
        coded += codec.byte_count(key).coded
    # Document starts are dense with every prior, so that all variants are measured on the same tokens.
    ordinary = torch.stack([~dense_positions(b.document_starts, torch.tensor([0])) for b in batches])
    exact, true = hidden[ordinary], gradient[ordinary]
    error = torch.stack(states)[ordinary] - exact
    centred = exact - exact.mean(dim=0)
    fisher = true.T @ true
    return {
        "forward": float(error.square().sum() / centred.square().sum()),
        "fisher": float(((error @ fisher) * error).sum() / ((centred @ fisher) * centred).sum()),
        "backward": float((torch.stack(grads)[ordinary] - true).square().sum() / true.square().sum()),
        "bytes": coded / int(ordinary.sum()),
        **{f"{name}_ms": value for name, value in times.items()},
    }


def weight_gradients(
    model: Any, batches: list[Batch], codecs: list[BasisCodec] | None
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and summed gradients of all layers' matrices, with coded boundaries or (None) without."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in matrices.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    total = 0.0
    for batch in batches:
        key = CodecKey.of(batch, 0)
        if codecs is None:
            loss = batch_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            through = [lambda h, codec=codec, key=key: Coded.apply(h, codec, key) for codec in codecs]
            with boundary_hooks(model, through):
                loss = batch_loss(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach()) / len(batches)
    return total, {name: p.grad.clone() for name, p in matrices.items() if p.grad is not None}


def cosines(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Cosine of two sets of gradients, all together and by stage."""
    names: dict[str, list[str]] = {"all": list(one)}
    for name in one:
        layer = int(name.split(".layers.")[1].split(".")[0])
        names.setdefault(f"stage{sum(layer >= cut for cut in CUTS)}", []).append(name)
    result = {}
    for part, chosen in names.items():
        dot, first, second = (
            sum(float((a[n] * b[n]).sum()) for n in chosen)
            for a, b in ((one, other), (one, one), (other, other))
        )
        result[part] = dot / (first * second) ** 0.5
    return result


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--domain", default="manpages-de", help="as in benchmarks.quality; python is always there"
    )
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/swarm-peer/fidelity"), help="folder")
    parser.add_argument("--steps", type=int, nargs="+", default=[0], help="dense steps, multiples of 5")
    parser.add_argument(
        "--ages", type=int, nargs="+", default=[0], help="how many steps the priors are older"
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[80, 90, 95, 98, 99], help="mask ratios")
    parser.add_argument("--variant", action="append", metavar="NAME:KEY=VALUE,...", help="options of basis")
    parser.add_argument(
        "--fit", type=int, default=8, metavar="N", help="microbatches to fit on, 1,024 tokens each"
    )
    parser.add_argument("--test", type=int, default=2, metavar="N", help="held-out microbatches")
    parser.add_argument("--gradients", action="store_true", help="weight gradients too")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args()


def main() -> None:
    """Measure every case and print a table."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    console = Console(width=150)
    states = States(arguments.cache.expanduser(), arguments.domain, say=console.log)
    variants: list[tuple[str, dict[str, Any]]] = []
    for text in arguments.variant or ["context:prediction=context"]:
        name, _, options = text.partition(":")
        pairs = [option.split("=", 1) for option in options.split(",") if option]
        variants.append((name, {key: yaml.safe_load(value) for key, value in pairs}))
    tables = {
        config.prediction: token_table(states, config)
        for config in (BasisConfig(**options) for _, options in variants)
    }
    rows: list[dict[str, Any]] = []
    for step in arguments.steps:
        tested = states.captured(step, 0, arguments.test, held_out=True)
        dense = weight_gradients(states.load(step), tested.batches, None) if arguments.gradients else None
        for age in arguments.ages:
            if age > step:
                continue
            fitted = states.captured(step - age, 64, arguments.fit, held_out=False)
            for ratio in arguments.ratios:
                for name, options in variants:
                    config = BasisConfig(mask_ratio=ratio, **options)
                    codecs = fit_codecs(fitted, config, tables[config.prediction])
                    boundaries = [
                        measure(codec, hidden, gradient, tested.batches)
                        for codec, hidden, gradient in zip(
                            codecs, tested.hidden, tested.gradient, strict=True
                        )
                    ]
                    row = {
                        "step": step,
                        "age": age,
                        "ratio": ratio,
                        "variant": name,
                        "boundaries": boundaries,
                    }
                    if dense is not None:
                        loss, gradients = weight_gradients(states.load(step), tested.batches, codecs)
                        row |= {"loss": loss, "dense_loss": dense[0], "cosine": cosines(gradients, dense[1])}
                    rows.append(row)
                    console.log(f"step {step}, priors {age} steps older, ratio {ratio}, {name}")
                    if arguments.json:
                        arguments.json.write_text(json.dumps(rows, indent=1))
    console.print(as_table(rows))


def token_table(states: States, config: BasisConfig) -> TokenTable | None:
    """The token table that a run on this domain would have; None without prediction."""
    if config.prediction == "none":
        return None
    weight = states.load(0).get_input_embeddings().weight.detach()
    train = torch.stack([batch.token_ids for batch in states.batches(0, 100, held_out=False)])
    counts = torch.bincount(train.reshape(-1), minlength=weight.shape[0])
    return TokenTable(make_token_table(weight, counts, config.prediction))


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Figures of all boundaries in one line per case."""
    columns = ["step", "age", "ratio", "variant", "forward", "fisher", "backward", "bytes", "enc+dec ms"]
    if any("cosine" in row for row in rows):
        columns += ["loss (dense)", "cosine", "by stage"]
    table = Table(*columns, title="relative squared error at boundaries 0 / 1 / 2")
    for row in rows:
        parts = row["boundaries"]
        cells = [str(row[name]) for name in ("step", "age", "ratio", "variant")]
        cells += [" ".join(f"{p[name]:.3f}" for p in parts) for name in ("forward", "fisher", "backward")]
        cells.append(f"{parts[0]['bytes']:.1f}")
        total = sum(value for name, value in parts[0].items() if name.endswith("_ms"))
        cells.append(f"{total:.0f}")
        if "cosine" in row:
            stages = (f"{row['cosine'][f'stage{i}']:.2f}" for i in range(len(CUTS) + 1))
            cells += [
                f"{row['loss']:.3f} ({row['dense_loss']:.3f})",
                f"{row['cosine']['all']:.3f}",
                " ".join(stages),
            ]
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()
