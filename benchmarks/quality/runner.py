"""Run entries one after the other, with a progress line, and show what came of them."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.quality.config import RowConfig
from benchmarks.quality.journal import Journal, claim
from benchmarks.quality.rows import Entry

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.quality.prepare import Prepared
    from benchmarks.quality.simulate import Course


def versions(config: RowConfig) -> dict[str, Any]:
    """What ran: commit, packages, and the codec with all its options spelled out."""
    import torch
    import transformers

    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "commit": commit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "codec": config.codec_config().model_dump(mode="json"),
        "corrector": config.corrector_config().model_dump(mode="json"),
    }


def record_of(found: Entry, course: Course, threads: int, rows: Mapping[str, int]) -> dict[str, Any]:
    """The journal's line of a finished row."""
    corrections = course.corrections
    means = (
        [sum(each[i] for each in corrections) / len(corrections) for i in (1, 2, 3)] if corrections else None
    )
    return {
        "key": found.config.key,
        "row": found.row.name,
        "says": found.row.says,
        "config": found.config.model_dump(mode="json", exclude_defaults=True),
        "curve": sorted(course.curve.items()),
        "bytes_curve": sorted(course.wire_curve.items()),
        "train_loss": [round(loss, 5) for loss in course.train_loss],
        "bytes": asdict(course.wire),
        "corrector": None
        if means is None
        else {
            "steps": len(corrections),
            "cosine": round(means[0], 4),
            "relative_change": round(means[1], 4),
            "eta": round(means[2], 4),
        },
        "seconds": {name: round(value, 2) for name, value in asdict(course.seconds).items()},
        "threads": threads,
        "data": dict(rows),
        "versions": versions(found.config),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class ProgressLine:
    """One line that says how far a row is and when everything will be done.

    On a terminal it is rewritten in place; elsewhere it is printed every `every_s` seconds.
    """

    def __init__(self, console: Console, total_steps: int, every_s: float = 60.0) -> None:
        self._console, self._total, self._every_s = console, total_steps, every_s
        self._done_before = 0
        self._began = time.monotonic()
        self._started_at = 0
        self._printed = time.monotonic()
        self.title = ""

    def begin(self, title: str, done_before: int) -> None:
        """A row begins; done_before: steps of all rows before it."""
        self.title, self._done_before = title, done_before
        if not self._console.is_terminal:
            self._console.print(f"{title}", markup=False)

    def __call__(self, step: int, steps: int, what: str) -> None:
        """Show it."""
        now = time.monotonic()
        done = self._done_before + step
        ran = done - self._started_at
        left = (self._total - done) * (now - self._began) / ran if ran > 0 else None
        eta = "" if left is None else f", all done in {left / 60:.0f} min"
        line = f"{self.title}: step {step}/{steps}{eta}{f' ({what})' if what else ''}"
        if self._console.is_terminal:
            self._console.print(f"\r\x1b[K{line}", end="", markup=False)
        elif now - self._printed > self._every_s:
            self._printed = now
            self._console.print(f"  {line}", markup=False)

    def end(self, text: str) -> None:
        """The row is finished."""
        self._console.print(f"\r\x1b[K{text}" if self._console.is_terminal else text, markup=False)


def run_entries(
    found: Sequence[Entry], journal: Journal, options: argparse.Namespace, console: Console
) -> None:
    """Run what is not done. Rows that another process runs are left to it."""
    import torch
    from transformers.utils import logging as transformers_logging

    from benchmarks.quality.prepare import prepare
    from benchmarks.quality.simulate import simulate

    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    before = journal.records()
    todo = [each for each in found if options.redo or each.config.key not in before]
    console.print(f"{len(found)} rows, {len(found) - len(todo)} of them done", markup=False)
    line = ProgressLine(console, sum(each.config.steps for each in todo))
    prepared: dict[tuple[Any, ...], Prepared] = {}
    done_steps = 0
    for each in todo:
        config = each.config
        with claim(options.scratch, config.key) as is_ours:
            # Another process may have finished it since.
            record = journal.records().get(config.key)
            is_done = record is not None and record != before.get(config.key)
            if is_ours and not is_done:
                line.begin(
                    f"{each.row.name}, {config.domain}, seed {config.seed}, lr {config.learning_rate:g}",
                    done_steps,
                )
                data = (config.model, config.domain, config.max_tokens, config.sequence_length)
                if data not in prepared:
                    prepared.clear()  # one model in memory at a time
                    prepared[data] = prepare(config, options.data_cache)
                ready = prepared[data]
                course = simulate(config, ready, options.scratch, line)
                rows = {
                    "train_rows": len(ready.train),
                    "heldout_rows": len(ready.heldout),
                    "vocabulary": ready.vocabulary,
                }
                journal.append(record_of(each, course, options.threads, rows))
                last = max(course.curve)
                line.end(
                    f"{each.row.name} seed {config.seed}: held-out loss {course.curve[0]:.3f} -> "
                    f"{course.curve[last]:.3f} in {last} steps, {course.wire.total / 1e6:.1f} MB, "
                    f"{course.seconds.steps / config.steps:.1f} s per step"
                )
        done_steps += config.steps


def share_recovered(record: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """Share of the reference's gain that a row reached; None where the reference gained nothing."""
    base, best = float(reference["curve"][0][1]), float(reference["curve"][-1][1])
    own = float(record["curve"][-1][1])
    return None if base <= best else (base - own) / (base - best)


def print_list(found: Sequence[Entry], journal: Journal, console: Console) -> None:
    """Every row: what it is, its run, and whether it is done."""
    records = journal.records()
    for each in found:
        config = each.config
        console.print(
            f"{'done' if config.key in records else '    '} {each.group:9} {each.row.name:20} {config.domain} seed "
            f"{config.seed}, {config.steps} steps, lr {config.learning_rate:g}: {each.row.says}",
            markup=False,
        )


def print_table(found: Sequence[Entry], journal: Journal, console: Console) -> None:
    """Loss, share of the dense gain, and bytes of every finished row."""
    from rich.table import Table

    records = journal.records()
    table = Table(
        "row", "domain", "seed", "lr", "steps", "loss", "share of dense gain", "MB", "of dense", "s/step"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for each in found:
        record, dense = records.get(each.config.key), records.get(each.reference.key)
        if record is None:
            continue
        share = None if dense is None else share_recovered(record, dense)
        coded = payload_bytes_of(record)
        table.add_row(
            each.row.name,
            each.config.domain,
            str(each.config.seed),
            f"{each.config.learning_rate:g}",
            str(each.config.steps),
            f"{record['curve'][-1][1]:.3f}",
            "" if share is None else f"{share:.1%}",
            f"{coded / 1e6:.1f}",
            "" if dense is None else f"{coded / payload_bytes_of(dense):.1%}",
            f"{record['seconds']['steps'] / each.config.steps:.1f}",
        )
    console.print(table)


def payload_bytes_of(record: Mapping[str, Any]) -> int:
    """FORWARD and GRADIENT bytes of a finished row, ids and priors left out."""
    return int(record["bytes"]["forward"]) + int(record["bytes"]["gradient"])
