"""BART (Lewis et al. 2020) and the families that differ from it in three options: Marian, mBART, Pegasus, M2M100.

They are `Transformer`s with biases in the attention, and often with a bias on the logits. `FORMS` has their options.

tokenizer.json               a byte-level BPE; older folders have vocab.json and merges.txt instead
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.checkpoints.hf.common import (
    SPECIAL_TOKENS,
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
from fastformer.data.huggingface import LibraryBackend, byte_level_bpe, check_vocab, read_library
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import read_json
from fastformer.models import Transformer, TransformerConfig
from fastformer.ops.embedding import sinusoidal_positions
from fastformer.special_ids import SpecialIds

_EPS = 1e-5  # of the norms; the settings don't contain it
# The options of `TransformerConfig` that all these families have.
_OPTIONS: dict[str, Any] = {
    "norm": "layer",
    "layer_norm_eps": _EPS,
    "bias": True,
    "scale_output": False,
    "window_size": None,
    "head_dim": None,
}


class BartForm(NamedTuple):
    """A family: its name, and the values of three options of `TransformerConfig`.

    Attributes:
        behind_pad: whether its sinusoidal positions count from the id after PAD's, and its logits have no bias
            (M2M100).
    """

    name: str
    positions: str
    embedding_norm: bool
    norm_first: bool
    behind_pad: bool = False

    @property
    def options(self) -> str:
        """The three options as keyword arguments."""
        return ", ".join(f"{name}={value!r}" for name, value in zip(self._fields[1:4], self[1:4], strict=True))

    def first_position(self, pad: int) -> int:
        """Returns the first position, if PAD has the id `pad`."""
        return pad + 1 if self.behind_pad else 0


# By the model_type of transformers.
FORMS = {
    "bart": BartForm("BART", "learned", True, False),
    "marian": BartForm("Marian", "halves", False, False),  # Junczys-Dowmunt et al. 2018
    "mbart": BartForm("mBART", "learned", True, True),  # Liu et al. 2020
    "pegasus": BartForm("Pegasus", "halves", False, True),  # Zhang et al. 2020
    # Fan et al. 2020; NLLB (NLLB Team et al. 2022) has the same model_type
    "m2m_100": BartForm("M2M100", "concatenated", False, True, behind_pad=True),
}
_OFFSET = 2  # unused rows of a learned table, before position 0

_SHARED, _SOURCE, _TARGET = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)
_OUTPUT, _BIAS = "lm_head.weight", "final_logits_bias"
_POSITIONS = {
    "source_position.table": "model.encoder.embed_positions.weight",
    "target_position.table": "model.decoder.embed_positions.weight",
}


def transformer_from_bart(saved: Checkpoint) -> Transformer:
    """Builds the model, as `ToModel` describes; the model_type of the settings is one of `FORMS`."""
    settings, state = saved.settings, saved.state
    form, left = FORMS[settings["model_type"]], with_prefix(state)
    check_floating(settings, left)
    start, pad, eos = (_id(settings, f"{name}_token_id", form) for name in ("decoder_start", "pad", "eos"))
    _check_start(start, pad, form)
    special_ids = SpecialIds(pad=pad, eos=eos, unk=saved.unk, start=start)
    source_embedding, target_embedding, output = _embeddings(settings, left, form)
    tied = source_embedding is target_embedding is output
    bias = left.pop(_BIAS, target_embedding.new_zeros(1, len(target_embedding)))
    if bias.shape != (1, len(target_embedding)):
        raise ValueError(f"expected {_BIAS} of shape {(1, len(target_embedding))}, got {tuple(bias.shape)}")
    bias = bias[0]
    config = TransformerConfig(
        vocab_size=len(target_embedding),
        source_vocab_size=None if tied else len(source_embedding),
        d_model=number_of(settings, "d_model"),
        num_heads=_same(settings, "encoder_attention_heads", "decoder_attention_heads"),
        d_ff=_same(settings, "encoder_ffn_dim", "decoder_ffn_dim"),
        num_encoder_layers=depth_of(settings, "encoder_layers", state),
        num_decoder_layers=depth_of(settings, "decoder_layers", state),
        norm_first=form.norm_first,
        layer_norm_eps=_EPS if saved.layer_norm_eps is None else saved.layer_norm_eps,
        activation=activation_of(settings, "activation_function", "relu" if form.behind_pad else "gelu"),
        dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.1 if form.behind_pad else 0.0),
        activation_dropout=settings.get("activation_dropout", 0.0),
        positions=form.positions,  # type: ignore[arg-type]
        first_position=form.first_position(pad),
        scale_embedding=flag_of(settings, "scale_embedding", form.behind_pad),
        embedding_norm=form.embedding_norm,
        embed_pad=any(bool(matrix[pad].any()) for matrix in (source_embedding, target_embedding) if pad < len(matrix)),
        tie_embeddings=tied,
        output_bias=bool(bias.any()),
        attention_bias=True,
        max_len=number_of(settings, "max_position_embeddings"),
        suppress_tokens=forbidden_of(saved, len(target_embedding)),
        special_ids=special_ids,
    )
    weights: dict[str, Parts] = {name: taken(left, hf_names, form.name) for name, hf_names in _names(config).items()}
    for name, hf_name in _POSITIONS.items():
        if config.positions == "learned":
            weights[name] = taken(left, (hf_name,), form.name)[0][_OFFSET:]
        elif form.behind_pad:  # no weight, since the table is computed; old files hold it all the same
            for name in (f"{hf_name}s", hf_name.replace(".weight", "._float_tensor")):
                left.pop(name, None)
        elif (table := left.pop(hf_name, None)) is not None:
            _check_positions(hf_name, table, config, form)
    weights |= embedding_weights(source_embedding, target_embedding, output)
    if config.output_bias:
        weights["output_bias"] = bias
    check_empty(left, form.name)
    return load_foreign(config, weights, device=saved.device, dtype=saved.dtype or target_embedding.dtype)


def bart_from_transformer(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the settings and the state_dict of the family that computes the same as a `Transformer`.

    Raises:
        ValueError: the model has options that no family in `FORMS` has.
    """
    config, ids = model.config, model.config.special_ids
    kind, form = _form(config)
    check_options(config, _OPTIONS, form.name, one_vocabulary=kind != "marian")
    if config.activation not in THEIR_ACTIVATIONS:
        raise ValueError(
            f"expected a {form.name}, with an activation in {(*THEIR_ACTIVATIONS,)}, got {config.activation!r}"
        )
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tied = config.tie_embeddings
    if config.first_position != form.first_position(ids.pad):
        expected = form.first_position(ids.pad)
        raise ValueError(f"expected a {form.name}, with first_position={expected}, got {config.first_position}")
    if form.behind_pad and config.output_bias:
        raise ValueError(f"expected a {form.name}, with output_bias=False, got True")
    _check_start(ids.start, ids.pad, form)
    source = state.pop("embedding.weight") if tied else state.pop("source_embedding.weight")
    target = source if tied else state.pop("target_embedding.weight")
    output = source if tied else state.pop("output.weight")
    if not config.embed_pad and (source[ids.pad].any() or target[ids.pad].any()):
        # BART embeds PAD by its row. The embeddings' copies of the row are zeroed; the output keeps it.
        tied, output = False, output
        source, target = without_row(source, ids.pad), without_row(target, ids.pad)
    bias = state.pop("output_bias", target.new_zeros(len(target)))
    weights = {_SOURCE: source, _TARGET: target, _OUTPUT: output}
    if not form.behind_pad:
        weights[_BIAS] = bias[None]
    if tied or kind != "marian":  # the other families have a shared matrix, unused, even if nothing is tied
        weights[_SHARED] = target
    for name, place in _POSITIONS.items():
        if config.positions == "learned":
            weights[place] = F.pad(state[name], (0, 0, _OFFSET, 0))
    for name, hf_names in _names(config).items():
        if name in state:
            parts = state[name].chunk(len(hf_names))
        else:  # attention_bias is False
            parts = tuple(target.new_zeros(config.d_model) for _ in hf_names)
        weights |= dict(zip(hf_names, parts, strict=True))
    sides = {"decoder_vocab_size": len(target), "share_encoder_decoder_embeddings": tied} if kind == "marian" else {}
    settings = {
        "model_type": kind,
        "vocab_size": len(source),
        **sides,
        "d_model": config.d_model,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "activation_function": THEIR_ACTIVATIONS[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "scale_embedding": config.scale_embedding,
        "tie_word_embeddings": tied,
        "max_position_embeddings": config.max_len,
        "pad_token_id": ids.pad,
        "eos_token_id": eos_setting(ids),
        "bos_token_id": None,
        "decoder_start_token_id": ids.start,
        "forced_eos_token_id": None,
    }
    return settings, weights


def _check_start(start: int, pad: int, form: BartForm) -> None:
    """Raises ValueError if the decoder's first token has no position: an M2M100 counts none for PAD."""
    if form.behind_pad and start == pad:
        raise ValueError(f"expected a {form.name}, whose decoder starts with another id than PAD's, got {start}")


def _form(config: TransformerConfig) -> tuple[str, BartForm]:
    """Returns the family that has a model's options."""
    options = config.positions, config.embedding_norm, config.norm_first
    for kind, form in FORMS.items():
        if form[1:4] == options:
            return kind, form
    known = "; or ".join(f"{form.options} ({form.name})" for form in FORMS.values())
    raise ValueError(f"expected {known}; got {BartForm('', *options).options}")


def _names(config: TransformerConfig) -> dict[str, tuple[str, ...]]:
    """Maps the norms' and layers' names here to those in BART that are concatenated to them (dimension 0).

    The tables of positions are not included, because they have other rows.
    """
    names: dict[str, tuple[str, ...]] = {}
    sides = (("encoder", "source", config.num_encoder_layers), ("decoder", "target", config.num_decoder_layers))
    for side, input_side, depth in sides:
        for kind in ("weight", "bias"):
            if config.embedding_norm:
                names[f"{input_side}_embedding_norm.{kind}"] = (f"model.{side}.layernorm_embedding.{kind}",)
            if config.norm_first:
                names[f"{side}.norm.{kind}"] = (f"model.{side}.layer_norm.{kind}",)
        for place in range(depth):
            names |= layer_names(side, place)
    return names


def layer_names(side: str, place: int) -> dict[str, tuple[str, ...]]:
    """Maps the names of a layer here to those in BART that are concatenated to them (dimension 0)."""
    names: dict[str, tuple[str, ...]] = {}
    layer, hf_layer = f"{side}.layers.{place}", f"model.{side}.layers.{place}"
    attentions = {"self_attn": "self_attn"}
    norms = {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"}
    if side == "decoder":
        attentions["multihead_attn"] = "encoder_attn"
        norms |= {"norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"}
    for kind in ("weight", "bias"):
        for name, attention in attentions.items():
            parts = tuple(f"{hf_layer}.{attention}.{letter}_proj.{kind}" for letter in "qkv")
            names[f"{layer}.{name}.in_proj_{kind}"] = parts
            names[f"{layer}.{name}.out_proj.{kind}"] = (f"{hf_layer}.{attention}.out_proj.{kind}",)
        for name, module in {"linear1": "fc1", "linear2": "fc2", **norms}.items():
            names[f"{layer}.{name}.{kind}"] = (f"{hf_layer}.{module}.{kind}",)
    return names


def _embeddings(settings: Mapping[str, Any], left: dict[str, Tensor], form: BartForm) -> tuple[Tensor, Tensor, Tensor]:
    """Removes the source, target and output matrices from `left` and returns them, as one object if they are tied."""
    tables = {name: left.pop(name, None) for name in (_SHARED, _SOURCE, _TARGET, _OUTPUT)}
    # Of matrices that are tied, the file has one.
    is_tied, is_shared = (
        flag_of(settings, "tie_word_embeddings", True),
        flag_of(settings, "share_encoder_decoder_embeddings", True),
    )
    groups = [{_TARGET} | ({_OUTPUT} if is_tied else set()), {_SOURCE}, {_OUTPUT}]
    if is_shared:
        groups = [{_SHARED, _SOURCE, *groups[0]}, {_SHARED, _TARGET, _SOURCE, *groups[0]}, {_OUTPUT}]
    if is_tied:
        groups[2] = groups[0]
    matrices = []
    for name, group in zip((_TARGET, _SOURCE, _OUTPUT), groups, strict=True):
        held = [tables[name], *(tables[other] for other in sorted(group))]
        matrix = next((one for one in held if one is not None), None)
        if matrix is None or matrix.dim() != 2:
            raise ValueError(f"expected the tensors of a {form.name}, got no matrix called {name}")
        matrices.append(matrix)
    target, source, output = first_equal(*matrices)
    return source, target, output


def _check_positions(name: str, table: Tensor, config: TransformerConfig, form: BartForm) -> None:
    atol = 1e-6 if table.element_size() >= 4 else 1e-2
    is_right = table.shape == (config.max_len, config.d_model)  # checked before a table of the same size is built
    if is_right:
        expected = sinusoidal_positions(config.max_len, config.d_model, config.positions, device=table.device)
        is_right = torch.allclose(table.float(), expected, rtol=0, atol=atol)
    if not is_right:
        raise ValueError(f"expected {name} to be {form.name}'s sines and cosines, got another table")


def _id(settings: Mapping[str, Any], name: str, form: BartForm) -> Any:
    value = settings.get(name)
    if value is None:
        raise ValueError(f"expected a {form.name} with a {name}, got none")
    return value


def _same(settings: Mapping[str, Any], first: str, second: str) -> int:
    value = number_of(settings, first)
    if number_of(settings, second) != value:
        raise ValueError(f"expected {first} and {second} to be the same, got {value} and {settings[second]}")
    return value


def with_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights by the names that a model with a head has. Files of a model without one lack the prefix.

    Old files of BART also contain a version, which is dropped.
    """
    tensors = {name: tensor for name, tensor in state.items() if not name.endswith(".version")}
    if any(name.startswith("model.") for name in tensors):
        return tensors
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes."""
    if (folder / TOKENIZER).is_file():
        backend = read_library(folder / TOKENIZER, read_json(folder / TOKENIZER))
    else:
        vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
        merges, file = read_file(folder / "merges.txt"), folder / "tokenizer_config.json"
        has_space = file.is_file() and flag_of(read_json(file), "add_prefix_space", False)
        backend = byte_level_bpe(folder / "merges.txt", vocab, merges, add_prefix_space=has_space)
    special = special_tokens(folder, settings, backend.get_vocab(), {**SPECIAL_TOKENS, "bos": "<s>"})
    return special["unk"], make_translator(LibraryBackend(backend, str(folder)), bos=special["bos"])
