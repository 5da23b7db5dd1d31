"""How fast a pipeline's boundaries move payload on loopback, without computing anything.

    python benchmarks/boundary_throughput.py [--seconds 20] [--codec dense] [--hidden 2048]

Four stages with one replica each, `--compute calibrated:0`, microbatches of 2,048 tokens, gradients back,
ledger and counters on: everything but the layers is real (seed, DHT, libp2p, links, plan, rounds). Prints
JSON: payload bytes per second summed over all boundaries and directions after the warm-up, and CPU seconds
per GB by process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, SEQUENCE = 64, 32
STAGES = 4


def make_run(folder: Path, hidden: int, codec: str) -> None:
    """A tiny run whose manifest then names a wide model: calibrated peers fetch no weights."""
    from peers.commands.build import codec_config
    from peers.commands.init import RunOptions
    from swarm.manifest import load_owner_key
    from tests.kit.tiny import make_run as make_tiny_run

    manifest = make_tiny_run(folder, {"stages": STAGES, "replicas": 1, "steps": 100_000, "compute": "bf16"})
    wide = {
        **manifest.model.config,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": STAGES,
    }
    wide["head_dim"] = hidden // 4
    section = manifest.model.model_copy(
        update={"config": wide, "cuts": (1, 2, 3), "freeze": ("embedding", "head")}
    )
    options = RunOptions(codec=codec, mask_ratio=None)  # type: ignore[arg-type]
    changed = manifest.model_copy(
        update={
            "model": section,
            "codec": codec_config(options),
            "rows_per_microbatch": ROWS,
            "samples_per_step": 32 * ROWS,
            "snapshot_every": 10**9,
            "early_snapshots": (),
        }
    )
    changed.signed(load_owner_key(folder / "run" / "owner.key")).save(folder / "run" / "manifest.yaml")


def entry(request: dict[str, Any], descriptor: int) -> int:
    """A forked child: makes the run, or is a peer."""
    import torch

    from peers.local import peer_entry

    torch.set_num_threads(1)
    if request["what"] == "run":
        os.close(descriptor)
        logging.disable(logging.WARNING)
        make_run(Path(request["folder"]), request["hidden"], request["codec"])
        return 0
    return peer_entry(request, descriptor)


class Watched:
    """A peer process and what it last said."""

    def __init__(self, name: str, pid: int, pipe: int) -> None:
        self.name, self.pid, self.pipe = name, pid, pipe
        self.waiting = b""
        self.status: dict[str, Any] = {}
        self.address = ""

    def read(self) -> None:
        """Take in what the pipe holds."""
        try:
            while data := os.read(self.pipe, 1 << 16):
                self.waiting += data
        except BlockingIOError:
            pass
        *lines, self.waiting = self.waiting.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.status = message.get("status", self.status)
            if "ready" in message:
                self.address = message["ready"]["addresses"][0]

    def cpu_seconds(self) -> dict[str, float]:
        """User and system seconds of the peer and of its p2pd."""
        import psutil

        process = psutil.Process(self.pid)
        found = {"peer": process}
        for child in process.children():
            if "p2pd" in child.name():
                found["p2pd"] = child
        return {name: sum(p.cpu_times()[:2]) for name, p in found.items()}

    def payload_bytes(self) -> int:
        """Boundary frames sent so far."""
        up = self.status.get("bytes", {}).get("up", {})
        return int(up.get("forward", 0)) + int(up.get("gradient", 0))


def main() -> None:
    """Run the benchmark and print its JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="measured seconds after the warm-up")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds before measuring")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the hidden states")
    parser.add_argument("--codec", choices=("dense", "mask"), default="dense")
    arguments = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would forbid the fork
    import peers.commands.build
    import peers.peer  # noqa: F401 - imported before the fork, so that peers start in milliseconds
    from peers.config import ComputeMode, PeerConfig
    from peers.local import encode_config
    from peers.zygote import Zygote

    zygote = Zygote.start(entry)
    folder = Path(tempfile.mkdtemp(prefix="swarm-peer-bench-"))
    watched: list[Watched] = []

    def spawn(name: str, config: PeerConfig) -> Watched:
        request = {"what": "peer", "config": encode_config(config)}
        peer = Watched(name, *zygote.spawn(request, folder / f"{name}.log"))
        watched.append(peer)
        return peer

    def poll(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            select.select([peer.pipe for peer in watched], [], [], min(left, 0.2))
            for peer in watched:
                peer.read()
            if dead := zygote.exits():
                raise SystemExit(f"a peer ended: {dead}; see {folder}")

    try:
        _, pipe = zygote.spawn(
            {"what": "run", "folder": str(folder), "hidden": arguments.hidden, "codec": arguments.codec},
            folder / "run.log",
        )
        os.close(pipe)
        while not (exits := zygote.exits()):
            time.sleep(0.1)
        if exits[0].code:
            raise SystemExit((folder / "run.log").read_text())
        listen = ("/ip4/127.0.0.1/tcp/0",)
        seed = spawn("seed", PeerConfig(stage=None, run_dir=folder / "run", listen=listen))
        while not seed.address:
            poll(0.2)
        peers_ = [
            spawn(
                f"stage-{stage}",
                PeerConfig(
                    stage=stage,
                    initial_peers=(seed.address,),
                    data_dir=folder / f"data-{stage}",
                    listen=listen,
                    threads=1,
                    compute=ComputeMode(0.0),
                ),
            )
            for stage in range(STAGES)
        ]
        while not all(peer.payload_bytes() > 0 for peer in peers_):
            poll(0.5)
        poll(arguments.warmup)
        before = [(peer.payload_bytes(), peer.cpu_seconds()) for peer in peers_]
        steps, began = peers_[0].status["step"], time.monotonic()
        poll(arguments.seconds)
        elapsed = time.monotonic() - began
        after = [(peer.payload_bytes(), peer.cpu_seconds()) for peer in peers_]
        moved = sum(b[0] - a[0] for a, b in zip(before, after, strict=True))
        cpu = {
            f"{peer.name}/{part}": round((b[1][part] - a[1][part]) / (moved / 1e9), 3)
            for peer, a, b in zip(peers_, before, after, strict=True)
            for part in b[1]
        }
        result = {
            "codec": arguments.codec,
            "hidden": arguments.hidden,
            "tokens_per_microbatch": ROWS * SEQUENCE,
            "seconds": round(elapsed, 2),
            "payload_mb_per_s": round(moved / elapsed / 1e6, 1),
            "microbatches_done": [peer.status["microbatches_done"] for peer in peers_],
            "steps": peers_[0].status["step"] - steps,
            "cpu_seconds_per_gb": cpu,
            "cpu_seconds_per_gb_total": round(sum(cpu.values()), 3),
            "frames_refused": sum(peer.status["frames_refused"] for peer in peers_),
        }
        print(json.dumps(result, indent=2))
    finally:
        zygote.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
