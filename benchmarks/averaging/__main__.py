"""What compressors and outer loops cost in loss at equal steps, and how many bytes they move.

    python -m benchmarks.averaging --list                    rows, what they are, which are done
    python -m benchmarks.averaging --threads 1               all rows; may be started twice: two processes share them
    python -m benchmarks.averaging --only fp32 sign topk-0.5% --steps 20 --domain python
    python -m benchmarks.averaging swarm                     some rows again, through a real swarm on loopback
    python -m benchmarks.averaging report                    the tables and the plot of docs/averaging.md

SmolLM2-135M on the quality benchmark's data, simulated replicas (two unless a row says otherwise) with an equal share
of a step's four rows each, codecs and means of `swarm.gradient.simulate`, whose bits are those of real peers
(`tests/e2e/test_exchange_links.py`). Boundaries are not coded. Finished rows are lines of the journal and are not run
again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

JOURNAL = Path(__file__).parent.parent / "results" / "averaging.jsonl"
CACHE = Path("~/.cache/swarm-peer/quality")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.averaging",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=("run", "swarm", "report"), default="run")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only rows of these names")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--domain", default="manpages-de", help="of the quality benchmark, or a folder of texts"
    )
    parser.add_argument("--model", help="instead of SmolLM2-135M: what `init` takes")
    parser.add_argument("--max-tokens", type=int, default=500_000, help="of the packed data")
    parser.add_argument("--learning-rate", type=float, help="instead of the rows' own")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of this process")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="finished rows, JSON Lines")
    parser.add_argument("--data-cache", type=Path, default=CACHE, help="texts, packed rows and models")
    parser.add_argument(
        "--output", type=Path, default=Path("docs"), help="report: folder of averaging.md and img/"
    )
    options = parser.parse_args(arguments)
    for name in ("journal", "data_cache", "output"):
        setattr(options, name, getattr(options, name).expanduser())
    if min(options.steps, options.threads, options.max_tokens) < 1:
        parser.error("--steps, --threads and --max-tokens must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or report; returns the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    # Before torch is imported, or its pools keep the machine's number.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rich.console import Console

    from benchmarks.averaging.rows import ROWS
    from benchmarks.quality.journal import Journal

    console = Console(highlight=False, soft_wrap=True)
    journal = Journal(options.journal)
    unknown = set(options.only) - {row.name for row in ROWS}
    if unknown:
        console.print(
            f"error: no rows {sorted(unknown)}; there are {', '.join(row.name for row in ROWS)}", markup=False
        )
        return 2
    try:
        records = journal.records()
        if options.action == "report":
            from benchmarks.averaging.report import write_report

            console.print(
                f"{write_report(records, options.output)} rows in {options.output / 'averaging.md'}"
            )
            return 0
    except ValueError as error:
        console.print(f"error: {error}", markup=False)
        return 2
    fields: dict[str, Any] = {
        "steps": options.steps,
        "seed": options.seed,
        "domain": options.domain,
        "max_tokens": options.max_tokens,
    }
    if options.model is not None:
        fields["model"] = options.model
    if options.learning_rate is not None:
        fields["learning_rate"] = options.learning_rate
    if options.action == "swarm":
        from benchmarks.averaging.real import SWARM_ROWS

        options.only = options.only or list(SWARM_ROWS)
        if not set(options.only) <= SWARM_ROWS.keys():
            console.print(f"error: a real swarm trains rows {', '.join(SWARM_ROWS)}", markup=False)
            return 2
    chosen = [(row, row.config(**fields)) for row in ROWS if not options.only or row.name in options.only]
    if options.list:
        for row, config in chosen:
            done = "done" if config.key in records else "    "
            console.print(f"{done} {row.name:24} {row.says}", markup=False)
        return 0
    if options.action == "swarm":
        run_swarm(chosen, journal, options, console)
    else:
        run(chosen, journal, options, console)
    return 0


def run_swarm(
    chosen: Sequence[tuple[Any, Any]], journal: Any, options: argparse.Namespace, console: Any
) -> None:
    """Rows through a real swarm that are not done, one after another: each takes the whole machine."""
    from benchmarks.averaging.real import run_real
    from tests.kit.swarm import Host

    host = Host()
    try:
        for row, config in chosen:
            if f"{config.key}/swarm" not in journal.records():
                console.print(f"{row.name}: a real swarm trains {config.steps} steps", markup=False)
                found = run_real(row.name, config, options.data_cache, host)
                note_swarm(row, config, found, journal, console)
    finally:
        host.close()


def note_swarm(row: Any, config: Any, found: dict[str, Any], journal: Any, console: Any) -> None:
    """A finished row of a real swarm."""
    journal.append(
        {
            "key": f"{config.key}/swarm",
            "row": row.name,
            "mode": "swarm",
            "config": config.model_dump(mode="json"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            **found,
        }
    )
    sent, seconds = found["sent"] / 1e6, found["seconds"]
    console.print(
        f"{row.name}: held-out loss {found['loss']:.4f}, {sent:.1f} MB sent, {seconds:.0f} s", markup=False
    )


def run(chosen: Sequence[tuple[Any, Any]], journal: Any, options: argparse.Namespace, console: Any) -> None:
    """Run what is not done. Rows that another process runs are left to it."""
    import torch

    from benchmarks.averaging.simulate import simulate
    from benchmarks.quality.journal import claim
    from benchmarks.quality.prepare import prepare
    from benchmarks.quality.runner import ProgressLine
    from peers.commands.evaluate import quiet_transformers

    torch.set_num_threads(options.threads)
    quiet_transformers()
    before = journal.records()
    todo = [(row, config) for row, config in chosen if config.key not in before]
    console.print(f"{len(chosen)} rows, {len(chosen) - len(todo)} of them done", markup=False)
    line = ProgressLine(console, sum(config.steps for _, config in todo))
    prepared = None
    for number, (row, config) in enumerate(todo):
        with claim(options.data_cache / "claims", config.key) as is_ours:
            if not is_ours or config.key in journal.records():
                continue
            line.begin(f"{row.name}, seed {config.seed}", number * config.steps)
            if prepared is None:
                prepared = prepare(config.data_config(), options.data_cache)
            course = simulate(config, prepared, line)
            journal.append(
                {
                    "key": config.key,
                    "row": row.name,
                    "config": config.model_dump(mode="json"),
                    "elements": course.elements,
                    "curve": sorted(course.curve.items()),
                    "sent": sorted(course.sent.items()),
                    "seconds": {
                        "training": round(course.training_s, 1),
                        "averaging": round(course.averaging_s, 1),
                    },
                    "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                }
            )
            sent = course.sent[config.steps] / 1e6
            line.end(f"{row.name}: held-out loss {course.curve[config.steps]:.4f}, {sent:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
