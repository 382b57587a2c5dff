"""Decoders in the folders that CTranslate2 reads: GPT-2, Llama, Mistral, Qwen, Gemma, GPT-NeoX and their relatives.

model.bin                     see `checkpoints.model_bin`; a "TransformerDecoderSpec"
config.json                   the names of special tokens, the eps of the norms
vocabulary.json               a list of tokens
tokenizer.json                and the other files of `checkpoints.hf.prompts`, which the converter copies if it is told
                              to
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints import ctranslate2, model_bin
from fastformer.checkpoints.ctranslate2 import as_tensor, as_tensors, dtype_of
from fastformer.checkpoints.hf.common import equal_rows, load_foreign
from fastformer.checkpoints.hf.decoder import special_ids
from fastformer.checkpoints.hf.prompts import read_tokenizer
from fastformer.checkpoints.hf.search_file import generation_settings, with_search_ids
from fastformer.data import Tokenizer
from fastformer.files import read_json, read_json_list
from fastformer.models import GPT, GPTConfig
from fastformer.models.quantization import INT8

logger = logging.getLogger("fastformer")

SPECIFICATION = "TransformerDecoderSpec"
_MAX_LEN = 8192  # of models whose positions are rotary, for which a file names no limit
_LINEAR, _LLAMA3 = 0, 2  # kinds of rotary scaling
_PLAIN = "decoder/layer_{}/self_attention"
_UNREAD = ("rotary_scaling_factor", "rotary_low_freq_factor", "rotary_high_freq_factor",
           "original_max_position_embeddings", "max_position_embeddings")  # fmt: skip


def load_folder(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[GPT, Tokenizer]:
    """Loads the model and the tokenizer of a folder.

    Args:
        folder: the folder; its files are listed at the top of this module.
        device: the device of the parameters; None: the CPU.
        dtype: the dtype of the parameters; None: bf16 for a model of bf16, else fp32.

    Raises:
        ImportError: the library of the tokenizer is not installed.
        ValueError: the files are damaged or don't fit one another, or the model has parts that `GPT` doesn't have.
    """
    _, stored = model_bin.read_variables(folder / model_bin.MODEL)
    tokens, settings = read_json_list(folder / "vocabulary.json"), read_json(folder / "config.json")
    unk, make_tokenizer = read_tokenizer(folder, settings)
    try:
        if settings.get("quantization_type") not in (None, 0):
            raise ValueError(f"expected weights of int8 or more bits, got a quantization_type of {settings!r:.80}")
        eos = settings.get("eos_token")
        ids = with_search_ids(
            {"eos_token_id": tokens.index(eos) if eos in tokens else None}, generation_settings(folder)
        )
        model = _gpt(ctranslate2.FileVariables(stored, folder), len(tokens), ids, unk, settings, device, dtype)
        tokenizer = make_tokenizer(model.config)
        names = [tokenizer.backend.id_to_token(i) for i in range(len(tokens))]
        different = [token for token, name in zip(tokens, names, strict=True) if name not in (token, None)]
        if different:
            raise ValueError(f"expected a tokenizer with the ids of vocabulary.json, got others: {different[:3]!r:.80}")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if model_bin.is_rounded(stored):
        model.precision = INT8
    return model, tokenizer


def _gpt(
    variables: model_bin.Variables,
    vocab_size: int,
    ids: Mapping[str, Any],
    unk: int | None,
    settings: Mapping[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> GPT:
    scalar = variables.scalar
    for name in ("alibi", "start_from_zero_embedding"):
        if scalar(f"decoder/{name}", 0.0):
            raise ValueError(f"expected a decoder without {name}, got one with it")
    if not scalar("decoder/pre_norm"):
        raise ValueError("expected a decoder with norms before its sub-layers, got one with norms after them")
    variables.drop(*(f"decoder/{name}" for name in ("alibi_use_positive_positions", "scale_alibi", "alignment_layer",
                                                    "alignment_heads", "sliding_window",
                                                    "embeddings/multiply_by_sqrt_depth")))  # fmt: skip
    names = ("embeddings", "projection")
    embedding, output = (as_tensor(variables.matrix(f"decoder/{name}/weight")) for name in names)
    if embedding.dim() != 2 or len(embedding) != vocab_size or output.shape != embedding.shape:
        raise ValueError(
            f"expected matrices with a row for each of {vocab_size} tokens, got {(*embedding.shape,)} and "
            f"{(*output.shape,)}"
        )
    if "decoder/projection/bias" in variables and variables.matrix("decoder/projection/bias").any():
        raise ValueError("expected logits without a bias, got one")
    tied = equal_rows(embedding, output)
    weights: dict[str, Any] = {"embedding.weight": embedding, **({} if tied else {"output.weight": output})}
    options, depth = _options(variables, embedding.shape[1]), variables.count("decoder/layer_")
    weights |= _norm(variables, "decoder/layer_norm", "decoder.norm")
    if options["positions"] == "learned":
        table = as_tensor(variables.matrix("decoder/position_encodings/encodings"))
        weights["embedding.position.table"] = table
        options["max_len"] = len(table)
    for i in range(depth):
        weights |= _layer(variables, f"decoder/layer_{i}", f"decoder.layers.{i}", options)
    eps = settings.get("layer_norm_epsilon")
    has_bias = any(name.endswith(("linear1.bias", "norm1.bias")) for name in weights)
    if has_bias:
        _add_zeros(weights)
    biases: dict[str, Any] = {
        option: any(name.endswith(end) for name in weights)
        for option, end in (("qkv_bias", "in_proj_bias"), ("out_bias", "out_proj.bias"))
    }
    config = GPTConfig(
        vocab_size=vocab_size,
        d_model=embedding.shape[1],
        num_layers=depth,
        d_ff=weights["decoder.layers.0.linear2.weight"].shape[1],
        layer_norm_eps=(1e-6 if options["norm"] == "rms" else 1e-5) if eps is None else eps,
        tie_embeddings=tied,
        bias=has_bias,
        special_ids=special_ids(ids, vocab_size, unk),
        **biases,
        **options,
    )
    variables.check_empty()
    model: GPT = load_foreign(config, weights, device=device, dtype=dtype or dtype_of(weights))
    return model


def _options(variables: model_bin.Variables, d_model: int) -> dict[str, Any]:
    """Returns the options of the model that its variables name, without sizes that follow from the weights."""
    scalar, first = variables.scalar, _PLAIN.format(0)
    depth, heads = variables.count("decoder/layer_"), variables.whole("decoder/num_heads")

    def each(name: str, default: float | None = None) -> list[float]:
        return [scalar(f"{_PLAIN.format(i)}/{name}", default) for i in range(depth)]

    def one(name: str, default: float | None = None) -> float:
        if len(values := {*each(name, default)}) != 1:
            raise ValueError(f"expected layers with one {name}, got {sorted(values)}")
        return values.pop()

    kind = variables.activation("decoder")
    if "decoder/layer_0/ffn/linear_0_noact/weight" in variables:
        if kind not in ctranslate2.GATED:
            raise ValueError(f"expected a gated activation of {(*ctranslate2.GATED,)}, got {kind!r}")
        kind = ctranslate2.GATED[kind]
    names = ("self_attention/layer_norm", "input_layer_norm", "shared_layer_norm")
    is_rms = not any(f"decoder/layer_0/{name}/beta" in variables for name in names)
    is_parallel = "decoder/layer_0/shared_layer_norm/gamma" in variables or (
        "decoder/layer_0/input_layer_norm/gamma" in variables
        and "decoder/layer_0/pre_feedforward_layer_norm/gamma" not in variables
    )
    has_four = "decoder/layer_0/pre_feedforward_layer_norm/gamma" in variables
    head_dim = int(one("head_dim", d_model // max(1, heads)))
    if head_dim < 1:
        raise ValueError(f"expected a head_dim of at least 1, got {head_dim}")
    scale = one("queries_scale", head_dim**-0.5)
    options: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": int(one("num_heads_kv", heads)),
        "norm": "rms" if is_rms else "layer",
        "norm_placement": "both" if has_four else "pre",
        "parallel_residual": is_parallel,
        "activation": kind,
        "qk_norm": "head" if f"{first}/q_norm/gamma" in variables else None,
    }
    if head_dim * heads != d_model:
        options["head_dim"] = head_dim
    if abs(scale - head_dim**-0.5) > 1e-6:
        options["attention_scale"] = scale
    if (cap := scalar("decoder/final_logit_softcapping", 0.0)) > 0:
        options["logit_softcap"] = cap
    factor = variables.embedding_factor(d_model, "decoder")
    if factor != 1.0:
        options["embedding_scale"] = factor
    windows = each("sliding_window", 0.0)
    if sizes := {*windows} - {0.0}:
        if len(sizes) > 1:
            raise ValueError(f"expected layers with one window, got {sorted(sizes)}")
        options["window_size"] = int(sizes.pop()) - 1  # it counts the token itself
        options["window_layers"] = tuple(size > 0 for size in windows)
    if f"{first}/rotary_dim" not in variables:
        return {**options, "positions": "learned"}
    return options | _rope(variables, each, one, windows, head_dim)


def _rope(variables: model_bin.Variables, each: Any, one: Any, windows: list[float], head_dim: int) -> dict[str, Any]:
    """Returns the options of rotary positions."""
    if one("rotary_interleave"):
        raise ValueError("expected rotations of the halves of a head, got rotations of neighbours (rotary_interleave)")
    dim, bases = int(one("rotary_dim")), each("rotary_base", 10_000.0)
    rope: dict[str, Any] = {"positions": "rotary", "max_len": _MAX_LEN}
    if dim not in (0, head_dim):
        rope["rotary_fraction"] = dim / head_dim
    own = {base for base, window in zip(bases, windows, strict=True) if not window} or {*bases}
    local = {base for base, window in zip(bases, windows, strict=True) if window} or own
    if len(own) > 1 or len(local) > 1:
        raise ValueError(f"expected one rotary_base of the layers of a kind, got {sorted({*bases})}")
    rope["rotary_base"] = own.pop() if len(own) == 1 else bases[0]
    if local and (base := local.pop()) != rope["rotary_base"]:
        rope["local_rotary_base"] = base
    kind = int(one("rotary_scaling_type", -1.0))
    if kind == _LINEAR:
        rope["rotary_scaling"] = {"kind": "linear", "factor": one("rotary_scaling_factor")}
    elif kind == _LLAMA3:
        if one("rotary_scaling_factor", 1.0) != 1.0:
            raise ValueError("expected no rotary_scaling_factor next to frequency factors, as CTranslate2 writes none")
        logger.warning(
            "rotary positions are not scaled: the folder lacks the factor of this Llama, and CTranslate2 doesn't scale "
            "them either; convert the original folder for texts beyond its first length"
        )
    elif kind != -1:
        raise ValueError(f"expected rotary positions that are not scaled, or linearly, got rotary_scaling_type {kind}")
    for i in range(len(bases)):
        for name in _UNREAD:
            variables.drop(f"{_PLAIN.format(i)}/{name}")
    return rope


def _norm(variables: model_bin.Variables, name: str, place: str) -> dict[str, Tensor]:
    """Returns the weights of a norm; those that multiply by 1 + gamma have the sum."""
    weights = as_tensors(model_bin.norm_weights(variables, name, place))
    if variables.scalar(f"{name}/layer_norm_use_residual", 0.0):
        weights[f"{place}.weight"] = weights[f"{place}.weight"].double() + 1
    return weights


def _layer(variables: model_bin.Variables, name: str, place: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights of a layer by fastformer's names."""

    def linear(*arguments: Any) -> dict[str, Any]:
        return as_tensors(model_bin.linear_weights(variables, *arguments))

    attention, ffn = f"{name}/self_attention", f"{name}/ffn"
    weights = linear([f"{attention}/linear_0"], f"{place}.self_attn.in_proj_weight", f"{place}.self_attn.in_proj_bias")
    out = f"{place}.self_attn.out_proj"
    weights |= linear([f"{attention}/linear_1"], f"{out}.weight", f"{out}.bias")
    gates = [f"{ffn}/linear_0"] + [f"{ffn}/linear_0_noact"] * (f"{ffn}/linear_0_noact/weight" in variables)
    weights |= linear(gates, f"{place}.linear1.weight", f"{place}.linear1.bias")
    weights |= linear([f"{ffn}/linear_1"], f"{place}.linear2.weight", f"{place}.linear2.bias")
    if f"{name}/shared_layer_norm/gamma" in variables:
        weights |= (shared := _norm(variables, f"{name}/shared_layer_norm", f"{place}.norm1"))
        return weights | {key.replace("norm1", "norm2"): tensor for key, tensor in shared.items()}
    norms = {"norm1": f"{attention}/layer_norm", "norm2": f"{ffn}/layer_norm"}
    if options["norm_placement"] == "both":
        norms = {
            "norm1": f"{name}/input_layer_norm",
            "post_norm1": f"{name}/post_attention_layer_norm",
            "norm2": f"{name}/pre_feedforward_layer_norm",
            "post_norm2": f"{name}/post_feedforward_layer_norm",
        }
    elif options["parallel_residual"]:
        norms = {"norm1": f"{name}/input_layer_norm", "norm2": f"{name}/post_attention_layer_norm"}
    if options["qk_norm"]:
        norms |= {f"self_attn.{part}": f"{attention}/{part}" for part in ("q_norm", "k_norm")}
    for part, source in norms.items():
        weights |= _norm(variables, source, f"{place}.{part}")
    return weights


def _add_zeros(weights: dict[str, Any]) -> None:
    """Adds the biases that a model with biases stores as none."""
    for name in [name for name in weights if ".linear" in name and name.endswith(".weight")]:
        rows = sum(map(len, parts)) if isinstance(parts := weights[name], tuple) else len(parts)
        weights.setdefault(name.removesuffix("weight") + "bias", torch.zeros(rows))
