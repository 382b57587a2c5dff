"""T5 (Raffel et al. 2020), its version 1.1, mT5 and MADLAD-400.

They are pre-norm `Transformer`s with relative positions, RMSNorm and no biases. The weights absorb two differences. T5
doesn't divide its scores by sqrt(head_dim): the weights of queries are multiplied by it instead, which is exact for a
power of two. And all of T5's heads together may be narrower than d_model: heads of zeros fill the rest, which output
nothing and learn nothing. Heads that are wider together, as in MADLAD 3B, have a `head_dim`.

tokenizer.json               of the tokenizers library; or spiece.model, a SentencePiece model
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.checkpoints.hf.common import (
    ACTIVATIONS,
    THEIR_ACTIVATIONS,
    Checkpoint,
    MakeTokenizer,
    Parts,
    activation_of,
    check_empty,
    check_floating,
    check_options,
    depth_of,
    embedding_weights,
    eos_setting,
    first_equal,
    flag_of,
    forbidden_of,
    load_foreign,
    make_translator,
    number_of,
    read_file,
    special_tokens,
    taken,
    without_row,
)
from fastformer.data.huggingface import LibraryBackend, read_library
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import read_json
from fastformer.languages import Languages
from fastformer.models import Transformer, TransformerConfig
from fastformer.special_ids import SpecialIds

NAMES = {"t5": "T5", "mt5": "mT5"}  # by the model_type of transformers
_LANGUAGE = re.compile(r"<2([a-z]{2,3}(?:_[A-Za-z_]+)?)>")
MAX_LEN = 512  # without n_positions: relative positions have no limit of their own

_ACTIVATIONS = {
    **{name: ACTIVATIONS[name] for name in ("relu", "gelu", "gelu_new", "silu")},
    "gated-gelu_new": "geglu_tanh",
    "gated-gelu_pytorch_tanh": "geglu_tanh",
    "gated-silu": "swiglu",
}
_THEIR_ACTIVATIONS = {**THEIR_ACTIVATIONS, "geglu_tanh": "gated-gelu", "swiglu": "gated-silu"}
_GATED = ("geglu_tanh", "swiglu")

_SHARED, _OUTPUT = "shared.weight", "lm_head.weight"
_EMBEDDINGS = {"encoder": "encoder.embed_tokens.weight", "decoder": "decoder.embed_tokens.weight"}
# A bias of cross-attention in old files, which no T5 reads.
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# The options of `TransformerConfig` that make a T5.
_OPTIONS: dict[str, Any] = {
    "positions": "relative",
    "norm": "rms",
    "norm_first": True,
    "embedding_norm": False,
    "scale_embedding": False,
    "output_bias": False,
    "attention_bias": False,
    "bias": False,
    "window_size": None,
}


def transformer_from_t5(saved: Checkpoint) -> Transformer:
    """Builds the model, as `ToModel` describes; the model_type of the settings is one of `NAMES`.

    The eps of the norms is the setting layer_norm_epsilon.
    """
    settings, state = saved.settings, saved.state
    name, left = NAMES[settings["model_type"]], dict(state)
    check_floating(settings, left)
    left.pop(_UNREAD, None)
    pad, eos = settings.get("pad_token_id"), settings.get("eos_token_id")
    if pad is None or eos is None:
        raise ValueError(f"expected a {name} with a pad_token_id and an eos_token_id, got {pad!r} and {eos!r}")
    start = settings.get("decoder_start_token_id")
    special_ids = SpecialIds(pad=pad, eos=eos, unk=saved.unk, start=pad if start is None else start)
    source, target, output = _embeddings(settings, left, name)
    tied = source is target is output
    d_model, head_dim, heads = (number_of(settings, key) for key in ("d_model", "d_kv", "num_heads"))
    if d_model != target.shape[1]:  # before weights are padded to it
        raise ValueError(f"expected d_model to be the embedding's width {target.shape[1]}, got {d_model}")
    is_wide = bool(d_model % head_dim) or heads * head_dim > d_model
    depth = depth_of(settings, "num_layers", state)
    dropout = settings.get("dropout_rate", 0.1)
    config = TransformerConfig(
        **_OPTIONS,
        vocab_size=len(output),
        source_vocab_size=None if tied else len(source),
        d_model=d_model,
        num_heads=heads if is_wide else d_model // head_dim,
        head_dim=head_dim if is_wide else None,
        d_ff=number_of(settings, "d_ff"),
        num_encoder_layers=depth,
        num_decoder_layers=(
            depth if settings.get("num_decoder_layers") is None else depth_of(settings, "num_decoder_layers", state)
        ),
        layer_norm_eps=settings.get("layer_norm_epsilon", 1e-6),
        activation=_activation(settings),
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        num_buckets=settings.get("relative_attention_num_buckets", 32),
        max_distance=settings.get("relative_attention_max_distance", 128),
        embed_pad=any(bool(matrix[pad].any()) for matrix in (source, target) if pad < len(matrix)),
        tie_embeddings=tied,
        scale_output=_scales_output(settings),
        max_len=settings.get("n_positions") or MAX_LEN,
        suppress_tokens=forbidden_of(saved, len(output)),
        special_ids=special_ids,
    )
    missing = 0 if is_wide else d_model - heads * head_dim
    weights: dict[str, Parts] = {}
    for own_name, hf_names in _names(config).items():
        parts = taken(left, hf_names, name)
        if own_name.endswith("in_proj_weight"):
            q, k, v = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in parts)
            parts = (q * head_dim**0.5, k, v)
        elif own_name.endswith("out_proj.weight") and missing:
            parts = (F.pad(parts[0], (0, missing)),)
        elif own_name.endswith("position_bias.table"):
            parts = (F.pad(parts[0], (0, config.num_heads - heads)),)
        weights[own_name] = parts
    weights |= embedding_weights(source, target, output)
    check_empty(left, name)
    return load_foreign(config, weights, device=saved.device, dtype=saved.dtype or target.dtype)


def t5_from_transformer(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the settings and the state_dict of the T5 that computes the same as a `Transformer`.

    Raises:
        ValueError: the model has options that T5 doesn't have.
    """
    config, ids = model.config, model.config.special_ids
    check_options(config, _OPTIONS, "T5", one_vocabulary=True)
    dropouts = {config.dropout, config.attention_dropout, config.activation_dropout}
    if len(dropouts) > 1:
        raise ValueError(f"expected a T5, with one probability of dropout, got {sorted(dropouts)}")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tied = config.tie_embeddings
    shared = state["embedding.weight" if tied else "source_embedding.weight"]
    output = shared if tied else state["output.weight"]
    if not tied and not torch.equal(shared, state["target_embedding.weight"]):
        raise ValueError("expected a T5, with one embedding for source and target, got two that differ")
    if not config.embed_pad and shared[ids.pad].any():
        # T5 embeds PAD by its row. The embeddings' copy of the row is zeroed; the output keeps it.
        shared = without_row(shared, ids.pad)
    weights = {_SHARED: shared, _EMBEDDINGS["encoder"]: shared, _EMBEDDINGS["decoder"]: shared, _OUTPUT: output}
    head_dim = config.head_dim or config.d_model // config.num_heads
    heads = _heads_in_use(config, state) if config.head_dim is None else config.num_heads
    inner = heads * head_dim
    for own_name, hf_names in _names(config).items():
        tensor = state[own_name]
        if own_name.endswith("in_proj_weight"):
            q, k, v = (part[:inner] for part in tensor.chunk(3))
            weights |= dict(zip(hf_names, (q / head_dim**0.5, k, v), strict=True))
        elif own_name.endswith("out_proj.weight"):
            weights[hf_names[0]] = tensor[:, :inner]
        elif own_name.endswith("position_bias.table"):
            weights[hf_names[0]] = tensor[:, :heads]
        else:
            weights |= dict(zip(hf_names, tensor.chunk(len(hf_names)), strict=True))
    settings = {
        "model_type": "t5",
        "vocab_size": len(shared),
        "d_model": config.d_model,
        "d_kv": head_dim,
        "num_heads": heads,
        "d_ff": config.d_ff,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.layer_norm_eps,
        "feed_forward_proj": _THEIR_ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.scale_output,  # in T5, the setting means this
        "n_positions": config.max_len,
        "pad_token_id": ids.pad,
        "eos_token_id": eos_setting(ids),
        "decoder_start_token_id": ids.start,
    }
    return settings, weights


