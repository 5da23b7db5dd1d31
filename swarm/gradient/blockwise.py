"""Chunks cut into blocks with one fp32 scale each: INT8, FP8 E4M3, 4-bit E3M0, signs.

A block's scale is fp32, so that gradients of any size fit. On the wire: the scales of all blocks, then the codes.
Decoding multiplies a code's value by its scale, one IEEE operation per element: the same bits everywhere.

Every pass over a chunk costs about a tenth of a nanosecond per element, and some operations twenty times that, so
there are few passes, all of them vectorised, over the narrowest integers that hold what is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

LARGEST = 2.0**110
"""Magnitude up to which a block has an encoding: sums over a block and products with a code stay finite."""

SMALLEST = 2.0**-110
"""Scales below it count as zero: what is left out stays far from fp32's subnormals, which some machines flush."""

_SCALE_BYTES = 4


class BlockCodec(ABC):
    """What the block formats share. A block with a value that is not finite, or beyond `LARGEST`, is sent with scale
    NaN, which `decode` refuses: it never becomes finite.

    unit: a power of two; ratios and values below are of elements over scale and unit.
    Raises ValueError for a block size below 1.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    unit: ClassVar[float] = 1.0

    def __init__(self, block: int) -> None:
        if block < 1:
            raise ValueError(f"a block has at least one element, not {block}")
        self.block = block

    def nbytes(self, elements: int) -> int:
        """See ChunkCodec."""
        return _SCALE_BYTES * self._blocks(elements) + self._code_bytes(elements)

    def encode(self, chunk: Tensor, seed: int) -> Tensor:
        """See ChunkCodec."""
        elements = chunk.numel()
        blocks = self._cut(chunk)
        spare = blocks.abs()
        peaks, scales = self.scales(spare, elements)
        # NaN compares false with everything.
        sound = peaks <= LARGEST
        np.minimum(scales, np.float32(LARGEST), out=scales)
        is_empty = ~(sound & (scales >= SMALLEST))
        divisors = scales * np.float32(self.unit)
        if is_empty.any():
            blocks = torch.where(torch.from_numpy(is_empty)[:, None], 0.0, blocks)
            divisors[is_empty] = 1.0
            scales[is_empty] = 0.0
            scales[~sound] = np.nan
        codes = self.codes(blocks, torch.from_numpy(divisors)[:, None], spare, seed)
        return torch.from_numpy(np.concatenate([scales.view(np.uint8), codes[: self._code_bytes(elements)]]))

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """See ChunkCodec."""
        if encoded.dtype != torch.uint8 or encoded.numel() != self.nbytes(elements):
            raise ValueError(f"{encoded.numel()} bytes where {self.nbytes(elements)} were expected")
        header = _SCALE_BYTES * self._blocks(elements)
        data = encoded.numpy()
        scales = data[:header].copy().view(np.float32)
        if not ((scales == 0.0) | ((scales >= SMALLEST) & (scales <= LARGEST))).all():
            raise ValueError(f"a {self.name} block has a scale that no block has")
        values = self.values(data[header:], elements)
        factors = torch.from_numpy(scales * np.float32(self.unit))
        whole = elements // self.block
        values[: whole * self.block].view(whole, self.block).mul_(factors[:whole, None])
        if whole < len(factors):
            values[whole * self.block :].mul_(factors[whole])
        return values

    @abstractmethod
    def scales(self, magnitudes: Tensor, elements: int) -> tuple[Array, Array]:
        """Largest |x| and scale of each block, fp32 [b] both, from |x| (fp32 [b, block], which may be changed) of so
        many elements and padding of zeros. A peak is NaN or infinite if the block has such a value.
        """

    @abstractmethod
    def codes(self, blocks: Tensor, divisors: Tensor, spare: Tensor, seed: int) -> Array:
        """Codes uint8 of finite blocks fp32 [b, block], padding too, over divisors fp32 [b, 1]; zeros have code 0.
        spare: memory like that of the blocks, which may be used.
        """

    @abstractmethod
    def values(self, codes: Array, elements: int) -> Tensor:
        """fp32 [elements] of codes uint8, new memory. Raises ValueError for codes that `codes` does not make."""

    def _blocks(self, elements: int) -> int:
        return -(-elements // self.block)

    def _code_bytes(self, elements: int) -> int:
        return -(-elements * self.bits // 8)

    def _cut(self, chunk: Tensor) -> Tensor:
        """fp32 [b, block], padded with zeros; the chunk itself where it needs none."""
        if chunk.numel() % self.block == 0:
            return chunk.contiguous().view(-1, self.block)
        blocks = torch.zeros(self._blocks(chunk.numel()), self.block)
        blocks.view(-1)[: chunk.numel()] = chunk
        return blocks


class _Words(ISeedSequence):
    """The seed of one encoding as it is: it comes out of a hash, and another one would take a tenth of the time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Array:
        """See NumPy."""
        return np.full(n_words, self._seed, dtype=dtype)


