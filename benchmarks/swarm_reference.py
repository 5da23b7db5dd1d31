"""A real swarm with anchors against the in-process reference of the same run.

    python benchmarks/swarm_reference.py                                  SmolLM2, 4 stages x 2 replicas, 1 anchor
    python benchmarks/swarm_reference.py --steps 12 --model tiny --compute fp32      a minute, to try it

Trains a run with real processes on loopback whose plans take up priors as the anchor publishes them, then trains
the uncut model in this process: the same samples in the same order, the same codec, and, at each step, priors
fitted at the version whose priors the swarm had in force at that step. The two differ in rounding, in how gradients
are averaged (--averaging), and in which tokens of a pass are fitted. Reports, as JSON: held-out losses without a codec
before training and after both; the worst peer's seconds of waiting for priors and its share of the time; steps and
versions of the priors in force; the audit of the ledgers. Exit code 1 if the losses differ by more than --tolerance,
a peer waited for more than 5% of the time, or a ledger is not exact.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.manifest import RunManifest
    from tests.kit.swarm import Swarm

MOST_WAITED = 0.05
CACHE = Path("~/.cache/swarm-peer/quality")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="what init takes, or tiny for a random one")
    parser.add_argument(
        "--data", default="manpages-de", help="a domain of benchmarks.quality, or what init takes"
    )
    parser.add_argument("--data-cache", type=Path, default=CACHE, help="folder for a domain's texts")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples-per-step", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--mask-ratio", type=float, default=90.0)
    parser.add_argument("--prediction", default=None, help="of codec basis; init's default without it")
    parser.add_argument("--averaging", choices=["fp16", "fp32"], default="fp16")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--warmup-steps", type=int, default=8)
    parser.add_argument("--snapshot-every", type=int, default=10)
    parser.add_argument("--compute", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--eval-samples", type=int, default=64, help="held-out rows")
    parser.add_argument("--tolerance", type=float, default=0.04, help="nats that the losses may differ by")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds the swarm may take")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--folder", type=Path, help="working folder, kept; without it, one that is removed")
    return parser.parse_args()


def run_swarm(swarm: Swarm, arguments: argparse.Namespace, key: Path) -> dict[str, Any]:
    """Train with real peers. Returns figures, and for every step and boundary the version its prior was fitted at."""
    from tests.kit.evaluation import snapshot
    from tests.kit.ledger import audit

    names = [
        f"{stage}-{replica}" for stage in range(arguments.stages) for replica in range(arguments.replicas)
    ]
    swarm.seed()
    swarm.join(None, "anchor", is_anchor=True, identity=key, run_dir=swarm.run_dir)
    for name in names:
        swarm.join(
            int(name.partition("-")[0]),
            name,
            run_dir=swarm.run_dir,
            checkpoint_dir=swarm.folder / name / "checkpoints",
            serve_after_s=5.0,
        )
    swarm.wait_finished(names, arguments.deadline)
    audited = audit({name: swarm.members[name].ledger() for name in names}, stages=arguments.stages)
    in_force: dict[int, dict[int, int]] = {}
    for name in names:
        for message in swarm.members[name].messages:
            status = message.get("status") or {}
            for boundary, ref in ((status.get("priors") or {}).get("in_force") or {}).items():
                if boundary.isdigit() and ref["step"] is not None:
                    seen = in_force.setdefault(int(boundary), {})
                    seen[ref["step"]] = min(seen.get(ref["step"], 10**9), status["step"])
    files = [
        path
        for stage in range(arguments.stages)
        if (path := snapshot(swarm.folder, stage, arguments.steps)) is not None
    ]
    at = [audited.committed_at[step, 0] for step in range(arguments.steps)]
    said = [swarm.members[name].last("status") for name in names]
    waited = max(status["priors"]["waited_s"] for status in said)
    return {
        "problems": audited.problems(),
        "seconds": at[-1] - at[0],
        "step_s": median(later - earlier for earlier, later in pairwise(at)),
        "waited_s": waited,
        "waited_share": waited / (at[-1] - at[0]),
        "in_force": in_force,
        "files": files,
        "anchor": swarm.members["anchor"].last("status")["anchor"],
    }


def run_reference(
    manifest: RunManifest, run_dir: Path, in_force: dict[int, dict[int, int]], eval_samples: int
) -> tuple[float, float]:
    """Held-out losses before and after training the uncut model with priors of the same versions."""
    from peers.commands.assembly import assemble_initial
    from peers.commands.evaluate import heldout_loss, quiet_transformers, run_dataset
    from peers.commands.inspect import part_batches, run_codecs, step_samples
    from swarm.anchor.passes import pass_samples
    from swarm.data.dataset import PackedDataset
    from swarm.model.formats import compute_dtype
    from swarm.model.source import load_pretrained
    from swarm.reference import ReferenceTrainer

    quiet_transformers()
    with tempfile.TemporaryDirectory(prefix="swarm-peer-initial-") as folder:
        assemble_initial(manifest, run_dir / "artifacts", Path(folder))
        model, _ = load_pretrained(folder)
    heldout = run_dataset(run_dir)
    before = heldout_loss(model.float(), heldout, eval_samples)
    trainer = ReferenceTrainer(
        model,
        manifest.model.cuts,
        run_codecs(manifest, run_dir / "artifacts"),
        manifest.optimizer,
        manifest.total_steps,
        freeze=frozenset(manifest.model.freeze),
        compute_dtype=compute_dtype(manifest.compute, "cpu"),
        reference_loss_tokens=manifest.reference_loss_tokens,
    )
    dataset = PackedDataset(run_dir / "artifacts", manifest.data)
    rows = manifest.rows_per_microbatch
    fitted: dict[tuple[int, int], Any] = {}
    used_later = {version for seen in in_force.values() for version in seen if version}
    for step in range(manifest.total_steps):
        for boundary, seen in in_force.items():
            version = max((v for v, first in seen.items() if first <= step), default=0)
            if version:
                trainer.codecs[boundary] = fitted[boundary, version]
        trainer.step(part_batches(dataset, step_samples(manifest, step), rows), step)
        if step + 1 in used_later:
            batches = part_batches(dataset, pass_samples(manifest, step + 1), rows)
            for boundary, codec in enumerate(fit(manifest, run_dir, trainer.model, batches)):
                fitted[boundary, step + 1] = codec
        print(f"reference: step {step + 1} of {manifest.total_steps}", end="\r", flush=True)
    print()
    return before, heldout_loss(trainer.model.float(), heldout, eval_samples)


def fit(manifest: RunManifest, run_dir: Path, model: Any, batches: list[Any]) -> list[Any]:
    """The codec of every boundary with a prior fitted at the model's weights, as an anchor fits it."""
    from safetensors.torch import load_file

    from swarm.activation.calibrate import collect_boundary_samples
    from swarm.activation.config import BasisConfig
    from swarm.activation.fit import fit_basis_prior
    from swarm.activation.registry import build_codec, needs_tokens
    from swarm.activation.tokens import TOKENS_FILE, TokenTable
    from swarm.model.formats import compute_dtype

    codec, dtype = manifest.codec, compute_dtype(manifest.compute, "cpu")
    if not isinstance(codec, BasisConfig):
        raise SystemExit(f"codec {codec.name} has no priors")
    table = TokenTable(load_file(run_dir / "artifacts" / TOKENS_FILE)) if needs_tokens(codec) else None
    samples = collect_boundary_samples(
        model, manifest.model.cuts, batches, dtype, max_tokens=codec.calibration_tokens
    )
    return [
        build_codec(
            codec,
            hidden_size=manifest.model.hidden_size,
            boundary=boundary,
            run_seed=manifest.seed,
            prior=fit_basis_prior(
                found.hidden,
                found.gradient,
                found.offsets,
                codec,
                None if table is None else found.tokens.features(table, codec.prediction),
            ),
            device="cpu",
            dtype=dtype,
            tokens=table,
        )
        for boundary, found in enumerate(samples)
    ]