def _activation(settings: Mapping[str, Any]) -> Any:
    """Returns the activation. The settings may also contain its two parts, which have priority."""
    projection = settings.get("feed_forward_proj", "gated-gelu" if settings["model_type"] == "mt5" else "relu")
    inner = "gelu_new" if projection == "gated-gelu" else str(projection).removeprefix("gated-")
    inner = settings.get("dense_act_fn", inner)
    is_gated = flag_of(settings, "is_gated_act", str(projection).startswith("gated-"))
    return activation_of({}, "feed_forward_proj", f"gated-{inner}" if is_gated else inner, _ACTIVATIONS)


def _scales_output(settings: Mapping[str, Any]) -> bool:
    """Returns whether the hidden states are scaled.

    The setting has two names. In old versions the second also meant that the matrices are tied.
    """
    if settings["model_type"] == "mt5":
        return False
    return flag_of(settings, "scale_decoder_outputs", flag_of(settings, "tie_word_embeddings", True))


def _heads_in_use(config: TransformerConfig, state: Mapping[str, Tensor]) -> int:
    """Returns the number of heads up to the last one that isn't all zeros."""
    heads = config.num_heads
    used = torch.zeros(heads, dtype=torch.bool, device="cpu")
    for name, tensor in state.items():
        if name.endswith("in_proj_weight"):
            used |= tensor.view(3, heads, -1).any(-1).any(0).cpu()
        elif name.endswith("out_proj.weight"):
            used |= tensor.view(len(tensor), heads, -1).any(-1).any(0).cpu()
    return int(used.nonzero()[-1]) + 1 if used.any() else heads


