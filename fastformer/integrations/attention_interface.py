"""Our attention under a name that transformers looks up: `config._attn_implementation = "fastformer"`."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections import deque
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PretrainedConfig, masking_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastformer.integrations.hugging_face import attend, attends_as_known, attends_by_theirs, packed_layouts
from fastformer.integrations.sdpa import attend_heads
from fastformer.nn.fusing import is_traced
from fastformer.ops import attention
from fastformer.ops.attention import resolve_scale, why_no_kernel

NAME = "fastformer"
# What a call may bring along that a function without it does not compute.
_OTHERS = ("softcap", "cache", "s_aux", "output_attentions")
# What a call brings where it leaves a part of its mask to the attention.
_SPARSE = ("sparse_indices", "block_indices")
# Those that ask for "sdpa" in vain: their masks are the same by any name that isn't "eager".
_KNOWN_TO_ASK = {
    f"transformers.models.{each}.modeling_{each}" for each in ("bart", "bert", "gpt2", "llama", "marian", "t5")
}
# A position bias and a mask, or a triangle, as one mask that is added; from 5 on.
_biased_mask: Any = getattr(sdpa_attention, "create_position_bias_mask", None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' `sdpa_attention_forward`, on our ops where they have what is asked for.

    Args:
        module: the attention; `is_causal` and `num_key_value_groups` are read of it.
        query: (batch, num_heads, seqlen_q, head_dim); key, value: of num_kv_heads and seqlen_k.
        attention_mask: (batch, 1 or num_heads, seqlen_q, seqlen_k), bool (True = attend) or additive.
        dropout, scaling, is_causal: as in transformers.

    Returns:
        (batch, seqlen_q, num_heads, head_dim), and None for the weights.

    Raises:
        ValueError: the keys that a query sees are given as indices, and not by the mask.
    """
    if sparse := [name for name in _SPARSE if kwargs.get(name) is not None]:
        raise ValueError(f'expected what each query sees as a mask, got {sparse[0]}: use the attention "sdpa"')
    is_tensor = isinstance(query, Tensor)  # torch.fx has others in its place
    if not (is_tensor and attends_by_theirs()) and packed_layouts() is None:
        given = kwargs if is_causal is None else kwargs | {"is_causal": is_causal}
        theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
        out: tuple[Tensor, Tensor | None] = theirs(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )
        return out
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if packed_layouts() is not None:
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        return attend(q, k, v, None, dropout_p=dropout, scale=scaling, is_causal=is_causal), None
    return attend_padded(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)


def attend_padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`attention_forward` of a padded batch, whatever is packed around it."""
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    bias = kwargs.get("position_bias")
    others = (kwargs.get(name) for name in _OTHERS)
    # A step of decoding has one query: PyTorch is done with it on a CPU before ours has begun.
    is_step = query.shape[2] == 1 and query.device.type == "cpu"
    asked = any(each is not None and each is not False for each in others)
    if is_step or asked or not attends_as_known() or (bias is not None and _biased_mask is None):
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if bias is not None:
        attention_mask, is_causal = _biased_mask(bias, attention_mask, is_causal, query, key), False
    elif (known := _known(attention_mask)) is not None:
        # What a mask says costs less than the mask: the triangle and the keys behind a length are skipped.
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        if why_no_kernel(q, k, v, None, resolve_scale(scaling, q.shape[-1])) is None:
            out = attention(
                q, k, v, seqlens_k=known.seqlens_k, is_causal=known.is_causal, softmax_scale=scaling, dropout_p=dropout
            )
            return out, None
    grouped = key.shape[1] != query.shape[1]
    out = attend_heads(query, key, value, attention_mask, dropout, is_causal, scaling, grouped, lies_as_query=False)
    return out.transpose(1, 2).contiguous(), None


class _Meaning(NamedTuple):
    """A mask of right padding, with or without the triangle."""

    seqlens_k: Tensor
    is_causal: bool
    contents: Tensor  # a copy of the mask that means this, and nobody else's


# What the masks mean that `make_mask` made.
_meanings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def make_mask(
    *args: Any, mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """transformers' `sdpa_mask`, of which we remember what it means where that is right padding, or the triangle too.

    Args:
        mask_function: by which transformers says what a query sees beside padding.
        attention_mask: (batch, seqlen_k), 0 = padding.
        args, kwargs: as transformers gives them, on to `sdpa_mask`.
    """
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, attention_mask=attention_mask, **kwargs)
    is_causal = mask_function is masking_utils.causal_mask_function
    is_full = mask_function is getattr(masking_utils, "bidirectional_mask_function", masking_utils)
    whole = kwargs.get("kv_length") in (None, mask.shape[-1]) if mask is not None else False
    if (
        mask is None
        or attention_mask is None
        or attention_mask.dim() != 2
        or attention_mask.device.type != "cpu"  # where reading it costs nothing
        or is_traced()
        or type(mask) is not Tensor
        or not (is_full or (is_causal and mask.shape[-1] == mask.shape[-2]))
        or not whole
        or attention_mask.shape[-1] != mask.shape[-1]
        or kwargs.get("kv_offset", 0) != 0
        or kwargs.get("use_vmap", False)
    ):
        return mask
    real = attention_mask.bool()
    seqlens_k = real.sum(1, dtype=torch.int32)
    if torch.equal(real, torch.arange(real.shape[1], device=real.device) < seqlens_k[:, None]):
        _meanings[mask] = _Meaning(seqlens_k, is_causal, mask.clone())
    return mask


def _known(mask: Tensor | None) -> _Meaning | None:
    """What a mask means that `make_mask` made, if it still does: `mask.data` and NumPy write to it without a trace."""
    if mask is None or type(mask) is not Tensor or is_traced():
        return None
    meaning = _meanings.get(mask)
    return meaning if meaning is not None and _is_equal(mask, meaning.contents) else None


def _is_equal(mask: Tensor, other: Tensor) -> bool:
    """torch.equal of masks; eight at a time it takes a twentieth of its time."""
    if mask.shape != other.shape or mask.dtype != other.dtype:
        return False
    by_eight = mask.numel() % 8 == 0 and mask.storage_offset() % 8 == 0
    if by_eight and mask.is_contiguous() and other.is_contiguous():
        return torch.equal(mask.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    return torch.equal(mask, other)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)


class _RegisteredName(str):
    """Our name as a config holds it. Unpickling one imports this module, and so registers the name in that process."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _name_in_config, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _RegisteredName:
        return self  # as any text; a compiler that traces a copy of a config can't follow `__reduce__`


