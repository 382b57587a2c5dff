"""The models in GGUF files: their values as the settings of transformers' families, their tensors under those names.

llama.cpp stores the numbers of a family as they are, with these exceptions. In a "llama", the rows of the projections
to queries and keys are in another order, that of rotations of neighbours. The norms of a Gemma are stored plus 1. The
scaling of rotary positions may be a tensor of divisors. `linear_attention.py` has those of Qwen3.5.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.gguf.architectures import ARCHITECTURES, GPT2_SETTINGS, MIXTRAL, SETTINGS, Architecture
from fastformer.checkpoints.gguf.blocks import BLOCKS, Kind, numbers
from fastformer.checkpoints.gguf.file import GGUF, Stored, first_value, read_gguf
from fastformer.checkpoints.gguf.gemma4 import gemma4_settings
from fastformer.checkpoints.gguf.linear_attention import BARE, linear_settings, linear_tensors
from fastformer.checkpoints.gguf.mamba import key_heads, mamba_settings, mamba_tensor
from fastformer.checkpoints.gguf.tokenizers import Vocabulary, decoder_tokenizer, encoder_tokenizer, read_vocabulary
from fastformer.checkpoints.hf import FAMILIES, encoding_family
from fastformer.checkpoints.hf.common import Checkpoint, check_empty, load_foreign, taken
from fastformer.checkpoints.hf.lfm2 import EXPERTS as LFM2_EXPERTS
from fastformer.checkpoints.hf.mixtures import GLM_EXPERTS, TRINITY_EXPERTS
from fastformer.checkpoints.hf.neighbours import ERNIE_EXPERTS
from fastformer.checkpoints.hf.quantized import set_precision
from fastformer.data import Tokenizer
from fastformer.models import BERT, GPT
from fastformer.models.bert_config import BERTConfig
from fastformer.models.pretrained import check_depth
from fastformer.models.quantization import INT4, INT8
from fastformer.models.weights import check_finite
from fastformer.special_ids import SpecialIds

_ARCHITECTURE = "general.architecture"
_FURTHER = "nextn_predict_layers"  # behind the others: they predict further tokens, which the family doesn't read
_ENCODERS = ("bert", "nomic-bert")
_OWN_HEADS = ("gemma4", "lfm2", "lfm2moe", "granitehybrid")  # their layers have other numbers of key heads, or none
_LENGTH = "original_max_position_embeddings"
_ROPE = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
# The depths of the two Gemmas whose scores are scaled by their width instead of the size of a head.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_NOMIC = {
    "attn_qkv": "self_attn.in_proj", "attn_output": "self_attn.out_proj", "attn_output_norm": "norm1",
    "ffn_down": "linear2", "layer_output_norm": "norm2",
}  # fmt: skip
# A file's defaults of sampling, each with the option of a search.
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip


def architecture_of(path: str | os.PathLike[str]) -> str | None:
    """Returns "GPT" or "BERT"; None: a file that fastformer can't load."""
    try:
        name = first_value(path, _ARCHITECTURE)
        if name is None:  # a part of a split model, of which the first has the values
            name = read_gguf(path).values.get(_ARCHITECTURE)
    except (OSError, ValueError):
        return None
    return None if name not in ARCHITECTURES else "BERT" if name in _ENCODERS else "GPT"


