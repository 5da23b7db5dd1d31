"""Command line of the quality benchmark.

    python -m benchmarks.quality --list                      # rows, what they are, which are done
    python -m benchmarks.quality --group quick               # minutes
    python -m benchmarks.quality --group main --threads 1    # start it twice: the two share the rows
    python -m benchmarks.quality --group all --tuned         # at the tuned learning rates
    python -m benchmarks.quality --group all --compute bf16  # 3 times as fast on processors that have it
    python -m benchmarks.quality report                      # docs/quality.md and its plots

Finished rows are lines of the journal and are not run again; an interrupted row goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JOURNAL = HERE.parent / "results" / "quality.jsonl"
CACHE = Path("~/.cache/swarm-peer/quality")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    from benchmarks.quality.rows import GROUPS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="groups:\n" + "\n".join(f"  {name:10} {group.says}" for name, group in GROUPS.items()),
    )
    parser.add_argument("action", nargs="?", choices=("run", "report"), default="run")
    parser.add_argument("--group", choices=(*GROUPS, "all"), nargs="+", default=["main"])
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only rows of these names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="instead of the group's seeds")
    parser.add_argument("--steps", type=int, help="instead of the group's steps")
    parser.add_argument(
        "--domains", nargs="+", default=[], help="instead of the group's: names, or folders of texts"
    )
    parser.add_argument("--tuned", action="store_true", help="learning rates that --group tune found best")
    parser.add_argument(
        "--compute",
        choices=("fp32", "bf16"),
        default="fp32",
        help="number format of the stages; the report has sections of both",
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="options of codec basis, for all its rows",
    )
    parser.add_argument(
        "--anchors",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="snapshot_every=10 early_snapshots=[2,4,8]",
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads of this process")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    parser.add_argument("--redo", action="store_true", help="run finished rows again")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="finished rows, JSON Lines")
    parser.add_argument(
        "--scratch", type=Path, default=CACHE / "scratch", help="checkpoints of interrupted rows"
    )
    parser.add_argument("--data-cache", type=Path, default=CACHE, help="texts, packed rows and models")
    parser.add_argument(
        "--output", type=Path, default=Path("docs"), help="report: folder of quality.md and img/"
    )
    options = parser.parse_args(arguments)
    for name in ("codec", "anchors"):
        try:
            setattr(options, name, _options(getattr(options, name)))
        except ValueError as error:
            parser.error(f"--{name}: {error}")
    options.group = list(GROUPS) if "all" in options.group else options.group
    for name in ("journal", "scratch", "data_cache", "output"):
        setattr(options, name, getattr(options, name).expanduser())
    if options.threads < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--threads and --steps must be at least 1")
    return options


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """Options and their values, read as YAML. Raises ValueError."""
    import yaml

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"expected OPTION=VALUE, got {text!r}")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{text!r}: {error}") from error
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or report; returns the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    # Before torch is imported, or its pools keep the machine's number.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault(
        "TQDM_DISABLE", "1"
    )  # of transformers, while it loads a model: this program has its own line
    from rich.console import Console

    from benchmarks.quality.journal import Journal
    from benchmarks.quality.rows import entries
    from benchmarks.quality.tuning import learning_rates

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    journal = Journal(options.journal)
    try:
        if options.action == "report":
            from benchmarks.quality.report import rates_of, write_report

            write_report(journal, rates_of(journal.records()), options.output, console)
            return 0
        rates = learning_rates(journal.records(), is_tuned=options.tuned, compute=options.compute)
        found = list(
            entries(
                tuple(options.group),
                rates,
                only=tuple(options.only),
                seeds=tuple(options.seeds),
                steps=options.steps,
                domains=tuple(options.domains),
                codec=options.codec,
                anchors=options.anchors,
                compute=options.compute,
            )
        )
        for each in found:  # before anything slow is done
            each.config.codec_config()
            each.config.corrector_config()
    except ValueError as error:
        console.print(f"error: {error}", markup=False)
        return 2
    if not found:
        console.print("error: no row of that name in these groups; see --list", markup=False)
        return 2
    from benchmarks.quality.runner import print_list, print_table, run_entries

    if options.list:
        print_list(found, journal, console)
        return 0
    began = time.monotonic()
    try:
        run_entries(found, journal, options, console)
    except KeyboardInterrupt:
        console.print("\ninterrupted: the same command goes on where this one stopped", markup=False)
        return 130
    print_table(found, journal, console)
    console.print(f"{(time.monotonic() - began) / 60:.1f} minutes", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