def _name_in_config() -> str:
    return _NAME_IN_CONFIG


_NAME_IN_CONFIG = _RegisteredName(NAME)


def lead(model: nn.Module) -> None:
    """Gives each part of a model that attends by "sdpa" our name for it, unless its code asks for that name."""
    for _, config, classes in _configs(model):
        if config._attn_implementation == "sdpa" and not _asking(classes):
            _name(config, _NAME_IN_CONFIG)


def led(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The names of the parts of a model that `lead` gave our name, and why others were left.

    Those whose code asks for the name "sdpa" would take another way by ours (Falcon's would add the mask's trues to its
    scores).
    """
    found, left = [], {}
    for name, config, classes in _configs(model):
        if config._attn_implementation == NAME:
            found.append(name)
        elif config._attn_implementation == "sdpa" and (asking := _asking(classes)):
            left[name] = f'its attention: {asking[0]} asks whether it is called "sdpa"'
    return found, left


def _asking(classes: set[type[nn.Module]]) -> list[str]:
    return sorted(each.__module__ for each in classes if _asks_for_sdpa(each))


def lead_back(model: nn.Module) -> list[str]:
    """Undoes `lead`."""
    led = []
    for name, config, _ in _configs(model):
        if config._attn_implementation == NAME:
            _name(config, "sdpa")
            led.append(name)
    return led


def _name(config: Any, attention_name: str) -> None:
    config._attn_implementation_internal = attention_name  # the property names the attention of all parts as well


def _configs(model: nn.Module) -> list[tuple[str, Any, set[type[nn.Module]]]]:
    """The configs of a model's parts; with each the first part's name, and the classes of those that have it."""
    found: dict[int, tuple[str, Any, set[type[nn.Module]]]] = {}
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            _, _, classes = found.setdefault(id(config), (name, config, set()))
            classes.update(type(module).__mro__)
    return list(found.values())


def _asks_for_sdpa(kind: type) -> bool:
    """Whether the code of a class, or of a file of transformers' models with one, compares something with "sdpa"."""
    if kind.__module__.startswith("transformers.models."):
        return kind.__module__ not in _KNOWN_TO_ASK and _file_asks(kind.__module__)
    if kind.__module__.partition(".")[0] in ("torch", "transformers", "fastformer", "builtins"):
        return False
    return _class_compares(kind)


@functools.cache
def _file_asks(name: str) -> bool:
    own = (each for each in vars(sys.modules[name]).values() if getattr(each, "__module__", None) == name)
    return any(_class_compares(each) if isinstance(each, type) else _compares(each) for each in own)


def _class_compares(kind: type) -> bool:
    return any(map(_compares, vars(kind).values()))


def _compares(thing: object) -> bool:
    function = inspect.unwrap(getattr(thing, "fget", None) or getattr(thing, "__func__", thing))  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and _code_compares(code)


def _code_compares(code: CodeType) -> bool:
    last: deque[object] = deque(maxlen=4)  # of two operands the first may be followed by what loads the second
    for step in dis.get_instructions(code):
        if step.opname in ("COMPARE_OP", "CONTAINS_OP") and any(map(_is_or_has_sdpa, last)):
            return True
        last.append(step.argval if step.opname == "LOAD_CONST" else None)
    return any(_code_compares(each) for each in code.co_consts if isinstance(each, CodeType))


def _is_or_has_sdpa(constant: object) -> bool:
    return constant == "sdpa" or (isinstance(constant, (tuple, frozenset)) and "sdpa" in constant)
