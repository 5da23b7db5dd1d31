"""Prior files: what comes back, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from swarm.activation.config import BasisConfig, DenseConfig, MaskConfig
from swarm.activation.fit import fit_basis_prior, fit_mean_prior
from swarm.activation.registry import build_codec
from swarm.anchor.boundary_prior import (
    BoundaryPrior,
    boundary_specs,
    decode_boundary_prior,
    encode_boundary_prior,
    load_boundary_prior,
    save_boundary_prior,
)
from swarm.anchor.config import SpectralConfig
from swarm.anchor.factor import Factors, exact_factors
from swarm.anchor.prior import (
    SpectralPrior,
    decode_spectral_prior,
    encode_spectral_prior,
    load_spectral_prior,
    prior_specs,
    save_spectral_prior,
)
from swarm.anchor.prior_file import (
    SEAL_BYTES,
    ArraySpec,
    PriorFileError,
    PriorInfo,
    decode_prior,
    encode_prior,
    prior_bytes_limit,
    write_atomically,
)
from swarm.anchor.registry import build_corrector

SHAPES = {"model.layers.3.self_attn.k_proj.weight": (6, 9), "model.layers.3.mlp.up_proj.weight": (12, 5)}
KEY, UP = SHAPES
RANK = 4
HIDDEN = 16


def spectral_prior(names: tuple[str, ...] = (KEY, UP)) -> SpectralPrior:
    generator = torch.Generator().manual_seed(1)
    factors = {
        name: exact_factors(torch.randn(SHAPES[name], generator=generator), RANK).factors for name in names
    }
    return SpectralPrior(stage=2, version=7, step=140, factors=factors)


def boundary_prior() -> BoundaryPrior:
    generator = torch.Generator().manual_seed(1)
    samples = (torch.randn(400, HIDDEN, generator=generator) for _ in range(2))
    arrays = fit_basis_prior(*samples, torch.arange(400) % 40, BasisConfig(mask_ratio=50))
    return BoundaryPrior(boundary=1, version=3, step=20, arrays=arrays)


def assert_equal(first: Factors, second: Factors) -> None:
    for name in ("left", "values", "right"):
        one, two = getattr(first, name), getattr(second, name)
        assert one.dtype == two.dtype
        assert torch.equal(one, two)


@pytest.mark.parametrize("basis", ["bf16", "fp32"])
def test_spectral_prior_comes_back_bit_for_bit(basis: Any, tmp_path: Path) -> None:
    prior = spectral_prior()
    data = encode_spectral_prior(prior, basis)
    assert data == encode_spectral_prior(prior, basis)
    found = decode_spectral_prior(data, SHAPES, RANK)
    assert (found.stage, found.version, found.step) == (2, 7, 140)
    assert list(found.factors) == [KEY, UP]
    dtype = torch.bfloat16 if basis == "bf16" else torch.float32
    for name, factors in prior.factors.items():
        assert_equal(
            found.factors[name], Factors(factors.left.to(dtype), factors.values, factors.right.to(dtype))
        )
    assert encode_spectral_prior(found, basis) == data
    path = tmp_path / "prior.safetensors"
    save_spectral_prior(prior, path, basis)
    assert path.read_bytes() == data
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert_equal(load_spectral_prior(path, SHAPES, RANK).factors[UP], found.factors[UP])


def test_loaded_prior_corrects_as_the_one_that_was_saved() -> None:
    prior = spectral_prior()
    found = decode_spectral_prior(encode_spectral_prior(prior, "fp32"), SHAPES, RANK)
    gradients = [{name: torch.ones(shape) for name, shape in SHAPES.items()} for _ in range(2)]
    for each, corrected in zip((prior, found), gradients, strict=True):
        report = build_corrector(SpectralConfig(), prior=each, shapes=SHAPES)(corrected, 140)
        assert report.corrected == 2
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in SHAPES)


def test_boundary_priors_travel_in_the_same_file(tmp_path: Path) -> None:
    prior, codec = boundary_prior(), BasisConfig(mask_ratio=50)
    path = tmp_path / "prior.safetensors"
    save_boundary_prior(prior, path)
    found = load_boundary_prior(path, codec, HIDDEN)
    assert (found.boundary, found.version, found.step) == (1, 3, 20)
    assert set(found.arrays) == set(prior.arrays)
    for name, array in prior.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert torch.equal(found.arrays[name], array)
    assert encode_boundary_prior(found) == path.read_bytes()
    build_codec(
        codec,
        hidden_size=HIDDEN,
        boundary=1,
        run_seed=0,
        prior=found.arrays,
        device="cpu",
        dtype=torch.float32,
    )
    mean = fit_mean_prior(torch.randn(50, HIDDEN), torch.arange(50))
    data = encode_boundary_prior(BoundaryPrior(0, 0, 0, mean))
    masked = decode_boundary_prior(data, MaskConfig(fill="mean"), HIDDEN)
    assert torch.equal(masked.arrays["mean"], mean["mean"])
    assert boundary_specs(DenseConfig(), HIDDEN) == boundary_specs(MaskConfig(), HIDDEN) == {}


def test_file_is_an_ordinary_safetensors_file_that_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prior.safetensors"
    save_spectral_prior(spectral_prior(), path)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["prior"]) == {
            "format": 1,
            "kind": "corrector",
            "part": 2,
            "version": 7,
            "step": 140,
        }
        assert set(file.keys()) == set(prior_specs(SHAPES, RANK))


def test_matrices_may_be_absent_but_not_in_part() -> None:
    found = decode_spectral_prior(encode_spectral_prior(spectral_prior((UP,))), SHAPES, RANK)
    assert list(found.factors) == [UP]
    arrays = {f"{UP}/left": torch.zeros(12, 4), f"{UP}/right": torch.zeros(5, 4)}
    data = encode_prior(PriorInfo(kind="corrector", part=0, version=0, step=0), arrays)
    with pytest.raises(PriorFileError, match=r"up_proj.*lacks \['values'\]"):
        decode_spectral_prior(data, SHAPES, RANK)


def with_arrays(changes: dict[str, Tensor | None]) -> bytes:
    arrays: dict[str, Tensor] = {}
    for name, factors in spectral_prior().factors.items():
        arrays[f"{name}/left"] = factors.left
        arrays[f"{name}/values"] = factors.values
        arrays[f"{name}/right"] = factors.right
    for name, array in changes.items():
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = array
    return encode_prior(PriorInfo(kind="corrector", part=2, version=7, step=140), arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{UP}/left": torch.zeros(5, 4)},
            r"up_proj.weight/left' is float32 \[5, 4\] where bfloat16\|float32 \[12, 4\] was expected",
        ),
        ({f"{UP}/left": torch.zeros(12, 3)}, r"float32 \[12, 3\] where"),
        ({f"{UP}/left": torch.zeros(48)}, r"float32 \[48\] where"),
        ({f"{UP}/values": torch.zeros(4).bfloat16()}, r"bfloat16 \[4\] where float32 \[4\] was expected"),
        ({f"{UP}/values": torch.zeros(4, dtype=torch.int32)}, r"int32 \[4\] where float32"),
        ({f"{UP}/values": torch.zeros(0)}, r"float32 \[0\] where float32 \[4\]"),
        ({"lm_head.weight/left": torch.zeros(2, 2)}, r"unexpected ones \['lm_head.weight/left'\]"),
    ],
)
def test_wrong_arrays_are_refused_with_expected_and_actual(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(PriorFileError, match=message):
        decode_spectral_prior(with_arrays(changes), SHAPES, RANK)


def test_prior_of_another_rank_kind_or_codec_is_refused() -> None:
    data = encode_spectral_prior(spectral_prior())
    with pytest.raises(PriorFileError, match=r"bfloat16 \[6, 4\] where bfloat16\|float32 \[6, 3\]"):
        decode_spectral_prior(data, SHAPES, 3)
    boundary = encode_boundary_prior(boundary_prior())
    specs = prior_specs(SHAPES, RANK) | boundary_specs(BasisConfig(), HIDDEN)
    with pytest.raises(PriorFileError, match="a prior of kind 'boundary' where 'corrector' was expected"):
        decode_prior(boundary, specs, kind="corrector")
    with pytest.raises(PriorFileError, match="unexpected ones"):
        decode_boundary_prior(boundary, MaskConfig(fill="mean"), HIDDEN)
    with pytest.raises(PriorFileError, match=r"missing arrays \['predict_in"):
        decode_boundary_prior(boundary, BasisConfig(prediction="token"), HIDDEN)
    with pytest.raises(PriorFileError, match=r"'widths' is int32 \[16, 9\] where int32 \[8, 9\]"):
        decode_boundary_prior(boundary, BasisConfig(token_classes=8), HIDDEN)
    with pytest.raises(PriorFileError, match=r"'mean' is float32 \[16\] where float32 \[17\]"):
        decode_boundary_prior(boundary, BasisConfig(), HIDDEN + 1)
    with pytest.raises(PriorFileError, match=r"missing arrays \['encode'"):
        decode_boundary_prior(
            encode_boundary_prior(
                BoundaryPrior(1, 3, 20, {n: a for n, a in boundary_prior().arrays.items() if n != "encode"})
            ),
            BasisConfig(),
            HIDDEN,
        )


def test_every_truncation_and_every_addition_is_refused() -> None:
    data = encode_spectral_prior(spectral_prior())
    for length in range(len(data)):
        with pytest.raises(PriorFileError):
            decode_spectral_prior(data[:length], SHAPES, RANK)
    with pytest.raises(PriorFileError):
        decode_spectral_prior(data + b"\0", SHAPES, RANK)


DATA = encode_spectral_prior(spectral_prior())
HEADER_END = 8 + struct.unpack("<Q", DATA[:8])[0]


def test_a_flipped_byte_of_the_header_is_refused_or_leaves_the_structure() -> None:
    """Numbers of the metadata may change into other numbers; which ones are right is for the hash to say."""
    refused = 0
    for index in range(HEADER_END):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            data = bytearray(DATA)
            data[index] ^= flip
            try:
                found = decode_spectral_prior(bytes(data), SHAPES, RANK)
            except PriorFileError:
                refused += 1
                continue
            assert list(found.factors) == [KEY, UP]
            for name, shape in SHAPES.items():
                assert found.factors[name].shape == shape
                assert found.factors[name].rank == RANK
    assert refused > 0.95 * 4 * HEADER_END


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.integers(0, HEADER_END), st.integers(0, 200))
def test_garbage_is_refused_and_nothing_else_happens(garbage: bytes, start: int, removed: int) -> None:
    for data in (
        garbage,
        struct.pack("<Q", len(garbage)) + garbage,
        DATA[:start] + garbage + DATA[start + removed :],
    ):
        try:
            decode_spectral_prior(data, SHAPES, RANK)
        except PriorFileError:
            continue
        assert list(decode_spectral_prior(data, SHAPES, RANK).factors) == [KEY, UP]


def header_file(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


GOOD_INFO = {"prior": '{"format":1,"kind":"corrector","part":0,"step":0,"version":0}'}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "list where an object"),
        (b"[" * 900, "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        ({}, "metadata with one string"),
        ({"__metadata__": {}}, "metadata with one string"),
        ({"__metadata__": {"prior": 3}}, "metadata with one string"),
        ({"__metadata__": {**GOOD_INFO, "more": "x"}}, "metadata with one string"),
        ({"__metadata__": {"prior": "{}"}}, "metadata"),
        ({"__metadata__": {"prior": GOOD_INFO["prior"].replace("1", "2")}}, "metadata format"),
        ({"__metadata__": {"prior": GOOD_INFO["prior"].replace('"part":0', '"part":-1')}}, "metadata part"),
        ({"__metadata__": {"prior": GOOD_INFO["prior"].replace('"part":0', '"part":"0"')}}, "metadata part"),
        ({"__metadata__": GOOD_INFO, "a": 3}, "its dtype must be one of"),
        ({"__metadata__": GOOD_INFO, "a": {"dtype": "F8_E8M0", "shape": [1]}}, "its dtype must be one of"),
        ({"__metadata__": GOOD_INFO, "a": {"dtype": "F32", "shape": [1.5]}}, "integers were expected"),
        ({"__metadata__": GOOD_INFO, "a": {"dtype": "F32", "shape": [True]}}, "integers were expected"),
    ],
)
def test_headers_that_are_none_are_refused_with_the_reason(header: Any, message: str) -> None:
    with pytest.raises(PriorFileError, match=message):
        decode_prior(header_file(header), prior_specs(SHAPES, RANK), kind="corrector", is_complete=False)


def test_offsets_that_lie_are_refused() -> None:
    name = f"{UP}/values"
    for offsets in ([0, 8], [0, 2**60], [-4, 12], [16, 0], None, "x"):
        header = {
            "__metadata__": GOOD_INFO,
            name: {"dtype": "F32", "shape": [4], "data_offsets": offsets},
        }
        with pytest.raises(PriorFileError, match="no safetensors file"):
            decode_prior(
                header_file(header, bytes(16)), prior_specs(SHAPES, RANK), kind="corrector", is_complete=False
            )


def test_size_is_bounded_before_anything_is_parsed(tmp_path: Path) -> None:
    specs = prior_specs(SHAPES, RANK)
    limit = prior_bytes_limit(specs)
    assert len(encode_spectral_prior(spectral_prior(), "fp32")) <= limit
    assert limit < sum(spec.largest_nbytes for spec in specs.values()) + 8192 + SEAL_BYTES
    huge = bytes(limit + 1)
    with pytest.raises(PriorFileError, match=f"{limit + 1} bytes where at most {limit}"):
        decode_prior(huge, specs, kind="corrector")
    with pytest.raises(PriorFileError, match="a header of 18446744073709551615 bytes"):
        decode_prior(b"\xff" * 8 + DATA[8:], specs, kind="corrector")
    path = tmp_path / "huge.safetensors"
    path.write_bytes(huge)
    with pytest.raises(PriorFileError, match=f"more than the {limit} bytes"):
        load_spectral_prior(path, SHAPES, RANK)
    with pytest.raises(FileNotFoundError):
        load_spectral_prior(tmp_path / "none", SHAPES, RANK)


def test_files_of_checkpoints_and_plain_tensors_are_no_priors() -> None:
    for metadata in (None, {"checkpoint": "{}"}):
        with pytest.raises(PriorFileError, match="metadata with one string"):
            decode_prior(
                save({"a": torch.zeros(2)}, metadata=metadata),
                {"a": ArraySpec((torch.float32,), (2,))},
                kind="boundary",
            )


def test_only_what_a_prior_can_hold_is_written() -> None:
    info = PriorInfo(kind="boundary", part=0, version=0, step=0)
    with pytest.raises(ValueError, match=r"'a' is torch\.float16"):
        encode_prior(info, {"a": torch.zeros(2, dtype=torch.float16)})
    with pytest.raises(ValueError, match="__metadata__"):
        encode_prior(info, {"__metadata__": torch.zeros(2)})
    shared = torch.arange(6.0).view(2, 3)
    data = encode_prior(info, {"a": shared, "b": shared.T})
    specs = {"a": ArraySpec((torch.float32,), (2, 3)), "b": ArraySpec((torch.float32,), ((1, 3), (2, 9)))}
    _, arrays = decode_prior(data, specs, kind="boundary")
    assert torch.equal(arrays["a"], shared)
    assert torch.equal(arrays["b"], shared.T)


def test_a_file_that_cannot_take_its_name_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    write_atomically(tmp_path / "free", b"x")
    assert (tmp_path / "free").read_bytes() == b"x"
