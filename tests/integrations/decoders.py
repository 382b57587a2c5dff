"""Convertible decoder-only models of transformers in every variant, in which every weight matters."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastformer.checkpoints.hf import DECODER_FORMS, FAMILIES
from fastformer.checkpoints.hf.fields import FIELDS
from fastformer.checkpoints.hf.llama_kin import folded
from fastformer.checkpoints.hf.mixtures import in_memory
from fastformer.models import GPT
from tests.integrations.remembered import made_once

VOCAB = 60
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40,
    "max_position_embeddings": 96, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip


class Wide(TorchFunctionMode):
    """Within the block, code that asks for fp32 gets fp64: transformers' statistics, angles and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        args = tuple(map(widened, args))
        kwargs = {name: widened(value) for name, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


@contextlib.contextmanager
def made_wide() -> Iterator[None]:
    """Within the block, new tensors of Python numbers are fp64 as well."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(before)


class Case(NamedTuple):
    """A model of one family in one variant.

    Attributes:
        kind: the model_type of transformers.
        options: options of the config.
    """

    kind: str
    options: dict[str, Any]

    @made_once
    def make(self, *, is_exact: bool = False, scale: float = 0.3, seed: int = 3, **options: Any) -> Any:
        """Makes the model of transformers in fp32.

        exact: with the same weights in fp64, to be called within `Wide()`.
        """
        family = FAMILIES[self.kind]
        with made_wide() if is_exact else contextlib.nullcontext():
            config = getattr(transformers, family.config_class)(**SIZES | self.options | options)
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"  # the others have no products in fp64
            model = getattr(transformers, family.model_class)(config)
            model = model.to(torch.float64 if is_exact else torch.float32).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            ends = ("layer_scalar", "expert_bias", "correction_bias")
            scalars = [(name, each) for name, each in model.named_buffers() if name.endswith(ends)]
            for name, parameter in [*model.named_parameters(), *scalars]:
                is_norm = parameter.dim() == 1 and name.endswith("weight")
                size = scale if parameter.dim() == 2 else 0.2
                is_near_one = is_norm or name.endswith("layer_scalar")
                parameter.copy_(torch.randn(parameter.shape) * size + (1.0 if is_near_one else 0.0))
        return model


def ids_of(rows: int = 3, length: int = 21) -> tuple[Tensor, Tensor]:
    """Returns ids without PAD, and the next token of each; -100 after the end of shorter rows."""
    ids = torch.randint(3, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[1, length // 2 :] = -100
    return ids[:, :-1], labels


def loss_of(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits of a model of transformers, and the sum of the losses of the next tokens."""
    logits = model(ids).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def in_ours(case: Case, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights with the factors of a Granite, which is also what the gradients of ours lack."""
    return folded(weights, case.options) if case.kind.startswith("granite") else weights


def gradients_of(ours: GPT, case: Case) -> dict[str, Tensor]:
    """Returns the gradients of a fastformer model under transformers' names, because the conversion is affine."""
    weights = []
    for is_gradient in (True, False):
        twin = GPT(ours.config, dtype=ours.output_weight.dtype)
        with torch.no_grad():
            for parameter, own in zip(twin.parameters(), ours.parameters(), strict=True):
                gradient = torch.zeros_like(own) if own.grad is None else own.grad
                parameter.copy_(gradient if is_gradient else torch.zeros_like(own))
        weights.append(in_memory(DECODER_FORMS[case.kind].from_model(twin)[1], {}))
    return in_ours(case, {name: weights[0][name] - weights[1][name] for name in weights[0]})


_LLAMA: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 50_000.0},
}
_GPT2: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 36, "layer_norm_epsilon": 1e-4},
}
_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    # 32 positions at first: beyond them are prompts and what is generated.
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn with all": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0,
                      "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
_SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, **_GROUPED}
_TYPES = ["sliding_attention", "full_attention"]
_MOE = {"moe_intermediate_size": 20}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 10, "mamba_expand": 2}
GRANITE4 = {"num_local_experts": 0, "shared_intermediate_size": 44, "mamba_n_heads": 1,
             "layer_types": ["full_attention"] * 2}  # fmt: skip
