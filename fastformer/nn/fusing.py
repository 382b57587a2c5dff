"""May this be fused? Whether calling a module is what its class was written to do, and nothing else.

Who fuses modules reads their parameters and calls none of them, so that whatever somebody did to one of them (a hook, a
forward of its own, a subclass, a parametrised weight) would be left out without a word. One that isn't plain is called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from fastformer.nn.norm import AddLayerNorm

_KINDS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, AddLayerNorm, nn.ReLU, nn.GELU),
)
# What they were written to do: people replace the forward of a class, too.
_FORWARDS = {kind: kind.forward for kind in _KINDS}
_CALL = nn.Module.__call__


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of a module is a call of its class's forward: not hooked, patched or compiled by itself."""
    own = module.__dict__
    return (
        "forward" not in own
        and own.get("_compiled_call_impl") is None
        and not own["_forward_hooks"]
        and not own["_forward_pre_hooks"]
        and not own["_backward_hooks"]
        and not own["_backward_pre_hooks"]
        and not torch_module._has_any_global_hook()
        and nn.Module.__call__ is _CALL
    )


def is_plain(module: object, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these kinds, is called plainly, and has plain tensors.

    Args:
        module: anything that stands where a module is expected.
        kinds: out of those that layers are made of, or classes of ours.
    """
    kind = type(module)
    if kind not in kinds:
        return False
    assert isinstance(module, nn.Module)
    return (
        _FORWARDS.get(kind, kind.forward) is kind.forward
        and is_called_plainly(module)
        and all(tensor is None or type(tensor) in (nn.Parameter, Tensor) for tensor in module._parameters.values())
    )


def is_plain_dropout(dropout: object) -> bool:
    """Whether `active_dropout` says all that there is to say about a module that stands where a dropout does."""
    return is_plain(dropout, nn.Dropout, nn.Identity)


class NormSettings(NamedTuple):
    """A plain norm, in the terms of `ops.add_layer_norm`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms_norm: bool


def norm_settings(norm: object) -> NormSettings | None:
    """What a plain norm of the last dimension computes; None for anything else."""
    if not is_plain(norm, AddLayerNorm, nn.LayerNorm, nn.RMSNorm):
        return None
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    if len(norm.normalized_shape) != 1 or norm.eps is None:
        return None
    if isinstance(norm, nn.RMSNorm):
        return NormSettings(norm.weight, None, norm.eps, True)
    if isinstance(norm, AddLayerNorm):
        if norm.dropout and norm.training:
            return None
        return NormSettings(norm.weight, norm.bias, norm.eps, norm.rms_norm)
    return NormSettings(norm.weight, norm.bias, norm.eps, False)


def is_traced() -> bool:
    """Whether values can't be looked at: under a compiler or tracer, in a graph that is being captured, functorch."""
    modes = torch._C._TorchDispatchModeKey
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
    )
