"""Attention on sm_90 with Gluon kernels (`_attention_hopper_forward.py`): the calls that they support, and the launch.

They compute the calls for which they were, on average, at least 1.15 times as fast as the generic kernels of
`attention.py` on an H200, and never slower: forward at head_dim 128 (1.27 to 1.38 times as fast), backward at 64 (1.13
to 1.40) and at 128 (1.16 to 1.18). Forward at head_dim 64 it was 0.91 to 1.12 times as fast, so the generic kernel
computes it.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.kernels._attention_common import Problem, plane_strides, planes_of
from fastformer.kernels._launch import Dropout, Launch, architecture, cdiv, num_sms, stride_unit

# The head_dims, rounded up to a power of two, that each direction computes.
FORWARD = (128,)
BACKWARD = (64, 128)
CONSUMERS, CONSUMER_ROWS = 2, 64  # the consumer warpgroups of the forward kernel, and the rows of each
TILE_KEYS = 128  # the keys of a tile in the backward kernel
# The middle row of a ragged descriptor, which is also the extent of its two leading dimensions.
RAGGED_ROWS = 2**30
RAGGED_EXTENT = 0x7FFF0000
_KEPT = 256  # descriptors cached per tensor of a plan: the caching allocator reuses addresses


def takes(problem: Problem, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> bool:
    """Returns whether the forward kernel computes a call. All others go to the generic kernel, without a warning."""
    return problem.block_d in FORWARD and architecture(q) == 90 and fits(problem, q, k, v, attn_mask)


def fits(problem: Problem, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> bool:
    """Returns whether the kernels support a call, on any device: dtype, head_dim, no mask or cap, TMA's addressing."""
    packed = problem.lengths == "packed"
    return (
        attn_mask is None
        and problem.softcap is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and problem.block_d in (64, 128)
        and problem.head_dim % 8 == 0
        and problem.softmax_scale > 0
        and problem.dropout[2] > 0  # p = 1 keeps nothing: no byte reaches the threshold
        and all(_addressable(x, packed) for x in (q, k, v))
    )