_SHARED = {**_MOE, "shared_expert_intermediate_size": 28}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
           "linear_value_head_dim": 10, "head_dim": 8, **_GROUPED,
           # A first output near 0 would be rounding errors, of which the norm makes numbers near 1.
           "rms_norm_eps": 0.01}  # fmt: skip
_LINEAR_TYPES = ["linear_attention", "full_attention", "linear_attention"]
_CONV_TYPES = ["conv", "full_attention", "conv"]
_GEMMA = {"num_key_value_heads": 2, "head_dim": 10}
_GEMMA4 = {"num_key_value_heads": 2, "head_dim": 6, "global_head_dim": 8, "hidden_size_per_layer_input": 6,
           "vocab_size_per_layer_input": VOCAB, "sliding_window": 5, "num_hidden_layers": 4,
           "layer_types": ["full_attention", *_TYPES, "full_attention"]}  # fmt: skip
_LOCAL = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}  # fmt: skip
_YARN = {"full_attention": _ROPES["yarn"] | {"rope_theta": 500.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}  # fmt: skip
_FACTORS = {"short_factor": [1.0, 1.2, 2.0], "long_factor": [1.0, 2.0, 4.0], "original_max_position_embeddings": 96}
LONGROPE = {"rope_type": "longrope", "partial_rotary_factor": 0.5, "rope_theta": 1e4, **_FACTORS}
_GROWTH = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 500.0,
           "max_position_embeddings": 96}  # fmt: skip
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA
    | {
        "biased": {"attention_bias": True, **_GROUPED},
        "with biases of its network": {"mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        **{f"{kind} rope": {"rope_parameters": {**rope, "rope_theta": 500.0}} for kind, rope in _ROPES.items()},
    },
    "mistral": {
        "wide heads": {"head_dim": 10, "sliding_window": None, **_GROUPED},
        "window": {"sliding_window": 4, "tie_word_embeddings": True, **_GROUPED},
    },
    "ministral": {"windows": {"sliding_window": 6, "layer_types": _TYPES, "head_dim": 6, **_GROUPED}},
    "qwen2": {"tied": {"tie_word_embeddings": True, **_GROUPED}, "windows": _SLIDING},
    "qwen3": {
        "wide heads": {"head_dim": 10, **_GROUPED},
        "windows, biased": {"head_dim": 4, "attention_bias": True, **_SLIDING},
    },
    "olmo2": {"plain": {}, "grouped heads": {"attention_bias": True, "rope_theta": 5e5, **_GROUPED}},
    "olmo3": {
        "windows": {"sliding_window": 5, "layer_types": _TYPES},
        "yarn": {"sliding_window": 5, "layer_types": _TYPES, "rope_parameters": _YARN, **_GROUPED},
    },
    "cwm": {
        "windows": {"sliding_window": 5, "head_dim": 10, **_GROUPED},
        "biased": {"sliding_window": 5, "layer_types": _TYPES, "mlp_bias": True, "head_dim": 4, **_GROUPED},
    },
    "phi3": {
        "window": {"sliding_window": 6},
        "longrope": {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": LONGROPE,
                     "max_position_embeddings": 384, "original_max_position_embeddings": 96},
    },
    "gemma": {"wide heads": _GEMMA, "untied": {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True}},
    "gemma2": {
        "capped": {**_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
                   "final_logit_softcapping": 3.0},
        "one cap": {**_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 10, "attn_logit_softcapping": None,
                    "final_logit_softcapping": 3.0},
    },
    "gemma3_text": {
        "two bases": {**_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 10, "sliding_window_pattern": 2},
        "linear": {**_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": _TYPES,
                   "rope_parameters": _LOCAL, "final_logit_softcapping": 3.0},
    },
    "gemma4_text": {
        "shared keys": {**_GEMMA4, "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "attention_bias": True,
                        "final_logit_softcapping": 3.0},
        "keys as values": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3,
                           "hidden_activation": "silu", "tie_word_embeddings": False},
        "one kind of layers": {**_GEMMA4, "layer_types": ["full_attention"] * 4, "hidden_size_per_layer_input": 0},
    },
    "gpt_neox": {
        "parallel": {"num_attention_heads": 2, "rotary_pct": 0.5},
        "one by one": {"num_attention_heads": 2, "rotary_pct": 0.34, "rotary_emb_base": 500, "attention_bias": False,
                       "use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
    },
    "smollm3": {
        "some without positions": {"no_rope_layers": [0, 1], **_GROUPED},
        "windows": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5, **_GROUPED},
    },
    "exaone4": {
        "all rotate": {"sliding_window": None, "layer_types": ["full_attention"] * 2, **_GROUPED},
        "windows": {"sliding_window": 5, "sliding_window_pattern": 2, "head_dim": 10, **_GROUPED},
    },
    "granite": {
        "factors": {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
                    "logits_scaling": 4.0, "tie_word_embeddings": True, **_GROUPED},
        "biased": {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 1.5, "attention_multiplier": 0.4},
    },
    "granitemoehybrid": {
        "rotary": {**GRANITE4, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
                   "logits_scaling": 4.0, "position_embedding_type": "rope", "attention_bias": True,
                   "tie_word_embeddings": True, **_GROUPED},
        "without positions": {**GRANITE4, "attention_multiplier": 0.4},
        "mamba": {**GRANITE4, **MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                  "num_hidden_layers": 3, "residual_multiplier": 0.5, "logits_scaling": 2.0, **_GROUPED},
        "mamba with experts": {**GRANITE4, **MAMBA, "num_local_experts": 5, "num_experts_per_tok": 3,
                               "layer_types": ["linear_attention", "full_attention"], "residual_multiplier": 0.5,
                               "embedding_multiplier": 3.0, "router_aux_loss_coef": 0.5, **_GROUPED},
        "mamba in groups": {**GRANITE4, **MAMBA, "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_conv_bias": False,
                            "mamba_n_heads": 6, "mamba_d_head": 8, "layer_types": ["full_attention",
                            "linear_attention"], "position_embedding_type": "rope", "attention_multiplier": 0.4},
    },
    "phi": {"plain": {"num_attention_heads": 3}, "tied": {"num_attention_heads": 2, "tie_word_embeddings": True,
                      "num_key_value_heads": 1, "hidden_act": "gelu"}},
    "stablelm": {
        "one by one": {"num_attention_heads": 4, "num_key_value_heads": 2, "partial_rotary_factor": 0.34},
        "parallel": {"num_attention_heads": 2, "num_key_value_heads": 2, "use_qkv_bias": True,
                     "partial_rotary_factor": 0.5, "use_parallel_residual": True, "tie_word_embeddings": True},
    },
    "seed_oss": {
        "wide heads": {"head_dim": 10, "residual_dropout": 0.0, "attention_dropout": 0.0, **_GROUPED},
        "biased": {"attention_out_bias": True, "mlp_bias": True, "head_dim": 4, "tie_word_embeddings": True,
                   "rope_theta": 500.0, **_GROUPED},
    },
    "ernie4_5": {
        "wide heads": {"head_dim": 10, **_GROUPED},
        "biased": {"use_bias": True, "head_dim": 4, "tie_word_embeddings": False, **_GROUPED},
    },
    "hunyuan_v1_dense": {
        "alpha": {"head_dim": 10, **_GROUPED,
                  "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 500.0}},
        "biased": {"head_dim": 4, "attention_bias": True, "tie_word_embeddings": True},
    },
    "ministral3": {
        "growing queries": {"head_dim": 10, "rope_parameters": {**_GROWTH, "llama_4_scaling_beta": 0.1}, **_GROUPED},
        "window": {"head_dim": 4, "rope_parameters": {**_GROWTH, "rope_type": "default", "llama_4_scaling_beta": 0.3},
                   "sliding_window": 5, "tie_word_embeddings": True, **_GROUPED},
    },
    "helium": {"plain": {"head_dim": 4, "num_key_value_heads": 6, "attention_bias": True}},
    "glm": {
        "half": {"head_dim": 12, **_GROUPED},
        "a third": {"head_dim": 6, "attention_bias": False, "num_key_value_heads": 6, "tie_word_embeddings": True,
                    "partial_rotary_factor": 0.34},
    },
    "glm4": {"norms on both sides": {"head_dim": 8, **_GROUPED}},
    "starcoder2": {"plain": _GROUPED, "window": {"sliding_window": 5, "tie_word_embeddings": False, **_GROUPED}},
    "mixtral": {"window": {"num_local_experts": 5, "sliding_window": 6, **_GROUPED}},
    "granitemoe": {
        "factors": {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
                    "logits_scaling": 4.0, "num_local_experts": 4, "attention_bias": True, **_GROUPED},
    },
    "gpt_oss": {
        "yarn": {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 5,
                 "router_aux_loss_coef": 0.5, **_GROUPED},
        "few biases": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": False, "head_dim": 4,
                       "layer_types": _TYPES[::-1], "sliding_window": 4, "num_key_value_heads": 3,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": True},
    },
    "olmoe": {"three of five": {"num_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True, **_GROUPED}},
    "qwen2_moe": {
        "shared, one layer dense": {"num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [1],
                                    "num_hidden_layers": 3, **_SHARED, **_GROUPED},
        "windows": {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True, "qkv_bias": False, **_SHARED,
                    **_SLIDING},
    },
    "qwen3_moe": {
        "every other layer": {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 8,
                              "decoder_sparse_step": 2, "num_hidden_layers": 3, **_MOE, **_GROUPED},
        "windows, biased": {"num_experts": 3, "num_experts_per_tok": 1, "attention_bias": True, **_MOE, **_SLIDING},
    },
    "qwen3_5_text": {
        "grouped heads": {**_LINEAR, "layer_types": _LINEAR_TYPES, "num_hidden_layers": 3},
        "tied, biased": {**_LINEAR, "linear_num_value_heads": 2, "head_dim": 16, "attention_bias": True,
                         "linear_conv_kernel_dim": 3, "tie_word_embeddings": True, "layer_types": _LINEAR_TYPES[1:]},
    },
    "qwen3_5_moe_text": {
        "plain": {**_LINEAR, **_SHARED, "num_experts": 5, "num_experts_per_tok": 2, "layer_types": _LINEAR_TYPES[:2]},
    },
    "lfm2": {
        "short convolutions": {"layer_types": _CONV_TYPES, "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False,
                               **_GROUPED},
        "untied": {"layer_types": _CONV_TYPES[:2], "conv_L_cache": 4, "norm_eps": 1e-4,
                           "tie_word_embeddings": False, "block_multiple_of": 16, "num_key_value_heads": 6},
    },
    "lfm2_moe": {
        "one layer dense": {"layer_types": _CONV_TYPES, "num_hidden_layers": 3, "num_experts": 5, "num_dense_layers": 1,
                            "num_experts_per_tok": 2, "routed_scaling_factor": 1.7, **_MOE, **_GROUPED},
        "weights as they are": {"layer_types": _CONV_TYPES[:2], "num_experts": 4, "num_dense_layers": 0,
                                "num_experts_per_tok": 3, "use_expert_bias": False, "norm_topk_prob": False,
                                "tie_word_embeddings": False, **_MOE, **_GROUPED},
    },
    "glm4_moe": {
        "one layer dense": {"n_routed_experts": 6, "num_experts_per_tok": 2, "head_dim": 12, "use_qk_norm": True,
                            "routed_scaling_factor": 1.7, "n_shared_experts": 2, **_MOE, **_GROUPED},
        "biased": {"n_routed_experts": 5, "num_experts_per_tok": 3, "head_dim": 6, "attention_bias": True,
                   "norm_topk_prob": False, "first_k_dense_replace": 0, "partial_rotary_factor": 0.34, **_MOE,
                   "num_key_value_heads": 6},
    },
    "afmoe": {
        "windows": {"num_experts": 5, "num_experts_per_tok": 2, "num_dense_layers": 1, "head_dim": 10,
                    "route_scale": 1.7, "num_shared_experts": 2, "mup_enabled": True, "sliding_window": 5,
                    "num_hidden_layers": 3, "global_attn_every_n_layers": 2, **_MOE, **_GROUPED},
        "tied": {"num_experts": 4, "num_experts_per_tok": 3, "num_dense_layers": 0, "head_dim": 4, **_MOE,
                 "num_shared_experts": 1, "layer_types": _TYPES[::-1], "sliding_window": 4,
                 "tie_word_embeddings": True, **_GROUPED},
    },
    "ernie4_5_moe": {
        "one layer dense": {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, **_MOE, **_GROUPED},
        "nothing shared": {"moe_num_experts": 4, "moe_k": 3, "moe_num_shared_experts": 0, "moe_layer_start_index": 0,
                           "tie_word_embeddings": False, **_MOE, **_GROUPED},
    },
    "qwen3_next": {
        "one layer dense": {**_LINEAR, **_SHARED, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1],
                            "layer_types": _LINEAR_TYPES, "num_hidden_layers": 3},
        "weights as they are": {**_LINEAR, **_SHARED, "num_experts": 3, "num_experts_per_tok": 2,
                                "norm_topk_prob": False, "linear_num_value_heads": 6, "layer_types": _LINEAR_TYPES[:2]},
    },
}  # fmt: skip
CASES = {
    f"{kind} {variant}": Case(kind, options | (_DROPOUT if kind == "gpt2" else {}))
    for kind, variants in _VARIANTS.items()
    for variant, options in variants.items()
}


def _gemma4(
    kind: str, rng: random.Random, types: list[str], kv_heads: tuple[int, ...], head_dim: int, window: int
) -> dict[str, Any]:
    """Draws the options of a Gemma 4 with layers of these types; none for other families."""
    if kind != "gemma4_text":
        return {}
    flip = lambda: rng.random() < 0.5  # noqa: E731
    part = rng.choice((0.25, 0.5, 1.0))
    full = {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": 700.0}
    return {
        "num_hidden_layers": len(types), "layer_types": types, "head_dim": head_dim, "sliding_window": window,
        "global_head_dim": 2 * rng.randint(2, 8), "num_kv_shared_layers": rng.choice((0, 1, len(types) - 2)),
        "attention_k_eq_v": flip(), "num_global_key_value_heads": rng.choice((None, *kv_heads)),
        "hidden_size_per_layer_input": rng.choice((3, 8)), "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": flip(), "final_logit_softcapping": rng.choice((None, 2.5)),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    }  # fmt: skip


# Families whose hidden_size need not be a multiple of the heads.
_FREE = ("mistral", "ministral", "ministral3", "qwen3", "gemma", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "glm",
         "glm4", "glm4_moe", "afmoe")  # fmt: skip


def _drawn_rope(kind: str, rng: random.Random, dim: int, options: dict[str, Any]) -> dict[str, Any]:
    """Draws rotary parameters, and adds other options of rotations to those given."""
    flip = lambda: rng.random() < 0.5  # noqa: E731
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice((100.0, 10_000.0, 1e6))}
    if kind not in ("gpt2", "phi3"):
        rope |= rng.choice([{}, *(each for name, each in _ROPES.items() if name != "dynamic" or kind != "gemma3_text")])
    if kind in ("gpt_neox", "phi", "stablelm", "glm", "glm4", "glm4_moe", "qwen3_5_text", "qwen3_5_moe_text",
                "qwen3_next"):  # fmt: skip
        rope["partial_rotary_factor"] = rng.choice([part / dim for part in range(4, dim + 1, 2)])
    if kind == "hunyuan_v1_dense" and flip():
        rope = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": rope["rope_theta"]}
        rope["alpha"] = rng.choice((1.5, 1000.0))
    if kind == "ministral3":
        rope = {"original_max_position_embeddings": rng.choice((5, 96)), **rope}
        rope["llama_4_scaling_beta"] = rng.choice((0.0, 0.1, 0.7))
    if kind == "phi3" and flip():
        part = rng.choice(range(4, dim + 1, 2))
        factors = {f"{name}_factor": [rng.uniform(1, 4) for _ in range(part // 2)] for name in ("short", "long")}
        rope |= {"rope_type": "longrope", "partial_rotary_factor": part / dim, **factors}
        options |= {"original_max_position_embeddings": 96, "max_position_embeddings": rng.choice((96, 300))}
    if kind in ("olmo3", "gemma3_text"):
        local = rope["rope_theta"] if kind == "olmo3" and flip() else 500.0
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return rope


def drawn(kind: str, seed: int) -> Case:
    """Draws a config of a family with random options and 96 positions."""
    rng = random.Random(f"{kind} {seed}")
    flip = lambda: rng.random() < 0.5  # noqa: E731
    kv = rng.choice((1, 2, 3))
    heads, depth = kv * rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    head_dim = rng.choice((4, 6, 8, 10, 12))
    free = kind in _FREE
    hidden = 2 * rng.randint(6, 16) if free else heads * rng.choice((4, 6, 8))
    options: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": depth, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": rng.randint(5, 50), "tie_word_embeddings": flip(),
    }  # fmt: skip
    if kind in ("gpt2", "gpt_neox"):
        del options["num_key_value_heads"]
    if kind in (*_FREE, "llama", "qwen2", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "helium",
                "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):  # fmt: skip
        own = free or flip() or "linear_num_key_heads" in FIELDS[kind]
        options["head_dim"] = head_dim if own and kind not in ("phi3", "helium") else hidden // heads
    dim = options.get("head_dim", hidden // heads)
    if kind == "gpt2":
        options |= {"n_inner": options.pop("intermediate_size"), **_DROPOUT}
        options["activation_function"] = rng.choice(("gelu_new", "gelu", "relu", "silu"))
    biased = ("llama", "qwen3", "olmo2", "olmo3", "gpt_neox", "gemma", "gemma2", "gemma3_text", "granite", "gpt_oss",
              "seed_oss", "hunyuan_v1_dense", "helium", "glm", "glm4", "qwen3_5_text", "qwen3_5_moe_text",
              "qwen3_next")  # fmt: skip
    if kind in biased:
        options["attention_bias"] = flip()
    if kind == "ernie4_5":
        options["use_bias"] = flip()
    if kind in ("llama", "smollm3", "granite", "seed_oss", "helium"):
        options["mlp_bias"] = flip()
    window = rng.randint(2, 12)
    types = [rng.choice(_TYPES) for _ in range(depth)]
    if kind in ("mistral", "ministral3", "phi3", "starcoder2", "mixtral"):
        options["sliding_window"] = window if flip() else None
    elif kind in ("ministral", "exaone4", "olmo3", "gemma2", "gemma3_text", "gpt_oss"):
        options |= {"sliding_window": window, "layer_types": types}
    elif kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        options |= {"use_sliding_window": flip(), "sliding_window": window, "max_window_layers": rng.randint(0, depth)}
    rope = _drawn_rope(kind, rng, dim, options)
    if kind != "gpt2":
        options["rope_parameters"] = rope
    if kind in ("gemma2", "gemma3_text"):
        options |= {"query_pre_attn_scalar": rng.choice((dim, 7, 20))}
        options["final_logit_softcapping"] = rng.choice((None, 2.5))
    if kind == "gemma2":
        options["attn_logit_softcapping"] = rng.choice((None, 1.5))
    if kind in ("gpt_neox", "stablelm"):
        options["use_parallel_residual"] = flip()
    options |= _drawn_routers(kind, rng, depth)
    if "num_experts_per_tok" in FIELDS[kind] and kind not in ("granitemoehybrid", *_BY_OTHER_NUMBERS):
        experts = rng.randint(2, 9)  # of one alone, a router learns nothing
        total = "num_local_experts" if kind in ("granitemoe", "gpt_oss") else "num_experts"
        options |= {total: experts, "num_experts_per_tok": rng.randint(2, experts)}
        if "norm_topk_prob" in FIELDS[kind]:
            options["norm_topk_prob"] = flip()
        if "decoder_sparse_step" in FIELDS[kind]:
            options |= {"decoder_sparse_step": rng.randint(1, min(2, depth)), "mlp_only_layers": [0][: depth - 1]}
        if "moe_intermediate_size" in FIELDS[kind]:
            options |= _SHARED if "shared_expert_intermediate_size" in FIELDS[kind] else _MOE
    options |= _gemma4(kind, rng, [*_TYPES, *types, "full_attention"], (1, kv, heads), head_dim, window)
    if kind == "smollm3":
        options["no_rope_layers"] = [rng.randrange(2) for _ in range(depth)]
    if kind == "granitemoehybrid":
        options |= {**GRANITE4, "layer_types": ["full_attention"] * depth}
        options["position_embedding_type"] = rng.choice(("rope", None))
        options |= _drawn_mamba(rng, depth, hidden)
    if kind.startswith("granite"):
        options |= {
            f"{name}_multiplier": rng.choice((0.3, 1.0, 4.0)) for name in ("embedding", "residual", "attention")
        }
        options["logits_scaling"] = rng.choice((1.0, 3.0))
    if kind == "stablelm":
        options["use_qkv_bias"] = flip()
    options |= _drawn_convolutions(kind, rng, depth)
    if "linear_num_key_heads" in FIELDS[kind]:
        options |= _drawn_linear(rng, depth)
    return Case(kind, options)


# Families that choose experts by other numbers than their weights, each with the names of five of its settings: the
# number of experts, those of a token, shared ones, layers without any, and the factor of the weights; "": none.
_BY_OTHER_NUMBERS = {
    "lfm2_moe": ("num_experts", "num_experts_per_tok", "", "num_dense_layers", "routed_scaling_factor"),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace",
                 "routed_scaling_factor"),
    "afmoe": ("num_experts", "num_experts_per_tok", "num_shared_experts", "num_dense_layers", "route_scale"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_layer_start_index", ""),
}  # fmt: skip


def _drawn_routers(kind: str, rng: random.Random, depth: int) -> dict[str, Any]:
    """Draws the options of the experts of one of `_BY_OTHER_NUMBERS`; none for other families."""
    if kind not in _BY_OTHER_NUMBERS:
        return {}
    total, per_token, shared, dense, factor = _BY_OTHER_NUMBERS[kind]
    experts, flip = rng.randint(2, 9), lambda: rng.random() < 0.5
    drawn = {
        total: experts, per_token: rng.randint(2, experts), shared: rng.randint(1, 3), dense: rng.randrange(depth),
        factor: rng.choice((1.0, 0.4, 2.5)), "moe_intermediate_size": rng.randint(5, 30),
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "lfm2_moe": {"norm_topk_prob": flip(), "use_expert_bias": flip()},
        "glm4_moe": {"norm_topk_prob": flip(), "use_qk_norm": flip(), "attention_bias": flip()},
        "afmoe": {"mup_enabled": flip(), "sliding_window": 5,
                  "layer_types": [rng.choice(_TYPES) for _ in range(depth)]},
    }  # fmt: skip
    return {name: value for name, value in {**drawn, **own.get(kind, {})}.items() if name}


def _drawn_convolutions(kind: str, rng: random.Random, depth: int) -> dict[str, Any]:
    """Draws the options of an LFM2; none for other families."""
    full, flip = rng.randrange(depth), lambda: rng.random() < 0.5
    drawn = {
        "layer_types": [_CONV_TYPES[layer == full or flip()] for layer in range(depth)],
        "conv_L_cache": rng.randint(1, 5), "block_auto_adjust_ff_dim": flip(),
        "block_multiple_of": rng.choice((1, 16)), "block_ffn_dim_multiplier": rng.choice((0.8, 1.0, 2)),
    }  # fmt: skip
    drawn = drawn if kind == "lfm2" else {name: drawn[name] for name in ("layer_types", "conv_L_cache")}
    return drawn if kind.startswith("lfm2") else {}


def _drawn_mamba(rng: random.Random, depth: int, hidden: int) -> dict[str, Any]:
    full, groups, expand = rng.randrange(depth), rng.choice((1, 2)), rng.choice((1, 2, 3))
    heads = rng.choice([n for n in range(groups, expand * hidden + 1, groups) if expand * hidden % n == 0])
    return {
        "layer_types": [rng.choice(_LINEAR_TYPES[:2]) if layer != full else "full_attention" for layer in range(depth)],
        "mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": rng.randint(1, 20),
        "mamba_d_head": expand * hidden // heads, "mamba_expand": expand, "mamba_d_conv": rng.randint(1, 5),
        "mamba_conv_bias": rng.random() < 0.5, "num_local_experts": rng.choice((0, 3)), "num_experts_per_tok": 2,
    }  # fmt: skip


def _drawn_linear(rng: random.Random, depth: int) -> dict[str, Any]:
    keys, full = rng.choice((1, 2, 3)), rng.randrange(depth)
    types = [rng.choice(_LINEAR_TYPES[:2]) for _ in range(depth)]
    return {
        "layer_types": [_LINEAR_TYPES[1] if layer == full else kind for layer, kind in enumerate(types)],
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.randint(3, 20), "linear_value_head_dim": rng.randint(1, 20),
        "linear_conv_kernel_dim": rng.randint(1, 5),
    }  # fmt: skip
