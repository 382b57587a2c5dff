"""Tests the Triton decode_attention: split walks, tiles of several rows, writes and edge cases."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fastformer.kernels import _decode_attention_configs as configs  # noqa: E402
from fastformer.kernels import _launch  # noqa: E402
from fastformer.kernels import decode_attention as kernels  # noqa: E402
from fastformer.ops import decode_attention, rotary  # noqa: E402
from tests.checks import assert_accurate  # noqa: E402
from tests.conftest import CallsOf  # noqa: E402
from tests.covering import by_turns, covering  # noqa: E402
from tests.ops.test_decode_attention import Step, assert_entered, make_inputs, plain_step, run, through_table  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")
BLOCK_N = configs.INTERPRETED_TILE.block_n


def force(monkeypatch: pytest.MonkeyPatch, splits: int | None = None, rows: int | None = None) -> None:
    """Forces the launcher's choices: the splits of a walk, and the rows of a tile."""
    if splits is not None:
        monkeypatch.setattr(kernels, "splits_of", lambda *_: splits)
    if rows is not None:
        monkeypatch.setattr(kernels, "rows_together", lambda *_: rows)


def check(step: Step, dtype: torch.dtype, device: str, table: bool = False) -> None:
    """Checks one call by the rule, with NaN in all memory that must not be read, and the updated caches bit by bit."""
    inputs = make_inputs(step, dtype, device, unused=torch.nan)
    plain, exact = plain_step(step, inputs, dtype), plain_step(step, inputs, torch.float64)
    call, slots = inputs, None
    if table:
        call, slots = through_table(step, inputs)
    before = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    assert_accurate(run(step, call), plain, exact)
    assert_entered(step, inputs, before, call, slots)


# Lengths around the blocks, none at all, and more shares than blocks.
SPLIT_STEPS = [
    Step("step", (0, BLOCK_N - 1, BLOCK_N, 5 * BLOCK_N + 3), num_heads=2, num_kv_heads=1, max_seqlen=100),
    Step("window", (3, 60), seqlen_q=3, seqlen_new=3, num_heads=2, num_kv_heads=1, max_seqlen=70, window_left=21),
    Step("cross", (0, 49, 16), seqlen_new=None, is_causal=False, num_heads=2, num_kv_heads=1, max_seqlen=49),
    Step("more-new-than-queries", (11, 40), seqlen_new=5, window_left=1, max_seqlen=64, num_heads=1, num_kv_heads=1),
]  # fmt: skip


@pytest.mark.parametrize("splits, table", [(1, True), (2, False), (3, True), (20, False)])
@pytest.mark.parametrize("step", SPLIT_STEPS, ids=str)
def test_any_number_of_shares(step, splits, table, device, monkeypatch) -> None:
    force(monkeypatch, splits)
    check(step, torch.float32, device, table)


# Lengths with the new tokens in a block of their own, in one with old ones, over the edge of one; all at position 0.
ROTARY_STEPS = [
    Step("step", (0, BLOCK_N - 1, BLOCK_N, 5 * BLOCK_N + 3), num_heads=2, num_kv_heads=1, max_seqlen=100),
    Step("window", (3, 62), seqlen_q=3, seqlen_new=3, num_heads=2, num_kv_heads=1, max_seqlen=70, window_left=21),
    Step("new-apart", (11, 40), seqlen_q=2, seqlen_new=5, window_left=1, max_seqlen=64, num_heads=1, num_kv_heads=1),
    Step("two-blocks-of-new", (0, 9), seqlen_q=20, seqlen_new=20, num_heads=2, num_kv_heads=1, max_seqlen=64),
]


@pytest.mark.parametrize(
    "step, rotary_dim, interleaved, splits, table",
    covering(
        ROTARY_STEPS, [(16, False), (16, True), (12, False), (4, True)], [(1, True), (2, False), (3, True), (20, False)]
    ),
    ids=str,
)
def test_rotary_in_any_number_of_shares(step, rotary_dim, interleaved, splits, table, device, monkeypatch) -> None:
    force(monkeypatch, splits)
    check(replace(step, rotary_dim=rotary_dim, interleaved=interleaved), torch.float32, device, table)


