"""The file in which priors travel: a safetensors file that says what it is.

One format for both kinds, the corrector's factors of a stage and the codec's arrays of a boundary. The metadata
holds one string, `prior`: JSON with format, kind, version, step, and the stage or boundary. One string, because
safetensors writes several in random order, and equal priors should be equal files. Who made it may be added as a
second one (`swarm.anchor.seal`).

Files come from strangers. Their hash is compared elsewhere; here their structure is: a size that the expected
arrays can have, known names, and every array's dtype and shape.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

_KEY = "prior"
SEAL_KEY = "seal"
SEAL_BYTES = 4096
"""Room in the header for the seal of whoever made the prior (`swarm.anchor.seal`)."""
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_HEADER_BASE_BYTES = 1024
_HEADER_ARRAY_BYTES = 192
_LARGEST = 2**53 - 1
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class PriorFileError(ValueError):
    """A prior file that is not what was expected; names the array, what was expected and what there is."""


class PriorInfo(BaseModel):
    """What a prior file says about itself.

    kind: whose arrays they are. part: ordinal of the stage (corrector) or of the boundary (boundary b lies between
    stages b and b + 1). version: of the prior. step: that of the weights it was made from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    kind: Literal["corrector", "boundary"]
    part: int = Field(ge=0, le=_LARGEST)
    version: int = Field(ge=0, le=_LARGEST)
    step: int = Field(ge=0, le=_LARGEST)


