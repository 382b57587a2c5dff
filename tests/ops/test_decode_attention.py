"""Tests decode_attention on every backend: its writes to the cache, and its attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from fastformer.ops import decode_attention, rotary_tables, use_backend
from tests.checks import assert_accurate, is_interpreted, small_draws
from tests.covering import each, on_backends
from tests.ops.attention_cases import Case, plain_attention
from tests.ops.test_attention import lacks, skip_unless_supported
from tests.ops.test_rotary import plain as plain_rotary


@dataclasses.dataclass(frozen=True)
class Step:
    """A call: how full the rows of the cache are, how many queries and new keys there are, and the options."""

    name: str
    seqlens: tuple[int, ...]
    seqlen_q: int = 1
    seqlen_new: int | None = 1
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    max_seqlen: int = 40
    is_causal: bool = True
    window_left: int | None = None
    softmax_scale: float | None = None
    cache_batch_idx: tuple[int, ...] | None = None
    rotary_dim: int = 0  # of head_dim, turned; 0 = without tables
    interleaved: bool = False
    softcap: float = 0.0

    def __str__(self) -> str:
        return self.name


STEPS = [
    Step("first-token", (0, 0)),
    Step("one-token", (7, 39)),
    Step("gqa", (30, 1, 12), num_kv_heads=2),
    Step("gqa-many-rows", (30, 1, 12, 7, 3, 0, 39, 20), num_kv_heads=2),  # a thread takes a row's heads together
    Step("gqa-many-rows-several", (30, 1, 12, 7, 3, 0, 37, 20), seqlen_q=3, seqlen_new=3, num_kv_heads=2),
    Step("head-dim-32", (30, 1, 12, 7, 3, 0, 39, 20), num_kv_heads=2, head_dim=32),
    Step("mqa", (30, 1), num_kv_heads=1, head_dim=64),
    Step("prefill", (0, 5), seqlen_q=9, seqlen_new=9),
    Step("several-tokens", (11, 3), seqlen_q=3, seqlen_new=3, num_kv_heads=2),
    Step("not-causal", (11, 3), seqlen_q=3, seqlen_new=3, is_causal=False),
    Step("window", (35, 2), window_left=4),
    Step("window-several", (20, 9), seqlen_q=5, seqlen_new=5, window_left=3),
    Step("cross", (17, 40), seqlen_new=None, is_causal=False),
    Step("cross-beams", (17, 3), seqlen_new=None, is_causal=False, cache_batch_idx=(0, 0, 0, 1, 1, 1)),
    Step("cross-beams-swapped", (17, 0, 40), seqlen_new=None, is_causal=False, cache_batch_idx=(2, 1, 0, 2)),
    Step("nothing-cached", (0, 4), seqlen_new=None, is_causal=False),
    Step("scale-head-dim-40", (9, 33), head_dim=40, softmax_scale=0.5),
    Step("softcap-gqa", (30, 1, 12), num_kv_heads=2, softcap=1.5),
    Step("softcap-several-rotary", (11, 0), 3, 3, 2, 2, rotary_dim=16, softcap=0.7, window_left=9),
    Step("softcap-prefill", (0, 12), 20, 20, 2, 2, softcap=1.5),
    Step("head-dim-256", (7, 39), num_kv_heads=1, head_dim=256, softcap=50.0),
    Step("long", (600, 411), max_seqlen=640, num_heads=2, num_kv_heads=1),
    Step("rotary", (0, 7, 39), num_kv_heads=2, rotary_dim=16),
    Step("rotary-interleaved", (30, 1), num_kv_heads=1, rotary_dim=16, interleaved=True),
    Step("rotary-several", (11, 0), seqlen_q=3, seqlen_new=3, head_dim=40, rotary_dim=24, window_left=9),
    Step("rotary-interleaved-part", (11, 3), seqlen_q=3, seqlen_new=3, head_dim=40, rotary_dim=24, interleaved=True),
    Step("rotary-more-new-than-queries", (3, 20), seqlen_q=2, seqlen_new=5, rotary_dim=16),
]
BY_NAME = {step.name: step for step in STEPS}


def make_inputs(step: Step, dtype: torch.dtype, device: str, unused: float = 1e4) -> dict[str, Tensor | None]:
    rows = len(step.seqlens)
    queries = rows if step.cache_batch_idx is None else len(step.cache_batch_idx)
    new = step.seqlen_new

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    cache = rows, step.max_seqlen, step.num_kv_heads, step.head_dim
    inputs = {
        "q": random(queries, step.seqlen_q, step.num_heads, step.head_dim),
        "k_cache": random(*cache),
        "v_cache": random(*cache),
        "cache_seqlens": torch.tensor(step.seqlens, dtype=torch.int32, device=device),
        "k": None if new is None else random(rows, new, *cache[2:]),
        "v": None if new is None else random(rows, new, *cache[2:]),
        "cache_batch_idx": None,
    }
    # What no length reaches has no influence (the reference multiplies it by a weight of 0, so there it is finite).
    for row, length in enumerate(step.seqlens):
        inputs["k_cache"][row, length:] = inputs["v_cache"][row, length:] = unused
    if step.cache_batch_idx is not None:
        inputs["cache_batch_idx"] = torch.tensor(step.cache_batch_idx, dtype=torch.int32, device=device)
    if step.rotary_dim:
        # Just as many positions as there are. The angles turn fast enough that the next position is another one.
        inputs["cos"], inputs["sin"] = rotary_tables(step.max_seqlen, step.rotary_dim, 100.0, device=device)
    return inputs


def turned(step: Step, inputs: dict[str, Tensor | None], name: str, row: int, dtype: torch.dtype) -> Tensor:
    """Returns one row of q or k in this dtype, rotated by its positions in the cache if the step has tables."""
    x = inputs[name][row][None].to(dtype)
    if step.rotary_dim:
        first = step.seqlens[row] + step.seqlen_new - x.shape[1]
        positions = torch.arange(first, first + x.shape[1], device=x.device)[None]
        x = plain_rotary(x, inputs["cos"], inputs["sin"], positions=positions, interleaved=step.interleaved)
    return x[0]


def assert_entered(
    step: Step,
    inputs: dict[str, Tensor | None],
    before: dict[str, Tensor],
    actual: dict[str, Tensor | None],
    slots: Tensor | None = None,
) -> None:
    """Checks that the caches contain a call's values bit by bit, and rotated keys by the rule, without other changes.

    Args:
        inputs: the inputs of the step, without a table.
        before: copies of the caches; they are written to.
        actual: the caches of the call.
        slots: the result of `through_table`, if a table was used.
    """
    for name in ("k", "v") if step.seqlen_new else ():
        was, now = (caches[f"{name}_cache"].view(-1, *inputs[name].shape[2:]) for caches in (before, actual))
        values: dict[str, list[Tensor]] = {"ours": [], "plain": [], "exact": []}
        for row, length in enumerate(step.seqlens):
            at = torch.arange(length, length + step.seqlen_new, device=now.device)
            at = row * step.max_seqlen + at if slots is None else slots[row, at]
            was[at] = now[at] if name == "k" and step.rotary_dim else inputs[name][row]
            values["ours"].append(now[at])
            values["plain"].append(turned(step, inputs, name, row, now.dtype))
            values["exact"].append(turned(step, inputs, name, row, torch.float64))
        if name == "k" and step.rotary_dim:
            ours, plain, exact = (torch.stack(rows) for rows in values.values())
            assert_accurate(ours, plain, exact, "turned keys")
    for name, cache in before.items():
        torch.testing.assert_close(actual[name], cache, rtol=0, atol=0, equal_nan=True)


def plain_step(step: Step, inputs: dict[str, Tensor | None], dtype: torch.dtype) -> Tensor:
    """Computes each row on its existing keys."""
    rows = step.cache_batch_idx or range(len(step.seqlens))
    case = Case(
        "", is_causal=step.is_causal, window_size=(step.window_left, None), softmax_scale=step.softmax_scale, batch=1,
        softcap=step.softcap,
    )  # fmt: skip
    outputs = []
    for index, row in enumerate(rows):
        pair = []
        for name in ("k", "v"):
            cached = inputs[f"{name}_cache"][row, : step.seqlens[row]]
            cached = cached.to(dtype)
            if inputs[name] is not None:
                new = turned(step, inputs, name, row, dtype) if name == "k" else inputs[name][row].to(dtype)
                cached = torch.cat([cached, new])
            pair.append(cached[None])
        q = (turned(step, inputs, "q", row, dtype) if step.rotary_dim else inputs["q"][index].to(dtype))[None]
        k, v = pair
        if k.shape[1] == 0:
            outputs.append(torch.zeros_like(q))
            continue
        outputs.append(plain_attention(q, k, v, None, None, case, torch.zeros(2, dtype=torch.int64))[0])
    return torch.cat(outputs)


def run(step: Step, inputs: dict[str, Tensor | None]) -> Tensor:
    options = {"is_causal": step.is_causal, "window_left": step.window_left, "softmax_scale": step.softmax_scale}
    if step.rotary_dim:
        options["interleaved"] = step.interleaved
    if step.softcap:
        options["softcap"] = step.softcap
    return decode_attention(**inputs, **options)


# tests/kernels has them, or the C++ kernels alone take them in another way than a row alone.
IN_KERNELS = {
    *("gqa-many-rows", "gqa-many-rows-several", "head-dim-32", "long", "rotary", "rotary-interleaved"),
    *("rotary-several", "rotary-interleaved-part", "rotary-more-new-than-queries", "cross-beams"),
}


@on_backends("step", STEPS, ["reference", "cpp", "triton"], ["fp32", "bf16"], lacks, IN_KERNELS)
def test_accuracy_and_cache(step: Step, dtype: torch.dtype, backend: str, device: str) -> None:
    if backend == "triton" and device != "cpu" and dtype == torch.float32 and step.head_dim > 128:
        pytest.skip("the kernel refuses such heads in fp32 on a device: the operands of three products would spill")
    ours, plain, exact = [], [], []
    for _ in range(small_draws()):
        inputs = make_inputs(step, dtype, device, unused=1e4 if backend == "reference" else torch.nan)
        plain.append(plain_step(step, inputs, dtype))
        exact.append(plain_step(step, inputs, torch.float64))
        before = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
        ours.append(run(step, inputs))
        assert_entered(step, inputs, before, inputs)
    assert_accurate(torch.stack(ours), torch.stack(plain), torch.stack(exact))


@each("key", [0, 15, 16, 36])
def test_one_key_far_above_the_others(key: int, backend: str, device: str) -> None:
    """With scores of 1000 and scores near 0, exp overflows unless the maximum is over all keys."""
    q, lengths = torch.ones(1, 1, 1, 8, device=device), torch.tensor([37], dtype=torch.int32, device=device)
    k, v = torch.rand(1, 40, 1, 8, device=device), torch.randn(1, 40, 1, 8, device=device)
    k[:, key] = 125.0
    out = decode_attention(q, k, v, lengths, softmax_scale=1.0)
    torch.testing.assert_close(out, v[:, key : key + 1], rtol=1e-6, atol=0)


def test_strided_caches_and_queries(backend: str, device: str) -> None:
    """A cache may be a layer of a larger one, and q a slice of a joint projection."""
    step = BY_NAME["gqa"]
    inputs = make_inputs(step, torch.float32, device)
    exact = plain_step(step, inputs, torch.float64)
    shape = inputs["k_cache"].shape
    both = torch.empty(shape[0], 2, *shape[1:], device=device)
    both[:, 0].copy_(inputs["k_cache"])
    both[:, 1].copy_(inputs["v_cache"])
    wide = torch.empty(*inputs["q"].shape[:2], 3, *inputs["q"].shape[2:], device=device)
    wide[:, :, 1].copy_(inputs["q"])
    out = run(step, inputs | {"k_cache": both[:, 0], "v_cache": both[:, 1], "q": wide[:, :, 1]})
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(both[2, 0, 12], inputs["k"][2, 0])


def through_table(
    step: Step, inputs: dict[str, Tensor | None], block_size: int = 4, shared: int = 0
) -> tuple[dict[str, Tensor | None], Tensor]:
    """Returns the same call with the tokens scattered over blocks, and the slot of each position, part of which is the
    table.

    Memory that must not be read is NaN in the cache, and an invalid slot in the table. The first `shared` positions of
    a row are those of row 0, as for beams with a common history.
    """
    rows, length, new = len(step.seqlens), step.max_seqlen, step.seqlen_new or 0
    k_cache = inputs["k_cache"]
    device = k_cache.device
    num_blocks = (rows * length + 5) // block_size + 1
    slots = torch.randperm(num_blocks * block_size, device=device)[: rows * length].view(rows, length)
    slots[:, :shared] = slots[0, :shared]
    table = torch.full((rows, length), -(2**31), dtype=torch.int32, device=device)
    table[:, ::2] = 2**31 - 1
    # The caches differ in their strides: the heads of the keys lie apart.
    shape = num_blocks, block_size, k_cache.shape[2], step.head_dim
    caches = {
        "k_cache": k_cache.new_full((*shape[:3], step.head_dim + 8), torch.nan)[..., : step.head_dim],
        "v_cache": k_cache.new_full(shape, torch.nan),
    }
    for row, filled in enumerate(step.seqlens):
        first = 0
        if step.window_left is not None:
            first = max(0, filled + new - step.seqlen_q - step.window_left)
        used = slice(min(first, filled), filled + new)  # what is read or written
        table[row, used] = slots[row, used].int()
        for name, cache in caches.items():
            tokens = cache.view(-1, *shape[2:])
            tokens[slots[row, first:filled]] = inputs[name][row, first:filled]
    wide = torch.stack((table, torch.zeros_like(table)), -1)
    return inputs | caches | {"slot_table": wide[..., 0]}, slots


TABLE_STEPS = [
    *STEPS,
    Step("table-window-prefill", (0, 40, 7), seqlen_q=20, seqlen_new=20, max_seqlen=70, window_left=6),
    Step("table-blocked", (30, 0), seqlen_q=20, seqlen_new=20, max_seqlen=64, num_kv_heads=2),
    Step("table-blocked-cross", (17, 40), seqlen_q=18, seqlen_new=None, is_causal=False, cache_batch_idx=(1, 0, 1)),
    Step("table-window-cross", (17, 40), seqlen_new=None, window_left=5, cache_batch_idx=(1, 0, 1)),
    Step("table-more-new-than-queries", (11, 4), seqlen_new=5, window_left=1),
    Step("table-empty-row", (0, 0, 3), seqlen_new=None),
    Step("table-many-rows", tuple(range(3, 30)), num_kv_heads=2, max_seqlen=31),
]


# The table's part in the interpreter: new tokens, sources of beams, windows, a cap, turned keys, and rows without keys.
INTERPRETED = {
    *("first-token", "mqa", "prefill", "several-tokens", "window-several", "cross-beams-swapped", "scale-head-dim-40"),
    *("softcap-gqa", "rotary-interleaved-part", "rotary-more-new-than-queries", "table-empty-row"),
    *("table-window-cross", "table-more-new-than-queries"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@each("step", TABLE_STEPS)
def test_table_gives_the_bits_of_the_identity(step: Step, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_supported(backend, dtype, device)
    if backend == "triton" and device != "cpu" and dtype == torch.float32 and step.head_dim > 128:
        pytest.skip("the kernel refuses such heads in fp32 on a device: the operands of three products would spill")
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernel has no fp64")
    if is_interpreted() and step.name not in INTERPRETED:
        pytest.skip("the interpreter is slow: tests/kernels has tables with windows, shares, rotary and groups")
    inputs = make_inputs(step, dtype, device)
    tabled, slots = through_table(step, inputs)
    before = {name: tabled[name].clone() for name in ("k_cache", "v_cache")}
    # In fp64 the compiler has its own mind about each instantiation of scalar loops.
    tolerance = 1e-13 if dtype == torch.float64 else 0.0
    torch.testing.assert_close(run(step, tabled), run(step, inputs), rtol=tolerance, atol=tolerance)
    assert_entered(step, inputs, before, tabled, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each("block_size", [1, 3, 16])
def test_beams_share_a_history(block_size: int, dtype: torch.dtype, backend: str, device: str) -> None:
    """Three beams have 20 tokens in common, and then their own: each behaves as if it were alone."""
    skip_unless_supported(backend, dtype, device)
    step = Step("beams", (23, 23, 23), num_kv_heads=2)
    inputs = make_inputs(step, dtype, device)
    for name in ("k_cache", "v_cache"):
        inputs[name][:, :20] = inputs[name][0, :20].clone()
    tabled, slots = through_table(step, inputs, block_size, shared=20)
    assert (slots[:, :20] == slots[0, :20]).all() and len(slots[:, 20:24].unique()) == 12
    assert torch.equal(run(step, tabled), run(step, inputs))


INT32 = {"dtype": torch.int32}


def test_positions_that_the_tables_do_not_have(backend: str, device: str) -> None:
    """On a CPU, this is an error before anything is written; a kernel can't raise one, and gives NaN in that row."""
    step = Step("rotary", (7, 3), rotary_dim=16)
    inputs = make_inputs(step, torch.float32, device)
    tables = {name: inputs[name][:7] for name in ("cos", "sin")}
    before = inputs["k_cache"].clone()
    if backend == "triton":
        out = run(step, inputs | tables)
        assert out[0].isnan().all() and out[1].isfinite().all()
        return
    if device != "cpu":
        pytest.skip("on a GPU PyTorch's own gather asserts, and ends the process's use of the device")
    with pytest.raises(IndexError, match=r"\bpositions\b"):
        run(step, inputs | tables)
    assert torch.equal(inputs["k_cache"], before)


