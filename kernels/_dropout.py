"""Dropout by counter inside Triton kernels: the keep mask of a tile, bit for bit that of `fastformer.ops._dropout`.

Philox4x32-7, one call for eight neighbouring columns (the definition stands in ops/_dropout.py). The tile's mask is a
function of its coordinates alone, so forward and backward may cut the matrix into different tiles.

The counter's four words depend on a column, a row, and two scalars. They are kept unbroadcast, (BLOCK_M, 1) and
(1, BLOCK_N // 8), until the rounds mix them: the first two of the seven rounds cost next to nothing. The eight
decisions of a call are packed into one byte before they spread over the columns, so that a change of layout (from the
one in which Philox runs to the one in which a matrix product left its tile) moves one word for eight elements.
"""

import triton
import triton.language as tl


@triton.jit
def load_dropout(dropout):
    """What `keep_mask_tile` and `drop_tile` draw by: (key0, key1, offset, threshold, keep_scale).

    Args:
        dropout: (seed_ptr, threshold, keep_scale) as `_launch.dropout_arguments` gives it to a kernel; the int64 tensor
            holds the seed and the offset. Without seed_ptr, which is the kernel's sign that nothing is dropped, zeros.
    """
    seed_ptr, threshold, keep_scale = dropout
    if seed_ptr is None:
        return 0, 0, 0, 0, 1.0
    else:
        seed = tl.load(seed_ptr)
        offset = tl.load(seed_ptr + 1)
        key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
        key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        return key0, key1, (offset & 0xFFFFFFFF).to(tl.uint32), tl.cast(threshold, tl.uint32), keep_scale


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    # Not triton.language.philox, which wants all four words in one shape and so pays for full rounds from the first on.
    for _ in tl.static_range(7):
        low0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        low1 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _keep_bits(blocks, rows, plane, key0, key1, offset, threshold):
    """One byte (in a uint32) a Philox call; `blocks` and `rows` broadcast. Bit c: is column 8 * block + c kept?"""
    w0, w1, w2, w3 = _philox(blocks.to(tl.uint32), rows.to(tl.uint32), plane, offset, key0, key1)
    low = ((w0 & 0xFFFF) >= threshold).to(tl.uint32)
    low |= ((w0 >> 16) >= threshold).to(tl.uint32) << 1
    low |= ((w1 & 0xFFFF) >= threshold).to(tl.uint32) << 2
    low |= ((w1 >> 16) >= threshold).to(tl.uint32) << 3
    high = ((w2 & 0xFFFF) >= threshold).to(tl.uint32) << 4
    high |= ((w2 >> 16) >= threshold).to(tl.uint32) << 5
    high |= ((w3 & 0xFFFF) >= threshold).to(tl.uint32) << 6
    high |= ((w3 >> 16) >= threshold).to(tl.uint32) << 7
    # low + high, spelled as a sum over a leading axis: the compiler moves changes of layout back through elementwise
    # code and would run Philox once in each of the four threads that share eight columns; a reduction stops it.
    return tl.sum(tl.permute(tl.join(low, high), (2, 0, 1)), axis=0)


@triton.jit
def keep_mask_tile(
    rows, first_column, plane, drawn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """Which elements of the tile rows x [first_column, first_column + BLOCK_N) are kept.

    Args:
        rows: (BLOCK_M,) integers: the rows' indices.
        first_column: a multiple of 8.
        plane: batch * num_heads + head for attention, else 0.
        drawn: from `load_dropout`.
        BLOCK_N: a multiple of 8.
        TRANSPOSED: the tile is drawn in its transpose's shape, so that none is transposed.

    Returns:
        bool (BLOCK_M, BLOCK_N), or TRANSPOSED (BLOCK_N, BLOCK_M); True = kept.
    """
    key0, key1, offset, threshold, _ = drawn
    blocks = first_column // 8 + tl.arange(0, BLOCK_N // 8)
    plane = tl.cast(plane, tl.uint32)
    which = tl.arange(0, 8).to(tl.uint32)
    if TRANSPOSED:
        bits = _keep_bits(blocks[:, None], rows[None, :], plane, key0, key1, offset, threshold)
        keep = tl.reshape((bits[:, None, :] >> which[None, :, None]) & 1, (BLOCK_N, BLOCK_M)) != 0
    else:
        bits = _keep_bits(blocks[None, :], rows[:, None], plane, key0, key1, offset, threshold)
        keep = tl.reshape((bits[:, :, None] >> which[None, None, :]) & 1, (BLOCK_M, BLOCK_N)) != 0
    return keep


@triton.jit
def drop_tile(values, rows, first_column, dropout, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of rows after dropout, `values` itself where `dropout` (the kernel's argument) has no seed."""
    if dropout[0] is None:
        return values
    else:
        drawn = load_dropout(dropout)
        keep = keep_mask_tile(rows, first_column, 0, drawn, BLOCK_M, BLOCK_N)
        return tl.where(keep, values * drawn[4], 0.0)
