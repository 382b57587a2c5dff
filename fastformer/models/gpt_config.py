"""The settings of `GPT`, with their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastformer.models.common import Activation, Norm, StackConfig, as_flags, check_heads, inner_size
from fastformer.models.rotary_scaling import as_scaling
from fastformer.nn.mixture import RouterActivation
from fastformer.settings import Amount, Convert, Count, Positive, Probability, Range, check_settings
from fastformer.special_ids import SpecialIds

NormPlacement = Literal["pre", "post", "both"]
QKNorm = Literal["head", "all", "rotated"]
_Cap = Annotated[float, Range(above=0)]
_Base = Annotated[float, Range(1)]


# The settings that only a model with experts has.
_OF_EXPERTS = ("num_experts_per_tok", "norm_topk_prob", "expert_d_ff", "shared_expert_d_ff", "sparse_layers",
               "router_aux_loss_coef", "router_bias", "router_activation", "choice_bias", "norm_topk_eps",
               "expert_scale", "shared_expert_gate")  # fmt: skip

# The settings that only a model with linear_layers, with conv_layers, or with mamba_layers has.
_OF_LINEAR = ("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim", "linear_conv_size")
_OF_CONV = ("conv_size",)
_OF_MAMBA = ("mamba_heads", "mamba_head_dim", "mamba_state_dim", "mamba_groups", "mamba_conv_size", "mamba_conv_bias")


@dataclass
class GPTConfig(StackConfig):
    """The settings of `GPT`.

    Attributes:
        vocab_size: the number of tokens.
        d_model: the size of a token's vector.
        num_heads: the number of attention heads.
        num_kv_heads: the number of heads of keys and values; None: num_heads.
        num_layers: the number of layers.
        d_ff: inner size of the feed-forward network; None: 4 * d_model; for a gated activation, with three
            matrices instead of two, two thirds of that, rounded up to a multiple of 64.
        norm: "layer" or "rms".
        layer_norm_eps: added to the variance.
        activation: "relu", "gelu", "gelu_tanh", "silu", or gated "swiglu", "geglu_tanh" or "clamped_swiglu" (gpt-oss).
        dropout: on the embeddings and on each sub-layer's output; acts as the nearest multiple of 1/256.
        attention_dropout: on the attention weights.
        activation_dropout: after the activation.
        positions: "learned", "sinusoidal" or "rotary".
        rotary_base: the slowest rotation is near 1 / base.
        tie_embeddings: one matrix for the tokens and the projection before the softmax.
        bias: whether projections and norms have a bias.
        window_size: a token sees this many tokens before itself; None: all.
        max_len: the longest sequence.
        special_ids: the special ids: pad fills a batch of prompts, eos ends a text.
        head_dim: size of a head; None: d_model / num_heads.
        qkv_bias: whether the projections to queries, keys and values have a bias; None: the same as bias.
        out_bias: whether the attention's output projection has a bias; None: the same as bias.
        qk_norm: an RMSNorm of queries and keys before they are rotated: "head", over each head, with one weight for all
            heads (Qwen3, Gemma 3), or "all", over all heads together (OLMo 2); "rotated": as "head", but after they are
            rotated (Hunyuan); None: none.
        norm_placement: "pre": before each sub-layer; "post": on the output of a sub-layer, before it is added (OLMo 2);
            "both" (Gemma 2).
        parallel_residual: whether attention and feed-forward network both read the layer's input (GPT-NeoX).
        rotary_fraction: the part of a head that is rotated: its first int(head_dim * rotary_fraction) features.
        rotary_scaling: how rotary positions are scaled for longer sequences: a mapping of kind "linear", "dynamic",
            "llama3", "yarn" or "longrope" with its parameters, see `RotaryScaling`; None: no scaling.
        local_rotary_base: the rotary_base of the layers that have a window, to which rotary_scaling doesn't apply
            (Gemma 3); None: they rotate like the other layers.
        window_layers: for each layer, whether it has the window; None: all layers have it.
        attention_scale: the factor of the scores; None: 1 / sqrt(head_dim).
        attention_softcap: a cap for the scaled scores s: cap * tanh(s / cap) (Gemma 2); None: no cap.
        logit_softcap: a cap for the logits, of the same form; None: no cap.
        embedding_scale: the factor of the tokens' embeddings, rounded to their dtype; None: 1.
        is_causal: whether a token sees no later token. A model whose tokens all see each other (within the window, to
            both sides) computes embeddings of texts, and does not generate.
        num_experts: the number of feed-forward networks in a layer, of which a router chooses some for each token
            (`MixtureOfExperts`); None: one, without a router.
        num_experts_per_tok: the number that it chooses.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        expert_d_ff: d_ff of an expert; None: d_ff, which is always that of layers without experts.
        shared_expert_d_ff: d_ff of one more network, which computes all tokens (Qwen2-MoE); None: there is none.
        sparse_layers: for each layer, whether it has experts; None: all layers have them.
        router_aux_loss_coef: the factor, in training, of the loss of routers that prefer some experts.
        norm_bias: whether norms have a bias; None: the same as bias.
        shared_norm: whether both parts of a layer with parallel_residual read the output of one norm (Phi, GPT-J).
        rotary_layers: for each layer, whether it rotates queries and keys (SmolLM3); None: all layers do.
        output_bias: whether the projection before the softmax has a bias (Phi).
        attention_sinks: whether each head has one more key, without a value, whose score is learned (gpt-oss).
        router_bias: whether routers have a bias (gpt-oss).
        attention_gate: whether the outputs of heads are multiplied by the sigmoid of a projection (Qwen3.5).
        linear_layers: for each layer, whether it is a `GatedDeltaNet`, with a state in the place of keys and values
            (Qwen3.5); at least one layer attends. None: all layers attend.
        linear_key_heads: the number of heads of queries and keys in linear_layers.
        linear_value_heads: the number of heads of values there; None: linear_key_heads.
        linear_key_dim: the size of a head of queries or keys there.
        linear_value_dim: the size of a head of values there.
        linear_conv_size: the number of tokens, the current one included, that the convolution there reads.
        conv_layers: for each layer, whether it is a `ShortConv`, with a state in the place of keys and values (LFM2);
            at least one layer attends. None: all others attend.
        conv_size: the number of tokens, the current one included, that its convolution reads.
        mamba_layers: for each layer, whether it is a `Mamba`, with a state in the place of keys and values (Granite 4);
            at least one layer attends. None: all others attend.
        mamba_heads: the number of heads there.
        mamba_head_dim: the size of a head there.
        mamba_state_dim: the number of rows of a head's state there.
        mamba_groups: the number of groups of heads there, which share what writes to states and reads from them.
        mamba_conv_size: the number of tokens, the current one included, that the convolution there reads.
        mamba_conv_bias: whether that convolution has a bias.
        global_head_dim: head_dim of layers without a window (Gemma 4); None: as in the others.
        global_num_kv_heads: num_kv_heads of layers without a window; None: as in the others.
        value_norm: whether each head's values are divided by their root mean square.
        keys_as_values: whether layers without a window make values of the product for keys, before its norm.
        shared_kv_layers: the number of layers, the last ones, that read the keys and values of the last of the layers
            before them that has, or hasn't, a window as they do.
        shared_kv_d_ff: d_ff of these layers; None: d_ff.
        layer_input_dim: the size of a vector that each layer has of its own for a token, see `LayerInput`; None: none.
        layer_scalars: whether a layer ends by a factor, which is not trained.
        embedding_dropout: dropout on the embeddings; None: the same as dropout.
        query_growth: rotated queries at position p are multiplied by 1 + query_growth * log(1 + floor(p /
            query_growth_length)) (Ministral 3).
        query_growth_length: the position from which on that is more than 1.
        router_activation: what makes weights of a router's scores, "softmax" or "sigmoid" (DeepSeek-V3).
        choice_bias: whether experts are chosen by their weights plus a number for each expert, which isn't trained.
        norm_topk_eps: is added to the sum of norm_topk_prob.
        expert_scale: the factor of the weights of a token's experts, at the end.
        shared_expert_gate: whether the output of the shared expert is multiplied by the sigmoid of a score.
    """

    vocab_size: Annotated[int, Range(2)]
    d_model: Positive = 384
    num_heads: Positive = 6
    num_kv_heads: Positive | None = None
    num_layers: Positive = 6
    d_ff: Positive | None = None
    norm: Norm = "layer"
    layer_norm_eps: Amount = 1e-5
    activation: Activation = "gelu"
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    rotary_base: _Base = 10000.0
    tie_embeddings: bool = True
    bias: bool = True
    window_size: Count | None = None
    max_len: Positive = 1024
    special_ids: SpecialIds = SpecialIds()
    head_dim: Positive | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: QKNorm | None = None
    norm_placement: NormPlacement = "pre"
    parallel_residual: bool = False
    rotary_fraction: Annotated[float, Range(above=0, most=1)] = 1.0
    rotary_scaling: Annotated[dict[str, Any] | None, Convert(as_scaling)] = None
    local_rotary_base: _Base | None = None
    window_layers: Annotated[tuple[bool, ...] | None, Convert(as_flags)] = None
    attention_scale: _Cap | None = None
    attention_softcap: _Cap | None = None
    logit_softcap: _Cap | None = None
    embedding_scale: _Cap | None = None
    is_causal: bool = True
    num_experts: Positive | None = None
    num_experts_per_tok: Positive = 2
    norm_topk_prob: bool = True
    expert_d_ff: Positive | None = None
    shared_expert_d_ff: Positive | None = None
    sparse_layers: Annotated[tuple[bool, ...] | None, Convert(as_flags)] = None
    router_aux_loss_coef: Amount = 0.0
    norm_bias: bool | None = None
    shared_norm: bool = False
    rotary_layers: Annotated[tuple[bool, ...] | None, Convert(as_flags)] = None
    output_bias: bool = False
    attention_sinks: bool = False
    router_bias: bool = False
    attention_gate: bool = False
    linear_layers: Annotated[tuple[bool, ...] | None, Convert(as_flags)] = None
    linear_key_heads: Positive = 16
    linear_value_heads: Positive | None = None
    linear_key_dim: Positive = 128
    linear_value_dim: Positive = 128
    linear_conv_size: Positive = 4
    conv_layers: Annotated[tuple[bool, ...] | None, Convert(as_flags)] = None
    conv_size: Positive = 3
    global_head_dim: Positive | None = None
    global_num_kv_heads: Positive | None = None
    value_norm: bool = False
    keys_as_values: bool = False
    shared_kv_layers: Annotated[int, Range(0)] = 0
    shared_kv_d_ff: Positive | None = None
    layer_input_dim: Positive | None = None
    layer_scalars: bool = False
    embedding_dropout: Probability | None = None
    query_growth: Amount = 0.0
    query_growth_length: Positive = 8192
    router_activation: RouterActivation = "softmax"
    choice_bias: bool = False
    norm_topk_eps: Amount = 0.0
    expert_scale: _Cap = 1.0
    shared_expert_gate: bool = True
    mamba_layers: Annotated[tuple[bool, ...] | None, Convert(as_flags)] = None
    mamba_heads: Positive = 48
    mamba_head_dim: Positive = 64
    mamba_state_dim: Positive = 128
    mamba_groups: Positive = 1
    mamba_conv_size: Positive = 4
    mamba_conv_bias: bool = True

    def __post_init__(self) -> None:
        check_settings(self)
        check_heads(self.d_model if self.head_dim is None else self.num_heads, self.num_heads, self.num_kv_heads)
        self.special_ids.check(self.vocab_size)
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"expected an even d_model (sines and cosines in pairs), got {self.d_model}")
        self.check_rotary()
        if self.rotary_layers is not None and len(self.rotary_layers) != self.num_layers:
            raise ValueError(
                f"expected rotary_layers to have a bool for each of the {self.num_layers} layers, got "
                f"{len(self.rotary_layers)}"
            )
        self.check_windows()
        self._check_layers()
        if self.parallel_residual and self.norm_placement != "pre":
            raise ValueError(f"expected norm_placement 'pre' for parallel_residual, got {self.norm_placement!r}")
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("expected parallel_residual for shared_norm, got False")
        if self.d_ff is None:
            self.d_ff = inner_size(self.d_model, self.activation)
        self._check_experts()
        self._check_states()

    def _check_states(self) -> None:
        """Checks the options of layers that have a state in the place of keys and values."""
        kinds = {"linear_layers": _OF_LINEAR, "conv_layers": _OF_CONV, "mamba_layers": _OF_MAMBA}
        for kind, options in kinds.items():
            layers = getattr(self, kind)
            if layers is None:
                for name in options:
                    if getattr(self, name) != getattr(GPTConfig, name):
                        raise ValueError(f"expected {kind} for {name}, got None and {getattr(self, name)}")
                continue
            if len(layers) != self.num_layers:
                raise ValueError(
                    f"expected {kind} to have a bool for each of the {self.num_layers} layers, got {len(layers)}"
                )
            if not self.is_causal:
                raise ValueError(f"expected a causal model for {kind}, got one with is_causal=False")
        if all(self.stateful) or any(sum(flags) > 1 for flags in zip(self.linear, self.conv, self.mamba, strict=True)):
            raise ValueError(
                "expected at least one layer that attends, and no layer in two of linear_layers, conv_layers and "
                f"mamba_layers, got {self.linear_layers}, {self.conv_layers} and {self.mamba_layers}"
            )
        if self.mamba_heads % self.mamba_groups:
            raise ValueError(
                f"expected mamba_heads to be a multiple of mamba_groups, got {self.mamba_heads} and {self.mamba_groups}"
            )
        if self.linear_layers is None:
            return
        self.linear_value_heads = self.linear_value_heads or self.linear_key_heads
        if self.linear_value_heads % self.linear_key_heads:
            raise ValueError(
                f"expected linear_value_heads to be a multiple of linear_key_heads, got {self.linear_value_heads} and "
                f"{self.linear_key_heads}"
            )

    def _check_experts(self) -> None:
        if self.num_experts is None:
            for name in _OF_EXPERTS:
                if getattr(self, name) != getattr(GPTConfig, name):
                    raise ValueError(f"expected num_experts for {name}, got None and {getattr(self, name)}")
        elif self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"expected num_experts_per_tok of at most num_experts, got {self.num_experts_per_tok} of "
                f"{self.num_experts}"
            )
        elif len(self.sparse) != self.num_layers:
            raise ValueError(
                f"expected sparse_layers to have a bool for each of the {self.num_layers} layers, got "
                f"{len(self.sparse)}"
            )
        if not self.shared_expert_gate and self.shared_expert_d_ff is None:
            raise ValueError("expected shared_expert_d_ff for a shared_expert_gate of False, got None")

    def _check_layers(self) -> None:
        """Checks the options by which layers differ."""
        if self.global_num_kv_heads is not None:
            check_heads(self.num_heads, self.num_heads, self.global_num_kv_heads)
        if self.global_head_dim is not None and self.positions == "rotary" and self.local_rotary_base is None:
            raise ValueError(
                "expected a local_rotary_base, since layers without global_head_dim rotate otherwise, got None"
            )
        if self.shared_kv_layers and any(self.stateful):
            raise ValueError(
                "expected no linear_layers, conv_layers or mamba_layers for shared_kv_layers, got "
                f"{sum(self.stateful)} of them"
            )
        if self.shared_kv_layers and self.positions != "rotary":
            raise ValueError(f"expected positions 'rotary' for shared_kv_layers, got {self.positions!r}")
        own = self.num_layers - self.shared_kv_layers
        if not {*self.windows[max(own, 0) :]} <= {*self.windows[: max(own, 0)]}:
            raise ValueError(
                "expected shared_kv_layers that read keys of layers before them, with a window if they have one, got "
                f"{self.shared_kv_layers} of {self.num_layers} layers"
            )
        if self.shared_kv_d_ff is not None and (not self.shared_kv_layers or self.num_experts is not None):
            raise ValueError("expected shared_kv_layers, and no experts, for shared_kv_d_ff")
        if self.keys_as_values and self.qk_norm not in (None, "head"):
            raise ValueError(f"expected a qk_norm of 'head' or none for keys_as_values, got {self.qk_norm!r}")
        if self.shared_kv_layers and self.qk_norm == "rotated":
            raise ValueError("expected a qk_norm of 'head', 'all' or none for shared_kv_layers, got 'rotated'")
        if self.query_growth and self.local_rotary_base is not None:
            raise ValueError(f"expected no local_rotary_base for query_growth, got {self.local_rotary_base}")
        if self.query_growth and self.qk_norm == "rotated":
            raise ValueError("expected norms before rotations for query_growth, got a qk_norm of 'rotated'")
        if self.layer_input_dim is not None and self.norm != "rms":
            raise ValueError(f"expected norm 'rms' for layer_input_dim, got {self.norm!r}")
        if self.layer_input_dim is not None and self.activation in ("relu", "clamped_swiglu"):
            raise ValueError(f"expected an activation with GELU or SiLU for layer_input_dim, got {self.activation!r}")

    @property
    def key_layers(self) -> tuple[int, ...] | None:
        """For each layer, the layer whose keys and values it reads; None: all have their own."""
        if not self.shared_kv_layers:
            return None
        own, windows = self.num_layers - self.shared_kv_layers, self.windows
        last = {windows[layer]: layer for layer in range(own)}
        return (*range(own), *(last[has_window] for has_window in windows[own:]))

    def heads_of(self, has_window: bool) -> tuple[int, int]:
        """Returns the number of heads of keys and their size, in layers with or without a window."""
        kv_heads, size = self.num_kv_heads or self.num_heads, self.size_of_head
        return (kv_heads, size) if has_window else (self.global_num_kv_heads or kv_heads, self.global_head_dim or size)

    def kv_projections_of(self, layer: int) -> int:
        """Returns whether a layer projects to keys and values (2), to keys (1) or to none of them."""
        if layer >= self.num_layers - self.shared_kv_layers:
            return 0
        return 1 if self.keys_as_values and not self.windows[layer] else 2

    def d_ff_of(self, layer: int) -> int:
        """Returns d_ff of a layer without experts."""
        shares = layer >= self.num_layers - self.shared_kv_layers
        return (self.shared_kv_d_ff if shares else None) or self.d_ff or 4 * self.d_model

    @property
    def has_unlike_layers(self) -> bool:
        """Whether layers differ in their parameters, besides those with experts."""
        differ = self.global_head_dim or self.global_num_kv_heads or self.keys_as_values or self.shared_kv_layers
        return bool(differ)

    @property
    def has_own_ends(self) -> bool:
        """Whether layers compute what only decoders of Gemma 4's kind have: norms of values, own inputs or scalars."""
        return self.value_norm or self.layer_scalars or self.layer_input_dim is not None

    @property
    def linear(self) -> tuple[bool, ...]:
        """One flag for each layer: whether it is a `GatedDeltaNet`."""
        return self.linear_layers or (False,) * self.num_layers

    @property
    def conv(self) -> tuple[bool, ...]:
        """One flag for each layer: whether it is a `ShortConv`."""
        return self.conv_layers or (False,) * self.num_layers

    @property
    def mamba(self) -> tuple[bool, ...]:
        """One flag for each layer: whether it is a `Mamba`."""
        return self.mamba_layers or (False,) * self.num_layers

    @property
    def stateful(self) -> tuple[bool, ...]:
        """One flag for each layer: whether it has a state in the place of keys and values."""
        return tuple(map(any, zip(self.linear, self.conv, self.mamba, strict=True)))

    @property
    def sparse(self) -> tuple[bool, ...]:
        """One flag for each layer: whether it has experts."""
        if self.num_experts is None or self.sparse_layers is None:
            return (self.num_experts is not None,) * self.num_layers
        return self.sparse_layers