@each("with_table", [False, True])
@each(
    "step, change, message",
    [
        (BY_NAME["one-token"], {"cache_seqlens": [7, 40]}, "cache_seqlens"),
        (BY_NAME["one-token"], {"cache_seqlens": [-1, 3]}, "cache_seqlens"),
        (BY_NAME["cross"], {"cache_seqlens": [7, 41]}, "cache_seqlens"),
        (BY_NAME["prefill"], {"cache_seqlens": [0, 32]}, "cache_seqlens"),
        (BY_NAME["cross-beams"], {"cache_batch_idx": [0, 0, 2, 1, 1, 1]}, "cache_batch_idx"),
        (BY_NAME["cross-beams"], {"cache_batch_idx": [0, 0, 1, 1, 1, -1]}, "cache_batch_idx"),
    ],
)
def test_numbers_that_the_cache_does_not_have(step, change, message, with_table, backend) -> None:
    if backend == "triton":
        pytest.skip("a kernel raises nothing: it asserts, on a device")
    inputs = make_inputs(step, torch.float32, "cpu")
    if with_table:
        inputs, _ = through_table(step, inputs)
    bad = {name: torch.tensor(values, dtype=torch.int32) for name, values in change.items()}
    before = inputs["k_cache"].clone()
    with pytest.raises(ValueError, match=message):
        run(step, inputs | bad)
    torch.testing.assert_close(inputs["k_cache"], before, rtol=0, atol=0, equal_nan=True)


