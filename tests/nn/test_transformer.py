"""Compares layers and stacks with their torch.nn counterparts; tests the fusion of residual additions."""

from __future__ import annotations

import copy
import itertools
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer.nn as fnn
from fastformer.nn import SequenceLayout
from fastformer.nn.layers import ResidualStream
from fastformer.nn.masks import is_causal_mask
from tests.checks import keep_mask, keep_scale
from tests.covering import covering
from tests.nn.comparing import FF, SIZES, E, H, assert_same, banded, compare, padding_mask, pair, randomised

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

N, L, S = 3, 5, 6
DOUBLE = {"dtype": torch.float64}
both_orders = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
PADDING = padding_mask([5, 3, 2], L)
MEMORY_PADDING = padding_mask([6, 1, 4], S)
# (mask of the sequence, its padding, is_causal)
MASKS = {
    "none": (None, None, False),
    "padding": (None, PADDING, False),
    "causal float": (nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64), None, False),
    "causal bool": (banded(L, None, 0), None, False),
    "causal with hint": (nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64), None, True),
    "causal and padding": (banded(L, None, 0), PADDING, False),
    "causal with hint and padding": (banded(L, None, 0), PADDING, True),
    "per head and padding": (banded(L, 2, 2).repeat(N * H, 1, 1), PADDING, False),
}


def tensor(seqlen, batch_first):
    return torch.randn(*((N, seqlen) if batch_first else (seqlen, N)), E, **DOUBLE)


def real_positions(padding, batch_first):
    if padding is None:
        return None
    real = ~padding[..., None]
    return real if batch_first else real.transpose(0, 1)


def inputs_of(kind, batch_first=True):
    return [tensor(seqlen, batch_first) for seqlen in ((L,) if kind == "encoder" else (L, S))]


def masks_of(kind, name, depth):
    mask, padding, is_causal = MASKS[name]
    if kind == "encoder":
        return {"mask" if depth else "src_mask": mask, "src_key_padding_mask": padding, "is_causal": is_causal}
    own = {"tgt_mask": mask, "tgt_key_padding_mask": padding, "tgt_is_causal": is_causal}
    if padding is None:
        return own | {"memory_mask": banded(S, 3, 3)[:L]}
    return own | {"memory_key_padding_mask": MEMORY_PADDING}


KINDS = [("encoder", 0, None), ("encoder", 3, fnn.AddLayerNorm), ("decoder", 0, None), ("decoder", 2, nn.LayerNorm)]


@pytest.mark.parametrize(
    "kind, depth, final, name, batch_first, norm_first", covering(KINDS, [*MASKS], [True, False], [False, True])
)
def test_layers_and_stacks_equal_torch(kind, depth, final, name, batch_first, norm_first):
    ours, theirs = pair(kind, depth, final, batch_first=batch_first, norm_first=norm_first)
    masks, real = masks_of(kind, name, depth), real_positions(MASKS[name][1], batch_first)
    run = lambda module: lambda *x: module(*x, **masks)  # noqa: E731
    compare(ours, theirs, run(ours), run(theirs), inputs_of(kind, batch_first), real)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        given, keep = inputs_of(kind, batch_first), True if real is None else real
        assert_same(run(ours)(*given) * keep, run(theirs)(*given) * keep, "evaluation")


@pytest.mark.parametrize("batch_first, norm_first, bias", covering(*[[True, False]] * 3))
def test_transformer_equals_torch(batch_first, norm_first, bias):
    args = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias, **SIZES}
    ours, theirs = (module.Transformer(E, H, 2, 2, FF, **args) for module in (fnn, nn))
    hidden = torch.zeros(N, L, dtype=torch.bool)
    hidden[1, 2] = True  # which the tokens behind it would see
    options = {
        "tgt_mask": ours.generate_square_subsequent_mask(L, dtype=torch.float64),
        "src_key_padding_mask": torch.zeros(N, S, **DOUBLE).masked_fill(MEMORY_PADDING, float("-inf")),
        "memory_key_padding_mask": MEMORY_PADDING,
        "tgt_key_padding_mask": torch.zeros(N, L, **DOUBLE).masked_fill(hidden, float("-inf")),
    }
    run, real = lambda module: lambda x, y: module(x, y, **options), real_positions(hidden, batch_first)
    given = [tensor(S, batch_first), tensor(L, batch_first)]
    compare(ours, randomised(theirs), run(ours), run(theirs), given, real)


def test_unbatched_equals_torch():
    ours, theirs = (module.Transformer(E, H, 1, 1, FF, **SIZES) for module in (fnn, nn))
    compare(ours, randomised(theirs), ours, theirs, [torch.randn(S, E, **DOUBLE), torch.randn(L, E, **DOUBLE)])


