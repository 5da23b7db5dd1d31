"""A transformers causal LM as stages: cut, pack, load, train, export."""

from swarm.model.cut import StageRange, check_cuts, equal_cost_cuts, stage_ranges
from swarm.model.export import assemble, split_checkpoint, stage_file_name, untie_head
from swarm.model.packed import packed_kwargs
from swarm.model.plan import NoPipelinePlan, PipelinePlan, require_pipeline_plan
from swarm.model.source import ModelSourceError, load_pretrained, random_model
from swarm.model.stage import StageModel, build_stage, stage_tensor_names
from swarm.model.trainable import TrainableSet

__all__ = [
    "ModelSourceError",
    "NoPipelinePlan",
    "PipelinePlan",
    "StageModel",
    "StageRange",
    "TrainableSet",
    "assemble",
    "build_stage",
    "check_cuts",
    "equal_cost_cuts",
    "load_pretrained",
    "packed_kwargs",
    "random_model",
    "require_pipeline_plan",
    "split_checkpoint",
    "stage_file_name",
    "stage_ranges",
    "stage_tensor_names",
    "untie_head",
]
