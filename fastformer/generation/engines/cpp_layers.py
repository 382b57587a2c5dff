"""The options of the C++ engine for the layers of a GPT, where they differ from each other or from the usual ones."""

from __future__ import annotations

from fastformer.models.gpt import GPTConfig


def options_of_layers(config: GPTConfig) -> dict[str, object]:
    """Returns the options of ModelOptions in csrc/engine/packed_model.h that differ from the usual ones."""
    some: dict[str, object] = {"value_norm": True} if config.value_norm else {}
    if config.qk_norm == "rotated":
        some["rotates_before_norms"] = True
    if config.query_growth:
        some |= {"query_growth": config.query_growth, "query_growth_length": config.query_growth_length}
    if config.num_experts is not None:
        some |= {
            "experts_per_token": config.num_experts_per_tok,
            "norm_topk_prob": config.norm_topk_prob,
            "norm_topk_eps": config.norm_topk_eps,
            "expert_scale": config.expert_scale,
            "sigmoid_router": config.router_activation == "sigmoid",
            "shared_gate": config.shared_expert_gate,
        }
    if any(config.linear):
        some["linear_key_heads"] = config.linear_key_heads
    if any(config.mamba):
        some["mamba_groups"] = config.mamba_groups
    if (scaling := config.scaling) is not None and scaling["kind"] == "proportional":
        some["rotary_reach"] = config.global_rotary_dim // 2
    if config.key_layers is not None:
        some["key_layers"] = [*config.key_layers]
    heads = [config.heads_of(has_window) for has_window in config.windows]
    if len(set(heads)) > 1:
        kv_heads, head_dims = zip(*heads, strict=True)
        some |= {"layer_kv_heads": [*kv_heads], "layer_head_dims": [*head_dims], "attention_scale": 0.0}
    return some