@pytest.mark.parametrize(
    "dtype, head_dim, group, interleaved",
    by_turns([torch.float32, torch.float16], [(64, 1, True), (64, 8, False), (128, 4, True), (128, 2, False)]),
)
def test_rotary_of_large_heads(head_dim, group, interleaved, dtype, device, monkeypatch) -> None:
    force(monkeypatch, 3)
    sizes = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "max_seqlen": 90}
    step = Step("", (0, 80, 33), rotary_dim=head_dim, interleaved=interleaved, **sizes)
    check(step, dtype, device, table=True)


def test_rotary_of_strided_tensors(device: str) -> None:
    """Inputs are slices of a joint projection; tables are strided, transposed, or in half precision."""
    step = Step("", (20, 7), num_heads=6, num_kv_heads=2, rotary_dim=16)
    inputs = make_inputs(step, torch.float32, device)
    expected = run(step, {name: None if t is None else t.clone() for name, t in inputs.items()})
    qkv = torch.cat((inputs["q"], inputs["k"], inputs["v"]), 2)
    joint = dict(zip("qkv", qkv.split((6, 2, 2), 2), strict=True))
    wide = {name: torch.cat((inputs[name],) * 2, 1)[:, 8:16] for name in ("cos", "sin")}
    assert torch.equal(run(step, inputs | joint | wide), expected)
    turned = {name: inputs[name].T.contiguous().T for name in ("cos", "sin")}
    assert torch.equal(run(step, inputs | joint | turned), expected)
    half = {name: inputs[name].half() for name in ("cos", "sin")}
    rounded = {name: t.float() for name, t in half.items()}
    # Two binaries, whose products and sums a GPU's compiler contracts as it likes.
    tolerance = 0.0 if device == "cpu" else 1e-5
    torch.testing.assert_close(run(step, inputs | half), run(step, inputs | rounded), rtol=tolerance, atol=tolerance)


def test_rotated_keys_equal_the_ops(device: str) -> None:
    """They are bit-identical if no compiler contracts products and sums: the cache doesn't depend on where keys are
    rotated.
    """
    if device != "cpu":
        pytest.skip("a GPU's compiler contracts as it likes")
    for interleaved in (False, True):
        step = Step("", (20, 0, 7), seqlen_q=2, seqlen_new=2, rotary_dim=12, interleaved=interleaved)
        inputs = make_inputs(step, torch.float16, device)
        positions = inputs["cache_seqlens"][:, None] + torch.arange(2)
        expected = rotary(inputs["k"], inputs["cos"], inputs["sin"], positions=positions, interleaved=interleaved)
        run(step, inputs)
        for row, length in enumerate(step.seqlens):
            assert torch.equal(inputs["k_cache"][row, length : length + 2], expected[row])


# Neighbours of one source, of several, one source in two places, an empty one; sizes that fill no tile.
BEAM_STEPS = [
    Step("one-source", (33,), seqlen_new=None, cache_batch_idx=(0,) * 5),
    Step("two-sources", (33, 7), seqlen_new=None, cache_batch_idx=(0, 0, 0, 1, 1, 1)),
    Step("apart", (20, 0, 33, 9), seqlen_new=None, cache_batch_idx=(2, 1, 2, 0, 3, 0, 2, 1, 3)),
    Step("all-differ", (5, 17, 0, 16), seqlen_new=None, cache_batch_idx=(3, 2, 1, 0)),
    Step("gqa", (33, 7), seqlen_new=None, num_kv_heads=2, cache_batch_idx=(0, 0, 0, 1, 1, 1)),
    Step("tokens", (33, 7), seqlen_q=3, seqlen_new=None, num_kv_heads=4, cache_batch_idx=(0, 0, 1, 1)),
    Step("tokens-window", (33, 7), seqlen_q=3, seqlen_new=None, window_left=9, cache_batch_idx=(0, 1, 1)),
]


