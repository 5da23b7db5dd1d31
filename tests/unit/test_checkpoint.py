"""Checkpoints are complete or absent, and a damaged one never costs the ones before it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from peers.checkpoint import CheckpointError, CheckpointStore, lineage_of, read_checkpoint

RUN = "ab" * 20
META = {"run_id": RUN, "stage": 1}


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(96, generator=generator)
    return {
        "model.norm.weight": flat[:32].view(4, 8),  # views of one vector, as the optimizer's masters are
        "lm_head.weight": flat[32:].view(8, 8).t(),  # not contiguous
        "half": torch.randn(5, generator=generator).bfloat16(),
        "step": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor([1, 2], dtype=torch.int64),
    }


def test_a_checkpoint_comes_back_equal_and_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    tensors = some_tensors()
    path = CheckpointStore(tmp_path).save(
        20, tensors, {**META, "tokens": 123, "note": 'a "sha256": "x" trap'}
    )
    loaded = CheckpointStore(tmp_path).load_newest(1, RUN)
    assert loaded is not None
    assert (loaded.version, loaded.info.stage, loaded.info.run_id) == (20, 1, RUN)
    assert loaded.meta == {"tokens": 123, "note": 'a "sha256": "x" trap'}
    for found in (loaded.tensors, load_file(path)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


def test_the_newest_few_of_each_stage_and_run_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in (5, 10, 20, 40):
        store.save(version, some_tensors(version), META)
        store.save(version, some_tensors(version), {"run_id": RUN, "stage": 2})
    store.save(3, some_tensors(), {"run_id": "cd" * 20, "stage": 1})
    assert store.versions(stage=1, run_id=RUN) == [20, 40]
    assert store.versions(stage=2) == [20, 40]
    assert store.versions(run_id="cd" * 20) == [3]
    assert store.versions() == [3, 20, 40]
    assert len(list(tmp_path.iterdir())) == 5


def test_an_older_version_saved_again_is_not_dropped_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(40, some_tensors(), META)
    assert store.save(20, some_tensors(), META).exists()


def test_only_the_stage_and_run_asked_for_are_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(5, some_tensors(), META)
    assert store.load_newest(0, RUN) is None
    assert store.load_newest(1, "ab" * 8 + "00" * 12) is None  # the same first 16 characters


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_or_change_is_noticed_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(5, some_tensors(5), META)
    newest = store.save(10, some_tensors(10), META)
    content = bytearray(newest.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1), label="place")
    if data.draw(st.booleans(), label="is_truncated"):
        newest.write_bytes(content[:place])
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        newest.write_bytes(content)
    caplog.clear()
    loaded = store.load_newest(1, RUN)
    assert loaded is not None
    assert loaded.version == 5
    assert store.corrupt == 1
    assert "damaged" in caplog.text
    assert store.versions() == [5]
    assert newest.with_name(newest.name + ".corrupt").exists()


def test_an_ordinary_safetensors_file_is_no_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="no checkpoint of a stage"):
        read_checkpoint(tmp_path / "a.safetensors")


def test_a_full_disk_keeps_what_was_there_and_leaves_no_rubbish(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(5, some_tensors(), META)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel then refuses, as a full disk does
    try:
        with pytest.raises(CheckpointError, match=r"version 10 .*choose another --checkpoint-dir.*1 earlier"):
            store.save(10, {"large": torch.zeros(100_000)}, META)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == [store.path(5, 1, RUN).name]
    assert store.load_newest(1, RUN) is not None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another --checkpoint-dir"):
        CheckpointStore(tmp_path / "file" / "folder")


def test_meta_without_run_or_stage_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_id"):
        CheckpointStore(tmp_path).save(1, {}, {"stage": 0})
    with pytest.raises(ValueError, match="make no file name"):
        CheckpointStore(tmp_path).save(1, {}, {"stage": 0, "run_id": "../../etc"})
    with pytest.raises(ValueError, match="complex64"):
        CheckpointStore(tmp_path).save(1, {"z": torch.zeros(1, dtype=torch.complex64)}, META)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_was_killed_leaves_nothing_but_a_file_that_is_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(5, some_tensors(), META)
    # Killed where it hurts most: everything written, not yet renamed.
    program = (
        "import os, sys, signal, torch; from pathlib import Path\n"
        "from peers import checkpoint\n"
        "checkpoint.fsync_folder = None\n"
        "Path.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"checkpoint.CheckpointStore(Path(sys.argv[1])).save(10, {{'a': torch.zeros(9)}}, {META!r})\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    rubbish = [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert len(rubbish) == 1
    os.utime(rubbish[0], (0, 0))
    again = CheckpointStore(tmp_path)
    assert not rubbish[0].exists()
    loaded = again.load_newest(1, RUN)
    assert loaded is not None
    assert loaded.version == 5


def test_the_hash_is_over_the_whole_file(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(5, {"a": torch.arange(4)}, META)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    info = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["checkpoint"])
    import hashlib

    blank = content.replace(info["sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(blank).hexdigest() == info["sha256"]


def test_a_fetch_that_nobody_went_on_with_is_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name, age_s in (("old", 2 * 86_400), ("new", 60)):
        path = tmp_path / f"{name}-stage-1-version-00000005.safetensors.partial"
        path.write_bytes(b"half of it")
        os.utime(path, (time.time() - age_s,) * 2)
    CheckpointStore(store.directory)
    assert [path.name[:3] for path in tmp_path.iterdir()] == ["new"]


def test_one_version_is_loaded_and_another_is_not_taken_for_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for version in (5, 10):
        store.save(version, some_tensors(version), {**META, "lineage": f"after-{version}"})
    loaded = store.load(1, RUN, 5)
    assert loaded is not None
    assert (loaded.version, loaded.lineage) == (5, "after-5")
    assert store.load(1, RUN, 7) is None
    assert store.load(0, RUN, 5) is None
    info = store.verify(1, RUN, 10)
    assert info is not None
    assert lineage_of(info) == "after-10"
    assert store.verify(1, RUN, 11) is None
    store.path(5, 1, RUN).write_bytes(store.path(10, 1, RUN).read_bytes())
    assert store.load(1, RUN, 5) is None  # whole, but another version
    store.path(10, 1, RUN).write_bytes(b"")
    assert store.verify(1, RUN, 10) is None
    assert store.corrupt == len(store.damaged) == 1


def test_beside_the_snapshots_one_other_version_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    kept = []
    for version in (2, 3, 4, 5, 6, 8, 9, 11):
        store.save(version, some_tensors(version), META, lambda version: version % 2 == 0)
        kept.append(store.versions())
    assert kept == [[2], [2, 3], [2, 3, 4], [2, 4, 5], [4, 5, 6], [6, 8], [6, 8, 9], [6, 8, 11]]
