"""The output projection and the cross-entropy in chunks of rows: cuBLAS for the products, one kernel for the loss.

A chunk of 2k to 4k rows of logits is in one buffer, which all chunks reuse. The kernel reads each row, computes a
running maximum, the sum of exponentials and (for smoothed labels) the sum of logits and, if gradients are needed, reads
it once more, from L2, to overwrite the logits with their gradient. Two products turn that into the chunk's part of dx
and of dweight; dweight is summed over the chunks in fp32.

FLOPs: 2 * rows * vocab * dim forward, 6 * rows * vocab * dim with gradients (8 for a loss per row, whose backward
recomputes the logits). Bytes of device memory, beyond x, weight and their gradients: rows * vocab logits written and
read, and their gradient written and read twice, 2 bytes each in half dtypes; for each chunk after the first,
vocab * dim * 8 bytes of fp32 dweight. Allocated memory: one chunk of logits, at most the larger of CHUNK_BYTES and
SMALLEST_CHUNK rows, and dweight in fp32. If few rows of a half dtype fit into this memory as one chunk, dweight is in
x's dtype, because it needs no sum, and its vocab * dim * 4 bytes are available for logits. fp32: statistics, losses,
exponentials; dlogits are rounded to x's dtype. The number of rows that are not ignored never leaves the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._launch import cdiv, launch, next_power_of_2, unsupported_device, unsupported_dtype
from fastformer.kernels._softcap import soft_capped

SMALLEST_CHUNK, LARGEST_CHUNK = 2048, 4096
CHUNK_BYTES = 512 * 2**20
# The elements of a tile: 16 per thread with 8 warps, enough loads in flight to hide the latency of memory.
TILE = 4096
# The rows of the buffer are padded to a multiple of this, so that each row can be read 16 bytes at a time in any dtype,
# and cuBLAS gets an aligned leading dimension for any vocabulary.
PADDING = 64
WARPS = 8
# The initial peak. Its product with log2(e) is exact, so that `_power` of it and itself is 0. For a value with a
# rounded product, the FMA would give the rounding error, about 1e30, and 2 to that power is inf. It can't be -inf,
# because -inf - -inf is NaN.
_NO_PEAK = tl.constexpr(-(2.0**126))

# Arguments whose values must not lead to another binary: Triton specialises on 1 and on multiples of 16.
_COUNTS = ["num_rows", "vocab_size", "ignore_index", "stride_scale"]


@triton.jit
def _load_logits(row_ptrs, bias_ptr, columns, softcap, HAS_BIAS: tl.constexpr):
    """Loads (logits as fp32, for columns in range; the derivative of the cap, which is 1 if softcap is None)."""
    logits = tl.load(row_ptrs[:, None] + columns[None, :]).to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    slope = 1.0
    if softcap is not None:
        logits, slope = soft_capped(logits, softcap, row_ptrs.dtype.element_ty == tl.float32)
    return logits, slope


@triton.jit
def _load_tail(row_ptrs, here, bias_ptr, columns, vocab_size, padded_size, softcap, HAS_BIAS: tl.constexpr):
    """Runs `_load_logits` for the rows in `here`, with -inf beyond the vocabulary."""
    # Masked at the padding and not at the vocabulary: a mask that can change at any column would prevent wide loads.
    inside = here[:, None] & (columns < padded_size)[None, :]
    logits = tl.load(row_ptrs[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + columns, mask=columns < vocab_size, other=0.0).to(tl.float32)[None, :]
    slope = 1.0
    if softcap is not None:
        # The padding was never written. Its gradients must be finite: the products of some libraries read beyond the
        # vocabulary (oneDNN's of bf16 with AMX), and multiply by 0.
        logits = tl.where((columns < vocab_size)[None, :], logits, 0.0)
        logits, slope = soft_capped(logits, softcap, row_ptrs.dtype.element_ty == tl.float32)
    return tl.where((columns < vocab_size)[None, :], logits, float("-inf")), slope


@triton.jit
def _power(logits, peak, EXACT: tl.constexpr):
    """Returns log2(e) (logits - peak), so that 2 to that power is exp(logits - peak).

    This is one FMA, which rounds log2(e) peak. For 16-bit logits, that doesn't matter. EXACT: uses one more
    instruction, for fp32 logits.
    """
    if EXACT:
        return (logits - peak) * 1.4426950408889634
    else:
        return tl.fma(logits, 1.4426950408889634, -1.4426950408889634 * peak)


@triton.jit
def _by_thread(tile, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """Reshapes (BLOCK_M, BLOCK_N) to (BLOCK_M, wide loads, THREADS, VECTOR). A thread holds all of axes 1 and 3."""
    return tl.reshape(tile, (tile.shape[0], tile.shape[1] // (THREADS * VECTOR), THREADS, VECTOR))


@triton.jit
def _add_tile(
    logits, relative, peak, total, sums, SMOOTH: tl.constexpr, EXACT: tl.constexpr, THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the statistics of each thread, (BLOCK_M, THREADS), without communication or barriers.

    peak: the largest logit so far; total: the sum of exp(logit - peak); sums: the sum of `relative`.
    """
    logits = _by_thread(logits, THREADS, VECTOR)
    new_peak = tl.maximum(peak, tl.max(tl.max(logits, 3), 1))
    total *= tl.exp2(_power(peak, new_peak, EXACT))
    total += tl.sum(tl.sum(tl.exp2(_power(logits, new_peak[:, None, :, None], EXACT)), 3), 1)
    if SMOOTH:
        sums += tl.sum(tl.sum(_by_thread(relative, THREADS, VECTOR), 3), 1)
    return new_peak, total, sums