def load_file(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    encodes: bool = False,
) -> tuple[GPT | BERT, Tokenizer]:
    """Loads the model and the tokenizer of a GGUF file.

    The weights are the file's numbers. If most of them are of kinds that have groups in `BLOCKS`, the model's precision
    is int4, with these; if they are of other quantised kinds, it is int8, for which the engine rounds them again.

    Args:
        path: the file; of a split model, any of its files.
        device: the device of the parameters; None: the CPU.
        dtype: the dtype of the parameters; None: bf16 for a model of bf16, else fp32.
        encodes: whether a decoder is to encode texts: without its output layer, with the file's tokens around a text.

    Raises:
        ImportError: the library of the tokenizer is not installed.
        ValueError: the file is damaged, or it has a model or a tokenizer that fastformer doesn't have.
    """
    file = read_gguf(path)
    values = _Values(file)
    vocabulary = read_vocabulary(file.path, file.values)
    is_encoder = values.name in _ENCODERS
    encodes = encodes and not is_encoder
    unk, make_tokenizer = (
        encoder_tokenizer(vocabulary) if is_encoder else decoder_tokenizer(vocabulary, encodes=encodes)
    )
    if dtype is None:
        kinds = {stored.kind for stored in file.tensors.values() if len(stored.shape) > 1}
        dtype = torch.bfloat16 if kinds == {Kind.BF16} else torch.float32
    try:
        model: Any
        if values.name == "nomic-bert":
            model = _nomic_bert(file, values, vocabulary, unk, device, dtype)
        else:
            settings = _settings(file, values, vocabulary)
            architecture = values.architecture
            state, kind = _state(file, values, architecture, settings), architecture.kind
            family = FAMILIES[kind]
            if values.raw("attention.causal") is False and not is_encoder:
                if not encodes:
                    raise ValueError("expected causal attention to generate with, got a model that sees later tokens")
                settings["is_causal"] = False
            if encodes:
                family = encoding_family(kind) or family
            model = family.to_model(Checkpoint(settings, state, unk, device=device, dtype=dtype))
        _note_precision(file, model)
        return model, make_tokenizer(model.config)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{file.path}: {error}") from error


def pooling_of(path: str | os.PathLike[str]) -> str | None:
    """Returns how the rows of an encoder become one: "mean", "cls" or "lasttoken"; None: the file doesn't say."""
    values = _Values(read_gguf(path))
    kind = values.number("pooling_type", 0)
    if kind not in (0, *_POOLINGS):
        raise ValueError(f"expected a pooling_type in {(0, *_POOLINGS)} in {path}, got {kind}")
    return _POOLINGS.get(int(kind))