@pytest.mark.parametrize("shifted", [None, "k_cache", "v_cache", "k", "v"])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_no_address_is_said_to_be_aligned_that_is_not(head_dim, shifted, device, monkeypatch) -> None:
    """A GPU would fault."""
    flags: list[bool] = []
    monkeypatch.setattr(_launch, "interceptor", lambda kernel, grid, args, options: flags.append(options["ALIGNED"]))
    shapes = {"k_cache": (2, 8, 1, head_dim), "v_cache": (2, 8, 1, head_dim)}
    shapes |= {name: (2, 1, 1, head_dim) for name in ("k", "v")}
    tensors = {
        name: torch.zeros(math.prod(shape) + 1, device=device)[int(name == shifted) :][: math.prod(shape)].view(shape)
        for name, shape in shapes.items()
    }
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    decode_attention(torch.zeros(2, 1, 1, head_dim, device=device), cache_seqlens=lengths, **tensors)
    assert flags == [shifted is None and head_dim == 16]


@pytest.mark.parametrize("step, rows, splits", by_turns(BEAM_STEPS, [(2, 3), (4, 1), (8, 1), (8, 3)]), ids=str)
def test_rows_that_read_one_source(step, rows, splits, device, monkeypatch) -> None:
    force(monkeypatch, splits, rows)
    check(step, torch.float32, device, table=rows != 8)


