"""What the families of transformers have in common: masks that are padding, packed batches, joined and fused parts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import generic

try:
    from transformers.utils import output_capturing
except ImportError:  # before 5
    output_capturing = None

from fastformer.integrations.swap import original_class
from fastformer.nn.dropout import active_dropout, dropout_seed
from fastformer.nn.guards import (
    ATTENTIONS,
    FORWARDS,
    PLAIN_CALLS,
    has_plain_call,
    is_called_plainly,
    is_its_own,
    is_plain,
    is_plain_dropout,
    is_traced,
    is_unhooked,
    is_written_as_known,
    is_written_in,
    norm_settings,
)
from fastformer.nn.layers import join
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.linear import LINEARS, project
from fastformer.nn.padding import Padding, read_padding
from fastformer.ops import attention, varlen_attention
from fastformer.ops import feed_forward as feed_forward_op

# Before 5 layers have a call of their own, for checkpoints; who packs asks whether there are any. Nobody calls the
# containers, which peft keeps adapters in.
PLAIN_CALLS.update((GradientCheckpointingLayer.__call__, nn.ParameterDict.__call__, nn.ParameterList.__call__))
# Before 5 a layer gives a tuple.
RETURNS_TUPLES = int(transformers.__version__.split(".")[0]) < 5


# By the name of a module of transformers: the functions (and losses) that its classes find there. None: another stood
# there when they were first seen.
_FUNCTIONS: dict[str, dict[str, object]] = {}
_LOSSES = frozenset({"CrossEntropyLoss", "BCEWithLogitsLoss", "MSELoss"})


def know(source: ModuleType) -> None:
    """Remembers what classes in a module of transformers do, so that a forward that somebody replaces is noticed."""
    for kind in vars(source).values():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or kind.forward is nn.Module.forward:
            continue
        if FORWARDS.get(kind) is None:
            # What decorates a forward is written in torch.utils, too.
            FORWARDS[kind] = kind.forward if is_its_own(kind, transformers, nn, torch.utils) else None
    if not source.__name__.startswith("transformers.models."):
        return
    known = _FUNCTIONS.setdefault(source.__name__, {})
    for name, value in vars(source).items():
        is_asked = isinstance(value, FunctionType) and value.__module__.split(".")[0] not in sys.stdlib_module_names
        if known.get(name) is None and (is_asked or name in known or name in _LOSSES):
            is_own = is_written_in(value, transformers, torch) or value is getattr(nn, name, None)
            known[name] = value if is_own else None


def sources_of(kinds: Iterable[type[nn.Module]]) -> list[tuple[dict[str, Any], dict[str, object]]]:
    """Of the modules of transformers in which classes are written: their variables, and what was known of them."""
    names = {each.__module__ for kind in kinds for each in kind.__mro__}
    return [(vars(sys.modules[name]), _FUNCTIONS[name]) for name in sorted(names & _FUNCTIONS.keys())]


know(activations)


# What may stand under the name "sdpa": transformers' own, and ours in front of it (`attention_interface`).
SDPA_FUNCTIONS: set[object] = {sdpa_attention_forward}


def attends_as_known() -> bool:
    """Whether what transformers attends by is its own and PyTorch's, or ours; not what somebody put in its place."""
    return F.scaled_dot_product_attention in ATTENTIONS and attends_by_theirs()


def attends_by_theirs() -> bool:
    """Whether no other attention was registered under the name of "sdpa"."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] in SDPA_FUNCTIONS


class Packing:
    """One run of a stack that may leave padding out: the first layer packs, and what the stack gives is padded again.

    Args:
        known: the padding, where the stack knows it; else the first layer's mask tells.
        last: the layer behind which the tokens are padded again, where it isn't the stack that does that.
        memory: the padding of what the layers attend to besides, an encoder's output.

    Attributes:
        padding: what was left out, from the first layer on; None while nothing is.
        last: see above.
        crosses: whether it is the memory that is attended to now.
    """

    def __init__(
        self, known: Padding | None = None, last: nn.Module | None = None, memory: Padding | None = None
    ) -> None:
        self.padding: Padding | None = None
        self.last = last
        self.crosses = False
        self._known = known
        self._has_begun = False
        self._memory_padding = memory
        self._packed_memory: Tensor | None = None

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout] | None:
        """How queries and keys lie now; None while nothing is packed."""
        if self.padding is None:
            return None
        keys = self._memory_padding if self.crosses else self.padding
        assert keys is not None
        return self.padding.layout, keys.layout

    def enter_memory(self, memory: Tensor) -> Tensor:
        """What layers attend to in place of the memory (batch, seqlen, dim): (1, total, dim), packed once for all."""
        if self._packed_memory is None:
            assert self._memory_padding is not None
            self._packed_memory = self._memory_padding.pack(memory)[None]
        return self._packed_memory

    def leave_memory(self, x: Tensor) -> Tensor:
        """What was made of the packed memory, padded as that was: (batch, seqlen, ...)."""
        assert self._memory_padding is not None
        return self._memory_padding.unpack(x[0])

    def enter(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What a layer works on in place of x (batch, seqlen, dim) and its mask: once packed (1, total, dim), None."""
        if not self._has_begun:
            self._has_begun = True
            self.padding = padding_of(x, mask) if self._known is None else self._known
            if self.padding is not None:
                x = self.padding.pack(x)[None]
        return x, mask if self.padding is None else None

    def leave(self, x: Tensor) -> Tensor:
        """What the last layer gave, padded as the first layer's input was."""
        return x if self.padding is None else self.padding.unpack(x[0])