def random_bits(elements: int, dtype: type[np.integer[Any]], seed: int) -> Array:
    """Uniform integers [elements] of 8 or 16 bits, so many out of each 64 that are drawn. seed: of up to 64 bits."""
    words: Any = _Words(seed)  # NumPy's annotations know one kind of seed only
    drawn: Array = np.random.SFC64(words).random_raw(-(-elements * np.dtype(dtype).itemsize // 8))
    return drawn.view(dtype)[:elements]


class Int8Codec(BlockCodec):
    """q = SR(x / s) in [-127, 127] with s = max |x| / 127 per block (methods: INT8 blockwise); SR is stochastic
    rounding, so E[q s] = x. One byte per element.
    """

    name = "int8"
    bits = 8

    def scales(self, magnitudes: Tensor, elements: int) -> tuple[Array, Array]:
        """See BlockCodec."""
        peaks = magnitudes.amax(dim=1).numpy()
        return peaks, peaks / np.float32(127)

    def codes(self, blocks: Tensor, divisors: Tensor, spare: Tensor, seed: int) -> Array:
        """See BlockCodec."""
        ratios = torch.div(blocks, divisors, out=spare).view(-1)
        # Rounding to the nearest integer after adding noise in (-1/2, 1/2) goes up with the probability of the
        # fraction. Odd numbers over 2^16 are symmetric and never one half: integers stay, and 127 is not passed.
        noise = random_bits(ratios.numel(), np.int16, seed)
        noise |= 1
        ratios.add_(torch.from_numpy(noise).float(), alpha=2.0**-16).round_()
        return ratios.to(torch.int8).view(torch.uint8).numpy()

    def values(self, codes: Array, elements: int) -> Tensor:
        """See BlockCodec."""
        integers = codes.view(np.int8)
        if integers.min(initial=0) == -128:
            raise ValueError("an int8 code is -128")
        return torch.from_numpy(integers.astype(np.float32))


class Fp8Codec(BlockCodec):
    """E4M3 of x / s with s = max |x| / 448 per block, rounded stochastically to one of the two neighbours: three
    bits of mantissa above 2^-6, steps of 2^-9 below. One byte per element.

    x / s / 2^8 as fp16 has E4M3's bits at the top, below 2^-6 too, and seven more, which are added to random ones and
    cut off. The mean is that of the fp16: within 1/256 of a step of x.
    """

    name = "fp8"
    bits = 8
    unit = 2.0**8

    def scales(self, magnitudes: Tensor, elements: int) -> tuple[Array, Array]:
        """See BlockCodec."""
        peaks = magnitudes.amax(dim=1).numpy()
        return peaks, peaks / np.float32(448)

    def codes(self, blocks: Tensor, divisors: Tensor, spare: Tensor, seed: int) -> Array:
        """See BlockCodec."""
        halves = torch.div(blocks, divisors, out=spare).view(-1).to(torch.float16)
        signed: Array = halves.view(torch.int16).numpy()
        # Without its sign, which is shifted out, an fp16 up to 448 / 2^8 has its highest bit at 2^14.
        rounded: Array = signed + signed
        rounded += random_bits(signed.size, np.uint8, seed)
        signed &= -(2**15)
        rounded |= signed
        rounded >>= 8
        return rounded.astype(np.int8).view(np.uint8)

    def values(self, codes: Array, elements: int) -> Tensor:
        """See BlockCodec."""
        if (codes & 0x7F).max(initial=0) == 0x7F:
            raise ValueError("an fp8 code is not a number")
        # Sign twice, exponent, mantissa: the second sign is where an fp16 has the highest bit of its exponent.
        halves = codes.view(np.int8).astype(np.int16)
        halves *= 2**7
        halves &= ~(2**14)
        return torch.from_numpy(halves).view(torch.float16).float()


class E3M0Codec(BlockCodec):
    """Sign and a power of two in four bits (Streaming DiLoCo's outer gradients, arXiv 2501.18512): s is a block's
    median of |x|, and x becomes sign(x) s 2^(e - 3) with e - 3 = clip(round(log2(|x| / s)), -2, 4); e = 0 stands for
    zero, below s / 8. Half a byte per element; biased, so it wants error feedback.

    Two choices differ from the description that we follow: the median is that of the values other than zero, as a
    block that is mostly zero would otherwise never send the rest; and the exponent goes up to 4, where a clip at 3
    leaves a code unused.
    """

    name = "e3m0"
    bits = 4

    # fp32's bits: halfway between 1 and 2, in the logarithm, and s / 8, from which e is 1.
    _HALFWAY, _EIGHTH = (int(np.float32(value).view(np.int32)) for value in (2.0**0.5, 0.125))
    # Both halves of a byte, by its value. A negative zero is no code.
    _HALVES = np.array([0.0, *(2.0 ** (e - 3) for e in range(1, 8))], dtype=np.float32)
    _HALVES = np.concatenate([_HALVES, np.array([np.nan], dtype=np.float32), -_HALVES[1:]])
    _PAIRS = np.stack([np.tile(_HALVES, 16), np.repeat(_HALVES, 16)], axis=1).view(np.uint64).ravel()

    def scales(self, magnitudes: Tensor, elements: int) -> tuple[Array, Array]:
        """See BlockCodec."""
        ranked = magnitudes.numpy()
        ranked.sort(axis=1)  # several times as fast as anything that finds the median alone
        zeros = np.zeros(len(ranked), dtype=np.intp)
        has_zeros = ranked[:, 0] == 0.0
        zeros[has_zeros] = np.count_nonzero(ranked[has_zeros] == 0.0, axis=1)
        places = np.minimum(zeros + (self.block - zeros - 1) // 2, self.block - 1)
        medians = ranked[np.arange(len(ranked)), places]
        return ranked[:, -1].copy(), medians

    def codes(self, blocks: Tensor, divisors: Tensor, spare: Tensor, seed: int) -> Array:
        """See BlockCodec."""
        ratios = torch.div(blocks, divisors, out=spare).view(-1).numpy()
        is_negative = np.signbit(ratios)
        sizes = ratios.view(np.int32)
        sizes &= 2**31 - 1
        is_some = (sizes >= self._EIGHTH).view(np.int8)
        # Bits of positive floats are ordered like these, with a new exponent every 2^23.
        sizes -= self._HALFWAY
        sizes >>= 23
        codes = torch.from_numpy(sizes).to(torch.int8).clamp_(-4, 3).add_(4)
        torch.maximum(codes, torch.from_numpy(is_some), out=codes)
        is_negative &= is_some.view(np.bool_)
        codes.add_(torch.from_numpy(is_negative.view(np.int8)), alpha=8)
        even = codes.numpy() if codes.numel() % 2 == 0 else np.append(codes.numpy(), np.int8(0))
        pairs = even.view(np.uint16)
        pairs |= pairs >> 4
        return pairs.astype(np.uint8)

    def values(self, codes: Array, elements: int) -> Tensor:
        """See BlockCodec."""
        if elements % 2 and codes[-1] >> 4:
            raise ValueError("the padding of an e3m0 chunk is not zero")
        values = torch.from_numpy(self._PAIRS.take(codes).view(np.float32))[:elements]
        if bool(values.sum().isnan()):
            raise ValueError("an e3m0 code is a negative zero")
        return values


class SignCodec(BlockCodec):
    """sign(x) mean |x| per block (EF-signSGD, arXiv 1901.09847: (||q||_1 / d) sign(q)); zero has the
    sign of its bit. One bit per element; biased, so it wants error feedback.
    """

    name = "sign"
    bits = 1

    # The eight values of a byte, by its value.
    _ROWS = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    _ROWS = _ROWS.astype(np.float32)

    def scales(self, magnitudes: Tensor, elements: int) -> tuple[Array, Array]:
        """See BlockCodec."""
        scales = magnitudes.sum(dim=1).div_(self.block)
        if elements % self.block:
            scales[-1] *= self.block / (elements % self.block)
        return magnitudes.amax(dim=1).numpy(), scales.numpy()

    def codes(self, blocks: Tensor, divisors: Tensor, spare: Tensor, seed: int) -> Array:
        """See BlockCodec."""
        return np.packbits(np.signbit(blocks.view(-1).numpy()), bitorder="little")

    def values(self, codes: Array, elements: int) -> Tensor:
        """See BlockCodec."""
        if elements % 8 and codes[-1] >> elements % 8:
            raise ValueError("the padding of a sign chunk is not zero")
        return torch.from_numpy(self._ROWS.take(codes, axis=0).ravel())[:elements]
