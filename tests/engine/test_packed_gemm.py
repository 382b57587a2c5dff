"""The engine's int8 products are exact, fp32 and bf16 follow the rule, and rows are independent."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fastformer.ops import _extension
from tests.checks import assert_accurate
from tests.engine.elsewhere import products_of, started

PRECISIONS = ("fp32", "bf16", "int8")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Tails of panels (64 columns), of vectors (8 and 16), of the 4 or 2 neighbours in k, and none.
COLUMNS = (1, 63, 64, 65, 200)
DEPTHS = (1, 2, 3, 5, 16, 63, 129)


@cache
def extension() -> ModuleType:
    isa = _extension.load()
    if isa is None:
        pytest.skip("the C++ extension is not built")
    return importlib.import_module(f"fastformer._engine_{isa}")


def packed_linear() -> Callable[..., np.ndarray]:
    function: Callable[..., np.ndarray] = extension().packed_linear
    return function


def cpu_features() -> list[str]:
    names: list[str] = extension().cpu_features()
    return names


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def stored(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of activations as whole numbers around their zeros, and their scales, in the header's fp32 arithmetic."""
    low, high = np.minimum(x.min(axis=1, keepdims=True), 0), np.maximum(x.max(axis=1, keepdims=True), 0)
    width = high - low
    inverse = np.float32(255) / np.where(width > 0, width, np.float32(1))
    zero = np.rint(-low * inverse)
    whole = np.clip(np.rint(x * inverse) + zero, 0, 255) - zero
    return whole.astype(np.int64), np.where(width > 0, width / np.float32(255), np.float32(0))


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a weight as whole numbers up to 127 and their scales, likewise."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    safe = np.where(largest > 0, largest, np.float32(1))
    whole = np.rint(x * (np.float32(127) / safe)).astype(np.int64)
    return whole, np.where(largest > 0, largest / np.float32(127), np.float32(0))


