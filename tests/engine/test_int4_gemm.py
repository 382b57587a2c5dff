"""int4 products have the bits of plain arithmetic, on every path and next to any other rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.engine.elsewhere import products_of
from tests.engine.test_packed_gemm import draw, extension, packed_linear, stored

GROUP = 32
COLUMNS = (1, 63, 64, 65, 130)
DEPTHS = (1, 2, 31, 32, 33, 47, 64, 65, 129)


def packed(q: np.ndarray) -> np.ndarray:
    """(n, k) whole numbers from 0 to 15 as (n, 16 * groups) bytes; what is beyond k is noise that must not count."""
    n, k = q.shape
    padded = np.random.default_rng(k).integers(0, 16, (n, -(-k // GROUP) * GROUP), dtype=np.uint8)
    padded[:, :k] = q
    return padded[:, ::2] | padded[:, 1::2] << 4


def linear(x, q, scales, zeros=None, bias=None, columns=None) -> np.ndarray:
    found: np.ndarray = extension().packed_linear_int4(x, packed(q), scales, zeros, bias, columns)
    return found


def weight(n: int, k: int, with_zeros: bool, seed: int = 0):
    """q, scales of 11 bits, as fp16 has them, and zeros."""
    random = np.random.default_rng([n, k, seed])
    groups = -(-k // GROUP)
    q = random.integers(0, 16, (n, k), dtype=np.uint8)
    scales = np.exp(random.uniform(-7, 0, (n, groups))).astype(np.float16).astype(np.float32)
    zeros = random.integers(0, 17, (n, groups), dtype=np.uint8) if with_zeros else None
    return q, scales, zeros


def expected(x, q, scales, zeros=None, bias=None) -> np.ndarray:
    """Exact integers in each group; from there on the kernels' steps in fp32, with fma emulated in fp64."""
    k = x.shape[1]
    (rows, x_scale), zero_byte = stored(x), None
    low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    width = (high - low).astype(np.float32)
    safe = np.where(width > 0, width, np.float32(1))
    zero_byte = np.where(width > 0, np.rint(-low * (np.float32(255) / safe)), 0).astype(np.int64)
    whole = rows + zero_byte  # the bytes
    offsets = np.full(scales.shape, 8) if zeros is None else zeros.astype(np.int64)
    largest = np.abs(scales).max(1, keepdims=True)
    factor = np.where(largest > 0, np.exp2(15.0 - (np.frexp(largest)[1])), 1).astype(np.float64)
    total, correction = np.zeros((len(x), len(q)), np.float32), np.zeros(len(q))
    for g, first in enumerate(range(0, k, GROUP)):
        part = q[:, first : first + GROUP].astype(np.int64) - offsets[:, g : g + 1]
        scale = scales[:, g].astype(np.float64) * factor[:, 0]
        exact = (whole[:, first : first + GROUP] @ part.T).astype(np.float64)
        total = (exact * scale + total.astype(np.float64)).astype(np.float32)
        correction += scale * part.sum(1)
    moved = -zero_byte * correction.astype(np.float32).astype(np.float64) + total
    scale = (x_scale * (1 / factor[:, 0]).astype(np.float32)).astype(np.float64)
    shift = np.zeros(len(q), np.float32) if bias is None else bias
    return (moved.astype(np.float32).astype(np.float64) * scale + shift).astype(np.float32)


def check(rows: int, n: int, k: int, with_zeros: bool) -> None:
    x, (q, scales, zeros), bias = draw(rows, k), weight(n, k, with_zeros), draw(n, seed=2)
    ours = linear(x, q, scales, zeros, bias)
    assert ours.shape == (rows, n)
    np.testing.assert_array_equal(ours, expected(x, q, scales, zeros, bias))


@pytest.mark.parametrize("with_zeros", [False, True])
def test_every_tail(with_zeros: bool) -> None:
    for n, k in itertools.product(COLUMNS, DEPTHS):
        for rows in (1, 5):
            check(rows, n, k, with_zeros)


