"""Progress of long local work, phase by phase, on a terminal or as plain lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from peers.commands.init import Progress


@contextmanager
def phases(console: Console, seconds: dict[str, float] | None = None) -> Iterator[Progress]:
    """A `progress(phase, done, total)` that shows one bar per phase; phases follow each other.

    seconds: filled with how long each phase took, if given. Without a terminal one line is printed per phase
    when it ends.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    times: dict[str, float] = {} if seconds is None else seconds
    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    current: list[str] = []
    started = [time.monotonic()]
    tasks: dict[str, TaskID] = {}

    def end() -> None:
        if current:
            times[current[0]] = time.monotonic() - started[0]
            task = tasks[current[0]]
            total = (
                bars.tasks[task].total if bars.tasks[task].total is not None else bars.tasks[task].completed
            )
            bars.update(task, total=total, completed=total)
            if not console.is_terminal:
                console.print(f"{current[0]}: {times[current[0]]:.1f} s", markup=False)
            current.clear()

    def progress(phase: str, done: float, total: float | None) -> None:
        if not current or current[0] != phase:
            end()
            current.append(phase)
            started[0] = time.monotonic()
            tasks[phase] = bars.add_task(phase, total=total)
        bars.update(tasks[phase], completed=done, total=total)

    with bars:
        yield progress
        end()
