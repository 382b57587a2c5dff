"""Small models of every convertible family, and every field of their configs with other values than the model's."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from fastformer.checkpoints.hf import ENCODER_FORMS, FAMILIES, load_folder
from fastformer.integrations import accelerate, from_huggingface
from fastformer.models import BERT, GPT
from fastformer.nn import SequenceLayout
from tests.integrations.remembered import made_once

VOCAB = 60
TOLERANCE = 2e-4  # of the largest number: what fp32 rounds away in these models is below a tenth of it
_IDS = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "vocab_size": VOCAB}
_LLAMA: dict[str, Any] = {
    **_IDS, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_LLAMA, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 6}
_QWEN_MOE = {
    **_GROUPED, "use_sliding_window": True, "sliding_window": 5, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "decoder_sparse_step": 2,
}  # fmt: skip
_LINEAR = {
    **_GEMMA, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_SHARED = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
}  # fmt: skip
_BERT: dict[str, Any] = {**_LLAMA, "num_labels": 3}
_BART: dict[str, Any] = {
    **_IDS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 24, "d_kv": 4, "num_heads": 6, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 14, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
GROWTH = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 500.0,
          "llama_4_scaling_beta": 0.5}  # fmt: skip
# Small configs. Windows are narrower than the texts, so that they matter.
BASES: dict[str, dict[str, Any]] = {
    **{kind: _BERT for kind in ENCODER_FORMS},
    "distilbert": {**_IDS, "dim": 24, "n_layers": 2, "n_heads": 6, "hidden_dim": 40, "max_position_embeddings": 64,
                   "num_labels": 3},
    "electra": {**_BERT, "embedding_size": 16},
    "albert": {**_BERT, "embedding_size": 16, "num_hidden_groups": 2},
    "modernbert": {**_BERT, "local_attention": 8},
    # Twice as many layers are another value, and six gated ones double what fp32 rounds away again and again.
    **dict.fromkeys(("nomic_bert", "gte"), {**_BERT, "num_hidden_layers": 2}),
    "eurobert": {**_BERT, "num_hidden_layers": 2, "num_key_value_heads": 2, "mask_token_id": 5},
    **dict.fromkeys(("bart", "mbart", "pegasus", "m2m_100"), _BART),
    "marian": {**_BART, "pad_token_id": 59, "decoder_start_token_id": 59},
    "t5": _T5, "mt5": _T5,
    "gpt2": {**_IDS, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 64},
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 5},
    "ministral": {**_GEMMA, "sliding_window": 5},
    "qwen2": {**_GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {**_GEMMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, "sliding_window": 5},
    "cwm": {**_GEMMA, "sliding_window": 5},
    "phi3": {**_GROUPED, "original_max_position_embeddings": 64},
    "gemma": _GEMMA,
    # Before 5.22 the usual attention is "sdpa", which has no cap.
    "gemma2": {**_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 9, "attn_implementation": "eager"},
    "gemma3_text": {**_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 9, "sliding_window_pattern": 2},
    "gemma4_text": {**_GEMMA, "sliding_window": 5, "global_head_dim": 16, "hidden_size_per_layer_input": 6,
                    "vocab_size_per_layer_input": 60, "num_hidden_layers": 7, "num_kv_shared_layers": 1,
                    "layer_types": [*["sliding_attention"] * 5, "full_attention", "full_attention"]},
    "gpt_neox": {**_LLAMA, "num_attention_heads": 3},
    "starcoder2": {**_GROUPED, "sliding_window": 5},
    "mixtral": {**_GROUPED, "sliding_window": 5, "num_local_experts": 4},
    "granitemoe": {**_GROUPED, "num_local_experts": 4, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                   "logits_scaling": 4.0},
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 3},
    "gpt_oss": {**_GROUPED, "head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen2_moe": {**_QWEN_MOE, "shared_expert_intermediate_size": 28},
    "qwen3_moe": {**_QWEN_MOE, "head_dim": 6},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_SHARED},
    "qwen3_next": {**_LINEAR, **_SHARED, "decoder_sparse_step": 2},
    "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    "lfm2_moe": {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_dense_layers": 1},
    "glm4_moe": {**_GROUPED, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 20},
    "afmoe": {**_GEMMA, "sliding_window": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
              "global_attn_every_n_layers": 2},
    "ernie4_5_moe": {**_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20},
    "smollm3": {**_GROUPED, "no_rope_layers": [1, 0, 1]},
    "exaone4": {**_GEMMA, "sliding_window": 5, "sliding_window_pattern": 2},
    "granite": {**_GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                "logits_scaling": 4.0},
    "granitemoehybrid": {**_GROUPED, "num_local_experts": 0, "shared_intermediate_size": 36, "mamba_n_heads": 1,
                         "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope",
                         "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    "seed_oss": _GEMMA,
    "hunyuan_v1_dense": _GEMMA,
    "ministral3": {**_GEMMA, "sliding_window": 5, "rope_parameters": GROWTH},
    "ernie4_5": _GEMMA,
    "helium": {**_GROUPED, "head_dim": 4},
    "glm": {**_GROUPED, "head_dim": 8},
    "glm4": {**_GROUPED, "head_dim": 8},
    "phi": {**_LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1},
    "stablelm": {**_LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "partial_rotary_factor": 0.5},
}  # fmt: skip

_ACTIVATIONS = (
    *("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "silu", "swish", "tanh", "sigmoid"),
    *("relu2", "mish", "gelu_10", "linear", "leaky_relu", "gelu_python"),
)
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv")
# The values of fields that are words or lists.
_WORDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "hidden_act",
            "hidden_activation",
            "activation_function",
            "activation",
            "dense_act_fn",
            "classifier_activation",
        ),
        _ACTIVATIONS,
    ),
    "feed_forward_proj": (*_ACTIVATIONS, *(f"gated-{each}" for each in _ACTIVATIONS)),
    "classifier_pooling": ("cls", "mean", "bos", "late"),
    "position_embedding_type": ("absolute", "relative_key", "relative_key_query"),
    "problem_type": ("regression", "single_label_classification"),
    "summary_type": ("last", "first", "mean", "cls_index"),
    "summary_activation": ("tanh",),
    "attn_implementation": ("eager",),
    "eos_token_id": (3, 0, [2, 5], None, 70, -1),
    "pad_token_id": (0, 2, 5, None, -1),
    "final_logit_softcapping": (60.0, 200.0, None),  # a lower one makes tokens equal, of which any may be the best
    "attn_logit_softcapping": (2.0, 20.0, None),
    "intermediate_size": (7, 39, 0),  # of one number an RMSNorm behind it keeps the sign, which rounding decides
    "head_dim": (8, 4, 5, 12, None),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), (0.3, 1e-2)),
    "bos_token_id": (4, None),
    "logits_scaling": (0.5, 8.0),  # logits divided by 0 are equal to nothing
}
_FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 123.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "linear", "factor": 2.5, "rope_theta": 123.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 12},
    {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 100},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.5, "high_freq_factor": 2.5,
     "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "beta_slow": 3.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "attention_factor": 1.7},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.3},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, **_FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 32, "factor": 3.0, **_FACTORS},
    {"rope_type": "longrope", "original_max_position_embeddings": 32, "attention_factor": 1.3, "factor": 3.0,
     **_FACTORS},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "factor": 2.0},
)  # fmt: skip
# Names that transformers' code reads whether or not the class has such a field, and names of older versions.
_MORE: dict[str, tuple[Any, ...]] = {
    "is_causal": (False, True),
    "use_bidirectional_attention": (True,),
    "head_dim": (8, 4),
    "sliding_window": (4, None),
    "attention_chunk_size": (4,),
    "hidden_dropout": (1.0,),
    "embedding_size": (16,),
    "position_embedding_type": _WORDS["position_embedding_type"],
    "sliding_window_pattern": (3,),
    "no_rope_layers": (None, [0, 1, 1], [1, 1, 1, 0], [1, 0], 3),
    "global_attn_every_n_layers": (2,),
    "scale_decoder_outputs": (False, True),
    "rope_scaling": ROPES,
    "rope_theta": (123.0,),
    "rotary_emb_base": (123.0,),
    "rotary_pct": (0.5,),
    "partial_rotary_factor": (0.5,),
    "global_rope_theta": (123.0,),
    "local_rope_theta": (123.0,),
    "rope_local_base_freq": (123.0,),
    "pruned_heads": ({0: [1]},),
    "torchscript": (True,),
    "n_ctx": (12,),
    "quantization_config": ({"quant_method": "bitsandbytes", "load_in_8bit": True},),
    "num_experts": (2,),
    "layer_norm_eps": (0.1,),
    "tie_word_embeddings": (True, False),
    "add_cross_attention": (True,),
    "is_decoder": (True, False),
    "use_bias": (False,),
    "bias": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "normalize_before": (True, False),
    "add_final_layer_norm": (True, False),
    "static_position_embeddings": (True, False),
    "normalize_embedding": (True, False),
    "extra_pos_embeddings": (1,),
}
# Fields that aren't settings of a pass, or that only change sizes that the shapes of weights tell.
_LEFT = {
    *("transformers_version", "architectures", "dtype", "model_type", "_name_or_path", "id2label", "label2id"),
    *("vocab_size", "decoder_vocab_size", "layer_types", "rope_parameters"),
}


class Change(NamedTuple):
    """A family, with another value of one field.

    Attributes:
        kind: the model_type.
        name: the field.
        value: the other value.
        head: whether an encoder has a head that classifies texts.
    """

    kind: str
    name: str
    value: Any
    head: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the config."""
        found = {**BASES[self.kind]}
        if isinstance(self.value, Nested):
            return {**found, **self.value}
        return {**found, self.name: self.value}


