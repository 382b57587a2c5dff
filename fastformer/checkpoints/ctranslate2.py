"""Encoder-decoders in the folders that CTranslate2 reads, with the numbers of the file.

model.bin                     the weights, by name (`model_bin.py`)
config.json                   the names of special tokens, the eps of the norms
shared_vocabulary.json        a list of tokens; or source_vocabulary.json and target_vocabulary.json
source.spm, target.spm        the SentencePiece models of both sides (Marian), which the converter copies if it is told
                              to; or one of `_PIECES` for both; or the tokenizer.json of transformers
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastformer.checkpoints.file_matrix import FileMatrix
from fastformer.checkpoints.hf.common import (
    embedding_weights,
    first_equal,
    load_foreign,
    make_translator,
    read_file,
)
from fastformer.checkpoints.hf.t5 import MAX_LEN
from fastformer.checkpoints.model_bin import (
    BF16,
    MODEL,
    Array,
    Variables,
    is_rounded,
    layer_weights,
    norm_weights,
    quotients,
    read_tokens,
    read_variables,
)
from fastformer.data.backend import Backend
from fastformer.data.huggingface import LibraryBackend, read_library
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER, Tokenizer
from fastformer.files import read_json
from fastformer.languages import Languages
from fastformer.models import Transformer, TransformerConfig
from fastformer.models.quantization import INT8
from fastformer.ops.embedding import sinusoidal_positions
from fastformer.special_ids import SpecialIds

SPECIFICATION = "TransformerSpec"
GATED = {"gelu_tanh": "geglu_tanh", "silu": "swiglu"}
_NEVER = -1e4  # the logit of an id that the vocabulary lacks: its probability is 0
_BLANK = "<blank>"  # the padding of OpenNMT
_SINES = ("halves", "concatenated", "interleaved")
_RELATIVE = "relative_attention_bias"
_PIECES = ("sentencepiece.bpe.model", "spiece.model", "sentencepiece.model")
# The tokens of languages in NLLB and mBART-50, M2M100, and Marian, with the names in them; and whether a source begins
# with the target language's alone.
_LANGUAGES = (
    (re.compile(r"([a-z]{3}_[A-Z][a-z]{3}|[a-z]{2,3}_[A-Z]{2})"), False),
    (re.compile(r"__([a-z]{2,3})__"), False),
    (re.compile(r">>([^<>\s]+)<<"), True),
)


class Vocabularies(NamedTuple):
    """The tokens of both sides, each at its id."""

    source: list[str]
    target: list[str]


def read_vocabularies(folder: Path) -> Vocabularies:
    """Reads the lists of tokens.

    Raises:
        ValueError: a file is missing, or is no list of texts.
    """

    if (shared := folder / "shared_vocabulary.json").is_file():
        return Vocabularies(*[read_tokens(shared)] * 2)
    return Vocabularies(*[read_tokens(folder / f"{side}_vocabulary.json") for side in ("source", "target")])


class Rounded(NamedTuple):
    """The `Source` of a matrix of int8 or int16, whose parts are its integers and their scales."""

    place: str
    dtype: torch.dtype = torch.float32

    def numbers_of(self, shape: tuple[int, ...], stored: Array, scale: Array) -> Tensor:
        with np.errstate(over="ignore"):  # numbers that are not finite are refused
            numbers: Tensor = as_tensor(quotients(stored, scale))
        return numbers

    def groups_of(self, shape: tuple[int, ...], *parts: Array) -> None:
        return None

    def release(self, *parts: Array) -> None:
        """Does nothing: the system takes the memory of a mapped file if it needs it."""


class FileVariables(Variables):
    """Variables of a folder, whose rounded matrices stay in the file."""

    def __init__(self, variables: Mapping[str, Array], origin: Path) -> None:
        super().__init__(variables)
        self._origin = origin

    def matrix(self, name: str) -> Any:
        stored, scale = self.take(name)
        if scale is None or stored.ndim != 2:
            return quotients(stored, scale)
        rows = stored, np.broadcast_to(scale, stored.shape[:1])
        return FileMatrix(Rounded(f"{name} of {self._origin}"), stored.shape, rows)


def as_tensor(array: Any) -> Any:
    """Returns a tensor on an array's memory, or on a copy if it is unaligned; of a tuple, each."""
    if not isinstance(array, np.ndarray):
        return tuple(map(as_tensor, array)) if isinstance(array, tuple) else array
    tensor = torch.from_numpy(np.require(array, requirements=["A", "W"]))
    return tensor.view(torch.bfloat16) if array.dtype == BF16 else tensor


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """See `as_tensor`."""
    return {name: as_tensor(array) for name, array in arrays.items()}


