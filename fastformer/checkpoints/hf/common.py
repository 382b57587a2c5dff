"""Code that all families of transformers' models use: reading their folders, and converting settings and weights.

The folders are read without transformers:

config.json                  contains "model_type"
model.safetensors            or pytorch_model.bin in older folders; or several files, with an index
tokenizer_config.json        the names of the special tokens, if they are unusual
generation_config.json       the options of a search
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints.hf.quantized import dequantized, note_precision, quantization_settings
from fastformer.checkpoints.hf.search_file import (
    FORCED,
    forbidden_ids,
    search_settings,
    warn_of_unapplied,
    with_search_ids,
)
from fastformer.checkpoints.tensors import check_empty as check_empty
from fastformer.checkpoints.tensors import some as some
from fastformer.checkpoints.tensors import taken as taken
from fastformer.checkpoints.torch_archive import read_archive
from fastformer.data import Tokenizer
from fastformer.data.backend import Backend
from fastformer.files import read_json, read_small
from fastformer.languages import Languages, Places
from fastformer.models import BERT, GPT, BERTConfig, GPTConfig, Transformer, TransformerConfig
from fastformer.models.pretrained import CONFIG, Unallocated, Undrawn, check_depth, check_tables, make_to_load
from fastformer.models.quantization import quantized_names
from fastformer.models.stored import Stored, StoredGroups, leave_in_file
from fastformer.models.weights import (
    FLOATING,
    WEIGHTS,
    Entry,
    SavedWeights,
    check_entries,
    check_finite,
    check_plain,
    check_shard,
    index_of,
    read_index,
)
from fastformer.special_ids import SpecialIds

logger = logging.getLogger("fastformer")

TOKENIZER_CONFIG = "tokenizer_config.json"
_OLD_WEIGHTS = "pytorch_model.bin"
# The usual names of the special tokens that translators have.
SPECIAL_TOKENS = {"unk": "<unk>", "eos": "</s>", "pad": "<pad>"}


# The activations of `GPTConfig` and `TransformerConfig` by transformers' names, and transformers' names by these.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
THEIR_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}


# The model_type of the text in models that see pictures, too, and whose text a model here computes.
_WITH_PICTURES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma4": "gemma4_text",
                  "mistral3": "ministral3"}  # fmt: skip


class Checkpoint(NamedTuple):
    """A model of transformers, for its conversion.

    Attributes:
        settings: the model's config.json.
        state: the model's state_dict. If matrices are tied, one of them is enough.
        unk: the tokenizer's id of the unknown token.
        never: ids that an encoder-decoder must not generate.
        layer_norm_eps: the eps of the LayerNorms, if the settings don't contain it; None: the family's usual value.
        device: the device of the converted parameters; None: the CPU.
        dtype: the dtype of the converted parameters; None: the dtype of the embeddings.
    """

    settings: Mapping[str, Any]
    state: Mapping[str, Tensor]
    unk: int | None = None
    never: Sequence[int] = ()
    layer_norm_eps: float | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


# Converts a decoder to a `GPT`, an encoder to a `BERT`, others to a `Transformer`, in evaluation mode. A ValueError: a
# setting that the model doesn't support, or missing, unexpected or misshapen tensors.
ToModel = Callable[[Checkpoint], Transformer | GPT | BERT]
# The id of the unknown token, and a function that makes the tokenizer once the model's config is known.
MakeTokenizer = tuple[int | None, Callable[[Any], Tokenizer]]
ReadTokenizer = Callable[[Path, Mapping[str, Any]], MakeTokenizer]  # of a folder's files, and the model's settings


class Family(NamedTuple):
    """One model_type of transformers.

    Attributes:
        name: the name in messages.
        config_class, model_class: transformers' names.
        to_model: see `ToModel`.
        read_tokenizer: see `ReadTokenizer`.
        kind: "seq2seq" for a `Transformer`, "decoder" for a `GPT`, "encoder" for a `BERT`.
        package: transformers' package of the model, if its name isn't the model_type.
        others: further classes of transformers that are converted: their head is one that the model keeps or drops.
    """

    name: str
    config_class: str
    model_class: str
    to_model: ToModel
    read_tokenizer: ReadTokenizer
    kind: Literal["seq2seq", "decoder", "encoder"] = "seq2seq"
    package: str | None = None
    others: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether a model of this family generates text."""
        return self.kind != "encoder"

    @property
    def headless(self) -> str:
        """The name of transformers' class of the model without a head, if that isn't `model_class` itself."""
        return f"{self.config_class.removesuffix('Config')}Model"

    def source(self, model_type: str) -> str:
        """Returns the name of the module of transformers that has the model's class."""
        name = model_type if self.package is None else self.package
        return f"transformers.models.{name}.modeling_{name}"


