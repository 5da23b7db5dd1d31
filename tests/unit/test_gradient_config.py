"""Which compressors there are, what they send, and which optimizers they go with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from swarm.gradient.compressor import Compressor, round_bytes
from swarm.gradient.config import (
    CODEC_NAMES,
    COMPRESSOR_NAMES,
    COMPRESSORS,
    check_combination,
    compressor_config,
)
from swarm.gradient.powersgd import PowerSGDCompressor
from swarm.gradient.registry import build_compressor
from swarm.model.trainable import TrainableSet
from swarm.optim import OptimizerConfig

MOST = 131_072
HIDDEN, LAYERS, KEYS, INNER, VOCABULARY = 576, 30, 192, 1536, 49_152


def smollm2() -> TrainableSet:
    """Shapes of SmolLM2-135M, tied embedding included."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.q": (HIDDEN, HIDDEN),
            f"{layer}.k": (KEYS, HIDDEN),
            f"{layer}.v": (KEYS, HIDDEN),
            f"{layer}.o": (HIDDEN, HIDDEN),
            f"{layer}.gate": (INNER, HIDDEN),
            f"{layer}.up": (INNER, HIDDEN),
            f"{layer}.down": (HIDDEN, INNER),
            f"{layer}.norm1": (HIDDEN,),
            f"{layer}.norm2": (HIDDEN,),
        }
    shapes["norm"] = (HIDDEN,)
    # Only shapes are read: no memory is taken.
    return TrainableSet.of({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


LAYOUT = smollm2()


def built(name: str, **fields: Any) -> Compressor:
    return build_compressor(compressor_config(name, **fields), LAYOUT, 0)


def sent(compressor: Compressor, members: int) -> int:
    return round_bytes(compressor.phases(10**6), members, MOST)


@pytest.mark.parametrize(
    ("name", "fields", "than_bf16"),
    [
        ("fp16", {}, 0.999),
        ("int8", {}, 1.9),
        ("fp8", {}, 1.9),
        ("e3m0", {}, 3.8),
        ("sign", {}, 15.0),
        ("topk", {"ratio": 0.005}, 99.0),
        ("topk", {"ratio": 0.0025}, 199.0),
        ("dgc", {"ratio": 0.001}, 480.0),
        ("randomk", {"ratio": 0.01}, 94.0),
        ("scape", {"ratio": 0.1}, 9.9),
        ("powersgd", {"rank": 4}, 64.0),
        ("powersgd", {"rank": 8}, 32.0),
        ("powersgd", {"ratio": 32.0}, 32.0),
    ],
)
def test_bytes_of_a_round_against_dense_ones(name: str, fields: dict[str, Any], than_bf16: float) -> None:
    compressor = built(name, **fields)
    for members in (2, 4):
        ratios = [
            sent(built(dense, error_feedback=False), members) / sent(compressor, members)
            for dense in ("bf16", "fp32")
        ]
        print(f"{name} {fields} of {members}: {ratios[0]:.2f}x of bf16, {ratios[1]:.2f}x of fp32")
        assert ratios[0] >= than_bf16 and ratios[1] >= 2 * than_bf16


@pytest.mark.parametrize(("rank", "least"), [(1, 320.0), (4, 80.0), (8, 40.0)])
def test_power_sgd_on_its_matrices(rank: int, least: float) -> None:
    compressor = built("powersgd", rank=rank)
    assert isinstance(compressor, PowerSGDCompressor)
    layout = compressor.layout
    assert len(layout.matrices) == 1 + 7 * LAYERS and layout.rest_elements == 61 * HIDDEN
    whole = sum(matrix.rows * matrix.columns for matrix in layout.matrices)
    ratio = whole / (layout.left_elements + layout.right_elements)
    print(f"PowerSGD rank {rank}: {ratio:.1f}x of bf16 on its matrices, as fp16")
    assert ratio >= least
    smallest = min(m.rows * m.columns / (rank * (m.rows + m.columns)) for m in layout.matrices)
    if rank == 4:
        assert smallest >= 32.0


def test_bytes_follow_from_the_configuration_alone() -> None:
    for name in (*CODEC_NAMES, *COMPRESSOR_NAMES):
        one, other = built(name).phases(50), built(name).phases(50)
        assert [p.elements for p in one] == [p.elements for p in other]
        assert round_bytes(one, 3, MOST) == round_bytes(other, 3, MOST)


def test_butterfly_with_a_second_choice_sends_less_than_everybody_to_everybody() -> None:
    entries = sent(built("topk", ratio=0.005), 2)
    for members in (2, 4, 8):
        ratio = sent(built("topk", ratio=0.005), members) / entries
        assert ratio == pytest.approx(2 * (members - 1) / members, rel=0.01)


# -- configuration -------------------------------------------------------------------------------------


def test_short_names_are_codecs_and_compressors() -> None:
    for name in COMPRESSOR_NAMES:
        assert compressor_config(name).name == name
    for name in CODEC_NAMES:
        config = compressor_config(name)
        assert config.name == "plain" and config.codec.name == name
        assert config.error_feedback == (name not in {"fp32", "fp16", "bf16"})
    config = compressor_config("int8", block=64, error_feedback=False)
    assert config.model_dump() == {
        "name": "plain",
        "codec": {"name": "int8", "block": 64},
        "error_feedback": False,
    }


@pytest.mark.parametrize("name", [*CODEC_NAMES, *COMPRESSOR_NAMES])
def test_configurations_survive_json(name: str) -> None:
    config = compressor_config(name)
    assert COMPRESSORS.validate_json(COMPRESSORS.dump_json(config)) == config
    with pytest.raises(ValidationError):
        config.name = "other"  # type: ignore[misc, assignment]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no compressor 'gzip'.*'int8'.*'powersgd'"):
        compressor_config("gzip")
    with pytest.raises(ValidationError, match=r"'plain'.*'dgc'.*'randomk'.*'powersgd'.*'scape'"):
        COMPRESSORS.validate_python({"name": "gzip"})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("int8", {"block": 8}),
        ("int8", {"ratio": 0.1}),
        ("topk", {"ratio": 0.0}),
        ("topk", {"ratio": 1.5}),
        ("plain", {"codec": {"name": "int3"}}),
        ("dgc", {"ratio": 0.5}),
        ("dgc", {"momentum": 1.0}),
        ("dgc", {"local_clip": 0.0}),
        ("randomk", {"ratio": -0.1}),
        ("randomk", {"values": "bf16"}),
        ("powersgd", {"rank": 0}),
        ("powersgd", {"rank": 4, "ratio": 20.0}),
        ("powersgd", {"min_compression": 0.5}),
        ("scape", {"exploration": 1.1}),
        ("scape", {"beta": 1.0}),
        ("scape", {"dense_steps": -1}),
        ("scape", {"bits": 3}),
    ],
)
def test_settings_out_of_range_are_refused(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        compressor_config(name, **fields)


@pytest.mark.parametrize(
    ("compressor", "optimizer", "reason"),
    [
        ("dgc", {"name": "adamw"}, "choose sgd"),
        ("dgc", {"name": "adams", "skip_zeros": True}, "choose sgd"),
        ("dgc", {"name": "sgd", "momentum": 0.9}, "count it twice"),
        ("scape", {"name": "adamw"}, "first moment"),
        ("scape", {"name": "sgd"}, "first moment"),
        ("scape", {"name": "adams"}, "set skip_zeros"),
        ("topk", {"name": "adams"}, "set skip_zeros"),
        ("randomk", {"name": "adams"}, "set skip_zeros"),
    ],
)
def test_combinations_without_sense_are_refused_with_the_reason(
    compressor: str, optimizer: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_combination(compressor_config(compressor), OptimizerConfig(**optimizer))


def test_other_combinations_are_taken() -> None:
    for name in (*CODEC_NAMES, "randomk", "powersgd"):
        check_combination(compressor_config(name), OptimizerConfig(name="adamw"))
        check_combination(compressor_config(name), OptimizerConfig(name="sgd", momentum=0.9))
    for name in ("int8", "powersgd"):
        check_combination(compressor_config(name), OptimizerConfig(name="adams"))
    check_combination(compressor_config("dgc"), OptimizerConfig(name="sgd"))
    for name in ("topk", "scape"):
        check_combination(compressor_config(name), OptimizerConfig(name="adams", skip_zeros=True))
