"""Counter-based dropout in Triton kernels: the keep mask of a tile, bit for bit that of `fastformer.ops._dropout`.

It uses Philox4x32-7, with one call for sixteen of 64 columns (defined in ops/_dropout.py). The mask of a tile depends
only on its coordinates, so forward and backward may use different tiles. The columns of a call are those of a row that
one thread holds after a matrix product (with mma.sync and wgmma, the pair 2 * (lane % 4) of each eight columns). So
each thread runs Philox for its own elements, and threads exchange nothing.

The four words of the counter depend on a column, a row, and two scalars. They stay unbroadcast, (BLOCK_M, 1) and
(1, BLOCK_N // 16), until the rounds mix them, so the first two of the seven rounds cost almost nothing.
"""

import triton
import triton.language as tl


@triton.jit
def load_dropout(dropout):
    """Returns the argument `drawn` of `keep_mask_tile`: (key0, key1, offset, threshold, keep_scale).

    Args:
        dropout: (seed_ptr, threshold, keep_scale) from `_launch.dropout_arguments`. The int64 tensor holds the seed and
            the offset. If seed_ptr is None, nothing is dropped, and the result is zeros.
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
    # Not triton.language.philox, which needs all four words in one shape, so that even the first rounds cost full
    # price.
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
def _kept_bytes(word, threshold):
    """Sets bit 7 of each byte of `word` if the byte is at least `threshold` (1 to 256); all other bits are 0.

    The bit is the carry of byte + (256 - threshold), for four bytes at once.
    """
    addend = (256 - threshold) * 0x01010101
    low = (word & 0x7F7F7F7F) + (addend & 0x7F7F7F7F)
    return ((word & addend) | ((word | addend) & low)) & 0x80808080


@triton.jit
def _keep_bits(calls, rows, plane, key0, key1, offset, threshold):
    """Returns the sixteen decisions of a call in one word; `calls` and `rows` broadcast.

    Bit 8 * (i % 4) + i // 4 says whether the element of byte i is kept.
    """
    w0, w1, w2, w3 = _philox(calls, rows, plane, offset, key0, key1)
    low = (_kept_bytes(w0, threshold) >> 7) | (_kept_bytes(w1, threshold) >> 6)
    high = (_kept_bytes(w2, threshold) >> 5) | (_kept_bytes(w3, threshold) >> 4)
    # low + high, written as a sum over a leading axis. The compiler hoists layout conversions through elementwise code,
    # and would run Philox in each of the threads that share a call; a reduction stops it.
    return tl.sum(tl.permute(tl.join(low, high), (2, 0, 1)), axis=0)


@triton.jit
def keep_mask_tile(
    rows, first_column, plane, drawn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """Returns which elements of the tile rows x [first_column, first_column + BLOCK_N) are kept.

    Args:
        rows: (BLOCK_M,) integers, the indices of the rows.
        first_column: a multiple of BLOCK_N, or of 64 if BLOCK_N is larger.
        plane: batch * num_heads + head for attention, else 0.
        drawn: from `load_dropout`.
        BLOCK_N: a power of two, 8 or more. Below 64, adjacent tiles share calls, and each tile makes them.
        TRANSPOSED: generate the mask directly in the transposed shape.

    Returns:
        bool (BLOCK_M, BLOCK_N), or (BLOCK_N, BLOCK_M) if TRANSPOSED; True = kept.
    """
    key0, key1, offset, threshold, _ = drawn
    plane = tl.cast(plane, tl.uint32)
    rows = rows.to(tl.uint32)
    # column = 64 * group + 8 * pair + 2 * (call % 4) + odd
    GROUPS: tl.constexpr = (BLOCK_N + 63) // 64
    PAIRS: tl.constexpr = BLOCK_N // GROUPS // 8
    calls = (first_column // 64 * 4 + tl.arange(0, 4 * GROUPS)).to(tl.uint32)
    odd = tl.arange(0, 2).to(tl.uint32)
    if TRANSPOSED or PAIRS < 8:
        # Several threads hold the elements of a call, so one word carries all sixteen decisions to them.
        pair = (first_column % 64 // 8 + tl.arange(0, PAIRS)).to(tl.uint32)
        bit = (pair % 2 * 16 + pair // 2)[:, None] + 8 * odd[None, :]
        if TRANSPOSED:
            bits = _keep_bits(calls[:, None], rows[None, :], plane, key0, key1, offset, threshold)
            bits = tl.reshape(bits, (GROUPS, 4, BLOCK_M))[:, None, :, None, :] >> bit[None, :, None, :, None]
            keep = tl.reshape(bits & 1, (BLOCK_N, BLOCK_M)) != 0
        else:
            bits = _keep_bits(calls[None, :], rows[:, None], plane, key0, key1, offset, threshold)
            bits = tl.reshape(bits, (BLOCK_M, GROUPS, 4))[:, :, None, :, None] >> bit[None, None, :, None, :]
            keep = tl.reshape(bits & 1, (BLOCK_M, BLOCK_N)) != 0
    else:
        w0, w1, w2, w3 = _philox(calls[None, :], rows[:, None], plane, offset, key0, key1)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (BLOCK_M, 4 * GROUPS, 2, 2): the last two axes are the word
        words = tl.permute(tl.reshape(words, (BLOCK_M, GROUPS, 4, 4)), (0, 1, 3, 2))
        # Shift the byte to the top, where the bits below it can't change the comparison. The shifts are two vectors of
        # two, so that the compiler knows the shift of each element.
        words = words[:, :, :, None, :] << (16 - 16 * odd)[None, None, None, :, None]
        words = words[:, :, :, :, :, None] << (8 - 8 * odd)[None, None, None, None, None, :]
        # The largest word that is dropped, because a threshold of 256 doesn't fit into the top byte.
        largest = ((threshold - 1) << 24) | 0xFFFFFF
        keep = tl.reshape(words > largest, (BLOCK_M, BLOCK_N))
    return keep


@triton.jit
def kept_or_zero(keep, values, drawn):
    """Returns `values` where `keep` is true, else 0; fp32.

    Not tl.where(keep, values, 0.0): with a literal, the compiler would select after the subsequent rounding, and round
    one element at a time instead of two.
    """
    return tl.where(keep, values, drawn[4] * 0.0)


@triton.jit
def drop_tile(values, rows, first_column, dropout, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Applies dropout to a tile of rows. Without a seed in `dropout`, the kernel's argument, returns `values`."""
    if dropout[0] is None:
        return values
    else:
        drawn = load_dropout(dropout)
        keep = keep_mask_tile(rows, first_column, 0, drawn, BLOCK_M, BLOCK_N)
        return kept_or_zero(keep, values * drawn[4], drawn)
