"""The quality benchmark in its smallest form: a tiny model, a handful of steps, everything else as in the large."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from rich.console import Console

from benchmarks.quality.__main__ import main, parse
from benchmarks.quality.anchors import AnchorCircuit
from benchmarks.quality.config import AnchorPlan, RowConfig
from benchmarks.quality.journal import Journal, claim
from benchmarks.quality.prediction import bytes_per_stage, step_seconds
from benchmarks.quality.prepare import prepare, restrict_vocabulary_
from benchmarks.quality.recording import Recording
from benchmarks.quality.report import BEGIN, END, rates_of, write_report
from benchmarks.quality.rows import DENSE, GROUPS, SWEEPS, Entry, Family, Row, entries, entry
from benchmarks.quality.runner import record_of, run_entries, share_recovered
from benchmarks.quality.simulate import Course, Seconds, simulate
from benchmarks.quality.tuning import DEFAULT_RATE, learning_rates
from benchmarks.quality.wire import WireBytes
from swarm.activation.base import CodecKey
from swarm.data.order import samples_from_far_end, samples_of_step
from swarm.reference import ReferenceTrainer
from tests.kit.tiny import write_model, write_texts

RATES: dict[Family, float] = dict.fromkeys(get_args(Family), 3e-4)
BASIS = {"name": "basis", "mask_ratio": 80, "calibration_microbatches": 8, "token_classes": 2}
PLAN = AnchorPlan(microbatches=2, snapshot_every=3, early_snapshots=(1,))
LEADERS = AnchorPlan(source="leaders", window=200, snapshot_every=2, early_snapshots=(), lateness=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, a model, and a cache that all tests share."""
    path = tmp_path_factory.mktemp("quality")
    texts = write_texts(path / "texts")
    write_model(path / "model", texts)
    return path


def tiny(folder: Path, **changes: Any) -> RowConfig:
    settings: dict[str, Any] = {
        "domain": str(folder / "texts"),
        "model": str(folder / "model"),
        "seed": 0,
        "steps": 6,
        "codec": {"name": "dense"},
        "cuts": (2, 4),
        "max_tokens": 20_000,
        "sequence_length": 32,
        "samples_per_step": 4,
        "rows_per_microbatch": 2,
        "eval_rows": 4,
        "eval_every": 2,
        "learning_rate": 2e-3,
        "warmup_steps": 1,
    }
    return RowConfig(**{**settings, **changes})


def ignore(*_: object) -> None:
    pass


def test_priors_are_in_force_one_interval_after_their_snapshot() -> None:
    plan = AnchorPlan(snapshot_every=20, early_snapshots=(5, 10))
    assert plan.passes(80) == {5: 10, 10: 20, 20: 40, 40: 60}
    assert AnchorPlan(snapshot_every=20, early_snapshots=(5,), lateness=2).passes(41) == {5: 7, 20: 22}
    assert AnchorPlan(snapshot_every=50, early_snapshots=()).passes(80) == {}


def test_configurations_have_one_spelling() -> None:
    first = RowConfig(domain="python", seed=0, steps=4, codec={"name": "mask", "mask_ratio": 95})
    again = RowConfig(
        domain="python", seed=0, steps=4, codec={"mask_ratio": 95, "name": "mask"}, max_tokens=500_000
    )
    assert first.key == again.key
    assert first.key != first.model_copy(update={"seed": 1}).key
    assert RowConfig.model_validate(json.loads(first.canonical())) == first


def test_every_declared_row_is_a_configuration_that_codecs_and_correctors_take() -> None:
    found = list(entries(tuple(GROUPS), RATES))
    assert len({each.config.key for each in found}) == len(found)
    for each in found:
        each.config.codec_config()
        each.config.corrector_config()
    for name, group in GROUPS.items():
        names = [row.name for row in group.rows]
        assert len(set(names)) == len(names), name
    assert {row.name for row in SWEEPS} >= {"dense", "mask-99-spectral", "basis-99", "basis-95-bias"}


def test_rows_take_their_familys_rate_and_their_gain_is_compared_at_equal_rates() -> None:
    mask = entry("main", Row("m", "", "mask", {"name": "mask"}), "python", 0, 40, {**RATES, "mask": 1e-4})
    assert (mask.config.learning_rate, mask.reference.learning_rate) == (1e-4, 3e-4)
    shorter = entry("sweeps", next(row for row in SWEEPS if row.step_share == 0.1), "python", 0, 40, RATES)
    assert (shorter.config.steps, shorter.reference.steps) == (4, 40)
    tuned = next(each for each in entries(("tune",), RATES) if each.row.name == "basis-95-lr0.0006")
    assert tuned.reference.learning_rate == 6e-4


