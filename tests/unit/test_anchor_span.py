"""Anchors that hold some of the stages make, together, the samples of one that holds all."""

from __future__ import annotations

import itertools

import pytest
import torch

from swarm.anchor.span import SpanPass
from tests.unit.test_anchor_passes import batches, model_and_anchor


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)])
def test_spans_give_the_samples_of_the_whole(cuts: tuple[int, ...]) -> None:
    _, anchor, stages = model_and_anchor()
    whole = anchor.boundary_samples(batches(), 60, seed=5)
    ends = [0, *cuts, len(stages)]
    spans = [
        SpanPass(stages[first:last], batches(), 60, is_last=last == len(stages), seed=5)
        for first, last in itertools.pairwise(ends)
    ]
    for index in range(3):
        hidden = None
        for span in spans:
            hidden = span.forward(index, hidden)
            assert hidden is None or tuple(hidden.shape) == span.shape(index)
        assert hidden is None
        gradient = None
        for span in reversed(spans):
            gradient = span.backward(index, gradient)
        assert gradient is None
    found = [samples for span in spans for samples in span.samples()]
    assert len(found) == len(whole) == 2
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(one.gradient, other.gradient, atol=1e-7, rtol=1e-5)
        assert torch.equal(one.offsets, other.offsets)
        assert float(one.gradient.norm()) > 0


def test_nothing_passes_through_nothing() -> None:
    _, _, stages = model_and_anchor()
    with pytest.raises(ValueError, match="no samples"):
        SpanPass(stages, [], 60, is_last=True)
    with pytest.raises(ValueError, match="come back"):
        SpanPass(stages, batches(), 60, is_last=True).samples()
