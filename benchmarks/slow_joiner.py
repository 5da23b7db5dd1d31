"""What slow lines cost a swarm, and whether those behind them are treated as they should be.

    sudo python benchmarks/slow_joiner.py [CASE ...] [--fast 20:20:50] [--slow 1:1:50] [--cap 0.7] [--soak 600]

Real peers on hosts joined by lines (`benchmarks/testbed`): a joiner that can keep up and one that cannot, a replica
whose line collapses, a pulled cable, a swarm cut in two. Prints JSON; exit code 1 if a case has problems.
Needs root, iproute2, nft and a C compiler; each case takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.testbed import Host as Line
from benchmarks.testbed import TestbedError
from tests.kit import lines
from tests.kit.swarm import Host


def main() -> int:
    """Run the cases and print their JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help="joiners, collapse, cable, partition; default: all"
    )
    parser.add_argument(
        "--fast", type=Line.parse, default=Line(20, 20, 50), help="UP_MBPS:DOWN_MBPS:DELAY_MS"
    )
    parser.add_argument("--slow", type=Line.parse, default=Line(1, 1, 50), help="UP_MBPS:DOWN_MBPS:DELAY_MS")
    parser.add_argument("--cap", type=float, help="the slow joiner's own --max-download-mbps")
    parser.add_argument(
        "--hidden", type=int, default=128, help="width of the joiners' model: size of an update"
    )
    parser.add_argument(
        "--soak", type=float, default=0.0, help="seconds without the replica whose line collapsed"
    )
    parser.add_argument("--away", type=float, default=20.0, help="seconds without the cable")
    options = parser.parse_args()
    cases: dict[str, Callable[[Host, Path], dict[str, Any]]] = {
        "joiners": lambda host, folder: lines.slow_joiners(
            host, folder, options.fast, options.slow, hidden=options.hidden, cap_mbps=options.cap
        ),
        "collapse": lambda host, folder: lines.collapsing_line(host, folder, soak_s=options.soak),
        "cable": lambda host, folder: lines.pulled_cable(host, folder, away_s=options.away),
        "partition": lambda host, folder: lines.partition(host, folder, away_s=options.away),
    }
    if unknown := set(options.cases) - set(cases):
        parser.error(f"unknown case {sorted(unknown)[0]!r}: choose from {', '.join(cases)}")
    results: dict[str, Any] = {}
    host = Host()
    try:
        for name in options.cases or cases:
            with tempfile.TemporaryDirectory(prefix="swarm-peer-lines-") as folder:
                try:
                    results[name] = cases[name](host, Path(folder))
                except TimeoutError as error:
                    results[name] = {"problems": [str(error)]}
            print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
    except TestbedError as error:
        print(f"slow_joiner: {error}", file=sys.stderr)
        return 2
    finally:
        host.close()
    print(json.dumps(results, indent=2))
    return 1 if any(result["problems"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