def make(swarm: Swarm, arguments: argparse.Namespace) -> Path:
    """The run; returns the anchor's key."""
    from dht.identity import Identity

    key = swarm.folder / "anchor.key"
    identity = Identity.load_or_create(key)
    identity.close()
    from benchmarks.quality.domains import DOMAINS, domain_source

    options: dict[str, Any] = {}
    if arguments.model != "tiny":
        data = arguments.data
        if data in DOMAINS:
            data = domain_source(data, arguments.data_cache.expanduser())
        options = {"model": arguments.model, "data": data}
    if arguments.model == "tiny":
        options["layers"] = 2 * arguments.stages
    if arguments.prediction is not None:
        options["prediction"] = arguments.prediction
    swarm.make_run(
        deadline_s=1200.0,
        stages=arguments.stages,
        replicas=arguments.replicas,
        steps=arguments.steps,
        max_tokens=2_000_000,
        samples_per_step=arguments.samples_per_step,
        sequence_length=arguments.sequence_length,
        codec="basis",
        mask_ratio=arguments.mask_ratio,
        averaging=arguments.averaging,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        freeze=("embedding", "head"),
        compute=arguments.compute,
        anchor_peers=(identity.peer_id,),
        snapshot_every=arguments.snapshot_every,
        **options,
    )
    return key


def main() -> int:
    """Run the benchmark."""
    arguments = parse()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from swarm.manifest import RunManifest
    from tests.kit.evaluation import final_loss
    from tests.kit.swarm import Host, Swarm

    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="swarm-peer-reference-"))
    folder.mkdir(parents=True, exist_ok=True)
    host = Host()
    try:
        swarm = Swarm(host, folder)
        began = time.monotonic()
        key = make(swarm, arguments)
        print(f"the run was made in {time.monotonic() - began:.0f} s", flush=True)
        try:
            trained = run_swarm(swarm, arguments, key)
        finally:
            swarm.kill_all()
    finally:
        host.close()
    print(json.dumps({name: value for name, value in trained.items() if name != "files"}), flush=True)
    manifest = RunManifest.load(swarm.run_dir / "manifest.yaml")
    after = final_loss(swarm.run_dir, trained.pop("files"), arguments.eval_samples)
    print(f"held-out loss of the swarm: {after:.4f}", flush=True)
    before, reference = run_reference(manifest, swarm.run_dir, trained["in_force"], arguments.eval_samples)
    result = {
        "model": arguments.model,
        "mask_ratio": arguments.mask_ratio,
        "steps": arguments.steps,
        "loss_before": before,
        "loss_swarm": after,
        "loss_reference": reference,
        "difference": after - reference,
        **trained,
    }
    if abs(after - reference) > arguments.tolerance:
        result["problems"].append(f"the losses differ by {after - reference:+.4f}")
    if result["waited_share"] > MOST_WAITED:
        result["problems"].append(f"a peer waited {result['waited_share']:.1%} of the time for priors")
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
