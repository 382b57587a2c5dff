"""Whisper in the folders of transformers and of CTranslate2, as the tensors that the C++ engine reads.

Of transformers: config.json with the model_type "whisper", model.safetensors, generation_config.json. Of CTranslate2:
the files of `checkpoints.ctranslate2`, with vocabulary.json or vocabulary.txt. tokenizer.json may be in both.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fastformer.checkpoints.model_bin import (
    BF16,
    CONFIG,
    MODEL,
    SPEECH,
    Array,
    Variables,
    is_folder,
    is_rounded,
    layer_weights,
    norm_weights,
    read_tokens,
    read_variables,
    specification,
)
from fastformer.checkpoints.tensors import check_empty, taken
from fastformer.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

Side: TypeAlias = Literal["encoder", "decoder"]

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

    @property
    def lang_ids(self) -> tuple[int, ...]:
        """The ids of the languages."""
        return (*self.languages,)

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
            if heads < 1 or self.d_model < 1 or self.d_model % heads:
                raise ValueError(f"expected a width that the heads divide, got {self.d_model} and {heads}")


class SpeechWeights(NamedTuple):
    """A Whisper: its config, its file's precision, and its arrays by their names in csrc/engine/packed_model.h.

    Attributes:
        read: returns the arrays of the encoder or of the decoder, so that only one side is in memory. A ValueError says
            which of them are missing, unexpected or misshapen.
    """

    config: SpeechConfig
    precision: str
    read: Callable[[Side], dict[str, Array]]


def is_speech_folder(folder: Path) -> bool:
    """Returns whether a folder holds a Whisper, of transformers or of CTranslate2."""
    if is_folder(folder):
        return specification(folder) == SPEECH
    try:
        return read_json(folder / CONFIG).get("model_type") == "whisper"
    except (OSError, ValueError):
        return False


def load_speech(folder: Path) -> SpeechWeights:
    """Loads the config of a folder, and the way to its arrays.

    Raises:
        ValueError: the folder holds no Whisper, or a file is missing, damaged or of another model.
    """
    if not (is_folder(folder) or (folder / CONFIG).is_file()):
        raise ValueError(f"expected the folder of a Whisper, with a {CONFIG} or a {MODEL}, got {folder}")
    with _errors_of(folder):
        if is_folder(folder):
            weights = _from_ctranslate2(folder)
        else:
            settings = read_json(folder / CONFIG)
            if (kind := settings.get("model_type")) != "whisper":
                raise ValueError(f"expected a Whisper, a model of type 'whisper', got {kind!r:.60}")
            from fastformer.checkpoints.hf.common import check_floating, read_weights
            from fastformer.checkpoints.hf.search_file import generation_settings

            state = read_weights(folder)
            check_floating(settings, state)
            weights = from_state(settings, generation_settings(folder), state)

    def read(side: Side) -> dict[str, Array]:
        with _errors_of(folder):
            return weights.read(side)

    return weights._replace(read=read)


@contextlib.contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"{folder}: {error}") from error


# ---- transformers ----


def from_state(settings: Mapping[str, Any], search: Mapping[str, Any], state: Mapping[str, Tensor]) -> SpeechWeights:
    """Converts a model of transformers.

    Args:
        settings: its config.json.
        search: its generation_config.json.
        state: its state_dict.

    Raises:
        ValueError: missing, unexpected or misshapen tensors, or settings that the engine doesn't support.
    """
    from fastformer.checkpoints.hf.bart import layer_names, with_prefix
    from fastformer.checkpoints.hf.common import activation_of

    left = {name: _as_array(tensor) for name, tensor in with_prefix(state).items()}
    for name in [name for name in left if name.endswith(".q_proj.bias")]:
        left.setdefault(name.replace("q_proj", "k_proj"), np.zeros_like(left[name]))
    output = left.pop("proj_out.weight", None)
    tables = ("model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight")
    embedding, positions = taken(left, tables, "Whisper")
    arrays = {"target_embedding": embedding, "target_positions": positions}
    arrays["output"] = embedding if output is None or np.array_equal(output, embedding) else output
    (arrays["front.positions"],) = taken(left, ("model.encoder.embed_positions.weight",), "Whisper")
    for i in (1, 2):
        weight, bias = taken(left, [f"model.encoder.conv{i}.{kind}" for kind in ("weight", "bias")], "Whisper")
        arrays |= _convolution(i, weight, bias)
    depths = {"encoder": int(settings["encoder_layers"]), "decoder": int(settings["decoder_layers"])}
    for side, depth in depths.items():
        for kind in ("weight", "bias"):
            (arrays[f"{side}.norm.{kind}"],) = taken(left, (f"model.{side}.layer_norm.{kind}",), "Whisper")
        for place in range(depth):
            for name, theirs in layer_names(side, place).items():
                parts = taken(left, theirs, "Whisper")
                arrays[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    check_empty(left, "Whisper")

    def read(side: Side) -> dict[str, Array]:
        is_encoder = side == "encoder"
        return {name: a for name, a in arrays.items() if name.startswith(("encoder.", "front.")) == is_encoder}

    def ids(name: str) -> tuple[int, ...]:
        return tuple(search.get(name) or settings.get(name) or ())

    eot = search.get("eos_token_id", settings.get("eos_token_id"))
    sot = search.get("decoder_start_token_id", settings.get("decoder_start_token_id"))
    no_timestamps = search.get("no_timestamps_token_id")
    named = search.get("lang_to_id") or {}
    if not isinstance(named, Mapping):
        raise ValueError(f"expected lang_to_id to be an object, got {named!r:.60}")
    languages = {int(i): token for token, i in sorted(named.items(), key=lambda x: x[1])}
    if no_timestamps is None:
        if not languages:
            raise ValueError("expected a no_timestamps_token_id in generation_config.json")
        no_timestamps = max(languages) + _NUM_TASKS
    heads = int(settings["decoder_attention_heads"])
    alignment = search.get("alignment_heads") or itertools.product(
        range(depths["decoder"] // 2, depths["decoder"]), range(heads)
    )
    config = SpeechConfig(
        d_model=int(settings["d_model"]),
        encoder_layers=depths["encoder"],
        encoder_heads=int(settings["encoder_attention_heads"]),
        decoder_layers=depths["decoder"],
        decoder_heads=heads,
        vocab_size=len(arrays["output"]),
        n_mels=int(settings.get("num_mel_bins", 80)),
        max_frames=2 * len(arrays["front.positions"]),
        max_length=len(positions),
        activation=activation_of(settings, "activation_function", "gelu"),
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
    )
    config.check()
    if (columns := arrays["front.0.weight"].shape[1]) != 3 * config.n_mels:
        raise ValueError(f"expected convolutions of {config.n_mels} mel bins, got {columns / 3:g}")
    return SpeechWeights(config, "bf16" if embedding.dtype == BF16 else "fp32", read)


def _as_array(tensor: Tensor) -> Array:
    """Returns a tensor's numbers, in fp32 if the engine reads no other."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return (tensor if tensor.dtype == torch.float16 else tensor.float()).numpy()