def expected_int8(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Exact integers; the scaling in fp64, rounded once."""
    (q, x_scale), (w, w_scale) = stored(x), quantised(weight)
    scale = (x_scale * w_scale.T).astype(np.float64)  # the product of the scales is rounded to fp32
    y = (q @ w.T).astype(np.float32).astype(np.float64) * scale
    return (y + (0 if bias is None else bias)).astype(np.float32)


def plain_and_exact(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, precision: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager PyTorch's result with inputs of the precision and sums in fp32, and the fp64 one."""
    left, right = (torch.from_numpy(matrix).to(DTYPES[precision]) for matrix in (x, weight))
    plain, exact = left.float() @ right.float().T, left.double() @ right.double().T
    if bias is not None:
        plain, exact = plain + torch.from_numpy(bias), exact + torch.from_numpy(bias).double()
    return plain, exact


def check(precision: str, rows: int, n: int, k: int, with_bias: bool = True) -> None:
    # The largest error of a handful of numbers is a matter of luck: few of them are drawn several times.
    draws = 1 if precision == "int8" or rows * n > 1000 else 4
    results: tuple[list[torch.Tensor], ...] = ([], [], [])
    for seed in range(0, 3 * draws, 3):
        x, weight = draw(rows, k, seed=seed), draw(n, k, seed=seed + 1)
        bias = draw(n, seed=seed + 2) if with_bias else None
        ours = packed_linear()(x, weight, bias, precision)
        assert ours.shape == (rows, n) and ours.dtype == np.float32
        if precision == "int8":
            np.testing.assert_array_equal(ours, expected_int8(x, weight, bias))
            return
        for drawn, result in zip(
            results, (torch.from_numpy(ours), *plain_and_exact(x, weight, bias, precision)), strict=True
        ):
            drawn.append(result)
    ours_all, plain, exact = (torch.stack(drawn) for drawn in results)
    assert_accurate(ours_all, plain, exact, f"{precision} {rows} x {n} x {k}")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_tail(precision: str) -> None:
    for n, k in itertools.product(COLUMNS, DEPTHS):
        for rows in (1, 5):
            check(precision, rows, n, k)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_number_of_rows(precision: str) -> None:
    for rows in range(71):
        check(precision, rows, 130, 37)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_more_rows_than_a_step_has(precision: str) -> None:
    check(precision, 523, 65, 300)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("k", [128, 255, 256, 257, 2048, 4095])
def test_long_sums(precision: str, k: int) -> None:
    """They are sums of sums, which are no less accurate than eager PyTorch's."""
    for rows in (1, 5, 16):
        check(precision, rows, 65, k)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_bias(precision: str) -> None:
    check(precision, 3, 65, 20, with_bias=False)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_depends_on_nothing_else(precision: str) -> None:
    x, weight, bias = draw(70, 203), draw(129, 203, seed=1), draw(129, seed=2)
    together = packed_linear()(x, weight, bias, precision)
    for rows in (1, 2, 4, 6, 7, 13, 14, 16, 27, 40, 64):
        np.testing.assert_array_equal(packed_linear()(x[:rows], weight, bias, precision), together[:rows])
    for row in range(70):
        np.testing.assert_array_equal(packed_linear()(x[row : row + 1], weight, bias, precision)[0], together[row])
    # Nor does a column depend on the panel that it stands in.
    np.testing.assert_array_equal(packed_linear()(x, weight[77:], bias[77:], precision), together[:, 77:])


def test_whole_numbers_are_kept_exactly() -> None:
    """A weight of int8's grid: products of whole numbers, scales of 1, must be exact to the last unit."""
    random = np.random.default_rng(3)
    x = random.integers(-100, 101, (9, 301)).astype(np.float32)
    weight = random.integers(-127, 128, (66, 301)).astype(np.float32)
    x[:, 7], x[:, 8], weight[:, 300] = -100, 155, -127
    x[4:] += 100  # rows without anything below zero
    exact = x.astype(np.int64) @ weight.astype(np.int64).T
    np.testing.assert_array_equal(packed_linear()(x, weight, None, "int8"), exact)
    # The largest sums that there are: no path may saturate.
    for sign in (1, -1):
        most = np.full((2, 4096), 255, np.float32)
        most[1] *= -1
        full = np.full((65, 4096), 127 * sign, np.float32)
        np.testing.assert_array_equal(packed_linear()(most, full, None, "int8"), most @ full.T)


def test_a_quantised_weight_packs_to_itself() -> None:
    """w = scale * q, in fp32, with a q of 127 in each row: unit rows of x read the q back."""
    random = np.random.default_rng(4)
    q = random.integers(-127, 128, (64, 256)).astype(np.float32)
    q[:, 5] = 127
    scale = np.exp(random.uniform(-20, 5, (64, 1))).astype(np.float32)
    read = packed_linear()(np.eye(256, dtype=np.float32), q * scale, None, "int8").T
    np.testing.assert_array_equal(np.rint(read / scale), q)
    np.testing.assert_allclose(read, q * scale, rtol=3e-7)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_stay_in_their_row(precision: str, value: float) -> None:
    x, weight = draw(14, 131), draw(70, 131, seed=1)
    clean = packed_linear()(x, weight, None, precision)
    for column in (0, 64, 130):
        broken = x.copy()
        broken[4, column] = value
        broken[4, (column + 1) % 131] = -value  # inf - inf
        ours = packed_linear()(broken, np.abs(weight), None, precision)
        assert np.isnan(ours[4]).all()
        ours = packed_linear()(broken, weight, None, precision)
        assert not np.isfinite(ours[4]).any()
        np.testing.assert_array_equal(np.delete(ours, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_in_the_weight_stays_in_its_column(precision: str) -> None:
    x, weight = draw(14, 131), draw(70, 131, seed=1)
    clean = packed_linear()(x, weight, None, precision)
    for place in (0, 129, 130):
        broken = weight.copy()
        broken[65, place] = np.nan
        ours = packed_linear()(x, broken, None, precision)
        assert np.isnan(ours[:, 65]).all()
        np.testing.assert_array_equal(np.delete(ours, 65, 1), np.delete(clean, 65, 1))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_products_are_empty(precision: str) -> None:
    x, weight, bias = draw(3, 40), draw(65, 40, seed=1), draw(65, seed=2)
    x[1], weight[64] = 0, 0
    ours = packed_linear()(x, weight, bias, precision)
    np.testing.assert_array_equal(ours[1], bias)
    np.testing.assert_array_equal(ours[:, 64], np.repeat(bias[64], 3))
    # Too small for a scale, and no NaN for that.
    ours = packed_linear()(x * np.float32(1e-42), weight, bias, precision)
    np.testing.assert_array_equal(ours, np.tile(bias, (3, 1)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_outputs_or_no_inputs(precision: str) -> None:
    assert packed_linear()(draw(3, 5), np.zeros((0, 5), np.float32), None, precision).shape == (3, 0)
    bias = draw(65)
    ours = packed_linear()(np.zeros((3, 0), np.float32), np.zeros((65, 0), np.float32), bias, precision)
    np.testing.assert_array_equal(ours, np.tile(bias, (3, 1)))


def test_wrong_calls() -> None:
    x, weight = draw(2, 4), draw(3, 4)
    with pytest.raises(ValueError, match="fp64"):
        packed_linear()(x, weight, None, "fp64")
    with pytest.raises(ValueError, match=r"\b66311\b.*\b66312\b"):
        packed_linear()(np.zeros((1, 66312), np.float32), np.zeros((1, 66312), np.float32), None, "int8")


# A process of test_other_paths: loads the module of an instruction set and writes the products of all cases.
PRODUCTS = """
found = {"features": np.array(module.cpu_features())}
given = np.load(cases)
def product(which, precision):
    before = module.num_brgemm_products()
    y = module.packed_linear(given[f"{which} x"], given[f"{which} weight"], given[f"{which} bias"], precision)
    return y, module.num_brgemm_products() - before
names = [name.removesuffix(" x") for name in given if name.endswith(" x")]
for which in names:
    for precision in ("fp32", "bf16", "int8"):
        found[f"{which} {precision}"], found[f"{which} {precision} brgemm"] = product(which, precision)
with torch.backends.mkldnn.flags(enabled=False):
    found["brgemm without oneDNN"] = sum(product(names[-1], precision)[1] for precision in ("bf16", "int8"))
np.savez(results, **found)
"""
PATHS = {
    "avx512 alone": ("avx512", {"FASTFORMER_CPU_FEATURES": ""}),
    "avx512, dot products": (
        "avx512",
        {"FASTFORMER_CPU_FEATURES": "avx512_vnni,avx512_bf16", "FASTFORMER_BRGEMM": "0"},
    ),
    "avx512, brgemm": ("avx512", {"FASTFORMER_BRGEMM": "1"}),
    "avx2 alone": ("avx2", {"FASTFORMER_CPU_FEATURES": ""}),
    "avx2, avx_vnni": ("avx2", {"FASTFORMER_CPU_FEATURES": "avx_vnni,avx512_bf16"}),
}


# Slow: paths that another one stands for: of the same code for wider vectors, and of libraries' products.
SLOW_PATHS = ("avx512 alone", "avx512, brgemm", "avx2, avx_vnni")


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow) if path in SLOW_PATHS else path for path in PATHS]
)
def test_other_paths(path: str, tmp_path: Path) -> None:
    """What CPUs with fewer instructions, or with AMX, do: the same integers, and floats by the rule."""
    isa, settings = PATHS[path]
    cases: dict[str, np.ndarray] = {}
    x, weight, bias = draw(70, 603), draw(129, 603, seed=1), draw(129, seed=2)
    x[7, 600] = np.nan
    numbers = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 32, 49, 64, 70)
    for rows in numbers:
        cases |= {f"{rows}-rows x": x[:rows], f"{rows}-rows weight": weight, f"{rows}-rows bias": bias}
    for rows, n, k in itertools.product((1, 9), (63, 65), (1, 2, 5, 63)):
        name = f"{rows}-{n}-{k}"
        cases |= {f"{name} x": draw(rows, k), f"{name} weight": draw(n, k, seed=1), f"{name} bias": draw(n, seed=2)}
    for rows, k in itertools.product((1, 9, 17), (255, 256, 257, 259, 512, 2050, 4095)):  # around blocks of float sums
        name = f"{rows}-long-{k}"
        cases |= {f"{name} x": draw(rows, k), f"{name} weight": draw(65, k, seed=1), f"{name} bias": draw(65, seed=2)}
    full = np.full((9, 999), 255, np.float32)
    for name, sign in (("largest", 1), ("least", -1)):
        cases |= {f"{name} x": full, f"{name} weight": full * sign, f"{name} bias": np.zeros(9, np.float32)}

    found = products_of(isa, PRODUCTS, settings, cases, tmp_path)

    allowed = settings.get("FASTFORMER_CPU_FEATURES")
    in_use = found.pop("features").tolist()
    if allowed is not None:
        assert in_use == [name for name in cpu_features() if name in allowed.split(",")]
    assert found.pop("brgemm without oneDNN") == 0
    taken = {name.removesuffix(" brgemm"): int(found.pop(name)) for name in list(found) if name.endswith(" brgemm")}
    assert len(found) == len(taken) == len(cases)
    needed = {"bf16": "avx512_bf16", "int8": "avx512_vnni"}  # for brgemm without AMX
    for name, ours in found.items():
        case, precision = name.split(" ")
        x, weight, bias = (cases[f"{case} {what}"] for what in ("x", "weight", "bias"))
        to_brgemm = settings.get("FASTFORMER_BRGEMM") == "1" and needed.get(precision) in in_use
        assert (taken[name] > 0) == (to_brgemm and (precision == "bf16" or len(x) >= 8)), name
        if precision == "int8":
            np.testing.assert_array_equal(ours, packed_linear()(x, weight, bias, "int8"), err_msg=name)
        elif len(x) * len(weight) > 500:
            assert_accurate(torch.from_numpy(ours), *plain_and_exact(x, weight, bias, precision), name)
        else:
            np.testing.assert_allclose(ours, packed_linear()(x, weight, bias, precision), rtol=1e-5, atol=1e-5)
        if case.endswith("-rows"):
            np.testing.assert_array_equal(ours, found[f"{numbers[-1]}-rows {precision}"][: len(x)], err_msg=name)
            assert np.isnan(ours[7:8]).all() and np.isfinite(np.delete(ours, 7, 0) if len(x) > 7 else ours).all()


@pytest.mark.slow
def test_a_feature_that_does_not_exist() -> None:
    """The extension says which of the names in FASTFORMER_CPU_FEATURES it doesn't know."""
    settings = {"FASTFORMER_CPU_FEATURES": "avx512_vnni,vnni"}
    ended = started(str(_extension.load()), "module.cpu_features()", settings, "", "")
    assert "ValueError: FASTFORMER_CPU_FEATURES" in ended.stderr and ended.stderr.rstrip().endswith("'vnni'")
