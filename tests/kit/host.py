"""Forks real peers for the tests: `python -m tests.kit.host`, JSON lines in and out.

One such process serves a whole pytest worker: torch, transformers and hivemind are imported once, and a peer
costs milliseconds. Peers write their status lines to files, which the tests read.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import hivemind
import torch
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2

import peers.commands.build
import peers.peer
from peers.cli import EXIT_USAGE, user_message
from peers.local import decode_config
from peers.reporting import JsonReporter
from peers.zygote import Zygote

CLONE_NEWNET = 0x40000000
IMPORTED = (hivemind, transformers, peers.peer, peers.commands.build)


def entry(request: dict[str, Any], descriptor: int) -> int:
    """A forked child: one peer, or the making of one run."""
    os.close(descriptor)
    if request.get("netns"):
        enter_namespace(request["netns"])
    torch.set_num_threads(1)
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if request["what"] == "run":
        from tests.kit.tiny import make_run

        make_run(Path(request["folder"]), request["options"])
        return 0
    if request.get("lie"):
        from tests.kit.spoiled import lie

        lie(request["lie"])
    status = os.open(request["status"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    reporter = JsonReporter(status)
    try:
        return peers.peer.run_peer(decode_config(request["config"]), reporter)
    except Exception as error:
        message = user_message(error)
        reporter.note(f"error: {message or f'{type(error).__name__}: {error}'}")
        if message is None:
            raise
        return EXIT_USAGE


def enter_namespace(name: str) -> None:
    """Move this process into a network namespace; before it has threads, which would stay behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter network namespace {name}: {os.strerror(number)}")


def main() -> None:
    """Serve requests until stdin closes."""
    zygote = Zygote.start(entry)
    print(json.dumps({"ready": True}), flush=True)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            answer: dict[str, Any] = {}
            if command["do"] == "spawn":
                pid, reading = zygote.spawn(command["request"], Path(command["log"]))
                os.close(reading)
                answer = {"pid": pid}
            elif command["do"] == "exits":
                answer = {"exits": [[exit_.pid, exit_.code] for exit_ in zygote.exits()]}
            print(json.dumps(answer), flush=True)
    finally:
        zygote.close()


if __name__ == "__main__":
    main()
