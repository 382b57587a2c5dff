"""The base of the stacks of layers: their parts and their plan, and an encoder's evaluation in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import starmap
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastformer.engine.checks import Replacement, constant_for_compilers, replacement
from fastformer.engine.frozen import Plans
from fastformer.errors import InputError
from fastformer.nn.attention import AttentionPlan, MultiheadAttention
from fastformer.nn.layers import (
    LayerPlan,
    ResidualStream,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    find_layer_plan,
)
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.masks import is_causal_mask, merge_masks
from fastformer.nn.norm import NormPlan, find_norm_plan
from fastformer.nn.packed_stack import PRECISIONS, StackSettings, run_packed, why_no_engine
from fastformer.ops import _dispatch, _extension
from fastformer.ops.linear import runs_as_op

_MOST_ROUTES = 256
_NORM_AND_FEED_FORWARD = ("add_layer_norm_fwd", "feed_forward_fwd")


class Evaluation(NamedTuple):
    """The data of an encoder without dropout and with equal layers that one call of C++ needs.

    The call is one of the engine, if that may copy the weights and supports the mask, and else of the op
    `encoder_stack`.

    Attributes:
        parameters: the dictionaries and names of the tensors, in the op's order.
        attention: the attention of the first layer.
        settings: eps, num_heads, num_kv_heads, activation, norm_first, rms_norm and the final norm's rms_norm.
        routes: by the number of rows, the dtype and a forced backend: whether each projection is the extension's.
        packed: the same settings for the engine; None if it doesn't support them.
    """

    parameters: tuple[tuple[dict[str, Any], str], ...]
    attention: MultiheadAttention
    settings: tuple[Any, ...]
    routes: dict[tuple[int, torch.dtype, str | None], list[bool]]
    packed: StackSettings | None

    def run(
        self,
        stack: Stack,
        x: Tensor,
        mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        layout: SequenceLayout | None,
        *,
        is_trusted: bool,
    ) -> Tensor | None:
        """Computes the stack's output without gradients in one call; None if something may see or change a part of it.

        Args:
            stack: the stack of this plan.
            x: (batch, seqlen, dim), or packed (total, dim).
            mask: (seqlen, seqlen) or (batch * num_heads, seqlen, seqlen), bool (True = ignore) or additive.
            key_padding_mask: (batch, seqlen), bool (True = ignore) or additive.
            is_causal: whether attention is causal, instead of a mask.
            layout: how x lies in memory.
            is_trusted: whether nothing in the layout needs a check.
        """
        if torch.compiler.is_compiling():
            return None
        function = _extension.function("encoder_stack")
        forced = _dispatch.forced_backend.get()
        if function is None or forced not in (None, "cpp") or not _dispatch.nothing_sees_ops():
            return None
        if type(x) is not Tensor or x.device.type != "cpu":
            return None
        attention = self.attention
        is_batch = attention.batch_first and x.dim() == 3
        if is_causal and mask is not None and key_padding_mask is not None:
            is_causal = is_causal_mask(mask, x.shape[1])  # torch.nn reads the mask there
        if is_causal:
            mask = None
        if not is_batch and (layout is None or not layout.is_packed):
            return None
        given = [each for each in (mask, key_padding_mask) if each is not None]
        if given:
            if not is_batch or layout is not None:
                return None
            if any(each.dtype not in (torch.bool, x.dtype) or each.device != x.device for each in given):
                return None
            mask = merge_masks(mask, key_padding_mask, x.shape[0], attention.num_heads, x.shape[1], x.shape[1])
        left, right = attention.window_size
        if is_causal:
            right = 0 if right is None else min(right, 0)
        tensors: list[Any] = [*starmap(dict.get, self.parameters)]
        if mask is None and not is_causal and self.packed is not None and stack.packs_weights and x.numel():
            out = self._run_packed(stack, self.packed, tensors, x, layout)
            if out is not None:
                return out
        if not (layout is None or is_trusted):
            return None
        key = (x.numel(), x.dtype, forced)
        if (routes := self.routes.get(key)) is None:
            if len(self.routes) >= _MOST_ROUTES:
                self.routes.clear()
            routes = self.routes[key] = [runs_as_op(x, *tensors[2:4]), runs_as_op(x, *tensors[4:6])]
        cu_seqlens, max_seqlen = (None, 0) if layout is None else (layout.cu_seqlens, layout.max_seqlen)
        out = function(x, tensors, *self.settings, routes, mask, cu_seqlens, max_seqlen, left, right)
        if out is not None and _dispatch.recorders:
            self._note(routes, layout)
        return cast("Tensor | None", out)

    def _run_packed(
        self, stack: Stack, settings: StackSettings, tensors: list[Any], x: Tensor, layout: SequenceLayout | None
    ) -> Tensor | None:
        if x.dtype not in PRECISIONS or x.shape[-1] != settings.d_model or why_no_engine() is not None:
            return None
        lengths: list[int] = [x.shape[1]] * x.shape[0] if layout is None else layout.read_seqlens().tolist()
        rows, real = x, None
        if layout is not None and not layout.is_packed:
            if x.shape[:2] != (layout.batch_size, layout.max_seqlen):
                return None
            if min(lengths) < x.shape[1]:
                real = torch.arange(x.shape[1]) < layout.seqlens[:, None]
                rows = x[real]
        # A layout may have empty sequences, and rows after its sequences.
        if 0 in lengths or sum(lengths) * settings.d_model != rows.numel():
            return None
        out = run_packed(stack, tensors, settings, rows, lengths, stack.packed_precision)
        if out is not None and _dispatch.recorders:
            self._note([True, True], layout)
        if out is not None and real is not None:
            out, rows = out.new_zeros(x.shape), out
            out[real] = rows
        return out

    @staticmethod
    def _note(routes: list[bool], layout: SequenceLayout | None) -> None:
        for is_ours in routes:
            _dispatch.note_backend("linear", "cpp" if is_ours else "torch")
        for name in ("attention_fwd" if layout is None else "varlen_attention_fwd", *_NORM_AND_FEED_FORWARD):
            _dispatch.note_backend(name, "cpp")


class StackPlan(NamedTuple):
    """The parts of a stack's computation that depend only on its modules.

    Attributes:
        replaced: the function that is called instead, because it replaced torch.nn's.
        layers: the plans of the layers that the stack computes without a call; None for each of the others.
        norm: the plan of the final norm; None if that doesn't exist or is called.
        streams: whether the last addition of each layer is fused with the first norm of the next one.
        why_padded: why the stack computes padding, in words; None if the layers may get packed tokens instead.
        is_windowed: whether a layer attends only to a window of neighbours.
        evaluation: the data for computing an encoder in one call in evaluation; None if that isn't possible.
        gathers: whether layers with known plans are called because the call gathers their parameters.
    """

    replaced: Replacement | None
    layers: tuple[LayerPlan | None, ...]
    norm: NormPlan | None
    streams: bool
    why_padded: str | None
    is_windowed: bool
    evaluation: Evaluation | None
    gathers: bool = False


def find_stack_plan(stack: Stack) -> StackPlan:
    """Finds the plan of a stack in its current state."""
    # A list of another class may yield other layers than it contains.
    layers: list[Any] = [*stack.layers._modules.values()] if type(stack.layers) is nn.ModuleList else []
    plans = [_plan_inside(layer) for layer in layers]
    norm = None if stack.norm is None else find_norm_plan(stack.norm)
    known = [(layer, plan) for layer, plan in zip(layers, plans, strict=True) if plan is not None]
    why_padded = None if stack.norm is None or norm is not None else "its norm is called"
    for i, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        if why_padded is None and (reason := _why_padded(layer, plan)) is not None:
            why_padded = f"layers.{i}: {reason}"
    if not layers:
        why_padded = "it has no layers that are known"
    gathers = any(plan.gathers for _, plan in known)
    return StackPlan(
        replacement(type(stack)),
        tuple(None if plan is None or plan.gathers else plan for plan in plans),
        norm,
        len(known) == len(layers) > 0 and all(layer.norm_first and plan.norms for layer, plan in known),
        why_padded,
        any(layer.self_attn.window_size != (None, None) for layer, plan in known if plan.self_attention is not None),
        None if why_padded is not None or gathers else _evaluation(known, norm),
        gathers,
    )


def _plan_inside(layer: Any) -> LayerPlan | None:
    """Returns the plan of a layer, or of another module in its place; None if it has to be called."""
    if not isinstance(layer, TransformerEncoderLayer | TransformerDecoderLayer):
        return None
    plan = find_layer_plan(layer)
    return plan if plan.why_called is None else None


def _why_padded(layer: Any, plan: LayerPlan | None) -> str | None:
    """Returns why a layer can't get packed tokens: a part would see the packing, or needs the padded batch."""
    if plan is None:
        return "it is of another class, or has a hook or its own forward"
    if not plan.norms:
        return "a norm, a dropout or a block is called"
    if plan.feed_forward is None:
        return "a part of the feed-forward network is called"  # it may read more than one token
    attentions: list[tuple[AttentionPlan | None, Any]] = [(plan.self_attention, layer.self_attn)]
    if layer.has_cross_attention:
        attentions.append((plan.cross_attention, layer.multihead_attn))
    for inside, attention in attentions:
        if inside is None or inside.calls_modules:
            return "an attention, or a module inside of it, is called"
        if attention.bias_k is not None or attention.add_zero_attn:
            return "an attention adds keys to each sequence"
    return None