def _addressable(x: Tensor, packed: bool) -> bool:
    """Returns whether a ragged descriptor can describe a tensor; see `ragged_descriptor`."""
    if x.numel() == 0 or x.stride(-1) != 1 or x.data_ptr() % 16:
        return False
    row, head = x.stride()[-3:-1]
    if row <= 0 or row % 8 or (x.shape[-2] > 1 and (head <= 0 or head % 8)):
        return False
    if packed or x.shape[0] == 1:
        return x.shape[-3] < RAGGED_EXTENT
    batch = x.stride(0)
    return batch >= 0 and batch % row == 0 and (x.shape[0] - 1) * (batch // row) + x.shape[1] < RAGGED_EXTENT


class _Base(NamedTuple):
    """The properties of a tensor that a Triton descriptor reads. A cached descriptor must not keep the tensor alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@functools.lru_cache(maxsize=1024)
def _descriptor(base: _Base, heads: int, head_dim: int, row: int, head: int, rows: int, block_d: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, 1, rows, block_d]
    element = gl.bfloat16 if base.dtype == torch.bfloat16 else gl.float16
    descriptor = TensorDescriptor(
        base,
        [RAGGED_EXTENT, RAGGED_EXTENT, heads, RAGGED_ROWS, head_dim],
        [2**34 - row, row, head, row, 1],
        block,
        gl.NVMMASharedLayout.get_default_for(block, element),
    )
    descriptor.encoded = {}  # the cache of tensor maps that the C++ launcher makes
    return descriptor


def ragged_descriptor(x: Tensor, rows: int, block_d: int) -> Any:
    """Returns a TMA descriptor of (..., rows, heads, head_dim) that bounds loads at the end of any sequence of rows.

    The row at coordinates (2**30, end, head, 2**30 - length + row) is row `row` of the sequence that has `length` rows
    and ends before row `end` of the tensor: with the two leading strides, 2**34 - stride and stride, 2**30 rows cancel
    modulo 2**64. The fourth coordinate reaches its extent, 2**30, at the end of the sequence; loads beyond it (and
    beyond head_dim) give zeros. The method is that of `triton.tools.ragged_tma`.
    """
    row, head = x.stride()[-3:-1]
    heads, head_dim = x.shape[-2:]
    return _descriptor(_Base(x.data_ptr(), x.dtype), heads, head_dim, row, head if heads > 1 else row, rows, block_d)


def takes_backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, attn_mask: Tensor | None) -> bool:
    """Returns whether the backward kernel computes a call whose dq may be summed with atomics.

    It rounds dS / keep_scale, with dropout's keep_scale. In fp16, that brings small numbers only slightly closer to the
    smallest representable one.
    """
    return (
        problem.block_d in BACKWARD
        and architecture(q) == 90
        and fits(problem, q, k, v, attn_mask)
        # With 128 columns of dk and dv, no registers are left for dropout.
        and (problem.block_d == 64 or problem.dropout[0] is None)
        and (q.dtype != torch.float16 or problem.dropout[2] <= 2)
        and _addressable(dout, problem.lengths == "packed")
    )


def _batch_rows(x: Tensor, packed: bool) -> int:
    """Returns the number of rows from one batch to the next."""
    return 0 if packed else x.stride(0) // x.stride(1)


class Plan:
    """The launch of a kernel for calls of one geometry: its descriptors, and the arguments that don't change.

    Args:
        kernel: its module and name.
        arguments_of: `forward_arguments` or `backward_arguments`.
        problem: the description of the calls, without tensors.
        order: the indices, among the first arguments of `arguments_of`, of the tensors that have descriptors, in the
            order of the kernel.
    """

    def __init__(
        self, kernel: tuple[str, str], arguments_of: Callable[..., Any], problem: Problem, order: tuple[int, ...]
    ) -> None:
        self._kernel, self._arguments_of, self._problem, self._order = kernel, arguments_of, problem, order
        self._descriptors: tuple[dict[int, Any], ...] = tuple({} for _ in order)
        # From the first call: the launch, the box of each descriptor, and the arguments after the tensors. They are set
        # together, because another thread may call at the same time.
        self._ready: tuple[Launch, list[tuple[int, int]], tuple[Any, ...]] | None = None

    def __call__(self, tensors: tuple[Tensor, ...], lengths: tuple[Any, ...], dropout: Dropout) -> None:
        """Launches the kernel.

        Args:
            tensors: the first arguments of `arguments_of`, allocated by the launchers of attention. Forward fills out
                and lse; backward fills dk and dv, and adds to dq (fp32).
            lengths: (seqlens_q, seqlens_k, seqlen_q, seqlen_k).
            dropout: the kernel's argument.
        """
        count = len(self._order)
        if self._ready is None:
            problem = self._problem._replace(seqlens_q=lengths[0], seqlens_k=lengths[1], dropout=dropout)
            arguments, constants, num_tiles = self._arguments_of(*tensors, problem)
            programs = min(num_tiles, num_sms(tensors[0].device))
            module, name = self._kernel
            kernel = getattr(importlib.import_module(f"fastformer.kernels.{module}"), name)
            run = Launch(kernel, (programs,), **constants, num_warps=4)
            boxes = [tuple(argument.block_shape[-2:]) for argument in arguments[:count]]
            self._ready = run, boxes, arguments[len(tensors) :]
            run(*arguments)
            return
        run, boxes, rest = self._ready
        descriptors = []
        for index, cached, box in zip(self._order, self._descriptors, boxes, strict=True):
            x = tensors[index]
            address = x.data_ptr()
            descriptor = cached.get(address)
            if descriptor is None:
                if len(cached) >= _KEPT:
                    cached.clear()
                descriptor = cached[address] = ragged_descriptor(x, *box)
            descriptors.append(descriptor)
        planes, _, window, _, *others = rest
        run(*descriptors, *tensors[count:], planes, lengths, window, dropout, *others)


def plan_forward(problem: Problem) -> Plan:
    """Plans the forward pass of calls for which `takes` is true."""
    kernel = "_attention_hopper_forward", "_attention_hopper_fwd_kernel"
    return Plan(kernel, forward_arguments, problem, (0, 1, 2))


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Returns the forward kernel's (arguments, constexprs, number of tiles)."""
    packed = problem.lengths == "packed"
    kv_bytes = 2 * problem.seqlen_k * problem.head_dim * q.element_size() // problem.group
    # The keys of a block, and the buffers of a ring. Dropout and windows leave a consumer too few registers for more.
    is_full = problem.dropout[0] is not None or problem.window[0] is not None
    block_n, stages = (64, 4) if is_full else (128, 2)
    planes = planes_of(problem, cdiv(problem.seqlen_q, CONSUMERS * CONSUMER_ROWS), kv_bytes)
    num_tiles = planes[2] * planes[3]
    unit = stride_unit(out)
    arguments = (
        ragged_descriptor(q, CONSUMER_ROWS, problem.block_d),
        ragged_descriptor(k, block_n, problem.block_d),
        ragged_descriptor(v, block_n, problem.block_d),
        out, lse, planes,
        (problem.seqlens_q, problem.seqlens_k, problem.seqlen_q, problem.seqlen_k),
        problem.window, problem.dropout, tuple(_batch_rows(x, packed) for x in (q, k, v)), num_tiles,
        problem.softmax_scale, plane_strides(out.stride(), packed, unit),
        (0 if packed else lse.stride(0), lse.stride(-2)),
    )  # fmt: skip
    constants = {"LENGTHS": problem.lengths, "HEAD_DIM": problem.head_dim, "UNIT": unit, "STAGES": stages}
    return arguments, constants, num_tiles


def plan_backward(problem: Problem) -> Plan:
    """Plans the backward pass of calls for which `takes_backward` is true."""
    kernel = "_attention_hopper_backward", "_attention_hopper_bwd_kernel"
    return Plan(kernel, backward_arguments, problem, (1, 0, 2, 3))


def backward_arguments(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, row_lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    problem: Problem,
) -> tuple[tuple[Any, ...], dict[str, Any], int]:  # fmt: skip
    """Returns the backward kernel's (arguments, constexprs, number of tiles)."""
    packed = problem.lengths == "packed"
    q_bytes = 2 * problem.seqlen_q * problem.head_dim * q.element_size()
    planes = planes_of(problem, cdiv(problem.seqlen_k, TILE_KEYS), q_bytes)
    num_tiles = planes[2] * planes[3]
    unit = stride_unit(dq, dk)
    rows = (q, dout, k, v)
    # Otherwise the kernel would compute these values and hold them in registers.
    keep_scale = problem.dropout[2]
    scales = (problem.softmax_scale * math.log2(math.e), problem.softmax_scale * keep_scale, 1 / keep_scale)
    arguments = (
        *(ragged_descriptor(x, CONSUMER_ROWS, problem.block_d) for x in rows), row_lse, delta, dq, dk, dv, planes,
        (problem.seqlens_q, problem.seqlens_k, problem.seqlen_q, problem.seqlen_k), problem.window, problem.dropout,
        tuple(_batch_rows(x, packed) for x in rows), num_tiles, scales,
        plane_strides(dq.stride(), packed, unit), plane_strides(dk.stride(), packed, unit),
        (0 if packed else row_lse.stride(0), row_lse.stride(-2)),
    )  # fmt: skip
    constants = {"LENGTHS": problem.lengths, "HEAD_DIM": problem.head_dim, "UNIT": unit, "STAGES": 2}
    return arguments, constants, num_tiles
