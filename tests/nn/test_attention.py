"""Compares MultiheadAttention with torch.nn's, and tests its extensions."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import fastformer.nn as fnn
import fastformer.nn.attention as module_under_test
from fastformer.nn import SequenceLayout
from tests.covering import each
from tests.nn.comparing import assert_same, banded, compare, padding_mask, randomised

N, L, S, E, H = 3, 5, 6, 12, 3
DOUBLE = {"dtype": torch.float64}


def pair(batch_first=True, **options):
    """Makes fastformer's and torch.nn's modules with the same random weights."""
    ours, theirs = (each.MultiheadAttention(E, H, batch_first=batch_first, **options, **DOUBLE) for each in (fnn, nn))
    ours.load_state_dict(randomised(theirs).state_dict())
    return ours, theirs


def inputs(batch_first=True, kdim=E, vdim=E):
    shapes = [(N, L, E), (N, S, kdim), (N, S, vdim)]
    if not batch_first:
        shapes = [(b, a, c) for a, b, c in shapes]
    return [torch.randn(*shape, **DOUBLE) for shape in shapes]


def masks():
    """Returns (attn_mask, key_padding_mask) of each kind; every query sees at least one key."""
    padding = padding_mask([6, 4, 2], S)
    added_padding = torch.zeros(N, S, **DOUBLE).masked_fill(padding, float("-inf"))
    pattern, per_head = torch.rand(L, S) < 0.4, torch.rand(N * H, L, S) < 0.4
    pattern[:, :2] = per_head[:, :, :2] = False
    added, added_per_head = torch.randn(L, S, **DOUBLE), torch.randn(N * H, L, S, **DOUBLE)
    return {
        "none": (None, None),
        "bool padding": (None, padding),
        "float padding": (None, added_padding + 0.1),
        "bool": (pattern, None),
        "bool per head": (per_head, None),
        "additive": (added, None),
        "additive per head": (added_per_head, None),
        "bool and bool padding": (pattern, padding),
        "per head and bool padding": (per_head, padding),
        "additive and float padding": (added, added_padding),
    }


@each("kind, batch_first", itertools.product(masks(), [True, False]))
def test_equals_torch(kind, batch_first):
    ours, theirs = pair(batch_first)
    attn_mask, key_padding_mask = masks()[kind]

    def run(module, need_weights):
        return lambda q, k, v: module(q, k, v, key_padding_mask, need_weights, attn_mask)[0]

    compare(ours, theirs, run(ours, False), run(theirs, False), inputs(batch_first))
    ours.zero_grad(), theirs.zero_grad()
    compare(ours, theirs, run(ours, True), run(theirs, True), inputs(batch_first))


@each(
    "kind, options",
    itertools.product(
        ["none", "bool and bool padding", "additive and float padding"],
        [
            {"bias": False},
            {"kdim": 7, "vdim": 10},
            {"kdim": 7, "bias": False},
            {"add_bias_kv": True},
            {"add_zero_attn": True},
            {"add_bias_kv": True, "add_zero_attn": True},
        ],
    ),
)
def test_constructor_options_equal_torch(options, kind):
    ours, theirs = pair(batch_first=False, **options)
    attn_mask, key_padding_mask = masks()[kind]
    tensors = inputs(False, options.get("kdim", E), options.get("vdim", E))

    def run(module):
        return lambda q, k, v: module(q, k, v, key_padding_mask, False, attn_mask)[0]

    compare(ours, theirs, run(ours), run(theirs), tensors)


@pytest.mark.parametrize("same", ["all", "key and value", "query and key"])
def test_shared_inputs_equal_torch(same):
    ours, theirs = pair()
    x, y = torch.randn(N, L, E, **DOUBLE), torch.randn(N, L, E, **DOUBLE)

    def run(module):
        def call(x, y):
            triple = {"all": (x + y,) * 3, "key and value": (x, y, y), "query and key": (x, x, y)}[same]
            return module(*triple, need_weights=False)[0]

        return call

    compare(ours, theirs, run(ours), run(theirs), [x, y])


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", ["none", "bool and bool padding", "additive per head"])
def test_weights_equal_torch_with_their_gradient(kind, average):
    ours, theirs = pair()
    attn_mask, key_padding_mask = masks()[kind]
    q, k, v = inputs()
    results = []
    for module in (ours, theirs):
        query = q.clone().requires_grad_()
        _, weights = module(query, k, v, key_padding_mask, True, attn_mask, average)
        results.append((weights, query))
    dy = torch.randn_like(results[0][0])
    assert_same(results[0][0], results[1][0], "weights")
    for weights, _ in results:
        weights.backward(dy)
    assert_same(results[0][1].grad, results[1][1].grad, "query gradient through the weights")


def test_unbatched_equals_torch():
    for batch_first in (True, False):
        ours, theirs = pair(batch_first)
        q, k = torch.randn(L, E, **DOUBLE), torch.randn(S, E, **DOUBLE)
        padding = padding_mask([4], S)[0]
        for average in (True, False):
            out, weights = ours(q, k, k, padding, average_attn_weights=average)
            expected, expected_weights = theirs(q, k, k, padding, average_attn_weights=average)
            assert_same(out, expected, "output")
            assert_same(weights, expected_weights, "weights")


def test_causal_hint_takes_the_path_without_a_mask(calls_of):
    ours, theirs = pair()
    calls = calls_of(module_under_test, "attention")
    x = torch.randn(N, L, E, **DOUBLE)
    for mask in (nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64), banded(L, None, 0)):
        out, _ = ours(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)
        assert_same(out, theirs(x, x, x, need_weights=False, attn_mask=mask)[0], "output")
        assert calls[-1].options["attn_mask"] is None and calls[-1].options["window_size"] == (None, 0)
    # Padding along with it costs lengths, or a (batch, 1, 1, seqlen) mask where it has holes, and no triangle.
    padding = padding_mask([5, 3, 2], L)
    holes = padding.clone()
    holes[0, 1] = True
    for mask, shape in ((padding, None), (holes, (N, 1, 1, L))):
        out, _ = ours(x, x, x, mask, need_weights=False, attn_mask=banded(L, None, 0), is_causal=True)
        expected, _ = theirs(x, x, x, mask, need_weights=False, attn_mask=banded(L, None, 0))
        assert_same(out, expected, "output")
        used = calls[-1].options["attn_mask"]
        assert shape is None if used is None else used.shape == shape


def test_causal_between_two_lengths_starts_at_the_top_left():
    ours, theirs = pair()
    q, k, v = inputs()
    mask = torch.ones(L, S, dtype=torch.bool).triu(1)
    expected, _ = theirs(q, k, v, need_weights=False, attn_mask=mask)
    assert_same(ours(q, k, v, need_weights=False, attn_mask=mask, is_causal=True)[0], expected, "output")


def test_a_query_with_nothing_to_attend_to_gives_zeros():
    ours = fnn.MultiheadAttention(E, H, batch_first=True, bias=False, **DOUBLE)
    x = torch.randn(2, L, E, **DOUBLE, requires_grad=True)
    padding = padding_mask([0, 3], L)
    for need_weights in (False, True):
        out, weights = ours(x, x, x, padding, need_weights)
        assert (out[0] == 0).all() and (out[1] != 0).all()
        assert weights is None or (weights[0] == 0).all()
        (grad,) = torch.autograd.grad(out, x, torch.randn_like(out))
        assert grad.isfinite().all() and (grad[0] == 0).all() and (grad[1] != 0).any()


def test_shared_kv_heads_equal_repeated_heads():
    ours = randomised(fnn.MultiheadAttention(E, 6, num_kv_heads=2, batch_first=True, **DOUBLE))
    theirs = fnn.MultiheadAttention(E, 6, batch_first=True, **DOUBLE)
    assert ours.in_proj_weight.shape == (E + 2 * 4, E)
    with torch.no_grad():
        for name in ("in_proj_weight", "in_proj_bias"):
            fused = getattr(ours, name)
            q, k, v = fused.split([E, 4, 4])
            # Query head h reads kv head h // 3: each kv head three times in a row.
            k, v = (x.unflatten(0, (2, 2)).repeat_interleave(3, 0).flatten(0, 1) for x in (k, v))
            getattr(theirs, name).copy_(torch.cat([q, k, v]))
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x = torch.randn(N, L, E, **DOUBLE)
    assert_same(ours(x, x, x, need_weights=False)[0], theirs(x, x, x, need_weights=False)[0], "self-attention")
    y = torch.randn(N, S, E, **DOUBLE)
    assert_same(ours(x, y, y, need_weights=False)[0], theirs(x, y, y, need_weights=False)[0], "cross-attention")


@each("is_causal, window", itertools.product([False, True], [(1, 1), (2, 0), (0, None), (None, 1)]))
def test_window_equals_a_banded_mask(window, is_causal):
    ours = randomised(fnn.MultiheadAttention(E, H, window_size=window, batch_first=True, **DOUBLE))
    plain = nn.MultiheadAttention(E, H, batch_first=True, **DOUBLE)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(N, 9, E, **DOUBLE)
    mask = banded(9, *window) | (banded(9, None, 0) if is_causal else False)
    out, _ = ours(x, x, x, need_weights=False, is_causal=is_causal)
    assert_same(out, plain(x, x, x, attn_mask=mask, need_weights=False)[0], "output")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"window_size": (2, 1)}], ids=str)
def test_packed_equals_padded(is_causal, options):
    module = randomised(fnn.MultiheadAttention(E, H, batch_first=True, **options, **DOUBLE))
    lengths = torch.tensor([4, 1, 7])
    packed, padded = SequenceLayout.packed(lengths, 7), SequenceLayout.padded(lengths, 7)
    twin = copy.deepcopy(module)

    def of_padded(x):
        full = packed.unpack(x)
        return packed.pack(twin(full, full, full, need_weights=False, is_causal=is_causal, layout=padded)[0])

    def of_packed(x):
        return module(x, x, x, need_weights=False, is_causal=is_causal, layout=packed)[0]

    compare(module, twin, of_packed, of_padded, [torch.randn(12, E, **DOUBLE)])


def test_packed_cross_attention_equals_padded():
    module = randomised(fnn.MultiheadAttention(E, H, batch_first=True, **DOUBLE))
    q_layout = SequenceLayout.packed(torch.tensor([2, 5, 1]), 5)
    k_layout = SequenceLayout.packed(torch.tensor([6, 1, 3]), 6)
    q, k = torch.randn(8, E, **DOUBLE), torch.randn(10, E, **DOUBLE)
    out, _ = module(q, k, k, need_weights=False, layout=q_layout, memory_layout=k_layout)
    keys = k_layout.unpack(k)
    padded = SequenceLayout.padded(k_layout.seqlens, 6)
    expected, _ = module(q_layout.unpack(q), keys, keys, need_weights=False, memory_layout=padded)
    assert_same(out, q_layout.pack(expected), "output")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_only_on_the_distance(interleaved):
    module = randomised(fnn.MultiheadAttention(E, H, batch_first=True, bias=False, **DOUBLE))
    table = fnn.RotaryEmbedding(E // H, 50, interleaved=interleaved, **DOUBLE)
    x = torch.randn(2, 6, E, **DOUBLE)
    plain = module(x, x, x, need_weights=False, is_causal=True)[0]
    here = module(x, x, x, need_weights=False, is_causal=True, rotary=table())[0]
    positions = torch.arange(6).repeat(2, 1)
    same = module(x, x, x, need_weights=False, is_causal=True, rotary=table(positions))[0]
    later = module(x, x, x, need_weights=False, is_causal=True, rotary=table(positions + 17))[0]
    stretched = module(x, x, x, need_weights=False, is_causal=True, rotary=table(positions * 2))[0]
    assert_same(same, here, "given positions")
    assert_same(later, here, "shifted positions")
    assert (here - plain).abs().max() > 1e-3 and (stretched - here).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("heads", "options", "named"),
    [(5, {}, "embed_dim"), (6, {"num_kv_heads": 4}, "num_kv_heads"), (3, {"qk_norm": "heads"}, "qk_norm"),
     (3, {"head_dim": 0}, "head_dim")],
)  # fmt: skip
def test_impossible_attentions(heads, options, named):
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        fnn.MultiheadAttention(12, heads, **options)


X = torch.randn(N, L, E)
FLAT = {"layout": SequenceLayout.packed(torch.tensor([5, 5, 5]), 5)}


@each(
    "inputs, options, named",
    [
        ((X, X, X), {"attn_mask": torch.zeros(5, 4)}, "attn_mask"),
        ((X, X, X), {"attn_mask": torch.zeros(5, 5, dtype=torch.int64)}, "attn_mask"),
        ((X, X, X), {"key_padding_mask": torch.zeros(3, 4)}, "key_padding_mask"),
        ((X, X[..., :11], X[..., :11]), {}, ""),
        ((X, X[:2], X[:2]), {}, "batch"),
        ((X, None, None), {}, "cache"),
        ((X.flatten(0, 1),) * 3, FLAT, "need_weights"),
        ((X.flatten(0, 1), X.flatten(0, 1).clone(), X.flatten(0, 1)), {"need_weights": False, **FLAT}, "memory_layout"),
    ],
)
def test_impossible_calls(inputs, options, named):
    with pytest.raises(ValueError, match=rf"\b{named}"):
        fnn.MultiheadAttention(E, H, batch_first=True)(*inputs, **options)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_dropout_applies_only_in_training(packed):
    """If all weights are dropped, only the bias of the output projection remains."""
    module, plain = (fnn.MultiheadAttention(8, 2, dropout=p, batch_first=True, **DOUBLE) for p in (1.0, 0.0))
    plain.load_state_dict(randomised(module).state_dict())
    x, layout = torch.randn(2, 3, 8, **DOUBLE), None
    if packed:
        x, layout = x.flatten(0, 1), fnn.SequenceLayout.packed(torch.tensor([3, 3]), 3)
    run = lambda m: m(x, x, x, need_weights=False, layout=layout)[0]  # noqa: E731
    assert_same(run(module), module.out_proj.bias.expand_as(x), "training")
    assert_same(run(module.eval()), run(plain), "evaluation")


@pytest.mark.parametrize("average", [True, False])
def test_a_learned_mask_gets_gradients_from_the_weights(average):
    ours, theirs = pair()
    x = torch.randn(N, L, E, **DOUBLE)
    for shape in ((L, L), (N * H, L, L)):
        learned = torch.randn(shape, **DOUBLE).requires_grad_()
        grads = []
        for module in (ours, theirs):
            weights = module(x, x, x, attn_mask=learned, average_attn_weights=average)[1]
            grads.append(torch.autograd.grad((weights * torch.arange(L)).square().sum(), learned)[0])
        assert_same(grads[0], grads[1], "the mask's gradient")


def test_the_number_of_heads_is_read_in_each_call():
    for args in ([0, 0, 0], [0, 1, 1]):
        ours, theirs = pair()
        given = inputs()
        ours.num_heads = theirs.num_heads = 2
        out, weights = ours(*(given[i] for i in args), average_attn_weights=False)
        expected, expected_weights = theirs(*(given[i] for i in args), average_attn_weights=False)
        assert_same(out, expected, "output")
        assert_same(weights, expected_weights, "weights")
    ours.num_heads = 5
    with pytest.raises(ValueError, match=r"\bembed_dim\b"):
        ours(given[0], given[0], given[0])
