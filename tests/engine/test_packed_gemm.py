"""The engine's int8 and int4 products are exact, fp32 and bf16 follow the rule, and rows are independent."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.checkpoints.levels import E2M1, IQ4
from fastformer.ops import _extension
from tests.checks import assert_accurate
from tests.covering import each
from tests.engine.elsewhere import products_of, started

FLOATS_AND_INT8 = ("fp32", "bf16", "int8")
LEVELS = {"int4 of E2M1": E2M1.numpy(), "int4 of IQ4": IQ4.numpy()}
PRECISIONS = (*FLOATS_AND_INT8, "int4", "int4 with zeros", *LEVELS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Tails of panels (64 columns), of vectors (8 and 16), of the 4 or 2 neighbours in k, of groups, and none.
COLUMNS = (1, 63, 64, 65, 200)
DEPTHS = (1, 2, 3, 5, 16, 63, 129)
GROUP = 32
DEPTHS_OF_GROUPS = (1, 2, 31, 32, 33, 47, 64, 65, 129)


@cache
def extension() -> ModuleType:
    isa = _extension.load()
    if isa is None:
        pytest.skip("the C++ extension is not built")
    return importlib.import_module(f"fastformer._engine_{isa}")


def packed_linear() -> Callable[..., np.ndarray]:
    function: Callable[..., np.ndarray] = extension().packed_linear
    return function


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def stored(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of activations as integers around their zero points, and their scales, in the header's fp32
    arithmetic.
    """
    low, high = np.minimum(x.min(axis=1, keepdims=True), 0), np.maximum(x.max(axis=1, keepdims=True), 0)
    width = high - low
    inverse = np.float32(255) / np.where(width > 0, width, np.float32(1))
    zero = np.rint(-low * inverse)
    whole = np.clip(np.rint(x * inverse) + zero, 0, 255) - zero
    return whole.astype(np.int64), np.where(width > 0, width / np.float32(255), np.float32(0))


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of a weight as integers up to 127, and their scales, in the same arithmetic."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    safe = np.where(largest > 0, largest, np.float32(1))
    whole = np.rint(x * (np.float32(127) / safe)).astype(np.int64)
    return whole, np.where(largest > 0, largest / np.float32(127), np.float32(0))