WRITING = [
    Step("direct", (11, 4), seqlen_q=3, seqlen_new=3),
    Step("blocked", (11, 4), seqlen_q=20, seqlen_new=20),
    # Of the 14 and 7 positions only the last two are read; the last three are written.
    Step("narrow-window", (11, 4), seqlen_q=1, seqlen_new=3, window_left=1),
]


@each("step", WRITING)
@each("row, position", [(0, 0), (0, 10), (1, 4), (1, 6), (0, 11)])
@each("slot", [-1, 90, 2**31 - 1, -(2**31)])
def test_slots_that_the_cache_does_not_have(row: int, position: int, slot: int, step: Step, backend: str) -> None:
    """They are found before anything is written, among slots that are read or written, and nowhere else."""
    if backend == "triton":
        pytest.skip("a kernel raises nothing: it asserts, on a device")
    inputs, _ = through_table(step, make_inputs(step, torch.float32, "cpu"), block_size=6)
    assert inputs["k_cache"].shape[:2].numel() == 90
    inputs["slot_table"][row, position] = slot
    if step.window_left is not None and position < step.seqlens[row]:
        assert run(step, inputs).isfinite().all()
        return
    before = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    with pytest.raises(ValueError, match=rf"expected the slots that are written or read in \[0, 90\), got {slot}"):
        run(step, inputs)
    for name, cache in zip(("k_cache", "v_cache"), before, strict=True):
        torch.testing.assert_close(inputs[name], cache, rtol=0, atol=0, equal_nan=True)


