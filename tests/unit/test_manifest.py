from __future__ import annotations

import json
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.activation.config import MaskConfig
from swarm.data.index import ChunkInfo, DataIndex
from swarm.manifest import (
    ARTIFACT_CHUNK_BYTES,
    Artifact,
    ManifestError,
    ModelSection,
    RunManifest,
    create_owner_key,
    load_owner_key,
)
from swarm.optim import OptimizerConfig

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def manifest(**changes: Any) -> RunManifest:
    data = DataIndex(
        sequence_length=8,
        vocabulary_size=16,
        token_dtype="uint16",
        train=(ChunkInfo(name="train-00000.safetensors", sha256="0" * 64, nbytes=1, samples=1),),
        heldout=(),
        train_samples=1,
        heldout_samples=0,
        train_tokens=8,
        heldout_tokens=0,
        train_documents=1,
        heldout_documents=0,
    )
    values: dict[str, Any] = {
        "protocol": 1,
        "name": "ein Lauf, größer",
        "owner_public_key": "0" * 64,
        "seed": 7,
        "model": ModelSection(
            name="tiny", config={"hidden_size": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-05}, cuts=(2, 4)
        ),
        "data": data,
        "rows_per_microbatch": 4,
        "samples_per_step": 64,
        "total_steps": 100,
        "codec": MaskConfig(mask_ratio=95),
        "optimizer": OptimizerConfig(learning_rate=1e-5, eps=1e-12, beta2=0.95),
        "artifacts": (Artifact(name="stage-0.safetensors", nbytes=0, sha256="1e3" + "2" * 61, chunks=()),),
    }
    return RunManifest(**{**values, **changes}).signed(KEY)


def test_signed_manifest_verifies_and_names_its_run_by_the_owners_key() -> None:
    run = manifest()
    run.verify()
    run.verify(run.run_id)
    assert run.run_id == manifest(name="other").run_id != manifest().signed(OTHER).run_id


def test_manifest_of_another_owner_belongs_to_another_run() -> None:
    with pytest.raises(ManifestError, match="check --run"):
        manifest().signed(OTHER).verify(manifest().run_id)


def test_another_key_cannot_sign_for_the_run() -> None:
    forged = manifest().model_copy(update={"signature": manifest().signed(OTHER).signature})
    with pytest.raises(ManifestError, match="changed after signing"):
        forged.verify()


@pytest.mark.parametrize("signature", ["", "zz", "00" * 64, "ü"])
def test_missing_or_malformed_signature_is_refused(signature: str) -> None:
    with pytest.raises(ManifestError, match="not signed by its owner"):
        manifest().model_copy(update={"signature": signature}).verify()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for key, inner in enumerate(value) for leaf in leaves(inner, (*path, key))]
    return [path]


def test_changing_any_single_value_breaks_the_signature() -> None:
    whole = json.loads(manifest().to_bytes())
    for path in leaves(whole):
        changed = json.loads(manifest().to_bytes())
        place = changed
        for part in path[:-1]:
            place = place[part]
        old = place[path[-1]]
        match old:
            case bool():
                place[path[-1]] = not old
            case int() | float():
                place[path[-1]] = old + 1
            case str() if len(old) >= 40 and path[-1] != "name":
                place[path[-1]] = ("1" if old[0] != "1" else "2") + old[1:]
            case str():
                place[path[-1]] = old + "x"
            case _:
                place[path[-1]] = [1]
        with pytest.raises(ManifestError):
            RunManifest.from_bytes(json.dumps(changed).encode()).verify()


def test_wire_and_yaml_forms_keep_every_value_and_the_signature(tmp_path: Path) -> None:
    run = manifest()
    assert RunManifest.from_bytes(run.to_bytes()) == run
    path = tmp_path / "run.yaml"
    run.save(path)
    assert RunManifest.load(path) == run
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]
    assert "ein Lauf, größer" in path.read_text(encoding="utf-8")