# ---- CTranslate2 ----


def _from_ctranslate2(folder: Path) -> SpeechWeights:
    name, stored = read_variables(folder / MODEL)
    if name != SPEECH:
        raise ValueError(f"expected a {SPEECH}, got a {name!r:.60}")
    check_empty([key for key in stored if not key.startswith(("encoder/", "decoder/"))], "Whisper")
    settings, tokens = read_json(folder / CONFIG), _vocabulary(folder)
    sizes = _sizes(Variables(stored))
    if len(tokens) != sizes["vocab_size"]:
        raise ValueError(f"expected {sizes['vocab_size']} tokens in the vocabulary, got {len(tokens)}")
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
        sot=id_of("<|startoftranscript|>"),
        eot=id_of("<|endoftext|>"),
        no_speech=id_of("<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=id_of("<|notimestamps|>"),
        is_multilingual=is_multilingual,
        languages={int(i): tokens[i] for i in languages if is_multilingual and 0 <= i < len(tokens)},
        suppress_ids=tuple(settings.get("suppress_ids") or ()),
        suppress_ids_begin=tuple(settings.get("suppress_ids_begin") or ()),
        alignment_heads=tuple((int(layer), int(head)) for layer, head in settings.get("alignment_heads") or ()),
    )
    is_bf16 = stored["decoder/embeddings/weight"].dtype == BF16
    precision = "int8" if is_rounded(stored) else "bf16" if is_bf16 else "fp32"
    config.check()

    def read(side: Side) -> dict[str, Array]:
        variables = read_variables(folder / MODEL)[1]  # of its own mapping, which ends with its arrays
        return _side(config, {key: array for key, array in variables.items() if key.startswith(side)}, side)

    return SpeechWeights(config, precision, read)


