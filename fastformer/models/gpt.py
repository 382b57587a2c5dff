"""The decoder-only Transformer: a language model, with loss and decoding."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.cache.kv_cache import KVCache
from fastformer.models.common import (
    IGNORE_INDEX,
    cache_of,
    check_ids,
    init_weights,
    layer_options,
    norm_of,
    rotary_embeddings,
    rotations,
)
from fastformer.models.gpt_config import GPTConfig as GPTConfig
from fastformer.models.next_tokens import NextTokenModel
from fastformer.models.pretrained import placement
from fastformer.nn.decoder_only import DecoderOnlyLayer
from fastformer.nn.embedding import Embedding, PositionalEncoding
from fastformer.nn.layer_input import LayerEmbedding
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.mixture import load_balancing_loss, recorded_router_logits
from fastformer.nn.transformer import TransformerEncoder
from fastformer.ops._dropout import draws_seeds_together

_LLAMA: dict[str, Any] = {
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rotary",
    "num_kv_heads": 2,
    "bias": False,
}


def _experts_of(config: GPTConfig) -> dict[str, Any]:
    names = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "norm_topk_eps", "router_bias", "choice_bias",
             "router_activation", "expert_scale")  # fmt: skip
    shared = {"shared_hidden_dim": config.shared_expert_d_ff, "shared_gate": config.shared_expert_gate}
    return {**shared, **{name: getattr(config, name) for name in names}}


def _linear_attention_of(config: GPTConfig, factory: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_key_heads": config.linear_key_heads,
        "num_value_heads": config.linear_value_heads or config.linear_key_heads,
        "key_head_dim": config.linear_key_dim,
        "value_head_dim": config.linear_value_dim,
        "conv_size": config.linear_conv_size,
        "eps": config.layer_norm_eps,
        **factory,
    }


def _mamba_of(config: GPTConfig, factory: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_heads": config.mamba_heads,
        "head_dim": config.mamba_head_dim,
        "state_dim": config.mamba_state_dim,
        "num_groups": config.mamba_groups,
        "conv_size": config.mamba_conv_size,
        "conv_bias": config.mamba_conv_bias,
        "eps": config.layer_norm_eps,
        **factory,
    }


def _short_conv_of(config: GPTConfig, factory: dict[str, Any]) -> dict[str, Any]:
    return {"conv_size": config.conv_size, **factory}


class GPT(NextTokenModel):
    """A decoder-only Transformer from token ids to logits: GPT-2, and by its options Llama, Qwen, Gemma and others.

    Inputs are padded on the right (batch, seqlen), or packed (total,) with a `SequenceLayout.packed`, where each
    sequence has its own positions and attends only to itself. Right padding needs no layout if attention is causal, and
    the loss skips targets of -100.

    Parameters: `embedding.weight`, `embedding.position.table` (learned), `decoder.*` as in
    `torch.nn.TransformerEncoder` (and `DecoderOnlyLayer`), `output.weight` if it isn't tied, `output_bias`, and
    `layer_embedding.*` (`LayerEmbedding`).

    Args:
        config: the settings; `GPT.from_preset("tiny", vocab_size=...)` knows "tiny", "small", "gpt2", "llama-small" and
            "qwen3-small".
        device, dtype: the device and the dtype of the parameters.
    """

    config_class = GPTConfig
    presets: dict[str, dict[str, Any]] = {
        "tiny": {"d_model": 128, "num_heads": 4, "num_layers": 4, "max_len": 256},
        # The size of nanoGPT's model of Shakespeare's characters.
        "small": {"dropout": 0.2, "attention_dropout": 0.2, "max_len": 256},
        "gpt2": {
            "d_model": 768,
            "num_heads": 12,
            "num_layers": 12,
            "activation": "gelu_tanh",
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
        "llama-small": _LLAMA,
        # Norms of queries and keys keep scores small, so that higher rates of learning stay stable.
        "qwen3-small": {**_LLAMA, "qk_norm": "head", "rotary_base": 1e6},
    }
    config: GPTConfig
    output_bias: nn.Parameter | None

    def __init__(
        self, config: GPTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise ValueError(f"expected a GPTConfig, got {type(config).__name__} (see from_preset)")
        self.config = config
        factory = placement(device, dtype)
        position: PositionalEncoding | None = None
        self.rotary, self.local_rotary = rotary_embeddings(config, factory)
        if config.positions != "rotary":
            kind = "learned" if config.positions == "learned" else "interleaved"
            position = PositionalEncoding(config.d_model, config.max_len, kind=kind, batch_first=True, **factory)
        self.embedding = Embedding(
            config.vocab_size,
            config.d_model,
            scale=1.0 if config.embedding_scale is None else config.embedding_scale,
            round_scale=True,
            dropout=config.dropout if config.embedding_dropout is None else config.embedding_dropout,
            position=position,
            **factory,
        )
        options: dict[str, Any] = dict(
            attention_bias=config.qkv_bias,
            norm_placement=config.norm_placement,
            parallel_residual=config.parallel_residual,
            shared_norm=config.shared_norm,
            norm_bias=config.norm_bias,
            input_dim=config.layer_input_dim,
            has_scalar=config.layer_scalars,
            **layer_options(config, factory),
        )
        attention: dict[str, Any] = dict(
            out_bias=config.bias if config.out_bias is None else config.out_bias,
            qk_norm=config.qk_norm,
            qk_norm_eps=config.layer_norm_eps,
            softmax_scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
            sinks=config.attention_sinks,
            gate=config.attention_gate,
            value_norm_eps=config.layer_norm_eps if config.value_norm else None,
        )

        def layer(index: int) -> DecoderOnlyLayer:
            kv_heads, head_dim = config.heads_of(config.windows[index])
            own = {
                "num_kv_heads": kv_heads,
                "head_dim": head_dim,
                "kv_projections": config.kv_projections_of(index),
            }
            is_sparse = config.sparse[index]
            d_ff = (config.expert_d_ff if is_sparse else None) or config.d_ff_of(index)
            inside: dict[str, Any] = {
                "experts": _experts_of(config) if is_sparse else None,
                "linear_attention": _linear_attention_of(config, factory) if config.linear[index] else None,
                "short_conv": _short_conv_of(config, factory) if config.conv[index] else None,
                "mamba": _mamba_of(config, factory) if config.mamba[index] else None,
                "self_attention": {**attention, **own},
            }
            return DecoderOnlyLayer(config.d_model, config.num_heads, d_ff, **inside, **options)

        norm = norm_of(config, config.d_model, factory)
        if any(config.sparse) or any(config.stateful) or config.has_unlike_layers:
            self.decoder = TransformerEncoder([*map(layer, range(config.num_layers))], config.num_layers, norm)
        else:
            self.decoder = TransformerEncoder(layer(0), config.num_layers, norm)
        if config.key_layers is not None:
            self.decoder.key_layers = config.key_layers
        for module, has_window in zip(self.decoder.layers, config.windows, strict=True):
            after = 0 if config.is_causal else config.window_size
            module.self_attn.window_size = (config.window_size, after) if has_window else (None, None)
        self.layer_embedding: LayerEmbedding | None = None
        if config.layer_input_dim is not None:
            counts = (config.vocab_size, config.d_model, config.num_layers, config.layer_input_dim)
            self.layer_embedding = LayerEmbedding(*counts, config.layer_norm_eps, factory)
        sizes = (config.d_model, config.vocab_size)
        self.output = None if config.tie_embeddings else nn.Linear(*sizes, bias=False, **factory)
        bias = nn.Parameter(torch.zeros(config.vocab_size, **factory)) if config.output_bias else None
        self.register_parameter("output_bias", bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as GPT-2: N(0, 0.02), projections into the residual stream divided by sqrt(2 * num_layers)."""
        into_residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            init_weights(module, into_residual if name.endswith(("out_proj", "linear2")) else 0.02)

    @property
    def output_weight(self) -> Tensor:
        """See `NextTokenModel`."""
        return self.embedding.weight if self.output is None else self.output.weight

    @property
    def softcap(self) -> float:
        """See `NextTokenModel`."""
        return self.config.logit_softcap or 0.0

    def _last_layer(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return hidden, self.output_weight, self.output_bias

    @draws_seeds_together
    def decode(self, tokens: Tensor, *, layout: SequenceLayout | None = None, cache: KVCache | None = None) -> Tensor:
        """Runs the layers over tokens, or over the next tokens when there is a cache.

        Args:
            tokens: (batch, seqlen) ids, or (total,) with a packed layout.
            layout: right-padded batches need one along with a cache, or if the model isn't causal: the lengths.
            cache: from `new_cache`: tokens follow those in the cache, to which their keys and values are appended. For
                inference.

        Returns:
            Hidden states, (batch, seqlen, d_model) or (total, d_model), for `logits`.

        Raises:
            ValueError: ids out of the vocabulary, a sequence longer than max_len, a full cache, a cache of a model that
                is not causal.
        """
        if cache is not None:
            self.check_causal()
        before = 0 if cache is None else cache.length_bound
        check_ids(tokens, self.config.vocab_size, self.config.max_len, layout, "token", before)
        positions = None if layout is None else layout.positions
        if cache is not None and positions is None:
            cache.check_rows(tokens.shape[0])
            if self.rotary is None:  # the cache itself knows the positions of its tokens
                positions = cache.positions(tokens.shape[1])
        x = self.embedding(tokens, positions)
        config = self.config
        rotary = rotations(self.rotary, self.local_rotary, config.windows, positions, config.rotary_layers)
        own = {} if self.layer_embedding is None else {"layer_inputs": self.layer_embedding(tokens, x)}
        return self.decoder(x, is_causal=config.is_causal, layout=layout, cache=cache, rotary=rotary, **own)

    def forward(self, tokens: Tensor, *, layout: SequenceLayout | None = None) -> Tensor:
        """Computes the next token's logits at each position, (batch, seqlen, vocab_size) or (total, vocab_size)."""
        return self.logits(self.decode(tokens, layout=layout))

    def loss(
        self,
        tokens_in: Tensor,
        tokens_out: Tensor,
        *,
        layout: SequenceLayout | None = None,
        label_smoothing: float = 0.0,
        smooth_others: bool = False,
        reduction: str = "sum",
    ) -> Tensor:
        """Computes the cross-entropy of the next tokens without ever holding all logits in memory.

        Args:
            tokens_in: (batch, seqlen) ids, or (total,) with a packed layout.
            tokens_out: the token that follows each; -100 is ignored.
            layout: see `decode`.
            label_smoothing, smooth_others, reduction: as in `Transformer.loss`.

        Returns:
            A scalar, or tokens_out's shape for reduction "none"; fp32. In training, a model with experts adds
            router_aux_loss_coef times the `load_balancing_loss` of its routers to the mean, or to each target's part of
            the sum. Padding counts there, unless the layout tells it.

        Raises:
            ValueError: the model isn't causal, so that its inputs contain the targets.
        """
        self.check_causal()
        learns_routing = self.training and self.config.router_aux_loss_coef and reduction != "none"
        with contextlib.ExitStack() as stack:
            routers = stack.enter_context(recorded_router_logits()) if learns_routing else []
            hidden = self.decode(tokens_in, layout=layout)
        options = {"label_smoothing": label_smoothing, "smooth_others": smooth_others, "reduction": reduction}
        loss = self._cross_entropy(hidden, tokens_out, **options)
        if not routers:
            return loss
        is_real = None
        if layout is not None and not layout.is_packed and len(routers[0]) == tokens_in.numel():
            places = torch.arange(tokens_in.shape[1], device=tokens_in.device)
            is_real = (places < layout.seqlens[:, None]).flatten()
        uneven = load_balancing_loss(routers, self.config.num_experts_per_tok, is_real)
        count = (tokens_out != IGNORE_INDEX).sum() if reduction == "sum" else 1
        return loss + self.config.router_aux_loss_coef * uneven * count

    def check_causal(self) -> None:
        """Raises a ValueError if tokens see later tokens, so that the model can't predict the next one."""
        if not self.config.is_causal:
            raise ValueError("expected a causal model to predict the next token, got one with is_causal=False")

    def new_cache(self, batch_size: int, max_seqlen: int, *, num_blocks: int | None = None) -> KVCache:
        """Creates an empty cache for `decode`: batch_size rows of up to max_seqlen tokens, each a group of its own."""
        cache = self.empty_cache(batch_size, max_seqlen, num_blocks)
        cache.add(batch_size)
        return cache

    def empty_cache(self, max_rows: int, max_seqlen: int, num_blocks: int | None = None) -> KVCache:
        """Creates a `KVCache` of this model's sizes without rows, in the dtype of autocast or of the weights.

        Raises:
            ValueError: the model has layers with states, which a `KVCache` doesn't hold.
        """
        if any(self.config.stateful):
            raise ValueError(
                "expected a model without layers that have a state (linear_layers, conv_layers, mamba_layers), which a "
                "KVCache doesn't hold"
            )
        return cache_of(self, max_rows, max_seqlen, max_source_seqlen=0, num_blocks=num_blocks)