class Nested(dict[str, Any]):
    """Several options of a config at once."""


def config_of(kind: str, settings: dict[str, Any]) -> Any:
    """Makes a config of a family."""
    return getattr(transformers, FAMILIES[kind].config_class)(**copy.deepcopy(settings))


def changes(kind: str) -> Iterator[Change]:
    """Yields every other value of every field of a family's configs."""
    before = config_of(kind, BASES[kind]).to_dict()
    is_encoder = FAMILIES[kind].kind == "encoder"
    heads = (False, True) if is_encoder else (False,)
    fields = {name: _others(name, value) for name, value in before.items() if name not in _LEFT}
    for name, values in _MORE.items():
        fields[name] = [*fields.get(name, ()), *(value for value in values if value not in fields.get(name, ()))]
    layers = before.get("num_hidden_layers")
    if "layer_types" in before and layers:
        full, sliding = _KINDS[:2]
        mixed = [([full, sliding] * layers)[:layers], ([sliding, full] * layers)[:layers], [full] * (layers - 1)]
        fields["layer_types"] = [*([kind] * layers for kind in _KINDS), *mixed]
    if "rope_parameters" in before:
        fields["rope_parameters"] = [*_ropes(before["rope_parameters"])]
    for name, others in fields.items():
        for other in others:
            for head in heads:
                yield Change(kind, name, other, head)