def _evaluation(layers: list[tuple[Any, LayerPlan]], norm: NormPlan | None) -> Evaluation | None:
    """Returns the data for one call of layers; None if they differ, have dropout or cross-attention."""
    parameters: list[tuple[dict[str, Any], str]] = []
    eps: list[float] = []
    alike: set[tuple[Any, ...]] = set()
    for layer, plan in layers:
        attention, feed_forward = layer.self_attn, plan.feed_forward
        assert plan.self_attention is not None and feed_forward is not None and plan.self_attention.out_proj is not None
        drops = any(plan.dropouts) or feed_forward.dropout_p or (attention.training and attention.dropout)
        if layer.has_cross_attention or drops:
            return None
        if not (layer.is_standard and attention.is_standard):
            return None
        if not (_has_own_methods(layer) and _has_own_methods(attention)):
            return None
        own_parameters = attention._parameters
        if (
            not attention._qkv_same_embed_dim
            or own_parameters.get("in_proj_weight") is None
            or "in_proj_bias" not in own_parameters
        ):
            return None
        first, second = plan.norms
        for owner, prefix in (
            (first.parameters, ""),
            (attention._parameters, "in_proj_"),
            (plan.self_attention.out_proj, ""),
            (second.parameters, ""),
            (feed_forward.linear1, ""),
            (feed_forward.linear2, ""),
        ):
            parameters += [(owner, f"{prefix}weight"), (owner, f"{prefix}bias")]
        eps += [first.eps, second.eps]
        alike.add((
            *(attention.num_heads, attention.num_kv_heads, feed_forward.activation, layer.norm_first, first.rms_norm),
            *(second.rms_norm == first.rms_norm, attention.window_size, attention.batch_first),
        ))  # fmt: skip
    if len(alike) != 1:
        return None
    num_heads, num_kv_heads, activation, norm_first, rms_norm, same_norms, *_ = alike.pop()
    if not same_norms:
        return None
    if norm is not None:
        parameters += [(norm.parameters, "weight"), (norm.parameters, "bias")]
        eps.append(norm.eps)
    settings = (eps, num_heads, num_kv_heads, activation, norm_first, rms_norm, None if norm is None else norm.rms_norm)
    attention = layers[0][0].self_attn
    left, right = attention.window_size
    packed = None
    if left == right and len({*eps}) == 1 and (norm is None or norm.rms_norm == rms_norm):
        sizes = (attention.embed_dim, num_heads, num_kv_heads, len(layers))
        packed = StackSettings(*sizes, activation, norm_first, rms_norm, eps[0], norm is not None, left)
    return Evaluation(tuple(parameters), attention, settings, {}, packed)


