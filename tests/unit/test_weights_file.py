"""The bf16 weights of a snapshot, as anchors fetch them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers.checkpoint import CheckpointStore
from peers.torch_compute import OPTIMIZER, WEIGHT
from peers.weights_file import BYTES_PER_WEIGHT, read_weights, write_weights

RUN, STAGE, VERSION = "r" * 40, 2, 20
SHAPES = {"model.a": (300, 40), "model.b": (7,), "model.c": (1, 1, 3)}


def checkpoint(folder: Path, seed: int = 0) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state = {WEIGHT + name: tensor for name, tensor in weights.items()}
    state |= {OPTIMIZER + name: torch.ones(sum(w.numel() for w in weights.values())) for name in ("m", "v")}
    meta = {"run_id": RUN, "stage": STAGE, "lineage": "l"}
    return CheckpointStore(folder).save(VERSION, state, meta), weights


def test_weights_are_the_checkpoints_rounded_and_a_sixth_of_its_bytes(tmp_path: Path) -> None:
    path, weights = checkpoint(tmp_path)
    target = tmp_path / "weights" / "file"
    write_weights(path, target)
    found = read_weights(target, RUN, STAGE, VERSION)
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], weights[name].to(torch.bfloat16)) for name in weights)
    numel = sum(tensor.numel() for tensor in weights.values())
    assert target.stat().st_size < BYTES_PER_WEIGHT * numel + 2048
    assert [entry.name for entry in target.parent.iterdir()] == ["file"]


def test_replicas_with_equal_weights_make_equal_files(tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        path, _ = checkpoint(tmp_path / name)
        write_weights(path, tmp_path / name / "file")
        files.append((tmp_path / name / "file").read_bytes())
    assert files[0] == files[1]


def test_nothing_is_made_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="do not match its hash"):
        write_weights(path, tmp_path / "weights" / "file")
    assert not list(tmp_path.glob("weights/*"))


@pytest.mark.parametrize("place", [0, 200, -1])
def test_weights_that_were_changed_on_the_way_are_refused(tmp_path: Path, place: int) -> None:
    path, _ = checkpoint(tmp_path)
    target = tmp_path / "file"
    write_weights(path, target)
    data = bytearray(target.read_bytes())
    data[place] ^= 1
    target.write_bytes(data)
    with pytest.raises(ValueError, match=r"hash|checkpoint|truncated"):
        read_weights(target, RUN, STAGE, VERSION)


def test_weights_of_something_else_and_whole_states_are_refused(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path)
    target = tmp_path / "file"
    write_weights(path, target)
    for run, stage, version in (("x" * 40, STAGE, VERSION), (RUN, 1, VERSION), (RUN, STAGE, 19)):
        with pytest.raises(ValueError, match="it holds run"):
            read_weights(target, run, stage, version)
    with pytest.raises(ValueError, match="is no weight in bf16"):
        read_weights(path, RUN, STAGE, VERSION)
