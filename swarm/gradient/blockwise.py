"""Chunks cut into blocks with one fp32 scale each: INT8, FP8 E4M3, 4-bit E3M0.

A block's scale is fp32, so that gradients of any size fit. On the wire: the scales of all blocks, then the codes.
Decoding multiplies a code's value by its scale, one IEEE operation per element: the same bits everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

LARGEST = 2.0**110
"""Magnitude up to which a block has an encoding: sums over a block and products with a code stay finite."""

SMALLEST = 2.0**-110
"""Scales below it count as zero: what is left out stays far from fp32's subnormals, which some machines flush."""

_SCALE_BYTES = 4


class BlockCodec(ABC):
    """What the block formats share. A block with a value that is not finite, or beyond `LARGEST`, is sent with scale
    NaN, which `decode` refuses: it never becomes finite.

    Raises ValueError for a block size below 1.
    """

    name: ClassVar[str]
    bits: ClassVar[int]

    def __init__(self, block: int) -> None:
        if block < 1:
            raise ValueError(f"a block has at least one element, not {block}")
        self.block = block

    def nbytes(self, elements: int) -> int:
        """See ChunkCodec."""
        return _SCALE_BYTES * self._blocks(elements) + -(-elements * self.bits // 8)

    def encode(self, chunk: Tensor, seed: int) -> Tensor:
        """See ChunkCodec."""
        elements = chunk.numel()
        blocks = torch.zeros(self._blocks(elements), self.block)
        blocks.view(-1)[:elements] = chunk
        counts = torch.full((len(blocks),), float(self.block))
        if elements % self.block:
            counts[-1] = elements % self.block
        # NaN compares false with everything.
        sound = blocks.abs().amax(dim=1) <= LARGEST
        blocks[~sound] = 0.0
        scales = self.scales(blocks, counts).clamp_(max=LARGEST)
        scales[scales < SMALLEST] = 0.0
        blocks[scales == 0.0] = 0.0
        ratios = blocks / torch.where(scales > 0.0, scales, 1.0)[:, None]
        codes = self.codes(ratios.view(-1)[:elements], torch.Generator().manual_seed(seed))
        scales[~sound] = torch.nan
        return torch.cat([scales.view(torch.uint8), codes])

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """See ChunkCodec."""
        if encoded.dtype != torch.uint8 or encoded.numel() != self.nbytes(elements):
            raise ValueError(f"{encoded.numel()} bytes where {self.nbytes(elements)} were expected")
        blocks = self._blocks(elements)
        header = _SCALE_BYTES * blocks
        scales = encoded[:header].clone().view(torch.float32)
        if not bool(((scales == 0.0) | ((scales >= SMALLEST) & (scales <= LARGEST))).all()):
            raise ValueError(f"a {self.name} block has a scale that no block has")
        values = torch.zeros(blocks, self.block)
        values.view(-1)[:elements] = self.values(encoded[header:], elements)
        return values.mul_(scales[:, None]).view(-1)[:elements].clone()

    @abstractmethod
    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        """Scales fp32 [b] of finite blocks fp32 [b, block], of which `counts` (fp32 [b]) elements are no padding."""

    @abstractmethod
    def codes(self, ratios: Tensor, generator: torch.Generator) -> Tensor:
        """Codes uint8 of what is left when values are divided by their scales, fp32 [n]."""

    @abstractmethod
    def values(self, codes: Tensor, elements: int) -> Tensor:
        """fp32 [elements] of codes. Raises ValueError for codes that `codes` does not make."""

    def _blocks(self, elements: int) -> int:
        return -(-elements // self.block)


def stochastic_integers(values: Tensor, generator: torch.Generator) -> Tensor:
    """Integers, as fp32 [n], next to values (fp32 [n]): up with the probability of the fraction, so that the mean is
    the value. Integers stay.
    """
    floor = values.floor()
    drawn = torch.rand(values.shape, generator=generator)
    return floor + (drawn < values - floor)


class Int8Codec(BlockCodec):
    """q = SR(x / s) in [-127, 127] with s = max |x| / 127 per block (methods: INT8 blockwise); SR is stochastic
    rounding, so E[q s] = x. One byte per element.
    """

    name = "int8"
    bits = 8

    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        """See BlockCodec."""
        return blocks.abs().amax(dim=1) / 127

    def codes(self, ratios: Tensor, generator: torch.Generator) -> Tensor:
        """See BlockCodec."""
        return stochastic_integers(ratios, generator).clamp_(-127, 127).to(torch.int8).view(torch.uint8)

    def values(self, codes: Tensor, elements: int) -> Tensor:
        """See BlockCodec."""
        integers = codes.view(torch.int8)
        if bool((integers == -128).any()):
            raise ValueError("an int8 code is -128")
        return integers.float()


class Fp8Codec(BlockCodec):
    """E4M3 of x / s with s = max |x| / 448 per block, rounded stochastically to one of the two neighbours: three
    bits of mantissa above 2^-6, steps of 2^-9 below. One byte per element.
    """

    name = "fp8"
    bits = 8

    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        """See BlockCodec."""
        return blocks.abs().amax(dim=1) / 448

    def codes(self, ratios: Tensor, generator: torch.Generator) -> Tensor:
        """See BlockCodec."""
        # The exponent's bits alone are the power of two at or below the value; dividing by a power of two is exact.
        power = (ratios.contiguous().view(torch.int32) & 0x7F80_0000).view(torch.float32)
        step = power.clamp_(min=2.0**-6).div_(8)
        rounded = stochastic_integers(ratios / step, generator).mul_(step)
        return rounded.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    def values(self, codes: Tensor, elements: int) -> Tensor:
        """See BlockCodec."""
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise ValueError("an fp8 code is not a number")
        return codes.view(torch.float8_e4m3fn).float()


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

    # |x| / s from which e is 1 to 7: s / 8 first, then halfway between powers of two, in the logarithm.
    _BOUNDS = torch.tensor([0.125, *(2.0 ** (e - 3.5) for e in range(2, 8))])
    # By code, and both halves of a byte. A negative zero is no code.
    _HALVES = torch.tensor([0.0, *(2.0 ** (e - 3) for e in range(1, 8))])
    _HALVES = torch.cat([_HALVES, torch.tensor([torch.nan]), -_HALVES[1:]])
    _PAIRS = torch.stack([_HALVES.repeat(16), _HALVES.repeat_interleave(16)], dim=1)

    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        """See BlockCodec."""
        magnitudes = blocks.abs()
        magnitudes[magnitudes == 0.0] = torch.nan
        return magnitudes.nanmedian(dim=1).values.nan_to_num_(0.0)

    def codes(self, ratios: Tensor, generator: torch.Generator) -> Tensor:
        """See BlockCodec."""
        codes = torch.bucketize(ratios.abs(), self._BOUNDS, right=True).to(torch.uint8)
        codes += (codes > 0) * (ratios < 0) * torch.tensor(8, dtype=torch.uint8)
        if codes.numel() % 2:
            codes = torch.cat([codes, torch.zeros(1, dtype=torch.uint8)])
        pairs = codes.view(-1, 2)
        return pairs[:, 0] + pairs[:, 1] * 16

    def values(self, codes: Tensor, elements: int) -> Tensor:
        """See BlockCodec."""
        values = self._PAIRS[codes.int()].view(-1)
        if bool(values[elements:].any()):
            raise ValueError("the padding of an e3m0 chunk is not zero")
        if bool(values.isnan().any()):
            raise ValueError("an e3m0 code is a negative zero")
        return values[:elements]


class SignCodec(BlockCodec):
    """sign(x) mean |x| per block (EF-signSGD, arXiv 1901.09847: (||q||_1 / d) sign(q)); zero has the
    sign of its bit. One bit per element; biased, so it wants error feedback.
    """

    name = "sign"
    bits = 1

    def scales(self, blocks: Tensor, counts: Tensor) -> Tensor:
        """See BlockCodec."""
        return blocks.abs().sum(dim=1) / counts

    def codes(self, ratios: Tensor, generator: torch.Generator) -> Tensor:
        """See BlockCodec."""
        return torch.from_numpy(np.packbits(torch.signbit(ratios).numpy(), bitorder="little"))

    def values(self, codes: Tensor, elements: int) -> Tensor:
        """See BlockCodec."""
        bits = torch.from_numpy(np.unpackbits(codes.numpy(), bitorder="little"))
        if bool(bits[elements:].any()):
            raise ValueError("the padding of a sign chunk is not zero")
        return 1.0 - 2.0 * bits[:elements].float()
