"""A swarm whose members die and are replaced all the time: 3 stages x 3 replicas, a kill -9 every 20 seconds.

    python benchmarks/churn.py [--minutes 15] [--every 20] [--json churn.json]
    python benchmarks/churn.py --compute calibrated:40          for the throughput

Trains a small model twice, calmly and under churn, with real processes on loopback. Reports the longest stall,
the audit of all ledgers (trained twice, trained never, lost), the loss curve against the calm run's at equal
steps, the memory of peers that lived through it, and the throughput as a share of the calm run's times the mean
share of places that were held by a voting peer. Exit code 1 if the swarm did not bear it: a stall above ten
seconds, a ledger that is not exact, a loss outside the calm run's noise, memory that grows; with calibrated
compute, a throughput below 85%.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

LEAST_SHARE = 0.85
MOST_RSS_MB_PER_MINUTE = 1.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of churn")
    parser.add_argument("--calm-minutes", type=float, help="of the calm run before it; as many without it")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two deaths")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--samples-per-step", type=int, default=24)
    parser.add_argument("--compute", default="real", help="real or calibrated:MICROSECONDS_PER_TOKEN")
    parser.add_argument("--seed", type=int, default=0, help="of who dies")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--folder", type=Path, help="working folder, kept; without it, one that is removed")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    arguments = parse()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from peers.config import ComputeMode
    from tests.kit.churn import Churn, compare
    from tests.kit.swarm import Host

    compute = ComputeMode.parse(arguments.compute)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="swarm-peer-churn-"))
    folder.mkdir(parents=True, exist_ok=True)
    host = Host()
    result = None
    try:
        churn = Churn(
            host,
            folder,
            stages=arguments.stages,
            replicas=arguments.replicas,
            compute=compute,
            seed=arguments.seed,
        )
        churn.make_run(hidden=arguments.hidden, samples_per_step=arguments.samples_per_step)
        calm_minutes = arguments.calm_minutes or arguments.minutes
        print(f"calm, {calm_minutes:g} minutes ...", flush=True)
        calm = churn.soak("calm", 60 * calm_minutes)
        print(f"{calm.steps} steps, {calm.steps_per_s:.2f} per second", flush=True)
        print(f"churn, {arguments.minutes:g} minutes, a death every {arguments.every:g} s ...", flush=True)
        churned = churn.soak("churn", 60 * arguments.minutes, arguments.every)
        result = compare(churned, calm, has_loss=compute.is_real)
        growing = {n: s for n, s in result["rss_mb_per_minute"].items() if s > MOST_RSS_MB_PER_MINUTE}
        if growing:
            result["problems"].append(f"memory grows, in MB per minute: {growing}")
        share = result["throughput_share"]
        if not compute.is_real and (share is None or share < LEAST_SHARE):
            result["problems"].append(f"throughput is {share} of what the members left should give")
        result = {"compute": arguments.compute, "every_s": arguments.every, **result}
        print(json.dumps(result, indent=2))
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if result["problems"]:
            (folder / "report.txt").write_text(churned.report, encoding="utf-8")
            print(f"see {folder}/report.txt")
    finally:
        host.close()
        if arguments.folder is None and result is not None and not result["problems"]:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
