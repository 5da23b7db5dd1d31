"""The mask's random coordinates: a counter-based integer PRF and its stratified indices.

Every number is a function of (run seed, boundary, step, sample id, token position) alone. Nothing depends on
how rows are packed into microbatches or on the device, and a recomputation gives the same coordinates.

Mixing. `mix64` is the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), a bijection of 64-bit words. `absorb(state, value) = mix64((state ^ value) + G)`
takes in the seed, boundary, step, sample id and position one after another; the result seeds one SplitMix64
stream per token, whose g-th word is `mix64(token_key + (g + 1) * G)`. Each word gives four 16-bit lanes, from
the low end, one per kept coordinate; a lane's value is its int16 reading plus 2^15. All of it is two's-complement
int64 arithmetic, which wraps on every device torch supports; a test compares it with Python's unbounded
integers.

Strata. Coordinate j of k lies in [floor(j H / k), floor((j + 1) H / k)): its offset is the lane times the
stratum's width, shifted right by 16. The offset's bias is at most width / 65536 relative.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_LANES = 4
_CACHED_WORDS = 1 << 17
"""Words mixed at a time on a CPU (1 MiB), so that a dozen passes over them stay in the second-level cache."""

MAX_HIDDEN_SIZE = (1 << 15) - 1
"""Above this the 16.16 fixed-point product of lane and stratum would leave int32."""


def _signed(word: int) -> int:
    """An unsigned 64-bit word as the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _mix_integer(word: int) -> int:
    """`mix64` on Python integers."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _WORD
    word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _WORD
    return word ^ (word >> 31)


def _absorb_integer(state: int, value: int) -> int:
    """`absorb` on Python integers; value is taken modulo 2^64."""
    return _mix_integer((state ^ (value & _WORD)) + _GOLDEN)


def _xor_shift_(words: Tensor, scratch: Tensor, shift: int) -> None:
    """words ^= words >>> shift in place: int64, logical shift (torch's own shift is arithmetic)."""
    torch.bitwise_right_shift(words, shift, out=scratch)
    scratch.bitwise_and_((1 << (64 - shift)) - 1)
    words.bitwise_xor_(scratch)


def mix64_(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place. words: int64, any shape. Returns words."""
    scratch = torch.empty_like(words)
    _xor_shift_(words, scratch, 30)
    words.mul_(_signed(_MULTIPLIER_1))
    _xor_shift_(words, scratch, 27)
    words.mul_(_signed(_MULTIPLIER_2))
    _xor_shift_(words, scratch, 31)
    return words


def _absorb(state: Tensor, value: Tensor) -> Tensor:
    """mix64((state ^ value) + G), broadcast over int64 tensors."""
    return mix64_((state ^ value).add_(_signed(_GOLDEN)))


def token_keys(*, run_seed: int, boundary: int, step: int, sample_ids: Tensor, tokens: int) -> Tensor:
    """One 64-bit key per token: int64 [B, tokens].

    run_seed, boundary and step are integers taken modulo 2^64; sample_ids is int64 [B]; the position is the
    token's column in its row.
    """
    stream = 0
    for value in (run_seed, boundary, step):
        stream = _absorb_integer(stream, value)
    start = torch.full((1,), _signed(stream), dtype=torch.int64, device=sample_ids.device)
    rows = _absorb(start, sample_ids.to(torch.int64))
    columns = torch.arange(tokens, dtype=torch.int64, device=sample_ids.device)
    return _absorb(rows.unsqueeze(1), columns.unsqueeze(0))


class StratifiedSampler:
    """k of H coordinates per token, one in each stratum.

    Holds constant tables only. Raises ValueError for k outside 1..H, for H above MAX_HIDDEN_SIZE, and on a
    big-endian machine (the lanes of a word are read in little-endian order).
    """

    def __init__(self, hidden_size: int, kept: int, device: torch.device | str = "cpu") -> None:
        if not 1 <= kept <= hidden_size:
            raise ValueError(f"kept coordinates must lie in 1..{hidden_size}, got {kept}")
        if hidden_size > MAX_HIDDEN_SIZE:
            raise ValueError(f"hidden size {hidden_size} exceeds the mask codec's limit of {MAX_HIDDEN_SIZE}")
        if sys.byteorder != "little":
            raise ValueError("the mask codec needs a little-endian machine")
        self.hidden_size = hidden_size
        self.kept = kept
        edges = [j * hidden_size // kept for j in range(kept + 1)]
        widths = [edges[j + 1] - edges[j] for j in range(kept)]
        # The second term lifts lanes, read as int16, to 0 .. 2^16 - 1.
        sums = [(edges[j] << 16) + (widths[j] << 15) for j in range(kept)]
        self._widths = torch.tensor(widths, dtype=torch.int32, device=device)
        self._sums = torch.tensor(sums, dtype=torch.int32, device=device)
        groups = -(-kept // _LANES)
        counters = [_signed(((g + 1) * _GOLDEN) & _WORD) for g in range(groups)]
        self._counters = torch.tensor(counters, dtype=torch.int64, device=device)

    def coordinates(self, keys: Tensor) -> Tensor:
        """Kept coordinates of every token. keys: int64 [N]. Returns int32 [N, k], increasing along a row."""
        if not keys.is_cpu:
            return self._coordinates(keys)
        chunk = max(1, _CACHED_WORDS // self._counters.numel())
        if keys.numel() <= chunk:
            return self._coordinates(keys)
        pieces = range(0, keys.numel(), chunk)
        return torch.cat([self._coordinates(keys[first : first + chunk]) for first in pieces])

    def _coordinates(self, keys: Tensor) -> Tensor:
        """`coordinates` of one cache-sized piece."""
        words = mix64_(keys.unsqueeze(1) + self._counters)
        lanes = words.view(torch.int16)[:, : self.kept]
        fixed_point = lanes.to(torch.int32).mul_(self._widths).add_(self._sums)
        return fixed_point.bitwise_right_shift_(16)

    def flat_indices(self, keys: Tensor) -> Tensor:
        """Kept coordinates as indices into a flattened [N, H]: [N * k], int32 if it fits, else int64."""
        coordinates = self.coordinates(keys)
        tokens = keys.numel()
        dtype = torch.int32 if tokens * self.hidden_size < 1 << 31 else torch.int64
        offsets = torch.arange(tokens, dtype=dtype, device=keys.device).mul_(self.hidden_size)
        return coordinates.to(dtype).add_(offsets.unsqueeze(1)).reshape(-1)
