"""Lengths, offsets and seeds may be columns of a larger tensor: every backend reads them with their stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastformer.ops import (
    add_layer_norm,
    attention,
    decode_attention,
    embedding,
    feed_forward,
    linear_cross_entropy,
    rotary,
    rotary_tables,
    use_backend,
    varlen_attention,
)
from tests.conftest import missing_backend

SEED = torch.tensor([2**40 + 5, 99])


def _column(integers: Tensor) -> Tensor:
    """The same integers, with others between them."""
    wide = torch.stack((integers, torch.full_like(integers, 3)), dim=-1)
    return wide[..., 0]


def _lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)


def _varlen(x: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    return varlen_attention(x, x, x, cu_seqlens_q, cu_seqlens_k, 6, 6)


def _decode(
    x: Tensor, cache_seqlens: Tensor, cache_batch_idx: Tensor | None = None, slot_table: Tensor | None = None
) -> Tensor:
    k_cache, v_cache = (_random(2, 9, 2, 16).detach() for _ in range(2))
    indices = {"cache_batch_idx": cache_batch_idx, "slot_table": slot_table}
    new = {} if cache_batch_idx is not None else {"k": x.detach(), "v": x.detach()}
    return decode_attention(x.detach(), k_cache, v_cache, cache_seqlens, **indices, **new)


# (stem, shape of x, the op as a function of x and of its integers, the integers)
OPS: dict[str, tuple[str, tuple[int, ...], Callable[..., Tensor], list[Tensor]]] = {
    "attention": ("attention", (2, 6, 1, 16), lambda x, n: attention(x, x, x, seqlens_k=n), [_lengths(6, 1)]),
    "attention-dropout": (
        "attention",
        (2, 6, 1, 16),
        lambda x, seed: attention(x, x, x, dropout_p=0.5, dropout_seed=seed),
        [SEED],
    ),
    "varlen_attention": ("attention", (9, 2, 16), _varlen, [_lengths(0, 2, 8, 9), _lengths(0, 6, 7, 9)]),
    "decode_attention": ("decode_attention", (2, 1, 2, 16), _decode, [_lengths(8, 1)]),
    "decode_attention-rows": (
        "decode_attention",
        (3, 1, 2, 16),
        _decode,
        [_lengths(9, 1), _lengths(1, 0, 1)],
    ),
    "decode_attention-table": (
        "decode_attention",
        (2, 1, 2, 16),
        lambda x, lengths, table: _decode(x, lengths, slot_table=table),
        [_lengths(3, 1), torch.tensor([[9, 4, 6, 17], [0, 5, 2, 1]], dtype=torch.int32)],
    ),
    "add_layer_norm": (
        "add_layer_norm",
        (5, 16),
        lambda x, seed: add_layer_norm(x, x, dropout_p=0.5, dropout_seed=seed)[0],
        [SEED],
    ),
    "feed_forward": (
        "feed_forward",
        (5, 16),
        lambda x, seed: feed_forward(x, x, None, x.T, None, dropout_p=0.5, dropout_seed=seed),
        [SEED],
    ),
    "embedding": (
        "embedding",
        (7, 16),
        lambda x, ids, positions, seed: embedding(
            ids, x, position_table=x, positions=positions, dropout_p=0.5, dropout_seed=seed
        ),
        [torch.tensor([[2, 6, 0]]), torch.tensor([[1, 5, 4]]), SEED],
    ),
    "linear_cross_entropy": (
        "linear_cross_entropy",
        (5, 16),
        lambda x, target: linear_cross_entropy(x, x, target),
        [torch.tensor([4, 0, 1, 2, 0])],
    ),
    "rotary": (
        "rotary",
        (4, 2, 16),
        lambda x, positions: rotary(x, *rotary_tables(9, 16), positions=positions),
        [torch.tensor([8, 0, 4, 1])],
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", OPS)
def test_a_column_counts_as_its_copy(name: str, backend: str, device: str) -> None:
    stem, shape, op, integers = OPS[name]
    if reason := missing_backend(backend, stem):
        pytest.skip(reason)
    if device != "cpu" and backend == "triton":
        pytest.skip("through the interpreter, on a CPU")
    results = []
    for arguments in (integers, [_column(each) for each in integers]):
        x = _random(*shape)
        with use_backend(backend):
            out = op(x, *arguments)
            gradients = torch.autograd.grad(out, x, torch.ones_like(out)) if out.requires_grad else ()
        results.append((out, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