@pytest.mark.parametrize("with_zeros", [False, True])
def test_every_number_of_rows(with_zeros: bool) -> None:
    for rows in range(41):
        check(rows, 70, 71, with_zeros)
    check(523, 65, 300, with_zeros)


@pytest.mark.parametrize("with_zeros", [False, True])
def test_a_row_depends_on_nothing_else(with_zeros: bool) -> None:
    x, (q, scales, zeros), bias = draw(70, 203), weight(129, 203, with_zeros), draw(129, seed=2)
    together = linear(x, q, scales, zeros, bias)
    for rows in (1, 2, 3, 4, 12, 13, 16, 31, 32, 40, 64):
        np.testing.assert_array_equal(linear(x[:rows], q, scales, zeros, bias), together[:rows])
    for row in range(70):
        np.testing.assert_array_equal(linear(x[row : row + 1], q, scales, zeros, bias)[0], together[row])
    some = None if zeros is None else zeros[77:]
    np.testing.assert_array_equal(linear(x, q[77:], scales[77:], some, bias[77:]), together[:, 77:])
    picked = [3, 64, 65, 128, *range(66, 127)]
    np.testing.assert_array_equal(linear(x, q, scales, zeros, bias, picked), together[:, picked])


def test_the_largest_sums_are_exact() -> None:
    """Scales of 1: products of whole numbers, with all bytes and all nibbles at their ends, to the last unit."""
    for nibble, zero in itertools.product((0, 15), (None, 0, 8, 16)):
        q, scales = np.full((65, 4096), nibble, np.uint8), np.ones((65, 128), np.float32)
        zeros = None if zero is None else np.full((65, 128), zero, np.uint8)
        x = np.full((9, 4096), 255, np.float32)
        x[4:] *= -1
        x[::2, ::2] = 0
        exact = x @ (q.astype(np.float32) - (8 if zero is None else zero)).T
        np.testing.assert_array_equal(linear(x, q, scales, zeros), exact)


def test_scales_far_apart() -> None:
    """A group that is 2^-12 of its column's largest keeps fp16's 11 bits."""
    q, x = np.zeros((3, 96), np.uint8), np.zeros((1, 96), np.float32)
    q[:, 5], q[:, 40], q[:, 70], x[0, 40] = 15, 15, 15, 1
    scales = np.array([[1000, 1000 / 4096, 0], [3e-30, 2e-33, 1], [0, 0, 0]], np.float32)
    ours = linear(x, q, scales)[0]
    np.testing.assert_allclose(ours[0], 7 * scales[0, 1], rtol=2**-10)
    assert ours[1] == 0 and ours[2] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_stay_in_place(value: float) -> None:
    x, (q, scales, zeros) = draw(14, 131), weight(70, 131, True)
    clean = linear(x, q, scales, zeros)
    for column in (0, 64, 130):
        broken = x.copy()
        broken[4, column] = value
        ours = linear(broken, q, scales, zeros)
        assert np.isnan(ours[4]).all()
        np.testing.assert_array_equal(np.delete(ours, 4, 0), np.delete(clean, 4, 0))
    for group in (0, 4):
        broken = scales.copy()
        broken[65, group] = value
        ours = linear(x, q, broken, zeros)
        assert np.isnan(ours[:, 65]).all()
        np.testing.assert_array_equal(np.delete(ours, 65, 1), np.delete(clean, 65, 1))


def test_empty_products_are_empty() -> None:
    x, (q, scales, zeros), bias = draw(3, 40), weight(65, 40, True), draw(65, seed=2)
    x[1], scales[64] = 0, 0
    ours = linear(x, q, scales, zeros, bias)
    np.testing.assert_array_equal(ours[1], bias)
    np.testing.assert_array_equal(ours[:, 64], np.repeat(bias[64], 3))
    empty = np.zeros((0, 5), np.uint8)
    assert linear(draw(3, 5), empty, np.zeros((0, 1), np.float32)).shape == (3, 0)
    none = linear(np.zeros((3, 0), np.float32), np.zeros((65, 0), np.uint8), np.zeros((65, 0), np.float32), None, bias)
    np.testing.assert_array_equal(none, np.tile(bias, (3, 1)))


