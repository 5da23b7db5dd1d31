"""What a hostile peer may send: junk values, headers that were valid once, frames whose bytes are wrong.

Strategies draw decisions, not frames: `Mutation`s are applied to frames that the tests hand them, so that they
work on whatever a running swarm says at that moment, and on kinds of frames that did not exist when this was
written.
"""

from __future__ import annotations

import copy
import functools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st

from peers.frames import PREFIX, Frame, Kind

IS_LONG = os.environ.get("SWARM_PEER_LONG", "") not in ("", "0")


CHUNK = 500
"""Examples of one run of hypothesis: it remembers every one it has tried, and 20,000 take gigabytes."""


def examples(short: int, long: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As many examples as the mode asks for; the short one draws the same every time. Goes above `given`."""
    count = long if IS_LONG else short

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        bounded = settings(
            max_examples=min(count, CHUNK),
            deadline=None,
            database=None,
            derandomize=not IS_LONG,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )(test)

        def repeated(*arguments: Any, **options: Any) -> None:
            start = random.SystemRandom().randrange(2**32)
            for number in range(-(-count // CHUNK)):
                (seed(start + number)(bounded) if IS_LONG else bounded)(*arguments, **options)

        functools.update_wrapper(repeated, bounded, updated=())
        return repeated

    return decorate


def deep(depth: int) -> list[Any]:
    """Lists within lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HUGE: list[Callable[[], Any]] = [
    lambda: [0] * 70_000,
    lambda: [[0, 0]] * 70_000,
    lambda: [[]] * 70_000,
    lambda: ["x"] * 70_000,
    lambda: {str(number): number for number in range(20_000)},
    lambda: "x" * 300_000,
    lambda: b"\x00" * 300_000,
    lambda: deep(500),
]
"""Values that take memory; made when they are used."""

scalars = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        127,
        128,
        255,
        256,
        257,
        65_535,
        65_536,
        2**31 - 1,
        2**31,
        2**32,
        2**40,
        2**40 + 1,
        2**53,
        2**63 - 1,
        2**63,
        2**64 - 1,
        -(2**63),
        0.0,
        -0.0,
        1e308,
        5e-324,
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "kind",
        "a" * 64,
        "0" * 64,
        "x" * 129,
        "\x00",
        "ÿ\U0001f600",
        "../../etc/passwd",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "1",
        b"",
        b"\xff" * 16,
        b"\x98\x00\x00\xa0\x01\x91\x91\x00\x90\xc2\xc2",
        msgpack.ExtType(5, b"abc"),
        msgpack.Timestamp(0, 0),
    ]
)
junk = st.one_of(
    scalars,
    scalars,
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=12),
    st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(HUGE),
)


