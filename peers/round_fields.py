"""Checked fields of the messages of a round."""

from __future__ import annotations

import reprlib
import string
from typing import Any

from peers.frames import FrameError, need, need_texts
from swarm.plan import MAX_ROSTER, MAX_SAMPLES_PER_STEP, MAX_SLOTS

HASH_LENGTH = 64
PEER_LENGTH = 128
SKETCH_LENGTH = 2048


def text_of(header: dict[str, Any], name: str, length: int = HASH_LENGTH) -> str:
    """A text of at most `length` characters. Raises FrameError."""
    text = need(header, name, str)
    if len(text) > length:
        raise FrameError("header", f"field {name!r}: at most {length} characters expected")
    return text


def sketch_of(header: dict[str, Any]) -> str:
    """A sketch of weights: hex text, or "". Raises FrameError."""
    sketch = text_of(header, "sketch", SKETCH_LENGTH)
    if not set(sketch) <= set(string.hexdigits):
        raise FrameError("header", "a sketch is hex text")
    return sketch


def hash_of(header: dict[str, Any], name: str) -> str:
    """A sha256 in hex, or "". Raises FrameError."""
    text = text_of(header, name)
    if text and (len(text) != HASH_LENGTH or not set(text) <= set("0123456789abcdef")):
        raise FrameError("header", f"field {name!r}: a hash or nothing expected")
    return text


def peers_of(header: dict[str, Any], name: str, count: int = MAX_ROSTER) -> tuple[str, ...]:
    """At most `count` peer ids, none of them twice. Raises FrameError."""
    peers = need_texts(header, name, count, PEER_LENGTH)
    if len(set(peers)) != len(peers):
        raise FrameError("header", f"field {name!r} names a peer twice")
    return tuple(peers)


def keys_of(header: dict[str, Any], name: str) -> tuple[tuple[int, int], ...]:
    """Keys of a plan, sorted, none of them twice. Raises FrameError."""
    raw = need(header, name, list)
    if len(raw) > MAX_SAMPLES_PER_STEP:
        raise FrameError("range", f"field {name!r}: {len(raw)} keys")
    keys: list[tuple[int, int]] = []
    for item in raw:
        if not isinstance(item, list) or len(item) != 2 or any(type(part) is not int for part in item):
            raise FrameError("header", f"a ledger key is [slot, microbatch], got {reprlib.repr(item):.40}")
        if not (0 <= item[0] < MAX_SLOTS and 0 <= item[1] < MAX_SAMPLES_PER_STEP):
            raise FrameError("range", f"ledger key {reprlib.repr(item):.40} is out of range")
        keys.append((item[0], item[1]))
    if len(set(keys)) != len(keys):
        raise FrameError("header", f"field {name!r} names a key twice")
    return tuple(sorted(keys))