Extent = int | tuple[int, int]
"""One dimension: exact, or the smallest and largest it may be."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What an array may be: one of these dtypes, and this shape."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[Extent, ...]

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest array that fits."""
        count = max(dtype.itemsize for dtype in self.dtypes)
        for extent in self.shape:
            count *= extent if isinstance(extent, int) else extent[1]
        return count

    def fits(self, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether an array of this dtype and shape is one of these."""
        if dtype not in self.dtypes or len(shape) != len(self.shape):
            return False
        for extent, actual in zip(self.shape, shape, strict=True):
            low, high = (extent, extent) if isinstance(extent, int) else extent
            if not low <= actual <= high:
                return False
        return True

    def __str__(self) -> str:
        """As error messages print it: `float32|bfloat16 [64, 1..576]`."""
        extents = [str(e) if isinstance(e, int) else f"{e[0]}..{e[1]}" for e in self.shape]
        return (
            f"{'|'.join(str(dtype).removeprefix('torch.') for dtype in self.dtypes)} [{', '.join(extents)}]"
        )


def prior_bytes_limit(expected: Mapping[str, ArraySpec]) -> int:
    """Bytes that a file with these arrays can have at most, header included."""
    return _header_limit(expected) + sum(spec.largest_nbytes for spec in expected.values())


def encode_prior(info: PriorInfo, arrays: Mapping[str, Tensor]) -> bytes:
    """A prior file. arrays: fp32, bf16, int8, int32 or int64 by name. Equal priors give equal bytes.

    Raises ValueError, naming the array, for another dtype or a name that the format reserves.
    """
    plain: dict[str, Tensor] = {}
    for name, array in arrays.items():
        if name == _METADATA:
            raise ValueError(f"no array can be called {name!r}")
        if array.dtype not in _DTYPES.values():
            raise ValueError(f"array {name!r} is {array.dtype}; a prior holds {sorted(_DTYPES)}")
        # A copy each: safetensors refuses tensors that share memory.
        plain[name] = array.detach().to("cpu", copy=True).contiguous()
    text = json.dumps(info.model_dump(), sort_keys=True, separators=(",", ":"))
    data: bytes = save(plain, metadata={_KEY: text})
    return data


def decode_prior(
    data: bytes,
    expected: Mapping[str, ArraySpec],
    *,
    kind: Literal["corrector", "boundary"],
    is_complete: bool = True,
) -> tuple[PriorInfo, dict[str, Tensor]]:
    """What a prior file says about itself, and its arrays on the CPU, in the order of `expected`.

    is_complete: whether every expected array must be there. Raises PriorFileError for anything that is not such a
    file; its size is compared with `prior_bytes_limit` before anything of it is parsed.
    """
    limit = prior_bytes_limit(expected)
    if len(data) > limit:
        raise PriorFileError(f"prior file: {len(data)} bytes where at most {limit} were expected")
    header = _header(data, _header_limit(expected))
    info = _info(header.pop(_METADATA, None), kind)
    found = {name: _described(name, entry) for name, entry in header.items()}
    _check_names(found, expected, is_complete)
    present = [name for name in expected if name in found]
    for name in present:
        _check(name, *found[name], expected[name])
    try:
        arrays: dict[str, Tensor] = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise PriorFileError(f"prior file: no safetensors file of {len(data)} bytes: {error}") from error
    # Our reading of the header is not safetensors' own; what counts is what it returned.
    if set(arrays) != set(found):
        raise PriorFileError(f"prior file: arrays {sorted(arrays)[:8]} where {present[:8]} were announced")
    for name in present:
        _check(name, arrays[name].dtype, tuple(arrays[name].shape), expected[name])
    return info, {name: arrays[name] for name in present}


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """A file's bytes. Raises PriorFileError if there are more than `limit_bytes`, OSError if it cannot be read."""
    with path.open("rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise PriorFileError(f"prior file {path.name}: more than the {limit_bytes} bytes that were expected")
    return data


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all. Raises OSError, leaving nothing of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # several processes may write the same
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _header_limit(expected: Mapping[str, ArraySpec]) -> int:
    """Bytes of the length field and the header of a file with these arrays, generously."""
    # JSON writes a character in up to 12 bytes (two escapes).
    arrays = sum(12 * len(name) + _HEADER_ARRAY_BYTES for name in expected)
    return _LENGTH.size + _HEADER_BASE_BYTES + SEAL_BYTES + arrays


def _header(data: bytes, limit: int) -> dict[str, Any]:
    """The header's JSON object. Raises PriorFileError."""
    if len(data) < _LENGTH.size:
        raise PriorFileError(f"prior file: {len(data)} bytes hold no header")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(limit, len(data)) - _LENGTH.size:
        raise PriorFileError(
            f"prior file: a header of {length} bytes in {len(data)} bytes, where at most {limit} were expected"
        )
    try:
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    except (ValueError, RecursionError) as error:
        raise PriorFileError(f"prior file: its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise PriorFileError(
            f"prior file: its header is a {type(header).__name__} where an object was expected"
        )
    return header


def _info(metadata: Any, kind: str) -> PriorInfo:
    """What the file says about itself. Raises PriorFileError."""
    is_known = isinstance(metadata, dict) and set(metadata) in ({_KEY}, {_KEY, SEAL_KEY})
    text = metadata[_KEY] if is_known else None
    if not isinstance(text, str):
        raise PriorFileError(
            f"prior file: metadata with one string {_KEY!r}, and perhaps {SEAL_KEY!r}, expected, got {metadata!r:.200}"
        )
    try:
        info = PriorInfo.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise PriorFileError(f"prior file: metadata {place}: {first['msg']} (got {text!r:.200})") from error
    if info.kind != kind:
        raise PriorFileError(f"prior file: a prior of kind {info.kind!r} where {kind!r} was expected")
    return info


def _described(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a header entry. Raises PriorFileError."""
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in _DTYPES or not isinstance(shape, list):
        raise PriorFileError(
            f"prior file: array {name!r:.200} is {entry!r:.200}; its dtype must be one of {sorted(_DTYPES)}"
        )
    if not all(type(extent) is int for extent in shape):
        raise PriorFileError(
            f"prior file: array {name!r:.200} has shape {shape!r:.200}; integers were expected"
        )
    return _DTYPES[dtype], tuple(shape)


def _check_names(found: Mapping[str, object], expected: Mapping[str, ArraySpec], is_complete: bool) -> None:
    """Raise PriorFileError for unexpected arrays, and for missing ones if all are wanted."""
    unexpected = sorted(set(found) - set(expected))
    missing = sorted(set(expected) - set(found)) if is_complete else []
    if unexpected or missing:
        raise PriorFileError(f"prior file: missing arrays {missing[:8]}, unexpected ones {unexpected[:8]}")


def _check(name: str, dtype: torch.dtype, shape: tuple[int, ...], spec: ArraySpec) -> None:
    """Raise PriorFileError unless an array of this dtype and shape is what was expected."""
    if not spec.fits(dtype, shape):
        actual = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise PriorFileError(f"prior file: array {name!r} is {actual} where {spec} was expected")
