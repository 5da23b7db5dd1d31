"""Which mask ratio init says suits a crowd's lines."""

from __future__ import annotations

import pytest

from peers.commands.advice import Advice, advise, note, stage_seconds_per_token


@pytest.mark.parametrize(
    ("per_token_us", "ratio"),
    ((1000.0, None), (100.0, None), (90.0, 80.0), (17.0, 80.0), (16.0, 90.0), (7.0, 90.0), (6.0, 95.0)),
)
def test_slower_lines_or_faster_stages_ask_for_more_masking(per_token_us: float, ratio: float | None) -> None:
    # 576 values of 2 bytes, states and gradients: 92.2 us per token at 200 Mbit/s.
    assert advise(576, 200.0, per_token_us * 1e-6).mask_ratio == ratio


def test_what_is_compared_is_transfer_over_compute() -> None:
    assert advise(576, 200.0, 92.16e-6).x == pytest.approx(1.0)
    assert advise(1152, 400.0, 92.16e-6).x == pytest.approx(1.0)
    assert advise(576, 20.0, 92.16e-6) == Advice(90.0, pytest.approx(10.0))


def test_calibration_says_what_a_stage_takes() -> None:
    assert stage_seconds_per_token(8.0, 4000, 4) == pytest.approx(1.5 * 8.0 / 4000 / 4)


def test_figures_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        advise(576, 0.0, 1.0)


def test_note_names_figures_verdict_and_choice() -> None:
    text = note(
        advise(576, 20.0, 92.16e-6), 20.0, 92.16e-6, "--codec basis --mask-ratio 80", is_measured=False
    )
    assert "20 Mbit/s" in text and "92.2 us" in text and "10 times" in text
    assert (
        "--codec basis --mask-ratio 90 suits" in text and "chosen was --codec basis --mask-ratio 80" in text
    )
    same = note(
        advise(576, 20.0, 92.16e-6), 20.0, 92.16e-6, "--codec basis --mask-ratio 90", is_measured=True
    )
    assert "as chosen" in same and "this machine" in same