def load_folder(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, Tokenizer]:
    """Loads the model and the tokenizer of a folder; see `load_transformer`.

    Raises:
        ImportError: the library of the tokenizer is not installed.
        ValueError: see `load_transformer`; the folder has no tokenizer, or one of another vocabulary.
    """
    model, vocabularies = load_transformer(folder, device=device, dtype=dtype)
    ends = ends_sources(vocabularies, read_json(folder / "config.json"))
    unk = model.config.special_ids.unk
    tables = [{token: i for i, token in enumerate(tokens)} for tokens in vocabularies]
    files = [folder / "source.spm", folder / "target.spm"]
    if not files[0].is_file():
        files = [folder / name for name in _PIECES if (folder / name).is_file()][:1] * 2
    backends: list[Backend]
    if files:
        processors = {file: read_sentencepiece(file, read_file(file)) for file in dict.fromkeys(files)}
        backends = [
            PieceBackend(processors[file], table, unk, has_codes=True)
            for file, table in zip(files, tables, strict=True)
        ]
    elif (file := folder / TOKENIZER).is_file():
        library = read_library(file, read_json(file))
        different = [token for token, i in tables[1].items() if library.token_to_id(token) not in (i, None)]
        if different or vocabularies.source != vocabularies.target:
            raise ValueError(f"expected {file} to have the ids of the vocabulary, got others: {different[:3]}")
        backends = [LibraryBackend(library, str(file))] * 2
    else:
        raise ValueError(
            f"expected the tokenizer in {folder}, source.spm and target.spm, {', '.join(_PIECES)} or {TOKENIZER}: copy "
            "it from the folder that was converted (--copy_files)"
        )
    options: dict[str, Any] = {"languages": _languages(tables[0]), "ends_sources": ends}
    if files and backends[0] is not backends[1]:
        options["target"] = backends[1]
    if not files and library.encode("").ids[:1] == [tables[0].get("<s>")]:
        options["bos"] = tables[0]["<s>"]
    return model, make_translator(backends[0], **options)(model.config)


def _languages(table: Mapping[str, int]) -> Languages | None:
    for pattern, is_asked in _LANGUAGES:
        ids = {match[1]: i for token, i in table.items() if (match := pattern.fullmatch(token))}
        if len(ids) > 1:
            return Languages(ids, "asked" if is_asked else "front")
    return None


def load_transformer(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, Vocabularies]:
    """Loads the model of a folder, with the tokens of its ids.

    A model whose decoder starts from a zero embedding (Marian) has one id more than its vocabulary: PAD, whose
    probability is 0.

    Args:
        folder: the folder; its files are listed at the top of this module.
        device: the device of the parameters; None: the CPU.
        dtype: the dtype of the parameters; None: bf16 for a model of bf16, else fp32.

    Raises:
        ValueError: the file is damaged, or the model has parts that `Transformer` doesn't have.
    """
    stored, vocabularies = read_variables(folder / MODEL), read_vocabularies(folder)
    settings = read_json(folder / "config.json")
    return transformer_of(folder, stored, vocabularies, settings, device=device, dtype=dtype), vocabularies


