"""The architectures of GGUF: what their files call the modules and the settings of transformers' families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_output": "self_attn.o_proj"}  # fmt: skip
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_LLAMA = {**_ATTENTION, **_GATED, **_NORMS}
_POST = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_OSS = {"attn_norm": "input_layernorm", "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
_GEMMA2 = {**_LLAMA, **_POST, "ffn_norm": "pre_feedforward_layernorm"}
# The tensors of all experts of a layer, each with the name of the matrix of one of them.
_QWEN_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
_ROUTED = {**_ATTENTION, **_NORMS, "ffn_gate_inp": "mlp.gate"}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_GEMMA4 = {
    **_GEMMA2, **_QK_NORMS, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm":
    "post_per_layer_input_norm", "layer_output_scale": "layer_scalar",
}  # fmt: skip
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_LFM2 = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm":
    "self_attn.k_layernorm", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv", "shortconv.in_proj":
    "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
# Experts that are chosen by other numbers than their weights, and a shared one without a gate.
_BIASED = {
    **_LLAMA, "ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
_MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
    "ffn_gate_inp": "block_sparse_moe.router",
    **{f"ffn_{part}{end}": f"shared_mlp.{name}" for end in ("", "_shexp") for part, name in
       (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))},
}  # fmt: skip
_PHI2 = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.dense", "attn_norm": "input_layernorm", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_BERT = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip


class Architecture(NamedTuple):
    """An architecture of GGUF.

    Attributes:
        kind: the model_type of the family in transformers.
        layer: the names of a layer's modules, without "blk.0.", each with that in the family.
        places: the names of the other modules, likewise.
        prefix: what the family has in place of "blk.".
        is_permuted: whether the rows of queries and keys are in the order of rotations of neighbours.
        norms_have_one: whether the norms are stored plus 1.
        is_turned: whether the family stores the matrices of its layers as (in, out).
        experts: the tensors of all experts of a layer, each with the name of the matrix of one of them.
        mixture: the family's name of what holds the experts.
        is_written: whether `write_gguf` writes models of the family.
    """

    kind: str
    layer: Mapping[str, str]
    places: Mapping[str, str] = _GLOBAL
    prefix: str = "model.layers."
    is_permuted: bool = False
    norms_have_one: bool = False
    is_turned: bool = False
    experts: Mapping[str, str] = {}
    mixture: str = "mlp"
    is_written: bool = True


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, is_permuted=True),  # Mistral and SmolLM, too
    "granite": Architecture("granite", _LLAMA, is_permuted=True, is_written=False),
    "granitemoe": Architecture(
        "granitemoe", {**_ATTENTION, **_NORMS, "ffn_gate_inp": "block_sparse_moe.router"}, is_permuted=True,
        experts=_QWEN_EXPERTS, mixture="block_sparse_moe", is_written=False,
    ),
    "smollm3": Architecture("smollm3", _LLAMA, is_permuted=True, is_written=False),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen2moe": Architecture("qwen2_moe", {**_ROUTED, **_SHARED}, experts=_QWEN_EXPERTS, is_written=False),
    "qwen3moe": Architecture("qwen3_moe", {**_ROUTED, **_QK_NORMS}, experts=_QWEN_EXPERTS, is_written=False),
    "olmoe": Architecture("olmoe", {**_ROUTED, **_QK_NORMS}, experts=_QWEN_EXPERTS, is_written=False),
    "gpt-oss": Architecture(
        "gpt_oss", {**_ATTENTION, **_POST, **_OSS},
        experts=_QWEN_EXPERTS, is_written=False,
    ),
    "phi2": Architecture("phi", _PHI2, {**_GLOBAL, "output_norm": "model.final_layernorm"}, is_written=False),
    "stablelm": Architecture("stablelm", _LLAMA, is_written=False),
    "qwen3": Architecture("qwen3", {**_LLAMA, **_QK_NORMS}),
    "qwen35": Architecture("qwen3_5_text", {**_LLAMA, **_QK_NORMS, **_DELTA}, norms_have_one=True, is_written=False),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", {**_ROUTED, **_SHARED, **_QK_NORMS, **_DELTA}, norms_have_one=True,
        experts=_QWEN_EXPERTS, is_written=False,
    ),
    "gemma": Architecture("gemma", _LLAMA, norms_have_one=True),
    "gemma2": Architecture("gemma2", _GEMMA2, norms_have_one=True),
    "gemma3": Architecture("gemma3_text", {**_GEMMA2, **_QK_NORMS}, norms_have_one=True),
    "gemma4": Architecture(
        "gemma4_text",
        _GEMMA4,
        {**_GLOBAL, "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj":
         "model.per_layer_model_projection", "per_layer_proj_norm": "model.per_layer_projection_norm"},
        is_written=False,
    ),
    "lfm2": Architecture(
        "lfm2",
        _LFM2,
        {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        is_written=False,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**_LFM2, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"},
        {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        experts=_MIXTRAL_EXPERTS, mixture="feed_forward", is_written=False,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {**_BIASED, **_QK_NORMS, "post_attention_norm": "post_attention_layernorm"},
        experts=_QWEN_EXPERTS, is_written=False,
    ),
    "afmoe": Architecture(
        "afmoe",
        {**_BIASED, **_QK_NORMS, "attn_gate": "self_attn.gate_proj", "exp_probs_b": "mlp.expert_bias",
         "ffn_gate_inp": "mlp.router.gate", "post_attention_norm": "post_attention_layernorm",
         "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        experts=_QWEN_EXPERTS, is_written=False,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {**_ATTENTION, **_NORMS, **_MAMBA}, is_permuted=True, experts=_QWEN_EXPERTS, mixture="block_sparse_moe",
        is_written=False,
    ),
    "phi3": Architecture("phi3", {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "mistral3": Architecture("ministral3", _LLAMA, is_permuted=True, is_written=False),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        {**_LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        is_written=False,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        {**_ATTENTION, **_GATED, "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        is_written=False,
    ),
    # Their rows are in the family's order, that of rotations of neighbours.
    "ernie4_5": Architecture("ernie4_5", _LLAMA, is_written=False),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", {**_BIASED, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
        experts=_QWEN_EXPERTS, is_written=False,
    ),
    "glm4": Architecture(
        "glm4",
        {**_LLAMA, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
         "ffn_up": "mlp.gate_up_proj"},
        is_written=False,
    ),
    "olmo2": Architecture("olmo2", {**_ATTENTION, **_GATED, **_POST, **_QK_NORMS}),
    "starcoder2": Architecture(
        "starcoder2", {**_ATTENTION, **_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "gpt2": Architecture(
        "gpt2",
        {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
         "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
         "output": "lm_head"},
        "transformer.h.",
        is_turned=True,
    ),
    "bert": Architecture(
        "bert",
        _BERT,
        {"token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
         "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm"},
        "encoder.layer.",
        is_written=False,
    ),
    "nomic-bert": Architecture("nomic_bert", {}, is_written=False),
}  # fmt: skip
# A "llama" with experts.
MIXTRAL = Architecture(
    "mixtral", {**_ATTENTION, **_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"}, is_permuted=True,
    experts=_MIXTRAL_EXPERTS, mixture="block_sparse_moe",
)  # fmt: skip
SETTINGS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads":
    "attention.head_count", "num_key_value_heads": "attention.head_count_kv", "intermediate_size":
    "feed_forward_length", "max_position_embeddings": "context_length", "rms_norm_eps":
    "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length", "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}  # fmt: skip
GPT2_SETTINGS = {
    "n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count", "n_inner":
    "feed_forward_length", "n_positions": "context_length", "layer_norm_epsilon": "attention.layer_norm_epsilon",
}  # fmt: skip
