from __future__ import annotations

from pathlib import Path

import pytest

from peers.cli import main
from peers.commands import join, seed
from peers.commands.join import JoinOptions, parse_stage
from peers.config import UserError
from peers.local import decode_config, encode_config


def options(**more: object) -> JoinOptions:
    values: dict[str, object] = {"stage": "1", "initial_peers": ("/ip4/1.2.3.4/tcp/1/p2p/Qm",), **more}
    return JoinOptions(**values)  # type: ignore[arg-type]


def test_join_flags_become_the_peers_settings() -> None:
    config = join.peer_config(options(compute="calibrated:12.5", threads=2, run="a" * 40))
    assert (config.stage, config.threads, config.run) == (1, 2, "a" * 40)
    assert config.compute.microseconds_per_token == 12.5


def test_stage_may_be_chosen_automatically() -> None:
    assert parse_stage("auto") == "auto"


@pytest.mark.parametrize("text", ["automatic", "0-3", "-1", "x", "1.5", ""])
def test_stage_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="stage"):
        parse_stage(text)


def test_anchor_holds_all_stages_one_or_several() -> None:
    spans = [join.peer_config(options(anchor=True, stage=text)).anchor_span for text in ("all", "2", "0-3")]
    assert spans == [None, (2, 2), (0, 3)]
    config = join.peer_config(options(anchor=True, stage="0-3"))
    assert config.stage is None and decode_config(encode_config(config)) == config


@pytest.mark.parametrize("text", ["auto", "3-1", "0-", "-1", "0-1-2", "x", ""])
def test_anchor_of_no_stages_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--anchor --stage"):
        join.peer_config(options(anchor=True, stage=text))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"initial_peers": ()}, "--initial-peers is missing"),
        ({"threads": 0}, "--threads 0"),
        ({"metrics_port": 70_000}, "--metrics-port 70000"),
        ({"run": "xyz"}, "--run 'xyz'"),
        ({"compute": "fast"}, "--compute 'fast'"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints"),
        ({"listen": ()}, "--listen is empty"),
        ({"serve_after_s": -1.0}, "--serve-after-s"),
        ({"max_upload_mbps": 0.0}, "--max-upload-mbps 0: at least 0.5"),
        ({"max_upload_mbps": float("nan")}, "--max-upload-mbps nan"),
        ({"max_download_mbps": 0.4}, "--max-download-mbps 0.4: at least 0.5"),
        ({"max_download_mbps": float("inf")}, "leave the option out for no cap"),
    ],
)
def test_bad_values_name_flag_and_value(more: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        join.peer_config(options(**more))


def test_caps_reach_the_peer_and_there_are_none_unless_asked_for(tmp_path: Path) -> None:
    config = join.peer_config(options(max_upload_mbps=4.5, max_download_mbps=0.5))
    assert (config.max_upload_mbps, config.max_download_mbps) == (4.5, 0.5)
    config = decode_config(encode_config(join.peer_config(options())))
    assert (config.max_upload_mbps, config.max_download_mbps) == (None, None)
    (tmp_path / "manifest.yaml").touch()
    assert seed.peer_config(seed.SeedOptions(run_dir=tmp_path, max_upload_mbps=20)).max_upload_mbps == 20


def test_seed_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed", str(tmp_path)]) == 2
    assert f"swarm-peer: error: {tmp_path} is no run" in capsys.readouterr().err


def test_seed_keeps_its_identity_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").touch()
    config = seed.peer_config(seed.SeedOptions(run_dir=tmp_path))
    assert (config.stage, config.identity) == (None, tmp_path / "seed.key")


def test_settings_survive_the_way_to_the_zygote(tmp_path: Path) -> None:
    config = join.peer_config(options(compute="calibrated:3", checkpoint_dir=tmp_path))
    assert decode_config(encode_config(config)) == config