def transformer_of(
    origin: Path,
    stored: tuple[str, dict[str, Array]],
    vocabularies: Vocabularies,
    settings: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Transformer:
    """Builds a model from the result of `read_variables`; see `load_transformer`. The origin is for messages."""
    name, variables = stored
    if name != SPECIFICATION:
        raise ValueError(f"{origin}: expected a {SPECIFICATION}, an encoder-decoder, got a {name!r:.60}")
    try:
        model = _transformer(FileVariables(variables, origin), vocabularies, settings, device, dtype)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error
    if is_rounded(variables):
        model.precision = INT8
    return model


def ends_sources(vocabularies: Vocabularies, settings: Mapping[str, Any]) -> bool:
    """Returns whether sources end with EOS, which those of OpenNMT don't unless its settings say so."""
    if settings.get("add_source_bos"):
        raise ValueError("expected a model whose sources begin with their text, got one with add_source_bos")
    return _BLANK not in vocabularies.source or bool(settings.get("add_source_eos"))


def _transformer(
    variables: Variables,
    vocabularies: Vocabularies,
    settings: Mapping[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Transformer:
    _refuse(variables)
    source, target, output = _embeddings(variables)
    is_rms = "encoder/layer_0/self_attention/layer_norm/beta" not in variables
    eps = settings.get("layer_norm_epsilon")
    depths = {side: variables.count(f"{side}/layer_") for side in ("encoder", "decoder")}
    heads, *others = {variables.whole(f"{side}/num_heads") for side in depths}
    if others:
        raise ValueError(f"expected one num_heads of encoder and decoder, got {heads} and {others[0]}")
    d_model = target.shape[1]
    counts = len(vocabularies.source), len(vocabularies.target), len(vocabularies.target)
    if (rows := tuple(map(len, (source, target, output)))) != counts:
        raise ValueError(f"expected matrices with a row for each token of the vocabularies, {counts}, got {rows}")
    ids, vocab_size = _special_ids(variables, vocabularies, settings)
    source, target, output = first_equal(*(_with_rows(matrix, vocab_size) for matrix in (source, target, output)))
    bias = as_tensor(variables.matrix("decoder/projection/bias")) if "decoder/projection/bias" in variables else None
    kind = variables.activation(*depths)
    is_gated = "encoder/layer_0/ffn/linear_0_noact/weight" in variables
    if is_gated and kind not in GATED:
        raise ValueError(f"expected a gated activation of {(*GATED,)}, got {kind!r}")
    factor = variables.embedding_factor(d_model, "encoder", "decoder")
    if factor != 1.0 and not math.isclose(factor, d_model**0.5, rel_tol=1e-3):
        raise ValueError(f"expected embeddings times 1 or {d_model**0.5:g}, the root of the width, got {factor:g}")
    scaled_output = variables.scalar("decoder/scale_outputs", 1.0)
    if scaled_output not in (0.0, 1.0) and not math.isclose(scaled_output, d_model**-0.5, rel_tol=1e-6):
        raise ValueError(f"expected scale_outputs {d_model**-0.5:g}, got {scaled_output:g}")
    positions, tables, sizes = _positions(variables, d_model, ids.pad)
    weights: dict[str, Any] = {**tables, **embedding_weights(source, target, output)}
    embedding_norm = "encoder/layernorm_embedding/gamma" in variables
    for side, place in (("encoder", "source"), ("decoder", "target")):
        if embedding_norm:
            weights |= as_tensors(norm_weights(variables, f"{side}/layernorm_embedding", f"{place}_embedding_norm"))
        if f"{side}/layer_norm/gamma" in variables:
            weights |= as_tensors(norm_weights(variables, f"{side}/layer_norm", f"{side}.norm"))
    for side, depth in depths.items():
        for i in range(depth):
            layer = layer_weights(variables, f"{side}/layer_{i}", f"{side}.layers.{i}", d_model // heads)
            weights |= as_tensors(layer)
    bias = torch.zeros(len(vocabularies.target), dtype=target.dtype) if bias is None else bias
    if has_bias := bool(bias.any()) or len(bias) < vocab_size:
        weights["output_bias"] = torch.nn.functional.pad(bias, (0, vocab_size - len(bias)), value=_NEVER)
    attention_bias = any(name.endswith("proj_bias") for name in weights)
    norm_first = bool(variables.both("pre_norm"))
    config = TransformerConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=heads,
        d_ff=weights["encoder.layers.0.linear2.weight"].shape[1],
        num_encoder_layers=depths["encoder"],
        num_decoder_layers=depths["decoder"],
        norm_first=norm_first,
        norm="rms" if is_rms else "layer",
        layer_norm_eps=(1e-6 if is_rms else 1e-5) if eps is None else eps,
        activation=GATED[kind] if is_gated else kind,  # type: ignore[arg-type]
        positions=positions,  # type: ignore[arg-type]
        scale_embedding=factor != 1.0,
        scale_output=scaled_output not in (0.0, 1.0),
        embedding_norm=embedding_norm,
        embed_pad=any(bool(matrix[ids.pad : ids.pad + 1].any()) for matrix in (source, target)),
        tie_embeddings=source is target is output,
        output_bias=has_bias,
        attention_bias=attention_bias,
        bias=not is_rms,
        special_ids=ids,
        **sizes,
    )
    variables.check_empty()
    return load_foreign(config, weights, device=device, dtype=dtype or dtype_of(weights))


def dtype_of(weights: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of a model, which its matrices decide.

    It is bf16 for matrices of bf16, unless one that was made of them has more digits, or was rounded; else fp32.
    """
    matrices, bf16 = [each for each in weights.values() if isinstance(each, tuple) or each.dim() > 1], torch.bfloat16
    if not all(type(each) is Tensor for each in matrices) or all(each.dtype != bf16 for each in matrices):
        return torch.float32  # a matrix in the file, or several, would be read
    is_exact = all(each.dtype == bf16 or torch.equal(each, each.to(bf16).to(each.dtype)) for each in matrices)
    return bf16 if is_exact else torch.float32


def _refuse(variables: Variables) -> None:
    """Removes the options that every supported model has in common, and refuses other values by name."""
    if variables.scalar("decoder/alibi", 0.0):
        raise ValueError("expected a model without alibi, got one with it")
    variables.drop("decoder/alibi_use_positive_positions", "decoder/scale_alibi")
    for name, reason in (
        ("encoder/embeddings_1/weight", "several features of a source token"),
        (
            "encoder/layer_0/self_attention/relative_position_keys",
            "relative positions that are keys (Shaw et al. 2018)",
        ),
        ("encoder/layer_0/self_attention/rotary_dim", "rotary positions"),
        ("decoder/final_logit_softcapping", "a soft cap"),
        ("decoder/project_in/weight", "projections around the decoder"),
    ):
        if name in variables:
            raise ValueError(f"expected a Transformer that fastformer has, got one with {reason}")
    if variables.both("multi_query_attention", 0.0) or variables.scalar("encoder/embeddings_merge", 0.0):
        raise ValueError("expected as many heads of keys as of queries and one embedding of a source token")
    variables.drop("decoder/alignment_layer", "decoder/alignment_heads")


def _embeddings(variables: Variables) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the matrices of source, target and output, as one object if all have the same numbers."""
    names = ("encoder/embeddings_0/weight", "decoder/embeddings/weight", "decoder/projection/weight")
    matrices = [as_tensor(variables.matrix(name)) for name in names]
    if any(matrix.dim() != 2 or matrix.shape[1] != matrices[0].shape[1] for matrix in matrices):
        raise ValueError(f"expected embeddings of one width, got shapes {[(*m.shape,) for m in matrices]}")
    return first_equal(*matrices)


def _with_rows(matrix: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, count - len(matrix))) if count > len(matrix) else matrix


def _special_ids(
    variables: Variables, vocabularies: Vocabularies, settings: Mapping[str, Any]
) -> tuple[SpecialIds, int]:
    """Returns the special ids, and the number of ids that they need."""
    largest = max(map(len, vocabularies))

    def id_of(name: str, default: str) -> int:
        token = settings.get(name, default)
        places = {tokens.index(token) if token in tokens else None for tokens in vocabularies}
        if len(places) != 1 or None in places:
            raise ValueError(f"expected {name} {token!r:.60} to have one id in both vocabularies, got {places}")
        return int(places.pop() or 0)

    eos, unk = id_of("eos_token", "</s>"), id_of("unk_token", "<unk>")
    if variables.scalar("decoder/start_from_zero_embedding", 0.0):
        return SpecialIds(pad=largest, eos=eos, unk=unk, start=largest), largest + 1
    token = settings.get("decoder_start_token", "<s>")
    if token is None:
        raise ValueError(
            "expected a decoder_start_token, got null: the first token is a language that each call chooses"
        )
    if token not in vocabularies.target:
        raise ValueError(f"expected the decoder_start_token {token!r:.60} in the target's vocabulary")
    start = vocabularies.target.index(token)
    name = _BLANK if _BLANK in vocabularies.source else "<pad>"
    pads = {tokens.index(name) if name in tokens else None for tokens in vocabularies}
    pad = pads.pop() if len(pads) == 1 else None
    if pad is None:
        return SpecialIds(pad=largest, eos=eos, unk=unk, start=start), largest + 1
    return SpecialIds(pad=pad, eos=eos, unk=unk, start=start), largest


def _positions(variables: Variables, d_model: int, pad: int) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Returns the kind of positions, their tables as weights, and the sizes of the config.

    Args:
        pad: the id of PAD, after which the positions of an M2M100 are counted.
    """
    names = [f"{side}/position_encodings/encodings" for side in ("encoder", "decoder")]
    if all(name in variables for name in names):
        tables = [as_tensor(variables.matrix(name)) for name in names]
        if any(table.dim() != 2 or table.shape[1] != d_model for table in tables):
            raise ValueError(f"expected position encodings of width {d_model}, got {[(*t.shape,) for t in tables]}")
        rows = min(map(len, tables))
        source, target = (table[:rows].float() for table in tables)
        if torch.equal(source, target):
            for kind, first in itertools.product(_SINES if d_model % 2 == 0 else (), (0, pad + 1)):
                if torch.allclose(source, sinusoidal_positions(rows + first, d_model, kind)[first:], rtol=0, atol=1e-5):
                    return kind, {}, {"max_len": rows, "first_position": first}
        return "learned", {"source_position.table": source, "target_position.table": target}, {"max_len": rows}
    biases = {}
    for side in ("encoder", "decoder"):
        if f"{side}/layer_0/self_attention/{_RELATIVE}" not in variables:
            raise ValueError("expected a model with a table of positions or a relative bias, got neither")
        table = variables.matrix(f"{side}/layer_0/self_attention/{_RELATIVE}")
        biases[f"{side}_position_bias.table"] = as_tensor(table)
        for i in range(1, variables.count(f"{side}/layer_")):
            variables.drop(f"{side}/layer_{i}/self_attention/{_RELATIVE}")
    distances = {
        variables.whole(f"{side}/layer_{i}/self_attention/relative_attention_max_distance", 128.0)
        for side in ("encoder", "decoder")
        for i in range(variables.count(f"{side}/layer_"))
    }
    if len(distances) != 1:
        raise ValueError(f"expected one relative_attention_max_distance, got {sorted(distances)}")
    buckets = len(biases["encoder_position_bias.table"])
    return "relative", biases, {"num_buckets": buckets, "max_distance": distances.pop(), "max_len": MAX_LEN}
