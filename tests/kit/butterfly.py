"""The butterfly in float64, written from its definition: an oracle for compressors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Code = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Average [n], and what was counted and is owed per member, [members, n]."""

    average: Array
    counted: Array
    owed: Array


def butterfly(vectors: Sequence[Array], weights: Sequence[int], code: Code, most: int) -> Exchanged:
    """Every chunk has one reducer. All parts, its own too, and their mean are coded."""
    members, count = len(vectors), len(vectors[0])
    rounds = math.ceil(count / (members * most))  # chunks that each member reduces
    size = math.ceil(count / (members * rounds))
    chunks = math.ceil(count / size)
    average, total = np.zeros(count), sum(weights)
    counted, owed = np.zeros((members, count)), np.zeros((members, count))
    for chunk in range(chunks):
        span = slice(chunk * size, (chunk + 1) * size)
        reducer = chunk * members // chunks
        for member in range(members):
            if weights[member]:
                counted[member, span] = code(vectors[member][span])
        mean = sum(weights[i] * counted[i, span] for i in range(members)) / total
        average[span] = code(mean)
        owed[reducer, span] = (mean - average[span]) * total / max(1, weights[reducer])
    return Exchanged(average, counted, owed)


def exact(part: Array) -> Array:
    """Coding that loses nothing."""
    return part


def top_k(ratio: float) -> Code:
    """Largest magnitudes first, then lowest index; fp16 under the power of two of the largest."""

    def code(part: Array) -> Array:
        count = max(1, round(ratio * len(part)))
        order = sorted(range(len(part)), key=lambda i: (-abs(part[i]), i))[:count]
        out = np.zeros_like(part)
        peak = np.abs(part).max()
        exponent = max(-120, (math.floor(math.log2(peak)) + 1 if peak > 0 else 0) - 14)
        for i in order:
            out[i] = float(np.float16(part[i] * 2.0**-exponent)) * 2.0**exponent
        return out

    return code


def mean_sign(part: Array) -> Array:
    """sign(x) mean |x|, in one block."""
    scale = np.abs(part).mean()
    return np.where(np.signbit(part), -scale, scale)