@dataclass(frozen=True)
class Mutation:
    """One change of a frame. where: selects the field or byte it is done to. value: what is put there."""

    what: str
    where: int
    value: Any

    def apply(self, frame: Frame) -> None:
        """Change the frame's header or payload in place."""
        header, value = frame.header, self.value() if callable(self.value) else self.value
        names = sorted(header)
        name = names[self.where % len(names)] if names else "step"
        old = header.get(name)
        match self.what:
            case "drop":
                header.pop(name, None)
            case "replace":
                header[name] = value
            case "inside" if isinstance(old, list) and old:
                self._inside(old, value)
            case "inside" | "wrap":
                header[name] = [value] if self.where % 2 else {"": value}
            case "add":
                header["more" if self.where % 2 else "kind\x00"] = value
            case "longer" if isinstance(old, list | str | bytes) and len(old) < 1000:
                header[name] = old * (2 + self.where % 300)
            case "shorter" if isinstance(old, list | str | bytes):
                header[name] = old[: len(old) // 2]
            case "shift" if type(old) is int:
                by = (-1, 1, -2, 2, 1000, -1000, 2**40, -(2**40))[self.where % 8]
                header[name] = max(-(2**63), min(2**64 - 1, old + by))
            case "flip" if isinstance(old, str) and old:
                place = self.where % len(old)
                header[name] = old[:place] + ("0" if old[place] != "0" else "1") + old[place + 1 :]
            case "payload":
                frame.payload = (memoryview(bytearray(self._payload(bytes(frame.data())))),)
            case _:
                header[name] = value

    def _inside(self, items: list[Any], value: Any) -> None:
        place = self.where % len(items)
        inner = items[place]
        if isinstance(inner, list) and inner and self.where % 3:
            inner[self.where % len(inner)] = value
        else:
            items[place] = value

    def _payload(self, data: bytes) -> bytes:
        match self.where % 6:
            case 0:
                return b""
            case 1:
                return data[:-1]
            case 2:
                return data + b"\x00"
            case 3:
                return b"\xff" * len(data)
            case 4:
                return b"\x00\x00\xc0\x7f" * (len(data) // 4)  # not a number, four bytes each
            case _:
                return bytes(b ^ 0x55 for b in data[:64]) + data[64:]


mutations = st.builds(
    Mutation,
    st.sampled_from(
        [
            "drop",
            "replace",
            "replace",
            "inside",
            "wrap",
            "add",
            "longer",
            "shorter",
            "shift",
            "flip",
            "payload",
        ]
    ),
    st.integers(0, 10_000),
    junk,
)
mutation_lists = st.lists(mutations, min_size=1, max_size=3)


def mutated(frame: Frame, changes: list[Mutation]) -> Frame:
    """A copy of the frame with these changes, as it would arrive: through msgpack."""
    changed = Frame(frame.kind, copy.deepcopy(frame.header), (memoryview(bytearray(frame.data())),))
    for change in changes:
        change.apply(changed)
    return changed


@dataclass(frozen=True)
class Spoiler:
    """One change of a frame's bytes on the wire."""

    what: str
    where: int
    data: bytes

    def apply(self, wire: bytes) -> bytes:
        """The changed bytes."""
        place = self.where % max(1, len(wire))
        header, payload = PREFIX.unpack(wire[: PREFIX.size])
        match self.what:
            case "truncate":
                return wire[:place]
            case "flip":
                return wire[:place] + bytes([wire[place] ^ (1 << self.where % 8)]) + wire[place + 1 :]
            case "insert":
                return wire[:place] + self.data + wire[place:]
            case "header_size":
                return PREFIX.pack(EXTREMES[self.where % len(EXTREMES)], payload) + wire[PREFIX.size :]
            case "payload_size":
                return PREFIX.pack(header, EXTREMES[self.where % len(EXTREMES)]) + wire[PREFIX.size :]
            case "raw":
                return PREFIX.pack(len(self.data), 0) + self.data
            case "bomb":
                return PREFIX.pack(len(BOMBS[place % len(BOMBS)]), 0) + BOMBS[place % len(BOMBS)]
            case _:
                return self.data


EXTREMES = (0, 1, 7, 8, 4096, 2**20, 2**20 + 1, 2**29, 2**29 + 1, 2**31 - 1, 2**31, 2**32 - 1)
BOMBS = (
    b"\xdd\x00\x0f\xff\xff" * 1000,
    b"\xdc\xff\xff" * 500 + b"\x00" * 1000,
    b"\xdf\x00\x0f\xff\xff" * 100,
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x91" * 5000,
    b"\x81\xa4kind" + b"\x91" * 1000 + b"\xc0",
    b"\x82\xa4kind\xa4part\xa1x" + b"\xdc\x0f\xff" + b"\x90" * 4095,
    b"\x82\xa4kind\xa6arrive\xa4keys" + b"\xdd\x00\x0f\x00\x00" + b"\x90" * 0xF0000,
    b"\x82\xa4kind\xa4plan\xa4plan" + b"\xc6\x00\x0f\x00\x00" + b"\xa0" * 0xF0000,
    b"\x81\xa4kind\xc7\x0c\xff" + b"\xff" * 12,
    b"\xc1",
    b"GET / HTTP/1.1\r\n\r\n",
)
"""Headers that announce more than they hold, are too deep, or grow when they are read."""

spoilers = st.builds(
    Spoiler,
    st.sampled_from(
        ["truncate", "flip", "flip", "insert", "header_size", "payload_size", "raw", "bomb", "bytes"]
    ),
    st.integers(0, 2**20),
    st.binary(max_size=40),
)


def wire_of(frame: Frame) -> bytes:
    """A frame's bytes. ExtTypes and the like are packed as they are."""
    return frame.encode_head() + b"".join(bytes(part) for part in frame.payload)


GENERIC: dict[str, Any] = {
    "step": 3,
    "plan": "a" * 64,
    "slot": 0,
    "peer": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "reason": "late",
    "version": 3,
    "lineage": "b" * 32,
    "keys": [[0, 0], [0, 1]],
    "group": "c" * 64,
    "id": 1,
    "offset": 0,
    "chunk": 0,
    "digest": "d" * 64,
}
"""A header for kinds nobody has been heard to send: every name that headers use."""


def generic(kind: Kind) -> Frame:
    """A frame of any kind."""
    return Frame(kind, copy.deepcopy(GENERIC), (memoryview(bytearray(64)),))