def _has_own_methods(module: nn.Module) -> bool:
    """Returns whether no method of a module is overridden by another library's class or on the module itself."""
    kind = type(module)
    are_known = all(each.__module__.startswith(("fastformer.", "torch.")) for each in kind.__mro__[:-1])
    attributes = vars(module)
    return are_known and not any(name in attributes for name in _method_names(kind))


def _find_method_names(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if callable(getattr(kind, name, None)))


# torch 2.11's compiler can look a name up in a __dict__, but not walk over it.
_method_names = constant_for_compilers(_find_method_names)


def _watched_plan(stack: Stack, plan: StackPlan) -> StackPlan:
    why = "a hook on all modules, a mode, or a function in the place of one of PyTorch's sees what modules do"
    return StackPlan(plan.replaced, (None,) * len(stack.layers), None, False, why, False, None)


STACK_PLANS: Plans[StackPlan] = Plans("stack", find_stack_plan, watched=_watched_plan)


class Stack(nn.Module):
    """Layers in order, then an optional norm."""

    layers: Any  # an nn.ModuleList of layers: fastformer's, torch.nn's or the caller's
    norm: nn.Module | None
    # "auto", "skip" or "compute"; see `nn.padding`.
    padding: str = "auto"
    # Whether the engine may hold a copy of an encoder's weights, for evaluation; see `packed_stack`.
    packs_weights = True
    # The precision of that copy: "fp32", "bf16" or "int8"; None: the weights' own.
    packed_precision: str | None = None

    def __init__(self, layer: nn.Module | list[Any], num_layers: int, norm: nn.Module | None) -> None:
        super().__init__()
        is_listed = isinstance(layer, list) and len(layer) == num_layers
        if not (isinstance(layer, nn.Module) or is_listed) or not isinstance(num_layers, int) or num_layers < 0:
            raise InputError(
                f"expected a layer and num_layers of at least 0, got {type(layer).__name__} and {num_layers!r}"
            )
        copies = layer if isinstance(layer, list) else [copy.deepcopy(layer) for _ in range(num_layers)]
        self.layers = nn.ModuleList(copies)
        self.num_layers = num_layers
        self.norm = norm
        # Recomputes each layer in the backward pass instead of storing its activations.
        self.gradient_checkpointing = False

    def _seqlen(self, x: Tensor, layout: SequenceLayout | None) -> int | None:
        """Returns the length that a mask must have; None for packed sequences, or if the dimension isn't known."""
        attention = getattr(self.layers[0], "self_attn", None) if len(self.layers) else None
        if (layout is not None and layout.is_packed) or attention is None:
            return None
        return x.shape[1 if x.dim() == 3 and getattr(attention, "batch_first", False) else 0]


