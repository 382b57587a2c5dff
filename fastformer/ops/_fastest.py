"""Attention by PyTorch's own GPU kernels, if a table of measured times says that they are faster than fastformer's.

cuDNN's attention, and FlashAttention in the version that is active in PyTorch, support plain and causal calls: no
dropout, masks, lengths, windows, caps or grouped heads. Their results have the same form as fastformer's: out in q's
dtype, and lse, the natural log of the sum of exponentials, in fp32 of (batch, num_heads, seqlen_q). So the forward pass
of one kernel fits the backward pass of another, and each pass uses the fastest.

The environment variable `FASTFORMER_ATTENTION_KERNELS` decides: "fastest" (the default) follows the table for calls
whose geometry was seen often, "ours" uses fastformer's kernels, and the name of a kernel uses it for every call that it
supports, so that it can be measured. `python -m benchmarks.fastest_attention` fills the table from a GPU's results.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.attention
from torch import Tensor

from fastformer.kernels import _host, _plans

OURS, FASTEST = "ours", "fastest"
# The calls of a geometry that run on fastformer's kernels before the table decides. For each new one, cuDNN takes 23 to
# 37 ms of the host's time (published traces), and then saves up to 1.4 ms a call: batches of ever new lengths gain
# nothing from it.
SEEN = 32
TABLE = Path(__file__).with_name("fastest_attention.json")
# The devices that have these kernels; tests add the CPU, with one of its kernels.
DEVICES = {"cuda"}
_ATEN = torch.ops.aten

Passes = Callable[..., Any]


class Kernel(NamedTuple):
    """One of PyTorch's kernels.

    Attributes:
        why_missing: () -> the reason why this PyTorch lacks it, or None.
        forward: (q, k, v, is_causal, scale) -> (out, lse); tensors of (batch, num_heads, seqlen, head_dim).
        backward: (dout, q, k, v, out, lse, is_causal, scale) -> (dq, dk, dv).
    """

    why_missing: Callable[[], str | None]
    forward: Passes
    backward: Passes


def _lacks(*names: str) -> str | None:
    missing = [name for name in names if not hasattr(_ATEN, name)]
    return f"this PyTorch has no {missing[0]}" if missing else None


def _no_draws(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a generator state for a call without dropout."""
    return torch.zeros((), dtype=torch.int64, device=q.device), torch.zeros((), dtype=torch.int64, device=q.device)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _ATEN._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), *_no_draws(q), None, None, None, q.shape[2], k.shape[2], 0.0, is_causal,
        scale=scale,
    )  # fmt: skip


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _ATEN._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, *_no_draws(q), scale=scale
    )


def _flash_version() -> str:
    """Returns the version of PyTorch's flash attention: "FA2", or "FA3" if that was activated."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current() if current is not None else None) or "FA2"


def _why_no_flash(version: str) -> str | None:
    lacks = _lacks("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
    if lacks is None and _flash_version() != version:
        return f"PyTorch's flash attention is {_flash_version()}, not {version}"
    return lacks


KERNELS: dict[str, Kernel] = {
    "cudnn": Kernel(
        lambda: _lacks("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
        _cudnn_forward,
        _cudnn_backward,
    ),
    "flash2": Kernel(lambda: _why_no_flash("FA2"), _flash_forward, _flash_backward),
    "flash3": Kernel(lambda: _why_no_flash("FA3"), _flash_forward, _flash_backward),
}


class FastestEntry(NamedTuple):
    """A line of the table: the fastest kernel from a sequence length up to that of the next line of the same kind.

    Attributes:
        capability: the compute capability: 90 for sm_90.
        direction: "fwd" or "bwd".
        head_dim: the exact head_dim of the measured calls.
        is_causal: whether these were causal.
        seqlen: the shortest sequence length that the line applies to.
        kernel: "ours" or a name in KERNELS.
    """

    capability: int
    direction: str
    head_dim: int
    is_causal: bool
    seqlen: int
    kernel: str


@functools.cache
def table() -> tuple[FastestEntry, ...]:
    """Reads the committed table of the fastest kernels."""
    return tuple(FastestEntry(**line) for line in json.loads(TABLE.read_text(encoding="utf-8")))


def configured() -> str:
    """Returns the value of FASTFORMER_ATTENTION_KERNELS.

    Raises:
        ValueError: the value is neither "ours", "fastest" nor the name of a kernel.
    """
    setting = os.environ.get("FASTFORMER_ATTENTION_KERNELS", FASTEST)
    if setting not in (OURS, FASTEST, *KERNELS):
        expected = ", ".join([OURS, FASTEST, *KERNELS])
        raise ValueError(f"expected FASTFORMER_ATTENTION_KERNELS to be one of {expected}, got {setting!r}")
    return setting


def fastest(capability: int, direction: str, head_dim: int, is_causal: bool, seqlen: int) -> str:
    """Returns the table's kernel for a call; "ours" if the table has none."""
    kind = (capability, direction, head_dim, is_causal)
    fitting = [entry for entry in table() if entry[:4] == kind and entry.seqlen <= seqlen]
    return max(fitting, key=lambda entry: entry.seqlen).kernel if fitting else OURS


