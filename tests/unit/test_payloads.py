from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.frames import FrameError, pack_tensors
from peers.payloads import BatchFormat, samples_of, unpack_forward, unpack_layout
from swarm.activation.base import BoundaryCodec, CodecKey
from swarm.activation.config import CodecConfig, DenseConfig, MaskConfig
from swarm.activation.registry import build_codec
from swarm.batch import Batch, default_loss_positions
from swarm.plan import MicrobatchKey, Plan, Slot

LENGTH, VOCABULARY, HIDDEN = 9, 300, 16
FORM = BatchFormat(LENGTH, VOCABULARY)
PLAN = Plan(
    step=2,
    attempt=0,
    group="",
    rows_per_microbatch=2,
    slots=(Slot(number=0, samples=(11, 12, 13)),),
    prior_versions=(),
    prior_hashes=(),
)


def key(microbatch: int = 0, slot: int = 0) -> MicrobatchKey:
    return MicrobatchKey(step=2, plan=PLAN.digest(), slot=slot, microbatch=microbatch)


def batch(rows: int, seed: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(rows, length, generator=generator) < 0.3
    starts[:, 0] = True
    losses = default_loss_positions(starts) & (torch.rand(rows, length, generator=generator) < 0.8)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    return Batch(ids, starts, losses, torch.arange(rows) + 100)


def joined(buffers: list[memoryview]) -> memoryview:
    return memoryview(bytearray(b"".join(buffers)))


def codec(config: CodecConfig) -> BoundaryCodec:
    return build_codec(
        config,
        hidden_size=HIDDEN,
        boundary=0,
        run_seed=1,
        prior=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@given(
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.integers(2, 40),
    st.sampled_from([2, 300, 65_536, 65_537, 200_000]),
)
@settings(deadline=None)
def test_batch_survives_the_wire_in_exactly_its_announced_bytes(
    rows: int, seed: int, length: int, vocabulary: int
) -> None:
    form, sent = BatchFormat(length, vocabulary), batch(rows, seed, length, vocabulary)
    payload = joined(form.pack(sent))
    assert payload.nbytes == form.nbytes(rows)
    received = form.unpack(payload, tuple(range(100, 100 + rows)))
    for name in ("token_ids", "document_starts", "loss_positions", "sample_ids"):
        assert torch.equal(getattr(received, name), getattr(sent, name)), name


def test_ids_take_two_bytes_where_the_vocabulary_allows_it() -> None:
    assert BatchFormat(1024, 65_536).nbytes(1) == 2048 + 128 + 128
    assert BatchFormat(1024, 65_537).nbytes(1) == 4096 + 128 + 128


@given(st.binary(min_size=FORM.nbytes(2), max_size=FORM.nbytes(2)))
@settings(deadline=None)
def test_any_bytes_of_the_right_size_are_a_sound_batch_or_refused(data: bytes) -> None:
    try:
        received = FORM.unpack(memoryview(bytearray(data)), (1, 2))
    except FrameError:
        return
    assert int(received.token_ids.max()) < VOCABULARY
    assert not bool((received.loss_positions & ~default_loss_positions(received.document_starts)).any())


@pytest.mark.parametrize("vocabulary", [300, 70_000])
def test_token_outside_the_vocabulary_is_refused(vocabulary: int) -> None:
    form, sent = BatchFormat(LENGTH, vocabulary), batch(1, 0, vocabulary=vocabulary)
    for bad in (vocabulary, -1):
        ids = sent.token_ids.clone()
        ids[0, 3] = bad
        payload = joined(form.pack(Batch(ids, sent.document_starts, sent.loss_positions, sent.sample_ids)))
        with pytest.raises(FrameError, match="vocabulary"):
            form.unpack(payload, (1,))


def test_row_without_a_start_and_loss_across_documents_are_refused() -> None:
    sent = batch(1, 0)
    size = FORM.nbytes(1) - 32
    payload = joined(FORM.pack(sent))
    payload[size] &= 0xFE
    with pytest.raises(FrameError, match="document start"):
        FORM.unpack(payload, (1,))
    payload = joined(FORM.pack(sent))
    payload[size + 16 + 1] |= 1  # the last column has no successor
    with pytest.raises(FrameError, match="successor"):
        FORM.unpack(payload, (1,))


@pytest.mark.parametrize("config", [DenseConfig(), DenseConfig(values="fp32"), MaskConfig(mask_ratio=75)])
def test_forward_comes_back_as_batch_and_codec_payload(config: CodecConfig) -> None:
    boundary, sent = codec(config), batch(2, 3)
    sent = Batch(sent.token_ids, sent.document_starts, sent.loss_positions, torch.tensor([11, 12]))
    hidden = torch.randn(2, LENGTH, HIDDEN)
    coded = boundary.encode(hidden, CodecKey.of(sent, 2))
    payload = joined(FORM.pack(sent) + pack_tensors(coded.values()))
    work, received = unpack_forward(payload, key(), PLAN, FORM, boundary)
    assert work.key == key() and torch.equal(work.batch.token_ids, sent.token_ids)
    assert list(received) == list(coded)
    decoded = boundary.decode(received, work.codec_key)
    assert torch.equal(decoded, boundary.decode(coded, CodecKey.of(sent, 2)))
    for cut in (
        payload[:-16],
        payload[: FORM.nbytes(2) - 1],
        payload[:0],
        joined([payload, memoryview(bytes(16))]),
    ):
        with pytest.raises(FrameError, match="size"):
            unpack_forward(cut, key(), PLAN, FORM, boundary)


def test_rest_microbatch_has_fewer_rows() -> None:
    assert samples_of(key(0), PLAN) == (11, 12) and samples_of(key(1), PLAN) == (13,)
    boundary, sent = codec(DenseConfig()), batch(1, 4)
    coded = boundary.encode(torch.zeros(1, LENGTH, HIDDEN), CodecKey.of(sent, 2))
    payload = joined(FORM.pack(sent) + pack_tensors(coded.values()))
    assert unpack_forward(payload, key(1), PLAN, FORM, boundary)[0].batch.rows == 1
    with pytest.raises(FrameError):
        unpack_forward(payload, key(0), PLAN, FORM, boundary)


def test_microbatch_that_the_plan_does_not_have_is_refused() -> None:
    for missing in (key(2), key(0, slot=1)):
        with pytest.raises(FrameError, match="no microbatch"):
            samples_of(missing, PLAN)


def test_codec_payload_of_another_layout_is_refused() -> None:
    boundary, sent = codec(DenseConfig()), batch(2, 5)
    layout = boundary.gradient_layout(CodecKey.of(sent, 2))
    size = sum(-(-spec.nbytes // 16) * 16 for spec in layout.values())
    assert list(unpack_layout(memoryview(bytearray(size)), layout)) == list(layout)
    with pytest.raises(FrameError, match="size"):
        unpack_layout(memoryview(bytearray(size + 16)), layout)
