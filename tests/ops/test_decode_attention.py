"""decode_attention on every backend: what enters the cache, and attention to what is in it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from fastformer.ops import decode_attention, use_backend
from tests.checks import assert_accurate
from tests.ops.attention_cases import Case, plain_attention
from tests.ops.test_attention import skip_unless_supported

DRAWS = 8


@dataclasses.dataclass(frozen=True)
class Step:
    """One call: how full the cache's rows are, how many queries and new keys come, and the options."""

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

    def __str__(self) -> str:
        return self.name


STEPS = [
    Step("first-token", (0, 0)),
    Step("one-token", (7, 39)),
    Step("gqa", (30, 1, 12), num_kv_heads=2),
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
    Step("long", (600, 411), max_seqlen=640, num_heads=2, num_kv_heads=1),
]


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
    return inputs


def plain_step(step: Step, inputs: dict[str, Tensor | None], dtype: torch.dtype) -> Tensor:
    """Row by row, on the keys that are there."""
    rows = step.cache_batch_idx or range(len(step.seqlens))
    case = Case(
        "", is_causal=step.is_causal, window_size=(step.window_left, None), softmax_scale=step.softmax_scale, batch=1
    )
    outputs = []
    for index, row in enumerate(rows):
        pair = []
        for name in ("k", "v"):
            held = inputs[f"{name}_cache"][row, : step.seqlens[row]]
            pair.append((held if inputs[name] is None else torch.cat([held, inputs[name][row]]))[None].to(dtype))
        q = inputs["q"][index][None].to(dtype)
        k, v = pair
        if k.shape[1] == 0:
            outputs.append(torch.zeros_like(q))
            continue
        outputs.append(plain_attention(q, k, v, None, None, case, torch.zeros(2, dtype=torch.int64))[0])
    return torch.cat(outputs)


def run(step: Step, inputs: dict[str, Tensor | None]) -> Tensor:
    options = {"is_causal": step.is_causal, "window_left": step.window_left, "softmax_scale": step.softmax_scale}
    return decode_attention(**inputs, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_accuracy_and_cache(step: Step, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_supported(backend, dtype, device)
    ours, plain, exact = [], [], []
    for _ in range(DRAWS):
        inputs = make_inputs(step, dtype, device, unused=1e4 if backend == "reference" else torch.nan)
        plain.append(plain_step(step, inputs, dtype))
        exact.append(plain_step(step, inputs, torch.float64))
        expected = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
        for row, length in enumerate(step.seqlens if step.seqlen_new else ()):
            for name in ("k", "v"):
                expected[f"{name}_cache"][row, length : length + step.seqlen_new] = inputs[name][row]
        ours.append(run(step, inputs))
        for name, cache in expected.items():
            torch.testing.assert_close(inputs[name], cache, rtol=0, atol=0, equal_nan=True)
    assert_accurate(torch.stack(ours), torch.stack(plain), torch.stack(exact))


@pytest.mark.parametrize("key", [0, 15, 16, 36])
def test_one_key_far_above_the_others(key: int, backend: str, device: str) -> None:
    """Scores of 1000 beside scores near 0: exp of the difference overflows unless the maximum is over every key."""
    q, lengths = torch.ones(1, 1, 1, 8, device=device), torch.tensor([37], dtype=torch.int32, device=device)
    k, v = torch.rand(1, 40, 1, 8, device=device), torch.randn(1, 40, 1, 8, device=device)
    k[:, key] = 125.0
    out = decode_attention(q, k, v, lengths, softmax_scale=1.0)
    torch.testing.assert_close(out, v[:, key : key + 1], rtol=1e-6, atol=0)


def test_strided_caches_and_queries(backend: str, device: str) -> None:
    """A cache may be a layer of a larger one, and q a slice of a joint projection."""
    step = STEPS[2]
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


def test_opcheck(device: str) -> None:
    inputs = make_inputs(STEPS[1], torch.float32, device)
    with use_backend("reference"):
        torch.library.opcheck(
            torch.ops.fastformer.decode_attention.default, (*inputs.values(), 0.25, True, None),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cache_seqlens": torch.zeros(2)}, r"expected cache_seqlens int32 of shape \(2,\)"),
        ({"v": None}, "expected k and v together"),
        ({"cache_batch_idx": torch.zeros(2, dtype=torch.int32)}, "expected no cache_batch_idx with k and v"),
        ({"k": torch.zeros(2, 1, 3, 16)}, r"expected k and v of shape \(2, 1, 4, 16\), got \(2, 1, 3, 16\)"),
        ({"k": torch.zeros(2, 1, 4, 16).double()}, "expected k and v in the cache's dtype torch.float32"),
        ({"q": torch.zeros(3, 1, 4, 16), "k": None, "v": None}, "as many queries as cache rows, got 3 and 2"),
    ],
)
def test_errors(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(STEPS[1], make_inputs(STEPS[1], torch.float32, "cpu") | change)