def test_tuned_rates_come_from_the_tune_group_or_are_refused() -> None:
    records = {}
    best = {"dense": 6e-4, "mask": 1.5e-4, "basis-80": 6e-4, "basis-90": 3e-4, "basis-95": 1.5e-4}
    for each in entries(("tune",), RATES):
        loss = 2.0 if each.config.learning_rate == best[each.row.family] else 3.0
        records[each.config.key] = {"curve": [[0, 4.0], [40, loss]]}
    assert learning_rates(records, is_tuned=True) == best
    assert rates_of(records)["fp32"] == best and rates_of(records)["bf16"] == rates_of({})["fp32"]
    assert set(learning_rates({}, is_tuned=False).values()) == {DEFAULT_RATE}
    with pytest.raises(ValueError, match="--group tune"):
        learning_rates({}, is_tuned=True)


def test_the_small_vocabulary_changes_no_logit_of_its_tokens(folder: Path) -> None:
    from swarm.model.source import load_pretrained

    model, _ = load_pretrained(folder / "model")
    ids = torch.tensor([[7, 30, 31, 200, 7]])
    kept = torch.tensor([0, 7, 30, 31, 100, 200])
    with torch.no_grad():
        whole = model(ids).logits[..., kept]
        restrict_vocabulary_(model, kept)
        torch.testing.assert_close(model(torch.searchsorted(kept, ids)).logits, whole)
    assert model.config.vocab_size == 6


def test_training_and_anchors_take_the_samples_that_the_swarm_takes(folder: Path) -> None:
    config = tiny(folder)
    ready = prepare(config, folder / "cache")
    taken = torch.cat([batch.sample_ids for batch in ready.step_batches(config, 3)])
    assert taken.tolist() == samples_of_step(0, len(ready.train), 4, 3)
    far = torch.cat([batch.sample_ids for batch in ready.far_batches(config, 2, 3)])
    assert far.tolist() == samples_from_far_end(0, len(ready.train), 4, skip=6)


def test_the_first_bias_is_of_gradients_that_were_coded_by_the_initial_priors(
    folder: Path, tmp_path: Path
) -> None:
    config = tiny(folder, codec=BASIS, corrector={"name": "bias", "rank": 4}, anchors=PLAN)
    ready = prepare(config, folder / "cache")
    trainer = ReferenceTrainer(
        ready.fresh_model(), config.cuts, [None] * len(config.cuts), config.optimizer_config(), config.steps
    )
    first = AnchorCircuit(config, ready, trainer, tmp_path, ignore).initial().corrector
    assert first is not None and first.factors
    assert max(float(factors.values.max()) for factors in first.factors.values()) > 0


@pytest.mark.parametrize(
    ("codec", "corrector", "plan"),
    [
        ({"name": "dense"}, {"name": "none"}, None),
        (BASIS, {"name": "none"}, PLAN),
        ({**BASIS, "prediction": "context"}, {"name": "bias", "rank": 4, "alpha": 0.5}, PLAN),
        ({"name": "mask", "mask_ratio": 75}, {"name": "spectral", "rank": 4}, PLAN),
        ({**BASIS, "prediction": "context"}, {"name": "none"}, LEADERS),
    ],
)
def test_an_interrupted_row_ends_as_if_it_had_not_been(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: dict[str, Any],
    corrector: dict[str, Any],
    plan: AnchorPlan | None,
) -> None:
    monkeypatch.setattr("benchmarks.quality.simulate.CHECKPOINT_EVERY", 2)
    config = tiny(folder, codec=codec, corrector=corrector, anchors=plan)
    ready = prepare(config, folder / "cache")
    whole = simulate(config, ready, tmp_path / "whole", ignore)

    def interrupt(step: int, _steps: int, _what: str) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(config, ready, tmp_path / "parts", interrupt)
    resumed = simulate(config, ready, tmp_path / "parts", ignore)
    assert resumed.curve == whole.curve
    assert resumed.train_loss == whole.train_loss
    assert resumed.wire == whole.wire
    assert sorted(whole.curve) == [0, 2, 4, 6]
    assert whole.curve[6] < whole.curve[0]
    assert not list((tmp_path / "parts").glob("*.checkpoint"))