# The type of the values between layers.
State = Tensor | ResidualStream


def run_layers(
    stack: Stack,
    plan: StackPlan,
    x: Tensor,
    call: Callable[[nn.Module, LayerPlan | None, int, State], State],
    zeroed: Tensor | None = None,
) -> Tensor:
    """Computes a stack's layers and its norm; an addition is fused with the next norm if the layers allow it.

    Args:
        stack: the stack.
        plan: its plan.
        x: the input of the first layer.
        call: (layer, its plan, its index, the state) -> the state after the layer.
        zeroed: (batch, seqlen), True where the state is zero before the norm; None: nowhere.
    """
    saving = stack.gradient_checkpointing and stack.training and torch.is_grad_enabled()
    state: State = ResidualStream(None, x) if plan.streams else x
    for i, layer in enumerate(stack.layers):
        layer_plan = plan.layers[i] if i < len(plan.layers) else None
        if isinstance(state, ResidualStream) and not plan.streams:
            state = state.value()
        args = (layer, layer_plan, i, state)
        state = checkpoint(call, *args, use_reentrant=False) if saving else call(*args)
        if plan.why_padded is not None and not torch.compiler.is_compiling():
            plan = STACK_PLANS.of(stack)  # a called module or hook may have changed the next layers
    if zeroed is not None:
        state = state.value() if isinstance(state, ResidualStream) else state
        state = state.masked_fill(zeroed[..., None], 0)
    if not isinstance(state, ResidualStream):
        return state if stack.norm is None else stack.norm(state)
    if stack.norm is None:
        return state.value()
    if state.delta is None or plan.norm is None:
        return stack.norm(state.value())
    # In the stream's dtype, as in torch.nn under autocast.
    delta = state.delta.to(torch.promote_types(state.delta.dtype, state.residual.dtype))
    return ResidualStream(delta, state.residual, state.dropout_p).normalise(plan.norm)[0]
