from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from peers.cli import COMMANDS, main, user_message
from peers.commands.options import CommandOptions, field_names, parse_options
from peers.config import UserError


@dataclass(frozen=True, kw_only=True)
class SampleOptions(CommandOptions):
    """Options of a made-up command."""

    stage: str
    """The stage."""

    initial_peers: tuple[str, ...] = ()
    """Peers."""

    cuts: tuple[int, ...] = ()
    """Cuts."""

    threads: int | None = None
    """Threads."""

    ratio: float = 1.5
    """A ratio."""

    watch: bool = False
    """Watch."""


def parse(*arguments: str, environment: dict[str, str] | None = None) -> SampleOptions:
    return parse_options(
        SampleOptions,
        arguments,
        command="sample",
        description="A sample.",
        environment=environment or {},
        known_elsewhere=("mask_ratio",),
    )


def test_lists_take_several_values_after_one_flag() -> None:
    options = parse("--stage", "2", "--initial-peers", "a", "b", "--cuts", "3", "5")
    assert options.initial_peers == ("a", "b")
    assert options.cuts == (3, 5)


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("stage: 7\ninitial-peers: [x, y]\nthreads: 2\nratio: 2.5\n")
    environment = {"SWARM_PEER_THREADS": "3", "SWARM_PEER_RATIO": "4"}
    options = parse("--config", str(file), "--threads", "5", environment=environment)
    assert (options.stage, options.initial_peers) == ("7", ("x", "y"))
    assert (options.threads, options.ratio, options.watch) == (5, 4.0, False)


def test_config_file_may_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("stage: 1\n")
    assert parse(environment={"SWARM_PEER_CONFIG": str(file)}).stage == "1"


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("SWARM_PEER_INITIAL_PEERS", "a b", "initial_peers", ("a", "b")),
        ("SWARM_PEER_CUTS", "1 2", "cuts", (1, 2)),
        ("SWARM_PEER_WATCH", "true", "watch", True),
        ("SWARM_PEER_THREADS", "none", "threads", None),
        ("SWARM_PEER_RATIO", "0.5", "ratio", 0.5),
    ],
)
def test_environment_values_have_the_options_types(
    name: str, value: str, field: str, expected: object
) -> None:
    assert getattr(parse("--stage", "0", environment={name: value}), field) == expected


def test_unknown_variable_names_the_close_match() -> None:
    with pytest.raises(UserError, match=r"SWARM_PEER_THREDS.*did you mean SWARM_PEER_THREADS"):
        parse("--stage", "0", environment={"SWARM_PEER_THREDS": "1"})


def test_variable_of_another_command_is_no_error() -> None:
    assert parse("--stage", "0", environment={"SWARM_PEER_MASK_RATIO": "90"}).stage == "0"


def test_unknown_key_in_the_file_names_the_close_match(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("stage: 1\nthread: 3\n")
    with pytest.raises(UserError, match=r"options\.yaml.*'thread'.*did you mean 'threads'"):
        parse("--config", str(file))


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "threads: many"])
def test_bad_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=r"options\.yaml"):
        parse("--stage", "1", "--config", str(file))


def test_missing_file_is_a_user_error() -> None:
    with pytest.raises(UserError, match="cannot read"):
        parse("--config=/nowhere/x.yaml")


def test_missing_required_option_ends_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse()
    assert caught.value.code == 2
    assert "--stage" in capsys.readouterr().err


def test_bare_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_unknown_command_names_the_close_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jion"]) == 2
    assert "did you mean 'join'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_and_every_option_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out
    assert f"swarm-peer {name}" in out
    module = COMMANDS[name].load()
    for field in field_names(getattr(module, COMMANDS[name].options)):
        assert field.replace("_", "-") in out.lower() or field.upper() in out


def test_user_errors_of_other_parts_are_messages() -> None:
    from swarm.data.config import DataError

    assert user_message(DataError("no such data")) == "no such data"
    assert user_message(FileNotFoundError(2, "No such file", "/x")) == "/x: No such file"
    assert user_message(ValueError("a bug")) is None


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom peers.cli import main\nmain(['init', '--help'])\n"
        "heavy = {'torch', 'transformers', 'hivemind', 'numpy'} & set(sys.modules)\n"
        "sys.exit(1 if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=20, check=False)
    assert result.returncode == 0
