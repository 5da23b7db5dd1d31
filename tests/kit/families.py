"""A tiny configuration of every supported model family."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

LAYERS = 4
VOCABULARY = 97

# Small sizes and unusual multipliers, of which every family takes the fields it has. The windows are shorter
# than the documents, the softcaps bite, the scales are far from 1, dropout is on: leaving one out shows.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "attention_dropout": 0.1,
    "sliding_window": 5,
    "final_logit_softcapping": 0.3,
    "attn_logit_softcapping": 0.2,
    "query_pre_attn_scalar": 8,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
    "logit_scale": 0.5,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 64,
    "n_ctx": 64,
    "n_inner": 48,
    "rotary_dim": 4,
}
MULTI_HEAD_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def tiny_config(family: str) -> Any:
    """A tiny configuration of a family, with every kind of layer it has."""
    kind = CONFIG_MAPPING[family]
    usual = kind()
    fields = {name: value for name, value in TINY.items() if hasattr(usual, name)}
    if hasattr(usual, "kv_lora_rank"):
        fields |= {**MULTI_HEAD_LATENT, "num_key_value_heads": 4}
        fields.pop("logits_scaling", None)
    if hasattr(usual, "use_sliding_window"):
        fields |= {"use_sliding_window": True, "max_window_layers": 2}
    if getattr(usual, "layer_types", None):
        # Families with windows must show both kinds, whatever their default pattern is.
        kinds = (
            ["full_attention", "sliding_attention"]
            if hasattr(usual, "sliding_window")
            else ["full_attention"]
        )
        fields["layer_types"] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    if getattr(usual, "mlp_layer_types", None):
        fields["mlp_layer_types"] = ["dense", *["sparse"] * (LAYERS - 1)]
    return kind(**fields)
