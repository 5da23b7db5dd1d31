"""Where a command's options come from: command line, environment, YAML file, defaults, in this order.

Every field of a command's dataclass is an option `--field-name`, a key of the file given by `--config`, and
the environment variable `SWARM_PEER_FIELD_NAME`. Unknown keys and variables are errors, because a misspelt
limit that is ignored is worse than a command that does not start.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml
from pydantic import TypeAdapter, ValidationError

from peers.config import UserError

ENVIRONMENT_PREFIX = "SWARM_PEER_"

T = TypeVar("T", bound="CommandOptions")


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options that every command has."""

    config: Path | None = None
    """YAML file with options of this command (keys as on the command line, without the dashes)."""


def field_names(options: type[CommandOptions]) -> tuple[str, ...]:
    """The option names of a command, as Python names."""
    return tuple(field.name for field in dataclasses.fields(options))


def parse_options(
    options: type[T],
    arguments: Sequence[str],
    *,
    command: str,
    description: str,
    environment: Mapping[str, str] | None = None,
    known_elsewhere: Iterable[str] = (),
) -> T:
    """The options of one command.

    known_elsewhere: field names of other commands; a variable of one of them is not an error here, so that
    one environment serves several commands. Raises UserError for an unknown key or variable or a value of the
    wrong type, SystemExit (2) after printing what is wrong for a bad command line, and SystemExit (0) after
    --help.
    """
    environment = os.environ if environment is None else environment
    names = field_names(options)
    variables = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and value != ""
    }
    others = set(known_elsewhere)
    for name in variables:
        if name not in names and name not in others:
            shown = ENVIRONMENT_PREFIX + name.upper()
            near = _nearest(name, {*names, *others})
            hint = f"did you mean {ENVIRONMENT_PREFIX}{near.upper()}?" if near else f"unset {shown}"
            raise UserError(f"environment variable {shown} names no option: {hint}")

    types = typing.get_type_hints(options, include_extras=False)
    values: dict[str, Any] = {}
    file = _config_file(arguments) or variables.get("config")
    if file is not None:
        for key, value in _read_file(Path(file)).items():
            name = key.replace("-", "_")
            if name not in names or name == "config":
                near = _nearest(name, set(names) - {"config"})
                hint = f"did you mean {near!r}?" if near else f"see swarm-peer {command} --help"
                raise UserError(f"{file}: {command} has no option {key!r}: {hint}")
            values[name] = _coerce(types[name], value, f"{file}: {key}")
    for name, text in variables.items():
        if name in names:
            values[name] = _coerce(
                types[name], text, f"environment variable {ENVIRONMENT_PREFIX}{name.upper()}"
            )

    for field in dataclasses.fields(options):
        has_default = (
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        )
        if field.name not in values and not has_default:
            values[field.name] = tyro.MISSING
    return tyro.cli(
        options,
        prog=f"swarm-peer {command}",
        description=description,
        args=list(arguments),
        default=options(**values),
    )


def check_exists(option: str, source: str) -> None:
    """Raise UserError if `source` can only be meant as a path, and there is nothing at that path."""
    is_path = (
        source.startswith((".", "/", "~"))
        or source.count("/") >= 2
        or source.endswith((".gguf", ".txt", ".jsonl"))
    )
    if is_path and not Path(source).expanduser().exists():
        raise UserError(f"{option}: no such file or folder: {source}")


def _config_file(arguments: Sequence[str]) -> str | None:
    """The value of --config on the command line: it is needed before the command line is parsed."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
        if argument == "--config" and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def _read_file(path: Path) -> dict[str, Any]:
    """A YAML file's top-level mapping. Raises UserError."""
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read --config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"--config {path} must hold a mapping of option names to values")
    return content


def _coerce(type_: Any, value: Any, where: str) -> Any:
    """A value of a file or the environment as the option's type. Raises UserError naming place and value."""
    if isinstance(value, str):
        if typing.get_origin(type_) is tuple:
            value = value.split()
        elif value.lower() in {"none", "null"} and type(None) in typing.get_args(type_):
            return None
    elif type_ is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)  # `stage: 2` in YAML is as good as `--stage 2`
    elif typing.get_origin(type_) is tuple and not isinstance(value, (list, tuple)):
        value = [value]
    try:
        return TypeAdapter(type_).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{where}: {value!r} is no valid value: {error.errors()[0]['msg']}") from error


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The option name most like `name`, if any is."""
    matches = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
    return matches[0] if matches else None