@triton.jit(do_not_specialize=_COUNTS)
def _cross_entropy_kernel(
    logits_ptr, bias_ptr, target_ptr, scale_ptr, losses_ptr, lse_ptr, num_rows, vocab_size, padded_size, ignore_index,
    stride_scale, on_target, on_all, z_loss, softcap, LOSSES: tl.constexpr, GRADIENT: tl.constexpr, LSE: tl.constexpr,
    HAS_BIAS: tl.constexpr, SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Computes the losses of BLOCK_M rows of a chunk and, with GRADIENT, replaces their logits by dlogits.

    LSE: "none"; "store"; "load" (a forward pass has stored it, so no pass over the row for statistics is needed).
    scale_ptr: the factors of the rows' losses and gradients, with stride 0 for one factor; None: 1.
    softcap: c of c tanh(logit / c), or None. THREADS: the number of threads that share a row.
    """
    dtype = logits_ptr.dtype.element_ty
    VECTOR: tl.constexpr = 128 // dtype.primitive_bitwidth
    EXACT: tl.constexpr = dtype == tl.float32
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < num_rows
    target = tl.load(target_ptr + rows, mask=real, other=ignore_index)
    counts = real & (target != ignore_index)
    in_vocabulary = (target >= 0) & (target < vocab_size)
    tl.device_assert(in_vocabulary | (target == ignore_index), "a target is outside the vocabulary")
    # A target out of range must not access other memory, even if assertions are off.
    counts = counts & in_vocabulary
    target = tl.where(counts, target, 0)
    row_ptrs = logits_ptr + rows * padded_size
    scale = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + rows * stride_scale, mask=real, other=0.0).to(tl.float32)
    # Ignored rows are not read.
    width = tl.where(tl.max(counts.to(tl.int32), 0) > 0, vocab_size, 0)
    # The columns of tiles that need no mask. Several rows share a program only if a tile holds the whole vocabulary.
    whole = 0
    if BLOCK_M == 1:
        whole = width // BLOCK_N * BLOCK_N
    target_logit = tl.load(row_ptrs + target, mask=counts, other=0.0).to(tl.float32)
    if HAS_BIAS:
        target_logit += tl.load(bias_ptr + target, mask=counts, other=0.0).to(tl.float32)
    target_slope = 1.0
    if softcap is not None:
        target_logit, target_slope = soft_capped(target_logit, softcap, EXACT)

    # p = exp(z - peak) / total, because lse = peak + log(total) has few fractional bits if it is large.
    if LSE == "load":
        peak = tl.load(lse_ptr + rows, mask=counts, other=0.0)
        total = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
        lse = peak
    else:
        peaks = tl.full((BLOCK_M, THREADS), _NO_PEAK, dtype=tl.float32)
        totals = tl.zeros((BLOCK_M, THREADS), dtype=tl.float32)
        sums = tl.zeros((BLOCK_M, THREADS), dtype=tl.float32)
        for start in range(0, whole, BLOCK_N):
            logits, slope = _load_logits(row_ptrs, bias_ptr, start + tl.arange(0, BLOCK_N), softcap, HAS_BIAS)
            # Relative to the target's logit, because logits with a large common offset would cancel.
            relative = logits - target_logit[:, None]
            peaks, totals, sums = _add_tile(logits, relative, peaks, totals, sums, SMOOTH, EXACT, THREADS, VECTOR)
        for start in range(whole, width, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            logits, slope = _load_tail(row_ptrs, counts, bias_ptr, columns, vocab_size, padded_size, softcap, HAS_BIAS)
            relative = tl.where((columns < vocab_size)[None, :], logits - target_logit[:, None], 0.0)
            peaks, totals, sums = _add_tile(logits, relative, peaks, totals, sums, SMOOTH, EXACT, THREADS, VECTOR)
        peak = tl.where(counts, tl.max(peaks, 1), 0.0)
        total = tl.where(counts, tl.sum(totals * tl.exp2(_power(peaks, peak[:, None], EXACT)), 1), 1.0)
        log_total = tl.log(total)
        lse = peak + log_total
        if LOSSES:
            # With a + b V = 1, loss = -log p_y - b sum(z - z_y).
            log_prob = _power(target_logit, peak, EXACT) * 0.6931471805599453 - log_total
            losses = -on_target * log_prob
            if SMOOTH:
                losses = -log_prob - on_all * tl.sum(sums, 1)
            if Z_LOSS:
                losses += z_loss * lse * lse
            losses = tl.where(counts, losses * scale, 0.0)
            tl.store(losses_ptr + rows, losses, mask=real)
        if LSE == "store":
            tl.store(lse_ptr + rows, tl.where(counts, lse, 0.0), mask=real)

    if GRADIENT:
        # All warps must read the logits of their targets before any warp overwrites them.
        tl.debug_barrier()
        factor = scale / total
        if Z_LOSS:
            factor *= 1.0 + 2.0 * z_loss * lse
        smooth = on_all * scale
        for start in range(0, whole, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            logits, slope = _load_logits(row_ptrs, bias_ptr, columns, softcap, HAS_BIAS)
            dlogits = factor[:, None] * tl.exp2(_power(logits, peak[:, None], EXACT))
            if SMOOTH:
                dlogits -= smooth[:, None]
            if softcap is not None:
                dlogits *= slope
            tl.store(row_ptrs[:, None] + columns[None, :], dlogits.to(dtype))
        # Ignored rows are written as well, because the products read them.
        for start in range(whole, vocab_size, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            logits, slope = _load_tail(row_ptrs, counts, bias_ptr, columns, vocab_size, padded_size, softcap, HAS_BIAS)
            dlogits = factor[:, None] * tl.exp2(_power(logits, peak[:, None], EXACT))
            if SMOOTH:
                dlogits -= smooth[:, None]
            if softcap is not None:
                dlogits *= slope
            dlogits = tl.where(counts[:, None], dlogits, 0.0)
            inside = real[:, None] & (columns < padded_size)[None, :]
            tl.store(row_ptrs[:, None] + columns[None, :], dlogits.to(dtype), mask=inside)
        # One element per row differs. It is written again, after the tiles of all warps, instead of compared
        # everywhere.
        tl.debug_barrier()
        dlogit = factor * tl.exp2(_power(target_logit, peak, EXACT)) - smooth - on_target * scale
        if softcap is not None:
            dlogit *= target_slope
        tl.store(row_ptrs + target, dlogit.to(dtype), mask=counts)


def _weights(label_smoothing: float, smooth_others: bool, vocab_size: int) -> tuple[float, float]:
    """Returns (a, b) of the loss lse(z) - a z_y - b sum(z)."""
    if label_smoothing == 0.0:
        return 1.0, 0.0
    per_class = label_smoothing / (vocab_size - 1 if smooth_others else vocab_size)
    return 1.0 - label_smoothing - (per_class if smooth_others else 0.0), per_class


def chunk_rows(rows: int, row_bytes: int, sum_bytes: int = 0) -> int:
    """Returns the number of rows in a chunk of logits: about CHUNK_BYTES, in chunks of about the same size.

    Args:
        sum_bytes: the bytes of the fp32 sums over several chunks. A single chunk needs no sums, and may be larger by
        this.
    """
    largest = min(max(CHUNK_BYTES // row_bytes, SMALLEST_CHUNK), LARGEST_CHUNK)
    if rows <= LARGEST_CHUNK and rows * row_bytes <= largest * row_bytes + sum_bytes:
        return cdiv(rows, 128) * 128
    chunks = max(1, cdiv(rows, largest))
    return min(largest, cdiv(cdiv(rows, chunks), 128) * 128)


class Chunk(NamedTuple):
    """The rows [start, start + rows)."""

    start: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(0, self.start, self.rows)


class _Chunks:
    """The buffer for chunks of logits, and the operations on it."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float,
        smooth_others: bool, z_loss: float, softcap: float = 0.0, sums_dweight: bool = False,
    ) -> None:  # fmt: skip
        self.x, self.weight = x, weight
        self.bias = None if bias is None else bias.contiguous()
        self.target = target.contiguous()
        self.ignore_index, self.z_loss, self.softcap = ignore_index, z_loss, softcap or None
        rows, self.vocab_size = len(x), len(weight)
        self.weights = _weights(label_smoothing, smooth_others, self.vocab_size)
        self.padded_size = cdiv(self.vocab_size, PADDING) * PADDING
        sum_bytes = weight.numel() * 4 if sums_dweight and x.dtype != torch.float32 else 0
        self.step = max(1, min(rows, chunk_rows(rows, self.padded_size * x.element_size(), sum_bytes)))
        self.buffer = x.new_empty(self.step, self.padded_size)

    def __iter__(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Yields each chunk with its logits, to which the kernel adds the bias."""
        for start in range(0, len(self.x), self.step):
            chunk = Chunk(start, min(self.step, len(self.x) - start))
            logits = self.buffer.narrow(0, 0, chunk.rows).narrow(1, 0, self.vocab_size)
            torch.mm(chunk.of(self.x), self.weight.T, out=logits)
            yield chunk, logits

    def launch(
        self, chunk: Chunk, *, losses: Tensor | None = None, lse: Tensor | None = None, load_lse: bool = False,
        scale: Tensor | None = None, gradient: bool = False,
    ) -> None:  # fmt: skip
        """Runs the kernel on a chunk. `scale`: one number on the device, or one per row. Tensors cover all rows."""
        rows = chunk.rows
        # In fp32, a cap needs a derivative for each logit and the exact tanh, so a whole tile would spill on sm_100.
        tile = TILE // 2 if self.softcap is not None and self.x.dtype == torch.float32 else TILE
        block_n = min(tile, next_power_of_2(self.padded_size))
        # With a small vocabulary, several rows share a program; a whole tile of them would spill on sm_100.
        block_m = max(1, min(TILE // 2 // block_n, next_power_of_2(rows)))
        if scale is not None and scale.dim() == 1:
            scale = chunk.of(scale)
        launch(
            _cross_entropy_kernel, (cdiv(rows, block_m),),
            self.buffer, self.bias, chunk.of(self.target), scale, None if losses is None else chunk.of(losses),
            None if lse is None else chunk.of(lse), rows, self.vocab_size, self.padded_size, self.ignore_index,
            scale.stride(0) if scale is not None and scale.dim() == 1 else 0, *self.weights, self.z_loss, self.softcap,
            LOSSES=losses is not None, GRADIENT=gradient,
            LSE="none" if lse is None else "load" if load_lse else "store", HAS_BIAS=self.bias is not None,
            SMOOTH=self.weights[1] != 0.0, Z_LOSS=self.z_loss != 0.0, BLOCK_M=block_m, BLOCK_N=block_n,
            THREADS=min(32 * WARPS, block_n * self.x.element_size() // 16), num_warps=WARPS, debug=True,
            sanitize_overflow=False,
        )  # fmt: skip


class _ChunkGradients:
    """dx, dweight and dbias, which are filled chunk by chunk; the sums over chunks are fp32.

    Gradients that output_mask excludes are empty and not computed.
    """

    def __init__(self, chunks: _Chunks, output_mask: Sequence[bool]) -> None:
        self.x, self.weight = chunks.x, chunks.weight
        self.needs_dx, self.needs_dweight, needs_dbias = output_mask
        self.needs_dbias = needs_dbias and chunks.bias is not None
        self.dx = self.x.new_empty(self.x.shape if self.needs_dx else 0)
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None
        self.alone = chunks.step >= len(self.x)

    def add(self, chunk: Chunk, dlogits: Tensor) -> None:
        x = chunk.of(self.x)
        if self.needs_dx:
            torch.mm(dlogits, self.weight, out=chunk.of(self.dx))
        if self.needs_dbias:
            dbias = dlogits.sum(0, dtype=torch.float32)
            self.dbias = dbias if self.dbias is None else self.dbias.add_(dbias)
        if not self.needs_dweight:
            return
        if self.alone:
            self.dweight = torch.mm(dlogits.T, x)
        elif x.dtype == torch.float32 or x.device.type != "cuda":
            # On a CPU, in tests, products of half dtypes can't have an fp32 result.
            if self.dweight is None:
                self.dweight = torch.mm(dlogits.T.float(), x.float())
            else:
                self.dweight.addmm_(dlogits.T.float(), x.float())
        elif self.dweight is None:
            self.dweight = torch.mm(dlogits.T, x, out_dtype=torch.float32)
        else:
            torch.addmm(self.dweight, dlogits.T, x, out_dtype=torch.float32, out=self.dweight)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        def sums(total: Tensor | None, needed: bool, shape: torch.Size) -> Tensor:
            return self.x.new_zeros(shape if needed else 0) if total is None else total.to(self.x.dtype)

        dweight = sums(self.dweight, self.needs_dweight, self.weight.shape)
        return self.dx, dweight, sums(self.dbias, self.needs_dbias, self.weight.shape[:1])


def why_unsupported(op_name: str, *, x: Tensor, weight: Tensor, bias: Tensor | None, **_: object) -> str | None:
    """Returns why the kernels don't support a call of linear_cross_entropy_fwd, _bwd or _fwd_bwd, else None."""
    if (reason := unsupported_dtype(x.dtype)) is not None:
        return reason
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return "x, weight and bias differ in dtype"
    return unsupported_device(x)


def linear_cross_entropy_fwd(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Implements `fastformer::linear_cross_entropy_fwd`; returns (losses, lse), which are 0 for ignored rows."""
    chunks = _Chunks(x, *args)
    losses = x.new_empty(len(x), dtype=torch.float32)
    lse = torch.empty_like(losses)
    for chunk, _ in chunks:
        chunks.launch(chunk, losses=losses, lse=lse)
    return losses, lse


def linear_cross_entropy_bwd(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, ignore_index: int,
    label_smoothing: float, smooth_others: bool, z_loss: float, output_mask: Sequence[bool], softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Implements `fastformer::linear_cross_entropy_bwd`; returns (dx, dweight, dbias)."""
    chunks = _Chunks(
        x, weight, bias, target, ignore_index, label_smoothing, smooth_others, z_loss, softcap, output_mask[1]
    )
    gradients = _ChunkGradients(chunks, output_mask)
    # A large lse has few fractional bits. Logits in half dtypes have even fewer, but for fp32, lse is recomputed.
    saved_lse = None if x.dtype == torch.float32 else lse
    for chunk, logits in chunks:
        chunks.launch(chunk, lse=saved_lse, load_lse=True, scale=dlosses, gradient=True)
        gradients.add(chunk, logits)
    return gradients.result()


def linear_cross_entropy_fwd_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float,
    smooth_others: bool, z_loss: float, mean: bool, output_mask: Sequence[bool], softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Implements `fastformer::linear_cross_entropy_fwd_bwd`; returns (loss, dx, dweight, dbias)."""
    chunks = _Chunks(
        x, weight, bias, target, ignore_index, label_smoothing, smooth_others, z_loss, softcap, output_mask[1]
    )
    gradients = _ChunkGradients(chunks, output_mask)
    losses = x.new_empty(len(x), dtype=torch.float32)
    scale = (target != ignore_index).sum().clamp(min=1).float().reciprocal() if mean else None
    for chunk, logits in chunks:
        chunks.launch(chunk, losses=losses, scale=scale, gradient=True)
        gradients.add(chunk, logits)
    return losses.sum(), *gradients.result()
