"""`swarm-peer identity`: make a key before joining, and say which peer it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from peers.commands.options import CommandOptions

DESCRIPTION = """\
Print the peer id of a key file, made if it does not exist. A run's owner names its anchors by their ids, so who is
to be an anchor makes a key first and gives the id to the owner.

Examples:
  swarm-peer identity anchor.key
  swarm-peer init my-run --anchor-peers 12D3Koo... --model smollm2-135m --data stdlib
  swarm-peer init my-run --grant-anchor 12D3Koo...          (of a run that exists)
  swarm-peer join --anchor --stage all --identity anchor.key --initial-peers ADDRESS
"""


@dataclass(frozen=True, kw_only=True)
class IdentityOptions(CommandOptions):
    """Print the peer id of a key file."""

    key: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="KEY_FILE")]
    """The file; made, readable by you alone, if it does not exist."""


def run(options: IdentityOptions) -> int:
    """Print the id. Returns 0."""
    from dht.identity import Identity

    identity = Identity.load_or_create(options.key.expanduser())
    try:
        print(identity.peer_id)
    finally:
        identity.close()
    return 0
