"""Compares FlopCounterMode's counts for ops and layers with those for torch.nn's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import fastformer.nn as fast
from fastformer import ops
from fastformer.ops import _dispatch, _flops, use_backend

BATCH, SEQLEN, DIM, HEADS, HIDDEN = 2, 5, 16, 4, 24
PRODUCT = 2 * BATCH * SEQLEN * SEQLEN * DIM  # of queries and keys


def count(call: Any, *, backward: bool) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = call()
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_counts_as_torchs(norm_first: bool, masked: bool) -> None:
    """Backward recomputes the scores, one more product, as torch counts its fused attention."""
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    reference = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, **options)
    ours = fast.TransformerEncoderLayer(DIM, HEADS, HIDDEN, **options)
    x = torch.randn(BATCH, SEQLEN, DIM, requires_grad=True)
    mask = torch.ones(SEQLEN, SEQLEN).triu(1).bool() if masked else None
    assert count(lambda: ours(x, mask), backward=False) == count(lambda: reference(x, mask), backward=False) > 0
    both = [count(lambda layer=layer: layer(x, mask), backward=True) for layer in (ours, reference)]
    assert both[0] - both[1] == PRODUCT
    with torch.no_grad():
        assert count(lambda: ours.eval()(x, mask), backward=False) == count(lambda: reference(x, mask), backward=False)


def test_attention_counts_as_torchs_fused_attention() -> None:
    q, k = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 5, 2, 8, requires_grad=True)
    # Grouped heads cost what heads of their own cost, and the counter of PyTorch 2.11 knows no groups.
    shapes = [(2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)]
    forward = flop_counter.sdpa_flop_count(*shapes)
    backward = flop_counter.sdpa_backward_flop_count(shapes[0], *shapes)
    assert count(lambda: ops.attention(q, k, k, is_causal=True), backward=False) == forward
    assert count(lambda: ops.attention(q, k, k, is_causal=True), backward=True) == forward + backward


def test_packed_attention_counts_only_pairs_within_a_sequence() -> None:
    q, k = torch.randn(5, 4, 8, requires_grad=True), torch.randn(9, 2, 8)
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 2, 5], [0, 5, 9]))
    pairs = 2 * 5 + 3 * 4
    call = lambda: ops.varlen_attention(q, k, k, cu_q, cu_k, 3, 5)  # noqa: E731
    assert count(call, backward=False) == 2 * 2 * pairs * 4 * 8
    assert count(call, backward=True) == 7 * 2 * pairs * 4 * 8


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_feed_forward_network(activation: str) -> None:
    hidden = 2 * HIDDEN if activation == "swiglu" else HIDDEN
    x, w1, w2 = (torch.randn(s, requires_grad=True) for s in ((2, 3, DIM), (hidden, DIM), (DIM, HIDDEN)))
    products = 2 * 6 * DIM * (hidden + HIDDEN)
    call = lambda: ops.feed_forward(x, w1, None, w2, None, activation=activation)  # noqa: E731
    assert count(call, backward=False) == products
    assert count(call, backward=True) == 3 * products


def test_a_linear_layer_that_is_an_op() -> None:
    x, weight, bias = (
        torch.randn(2, 3, DIM, requires_grad=True),
        torch.randn(9, DIM, requires_grad=True),
        torch.randn(9),
    )
    with use_backend("reference"):
        assert count(lambda: ops.linear(x, weight, bias), backward=True) == 3 * 2 * 6 * DIM * 9


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True)])
def test_the_loss_counts_only_the_wanted_gradients(reduction: str, learns: tuple[bool, bool]) -> None:
    x, weight = torch.randn(6, DIM, requires_grad=learns[0]), torch.randn(9, DIM, requires_grad=learns[1])
    target, product = torch.arange(6), 2 * 6 * DIM * 9
    recomputes = reduction == "none"  # it computes the logits a second time
    call = lambda: ops.linear_cross_entropy(x, weight, target, reduction=reduction)  # noqa: E731
    assert count(call, backward=True) == (1 + sum(learns) + recomputes) * product


def test_decoding() -> None:
    q, cache = torch.randn(2, 1, 4, 8), torch.zeros(2, 7, 2, 8)
    seqlens = torch.tensor([1, 2], dtype=torch.int32)
    assert count(lambda: ops.decode_attention(q, cache, cache, seqlens), backward=False) == 4 * 2 * 4 * 8 * 7
    table = torch.zeros(2, 3, dtype=torch.int32)
    with_table = count(lambda: ops.decode_attention(q, cache, cache, seqlens, slot_table=table), backward=False)
    assert with_table == 4 * 2 * 4 * 8 * 3
    assert count(lambda: ops.linear(torch.randn(3, 8), torch.randn(9, 8)), backward=False) == 2 * 27 * 8
    assert count(lambda: ops.linear_topk(torch.randn(3, 8), torch.randn(9, 8), 2).values, backward=False) == 2 * 27 * 8
    lse = torch.zeros(2, 4, 1)
    weights = lambda: ops.attention_weights(q.requires_grad_(), cache, lse)  # noqa: E731
    assert count(weights, backward=False) == 2 * 2 * 4 * 7 * 8
    assert count(weights, backward=True) == 3 * 2 * 2 * 4 * 7 * 8


def test_every_op_with_products_has_a_formula() -> None:
    without = {name for name in _dispatch.OPS if name.startswith(("add_layer_norm", "embedding", "rotary"))}
    assert _flops.FORMULAS.keys() == _dispatch.OPS.keys() - without


@pytest.mark.slow  # the ops look for a counter in each call, and of the other tests some run in either order
@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "fastformer.ops"])
def test_the_counter_may_be_imported_before_or_after(first: str) -> None:
    second = {"torch.utils.flop_counter": "fastformer.ops", "fastformer.ops": "torch.utils.flop_counter"}[first]
    code = f"""
import sys, {first}
assert "{second}" not in sys.modules
import {second}, torch
counter, x = torch.utils.flop_counter.FlopCounterMode(display=False), torch.randn(1, 3, 2, 4)
fastformer.ops.attention(x, x, x)
with counter:
    fastformer.ops.attention(x, x, x)
assert counter.get_total_flops() == 4 * 3 * 3 * 2 * 4
"""
    subprocess.run([sys.executable, "-c", code], check=True)