def test_the_last_slot_is_one(backend: str) -> None:
    q, cache = torch.randn(1, 1, 1, 8), torch.randn(2, 3, 1, 8)
    table, length_one = torch.tensor([[5]], **INT32), torch.ones(1, **INT32)
    out = decode_attention(q, cache, cache.clone(), length_one, slot_table=table)
    torch.testing.assert_close(out[0, 0], cache[1, 2])


def test_a_cache_that_is_not_contiguous_in_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    step = BY_NAME["gqa"]
    inputs = make_inputs(step, torch.float32, "cpu")
    expected = run(step, inputs)
    turned = inputs | {"k_cache": inputs["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)}
    with use_backend("cpp"), pytest.raises(NotImplementedError, match=r"\bhead_dim\b"):
        run(step, turned)
    monkeypatch.setenv("FASTFORMER_STRICT", "0")
    torch.testing.assert_close(run(step, turned), expected)


@each("far", [2**62, 2**63 - 1, 2**70])
def test_a_window_beyond_all_numbers_hides_nothing(far: int, backend: str, device: str) -> None:
    inputs = make_inputs(BY_NAME["one-token"], torch.float32, device)
    expected = decode_attention(**{name: None if t is None else t.clone() for name, t in inputs.items()})
    assert torch.equal(decode_attention(**inputs, window_left=far), expected)


@each("max_seqlen", [16, 37])
@each("hidden", [0, 1, 2])
def test_a_window_that_hides_the_first_keys_of_a_full_row(hidden, max_seqlen, backend, device) -> None:
    """The last query of a row as long as its cache sees all keys but `hidden`: only a window that hides none is
    dropped.
    """
    q, new = (torch.ones(1, 1, 1, 8, device=device) for _ in range(2))
    k, v = torch.rand(1, max_seqlen, 1, 8, device=device), torch.randn(1, max_seqlen, 1, 8, device=device)
    k[:, :2] = 2.0  # as much as all others
    lengths = torch.tensor([max_seqlen - 1], dtype=torch.int32, device=device)
    caches = k.clone(), v.clone()
    out = decode_attention(q, *caches, lengths, k=new, v=new, window_left=max_seqlen - 1 - hidden)
    k[:, -1], v[:, -1] = new[:, 0], new[:, 0]
    weights = (k[0, hidden:, 0].double() @ q[0, 0, 0].double() * 8**-0.5).softmax(0)
    expected = (weights @ v[0, hidden:, 0].double()).float()
    torch.testing.assert_close(out[0, 0, 0], expected, rtol=1e-5, atol=1e-5)


def test_scattered_blocks(backend: str, device: str) -> None:
    """A single block, and blocks of one token, can be flattened with any other stride."""
    q, lengths = torch.randn(1, 1, 4, 16, device=device), torch.tensor([3], device=device, **INT32)
    table = torch.tensor([[2, 0, 1]], device=device, **INT32)
    wide = torch.randn(3, 3, 4, 16, device=device)
    for cache in (wide[:1], wide[:, :1]):
        expected = decode_attention(q, *(cache.contiguous().view(1, 3, 4, 16),) * 2, lengths)
        ours = decode_attention(q, cache, cache.clone(), lengths, slot_table=table)
        torch.testing.assert_close(ours, expected)


def test_a_repeated_call_is_checked_as_the_first(device: str) -> None:
    """Its geometry is not examined again, but its gradients and its values are; what it writes is counted."""
    q, k = torch.randn(2, 2, 1, 4, 16, device=device)
    cache = torch.randn(2, 8, 4, 16, device=device)
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)

    def step(q: Tensor = q, lengths: Tensor = lengths, cache: Tensor = cache) -> Tensor:
        return decode_attention(q, cache, cache, lengths, k=k, v=k)

    with torch.no_grad():
        counts = [cache._version, *((step(), cache._version)[1] for _ in range(4))]
        assert len(set(counts)) == 5
        assert not step().requires_grad
        with pytest.raises(ValueError, match="k and v of shape"):
            step(q[:1])
        with pytest.raises(ValueError, match="int32"):
            step(lengths=lengths.long())
        if device == "cpu":
            with pytest.raises(ValueError, match="cache_seqlens"):
                step(lengths=lengths + 9)
    assert not step().requires_grad  # with gradients enabled
    assert not step(q.clone().requires_grad_()).requires_grad
