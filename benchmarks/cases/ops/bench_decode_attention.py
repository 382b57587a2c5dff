"""A decode step's attention to a cache, with a slot table or with beams on shared sources, beside PyTorch's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape, beside_eager, on_reference
from fastformer.ops import decode_attention

BLOCK_SIZE = 16


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes one query a row. All rows are full but for one token, so that rivals without lengths do the same work.

    A step appends its k and v. With beams nothing is written, and `beams` rows read one source.
    """
    beams = shape["beams"]
    rows, seqlen = shape["batch"] // max(beams, 1), shape["seqlen"]
    heads = shape["heads"], shape["head_dim"]
    kv_heads = shape["kv_heads"], shape["head_dim"]
    num_blocks = rows * -(-seqlen // BLOCK_SIZE)
    blocks = torch.randperm(num_blocks).view(rows, -1, 1)
    slots = (blocks * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)[:, :seqlen]
    inputs = {
        "q": torch.randn(shape["batch"], 1, *heads, device=device),
        "k_cache": torch.randn(num_blocks, BLOCK_SIZE, *kv_heads, device=device),
        "v_cache": torch.randn(num_blocks, BLOCK_SIZE, *kv_heads, device=device),
        "slots": slots.int().to(device),
        "lengths": torch.full((rows,), seqlen - (0 if beams else 1), dtype=torch.int32, device=device),
    }
    if beams:
        return inputs | {"rows": torch.arange(rows).repeat_interleave(beams).int().to(device)}
    return inputs | {name: torch.randn(shape["batch"], 1, *kv_heads, device=device) for name in "kv"}


def ours(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.decode_attention, with the table."""
    return decode_attention(
        x["q"], x["k_cache"], x["v_cache"], x["lengths"], k=x.get("k"), v=x.get("v"), slot_table=x["slots"],
        cache_batch_idx=x.get("rows"), is_causal=not shape["beams"],
    )  # fmt: skip


def _in_order(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a cache without a table: keys and values (batch, heads, seqlen, head_dim), with the new ones."""
    both = []
    for name in "kv":
        tokens = x[f"{name}_cache"].flatten(0, 1)
        if name in x:
            tokens = tokens.index_copy(0, x["slots"][:, -1].long(), x[name][:, 0])
        tokens = tokens[x["slots"].long()]
        both.append((tokens[x["rows"].long()] if "rows" in x else tokens).transpose(1, 2))
    return both[0], both[1]


def eager(x: Inputs, shape: Shape) -> torch.Tensor:
    """Eager baseline: gathers K and V (one copy per beam), then softmax(Q K^T) V."""
    k, v = (t.repeat_interleave(shape["heads"] // shape["kv_heads"], 1) for t in _in_order(x))
    q = x["q"].transpose(1, 2)
    return ((q @ k.transpose(-2, -1) * shape["head_dim"] ** -0.5).softmax(-1) @ v).transpose(1, 2)


# The cache that was last put in order, and its keys and values.
_in_memory: list[torch.Tensor] = []


def sdpa(backend: str | None = None) -> Provider:
    """Makes the provider of scaled_dot_product_attention on a cache in order; the reordering is not timed.

    Each beam has a copy of its source. PyTorch's flash attention splits long caches of few queries.
    """

    def run(x: Inputs, shape: Shape) -> torch.Tensor:
        if not _in_memory or _in_memory[0] is not x["k_cache"]:
            _in_memory[:] = x["k_cache"], *(t.contiguous() for t in _in_order(x))
        _, k, v = _in_memory
        options: dict[str, Any] = {"enable_gqa": True} if shape["heads"] != shape["kv_heads"] else {}
        q = x["q"].transpose(1, 2)
        with contextlib.nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return run


def flops(shape: Shape, mode: str) -> float:
    """Counts two products a query, head and key."""
    return 4.0 * shape["batch"] * shape["heads"] * shape["seqlen"] * shape["head_dim"]


def moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts each key and value once, however many beams read it, q, out, new tokens, and 4 bytes of table a key."""
    beams = shape["beams"]
    rows = shape["batch"] // max(beams, 1)
    token = 2 * shape["kv_heads"] * shape["head_dim"] * itemsize
    written = 0 if beams else shape["batch"] * token
    in_and_out = 2 * shape["batch"] * shape["heads"] * shape["head_dim"] * itemsize
    return float(rows * shape["seqlen"] * (token + 4) + written + in_and_out)


def _shapes(*sizes: tuple[int, int, int, int, int, int]) -> list[dict[str, Any]]:
    names = "batch", "beams", "seqlen", "heads", "kv_heads", "head_dim"
    return [dict(zip(names, size, strict=True)) for size in sizes]


BENCHMARKS = [
    Benchmark(
        name="decode_attention",
        shapes={
            # A translator's step: its own tokens, and the sources of its beams; and a language model's, short and long.
            "cpu": _shapes((16, 0, 64, 8, 8, 64), (64, 4, 64, 8, 8, 64), (1, 0, 1024, 16, 4, 64)),
            "cuda": _shapes(
                (1, 0, 4096, 32, 8, 128),
                (256, 4, 128, 8, 8, 64),
                (64, 0, 1024, 32, 8, 128),
                (256, 0, 64, 8, 8, 64),
                (1, 0, 512, 16, 16, 128),
                (1, 0, 65536, 32, 8, 128),
                (16, 0, 4096, 32, 32, 128),
                (16, 4, 4096, 16, 16, 64),
            ),
        },
        make_inputs=make_inputs,
        modes=("fwd", "replay"),
        flops=flops,
        moved=moved,
        only_on=dict.fromkeys(("sdpa flash in order", "sdpa cudnn in order"), "cuda"),
        **beside_eager(
            ours,
            eager,
            **{
                "fastformer reference": on_reference(ours),
                "sdpa in order": sdpa(),
                "sdpa flash in order": sdpa("FLASH_ATTENTION"),
                "sdpa cudnn in order": sdpa("CUDNN_ATTENTION"),
            },
        ),
    )
]
