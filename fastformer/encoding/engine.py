"""Runs a `models.BERT`, or the layers of a `models.GPT`, for inference: all in one C++ call, or by its modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.encoding import batches
from fastformer.engine.checks import why_not_now
from fastformer.engine.frozen import packed
from fastformer.generation.engines import cpp
from fastformer.generation.engines.cpp import arrays_of, bias_by_distance, shared_options
from fastformer.generation.engines.cpp_support import why_not_in
from fastformer.generation.engines.kv_cache import packed as packed_ids
from fastformer.generation.model_protocols import check_precision, dtype_precision, own_precision, why_not_by_modules
from fastformer.models import BERT, GPT
from fastformer.models.as_made import find_guards
from fastformer.models.pooling import POOLINGS, Pooling, pool
from fastformer.models.stored import stand_in
from fastformer.ops import _extension

Rows: TypeAlias = Sequence[Sequence[int]]
Array: TypeAlias = npt.NDArray[np.float32]

_NO_LISTS = "expected ids, and token_types, as a list of integers for each text"
# Why there is no C++ code to encode with a Gemma 4.
OWN_ENDS = "it encodes with no model whose layers share keys, differ in their heads or have embeddings of their own"
_MODULE_TOKENS = 8192  # the most tokens that the modules compute together


class _EncoderBinding(Protocol):
    """The interface of Encoder in csrc/bindings/encoder.cpp."""

    def encode(
        self,
        ids: Rows,
        token_types: Rows | None,
        pooling: str,
        normalize: bool,
        threads: int,
        positions: Rows | None = None,
        places: Rows | None = None,
        unseen: Sequence[int] | None = None,
    ) -> Array: ...


class _Packed(NamedTuple):
    """The packed parts of a model in a precision. They hold no reference to the model."""

    encoder: _EncoderBinding
    pooler: nn.Module | None  # in fp32
    head: nn.Module | None


class Gaps(NamedTuple):
    """The places of texts' tokens in rows from which padding was omitted. An empty list means 0, 1, 2 and so on.

    Attributes:
        positions: the row of the table of positions that each token of each text has.
        places: the column of each token of each text, in which attention counts distances; increasing among unseen
            tokens, and among the others.
        unseen: how many tokens at the beginning of each text attend to the others, but are not attended to. Such a
            text needs its places.
    """

    positions: Rows
    places: Rows
    unseen: Sequence[int]


class PackedEncoder(NamedTuple):
    """The packed weights of a model in a precision, without its pooler and head, and without a reference to the model.

    Attributes:
        encoder: the C++ object.
        max_len: the most tokens in a text.
        token_types: the number of token types.
    """

    encoder: _EncoderBinding
    max_len: int
    token_types: int

    def states(
        self,
        ids: Rows,
        token_types: Rows | None,
        gaps: Gaps | None = None,
        pooling: str = "none",
        normalize: bool = False,
    ) -> Array:
        """Returns the token states of texts, concatenated, (tokens, d_model) in fp32. See `EncoderEngine.encode`."""
        return _call(self.encoder, ids, token_types, pooling, normalize, *(gaps or ()))


class EncoderEngine:
    """Encodes texts, as ids, with a `models.BERT`: hidden states, a vector for each text, or the logits of its labels.

    Of a `models.GPT` it computes the hidden states in the same way, without a cache.

    On a CPU the whole encoder is one C++ call, from weights that are packed once for all engines of the model. fp32
    computes the same as the model. bf16 rounds the weights and their inputs; int8 has a scale for each output of a
    weight, and a scale and a zero point for each row of its inputs; int4 has the same inputs as int8, and a scale for
    each 32 weights of an output. The residual stream, norms, softmax, pooling, the pooler and the head are always fp32.
    A text's results are the same, bit for bit, whatever its neighbours and the number of threads. If weights change,
    the next call packs them again; `fastformer.generation.repack` describes the changes that it may miss.

    On a GPU, or if the C++ code would not compute the same as the modules, the model's modules run, in their own
    precision.

    Several threads may call one engine at once.

    Args:
        model: the encoder. The engine holds a reference to it.
        precision: "fp32", "bf16", "int8" or "int4"; None: the model's own.

    Raises:
        ValueError: the model is not a BERT or a GPT, or neither the C++ code nor the modules compute in the precision.
    """

    def __init__(self, model: BERT | GPT, precision: str | None = None) -> None:
        if not isinstance(model, BERT | GPT):
            raise ValueError(f"expected a models.BERT or a models.GPT, got {type(model).__name__}")
        check_precision(precision)
        self.model, self.precision = model, precision or own_precision(model)
        if self._cpp(may_be_old=True) is None:
            self._check_modules()

    @staticmethod
    def why_unsupported(model: object, precision: str | None = None) -> str | None:
        """Returns the reason why the C++ code can't compute the same as the model's modules in this precision.

        Returns:
            The reason, as a readable text; None if the model runs in C++.

        Raises:
            ValueError: the precision doesn't exist.
        """
        check_precision(precision)
        return _why_not(model, precision)

    @property
    def name(self) -> str:
        """The engine that runs the model in its current state: "cpp" or "modules"."""
        return "cpp" if _why_not(self.model, self.precision) is None else "modules"

    def encode(
        self,
        ids: Rows,
        token_types: Rows | None = None,
        pooling: Pooling | Literal["none", "pooler"] = "mean",
        normalize: bool = False,
        gaps: Gaps | None = None,
    ) -> Array:
        """Encodes texts of any lengths.

        Args:
            ids: the tokens of each text, with special tokens and without padding.
            token_types: the token types of each text; None: all are 0.
            pooling: "cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean" or "pooler", as in
                `BERT.pooled`; "none": the states of all tokens, with the texts concatenated.
            normalize: divide each row by its Euclidean length.
            gaps: the places of the tokens, if some of them are not attended to; only the C++ code knows them.

        Returns:
            (texts, d_model), or (tokens, d_model) for "none", fp32.

        Raises:
            ValueError: a text has no tokens or is longer than the model's max_len, an id or a type is out of the
                model's range, the pooling is unknown, or there are gaps and the C++ code doesn't run the model.
        """
        if pooling not in (*POOLINGS, "none", "pooler"):
            raise ValueError(f"expected a pooling in {('none', *POOLINGS, 'pooler')}, got {pooling!r}")
        if pooling == "pooler" and getattr(self.model, "pooler", None) is None:
            raise ValueError("expected a model with a pooler for pooling 'pooler', got one without")
        packed = self._cpp()
        if gaps is None:
            return self._encode(packed, ids, token_types, pooling, normalize)
        if packed is None:
            raise ValueError(
                "expected a model that the C++ code runs, for tokens that are not attended to; it doesn't: "
                f"{_why_not(self.model, self.precision)}"
            )
        return _call(packed.encoder, ids, token_types, pooling, normalize, *gaps)

    def _encode(
        self, packed: _Packed | None, ids: Rows, token_types: Rows | None, pooling: str, normalize: bool
    ) -> Array:
        if token_types is not None and not num_types(self.model):
            raise ValueError("expected no token_types: the model has no embeddings of them (config.token_types 0)")
        if packed is None:
            return self._by_modules(ids, token_types, pooling, normalize)
        if pooling != "pooler":
            return _call(packed.encoder, ids, token_types, pooling, normalize)
        first = _call(packed.encoder, ids, token_types, "cls", False)
        rows = _apply_rows(cast(nn.Module, packed.pooler), first, torch.tanh)
        return F.normalize(torch.from_numpy(rows)).numpy() if normalize else rows

    def classify(self, ids: Rows, token_types: Rows | None = None) -> Array:
        """Returns the logits of each text's labels, (texts, num_labels) fp32. See `encode` for arguments and errors."""
        if not isinstance(self.model, BERT) or self.model.head is None:
            raise ValueError("expected a model with a head (config.num_labels), got one without")
        config = self.model.config
        packed = self._cpp()
        kind = "pooler" if config.head == "bert" else "none" if config.head_pooling == "late" else config.head_pooling
        rows = self._encode(packed, ids, token_types, kind, False)
        head = self.model.head if packed is None else cast(nn.Module, packed.head)
        if kind == "none":
            return _mean_outputs(head, rows, [*map(len, ids)])
        if packed is not None:
            return _apply_rows(head, rows)
        with torch.inference_mode():
            logits: Tensor = head(torch.from_numpy(rows).to(self.model.embedding.weight))
        return _as_array(logits)

    def _cpp(self, *, may_be_old: bool = False) -> _Packed | None:
        model, precision = self.model, self.precision
        if why_not_encoded(_kind_of(model), model, precision) is not None:
            return None
        name = f"encoder {precision}"
        try:
            return packed(model, name, lambda: _pack(model, precision), find=_tensors_of, may_be_old=may_be_old)
        except _Unsupported:
            return None

    def _check_modules(self) -> None:
        reason = why_not_by_modules(self.model, self.precision)
        if reason is not None and self.precision != dtype_precision(self.model):
            why = _why_not(self.model, self.precision)
            raise ValueError(f"expected a model that computes in {self.precision}; the C++ code doesn't run it: {why}")

    def _by_modules(self, ids: Rows, token_types: Rows | None, pooling: str, normalize: bool) -> Array:
        self._check_modules()
        try:
            _check(ids, token_types, self.model)
        except TypeError:
            raise ValueError(_NO_LISTS) from None
        pooled: list[Array | None] = [None] * len(ids)
        for part in batches.packed([len(text) for text in ids], _MODULE_TOKENS):
            types = None if token_types is None else [token_types[i] for i in part]
            for index, rows in zip(part, self._rows([ids[i] for i in part], types, pooling, normalize), strict=True):
                pooled[index] = rows
        if not pooled:
            return np.zeros((0, self.model.config.d_model), np.float32)
        return np.concatenate(cast(list[Array], pooled))

    def _rows(self, ids: Rows, types: Rows | None, pooling: str, normalize: bool) -> list[Array]:
        """Returns the rows of each text, computed by the modules."""
        device = self.model.embedding.weight.device
        tokens, layout = packed_ids(ids, device)
        of_types = None if types is None else packed_ids(types, device)[0]
        with torch.inference_mode():
            if isinstance(self.model, BERT):
                hidden = self.model.encode(tokens, layout=layout, token_types=of_types)
            else:
                hidden = self.model.decode(tokens, layout=layout)
            # The pooler's weights have the model's dtype; pooling is in fp32.
            if pooling == "pooler":
                hidden = cast(BERT, self.model).pooled(hidden, layout, "pooler")
            elif pooling != "none":
                hidden = pool(hidden.float(), layout, pooling)
            if normalize:
                hidden = F.normalize(hidden.float(), dim=-1)
        ends = np.cumsum([len(text) for text in ids])[:-1]
        return np.split(_as_array(hidden), ends if pooling == "none" else len(ids))


