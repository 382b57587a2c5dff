"""The parameters of the small modules (embeddings, norms, feed-forward, loss) reach the right ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer.nn as fnn
from fastformer.ops import sinusoidal_positions
from tests.checks import keep_mask, keep_scale
from tests.nn.comparing import assert_same, compare, randomised

DOUBLE = {"dtype": torch.float64}
SEED = torch.tensor([3, 4])


@pytest.fixture
def fixed_seed(monkeypatch):
    monkeypatch.setattr("fastformer.ops._dropout.draw_seed", lambda device: SEED)


def drop(x, p):
    return (x.flatten(0, -2) * keep_mask(SEED, p, x.flatten(0, -2).shape[0], x.shape[-1])[0] * keep_scale(p)).view_as(x)


def test_embedding_equals_torch():
    ours, theirs = fnn.Embedding(9, 6, padding_idx=2, **DOUBLE), nn.Embedding(9, 6, padding_idx=2, **DOUBLE)
    ids = torch.tensor([[1, 2, 8], [2, 1, 1]])
    compare(ours, theirs, lambda: ours(ids), lambda: theirs(ids), [])


def test_embedding_in_one_pass(fixed_seed):
    position = fnn.PositionalEncoding(6, 5, kind="learned", **DOUBLE)
    module = randomised(fnn.Embedding(9, 6, padding_idx=2, scale=3.0, dropout=0.25, position=position, **DOUBLE))
    ids, positions = torch.tensor([[1, 2, 8], [2, 1, 1]]), torch.tensor([[4, 0, 1], [3, 3, 2]])
    for given in (None, positions):
        rows = module.weight[ids] * 3.0 * (ids != 2)[..., None]
        expected = rows + position.table[torch.arange(3) if given is None else given]
        module.train()
        assert_same(module(ids, given), drop(expected, 0.25), "training")
        module.eval()
        assert_same(module(ids, given), expected, "evaluation")
    with pytest.raises(ValueError, match=r"\bpositions\b"):
        module(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\bmax_norm\b"):
        fnn.Embedding(9, 6, sparse=True)


def test_atomics_are_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr("fastformer.nn.embedding.embedding", lambda *args, **options: seen.append(options["atomics"]))
    fnn.Embedding(9, 6)(torch.tensor([1])), fnn.Embedding(9, 6, atomics=True)(torch.tensor([1]))
    assert seen == [False, True]


@pytest.mark.parametrize("kind", ["interleaved", "concatenated"])
def test_sinusoids_are_those_of_the_function(kind):
    table = fnn.PositionalEncoding(8, 11, kind=kind, **DOUBLE).table
    assert torch.equal(table, sinusoidal_positions(11, 8, kind, **DOUBLE))


@pytest.mark.parametrize("kind", ["interleaved", "concatenated", "learned"])
def test_positional_encoding_adds_its_table(kind):
    module = fnn.PositionalEncoding(6, 5, kind=kind, batch_first=True, **DOUBLE)
    x = torch.randn(2, 4, 6, **DOUBLE)
    assert_same(module(x), x + module.table[:4], "batch first")
    positions = torch.tensor([[3, 0, 1, 2], [1, 1, 4, 0]])
    assert_same(module(x, positions), x + module.table[positions], "given positions")
    assert_same(module(x[0]), x[0] + module.table[:4], "unbatched")
    module.batch_first = False
    assert_same(module(x.transpose(0, 1)), (x + module.table[:4]).transpose(0, 1), "sequence first")
    module.dropout = 1.0
    assert not module(x.transpose(0, 1)).any() and module.eval()(x.transpose(0, 1)).any(), "dropout is for training"
    assert bool(list(module.parameters())) == (kind == "learned") == ("table" in module.state_dict())
    with pytest.raises(ValueError, match=r"\bmax_len\b"):
        module(torch.zeros(6, 1, 6))
    with pytest.raises(ValueError, match=r"\bkind\b"):
        fnn.PositionalEncoding(6, kind="sine")


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_norm_equals_torch(options):
    ours, theirs = fnn.AddLayerNorm(6, 1e-3, **options, **DOUBLE), nn.LayerNorm(6, 1e-3, **options, **DOUBLE)
    compare(ours, randomised(theirs), ours, theirs, [torch.randn(2, 3, 6, **DOUBLE)])


@pytest.mark.parametrize("rms_norm", [False, True])
def test_the_norm_fuses_dropout_and_addition(rms_norm, fixed_seed):
    module = randomised(fnn.AddLayerNorm(6, dropout=0.5, rms_norm=rms_norm, **DOUBLE))
    x, residual = torch.randn(4, 6, **DOUBLE), torch.randn(4, 6, **DOUBLE)

    def norm(x):
        if rms_norm:
            return F.rms_norm(x, (6,), module.weight, module.eps)
        return F.layer_norm(x, (6,), module.weight, module.bias, module.eps)

    for p, total in ((0.5, residual + drop(x, 0.5)), (0.0, residual + x)):
        module.train(p > 0)
        y, out = module(x, residual)
        assert_same(out, total, "sum")
        assert_same(y, norm(total), "norm")
    y, out = module(x, residual, dropout_p=0.25)
    assert_same(out, residual + drop(x, 0.25), "given probability")
    with pytest.raises(ValueError, match=r"\bnormalized_shape\b"):
        fnn.AddLayerNorm([3, 6])


@pytest.mark.parametrize(
    "activation",
    ["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu_tanh", "geglu", pytest.param(F.mish, id="callable")],
)
def test_feed_forward(activation, fixed_seed):
    module = randomised(fnn.FeedForward(6, 10, activation, dropout=0.25, **DOUBLE))
    x = torch.randn(2, 3, 6, **DOUBLE)
    inner = module.linear1(x)
    if activation in ("swiglu", "geglu_tanh", "geglu"):
        gate, up = inner.chunk(2, -1)
        approximate = "tanh" if activation == "geglu_tanh" else "none"
        hidden = (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate=approximate)) * up
    else:
        tanh = lambda t: F.gelu(t, approximate="tanh")  # noqa: E731
        hidden = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": tanh, "silu": F.silu}.get(activation, activation)(inner)
    assert hidden.shape[-1] == 10
    if isinstance(activation, str) and activation != "geglu":  # whose modules are called
        assert_same(module(x), module.linear2(drop(hidden, 0.25)), "training")
    module.eval()
    assert_same(module(x), module.linear2(hidden), "evaluation")
    with module.linear2.register_forward_hook(lambda *_: None):  # each module is called
        assert_same(module(x), module.linear2(hidden), "a hook")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction):
    options = {"ignore_index": 3, "label_smoothing": 0.2, "reduction": reduction}
    ours = randomised(fnn.LinearCrossEntropy(6, 9, **options, **DOUBLE))
    theirs = randomised(nn.Linear(6, 9, **DOUBLE))
    target = torch.tensor([[1, 3, 8], [0, 0, 3]])

    def plain(x):
        return F.cross_entropy(theirs(x).transpose(1, 2), target, **options)

    compare(ours, theirs, lambda x: ours(x, target), plain, [torch.randn(2, 3, 6, **DOUBLE)])


def test_linear_cross_entropy_smooths_and_keeps_logits_small():
    module = randomised(fnn.LinearCrossEntropy(6, 9, label_smoothing=0.2, smooth_others=True, z_loss=0.1, **DOUBLE))
    x, target = torch.randn(5, 6, **DOUBLE), torch.tensor([1, 4, 8, 0, 2])
    logits = F.linear(x, module.weight, module.bias)
    wanted = torch.full((5, 9), 0.2 / 8, **DOUBLE).scatter(1, target[:, None], 0.8)
    expected = -(wanted * logits.log_softmax(-1)).sum(-1) + 0.1 * logits.logsumexp(-1) ** 2
    assert_same(module(x, target), expected.mean(), "loss")


def test_rotary_tables_turn_by_the_position():
    table = fnn.RotaryEmbedding(4, 10, base=100.0, **DOUBLE)
    assert not table.state_dict()
    angles = torch.arange(10, **DOUBLE)[:, None] * torch.tensor([1.0, 0.1], **DOUBLE)
    assert_same(table.cos, angles.cos(), "cos")
    assert_same(table.sin, angles.sin(), "sin")