@example(1.0, 0.0, {"": "\x85"})
@given(
    st.floats(1e-30, 1e30),
    st.floats(0, 1),
    st.dictionaries(
        st.text(max_size=6),
        st.floats(allow_nan=False, allow_infinity=False)
        | st.integers()
        | st.text(max_size=6)
        | st.booleans()
        | st.none(),
        max_size=4,
    ),
)
@settings(max_examples=60, deadline=None)
def test_floats_and_odd_strings_survive_yaml(rate: float, ratio: float, config: dict[str, Any]) -> None:
    run = manifest(
        model=ModelSection(name="tiny", config=config, cuts=()),
        optimizer=OptimizerConfig(learning_rate=rate, final_ratio=ratio),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.yaml"
        run.save(path)
        assert RunManifest.load(path) == run


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("total_steps",), 0, "total_steps"),
        (("optimizer", "learning_rate"), "fast", "optimizer.learning_rate"),
        (("optimizer", "lr"), 1.0, "optimizer.lr"),
        (("codec", "mask_ratio"), 101, "mask_ratio"),
        (("owner_public_key",), "short", "owner_public_key"),
        (("surprise",), 1, "surprise"),
        (("artifacts",), [{"name": "../x", "nbytes": 0, "sha256": "0" * 64, "chunks": []}], "artifacts.0"),
        (("artifacts",), [{"name": "a/../x", "nbytes": 0, "sha256": "0" * 64, "chunks": []}], "artifacts.0"),
        (("artifacts",), [{"name": "x", "nbytes": 5, "sha256": "0" * 64, "chunks": []}], "artifacts.0"),
    ],
)
def test_bad_field_is_named(path: tuple[str, ...], value: object, named: str) -> None:
    data = json.loads(manifest().to_bytes())
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ManifestError, match=f"manifest field .*{named}"):
        RunManifest.from_bytes(json.dumps(data).encode())


@given(st.binary(max_size=100))
def test_garbage_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        RunManifest.from_bytes(data)


@pytest.mark.parametrize("data", [b"{" * 5000, b'{"a":' * 5000, b"[" * 5000, b"- " * 3000])
def test_nesting_too_deep_for_python_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        RunManifest.from_bytes(data)


def test_few_bytes_of_yaml_aliases_cannot_stand_for_gigabytes() -> None:
    """Ten lines that each name the one before twice would be written out in full when the signature is checked."""
    lines = ["bomb0: &a0 [x, x]"] + [f"bomb{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 12)]
    data = json.loads(manifest().to_bytes())
    data["model"]["config"] = "CONFIG"
    text = yaml.safe_dump(data).replace("CONFIG", "{" + ", ".join(lines) + "}")
    with pytest.raises(ManifestError):
        RunManifest.from_bytes(text.encode())


def test_artifact_describes_a_file_by_its_chunks(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (ARTIFACT_CHUNK_BYTES + 1))
    artifact = Artifact.of(tmp_path / "file", "stage-0.safetensors")
    assert artifact.nbytes == ARTIFACT_CHUNK_BYTES + 1 and len(artifact.chunks) == 2
    assert manifest(artifacts=(artifact,)).artifact("stage-0.safetensors") == artifact
    with pytest.raises(KeyError, match="stage-9"):
        manifest().artifact("stage-9.safetensors")


def test_snapshots_are_kept_where_the_manifest_says_and_at_the_end() -> None:
    run = manifest(snapshot_every=20, early_snapshots=(5, 10), total_steps=50)
    assert [step + 1 for step in range(50) if run.keeps_snapshot(step)] == [5, 10, 20, 40, 50]


def test_owner_key_is_private_from_the_start_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "owner.pem"
    key = create_owner_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_owner_key(path).private_bytes_raw() == key.private_bytes_raw()
    with pytest.raises(FileExistsError):
        create_owner_key(path)


def test_file_without_an_owner_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no key")
    with pytest.raises(ManifestError, match=r"x\.pem holds no owner key"):
        load_owner_key(tmp_path / "x.pem")
