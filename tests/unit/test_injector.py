"""Death at a named point: where it is asked for, and nowhere else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from peers.config import UserError
from peers.injector import POINTS, Injector
from tests.kit.swarm import ROOT

SCRIPT = """
import time
from peers import injector
injector.testify(lambda: {{"held": 3}})
injector.arm({text!r}, 1)
for step in range(4):
    print("step", step, injector.hit({point!r}, step), flush=True)
    time.sleep(0.3)
print("alive", flush=True)
"""


def run(text: str, point: str) -> tuple[int, list[str], str]:
    """Exit code, lines printed and last words of a process that is armed with a text and passes a point."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(text=text, point=point)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
    )
    return result.returncode, result.stdout.splitlines(), result.stderr


def test_a_process_dies_at_its_point_and_step() -> None:
    code, lines, words = run("after_backward:stage=1:step=2", "after_backward")
    assert code == -signal.SIGKILL
    assert lines == ["step 0 False", "step 1 False"]
    assert json.loads(words) == {"killed_at": "after_backward", "step": 2, "held": 3}


def test_the_hit_that_kills_is_counted() -> None:
    code, lines, _ = run("mid_exchange:count=3", "mid_exchange")
    assert code == -signal.SIGKILL and len(lines) == 2


def test_the_first_step_that_may_kill_can_be_named() -> None:
    code, lines, _ = run("before_group:from=1", "before_group")
    assert code == -signal.SIGKILL and len(lines) == 1


def test_what_was_just_queued_has_time_to_leave() -> None:
    code, lines, _ = run("after_gradient:step=1", "after_gradient")
    assert code == -signal.SIGKILL
    assert lines == ["step 0 False", "step 1 True"], "the caller hears of it and goes on for a moment"


@pytest.mark.parametrize("text", ["after_backward:stage=0", "after_gradient", "after_backward:step=9"])
def test_nobody_else_dies(text: str) -> None:
    code, lines, words = run(text, "after_backward")
    assert code == 0 and lines[-1] == "alive" and not words


@pytest.mark.parametrize(
    "text", ["after_lunch", "mid_exchange:when=2", "mid_exchange:step=x", "mid_exchange:count=0"]
)
def test_a_text_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="kill_at"):
        Injector().arm(text)


def test_a_signal_kills_with_last_words() -> None:
    script = "import signal; " + SCRIPT.format(text="on_signal", point="after_gradient").strip().replace(
        "for step", "signal.raise_signal(signal.SIGUSR1)\nfor step"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == -signal.SIGKILL and not result.stdout
    assert json.loads(result.stderr) == {"killed_at": "on_signal", "step": -1, "held": 3}


def test_every_point_can_be_armed() -> None:
    for point in POINTS:
        Injector().arm(f"{point}:stage=0:step=1:count=2", 0)