def test_recordings_join_both_ends_of_the_newest_microbatches() -> None:
    recording = Recording(window=100)
    starts = torch.zeros(2, 32, dtype=torch.bool)
    starts[:, 0] = starts[1, 20] = True
    for step in range(4):
        for samples in ([0, 1], [2, 3]):
            key = CodecKey(
                step, torch.tensor(samples), starts, token_ids=torch.zeros(2, 32, dtype=torch.int64)
            )
            recording.hidden(torch.full((2, 32, 4), 10.0 * step + samples[0]), key)
            recording.gradient(torch.full((2, 32, 4), -10.0 * step - samples[0]), key)
    found = recording.samples()
    assert found.hidden[::64, 0].tolist() == [30.0, 32.0]  # two microbatches of 64 tokens hold 100
    assert torch.equal(found.gradient, -found.hidden)
    assert found.offsets[:128:32].tolist() == [0, 0, 0, 0] and found.offsets[51:53].tolist() == [19, 0]
    with pytest.raises(ValueError, match="nothing"):
        Recording(window=1).samples()


def test_bytes_are_those_of_the_payloads(folder: Path, tmp_path: Path) -> None:
    dense = tiny(folder, steps=2)
    ready = prepare(dense, folder / "cache")
    wire = simulate(dense, ready, tmp_path, ignore).wire
    tokens = 2 * 4 * 32 * 2  # steps, samples, length, boundaries
    assert wire.forward == wire.gradient == tokens * 2 * 64
    assert wire.ids == tokens * 2 + tokens // 32 * 2 * 4
    assert (wire.priors, wire.initial_priors) == (0, 0)

    coded = tiny(folder, steps=4, codec=BASIS, anchors=PLAN)
    found = simulate(coded, ready, tmp_path, ignore).wire
    assert found.forward < 0.4 * 2 * wire.forward
    assert 0 < found.priors < 2 * found.initial_priors  # one pass is worth it: version 1, in force at 3

    mixed = simulate(tiny(folder, steps=4, codec=BASIS, dense_every=2), ready, tmp_path, ignore).wire
    assert found.forward < mixed.forward < 2 * wire.forward


def run_tiny(found: list[Entry], journal: Journal, scratch: Path, folder: Path, *more: str) -> str:
    options = parse(
        [
            "--scratch",
            str(scratch),
            "--data-cache",
            str(folder / "cache"),
            "--journal",
            str(journal.path),
            *more,
        ]
    )
    console = Console(width=200, force_terminal=False, record=True, quiet=True)
    with console.capture():
        run_entries(found, journal, options, console)
    return console.export_text()


def test_finished_rows_are_not_run_again_and_claimed_ones_are_left_alone(
    folder: Path, tmp_path: Path
) -> None:
    journal, scratch = Journal(tmp_path / "results" / "journal.jsonl"), tmp_path / "scratch"
    found = [
        Entry("main", DENSE, tiny(folder, steps=2, seed=seed), tiny(folder, steps=2, seed=seed))
        for seed in (0, 1)
    ]
    with claim(scratch, found[1].config.key) as is_ours:
        assert is_ours
        run_tiny(found, journal, scratch, folder)
    assert set(journal.records()) == {found[0].config.key}
    run_tiny(found, journal, scratch, folder)
    lines = journal.path.read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == [each.config.key for each in found]
    record = json.loads(lines[0])
    assert RowConfig.model_validate(record["config"]) == found[0].config
    assert share_recovered(record, record) == 1.0
    run_tiny(found[:1], journal, scratch, folder, "--redo")
    assert len(journal.path.read_text().splitlines()) == 3


def test_options_change_the_rows_that_have_them() -> None:
    options = parse(["--codec", "prediction=none", "token_classes=16", "--anchors", "early_snapshots=[2, 4]"])
    found = {
        each.row.name.partition("+")[0]: each.config
        for each in entries(("main",), RATES, seeds=(0,), codec=options.codec, anchors=options.anchors)
    }
    plain = {each.row.name: each.config for each in entries(("main",), RATES, seeds=(0,))}
    assert found["basis-90"].codec == {
        **plain["basis-90"].codec,
        "prediction": "none",
        "token_classes": 16,
    }
    assert found["basis-90"].anchors == AnchorPlan(early_snapshots=(2, 4), lateness=5)
    assert found["mask-95-spectral"].codec == plain["mask-95-spectral"].codec
    assert (found["dense"].key, found["mask-95"].key) == (plain["dense"].key, plain["mask-95"].key)