class _Unsupported(Exception):
    """Raised if a model is not as its config makes it."""


def _tensors_of(model: BERT | GPT) -> list[Tensor]:
    """Returns the tensors of a model, or raises `_Unsupported` if it is not as its config makes it."""
    guards, reason = find_guards(model)
    if guards is None:
        raise _Unsupported(reason)
    return guards.tensors


def _why_not(model: object, precision: str | None) -> str | None:
    """Returns what `EncoderEngine.why_unsupported` does, also for a model's own precision, such as "float64"."""
    return why_not_encoded(_kind_of(model), model, precision) or find_guards(cast(BERT, model))[1]


def _kind_of(model: object) -> type[nn.Module]:
    return GPT if isinstance(model, GPT) else BERT


def num_types(model: BERT | GPT) -> int:
    """Returns the number of a model's token types; 0: it has no embeddings of them."""
    return model.config.token_types if isinstance(model, BERT) else 0


def why_not_encoded(kind: type[nn.Module], model: object, precision: str | None) -> str | None:
    """Returns why the C++ code can't encode with a model of this class, except for reasons in its modules; or None."""
    if (missing := why_no_encoder()) is not None:
        return missing
    if type(model) is not kind:
        return f"it only supports models.{kind.__name__}, and a {type(model).__name__} may compute something else"
    if isinstance(model, GPT) and model.config.parallel_residual:
        return "it encodes with no model that has a parallel residual"
    if isinstance(model, GPT) and (model.config.has_unlike_layers or model.config.has_own_ends):
        return OWN_ENDS
    return why_not_now() or why_not_in(precision, model)


