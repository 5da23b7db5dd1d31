from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from peers.reporting import JsonReporter
from peers.zygote import Zygote, ZygoteError

def entry(request, descriptor):
    reporter = JsonReporter(descriptor)
    reporter.note(request["text"])
    print("printed", request["text"], flush=True)
    if request["do"] == "sleep":
        time.sleep(60)
    if request["do"] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if request["do"] == "raise":
        raise ValueError("on purpose")
    return request.get("code", 0)

folder = Path(sys.argv[1])
zygote = Zygote.start(entry)

def wait_exit(count):
    found = []
    while len(found) < count:
        found += zygote.exits()
        time.sleep(0.02)
    return found
"""


def run_script(folder: Path, body: str, timeout: float = 20.0) -> dict[str, object]:
    """Run the body in a fresh interpreter (pytest has threads); it prints one JSON object."""
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return answer


def test_child_runs_the_request_and_its_exit_is_noticed(tmp_path: Path) -> None:
    answer = run_script(
        tmp_path,
        """
        pid, pipe = zygote.spawn({"text": "hello", "do": "return", "code": 3}, folder / "a.log")
        exits = wait_exit(1)
        line = os.read(pipe, 1000).decode()
        zygote.close()
        print(json.dumps({"same": exits[0].pid == pid, "code": exits[0].code, "line": json.loads(line)}))
        """,
    )
    assert answer == {"same": True, "code": 3, "line": {"note": "hello"}}
    assert (tmp_path / "a.log").read_text() == "printed hello\n"


def test_crash_and_signal_give_their_codes_and_the_log_the_traceback(tmp_path: Path) -> None:
    answer = run_script(
        tmp_path,
        """
        first, _ = zygote.spawn({"text": "x", "do": "raise"}, folder / "a.log")
        second, _ = zygote.spawn({"text": "y", "do": "sleep"}, folder / "b.log")
        zygote.signal(second, signal.SIGKILL)
        codes = {e.pid: e.code for e in wait_exit(2)}
        zygote.close()
        print(json.dumps([codes[first], codes[second]]))
        """,
    )
    assert answer == [1, -signal.SIGKILL]
    assert "ValueError: on purpose" in (tmp_path / "a.log").read_text()


def test_close_ends_every_child(tmp_path: Path) -> None:
    answer = run_script(
        tmp_path,
        """
        pids = [zygote.spawn({"text": "x", "do": "sleep"}, folder / f"{i}.log")[0] for i in range(3)]
        zygote.close()
        import psutil
        print(json.dumps([psutil.pid_exists(pid) for pid in pids]))
        """,
    )
    assert answer == [False, False, False]


def test_many_children_leave_no_descriptor_open(tmp_path: Path) -> None:
    answer = run_script(
        tmp_path,
        """
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            pid, pipe = zygote.spawn({"text": "x", "do": "return"}, folder / "a.log")
            os.close(pipe)
        wait_exit(50)
        after = len(os.listdir("/proc/self/fd"))
        zygote.close()
        print(json.dumps(after - before))
        """,
    )
    assert answer == 0


def test_zygote_refuses_to_start_beside_threads(tmp_path: Path) -> None:
    answer = run_script(
        tmp_path,
        """
        import threading
        zygote.close()
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
        try:
            Zygote.start(entry)
        except ZygoteError as error:
            print(json.dumps(str(error)))
        """,
    )
    assert "2 threads run already" in str(answer)


@pytest.mark.parametrize("victim", ["parent", "zygote"])
def test_death_of_parent_or_zygote_takes_the_children_along(tmp_path: Path, victim: str) -> None:
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(
        """
        pids = [zygote.spawn({"text": "x", "do": "sleep"}, folder / f"{i}.log")[0] for i in range(2)]
        print(json.dumps([zygote.pid, *pids]), flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 15)
        assert ready
        zygote, *children = json.loads(process.stdout.readline())
        os.kill(process.pid if victim == "parent" else zygote, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while any(map(is_running, [zygote, *children])) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, [zygote, *children]))
    finally:
        process.kill()
        process.wait()


def is_running(pid: int) -> bool:
    """Whether the process lives (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
