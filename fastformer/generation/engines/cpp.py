"""Decodes in C++: a whole step in one call, and whole greedy and beam searches, in fp32, bf16, int8 or int4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fastformer.checkpoints.hf.adapters import Adapter
from fastformer.engine.frozen import packed
from fastformer.extension import extension_module
from fastformer.generation.engines.base import (
    Candidates,
    DraftingBatch,
    Engine,
    KnownPrefix,
    Limits,
    Prompt,
    Readings,
    SearchingBatch,
    Selection,
)
from fastformer.generation.engines.cpp_layers import options_of_layers
from fastformer.generation.engines.cpp_support import why_not_supported
from fastformer.generation.engines.sampling import choose
from fastformer.generation.evaluation import modules_of
from fastformer.generation.model_protocols import Model, own_precision
from fastformer.generation.native_search import NativeSearch
from fastformer.models import GPT, Transformer
from fastformer.models.as_made import tensors_of
from fastformer.models.gpt import GPTConfig
from fastformer.models.quantization import GROUP, INT4, LEVELS, SCALE, ZERO, Groups, groups_of, num_groups, to_groups
from fastformer.models.stored import Stored, has_stored, stand_in, stored_in
from fastformer.nn import Embedding, MultiheadAttention, RelativePositionBias
from fastformer.nn.feed_forward import fused_name

BLOCK_SIZE = 16  # tokens; csrc/engine/prefix_table.h's kBlockTokens

Array = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.uint8]
Rows = list[list[int]]


class Session(Protocol):
    """The interface of Session in csrc/bindings/decoder.cpp."""

    def admit(
        self,
        sources: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        threads: int,
        adapters: Sequence[object] = (),
    ) -> list[int]: ...
    def step(
        self,
        tokens: Sequence[int],
        k: int,
        log_probs: bool,
        logit_rows: Sequence[int],
        logits: npt.NDArray[np.float32] | None,
        threads: int,
        masked_rows: Sequence[int] | None = None,
        masks: npt.NDArray[np.uint8] | None = None,
        counts: Sequence[int] = (),
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...
    def run(
        self,
        searches: Sequence[object],
        tokens: Sequence[int],
        max_steps: int,
        seconds: float,
        least_rows: int,
        log_probs: bool,
        threads: int,
    ) -> list[int]: ...
    def draft(
        self,
        tokens: Sequence[int],
        counts: Sequence[int],
        chances: Sequence[float],
        least: Sequence[Sequence[float]],
        threads: int,
    ) -> list[tuple[list[int], list[int]]]: ...
    def cut(self, counts: Sequence[int]) -> None: ...
    def reorder(self, parents: Sequence[Sequence[int]]) -> None: ...
    def release(self, groups: Sequence[int]) -> None: ...
    def set_shortlist(self, ids: Sequence[int]) -> None: ...
    def free_tokens(self) -> int: ...
    def step_tokens(self) -> int: ...
    def shared_tokens(self) -> int: ...
    def known(self, tokens: Sequence[int], adapter: object = None) -> tuple[int, int]: ...


class CppEngine(Engine):
    """Steps a `models.Transformer` or a `models.GPT` on the CPU, from weights that are packed once for all engines.

    fp32 computes the same as the model. bf16 rounds the weights and their inputs; int8 has a scale for each output of a
    weight, and a scale and a zero point for each row of its inputs; int4 has the same inputs as int8, and a scale for
    each 32 weights of an output. The residual stream, norms and softmax are always fp32. Keys and values, and the
    tables of embeddings and positions, are fp32 or, in the smaller precisions, bf16; or keys and values are int8, with
    an fp32 scale for each token and head.
    A row's results are the same, bit for bit, whatever its neighbours, the number of threads, and the tokens of its
    prompt that were read before: the cache keeps the tokens that were read as a prompt, in blocks of 16 tokens. If
    weights change, they are packed again when the next batch begins; `engine.frozen.stamp_of` describes which
    changes it notices, and `repack` those that it doesn't.

    Args:
        model: the model to decode; see `why_unsupported` for the models that the engine can't decode.
        precision: "fp32", "bf16", "int8" or "int4"; None: the model's own.
        cache_dtype: "int8"; None: that of the computation, fp32 or bf16.
    """

    name: ClassVar[str] = "cpp"
    cache_dtypes: ClassVar[tuple[str, ...]] = ("int8",)
    block_size = BLOCK_SIZE
    device = torch.device("cpu")

    def __init__(self, model: Model, precision: str | None = None, cache_dtype: str | None = None) -> None:
        assert isinstance(model, Transformer | GPT)
        self.precision = precision or own_precision(model, is_of_one_dtype=True)
        self.cache_dtype = cache_dtype
        self._model, self._config = model, model.config
        self._attention = _attention(model)
        self._shortlist: list[int] = []
        self._adapters: dict[str, Adapter] = {}
        self._packed_adapters: dict[Adapter, tuple[object, object]] = {}  # with the model for which each was packed
        if not has_stored(modules_of(model)):  # else the first batch packs the weights, from the file
            self.prepacked(may_be_old=True)  # each batch checks again whether the weights have changed

    def prepacked(self, *, may_be_old: bool = False) -> object:
        """Returns the `PackedModel` of the model's current weights; see `engine.frozen`."""
        model, precision = self._model, self.precision
        current = packed(model, precision, lambda: pack(model, precision), find=tensors_of, may_be_old=may_be_old)
        if self._packed_adapters:
            # An adapter that was packed for other weights keeps them in memory.
            pairs = list(self._packed_adapters.items())  # another thread may add one meanwhile
            kept = {one: pair for one, pair in pairs if pair[0] is current and one in self._adapters.values()}
            if len(kept) < len(pairs):
                self._packed_adapters = kept
        return current

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Returns the reason why C++ code can't compute the same as the model's modules in this precision, or None."""
        return why_not_supported(model, precision)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values in all layers of the decoder."""
        size = 4 if self.precision == "fp32" else 2
        if self.cache_dtype == "int8":
            return sum(2 * heads * (head_dim + 4) for heads, head_dim in self._cached_heads)  # with a scale
        return sum(2 * heads * head_dim * size for heads, head_dim in self._cached_heads)

    @property
    def _cached_heads(self) -> list[tuple[int, int]]:
        """The number and the size of the key heads that a token has in the cache, for each layer that makes keys."""
        config = self._config
        if not isinstance(config, GPTConfig):
            return [(self._attention.num_kv_heads, self._attention.head_dim)] * config.num_decoder_layers
        makers = range(config.num_layers - config.shared_kv_layers)
        return [config.heads_of(config.windows[layer]) for layer in makers if not config.stateful[layer]]

    def runs_searches(self) -> bool:
        """Returns True: batches advance greedy and beam searches themselves."""
        return True

    @property
    def step_bytes(self) -> int:
        if self.has_states:  # its batches can't take drafts back
            return 0
        packed: Any = self.prepacked(may_be_old=True)
        return int(packed.step_bytes)

    def reuses_prefixes(self) -> bool:
        """Returns whether the model has no encoder, whose source would change the keys and values of a prompt, and no
        states, which contain all tokens of a row.
        """
        return isinstance(self._model, GPT) and not self.has_states

    @property
    def has_states(self) -> bool:
        """Whether the model has layers with a state in the place of keys and values."""
        return isinstance(self._model, GPT) and any(self._model.config.stateful)

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """See `Engine.tokens_needed`; the state of a row counts as the tokens that take as much memory."""
        needed = super().tokens_needed(prompt, num_rows, new_tokens)
        if not self.has_states:
            return needed
        packed: Any = self.prepacked(may_be_old=True)
        return needed + num_rows * -(-int(packed.state_bytes) // (self.token_bytes * BLOCK_SIZE)) * BLOCK_SIZE

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        if not isinstance(self._model, GPT):
            raise ValueError(f"expected a decoder-only model for the adapter {name!r}, got one that reads sources")
        self.packed_adapter(adapter, self.prepacked(may_be_old=True))
        self._adapters[name] = adapter

    @property
    def adapters(self) -> tuple[str, ...]:
        return (*self._adapters,)

    def adapter(self, name: str) -> Adapter:
        return self._adapters[name] if name in self._adapters else super().adapter(name)

    def packed_adapter(self, adapter: Adapter | None, model: object) -> object:
        """Returns the `PackedAdapter` of an adapter for the `PackedModel` of a session; None for None."""
        if adapter is None:
            return None
        before, packed = self._packed_adapters.get(adapter, (None, None))
        if before is not model:
            packed = extension_module().PackedAdapter(model, _adapter_arrays(adapter))
            self._packed_adapters[adapter] = model, packed
        return packed

    def limit_to(self, shortlist: Sequence[int]) -> bool:
        """Makes later batches skip the rows of the output weight for all other ids; see `Engine.limit_to`."""
        self._shortlist = list(shortlist)
        return True

    def open(self, max_rows: int, num_tokens: int) -> CppBatch:
        kind = CppBatch if self.has_states else DraftingCppBatch
        # The session counts places in 32 bits.
        most = (2**31 - 1) // (sum(2 * heads for heads, _ in self._cached_heads) * BLOCK_SIZE)
        blocks = min(max(1, -(-num_tokens // BLOCK_SIZE)), most)
        return kind(self, self._config.vocab_size, blocks * BLOCK_SIZE, self._shortlist)


class CppBatch(SearchingBatch):
    """A batch that runs in a session of the C++ extension.

    The session begins with the first prefill. A prefill of an empty batch begins a new session, without the cached
    prompts, if the model's weights have changed meanwhile. Requests that are decoded together use the same weights.
    """

    takes_masks: ClassVar[bool] = True

    def __init__(self, engine: CppEngine, vocab_size: int, num_tokens: int, shortlist: list[int]) -> None:
        self._engine, self._vocab_size, self._num_tokens = engine, vocab_size, num_tokens
        self._shortlist, self._num_groups = shortlist, 0
        self._packed: object = None
        self._session: Session | None = None

    def _begin(self) -> Session:
        packed = self._engine.prepacked()
        if self._session is None or packed is not self._packed:
            self._session = None  # there may not be enough memory for two sessions
            self._packed = packed
            session: Session = extension_module().Session(packed, self._num_tokens, self._engine.cache_dtype)
            if self._shortlist:
                session.set_shortlist(self._shortlist)
            self._session = session
        return self._session

    def prefill(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        session = self._begin() if self._num_groups == 0 else self.session
        sources = [list(prompt.source or ()) for prompt in prompts]
        adapters = [self._engine.packed_adapter(prompt.adapter, self._packed) for prompt in prompts]
        tokens = [list(prompt.tokens[:-1]) for prompt in prompts]
        cached = session.admit(sources, tokens, torch.get_num_threads(), adapters if any(adapters) else ())
        self._num_groups += len(prompts)
        return cached

    def known_prefix(self, prompt: Prompt) -> KnownPrefix:
        if self._session is None or len(prompt.tokens) <= BLOCK_SIZE:
            return KnownPrefix()
        adapter = self._engine.packed_adapter(prompt.adapter, self._packed)
        return KnownPrefix(*self._session.known(list(prompt.tokens[:-1]), adapter))

    @property
    def session(self) -> Session:
        """The session of the extension, which exists from the first prefill on."""
        assert self._session is not None, "no prefill yet"
        return self._session

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        shown = selection.logit_rows if selection.process or selection.samples else ()
        return self.read(tokens, (), replace(selection, logit_rows=shown)).choose(range(len(tokens)), selection)

    def read(self, tokens: Sequence[int], counts: Sequence[int], selection: Selection) -> CppReadings:
        """See `DraftingBatch.read`."""
        shown = list(selection.logit_rows)
        logits = torch.empty(len(shown), self._vocab_size, dtype=torch.float32, device="cpu")
        ids, values = self.session.step(
            tokens,
            min(selection.num_candidates, self._vocab_size),
            selection.log_probs,
            shown,
            logits.numpy() if shown else None,
            torch.get_num_threads(),
            list(selection.masked_rows),
            None if selection.masks is None else selection.masks.view(np.uint8),
            counts,
        )
        return CppReadings(ids.tolist(), values.tolist(), shown, logits)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Appends a token to each row, and returns the logits of the next token, (rows, vocab_size) fp32."""
        logits = torch.empty(len(tokens), self._vocab_size, dtype=torch.float32, device="cpu")
        self.session.step(tokens, 1, False, [*range(len(tokens))], logits.numpy(), torch.get_num_threads())
        return logits

    def run_searches(
        self, searches: Sequence[NativeSearch], tokens: Sequence[int], log_probs: bool, limits: Limits
    ) -> list[int]:
        """Steps the rows and advances the searches; see `SearchingBatch.run_searches`.

        With many rows, each thread decodes its own rows, and the threads take different numbers of steps.
        """
        handles = [search.handle for search in searches]
        return self.session.run(handles, tokens, *limits, log_probs, torch.get_num_threads())

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        self.session.reorder(parents)

    def free(self, groups: Sequence[int]) -> None:
        self.session.release(groups)
        self._num_groups -= len(groups)

    def free_tokens(self) -> int:
        if self._session is None:
            return self._num_tokens
        return self._session.free_tokens()

    def step_tokens(self) -> int:
        return 0 if self._session is None else self._session.step_tokens()

    def shared_tokens(self) -> int:
        return 0 if self._session is None else self._session.shared_tokens()


class DraftingCppBatch(CppBatch, DraftingBatch):
    """A batch that can take tokens back, since no layer has a state that contains them."""

    def draft(
        self,
        tokens: Sequence[int],
        counts: Sequence[int],
        chances: Sequence[float],
        least: Sequence[Sequence[float]],
    ) -> list[tuple[list[int], list[int]]]:
        return self.session.draft(tokens, counts, chances, least, torch.get_num_threads())

    def cut(self, counts: Sequence[int]) -> None:
        self.session.cut(counts)


class CppReadings(Readings):
    """The candidates after each token that was read, and the logits after some of them.

    Args:
        ids, values: the candidates.
        shown: the places of the tokens with logits, in ascending order.
        logits: (len(shown), vocab_size) fp32.
    """

    def __init__(self, ids: Rows, values: list[list[float]], shown: Sequence[int], logits: Tensor) -> None:
        self.ids, self.values, self.logits = ids, values, logits
        self._places = {token: place for place, token in enumerate(shown)}

    def choose(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        candidates = Candidates([self.ids[token] for token in tokens], [self.values[token] for token in tokens])
        if selection.process or selection.samples:
            shown = selection.logit_rows
            places = [self._places[tokens[row]] for row in shown]
            logits = self.logits if len(places) == len(self.logits) else self.logits[places]
            chosen = choose(logits, replace(selection, logit_rows=range(len(shown))))
            for place, row in enumerate(shown):
                candidates.ids[row], candidates.values[row] = chosen.ids[place], chosen.values[place]
        return candidates


def _attention(model: Transformer | GPT) -> MultiheadAttention:
    attention = _attending(model).self_attn
    assert isinstance(attention, MultiheadAttention)
    return attention


def _attending(model: Transformer | GPT) -> Any:
    """Returns the first layer of the decoder that attends."""
    return next(layer for layer in model.decoder.layers if isinstance(layer.self_attn, MultiheadAttention))


def pack(model: nn.Module, precision: str) -> object:
    """Packs the weights of a model for which `why_not_supported` returns None."""
    assert isinstance(model, Transformer | GPT)
    looked_at = stand_in(model)  # doesn't read matrices that are in a file
    arrays = pack_tensors(looked_at, precision)
    packed: object = extension_module().PackedModel(pack_options(looked_at, precision), arrays)
    return packed


def pack_options(model: Transformer | GPT, precision: str) -> dict[str, object]:
    """Returns the options of a model that its tensors don't show, for ModelOptions in csrc/engine/packed_model.h."""
    layers = model.decoder.layers
    return {
        **shared_options(model.config, _attending(model), _target_embedding(model), precision),
        "num_decoder_layers": len(layers),
        **(_gpt_options(model) if isinstance(model, GPT) else _transformer_options(model)),
    }


def shared_options(config: Any, layer: Any, embedding: Embedding, precision: str) -> dict[str, object]:
    """Returns the options that decoders and encoders have in common, from a config, a layer and the embedding."""
    attention, activation = layer.self_attn, layer.activation
    return {
        "precision": precision,
        "d_model": attention.embed_dim,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm": config.norm == "rms",
        "eps": config.layer_norm_eps,
        "scale": embedding.acting_scale,
        "attention_scale": attention.head_dim**-0.5,
        "padding_idx": -1 if embedding.padding_idx is None else embedding.padding_idx,
        "max_len": config.max_len,
        # `fused_name` omits "geglu", which the engine has.
        "activation": activation if isinstance(activation, str) else fused_name(activation),
    }


def _transformer_options(model: Transformer) -> dict[str, object]:
    encoder, decoder = model.encoder.layers, model.decoder.layers
    encoder_window = encoder[0].self_attn.window_size[0] if len(encoder) else None
    window = _attention(model).window_size[0]
    return {
        "num_encoder_layers": len(encoder),
        "norm_placement": "pre" if decoder[0].norm_first else "sum",
        "encoder_windows": [-1 if encoder_window is None else encoder_window] * len(encoder),
        "decoder_windows": [-1 if window is None else window] * len(decoder),
    }


def _gpt_options(model: GPT) -> dict[str, object]:
    config = model.config
    some = options_of_layers(config)
    if model.layer_embedding is not None:
        some["layer_input_scale"] = model.layer_embedding.embedding.acting_scale
    if config.attention_scale is not None:
        some["attention_scale"] = config.attention_scale
    return {
        "norm_placement": config.norm_placement,
        "parallel_residual": config.parallel_residual,
        "attention_softcap": config.attention_softcap or 0.0,
        "logit_softcap": config.logit_softcap or 0.0,
        "decoder_windows": [config.window_size if has_window else -1 for has_window in config.windows],
        "rotary_layers": [*map(int, config.rotary_layers or ())],
        **some,
    }


def _target_embedding(model: Transformer | GPT) -> Embedding:
    if isinstance(model, Transformer) and not model.config.tie_embeddings:
        return model.target_embedding
    embedding = model.embedding
    assert isinstance(embedding, Embedding)
    return embedding


def pack_tensors(model: Transformer | GPT, precision: str) -> dict[str, Array]:
    """Returns the tensors by their names in csrc/engine/packed_model.h; for int4, matrices hold whole numbers."""
    return arrays_of(model, named_tensors(model), precision)


def named_tensors(model: Transformer | GPT) -> dict[str, Tensor]:
    """Returns the model's tensors by their names in csrc/engine/packed_model.h."""
    tensors: dict[str, Tensor] = {
        f"decoder.{name}": p for name, p in model.decoder.named_parameters(remove_duplicate=False)
    }
    tensors |= {f"decoder.{name}": b for name, b in model.decoder.named_buffers() if name.endswith(".choice_bias")}
    embedding = _target_embedding(model)
    tensors["target_embedding"], tensors["output"] = embedding.weight, model.output_weight
    if model.output_bias is not None:
        tensors["output_bias"] = model.output_bias
    if isinstance(model, GPT) and model.config.shared_norm:
        norms = [name for name in tensors if ".norm1." in name]
        tensors |= {name.replace(".norm1.", ".norm2."): tensors[name] for name in norms}
    position = embedding.position
    if isinstance(model, GPT) and (own := model.layer_embedding) is not None:
        tensors |= {"layer_embedding": own.embedding.weight, "layer_projection.weight": own.projection.weight}
        tensors["layer_projection_norm.weight"] = own.norm.weight
    if isinstance(model, Transformer):
        tensors |= {f"encoder.{name}": p for name, p in model.encoder.named_parameters(remove_duplicate=False)}
        for side in ("source", "target"):
            norm, place = getattr(model, f"{side}_embedding_norm"), getattr(model, f"{side}_position") or position
            if place is not None:
                tensors[f"{side}_positions"] = place.table
            if norm is not None:
                tensors |= {f"{side}_embedding_norm.{name}": p for name, p in norm.named_parameters()}
        tied = model.config.tie_embeddings
        tensors["source_embedding"] = embedding.weight if tied else model.source_embedding.weight
        sizes = model.config.max_len, _attention(model).head_dim
        for name, relative in (("encoder", model.encoder_position_bias), ("decoder", model.decoder_position_bias)):
            if relative is not None:
                tensors[f"{name}_position_bias"] = bias_by_distance(relative, *sizes)
        if model.config.scale_output:
            # The last norm's numbers alone become logits.
            last = "norm" if model.config.norm_first else f"layers.{len(model.decoder.layers) - 1}.norm3"
            for name in {f"decoder.{last}.{kind}" for kind in ("weight", "bias")} & tensors.keys():
                tensors[name] = tensors[name].float() * model.config.d_model**-0.5
    elif model.rotary is not None:
        turning = slice(None)
        if (scaling := model.config.scaling) is not None and scaling["kind"] == "proportional":
            turning = slice(max(1, scaling.num_turning(model.config.global_rotary_dim)))
        tensors["cos"], tensors["sin"] = model.rotary.cos[:, turning], model.rotary.sin[:, turning]
        if model.local_rotary is not None:
            tensors["local_cos"], tensors["local_sin"] = model.local_rotary.cos, model.local_rotary.sin
    elif position is not None:
        tensors["target_positions"] = position.table
    return tensors


def arrays_of(model: nn.Module, tensors: dict[str, Tensor], precision: str) -> dict[str, Array]:
    """Converts named tensors of a model to the arrays that csrc/engine/packed_model.h reads."""
    arrays: dict[str, Array] = {}
    stored = stored_in(model)
    multiplied = [tensor for name, tensor in tensors.items() if not _is_looked_up(name) and id(tensor) not in stored]
    groups = groups_of(model, multiplied) if precision == INT4 else {}
    firsts: dict[tuple[int, bool], str] = {}  # a tensor of several names has one array, which is packed once
    for name, tensor in tensors.items():
        is_int4 = precision == INT4 and not _is_looked_up(name)
        if (first := firsts.setdefault((id(tensor), is_int4), name)) != name:
            parts = ("", SCALE, ZERO, LEVELS)
            arrays |= {name + part: arrays[first + part] for part in parts if first + part in arrays}
            continue
        if (source := stored.get(id(tensor))) is not None:
            # As in `groups_of`: a model in int4 has other matrices that are int8.
            is_int4 = is_int4 and (source.has_groups or getattr(model, "int4_groups", None) is None)
            arrays |= _in_parts(name, source, is_int4=is_int4)
            continue
        if not is_int4 or (group := groups.get(id(tensor))) is None:
            arrays[name] = _array(tensor)
            continue
        arrays[name], arrays[name + SCALE] = group.nibbles.numpy(), group.scale.float().numpy()
        if group.zero is not None:
            arrays[name + ZERO] = group.zero.numpy()
        if group.levels is not None:
            arrays[name + LEVELS] = group.levels.view(torch.uint8).numpy()
    return arrays


def _in_parts(name: str, source: Stored, *, is_int4: bool) -> dict[str, Any]:
    """Returns a matrix in a file as csrc/bindings/decoder.cpp reads it: (rows, columns, whether bytes, the reader)."""
    rows, columns = source.shape
    if not is_int4:
        return {name: (rows, columns, False, lambda begin, end: source.rows(begin, end).numpy())}
    groups, levels = num_groups(columns), source.levels if source.has_groups else None

    @lru_cache(1)  # the same rows are asked for part by part
    def read(begin: int, end: int) -> Groups:
        return source.groups(begin, end) if source.has_groups else to_groups(source.rows(begin, end))

    def zeros(begin: int, end: int) -> Any:
        return read(begin, end).zero.numpy()  # type: ignore[union-attr]

    return {
        name: (rows, groups * GROUP // 2, True, lambda begin, end: read(begin, end).nibbles.numpy()),
        name + SCALE: (rows, groups, False, lambda begin, end: read(begin, end).scale.float().numpy()),
        **({name + ZERO: (rows, groups, True, zeros)} if source.has_zeros else {}),
        **({name + LEVELS: levels.view(torch.uint8).numpy()} if levels is not None else {}),
    }


def _is_looked_up(name: str) -> bool:
    return name in ("source_embedding", "target_embedding", "source_positions", "source_types", "layer_embedding")


def bias_by_distance(relative: RelativePositionBias, max_len: int, head_dim: int) -> Tensor:
    """Returns the biases for PositionBias in csrc/engine/packed_model.h, in units of q k^T, which is scaled later."""
    reach = min(relative.max_distance, max_len - 1)
    rows = relative.table[relative.buckets(torch.arange(-reach, reach + 1, device=relative.table.device))]
    return rows.float().T * head_dim**0.5


def _adapter_arrays(adapter: Adapter) -> dict[str, Array]:
    """Returns A and B by their names in csrc/engine/adapter.h."""
    factors = adapter.factors.items()
    return {f"{name}.{half}": _array(one) for name, pair in factors for half, one in zip("AB", pair, strict=True)}


def _array(tensor: Tensor) -> Array:
    """Returns a view of a tensor's memory if it is contiguous fp32 or bf16 (as uint16), else a copy."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: npt.NDArray[np.uint16] = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    numbers: npt.NDArray[np.float32] = tensor.float().numpy()
    return numbers
