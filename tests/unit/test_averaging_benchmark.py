"""The averaging benchmark in its smallest form: a tiny model, a handful of steps, everything else as in the large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.averaging.__main__ import main
from benchmarks.averaging.report import BEGIN, END, write_report
from benchmarks.averaging.rows import ROWS, AveragingRow, dense_of
from benchmarks.averaging.simulate import Course, Replicas, simulate
from benchmarks.quality.journal import Journal
from benchmarks.quality.prepare import Prepared, prepare
from peers.limits import LIMITS
from swarm.gradient.compressor import round_bytes
from swarm.reference import ReferenceTrainer
from tests.kit.tiny import write_model, write_texts

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("averaging")
    texts = write_texts(path / "texts")
    write_model(path / "model", texts)
    return path


def tiny(folder: Path, name: str, **changes: Any) -> AveragingRow:
    row = next(each for each in ROWS if each.name == name)
    settings: dict[str, Any] = {
        "domain": str(folder / "texts"),
        "model": str(folder / "model"),
        "steps": STEPS,
        "replicas": 2,
        "rows_per_replica": 2,
        "max_tokens": 20_000,
        "sequence_length": 32,
        "eval_rows": 4,
        "eval_every": 2,
    }
    return row.config(**{**settings, **changes})


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Prepared:
    return prepare(tiny(folder, "fp32").data_config(), folder / "cache")


def ignore(*_: object) -> None:
    pass


def test_every_declared_row_is_a_configuration_and_has_a_dense_one_beside_it() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) == len({row.config().key for row in ROWS})
    for row in ROWS:
        row.config().averaging_config()
        assert dense_of(row).optimizer == row.optimizer


def test_exact_averages_are_plain_training(folder: Path, prepared: Prepared) -> None:
    config = tiny(folder, "fp32")
    course = simulate(config, prepared, ignore)
    trainer = ReferenceTrainer(
        prepared.fresh_model(),
        (),
        (),
        config.optimizer_config(),
        STEPS,
        freeze=frozenset({"embedding", "head"}),
    )
    data = config.data_config()
    for step in range(STEPS):
        trainer.step(prepared.step_batches(data, step), step)
    assert course.curve[STEPS] == pytest.approx(trainer.evaluate(prepared.heldout_batches(data)), abs=1e-4)
    assert sorted(course.curve) == [0, 2, 4] and course.curve[4] < course.curve[0]


@pytest.mark.parametrize("name", ["sign", "topk-0.5%", "powersgd-4", "scape-10%", "dgc-0.5%", "fp32-sgd"])
def test_compressed_rows_move_what_their_phases_say(folder: Path, prepared: Prepared, name: str) -> None:
    config = tiny(folder, name)
    course = simulate(config, prepared, ignore)
    compressor = Replicas(config, prepared).compressors[0]
    sent = [round_bytes(compressor.phases(step), 2, LIMITS.averaging_chunk_elements) for step in range(STEPS)]
    assert course.sent == {step + 1: sum(sent[: step + 1]) for step in range(STEPS)}
    assert all(torch.isfinite(torch.tensor(list(course.curve.values()))))


@pytest.mark.parametrize("name", ["local-sgd-10", "diloco-10-int8", "streaming-10"])
def test_replicas_with_local_steps_end_with_the_same_weights(
    folder: Path, prepared: Prepared, name: str
) -> None:
    every = {"every": 4, "fragments": 2} if "streaming" in name else {"every": 2}
    row = next(each for each in ROWS if each.name == name)
    averaging = {**row.averaging, "outer": {**row.averaging["outer"], **every}}
    config = tiny(folder, name).model_copy(update={"averaging": averaging})
    replicas = Replicas(config, prepared)
    course = Course()
    for step in range(STEPS):
        replicas.step(step, course)
        weights = [replicas._weights(trainer) for trainer in replicas._trainers]
        is_shared = step + 1 == STEPS or ("streaming" not in name and step % 2 == 1)
        assert torch.equal(weights[0], weights[1]) == is_shared
    assert torch.equal(weights[0], replicas._outers[0].globals)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("streaming-10-e3m0-overlap-2", {"every": 4, "fragments": 2}),
        ("sparta-10", {"every": 2, "fragments": 2}),
        ("gasloc-5", {"every": 2, "consensus": 2}),
        ("fp16-overlap", {}),
    ],
)
def test_averages_that_come_late_or_in_pairs_end_with_the_same_weights(
    folder: Path, prepared: Prepared, name: str, changes: dict[str, int]
) -> None:
    row = next(each for each in ROWS if each.name == name)
    averaging = {**row.averaging, "outer": {**row.averaging["outer"], **changes}}
    replicas = Replicas(tiny(folder, name).model_copy(update={"averaging": averaging}), prepared)
    course = Course()
    for step in range(STEPS):
        replicas.step(step, course)
    weights = [replicas._weights(trainer) for trainer in replicas._trainers]
    assert all(torch.equal(each, weights[0]) for each in weights) and not replicas._owed
    sent = [course.sent[step + 1] - course.sent.get(step, 0) for step in range(STEPS)]
    assert sent[-1] > 0
    if name == "fp16-overlap":  # the first commit settles nothing, the last both that are left
        assert [each > 0 for each in sent] == [False] + [True] * (STEPS - 3) + [True, True]


def test_rows_are_run_once_and_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *(
            "--only",
            "fp32",
            "sign",
            "--steps",
            "2",
            "--max-tokens",
            "20000",
            "--model",
            str(folder / "model"),
        ),
        *("--domain", str(folder / "texts"), "--journal", str(tmp_path / "journal.jsonl")),
        *("--data-cache", str(tmp_path / "cache")),
    ]
    assert main(arguments) == 0
    records = Journal(tmp_path / "journal.jsonl").records()
    assert sorted(record["row"] for record in records.values()) == ["fp32", "sign"]
    assert main(arguments) == 0 and "2 rows, 2 of them done" in capsys.readouterr().out
    assert (tmp_path / "journal.jsonl").read_text().count("\n") == 2
    page = tmp_path / "averaging.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert write_report(records, tmp_path) == 2
    text = page.read_text()
    assert "| sign | 1 bit" in text and "| 15." in text and "old" not in text and text.endswith("after\n")
    assert (tmp_path / "img" / "averaging-bytes.png").stat().st_size > 1000
    assert main(["--only", "gzip"]) == 2 and "powersgd-4" in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.slow
def test_a_row_through_a_real_swarm_stands_beside_the_simulated_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "fp32", "int8", "--steps", "2", "--max-tokens", "20000"]
    arguments += ["--model", str(folder / "model"), "--domain", str(folder / "texts")]
    arguments += ["--journal", str(tmp_path / "journal.jsonl"), "--data-cache", str(tmp_path / "cache")]
    assert main(["swarm", *arguments]) == 0 and main(arguments) == 0
    records = Journal(tmp_path / "journal.jsonl").records()
    assert len(records) == 4
    real, simulated = (
        {r["row"]: r for r in records.values() if r.get("mode") == mode} for mode in ("swarm", None)
    )
    for name in ("fp32", "int8"):
        payload = simulated[name]["sent"][-1][1]
        # Less where a replica had no microbatch of a step: it contributes nothing then.
        assert payload / 2 <= real[name]["sent"] <= 1.1 * payload
    page = tmp_path / "averaging.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert write_report(records, tmp_path) == 2
    assert page.read_text().count("| int8 |") == 2 and "through a real swarm" in page.read_text()
    assert main(["swarm", *arguments]) == 0 and len(Journal(tmp_path / "journal.jsonl").records()) == 4
    assert main(["swarm", "--only", "sign"]) == 2 and "diloco-10" in capsys.readouterr().out
