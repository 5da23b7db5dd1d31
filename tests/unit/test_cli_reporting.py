from __future__ import annotations

import io
import json
import os
import re
from typing import Any

from rich.console import Console

from peers.reporting import (
    JsonReporter,
    Reporter,
    SilentReporter,
    TerminalReporter,
    join_lines,
    status_line,
    summary_lines,
)

STATUS: dict[str, Any] = {
    "state": "online",
    "stage": 2,
    "step": 3,
    "total_steps": 24,
    "loss": 1.98764,
    "tokens_per_s": 1234.4,
    "upload_mbps": 1.25,
    "download_mbps": 20.0,
    "neighbours": 4,
}


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200, highlight=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_status_line_shows_what_matters() -> None:
    line = status_line(STATUS)
    for part in (
        "stage 2",
        "step 3/24",
        "loss 1.9876",
        "1,234 tokens/s",
        "up 1.2 down 20.0 Mbit/s",
        "4 neigh",
    ):
        assert part in line


def test_status_line_of_a_peer_without_figures() -> None:
    assert status_line({"state": "joining", "stage": 0, "loss": None}) == (
        "joining  stage 0  - tokens/s  up - down - Mbit/s  - neighbours"
    )


def test_status_line_of_a_seed_has_no_figures_of_training() -> None:
    line = status_line({**STATUS, "role": "seed", "stage": None, "state": "online"})
    assert line == "online  up 1.2 down 20.0 Mbit/s"


def test_plain_lines_begin_with_the_time() -> None:
    console = plain_console()
    TerminalReporter(console=console).note("hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d hello\n", text_of(console))


def test_seed_prints_a_join_line_for_every_stage() -> None:
    console = plain_console()
    with TerminalReporter(is_seed=True, is_quiet=True, console=console) as reporter:
        reporter.ready(["/ip4/127.0.0.1/tcp/1/p2p/Qm"], 3)
    for line in join_lines(["/ip4/127.0.0.1/tcp/1/p2p/Qm"], 3):
        assert line in text_of(console)


def test_without_a_terminal_a_line_per_step_and_not_per_second() -> None:
    console = plain_console()
    reporter = TerminalReporter(console=console)
    for step in (1, 1, 1, 2):
        reporter.status({**STATUS, "step": step})
    assert text_of(console).count("tokens/s") == 2


def test_live_line_is_given_back_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200, highlight=False)
    with TerminalReporter(console=console) as reporter:
        reporter.status(STATUS)
        reporter.note("a note [with brackets]")
        reporter.status(STATUS)
        reporter.summary({**STATUS, "exit_reason": "done", "bytes": {"up": {"forward": 2_000_000}}})
    text = text_of(console)
    assert "a note [with brackets]" in text
    assert "sent 2.0 MB" in text
    assert text.count("\x1b[?25h") == 1  # the cursor is shown again


def test_summary_says_why_and_how_much() -> None:
    lines = summary_lines({"exit_reason": "interrupted", "bytes": {"up": {"a": 10**6}, "down": {}}})
    assert lines == ["ended: interrupted", "sent 1.0 MB, received 0.0 MB"]


def test_json_reporter_writes_one_object_per_line() -> None:
    reading, writing = os.pipe()
    reporter: Reporter = JsonReporter(writing)
    reporter.note("hello")
    reporter.ready(["/a"], 2)
    reporter.status({"step": 1})
    reporter.summary({"step": 2})
    lines = [json.loads(line) for line in os.read(reading, 4096).splitlines()]
    assert lines == [
        {"note": "hello"},
        {"ready": {"addresses": ["/a"], "stages": 2}},
        {"status": {"step": 1}},
        {"summary": {"step": 2}},
    ]
    os.close(reading)
    os.close(writing)


def test_slow_reader_loses_statuses_but_no_note_and_gets_whole_lines() -> None:
    reading, writing = os.pipe()
    reporter = JsonReporter(writing)
    for step in range(3000):  # 300 KB into a pipe of 64 KiB, without a reader
        reporter.status({"step": step, "padding": "x" * 80})
    reporter.note("important")
    os.set_blocking(reading, False)
    data = b""
    for _ in range(20):
        try:
            data += os.read(reading, 1 << 20)
        except BlockingIOError:
            break
        reporter.note("tick")
    lines = [json.loads(line) for line in data.splitlines() if line.endswith(b"}")]
    assert {"note": "important"} in lines
    statuses = [line["status"]["step"] for line in lines if "status" in line]
    assert statuses == list(range(len(statuses)))
    assert len(statuses) < 3000
    os.close(reading)
    os.close(writing)


def test_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    reporter = JsonReporter(writing)
    reporter.note("x")
    reporter.summary({})
    os.close(writing)


def test_silent_reporter_keeps_the_last() -> None:
    reporter: Reporter = SilentReporter()
    reporter.note("a")
    reporter.status({"step": 1})
    assert isinstance(reporter, SilentReporter)
    assert (reporter.notes, reporter.last_status) == (["a"], {"step": 1})
