"""The encoder-decoder Transformer ("Attention Is All You Need", variants as in tensor2tensor), loss and decoding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fastformer.cache.kv_cache import KVCache
from fastformer.models.common import (
    Activation,
    Norm,
    cache_of,
    check_heads,
    check_ids,
    layer_options,
    norm_of,
    trailing_padding,
)
from fastformer.models.next_tokens import NextTokenModel
from fastformer.models.pretrained import placement
from fastformer.nn.attention import MultiheadAttention
from fastformer.nn.embedding import Embedding, PositionalEncoding, RelativePositionBias, check_buckets
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.transformer import TransformerDecoder, TransformerEncoder
from fastformer.ops._dropout import draws_seeds_together
from fastformer.settings import Amount, Convert, Count, Positive, Probability, Range, as_ids, check_settings
from fastformer.special_ids import SpecialIds


@dataclass
class TransformerConfig:
    """The settings of `Transformer`, under the paper's names; the defaults are tensor2tensor's transformer_base_v3.

    Attributes:
        vocab_size: the number of target tokens, and of source tokens unless source_vocab_size is given.
        source_vocab_size: the number of source tokens; None: vocab_size.
        d_model: the size of a token's vector.
        num_heads: the number of attention heads.
        num_kv_heads: the number of heads of keys and values; None: num_heads.
        head_dim: the size of a head; None: d_model / num_heads.
        d_ff: the inner size of the feed-forward network.
        num_encoder_layers: the number of layers of the encoder.
        num_decoder_layers: the number of layers of the decoder.
        norm_first: pre-norm with a final norm on each stack (tensor2tensor today) or post-norm (the paper).
        norm: "layer" or "rms".
        layer_norm_eps: added to the variance.
        activation: "relu", "gelu", "gelu_tanh", "silu", or gated "swiglu", "geglu_tanh" or "clamped_swiglu".
        dropout: on the embeddings and on each sub-layer's output; acts as the nearest multiple of 1/256.
        attention_dropout: on the attention weights.
        activation_dropout: after the activation.
        positions: sines and cosines, "concatenated" (tensor2tensor), "interleaved" (the paper) or "halves" (Marian);
            "learned", a table for each stack (BART); or "relative", a bias on the scores of self-attention that depends
            on the distance from query to key, which the layers of a stack share (T5).
        first_position: for sines and cosines, the position of the first token (M2M100 has 2).
        num_buckets: for relative positions, the number of rows in each stack's table.
        max_distance: for relative positions, the largest distance with a bias of its own; larger ones count as this
            one.
        scale_embedding: whether embeddings are multiplied by sqrt(d_model).
        embedding_norm: whether each stack normalises the sum of embeddings and positions before the dropout (BART).
        embed_pad: whether PAD has an embedding of its own instead of the zero vector; a decoder may begin with it.
        tie_embeddings: one matrix for source, target and the projection before the softmax.
        output_bias: whether that projection has a bias.
        scale_output: whether the hidden states are multiplied by d_model ** -0.5 before that projection (T5).
        attention_bias: whether the attention's projections have a bias.
        bias: whether the feed-forward network and the norms have a bias; a norm of "rms" never has one.
        window_size: a token sees this many neighbours on each side in self-attention; None: all.
        max_len: the longest sequence.
        special_ids: the special ids, all of which are in both vocabularies.
        suppress_tokens: ids that no search generates. As in transformers, they keep their probability: the scores of
            the other tokens are those of the whole vocabulary by transformers' rules, and so are those of `score`.
    """

    vocab_size: Annotated[int, Range(2)]
    source_vocab_size: Annotated[int, Range(2)] | None = None
    d_model: Positive = 512
    num_heads: Positive = 8
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    d_ff: Positive = 2048
    num_encoder_layers: Positive = 6
    num_decoder_layers: Positive = 6
    norm_first: bool = True
    norm: Norm = "layer"
    layer_norm_eps: Amount = 1e-6
    activation: Activation = "relu"
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    activation_dropout: Probability = 0.1
    positions: Literal["concatenated", "interleaved", "halves", "learned", "relative"] = "concatenated"
    first_position: Count = 0
    num_buckets: Annotated[int, Range(4)] = 32
    max_distance: Positive = 128
    scale_embedding: bool = True
    embedding_norm: bool = False
    embed_pad: bool = False
    tie_embeddings: bool = True
    output_bias: bool = False
    scale_output: bool = False
    attention_bias: bool = False
    bias: bool = True
    window_size: Count | None = None
    max_len: Positive = 1024
    special_ids: SpecialIds = SpecialIds()
    suppress_tokens: Annotated[tuple[int, ...], Convert(as_ids)] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        check_heads(self.d_model if self.head_dim is None else self.num_heads, self.num_heads, self.num_kv_heads)
        if self.positions == "relative":
            check_buckets(self.num_buckets, self.max_distance)
        elif self.d_model % 2 and self.positions != "learned":
            raise ValueError(f"expected an even d_model (sines and cosines in pairs), got {self.d_model}")
        if self.first_position and self.positions in ("learned", "relative"):
            raise ValueError(f"expected no first_position with {self.positions} positions, got {self.first_position}")
        if self.tie_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            raise ValueError("tie_embeddings needs one vocabulary for source and target: omit source_vocab_size")
        for size in (self.vocab_size, self.source_vocab_size or self.vocab_size):
            self.special_ids.check(size, reads_sources=True)
        if outside := [token for token in self.suppress_tokens if not 0 <= token < self.vocab_size]:
            raise ValueError(f"expected suppress_tokens from 0 to below vocab_size {self.vocab_size}, got {outside[0]}")


class Transformer(NextTokenModel):
    """Encoder and decoder from token ids to logits.

    The config's `special_ids` are the ids of PAD, EOS and the decoder's first token. The decoder's input is `start`
    followed by the target; by default `start` is PAD, whose embedding is the zero vector (tensor2tensor's shift_right)
    unless the config has `embed_pad`. Inputs are padded (batch, seqlen), or packed (total,) with a
    `SequenceLayout.packed`; weights and results are the same. Without a source layout, trailing PADs of a source are
    padding; a target needs none, since attention is causal and the loss skips targets of -100.

    Parameters: `embedding.weight` (tied) or `source_embedding.weight`, `target_embedding.weight`, `output.weight`;
    depending on the config `output_bias`, `source_position.table`, `target_position.table` (learned),
    `encoder_position_bias.table`, `decoder_position_bias.table` (relative), `source_embedding_norm.*`,
    `target_embedding_norm.*`;
    `encoder.*` and `decoder.*` as in `torch.nn.TransformerEncoder` and `TransformerDecoder`.

    Args:
        config: the settings. `Transformer.from_preset("base", vocab_size=...)` knows "base", "base-paper", "big" and
            "tiny".
        device, dtype: the device and the dtype of the parameters.
    """

    config_class = TransformerConfig
    presets: dict[str, dict[str, Any]] = {
        # tensor2tensor's transformer_base_v3.
        "base": {},
        # The paper: post-norm, alternating sines, dropout on the residual alone.
        "base-paper": {
            "norm_first": False,
            "positions": "interleaved",
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
        # tensor2tensor's transformer_big.
        "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
        # tensor2tensor's transformer_tiny.
        "tiny": {"d_model": 128, "d_ff": 512, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2},
    }
    config: TransformerConfig
    output_bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            raise ValueError(f"expected a TransformerConfig, got {type(config).__name__} (see from_preset)")
        self.config = config
        factory = placement(device, dtype)

        def positions() -> PositionalEncoding:
            sizes, kind, first = (config.d_model, config.max_len), config.positions, config.first_position
            return PositionalEncoding(*sizes, kind=kind, batch_first=True, first=first, **factory)

        def norm() -> AddLayerNorm:
            return norm_of(config, config.d_model, factory)

        def position_bias(is_causal: bool) -> RelativePositionBias | None:
            if config.positions != "relative":
                return None
            sizes = (config.num_heads, config.num_buckets, config.max_distance)
            return RelativePositionBias(*sizes, is_causal=is_causal, **factory)

        is_learned = config.positions == "learned"
        # Both stacks share one table of sines. Each stack has its own learned positions, even with tied embeddings.
        sines = None if config.positions in ("learned", "relative") else positions()

        def embedding(vocab_size: int) -> Embedding:
            return Embedding(
                vocab_size,
                config.d_model,
                padding_idx=None if config.embed_pad else config.special_ids.pad,
                scale=math.sqrt(config.d_model) if config.scale_embedding else 1.0,
                dropout=0.0 if config.embedding_norm else config.dropout,
                position=sines,
                **factory,
            )

        # The other names stay unregistered when tied, so that no weight is saved or counted twice.
        if config.tie_embeddings:
            self.embedding = embedding(config.vocab_size)
        else:
            self.source_embedding = embedding(config.source_vocab_size or config.vocab_size)
            self.target_embedding = embedding(config.vocab_size)
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False, **factory)
        self.source_position = positions() if is_learned else None
        self.target_position = positions() if is_learned else None
        self.encoder_position_bias = position_bias(is_causal=False)
        self.decoder_position_bias = position_bias(is_causal=True)
        self.source_embedding_norm = norm() if config.embedding_norm else None
        self.target_embedding_norm = norm() if config.embedding_norm else None
        self.embedding_dropout = nn.Dropout(config.dropout) if config.embedding_norm else None  # after the norm
        bias = nn.Parameter(torch.empty(config.vocab_size, **factory)) if config.output_bias else None
        self.register_parameter("output_bias", bias)

        window = config.window_size
        layer: dict[str, Any] = {
            "d_model": config.d_model,
            "nhead": config.num_heads,
            "dim_feedforward": config.d_ff,
            "norm_first": config.norm_first,
            "attention_bias": config.attention_bias,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            **layer_options(config, factory),
        }

        # Post-norm layers end with a norm of their own.
        final_norms = [norm() if config.norm_first else None for _ in range(2)]
        self.encoder = TransformerEncoder(
            TransformerEncoderLayer(window_size=(window, window), **layer), config.num_encoder_layers, final_norms[0]
        )
        self.decoder = TransformerDecoder(
            TransformerDecoderLayer(window_size=(window, None if window is None else 0), **layer),
            config.num_decoder_layers,
            final_norms[1],
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws projections Xavier uniform and embeddings from N(0, d_model^-0.5); biases become 0, norms 1."""
        for module in self.modules():
            if isinstance(module, MultiheadAttention):
                # Query, key and value are matrices of their own (tensor2tensor); the fused one's fan would shrink them.
                for block in module.in_proj_weight.split([module.q_dim, module.kv_dim, module.kv_dim]):
                    nn.init.xavier_uniform_(block)
                if module.in_proj_bias is not None:
                    nn.init.zeros_(module.in_proj_bias)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
            elif isinstance(module, RelativePositionBias):
                nn.init.normal_(module.table, std=self.config.d_model**-0.5)
            elif isinstance(module, nn.LayerNorm | PositionalEncoding):
                module.reset_parameters()
        if self.output_bias is not None:
            nn.init.zeros_(self.output_bias)

    @property
    def output_weight(self) -> Tensor:
        """See `NextTokenModel`."""
        return self.embedding.weight if self.config.tie_embeddings else self.output.weight

    @draws_seeds_together
    def encode(self, source: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Encodes the source.

        Args:
            source: (batch, seqlen) ids, or (total,) with a packed layout.
            layout: None: trailing PADs are padding.

        Returns:
            The memory: (batch, seqlen, d_model) or (total, d_model). Pass the same layout on as `memory_layout`
            (`SequenceLayout.from_ids(source, config.special_ids.pad)` if none is given).

        Raises:
            ValueError: ids out of the vocabulary, a sequence longer than max_len, PADs before a token and no layout.
        """
        config = self.config
        check_ids(source, config.source_vocab_size or config.vocab_size, config.max_len, layout, "source")
        layout = trailing_padding(source, config.special_ids.pad, "source") if layout is None else layout
        embed = self.embedding if config.tie_embeddings else self.source_embedding
        x = embed(source, layout.positions, position=self.source_position)
        bias = _whole_bias(self.encoder_position_bias, layout.max_seqlen)
        return self.encoder(self._normalised(x, self.source_embedding_norm), layout=layout, position_bias=bias)

    @draws_seeds_together
    def decode(
        self,
        target: Tensor,
        memory: Tensor | None,
        *,
        layout: SequenceLayout | None = None,
        memory_layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Decodes the (shifted) target, or its next tokens when there is a cache.

        Args:
            target: (batch, seqlen) ids, or (total,) with a packed layout; with a packed layout, the rows of a cache
                must be empty.
            memory: the output of `encode`; None if the cache has its keys and values.
            layout: the layout of the target. A padded target needs none.
            memory_layout: the layout of the memory; None: no position is padding.
            cache: a cache of `new_cache`: target has the tokens that follow those in the cache, and their keys and
                values are appended. For inference.

        Returns:
            Hidden states, (batch, seqlen, d_model) or (total, d_model), for `logits`.

        Raises:
            ValueError: ids out of the vocabulary, a sequence longer than max_len, a full cache.
        """
        before = 0 if cache is None else cache.length_bound
        check_ids(target, self.config.vocab_size, self.config.max_len, layout, "target", before)
        positions = None if layout is None else layout.positions
        if cache is not None and positions is None:
            cache.check_rows(target.shape[0])
            positions = cache.positions(target.shape[1])
        embed = self.embedding if self.config.tie_embeddings else self.target_embedding
        x = embed(target, positions, position=self.target_position)
        relative = self.decoder_position_bias
        if relative is None or cache is None or before == 0:
            bias = _whole_bias(relative, target.shape[1] if layout is None else layout.max_seqlen)
        else:
            assert positions is not None
            keys = torch.arange(before + target.shape[1], device=target.device)
            bias = relative(positions, keys)
        return self.decoder(
            self._normalised(x, self.target_embedding_norm),
            memory,
            tgt_is_causal=True,
            layout=layout,
            memory_layout=memory_layout,
            cache=cache,
            position_bias=bias,
        )

    def _normalised(self, x: Tensor, norm: AddLayerNorm | None) -> Tensor:
        """Returns the input of a stack: embeddings with positions, normalised if the config says so."""
        if norm is not None and self.embedding_dropout is not None:
            x = self.embedding_dropout(norm(x))
        return x

    @draws_seeds_together
    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_layout: SequenceLayout | None = None,
        target_layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Computes the logits of the next token at each position of the (shifted) target.

        Args:
            source, target: ids, (batch, seqlen), or (total,) with packed layouts.
            source_layout, target_layout: see `encode` and `decode`.

        Returns:
            (batch, seqlen, vocab_size) or (total, vocab_size).
        """
        return self.logits(self._hidden(source, target, source_layout, target_layout))

    @draws_seeds_together
    def loss(
        self,
        source: Tensor,
        target_in: Tensor,
        target_out: Tensor,
        *,
        source_layout: SequenceLayout | None = None,
        target_layout: SequenceLayout | None = None,
        label_smoothing: float = 0.0,
        smooth_others: bool = False,
        reduction: str = "sum",
    ) -> Tensor:
        """Computes the cross-entropy of the target without ever holding all logits in memory.

        Args:
            source: ids, (batch, seqlen), or (total,) with packed layouts.
            target_in: the id `start` and the target, without its last token.
            target_out: the target; -100 (padding) is ignored.
            source_layout, target_layout: see `encode` and `decode`.
            label_smoothing: the probability taken from the target and spread over all classes,
            smooth_others: or over the other classes (tensor2tensor).
            reduction: "sum" (divide by the tokens of the whole update), "mean" or "none".

        Returns:
            A scalar, or target_out's shape for "none"; fp32.
        """
        hidden = self._hidden(source, target_in, source_layout, target_layout)
        return self._cross_entropy(
            hidden,
            target_out,
            label_smoothing=label_smoothing,
            smooth_others=smooth_others,
            reduction=reduction,
        )

    def _last_layer(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        scaled = hidden * self.config.d_model**-0.5 if self.config.scale_output else hidden
        return scaled, self.output_weight, self.output_bias

    def new_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        memory: Tensor | None = None,
        memory_layout: SequenceLayout | None = None,
        *,
        num_blocks: int | None = None,
    ) -> KVCache:
        """Creates an empty cache of batch_size rows for `decode`, in the dtype of autocast or of the weights.

        Args:
            batch_size: the number of rows that decode together: sources times beams; the beams of a source are
                adjacent.
            max_seqlen: the most tokens of a row.
            memory: the output of `encode`: its keys and values are computed here and stored once per source, and
                `decode` no longer needs the memory. None: the first `decode` does this, for as many sources as rows.
            memory_layout: the layout of the memory.
            num_blocks: see `KVCache`.

        Raises:
            ValueError: sizes that are not integers of at least 1; sources that don't divide the rows.
        """
        num_sources = batch_size
        if memory is not None:
            num_sources = memory.shape[0] if memory_layout is None else memory_layout.batch_size
            if not isinstance(batch_size, int) or batch_size < 1 or num_sources < 1 or batch_size % num_sources:
                raise ValueError(f"expected a batch_size that is a multiple of {num_sources} sources, got {batch_size}")
        width = None if memory is None else memory.shape[1] if memory_layout is None else memory_layout.max_seqlen
        cache = self.empty_cache(batch_size, max_seqlen, width, num_blocks, num_sources=num_sources)
        cache.add(num_sources, batch_size // num_sources)
        if memory is not None:
            self.store_memory(cache, memory, memory_layout)
        return cache

    def empty_cache(
        self,
        max_rows: int,
        max_seqlen: int,
        max_source_seqlen: int | None = None,
        num_blocks: int | None = None,
        *,
        num_sources: int | None = None,
    ) -> KVCache:
        """Creates a `KVCache` of this model's sizes and dtype without rows; its methods add and remove groups."""
        sizes = {"max_source_seqlen": max_source_seqlen, "num_sources": num_sources, "num_blocks": num_blocks}
        return cache_of(self, max_rows, max_seqlen, **sizes)

    def store_memory(self, cache: KVCache, memory: Tensor, memory_layout: SequenceLayout | None = None) -> None:
        """Computes the memory's keys and values into the cache for the groups that lack them, one source each."""
        self.decoder.store_memory(cache, memory, memory_layout)

    @torch.no_grad()
    def attention_maps(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_layout: SequenceLayout | None = None,
        average_heads: bool = False,
    ) -> dict[str, Tensor]:
        """Returns the attention distributions of every layer and head, materialised for pictures.

        Args:
            source: (batch, source_seqlen) ids.
            target: (batch, target_seqlen) ids, the decoder's input.
            source_layout: padded; None: trailing PADs are padding.
            average_heads: average over the heads.

        Returns:
            "encoder" (num_layers, batch, num_heads, source_seqlen, source_seqlen), "decoder" (..., target_seqlen,
            target_seqlen) and "cross" (..., target_seqlen, source_seqlen); without num_heads when averaged. A row sums
            to 1 over the positions that its mask allows; the row of a padding token has no meaning.
        """
        groups = {
            "encoder": [layer.self_attn for layer in self.encoder.layers],
            "decoder": [layer.self_attn for layer in self.decoder.layers],
            "cross": [layer.multihead_attn for layer in self.decoder.layers],
        }
        training = self.training
        self.eval()
        try:
            return _recorded(groups, lambda: self._hidden(source, target, source_layout, None), average_heads)
        finally:
            self.train(training)

    def _hidden(
        self, source: Tensor, target: Tensor, source_layout: SequenceLayout | None, target_layout: SequenceLayout | None
    ) -> Tensor:
        if source_layout is None and isinstance(source, Tensor) and source.dim() == 2:
            source_layout = trailing_padding(source, self.config.special_ids.pad, "source")
        memory = self.encode(source, source_layout)
        return self.decode(target, memory, layout=target_layout, memory_layout=source_layout)


def _whole_bias(relative: RelativePositionBias | None, seqlen: int) -> Tensor | None:
    """Returns the bias of sequences that begin at position 0: (1, num_heads, seqlen, seqlen)."""
    if relative is None:
        return None
    positions = torch.arange(seqlen, device=relative.table.device)
    return relative(positions, positions)


def _recorded(
    groups: dict[str, list[MultiheadAttention]], run: Callable[[], object], average_heads: bool
) -> dict[str, Tensor]:
    """Runs a model, and returns the distributions of groups of its attention modules, each of which is called once."""
    found: dict[str, list[Tensor]] = {name: [] for name in groups}

    def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": average_heads}

    with contextlib.ExitStack() as hooks:
        for name, attentions in groups.items():
            for module in attentions:
                hooks.enter_context(module.register_forward_pre_hook(ask, with_kwargs=True))
                keep = lambda _module, _args, output, name=name: found[name].append(output[1])  # noqa: E731
                hooks.enter_context(module.register_forward_hook(keep))
        run()
    return {name: torch.stack(weights) for name, weights in found.items()}
