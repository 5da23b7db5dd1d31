"""Some rows of what passes a boundary, the same at both of its ends.

Which tokens are kept follows from run, boundary, step, sample and position by the codecs' integer PRF: so the sender
keeps the hidden states and the receiver the gradients of the same tokens, without a word between them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.activation.base import CodecKey
from swarm.activation.basis import document_positions
from swarm.activation.prf import token_keys
from swarm.activation.tokens import SampledTokens

LARGEST = 1e6
"""No hidden state is larger; products of larger ones could overflow in a fit."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Of one microbatch. chosen: int64 [n], places among its B * T tokens, ascending. rows: fp32 [n, H] on the CPU."""

    key: CodecKey
    chosen: Tensor
    rows: Tensor

    def names(self) -> list[tuple[int, int, int]]:
        """Step, sample id and position of each row."""
        tokens = self.key.shape[1]
        samples = self.key.sample_ids.cpu()[self.chosen // tokens].tolist()
        positions = (self.chosen % tokens).tolist()
        return [(self.key.step, sample, place) for sample, place in zip(samples, positions, strict=True)]


class RowTap:
    """One end of a boundary. one_in: of so many tokens one is kept. limit: rows that are held at most; what passes
    beyond it is not kept. `see` is called on the compute thread, `take` in the loop.
    """

    def __init__(self, *, run_seed: int, boundary: int, one_in: int, limit: int) -> None:
        self._run_seed, self._boundary = run_seed, boundary
        self._one_in, self._limit = max(1, one_in), limit
        self._kept: list[KeptRows] = []
        self._count = 0
        self._lock = threading.Lock()

    def see(self, states: Tensor, key: CodecKey) -> None:
        """Keep some rows of states (or gradients) [B, T, H]."""
        chosen = self.choose(key)
        with self._lock:
            room = self._limit - self._count
            chosen = chosen[: max(0, room)]
            self._count += chosen.numel()
        if not chosen.numel():
            return
        rows = states.detach().flatten(0, 1)[chosen.to(states.device)].float().cpu()
        with self._lock:
            self._kept.append(KeptRows(key, chosen, rows))

    def choose(self, key: CodecKey) -> Tensor:
        """Which tokens of a microbatch are kept: int64 [n], ascending."""
        keys = token_keys(
            run_seed=self._run_seed,
            boundary=self._boundary,
            step=key.step,
            sample_ids=key.sample_ids,
            tokens=key.shape[1],
        )
        return ((keys >> 16).remainder(self._one_in) == 0).flatten().cpu().nonzero().squeeze(1)

    def take(self, before_step: int) -> list[KeptRows]:
        """What was kept of the steps before this one; it is let go of here."""
        with self._lock:
            taken = [kept for kept in self._kept if kept.key.step < before_step]
            self._kept = [kept for kept in self._kept if kept.key.step >= before_step]
            self._count = sum(kept.chosen.numel() for kept in self._kept)
        return taken


def pack_rows(kept: Sequence[KeptRows]) -> dict[str, Tensor]:
    """Rows as tensors: names int64 [n, 3] (step, sample, position), rows bf16 [n, H]. Raises ValueError without any."""
    if not kept:
        raise ValueError("no rows were kept")
    names = [name for one in kept for name in one.names()]
    rows = torch.cat([one.rows for one in kept]).to(torch.bfloat16)
    return {"names": torch.tensor(names, dtype=torch.int64), "rows": rows}


def check_rows(tensors: dict[str, Tensor], hidden_size: int, limit: int) -> None:
    """Raise ValueError unless these are at most `limit` finite rows, as `pack_rows` makes them."""
    names, rows = tensors.get("names"), tensors.get("rows")
    if names is None or rows is None or len(tensors) != 2:
        raise ValueError(f"rows: tensors {sorted(tensors)[:4]} where names and rows were expected")
    count = rows.shape[0] if rows.ndim == 2 else -1
    if names.dtype != torch.int64 or tuple(names.shape) != (count, 3) or not 0 < count <= limit:
        raise ValueError(f"rows: names {names.dtype} {list(names.shape)} for rows {list(rows.shape)}")
    if rows.dtype != torch.bfloat16 or rows.shape[1] != hidden_size:
        raise ValueError(f"rows: {rows.dtype} {list(rows.shape)}, not bf16 of {hidden_size} columns")
    if not bool((rows.abs() <= LARGEST).all()):  # not true of NaN either
        raise ValueError(f"rows: values that are not finite, or beyond {LARGEST:g}")


def pick_rows(tensors: dict[str, Tensor], wanted: Collection[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Of a sender's rows those with these names, and of several with one name the first."""
    picked: dict[tuple[int, ...], int] = {}
    for row, name in enumerate(map(tuple, tensors["names"].tolist())):
        if name in wanted:
            picked.setdefault(name, row)
    chosen = torch.tensor(list(picked.values()), dtype=torch.int64)
    return {"names": tensors["names"][chosen], "rows": tensors["rows"][chosen]}


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Rows of which both ends are known. hidden, gradient: fp32 [n, H]; offsets: int64 [n], from the document start;
    tokens: which they are, for their features.
    """

    hidden: Tensor
    gradient: Tensor
    offsets: Tensor
    tokens: SampledTokens


def join_rows(received: Sequence[dict[str, Tensor]], kept: Sequence[KeptRows]) -> JoinedRows:
    """Hidden states of the sender's end (`pack_rows`) and gradients of this one, token by token.

    A token that several senders name is the first one's. Raises ValueError if no token is known at both, or the token
    ids of a microbatch are not.
    """
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for number, tensors in enumerate(received):
        for row, name in enumerate(tensors["names"].tolist()):
            places.setdefault(tuple(name), (number, row))
    hidden, gradient, offsets, taken = [], [], [], []
    for one in kept:
        found = [(row, places[name]) for row, name in enumerate(one.names()) if name in places]
        if not found or one.key.token_ids is None:
            continue
        rows = torch.tensor([row for row, _ in found])
        chosen = one.chosen[rows]
        hidden.append(torch.stack([received[number]["rows"][row].float() for _, (number, row) in found]))
        gradient.append(one.rows[rows])
        offsets.append(document_positions(one.key.document_starts).reshape(-1).cpu()[chosen])
        taken.append((one.key.token_ids, one.key.document_starts, chosen))
    if not hidden:
        raise ValueError("no token was kept at both ends of the boundary")
    tokens = SampledTokens(tuple(taken))
    return JoinedRows(torch.cat(hidden), torch.cat(gradient), torch.cat(offsets), tokens)
