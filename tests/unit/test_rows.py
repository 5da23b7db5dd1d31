"""Rows kept at both ends of a boundary are those of the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.activation.base import CodecKey
from swarm.activation.rows import LARGEST, RowTap, check_rows, join_rows, pack_rows, pick_rows

H = 4


def key(step: int, samples: list[int], tokens: int = 40) -> CodecKey:
    starts = torch.zeros(len(samples), tokens, dtype=torch.bool)
    starts[:, 0] = starts[:, 7] = True
    ids = torch.arange(len(samples) * tokens).view(len(samples), tokens)
    return CodecKey(step, torch.tensor(samples), starts, (), ids)


def tap(one_in: int = 4, limit: int = 10_000, boundary: int = 1) -> RowTap:
    return RowTap(run_seed=7, boundary=boundary, one_in=one_in, limit=limit)


def states(of: CodecKey, scale: float) -> Tensor:
    """Each token's own value, whatever microbatch it is in: step + sample / 100 + position / 10000."""
    rows, tokens = of.shape
    value = of.step + of.sample_ids.view(rows, 1) / 64 + torch.arange(tokens) / 4096
    return (scale * value).unsqueeze(-1).expand(rows, tokens, H)


def test_both_ends_keep_the_same_tokens_however_they_are_packed() -> None:
    sender, receiver = tap(), tap()
    for samples in ([3, 5], [8, 9], [11, 12]):
        sender.see(states(key(2, samples), 1.0), key(2, samples))
    for samples in ([9], [3, 5, 8], [11, 99]):
        receiver.see(states(key(2, samples), -1.0), key(2, samples))
    kept, received = receiver.take(3), pack_rows(sender.take(3))
    check_rows(received, H, 10_000)
    joined = join_rows([received], kept)
    assert joined.hidden.shape == joined.gradient.shape == (joined.offsets.numel(), H)
    assert joined.hidden.shape[0] == sum(
        1 for one in kept for _, sample, _ in one.names() if sample in (3, 5, 8, 9, 11)
    )
    torch.testing.assert_close(joined.hidden, -joined.gradient, atol=0.02, rtol=0.0)
    assert 0.15 < joined.hidden.shape[0] / (5 * 40) < 0.35, "about one in four"
    flat = torch.cat([ids.flatten()[chosen] for ids, _, chosen in joined.tokens.batches])
    expected = [place if place < 7 else place - 7 for place in (flat % 40).tolist()]
    assert joined.offsets.tolist() == expected


def test_rows_of_later_steps_wait_and_those_taken_are_let_go() -> None:
    one = tap(one_in=1)
    for step in (3, 4, 5, 6):
        one.see(states(key(step, [1]), 1.0), key(step, [1]))
    assert [kept.key.step for kept in one.take(5)] == [3, 4]
    assert [kept.key.step for kept in one.take(9)] == [5, 6]
    assert one.take(99) == []


@given(st.integers(1, 8), st.integers(0, 100), st.lists(st.integers(1, 60), max_size=6))
def test_no_more_rows_are_held_than_the_limit(one_in: int, limit: int, lengths: list[int]) -> None:
    one = tap(one_in, limit)
    for sample, tokens in enumerate(lengths):
        of = key(0, [sample], max(8, tokens))
        one.see(states(of, 1.0), of)
    assert sum(kept.chosen.numel() for kept in one.take(1)) <= limit


def test_boundaries_and_steps_keep_tokens_of_their_own() -> None:
    of = key(1, [1, 2, 3], 200)
    chosen = [tap(boundary=boundary).choose(of).tolist() for boundary in (0, 1)]
    assert chosen[0] != chosen[1]
    assert tap().choose(key(2, [1, 2, 3], 200)).tolist() != chosen[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("rows"),
        lambda t: t.update(more=torch.zeros(1)),
        lambda t: t.update(rows=t["rows"].float()),
        lambda t: t.update(rows=t["rows"][:, :2]),
        lambda t: t.update(rows=t["rows"].flatten()),
        lambda t: t.update(names=t["names"][:-1]),
        lambda t: t.update(names=t["names"].int()),
        lambda t: t["rows"].fill_(float("nan")),
        lambda t: t.update(names=t["names"][:0], rows=t["rows"][:0]),
    ],
)
def test_rows_that_are_none_are_refused(change: Callable[[dict[str, Tensor]], object]) -> None:
    one = tap(one_in=1)
    one.see(states(key(0, [1]), 1.0), key(0, [1]))
    tensors = pack_rows(one.take(1))
    check_rows(tensors, H, 40)
    with pytest.raises(ValueError, match="rows"):
        check_rows(tensors, H, 39)
    change(tensors)
    with pytest.raises(ValueError, match="rows"):
        check_rows(tensors, H, 40)


def test_nothing_in_common_is_said() -> None:
    sender, receiver = tap(one_in=1), tap(one_in=1)
    sender.see(states(key(0, [1]), 1.0), key(0, [1]))
    receiver.see(states(key(0, [2]), 1.0), key(0, [2]))
    with pytest.raises(ValueError, match="no token"):
        join_rows([pack_rows(sender.take(1))], receiver.take(1))
    with pytest.raises(ValueError, match="no rows"):
        pack_rows([])


def test_rows_that_two_senders_name_are_the_first_ones_and_others_are_not_held() -> None:
    first, second, receiver = tap(1), tap(1), tap(1)
    for one, scale in ((first, 1.0), (second, 50.0), (receiver, -1.0)):
        one.see(states(key(2, [3]), scale), key(2, [3]))
    second.see(states(key(2, [4]), 1.0), key(2, [4]))
    kept = receiver.take(3)
    wanted = frozenset(name for one in kept for name in one.names())
    received = [pick_rows(pack_rows(one.take(3)), wanted) for one in (first, second)]
    assert [len(rows["names"]) for rows in received] == [40, 40], "of sample 4 nothing was wanted"
    torch.testing.assert_close(
        join_rows(received, kept).hidden, -join_rows(received, kept).gradient, atol=0.02, rtol=0
    )
    twice = {name: torch.cat([received[0][name], received[1][name]]) for name in ("names", "rows")}
    assert torch.equal(pick_rows(twice, wanted)["rows"], received[0]["rows"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2 * LARGEST, -3e38])
def test_rows_whose_products_could_overflow_are_refused(value: float) -> None:
    rows = torch.zeros(3, H, dtype=torch.bfloat16)
    rows[1, 2] = value
    with pytest.raises(ValueError, match="not finite, or beyond"):
        check_rows({"names": torch.zeros(3, 3, dtype=torch.int64), "rows": rows}, H, 10)
