"""What the sudden death of a peer costs: kill -9 at every named point, of everybody it can hit.

    python benchmarks/faults.py [--results faults.jsonl] [--only POINT[:VICTIM] ...] [--shape 4x2 2x3]
    python benchmarks/faults.py --model smollm2-135m --steps 24 --only after_backward:stage-1

Every case is a whole run of real processes on loopback (fp32, uncompressed) in which one peer kills itself at a
point (see `peers.injector`), compared with one undisturbed run: the run completes, every microbatch of every
committed plan was trained exactly once, replicas are equal bit for bit, the held-out loss is the same within
0.001, and nothing but the dead peer's own work of the step was done again. The case refill lets a stage of one
peer stand empty for two minutes. Results are JSON lines; cases that have one are not run again. Exit code 1 if a
case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPES = {"4x2": None, "2x3": ("after_first_commit", "before_commit")}
"""Stages x replicas, and the points tried there; None: all."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=Path("faults.jsonl"), help="file of results, appended"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="POINT[:VICTIM]", help="only these cases")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="stages x replicas")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run")
    parser.add_argument("--model", help="train this model (4x2) instead of a small random one")
    parser.add_argument(
        "--run-dir", type=Path, help="use this run, whatever it trains, instead of making one"
    )
    parser.add_argument(
        "--refill-after", type=float, default=120.0, help="seconds a stage stands empty (refill)"
    )
    parser.add_argument("--deadline", type=float, help="seconds a run may take")
    parser.add_argument("--folder", type=Path, help="working folder, kept; without it, one that is removed")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    arguments = parser.parse_args()
    if arguments.model:
        arguments.shape = ["4x2"]
    return arguments


def take_shape(arguments: argparse.Namespace) -> None:
    """A run that exists decides the shape of the swarm, and its length."""
    from swarm.manifest import RunManifest

    if arguments.run_dir is not None:
        manifest = RunManifest.load(arguments.run_dir / "manifest.yaml")
        arguments.shape = [f"{manifest.model.stages}x{manifest.min_replicas}"]
        arguments.steps = manifest.total_steps


def is_wanted(case: str, only: list[str]) -> bool:
    """Whether a case POINT:VICTIM is among those asked for."""
    return not only or case in only or case.partition(":")[0] in only


def chosen_cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(shape, case) of everything asked for."""
    from tests.kit.faults import cases

    for shape in arguments.shape:
        for case in cases(int(shape.partition("x")[0]), SHAPES.get(shape)):
            if is_wanted(str(case), arguments.only):
                yield shape, str(case)
    if is_wanted("refill:stage-1", arguments.only) and not (arguments.model or arguments.run_dir):
        yield "3x1", "refill:stage-1"


class Results:
    """The JSON lines of this and earlier calls."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def get(self, shape: str, case: str) -> dict[str, Any] | None:
        """The newest result of a case of this run, if it passed."""
        for line in reversed(self.lines):
            if (line["shape"], line["case"], line["run"]) == (shape, case, self.run):
                return line if not line["problems"] else None
        return None

    def add(self, result: dict[str, Any]) -> dict[str, Any]:
        """Keep a result."""
        line = {**result, "run": self.run}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line


def describe(result: dict[str, Any]) -> str:
    """One line of the table."""
    verdict = "; ".join(result["problems"]) or "ok"
    step = "-" if result["step"] is None else result["step"]
    difference = result["loss_difference"]
    loss = "-" if difference is None else f"{difference:.1e}"
    return (
        f"{result['shape']:4} {result['case']:32} {result['victim']:6} step {step!s:>3}  "
        f"lost {result['seconds_lost']:6.2f} s  again {result['replayed']:3} of {result['share']:3}  "
        f"loss {loss:>7}  {result['seconds']:5.1f} s  {verdict}"
    )


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run what is asked for and has no result yet."""
    from tests.kit.faults import Case, FaultBench
    from tests.kit.refill import refill
    from tests.kit.swarm import Host

    run_name = str(arguments.run_dir or arguments.model or f"random, {arguments.steps} steps")
    results = Results(arguments.results, run_name)
    todo = list(chosen_cases(arguments))
    options: dict[str, Any] = {"steps": arguments.steps}
    if arguments.model:
        options |= {
            "model": arguments.model,
            "data": "stdlib",
            "max_tokens": 60_000,
            "sequence_length": 128,
            "samples_per_step": 8,
            "rows_per_microbatch": 1,
            "learning_rate": 2e-4,
            "averaging": "fp32",
            "freeze": ("embedding", "head"),
        }
    host = Host()
    benches: dict[str, FaultBench] = {}
    found = []
    try:
        for number, (shape, case) in enumerate(todo, 1):
            result = results.get(shape, case)
            note = " (earlier)" if result else ""
            if result is None and case.startswith("refill"):
                result = results.add(refill(host, folder / "refill", arguments.refill_after))
            elif result is None:
                if shape not in benches:
                    print(f"{shape}: the run, and once undisturbed ...", flush=True)
                    is_small = not (arguments.model or arguments.run_dir)
                    deadline = arguments.deadline or (120.0 if is_small else 3600.0)
                    bench = FaultBench(host, folder / shape, arguments.run_dir, deadline_s=deadline)
                    stages, _, replicas = shape.partition("x")
                    bench.make_run(stages=int(stages), replicas=int(replicas), **options)
                    usual = bench.reference.seconds
                    print(f"{shape}: {usual:.1f} s, held-out loss {bench.reference.loss:.6f}", flush=True)
                    benches[shape] = bench
                step = None if not (arguments.model or arguments.run_dir) else arguments.steps // 2
                point, _, victim = case.partition(":")
                one = Case(point, victim)
                bench = benches[shape]
                result = results.add(bench.run_case(one) if step is None else bench.run_case(one, step))
            found.append(result)
            print(f"{number:2}/{len(todo)} {describe(result)}{note}", flush=True)
            if result["problems"] and "folder" in result:
                print(f"      see {result['folder']}/report.txt", flush=True)
    finally:
        host.close()
    failed = [result for result in found if result["problems"]]
    print()
    for result in found:
        print(describe(result))
    lost = sorted(result["seconds_lost"] for result in found)
    print(
        json.dumps(
            {
                "run": run_name,
                "cases": len(found),
                "failed": [f"{result['shape']} {result['case']}" for result in failed],
                "seconds_lost_median": lost[len(lost) // 2] if lost else None,
                "seconds_lost_worst": lost[-1] if lost else None,
                "loss_difference_worst": max(
                    (result["loss_difference"] for result in found if result["loss_difference"] is not None),
                    default=None,
                ),
                "seconds": round(sum(result["seconds"] for result in found), 1),
            },
            indent=2,
        )
    )
    return 1 if failed else 0


def main() -> int:
    """Run the benchmark."""
    arguments = parse()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    take_shape(arguments)
    if arguments.list:
        for shape, case in chosen_cases(arguments):
            print(shape, case)
        return 0
    began = time.monotonic()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="swarm-peer-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    code = 1
    try:
        code = run(arguments, folder)
    finally:
        if arguments.folder is None and code == 0:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{time.monotonic() - began:.0f} s altogether", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
