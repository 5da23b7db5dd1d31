"""What a stage's replicas average instead of their gradients: the interface of compressors.

A compressor turns a gradient into one vector or several, one after the other ("phases": PowerSGD's second depends on
the average of its first). Each is averaged by a butterfly whose chunks a `ChunkCodec` codes. What coding and
compression left out stays with the member (error feedback), and is part of its next gradient.

State is of two kinds. Common state (warm starts, masks) is a function of the averages of the committed rounds alone,
so all members hold the same, and a joiner has it from a snapshot and the updates since. Local state (error feedback,
local momentum) is a member's own and starts at zero. Neither changes until the round has committed.

Local state is kept as sums over tokens, not as means: weight times what was left out. A member that had one token
in a round and a thousand in the next then brings its old remainder in as often as it was left out, not a thousand
times; and sum over rounds of (total weight x average) + local state of all = sum of all tokens' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.gradient.chunk import ChunkCodec


@dataclass(frozen=True, slots=True)
class Phase:
    """One vector of fp32 [elements] that is averaged, and what codes its chunks.

    needs_residual: whether `Averaged.counted` and `owed` are wanted; without them nothing is decoded twice, they are
    empty, and a reducer's own part is exact.
    """

    elements: int
    codec: ChunkCodec
    needs_residual: bool = True


@dataclass(frozen=True, slots=True)
class Averaged:
    """What the exchange made of one phase, at one member.

    average: fp32 [elements], the same bits at all members.
    counted: fp32 [elements], what of this member's vector entered the means, as coded; zero in chunks whose reducer
    left it out, and everywhere if it had no weight. In the chunks that it reduces itself its part is coded too: left
    exact, it would have many times the norm of the others' few entries, stand out like a hostile one, and never count.
    owed: fp32 [elements], what the means lost when this member coded them, times total weight over its own (over 1 if
    it had none): as part of its next contribution it makes up for that. Zero in chunks that others reduced.
    """

    average: Tensor
    counted: Tensor
    owed: Tensor

    def residual(self, vector: Tensor) -> Tensor:
        """vector - counted + owed: error feedback over both codings of the butterfly."""
        # Fresh memory once: its pages cost more than the sums.
        return torch.sub(vector, self.counted).add_(self.owed)


class Compression(Protocol):
    """One round at one member. Call `vector`, exchange, `take`, for every phase; then `result`; after COMMIT `commit`.

    A compression that is dropped before `commit` has changed nothing.
    """

    def vector(self) -> Tensor:
        """What this member contributes to the next phase: fp32 [elements], not changed any more."""

    def take(self, averaged: Averaged) -> None:
        """The phase's outcome. Raises ValueError for averages that cannot be used (not finite)."""

    def result(self) -> Tensor:
        """The averaged gradient: fp32 [numel], the same bits at all members."""

    def commit(self) -> None:
        """The round has committed: the compressor's state moves on."""


class Compressor(Protocol):
    """A stage's compressor at one member. Lives on the compute thread."""

    def phases(self, step: int) -> tuple[Phase, ...]:
        """What the round of a step averages."""

    def begin(self, gradient: Tensor, step: int, weight: int) -> Compression:
        """Compress a contribution: fp32 [numel], per-token mean gradient of this member; it is not changed.

        weight: that of the contribution in the means, its number of tokens. With 0 the gradient is not looked at, and
        the vectors are zero. Raises ValueError for another size or type, or a negative weight.
        """

    def replay(self, averages: Sequence[Tensor], step: int) -> Tensor:
        """Take a committed round from its phases' averages, as one who catches up: returns the averaged gradient, fp32
        [numel], and moves the common state on. Raises ValueError, with nothing changed, for averages of other sizes.

        An averaged gradient that is not finite is returned like any other, here and by `Compression.result`, but moves
        no state, here and in `Compression.commit`: every member refuses to apply it.
        """

    def common_state(self) -> Mapping[str, Tensor]:
        """Common state by name, for snapshots; empty if there is none. Copies."""

    def load_common_state(self, state: Mapping[str, Tensor]) -> None:
        """Take common state over, with local state at zero; an empty map is the state before the first step. Raises
        ValueError, with nothing changed, for other names, shapes, or values that are not finite.
        """

    def digest(self) -> str:
        """sha256 (hex) over all state, local state too: tests and diagnostics compare it."""


def round_bytes(phases: Sequence[Phase], members: int, most: int) -> int:
    """Most payload bytes that a member of an even group sends in a round: its parts to the reducers and, of what it
    reduces, the averages to all. most: elements of a chunk at most.
    """
    from swarm.gradient.split import Split

    largest = 0
    for member in range(members):
        total = 0
        for phase in phases:
            split = Split(phase.elements, members, most)
            for chunk in range(split.chunks):
                nbytes = phase.codec.nbytes(split.size(chunk))
                total += nbytes * (members - 1) if split.reducer(chunk) == member else nbytes
        largest = max(largest, total)
    return largest