_packing: ContextVar[Packing | None] = ContextVar("fastformer_packing", default=None)
# How many runs there are in all threads. A compiler can read and guard a number, but no ContextVar.
_num_runs = 0
_lock = threading.Lock()


@contextlib.contextmanager
def packing(
    known: Padding | None = None, last: nn.Module | None = None, memory: Padding | None = None
) -> Iterator[Packing]:
    """Layers of the block take part in a `Packing`."""
    begun = Packing(known, last, memory)
    token = _packing.set(begun)
    _count(1)
    try:
        yield begun
    finally:
        _count(-1)
        _packing.reset(token)


def _count(more: int) -> None:
    global _num_runs
    with _lock:
        _num_runs += more


def going_on() -> Packing | None:
    """The run that a layer takes part in, if there is one."""
    return None if _num_runs == 0 else _packing.get()


def entered(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`Packing.enter` of the run that is going on, if there is one."""
    run = going_on()
    return (x, mask) if run is None else run.enter(x, mask)


@contextlib.contextmanager
def entered_memory(memory: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What a layer attends to in the block in place of a memory and its mask, if a run is going on that has packed."""
    run = going_on()
    if run is None or run.padding is None:
        yield memory, mask
        return
    run.crosses = True
    try:
        yield run.enter_memory(memory), None
    finally:
        run.crosses = False


def packed_layouts() -> tuple[SequenceLayout, SequenceLayout] | None:
    """How the queries and the keys lie that attentions are given: None for a padded batch."""
    run = going_on()
    return None if run is None else run.layouts


def key_padding_of(mask: Tensor | None) -> Tensor | None:
    """A mask that is the same for all queries and heads as (batch, seqlen_k), True = ignore; None if it is another.

    Args:
        mask: transformers' (batch, 1, seqlen_q or 1, seqlen_k), bool (True = attend) or added to scores, where what is
            ignored gets the lowest number of its dtype, or -inf.
    """
    if mask is None or mask.dim() != 4 or mask.shape[1] != 1 or mask.requires_grad or mask.shape[2] == 0:
        return None
    rows = mask[:, 0]
    first = rows[:, 0]
    if rows.shape[1] > 1 and rows.stride(1) != 0 and not bool((rows == first[:, None]).all()):
        return None
    if first.dtype == torch.bool:
        return ~first
    ignored = first <= torch.finfo(first.dtype).min
    return ignored if bool((ignored | (first == 0)).all()) else None


def padding_of(x: Tensor, mask: Tensor | None) -> Padding | None:
    """The padding that a mask (see `key_padding_of`) names in x, (batch, seqlen, dim); None where it names none."""
    if mask is None or type(x) is not Tensor or x.dim() != 3 or is_traced():
        return None
    key_padding_mask = key_padding_of(mask)
    if key_padding_mask is None or key_padding_mask.shape != x.shape[:2]:
        return None
    padding = read_padding(x, key_padding_mask, True)
    return None if padding is None or padding.is_none or not padding.tokens.numel() else padding


# What of torch.nn looks at one token (its last dimension) at a time, or at one number, whatever its settings.
_BY_TOKEN = frozenset(
    {
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
        *(*LINEARS, nn.Identity, nn.Embedding, nn.Dropout, nn.AlphaDropout),
        *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU),
        *(nn.LogSigmoid, nn.Mish, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus),
        *(nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
    }
)


def works_by_token(module: nn.Module) -> bool:
    """Whether a module inside of a stack, without what is inside of it, looks at one token at a time.

    So do attentions that are known, which are told where the tokens of a packed batch are.
    """
    kind = original_class(module) if type(module).__module__.startswith("fastformer.") else type(module)
    if kind in (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.GLU):
        return bool(module.dim == -1)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return len(cast(nn.LayerNorm, module).normalized_shape) == 1
    if kind is nn.PReLU:  # of several parameters each is a position's
        return bool(module.num_parameters == 1)
    if kind.__module__.startswith("torch."):
        return kind in _BY_TOKEN
    return kind in FORWARDS or kind.__module__.startswith("peft.tuners.lora.")


def is_recording() -> bool:
    """Whether transformers records what modules give, by hooks that it leaves on them."""
    return output_capturing is not None and bool(output_capturing._active_collector.get())


def is_unhooked_or_recorded(module: nn.Module) -> bool:
    """Whether a call of a module is a call of its class's forward, but for what transformers records on request."""
    if is_unhooked(module):
        return True
    if output_capturing is None:
        return False
    own = vars(module)
    if not has_plain_call(module):
        return False
    others = own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if others or "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    return all(hook.__module__ == output_capturing.__name__ for hook in own["_forward_hooks"].values())


Stack = TypeVar("Stack", bound=type[nn.Module])


def keeps_recording(stack: Stack) -> Stack:
    """For a class derived from one of transformers' that records hidden states and weights: so does this one."""
    registry = generic if output_capturing is None else output_capturing
    dict.__setitem__(registry._CAN_RECORD_REGISTRY, str(stack), getattr(stack, "_can_record_outputs", None) or {})
    return stack


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout_p: float,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of (batch, seqlen, num_heads, head_dim), or of (1, total, ...) while a `Packing` has packed.

    Args:
        q, k, v: see above; k and v may have fewer heads.
        mask: transformers' (batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k), bool (True = attend) or additive.
        dropout_p, scale: as in `ops.attention`.
        is_causal: query i sees no key after its own.
    """
    layouts = packed_layouts()
    if layouts is not None:
        queries, keys = layouts
        assert mask is None and queries.cu_seqlens is not None and keys.cu_seqlens is not None and q.shape[0] == 1
        out = varlen_attention(
            q[0], k[0], v[0], queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen,
            is_causal=is_causal, softmax_scale=scale, dropout_p=dropout_p,
        )  # fmt: skip
        return out[None]
    return attention(q, k, v, attn_mask=mask, is_causal=is_causal, softmax_scale=scale, dropout_p=dropout_p)


def plain_dropout(dropout: nn.Module) -> float | None:
    """The probability that acts now; None for a module that somebody touched, which has to be called."""
    return active_dropout(dropout) if is_plain_dropout(dropout) else None


def add_and_norm(x: Tensor, residual: Tensor, dropout_p: float, norm: nn.Module) -> Tensor:
    """norm(dropout(x) + residual), in one op where nobody touched the norm."""
    return join_residual(x, residual, dropout_p, norm)[0]


def join_residual(x: Tensor, residual: Tensor, dropout_p: float, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(norm(dropout(x) + residual), the sum), in one op where nobody touched the norm."""
    if norm_settings(norm) is None:
        total = F.dropout(x, dropout_p) + residual
        return norm(total), total
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return join(x.to(dtype), residual, dropout_p, norm)


def fused_activation(activation: object) -> str | None:
    """What `ops.feed_forward` calls one of transformers' activations; None for those that it doesn't have."""
    if is_plain(activation, nn.ReLU):
        return "relu"
    if is_plain(activation, nn.SiLU):
        return "silu"
    names = {"GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh"}
    names |= {"PytorchGELUTanh": "gelu_tanh", "SiLUActivation": "silu"}
    for name, fused in names.items():
        kind = getattr(activations, name, None)
        if kind is not None and is_plain(activation, kind):
            formula = getattr(activation, "act", F.gelu)
            return fused if formula is F.gelu or fused == "gelu_tanh" else None
    return None


def fused_feed_forward(
    x: Tensor, linear1: nn.Module, activation: object, linear2: nn.Module, dropout_p: float = 0.0
) -> Tensor | None:
    """linear2(dropout(activation(linear1(x)))) as one op; None where somebody touched a part, or it has no such op."""
    name = fused_activation(activation)
    if name is None or not (is_plain(linear1, *LINEARS) and is_plain(linear2, *LINEARS)):
        return None
    assert isinstance(linear1, nn.Linear) and isinstance(linear2, nn.Linear)
    return feed_forward_op(
        x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, activation=name, dropout_p=dropout_p,
        dropout_seed=dropout_seed(dropout_p, x.device),
    )  # fmt: skip


def heads(linear: nn.Module, x: Tensor, head_dim: int) -> Tensor:
    """linear(x) as (batch, seqlen, num_heads, head_dim)."""
    return project(linear, x).unflatten(-1, (-1, head_dim))


def is_known(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes, and a call of it is a call of that class's forward."""
    return type(module) in kinds and is_written_as_known(type(module)) and is_called_plainly(module)


def gives_tuple(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a stack is to give a tuple, by what it is told or else by its config."""
    told = kwargs.get("return_dict")
    return not (config.return_dict and not getattr(config, "torchscript", False) if told is None else told)


def nothing_else(args: tuple[Any, ...], kwargs: dict[str, Any], harmless: frozenset[str]) -> bool:
    """Whether what a forward was also given asks for nothing: None, False, Nones, or a name that changes nothing."""
    return all(map(_is_nothing, args)) and all(_is_nothing(value) or name in harmless for name, value in kwargs.items())


def _is_nothing(value: object) -> bool:
    return value is None or value is False or (isinstance(value, list) and all(each is None for each in value))
