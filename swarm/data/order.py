"""Which rows of the data set belong to which step: a seeded permutation that is never stored.

A balanced Feistel network over the smallest even number of bits that covers the data set, walked along its
cycle until it lands inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), maps a
position to a row in constant memory. Its round function is the finaliser of SplitMix64 (Steele, Lea and
Flood, 2014) on a round key taken from SHA-256. Everything is integer arithmetic spelled out here: every
machine, device and Python version computes the same order.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

_WORD = (1 << 64) - 1
_ROUNDS = 8
# Networks of one or two bits a half reach few of the possible permutations; 64 values are cheap to walk.
_SMALLEST_HALF_BITS = 3


@lru_cache(maxsize=256)
def _round_keys(purpose: str, seed: int, epoch: int) -> tuple[int, ...]:
    """The network's round keys (64 bits each), a function of purpose, seed and epoch alone."""
    keys = []
    for number in range(_ROUNDS):
        material = f"swarm-peer order 1|{purpose}|{seed}|{epoch}|{number}".encode()
        keys.append(int.from_bytes(hashlib.sha256(material).digest()[:8], "little"))
    return tuple(keys)


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words; every output bit depends on every input bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def permuted_index(position: int, size: int, *, seed: int, epoch: int = 0, purpose: str = "samples") -> int:
    """The element at `position` of the seeded permutation of range(size).

    A bijection of range(size) for every (seed, epoch, purpose). Takes at most four walks of eight rounds on
    average once size exceeds 16. Raises ValueError when position is outside range(size) or size exceeds 2^64.
    """
    if not 0 <= position < size <= 1 << 64:
        raise ValueError(f"position must lie in range(size) with size <= 2^64, got {position} of {size}")
    half_bits = max(_SMALLEST_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    keys = _round_keys(purpose, seed, epoch)
    value = position
    while True:
        left, right = value >> half_bits, value & half_mask
        for key in keys:
            left, right = right, left ^ (_mix((right + key) & _WORD) & half_mask)
        value = (left << half_bits) | right
        if value < size:
            return value


def sample_at(seed: int, total_samples: int, position: int) -> int:
    """The sample at `position` of the run's endless order.

    Epoch `position // total_samples` has a permutation of its own.
    Raises ValueError when there is no sample or position is negative.
    """
    if total_samples < 1 or position < 0:
        raise ValueError(f"need total_samples >= 1 and position >= 0, got {total_samples} and {position}")
    epoch, index = divmod(position, total_samples)
    return permuted_index(index, total_samples, seed=seed, epoch=epoch)


def samples_of_step(seed: int, total_samples: int, samples_per_step: int, step: int) -> list[int]:
    """The sample ids of one step, in plan order; steps are counted from 0.

    Step s takes positions [s * samples_per_step, (s + 1) * samples_per_step) of the endless order, so every
    sample comes once per epoch. A step across the end of an epoch may hold the same sample twice.
    Raises ValueError on a negative step or fewer than one sample per step or in the data set.
    """
    if samples_per_step < 1 or step < 0:
        raise ValueError(f"need samples_per_step >= 1 and step >= 0, got {samples_per_step} and {step}")
    first = step * samples_per_step
    return [sample_at(seed, total_samples, first + offset) for offset in range(samples_per_step)]


def samples_from_far_end(seed: int, total_samples: int, count: int, skip: int = 0) -> list[int]:
    """`count` samples from the end of the first epoch's order, going backwards after the last `skip`.

    Calibration and anchors take these: training reaches them last. Wraps around in a data set smaller than
    skip + count. Raises ValueError when the data set is empty or count or skip is negative.
    """
    if total_samples < 1 or count < 0 or skip < 0:
        raise ValueError(
            f"need total_samples >= 1, count >= 0 and skip >= 0, got {total_samples}, {count} and {skip}"
        )
    positions = ((total_samples - 1 - skip - offset) % total_samples for offset in range(count))
    return [permuted_index(position, total_samples, seed=seed) for position in positions]
