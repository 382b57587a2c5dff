"""Decodes in C++: a whole step in one call, and whole greedy and beam searches, in fp32, bf16 or int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fastformer.generation.engines.base import Candidates, Prompt, Selection
from fastformer.generation.engines.packable import why_not_packable
from fastformer.generation.engines.packed import packed
from fastformer.generation.engines.sampling import choose
from fastformer.generation.model_protocols import Model
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.precisions import own_precision
from fastformer.models import GPT, Transformer
from fastformer.nn import Embedding, MultiheadAttention, RelativePositionBias
from fastformer.nn.feed_forward import fused_name
from fastformer.ops import _extension

BLOCK_SIZE = 16  # tokens; csrc/engine/token_cache.h's kBlockTokens

Array = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
Rows = list[list[int]]


class _Session(Protocol):
    """csrc/bindings/decoder.cpp's Session."""

    def admit(self, sources: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], threads: int) -> None: ...
    def step(
        self,
        tokens: Sequence[int],
        k: int,
        log_probs: bool,
        logit_rows: Sequence[int],
        logits: npt.NDArray[np.float32] | None,
        threads: int,
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
    def reorder(self, parents: Sequence[Sequence[int]]) -> None: ...
    def release(self, groups: Sequence[int]) -> None: ...
    def set_shortlist(self, ids: Sequence[int]) -> None: ...
    def free_tokens(self) -> int: ...
    def step_tokens(self) -> int: ...


class CppEngine:
    """Steps a `models.Transformer` or a `models.GPT` on the CPU, from weights that are packed once for all engines.

    fp32 computes what the model does. bf16 rounds weights and what they are multiplied by; int8 has a scale for each
    output of a weight, and a scale and a zero for each row that is multiplied by it. The residual stream, norms and
    softmax are fp32 always; keys and values, and the tables of embeddings and positions, are fp32 or, for the smaller
    two, bf16. A row's bits depend neither on its neighbours nor on the number of threads. Weights that change are
    packed again when the next batch begins; see `packed.fingerprint` for how that is noticed, and `packed.repack` for
    where it may not be.

    Args:
        model: see above; `why_unsupported` says what it may not have.
        precision: "fp32", "bf16" or "int8"; None: the model's own.
    """

    name: ClassVar[str] = "cpp"
    device = torch.device("cpu")

    def __init__(self, model: Model, precision: str | None = None) -> None:
        assert isinstance(model, Transformer | GPT)
        self.precision = precision or own_precision(model)
        self._model, self._config = model, model.config
        self._packed = self._pack(may_be_old=True)  # `admit` asks again
        self._shortlist: list[int] = []
        self._attention = _attention(model)
        self._num_tokens, self._num_groups = BLOCK_SIZE, 0
        self._session = self._new_session(BLOCK_SIZE)

    def _pack(self, *, may_be_old: bool = False) -> object:
        model, precision = self._model, self.precision
        return packed(model, precision, lambda: _pack(model, precision), may_be_old=may_be_old)

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """See `Engine.why_unsupported`."""
        return why_not_packable(model, precision)

    @property
    def token_bytes(self) -> int:
        """The keys and values of a token in all layers of the decoder."""
        return self._slots * self._attention.head_dim * (4 if self.precision == "fp32" else 2)

    @property
    def _slots(self) -> int:
        """The keys and values of a token, counted by heads."""
        config = self._config
        layers = config.num_layers if isinstance(config, GPT.config_class) else config.num_decoder_layers
        return 2 * layers * self._attention.num_kv_heads

    def start(self, max_rows: int, num_tokens: int) -> None:
        """See `Engine.start`."""
        # Places are counted in 32 bits.
        most = (2**31 - 1) // (self._slots * BLOCK_SIZE) * BLOCK_SIZE
        self._num_tokens, self._num_groups = min(num_tokens, most), 0
        self._session = self._new_session(0)  # lets go of the old one: there is no memory for two
        self._session = self._new_session(self._num_tokens)

    def _new_session(self, num_tokens: int) -> _Session:
        module = cast(Any, _extension.module())
        session = cast(_Session, module.Session(self._packed, num_tokens))
        if self._shortlist and num_tokens:
            session.set_shortlist(self._shortlist)
        return session

    def set_shortlist(self, ids: Sequence[int]) -> None:
        """See `ShortlistEngine.set_shortlist`."""
        self._shortlist = list(ids)

    def admit(self, prompts: Sequence[Prompt]) -> None:
        """See `Engine.admit`."""
        # A batch that begins sees what has become of the model's weights since the last one.
        if self._num_groups == 0 and (now := self._pack()) is not self._packed:
            self._packed = now
            self._session = self._new_session(self._num_tokens)
        sources = [list(prompt.source or ()) for prompt in prompts]
        self._session.admit(sources, [list(prompt.tokens[:-1]) for prompt in prompts], torch.get_num_threads())
        self._num_groups += len(prompts)

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        """See `Engine.step`."""
        vocab_size = self._config.vocab_size
        shown = list(selection.logit_rows) if selection.process or selection.draws else []
        logits = torch.empty(len(shown), vocab_size, dtype=torch.float32, device=self.device)
        ids, values = self._session.step(
            tokens,
            min(selection.num_candidates, vocab_size),
            selection.log_probs,
            shown,
            logits.numpy() if shown else None,
            torch.get_num_threads(),
        )
        found = Candidates(ids.tolist(), values.tolist())
        if shown:
            chosen = choose(logits, replace(selection, logit_rows=range(len(shown))))
            for place, row in enumerate(shown):
                found.ids[row], found.values[row] = chosen.ids[place], chosen.values[place]
        return found

    def run(
        self,
        searches: Sequence[NativeSearch],
        tokens: Sequence[int],
        *,
        log_probs: bool,
        max_steps: int,
        seconds: float,
        least_rows: int,
    ) -> list[int]:
        """See `SearchingEngine.run`. Many rows are dealt to the threads, which then take unlike numbers of steps."""
        handles = [search.handle for search in searches]
        threads = torch.get_num_threads()
        return self._session.run(handles, tokens, max_steps, seconds, least_rows, log_probs, threads)

    def reorder(self, parents: Sequence[Sequence[int]]) -> None:
        """See `Engine.reorder`."""
        self._session.reorder(parents)

    def release(self, groups: Sequence[int]) -> None:
        """See `Engine.release`."""
        self._session.release(groups)
        self._num_groups -= len(groups)

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """See `Engine.tokens_needed`."""
        # The blocks of a row's own tokens begin where the prompt ends, somewhere in a block.
        own = num_rows * (_blocks_of(new_tokens) + 1)
        return (_blocks_of(len(prompt.source or ())) + _blocks_of(len(prompt.tokens)) + own) * BLOCK_SIZE

    def free_tokens(self) -> int:
        """See `Engine.free_tokens`."""
        return self._session.free_tokens()

    def step_tokens(self) -> int:
        """See `Engine.step_tokens`."""
        return self._session.step_tokens()


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _attention(model: Transformer | GPT) -> MultiheadAttention:
    attention = model.decoder.layers[0].self_attn
    assert isinstance(attention, MultiheadAttention)
    return attention


def _pack(model: nn.Module, precision: str) -> object:
    """The `PackedModel` of a model that `why_not_packable` has nothing against."""
    assert isinstance(model, Transformer | GPT)
    module = cast(Any, _extension.module())
    return module.PackedModel(_options(model, precision), _tensors(model))


def _options(model: Transformer | GPT, precision: str) -> dict[str, object]:
    """What the tensors don't say: csrc/engine/packed_model.h's ModelOptions. All layers of a stack are alike."""
    layer, attention, embedding = model.decoder.layers[0], _attention(model), _target_embedding(model)
    encoder_window, rotary = None, None
    if isinstance(model, Transformer):
        if len(model.encoder.layers):
            encoder_window = model.encoder.layers[0].self_attn.window_size[0]
        encoder_layers = len(model.encoder.layers)
    else:
        rotary, encoder_layers = model.rotary, -1
    return {
        "precision": precision,
        "d_model": attention.embed_dim,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "num_encoder_layers": encoder_layers,
        "num_decoder_layers": len(model.decoder.layers),
        "norm_first": layer.norm_first,
        "rms_norm": layer.norm1.rms_norm,
        "rotary_interleaved": rotary is not None and rotary.interleaved,
        "eps": layer.norm1.eps,
        "scale": embedding.scale,
        "padding_idx": -1 if embedding.padding_idx is None else embedding.padding_idx,
        "encoder_window": -1 if encoder_window is None else encoder_window,
        "decoder_window": -1 if attention.window_size[0] is None else attention.window_size[0],
        "max_len": model.config.max_len,
        "activation": fused_name(layer.activation),
    }


def _target_embedding(model: Transformer | GPT) -> Embedding:
    if isinstance(model, Transformer) and not model.config.tie_embeddings:
        return model.target_embedding
    embedding = model.embedding
    assert isinstance(embedding, Embedding)
    return embedding


def _tensors(model: Transformer | GPT) -> dict[str, Array]:
    """The tensors under the names that csrc/engine/packed_model.h wants."""
    tensors: dict[str, Tensor] = {
        f"decoder.{name}": p for name, p in model.decoder.named_parameters(remove_duplicate=False)
    }
    embedding = _target_embedding(model)
    tensors["target_embedding"], tensors["output"] = embedding.weight, model.output_weight
    position = embedding.position
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
        if model.output_bias is not None:
            tensors["output_bias"] = model.output_bias
        for name, relative in (("encoder", model.encoder_position_bias), ("decoder", model.decoder_position_bias)):
            if relative is not None:
                tensors[f"{name}_position_bias"] = _by_distance(relative, model)
        if model.config.scale_output:
            # The last norm's numbers alone become logits.
            last = "norm" if model.config.norm_first else f"layers.{len(model.decoder.layers) - 1}.norm3"
            for name in {f"decoder.{last}.{kind}" for kind in ("weight", "bias")} & tensors.keys():
                tensors[name] = tensors[name].float() * model.config.d_model**-0.5
    elif model.rotary is not None:
        tensors["cos"], tensors["sin"] = model.rotary.cos, model.rotary.sin
    elif position is not None:
        tensors["target_positions"] = position.table
    return {name: _array(tensor) for name, tensor in tensors.items()}


def _by_distance(relative: RelativePositionBias, model: Transformer) -> Tensor:
    """What csrc/engine/packed_model.h's PositionBias reads: in units of q k^T, which are scaled afterwards."""
    reach = min(relative.max_distance, model.config.max_len - 1)
    rows = relative.table[relative.buckets(torch.arange(-reach, reach + 1, device=relative.table.device))]
    return rows.float().T * _attention(model).head_dim ** 0.5


def _array(tensor: Tensor) -> Array:
    """A tensor's memory where it is fp32 or bf16 (as uint16) without gaps, else a copy."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: npt.NDArray[np.uint16] = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    numbers: npt.NDArray[np.float32] = tensor.float().numpy()
    return numbers