def why_no_encoder() -> str | None:
    """Returns the reason why the C++ code can't encode on this machine, whatever the model, or None if it can."""
    return _extension.why_missing("Encoder")


def pack_encoder(model: BERT | GPT, precision: str, last_position: Tensor | None = None) -> PackedEncoder | str:
    """Packs the weights of a model, which may be freed afterwards; or returns why the C++ code can't compute it.

    Args:
        model: the encoder, as its config made it.
        precision: see `EncoderEngine`.
        last_position: (d_model,), a row after the model's table of positions, which only `Gaps` may name; None: none.
    """
    reason = why_not_encoded(_kind_of(model), model, precision)
    if reason is not None:
        return reason
    encoder = _packed_encoder(model, precision, last_position)
    return PackedEncoder(encoder, model.config.max_len, num_types(model))


def _call(encoder: _EncoderBinding, ids: Rows, types: Rows | None, pooling: str, normalize: bool, *gaps: Any) -> Array:
    try:
        return encoder.encode(ids, types, pooling, bool(normalize), torch.get_num_threads(), *gaps)
    except TypeError:
        raise ValueError(_NO_LISTS) from None


def _apply_rows(module: nn.Module, rows: Array, activation: Any = None) -> Array:
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        # Row by row: a product with a different number of rows sums in a different order.
        outputs = [module(row) for row in torch.from_numpy(rows).split(1)]
        out: Tensor = torch.cat(outputs) if outputs else module(torch.from_numpy(rows))
        return _as_array(out if activation is None else activation(out))