def _ropes(before: dict[str, Any]) -> Iterator[Any]:
    if "full_attention" not in before:
        yield from ROPES
        for part in (0.5, 0.34):
            yield from ({**rope, "partial_rotary_factor": part} for rope in ROPES[1:10:3])
        return
    for place in ("full_attention", "sliding_attention"):
        yield from ({**before, place: rope} for rope in ROPES)


def _others(name: str, value: Any) -> list[Any]:
    if name in _WORDS:
        return [each for each in _WORDS[name] if each != value]
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [True, 3, 0.5]
    if isinstance(value, int):
        return [*{value + 1, value - 1, 2 * value, value // 2, 0, 1} - {value}]
    if isinstance(value, float):
        if "drop" in name or "pdrop" in name:
            return [1.0]
        return [each for each in (value * 1.7 + 0.3, 0.0, 1.0) if each != value]
    return []


def randomised(model: Any) -> Any:
    """Gives a model random weights that depend on names and shapes alone."""
    with torch.no_grad():
        biases = ((name, buffer) for name, buffer in model.named_buffers() if "final_logits" in name)
        for name, parameter in (*model.named_parameters(), *biases):
            if "embed_positions" in name and model.config.model_type in ("marian", "pegasus"):
                continue  # sines
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            scale = 0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + is_norm)
    return model.eval()


def made(change: Change) -> Any:
    """Makes a model of transformers."""
    name = FAMILIES[change.kind].model_class
    if change.head:
        name = f"{ENCODER_FORMS[change.kind].classes}ForSequenceClassification"
    return _made(name, change.kind, change.settings)


@made_once
def _made(name: str, kind: str, settings: dict[str, Any]) -> Any:
    return randomised(getattr(transformers, name)(config_of(kind, settings)))


def _ids(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(6, 58, (rows, length), generator=torch.Generator().manual_seed(seed))


IDS, TARGETS = _ids(3, 21, 1), _ids(3, 9, 2)
RIGHT = (torch.arange(21) < torch.tensor([[21], [13], [4]])).long()
LEFT = RIGHT.flip(1)
# Families that count padding unless they get positions.
_FROM_ZERO = ("gpt2", "hunyuan_v1_dense", "ministral3", "bert", "electra", "albert", "distilbert")


def _real(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[mask.bool()]


def results(model: Any, kind: str, *, generates: bool = True) -> dict[str, Tensor]:
    """Returns what a model of transformers computes, plain or accelerated, in evaluation."""
    family, found, pad = FAMILIES[kind].kind, dict[str, Tensor](), model.config.pad_token_id
    pad = pad if isinstance(pad, int) and pad >= 0 else 0
    with torch.no_grad():
        if family == "seq2seq":
            source = IDS.masked_fill(RIGHT == 0, pad)
            found["right"] = model(source, attention_mask=RIGHT, decoder_input_ids=TARGETS).logits
            found["none"] = model(IDS, decoder_input_ids=TARGETS).logits
            inputs = {"input_ids": source, "attention_mask": RIGHT}
        else:
            left = IDS.masked_fill(LEFT == 0, pad)
            right = IDS.masked_fill(RIGHT == 0, pad)
            for name, ids, mask in (("none", IDS, None), ("right", right, RIGHT), ("left", left, LEFT)):
                is_counted = name == "left" and kind in _FROM_ZERO
                own = {"position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)} if is_counted else {}
                out = model(ids, attention_mask=mask, **own)
                tokens = out.last_hidden_state if "last_hidden_state" in out else out.logits
                if tokens.dim() == 3:
                    tokens = _real(tokens, torch.ones_like(IDS) if mask is None else mask)
                found[name] = tokens
            inputs = {"input_ids": left, "attention_mask": LEFT}
        if family != "encoder" and generates:
            # An M2M100 doesn't count a PAD that it generates.
            options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "suppress_tokens": [pad]}
            told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
            found["greedy"] = torch.stack(model.generate(**inputs, **options, **told).logits)
            found["beams"] = model.generate(**inputs, **options, **told, num_beams=3).sequences_scores
    return found


def converted_results(ours: Any, kind: str) -> dict[str, Tensor]:
    """Returns what a converted model computes, by the names of `results`."""
    found = dict[str, Tensor]()
    with torch.no_grad():
        if isinstance(ours, GPT):
            found["none"] = ours(IDS).flatten(0, 1)
            lengths = RIGHT.sum(1)
            layout = SequenceLayout.packed(lengths, IDS.shape[1])
            found["right"] = ours(_real(IDS, RIGHT), layout=layout)
            found["left"] = ours(_real(IDS, LEFT), layout=SequenceLayout.packed(LEFT.sum(1), IDS.shape[1]))
        elif isinstance(ours, BERT):
            whole = SequenceLayout.packed(torch.full((3,), 21), 21)
            for name, ids, layout in (
                ("none", IDS.flatten(), whole),
                ("right", _real(IDS, RIGHT), SequenceLayout.packed(RIGHT.sum(1), 21)),
                ("left", _real(IDS, LEFT), SequenceLayout.packed(LEFT.sum(1), 21)),
            ):
                if name == "left" and kind == "mpnet" and ours.config.special_ids.pad != 1:
                    continue  # its positions count every id but 1, whatever its config calls padding
                if not ours.config.num_labels:
                    found[name] = ours.encode(ids, layout=layout)
                elif name != "left":  # there padding has the place of the first token
                    found[name] = ours(ids, layout=layout)
        else:
            pad = ours.config.special_ids.pad
            source = IDS.masked_fill(RIGHT == 0, pad)
            found["right"] = ours(source, TARGETS)
            found["none"] = ours(IDS, TARGETS)
    return found


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns by name how far results are apart, relative to the largest number; only if they are."""
    apart = {}
    for name, one in found.items():
        other = expected[name]
        if one.shape != other.shape:
            apart[name] = float("inf")
            continue
        distance = float((one - other).abs().max() / other.abs().max().clamp(min=1e-9))
        if not distance <= TOLERANCE and not (one.isnan().all() and other.isnan().all()):
            apart[name] = distance
    return apart


def load(folder: Path, kind: str) -> Any:
    """Loads a folder without its tokenizer."""
    family = FAMILIES[kind]._replace(read_tokenizer=lambda folder, settings: (None, lambda config: None))  # type: ignore
    return load_folder(folder, family)[0]


def outcomes(change: Change, folder: Path) -> dict[str, Any]:
    """Returns for each way of using a model: "same", the differences, or the error."""
    try:
        theirs = made(change)
        expected = results(theirs, change.kind)
    except Exception as error:
        return {"plain": error}
    found: dict[str, Any] = {}
    try:
        ours = from_huggingface(theirs)
        found["converted"] = differences(converted_results(ours, change.kind), expected)
    except Exception as error:
        found["converted"] = error
    try:
        theirs.save_pretrained(folder)
    except Exception:
        return found
    try:
        ours = load(folder, change.kind)
        found["loaded"] = differences(converted_results(ours, change.kind), expected)
    except Exception as error:
        found["loaded"] = error
    try:
        fast = accelerate(copy.deepcopy(theirs))
        found["accelerated"] = differences(results(fast, change.kind), expected)
    except Exception as error:
        found["accelerated"] = error
    return found