def test_infinities_stay_in_their_source(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other sources share its tile, and enter its products with weight 0."""
    force(monkeypatch, 1, 4)
    step = Step("beams", (20, 20), seqlen_new=None, cache_batch_idx=(0, 0, 1, 1))
    inputs = make_inputs(step, torch.float32, device)
    expected = run(step, inputs)
    k_cache, v_cache = inputs["k_cache"], inputs["v_cache"]
    assert k_cache is not None and v_cache is not None
    v_cache[0, 3, 1, 5] = torch.inf
    k_cache[0, 4, 2] = torch.nan
    out = run(step, inputs)
    assert torch.equal(out[2:], expected[2:])
    assert not out[:2, :, 1:3].isfinite().all(-1).any() and torch.equal(out[:2, :, 0], expected[:2, :, 0])


def test_each_source_is_loaded_once(device: str, calls_of: CallsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are counted by reads of table entries: one pass per tile and head, and not per row."""
    force(monkeypatch, 1, 8)
    if device != "cpu":
        pytest.skip("counted in the interpreter")
    loads = calls_of(kernels, "_slots")
    step = Step("beams", (33, 7), seqlen_new=None, num_kv_heads=2, cache_batch_idx=(0, 0, 0, 0, 1, 1, 1, 1))
    tensors, _ = through_table(step, make_inputs(step, torch.float32, device))
    run(step, tensors)
    assert sum(int(call.args[4].handle.data.sum()) for call in loads) == 2 * (33 + 7)  # K/V heads x keys


@pytest.mark.parametrize("shares", [1, 3])
def test_no_write_outside_the_rows(shares, device, guarded, monkeypatch) -> None:
    """The memory around the caches, out and the partial results doesn't change."""
    force(monkeypatch, shares)
    step = Step("step", (39, 0, 17), num_kv_heads=2, head_dim=20)
    inputs = make_inputs(step, torch.float32, device, unused=torch.nan)
    wide = {name: torch.full((5, 40, 2, 24), torch.nan, device=device) for name in ("k_cache", "v_cache")}
    for name, cache in wide.items():
        cache[1:4, :, :, :20].copy_(inputs[name])
    expected = run(step, inputs)
    views = {name: cache[1:4, :, :, :20] for name, cache in wide.items()}
    before = {name: cache.clone() for name, cache in wide.items()}
    assert torch.equal(run(step, inputs | views), expected)
    for name, cache in wide.items():
        before[name][1:4, :, :, :20].copy_(inputs[name])
        torch.testing.assert_close(cache, before[name], rtol=0, atol=0, equal_nan=True)


def test_many_tiles_of_one_row(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more queries and heads than rows in a tile, each tile has its own range of keys, and one writes new
    keys.
    """
    for splits, table, window_left in ((1, False, None), (2, True, 7)):
        force(monkeypatch, splits)
        sizes = {"num_heads": 2, "num_kv_heads": 1, "max_seqlen": 50}
        step = Step("", (0, 21), seqlen_q=27, seqlen_new=27, window_left=window_left, **sizes)
        check(step, torch.float32, device, table)


def test_fp16(device: str) -> None:
    for step in (SPLIT_STEPS[0], BEAM_STEPS[4]):
        check(step, torch.float16, device, table=True)


def test_no_queries_still_write(device: str) -> None:
    q, k = torch.empty(2, 0, 4, 16, device=device), torch.randn(2, 3, 2, 16, device=device)
    caches = torch.zeros(2, 2, 9, 2, 16, device=device)
    lengths = torch.tensor([4, 0], dtype=torch.int32, device=device)
    assert decode_attention(q, caches[0], caches[1], lengths, k=k, v=2 * k).shape == q.shape
    assert torch.equal(caches[0, 0, 4:7], k[0]) and torch.equal(caches[1, 1, :3], 2 * k[1])
    assert int(caches.count_nonzero()) == 2 * k.numel()


def test_calls_with_nothing_to_do(device: str) -> None:
    lengths = torch.zeros(0, dtype=torch.int32, device=device)
    empty = torch.empty(0, 5, 2, 8, device=device)
    assert decode_attention(torch.empty(0, 1, 2, 8, device=device), empty, empty, lengths).shape == (0, 1, 2, 8)
    q, no_room = torch.randn(2, 1, 2, 8, device=device), torch.empty(2, 0, 2, 8, device=device)
    out = decode_attention(q, no_room, no_room, torch.zeros(2, dtype=torch.int32, device=device))
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "change, rows",
    [
        ({"cache_seqlens": [40, 7]}, [0]),
        ({"cache_seqlens": [7, -1]}, [1]),
        ({"cache_seqlens": [2**31 - 1, -(2**31)]}, [0, 1]),
        ({"slot_table": [[90] * 40, [5] * 40]}, [0]),
        ({"slot_table": [[1] * 40, [-1] * 40]}, [1]),
        ({"cache_batch_idx": [0, 2, -1, 1]}, [1, 2]),
        ({"cache_batch_idx": [2**31 - 1, 1, 1, 1]}, [0]),
    ],
)
def test_tokens_outside_the_cache_give_nan(change, rows, splits, device, monkeypatch) -> None:
    """A kernel can't raise an error, so these rows are NaN, and nothing is read or written outside the caches."""
    force(monkeypatch, splits, 4)
    inputs = make_inputs(Step("", (7, 20), num_heads=2, num_kv_heads=1), torch.float32, device)
    if "cache_batch_idx" in change:
        inputs |= {"q": torch.randn(4, 1, 2, 16, device=device), "k": None, "v": None}
    if "slot_table" in change:
        change["cache_seqlens"] = [0, 0]
    bad = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in change.items()}
    out = decode_attention(**inputs | bad)
    assert out.isnan().flatten(1).all(1).nonzero().flatten().tolist() == rows
    assert int(out.isnan().flatten(1).any(1).sum()) == len(rows)


LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 129, 500, 999, 1000]


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_beams_and_groups(length: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits, new tokens and windows are drawn; all beams and groups are tested at each length, each pair at three."""
    choose = random.Random(length)
    pairs = itertools.product(range(1, 9), range(1, 9))
    for beams, group in (pair for pair in pairs if (sum(pair) + LENGTHS.index(length)) % 4 == 0):
        heads = group * choose.choice((1, 2))
        sizes = {"num_heads": heads, "num_kv_heads": heads // group, "max_seqlen": length + 6}
        lengths = tuple(choose.choice((length, choose.randint(0, length), 0)) for _ in range(3))
        window_left = choose.choice((None, None, 0, choose.randint(1, length)))
        queries = choose.choice((1, 1, 2, 5))
        force(monkeypatch, choose.choice((1, 2, 3, 7, 40)), choose.choice((1, 2, 4, 8)) if queries * group <= 4 else 1)
        index = tuple(row for row in range(3) for _ in range(beams))
        cross = Step(
            "", lengths, seqlen_q=queries, seqlen_new=None, is_causal=choose.random() < 0.5, cache_batch_idx=index,
            window_left=window_left, **sizes,
        )  # fmt: skip
        check(cross, torch.float32, device, table=choose.random() < 0.5)
        new = choose.choice((1, 1, 2, 5))
        rotary_dim, interleaved = choose.choice((0, 2, 10, 16)), choose.random() < 0.5
        case = Step(
            "", lengths, seqlen_q=new, seqlen_new=new, window_left=window_left, rotary_dim=rotary_dim,
            interleaved=interleaved, **sizes,
        )  # fmt: skip
        check(case, torch.float32, device, table=choose.random() < 0.5)