def why_not(
    op_name: str,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    attn_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    softcap: float = 0.0,
    dropout_seed: Tensor | None = None,
    needs_mask_grad: bool = False,
    dout: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> str | None:
    """Returns why no PyTorch kernel can compute a call of attention_fwd or attention_bwd; None if one can.

    All arguments are named: one that the ops get later must not be left out silently.
    """
    options = {
        "a mask": attn_mask is not None, "lengths of keys": seqlens_k is not None, "dropout": dropout_p > 0.0,
        "a cap on scores": bool(softcap), "grouped heads": q.shape[2] != k.shape[2],
        "a window": window_left is not None or window_right not in (None, 0),
        # PyTorch's causal mask begins at the first key, fastformer's ends at the last.
        "a causal mask of fewer queries than keys": window_right == 0 and q.shape[1] != k.shape[1],
    }  # fmt: skip
    for option, is_there in options.items():
        if is_there:
            return f"the call has {option}"
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 128 or not softmax_scale > 0 or q.numel() == 0 or k.numel() == 0:
        return "of its head_dim, scale or size"
    if op_name == "attention_bwd" and torch.are_deterministic_algorithms_enabled():
        return "their sums have no fixed order"
    return None if all(x.stride(-1) == 1 for x in (q, k, v)) else "a row's numbers are not side by side"


class Choice(NamedTuple):
    """A replacement for fastformer's kernels for one geometry: its name, and a function with the op's arguments."""

    name: str
    run: Callable[..., Any]


def choose(op_name: str, arguments: dict[str, Any]) -> Choice | None:
    """Chooses the kernel for a call of attention_fwd or attention_bwd by `configured`; None: fastformer's own.

    Args:
        op_name: the name of the op.
        arguments: the arguments, by the schema's names.
    """
    name = configured()
    if name == OURS or why_not(op_name, **arguments) is not None:
        return None
    q, is_causal, direction = arguments["q"], arguments["window_right"] == 0, op_name.rpartition("_")[2]
    if name == FASTEST:
        capability = _host.capability_of(q.device.index) if q.is_cuda else 0
        name = fastest(capability, direction, q.shape[-1], is_causal, q.shape[1])
    if name == OURS or KERNELS[name].why_missing() is not None:
        return None
    run = _forward if direction == "fwd" else _backward
    return Choice(name, functools.partial(run, KERNELS[name], is_causal, arguments["softmax_scale"]))


# Both get the op's arguments after those that a choice fixes. The others are those for which `why_not` finds no kernel.


def _forward(
    kernel: Kernel, is_causal: bool, softmax_scale: float, q: Tensor, k: Tensor, v: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    out, lse = kernel.forward(*(x.transpose(1, 2) for x in (q, k, v)), is_causal, softmax_scale)
    batch, seqlen, heads = q.shape[:3]
    return out.transpose(1, 2).contiguous(), lse.reshape(batch, heads, seqlen).contiguous()


def _backward(
    kernel: Kernel, is_causal: bool, softmax_scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, *others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (x.transpose(1, 2) for x in (dout if dout.stride(-1) == 1 else dout.contiguous(), q, k, v, out))
    gradients = kernel.backward(*tensors, lse, is_causal, softmax_scale)
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in gradients)
    return dq, dk, dv, q.new_empty(0)


class ChoiceCache:
    """The choices of an op, by the geometry of its calls."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Choice | None] = {}
        self._seen: dict[Hashable, int] = {}  # the calls of a geometry, as long as they are few
        self._of: tuple[object, ...] = ()

    def find(self, op_name: str, key: Hashable | None, bind: Callable[[], dict[str, Any]]) -> Choice | None:
        """Returns the replacement for fastformer's kernels for a call, or None.

        Args:
            op_name: the name of the op.
            key: the geometry; None: the choice is not remembered.
            bind: returns the arguments, by the schema's names.
        """
        setting = os.environ.get("FASTFORMER_ATTENTION_KERNELS", FASTEST)
        if setting == OURS:
            return None
        now = setting, _flash_version(), table()
        if now != self._of or len(self._known) >= _plans.LARGEST:
            self._known, self._of = {}, now
        if setting == FASTEST and key not in self._known and not self._is_usual(key):
            return None
        if key is None:
            return choose(op_name, bind())
        if key not in self._known:
            self._known[key] = choose(op_name, bind())
        return self._known[key]

    def _is_usual(self, key: Hashable | None) -> bool:
        """Counts a call; returns whether its geometry was seen SEEN times before. A capture adds no kernel."""
        if key is None or torch.are_deterministic_algorithms_enabled():  # a resumed run would count anew
            return False
        if len(self._seen) >= _plans.LARGEST:
            self._seen.clear()
        count = self._seen[key] = self._seen.get(key, 0) + 1
        return count > SEEN and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def report(capability: int) -> list[str]:
    """Returns lines for doctor: the kernels of plain and causal attention on a GPU of this capability."""
    setting = configured()
    if setting == OURS:
        return [
            "attention: fastformer's kernels; without FASTFORMER_ATTENTION_KERNELS, PyTorch's where those were "
            "measured to be faster"
        ]
    if setting != FASTEST:
        missing = KERNELS[setting].why_missing()
        return [
            f"attention: {setting} if it supports the call"
            if missing is None
            else f"attention: fastformer's kernels; {missing}"
        ]
    here = [entry for entry in table() if entry.capability == capability and entry.kernel != OURS]
    if not here:
        return [f"attention: fastformer's kernels; no others were measured to be faster on sm_{capability}"]
    return [
        f"attention {entry.direction}, head_dim {entry.head_dim}, {'causal' if entry.is_causal else 'full'}, from "
        f"{entry.seqlen} tokens: {entry.kernel}, after {SEEN} calls of one size"
        + (f" (not here: {missing})" if (missing := KERNELS[entry.kernel].why_missing()) is not None else "")
        for entry in here
    ]
