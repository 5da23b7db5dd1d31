"""Does a peer keep to its caps, at the network interface, and does control stay fast?

    sudo python benchmarks/shaper.py [--quick] [--rates 5 20 50 200] [--seconds 8]

Real links over real p2pd between network namespaces (`benchmarks/testbed`). One peer is capped, one or eight
neighbours are not; all bulk streams are kept busy, and the bytes of the capped peer's interface are read every
100 ms. After the first 2 s every window of 2 s must hold 96% to 101% of the volunteer's figure. Then control
frames are timed while a 50 Mbit/s line with a round trip of 50 ms is full, and the excess that each neighbour sends
at the start, before it has learned of the cap, is measured. Prints JSON; exit code 1 if a criterion fails.
Needs root, iproute2 and a C compiler; takes about four minutes (--quick: half a minute).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.testbed import Host, Network, TestbedError

Direction = Literal["up", "down"]
WINDOW_S, WARM_UP_S, SAMPLE_S = 2.0, 2.0, 0.1
LEAST, MOST = 0.96, 1.01
START_BURST_BYTES = 1 << 20
"""Of each neighbour, beyond the cap."""
PING_LINE_MBPS, PING_RTT_MS, PING_MARGIN_MS = 50.0, 50.0, 20.0
HOME_LINE_MBPS = (5.0, 50.0)
ANSWER_S = 120.0
CAPPED, OTHERS = 0, 1
"""The hosts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The interface's counters at a moment of the monotonic clock."""

    at: float
    down: int
    up: int


class Worker:
    """The peers on one host (`benchmarks/shaper_peer.py`)."""

    def __init__(self, network: Network, host: int) -> None:
        self.address = network.address(host)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = network.start(
            host,
            ["chrt", "-r", "1", sys.executable, "-m", "benchmarks.shaper_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
            cwd=Path(__file__).resolve().parents[1],
        )

    def answer(self) -> Any:
        """The next answer. Raises SystemExit if none comes."""
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        line = self.process.stdout.readline() if ready and self.process.stdout else ""
        if not line:
            raise SystemExit(f"shaper: the peers on {self.address} did not answer")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have a command carried out; returns its answer."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command whose answer is fetched later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")

    def counters(self) -> Sample:
        """The host's interface."""
        for line in Path(f"/proc/{self.process.pid}/net/dev").read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == "eth0":
                fields = figures.split()
                return Sample(time.monotonic(), int(fields[0]), int(fields[8]))
        raise SystemExit("shaper: the host has no eth0")


class Bed:
    """A network of two hosts with their peers."""

    def __init__(self, network: Network) -> None:
        self.capped, self.others = Worker(network, CAPPED), Worker(network, OTHERS)
        self.workers = (self.capped, self.others)

    def wait(self) -> None:
        """Until both have started."""
        for worker in self.workers:
            worker.answer()

    def meet(self, neighbours: int, up: float | None, down: float | None) -> None:
        """One capped peer and its neighbours, all linked."""
        capped = self.capped.ask("open", count=1, address=self.capped.address, stage=0, up=up, down=down)
        others = self.others.ask(
            "open", count=neighbours, address=self.others.address, stage=1, up=None, down=None
        )
        self.others.tell("meet", peers=capped)
        self.capped.ask("meet", peers=others)
        self.others.answer()

    def close(self) -> None:
        """End the links."""
        for worker in self.workers:
            worker.ask("close")


def watch(worker: Worker, seconds: float) -> list[Sample]:
    """Read the counters every 100 ms."""
    samples = [worker.counters()]
    while samples[-1].at - samples[0].at < seconds:
        time.sleep(SAMPLE_S)
        samples.append(worker.counters())
    return samples


def window_shares(samples: list[Sample], direction: Direction, mbps: float) -> list[float]:
    """For every window of 2 s that begins at a sample after the warm-up: its bytes as part of the figure's."""
    shares: list[float] = []
    for index, first in enumerate(samples):
        last = next((s for s in samples[index:] if s.at - first.at >= WINDOW_S), None)
        if first.at - samples[0].at >= WARM_UP_S and last is not None:
            nbytes = getattr(last, direction) - getattr(first, direction)
            shares.append(nbytes * 8e-6 / (last.at - first.at) / mbps)
    return shares


def start_burst(samples: list[Sample], direction: Direction, mbps: float) -> float:
    """Most bytes beyond the cap that had passed at any moment of the first 2 s."""
    first = samples[0]
    return max(
        getattr(s, direction) - getattr(first, direction) - (s.at - first.at) * mbps * 1e6 / 8
        for s in samples
        if s.at - first.at <= WARM_UP_S
    )


