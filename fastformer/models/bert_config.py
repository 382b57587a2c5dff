"""The settings of `BERT`, with their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastformer.models.common import Norm, StackConfig, as_flags, check_heads, inner_size
from fastformer.models.rotary_scaling import as_scaling
from fastformer.nn.embedding import check_buckets
from fastformer.settings import Amount, Convert, Count, Positive, Probability, Range, check_settings
from fastformer.special_ids import SpecialIds

EncoderActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"]
Positions = Literal["learned", "sinusoidal", "rotary", "relative", "learned-relative"]
Head = Literal["bert", "roberta", "distilbert", "electra", "modernbert"]
HeadPooling = Literal["cls", "mean", "late"]
_Base = Annotated[float, Range(1)]


@dataclass
class BERTConfig(StackConfig):
    """The settings of `BERT`; the defaults are those of BERT-base without a head.

    Attributes:
        vocab_size: the number of tokens.
        d_model: the size of a token's vector.
        num_heads: the number of attention heads.
        num_kv_heads: the number of heads of keys and values; None: num_heads.
        num_layers: the number of layers.
        d_ff: inner size of the feed-forward network; None: 4 * d_model; for a gated activation, with three
            matrices instead of two, two thirds of that, rounded up to a multiple of 64.
        head_dim: size of a head; None: d_model / num_heads.
        norm: "layer" or "rms".
        layer_norm_eps: added to the variance.
        activation: "relu", "gelu", "gelu_tanh", "silu", or gated "swiglu", "geglu" or "geglu_tanh".
        norm_first: pre-norm with a final norm, or post-norm (BERT).
        first_norm: whether the first layer of a pre-norm model has a norm before its attention (ModernBERT's doesn't,
            because its embeddings were just normalised).
        bias: whether projections and norms have a bias.
        attention_bias: whether the attention's projections have a bias; None: the same as bias.
        norm_bias: whether norms have a bias; None: the same as bias.
        linear1_bias: whether the first matrices of the feed-forward networks have a bias; None: the same as bias.
        embedding_norm: whether embeddings are normalised before the first layer.
        embedding_size: size of the embeddings, which are projected to d_model (ELECTRA); None: d_model.
        token_types: the number of types that a token may have, such as first and second sentence; 0: no types.
        positions: "learned", "sinusoidal", "rotary", "relative" (a bias on the scores that depends on the distance from
            query to key, which all layers share), or "learned-relative" (both; MPNet).
        num_buckets: for relative positions, the number of rows in the table.
        max_distance: for relative positions, the largest distance with a bias of its own; larger ones count as this
            one.
        rotary_base: the slowest rotation is near 1 / base.
        rotary_scaling: how rotary positions are scaled for longer sequences, see `GPTConfig`; None: no scaling.
        local_rotary_base: the rotary_base of the layers that have a window (ModernBERT); None: the same as in other
            layers.
        window_size: a token sees this many neighbours on each side; None: all.
        window_layers: for each layer, whether it has the window; None: all layers have it.
        max_len: the longest sequence.
        dropout: on the embeddings and on each sub-layer's output; acts as the nearest multiple of 1/256.
        attention_dropout: on the attention weights.
        activation_dropout: after the activation.
        head_dropout: the dropout in the head.
        pooler: whether the model has BERT's pooler, tanh(W * first token + b).
        num_labels: the number of outputs of the head for a text; 0: the model has no head.
        head: the form of the head: "bert" uses the pooler's output; the others have a layer before the last one, with
            tanh ("roberta"), ReLU ("distilbert"), GELU ("electra"), or GELU and a norm ("modernbert").
        head_pooling: the input of the head: the first token ("cls"), or the mean of all tokens; "late": each token, and
            the logits are the mean of theirs (EuroBERT).
        special_ids: the special ids; pad fills a batch. If pad is an eos, too, padding needs a layout.
        layer_groups: the number of groups of consecutive layers, each of which has the weights of one layer (ALBERT);
            None: every layer has weights of its own.
    """

    vocab_size: Annotated[int, Range(2)]
    d_model: Positive = 768
    num_heads: Positive = 12
    num_layers: Positive = 12
    d_ff: Positive | None = None
    head_dim: Positive | None = None
    norm: Norm = "layer"
    layer_norm_eps: Amount = 1e-12
    activation: EncoderActivation = "gelu"
    norm_first: bool = False
    first_norm: bool = True
    bias: bool = True
    attention_bias: bool | None = None
    embedding_norm: bool = True
    embedding_size: Positive | None = None
    token_types: Count = 0
    positions: Positions = "learned"
    num_buckets: Annotated[int, Range(4)] = 32
    max_distance: Positive = 128
    rotary_base: _Base = 10000.0
    local_rotary_base: _Base | None = None
    window_size: Count | None = None
    window_layers: Annotated[tuple[bool, ...] | None, Convert(as_flags)] = None
    max_len: Positive = 512
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    activation_dropout: Probability = 0.0
    head_dropout: Probability = 0.1
    pooler: bool = False
    num_labels: Count = 0
    head: Head = "bert"
    head_pooling: HeadPooling = "cls"
    special_ids: SpecialIds = SpecialIds()
    layer_groups: Positive | None = None
    norm_bias: bool | None = None
    linear1_bias: bool | None = None
    rotary_scaling: Annotated[dict[str, Any] | None, Convert(as_scaling)] = None
    num_kv_heads: Positive | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        check_heads(self.d_model if self.head_dim is None else self.num_heads, self.num_heads, self.num_kv_heads)
        self.special_ids.check(self.vocab_size)
        if self.embedding_size == self.d_model:
            self.embedding_size = None
        if self.num_kv_heads == self.num_heads:
            self.num_kv_heads = None
        if self.positions == "sinusoidal" and self.width % 2:
            raise ValueError(f"expected embeddings of an even size (sines and cosines in pairs), got {self.width}")
        if self.is_relative:
            check_buckets(self.num_buckets, self.max_distance)
        self.check_rotary()
        if not self.first_norm and not self.norm_first:
            raise ValueError("expected norm_first if there is no first_norm, got a post-norm model")
        self.check_windows()
        if self.layer_groups is not None:
            if self.layer_groups > self.num_layers:
                raise ValueError(f"expected layer_groups of at most {self.num_layers} layers, got {self.layer_groups}")
            if not self.first_norm or self.window_layers is not None:
                raise ValueError(
                    "expected layers of one kind, with first_norm and without window_layers, for layer_groups"
                )
        if self.num_labels and self.head == "bert" and not (self.pooler and self.head_pooling == "cls"):
            raise ValueError(
                f"expected a pooler, and head_pooling 'cls', for a head of 'bert', got pooler={self.pooler} and "
                f"{self.head_pooling!r}"
            )
        if self.d_ff is None:
            self.d_ff = inner_size(self.d_model, self.activation)

    @property
    def width(self) -> int:
        """The size of the embeddings: embedding_size or its default."""
        return self.d_model if self.embedding_size is None else self.embedding_size

    @property
    def distinct(self) -> tuple[int, ...]:
        """For each layer, the first one that has its weights."""
        if self.layer_groups is None:
            return (*range(self.num_layers),)
        groups = [int(layer / (self.num_layers / self.layer_groups)) for layer in range(self.num_layers)]
        return (*map(groups.index, groups),)

    @property
    def is_relative(self) -> bool:
        """Whether attention scores get a bias by distance."""
        return self.positions in ("relative", "learned-relative")
