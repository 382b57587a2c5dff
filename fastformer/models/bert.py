"""The encoder-only Transformer: hidden states, pooled vectors, and classification of texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.models.bert_config import BERTConfig as BERTConfig
from fastformer.models.common import (
    IGNORE_INDEX,
    check_ids,
    init_weights,
    layer_options,
    norm_of,
    rotary_embeddings,
    rotations,
    trailing_padding,
)
from fastformer.models.pooling import POOLINGS, Pooling, pool
from fastformer.models.pretrained import PretrainedModel, placement
from fastformer.nn.embedding import Embedding, PositionalEncoding, RelativePositionBias
from fastformer.nn.layers import TransformerEncoderLayer
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.linear import linear
from fastformer.nn.transformer import TransformerEncoder
from fastformer.ops._dropout import draws_seeds_together

_HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "roberta": torch.tanh,
    "distilbert": F.relu,
    "electra": F.gelu,
    "modernbert": F.gelu,
}


_NO_ID = -1


class HeadLinear(nn.Module):
    """A linear layer after the encoder; `quantize` doesn't round it, because only a few rows pass through it.

    Parameters: `weight` (size_out, size_in) and, with `bias`, `bias` (size_out,).
    """

    bias: nn.Parameter | None

    def __init__(self, size_in: int, size_out: int, *, bias: bool = True, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(size_out, **factory)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., size_in) to (..., size_out)."""
        return linear(x, self.weight, self.bias)


class ClassificationHead(nn.Module):
    """Computes the logits of labels from a text's vector; see `BERTConfig.head`.

    Parameters: `dense.*` (not for "bert"), `norm.*` ("modernbert"), `out.*`.
    """

    def __init__(self, config: BERTConfig, **factory: Any) -> None:
        super().__init__()
        size, bias = config.d_model, config.head != "modernbert" or config.bias
        self.kind = config.head
        self.dense = None if self.kind == "bert" else HeadLinear(size, size, bias=bias, **factory)
        self.norm = norm_of(config, size, factory) if self.kind == "modernbert" else None
        self.dropout = nn.Dropout(config.head_dropout)
        self.out = HeadLinear(size, config.num_labels, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., d_model) to (..., num_labels)."""
        if self.dense is not None:
            if self.kind in ("roberta", "electra"):
                x = self.dropout(x)
            x = _HEAD_ACTIVATIONS[self.kind](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(self.dropout(x))


def _aliases(model: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields the prefixes of names in a state_dict whose layer is that of an earlier prefix, with this prefix."""
    assert isinstance(model, BERT)
    layers = model.encoder.layers
    for layer, first in enumerate(model.config.distinct):
        if layer != first and layers[layer] is layers[first]:
            yield f"{prefix}encoder.layers.{layer}.", f"{prefix}encoder.layers.{first}."


