"""From options to what a run's rounds average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peers.commands.averaging import averaging_config, averaging_warnings
from peers.commands.init import RunOptions
from peers.config import UserError
from swarm.gradient.averaging import AveragingConfig
from swarm.gradient.config import DGCConfig, PlainConfig, PowerSGDConfig
from swarm.gradient.outer_config import EveryStepConfig, GossipConfig, LocalStepsConfig
from swarm.optim import OptimizerConfig
from tests.unit.test_manifest import manifest

OPTIONS = RunOptions(model="m", stages=2, steps=100)
ADAMW = OptimizerConfig()


def config(optimizer: OptimizerConfig = ADAMW, **options: Any) -> AveragingConfig:
    return averaging_config(replace(OPTIONS, **options), optimizer)


def test_floats_are_averaged_without_error_feedback_and_codes_with_it() -> None:
    assert config() == AveragingConfig()
    assert isinstance(config().compressor, PlainConfig) and config().compressor.codec.name == "fp16"  # type: ignore[union-attr]
    assert not config(averaging="bf16").compressor.error_feedback  # type: ignore[union-attr]
    assert config(averaging="sign").compressor.error_feedback  # type: ignore[union-attr]
    off = config(averaging="sign", averaging_options=("error_feedback=false", "block=64")).compressor
    assert isinstance(off, PlainConfig) and not off.error_feedback and off.codec.block == 64  # type: ignore[union-attr]


def test_ratio_and_rank_go_to_the_compressor() -> None:
    assert config(averaging="powersgd").compressor == PowerSGDConfig()
    assert config(averaging="powersgd", averaging_rank=8).compressor == PowerSGDConfig(rank=8)
    sgd = OptimizerConfig(name="sgd")
    dgc = config(sgd, averaging="dgc", averaging_ratio=0.01, averaging_options=("momentum=0.5",)).compressor
    assert dgc == DGCConfig(ratio=0.01, momentum=0.5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"averaging": "powersgd", "averaging_rank": 0}, "rank 0"),
        ({"averaging": "powersgd", "averaging_rank": 4, "averaging_ratio": 64.0}, "a ratio chooses the rank"),
        ({"averaging": "topk", "averaging_ratio": 2.0}, "ratio 2.0"),
        ({"averaging": "fp16", "averaging_ratio": 0.1}, "ratio 0.1"),
        ({"averaging": "int8", "averaging_options": ("blocks=64",)}, "blocks 64"),
        ({"averaging": "int8", "averaging_options": ("block",)}, "expected NAME=VALUE"),
        ({"averaging": "topk", "averaging_ratio": 0.1, "averaging_options": ("ratio=0.2",)}, "twice"),
        ({"averaging": "dgc"}, "--averaging dgc, --optimizer adamw: dgc"),
        ({"norm_bound": 0.5}, "norm_bound 0.5"),
        ({"outer_every": 5}, "need --outer"),
        ({"outer": "diloco", "outer_every": 101}, "the run has 100 steps"),
        ({"outer": "diloco", "outer_options": ("fragments=2",)}, "belong to streaming_diloco"),
        ({"outer": "diloco", "outer_options": ("inner=2",)}, "inner 2"),
        ({"centered_clip": -1.0}, "centered_clip -1.0"),
        ({"outer_overlap": 2}, "--outer-overlap 2: gradients of every step may travel during one more"),
        ({"outer": "gasloc", "outer_overlap": 1}, "overlap 1: pairs meet within the round"),
        ({"outer": "gasloc", "averaging": "powersgd"}, "pairs have each their own"),
        ({"outer": "sparta", "averaging": "powersgd"}, "slices are none"),
        (
            {"outer": "diloco", "outer_every": 4, "outer_overlap": 5},
            "overlap of 5 steps with an average every 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_option_and_value(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        config(**options)


def test_an_outer_loop_has_its_names_defaults() -> None:
    assert isinstance(config().outer, EveryStepConfig)
    assert config(outer="diloco").outer == LocalStepsConfig(
        name="diloco", every=20, learning_rate=0.7, momentum=0.9
    )
    outer = config(
        outer="streaming_diloco", outer_every=8, outer_options=("fragments=2", "momentum=0.5")
    ).outer
    assert (outer.every, outer.fragments, outer.momentum) == (8, 2, 0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize("outer", ["every_step", "diloco", "streaming_diloco", "sparta"])
def test_an_overlap_is_an_option_of_its_own(outer: Any) -> None:
    found = config(outer=outer, outer_overlap=1).outer
    assert (found.name, found.overlap) == (outer, 1)


def test_gasloc_has_options_of_its_own() -> None:
    found = config(outer="gasloc", outer_every=5, outer_options=("consensus=3", "coupling=0.5")).outer
    assert found == GossipConfig(every=5, consensus=3, coupling=0.5, momentum=0.5, learning_rate=1.0)


def test_an_unknown_compressor_in_a_manifest_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"plain.*dgc.*randomk.*powersgd.*scape"):
        AveragingConfig.model_validate({"compressor": {"name": "gzip"}})


FEW = "4 averages are few for an outer momentum of 0.9"
SIGNS = "signs with error feedback and AdamW"


@pytest.mark.parametrize(
    ("options", "optimizer", "said"),
    [
        ({"outer": "diloco", "outer_every": 10}, ADAMW, FEW),
        ({"outer": "diloco", "outer_every": 10, "outer_options": ("momentum=0.5",)}, ADAMW, ""),
        ({"outer": "diloco", "outer_every": 2}, ADAMW, ""),
        ({"outer": "local_sgd", "outer_every": 10}, ADAMW, ""),
        ({"averaging": "sign"}, ADAMW, SIGNS),
        ({"averaging": "sign"}, OptimizerConfig(name="sgd"), ""),
        ({"averaging": "sign", "averaging_options": ("error_feedback=false",)}, ADAMW, ""),
    ],
)
def test_owner_is_warned_of_averages_that_learn_less(
    options: dict[str, Any], optimizer: OptimizerConfig, said: str
) -> None:
    run = manifest(total_steps=40, averaging=config(optimizer, **options), optimizer=optimizer)
    assert [said in one for one in averaging_warnings(run)] == ([True] if said else [])
