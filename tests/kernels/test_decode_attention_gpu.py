"""Tests decode_attention on a GPU: bf16, shipped tiles, default splits, CUDA graphs, large offsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fastformer.kernels._decode_attention_configs import LARGEST_FP32_HEAD_DIM  # noqa: E402
from fastformer.ops import decode_attention  # noqa: E402
from tests.kernels.repeats import assert_repeats  # noqa: E402
from tests.kernels.test_decode_attention import check, force  # noqa: E402
from tests.ops.test_decode_attention import Step, make_inputs, run, through_table  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_triton")]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (128, 128), (80, 80), (128, 32), (256, 256)])
@pytest.mark.parametrize("splits", [None, 1, 7])
def test_rotary(splits, head_dim, rotary_dim, dtype, interleaved, monkeypatch) -> None:
    if dtype == torch.float32 and head_dim > LARGEST_FP32_HEAD_DIM:
        pytest.skip("the kernel refuses it")
    force(monkeypatch, splits)
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim, "max_seqlen": 1010}
    turns = {"rotary_dim": rotary_dim, "interleaved": interleaved}
    check(Step("", LENGTHS, **turns, **sizes), dtype, "cuda", table=True)
    check(Step("", LENGTHS, seqlen_q=5, seqlen_new=5, window_left=130, **turns, **sizes), dtype, "cuda")


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = (0, 1, 63, 64, 65, 127, 500, 1000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_steps(group: int, head_dim: int, table: bool, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and head_dim > LARGEST_FP32_HEAD_DIM:
        pytest.skip("the kernel refuses it")
    sizes = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "max_seqlen": 1010}
    check(Step("", LENGTHS, **sizes), dtype, "cuda", table)
    check(Step("", LENGTHS, seqlen_q=5, seqlen_new=5, window_left=130, **sizes), dtype, "cuda", table)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beams", [1, 4, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries, group", [(1, 1), (1, 8), (3, 2)])
def test_beams(queries: int, group: int, head_dim: int, beams: int, dtype: torch.dtype) -> None:
    index = tuple(row for row in range(len(LENGTHS)) for _ in range(beams))
    sizes = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "max_seqlen": 1000, "seqlen_q": queries}
    for window_left in (None, 99):
        options = {"seqlen_new": None, "is_causal": queries == 3, "window_left": window_left}
        check(Step("", LENGTHS, cache_batch_idx=index, **options, **sizes), dtype, "cuda", table=True)
    check(Step("", LENGTHS, cache_batch_idx=index[::-1], seqlen_new=None, **sizes), dtype, "cuda")


@pytest.mark.parametrize("splits", [1, 2, 7, 128])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_forced_shares(rows: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, splits, rows)
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "max_seqlen": 1010}
    check(Step("", LENGTHS, **sizes), torch.bfloat16, "cuda", table=True)
    index = tuple(row for row in range(len(LENGTHS)) for _ in range(5))
    check(Step("", LENGTHS, seqlen_new=None, cache_batch_idx=index, **sizes), torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts(head_dim: int) -> None:
    """A row has many tiles and hundreds of new tokens."""
    sizes = {"num_heads": 16, "num_kv_heads": 2, "head_dim": head_dim, "max_seqlen": 700}
    for window_left in (None, 50):
        check(Step("", (0, 300, 77), seqlen_q=200, seqlen_new=200, window_left=window_left, **sizes), torch.bfloat16,
              "cuda", table=True)  # fmt: skip


def _step(inputs: dict[str, Tensor | None]) -> Tensor:
    return decode_attention(**inputs)


@pytest.mark.parametrize("beams, rotary_dim", [(0, 0), (0, 64), (4, 0)])
def test_a_graph_replays_with_other_lengths(beams: int, rotary_dim: int) -> None:
    """It is captured at the shortest length and replayed step after step: lengths, tables, rows and tokens change in
    place.
    """
    index = tuple(row for row in range(3) for _ in range(beams)) or None
    step = Step(
        "", (999, 500, 0), seqlen_new=None if beams else 1, num_heads=16, num_kv_heads=4, head_dim=64, max_seqlen=1000,
        cache_batch_idx=index, rotary_dim=rotary_dim,
    )  # fmt: skip
    static, _ = through_table(step, make_inputs(step, torch.bfloat16, "cuda", unused=torch.nan))
    lengths = static["cache_seqlens"]
    assert lengths is not None
    last = lengths.clone()
    lengths.zero_()
    _step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(static)
    for used in (0, 1, 64, 499, 999, 3):
        lengths.copy_(last.clamp(max=used))
        for name in ("q", "k", "v"):
            if static[name] is not None:
                static[name].copy_(torch.randn_like(static[name]))
        if static["cache_batch_idx"] is not None:
            static["cache_batch_idx"].copy_(static["cache_batch_idx"].roll(1))
        else:
            # All that a row may hold has to have a slot, and the one that it writes.
            static["slot_table"].copy_(torch.arange(3000, device="cuda").view(3, 1000))
            for name in ("k_cache", "v_cache"):
                static[name].nan_to_num_(0.5)
        expected = _step({name: None if t is None else t.clone() for name, t in static.items()})
        graph.replay()
        assert captured.isfinite().all() and torch.equal(captured, expected), used


def test_repeats_to_the_bit() -> None:
    step = Step("", (1000, 400, 0, 77), num_heads=32, num_kv_heads=8, head_dim=128, max_seqlen=4096)
    inputs, _ = through_table(step, make_inputs(step, torch.bfloat16, "cuda"))
    assert_repeats(lambda: [run(step, inputs)])


def test_beyond_32_bits() -> None:
    """In a store of more than 2**31 elements, the last slots behave like the first ones."""
    tokens, heads, head_dim = 2**31 // 512 + 1000, 4, 128
    cache = torch.zeros(tokens, 1, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(600, device="cuda", dtype=torch.int32)[None]
    q, k, v = (torch.randn(1, 1, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cache[:600].normal_()
    cache[-600:] = cache[:600]
    lengths = torch.tensor([599], device="cuda", dtype=torch.int32)
    outputs = []
    for slots in (table, table + (tokens - 600)):
        outputs.append(decode_attention(q, cache, cache.clone(), lengths, k=k, v=v, slot_table=slots))
        assert torch.equal(cache[int(slots[0, 599])], k[0])
    assert torch.equal(*outputs)