def model_type(folder: Path) -> str | None:
    """Returns the model_type of a folder that transformers saved, such as "bart"; None for any other folder.

    Of a model in `_WITH_PICTURES` it is that of its text.
    """
    try:
        values = text_settings(read_json(folder / CONFIG))
    except (OSError, ValueError):
        return None  # the loader reports what is wrong with the file
    kind = values.get("model_type") if "architecture" not in values else None
    return kind if isinstance(kind, str) else None


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's settings; of a model in `_WITH_PICTURES`, those of its text alone.

    Raises:
        ValueError: such a model has no settings of its text.
    """
    if (kind := _WITH_PICTURES.get(str(settings.get("model_type")))) is None:
        return dict(settings)
    inner = settings.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"expected a text_config in the settings of a {settings['model_type']}, got {inner!r:.60}")
    if settings["model_type"] == "mistral3":
        if inner.get("model_type") != kind:  # a Mistral, whose weights have other names
            return dict(settings)
        inner = {**inner, "tie_word_embeddings": True}  # whatever the text's own are: the whole model's usual value
    outer = ("tie_word_embeddings", "quantization_config", "transformers_version")
    return {**inner, **{name: settings[name] for name in outer if name in settings}, "model_type": kind}


def load_folder(
    folder: Path, family: Family, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer | GPT | BERT, Tokenizer]:
    """Loads the model and the tokenizer of a folder that transformers saved.

    The start and the ends of an encoder-decoder's search are the config's `special_ids`, and the ids that it forbids
    are its `suppress_tokens`. Other options in generation_config.json have to be passed to `generate`; a warning names
    them. A decoder's options are those of `generation.folder_options`. Quantised weights keep their values: see
    `checkpoints.hf.quantized`.

    Args:
        folder: the folder; its files are listed at the top of this module.
        family: the family of the model.
        device: the device of the parameters; None: the CPU.
        dtype: the dtype of the parameters; None: as saved, except that fp16 becomes fp32 on a CPU, which is slow in
            fp16.

    Raises:
        ImportError: a library that the files need is not installed.
        ValueError: a file is missing or damaged, or the files don't belong together.
    """
    settings = text_settings(read_json(folder / CONFIG))
    unk, make_tokenizer = family.read_tokenizer(folder, settings)  # small files first: their errors come early
    try:
        rounded = quantization_settings(folder, settings)
        state, plain = read_weights(folder), None
        if rounded is not None:
            plain = dequantized(settings, rounded, state, folder)
            settings, state = plain.settings, plain.state
        if dtype is None and torch.device(device or "cpu").type == "cpu":
            is_half = any(tensor.dtype == torch.float16 for tensor in state.values())
            dtype = torch.float32 if is_half else None if plain is None else plain.dtype
        search, never = search_settings(folder, settings), list[int]()
        if family.kind == "seq2seq":
            never = forbidden_ids(folder, search)
        if family.kind != "encoder":
            settings = with_search_ids(settings, search, reads_sources=family.kind == "seq2seq")
        model = family.to_model(Checkpoint(settings, state, unk, never, device=device, dtype=dtype))
        if plain is not None:
            note_precision(model, plain, folder)
        tokenizer = make_tokenizer(model.config)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{folder}: {error}") from error
    if isinstance(model, Transformer):  # what searches with a decoder reads its folder's options, and logs them
        languages = getattr(tokenizer, "languages", None)
        warn_of_unapplied(folder, search, model.config.special_ids, has_languages=bool(languages))
    return model, tokenizer


def special_tokens(
    folder: Path, settings: Mapping[str, Any], vocab: Mapping[str, int], names: Mapping[str, str] = SPECIAL_TOKENS
) -> dict[str, int | None]:
    """Returns the ids of the special tokens, checked against the settings of the model.

    Args:
        folder: its tokenizer_config.json may give the tokens other names.
        settings: the model's settings, with "pad_token_id" for "pad".
        vocab: the ids of tokens.
        names: the usual name of each kind of token. The settings don't contain the id of "unk".

    Raises:
        ValueError: the vocabulary lacks a token, or the model has another id for it.
    """
    named, ids = dict(names), {}
    for key, value in tokenizer_settings(folder).items():
        name = value.get("content") if isinstance(value, dict) else value  # a mapping adds options
        if key.removesuffix("_token") in named and key.endswith("_token") and isinstance(name, str):
            named[key.removesuffix("_token")] = name
    for kind, name in named.items():
        ids[kind], configured = vocab.get(name), settings.get(f"{kind}_token_id")
        # A model needs no bos of its own, so that its settings may have a null: to_huggingface writes one.
        is_free = kind == "unk" or (kind == "bos" and configured is None)
        is_right = is_free or ids[kind] in (configured if isinstance(configured, list) else [configured])
        if ids[kind] is None or not is_right:
            raise ValueError(
                f"expected the vocabulary of {folder} to have {name!r}"
                + ("" if kind == "unk" else f" with the {kind}_token_id of {CONFIG}, {configured!r}")
                + f", got {ids[kind]!r}"
            )
    return ids


def read_file(file: Path) -> bytes:
    """Reads the bytes of a small file.

    Raises:
        ValueError: the file is missing or far too large.
    """
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which doesn't exist: was the model saved completely?")
    return read_small(file)


def make_translator(backend: Backend, **options: Any) -> Callable[[TransformerConfig], Tokenizer]:
    """Returns a function that makes the tokenizer of a pretrained translator; see `Tokenizer` for the options."""
    return lambda config: Tokenizer(backend, config.special_ids, "translator", vocab_size=config.vocab_size, **options)


def tokenizer_settings(folder: Path) -> Mapping[str, Any]:
    """Returns the contents of tokenizer_config.json, or nothing if the folder lacks it."""
    file = folder / TOKENIZER_CONFIG
    return read_json(file) if file.is_file() else {}


def check_tokenizer_class(folder: Path, known: Iterable[str]) -> str | None:
    """Returns the class that transformers' tokenizer of a folder has, without "Fast"; None: the folder doesn't name it.

    Raises:
        ValueError: the class is not one of `known`, so it may encode differently.
    """
    name = tokenizer_settings(folder).get("tokenizer_class")
    if name is None:
        return None
    kind = str(name).removesuffix("Fast")
    if kind not in known:
        raise ValueError(
            f"expected {folder / TOKENIZER_CONFIG} to name a tokenizer_class in {', '.join(known)}, got {name!r}"
        )
    return kind


def languages_of(folder: Path, settings: Mapping[str, Any], ids: Mapping[str, int], places: Places) -> Languages:
    """Returns the languages of a folder's tokenizer, with the defaults that its files name.

    Args:
        folder: the folder of the tokenizer.
        settings: the settings of the model.
        ids: the languages' ids, by their names.
        places: the positions of their tokens.

    Raises:
        ValueError: there are no languages, or a default isn't one of them.
    """
    named, forced = tokenizer_settings(folder), search_settings(folder, settings).get(FORCED)
    target = named.get("tgt_lang")
    if places == "start":
        forced = settings.get("decoder_start_token_id")
        target = None
    if forced is not None:
        target = next((name for name, i in ids.items() if i == forced), None)
        if target is None:
            raise ValueError(f"expected a {FORCED} that is one of the tokenizer's languages, got {forced!r}")
    return Languages(ids, places, source=named.get("src_lang"), target=target)


def read_weights(folder: Path) -> dict[str, Tensor]:
    old = folder / _OLD_WEIGHTS
    index = index_of(old)
    if (folder / WEIGHTS).is_file() or index_of(folder / WEIGHTS) or not (old.is_file() or index):
        return SavedWeights.in_folder(folder).read()
    if index is None:
        return _unpickled(old)
    state: dict[str, Tensor] = {}
    for file, names in read_index(index).items():
        tensors = _unpickled(file)
        check_shard(index, file, names, tensors)
        state |= tensors
    return state


def read_numbers(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder, with fp32 weights in the file in place of the quantised ones.

    Raises:
        ValueError: a file is missing or damaged, or the weights are quantised in an unsupported way.
    """
    state, file = read_weights(folder), folder / CONFIG
    settings = read_json(file) if file.is_file() else {}
    rounded = quantization_settings(folder, settings)
    return state if rounded is None else dequantized(settings, rounded, state, folder).state


