"""`init --explain`: what a run moves, by the codecs' and compressors' own sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.cli import main
from peers.commands.explain import REPLICAS, averaging_bytes, stage_bytes
from peers.commands.inspect import boundary_bytes
from swarm.manifest import RunManifest
from tests.kit.tiny import make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    make_run(
        folder,
        {
            "stages": 3,
            "replicas": 2,
            "steps": 8,
            "codec": "mask",
            "mask_ratio": 90.0,
            "averaging": "int8",
            "outer": "diloco",
            "outer_every": 4,
        },
    )
    return folder / "run"


def test_stages_send_what_their_codecs_and_compressors_say(run_dir: Path) -> None:
    manifest = RunManifest.load(run_dir / "manifest.yaml")
    rows = stage_bytes(manifest, run_dir / "artifacts")
    cost = boundary_bytes(manifest, run_dir / "artifacts")
    assert cost is not None and len(rows) == 3
    tokens = manifest.samples_per_step * manifest.data.sequence_length / REPLICAS
    assert [row.forward for row in rows] == [tokens * cost.forward] * 2 + [0]
    assert [row.backward for row in rows] == [0] + [tokens * cost.backward] * 2
    for row in rows:
        # Two replicas send a coded vector each in all, half of it as parts, once in four steps.
        assert row.trained * 1.0 <= row.most <= row.trained * 1.1 + 64
        assert row.averages == pytest.approx(row.most / 4, rel=0.01)
        assert averaging_bytes(manifest, row.stage) == (row.trained, row.averages, row.most)
        assert row.total == row.forward + row.backward + row.averages


def test_an_existing_run_is_explained_and_left_alone(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    arguments = ["init", str(run_dir), "--explain", "--link-mbps", "50", "--stage-us-per-token", "300"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "at 50 Mbit/s" in text and "share of the line" in text and "%" in text
    assert "int8, diloco, in the mean over 4 steps" in text
    assert main(arguments[:3]) == 0 and "--stage-us-per-token" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_options_that_a_run_has_fixed_are_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(run_dir), "--explain", "--averaging", "sign"]) == 2
    assert "--averaging is fixed once a run exists" in capsys.readouterr().err