def _mean_outputs(module: nn.Module, rows: Array, lengths: list[int]) -> Array:
    """Returns the mean of a module's outputs at each text's rows, one text at a time for the same reason."""
    weight = next(module.parameters())
    with torch.inference_mode(), torch.autocast(weight.device.type, enabled=False):
        outputs = [module(part.to(weight)).float().mean(0) for part in torch.from_numpy(rows).split(lengths)]
        return _as_array(torch.stack(outputs) if outputs else module(torch.from_numpy(rows).to(weight)))


def _as_array(x: Tensor) -> Array:
    array: Array = x.float().cpu().numpy()
    return array


def _check(ids: Rows, token_types: Rows | None, model: BERT | GPT) -> None:
    """Checks the ids and token types in the same way as the C++ code."""
    config = model.config
    if token_types is not None and [*map(len, token_types)] != [*map(len, ids)]:
        raise ValueError("expected token_types of each token of each text")
    for name, rows, size in (("ids", ids, config.vocab_size), ("token_types", token_types or [], num_types(model))):
        for i, text in enumerate(rows):
            if not 1 <= len(text) <= config.max_len:
                raise ValueError(f"{name}: expected texts of 1 to {config.max_len} tokens, got {len(text)} in text {i}")
            for token in text:
                if not isinstance(token, int | np.integer):
                    raise ValueError(f"{_NO_LISTS}, got {token!r} in text {i}")
                if not 0 <= token < size:
                    raise ValueError(f"{name}: expected numbers from 0 to {size - 1}, got {token} in text {i}")


def _pack(model: BERT | GPT, precision: str) -> _Packed:
    pooler, head = (model.pooler, model.head) if isinstance(model, BERT) else (None, None)
    return _Packed(_packed_encoder(model, precision), _in_fp32(pooler), _in_fp32(head))


def _packed_encoder(model: BERT | GPT, precision: str, last_position: Tensor | None = None) -> _EncoderBinding:
    extension, model = cast(Any, _extension.module()), stand_in(model)
    weights = extension.PackedModel(pack_options(model, precision), pack_tensors(model, precision, last_position))
    return cast(_EncoderBinding, extension.Encoder(weights))


def _in_fp32(module: nn.Module | None) -> nn.Module | None:
    return None if module is None else copy.deepcopy(module).float().requires_grad_(False).eval()


def pack_options(model: BERT | GPT, precision: str) -> dict[str, object]:
    """Returns the options of a model that its tensors don't show, for ModelOptions in csrc/engine/packed_model.h."""
    if isinstance(model, GPT):
        options = cpp.pack_options(model, precision)
        return options | {
            "num_encoder_layers": options["num_decoder_layers"],
            "encoder_windows": options["decoder_windows"],
            "causal_encoder": model.config.is_causal,
            "num_decoder_layers": 0,
            "decoder_windows": [],
        }
    config = model.config
    return shared_options(config, model.encoder.layers[0], model.embedding, precision) | {
        "num_encoder_layers": len(model.encoder.layers),
        "norm_placement": "pre" if config.norm_first else "sum",
        "skips_first_norm": not config.first_norm,
        "encoder_windows": [config.window_size if has_window else -1 for has_window in config.windows],
    }


def pack_tensors(model: BERT | GPT, precision: str, last_position: Tensor | None = None) -> dict[str, Any]:
    """Returns the tensors by their names in csrc/engine/packed_model.h; for int4, matrices hold whole numbers."""
    if isinstance(model, GPT):
        named = {name: tensor for name, tensor in cpp.named_tensors(model).items() if not name.startswith("output")}
        sides = (("decoder.", "encoder."), ("target_", "source_"))
        for old, new in sides:
            named = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in named.items()}
        return arrays_of(model, named, precision)
    tensors: dict[str, Tensor] = {
        f"encoder.{name}": p for name, p in model.encoder.named_parameters(remove_duplicate=False)
    }
    embedding = model.embedding
    tensors["source_embedding"] = embedding.weight
    if embedding.position is not None:
        table = embedding.position.table
        tensors["source_positions"] = table if last_position is None else torch.cat([table, last_position[None]])
    if model.token_type_embedding is not None:
        tensors["source_types"] = model.token_type_embedding.weight
    for name, module in (("norm", model.embedding_norm), ("projection", model.embedding_projection)):
        if module is not None:
            prefix = "source_embedding_norm" if name == "norm" else "source_projection"
            tensors |= {f"{prefix}.{parameter}": p for parameter, p in module.named_parameters()}
    for prefix, rotary in (("", model.rotary), ("local_", model.local_rotary)):
        if rotary is not None:
            tensors[f"{prefix}cos"], tensors[f"{prefix}sin"] = rotary.cos, rotary.sin
    if model.position_bias is not None:
        head_dim = model.encoder.layers[0].self_attn.head_dim
        tensors["encoder_position_bias"] = bias_by_distance(model.position_bias, model.config.max_len, head_dim)
    return arrays_of(model, tensors, precision)
