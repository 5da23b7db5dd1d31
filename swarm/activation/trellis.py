"""Trellis-coded quantisation: a sequence of values, one path bit each, near the error of vector quantisation.

The levels of a width are dealt out to four subsets in turn (0 1 2 3 0 1 2 3 ... from the lowest up). A path bit
and the two before it name the subset, the value's other bits the level in it; so w bits choose among 2^(w+1)
levels, and the encoder, which looks for the best sequence of path bits (Viterbi), pays 0.6 dB less error than
the best scalar quantiser at one bit and 1.2 dB less at two (Marcellin and Fischer, "Trellis coded quantization
of memoryless and Gauss-Markov sources", 1990; the trellis is Ungerboeck's with four states).

Many sequences (lanes) are coded side by side, so that a step is a few operations on vectors. The decoder needs
no sequence: every subset follows from three path bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

STATES = 4
SUBSETS = 4


def subsets(path: Tensor) -> Tensor:
    """Subset 0..3 of every step, uint8 [T, L], from path bits uint8 [T, L] (0 or 1); lanes start in state 0."""
    before = torch.zeros_like(path)
    before[1:] = path[:-1]
    earlier = torch.zeros_like(path)
    earlier[2:] = path[:-2]
    return before | ((path ^ earlier) << 1)


def best_path(distances: Tensor) -> Tensor:
    """Path bits uint8 [T, L] of least total distance (Viterbi, "Error bounds for convolutional codes", 1967).

    distances: float32 [4, T, L], cost of taking the best level of a subset at a step.
    """
    _, steps, lanes = distances.shape
    device = distances.device
    # State s = 2 b' + b'' after path bits b', b'' (the latest last); b leads to 2 b'' + b. Axes below: b'', then b.
    # From b' = 0 the step costs subset b'' + 2 b, from b' = 1 it costs subset b'' + 2 (1 - b).
    costs = distances.view(2, 2, steps, lanes).permute(2, 1, 0, 3)
    total = torch.full((2, 2, lanes), torch.inf, device=device)
    total[0, 0] = 0.0
    upper = torch.empty((steps, 2, 2, lanes), dtype=torch.bool, device=device)
    low, high = torch.empty_like(total), torch.empty_like(total)
    for t in range(steps):
        torch.add(total[0].unsqueeze(1), costs[t], out=low)
        torch.add(total[1].unsqueeze(1), costs[t], out=high)
        for b in (0, 1):
            torch.lt(high[:, 1 - b], low[:, b], out=upper[t, :, b])
            torch.minimum(low[:, b], high[:, 1 - b], out=total[:, b])
    state = total.view(STATES, lanes).argmin(dim=0)
    decisions = upper.view(steps, STATES, lanes)
    path = torch.empty((steps, lanes), dtype=torch.uint8, device=device)
    for t in reversed(range(steps)):
        path[t] = state & 1
        state = (state >> 1) + (decisions[t].gather(0, state.unsqueeze(0)).squeeze(0).long() << 1)
    return path