def rate_case(
    bed: Bed, up: float | None, down: float | None, neighbours: int, seconds: float
) -> dict[str, Any]:
    """Caps in Mbit/s, all bulk streams busy in every direction that has one."""
    caps: dict[Direction, float] = {k: v for k, v in (("up", up), ("down", down)) if v is not None}  # type: ignore[misc]
    bed.meet(neighbours, up, down)
    samples = [bed.capped.counters()]
    for direction in caps:
        sender = bed.capped if direction == "up" else bed.others
        sender.ask("flood", kind="forward", frame_bytes=1 << 20)
    samples += watch(bed.capped, WARM_UP_S + WINDOW_S + seconds)
    figures = [figure for worker in bed.workers for figure in worker.ask("figures")]
    bed.close()
    shares = {way: window_shares(samples, way, mbps) for way, mbps in caps.items()}
    burst = start_burst(samples, "down", down) / neighbours if down is not None else 0.0
    return {
        "case": ", ".join(f"{way} {mbps:g} Mbit/s" for way, mbps in caps.items())
        + f", {neighbours} neighbours",
        "least_percent": {way: round(100 * min(found), 2) for way, found in shares.items()},
        "most_percent": {way: round(100 * max(found), 2) for way, found in shares.items()},
        "start_burst_bytes_per_neighbour": round(burst),
        "frames_by_neighbour": [n for figure in figures for n in figure["received"].values()],
        "passes": all(min(found) >= LEAST and max(found) <= MOST for found in shares.values())
        and burst <= START_BURST_BYTES,
    }


def ping_case(bed: Bed, direction: Direction, cap_mbps: float, seconds: float) -> dict[str, Any]:
    """Control round trips while the capped peer's line is full in a direction."""
    bed.meet(1, cap_mbps, cap_mbps)
    idle = sorted(bed.capped.ask("ping", seconds=2.0))
    (bed.capped if direction == "up" else bed.others).ask("flood", kind="forward", frame_bytes=1 << 20)
    time.sleep(WARM_UP_S)
    bed.capped.tell("ping", seconds=seconds)
    samples = watch(bed.capped, seconds)
    times = sorted(bed.capped.answer())
    bed.close()
    limit = 2 * PING_RTT_MS + PING_MARGIN_MS
    nbytes = getattr(samples[-1], direction) - getattr(samples[0], direction)
    p95 = times[int(0.95 * len(times))]
    return {
        "case": f"ping while {direction} is full: line {PING_LINE_MBPS:g} Mbit/s, cap {cap_mbps:g}, 50 ms",
        "idle_p50_ms": round(idle[len(idle) // 2], 1),
        "p50_ms": round(times[len(times) // 2], 1),
        "p95_ms": round(p95, 1),
        "limit_ms": limit,
        "line_mbps": round(nbytes * 8e-6 / (samples[-1].at - samples[0].at), 2),
        "passes": p95 < limit,
    }


def main() -> int:
    """Run the cases and print their JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rate and short measurements")
    parser.add_argument("--rates", type=float, nargs="*", default=[5, 20, 50, 200], help="Mbit/s")
    parser.add_argument(
        "--neighbours", type=int, nargs="+", default=[1, 8], help="senders or receivers at once"
    )
    parser.add_argument("--directions", nargs="+", choices=("up", "down"), default=("up", "down"))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement, after warm-up")
    parser.add_argument("--no-ping", action="store_true", help="rates only")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.neighbours, options.seconds = [20], [1, 8], 3.0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cases: list[dict[str, Any]] = []
    line = Host(PING_LINE_MBPS, PING_LINE_MBPS, PING_RTT_MS / 2)
    try:
        with Network([Host(), Host()]) as wide, Network([line, Host(0, 0, PING_RTT_MS / 2)]) as narrow:
            beds = Bed(wide), Bed(narrow)
            for bed in beds:
                bed.wait()
            for mbps in options.rates:
                for direction in options.directions:
                    caps = (mbps, None) if direction == "up" else (None, mbps)
                    for neighbours in options.neighbours:
                        cases.append(rate_case(beds[0], *caps, neighbours, options.seconds))
                        print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
            if options.rates and len(options.directions) == 2:
                # A home line: what comes down costs acknowledgements that go up.
                cases.append(rate_case(beds[0], *HOME_LINE_MBPS, 1, options.seconds))
                print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
            for direction in () if options.no_ping else options.directions:
                cases.append(ping_case(beds[1], direction, PING_LINE_MBPS, max(5.0, options.seconds)))
                print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    except TestbedError as error:
        print(f"shaper: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    failed = [case["case"] for case in cases if not case["passes"]]
    print(json.dumps({"cases": cases, "failed": failed}, indent=2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
