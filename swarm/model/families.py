"""What must be known about model families beyond their pipeline plan."""

from __future__ import annotations

import copy
from typing import Any

SUPPORTED_FAMILIES: frozenset[str] = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "codegen",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "helium",
        "hyperclovax",
        "internlm3",
        "jais2",
        "llama",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    }
)
"""`model_type` of every family whose stages equal the uncut model, and whose packed documents equal documents
run alone; each of them has its test."""

POSITIONS_DO_NOT_REACH_MASKS: frozenset[str] = frozenset({"afmoe", "gpt_oss"})
"""Families whose trunk builds its masks without looking at the positions, and so would let the documents of a
row see each other; their trunks take finished masks by layer type instead."""

DOCUMENT_ATTENTION: frozenset[str] = frozenset(
    {
        "arcee",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_neox",
        "granite",
        "helium",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""Families whose attention takes its implementation from transformers' registry and tells it its window, so
that a stage can run it document by document (`swarm.model.attention`). The others keep masks."""

ATTENTION_LAYER_TYPES: frozenset[str] = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention"}
)
"""Layer types that see other tokens through an attention mask only, so that packed documents stay apart."""

_DROPOUT_WORDS = ("dropout", "pdrop", "layerdrop")


def unsupported_layer_types(config: Any) -> frozenset[str]:
    """Layer types of the configuration that mix tokens by other means than masked attention."""
    layer_types = getattr(config, "layer_types", None) or ()
    return frozenset(layer_types) - ATTENTION_LAYER_TYPES


def attention_implementation(config: Any) -> str | None:
    """Attention implementation to build a model with; None lets the family choose (sdpa wherever it has it).

    torch's fused attention has no logit softcap, and leaving the softcap out trains another model.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def training_config(config: Any) -> Any:
    """A copy of the configuration as stages train it.

    All dropout is 0 (every stage must be a function of its input alone, so that a replay gives the same
    result), no key cache, an output head of its own (`tie_word_embeddings` false, for the embedding lives on
    the first stage and the head on the last), no router statistics.
    """
    trained = copy.deepcopy(config)
    for name, value in vars(trained).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and any(word in name for word in _DROPOUT_WORDS):
            setattr(trained, name, type(value)(0))
    trained.tie_word_embeddings = False
    trained.use_cache = False
    if hasattr(trained, "output_router_logits"):
        trained.output_router_logits = False
    return trained