@pytest.mark.parametrize("arguments", (["--codec", "prediction"], ["--codec", "a={"], ["--threads", "0"]))
def test_options_that_cannot_be_read_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)


def test_options_that_no_codec_has_are_refused_before_anything_runs(tmp_path: Path) -> None:
    common = [
        "--journal",
        str(tmp_path / "j"),
        "--scratch",
        str(tmp_path / "s"),
        "--data-cache",
        str(tmp_path),
    ]
    assert main([*common, "--codec", "bits=3"]) == 2
    assert main([*common, "--anchors", "every=3"]) == 2
    assert main([*common, "--only", "no-such-row"]) == 2
    assert main([*common, "--list"]) == 0
    assert not list(tmp_path.iterdir())


def test_a_broken_journal_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"key": "a"}\n{"key": \n')
    with pytest.raises(ValueError, match="line 2"):
        Journal(path).records()


def test_a_step_takes_the_longer_of_compute_and_transfer() -> None:
    assert step_seconds(0.05, 25_000) == 0.05
    assert step_seconds(0.05, 25e6 / 8) == pytest.approx(0.125)
    record = {"bytes": {"forward": 30, "gradient": 24, "ids": 3, "priors": 3, "initial_priors": 99}}
    assert bytes_per_stage(record, boundaries=3, steps=2) == 10


def test_the_report_replaces_its_figures_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for each in entries(("main",), RATES, seeds=(0, 1), steps=20, only=("dense", "basis-90")):
        is_dense = each.row.name == "dense"
        sent = 1000 if is_dense else 100
        course = Course(
            curve={0: 4.0, 20: 2.0 if is_dense else 2.5},
            wire=WireBytes(forward=sent, gradient=sent, ids=10, priors=7),
            wire_curve={0: 0, 20: 2 * sent},
            seconds=Seconds(steps_cpu=20.0),
        )
        journal.append(record_of(each, course, threads=1, rows={}))
    group = replace(GROUPS["main"], steps=20)
    monkeypatch.setitem(GROUPS, "main", group)
    page = tmp_path / "docs" / "quality.md"
    page.parent.mkdir()
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    write_report(journal, rates_of(journal.records()), page.parent, Console(quiet=True))
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    [line] = [each for each in text.splitlines() if each.startswith("| `basis-90`")]
    assert "2.500 / 2.500 | 75.0% / 75.0% | 75.0% | 0.0 | 10.0%" in line
    assert "Loss before training: manpages-de 4.000" in text
    assert "Other rows" not in text
    [extra] = entries(
        ("main",),
        RATES,
        seeds=(0,),
        only=("basis-90",),
        codec={"prediction": "none"},
        anchors={"lateness": 2},
    )
    course = Course(curve={0: 4.0, 20: 2.2}, wire=WireBytes(forward=50, gradient=50))
    journal.append(record_of(extra, course, threads=1, rows={}))
    write_report(journal, rates_of(journal.records()), page.parent, Console(quiet=True))
    text, others = page.read_text().split("Other rows")
    assert text.startswith(f"above\n{BEGIN}") and others.endswith("below\n")
    assert (
        "| `basis-90+prediction=none,lateness=2` | manpages-de | 0.0003 | 20 | 2.200 | 90.0% | 90.0% |"
        in others
    )
    # Another number format has a section, and a dense row, of its own.
    [other] = entries(("main",), RATES, seeds=(0,), steps=20, only=("basis-90",), compute="bf16")
    journal.append(record_of(other, course, threads=1, rows={}))
    write_report(journal, rates_of(journal.records()), page.parent, Console(quiet=True))
    bf16, fp32 = page.read_text().split("Group `main`, computed in fp32")
    assert "Group `main`, computed in bf16" in bf16
    assert "| `basis-90` | manpages-de | 0.0003 | 20 | 2.200 |  |  |" in bf16
    assert "2.500 / 2.500 | 75.0% / 75.0% | 75.0% | 0.0 | 10.0%" in fp32
    page.write_text("no marks")
    with pytest.raises(ValueError, match="needs one line"):
        write_report(journal, rates_of(journal.records()), page.parent, Console(quiet=True))