def _vocabulary(folder: Path) -> list[str]:
    """Reads the list of tokens, a text file with one in each line or a list in JSON."""
    if (file := folder / "vocabulary.json").is_file():
        return read_tokens(file)
    tokens = (folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")
    return tokens[:-1] if tokens[-1:] == [""] else tokens


def _sizes(variables: Variables) -> dict[str, Any]:
    """Returns the sizes of a Whisper by their names in `SpeechConfig`.

    Raises:
        ValueError: a variable is missing, or the model has parts that the engine doesn't have.
    """
    activation = variables.activation("decoder")
    if not variables.scalar("decoder/pre_norm"):
        raise ValueError("expected a Whisper with norms before its sub-layers, got one with norms after them")
    if variables.scalar("decoder/alibi", 0.0) or variables.scalar("decoder/start_from_zero_embedding", 0.0):
        raise ValueError("expected a Whisper without alibi that starts from a token")
    vocab_size, d_model = variables.shape("decoder/projection/weight", 2)
    sizes: dict[str, Any] = {
        "activation": activation,
        "vocab_size": vocab_size,
        "d_model": d_model,
        "n_mels": variables.shape("encoder/conv1/weight", 3)[1],
        "max_frames": 2 * variables.shape("encoder/position_encodings/encodings", 2)[0],
        "max_length": variables.shape("decoder/position_encodings/encodings", 2)[0],
        "scale": variables.embedding_factor(d_model, "decoder"),
    }
    for side in ("encoder", "decoder"):
        sizes[f"{side}_heads"] = variables.whole(f"{side}/num_heads")
        sizes[f"{side}_layers"] = variables.count(f"{side}/layer_")
    return sizes


def _side(config: SpeechConfig, stored: Mapping[str, Array], side: Side) -> dict[str, Array]:
    """Returns the arrays of a side by the engine's names."""
    variables = Variables(stored)
    variables.drop(
        *(f"{side}/{name}" for name in ("num_heads", "activation", "pre_norm", "alibi", "start_from_zero_embedding")),
        *(f"{side}/{name}" for name in ("scale_embeddings", "alignment_layer", "alignment_heads", "scale_outputs")),
        *(f"{side}/{name}" for name in ("alibi_use_positive_positions", "scale_alibi", "sliding_window")),
    )
    positions = variables.matrix(f"{side}/position_encodings/encodings")
    if side == "encoder":
        arrays = {"front.positions": positions}
        for i in (1, 2):
            weight, bias = (variables.matrix(f"encoder/conv{i}/{part}") for part in ("weight", "bias"))
            arrays |= _convolution(i, weight, bias)
    else:
        names = [f"decoder/{name}/weight" for name in ("embeddings", "projection")]
        embedding = variables.matrix(names[0])
        if stored[names[0]] is stored[names[1]]:
            variables.drop(names[1], f"{names[1]}_scale")
            output = embedding
        else:
            output = variables.matrix(names[1])
            output = embedding if np.array_equal(embedding, output) else output
        arrays = {"target_positions": positions, "target_embedding": embedding, "output": output}
    arrays |= norm_weights(variables, f"{side}/layer_norm", f"{side}.norm")
    heads = config.encoder_heads if side == "encoder" else config.decoder_heads
    for i in range(config.encoder_layers if side == "encoder" else config.decoder_layers):
        arrays |= layer_weights(variables, f"{side}/layer_{i}", f"{side}.layers.{i}", config.d_model // heads)
    variables.check_empty()
    return arrays


# ---- both ----


def _convolution(number: int, weight: Array, bias: Array) -> dict[str, Array]:
    """Returns a convolution (outputs, inputs, 3) as a matrix (outputs, 3 * inputs), frame by frame."""
    if weight.ndim != 3 or weight.shape[2] != 3:
        raise ValueError(f"expected convolution {number} over three frames, got {weight.shape}")
    matrix = np.ascontiguousarray(weight.transpose(0, 2, 1)).reshape(len(weight), -1)
    return {f"front.{number - 1}.weight": matrix, f"front.{number - 1}.bias": bias}
