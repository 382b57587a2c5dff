"""The fields of transformers' configs: those that the families here read, and those that change no pass.

A later version of transformers may add a field to a config. A model whose config has another value there than a new
config is refused, because this library doesn't know what the field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Every config has these. None changes the result of a pass, though some change what a pass returns.
_ALL = (
    "model_type transformers_version architectures output_hidden_states output_attentions return_dict dtype "
    "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type vocab_size pad_token_id bos_token_id "
    "eos_token_id tie_word_embeddings"
)
_LAYERS = "hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings"
_LLAMA = (
    f"{_ALL} {_LAYERS} num_key_value_heads hidden_act initializer_range rms_norm_eps use_cache rope_parameters "
    "attention_dropout"
)
_QWEN = f"{_LLAMA} use_sliding_window sliding_window max_window_layers layer_types"
_EXPERTS = "num_experts_per_tok output_router_logits router_aux_loss_coef"
_QWEN_MOE = f"{_QWEN} {_EXPERTS} num_experts moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
_QWEN_HYBRID = (
    f"{_LLAMA} attention_bias head_dim layer_types linear_num_key_heads linear_num_value_heads linear_key_head_dim "
    "linear_value_head_dim linear_conv_kernel_dim"
)
_GEMMA = f"{_LLAMA} head_dim attention_bias use_bidirectional_attention"
_GEMMA2 = (
    f"{_GEMMA} hidden_activation query_pre_attn_scalar sliding_window layer_types final_logit_softcapping "
    "attn_logit_softcapping"
)
_ROTARY_BERT = (
    f"{_ALL} {_LAYERS} hidden_act hidden_dropout_prob attention_probs_dropout_prob type_vocab_size initializer_range "
    "layer_norm_eps classifier_dropout rope_parameters"
)
_BERT = f"{_ROTARY_BERT.removesuffix(' rope_parameters')} use_cache is_decoder add_cross_attention"
_BART = (
    f"{_ALL} max_position_embeddings encoder_layers encoder_ffn_dim encoder_attention_heads decoder_layers "
    "decoder_ffn_dim decoder_attention_heads encoder_layerdrop decoder_layerdrop activation_function d_model dropout "
    "attention_dropout activation_dropout init_std classifier_dropout scale_embedding use_cache decoder_start_token_id "
    "forced_eos_token_id is_decoder"
)
_T5 = (
    f"{_ALL} d_model d_kv d_ff num_layers num_decoder_layers num_heads relative_attention_num_buckets "
    "relative_attention_max_distance dropout_rate layer_norm_epsilon initializer_factor feed_forward_proj dense_act_fn "
    "is_gated_act scale_decoder_outputs use_cache decoder_start_token_id classifier_dropout is_decoder"
)
# By the model_type.
FIELDS: dict[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "gpt2": f"{_ALL} n_positions n_embd n_layer n_head n_inner activation_function resid_pdrop embd_pdrop "
        "attn_pdrop layer_norm_epsilon initializer_range summary_type summary_use_proj summary_activation "
        "summary_proj_to_labels summary_first_dropout scale_attn_weights use_cache scale_attn_by_inverse_layer_idx "
        "reorder_and_upcast_attn add_cross_attention",
        "llama": f"{_LLAMA} pretraining_tp attention_bias mlp_bias head_dim",
        "mistral": f"{_LLAMA} head_dim sliding_window",
        "ministral": f"{_LLAMA} head_dim sliding_window layer_types",
        "qwen2": _QWEN,
        "qwen3": f"{_QWEN} head_dim attention_bias",
        "olmo2": f"{_LLAMA} attention_bias",
        "cwm": f"{_LLAMA} pretraining_tp mlp_bias head_dim sliding_window layer_types",
        "exaone4": f"{_LLAMA} head_dim sliding_window sliding_window_pattern layer_types",
        "olmo3": f"{_LLAMA} attention_bias sliding_window layer_types",
        "phi3": f"{_LLAMA} resid_pdrop embd_pdrop original_max_position_embeddings sliding_window",
        "gemma": _GEMMA,
        "gemma2": _GEMMA2,
        "gemma3_text": _GEMMA2,
        "gemma4_text": f"{_GEMMA} hidden_activation sliding_window layer_types final_logit_softcapping "
        "per_layer_config vocab_size_per_layer_input hidden_size_per_layer_input attention_k_eq_v num_kv_shared_layers "
        "enable_moe_block use_double_wide_mlp num_experts top_k_experts moe_intermediate_size",
        "gpt_neox": f"{_ALL} {_LAYERS} hidden_act attention_dropout hidden_dropout classifier_dropout "
        "initializer_range layer_norm_eps use_cache use_parallel_residual rope_parameters attention_bias is_decoder",
        "smollm3": f"{_LLAMA} use_sliding_window sliding_window layer_types no_rope_layers no_rope_layer_interval "
        "attention_bias mlp_bias",
        "granite": f"{_LLAMA} attention_bias mlp_bias embedding_multiplier logits_scaling residual_multiplier "
        "attention_multiplier",
        "phi": f"{_ALL} {_LAYERS} num_key_value_heads hidden_act initializer_range layer_norm_eps use_cache "
        "rope_parameters partial_rotary_factor attention_dropout resid_pdrop embd_pdrop qk_layernorm",
        "stablelm": f"{_ALL} {_LAYERS} num_key_value_heads hidden_act initializer_range layer_norm_eps use_cache "
        "rope_parameters partial_rotary_factor attention_dropout hidden_dropout use_qkv_bias qk_layernorm "
        "use_parallel_residual",
        "starcoder2": f"{_LLAMA} norm_epsilon sliding_window residual_dropout embedding_dropout use_bias",
        "mixtral": f"{_LLAMA} {_EXPERTS} head_dim sliding_window num_local_experts router_jitter_noise",
        "granitemoe": f"{_LLAMA} {_EXPERTS} attention_bias num_local_experts embedding_multiplier logits_scaling "
        "residual_multiplier attention_multiplier",
        "granitemoehybrid": f"{_LLAMA} {_EXPERTS} attention_bias num_local_experts embedding_multiplier logits_scaling "
        "residual_multiplier attention_multiplier shared_intermediate_size position_embedding_type layer_types "
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size "
        "mamba_conv_bias mamba_proj_bias time_step_limit",
        "olmoe": f"{_LLAMA} {_EXPERTS} attention_bias clip_qkv num_experts norm_topk_prob",
        "gpt_oss": f"{_LLAMA} {_EXPERTS} attention_bias head_dim sliding_window layer_types num_local_experts "
        "swiglu_alpha swiglu_limit",
        "qwen2_moe": f"{_QWEN_MOE} shared_expert_intermediate_size qkv_bias",
        "qwen3_moe": f"{_QWEN_MOE} num_local_experts attention_bias head_dim",
        "qwen3_5_text": _QWEN_HYBRID,
        "qwen3_5_moe_text": f"{_QWEN_HYBRID} {_EXPERTS} num_experts moe_intermediate_size "
        "shared_expert_intermediate_size",
        "qwen3_next": f"{_QWEN_HYBRID} {_EXPERTS} num_experts moe_intermediate_size norm_topk_prob "
        "decoder_sparse_step mlp_only_layers shared_expert_intermediate_size",
        "lfm2": f"{_ALL} {_LAYERS} num_key_value_heads initializer_range norm_eps use_cache rope_parameters conv_bias "
        "conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim full_attn_idxs layer_types",
        "lfm2_moe": f"{_ALL} {_LAYERS} num_key_value_heads initializer_range norm_eps use_cache rope_parameters "
        "conv_bias conv_L_cache layer_types moe_intermediate_size num_dense_layers num_experts_per_tok "
        "output_router_logits num_experts use_expert_bias routed_scaling_factor norm_topk_prob",
        "glm4_moe": f"{_LLAMA} attention_bias head_dim partial_rotary_factor moe_intermediate_size "
        "num_experts_per_tok output_router_logits n_shared_experts n_routed_experts routed_scaling_factor n_group "
        "topk_group first_k_dense_replace norm_topk_prob use_qk_norm num_nextn_predict_layers num_mtp_layers",
        "afmoe": f"{_LLAMA} attention_bias head_dim moe_intermediate_size num_dense_layers num_experts "
        "num_experts_per_tok num_shared_experts route_scale output_router_logits global_attn_every_n_layers "
        "sliding_window layer_types mup_enabled",
        "seed_oss": f"{_LLAMA} pretraining_tp attention_bias attention_out_bias mlp_bias residual_dropout head_dim",
        # Its attention has no dropout, which its config doesn't name.
        "ernie4_5": f"{_LLAMA.removesuffix(' attention_dropout')} use_bias head_dim",
        "ernie4_5_moe": f"{_LLAMA.removesuffix(' attention_dropout')} use_bias moe_intermediate_size moe_k "
        "moe_num_experts moe_num_shared_experts moe_layer_start_index moe_layer_end_index moe_layer_interval "
        "moe_norm_min output_router_logits router_aux_loss_coef",
        "hunyuan_v1_dense": f"{_LLAMA} eod_token_id pretraining_tp attention_bias head_dim",
        "ministral3": f"{_LLAMA} head_dim sliding_window",
        "helium": f"{_LLAMA} attention_bias mlp_bias head_dim",
        **dict.fromkeys(("glm", "glm4"), f"{_LLAMA} attention_bias head_dim partial_rotary_factor"),
        "bert": _BERT,
        "roberta": _BERT,
        "xlm-roberta": _BERT,
        "camembert": _BERT,
        "distilbert": f"{_ALL} max_position_embeddings sinusoidal_pos_embds n_layers n_heads dim hidden_dim dropout "
        "attention_dropout activation initializer_range qa_dropout seq_classif_dropout",
        "mpnet": f"{_BERT} relative_attention_num_buckets",
        "electra": f"{_BERT} embedding_size summary_type summary_use_proj summary_activation summary_last_dropout",
        "albert": f"{_ALL} {_LAYERS} hidden_act hidden_dropout_prob attention_probs_dropout_prob type_vocab_size "
        "initializer_range layer_norm_eps embedding_size num_hidden_groups inner_group_num classifier_dropout_prob",
        "modernbert": f"{_ALL} {_LAYERS} hidden_activation initializer_range initializer_cutoff_factor norm_eps "
        "norm_bias cls_token_id sep_token_id attention_bias attention_dropout layer_types rope_parameters "
        "local_attention embedding_dropout mlp_bias mlp_dropout decoder_bias classifier_pooling classifier_dropout "
        "classifier_bias classifier_activation deterministic_flash_attn sparse_prediction sparse_pred_ignore_index",
        "nomic_bert": f"{_ROTARY_BERT} head_dim",
        "gte": _ROTARY_BERT,
        "eurobert": f"{_LLAMA} pretraining_tp attention_bias mlp_bias head_dim mask_token_id classifier_pooling",
        "bart": _BART,
        "mbart": _BART,
        "pegasus": _BART,
        "m2m_100": _BART,
        "marian": f"{_BART} decoder_vocab_size share_encoder_decoder_embeddings",
        "t5": _T5,
        "mt5": _T5,
    }.items()
}
_ROBERTA_IDS = {"bos_token_id": 0, "eos_token_id": 2}
# The special ids of families whose config.json need not contain them. Those of encoder-decoders have to be there.
_IDS: dict[str, Mapping[str, int | list[int]]] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "gpt_neox", "mixtral", "granitemoe", "granite", "granitemoehybrid", "phi"),
        {"eos_token_id": 2},
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "smollm3": {"pad_token_id": 128004, "eos_token_id": 128001},
    "exaone4": {"bos_token_id": 0, "eos_token_id": 2},
    "stablelm": {"eos_token_id": 0},
    "cwm": {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
    **dict.fromkeys(("gpt2", "starcoder2"), {"eos_token_id": 50256}),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), {"pad_token_id": 1, "eos_token_id": 50279}),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text"), {"pad_token_id": 0, "eos_token_id": 1}),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), _ROBERTA_IDS),
    "seed_oss": {"pad_token_id": 1, "eos_token_id": 2},
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), {"pad_token_id": 0, "eos_token_id": 2}),
    "hunyuan_v1_dense": {"pad_token_id": 0, "eos_token_id": 2},
    "ministral3": {"pad_token_id": 11, "eos_token_id": 2},
    "helium": {"pad_token_id": 3, "eos_token_id": 2},
    **dict.fromkeys(("glm", "glm4"), {"pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338]}),
    "phi3": {"pad_token_id": 32000, "eos_token_id": 32000},
    "albert": {"bos_token_id": 2, "eos_token_id": 3},
    "modernbert": {"bos_token_id": 50281, "eos_token_id": 50282},
    "eurobert": {"bos_token_id": 128000, "eos_token_id": 128001},
}
# The id that a family's class has in place of a null, too.
_NULL_IS_USUAL = dict.fromkeys(("glm", "glm4"), "eos_token_id")
BIDIRECTIONAL = "gemma3_text"  # the family whose use_bidirectional_attention lets tokens see later ones
# Settings that the caches of transformers read in any config: which of the keys before a token they keep.
_WINDOWS = ("sliding_window", "attention_chunk_size")


def check_fields(settings: Mapping[str, Any], kind: str, *, encodes: bool = False) -> None:
    """Checks the settings that code of all of transformers' models reads, whether or not a family's config has them.

    Args:
        settings: the settings of a model.
        kind: what its family makes of them: "seq2seq", "decoder" or "encoder".
        encodes: whether a decoder computes hidden states alone, so that its tokens may see later ones.

    Raises:
        ValueError: a decoder sees later tokens, an encoder only earlier ones, or a cache forgets tokens that the layers
            see.
    """
    # In an encoder-decoder both values contradict one of its stacks.
    usual = {"decoder": True, "encoder": False}.get(kind)
    told = False if kind == "decoder" and sees_later(settings) else settings.get("is_causal", usual)
    if told is not usual and not (encodes and told is False):
        raise ValueError(
            f"expected {'no is_causal' if usual is None else f'is_causal to be {usual}'} in the settings of "
            f"{'an encoder-decoder' if usual is None else f'this {kind}'}, got {told!r}"
        )
    known = FIELDS.get(str(settings.get("model_type")), frozenset())
    limit = settings.get("max_position_embeddings", settings.get("n_positions"))
    for name in _WINDOWS:
        value = settings.get(name)
        is_wide = isinstance(value, int) and isinstance(limit, int) and value >= limit
        is_off = name == "sliding_window" and settings.get("use_sliding_window") is False
        if kind == "decoder" and name not in known and value is not None and not is_wide and not is_off:
            raise ValueError(f"expected no {name} in a model without windows, got {value!r}")


def sees_later(settings: Mapping[str, Any]) -> bool:
    """Returns whether the tokens of a decoder see later ones, by the setting of any decoder, or that of Gemma 3."""
    of_family = settings.get("model_type") == BIDIRECTIONAL and settings.get("use_bidirectional_attention")
    return settings.get("is_causal") is False or bool(of_family)


def with_usual_ids(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the special ids that the family has if config.json doesn't contain them."""
    kind = str(settings.get("model_type"))
    given = {name: value for name, value in settings.items() if value is not None or name != _NULL_IS_USUAL.get(kind)}
    return {**_IDS.get(kind, {}), **given}


def unknown_fields(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model's config that are new to this library and have other values than a new config's.

    Args:
        settings: the settings of a model of a family in `FIELDS`.
        usual: the settings of a new config of the same class.
    """
    known = FIELDS[settings["model_type"]]
    return {
        name: settings[name]
        for name, value in usual.items()
        if name not in known and name[0] != "_" and name in settings and settings[name] != value
    }