def _omit_aliases(model: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Leaves one name for each tensor of layers that share their weights."""
    for name, _ in _aliases(model, prefix):
        for each in [each for each in state if each.startswith(name)]:
            del state[each]


def _restore_aliases(model: nn.Module, state: dict[str, Any], prefix: str, *others: object) -> None:
    """Adds the names that `_omit_aliases` has omitted."""
    for name, first in _aliases(model, prefix):
        for each in [each for each in state if each.startswith(first)]:
            state.setdefault(name + each.removeprefix(first), state[each])


class BERT(PretrainedModel):
    """An encoder-only Transformer: BERT, RoBERTa, DistilBERT, MPNet, ELECTRA, ALBERT, ModernBERT, EuroBERT and others.

    Inputs are padded on the right (batch, seqlen), or packed (total,) with a `SequenceLayout.packed`; weights and
    results are the same. Without a layout, trailing PADs are padding, unless PAD is an eos of the config, too.

    Parameters: `embedding.weight`, `embedding.position.table` (learned), `encoder.*` as in
    `torch.nn.TransformerEncoder`; where the config has them `token_type_embedding.weight`, `embedding_norm.*`,
    `embedding_projection.*`, `position_bias.table` (relative), `pooler.*` and `head.*`. With `layer_groups`, a
    state_dict has the first layer of each group.

    Args:
        config: the settings; `BERT.from_preset("base", vocab_size=...)` knows "base", "large", "mini" and "tiny".
        device, dtype: the device and the dtype of the parameters.
    """

    config_class = BERTConfig
    presets: dict[str, dict[str, Any]] = {
        "base": {"token_types": 2, "pooler": True},
        "large": {"token_types": 2, "pooler": True, "d_model": 1024, "num_heads": 16, "num_layers": 24},
        # The size of MiniLM and of most small sentence encoders.
        "mini": {"token_types": 2, "pooler": True, "d_model": 384, "num_layers": 6},
        "tiny": {"token_types": 2, "pooler": True, "d_model": 128, "num_heads": 2, "num_layers": 2},
    }
    config: BERTConfig

    def __init__(
        self, config: BERTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not isinstance(config, BERTConfig):
            raise ValueError(f"expected a BERTConfig, got {type(config).__name__} (see from_preset)")
        self.config = config
        factory = placement(device, dtype)
        position: PositionalEncoding | None = None
        self.rotary, self.local_rotary = rotary_embeddings(config, factory)
        if config.positions not in ("rotary", "relative"):
            kind = "interleaved" if config.positions == "sinusoidal" else "learned"
            position = PositionalEncoding(config.width, config.max_len, kind=kind, batch_first=True, **factory)
        self.embedding = Embedding(config.vocab_size, config.width, position=position, **factory)
        types = config.token_types
        self.token_type_embedding = nn.Embedding(types, config.width, **factory) if types else None
        self.embedding_norm = norm_of(config, config.width, factory) if config.embedding_norm else None
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.embedding_projection: nn.Linear | None = None
        if config.embedding_size is not None:
            self.embedding_projection = nn.Linear(config.width, config.d_model, bias=config.bias, **factory)
        self.position_bias: RelativePositionBias | None = None
        if config.is_relative:
            buckets = (config.num_buckets, config.max_distance)
            self.position_bias = RelativePositionBias(config.num_heads, *buckets, **factory)
        # Post-norm layers end with a norm of their own.
        final_norm = norm_of(config, config.d_model, factory) if config.norm_first else None
        layer = TransformerEncoderLayer(
            config.d_model,
            config.num_heads,
            config.d_ff or 4 * config.d_model,
            norm_first=config.norm_first,
            attention_bias=config.attention_bias,
            norm_bias=config.norm_bias,
            linear1_bias=config.linear1_bias,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            **layer_options(config, factory),
        )
        if config.layer_groups is None:
            self.encoder = TransformerEncoder(layer, config.num_layers, final_norm)
        else:
            shared = {first: copy.deepcopy(layer) for first in {*config.distinct}}
            layers = [shared[first] for first in config.distinct]
            self.encoder = TransformerEncoder(layers, config.num_layers, final_norm)
            self.register_state_dict_post_hook(_omit_aliases)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(_restore_aliases)  # type: ignore[no-untyped-call]
        if not config.first_norm:
            self.encoder.layers[0].norm1 = nn.Identity()
        for module, has_window in zip(self.encoder.layers, config.windows, strict=True):
            module.self_attn.window_size = (config.window_size,) * 2 if has_window else (None, None)
        self.pooler = HeadLinear(config.d_model, config.d_model, **factory) if config.pooler else None
        self.head = ClassificationHead(config, **factory) if config.num_labels else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as BERT: N(0, 0.02) for matrices, 0 for biases, 1 for norms."""
        for module in self.modules():
            init_weights(module, 0.02)
            if isinstance(module, HeadLinear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @draws_seeds_together
    def encode(
        self, tokens: Tensor, *, layout: SequenceLayout | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """Encodes texts.

        Args:
            tokens: (batch, seqlen) ids, or (total,) with a packed layout.
            layout: None: trailing PADs are padding.
            token_types: tokens' shape, integers; None: all are 0.

        Returns:
            Hidden states, (batch, seqlen, d_model) or (total, d_model). Those of padding have no meaning.

        Raises:
            ValueError: ids out of the vocabulary, a sequence longer than max_len, PADs before a token and no layout,
                token types that the model doesn't have.
        """
        config = self.config
        check_ids(tokens, config.vocab_size, config.max_len, layout, "token")
        layout = self.layout_of(tokens) if layout is None else layout
        x = self.embedding(tokens, layout.positions)
        types = self._types(tokens, layout, token_types)
        if types is not None:
            x = x + types
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.embedding_dropout(x)
        if self.embedding_projection is not None:
            x = self.embedding_projection(x)
        bias = None
        if self.position_bias is not None:
            positions_in_row = torch.arange(layout.max_seqlen, device=tokens.device)
            bias = self.position_bias(positions_in_row, positions_in_row)
        rotary = rotations(self.rotary, self.local_rotary, config.windows, layout.positions)
        return self.encoder(x, layout=layout, rotary=rotary, position_bias=bias)

    def layout_of(self, tokens: Tensor) -> SequenceLayout:
        """Returns the layout of padded ids (batch, seqlen), in which trailing PADs are padding.

        If PAD also ends texts (EuroBERT), nothing is padding: the end of a text doesn't tell where its padding begins.
        """
        ids = self.config.special_ids
        return trailing_padding(tokens, _NO_ID if ids.pad in ids.eos else ids.pad, "token")

    def _types(self, tokens: Tensor, layout: SequenceLayout, token_types: Tensor | None) -> Tensor | None:
        """Returns the embeddings of token types, which are added to the tokens' embeddings."""
        if self.token_type_embedding is None:
            if token_types is not None:
                raise ValueError("expected no token_types: the model has no embeddings of them (config.token_types 0)")
            return None
        if token_types is None:
            return self.token_type_embedding.weight[0]
        check_ids(token_types, self.config.token_types, self.config.max_len, layout, "token_types")
        if token_types.shape != tokens.shape:
            raise ValueError(f"expected token_types of shape {tuple(tokens.shape)}, got {tuple(token_types.shape)}")
        return F.embedding(token_types, self.token_type_embedding.weight)

    def pooled(
        self, hidden: Tensor, layout: SequenceLayout | None = None, kind: Pooling | Literal["pooler"] = "mean"
    ) -> Tensor:
        """Pools hidden states to one vector for each text.

        Args:
            hidden: the output of `encode`.
            layout: the one that `encode` was given, or `layout_of(tokens)`; None: nothing is padding.
            kind: "cls" (the first token), "lasttoken", "max", "mean", "mean_sqrt_len_tokens" (the sum divided by the
                square root of the length), "weightedmean" (weights 1, 2, 3, ... along the text) or "pooler" (BERT's
                pooler of the first token).

        Returns:
            (batch, d_model). The rows of texts without tokens are zeros before the pooler.

        Raises:
            ValueError: another kind; "pooler" for a model without a pooler; hidden states that don't fit the layout.
        """
        if kind == "pooler":
            if self.pooler is None:
                raise ValueError("expected a model with a pooler for kind 'pooler', got one without")
            return torch.tanh(self.pooler(pool(hidden, layout, "cls")))
        if kind not in POOLINGS:
            raise ValueError(f"expected a kind of pooling in {(*POOLINGS, 'pooler')}, got {kind!r}")
        return pool(hidden, layout, kind)

    def classify_hidden(self, hidden: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Computes the logits of `classify` from hidden states; see `pooled` for the arguments."""
        if self.head is None:
            raise ValueError("expected a model with a head (config.num_labels), got one without")
        if self.config.head_pooling == "late":
            return pool(self.head(hidden), layout, "mean")
        kind: Any = "pooler" if self.config.head == "bert" else self.config.head_pooling
        out: Tensor = self.head(self.pooled(hidden, layout, kind))
        return out

    @draws_seeds_together
    def classify(
        self, tokens: Tensor, *, layout: SequenceLayout | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """Computes the logits of a text's labels, (batch, num_labels). See `encode` for the arguments.

        Raises:
            ValueError: a model without a head; see `encode`.
        """
        hidden = self.encode(tokens, layout=layout, token_types=token_types)
        return self.classify_hidden(hidden, self.layout_of(tokens) if layout is None else layout)

    def forward(
        self, tokens: Tensor, *, layout: SequenceLayout | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """Calls `classify` if the model has a head, else `encode`."""
        run = self.encode if self.head is None else self.classify
        return run(tokens, layout=layout, token_types=token_types)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        layout: SequenceLayout | None = None,
        token_types: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Computes the loss of a text's labels; the labels select its kind, as in transformers' classifiers.

        Args:
            tokens, layout, token_types: see `encode`.
            labels: (batch,) integers below num_labels: cross-entropy, in which labels of -100 are ignored; (batch,
                num_labels) floats from 0 to 1: binary cross-entropy of each label; and of a model with one label
                (batch,) or (batch, 1) numbers: the squared error.
            reduction: "mean", "sum" or "none".

        Returns:
            A scalar, or labels' shape for "none"; fp32, or fp64 of a model in fp64.

        Raises:
            ValueError: labels of another shape, dtype or range; another reduction.
        """
        logits = self.classify(tokens, layout=layout, token_types=token_types)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return label_loss(logits, labels, reduction)


def label_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Computes the loss of logits (batch, num_labels); see `BERT.loss`."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"expected a reduction of 'mean', 'sum' or 'none', got {reduction!r}")
    batch, num_labels = logits.shape
    if not isinstance(labels, Tensor):
        raise ValueError(f"expected labels as a tensor, got {type(labels).__name__}")
    if num_labels == 1:
        if labels.shape not in ((batch,), (batch, 1)):
            raise ValueError(f"expected labels of shape {(batch,)} or {(batch, 1)}, got {tuple(labels.shape)}")
        return F.mse_loss(logits.view(labels.shape), labels.to(logits.dtype), reduction=reduction)
    if labels.is_floating_point():
        if labels.shape != logits.shape:
            raise ValueError(f"expected labels of shape {tuple(logits.shape)}, got {tuple(labels.shape)}")
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
    if labels.shape != (batch,) or labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"expected labels of shape {(batch,)}, int64 or int32, or of {tuple(logits.shape)}, floating-point, got "
            f"{labels.dtype} {tuple(labels.shape)}"
        )
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= num_labels))]
        if wrong.numel():
            raise ValueError(f"expected labels from 0 to {num_labels - 1}, or {IGNORE_INDEX}, got {int(wrong[0])}")
    return F.cross_entropy(logits, labels.long(), ignore_index=IGNORE_INDEX, reduction=reduction)
