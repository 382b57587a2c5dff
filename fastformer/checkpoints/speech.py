"""Whisper in the folders of transformers and of CTranslate2, as the tensors that the C++ engine reads.

Of transformers: config.json with the model_type "whisper", model.safetensors, generation_config.json. Of CTranslate2:
the files of `checkpoints.ctranslate2`, with vocabulary.json or vocabulary.txt. tokenizer.json may be in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints import ctranslate2 as ct2
from fastformer.checkpoints.hf.common import (
    ACTIVATIONS,
    GENERATION,
    check_empty,
    check_floating,
    generation_settings,
    model_type,
    read_weights,
    taken,
)
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import read_json, read_json_list
from fastformer.models.pretrained import CONFIG

_NUM_TASKS = 6  # the tokens between the languages and the timestamps: translate, transcribe ... notimestamps


@dataclass(frozen=True)
class SpeechConfig:
    """The sizes and the special tokens of a Whisper.

    Attributes:
        d_model, encoder_layers, encoder_heads, decoder_layers, decoder_heads, vocab_size: the sizes.
        n_mels: the number of mel bins of a frame.
        max_frames: the largest number of frames, 3000 for 30 seconds.
        max_length: the largest number of tokens of the decoder, 448.
        activation: the activation of the feed-forward networks.
        scale: the factor of the decoder's embeddings.
        sot, eot, no_speech, no_timestamps: the ids of <|startoftranscript|>, <|endoftext|>, <|nospeech|> and
            <|notimestamps|>, after which the timestamps begin.
        is_multilingual: whether the model knows languages and tasks.
        languages: the tokens of languages, such as "<|en|>", by id.
        suppress_ids: ids that are not chosen if `suppress_tokens` has -1.
        suppress_ids_begin: ids that are not chosen first if `suppress_blank` is set.
        alignment_heads: pairs of a layer and a head of cross-attention, which follow the time of words.
        tokenizer_file: the tokenizer.json of the folder, or None.
    """

    d_model: int
    encoder_layers: int
    encoder_heads: int
    decoder_layers: int
    decoder_heads: int
    vocab_size: int
    n_mels: int
    max_frames: int
    max_length: int
    activation: str
    scale: float
    sot: int
    eot: int
    no_speech: int
    no_timestamps: int
    is_multilingual: bool
    languages: Mapping[int, str]
    suppress_ids: tuple[int, ...]
    suppress_ids_begin: tuple[int, ...]
    alignment_heads: tuple[tuple[int, int], ...]
    tokenizer_file: Path | None = None

    @property
    def lang_ids(self) -> tuple[int, ...]:
        """The ids of the languages."""
        return (*self.languages,)

    @property
    def num_languages(self) -> int:
        """The number of languages."""
        return len(self.languages)

    @property
    def timestamp_begin(self) -> int:
        """The id of <|0.00|>."""
        return self.no_timestamps + 1

    def check(self) -> None:
        """Raises ValueError for ids outside of the vocabulary, and for heads that the model lacks."""
        ids = (self.sot, self.eot, self.no_speech, self.no_timestamps, *self.lang_ids)
        ids += (*self.suppress_ids, *self.suppress_ids_begin)
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"expected ids from 0 to {self.vocab_size - 1} of special tokens, got {wrong[:5]}")
        if self.timestamp_begin >= self.vocab_size or self.eot >= self.timestamp_begin:
            raise ValueError(f"expected timestamps after the text, got them from {self.timestamp_begin} on")
        for layer, head in self.alignment_heads:
            if not (0 <= layer < self.decoder_layers and 0 <= head < self.decoder_heads):
                raise ValueError(
                    f"expected alignment heads of {self.decoder_layers} layers and {self.decoder_heads} heads, got "
                    f"{(layer, head)}"
                )
        for heads in (self.encoder_heads, self.decoder_heads):
            if heads < 1 or self.d_model % heads:
                raise ValueError(f"expected a width that the heads divide, got {self.d_model} and {heads}")


class SpeechWeights(NamedTuple):
    """A Whisper: its config, its tensors by their names in csrc/engine/packed_model.h, and its file's precision."""

    config: SpeechConfig
    tensors: dict[str, Tensor]
    precision: str


