"""What does a round cost beyond moving its payload, and what does hivemind's averager take on the same tensors?

    python -m benchmarks.round_overhead                       # loopback
    sudo .venv/bin/python -m benchmarks.round_overhead --rtt-ms 0 50

Eight replicas of one stage, each a process with its own p2pd, links, compute thread and rounds; no model. In turn, on
the same links: a whole round, from the last replica's settled ledger to the weights of the last one; the frames of
its exchange alone, with nothing computed ("moving it"); the exchange without a leader. The overhead is the first less
the median of the second. Then, with as many processes on the same hosts, hivemind's DecentralizedAverager: `step()`
(finding the group, then the all-reduce), and the all-reduce alone where the group was found ahead. A round trip above
0 takes network namespaces (`benchmarks/testbed`): root, iproute2, a C compiler. Prints a table; exit code 1 if an
overhead is above its limit. All processes share this machine's cores: ratios within a run say more than times.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.round_overhead import hivemind_member, member
from benchmarks.round_overhead.crew import Crew, Place
from benchmarks.round_overhead.report import Case, stages_of, table, took
from benchmarks.testbed import Host, Network, TestbedError

HEADSTART_S = 0.1
"""From the command to the beginning."""
IDLE_S, IDLE_WITH_DELAY_S = 0.4, 1.5
"""Before it: every measurement finds links that were idle, and TCP, where that takes round trips, slow again."""
KINDS = ("round", "move", "exchange")
BYTES = {"fp32": 4, "fp16": 2}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each kind")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before them that do not count")
    parser.add_argument("--payloads", type=float, nargs="+", default=[0.004, 1], help="MB of one vector")
    parser.add_argument("--averaging", choices=tuple(BYTES), default="fp32", help="what crosses, at both")
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0], help="0: loopback")
    parser.add_argument("--mbps", type=float, default=0.0, help="of every host's line; 0: not shaped")
    parser.add_argument("--no-hivemind", action="store_true")
    parser.add_argument("--hivemind-rounds", type=int, default=8, help="measurements of each kind")
    parser.add_argument("--matchmaking", type=float, default=5.0, help="hivemind's min_matchmaking_time, s")
    parser.add_argument("--json", type=Path, help="also write all figures there")
    return parser.parse_args(arguments)


def begin_all(crew: Crew, case: Case, what: str, number: int) -> list[dict[str, float]]:
    """One measurement, begun by all replicas at once; their marks."""
    crew.ask_all("prepare", what, number)
    time.sleep(IDLE_WITH_DELAY_S if case.rtt_ms else IDLE_S)
    return list(crew.ask_all("go", time.monotonic() + HEADSTART_S))


def measure_rounds(crew: Crew, case: Case, options: argparse.Namespace) -> None:
    """Rounds and their parts, in turn."""
    crew.ask_all("begin", options.averaging, elements_of(case, options))
    for number in range(options.warm_up + options.rounds):
        # Each kind comes first, second and third in turn: links remember what was sent before.
        order = [KINDS[(number + place) % len(KINDS)] for place in range(len(KINDS))]
        marks = {kind: begin_all(crew, case, kind, number) for kind in order}
        if number >= options.warm_up:
            case.rounds.append(took(marks["round"]))
            case.stages.append(stages_of(marks["round"]))
            case.moves.append(took(marks["move"]))
            case.exchanges.append(took(marks["exchange"]))
    if len(set(crew.ask_all("weights"))) != 1:
        raise RuntimeError("the replicas' weights differ")


def measure_hivemind(crew: Crew, case: Case, options: argparse.Namespace) -> None:
    """Its averager: whole steps, and all-reduces whose group was found ahead."""
    elements = elements_of(case, options)
    prefix = f"payload{case.payload_bytes}rtt{case.rtt_ms:g}".replace(".", "x")
    crew.ask_all("begin", options.averaging, elements, case.replicas, options.matchmaking, prefix)
    for number in range(1 + options.hivemind_rounds):
        for what, times in (("round", case.hivemind), ("ahead", case.ahead)):
            marks = begin_all(crew, case, what, number)
            if min(each["members"] for each in marks) < case.replicas:
                case.partial += 1
            elif number:
                times.append(took(marks))
            say(f"hivemind {what}: {took(marks):.3f} s, {[int(each['members']) for each in marks]}")


def elements_of(case: Case, options: argparse.Namespace) -> int:
    """Elements of the vector."""
    return max(1, case.payload_bytes // BYTES[options.averaging])


def measure(rtt_ms: float, options: argparse.Namespace, folder: str) -> list[Case]:
    """All payloads over one kind of links."""
    count = options.replicas
    cases = [Case(rtt_ms, options.mbps, round(1e6 * size), count) for size in options.payloads]
    with ExitStack() as stack:
        places = [Place(position, "127.0.0.1", "", folder) for position in range(count)]
        if rtt_ms:
            hosts = [Host(options.mbps, options.mbps, rtt_ms / 2)] * count
            network = stack.enter_context(Network(hosts))
            places = [
                Place(position, network.address(position), network.namespace(position), folder)
                for position in range(count)
            ]
        with Crew(places, member.serve) as crew:
            crew.ask_all("meet", crew.ask_all("open"))
            for case in cases:
                measure_rounds(crew, case, options)
                say(json.dumps(case.figures()))
        if not options.no_hivemind:
            with Crew(places, hivemind_member.serve) as crew:
                first: list[str] = crew.ask(0, "open", [])
                for position in range(1, count):
                    crew.ask(position, "open", first)
                for case in cases:
                    measure_hivemind(crew, case, options)
    return cases


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    logging.getLogger("swarm_peer").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cases: list[Case] = []
    try:
        for rtt_ms in options.rtt_ms:
            with tempfile.TemporaryDirectory(prefix="sp-") as folder:
                tempfile.tempdir = folder  # p2pd's sockets go along
                cases += measure(rtt_ms, options, folder)
                tempfile.tempdir = None
    except TestbedError as error:
        print(f"round_overhead: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(cases))
    for case in cases:
        stages = ", ".join(f"{stage} {ms:g}" for stage, ms in case.stage_medians().items())
        print(f"{case.rtt_ms:g} ms, {case.payload_bytes / 1e6:.3g} MB, median ms per stage: {stages}")
    if options.json is not None:
        report: dict[str, Any] = {
            "averaging": options.averaging,
            "matchmaking_s": options.matchmaking,
            "cases": [case.figures() for case in cases],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(case.is_within for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