def search_options(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns a file's options of a search, under the names of generation_config.json."""
    values = read_gguf(path).values
    named = {option: values.get(f"general.sampling.{name}") for name, option in _SAMPLING.items()}
    # A float of the file is fp32: 0.7 would be 0.699999988.
    given = {
        option: round(value, 6) if isinstance(value, float) else value
        for option, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {**given, "do_sample": True} if given else {}


class _Values:
    """The values of a file's architecture.

    Attributes:
        name: the architecture.
    """

    def __init__(self, file: GGUF) -> None:
        name = file.values.get(_ARCHITECTURE)
        if name not in ARCHITECTURES:
            raise ValueError(f"expected a model in {', '.join(ARCHITECTURES)}, got {name!r:.60}: {file.path}")
        self.name, self._file = str(name), file

    @property
    def architecture(self) -> Architecture:
        """What the file's architecture is, which depends on its experts."""
        architecture, has_experts = ARCHITECTURES[self.name], self.number("expert_count", 0)
        if self.name == "granitehybrid":
            return architecture if has_experts else architecture._replace(experts={})
        return MIXTRAL if self.name == "llama" and has_experts else architecture

    def raw(self, key: str) -> Any:
        return self._file.values.get(f"{self.name}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """Returns a number, which a list may repeat for each layer."""
        value = self.raw(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"expected {self.name}.{key} of {self._file.path} to be a number, got {value!r:.60}")
        return value

    def settings(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns settings by their keys in the file, without those that the file lacks."""
        return {name: self.number(key) for name, key in names.items() if self.raw(key) is not None}


# The setting of the eps in architectures with LayerNorm.
_EPS = {
    "gpt2": "layer_norm_epsilon",
    "starcoder2": "norm_epsilon",
    "phi2": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
}
# The settings of biases, each with a tensor that has one.
_BIASES: dict[str, dict[str, str]] = {
    "hunyuan_v1_dense": {"attention_bias": "attn_q"},
    "seed_oss": {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"},
    "ernie4_5": {"use_bias": "attn_q"},
    "glm4": {"attention_bias": "attn_q"},
    "glm4_moe": {"attention_bias": "attn_q"},
}
_BUT_HEADS = {name: key for name, key in SETTINGS.items() if name != "num_key_value_heads"}
_GRANITE = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale", "residual_multiplier":
    "residual_scale",
}  # fmt: skip


def _settings(file: GGUF, values: _Values, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the settings of a model, as its config.json would have them."""
    ids, name, architecture = vocabulary.ids, values.name, values.architecture
    settings: dict[str, Any] = {
        "model_type": architecture.kind,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": ids.get("bos"),
        "eos_token_id": vocabulary.ends,
        "pad_token_id": ids.get("padding"),
        **({} if name in _OWN_HEADS else values.settings(GPT2_SETTINGS if name == "gpt2" else SETTINGS)),
    }
    count = values.number("expert_count", 0)
    if bool(count) != bool(architecture.experts):
        raise ValueError(f"expected a {name} with {'' if architecture.experts else 'no '}experts, got {count}")
    check_depth("num_hidden_layers", values.number("block_count"), len(file.tensors), file.path)
    if name == "bert":
        return settings | _bert_settings(file, values, vocabulary)
    if name == "gemma4":
        divisors = None if (found := file.tensors.get(_ROPE[0])) is None else _numbers(found)
        return settings | gemma4_settings(file, values, divisors)
    if name.startswith("lfm2"):
        settings |= _lfm2_settings(values)
    if name == "granitehybrid":
        settings |= {**values.settings(_BUT_HEADS), **mamba_settings(file, values)}
    eps = _EPS.get(name, "rms_norm_eps")
    settings[eps] = values.number(f"attention.layer_norm_{'rms_' if eps == 'rms_norm_eps' else ''}epsilon")
    if name == "gpt2":
        return settings
    if values.raw(_FURTHER):
        settings["num_hidden_layers"] -= int(values.number(_FURTHER))
    if "ssm_alpha" in architecture.layer:
        settings |= linear_settings(values, settings["num_hidden_layers"])
    if settings.get("sliding_window") == 0:
        del settings["sliding_window"]
    # Families may have other usual values.
    settings.setdefault("rope_theta", 10_000.0)
    heads = values.number("attention.head_count")
    settings.setdefault("num_key_value_heads", heads)
    settings.setdefault("head_dim", max(1, values.number("embedding_length") // max(1, heads)))
    if (size := values.raw("attention.value_length")) not in (None, settings["head_dim"]):
        raise ValueError(f"expected keys and values of one length, got {settings['head_dim']} and {size}")
    if architecture.experts:
        settings |= _expert_settings(file, values)
    settings |= {
        flag: f"blk.0.{part}.bias" in file.tensors for flag, part in _BIASES.get(architecture.kind, {}).items()
    }
    if architecture.kind == "llama":
        settings.pop("sliding_window", None)  # llama.cpp doesn't read it either
        settings |= {
            flag: any(key.endswith(f"{part}.bias") for key in file.tensors)
            for flag, part in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up"))
        }
    elif name in ("qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3"):
        settings["use_sliding_window"] = "sliding_window" in settings
    elif name.startswith("granite"):
        settings |= {"attention_multiplier": settings["head_dim"] ** -0.5, **values.settings(_GRANITE)}
        settings["logits_scaling"] = values.number("logit_scale")
    elif name.startswith("gemma"):
        settings |= _gemma_settings(values, settings)
    elif name == "seed_oss":
        settings |= {"attention_dropout": 0.0, "residual_dropout": 0.0}  # which no file has
    if name == "stablelm":
        has_bias = "blk.0.attn_q.bias" in file.tensors
        settings |= {"use_parallel_residual": values.raw("use_parallel_residual"), "use_qkv_bias": has_bias}
    rope = _rope(file, values, settings)
    return settings | (_growing(values, settings, rope) if name == "mistral3" else rope)


def _lfm2_settings(values: _Values) -> dict[str, Any]:
    """Returns the settings of an LFM2, whose layers that don't attend have no key heads."""
    heads = key_heads(values)
    return {
        **values.settings(_BUT_HEADS),
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": values.number("shortconv.l_cache"),
        **({"block_auto_adjust_ff_dim": False} if values.name == "lfm2" else {}),
    }


def _expert_settings(file: GGUF, values: _Values) -> dict[str, Any]:
    """Returns the settings about experts."""
    name, kind = values.name, values.architecture.kind
    if "exp_probs_b" in values.architecture.layer:
        return _biased_settings(file, values)
    total = "num_experts" if kind.startswith(("olmoe", "qwen")) else "num_local_experts"
    counts = {total: "expert_count", "num_experts_per_tok": "expert_used_count"}
    settings: dict[str, Any] = {setting: values.number(key) for setting, key in counts.items()}
    if name == "gpt-oss":
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if name in ("qwen2moe", "qwen3moe", "qwen35moe"):
        settings["moe_intermediate_size"] = _size_of(file, "blk.0.ffn_gate_exps.weight", 1)
    if name in ("qwen2moe", "qwen3moe"):
        settings["norm_topk_prob"] = name == "qwen3moe"
    if name in ("qwen2moe", "qwen35moe"):
        settings["shared_expert_intermediate_size"] = _size_of(file, "blk.0.ffn_gate_shexp.weight", 0)
    if name == "qwen2moe":
        settings["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    scale = values.number("expert_weights_scale", 1.0)
    if scale not in (0.0, 1.0):
        raise ValueError(f"expected weights of experts that are not scaled, got expert_weights_scale {scale:g}")
    return settings


# Those of families that choose experts by other numbers than their weights, and the number of "sigmoid" in GGUF.
_BIASED = {"glm4_moe": GLM_EXPERTS, "afmoe": TRINITY_EXPERTS, "lfm2_moe": LFM2_EXPERTS, "ernie4_5_moe": ERNIE_EXPERTS}
_SIGMOID = 2


def _biased_settings(file: GGUF, values: _Values) -> dict[str, Any]:
    """Returns the settings about experts that are chosen by other numbers than their weights."""
    kind = values.architecture.kind
    names, usual = _BIASED[kind], 0 if kind == "ernie4_5_moe" else _SIGMOID
    if (function := values.number("expert_gating_func", usual)) != usual:
        raise ValueError(f"expected an expert_gating_func of {usual} in {file.path}, got {function!r}")
    if (step := values.number("interleave_moe_layer_step", 1)) not in (0, 1):
        raise ValueError(f"expected experts in each layer but the first, got one in {step} in {file.path}")
    first = int(values.number("leading_dense_block_count", 0))
    size = _size_of(file, f"blk.{first}.ffn_gate_exps.weight", 1)
    settings: dict[str, Any] = {
        names.total: values.number("expert_count"),
        names.per_token: values.number("expert_used_count"),
        str(names.first_dense): first,
        "moe_intermediate_size": size,
    }
    if names.shared:
        shared = file.tensors.get(f"blk.{first}.ffn_gate_shexp.weight")
        settings[names.shared[2]] = 0 if shared is None else shared.shape[0] // max(1, size)
    if names.scale is not None:
        settings[names.scale] = float(values.number("expert_weights_scale", 0.0)) or 1.0
    if names.choice_bias[1:]:
        settings[names.choice_bias[1]] = f"blk.{first}.exp_probs_b.bias" in file.tensors
    is_normed = bool(values.raw("expert_weights_norm"))
    if kind == "glm4_moe":
        settings |= {"norm_topk_prob": is_normed, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
    if kind == "afmoe":
        if not is_normed or not values.raw("attention.sliding_window"):
            raise ValueError(f"expected an expert_weights_norm and a sliding_window in {file.path}, got none")
        settings["mup_enabled"] = True
    return settings


def _size_of(file: GGUF, name: str, dim: int) -> int:
    """Returns a size of a tensor of experts.

    Raises:
        ValueError: there is no such tensor, or one of fewer dimensions.
    """
    if name not in file.tensors or len(file.tensors[name].shape) <= dim + 1:
        raise ValueError(f"expected {name} of {dim + 2} dimensions in {file.path}, got none")
    return file.tensors[name].shape[dim]


def _bert_settings(file: GGUF, values: _Values, vocabulary: Vocabulary) -> dict[str, Any]:
    if values.raw("attention.causal") is True:
        raise ValueError("expected an encoder, which sees later tokens, got one with causal attention")
    return {
        "architectures": ["BertModel"],
        "layer_norm_eps": values.number("attention.layer_norm_epsilon"),
        "type_vocab_size": types.shape[0] if (types := file.tensors.get("token_types.weight")) else 0,
        "pad_token_id": vocabulary.ids.get("padding", 0),
        "eos_token_id": vocabulary.last,
    }


def _gemma_settings(values: _Values, settings: Mapping[str, Any]) -> dict[str, Any]:
    name, own = values.name, dict[str, Any]()
    if name == "gemma":
        return own
    width, heads, depth = (settings[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    is_by_width = heads > 0 and _SCALED_BY_WIDTH.get(name) == depth
    own["query_pre_attn_scalar"] = width // heads if is_by_width else settings["head_dim"]
    caps = {"final_logit_softcapping": "final_logit_softcapping", "attn_logit_softcapping": "attn_logit_softcapping"}
    own |= values.settings(caps)
    pattern = values.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        own["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    elif pattern is not None:
        own["sliding_window_pattern"] = values.number("attention.sliding_window_pattern")
    if name == "gemma3":
        own["rope_local_base_freq"] = values.number("rope.freq_base_swa", 10_000.0)
        if "sliding_window" not in settings:
            own["layer_types"] = ["full_attention"] * int(depth)
    return own


def _rope(file: GGUF, values: _Values, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary positions."""
    rope, limit = dict[str, Any](), settings.get("max_position_embeddings")
    dim, size = values.raw("rope.dimension_count"), settings["head_dim"]
    if values.name == "glm4" or (dim is not None and dim != size):
        rope["partial_rotary_factor"] = values.number("rope.dimension_count", size) / max(1, size)
    factors = [None if (each := file.tensors.get(name)) is None else _numbers(each).tolist() for name in _ROPE]
    divisors, short, long = factors
    short, long = (short, long) if divisors is None else (divisors, divisors)
    original = limit if values.raw(key := "rope.scaling.original_context_length") is None else values.number(key)
    kind = values.raw("rope.scaling.type") or "linear"
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0)) or 1.0
    attention = values.number("rope.scaling.attn_factor", 1.0)
    if short is not None and long is not None:
        if kind not in ("none", "linear", "longrope"):
            raise ValueError(
                f"expected a rope.scaling.type of none, linear or longrope next to factors, got {kind!r:.60}"
            )
        scale = 1.0 if kind == "none" else factor  # the positions are divided, too
        scaling = {
            "rope_type": "longrope",
            "short_factor": [scale * each for each in short],
            "long_factor": [scale * each for each in long],
            _LENGTH: original if divisors is None else limit,
            "attention_factor": attention,
        }
        return {**rope, "rope_scaling": scaling, _LENGTH: scaling[_LENGTH]}
    if attention != 1 and (kind != "yarn" or values.name == "gemma3"):  # whose layers with a window it scales, too
        raise ValueError(
            f"expected a rope.scaling.attn_factor of 1 for a scaling of type {kind!r:.60}, got {attention:g}"
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(f"expected a rope.scaling.type of none, linear or yarn, or factors, got {kind!r:.60}")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling[_LENGTH] = original
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(max(factor, 1.0)))
        yarn = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        scaling |= values.settings({name: f"rope.scaling.{key}" for name, key in yarn.items()})
        scaling |= {"truncate": False} if values.name == "gpt-oss" else {}  # as it was trained, unlike llama.cpp
    return {**rope, "rope_scaling": scaling}


def _growing(values: _Values, settings: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary positions with those by which the queries of a Ministral 3 grow."""
    scaling = dict(rope.get("rope_scaling") or {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        multiplier = values.number("rope.scaling.yarn_log_multiplier", 0.0)
        scaling["attention_factor"] /= 1 + 0.1 * multiplier * math.log(max(scaling["factor"], 1.0))
    usual = settings.get("max_position_embeddings", 1)
    length = scaling.get(_LENGTH, values.number("rope.scaling.original_context_length", usual))
    beta = values.number("attention.temperature_scale", 0.0)
    return {**rope, "rope_scaling": {**scaling, _LENGTH: int(length), "llama_4_scaling_beta": beta}}


def _numbers(stored: Stored) -> Tensor:
    return numbers(stored.kind, stored.shape, stored.data)


def _state(file: GGUF, values: _Values, architecture: Architecture, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors under the names of the family, with its numbers."""
    heads = int(values.number("attention.head_count"))
    kv_heads = int(settings.get("num_key_value_heads") or heads)
    state: dict[str, Tensor] = {}
    own_of = linear_tensors(settings) if "linear_num_key_heads" in settings else None
    for name in file.tensors:
        if name in _ROPE:
            continue
        layer, stem, kind = _parts(name)
        if layer is not None and values.raw(_FURTHER) and int(layer) >= settings["num_hidden_layers"]:
            continue  # predicts further tokens
        prefix = "" if layer is None else f"{architecture.prefix}{layer}."
        tensor: Any = _tensor(file, name)
        if (matrix := architecture.experts.get(stem)) is not None and tensor.dim() == (2 if kind == "bias" else 3):
            for expert in range(len(tensor)):
                state[f"{prefix}{architecture.mixture}.experts.{expert}.{matrix}.{kind}"] = tensor[expert]
            continue
        if stem == "ffn_gate_inp_shexp" and tensor.dim() == 1:
            tensor = tensor[None]
        tensor = tensor[:, None] if stem == "shortconv.conv" else tensor
        tensor = mamba_tensor(stem, kind, tensor) if "ssm_d" in architecture.layer else tensor
        parts = {stem: tensor if own_of is None else own_of(stem, tensor)}
        if stem == "attn_qkv" and "attn_qkv" not in architecture.layer:
            head = len(tensor) // (heads + 2 * kv_heads)
            sizes = [heads * head, kv_heads * head, kv_heads * head]
            if sum(sizes) != len(tensor):
                raise ValueError(f"expected {name} of {heads} and {kv_heads} heads, got {len(tensor)} rows")
            parts = dict(zip(("attn_q", "attn_k", "attn_v"), tensor.split(sizes), strict=True))
        for part, own in parts.items():
            if architecture.is_permuted and part in ("attn_q", "attn_k"):
                own = _unpermuted(own, heads if part == "attn_q" else kv_heads, name)
            if architecture.norms_have_one and part.endswith("norm") and part != "ssm_norm":
                own = own.double() - 1  # exact, and so is the sum of the family
            if architecture.is_turned and layer is not None and own.dim() == 2:
                own = own.t()
            place = (architecture.places if layer is None else architecture.layer).get(part)
            end = "" if part in ("attn_sinks", "exp_probs_b", "layer_output_scale", *BARE) else f".{kind}"
            state[name if place is None else f"{prefix}{place}{end}"] = own
    return state


def _parts(name: str) -> tuple[str | None, str, str]:
    """Returns the number of the layer, the module, and whether it is a weight or a bias."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?", name)
    return (None, name, "") if match is None else (match[1], match[2], match[3] or "")


def _tensor(file: GGUF, name: str) -> Tensor:
    """Returns a vector's numbers, or a matrix that stays in the file."""
    stored = file.tensors[name]
    if len(stored.shape) > 1:
        return stored.matrix()
    vector = _numbers(stored)
    check_finite(file.path, {name: vector})
    return vector


def _unpermuted(tensor: Tensor, heads: int, name: str) -> Tensor:
    """Returns rows in which the halves of a head are rotated, from the order in which neighbours are."""
    if heads < 1 or len(tensor) % (2 * heads):
        raise ValueError(f"expected {name} to have rows for {heads} heads, got {len(tensor)}")
    order = torch.arange(len(tensor)).view(heads, -1, 2).transpose(1, 2).flatten()
    return tensor[order]


def _note_precision(file: GGUF, model: Any) -> None:
    """Sets the precision in which a quantised model is computed, and logs which numbers that rounds again."""
    counts = Counter[Kind]()
    for stored in file.tensors.values():
        counts[stored.kind] += math.prod(stored.shape) if len(stored.shape) > 1 else 0
    rounded = Counter({kind: count for kind, count in counts.items() if BLOCKS[kind].compute is not None})
    in_groups = sum(count for kind, count in rounded.items() if BLOCKS[kind].groups is not None)
    precision: str | None = INT4 if in_groups * 2 > sum(rounded.values()) else INT8
    if sum(rounded.values()) * 2 < sum(counts.values()):
        precision = None
    set_precision(model, precision, file.path)


def _nomic_bert(
    file: GGUF,
    values: _Values,
    vocabulary: Vocabulary,
    unk: int | None,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> BERT:
    """Builds a Nomic BERT: a BERT with rotary positions and a gated feed-forward network, whose maps have no bias."""
    left = {name: _tensor(file, name) for name in file.tensors}
    depth = int(values.number("block_count"))
    check_depth("num_hidden_layers", depth, len(left), file.path)
    (embedding,) = taken(left, ["token_embd.weight"], "Nomic BERT")
    has_bias = any(name.endswith(".bias") and "norm" not in name for name in left)
    config = BERTConfig(
        vocab_size=len(embedding),
        d_model=values.number("embedding_length"),
        num_heads=values.number("attention.head_count"),
        num_layers=depth,
        d_ff=values.number("feed_forward_length"),
        layer_norm_eps=values.number("attention.layer_norm_epsilon"),
        activation="swiglu",
        bias=has_bias,
        norm_bias=True,
        linear1_bias=False,
        positions="rotary",
        rotary_base=values.number("rope.freq_base", 10_000.0),
        token_types=len(left.get("token_types.weight", ())),
        max_len=values.number("context_length"),
        special_ids=SpecialIds(
            pad=vocabulary.ids.get("padding", 0),
            eos=vocabulary.last,
            unk=unk,
        ),
    )
    weights: dict[str, tuple[Tensor, ...]] = {"embedding.weight": (embedding,)}
    if config.token_types:
        weights["token_type_embedding.weight"] = taken(left, ["token_types.weight"], "Nomic BERT")
    for kind in ("weight", "bias"):
        weights[f"embedding_norm.{kind}"] = taken(left, [f"token_embd_norm.{kind}"], "Nomic BERT")
    for layer in range(depth):
        place = f"encoder.layers.{layer}"
        weights[f"{place}.linear1.weight"] = taken(
            left, [f"blk.{layer}.{part}.weight" for part in ("ffn_gate", "ffn_up")], "Nomic BERT"
        )
        for stem, module in _NOMIC.items():
            joint = "_" if module.endswith("in_proj") else "."
            (weight,) = taken(left, [f"blk.{layer}.{stem}.weight"], "Nomic BERT")
            bias = left.pop(f"blk.{layer}.{stem}.bias", None)
            weights[f"{place}.{module}{joint}weight"] = (weight,)
            if bias is None and not has_bias:
                continue
            weights[f"{place}.{module}{joint}bias"] = (weight.new_zeros(len(weight)) if bias is None else bias,)
    check_empty(left, "Nomic BERT")
    model: BERT = load_foreign(config, weights, device=device, dtype=dtype)
    return model