def is_speech_folder(folder: Path) -> bool:
    """Returns whether a folder holds a Whisper, of transformers or of CTranslate2."""
    if ct2.is_folder(folder):
        return ct2.specification(folder) == ct2.SPEECH
    return model_type(folder) == "whisper"


def load_speech(folder: Path) -> SpeechWeights:
    """Loads the config and the tensors of a folder.

    Raises:
        ValueError: the folder holds no Whisper, or a file is missing, damaged or of another model.
    """
    if not folder.is_dir():
        raise ValueError(f"expected a folder with a Whisper, got {folder}")
    file = folder / TOKENIZER
    tokenizer = file if file.is_file() else None
    try:
        if ct2.is_folder(folder):
            return _from_ctranslate2(folder, tokenizer)
        settings = read_json(folder / CONFIG)
        if settings.get("model_type") != "whisper":
            raise ValueError(f"expected a model of type 'whisper', got {settings.get('model_type')!r:.60}")
        state = read_weights(folder)
        check_floating(settings, state)
        return from_state(settings, generation_settings(folder), state, tokenizer)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: {error}") from error


# ---- transformers ----


def from_state(
    settings: Mapping[str, Any], search: Mapping[str, Any], state: Mapping[str, Tensor], tokenizer: Path | None = None
) -> SpeechWeights:
    """Converts a model of transformers.

    Args:
        settings: its config.json.
        search: its generation_config.json.
        state: its state_dict.
        tokenizer: its tokenizer.json.

    Raises:
        ValueError: missing, unexpected or misshapen tensors, or settings that the engine doesn't support.
    """
    left = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    tensors: dict[str, Tensor] = {}
    output = left.pop("proj_out.weight", None)
    (embedding, positions) = taken(left, ("decoder.embed_tokens.weight", "decoder.embed_positions.weight"), "Whisper")
    tensors |= {"target_embedding": embedding, "target_positions": positions}
    tensors["output"] = embedding if output is None or torch.equal(output, embedding) else output
    (tensors["front.positions"],) = taken(left, ("encoder.embed_positions.weight",), "Whisper")
    for i in (1, 2):
        weight, bias = taken(left, (f"encoder.conv{i}.weight", f"encoder.conv{i}.bias"), "Whisper")
        tensors |= _convolution(i, weight, bias)
    depths = {"encoder": int(settings["encoder_layers"]), "decoder": int(settings["decoder_layers"])}
    for side, depth in depths.items():
        for name in ("weight", "bias"):
            (tensors[f"{side}.norm.{name}"],) = taken(left, (f"{side}.layer_norm.{name}",), "Whisper")
        for i in range(depth):
            tensors |= _layer(left, f"{side}.layers.{i}", is_decoder=side == "decoder")
    check_empty(left, "Whisper")
    activation = settings.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation_function of {(*ACTIVATIONS,)}, got {activation!r:.60}")

    def ids(name: str) -> tuple[int, ...]:
        return tuple(search.get(name) or settings.get(name) or ())

    eot = search.get("eos_token_id", settings.get("eos_token_id"))
    sot = search.get("decoder_start_token_id", settings.get("decoder_start_token_id"))
    no_timestamps = search.get("no_timestamps_token_id")
    languages = {int(i): token for token, i in sorted((search.get("lang_to_id") or {}).items(), key=lambda x: x[1])}
    if no_timestamps is None:
        if not languages:
            raise ValueError(f"expected a no_timestamps_token_id in {GENERATION}")
        no_timestamps = max(languages) + _NUM_TASKS
    heads = int(settings["decoder_attention_heads"])
    alignment = search.get("alignment_heads") or itertools.product(
        range(depths["decoder"] // 2, depths["decoder"]), range(heads)
    )
    dtype = embedding.dtype
    config = SpeechConfig(
        d_model=int(settings["d_model"]),
        encoder_layers=depths["encoder"],
        encoder_heads=int(settings["encoder_attention_heads"]),
        decoder_layers=depths["decoder"],
        decoder_heads=heads,
        vocab_size=len(tensors["output"]),
        n_mels=int(settings.get("num_mel_bins", 80)),
        max_frames=2 * len(tensors["front.positions"]),
        max_length=len(positions),
        activation=ACTIVATIONS[activation],
        scale=float(settings["d_model"]) ** 0.5 if settings.get("scale_embedding") else 1.0,
        sot=int(sot),
        eot=int(eot[0] if isinstance(eot, Sequence) else eot),
        no_speech=int(no_timestamps) - 1,
        no_timestamps=int(no_timestamps),
        is_multilingual=bool(search.get("is_multilingual", bool(languages))),
        languages=languages,
        suppress_ids=ids("suppress_tokens"),
        suppress_ids_begin=ids("begin_suppress_tokens"),
        alignment_heads=tuple((int(layer), int(head)) for layer, head in alignment),
        tokenizer_file=tokenizer,
    )
    return _checked(config, tensors, "bf16" if dtype == torch.bfloat16 else "fp32")


def _layer(left: dict[str, Tensor], name: str, *, is_decoder: bool) -> dict[str, Tensor]:
    """Takes the tensors of a layer of transformers, and returns them by the engine's names."""
    tensors: dict[str, Tensor] = {}
    attentions = [("self_attn", "self_attn"), ("encoder_attn", "multihead_attn")][: 1 + is_decoder]
    norms = [f"{theirs}_layer_norm" for theirs, _ in attentions] + ["final_layer_norm"]
    for theirs, ours in attentions:
        q, k, v, out = taken(left, [f"{name}.{theirs}.{x}_proj.weight" for x in ("q", "k", "v", "out")], "Whisper")
        q_bias, v_bias, out_bias = taken(left, [f"{name}.{theirs}.{x}_proj.bias" for x in ("q", "v", "out")], "Whisper")
        tensors |= {
            f"{name}.{ours}.in_proj_weight": torch.cat([q, k, v]),
            f"{name}.{ours}.in_proj_bias": torch.cat([q_bias, torch.zeros_like(q_bias), v_bias]),
            f"{name}.{ours}.out_proj.weight": out,
            f"{name}.{ours}.out_proj.bias": out_bias,
        }
    for part in ("weight", "bias"):
        for i, norm in enumerate(norms, 1):
            (tensors[f"{name}.norm{i}.{part}"],) = taken(left, (f"{name}.{norm}.{part}",), "Whisper")
        for i in (1, 2):
            (tensors[f"{name}.linear{i}.{part}"],) = taken(left, (f"{name}.fc{i}.{part}",), "Whisper")
    return tensors


# ---- CTranslate2 ----


def _from_ctranslate2(folder: Path, tokenizer: Path | None) -> SpeechWeights:
    name, stored = ct2.read_variables(folder / ct2.MODEL)
    if name != ct2.SPEECH:
        raise ValueError(f"expected a {ct2.SPEECH}, got a {name!r:.60}")
    settings, tokens = read_json(folder / CONFIG), _vocabulary(folder)
    tensors, sizes, is_rounded = _ctranslate2_tensors(stored)
    for i in (1, 2):
        weight, bias = tensors.pop(f"front.{i - 1}.weight"), tensors.pop(f"front.{i - 1}.bias")
        tensors |= _convolution(i, weight, bias)
    if len(tokens) != len(tensors["output"]):
        raise ValueError(f"expected {len(tensors['output'])} tokens in the vocabulary, got {len(tokens)}")
    table = {token: i for i, token in enumerate(tokens)}

    def id_of(*names: str) -> int:
        for each in names:
            if each in table:
                return table[each]
        raise ValueError(f"expected the token {names[0]} in the vocabulary")

    is_multilingual = "" in table  # the texts of multilingual models have one token more
    languages = settings.get("lang_ids") or ()
    config = SpeechConfig(
        **sizes,
        vocab_size=len(tokens),
        max_frames=2 * len(tensors["front.positions"]),
        max_length=len(tensors["target_positions"]),
        sot=id_of("<|startoftranscript|>"),
        eot=id_of("<|endoftext|>"),
        no_speech=id_of("<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=id_of("<|notimestamps|>"),
        is_multilingual=is_multilingual,
        languages={int(i): tokens[i] for i in languages if is_multilingual and 0 <= i < len(tokens)},
        suppress_ids=tuple(settings.get("suppress_ids") or ()),
        suppress_ids_begin=tuple(settings.get("suppress_ids_begin") or ()),
        alignment_heads=tuple((int(layer), int(head)) for layer, head in settings.get("alignment_heads") or ()),
        tokenizer_file=tokenizer,
    )
    is_bf16 = tensors["target_embedding"].dtype == torch.bfloat16
    return _checked(config, tensors, "int8" if is_rounded else "bf16" if is_bf16 else "fp32")


def _vocabulary(folder: Path) -> list[str]:
    """Reads the list of tokens, a text file with one in each line or a list in JSON."""
    if (file := folder / "vocabulary.json").is_file():
        tokens = read_json_list(file)
    else:
        tokens = (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")
        tokens = tokens[:-1] if tokens[-1:] == [""] else tokens
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError("expected a vocabulary of texts")
    return list(tokens)


def _ctranslate2_tensors(stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
    """Converts the variables of a Whisper.

    Returns:
        The tensors by fastformer's names, its convolutions as "front.0" and "front.1"; its sizes by the names in
        `SpeechConfig`; and whether its matrices are rounded.

    Raises:
        ValueError: missing, unexpected or misshapen variables, or parts that the engine doesn't have.
    """
    variables = ct2.Variables(stored)
    activation = int(variables.scalar("decoder/activation", 3))
    if not 0 <= activation < len(ct2.ACTIVATIONS) or not variables.scalar("decoder/pre_norm", 1.0):
        raise ValueError(f"expected pre-norm and an activation of {ct2.ACTIVATIONS}, got number {activation}")
    if variables.scalar("decoder/alibi", 0.0) or variables.scalar("decoder/start_from_zero_embedding", 0.0):
        raise ValueError("expected a Whisper without alibi that starts from a token")
    tensors = {
        "target_embedding": variables.matrix("decoder/embeddings/weight"),
        "output": variables.matrix("decoder/projection/weight"),
        "target_positions": variables.matrix("decoder/position_encodings/encodings"),
        "front.positions": variables.matrix("encoder/position_encodings/encodings"),
    }
    if torch.equal(tensors["target_embedding"], tensors["output"]):
        tensors["output"] = tensors["target_embedding"]
    for i in (0, 1):
        for part in ("weight", "bias"):
            tensors[f"front.{i}.{part}"] = variables.matrix(f"encoder/conv{i + 1}/{part}")
    sizes: dict[str, Any] = {"activation": ct2.ACTIVATIONS[activation], "n_mels": tensors["front.0.weight"].shape[-2]}
    sizes["d_model"] = d_model = tensors["target_embedding"].shape[-1]
    sizes["scale"] = d_model**0.5 if variables.scalar("decoder/scale_embeddings", 0.0) else 1.0
    for side in ("encoder", "decoder"):
        sizes[f"{side}_heads"] = heads = int(variables.scalar(f"{side}/num_heads"))
        sizes[f"{side}_layers"] = depth = variables.count(f"{side}/layer_")
        if heads < 1 or d_model % heads:
            raise ValueError(f"expected a width that the heads divide, got {d_model} and {heads}")
        tensors |= ct2.norm_weights(variables, f"{side}/layer_norm", f"{side}.norm")
        for i in range(depth):
            tensors |= ct2.layer_weights(variables, f"{side}/layer_{i}", f"{side}.layers.{i}", d_model // heads)
    variables.drop("decoder/alignment_layer", "decoder/alignment_heads", "decoder/scale_outputs")
    variables.drop("decoder/alibi_use_positive_positions", "decoder/scale_alibi", "decoder/sliding_window")
    variables.check_empty()
    is_rounded = any(tensor.dtype == torch.int8 and tensor.dim() == 2 for tensor in stored.values())
    return tensors, sizes, is_rounded


# ---- both ----


def _convolution(number: int, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Returns a convolution (outputs, inputs, 3) as a matrix (outputs, 3 * inputs), frame by frame."""
    if weight.dim() != 3 or weight.shape[2] != 3:
        raise ValueError(f"expected convolution {number} over three frames, got {(*weight.shape,)}")
    return {
        f"front.{number - 1}.weight": weight.transpose(1, 2).reshape(len(weight), -1),
        f"front.{number - 1}.bias": bias,
    }


def _checked(config: SpeechConfig, tensors: dict[str, Tensor], precision: str) -> SpeechWeights:
    config.check()
    if tensors["front.0.weight"].shape[1] != 3 * config.n_mels:
        raise ValueError(
            f"expected convolutions of {config.n_mels} mel bins, got {tensors['front.0.weight'].shape[1] / 3:g}"
        )
    return SpeechWeights(config, tensors, precision)
