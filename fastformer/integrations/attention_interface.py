"""The function of transformers' attention "sdpa": fastformer's in models that `accelerate` patched, else its own.

The config of a patched model still says "sdpa", for the code of transformers and of users that looks for that name. An
attribute of the modules says which ones are patched.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastformer.engine.checks import is_traced, is_written_in
from fastformer.engine.frozen import forget_setting, setting_of, settings_to_change
from fastformer.functional import attend_heads
from fastformer.integrations.known import attends_as_known, is_sdpa_known
from fastformer.integrations.packing import attend, packed_layouts
from fastformer.ops import attention
from fastformer.ops._common import resolve_scale
from fastformer.ops.attention import why_no_kernel

# Arguments that ask for something which fastformer's ops don't compute.
_OTHERS = ("cache", "s_aux", "output_attentions", "sparse_indices", "block_indices")
# The function that was registered as "sdpa" before.
_their_attention: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
_their_mask: Any = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
# transformers' function that combines a position bias with a mask, or with a triangle, into one
_biased_mask: Any = sdpa_attention.create_position_bias_mask


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
    """Attends like transformers' `sdpa_attention_forward`, on fastformer's ops if they support the call.

    Args:
        module: the attention, with `is_causal` and `num_key_value_groups`.
        query: (batch, num_heads, seqlen_q, head_dim); key, value: of num_kv_heads and seqlen_k.
        attention_mask: (batch, 1 or num_heads, seqlen_q, seqlen_k), bool (True = attend) or additive.
        dropout, scaling, is_causal: as in transformers.

    Returns:
        (batch, seqlen_q, num_heads, head_dim), and None for the weights.
    """
    if packed_layouts() is not None:
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        return attend(q, k, v, None, dropout_p=dropout, scale=scaling, is_causal=is_causal), None
    # torch.fx calls this with other objects instead of tensors.
    if not (setting_of(module, PATCHED) is not None and isinstance(query, Tensor) and is_sdpa_known()):
        given = kwargs if is_causal is None else kwargs | {"is_causal": is_causal}
        out: tuple[Tensor, Tensor | None] = _their_attention(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )
        return out
    _remember(module)
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
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
    """Computes `attention_forward` of a padded batch, even in a packed run.

    Raises:
        ValueError: the scores have a cap. transformers' function raises it since 5.22, and ignored the cap before.
    """
    if kwargs.get("softcap") is not None:
        raise ValueError('expected the attention "eager" or "flex_attention" for a softcap, which "sdpa" doesn\'t have')
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    bias = kwargs.get("position_bias")
    others = (kwargs.get(name) for name in _OTHERS)
    # A decoding step has one query, for which PyTorch is faster on a CPU.
    is_step = query.shape[2] == 1 and query.device.type == "cpu"
    asked = any(each is not None and each is not False for each in others)
    if is_step or asked or not attends_as_known():
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if bias is not None:
        attention_mask, is_causal = _biased_mask(bias, attention_mask, is_causal, query, key), False
    elif (known := _known(attention_mask)) is not None and known.contents.shape[2:] == (query.shape[2], key.shape[2]):
        # Lengths and a triangle cost less than their mask: the keys that they hide are skipped. A caller may have given
        # a mask of another length than the keys.
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
    """The meaning of a mask that is right padding, with or without the causal triangle."""

    seqlens_k: Tensor
    is_causal: bool
    contents: Tensor  # a copy of the mask


# The known meanings of the masks that `make_mask` made.
_meanings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def make_mask(
    *args: Any, mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Makes transformers' `sdpa_mask`, and remembers its meaning if it is right padding, with or without a triangle.

    Args:
        mask_function: transformers' function of the positions that a query sees, apart from padding.
        attention_mask: (batch, seqlen_k), 0 = padding.
        args, kwargs: passed on to `sdpa_mask`.
    """
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    mask: Tensor | None = _their_mask(*args, attention_mask=attention_mask, **kwargs)
    if is_traced() or not _is_of_patched(kwargs.get("config")):
        return mask
    is_causal = mask_function is masking_utils.causal_mask_function
    is_full = mask_function is masking_utils.bidirectional_mask_function
    whole = kwargs.get("kv_length") in (None, mask.shape[-1]) if mask is not None else False
    if (
        mask is None
        or attention_mask is None
        or attention_mask.dim() != 2
        or attention_mask.device.type != "cpu"  # on a GPU the host would wait for the values
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
    """Returns what a mask of `make_mask` means, if its values are the same (NumPy and `mask.data` write unnoticed)."""
    if mask is None or type(mask) is not Tensor or is_traced():
        return None
    meaning = _meanings.get(mask)
    return meaning if meaning is not None and _is_equal(mask, meaning.contents) else None


def _is_equal(mask: Tensor, other: Tensor) -> bool:
    """Returns torch.equal of two masks, in a twentieth of the time: it compares eight elements at a time."""
    if mask.shape != other.shape or mask.dtype != other.dtype:
        return False
    by_eight = mask.numel() % 8 == 0 and mask.storage_offset() % 8 == 0
    if by_eight and mask.is_contiguous() and other.is_contiguous():
        return torch.equal(mask.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    return torch.equal(mask, other)


_MASKS: tuple[object, ...] = (make_mask, _their_mask) if is_written_in(_their_mask, transformers) else ()
AttentionInterface.register("sdpa", attention_forward)
AttentionMaskInterface.register("sdpa", make_mask)


class _Patched:
    """The mark of a patched module. Unpickling it imports this file, which registers its functions in transformers."""

    def __reduce__(self) -> str:
        return "_patched"


# The name of the mark of patched modules among their settings.
PATCHED = "attention"
_patched = _Patched()
# The configs of patched models, by their ids: transformers makes masks by a config.
_configs_of_patched: dict[int, weakref.ref[PretrainedConfig]] = {}


def patch_attention(model: nn.Module) -> None:
    """Lets transformers' models inside of a model attend on fastformer's ops, as long as their attention is "sdpa"."""
    for around in model.modules():
        if isinstance(around, PreTrainedModel):
            for module in around.modules():
                settings_to_change(module)[PATCHED] = _patched
                _remember(module)


def unpatch_attention(model: nn.Module) -> None:
    """Undoes `patch_attention`."""
    for module in model.modules():
        forget_setting(module, PATCHED)


def masks_as_known() -> bool:
    """Returns whether the masks of "sdpa" are made by transformers' function or this module's, and by no other."""
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] in _MASKS


def is_patched(module: nn.Module) -> bool:
    """Returns whether a module of a model of transformers attends on fastformer's ops."""
    return setting_of(module, PATCHED) is not None and getattr(module.config, "_attn_implementation", None) == "sdpa"


def patched_attention(model: nn.Module) -> list[str]:
    """Returns the names of the patched parts of a model that have a config of their own."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and is_patched(module):
            found.setdefault(id(config), name)
    return list(found.values())


def _remember(module: nn.Module) -> None:
    """Records the config of a patched module, so that the meanings of its masks are remembered."""
    if is_traced():
        return
    config = vars(module).get("config")
    if not isinstance(config, PretrainedConfig) or _is_of_patched(config):
        return
    key = id(config)
    _configs_of_patched[key] = weakref.ref(config, lambda _: _configs_of_patched.pop(key, None))


def _is_of_patched(config: PretrainedConfig | None) -> bool:
    there = _configs_of_patched.get(id(config))
    return there is not None and there() is config