def test_weights_of_int8_have_the_same_rows() -> None:
    """What has no groups in a model in int4 is packed as int8."""
    x, matrix, bias = draw(21, 77), draw(66, 77, seed=1), draw(66, seed=2)
    as_int4 = extension().packed_linear(x, matrix, bias, "int8", True)
    np.testing.assert_array_equal(as_int4, packed_linear()(x, matrix, bias, "int8"))


def test_wrong_calls() -> None:
    x, (q, scales, zeros) = draw(2, 40), weight(3, 40, True)
    for wrong in (
        lambda: extension().packed_linear_int4(x, packed(q)[:, :-1].copy(), scales, zeros, None),
        lambda: linear(x, q, scales[:, :1].copy(), zeros),
        lambda: linear(x, q, scales, zeros[:2].copy()),
        lambda: linear(x, q, scales, zeros, np.zeros(2, np.float32)),
        lambda: linear(x, q, scales, zeros, None, [3]),
        lambda: packed_linear()(x, draw(3, 40), None, "int4"),
    ):
        with pytest.raises(ValueError, match=r"\bpacked_linear"):
            wrong()


# A process of test_other_paths.
PRODUCTS = """
given, found = np.load(cases), {}
for case in [name.removesuffix(" x") for name in given if name.endswith(" x")]:
    zeros = given[f"{case} zeros"] if f"{case} zeros" in given else None
    found[case] = module.packed_linear_int4(*(given[f"{case} {what}"] for what in ("x", "q", "scales")), zeros, None)
found["brgemm"] = module.num_brgemm_products()
np.savez(results, **found)
"""
PATHS = {
    "avx512 alone": ("avx512", {"FASTFORMER_CPU_FEATURES": ""}),
    "avx512, dot products": ("avx512", {"FASTFORMER_CPU_FEATURES": "avx512_vnni", "FASTFORMER_BRGEMM": "0"}),
    "avx512, brgemm": ("avx512", {"FASTFORMER_BRGEMM": "1"}),
    "avx2 alone": ("avx2", {"FASTFORMER_CPU_FEATURES": ""}),
    "avx2, avx_vnni": ("avx2", {"FASTFORMER_CPU_FEATURES": "avx_vnni"}),
}
SLOW_PATHS = ("avx512 alone", "avx512, dot products", "avx512, brgemm", "avx2, avx_vnni")


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow) if path in SLOW_PATHS else path for path in PATHS]
)
def test_other_paths(path: str, tmp_path: Path) -> None:
    """CPUs with fewer instructions, or with AMX, give the same bits."""
    isa, settings = PATHS[path]
    cases: dict[str, np.ndarray] = {}
    wanted: dict[str, np.ndarray] = {}
    full = np.full((9, 999), 255, np.float32)
    drawn = [
        (draw(rows, 301), *weight(129, 301, with_zeros)) for rows in (*range(1, 15), 33, 70) for with_zeros in (0, 1)
    ]
    ends = [
        (full * sign, np.full((65, 999), q, np.uint8), np.ones((65, 32), np.float32), None)
        for sign in (1, -1)
        for q in (0, 15)
    ]
    for number, (x, q, scales, zeros) in enumerate([*drawn, *ends]):
        case = str(number)
        cases |= {f"{case} x": x, f"{case} q": packed(q), f"{case} scales": scales}
        if zeros is not None:
            cases[f"{case} zeros"] = zeros
        wanted[case] = linear(x, q, scales, zeros)
    found = products_of(isa, PRODUCTS, settings, cases, tmp_path)
    has_vnni = "avx512_vnni" in extension().cpu_features()
    assert (found.pop("brgemm") > 0) == (settings.get("FASTFORMER_BRGEMM") == "1" and has_vnni)
    assert found.keys() == wanted.keys()
    for case, ours in found.items():
        np.testing.assert_array_equal(ours, wanted[case], err_msg=case)