def _embeddings(settings: Mapping[str, Any], left: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Removes the source, target and output matrices from `left` and returns them, as one object if they are tied."""
    shared, output = left.pop(_SHARED, None), left.pop(_OUTPUT, None)
    tables = [left.pop(place, None) for place in _EMBEDDINGS.values()]
    either = next((one for one in (shared, *tables, output) if one is not None), None)
    if either is None or either.dim() != 2:
        raise ValueError(f"expected the tensors of a {name}, got no matrix called {_SHARED}")
    if output is None and not flag_of(settings, "tie_word_embeddings", settings["model_type"] != "mt5"):
        raise ValueError(
            f"expected the tensors of a {name} that generates text, got none called {_OUTPUT}, which isn't tied to the "
            "embedding (tie_word_embeddings): the model was saved without its head"
        )
    return first_equal(*(either if one is None else one for one in (*tables, output)))


def _names(config: TransformerConfig) -> dict[str, tuple[str, ...]]:
    """Maps fastformer's names of tensors to those in T5 that are concatenated to them (dimension 0)."""
    names: dict[str, tuple[str, ...]] = {}
    for side, depth in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        first = f"{side}.block.0.layer.0.SelfAttention"
        names[f"{side}_position_bias.table"] = (f"{first}.relative_attention_bias.weight",)
        names[f"{side}.norm.weight"] = (f"{side}.final_layer_norm.weight",)
        attentions = {"self_attn": "SelfAttention", "multihead_attn": "EncDecAttention"}
        if side == "encoder":
            del attentions["multihead_attn"]
        for place in range(depth):
            layer, hf_layer = f"{side}.layers.{place}", f"{side}.block.{place}.layer"
            for i, (name, attention) in enumerate(attentions.items()):
                names[f"{layer}.{name}.in_proj_weight"] = tuple(f"{hf_layer}.{i}.{attention}.{x}.weight" for x in "qkv")
                names[f"{layer}.{name}.out_proj.weight"] = (f"{hf_layer}.{i}.{attention}.o.weight",)
                names[f"{layer}.norm{i + 1}.weight"] = (f"{hf_layer}.{i}.layer_norm.weight",)
            last = len(attentions)
            parts = ("wi_0", "wi_1") if config.activation in _GATED else ("wi",)
            names[f"{layer}.linear1.weight"] = tuple(f"{hf_layer}.{last}.DenseReluDense.{x}.weight" for x in parts)
            names[f"{layer}.linear2.weight"] = (f"{hf_layer}.{last}.DenseReluDense.wo.weight",)
            names[f"{layer}.norm{last + 1}.weight"] = (f"{hf_layer}.{last}.layer_norm.weight",)
    return names


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes.

    A source text has to begin with its task, such as "translate English to German: ".
    """
    file = folder / TOKENIZER
    if file.is_file():
        backend = read_library(file, read_json(file))
        vocab = backend.get_vocab()
        special = special_tokens(folder, settings, vocab)
        languages = _languages(vocab, lambda text: list(backend.encode(text, add_special_tokens=False).ids))
        return special["unk"], make_translator(LibraryBackend(backend, str(file)), languages=languages)
    file = folder / "spiece.model"
    processor = read_sentencepiece(file, read_file(file))
    vocab = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    special = special_tokens(folder, settings, vocab)
    languages = _languages(vocab, lambda text: list(processor.encode(text)))
    return special["unk"], make_translator(PieceBackend(processor), languages=languages)


def _languages(vocab: Mapping[str, int], encode: Callable[[str], list[int]]) -> Languages | None:
    """Returns the languages that a token before the source selects, such as "<2de>" in MADLAD (Kudugunta 2023).

    Returns None for a T5 whose tokenizer has no such tokens.
    """
    tokens = {match[1]: i for piece, i in vocab.items() if (match := _LANGUAGE.fullmatch(piece))}
    if not tokens:
        return None
    name, first = next(iter(tokens.items()))
    ids = encode(f"<2{name}>")
    return Languages(tokens, "asked", lead=tuple(ids[:-1])) if ids and ids[-1] == first else None