def _unpickled(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as data:
        state = read_archive(data, file, "file")
    if not isinstance(state, dict):
        raise ValueError(f"expected {file} to hold tensors by name, got {type(state).__name__}")
    check_plain(file, state)
    check_finite(file, state)
    return state


def check_floating(settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Raises ValueError for weights that aren't floating-point numbers, or that the settings call quantised."""
    if (rounded := settings.get("quantization_config")) is not None:
        how = rounded.get("quant_method") if isinstance(rounded, Mapping) else rounded
        raise ValueError(f"expected weights that are not quantised, got a quantization_config of {how!r}")
    for name, tensor in state.items():
        if tensor.dtype not in FLOATING:
            raise ValueError(f"expected floating-point weights, got {name} of {tensor.dtype}")


def forbidden_of(saved: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that a model must not generate.

    Raises:
        ValueError: an id outside of the vocabulary.
    """
    if outside := [token for token in saved.never if token >= vocab_size]:
        raise ValueError(f"expected bad_words_ids below the vocabulary's size {vocab_size}, got {outside[0]}")
    return tuple(saved.never)


def first_equal(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three matrices, or the first three times if all are equal, so that the converted model ties them."""
    return (first, first, first) if all(equal_rows(one, first) for one in (second, third)) else (first, second, third)


def equal_rows(one: Tensor, other: Tensor) -> bool:
    """Returns whether two matrices are equal, of which some rows at a time are in memory if they are in a file."""
    if one is other or one.shape != other.shape:
        return one is other
    step = max(1, _NUMBERS_AT_ONCE // max(1, one.shape[1:].numel()))
    return all(torch.equal(one[i : i + step], other[i : i + step]) for i in range(0, len(one), step))


def without_row(matrix: Tensor, row: int) -> Tensor:
    """Returns a copy of a matrix in which one row is zero."""
    return matrix.index_fill(0, torch.tensor([row], device=matrix.device), 0.0)


def check_options(config: TransformerConfig, expected: Mapping[str, Any], family: str, *, one_vocabulary: bool) -> None:
    """Checks that a model of the family can compute the same as a `Transformer`.

    Raises:
        ValueError: an option differs from the expected value, heads are grouped, or there are two vocabularies and the
            family has one.
    """
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(f"expected a {family}, with {name}={value!r}, got {getattr(config, name)!r}")
    if config.num_kv_heads not in (None, config.num_heads):
        raise ValueError(f"expected a {family}, with as many key heads as query heads, got {config.num_kv_heads}")
    if one_vocabulary and config.source_vocab_size not in (None, config.vocab_size):
        raise ValueError(f"expected a {family}, with one vocabulary, got a separate one for the source")


def number_of(settings: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Returns an integer setting.

    Raises:
        ValueError: it is missing, not an integer, below `least`, or of more than 31 bits.
    """
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise ValueError(f"expected {name} to be an integer from {least} to 2**31 - 1, got {value!r:.60}")
    return value


def amount_of(settings: Mapping[str, Any], name: str) -> float:
    """Returns a setting that is a number of at least 0.

    Raises:
        ValueError: it is missing, not a number, or below 0.
    """
    value = settings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"expected {name} to be a number of at least 0, got {value!r:.60}")
    return value


def depth_of(settings: Mapping[str, Any], name: str, state: Mapping[str, Tensor]) -> int:
    """Returns a setting that is a number of layers.

    Raises:
        ValueError: it is not an integer, or exceeds the number of tensors.
    """
    value = number_of(settings, name)
    check_depth(name, value, len(state), "the settings")
    return value


def flag_of(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns a boolean setting; `default` if it is missing or null.

    Raises:
        ValueError: it has another value.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"expected {name} to be true or false, got {value!r}")
    return default if value is None else value


_NUMBERS_AT_ONCE = 1 << 20
Parts = Tensor | tuple[Tensor, ...]  # tensors to be concatenated (dimension 0)


def activation_of(settings: Mapping[str, Any], name: str, default: str, known: Mapping[str, str] = ACTIVATIONS) -> Any:
    """Returns the activation that a setting names, as the models here call it.

    Raises:
        ValueError: an activation that is not known.
    """
    activation = settings.get(name, default)
    if not isinstance(activation, str) or activation not in known:
        raise ValueError(f"expected {name} to be one of {(*known,)}, got {activation!r}")
    return known[activation]


def eos_setting(ids: SpecialIds) -> int | list[int]:
    """Returns the value of transformers' eos_token_id."""
    return ids.first_eos if len(ids.eos) == 1 else [*ids.eos]


def embedding_weights(source: Tensor, target: Tensor, output: Tensor) -> dict[str, Parts]:
    """Returns a `Transformer`'s embeddings and output matrix by their names; they are tied if all are one object."""
    if source is target is output:
        return {"embedding.weight": target}
    return {"source_embedding.weight": source, "target_embedding.weight": target, "output.weight": output}


def load_foreign(
    config: TransformerConfig | GPTConfig | BERTConfig,
    weights: Mapping[str, Parts],
    *,
    device: torch.device | str | None,
    dtype: torch.dtype,
    convert: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> Any:
    """Builds a model with the weights, in evaluation mode.

    Besides the model and the given weights, memory holds one converted tensor at a time. Matrices that are in a file
    stay there until they are asked for (`models.stored`), if the model is on the CPU. The model's `int4_groups` are the
    matrices that the file has as int4, for the caller to keep or to drop with the precision (`set_precision`).

    Args:
        config: the config of the model.
        weights: the tensors by name.
        device: the device of the parameters; None: the CPU.
        dtype: the dtype of the parameters.
        convert: (name, tensor) -> the tensor that the model holds.

    Raises:
        ValueError: missing, unexpected or misshapen tensors, or positions that take far more memory than the weights.
    """
    kinds: dict[type[Any], type[Any]] = {GPTConfig: GPT, BERTConfig: BERT, TransformerConfig: Transformer}
    kind = kinds[type(config)]

    def check(model: Any) -> None:
        expected = {name: Entry(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
        entries = {name: _entry(name, parts, convert) for name, parts in weights.items()}
        check_entries("the weights", "the settings", entries, expected)
        check_tables(model, "the settings")

    is_file = any(map(_is_in_file, weights.values()))
    stays = is_file and _stays(device)
    context = Unallocated if stays else Undrawn
    model = make_to_load(lambda device: kind(config, device=device, dtype=dtype), device, check, context)
    stored: dict[str, Stored] = {}
    with torch.no_grad():
        for name in quantized_names(model) if is_file else ():
            parts = tuple(convert(name, part) for part in _parts(weights[name]))
            if _is_in_file(parts):
                stored[name] = Stored(parts)  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            if stays and name not in stored:
                Unallocated.allocate(parameter)
        for name, target in model.state_dict().items():
            begin = 0
            for part in () if stays and name in stored else _parts(weights[name]):
                part = convert(name, part)
                target[begin : begin + len(part)].copy_(part)
                begin += len(part)
    model.eval()
    if groups := {name: source for name, source in stored.items() if source.has_groups}:
        model.int4_groups = StoredGroups(groups)
    if stays and stored:
        with Undrawn():
            leave_in_file(model, kind(config, device="meta", dtype=dtype), stored)
    return model


def _stays(device: torch.device | str | None) -> bool:
    """Returns whether the matrices of a model on the device may stay in a file."""
    return torch.device(device or "cpu").type == "cpu"


def _is_in_file(parts: Parts) -> bool:
    return all(hasattr(part, "groups") for part in _parts(parts))


def _parts(parts: Parts) -> tuple[Tensor, ...]:
    return (parts,) if isinstance(parts, Tensor) else parts


def _entry(name: str, weights: Parts, convert: Callable[[str, Tensor], Tensor]) -> Entry:
    """Returns the shape and the dtype of tensors after they are converted and concatenated."""
    parts = _parts(weights)
    try:
        shapes = [
            tuple(convert(name, torch.empty(part.shape, dtype=part.dtype, device="meta")).shape) for part in parts
        ]
    except (RuntimeError, IndexError):  # a tensor with another number of dimensions keeps its shape
        shapes = [tuple(part.shape) for part in parts]
    first, rest = shapes[0], shapes[1:]
    if rest and all(shape[1:] == first[1:] and shape for shape in shapes):
        first = (sum(shape[0] for shape in shapes), *first[1:])
    return Entry(first, parts[0].dtype)