ACTIVATIONS = ["relu", "gelu", F.gelu, nn.ReLU(), nn.GELU(), nn.GELU("tanh"), F.silu, nn.SiLU(), F.mish, nn.Tanh()]
OPTIONS = [
    *((kind, {"layer_norm_eps": 0.3}) for kind in ("encoder", "decoder")),
    *(("encoder", {"activation": activation}) for activation in ACTIVATIONS),
]


def option_name(value: object) -> str:
    """Returns the name of a case, which holds no address: the processes of a run compare the names of their tests."""
    function = value.get("activation") if isinstance(value, dict) else None
    return getattr(function, "__name__", str(value))


@both_orders
@pytest.mark.parametrize("kind, options", OPTIONS, ids=option_name)
def test_options_of_layers_equal_torch(kind, options, norm_first):
    ours, theirs = pair(kind, norm_first=norm_first, **options)
    compare(ours, theirs, ours, theirs, inputs_of(kind))


@both_orders
@pytest.mark.parametrize("options", [{"eps": 0.3}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("final", [fnn.AddLayerNorm, nn.LayerNorm])
def test_a_final_norm_keeps_its_settings(final, options, norm_first):
    ours, theirs = pair("encoder", 2, final, options, norm_first=norm_first)
    compare(ours, theirs, ours, theirs, inputs_of("encoder"))


@both_orders
@pytest.mark.parametrize("which", ["tgt", "memory"])
def test_causal_cross_attention_equals_torch(which, norm_first):
    """memory_is_causal concerns only the memory, and tgt_is_causal only the target."""
    ours, theirs = pair("decoder", norm_first=norm_first)
    options = {f"{which}_mask": MASKS["causal float"][0], f"{which}_is_causal": True}
    run = lambda module: lambda x, y: module(x, y, **options)  # noqa: E731
    compare(ours, theirs, run(ours), run(theirs), [tensor(L, True), tensor(L, True)])


ATTENTIONS = [{}, {"bias": False}, {"kdim": 7, "vdim": 9}, {"add_bias_kv": True}]
MODULES = [
    ("Transformer", (E, H, 2, 3, FF), {}),
    ("TransformerDecoderLayer", (E, H), {}),
    *(("MultiheadAttention", (E, H), options) for options in ATTENTIONS),
]


@pytest.mark.parametrize("name, args, options", MODULES, ids=str)
def test_same_seed_gives_torchs_weights(name, args, options):
    states = []
    for library in (fnn, nn):
        torch.manual_seed(5)
        states.append(getattr(library, name)(*args, **options).state_dict())
    ours, theirs = states
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_dropout_is_in_the_same_places_as_in_torch(monkeypatch):
    """Each dropout has a different probability; the expected value is computed by hand from the same seed."""
    monkeypatch.setattr("fastformer.ops._dropout.draw_seed", lambda device: torch.tensor([7, 9]))
    seed = torch.tensor([7, 9])
    layer = fnn.TransformerDecoderLayer(E, H, FF, norm_first=True, batch_first=True, **DOUBLE)
    layer.dropout.p, layer.dropout1.p, layer.dropout2.p, layer.dropout3.p = 0.1, 0.2, 0.3, 0.0
    layer.self_attn.dropout, layer.multihead_attn.dropout = 0.5, 0.6
    stack = randomised(fnn.TransformerDecoder(layer, 2, fnn.AddLayerNorm(E, **DOUBLE)))
    for module in stack.layers:
        module.dropout3.p = 0.4
    # A lone layer's last dropout isn't part of a norm, so p = 0.4 shows in the stack alone.
    x, memory = tensor(L, True), tensor(S, True)

    def drop(x, p):
        rows = x.flatten(0, -2)
        return (rows * keep_mask(seed, p, *rows.shape)[0] * keep_scale(p)).view_as(x)

    def attend(module, q, k, mask=None):
        wq, wk, wv = module.in_proj_weight.chunk(3)
        bq, bk, bv = module.in_proj_bias.chunk(3)
        heads = lambda t: t.unflatten(-1, (H, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(F.linear(q, wq, bq)), heads(F.linear(k, wk, bk)), heads(F.linear(k, wv, bv))
        scores = q @ k.mT / (E // H) ** 0.5
        weights = (scores if mask is None else scores.masked_fill(mask, float("-inf"))).softmax(-1)
        kept = keep_mask(seed, module.dropout, weights.shape[-2], weights.shape[-1], N * H).view_as(weights)
        out = (weights * kept * keep_scale(module.dropout)) @ v
        return module.out_proj(out.transpose(1, 2).flatten(-2))

    assert stack.norm is not None
    expected = x
    for module in stack.layers:
        y = module.norm1(expected)
        expected = expected + drop(attend(module.self_attn, y, y, banded(L, None, 0)), 0.2)
        expected = expected + drop(attend(module.multihead_attn, module.norm2(expected), memory), 0.3)
        y = drop(module.linear1(module.norm3(expected)).relu(), 0.1)
        expected = expected + drop(module.linear2(y), 0.4)
    assert_same(stack(x, memory, tgt_is_causal=True), stack.norm(expected), "with dropout")
    stack.eval()
    assert (stack(x, memory, tgt_is_causal=True) - stack.norm(expected)).abs().max() > 0.1
    # Post-norm.
    layer.norm_first = False
    layer.dropout3.p = 0.4
    y = layer.norm1(x + drop(attend(layer.self_attn, x, x, banded(L, None, 0)), 0.2))
    y = layer.norm2(y + drop(attend(layer.multihead_attn, y, memory), 0.3))
    y = layer.norm3(y + drop(layer.linear2(drop(layer.linear1(y).relu(), 0.1)), 0.4))
    assert_same(layer(x, memory, tgt_is_causal=True), y, "post-norm with dropout")


FINALS = [(0, None), (2, None), *((2, norm) for norm in (fnn.AddLayerNorm, nn.LayerNorm, nn.RMSNorm))]


@pytest.mark.parametrize("kind, depth, final, norm_first", covering(["encoder", "decoder"], FINALS, [False, True]))
def test_dropout_of_everything_adds_nothing(kind, depth, final, norm_first):
    """Each dropout of p = 1, in a single layer and in the last one of a stack, sets its sub-layer's output to zero."""
    (module, _), given = pair(kind, depth, final, norm_first=norm_first), inputs_of(kind)
    sub_layers = ["self_attn.out_proj", *(["multihead_attn.out_proj"] if kind == "decoder" else []), "linear2"]
    whole = module(*given)
    for i, name in enumerate(sub_layers, 1):
        dropped, silent = copy.deepcopy(module), copy.deepcopy(module)
        last = lambda m: m.layers[-1] if depth else m  # noqa: E731
        getattr(last(dropped), f"dropout{i}").p = 1.0
        for parameter in last(silent).get_submodule(name).parameters():
            nn.init.zeros_(parameter)
        expected = silent(*given)
        assert_same(dropped(*given), expected, f"dropout{i}")
        assert (expected - whole).abs().max() > 1e-3, f"{name} made no difference"
        assert_same(dropped.eval()(*given), whole, f"dropout{i} in evaluation")


def test_the_constructors_dropouts_arrive():
    layer = fnn.TransformerDecoderLayer(E, H, FF, 0.3, attention_dropout=0.1, activation_dropout=0.2)
    assert (layer.self_attn.dropout, layer.multihead_attn.dropout, layer.dropout.p) == (0.1, 0.1, 0.2)
    assert layer.dropout1.p == layer.dropout2.p == layer.dropout3.p == 0.3
    encoder = fnn.TransformerEncoderLayer(E, H, FF, 0.3, bias=True, attention_bias=False)
    assert encoder.self_attn.in_proj_bias is None and encoder.self_attn.out_proj.bias is None
    assert encoder.linear1.bias is not None and encoder.self_attn.dropout == encoder.dropout.p == 0.3


def test_each_bias_follows_its_own_option():
    for options in itertools.product((True, False), *[(None, True, False)] * 3):
        named = dict(zip(("bias", "attention_bias", "norm_bias", "linear1_bias"), options, strict=True))
        layer = fnn.TransformerDecoderLayer(E, H, FF, **named)
        expected = {"linear2": options[0]}
        groups = (("self_attn.out_proj", "multihead_attn.out_proj"), ("norm1", "norm2", "norm3"), ("linear1",))
        for names, own in zip(groups, options[1:], strict=True):
            expected |= dict.fromkeys(names, options[0] if own is None else own)
        found = {name: layer.get_submodule(name).bias is not None for name in expected}
        assert found == expected, named
        assert (layer.self_attn.in_proj_bias is not None) == found["self_attn.out_proj"]
    with pytest.raises(ValueError, match="linear1_bias"):
        fnn.TransformerEncoderLayer(E, H, FF, linear1_bias=False, experts={"num_experts": 2, "num_experts_per_tok": 1})


def test_every_addition_joins_a_norm(monkeypatch):
    """In a pre-norm stack with a final norm, only add_layer_norm writes sums."""
    stack, _ = pair("encoder", 3, fnn.AddLayerNorm, norm_first=True)

    monkeypatch.setattr(ResidualStream, "value", Mock(side_effect=AssertionError("an addition of its own")))
    stack(tensor(L, True))


def test_layers_with_a_custom_forward_get_plain_tensors():
    args = {"norm_first": True, "batch_first": True, **SIZES}
    stack, x = pair("encoder", 2, norm_first=True)[0], tensor(L, True)

    class Doubled(fnn.TransformerEncoderLayer):
        # A user's subclass has torch.nn's signature, without what ours adds.
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):  # type: ignore[override]
            return 2 * super().forward(src, src_mask, src_key_padding_mask, is_causal)

    doubled = fnn.TransformerEncoder(Doubled(E, H, FF, **args), 2)
    doubled.load_state_dict(stack.state_dict())
    assert_same(doubled(x), 2 * stack.layers[1](2 * stack.layers[0](x)), "a subclass")
    theirs = fnn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, FF, **args), 2, nn.LayerNorm(E, **DOUBLE))
    assert theirs.norm is not None
    theirs.load_state_dict({**stack.state_dict(), **{f"norm.{k}": v for k, v in theirs.norm.state_dict().items()}})
    assert_same(theirs(x, MASKS["causal bool"][0]), theirs.norm(stack(x, is_causal=True)), "torch.nn's layers")


@both_orders
def test_checkpointing_changes_nothing_but_runs_layers_again(norm_first, calls_of):
    torch.manual_seed(0)
    stack, _ = pair("decoder", 2, fnn.AddLayerNorm, norm_first=norm_first, dropout=0.2)
    x, memory = tensor(L, True).requires_grad_(), tensor(S, True)
    dy = torch.randn_like(x)
    results: list[tuple[torch.Tensor, ...]] = []
    runs = [calls_of(layer, "_feed_forward") for layer in stack.layers]

    def taken() -> list[int]:
        counts = [*map(len, runs)]
        for each in runs:
            each.clear()
        return counts

    for checkpointing in (False, True):
        stack.gradient_checkpointing = checkpointing
        torch.manual_seed(11)
        out = stack(x, memory, tgt_is_causal=True)
        results.append((out, *torch.autograd.grad(out, [x, *stack.parameters()], dy)))
        assert taken() == ([2, 2] if checkpointing else [1, 1])
        stack.eval()(x, memory), stack.train()
        assert taken() == [1, 1], "in evaluation there is no backward pass to save memory for"
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@both_orders
def test_packed_equals_padded(norm_first):
    model = randomised(fnn.Transformer(E, H, 2, 2, FF, norm_first=norm_first, batch_first=True, **SIZES))
    source = SequenceLayout.packed(torch.tensor([6, 1, 4]), 6)
    target = SequenceLayout.packed(torch.tensor([2, 5, 3]), 5)
    layouts = {
        "layout": SequenceLayout.padded(target.seqlens, 5),
        "memory_layout": SequenceLayout.padded(source.seqlens, 6),
    }
    twin = copy.deepcopy(model)
    compare(
        model, twin,
        lambda x, y: model(x, y, tgt_is_causal=True, layout=target, memory_layout=source),
        lambda x, y: target.pack(twin(source.unpack(x), target.unpack(y), tgt_is_causal=True, **layouts)),
        [torch.randn(11, E, **DOUBLE), torch.randn(10, E, **DOUBLE)],
    )  # fmt: skip


def test_causal_masks_are_recognised():
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    assert is_causal_mask(mask) and is_causal_mask(banded(L, None, 0))
    assert not is_causal_mask(banded(L, 2, 0)) and not is_causal_mask(mask + 1) and not is_causal_mask(None)
    assert not is_causal_mask(mask[:3]) and not is_causal_mask(mask[None])
    assert not is_causal_mask(mask.clone().requires_grad_())


@both_orders
@pytest.mark.parametrize("options", [{"num_kv_heads": 1}, {"norm": "rms"}, {"activation": "swiglu"}], ids=str)
def test_further_options_have_gradients_everywhere(options, norm_first):
    layer = fnn.TransformerDecoderLayer(E, H, FF, norm_first=norm_first, batch_first=True, **SIZES, **options)
    out = layer(tensor(L, True), tensor(S, True), tgt_is_causal=True)
    grads = torch.autograd.grad(out, list(layer.parameters()), torch.randn_like(out))
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads)


def test_a_norm_that_is_not_known():
    with pytest.raises(ValueError, match=r"\bnorm\b"):
        fnn.TransformerEncoderLayer(E, H, norm="batch")
