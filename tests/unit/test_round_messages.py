"""The messages of a round: what is sent is what is read, and what is out of bounds is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from peers.frames import FrameError
from peers.round_messages import (
    Arrival,
    Commit,
    Digest,
    Failure,
    Group,
    Held,
    next_lineage,
    parse_arrival,
    parse_commit,
    parse_digest,
    parse_failure,
    parse_group,
)

HELD = Held("g", "d", 3, "b", ("a", "b"), "a", ("a", "b", "c"), 12, ((0, 1),), False)
ARRIVAL = Arrival(4, "p", ((0, 0), (1, 2)), 7, HELD, ((0, 1),), "00ff", "line", 2, owed=3, settled="0" * 64)
GROUP = Group(
    "i", 4, 2, "a", ("a", "b"), (1, 0), ("h", "k"), "p", ((0, 1),), "aB", "line", HELD, "", (2, 0), "1" * 64
)
COMMIT = Commit("g", 4, 2, "d", "a", ("a", "b"), b"plan", ("a",), "line", ("x",), ((0, 1),), 12)


def group_of(header: dict[str, Any]) -> Group:
    return parse_group(header, "a")


MESSAGES: list[tuple[Any, Callable[[dict[str, Any]], Any]]] = [
    (ARRIVAL, parse_arrival),
    (Arrival(4, "", (), 0), parse_arrival),
    (GROUP, group_of),
    (COMMIT, parse_commit),
    (Digest("g", "d", 4), parse_digest),
    (Failure("g", "late", ("a", "b"), 5), parse_failure),
]


@pytest.mark.parametrize(("message", "parse"), MESSAGES)
def test_what_is_sent_is_what_is_read(message: Any, parse: Callable[[dict[str, Any]], Any]) -> None:
    assert parse(msgpack.unpackb(msgpack.packb(message.header()))) == message


@pytest.mark.parametrize(
    ("message", "parse", "change"),
    [
        (ARRIVAL, parse_arrival, {"sketch": "0" * 2049}),
        (ARRIVAL, parse_arrival, {"sketch": "xyz"}),
        (ARRIVAL, parse_arrival, {"lost": [[0, 0]]}),
        (ARRIVAL, parse_arrival, {"lost": [[0, 9], [0, 9]]}),
        (ARRIVAL, parse_arrival, {"owed": -1}),
        (ARRIVAL, parse_arrival, {"settled": "no hash"}),
        (ARRIVAL, parse_arrival, {"keys": [[0, -1]]}),
        (ARRIVAL, parse_arrival, {"keys": [[0, 10**30]]}),
        (ARRIVAL, parse_arrival, {"held": {"group": "g"}}),
        (ARRIVAL, parse_arrival, {"held": []}),
        (ARRIVAL, parse_arrival, {"held": HELD.header() | {"members": []}}),
        (ARRIVAL, parse_arrival, {"held": HELD.header() | {"has_average": 1}}),
        (ARRIVAL, parse_arrival, {"lineage": "l" * 65}),
        (ARRIVAL, parse_arrival, {"attempt": -1}),
        (GROUP, group_of, {"members": ["b", "c"]}),
        (GROUP, group_of, {"members": ["a", "a"]}),
        (GROUP, group_of, {"weights": [1]}),
        (GROUP, group_of, {"weights": [1, True]}),
        (GROUP, group_of, {"owed": [1]}),
        (GROUP, group_of, {"owed": [1, -1]}),
        (GROUP, group_of, {"lost": "all"}),
        (COMMIT, parse_commit, {"roster": ["a", "a"]}),
        (COMMIT, parse_commit, {"followers": ["x"] * 2}),
        (COMMIT, parse_commit, {"followers": [f"x{i}" for i in range(257)]}),
        (COMMIT, parse_commit, {"weight": 2**41}),
        (COMMIT, parse_commit, {"leader": "l" * 129}),
        (Failure("g", "late"), parse_failure, {"suspects": [f"x{i}" for i in range(17)]}),
        (Failure("g", "late"), parse_failure, {"step": None}),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    message: Any, parse: Callable[[dict[str, Any]], Any], change: dict[str, Any]
) -> None:
    with pytest.raises(FrameError):
        parse(message.header() | change)


@pytest.mark.parametrize(("message", "parse"), MESSAGES)
def test_a_missing_field_is_refused(message: Any, parse: Callable[[dict[str, Any]], Any]) -> None:
    for name in message.header():
        with pytest.raises(FrameError):
            parse({key: value for key, value in message.header().items() if key != name})


def test_a_reason_from_the_wire_is_one_of_the_known_labels() -> None:
    assert parse_failure(Failure("g", "anything").header()).reason == "other"


def test_the_most_that_is_blamed_fits_a_short_header() -> None:
    many = Failure("g" * 64, "disconnected", tuple(f"{i:0128}" for i in range(40)), 2**40)
    header = many.header()
    assert len(header["suspects"]) == 16 and len(msgpack.packb(header)) < 4096
    assert parse_failure(header).suspects == many.suspects[:16]


def test_lineage_names_every_commit_before_it() -> None:
    assert next_lineage("", "g", "d") == hashlib.sha256(b"/g/d").hexdigest()[:32]
    assert COMMIT.next_lineage == next_lineage("line", "g", "d")
    assert next_lineage("a", "g", "d") != next_lineage("b", "g", "d")


def test_a_ledgers_name_changes_with_the_average_that_was_agreed_to() -> None:
    other = Arrival(4, "p", ARRIVAL.keys, 7)
    assert ARRIVAL.ledger_hash != other.ledger_hash
    assert other.ledger_hash == Arrival(4, "p", ARRIVAL.keys, 9, lineage="x", attempt=5).ledger_hash