def expected_int8(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Computes exact integer products, with the scaling in fp64 and one rounding."""
    (q, x_scale), (w, w_scale) = stored(x), quantised(weight)
    scale = (x_scale * w_scale.T).astype(np.float64)  # the product of the scales is rounded to fp32
    y = (q @ w.T).astype(np.float32).astype(np.float64) * scale
    return (y + (0 if bias is None else bias)).astype(np.float32)


def packed(q: np.ndarray) -> np.ndarray:
    """(n, k) whole numbers from 0 to 15 as (n, 16 * groups) bytes; padding beyond k is noise that must not count."""
    n, k = q.shape
    padded = np.random.default_rng(k).integers(0, 16, (n, -(-k // GROUP) * GROUP), dtype=np.uint8)
    padded[:, :k] = q
    return padded[:, ::2] | padded[:, 1::2] << 4


def linear_int4(x, weight, bias=None, columns=None) -> np.ndarray:
    q, scales, zeros, levels = weight
    table = None if levels is None else levels.view(np.uint8)
    product: np.ndarray = extension().packed_linear_int4(x, packed(q), scales, zeros, bias, columns, table)
    return product


Int4 = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def in_groups(n: int, k: int, with_zeros: bool, seed: int = 0, levels: np.ndarray | None = None) -> Int4:
    """q, scales of 11 bits, as fp16 has them, zeros, and levels."""
    random = np.random.default_rng([n, k, seed])
    groups = -(-k // GROUP)
    q = random.integers(0, 16, (n, k), dtype=np.uint8)
    scales = np.exp(random.uniform(-7, 0, (n, groups))).astype(np.float16).astype(np.float32)
    zeros = random.integers(0, 17, (n, groups), dtype=np.uint8) if with_zeros else None
    return q, scales, zeros, levels


def expected_int4(x, weight, bias=None) -> np.ndarray:
    """Exact integers in each group; from there on the kernels' steps in fp32, with fma emulated in fp64."""
    (q, scales, zeros, levels), k = weight, x.shape[1]
    rows, x_scale = stored(x)
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
        part = q[:, first : first + GROUP].astype(np.int64)
        part = part - offsets[:, g : g + 1] if levels is None else levels.astype(np.int64)[part]
        scale = scales[:, g].astype(np.float64) * factor[:, 0]
        exact = (whole[:, first : first + GROUP] @ part.T).astype(np.float64)
        total = (exact * scale + total.astype(np.float64)).astype(np.float32)
        correction += scale * part.sum(1)
    moved = -zero_byte * correction.astype(np.float32).astype(np.float64) + total
    scale = (x_scale * (1 / factor[:, 0]).astype(np.float32)).astype(np.float64)
    shift = np.zeros(len(q), np.float32) if bias is None else bias
    return (moved.astype(np.float32).astype(np.float64) * scale + shift).astype(np.float32)


def drawn(precision: str, n: int, k: int, seed: int = 1) -> Any:
    """A weight: a matrix, or of int4 its parts."""
    if "int4" not in precision:
        return draw(n, k, seed=seed)
    return in_groups(n, k, precision == "int4 with zeros", seed, LEVELS.get(precision))


def deep(precision: str, k: int) -> int:
    """A depth that the precision has: levels have whole groups."""
    return -(-k // GROUP) * GROUP if precision in LEVELS else k


def product(precision: str, x: np.ndarray, weight: Any, bias: np.ndarray | None = None) -> np.ndarray:
    return linear_int4(x, weight, bias) if "int4" in precision else packed_linear()(x, weight, bias, precision)


def plain_and_exact(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, precision: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of eager PyTorch, with inputs of the precision and sums in fp32, and the fp64 result."""
    left, right = (torch.from_numpy(matrix).to(DTYPES[precision]) for matrix in (x, weight))
    plain, exact = left.float() @ right.float().T, left.double() @ right.double().T
    if bias is not None:
        plain, exact = plain + torch.from_numpy(bias), exact + torch.from_numpy(bias).double()
    return plain, exact


def check(precision: str, rows: int, n: int, k: int, with_bias: bool = True) -> None:
    # The largest error of a handful of numbers is a matter of luck: few of them are drawn several times.
    draws = 1 if precision not in DTYPES or rows * n > 1000 else 4
    results: tuple[list[torch.Tensor], ...] = ([], [], [])
    for seed in range(0, 3 * draws, 3):
        x, weight = draw(rows, k, seed=seed), drawn(precision, n, k, seed + 1)
        bias = draw(n, seed=seed + 2) if with_bias else None
        ours = product(precision, x, weight, bias)
        assert ours.shape == (rows, n) and ours.dtype == np.float32
        if precision not in DTYPES:
            due = expected_int8(x, weight, bias) if precision == "int8" else expected_int4(x, weight, bias)
            np.testing.assert_array_equal(ours, due)
            return
        products = torch.from_numpy(ours), *plain_and_exact(x, weight, bias, precision)
        for values, result in zip(results, products, strict=True):
            values.append(result)
    ours_all, plain, exact = (torch.stack(values) for values in results)
    assert_accurate(ours_all, plain, exact, f"{precision} {rows} x {n} x {k}")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tail(precision: str) -> None:
    depths = {deep(precision, k): None for k in (DEPTHS_OF_GROUPS if "int4" in precision else DEPTHS)}
    for n, k in itertools.product(COLUMNS, depths):
        for rows in (1, 5):
            check(precision, rows, n, k)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_number_of_rows(precision: str) -> None:
    for rows in range(41 if precision in ("int4", "int4 with zeros") else 71):
        check(precision, rows, 130, deep(precision, 71 if "int4" in precision else 37))
    check(precision, 523, 65, deep(precision, 300))  # more than a step has
    check(precision, 3, 65, deep(precision, 20), with_bias=False)


@pytest.mark.parametrize("precision", FLOATS_AND_INT8)
@pytest.mark.parametrize("k", [128, 255, 256, 257, 2048, 4095])
def test_long_sums(precision: str, k: int) -> None:
    """Long sums are sums of partial sums, which are no less accurate than eager PyTorch's."""
    for rows in (1, 5, 16):
        check(precision, rows, 65, k)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_depends_on_nothing_else(precision: str) -> None:
    k = deep(precision, 203)
    x, weight, bias = draw(70, k), drawn(precision, 129, k), draw(129, seed=2)
    together = product(precision, x, weight, bias)
    for rows in (1, 2, 3, 4, 6, 7, 12, 13, 14, 16, 27, 31, 32, 40, 64):
        np.testing.assert_array_equal(product(precision, x[:rows], weight, bias), together[:rows])
    for row in range(70):
        np.testing.assert_array_equal(product(precision, x[row : row + 1], weight, bias)[0], together[row])
    # Nor does a column depend on the panel that it stands in.
    is_int4 = "int4" in precision
    last = (*(part if part is None else part[77:] for part in weight[:3]), weight[3]) if is_int4 else weight[77:]
    np.testing.assert_array_equal(product(precision, x, last, bias[77:]), together[:, 77:])
    if is_int4:
        picked = [3, 64, 65, 128, *range(66, 127)]
        np.testing.assert_array_equal(linear_int4(x, weight, bias, picked), together[:, picked])


@each("value, precision", itertools.product([np.nan, np.inf, -np.inf], PRECISIONS))
def test_nonfinite_values_stay_in_their_row(precision: str, value: float) -> None:
    k = deep(precision, 131)
    x, weight = draw(14, k), drawn(precision, 70, k)
    clean = product(precision, x, weight)
    for column in (0, 64, 130):
        broken = x.copy()
        broken[4, column] = value
        broken[4, (column + 1) % k] = -value  # inf - inf
        if "int4" not in precision:
            assert np.isnan(product(precision, broken, np.abs(weight))[4]).all()
        ours = product(precision, broken, weight)
        assert not np.isfinite(ours[4]).any()
        np.testing.assert_array_equal(np.delete(ours, 4, 0), np.delete(clean, 4, 0))


@each("value, precision", itertools.product([np.nan, np.inf, -np.inf], PRECISIONS))
def test_nonfinite_values_of_the_weight_stay_in_their_column(precision: str, value: float) -> None:
    k = deep(precision, 131)
    x, weight = draw(14, k), drawn(precision, 70, k)
    clean = product(precision, x, weight)
    for place in (0, 4) if "int4" in precision else (0, 129, 130):
        if "int4" in precision:
            q, scales, *others = weight
            broken: Any = (q, scales.copy(), *others)
            broken[1][65, place] = value
        else:
            broken = weight.copy()
            broken[65, place] = value
        ours = product(precision, x, broken)
        assert not np.isfinite(ours[:, 65]).any() and (np.isnan(ours[:, 65]).all() or precision in DTYPES)
        np.testing.assert_array_equal(np.delete(ours, 65, 1), np.delete(clean, 65, 1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_products_are_empty(precision: str) -> None:
    k = deep(precision, 40)
    x, weight, bias = draw(3, k), drawn(precision, 65, k), draw(65, seed=2)
    x[1] = 0
    (weight[1] if "int4" in precision else weight)[64] = 0
    ours = product(precision, x, weight, bias)
    np.testing.assert_array_equal(ours[1], bias)
    np.testing.assert_array_equal(ours[:, 64], np.repeat(bias[64], 3))
    if "int4" not in precision:  # too small for a scale, and no NaN for that
        ours = product(precision, x * np.float32(1e-42), weight, bias)
        np.testing.assert_array_equal(ours, np.tile(bias, (3, 1)))
    k = deep(precision, 5)
    assert product(precision, draw(3, k), drawn(precision, 0, k)).shape == (3, 0)
    ours = product(precision, np.zeros((3, 0), np.float32), drawn(precision, 65, 0), bias)
    np.testing.assert_array_equal(ours, np.tile(bias, (3, 1)))


def test_the_largest_sums_are_exact() -> None:
    """Scales of 1: products of whole numbers, with all bytes and all nibbles at their ends, to the last unit."""
    for sign in (1, -1):
        x = np.full((2, 4096), 255, np.float32)
        x[1] *= -1
        weight = np.full((65, 4096), 127 * sign, np.float32)
        np.testing.assert_array_equal(packed_linear()(x, weight, None, "int8"), x @ weight.T)
    for nibble, zero in itertools.product((0, 15), (None, 0, 8, 16)):
        q, scales = np.full((65, 4096), nibble, np.uint8), np.ones((65, 128), np.float32)
        zeros = None if zero is None else np.full((65, 128), zero, np.uint8)
        x = np.full((33, 4096), 255, np.float32)  # as many rows as unpacked panels serve
        x[4:] *= -1
        x[::2, ::2] = 0
        exact = x @ (q.astype(np.float32) - (8 if zero is None else zero)).T
        np.testing.assert_array_equal(linear_int4(x, (q, scales, zeros, None)), exact)
    for nibble, levels in itertools.product(range(16), LEVELS.values()):
        q = np.full((65, 4096), nibble, np.uint8)
        exact = x @ levels.astype(np.float32)[q].T
        np.testing.assert_array_equal(linear_int4(x, (q, scales, None, levels)), exact)


def test_scales_far_apart() -> None:
    """A group that is 2^-12 of its column's largest keeps fp16's 11 bits."""
    q, x = np.zeros((3, 96), np.uint8), np.zeros((1, 96), np.float32)
    q[:, 5], q[:, 40], q[:, 70], x[0, 40] = 15, 15, 15, 1
    scales = np.array([[1000, 1000 / 4096, 0], [3e-30, 2e-33, 1], [0, 0, 0]], np.float32)
    ours = linear_int4(x, (q, scales, None, None))[0]
    np.testing.assert_allclose(ours[0], 7 * scales[0, 1], rtol=2**-10)
    assert ours[1] == 0 and ours[2] == 0
    for exponent in (0, -128, 127):  # powers of two are exact down to 2^-38
        scales = np.ldexp(np.ones((1, 3), np.float32), [exponent, exponent - 38, exponent])
        x[0, 40] = 255
        ours = linear_int4(x, (q[:1], scales, None, LEVELS["int4 of E2M1"]))
        assert ours == -12 * 255 * scales[0, 1] and (scales[0, 1] != 0) == (exponent != -128)


def test_weights_of_int8_have_the_same_rows() -> None:
    """What has no groups in a model in int4 is packed as int8."""
    x, matrix, bias = draw(21, 77), draw(66, 77, seed=1), draw(66, seed=2)
    as_int4 = extension().packed_linear(x, matrix, bias, "int8", True)
    np.testing.assert_array_equal(as_int4, packed_linear()(x, matrix, bias, "int8"))


def test_wrong_calls() -> None:
    x, weight = draw(2, 4), draw(3, 4)
    with pytest.raises(ValueError, match="fp64"):
        packed_linear()(x, weight, None, "fp64")
    with pytest.raises(ValueError, match=r"\b66311\b.*\b66312\b"):
        packed_linear()(np.zeros((1, 66312), np.float32), np.zeros((1, 66312), np.float32), None, "int8")
    x, (q, scales, zeros, _) = draw(2, 40), in_groups(3, 40, True)
    assert zeros is not None
    whole, levels = in_groups(3, 64, True), LEVELS["int4 of IQ4"]
    with pytest.raises(ValueError, match=r"\blevels\b.*\b32\b.*\b40\b"):
        linear_int4(x, (q, scales, None, levels))
    with pytest.raises(ValueError, match="levels without zero points"):
        linear_int4(draw(2, 64), (*whole[:3], levels))
    for wrong in (
        lambda: extension().packed_linear_int4(x, packed(q)[:, :-1].copy(), scales, zeros, None),
        lambda: linear_int4(x, (q, scales[:, :1].copy(), zeros, None)),
        lambda: linear_int4(x, (q, scales, zeros[:2].copy(), None)),
        lambda: linear_int4(x, (q, scales, zeros, None), np.zeros(2, np.float32)),
        lambda: linear_int4(x, (q, scales, zeros, None), None, [3]),
        lambda: linear_int4(draw(2, 64), (*whole[:2], None, levels[:15])),
        lambda: packed_linear()(x, draw(3, 40), None, "int4"),
    ):
        with pytest.raises(ValueError, match=r"\bpacked_linear"):
            wrong()


# A process of test_other_paths: loads the module of an instruction set and writes the products of all cases.
PRODUCTS = """
found = {"features": np.array(module.cpu_features())}
given = np.load(cases)
def product(which, precision):
    before = module.num_tile_products()
    y = module.packed_linear(given[f"{which} x"], given[f"{which} weight"], given[f"{which} bias"], precision)
    return y, module.num_tile_products() - before
for case in [name.removesuffix(" q") for name in given if name.endswith(" q")]:
    x, q, scales = (given[f"{case} {what}"] for what in ("left", "q", "scales"))
    zeros = given[f"{case} zeros"] if f"{case} zeros" in given else None
    levels = given[f"{case} levels"].view(np.uint8) if f"{case} levels" in given else None
    found[f"{case} int4"] = module.packed_linear_int4(x, q, scales, zeros, None, None, levels)
found["int4 tiles"] = module.num_tile_products()
names = [name.removesuffix(" x") for name in given if name.endswith(" x")]
for which in names:
    for precision in ("fp32", "bf16", "int8"):
        found[f"{which} {precision}"], found[f"{which} {precision} tiles"] = product(which, precision)
np.savez(results, **found)
"""
PATHS = {
    "avx512 alone": ("avx512", {"FASTFORMER_CPU_FEATURES": ""}),
    "avx512, dot products": ("avx512", {"FASTFORMER_CPU_FEATURES": "avx512_vnni,avx512_bf16"}),
    "avx512, tiles emulated": ("avx512", {"FASTFORMER_BRGEMM": "1"}),
    "avx2 alone": ("avx2", {"FASTFORMER_CPU_FEATURES": ""}),
    "avx2, avx_vnni": ("avx2", {"FASTFORMER_CPU_FEATURES": "avx_vnni,avx512_bf16"}),
}


def groups_of_cases() -> dict[str, tuple[Any, ...]]:
    """By name: rows and a weight of int4, some of them with the largest sums."""
    full, ones = np.full((9, 999), 255, np.float32), np.ones((65, 32), np.float32)
    cases = {
        f"{rows} {precision}": (draw(rows, k), *drawn(precision, 129, k))
        for rows in (*range(1, 15), 33, 70)
        for precision in PRECISIONS[len(FLOATS_AND_INT8) :]
        for k in (deep(precision, 301),)
    }
    ends = [("", None, full, ones), *((name, table, full[:, :992], ones[:, :31]) for name, table in LEVELS.items())]
    return cases | {
        f"ends {q} {sign} {name}": (x * sign, np.full((65, x.shape[1]), q, np.uint8), scales.copy(), None, levels)
        for q in (0, 15)
        for sign in (1, -1)
        for name, levels, x, scales in ends
    }


# Slow: paths that another one stands for: of the same code for wider vectors, and of libraries' products.
SLOW_PATHS = ("avx512 alone", "avx2, avx_vnni")


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow) if path in SLOW_PATHS else path for path in PATHS]
)
def test_other_paths(path: str, tmp_path: Path) -> None:
    """CPUs with fewer instructions, or with AMX, give the same integers, and floats by the rule."""
    isa, settings = PATHS[path]
    cases: dict[str, np.ndarray] = {}
    x, weight, bias = draw(70, 603), draw(129, 603, seed=1), draw(129, seed=2)
    x[7, 600] = np.nan
    numbers = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 32, 49, 64, 65, 70)
    for rows in numbers:
        cases |= {f"{rows}-rows x": x[:rows], f"{rows}-rows weight": weight, f"{rows}-rows bias": bias}
    for rows, n, k in itertools.product((1, 9), (63, 65), (1, 2, 5, 63)):
        name = f"{rows}-{n}-{k}"
        cases |= {f"{name} x": draw(rows, k), f"{name} weight": draw(n, k, seed=1), f"{name} bias": draw(n, seed=2)}
    for rows, k in itertools.product((1, 9, 17), (255, 256, 257, 259, 512, 2050, 4095)):  # around blocks of float sums
        name = f"{rows}-long-{k}"
        cases |= {f"{name} x": draw(rows, k), f"{name} weight": draw(65, k, seed=1), f"{name} bias": draw(65, seed=2)}
    for rows, (name, sign) in itertools.product((9, 17), (("largest", 1), ("least", -1))):
        full = np.full((rows, 999), 255, np.float32)
        name = f"{rows}-{name}"
        cases |= {f"{name} x": full, f"{name} weight": full * sign, f"{name} bias": np.zeros(rows, np.float32)}

    in_int4 = groups_of_cases()
    for name, (left, q, *others) in in_int4.items():
        parts = {"left": left, "q": packed(q), **dict(zip(("scales", "zeros", "levels"), others, strict=True))}
        cases |= {f"{name} {what}": part for what, part in parts.items() if part is not None}
    results = products_of(isa, PRODUCTS, settings, cases, tmp_path)
    for name, (left, *groups) in in_int4.items():
        np.testing.assert_array_equal(results.pop(f"{name} int4"), linear_int4(left, groups), err_msg=name)
    takes_tiles = settings.get("FASTFORMER_BRGEMM") == "1"
    assert (results.pop("int4 tiles") > 0) == takes_tiles
    cases = {name: part for name, part in cases.items() if name.endswith((" x", " weight", " bias"))}

    allowed = settings.get("FASTFORMER_CPU_FEATURES")
    in_use = results.pop("features").tolist()
    if allowed is not None:
        assert in_use == [name for name in extension().cpu_features() if name in allowed.split(",")]
    tiles = {n.removesuffix(" tiles"): int(results.pop(n)) for n in list(results) if n.endswith(" tiles")}
    assert len(results) == len(tiles) == len(cases)
    for name, ours in results.items():
        case, precision = name.split(" ")
        x, weight, bias = (cases[f"{case} {what}"] for what in ("x", "weight", "bias"))
        to_tiles = takes_tiles and (precision == "bf16" or (precision == "int8" and len(x) >= 12))
        assert (tiles[name] > 0) == to_tiles, name
        if precision == "int8":
            np.testing.assert_array_equal(ours, packed_linear()(x, weight, bias, "int8"), err_msg=name)
        elif len(x) * len(weight) > 500:
            assert_accurate(torch.from_numpy(ours), *plain_and_exact(x, weight, bias, precision), name)
        else:
            np.testing.assert_allclose(ours, packed_linear()(x, weight, bias, precision), rtol=1e-5, atol=1e-5)
        if case.endswith("-rows"):
            np.testing.assert_array_equal(ours, results[f"{numbers[-1]}-rows {precision}"][: len(x)], err_msg=name)
            assert np.isnan(ours[7:8]).all() and np.isfinite(np.delete(ours, 7, 0) if len(x) > 7 else ours).all()


@pytest.mark.slow
def test_a_feature_that_does_not_exist() -> None:
    """The error names the unknown names in FASTFORMER_CPU_FEATURES."""
    settings = {"FASTFORMER_CPU_FEATURES": "avx512_vnni,vnni"}
    ended = started(str(_extension.load()), "module.cpu_features()", settings, "", "")
    assert "ValueError: FASTFORMER_CPU_FEATURES" in ended.stderr and ended.stderr.rstrip().endswith("'vnni'")
